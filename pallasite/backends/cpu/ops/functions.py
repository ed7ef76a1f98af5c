"""Elementary functions: the op table's own decompositions, or a shorter form.

They stay ops until they are emitted. Only here is it known whether a register or a
vector is computed, which determines the form; the instructions of a decomposition may
be contracted, unlike the author's own; and a single op can become one function of the
module (`called_functions.py`). The table `FUNCTIONS`, at the end, says how each one is
emitted. Narrow floats are computed in f32. Error bounds are those of the rows
(`max_ulp`).
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm import vector_ops as vec
from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Value
from pallasite.ir.opdef import table
from pallasite.ir.types import F32, F64, DType, TileType
from pallasite.target import host

# One element of an op: code, op name, attributes, operand types, result type, operands.
Element = Callable[
    [Function, str, Mapping[str, Any], tuple[DType, ...], DType, list[Val]], Val
]


def evaluate(
    f: Function, name: str, dtype: DType, values: list[Val], element: Element
) -> Val:
    """The function's value; `element` computes the ops it consists of."""
    wide = F64 if dtype == F64 else F32
    form = FUNCTIONS[name]
    if form is not None and form.applies(wide, values[0].count):
        return form.write(f, *values)
    block = _decomposition(name, wide)
    known = dict(zip(block.params, values, strict=True))
    for op in block.ops:
        result = op.result.tile.dtype
        if op.name == "constant":
            known[op.result] = scalars.constant(op.attrs["value"], result)
            continue
        operands = [known[v] for v in op.operands]
        if op.name in _CONTRACTED and result.is_float:
            # The decompositions hold whether or not multiply-adds are fused.
            known[op.result] = f.binary(_CONTRACTED[op.name], *operands)
            continue
        dtypes = tuple(v.tile.dtype for v in op.operands)
        known[op.result] = element(f, op.name, op.attrs, dtypes, result, operands)
    return known[block.yields[0]]


_CONTRACTED = {
    "add": "fadd contract",
    "sub": "fsub contract",
    "mul": "fmul contract",
}


@cache
def _decomposition(name: str, dtype: DType) -> Block:
    row, builder = table()[name], Builder()
    assert row.lower is not None and row.arity is not None, name
    params = [Value(TileType((), dtype)) for _ in range(row.arity)]
    result = row.lower(builder, *params)
    return builder.block(params, [result])


# exp(r) = 1 + r + r^2 (...), |r| <= log(2)/2; highest power first.
_EXP = (0.001381355, 0.008365171, 0.04166773, 0.16666547, 0.5)
_LOG2_E, _LN2 = 1.4426950408889634, 0.6931471805599453
_ROUNDS = 1.5 * 2.0**23
_LN2_HIGH = 0.693359375  # few bits: products with n are exact
_LN2_LOW = _LN2 - _LN2_HIGH


def _exp_by_scaling(f: Function, x: Val) -> Val:
    """exp with an instruction that scales by 2**n, with overflow and underflow."""
    number = lambda value: scalars.floating(value, "float")
    # Far out of range, x - n log(2) would lose all digits. NaN passes both selects.
    for test, bound in (("fcmp olt", -200.0), ("fcmp ogt", 200.0)):
        x = f.select(f.compare(test, x, number(bound)), number(bound), x)
    # Adding and subtracting a number without fraction bits rounds.
    n = f.intrinsic("fma", x, number(_LOG2_E), number(_ROUNDS))
    n = f.binary("fsub", n, number(_ROUNDS))
    r = f.intrinsic("fma", n, number(-_LN2_HIGH), x)
    r = f.intrinsic("fma", n, number(-_LN2_LOW), r)
    return _scaled(f, _horner(f, r, (*_EXP, 1.0, 1.0)), n)


# 2**r, |r| <= 1/2, fitted for minimal relative error (2e-9); highest power first.
_EXP2 = (
    0.00015353361959569156,
    0.0013398873852565885,
    0.00961843691766262,
    0.055503323674201965,
    0.24022647738456726,
    0.6931471824645996,
    1.0,
)


def _exp2_by_scaling(f: Function, x: Val) -> Val:
    """exp2 with an instruction that subtracts the integer part; zero for inf."""
    r = _of_16(f, "reduce", x, integer(0, "i32"))  # to the nearest whole number
    return _scaled(f, _horner(f, r, _EXP2), f.binary("fsub", x, r))


def _scaled(f: Function, x: Val, n: Val) -> Val:
    """x * 2**n in one instruction."""
    return _of_16(f, "scalef", x, n)


def _of_16(f: Function, name: str, x: Val, other: Val) -> Val:
    """An AVX512 instruction on 16 numbers, applied to as many as there are."""
    if x.count != 16:
        if other.count:
            other = vec.resized(f, other, 16)
        return vec.resized(f, _of_16(f, name, vec.resized(f, x, 16), other), x.count)
    every, nothing = integer(-1, "i16"), Val(x.type, "zeroinitializer")
    rounding = integer(4, "i32")  # the thread's current rounding mode
    operands = x, other, nothing, every, rounding
    return f.call(f"llvm.x86.avx512.mask.{name}.ps.512", x.type, *operands, pure=True)


# Odd functions with limit one: x P(x^2) / Q(x^2) up to the number given last, fitted
# for minimal relative error (1e-8 before rounding); highest power first. In total 4.7
# ulp for tanh and 5.4 for erf.
_TANH = (
    (
        1.4647895784822885e-08,
        2.1508249374538615e-05,
        0.0035491546962925047,
        0.1342585847460141,
        0.9999999906984611,
    ),
    (
        8.294964889182504e-07,
        0.00033739264756498275,
        0.02607989523196317,
        0.4675918331810573,
        1.0,
    ),
    8.3,
)
_ERF = (
    (
        2.2384709395334562e-06,
        0.00028874083264534515,
        0.003513007826818475,
        0.052027176050962326,
        0.18330315639309674,
        1.1283791585548244,
    ),
    (
        4.022074162108527e-05,
        0.0011183340185847979,
        0.014465172195645006,
        0.11136963400144283,
        0.49578127814148437,
        1.0,
    ),
    3.7,
)


def _odd_ratio(
    f: Function,
    x: Val,
    above: tuple[float, ...],
    below: tuple[float, ...],
    end: float,
) -> Val:
    """One division and no exp; one beyond the fitted range."""
    one, last = (scalars.floating(v, "float") for v in (1.0, end))
    size, square = f.intrinsic("fabs", x), f.binary("fmul", x, x)
    top = f.binary("fmul", size, _horner(f, square, above))
    ratio = f.binary("fdiv", top, _horner(f, square, below))
    ratio = f.select(f.compare("fcmp ogt", ratio, one), one, ratio)
    ratio = f.select(f.compare("fcmp ogt", size, last), one, ratio)
    return f.intrinsic("copysign", ratio, x)


def _horner(f: Function, x: Val, coefficients: tuple[float, ...]) -> Val:
    first, *rest = (scalars.floating(c, "float") for c in coefficients)
    total = first
    for coefficient in rest:
        total = f.intrinsic("fma", total, x, coefficient)
    return total


class Form(NamedTuple):
    """An alternative to a function's decomposition, where it applies."""

    applies: Callable[[DType, int], bool]  # of the type computed in, number of lanes
    write: Callable[..., Val]  # of the code and the operands


def _can_scale(dtype: DType, lanes: int) -> bool:
    return dtype == F32 and lanes > 0 and host().has("avx512f")


def _can_reduce(dtype: DType, lanes: int) -> bool:
    return _can_scale(dtype, lanes) and host().has("avx512dq")


def _is_f32(dtype: DType, lanes: int) -> bool:
    return dtype == F32


def _is_f64(dtype: DType, lanes: int) -> bool:
    return dtype == F64


def _ratio(coefficients: tuple[Any, ...]) -> Form:
    return Form(_is_f32, lambda f, x: _odd_ratio(f, x, *coefficients))


def _library(name: str) -> Form:
    """Their decompositions do not reduce huge angles in f64."""
    return Form(_is_f64, lambda f, x: f.call(name, "double", x, pure=True))


# How each function is emitted: in this form where it applies, else (and always, for
# None) as its row of the op table decomposes it.
FUNCTIONS: dict[str, Form | None] = {
    "exp": Form(_can_scale, _exp_by_scaling),
    "exp2": Form(_can_reduce, _exp2_by_scaling),
    "expm1": None,
    "log": None,
    "log1p": None,
    "log2": None,
    "logistic": None,
    "pow": None,  # of floats
    "cbrt": None,
    "sin": _library("sin"),
    "cos": _library("cos"),
    "tan": _library("tan"),
    "asin": None,
    "acos": None,
    "atan": None,
    "atan2": None,
    "sinh": None,
    "cosh": None,
    "tanh": _ratio(_TANH),
    "asinh": None,
    "acosh": None,
    "atanh": None,
    "erf": _ratio(_ERF),
    "erfc": None,
    "erf_inv": None,
    "lgamma": None,
}
