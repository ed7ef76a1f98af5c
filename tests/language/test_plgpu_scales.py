"""Scales of blocks along k, and sparse operands, of tcgen05_mma, in checked mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import CheckError, KernelTypeError, SpecError, UnsupportedError
from tests.xla import put

F32, E4M3, E8M0 = jnp.float32, jnp.float8_e4m3fn, jnp.float8_e8m0fnu
M, N, K = 128, 256, 128


def packed(scales):
    """Row 128 i + 32 q + r, block 4 j + c at [i, j, r, 4 q + c]."""
    rows, blocks = scales.shape
    tiles = scales.reshape(rows // 128, 4, 32, blocks // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(rows // 128, blocks // 4, 32, 16)


def operands(dtype, block, seed=0):
    rng = np.random.default_rng(seed)
    a, b = (put(rng.normal(size=s), F32).astype(E4M3) for s in ((M, K), (N, K)))
    shapes = ((M, K // block), (N, K // block))
    if dtype == E8M0:
        scales = [2.0 ** rng.integers(-3, 4, size=s) for s in shapes]
    else:
        scales = [rng.integers(1, 9, size=s) / 4 for s in shapes]
    return a, b, *(put(s, F32).astype(dtype) for s in scales)


def matmul(wrong=""):
    def kernel(a, b, sa, sb, o, *memory):
        a_smem, b_smem, *scales, sums, full, done = memory
        sa_smem, sb_smem, sa_tmem, sb_tmem = scales
        for source, target in ((a, a_smem), (b, b_smem), (sa, sa_smem), (sb, sb_smem)):
            plgpu.copy_gmem_to_smem(source, target, full)
        plgpu.barrier_wait(full)
        if wrong != "no scales":
            plgpu.async_copy_scales_to_tmem(sa_smem, sa_tmem)
        plgpu.async_copy_scales_to_tmem(sb_smem, sb_tmem)
        turned = plgpu.transpose_ref(b_smem, (1, 0))
        given = dict(a_scale=sa_tmem, b_scale=sb_tmem)
        if wrong == "one":
            del given["b_scale"]
        if wrong == "sides":
            given = dict(a_scale=sb_tmem, b_scale=sa_tmem)
        if wrong == "sparse":
            given["a_sparse_metadata"] = sa_tmem
        plgpu.tcgen05_mma(sums, a_smem, turned, done, accumulate=False, **given)
        if wrong == "refill":
            plgpu.copy_gmem_to_smem(sa, sa_smem, full)
        plgpu.barrier_wait(done)
        o[...] = plgpu.async_load_tmem(sums)
        plgpu.wait_load_tmem()

    return kernel


def called(a, b, sa, sb, wrong=""):
    memory = [plgpu.SMEM(x.shape, x.dtype) for x in (a, b)]
    memory += [plgpu.SMEM(packed(s).shape, s.dtype) for s in (sa, sb)]
    layout = plgpu.TMEMLayout.SCALES_LAYOUT
    memory += [plgpu.TMEM(s.shape, s.dtype, layout=layout) for s in (sa, sb)]
    memory += [plgpu.TMEM((M, N), F32), plgpu.Barrier(num_arrivals=4)]
    memory += [plgpu.Barrier(orders_tensor_core=True)]
    out = jax.ShapeDtypeStruct((M, N), F32)
    return plgpu.kernel(matmul(wrong), out, scratch_shapes=memory)


def run(dtype=E8M0, block=32, wrong=""):
    a, b, sa, sb = operands(dtype, block)
    got = called(a, b, sa, sb, wrong)(a, b, packed(sa), packed(sb))
    sides = ((a, sa), (b, sb))
    left, right = (x.astype(F32) * _each(s.astype(F32), block) for x, s in sides)
    return got, left @ right.T


def _each(scales, block):
    return jnp.repeat(scales, block, axis=1)


@pytest.mark.parametrize("dtype, block", [(E8M0, 32), (E4M3, 16), (E8M0, 16)])
def test_each_block_of_a_row_has_its_scale(dtype, block):
    got, want = run(dtype, block)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


def test_scales_that_were_not_copied_are_undefined():
    with pytest.raises(CheckError) as raised:
        run(wrong="no scales")
    assert raised.value.kind == "uninitialised"


def test_what_scales_are_copied_from_is_kept():
    with pytest.raises(CheckError, match="the source of a copy to tensor memory is"):
        run(wrong="refill")


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        ("one", SpecError, "scales of both operands, or of none"),
        ("sides", KernelTypeError, "a_scale is no tensor memory with scales of 128"),
        ("sparse", KernelTypeError, "do not match"),
    ],
)
def test_what_does_not_match_is_refused(wrong, error, says):
    with pytest.raises(error, match=says):
        run(wrong=wrong)


def test_scales_in_shared_memory_are_packed():
    def kernel(o, source, target):
        plgpu.async_copy_scales_to_tmem(source, target)

    memory = [plgpu.SMEM((128, 4), E8M0), plgpu.TMEM((128, 4), E8M0)]
    out = jax.ShapeDtypeStruct((8, 128), F32)
    with pytest.raises(KernelTypeError, match="scales in shared memory have the shape"):
        plgpu.kernel(kernel, out, scratch_shapes=memory)()


def test_no_backend_has_them():
    a, b, sa, sb = operands(E8M0, 32)
    lowered = pl.lower(called(a, b, sa, sb))(a, b, packed(sa), packed(sb))
    with pytest.raises(UnsupportedError, match="tensor_mma only on sm_100 or sm_103"):
        lowered.stages(backend="cuda")
    with config.override(target="gpu:b200"):
        lowered = pl.lower(called(a, b, sa, sb))(a, b, packed(sa), packed(sb))
        with pytest.raises(UnsupportedError, match="cannot run alloc on ref<f8e8m0fnu"):
            lowered.stages(backend="cuda")


# --- sparse left operands ---


def sparse(wrong=""):
    def kernel(a, b, places, o, a_smem, b_smem, smem, tmem, sums, full, done):
        for source, target in ((a, a_smem), (b, b_smem), (places, smem)):
            plgpu.copy_gmem_to_smem(source, target, full)
        plgpu.barrier_wait(full)
        if wrong != "no copy":
            plgpu.async_copy_sparse_metadata_to_tmem(smem, tmem)
        more = dict(accumulate=False, a_sparse_metadata=tmem)
        plgpu.tcgen05_mma(sums, a_smem, b_smem, done, **more)
        plgpu.barrier_wait(done)
        o[...] = plgpu.async_load_tmem(sums)
        plgpu.wait_load_tmem()

    return kernel


def kept_places(rows, k):
    """Two different places of each four, in order."""
    pairs = np.array([(i, j) for i in range(4) for j in range(i + 1, 4)])
    return pairs[np.random.default_rng(1).integers(len(pairs), size=(rows, k // 4))]


def run_sparse(dtype, wrong="", k=256):
    rng, places = np.random.default_rng(0), kept_places(M, k)
    dense = np.zeros((M, k // 4, 4), np.float32)
    kept = np.asarray(put(rng.normal(size=places.shape), F32).astype(dtype), np.float32)
    np.put_along_axis(dense, places, kept, axis=2)
    a, b = put(kept.reshape(M, k // 2), dtype), put(rng.normal(size=(k, 32)), dtype)
    made = jnp.asarray(places).astype(jnp.uint2)
    made = plgpu.format_tcgen05_sparse_metadata(made, dtype)
    memory = [plgpu.SMEM(x.shape, x.dtype) for x in (a, b, made)]
    layout = plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT
    memory += [plgpu.TMEM((M, k // 2), jnp.uint2, layout=layout)]
    memory += [plgpu.TMEM((M, 32), F32), plgpu.Barrier(num_arrivals=3)]
    memory += [plgpu.Barrier(orders_tensor_core=True)]
    out = jax.ShapeDtypeStruct((M, 32), F32)
    got = plgpu.kernel(sparse(wrong), out, scratch_shapes=memory)(a, b, made)
    return got, dense.reshape(M, k) @ np.asarray(b, np.float32)


@pytest.mark.parametrize("dtype", (jnp.float16, jnp.bfloat16, E4M3))
def test_two_of_four_elements_are_multiplied(dtype):
    got, want = run_sparse(dtype)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_metadata_that_was_not_copied_is_undefined():
    with pytest.raises(CheckError) as raised:
        run_sparse(jnp.float16, "no copy")
    assert raised.value.kind == "uninitialised"


@pytest.mark.parametrize("dtype", (jnp.float16, E4M3))
def test_metadata_is_in_the_chips_order(dtype):
    """The place of an element, from its row and column, digit by digit."""
    numbers = np.arange(256 * 128).reshape(256, 64, 2) % 4
    made = plgpu.format_tcgen05_sparse_metadata(jnp.asarray(numbers, jnp.uint2), dtype)
    flat = numbers.reshape(256, 128)
    got = np.asarray(made).astype(int)
    for row, column in ((0, 0), (13, 9), (77, 35), (130, 64), (255, 127)):
        r, c = row % 128, column % 64
        if dtype == jnp.float16:
            at = r // 16 * 16 + c // 8 % 2 * 8 + r % 8
            along = c // 16 * 16 + r // 8 % 2 * 8 + c % 8
        else:
            at, along = r, c
        assert got[row // 128, column // 64, at, along] == flat[row, column]


@pytest.mark.parametrize(
    "shape, dtype, operand",
    [
        ((128, 64, 3), jnp.uint2, jnp.float16),
        ((128, 64, 2), jnp.uint8, jnp.float16),
        ((100, 64, 2), jnp.uint2, jnp.float16),
        ((128, 64, 2), jnp.uint2, F32),
    ],
)
def test_other_metadata_is_refused(shape, dtype, operand):
    with pytest.raises(SpecError, match="metadata of a sparse operand is uint2"):
        plgpu.format_tcgen05_sparse_metadata(jnp.zeros(shape, dtype), operand)
