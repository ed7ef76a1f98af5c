"""untransposed: matrices are computed so that few of them are transposed.

In: scores as `k @ q.T` with their statistics in rows, which are transposed where sums
over the head's columns are rescaled by them. Out: `q @ k.T` and statistics in columns,
as most authors write it, without a transpose.

Tiles, scratch and loop-carried values that elementwise ops connect are computed alike:
all as written, or all turned. Turning a set removes the transposes between it and the
others; matmuls, reductions and broadcasts take either form of it (a matmul with a
turned result has its operands exchanged). Of sets that nothing else pins, those are
turned that then have fewer transposes, or are reduced along rows rather than columns.

Proof: each element has another name, (j, i) instead of (i, j), wherever it is used.

For GPUs: TPUs hold rows in lanes and columns in sublanes, and the author may have meant
that.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Op, Value, full_index, walk
from pallasite.ir.rewrite import is_elementwise
from pallasite.ir.roles import Dot, Loop, While
from pallasite.passes.normal.form_walk import FormWalk, Shape, plain_scratch, reformed
from pallasite.passes.normal.products import SYMMETRIC

TURN = (1, 0)


def untransposed(kernel: Kernel) -> Kernel:
    """Turn sets of connected matrices."""
    if not any(map(_is_turn, walk(kernel.body))):
        return kernel
    scratch = plain_scratch(kernel, lambda access, op: access.is_whole)
    sets = _Sets(kernel, scratch)
    return reformed(kernel, _Turned(sets)) if sets.turned else kernel


def _is_turn(op: Op) -> bool:
    return op.name == "transpose" and op.attrs["perm"] == TURN


def _is_matrix(value: Value) -> bool:
    return value.type.rank == 2


def _is_line(value: Value) -> bool:
    """Whether at most one dimension has several elements."""
    return sum(n != 1 for n in value.type.shape) <= 1


def _is_plain_dot(op: Op) -> bool:
    sides = Dot.of(op).sides
    plain = all(len(s.free) == len(s.contract) == 1 and not s.batch for s in sides)
    return plain and op.attrs["precision"] in SYMMETRIC


class _Sets:
    """Connected matrices, and which sets of them are turned."""

    def __init__(self, kernel: Kernel, scratch: set[Value]):
        self.parent: dict[Value, Value] = {}
        ops = list(walk(kernel.body))
        pinned, turns = set[Value](), list[tuple[Value, Value]]()
        reduced: Counter[tuple[Value, int]] = Counter()
        for op in ops:
            for x, y in self._connected(op, scratch):
                self._join(x, y)
        for op in ops:
            if _is_turn(op):
                turns.append((self.root(op.operands[0]), self.root(op.result)))
            elif op.name == "reduce" and _is_matrix(op.operands[0]):
                root = self.root(op.operands[0])
                reduced.update((root, axis) for axis in op.attrs["axes"])
            pinned.update(map(self.root, _pinned(op, scratch)))
        self.turned: set[Value] = set()
        roots = dict.fromkeys((*(r for pair in turns for r in pair), *_firsts(reduced)))
        for root in roots:
            gain = reduced[root, 0] - reduced[root, 1]
            for pair in turns:
                if root in pair and pair[0] is not pair[1]:
                    other = pair[pair[0] is root]
                    gain += -1 if other in self.turned else 1
            if gain > 0 and root not in pinned:
                self.turned.add(root)

    def has(self, value: Value) -> bool:
        return _is_matrix(value) and self.root(value) in self.turned

    def root(self, value: Value) -> Value:
        while value in self.parent:
            value = self.parent[value]
        return value

    def _join(self, x: Value, y: Value) -> None:
        x, y = self.root(x), self.root(y)
        if x is not y:
            self.parent[x] = y

    def _connected(self, op: Op, scratch: set[Value]) -> Iterator[tuple[Value, Value]]:
        if op.name in ("load", "store") and op.operands[0] in scratch:
            tile = op.result if op.results else op.operands[1]
            if _is_matrix(tile):
                yield op.operands[0], tile
        elif is_elementwise(op):
            for value in op.operands if _is_matrix(op.result) else ():
                if value.type.shape == op.result.type.shape:
                    yield value, op.result
        elif op.name in ("for", "while", "cond"):
            for first, *rest in zip(*_parallel(op), strict=True):
                if not first.is_ref and _is_matrix(first):
                    yield from ((first, value) for value in rest)


def _firsts(counts: Counter[tuple[Value, int]]) -> Iterator[Value]:
    return (root for root, _ in counts)


def _parallel(op: Op) -> tuple[Any, ...]:
    """What of a loop or branch is one value at different times."""
    if op.name == "for":
        loop = Loop.of(op)
        return loop.inits, loop.carried, loop.yields, op.results
    if op.name == "while":
        both = While.of(op)
        inner = (both.condition.params, both.body.params, both.body.yields)
        return (both.inits, *inner, op.results)
    return (*(region.yields for region in op.regions), op.results)


def _pinned(op: Op, scratch: set[Value]) -> Iterator[Value]:
    """Matrices that an op takes or makes as they are written only."""
    values = [v for v in (*op.operands, *op.results) if _is_matrix(v)]
    if op.name in ("for", "while", "cond") or not values:
        return
    if is_elementwise(op) or _is_turn(op):
        return
    if op.name in ("constant", "iota"):
        return
    if op.name == "reduce" and _is_matrix(op.operands[0]):
        return
    if op.name in ("broadcast_in_dim", "reshape"):
        source = op.operands[0]
        lines = (source,) if op.name == "broadcast_in_dim" else (source, op.result)
        yield from () if all(map(_is_line, lines)) else values
    elif op.name == "alloc":
        yield from (v for v in values if v not in scratch)
    elif op.name in ("load", "store") and op.operands[0] in scratch:
        return
    elif op.name != "dot" or not _is_plain_dot(op):
        yield from values
        for region in op.regions:
            yield from (v for v in (*region.params, *region.yields) if _is_matrix(v))


class _Turned(FormWalk):
    def __init__(self, sets: _Sets):
        super().__init__()
        self.sets = sets

    def shape(self, value: Value) -> Shape | None:
        return value.type.shape[::-1] if self.sets.has(value) else None

    def widened(self, b: Builder, formed: Value, value: Value) -> Value:
        return b.op("transpose", formed, perm=TURN)

    def narrowed(self, b: Builder, value: Value, shape: Shape) -> Value:
        return b.op("transpose", value, perm=TURN)

    def note(self, b: Builder, old: Value, new: Value) -> None:
        """A square tile's shape does not tell how it is held: rules give what is."""
        (self.own if self.shape(old) is None else self.formed)[old] = new

    def yielded(self, b: Builder, value: Value, target: Value) -> Value:
        return self.fitted(b, value) if self.sets.has(target) else self.full(b, value)

    def fitted(self, b: Builder, value: Value) -> Value:
        return self.formed.get(value) or self.widened(b, self.full(b, value), value)

    def held(self, value: Value) -> Value:
        """The new value, however it is held."""
        return self.formed.get(value) or self.own.get(value, value)

    # --- rules ---

    def constant(self, b: Builder, op: Op) -> Value:
        return b.op("constant", **{**op.attrs, "type": self.type(op.result)})

    def iota(self, b: Builder, op: Op) -> Value:
        return b.op("iota", type=self.type(op.result), dim=1 - op.attrs["dim"])

    def transpose(self, b: Builder, op: Op) -> Value:
        (x,) = op.operands
        new = self.held(x)
        alike = self.sets.has(x) == self.sets.has(op.result)
        return self.widened(b, new, x) if alike else new

    def broadcast(self, b: Builder, op: Op) -> Value:
        (x,), dims = op.operands, list(op.attrs["dims"])
        new, shape = self.held(x), self.type(op.result).shape
        if self.sets.has(x):
            dims.reverse()
        if self.sets.has(op.result):
            dims = [1 - d for d in dims]
        if dims != sorted(dims):
            kept = [n for n, size in enumerate(new.type.shape) if size != 1]
            line = tuple(new.type.shape[n] for n in kept)
            new, dims = b.op("reshape", new, shape=line), [dims[n] for n in kept]
        return b.broadcast(new, shape, dims)

    def reshape(self, b: Builder, op: Op) -> Value:
        (x,) = op.operands
        return b.op("reshape", self.held(x), shape=self.type(op.result).shape)

    def reduce(self, b: Builder, op: Op) -> Value:
        axes = tuple(sorted(1 - axis for axis in op.attrs["axes"]))
        return b.op("reduce", self.held(op.operands[0]), **{**op.attrs, "axes": axes})

    def dot(self, b: Builder, op: Op) -> Value:
        sides = []
        for side in Dot.of(op).sides:
            ((dim,), turned) = side.contract, self.sets.has(side.value)
            sides.append((self.held(side.value), (1 - dim if turned else dim,)))
        if self.sets.has(op.result):
            sides.reverse()
        (x, left), (y, right) = sides
        return b.op("dot", x, y, **{**op.attrs, "contract": (left, right)})

    RULES: ClassVar = {
        "constant": constant,
        "iota": iota,
        "transpose": transpose,
        "broadcast_in_dim": broadcast,
        "reshape": reshape,
        "reduce": reduce,
        "dot": dot,
    }

    # --- scratch ---

    def access(self, b: Builder, op: Op) -> None:
        ref = op.operands[0]
        index = [(entry, None) for entry in full_index(self.type(ref).shape)]
        tile = op.result if op.results else op.operands[1]
        made = self.accessed(b, op, index, lambda v: self.yielded(b, v, tile))
        if made is not None:
            self.note(b, op.result, made)
