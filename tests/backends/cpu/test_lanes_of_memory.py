"""Masked slices, 8-bit floats, columns and folded tiles: a vector at a time.

Each is compared with the emulation for several vector widths, and its LLVM text says
that elements are not accessed one by one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import target

WIDTHS = {"host": None, "sse": target.SSE}
Shape = jax.ShapeDtypeStruct


@pytest.fixture(params=list(WIDTHS))
def width(request):
    chosen = WIDTHS[request.param]
    if chosen is None:
        yield
        return
    with target.using(chosen):
        yield


def normal(*shape: int, dtype=jnp.float32):
    rng = np.random.default_rng(list(shape))
    return jnp.asarray(rng.normal(size=shape) * 3, dtype)


def same(kernel, out_shape, *arrays, **options):
    """The results of both backends are equal; gives the LLVM text."""

    def call(backend):
        how = {"interpret": True} if backend is None else {"backend": backend}
        return pl.pallas_call(kernel, out_shape, **how, **options)

    got, want = call("cpu")(*arrays), call(None)(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v) for v in (a, b))
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))
    return pl.lower(call("cpu"))(*arrays).stages(backend="cpu")["llvm"]


def blocks_of(text: str) -> list[list[str]]:
    """The instructions of each basic block."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.endswith(":"):
            found.append([])
        found[-1].append(line)
    return found


# --- masked slices ---

DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("n", [5, 45])
def test_masked_slices_at_computed_places(width, dtype, n: int):
    """Their ends may be beyond the array's: reads are of the nearest element there."""
    x = normal(3, 64).astype(dtype)

    def kernel(s_ref, x_ref, o_ref, p_ref):
        lanes = lax.broadcasted_iota(jnp.int32, (3, n), 1)

        @pl.loop(0, s_ref.shape[0])
        def _(at):
            mask = (lanes * 7 + at) % 5 < 3
            here = (slice(None), pl.ds(s_ref[at], n))
            other = jnp.ones((3, n), dtype)
            o_ref[at] = pl.load(x_ref, here, mask=mask, other=other)
            pl.store(p_ref.at[at], here, o_ref[at], mask=mask)

    starts = jnp.array([0, 3, 64 - n, 61 - n, 40, -3, 70, -200, 63])
    shapes = Shape((len(starts), 3, n), dtype), Shape((len(starts), 3, 64), dtype)
    # What no mask allows to be stored is what was there.
    kept = jnp.zeros(shapes[1].shape, dtype)
    into = lambda s_ref, x_ref, _, o_ref, p_ref: kernel(s_ref, x_ref, o_ref, p_ref)
    text = same(into, shapes, starts, x, kept, input_output_aliases={2: 1})
    assert "masked.store" in text
    assert "masked.gather" not in text and "masked.scatter" not in text


def test_masked_rows_that_indices_name(width):
    """Rows in order, since two indices may be one row; a row by vectors."""
    x, rows = normal(6, 37), jnp.array([1, 3, 1, 9, 0, -1])

    def kernel(i_ref, x_ref, _, o_ref):
        lanes = lax.broadcasted_iota(jnp.int32, (6, 37), 1)
        pl.store(o_ref, (i_ref[...], slice(None)), x_ref[...], mask=lanes % 3 < 2)

    kept = jnp.zeros((5, 37))
    shape = Shape((5, 37), jnp.float32)
    text = same(kernel, shape, rows, x, kept, input_output_aliases={2: 0})
    assert "masked.store" in text


# --- 8-bit floats ---


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_8_bit_floats_are_read_and_rounded_in_lanes(width, name: str):
    dtype = jnp.dtype(name)
    x = normal(3, 64)

    def kernel(x_ref, o_ref, y_ref):
        y = jnp.clip(x_ref[...] * 2, -448.0, 448.0).astype(dtype)
        o_ref[...] = y
        y_ref[...] = (x_ref[...] * 3).astype(dtype).astype(jnp.float32) + 1

    shapes = Shape((3, 64), dtype), Shape((3, 64), jnp.float32)
    text = same(kernel, shapes, x)
    assert "masked.gather" not in text


def test_a_rounded_8_bit_float_is_packed_once():
    x = normal(64)

    def kernel(x_ref, o_ref):
        o_ref[...] = (x_ref[...] * 2).astype(jnp.float8_e4m3fn)

    text = same(kernel, Shape((64,), jnp.float8_e4m3fn), x)
    lines = [line for line in text.splitlines() if "icmp ugt" in line]
    assert sum(str(0x7F800000) in line for line in lines) == 1  # whether it is NaN


def test_nan_of_8_bit_floats_in_lanes(width):
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e5m2fnuz"):
        dtype = jnp.dtype(name)
        codes = np.arange(256, dtype=np.uint8)

        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...].astype(jnp.float32)

        x = jnp.asarray(codes.view(dtype))
        out = pl.pallas_call(kernel, Shape((256,), jnp.float32), backend="cpu")(x)
        want = codes.view(dtype).astype(np.float32)
        got = np.asarray(out).view(np.uint32)
        np.testing.assert_array_equal(got, want.view(np.uint32))


# --- columns ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize("shape", [(64, 24, 7), (33, 40, 5)])
def test_a_column_beside_all_rows_is_gathered_once(width, dtype, shape):
    """Not again for each row."""
    m, n, k = shape
    x, y = normal(m, k).astype(dtype), normal(n, k).astype(dtype)

    def kernel(x_ref, y_ref, o_ref):
        def feature(d, total):
            return total + jnp.abs(x_ref[:, d][:, None] - y_ref[:, d][None, :])

        o_ref[...] = lax.fori_loop(0, k, feature, jnp.zeros((m, n), dtype))

    text = same(kernel, Shape((m, n), dtype), x, y)
    word = "sub nsw <" if dtype == jnp.int32 else "fsub <"
    for block in blocks_of(text):
        gathers = any("masked.gather" in line for line in block)
        assert not (gathers and any(word in line for line in block))


# --- folded tiles ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e4m3fn, jnp.int8])
def test_ops_of_a_folded_tile_divide_no_indices(width, dtype):
    """Groups of a row, scaled; the result is cast after it is a row again."""
    x = normal(4, 96)

    def kernel(x_ref, o_ref, s_ref):
        for row in range(4):
            groups = x_ref[row, :].reshape(6, 16)
            scale = jnp.abs(groups).max(axis=1, keepdims=True)
            flat = (groups * scale).reshape(96)
            o_ref[row, :] = jnp.clip(flat * 8, -96, 96).astype(dtype)
            s_ref[row, :] = scale[:, 0]

    text = same(kernel, (Shape((4, 96), dtype), Shape((4, 6), jnp.float32)), x)
    assert "udiv <" not in text and "urem <" not in text
