"""legalize: which ops are replaced, by what, in which types, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pallasite.errors import UnsupportedError
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Loc, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.types import BF16, DTYPES, F32, I32, DType, RefType
from pallasite.ir.verify import verify
from pallasite.passes.lower.legalize import legalize
from tests.ir import kernels
from tests.ops.sampling import evaluate

LOC = Loc("model/routing.py", 88, "route")
MEMORY = frozenset({"load", "store"})
SIMPLE = MEMORY | {
    *("constant", "add", "sub", "mul", "div", "neg", "abs", "max", "min", "floor"),
    *("and", "or", "xor", "not", "shift_left", "shift_right_logical"),
    *("shift_right_arithmetic", "eq", "ne", "lt", "le", "gt", "ge", "select_n"),
    *("cast", "bitcast", "broadcast_in_dim"),
}


def kernel_of(
    build: Callable[..., Value], *dtypes: DType, shape: tuple[int, ...] = (8,)
) -> Kernel:
    """A kernel that stores what `build(builder, *loaded)` makes."""
    b = Builder(LOC)
    inputs = [Value(RefType(shape, d, "any"), "x") for d in dtypes]
    result = build(b, *(b.load(ref) for ref in inputs))
    output = Value(RefType(result.tile.shape, result.tile.dtype, "any"), "o")
    b.store(output, result)
    return Kernel("k", (*inputs, output), b.block(), 1)


def names(kernel: Kernel) -> list[str]:
    return [op.name for op in walk(kernel.body) if op.name not in MEMORY]


def types_of(kernel: Kernel, name: str) -> list[str]:
    found = [op for op in walk(kernel.body) if op.name == name]
    return [str(op.operands[0].tile.dtype) for op in found]


def test_native_kernel_is_returned_unchanged():
    kernel = kernel_of(lambda b, x: b.exp(x), F32)
    assert legalize(kernel, SIMPLE | {"exp"}, "here") is kernel


def test_missing_op_becomes_its_decomposition():
    kernel = kernel_of(lambda b, x: b.square(x), F32)
    new = legalize(kernel, SIMPLE, "here")
    verify(new)
    assert names(new) == ["mul"]


def test_decompositions_are_decomposed_again():
    kernel = kernel_of(lambda b, x: b.tan(x), F32)
    new = legalize(kernel, SIMPLE, "here")
    verify(new)
    assert set(names(new)) <= SIMPLE
    x = np.linspace(-1.5, 1.5, 8, dtype=np.float32)
    np.testing.assert_allclose(evaluate(new, [x])[0], np.tan(x), rtol=1e-6)


def test_shortcut_is_taken_where_its_op_is_native():
    kernel = kernel_of(lambda b, x: b.exp(x), F32)
    assert "exp2" in names(legalize(kernel, SIMPLE | {"exp2"}, "here"))
    assert "exp2" not in names(legalize(kernel, SIMPLE, "here"))


def test_two_shortcuts_do_not_chase_each_other():
    for name in ("exp", "exp2", "log", "log2"):
        kernel = kernel_of(lambda b, x, name=name: b.op(name, x), F32)
        assert set(names(legalize(kernel, SIMPLE, "here"))) <= SIMPLE


def test_locations_are_kept():
    kernel = kernel_of(lambda b, x: b.logistic(x), F32)
    new = legalize(kernel, SIMPLE, "here")
    assert len(names(new)) > 5
    assert {op.loc for op in walk(new.body)} == {LOC}


def test_ops_in_regions_are_replaced():
    kernel = kernels.flash_attention()
    native = frozenset(op.name for op in walk(kernel.body)) - {"exp"}
    new = legalize(kernel, native | SIMPLE, "here")
    verify(new)
    assert "exp" not in names(new)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(p.ref.shape).astype("f4") for p in kernel.inputs]
    for got, expected in zip(
        evaluate(new, arrays), evaluate(kernel, arrays), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)


# --- wider types ---


def only_32_bits(op: Op) -> bool:
    """A chip that loads, stores and converts every type, and computes in 32 bits."""
    if op.name in ("load", "store", "cast", "bitcast"):
        return True
    tiles = [v.tile.dtype for v in (*op.operands, *op.results)]
    return op.name in SIMPLE and all(d.is_bool or d.bits == 32 for d in tiles)


def test_bf16_is_computed_in_f32():
    kernel = kernel_of(lambda b, x, y: b.add(b.mul(x, y), x), BF16, BF16)
    new = legalize(kernel, only_32_bits, "here")
    verify(new)
    assert types_of(new, "mul") == types_of(new, "add") == ["f32"]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(8).astype(BF16.np) for _ in range(2)]
    np.testing.assert_array_equal(evaluate(new, arrays)[0], evaluate(kernel, arrays)[0])


def test_native_narrow_op_stays_narrow():
    kernel = kernel_of(lambda b, x: b.add(x, x), BF16)
    assert legalize(kernel, SIMPLE, "here") is kernel


WIDENED = [
    *("add", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "not"),
    *("and", "or", "xor", "shift_left", "shift_right_logical", "eq", "lt", "ge"),
    *("shift_right_arithmetic", "population_count", "clz", "square"),
]


@pytest.mark.parametrize("dtype", ["i8", "i16", "u8", "u16"])
@pytest.mark.parametrize("name", WIDENED)
def test_small_integers_are_computed_in_i32(name: str, dtype: str):
    row, type_ = table()[name], DTYPES[dtype]
    if type_ not in row.dtypes or (name, type_.kind) == (
        "shift_right_arithmetic",
        "uint",
    ):
        pytest.skip(f"no {name} of {dtype}")
    info = np.iinfo(type_.np)
    values = [info.min, info.max, 0, 1, 2, 7, info.max - 1, info.max // 2 + 1]
    arrays = [np.array(values, type_.np), np.array(values[::-1], type_.np)]
    for shift in range(8) if row.arity == 2 else [0]:
        arrays = [arrays[0], np.roll(arrays[1], shift)][: row.arity]
        kernel = kernel_of(lambda b, *xs: b.op(name, *xs), *[type_] * (row.arity or 1))
        new = legalize(kernel, only_32_bits, "here")
        verify(new)
        with np.errstate(all="ignore"):
            expected = np.asarray(row.meaning(*arrays))
        np.testing.assert_array_equal(evaluate(new, arrays)[0], expected)


def test_width_of_the_type_is_not_widened_away():
    kernel = kernel_of(lambda b, x, y: b.nextafter(x, y), BF16, BF16)
    new = legalize(kernel, only_32_bits, "here")
    verify(new)
    x = np.array([1, -1, 0, 2, 3, -4, 100, 0.1]).astype(BF16.np)
    y = np.zeros(8, BF16.np)
    np.testing.assert_array_equal(evaluate(new, [x, y])[0], np.nextafter(x, y))


# --- refusals ---


def message(kernel: Kernel, native) -> str:
    with pytest.raises(UnsupportedError) as caught:
        legalize(kernel, native, "tpu")
    return str(caught.value)


def test_error_names_op_line_and_attempts():
    kernel = kernel_of(lambda b, x: b.sqrt(x), F32, shape=(8, 128))
    assert message(kernel, SIMPLE) == (
        "backend 'tpu' cannot run sqrt on f32[8,128]\n  op     %1: f32[8,128] = sqrt "
        "%0\n  tried  native (not listed for tpu)\n  at     model/routing.py:88 in "
        "route\n  fix    use other operations, or run the kernel with interpret=True"
    )


def test_error_says_what_a_decomposition_lacks():
    kernel = kernel_of(lambda b, x: b.rsqrt(x), F32)
    assert message(kernel, SIMPLE) == (
        "backend 'tpu' cannot run rsqrt on f32[8]\n  op     %1: f32[8] = rsqrt %0\n  "
        "tried  native (not listed for tpu)\n         decomposition rsqrt (backend "
        "'tpu' cannot run sqrt on f32[8])\n  at     model/routing.py:88 in route\n  "
        "fix    use other operations, or run the kernel with interpret=True"
    )


def test_error_says_why_a_decomposition_does_not_apply():
    kernel = kernel_of(lambda b, x: b.clz(x), DTYPES["i4"])
    text = message(kernel, SIMPLE)
    assert "decomposition clz (supports integers of 8 bits and more, not i4)" in text


def test_error_for_a_tile_op_without_its_parts():
    kernel = kernel_of(lambda b, x: b.op("reduce", x, kind="max", axes=(0,)), I32)
    assert "cannot run slice on i32[8]" in message(kernel, MEMORY)


def test_op_that_needs_itself_is_refused(monkeypatch):
    row = replace(table()["square"], lower=lambda b, x: b.square(b.neg(x)))
    monkeypatch.setitem(table(), "square", row)
    kernel = kernel_of(lambda b, x: b.square(x), F32)
    assert "cannot run square on f32[8]" in message(kernel, SIMPLE)
