"""dot: a plain loop nest with the contracted dimension in the middle.

Operands are brought to [batch, rows, k] and [batch, k, columns]; the innermost loop
runs over columns in memory order, which LLVM turns into vectors. Register-blocked
microkernels take this module's place without changing its callers.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from pallasite.backends.cpu import scalars, tiles
from pallasite.backends.cpu.llvm import Function, Val
from pallasite.backends.cpu.tiles import Tile
from pallasite.ir.nodes import Op
from pallasite.ir.types import F32, F64, I32, DType

if TYPE_CHECKING:
    from pallasite.backends.cpu.emit import Emitter


def emit_dot(e: "Emitter", op: Op) -> None:
    (lc, rc), (lb, rb) = op.attrs["contract"], op.attrs["batch"]
    lhs, rhs = (e.as_tile(v) for v in op.operands)
    result, running = op.result.tile, running_dtype(lhs.dtype, rhs.dtype, op)
    a = _canonical(e, lhs, [lb, _rest(lhs, lc, lb), lc], in_rows=False)
    b = _canonical(e, rhs, [rb, rc, _rest(rhs, rc, rb)], in_rows=True)
    batch, rows, depth = a.shape
    columns = b.shape[2]
    until = e.scope.uses.last[op.result]
    sums = Tile(
        (batch, rows, columns),
        running,
        e.temporary((batch, rows, columns), running, max(until, e.scope.position)),
    )
    assert sums.buffer is not None
    zero = scalars.zero(running)
    e.fill(sums.buffer, tiles.splat(sums.shape, running, zero))
    _multiply(e.f, a, b, sums, depth)
    shaped = tiles.reshape(e.f, sums, result.shape)
    if running != result.dtype:
        source = shaped
        element = lambda i: scalars.cast(e.f, source.at(e.f, i), running, result.dtype)
        shaped = tiles.formula(
            result.shape, result.dtype, element, [source], pointwise=True
        )
    e.define_lazy(op, shaped)


def running_dtype(lhs: DType, rhs: DType, op: Op) -> DType:
    """Sums are kept in f32 or f64, and for integers in at least 32 bits."""
    result: DType = op.attrs["dtype"]
    if F64 in (lhs, rhs, result):
        return F64
    if lhs.is_float or rhs.is_float or result.is_float:
        return F32
    return result if result.bits >= 32 else I32


def _rest(tile: Tile, *used: tuple[int, ...]) -> list[int]:
    taken = {d for dims in used for d in dims}
    return [d for d in range(len(tile.shape)) if d not in taken]


def _canonical(
    e: "Emitter", tile: Tile, groups: list[Sequence[int]], in_rows: bool
) -> Tile:
    """The tile with three dimensions, one per group, ready to be read many times.

    `in_rows`: the last dimension must be the one that is contiguous in memory.
    """
    order = [d for group in groups for d in group]
    turned = tiles.transpose(e.f, tile, order)
    shape = [prod(tile.shape[d] for d in group) for group in groups]
    buffer = turned.buffer
    if buffer is not None and order:
        strides = tiles.reshape_strides(e.f, turned.shape, buffer.strides, shape)
        if strides is not None and (not in_rows or strides[-1].constant == 1):
            return tiles.reshape(e.f, turned, shape)
    if not turned.is_free:
        turned = Tile(turned.shape, turned.dtype, e.force(turned))
    return tiles.reshape(e.f, turned, shape)


def _multiply(f: Function, a: Tile, b: Tile, sums: Tile, depth: int) -> None:
    batch, rows, columns = sums.shape
    assert sums.buffer is not None
    with f.nest([batch, rows, depth]) as (i, row, k):
        left = scalars.cast(f, a.at(f, [i, row, k]), a.dtype, sums.dtype)
        with f.nest([columns]) as (column,):
            right = scalars.cast(f, b.at(f, [i, k, column]), b.dtype, sums.dtype)
            address = sums.buffer.address(f, sums.dtype, [i, row, column])
            total = _fused(f, sums.dtype, left, right, f.load(left.type, address))
            f.store(total, address)


def _fused(f: Function, dtype: DType, a: Val, b: Val, c: Val) -> Val:
    if dtype.is_float:
        return f.binary("fadd contract", f.binary("fmul contract", a, b), c)
    return f.binary("add", f.binary("mul", a, b), c)


RULES = {"dot": emit_dot}
