"""Reductions along a dimension as loops over its parts: the same meaning."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.run import run
from pallasite.passes.schedule.gpu_blocks import for_gpu
from pallasite.passes.schedule.loop_over_rows import loop_over_rows
from pallasite.sites import kernels_in
from pallasite.target import GPUS
from tests.passes.test_same_meaning import outputs

KEYS = (1, 0)  # rows of the second operand
F32 = jnp.float32


def softmax(s):
    return jax.nn.softmax(s, axis=-1)


def by_hand(s):
    p = jnp.exp(s - s.max(axis=-1, keepdims=True))
    return p * (1.0 / p.sum(axis=-1, keepdims=True))


def base_two(s):
    p = jnp.exp2(2.0 * s - 2.0 * s.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def masked(s):
    i, j = (jax.lax.broadcasted_iota(jnp.int32, s.shape, d) for d in (0, 1))
    return softmax(jnp.where(j > i + 3, s, -jnp.inf))


def least(s):
    """Not relative to a maximum: three loops."""
    low, high = s.min(axis=-1, keepdims=True), s.max(axis=-1, keepdims=True)
    return (s - low) / (1 + high - low)


def attention(weights, dtype=F32, last=lambda p, v, d: jnp.dot(p, v)) -> Kernel:
    def kernel(q_ref, k_ref, v_ref, o_ref):
        q, k, v = (ref[...].astype(dtype) for ref in (q_ref, k_ref, v_ref))
        s = jnp.dot(q, k.T, preferred_element_type=F32)
        o_ref[...] = last(weights(s).astype(dtype), v, dtype).astype(F32)

    whole = pl.BlockSpec((16, 4), lambda i: (0, 0))
    rows = pl.BlockSpec((4, 4), lambda i: (i, 0))
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((8, 4), F32), grid=(2,),
                          in_specs=[rows, whole, whole], out_specs=rows)  # fmt: skip
    shapes = [jax.ShapeDtypeStruct((n, 4), F32) for n in (8, 16, 16)]
    (found,) = kernels_in(call, *shapes)
    return run(found)


def assert_same(kernel: Kernel, size: int, tolerance: float = 1e-5) -> Kernel:
    new = canonicalize(loop_over_rows(kernel, KEYS, size))
    verify(new)
    rng = np.random.default_rng(0)
    shapes = [p.ref.shape for p in kernel.inputs]
    arrays = [3 * rng.standard_normal(s).astype(np.float32) for s in shapes]
    for a, b in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)
    return new


def loops_and_products(kernel: Kernel) -> tuple[int, int]:
    names = [op.name for op in walk(kernel.body)]
    return names.count("for"), names.count("dot")


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("weights", [softmax, by_hand, base_two, masked])
def test_a_softmax_is_one_loop(weights, size: int):
    new = assert_same(attention(weights), size)
    assert loops_and_products(new) == (1, 2)
    assert f"f32[4,{size}]" in new.text and "f32[4,16]" not in new.text


def test_sums_are_as_wide_as_those_of_a_matmul():
    last = lambda p, v, dtype: jnp.dot(p, v, preferred_element_type=dtype)
    new = assert_same(attention(softmax, jnp.bfloat16, last), 4, 3e-2)
    dots = [op for op in walk(new.body) if op.name == "dot"]
    assert all(op.result.tile.dtype.name == "f32" for op in dots)


def test_other_reductions_are_loops_one_after_another():
    new = assert_same(attention(least), 4)
    assert loops_and_products(new) == (2, 3)


def test_scores_far_below_zero():
    new = assert_same(attention(lambda s: softmax(s - 1e30)), 4)
    assert loops_and_products(new)[0] == 1


def cumulative(s):
    return jnp.cumsum(s, axis=-1)


def doubled(s):
    """Of products: parts of one cannot be merged by the ops that there are."""
    return s * s.prod(axis=-1, keepdims=True)


@pytest.mark.parametrize(
    "weights, size, reason",
    [(softmax, 5, "several parts"), (softmax, 16, "several parts"),
     (lambda s: cumulative(softmax(s)), 4, "runs along it"),
     (doubled, 4, "in parts")],
)  # fmt: skip
def test_what_stays(weights, size: int, reason: str):
    with pytest.raises(CannotReblock, match=reason):
        loop_over_rows(attention(weights), KEYS, size)


@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("shape", [(24, 1100), (1, 33000), (64, 300)], ids=str)
def test_tiles_beyond_all_registers_on_a_gpu(shape, kind):
    """What a program reduces to little needs no tile of everything."""

    def kernel(x_ref, y_ref, o_ref):
        apart = x_ref[...].astype(F32) - y_ref[...].astype(F32)
        o_ref[...] = getattr(jnp, kind)(apart * apart, keepdims=True)

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((1, 1), F32))
    (before,) = kernels_in(call, *[jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 2)
    chip = replace(GPUS["h200"], registers=1 << 14)
    before = run(before)
    after = for_gpu(before, chip)
    (loop,) = (op for op in walk(after.body) if op.name == "for")
    sizes = [v.tile.size for op in walk(loop.regions[0]) for v in op.results]
    assert max(sizes) <= 1 << 14
    verify(after)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=shape).astype(jnp.bfloat16) for _ in range(2)]
    for got, want in zip(outputs(after, given), outputs(before, given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)
