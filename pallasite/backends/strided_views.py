"""Views of memory by strides and edges, for backends that compute addresses themselves.

A ref is a `View`: a base pointer, one stride per dimension, and, for each dimension of
the array past whose edge a block may extend, where the block starts and where the array
ends. `StridedViews` emits the ops that make views. Known numbers are Python's; the
backend, which derives from it, defines how others are added and multiplied.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any, Generic, NoReturn, TypeVar

from pallasite.ir.nodes import Access, At, BlockDim, Gather, Op, Span, Value
from pallasite.ir.types import DType, RefType
from pallasite.passes.analysis.block_table import last_number
from pallasite.passes.analysis.intervals import Facts

N = TypeVar("N")  # a backend's integer in the emitted code


@dataclass(frozen=True)
class Dim:
    """One dimension of a view."""

    size: int
    stride: int  # in memory
    edge: int | None = None  # key of the Edge it moves along
    edge_step: int = 1  # positions along that edge per element
    axis: int = 0  # the dimension of the array it moves along
    step: int = 1  # elements of that dimension per element; 0: moves along several


@dataclass(frozen=True)
class Edge(Generic[N]):
    """A dimension of the array past whose edge a view may extend."""

    start: int | N  # the view's first element
    stop: int | N  # one past the last existing element
    below: bool  # whether the start may be negative


@dataclass(frozen=True)
class View(Generic[N]):
    """A ref in the emitted code."""

    pointer: Any
    dtype: DType
    offset: int | N  # of the first element, in elements
    dims: tuple[Dim, ...]
    edges: tuple[tuple[int, Edge[N]], ...] = ()
    fill: float | int | bool | None = None
    wide: bool = False  # offsets need 64 bits
    memory: Value | None = None  # the kernel parameter or scratch it is part of


V = TypeVar("V", bound=View[Any])


def dims_of(ref: RefType) -> tuple[Dim, ...]:
    """The dimensions of a whole array, row-major."""
    strides = [prod(ref.shape[d + 1 :]) for d in range(ref.rank)]
    return tuple(Dim(n, strides[d], axis=d) for d, n in enumerate(ref.shape))


class StridedViews(ABC, Generic[V, N]):
    """Emits views. The last base of an emitter, which defines the abstract members."""

    facts: Facts
    views: dict[Value, V]

    # --- defined by the backend ---

    @abstractmethod
    def refuse(self, op: Op, why: str = "", fix: str = "") -> NoReturn: ...

    @abstractmethod
    def whole_number(self, value: Value) -> int | N:
        """A scalar of the kernel as an i32, saturated."""

    @abstractmethod
    def plus(self, x: int | N, y: int | N, wide: bool = False) -> int | N: ...

    @abstractmethod
    def times(self, x: int | N, factor: int, wide: bool = False) -> int | N: ...

    @abstractmethod
    def at_most(self, x: int | N, limit: int) -> int | N: ...

    @abstractmethod
    def start(
        self, entry: At | Span, operand: Value | None, size: int, clamp: bool
    ) -> int | N:
        """Where an index entry starts in a dimension of a given size."""

    def stepped(self, view: V, dim: Dim, start: int | N, multiple: int) -> V:
        """The view with its first element `start` elements further along a dimension.

        `multiple` is known to divide `start`. Edges stay as they are.
        """
        by = self.times(start, dim.stride, view.wide)
        return replace(view, offset=self.plus(view.offset, by, view.wide))

    # --- views ---

    def emit_block_view(self, op: Op) -> None:
        ref, *indices = op.operands
        before, window = self.views[ref], op.attrs["window"]
        view, pending = before, iter(indices)
        dims: list[Dim] = []
        edges = dict(before.edges)
        leaves = False  # the ref itself, not only the array that the ref leaves
        for dim, whole in zip(window.dims, before.dims, strict=True):
            index = next(pending)
            start, low, high = self.block_start(dim, index, whole.size)
            stop: int | N = whole.size
            if dim.kind == "bounded":
                end = self.plus(start, self.whole_number(next(pending)))
                stop, high = self.at_most(end, whole.size), whole.size
            view = self.stepped(view, whole, start, self.block_multiple(dim, index))
            key, edge_step = whole.edge, whole.edge_step
            if low < 0 or high + dim.size > whole.size:
                leaves = True
                if key is not None:
                    stop = self.nearer_stop(op, before, whole, edges[key], stop)
                key = max(edges, default=-1) + 1 if key is None else key
                edges[key], edge_step = Edge(start, stop, low < 0), 1
            elif key is not None:
                outer = edges[key]
                first = self.plus(outer.start, self.times(start, edge_step))
                edges[key] = replace(outer, start=first)
            if dim.kind != "squeezed":
                now = replace(whole, size=dim.size, edge=key, edge_step=edge_step)
                dims.append(now)
        fill = self.fill_of_both(op, before, window.fill, leaves)
        edges_now = tuple(edges.items())
        view = replace(view, dims=tuple(dims), edges=edges_now, fill=fill)
        self.views[op.result] = view

    def nearer_stop(
        self, op: Op, view: V, dim: Dim, edge: Edge[N], stop: int | N
    ) -> int | N:
        """Where a window must stop: where its ref ends or, if nearer, the array."""
        dims = [d for d in view.dims if d.edge == dim.edge]
        if edge.below or len(dims) > 1 or dim.edge_step != 1 or stop != dim.size:
            self.refuse(
                op, "a window past the end of a block that extends past its array"
            )
        left = self.plus(edge.stop, self.times(edge.start, -1))
        return self.at_most(left, dim.size)

    def fill_of_both(self, op: Op, view: V, fill: Any, leaves: bool) -> Any:
        """What is read outside a window on a view: where one does not say, anything."""
        if not view.edges or view.fill is None:
            return fill if leaves or not view.edges else None
        if leaves and fill is not None and fill != view.fill:
            self.refuse(
                op, "a window and the block it is on have different fill values"
            )
        return view.fill

    def block_start(
        self, dim: BlockDim, index: Value, size: int
    ) -> tuple[int | N, int, int]:
        """First element of a block, with its bounds.

        The index is a valid block index: `place_windows` has clamped it.
        """
        fact = self.facts.of(index)
        low, high = max(fact.low, 0), min(fact.high, last_number(dim, size))
        start = self.whole_number(index)
        if dim.kind == "blocked":
            if high * dim.size >= 1 << 31:
                low, high = -1, 1 << 31  # it may wrap around: check both ends
            return self.times(start, dim.size), low * dim.size, high * dim.size
        if dim.kind == "element":
            before = dim.padding[0]
            return self.plus(start, -before), low - before, high - before
        return start, low, high

    def block_multiple(self, dim: BlockDim, index: Value) -> int:
        """What is known to divide the index of a block's first element."""
        multiple = self.facts.of(index).multiple
        if dim.kind == "blocked":
            return multiple * dim.size
        return gcd(multiple, dim.padding[0]) if dim.kind == "element" else multiple

    def emit_subview(self, op: Op) -> None:
        self.views[op.result] = self.picked(Access.of(op))

    def picked(self, access: Access) -> V:
        """What an index selects from a view: the dimensions of its spans."""
        view = self.views[access.ref]
        dims: list[Dim] = []
        for dim, (entry, operand) in zip(view.dims, access.split_index(), strict=True):
            assert not isinstance(entry, Gather)
            start = self.start(entry, operand, dim.size, clamp=True)
            view = self.shifted(view, dim, start)
            if isinstance(entry, Span):
                dims.append(_strided(dim, entry.size, entry.stride))
            elif dim.size == 0:  # there are no elements at all
                nothing = max(dict(view.edges), default=-1) + 1, Edge(0, 0, False)
                view = replace(view, edges=(*view.edges, nothing))
        return replace(view, dims=tuple(dims))

    def shifted(self, view: V, dim: Dim, start: int | N, multiple: int = 1) -> V:
        """The view moved by `start` elements of one of its dimensions.

        `multiple` is known to divide `start`.
        """
        if start == 0:
            return view
        multiple = start if isinstance(start, int) else multiple
        view = self.stepped(view, dim, start, multiple)
        if dim.edge is None:
            return view
        edges = dict(view.edges)
        edge = edges[dim.edge]
        first = self.plus(edge.start, self.times(start, dim.edge_step))
        edges[dim.edge] = replace(edge, start=first)
        return replace(view, edges=tuple(edges.items()))

    def emit_transpose_view(self, op: Op) -> None:
        view = self.views[op.operands[0]]
        dims = tuple(view.dims[d] for d in op.attrs["perm"])
        self.views[op.result] = replace(view, dims=dims)

    def emit_reshape_view(self, op: Op) -> None:
        view = self.views[op.operands[0]]
        dims = _split_and_merge(view.dims, op.attrs["shape"])
        if dims is None:
            self.refuse(
                op,
                "the dimensions are not contiguous in memory, or may extend past an "
                "edge",
                "reshape the loaded value instead",
            )
        self.views[op.result] = replace(view, dims=dims)


def _strided(dim: Dim, size: int, stride: int) -> Dim:
    return replace(
        dim,
        size=size,
        stride=dim.stride * stride,
        edge_step=dim.edge_step * stride,
        step=dim.step * stride,
    )


def _split_and_merge(
    dims: Sequence[Dim], shape: Sequence[int]
) -> tuple[Dim, ...] | None:
    """The dimensions of a reshaped view, if strides can express it."""
    old = [d for d in dims if d.size != 1]
    new: list[Dim] = []
    pending = [n for n in shape if n != 1]
    while pending:
        group = [pending.pop(0)]
        if not old:
            return None
        merged = old.pop(0)
        while prod(group) != merged.size:
            if prod(group) < merged.size:
                group.append(pending.pop(0))
                continue
            inner = old.pop(0)
            if merged.stride != inner.size * inner.stride:
                return None
            if merged.edge is not None or inner.edge is not None:
                return None
            merged = replace(inner, size=merged.size * inner.size)
        for number, n in enumerate(group):
            inside = prod(group[number + 1 :])
            new.append(
                replace(
                    merged,
                    size=n,
                    stride=merged.stride * inside,
                    edge_step=merged.edge_step * inside,
                    step=0,
                )
            )
    found = iter(new)
    return tuple(next(found) if n != 1 else Dim(1, 0, step=0) for n in shape)


RULES = {
    "block_view": StridedViews.emit_block_view,
    "subview": StridedViews.emit_subview,
    "transpose_view": StridedViews.emit_transpose_view,
    "reshape_view": StridedViews.emit_reshape_view,
}
