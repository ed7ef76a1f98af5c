"""Tiles that only constants and positions make are constants of the code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl


def both(kernel, x, rows: int = 1):
    """The CPU's results are the emulation's; gives the names of the tables."""
    spec = pl.BlockSpec((x.shape[0] // rows, *x.shape[1:]), lambda i: (i, 0))

    def call(**how):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        given = {"grid": (rows,), "in_specs": [spec], "out_specs": spec}
        return pl.pallas_call(kernel, out, **given, **how)

    got, want = call(backend="cpu")(x), call(interpret=True)(x)
    eps = float(jnp.finfo(x.dtype).eps)
    got, want = (np.asarray(v).astype(np.float64) for v in (got, want))
    np.testing.assert_allclose(got, want, rtol=4 * eps, atol=4 * eps)
    text = pl.lower(call())(x).stages(backend="cpu")["llvm"]
    return [line for line in text.splitlines() if line.startswith("@tile.")]


def normal(*shape: int, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(4, 37), (2, 64)])
def test_angles_of_positions(dtype, shape):
    def kernel(x_ref, o_ref):
        lanes = lax.broadcasted_iota(jnp.int32, x_ref.shape, 1)
        angles = lanes.astype(jnp.float32) * 0.1
        x = x_ref[...]
        o_ref[...] = x * jnp.cos(angles).astype(dtype) + jnp.sin(angles).astype(dtype)

    assert len(both(kernel, normal(*shape, dtype=dtype), rows=2)) == 2


def test_rows_repeat_and_equal_tables_are_one():
    def kernel(x_ref, o_ref):
        decay = jnp.exp2(-jnp.arange(8.0) / 3)[:, None]
        again = jnp.exp2(-jnp.arange(8.0) / 3).reshape(8, 1)
        o_ref[...] = x_ref[...] * decay + again

    assert len(both(kernel, normal(8, 45))) == 1


def test_what_the_program_or_a_loop_gives_is_computed():
    def kernel(x_ref, o_ref):
        lanes = jnp.arange(32)[None, :] + pl.program_id(0)
        total = lax.fori_loop(
            0, 3, lambda i, t: t + jnp.sin((lanes * i).astype(jnp.float32)), x_ref[...]
        )
        o_ref[...] = total

    assert both(kernel, normal(4, 32), rows=4) == []


def test_large_tiles_are_computed():
    def kernel(x_ref, o_ref):
        lanes = lax.broadcasted_iota(jnp.int32, (8, 1024), 1)
        o_ref[...] = x_ref[...] + jnp.sin(lanes.astype(jnp.float32))

    assert both(kernel, normal(8, 1024)) == []
