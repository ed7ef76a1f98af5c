"""Upstream's GPU kernels between devices, unmodified: on host devices in checked mode,
and as CUDA C++, with all devices as peers in one launch, which a CPU runs."""

import shutil
import textwrap
from collections.abc import Callable

import pytest

from tests.upstream.test_mosaic_gpu import START

pytest.importorskip("jax.experimental.pallas.ops")

FLAGS = (
    "--xla_force_host_platform_device_count={devices} "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)
OVER = """
    stub("jax.experimental.multihost_utils")
    P, size = jax.sharding.PartitionSpec, jax.device_count()
    mesh = jax.sharding.Mesh(jax.devices(), ["x"])
    jax.devices = lambda *_: [types.SimpleNamespace(core_count=1)]  # of a GPU

    def over(function, *specs, out):
        options = dict(in_specs=specs, out_specs=out, check_vma=False)
        return jax.jit(jax.shard_map(function, mesh=mesh, **options))
"""
GATHER_AND_SCATTER = """
    m = load("all_gather_mgpu")
    for dtype, dim in ((jnp.float16, 0), (jnp.float32, 1)):
        x = normal(*((size * 16, 64) if dim == 0 else (64, size * 16))).astype(dtype)
        own = P("x") if dim == 0 else P(None, "x")
        options = dict(axis_name="x", gather_dimension=dim, num_blocks=2, tile_size=512)
        got = over(lambda x: m.all_gather(x, **options), own, out=P("x"))(x)
        np.testing.assert_array_equal(got, jnp.tile(x, (size, 1)))

    m = load("reduce_scatter_mgpu")
    rows = size * 32
    for dtype, name in ((jnp.float16, "add"), (jnp.int32, "max"), (jnp.float32, "add")):
        x = (normal(size * rows, 32) * 20).astype(dtype)
        options = dict(axis_name="x", reduction=name, num_blocks=2, tile_size=512)
        got = over(lambda x: m.reduce_scatter(x, **options), P("x"), out=P("x"))(x)
        parts = x.astype(jnp.float32).reshape(size, rows, 32)
        close(got, dict(add=jnp.sum, max=jnp.max)[name](parts, axis=0), 1e-1)
    x = normal(size * 64, 32)
    options = dict(axis_name="x", scatter_dimension=None, num_blocks=2, tile_size=512)
    got = over(lambda x: m.reduce_scatter(x, **options), P("x"), out=P("x"))(x)
    close(got, jnp.tile(x.reshape(size, 64, 32).sum(0), (size, 1)), 1e-1)
"""
MATMUL = """
    h = load("hopper_matmul_mgpu")
    sys.modules["jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu"] = h
    m = load("collective_matmul_mgpu")
    a, b = normal(size * 64, 64), normal(64, size * 128)
    blocks = dict(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
    config = m.TuningConfig(**blocks, wg_dimension=m.MatmulDimension.N)
    f = lambda a, b: m.all_gather_lhs_matmul(a, b, "x", config=config)
    got = over(f, P("x"), P(None, "x"), out=P(None, "x"))(a, b)
    close(got, a.astype(jnp.float32) @ b.astype(jnp.float32), 5e-2)
"""
# `peers(function, specs, out, *arrays)`: each device's results, by the emitted text.
AS_PEERS = """
    import pathlib, tempfile
    import pallasite as pl
    from tests.backends.cuda import host

    def part(x, spec, n):
        axes = [k for k, name in enumerate(spec) if name is not None]
        return np.split(np.asarray(x), size, axes[0])[n]

    def peers(function, specs, out, *arrays):
        how = dict(in_specs=specs, out_specs=out, check_vma=False)
        call = jax.shard_map(function, mesh=mesh, **how)
        (kernel,) = pl.lower(call)(*arrays).kernels
        given = []
        for n in range(size):
            own = [part(x, spec, n) for x, spec in zip(arrays, specs, strict=True)]
            own += [np.int32(n)] * (len(kernel.inputs) - len(own))  # axis_index
            given.append([np.ascontiguousarray(x) for x in own])
            types = [p.ref for p in kernel.inputs]
            given[-1] = [x.reshape(t.shape) for x, t in zip(given[-1], types)]
        with tempfile.TemporaryDirectory() as folder:
            code = host.Code(kernel, pathlib.Path(folder))
            for timing in host.TIMINGS:
                yield [found[0] for found in code.on_devices(*given, timing=timing)]
"""
PEERS_GATHER_AND_SCATTER = """
    m = load("all_gather_mgpu")
    for dtype, dim in ((jnp.float16, 0), (jnp.float32, 1)):
        x = normal(*((size * 16, 64) if dim == 0 else (64, size * 16))).astype(dtype)
        own = P("x") if dim == 0 else P(None, "x")
        options = dict(axis_name="x", gather_dimension=dim, num_blocks=2, tile_size=512)
        for got in peers(lambda x: m.all_gather(x, **options), (own,), P("x"), x):
            for each in got:
                np.testing.assert_array_equal(each.reshape(x.shape), x)

    m = load("reduce_scatter_mgpu")
    rows = size * 32
    for dtype, name in ((jnp.float16, "add"), (jnp.int32, "max")):
        x = (normal(size * rows, 32) * 20).astype(dtype)
        options = dict(axis_name="x", reduction=name, num_blocks=2, tile_size=512)
        parts = np.asarray(x, np.float32).reshape(size, rows, 32)
        want = dict(add=np.sum, max=np.max)[name](parts, axis=0)
        along = P("x")
        for got in peers(lambda x: m.reduce_scatter(x, **options), (along,), along, x):
            close(np.concatenate(got).reshape(want.shape), want, 1e-1)
"""
PEERS_MATMUL = """
    h = load("hopper_matmul_mgpu")
    sys.modules["jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu"] = h
    m = load("collective_matmul_mgpu")
    a, b = normal(size * 64, 64), normal(64, size * 128)
    blocks = dict(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
    config = m.TuningConfig(**blocks, wg_dimension=m.MatmulDimension.N)
    f = lambda a, b: m.all_gather_lhs_matmul(a, b, "x", config=config)
    want = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    specs = P("x"), P(None, "x")
    for got in peers(f, specs, P(None, "x"), a, b):
        close(np.concatenate(got, axis=1), want, 5e-2)
"""


def run(devices: int, code: str, run_python: Callable[..., str]) -> None:
    # Threads for callbacks, besides those in which devices wait for each other.
    flags = dict(XLA_FLAGS=FLAGS.format(devices=devices), NPROC="32")
    flags = f"import os; os.environ.update({flags!r})"
    text = "".join(map(textwrap.dedent, (START, OVER, code)))
    run_python("-c", f"{flags}\n{text}")


@pytest.mark.parametrize("devices", (2, 4, 8))
def test_all_gather_and_reduce_scatter(devices, run_python):
    run(devices, GATHER_AND_SCATTER, run_python)


@pytest.mark.parametrize("devices", (2, 4, 8))
def test_collective_matmul(devices, run_python):
    run(devices, MATMUL, run_python)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("devices", (2, 4))
@pytest.mark.parametrize(
    "code", (PEERS_GATHER_AND_SCATTER, PEERS_MATMUL), ids=("gather, scatter", "matmul")
)
def test_their_text_runs_with_devices_as_peers(devices, code, run_python):
    run(devices, AS_PEERS + code, run_python)
