"""rows_by_table: programs that compute with blocks that memory names have few rows.

In: attention whose programs have 128 queries each, and blocks of keys from a table.
Out: programs of 64 queries. This is for gradients on GPUs. Cotangents of the named
blocks are sums over programs in an order known only at run time (`sorted_steps.py`), so
the rows of a program are those of a step there, and nothing can cut them later. With
128 rows, sums of two blocks of keys and what is computed of a step do not fit the
registers of two warpgroups; with 64 they do. Where programs need no order, `grow`
merges the neighbours again.
"""

from collections.abc import Mapping, Sequence

from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.ir.rewrite import producers_of
from pallasite.ir.roles import Dot, Pipeline
from pallasite.passes.analysis.memory import is_from_memory
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.choose_blocks import blocks_of, is_last
from pallasite.passes.schedule.gpu_blocks import SHORT_TILE
from pallasite.target import Gpu

Made = Mapping[Value, Op]


def rows_by_table(kernel: Kernel, chip: Gpu) -> Kernel:
    """Programs of few rows, where memory names blocks of products of products."""
    blocks, made = blocks_of(kernel), producers_of(kernel.body)
    if blocks is None or not _names_blocks(kernel, made):
        return kernel
    if not _is_chain(blocks.dots, made):
        return kernel
    rows = [d for d in blocks.free if not is_last(blocks, d)]
    few = max(SHORT_TILE, chip.matrix[0])
    sizes = {d: few for d in rows if few in blocks.parts(d, few)}
    try:
        return blocks.rewritten(sizes) if sizes else kernel
    except CannotReblock:
        return kernel  # one dimension can be split, but not after another


def _names_blocks(kernel: Kernel, made: Made) -> bool:
    """Whether an index of what is loaded comes from memory."""
    pipelines = [Pipeline.of(op) for op in walk(kernel.body) if op.name == "pipeline"]
    indices = [v for p in pipelines for m in p.maps for v in m.yields]
    loads = [op for op in walk(kernel.body) if op.name in ("load", "subview")]
    indices += [v for op in loads if op.results[0].type.shape for v in op.operands[1:]]
    return any(not v.type.shape and is_from_memory(v, made) for v in indices)


def _is_chain(dots: Sequence[Dot], made: Made) -> bool:
    """Whether a matmul's operand is computed from the result of another."""

    def has_product(value: Value) -> bool:
        op = made.get(value)
        if op is None or op.regions or value.is_ref:
            return False
        return op.name == "dot" or any(map(has_product, op.operands))

    return any(has_product(side.value) for dot in dots for side in dot.sides)
