"""The three tracer kernels of `benchmarks/tracer_gpu.py`: emitted, simulated, run."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite.backends import base
from pallasite.sites import kernels_in
from tests.backends.triton.harness import compiled, simulated

ROOT = Path(__file__).parents[3]


def _load():
    path = ROOT / "benchmarks" / "tracer_gpu.py"
    spec = importlib.util.spec_from_file_location("tracer_gpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tracer = _load()


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def vectors(n):
    return normal(0, n), normal(1, n)


CASES = {
    "add": (tracer.vector_add, jnp.add, vectors(5000), 0.0),
    "matmul": (
        lambda x, y: tracer.matmul(x, y, 32, 32, 16),
        tracer.plain_matmul,
        [normal(s, 64, 64) for s in range(2)],
        1e-5,
    ),
    "odd matmul": (
        lambda x, y: tracer.matmul(x, y, 24, 20, 50),
        tracer.plain_matmul,
        [normal(0, 60, 50), normal(1, 50, 30)],
        1e-5,
    ),
    "attention": (
        lambda q, k, v: tracer.attention(q, k, v, 32, 16),
        tracer.plain_attention,
        [normal(s, 2, 64, 16) for s in range(3)],
        1e-5,
    ),
}

each = pytest.mark.parametrize("name", CASES)


@each
def test_tracer_kernel_is_right_on_the_simulator(name: str):
    run, plain, operands, atol = CASES[name]
    (kernel,) = kernels_in(run, *operands)
    compiled(kernel)
    (got,) = simulated(kernel, operands)
    np.testing.assert_allclose(got, plain(*operands), rtol=1e-5, atol=atol)


@each
def test_tracer_kernel_carries_values_not_memory(name: str):
    """No scratch in memory, no barriers, nothing conditional inside the loops."""
    run, _, operands, _ = CASES[name]
    (kernel,) = kernels_in(run, *operands)
    text, launch = compiled(kernel)
    assert launch.scratch_results == ()
    assert "gpu.barrier" not in text
    assert "scf.if" not in text
    assert text.count("tt.store") == 1


@pytest.mark.gpu
@each
def test_tracer_kernel_is_right_on_the_gpu(name: str):
    run, plain, operands, atol = CASES[name]
    want = jax.jit(tracer.exact(plain))(*operands)
    np.testing.assert_allclose(
        jax.jit(run)(*operands), want, rtol=1e-5, atol=max(atol, 1e-6)
    )


@pytest.mark.gpu
def test_tracer_benchmark_accepts_its_errors():
    assert all(r.max_error <= r.allowed for r in tracer.measure(small=True))


def test_stages_are_text():
    (kernel,) = kernels_in(CASES["add"][0], *CASES["add"][2])
    outputs = base.Compiled(base.get("triton"), kernel, base.Options())
    assert list(outputs) == ["scheduled", "ttir"]
    assert outputs["scheduled"].startswith("kernel @")
    assert "benchmarks/tracer_gpu.py" in outputs["scheduled"]  # the author's lines
