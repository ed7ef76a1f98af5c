"""Products that programs would compute again become kernels of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.passes.run import run
from pallasite.passes.schedule.plan_parts import plan
from pallasite.passes.schedule.products_apart import cuts
from pallasite.passes.schedule.split_axis import Program, Result, Step
from pallasite.sites import calls_in
from pallasite.target import GPUS
from tests.passes.test_split_axis import evaluate, evaluate_program

F32, BF16 = jnp.float32, jnp.bfloat16
Shape = jax.ShapeDtypeStruct


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=F32)


def whole(rows, width, inner, columns, bm, dtype=F32):
    """Both weights whole in a block."""

    def kernel(x_ref, w_ref, u_ref, o_ref):
        h = jax.nn.relu(dot(x_ref[...], w_ref[...])).astype(dtype)
        o_ref[...] = dot(h, u_ref[...]).astype(dtype)

    shapes = [(rows, width), (width, inner), (inner, columns)]
    specs = [
        pl.BlockSpec((bm, width), lambda i: (i, 0)),
        pl.BlockSpec(shapes[1], lambda i: (0, 0)),
        pl.BlockSpec(shapes[2], lambda i: (0, 0)),
    ]
    out = pl.BlockSpec((bm, columns), lambda i: (i, 0))
    return made(kernel, (pl.cdiv(rows, bm),), specs, out, shapes, dtype)


def along(rows, width, inner, columns, bm, bi, batch=2, dtype=F32):
    """The inner width along the grid, in a batch."""

    def kernel(x_ref, w_ref, u_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        h = jnp.tanh(dot(x_ref[...], w_ref[...])).astype(dtype)
        acc_ref[...] += dot(h, u_ref[...])

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(dtype)

    shapes = [(batch, rows, width), (width, inner), (inner, columns)]
    specs = [
        pl.BlockSpec((None, bm, width), lambda b, i, j: (b, i, 0)),
        pl.BlockSpec((width, bi), lambda b, i, j: (0, j)),
        pl.BlockSpec((bi, columns), lambda b, i, j: (j, 0)),
    ]
    out = pl.BlockSpec((None, bm, columns), lambda b, i, j: (b, i, 0))
    grid = (batch, pl.cdiv(rows, bm), inner // bi)
    scratch = [pltpu.VMEM((bm, columns), F32)]
    return made(kernel, grid, specs, out, shapes, dtype, scratch)


def merged_weights(rows, width, rank, columns, bm):
    """The right operand is computed, alike for all rows."""

    def kernel(x_ref, a_ref, b_ref, o_ref):
        o_ref[...] = dot(x_ref[...], dot(a_ref[...], b_ref[...]))

    shapes = [(rows, width), (width, rank), (rank, columns)]
    specs = [
        pl.BlockSpec((bm, width), lambda i: (i, 0)),
        pl.BlockSpec(shapes[1], lambda i: (0, 0)),
        pl.BlockSpec(shapes[2], lambda i: (0, 0)),
    ]
    out = pl.BlockSpec((bm, columns), lambda i: (i, 0))
    return made(kernel, (rows // bm,), specs, out, shapes, F32)


def made(kernel, grid, specs, out, shapes, dtype, scratch=()):
    shape = (*shapes[0][:-1], shapes[-1][-1])
    call = pl.pallas_call(
        kernel,
        Shape(shape, dtype),
        grid=grid,
        in_specs=specs,
        out_specs=out,
        scratch_shapes=scratch,
    )
    (found,) = calls_in(call, *(Shape(each, dtype) for each in shapes))
    return run(found.kernel)


def program(kernel, cut) -> Program:
    number = {ref: n for n, ref in enumerate(kernel.inputs)}
    first = Step(cut.first, tuple(number[r] for r in cut.first.inputs))
    number[cut.array] = len(number)
    second = Step(cut.second, tuple(number[r] for r in cut.second.inputs))
    return Program((first, second), (Result(len(number)),))


@pytest.mark.parametrize(
    "kernel, between",
    [
        (whole(32, 16, 24, 272, 16), (32, 24)),
        (whole(40, 16, 24, 272, 16), (48, 24)),  # the last block hangs over
        (whole(32, 16, 24, 272, 16, BF16), (32, 24)),
        (along(32, 16, 48, 272, 16, 8), (2, 32, 48)),
        (along(24, 16, 48, 272, 16, 16), (2, 32, 48)),
        (merged_weights(32, 16, 8, 24, 16), (16, 24)),
    ],
)
def test_two_kernels_compute_what_one_does(kernel, between):
    (cut,) = cuts(kernel)
    assert cut.array.ref.shape == between
    random = np.random.default_rng(3)
    arrays = [
        random.standard_normal(ref.ref.shape).astype(
            BF16 if ref.ref.dtype.name == "bf16" else np.float32
        )
        for ref in kernel.inputs
    ]
    (want,) = evaluate(kernel, arrays)
    (got,) = evaluate_program(program(kernel, cut), arrays)
    np.testing.assert_array_equal(got, want)  # also past the edge: the same products


def test_windows_of_the_array_between_are_blocks_of_a_matrix():
    (cut,) = cuts(along(32, 16, 48, 272, 16, 8))
    shown = "windows=(in[squeezed 1, 16, 16], in[16, 8], out[squeezed 1, 16, 8])"
    assert shown in cut.first.text
    assert "yield %i0_2, %i1_2, %i2_2" in cut.first.text
    assert cut.second.inputs[-1].ref.shape == (2, 32, 48)
    assert [ref.name for ref in cut.first.inputs] == ["x_ref", "w_ref"]
    assert [ref.name for ref in cut.second.inputs] == ["u_ref", "between"]


def test_what_a_program_holds_is_not_computed_again():
    """All columns of the second product fit."""
    assert not list(cuts(whole(32, 16, 24, 256, 16)))


def test_guarded_products_stay():
    def kernel(x_ref, w_ref, u_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        @pl.when(pl.program_id(0) > 0)
        def _():
            o_ref[...] = dot(dot(x_ref[...], w_ref[...]), u_ref[...])

    shapes = [(32, 16), (16, 24), (24, 272)]
    specs = [
        pl.BlockSpec((16, 16), lambda i: (i, 0)),
        pl.BlockSpec(shapes[1], lambda i: (0, 0)),
        pl.BlockSpec(shapes[2], lambda i: (0, 0)),
    ]
    out = pl.BlockSpec((16, 272), lambda i: (i, 0))
    assert not list(cuts(made(kernel, (2,), specs, out, shapes, F32)))


@pytest.mark.parametrize(
    "kernel",
    [
        whole(8192, 1024, 2048, 1024, 64, BF16),
        along(4096, 1024, 2048, 1024, 128, 128, 2, BF16),
    ],
)
def test_large_ones_run_as_two_kernels(kernel):
    found = plan(kernel, GPUS["h200"])
    assert found.program is not None
    assert found.why == "each product is computed once"
    assert [len(k.text.split("dot ")) for k in found.program.kernels] == [2, 2]


def test_small_ones_run_as_one():
    """Nothing is worth another launch."""
    assert plan(whole(512, 64, 64, 512, 64, BF16), GPUS["h200"]).program is None


def test_a_chain_of_three_is_three_kernels():
    n = 2048

    def kernel(x_ref, a_ref, b_ref, c_ref, o_ref):
        y = x_ref[...]
        for ref in (a_ref, b_ref, c_ref):
            y = jax.nn.relu(dot(y, ref[...])).astype(BF16)
        o_ref[...] = y

    shapes = [(8192, n), (n, n), (n, n), (n, n)]
    row = pl.BlockSpec((128, n), lambda i: (i, 0))
    specs = [row, *(pl.BlockSpec((n, n), lambda i: (0, 0)) for _ in range(3))]
    found = plan(made(kernel, (64,), specs, row, shapes, BF16), GPUS["h200"])
    assert found.program is not None
    assert [step.operands for step in found.program.steps] == [(0, 1), (2, 4), (3, 5)]
    assert found.program.results == (Result(6),)
