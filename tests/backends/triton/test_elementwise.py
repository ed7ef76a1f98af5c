"""Every elementwise op this backend spells, in every type, against its meaning."""

import numpy as np
import pytest

from pallasite.backends.triton.elementwise import NATIVE
from pallasite.backends.triton.text import element
from pallasite.ir.opdef import OPS, table
from pallasite.ir.types import BOOL, DTYPES, I32, DType, TileType
from pallasite.target import GPUS, Chip
from tests.backends.triton.harness import compiled, simulated, whole_kernel
from tests.ops.sampling import attr_choices, samples, special_operands, ulp_error

COUNT = 50  # not a power of two
SHAPED = {"cast", "bitcast", "select_n", "clamp"}  # tested on their own below


def rows() -> list[tuple[str, str]]:
    # Four bits compute in 32 (test_language.py).
    spelled = [d for d in DTYPES if element(DTYPES[d]) and DTYPES[d].bits > 4]
    names = [d for d in spelled if not d.startswith("f8")]
    return [
        (name, dtype)
        for name in NATIVE
        for dtype in names
        if name not in SHAPED and DTYPES[dtype] in table()[name].dtypes
    ]


def check(
    name: str, kind: DType, operands: list[np.ndarray], chip: Chip | None = None
) -> None:
    row, tile = OPS[name], TileType(operands[0].shape, kind)
    for attrs in attr_choices(name, kind):
        result = row.type_rule((tile,) * len(operands), attrs)[0]
        kernel = whole_kernel(
            lambda b, *xs, attrs=attrs: b.op(name, *xs, **attrs),
            [tile] * len(operands),
            result,
        )
        (got,) = simulated(kernel, operands, chip=chip)
        with np.errstate(all="ignore"):
            want = np.asarray(row.meaning(*operands, **attrs))  # type: ignore[misc]
        want = want.astype(result.dtype.np)
        # One more: narrow types compute in f32 here, in their own type there.
        assert ulp_error(got, want, result.dtype).max() <= row.max_ulp + 1


@pytest.mark.parametrize(("name", "dtype"), rows())
def test_op_means_what_the_table_says(name: str, dtype: str):
    row, kind = OPS[name], DTYPES[dtype]
    check(name, kind, samples(row, kind, COUNT))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [row for row in rows() if row[1] in ("f32", "f64", "i8", "i32", "i64")],
)
def test_op_means_the_same_on_amd(name: str, dtype: str):
    row, kind = OPS[name], DTYPES[dtype]
    check(name, kind, samples(row, kind, COUNT), GPUS["mi300x"])


@pytest.mark.parametrize(
    "name",
    ["div", "rem", "sign", "max", "min", "abs", "eq", "lt", "is_finite", "round"],
)
@pytest.mark.parametrize("dtype", ["i32", "u8", "i64", "f32", "bf16"])
def test_op_on_special_values(name: str, dtype: str):
    row, kind = OPS[name], DTYPES[dtype]
    if kind in row.dtypes:
        check(name, kind, special_operands(row, kind))


@pytest.mark.parametrize(
    "name", ["shift_left", "shift_right_logical", "shift_right_arithmetic"]
)
@pytest.mark.parametrize("dtype", ["i32", "u8", "i64"])
def test_shift_past_the_width(name: str, dtype: str):
    check(name, DTYPES[dtype], special_operands(OPS[name], DTYPES[dtype]))


CASTS = ["bool", "i8", "u8", "i32", "u32", "i64", "f8e5m2", "bf16", "f16", "f32", "f64"]


@pytest.mark.parametrize("old", CASTS)
@pytest.mark.parametrize("new", CASTS)
def test_cast(old: str, new: str):
    source, target = DTYPES[old], DTYPES[new]
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 300, COUNT).astype(np.float64) * 0.75
    if source.is_float and source.bits > 8:
        x[:5] = [np.nan, np.inf, -np.inf, 3e9, -3e9]
    if not source.is_float:
        info = (0, 1) if source.is_bool else (np.iinfo(source.np).min, 127)
        x = np.clip(x, *info)
    with np.errstate(all="ignore"):
        x = x.astype(source.np)
    tile = TileType((COUNT,), source)
    kernel = whole_kernel(
        lambda b, x: b.cast(x, target), [tile], tile.with_dtype(target)
    )
    (got,) = simulated(kernel, [x])
    with np.errstate(all="ignore"):
        want = x if old == new else OPS["cast"].meaning(x, dtype=target)  # type: ignore
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def test_select_by_number_clamps_it():
    tile, which = TileType((6,), DTYPES["f32"]), TileType((6,), I32)
    kernel = whole_kernel(
        lambda b, w, x, y, z: b.op("select_n", w, x, y, z), [which, *[tile] * 3], tile
    )
    cases = [np.full(6, n, np.float32) for n in range(3)]
    (got,) = simulated(kernel, [np.array([-5, 0, 1, 2, 3, 99], np.int32), *cases])
    np.testing.assert_array_equal(got, [0, 0, 1, 2, 2, 2])


def test_select_by_scalar_bool():
    tile = TileType((3, 5), DTYPES["i8"])
    kernel = whole_kernel(
        lambda b, w, x, y: b.op("select_n", w, x, y),
        [TileType((), BOOL), tile, tile],
        tile,
    )
    x, y = np.zeros((3, 5), np.int8), np.ones((3, 5), np.int8)
    np.testing.assert_array_equal(simulated(kernel, [np.array(True), x, y])[0], y)


@pytest.mark.parametrize(
    ("old", "new"), [("f32", "i32"), ("u16", "bf16"), ("i8", "u8")]
)
def test_bitcast(old: str, new: str):
    tile = TileType((7,), DTYPES[old])
    kernel = whole_kernel(
        lambda b, x: b.op("bitcast", x, dtype=DTYPES[new]),
        [tile],
        tile.with_dtype(DTYPES[new]),
    )
    x = np.arange(7).astype(DTYPES[old].np)
    (got,) = simulated(kernel, [x])
    np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))


def test_ptxas_is_given_no_maximum_of_a_negated_number():
    """Which it may take for the number itself, see `elementwise.py`."""
    tile = TileType((32,), I32)

    def body(b, x, y):
        return b.max(b.op("abs", x), y), b.max(b.max(x, b.neg(y)), x)

    kernel = whole_kernel(body, [tile, tile], tile, tile)
    text, _ = compiled(kernel)
    assert "math.absi" not in text and "arith.subi" not in text
    x = np.arange(-16, 16, dtype=np.int32)
    first, second = simulated(kernel, [x, x + 1])
    np.testing.assert_array_equal(first, np.maximum(np.abs(x), x + 1))
    np.testing.assert_array_equal(second, np.maximum(x, -(x + 1)))
