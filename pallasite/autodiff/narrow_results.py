"""Stores cotangents in the type of their operand.

Cotangents are accumulated in f32. Storing a block in the operand's own type moves half
the bytes (bf16), and no kernel has to convert the array afterwards. A block that is
stored and never loaded, as a whole or in parts, once or in a loop, is not a sum: what
was stored last remains, so each store converts its own values. One that the steps of a
program add to is accumulated in scratch instead, and stored by the last of them. A
block too large for that, such as all pages of a cache, stays as it is: its scratch
would be in main memory, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import INDEX, DType
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.normal.canonicalize import canonicalize

MOST_ELEMENTS = 1 << 20  # of a block that is accumulated in scratch


def narrow_results(kernel: Kernel, dtypes: Mapping[int, DType]) -> Kernel:
    """The kernel with some results of another type.

    Args:
        kernel: its body is one pipeline, preceded by allocations.
        dtypes: by position of the result: the type it is finally converted to.
    """
    if dtypes and any(op.name == "subview" for op in walk(kernel.body)):
        kernel = canonicalize(kernel)  # stores to parts of a block
    for number, dtype in dtypes.items():
        kernel = _narrowed(kernel, kernel.outputs[number], dtype)
    return kernel


def _narrowed(kernel: Kernel, result: Value, dtype: DType) -> Kernel:
    users = [op for op in walk(kernel.body) if result in op.operands]
    if [op.name for op in users] != ["pipeline"] or users[0] not in kernel.body.ops:
        return kernel
    pipeline = Pipeline.of(users[0])
    shown = [each for each in pipeline.shown if each.array is result]
    if len(shown) > 1 or shown[0].block.ref.dtype == dtype:
        return kernel
    old = shown[0].block
    array, block = _retyped(result, dtype), _retyped(old, dtype)
    uses = [op for op in walk(pipeline.body) if old in op.operands]
    ops, scratch = list[Op](), Builder(kernel.loc)
    steps = _steps_of(pipeline, shown[0])
    if uses and all(op.name == "store" and op.operands[0] is old for op in uses):
        body = map_ops(pipeline.body, lambda op, b: _stored(op, b, old, block))
        ops += body.ops
    elif _may_accumulate(steps, uses) and block.ref.size <= MOST_ELEMENTS:
        kept = old.ref.with_shape([n for n in old.ref.shape if n != 1])
        sums = scratch.op("alloc", type=replace(kept, space="vmem"), names=[old.name])
        body = map_ops(pipeline.body, lambda op, b: _in_scratch(op, b, old, sums))
        ops += [*body.ops, *_store_last(pipeline, steps or [], sums, block)]
    else:
        return kernel
    new = pipeline.showing(
        [
            each._replace(array=array, block=block) if each.array is result else each
            for each in pipeline.shown
        ]
    )
    new = new.with_(body=replace(new.body, ops=tuple(ops)))
    body = replace(
        kernel.body,
        ops=(
            *scratch.ops,
            *(new.to_op() if op is users[0] else op for op in kernel.body.ops),
        ),
    )
    params = tuple(array if p is result else p for p in kernel.params)
    return kernel.with_(params=params, body=body)


def _may_accumulate(steps: list[int] | None, uses: Sequence[Op]) -> bool:
    """Whether steps, or a loop in a step, may add to scratch instead of a block."""
    if steps is None or not all(map(_is_box, uses)):
        return False
    whole = (covers_whole(op.operands[0].ref.shape, op.attrs["index"]) for op in uses)
    return bool(steps) or all(whole)


def _steps_of(pipeline: Pipeline, shown: Shown) -> list[int] | None:
    """The last axes of a grid, along which a block stays the same.

    None if steps that are not one after another may have the same block.
    """
    ids = shown.index_map.params
    needed = {v for op in shown.index_map.ops for v in op.operands}
    needed.update(shown.index_map.yields)
    axes: list[int] = []
    for axis in reversed(range(len(pipeline.grid))):
        is_step = pipeline.semantics[axis] == "sequential" and ids[axis] not in needed
        if not is_step or pipeline.grid[axis] is None:
            break
        axes.insert(0, axis)
    # Steps of outer axes would revisit a block.
    outer = range(len(pipeline.grid) - len(axes))
    alone = all(ids[a] in needed for a in outer if pipeline.grid[a] != 1)
    return axes if alone else None


def _in_scratch(op: Op, b: Rewriter, block: Value, sums: Value) -> list[Value] | None:
    """An access to scratch, which has no dimensions of size one."""
    if block not in op.operands:
        return None
    access = Access.of(op)
    pairs = zip(access.split_index(), block.ref.shape, strict=True)
    places = [each for each, n in pairs if n != 1]
    index = tuple(entry for entry, _ in places)
    starts = [start for _, start in places if start is not None]
    shape = [entry.size for entry in index if isinstance(entry, Span)]
    mask = access.mask and _reshaped(b, access.mask, shape)
    if op.name == "store":
        assert access.value is not None
        b.store(sums, _reshaped(b, access.value, shape), index, starts, mask)
        return []
    other = access.other and _reshaped(b, access.other, shape)
    loaded = b.load(sums, index, starts, mask, other)
    return [_reshaped(b, loaded, op.result.tile.shape)]


def _reshaped(b: Builder, value: Value, shape: Sequence[int]) -> Value:
    shape = tuple(shape)
    return value if value.tile.shape == shape else b.op("reshape", value, shape=shape)


def _store_last(
    pipeline: Pipeline, steps: Sequence[int], sums: Value, block: Value
) -> list[Op]:
    """What the last step on a block does."""
    b, inside = Builder(pipeline.op.loc), Builder(pipeline.op.loc)
    value = inside.cast(inside.load(sums), block.ref.dtype)
    inside.store(block, _reshaped(inside, value, block.ref.shape))
    is_last = None
    for axis in steps:
        last = b.eq(pipeline.ids[axis], b.index((pipeline.grid[axis] or 1) - 1))
        is_last = last if is_last is None else b.op("and", is_last, last)
    if is_last is None:
        return inside.ops
    b.emit("cond", b.cast(is_last, INDEX.dtype), regions=(Block(), inside.block()))
    return b.ops


def _is_box(op: Op) -> bool:
    """Whether an op loads or stores a box of a block."""
    if op.name not in ("load", "store"):
        return False
    return all(isinstance(entry, (At, Span)) for entry in Access.of(op).index)


def _stored(op: Op, b: Rewriter, old: Value, block: Value) -> list[Value] | None:
    """A store to the block of another type."""
    if old not in op.operands:
        return None
    access = Access.of(op)
    assert access.value is not None
    value, mask = b.cast(access.value, block.ref.dtype), access.mask
    if mask is None and covers_whole(block.ref.shape, access.index):
        b.store(block, _reshaped(b, value, block.ref.shape))
    else:
        b.store(block, value, access.index, access.index_operands, mask)
    return []


def _retyped(ref: Value, dtype: DType) -> Value:
    return Value(replace(ref.ref, dtype=dtype), ref.name)
