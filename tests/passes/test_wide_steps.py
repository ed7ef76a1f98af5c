"""Steps that reduce parts of rows become steps of whole rows. Text in, text out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.normalize import normalize
from pallasite.passes.schedule.wide_steps import wide_steps
from pallasite.sites import kernels_in
from tests.passes.test_merge_k_steps import when
from tests.passes.test_promote import expect, program

MUCH = 1 << 20


def kernel(body: str) -> Kernel:
    """Sums of x[4,8] in eight steps, started with zero, and the given code."""
    text = f"""
    kernel @k(%x: ref<f32[4,64] any>, %o: ref<f32[4,1] any>) outputs 1 {{
      pipeline %x, %o {{grid=(8,), windows=(in[4, 8], out[4, 1]),
          semantics=("arbitrary",)}}
        map (%k0: i32) {{ %z0: i32 = constant {{value=0}} yield %z0, %k0 }}
        map (%k2: i32) {{ %z2: i32 = constant {{value=0}} yield %z2, %z2 }}
        body (%s: i32, %xb: ref<f32[4,8] block>, %ob: ref<f32[4,1] block>) {{
          {body}
        }}
    }}"""
    made = parse_kernel(text)
    verify(made)
    return made


ZERO = "%zero: f32[4,1] = constant {value=0.0} store %ob[:, :] = %zero"
SUM = """
%a: f32[4,8] = load %xb[:, :]
%b: f32[4,8] = mul %a, %a
%r: f32[4] = reduce %b {kind="sum", axes=(1,)}
%c: f32[4,1] = reshape %r {shape=(4, 1)}
%old: f32[4,1] = load %ob[:, :]
%new: f32[4,1] = add %old, %c
store %ob[:, :] = %new
"""
# One step, with the rows whole.
WHOLE = """
pipeline %x, %o {grid=(1,), windows=(in[4, 64], out[4, 1]), semantics=("arbitrary",)}
"""


def test_sums_of_parts_are_of_whole_rows():
    new = wide_steps(kernel(when(0, ZERO) + SUM), 0)
    verify(new)
    assert expect(WHOLE) in program(new)
    assert "f32[4,64] = load" in program(new)


def test_what_changes_its_rows_in_steps_stays():
    before = kernel(when(0, ZERO) + SUM.replace("add %old", "mul %old"))
    assert wide_steps(before, MUCH) is before


def online(x: jax.Array, block: int, step: int) -> jax.Array:
    """logsumexp of rows, over a grid along them."""

    def body(x_ref, o_ref, top_ref, sum_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            top_ref[...] = jnp.full_like(top_ref, -1e30)
            sum_ref[...] = jnp.zeros_like(sum_ref)

        top = jnp.maximum(top_ref[...], x_ref[...].max(1, keepdims=True))
        scale = jnp.exp(top_ref[...] - top)
        part = jnp.exp(x_ref[...] - top).sum(1, keepdims=True)
        sum_ref[...] = sum_ref[...] * scale + part
        top_ref[...] = top

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = top_ref[...] + jnp.log(sum_ref[...])

    rows, width = x.shape
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((rows, 1), x.dtype),
        grid=(rows // block, width // step),
        in_specs=[pl.BlockSpec((block, step), lambda i, k: (i, k))],
        out_specs=pl.BlockSpec((block, 1), lambda i, k: (i, 0)),
        scratch_shapes=[pltpu.VMEM((block, 1), x.dtype)] * 2,
    )(x)


@pytest.mark.parametrize(
    "block, most, steps", [(8, 2048, 1), (8, 2047, 8), (1, 1024, 2)]
)
def test_what_is_read_twice_stays_in_the_cache(block: int, most: int, steps: int):
    """Whole rows if one fits; otherwise blocks that fit."""
    x = jnp.zeros((16, 512))
    (before,) = kernels_in(lambda x: online(x, block, 64), x)
    before = normalize(before)
    new = wide_steps(before, most)
    verify(new)
    assert f"grid=({16 // block}, {steps})" in program(new)


def test_same_results():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 256)), jnp.float32)
    got = jax.jit(lambda x: online(x, 8, 32))(x)
    np.testing.assert_allclose(got[:, 0], jax.nn.logsumexp(x, 1), rtol=1e-6)
