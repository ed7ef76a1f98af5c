"""Columns in all lanes of their rows. Text in, text out."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.replicate_columns import replicate_columns
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.passes.test_promote import expect
from tests.passes.test_row_strips import NORM, code
from tests.passes.test_row_strips import kernel as rows
from tests.passes.test_same_meaning import outputs
from tests.zoo import all_cases

LANES = 2  # so that rows of four are two registers wide


def carried(body: str, scratch: str = "f32[8,1]") -> Kernel:
    """Three steps over blocks x[8,4] with a column in scratch, and the given code."""
    text = f"""
    kernel @k(%x: ref<f32[8,12] any>, %o: ref<f32[8,4] any>) outputs 1 {{
      %m: ref<{scratch} vmem> = alloc {{type=ref<{scratch} vmem>}}
      pipeline %x, %o {{grid=(3,), windows=(in[8, 4], out[8, 4]),
          semantics=("arbitrary",)}}
        map (%i: i32) {{ %z: i32 = constant {{value=0}} yield %z, %i }}
        map (%i1: i32) {{ %z1: i32 = constant {{value=0}} yield %z1, %z1 }}
        body (%s: i32, %xb: ref<f32[8,4] block>, %ob: ref<f32[8,4] block>) {{
          {body}
        }}
    }}"""
    made = parse_kernel(text)
    verify(made)
    return made


def test_a_reduced_row_is_repeated_by_naming_its_registers():
    new = replicate_columns(rows(NORM), LANES)
    verify(new)
    assert code(new) == expect(
        """
        %v: f32[8,4] = load %xb[:, :]
        %w: f32[1,4] = load %bb[:, :]
        %s: f32[8] = reduce %v {kind="sum", axes=(1,)}
        %0: f32[8,2] = broadcast_in_dim %s {shape=(8, 2), dims=(0,)}
        %1: f32[8,4] = concatenate %0, %0 {axis=1}
        %e: f32[8,4] = div %v, %1
        %f: f32[8,4] = broadcast_in_dim %w {shape=(8, 4), dims=(0, 1)}
        %g: f32[8,4] = mul %e, %f
        store %ob[:, :] = %g
        """
    )


RUNNING_MAX = """
%v: f32[8,4] = load %xb[:, :]
%r: f32[8] = reduce %v {kind="max", axes=(1,)}
%c: f32[8,1] = reshape %r {shape=(8, 1)}
%old: f32[8,1] = load %m[:, :]
%new: f32[8,1] = max %old, %c
store %m[:, :] = %new
%d: f32[8,4] = broadcast_in_dim %new {shape=(8, 4), dims=(0, 1)}
store %ob[:, :] = %d
"""


def test_scratch_of_columns_has_all_lanes():
    new = replicate_columns(carried(RUNNING_MAX), LANES)
    verify(new)
    assert "%0: ref<f32[8,2] vmem> = alloc" in new.text
    assert code(new) == expect(
        """
        %v: f32[8,4] = load %xb[:, :]
        %r: f32[8] = reduce %v {kind="max", axes=(1,)}
        %1: f32[8,2] = broadcast_in_dim %r {shape=(8, 2), dims=(0,)}
        %2: f32[8,2] = load %0[:, :]
        %3: f32[8,2] = max %2, %1
        store %0[:, :] = %3
        %4: f32[8,4] = concatenate %3, %3 {axis=1}
        store %ob[:, :] = %4
        """
    )


LINES = """
%v: f32[8,4] = load %xb[:, :]
%r: f32[8] = reduce %v {kind="max", axes=(1,)}
%old: f32[8] = load %m[:]
%new: f32[8] = max %old, %r
store %m[:] = %new
%c: f32[8,1] = broadcast_in_dim %new {shape=(8, 1), dims=(0,)}
%d: f32[8,4] = broadcast_in_dim %c {shape=(8, 4), dims=(0, 1)}
store %ob[:, :] = %d
"""


def test_numbers_per_row_without_a_dimension_of_their_own_are_columns():
    before = carried(LINES, "f32[8]")
    new = replicate_columns(before, LANES)
    verify(new)
    assert "%0: ref<f32[8,2] vmem> = alloc" in new.text
    assert code(new) == expect(
        """
        %v: f32[8,4] = load %xb[:, :]
        %r: f32[8] = reduce %v {kind="max", axes=(1,)}
        %1: f32[8,2] = load %0[:, :]
        %2: f32[8,2] = broadcast_in_dim %r {shape=(8, 2), dims=(0,)}
        %3: f32[8,2] = max %1, %2
        store %0[:, :] = %3
        %4: f32[8,4] = concatenate %3, %3 {axis=1}
        store %ob[:, :] = %4
        """
    )


def test_rows_shorter_than_a_register_make_no_columns_of_lines():
    kernel = carried(LINES, "f32[8]")
    new = replicate_columns(kernel, 8)
    verify(new)
    assert "%m: ref<f32[8] vmem> = alloc" in new.text


def test_scratch_that_is_read_in_parts_stays():
    part = "%p: f32[1,1] = load %m[0:+1, :] %q: f32[1,4] = broadcast_in_dim %p"
    part += " {shape=(1, 4), dims=(0, 1)} store %ob[0:+1, :] = %q"
    new = replicate_columns(carried(RUNNING_MAX + part), LANES)
    verify(new)
    assert "%m: ref<f32[8,1] vmem> = alloc" in new.text


def test_kernels_without_columns_stay():
    kernel = rows("%v: f32[8,4] = load %xb[:, :] store %ob[:, :] = %v")
    assert replicate_columns(kernel, LANES) is kernel


@pytest.mark.parametrize(
    "name",
    [
        "flash_scratch_causal",
        "flash_fori",
        "flash_segments",
        "row_softmax",
        "layer_norm",
        "paged_decode",
    ],
)
def test_meaning_stays(name):
    case = next((c for c in all_cases() if c.name == name), None)
    if case is None:
        pytest.skip("no such kernel")
    arguments = case.make_args(np.random.default_rng(0))
    for kernel in map(run, kernels_in(case.run, *arguments)):
        new = replicate_columns(kernel, LANES)
        verify(new)
        arrays = [np.asarray(jnp.asarray(a)) for a in arguments]
        if [a.shape for a in arrays] != [p.ref.shape for p in kernel.inputs]:
            continue
        for got, want in zip(
            outputs(new, arrays), outputs(kernel, arrays), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
