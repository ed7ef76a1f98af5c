"""The code of a program whose blocks have another size along one dimension.

`Part` is one part of an author's program, `Joined` several programs merged. Both
rebuild every op with the new size (`Resized`) but differ in what a position is: a part
counts it from the start of the author's block, while in merged programs each position
belongs to one of the author's programs and has its index. Used by `reblock.py` and
`loop_over_k.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from pallasite.ir.build import Builder, part_start
from pallasite.ir.nodes import Access, Block, Gather, Index, Op, Span, Value
from pallasite.ir.rewrite import is_elementwise, writes
from pallasite.ir.roles import number_of
from pallasite.ir.types import I32, TileType, Type
from pallasite.passes.analysis.guards import OPPOSITE, guard_of
from pallasite.passes.analysis.loop_dims import LoopDim


class CannotReblock(Exception):
    """Blocks of this size would change the meaning; the message says why."""


class Resized:
    """Code in which one dimension is resized."""

    def __init__(self, dim: LoopDim, size: int):
        self.dim, self.size = dim, size
        self.new: dict[Value, Value] = {}

    def type(self, value: Value) -> Type:
        d = self.dim.members.get(value)
        if d is None:
            return value.type
        shape, size = value.type.shape, self.size * self.dim.per(value)
        return value.type.with_shape((*shape[:d], size, *shape[d + 1 :]))

    def define(self, values: Sequence[Value]) -> tuple[Value, ...]:
        for value in values:
            if value in self.dim.members:
                self.new[value] = Value(self.type(value), value.name)
        return self.mapped(values)

    def mapped(self, values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(self.new.get(v, v) for v in values)

    def used(self, b: Builder, values: Sequence[Value]) -> tuple[Value, ...]:
        """What code in `b` uses for these values."""
        return self.mapped(values)

    def block(self, block: Block) -> Block:
        b, params = Builder(), self.define(block.params)
        for op in block.ops:
            self.op(b, op)
        return b.block(params, self.used(b, block.yields))

    def op(self, b: Builder, op: Op) -> None:
        b.loc = op.loc
        regions = tuple(map(self.block, op.regions))
        operands = self.used(b, op.operands)
        attrs = self.attrs(op)
        results = self.define(op.results)
        changed = op.with_(
            operands=operands, results=results, attrs=attrs, regions=regions
        )
        b.ops.append(changed)

    def attrs(self, op: Op) -> dict[str, object]:
        """The op's attributes, with the new size in place of the old one."""
        attrs = dict(op.attrs)
        if "type" in attrs:
            attrs["type"] = self.type(op.result)
        if "shape" in attrs:
            attrs["shape"] = self.type(op.result).shape
        d = self.dim.members.get(op.operands[0]) if op.operands else None
        if d is None:
            return attrs
        size = self.size * self.dim.per(op.operands[0])
        for key in ("limits", "sizes"):
            if key in attrs:
                attrs[key] = (*attrs[key][:d], size, *attrs[key][d + 1 :])
        if "index" in attrs:
            index = list(attrs["index"])
            index[d] = replace(index[d], size=size)
            attrs["index"] = tuple(index)
        return attrs


class Part(Resized):
    """Code of one part, which starts at position `first` of the author's block."""

    def __init__(self, dim: LoopDim, size: int, first: Value):
        super().__init__(dim, size)
        self.first = first

    def op(self, b: Builder, op: Op) -> None:
        is_iota = (
            op.name == "iota" and self.dim.members.get(op.result) == op.attrs["dim"]
        )
        if is_iota:
            b.loc = op.loc
            self.new[op.result] = self._positions(b, op)
        elif op in self.dim.spans:
            b.loc = op.loc
            self._part_of_span(b, op)
        else:
            super().op(b, op)

    def _positions(self, b: Builder, op: Op) -> Value:
        type_ = self.type(op.result)
        assert isinstance(type_, TileType)
        line = b.op("iota", type=type_.with_dtype(I32), dim=op.attrs["dim"])
        first = self.first_of(b, op.result)
        return b.cast(b.add(line, b.broadcast(first, type_.shape)), type_.dtype)

    def first_of(self, b: Builder, value: Value) -> Value:
        """Where the part starts in a tile."""
        each = self.dim.per(value)
        return self.first if each == 1 else b.mul(self.first, b.index(each))

    def _part_of_span(self, b: Builder, op: Op) -> None:
        """A span of a ref that stays whole: load or store this part of it."""
        access = Access.of(op)
        value = access.value or op.result
        to = self.dim.members[value]
        index, starts = list(access.index), list[Value]()
        parts = access.split_index()
        tile = next((v for e, v in parts if isinstance(e, Gather)), None)
        at = tile.tile.rank if tile is not None else 0
        for d, (entry, start) in enumerate(parts):
            is_span = isinstance(entry, Span)
            if is_span and at == to:
                size = self.type(value).shape[to]
                index[d] = Span(None, size, entry.stride)
                given = None if start is None else self.new.get(start, start)
                size, masked = access.ref.ref.shape[d], access.mask is not None
                first = self.first_of(b, value)
                start = part_start(b, entry, given, size, first, masked)
            at += is_span
            starts += [start] if start is not None else []
        ref, *starts = self.mapped([access.ref, *starts])
        mask, other, stored = [
            None if v is None else self.new.get(v, v)
            for v in (access.mask, access.other, access.value)
        ]
        if stored is not None:
            b.store(ref, stored, tuple(index), starts, mask)
        else:
            self.new[value] = b.load(ref, tuple(index), starts, mask, other)


@dataclass(frozen=True)
class _Form:
    """`program * number + position * place + rest`, an i32 of the author's programs.

    `number` is the program's index along the axis, `place` the position in its block;
    `rest` is the same in all programs (None: 0).
    """

    program: int
    position: int
    rest: Value | None = None


def merged_quotient(
    made: Mapping[Value, Op], op: Op, index: Value, merged: int
) -> int | None:
    """The divisor of the new index, if an op divides the old one so that all programs
    that are merged have the same quotient.

    Of `i = merged * new + part` and a multiple of `merged`, say `merged * d`, the
    quotient is `new // d`.
    """
    if op.name != "div" or op.operands[0] is not index:
        return None
    number = number_of(made, op.operands[1])
    if type(number) is not int or number < 1 or number % merged:
        return None
    return number // merged


class Joined(Resized):
    """Code of several of the author's programs, merged.

    A scalar that depends on the author's program index becomes one number per position:
    `forms` if it is a linear sum, `numbers` (rank-1 tiles along the dimension)
    otherwise.
    """

    def __init__(self, dim: LoopDim, size: int, step: Value, selects: bool = False):
        super().__init__(dim, size)
        self.step = step  # the index along the axis
        self.selects = selects  # stores in branches may become selects
        self.forms: dict[Value, _Form] = {step: _Form(1, 0)}
        self.numbers: dict[Value, Value] = {}
        self.known: dict[Value, int] = {}  # integer constants
        self.made: dict[Value, Op] = {}  # scalars of the author's programs
        self.taken_by: Value | None = None  # the condition of the enclosing branch

    def op(self, b: Builder, op: Op) -> None:
        b.loc = op.loc
        self.made.update((v, op) for v in op.results if not v.type.shape)
        merged = -(-self.size // self.dim.size)
        divisor = merged_quotient(self.made, op, self.step, merged)
        if divisor is not None:
            self.new[op.result] = b.div(self.step, b.index(divisor))
        elif self.selects and op.name == "cond" and self._varies(op.operands[0]):
            self._branch(b, op)
        elif self.taken_by is not None and op.name == "store":
            self._store_selected(b, op, self.taken_by)
        elif self.taken_by is not None and op.regions and writes(op):
            raise CannotReblock("branches that depend on the program are nested")
        elif op.name == "iota" and self.dim.members.get(op.result) == op.attrs["dim"]:
            self._positions(b, op)
        elif not any(self._varies(v) for v in op.operands):
            self._note_number(op)
            super().op(b, op)
        elif not self._is_form(b, op) and not self._is_number(b, op):
            super().op(b, op)

    def _varies(self, value: Value) -> bool:
        return value in self.forms or value in self.numbers

    def _note_number(self, op: Op) -> None:
        number = None
        if op.name == "constant":
            number = op.attrs["value"]
        elif op.name == "broadcast_in_dim":
            number = self.known.get(op.operands[0])
        if type(number) is int:
            self.known[op.result] = number

    def used(self, b: Builder, values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(
            self._tile(b, v) if self._varies(v) else self.new.get(v, v) for v in values
        )

    def _tile(self, b: Builder, value: Value) -> Value:
        """A varying value as a tile that has the dimension."""
        d = self.dim.members.get(value)
        if d is None:
            raise CannotReblock("what a program computes depends on its program id")
        type_ = self.type(value)
        if value in self.forms:
            return self._written_out(b, self.forms[value], type_.shape, d)
        return b.broadcast(self.numbers[value], type_.shape, (d,))

    def _vector(self, b: Builder, value: Value) -> Value:
        """A scalar as one number per position."""
        if value in self.numbers:
            return self.numbers[value]
        if value in self.forms:
            return self._written_out(b, self.forms[value], (self.size,), 0)
        return b.broadcast(self.new.get(value, value), (self.size,))

    def _written_out(
        self, b: Builder, form: _Form, shape: tuple[int, ...], d: int
    ) -> Value:
        type_, old = TileType(shape, I32), self.dim.size
        if form.rest is not None and form.position < 0 and form.program <= 0:
            taken = _Form(-form.program, -form.position)
            rest = b.broadcast(form.rest, shape)
            return b.sub(rest, self._written_out(b, taken, shape, d))

        def times(x: Value, number: int) -> Value:
            return x if number == 1 else b.mul(x, b.constant(number, type_))

        line = b.op("iota", type=type_, dim=d)
        each = b.constant(old, type_)
        if form.program == form.position * old:  # a position in the array
            first = b.mul(self.step, b.index(self.size))
            place = b.add(b.broadcast(first, shape), line)
            total = times(place, form.position)
        elif not form.position and form.program % old == 0 and old & (old - 1) == 0:
            # the first position of a block: needs no quotient
            first = b.mul(self.step, b.index(self.size))
            place = b.add(b.broadcast(first, shape), line)
            block = b.and_(place, b.constant(-old, type_))
            total = times(block, form.program // old)
        else:
            total = times(b.rem(line, each), form.position)
            if form.program:
                first = b.mul(self.step, b.index(self.size // old))
                program = b.add(b.broadcast(first, shape), b.div(line, each))
                total = b.add(times(program, form.program), total)
        if form.rest is not None:
            total = b.add(total, b.broadcast(form.rest, shape))
        return total

    def _positions(self, b: Builder, op: Op) -> None:
        type_, form = self.type(op.result), _Form(0, 1)
        if op.result.tile.dtype == I32:
            self.forms[op.result] = form
            return
        line = self._written_out(b, form, type_.shape, op.attrs["dim"])
        self.new[op.result] = b.cast(line, type_.dtype)

    # --- sums that depend on the program ---

    def _is_form(self, b: Builder, op: Op) -> bool:
        """Handle an op whose result is such a sum too."""
        if len(op.results) != 1 or op.result.is_ref or op.result.tile.dtype != I32:
            return False
        form = None
        if all(v in self.forms or not self._varies(v) for v in op.operands):
            form = self._form(b, op)
        if form is not None:
            self.forms[op.result] = form
        return form is not None

    def _form(self, b: Builder, op: Op) -> _Form | None:
        if op.name == "broadcast_in_dim":
            form = self.forms[op.operands[0]]
            if op.operands[0].tile.rank or form.position:
                return None
            return form
        if op.name in ("add", "sub"):
            return self._sum(b, op)
        if op.name == "mul":
            return self._product(b, op)
        return None

    def _sum(self, b: Builder, op: Op) -> _Form:
        x, y = (
            self.forms.get(v) or _Form(0, 0, self.new.get(v, v)) for v in op.operands
        )
        sign = 1 if op.name == "add" else -1
        rest = x.rest
        if y.rest is not None:
            shape = self.type(op.result).shape
            other = b.broadcast(y.rest, shape)
            rest = b.broadcast(rest, shape) if rest is not None else b.like(0, other)
            rest = b.op(op.name, rest, other)
        return _Form(x.program + sign * y.program, x.position + sign * y.position, rest)

    def _product(self, b: Builder, op: Op) -> _Form | None:
        x, y = op.operands
        if y in self.forms:
            x, y = y, x
        factor = self.known.get(y)
        if factor is None or y in self.forms:
            return None
        form = self.forms[x]
        rest = form.rest
        rest = None if rest is None else b.mul(rest, b.like(factor, rest))
        return _Form(form.program * factor, form.position * factor, rest)

    # --- other numbers that depend on the program ---

    def _is_number(self, b: Builder, op: Op) -> bool:
        """Handle an op on scalars, or a scalar's broadcast."""
        if len(op.results) != 1 or any(v.is_ref for v in (*op.operands, *op.results)):
            return False
        if op.name == "broadcast_in_dim" and not op.operands[0].tile.rank:
            self.numbers[op.result] = self._vector(b, op.operands[0])
            return True
        if not is_elementwise(op):
            return False
        if op.result.tile.rank:
            return self._with_bounds(b, op)
        vectors = [self._vector(b, v) for v in op.operands]
        self.numbers[op.result] = b.op(op.name, *vectors, **op.attrs)
        return True

    def _with_bounds(self, b: Builder, op: Op) -> bool:
        """An op on tiles some of whose operands are scalars (select_n, clamp)."""
        d = self.dim.members.get(op.result)
        scalars = [v for v in op.operands if not v.tile.rank]
        if d is None or not any(map(self._varies, scalars)):
            return False
        shape = self.type(op.result).shape
        operands = [
            b.broadcast(self._vector(b, v), shape, (d,))
            if not v.tile.rank
            else self.used(b, [v])[0]
            for v in op.operands
        ]
        self.new[op.result] = b.op(op.name, *operands, **op.attrs)
        return True

    # --- branches that only some of the programs take ---

    def _branch(self, b: Builder, op: Op) -> None:
        """Take a branch if any program takes it; it stores only for those that do."""
        guard = guard_of(op, self.made)
        if guard is None or op.results or self.taken_by is not None:
            raise CannotReblock("what a program computes depends on its program id")
        if op.regions[0] is not guard.idle:
            raise CannotReblock("what a program computes depends on its program id")
        some = [self._some(b, part.value, part.truth) for part in guard.parts]
        tests = [test for test in some if test is not None]
        (self.taken_by,) = self.made[op.operands[0]].operands
        branch = self.block(guard.taken)
        self.taken_by = None
        if not tests:
            b.ops += branch.ops
            return
        total = tests[0]
        for test in tests[1:]:
            total = b.and_(total, test)
        which = b.cast(total, I32)
        b.ops.append(op.with_(operands=(which,), regions=(guard.idle, branch)))

    def _some(self, b: Builder, value: Value, truth: bool) -> Value | None:
        """Whether a bool is `truth` in some program; may be true more often.

        For a comparison that is monotonic in the program's index, the last (or first)
        program decides. None: not known.
        """
        if not self._varies(value):
            new = self.new.get(value, value)
            return new if truth else b.not_(new)
        op = self.made[value]
        name = op.name if truth else OPPOSITE.get(op.name, "")
        if name not in _RISING:
            return None
        x, y = (self.forms.get(v) for v in op.operands)
        rises = (y.program if y else 0) - (x.program if x else 0)
        last = self.size // self.dim.size - 1
        number = last if (rises > 0) == _RISING[name] else 0
        sides = [self._at_program(b, v, number) for v in op.operands]
        if any(side is None for side in sides):
            return None
        return b.op(name, *(side for side in sides if side is not None))

    def _at_program(self, b: Builder, value: Value, number: int) -> Value | None:
        """A scalar as one of the programs has it."""
        form = self.forms.get(value)
        if form is None:
            return None if self._varies(value) else self.new.get(value, value)
        count = self.size // self.dim.size
        program = b.add(b.mul(self.step, b.index(count)), b.index(number))
        total = b.mul(program, b.index(form.program))
        return total if form.rest is None else b.add(total, form.rest)

    def _store_selected(self, b: Builder, op: Op, test: Value) -> None:
        """Store for the programs that take the branch; keep the others' contents."""
        access = Access.of(op)
        assert access.value is not None
        d = self.dim.members.get(access.value)
        if d is None or access.mask is not None:
            raise CannotReblock("what a program stores depends on its program id")
        ref, value, *starts = self.used(b, op.operands)
        index = cast(Index, self.attrs(op)["index"])
        shape = value.tile.shape
        old = b.load(ref, index, starts)
        b.store(
            ref, b.select(self._taken(b, test, shape, d), value, old), index, starts
        )

    def _taken(self, b: Builder, test: Value, shape: tuple[int, ...], d: int) -> Value:
        """Which positions belong to programs for which a bool is true."""
        if not self._varies(test):
            new = self.new.get(test, test)
            if new.tile.dtype.is_float:
                raise CannotReblock("what a program computes depends on its program id")
            return b.broadcast(new, shape)
        if test in self.forms:
            return self._written_out(b, self.forms[test], shape, d)
        op = self.made[test]
        if not is_elementwise(op):
            raise CannotReblock("what a program computes depends on its program id")
        return b.op(
            op.name, *(self._taken(b, v, shape, d) for v in op.operands), **op.attrs
        )


# Comparisons, and whether increasing the right operand makes them true.
_RISING = {"lt": True, "le": True, "gt": False, "ge": False}
