"""Integers narrower than a byte: every value, in emulation, numpy and on a CPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.emulation.emulate import emulate
from pallasite.ir.types import DTYPES, DType
from tests.backends.cpu.running import compute
from tests.ops.sampling import evaluate, lowered_kernel, rows_with

S = jax.ShapeDtypeStruct
NARROW = [DTYPES[name] for name in ("i4", "u4", "i2", "u2")]
TYPED = ("select_n", "cast", "bitcast")  # their rules differ
ROWS = [
    row
    for row in rows_with("meaning")
    if row.name not in TYPED and DTYPES["i4"] in row.dtypes
]


def every(dtype: DType) -> np.ndarray:
    """All numbers of a type."""
    low = -(1 << (dtype.bits - 1)) if dtype.is_signed_int else 0
    return np.arange(low, low + (1 << dtype.bits)).astype(dtype.np)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_on_all_numbers(row, dtype):
    if dtype not in row.dtypes:
        return
    attrs = {"y": 3} if row.name == "integer_pow" else {}
    combinations = itertools.product(every(dtype), repeat=row.arity)
    operands = [np.array(x) for x in zip(*combinations, strict=True)]
    build = lambda b, *tiles, **kw: b.op(row.name, *tiles, **kw)
    kernel = lowered_kernel(build, operands, attrs)
    (want,) = evaluate(kernel, operands)
    np.testing.assert_array_equal(
        compute(lambda b, *tiles: build(b, *tiles, **attrs), *operands), want
    )
    try:
        (got,) = jax.jit(emulate(kernel))(*operands)
    except TypeError as error:  # JAX has no such operation of narrow integers
        assert "narrow-width" in str(error) or "not accept dtype" in str(error)
    else:
        np.testing.assert_array_equal(got, want)


def agree(kernel, want, *args):
    for mode in (True, pl.Checked(), False):
        got = pl.pallas_call(kernel, S(want.shape, want.dtype), interpret=mode)(*args)
        np.testing.assert_array_equal(got, want, strict=True)


def wrapped(x, dtype: DType) -> np.ndarray:
    return np.asarray(x).astype(np.int64).astype(dtype.np)


def tiles(dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.choice(every(dtype), shape)
    return draw(8, 16), draw(16, 8)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_dots(dtype):
    a, b = tiles(dtype)
    exact = a.astype(np.int64) @ b.astype(np.int64)

    def product(result):
        def kernel(a_ref, b_ref, o_ref):
            o_ref[...] = lax.dot(a_ref[...], b_ref[...], preferred_element_type=result)

        return kernel

    agree(product(jnp.int32), exact.astype(np.int32), a, b)
    agree(product(jnp.int16), exact.astype(np.int16), a, b)
    agree(product(dtype.np), wrapped(exact, dtype), a, b)
    agree(product(jnp.int32), exact.astype(np.int32), a, b.astype(np.int8))
    agree(product(jnp.float32), exact.astype(np.float32), a, b.astype(np.float32))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_sorts_and_positions(dtype):
    a, _ = tiles(dtype)
    wide = a.astype(np.int32)

    def in_order(a_ref, o_ref):
        o_ref[...] = jnp.sort(a_ref[...], axis=1)

    def place(a_ref, o_ref):
        o_ref[...] = jnp.argmax(a_ref[...], axis=1)

    def largest(a_ref, o_ref):
        o_ref[...] = lax.top_k(a_ref[...], 3)[0]

    agree(in_order, np.sort(wide, axis=1).astype(dtype.np), a)
    agree(place, np.argmax(wide, axis=1).astype(np.int32), a)
    agree(largest, (-np.sort(-wide, axis=1)[:, :3]).astype(dtype.np), a)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_reductions_scans_and_memory(dtype):
    a, _ = tiles(dtype)
    wide = a.astype(np.int64)

    def total(a_ref, o_ref):
        o_ref[...] = lax.reduce_sum(a_ref[...], (1,))

    def running(a_ref, o_ref):
        o_ref[...] = lax.cumsum(a_ref[...], axis=1)

    def rows(a_ref, o_ref):
        o_ref[...] = a_ref[...]
        o_ref[jnp.array([-1, 2])] = a_ref[jnp.array([0, -8])]
        pl.store(o_ref, (pl.ds(3, 2), slice(None)), a_ref[:2], mask=a_ref[:2] > 0)

    agree(total, wrapped(wide.sum(1), dtype), a)
    agree(running, wrapped(wide.cumsum(1), dtype), a)
    want = a.copy()
    want[[-1, 2]] = a[0]
    want[3:5] = np.where(wide[:2] > 0, a[:2], a[3:5])
    agree(rows, want, a)
