"""What several loops add to a cotangent is stored once, by the last of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite.sites import kernels_in

F32, BF16 = jnp.float32, jnp.bfloat16


def normed(x, chunk=8, back=False, **options):
    """Sums of columns over chunks of rows, then results chunk by chunk."""

    def kernel(x_ref, o_ref):
        steps = x_ref.shape[0] // chunk

        def total(i, carry):
            part = x_ref[pl.ds(i * chunk, chunk), :].astype(F32)
            return carry[0] + part.sum(0), carry[1] + (part * part).sum(0)

        zero = jnp.zeros(x_ref.shape[1], F32)
        s, q = jax.lax.fori_loop(0, steps, total, (zero, zero))
        mean = s / x_ref.shape[0]
        scale = jax.lax.rsqrt(q / x_ref.shape[0] - mean * mean + 1e-5)

        @pl.loop(0, steps)
        def _(i):
            i = steps - 1 - i if back else i
            at = pl.ds(i * chunk, chunk)
            y = jnp.tanh((x_ref[at, :].astype(F32) - mean) * scale)
            o_ref[at, :] = y.astype(o_ref.dtype)

    block = pl.BlockSpec((x.shape[0], 16), lambda j: (0, j))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        kernel,
        out,
        grid=(x.shape[1] // 16,),
        in_specs=[block],
        out_specs=block,
        **options,
    )(x)


def picked(x, y, first=False, masked=True, **options):
    """A loss of rows whose label's logit is loaded before or after the loop."""
    n = x.shape[1]

    def kernel(x_ref, y_ref, o_ref):
        row = pl.program_id(0)
        label = y_ref[row]
        if first:
            hit = x_ref[row, label]

        def body(j, total):
            columns = j * 16 + jnp.arange(16)
            at = (row, pl.ds(j * 16, 16))
            if masked:
                part = pl.load(x_ref, at, mask=columns < n, other=0.0)
            else:
                part = pl.load(x_ref, at)
            return total + (part.astype(F32) ** 3).sum()

        total = jax.lax.fori_loop(0, pl.cdiv(n, 16), body, jnp.float32(0))
        hit = hit if first else x_ref[row, label]
        o_ref[row] = total * hit.astype(F32)

    out = jax.ShapeDtypeStruct((x.shape[0],), F32)
    return pl.pallas_call(kernel, out, grid=(x.shape[0],), **options)(x, y)


def check(function, x, *more, tolerance=1e-4):
    loss = lambda x, **options: jnp.sin(function(x, *more, **options).astype(F32)).sum()
    got = jax.jit(jax.grad(loss))(x)
    want = jax.grad(functools.partial(loss, interpret=True))(x)
    got, want = (np.asarray(g, np.float32) for g in (got, want))
    np.testing.assert_allclose(got, want, tolerance, tolerance * np.abs(want).max())
    with config.override(target="h200"):
        back = kernels_in(jax.grad(loss), x)[-1]
    return back.text.split("body", 1)[1]


def operand(shape, dtype):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("back", [False, True])
def test_two_loops_through_a_block(dtype, back):
    # Wide columns, as otherwise the loops become whole columns.
    x = operand((1 << 11, 32), dtype)
    tolerance = 1e-4 if dtype == F32 else 2e-2
    text = check(functools.partial(normed, back=back), x, tolerance=tolerance)
    assert text.count("store %d_x_ref") == 1 and "load %d_x_ref" not in text


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("width", [64, 50])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_element_besides_a_loop(first, width, dtype):
    x = operand((6, width), dtype)
    y = jnp.asarray([0, 3, width - 1, 17, width + 5, 16], jnp.int32)
    tolerance = 1e-4 if dtype == F32 else 2e-2
    function = functools.partial(picked, first=first)
    check(function, x, y, tolerance=tolerance)


def test_an_element_is_stored_with_the_rows():
    x, y = operand((6, 1 << 15), BF16), jnp.zeros(6, jnp.int32)
    text = check(picked, x, y, tolerance=2e-2)
    assert text.count("store %d_x_ref") == 1 and "load %d_x_ref" not in text


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_operand_that_is_loaded_twice(dtype):
    def twice(x, **options):
        def kernel(x_ref, o_ref):
            o_ref[...] = jnp.sin(x_ref[...]) * x_ref[...]

        block = pl.BlockSpec((8, 128), lambda i: (i, 0))
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        grid = (x.shape[0] // 8,)
        return pl.pallas_call(
            kernel, out, grid=grid, in_specs=[block], out_specs=block, **options
        )(x)

    tolerance = 1e-5 if dtype == F32 else 2e-2
    text = check(twice, operand((32, 128), dtype), tolerance=tolerance)
    assert text.count("store %d_x_ref") == 1 and "load %d_x_ref" not in text
