"""Upstream's GPU kernels between devices, unmodified, over host devices."""

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
