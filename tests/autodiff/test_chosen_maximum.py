"""Running maxima that are results: their cotangents go to the terms equal to them."""

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite.sites import kernels_in

F32 = jnp.float32


def statistics(x, start=0.0, base=jnp.exp, lowest=-jnp.inf, rows=8, **options):
    """The maximum and the sum of exponentials of columns, block by block."""

    def kernel(x_ref, m_ref, l_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            m_ref[...] = jnp.full(m_ref.shape, lowest, F32)
            l_ref[...] = jnp.full(l_ref.shape, start, F32)

        x = x_ref[...].astype(F32)
        m = jnp.maximum(m_ref[...], x.max(0, keepdims=True))
        new = base(x - m).sum(0, keepdims=True)
        l_ref[...] = l_ref[...] * base(m_ref[...] - m) + new
        m_ref[...] = m

    n, d = x.shape
    row = pl.BlockSpec((1, 16), lambda j, i: (0, j))
    return pl.pallas_call(
        kernel,
        (jax.ShapeDtypeStruct((1, d), F32),) * 2,
        grid=(d // 16, n // rows),
        in_specs=[pl.BlockSpec((rows, 16), lambda j, i: (i, j))],
        out_specs=(row, row),
        **options,
    )(x)


def largest(x, **options):
    """The largest of rows and its place, in a loop over columns."""

    def kernel(x_ref, m_ref, i_ref):
        def body(j, carry):
            m, at = carry
            x = x_ref[:, pl.ds(j * 16, 16)].astype(F32)
            new, place = x.max(1, keepdims=True), jnp.argmax(x, 1).astype(jnp.int32)
            at = jnp.where(new > m, place[:, None] + j * 16, at)
            return jnp.maximum(m, new), at

        rows = x_ref.shape[0]
        start = jnp.full((rows, 1), -jnp.inf, F32), jnp.zeros((rows, 1), jnp.int32)
        m_ref[...], i_ref[...] = jax.lax.fori_loop(0, x_ref.shape[1] // 16, body, start)

    n, d = x.shape
    column = pl.BlockSpec((8, 1), lambda i: (i, 0))
    outs = [jax.ShapeDtypeStruct((n, 1), t) for t in (F32, jnp.int32)]
    return pl.pallas_call(
        kernel,
        outs,
        grid=(n // 8,),
        in_specs=[pl.BlockSpec((8, d), lambda i: (i, 0))],
        out_specs=[column, column],
        **options,
    )(x)[:1]


def gradient(function, **options):
    def loss(x):
        return sum(
            jnp.sin((n + 1) * y / 8).sum() for n, y in enumerate(function(x, **options))
        )

    return jax.grad(loss)


def apart(shape, dtype=F32):
    """Numbers without ties, also in a narrow type."""
    numbers = np.linspace(-3, 3, shape[0] * shape[1])
    rng = np.random.default_rng(0)
    if dtype != F32:
        numbers = np.arange(shape[0] * shape[1]) / 64 - 2
    return jnp.asarray(rng.permutation(numbers).reshape(shape), dtype)


SPELLED = [
    {},
    {"start": 1.5, "lowest": 0.25},
    {"base": jnp.exp2},
    {"lowest": -1e30},
    {"rows": 32},
]


@pytest.mark.parametrize("options", SPELLED)
@pytest.mark.parametrize("target", ["h200", None])
def test_maximum_and_sum_have_cotangents(options, target):
    x = apart((32, 32))
    function = functools.partial(statistics, **options)
    with config.override(target=target):
        made = jax.make_jaxpr(gradient(function))(x)
    (got,) = jex.jaxpr_as_fun(made)(x)
    want = gradient(function, interpret=True)(x)
    np.testing.assert_allclose(got, want, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16])
def test_a_maximum_beside_its_place(dtype):
    x = apart((16, 16) if dtype != F32 else (16, 64), dtype)
    want = gradient(largest, interpret=True)(x)
    np.testing.assert_allclose(
        *(np.asarray(g, np.float32) for g in (jax.jit(gradient(largest))(x), want)),
        1e-5 if dtype == F32 else 1e-2,
    )


def test_steps_need_no_order():
    """A kernel of maxima and counts, then one whose programs are parallel."""
    shape = jax.ShapeDtypeStruct((1 << 16, 1 << 10), F32)
    function = functools.partial(statistics, rows=64)
    with config.override(target="h200"):
        first, last = kernels_in(gradient(function), shape)[-2:]
    assert "count" in first.text and "for" not in last.text
    assert 'semantics=("parallel", "parallel")' in last.text


def test_equal_terms_share_a_cotangent():
    x = np.full((32, 16), -1.0, np.float32)
    x[[1, 9, 30]] = 2.0
    (pull,) = jax.vjp(lambda x: statistics(x)[0], jnp.asarray(x))[1](
        jnp.full((1, 16), 6.0)
    )
    want = np.zeros_like(x)
    want[[1, 9, 30]] = 2.0
    np.testing.assert_allclose(pull, want, 1e-6)


def test_what_is_not_finite_stays_with_its_column():
    x = np.array(apart((32, 32)))
    x[:, 3], x[4, 5], x[6, 7] = -np.inf, np.nan, np.inf
    got = np.asarray(gradient(statistics)(jnp.asarray(x)))
    want = np.asarray(gradient(statistics, interpret=True)(jnp.asarray(x)))
    finite = np.isfinite(x).all(0)
    np.testing.assert_allclose(got[:, finite], want[:, finite], 1e-5, 1e-5)
