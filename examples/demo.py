"""One portable kernel on every backend present: error, time, ratio to plain XLA."""

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

if shutil.which("nvidia-smi") is None:
    # Without a GPU, keep JAX from probing for accelerators it cannot find.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite.__main__ import usable_backends

SIZE, BLOCK = 512, 128


def matmul_gelu_kernel(x_ref: Any, y_ref: Any, bias_ref: Any, o_ref: Any):
    """A matmul accumulated over the last grid axis, with bias and gelu at its end."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = jax.nn.gelu(o_ref[...] + bias_ref[...], approximate=False)


def matmul_gelu(x: jax.Array, y: jax.Array, bias: jax.Array, **how: Any):
    steps = SIZE // BLOCK
    return pl.pallas_call(
        matmul_gelu_kernel,
        out_shape=jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32),
        grid=(steps, steps, steps),
        in_specs=[
            pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, k)),
            pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (k, j)),
            pl.BlockSpec((1, BLOCK), lambda i, j, k: (0, j)),
        ],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, j)),
        **how,
    )(x, y, bias)


def plain(x: jax.Array, y: jax.Array, bias: jax.Array):
    return jax.nn.gelu(jnp.dot(x, y) + bias, approximate=False)


def best_time(fn: Callable[..., Any], args: Any, repeats: int = 10) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def progress(text: str):
    """A line that says what is running; cleared before the table is printed."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def ways_to_run() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way with its name: emulation, checked mode, then the native backends."""
    yield "emulation", {"interpret": True}
    yield "checked", {"interpret": pl.Checked()}
    for name in usable_backends():
        yield name, {"backend": name}


def main():
    key = jax.random.key(0)
    x, y = jax.random.normal(key, (2, SIZE, SIZE))
    bias = jax.random.normal(key, (1, SIZE))
    reference: Callable[..., jax.Array] = jax.jit(plain)
    want = np.asarray(reference(x, y, bias))
    rows: list[tuple[str, float, float, float]] = []
    for name, how in ways_to_run():
        progress(f"running the kernel: {name} ...")
        call = functools.partial(matmul_gelu, **how)
        fn: Callable[..., jax.Array] = call if name == "checked" else jax.jit(call)
        error = float(np.abs(np.asarray(fn(x, y, bias)) - want).max())
        repeats = 1 if name == "checked" else 10
        plain_time = best_time(reference, (x, y, bias))
        seconds = best_time(fn, (x, y, bias), repeats)
        rows.append((name, error, seconds, seconds / plain_time))
    progress("")
    print(f"matmul {SIZE}x{SIZE}x{SIZE} + bias + gelu, blocks of {BLOCK}, f32")
    print(f"{'backend':<12} {'max error':>10} {'time ms':>9} {'time / XLA':>11}")
    for name, error, seconds, ratio in rows:
        print(f"{name:<12} {error:>10.1e} {1e3 * seconds:>9.2f} {ratio:>10.1f}x")
    assert all(error < 1e-3 for _, error, _, _ in rows), "a backend is wrong"


if __name__ == "__main__":
    main()
