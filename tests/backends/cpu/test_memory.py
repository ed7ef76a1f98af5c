"""Loads, stores, atomics, views and copies; hostile indices stay inside their refs."""

import numpy as np
import pytest

from pallasite.backends.cpu.llvm import scalars
from pallasite.errors import UnsupportedError
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Gather, Kernel, Loc, Span
from pallasite.ir.types import BOOL, DTYPES, F32, I32, INDEX, RefType, TileType, scalar
from tests.backends.cpu.running import llvm_of, run, tile_type, with_refs
from tests.ir.kernels import blocked, emit_pipeline, main_ref

RNG = np.random.default_rng(0)
MATRIX = tile_type(F32, 6, 8)
FULL = lambda *shape: tuple(Span(0, n) for n in shape)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def clamp(index: int, low: int, high: int) -> int:
    return max(low, min(index, high))


HOSTILE = [0, 3, -1, 100, -(2**31), 2**31 - 1]


@pytest.mark.parametrize("start", HOSTILE)
def test_box_loads_and_stores_are_clamped(start: int):
    x, row = normal(6, 8), normal(3)

    def emit(b, source, new, at, out):
        i = b.load(at)
        b.store(out, b.load(source))
        part = b.load(source, (At(), Span(None, 3, 2)), [i, i])
        total = b.add(part, b.load(new))
        b.store(out, total, (At(), Span(None, 3, 2)), [i, i])

    (got,) = run(
        with_refs(emit, [x, row, np.int32(0)], [MATRIX]), x, row, np.int32(start)
    )
    want = x.copy()
    i, j = clamp(start, 0, 5), clamp(start, 0, 3)
    want[i, j : j + 5 : 2] += row
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64, np.int8])
def test_index_types(dtype):
    x = normal(6)

    def emit(b, source, at, out):
        b.store(out, b.load(source, (At(),), [b.load(at)]))

    kernel = with_refs(emit, [x, dtype(0)], [tile_type(F32)])
    for index in (2, np.iinfo(dtype).max, np.iinfo(dtype).min):
        (got,) = run(kernel, x, dtype(index))
        assert got == x[clamp(int(index), 0, 5)]


def test_gather_reads_clamp_and_writes_drop():
    x = normal(6, 8)
    rows = np.array([0, 5, -3, 99, 2], np.int32)

    def emit(b, source, which, picked, out):
        i = b.load(which)
        values = b.load(source, (Gather(), Span(1, 4)), [i])
        b.store(picked, values)
        b.store(out, b.constant(0.0, MATRIX))
        b.store(out, values, (Gather(), Span(1, 4)), [i])

    outputs = [tile_type(F32, 5, 4), MATRIX]
    picked, got = run(with_refs(emit, [x, rows], outputs), x, rows)
    want = x[np.clip(rows, 0, 5), 1:5]
    np.testing.assert_array_equal(picked, want)
    scattered = np.zeros_like(x)
    for n, row in enumerate(rows):
        if 0 <= row < 6:
            scattered[row, 1:5] = want[n]
    np.testing.assert_array_equal(got, scattered)


def test_two_gathers_walk_together():
    x = normal(6, 8)
    i = np.array([[0, 1], [2, 9]], np.int32)
    j = np.array([[7, 6], [-1, 0]], np.int32)

    def emit(b, source, rows, cols, out):
        entries = [b.load(rows), b.load(cols)]
        b.store(out, b.load(source, (Gather(), Gather()), entries))

    (got,) = run(with_refs(emit, [x, i, j], [tile_type(F32, 2, 2)]), x, i, j)
    np.testing.assert_array_equal(got, x[np.clip(i, 0, 5), np.clip(j, 0, 7)])


def test_masked_load_and_store_obey_the_mask_element_by_element():
    x = normal(10)
    mask = RNG.integers(0, 2, 6).astype(bool)
    mask[-1] = True

    def emit(b, source, keep, out):
        start, m = b.index(5), b.load(keep)
        other = b.constant(-7.0, tile_type(F32, 6))
        values = b.load(source, (Span(None, 6),), [start], mask=m, other=other)
        b.store(out, b.constant(1.0, tile_type(F32, 10)))
        b.store(out, values, (Span(None, 6),), [start], mask=m)

    (got,) = run(with_refs(emit, [x, mask], [tile_type(F32, 10)]), x, mask)
    want = np.ones(10, np.float32)
    for n in range(5):  # the sixth is outside and is dropped
        if mask[n]:
            want[5 + n] = x[5 + n]
    np.testing.assert_array_equal(got, want)


def test_masked_load_without_mask_set_gives_other():
    x, mask = normal(4), np.array([True, False, True, False])

    def emit(b, source, keep, out):
        other = b.constant(9.0, tile_type(F32, 4))
        b.store(out, b.load(source, FULL(4), mask=b.load(keep), other=other))

    (got,) = run(with_refs(emit, [x, mask], [tile_type(F32, 4)]), x, mask)
    np.testing.assert_array_equal(got, np.where(mask, x, 9))


# --- when a load is a view ---


def test_a_load_is_not_copied():
    x = normal(6, 8)
    kernel = with_refs(lambda b, s, o: b.store(o, b.neg(b.load(s))), [x], [MATRIX])
    assert "@malloc" not in llvm_of(kernel)


def test_a_load_keeps_its_value_when_the_memory_changes():
    x = normal(6, 8)

    def emit(b, source, out):
        b.store(out, b.load(source))
        old = b.load(out)
        b.store(out, b.constant(0.0, MATRIX))
        b.store(out, b.add(b.load(out), old))

    (got,) = run(with_refs(emit, [x], [MATRIX]), x)
    np.testing.assert_array_equal(got, x)


def test_updating_in_place_needs_no_copy():
    x = normal(6, 8)

    def emit(b, source, out):
        b.store(out, b.load(source))
        b.store(out, b.mul(b.load(out), b.load(source)))

    kernel = with_refs(emit, [x], [MATRIX])
    assert "@malloc" not in llvm_of(kernel)
    np.testing.assert_array_equal(run(kernel, x)[0], x * x)


def test_storing_what_is_read_in_another_order():
    x = normal(6, 6)

    def emit(b, source, out):
        b.store(out, b.load(source))
        b.store(out, b.transpose(b.load(out), perm=(1, 0)))
        shifted = b.load(out, (Span(0, 5), Span(0, 6)))
        b.store(out, shifted, (Span(1, 5), Span(0, 6)))

    (got,) = run(with_refs(emit, [x], [tile_type(F32, 6, 6)]), x)
    want = x.T.copy()
    want[1:] = want[:-1].copy()
    np.testing.assert_array_equal(got, want)


# --- atomics ---


@pytest.mark.parametrize("kind", ["add", "max", "min", "and", "or", "xor", "xchg"])
def test_atomic_rmw_gives_the_old_value(kind: str):
    x, y = (RNG.integers(-50, 50, (4, 4)).astype(np.int32) for _ in range(2))
    type = tile_type(I32, 4, 4)

    def emit(b, source, new, out, old):
        b.store(out, b.load(source))
        attrs = dict(kind=kind, index=FULL(4, 4), mask=False)
        b.store(old, b.op("atomic_rmw", out, b.load(new), **attrs))

    got, old = run(with_refs(emit, [x, y], [type, type]), x, y)
    numpy = {"add": np.add, "max": np.maximum, "min": np.minimum}
    numpy |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    want = y if kind == "xchg" else numpy[kind](x, y)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(old, x)


def test_atomic_add_counts_repeated_indices():
    which = RNG.integers(-2, 8, 100).astype(np.int32)
    mask = RNG.integers(0, 2, 100).astype(bool)

    def emit(b, indices, keep, out):
        b.store(out, b.constant(0, tile_type(I32, 6)))
        one = b.constant(1, tile_type(I32, 100))
        attrs = dict(kind="add", index=(Gather(),), mask=True)
        b.op("atomic_rmw", out, one, b.load(indices), b.load(keep), **attrs)

    (got,) = run(with_refs(emit, [which, mask], [tile_type(I32, 6)]), which, mask)
    counted = which[mask & (which >= 0) & (which < 6)]
    np.testing.assert_array_equal(got, np.bincount(counted, minlength=6))


@pytest.mark.parametrize("dtype", [F32, DTYPES["bf16"], I32])
@pytest.mark.parametrize("kind", ["add", "max", "xchg"])
def test_slices_at_repeated_rows_are_updated_in_order(dtype, kind: str):
    """Slices that end in part of a vector; rows outside are dropped."""
    which = np.array([3, -1, 0, 3, 6, 2, 3], np.int32)
    shape, part = (6, 40), (7, 21)
    x, new = (RNG.integers(-9, 9, s).astype(dtype.np) for s in (shape, part))

    def emit(b, source, added, indices, start, out):
        b.store(out, b.load(source))
        attrs = dict(kind=kind, index=(Gather(), Span(None, 21)), mask=False)
        operands = b.load(indices), b.load(start)
        b.op("atomic_rmw", out, b.load(added), *operands, **attrs)

    operands = [x, new, which, np.int32(4)]
    (got,) = run(with_refs(emit, operands, [tile_type(dtype, *shape)]), *operands)
    want = x.copy()
    for n, row in enumerate(which):
        if 0 <= row < 6:
            old = want[row, 4:25]
            changed = {"add": old + new[n], "max": np.maximum(old, new[n])}
            want[row, 4:25] = changed.get(kind, new[n])
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_atomic_cas_swaps_only_what_is_expected():
    x = np.array([1, 2, 3], np.int32)

    def emit(b, source, out, old):
        b.store(out, b.load(source))
        for at, expected in ((0, 1), (1, 7)):
            compare, value = b.index(expected), b.index(100)
            was = b.op("atomic_cas", out, compare, value, index=(At(at),))
            b.store(old, was, (At(at),))
        b.store(old, b.index(0), (At(2),))

    type = tile_type(I32, 3)
    got, old = run(with_refs(emit, [x], [type, type]), x)
    np.testing.assert_array_equal(got, [100, 2, 3])
    np.testing.assert_array_equal(old, [1, 2, 0])


# --- views, scratch, copies ---


def test_views_of_views():
    x = normal(6, 8)

    def emit(b, source, at, out):
        rows = b.subview(source, (Span(None, 3, 2), Span(1, 6)), [b.load(at)])
        transposed = b.op("transpose_view", rows, perm=(1, 0))
        b.store(out, b.load(transposed, (Span(0, 6), Span(0, 3))))

    kernel = with_refs(emit, [x, np.int32(0)], [tile_type(F32, 6, 3)])
    for start in (0, 1, 50):
        i = clamp(start, 0, 1)
        (got,) = run(kernel, x, np.int32(start))
        np.testing.assert_array_equal(got, x[i : i + 5 : 2, 1:7].T)


def test_storing_through_a_reshaped_view():
    x = normal(24)

    def emit(b, source, out):
        b.store(b.op("reshape_view", out, shape=(24,)), b.load(source))
        same = b.op("bitcast_view", out, dtype=I32)
        b.store(same, b.index(0), (At(0), At(0)))

    (got,) = run(with_refs(emit, [x], [tile_type(F32, 4, 6)]), x)
    want = x.reshape(4, 6).copy()
    want[0, 0] = 0
    np.testing.assert_array_equal(got, want)


def test_scratch_copies_and_semaphores():
    x = normal(6, 8)

    def emit(b, source, out, count):
        scratch = b.op("alloc", type=RefType((6, 8), F32, "vmem"))
        sem = b.op("alloc", type=RefType((), I32, "dma_sem"))
        b.emit("copy_start", source, scratch, sem, priority=0)
        pending = b.op("sem_read", sem)
        b.emit("copy_wait", source, scratch, sem)
        b.store(out, b.neg(b.load(scratch)))
        b.emit("sem_signal", sem, b.index(5))
        b.emit("sem_wait", sem, b.index(2))
        ten = b.mul(pending, b.index(10))
        b.store(count, b.add(ten, b.op("sem_read", sem)))

    got, count = run(with_refs(emit, [x], [MATRIX, scalar(I32)]), x)
    np.testing.assert_array_equal(got, -x)
    assert count == 13


def test_a_copy_onto_itself_shifted():
    x = normal(8)

    def emit(b, source, out):
        b.store(out, b.load(source))
        first, second = (b.subview(out, (Span(n, 7),)) for n in (0, 1))
        b.emit("copy_start", first, second, priority=0)

    (got,) = run(with_refs(emit, [x], [tile_type(F32, 8)]), x)
    np.testing.assert_array_equal(got, [x[0], *x[:7]])


# --- checks and refusals ---


def test_debug_check_raises_its_message():
    x = np.array([1.0, 2.0], np.float32)

    def emit(b, source, out):
        value = b.load(source)
        small = b.lt(value, b.constant(5.0, value.tile))
        ok = b.reduce(small, kind="and", axes=(0,))
        b.loc = Loc("kernel.py", 12, "check")
        b.emit("debug_check", ok, message="values must be small")
        b.store(out, value)

    kernel = with_refs(emit, [x], [tile_type(F32, 2)])
    np.testing.assert_array_equal(run(kernel, x)[0], x)
    with pytest.raises(Exception, match=r"values must be small at kernel\.py:12"):
        run(kernel, 10 * x)


def test_missing_element_type_is_refused_with_the_line(monkeypatch):
    monkeypatch.delitem(scalars.SPELLINGS, "f4e2m1fn")  # none is missing

    def emit(b, out):
        b.loc = Loc("kernel.py", 3, "body")
        tiny = b.constant(1, TileType((4,), DTYPES["f4e2m1fn"]))
        b.store(out, b.cast(b.cast(tiny, I32), BOOL))

    with pytest.raises(UnsupportedError) as error:
        llvm_of(with_refs(emit, [], [tile_type(BOOL, 4)]))
    text = str(error.value)
    assert text.startswith("backend 'cpu' does not support element type f4e2m1fn\n")
    assert "kernel.py:3 in body" in text


def test_prints_in_the_order_of_the_grid(capsys):
    x, o = main_ref("x", 6), main_ref("o", 6)

    def body(b, ids, block, out):
        value = b.load(block)
        first = b.load(block, (At(0),))
        b.emit("debug_print", ids[0], first, value, format="{}: {:.2f} of {}")
        b.store(out, value)

    b = Builder()
    windows = [blocked("in", 2), blocked("out", 2)]
    emit_pipeline(
        b, [x, o], windows, [lambda b, i: (i,)] * 2, (3,), body, ("parallel",)
    )
    kernel = Kernel("prints", (x, o), b.block(), 1)
    run(kernel, np.arange(6, dtype=np.float32))
    lines = ["0: 0.00 of [0. 1.]", "1: 2.00 of [2. 3.]", "2: 4.00 of [4. 5.]"]
    assert capsys.readouterr().out.splitlines() == lines


def test_scalar_stores_and_loads():
    x = np.arange(4, dtype=np.int32)

    def emit(b, source, out):
        total = b.constant(0, INDEX)
        for n in range(4):
            total = b.add(total, b.load(source, (At(n),)))
        b.store(out, total)

    (got,) = run(with_refs(emit, [x], [scalar(I32)]), x)
    assert got == 6
