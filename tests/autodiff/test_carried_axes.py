"""Reverses of sums that steps hand on: axes of a grid, which a chip can split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff.carried_axes import apart
from pallasite.autodiff.explain_grad import chosen_plan
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.parse import parse_kernel
from pallasite.passes.schedule.plan_parts import plan
from pallasite.sites import calls_in
from pallasite.target import chip
from tests.xla import pull_back, put

F32 = jnp.float32


def prefix_sum(x, block, decay=1.0):
    """Along rows, in blocks; the last row of a block is carried in scratch."""

    def kernel(x_ref, o_ref, carry_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            carry_ref[...] = jnp.zeros_like(carry_ref)

        total = jnp.cumsum(x_ref[...].astype(F32), axis=0) + decay * carry_ref[...]
        o_ref[...] = total.astype(o_ref.dtype)
        carry_ref[...] = total[-1:]

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // block,),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM((1, x.shape[1]), F32)],
    )(x)


def backward_kernel(shape, dtype, **more):
    with config.override(target="gpu:h200"):
        x = jax.ShapeDtypeStruct(shape, dtype)
        (call,) = calls_in(lambda x: prefix_sum(x, 64, **more), x)
        (step,) = chosen_plan(call.kernel).steps
    return step.kernel


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16])
def test_the_reverse_of_a_prefix_sum_is_split(dtype):
    kernel = backward_kernel((1 << 20, 8), dtype)
    assert f"grid=({(1 << 20) // 64},)" in kernel.text
    assert plan(kernel, chip("h200")).parts > 1


def test_what_does_not_merge_stays_a_loop():
    """Each step scales what it was handed."""
    kernel = backward_kernel((1 << 20, 8), F32, decay=0.5)
    assert "grid=()" in kernel.text and "= for" in kernel.text


@pytest.mark.parametrize("dtype, tol", [(F32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_gradient_of_a_prefix_sum(dtype, tol, decay):
    x, seed = (
        put(np.random.default_rng(n).normal(size=(35, 3)), dtype) for n in (0, 1)
    )

    def reference(x):
        carry, parts = jnp.zeros((1, 3), F32), []
        for n in range(7):
            part = jnp.cumsum(x[5 * n : 5 * n + 5].astype(F32), axis=0) + decay * carry
            carry = part[-1:]
            parts.append(part)
        return jnp.concatenate(parts).astype(x.dtype)

    want = pull_back(reference, (x,), seed)[0]
    with config.override(target="gpu:h200"):
        got = pull_back(lambda x: prefix_sum(x, 5, decay), (x,), seed)[0]
    got, want = (np.asarray(v, np.float32) for v in (got, want))
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol * np.abs(want).max())


ONE_ADDED = """
kernel @k(%x: ref<f32[4,6] any>, %c: ref<f32[1,6] any>, %o: ref<f32[4,6] any>, %s: ref<f32[6] any>) outputs 2 {{
  %zero: f32 = constant {{value=0.0}}
  %1: f32[4,6] = load %x[:, :]
  %2: f32[1,6] = load %c[:, :]
  %3: f32[4,6] = pad %2, %zero {{low=({low}, 0), high=({high}, 0), interior=(0, 0)}}
  %4: f32[4,6] = add %1, %3
  %5: f32[4,6] = scan %4 {{kind="sum", axis=0, reverse={reverse}}}
  %6: f32[6] = reduce %4 {{kind="sum", axes=(0,)}}
  store %o[:, :] = %5
  store %s[:] = %6
}}
"""  # noqa: E501


@pytest.mark.parametrize(
    "low, high, reverse, is_apart",
    [
        (3, 0, True, True),
        (0, 3, False, True),
        (3, 0, False, False),
        (1, 2, True, False),
    ],
)
def test_an_element_in_all_sums_is_added_to_them(low, high, reverse, is_apart):
    kernel = parse_kernel(ONE_ADDED.format(low=low, high=high, reverse=reverse))
    new = apart(kernel)
    assert ("broadcast_in_dim" in new.text) == is_apart and "reshape" in new.text
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((4, 6), (1, 6))]
    want, got = (Walker(k, NumpyNumbers()).run(arrays) for k in (kernel, new))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(mine), np.asarray(theirs), rtol=1e-5, atol=1e-6
        )
