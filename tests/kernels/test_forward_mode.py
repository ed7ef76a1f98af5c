"""Operations with gradients by hand, in every other mode of differentiation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallasite import kernels
from pallasite.kernels.derivatives import Differentiable


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


SIZES = jnp.array([3, 0, 7, 4])
LABELS = jnp.array([0, 5, -1, 36, 2, 7, 99])
BAGS = jnp.array([[0, 3, -1], [2, 2, 8]])


def _grouped_plainly(x, y, gate=None):
    """`lax.ragged_dot` has not every derivative."""
    group = jnp.repeat(jnp.arange(len(SIZES)), SIZES, total_repeat_length=len(x))
    used = (jnp.arange(len(x)) < SIZES.sum())[:, None]
    of = lambda y: jnp.where(used, jnp.einsum("mk,mkn->mn", x, y[group]), 0)
    return of(y) if gate is None else jax.nn.swish(of(gate)) * of(y)


def _quantized(x, scales, how):
    values = (16 * normal(1, 4, 24, 20)).astype(jnp.int8)
    weights = kernels.QuantizedWeights(values, 0.02 * jax.nn.softplus(scales), 8)
    if how == "pallasite":
        return kernels.grouped_matmul(x, weights, SIZES)
    return _grouped_plainly(x, weights.dequantize())


def _by(operation, *fixed, select=lambda out: out, **options):
    def compute(*operands, how):
        out = operation(*operands, *fixed, implementation=how, **options)
        return select(out)

    return compute


def _grouped(*operands, how):
    if how == "xla":
        return _grouped_plainly(*operands)
    x, y, *gate = operands
    return kernels.grouped_matmul(x, y, SIZES, gate=gate[0] if gate else None)


def _entropy(x, w, *, how, **options):
    return kernels.linear_softmax_cross_entropy_loss(
        x, LABELS, w, reduction="none", implementation=how, **options
    )


first = lambda out: out[0]
X, Y = normal(0, 17, 24), normal(1, 4, 24, 20)
CASES = {
    "grouped_matmul": (_grouped, X, Y),
    "gated grouped_matmul": (_grouped, X, Y, normal(2, 4, 24, 20)),
    "quantised grouped_matmul": (_quantized, X, normal(3, 4, 1, 20)),
    "linear_recurrence": (
        lambda d, x, i, how: kernels.linear_recurrence(
            jax.nn.sigmoid(d), x, i, implementation=how
        ),
        *(normal(0, 2, 19, 5), normal(1, 2, 19, 5), normal(2, 2, 5)),
    ),
    "cross entropy": (_entropy, normal(0, 7, 12), normal(1, 12, 37)),
    "capped cross entropy": (
        functools.partial(_entropy, soft_cap=2.0),
        *(normal(0, 7, 12), normal(1, 12, 37)),
    ),
    "embedding_bag": (
        lambda t, w, how: kernels.embedding_bag(t, BAGS, w, implementation=how),
        *(normal(0, 9, 13), normal(1, 2, 3)),
    ),
    "top_k": (_by(kernels.top_k, 3, select=first), normal(0, 4, 16)),
    "sort": (_by(kernels.sort, select=first), normal(0, 4, 16)),
}


def _modes(operation, operands):
    """Derivatives of one operation by name."""
    every = tuple(range(len(operands)))
    tangents = tuple(normal(9 + n, *x.shape) for n, x in enumerate(operands))
    total = lambda *xs: (jnp.sin(operation(*xs)) ** 2).sum()
    gradient = jax.grad(total, every)
    along = lambda *xs: jax.jvp(total, xs, tangents)[1]
    pushed = lambda xs, ts: jax.jvp(operation, xs, ts)[1]
    two = jax.tree.map(lambda t: jnp.stack([t, -2 * t]), tangents)
    yield "jvp", lambda: jax.jit(pushed)(operands, tangents)
    yield "jvp of jvp", lambda: jax.jvp(along, operands, tangents)[1]
    yield "jvp of grad", lambda: jax.jvp(gradient, operands, tangents)[1]
    yield "grad of jvp", lambda: jax.grad(along, every)(*operands)
    yield "vmap of jvp", lambda: jax.vmap(pushed, (None, 0))(operands, two)
    yield "checkpoint", lambda: jax.grad(jax.checkpoint(along), every)(*operands)


@pytest.mark.parametrize("name", CASES)
def test_modes(name):
    operation, *operands = CASES[name]
    ours, plain = (
        _modes(functools.partial(operation, how=how), tuple(operands))
        for how in ("pallasite", "xla")
    )
    for (mode, made), (_, wanted) in zip(ours, plain, strict=True):
        for a, b in zip(
            jax.tree.leaves(jax.jit(made)()),
            jax.tree.leaves(jax.jit(wanted)()),
            strict=True,
        ):
            atol = 1e-5 * float(jnp.abs(b).max())  # sums of terms of either sign
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol, err_msg=mode)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats(dtype):
    operands = [x.astype(dtype) for x in (normal(0, 2, 19, 5), normal(1, 2, 19, 5))]
    of = lambda how: jax.jvp(
        lambda d, x: kernels.linear_recurrence(
            jax.nn.sigmoid(d), x, implementation=how
        ),
        tuple(operands),
        tuple(operands[::-1]),
    )
    for ours, plain in zip(of("pallasite"), of("xla"), strict=True):
        assert ours.dtype == plain.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(
            ours.astype(jnp.float32), plain.astype(jnp.float32), rtol=0.05, atol=0.05
        )


def test_no_values_outlive_their_trace():
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda x: kernels.sort(x)[0].sum()))(normal(0, 4, 16))


@functools.partial(Differentiable, static=(2,))
def _scaled(x, y, power):
    return x * y**power


_scaled.define(
    lambda x, y, power: (_scaled(x, y, power), (x, y)),
    lambda power, kept, given: (
        given[0] * kept[1] ** power
        + kept[0] * power * kept[1] ** (power - 1) * given[1]
    ),
    lambda power, kept, cotangent: (
        cotangent * kept[1] ** power,
        (cotangent * kept[0] * power * kept[1] ** (power - 1)).sum(0),
    ),
)


def test_shared_operands_in_a_shard_map():
    """A weight that every device shares gets the sum of their cotangents."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",))
    over, shared = PartitionSpec("i"), PartitionSpec()
    local = jax.shard_map(
        lambda x, y: jax.lax.psum(jnp.sum(_scaled(x, y, 3)), "i"),
        mesh=mesh,
        in_specs=(over, shared),
        out_specs=shared,
    )
    plain = lambda x, y: jnp.sum(x * y**3)
    operands = normal(0, 4, 8), normal(1, 8)
    tangents = normal(2, 4, 8), normal(3, 8)
    for derivative in (
        lambda f: jax.grad(f, (0, 1))(*operands),
        lambda f: jax.jvp(f, operands, tangents)[1],
        lambda f: jax.jvp(jax.grad(f, (0, 1)), operands, tangents)[1],
    ):
        for a, b in zip(
            jax.tree.leaves(derivative(jax.jit(local))),
            jax.tree.leaves(derivative(plain)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
