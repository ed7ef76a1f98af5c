"""Repeated tiles as copies side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.backends.tpu.repeats import join_repeats
from pallasite.ir.nodes import walk
from pallasite.ir.verify import verify
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.tpu.harness import mosaic
from tests.passes.test_same_meaning import outputs


def kernel_of(function, shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    out = jax.eval_shape(function, x)

    def kernel(x_ref, o_ref):
        o_ref[...] = function(x_ref[...])

    (kernel,) = kernels_in(pl.pallas_call(kernel, out_shape=out), x)
    return run(kernel)


@pytest.mark.parametrize(
    "function, shape, is_joined",
    [
        (lambda x: jnp.tile(x, (1, 4)), (16, 128), True),
        (lambda x: jnp.tile(x, (3, 2)), (8, 128), True),
        (lambda x: jnp.tile(x, (2, 1, 3)), (2, 8, 128), True),
        (lambda x: jnp.tile(x, (3, 4)), (1, 128), True),
        (lambda x: jnp.tile(x, (4, 1)), (1, 128), False),
        (lambda x: jnp.repeat(x, 2, axis=1), (8, 64), False),
        (lambda x: jnp.broadcast_to(x[:, None], (8, 2, 128)), (8, 128), False),
        (lambda x: jnp.tile(x, (1, 128)), (8, 2), False),
    ],
)
def test_copies_side_by_side(function, shape, is_joined):
    kernel = kernel_of(function, shape)
    new = join_repeats(kernel)
    verify(new)
    names = [op.name for op in walk(new.body)]
    assert ("concatenate" in names) == is_joined
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for got in (outputs(kernel, [x]), outputs(new, [x])):
        np.testing.assert_array_equal(got[0], function(x))


def test_mosaic_names_registers_again():
    text = mosaic(kernel_of(lambda x: jnp.tile(x, (1, 4)), (16, 128)))
    assert "tpu.concatenate" in text and "16x4x128" not in text
