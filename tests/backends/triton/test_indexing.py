"""Gathers and scatters of values, and bitcasts between widths, on the simulator."""

from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.errors import UnsupportedError
from pallasite.ir.types import DTYPES, F32, I32, TileType
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.triton.harness import compiled, simulated, whole_kernel
from tests.ops.sampling import evaluate

EVERY_TYPE = [
    *("bool", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "i4", "u4"),
    *("f8e4m3fn", "f8e5m2", "bf16", "f16", "f32", "f64"),
]


def numbers(shape, name="f32", seed=0) -> np.ndarray:
    dtype = DTYPES[name]
    found = np.random.default_rng(seed).integers(0, 2 if dtype.is_bool else 7, shape)
    return found.astype(dtype.np)


def assert_simulated(kernel, operands) -> str:
    """The outputs are those of the evaluator, exactly; the emitted text."""
    text, _ = compiled(kernel)
    for got, want in zip(
        simulated(kernel, operands), evaluate(kernel, operands), strict=True
    ):
        np.testing.assert_array_equal(got, want, strict=True)
    return text


def made_by(op: str, types, attrs):
    """A kernel of one op; a result of 4-bit numbers, which need even rows, is wider."""
    result: TileType = attrs["type"]
    if result.dtype.bits > 4:
        return whole_kernel(lambda b, *v: b.op(op, *v, **attrs), types, result)
    make = lambda b, *v: b.cast(b.op(op, *v, **attrs), I32)
    return whole_kernel(make, types, result.with_dtype(I32))


def indexed(body, out: np.ndarray, *operands):
    """The kernel of a function of values, traced as authors write it."""

    def kernel(*refs):
        *inputs, o_ref = refs
        o_ref[...] = body(*(ref[...] for ref in inputs))

    made = pl.pallas_call(kernel, jax.ShapeDtypeStruct(out.shape, out.dtype))
    return run(*kernels_in(made, *operands))


# --- gathers ---

# In range, past both ends, and equal ones.
ROWS = np.array([[0, 4, -9], [2, 99, 4]], np.int32)
COLUMNS = np.array([[6, 0, 3], [-1, 8, 3]], np.int32)


@pytest.mark.parametrize("name", EVERY_TYPE)
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_points_along_two_axes(name: str, mode: str):
    dtype = DTYPES[name]
    attrs = dict(
        dimension_numbers=((), (0, 1), (0, 1), (), ()),
        slice_sizes=(1, 1),
        mode=mode,
        fill_value=1,
        type=TileType(ROWS.shape, dtype),
    )
    types = [TileType((5, 7), dtype), TileType((*ROWS.shape, 2), I32)]
    kernel = made_by("gather", types, attrs)
    points = np.stack([ROWS, COLUMNS], axis=-1)
    text = assert_simulated(kernel, [numbers((5, 7), name), points])
    assert text.count("tt.gather") <= 4  # two for the two indices of a point


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_windows_of_batches_with_their_dimensions_between(mode: str):
    attrs = dict(
        dimension_numbers=((1, 3), (), (1, 2), (0,), (0,)),
        slice_sizes=(1, 2, 3),
        mode=mode,
        fill_value=-5.0,
        type=TileType((3, 2, 4, 3), F32),
    )
    types = [TileType((3, 5, 7), F32), TileType((3, 4, 2), I32)]
    kernel = made_by("gather", types, attrs)
    starts = np.random.default_rng(1).integers(-2, 8, (3, 4, 2)).astype(np.int32)
    assert_simulated(kernel, [numbers((3, 5, 7)), starts])


def test_rows_of_a_table_longer_than_is_compared():
    table, rows = numbers((300, 3)), np.array([299, 0, -1, 77, 300], np.int32)
    kernel = indexed(lambda t, i: t[i], numbers((5, 3)), table, rows)
    (got,) = simulated(kernel, [table, rows])
    np.testing.assert_array_equal(got, np.asarray(jnp.asarray(table)[rows]))


# (rows, columns) of a table: whether each row is compared with every index.
TABLES = {(8, 3): True, (64, 3): False, (256, 64): False, (256, 100): True}


@pytest.mark.parametrize("shape", TABLES)
def test_rows_of_long_tables_are_not_compared_one_by_one(shape: tuple[int, int]):
    """Those that shared memory does not hold are."""
    table = numbers(shape)
    rows = np.array([shape[0] - 1, 0, -1, 5, shape[0]], np.int32)
    kernel = indexed(lambda t, i: (2 * t)[i], numbers((5, shape[1])), table, rows)
    # Comparing takes each row of the table by a gather of its own.
    assert (compiled(kernel)[0].count("tt.gather") > 3) == TABLES[shape]
    (got,) = simulated(kernel, [table, rows])
    np.testing.assert_array_equal(got, np.asarray(jnp.asarray(2 * table)[rows]))


def test_many_updates_are_not_made_one_by_one():
    table, updates = numbers((16, 3)), numbers((256, 3))
    rows = np.random.default_rng(2).integers(-2, 18, 256).astype(np.int32)
    kernel = indexed(lambda t, i, u: t.at[i].set(u), table, table, rows, updates)
    assert len(compiled(kernel)[0].splitlines()) < 500
    (got,) = simulated(kernel, [table, rows, updates])
    want = jnp.asarray(table).at[rows].set(updates)
    np.testing.assert_array_equal(got, np.asarray(want))


@pytest.mark.parametrize("kind", ["i8", "u32", "i64", "u64"])
def test_indices_of_other_types(kind: str):
    dtype = DTYPES[kind]
    low, high = dtype.limits
    points = np.array([[0, low], [4, 6], [high, 2], [3, high]], dtype.np)
    attrs = dict(
        dimension_numbers=((), (0, 1), (0, 1), (), ()),
        slice_sizes=(1, 1),
        mode="fill",
        fill_value=-1.0,
        type=TileType((4,), F32),
    )
    types = [TileType((5, 7), F32), TileType((4, 2), dtype)]
    kernel = made_by("gather", types, attrs)
    assert_simulated(kernel, [numbers((5, 7)), points])


def test_a_tile_that_shared_memory_does_not_hold():
    x, rows = np.zeros((1024, 32), np.float32), np.zeros(4, np.int32)
    kernel = indexed(lambda x, i: jnp.sin(x)[i, i], x[:4, 0], x, rows)
    with pytest.raises(UnsupportedError, match="cannot run gather") as refusal:
        compiled(kernel)
    assert "131072 bytes" in str(refusal.value)


def along_rows(x, at):
    return jnp.take_along_axis(x, at, axis=1)


@pytest.mark.parametrize(
    "pick", [along_rows, lambda x, at: along_rows(x.astype(jnp.float32), at)]
)
@pytest.mark.parametrize("name", ["f32", "f16", "i8"])
def test_elements_of_a_large_tile_that_is_loaded_are_loaded_alone(pick, name: str):
    """Indices out of range give what the evaluator gives, too."""
    x = numbers((8, 1 << 14), name)
    at = np.random.default_rng(1).integers(-1 << 14, 1 << 14, (8, 6)).astype(np.int32)
    at[0, 0], at[3, 2] = 1 << 14, -(1 << 14) - 1
    kernel = indexed(pick, np.asarray(pick(jnp.asarray(x), jnp.asarray(at))), x, at)
    text = assert_simulated(kernel, [x, at])
    assert "tt.gather" not in text and str(1 << 14) + "x" not in text


def test_rows_of_a_part_of_a_block_are_loaded_alone():
    x, rows = numbers((2, 600, 64)), np.array([3, 599, -1, 700], np.int32)

    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = x_ref[1, 5:597:2, :][i_ref[...]]

    made = pl.pallas_call(kernel, jax.ShapeDtypeStruct((4, 64), jnp.float32))
    text = assert_simulated(run(*kernels_in(made, x, rows)), [x, rows])
    assert "tt.gather" not in text


def test_what_is_written_in_between_is_loaded_whole():
    x, at = numbers((8, 1 << 14)), np.zeros((8, 6), np.int32)

    def kernel(x_ref, i_ref, o_ref, y_ref):
        tile = y_ref[...]
        y_ref[...] = jnp.zeros_like(tile)
        o_ref[...] = along_rows(tile, i_ref[...])

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (at.shape, x.shape)]
    made = pl.pallas_call(kernel, shapes, input_output_aliases={0: 1})
    with pytest.raises(UnsupportedError, match="cannot run gather"):
        compiled(run(*kernels_in(made, x, at)))


# --- scatters ---


@pytest.mark.parametrize("name", EVERY_TYPE)
@pytest.mark.parametrize("kind", ["set", "add", "mul", "min", "max"])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_points_are_updated_along_two_axes(name: str, kind: str, mode: str):
    dtype = DTYPES[name]
    if dtype.is_bool and kind in ("add", "mul"):
        pytest.skip("bools have no arithmetic")
    tile = TileType((5, 7), dtype)
    points = np.stack([ROWS, COLUMNS], axis=-1)
    attrs = dict(dimension_numbers=((), (0, 1), (0, 1), (), ()), kind=kind, mode=mode)
    types = [tile, TileType(points.shape, I32), TileType(ROWS.shape, dtype)]
    kernel = made_by("scatter", types, attrs | {"type": tile})
    operands = [numbers((5, 7), name), points, numbers(ROWS.shape, name, 1)]
    if dtype.bits == 8 and dtype.is_float and kind in ("min", "max"):
        with pytest.raises(UnsupportedError, match="cannot run scatter"):
            compiled(kernel)
        return
    assert_simulated(kernel, operands)


@pytest.mark.parametrize("kind", ["set", "add", "max"])
def test_windows_that_overlap_are_updated_in_the_order_of_the_indices(kind: str):
    attrs = dict(dimension_numbers=((0, 2), (), (0, 1), (), ()), kind=kind, mode="fill")
    tile = TileType((6, 9), I32)
    types = [tile, TileType((4, 2), I32), TileType((2, 4, 3), I32)]
    starts = np.array([[0, 0], [1, 1], [5, 0], [0, 1]], np.int32)
    updates = np.arange(24, dtype=np.int32).reshape(2, 4, 3)
    kernel = made_by("scatter", types, attrs | {"type": tile})
    assert_simulated(kernel, [numbers((6, 9), "i32"), starts, updates])


@pytest.mark.parametrize("kind", ["set", "add", "min"])
@pytest.mark.parametrize("count", [300, 1000])
def test_many_updates_are_compared_in_rounds(count: int, kind: str):
    bins = np.random.default_rng(0).integers(-3, 103, count).astype(np.int32)
    updates = numbers((count,), "i32", 2)

    def update(bins, updates):
        start = jnp.full(100, 3, jnp.int32)
        return getattr(start.at[bins], kind)(updates, mode="drop")

    kernel = indexed(update, numbers((100,), "i32"), bins, updates)
    assert "scf.for" in assert_simulated(kernel, [bins, updates])


@pytest.mark.parametrize("kind", ["set", "add", "mul", "min", "max"])
@pytest.mark.parametrize("name", ["f32", "bf16", "i8", "i32"])
@pytest.mark.parametrize("is_stored", [True, False])
def test_long_scatters_are_done_in_memory(name: str, kind: str, is_stored: bool):
    """Rows with indices of their own, many of which meet, and some outside."""
    dtype, rng = DTYPES[name].np, np.random.default_rng(3)
    x = rng.integers(1, 3, (2, 1000)).astype(dtype)
    at = np.where(rng.random((2, 75)) < 0.6, 7, rng.integers(-1200, 1200, (2, 75)))
    updates = rng.integers(-1, 2, (2, 75)).astype(dtype)

    def update(x, at, updates):
        new = getattr(x.at[jnp.arange(2)[:, None], at], kind)(updates, mode="drop")
        return new if is_stored else new + 1

    kernel = indexed(update, x, x, at.astype(np.int32), updates)
    assert "gpu.barrier" in assert_simulated(kernel, [x, at.astype(np.int32), updates])
    assert len(compiled(kernel)[1].scratch_results) == (not is_stored)


@pytest.mark.parametrize("kind", ["set", "add", "max"])
@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("shape", [(2, 64), (3, 96), (1, 300), (2, 3, 128), (5, 2, 48)])
def test_rows_of_long_scatters_meet_only_in_themselves(shape, mode: str, kind: str):
    rng, lead = np.random.default_rng(7), shape[:-1]
    batch = tuple(range(len(lead)))
    axis = len(lead)
    numbers_of = ((), (axis,), (axis,), batch, batch)
    attrs = dict(dimension_numbers=numbers_of, kind=kind, mode=mode)
    x = TileType((*lead, 1500), F32)
    types = [x, TileType((*shape, 1), I32), TileType(shape, F32)]
    kernel = made_by("scatter", types, attrs | {"type": x})
    at = np.where(rng.random(shape) < 0.5, 9, rng.integers(-5, 1505, shape))
    operands = [
        rng.integers(-3, 3, x.shape).astype(np.float32),
        at.astype(np.int32)[..., None],
        rng.integers(-3, 3, shape).astype(np.float32),
    ]
    text = assert_simulated(kernel, operands)
    assert "gpu.barrier" in text
    if "scf.for" in text and shape[-1] % 32 == 0:  # whole rounds load their updates
        assert "tt.gather" not in text


def test_long_scatters_without_room_for_scratch_are_compared(monkeypatch):
    module = import_module("pallasite.backends.triton.flat_indices")
    monkeypatch.setattr(module, "MOST_SCRATCH", 1 << 10)
    x, at = numbers((1000,)), np.arange(600, dtype=np.int32) * 3 - 5
    add = lambda x, at: x.at[at].add(2.0, mode="drop") * 2
    kernel = indexed(add, x, x, at)
    assert "gpu.barrier" not in assert_simulated(kernel, [x, at])


# --- bitcasts ---


WIDTHS = [
    ("f32", "bf16"),
    ("f32", "u8"),
    ("u32", "i16"),
    ("u32", "u4"),
    ("i16", "i4"),
    ("f64", "f32"),
    ("i64", "f16"),
    ("u64", "i8"),
]


@pytest.mark.parametrize(("wide", "narrow"), WIDTHS)
@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_bitcasts_between_widths(wide: str, narrow: str, shape):
    old, new = DTYPES[wide], DTYPES[narrow]
    if new.bits == 4 and shape:
        shape = (4, 2)  # whole bytes are stored
    rng = np.random.default_rng(0)
    words = rng.integers(0, 256, (*shape, old.bits // 8)).astype(np.uint8)
    if old.is_float:  # no NaN, whose bits need not stay
        words[..., -1] = 0x3F
    words = words.view(old.np)[..., 0]
    tile = TileType(shape, old)
    parts = TileType((*shape, old.bits // new.bits), new)
    cut = whole_kernel(lambda b, x: b.op("bitcast", x, dtype=new), [tile], parts)
    (found,) = simulated(cut, [words])
    assert found.tobytes() == evaluate(cut, [words])[0].tobytes()
    join = whole_kernel(lambda b, x: b.op("bitcast", x, dtype=old), [parts], tile)
    (back,) = simulated(join, [found])
    assert back.tobytes() == words.tobytes()


def test_bitcast_as_authors_write_it():
    x = np.arange(24, dtype=np.uint32).reshape(3, 8) * 0x01234567
    kernel = indexed(
        lambda x: lax.bitcast_convert_type(x, jnp.uint8).reshape(3, 32),
        np.zeros((3, 32), np.uint8),
        x,
    )
    (got,) = simulated(kernel, [x])
    np.testing.assert_array_equal(got, x.view(np.uint8))
