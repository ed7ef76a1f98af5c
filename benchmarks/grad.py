"""Backward kernels against the forward kernels they belong to, on this CPU.

Prints, per family, the best time of the forward kernel and of the generated backward
kernels (taking turns), their ratio, and how many kernels the backward takes; then the
temporary memory of the backward as the grid grows. `--quick` takes smaller sizes.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.autodiff.backward import cotangents, plan
from pallasite.placement import chip_for
from pallasite.sites import calls_in
from pallasite.target import Machine

MASKED = -1e30
MOST = 4.0  # times the forward kernel that a backward may take


@dataclass(frozen=True)
class Family:
    """A kernel with arguments of a usual size."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]


# --- kernels ---


def rowwise(function: Callable, block: int, x, *vectors):
    """`function(x, *vectors)` on blocks of whole rows."""

    def kernel(x_ref, *refs):
        *inputs, o_ref = refs
        result = function(x_ref[...], *(ref[...] for ref in inputs))
        o_ref[...] = result.astype(o_ref.dtype)

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], block),),
        in_specs=[spec, *(whole if v.shape[0] == 1 else spec for v in vectors)],
        out_specs=spec,
    )(x, *vectors)


def gelu(x):
    inner = 0.7978845608 * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1 + jnp.tanh(inner))


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layernorm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def rmsnorm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)


def matmul(block: int, x, y):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += dot(x_ref[...], y_ref[...])

    m, n, k = x.shape[0], y.shape[1], x.shape[1]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(pl.cdiv(m, block), pl.cdiv(n, block), pl.cdiv(k, block)),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
    )(x, y)


def batched_matmul(block: int, x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = dot(x_ref[...], y_ref[...])

    batch, m, k = x.shape
    n = y.shape[2]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, m, n), jnp.float32),
        grid=(batch, m // block, n // block),
        in_specs=[
            pl.BlockSpec((None, block, k), lambda b, i, j: (b, i, 0)),
            pl.BlockSpec((None, k, block), lambda b, i, j: (b, 0, j)),
        ],
        out_specs=pl.BlockSpec((None, block, block), lambda b, i, j: (b, i, j)),
    )(x, y)


def bias_gelu_matmul(block: int, x, y, bias):
    def kernel(x_ref, y_ref, bias_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += dot(x_ref[...], y_ref[...])

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = gelu(acc_ref[...] + bias_ref[...])

    m, n, k = x.shape[0], y.shape[1], x.shape[1]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(m // block, n // block, k // block),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
            pl.BlockSpec((1, block), lambda i, j, k: (0, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
    )(x, y, bias)


def flash(block: int, q, k, v):
    """Causal attention, the keys in a loop whose length depends on the program."""
    heads, length, width = q.shape

    def kernel(q_ref, k_ref, v_ref, o_ref, log_sum_ref):
        i = pl.program_id(1)
        q = q_ref[...]

        def step(j, state):
            highest, total, out = state
            keys = pl.ds(j * block, block)
            scores = (
                jax.lax.dot_general(
                    q,
                    k_ref[keys],
                    (((1,), (1,)), ((), ())),
                    preferred_element_type=jnp.float32,
                )
                * width**-0.5
            )
            rows = i * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            columns = j * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores = jnp.where(rows >= columns, scores, MASKED)
            new = jnp.maximum(highest, scores.max(-1, keepdims=True))
            shrink, weights = jnp.exp(highest - new), jnp.exp(scores - new)
            total = total * shrink + weights.sum(-1, keepdims=True)
            return new, total, out * shrink + dot(weights, v_ref[keys])

        column = jnp.zeros((block, 1), jnp.float32)
        start = (column + MASKED, column, jnp.zeros((block, width), jnp.float32))
        highest, total, out = jax.lax.fori_loop(0, i + 1, step, start)
        o_ref[...] = out / total
        log_sum_ref[...] = highest + jnp.log(total)

    query = pl.BlockSpec((None, block, width), lambda h, i: (h, i, 0))
    key = pl.BlockSpec((None, length, width), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((heads, length, 1), jnp.float32),
        ),
        grid=(heads, length // block),
        in_specs=[query, key, key],
        out_specs=(query, pl.BlockSpec((None, block, 1), lambda h, i: (h, i, 0))),
    )(q, k, v)


# --- families ---


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.float32)


def families(quick: bool) -> Iterator[Family]:
    n = 512 if quick else 1024
    x, scale, bias = normal(n, 1024), 1 + normal(1, 1024), normal(1, 1024)
    residual = normal(n, 1024) + 1
    chain = lambda x, residual, bias: gelu(x + bias) + residual
    yield Family(
        "elementwise chain", functools.partial(rowwise, chain, 8), (x, residual, bias)
    )
    yield Family("row softmax", functools.partial(rowwise, softmax, 8), (x,))
    norm = functools.partial(rowwise, layernorm, 8)
    yield Family("layernorm", norm, (x, scale, bias))
    yield Family("rmsnorm", functools.partial(rowwise, rmsnorm, 8), (x, scale))
    square, other = normal(n, n), normal(n, n) + 0.1
    yield Family(
        "matmul, k on the grid", functools.partial(matmul, n // 4), (square, other)
    )
    stack = (normal(8, n // 2, 256), normal(8, 256, n // 2))
    yield Family("batched matmul", functools.partial(batched_matmul, 128), stack)
    yield Family(
        "matmul + bias + gelu",
        functools.partial(bias_gelu_matmul, n // 4),
        (square, other, normal(1, n)),
    )
    heads = tuple(normal(8, n // 2, 64) + s for s in (0.0, 0.1, 0.2))
    yield Family("flash attention, causal", functools.partial(flash, 128), heads)


# --- measuring ---


def backward_of(run: Callable, args: tuple[Any, ...]) -> tuple[Callable, int]:
    """The backward of a function that is one kernel call; how many kernels it takes."""
    (call,) = calls_in(run, *args)
    wanted = [True] * len(args)
    known = (True,) * call.kernel.num_outputs
    machine = Machine.usual(chip_for(call.backend))
    count = len(plan(call.kernel, tuple(wanted), known, machine).steps)

    def backward(args, seeds):
        return cotangents(call, args, seeds, wanted)

    return jax.jit(backward), count


def best_times(runs: list[Callable[[], Any]], seconds: float) -> list[float]:
    """Best time of each in milliseconds, taking turns."""
    for run in runs:
        run()
    best = [float("inf")] * len(runs)
    end = time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end or rounds < 3:
        rounds += 1
        for n, run in enumerate(runs):
            for _ in range(2):  # the first has the other's data in the caches
                start = time.perf_counter()
                run()
                best[n] = min(best[n], time.perf_counter() - start)
    return [1e3 * t for t in best]


def measure(family: Family, seconds: float) -> tuple[float, float, int]:
    forward = jax.jit(family.run)
    backward, count = backward_of(family.run, family.args)
    seeds = [jnp.ones_like(x) + 0.5 for x in jax.tree.leaves(forward(*family.args))]
    runs = [
        lambda: jax.block_until_ready(forward(*family.args)),
        lambda: jax.block_until_ready(backward(family.args, seeds)),
    ]
    there, back = best_times(runs, seconds)
    return there, back, count


def temporary_bytes(run: Callable, args: tuple[Any, ...]) -> int:
    backward, _ = backward_of(run, args)
    seeds = [
        jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(run, *args))
    ]
    compiled = backward.lower(args, seeds).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    print(f"{'family':<28}{'forward ms':>12}{'backward ms':>13}{'ratio':>8}  kernels")
    for family in families(options.quick):
        if options.only not in family.name:
            continue
        there, back, count = measure(family, options.seconds)
        note = "" if back <= MOST * there else f"  over {MOST:g}x"
        print(
            f"{family.name:<28}{there:>12.3f}{back:>13.3f}{back / there:>8.2f}"
            f"  {count}{note}",
            flush=True,
        )
    if options.only:
        return
    print("\ntemporary memory of the backward, the same operands in more blocks")
    x, y = normal(512, 512), normal(512, 512)
    rows, scale = normal(1024, 256), normal(1, 256)
    for block in (256, 64, 16):
        product = temporary_bytes(functools.partial(matmul, block), (x, y))
        norm = temporary_bytes(
            functools.partial(rowwise, rmsnorm, block), (rows, scale)
        )
        steps = (512 // block) ** 3
        print(
            f"  matmul {steps:>6} steps {product:>10} bytes"
            f"    rmsnorm {1024 // block:>4} steps {norm:>10} bytes"
        )


if __name__ == "__main__":
    main()
