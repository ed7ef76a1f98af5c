"""Attention and batched matmuls in many spellings: one normal text, one fast path."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from pallasite.autodiff.backward import keeping_plan
from pallasite.backends.base import Compiled, Options, get
from pallasite.ir.nodes import Kernel, walk
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from pallasite.target import GPUS, Machine
from tests.passes.normal.spellings import MATMULS, STYLES, attention, batched_matmul
from tests.passes.normal.test_same_meaning import inputs, results
from tests.passes.normal_text import normal_text

# Those that become the same text, by the first of each group.
SAME = {
    "plain": ("vector", "lanes", "repeated", "leading", "transposed", "swapped"),
    "fori": ("while", "while_ne", "scan", "fori_lanes", "fori_vector", "while_vector"),
    "fori_causal": ("while_causal",),
}


def kernel_of(name: str, **changes) -> Kernel:
    function, shapes = attention(replace(STYLES[name], **changes))
    (kernel,) = kernels_in(function, *shapes)
    return kernel


def matmul_of(name: str) -> Kernel:
    function, shapes = batched_matmul(name)
    (kernel,) = kernels_in(function, *shapes)
    return kernel


@pytest.mark.parametrize("first", SAME)
def test_same_text(first):
    texts = {name: normal_text(kernel_of(name)) for name in (first, *SAME[first])}
    assert [name for name in texts if texts[name] != texts[first]] == []


def test_heads_in_one_or_two_axes():
    """As the plain form, with another axis of the grid."""
    text = normal_text(kernel_of("flash"))
    assert "f32[256,1] vmem" in text and "squeezed 1, squeezed 1, 256" in text


def test_same_matmul():
    texts = {name: normal_text(matmul_of(name)) for name in MATMULS}
    assert len(set(texts.values())) == 1


def ops_for_h200(kernel: Kernel) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = Compiled(get("cuda"), kernel, Options(chip=GPUS["h200"]))
        assert compiled["cuda"]
        return [op.name for op in walk(compiled.scheduled.body)]


@pytest.mark.parametrize("name", STYLES)
def test_attention_is_specialized(name):
    ops = ops_for_h200(kernel_of(name))
    assert "roles" in ops and "wgmma" in ops


@pytest.mark.parametrize("name", MATMULS)
def test_matmul_is_specialized(name):
    ops = ops_for_h200(matmul_of(name))
    assert "roles" in ops and "wgmma" in ops


@pytest.mark.parametrize("name", ["vector", "lanes", "flash", "while", "swapped"])
def test_gradient_is_specialized(name):
    kernel = kernel_of(name, length=2048, heads=16)
    plan = keeping_plan(kernel, (True,) * 3, Machine.usual(GPUS["h200"]))
    assert plan is not None
    steps = [plan.forward.kernel, *(step.kernel for step in plan.backward.steps)]
    with_dots = [k for k in steps if any(op.name == "dot" for op in walk(k.body))]
    assert len(with_dots) == 3
    assert all("wgmma" in ops_for_h200(k) for k in with_dots)


@pytest.mark.parametrize("name", STYLES)
def test_numbers(name):
    """Small sizes that are not powers of two, by the evaluator."""
    if STYLES[name].statistics == "repeated":
        sizes = dict(length=256, rows=128, columns=128, width=128)
    else:
        sizes = dict(length=72, rows=24, columns=24, width=20)
    kernel = kernel_of(name, heads=2, dtype=np.float32, **sizes)
    arrays = inputs(kernel)
    (old,), (new,) = results(kernel, arrays), results(run(kernel), arrays)
    np.testing.assert_allclose(new, old, rtol=2e-5, atol=2e-5)
