"""Scratch that every step overwrites before it reads, as values. Text in, text out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import kernels
from pallasite import tpu as pltpu
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.scratch_values import scratch_values
from pallasite.sites import kernels_in
from tests.passes.test_promote import expect
from tests.passes.test_row_strips import code
from tests.passes.test_same_meaning import outputs


def kernel(body: str, steps: int = 2) -> Kernel:
    """A kernel with blocks x[4] and o[4], scratch s[4], and the given code."""
    text = f"""
    kernel @k(%x: ref<f32[8] any>, %o: ref<f32[8] any>) outputs 1 {{
      %s: ref<f32[4] vmem> = alloc
      pipeline %x, %o {{grid=({steps},), windows=(in[4], out[4]),
          semantics=("arbitrary",)}}
        map (%i: i32) {{ yield %i }}
        map (%i1: i32) {{ yield %i1 }}
        body (%n: i32, %xb: ref<f32[4] block>, %ob: ref<f32[4] block>) {{
          {body}
        }}
    }}"""
    made = parse_kernel(text)
    verify(made)
    return made


SUMS = """
%z: f32[4] = constant {value=0.0}
store %s[:] = %z
%v: f32[4] = load %xb[:]
%a: f32[4] = load %s[:]
%b: f32[4] = add %a, %v
store %s[:] = %b
%c: f32[4] = load %s[:]
store %ob[:] = %c
"""


def test_what_is_loaded_is_what_was_stored():
    made = scratch_values(kernel(SUMS))
    verify(made)
    assert "alloc" not in made.text
    want = """
    %z: f32[4] = constant {value=0.0}
    %v: f32[4] = load %xb[:]
    %b: f32[4] = add %z, %v
    store %ob[:] = %b
    """
    assert code(made).split("=")[2:] == expect(want).split("=")[2:]
    x = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(outputs(made, [x])[0], x)


def test_a_result_is_stored_once():
    body = """
    %z: f32[4] = constant {value=0.0}
    store %ob[:] = %z
    %v: f32[4] = load %xb[:]
    %a: f32[4] = load %ob[:]
    %b: f32[4] = add %a, %v
    store %ob[:] = %b
    %c: f32[4] = load %ob[:]
    %d: f32[4] = add %c, %v
    store %s[:] = %d
    """
    made = scratch_values(kernel(body))
    verify(made)
    assert made.text.count("store") == 1
    assert "load %ob" not in made.text
    x = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(outputs(made, [x])[0], x)


@pytest.mark.parametrize(
    "body",
    [
        # read before it is written: an earlier step's
        "%a: f32[4] = load %s[:] store %s[:] = %a store %ob[:] = %a",
        # a result that an earlier step began
        "%a: f32[4] = load %ob[:] store %ob[:] = %a",
        # written in part
        """%v: f32[2] = load %xb[0:+2] store %s[0:+2] = %v
        %a: f32[4] = load %s[:] store %ob[:] = %a""",
        # written at some steps only
        """%v: f32[4] = load %xb[:] cond %n branch () {} branch () { store %s[:] = %v }
        %a: f32[4] = load %s[:] store %ob[:] = %a""",
    ],
)
def test_left_alone(body):
    before = kernel(body)
    assert scratch_values(before) is before


def test_a_sum_of_one_step_has_no_scratch():
    """Also of several that are merged: it is stored where it is made."""
    x, y = jnp.ones((64, 256)), jnp.ones((256, 128))
    call = lambda x, y: kernels.matmul(x, y, implementation="pallasite")
    scheduled = pl.lower(call)(x, y).stages(backend="cpu")["scheduled"]
    assert "alloc" not in scheduled
    assert "cond" not in scheduled
    np.testing.assert_array_equal(call(x, y), x @ y)


def test_a_sum_of_many_steps_keeps_it():
    deep = jnp.ones((64, 4096)), jnp.ones((4096, 128))
    scheduled = pl.lower(kernels.matmul)(*deep).stages(backend="cpu")["scheduled"]
    assert "alloc" in scheduled


def test_scratch_of_a_step_that_adds_to_it_twice():
    def body(x_ref, o_ref, s_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            s_ref[...] = jnp.zeros_like(s_ref)

        s_ref[...] += x_ref[...] @ x_ref[...]
        s_ref[...] += x_ref[...]

        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.exp(-s_ref[...])

    x = jax.random.normal(jax.random.key(0), (32, 32)) / 8
    call = pl.pallas_call(
        body,
        out_shape=x,
        grid=(1, 1),
        in_specs=[pl.BlockSpec((32, 32), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((32, 32), lambda i, j: (i, j)),
        scratch_shapes=[pltpu.VMEM((32, 32), jnp.float32)],
    )
    assert len(kernels_in(call, x)) == 1
    np.testing.assert_allclose(call(x), jnp.exp(-(x @ x + x)), rtol=1e-5)


@pytest.mark.parametrize("shape", [(8, 128), (7, 128)], ids=["aliased", "edge"])
def test_results_that_something_else_shows_stay(shape):
    """An operand in the same memory sees every store; past an end nothing is stored."""

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.zeros((4, 128))
        o_ref[...] = x_ref[...] + o_ref[...]

    block = pl.BlockSpec((4, 128), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(2,),
        in_specs=[block],
        out_specs=block,
        input_output_aliases={0: 0} if shape[0] == 8 else {},
    )
    (made,) = kernels_in(call, jnp.zeros(shape))
    assert scratch_values(made) is made
