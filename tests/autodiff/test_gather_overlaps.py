"""Cotangents of overlapping blocks: gathered where the kernel is linear in them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.autodiff.explain_grad import full_plan
from pallasite.sites import kernels_in


def weighted(parts, rows) -> Any:
    return sum(map(jnp.multiply, parts, rows))


def stencil(offsets, before, after=0, block=8, combine=weighted, length=None):
    """`sum(w[n] * x[t - before + offset])`, and the same in plain jnp."""
    reach = max(offsets)

    def run(x, w):
        positions = length or x.shape[0]

        def kernel(x_ref, w_ref, o_ref):
            parts = [x_ref[o : o + block].astype(jnp.float32) for o in offsets]
            rows = [w_ref[n : n + 1].astype(jnp.float32) for n in range(len(offsets))]
            o_ref[...] = combine(parts, rows).astype(o_ref.dtype)

        rows = pl.Element(block + reach, (before, after))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((positions, x.shape[1]), x.dtype),
            grid=(pl.cdiv(x.shape[1], 8), pl.cdiv(positions, block)),
            in_specs=[
                pl.BlockSpec((rows, 8), lambda j, i: (i * block, j), fill=0),
                pl.BlockSpec((len(offsets), 8), lambda j, i: (0, j)),
            ],
            out_specs=pl.BlockSpec((block, 8), lambda j, i: (i, j)),
        )(x, w)

    def reference(x, w):
        positions = length or x.shape[0]
        past = positions + reach
        padded = jnp.pad(x, ((before, past), (0, 0))).astype(jnp.float32)
        parts = [padded[o : o + positions] for o in offsets]
        wide = w.astype(jnp.float32)
        rows = [wide[n : n + 1] for n in range(len(offsets))]
        return combine(parts, rows).astype(x.dtype)

    return run, reference


def operands(taps, positions=37, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (positions, 12), (taps, 12)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def check(run, reference, args, wanted=(0, 1), tolerance=1e-5):
    def gradient(f):
        total = lambda *args: jnp.sin(f(*args).astype(jnp.float32)).sum()
        return jax.jit(jax.grad(total, wanted))(*args)

    for a, b in zip(gradient(run), gradient(reference), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, tolerance, tolerance * np.abs(b).max())


def kernel_of_x(run, args):
    (kernel,) = kernels_in(run, *args)
    steps = full_plan(kernel).steps
    (step,) = (s for s in steps if any(r.name == "d_x_ref" for r in s.results))
    return step.kernel.text


LINEAR = {
    "causal": stencil((0, 1, 2, 3), 3),
    "ahead": stencil((0, 1, 2), 0, after=2),
    "centred": stencil((0, 1, 2), 1, after=1),
    "dilated": stencil((0, 4, 8), 8),
    "further than a block": stencil((0, 3, 7), 7, block=2),
    "scaled and subtracted": stencil(
        (0, 1), 1, combine=lambda p, w: -(p[0] * 2) / w[0] - p[1] * w[1]
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_sums_are_gathered(name):
    run, reference = LINEAR[name]
    args = operands(4 if name == "causal" else 3)
    text = kernel_of_x(run, args)
    # Blocks that are read overlap; those that are written do not.
    assert "out[element" not in text and "in[element" in text
    check(run, reference, args)
    check(run, reference, args, wanted=(0,))


def test_what_is_gathered_has_its_operands_type():
    run, reference = LINEAR["causal"]
    args = operands(4, dtype="bfloat16")
    assert "d_x_ref: ref<bf16" in kernel_of_x(lambda x: run(x, args[1]), args[:1])
    check(run, reference, args, tolerance=3e-2)


NOT_LINEAR = {
    "a product of neighbours": stencil(
        (0, 1), 1, combine=lambda p, w: p[0] * p[1] * w[0]
    ),
    "a factor per row": stencil(
        (0, 1),
        1,
        combine=lambda p, w: (
            p[0] * w[0]
            + p[1] * (jax.lax.broadcasted_iota(jnp.int32, p[1].shape, 0) % 8) * w[1]
        ),
    ),
    "fewer blocks of results": stencil((0, 1, 2), 0, length=17),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_other_sums_are_not(name):
    run, reference = NOT_LINEAR[name]
    args = operands(3)
    assert "out[element" in kernel_of_x(run, args)
    check(run, reference, args)


def test_the_derivative_of_a_gathered_sum():
    run, reference = LINEAR["centred"]
    args = operands(3)

    def slope(f):
        total = lambda x, w: (jnp.sin(f(x, w)) * jnp.cos(x)).sum()
        return lambda x, w: jnp.sin(jax.grad(total)(x, w)).sum()

    for f in (jax.grad, lambda g, n: jax.jacfwd(g, n)):
        got, want = (jax.jit(f(slope(g), (0, 1)))(*args) for g in (run, reference))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, 1e-4, 1e-4)
