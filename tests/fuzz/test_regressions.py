"""What random kernels found, each as small as it gets."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from pallasite.emulation.emulate import emulate
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, BlockDim, Gather, Kernel, Span, Value, Window
from pallasite.ir.types import (
    BOOL,
    F32,
    I8,
    I32,
    I64,
    INDEX,
    U8,
    U32,
    RefType,
    TileType,
)
from pallasite.ir.verify import verify
from tests.backends.cpu.direct import Code
from tests.backends.cpu.running import region, tiles_kernel, with_refs
from tests.fuzz.agreement import expected, mismatch, run_numpy
from tests.fuzz.generate import Case
from tests.ir.kernels import blocked, emit_pipeline, main_ref, when

EIGHT = np.arange(8, dtype=np.int32)


def results(
    kernel: Kernel, *arrays: np.ndarray, native: bool = True
) -> list[np.ndarray]:
    """What both evaluators and machine code give, which must be the same."""
    verify(kernel)
    found = run_numpy(kernel, arrays)
    others = [jax.jit(emulate(kernel))(*arrays)]
    if native:
        others.append(Code(kernel, optimise=False)(*arrays))
    for other in others:
        for a, b in zip(found, other, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))
    return found


def of_tiles(function, *arrays: np.ndarray) -> list[np.ndarray]:
    return results(tiles_kernel(function, arrays), *arrays)


# --- tiles ---


def test_bitcast_of_a_scalar():
    number = np.int32(0x01020304)
    (same, parts) = of_tiles(
        lambda b, x: (b.bitcast(x, dtype=F32), b.bitcast(x, dtype=U8)), number
    )
    assert same.shape == () and same.view(np.int32) == number
    np.testing.assert_array_equal(parts, [4, 3, 2, 1])


def test_subnormal_f16_are_rounded_in_their_own_bits():
    """In f32 they are normal numbers, of which seven bits keep more."""
    numbers = np.array([17, 25, 3, 1000, -17], np.float16) * np.float16(2.0**-24)
    attrs = {"exponent_bits": 8, "mantissa_bits": 7}
    (found,) = of_tiles(lambda b, x: b.op("reduce_precision", x, **attrs), numbers)
    counted = found.astype(np.float32) * 2.0**24
    np.testing.assert_array_equal(counted, [16, 24, 0, 1000, -16])


def test_dot_to_a_scalar():
    attrs = dict(contract=((0,), (0,)), batch=((), ()), dtype=I32, precision=None)
    (found,) = of_tiles(lambda b, x: b.dot(x, x, **attrs), EIGHT)
    assert found.shape == () and found == 140


def test_dynamic_slice_is_clamped_to_the_block_it_slices():
    # XLA (jax 0.10) merges the slice that makes the block with this one.
    x, i = main_ref("x", 8, dtype=I32), main_ref("i", dtype=I32)
    o = main_ref("o", 4, dtype=I32)

    def body(b: Builder, ids, block: Value, out: Value):
        start = b.load(i, ())
        b.store(out, b.op("dynamic_slice", b.load(block), start, sizes=(1,)))

    b = Builder()
    by_id = lambda b, i: (i,)
    windows = (blocked("in", 2), blocked("out", 1))
    emit_pipeline(b, (x, o), windows, (by_id, by_id), (4,), body)
    kernel = Kernel("k", (x, i, o), b.block(), 1)
    for start, wanted in ((0, [0, 2, 4, 6]), (5, [1, 3, 5, 7]), (-3, [0, 2, 4, 6])):
        (found,) = results(kernel, EIGHT, np.int32(start))
        np.testing.assert_array_equal(found, wanted)


def test_shifted_update_then_reshape():
    # XLA on CPU updates in place what the same fusion still reads.
    def shift(b: Builder, x: Value) -> Value:
        part = b.slice(x, starts=(0,), limits=(5,), strides=(1,))
        return b.reshape(b.dynamic_update_slice(x, part, b.index(1)), shape=(1, 8))

    (found,) = of_tiles(shift, EIGHT)
    np.testing.assert_array_equal(found, [[0, 0, 1, 2, 3, 4, 6, 7]])


# --- indices ---


def loaded(index, shape: tuple[int, ...], make_operands, mask=None, x=EIGHT):
    """What `x[index]` gives; `make_operands(builder)` makes the index operands."""

    def emit(b: Builder, ref: Value, out: Value) -> None:
        mask_value = None if mask is None else b.constant(mask, TileType(shape, BOOL))
        other = None if mask is None else b.constant(-1, TileType(shape, I32))
        value = b.load(ref, index, make_operands(b), mask_value, other)
        b.store(out, value)

    (found,) = results(with_refs(emit, [x], [TileType(shape, I32)]), x)
    return found


@pytest.mark.parametrize(
    "start, wanted", [(6, [6, 7, 7]), (-1, [0, 0, 1]), (2**31 - 1, [7] * 3)]
)
def test_masked_load_clamps_each_element(start: int, wanted: Sequence[int]):
    found = loaded((Span(None, 3),), (3,), lambda b: [b.index(start)], mask=True)
    np.testing.assert_array_equal(found, wanted)
    found = loaded((Span(None, 3),), (3,), lambda b: [b.index(start)], mask=False)
    np.testing.assert_array_equal(found, [-1] * 3)


def test_unsigned_start_past_the_signed_range_is_large():
    far = lambda b: [b.constant(2**32 - 1, TileType((), U32))]
    np.testing.assert_array_equal(loaded((Span(None, 3),), (3,), far), [5, 6, 7])
    assert loaded((At(None),), (), far) == 7


def test_gather_far_outside_does_not_wrap_around_into_a_strided_view():
    def emit(b: Builder, ref: Value, out: Value) -> None:
        odd = b.subview(ref, (Span(1, 2, 4),))
        far = b.constant(2**30, TileType((2,), I32))  # times 4 is 0 in 32 bits
        b.store(out, b.load(odd, (Gather(),), [far]))
        b.store(odd, b.constant(9, TileType((2,), I32)), (Gather(),), [far])

    kernel = with_refs(emit, [EIGHT], [TileType((2,), I32)])
    (found,) = results(kernel, EIGHT)
    np.testing.assert_array_equal(found, [5, 5])


@pytest.mark.parametrize("mask, wanted", [(True, [6, -7, -7]), (False, [-1] * 3)])
def test_masked_load_of_a_filled_block(mask: bool, wanted: Sequence[int]):
    """Masked off is `other`, the edge the fill, past the block its last element."""
    x, o = main_ref("x", 7, dtype=I32), main_ref("o", 3, dtype=I32)

    def body(b: Builder, ids, block: Value, out: Value):
        mask_value = b.constant(mask, TileType((3,), BOOL))
        other = b.constant(-1, TileType((3,), I32))
        index = (Span(None, 3),)
        b.store(out, b.load(block, index, [b.index(2)], mask_value, other))

    windows = (Window((BlockDim(4),), "in", fill=-7), blocked("out", 3))
    maps = (lambda b: (b.index(1),), lambda b: (b.index(0),))
    b = Builder()
    emit_pipeline(b, (x, o), windows, maps, (), body)
    (found,) = results(Kernel("k", (x, o), b.block(), 1), EIGHT[:7])
    np.testing.assert_array_equal(found, wanted)


# --- views ---


def test_views_of_one_element_can_be_written():
    def emit(b: Builder, ref: Value, out: Value) -> None:
        b.store(out, b.load(ref))
        one = b.subview(b.reshape_view(out, shape=(2, 4)), (At(1), At(2)))
        b.store(one, b.constant(40, INDEX))
        kind = dict(kind="add", index=(), mask=False)
        b.op("atomic_rmw", one, b.constant(2, INDEX), **kind)

    kernel = with_refs(emit, [EIGHT], [TileType((8,), I32)])
    (found,) = results(kernel, EIGHT)
    np.testing.assert_array_equal(found, [0, 1, 2, 3, 4, 5, 42, 7])


# --- control ---


@pytest.mark.parametrize("dtype", [I8, U8, I32, U32], ids=str)
@pytest.mark.parametrize("first, limit", [(1, 4), (3, 1), (0, 0)])
def test_loops_count_with_any_integer(dtype, first: int, limit: int):
    def count(b: Builder, lo: Value, hi: Value) -> Value:
        i, n = Value(TileType((), dtype)), Value(INDEX)
        body = region((i, n), lambda c, i, n: c.add(n, c.index(1)))
        step = b.constant(1, TileType((), dtype))
        return b.emit("for", lo, hi, step, b.index(0), regions=(body,))[0]

    lo, hi = (np.array(n, dtype.np) for n in (first, limit))
    (found,) = of_tiles(count, lo, hi)
    assert found == max(0, limit - first)


def nested(kind: str):
    """A store into an output block, in code inside a branch."""

    def store(b: Builder, out: Value, i: Value) -> None:
        index = (At(None),)
        b.store(out, b.add(b.load(out, index, [i]), b.index(10)), index, [i])

    def emit(b: Builder, out: Value, which: Value) -> None:
        if kind == "for":
            i = Value(INDEX)
            body = region((i,), lambda c, i: store(c, out, i))
            b.emit("for", b.index(0), b.index(2), b.index(1), regions=(body,))
        elif kind == "cond":
            inner = Builder()
            store(inner, out, which)
            # An op that keeps the branch from being folded into selects.
            inner.op("exp", inner.constant(0.0, TileType((), F32)))
            b.emit("cond", which, regions=(Block(), inner.block()))
        else:
            i = Value(INDEX)
            go = region((Value(INDEX),), lambda c, i: c.lt(i, c.index(2)))

            def step(c: Builder, i: Value) -> Value:
                store(c, out, i)
                return c.add(i, c.index(1))

            b.emit("while", b.index(0), regions=(go, region((i,), step)))

    return emit


@pytest.mark.parametrize("kind, wanted", [("for", 20), ("while", 20), ("cond", 10)])
def test_stores_of_code_inside_a_branch_are_kept(kind: str, wanted: int):
    o = main_ref("o", 6, dtype=I32)

    def body(b: Builder, ids, out: Value):
        b.store(out, b.constant(0, TileType((3,), I32)))
        emit = nested(kind)
        when(b, b.eq(ids[0], b.index(1)), lambda c: emit(c, out, ids[0]))

    b = Builder()
    by_id = lambda b, i: (i,)
    emit_pipeline(b, (o,), (blocked("out", 3),), (by_id,), (2,), body)
    (found,) = results(Kernel("k", (o,), b.block(), 1))
    assert found[:3].sum() == 0 and found[3:].sum() == wanted


def test_block_views_are_run():
    """`to_loops` makes them of windows."""
    x, o = main_ref("x", 7, dtype=I32), main_ref("o", 4, dtype=I32)
    b = Builder()
    window = Window((BlockDim(4),), "in", fill=-7)
    block = b.op("block_view", x, b.index(1), window=window)
    assert block.type == RefType((4,), I32)
    b.store(o, b.load(block))
    kernel = Kernel("k", (x, o), b.block(), 1)
    (found,) = results(kernel, EIGHT[:7], native=False)
    np.testing.assert_array_equal(found, [4, 5, 6, -7])


# --- windows ---


@pytest.mark.parametrize("number, wanted", [(-1, 0), (0, 0), (1, 1), (7, 1)])
def test_blocks_that_do_not_exist_are_clamped_then_cut(number: int, wanted: int):
    """Machine code took a block before the first one for one inside the array."""
    x, o = main_ref("x", 6, dtype=I32), main_ref("o", 4, dtype=I32)
    windows = (Window((BlockDim(4),), "in", fill=-7), blocked("out", 4))
    maps = (lambda b: (b.index(number),), lambda b: (b.index(0),))
    b = Builder()
    copy = lambda c, ids, block, out: c.store(out, c.load(block))
    emit_pipeline(b, (x, o), windows, maps, (), copy)
    (found,) = results(Kernel("k", (x, o), b.block(), 1), EIGHT[:6])
    np.testing.assert_array_equal(found, [[0, 1, 2, 3], [4, 5, -7, -7]][wanted])


def test_a_larger_block_than_the_array_before_the_first_one():
    x, o = main_ref("x", 5, dtype=I32), main_ref("o", 6, dtype=I32)
    windows = (Window((BlockDim(6),), "in", fill=-7), blocked("out", 6))
    maps = (lambda b: (b.index(-1),), lambda b: (b.index(0),))
    b = Builder()
    copy = lambda c, ids, block, out: c.store(out, c.load(block))
    emit_pipeline(b, (x, o), windows, maps, (), copy)
    (found,) = results(Kernel("k", (x, o), b.block(), 1), EIGHT[:5])
    np.testing.assert_array_equal(found, [0, 1, 2, 3, 4, -7])


@pytest.mark.parametrize("fill", [None, -7])
@pytest.mark.parametrize("apart", [0, 1])
def test_an_overhanging_block_sees_what_its_alias_writes(fill, apart: int):
    """Through windows that move together, and through others."""
    x, o = main_ref("x", 7, dtype=I32), main_ref("o", 7, dtype=I32)
    s = main_ref("s", 2, 2, dtype=I32)

    def body(b: Builder, ids, old: Value, new: Value, seen: Value):
        first = (Span(0, 2),)
        b.store(new, b.constant(50, TileType((2,), I32)), first)
        b.store(seen, b.load(old, first))

    windows = (
        Window((BlockDim(4),), "in", fill=fill),
        Window((BlockDim(4),), "out"),
        Window((BlockDim(1, "squeezed"), BlockDim(2)), "out"),
    )
    maps = (
        lambda b, i: (i,),
        lambda b, i: (b.max(b.sub(i, b.index(apart)), b.index(0)),),
        lambda b, i: (i, b.index(0)),
    )
    b = Builder()
    emit_pipeline(b, (x, o, s), windows, maps, (2,), body)
    kernel = Kernel("k", (x, o, s), b.block(), 2, ((0, 0),))
    new, seen = results(kernel, EIGHT[:7])
    if apart:
        np.testing.assert_array_equal(new, [50, 50, 2, 3, 4, 5, 6])
        np.testing.assert_array_equal(seen, [[50, 50], [4, 5]])
    else:
        np.testing.assert_array_equal(new, [50, 50, 2, 3, 50, 50, 6])
        np.testing.assert_array_equal(seen, [[50, 50], [50, 50]])


def test_what_is_written_to_an_input_block_stays_for_later_programs():
    x, o = main_ref("x", 7, dtype=I32), main_ref("o", 3, 4, dtype=I32)

    def body(b: Builder, ids, block: Value, out: Value):
        b.store(block, b.add(b.load(block), b.like(10, b.load(block))))
        b.store(out, b.load(block))

    windows = (
        Window((BlockDim(4),), "in", fill=-7),
        Window((BlockDim(1, "squeezed"), BlockDim(4)), "out"),
    )
    maps = (lambda b, i: (b.index(1),), lambda b, i: (i, b.index(0)))
    b = Builder()
    emit_pipeline(b, (x, o), windows, maps, (3,), body)
    (found,) = results(Kernel("k", (x, o), b.block(), 1), EIGHT[:7])
    added = 10 * np.arange(1, 4)[:, None] + [4, 5, 6]
    np.testing.assert_array_equal(found[:, :3], added)


def test_an_atomic_outside_the_array_gives_the_fill_value():
    x, o = main_ref("x", 6, dtype=I32), main_ref("o", 4, dtype=I32)

    def body(b: Builder, ids, block: Value, out: Value):
        ones = b.constant(1, TileType((4,), I32))
        attrs = dict(kind="add", index=(Span(0, 4),), mask=False)
        b.store(out, b.op("atomic_rmw", block, ones, **attrs))

    windows = (Window((BlockDim(4),), "in", fill=-7), blocked("out", 4))
    maps = (lambda b: (b.index(1),), lambda b: (b.index(0),))
    b = Builder()
    emit_pipeline(b, (x, o), windows, maps, (), body)
    (found,) = results(Kernel("k", (x, o), b.block(), 1), EIGHT[:6])
    np.testing.assert_array_equal(found, [4, 5, -7, -7])


# --- loops ---


@pytest.mark.parametrize(
    "first, limit, step",
    [(-(2**63), 2**63 - 1, 2**62), (2**63 - 1, -(2**63), -(2**62)), (0, 5, 2**63 - 1)],
)
def test_loops_over_the_whole_range(first: int, limit: int, step: int):
    def count(b: Builder, *bounds: Value) -> Value:
        params = (Value(TileType((), I64)), Value(INDEX))
        body = region(params, lambda c, i, n: c.add(n, c.index(1)))
        return b.emit("for", *bounds, b.index(0), regions=(body,))[0]

    bounds = [np.int64(n) for n in (first, limit, step)]
    kernel = tiles_kernel(count, bounds)
    (found,) = Code(kernel)(*bounds)
    assert found == len(range(first, limit, step))


# --- fill values ---


def filled(mode: str, fill: float | None, *sizes: int) -> Window:
    return Window(tuple(map(BlockDim, sizes)), mode, fill=fill)


@pytest.mark.parametrize("inner_fill", [None, 7.0])
@pytest.mark.parametrize("written", [False, True])
def test_a_window_of_a_filled_block_shows_its_fill(inner_fill, written):
    """Blocks of 4 of five elements, and in these blocks of 2 (or of 3, which hang)."""
    x, o = main_ref("x", 5), main_ref("o", 4 if inner_fill is None else 6, 2)
    size = 2 if inner_fill is None else 3
    window = Window((BlockDim(o.ref.shape[0]), BlockDim(1, "squeezed")), "out")

    def body(b: Builder, ids, block: Value, out: Value) -> None:
        if written:
            b.store(block, b.add(b.load(block), b.load(block)))
        copy = lambda c, ids, u, v: c.store(v, c.load(u))
        inner = [filled("in", inner_fill, size), blocked("out", size)]
        emit_pipeline(b, (block, out), inner, [lambda c, k: (k,)] * 2, (2,), copy)

    b = Builder()
    maps = [lambda b, i: (i,), lambda b, i: (b.index(0), i)]
    emit_pipeline(b, (x, o), (filled("in", 2.0, 4), window), maps, (2,), body)
    kernel = Kernel("nested", (x, o), b.block(), 1)
    (got,) = results(kernel, np.arange(5, dtype=np.float32))
    times = 2 if written else 1
    first, second = [0, times, 2 * times, 3 * times], [4 * times, 2, 2, 2]
    more = [] if inner_fill is None else [7, 7]
    np.testing.assert_array_equal(got.T, [first + more, second + more])


def test_a_window_of_a_filled_block_stays_in_it():
    """The inner blocks hang over the outer one, not over the array."""
    o = main_ref("o", 7)

    def body(b: Builder, ids, out: Value) -> None:
        number = lambda c: c.broadcast(c.cast(ids[0], F32), (3,))
        write = lambda c, _, v: c.store(v, number(c))
        emit_pipeline(b, (out,), (blocked("out", 3),), [lambda c, k: (k,)], (2,), write)

    b = Builder()
    backwards = lambda b, i: (b.sub(b.index(1), i),)
    emit_pipeline(b, (o,), (filled("out", 2.0, 4),), [backwards], (2,), body)
    (got,) = results(Kernel("inside", (o,), b.block(), 1))
    np.testing.assert_array_equal(got, [1, 1, 1, 1, 0, 0, 0])


def test_windows_of_one_operand_have_their_own_fills():
    x, o, p = main_ref("x", 5), main_ref("o", 8), main_ref("p", 8)

    def body(b: Builder, ids, *blocks: Value) -> None:
        for source, target in zip(blocks[:2], blocks[2:], strict=True):
            b.store(target, b.load(source))

    windows = [filled("in", 2.0, 4), filled("in", 3.0, 4)]
    windows += [blocked("out", 4), blocked("out", 4)]
    b = Builder()
    emit_pipeline(b, (x, x, o, p), windows, [lambda b, i: (i,)] * 4, (2,), body)
    kernel = Kernel("fills", (x, o, p), b.block(), 2)
    got = results(kernel, np.arange(5, dtype=np.float32))
    for fill, result in zip((2, 3), got, strict=True):
        np.testing.assert_array_equal(result, [0, 1, 2, 3, 4, fill, fill, fill])


def test_an_atomic_through_a_view_finds_the_fill():
    x, o, p = main_ref("x", 5), main_ref("o", 5), main_ref("p", 2, 2, 2)

    def body(b: Builder, ids, block: Value, old: Value) -> None:
        view = b.op("reshape_view", block, shape=(2, 2))
        attrs = dict(kind="add", index=(Span(0, 2), Span(0, 2)), mask=False)
        ones = b.constant(1.0, view.ref.tile)
        b.store(old, b.op("atomic_rmw", view, ones, **attrs))

    windows = [filled("out", 9.0, 4)]
    windows += [Window((BlockDim(1, "squeezed"), BlockDim(2), BlockDim(2)), "out")]
    maps = [lambda b, i: (i,), lambda b, i: (i, b.index(0), b.index(0))]
    b = Builder()
    emit_pipeline(b, (o, p), windows, maps, (2,), body)
    kernel = Kernel("atomic", (x, o, p), b.block(), 2, ((0, 0),))
    new, old = results(kernel, np.arange(5, dtype=np.float32))
    np.testing.assert_array_equal(new, np.arange(5) + 1)
    np.testing.assert_array_equal(old.ravel(), [0, 1, 2, 3, 4, 9, 9, 9])


def test_what_overflows_in_one_order_of_a_sum_may_be_anything():
    """A product that overflows, and is fused with a sum that is -inf already or not."""
    huge = np.array([[3e38, -np.inf]], np.float32)
    by = np.array([[2.0], [1.0]], np.float32)
    contract = dict(contract=((1,), (0,)), batch=((), ()), dtype=F32, precision=None)
    dot = lambda b, x, y: b.op("dot", x, y, **contract)
    case = Case(tiles_kernel(dot, [huge, by]), (huge, by))
    for result in (-np.inf, np.nan, 7.0):
        got = [np.full((1, 1), result, np.float32)]
        assert mismatch(got, *expected(case)) is None
    case = Case(case.kernel, (np.ones_like(huge), by))
    assert mismatch([np.full((1, 1), -np.inf, np.float32)], *expected(case))
