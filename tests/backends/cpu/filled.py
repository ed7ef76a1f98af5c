"""Kernels that store to blocks whose elements are reached one by one.

Most have `fill=`: what is stored outside the array is dropped, and the fill value is
read there again. `kernels()` gives them by name, `arrays_for` the operands.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import BlockDim, Kernel, Span, Value, Window
from pallasite.ir.types import DType, RefType
from tests.ir.kernels import emit_pipeline, main_ref, when

Ids = Sequence[Value]
# What a program does with blocks x, y and o, and the number of its step along k.
Update = Callable[[Builder, Value, Value, Value, Value], None]

SIZES = {
    "odd": ((13, 19, 11), (8, 8, 4)),
    "vectors": ((70, 90, 50), (64, 64, 32)),
    "one block": ((5, 3, 7), (8, 16, 8)),
}


def dot(b: Builder, x: Value, y: Value, dtype: DType, x_dim: int = 1, y_dim: int = 0):
    attrs = dict(contract=((x_dim,), (y_dim,)), batch=((), ()), precision=None)
    return b.op("dot", x, y, dtype=dtype, **attrs)


def _product(b: Builder, x: Value, y: Value, o: Value) -> Value:
    return dot(b, b.load(x), b.load(y), o.ref.dtype)


def plus_ones(b: Builder, x: Value, y: Value, o: Value, step: Value) -> None:
    b.store(o, b.constant(1, o.ref.tile))
    b.store(o, b.add(b.load(o), _product(b, x, y, o)))


def plus_a_row(b: Builder, x: Value, y: Value, o: Value, step: Value) -> None:
    n = y.ref.shape[1]
    row = b.cast(b.load(y, (Span(0, 1), Span(0, n))), o.ref.dtype)
    rows = b.op("broadcast_in_dim", row, shape=o.ref.shape, dims=(0, 1))
    b.store(o, b.add(rows, _product(b, x, y, o)))


def from_zero(b: Builder, x: Value, y: Value, o: Value, step: Value) -> None:
    zero = lambda c: c.store(o, c.constant(0, o.ref.tile))
    when(b, b.eq(step, b.index(0)), zero)
    b.store(o, b.add(b.load(o), _product(b, x, y, o)))


def from_one(b: Builder, x: Value, y: Value, o: Value, step: Value) -> None:
    one = lambda c: c.store(o, c.constant(1, o.ref.tile))
    when(b, b.eq(step, b.index(0)), one)
    b.store(o, b.add(_product(b, x, y, o), b.load(o)))


def scaled_rows(b: Builder, x: Value, y: Value, o: Value, step: Value) -> None:
    """A sum of rows times factors, as attention has it."""
    one = lambda c: c.store(o, c.constant(1, o.ref.tile))
    when(b, b.eq(step, b.index(0)), one)
    column = b.load(x, (Span(0, x.ref.shape[0]), Span(0, 1)))
    column = b.cast(column, o.ref.dtype)
    factors = b.op("broadcast_in_dim", column, shape=o.ref.shape, dims=(0, 1))
    b.store(o, b.add(b.mul(b.load(o), factors), _product(b, x, y, o)))


def inner_columns(b: Builder, x: Value, y: Value, o: Value, step: Value) -> None:
    """Only some columns; what else the block holds is read again."""
    from_one(b, x, y, o, step)
    m, n = o.ref.shape
    part = (Span(0, m), Span(n // 2, 1))
    small = dot(
        b, b.load(x), b.load(y, (Span(0, y.ref.shape[0]), part[1])), o.ref.dtype
    )
    b.store(o, b.add(b.load(o, part), small), part)
    sums = b.reduce(b.load(o), kind="sum", axes=(1,))
    spread = b.op("broadcast_in_dim", sums, shape=o.ref.shape, dims=(0,))
    b.store(o, b.add(b.load(o), spread))


def through_a_view(b: Builder, x: Value, y: Value, o: Value, step: Value) -> None:
    """Columns and rows exchanged, and half of what results."""
    from_one(b, x, y, o, step)
    transposed = b.op("transpose_view", o, perm=(1, 0))
    n, m = transposed.ref.shape
    half = b.subview(transposed, (Span(0, n), Span(0, max(m // 2, 1))), [])
    left = b.load(y)
    right = b.load(x, (Span(0, half.ref.shape[1]), Span(0, x.ref.shape[1])))
    new = dot(b, left, right, o.ref.dtype, 0, 1)
    b.store(half, b.add(b.load(half), new))


UPDATES: tuple[Update, ...] = (
    plus_ones,
    plus_a_row,
    from_zero,
    from_one,
    scaled_rows,
    inner_columns,
    through_a_view,
)


def product(
    update: Update,
    size: tuple[int, int, int],
    block: tuple[int, int, int],
    dtype: DType,
    squeezed: bool,
    fill: float | None = 2,
    result: DType = T.F32,
    alias: Window | None = None,
) -> Kernel:
    """A product by blocks that hang over: the result's have a fill value, too.

    With `alias`, the result starts as an operand, seen through that window, which each
    program adds to x.
    """
    (m, n, k), (bm, bn, bk) = size, block
    outer = (3,) if squeezed else ()
    thin = (BlockDim(1, "squeezed"),) if squeezed else ()
    refs = [main_ref("x", m, k, dtype=dtype), main_ref("y", k, n, dtype=dtype)]
    refs.append(main_ref("o", *outer, m, n, dtype=result))
    windows = [
        Window((BlockDim(bm), BlockDim(bk)), "in", fill=0),
        Window((BlockDim(bk), BlockDim(bn)), "in", fill=0),
        Window((*thin, BlockDim(bm), BlockDim(bn)), "out", fill=fill),
    ]
    drop = 0 if squeezed else 1  # grid axes: the squeezed one, i, j, k
    at = lambda *which: lambda b, *ids: [([None] * drop + [*ids])[w] for w in which]
    maps = [at(1, 3), at(3, 2), at(*range(drop, 3))]
    if alias is not None:
        refs.insert(2, main_ref("old", *outer, m, n, dtype=result))
        windows.insert(2, alias)
        maps.insert(2, maps[-1])

    def body(b: Builder, ids: Ids, x: Value, y: Value, *rest: Value) -> None:
        *old, o = rest
        update(b, x, y, o, ids[-1])
        for block in old:  # sees what was just stored
            sums = b.reduce(b.load(block), kind="sum", axes=(1,))
            spread = b.op("broadcast_in_dim", sums, shape=o.ref.shape, dims=(0,))
            b.store(o, b.add(b.load(o), spread))

    steps = [-(-a // c) for a, c in zip(size, block, strict=True)]
    grid, b = (*outer, *steps), Builder()
    emit_pipeline(b, refs, windows, maps, grid, body)
    aliases = ((2, 0),) if alias is not None else ()
    return Kernel(update.__name__, tuple(refs), b.block(), 1, aliases)


def written_input(
    size: tuple[int, int, int],
    block: tuple[int, int, int],
    dtype: DType,
    squeezed: bool,
    sums: bool,
) -> Kernel:
    """Every program adds to its block of x, and then reads it again, edges and all.

    The same block of x comes back for each block of columns.
    """
    (m, n, _), (bm, bn, _) = size, block
    outer = (2,) if squeezed else ()
    thin = (BlockDim(1, "squeezed"),) if squeezed else ()
    refs = [
        main_ref("x", *outer, m, m, dtype=dtype),
        main_ref("y", m, n, dtype=dtype),
        main_ref("o", *outer, m, n, dtype=dtype),
    ]
    windows = [
        Window((*thin, BlockDim(bm), BlockDim(bm)), "in", fill=3),
        Window((BlockDim(bm), BlockDim(bn)), "in", fill=0.25),
        Window((*thin, BlockDim(bm), BlockDim(bn)), "out"),
    ]
    maps = [
        lambda b, *ids: (*ids[:-1], ids[-2]),
        lambda b, *ids: (ids[-2], ids[-1]),
        lambda b, *ids: ids,
    ]

    def body(b: Builder, ids: Ids, x: Value, y: Value, o: Value) -> None:
        old, eighth = b.load(x), b.constant(0.125, x.ref.tile)
        new = b.mul(dot(b, old, old, dtype, 1, 1), eighth)
        if sums:
            new = dot(b, b.mul(old, eighth), old, dtype, 1, 1)
        b.store(x, b.add(b.load(x), new))
        b.store(o, dot(b, b.load(x), b.load(y), dtype))

    # One axis for the squeezed dimension, one for blocks of rows, one for columns.
    b, grid = Builder(), (*outer, -(-m // bm), -(-n // bn))
    emit_pipeline(b, refs, windows, maps, grid, body)
    return Kernel("written_input", tuple(refs), b.block(), 1)


def overlapping_alias(dtype: DType, fill: float | None) -> Kernel:
    """A result seen through blocks of two sizes, so that no copy would do."""
    m, n = 13, 9
    refs = [main_ref(name, m, n, dtype=dtype) for name in ("old", "new")]
    windows = [
        Window((BlockDim(8), BlockDim(n)), "in", fill=fill),
        Window((BlockDim(4), BlockDim(n)), "out", fill=fill),
    ]
    maps = [
        lambda b, i: (b.div(i, b.index(2)), b.index(0)),
        lambda b, i: (i, b.index(0)),
    ]

    def body(b: Builder, ids: Ids, old: Value, new: Value) -> None:
        rows = b.load(old, (Span(0, 4), Span(0, n)))
        b.store(
            new,
            b.add(b.load(new), dot(b, rows, dot(b, rows, rows, dtype, 0, 0), dtype)),
        )

    b = Builder()
    emit_pipeline(b, refs, windows, maps, (4,), body)
    return Kernel("overlapping_alias", tuple(refs), b.block(), 1, ((0, 0),))


def packed_view() -> Kernel:
    """A product added to integers seen as others: no pointer says where they are."""
    shapes = (("x", (4, 6)), ("y", (6, 9)), ("o", (4, 9)))
    x, y, o = (main_ref(name, *shape, dtype=T.I32) for name, shape in shapes)
    b = Builder()

    def body(b: Builder, ids: Ids, x: Value, y: Value, o: Value) -> None:
        scratch = b.op("alloc", type=RefType((8, 9), T.DTYPES["i16"], "vmem"))
        b.store(scratch, b.constant(3, scratch.ref.tile))
        wide = b.op("bitcast_view", scratch, dtype=T.I32)
        b.store(wide, b.add(b.load(wide), dot(b, b.load(x), b.load(y), T.I32)))
        b.store(o, b.load(wide))

    windows = [Window(tuple(map(BlockDim, v.ref.shape)), mode)
               for v, mode in ((x, "in"), (y, "in"), (o, "out"))]  # fmt: skip
    zero = lambda b: (b.index(0), b.index(0))
    emit_pipeline(b, (x, y, o), windows, [zero] * 3, (), body)
    return Kernel("packed_view", (x, y, o), b.block(), 1)


def filled_atomics(fill: float | None, squeezed: bool) -> Kernel:
    """Programs add to blocks of their own; the last hangs over."""
    thin = (BlockDim(1, "squeezed"),) if squeezed else ()
    outer = (2,) if squeezed else ()
    x, o, old = (main_ref(n, *outer, 13, 6) for n in ("x", "o", "old"))
    dims = (*thin, BlockDim(4), BlockDim(6))
    windows = [Window(dims, "in", fill=1), Window(dims, "out", fill=fill)]

    def body(b: Builder, ids: Ids, x: Value, o: Value) -> None:
        attrs = dict(kind="add", index=(Span(0, 4), Span(0, 6)), mask=False)
        before = b.op("atomic_rmw", o, b.load(x), **attrs)
        if fill is not None:
            b.op("atomic_rmw", o, before, **attrs)

    b, grid = Builder(), (*outer, 4)
    maps = [lambda b, *ids: (*ids, b.index(0))] * 2
    emit_pipeline(b, (x, o), windows, maps, grid, body)
    return Kernel("filled_atomics", (x, old, o), b.block(), 1, ((1, 0),))


def inner_pipeline(squeezed: bool) -> Kernel:
    """A grid inside, over a block with a fill value that is written."""
    thin = (BlockDim(1, "squeezed"),) if squeezed else ()
    outer = (2,) if squeezed else ()
    x, o = (main_ref(n, *outer, 13, 9) for n in ("x", "o"))
    window = lambda mode, m, n, fill, *more: Window(
        (*more, BlockDim(m), BlockDim(n)), mode, fill=fill
    )
    windows = [window("in", 8, 9, 1, *thin), window("out", 8, 9, 2, *thin)]

    def step(b: Builder, ids: Ids, u: Value, v: Value) -> None:
        square = dot(b, b.load(u), b.load(u), T.F32, 1, 1)
        rows = b.reduce(square, kind="sum", axes=(1,))
        spread = b.op("broadcast_in_dim", rows, shape=v.ref.shape, dims=(0,))
        b.store(v, spread)
        b.store(v, b.add(b.load(v), dot(b, square, b.load(v), T.F32)))

    def body(b: Builder, ids: Ids, x: Value, o: Value) -> None:
        small = [window("in", 3, 4, 5), window("out", 3, 4, 6)]
        emit_pipeline(b, (x, o), small, [lambda c, i, j: (i, j)] * 2, (3, 3), step)
        sums = b.reduce(b.load(o), kind="sum", axes=(0,))
        spread = b.op("broadcast_in_dim", sums, shape=o.ref.shape, dims=(1,))
        b.store(o, b.add(b.load(o), spread))

    b, grid = Builder(), (*outer, 2)
    maps = [lambda b, *ids: (*ids, b.index(0))] * 2
    emit_pipeline(b, (x, o), windows, maps, grid, body)
    return Kernel("inner_pipeline", (x, o), b.block(), 1)


def kernels() -> Iterator[tuple[str, Kernel]]:
    bf16 = T.DTYPES["bf16"]
    mixes = ((T.F32, T.F32), (bf16, T.F32), (bf16, bf16), (T.I32, T.I32))
    for update, (name, sizes) in itertools.product(UPDATES, SIZES.items()):
        for (dtype, result), squeezed in itertools.product(mixes, (False, True)):
            kernel = product(update, *sizes, dtype, squeezed, result=result)
            about = f"{dtype} {result}{' squeezed' * squeezed}"
            yield f"{kernel.name} {name} {about}", kernel
    for update, fills in itertools.product(
        (plus_ones, from_zero, inner_columns), ((2, 2), (2, 5), (None, 2), (2, None))
    ):
        here, there = fills
        if here is None and update is inner_columns:
            continue  # it reads all of its block
        for squeezed in (False, True):
            thin = (BlockDim(1, "squeezed"),) if squeezed else ()
            dims = (*thin, BlockDim(8), BlockDim(8))
            alias = Window(dims, "in", fill=there)
            if there is None:
                continue
            kernel = product(update, *SIZES["odd"], T.F32, squeezed, here, alias=alias)
            yield f"{kernel.name} alias {fills}{' squeezed' * squeezed}", kernel
    for (name, sizes), dtype, squeezed, sums in itertools.product(
        SIZES.items(), (T.F32, bf16), (False, True), (False, True)
    ):
        kernel = written_input(*sizes, dtype, squeezed, sums)
        about = f"{dtype}{' squeezed' * squeezed}{' sums' * sums}"
        yield f"{kernel.name} {name} {about}", kernel
    for dtype, fill in itertools.product((T.F32, T.I32), (None, 2)):
        yield f"overlapping_alias {dtype} {fill}", overlapping_alias(dtype, fill)
    yield "packed_view", packed_view()
    for squeezed in (False, True):
        yield f"inner_pipeline{' squeezed' * squeezed}", inner_pipeline(squeezed)
        for fill in (None, 2):
            name = f"filled_atomics {fill}{' squeezed' * squeezed}"
            yield name, filled_atomics(fill, squeezed)


def arrays_for(kernel: Kernel) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.integers(-3, 4, p.ref.shape).astype(p.ref.dtype.np)
        if not p.ref.dtype.is_float
        else (rng.integers(-8, 9, p.ref.shape) / 8).astype(p.ref.dtype.np)
        for p in kernel.inputs
    ]
