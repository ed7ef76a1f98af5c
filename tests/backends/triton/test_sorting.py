"""Sorts as Triton code, against the evaluator that defines them, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.ir.types import DTYPES, I32, TileType
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.triton.harness import compiled, simulated, whole_kernel
from tests.ops.sampling import evaluate

NAMES = ("bool", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")
NAMES += ("f8e4m3fn", "bf16", "f16", "f32", "f64")
ODD = (np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1.0, -1.0)


def sort_kernel(types: list[TileType], axis: int, num_keys: int):
    attrs = dict(axis=axis, num_keys=num_keys, stable=True)
    return whole_kernel(lambda b, *xs: b.emit("sort", *xs, **attrs), types, *types)


def same_bits(kernel, operands) -> None:
    results = zip(simulated(kernel, operands), evaluate(kernel, operands), strict=True)
    for got, want in results:
        assert got.dtype == want.dtype
        assert got.tobytes() == np.ascontiguousarray(want).tobytes()


def numbers(shape: tuple[int, ...], name: str) -> np.ndarray:
    """Many ties, the ends of integers, special floats."""
    dtype, rng = DTYPES[name], np.random.default_rng(0)
    if dtype.is_bool:
        return rng.random(shape) < 0.5
    if not dtype.is_float:
        ends = np.iinfo(dtype.np)
        return rng.choice(np.array([ends.min, ends.max, 0, 1, 7], dtype.np), shape)
    odd = [x for x in ODD if name != "f8e4m3fn" or np.isfinite(x)]
    return rng.choice(np.array([*odd, 0.5, -2.0]).astype(dtype.np), shape)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape, axis", [((3, 13), 1), ((9, 4), 0), ((1, 16), 1)])
def test_stable_with_payload(name: str, shape: tuple[int, ...], axis: int):
    keys = numbers(shape, name)
    places = np.arange(keys.size, dtype=np.int32).reshape(shape)
    types = [TileType(shape, DTYPES[name]), TileType(shape, I32)]
    same_bits(sort_kernel(types, axis, 1), [keys, places])


@pytest.mark.parametrize("second", ["f32", "i64", "bool"])
def test_several_keys(second: str):
    shape = (2, 11)
    first, last = numbers(shape, "i8"), numbers(shape, second)
    places = np.arange(22, dtype=np.int32).reshape(shape)
    types = [TileType(shape, DTYPES[n]) for n in ("i8", second, "i32")]
    same_bits(sort_kernel(types, 1, 2), [first, last, places])


@pytest.mark.parametrize("shape", [(1,), (2,), (1, 1), (2, 1, 5)])
def test_short_rows(shape: tuple[int, ...]):
    x = numbers(shape, "f32")
    same_bits(sort_kernel([TileType(shape, DTYPES["f32"])], len(shape) - 1, 1), [x])


def test_partners_are_not_gathered():
    """A gather in each step took minutes to compile for rows of 1024."""
    text, _ = compiled(sort_kernel([TileType((1, 64), DTYPES["f32"])], 1, 1))
    assert "tt.gather" not in text
    assert text.count('"tt.reduce"') == 6


def test_descending_and_top_k():
    def kernel(x_ref, falling_ref, order_ref, largest_ref):
        falling_ref[...] = jnp.sort(x_ref[...], axis=1, descending=True)
        order_ref[...] = jnp.argsort(x_ref[...], axis=1)
        largest_ref[...] = lax.top_k(x_ref[...], 30)[0]

    x = numbers((3, 33), "f32")[:, ::-1].copy()
    x = np.where(np.isnan(x), np.float32(0.25), x)
    out = [jax.ShapeDtypeStruct((3, n), t) for n, t in ((33, "f4"), (33, "i4"))]
    out.append(jax.ShapeDtypeStruct((3, 30), "f4"))
    (made,) = map(run, kernels_in(pl.pallas_call(kernel, out), x))
    falling, order, largest = simulated(made, [x])
    np.testing.assert_array_equal(falling, -np.sort(-x, axis=1))
    np.testing.assert_array_equal(order, np.argsort(x, axis=1, kind="stable"))
    np.testing.assert_array_equal(largest, -np.sort(-x, axis=1)[:, :30])
