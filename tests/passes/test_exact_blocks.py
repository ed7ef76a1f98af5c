"""Blocks that are wider than their arrays: which are narrowed, with what results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.nodes import Kernel
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.run import NORMAL, run
from pallasite.passes.schedule.exact_blocks import exact_blocks

Shape = jax.ShapeDtypeStruct
INF = float("inf")


def made(kernel, out, *arrays, **options) -> tuple[Kernel, Kernel]:
    """The kernel in normal form, and with exact blocks; the CPU's results are right."""

    def call(**how):
        return pl.pallas_call(kernel, out, **how, **options)

    got, want = call(backend="cpu")(*arrays), call(interpret=True)(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    normal = run(pl.lower(call())(*arrays).kernels[0], NORMAL)
    return normal, exact_blocks(normal)


def blocks(kernel: Kernel) -> list[tuple[int, ...]]:
    return [w.block_shape for w in Pipeline.of(find_pipeline(kernel)).windows]


def normal(*shape: int):
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)


def padded(code, n: int = 45, other: float = 0.0, rows: int = 3):
    """A program a row, in a block of a power of two."""
    size = pl.next_power_of_2(n)

    def kernel(x_ref, o_ref):
        row, lanes = pl.program_id(0), jnp.arange(size)
        mask = lanes < n
        x = pl.load(x_ref, (row, lanes), mask=mask, other=other)
        pl.store(o_ref, (row, lanes), code(x, mask), mask=mask)

    return made(kernel, Shape((rows, n), jnp.float32), normal(rows, n), grid=(rows,))


def softmax(x, low):
    p = jnp.exp(x - jnp.maximum(x, low).max())
    return p / p.sum()


ROWS = {
    "elementwise": (lambda x, m: jnp.tanh(x) * x + 1, 0.0),
    "sum": (lambda x, m: x - x.sum(), 0.0),
    "softmax": (lambda x, m: jnp.exp(x - x.max()) / jnp.exp(x - x.max()).sum(), -INF),
    "finite mask": (
        lambda x, m: x - jnp.where(m, x, -1e30).max() + jnp.where(m, x, 2.5).min(),
        0.0,
    ),
    "variance": (
        lambda x, m: x * jnp.where(m, (x - x.sum() / 45) ** 2, 0.0).sum(),
        0.0,
    ),
    "squares": (lambda x, m: x * (x * x).sum(), 0.0),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_padded_rows_have_the_width_of_their_array(name: str):
    code, other = ROWS[name]
    before, after = padded(code, other=other)
    assert blocks(before) == [(64,), (64,)]
    assert blocks(after) == [(45,), (45,)]
    assert "mask" not in after.text


@pytest.mark.parametrize("n", [1, 5, 16, 1000])
def test_any_width(n: int):
    size = 1024

    def kernel(x_ref, o_ref):
        lanes = jnp.arange(size)
        x = pl.load(x_ref, (lanes,), mask=lanes < n, other=-INF)
        y = jnp.exp(x - x.max())
        pl.store(o_ref, (lanes,), y / y.sum(), mask=lanes < n)

    _, after = made(kernel, Shape((n,), jnp.float32), normal(n))
    assert blocks(after) == [(n,), (n,)]


def test_a_row_of_minus_infinity_is_nan_either_way():
    def kernel(x_ref, o_ref):
        lanes = jnp.arange(8)
        x = pl.load(x_ref, (lanes,), mask=lanes < 5, other=-INF)
        y = jnp.exp(x - x.max())
        pl.store(o_ref, (lanes,), jnp.full((8,), y.sum()), mask=lanes < 5)

    x = jnp.full((5,), -INF)
    _, after = made(kernel, Shape((5,), jnp.float32), x)
    assert blocks(after) == [(5,), (5,)]


def test_both_dimensions_of_a_block():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((16, 128), lambda: (0, 0))
    x = normal(9, 70)
    specs = {"in_specs": [spec], "out_specs": spec}
    _, after = made(kernel, Shape((9, 70), jnp.float32), x, **specs)
    assert blocks(after) == [(9, 70), (9, 70)]


WIDE = {
    "ones": lambda x, m: x + jnp.where(m, x, 1.0).sum(),
    "another maximum": lambda x, m: (
        x + jnp.exp(jnp.where(m, x, -INF) - jnp.abs(x).max()).sum() * x.min()
    ),
    "scan": lambda x, m: jnp.cumsum(x),
    "roll": lambda x, m: jnp.roll(x, 1),
}


@pytest.mark.parametrize("name", ["ones", "another maximum", "scan", "roll"])
def test_what_depends_on_the_padding_stays(name: str):
    before, after = padded(WIDE[name])
    assert after is before


@pytest.mark.parametrize(
    ("dtype", "n", "size", "most"),
    [("int8", 200, 256, 100), ("bfloat16", 257, 512, 256)],
)
def test_positions_of_types_that_have_not_all_of_them(
    dtype: str, n: int, size: int, most: int
):
    """200 is -56 as an int8, and 257 is 256 in bfloat16."""

    def kernel(x_ref, o_ref):
        lanes = jnp.arange(size)
        x = pl.load(x_ref, (lanes,), mask=lanes < n, other=0.0)
        few = jnp.where(jnp.arange(size, dtype=dtype) <= most, 1.0, x)
        pl.store(o_ref, (lanes,), x + few.sum(), mask=lanes < n)

    before, after = made(kernel, Shape((n,), jnp.float32), normal(n))
    assert after is before


def test_what_is_stored_elsewhere_from_past_the_end_stays():
    def kernel(x_ref, o_ref, p_ref):
        lanes = jnp.arange(64)
        x = pl.load(x_ref, (lanes,), mask=lanes < 45, other=3.0)
        pl.store(o_ref, (lanes,), x, mask=lanes < 45)
        p_ref[63 - lanes] = x

    shapes = Shape((45,), jnp.float32), Shape((64,), jnp.float32)
    before, after = made(kernel, shapes, normal(45))
    assert after is before


def test_blocks_inside_their_arrays_stay():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((16,), lambda i: (i,))
    x = normal(45)
    options = {"in_specs": [spec], "out_specs": spec, "grid": (3,)}
    before, after = made(kernel, Shape((45,), jnp.float32), x, **options)
    assert after is before


def test_a_select_beside_a_degenerate_row_stays():
    """Where a row is minus infinity, its own elements are 0, and NaN past the end."""

    def kernel(x_ref, o_ref):
        lanes = jnp.arange(8)
        x = pl.load(x_ref, (lanes,), mask=lanes < 5, other=-INF)
        y = jnp.exp(jnp.where(lanes < 5, 0.0, x - x.max()))
        pl.store(o_ref, (lanes,), jnp.full((8,), y.sum()), mask=lanes < 5)

    before, after = made(kernel, Shape((5,), jnp.float32), jnp.full((5,), -INF))
    assert after is before
