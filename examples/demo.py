"""One portable kernel on every backend present, beside plain jnp compiled by XLA.

The kernel is causal attention by a running softmax. It never stores the scores and
never visits blocks above the diagonal. Both are in its text, as loops and bounds; XLA,
given the usual formula, computes all scores and keeps them in memory.

Errors are distances to the result in 64 bits. All rows compute in 32 bits, each sums in
an order of its own: block by block here, row by row in XLA.
"""

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

if shutil.which("nvidia-smi") is None:
    # Without a GPU, keep JAX from probing for accelerators it cannot find.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite.__main__ import usable_backends

HEADS, LENGTH, WIDTH, BLOCK = 8, 1024, 64, 128
SCALE = WIDTH**-0.5
ROUNDS = 10
EXACT = lax.Precision.HIGHEST  # f32 as f32, also on chips that would round it


def attention_kernel(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any):
    """A block of queries against all keys up to its own, with a running softmax."""
    block = pl.program_id(1)
    q = q_ref[...] * SCALE
    rows = block * BLOCK + jnp.arange(BLOCK)[:, None]

    start = jnp.full((BLOCK, 1), -1e30), jnp.zeros((BLOCK, 1)), jnp.zeros_like(q)

    @pl.loop(0, block + 1, init_carry=start)
    def final(j: Any, state: Any):
        peak, total, out = state
        keys = pl.ds(j * BLOCK, BLOCK)
        scores = jnp.dot(q, k_ref[keys, :].T, precision=EXACT)
        columns = j * BLOCK + jnp.arange(BLOCK)[None, :]
        scores = jnp.where(rows >= columns, scores, -1e30)
        highest = jnp.maximum(peak, scores.max(-1, keepdims=True))
        old, new = jnp.exp(peak - highest), jnp.exp(scores - highest)
        total = old * total + new.sum(-1, keepdims=True)
        return highest, total, old * out + jnp.dot(new, v_ref[keys, :], precision=EXACT)

    _, total, out = final
    o_ref[...] = out / total


def attention(q: jax.Array, k: jax.Array, v: jax.Array, **how: Any):
    queries = pl.BlockSpec((None, BLOCK, WIDTH), lambda h, i: (h, i, 0))
    keys = pl.BlockSpec((None, LENGTH, WIDTH), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        attention_kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0], LENGTH // BLOCK),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        **how,
    )(q, k, v)


def plain(q: jax.Array, k: jax.Array, v: jax.Array):
    scores = SCALE * jnp.matmul(q, k.transpose(0, 2, 1), precision=EXACT)
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -1e30)
    return jnp.matmul(jax.nn.softmax(scores), v, precision=EXACT)


def in_64_bits(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.where(np.tri(LENGTH), SCALE * q @ k.transpose(0, 2, 1), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)


def seconds(fn: Callable[..., Any], args: Sequence[Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


def progress(text: str):
    """A line that says what is running; cleared before the table is printed."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def ways_to_run() -> Iterator[tuple[str, Callable[..., jax.Array]]]:
    """Plain jnp by XLA, then the kernel: emulation, checked mode, native backends."""
    yield "XLA", jax.jit(plain)
    yield "emulation", jax.jit(functools.partial(attention, interpret=True))
    yield "checked", functools.partial(attention, interpret=pl.Checked())
    for name in usable_backends():
        yield name, jax.jit(functools.partial(attention, backend=name))


def main():
    args = tuple(jax.random.normal(jax.random.key(0), (3, HEADS, LENGTH, WIDTH)))
    want = in_64_bits(*args)
    ways = dict(ways_to_run())
    errors: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    refused: list[str] = []
    for name, fn in ways.items():
        progress(f"running the kernel: {name} ...")
        # Checked mode looks at every element that is touched: one head is enough.
        some = [x[:1] for x in args] if name == "checked" else args
        start = time.perf_counter()
        try:
            got = np.asarray(fn(*some))
        except pl.errors.UnsupportedError as error:  # a GPU has two backends
            refused.append(f"{name}: {error}")
            continue
        errors[name] = float(np.abs(got - want[: len(got)]).max())
        times[name] = [time.perf_counter() - start] if name == "checked" else []
    # Side by side: what slows the machine down for a while slows all of them.
    timed = [name for name in times if name != "checked"]
    for n in range(ROUNDS):
        progress(f"round {n + 1} of {ROUNDS} ...")
        for name in timed:
            times[name].append(seconds(ways[name], args))
    progress("")
    best = {name: min(taken) for name, taken in times.items()}
    print(f"causal attention, {HEADS} x {LENGTH} x {WIDTH}, f32, blocks of {BLOCK}")
    print(f"{'':<10} {'max error':>10} {'time ms':>9} {'XLA / time':>11}")
    for name, took in best.items():
        row = f"{name:<10} {errors[name]:>10.1e} {1e3 * took:>9.2f}"
        if name == "checked":
            print(f"{row} {'one head':>11}")
            continue
        ratio = best["XLA"] / took
        print(f"{row} {ratio:>10.2f}x {'#' * round(5 * min(ratio, 10))}")
    print(*refused, sep="\n", end="")
    assert all(error < 1e-3 for error in errors.values()), "a backend is wrong"


if __name__ == "__main__":
    main()
