"""Elementwise ops as functions of the module, where a kernel has many uses of them.

An op of few instructions, or one that is rarely used, is emitted inline and optimised
with the surrounding code. An op that would take many lines that way (`INLINE_LINES`)
becomes one function per number of lanes, and each use a call: LLVM's time is
proportional to the amount of code, and `sin` alone is 200 instructions.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from pallasite.backends.cpu.llvm import scalars, vector_loops
from pallasite.backends.cpu.llvm.values import vector
from pallasite.backends.cpu.llvm.writer import Function, Module, Val
from pallasite.backends.cpu.ops import arithmetic
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Kernel, Op, walk
from pallasite.ir.types import DType

INLINE_LINES = 1000  # of one kind of op in a kernel; beyond this it is called
SHORT = 8  # lines that cost LLVM about as much as a call
LONGEST = 500  # lines of one op; with few uses there is no need to count them


class Kind(NamedTuple):
    """What two uses of an op must share to have the same code."""

    name: str
    attrs: tuple[tuple[str, Any], ...]
    dtypes: tuple[DType, ...]
    result: DType


def called_kinds(kernel: Kernel) -> frozenset[Kind]:
    """The kinds of elementwise ops that this kernel uses too often to inline."""
    uses = Counter(map(_kind, filter(_is_elementwise, walk(kernel.body))))
    return frozenset(kind for kind, n in uses.items() if _is_long(kind, n))


def element(
    f: Function,
    name: str,
    attrs: Mapping[str, Any],
    dtypes: tuple[DType, ...],
    result: DType,
    values: list[Val],
) -> Val:
    """One element of an elementwise op, inline or by a call."""
    if f.module.called:
        kind = Kind(name, tuple(attrs.items()), dtypes, result)
        if kind in f.module.called:
            return _call(f, kind, values)
    return arithmetic.element(f, name, attrs, dtypes, result, values)


def _is_elementwise(op: Op) -> bool:
    return op.name in arithmetic.NATIVE


def _kind(op: Op) -> Kind:
    dtypes = tuple(v.tile.dtype for v in op.operands)
    return Kind(op.name, tuple(op.own_attrs.items()), dtypes, op.result.tile.dtype)


def _is_long(kind: Kind, uses: int) -> bool:
    if uses <= INLINE_LINES // LONGEST:
        return False
    lines = _lines(kind)
    return lines > SHORT and uses * lines > INLINE_LINES


@cache
def _lines(kind: Kind) -> int:
    """How many instructions the op takes on a vector; none if there is no such op."""
    try:
        return len(_function(Module(), "counted", kind, vector_loops.width()).lines)
    except UnsupportedError:  # raised again where the op's source line is known
        return 0


def _call(f: Function, kind: Kind, values: list[Val]) -> Val:
    values = f.alike(*values)
    count = values[0].count
    name = f.module.name_of((kind, count), kind.name)
    if not f.module.defines(name):
        _function(f.module, name, kind, count)
    return f.call_pure(name, vector(scalars.register(kind.result), count), *values)


def _function(module: Module, name: str, kind: Kind, count: int) -> Function:
    """The op as a function of vectors of `count` lanes, or of scalars."""
    types = [vector(scalars.register(dtype), count) for dtype in kind.dtypes]
    params = [(type, f"x{n}") for n, type in enumerate(types)]
    returns = vector(scalars.register(kind.result), count)
    f = Function(module, name, params, returns, "internal", "noinline")
    attrs = dict(kind.attrs)
    value = arithmetic.element(
        f, kind.name, attrs, kind.dtypes, kind.result, list(f.params)
    )
    f.line(f"ret {f.splat(value, count)}")
    return f
