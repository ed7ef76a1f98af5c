"""Online softmax divided by a sum that a guard keeps from being zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.autodiff.normal_program import normal_program
from pallasite.autodiff.rescaled_sums import plain_sums
from pallasite.sites import calls_in
from pallasite.target import GPUS, Machine

GUARDS = {
    "eq": lambda acc, l: acc * jnp.where(l == 0.0, 1.0, 1.0 / l),
    "ne": lambda acc, l: acc / jnp.where(l != 0.0, l, 1.0),
    "gt": lambda acc, l: jnp.where(l > 0.0, acc / l, acc),
    "max": lambda acc, l: acc / jnp.maximum(l, 0.1),
}


def attention(guard: str, weigh_sum: bool, mask=None, low=-1e30, start=-1e30):
    """Rows of x over blocks of y; `weigh_sum`: the sum leaves out some columns.

    Where `mask` gives false, scores are `low` and their exponentials zero.
    """

    def kernel(x_ref, y_ref, w_ref, o_ref):
        x = x_ref[...]

        def step(j, state):
            m, l, acc = state
            s = x @ y_ref[pl.ds(j * 8, 8), :].T
            keep = mask and mask(pl.program_id(0) * 8, j * 8)
            s = jnp.where(keep, s, low) if mask else s
            new = jnp.maximum(m, s.max(axis=1, keepdims=True))
            p, scale = jnp.exp(s - new), jnp.exp(m - new)
            p = jnp.where(keep, p, 0.0) if mask else p
            counted = p * w_ref[...] if weigh_sum else p
            l = l * scale + counted.sum(axis=1, keepdims=True)
            return new, l, acc * scale + p @ y_ref[pl.ds(j * 8, 8), :]

        first = (jnp.full((8, 1), start), jnp.zeros((8, 1)), jnp.zeros((8, 16)))
        _, l, acc = jax.lax.fori_loop(0, 4, step, first)
        o_ref[...] = GUARDS[guard](acc, l)

    def run(x, y, w):
        whole = lambda a: pl.BlockSpec(a.shape, lambda i: (0, 0))
        rows = pl.BlockSpec((8, 16), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.shape[0] // 8,),
            in_specs=[rows, whole(y), pl.BlockSpec((8, 8), lambda i: (i, 0))],
            out_specs=rows,
        )(x, y, w)

    return run


def reference(x, y, w, guard: str, weigh_sum: bool):
    s = x @ y.T
    p = jnp.exp(s - s.max(axis=1, keepdims=True))
    counted = p * jnp.tile(w, (1, 4)) if weigh_sum else p
    return GUARDS[guard](p @ y, counted.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("weigh_sum", [False, True])
@pytest.mark.parametrize("guard", GUARDS)
def test_gradient(guard: str, weigh_sum: bool):
    x, y = (0.3 * jax.random.normal(jax.random.key(n), (32, 16)) for n in (0, 1))
    w = jnp.ones((32, 8)).at[3:7].set(0.0)  # some rows have no sum

    def loss(f, x, y):
        return (f(x, y) * jnp.cos(jnp.arange(512.0).reshape(32, 16))).sum()

    ours = lambda x, y: attention(guard, weigh_sum)(x, y, w)
    theirs = lambda x, y: reference(x, y, w, guard, weigh_sum)
    got = jax.jit(jax.grad(lambda *a: loss(ours, *a), (0, 1)))(x, y)
    want = jax.grad(lambda *a: loss(theirs, *a), (0, 1))(x, y)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def maxima(function) -> int:
    shapes = [(32, 16), (32, 16), (32, 8)]
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    (call,) = calls_in(function, *given)
    _, program = normal_program(call.kernel, Machine.usual(GPUS["h200"]))
    return len(plain_sums(program.body).scales)


@pytest.mark.parametrize("guard", GUARDS)
def test_the_sum_of_all_exponentials_has_plain_sums(guard: str):
    """Where the sum leaves some out, rows in which it is zero depend on the maximum."""
    assert maxima(attention(guard, False)) == 1
    assert maxima(attention(guard, True)) == 0


def causal_without_first(i, j):
    """Row 0 sees nothing."""
    rows = i + jax.lax.broadcasted_iota(jnp.int32, (8, 8), 0)
    return j + jax.lax.broadcasted_iota(jnp.int32, (8, 8), 1) < rows


@pytest.mark.parametrize("guard", ["eq", "ne", "max"])  # "gt" divides zero by zero
def test_masked_exponentials_have_plain_sums(guard: str):
    x, y = (0.3 * jax.random.normal(jax.random.key(n), (32, 16)) for n in (0, 1))
    w = jnp.ones((32, 8))
    f = attention(guard, False, causal_without_first)
    assert maxima(f) == 1

    def reference(x, y):
        p = jnp.exp(x @ y.T) * jnp.tril(jnp.ones((32, 32)), -1)
        l = p.sum(axis=1, keepdims=True)
        return p @ y / jnp.where(l == 0.0, 1.0, l)

    weights = jnp.cos(jnp.arange(512.0).reshape(32, 16))
    got = jax.jit(jax.grad(lambda *a: (f(*a, w) * weights).sum(), (0, 1)))(x, y)
    want = jax.grad(lambda *a: (reference(*a) * weights).sum(), (0, 1))(x, y)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("low", "start"), [(-20.0, -1e30), (-1e30, 0.0), (-1e9, -1e9)])
def test_sums_that_may_be_less_than_one_depend_on_the_maximum(low, start):
    """Where no element is the maximum, a sum may be smaller than the number beside it,
    and what it divides then is relative to the maximum."""
    f = attention("max", False, causal_without_first, low, start)
    assert maxima(f) == 0
    x = jnp.full((32, 16), -2.0)
    y, w = jnp.full((32, 16), 2.0), jnp.ones((32, 8))
    step = lambda h: f(x + h, y, w)[9].sum()
    got = jax.grad(lambda x: f(x, y, w)[9].sum())(x).sum()
    np.testing.assert_allclose(got, (step(0.005) - step(-0.005)) / 0.01, rtol=0.02)
