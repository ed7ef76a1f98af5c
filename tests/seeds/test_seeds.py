"""Every code sample of the four documents about Pallas runs, only its imports changed.

The samples are the documents' own text, line breaks and indentation restored where a
document lost them. `run_sample` changes the two import lines of Pallas and nothing
else; names that a sample uses and does not define (x, w, M, model, ...) come from the
test. No sample says `interpret`: on a host without an accelerator Pallasite falls back
by itself.

The first document gives its samples twice, word for word; they are here once. The "HLO
simulator" that it mentions is a widget of the page, whose code it does not give.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallasite as pl
from pallasite.errors import PartitionWarning
from tests.xla import USUAL

# Emulation in place of a native backend is announced, and is what these tests want.
pytestmark = pytest.mark.filterwarnings("ignore::pallasite.errors.FallbackWarning")

OUR_IMPORTS = {
    "from jax.experimental import pallas as pl": "import pallasite as pl",
    "from jax.experimental.pallas import tpu": "from pallasite import tpu",
}


def run_sample(sample: str, **names) -> dict:
    """Executes a sample under our imports; returns the names it defined."""
    for theirs, ours in OUR_IMPORTS.items():
        sample = sample.replace(theirs, ours)
    namespace = {"__name__": "sample", **names}
    exec(compile(sample, "<sample>", "exec"), namespace)
    return namespace


def normal(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.fixture(autouse=True)
def default_promotion():
    """The samples are written for JAX's default promotion rules."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# Document 1, "JAX & Pallas".

JIT_SAMPLE = """
import jax
import jax.numpy as jnp

@jax.jit
def f(x, w, b):
    return jax.nn.relu(x @ w + b)

# First call: trace + compile (slow). Subsequent calls: cached, fast.
out = f(jnp.ones((128, 256)), jnp.ones((256, 64)), jnp.zeros(64))
"""

DUMP_SAMPLE = """
print(jax.make_jaxpr(f)(x, w, b)) # jaxpr
print(jax.jit(f).lower(x, w, b).compile().as_text()) # compiled HLO
"""

STRIP_MATMUL_SAMPLE = '''
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

BM, BN, BK = 128, 128, 64 # tile sizes for the matmul

def matmul_kernel(x_ref, w_ref, o_ref):
    """Inner kernel: each program computes one (BM, BN) output tile
    by looping over K in chunks of BK and accumulating."""
    K = x_ref.shape[1]
    acc = jnp.zeros((BM, BN), dtype=jnp.float32)
    for k in range(0, K, BK):
        x_tile = pl.load(x_ref, (slice(None), pl.ds(k, BK))) # (BM, BK)
        w_tile = pl.load(w_ref, (pl.ds(k, BK), slice(None))) # (BK, BN)
        acc += jnp.dot(x_tile, w_tile, preferred_element_type=jnp.float32)
    o_ref[:, :] = acc.astype(o_ref.dtype)

@jax.jit
def matmul(x, w):
    M, K = x.shape
    _, N = w.shape
    return pl.pallas_call(
        matmul_kernel,
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        grid=(M // BM, N // BN), # one program per (M, N) tile
        in_specs=[pl.BlockSpec((BM, K), lambda i, j: (i, 0)), # full row strip of x
                  pl.BlockSpec((K, BN), lambda i, j: (0, j))], # full col strip of w
        out_specs=pl.BlockSpec((BM, BN), lambda i, j: (i, j)),
    )(x, w)
'''


def test_jit_sample_runs():
    out = run_sample(JIT_SAMPLE)["out"]
    assert out.shape == (128, 64)
    np.testing.assert_array_equal(out, 256.0)


def test_dump_sample_prints_both_stages(capsys):
    f = run_sample(JIT_SAMPLE)["f"]
    x, w, b = jnp.ones((128, 256)), jnp.ones((256, 64)), jnp.zeros(64)
    run_sample(DUMP_SAMPLE, jax=jax, f=f, x=x, w=w, b=b)
    printed = capsys.readouterr().out
    assert "dot_general" in printed
    assert "HloModule" in printed


# Sums are float32; what is left is the rounding of the result to bfloat16, 2**-9.
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 4e-3)])
def test_strip_matmul_sample_agrees_with_jnp(dtype, rtol):
    matmul = run_sample(STRIP_MATMUL_SAMPLE)["matmul"]
    x, w = normal(0, (256, 192), dtype), normal(1, (192, 384), dtype)
    result = matmul(x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert result.dtype == dtype
    np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol, atol=1e-4)


# Document 2, "Pallas (JAX kernel language)".

ADD_VECTORS_SAMPLE = """
def add_vectors_kernel(x_ref, y_ref, o_ref):
    x, y = x_ref[...], y_ref[...]
    o_ref[...] = x + y

@jax.jit
def add_vectors(x, y):
    return pl.pallas_call(
        add_vectors_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x, y)
"""

# The document's markup turns the subscripts [0] and [1] into citation links.
X_SPEC_SAMPLE = "pl.BlockSpec((x.shape[0] // 2, x.shape[1]), lambda i, j: (i, 0))"
Y_SPEC_SAMPLE = "pl.BlockSpec((y.shape[0], y.shape[1] // 2), lambda i, j: (0, j))"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_add_vectors_sample_adds(dtype):
    add_vectors = run_sample(ADD_VECTORS_SAMPLE, jax=jax, pl=pl)["add_vectors"]
    x, y = jnp.arange(8, dtype=dtype), jnp.arange(8, 16, dtype=dtype)
    np.testing.assert_array_equal(add_vectors(x, y), x + y)


def test_block_spec_samples_carve_up_a_matmul():
    """The text around the two specs describes the kernel, grid and output."""
    x, y = normal(0, (64, 48)), normal(1, (48, 32))

    def matmul_kernel(x_ref, y_ref, z_ref):
        z_ref[...] = x_ref[...] @ y_ref[...]

    z = pl.pallas_call(
        matmul_kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
        grid=(2, 2),
        in_specs=[
            eval(X_SPEC_SAMPLE, {"pl": pl, "x": x}),
            eval(Y_SPEC_SAMPLE, {"pl": pl, "y": y}),
        ],
        out_specs=pl.BlockSpec((x.shape[0] // 2, y.shape[1] // 2), lambda i, j: (i, j)),
    )(x, y)
    np.testing.assert_allclose(z, x @ y, rtol=1e-5, atol=1e-5)


# Document 3, "Pallas: Custom Kernels in JAX".

TPU_MATMUL_SAMPLE = """
import numpy as np
import jax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

M, N, K = 4096, 4096, 4096
x = jax.random.normal(jax.random.key(0), (M, K), jnp.bfloat16)
y = jax.random.normal(jax.random.key(1), (K, N), jnp.bfloat16)
reference = jnp.dot(x, y, preferred_element_type=jnp.float32)

@pl.kernel(
  out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
  mesh=pltpu.create_tensorcore_mesh("x")
)
def matmul_kernel(x_hbm_ref, y_hbm_ref, out_hbm_ref):
  def pipeline_body(x_vmem_ref, y_vmem_ref, out_vmem_ref):  #(1)!
    @pl.when(pl.program_id(2) == 0)  #(2)!
    def _():
      out_vmem_ref[...] = jnp.zeros_like(out_vmem_ref)
    out_vmem_ref[...] += jnp.dot(x_vmem_ref[...], y_vmem_ref[...],
      preferred_element_type=jnp.float32)
  pltpu.emit_pipeline(pipeline_body,
    in_specs=[pl.BlockSpec((512, 512), lambda i, j, k: (i, k)),
              pl.BlockSpec((512, 512), lambda i, j, k: (k, j))],
    out_specs=pl.BlockSpec((512, 512), lambda i, j, k: (i, j)),
    grid=(M // 512, N // 512, K // 512)
  )(x_hbm_ref, y_hbm_ref, out_hbm_ref)

kernel_result = matmul_kernel(x, y)
"""

# The last line of the sample. On a TPU both sides come from one matrix unit. XLA's own
# product on an x86 CPU misses the exact one by 1.4e-4 (measured: float32 sums of 4096
# terms near 200), so there the line fails for any kernel.
TPU_MATMUL_SAMPLE_CHECK = (
    "np.testing.assert_allclose(kernel_result, reference, atol=1e-4)"
)


@pytest.mark.slow
def test_tpu_matmul_sample_is_as_exact_as_its_reference(monkeypatch):
    # Numbers by optimised code: there are 32 million.
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2), compiler_options=USUAL)
    monkeypatch.setattr(jax.random, "normal", normal)
    names = run_sample(TPU_MATMUL_SAMPLE)
    if jax.default_backend() == "tpu":
        exec(TPU_MATMUL_SAMPLE_CHECK, names)
    result, reference = (
        np.asarray(names["kernel_result"]),
        np.asarray(names["reference"]),
    )
    assert result.shape == (4096, 4096) and result.dtype == np.float32
    rows = slice(0, 64)
    exact = np.asarray(names["x"][rows], np.float64) @ np.asarray(
        names["y"], np.float64
    )
    reference_error = np.abs(reference[rows] - exact).max()
    # XLA's product on aarch64 misses the exact one by 7e-4, this kernel by 1.5e-4.
    apart = max(5e-4, 2 * reference_error)
    np.testing.assert_allclose(result, reference, rtol=0, atol=apart)
    assert np.abs(result[rows] - exact).max() <= max(1e-4, reference_error)


# Document 4, on the TPU software stack.

MESH_SAMPLE = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np
# a 9,216-chip Ironwood pod arranged as 4 axes
devices = np.asarray(jax.devices()).reshape(8, 8, 12, 12)
mesh = Mesh(devices, axis_names=('data', 'fsdp', 'tensor', 'expert'))
# weight matrix sharded across 'tensor' and 'expert' axes
W = jax.device_put(W, NamedSharding(mesh, P('tensor', 'expert')))
# input batch sharded across 'data' (and replicated across the rest)
x = jax.device_put(x, NamedSharding(mesh, P('data', None)))
# JIT the model — GSPMD will figure out where to insert collectives
y = jax.jit(model)(W, x)
"""

SHARD_MAP_SAMPLE = """
from jax.experimental.shard_map import shard_map
def tensor_parallel_matmul(W_local, x_local):
    # compute local partial product
    partial = x_local @ W_local
    # sum across the 'tensor' axis to produce the full result
    return jax.lax.psum(partial, 'tensor')
# map over the mesh, with explicit input/output partition specs
y = shard_map(
    tensor_parallel_matmul,
    mesh=mesh,
    in_specs=(P(None, 'tensor'), P('data', None)),
    out_specs=P('data', None),
)(W, x)
"""

TILED_MATMUL_SAMPLE = """
from jax.experimental import pallas as pl
def matmul_kernel(x_ref, w_ref, out_ref):
    out_ref[...] = x_ref[...] @ w_ref[...]
# BlockSpec tells Pallas how to tile each input from HBM into VMEM
matmul = pl.pallas_call(
    matmul_kernel,
    out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    grid=(M//128, N//128),
    in_specs=[
        pl.BlockSpec(block_shape=(128, K), index_map=lambda i, j: (i, 0)),
        pl.BlockSpec(block_shape=(K, 128), index_map=lambda i, j: (0, j)),
    ],
    out_specs=pl.BlockSpec(block_shape=(128, 128), index_map=lambda i, j: (i, j)),
)
"""


def pod_on_these_devices() -> str:
    """The mesh sample on the devices present; the pod's size is its scene."""
    count = len(jax.devices())
    shape = (2, 1, 2, 2) if count == 8 else (count, 1, 1, 1)
    assert math.prod(shape) == count
    return MESH_SAMPLE.replace("(8, 8, 12, 12)", str(shape))


def test_mesh_sample_shards_a_model():
    def model(W, x):
        return jax.nn.relu(x @ W)

    W, x = normal(0, (32, 16)), normal(1, (64, 32))
    names = run_sample(pod_on_these_devices(), jax=jax, W=W, x=x, model=model)
    sharding = NamedSharding(names["mesh"], P("tensor", "expert"))
    assert names["W"].sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(names["y"], model(W, x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:jax.experimental.shard_map:DeprecationWarning")
def test_shard_map_sample_sums_over_the_tensor_axis():
    """With these specs the sample adds up the shards of W's columns."""
    W, x = normal(0, (32, 16)), normal(1, (64, 32))
    names = run_sample(
        pod_on_these_devices(), jax=jax, W=W, x=x, model=lambda W, x: x @ W
    )
    mesh = names["mesh"]
    y = run_sample(SHARD_MAP_SAMPLE, jax=jax, P=P, mesh=mesh, W=W, x=x)["y"]
    shards = jnp.split(W, mesh.shape["tensor"], axis=1)
    np.testing.assert_allclose(
        y, sum(x @ shard for shard in shards), rtol=1e-5, atol=1e-4
    )


def test_tiled_matmul_sample_agrees_with_jnp():
    M, N, K = 256, 384, 64
    matmul = run_sample(TILED_MATMUL_SAMPLE, jax=jax, jnp=jnp, M=M, N=N, K=K)["matmul"]
    x, w = normal(0, (M, K), jnp.bfloat16), normal(1, (K, N), jnp.bfloat16)
    result = matmul(x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert result.shape == (M, N) and result.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(result, np.float64), exact, rtol=1e-2, atol=1e-1
    )


def test_tiled_matmul_sample_runs_inside_the_sharded_model():
    """The kernel of one sample under `jit` with the sharded arrays of another."""
    M, N, K = 128, 128, 32
    matmul = run_sample(TILED_MATMUL_SAMPLE, jax=jax, jnp=jnp, M=M, N=N, K=K)["matmul"]
    W, x = normal(0, (K, N), jnp.bfloat16), normal(1, (M, K), jnp.bfloat16)
    with pytest.warns(PartitionWarning, match="every program gets all of it"):
        names = run_sample(
            pod_on_these_devices(), jax=jax, W=W, x=x, model=lambda W, x: matmul(x, W)
        )
    exact = np.asarray(x, np.float64) @ np.asarray(W, np.float64)
    np.testing.assert_allclose(
        np.asarray(names["y"], np.float64), exact, rtol=1e-2, atol=1e-1
    )
