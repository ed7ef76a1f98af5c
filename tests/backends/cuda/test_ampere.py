"""Products in registers and copies in order, as CUDA C++: run on the CPU, and compiled
for each generation of chips since Ampere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.backends import base
from pallasite.backends.cuda import nvrtc
from pallasite.errors import UnsupportedError
from pallasite.target import GPUS
from tests.backends.cuda import host
from tests.backends.cuda.test_plgpu import needs_compiler, needs_nvrtc

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
I8, U8, I32 = jnp.int8, jnp.uint8, jnp.int32
S = jax.ShapeDtypeStruct
TIMINGS = ("late products", "late copies")


def operand(*shape, dtype=F32, seed=0):
    """Small integers, which every type has and every instruction adds exactly."""
    low = 0 if dtype == U8 else -5
    x = np.random.default_rng(seed).integers(low, 6, shape)
    return np.asarray(jnp.asarray(x, dtype))


def ring(a, b, bk, slots=3, out=None, transforms=(), tail=False):
    """A pipeline of copies over k, and sums in registers."""
    (m, k), n = a.shape, b.shape[1]
    steps, sums = pl.cdiv(k, bk), out or (F32 if a.dtype != I8 else I32)

    def kernel(a, b, o, left, right):
        def fetch(step):
            part, slot = pl.ds(step * bk, bk), lax.rem(step, slots)
            plgpu.copy_gmem_to_smem(a.at[:, part], left.at[slot])
            plgpu.copy_gmem_to_smem(b.at[part], right.at[slot])

        for step in range(slots - 1):
            fetch(step)

        def step(n, total):
            left_over = steps - 1 - n
            for more in range(slots - 1):
                wait = lambda more=more: plgpu.wait_gmem_to_smem(2 * more)
                rest = more if more < slots - 2 else None
                ready = left_over >= more if rest is None else left_over == more
                pl.when(ready)(wait)
            slot = lax.rem(n, slots)
            total = plgpu.mma(total, left[slot], right[slot])
            pl.when(n + slots - 1 < steps)(lambda: fetch(n + slots - 1))
            return total

        o[...] = lax.fori_loop(0, steps, step, jnp.zeros((m, n), sums))

    memory = [
        plgpu.SMEM((slots, m, bk), a.dtype, transforms=transforms),
        plgpu.SMEM((slots, bk, n), b.dtype),
    ]
    return plgpu.kernel(kernel, S((m, n), sums), scratch_shapes=memory), (a, b)


def lowered(call, *args):
    (found,) = pl.lower(call)(*args).kernels
    return found


def compiled(kernel, chip="a100"):
    return base.Compiled(host.BACKEND, kernel, base.Options(chip=GPUS[chip]))


KINDS = [(BF16, F32), (F16, F32), (F32, F32), (I8, I32), (U8, I32)]
SHAPES = [(64, 128, 32), (128, 192, 64), (16, 256, 8)]


@needs_compiler
@pytest.mark.parametrize("dtype, sums", KINDS, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("m, k, n", SHAPES)
def test_a_ring_of_copies_feeds_products(dtype, sums, m, k, n, tmp_path):
    a, b = operand(m, k, dtype=dtype), operand(k, n, dtype=dtype, seed=1)
    call, args = ring(a, b, 64, out=sums)
    want = np.asarray(call(*args))  # the evaluator
    np.testing.assert_array_equal(want, a.astype(F32) @ b.astype(F32))
    (got,) = host.run(lowered(call, *args), args, tmp_path, timings=TIMINGS)
    np.testing.assert_array_equal(got, want)


@needs_compiler
def test_copies_to_swizzled_memory(tmp_path):
    layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    a, b = operand(64, 256, dtype=BF16), operand(256, 32, dtype=BF16, seed=1)
    call, args = ring(a, b, 64, transforms=layout)
    (got,) = host.run(lowered(call, *args), args, tmp_path, timings=TIMINGS)
    np.testing.assert_array_equal(got, a.astype(F32) @ b.astype(F32))


@needs_compiler
def test_zeros_come_for_what_is_outside_the_array(tmp_path):
    """The last step's copies reach past the end of both arrays."""
    a, b = operand(64, 176, dtype=F16), operand(176, 16, dtype=F16, seed=1)
    call, args = ring(a, b, 64)
    want = np.asarray(call(*args))
    np.testing.assert_array_equal(want, a.astype(F32) @ b.astype(F32))
    found = lowered(call, *args)
    got = host.Code(found, tmp_path)(*args, memory=host.Fenced())[0]
    np.testing.assert_array_equal(got, want)


def chain(x, y, z):
    """A product of a product, of computed operands and with a transposed one."""

    def kernel(x, y, z, o):
        first = plgpu.mma(jnp.ones((64, 32), F32), x[...], y[...])
        second = jnp.where(first > 0, first, -first).astype(BF16)
        third = jnp.dot(second, z[...].T, preferred_element_type=F32)
        plgpu.named_barrier(0, 128)
        o[...] = jnp.maximum(third, 2.0) - jnp.max(third, axis=1, keepdims=True)

    return plgpu.kernel(kernel, S((64, 16), F32))(x, y, z)


CHAIN = [operand(*s, dtype=BF16, seed=n)
         for n, s in enumerate([(64, 16), (16, 32), (16, 32)])]  # fmt: skip


@needs_compiler
def test_products_of_values(tmp_path):
    found = lowered(chain, *CHAIN)
    (got,) = host.run(found, CHAIN, tmp_path)
    np.testing.assert_array_equal(got, chain(*CHAIN))
    assert "mma_bf16(" in compiled(found)["cuda"]


def warpgroups(x, y):
    """Two warpgroups, each of half of the rows, load halves of the right operand."""

    def kernel(x, y, o, right):
        wg = lax.axis_index("wg")
        half = pl.ds(wg * 32, 32)
        plgpu.copy_gmem_to_smem(y.at[half], right.at[half])
        plgpu.wait_gmem_to_smem(0)
        plgpu.named_barrier(0, 256)
        rows = pl.ds(wg * 64, 64)
        o[rows] = plgpu.mma(jnp.zeros((64, 24), F32), x[rows], right[...])

    how = dict(num_threads=2, thread_name="wg")
    memory = [plgpu.SMEM(y.shape, y.dtype)]
    out = S((128, 24), F32)
    return plgpu.kernel(kernel, out, scratch_shapes=memory, **how)(x, y)


@needs_compiler
@pytest.mark.parametrize("timing", [*host.TIMINGS, "late warpgroup 0"])
def test_two_warpgroups_share_what_they_copy(timing, tmp_path):
    args = operand(128, 64, dtype=F16), operand(64, 24, dtype=F16, seed=1)
    found = lowered(warpgroups, *args)
    (got,) = host.run(found, args, tmp_path, timings=(timing,))
    np.testing.assert_array_equal(got, args[0].astype(F32) @ args[1].astype(F32))


@needs_compiler
def test_a_copy_that_nothing_waits_for_is_found(tmp_path):
    """The simulator sees what the text leaves in flight."""
    call, args = ring(operand(64, 128, dtype=F16), operand(128, 16, dtype=F16), 64)
    edit = lambda text: text.replace("chunks_left<0>();", "chunks_left<9>();")
    code = host.Code(lowered(call, *args), tmp_path, edit=edit)
    with pytest.raises(AssertionError, match="nothing waited for"):
        code(*args)


def test_text_needs_nothing_that_came_after_ampere():
    call, args = ring(operand(64, 128, dtype=F16), operand(128, 16, dtype=F16), 64)
    text = compiled(lowered(call, *args))["cuda"]
    assert "mma.sync.aligned.m16n8k16" in text and "cp.async.cg" in text
    assert not any(w in text for w in ("mbarrier", "wgmma", "elect.sync", "proxy"))


@needs_nvrtc
@pytest.mark.parametrize("dtype, sums", KINDS, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("chip", ["a100", "h100", "b200"])
def test_text_compiles(dtype, sums, chip):
    a, b = operand(128, 128, dtype=dtype), operand(128, 64, dtype=dtype)
    call, args = ring(a, b, 64, out=sums)
    made = compiled(lowered(call, *args), chip)
    assert f".target {nvrtc_target(chip)}" in made["ptx"]
    assert made["ptx"].count("mma.sync") == 2 * 8 * 64 // (32 // a.itemsize)
    if "Used" in made["ptxas"]:
        assert " 0 bytes spill stores" in made["ptxas"]


def nvrtc_target(chip):
    return {"a100": "sm_80", "h100": "sm_90a", "b200": "sm_100a"}[chip]


@needs_nvrtc
def test_values_and_warpgroups_compile_for_ampere():
    args = operand(128, 64, dtype=F16), operand(64, 24, dtype=F16)
    for found in (lowered(chain, *CHAIN), lowered(warpgroups, *args)):
        assert ".target sm_80" in compiled(found)["ptx"]
    assert nvrtc.is_available()


@pytest.mark.parametrize(
    "shapes, dtype, sums, says",
    [
        (((64, 40), (40, 16)), BF16, F32, "k=40 of 16"),
        (((64, 64), (64, 12)), BF16, F32, "12 columns must be a multiple of 8"),
        (((64, 64), (64, 16)), BF16, BF16, "a matmul of bf16 into bf16"),
        (((64, 64), (64, 16)), I8, F32, "a matmul of i8 into f32"),
    ],
)  # fmt: skip
def test_refusals_say_what_is_wrong(shapes, dtype, sums, says):
    def kernel(a, b, o):
        plgpu.named_barrier(0, 128)
        o[...] = plgpu.mma(jnp.zeros(o.shape, sums), a[...], b[...])

    a, b = (operand(*s, dtype=dtype) for s in shapes)
    call = plgpu.kernel(kernel, S((a.shape[0], b.shape[1]), sums))
    with pytest.raises(UnsupportedError, match=says):
        compiled(lowered(call, a, b))["cuda"]


def test_odd_rows_are_refused():
    def kernel(a, o, left):
        plgpu.copy_gmem_to_smem(a, left)
        plgpu.wait_gmem_to_smem(0)
        o[...] = left[...]

    a = operand(8, 13, dtype=F16)
    call = plgpu.kernel(kernel, a, scratch_shapes=[plgpu.SMEM(a.shape, a.dtype)])
    with pytest.raises(UnsupportedError, match="4, 8 or 16 bytes at once"):
        compiled(lowered(call, a))["cuda"]
