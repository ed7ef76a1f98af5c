"""Random ops on whole tiles: shape, reductions, scans, products, sorting, gathers."""

from collections.abc import Callable, Sequence
from math import prod

from pallasite.ir import types as T
from pallasite.ir.nodes import Value
from pallasite.ops.tile import REDUCE_KINDS, SCAN_KINDS
from tests.fuzz.writer import BITS, EXACT, MAX_SIZE, ROUGH, Writer

Step = Callable[[Writer], None]


def tile_op(w: Writer) -> None:
    """Add one op on whole tiles."""
    w.world.pick(STEPS)(w)


def ranked(w: Writer, dtype: T.DType | None = None, level: int = ROUGH) -> Value:
    """A tile with at least one dimension."""
    fits = [v for v in w.tiles[::-1] if v.tile.rank and w.level(v) >= level]
    if dtype is not None:
        fits = [v for v in fits if v.tile.dtype == dtype]
    if fits and w.world.chance(90):
        unused = [v for v in fits if v not in w.world.used]
        return w.world.pick((unused or fits)[:8])
    shape = w.world.shape(ranks=(1, 2, 3))
    return w.operand(dtype or w.world.dtype(), shape, level)


def axis_of(w: Writer, x: Value) -> int:
    return w.world.integer(0, x.tile.rank - 1)


# --- shape ---


def iota(w: Writer) -> None:
    shape = w.world.shape(ranks=(1, 2, 3))
    dtype = w.world.dtype(T.NUMBERS)
    dim = w.world.integer(0, len(shape) - 1)
    w.emit("iota", type=T.TileType(shape, dtype), dim=dim)


def constant(w: Writer) -> None:
    dtype = w.world.dtype()
    w.add(w.constant(dtype, w.world.shape()))


def broadcast(w: Writer) -> None:
    x = w.any_tile()
    shape, dims = list(x.tile.shape), list(range(x.tile.rank))
    for d, n in enumerate(shape):
        if n == 1 and w.world.chance(50):
            shape[d] = w.world.pick((2, 3))
    while len(shape) < 4 and prod(shape) * 3 <= MAX_SIZE and w.world.chance(60):
        at = w.world.integer(0, len(shape))
        shape.insert(at, w.world.pick((2, 1, 3)))
        dims = [d + (d >= at) for d in dims]
    w.emit("broadcast_in_dim", x, shape=tuple(shape), dims=tuple(dims))


def reshape(w: Writer) -> None:
    x = w.any_tile()
    rest, shape = x.tile.size, []
    for _ in range(w.world.integer(0, 2)):
        factors = [n for n in range(1, rest + 1) if rest % n == 0] or [1]
        shape.append(w.world.pick(factors))
        rest //= shape[-1]
    if rest != 1 or w.world.chance(30):
        shape.insert(w.world.integer(0, len(shape)), rest)
    w.emit("reshape", x, shape=tuple(shape))


def transpose(w: Writer) -> None:
    x = w.any_tile()
    w.emit("transpose", x, perm=permutation(w, x.tile.rank))


def permutation(w: Writer, rank: int) -> tuple[int, ...]:
    left = list(range(rank))
    return tuple(left.pop(w.world.integer(0, len(left) - 1)) for _ in range(rank))


def slice_(w: Writer) -> None:
    x = ranked(w)
    starts, limits, strides = [], [], []
    for n in x.tile.shape:
        starts.append(w.world.integer(0, max(n - 1, 0)))
        least = starts[-1] + (not w.world.chance(4))  # at times nothing is left
        limits.append(w.world.integer(min(n, least), n))
        strides.append(w.world.pick((1, 1, 2, 3)))
    bounds = dict(starts=tuple(starts), limits=tuple(limits), strides=tuple(strides))
    w.emit("slice", x, **bounds)


def concatenate(w: Writer) -> None:
    x = ranked(w)
    axis, parts = axis_of(w, x), [x]
    for _ in range(w.world.integer(0, 2)):
        shape = list(x.tile.shape)
        shape[axis] = w.world.pick((1, 2, 3))
        parts.append(w.operand(x.tile.dtype, shape))
    w.emit("concatenate", *parts, axis=axis)


def pad(w: Writer) -> None:
    x = ranked(w)
    low, high, interior, size = [], [], [], 1
    for n in x.tile.shape:
        low.append(w.world.integer(-1, 2))
        interior.append(w.world.pick((0, 0, 1)))
        high.append(w.world.integer(-1, 2))
        spread = n + max(n - 1, 0) * interior[-1]
        if spread + low[-1] + high[-1] < 1 or (spread + 4) * size > MAX_SIZE:
            low[-1] = high[-1] = interior[-1] = 0
        size *= max(1, n + max(n - 1, 0) * interior[-1] + low[-1] + high[-1])
    filler = w.operand(x.tile.dtype, ())
    config = dict(low=tuple(low), high=tuple(high), interior=tuple(interior))
    w.emit("pad", x, filler, **config)


def rev(w: Writer) -> None:
    x = ranked(w)
    w.emit("rev", x, axes=axes_of(w, x))


def axes_of(w: Writer, x: Value) -> tuple[int, ...]:
    """At least one axis."""
    first = axis_of(w, x)
    more = {d for d in range(x.tile.rank) if w.world.chance(30)}
    return tuple(sorted({first, *more}))


# --- reductions, scans, products, sorting ---


def reduce(w: Writer) -> None:
    x = ranked(w)
    dtype = x.tile.dtype
    bitwise, order = ("and", "or", "xor"), ("max", "min")
    kinds = order if dtype.is_float else (*bitwise, *order)
    kinds = bitwise[:2] if dtype.is_bool else (*kinds, "sum", "prod")
    kind = w.world.pick(kinds)
    assert kind in REDUCE_KINDS
    w.emit("reduce", x, kind=kind, axes=axes_of(w, x), most=_order_level(kind))


def _order_level(kind: str) -> int:
    return EXACT if kind in ("max", "min") else ROUGH


def arg_reduce(w: Writer) -> None:
    dtype = w.world.dtype(T.NUMBERS)
    x = ranked(w, dtype, EXACT)
    kind = w.world.pick(("max", "min"))
    w.emit("arg_reduce", x, kind=kind, axis=axis_of(w, x), dtype=T.I32)


def scan(w: Writer) -> None:
    dtype = w.world.dtype(T.NUMBERS)
    x = ranked(w, dtype)
    kind = w.world.pick(SCAN_KINDS if dtype.is_float else SCAN_KINDS[:-1])
    reverse = w.world.chance(30)
    level = _order_level(kind)
    w.emit("scan", x, kind=kind, axis=axis_of(w, x), reverse=reverse, most=level)


def dot(w: Writer) -> None:
    dtype = w.world.dtype(T.NUMBERS)
    lhs = ranked(w, dtype)
    dims = list(permutation(w, lhs.tile.rank))
    contracted = dims[: w.world.integer(0, 1) or len(dims) == 1]
    batch = dims[len(contracted) :][: w.world.integer(0, 1)]
    sizes = [lhs.tile.shape[d] for d in (*batch, *contracted)]
    free = [w.world.pick((2, 1, 3))] if w.world.chance(70) else []
    order = permutation(w, len(sizes) + len(free))
    shape = [0] * len(order)
    for n, d in zip((*sizes, *free), order, strict=True):
        shape[d] = n
    rhs = w.operand(dtype, shape)
    if dtype.is_float:
        result = dtype if dtype.bits > 16 else w.world.pick((T.F32, dtype))
    else:
        result = T.I32 if dtype.bits < 32 and dtype.is_signed_int else dtype
    right_batch, right = order[: len(batch)], order[len(batch) : len(sizes)]
    attrs = dict(
        contract=(tuple(contracted), tuple(right)),
        batch=(tuple(batch), tuple(right_batch)),
        dtype=result,
        precision="highest" if w.world.chance(20) else None,
    )
    if prod(lhs.tile.shape) * prod(free) <= 4 * MAX_SIZE:
        w.emit("dot", lhs, rhs, most=ROUGH, **attrs)


def sort(w: Writer) -> None:
    first = ranked(w, w.world.dtype(), EXACT)
    keys = [first]
    if w.world.chance(30):
        keys.append(w.operand(w.world.dtype(), first.tile.shape, EXACT))
    rest = []
    if w.world.chance(40):
        rest.append(w.operand(w.world.dtype(), first.tile.shape, EXACT))
    # Equal keys make the order of what is not a key a matter of stability.
    stable = bool(rest) or w.world.chance(50)
    attrs = dict(axis=axis_of(w, first), num_keys=len(keys), stable=stable)
    w.emit_all("sort", *keys, *rest, most=EXACT, **attrs)


def top_k(w: Writer) -> None:
    """Zeros of either sign differ here, and so do NaNs: only known bits are ordered."""
    x = ranked(w, w.world.dtype(), BITS)
    axis = axis_of(w, x)
    n = x.tile.shape[axis]
    w.emit_all("top_k", x, axis=axis, k=w.world.integer(min(n, 1), n))


# --- data-dependent selection ---


def starts_of(w: Writer, shape: Sequence[int]) -> list[Value]:
    """Scalars around the range of each dimension, of one type as XLA wants."""
    dtypes = [d for d in (T.I32, T.I8, T.U8, T.U32) if d in w.world.dtypes]
    dtype = w.world.pick([T.I32, T.I32, *dtypes])
    low = -2 if dtype.is_signed_int else 0
    return [w.small_integer(low, n + 1, dtype) for n in shape]


def dynamic_slice(w: Writer) -> None:
    x = ranked(w)
    sizes = tuple(w.world.integer(min(n, 1), n) for n in x.tile.shape)
    w.emit("dynamic_slice", x, *starts_of(w, x.tile.shape), sizes=sizes)


def dynamic_update_slice(w: Writer) -> None:
    x = ranked(w)
    sizes = [w.world.integer(min(n, 1), n) for n in x.tile.shape]
    update = w.operand(x.tile.dtype, sizes)
    w.emit("dynamic_update_slice", x, update, *starts_of(w, x.tile.shape))


class Slices:
    """Dimension numbers of a gather or scatter, drawn for an operand."""

    def __init__(self, w: Writer, x: Value):
        self.w, rank = w, x.tile.rank
        world = w.world
        self.sizes = [1] * rank
        self.collapsed, self.index_map = [], []
        self.batched: list[int] = []
        for d, n in enumerate(x.tile.shape):
            # One dimension is indexed at least: XLA crashes on empty index vectors.
            kind = world.pick(("point", "run", "all", "batch")[: 4 if d else 2])
            if kind == "batch" and not self.batched and n:
                self.batched.append(d)
                continue
            if kind in ("point", "run"):
                self.index_map.append(d)
            if kind == "point":
                self.collapsed.append(d)
            else:
                self.sizes[d] = world.integer(1, n) if kind == "run" and n else n
        self.window = [
            d for d in range(rank) if d not in (*self.collapsed, *self.batched)
        ]
        lead = [x.tile.shape[d] for d in self.batched]
        self.batch_shape = [*lead, *([world.pick((3, 1, 2, 4))] * world.chance(70))]
        total = len(self.batch_shape) + len(self.window)
        places = sorted(permutation(w, total)[: len(self.window)])
        self.offset_dims = tuple(places)
        self.bound = max(x.tile.shape, default=1)

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        return (
            self.offset_dims,
            tuple(self.collapsed),
            tuple(self.index_map),
            tuple(self.batched),
            tuple(range(len(self.batched))),
        )

    @property
    def result_shape(self) -> tuple[int, ...]:
        window = iter([self.sizes[d] for d in self.window])
        batch = iter(self.batch_shape)
        total = len(self.batch_shape) + len(self.window)
        return tuple(
            next(window if d in self.offset_dims else batch) for d in range(total)
        )

    def indices(self) -> Value:
        shape = (*self.batch_shape, len(self.index_map))
        return index_tile(self.w, shape, self.bound)


def index_tile(w: Writer, shape: Sequence[int], bound: int) -> Value:
    """Integers around 0..bound."""
    indices = w.operand(T.I32, shape)
    low, high = w.number(-2, T.I32), w.number(bound + 1, T.I32)
    if w.world.chance(70):
        indices = w.emit("rem", indices, w.number(bound, T.I32, shape))
    return w.emit("clamp", low, indices, high)


def gather(w: Writer) -> None:
    x = ranked(w)
    slices = Slices(w, x)
    dtype = x.tile.dtype
    w.emit(
        "gather",
        x,
        slices.indices(),
        dimension_numbers=slices.numbers,
        slice_sizes=tuple(slices.sizes),
        mode=w.world.pick(("clip", "fill")),
        fill_value=w.world.number(dtype),
        type=T.TileType(slices.result_shape, dtype),
    )


def scatter(w: Writer) -> None:
    x = ranked(w, w.world.dtype(T.NUMBERS))
    slices = Slices(w, x)
    kind = w.world.pick(("add", "set", "max", "min", "mul"))
    # Which of several updates of one element is last is not defined.
    if kind == "set" and prod(slices.batch_shape) > 1:
        kind = "max"
    updates = w.operand(x.tile.dtype, slices.result_shape)
    w.emit(
        "scatter",
        x,
        slices.indices(),
        updates,
        dimension_numbers=slices.numbers,
        kind=kind,
        mode=w.world.pick(("clip", "fill")),
        type=x.tile,
        most=EXACT if kind in ("set", "max", "min") else ROUGH,
    )


STEPS: tuple[Step, ...] = (
    reduce,
    iota,
    constant,
    broadcast,
    reshape,
    transpose,
    slice_,
    concatenate,
    pad,
    rev,
    arg_reduce,
    scan,
    dot,
    sort,
    top_k,
    dynamic_slice,
    dynamic_update_slice,
    gather,
    scatter,
)
