"""Ops of the explicit level that Blackwell GPUs have: matmuls into tensor memory.

Loads and stores of refs in `tmem` are the ordinary ones. Matmuls and copies into tensor
memory are asynchronous, those of one context in issue order; `tensor_commit` makes a
barrier count an arrival when all so far have completed. `interpret/tensor_memory.py`
defines their meaning. `warps` is for code of single warps.
"""

from typing import cast

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.opdef import Attrs, TypeRuleError, Unit, Use
from pallasite.ir.roles import TensorMma
from pallasite.ir.types import BOOL, RefType, TileType, Type
from pallasite.ops.gpu import COUNTS, barrier_rule, gpu_row, nothing


def _mma(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """Operands: accumulator, left operand, right operand, whether it accumulates."""
    sums, lhs, rhs, adds = types
    if not isinstance(sums, RefType) or sums.space != "tmem":
        raise TypeRuleError(f"adds to tensor memory, got {sums}")
    for side, spaces in ((lhs, ("smem", "tmem")), (rhs, ("smem",))):
        if not isinstance(side, RefType) or side.space not in spaces or side.rank != 2:
            raise TypeRuleError(f"{side} is not a matrix in {' or '.join(spaces)}")
    if adds != TileType((), BOOL):
        raise TypeRuleError(f"the accumulate flag is one bool, got {adds}")
    (left,), (right,) = cast(tuple[tuple[int], tuple[int]], attrs["contract"])
    blocks = 2 if attrs["axes"] else 1  # each has some columns of the right operand
    rows, columns = lhs.shape[1 - left], blocks * rhs.shape[1 - right]
    if lhs.shape[left] != rhs.shape[right] or sums.shape != (rows, columns):
        raise TypeRuleError(f"{lhs} times {rhs} does not match {sums}")
    return ()


def _copy(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    source, target = types
    if not isinstance(target, RefType) or target.space != "tmem":
        raise TypeRuleError(f"{target} is not tensor memory")
    if source.shape != target.shape or source.dtype != target.dtype:
        raise TypeRuleError(f"copies {source} to {target}")
    return ()


def mma_of(op: Op, columns: int) -> Block:
    """What a matmul does to an accumulator: accumulator, left, and whole right."""
    mma = TensorMma.of(op)
    sums, lhs, rhs = mma.sums.ref, mma.lhs.ref, mma.rhs.ref
    shape = list(rhs.shape)
    shape[mma.columns_dim] = columns
    params = [
        Value(TileType(sums.shape, sums.dtype)),
        Value(TileType(lhs.shape, lhs.dtype)),
        Value(TileType(tuple(shape), rhs.dtype)),
    ]
    b = Builder(op.loc)
    product = b.op("dot", *params[1:], contract=op.attrs["contract"], batch=((), ()),
                   dtype=sums.dtype, precision=None)  # fmt: skip
    return b.block(params, (b.op("add", params[0], product), product))


gpu_row(
    "tensor_mma",
    _mma,
    4,
    ("contract", "axes"),
    unit=Unit.MATRIX,
    uses=(Use.UPDATE, Use.READ),
    doc="starts a matmul that accumulates into tensor memory, or overwrites it; with "
    "axes, a collective one of two blocks of a cluster",
)
gpu_row(
    "tensor_copy",
    _copy,
    2,
    ("axes",),
    uses=(Use.READ, Use.WRITE),
    doc="starts a copy into tensor memory",
)
gpu_row(
    "tensor_commit",
    barrier_rule,
    1,
    ("axes",),
    uses=COUNTS,
    doc="one arrival when all earlier matmuls and copies have completed",
)
gpu_row(
    "tensor_wait",
    nothing,
    0,
    ("what",),
    unit=Unit.CONTROL,
    doc="waits until the `loads` or `stores` of tensor memory have completed",
)
gpu_row(
    "warps",
    nothing,
    0,
    (),
    regions=None,
    unit=Unit.CONTROL,
    doc="runs its four regions, each by a warp of the warpgroup",
)
