"""The custom call that a kernel becomes in a program for CUDA, made without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments


def lowered(function, *operands, **options) -> str:
    traced = jax.jit(function, **options).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_call_carries_the_module_and_the_launch():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    def run(x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((256,), jnp.float32),
            grid=(2,),
            in_specs=[pl.BlockSpec((128,), lambda i: (i,))],
            out_specs=pl.BlockSpec((128,), lambda i: (i,)),
            backend="triton",
        )(x)

    text = lowered(run, np.zeros(256, np.float32))
    assert "stablehlo.custom_call @__gpu$xla.gpu.triton" in text
    for part in ("grid_x = 2 : i32", "num_warps = 1 : i32", "debug = false"):
        assert part in text
    assert "tt.func public @" in text
    assert "mhlo.backend_config" in text  # typed attributes: api version 4


def test_scratch_in_memory_is_an_extra_result():
    def kernel(x_ref, o_ref, scratch_ref):
        scratch_ref[...] = x_ref[...]
        o_ref[...] = jnp.broadcast_to(scratch_ref[3:4, :], o_ref.shape)

    def run(x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
            grid=(2,),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
            backend="triton",
        )(x)

    text = lowered(run, np.zeros((16, 128), np.float32))
    assert "tensor<16x128xf32>, tensor<2048xf32>" in text.replace("(", "")


def test_aliases_reach_the_call():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def run(x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            input_output_aliases={0: 0},
            backend="triton",
        )(x)

    text = lowered(run, np.zeros((8, 128), np.float32), donate_argnums=0)
    assert "output_operand_alias" in text


@pytest.mark.parametrize(
    "name", ["flash_scratch", "gather_rows", "ragged_matmul", "dictionary_outputs"]
)
def test_zoo_kernel_lowers(name: str):
    (case,) = [case for case in all_cases() if case.name == name]
    run = lambda *a: case.run(*a, interpret=False, backend="triton")
    assert "__gpu$xla.gpu.triton" in lowered(run, *arguments(case, 0))
