"""Reductions and scans: reduce, arg_reduce, scan.

A reduction over the last dimension keeps its running value in a register; any other
walks the operand in memory order and updates a buffer of results. Narrow floats are
summed in f32.
"""

from math import prod
from typing import TYPE_CHECKING, Any

from pallasite.backends.cpu import arithmetic, scalars, tiles
from pallasite.backends.cpu.llvm import Function, Val, integer
from pallasite.backends.cpu.tiles import Indices, Tile
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Op
from pallasite.ir.types import F32, DType

if TYPE_CHECKING:
    from pallasite.backends.cpu.emit import Emitter

_COMBINE = {"sum": "add", "prod": "mul"}  # the others are named as their op


def combine(f: Function, kind: str, dtype: DType, a: Val, b: Val) -> Val:
    if kind == "logsumexp":
        return _add_in_log_space(f, dtype, a, b)
    if dtype.is_bool and kind in ("sum", "prod"):
        return f.binary({"sum": "or", "prod": "and"}[kind], a, b)
    if dtype.is_float and kind in _COMBINE:
        # Any order of a sum is as good as another: lets LLVM use several partial sums.
        return f.binary(f"f{_COMBINE[kind]} reassoc", a, b)
    return arithmetic.combine(f, _COMBINE.get(kind, kind), dtype, a, b)


def identity(kind: str, dtype: DType) -> Val:
    """The value that changes nothing."""
    return scalars.constant(_identity(kind, dtype), dtype)


def _identity(kind: str, dtype: DType) -> Any:
    if kind in ("sum", "or", "xor"):
        return 0
    if kind == "prod":
        return 1
    if kind == "and":
        return -1
    lowest = kind in ("max", "logsumexp")
    if dtype.is_float:
        return float("-inf") if lowest else float("inf")
    if dtype.is_bool or not dtype.is_signed_int:
        return 0 if lowest else (1 if dtype.is_bool else 2**dtype.bits - 1)
    return -(2 ** (dtype.bits - 1)) if lowest else 2 ** (dtype.bits - 1) - 1


def _add_in_log_space(f: Function, dtype: DType, a: Val, b: Val) -> Val:
    """log(exp(a) + exp(b)) without overflow."""
    suffix = "f" if a.type == "float" else ""
    high, low = f.intrinsic("maximum", a, b), f.intrinsic("minimum", a, b)
    gap = f.binary("fsub", low, high)
    small = f.call(f"exp{suffix}", a.type, gap, pure=True)
    correction = f.call(f"log1p{suffix}", a.type, small, pure=True)
    # Two equal infinities have no difference; they are the answer themselves.
    infinite = f.compare("fcmp oeq", low, high)
    doubled = f.binary("fadd", high, scalars.floating(0.6931471805599453, a.type))
    return f.select(infinite, doubled, f.binary("fadd", high, correction))


def running_dtype(kind: str, dtype: DType) -> DType:
    """The type a running value is kept in."""
    return F32 if scalars.is_narrow(dtype) and kind not in ("max", "min") else dtype


def emit_reduce(e: "Emitter", op: Op) -> None:
    kind, axes = op.attrs["kind"], tuple(op.attrs["axes"])
    tile = e.as_tile(op.operands[0])
    dtype, running = tile.dtype, running_dtype(op.attrs["kind"], tile.dtype)
    kept = [d for d in range(len(tile.shape)) if d not in axes]
    if not kept:
        total = _fold(e, tile, kind, running, axes, {})
        e.define(op.result, scalars.cast(e.f, total, running, dtype))
        return
    buffer = e.result_buffer(op, running)
    result = Tile(op.result.tile.shape, running, buffer)
    if len(tile.shape) - 1 in axes or prod(tile.shape[d] for d in axes) == 1:
        with e.f.nest(result.shape) as indices:
            at = dict(zip(kept, indices, strict=True))
            total = _fold(e, tile, kind, running, axes, at)
            scalars.store(e.f, running, total, buffer.address(e.f, running, indices))
    else:
        _accumulate(e, tile, kind, result, kept)
    e.define(op.result, _as_dtype(e, result, dtype))


def _as_dtype(e: "Emitter", tile: Tile, dtype: DType) -> Tile:
    if tile.dtype == dtype:
        return tile
    element = lambda i: scalars.cast(e.f, tile.at(e.f, i), tile.dtype, dtype)
    return tiles.formula(tile.shape, dtype, element, [tile], pointwise=True)


def _fold(
    e: "Emitter",
    tile: Tile,
    kind: str,
    running: DType,
    axes: tuple[int, ...],
    at: dict[int, Val],
) -> Val:
    """The reduction over `axes` of the elements at the given other indices."""
    f = e.f

    def over(axes: tuple[int, ...], at: dict[int, Val], total: Val) -> Val:
        if not axes:
            indices = [at[d] for d in range(len(tile.shape))]
            value = scalars.cast(f, tile.at(f, indices), tile.dtype, running)
            return combine(f, kind, running, total, value)
        axis, *rest = axes
        with f.loop(integer(tile.shape[axis]), [total]) as loop:
            inner = over(tuple(rest), {**at, axis: loop.index}, loop.carries[0])
            loop.carries = [inner]
        return loop.carries[0]

    return over(tuple(sorted(axes)), at, identity(kind, running))


def _accumulate(
    e: "Emitter", tile: Tile, kind: str, result: Tile, kept: list[int]
) -> None:
    f, buffer, running = e.f, result.buffer, result.dtype
    assert buffer is not None
    e.fill(buffer, tiles.splat(result.shape, running, identity(kind, running)))
    # Reduced dimensions outside the last one: its elements are updated side by side.
    with f.nest(tile.shape) as indices:
        address = buffer.address(f, running, [indices[d] for d in kept])
        old = scalars.load(f, running, address)
        value = scalars.cast(f, tile.at(f, indices), tile.dtype, running)
        scalars.store(f, running, combine(f, kind, running, old, value), address)


def emit_arg_reduce(e: "Emitter", op: Op) -> None:
    """The first best position; the first NaN, if there is one, is the best."""
    axis, kind = op.attrs["axis"], op.attrs["kind"]
    tile, dtype = e.as_tile(op.operands[0]), op.attrs["dtype"]

    def position(indices: Indices) -> Val:
        f = e.f
        first = tile.at(f, _insert(indices, axis, integer(0)))
        # Element 0 is looked at twice, which changes nothing and needs no peeling.
        with f.loop(integer(tile.shape[axis]), [first, integer(0)]) as loop:
            index, best, where = loop
            value = tile.at(f, _insert(indices, axis, index))
            better = _is_better(f, kind, tile.dtype, value, best)
            loop.carries = [
                f.select(better, value, best),
                f.select(better, index, where),
            ]
        return f.convert("trunc", loop.carries[1], scalars.register(dtype))

    if not tile.shape[axis]:
        raise UnsupportedError(f"arg{kind} of no elements")
    if not op.result.tile.rank:
        e.define(op.result, position(()))
        return
    buffer = e.result_buffer(op)
    with e.f.nest(op.result.tile.shape) as indices:
        value = position(indices)
        scalars.store(e.f, dtype, value, buffer.address(e.f, dtype, indices))
    e.define(op.result, Tile(op.result.tile.shape, dtype, buffer))


def _is_better(f: Function, kind: str, dtype: DType, value: Val, best: Val) -> Val:
    if dtype.is_float:
        # Unordered is true for a NaN on either side; only a new NaN may win.
        test = "fcmp ugt" if kind == "max" else "fcmp ult"
        had_number = f.compare("fcmp ord", best, best)
        return f.both(f.compare(test, value, best), had_number)
    sign = "s" if dtype.is_signed_int else "u"
    return f.compare(f"icmp {sign}{'gt' if kind == 'max' else 'lt'}", value, best)


def emit_scan(e: "Emitter", op: Op) -> None:
    axis, kind = op.attrs["axis"], op.attrs["kind"]
    tile = e.tile(op.operands[0])
    f, dtype, length = e.f, tile.dtype, tile.shape[axis]
    running = running_dtype(kind, dtype)
    buffer = e.result_buffer(op)
    others = [n for d, n in enumerate(tile.shape) if d != axis]
    with f.nest(others) as rest:
        start = [identity(kind, running)]
        with f.loop(integer(length), start) as loop:
            place = loop.index
            if op.attrs["reverse"]:
                place = f.sub(integer(length - 1), place)
            indices = _insert(rest, axis, place)
            value = scalars.cast(f, tile.at(f, indices), dtype, running)
            total = combine(f, kind, running, loop.carries[0], value)
            address = buffer.address(f, dtype, indices)
            scalars.store(f, dtype, scalars.cast(f, total, running, dtype), address)
            loop.carries = [total]
    e.define(op.result, Tile(tile.shape, dtype, buffer))


def _insert(indices: Indices, axis: int, value: Val) -> list[Val]:
    return [*indices[:axis], value, *indices[axis:]]


RULES = {"reduce": emit_reduce, "arg_reduce": emit_arg_reduce, "scan": emit_scan}
