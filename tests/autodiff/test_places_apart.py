"""Cotangents that programs add to at several blocks have a sum for each of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import config
from pallasite.autodiff.equal_operands import with_operands
from pallasite.autodiff.explain_grad import full_plan
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.sites import calls_in


def gram(rows, columns, flat=False, body=None):
    """`x @ y.T` of blocks, of arrays that may be the same."""

    def kernel(x_ref, y_ref, o_ref):
        dims = (((1,), (1,)), ((), ()))
        product = lax.dot_general(
            x_ref[...], y_ref[...], dims, preferred_element_type=jnp.float32
        )
        o_ref[...] = product.astype(o_ref.dtype)

    def call(x, y):
        count = pl.cdiv(x.shape[0], rows), pl.cdiv(y.shape[0], columns)
        at = (
            (lambda p: (p // count[1], p % count[1])) if flat else (lambda i, j: (i, j))
        )
        return pl.pallas_call(
            body or kernel,
            out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[0]), x.dtype),
            grid=(count[0] * count[1],) if flat else count,
            in_specs=[
                pl.BlockSpec((rows, x.shape[1]), lambda *p: (at(*p)[0], 0)),
                pl.BlockSpec((columns, y.shape[1]), lambda *p: (at(*p)[1], 0)),
            ],
            out_specs=pl.BlockSpec((rows, columns), at),
        )(x, y)

    return call


def operand(shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(3).normal(size=shape), dtype)


def steps_of(run, *args):
    (call,) = calls_in(run, *args)
    kernel, _ = with_operands(call)
    return full_plan(kernel).steps


def parallel(kernel):
    pipeline = Pipeline.of(find_pipeline(kernel))
    return [n for n, s in zip(pipeline.grid, pipeline.semantics, strict=True)
            if s == "parallel"]  # fmt: skip


def check(run, reference, *args, tolerance=1e-5):
    total = lambda f: lambda *args: jnp.sin(f(*args).astype(jnp.float32)).sum()
    wanted = tuple(range(len(args)))
    pairs = (jax.jit(jax.grad(total(f), wanted))(*args) for f in (run, reference))
    for got, want in zip(*pairs, strict=True):
        assert got.dtype == want.dtype
        got, want = np.asarray(got, "f8"), np.asarray(want, "f8")
        np.testing.assert_allclose(got, want, tolerance, tolerance * abs(want).max())


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("target", ["cpu", "gpu:h200", "tpu:v5e"])
@pytest.mark.parametrize("blocks", [(8, 8), (16, 8)])
def test_rows_and_columns_of_one_array(blocks, target, flat):
    run = gram(*blocks, flat)
    x = operand((32, 6))
    same = lambda x: run(x, x)
    with config.override(target=target):
        steps = steps_of(same, x)
        # For a TPU, all of so small an array is one block.
        sizes = [] if target == "tpu:v5e" else sorted([32 // n] for n in blocks)
        shown = sorted(parallel(s.kernel) for s in steps)
        assert shown == (sizes or [[]]), shown
        check(same, lambda x: x @ x.T, x)


@pytest.mark.parametrize("shape", [(29, 5), (1, 1), (8, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_edges_and_rounding(dtype, shape):
    run, x = gram(8, 16), operand(shape, dtype)
    product = lambda x: jnp.dot(x, x.T, preferred_element_type=jnp.float32)
    reference = lambda x: product(x).astype(x.dtype)
    check(
        lambda x: run(x, x),
        reference,
        x,
        tolerance=1e-5 if dtype == "float32" else 2e-2,
    )


def test_other_operands_stay_beside():
    """Two results in one kernel, of which one is a part of a cotangent."""

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] @ y_ref[...].T + x_ref[...][:, :1]

    run, x = gram(8, 8, body=body), operand((24, 4))
    check(lambda x: run(x, x), lambda x: x @ x.T + x[:, :1], x)


def test_of_three_windows_two_are_the_same():
    """Queries, keys and values of one array: keys and values share a sum."""

    def kernel(q_ref, k_ref, v_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.tanh(q_ref[...] @ k_ref[...].T) @ v_ref[...]

    def run(x):
        rows = lambda axis: pl.BlockSpec((8, 4), lambda *p: (p[axis], 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(4, 4),
            in_specs=[rows(0), rows(1), rows(1)],
            out_specs=rows(0),
        )(x, x, x)

    x = operand((32, 4))
    with config.override(target="gpu:h200"):
        assert all(parallel(s.kernel) == [4] for s in steps_of(run, x))
    check(run, lambda x: jnp.tanh(x @ x.T) @ x, x)


def test_blocks_that_no_axis_numbers_stay_together():
    """Windows beside the program's own, of which the last are clamped."""

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] * y_ref[...]

    def run(x):
        beside = lambda i: (jnp.minimum(i + 1, 3), 0)
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(4,),
            in_specs=[
                pl.BlockSpec((8, 4), lambda i: (i, 0)),
                pl.BlockSpec((8, 4), beside),
            ],
            out_specs=pl.BlockSpec((8, 4), lambda i: (i, 0)),
        )(x, x)

    x = operand((32, 4))
    check(run, lambda x: x * jnp.concatenate([x[8:], x[24:]]), x)


def packed(count: int, first: tuple[int, ...], block: int = 8):
    """Products of blocks that follow one another in an array, by index maps."""

    def kernel(*refs):
        *given, w_ref, o_ref = refs

        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        total = 1.0
        for n, ref in enumerate(given):
            total = total * jnp.sin(ref[...] + n)
        o_ref[...] += total @ w_ref[...]

    def at(start):
        return pl.BlockSpec((block, block), lambda i, j: (i, j + start))

    def call(x, w):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype),
            grid=(x.shape[0] // block, count),
            in_specs=[
                *map(at, first),
                pl.BlockSpec((block, w.shape[1]), lambda i, j: (j, 0)),
            ],
            out_specs=pl.BlockSpec((block, w.shape[1]), lambda i, j: (i, 0)),
        )(*[x] * len(first), w)

    def reference(x, w):
        total, width = 1.0, count * block
        for n, start in enumerate(first):
            total = total * jnp.sin(x[:, start * block :][:, :width] + n)
        return total @ w

    return call, reference


@pytest.mark.parametrize("target", ["gpu:h200", "cpu"])
@pytest.mark.parametrize(
    "first",
    [(0, 3), (3, 0, 6), (1,), (0, 2), (5, 5)],
    ids=lambda f: "_".join(map(str, f)),
)
def test_parts_of_one_array(first, target):
    """Gate and up, or queries, keys and values, that follow one another in an array.

    They may overlap; elements that no program reads have a cotangent of zero.
    """
    call, reference = packed(3, first)
    x, w = operand((40, 10 * 8)), operand((24, 16))
    with config.override(target=target):
        check(call, reference, x, w, tolerance=1e-4)
        steps = steps_of(call, x, w)
    shapes = {ref.ref.shape for step in steps for ref in step.kernel.outputs}
    assert (40, 24) in shapes  # and no sum of all of the array
    assert (40, 80) not in shapes
    assert all(parallel(step.kernel) for step in steps)
