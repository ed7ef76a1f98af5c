"""Cotangents in the type of their operand, where nothing is added to them in memory.

Cotangents are summed up in f32. A block that is stored once, whole, is no sum: storing
it in the operand's own type moves half the bytes (bf16), and no kernel has to convert
the array afterwards.
"""

from collections.abc import Mapping
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import DType
from pallasite.passes.analysis.carried import covers_whole


def narrow_results(kernel: Kernel, dtypes: Mapping[int, DType]) -> Kernel:
    """The kernel with some results of another type.

    Args:
        kernel: whose body is one pipeline, with what it allocates before.
        dtypes: by position of the result: the type it is converted to in the end.
    """
    for number, dtype in dtypes.items():
        kernel = _narrowed(kernel, kernel.outputs[number], dtype)
    return kernel


def _narrowed(kernel: Kernel, result: Value, dtype: DType) -> Kernel:
    users = [op for op in walk(kernel.body) if result in op.operands]
    if [op.name for op in users] != ["pipeline"] or users[0] not in kernel.body.ops:
        return kernel
    pipeline = Pipeline.of(users[0])
    shown = [each for each in pipeline.shown if each.array is result]
    stores = [op for op in walk(pipeline.body) if shown[0].block in op.operands]
    if len(shown) > 1 or len(stores) != 1 or not _is_plain(stores[0], pipeline.body):
        return kernel
    array, block = _retyped(result, dtype), _retyped(shown[0].block, dtype)
    ops: list[Op] = []
    for op in pipeline.body.ops:
        ops += [op] if op is not stores[0] else _store(op, block, dtype)
    new = pipeline.showing(
        [
            each._replace(array=array, block=block) if each.array is result else each
            for each in pipeline.shown
        ]
    )
    new = new.with_(body=replace(new.body, ops=tuple(ops)))
    body = replace(
        kernel.body,
        ops=tuple(new.to_op() if op is users[0] else op for op in kernel.body.ops),
    )
    params = tuple(array if p is result else p for p in kernel.params)
    return kernel.with_(params=params, body=body)


def _is_plain(op: Op, body: Block) -> bool:
    """Whether an op is a store of the whole block that every program does once."""
    if op.name != "store" or op not in body.ops:
        return False
    access = Access.of(op)
    return access.mask is None and covers_whole(access.ref.ref.shape, access.index)


def _store(op: Op, block: Value, dtype: DType) -> list[Op]:
    builder = Builder()
    builder.loc = op.loc
    value = Access.of(op).value
    assert value is not None
    new = builder.cast(value, dtype)
    if len(new.tile.shape) < len(block.ref.shape):
        new = builder.op("reshape", new, shape=block.ref.shape)
    builder.store(block, new)
    return builder.ops


def _retyped(ref: Value, dtype: DType) -> Value:
    return Value(replace(ref.ref, dtype=dtype), ref.name)
