"""Slow kernels, what `pl.explain` says of them, and the same with its hints followed.

python examples/06_explain.py
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallasite as pl

S = jax.ShapeDtypeStruct
ROWS, WIDTH = 8, 512


# A sum of everything: every step adds to one number, so steps run one after another.


def total_kernel(x_ref: Any, o_ref: Any):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.sqrt(x_ref[...]).sum(keepdims=True)


def total(x: jax.Array):
    return pl.pallas_call(
        total_kernel,
        out_shape=S((1, 1), x.dtype),
        grid=x.shape[0] // ROWS,
        in_specs=[pl.BlockSpec((ROWS, WIDTH), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, 1), lambda i: (0, 0)),
    )(x)


def part_kernel(x_ref: Any, o_ref: Any):
    o_ref[...] = jnp.sqrt(x_ref[...]).sum(keepdims=True)


def total_in_parts(x: jax.Array):
    """Each step has a block of the result; the parts are added up after the call."""
    steps = 8
    parts = pl.pallas_call(
        part_kernel,
        out_shape=S((steps, 1), x.dtype),
        grid=steps,
        in_specs=[pl.BlockSpec((x.shape[0] // steps, WIDTH), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, 1), lambda i: (i, 0)),
    )(x)
    return parts.sum().reshape(1, 1)


# A wave, in blocks of which the second is almost empty.


def wave_kernel(x_ref: Any, o_ref: Any):
    value = x_ref[...]
    for _ in range(8):
        value = jnp.sin(value) + value * 0.5
    o_ref[...] = value


def wave(x: jax.Array, rows: int = 1024):
    block = pl.BlockSpec((rows, WIDTH), lambda i: (i, 0))
    return pl.pallas_call(
        wave_kernel,
        out_shape=S(x.shape, x.dtype),
        grid=pl.cdiv(x.shape[0], rows),
        in_specs=[block],
        out_specs=block,
    )(x)


def wave_that_fits(x: jax.Array):
    return wave(x, rows=260)


def improved(slow: Callable[..., Any], fast: Callable[..., Any], x: Any) -> float:
    """How many times faster the second function is; the reports of both are printed."""
    reports = [pl.explain(function)(x).kernels[0] for function in (slow, fast)]
    for report in reports:
        print(report, end="\n\n")
    before, after = (report.measured or 0.0 for report in reports)
    return before / after


def main() -> None:
    x = jnp.linspace(0.0, 1.0, 4096 * WIDTH).reshape(4096, WIDTH)
    assert jnp.allclose(total(x), total_in_parts(x), rtol=1e-4)
    print(f"in parts: {improved(total, total_in_parts, x):.2f} times faster\n")
    edge = x[:1040]
    assert jnp.allclose(wave(edge), wave_that_fits(edge), rtol=1e-5)
    print(f"blocks that fit: {improved(wave, wave_that_fits, edge):.2f} times faster")


if __name__ == "__main__":
    main()
