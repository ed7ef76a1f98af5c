"""jax.export of kernel calls: what is inside, round trips, and the same text always."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from benchmarks.partitioning import matmul, mesh, normal, put

ROOT = Path(__file__).parents[2]
TRITON = "__gpu$xla.gpu.triton"
# JAX promises no compatibility for Triton calls between versions; say we know.
UNCHECKED = [jax.export.DisabledSafetyCheck.custom_call(TRITON)]
X = normal(0, 16, 128)


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def double(x, **options):
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        double_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], 8),),
        in_specs=[rows],
        out_specs=rows,
        **options,
    )(x)


def round_trip(f, platforms, *operands):
    """Exported, serialized and read again."""
    export = jax.export.export(
        jax.jit(f), platforms=platforms, disabled_checks=UNCHECKED
    )
    again = jax.export.deserialize(export(*operands).serialize())
    assert again.platforms == tuple(platforms)
    return again


def targets(exported):
    found = set(re.findall(r"custom_call @([^\s(]+)", exported.mlir_module()))
    return found - {"shape_assertion"}


@pytest.mark.parametrize(
    ("platform", "backend", "target"),
    [("cuda", "triton", TRITON), ("tpu", "tpu", "tpu_custom_call")],
)
def test_native_kernels_are_exported_without_their_device(platform, backend, target):
    exported = round_trip(lambda x: double(x, backend=backend), [platform], X)
    assert targets(exported) == {target}


def test_one_export_for_several_platforms_with_a_kernel_for_each():
    def f(x):
        return jax.lax.platform_dependent(
            x,
            cpu=lambda x: double(x, interpret=True),
            cuda=lambda x: double(x, backend="triton"),
            tpu=lambda x: double(x, backend="tpu"),
        )

    exported = round_trip(f, ["cpu", "cuda", "tpu"], X)
    assert targets(exported) == {TRITON, "tpu_custom_call"}
    np.testing.assert_array_equal(exported.call(X), 2 * X)


def symbolic(*shape):
    names = [d for d in shape if isinstance(d, str)]
    sizes = iter(jax.export.symbolic_shape(", ".join(names)))
    dims = [next(sizes) if isinstance(d, str) else d for d in shape]
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_symbolic_batch_size():
    exported = round_trip(jax.vmap(double), ["cpu"], symbolic("b", 16, 128))
    for size in (1, 3):
        x = normal(1, size, 16, 128)
        np.testing.assert_array_equal(exported.call(x), 2 * x)


def test_symbolic_batch_of_one_operand():
    y = normal(2, 128, 16)
    f = jax.vmap(lambda x: matmul(x, y))
    exported = round_trip(f, ["cpu"], symbolic("b", 16, 128))
    x = normal(3, 2, 16, 128)
    np.testing.assert_allclose(exported.call(x), x @ y, rtol=1e-4, atol=1e-4)


def test_symbolic_batch_keeps_a_named_backend():
    f = jax.vmap(lambda x: double(x, backend="tpu"))
    exported = round_trip(f, ["tpu"], symbolic("b", 16, 128))
    assert targets(exported) == {"tpu_custom_call"}


def test_symbolic_grid_over_arrays_of_fixed_shape():
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))

    def f(x, like):
        return pl.pallas_call(
            double_kernel,
            out_shape=x,
            grid=(like.shape[0],),
            in_specs=[rows],
            out_specs=rows,
            input_output_aliases={0: 0},
        )(x)

    exported = round_trip(f, ["cpu"], X, symbolic("n"))
    np.testing.assert_array_equal(exported.call(X, jnp.ones(1))[:8], 2 * X[:8])
    np.testing.assert_array_equal(exported.call(X, jnp.ones(1))[8:], X[8:])
    np.testing.assert_array_equal(exported.call(X, jnp.ones(2)), 2 * X)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_export_of_a_sharded_function():
    placed = put(X, mesh(2), "a")
    exported = round_trip(double, ["cpu"], placed)
    assert exported.nr_devices == 2
    np.testing.assert_array_equal(jax.jit(exported.call)(placed), 2 * X)


# --- the same text always ---

TEXTS = """
import hashlib, jax, numpy as np
from benchmarks.partitioning import attention, matmul, mesh, normal, put
from tests.language.test_export import UNCHECKED, X, double

where = mesh(4, 2)
x, y = put(normal(0, 32, 64), where, "a", "b"), put(normal(1, 64, 32), where, "b")
q, kv = normal(2, 4, 16, 16), normal(3, 2, 16, 16)
texts = [
    jax.jit(matmul).lower(x, y).as_text(),
    jax.jit(attention).lower(q, kv, kv).as_text(),
    jax.jit(jax.vmap(double)).lower(X[None]).as_text(),
]
for platform, backend in (("cuda", "triton"), ("tpu", "tpu"), ("cpu", None)):
    f = jax.jit(lambda x: double(x, backend=backend))
    export = jax.export.export(f, platforms=[platform], disabled_checks=UNCHECKED)
    texts.append(export(X).mlir_module())
assert "pallasite_partition" in texts[0] and "pallasite_cpu" in texts[1]
print([hashlib.sha256(t.encode()).hexdigest() for t in texts])
"""


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compares CPU text")
def test_lowering_is_the_same_in_every_process():
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TEXTS],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, two = (child.communicate()[0] for child in running)
    assert len(one) > 6 * 64, "the first process failed"
    assert one == two
