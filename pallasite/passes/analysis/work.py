"""work: counts what a kernel computes and moves, step by step.

`count(kernel)` follows every step of the grid and of loops whose trip count the grid
determines: a branch counts where it is taken, a block where its window moves, and of a
block that extends past the edge only the part inside. `cost.py` has the estimate by
which passes compare blocks; this one is for reports.

Code is walked once, with all of its executions as the rows of a table: grid indices and
values computed from them are columns.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from pallasite.ir.nodes import Block, BlockDim, Kernel, Loc, Op, Value, Window
from pallasite.ir.opdef import Unit, table
from pallasite.ir.roles import Cond, Dot, Loop, Pipeline, Shown, Wgmma, While
from pallasite.ir.types import DTYPES
from pallasite.ops.fused import written_out
from pallasite.passes.analysis.block_table import last_number
from pallasite.passes.analysis.cost import (
    MAIN_MEMORY,
    accessed_by,
    bytes_of,
    is_main,
    moved_through,
    operations,
)
from pallasite.passes.analysis.grid import window_axes
from pallasite.passes.analysis.memory import Roots

MOST_ROWS = 1 << 20  # executions of one piece of code that are followed individually
FLOATING, OTHER, SPECIAL = "floating", "other", "special"
PRODUCT, ACCESSED, MOVED = "product", "accessed", "moved"
# Ops on floats that only move or select and compute nothing.
_NO_FLOP = {"select_n", "cast", "bitcast", "stop_gradient"}


@dataclass(frozen=True)
class Traffic:
    """The traffic between one array in main memory and the steps.

    Attributes:
        array: its name.
        mode: "in", "out", or "direct" for accesses without a window.
        block: the shape of a block; for direct accesses, of the array.
        dtype: the element type.
        axes: the grid axes along which the window moves.
        moves: how often a block is copied.
        bytes: total bytes copied.
        distinct: bytes of the array that are touched at all.
        exact: False if a block's place is known only at run time; every step is then
            assumed to have a block of its own.
    """

    array: str
    mode: str
    block: tuple[int, ...]
    dtype: str
    axes: tuple[int, ...]
    moves: int
    bytes: int
    distinct: int
    exact: bool = True

    @property
    def inside(self) -> float:
        """The share of all blocks' elements that is inside the array."""
        shown = self.moves * prod(self.block) * DTYPES[self.dtype].bits / 8
        return min(self.bytes / shown, 1.0) if shown else 1.0


@dataclass(frozen=True)
class Work:
    """Totals of one call.

    Attributes:
        products: operations of matmuls, by the type of their operands, followed by
            the precision asked for, if any ("f32:tf32"); a multiplication and an
            addition count as two.
        arithmetic: other operations on floats, one per element.
        other: operations on integers and booleans, comparisons and selects, one per
            element of a tile; scalar arithmetic is left out.
        transcendentals: exponentials and the like, one per element.
        traffic: one row per window, and per array that is accessed directly.
        exact: False if a branch or a trip count depends on data: the longer branch, and
            one iteration of the loop, are counted.
    """

    products: Mapping[str, int]
    arithmetic: int
    other: int
    transcendentals: int
    traffic: tuple[Traffic, ...]
    exact: bool = True

    @property
    def flops(self) -> int:
        return sum(self.products.values()) + self.arithmetic

    @property
    def bytes(self) -> int:
        """Bytes copied between main memory and the chip with these blocks."""
        return sum(each.bytes for each in self.traffic)

    @property
    def distinct_bytes(self) -> int:
        """The minimum that any implementation of the kernel has to copy."""
        return sum(each.distinct for each in self.traffic)


def count(kernel: Kernel, least: bool = False) -> Work:
    """What one call of the kernel computes and moves.

    Args:
        kernel: at either level.
        least: where data decide, count the shorter branch and no iteration of a loop.
    """
    counter = _Counter(kernel, least)
    total = counter.block(kernel.body, _Rows(1))
    return Work(
        {str(key[1]): n for key, n in total.items() if key[0] == PRODUCT},
        total[FLOATING,],
        total[OTHER,],
        total[SPECIAL,],
        (*counter.traffic, *counter.prefetched(), *counter.direct(total)),
        counter.exact,
    )


@dataclass(frozen=True)
class LineWork:
    """What the ops of one source line do in one call.

    Attributes:
        flops: operations on floats, including matmuls.
        other: operations on integers and booleans, comparisons and selects.
        transcendentals: exponentials and the like.
        accessed: bytes read from and written to refs, in any memory.
        moved: bytes of blocks copied between main memory and the chip, at the line
            where a grid starts.
    """

    flops: int
    other: int
    transcendentals: int
    accessed: int
    moved: int


def count_by_line(kernel: Kernel) -> dict[tuple[str, int], LineWork]:
    """The work of one call, for every file and line that ops come from.

    Counts all branches where data decide, and one iteration of loops whose trip count
    depends on data.
    """
    counter = _LineCounter(kernel, False)
    counter.block(kernel.body, _Rows(1))
    return {
        line: LineWork(
            total[FLOATING,] + sum(n for key, n in total.items() if key[0] == PRODUCT),
            total[OTHER,],
            total[SPECIAL,],
            total[ACCESSED,],
            total[MOVED,],
        )
        for line, total in counter.lines.items()
    }


Total = Counter[tuple[object, ...]]


class _Rows:
    """All executions of a piece of code, one row each, with their known scalars."""

    def __init__(
        self,
        count: int,
        outer: "_Rows | None" = None,
        index: np.ndarray | None = None,
        columns: Mapping[Value, np.ndarray] | None = None,
    ):
        self.count = count
        self._outer, self._index = outer, index  # rows of `outer` that these belong to
        self._columns = dict(columns or {})

    @property
    def followed(self) -> bool:
        """Whether each execution is a row; otherwise only their number is known."""
        return self._outer is None or self._index is not None

    def get(self, value: Value) -> np.ndarray | None:
        found = self._columns.get(value)
        if found is None and self._outer is not None and self._index is not None:
            outer = self._outer.get(value)
            found = None if outer is None else outer[self._index]
            if found is not None:
                self._columns[value] = found
        return found

    def note(self, op: Op) -> None:
        """Record the result of a scalar op, if its operands are known."""
        if not self.followed or len(op.results) != 1 or op.result.is_ref:
            return
        if op.result.tile.rank:
            return
        if op.name == "constant":
            dtype = op.result.tile.dtype.np
            self._columns[op.result] = np.full(self.count, op.attrs["value"], dtype)
            return
        row = table()[op.name]
        if not (row.elementwise and row.meaning and op.operands):
            return
        operands = [self.get(v) for v in op.operands]
        if not any(column is None for column in operands):
            with np.errstate(all="ignore"):
                found = np.asarray(row.meaning(*operands, **op.own_attrs))
            self._columns[op.result] = np.broadcast_to(found, (self.count,))

    def where(self, chosen: np.ndarray) -> "_Rows":
        index = np.flatnonzero(chosen)
        return _Rows(len(index), self, index)

    def repeated(
        self, times: np.ndarray, columns: Mapping[Value, np.ndarray]
    ) -> "_Rows":
        index = np.repeat(np.arange(self.count), times)
        return _Rows(len(index), self, index, columns)

    def unfollowed(self, count: int) -> "_Rows":
        return _Rows(count, self)


class _Counter:
    def __init__(self, kernel: Kernel, least: bool):
        self.kernel, self.least, self.exact = kernel, least, True
        self.roots = Roots(kernel)
        self.views = Roots(kernel, windows=False)
        self.traffic: list[Traffic] = []

    # --- code ---

    def block(self, block: Block, rows: _Rows) -> Total:
        total = Total()
        if rows.count:
            for op in block.ops:
                total.update(self.op(op, rows))
        return total

    def op(self, op: Op, rows: _Rows) -> Total:
        rows.note(op)
        structured = _STRUCTURED.get(op.name)
        if structured is not None:
            return structured(self, op, rows)
        total = Total()
        for region in op.regions:
            total.update(self.block(region, rows))
        unit = table()[op.name].unit
        if unit is Unit.SPECIAL:
            total[SPECIAL,] += op.result.tile.size * rows.count
        elif unit is Unit.ALU and (kind := _kind(op)):
            total[kind,] += _operations(op) * rows.count
        elif unit is Unit.MEMORY and (moved := self.moved_by(op)):
            ref = self.in_main_memory(op)[0]
            total["direct", self.roots.of(ref)] += moved * rows.count
        return total

    def moved_by(self, op: Op) -> int:
        """Bytes of main memory that an op itself reads and writes."""
        return moved_through(op, self.in_main_memory(op))

    def in_main_memory(self, op: Op) -> list[Value]:
        """The refs of an op that are parts of arrays in main memory.

        The block of a window is not: it was copied to the chip.
        """
        return [v for v in op.operands if v.is_ref and is_main(self.views.of(v))]

    def count_dot(self, op: Op, rows: _Rows) -> Total:
        dot = Dot.of(op)
        dtype = dot.lhs.value.type.dtype.name
        asked = str(op.attrs["precision"] or "default").lower()
        if dtype == "f32" and asked != "default":
            dtype = f"f32:{asked}"
        done = 2 * op.result.tile.size * dot.depth * rows.count
        return Total({(PRODUCT, dtype): done})

    def count_wgmma(self, op: Op, rows: _Rows) -> Total:
        found = Wgmma.of(op)
        depth = found.lhs.type.shape[found.contract[0]]
        done = 2 * found.sums.tile.size * depth * rows.count
        dtype = found.lhs.type.dtype.name
        return Total({(PRODUCT, "f32:tf32" if dtype == "f32" else dtype): done})

    def count_fused(self, op: Op, rows: _Rows) -> Total:
        return self.block(written_out(op), rows)

    def count_for(self, op: Op, rows: _Rows) -> Total:
        loop = Loop.of(op)
        bounds = [rows.get(v) for v in loop.bounds]
        if any(column is None for column in bounds):
            return self.unknown_rounds([loop.body], rows)
        first, limit, step = (np.asarray(c, dtype=np.int64) for c in bounds)
        span = np.where(step > 0, limit - first, first - limit)
        size = np.maximum(np.abs(step), 1)
        rounds = np.maximum(-(-span // size), 0)
        if rounds.sum() > MOST_ROWS:
            return self.block(loop.body, rows.unfollowed(int(rounds.sum())))
        number = np.concatenate([np.arange(n) for n in rounds.tolist()] or [rounds])
        counters = np.repeat(first, rounds) + number * np.repeat(step, rounds)
        counters = counters.astype(loop.index.type.dtype.np)
        return self.block(loop.body, rows.repeated(rounds, {loop.index: counters}))

    def count_while(self, op: Op, rows: _Rows) -> Total:
        loop = While.of(op)
        return self.unknown_rounds([loop.condition, loop.body], rows)

    def unknown_rounds(self, code: Iterable[Block], rows: _Rows) -> Total:
        self.exact = False
        total = Total()
        if not self.least:
            for each in code:
                total.update(self.block(each, rows.unfollowed(rows.count)))
        return total

    def count_cond(self, op: Op, rows: _Rows) -> Total:
        cond = Cond.of(op)
        which = rows.get(cond.which)
        if which is None:
            self.exact = self.exact and len(cond.branches) < 2
            return self.any_branch([self.block(b, rows) for b in cond.branches])
        number = np.clip(which.astype(np.int64), 0, len(cond.branches) - 1)
        total = Total()
        for n, branch in enumerate(cond.branches):
            total.update(self.block(branch, rows.where(number == n)))
        return total

    def any_branch(self, totals: Sequence[Total]) -> Total:
        """Merge data-dependent branches: count by count, the maximum or minimum."""
        pick = min if self.least else max
        keys = {key for total in totals for key in total}
        return Total({key: pick(total[key] for total in totals) for key in keys})

    # --- grids ---

    def count_pipeline(self, op: Op, rows: _Rows) -> Total:
        pipeline = Pipeline.of(op)
        sizes = [self.size_of(n, rows) for n in pipeline.sizes]
        steps = prod(sizes)
        moves = window_axes(op)
        if rows.followed and rows.count * steps <= MOST_ROWS:
            positions = np.indices(sizes, dtype=np.int32).reshape(len(sizes), steps)
            ids = np.tile(positions, rows.count)
            each = np.full(rows.count, steps)
            inner = rows.repeated(each, dict(zip(pipeline.ids, ids, strict=True)))
        else:
            ids, inner = None, rows.unfollowed(rows.count * steps)
        for shown, moved in zip(pipeline.shown, moves, strict=True):
            if shown.window.space in MAIN_MEMORY or not is_main(shown.array):
                continue
            axes = tuple(sorted(a for a in moved if sizes[a] != 1))
            visits = rows.count * prod(sizes[: max(axes, default=-1) + 1])
            found = None if ids is None else _places(shown, rows, ids, steps)
            self.traffic.append(
                _at_most(shown, axes, visits)
                if found is None
                else _counted(shown, axes, found, steps)
            )
        return self.block(pipeline.body, inner)

    def size_of(self, size: int | Value, rows: _Rows) -> int:
        if isinstance(size, int):
            return size
        column = rows.get(size)
        if column is None or not len(column) or (column != column[0]).any():
            self.exact = False
            return 1
        return int(column[0])

    # --- arrays without a window ---

    def prefetched(self) -> Iterable[Traffic]:
        """Operands that start on chip are copied there once."""
        for param in self.kernel.params:
            if not is_main(param) and not param.ref.is_semaphore:
                mode = "out" if param in self.kernel.outputs else "in"
                size = bytes_of(param.type)
                yield _row(param, mode, param.ref.shape, (), 1, size, size)

    def direct(self, total: Total) -> Iterable[Traffic]:
        for key, moved in total.items():
            if key[0] != "direct":
                continue
            (_, ref) = key
            assert isinstance(ref, Value)
            distinct = min(moved, bytes_of(ref.type))
            row = _row(ref, "direct", ref.ref.shape, (), 0, moved, distinct)
            yield row


_STRUCTURED = {
    "dot": _Counter.count_dot,
    "dot_add": _Counter.count_fused,
    "dot_store": _Counter.count_fused,
    "wgmma": _Counter.count_wgmma,
    "for": _Counter.count_for,
    "while": _Counter.count_while,
    "cond": _Counter.count_cond,
    "pipeline": _Counter.count_pipeline,
}


class _LineCounter(_Counter):
    """Counts like its base class, and records the line."""

    def __init__(self, kernel: Kernel, least: bool):
        super().__init__(kernel, least)
        self.lines: dict[tuple[str, int], Total] = {}
        self._inside = False  # an op whose regions are part of it

    def op(self, op: Op, rows: _Rows) -> Total:
        if op.name in _STRUCTURED and op.regions:
            before = len(self.traffic)
            total = super().op(op, rows)
            moved = sum(row.bytes for row in self.traffic[before:])
            self.note(op.loc, Total({(MOVED,): moved}))
            return total
        outer, self._inside = self._inside, True
        total = super().op(op, rows)
        self._inside = outer
        if not outer:
            own = Total({key: n for key, n in total.items() if key[0] != "direct"})
            own[ACCESSED,] = (accessed_by(op) or self.moved_by(op)) * rows.count
            self.note(op.loc, own)
        return total

    def note(self, loc: Loc | None, total: Total) -> None:
        if loc is not None and any(total.values()):
            self.lines.setdefault((loc.file, loc.line), Total()).update(total)


def _kind(op: Op) -> str | None:
    """What an arithmetic op counts as; None: nothing."""
    result = op.results[0].tile
    if result.dtype.is_float and op.name not in _NO_FLOP:
        return FLOATING
    compares = any(v.tile.rank for v in op.operands)
    return OTHER if compares and op.name not in ("bitcast", "stop_gradient") else None


def _operations(op: Op) -> int:
    if op.name == "integer_pow":
        power = abs(op.attrs["y"])  # by squaring
        return op.result.tile.size * max(power.bit_length() + power.bit_count() - 2, 1)
    return operations(op)


# --- where blocks are ---


def _places(
    shown: Shown, rows: _Rows, ids: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """For every step, the first element of its block and how many are inside the array,
    a row per dimension. None: known only at run time."""
    window, index_map = shown.window, shown.index_map
    if any(dim.kind == "bounded" for dim in window.dims):
        return None
    each = np.full(rows.count, steps)
    inside = rows.repeated(each, dict(zip(index_map.params, ids, strict=True)))
    for op in index_map.ops:
        inside.note(op)
    numbers = [inside.get(v) for v in index_map.yields]
    if any(column is None for column in numbers):
        return None
    dims = list(zip(window.dims, shown.array.ref.shape, numbers, strict=True))
    if not dims:
        nothing = np.zeros((0, rows.count * steps), np.int64)
        return nothing, nothing
    parts = [extent(dim, n, np.asarray(c, np.int64)) for dim, n, c in dims]
    first, size = zip(*parts, strict=True)
    return np.stack(first), np.stack(size)


def extent(dim: BlockDim, n: int, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Along a dimension of `n` elements, the first element of some blocks, and how many
    of each block's are inside."""
    number = np.clip(number, 0, last_number(dim, n))
    if dim.kind == "element":
        start = number - dim.padding[0]
    else:
        start = number * (dim.size if dim.kind == "blocked" else 1)
    length = 1 if dim.kind == "squeezed" else dim.size
    low, high = np.clip(start, 0, n), np.clip(start + length, 0, n)
    return start, high - low


def _counted(
    shown: Shown,
    axes: tuple[int, ...],
    places: tuple[np.ndarray, np.ndarray],
    steps: int,
) -> Traffic:
    first, size = places
    moved = np.ones(first.shape[1], bool)
    moved[1:] = (first[:, 1:] != first[:, :-1]).any(axis=0)
    moved[:: max(steps, 1)] = True  # a pipeline starts with nothing on chip
    elements = size.prod(axis=0)
    _, seen = np.unique(first, axis=1, return_index=True)
    array = shown.array.ref
    distinct = min(int(elements[seen].sum()), array.size)
    copied, touched = (
        bytes_of(array.with_shape((int(n),))) for n in (elements[moved].sum(), distinct)
    )
    return _window_row(shown, axes, int(moved.sum()), copied, touched, True)


def _at_most(shown: Shown, axes: tuple[int, ...], visits: int) -> Traffic:
    """As if every step up to the last axis it moves along had a block of its own."""
    array = shown.array.ref
    dims = zip(shown.window.dims, array.shape, strict=True)
    sizes = [1 if d.kind == "squeezed" else min(d.size, n) for d, n in dims]
    block = bytes_of(array.with_shape(sizes))
    touched = min(block, bytes_of(array)) if visits else 0
    return _window_row(shown, axes, visits, visits * block, touched, False)


def _window_row(
    shown: Shown,
    axes: tuple[int, ...],
    moves: int,
    copied: int,
    distinct: int,
    exact: bool,
) -> Traffic:
    window: Window = shown.window
    shape = window.block_shape
    return _row(shown.array, window.mode, shape, axes, moves, copied, distinct, exact)


def _row(
    ref: Value,
    mode: str,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    moves: int,
    copied: int,
    distinct: int,
    exact: bool = True,
) -> Traffic:
    name, dtype = ref.name or "unnamed", ref.ref.dtype.name
    return Traffic(name, mode, shape, dtype, axes, moves, copied, distinct, exact)


def short(number: float) -> str:
    """A number with a unit's prefix: "3.2 M"."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or prefix == "T":
            break
        number /= 1000
    return f"{number:.3g} {prefix}"
