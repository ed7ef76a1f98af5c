"""Gradients of forms: right at tiny sizes, and spread over a GPU at those of models."""

import os
import random
from math import prod

import jax
import pytest

from pallasite import config
from pallasite.autodiff.explain_grad import chosen_plan
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.sites import calls_in
from tests.forms import all_forms
from tests.forms.form import SIZES, Form, distance, gradient

FORMS = {form.name: form for form in all_forms() if form.grad}
ALLOWED = 1e-4
SAMPLE = 3
# Another sample in every run of CI; the same one again with its number.
RUN = os.environ.get("GITHUB_RUN_NUMBER", "1")

# One spelling for each thing that once left a single kernel per head.
SPREAD = (
    "grid, statistics in outputs",
    "causal grid, all state in outputs, lanes",
    "two loops, as FlashAttention 2",
    "two loops, 128 x 64",
    "edge length, filled",
    "sinks, fori, exp2",
    "window, fori",
    "window, while, 64 x 64",
    "JAX's flash_attention",
    "JAX's flash_attention, statistics by reshape and repeat",
)
# Those whose first backward kernel used to run the forward kernel again.
KEPT = (
    "causal grid, additive mask, exp2, reciprocal",
    "splash: scores transposed, statistics in rows",
    "sinks, grid",
)


def programs(form: Form) -> tuple[list[int], int]:
    """Parallel programs of backward kernels on an H200, and matmuls of the first."""
    size = SIZES["model"]
    counts, products = list[int](), 0
    with config.override(target="gpu:h200"):
        for call in calls_in(form.make(size), *form.problem.structs(size)):
            steps = chosen_plan(call.kernel, call.backend).steps
            products += steps[0].kernel.text.count("= dot")
            for step in steps:
                pipeline = Pipeline.of(find_pipeline(step.kernel))
                pairs = zip(pipeline.sizes, pipeline.semantics, strict=True)
                sizes = [n for n, kind in pairs if kind == "parallel"]
                counts.append(prod(n for n in sizes if isinstance(n, int)))
    return counts, products


@pytest.mark.parametrize("name", SPREAD)
def test_backward_kernels_fill_a_gpu(name: str):
    counts, _ = programs(FORMS[name])
    assert len(counts) == 3 and min(counts) >= 1024, counts


@pytest.mark.parametrize("name", KEPT)
def test_the_forward_kernel_keeps_what_the_backward_needs(name: str):
    _, products = programs(FORMS[name])
    assert products == 0


@pytest.mark.parametrize(
    "name",
    [
        "sum into one block",
        "column sums in blocks of columns",
        "output accumulated in place, first product stored",
        "scatter add of rows by atomics",
        "embedding by an index array",
        "segment sum by a loop over rows",
        "segment sum by one hot products",
        "stencil by an element halo",
    ],
)
def test_no_backward_kernel_is_one_program(name: str):
    counts, _ = programs(FORMS[name])
    assert min(counts) >= 128, counts


def test_blocks_of_time_are_stored_once():
    """The results of a recurrence over a grid are blocks that steps share."""
    form, size = FORMS["linear recurrence state in scratch"], SIZES["model"]
    with config.override(target="gpu:h200"):
        (call,) = calls_in(form.make(size), *form.problem.structs(size))
        (step,) = chosen_plan(call.kernel, call.backend).steps
    assert not step.changing  # no cotangent of results is written


def check(form: Form):
    operands = form.problem.arrays(SIZES["tiny"])
    function = form.make(SIZES["tiny"])
    reference = form.problem.lean or form.problem.reference
    got = jax.jit(gradient(function, operands))(*operands)
    want = jax.jit(gradient(reference, operands))(*operands)
    assert distance(got, want) < ALLOWED, form.name


@pytest.mark.parametrize("name", random.Random(f"forms {RUN}").sample([*FORMS], SAMPLE))
def test_gradient_of_a_form(name: str):
    check(FORMS[name])


@pytest.mark.parametrize(
    "name",
    ["two loops, 128 x 64", "sinks, grid", "causal grid, all state in outputs, lanes"],
)
def test_gradient_of_sums_that_loops_hand_on(name: str):
    check(FORMS[name])
