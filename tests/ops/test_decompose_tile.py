"""Decompositions of tile ops against numpy's evaluation of the ops themselves."""

from typing import Any

import numpy as np
import pytest

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.types import BF16, BOOL, DTYPES, F32, I32, TileType
from pallasite.ir.verify import verify
from pallasite.ops.formula import NotApplicable
from pallasite.passes.lower.legalize import legalize
from tests.ops.sampling import evaluate, lowered_kernel, ulp_error

SIZES = (1, 2, 5, 8, 13, 16, 40)


def op_kernel(name: str, operands: list[np.ndarray], attrs: dict) -> Kernel:
    def emit(b: Builder, *values: Value, **kw: Any):
        return b.emit(name, *values, **kw)

    return lowered_kernel(emit, operands, attrs)


def check(name: str, operands: list[np.ndarray], max_ulp: float = 0, **attrs: Any):
    """The op and its decomposition give the same; the decomposition verifies."""
    expected = evaluate(op_kernel(name, operands, attrs), operands)
    kernel = lowered_kernel(table()[name].lower, operands, attrs)
    verify(kernel)
    got = evaluate(kernel, operands)
    native = frozenset(row.name for row in table().values() if row.lower is None)
    bottom = legalize(kernel, native, "bottom")
    verify(bottom)
    for results in (got, evaluate(bottom, operands)):
        for result, wanted in zip(results, expected, strict=True):
            assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
            dtype = next(d for d in DTYPES.values() if d.np == wanted.dtype)
            assert np.all(ulp_error(result, wanted, dtype) <= max_ulp), (result, wanted)


def numbers(shape: tuple[int, ...], dtype=F32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype.is_bool:
        return rng.random(shape) < 0.6
    if dtype.is_integer:
        return rng.integers(-9, 10, shape).astype(dtype.np)
    return rng.standard_normal(shape).astype(dtype.np)


def indices(*values: int) -> list[np.ndarray]:
    return [np.array(v, np.int32) for v in values]


@pytest.mark.parametrize(("n", "distance"), [(2, 1), (8, 2), (16, 8)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_exchange(n: int, distance: int, axis: int):
    shape = [3, 4, 5]
    shape[axis] = n
    check("exchange", [numbers(tuple(shape), F32)], axis=axis, distance=distance)


@pytest.mark.parametrize("n", [0, *SIZES])
@pytest.mark.parametrize("dtype", [F32, I32, BOOL], ids=str)
def test_rev(n: int, dtype):
    check("rev", [numbers((3, n), dtype)], axes=(1,))
    check("rev", [numbers((n, 2), dtype)], axes=(0, 1))


PADS = [
    ((1, 2), (0, 3), (0, 0)),
    ((-1, 2), (2, -2), (0, 0)),
    ((0, 0), (0, 0), (0, 0)),
    ((2, -1), (-3, 4), (1, 2)),
    ((0, -6), (1, 1), (0, 0)),
    ((0, -7), (0, 5), (0, 0)),
    ((-2, 5), (-2, -8), (0, 0)),
]


@pytest.mark.parametrize(("low", "high", "interior"), PADS)
def test_pad(low, high, interior):
    operands = [numbers((4, 6)), np.float32(-7)]
    check("pad", operands, low=low, high=high, interior=interior)


@pytest.mark.parametrize("start", [(-3, 0), (0, 0), (2, 3), (1, 5), (99, 99)])
def test_dynamic_slice_clamps(start):
    check("dynamic_slice", [numbers((5, 9)), *indices(*start)], sizes=(2, 4))
    check("dynamic_slice", [numbers((5, 9), BOOL), *indices(*start)], sizes=(5, 1))


@pytest.mark.parametrize("start", [(-3, 0), (0, 0), (2, 3), (1, 5), (99, 99)])
def test_dynamic_update_slice_clamps(start):
    for shape in ((2, 4), (5, 1), (1, 9), (5, 9)):
        operands = [numbers((5, 9)), numbers(shape, seed=1), *indices(*start)]
        check("dynamic_update_slice", operands)


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("n", SIZES)
def test_reduce(kind: str, n: int):
    for dtype in (F32, BF16, I32, DTYPES["u8"]):
        x = numbers((3, n, 2), dtype)
        check("reduce", [x], max_ulp=64, kind=kind, axes=(1,))
        check("reduce", [x], max_ulp=256, kind=kind, axes=(0, 1, 2))


@pytest.mark.parametrize("kind", ["and", "or", "xor", "max", "min"])
def test_reduce_of_booleans_and_bits(kind: str):
    for dtype in (BOOL, I32, DTYPES["u8"]):
        if kind in ("max", "min") and dtype != BOOL:
            continue
        for density in (0, 1):
            x = numbers((4, 7), dtype) | np.array(density).astype(dtype.np)
            check("reduce", [x], kind=kind, axes=(1,))
            check("reduce", [x], kind=kind, axes=(0,))


def test_reduce_of_nothing_is_neutral():
    x = np.zeros((3, 0), np.float32)
    for kind in ("sum", "prod", "max", "min"):
        check("reduce", [x], kind=kind, axes=(1,))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min", "logsumexp"])
def test_scan(kind: str, reverse: bool):
    for n in SIZES:
        for dtype in (F32, BF16) if kind == "logsumexp" else (F32, BF16, I32):
            x = numbers((2, n), dtype)
            # Sums of mixed signs cancel: compare positive ones to a few ulp.
            x = np.abs(x) if dtype.is_float and kind == "sum" else x
            attrs = dict(kind=kind, reverse=reverse)
            check("scan", [x], max_ulp=16, axis=1, **attrs)
            check("scan", [x.T.copy()], max_ulp=16, axis=0, **attrs)


def test_scan_of_log_weights_keeps_infinities():
    x = np.array([-np.inf, -np.inf, 0.5, np.inf, 1.0, np.nan, 2.0], np.float32)
    check("scan", [x], max_ulp=8, kind="logsumexp", axis=0, reverse=False)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_arg_reduce_takes_the_first(kind: str):
    ties = np.array([[1, 3, 3, 1], [2, 2, 2, 2]], np.float32)
    nans = np.array([[1, np.nan, 5, np.nan], [np.inf, -np.inf, 0, 0]], np.float32)
    for x in (ties, nans, ties.astype(np.int32), ties > 1, numbers((5, 33), BF16)):
        for axis in (0, 1):
            check("arg_reduce", [x], kind=kind, axis=axis, dtype=I32)


ODD = np.array([3, np.nan, -0.0, 0.0, -np.inf, 1, np.inf, -1, np.nan, 1], np.float32)


@pytest.mark.parametrize("n", (1, 2, 7, 8, 19))
def test_sort_is_stable(n: int):
    keys = (numbers((n, 3), I32) % 4).astype(np.int32)
    place = np.arange(3 * n, dtype=np.int32).reshape(n, 3)
    check("sort", [keys, place], axis=0, num_keys=1, stable=True)
    check("sort", [keys, place], axis=1, num_keys=2, stable=True)
    check("sort", [numbers((2, n))], axis=1, num_keys=1, stable=False)


@pytest.mark.parametrize("name", ["sort", "rev"])
def test_full_sizes_make_no_empty_tiles(name: str):
    """TPU has no vectors of no elements."""
    attrs = dict(axis=1, num_keys=1, stable=True) if name == "sort" else dict(axes=(1,))
    kernel = lowered_kernel(table()[name].lower, [numbers((2, 16))], attrs)
    values = [v for op in walk(kernel.body) for v in op.results]
    assert values and all(v.tile.size for v in values)


@pytest.mark.parametrize("edge", [0, -1])
def test_pad_between_elements_makes_no_empty_tiles(edge: int):
    attrs = dict(low=(edge, edge), high=(edge, edge), interior=(0, 1))
    operands = [numbers((4, 6)), np.float32(-7)]
    kernel = lowered_kernel(table()["pad"].lower, operands, attrs)
    values = [v for op in walk(kernel.body) for v in op.results]
    assert values and all(v.tile.size for v in values)


def test_sort_orders_special_floats():
    place = np.arange(10, dtype=np.int32)
    check("sort", [ODD, place], axis=0, num_keys=1, stable=True)
    check("sort", [ODD.astype(np.float64), place], axis=0, num_keys=1, stable=True)
    check("sort", [ODD.astype(BF16.np), place], axis=0, num_keys=1, stable=True)


@pytest.mark.parametrize("name", ["f32", "bf16", "f64", "i32", "u32", "u64", "i8"])
def test_top_k(name: str):
    """Few by taking one after another, many by sorting; the least numbers too."""
    dtype = DTYPES[name]
    if dtype.is_float:
        x = np.stack([ODD, np.copysign(ODD, -1), 0 * numbers(ODD.shape)])
    else:
        info = np.iinfo(dtype.np)
        odd = np.array([info.min, 1, 2, info.max], dtype.np)
        x = np.random.default_rng(0).choice(odd, (3, 10))
    x = x.astype(dtype.np)
    for axis, k in ((1, 0), (1, 1), (1, 7), (1, 10), (0, 2)):
        check("top_k", [x], axis=axis, k=k)
    check("top_k", [numbers((2, 3, 5), BOOL)], axis=1, k=2)


def test_top_k_of_long_rows():
    assert any(op.name == "for" for op in lowered_top_k(8).body.ops)
    assert any(op.name == "sort" for op in lowered_top_k(40).body.ops)
    for k in (8, 40):
        check("top_k", [(numbers((2, 40)) * 4).astype(np.int32)], axis=1, k=k)


def lowered_top_k(k: int) -> Kernel:
    x = np.zeros((2, 40), np.int32)
    return lowered_kernel(table()["top_k"].lower, [x], dict(axis=1, k=k))


def gather_attrs(x: np.ndarray, result, numbers_, sizes, mode="clip", fill=None):
    dtype = next(d for d in DTYPES.values() if d.np == x.dtype)
    return dict(
        dimension_numbers=numbers_,
        slice_sizes=sizes,
        mode=mode,
        fill_value=fill,
        type=TileType(result, dtype),
    )


@pytest.mark.parametrize(("mode", "fill"), [("clip", None), ("fill", -5.0)])
def test_gather_of_rows(mode: str, fill):
    x = numbers((6, 4))
    rows = np.array([[5], [0], [-2], [3], [9]], np.int32)
    attrs = gather_attrs(x, (5, 4), ((1,), (0,), (0,), (), ()), (1, 4), mode, fill)
    check("gather", [x, rows], **attrs)
    # x[:, columns], the columns along the first dimension of the result
    grid = np.array([[[1], [3]], [[0], [7]]], np.int32)
    attrs = gather_attrs(x, (6, 2, 2), ((0,), (1,), (1,), (), ()), (6, 1), mode, fill)
    check("gather", [x, grid], **attrs)


def test_take_along_axis():
    x = numbers((3, 7))
    places = np.random.default_rng(0).integers(0, 7, (3, 4, 1)).astype(np.int32)
    attrs = gather_attrs(x, (3, 4), ((), (1,), (1,), (0,), (0,)), (1, 1))
    check("gather", [x, places], **attrs)


def test_gather_of_windows_is_refused():
    x, rows = numbers((6, 4)), np.zeros((5, 1), np.int32)
    attrs = gather_attrs(x, (5, 2, 4), ((1, 2), (), (0,), (), ()), (2, 4))
    with pytest.raises(NotApplicable, match="one axis"):
        lowered_kernel(table()["gather"].lower, [x, rows], attrs)


@pytest.mark.parametrize(("mode", "fill"), [("clip", None), ("fill", -5.0)])
@pytest.mark.parametrize("start", [-1, 2, 4, 5])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32, np.int64])
def test_gather_of_one_slice(mode: str, fill, start: int, dtype):
    x, place = numbers((6, 4)), np.array([start, 1], np.int64).astype(dtype)
    attrs = gather_attrs(x, (2, 3), ((0, 1), (), (0, 1), (), ()), (2, 3), mode, fill)
    check("gather", [x, place], **attrs)
    attrs = gather_attrs(x, (1, 2), ((1,), (1,), (0, 1), (), ()), (2, 1), mode, fill)
    check("gather", [x, place[None]], **attrs)


def test_gather_of_rows_that_keep_their_dimension():
    x = numbers((6, 4))
    rows = np.array([[5], [0], [9]], np.uint32)
    attrs = gather_attrs(x, (3, 1, 4), ((1, 2), (), (0,), (), ()), (1, 4))
    check("gather", [x, rows], **attrs)
    attrs = gather_attrs(x, (1, 3, 4), ((0, 2), (), (0,), (), ()), (1, 4))
    check("gather", [x, rows], **attrs)


def scatter_attrs(x: np.ndarray, numbers_, kind: str, mode: str):
    dtype = next(d for d in DTYPES.values() if d.np == x.dtype)
    attrs = dict(dimension_numbers=numbers_, kind=kind, mode=mode)
    return attrs | dict(type=TileType(x.shape, dtype))


@pytest.mark.parametrize("mode", ["clip", "fill", "promise"])
@pytest.mark.parametrize("kind", ["set", "add", "mul", "min", "max"])
def test_scatter(kind: str, mode: str):
    x = numbers((6, 4), I32)  # sums of floats depend on the order
    rows = np.array([[5], [0], [-2], [3], [9]], np.int32)
    places = np.array([[[0], [3]], [[1], [3]], [[2], [2]]], np.int32)
    # rows; columns, which come first in the updates; single elements per row; a slice
    whole = scatter_attrs(x, ((1,), (0,), (0,), (), ()), kind, mode)
    check("scatter", [x, rows, numbers((5, 4), I32)], **whole)
    columns = scatter_attrs(x, ((0,), (1,), (1,), (), ()), kind, mode)
    check("scatter", [x, rows[:3], numbers((6, 3), I32)], **columns)
    along = scatter_attrs(x[:3], ((), (1,), (1,), (0,), (0,)), kind, mode)
    if kind != "set":
        check("scatter", [x[:3], places, numbers((3, 2), I32)], **along)
    kept = scatter_attrs(x, ((1, 2), (), (0,), (), ()), kind, mode)
    check("scatter", [x, rows[:2], numbers((2, 1, 4), I32)], **kept)
    for start in (-1, 2, 5):
        place = np.array([start, 1], np.int32)
        one = scatter_attrs(x, ((0, 1), (), (0, 1), (), ()), kind, mode)
        check("scatter", [x, place, numbers((2, 3), I32)], **one)


def test_scatter_of_many_updates():
    x, rows = numbers((40, 30), I32), numbers((200, 1), I32)
    attrs = scatter_attrs(x, ((1,), (0,), (0,), (), ()), "add", "fill")
    check("scatter", [x, rows, numbers((200, 30), I32)], **attrs)


def test_scatter_of_windows_is_refused():
    x, rows = numbers((6, 4)), np.zeros((5, 1), np.int32)
    attrs = scatter_attrs(x, ((1, 2), (), (0,), (), ()), "add", "clip")
    with pytest.raises(NotApplicable, match="one axis"):
        lowered_kernel(table()["scatter"].lower, [x, rows, numbers((5, 2, 4))], attrs)
