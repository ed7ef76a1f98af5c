"""Which dimensions of tiles and scratch are uniform: all elements along them are equal.

The greatest solution of the rules below: scratch and loop-carried values are assumed to
be uniform until a store or a yield shows that they are not. By induction over the
steps of a run, no step can be the first at which an assumption is false. Scratch that
was never stored holds unspecified values, which may as well be equal.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Access, Block, Gather, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import is_elementwise
from pallasite.ir.roles import Loop, While
from pallasite.ir.types import TileType

Dims = frozenset[int]
NONE: Dims = frozenset()


class UniformDims:
    """`of(value)` are its uniform dimensions with more than one element."""

    def __init__(self, kernel: Kernel, scratch: set[Value]):
        self.scratch = scratch
        self.dims: dict[Value, Dims] = {ref: _all(ref) for ref in scratch}
        self.changed = True
        while self.changed:
            self.changed = False
            for op in walk(kernel.body):
                self.op(op)
        self.positions = _positions(kernel.body)

    def of(self, value: Value) -> Dims:
        return self.dims.get(value, NONE)

    def is_computed(self, value: Value) -> bool:
        """Whether it depends on more than constants, positions and scalars."""
        return value not in self.positions

    # --- the rules ---

    def op(self, op: Op) -> None:
        if op.name in ("for", "while"):
            self.loop(op)
        elif op.name == "cond":
            for n, result in enumerate(op.results):
                self.same([result, *(region.yields[n] for region in op.regions)])
        elif op.name in ("load", "store") and op.operands[0] in self.scratch:
            self.access(op)
        elif len(op.results) == 1 and not op.results[0].is_ref:
            dims = self.computed(op)
            shape = op.result.type.shape
            self.lower(op.result, frozenset(d for d in dims if shape[d] > 1))

    def lower(self, value: Value, dims: Dims) -> None:
        old = self.dims.get(value)
        new = dims if old is None else old & dims
        self.changed |= new != old
        self.dims[value] = new

    def same(self, values: Sequence[Value], defined: int = 1) -> None:
        """Make the first `defined` values uniform where all of them are."""
        if values[0].is_ref:
            return
        dims = _all(values[0])
        for value in values:
            # What was not reached yet is assumed to be uniform.
            dims &= self.dims.get(value, _all(value))
        for value in values[:defined]:
            self.lower(value, dims)

    def loop(self, op: Op) -> None:
        if op.name == "for":
            loop = Loop.of(op)
            columns = zip(
                op.results, loop.carried, loop.inits, loop.yields, strict=True
            )
            for result, param, init, yielded in columns:
                self.same([result, param, self.seen(init), yielded], 2)
            return
        both = While.of(op)
        parts = (both.condition.params, both.body.params, both.inits, both.body.yields)
        for result, *inner, init, yielded in zip(op.results, *parts, strict=True):
            self.same([result, *inner, self.seen(init), yielded], 3)

    def seen(self, value: Value) -> Value:
        """A value whose definition was visited: what has no rule is not uniform."""
        self.dims.setdefault(value, NONE)
        return value

    def access(self, op: Op) -> None:
        access = Access.of(op)
        kept = [d for d, e in enumerate(access.index) if isinstance(e, Span)]
        if any(isinstance(e, Gather) for e in access.index):
            self.lower(op.result if op.name == "load" else access.ref, NONE)
            return
        if op.name == "load":
            for value in (access.mask, access.other):
                if value is not None:  # it is narrowed together with the scratch
                    varies = {d for n, d in enumerate(kept) if n not in self.of(value)}
                    self.lower(access.ref, self.of(access.ref) - varies)
            of_ref = self.of(access.ref)
            dims = frozenset(n for n, d in enumerate(kept) if d in of_ref)
            shape = op.result.type.shape
            self.lower(op.result, frozenset(n for n in dims if shape[n] > 1))
            return
        assert access.value is not None
        of_value = self.of(access.value)
        if access.mask is not None and access.mask.type.shape:
            of_value &= self.of(access.mask)
        sizes = access.ref.ref.shape
        stored = {d for n, d in enumerate(kept) if n in of_value}
        whole = {d for d, e in enumerate(access.index) if e == Span(0, sizes[d])}
        self.lower(access.ref, frozenset(stored & whole))

    def computed(self, op: Op) -> Dims:
        if is_elementwise(op):
            dims = _all(op.result)
            for value in op.operands:
                dims &= self.of(value) if value.type.shape else dims
            return dims
        rule = _RULES.get(op.name)
        return NONE if rule is None else rule(self, op)

    def constant(self, op: Op) -> Dims:
        return _all(op.result)

    def iota(self, op: Op) -> Dims:
        return _all(op.result) - {op.attrs["dim"]}

    def broadcast(self, op: Op) -> Dims:
        (x,), dims = op.operands, op.attrs["dims"]
        varying = {
            d for n, d in enumerate(dims) if x.type.shape[n] > 1 and n not in self.of(x)
        }
        return _all(op.result) - varying

    def transpose(self, op: Op) -> Dims:
        of_operand = self.of(op.operands[0])
        return frozenset(n for n, d in enumerate(op.attrs["perm"]) if d in of_operand)

    def slice(self, op: Op) -> Dims:
        return self.of(op.operands[0])

    def concatenate(self, op: Op) -> Dims:
        dims = _all(op.result)
        for value in op.operands:
            dims &= self.of(value) | {op.attrs["axis"]}
        first = op.operands[0]
        copies = all(value is first for value in op.operands)
        axis = op.attrs["axis"]
        along = copies and (axis in self.of(first) or first.type.shape[axis] == 1)
        return dims if along else dims - {axis}

    def reduce(self, op: Op) -> Dims:
        (x,), axes = op.operands, op.attrs["axes"]
        kept = [d for d in range(x.type.rank) if d not in axes]
        return frozenset(n for n, d in enumerate(kept) if d in self.of(x))

    def reshape(self, op: Op) -> Dims:
        """Groups of dimensions that are one to the other, if all of one are uniform."""
        (x,) = op.operands
        found: set[int] = set()
        for old, new in groups(x.type.shape, op.attrs["shape"]):
            if all(d in self.of(x) or x.type.shape[d] == 1 for d in old):
                found |= set(new)
        return frozenset(found)


_RULES = {
    "constant": UniformDims.constant,
    "iota": UniformDims.iota,
    "broadcast_in_dim": UniformDims.broadcast,
    "transpose": UniformDims.transpose,
    "slice": UniformDims.slice,
    "rev": UniformDims.slice,
    "concatenate": UniformDims.concatenate,
    "reduce": UniformDims.reduce,
    "reshape": UniformDims.reshape,
}


def groups(
    old: Sequence[int], new: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The smallest runs of dimensions of both shapes with equal numbers of elements."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    n = m = 0
    while n < len(old) or m < len(new):
        first, second = [n] if n < len(old) else [], [m] if m < len(new) else []
        left, right = (old[n] if first else 1), (new[m] if second else 1)
        n, m = n + len(first), m + len(second)
        while left != right:
            if left < right and n < len(old):
                left, first, n = left * old[n], [*first, n], n + 1
            elif left > right and m < len(new):
                right, second, m = right * new[m], [*second, m], m + 1
            else:
                return [(tuple(range(len(old))), tuple(range(len(new))))]
        found.append((tuple(first), tuple(second)))
    return found


def _all(value: Value) -> Dims:
    return frozenset(d for d, n in enumerate(value.type.shape) if n > 1)


def _positions(body: Block) -> set[Value]:
    """Tiles made only of constants, iotas and scalars that are broadcast."""
    found: set[Value] = set()
    for op in walk(body):
        if len(op.results) != 1 or op.regions:
            continue
        moves = op.name in ("constant", "iota", "broadcast_in_dim")
        known = all(not v.type.shape or v in found for v in op.operands)
        if known and (moves or is_elementwise(op)):
            found.add(op.result)
    return {v for v in found if isinstance(v.type, TileType)}
