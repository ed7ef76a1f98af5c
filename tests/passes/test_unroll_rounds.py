"""Loops with products: several rounds in one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.nodes import Kernel, Op, walk
from pallasite.ir.verify import verify
from pallasite.passes.run import run
from pallasite.passes.schedule.tpu_blocks import _Estimate, for_tpu
from pallasite.passes.schedule.unroll_rounds import unroll_rounds, unroll_short
from pallasite.sites import kernels_in
from pallasite.target import TPUS
from tests.passes.test_reblock import head
from tests.passes.test_same_meaning import outputs


def squared(rounds: int, n: int = 8, product: bool = True) -> Kernel:
    """A matrix that is multiplied by parts of another, one after another."""

    def kernel(x_ref, y_ref, o_ref):
        def step(k, x):
            part = y_ref[pl.ds(k * n, n), :]
            return jnp.tanh(jnp.dot(x, part) if product else x * part) + k

        o_ref[...] = jax.lax.fori_loop(0, rounds, step, x_ref[...])

    x = jax.ShapeDtypeStruct((n, n), jnp.float32)
    y = jax.ShapeDtypeStruct((n * rounds, n), jnp.float32)
    (imported,) = kernels_in(pl.pallas_call(kernel, out_shape=x), x, y)
    return run(imported)


def loops(kernel: Kernel) -> list[Op]:
    return [op for op in walk(kernel.body) if op.name == "for"]


def products(kernel: Kernel) -> int:
    return sum(op.name == "dot" for op in walk(kernel.body))


@pytest.mark.parametrize(
    "rounds, most, left, together",
    [(6, 6, 0, 6), (6, 5, 1, 3), (16, 100, 1, 8), (7, 5, 1, 1), (11, 100, 1, 1)],
)
def test_rounds_become_fewer(rounds, most, left, together):
    kernel = squared(rounds)
    new = unroll_rounds(kernel, size=lambda block: 1.0, most=most, whole=most)
    verify(new)
    assert (len(loops(new)), products(new)) == (left, together)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=p.ref.shape).astype("f") for p in kernel.inputs]
    for a, b in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        np.testing.assert_array_equal(a, b)


def test_loops_without_products_stay():
    kernel = squared(6, product=False)
    size = lambda block: 1.0
    assert unroll_rounds(kernel, size=size, most=100, whole=100) is kernel


@pytest.mark.parametrize("whole, left, together", [(8, 0, 8), (7, 1, 4)])
def test_whole_loops_may_be_larger(whole, left, together):
    new = unroll_rounds(squared(8), size=lambda block: 1.0, most=4, whole=whole)
    assert (len(loops(new)), products(new)) == (left, together)


@pytest.mark.parametrize(
    "rounds, most, steps", [(6, 6, 0), (6, 5, 3), (16, 100, 8), (11, 100, 1)]
)
def test_short_loops_become_shorter(rounds, most, steps):
    kernel = squared(rounds, product=False)
    new = unroll_short(kernel, size=lambda block: 1.0, most=most)
    verify(new)
    text = "constant {value=" + str(steps) + "}"
    assert len(loops(new)) == (steps > 0)
    assert steps < 2 or text in new.text
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=p.ref.shape).astype("f") for p in kernel.inputs]
    for a, b in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        np.testing.assert_array_equal(a, b)


def test_loops_that_are_not_short_stay():
    """Loops around loops, and those with products or with memory of their own."""
    always = {"size": lambda block: 1.0, "most": 100}
    assert unroll_short(kernel := squared(6), **always) is kernel

    def nested(x_ref, o_ref):
        def step(k, _):
            def inner(n, _):
                o_ref[k, n] = x_ref[k, n] + k

            jax.lax.fori_loop(0, k, inner, None)

        jax.lax.fori_loop(0, 8, step, None)

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    (imported,) = kernels_in(pl.pallas_call(nested, out_shape=x), x)
    assert unroll_short(imported, **always) is imported


def attention_in_a_loop(block: int) -> Kernel:
    shape = jax.ShapeDtypeStruct((8, 2048, 128), jnp.bfloat16)

    def kernel(q_ref, k_ref, o_ref):
        def step(j, acc):
            k = k_ref[pl.ds(j * block, block), :]
            scores = jnp.dot(q_ref[...], k.T, preferred_element_type=jnp.float32)
            weights = jnp.exp(scores).astype(k.dtype)
            return acc + jnp.dot(weights, k, preferred_element_type=jnp.float32)

        start = jnp.zeros(q_ref.shape, jnp.float32)
        total = jax.lax.fori_loop(0, 2048 // block, step, start)
        o_ref[...] = total.astype(o_ref.dtype)

    queries = pl.BlockSpec((None, block, 128), lambda h, i: (h, i, 0))
    keys = pl.BlockSpec((None, 2048, 128), lambda h, i: (h, 0, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=(8, 2048 // block),
        in_specs=[queries, keys],
        out_specs=queries,
    )
    (imported,) = kernels_in(call, shape, shape)
    return run(imported)


def test_blocks_grow_around_loops():
    """Each round of a loop costs as much as a step of a grid."""
    kernel, chip = attention_in_a_loop(128), TPUS["v5e"]
    new = for_tpu(kernel, chip)
    assert "grid=(8, 2), windows=(in[squeezed 1, 1024, 128]" in head(new)
    before, after = _Estimate.of(kernel, chip), _Estimate.of(new, chip)
    assert before is not None and after is not None
    assert after.seconds < 0.7 * before.seconds
