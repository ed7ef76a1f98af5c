"""Programs on several threads: the same results, messages and order as on one.

Small kernels are made to use threads by lowering the price of a thread to nothing; XLA
runs eight devices here (see `conftest.py`), and its pool has several threads.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.backends.cpu import llvm_text
from pallasite.passes.run import run as run_passes
from pallasite.sites import kernels_in
from pallasite.target import Host

ROWS = pl.BlockSpec((4, 32), lambda i: (i, 0))
PARALLEL = pltpu.CompilerParams(dimension_semantics=("parallel",))


@pytest.fixture
def eager_threads(monkeypatch):
    """Use threads however little there is to do."""
    monkeypatch.setattr(Host, "least_part_ns", 0)
    monkeypatch.setattr(Host, "least_chunk_ns", 0)


def llvm_of(function, *args) -> str:
    (kernel,) = kernels_in(function, *args)
    return llvm_text(run_passes(kernel))


def square(x_ref, o_ref):
    o_ref[...] = x_ref[...] * x_ref[...]


def squared(x):
    grid = (x.shape[0] // 4,)
    return pl.pallas_call(
        square, out_shape=x, grid=grid, in_specs=[ROWS], out_specs=ROWS, backend="cpu"
    )(x)


def sample(rows: int = 256):
    return np.random.default_rng(0).standard_normal((rows, 32), np.float32)


def test_equal_programs_are_claimed_in_order():
    assert "%stop = add i64 %first, %chunk" in llvm_of(squared, sample(65536))

    def skipping(x_ref, o_ref):
        # What is skipped is known only at run time: programs that a guard on their
        # number skips are not in the grid any more.
        @pl.when(x_ref[0, 0] > 0)
        def _():
            square(x_ref, o_ref)

    def some(x):
        grid = (x.shape[0] // 4,)
        return pl.pallas_call(
            skipping, out_shape=x, grid=grid, in_specs=[ROWS], out_specs=ROWS
        )(x)

    assert "%start = sub i64 %last, %chunk" in llvm_of(some, sample(65536))


# --- when threads are used ---


def test_small_work_stays_on_one_thread():
    assert "@run_job" not in llvm_of(squared, sample(64))


def test_large_work_is_shared():
    x = jax.ShapeDtypeStruct((1 << 16, 32), jnp.float32)
    assert "@run_job" in llvm_of(squared, x)


def test_axes_that_carry_are_not_shared(eager_threads):
    def total(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    call = pl.pallas_call(
        total,
        out_shape=jax.ShapeDtypeStruct((4, 32), jnp.float32),
        grid=64,
        in_specs=[ROWS],
        out_specs=pl.BlockSpec((4, 32), lambda i: (0, 0)),
        backend="cpu",
    )
    assert "@run_job" not in llvm_of(call, sample())


# --- results ---


def test_rows(eager_threads):
    x = sample()
    np.testing.assert_array_equal(jax.jit(squared)(x), x * x)


@pytest.mark.parametrize("order", ["psp", "spp", "pps", "sps", "pss"])
def test_sequential_axes_keep_their_order(eager_threads, order):
    """Each output is a polynomial of its inputs in order, so a changed order shows."""
    sizes = (5, 3, 4)
    parallel = [axis for axis, kind in enumerate(order) if kind == "p"]
    sequential = [axis for axis, kind in enumerate(order) if kind == "s"]

    def body(x_ref, o_ref):
        is_first = jnp.bool_(True)
        for axis in sequential:
            is_first &= pl.program_id(axis) == 0

        @pl.when(is_first)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] = o_ref[...] * 3 + x_ref[...]

    x = np.arange(60, dtype=np.int32).reshape(sizes)
    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct([sizes[a] for a in parallel], jnp.int32),
        grid=sizes,
        in_specs=[pl.BlockSpec((None,) * 3, lambda *ids: ids)],
        out_specs=pl.BlockSpec(
            (None,) * len(parallel), lambda *ids: tuple(ids[a] for a in parallel)
        ),
        backend="cpu",
    )
    assert "@run_job" in llvm_of(call, x)
    columns = x.transpose(*parallel, *sequential)
    columns = columns.reshape(*columns.shape[: len(parallel)], -1)
    want = np.zeros(columns.shape[:-1], np.int32)
    for n in range(columns.shape[-1]):
        want = want * 3 + columns[..., n]
    np.testing.assert_array_equal(call(x), want)


def test_each_thread_has_its_own_scratch(eager_threads):
    def running(x_ref, o_ref, sum_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += x_ref[...]
        o_ref[...] = sum_ref[...]

    spec = pl.BlockSpec((4, 8), lambda i, j: (i, j))
    x = sample(512)
    call = pl.pallas_call(
        running,
        out_shape=x,
        grid=(128, 4),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM((4, 8), jnp.float32)],
        backend="cpu",
    )
    assert "@run_job" in llvm_of(call, x)
    want = x.reshape(512, 4, 8).cumsum(1).reshape(512, 32)
    for _ in range(20):
        np.testing.assert_allclose(jax.jit(call)(x), want, rtol=1e-6)


def test_edge_blocks(eager_threads):
    x = sample(251)
    call = pl.pallas_call(
        square, out_shape=x, grid=63, in_specs=[ROWS], out_specs=ROWS, backend="cpu"
    )
    np.testing.assert_array_equal(call(x), x * x)


@pytest.mark.parametrize("block", [64, 70])
def test_programs_that_write_parts_of_one_block(eager_threads, block):
    """A block of 70 hangs over the edge of 64, so it is a copy that all would share."""

    def pick(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[i] = x_ref[i] * 2

    x = np.arange(64, dtype=np.float32)
    whole = pl.BlockSpec((block,), lambda i: (0,))
    call = pl.pallas_call(
        pick, out_shape=x, grid=64, in_specs=[whole], out_specs=whole, backend="cpu"
    )
    assert ("@run_job" in llvm_of(call, x)) == (block == 64)
    for _ in range(10):
        np.testing.assert_array_equal(jax.jit(call)(x), 2 * x)


@pytest.mark.parametrize("count", [0, 1, 7, 64])
def test_grid_size_known_only_at_run_time(eager_threads, count):
    x = sample(256)

    @jax.jit
    def some_squared(x, n):
        return pl.pallas_call(
            square,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(n,),
            in_specs=[ROWS],
            out_specs=ROWS,
            backend="cpu",
        )(x)

    got = some_squared(x, jnp.int32(count))[: 4 * count]
    np.testing.assert_array_equal(got, (x * x)[: 4 * count])


# --- atomics ---


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float32", "bfloat16", "float64"])
def test_atomic_add_loses_nothing(eager_threads, dtype):
    def count(x_ref, start_ref, o_ref):
        pl.atomic_add(o_ref, (x_ref[...],), jnp.ones(x_ref.shape, o_ref.dtype))

    with jax.enable_x64(True):
        ids = np.random.default_rng(0).integers(0, 3, (500, 16)).astype(np.int32)
        ids[:, 3:] = 3 + np.arange(13)  # every program meets the others here
        total = 100 if dtype == "bfloat16" else 500  # bf16 is exact up to 256
        ids = ids[:total]
        call = pl.pallas_call(
            count,
            out_shape=jax.ShapeDtypeStruct((16,), dtype),
            grid=total,
            in_specs=[
                pl.BlockSpec((None, 16), lambda i: (i, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((16,), lambda i: (0,)),
            input_output_aliases={1: 0},
            compiler_params=PARALLEL,
            backend="cpu",
        )
        start = jnp.zeros(16, dtype)
        assert " acq_rel monotonic" in llvm_of(call, ids, start)
        want = np.bincount(ids.ravel(), minlength=16).astype(jnp.dtype(dtype))
        for _ in range(5):
            np.testing.assert_array_equal(np.asarray(call(ids, start)), want)


def test_updates_of_what_programs_do_not_share_are_plain(eager_threads):
    """Each program has a block of columns and scratch of its own."""

    def add(ids_ref, x_ref, o_ref, own_ref):
        own_ref[...] = jnp.zeros_like(own_ref)
        o_ref[...] = jnp.zeros_like(o_ref)
        pl.atomic_add(own_ref, (ids_ref[...], slice(None)), x_ref[...])
        pl.atomic_add(o_ref, (ids_ref[...], slice(None)), x_ref[...])
        o_ref[...] += own_ref[...]

    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, 30).astype(np.int32)
    x = rng.integers(0, 9, (30, 40 * 64)).astype(np.float32)
    call = pl.pallas_call(
        add,
        out_shape=jax.ShapeDtypeStruct((5, x.shape[1]), x.dtype),
        grid=40,
        in_specs=[
            pl.BlockSpec((30,), lambda i: (0,)),
            pl.BlockSpec((30, 64), lambda i: (0, i)),
        ],
        out_specs=pl.BlockSpec((5, 64), lambda i: (0, i)),
        scratch_shapes=[pltpu.VMEM((5, 64), x.dtype)],
        compiler_params=PARALLEL,
        backend="cpu",
    )
    assert "load atomic i32" not in llvm_of(call, ids, x)
    want = np.zeros((5, x.shape[1]), x.dtype)
    np.add.at(want, ids, 2 * x)
    np.testing.assert_array_equal(np.asarray(call(ids, x)), want)


def test_atomic_max_and_exchange(eager_threads):
    def extremes(x_ref, start_ref, o_ref):
        pl.atomic_max(o_ref, (0,), x_ref[0])
        pl.atomic_min(o_ref, (1,), x_ref[0])

    x = np.random.default_rng(1).standard_normal(400).astype(np.float32)
    got = pl.pallas_call(
        extremes,
        out_shape=jax.ShapeDtypeStruct((2,), jnp.float32),
        grid=400,
        in_specs=[
            pl.BlockSpec((1,), lambda i: (i,)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec((2,), lambda i: (0,)),
        input_output_aliases={1: 0},
        compiler_params=PARALLEL,
        backend="cpu",
    )(x, jnp.zeros(2))
    np.testing.assert_array_equal(got, [x.max(), x.min()])


# --- failures ---


def test_failed_check_on_any_thread_is_reported(eager_threads):
    def picky(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        pl.debug_check(x_ref[0, 0] < 200, "row too large")

    x = np.repeat(np.arange(256, dtype=np.float32)[:, None], 32, 1)
    call = jax.jit(
        pl.pallas_call(
            picky, out_shape=x, grid=64, in_specs=[ROWS], out_specs=ROWS, backend="cpu"
        )
    )
    for _ in range(10):
        with pytest.raises(Exception, match="row too large"):
            jax.block_until_ready(call(x))
    small = np.minimum(x, 100)
    np.testing.assert_array_equal(call(small), small)


# --- together with others ---


def test_shard_map_over_eight_devices(eager_threads):
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",), axis_types=(AxisType.Auto,))
    x = sample(2048)

    def step(v):
        v = squared(v)
        return v / (1 + jax.lax.psum(jnp.abs(v).max(), "d"))

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    got = want = x
    for _ in range(100):
        # XLA's own collectives time out where steps are dispatched without waiting.
        got = jax.block_until_ready(mapped(got))
        want = want * want
        parts = np.abs(want.reshape(8, -1)).max(1)
        want = want / (1 + parts.sum())
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)


def test_calls_from_many_python_threads(eager_threads):
    call = jax.jit(squared)
    inputs = [sample() + n for n in range(6)]
    call(inputs[0])
    wrong = []

    def use(x):
        results = [call(x) for _ in range(100)]  # dispatched without waiting
        for result in results:
            if not np.array_equal(result, x * x):
                wrong.append(x)

    users = [threading.Thread(target=use, args=(x,)) for x in inputs]
    for user in users:
        user.start()
    for user in users:
        user.join(timeout=120)
    assert not wrong and not any(user.is_alive() for user in users)


def test_loops_inside_jit(eager_threads):
    @jax.jit
    def many(x):
        once = lambda _, v: jnp.sqrt(squared(v))
        twice = lambda _, v: jax.lax.fori_loop(0, 20, once, v)
        return jax.lax.fori_loop(0, 20, twice, x)

    x = np.abs(sample())
    np.testing.assert_allclose(many(x), x, rtol=1e-4)
