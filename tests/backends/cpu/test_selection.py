"""top_k against numpy's evaluation of the op: list by list, at every length."""

import numpy as np
import pytest

from pallasite import target
from pallasite.backends.cpu import selection
from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import DTYPES, TileType
from tests.backends.cpu.running import compute, tiles_kernel
from tests.ops.sampling import evaluate

RNG = np.random.default_rng(0)


def check(x: np.ndarray, cases: list[tuple[int, int]]) -> None:
    """All (axis, k) of one array, in one kernel."""

    def every(b, v):
        return [r for axis, k in cases for r in b.emit("top_k", v, axis=axis, k=k)]

    want = evaluate(tiles_kernel(every, [x]), [x])
    for got, wanted in zip(compute(every, x), want, strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        # By their bytes: zeros differ in their sign, and NaNs do not differ.
        np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("host", ["here", "sse"])
def test_lengths(host: str):
    """Lists of less than a vector, of one and of several; rows with any rest."""
    with target.using(target.SSE if host == "sse" else target.host()):
        for n in (1, 16, 17, 19, 70):
            x = RNG.normal(size=(3, n)).astype(np.float32)
            x[1], x[2] = np.sort(x[1]), 0.5  # each is larger; all are equal
            check(x, [(1, k) for k in sorted({1, min(n, 5), min(n, 18), n})])


@pytest.mark.parametrize("name", ["f32", "bf16", "f64", "i32", "u32", "i64", "u8"])
def test_types(name: str):
    """Also the least number there is, which an empty place of the list holds too."""
    dtype = DTYPES[name]
    if dtype.is_float:
        odd = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1, 2]
    else:
        info = np.iinfo(dtype.np)
        odd = [info.min, info.max, 1, 2]
    x = RNG.choice(np.array(odd, dtype.np), (4, 41))
    x[0] = odd[0]
    x[1, 3:] = -np.inf if dtype.is_float else info.min
    check(x, [(1, 3), (1, 20), (1, 41), (0, 2)])


def test_any_axis():
    x = RNG.integers(0, 9, (5, 20, 3)).astype(np.int32)
    check(x, [(0, 2), (1, 7), (2, 3)])


def test_long_lists_are_sorted(monkeypatch: pytest.MonkeyPatch):
    tile = Value(TileType((2, 1000), DTYPES["i32"]))
    op = lambda k: Op("top_k", (tile,), (), dict(axis=1, k=k))
    most = selection.MOST
    assert selection.has_top_k(op(most)) and not selection.has_top_k(op(most + 1))
    monkeypatch.setattr(selection, "MOST", 6)
    check(RNG.integers(-4, 4, (2, 8)).astype(np.int32), [(1, 6), (1, 7)])
