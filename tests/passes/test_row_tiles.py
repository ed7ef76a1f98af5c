"""Programs of one row get a dimension for the rows, along which their blocks grow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.nodes import walk
from pallasite.ir.verify import verify
from pallasite.passes.run import run
from pallasite.passes.schedule.row_tiles import row_tiles
from pallasite.passes.schedule.tpu_blocks import for_tpu
from pallasite.sites import calls_in
from pallasite.target import TPUS
from tests.passes.test_reblock import head
from tests.passes.test_same_meaning import outputs

F32, BF16 = jnp.float32, jnp.bfloat16
ROWS, WIDTH = 48, 136


def softmax(x, _):
    weights = jnp.exp(x - x.max())
    return weights / weights.sum()


def gated_norm(x, gain):
    scale = lax.rsqrt(jnp.mean(x * x) + 1e-6)
    even = lax.broadcasted_iota(jnp.int32, x.shape, 0) % 2 == 0
    return jnp.where(x.sum() > 0, x * scale * gain, jnp.where(even, gain, 1.0))


def in_order(x, gain):
    sums = jnp.flip(jnp.cumsum(x)) + gain
    half = x.shape[0] // 2
    return jnp.concatenate([sums[half:], sums[:half]]).reshape(-1, 2)[::-1].reshape(-1)


def carried(x, gain):
    return lax.fori_loop(0, 3, lambda n, y: y * 0.5 + x.max() + n, x) + gain


def while_small(x, gain):
    """How often it runs, a number of the row says."""
    small = lambda state: jnp.abs(state[0]).max() < 10
    return lax.while_loop(small, lambda s: (s[0] * 2 + gain, s[1] + 1), (x, 0))[0]


def one_row(function, dtype=F32, squeezed=False):
    """The kernel of a function of a row and of what is the same for all rows."""
    block = (None if squeezed else 1, WIDTH)
    at = slice(None) if squeezed else 0

    def kernel(x_ref, gain_ref, o_ref):
        y = function(x_ref[at].astype(F32), gain_ref[...])
        o_ref[at] = y.astype(o_ref.dtype)

    shape = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    rows = pl.BlockSpec(block, lambda i: (i, 0))
    gain = pl.BlockSpec((WIDTH,), lambda i: (0,))
    call = pl.pallas_call(
        kernel, shape, grid=(ROWS,), in_specs=[rows, gain], out_specs=rows
    )
    (found,) = calls_in(call, shape, jax.ShapeDtypeStruct((WIDTH,), F32))
    return run(found.kernel)


def assert_same(new, kernel):
    verify(new)
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=p.ref.shape).astype(p.ref.dtype.np) for p in kernel.inputs
    ]
    for got, want in zip(outputs(new, arrays), outputs(kernel, arrays), strict=True):
        got, want = (x.astype(np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize(
    "function", [softmax, gated_norm, in_order, carried, while_small]
)
def test_rows_are_a_dimension(function, squeezed: bool):
    kernel = one_row(function, squeezed=squeezed)
    new = row_tiles(kernel)
    assert "windows=(in[1, 136], in[136], out[1, 136])" in new.text
    loads = [op.result.tile.shape for op in walk(new.body) if op.name == "load"]
    assert (1, WIDTH) in loads
    assert_same(new, kernel)


@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("function", [softmax, gated_norm])
def test_a_tpu_computes_many_rows_at_once(function, dtype, squeezed: bool):
    kernel = one_row(function, dtype, squeezed)
    new = for_tpu(kernel, TPUS["v6e"])
    assert "grid=(1,)" in head(new) and "out[64, 136]" in head(new)  # 16 past the end
    assert_same(new, kernel)


def test_other_tiles_stay():
    """Matrices of one head each, products, and rows that are blocks already."""

    def kernel_of(body, block, shape=(8, 16, 128)):
        x = jax.ShapeDtypeStruct(shape, F32)
        spec = pl.BlockSpec(block, lambda i: (i, *[0] * (len(shape) - 1)))
        call = pl.pallas_call(body, x, grid=(8,), in_specs=[spec], out_specs=spec)
        (found,) = calls_in(call, x)
        return run(found.kernel)

    def plain(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...])

    def product(x_ref, o_ref):
        o_ref[0] = jnp.dot(x_ref[...], jnp.ones((128, 128)))[0]

    def nested(x_ref, o_ref):
        def inner(y_ref, z_ref):
            z_ref[...] = y_ref[...] + x_ref[0, 0]

        spec = pl.BlockSpec((1, 64), lambda j: (0, j))
        steps = (x_ref[0, 0].astype(jnp.int32),)
        pltpu.emit_pipeline(inner, grid=steps, in_specs=[spec], out_specs=[spec])(
            x_ref, o_ref
        )
        o_ref[0, :] *= x_ref[0, :].max()

    heads = kernel_of(plain, (None, 16, 128))
    blocks = kernel_of(plain, (1, 128), (8, 128))
    products = kernel_of(product, (1, 128), (8, 128))
    pipelines = kernel_of(nested, (1, 128), (8, 128))
    for kernel in (heads, blocks, products, pipelines):
        assert row_tiles(kernel) is kernel
