"""Vector values in LLVM IR text: loads, stores, splats, transposes, widening.

Types are written with their element count, as `<16 x float>`; every access states only
the alignment of one element, since windows may start anywhere. Used by
`microkernel.py`, `packing.py`, `amx.py` and `functions.py`.
"""

from collections.abc import Sequence

from pallasite.backends.cpu.llvm import float8, scalars
from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.ir.types import DType


def vector(element: str, count: int) -> str:
    return f"<{count} x {element}>"


def load(f: Function, type: str, pointer: Val, align: int) -> Val:
    return f.value(type, f"load {type}, {pointer}, align {align}")


def store(f: Function, value: Val, pointer: Val, align: int) -> None:
    f.line(f"store {value}, {pointer}, align {align}")


def offset(f: Function, pointer: Val, element: str, count: int | Val) -> Val:
    """The address `count` elements further."""
    steps = count if isinstance(count, Val) else integer(count)
    return f.element(pointer, element, steps)


def splat(f: Function, value: Val, count: int) -> Val:
    type = vector(value.type, count)
    first = f.pure(type, f"insertelement {type} poison, {value}, i64 0")
    zeros = f"{vector('i32', count)} zeroinitializer"
    return f.pure(type, f"shufflevector {first}, {type} poison, {zeros}")


def resized(f: Function, x: Val, count: int) -> Val:
    """The first elements of a vector, or all of them with the last one repeated."""
    return f.shuffle(x, x, [min(n, x.count - 1) for n in range(count)])


def transpose(f: Function, rows: Sequence[Val]) -> list[Val]:
    """The columns of a square of vectors, by swapping ever larger quadrants."""
    vectors, count = list(rows), len(rows)
    step = 1
    while step < count:
        low = [j if not j & step else count + j - step for j in range(count)]
        high = [j + step if not j & step else count + j for j in range(count)]
        for i in range(count):
            if not i & step:
                a, b = vectors[i], vectors[i + step]
                vectors[i] = f.shuffle(a, b, low)
                vectors[i + step] = f.shuffle(a, b, high)
        step *= 2
    return vectors


def can_widen(source: DType, target: DType) -> bool:
    """Whether whole vectors can be converted, rather than element by element."""
    if source == target:
        return not source.is_bool
    return not (source.is_bool or source.name in float8.FORMATS or source.bits < 8)


def widen(f: Function, raw: Val, count: int, source: DType, target: DType) -> Val:
    """Elements as loaded, converted to a type that represents them exactly."""
    wide = vector(scalars.register(target), count)
    if source == target:
        return raw
    if source.name == "bf16":
        words = f.convert("zext", raw, vector("i32", count))
        bits = f.binary("shl", words, splat(f, integer(16, "i32"), count))
        raw = f.convert("bitcast", bits, vector("float", count))
        return f.convert("fpext", raw, wide)
    if source.is_float:
        return f.convert("fpext", raw, wide)
    if target.is_float:
        name = "sitofp" if source.is_signed_int else "uitofp"
        return f.convert(name, raw, wide)
    if source.bits == target.bits:
        return raw
    if source.bits > target.bits:
        return f.convert("trunc", raw, wide)
    return f.convert("sext" if source.is_signed_int else "zext", raw, wide)
