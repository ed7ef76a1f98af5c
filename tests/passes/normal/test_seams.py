"""Masks that drop whole pieces of a joined tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.passes.normal.seams import seams
from pallasite.passes.run import run
from pallasite.sites import kernels_in

SHAPE = (5, 12)


def kernel_of(body, dtype=jnp.float32) -> Kernel:
    x = jax.ShapeDtypeStruct(SHAPE, dtype)

    def kernel(x_ref, o_ref):
        at = [jax.lax.broadcasted_iota(jnp.int32, SHAPE, d) for d in range(2)]
        o_ref[...] = body(x_ref[...], *at).astype(dtype)

    return run(kernels_in(pl.pallas_call(kernel, out_shape=x), x)[0])


ROLLED = {
    "past": lambda x, t, n: jnp.where(t >= 2, jnp.roll(x, 2, 0), 0),
    "past, by another test": lambda x, t, n: jnp.where(t < 2, 0, jnp.roll(x, 2, 0)),
    "future": lambda x, t, n: jnp.where(n < 11, jnp.roll(x, -1, 1), 0),
    "future, at most": lambda x, t, n: jnp.where(n <= 8, jnp.roll(x, -3, 1), 7),
    "three columns": lambda x, t, n: jnp.where(n >= 3, jnp.roll(x, 3, 1), -1),
    "three pieces": lambda x, t, n: jnp.where(
        n > 3, jnp.concatenate([x[:, :2], x[:, 4:6], x[:, 1:9]], 1), 0
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ROLLED)
def test_dropped_pieces_are_padding(name, dtype):
    before = kernel_of(ROLLED[name], dtype)
    assert "concatenate" in before.text and "select" in before.text
    after = seams(before)
    assert "concatenate" not in after.text and "select" not in after.text
    assert after.text.count("= pad") == 1
    x = np.random.default_rng(0).normal(size=SHAPE).astype(dtype)
    one, two = (Walker(k, NumpyNumbers()).run([x])[0] for k in (before, after))
    np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


OTHERS = {
    "part of a piece": lambda x, t, n: jnp.where(t >= 1, jnp.roll(x, 2, 0), 0),
    "another dimension": lambda x, t, n: jnp.where(n >= 2, jnp.roll(x, 2, 0), 0),
    "the middle": lambda x, t, n: jnp.where(t != 2, jnp.roll(x, 2, 0), 0),
    "no number": lambda x, t, n: jnp.where(t >= 2, jnp.roll(x, 2, 0), x),
}


def test_numbers_that_begin_again_stay():
    """An int8 counts to 127: the 128th position, -128, is less than 2 again."""

    def kernel(x_ref, o_ref):
        at = jax.lax.broadcasted_iota(jnp.int8, x_ref.shape, 1)
        o_ref[...] = jnp.where(at < 2, 0, jnp.roll(x_ref[...], 2, 1))

    for width, stays in ((128, False), (129, True)):
        x = jax.ShapeDtypeStruct((5, width), jnp.float32)
        before = run(kernels_in(pl.pallas_call(kernel, out_shape=x), x)[0])
        assert (seams(before) is before) == stays


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    before = kernel_of(OTHERS[name])
    assert seams(before) is before
