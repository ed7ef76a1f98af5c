"""vmap of a kernel: a new leading grid axis over the mapped operands.

Acts on IR: windows of mapped operands get a leading squeezed dimension indexed by the
new axis; mapped refs without a window are narrowed at the start of each program.
Unmapped operands stay as they are; the program ids that the body sees do not change.
"""

from collections.abc import Sequence

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, BlockDim, Kernel, Op, Span, Value, Window
from pallasite.ir.rewrite import substitute
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.memory import constant_inputs


def changed_operands(kernel: Kernel) -> list[int]:
    """The operands that programs write: each mapped element needs its own copy."""
    constant = constant_inputs(kernel)
    return [n for n, param in enumerate(kernel.inputs) if param not in constant]


def batch_kernel(kernel: Kernel, mapped: Sequence[bool], size: int) -> Kernel:
    """The kernel over `size` copies of its mapped operands and all its results.

    The mapped operands must include `changed_operands`.
    """
    flags = [*mapped, *[True] * kernel.num_outputs]
    wide = {
        p: Value(_widen(p.ref, size), p.name) if m else p
        for p, m in zip(kernel.params, flags, strict=True)
    }
    batched = {p for p, m in zip(kernel.params, flags, strict=True) if m}
    ops = tuple(
        _batch_pipeline(op, wide, batched, size) if op.name == "pipeline" else op
        for op in kernel.body.ops
    )
    params = tuple(wide[p] for p in kernel.params)
    return kernel.with_(params=params, body=Block((), ops))


def _widen(ref: T.RefType, size: int) -> T.RefType:
    return T.RefType((size, *ref.shape), ref.dtype, ref.space)


def maps_a_grid_size(kernel: Kernel, mapped: Sequence[bool]) -> bool:
    """Whether the grid differs between mapped elements, so that there is no single grid
    to add an axis to. Grid sizes are what is loaded before the pipeline."""
    refs = {p for p, m in zip(kernel.params, mapped, strict=False) if m}
    return any(op.name == "load" and op.operands[0] in refs for op in kernel.body.ops)


def _batch_pipeline(
    op: Op, wide: dict[Value, Value], batched: set[Value], size: int
) -> Op:
    old = Pipeline.of(op)
    windows, maps = [], []
    for array, window, index_map, _ in old.shown:
        moved = array in batched
        windows.append(_lead_window(window) if moved else window)
        maps.append(_lead_map(index_map, moved, batched, wide))
    return old.with_(
        grid=(size, *old.grid),
        arrays=tuple(wide.get(a, a) for a in old.arrays),
        windows=tuple(windows),
        semantics=("parallel", *old.semantics),
        maps=tuple(maps),
        body=_lead_block(old.body, batched, wide),
    ).to_op()


def _lead_window(window: Window) -> Window:
    dims = (BlockDim(1, "squeezed"), *window.dims)
    return Window(dims, window.mode, window.space, window.fill, window.buffers)


def _lead_map(
    index_map: Block, moved: bool, batched: set[Value], wide: dict[Value, Value]
) -> Block:
    block = _lead_block(index_map, batched, wide)
    if moved:
        index, *_ = block.params
        block = Block(block.params, block.ops, (index, *block.yields))
    return block


def _lead_block(block: Block, batched: set[Value], wide: dict[Value, Value]) -> Block:
    """The block with a new leading grid index; mapped refs it uses are narrowed."""
    index = Value(T.INDEX, "batch")
    used = _refs_used(block)
    builder = Builder()
    mapping = {}
    for param in sorted(used & batched, key=lambda v: list(wide).index(v)):
        rest = [Span(0, n) for n in param.ref.shape]
        mapping[param] = builder.subview(wide[param], (At(None), *rest), [index])
    inner = substitute(block, mapping)
    return Block((index, *inner.params), (*builder.ops, *inner.ops), inner.yields)


def _refs_used(block: Block) -> set[Value]:
    used: set[Value] = set()
    for op in block.ops:
        used.update(v for v in op.operands if v.is_ref)
        for region in op.regions:
            used |= _refs_used(region)
    return used
