"""Ops of the explicit level that Blackwell GPUs have: matmuls into tensor memory.

Loads and stores of refs in `tmem` are the ordinary ones. Matmuls and copies into tensor
memory are asynchronous, those of one context in issue order; `tensor_commit` makes a
barrier count an arrival when all so far have completed. `interpret/tensor_memory.py`
defines their meaning. `warps` is for code of single warps.
"""

from collections.abc import Sequence
from typing import cast

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.opdef import Attrs, TypeRuleError, Unit, Use
from pallasite.ir.roles import TensorMma
from pallasite.ir.types import BOOL, F32, INDEX, RefType, TileType, Type
from pallasite.ops.gpu import COUNTS, barrier_rule, gpu_row, nothing
from pallasite.ops.scaled import PACKED, factors, unpacked, unpacked_shape


def _mma(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """Operands: accumulator, left operand, right operand, whether it accumulates; then
    perhaps the scales of both sides, and the places of a sparse left operand."""
    sums, lhs, rhs, adds, *scales = types
    places = scales.pop() if len(scales) % 2 else None
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
    k = lhs.shape[left] * (1 if places is None else 2)
    if k != rhs.shape[right] or sums.shape != (rows, columns):
        raise TypeRuleError(f"{lhs} times {rhs} does not match {sums}")
    if scales:
        _look_at_scales(scales, (rows, columns), k)
    if places is not None:
        _look_at_places(places, lhs)
    return ()


def _look_at_places(places: Type, lhs: Type) -> None:
    if not isinstance(places, RefType) or places.space != "tmem":
        raise TypeRuleError(f"{places} is not tensor memory")
    if (
        places.shape != lhs.shape
        or places.dtype.bits != 2
        or lhs.dtype.bits not in KEPT
    ):
        raise TypeRuleError(f"{places} does not place the elements of {lhs}")


# How the places of two of four elements are stored, by the bits of an element: in tiles
# of 128 rows and 64 columns, whose digits are (those of the row, of the column), and
# the order of these digits.
KEPT: dict[int, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    8: ((128,), (64,), (0, 1)),
    16: ((8, 2, 8), (4, 2, 8), (0, 4, 2, 3, 1, 5)),
}
KEPT_TILE = 128, 64


def _look_at_scales(scales: Sequence[Type], sides: tuple[int, int], k: int) -> None:
    """One per row, or per column, of each block along k, perhaps packed."""
    if len(scales) != 2:
        raise TypeRuleError(f"{len(scales)} scales: both sides have some, or neither")
    for scale, n in zip(scales, sides, strict=True):
        if not isinstance(scale, RefType) or scale.space != "tmem":
            raise TypeRuleError(f"{scale} is not tensor memory")
        is_packed = scale.rank == 3 and scale.shape[-1] == PACKED
        shape = unpacked_shape(scale.shape) if is_packed else scale.shape
        if len(shape) != 2 or shape[0] != n or k % max(shape[1], 1):
            raise TypeRuleError(f"{scale} does not scale {n} x {k}")


def _copy(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    source, target = types
    if not isinstance(target, RefType) or target.space != "tmem":
        raise TypeRuleError(f"{target} is not tensor memory")
    if source.shape != target.shape or source.dtype != target.dtype:
        raise TypeRuleError(f"copies {source} to {target}")
    return ()


def mma_of(op: Op, columns: int) -> Block:
    """What a matmul does to an accumulator: accumulator, left, whole right, scales."""
    mma = TensorMma.of(op)
    sums, lhs, rhs = mma.sums.ref, mma.lhs.ref, mma.rhs.ref
    shape = list(rhs.shape)
    shape[mma.columns_dim] = columns
    params = [
        Value(TileType(sums.shape, sums.dtype)),
        Value(TileType(lhs.shape, lhs.dtype)),
        Value(TileType(tuple(shape), rhs.dtype)),
    ]
    b, sides = Builder(op.loc), params[1:]
    places = None
    if mma.places is not None:
        places = Value(TileType(mma.places.ref.shape, mma.places.ref.dtype))
        sides = [_dense(b, sides[0], places), sides[1]]
    if mma.scales:
        scales = [Value(TileType(v.ref.shape, v.ref.dtype)) for v in mma.scales]
        pairs = zip(sides, scales, mma.contract, strict=True)
        params, sides = [*params, *scales], [_scaled(b, *each) for each in pairs]
    if places is not None:
        params = [*params, places]
    product = b.op("dot", *sides, contract=op.attrs["contract"], batch=((), ()),
                   dtype=sums.dtype, precision=None)  # fmt: skip
    return b.block(params, (b.op("add", params[0], product), product))


def _scaled(b: Builder, side: Value, scale: Value, along: int) -> Value:
    """An operand times its scales, each of which is for a block along k."""
    if scale.tile.rank == 3:
        scale = unpacked(b, scale)
    by = factors(b, scale, side.tile.shape[along])
    if along == 0:
        by = b.op("transpose", by, perm=(1, 0))
    return b.mul(b.cast(side, F32), by)


def _shaped(b: Builder, x: Value, *shape: int) -> Value:
    return b.op("reshape", x, shape=shape)


def _dense(b: Builder, kept: Value, places: Value) -> Value:
    """A left operand with two of four elements, and zeros for the others."""
    (rows, count), (tall, wide) = kept.tile.shape, KEPT_TILE
    down, along, order = KEPT[kept.tile.dtype.bits]
    tiles, digits = (rows // tall, count // wide), (*down, *along)
    found = _shaped(b, places, tiles[0], tall, tiles[1], wide)
    found = b.op("transpose", found, perm=(0, 2, 1, 3))
    found = _shaped(b, found, *tiles, *(digits[d] for d in order))
    back = [2 + order.index(d) for d in range(len(digits))]
    perm = (0, *back[: len(down)], 1, *back[len(down) :])
    found = b.op("transpose", found, perm=perm)
    groups = (rows, count // 2, 2)  # two elements of each four
    each = (*groups, 4)
    wanted = b.cast(_shaped(b, found, *groups), INDEX.dtype)
    wanted = b.broadcast(wanted, each, (0, 1, 2))
    place = b.op("iota", type=TileType(each, INDEX.dtype), dim=3)
    values = b.broadcast(_shaped(b, kept, *groups), each, (0, 1, 2))
    values = b.cast(values, F32)
    spread = b.select(b.op("eq", wanted, place), values, b.like(0, values))
    return _shaped(b, b.op("reduce", spread, kind="sum", axes=(2,)), rows, 2 * count)


gpu_row(
    "tensor_mma",
    _mma,
    None,
    ("contract", "axes"),
    unit=Unit.MATRIX,
    uses=(Use.UPDATE, Use.READ),
    doc="starts a matmul that accumulates into tensor memory, or overwrites it; with "
    "axes, a collective one of two blocks of a cluster; perhaps with scales of rows "
    "and columns in blocks along k, and with the places of two of four elements of "
    "each row, which are all that the left operand has",
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
