"""Cotangents of pure ops: a matmul has its own rule, JAX has the others."""

from collections.abc import Sequence
from math import log

from pallasite.autodiff.op_derivative import vjp_ops
from pallasite.errors import NoBackwardKernel
from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Op, Value
from pallasite.ir.roles import Dot

Dims = tuple[int, ...]
LN_2 = log(2)


def pull_back(
    b: Builder, op: Op, cotangents: Sequence[Value | None], wanted: Sequence[bool]
) -> list[Value | None]:
    """Emit the cotangents of a pure op's operands; None where zero or not wanted.

    Cotangents may be wider than the values they belong to (see `accumulated`).
    """
    if op.name == "dot" and cotangents[0] is not None:
        return [
            _dot_operand(b, op, cotangents[0], side) if is_wanted else None
            for side, is_wanted in enumerate(wanted)
        ]
    if op.name == "cast" and cotangents[0] is not None:
        (x,) = op.operands
        both_float = x.tile.dtype.is_float and op.result.tile.dtype.is_float
        wide = accumulated(x.tile.dtype)
        return [b.cast(cotangents[0], wide) if both_float else None]
    if op.name == "transpose" and cotangents[0] is not None:
        perm = op.attrs["perm"]
        back = tuple(perm.index(d) for d in range(len(perm)))
        return [b.op("transpose", cotangents[0], perm=back)]
    if op.name == "reshape" and cotangents[0] is not None:
        shape = op.operands[0].tile.shape
        return [b.op("reshape", cotangents[0], shape=shape)]
    if op.name == "exp2" and cotangents[0] is not None and is_f32(op.result):
        return [_times(b, b.mul(cotangents[0], op.result), LN_2)]
    if op.name == "mul" and cotangents[0] is not None and is_f32(op.result):
        numbers = [_number(b, v) for v in op.operands]
        if sum(n is not None for n in numbers) == 1:
            return [
                _times(b, cotangents[0], numbers[1 - n]) if is_wanted else None
                for n, is_wanted in enumerate(wanted)
            ]
    narrow = [
        c if c is None else b.cast(c, r.tile.dtype)
        for c, r in zip(cotangents, op.results, strict=True)
    ]
    try:
        return vjp_ops(b, op, op.operands, op.results, narrow, wanted)
    except (NotImplementedError, TypeError) as error:
        # JAX has no rule, or the rule needs something the language lacks.
        reason = str(error).splitlines()[0]
        what = f"{op.name} has no derivative here: {reason}"
        raise NoBackwardKernel(what, at=op.loc) from error


def is_f32(value: Value) -> bool:
    return value.tile.dtype == T.F32


def _maker(b: Builder, value: Value) -> Op | None:
    return next((op for op in reversed(b.ops) if value in op.results), None)


def _number(b: Builder, value: Value) -> float | None:
    """The number that fills a tile, if the builder made it."""
    op = _maker(b, value)
    if op is not None and op.name == "broadcast_in_dim":
        return _number(b, op.operands[0])
    return op.attrs["value"] if op is not None and op.name == "constant" else None


def _times(b: Builder, value: Value, number: float | None) -> Value:
    """A cotangent times a number; successive factors are combined.

    So are those before and after a mask, which inserts zeros.
    """
    assert number is not None
    op = _maker(b, value)
    if op is not None and op.name == "mul":
        x, y = op.operands
        before = _number(b, y)
        if before is not None:
            value, number = x, number * before
    if op is not None and op.name == "select_n" and len(op.operands) == 3:
        which, *cases = op.operands
        if any(_number(b, v) == 0 for v in cases):
            return b.op("select_n", which, *(_scaled(b, v, number) for v in cases))
    return b.mul(value, b.constant(number, value.tile))


def _scaled(b: Builder, value: Value, number: float) -> Value:
    return value if _number(b, value) == 0 else _times(b, value, number)


def accumulated(dtype: T.DType) -> T.DType:
    """The type in which cotangents of a type are kept and accumulated."""
    return T.F32 if dtype.bits < 32 else dtype


def cotangent_type(value: Value) -> T.TileType:
    return value.tile.with_dtype(accumulated(value.tile.dtype))


def _dot_operand(b: Builder, op: Op, cotangent: Value, side: int) -> Value:
    """The cotangent of one operand of a matmul: the result's times the other operand.

    Their order is chosen so that the result needs no transpose where possible: `x @ y`
    gives `ct @ y.T` and `x.T @ ct`, in one dot each.
    """
    sides = Dot.of(op).sides
    x, x_batch, x_free, x_contract = sides[side]
    other, other_batch, other_free, other_contract = sides[1 - side]
    n = len(x_batch)
    free = (len(x_free), len(other_free))
    # The dimensions of the result are batch, lhs rest, rhs rest.
    first_other = n + (free[0] if side == 0 else 0)
    ct_other = tuple(range(first_other, first_other + free[1]))
    cotangent, other = _same_types(b, op, cotangent, other, x.tile.dtype)
    dtype = accumulated(x.tile.dtype)
    ct_side = (cotangent, ct_other, tuple(range(n)))
    other_side = (other, other_free, other_batch)
    # The contracted dimensions remain of `other`, in its own order.
    order = sorted(range(len(other_contract)), key=lambda i: other_contract[i])
    contracted = tuple(x_contract[i] for i in order)
    if (*x_batch, *x_free, *contracted) == tuple(range(x.tile.rank)):
        result, layout = _dot(b, op, ct_side, other_side, dtype), None
    elif (*x_batch, *contracted, *x_free) == tuple(range(x.tile.rank)):
        result, layout = _dot(b, op, other_side, ct_side, dtype), None
    else:
        result = _dot(b, op, ct_side, other_side, dtype)
        layout = (*x_batch, *x_free, *contracted)
    if layout is not None:
        perm = tuple(layout.index(d) for d in range(x.tile.rank))
        result = b.op("transpose", result, perm=perm)
    return result


def _dot(
    b: Builder,
    op: Op,
    left: tuple[Value, Dims, Dims],
    right: tuple[Value, Dims, Dims],
    dtype: T.DType,
) -> Value:
    return b.op(
        "dot",
        left[0],
        right[0],
        contract=(left[1], right[1]),
        batch=(left[2], right[2]),
        dtype=dtype,
        precision=op.attrs["precision"],
    )


def _same_types(
    b: Builder, op: Op, cotangent: Value, other: Value, x: T.DType
) -> tuple[Value, Value]:
    """Both factors in one type.

    A matmul of bf16 operands keeps bf16 factors, as its hardware does: the cotangent is
    rounded. Otherwise the narrower one is widened.
    """
    y = other.tile.dtype
    if x == y == T.BF16:
        return b.cast(cotangent, T.BF16), other
    wide = max(cotangent.tile.dtype, y, key=lambda d: d.bits)
    return b.cast(cotangent, wide), b.cast(other, wide)
