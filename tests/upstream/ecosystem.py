"""Kernels of other packages, unmodified, on Pallasite: which are right on a CPU?

    python tests/upstream/ecosystem.py [--write] [package or kernel ...]

Each kernel of the packages that are installed runs with small, odd shapes and is
compared with plain jnp, or with the package's own reference. The table that is printed
goes into docs/compat.md with `--write` (with names, their rows only). Not collected by
pytest: the packages are large and need Python 3.12. They are imported without what they
need for serving models.
"""

import importlib
import importlib.metadata
import logging
import os
import resource
import signal
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pallasite

pallasite.install()
os.environ["PALLASITE_CACHE_DIR"] = "off"  # every kernel is compiled here

import jax
import jax.numpy as jnp
import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
BEGIN, END = "<!-- ecosystem: begin -->", "<!-- ecosystem: end -->"
DISTRIBUTIONS = {
    "tokamax": "Tokamax",
    "tpu_inference": "tpu-inference",
    "sgl_jax": "sglang-jax",
    "ejkernel": "ejkernel",
    "maxtext": "MaxText",
    "qwix": "qwix",
}
VERSIONS = {"tpu_inference": "tpu-inference", "sgl_jax": "sglang-jax"}
HEAD = ["| package | kernel | result |", "| --- | --- | --- |"]
V3 = "tpu_inference.kernels.ragged_paged_attention.v3"
SECONDS = 120  # of CPU time for one kernel: other load on the machine does not count
f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


@dataclass(frozen=True)
class Case:
    package: str
    kernel: str
    run: Callable[[], Any]
    tolerance: float


CASES: list[Case] = []
# Kernels that are not for this machine, with what they need.
ELSEWHERE = {
    ("tokamax", "attention, gated_linear_unit, ragged_dot on GPUs"): "`plgpu.kernel`",
    ("tokamax", "topk, ragged_gather, ragged_gather_reduce, csa_gather"): "SparseCore",
    ("tokamax", "fused_moe, fused_moe_rs, fused_moe_decode"): "copies between devices",
    ("tpu_inference", "sparse_core"): "SparseCore",
    ("tpu_inference", "collectives, fused_moe"): "copies between devices",
    ("maxtext", "ragged_gather, ragged_gather_reduce, gather_reduce"): "SparseCore",
    ("ejkernel", "all_gather_matmul, reduce_scatter_matmul"): "copies between devices",
}


def case(package: str, kernel: str, tolerance: float = 2e-5) -> Any:
    """A function that returns what the kernel gives and what it should give."""

    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        CASES.append(Case(package, kernel, run, tolerance))
        return run

    return add


def module(name: str) -> Any:
    return importlib.import_module(name)


def _logger(name: str) -> Any:
    log = logging.getLogger(name)
    log.warning_once = log.info_once = log.debug
    return log


def stand_in_for_serving() -> None:
    """The roots of three packages import PyTorch, vLLM, FastAPI and more."""
    for name in ("tpu_inference", "maxtext", "maxtext.kernels.megablox", "sgl_jax"):
        spec = importlib.util.find_spec(name)
        if spec is not None:
            root = types.ModuleType(name)
            root.__path__ = list(spec.submodule_search_locations or [])
            sys.modules[name] = root
    logger = types.ModuleType("tpu_inference.logger")
    logger.init_logger = _logger
    utils = types.ModuleType("tpu_inference.utils")
    utils.align_to = lambda x, a: -(-x // a) * a
    utils.get_device_name = lambda *_: "TPU v5e"
    utils.TPU_HEAD_SIZE_ALIGNMENT = 128
    utils.get_dtype_packing = lambda dtype: 32 // jnp.dtype(dtype).itemsize // 8
    # Gone from JAX since sglang-jax was released.
    module("jax._src.dtypes").bit_width = lambda dtype: 8 * jnp.dtype(dtype).itemsize
    sys.modules |= {"tpu_inference.logger": logger, "tpu_inference.utils": utils}


# --- data ---


def normal(*shape: int, seed: int = 0, dtype: Any = f32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, f32).astype(dtype)


def grouped(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
    """Rows of `lhs` times the matrix of their group; rows of no group are 0."""
    ends = np.cumsum(sizes)
    out = np.zeros((lhs.shape[0], rhs.shape[2]), np.float32)
    for g, (size, end) in enumerate(zip(np.asarray(sizes), ends, strict=True)):
        rows = slice(end - size, end)
        out[rows] = np.asarray(lhs[rows], np.float32) @ np.asarray(rhs[g], np.float32)
    return jnp.asarray(out)


@dataclass(frozen=True)
class Pages:
    """Three sequences, one of a single new token, over a cache of shuffled pages."""

    q_lens: tuple[int, ...] = (1, 6, 5)
    kv_lens: tuple[int, ...] = (19, 6, 33)
    page_size: int = 16
    per_seq: int = 3
    heads: int = 4
    kv_heads: int = 2
    dim: int = 128

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def total(self) -> int:
        return len(self.q_lens) * self.per_seq + 1

    def queries(self, dtype: Any = f32) -> jax.Array:
        return normal(self.tokens, self.heads, self.dim, dtype=dtype)

    def keys(self, dtype: Any = f32) -> jax.Array:
        return normal(self.tokens, self.kv_heads, self.dim, seed=1, dtype=dtype)

    def values(self, dtype: Any = f32) -> jax.Array:
        return normal(self.tokens, self.kv_heads, self.dim, seed=2, dtype=dtype)

    @property
    def lengths(self) -> jax.Array:
        return jnp.array(self.kv_lens, i32)

    @property
    def indices(self) -> jax.Array:
        return jnp.asarray(np.random.RandomState(0).permutation(self.total - 1), i32)

    @property
    def starts(self) -> jax.Array:
        return jnp.array([0, *np.cumsum(self.q_lens)], i32)

    @property
    def distribution(self) -> jax.Array:
        return jnp.array([1, 1, len(self.q_lens)], i32)


# --- Tokamax ---


@case("tokamax", "ragged_dot gmm")
def _():
    m = module("tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel")
    x, w, sizes = normal(100, 128), normal(3, 128, 136, seed=1), jnp.array([33, 0, 67])
    precision = jax.lax.DotAlgorithmPreset.F32_F32_F32
    got = m.gmm(x, w, sizes, precision=precision, out_dtype=f32, tiling=(20, 128, 128))
    return got, grouped(x, w, sizes)


@case("tokamax", "ragged_dot tgmm")
def _():
    m = module("tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel")
    x, y, sizes = normal(128, 100), normal(100, 136, seed=1), jnp.array([33, 0, 67])
    precision = jax.lax.DotAlgorithmPreset.F32_F32_F32
    got = m.tgmm(x, y, sizes, precision=precision, out_dtype=f32, tiling=(20, 128, 128))
    parts = [x[:, :33] @ y[:33], jnp.zeros((128, 136)), x[:, 33:] @ y[33:]]
    return got, jnp.stack(parts)


@case("tokamax", "gmm_v2")
def _():
    return gmm_v2(module("tokamax._src.ops.gmm_v2.gmm_v2"), 100)


def gmm_v2(m, rows):
    x, w = normal(rows, 128), normal(3, 128, 256, seed=1)
    sizes = jnp.array([33, 0, rows - 33])
    return m.gmm_v2(x, w, sizes, maybe_quantize_lhs=False), grouped(x, w, sizes)


@case("tokamax", "tgmm_v2")
def _():
    return tgmm_v2(module("tokamax._src.ops.gmm_v2.tgmm_v2"))


def tgmm_v2(m):
    x, y, sizes = normal(104, 128), normal(104, 256, seed=1), jnp.array([33, 0, 71])
    got = m.tgmm_v2(x, y, sizes, 3, preferred_element_type=f32)
    parts = [x[:33].T @ y[:33], jnp.zeros((128, 256)), x[33:].T @ y[33:]]
    return got, jnp.stack(parts)


@case("tokamax", "linear_softmax_cross_entropy_loss forward")
def _():
    name = "tokamax._src.ops.linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel"
    m = module(name)
    x, w = normal(40, 256), normal(256, 520, seed=1) / 16
    labels = jax.random.randint(jax.random.key(2), (40,), 0, 520)
    got, lse = m.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu(
        x, labels, w, b_block_size=1024, h_block_size=128, v_block_size=256
    )
    logits = x @ w
    expected = jax.nn.logsumexp(logits, 1)
    loss = (expected - logits[jnp.arange(40), labels]).sum()
    return (got, lse), (loss, expected)


@case("tokamax", "linear_softmax_cross_entropy_loss backward")
def _():
    name = "tokamax._src.ops.linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel"
    m = module(name)
    x, w = normal(40, 256), normal(256, 520, seed=1) / 16
    labels = jax.random.randint(jax.random.key(2), (40,), 0, 520)

    def loss(x, w):
        logits = x @ w
        own = logits[jnp.arange(40), labels]
        return (jax.nn.logsumexp(logits, 1) - own).sum()

    got = m.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu(
        jnp.float32(1), jax.nn.logsumexp(x @ w, 1), x, labels, w,
        b_block_size=1024, h_block_size=128, v_block_size=256,
    )  # fmt: skip
    return tuple(got), jax.grad(loss, (0, 1))(x, w)


def rotated(x: Any, positions: Any, cos_sin: Any, inverse: bool = False) -> jax.Array:
    """The last elements of each head rotated in pairs of neighbours."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions][:, None, :half], cos_sin[positions][:, None, half:]
    sin = -sin if inverse else sin
    plain, pairs = x[..., : -2 * half], x[..., -2 * half :]
    a, b = pairs[..., ::2], pairs[..., 1::2]
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return jnp.concatenate([plain, turned.reshape(pairs.shape)], -1)


def rope_data() -> tuple[Any, Any, Any]:
    x = normal(12, 4, 512, dtype=bf16)
    angles = jnp.arange(40)[:, None] / (1 + jnp.arange(32))
    table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], 1)
    return x, jnp.arange(12, dtype=i32) * 3, table


for _package, _name in (
    ("tokamax", "tokamax._src.ops.deepseek_rope.pallas_mosaic_tpu_kernel"),
    ("tpu_inference", "tpu_inference.kernels.experimental.deepseek_v4.rope"),
):

    @case(_package, "deepseek rope", tolerance=2e-2)
    def _(name=_name):
        x, positions, table = rope_data()
        expected = rotated(x, positions, table)
        return module(name).rope(x, positions, table), expected


@case("tokamax", "router_topk", tolerance=0)
def _():
    m = module("tokamax._src.ops.router_topk.pallas_mosaic_tpu_kernel")
    scores = normal(37, 128)
    values, chosen = jax.lax.top_k(scores, 4)
    return m.select(scores, 4)[:2], (values, chosen)


@case("tokamax", "batched ragged paged attention", tolerance=2e-2)
def _():
    m = module("tokamax._src.ops.batched_rpa.kernel.wrapper")
    return batched_attention(m)


@case("tpu_inference", "batched ragged paged attention", tolerance=2e-2)
def _():
    m = module("tpu_inference.kernels.experimental.batched_rpa.wrapper")
    return batched_attention(m)


def batched_attention(m: Any) -> tuple[Any, Any]:
    module(f"{V3}.util").get_tpu_version = lambda: 5  # it asks the device
    reference = module(f"{V3}.kernel")
    p = Pages(page_size=128, per_seq=2)
    q, k, v = p.queries(bf16), p.keys(bf16), p.values(bf16)
    shape = m.get_kv_cache_shape(p.total, p.page_size, p.kv_heads, p.dim, bf16)
    cache = normal(*shape, seed=3, dtype=bf16)
    args = (p.lengths, p.indices, p.starts, p.distribution)
    expected = reference.ref_ragged_paged_attention(q, k, v, cache, *args)
    got = m.ragged_paged_attention(q, k, v, cache + 0, *args)
    return got[0], expected[0]


@case("tokamax", "splash attention", tolerance=2e-5)
def _():
    base = "tokamax._src.ops.experimental.tpu.splash_attention."
    m, masks = module(base + "splash_attention_kernel"), None
    masks = module(base + "splash_attention_mask")
    q, k, v = (normal(2, 256, 128, seed=s) for s in range(3))
    mask = masks.CausalMask((256, 256))
    config = m.SplashConfig(block_q=128, block_kv=128)
    kernel = m.make_splash_mha(mask, q_seq_shards=1, config=config)
    return kernel(q / 11, k, v), causal(q / 11, k, v)


def causal(q: Any, k: Any, v: Any) -> jax.Array:
    scores = jnp.einsum("hqd,hkd->hqk", q, k)
    seen = jnp.tri(q.shape[1], k.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("hqk,hkd->hqd", weights, v)


@case("tokamax", "mhc post", tolerance=2e-2)
def _():
    return mhc_post("tokamax._src.ops.mhc.post_kernel")


@case("tpu_inference", "mhc post", tolerance=2e-2)
def _():
    return mhc_post("tpu_inference.kernels.experimental.deepseek_v4.mhc.post_kernel")


def mhc_post(name: str) -> tuple[Any, Any]:
    x, residual = normal(40, 256, dtype=bf16), normal(40, 4, 256, seed=1, dtype=bf16)
    post, comb = normal(40, 4, seed=2), normal(40, 4, 4, seed=3)
    got = module(name).mhc_post(x, residual, post[..., None], comb)
    wide = residual.astype(f32)
    mixed = jnp.einsum("tij,tid->tjd", comb, wide)
    return got, mixed + post[:, :, None] * x.astype(f32)[:, None]


# --- tpu-inference ---


@case("tpu_inference", "megablox gmm")
def _():
    m = module("tpu_inference.kernels.megablox.gmm")
    x, w, sizes = normal(100, 128), normal(3, 128, 136, seed=1), jnp.array([33, 0, 67])
    got = m.gmm(x, w, sizes, tiling=(20, 128, 128))
    return got, grouped(x, w, sizes)


@case("tpu_inference", "flash attention", tolerance=2e-5)
def _():
    m = module("tpu_inference.kernels.flash_attention.kernel")
    q, k, v = (normal(1, 2, 256, 128, seed=s) for s in range(3))
    got = m.flash_attention(q, k, v, causal=True, sm_scale=0.09)
    return got[0], causal(0.09 * q[0], k[0], v[0])


@case("tpu_inference", "ragged paged attention v2", tolerance=2e-3)
def _():
    m = module("tpu_inference.kernels.ragged_paged_attention.v2.kernel")
    p = Pages()
    pages = normal(p.total, p.page_size, 2 * p.kv_heads, p.dim, seed=3)
    table = p.indices.reshape(3, p.per_seq)
    args = (p.queries(), pages, p.lengths, table, p.starts, jnp.array([3], i32))
    sizes = dict(num_kv_pages_per_block=2, num_queries_per_block=4)
    got = m.ragged_paged_attention(*args, sm_scale=0.09, **sizes)
    return got, m.ref_ragged_paged_attention(*args, sm_scale=0.09)


@case("tpu_inference", "ragged paged attention v3", tolerance=2e-2)
def _():
    module(f"{V3}.util").get_tpu_version = lambda: 5  # it asks the device
    m = module(f"{V3}.kernel")
    # With three pages `get_default_block_sizes` gives blocks of 48 keys that are used
    # 32 at a time, which its own check refuses: the second 32 go past the block's end.
    p = Pages(per_seq=4)
    q, k, v = p.queries(bf16), p.keys(bf16), p.values(bf16)
    shape = m.get_kv_cache_shape(p.total, p.page_size, p.kv_heads, p.dim, bf16)
    cache = normal(*shape, seed=3, dtype=bf16)
    args = (p.lengths, p.indices, p.starts, p.distribution)
    expected = m.ref_ragged_paged_attention(q, k, v, cache, *args, sm_scale=0.09)
    got = m.ragged_paged_attention(q, k, v, cache + 0, *args, sm_scale=0.09)
    return got[0], expected[0]


@case("tpu_inference", "ragged paged attention v3, heads of 64", tolerance=2e-2)
def _():
    module(f"{V3}.tuned_block_sizes_hd64").get_tpu_version = lambda: 5
    m = module(f"{V3}.kernel_hd64")
    p = Pages(dim=64)
    q, k, v = p.queries(bf16), p.keys(bf16), p.values(bf16)
    shape = m.get_kv_cache_shape(p.total, p.page_size, p.kv_heads, p.dim, bf16)
    cache = normal(*shape, seed=3, dtype=bf16)
    args = (p.lengths, p.indices, p.starts, p.distribution)
    expected = m.ref_ragged_paged_attention_hd64(q, k, v, cache, *args, sm_scale=0.09)
    sizes = dict(num_kv_pages_per_block=2, num_queries_per_block=4)
    got = m.ragged_paged_attention_hd64(
        q, k, v, cache + 0, *args, sm_scale=0.09, **sizes
    )
    return got[0], expected[0]


@case("tpu_inference", "deepseek output projection with rope", tolerance=2e-2)
def _():
    m = module("tpu_inference.kernels.experimental.deepseek_v4.o_projection")
    x = normal(12, 16, 256, dtype=bf16)
    _, positions, table = rope_data()
    w = (normal(8 * 256, 2 * 128, seed=1) / 45).astype(jnp.float8_e4m3fn)
    scale = jnp.abs(normal(2 * 128, seed=2)) + 0.1
    got = m.fused_reverse_rope_wo_a_projection(
        x, positions, table, w, scale, head_dim=256, quantize_activations=False
    )
    turned = rotated(x.astype(f32), positions, table, inverse=True)
    turned = turned.astype(bf16).reshape(12, 2, 8 * 256).astype(f32)
    wide = w.astype(f32).reshape(8 * 256, 2, 128)
    out = jnp.einsum("tgd,dgr->tgr", turned, wide).reshape(12, 256)
    return got, out * scale


@case("tpu_inference", "kv cache update", tolerance=0)
def _():
    m = module("tpu_inference.kernels.ragged_paged_attention.v2.ragged_kv_cache_update")
    new, cache = normal(16, 4, 128), normal(64, 4, 128, seed=1)
    slices = np.zeros((3, 8), np.int32)
    slices[:, 0], slices[:, 1] = (5, 0, 6), (32, 6, 3)
    got = m.kv_cache_update(
        new, jnp.asarray(slices), cache + 0, jnp.array([2], i32), page_size=16
    )
    return got, cache.at[5:11].set(new[:6]).at[32:35].set(new[6:9])


@case("tpu_inference", "quantized matmul")
def _():
    m = module("tpu_inference.kernels.quantized_matmul.kernel")
    x = normal(40, 256)
    w = jnp.round(20 * normal(384, 256, seed=1)).clip(-127, 127).astype(jnp.int8)
    scale = jnp.abs(normal(384, seed=2)) + 0.1
    got = m.quantized_matmul_kernel(x, w, scale, x_q_dtype=f32)
    return got / 100, (x @ w.astype(f32).T * scale) / 100


@case("tpu_inference", "mla ragged paged attention v1", tolerance=2e-2)
def _():
    m = module("tpu_inference.kernels.mla.v1.kernel")
    p = Pages(heads=4)
    q, q_pe = normal(p.tokens, 4, 128, dtype=bf16), normal(p.tokens, 4, 64, dtype=bf16)
    kv, k_pe = normal(p.tokens, 128, dtype=bf16), normal(p.tokens, 64, dtype=bf16)
    cache = normal(*m.get_kv_cache_shape(p.total, p.page_size, 256, bf16), dtype=bf16)
    args = (p.lengths, p.indices, p.starts, p.distribution)
    expected = m.ref_mla_ragged_paged_attention(q, q_pe, kv, k_pe, cache + 0, *args)
    sizes = dict(num_kv_pages_per_block=2, num_queries_per_block=4)
    got = m.mla_ragged_paged_attention(q, q_pe, kv, k_pe, cache + 0, *args, **sizes)
    return got[0], expected[0]


@case("tpu_inference", "triangular inverse", tolerance=2e-4)
def _():
    m = module("tpu_inference.kernels.gdn.triangle_solver")
    a = jnp.tril(normal(4, 128, 128) / 20, -1) + jnp.eye(128)
    got = m.decompose_triangular_matrix_inverse_pallas(a)
    return got, jnp.linalg.inv(a)


@case("tpu_inference", "triangular inverse by Newton-Schulz", tolerance=2e-4)
def _():
    m = module("tpu_inference.kernels.gdn.triangle_solver")
    a = jnp.tril(normal(3, 64, 64) / 20, -1) + jnp.eye(64)
    got = m.newton_schulz_inverse_pallas(a, block_size=2)
    return got, jnp.linalg.inv(a)


for _version, _name in (
    ("v1", "v1.fused_gdn_decode_kernel"),
    ("v2", "v2.gdn_decode_kernel"),
):

    @case("tpu_inference", f"gated delta rule decode {_version}", tolerance=1e-3)
    def _(name=_name):
        m = module(f"tpu_inference.kernels.gdn.{name}")
        base = "tpu_inference.kernels.gdn.reference"
        plain = module(f"{base}.ragged_gated_delta_rule_ref").ragged_gated_delta_rule
        tokens, sizes = 5, dict(n_kq=2, n_v=4, d_k=128, d_v=128)
        qkv, states = normal(tokens, 8 * 128), normal(8, 4, 128, 128, seed=1) / 8
        b, a = normal(tokens, 4, seed=2), normal(tokens, 4, seed=3)
        decay = normal(4, seed=4), normal(4, seed=5)
        slots = jnp.array([3, 1, 6, 2, 7], i32)
        places = jnp.arange(tokens + 1, dtype=i32), slots, jnp.full(3, tokens, i32)
        args = (*decay, *places, jnp.ones(tokens, bool))
        expected = plain(qkv, b, a, states, *args, **sizes)
        got = m.ragged_gated_delta_rule_decode_only(
            qkv, b, a, states + 0, *args, **sizes, apply_silu=True
        )
        return got, expected


@case("tpu_inference", "causal conv1d", tolerance=1e-5)
def _():
    m = module("tpu_inference.kernels.causal_conv1d.causal_conv1d")
    x, state = normal(12, 256), normal(6, 3, 256, seed=1)
    weight, bias = normal(256, 1, 4, seed=2), normal(256, seed=3)
    starts, slots = (0, 1, 7, 12), (4, 2, 5)
    is_old = (True, False, True)
    out, after = [], state
    for s, slot in enumerate(slots):
        old = state[slot] if is_old[s] else jnp.zeros((3, 256))
        rows = jnp.concatenate([old, x[starts[s] : starts[s + 1]]])
        n = rows.shape[0] - 3
        out.append(sum(rows[j : n + j] * weight[:, 0, j] for j in range(4)) + bias)
        after = after.at[slot].set(rows[-3:])
    places = (starts, slots, (1, 1, 3), is_old)
    args = [jnp.asarray(a) for a in places]
    got = m.ragged_causal_conv1d(
        x + 0, state + 0, weight, bias, *args, kernel_size=4, tile_size=8
    )
    return got, (jnp.concatenate(out), after)


# --- sglang-jax ---


@case("sgl_jax", "megablox gmm")
def _():
    m = module("sgl_jax.srt.layers.gmm.megablox_gmm_kernel.gmm")
    x, w, sizes = normal(100, 128), normal(3, 128, 136, seed=1), jnp.array([33, 0, 67])
    got = m.gmm(x, w, sizes, tiling=(20, 128, 128))
    return got, grouped(x, w, sizes)


@case("sgl_jax", "ragged paged attention", tolerance=2e-2)
def _():
    base = "sgl_jax.srt.layers.attention.flash_attn_kernel"
    module(f"{base}.tuned_block_sizes").get_tpu_version = lambda: 5
    m = module(f"{base}.flash_attention")
    p = Pages()
    q, k, v = p.queries(bf16), p.keys(bf16), p.values(bf16)
    cache = normal(p.total, p.page_size, 2 * p.kv_heads, p.dim, seed=3, dtype=bf16)
    aligned = [-(-n // p.page_size) * p.page_size for n in p.kv_lens]
    cu_kv = jnp.array([0, *np.cumsum(aligned)], i32)
    args = (p.lengths, p.indices, p.starts, cu_kv, p.distribution)
    got = m.ragged_paged_attention(q, k, v, cache + 0, *args, sm_scale=0.09)
    return got[0], paged_reference(p, q, k, v, cache, cu_kv)


def paged_reference(p, q, k, v, cache, cu_kv) -> jax.Array:
    """Attention over what is in the pages and, at the end, the new tokens."""
    out, ends = [], np.cumsum(p.q_lens)
    for s, (n, length) in enumerate(zip(p.q_lens, p.kv_lens, strict=True)):
        first = int(cu_kv[s]) // p.page_size
        pages = p.indices[first : first + -(-length // p.page_size)]
        old = cache[pages].reshape(-1, p.kv_heads, 2, p.dim)[: length - n]
        rows = slice(ends[s] - n, ends[s])
        keys = jnp.concatenate([old[:, :, 0], k[rows]]).astype(f32)
        values = jnp.concatenate([old[:, :, 1], v[rows]]).astype(f32)
        share = p.heads // p.kv_heads
        keys, values = (jnp.repeat(x, share, 1) for x in (keys, values))
        scores = 0.09 * jnp.einsum("qhd,khd->hqk", q[rows].astype(f32), keys)
        seen = jnp.arange(length) <= jnp.arange(n)[:, None] + length - n
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        out.append(jnp.einsum("hqk,khd->qhd", weights, values))
    return jnp.concatenate(out)


# --- ejkernel ---


def ejkernel(name: str, function: str | None = None) -> tuple[Any, Any]:
    """A kernel and the same in plain XLA."""
    kinds = ("_pallas.tpu", "_xla")
    modules = [module(f"ejkernel.kernels.{kind}.{name}") for kind in kinds]
    mine, plain = (getattr(m, function or name) for m in modules)
    return mine, plain


@case("ejkernel", "grouped_matmul")
def _():
    m = module("ejkernel.kernels._pallas.tpu.grouped_matmul")
    x, w, sizes = normal(100, 128), normal(3, 128, 136, seed=1), jnp.array([33, 0, 67])
    got = m.grouped_matmul(x, w, sizes.astype(i32), tiling=(20, 128, 128))
    return got, grouped(x, w, sizes)


@case("ejkernel", "grouped_matmulv2")
def _():
    m = module("ejkernel.kernels._pallas.tpu.grouped_matmulv2")
    x, w, sizes = normal(100, 128), normal(3, 128, 136, seed=1), jnp.array([33, 0, 67])
    got = m.grouped_matmulv2(x, w, sizes.astype(i32), tiling=(20, 128, 128))
    return got, grouped(x, w, sizes)


@case("ejkernel", "flash_attention")
def _():
    m = module("ejkernel.kernels._pallas.tpu.flash_attention")
    q, k, v = (normal(1, 256, 2, 128, seed=s) for s in range(3))
    got = m.flash_attention(q, k, v, softmax_scale=0.09, causal=True)
    heads = [x[0].swapaxes(0, 1) for x in (0.09 * q, k, v)]
    return got[0].swapaxes(0, 1), causal(*heads)


@case("ejkernel", "fused_cross_entropy")
def _():
    mine, plain = ejkernel("fused_cross_entropy")
    logits = normal(24, 1000)
    targets = jax.random.randint(jax.random.key(1), (24,), 0, 1000)
    return mine(logits, targets), plain(logits, targets)


@case("ejkernel", "fused_kl_divergence")
def _():
    mine, plain = ejkernel("fused_kl_divergence")
    logits = normal(24, 1000), normal(24, 1000, seed=1)
    return mine(*logits), plain(*logits)


@case("ejkernel", "ragged_decode_attention")
def _():
    mine, plain = ejkernel("ragged_decode_attention")
    q = normal(3, 8, 128)
    k, v = (normal(3, 256, 2, 128, seed=s) for s in (1, 2))
    bounds = jnp.array([0, 17, 3], i32), jnp.array([200, 40, 256], i32)
    return mine(q, k, v, *bounds), plain(q, k, v, *bounds)


@case("ejkernel", "page_attention")
def _():
    mine, _ = ejkernel("page_attention")
    q = normal(3, 8, 128)
    k, v = (normal(2, 10, 16, 128, seed=s) for s in (1, 2))
    lengths = jnp.array([19, 6, 33], i32)
    tables = jnp.asarray(np.random.RandomState(0).permutation(9).reshape(3, 3), i32)
    got = mine(q, k, v, lengths, tables, pages_per_compute_block=1)
    pages = [x[:, tables].reshape(2, 3, 48, 128).swapaxes(0, 1) for x in (k, v)]
    keys, values = (jnp.repeat(x, 4, 1) for x in pages)
    scores = jnp.einsum("shd,shkd->shk", q, keys) * 128**-0.5
    seen = jnp.arange(48) < lengths[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return got, jnp.einsum("shk,shkd->shd", weights, values)


@case("ejkernel", "gated_delta_rule", tolerance=1e-3)
def _():
    mine, plain = ejkernel("gated_delta_rule")
    q, k, v = (normal(1, 128, 2, 128, seed=s) / 8 for s in range(3))
    beta = jax.nn.sigmoid(normal(1, 128, 2, seed=3))
    decay = -jnp.abs(normal(1, 128, 2, seed=4))
    options = dict(chunk_size=64)
    got = mine(q, k, v, beta, decay, **options)[0]
    return got, plain(q, k, v, beta, decay, **options)[0]


@case("ejkernel", "ragged_page_attention_v2", tolerance=2e-2)
def _():
    mine, plain = ejkernel("ragged_page_attention_v2")
    base = "ejkernel.kernels._pallas.tpu.ragged_page_attention_v2"
    module(f"{base}._utils").get_tpu_version = lambda: 5
    p = Pages()
    pages = normal(p.total, p.page_size, 2 * p.kv_heads, p.dim, seed=3)
    table = p.indices.reshape(3, p.per_seq)
    args = (p.queries(), pages, p.lengths, table, p.starts, jnp.array([3], i32))
    return mine(*args, softmax_scale=0.09), plain(*args, softmax_scale=0.09)


@case("ejkernel", "flash_mla", tolerance=1e-3)
def _():
    mine, plain = ejkernel("flash_mla")
    q, kv = normal(1, 128, 2, 128), normal(1, 128, 64, seed=1)
    w_k, w_v = normal(64, 2, 128, seed=2) / 8, normal(64, 2, 128, seed=3) / 8
    return mine(q, kv, w_k, w_v, causal=True), plain(q, kv, w_k, w_v, causal=True)


# --- MaxText ---


@case("maxtext", "ragged attention")
def _():
    m = module("maxtext.kernels.attention.ragged_attention")
    q = normal(3, 1, 8, 128)
    k, v = (normal(3, 256, 2, 128, seed=s) for s in (1, 2))
    lengths = jnp.array([200, 17, 256], i32)
    got, _, total = m.ragged_gqa(q, k, v, lengths, block_size=128)
    keys, values = (jnp.repeat(x, 4, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bqhk", q, keys)
    seen = jnp.arange(256) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return got / total, jnp.einsum("bqhk,bkhd->bqhd", weights, values)


@case("maxtext", "megablox gmm v2")
def _():
    m = module("maxtext.kernels.megablox.pallas_mosaic_tpu_v2_gmm_kernel")
    return gmm_v2(m, 104)


@case("maxtext", "megablox tgmm v2")
def _():
    return tgmm_v2(module("maxtext.kernels.megablox.pallas_mosaic_tpu_v2_tgmm_kernel"))


@case("maxtext", "splash attention")
def _():
    m = module("maxtext.kernels.attention.splash_attention_kernel")
    masks = module("jax.experimental.pallas.ops.tpu.splash_attention")
    q, k, v = (normal(2, 256, 128, seed=s) for s in range(3))
    mask = masks.MultiHeadMask([masks.CausalMask((256, 256))] * 2)
    kernel = m.make_splash_mha_single_device(mask)
    return kernel(q / 11, k, v), causal(q / 11, k, v)


# --- qwix ---


@case("qwix", "quantized matmul")
def _():
    m = module("qwix.contrib.kernels.quantized_matmul")
    x, y = (jnp.round(20 * normal(256, 256, seed=s)).astype(jnp.int8) for s in (0, 1))
    sx, sy = (jnp.abs(normal(2, 2, seed=s)) + 0.1 for s in (2, 3))
    got = m.quantized_matmul(x, sx, y, sy, bm=128, bk=128, bn=128, dtype=f32)
    scales = [jnp.repeat(jnp.repeat(s, 128, 0), 128, 1) for s in (sx, sy)]
    return got, (x * scales[0]) @ (y * scales[1])


@case("qwix", "lhs fused quantized matmul", tolerance=3e-2)
def _():
    m = module("qwix.contrib.kernels.lhs_fused_quantized_matmul")
    x = normal(256, 256)
    y = jnp.round(20 * normal(256, 256, seed=1)).astype(jnp.int8)
    sy = jnp.abs(normal(2, 2, seed=2)) + 0.1
    got = m.lhs_fused_quantized_matmul(x, y, sy, bm=128, bk=128, bn=128, sm=128)
    return got, x @ (y * jnp.repeat(jnp.repeat(sy, 128, 0), 128, 1))


# --- the table ---


def outcome(one: Case) -> str:
    """What a kernel did: right, refused (and why), or wrong (and by how much)."""
    try:
        got, expected = one.run()
        worst = max(map(_apart, jax.tree.leaves(got), jax.tree.leaves(expected)))
    except pallasite.errors.PallasError as error:
        return f"refused: {_short(str(error))}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {_short(str(error))}"
    return "right" if worst <= one.tolerance else f"WRONG by {worst:.2g}"


def in_a_process(one: Case) -> str:
    """The outcome, found by a process that can be stopped while it compiles."""
    reader, writer = os.pipe()
    child = os.fork()  # JAX has no device and no threads here yet
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        os.write(writer, outcome(one).encode())
        os._exit(0)
    os.close(writer)
    text = os.read(reader, 1 << 16).decode()  # empty when the process died
    _, status, used = os.wait4(child, 0)
    os.close(reader)
    print(f"{used.ru_utime + used.ru_stime:.0f} s", file=sys.stderr, flush=True)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return f"failed: more than {SECONDS} seconds"
    return text or "failed: the process died"


def _apart(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    size = max(1.0, float(np.abs(b).max(initial=0)))
    worst = float(np.abs(a - b).max(initial=0)) / size
    return worst if worst == worst else float("inf")


def _short(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line.replace("|", "/")[:110]


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(VERSIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def results(wanted: list[str]) -> dict[tuple[str, str], str]:
    """The rows of the table by package and kernel, printed as they come."""
    found: dict[tuple[str, str], str] = {}

    def add(package: str, kernel: str, result: str) -> None:
        shown = f"{DISTRIBUTIONS[package]} {version(package)}"
        found[package, kernel] = f"| {shown} | {kernel} | {result} |"
        print(found[package, kernel], flush=True)

    for package, kernel in order():
        is_wanted = not wanted or any(w in f"{package} {kernel}" for w in wanted)
        if version(package) is None or not is_wanted:
            continue
        needs = ELSEWHERE.get((package, kernel))
        if needs is not None:
            add(package, kernel, f"not applicable: {needs}")
            continue
        (one,) = (c for c in CASES if (c.package, c.kernel) == (package, kernel))
        add(package, kernel, in_a_process(one))
    return found


def order() -> list[tuple[str, str]]:
    keys = [(c.package, c.kernel) for c in CASES] + list(ELSEWHERE)
    return sorted(keys, key=lambda key: list(DISTRIBUTIONS).index(key[0]))


def write(found: dict[tuple[str, str], str]) -> None:
    """Renew the rows in the page; those of kernels that did not run stay."""
    before, rest = PAGE.read_text().split(BEGIN)
    table, after = rest.split(END)
    kept = {}
    for line in table.splitlines():
        shown, kernel = [*(cell.strip() for cell in line.split("|")[1:3]), "", ""][:2]
        for package, name in DISTRIBUTIONS.items():
            if shown.startswith(name + " "):
                kept[package, kernel] = line
    rows = [{**kept, **found}.get(key) for key in order()]
    lines = [*HEAD, *(row for row in rows if row is not None)]
    PAGE.write_text(before + "\n".join([BEGIN, *lines, END]) + after)


def main() -> None:
    arguments = sys.argv[1:]
    warnings.filterwarnings("ignore")
    for package, name in DISTRIBUTIONS.items():
        if version(package) is None:
            print(f"{name} is not installed: skipped", file=sys.stderr)
    stand_in_for_serving()
    print("\n".join(HEAD))
    found = results([a for a in arguments if a != "--write"])
    if "--write" in arguments:
        write(found)


if __name__ == "__main__":
    main()
