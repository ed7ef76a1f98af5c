"""consecutive_indices: index arrays that count up become slices.

`x_ref[start + jnp.arange(n)]`, and a masked slice that is wider than its ref (the
importer makes index arrays of it), read neighbouring elements. A backend that moves
gathered elements one at a time moves a slice at once.

The slices are masked, so that they mean what the index arrays mean: an element outside
the ref is read from the nearest one inside, and not written. A slice has at most as
many elements as its ref; wider accesses are made in parts.

Kernel in, Kernel out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Gather, Kernel, Op, Span, Value
from pallasite.ir.opdef import TILE
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import BOOL, TileType
from pallasite.passes.analysis.step_table import ranges_of_steps
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.index_arrays import Count, IndexArrays, first_along


def consecutive_indices(kernel: Kernel) -> Kernel:
    """Replace index arrays of neighbouring elements in loads and stores."""
    body = _Slicing().block(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


def single_slices(kernel: Kernel) -> Kernel:
    """The same only where an access is one slice, as it stands: the normal form.

    It is inside its ref, or has a mask; it is not transposed, and made in one part.
    Where only some arrays count up, along the last dimensions (`ref[rows[:, None],
    jnp.arange(n)]`), slices are gathered, and added to: `ref[rows, :]`. The counting
    arrays are then inside the ref, so that the slice is what they select; the others
    are alike along its dimensions, so that their first elements there are all of them.
    What a program computes of its grid indices is known by enumeration.
    """
    if kernel.level != TILE:
        return kernel
    body = _SingleSlices().block(kernel.body)
    return kernel if body is kernel.body else canonicalize(kernel.with_(body=body))


@dataclass(frozen=True)
class _Part:
    """Consecutive elements along one dimension of the ref.

    Args:
        first: the first element's place in the index array.
        size: how many; None for an index, which the result has no dimension for.
        start: where the first element is in the ref.
    """

    first: int
    size: int | None
    start: Value


class _Slicing(IndexArrays):
    def rewritten(self, op: Op) -> Sequence[Op]:
        if op.name not in ("load", "store"):
            return (op,)
        access = Access.of(op)
        counts = self._counts(access)
        if counts is None:
            return (op,)
        b = Builder(op.loc)
        made = _Slices(b, op, access, counts).emit()
        if made is None:
            return tuple(b.ops)
        *before, last = b.ops
        assert last.results == (made,)
        return (*before, last.with_(results=op.results))

    def _counts(self, access: Access) -> list[Count] | None:
        """What each index array counts, if all do and along different dimensions."""
        arrays = _index_arrays(access)
        if not arrays or any(isinstance(e, Span) for e in access.index):
            return None
        counts = [self.count(v) for v in arrays]
        found = [c for c in counts if c is not None]
        dims = [c.dim for c in found if c.dim is not None]
        shape = arrays[0].tile.shape
        counted = {d for d, n in enumerate(shape) if n > 1}
        if len(found) < len(counts) or len(set(dims)) < len(dims):
            return None
        if not counted <= set(dims) or not all(shape):
            return None
        pairs = zip(found, arrays, strict=True)
        return [replace(c, low=self.facts.of(v).low) for c, v in pairs]


class _SingleSlices(_Slicing):
    def __init__(self) -> None:
        super().__init__()
        self.steps = dict[
            Value, tuple[int, int]
        ]()  # of numbers that grid indices decide

    def regions(self, op: Op) -> Sequence[Block]:
        if op.name == "pipeline":
            self.steps |= ranges_of_steps(Pipeline.of(op))
        return super().regions(op)

    def _op(self, op: Op) -> Sequence[Op]:
        new = super()._op(op)
        for value in op.results:
            if value in self.steps:
                low, high = self.steps[value]
                fact = replace(self.facts.of(value), low=low, high=high)
                self.facts.note(value, fact)
        return new

    def rewritten(self, op: Op) -> Sequence[Op]:
        new = super().rewritten(op)
        is_access = op.name in ("load", "store", "atomic_rmw")
        return self._gathered_slices(op) if is_access and new == (op,) else new

    def _gathered_slices(self, op: Op) -> Sequence[Op]:
        """The last dimensions of the index arrays as slices, where they count up."""
        access = Access.of(op)
        counted = self._counted_last(access)
        if not counted:
            return (op,)
        shape = _index_arrays(access)[0].tile.shape
        kept = shape[: len(shape) - len(counted)]
        b, entries, operands = (
            Builder(op.loc),
            list[At | Span | Gather](),
            list[Value](),
        )
        for n, (entry, operand) in enumerate(access.split_index()):
            if n in counted:
                start = counted[n]
                entries.append(Span(None, shape[len(kept) + list(counted).index(n)]))
                operands.append(first_along(b, start, ()))
                continue
            if isinstance(entry, Gather):
                assert operand is not None
                operand = first_along(b, operand, kept)
                entry = entry if kept else At()
            entries.append(entry)
            operands += [operand] if operand is not None else []
        before = [v for v in (access.ref, access.value) if v is not None]
        after = [v for v in (access.mask, access.other) if v is not None]
        attrs = {**op.attrs, "index": tuple(entries)}
        return (*b.ops, op.with_(operands=(*before, *operands, *after), attrs=attrs))

    def _counted_last(self, access: Access) -> dict[int, Value]:
        """The arrays that count along the last dimensions, by their place, in order."""
        arrays = _index_arrays(access)
        shape = arrays[0].tile.shape if arrays else ()
        if not all(shape):
            return {}
        found: dict[int, tuple[int, Value]] = {}
        entries, spans = access.split_index(), False
        for n, (entry, value) in enumerate(entries):
            spans |= isinstance(entry, Span)
            if not isinstance(entry, Gather) or spans:
                continue
            assert value is not None
            count, size = self.count(value), access.ref.ref.shape[n]
            inside = self.facts.of(value).within(0, size - 1)
            dim = count.dim if count is not None else None
            if inside and dim is not None and shape[dim] > 1:
                found[n] = dim, value
        dims = [dim for dim, _ in found.values()]
        while dims and dims != list(range(len(shape) - len(dims), len(shape))):
            found.pop(next(iter(found)))
            dims = dims[1:]
        if len(found) == len(arrays) and len(dims) < len(shape):
            return {}  # no array is left to select along the other dimensions
        for n, (entry, value) in enumerate(entries):
            if not isinstance(entry, Gather) or value is None:
                continue
            own = found[n][0] if n in found else None
            inside = self.facts.of(value).within(0, access.ref.ref.shape[n] - 1)
            if not (inside or len(dims) < len(shape)):
                return {}  # a gather is dropped outside, an index is clamped
            if not all(self.is_alike(value, d) for d in dims if d != own):
                return {}
        return {n: value for n, (_, value) in found.items()}

    def _counts(self, access: Access) -> list[Count] | None:
        counts = super()._counts(access)
        if counts is None:
            return None
        dims = [c.dim for c in counts if c.dim is not None]
        if dims != sorted(dims):
            return None
        arrays = _index_arrays(access)
        pairs = zip(access.index, access.ref.ref.shape, strict=True)
        sizes = [n for entry, n in pairs if isinstance(entry, Gather)]
        for value, count, n in zip(arrays, counts, sizes, strict=True):
            inside = self.facts.of(value).within(0, n - 1)
            wide = count.dim is not None and value.tile.shape[count.dim] > n
            if wide or not (inside or access.mask is not None):
                return None
        return counts


def _index_arrays(access: Access) -> list[Value]:
    return [v for e, v in access.split_index() if isinstance(e, Gather) and v]


class _Slices:
    """One access through index arrays, as accesses of slices."""

    def __init__(self, b: Builder, op: Op, access: Access, counts: Sequence[Count]):
        self.b, self.op, self.access = b, op, access
        arrays = _index_arrays(access)
        self.shape = arrays[0].tile.shape
        self.dims = [c.dim for c in counts]
        self.parts = self._parts_of(counts)
        everywhere = TileType(self.shape, BOOL)
        self.mask = access.mask or b.constant(True, everywhere)

    def _parts_of(self, counts: Sequence[Count]) -> list[list[_Part]]:
        """Per index entry, in order: the parts it is accessed in."""
        waiting = iter(counts)
        sizes = self.access.ref.ref.shape
        parts = []
        for (entry, operand), most in zip(
            self.access.split_index(), sizes, strict=True
        ):
            if isinstance(entry, Gather):
                parts.append(self._parts(next(waiting), most))
                continue
            assert isinstance(entry, At)
            start = self.b.index(entry.start or 0) if operand is None else operand
            if operand is not None and self.access.mask is None:
                # Beside a mask, an index outside is dropped; without one it is clamped.
                bounds = self.b.index(0), self.b.index(max(most - 1, 0))
                start = self.b.op("clamp", bounds[0], self.b.as_index(start), bounds[1])
            parts.append([_Part(0, None, start)])
        return parts

    def _parts(self, count: Count, most: int) -> list[_Part]:
        b, start = self.b, self.b.index(count.offset)
        for value in count.starts:
            start = b.add(start, b.as_index(value))
        if count.dim is None:
            return [_Part(0, None, start)]
        n = self.shape[count.dim]
        if self.access.value is not None and count.low >= 0:
            n = min(n, most)  # what is past the end is not written
        return [
            _Part(first, min(most, n - first), b.add(start, b.index(first)))
            for first in range(0, n, most)
        ]

    def emit(self) -> Value | None:
        """The access; what was read, if it is a load."""
        return self._along(0, ())

    def _along(self, entry: int, chosen: tuple[_Part, ...]) -> Value | None:
        if entry == len(self.parts):
            return self._access(chosen)
        made = [self._along(entry + 1, (*chosen, part)) for part in self.parts[entry]]
        found = [value for value in made if value is not None]
        if len(found) < 2:
            return found[0] if found else None
        axis = self._dim(entry)
        return self.b.op("concatenate", *found, axis=axis)

    def _dim(self, entry: int) -> int | None:
        """The dimension of the index arrays that an entry counts along."""
        if not isinstance(self.access.index[entry], Gather):
            return None
        before = self.access.index[:entry]
        return self.dims[sum(isinstance(e, Gather) for e in before)]

    def _access(self, chosen: Sequence[_Part]) -> Value | None:
        b, access = self.b, self.access
        spans = [(self._dim(k), p) for k, p in enumerate(chosen) if p.size is not None]
        order = [d for d, _ in spans if d is not None]
        order += [d for d in range(len(self.shape)) if d not in order]
        firsts, limits = [0] * len(self.shape), [1] * len(self.shape)
        for d, part in zip(order, (part for _, part in spans), strict=False):
            firsts[d], limits[d] = part.first, part.first + (part.size or 0)
        window = {"starts": tuple(firsts), "limits": tuple(limits)}
        sizes = tuple(part.size or 0 for _, part in spans)

        def sliced(value: Value) -> Value:
            """The part of a tile like the index arrays, with the slice's dimensions."""
            value = b.op("slice", value, **window, strides=(1,) * len(self.shape))
            value = b.op("transpose", value, perm=tuple(order))
            return b.op("reshape", value, shape=sizes)

        index = tuple(At() if p.size is None else Span(None, p.size) for p in chosen)
        starts = [part.start for part in chosen]
        mask = sliced(self.mask)
        if access.value is not None:
            b.store(access.ref, sliced(access.value), index, starts, mask)
            return None
        other = None if access.other is None else sliced(access.other)
        found = b.load(access.ref, index, starts, mask, other)
        units = (1,) * (len(self.shape) - len(sizes))
        found = b.op("reshape", found, shape=(*sizes, *units))
        back = tuple(order.index(d) for d in range(len(self.shape)))
        return b.op("transpose", found, perm=back)
