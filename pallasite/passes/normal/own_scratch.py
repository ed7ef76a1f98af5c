"""own_scratch: parts of scratch that steps use apart are scratch of their own.

In: `acc_ref[0] += x @ w`, `acc_ref[1] += x @ v`: scratch of which every access takes
fixed parts along one dimension, or all of it. Out: scratch for each part. What is
stored to all of it, a start of zeros or `jnp.stack` of tiles, is stored part by part.
Each is a value of its own then, as authors write it who allocate two; as one value they
would be joined and taken apart in every step.

Proof: the parts are disjoint, and an element is in the same part in every access.
Parts that tiles of a chip would cover together stay together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pallasite.ir.nodes import Access, At, Kernel, Op, Span, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import (
    Rewriter,
    dead_code,
    is_elementwise,
    map_ops,
    producers_of,
    users_of,
)

MOST_PARTS = 16
TILE_SIDES = (32, 128)  # what parts along the last two dimensions are multiples of

Interval = tuple[int, int]  # first element and end


def own_scratch(kernel: Kernel) -> Kernel:
    """Allocate each part for itself."""
    if kernel.level != TILE:
        return kernel  # its author chose what is where
    allocated = [op for op in walk(kernel.body) if op.name == "alloc"]
    for op in allocated:
        kernel = _apart(kernel, op.result)
    return kernel


def _apart(kernel: Kernel, ref: Value) -> Kernel:
    uses = [op for op in walk(kernel.body) if ref in op.operands]
    if not all(op.name in ("load", "store") for op in uses):
        return kernel
    accesses = list(map(Access.of, uses))
    for dim in range(ref.ref.rank):
        parts = _parts(ref, dim, accesses)
        if parts:
            found = _Apart(kernel, ref, dim, parts)
            if all(map(found.is_divided, uses)):
                return dead_code(map_ops(kernel, found.rewritten))
    return kernel


def _parts(ref: Value, dim: int, accesses: Iterable[Access]) -> list[Interval]:
    """The parts that accesses take along a dimension, in order; empty: not several."""
    size = ref.ref.shape[dim]
    found = set[Interval]()
    for access in accesses:
        part = _interval(access, dim)
        if part is None:
            return []
        found.add(part)
    found.discard((0, size))
    parts, end = list[Interval](), 0
    for first, limit in sorted(found):
        if first < end:
            return []
        parts += [(end, first)] * (end < first) + [(first, limit)]
        end = limit
    parts += [(end, size)] * (bool(parts) and end < size)
    last = ref.ref.rank - dim
    step = TILE_SIDES[-last] if last <= len(TILE_SIDES) else 1
    fits = all(n % step == 0 for part in parts for n in part)
    return parts if fits and len(parts) <= MOST_PARTS else []


def _interval(access: Access, dim: int) -> Interval | None:
    """What an access takes along a dimension; None if that is not known."""
    entry = access.index[dim]
    if isinstance(entry, At) and entry.start is not None:
        return entry.start, entry.start + 1
    if isinstance(entry, Span) and entry.start is not None and entry.stride == 1:
        return entry.start, entry.start + entry.size
    return None


@dataclass
class _Apart:
    """Rewrites the accesses to one scratch."""

    kernel: Kernel
    ref: Value
    dim: int
    parts: Sequence[Interval]

    def __post_init__(self) -> None:
        self.made = producers_of(self.kernel.body)
        self.users = users_of(self.kernel.body)
        self.new: dict[Interval, Value] = {}
        self.parts_of: dict[tuple[Value, Interval], Value] = {}  # of what is loaded

    # --- whether it can be done ---

    def is_divided(self, op: Op) -> bool:
        access = Access.of(op)
        if _interval(access, self.dim) in self.parts:
            return True
        if not access.is_whole:
            return False
        if access.value is not None:
            return self.has_parts(access.value)
        return all(map(self.is_used_in_parts, self.users[op.result]))

    def has_parts(self, value: Value) -> bool:
        """Whether each part of a tile can be computed from parts."""
        op = self.made.get(value)
        if op is None:
            return False
        if op.name == "constant" or self.is_load(op) or self.is_join(op):
            return True
        if op.name == "broadcast_in_dim":
            return self.dim not in op.attrs["dims"]
        tiles = (v for v in op.operands if v.tile.shape)
        return is_elementwise(op) and all(map(self.has_parts, tiles))

    def is_load(self, op: Op) -> bool:
        return op.name == "load" and op.operands[0] is self.ref

    def is_join(self, op: Op) -> bool:
        if op.name != "concatenate" or op.attrs["axis"] != self.dim:
            return False
        sizes = [v.tile.shape[self.dim] for v in op.operands]
        return sizes == [*map(_size, self.parts)]

    def is_used_in_parts(self, op: Op) -> bool:
        """Whether an op that uses all of the scratch can use its parts."""
        if op.name == "slice":
            return self.sliced(op) in self.parts
        if op.name == "store" and op.operands[0] is self.ref:
            return True  # it is asked for itself
        if not is_elementwise(op) or not self.has_parts(op.result):
            return False
        return all(map(self.is_used_in_parts, self.users[op.result]))

    def sliced(self, op: Op) -> Interval | None:
        shape = op.operands[0].tile.shape
        pairs = zip(op.attrs["starts"], op.attrs["limits"], strict=True)
        whole = [part == (0, n) for part, n in zip(pairs, shape, strict=True)]
        others = [w for d, w in enumerate(whole) if d != self.dim]
        if not all(others) or set(op.attrs["strides"]) != {1}:
            return None
        return op.attrs["starts"][self.dim], op.attrs["limits"][self.dim]

    # --- the rewriting ---

    def rewritten(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.results == (self.ref,):
            for part in self.parts:
                type_ = self.ref.ref.with_shape(self.shape(self.ref.ref.shape, part))
                self.new[part] = b.op("alloc", type=type_, names=[self.ref.name])
            b.ops.append(op)  # dead once nothing accesses it
            return op.results
        if op.name == "slice":
            part = self.sliced(op)
            return None if part is None else self.parts_of.get((op.operands[0], part))
        if op.name not in ("load", "store") or op.operands[0] is not self.ref:
            return None
        access = Access.of(op)
        part = _interval(access, self.dim)
        if part in self.new:
            index = list(access.index)
            entry = index[self.dim]
            index[self.dim] = At(0) if isinstance(entry, At) else Span(0, _size(part))
            attrs = {**op.attrs, "index": tuple(index)}
            return b.emit(op.name, self.new[part], *op.operands[1:], **attrs)
        for part, ref in self.new.items():
            if access.value is not None:
                b.store(ref, self.part(b, access.value, part))
            else:
                self.parts_of[op.result, part] = b.load(ref)
        if access.value is None:
            b.ops.append(op)  # dead, too
        return op.results

    def part(self, b: Rewriter, value: Value, part: Interval) -> Value:
        """A part of a tile that `has_parts`."""
        if not value.tile.shape:
            return value
        if (value, part) not in self.parts_of:
            op = self.made[value]
            shape = self.shape(value.tile.shape, part)
            if op.name == "constant":
                made = b.constant(op.attrs["value"], value.tile.with_shape(shape))
            elif op.name == "concatenate":
                made = op.operands[self.parts.index(part)]
            elif op.name == "broadcast_in_dim":
                made = b.broadcast(op.operands[0], shape, op.attrs["dims"])
            else:
                operands = [self.part(b, v, part) for v in op.operands]
                made = b.op(op.name, *operands, **op.attrs)
            return made  # not kept: it may be made in a branch
        return self.parts_of[value, part]

    def shape(self, whole: Sequence[int], part: Interval) -> tuple[int, ...]:
        return tuple(_size(part) if d == self.dim else n for d, n in enumerate(whole))


def _size(part: Interval) -> int:
    first, end = part
    return end - first
