"""top_k and sort against numpy's evaluation of the ops."""

import numpy as np
import pytest

from pallasite import target
from pallasite.backends.cpu.ops import top_k
from pallasite.ir.types import DTYPES, DType
from tests.backends.cpu.running import compute, tiles_kernel
from tests.ops.sampling import evaluate

RNG = np.random.default_rng(0)


def check(x: np.ndarray, cases: list[tuple[int, int]]) -> None:
    """All (axis, k) of one array, in one kernel."""

    def every(b, v):
        return [r for axis, k in cases for r in b.emit("top_k", v, axis=axis, k=k)]

    same(every, x)


def same(every, *arrays: np.ndarray) -> None:
    """The native results are numpy's."""
    want = evaluate(tiles_kernel(every, arrays), list(arrays))
    for got, wanted in zip(compute(every, *arrays), want, strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        # By their bytes: zeros differ in their sign, and NaNs do not differ.
        np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("host", ["here", "sse"])
def test_lengths(host: str):
    """Lists of less than a vector, of one and of several; rows with any rest."""
    with target.using(target.SSE if host == "sse" else target.host()):
        for n in (1, 33, 300):
            x = RNG.normal(size=(4, n)).astype(np.float32)
            x[1], x[2] = np.sort(x[1]), 0.5  # each is larger; all are equal
            x[3] = np.rint(x[3])  # many are
            most = n // top_k.PART  # of a list; the others sort
            check(
                x,
                [
                    (1, k)
                    for k in sorted({0, 1, most - 1, most, most + 1, n})
                    if 0 <= k <= n
                ],
            )


def odd_numbers(dtype: DType) -> np.ndarray:
    if dtype.is_bool:
        return np.array([False, True])
    if dtype.is_float:
        odd = [-np.inf, np.inf, 0.0, -0.0, np.nan, -np.nan, 1, -2]
    else:
        info = np.iinfo(dtype.np)
        odd = [info.min, info.max, 1, 2]
    return np.array(odd, dtype.np)


TYPES = ["f32", "bf16", "f64", "i32", "u32", "i64", "u8", "bool"]


@pytest.mark.parametrize("name", TYPES)
def test_types(name: str):
    """Also the least number there is, which an empty place of the list holds too."""
    odd = odd_numbers(DTYPES[name])
    x = RNG.choice(odd, (4, 81))
    x[0], x[1, 3:] = odd[-1], odd[0]
    check(x, [(1, 1), (1, 5), (1, 81), (0, 2)])


def test_any_axis():
    x = RNG.integers(0, 9, (5, 40, 3)).astype(np.int32)
    check(x, [(0, 2), (1, 2), (1, 7), (2, 3)])


@pytest.mark.parametrize("name", TYPES)
def test_sort_types(name: str):
    """Of equal keys the first comes first: zeros of either sign are, and NaNs."""
    x = RNG.choice(odd_numbers(DTYPES[name]), (4, 41))
    other = RNG.integers(0, 9, x.shape).astype(np.float32)

    def every(b, v, w):
        attrs = dict(axis=1, stable=True)
        return [
            *b.emit("sort", v, w, num_keys=1, **attrs),
            *b.emit("sort", w, v, num_keys=2, **attrs),
        ]

    same(every, x, other)


@pytest.mark.parametrize("host", ["here", "sse"])
def test_sort_lengths(host: str):
    with target.using(target.SSE if host == "sse" else target.host()):
        for shape, axis in (((2, 1), 1), ((3, 16), 1), ((2, 33, 3), 1), ((0, 4), 1)):
            x = RNG.normal(size=shape).astype(np.float32)
            attrs = dict(axis=axis, num_keys=1, stable=True)
            same(lambda b, v, a=attrs: b.emit("sort", v, v, **a), x)
