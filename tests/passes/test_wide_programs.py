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


@pytest.mark.parametrize(
    "name",
    ["causal grid, column statistics", "causal grid, 64 x 64 blocks, flat heads"],
)
def test_what_a_branch_skips_is_masked_once(name: str):
    """However often rows doubled: by the mask, merged steps, and merged rows."""
    wide = wide_programs(run(forward(name)), CHIP)
    assert wide.text.count("= select_n") == 3


def backward(form, size=SIZES["part"]) -> list:
    with config.override(target="tpu:v6e"):
        (call,) = calls_in(form.make(size), *form.problem.structs(size))
        return [step.kernel for step in chosen_plan(call.kernel, call.backend).steps]


@pytest.mark.parametrize(
    "name",
    [
        "causal grid, column statistics",
        "causal grid, all state in outputs, lanes",
        "fori loop, whole refs and pl.ds",
        "window, while, 64 x 64",
        "JAX's flash_attention",
        "splash: scores transposed, statistics in rows",
    ],
)
def test_one_backward_kernel_takes_what_the_forward_kernel_kept(name: str):
    """Its loop adds to all cotangents, after the statistics, which are not repeated."""
    (kernel,) = backward(ATTENTION[name])
    assert kernel.text.count("= dot") == 5
    shapes = [ref.ref.shape for ref in kernel.inputs if ref.name.startswith("saved")]
    assert shapes and all(1 in shape[-2:] for shape in shapes)  # whole blocks


def by_associative_scan(x):
    return jax.lax.associative_scan(jnp.maximum, x, axis=1)


def by_cummax(x):
    return jax.lax.cummax(x, axis=1)


@pytest.mark.parametrize("body", [by_associative_scan, by_cummax])
def test_running_maxima_have_no_strided_slices(body):
    """Lanes two apart, moved together, are more code than libtpu can compile."""

    def kernel(x_ref, o_ref):
        o_ref[...] = body(x_ref[...])

    x = jax.random.normal(jax.random.key(0), (16, 64))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    block = pl.BlockSpec((8, 64), lambda i: (i, 0))
    call = pl.pallas_call(kernel, shape, grid=(2,), in_specs=[block], out_specs=block)
    loss = lambda f: jax.grad(lambda x: (f(x) ** 2).sum())
    with config.override(target="tpu:v6e"):
        (one,) = calls_in(call, x)
        steps = chosen_plan(one.kernel, one.backend).steps
        assert all("strides=(1, 2)" not in step.kernel.text for step in steps)
        made = jax.make_jaxpr(loss(call))(x)
    (got,) = jex.jaxpr_as_fun(made)(x)
    assert distance(got, loss(body)(x)) < 1e-6
