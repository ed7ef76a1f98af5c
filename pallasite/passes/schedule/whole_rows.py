"""whole_rows: rows that steps of a grid go through part by part, whole in a block.

In: a kernel with sequential axes along the rows of its operands: statistics over one
axis, results over another or in a second turn, an online softmax. Out: the same without
these axes, as authors write it whose rows are blocks. Each row is read once, and
backward kernels need not follow the steps: they are those of whole rows.

Proof: with sequential axes as loops (`promote.py`, `phases.py`), `whole_loops.py`
proves that all parts may be computed at once. It is done if no loop is left, if rows
fit a program (a GPU divides rows among programs afterwards), and if there are enough
rows, because what is left has a program per row at most.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod

from pallasite.errors import NoBackwardKernel
from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    Block,
    BlockDim,
    Kernel,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import Rewriter, clone, is_pure, map_ops, producers_of
from pallasite.ir.roles import Loop, Pipeline
from pallasite.ir.types import INDEX, RefType
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.lower.per_program import Program, kernel_of, main_refs, program_of
from pallasite.passes.lower.phases import apart
from pallasite.passes.normal.normalize import normalize
from pallasite.passes.normal.whole_loops import LARGEST, whole_loops
from pallasite.passes.schedule.gpu_blocks import fewer_rows
from pallasite.passes.schedule.gpu_tiles import largest_tile
from pallasite.target import Gpu

ENOUGH = 3  # programs per core that load as fast as any number
_CODE = {"pipeline", "load", "store", "cond", "for", "alloc"}


def whole_rows(
    kernel: Kernel,
    chip: Gpu | None,
    largest: float = LARGEST,
    endless: bool = False,
) -> Kernel:
    """The kernel over whole rows, in normal form; itself if it is not one over parts.

    Args:
        kernel: in normal form.
        chip: the GPU that runs it; None: it runs elsewhere.
        largest: elements of a tile that a program elsewhere can hold.
        endless: whether rows are not counted, which are always enough.
    """
    if kernel.level != TILE or kernel.aliases or not _steps_through_rows(kernel):
        return kernel
    try:
        program = apart(program_of(kernel))
    except NoBackwardKernel:
        return kernel
    if not any(op.name == "for" for op in program.body.ops):
        return kernel
    shown = _shown_whole(program)
    if shown is None:
        return kernel
    most = largest if chip is None else inf
    whole = whole_loops(kernel_of(shown, main_refs(shown.body), ()), most)
    program = program.with_body(Pipeline.of(find_pipeline(whole)).body).simplified()
    if any(op.name in ("for", "alloc", "cond") for op in walk(program.body)):
        return kernel
    few = chip is not None and _rows(program) < ENOUGH * chip.cores
    if few and not endless:
        return kernel
    new = _with_windows(kernel, program)
    if new is None or (chip is not None and largest_tile(fewer_rows(new)) > LARGEST):
        return kernel
    return normalize(new)


def _steps_through_rows(kernel: Kernel) -> bool:
    """Whether a kernel does no more than load, compute and store, and reduces rows."""
    ops = list(walk(kernel.body))
    known = all(op.name in _CODE or (is_pure(op) and op.name != "dot") for op in ops)
    return known and any(op.name == "reduce" for op in ops)


def _rows(program: Program) -> int:
    """How many rows all programs go through."""
    loads = (op.result.tile for op in program.body.ops if op.name == "load")
    tiles = [tile for tile in loads if tile.rank]
    most = max(tiles, key=lambda tile: tile.size, default=None)
    rows = most.size // most.shape[-1] if most is not None else 0
    return rows * prod(program.sizes)


def _shown_whole(program: Program) -> Program | None:
    """The program with parts of whole rows instead of blocks that follow a loop."""
    indices = {Loop.of(o).index for o in program.body.ops if o.name == "for"}
    shown: dict[Value, tuple[Value, int]] = {}  # a loop's index, elements of its parts
    others = False

    def rewrite(op: Op, b: Rewriter) -> Sequence[Value] | None:
        nonlocal others
        if op.name == "block_view" and op.operands[-1] in indices:
            (ref, *numbers, index), window = op.operands, op.attrs["window"]
            *dims, last = window.dims
            n = ref.ref.shape[-1]
            if last.kind != "blocked" or n % max(last.size, 1):
                return None
            window = replace(window, dims=(*dims, BlockDim(n)))
            whole = b.op("block_view", ref, *numbers, b.index(0), window=window)
            shown[whole] = index, last.size
            return [whole]
        if not any(v in shown for v in op.operands):
            return None
        access = Access.of(op) if op.name in ("load", "store") else None
        index, size = shown.get(op.operands[0], (None, 0))
        if index is None or access is None or access.mask:
            others = True
            return None
        if access.index[-1] != Span(0, size):
            others = True
            return None
        entries = (*access.index[:-1], Span(None, size))
        starts = (*access.index_operands, b.mul(index, b.index(size)))
        if access.value is None:
            return [b.load(access.ref, entries, starts)]
        b.store(access.ref, access.value, entries, starts)
        return []

    body = map_ops(program.body, rewrite)
    return None if others or not shown else program.with_body(body)


def _with_windows(kernel: Kernel, program: Program) -> Kernel | None:
    """The program as a kernel with the same operands and results, each view of which
    is a block; None if one is not."""
    made, ids = producers_of(program.body), program.body.params
    blocks: dict[tuple[Value, Window, tuple[Value, ...]], Value] = {}
    maps: list[Block] = []
    known: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in program.body.ops:
        if op.name != "block_view":
            ops.append(op)
            continue
        ref, *numbers = op.operands
        window = op.attrs["window"]
        key = ref, window, tuple(numbers)
        if key not in blocks:
            index_map = _index_map(ids, numbers, made)
            if index_map is None:
                return None
            maps.append(index_map)
            type_ = RefType(window.block_shape, ref.ref.dtype, window.space)
            blocks[key] = Value(type_, op.result.name or ref.name)
        known[op.result] = blocks[key]
    body = Block((), tuple(ops))
    refs = [ref for ref, *_ in blocks]
    if any(refs.count(ref) != 1 for ref in kernel.outputs) or set(refs) & {
        v for op in walk(body) for v in op.operands
    }:
        return None
    body = clone(body, known)
    b = Builder(program.loc)
    b.emit(
        "pipeline",
        *refs,
        regions=(*maps, Block((*ids, *blocks.values()), body.ops)),
        grid=program.sizes,
        windows=tuple(window for _, window, _ in blocks),
        semantics=("parallel",) * len(ids),
    )
    return kernel.with_(body=b.block())


def _index_map(
    ids: Sequence[Value], numbers: Sequence[Value], made: dict[Value, Op]
) -> Block | None:
    """Block indices as a function of the grid indices; None if they are not."""
    needed, pending = set[Op](), list(numbers)
    while pending:
        value = pending.pop()
        op = made.get(value)
        if op is None and value in ids:
            continue
        if op is None or not is_pure(op):
            return None
        needed.add(op)
        pending += op.operands
    own = [Value(INDEX, v.name) for v in ids]
    ops = tuple(op for op in made.values() if op in needed)
    code = clone(Block((), ops, tuple(numbers)), dict(zip(ids, own, strict=True)))
    return Block(tuple(own), code.ops, code.yields)
