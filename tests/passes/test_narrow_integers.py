"""64-bit integers that fit are int32, and kernels compute what they did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import walk
from pallasite.ir.verify import verify
from pallasite.passes.lower.narrow_integers import narrow_integers
from tests.passes.parts import run

X = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)


def counted(x_ref, o_ref):
    step = lambda i, total: total + x_ref[...] * (2 * i - 3).astype(np.float32)
    o_ref[...] = jax.lax.fori_loop(0, 5, step, jnp.zeros((8, 128), np.float32))


def counted_down(x_ref, o_ref):
    def step(i, total):
        at = 7 - i
        return total * 0.5 + x_ref[pl.ds(at, 1), :] + (at // 3).astype(np.float32)

    rows = jax.lax.fori_loop(2, 7, step, jnp.zeros((1, 128), np.float32))
    o_ref[...] = jnp.broadcast_to(rows, o_ref.shape)


def positions(x_ref, o_ref):
    at = jax.lax.broadcasted_iota(int, (8, 128), 1) - 60
    o_ref[...] = jnp.where((at % 3 == 0) & (at < 40), x_ref[...], at.astype(np.float32))


def ranks(x_ref, o_ref):
    first = jnp.argmax(x_ref[...], axis=1)[:, None]
    o_ref[...] = x_ref[...] * jnp.arange(128) + first


def sums_of_counters(x_ref, o_ref):
    """The second counter takes steps of the first, whose size is not constant."""

    def step(i, state):
        total, value = state
        return total + i * i, value + x_ref[...] * total.astype(np.float32)

    start = jnp.int64(0), jnp.zeros((8, 128), np.float32)
    o_ref[...] = jax.lax.fori_loop(0, 5, step, start)[1]


def beyond(x_ref, o_ref):
    at = jnp.arange(128) * 20_000_000
    o_ref[...] = x_ref[...] + (at // 1_000_000).astype(np.float32)


def traced(body):
    with jax.enable_x64(True):
        shape = jax.ShapeDtypeStruct((8, 128), np.float32)
        call = pl.pallas_call(body, out_shape=shape, backend="tpu")
        return pl.lower(call)(X)


def wide(kernel):
    values = [v for op in walk(kernel.body) for v in op.results if not v.is_ref]
    return [v for v in values if v.tile.dtype.bits == 64]


@pytest.mark.parametrize("body", [counted, counted_down, positions, ranks])
def test_integers_that_fit_are_narrow(body):
    kernel = traced(body).kernels[0]
    assert wide(kernel)
    new = narrow_integers(kernel)
    verify(new)
    assert [v.tile.dtype.name for v in wide(new) if v.tile.dtype.is_integer] == []
    given = [X]
    for a, b in zip(run(kernel, given), run(new, given), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("body", [counted, counted_down])
def test_they_compile_for_tpus(body):
    assert "i64" not in traced(body).stages()["scheduled"]


@pytest.mark.parametrize("body", [sums_of_counters, beyond])
def test_others_stay_and_are_refused(body):
    lowered = traced(body)
    new = narrow_integers(lowered.kernels[0])
    verify(new)
    given = [X]
    np.testing.assert_array_equal(run(lowered.kernels[0], given)[0], run(new, given)[0])
    with pytest.raises(UnsupportedError, match="TPUs do not support i64"):
        lowered.stages()
