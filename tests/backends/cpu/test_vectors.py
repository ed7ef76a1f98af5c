"""Loops over lanes: every length, layout and vector width, against numpy."""

import numpy as np
import pytest

from pallasite import target
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ir.types import BOOL, DTYPES, F32, I32, INDEX, TileType
from tests.backends.cpu.running import compute, llvm_of, run, tiles_kernel, with_refs

WIDTHS = {"host": None, "avx2": target.AVX2, "sse": target.SSE}
LENGTHS = [1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 127, 200]


@pytest.fixture(params=list(WIDTHS))
def width(request):
    chosen = WIDTHS[request.param]
    if chosen is None:
        yield
        return
    with target.using(chosen):
        yield


def normal(*shape: int, dtype=np.float32) -> np.ndarray:
    rng = np.random.default_rng(list(shape))
    return rng.normal(size=shape).astype(dtype)


def reduce(b, x, kind, *axes):
    return b.op("reduce", x, kind=kind, axes=axes)


# --- elementwise loops ---


def test_chains_of_every_length(width):
    arrays = [normal(3, n) for n in LENGTHS]
    f = lambda b, v: b.add(b.mul(v, v), b.exp(v))
    got = compute(lambda b, *vs: [f(b, v) for v in vs], *arrays)
    for x, y in zip(arrays, got, strict=True):
        np.testing.assert_allclose(y, x * x + np.exp(x), rtol=1e-6)


def test_lanes_run_along_the_last_dimension_that_has_elements(width):
    x, y = normal(37, 1, 1), normal(37, 1, 1)
    kernel = tiles_kernel(lambda b, v, w: b.add(v, w), [x, y])
    np.testing.assert_array_equal(run(kernel, x, y)[0], x + y)
    assert "x float> " in llvm_of(kernel)


def test_layouts(width):
    """Contiguous, broadcast, strided, reversed and transposed operands in one loop."""
    x, row, column = normal(21, 37), normal(1, 37), normal(21, 1)
    wide, transposed = normal(21, 74), normal(37, 21)

    def emit(b, x, row, column, wide, transposed):
        shape, both = (21, 37), (0, 1)
        total = b.add(x, b.broadcast_in_dim(row, shape=shape, dims=both))
        total = b.mul(total, b.broadcast_in_dim(column, shape=shape, dims=both))
        cut = {"starts": (0, 1), "limits": (21, 74), "strides": (1, 2)}
        total = b.add(total, b.op("slice", wide, **cut))
        total = b.sub(total, b.transpose(transposed, perm=(1, 0)))
        return b.add(total, b.rev(x, axes=(1,)))

    got = compute(emit, x, row, column, wide, transposed)
    want = (x + row) * column + wide[:, 1::2] - transposed.T + x[:, ::-1]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_iota_compare_and_select(width):
    x = normal(5, 45)

    def emit(b, v):
        column = b.op("iota", type=TileType((5, 45), I32), dim=1)
        row = b.op("iota", type=TileType((5, 45), I32), dim=0)
        zero = b.constant(0.0, TileType((5, 45), F32))
        below = b.op("le", column, b.mul(row, row))
        return [b.select_n(below, zero, v), b.op("cast", column, dtype=F32), below]

    chosen, numbers, below = compute(emit, x)
    want = np.arange(45)[None] <= np.arange(5)[:, None] ** 2
    np.testing.assert_array_equal(chosen, np.where(want, x, 0))
    np.testing.assert_array_equal(numbers, np.tile(np.arange(45.0), (5, 1)))
    np.testing.assert_array_equal(below, want)


@pytest.mark.parametrize("name", ["bf16", "f16", "f64", "i8", "u16", "i64", "f8e4m3fn"])
def test_element_types_in_lanes(width, name: str):
    dtype = DTYPES[name]
    x = normal(3, 29) * 3
    if dtype.is_integer:  # numpy leaves open what a negative float is as an unsigned
        x = x.astype(np.int64)
    x = x.astype(dtype.np)
    got = compute(lambda b, v: b.add(b.mul(v, v), v), x)
    np.testing.assert_array_equal(got, (x * x).astype(dtype.np) + x)


def test_bools_in_lanes(width):
    x, y = normal(61), normal(61)
    got = compute(lambda b, v, w: b.and_(b.op("lt", v, w), b.op("gt", v, w)), x, y)
    assert got.dtype == bool and not got.any()
    mask = compute(lambda b, v, w: b.op("cast", b.op("lt", v, w), dtype=BOOL), x, y)
    np.testing.assert_array_equal(mask, x < y)


def test_a_tile_may_replace_what_it_is_made_of(width):
    x = normal(4, 45)

    def emit(b, ref, out):
        b.store(out, b.load(ref))
        value = b.load(out)
        b.store(out, b.mul(b.add(value, value), value))
        value = b.load(out)
        b.store(out, b.rev(value, axes=(1,)))

    got = run(with_refs(emit, [x], [TileType(x.shape, F32)]), x)[0]
    np.testing.assert_allclose(got, (2 * x * x)[:, ::-1], rtol=1e-6)


# --- reductions ---

KINDS = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


@pytest.mark.parametrize("kind", list(KINDS))
def test_reductions_of_every_length(width, kind: str):
    arrays = [normal(3, n) for n in LENGTHS]
    got = compute(lambda b, *vs: [reduce(b, v, kind, 1) for v in vs], *arrays)
    for x, y in zip(arrays, got, strict=True):
        np.testing.assert_allclose(y, KINDS[kind](x, axis=1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_reductions_along_any_axes(width, axes: tuple[int, ...]):
    x = normal(5, 6, 39)
    got = compute(lambda b, v: reduce(b, b.mul(v, v), "sum", *axes), x)
    np.testing.assert_allclose(got, (x * x).sum(axes), rtol=1e-5)


def test_many_rows(width):
    x = normal(300, 21)
    got = compute(lambda b, v: reduce(b, v, "sum", 0), x)
    np.testing.assert_allclose(got, x.sum(0), rtol=1e-4, atol=1e-4)


def test_integers_and_bits_reduce(width):
    x = np.random.default_rng(0).integers(-99, 99, (4, 53)).astype(np.int32)
    f = lambda b, v: [reduce(b, v, k, 1) for k in ("sum", "max", "and", "or", "xor")]
    got = compute(f, x)
    names = (np.add, np.maximum, np.bitwise_and, np.bitwise_or, np.bitwise_xor)
    for y, name in zip(got, names, strict=True):
        np.testing.assert_array_equal(y, name.reduce(x, axis=1))


@pytest.mark.parametrize("place", [0, 15, 16, 40, 69])
def test_nan_passes_through_reductions(width, place: int):
    x = normal(2, 70)
    x[1, place] = np.nan
    got = compute(lambda b, v: [reduce(b, v, k, 1) for k in ("max", "min", "sum")], x)
    for y in got:
        assert np.isnan(y).tolist() == [False, True]


@pytest.mark.parametrize("name", ["f32", "bf16", "f16", "f64", "i8", "u32", "bool"])
def test_short_rows_are_reduced_together(width, name: str):
    """As many rows as a vector has lanes, and more: their last steps are shared."""
    dtype = DTYPES[name].np
    low = 0 if name in ("bool", "u32") else -3
    x = np.random.default_rng(5).integers(low, 2, (2, 48, 64)).astype(dtype)
    kinds = ("max", "min", "or") if name == "bool" else ("max", "min", "sum")
    got = compute(lambda b, v: [reduce(b, v, kind, 2) for kind in kinds], x)
    wide = x.astype(np.float64)
    for kind, values in zip(kinds, got, strict=True):
        want = getattr(wide, {"or": "max"}.get(kind, kind))(2)
        np.testing.assert_array_equal(values.astype(np.float64), want.astype(dtype))


def test_infinities_reduce(width):
    x = np.full((2, 33), -np.inf, np.float32)
    x[1, 5] = np.inf
    np.testing.assert_array_equal(
        compute(lambda b, v: reduce(b, v, "max", 1), x), [-np.inf, np.inf]
    )


# --- what is computed where ---


def softmax(b, v):
    shape, dims = v.tile.shape, (0,)
    spread = lambda t: b.broadcast_in_dim(t, shape=shape, dims=dims)
    e = b.exp(b.sub(v, spread(reduce(b, v, "max", 1))))
    return b.div(e, spread(reduce(b, e, "sum", 1)))


def exps(code: str) -> float:
    """How often code computes exp, by the selects that limit its operand."""
    once = llvm_of(tiles_kernel(lambda b, v: b.exp(v), [normal(64)])).split("define")[1]
    return code.count(" select ") / once.count(" select ")


def test_softmax_computes_exp_once_and_stores_it_in_the_loop_of_the_sum():
    x = normal(8, 64)
    kernel = tiles_kernel(softmax, [x])
    code = llvm_of(kernel).split("define")[1]
    # Four vectors side by side, in one loop.
    assert 0 < exps(code) <= 4
    e = np.exp(x - x.max(1, keepdims=True))
    want = e / e.sum(1, keepdims=True)
    np.testing.assert_allclose(run(kernel, x)[0], want, rtol=1e-6)


def test_softmax_on_narrow_vectors(width):
    x = normal(8, 77)
    e = np.exp(x - x.max(1, keepdims=True))
    want = e / e.sum(1, keepdims=True)
    np.testing.assert_allclose(compute(softmax, x), want, rtol=2e-6)


def test_cheap_values_are_computed_again_rather_than_stored():
    x = normal(8, 64)

    def emit(b, v):
        mean = b.broadcast_in_dim(reduce(b, v, "max", 1), shape=(8, 64), dims=(0,))
        centred = b.sub(v, mean)
        spread = reduce(b, b.mul(centred, centred), "sum", 1)
        return b.mul(centred, b.broadcast_in_dim(spread, shape=(8, 64), dims=(0,)))

    centred = x - x.max(1, keepdims=True)
    want = centred * (centred**2).sum(1, keepdims=True)
    np.testing.assert_allclose(compute(emit, x), want, rtol=1e-5, atol=1e-5)


def test_a_value_used_twice_in_one_loop_is_computed_once():
    def emit(b, v):
        e = b.exp(v)
        return b.add(b.mul(e, e), b.sub(e, v))

    code = llvm_of(tiles_kernel(emit, [normal(64)])).split("define")[1]
    assert exps(code) == 1
    assert code.count("phi i64") == 1


# --- functions at their edges ---


@pytest.mark.parametrize(("name", "numpy"), [("exp", np.exp), ("tanh", np.tanh)])
def test_edges_of_functions(width, name: str, numpy):
    huge = [1e38, 3e38, np.inf, 200.0, 89.0, 50.0, 9.0, 8.3, 1e-30, 0.0]
    x = np.array([s * v for v in huge for s in (1, -1)] + [np.nan], np.float32)
    with np.errstate(over="ignore"):
        want = numpy(x)
    np.testing.assert_allclose(
        compute(lambda b, v: b.op(name, v), x), want, 1e-6, 1e-38
    )


def test_error_bounds_over_the_whole_range(width):
    x = np.linspace(-87, 88.7, 100_001).astype(np.float32)
    t = np.linspace(-9.5, 9.5, 100_001).astype(np.float32)
    exp, tanh = compute(lambda b, v, w: [b.exp(v), b.op("tanh", w)], x, t)
    for got, exact, bound in (
        (exp, np.exp(x.astype(np.float64)), 3.0),
        (tanh, np.tanh(t.astype(np.float64)), 5.0),
    ):
        unit = np.spacing(np.abs(exact).astype(np.float32))
        assert np.max(np.abs(got - exact) / unit) <= bound


def test_a_loop_of_one_round_changes_what_it_carries(width):
    """Reads before and after the round are in one basic block."""
    x = normal(5)

    def emit(b, v):
        body = Builder()
        i, carried = Value(INDEX), Value(v.type)
        block = body.block([i, carried], [body.add(carried, carried)])
        bounds = [b.index(0), b.index(1), b.index(1)]
        (result,) = b.emit("for", *bounds, b.add(v, v), regions=(block,))
        return result

    np.testing.assert_array_equal(compute(emit, x), 4 * x)


def test_part_of_a_tile_before_the_whole(width):
    x = normal(8)

    def emit(b, v):
        cut = b.op("slice", v, starts=(0,), limits=(5,), strides=(1,))
        return [b.add(cut, cut), b.add(v, v)]

    part, whole = compute(emit, x)
    np.testing.assert_array_equal(part, 2 * x[:5])
    np.testing.assert_array_equal(whole, 2 * x)


def test_arrays_are_fetched_ahead_and_what_is_repeated_is_not(width):
    x, row = normal(8, 64), normal(1, 64)

    def emit(b, v, w):
        return b.add(v, b.broadcast(w, (8, 64), (0, 1)))

    text = llvm_of(tiles_kernel(emit, [x, row]))
    assert text.count("call void @llvm.prefetch") == 1
    np.testing.assert_array_equal(compute(emit, x, row), x + row)


def test_what_a_first_pass_has_fetched_is_not_fetched_again(width):
    x = normal(8, 64)

    def emit(b, v):
        total = b.broadcast(reduce(b, v, "sum", 1), (8, 64), (0,))
        return b.add(v, total)

    text = llvm_of(tiles_kernel(emit, [x]))
    once = llvm_of(tiles_kernel(lambda b, v: reduce(b, v, "sum", 1), [x]))
    fetch = "call void @llvm.prefetch"
    assert text.count(fetch) == once.count(fetch) > 0
    want = x + x.sum(1, keepdims=True)
    np.testing.assert_allclose(compute(emit, x), want, rtol=1e-5, atol=1e-5)


def test_dimensions_that_a_reshape_keeps_keep_their_lanes(width):
    """Only what is regrouped is divided: indices of the first dimensions."""
    x = np.arange(24 * 3 * 32, dtype=np.int32).reshape(24, 3, 32)

    def emit(b, v):
        at = b.op("iota", dim=1, type=TileType((24, 3, 32), I32))
        shifted = b.reshape(b.mul(v, at), shape=(8, 9, 32))
        return b.add(shifted, b.like(1, shifted))

    kernel = tiles_kernel(emit, [x])
    want = (x * np.arange(3)[:, None]).reshape(8, 9, 32) + 1
    np.testing.assert_array_equal(run(kernel, x)[0], want)
    text = llvm_of(kernel)
    assert "gather" not in text and "div <" not in text and "rem <" not in text


@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 48), (7, 33), (64, 1), (2, 3, 1)])
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_all_dimensions_at_once(width, shape, kind):
    """Lanes are reduced once, after all rows."""
    x = normal(*shape)
    axes = range(len(shape))
    got = compute(lambda b, v: reduce(b, b.mul(v, v), kind, *axes), x)
    np.testing.assert_allclose(got, getattr(np, kind)(x * x), rtol=1e-5)


def test_outer_and_last_dimension_at_once(width):
    x = normal(6, 5, 64)
    got = compute(lambda b, v: reduce(b, v, "sum", 0, 2), x)
    np.testing.assert_allclose(got, x.sum((0, 2)), rtol=1e-5, atol=1e-5)
