"""Views: which elements of a memref an IR ref stands for.

A ref of the IR is represented as a memref plus a start, size and stride per dimension,
so that a load through any chain of subviews is one `vector.load`. `memory.py` emits the
ops; only copies and semaphores need the view as a memref of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from pallasite.backends.tpu.writer import ELEMENTS, SEMAPHORES, SPACES, memref
from pallasite.ir.nodes import Span
from pallasite.ir.types import RefType
from pallasite.target import TPUS

LANES, SUBLANES = TPUS["v5e"].lanes, TPUS["v5e"].sublanes  # of every generation


@dataclass(frozen=True)
class Start:
    """A first element: a number, plus an i32 value that `multiple` divides."""

    static: int = 0
    dynamic: str | None = None
    multiple: int = 0

    @property
    def divisor(self) -> int:
        """What divides the sum of both parts."""
        return gcd(self.static, self.multiple) if self.dynamic else abs(self.static)

    def is_multiple_of(self, n: int) -> bool:
        return self.divisor % n == 0


@dataclass(frozen=True)
class Edge:
    """One dimension of a block that may extend past its array's edge."""

    dim: int  # of the memref
    first: Start  # the array's index of the block's first element
    low: int | None  # elements from `low` (None: no block starts lower)
    high: int  # to `high` - 1 exist


@dataclass(frozen=True)
class Fill:
    """What a load gives past the edge of the array."""

    value: float | int | bool
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class View:
    """Elements of a memref, seen as a ref of the IR."""

    memref: str
    shape: tuple[int, ...]  # of the memref
    element: str
    space: str  # Mosaic's name
    ref: RefType
    starts: tuple[Start, ...]  # per dimension of the memref, as the next two
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dims: tuple[int, ...]  # the memref's dimension of each dimension of the ref
    fill: Fill | None = None

    @staticmethod
    def whole(
        name: str,
        ref: RefType,
        shape: Sequence[int] | None = None,
        dims: Sequence[int] | None = None,
        space: str | None = None,
    ) -> "View":
        """All of a memref; `shape` and `dims` where it has dimensions the ref lacks."""
        shape = ref.shape if shape is None else tuple(shape)
        dims = tuple(range(len(shape))) if dims is None else tuple(dims)
        count = len(shape)
        return View(
            name,
            shape,
            element_of(ref),
            space or SPACES[ref.space],
            ref,
            (Start(),) * count,
            shape,
            (1,) * count,
            dims,
        )

    @property
    def type(self) -> str:
        return memref(self.shape, self.element, self.space)

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape and not self.has_strides

    @property
    def has_strides(self) -> bool:
        return any(s != 1 for s in self.strides)

    def narrowed(
        self, spans: Sequence[tuple[Span, Start | None]], kept: Sequence[bool]
    ) -> "View":
        """Select a span per ref dimension; those not `kept` are dropped.

        A dynamic span's Start already includes the start of this view.
        """
        starts, sizes, strides = [*self.starts], [*self.sizes], [*self.strides]
        for dim, (span, start) in zip(self.dims, spans, strict=True):
            old = self.starts[dim]
            if start is None:
                offset = (span.start or 0) * self.strides[dim]
                start = replace(old, static=old.static + offset)
            starts[dim], sizes[dim] = start, span.size
            strides[dim] = self.strides[dim] * span.stride
        dims = tuple(d for d, keep in zip(self.dims, kept, strict=True) if keep)
        shape = tuple(sizes[d] for d in dims)
        return replace(
            self,
            starts=tuple(starts),
            sizes=tuple(sizes),
            strides=tuple(strides),
            dims=dims,
            ref=self.ref.with_shape(shape),
        )

    def part(self, dim: int, first: int, size: int = 1) -> "View":
        """`size` elements from the `first` one along a dimension of the memref.

        The ref's own shape is unchanged: this is for accesses in the memref's.
        """
        starts, sizes = [*self.starts], [*self.sizes]
        offset = first * self.strides[dim]
        starts[dim] = replace(starts[dim], static=starts[dim].static + offset)
        strides = [
            1 if d == dim and size == 1 else s for d, s in enumerate(self.strides)
        ]
        sizes[dim] = size
        return replace(
            self, starts=tuple(starts), sizes=tuple(sizes), strides=tuple(strides)
        )

    def transposed(self, perm: Sequence[int]) -> "View":
        dims = tuple(self.dims[d] for d in perm)
        shape = [self.ref.shape[d] for d in perm]
        return replace(self, dims=dims, ref=self.ref.with_shape(shape))


def element_of(ref: RefType) -> str:
    """The element type of a ref's memory; a bool takes a 32-bit word."""
    if ref.is_semaphore:
        return SEMAPHORES[ref.space]
    return "i32" if ref.dtype.is_bool else ELEMENTS[ref.dtype.name]


def required_alignment(view: View, dim: int) -> int:
    """What must divide a dynamic start along `dim` of a vector load (Mosaic's rule).

    Lanes move by whole tiles. So do rows, unless a single row is read or the memref is
    one tile wide, so that its rows are contiguous.
    """
    rank, bits = len(view.shape), 32 if view.ref.dtype.is_bool else view.ref.dtype.bits
    if dim == rank - 1:
        return LANES if rank > 1 else LANES * max(1, 32 // bits)
    if dim != rank - 2:
        return 1
    if bits == 32 and (view.sizes[dim] == 1 or view.shape[-1] <= LANES):
        return 1
    return 32 * SUBLANES // bits  # a tile packs narrow elements along rows


def has_few_lanes(view: View, dim: int) -> bool:
    """Whether `dim` are lanes of which an access needs more (Mosaic's rule).

    A row at a dynamic place in its tile is accessed by more than one tile's lanes, or
    in a memref that is one tile wide.
    """
    if dim != len(view.shape) - 1 or not dim or view.shape[dim] <= LANES:
        return False
    row = view.starts[dim - 1]
    tile = SUBLANES if required_alignment(view, dim - 1) == 1 else 1
    is_aligned = row.dynamic is None or row.is_multiple_of(tile)
    return not is_aligned and view.sizes[dim] <= LANES and not view.has_strides
