"""Recurrences that are written out for all rows at once become loops over rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff.explain_grad import chosen_plan
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import walk
from pallasite.ir.verify import verify
from pallasite.passes.optimise.known_recurrences import known_recurrences
from pallasite.passes.run import run
from pallasite.sites import calls_in, kernels_in
from tests.passes.test_known_scans import FILLS, moved, names


def join(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def doubling(a, b, how="concatenated"):
    by = 1
    while by < a.shape[0]:
        a, b = a * moved(a, by, 1, how), b + a * moved(b, by, 0, how)
        by *= 2
    return a, b


STYLES = {
    **{how: functools.partial(doubling, how=how) for how in FILLS},
    "associative": lambda a, b: lax.associative_scan(join, (a, b), axis=0),
}


def blocks(style, rows=7, back=False, after=lambda h, x: h):
    """Blocks of rows, the last state of each handed on to the next."""

    def kernel(x_ref, a_ref, o_ref, h_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            h_ref[...] = jnp.ones_like(h_ref)

        a, b = jax.nn.sigmoid(a_ref[...]), jnp.sin(x_ref[...])
        if back:
            a, b = a[::-1], b[::-1]
        a, b = style(a, b)
        h = b + a * h_ref[...]
        h_ref[...] = h[rows - 1 :]
        o_ref[...] = after(h[::-1] if back else h, x_ref[...])

    def function(x, a):
        n, width = x.shape
        last = n // rows - 1
        spec = pl.BlockSpec((rows, 8), lambda j, t: (last - t if back else t, j))
        return pl.pallas_call(
            kernel,
            out_shape=x,
            grid=(width // 8, n // rows),
            in_specs=[spec, spec],
            out_specs=spec,
            scratch_shapes=[pltpu.VMEM((1, 8), x.dtype)],
        )(x, a)

    return function


def reference(x, a):
    step = lambda h, row: (jax.nn.sigmoid(row[1]) * h + jnp.sin(row[0]),) * 2
    return lax.scan(step, jnp.ones(x.shape[1]), (x, a))[1]


def operands(rows=28, width=16):
    return [jax.random.normal(jax.random.key(n), (rows, width)) for n in range(2)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("rows", [4, 7, 14])
def test_rows_follow_one_another(style, rows):
    args = operands()
    (before,) = kernels_in(blocks(STYLES[style], rows), *args)
    before = run(before)
    after = known_recurrences(before)
    verify(after)
    assert "for" in names(after)
    assert not {"slice", "pad", "concatenate"} & set(names(after))
    arrays = list(map(np.asarray, args))
    one, two = (Walker(k, NumpyNumbers()).run(arrays)[0] for k in (before, after))
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(two, reference(*args), rtol=1e-5, atol=1e-5)


def test_what_is_stored_may_be_computed_from_states():
    args = operands()
    after = lambda h, x: jnp.tanh(h) * x
    (before,) = kernels_in(blocks(doubling, after=after), *args)
    before = run(before)
    made = known_recurrences(before)
    verify(made)
    assert "concatenate" not in names(made)
    arrays = list(map(np.asarray, args))
    one, two = (Walker(k, NumpyNumbers()).run(arrays)[0] for k in (before, made))
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


def test_states_that_are_multiplied_stay():
    """A matmul takes all rows at once."""
    after = lambda h, x: h @ jnp.eye(8)
    (kernel,) = kernels_in(blocks(doubling, after=after), *operands())
    kernel = run(kernel)
    assert known_recurrences(kernel) is kernel


def without_one(a, b):
    """As by doubling, but the second step is missing."""
    for by in (1, 4):
        a, b = a * moved(a, by, 1, "padded"), b + a * moved(b, by, 0, "padded")
    return a, b


def with_another_factor(a, b):
    for by in (1, 2, 4):
        a, b = a * moved(a, by, 1, "padded"), b + 2 * a * moved(b, by, 0, "padded")
    return a, b


@pytest.mark.parametrize("style", [without_one, with_another_factor])
def test_other_code_stays(style):
    (kernel,) = kernels_in(blocks(style), *operands())
    kernel = run(kernel)
    assert known_recurrences(kernel) is kernel


@pytest.mark.parametrize("style", STYLES)
def test_gradients_go_row_by_row(style):
    args = operands()
    function = blocks(STYLES[style])
    with config.override(target="gpu:h200"):
        (call,) = calls_in(function, *args)
        for step in chosen_plan(call.kernel, call.backend).steps:
            found = {op.name for op in walk(step.kernel.body)}
            assert "for" in found and not found & {"pad", "concatenate"}
        got = jax.jit(jax.grad(lambda *x: function(*x).sum(), (0, 1)))(*args)
    want = jax.grad(lambda *x: reference(*x).sum(), (0, 1))(*args)
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
