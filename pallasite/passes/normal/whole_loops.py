"""whole_loops: loops over the parts of a row compute with the whole row.

In: a loop that goes through a row in a block part by part: statistics in one loop,
results in another, as kernels for long rows are written. Out: the same code once, with
tiles as wide as the row. The row is then loaded once for all loops, and what it costs
does not depend on how it was cut: a backend cuts tiles as its chip needs.

Proof. An iteration sees its own part of every operand, and parts are adjoining. Stored
values depend on their own part and on what is the same in all iterations, so storing
all parts at once stores the same. Carried values are sums and maxima of parts, which
`step_sums.py` proves; or tiles to which each iteration adds its part element by
element, and of which only the sum is used after the loop. Sums are taken in another
order, and sums that are rescaled with a running maximum are relative to the final one
at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, prod

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Kernel, Op, Span, Value, walk
from pallasite.ir.opdef import TILE, Effect, table
from pallasite.ir.rewrite import (
    dead_code,
    is_elementwise,
    map_ops,
    producers_of,
    users_of,
)
from pallasite.ir.roles import Loop, number_of
from pallasite.ir.types import I32, TileType
from pallasite.passes.analysis.loop_dims import LoopDim
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.resized_code import CannotReblock, Resized
from pallasite.passes.normal.step_sums import State, Steps

WIDEST = 1 << 14  # elements of a row
LARGEST = 1 << 17  # elements of a tile: what a TPU still unrolls
NEUTRAL = {"add": ("sum", 0), "max": ("max", -inf)}


def whole_loops(kernel: Kernel, largest: float = LARGEST) -> Kernel:
    """Replace loops over the parts of rows by code for whole rows.

    Args:
        kernel: what to rewrite.
        largest: elements of a tile that a program can hold.
    """
    if kernel.aliases or kernel.level != TILE:
        return kernel
    before = kernel
    while (new := _without_a_loop(kernel, largest)) is not kernel:
        kernel = new
    return kernel if kernel is before else canonicalize(kernel)


def _without_a_loop(kernel: Kernel, largest: float) -> Kernel:
    facts = _Facts(kernel)
    for op in walk(kernel.body):
        if op.name != "for":
            continue
        try:
            parts = _Parts(Loop.of(op), facts)
        except CannotReblock:
            continue
        if parts.can_be_held(largest):
            at_once = lambda o, b, p=parts: p.at_once(b) if o is p.loop.op else None
            return dead_code(map_ops(kernel, at_once))
    return kernel


class _Facts:
    """What is known of a kernel, found once for all of its loops."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    @cached_property
    def made(self) -> Mapping[Value, Op]:
        """The op that defines each value."""
        return producers_of(self.kernel.body)

    @cached_property
    def users(self) -> Mapping[Value, Sequence[Op]]:
        return users_of(self.kernel.body)

    @cached_property
    def roots(self) -> Roots:
        return Roots(self.kernel)


@dataclass(frozen=True)
class _Form:
    """An i32 that is `step * number + start` in iteration `number`; a scalar, or a tile
    whose elements are all the same."""

    step: int
    start: int


class _Parts:
    """What a loop does, if each iteration sees a part of rows.

    Args:
        loop: the loop.
        facts: of the kernel that it is part of.

    Raises:
        CannotReblock: it does something else.
    """

    def __init__(self, loop: Loop, facts: _Facts):
        self.loop, self.facts, self.made = loop, facts, facts.made
        self.count, index = self._iterations()
        self.forms = {loop.index: index}
        self.members: dict[Value, int] = {}  # tiles with the dimension, and where
        self.starts: dict[Value, int] = {}  # positions along it: of the first part
        self.spans: dict[Op, int] = {}  # loads and stores of parts: where rows start
        self.sums: set[Op] = set()  # reductions along it
        self.size = self._part_size()
        self.lanes = self._lanes()
        adds = {op for op, _ in self.lanes.values()}
        self.code = [op for op in loop.body.ops if op not in adds]
        for op in self.code:
            self._take(op)
        self._check_memory(facts.roots)
        self._check_stores()
        self.steps: Steps | None = None
        self._check_states()

    def _iterations(self) -> tuple[int, _Form]:
        first, limit, step = (number_of(self.made, v) for v in self.loop.bounds)
        if type(first) is not int or type(limit) is not int or type(step) is not int:
            raise CannotReblock("the trip count is known only at run time")
        count = len(range(first, limit, step))
        if count < 2:
            raise CannotReblock("there is one iteration")
        return count, _Form(step, first)

    def _part_size(self) -> int:
        """The elements of a row that an iteration loads."""
        for op in self.loop.body.ops:
            if op.name == "load" and (span := self._row_span(Access.of(op))):
                return span.size
        raise CannotReblock("no load follows the iterations")

    def _row_span(self, access: Access) -> Span | None:
        """The last entry of an index, if it has a dynamic start."""
        entry = access.index[-1] if access.index else None
        return entry if isinstance(entry, Span) and entry.start is None else None

    # --- carried tiles that are summed after the loop ---

    def _lanes(self) -> dict[int, tuple[Op, Value]]:
        """By number, what carried tiles are updated by, and the part they take."""
        found: dict[int, tuple[Op, Value]] = {}
        for n, (old, new) in enumerate(
            zip(self.loop.carried, self.loop.yields, strict=True)
        ):
            op = self.made.get(new)
            if op is None or op.name not in NEUTRAL or op not in self.loop.body.ops:
                continue
            if self.facts.users[old] != [op] or self.facts.users[new] != [self.loop.op]:
                continue
            part = next((v for v in op.operands if v is not old), None)
            if part is not None and self._only_reduced(n, op.name):
                found[n] = op, part
        return found

    def _only_reduced(self, number: int, name: str) -> bool:
        kind, neutral = NEUTRAL[name]
        result, init = self.loop.results[number], self.loop.inits[number]
        start = self.made.get(init)
        if start is None or start.name != "constant" or not result.type.shape:
            return False
        last = len(result.type.shape) - 1
        return start.attrs["value"] == neutral and all(
            op.name == "reduce"
            and op.attrs["kind"] == kind
            and last in op.attrs["axes"]
            and op.operands == (result,)
            for op in self.facts.users.get(result, ())
        )

    # --- ops ---

    def _take(self, op: Op) -> None:
        if op.regions:
            raise CannotReblock(f"iterations have a '{op.name}'")
        if op.name in ("load", "store"):
            self._access(op)
        elif table()[op.name].effect is not Effect.PURE:
            raise CannotReblock(f"iterations have a '{op.name}'")
        elif {*op.operands} & ({*self.forms} | {*self.members}):
            if len(op.results) != 1 or op.result.is_ref:
                raise CannotReblock(f"iterations have a '{op.name}'")
            takes = self._number_op if {*op.operands} & {*self.forms} else self._tile_op
            takes(op)

    def _number_op(self, op: Op) -> None:
        """Sums and products of the loop index, and positions along the rows."""
        forms = [self.forms.get(v) or self._constant(v) for v in op.operands]
        if op.name == "broadcast_in_dim" and forms[0] is not None:
            self.forms[op.result] = forms[0]
            return
        if len(forms) == 2 and op.result.tile.dtype == I32:
            x, y = forms
            if x is not None and y is not None:
                form = _combined(op.name, x, y)
                if form is not None:
                    self.forms[op.result] = form
                    return
            elif op.name == "add" and self._is_position(op):
                return
        raise CannotReblock(f"'{op.name}' computes with the number of the iteration")

    def _constant(self, value: Value) -> _Form | None:
        number = number_of(self.made, value)
        return _Form(0, number) if type(number) is int else None

    def _is_position(self, op: Op) -> bool:
        form = next(f for v in op.operands if (f := self.forms.get(v)))
        line = next(
            (self.made.get(v) for v in op.operands if v not in self.forms), None
        )
        if line is None or line.name != "iota" or form.step != self.size:
            return False
        d = line.attrs["dim"]
        if line.result.tile.shape[d] != self.size:
            return False
        self.members[op.result], self.starts[op.result] = d, form.start
        return True

    def _tile_op(self, op: Op) -> None:
        places = {self.members[v] for v in op.operands if v in self.members}
        if len(places) > 1:
            raise CannotReblock(f"'{op.name}' joins two dimensions")
        (d,) = places
        if is_elementwise(op):
            for value in op.operands:
                if value not in self.members and value.type.shape:
                    self._check_flexible(value, d)
            self.members[op.result] = d
        elif op.name == "broadcast_in_dim":
            to = op.attrs["dims"][d]
            if self.size == 1 or op.result.tile.shape[to] != self.size:
                raise CannotReblock("a broadcast repeats its one element")
            self.members[op.result] = to
        elif op.name == "transpose":
            self.members[op.result] = op.attrs["perm"].index(d)
        elif op.name == "reduce" and op.attrs["axes"] == (d,):
            self.sums.add(op)
        else:
            raise CannotReblock(f"'{op.name}' needs all of a part")

    def _check_flexible(self, value: Value, d: int) -> None:
        """A tile beside parts must have equal elements along the dimension."""
        op = self.made.get(value)
        if op is not None and op.name == "constant":
            return
        if op is not None and op.name == "broadcast_in_dim":
            (x,) = op.operands
            sizes = dict(zip(op.attrs["dims"], x.tile.shape, strict=True))
            if sizes.get(d, 1) == 1 != self.size:
                return
        raise CannotReblock("a tile of a part's size is the same in all iterations")

    def _access(self, op: Op) -> None:
        access = Access.of(op)
        used = access.index_operands
        if not any(v in self.forms or v in self.members for v in used):
            if op.name == "store":
                raise CannotReblock("iterations store to the same place")
            return
        tile = access.value if op.name == "store" else op.result
        span = self._row_span(access)
        form = self.forms.get(used[-1]) if used else None
        rank = len(access.index)
        ok = span is not None and form is not None and access.mask is None
        ok = ok and all(isinstance(e, (Span, At)) for e in access.index)
        ok = ok and not any(v in self.forms for v in used[:-1])
        if not ok or span is None or form is None or tile is None:
            raise CannotReblock("an access does not follow the iterations")
        end = form.start + self.size * self.count
        inside = form.start >= 0 and end <= access.ref.ref.shape[rank - 1]
        if (span.size, span.stride, form.step) != (self.size, 1, self.size):
            raise CannotReblock("an access takes other parts")
        if not inside:
            raise CannotReblock("the last iteration reads past the end")
        last = tile.tile.rank - 1
        if op.name == "store":
            if self.members.get(tile) != last:
                self._check_flexible(tile, last)
        else:
            self.members[tile] = last
        self.spans[op] = form.start

    # --- what must hold ---

    def _check_memory(self, roots: Roots) -> None:
        """What iterations store, none of them loads or stores elsewhere."""
        accesses = [op for op in self.code if op.name in ("load", "store")]
        loaded = [roots.of(o.operands[0]) for o in accesses if o.name == "load"]
        stored = [roots.of(o.operands[0]) for o in accesses if o.name == "store"]
        if len(set(stored)) < len(stored) or set(stored) & set(loaded):
            raise CannotReblock("iterations access what others store")

    def _check_stores(self) -> None:
        stored = [op.operands[1] for op in self.code if op.name == "store"]
        self._check_own(stored)
        self._check_own([part for _, part in self.lanes.values()])
        for _, part in self.lanes.values():
            if self.members.get(part) != len(part.type.shape) - 1:
                raise CannotReblock("a carried tile is not a part")

    def _check_own(self, values: Sequence[Value]) -> None:
        """Values depend on their own part only, not on sums over it."""
        olds = set(self.loop.carried)
        inside = {v: op for op in self.code for v in op.results}
        seen, pending = set[Value](), list(values)
        while pending:
            value = pending.pop()
            op = inside.get(value)
            if value in olds or op in self.sums:
                raise CannotReblock("an iteration uses what others computed")
            if op is not None and value not in seen:
                seen.add(value)
                pending += op.operands

    def _check_states(self) -> None:
        states = [
            State(old, new, self._is_finite(init))
            for n, (old, new, init) in enumerate(self._carried())
            if n not in self.lanes and old is not new
        ]
        if states:
            dim = LoopDim(self.size, self.members, (), None, (), frozenset(self.spans))
            code = [op for op in self.code if op.name != "store"]
            self.steps = Steps(code, states, dim, self.made)
        elif self.sums:
            raise CannotReblock("a sum of each part is used")

    def _carried(self) -> Iterator[tuple[Value, Value, Value]]:
        loop = self.loop
        return zip(loop.carried, loop.yields, loop.inits, strict=True)

    def _is_finite(self, value: Value) -> bool:
        number = number_of(self.made, value)
        return number is not None and isfinite(number)

    def can_be_held(self, most: float) -> bool:
        """Whether a program can compute with whole rows, in tiles of some elements."""
        largest = max(prod(v.type.shape) for v in self.members)
        fits = largest * self.count <= most
        return self.size * self.count <= WIDEST and fits

    # --- the code ---

    def at_once(self, b: Builder) -> Sequence[Value]:
        code = _Whole(self)
        code.new.update(zip(self.loop.carried, self.loop.inits, strict=True))
        for op in self.code:
            code.op(b, op)
        # What starts at zero is zero relative to any maximum.
        for each in self.steps.sums if self.steps else ():
            if number_of(self.made, code.new[each.state.old]) == 0:
                (code.new[each.state.new],) = code.mapped([each.part])
        taken = [
            self.lanes[n][1] if n in self.lanes else new
            for n, new in enumerate(self.loop.yields)
        ]
        return code.mapped(taken)


def _combined(name: str, x: _Form, y: _Form) -> _Form | None:
    if name == "add":
        return _Form(x.step + y.step, x.start + y.start)
    if name == "sub":
        return _Form(x.step - y.step, x.start - y.start)
    if name == "mul" and not (x.step and y.step):
        x, y = (x, y) if not y.step else (y, x)
        return _Form(x.step * y.start, x.start * y.start)
    return None


class _Whole(Resized):
    """The code of an iteration, for all parts."""

    def __init__(self, parts: _Parts):
        dim = LoopDim(parts.size, parts.members, (), None, (), frozenset(parts.spans))
        super().__init__(dim, parts.size * parts.count)
        self.parts = parts

    def op(self, b: Builder, op: Op) -> None:
        parts, b.loc = self.parts, op.loc
        if any(v in parts.forms for v in op.results):
            return
        if op in parts.spans:
            self._access(b, op)
        elif op.results and op.result in parts.starts:
            type_, start = self.type(op.result), parts.starts[op.result]
            assert isinstance(type_, TileType)
            line = b.op("iota", type=type_, dim=self.dim.members[op.result])
            self.new[op.result] = b.add(line, b.like(start, line)) if start else line
        else:
            if op.results and op.result in self.dim.members and is_elementwise(op):
                d = self.dim.members[op.result]
                whole = {v: self._wide(b, v, d) for v in op.operands}
                op = op.with_(operands=tuple(whole[v] for v in op.operands))
            super().op(b, op)

    def _access(self, b: Builder, op: Op) -> None:
        access, start = Access.of(op), self.parts.spans[op]
        index = (*access.index[:-1], Span(start, self.size))
        ref, *starts = self.mapped([access.ref, *access.index_operands[:-1]])
        if access.value is None:
            self.new[op.result] = b.load(ref, index, starts)
            return
        value = self._wide(b, access.value, access.value.tile.rank - 1)
        b.store(ref, value, index, starts)

    def _wide(self, b: Builder, value: Value, d: int) -> Value:
        """A value beside whole rows, if its elements along them are equal."""
        if value in self.new or not value.type.shape:
            return self.new.get(value, value)
        op = self.parts.made[value]
        shape = value.tile.shape
        shape = (*shape[:d], self.size, *shape[d + 1 :])
        if op.name == "constant":
            return b.constant(op.attrs["value"], value.tile.with_shape(shape))
        (x,) = self.mapped(op.operands)
        return b.broadcast(x, shape, op.attrs["dims"])
