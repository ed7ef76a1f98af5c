"""Chips with two cores: which axes are divided between them."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.run import run
from pallasite.passes.schedule.tpu_blocks import _Estimate
from pallasite.runtime.aot import compile_all
from pallasite.sites import kernels_in
from pallasite.target import TPUS
from tests.backends.tpu import harness
from tests.backends.triton.test_blocks import matmul

X = jax.ShapeDtypeStruct((512, 128), jnp.float32)
ROWS = pl.BlockSpec((8, 128), lambda i: (i, 0))


def double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def call(kernel, out_specs=ROWS, **more):
    return pl.pallas_call(
        kernel, out_shape=X, grid=64, in_specs=[ROWS], out_specs=out_specs, **more
    )


def semantics(function, chip: str) -> list[str]:
    (kernel,) = kernels_in(function, X)
    return shown(harness.mosaic(run(kernel), chip=TPUS[chip]))


def shown(text: str) -> list[str]:
    return re.findall(r"#tpu.dimension_semantics<(\w+)>", text)


def test_independent_programs_are_divided():
    text = harness.mosaic(run(matmul(4096, 512, 512, 512)), chip=TPUS["v5p"])
    assert shown(text) == ["parallel", "parallel", "arbitrary"]


def test_one_core_needs_no_division():
    assert semantics(call(double_kernel), "v5e") == ["arbitrary"]


def own_rows(x_ref, o_ref):
    o_ref[pl.ds(8 * pl.program_id(0), 8), :] = x_ref[...]


WHOLE = pl.BlockSpec((512, 128), lambda i: (0, 0))


def test_parts_of_one_block_are_not_divided():
    """Each core would write back all of the block, the other's rows among it."""
    (kernel,) = kernels_in(call(own_rows, WHOLE), X)
    text = harness.mosaic(canonicalize(kernel), chip=TPUS["v5p"])
    assert shown(text) == ["arbitrary"]


def test_parts_of_one_block_have_blocks_of_their_own_in_normal_form():
    assert semantics(call(own_rows, WHOLE), "v5p") == ["parallel"]


def test_scratch_that_carries_is_not_divided():
    def kernel(x_ref, o_ref, sum_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += x_ref[...]
        o_ref[...] = sum_ref[...]

    scratch = [pltpu.VMEM((8, 128), jnp.float32)]
    assert "parallel" not in semantics(call(kernel, scratch_shapes=scratch), "v5p")


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
def test_what_the_author_says_stays(chip):
    said = pltpu.CompilerParams(dimension_semantics=("parallel",))
    function = call(double_kernel, compiler_params=said)
    assert semantics(function, chip) == ["parallel"]


def test_estimates_count_both_cores():
    kernel, chip = run(matmul(2048, 512, 512, 512)), TPUS["v5p"]
    one = _Estimate.of(kernel, replace(chip, cores=1))
    two = _Estimate.of(kernel, chip)
    assert one is not None and two is not None
    assert 0.5 * one.seconds < two.seconds < 0.6 * one.seconds


@pytest.mark.tpu
def test_two_cores_take_half_the_cycles():
    kernel = run(matmul(2048, 512, 512, 512))
    jobs = [harness.job("one", kernel), harness.job("two", kernel, chip=TPUS["v5p"])]
    one, two = compile_all(jobs, "v5p", cycles=True)
    assert one.cycles and two.cycles and two.cycles < 0.6 * one.cycles
