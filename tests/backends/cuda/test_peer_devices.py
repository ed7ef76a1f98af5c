"""Kernels that reach other devices, as CUDA C++: their text runs on a CPU with several
devices as peers in one launch, and compiles; XLA has no launch for it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite import tpu as pltpu
from pallasite.backends import base
from pallasite.errors import UnsupportedError
from pallasite.target import GPUS
from tests.backends.cuda import host
from tests.backends.cuda.test_plgpu import needs_compiler, needs_nvrtc

F32, P = jnp.float32, jax.sharding.PartitionSpec
S = jax.ShapeDtypeStruct
REGULAR = plgpu.SemaphoreType.REGULAR
SIZES = pytest.mark.parametrize("size", [2, 4])
ROWS, COLUMNS = 8, 32


def over(function, size):
    """The function over an abstract mesh: nothing runs on it."""
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((size,), ("x",), axis_types=kinds)
    how = dict(mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.shard_map(function, **how)


def lowered(function, size, *shape):
    x = S((size * shape[0], *shape[1:]), F32)
    (found,) = pl.lower(over(functools.partial(function, size=size), size))(x).kernels
    return found


def compiled(kernel, chip="h100"):
    return base.Compiled(host.BACKEND, kernel, base.Options(chip=GPUS[chip]))


def operand(*shape):
    return np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)


def run(function, size, folder, *shape, seed=0, timing="late products"):
    """Each device's result, from what each device has."""
    x = operand(size, *shape)
    kernel = lowered(function, size, *shape)
    code = host.Code(kernel, folder)
    # `lax.axis_index` is an operand, too, of calls that have no other way to know it.
    given = [[x[n], np.int32(n)][: len(kernel.inputs)] for n in range(size)]
    found = code.on_devices(*given, seed=seed, timing=timing)
    return x, [results[0] for results in found]


def leave(done, size):
    plgpu.semaphore_signal_multicast(done, collective_axes="x")
    pl.semaphore_wait(done, size)


def gather(x, size):
    """Each device stores its part to all."""

    def kernel(x, o, done):
        part = pl.ds(lax.axis_index("x") * ROWS, ROWS)
        plgpu.multimem_store(x[...], o.at[part], "x")
        leave(done, size)

    out = S((size * ROWS, COLUMNS), F32)
    return plgpu.kernel(kernel, out, scratch_shapes=[REGULAR])(x)


def scatter(x, size):
    """Each device adds up its part of what all have."""

    def kernel(x, o, done):
        part = x.at[pl.ds(lax.axis_index("x") * ROWS, ROWS)]
        how = dict(collective_axes="x", reduction_op="add")
        o[...] = plgpu.multimem_load_reduce(part, **how)
        leave(done, size)

    return plgpu.kernel(kernel, S((ROWS, COLUMNS), F32), scratch_shapes=[REGULAR])(x)


def ring(x, size):
    """Parts go round, each from a device to the next, through slots of the result."""

    def kernel(x, o, come, done):
        me = lax.axis_index("x")
        after = lax.rem(me + 1, size)
        o[me] = x[...]

        def step(n, _):
            slot = lax.rem(me + size - n, size)
            plgpu.remote_ref(o, {"x": after})[slot] = o[slot]
            pl.semaphore_signal(come, device_id={"x": after})
            pl.semaphore_wait(come)
            return 0

        lax.fori_loop(0, size - 1, step, 0)
        leave(done, size)

    out = S((size, ROWS, COLUMNS), F32)
    return plgpu.kernel(kernel, out, scratch_shapes=[REGULAR, REGULAR])(x)


def engine(x, size):
    """The copy engine brings each part to the next device; two blocks each."""

    def kernel(x, o, buffer, come):
        me, i = lax.axis_index("x"), lax.axis_index("i")
        after, half = lax.rem(me + 1, size), ROWS // 2
        rows = pl.ds(i * half, half)
        buffer[...] = x[rows] * 2
        plgpu.commit_smem()
        there = plgpu.remote_ref(o, {"x": after})
        plgpu.copy_smem_to_gmem(buffer, there.at[rows])
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(come, device_id={"x": after})
        pl.semaphore_wait(come)

    scratch = [plgpu.SMEM((ROWS // 2, COLUMNS), F32), REGULAR]
    out = S((ROWS, COLUMNS), F32)
    how = dict(grid=(2,), grid_names=("i",), scratch_shapes=scratch)
    return plgpu.kernel(kernel, out, **how)(x)


def barrier(x, size):
    """All blocks of all devices, by one semaphore of each device."""

    def kernel(x, o):
        sem, me, i = pl.get_global(REGULAR), lax.axis_index("x"), lax.axis_index("i")
        for other in range(size):
            plgpu.remote_ref(o, {"x": other})[me, i] = x[i] + me
        plgpu.semaphore_signal_multicast(sem, collective_axes="x")
        pl.semaphore_wait(sem, 3 * size, decrement=False)

    out = S((size, 3, COLUMNS), F32)
    return plgpu.kernel(kernel, out, grid=(3,), grid_names=("i",))(x)


CASES = {
    "gather": (gather, (ROWS, COLUMNS)),
    "scatter": (scatter, None),
    "ring": (ring, (ROWS, COLUMNS)),
    "engine": (engine, (ROWS, COLUMNS)),
    "barrier": (barrier, (3, COLUMNS)),
}


def shape_of(name, size):
    return CASES[name][1] or (size * ROWS, COLUMNS)


def expected(name, x, size):
    """What each device has at the end."""
    if name == "scatter":
        return np.split(x.sum(axis=0), size)
    if name == "engine":
        return 2 * np.roll(x, 1, axis=0)
    if name == "barrier":
        return [x + np.arange(size).reshape(-1, 1, 1)] * size
    return [x.reshape(-1, COLUMNS) if name == "gather" else x] * size


@needs_compiler
@SIZES
@pytest.mark.parametrize("timing", [*host.TIMINGS])
@pytest.mark.parametrize("name", CASES)
def test_devices_are_peers_in_one_launch(name, timing, size, tmp_path):
    function, shape = CASES[name][0], shape_of(name, size)
    x, got = run(function, size, tmp_path, *shape, timing=timing, seed=size)
    for mine, want in zip(got, expected(name, x, size), strict=True):
        np.testing.assert_array_equal(mine, want)


@SIZES
@pytest.mark.parametrize("name", CASES)
def test_the_evaluator_says_the_same(name, size):
    """On host devices: the meaning that the text has to have."""
    if jax.device_count() < size:
        pytest.skip(f"needs {size} devices")
    function, shape = CASES[name][0], shape_of(name, size)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:size]), ("x",))
    how = dict(mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    call = jax.jit(jax.shard_map(functools.partial(function, size=size), **how))
    x = operand(size, *shape)
    got = np.asarray(call(x.reshape(-1, *shape[1:])))
    want = np.concatenate([np.asarray(w) for w in expected(name, x, size)])
    np.testing.assert_array_equal(got, want.reshape(got.shape))


@needs_compiler
def test_a_signal_that_stays_here_is_found(tmp_path):
    kernel = lowered(one_way, 2, ROWS, COLUMNS)
    signal = re.compile(r"(semaphore_signal\(on_device\(\w+, own, )\w+")
    edit = lambda text: signal.sub(r"\1own", text)
    x = operand(2, ROWS, COLUMNS)
    given = [[x[n], np.int32(n)][: len(kernel.inputs)] for n in range(2)]
    for each, name in ((str, "right"), (edit, "wrong")):
        (tmp_path / name).mkdir()
        code = host.Code(kernel, tmp_path / name, edit=each)
        if each is str:
            np.testing.assert_array_equal(code.on_devices(*given), x[:, None])
            continue
        with pytest.raises(AssertionError, match="wait for each other"):
            code.on_devices(*given)


def one_way(x, size):
    """The first device lets the second go on."""

    def kernel(x, o, come):
        me = lax.axis_index("x")

        @pl.when(me == 0)
        def _():
            pl.semaphore_signal(come, device_id={"x": 1})

        @pl.when(me == 1)
        def _():
            pl.semaphore_wait(come)

        o[...] = x[...]

    return plgpu.kernel(kernel, S((ROWS, COLUMNS), F32), scratch_shapes=[REGULAR])(x)


@needs_nvrtc
@pytest.mark.parametrize("name", CASES)
def test_text_compiles(name):
    made = compiled(lowered(CASES[name][0], 4, *shape_of(name, 4)))
    text = made["cuda"]
    assert "const u64* peers" in text and ".entry" in made["ptx"]
    assert "red.release.sys" in made["ptx"] and ".gpu." not in made["ptx"]
    if "Used" in made["ptxas"]:
        assert " 0 bytes spill stores" in made["ptxas"]


def test_xla_has_no_launch_for_it():
    found = compiled(lowered(gather, 2, ROWS, COLUMNS))
    with pytest.raises(UnsupportedError, match="cannot launch a kernel that reaches"):
        host.BACKEND.launch(found)


def test_how_many_devices_there_are_has_to_be_known():
    def kernel(x, o, done):
        pl.semaphore_signal(
            done, 1, device_id=0, device_id_type=pltpu.DeviceIdType.LOGICAL
        )
        o[...] = x[...]

    x = jnp.zeros((ROWS, COLUMNS), F32)
    (found,) = pl.lower(plgpu.kernel(kernel, x, scratch_shapes=[REGULAR]))(x).kernels
    with pytest.raises(UnsupportedError, match="number of devices is not known"):
        compiled(found)["cuda"]
