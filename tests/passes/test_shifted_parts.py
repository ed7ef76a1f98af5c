"""Blocks made of shifted copies, computed in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import sites
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.ir.roles import Pipeline
from pallasite.ir.verify import verify
from pallasite.passes.analysis.grid import analyze, find_pipeline
from pallasite.passes.run import run
from pallasite.passes.schedule import shifted_parts as subject
from pallasite.target import chip
from tests.backends.triton.harness import simulated

F32 = jnp.float32
ROWS, WIDTH, STEPS = 12, 40, 3


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(subject, "LARGE", 64)
    monkeypatch.setattr(subject, "PART", 32)
    monkeypatch.setattr(subject, "WIDEST", 8)


def beside(x_ref, y_ref, o_ref):
    """Neighbours in rows and columns; rows of another block at the edges."""
    x, i = x_ref[...], pl.program_id(0)
    above = jnp.where(i > 0, y_ref[ROWS - 1 :, :], 0).astype(x.dtype)
    up = jnp.concatenate([above, x[:-1]], axis=0)
    down = jnp.concatenate([x[1:], above], axis=0)
    left = jnp.concatenate([jnp.ones((ROWS, 1), x.dtype), x[:, :-1]], axis=1)
    o_ref[...] = x * 2 + (up - down + left)


def rolled(x_ref, y_ref, o_ref):
    at = jax.lax.broadcasted_iota(jnp.int32, (ROWS, WIDTH), 1)
    x = jnp.roll(x_ref[...], 3, axis=1)
    y = jnp.roll(jnp.roll(y_ref[...], -2, axis=0), 1, axis=1)
    o_ref[...] = jnp.where(at > 2, x, y)


def taps(x_ref, y_ref, o_ref):
    """Four rows of the past, each with its own weights."""
    x, total = x_ref[...], jnp.zeros((ROWS, WIDTH), x_ref.dtype)
    for n in range(4):
        before = jnp.zeros((n, WIDTH), x.dtype)
        total += jnp.concatenate([before, x[: ROWS - n]], axis=0) * y_ref[n, :]
    o_ref[...] = total


def whole(x_ref, y_ref, o_ref):
    """A dynamic part of a whole array, which is clamped at the end."""
    x = x_ref[pl.ds(pl.program_id(0) * ROWS + 1, ROWS + 2), :]
    o_ref[...] = jnp.concatenate([x[2:-1], x[:1]], axis=0) + x[1:-1] + y_ref[...]


def padded(x_ref, y_ref, o_ref):
    """The derivatives of shifts; one row, and one element, on all sides."""
    x, y = x_ref[...], y_ref[...]
    pad = lambda x, *edges: jax.lax.pad(x, jnp.asarray(2.0, x.dtype), edges)
    up = pad(x[2:], (0, 2, 0), (0, 0, 0)) + pad(x[:-1], (1, 0, 0), (0, 0, 0))
    both = pad(y[1:, 3:], (1, 0, 0), (0, 3, 0)) * pad(y[:, :-5], (0, 0, 0), (4, 1, 0))
    row = pad(x[4:5], (3, ROWS - 4, 0), (0, 0, 0))
    o_ref[...] = up - both + row + pad(y[:1, 1:2], (0, ROWS - 1, 0), (1, WIDTH - 2, 0))


def kernel_of(body, dtype=F32, **more) -> Kernel:
    shape = jax.ShapeDtypeStruct((STEPS * ROWS, WIDTH), dtype)
    spec = pl.BlockSpec((ROWS, WIDTH), lambda i: (i, 0))
    first = pl.BlockSpec(memory_space=pl.ANY) if body is whole else spec
    before = pl.BlockSpec((ROWS, WIDTH), lambda i: (jnp.maximum(i - 1, 0), 0))
    call = pl.pallas_call(
        body,
        out_shape=shape,
        grid=(STEPS,),
        in_specs=[first, before],
        out_specs=spec,
        **more,
    )
    return run(sites.kernels_in(call, shape, shape)[0])


def evaluated(kernel: Kernel) -> np.ndarray:
    rng = np.random.default_rng(0)
    shape = (STEPS * ROWS, WIDTH)
    arrays = [rng.normal(size=shape).astype(p.ref.dtype.np) for p in kernel.inputs]
    return np.asarray(Walker(kernel, NumpyNumbers()).run(arrays)[0])


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16])
@pytest.mark.parametrize("body", [beside, rolled, taps, whole, padded])
def test_parts_are_the_same_as_the_block(body, dtype):
    before = kernel_of(body, dtype)
    after = subject.shifted_parts(before)
    verify(after)
    assert Pipeline.of(find_pipeline(after)).grid == (STEPS, 3, 5)
    assert not analyze(after).sequential
    assert "concatenate" not in after.text and "slice" not in after.text
    np.testing.assert_array_equal(evaluated(before), evaluated(after))


def test_blocks_of_operands_may_extend_past_the_end():
    shape = jax.ShapeDtypeStruct((36, 40), F32)
    given = jax.ShapeDtypeStruct((30, 37), F32)
    spec = pl.BlockSpec((ROWS, WIDTH), lambda i: (i, 0), fill=0.0)
    call = pl.pallas_call(
        rolled, out_shape=shape, grid=(3,), in_specs=[spec, spec], out_specs=spec
    )
    before = run(sites.kernels_in(call, given, given)[0])
    after = subject.shifted_parts(before)
    assert after is not before
    x = np.random.default_rng(0).normal(size=(30, 37)).astype(np.float32)
    one, two = (Walker(k, NumpyNumbers()).run([x, x + 1])[0] for k in (before, after))
    np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


@pytest.mark.parametrize("rows, width, grid", [(30, 37, (8, 5)), (36, 33, (3, 3, 5))])
def test_blocks_of_results_may_extend_past_the_end(rows, width, grid):
    """No part is past the end: two writers of one part would be a race."""
    shape = jax.ShapeDtypeStruct((rows, width), F32)
    spec = pl.BlockSpec((ROWS, WIDTH), lambda i: (i, 0), fill=0.0)
    out = pl.BlockSpec((ROWS, WIDTH), lambda i: (i, 0))
    call = pl.pallas_call(
        rolled, out_shape=shape, grid=(3,), in_specs=[spec, spec], out_specs=out
    )
    before = run(sites.kernels_in(call, shape, shape)[0])
    after = subject.shifted_parts(before)
    verify(after)
    assert Pipeline.of(find_pipeline(after)).grid == grid
    assert not analyze(after).sequential
    x = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    one, two = (Walker(k, NumpyNumbers()).run([x, x + 1])[0] for k in (before, after))
    np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def test_blocks_chosen_by_other_indices_stay_at_the_end():
    shape = jax.ShapeDtypeStruct((30, 37), F32)
    spec = pl.BlockSpec((ROWS, WIDTH), lambda i: (2 - i, 0))
    call = pl.pallas_call(
        rolled, out_shape=shape, grid=(3,), in_specs=[spec, spec], out_specs=spec
    )
    before = sites.kernels_in(call, shape, shape)[0]
    assert subject.shifted_parts(before) is before


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16])
def test_parts_of_a_block_that_are_loaded_apart(dtype):
    """A halo: the block that is read is larger than the one that is stored."""

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        around = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
        o_ref[...] = around - x[1:-1, 1:-1]

    halo = (pl.Element(ROWS + 2, (1, 1)), pl.Element(WIDTH + 2, (1, 1)))
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((30, WIDTH), dtype),
        grid=(3,),
        in_specs=[pl.BlockSpec(halo, lambda i: (i * ROWS, 0), fill=0.0)],
        out_specs=pl.BlockSpec((ROWS, WIDTH), lambda i: (i, 0)),
    )
    x = np.random.default_rng(0).normal(size=(30, WIDTH)).astype(dtype)
    before = run(sites.kernels_in(call, jax.ShapeDtypeStruct(x.shape, dtype))[0])
    after = subject.shifted_parts(before)
    verify(after)
    assert Pipeline.of(find_pipeline(after)).grid == (8, 5)
    assert "gather" not in after.text
    one, two = (Walker(k, NumpyNumbers()).run([x])[0] for k in (before, after))
    np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def halves(x_ref, y_ref, o_ref):
    """Halves that change places need no neighbours."""
    x = x_ref[...]
    half = WIDTH // 2
    o_ref[...] = jnp.concatenate([x[:, half:], x[:, :half]], axis=1) + y_ref[...]


def summed(x_ref, y_ref, o_ref):
    """A sum over rows needs all of them."""
    x = x_ref[...]
    down = jnp.concatenate([x[1:], y_ref[:1]], axis=0)
    o_ref[...] = down / jnp.sum(down, axis=0, keepdims=True)


def guarded(x_ref, y_ref, o_ref):
    @pl.when(x_ref[0, 0] > 0)
    def _():
        rolled(x_ref, y_ref, o_ref)


@pytest.mark.parametrize("body", [halves, summed, guarded])
def test_others_stay(body):
    before = kernel_of(body)
    assert subject.shifted_parts(before) is before


def test_memory_that_is_written_stays():
    before = kernel_of(rolled, input_output_aliases={0: 0})
    assert subject.shifted_parts(before) is before


def test_smaller_results_are_stored_by_one_part():
    def kernel(x_ref, y_ref, o_ref, row_ref, number_ref):
        padded(x_ref, y_ref, o_ref)
        row_ref[...] = x_ref[5:6, :] * 2
        number_ref[...] = jnp.full((1,), pl.program_id(0) * 7)

    shape = jax.ShapeDtypeStruct((STEPS * ROWS, WIDTH), F32)
    spec = lambda *block: pl.BlockSpec(block, lambda i: (i, 0))
    outs = [shape, jax.ShapeDtypeStruct((STEPS, WIDTH), F32),
            jax.ShapeDtypeStruct((STEPS,), jnp.int32)]  # fmt: skip
    call = pl.pallas_call(
        kernel, out_shape=outs, grid=(STEPS,), in_specs=[spec(ROWS, WIDTH)] * 2,
        out_specs=[spec(ROWS, WIDTH), spec(1, WIDTH), pl.BlockSpec((1,), lambda i: i)],
    )  # fmt: skip
    before = run(sites.kernels_in(call, shape, shape)[0])
    after = subject.shifted_parts(before)
    verify(after)
    assert Pipeline.of(find_pipeline(after)).grid == (STEPS, 3, 5)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape.shape).astype(np.float32) for _ in range(2)]
    want, got = (Walker(k, NumpyNumbers()).run(arrays) for k in (before, after))
    triton = simulated(before, arrays, chip=chip("h200"))  # in any order of programs
    for mine, theirs, third in zip(got, want, triton, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
        np.testing.assert_allclose(third, np.asarray(theirs), rtol=1e-6)


def test_parts_of_few_rows_are_wider():
    """34 rows are 17 times 2; the part has as many elements."""
    made = object.__new__(subject._Parts)
    made.shape = (34, 64)
    assert made.sizes() == (2, 16)
    made.shape = (16, 64)
    assert made.sizes() == (4, 8)
