"""JAX primitives that the frontend writes out: kernels agree with JAX outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.linalg import solve_triangular

import pallasite as pl

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 12)).astype(np.float32)
SQUARE = X[:, :8] + 6 * np.eye(8, dtype=np.float32)
WORDS = RNG.integers(-(2**31), 2**31, size=(2, 64)).astype(np.int32)
IMAGE = RNG.normal(size=(2, 9, 8, 4)).astype(np.float32)
FILTER = RNG.normal(size=(3, 2, 2, 6)).astype(np.float32)


def pooling(x):
    return (
        lax.reduce_window(x, -jnp.inf, lax.max, (2, 3), (2, 1), "VALID"),
        lax.reduce_window(x, 0.0, lax.add, (3, 3), (1, 2), "SAME"),
        lax.reduce_window(
            x.astype(jnp.int32),
            jnp.int32(jnp.iinfo(jnp.int32).max),
            lax.min,
            (2, 2),
            (1, 1),
            ((1, 0), (0, 2)),
            base_dilation=(1, 2),
            window_dilation=(3, 1),
        ),
    )


def own_function(x):
    """A product over windows, and a running pair that does not commute."""

    def affine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    one = jnp.float32(1)
    return (
        lax.reduce_window(x, one, lambda a, b: a * b + 0, (2, 2), (1, 1), "SAME"),
        lax.reduce((x, x + 1), (one, jnp.float32(0)), affine, (1,)),
        lax.reduce(x, -9 * one, lambda a, b: jnp.where(a > b, a, b), (0, 1)),
    )


def convolutions(image, filter_):
    numbers = ("NHWC", "HWIO", "NHWC")
    return (
        lax.conv_general_dilated(
            image,
            filter_,
            (2, 1),
            "SAME",
            rhs_dilation=(1, 2),
            dimension_numbers=numbers,
            feature_group_count=2,
        ),
        lax.conv_general_dilated(
            image, filter_[:, :, :1].repeat(4, 2), (1, 1), [(1, 0), (0, 2)],
            lhs_dilation=(2, 1), dimension_numbers=numbers,
        ),
        lax.conv_general_dilated(
            image, filter_[:, :, :1].repeat(4, 2), (1, 1), "VALID",
            dimension_numbers=numbers, batch_group_count=2,
        ),
        jnp.convolve(image[0, 0, :, 0], filter_[:, 0, 0, 0], mode="same"),
    )  # fmt: skip


def factorisations(a):
    definite = a @ a.T
    both = jnp.stack([definite, 2 * definite])
    return (
        jnp.linalg.cholesky(both),
        jnp.linalg.cholesky(-definite),
        solve_triangular(a, a[:, :3], lower=True),
        solve_triangular(a, a[:, :3], trans=1, unit_diagonal=True),
        lax.linalg.triangular_solve(a, a[:3], lower=False),
    )


def solves(a):
    shuffled = a[::-1]
    return (
        jnp.linalg.solve(shuffled, a[:, :2]),
        jnp.linalg.inv(shuffled),
        jnp.linalg.det(shuffled),
        *lax.linalg.lu(shuffled[:, :5]),
    )


def selections(x):
    return (*lax.approx_max_k(x, 3), *lax.approx_min_k(x, 2, reduction_dimension=0))


def words(w):
    unsigned = lax.bitcast_convert_type(w, jnp.uint32)
    return lax.mulhi(w[0], w[1]), lax.mulhi(unsigned[0], unsigned[1])


def ragged(x):
    weights = jnp.stack([x[:, :5], x[:, 5:10], x[:, 7:12]])
    return lax.ragged_dot(x[:, :8], weights, jnp.array([3, 0, 4]))


MODES = {"emulated": True, "cpu": False, "checked": pl.Checked()}
CASES = [
    (pooling, (X,)),
    (own_function, (X,)),
    (convolutions, (IMAGE, FILTER)),
    (factorisations, (SQUARE,)),
    (solves, (SQUARE,)),
    (selections, (X,)),
    (words, (WORDS,)),
    (ragged, (X,)),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("fn", "args"), CASES, ids=[fn.__name__ for fn, _ in CASES])
def test_what_is_written_out_means_what_it_means_outside(fn, args, mode):
    want = jax.tree.leaves(jax.jit(fn)(*args))

    def kernel(*refs):
        values = jax.tree.leaves(fn(*(r[...] for r in refs[: len(args)])))
        for ref, value in zip(refs[len(args) :], values, strict=True):
            ref[...] = value

    out = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in want]
    call = pl.pallas_call(kernel, out_shape=out, interpret=MODES[mode])
    got = call(*map(jnp.asarray, args))
    for actual, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("fn", "args"), CASES, ids=[fn.__name__ for fn, _ in CASES])
def test_what_is_written_out_where_64_bits_are_the_default(fn, args):
    with jax.enable_x64(True):
        want = jax.tree.leaves(jax.eval_shape(fn, *args))

        def kernel(*refs):
            values = jax.tree.leaves(fn(*(r[...] for r in refs[: len(args)])))
            for ref, value in zip(refs[len(args) :], values, strict=True):
                ref[...] = value

        out = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in want]
        call = pl.pallas_call(kernel, out_shape=out, interpret=True)
        got = jax.eval_shape(call, *args)
        assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want]
        if fn is not factorisations:
            return
        for actual, expected in zip(call(*args), jax.jit(fn)(*args), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)
