"""scratch_parts: scratch that is used in disjoint parts is a scratch per part.

In: one scratch for several states, such as the maxima and sums of rows in `stats[0]`
and `stats[1]`, the sums of two heads in the halves of `acc`, or `acc[0] += x @ w` and
`acc[1] += x @ v`. Out: a scratch for each, as other authors write it; as one value they
would be joined and taken apart in every step. What is stored to all of it, a start of
zeros or `jnp.stack` of tiles, is stored part by part.

Proof: the parts are disjoint, and an element is in the same part in every access. So
what a load gives depends on the stores to its own part only, in the order in which they
were. What no load reads is not kept.
"""

from collections.abc import Sequence

from pallasite.ir import types as T
from pallasite.ir.nodes import Access, At, Gather, Kernel, Op, Span, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import Rewriter, dead_code, is_elementwise, map_ops

MOST_PARTS = 16  # a store to all of them becomes as many

Part = tuple[int, int]  # first element and end


def scratch_parts(kernel: Kernel) -> Kernel:
    """Split scratch along one dimension after another."""
    if kernel.level != TILE:
        return kernel  # its author decided what is where
    refs = [op.result for op in walk(kernel.body) if op.name == "alloc"]
    for ref in refs:
        if not ref.ref.is_semaphore:
            kernel = _split(kernel, ref)
    return kernel


def _split(kernel: Kernel, ref: Value) -> Kernel:
    for dim in range(ref.ref.rank):
        found = _Split(kernel, ref, dim)
        if found.is_possible():
            return scratch_parts(dead_code(map_ops(kernel, found.rewritten)))
    return kernel


def _part_of(access: Access, dim: int) -> Part | None:
    """What an access selects along a dimension, if that is constant."""
    entry = access.index[dim]
    if isinstance(entry, Gather) or entry.start is None:
        return None
    if isinstance(entry, At):
        part = entry.start, entry.start + 1
    else:
        part = entry.start, entry.start + entry.size
        if entry.stride != 1:
            return None
    return part if 0 <= part[0] < part[1] <= access.ref.ref.shape[dim] else None


class _Split:
    """A scratch that is split along a dimension."""

    def __init__(self, kernel: Kernel, ref: Value, dim: int):
        self.kernel, self.ref, self.dim = kernel, ref, dim
        self.uses = [op for op in walk(kernel.body) if ref in op.operands]
        self.whole: Part = (0, ref.ref.shape[dim])
        self.parts: Sequence[Part] = ()  # all of them, in order
        self.new: dict[Part, Value] = {}  # those that are loaded
        self.apart = set[Value]()  # tiles that are computed part by part
        self.computed: dict[tuple[Value, Part], Value] = {}

    # --- whether it can be done ---

    def is_possible(self) -> bool:
        if not all(map(self.is_access, self.uses)):
            return False
        found = [(op.name, _part_of(Access.of(op), self.dim)) for op in self.uses]
        if None in (part for _, part in found):
            return False
        self.parts = self.disjoint({part for _, part in found if part})
        if not 2 <= len(self.parts) <= MOST_PARTS:
            return False
        loads = {part for name, part in found if name == "load"}
        if self.whole not in loads:
            self.new = {p: self.ref for p in self.parts if p in loads}
            return len(loads) > 1 and all(map(self.is_stored_in_slices, self.uses))
        self.new = dict.fromkeys(self.parts, self.ref)
        return self.is_computed_in_parts()

    def is_access(self, op: Op) -> bool:
        return op.name in ("load", "store") and op.operands[0] is self.ref

    def disjoint(self, found: set[Part]) -> list[Part]:
        """The parts that are used and those between them; none if they overlap."""
        parts, end = list[Part](), 0
        for part in sorted(found - {self.whole}):
            if part[0] < end:
                return []
            parts += [(end, part[0])] * (end < part[0]) + [part]
            end = part[1]
        rest = (end, self.whole[1])
        return parts + [rest] * (bool(parts) and rest[0] < rest[1])

    def is_stored_in_slices(self, op: Op) -> bool:
        access = Access.of(op)
        if access.value is None or _part_of(access, self.dim) != self.whole:
            return True
        is_plain = all(isinstance(e, Span) for e in access.index)
        return is_plain and access.mask is None

    def is_computed_in_parts(self) -> bool:
        """Whether what uses all of it, and what is stored to all of it, has parts.

        Slices of other tiles in every step would cost more than they save.
        """
        has_parts, of_scratch = set[Value](), set[Value]()
        ops = list(walk(self.kernel.body))
        for op in ops:
            tiles = [v for v in op.operands if isinstance(v.type, T.TileType)]
            tiles = [v for v in tiles if v.tile.shape]
            is_chain = is_elementwise(op) and has_parts.issuperset(tiles)
            if self.is_all(op, "load"):
                if not Access.of(op).is_whole:
                    return False
                of_scratch.add(op.result)
            elif not of_scratch.isdisjoint(tiles):
                if is_chain:
                    of_scratch.add(op.result)
                elif not self.is_sliced(op) and not self.is_all(op, "store"):
                    return False
            yields = (v for region in op.regions for v in region.yields)
            if not of_scratch.isdisjoint(yields):
                return False
            if self.is_all(op, "load") or is_chain or self.is_source(op):
                has_parts.add(op.result)
            if self.is_all(op, "store"):
                access = Access.of(op)
                if not access.is_whole or access.value not in has_parts:
                    return False
                self.apart.add(access.value)
        self.apart |= of_scratch
        for op in reversed(ops):
            if is_elementwise(op) and op.result in self.apart:
                self.apart.update(v for v in op.operands if v.tile.shape)
        return True

    def is_all(self, op: Op, name: str) -> bool:
        """Whether it loads, or stores, all parts."""
        if op.name != name or not self.is_access(op):
            return False
        return _part_of(Access.of(op), self.dim) == self.whole

    def is_source(self, op: Op) -> bool:
        """Whether parts of its result need no parts of another tile."""
        if op.name == "broadcast_in_dim":
            return self.dim not in op.attrs["dims"]
        if op.name == "concatenate" and op.attrs["axis"] == self.dim:
            sizes = [v.tile.shape[self.dim] for v in op.operands]
            return sizes == [*map(_size, self.parts)]
        return op.name == "constant" and op.result.tile.rank == self.ref.ref.rank

    def is_sliced(self, op: Op) -> bool:
        return op.name == "slice" and self.slice_of(op) in self.parts

    def slice_of(self, op: Op) -> Part | None:
        """The part that a slice takes."""
        shape = op.operands[0].tile.shape
        pairs = list(zip(op.attrs["starts"], op.attrs["limits"], strict=True))
        others = [pair == (0, n) for pair, n in zip(pairs, shape, strict=True)]
        others[self.dim] = set(op.attrs["strides"]) == {1}
        return pairs[self.dim] if all(others) else None

    # --- the rewriting ---

    def rewritten(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.results == (self.ref,):
            for part in self.new:
                type_ = self.ref.ref.with_shape(self.shape(self.ref.ref.shape, part))
                self.new[part] = b.op("alloc", type=type_, names=[self.ref.name])
            b.ops.append(op)  # dead once nothing accesses it
            return op.results
        if self.is_access(op):
            return self.access(op, b)
        if op.name == "slice" and op.operands[0] in self.apart:
            part = self.slice_of(op)
            made = None if part is None else self.computed.get((op.operands[0], part))
            return None if made is None else [made]
        if self.apart.isdisjoint(op.results):
            return None
        for part in self.parts:
            self.computed[op.result, part] = self.part(b, op, part)
        b.ops.append(op)  # dead unless it has other uses
        return op.results

    def access(self, op: Op, b: Rewriter) -> Sequence[Value]:
        access = Access.of(op)
        part = _part_of(access, self.dim)
        if part != self.whole:
            if part not in self.new:
                return []  # a store that nothing reads
            attrs = {**op.attrs, "index": self.index(access, part)}
            return b.emit(op.name, self.new[part], *op.operands[1:], **attrs)
        for part, ref in self.new.items():
            if access.value is None:
                self.computed[op.result, part] = b.load(ref)
                continue
            tile = self.part_of_value(b, access.value, part)
            attrs = {**op.attrs, "index": self.index(access, part)}
            b.emit("store", ref, tile, *op.operands[2:], **attrs)
        if access.value is None:
            b.ops.append(op)  # dead, too
        return op.results

    def index(self, access: Access, part: Part) -> tuple[At | Span | Gather, ...]:
        """An access's index in the scratch of a part."""
        index = list(access.index)
        is_one = isinstance(index[self.dim], At)
        index[self.dim] = At(0) if is_one else Span(0, _size(part))
        return tuple(index)

    def part(self, b: Rewriter, op: Op, part: Part) -> Value:
        """A part of what an op gives."""
        tile = op.result.tile
        shape = self.shape(tile.shape, part)
        if op.name == "constant":
            return b.constant(op.attrs["value"], tile.with_shape(shape))
        if op.name == "concatenate":
            return op.operands[self.parts.index(part)]
        if op.name == "broadcast_in_dim":
            return b.broadcast(op.operands[0], shape, op.attrs["dims"])
        operands = [self.computed.get((v, part), v) for v in op.operands]
        return b.op(op.name, *operands, **op.attrs)

    def part_of_value(self, b: Rewriter, value: Value, part: Part) -> Value:
        if (value, part) in self.computed:
            return self.computed[value, part]
        op = b.producer(value)
        if op is not None and self.is_source(op):
            return self.part(b, op, part)
        starts, limits = [0] * value.tile.rank, list(value.tile.shape)
        starts[self.dim], limits[self.dim] = part
        ones = (1,) * value.tile.rank
        attrs = dict(starts=tuple(starts), limits=tuple(limits), strides=ones)
        return b.op("slice", value, **attrs)

    def shape(self, whole: Sequence[int], part: Part) -> tuple[int, ...]:
        return tuple(_size(part) if d == self.dim else n for d, n in enumerate(whole))


def _size(part: Part) -> int:
    first, end = part
    return end - first
