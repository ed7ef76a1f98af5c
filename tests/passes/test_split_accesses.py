"""Tiles used or made in parts are loaded and stored in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.nodes import walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.split_accesses import MOST_IN_ALL, split_accesses
from pallasite.passes.run import run
from pallasite.sites import calls_in
from tests.fuzz.agreement import run_numpy
from tests.passes.normal.test_same_meaning import inputs, results

HALVES = """\
kernel @k(%x: ref<f32[6,8] any>, %o: ref<f32[6,8] any>) outputs 1 {
  %v: f32[6,8] = load %x[:, :]
  %n: f32[6,8] = neg %v
  %a: f32[6,4] = slice %n {starts=(0, 0), limits=(6, 4), strides=(1, 1)}
  %b: f32[6,4] = slice %n {starts=(0, 4), limits=(6, 8), strides=(1, 1)}
  %j: f32[6,8] = concatenate %b, %a {axis=1}
  %e: f32[6,8] = exp %j
  store %o[:, :] = %e
}
"""

REDUCED = """\
%r: f32[6] = reduce %n {kind="sum", axes=(1,)}
  store %x[:, 0] = %r
  %j: f32[6,8]"""


def names(kernel) -> list[str]:
    return [op.name for op in walk(kernel.body)]


def test_halves_are_loaded_and_stored_apart():
    before = parse_kernel(HALVES)
    after = split_accesses(before)
    verify(after)
    found = names(after)
    assert found.count("load") == found.count("store") == 2
    assert not {"slice", "concatenate"} & set(found)
    assert "store %o[:, 4:+4]" in after.text
    arrays = inputs(before)
    for old, new in zip(results(before, arrays), results(after, arrays), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_load_is_split_where_it_stands():
    text = HALVES.replace("  %n:", "  store %x[:, :] = %zero\n  %n:").replace(
        "  %v:", "  %zero: f32[6,8] = constant {value=0.0}\n  %v:"
    )
    after = split_accesses(parse_kernel(text))
    found = names(after)
    assert found.index("store") > max(i for i, n in enumerate(found) if n == "load")


@pytest.mark.parametrize(
    "change",
    [
        ("%j: f32[6,8]", REDUCED),
        ("limits=(6, 4), strides=(1, 1)", "limits=(6, 7), strides=(1, 2)"),
    ],
)
def test_other_uses_keep_the_tile(change: tuple[str, str]):
    kernel = parse_kernel(HALVES.replace(*change))
    assert names(split_accesses(kernel)).count("load") == 1


@pytest.mark.parametrize("width, loads", [(66, 5), (10, 1)])
def test_a_stencil_loads_each_neighbour_where_rows_are_long(width: int, loads: int):
    def body(x_ref, o_ref):
        x = x_ref[...]
        around = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
        o_ref[...] = x[1:-1, 1:-1] - around

    call = pl.pallas_call(body, jax.ShapeDtypeStruct((8, width - 2), jnp.float32))
    (found,) = calls_in(call, jnp.ones((10, width), jnp.float32))
    after = split_accesses(found.kernel)
    arrays = inputs(found.kernel)
    for old, new in zip(
        results(found.kernel, arrays), results(after, arrays), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    assert names(after).count("load") == loads
    assert ("slice" in names(after)) == (loads == 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotary_embeddings(dtype):
    def body(x_ref, s_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        a, b, s = x[:, :8], x[:, 8:], s_ref[...]
        turned = jnp.concatenate([a * s - b, b * s + a], axis=-1)
        o_ref[...] = turned.astype(dtype)

    call = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((12, 16), dtype))
    x, s = jnp.ones((12, 16), dtype), jnp.ones((12, 8), jnp.float32)
    (found,) = calls_in(call, x, s)
    after = split_accesses(found.kernel)
    arrays = inputs(found.kernel)
    for old, new in zip(
        results(found.kernel, arrays), results(after, arrays), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    assert not {"slice", "concatenate"} & set(names(after))


def gates(x_ref, w_ref, o_ref):
    y = jnp.dot(x_ref[...], w_ref[...])
    o_ref[...] = y[:, :64] * jnp.tanh(y[:, 64:])


def turned_gates(x_ref, w_ref, o_ref):
    """Rows of a product, by columns of a load."""
    y = jnp.dot(w_ref[...].T, x_ref[...].T)
    o_ref[...] = (y[:64] * jnp.tanh(y[64:])).T


def backwards(x_ref, w_ref, o_ref):
    """What the derivative of slices does: padded tiles are added, and multiplied."""
    x = x_ref[...]
    a = jnp.pad(jnp.tanh(x), ((0, 0), (64, 0))) + jnp.pad(x, ((0, 0), (0, 64)))
    o_ref[...] = jnp.dot(a, w_ref[...].T)


@pytest.mark.parametrize("body", [gates, turned_gates, backwards])
@pytest.mark.parametrize("rows", [3, 16])
def test_matmuls_by_a_load_are_divided_with_it(body, rows: int):
    arrays = [jnp.ones((rows, 64)), jnp.ones((64, 128))]
    out = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    (found,) = calls_in(pl.pallas_call(body, out), *arrays)
    before = run(found.kernel)
    after = split_accesses(before)
    verify(after)
    assert names(before).count("dot") == 1 and names(after).count("dot") == 2
    assert not {"slice", "concatenate", "pad"} & set(names(after))
    arrays = inputs(before)
    for old, new in zip(results(before, arrays), results(after, arrays), strict=True):
        np.testing.assert_allclose(old, new, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("low", [63, 65])
def test_padded_tiles_that_overlap_or_leave_a_gap_are_added(low: int):
    def body(x_ref, o_ref):
        x = x_ref[...]
        a = jnp.pad(x, ((0, 0), (low, 129 - low - 64)))
        o_ref[...] = a + jnp.pad(jnp.sin(x), ((0, 0), (0, 65)))

    out = jax.ShapeDtypeStruct((4, 129), jnp.float32)
    (found,) = calls_in(pl.pallas_call(body, out), jnp.ones((4, 64)))
    after = split_accesses(found.kernel)
    assert "concatenate" not in names(after)


def test_a_load_at_a_computed_row_is_divided_along_columns():
    def body(x_ref, o_ref):
        @pl.loop(0, 4)
        def _(i):
            x = x_ref[pl.ds(2 * i, 2), :]
            y = jnp.concatenate([x[:, 64:], -x[:, :64]], axis=1)
            o_ref[pl.ds(2 * i, 2), :] = y

    x = jnp.ones((8, 128))
    (found,) = calls_in(pl.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype)), x)
    after = split_accesses(found.kernel)
    verify(after)
    assert not {"slice", "concatenate"} & set(names(after))
    arrays = inputs(found.kernel)
    pairs = zip(results(found.kernel, arrays), results(after, arrays), strict=True)
    for old, new in pairs:
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("dtype, depth", [(jnp.bfloat16, 32), (jnp.float32, 20)])
def test_a_product_along_shifted_rows_is_a_sum_of_products(dtype, depth: int):
    """Of rows from a computed one on, which is clamped before it is shifted."""
    rows, width, taps = 2, 5, 3

    def body(x_ref, w_ref, o_ref):
        @pl.loop(0, 3)
        def _(i):
            x = x_ref[pl.ds(rows * i, rows + taps - 1), :, :]
            parts = [x[dy : dy + rows, dx : dx + width].reshape(rows * width, depth)
                     for dy in range(taps) for dx in range(taps)]  # fmt: skip
            y = jnp.dot(jnp.concatenate(parts, 1), w_ref[...],
                        preferred_element_type=jnp.float32)  # fmt: skip
            o_ref[pl.ds(rows * i, rows)] = y.reshape(rows, width, 16)

    out = jax.ShapeDtypeStruct((3 * rows, width, 16), jnp.float32)
    x = jnp.ones((7, width + taps - 1, depth), dtype)  # the last rows are clamped
    w = jnp.ones((taps * taps * depth, 16), dtype)
    (found,) = calls_in(pl.pallas_call(body, out), x, w)
    after = split_accesses(found.kernel)
    verify(after)
    assert not {"slice", "concatenate"} & set(names(after))
    assert names(after).count("dot") == taps * taps
    rng = np.random.default_rng(5)
    arrays = [rng.integers(-3, 3, p.ref.shape).astype(p.ref.dtype.np)
              for p in found.kernel.inputs]  # fmt: skip
    pairs = zip(run_numpy(found.kernel, arrays), run_numpy(after, arrays), strict=True)
    for old, new in pairs:
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "shape, axis, first", [((9, 40), 0, 0), ((9, 40), 0, 3), ((4, 10), 1, 0)]
)
def test_elements_that_take_turns_are_stored_some_apart(shape, axis, first, dtype):
    """Twice as many along an axis, between neighbours: rows do not move in registers,
    elements of a row do."""
    n = shape[axis]

    def body(x_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        cut = lambda a, b: jax.lax.slice_in_dim(x, a, b, axis=axis)
        before = jnp.concatenate([cut(0, 1), cut(0, n - 1)], axis=axis)
        after = jnp.concatenate([cut(1, n), cut(n - 1, n)], axis=axis)
        pair = [0.25 * before + 0.75 * x, 0.75 * x + 0.25 * after]
        y = jnp.stack(pair, axis=axis + 1)
        y = y.reshape(tuple(m * (1 + (d == axis)) for d, m in enumerate(shape)))
        rows = pl.ds(first, y.shape[0])
        o_ref[0, rows] = (2 * y).astype(dtype)

    whole = [m * (1 + (d == axis)) for d, m in enumerate(shape)]
    out = jax.ShapeDtypeStruct((1, whole[0] + 2 * first, whole[1]), dtype)
    (found,) = calls_in(pl.pallas_call(body, out), jnp.ones(shape, dtype))
    kernel = run(found.kernel)
    after = split_accesses(kernel)
    verify(after)
    assert ("concatenate" in names(after)) == ("slice" in names(after)) == (axis == 1)
    assert names(after).count("store") == (4 if axis == 0 else 1)
    assert (":2" in after.text) == (axis == 0)
    arrays = inputs(kernel)
    for old, new in zip(results(kernel, arrays), results(after, arrays), strict=True):
        np.testing.assert_array_equal(old.astype("f4"), new.astype("f4"))


@pytest.mark.parametrize("axis, at, reverse, stays",
                         [(0, 5, False, 0), (0, 0, True, 0), (1, 7, False, 0),
                          (0, 4, False, 1), (1, 7, True, 1)])  # fmt: skip
def test_the_last_of_a_scan_is_a_reduction(axis: int, at: int, reverse: bool, stays):
    way = f'{{kind="sum", axis={axis}, reverse={reverse}}}'
    starts = (at, 0) if axis == 0 else (0, at)
    limits = (at + 1, 8) if axis == 0 else (6, at + 1)
    line = "1,8" if axis == 0 else "6,1"
    text = f"""\
kernel @k(%x: ref<f32[6,8] any>, %o: ref<f32[6,8] any>,
%c: ref<f32[{line}] any>) outputs 2 {{
  %v: f32[6,8] = load %x[:, :]
  %s: f32[6,8] = scan %v {way}
  store %o[:, :] = %s
  %l: f32[{line}] = slice %s {{starts={starts}, limits={limits}, strides=(1, 1)}}
  store %c[:, :] = %l
}}
"""
    before = parse_kernel(text)
    after = split_accesses(before)
    verify(after)
    assert names(after).count("slice") == stays
    arrays = inputs(before)
    for old, new in zip(results(before, arrays), results(after, arrays), strict=True):
        np.testing.assert_allclose(old, new, rtol=1e-5)


def test_a_part_of_a_constant_is_one():
    text = HALVES.replace("load %x[:, :]", "constant {value=0.5}")
    after = split_accesses(parse_kernel(text))
    assert "slice" not in names(after) and "f32[6,8]" not in after.text.split("{", 1)[1]


def test_nothing_to_split_is_the_same_kernel():
    kernel = parse_kernel(HALVES.replace("%b, %a", "%a, %a"))
    kernel = split_accesses(kernel)
    assert split_accesses(kernel) is kernel


def test_parts_of_a_wider_number_are_not_split():
    """A bitcast that adds a dimension: its operand has no such parts."""
    kernel = parse_kernel("""\
kernel @k(%x: ref<i32 any>, %o: ref<f32[1] any>) outputs 1 {
  %v: i32 = load %x[]
  %w: i16[2] = bitcast %v {dtype=i16}
  %f: f32[2] = cast %w {dtype=f32}
  %a: f32[1] = slice %f {starts=(0,), limits=(1,), strides=(1,)}
  store %o[:] = %a
}
""")
    after = split_accesses(kernel)
    verify(after)
    assert run_numpy(after, [np.int32(-7)]) == run_numpy(kernel, [np.int32(-7)])


def test_halves_of_halves_stay_tiles():
    """A tree of sums would become a load and a number per element."""

    def body(x_ref, o_ref):
        x = jnp.sin(x_ref[...])
        while x.size > 1:
            x = x[: x.size // 2] + x[x.size // 2 :]
        o_ref[...] = x

    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    out = jax.ShapeDtypeStruct((1,), jnp.float32)
    (found,) = calls_in(pl.pallas_call(body, out), x)
    before = found.kernel
    after = split_accesses(before)
    verify(after)
    assert 2 < names(after).count("load") <= MOST_IN_ALL
    arrays = inputs(before)
    for old, new in zip(results(before, arrays), results(after, arrays), strict=True):
        np.testing.assert_array_equal(old, new)
