"""Kernels whose indices come from memory, and that memory is hostile.

`kernels()` gives them by name; `main` runs each on wild and random indices with every
operand, result and arena against a forbidden page, first after it, then before it. A
step outside ends the process: `test_hostile.py` runs this file as one of its own.
What it computes must be what the evaluator says.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.levels import with_level
from pallasite.ir.nodes import At, BlockDim, Gather, Kernel, Span, Value, Window
from pallasite.ir.types import I32, INDEX, DType, RefType, TileType
from pallasite.ir.verify import verify
from tests.backends.cpu import filled
from tests.backends.cpu.direct import Code, Guarded
from tests.backends.cpu.running import region, tiles_kernel
from tests.fuzz.agreement import run_numpy, same
from tests.fuzz.choices import Seeded
from tests.fuzz.generate import FAMILIES, random_kernel
from tests.ir.kernels import emit_pipeline, flash_attention, main_ref, matmul
from tests.share import share_of

SHAPE = (7, 9)
COUNT = 6  # indices a kernel gets
ALL = (Span(0, SHAPE[0]), Span(0, SHAPE[1]))
INDEX_TYPES = ("i32", "i64", "u32", "u64", "i8")
ELEMENTS = ("f32", "u8", "bf16", "i64", "f64")


class Hostile:
    """What a template gets: operand, result, and the indices as scalars and a tile."""

    def __init__(self, b: Builder, x: Value, where: Value, out: Value):
        self.b, self.x, self.where, self.out = b, x, where, out
        self.i = [b.load(where, (At(n),)) for n in range(COUNT)]
        self.tile = b.load(where)
        self.small = [b.cast(i, I32) for i in self.i]  # wraps, and stays hostile

    def values(self, *shape: int, at: int = 0) -> Value:
        """Some elements of the operand."""
        part = self.b.load(self.x, (Span(0, shape[0]), Span(at, shape[1])))
        return part if len(shape) == 2 else self.b.reshape(part, shape=shape)

    def mask(self, *shape: int) -> Value:
        line = self.b.op("iota", type=TileType(shape, I32), dim=len(shape) - 1)
        return self.b.ne(line, self.b.like(1, line))


Template = Callable[[Hostile], None]
_TEMPLATES: dict[str, Template] = {}


def template(f: Template) -> Template:
    _TEMPLATES[f.__name__] = f
    return f


# --- accesses ---


@template
def element(h: Hostile) -> None:
    one = h.b.load(h.x, (At(), At()), h.i[:2])
    h.b.store(h.out, one, (At(), At()), h.i[2:4])


@template
def box(h: Hostile) -> None:
    part = h.b.load(h.x, (Span(None, 3), Span(None, 5)), h.i[:2])
    h.b.store(h.out, part, (Span(None, 3), Span(None, 5)), h.i[2:4])


@template
def strided_box(h: Hostile) -> None:
    index = (Span(None, 3, 3), Span(None, 4, 2))
    h.b.store(h.out, h.b.load(h.x, index, h.i[:2]), index, h.i[2:4])


@template
def row(h: Hostile) -> None:
    line = h.b.load(h.x, (At(), Span(0, 9)), h.i[:1])
    h.b.store(h.out, h.b.add(line, line), (At(), Span(0, 9)), h.i[1:2])


@template
def gathered(h: Hostile) -> None:
    index = (Gather(), Span(1, 8))
    h.b.store(h.out, h.b.load(h.x, index, [h.tile]), index, [h.tile])


@template
def gathered_along_both(h: Hostile) -> None:
    back = h.b.rev(h.tile, axes=(0,))
    index = (Gather(), Gather())
    h.b.store(h.out, h.b.load(h.x, index, [h.tile, back]), index, [back, h.tile])


@template
def gathered_last(h: Hostile) -> None:
    index = (At(), Gather())
    operands = [h.i[0], h.tile]
    h.b.store(h.out, h.b.load(h.x, index, operands), index, operands)


@template
def masked(h: Hostile) -> None:
    index, mask = (Span(None, 4), Span(None, 7)), h.mask(4, 7)
    part = h.b.load(h.x, index, h.i[:2], mask, h.values(4, 7))
    h.b.store(h.out, part, index, h.i[2:4], mask)


@template
def masked_gather(h: Hostile) -> None:
    index, mask = (Gather(), Span(None, 4, 2)), h.mask(COUNT, 4)
    operands = [h.tile, h.i[1]]
    part = h.b.load(h.x, index, operands, mask, h.values(COUNT, 4))
    h.b.store(h.out, part, index, operands, mask)


@template
def atomic(h: Hostile) -> None:
    attrs = dict(kind="max", index=(Gather(), Span(None, 5)), mask=False)
    h.b.op("atomic_rmw", h.out, h.values(COUNT, 5), h.tile, h.i[1], **attrs)


@template
def masked_atomic(h: Hostile) -> None:
    attrs = dict(kind="min", index=(Span(None, 3), Span(None, 5)), mask=True)
    operands = (h.out, h.values(3, 5), *h.i[:2], h.mask(3, 5))
    h.b.op("atomic_rmw", *operands, **attrs)


@template
def compare_and_swap(h: Hostile) -> None:
    old = h.b.load(h.out, (At(), At()), h.i[:2])
    if h.out.ref.dtype.is_float:
        attrs = dict(kind="xchg", index=(At(), At()), mask=False)
        h.b.op("atomic_rmw", h.out, old, *h.i[:2], **attrs)
        return
    h.b.op("atomic_cas", h.out, old, h.b.neg(old), *h.i[:2], index=(At(), At()))


# --- views ---


@template
def view_of_a_view(h: Hostile) -> None:
    b = h.b
    for ref in (h.x, h.out):
        outer = b.subview(ref, (Span(None, 4), Span(None, 4, 2)), h.i[:2])
        inner = b.subview(outer, (Span(None, 2), At()), h.i[2:4])
        b.store(inner, b.load(inner, (Gather(),), [h.b.slice(h.tile, **_FIRST_TWO)]))


_FIRST_TWO = dict(starts=(0,), limits=(2,), strides=(1,))


@template
def turned_view(h: Hostile) -> None:
    b = h.b
    transposed = b.transpose_view(h.out, perm=(1, 0))
    flat = b.reshape_view(transposed, shape=(3, 21))
    index = (Span(None, 2), Span(None, 10, 2))
    b.store(flat, b.load(flat, index, h.i[:2]), index, h.i[2:4])


@template
def reinterpreted_view(h: Hostile) -> None:
    b, bits = h.b, h.out.ref.dtype.bits
    other = T.DTYPES["u16" if bits != 16 else "u8"]
    rows = b.subview(h.out, (Span(1, 4), Span(None, 6)), h.i[:1])
    view = b.bitcast_view(rows, dtype=other)
    index = (Span(None, 1), Span(None, 3))
    b.store(view, b.load(view, index, h.i[1:3]), index, h.i[3:5])


@template
def scratch(h: Hostile) -> None:
    b, dtype = h.b, h.x.ref.dtype
    memory = b.op("alloc", type=RefType((5, 6), dtype, "vmem"))
    b.store(memory, h.values(5, 6))
    index = (Span(None, 2), Gather())
    b.store(memory, b.load(memory, index, [h.i[0], h.tile]), index, [h.i[1], h.tile])
    b.store(h.out, b.load(memory), (Span(None, 5), Span(None, 6)), h.i[2:4])


@template
def copies(h: Hostile) -> None:
    b = h.b
    memory = b.op("alloc", type=RefType((3, 4), h.x.ref.dtype, "vmem"))
    box_at = lambda ref, i: b.subview(ref, (Span(None, 3), Span(None, 4)), i)
    b.emit("copy_start", box_at(h.x, h.i[:2]), memory, priority=0)
    b.emit("copy_start", memory, box_at(h.out, h.i[2:4]), priority=0)


# --- values ---


@template
def slices_of_values(h: Hostile) -> None:
    b, x = h.b, h.values(7, 9)
    part = b.op("dynamic_slice", x, *h.i[:2], sizes=(3, 4))
    b.store(h.out, b.dynamic_update_slice(x, part, *h.i[2:4]))


@template
def slice_of_a_formula(h: Hostile) -> None:
    b = h.b
    line = b.op("iota", type=TileType(SHAPE, I32), dim=1)
    part = b.op("dynamic_slice", line, *h.i[:2], sizes=(3, 4))
    number = b.cast(part, h.out.ref.dtype)
    b.store(h.out, number, (Span(2, 3), Span(4, 4)))


def _gather(h: Hostile, mode: str) -> None:
    b, x = h.b, h.values(7, 9)
    starts = b.reshape(h.tile, shape=(3, 2))
    found = b.op(
        "gather",
        x,
        starts,
        dimension_numbers=((1, 2), (), (0, 1), (), ()),
        slice_sizes=(2, 5),
        mode=mode,
        fill_value=3,
        type=TileType((3, 2, 5), x.tile.dtype),
    )
    b.store(h.out, b.reshape(found, shape=(6, 5)), (Span(0, 6), Span(0, 5)))


def _scatter(h: Hostile, mode: str) -> None:
    b, x = h.b, h.values(7, 9)
    numbers = ((1, 2), (), (0, 1), (), ())
    attrs = dict(dimension_numbers=numbers, kind="max", mode=mode, type=x.tile)
    new = b.reshape(h.values(6, 5, at=3), shape=(3, 2, 5))
    b.store(h.out, b.op("scatter", x, b.reshape(h.tile, shape=(3, 2)), new, **attrs))


@template
def clipped_gather(h: Hostile) -> None:
    _gather(h, "clip")


@template
def filled_gather(h: Hostile) -> None:
    _gather(h, "fill")


@template
def clipped_scatter(h: Hostile) -> None:
    _scatter(h, "clip")


@template
def filled_scatter(h: Hostile) -> None:
    _scatter(h, "fill")


# --- control ---


@template
def loop_bounds(h: Hostile) -> None:
    """At most a few rounds, wherever they start."""
    b = h.b
    first = b.cast(h.i[0], T.I64)
    last = b.add(first, b.constant(3, T.scalar(T.I64)))  # may wrap
    i = Value(T.scalar(T.I64))

    def body(c: Builder, i: Value) -> None:
        c.store(h.out, c.load(h.x, (At(), Span(0, 9)), [i]), (At(), Span(0, 9)), [i])

    b.emit("for", first, last, b.constant(1, i.tile), regions=(region((i,), body),))


@template
def loop_steps(h: Hostile) -> None:
    b = h.b
    step = b.max(b.cast(h.i[1], T.I64), b.constant(2**61, T.scalar(T.I64)))
    i = Value(T.scalar(T.I64))

    def body(c: Builder, i: Value) -> None:
        c.store(h.out, c.load(h.x, (At(), At()), [i, i]), (At(), At()), [i, i])

    low, high = (b.constant(n, i.tile) for n in (-(2**63), 2**63 - 1))
    b.emit("for", low, high, step, regions=(region((i,), body),))


@template
def branches(h: Hostile) -> None:
    def arm(n: int):
        move = lambda c: c.store(h.out, c.load(h.x, (At(n), At(n))), (At(n), At(0)))
        return region((), move)

    arms = [arm(n) for n in range(3)]
    h.b.emit("cond", h.small[0], regions=arms)


# --- windows ---


def kernel_of(emit: Template, index: DType, dtype: DType) -> Kernel:
    """Operands x, indices, y; the result starts out as y."""
    x, y, out = (main_ref(n, *SHAPE, dtype=dtype) for n in ("x", "y", "out"))
    where = main_ref("where", COUNT, dtype=index)
    b = Builder()
    emit(Hostile(b, x, where, out))
    kernel = Kernel(emit.__name__, (x, where, y, out), b.block(), 1, ((2, 0),))
    return with_level(kernel)


WINDOWS = {
    "blocked": lambda: (BlockDim(2), BlockDim(4)),
    "element": lambda: (BlockDim(3, "element", (1, 2)), BlockDim(5, "element")),
    "squeezed": lambda: (BlockDim(1, "squeezed"), BlockDim(4)),
    "bounded": lambda: (BlockDim(3, "bounded"), BlockDim(9)),
    "larger": lambda: (BlockDim(11), BlockDim(10)),
}


def window_kernel(kind: str, dtype: DType, aliased: bool) -> Kernel:
    """Blocks of x and of the result where prefetched numbers say."""
    x, out, y = (main_ref(n, *SHAPE, dtype=dtype) for n in ("x", "out", "y"))
    where = main_ref("where", COUNT, dtype=I32)
    dims = WINDOWS[kind]()

    def at(first: int):
        def index_map(b: Builder, i: Value) -> Sequence[Value]:
            numbers = (first, first + 1, 4)[: len(dims) + (kind == "bounded")]
            return [b.add(b.load(where, (At(n),)), i) for n in numbers]

        return index_map

    def body(b: Builder, ids: Sequence[Value], block: Value, new: Value) -> None:
        if aliased:  # sees its own writes through the operand's window
            b.store(new, b.load(new))
        b.store(new, b.load(block))

    windows = (Window(dims, "in", fill=1), Window(dims, "out"))
    b = Builder()
    source = y if aliased else x
    emit_pipeline(b, (source, out), windows, (at(0), at(2)), (3,), body)
    name = f"window_{kind}{'_aliased' * aliased}"
    return Kernel(name, (x, where, y, out), b.block(), 1, ((2, 0),))


def inner_pipeline_kernel(dtype: DType) -> Kernel:
    """A pipeline inside, over scratch, with a grid size from memory."""
    x, out, y = (main_ref(n, *SHAPE, dtype=dtype) for n in ("x", "out", "y"))
    where = main_ref("where", COUNT, dtype=I32)
    b = Builder()
    size = b.op("clamp", b.index(-5), b.load(where, (At(0),)), b.index(4))
    index_map = lambda n: region(
        (Value(INDEX),), lambda c, i: [c.add(i, c.load(where, (At(n),))), c.index(1)]
    )
    window = lambda mode: Window((BlockDim(2), BlockDim(5)), mode, fill=2)
    blocks = [Value(RefType((2, 5), dtype)) for _ in range(2)]
    body = region(
        (Value(INDEX), *blocks), lambda c, i, old, new: c.store(new, c.load(old))
    )
    b.emit(
        "pipeline",
        size,
        x,
        out,
        regions=(index_map(1), index_map(2), body),
        grid=(None,),
        windows=(window("in"), Window((BlockDim(2), BlockDim(5)), "out")),
        semantics=("arbitrary",),
    )
    return Kernel("inner_pipeline", (x, where, y, out), b.block(), 1, ((2, 0),))


def program_kernel(emit: Template, index: DType, dtype: DType, blocks: bool) -> Kernel:
    """The same as a grid of one program, which has the arrays or blocks of them."""
    x, y, out = (main_ref(n, *SHAPE, dtype=dtype) for n in ("x", "y", "out"))
    where = main_ref("where", COUNT, dtype=index)
    b, refs = Builder(), (x, where, out) if blocks else ()
    windows = [
        Window(tuple(BlockDim(n) for n in ref.ref.shape), mode)
        for ref, mode in zip(refs, ("in", "in", "out"), strict=False)
    ]
    first_block = lambda rank: lambda c, i: [c.index(0)] * rank
    maps = [first_block(ref.ref.rank) for ref in refs]

    def body(c: Builder, ids: Sequence[Value], *given: Value) -> None:
        emit(Hostile(c, *(given or (x, where, out))))

    emit_pipeline(b, refs, windows, maps, (1,), body)
    name = f"{emit.__name__}_{'blocks' if blocks else 'arrays'}"
    return with_level(Kernel(name, (x, where, y, out), b.block(), 1, ((2, 0),)))


def kernels(programs: bool = False) -> Iterator[tuple[str, Kernel]]:
    """At least a hundred, each with another mix of index and element type.

    Args:
        programs: whether all are grids of programs, as a `pallas_call` is.
    """
    pairs = list(itertools.product(INDEX_TYPES, ELEMENTS))
    number = 0
    for emit in _TEMPLATES.values():
        for n in range(4):
            index, dtype = (T.DTYPES[name] for name in pairs[number % len(pairs)])
            number += 7
            kernel = (
                program_kernel(emit, index, dtype, blocks=n % 2 == 0)
                if programs
                else kernel_of(emit, index, dtype)
            )
            yield f"{kernel.name} {index} {dtype}", kernel
    for n, (kind, aliased) in enumerate(itertools.product(WINDOWS, (False, True))):
        dtype = T.DTYPES[ELEMENTS[n % len(ELEMENTS)]]
        kernel = window_kernel(kind, dtype, aliased)
        yield f"{kernel.name} {dtype}", kernel
    for name in ELEMENTS[: 0 if programs else 3]:
        yield f"inner_pipeline {name}", inner_pipeline_kernel(T.DTYPES[name])


# --- running ---


def wild_indices(dtype: DType, rng: np.random.Generator) -> Iterator[np.ndarray]:
    info = np.iinfo(dtype.np)
    wild = [0, 1, 6, 7, 8, 9, -1, -7, -9, 2**30, 2**32, -(2**32), 2**62]
    wild += [info.min, info.max, info.max - 1, info.max - 8, info.min + 1]
    wild = np.array([n for n in wild if info.min <= n <= info.max], dtype.np)
    yield np.full(COUNT, info.max, dtype.np)
    yield np.full(COUNT, info.min, dtype.np)
    for _ in range(6):
        yield rng.choice(wild, COUNT)
    yield rng.integers(info.min, info.max, COUNT, dtype.np, endpoint=True)
    yield rng.integers(max(info.min, -3), 12, COUNT).astype(dtype.np)


def attack(kernel: Kernel, rng: np.random.Generator, optimise: bool = True) -> None:
    verify(kernel)
    memory = Guarded()
    code = Code(kernel, optimise, memory)
    dtype = kernel.params[0].ref.dtype
    x, y = (rng.integers(0, 100, SHAPE).astype(dtype.np) for _ in range(2))
    for where in wild_indices(kernel.params[1].ref.dtype, rng):
        (want,) = run_numpy(kernel, [x, where, y])
        for after in (True, False):
            memory.after = after
            (got,) = code(x, where, y)
            assert same(got, want).all(), f"indices {where}: {got} is not {want}"


def inner_products(rows: int, columns: int, depth: int) -> Kernel:
    """Rows times columns that are both contiguous along k."""

    def emit(b: Builder, x: Value, y: Value) -> Value:
        along, apart = ((1,), (1,)), ((), ())
        return b.op(
            "dot", x, y, contract=along, batch=apart, dtype=T.F32, precision=None
        )

    return tiles_kernel(emit, [np.zeros((n, depth), "f4") for n in (rows, columns)])


def ordinary() -> Iterator[tuple[str, Kernel, Sequence[np.ndarray]]]:
    """Kernels that mean no harm: matrix products of odd sizes, and random ones.

    And those that store to blocks with `fill=`.
    """
    rng = np.random.default_rng(1)
    for kernel in (
        matmul(30, 20, 24, (16, 16, 8)),
        matmul(70, 45, 130, (33, 45, 65)),
        # Columns read in place, of which 1, 2, 4 or 8 are left over after vectors.
        *(matmul(14, n, 40, (14, n, 40)) for n in (33, 34, 36, 40)),
        matmul(256, 136, 298, (16, 136, 298)),  # by several threads
        *(matmul(3, n, 50, (3, n, 50)) for n in (37, 43, 300)),  # few rows
        *(inner_products(rows, 19, 301) for rows in (1, 3, 11)),
        flash_attention(48, 64, 8, 16),
    ):
        shapes = [param.ref.shape for param in kernel.inputs]
        yield kernel.name, kernel, [rng.normal(size=s).astype("f4") for s in shapes]
    for name, kernel in filled.kernels():
        if not name.endswith("i32"):
            yield f"filled {name}", kernel, filled.arrays_for(kernel)
    for dtype in ELEMENTS:
        arrays = [rng.integers(0, 100, s).astype(T.DTYPES[dtype].np) for s in MOVED]
        yield f"moves {dtype}", tiles_kernel(_moves, arrays), arrays
    for family, seed in itertools.product((*FAMILIES, "edges"), range(6)):
        case = random_kernel(Seeded(seed), family)
        yield f"{family} {seed}", case.kernel, case.arrays


MOVED = [(4, 5), (33, 18), (17, 130)]


def _moves(b: Builder, *tiles: Value) -> Iterator[Value]:
    """Whole squares and vectors, and what is left over after them."""
    for x in tiles:
        rows, columns = x.tile.shape
        yield b.transpose(x, perm=(1, 0))
        yield b.rev(x, axes=(0, 1))
        for step in (2, 3, 4):
            limits = (rows, columns)
            yield b.slice(x, starts=(0, 0), limits=limits, strides=(1, step))
        yield b.concatenate(x, b.rev(x, axes=(1,)), axis=1)


def main() -> None:
    rng = np.random.default_rng(0)
    count = 0
    templates = [*kernels()]
    for name, kernel in share_of(templates, 0):
        print(name, flush=True)
        # Of each template some kernels are optimised, of other types each time.
        attack(kernel, rng, optimise=count % 2 == 0)
        count += 1
    for name, kernel, arrays in ordinary():
        print(name, flush=True)
        memory = Guarded()
        code = Code(kernel, optimise=False, memory=memory)
        for memory.after in (True, False):
            code(*arrays, pool=2)
        count += 1
    print(f"{count} kernels stayed inside")


if __name__ == "__main__":
    main()
