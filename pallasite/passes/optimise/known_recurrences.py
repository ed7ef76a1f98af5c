"""known_recurrences: recurrences that are written out become loops over rows.

In: `h[t] = a[t] * h[t - 1] + b[t]` for all rows of a block at once, by doubling (a row
gets what is one above, then two, four) or by `lax.associative_scan`; the states are
stored, after operations on elements, and the last one is kept for the next block. Out:
a loop over the rows, which is how the same recurrence is written by `fori_loop`. It
loads each row once; moving rows past each other takes a GPU through shared memory, a
dozen times.

Proof: `analysis/folded_ranges.py` says that a tile holds the states. A row of an
operation on elements is that operation on rows; rows are loaded from operands that
nothing writes. Sums are taken in another order. Nothing else touches what is stored to,
from the loop to where it was stored.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Index, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import (
    dead_code,
    is_elementwise,
    substitute,
    users_of,
    with_ops,
    with_regions,
)
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.folded_ranges import STATE, Ranges, ranges_in
from pallasite.passes.analysis.memory import Roots, constant_inputs


class _NoRows(Exception):
    """Something needs a tile that is not made row by row."""


def known_recurrences(kernel: Kernel) -> Kernel:
    """Replace the states of each such recurrence by a loop."""
    names = {op.name for op in walk(kernel.body)}
    if kernel.level != "tile" or not {"mul", "add", "slice"} <= names:
        return kernel
    found = _Loops(kernel)
    body = found.block(kernel.body)
    if body is kernel.body:
        return kernel
    return known_recurrences(dead_code(kernel.with_(body=body)))


class _Loops:
    def __init__(self, kernel: Kernel):
        self.made = {v: op for op in walk(kernel.body) for v in op.results}
        self.users = users_of(kernel.body)
        self.roots, self.constant = Roots(kernel), constant_inputs(kernel)
        self.is_done = False

    def block(self, block: Block) -> Block:
        known = ranges_in(block, self.made)
        for value, ranges in reversed(known.items()):
            backs = [back for back in (False, True) if ranges.is_whole(back)]
            is_row = value.tile.rank > 1 and ranges.dim < value.tile.rank - 1
            if ranges.kind != STATE or ranges.back not in backs or not is_row:
                continue
            try:
                made = _Rows(self, block, value, ranges).block()
            except _NoRows:
                continue
            self.is_done = True
            return made
        ops = []
        for op in block.ops:
            if op.regions and not self.is_done:
                op = with_regions(op, [self.block(r) for r in op.regions])
            ops.append(op)
        return with_ops(block, ops)


class _Rows:
    """A loop for the states, and for what is made of them and stored."""

    def __init__(self, loops: _Loops, block: Block, states: Value, ranges: Ranges):
        self.loops, self.old, self.states, self.ranges = loops, block, states, ranges
        self.made, self.users = loops.made, loops.users
        self.dim, self.rows = ranges.dim, states.tile.shape[ranges.dim]
        self.after: set[Value] = {states}
        self.ends: list[Op] = []  # what takes tiles of states: stores, last rows
        self.follow(states)
        first = min(map(block.ops.index, self.ends), default=0)
        self.place = first
        self.before = {v for op in block.ops[:first] for v in op.results}
        self.inside = {v for op in block.ops for v in op.results}
        for op in self.ends:
            self.check_end(op)

    def follow(self, value: Value) -> None:
        for user in self.users.get(value, []):
            if user.name == "store" or self.is_last_row(user):
                if user not in self.old.ops:
                    raise _NoRows
                if user not in self.ends:
                    self.ends.append(user)
            elif user in self.old.ops and self.is_row_by_row(user):
                if user.result not in self.after:
                    self.after.add(user.result)
                    self.follow(user.result)
            else:
                raise _NoRows
        if value in self.old.yields:
            raise _NoRows

    def is_row_by_row(self, op: Op) -> bool:
        same = op.results and op.result.type.shape == self.states.tile.shape
        return bool(same) and (is_elementwise(op) or op.name == "custom")

    def is_last_row(self, op: Op) -> bool:
        if op.name != "slice" or op.operands[0].tile.shape != self.states.tile.shape:
            return False
        last = 0 if self.ranges.back else self.rows - 1
        shape = op.operands[0].tile.shape
        starts = tuple(last if d == self.dim else 0 for d in range(len(shape)))
        ends = (last + 1 if d == self.dim else n for d, n in enumerate(shape))
        return (op.attrs["starts"], op.attrs["limits"]) == (starts, tuple(ends))

    def check_end(self, op: Op) -> None:
        """Nothing touches what is stored to between the loop and the store."""
        if op.name != "store":
            return
        access, ops = Access.of(op), self.old.ops
        if access.mask is not None or access.value not in self.after:
            raise _NoRows
        if access.ref.ref.rank != len(access.index) or access.index_operands:
            raise _NoRows
        if not all(isinstance(e, Span) and e.stride == 1 for e in access.index):
            raise _NoRows
        if access.ref in self.inside and access.ref not in self.before:
            raise _NoRows
        root = self.loops.roots.of(access.ref)
        for other in ops[self.place : ops.index(op)]:
            touched = self.loops.roots.touched(other)
            if touched is None or root in touched[0] | touched[1]:
                raise _NoRows

    # --- the loop ---

    def block(self) -> Block:
        b = Builder(self.made[self.states].loc)
        shape = self.row_shape(self.states.tile.shape)
        state = self.states.tile.with_shape(shape)
        if self.ranges.start is None:
            start = b.constant(0, state)
        else:
            start = self.row(b, self.ranges.start, b.index(0), {})
        index, carried = Value(INDEX, "t"), Value(state, "h")
        inside = Builder(b.loc)
        at = index
        if self.ranges.back:
            at = inside.sub(inside.index(self.rows - 1), index)
        known: dict[Value, Value] = {}
        assert self.ranges.factor is not None
        factor = self.row(inside, self.ranges.factor, at, known)
        added = self.row(inside, self.ranges.base, at, known)
        known[self.states] = inside.add(inside.mul(factor, carried), added)
        for op in self.ends:
            if op.name == "store":
                self.store(inside, op, at, known)
        body = inside.block((index, carried), (known[self.states],))
        bounds = [b.index(n) for n in (0, self.rows, 1)]
        (last,) = b.emit("for", *bounds, start, regions=(body,))
        known = {self.states: last}
        place = b.index(0 if self.ranges.back else self.rows - 1)
        rows = {
            op.result: self.row(b, op.operands[0], place, known)
            for op in self.ends
            if op.name != "store"
        }
        ops: list[Op] = []
        for n, op in enumerate(self.old.ops):
            if n == self.place:
                ops += b.ops
            if op in self.ends:
                continue
            ops.append(op)
        new = Block(self.old.params, tuple(ops), self.old.yields)
        return substitute(new, rows)

    def row_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(1 if d == self.dim else n for d, n in enumerate(shape))

    def store(self, b: Builder, op: Op, at: Value, known: dict[Value, Value]) -> None:
        access = Access.of(op)
        assert access.value is not None
        value = self.row(b, access.value, at, known)
        b.store(access.ref, value, *self.part(b, access, at))

    def part(
        self, b: Builder, access: Access, at: Value
    ) -> tuple[Index, tuple[Value, ...]]:
        """The index of a row of what is accessed."""
        entry = access.index[self.dim]
        assert isinstance(entry, Span) and entry.start is not None
        start = at if entry.start == 0 else b.add(at, b.index(entry.start))
        index = list(access.index)
        index[self.dim] = Span(None, 1)
        return tuple(index), (start,)

    def row(
        self, b: Builder, value: Value, at: Value, known: dict[Value, Value]
    ) -> Value:
        """A row of a tile, with a dimension of size one in its place."""
        if value not in known:
            known[value] = self.made_row(b, value, at, known)
        return known[value]

    def made_row(
        self, b: Builder, value: Value, at: Value, known: dict[Value, Value]
    ) -> Value:
        op, dim = self.made.get(value), self.dim
        if op is None or not value.tile.shape:
            return self.there(value)
        b.loc = op.loc
        tile = value.tile.with_shape(self.row_shape(value.tile.shape))
        if op.name == "constant":
            return b.constant(op.attrs["value"], tile)
        if op.name == "iota":
            if op.attrs["dim"] != dim:
                return b.op("iota", type=tile, dim=op.attrs["dim"])
            return b.broadcast(b.cast(at, tile.dtype), tile.shape, ())
        if op.name == "broadcast_in_dim":
            (x,), dims = op.operands, op.attrs["dims"]
            if dim in dims and x.tile.shape[dims.index(dim)] != 1:
                # Rows of a vector, or of columns.
                if dims[: dim + 1] != tuple(range(dim + 1)):
                    raise _NoRows
                x = self.row(b, x, at, known)
            x = known.get(x) or self.there(x, known)
            return b.broadcast(x, tile.shape, dims)
        if op.name == "load":
            return self.loaded(b, op, at)
        is_custom = op.name == "custom" and len(op.results) == 1
        if not is_custom and not is_elementwise(op):
            raise _NoRows
        if not {v.type.shape for v in op.operands} <= {(), value.tile.shape}:
            raise _NoRows
        operands = [self.row(b, v, at, known) for v in op.operands]
        regions = [self.region(r, operands, at) for r in op.regions]
        return b.emit(op.name, *operands, regions=regions, **op.attrs)[0]

    def region(self, region: Block, rows: Sequence[Value], at: Value) -> Block:
        """The code of a function with a derivative of its own, for a row."""
        b = Builder()
        params = [
            Value(row.type, p.name) for p, row in zip(region.params, rows, strict=True)
        ]
        known = dict(zip(region.params, params, strict=True))
        for op in region.ops:
            if not any(v.type.shape for v in (*op.operands, *op.results)):
                operands = [known.get(v, v) for v in op.operands]
                (known[op.result],) = b.emit(op.name, *operands, **op.attrs)
        yields = [self.row(b, v, at, known) for v in region.yields]
        return b.block(params, yields)

    def there(self, value: Value, known: dict[Value, Value] | None = None) -> Value:
        """A value that is made before the loop."""
        made_here = known is not None and value in known.values()
        if value in self.inside and value not in self.before and not made_here:
            raise _NoRows
        return value

    def loaded(self, b: Builder, op: Op, at: Value) -> Value:
        access, roots = Access.of(op), self.loops.roots
        plain = access.mask is None and not access.index_operands
        if not plain or roots.of(access.ref) not in self.loops.constant:
            raise _NoRows
        if not all(isinstance(e, Span) and e.stride == 1 for e in access.index):
            raise _NoRows
        self.there(access.ref)
        return b.load(access.ref, *self.part(b, access, at))
