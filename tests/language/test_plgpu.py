"""`plgpu` kernels in checked mode: right ones, wrong ones, and what is refused."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import (
    CheckError,
    KernelTypeError,
    PallasError,
    SpecError,
    UnsupportedError,
)
from tests.xla import put

F16, F32 = jnp.float16, jnp.float32
M = N = 32
K, BLOCK = 64, 16


def operands(*shapes, dtype=F32):
    rng = np.random.default_rng(0)
    return [put(rng.normal(size=s), dtype) for s in shapes]


def out(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def line_of(function, mark: str) -> str:
    lines, first = inspect.getsourcelines(function)
    (line,) = [first + n for n, text in enumerate(lines) if f"# {mark}" in text]
    return f"{__file__.rsplit('/', 1)[1]}:{line}"


# --- a ring that one warpgroup fills and another empties ---


def ring(wrong=""):
    """A matmul; `wrong` leaves something out."""

    def kernel(x, y, o, a, b, sums, full, empty):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, K // BLOCK)
            def step(i):
                s, part = lax.rem(i, 2), pl.ds(i * BLOCK, BLOCK)
                if wrong != "refill":

                    @pl.when(i >= 2)
                    def _():
                        plgpu.barrier_wait(empty.at[s])  # empty

                plgpu.copy_gmem_to_smem(x.at[:, part], a.at[s], full.at[s])  # load
                if wrong != "bytes":
                    plgpu.copy_gmem_to_smem(y.at[part], b.at[s], full.at[s])

        @pl.when(wg == 1)
        def compute():
            def multiply(acc):
                @pl.loop(0, K // BLOCK)
                def step(i):
                    s = lax.rem(i, 2)
                    if wrong != "full":
                        plgpu.barrier_wait(full.at[s])  # full
                    plgpu.wgmma(acc, a.at[s], b.at[s])  # wgmma
                    plgpu.wgmma_wait(1 if wrong == "wait" else 0)
                    if wrong == "once":
                        pl.when(i == 0)(lambda: plgpu.barrier_arrive(empty.at[s]))
                    elif wrong != "arrive":
                        plgpu.barrier_arrive(empty.at[s])

                return acc[...]

            sums[...] = pl.run_scoped(multiply, plgpu.ACC((M, N), F32))  # sums
            if wrong != "fence":
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sums, o)  # store
            if wrong != "store":
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return kernel


def run_ring(wrong="", **options):
    x, y = operands((M, K), (K, N))
    tiled = lambda n: (plgpu.TilingTransform((8, n)), plgpu.SwizzleTransform(4 * n))
    kernel = ring(wrong)
    got = plgpu.kernel(
        kernel,
        out_type=out(M, N),
        scratch_types=[
            plgpu.SMEM((2, M, BLOCK), F32, transforms=tiled(BLOCK)),
            plgpu.SMEM((2, BLOCK, N), F32, transforms=tiled(N)),
            plgpu.SMEM((M, N), F32),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        num_threads=2,
        thread_name="wg",
        **options,
    )(x, y)
    return got, x @ y, kernel


def test_a_ring_is_right():
    got, want, _ = run_ring()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wrong, message, mark",
    [
        ("refill", "of a wgmma is written|data race", "load"),
        ("bytes", "phase", "full"),
        ("full", "destination of a copy is read|data race|phase", "wgmma"),
        ("wait", "of a wgmma is written|data race", "load"),
        ("arrive", "a barrier that nothing in it arrives at", "empty"),
        ("once", "deadlock", "full"),
        ("fence", "without a fence in between", "store"),
        ("store", "still in flight|never waited for", "store"),
    ],
)
def test_what_is_left_out_is_found(wrong, message, mark):
    with pytest.raises((CheckError, KernelTypeError)) as raised:
        run_ring(wrong)
    text = str(raised.value)
    assert any(part in text for part in message.split("|")), text
    assert line_of(ring, mark) in text, text
    assert "unnamed" not in text, text


# --- a register operand, a transposed one, sums that start at a value ---


def test_attention_of_one_block():
    q, k, v = operands((64, 32), (64, 32), (64, 32))

    def kernel(q_ref, k_ref, v_ref, o_ref, qs, ks, vs, barrier):
        for source, target in ((q_ref, qs), (k_ref, ks), (v_ref, vs)):
            plgpu.copy_gmem_to_smem(source, target, barrier)
        plgpu.barrier_wait(barrier)

        def scores(acc):
            plgpu.wgmma(acc, qs, plgpu.transpose_ref(ks, (1, 0)))
            return acc[...]

        p = jnp.tanh(pl.run_scoped(scores, plgpu.ACC((64, 64), F32)))
        start = plgpu.layout_cast(jnp.ones((64, 32), F32), plgpu.Layout.WGMMA)
        add = lambda acc: plgpu.wgmma(acc, p, vs)
        o_ref[...] = pl.run_state(add)(plgpu.ACC.init(start))

    got = plgpu.kernel(
        kernel,
        out_shape=out(64, 32),
        scratch_shapes=[plgpu.SMEM((64, 32), F32)] * 3
        + [plgpu.Barrier(num_arrivals=3)],
    )(q, k, v)
    want = 1 + jnp.tanh(q @ k.T) @ v
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


# --- pipelines ---


@pytest.mark.parametrize(
    "slots, delay, waits", [(1, 0, True), (2, 0, True), (3, 1, True), (3, 1, False)]
)
def test_emit_pipeline_multiplies(slots, delay, waits):
    """With a delayed release the pipeline waits for the product that had the slot."""
    x, y = operands((64, K), (K, 64))

    def kernel(x_ref, y_ref, o_ref, sums):
        i = lax.axis_index("m")
        rows = pl.ds(i * 32, 32)

        def scoped(acc):
            def step(indices, a, b):
                plgpu.wgmma(acc, a, b)
                if waits:
                    plgpu.wgmma_wait(delay)

            spec = lambda *a: plgpu.BlockSpec(*a, delay_release=delay)
            plgpu.emit_pipeline(
                step,
                grid=(K // BLOCK,),
                in_specs=[
                    spec((32, BLOCK), lambda k: (0, k)),
                    spec((BLOCK, 64), lambda k: (k, 0)),
                ],
                max_concurrent_steps=slots,
            )(x_ref.at[rows], y_ref)
            return acc[...]

        sums[...] = pl.run_scoped(scoped, plgpu.ACC((32, 64), F32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums, o_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    got = plgpu.kernel(
        kernel,
        out_shape=out(64, 64),
        grid=(2,),
        grid_names=("m",),
        scratch_shapes=dict(sums=plgpu.SMEM((32, 64), F32)),
    )(x, y)
    np.testing.assert_allclose(got, x @ y, rtol=1e-4, atol=1e-4)


def test_emit_pipeline_with_outputs_and_a_carry():
    (x,) = operands((64, 32))

    def kernel(x_ref, o_ref, total_ref):
        def step(indices, a, o, carry):
            o[...] = a[...] * 2
            return carry + jnp.sum(a[...])

        rows = plgpu.BlockSpec((16, 32), lambda i: (i, 0))
        total_ref[0] = plgpu.emit_pipeline(
            step,
            grid=(4,),
            in_specs=[rows],
            out_specs=[rows],
            max_concurrent_steps=2,
            init_carry=jnp.float32(0),
        )(x_ref, o_ref)

    got, total = plgpu.kernel(kernel, out_shape=[out(64, 32), out(1)])(x)
    np.testing.assert_allclose(got, x * 2)
    np.testing.assert_allclose(total[0], x.sum(), rtol=1e-4)


def test_a_pipeline_of_roles_with_outputs():
    (x,) = operands((64, 32))

    def kernel(x_ref, o_ref):
        def step(indices, a, o):
            half = pl.ds(lax.axis_index("wg") * 8, 8)
            o[half] = a[half] + 1

        rows = plgpu.BlockSpec((16, 32), lambda i: (i, 0))
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(4,),
            memory_registers=40,
            in_specs=[rows],
            out_specs=[rows],
            wg_axis="wg",
            num_compute_wgs=2,
        )(x_ref, o_ref)

    got = plgpu.kernel(kernel, out_shape=out(64, 32), num_threads=3, thread_name="wg")(
        x
    )
    np.testing.assert_allclose(got, x + 1)


@pytest.mark.parametrize("minor, width", [(0, 1), (1, 1), (0, 2), (1, 3)])
def test_planar_snake_visits_each_place_once(minor, width):
    places = [plgpu.planar_snake(jnp.int32(n), (5, 4), minor, width) for n in range(20)]
    places = [(int(i), int(j)) for i, j in places]
    assert sorted(places) == [(i, j) for i in range(5) for j in range(4)]


def test_nd_loop_shares_the_work():
    def kernel(o_ref):
        @plgpu.nd_loop((3, 5), collective_axes="block")
        def _(info):
            i, j = info.index
            o_ref[i, j] = i * 5 + j

    got = plgpu.kernel(
        kernel,
        out_shape=out(3, 5, dtype=jnp.int32),
        grid=(2,),
        grid_names=("block",),
    )()
    np.testing.assert_array_equal(got, np.arange(15).reshape(3, 5))


# --- refusals ---


def call(body, *args, **options):
    options = {"out_shape": out(8, 8), **options}
    return plgpu.kernel(body, **options)(*args)


@pytest.mark.parametrize(
    "body, error, message",
    [
        (lambda o: plgpu.barrier_wait(o), KernelTypeError, "expected a single barrier"),
        (lambda o: plgpu.wgmma(o, o, o), KernelTypeError, "needs an accumulator"),
        (lambda o: plgpu.wgmma(o, o, o[...]), KernelTypeError, "in shared memory"),
        (lambda o: plgpu.inline_mgpu()(print)(), NotImplementedError, "inline_mgpu"),
        (lambda o: plgpu.remote_ref(o, 1), KernelTypeError, "needs a mesh of devices"),
        (lambda o: plgpu.multimem_store(o[...], o, "x"), SpecError, "is not an axis"),
        (lambda o: plgpu.copy_smem_to_gmem(o, o, reduction_op="add"),
         UnsupportedError, "reduction_op"),
        (lambda o: plgpu.set_max_registers(40, action="more"), SpecError, "increase"),
    ],
)  # fmt: skip
def test_refusals_say_what_is_wrong(body, error, message):
    with pytest.raises((error, PallasError), match=message):
        call(body)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(grid=(2,)), "same length"),
        (dict(num_threads=2), "must be given together"),
        (dict(devices=(0,)), "devices="),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(PallasError, match=message):
        call(lambda o: None, **options)


def test_one_warpgroup_runs_in_the_emulation():
    x, y = operands((32, 32), (32, 32))

    def kernel(x_ref, y_ref, o_ref, a, b, barrier):
        plgpu.copy_gmem_to_smem(x_ref, a, barrier)
        plgpu.copy_gmem_to_smem(y_ref, b, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        o_ref[...] = pl.run_scoped(multiply, plgpu.ACC((32, 32), F32))

    memory = [plgpu.SMEM((32, 32), F32)] * 2 + [plgpu.Barrier(num_arrivals=2)]
    got = call(
        kernel, x, y, out_shape=out(32, 32), scratch_shapes=memory, interpret=True
    )
    np.testing.assert_allclose(got, x @ y, rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedError, match="does not support 'roles'"):
        run_ring(interpret=True)


def test_parameters_that_do_not_fit():
    with pytest.raises(KernelTypeError, match="2 refs for 3 parameters"):
        call(lambda x, y, o: None, jnp.ones((8, 8)))
