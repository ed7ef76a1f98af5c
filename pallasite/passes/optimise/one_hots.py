"""one_hots: sums and products with comparisons of indices, at the places they name.

In: a dot with `hot = (ids[:, None] == first + jnp.arange(k))`, or a sum of `hot`, of
`where(hot, x[:, None], 0)` or of `hot * x[:, None]` along the ids: segment sums and
histograms, as one writes them for matrix units, and lookups `hot @ table`. Out: every
row is added to, or read at, the one place that its id names. A dot of n ids and k
places takes k times the operations.

Proof: `hot[i, j]` is one where `j == ids[i] - first`, otherwise zero. Products with
zero are zero, if the other factor is finite, so that of a row's k products at most one
matters; a sum of these may be taken in any order. Infinities and NaN times zero are
NaN. Where floats are added, both ways are there, and a sum of the factors times zero
chooses. Where they are read, a column of the table that has any gives NaN, unless it
has but one and this is what is read. (A zero may lose its sign.) `ids[i] - first` may
wrap: an id that is that far away becomes a number that is outside, too, because
`first + k` does not wrap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Gather, Kernel, Op, Span, Value
from pallasite.ir.rewrite import dead_code
from pallasite.ir.roles import Dot, DotSide
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import Roots, constant_inputs
from pallasite.passes.normal.index_arrays import IndexArrays, first_along

LEAST_PLACES, LEAST_IDS = 32, 8


def one_hots(
    kernel: Kernel, least_places: int = LEAST_PLACES, least_ids: int = LEAST_IDS
) -> Kernel:
    """Add and read rows where comparisons multiply them.

    Args:
        kernel: what to rewrite.
        least_places, least_ids: of a comparison; fewer products are as fast.
    """
    return _rewritten(kernel, _OneHots(kernel, least_places, least_ids))


def one_hot_reads(kernel: Kernel) -> Kernel:
    """Read rows of operands where comparisons multiply them, for GPUs.

    There memory that a program has for itself is slow, and additions to it have no
    order.
    """
    return _rewritten(kernel, _OneHots(kernel, in_scratch=False))


def _rewritten(kernel: Kernel, rules: "_OneHots") -> Kernel:
    body = rules.block(kernel.body)
    return kernel if body is kernel.body else dead_code(kernel.with_(body=body))


@dataclass(frozen=True)
class _Hot:
    """A comparison of ids with consecutive numbers.

    Args:
        ids: the side without the numbers, the same along `dim`.
        starts, offset: what the numbers start at.
        dim: along which they count.
    """

    ids: Value
    starts: tuple[Value, ...]
    offset: int
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ids.tile.shape

    @property
    def count(self) -> int:
        return self.shape[1 - self.dim]

    @property
    def places(self) -> int:
        return self.shape[self.dim]

    def where(self, b: Builder, ids: Value) -> Value:
        """The place of each id, a vector; outside if it has none."""
        first = b.index(self.offset)
        for start in self.starts:
            first = b.add(first, b.as_index(start))
        return b.sub(b.as_index(ids), b.broadcast(first, (self.count,), ()))

    def matrix(self, b: Builder, where: Value, dtype: T.DType) -> Value:
        """The comparison again, as it is multiplied."""
        at = b.op("iota", dim=self.dim, type=T.TileType(self.shape, T.I32))
        hit = b.eq(b.broadcast(where, self.shape, (1 - self.dim,)), at)
        return b.cast(hit, dtype)


class _OneHots(IndexArrays):
    def __init__(
        self,
        kernel: Kernel,
        least_places: int = LEAST_PLACES,
        least_ids: int = LEAST_IDS,
        in_scratch: bool = True,
    ):
        super().__init__()
        self.least_places, self.least_ids = least_places, least_ids
        self.in_scratch = in_scratch
        self.roots, self.constant = Roots(kernel), constant_inputs(kernel)

    def rewritten(self, op: Op) -> Sequence[Op]:
        b = Builder(op.loc)
        made = None
        if op.name == "dot":
            made = self._dot(b, Dot.of(op))
        elif op.name == "reduce" and op.attrs["kind"] == "sum" and self.in_scratch:
            made = self._sum(b, op)
        if made is None:
            return (op,)
        *before, last = b.ops
        assert last.results == (made,)
        return (*before, last.with_(results=op.results))

    def _hot(self, value: Value) -> _Hot | None:
        """The comparison that a tile of ones and zeros is."""
        op = self.producers.get(value)
        if op is not None and op.name == "cast":
            value = op.operands[0]
        elif op is not None and op.name == "select_n" and len(op.operands) == 3:
            numbers = [self.number(v) for v in op.operands[1:]]
            if numbers != [0, 1]:
                return None
            value = op.operands[0]
        return self._comparison(value)

    def _comparison(self, value: Value) -> _Hot | None:
        op = self.producers.get(value)
        if op is None or op.name != "eq" or value.tile.rank != 2:
            return None
        for ids, numbers in (op.operands, op.operands[::-1]):
            if not ids.tile.dtype.is_integer or ids.tile.shape != numbers.tile.shape:
                return None
            count = self.count(numbers)
            if count is None or count.dim is None:
                continue
            hot = _Hot(ids, count.starts, count.offset, count.dim)
            if hot.places < self.least_places or hot.count < self.least_ids:
                return None
            if self.is_alike(ids, count.dim):
                return hot
        return None

    def _vector(self, b: Builder, value: Value, dim: int) -> Value:
        """A matrix that is the same along a dimension, without it."""
        op, count = self.producers.get(value), value.tile.shape[1 - dim]
        if op is not None and op.name == "broadcast_in_dim":
            (given,) = op.operands
            if given.tile.size == count:
                return b.op("reshape", given, shape=(count,))
        if dim == 0:
            value = b.op("transpose", value, perm=(1, 0))
        return first_along(b, value, value.tile.shape[:1])

    # --- products ---

    def _dot(self, b: Builder, dot: Dot) -> Value | None:
        result = dot.op.result.tile
        for side, other in (dot.sides, dot.sides[::-1]):
            hot = self._hot(side.value)
            if hot is not None and other.value.tile.rank == 2:
                break
        else:
            return None
        if side.batch or len(side.contract) != 1 or _is_narrow(result.dtype):
            return None
        turned = lambda b, made: (
            made if side is dot.lhs else b.op("transpose", made, perm=(1, 0))
        )
        if side.contract == (hot.dim,):
            found = self._read(b, hot, other)
            return found and turned(b, b.cast(found, result.dtype))
        if not self.in_scratch:
            return None
        where, rows = hot.where(b, self._vector(b, hot.ids, hot.dim)), _rows(b, other)

        def at_places(b: Builder) -> Value:
            return turned(b, _added(b, hot, where, b.cast(rows, result.dtype)))

        def multiplied(b: Builder) -> Value:
            again = hot.matrix(b, where, side.value.tile.dtype)
            pair = [again if s is side else s.value for s in dot.sides]
            return b.op("dot", *pair, **dot.op.attrs)

        return _if_finite(b, other.value, result, at_places, multiplied)

    def _read(self, b: Builder, hot: _Hot, table: DotSide) -> Value | None:
        """For every id the row at its place."""
        ref = self._loaded_from(table)
        if ref is None and not self.in_scratch:
            return None
        rows, where = _rows(b, table), hot.where(b, self._vector(b, hot.ids, hot.dim))
        if ref is None:
            ref = b.op("alloc", type=T.RefType(rows.tile.shape, rows.tile.dtype))
            b.store(ref, rows)
        low = b.ge(where, b.broadcast(b.index(0), where.tile.shape, ()))
        high = b.lt(where, b.broadcast(b.index(hot.places), where.tile.shape, ()))
        shape = (hot.count, rows.tile.shape[1])
        inside = b.broadcast(b.and_(low, high), shape, (0,))
        zeros = b.constant(0, T.TileType(shape, rows.tile.dtype))
        index = (Gather(), Span(0, shape[1]))
        found = b.load(ref, index, [where], inside, zeros)
        return _as_multiplied(b, found, rows) if rows.tile.dtype.is_float else found

    def _loaded_from(self, table: DotSide) -> Value | None:
        """What holds the rows of a table, and stays as it is."""
        load = self.producers.get(table.value)
        if load is None or load.name != "load" or table.contract != (0,):
            return None
        access = Access.of(load)
        whole = covers_whole(access.ref.ref.shape, access.index)
        if access.mask is not None or access.index_operands or not whole:
            return None
        stays = self.roots.of(access.ref) in self.constant
        return access.ref if stays and access.ref.ref.rank == 2 else None

    # --- sums ---

    def _sum(self, b: Builder, op: Op) -> Value | None:
        if len(op.operands) != 1 or op.operands[0].tile.rank != 2:
            return None
        (tile,), (axis, *others) = op.operands, op.attrs["axes"]
        result = op.result.tile
        found = self._terms(tile)
        if found is None or others or _is_narrow(result.dtype):
            return None
        hot, factor, multiplies = found
        if axis == hot.dim:
            return None
        where = hot.where(b, self._vector(b, hot.ids, hot.dim))
        one = T.TileType((hot.count,), result.dtype)
        terms = (
            b.constant(1, one) if factor is None else self._vector(b, factor, hot.dim)
        )

        def at_places(b: Builder) -> Value:
            column = b.broadcast(terms, (hot.count, 1), (0,))
            made = _added(b, hot, where, column)
            return b.op("reshape", made, shape=(hot.places,))

        if not multiplies:
            return at_places(b)

        def multiplied(b: Builder) -> Value:
            wide = b.broadcast(terms, hot.shape, (1 - hot.dim,))
            again = b.mul(hot.matrix(b, where, result.dtype), wide)
            return b.op("reduce", again, **op.attrs)

        return _if_finite(b, terms, result, at_places, multiplied)

    def _terms(self, tile: Value) -> tuple[_Hot, Value | None, bool] | None:
        """The comparison, what is summed where it holds, whether it is multiplied."""
        hot = self._hot(tile)
        if hot is not None:
            return hot, None, False
        op = self.producers.get(tile)
        if op is None:
            return None
        if op.name == "select_n" and len(op.operands) == 3:
            hot = self._comparison(op.operands[0])
            _, other, value = op.operands
            if hot is None or self.number(other) != 0:
                return None
            return (hot, value, False) if self.is_alike(value, hot.dim) else None
        if op.name == "mul":
            for side, value in (op.operands, op.operands[::-1]):
                hot = self._hot(side)
                if hot is not None and self.is_alike(value, hot.dim):
                    return hot, value, True
        return None


def _is_narrow(dtype: T.DType) -> bool:
    """Whether sums in memory would be rounded more often than those of registers."""
    return dtype.is_float and dtype.bits < 32


def _rows(b: Builder, side: DotSide) -> Value:
    """The other factor, with the contracted dimension first."""
    if side.contract == (0,):
        return side.value
    return b.op("transpose", side.value, perm=(1, 0))


def _added(b: Builder, hot: _Hot, where: Value, rows: Value) -> Value:
    """For every place the sum of the rows whose ids name it."""
    shape = (hot.places, rows.tile.shape[1])
    sums = b.op("alloc", type=T.RefType(shape, rows.tile.dtype))
    b.store(sums, b.constant(0, sums.ref.tile))
    index = (Gather(), Span(0, shape[1]))
    attrs = dict(kind="add", index=index, mask=False)
    b.op("atomic_rmw", sums, rows, where, **attrs)
    return b.load(sums)


def _as_multiplied(b: Builder, found: Value, rows: Value) -> Value:
    """What is read, with the NaN of zeros times what is not finite in its column."""
    count = b.cast(b.not_(b.op("is_finite", rows)), T.I32)
    count = b.op("reduce", count, kind="sum", axes=(0,))
    others = b.broadcast(count, found.tile.shape, (1,))
    own = b.cast(b.not_(b.op("is_finite", found)), T.I32)
    nan = b.constant(float("nan"), found.tile)
    return b.select(b.eq(others, own), found, nan)


def _if_finite(
    b: Builder,
    factor: Value,
    result: T.TileType,
    finite: Callable[[Builder], Value],
    other: Callable[[Builder], Value],
) -> Value:
    """What `finite` computes, or `other` if some element of a factor is not finite."""
    if not factor.tile.dtype.is_float:
        return finite(b)
    wide = b.cast(factor, T.F64 if factor.tile.dtype.bits > 32 else T.F32)
    zeros = b.mul(wide, b.like(0, wide))
    axes = tuple(range(wide.tile.rank))
    total = b.op("reduce", zeros, kind="sum", axes=axes)
    which = b.cast(b.eq(total, b.like(0, total)), T.I32)
    regions = [_region(b, other), _region(b, finite)]
    (made,) = b.emit("cond", which, regions=regions)
    assert made.tile == result
    return made


def _region(b: Builder, compute: Callable[[Builder], Value]) -> Block:
    inner = Builder(b.loc)
    made = compute(inner)
    return Block((), tuple(inner.ops), (made,))
