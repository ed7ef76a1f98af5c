"""Slow kernels, what `pl.explain` says of them, and the same with its hints followed.

python examples/06_explain.py
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallasite as pl
from pallasite import tpu as pltpu

S = jax.ShapeDtypeStruct
ROWS, WIDTH = 8, 512


# A sum of everything, in the order of the steps. Without "sequential" it would run in
# parts by itself, because sums merge (docs/semantics.md).


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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("sequential",)),
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


# The same wave of an array that a kernel sees whole, as one row of numbers.


def flat_kernel(x_ref: Any, o_ref: Any):
    value = x_ref[...].reshape(-1)
    for _ in range(8):
        value = jnp.sin(value) + value * 0.5
    o_ref[...] = value.reshape(x_ref.shape)


def flat(x: jax.Array, rows: int = 1024):
    block = pl.BlockSpec((rows, WIDTH), lambda i: (i, 0))
    return pl.pallas_call(
        flat_kernel,
        out_shape=S(x.shape, x.dtype),
        grid=x.shape[0] // rows,
        in_specs=[block],
        out_specs=block,
    )(x)


def flat_in_blocks(x: jax.Array):
    return flat(x, rows=128)


# Columns in reverse order, one by one.


def mirror_kernel(x_ref: Any, o_ref: Any):
    o_ref[...] = x_ref[...][:, ::-1]


def mirror(x: jax.Array, columns: int = 1):
    blocks = x.shape[1] // columns
    return pl.pallas_call(
        mirror_kernel,
        out_shape=S(x.shape, x.dtype),
        grid=(x.shape[0] // ROWS, blocks),
        in_specs=[pl.BlockSpec((ROWS, columns), lambda i, j: (i, blocks - 1 - j))],
        out_specs=pl.BlockSpec((ROWS, columns), lambda i, j: (i, j)),
    )(x)


def mirror_in_blocks(x: jax.Array):
    return mirror(x, columns=128)


# A square, in blocks that are almost as large as the array.


def square_kernel(x_ref: Any, y_ref: Any, o_ref: Any):
    o_ref[...] = x_ref[...] @ y_ref[...]


def square(x: jax.Array, side: int = 512):
    n = x.shape[0]
    return pl.pallas_call(
        square_kernel,
        out_shape=S(x.shape, x.dtype),
        grid=(pl.cdiv(n, side), pl.cdiv(n, side)),
        in_specs=[
            pl.BlockSpec((side, n), lambda i, j: (i, 0)),
            pl.BlockSpec((n, side), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((side, side), lambda i, j: (i, j)),
    )(x, x)


def square_that_fits(x: jax.Array):
    return square(x, side=264)


def improved(slow: Callable[..., Any], fast: Callable[..., Any], x: Any) -> float:
    """How many times faster the second function is; the reports of both are printed."""
    reports = [pl.explain(function)(x).kernels[0] for function in (slow, fast)]
    for report in reports:
        print(report, end="\n\n")
    before, after = (report.measured or 0.0 for report in reports)
    return before / after


def main() -> None:
    x = jnp.linspace(0.0, 1.0, 4096 * WIDTH).reshape(4096, WIDTH)
    matrix = x.reshape(-1)[: 520 * 520].reshape(520, 520)
    pairs: list[tuple[str, Callable[..., Any], Callable[..., Any], jax.Array]] = [
        ("in parts", total, total_in_parts, x),
        ("blocks that fit", wave, wave_that_fits, x[:1040]),
        ("more blocks", flat, flat_in_blocks, x[:1024]),
        ("larger blocks", mirror, mirror_in_blocks, x),
        ("blocks that divide a product", square, square_that_fits, matrix),
    ]
    for change, slow, fast, operand in pairs:
        assert jnp.allclose(slow(operand), fast(operand), rtol=1e-4)
        print(f"{change}: {improved(slow, fast, operand):.2f} times faster\n")


if __name__ == "__main__":
    main()
