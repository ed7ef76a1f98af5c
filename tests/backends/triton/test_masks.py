"""Masked accesses: elements that are on and out of range are clamped or dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import UnsupportedError
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, BlockDim, Gather, Kernel, Span, Value, Window
from pallasite.ir.types import BOOL, I8, I32, I64, TileType
from pallasite.passes.run import run as run_passes
from pallasite.sites import kernels_in
from tests.backends.cpu.running import with_refs
from tests.backends.cuda import host
from tests.backends.triton.harness import compiled, simulated
from tests.fuzz.agreement import run_numpy
from tests.ir.kernels import blocked, emit_pipeline, main_ref

EIGHT = np.arange(10, 18, dtype=np.int32)
TABLE = np.arange(20, dtype=np.int32).reshape(4, 5)
FAR = 2**31 - 1


def agree(kernel: Kernel, *arrays: np.ndarray) -> np.ndarray:
    """What the kernel's first output is, on Triton and by the evaluator."""
    (wanted, *_), (found, *_) = run_numpy(kernel, arrays), simulated(kernel, arrays)
    np.testing.assert_array_equal(found, wanted)
    return found


def on(b: Builder, *shape: int) -> Value:
    return b.constant(True, TileType(shape, BOOL))


def number(value: int) -> np.ndarray:
    return np.array(value, np.int32)


@pytest.mark.parametrize("known", [True, False], ids=["constant", "traced"])
@pytest.mark.parametrize(
    "start, wanted",
    [
        (6, [16, 17, 17]),
        (-1, [10, 10, 11]),
        (FAR, [17, 17, 17]),
        (FAR - 1, [17, 17, 17]),
        (-FAR, [10, 10, 10]),
    ],
)
def test_a_load_clamps_each_element(known: bool, start: int, wanted: list[int]):
    def emit(b: Builder, x: Value, at: Value, out: Value) -> None:
        first = b.index(start) if known else b.load(at)
        b.store(out, b.load(x, (Span(None, 3),), [first], on(b, 3)))

    kernel = with_refs(emit, [EIGHT, number(start)], [TileType((3,), I32)])
    assert list(agree(kernel, EIGHT, number(start))) == wanted


@pytest.mark.parametrize("start, row", [(-1, 0), (2, 2), (4, 3), (FAR, 3)])
def test_a_load_clamps_a_point_beside_a_slice(start: int, row: int):
    def emit(b: Builder, x: Value, at: Value, out: Value) -> None:
        index = (At(None), Span(None, 3, 2))
        b.store(out, b.load(x, index, [b.load(at), b.load(at)], on(b, 3)))

    kernel = with_refs(emit, [TABLE, number(start)], [TileType((3,), I32)])
    columns = np.clip(start + 2 * np.arange(3), 0, 4)
    found = agree(kernel, TABLE, number(start))
    np.testing.assert_array_equal(found, TABLE[row, columns])


def test_a_load_of_one_element_is_clamped():
    def emit(b: Builder, x: Value, at: Value, out: Value) -> None:
        b.store(out, b.load(x, (At(None),), [b.load(at)], on(b)))

    kernel = with_refs(emit, [EIGHT, number(0)], [TileType((), I32)])
    assert agree(kernel, EIGHT, number(99)) == 17


EMPTY = {
    "masked point": lambda b, x, i: b.load(x, (At(None),), [i], on(b)),
    "point": lambda b, x, i: b.load(x, (At(None),), [i]),
    "gather": lambda b, x, i: b.load(x, (Gather(),), [b.broadcast(i, (4,))]),
    "point of a view": lambda b, x, i: b.load(b.subview(x, (At(None),), [i])),
}


@pytest.mark.parametrize("access", EMPTY.values(), ids=EMPTY)
def test_a_load_from_an_empty_ref_touches_nothing(access):
    """Out of bounds is an error of the simulator."""
    empty = np.zeros(0, np.int32)

    def emit(b: Builder, x: Value, at: Value, out: Value) -> None:
        b.store(out, b.broadcast(access(b, x, b.load(at)), (4,)))

    kernel = with_refs(emit, [empty, number(0)], [TileType((4,), I32)])
    simulated(kernel, [empty, number(1)])


@pytest.mark.parametrize("start", [-2, 0, 3, 6, 8, -FAR, FAR])
def test_a_store_drops_what_is_out_of_range(start: int):
    def emit(b: Builder, at: Value, out: Value) -> None:
        b.store(out, b.constant(0, TileType((8,), I32)))
        places = b.iota(type=TileType((4,), I32), dim=0)
        b.store(out, places, (Span(None, 4),), [b.load(at)], on(b, 4))

    kernel = with_refs(emit, [number(start)], [TileType((8,), I32)])
    wanted = np.zeros(8, np.int32)
    for step in range(4):
        if 0 <= start + step < 8:
            wanted[start + step] = step
    np.testing.assert_array_equal(agree(kernel, number(start)), wanted)


@pytest.mark.parametrize("start", [-2, 3, 6, -FAR, FAR])
def test_an_atomic_drops_what_is_out_of_range(start: int):
    def emit(b: Builder, at: Value, out: Value) -> None:
        b.store(out, b.constant(5, TileType((8,), I32)))
        ones, first = b.constant(1, TileType((4,), I32)), b.load(at)
        attrs = dict(kind="add", index=(Span(None, 4),), mask=True)
        b.op("atomic_rmw", out, ones, first, on(b, 4), **attrs)

    kernel = with_refs(emit, [number(start)], [TileType((8,), I32)])
    places = np.arange(8) - start
    wanted = np.where((places >= 0) & (places < 4), 6, 5)
    np.testing.assert_array_equal(agree(kernel, number(start)), wanted)


def test_an_atomic_outside_the_array_gives_the_fill():
    """The second element of the block is past the array's end."""
    x, o = main_ref("x", 5, dtype=I32), main_ref("o", 2, dtype=I32)

    def body(b: Builder, ids, block: Value, out: Value) -> None:
        b.store(block, b.constant(5, TileType((4,), I32)))
        ones = b.constant(1, TileType((2,), I32))
        attrs = dict(kind="add", index=(Span(0, 2),), mask=False)
        b.store(out, b.op("atomic_rmw", block, ones, **attrs))

    windows = (Window((BlockDim(4),), "out", fill=-7), blocked("out", 2))
    maps = (lambda b: (b.index(1),), lambda b: (b.index(0),))
    b = Builder()
    emit_pipeline(b, (x, o), windows, maps, (), body)
    kernel = Kernel("k", (x, o), b.block(), 2)
    (_, wanted), (_, found) = run_numpy(kernel, []), simulated(kernel, [])
    np.testing.assert_array_equal(wanted, [5, -7])
    np.testing.assert_array_equal(found, wanted)


# --- masks that say where positions are ---


def masked_by(mask, *, bits=I32) -> Kernel:
    """Program i reads three elements from `2 * i` on; `mask` is made of positions."""
    x, o = main_ref("x", 8, dtype=I32), main_ref("o", 18, dtype=I32)

    def body(b: Builder, ids, source: Value, out: Value) -> None:
        (i,) = ids
        start = b.mul(i, b.index(2))
        places = b.iota(type=TileType((3,), I32), dim=0)
        places = b.add(places, b.broadcast(start, (3,)))
        other = b.constant(-1, TileType((3,), I32))
        keep = mask(b, b.cast(places, bits))
        b.store(out, b.load(source, (Span(None, 3),), [start], keep, other))

    windows = (blocked("in", 8), blocked("out", 3))
    maps = (lambda b, i: (b.index(0),), lambda b, i: (i,))
    b = Builder()
    emit_pipeline(b, (x, o), windows, maps, (6,), body)
    return Kernel("k", (x, o), b.block(), 1)


IN_RANGE = {
    "lt": lambda b, x: b.lt(x, b.like(8, x)),
    "le": lambda b, x: b.le(x, b.like(7, x)),
    "gt": lambda b, x: b.gt(b.like(8, x), x),
    "ge": lambda b, x: b.ge(b.like(5, x), b.sub(x, b.like(2, x))),
    "and": lambda b, x: b.and_(on(b, 3), b.lt(x, b.like(5, x))),
    "reshaped": lambda b, x: b.reshape(
        b.lt(b.reshape(x, shape=(1, 3)), b.constant(8, TileType((1, 3), x.tile.dtype))),
        shape=(3,),
    ),
}
MAY_BE_OUT = {
    "no comparison": lambda b, x: on(b, 3),
    "a larger limit": lambda b, x: b.lt(x, b.like(9, x)),
    "either": lambda b, x: b.or_(b.lt(x, b.like(8, x)), b.gt(x, b.like(8, x))),
    "another side": lambda b, x: b.gt(x, b.like(1, x)),
    "other positions": lambda b, x: b.lt(b.rev(x, axes=(0,)), b.like(8, x)),
}


@pytest.mark.parametrize("bits", [I32, I64], ids=str)
@pytest.mark.parametrize("mask", IN_RANGE.values(), ids=IN_RANGE)
def test_positions_that_a_mask_keeps_inside_are_not_clamped(mask, bits):
    kernel = masked_by(mask, bits=bits)
    agree(kernel, EIGHT)
    text, _ = compiled(kernel)
    assert "arith.minsi" not in text and "arith.maxsi" not in text


@pytest.mark.parametrize("bits", [I32, I8], ids=str)
@pytest.mark.parametrize("mask", MAY_BE_OUT.values(), ids=MAY_BE_OUT)
def test_positions_that_a_mask_lets_outside_are_clamped(mask, bits):
    kernel = masked_by(mask, bits=bits)
    agree(kernel, EIGHT)
    text, _ = compiled(kernel)
    assert "arith.minsi" in text and "arith.maxsi" not in text


@pytest.mark.parametrize("start", [-1, 0, 7, FAR - 1])
def test_a_mask_that_wraps_around_says_nothing(start: int):
    """`first + iota < 8` is on where the sum wraps around."""

    def emit(b: Builder, x: Value, at: Value, out: Value) -> None:
        first = b.load(at)
        places = b.iota(type=TileType((3,), I32), dim=0)
        places = b.add(places, b.broadcast(first, (3,)))
        keep = b.lt(places, b.like(8, places))
        other = b.constant(-1, TileType((3,), I32))
        b.store(out, b.load(x, (Span(None, 3),), [first], keep, other))

    kernel = with_refs(emit, [EIGHT, number(start)], [TileType((3,), I32)])
    agree(kernel, EIGHT, number(start))


def test_blocks_rounded_up_to_powers_of_two_are_masked_and_no_more():
    def kernel(x_ref, o_ref):
        first = 8 * pl.program_id(0)
        rows, columns = first + jnp.arange(8)[:, None], jnp.arange(8)[None, :]
        block, inside = (pl.ds(first, 8), pl.ds(0, 8)), (rows < 20) & (columns < 6)
        x = pl.load(x_ref, block, mask=inside, other=-1.0)
        pl.store(o_ref, block, 2 * x, mask=inside)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    out_shape = jax.ShapeDtypeStruct((20, 6), jnp.float32)
    call = pl.pallas_call(
        kernel, out_shape=out_shape, grid=3, in_specs=[whole], out_specs=whole
    )
    x = np.arange(120, dtype=np.float32).reshape(20, 6)
    (traced,) = kernels_in(call, x)
    np.testing.assert_array_equal(agree(run_passes(traced), x), 2 * x)
    text, _ = compiled(run_passes(traced))
    assert "arith.minsi" not in text and "arith.maxsi" not in text
    assert text.count("arith.cmpi") == 2  # the author's


# --- windows on blocks that extend past their arrays ---


def sums_of_parts(n: int, part: int, fills: tuple[float | None, float | None]):
    """Blocks of 16 rows of n, and parts of them to which the sum of the part is added.

    What is read outside is summed, too: `fills` are of the blocks and of the parts.
    """
    outer, inner = ({} if value is None else {"fill": value} for value in fills)

    def kernel(x_ref, o_ref):
        def add_sum(part_ref, out_ref):
            part = part_ref[...]
            out_ref[...] = part + part.sum(axis=0, keepdims=True)

        spec = pl.BlockSpec((part, 8), lambda i: (i, 0), **inner)
        grid = (pl.cdiv(16, part),)
        pltpu.emit_pipeline(add_sum, grid=grid, in_specs=[spec], out_specs=[spec])(
            x_ref, o_ref
        )

    spec = pl.BlockSpec((16, 8), lambda i: (i, 0), **outer)
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((n, 8), jnp.float32),
        grid=(pl.cdiv(n, 16),),
        in_specs=[spec],
        out_specs=spec,
    )
    x = np.arange(8 * n, dtype=np.float32).reshape(n, 8)
    (made,) = kernels_in(call, x)
    return run_passes(made), x


@pytest.mark.parametrize("engine", [simulated, host.simulated], ids=["triton", "cuda"])
@pytest.mark.parametrize(
    "part, fills",
    [(4, (2.0, None)), (4, (2.0, 9.0)), (16, (2.0, None)), (6, (3.0, 3.0))],
)
def test_windows_on_a_block_that_extends_past_its_array(part: int, fills, engine):
    """Parts that divide the block are outside where it is; others leave it, too."""
    kernel, x = sums_of_parts(37, part, fills)
    (got,) = engine(kernel, [x])
    np.testing.assert_array_equal(got, run_numpy(kernel, [x])[0])


def test_two_fill_values_are_refused():
    kernel, _ = sums_of_parts(37, 6, (2.0, 3.0))
    with pytest.raises(UnsupportedError, match="different fill values"):
        compiled(kernel)
