"""Upstream's own kernels for Hopper and Blackwell on small shapes: in checked mode,
and as CUDA C++.

They run as installed with JAX, under `pallasite.install()`. What they import besides
(a profiler, test helpers) is left out: it needs a GPU or packages that are not here.
"""

import json
import shutil
import textwrap
from collections.abc import Callable

import pytest

from pallasite.backends.cuda import nvrtc
from tests.share import share_of

pytest.importorskip("jax.experimental.pallas.ops")

START = """
    import importlib.util, pathlib, sys, types
    import jax, jax.numpy as jnp, numpy as np
    import jax._src
    import pallasite

    def stub(name, **attributes):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        return module

    jax._src.test_util = stub("jax._src.test_util")
    profiler = stub("jax.experimental.mosaic.gpu.profiler")
    stub("jax.experimental.mosaic.gpu", profiler=profiler)
    stub("jax.experimental.mosaic")
    pallasite.install()

    def load(name):
        folder = pathlib.Path(jax.__file__).parent / "experimental/pallas/ops/gpu"
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float16)

    def close(got, want, atol):
        got, want = (np.asarray(a, np.float32) for a in (got, want))
        np.testing.assert_allclose(got, want, atol=atol, rtol=1e-2)
"""

MATMUL = """
    m = load("hopper_matmul_mgpu")
    m.get_num_sms = lambda: 2
    a, b, c = normal(256, 192), normal(192, 256), normal(256, 256)
    want = a.astype(jnp.float32) @ b.astype(jnp.float32)
    options = dict(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
    for more in (
        dict(epi_tile_n=32),
        dict(wg_dimension=m.MatmulDimension.M, grid_tile_width=2),
        dict(cluster_dimension=m.MatmulDimension.M),
    ):
        config = m.TuningConfig(**options, **more)
        close(m.matmul(a, b, None, config), want, 5e-2)
    close(m.matmul(a, b, c, config), want + c, 5e-2)
"""

ATTENTION = """
    m = load("attention_mgpu")
    version = lambda: 13000
    m.cuda_versions = types.SimpleNamespace(cuda_runtime_get_version=version)
    q, k, v = (normal(1, 256, 2, 64) for _ in range(3))
    for causal in (False, True):
        config = m.TuningConfig(64, 64, 2, causal=causal)
        want = m.attention_reference(q, k, v, causal=causal)
        close(m.attention(q, k, v, config), want, 5e-3)
    config = m.TuningConfig(64, 64, 2)
    want = m.attention_reference(q, k, v)
    close(m.attention_with_pipeline_emitter(q, k, v, config), want, 5e-3)
"""

BACKWARD = """
    m = load("attention_mgpu")
    m.cuda_versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: 13000)
    q, k, v = (normal(1, 128, 1, 64) for _ in range(3))
    blocks = dict(block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)
    config = m.TuningConfig(64, 64, 2, **blocks)
    loss = lambda f: lambda *a: f(*a).astype(jnp.float32).sum()
    got = jax.grad(loss(lambda *a: m.attention(*a, config)), (0, 1, 2))(q, k, v)
    want = jax.grad(loss(m.attention_reference), (0, 1, 2))(q, k, v)
    for one, other in zip(got, want, strict=True):
        close(one, other, 5e-2)
"""

RAGGED = """
    m = load("ragged_dot_mgpu")
    lhs, rhs = normal(256, 64), normal(2, 64, 128)
    sizes = jnp.asarray([100, 156], jnp.int32)
    blocks = dict(block_m=64, block_n=64, block_k=64, grid_block_n=1)
    got = m.ragged_dot(lhs, rhs, group_sizes=sizes, max_concurrent_steps=2, **blocks)
    close(got, jax.lax.ragged_dot(lhs, rhs, sizes), 5e-2)
"""

TRANSPOSED_RAGGED = """
    m = load("transposed_ragged_dot_mgpu")
    lhs, rhs = normal(320, 64), normal(320, 64)
    sizes = jnp.asarray([50, 78, 100, 92], jnp.int32)
    want = m.ref_transposed_ragged_dot(lhs, rhs, sizes)
    jax.devices = lambda: [types.SimpleNamespace(core_count=2)]
    blocks = dict(block_m=64, block_n=64, block_k=64, grid_block_n=1)
    run = m.transposed_ragged_dot
    got = run(lhs, rhs, group_sizes=sizes, max_concurrent_steps=2, **blocks)
    close(got, want, 5e-2)
"""

MIXED = """
    m = load("hopper_mixed_type_matmul_mgpu")
    device = types.SimpleNamespace(core_count=2)
    m.backend = types.SimpleNamespace(get_default_device=lambda: device)
    config = m.TuningConfig(tile_m=64, tile_n=128, tile_k=64, max_concurrent_steps=2)
    a = jnp.asarray(rng.integers(-5, 5, size=(256, 128)), jnp.int8)
    b = normal(128, 256).astype(jnp.bfloat16)
    got = m.mixed_matmul_kernel(a, b, out_dtype=jnp.bfloat16, config=config)
    close(got, m.reference(a, b, out_dtype=jnp.bfloat16), 5e-1)
"""

BLACKWELL = """
    m = load("blackwell_matmul_mgpu")
    a, b = normal(128, 96), normal(96, 128)
    want = a.astype(jnp.float32) @ b.astype(jnp.float32)
    options = dict(tile_m=32, tile_n=32, tile_k=32, max_concurrent_steps=2)
    for collective in (False, True):
        config = m.TuningConfig(
            **options, collective=collective, epilogue_tile_n=16, grid_tile_width=2
        )
        close(m.matmul_kernel(a, b, config), want, 5e-2)
"""
# Their emitted text on the CPU, by `tests/backends/cuda/host.py`.
HOST = """
    import pathlib, tempfile
    from tests.backends.cuda import host

    folder = pathlib.Path(tempfile.mkdtemp())

    def on_host(function, want, *args, atol):
        (kernel,) = pallasite.lower(function)(*args).kernels
        got = host.run(kernel, [np.asarray(x) for x in args], folder)
        close(got[0], want, atol)
"""

HOST_MATMUL = """
    m = load("hopper_matmul_mgpu")
    m.get_num_sms = lambda: 2
    a, b, c = normal(256, 192), normal(192, 256), normal(256, 256)
    want = a.astype(jnp.float32) @ b.astype(jnp.float32)
    options = dict(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
    for more in (
        dict(epi_tile_n=32),
        dict(wg_dimension=m.MatmulDimension.M, grid_tile_width=2, tile_k=32),
        dict(tile_m=128),
    ):
        config = m.TuningConfig(**{**options, **more})
        on_host(lambda a, b: m.matmul(a, b, None, config), want, a, b, atol=5e-2)
    add = lambda a, b, c: m.matmul(a, b, c, config)
    on_host(add, want + c, a, b, c, atol=1e-1)
"""

HOST_ATTENTION = """
    m = load("attention_mgpu")
    version = lambda: 13000
    m.cuda_versions = types.SimpleNamespace(cuda_runtime_get_version=version)
    q, k, v = (normal(1, 256, 2, 64) for _ in range(3))
    for causal in (False, True):
        config = m.TuningConfig(64, 64, 2, causal=causal)
        want = m.attention_reference(q, k, v, causal=causal)
        on_host(lambda *a: m.attention(*a, config), want, q, k, v, atol=5e-3)
    config = m.TuningConfig(64, 64, 2)
    want = m.attention_reference(q, k, v)
    emitter = lambda *a: m.attention_with_pipeline_emitter(*a, config)
    on_host(emitter, want, q, k, v, atol=5e-3)
"""

HOST_RAGGED = """
    m = load("ragged_dot_mgpu")
    lhs, rhs = normal(256, 64), normal(2, 64, 128)
    sizes = jnp.asarray([100, 156], jnp.int32)
    blocks = dict(block_m=64, block_n=64, block_k=64, grid_block_n=1)
    run = lambda sizes, lhs, rhs: m.ragged_dot(
        lhs, rhs, group_sizes=sizes, max_concurrent_steps=2, **blocks
    )
    for lhs, sizes in ((lhs, sizes), (lhs[:200], jnp.asarray([90, 110], jnp.int32))):
        want = jax.lax.ragged_dot(lhs, rhs, sizes)
        on_host(run, want, sizes, lhs, rhs, atol=5e-2)  # the last block hangs over
"""

HOST_TRANSPOSED_RAGGED = """
    m = load("transposed_ragged_dot_mgpu")
    lhs, rhs = normal(320, 64), normal(320, 64)
    sizes = jnp.asarray([50, 78, 100, 92], jnp.int32)
    want = m.ref_transposed_ragged_dot(lhs, rhs, sizes)
    devices, jax.devices = jax.devices, lambda: [types.SimpleNamespace(core_count=2)]
    blocks = dict(block_m=64, block_n=64, block_k=64, grid_block_n=1)
    run = lambda sizes, lhs, rhs: m.transposed_ragged_dot(
        lhs, rhs, group_sizes=sizes, max_concurrent_steps=2, **blocks
    )
    (kernel,) = pallasite.lower(run)(sizes, lhs, rhs).kernels
    jax.devices = devices
    ends = np.cumsum(sizes)
    starts = ends - np.asarray(sizes)
    first = starts // 64 * 64
    numbers = (sizes, starts, ends, (-(-ends // 64) * 64 - first) // 64, first)
    numbers = [np.asarray(x, np.int32) for x in numbers]
    got = host.run(kernel, [*numbers, np.asarray(lhs), np.asarray(rhs)], folder)
    close(got[0], want, 5e-2)
"""

HOST_MIXED = """
    m = load("hopper_mixed_type_matmul_mgpu")
    device = types.SimpleNamespace(core_count=2)
    m.backend = types.SimpleNamespace(get_default_device=lambda: device)
    config = m.TuningConfig(tile_m=64, tile_n=128, tile_k=64, max_concurrent_steps=2)
    a = jnp.asarray(rng.integers(-5, 5, size=(256, 128)), jnp.int8)
    b = normal(128, 256).astype(jnp.bfloat16)
    run = lambda a, b: m.mixed_matmul_kernel(
        a, b, out_dtype=jnp.bfloat16, config=config
    )
    on_host(run, m.reference(a, b, out_dtype=jnp.bfloat16), a, b, atol=5e-1)
"""

HOST_BLACKWELL = """
    from pallasite.backends import cuda
    from pallasite.target import GPUS

    cuda._chip = lambda options: GPUS["b200"]
    m = load("blackwell_matmul_mgpu")
    a, b = normal(512, 192), normal(192, 256)
    want = a.astype(jnp.float32) @ b.astype(jnp.float32)
    options = dict(tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2)
    for collective in (False, True):
        config = m.TuningConfig(
            **options, collective=collective, epilogue_tile_n=32, grid_tile_width=2
        )
        on_host(lambda a, b: m.matmul_kernel(a, b, config), want, a, b, atol=5e-2)
"""

COMPILED_BLACKWELL = """
    from pallasite.backends import base, cuda
    from pallasite.target import GPUS

    cuda._chip = lambda options: GPUS["b200"]
    m = load("blackwell_matmul_mgpu")
    side = jax.ShapeDtypeStruct((1024, 1024), jnp.float16)
    options = dict(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    for collective in (False, True):
        config = m.TuningConfig(**options, collective=collective, epilogue_tile_n=32)
        run = lambda a, b: m.matmul_kernel(a, b, config)
        (kernel,) = pallasite.lower(run)(side, side).kernels
        ptx = base.Compiled(base.get("cuda"), kernel, base.Options())["ptx"]
        assert f"tcgen05.mma.cta_group::{1 + collective}.kind::f16" in ptx
"""

KERNELS = {
    "matmul": MATMUL,
    "attention": ATTENTION,
    "backward": BACKWARD,
    "ragged": RAGGED,
    "transposed ragged": TRANSPOSED_RAGGED,
    "mixed": MIXED,
    "blackwell": BLACKWELL,
}
ON_HOST = {
    "matmul": HOST_MATMUL,
    "attention": HOST_ATTENTION,
    "ragged": HOST_RAGGED,
    "transposed ragged": HOST_TRANSPOSED_RAGGED,
    "mixed": HOST_MIXED,
    "blackwell": HOST_BLACKWELL,
}
# Each piece of code on its own: what it sets and what it changes of jax is gone after.
EACH = """
    import json, sys, traceback

    def run_each(codes):
        devices, outcomes = jax.devices, {}
        for name, code in codes.items():
            try:
                exec(code, dict(globals()))
                outcomes[name] = "ok"
            except Exception:
                outcomes[name] = traceback.format_exc()
            jax.devices = devices
        print(json.dumps(outcomes))
"""


def check(
    start: str, codes: dict[str, str], number: int, run_python: Callable[..., str]
) -> None:
    """The run's share of the codes, in one process: it imports upstream once."""
    names = share_of(list(codes), number)
    codes = {name: textwrap.dedent(codes[name]) for name in names}
    text = "".join(map(textwrap.dedent, (START, start, EACH)))
    printed = run_python("-c", f"{text}\nrun_each({codes!r})")
    assert json.loads(printed.splitlines()[-1]) == dict.fromkeys(codes, "ok")


# One test each, not one per kernel: else every worker would start a process.
def test_upstreams_kernels_are_right(run_python: Callable[..., str]):
    check("", KERNELS, 0, run_python)


@pytest.mark.machine_only  # the test above traces them
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_their_cuda_text_is_right(run_python: Callable[..., str]):
    check(HOST, ON_HOST, 1, run_python)


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs NVRTC")
def test_their_blackwell_kernel_is_compiled(run_python: Callable[..., str]):
    run_python("-c", textwrap.dedent(START) + textwrap.dedent(COMPILED_BLACKWELL))
