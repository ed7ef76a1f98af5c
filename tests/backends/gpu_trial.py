"""Kernels of the kinds people write for GPUs, at the sizes they use, against `jnp`.

`python -m tests.backends.gpu_trial` runs all of them by the default backend and prints
a line for each; names on the command line select some. `test_gpu_trial.py` runs them as
tests. The zoo has more kinds of kernels; these are large, of odd shapes, and use the
public names only.
"""

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import FallbackWarning

f32, bf16, f16, i32 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32
HIGHEST = lax.Precision.HIGHEST


@dataclass(frozen=True)
class Trial:
    """A kernel's call, what it should compute, arrays for both, the error allowed."""

    run: Callable[..., Any]
    reference: Callable[..., Any]
    arrays: tuple[Any, ...]
    error: float


TRIALS: dict[str, Callable[[], Trial]] = {}


def trial(make: Callable[[], Trial]) -> Callable[[], Trial]:
    TRIALS[make.__name__] = make
    return make


def normal(*shape: int, dtype: Any = f32, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, f32).astype(dtype)


def like(x: Any, *shape: int, dtype: Any = None) -> Any:
    return jax.ShapeDtypeStruct(shape or x.shape, dtype or x.dtype)


def rows_call(kernel: Any, x: Any, rows: int, *more: Any, dtype: Any = None) -> Any:
    """Blocks of whole rows; `more` are vectors for every row."""
    width = x.shape[-1]
    block = pl.BlockSpec((rows, width), lambda i: (i, 0))
    whole = [pl.BlockSpec((1, width), lambda i: (0, 0)) for _ in more]
    return pl.pallas_call(
        kernel,
        out_shape=like(x, dtype=dtype),
        grid=(pl.cdiv(x.shape[0], rows),),
        in_specs=[block, *whole],
        out_specs=block,
    )(x, *(m[None] for m in more))


# --- rows ---


@trial
def layer_norm() -> Trial:
    def kernel(x_ref, g_ref, b_ref, o_ref):
        x = x_ref[...].astype(f32)
        mean = x.mean(axis=-1, keepdims=True)
        var = jnp.square(x - mean).mean(axis=-1, keepdims=True)
        y = (x - mean) * lax.rsqrt(var + 1e-5) * g_ref[...] + b_ref[...]
        o_ref[...] = y.astype(o_ref.dtype)

    def reference(x, g, b):
        x = x.astype(f32)
        y = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return (y * g + b).astype(bf16)

    arrays = normal(2049, 5120, dtype=bf16), normal(5120), normal(5120, seed=1)
    return Trial(partial(_layer_norm, kernel), reference, arrays, 2e-2)


def _layer_norm(kernel, x, g, b):
    return rows_call(kernel, x, 4, g, b)


@trial
def rms_norm_residual() -> Trial:
    def kernel(x_ref, r_ref, g_ref, o_ref, s_ref):
        x = x_ref[...].astype(f32) + r_ref[...].astype(f32)
        s_ref[...] = x.astype(s_ref.dtype)
        scale = lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)
        o_ref[...] = (x * scale * g_ref[...]).astype(o_ref.dtype)

    def run(x, r, g):
        block = pl.BlockSpec((2, 4100), lambda i: (i, 0))
        vector = pl.BlockSpec((1, 4100), lambda i: (0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=[like(x), like(x)],
            grid=(pl.cdiv(x.shape[0], 2),),
            in_specs=[block, block, vector],
            out_specs=[block, block],
        )(x, r, g[None])

    def reference(x, r, g):
        s = x.astype(f32) + r.astype(f32)
        y = s * lax.rsqrt(jnp.square(s).mean(-1, keepdims=True) + 1e-6) * g
        return y.astype(x.dtype), s.astype(x.dtype)

    arrays = normal(1001, 4100, dtype=f16), normal(1001, 4100, dtype=f16, seed=1)
    return Trial(run, reference, (*arrays, normal(4100)), 5e-3)


@trial
def softmax_of_a_vocabulary() -> Trial:
    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(f32)
        e = jnp.exp(x - x.max(axis=-1, keepdims=True))
        o_ref[...] = (e / e.sum(axis=-1, keepdims=True)).astype(o_ref.dtype)

    x = normal(130, 50257, dtype=bf16)
    reference = lambda x: jax.nn.softmax(x.astype(f32)).astype(bf16)
    return Trial(lambda x: rows_call(kernel, x, 1), reference, (x,), 2e-2)


@trial
def cross_entropy_of_logits() -> Trial:
    """The logsumexp of long rows in blocks, and the label's logit."""
    vocabulary, block = 32003, 2048

    def kernel(x_ref, label_ref, o_ref, top, total, chosen):
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _():
            top[...] = jnp.full_like(top, -jnp.inf)
            total[...] = jnp.zeros_like(total)
            chosen[...] = jnp.zeros_like(chosen)

        x = x_ref[...].astype(f32)
        column = step * block + lax.broadcasted_iota(i32, x.shape, 1)
        x = jnp.where(column < vocabulary, x, -jnp.inf)
        old = top[...]
        new = jnp.maximum(old, x.max(axis=1))
        total[...] = total[...] * jnp.exp(old - new) + jnp.exp(x - new[:, None]).sum(1)
        top[...] = new
        is_label = column == label_ref[...][:, None]
        chosen[...] += jnp.where(is_label, x, 0.0).sum(axis=1)

        @pl.when(step == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = top[...] + jnp.log(total[...]) - chosen[...]

    def run(x, label):
        rows = 16
        return pl.pallas_call(
            kernel,
            out_shape=like(x, x.shape[0], dtype=f32),
            grid=(pl.cdiv(x.shape[0], rows), pl.cdiv(vocabulary, block)),
            in_specs=[
                pl.BlockSpec((rows, block), lambda i, j: (i, j)),
                pl.BlockSpec((rows,), lambda i, j: (i,)),
            ],
            out_specs=pl.BlockSpec((rows,), lambda i, j: (i,)),
            scratch_shapes=[pltpu.VMEM((rows,), f32)] * 3,
        )(x, label)

    def reference(x, label):
        logs = jax.nn.log_softmax(x.astype(f32))
        return -jnp.take_along_axis(logs, label[:, None], 1)[:, 0]

    label = jax.random.randint(jax.random.key(1), (1000,), 0, vocabulary)
    return Trial(run, reference, (normal(1000, vocabulary, dtype=bf16), label), 1e-3)


@trial
def dropout_and_bias() -> Trial:
    """Random bits from a hash of the position."""

    def bits(row, column):
        x = (row * 100003 + column).astype(jnp.uint32)
        for factor in (0x85EBCA6B, 0xC2B2AE35):
            x = (x ^ (x >> 15)) * jnp.uint32(factor)
        return x >> 16

    def kernel(x_ref, b_ref, o_ref):
        shape = x_ref.shape
        row = pl.program_id(0) * shape[0] + lax.broadcasted_iota(i32, shape, 0)
        keep = bits(row, lax.broadcasted_iota(i32, shape, 1)) % 10 != 0
        o_ref[...] = jnp.where(keep, (x_ref[...] + b_ref[...]) / 0.9, 0.0)

    def reference(x, b):
        row, column = (lax.broadcasted_iota(i32, x.shape, d) for d in (0, 1))
        return jnp.where(bits(row, column) % 10 != 0, (x + b) / 0.9, 0.0)

    arrays = normal(333, 3000), normal(3000, seed=1)
    return Trial(lambda x, b: rows_call(kernel, x, 8, b), reference, arrays, 1e-5)


@trial
def swiglu() -> Trial:
    def kernel(x_ref, o_ref):
        a, b = x_ref[:, 0, :].astype(f32), x_ref[:, 1, :].astype(f32)
        o_ref[...] = (a * jax.nn.sigmoid(a) * b).astype(o_ref.dtype)

    def run(x):
        return pl.pallas_call(
            kernel,
            out_shape=like(x, x.shape[0], x.shape[2]),
            grid=(pl.cdiv(x.shape[0], 8), pl.cdiv(x.shape[2], 1024)),
            in_specs=[pl.BlockSpec((8, 2, 1024), lambda i, j: (i, 0, j))],
            out_specs=pl.BlockSpec((8, 1024), lambda i, j: (i, j)),
        )(x)

    def reference(x):
        a, b = x[:, 0].astype(f32), x[:, 1].astype(f32)
        return (a * jax.nn.sigmoid(a) * b).astype(x.dtype)

    return Trial(run, reference, (normal(777, 2, 5504, dtype=bf16),), 2e-2)


@trial
def rotary() -> Trial:
    """Halves of each head are turned against each other."""

    def kernel(x_ref, cos_ref, sin_ref, o_ref):
        x = x_ref[...].astype(f32)
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        cos, sin = cos_ref[...][:, None, :], sin_ref[...][:, None, :]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        o_ref[...] = turned.astype(o_ref.dtype)

    def run(x, cos, sin):
        length, heads, width = x.shape
        spec = pl.BlockSpec((32, heads, width), lambda i: (i, 0, 0))
        angle = pl.BlockSpec((32, width // 2), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=like(x),
            grid=(pl.cdiv(length, 32),),
            in_specs=[spec, angle, angle],
            out_specs=spec,
        )(x, cos, sin)

    def reference(x, cos, sin):
        a, b = jnp.split(x.astype(f32), 2, axis=-1)
        cos, sin = cos[:, None], sin[:, None]
        both = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return both.astype(x.dtype)

    angles = jnp.arange(1000.0)[:, None] * 10000.0 ** -jnp.linspace(0, 1, 64)
    arrays = normal(1000, 8, 128, dtype=bf16), jnp.cos(angles), jnp.sin(angles)
    return Trial(run, reference, arrays, 2e-2)


@trial
def rotary_of_pairs() -> Trial:
    """Neighbours are turned: strided loads and stores."""

    def kernel(x_ref, o_ref):
        a, b = x_ref[:, pl.ds(0, 64, stride=2)], x_ref[:, pl.ds(1, 64, stride=2)]
        o_ref[:, pl.ds(0, 64, stride=2)] = a * 0.6 - b * 0.8
        o_ref[:, pl.ds(1, 64, stride=2)] = b * 0.6 + a * 0.8

    def reference(x):
        a, b = x[:, ::2], x[:, 1::2]
        return jnp.stack([a * 0.6 - b * 0.8, b * 0.6 + a * 0.8], -1).reshape(x.shape)

    x = normal(1111, 128)
    return Trial(lambda x: rows_call(kernel, x, 32), reference, (x,), 1e-5)


@trial
def quantise_rows() -> Trial:
    def kernel(x_ref, q_ref, s_ref):
        x = x_ref[...].astype(f32)
        scale = jnp.maximum(jnp.abs(x).max(axis=-1, keepdims=True), 1e-6) / 127
        q_ref[...] = jnp.round(x / scale).astype(jnp.int8)
        s_ref[...] = scale

    def run(x):
        block = pl.BlockSpec((4, x.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=[like(x, dtype=jnp.int8), like(x, x.shape[0], 1, dtype=f32)],
            grid=(pl.cdiv(x.shape[0], 4),),
            in_specs=[block],
            out_specs=[block, pl.BlockSpec((4, 1), lambda i: (i, 0))],
        )(x)

    def reference(x):
        x = x.astype(f32)
        scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-6) / 127
        return jnp.round(x / scale).astype(jnp.int8), scale

    return Trial(run, reference, (normal(515, 2880, dtype=bf16),), 1.01)


# --- products ---


def matmul_call(kernel, x, y, block, *, out, more=(), scratch=f32):
    (m, k), n = x.shape, y.shape[1]
    bm, bn, bk = block
    vector = pl.BlockSpec((1, bn), lambda i, j, k: (0, j))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), out),
        grid=(pl.cdiv(m, bm), pl.cdiv(n, bn), pl.cdiv(k, bk)),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
            *(vector for _ in more),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((bm, bn), scratch)],
    )(x, y, *(v[None] for v in more))


def product_kernel(finish, depth=None):
    """A sum over steps, then `finish(sum, *vectors)`."""

    def kernel(x_ref, y_ref, *refs):
        *vectors, o_ref, acc = refs
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        x = x_ref[...]
        y = y_ref[...].astype(x.dtype)
        if depth is not None:  # the last block hangs over
            inside = depth - step * x.shape[1]
            x = jnp.where(lax.broadcasted_iota(i32, x.shape, 1) < inside, x, 0)
            y = jnp.where(lax.broadcasted_iota(i32, y.shape, 0) < inside, y, 0)
        acc[...] += jnp.dot(x, y, preferred_element_type=acc.dtype)

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            done = finish(acc[...], *(v[...] for v in vectors))
            o_ref[...] = done.astype(o_ref.dtype)

    return kernel


def product(x, y):
    return jnp.dot(x, y, preferred_element_type=f32, precision=HIGHEST)


@trial
def matmul_bias_relu() -> Trial:
    kernel = product_kernel(lambda s, b: jax.nn.relu(s + b.astype(f32)))
    run = lambda x, y, b: matmul_call(kernel, x, y, (128, 128, 64), out=bf16, more=(b,))
    reference = lambda x, y, b: jax.nn.relu(product(x, y) + b).astype(bf16)
    arrays = normal(1000, 768, dtype=bf16), normal(768, 3080, dtype=bf16, seed=1)
    return Trial(run, reference, (*arrays, normal(3080, dtype=bf16, seed=2)), 2e-2)


@trial
def matmul_of_odd_sizes() -> Trial:
    kernel = product_kernel(lambda s: s, depth=777)
    run = lambda x, y: matmul_call(kernel, x, y, (128, 128, 64), out=f32)
    arrays = normal(501, 777, dtype=bf16), normal(777, 333, dtype=bf16, seed=1)
    return Trial(run, product, arrays, 1e-2)


@trial
def matmul_f32() -> Trial:
    kernel = product_kernel(lambda s: s)
    run = lambda x, y: matmul_call(kernel, x, y, (64, 64, 32), out=f32)
    return Trial(run, product, (normal(512, 512), normal(512, 512, seed=1)), 0.3)


@trial
def matmul_large_blocks() -> Trial:
    kernel = product_kernel(jnp.tanh)
    run = lambda x, y: matmul_call(kernel, x, y, (256, 512, 256), out=f16)
    reference = lambda x, y: jnp.tanh(product(x, y)).astype(f16)
    arrays = normal(1024, 1024, dtype=f16), normal(1024, 1024, dtype=f16, seed=1)
    return Trial(run, reference, arrays, 2e-2)


@trial
def matmul_with_int8_weights() -> Trial:
    kernel = product_kernel(lambda s, scale: s * scale)
    run = lambda x, y, s: matmul_call(kernel, x, y, (64, 128, 128), out=bf16, more=(s,))
    reference = lambda x, y, s: (product(x, y.astype(bf16)) * s).astype(bf16)
    weights = jax.random.randint(jax.random.key(1), (1024, 640), -127, 128, jnp.int8)
    arrays = normal(300, 1024, dtype=bf16), weights, normal(640, seed=2)
    return Trial(run, reference, arrays, 2e-2)


@trial
def matmul_int8() -> Trial:
    kernel = product_kernel(lambda s: s)
    run = lambda x, y: matmul_call(kernel, x, y, (128, 128, 128), out=i32, scratch=i32)
    reference = lambda x, y: jnp.dot(x, y, preferred_element_type=i32)
    draw = lambda *s, seed: jax.random.randint(
        jax.random.key(seed), s, -128, 128, jnp.int8
    )
    arrays = draw(384, 512, seed=0), draw(512, 256, seed=1)
    return Trial(run, reference, arrays, 0)


@trial
def matmul_f8() -> Trial:
    f8 = jnp.float8_e4m3fn

    def kernel(x_ref, y_ref, o_ref):
        dims = (((1,), (1,)), ((), ()))
        o_ref[...] = lax.dot_general(
            x_ref[...], y_ref[...], dims, preferred_element_type=f32
        ).astype(o_ref.dtype)

    def run(x, y):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[0]), bf16),
            grid=(x.shape[0] // 128, y.shape[0] // 128),
            in_specs=[
                pl.BlockSpec((128, x.shape[1]), lambda i, j: (i, 0)),
                pl.BlockSpec((128, x.shape[1]), lambda i, j: (j, 0)),
            ],
            out_specs=pl.BlockSpec((128, 128), lambda i, j: (i, j)),
        )(x, y)

    reference = lambda x, y: product(x.astype(f32), y.astype(f32).T).astype(bf16)
    arrays = normal(512, 256, dtype=f8), normal(384, 256, dtype=f8, seed=1)
    return Trial(run, reference, arrays, 2e-2)


@trial
def matmul_int4_weights() -> Trial:
    """Two numbers of four bits in each byte."""

    def kernel(x_ref, w_ref, s_ref, o_ref):
        packed = w_ref[...]
        low = ((packed & 15) ^ 8).astype(jnp.int8) - 8
        high = ((packed >> 4) ^ 8).astype(jnp.int8) - 8
        half = x_ref.shape[1] // 2
        sums = jnp.dot(x_ref[:, :half], low.astype(bf16), preferred_element_type=f32)
        sums += jnp.dot(x_ref[:, half:], high.astype(bf16), preferred_element_type=f32)
        o_ref[...] = (sums * s_ref[...]).astype(o_ref.dtype)

    def run(x, w, s):
        m, n = x.shape[0], w.shape[1]
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((m, n), bf16),
            grid=(pl.cdiv(m, 32), pl.cdiv(n, 64)),
            in_specs=[
                pl.BlockSpec((32, x.shape[1]), lambda i, j: (i, 0)),
                pl.BlockSpec((w.shape[0], 64), lambda i, j: (0, j)),
                pl.BlockSpec((1, 64), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((32, 64), lambda i, j: (i, j)),
        )(x, w, s[None])

    def reference(x, w, s):
        low = ((w & 15) ^ 8).astype(jnp.int8) - 8
        high = ((w >> 4) ^ 8).astype(jnp.int8) - 8
        both = jnp.concatenate([low, high]).astype(bf16)
        return (product(x, both) * s).astype(bf16)

    w = jax.random.randint(jax.random.key(1), (256, 320), 0, 256).astype(jnp.uint8)
    return Trial(run, reference, (normal(100, 512, dtype=bf16), w, normal(320)), 2e-2)


@trial
def batched_matmul() -> Trial:
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=f32).astype(
            o_ref.dtype
        )

    def run(x, y):
        b, m, k = x.shape
        n = y.shape[2]
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((b, m, n), x.dtype),
            grid=(b, pl.cdiv(m, 64), pl.cdiv(n, 64)),
            in_specs=[
                pl.BlockSpec((None, 64, k), lambda b, i, j: (b, i, 0)),
                pl.BlockSpec((None, k, 64), lambda b, i, j: (b, 0, j)),
            ],
            out_specs=pl.BlockSpec((None, 64, 64), lambda b, i, j: (b, i, j)),
        )(x, y)

    reference = lambda x, y: product(x, y) if x.ndim == 2 else jnp.einsum(
        "bmk,bkn->bmn", x, y, preferred_element_type=f32, precision=HIGHEST
    ).astype(x.dtype)  # fmt: skip
    arrays = normal(24, 200, 96, dtype=f16), normal(24, 96, 136, dtype=f16, seed=1)
    return Trial(run, reference, arrays, 1e-2)


@trial
def matvec_decode() -> Trial:
    def kernel(w_ref, x_ref, o_ref):
        o_ref[...] = (w_ref[...].astype(f32) * x_ref[...].astype(f32)).sum(axis=1)

    def run(w, x):
        n, k = w.shape
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((n,), f32),
            grid=(pl.cdiv(n, 8),),
            in_specs=[
                pl.BlockSpec((8, k), lambda i: (i, 0)),
                pl.BlockSpec((1, k), lambda i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((8,), lambda i: (i,)),
        )(w, x[None])

    reference = lambda w, x: (w.astype(f32) * x.astype(f32)).sum(1)
    arrays = normal(4099, 4096, dtype=bf16), normal(4096, dtype=bf16, seed=1)
    return Trial(run, reference, arrays, 2e-2)


@trial
def grouped_matmul() -> Trial:
    """MoE: each block of tokens has its expert, which scalar prefetch tells."""

    def kernel(expert_ref, x_ref, w_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=f32).astype(
            o_ref.dtype
        )

    def run(expert, x, w):
        tokens, k = x.shape
        n = w.shape[2]
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((tokens, n), x.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(tokens // 128, n // 128),
                in_specs=[
                    pl.BlockSpec((128, k), lambda i, j, e: (i, 0)),
                    pl.BlockSpec((None, k, 128), lambda i, j, e: (e[i], 0, j)),
                ],
                out_specs=pl.BlockSpec((128, 128), lambda i, j, e: (i, j)),
            ),
        )(expert, x, w)

    def reference(expert, x, w):
        blocks = x.reshape(-1, 128, x.shape[1])
        out = jnp.einsum(
            "bmk,bkn->bmn", blocks, w[expert], preferred_element_type=f32,
            precision=HIGHEST,
        )  # fmt: skip
        return out.reshape(x.shape[0], -1).astype(x.dtype)

    expert = jnp.array([0, 0, 3, 1, 7, 7, 2, 5], i32)
    arrays = normal(1024, 256, dtype=bf16), normal(8, 256, 512, dtype=bf16, seed=1)
    return Trial(run, reference, (expert, *arrays), 2e-2)


@trial
def ragged_matmul() -> Trial:
    """Groups of rows of any length: each group's rows are masked in its blocks."""

    def kernel(starts_ref, x_ref, w_ref, o_ref):
        group, row = pl.program_id(1), pl.program_id(0) * x_ref.shape[0]
        rows = row + lax.broadcasted_iota(i32, (x_ref.shape[0], 1), 0)
        first, last = starts_ref[group], starts_ref[group + 1]

        @pl.when(group == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        @pl.when((first < row + x_ref.shape[0]) & (last > row))
        def _():
            got = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=f32)
            own = (rows >= first) & (rows < last)
            o_ref[...] = jnp.where(own, got, o_ref[...])

    def run(starts, x, w):
        tokens, k = x.shape
        groups, _, n = w.shape
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((tokens, n), f32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(pl.cdiv(tokens, 64), groups),
                in_specs=[
                    pl.BlockSpec((64, k), lambda i, g, s: (i, 0)),
                    pl.BlockSpec((None, k, n), lambda i, g, s: (g, 0, 0)),
                ],
                out_specs=pl.BlockSpec((64, n), lambda i, g, s: (i, 0)),
            ),
        )(starts, x, w)

    def reference(starts, x, w):
        group = jnp.searchsorted(starts, jnp.arange(x.shape[0]), side="right") - 1
        return jnp.einsum(
            "mk,mkn->mn", x, w[group], preferred_element_type=f32, precision=HIGHEST
        )

    starts = jnp.array([0, 10, 10, 100, 101, 300, 500], i32)
    arrays = normal(500, 128, dtype=bf16), normal(6, 128, 128, dtype=bf16, seed=1)
    return Trial(run, reference, (starts, *arrays), 1e-2)


@trial
def split_k() -> Trial:
    """Parts of the sum are added by atomics."""

    def kernel(x_ref, y_ref, zero_ref, o_ref):
        part = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=f32)
        i, j = pl.program_id(0) * 64, pl.program_id(1) * 64
        pl.atomic_add(o_ref, (pl.ds(i, 64), pl.ds(j, 64)), part)

    def run(x, y):
        m, k = x.shape
        n = y.shape[1]
        whole = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((m, n), f32),
            grid=(m // 64, n // 64, k // 256),
            in_specs=[
                pl.BlockSpec((64, 256), lambda i, j, k: (i, k)),
                pl.BlockSpec((256, 64), lambda i, j, k: (k, j)),
                whole,
            ],
            out_specs=whole,
            input_output_aliases={2: 0},
        )(x, y, jnp.zeros((m, n), f32))

    arrays = normal(128, 4096, dtype=bf16), normal(4096, 128, dtype=bf16, seed=1)
    return Trial(run, product, arrays, 2e-2)


# --- attention ---


def attention_reference(q, k, v, bias=0.0, window=None, causal=True, cap=None):
    scale = q.shape[-1] ** -0.5
    s = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=f32) * scale
    s = s if cap is None else cap * jnp.tanh(s / cap)
    s = s + bias
    row, column = (lax.broadcasted_iota(i32, s.shape, d) for d in (1, 2))
    seen = column <= row if causal else column >= 0
    if window is not None:
        seen &= row - column < window
    p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf))
    return jnp.einsum("hqk,hkd->hqd", p, v.astype(f32)).astype(q.dtype)


def flash(q, k, v, *more, block=(128, 128), edit=None, causal=True, group=1):
    """Softmax over steps; `edit(scores, rows, columns, *blocks)` changes scores."""
    (heads, length, width), keys = q.shape, k.shape[1]
    bq, bk = block

    def kernel(q_ref, k_ref, v_ref, *refs):
        *extra, o_ref, top, total, acc = refs
        i, j = pl.program_id(1), pl.program_id(2)

        @pl.when(j == 0)
        def _():
            top[...] = jnp.full_like(top, -1e30)
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

        def step():
            dims = (((1,), (1,)), ((), ()))
            s = lax.dot_general(
                q_ref[...], k_ref[...], dims, preferred_element_type=f32
            )
            s = s * width**-0.5
            rows = i * bq + lax.broadcasted_iota(i32, s.shape, 0)
            columns = j * bk + lax.broadcasted_iota(i32, s.shape, 1)
            if edit is not None:
                s = edit(s, rows, columns, *(e[...] for e in extra))
            seen = columns < keys
            if causal:
                seen &= columns <= rows
            s = jnp.where(seen, s, -1e30)
            old = top[...]
            new = jnp.maximum(old, s.max(axis=1, keepdims=True))
            p = jnp.exp(s - new)
            scale = jnp.exp(old - new)
            total[...] = total[...] * scale + p.sum(axis=1, keepdims=True)
            v = v_ref[...]
            if keys % bk:
                inside = j * bk + lax.broadcasted_iota(i32, v.shape, 0) < keys
                v = jnp.where(inside, v, 0)
            part = jnp.dot(p.astype(v.dtype), v, preferred_element_type=f32)
            acc[...] = acc[...] * scale + part
            top[...] = new

        if causal:
            pl.when(j * bk < (i + 1) * bq)(step)
        else:
            step()

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = (acc[...] / total[...]).astype(o_ref.dtype)

    own = pl.BlockSpec((None, bq, width), lambda h, i, j: (h, i, 0))
    other = pl.BlockSpec((None, bk, width), lambda h, i, j: (h // group, j, 0))
    table = pl.BlockSpec((None, bq, bk), lambda h, i, j: (h, i, j))
    column = pltpu.VMEM((bq, 1), f32)
    return pl.pallas_call(
        kernel,
        out_shape=like(q),
        grid=(heads, pl.cdiv(length, bq), pl.cdiv(keys, bk)),
        in_specs=[own, other, other, *(table for _ in more)],
        out_specs=own,
        scratch_shapes=[column, column, pltpu.VMEM((bq, width), f32)],
    )(q, k, v, *more)


def heads(count, length, width, dtype=bf16, keys=None):
    shapes = [(count, length, width)] + [(count, keys or length, width)] * 2
    return tuple(normal(*s, dtype=dtype, seed=n) for n, s in enumerate(shapes))


@trial
def attention_causal() -> Trial:
    return Trial(flash, attention_reference, heads(4, 1024, 128), 2e-2)


@trial
def attention_odd_length() -> Trial:
    run = partial(flash, causal=False)
    reference = partial(attention_reference, causal=False)
    return Trial(run, reference, heads(3, 777, 64, keys=901), 2e-2)


@trial
def attention_small_blocks_f16() -> Trial:
    run = partial(flash, block=(32, 64))
    return Trial(run, attention_reference, heads(2, 300, 80, dtype=f16), 1e-2)


@trial
def attention_with_bias() -> Trial:
    run = partial(flash, edit=lambda s, r, c, b: s + b.astype(f32), causal=False)
    reference = partial(attention_reference, causal=False)
    bias = normal(2, 512, 512, dtype=bf16, seed=9)
    return Trial(run, reference, (*heads(2, 512, 64), bias), 2e-2)


@trial
def attention_alibi() -> Trial:
    edit = lambda s, rows, columns: s - 0.1 * jnp.abs(rows - columns)
    distance = 0.1 * jnp.abs(jnp.arange(500)[:, None] - jnp.arange(500))
    reference = lambda q, k, v: attention_reference(q, k, v, bias=-distance)
    return Trial(partial(flash, edit=edit), reference, heads(2, 500, 128), 2e-2)


@trial
def attention_soft_cap_window() -> Trial:
    def edit(s, rows, columns):
        return jnp.where(rows - columns < 100, 30 * jnp.tanh(s / 30), -1e30)

    reference = partial(attention_reference, cap=30.0, window=100)
    return Trial(partial(flash, edit=edit), reference, heads(2, 640, 64), 2e-2)


@trial
def attention_grouped_queries() -> Trial:
    q, k, v = heads(8, 512, 128)

    def reference(q, k, v):
        return attention_reference(q, *(jnp.repeat(x, 4, axis=0) for x in (k, v)))

    return Trial(partial(flash, group=4), reference, (q, k[:2], v[:2]), 2e-2)


@trial
def attention_f32() -> Trial:
    run = partial(flash, block=(64, 64), causal=False)
    reference = partial(attention_reference, causal=False)
    return Trial(run, reference, heads(2, 256, 64, dtype=f32), 1e-2)


@trial
def attention_gradient() -> Trial:
    loss = lambda f: lambda *x: jnp.sin(f(*x).astype(f32)).sum()
    run = jax.grad(loss(partial(flash, block=(64, 64))), (0, 1, 2))
    reference = jax.grad(loss(attention_reference), (0, 1, 2))
    return Trial(run, reference, heads(2, 256, 64), 6e-2)


@trial
def paged_decode() -> Trial:
    """One query per sequence over pages that a table names."""
    page, width, pages = 16, 128, 12

    def kernel(table_ref, lengths_ref, q_ref, k_ref, v_ref, o_ref, top, total, acc):
        b, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j == 0)
        def _():
            top[...] = jnp.full_like(top, -1e30)
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

        @pl.when(j * page < lengths_ref[b])
        def _():
            q, k = q_ref[...].astype(f32), k_ref[...].astype(f32)
            s = (q * k).sum(axis=1, keepdims=True) * width**-0.5
            at = j * page + lax.broadcasted_iota(i32, s.shape, 0)
            s = jnp.where(at < lengths_ref[b], s, -1e30)
            old = top[...]
            new = jnp.maximum(old, s.max(axis=0, keepdims=True))
            p, scale = jnp.exp(s - new), jnp.exp(old - new)
            total[...] = total[...] * scale + p.sum(axis=0, keepdims=True)
            part = (p * v_ref[...].astype(f32)).sum(axis=0, keepdims=True)
            acc[...] = acc[...] * scale + part
            top[...] = new

        @pl.when(j == pages - 1)
        def _():
            o_ref[...] = (acc[...] / total[...]).astype(o_ref.dtype)

    def run(table, lengths, q, k, v):
        one = pl.BlockSpec((None, 1, width), lambda b, j, t, n: (b, 0, 0))
        block = pl.BlockSpec((None, page, width), lambda b, j, t, n: (t[b, j], 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=like(q),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(q.shape[0], pages),
                in_specs=[one, block, block],
                out_specs=one,
                scratch_shapes=[
                    pltpu.VMEM((1, 1), f32),
                    pltpu.VMEM((1, 1), f32),
                    pltpu.VMEM((1, width), f32),
                ],
            ),
        )(table, lengths, q, k, v)

    def reference(table, lengths, q, k, v):
        keys, values = (x[table].reshape(len(q), -1, width).astype(f32) for x in (k, v))
        s = jnp.einsum("bd,bkd->bk", q[:, 0].astype(f32), keys) * width**-0.5
        s = jnp.where(jnp.arange(pages * page) < lengths[:, None], s, -jnp.inf)
        out = jnp.einsum("bk,bkd->bd", jax.nn.softmax(s), values)
        return out[:, None].astype(q.dtype)

    table = jax.random.randint(jax.random.key(5), (9, pages), 0, 100)
    lengths = jnp.array([1, 16, 17, 100, 192, 191, 33, 50, 5], i32)
    arrays = (
        normal(9, 1, width, dtype=bf16),
        *(normal(100, page, width, dtype=bf16, seed=n) for n in (1, 2)),
    )
    return Trial(run, reference, (table, lengths, *arrays), 2e-2)


# --- memory ---


@trial
def embedding() -> Trial:
    def kernel(index_ref, table_ref, o_ref):
        o_ref[...] = table_ref[index_ref[...], :]

    def run(index, table):
        count, width = index.shape[0], table.shape[1]
        return pl.pallas_call(
            kernel,
            out_shape=like(table, count, width),
            grid=(pl.cdiv(count, 16),),
            in_specs=[
                pl.BlockSpec((16,), lambda i: (i,)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((16, width), lambda i: (i, 0)),
        )(index, table)

    index = jax.random.randint(jax.random.key(0), (1001,), 0, 5000)
    table = normal(5000, 768, dtype=bf16)
    return Trial(run, lambda i, t: t[i], (index, table), 0)


@trial
def histogram() -> Trial:
    def kernel(x_ref, zero_ref, o_ref):
        x = x_ref[...]
        pl.atomic_add(o_ref, (x,), jnp.ones(x.shape, i32), mask=x >= 0)

    def run(x):
        whole = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((256,), i32),
            grid=(pl.cdiv(x.shape[0], 1024),),
            in_specs=[pl.BlockSpec((1024,), lambda i: (i,), fill=-1), whole],
            out_specs=whole,
            input_output_aliases={1: 0},
        )(x, jnp.zeros(256, i32))

    x = jax.random.randint(jax.random.key(0), (100_001,), 0, 256)
    return Trial(run, lambda x: jnp.bincount(x, length=256), (x,), 0)


@trial
def scatter_add_rows() -> Trial:
    """Gradients of an embedding, added by atomics."""

    def kernel(index_ref, g_ref, zero_ref, o_ref):
        def add(n, _):
            pl.atomic_add(o_ref, (index_ref[n], slice(None)), g_ref[n, :])

        lax.fori_loop(0, index_ref.shape[0], add, None)

    def run(index, g):
        width = g.shape[1]
        whole = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((300, width), f32),
            grid=(g.shape[0] // 8,),
            in_specs=[
                pl.BlockSpec((8,), lambda i: (i,)),
                pl.BlockSpec((8, width), lambda i: (i, 0)),
                whole,
            ],
            out_specs=whole,
            input_output_aliases={2: 0},
        )(index, g, jnp.zeros((300, width), f32))

    reference = lambda i, g: jnp.zeros((300, g.shape[1]), f32).at[i].add(g)
    index = jax.random.randint(jax.random.key(0), (2000,), 0, 300)
    return Trial(run, reference, (index, normal(2000, 256)), 1e-3)


@trial
def top_k() -> Trial:
    def kernel(x_ref, v_ref, i_ref):
        v_ref[...], i_ref[...] = lax.top_k(x_ref[...], 8)

    def run(x):
        rows, width = x.shape
        out = pl.BlockSpec((4, 8), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=[like(x, rows, 8), like(x, rows, 8, dtype=i32)],
            grid=(pl.cdiv(rows, 4),),
            in_specs=[pl.BlockSpec((4, width), lambda i: (i, 0))],
            out_specs=[out, out],
        )(x)

    return Trial(run, lambda x: lax.top_k(x, 8), (normal(129, 1000),), 0)


@trial
def argmax_rows() -> Trial:
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.argmax(x_ref[...], axis=1).astype(i32)

    def run(x):
        return pl.pallas_call(
            kernel,
            out_shape=like(x, x.shape[0], dtype=i32),
            grid=(pl.cdiv(x.shape[0], 8),),
            in_specs=[pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((8,), lambda i: (i,)),
        )(x)

    reference = lambda x: jnp.argmax(x, axis=1).astype(i32)
    return Trial(run, reference, (normal(1001, 3333, dtype=f16),), 0)


@trial
def cumulative_sum() -> Trial:
    def kernel(x_ref, o_ref, carry):
        @pl.when(pl.program_id(1) == 0)
        def _():
            carry[...] = jnp.zeros_like(carry)

        sums = jnp.cumsum(x_ref[...], axis=1) + carry[...]
        o_ref[...] = sums
        carry[...] += x_ref[...].sum(axis=1, keepdims=True)

    def run(x):
        block = pl.BlockSpec((8, 512), lambda i, j: (i, j))
        return pl.pallas_call(
            kernel,
            out_shape=like(x),
            grid=(pl.cdiv(x.shape[0], 8), pl.cdiv(x.shape[1], 512)),
            in_specs=[block],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((8, 1), f32)],
        )(x)

    return Trial(run, partial(jnp.cumsum, axis=1), (normal(64, 5000),), 1e-2)


@trial
def linear_recurrence() -> Trial:
    """h = a * h + x, a state per channel."""

    def kernel(a_ref, x_ref, o_ref, h_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            h_ref[...] = jnp.zeros_like(h_ref)

        def step(t, h):
            h = a_ref[t, :] * h + x_ref[t, :]
            o_ref[t, :] = h
            return h

        h_ref[...] = lax.fori_loop(0, x_ref.shape[0], step, h_ref[...])

    def run(a, x):
        block = pl.BlockSpec((64, 128), lambda c, t: (t, c))
        return pl.pallas_call(
            kernel,
            out_shape=like(x),
            grid=(x.shape[1] // 128, x.shape[0] // 64),
            in_specs=[block, block],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((128,), f32)],
        )(a, x)

    def reference(a, x):
        combine = lambda l, r: (l[0] * r[0], l[1] * r[0] + r[1])
        return lax.associative_scan(combine, (a, x))[1]

    arrays = jax.nn.sigmoid(normal(512, 768)), normal(512, 768, seed=1)
    return Trial(run, reference, arrays, 1e-3)


@trial
def convolution() -> Trial:
    """Three by three, channels last, as nine products of shifted rows."""

    def kernel(x_ref, w_ref, o_ref):
        height, width, channels = o_ref.shape
        sums = jnp.zeros((height * width, channels), f32)
        for dy in range(3):
            for dx in range(3):
                part = x_ref[pl.ds(dy, height), pl.ds(dx, width), :]
                flat = part.reshape(height * width, part.shape[-1])
                sums += jnp.dot(flat, w_ref[dy, dx], preferred_element_type=f32)
        o_ref[...] = sums.reshape(o_ref.shape).astype(o_ref.dtype)

    def run(x, w):
        h, width, c = x.shape
        out = w.shape[3]
        padded = jnp.pad(x, ((1, 1), (1, 1), (0, 0)))
        return pl.pallas_call(
            kernel,
            out_shape=like(x, h, width, out),
            grid=(h // 4,),
            in_specs=[
                pl.BlockSpec((pl.Element(6), width + 2, c), lambda i: (i * 4, 0, 0)),
                pl.BlockSpec((3, 3, c, out), lambda i: (0, 0, 0, 0)),
            ],
            out_specs=pl.BlockSpec((4, width, out), lambda i: (i, 0, 0)),
        )(padded, w)

    def reference(x, w):
        dims = ("NHWC", "HWIO", "NHWC")
        out = lax.conv_general_dilated(
            x[None].astype(f32), w.astype(f32), (1, 1), "SAME", dimension_numbers=dims,
            precision=HIGHEST,
        )  # fmt: skip
        return out[0].astype(x.dtype)

    arrays = normal(32, 32, 64, dtype=bf16), normal(3, 3, 64, 64, dtype=bf16, seed=1)
    return Trial(run, reference, arrays, 2e-2)


@trial
def stencil() -> Trial:
    def kernel(x_ref, o_ref):
        h, w = o_ref.shape
        at = lambda dy, dx: x_ref[pl.ds(1 + dy, h), pl.ds(1 + dx, w)]
        sides = at(-1, 0) + at(1, 0) + at(0, -1) + at(0, 1)
        o_ref[...] = 0.5 * at(0, 0) + 0.125 * sides

    def run(x):
        h, w = x.shape
        return pl.pallas_call(
            kernel,
            out_shape=like(x),
            grid=(pl.cdiv(h, 32), pl.cdiv(w, 128)),
            in_specs=[
                pl.BlockSpec(
                    (pl.Element(34), pl.Element(130)), lambda i, j: (32 * i, 128 * j)
                )
            ],
            out_specs=pl.BlockSpec((32, 128), lambda i, j: (i, j)),
        )(jnp.pad(x, 1))

    def reference(x):
        p = jnp.pad(x, 1)
        sides = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]
        return 0.5 * x + 0.125 * sides

    return Trial(run, reference, (normal(513, 1030),), 1e-5)


@trial
def transpose() -> Trial:
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].T

    def run(x):
        return pl.pallas_call(
            kernel,
            out_shape=like(x, x.shape[1], x.shape[0]),
            grid=(pl.cdiv(x.shape[0], 128), pl.cdiv(x.shape[1], 128)),
            in_specs=[pl.BlockSpec((128, 128), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((128, 128), lambda i, j: (j, i)),
        )(x)

    return Trial(run, jnp.transpose, (normal(1025, 700),), 0)


@trial
def one_large_block() -> Trial:
    """A reduction of a block that no multiprocessor holds."""

    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(f32)
        o_ref[...] = (x - x.mean(axis=0, keepdims=True)).astype(o_ref.dtype)

    def run(x):
        spec = pl.BlockSpec((x.shape[0], 512), lambda j: (0, j))
        return pl.pallas_call(
            kernel,
            out_shape=like(x),
            grid=(x.shape[1] // 512,),
            in_specs=[spec],
            out_specs=spec,
        )(x)

    reference = lambda x: x - x.mean(axis=0, keepdims=True)
    return Trial(run, reference, (normal(1024, 1024),), 1e-4)


@trial
def sort_rows() -> Trial:
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.sort(x_ref[...], axis=1)

    run = lambda x: rows_call(kernel, x, 8)
    return Trial(run, partial(jnp.sort, axis=1), (normal(100, 500),), 0)


@trial
def adam() -> Trial:
    """Four arrays, of which three are updated in place."""

    def kernel(p_ref, m_ref, v_ref, g_ref, po_ref, mo_ref, vo_ref):
        g = g_ref[...].astype(f32)
        m = 0.9 * m_ref[...] + 0.1 * g
        v = 0.99 * v_ref[...] + 0.01 * g * g
        mo_ref[...], vo_ref[...] = m, v
        step = 1e-3 * m / (jnp.sqrt(v) + 1e-8)
        po_ref[...] = (p_ref[...].astype(f32) - step).astype(po_ref.dtype)

    def run(p, m, v, g):
        spec = pl.BlockSpec((2048,), lambda i: (i,))
        return pl.pallas_call(
            kernel,
            out_shape=[like(p), like(m), like(v)],
            grid=(pl.cdiv(p.shape[0], 2048),),
            in_specs=[spec] * 4,
            out_specs=[spec] * 3,
            input_output_aliases={0: 0, 1: 1, 2: 2},
        )(p, m, v, g)

    def reference(p, m, v, g):
        g = g.astype(f32)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        step = 1e-3 * m / (jnp.sqrt(v) + 1e-8)
        return (p.astype(f32) - step).astype(p.dtype), m, v

    n = 1_000_003
    arrays = normal(n, dtype=bf16), normal(n, seed=1), jnp.abs(normal(n, seed=2))
    return Trial(run, reference, (*arrays, normal(n, dtype=bf16, seed=3)), 2e-2)


# --- running ---


def error(got: Any, want: Any) -> float:
    worst = 0.0
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), (g.shape, g.dtype)
        g, w = (np.asarray(x).astype(np.float64) for x in (g, w))
        assert np.isfinite(g).all() == np.isfinite(w).all(), "not finite"
        size = np.maximum(np.abs(w).max(), 1.0) if w.size else 1.0
        worst = max(worst, float(np.abs(g - w).max() / size) if w.size else 0.0)
    return worst


def run_trial(name: str) -> str:
    """What came of it, in a line; raises where it is wrong or no backend takes it."""
    case = TRIALS[name]()
    choice = str(pl.lower(case.run)(*case.arrays).choice("cuda")).split(":")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        found = error(jax.jit(case.run)(*case.arrays), case.reference(*case.arrays))
    assert found <= case.error, f"error {found:.1e} by {choice}"
    return f"{choice:8} error {found:.1e}"


def main(wanted: list[str]) -> None:
    right = 0
    for name in wanted or TRIALS:
        start = time.perf_counter()
        try:
            said = run_trial(name)
            right += 1
        except Exception as failure:
            lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
            said = f"FAILED {type(failure).__name__}: {' | '.join(lines[:4])}"[:400]
        print(f"{name:28} {said}  [{time.perf_counter() - start:.1f} s]", flush=True)
    print(f"{right} of {len(wanted or TRIALS)} right")


if __name__ == "__main__":
    main(sys.argv[1:])
