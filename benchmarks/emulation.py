"""The emulation against upstream's interpret mode and plain XLA, in one process.

Prints a table of times (best of many, interleaved) and ratios. Upstream Pallas is the
rival here; it is imported by this script only.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as upstream

import pallasite


def matmul(pl, size, block):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(
            x_ref[...], y_ref[...], preferred_element_type=jnp.float32
        )

    steps = size // block
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((size, size), jnp.float32),
        grid=(steps, steps, steps),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        interpret=True,
    )


def small_programs(pl, count):
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...] + 1

    spec = pl.BlockSpec((1, 128), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((count, 128), jnp.float32),
        grid=(count,),
        in_specs=[spec],
        out_specs=spec,
        interpret=True,
    )


def softmax(pl, rows, columns):
    def kernel(x_ref, o_ref):
        o_ref[...] = jax.nn.softmax(x_ref[...], axis=-1)

    spec = pl.BlockSpec((8, columns), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        grid=(rows // 8,),
        in_specs=[spec],
        out_specs=spec,
        interpret=True,
    )


def cases() -> Iterator[tuple[Any, ...]]:
    key = jax.random.key(0)
    a, b = jax.random.normal(key, (2, 1024, 1024))
    x = jax.random.normal(key, (10_000, 128))
    yield (
        "matmul 1024, blocks 128",
        matmul(pallasite, 1024, 128),
        matmul(upstream, 1024, 128),
        jnp.dot,
        (a, b),
    )
    yield (
        "10,000 programs of 1x128",
        small_programs(pallasite, 10_000),
        small_programs(upstream, 10_000),
        lambda v: 2 * v + 1,
        (x,),
    )
    yield (
        "softmax 1024x1024, 8 rows",
        softmax(pallasite, 1024, 1024),
        softmax(upstream, 1024, 1024),
        jax.nn.softmax,
        (a,),
    )


def once(fn, args):
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8, help="per row")
    seconds = parser.parse_args().seconds
    print(f"{'kernel':<28} {'ours ms':>9} {'upstream':>9} {'XLA':>9}  upstream/ours")
    for name, ours, theirs, plain, args in cases():
        functions = [jax.jit(f) for f in (ours, theirs, plain)]
        for fn in functions:
            once(fn, args)
        best = [float("inf")] * 3
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for n, fn in enumerate(functions):
                best[n] = min(best[n], once(fn, args))
        ms = [1e3 * t for t in best]
        times = " ".join(f"{t:>9.2f}" for t in ms)
        print(f"{name:<28} {times}  {ms[1] / ms[0]:.1f}x", flush=True)


if __name__ == "__main__":
    main()
