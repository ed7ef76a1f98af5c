"""An author's explicit kernels (`plgpu`) as CUDA C++, run on the CPU (`host.py`)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.backends import base, cuda
from pallasite.backends.cuda import nvrtc
from pallasite.errors import ResourceError, UnsupportedError
from pallasite.target import GPUS
from tests.backends.cuda import host

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
needs_nvrtc = pytest.mark.skipif(
    not nvrtc.is_available(), reason="NVRTC is not installed (nvidia-cuda-nvrtc)"
)
needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="g++, which compiles the emitted text, is missing"
)


def operands(*shapes, dtype=F16):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def out(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def run(function, *args, folder):
    (kernel,) = pl.lower(function)(*args).kernels
    got = host.run(kernel, [np.asarray(x) for x in args], folder)
    return got[0] if len(got) == 1 else got


def text(function, *args) -> str:
    (kernel,) = pl.lower(function)(*args).kernels
    return host.cuda_text(kernel)


def refused(function, *args) -> str:
    (kernel,) = pl.lower(function)(*args).kernels
    with pytest.raises(UnsupportedError) as raised:
        host.cuda_text(kernel)
    assert __file__.rsplit("/", 1)[1] in str(raised.value)
    return str(raised.value)


# --- copies ---


def copy_kernel(x_ref, o_ref, buffer, barrier):
    plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(buffer, o_ref)
    plgpu.wait_smem_to_gmem(0)


def copied(x, **how):
    memory = [plgpu.SMEM(x.shape, x.dtype, **how), plgpu.Barrier()]
    return plgpu.kernel(
        copy_kernel, out(*x.shape, dtype=x.dtype), scratch_shapes=memory
    )(x)


def swizzled(by):
    return dict(transforms=(plgpu.SwizzleTransform(by),))


COPIES = [
    ((64, 64), F16, swizzled(128)),
    ((8, 128), F32, swizzled(128)),
    ((16, 32), BF16, swizzled(64)),
    ((8, 32), jnp.int8, swizzled(32)),
    ((512, 64), F16, swizzled(128)),
    ((24, 40), F32, {}),
    ((512,), F32, {}),
    ((4, 8, 16), jnp.int32, {}),
]


@needs_compiler
@pytest.mark.parametrize("shape, dtype, how", COPIES)
def test_a_copy_there_and_back(shape, dtype, how, tmp_path):
    (x,) = operands(shape, dtype=dtype)
    got = run(lambda x: copied(x, **how), x, folder=tmp_path)
    np.testing.assert_array_equal(got, x)


def test_what_the_copy_engine_does_not_copy_is_refused():
    message = refused(copied, jnp.ones((8, 1000), F32))
    assert "more than 256 elements" in message and "copy_start" in message
    assert "a multiple of 16 bytes" in refused(copied, jnp.ones((8, 7), F16))
    message = refused(lambda x: copied(x, **swizzled(128)), jnp.ones((4, 64), F16))
    assert "a swizzle of 128 bytes" in message


# --- what threads store and load, and when they meet ---


def halves_kernel(x_ref, o_ref, total_ref, buffer, barrier):
    """Loads swizzled memory, overwrites it, and loads it again."""
    plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
    plgpu.barrier_wait(barrier)
    buffer[...] = buffer[...].T * 2
    total_ref[...] = jnp.sum(buffer[pl.ds(8, 8), 32:], axis=1)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, o_ref)
    plgpu.wait_smem_to_gmem(0)


@needs_compiler
@pytest.mark.parametrize("by", [32, 64, 128])
def test_threads_see_what_others_stored(by, tmp_path):
    (x,) = operands((64, 64), dtype=F32)
    memory = [plgpu.SMEM(x.shape, F32, **swizzled(by)), plgpu.Barrier()]
    function = plgpu.kernel(halves_kernel, [out(64, 64), out(8)], scratch_shapes=memory)
    got, total = run(function, x, folder=tmp_path)
    np.testing.assert_allclose(got, x.T * 2)
    np.testing.assert_allclose(total, 2 * x.T[8:16, 32:].sum(1), rtol=1e-5)


def between(found: str, first: str, second: str) -> str:
    start = found.index(first)
    return found[start : found.index(second, start)]


def test_a_copy_waits_for_all_warps_that_read_what_it_overwrites():
    def kernel(x_ref, o_ref, buffer, barrier):
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)
        o_ref[...] = buffer[...]
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)

    memory = [plgpu.SMEM((64, 64), F32), plgpu.Barrier()]
    function = plgpu.kernel(kernel, out(64, 64), scratch_shapes=memory)
    found = text(function, *operands((64, 64), dtype=F32))
    role = found[found.index("map_seen(maps") :]
    assert "meet(" not in role[: role.index("copy_in_2(")]
    assert "meet(1, 128);" in between(role, "barrier_wait", "copy_in_2(")


def doubled_tiles(x_ref, o_ref, buffer, result, barrier, read_only=True):
    """Tiles one after another; each step ends by waiting for what it copies out."""

    @pl.loop(0, x_ref.shape[0] // 64)
    def _(i):
        rows = pl.ds(i * 64, 64)
        plgpu.copy_gmem_to_smem(x_ref.at[rows], buffer, barrier)
        plgpu.barrier_wait(barrier)
        result[...] = buffer[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, o_ref.at[rows])
        plgpu.wait_smem_to_gmem(0, wait_read_only=read_only)


def doubled(x, kernel=doubled_tiles, threads=1):
    memory = [plgpu.SMEM((64, 64), F32)] * 2 + [plgpu.Barrier()]
    side = dict(num_threads=threads, thread_name="wg") if threads > 1 else {}
    return plgpu.kernel(kernel, out(*x.shape), scratch_shapes=memory, **side)(x)


@needs_compiler
def test_a_step_waits_for_the_copies_of_the_one_before(tmp_path):
    """Where it writes what they read, and not before it has waited for its own."""
    (x,) = operands((256, 64), dtype=F32)
    found = text(doubled, x)
    role = found[found.index("map_seen(maps") :]
    steps = between(role, "for (int ", "\n    }\n")
    assert steps.count("copies_reading<0>") == 1
    assert steps.index("barrier_wait") < steps.index("copies_reading<0>")
    assert steps.index("copies_reading<0>") < steps.index("copy_out_2")
    assert "copies_reading<0>" in role.partition(steps)[2]  # those of the last step
    np.testing.assert_array_equal(run(doubled, x, folder=tmp_path), 2 * x)


def test_waits_that_others_may_rely_on_stay():
    """Those for what is in main memory, and those for memory of several roles."""
    (x,) = operands((256, 64), dtype=F32)

    def to_the_end(*refs):
        doubled_tiles(*refs, read_only=False)

    def of_two(x_ref, o_ref, buffer, result, barrier):
        pl.when(lax.axis_index("wg") == 0)(
            lambda: doubled_tiles(x_ref, o_ref, buffer, result, barrier)
        )

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            result[...] = jnp.zeros_like(result)

    for kernel, threads, word in ((to_the_end, 1, "left"), (of_two, 2, "reading")):
        found = text(lambda x, k=kernel, n=threads: doubled(x, k, n), x)
        assert found.count(f"copies_{word}<0>();") == 1, word
        last = found.index(f"copies_{word}<0>();")
        assert found.index("copies_together();") < last


@needs_compiler
def test_nobody_waits_at_the_end_until_main_memory_has_the_results(tmp_path):
    """A wait before other work is for what the author says."""

    def twice(x_ref, o_ref, buffer, barrier):
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)
        for n in range(2):
            plgpu.copy_smem_to_gmem(buffer, o_ref.at[n])
            plgpu.wait_smem_to_gmem(0)

    memory = [plgpu.SMEM((64, 64), F32), plgpu.Barrier()]
    function = plgpu.kernel(twice, out(2, 64, 64), scratch_shapes=memory)
    (x,) = operands((64, 64), dtype=F32)
    found = re.findall(r"copy_out|copies_\w+<0>(?=\(\);)", text(function, x))
    ends = found[-4:]
    assert ends == ["copy_out", "copies_left<0>", "copy_out", "copies_reading<0>"]
    result = run(function, x, folder=tmp_path)
    np.testing.assert_array_equal(result, np.stack([x, x]))


# --- warpgroups side by side ---


@needs_compiler
def test_a_warpgroup_loads_what_another_one_stored(tmp_path):
    """Memory that each of them uses only as a whole, which could be a value of each."""

    def kernel(x_ref, o_ref, buffer, full):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            buffer[...] = x_ref[...] + 1
            plgpu.barrier_arrive(full)

        @pl.when(wg == 1)
        def _():
            plgpu.barrier_wait(full)
            o_ref[...] = buffer[...]

    memory = [plgpu.SMEM((64, 4), F32), plgpu.Barrier()]
    side = dict(num_threads=2, thread_name="wg")
    function = plgpu.kernel(kernel, out(64, 4), scratch_shapes=memory, **side)
    (x,) = operands((64, 4), dtype=F32)
    np.testing.assert_array_equal(run(function, x, folder=tmp_path), x + 1)
    np.testing.assert_array_equal(function(x), x + 1)


def exchange_kernel(x_ref, o_ref, buffer, barrier):
    """Each of two warpgroups goes on with what the other has stored."""
    wg = lax.axis_index("wg")
    mine = pl.ds(wg * 64, 64)

    def meet():
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    def step(i, x):
        buffer[wg] = x + 1
        meet()
        other = buffer[1 - wg]
        meet()
        return other * 2

    o_ref[mine] = lax.fori_loop(0, 3, step, x_ref[mine])


@needs_compiler
def test_warpgroups_exchange_what_they_store(tmp_path):
    (x,) = operands((128, 32), dtype=F32)
    memory = [plgpu.SMEM((2, 64, 32), F32), plgpu.Barrier(num_arrivals=2)]
    threads = dict(num_threads=2, thread_name="wg")
    function = plgpu.kernel(
        exchange_kernel, out(128, 32), scratch_shapes=memory, **threads
    )
    got = run(function, x, folder=tmp_path)
    halves = [x[:64], x[64:]]
    for _ in range(3):
        halves = [(half + 1) * 2 for half in reversed(halves)]
    np.testing.assert_allclose(got, jnp.concatenate(halves), rtol=1e-6)


def sums_kernel(x_ref, o_ref, total_ref, buffer, barriers):
    wg = lax.axis_index("wg")
    rows = pl.ds(wg * 32, 32)
    plgpu.copy_gmem_to_smem(x_ref.at[rows], buffer.at[wg], barriers.at[wg])
    plgpu.barrier_wait(barriers.at[wg])
    x = buffer[wg]
    total_ref[wg] = x.sum(axis=0)
    o_ref[rows] = jax.nn.softmax(x, axis=1) * x.sum(axis=0, keepdims=True)


@needs_compiler
def test_each_warpgroup_reduces_by_itself(tmp_path):
    (x,) = operands((64, 64), dtype=F32)
    memory = [plgpu.SMEM((2, 32, 64), F32), plgpu.Barrier(num_barriers=2)]
    threads = dict(num_threads=2, thread_name="wg")
    outs = [out(64, 64), out(2, 64)]
    function = plgpu.kernel(sums_kernel, outs, scratch_shapes=memory, **threads)
    got, totals = run(function, x, folder=tmp_path)
    sums = x.reshape(2, 32, 64).sum(axis=1)
    np.testing.assert_allclose(totals, sums, rtol=1e-5, atol=1e-5)
    want = jax.nn.softmax(x, axis=1) * jnp.repeat(sums, 32, axis=0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# --- two at once ---


def pairs_kernel(x_ref, i_ref, o_ref, n_ref, xs, ns, barrier):
    plgpu.copy_gmem_to_smem(x_ref, xs, barrier)
    plgpu.copy_gmem_to_smem(i_ref, ns, barrier)
    plgpu.barrier_wait(barrier)
    x = xs[...]
    o_ref[...] = (x * x - x) + x * 3
    n_ref[...] = ns[...].astype(x.dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_pairs_of_small_floats_are_exact(dtype, tmp_path):
    (x,) = operands((16, 64), dtype=dtype)
    bytes_ = jnp.arange(-512, 512, dtype=jnp.int32).astype(jnp.int8).reshape(16, 64)
    memory = [plgpu.SMEM(x.shape, dtype), plgpu.SMEM(x.shape, jnp.int8)]
    memory.append(plgpu.Barrier(num_arrivals=2))
    outs = [out(16, 64, dtype=dtype)] * 2
    function = plgpu.kernel(pairs_kernel, outs, scratch_shapes=memory)
    assert "pairs_mul" in text(function, x, bytes_)
    got, numbers = run(function, x, bytes_, folder=tmp_path)
    wide = np.asarray(x, np.float32)
    rounded = lambda a: a.astype(x.dtype).astype(np.float32)
    want = rounded(rounded(rounded(wide * wide) - wide) + rounded(wide * 3))
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)
    np.testing.assert_array_equal(np.asarray(numbers, np.float32), bytes_)


# --- products ---


def ring_kernel(steps, slots, depth):
    """One warpgroup fills a ring, two multiply; each has half of a program's rows."""

    def kernel(x, y, o, a, b, sums, full, empty):
        wg, first = lax.axis_index("wg"), pl.program_id(0) * 128

        @pl.when(wg == 2)
        def load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, steps)
            def step(i):
                s, part = lax.rem(i, slots), pl.ds(i * depth, depth)

                @pl.when(i >= slots)
                def _():
                    plgpu.barrier_wait(empty.at[s])

                rows = pl.ds(first, 128)
                plgpu.copy_gmem_to_smem(x.at[rows, part], a.at[s], full.at[s])
                plgpu.copy_gmem_to_smem(y.at[part], b.at[s], full.at[s])

        @pl.when(wg < 2)
        def compute():
            plgpu.set_max_registers(232, action="increase")
            rows, own = pl.ds(wg * 64, 64), pl.ds(first + wg * 64, 64)

            def multiply(acc):
                @pl.loop(0, steps)
                def step(i):
                    s = lax.rem(i, slots)
                    plgpu.barrier_wait(full.at[s])
                    plgpu.wgmma(acc, a.at[s, rows], b.at[s])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[s])

                return acc[...]

            total = pl.run_scoped(multiply, plgpu.ACC((64, 128), F32))
            for n in range(2):
                half = slice(64 * n, 64 * n + 64)
                sums[wg, n] = total[:, half].astype(F16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(sums.at[wg, n], o.at[own, half])
            plgpu.wait_smem_to_gmem(0)

    return kernel


def ring(x, y, steps=3, slots=2, depth=64):
    return plgpu.kernel(
        ring_kernel(steps, slots, depth),
        out_type=out(x.shape[0], 128, dtype=F16),
        scratch_types=[
            plgpu.SMEM((slots, 128, depth), F16, transforms=SWIZZLED),
            plgpu.SMEM((slots, depth, 128), F16, transforms=SWIZZLED),
            plgpu.SMEM((2, 2, 64, 64), F16, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ],
        grid=(x.shape[0] // 128,),
        grid_names=("i",),
        num_threads=3,
        thread_name="wg",
    )(x, y)


@needs_compiler
def test_a_ring_multiplies(tmp_path):
    x, y = operands((128, 192), (192, 128))
    got = run(ring, x, y, folder=tmp_path)
    want = x.astype(F32) @ y.astype(F32)
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=5e-2)
    np.testing.assert_allclose(np.asarray(ring(x, y)), want, rtol=1e-2, atol=5e-2)


def test_what_the_text_of_a_ring_has():
    found = text(ring, *operands((128, 192), (192, 128)))
    assert "fewer_registers<40>();" in found and "more_registers<232>();" in found
    # The author counts warpgroups and copies, the barrier warps.
    assert found.count(", 8);") >= 4 and "barrier_expect_for" in found
    assert found.startswith("// launch") and '"threads": 384' in found


def copier_and_multiplier(rows=64, columns=64, slots=2):
    """One warpgroup copies, one multiplies; each says how many registers it wants."""

    def kernel(x, y, o, a, b, full):
        wg = lax.axis_index("wg")

        @pl.when(wg == 1)
        def load():
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(x, a.at[0], full)
            plgpu.copy_gmem_to_smem(y, b, full)

        @pl.when(wg == 0)
        def compute():
            plgpu.set_max_registers(248, action="increase")
            plgpu.barrier_wait(full)

            def multiply(acc):
                plgpu.wgmma(acc, a.at[0], b)
                return acc[...]

            o[...] = pl.run_scoped(multiply, plgpu.ACC((rows, columns), F32))

    function = plgpu.kernel(
        kernel,
        out_type=out(rows, columns),
        scratch_types=[
            plgpu.SMEM((slots, rows, 64), F16, transforms=SWIZZLED),
            plgpu.SMEM((64, columns), F16, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=2),
        ],
        num_threads=2,
        thread_name="wg",
    )
    return text(function, *operands((rows, 64), (64, columns)))


def test_two_programs_of_one_multiplying_warpgroup_share_a_multiprocessor():
    found = copier_and_multiplier()
    assert "__launch_bounds__(256, 2)" in found
    assert "fewer_registers<24>();" in found and "more_registers<232>();" in found


def test_programs_that_need_a_multiprocessor_have_it_alone():
    much_memory = copier_and_multiplier(slots=14)
    many_registers = copier_and_multiplier(rows=128, columns=256)
    for found in (much_memory, many_registers):
        assert "__launch_bounds__(256, 1)" in found
        assert "fewer_registers<40>();" in found and "more_registers<248>();" in found


@needs_compiler
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_operands_in_registers_and_turned_ones(dtype, tmp_path):
    q, k, v = operands((64, 64), (128, 64), (128, 64), dtype=dtype)

    def kernel(q_ref, k_ref, v_ref, o_ref, qs, ks, vs, barrier):
        for source, target in ((q_ref, qs), (k_ref, ks), (v_ref, vs)):
            plgpu.copy_gmem_to_smem(source, target, barrier)
        plgpu.barrier_wait(barrier)

        def scores(acc):
            plgpu.wgmma(acc, qs, plgpu.transpose_ref(ks, (1, 0)))
            return acc[...]

        s = pl.run_scoped(scores, plgpu.ACC((64, 128), F32))
        p = jnp.tanh(s - lax.broadcast_in_dim(s.max(axis=1), s.shape, [0]))
        start = plgpu.layout_cast(jnp.ones((64, 64), F32), plgpu.Layout.WGMMA)
        add = lambda acc: plgpu.wgmma(acc, p.astype(dtype), vs)
        o_ref[...] = pl.run_state(add)(plgpu.ACC.init(start))

    memory = [plgpu.SMEM(x.shape, dtype) for x in (q, k, v)]
    memory.append(plgpu.Barrier(num_arrivals=3))
    function = plgpu.kernel(kernel, out(64, 64), scratch_shapes=memory)
    got = run(function, q, k, v, folder=tmp_path)
    s = q.astype(F32) @ k.astype(F32).T
    p = jnp.tanh(s - s.max(axis=1, keepdims=True)).astype(dtype).astype(F32)
    np.testing.assert_allclose(got, 1 + p @ v.astype(F32), rtol=1e-2, atol=1e-2)


@needs_compiler
@pytest.mark.parametrize("dtype, depth", [(BF16, 64), (F16, 128), (BF16, 32)])
def test_bytes_of_a_left_side_stay_in_pairs(dtype, depth, tmp_path):
    """All that 8 bits can be; rows are 32, 64 or 128 bytes."""
    x = jnp.arange(128 * depth).astype(jnp.int8).reshape(128, depth)
    x = jnp.where(jnp.arange(128)[:, None] % 3 == 0, x[::-1], x)
    y = jnp.eye(depth, 64, dtype=dtype) + jnp.eye(depth, 64, k=-64, dtype=dtype) * 2

    def kernel(x_ref, y_ref, o_ref, xs, ys, barrier):
        for source, target in ((x_ref, xs), (y_ref, ys)):
            plgpu.copy_gmem_to_smem(source, target, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            plgpu.wgmma(acc, xs[...].astype(dtype), ys)
            return acc[...]

        o_ref[...] = pl.run_scoped(multiply, plgpu.ACC((128, 64), F32))

    memory = [plgpu.SMEM(x.shape, x.dtype, **swizzled(depth))]
    memory += [plgpu.SMEM(y.shape, dtype), plgpu.Barrier(num_arrivals=2)]
    function = plgpu.kernel(kernel, out(128, 64), scratch_shapes=memory)
    found = text(function, x, y)
    loaded = re.search(r" (w\d+)\[i\] = \*\(const u16\*\)", found)
    assert loaded is not None and re.search(rf"pair_of_i8_b?f16\({loaded[1]}\[", found)
    got = run(function, x, y, folder=tmp_path)
    np.testing.assert_array_equal(got, x.astype(F32) @ y.astype(F32))


@needs_compiler
@pytest.mark.parametrize("slots, delay", [(1, 0), (2, 0), (3, 1)])
def test_emit_pipeline(slots, delay, tmp_path):
    x, y = operands((128, 256), (256, 64))

    def kernel(x_ref, y_ref, o_ref, sums):
        rows = pl.ds(lax.axis_index("m") * 64, 64)

        def scoped(acc):
            def step(indices, a, b):
                plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(delay)

            spec = lambda *a: plgpu.BlockSpec(
                *a, delay_release=delay, transforms=SWIZZLED
            )
            plgpu.emit_pipeline(
                step,
                grid=(4,),
                in_specs=[
                    spec((64, 64), lambda k: (0, k)),
                    spec((64, 64), lambda k: (k, 0)),
                ],
                max_concurrent_steps=slots,
            )(x_ref.at[rows], y_ref)
            return acc[...]

        sums[...] = pl.run_scoped(scoped, plgpu.ACC((64, 64), F32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums, o_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    function = plgpu.kernel(
        kernel,
        out_shape=out(128, 64),
        grid=(2,),
        grid_names=("m",),
        scratch_shapes=dict(sums=plgpu.SMEM((64, 64), F32)),
    )
    got = run(function, x, y, folder=tmp_path)
    want = x.astype(F32) @ y.astype(F32)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize("by, columns", [(128, 128), (64, 32), (32, 16)])
@pytest.mark.parametrize("rows", [64, 128])
def test_sums_in_16_bits_are_stored_as_matrices(rows, by, columns, tmp_path):
    """Into a slot of swizzled memory, for which threads exchange them."""
    x, y = operands((rows, 64), (64, columns))

    def kernel(x_ref, y_ref, o_ref, a, b, result, barrier):
        plgpu.copy_gmem_to_smem(x_ref, a, barrier)
        plgpu.copy_gmem_to_smem(y_ref, b, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        sums = pl.run_scoped(multiply, plgpu.ACC((rows, columns), F32))
        result[1] = sums.astype(result.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result.at[1], o_ref)
        plgpu.wait_smem_to_gmem(0)

    memory = [
        plgpu.SMEM(x.shape, F16),
        plgpu.SMEM(y.shape, F16, **swizzled(by)),
        plgpu.SMEM((2, rows, columns), F16, **swizzled(by)),
        plgpu.Barrier(num_arrivals=2),
    ]
    shape = out(rows, columns, dtype=F16)
    function = plgpu.kernel(kernel, shape, scratch_shapes=memory)
    assert f"EACH({rows // 64 * columns // 16}) put_matrices(" in text(function, x, y)
    want = x.astype(F32) @ y.astype(F32)
    got = run(function, x, y, folder=tmp_path)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-3)


def product(rows, columns, depth, dtype, sums=F32, turned=False):
    def kernel(x, y, o, a, b, barrier):
        plgpu.copy_gmem_to_smem(x, a, barrier)
        plgpu.copy_gmem_to_smem(y, b, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            plgpu.wgmma(acc, a, plgpu.transpose_ref(b, (1, 0)) if turned else b)
            return acc[...]

        o[...] = pl.run_scoped(multiply, plgpu.ACC((rows, columns), sums))

    shapes = (rows, depth), ((columns, depth) if turned else (depth, columns))
    memory = [plgpu.SMEM(s, dtype) for s in shapes] + [plgpu.Barrier(num_arrivals=2)]
    function = plgpu.kernel(
        kernel, out(rows, columns, dtype=sums), scratch_shapes=memory
    )
    return function, operands(*shapes, dtype=dtype)


@needs_compiler
@pytest.mark.parametrize("dtype, sums", [(jnp.int8, jnp.int32), (F32, F32)])
def test_other_types(dtype, sums, tmp_path):
    function, args = product(64, 16, 64, dtype, sums, turned=True)
    got = run(function, *args, folder=tmp_path)
    x, y = (np.asarray(a, np.float64) for a in args)
    np.testing.assert_allclose(got, x @ y.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(rows=32, columns=64, depth=64, dtype=F16), "an accumulator of 32 x 64"),
        (dict(rows=64, columns=320, depth=64, dtype=F16), "up to 256"),
        (dict(rows=64, columns=32, depth=64, dtype=F32), "contiguous along k"),
        (
            dict(rows=64, columns=64, depth=64, dtype=F16, sums=F16),
            "does not support these dtypes",
        ),
    ],
)
def test_products_that_the_instruction_has_not(given, message):
    function, args = product(**given)
    found = refused(function, *args)
    assert message in found and "wgmma" in found, found


# --- clusters ---


def clustered(x, y, axes="pair"):
    """Four blocks, in pairs along two axes; those of a pair share the left side."""

    def kernel(x_ref, y_ref, o_ref, a, b, full, free):
        pair, other = lax.axis_index("pair"), lax.axis_index("other")
        rows, columns = pl.ds(other * 64, 64), pl.ds(pair * 64, 64)
        plgpu.copy_gmem_to_smem(x_ref.at[rows], a, full, collective_axes=axes)
        plgpu.copy_gmem_to_smem(y_ref.at[:, columns], b, full)
        plgpu.barrier_wait(full)

        def multiply(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        o_ref[rows, columns] = pl.run_scoped(multiply, plgpu.ACC((64, 64), F32))
        plgpu.barrier_arrive(free)
        plgpu.barrier_wait(free)

    return plgpu.kernel(
        kernel,
        out(128, 128),
        cluster=(2, 2),
        cluster_names=("pair", "other"),
        scratch_shapes=[
            plgpu.SMEM((64, 64), F16, transforms=SWIZZLED),
            plgpu.SMEM((64, 64), F16, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=2),
            plgpu.ClusterBarrier(collective_axes=(axes,)),
        ],
    )(x, y)


def test_blocks_of_a_cluster_share_copies():
    x, y = operands((128, 64), (64, 128))
    want = x.astype(F32) @ y.astype(F32)
    np.testing.assert_allclose(clustered(x, y), want, rtol=1e-2, atol=5e-2)
    found = text(clustered, x, y)
    assert "__cluster_dims__(4, 1, 1)" in found and found.count("blocks_meet();") == 2
    # The blocks of a pair are two apart; the other axis is the digit after them.
    mask = found[found.index("copy_to_blocks_2(ring") :].partition(";")[0]
    assert "5 << (program1 * 1)" in mask, mask
    assert "arrive_at(barrier" in found


@needs_nvrtc
def test_clusters_are_compiled():
    (kernel,) = pl.lower(clustered)(*operands((128, 64), (64, 128))).kernels
    ptx = base.Compiled(base.get("cuda"), kernel, base.Options())["ptx"]
    assert ".reqnctapercluster 4, 1, 1" in ptx or ".explicitcluster" in ptx
    assert "multicast::cluster" in ptx


def test_clusters_that_chips_do_not_have_are_refused():
    kernel = plgpu.kernel(
        copy_kernel,
        out(8, 128),
        cluster=(16,),
        cluster_names=("pair",),
        scratch_shapes=[plgpu.SMEM((8, 128), F32), plgpu.Barrier()],
    )
    assert "a cluster of 16 blocks" in refused(kernel, *operands((8, 128), dtype=F32))


def test_chips_that_have_no_such_instructions(monkeypatch):
    monkeypatch.setattr(cuda, "_chip", lambda options: GPUS["a100"])
    function, args = product(64, 64, 64, F16)
    assert "the chip is sm_80" in refused(function, *args)


def test_more_shared_memory_than_there_is():
    x, y = operands((128, 192), (192, 128))
    with pytest.raises(ResourceError, match="needs 294912"):
        text(lambda x, y: ring(x, y, slots=9), x, y)


def test_the_backend_takes_them():
    text(ring, *operands((128, 192), (192, 128)))
    (kernel,) = pl.lower(ring)(*operands((128, 192), (192, 128))).kernels
    assert base.defaults("cuda", kernel)[0] == "cuda"


@needs_nvrtc
def test_tools_ask_the_backend_for_gpus_that_are_not_here():
    """Here such kernels run in checked mode, which nobody asked for."""
    args = operands((128, 192), (192, 128))
    report = pl.explain(ring, target="gpu:h200", measure=False)(*args)
    assert report.kernels[0].backend == "cuda"
