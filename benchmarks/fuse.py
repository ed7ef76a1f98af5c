"""`pl.fuse` against the same function unfused, on this machine.

Prints, per case, the best times of both (taking turns), their ratio, and the bytes that
each moves between main memory and the chip by the kernel's blocks. `--quick` takes
smaller sizes.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.sites import calls_in

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def matmul_kernel(x_ref, w_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...]


def matmul(x, w, bm=128, bn=128, bk=128):
    (m, k), (_, n) = x.shape, w.shape
    bm, bn, bk = min(bm, m), min(bn, n), min(bk, k)
    return pl.pallas_call(
        matmul_kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(m // bm, n // bn, k // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
    )(x, w)


def epilogue(x, w, b, r):
    return jax.nn.gelu(matmul(x, w) + b) + r


def dequantised(x, q, scale):
    return matmul(x, q.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16))


def both(x, q, scale, b, r):
    return jax.nn.gelu(dequantised(x, q, scale) + b) + r


def cases(n: int) -> list[Case]:
    """Functions with arguments whose arrays have `n` columns."""
    numbers = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.asarray(numbers.normal(size=shape), dtype)

    q = jnp.asarray(numbers.integers(-127, 127, size=(n, n)), jnp.int8)
    rows, depth, bf16 = 16, 64, jnp.bfloat16
    row = normal(n)
    return [
        (
            "bias, gelu, residual",
            epilogue,
            (normal(n, depth), normal(depth, n), row, normal(n, n)),
        ),
        ("int8 weights", dequantised, (normal(rows, n, dtype=bf16), q, row)),
        (
            "int8 weights, bias, gelu, residual",
            both,
            (normal(rows, n, dtype=bf16), q, row, row, normal(rows, n)),
        ),
    ]


def best(functions: list[Callable[..., Any]], args: Any, rounds: int) -> list[float]:
    """The least time of each, taking turns."""
    found = [float("inf")] * len(functions)
    for function in functions:
        jax.block_until_ready(function(*args))
    for _ in range(rounds):
        for n, function in enumerate(functions):
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            found[n] = min(found[n], time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds, n = (10, 512) if options.quick else (30, 2048)
    print(f"{jax.devices()[0].device_kind}, {n} columns")
    for name, function, args in cases(n):
        fused = pl.fuse(function)
        unfused_time, fused_time = best(
            [jax.jit(function), jax.jit(fused)], args, rounds
        )
        ratio = unfused_time / fused_time
        times = f"{unfused_time * 1e3:8.3f} ms {fused_time * 1e3:8.3f} ms"
        print(f"{name:<36} {times}  {ratio:.2f}x")
        for call in calls_in(fused, *args):
            for line in call.fused:
                print(f"    {line}")


if __name__ == "__main__":
    main()
