"""The tracer kernels through the Triton backend on a GPU: error, time, ratio to XLA.

Vector add, a matmul that accumulates along the third grid axis (bf16, and f32 at full
precision) and flash attention with scratch carried along the last axis. `--json PATH`
writes the numbers; `--check` uses small arrays and fails where an error is too large.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite import tpu as pltpu


@dataclass
class Result:
    """One row of the table."""

    name: str
    max_error: float
    allowed: float
    milliseconds: float
    xla_milliseconds: float

    @property
    def ratio(self) -> float:
        return self.milliseconds / self.xla_milliseconds


def vector_add(x, y, block: int = 2048):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.size, block),),
        in_specs=[spec, spec],
        out_specs=spec,
        backend="triton",
    )(x, y)


def matmul(x, y, block_m: int, block_n: int, block_k: int):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(
            x_ref[...], y_ref[...], preferred_element_type=jnp.float32
        )

    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(pl.cdiv(m, block_m), pl.cdiv(n, block_n), pl.cdiv(k, block_k)),
        in_specs=[
            pl.BlockSpec((block_m, block_k), lambda i, j, k: (i, k)),
            pl.BlockSpec((block_k, block_n), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block_m, block_n), lambda i, j, k: (i, j)),
        backend="triton",
    )(x, y)


def attention(q, k, v, block_q: int = 128, block_k: int = 64):
    heads, length, depth = q.shape
    scale = depth**-0.5

    def kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        step, last = pl.program_id(2), pl.num_programs(2) - 1

        @pl.when(step == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        scores = scale * jnp.dot(
            q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32
        )
        m_old = m_ref[...]
        m_new = jnp.maximum(m_old, scores.max(axis=1, keepdims=True))
        alpha, p = jnp.exp(m_old - m_new), jnp.exp(scores - m_new)
        values = v_ref[...]
        m_ref[...] = m_new
        l_ref[...] = alpha * l_ref[...] + p.sum(axis=1, keepdims=True)
        acc_ref[...] = alpha * acc_ref[...] + jnp.dot(
            p.astype(values.dtype), values, preferred_element_type=jnp.float32
        )

        @pl.when(step == last)
        def _():
            o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)

    def rows(block, which):
        return pl.BlockSpec((None, block, depth), which)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, pl.cdiv(length, block_q), pl.cdiv(length, block_k)),
        in_specs=[
            rows(block_q, lambda h, i, j: (h, i, 0)),
            rows(block_k, lambda h, i, j: (h, j, 0)),
            rows(block_k, lambda h, i, j: (h, j, 0)),
        ],
        out_specs=rows(block_q, lambda h, i, j: (h, i, 0)),
        scratch_shapes=[
            pltpu.VMEM((block_q, 1), jnp.float32),
            pltpu.VMEM((block_q, 1), jnp.float32),
            pltpu.VMEM((block_q, depth), jnp.float32),
        ],
        backend="triton",
    )(q, k, v)


def plain_attention(q, k, v):
    wide = jnp.float32
    scores = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=wide)
    p = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1)
    return jnp.einsum("hqk,hkd->hqd", p.astype(q.dtype), v)


def plain_matmul(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def exact(function: Callable) -> Callable:
    """The same in f32, without the shortcuts of tensor cores."""

    def run(*operands):
        with jax.default_matmul_precision("highest"):
            return function(*(x.astype(jnp.float32) for x in operands))

    return run


def seconds(function: Callable, operands, budget: float = 0.3) -> float:
    """Median time of a call, called back to back until the device is busy."""
    jax.block_until_ready(function(*operands))
    start = time.perf_counter()
    jax.block_until_ready(function(*operands))
    calls = max(1, min(200, int(budget / 5 / (time.perf_counter() - start))))

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*operands)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    return statistics.median(sample() for _ in range(5))


def normal(seed: int, *shape: int, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def cases(small: bool) -> Iterator[tuple[Any, ...]]:
    """Name, kernel, plain XLA, operands, allowed error."""
    n = (1 << 20) + 3 if small else 1 << 26
    yield "vector add f32", vector_add, jnp.add, (normal(0, n), normal(1, n)), 0.0
    size = 512 if small else 4096
    operands = [normal(s, size, size, dtype=jnp.bfloat16) for s in range(2)]
    run = lambda x, y: matmul(x, y, 128, 128, 64)
    yield f"matmul bf16 {size}", run, plain_matmul, operands, 1e-3 * size**0.5
    size = 256 if small else 1024
    operands = [normal(s, size, size) for s in range(2)]
    run = lambda x, y: matmul(x, y, 64, 64, 32)
    yield f"matmul f32 {size}", run, plain_matmul, operands, 1e-5 * size**0.5
    heads, length = (2, 512) if small else (64, 4096)
    operands = [normal(s, heads, length, 128, dtype=jnp.bfloat16) for s in range(3)]
    name = f"flash attention bf16 {heads}x{length}x128"
    yield name, attention, plain_attention, operands, 2e-2


def measure(small: bool) -> list[Result]:
    results = []
    for name, kernel, plain, operands, allowed in cases(small):
        got, want = jax.jit(kernel)(*operands), jax.jit(exact(plain))(*operands)
        error = float(jnp.abs(got.astype(jnp.float32) - want).max())
        del got, want
        times = [seconds(jax.jit(f), operands) * 1e3 for f in (kernel, plain)]
        results.append(Result(name, error, allowed, *times))
        print(row(results[-1]), flush=True)
    return results


def row(r: Result) -> str:
    verdict = "ok" if r.max_error <= r.allowed else f"TOO LARGE (> {r.allowed:.1e})"
    times = f"{r.milliseconds:9.3f} ms  XLA {r.xla_milliseconds:9.3f} ms"
    return f"{r.name:<36} error {r.max_error:.1e} {verdict:<4} {times}  {r.ratio:5.2f}x"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--check", action="store_true", help="small arrays")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"tracer_gpu: jax runs on {jax.default_backend()} here, not on a GPU")
        return 0
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, numpy {np.__version__}")
    results = measure(options.check)
    if options.json:
        rows = [{**asdict(r), "ratio": r.ratio} for r in results]
        report = {"device": device, "jax": jax.__version__, "results": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(r.max_error > r.allowed for r in results))


if __name__ == "__main__":
    sys.exit(main())
