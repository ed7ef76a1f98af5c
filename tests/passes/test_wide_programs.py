"""wide_programs: one schedule for the reverse, whatever an author's blocks are."""

import random

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite import config
from pallasite.autodiff.explain_grad import chosen_plan
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.run import run
from pallasite.passes.schedule.wide_programs import wide_programs
from pallasite.sites import calls_in, kernels_in
from pallasite.target import TPUS
from tests.forms import all_forms
from tests.forms.form import SIZES, distance, gradient

ATTENTION = {f.name: f for f in all_forms() if f.family == "attention" and f.grad}
CHIP = TPUS["v6e"]


def steps(kernel) -> list[int]:
    return [n or 0 for n in Pipeline.of(find_pipeline(kernel)).grid]


def forward(name: str):
    form, size = ATTENTION[name], SIZES["part"]
    (call,) = calls_in(form.make(size), *form.problem.structs(size))
    return call.kernel


@pytest.mark.parametrize(
    "name",
    [
        "causal grid, column statistics",
        "causal grid, 128 x 64 blocks",
        "causal grid, 64 x 64 blocks, flat heads",
        "fori loop, flat program order",
        "two loops, as FlashAttention 2",
        "window, while, 64 x 64",
    ],
)
def test_blocks_of_any_spelling_become_those_of_one(name: str):
    """1,024 queries and keys of four heads."""
    wide = wide_programs(run(forward(name)), CHIP)
    *_, rows, columns = steps(wide)
    assert (rows, columns) == (2, 4) or (rows, columns) == (1, 4), steps(wide)


def test_a_small_memory_has_smaller_tiles():
    kernel = run(forward("grid, column statistics"))
    large, small = (steps(wide_programs(kernel, TPUS[c])) for c in ("v6e", "v5e"))
    assert small[2] == 2 * large[2] and small[3] == large[3]


def test_large_blocks_stay():
    shape = jax.ShapeDtypeStruct((2048, 256), jnp.float32)

    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    block = pl.BlockSpec((1024, 256), lambda i: (i, 0))
    call = pl.pallas_call(double, shape, grid=(2,), in_specs=[block], out_specs=block)
    (kernel,) = kernels_in(call, shape)
    assert wide_programs(kernel, CHIP) is kernel


def test_windows_are_not_widened_to_all_keys():
    """Merged programs may do more, but not several times as much."""
    form, size = ATTENTION["window, grid"], SIZES["model"]
    (call,) = calls_in(form.make(size), *form.problem.structs(size))
    wide = wide_programs(run(call.kernel), CHIP)
    assert steps(wide)[2] >= 4


@pytest.mark.parametrize("name", random.Random("wide").sample([*ATTENTION], 4))
def test_gradients_are_those_of_the_reference(name: str):
    form, size = ATTENTION[name], SIZES["tiny"]
    operands, function = form.problem.arrays(size), form.make(size)
    with config.override(target="tpu:v6e"):
        (call,) = calls_in(function, *operands)
        assert chosen_plan(call.kernel, call.backend).machine.tpu is CHIP
        made = jax.make_jaxpr(gradient(function, operands))(*operands)
    got = jex.jaxpr_as_fun(made)(*operands)
    reference = form.problem.lean or form.problem.reference
    want = jax.jit(gradient(reference, operands))(*operands)
    assert distance(got, want) < 1e-4


@pytest.mark.parametrize("rows", [1, 8])
def test_rows_of_a_norm(rows: int):
    """Its weights' cotangent is a sum along the grid: steps of a row would add rows."""
    form = next(f for f in all_forms() if f.name == "rms norm one row a program")
    if rows == 8:
        form = next(f for f in all_forms() if f.name == "layer norm rows of 8")
    size = SIZES["part"]
    (call,) = calls_in(form.make(size), *form.problem.structs(size))
    kernel = run(call.kernel)
    (before,), (after,) = steps(kernel), steps(wide_programs(kernel, CHIP))
    assert before >= 16 * after
