"""joined_addends: what several loops add to a block is added by the last of them.

In: a program that adds to parts of a block in several places: two loops whose
iterations go through all of it, a loop and single elements (a label's logit), or one
after another (an operand that is loaded twice). Out: one
loop that adds the sum of all; `backward_sums.py` then stores it, so that the block is
not set to zero, read and written again for each, and may be of a narrower type.

Proof: nothing reads the block in between, as cotangents are only added to. An iteration
of the other loop that adds to a part takes what it adds from its own number, values
from before the loop, and memory that the program does not write: the iteration of the
last loop that adds to the same part computes it, too. An element is added where its
clamped index is a position in the part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Gather, Op, Span, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import inline, producers_of
from pallasite.ir.roles import Loop, number_of
from pallasite.ir.types import I32, TileType
from pallasite.passes.analysis.affine import Affine, Forms
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import Roots


@dataclass(frozen=True)
class StepPart:
    """What an iteration of a loop adds to a block, of which each has a part."""

    op: Op
    loop: Loop
    access: Access
    dim: int  # along which it goes through the block
    size: int  # of a part
    limit: int
    forwards: bool

    def is_like(self, other: "StepPart") -> bool:
        same = (self.access.index, self.limit) == (other.access.index, other.limit)
        return same and self.dim == other.dim


def step_part(op: Op, block: Value, body: Block) -> StepPart | None:
    """A part of a block that an iteration adds to; all parts together are the block.

    Args:
        op: the op that adds.
        block: what it adds to, or to a view of.
        body: the program.
    """
    loops = [o for o in body.ops if o.name == "for" and op in Loop.of(o).body.ops]
    if not loops:
        return None
    loop, made = Loop.of(loops[0]), producers_of(body)
    first, limit, step = (number_of(made, v) for v in loop.bounds)
    if (first, step) != (0, 1) or limit is None:
        return None
    access = Access.of(op)
    if access.ref is not block:
        view = made.get(access.ref)
        whole = covers_whole(access.ref.ref.shape, access.index)
        if view is None or view.name != "subview" or not whole:
            return None
        access = replace(Access.of(view), value=access.value, mask=access.mask)
    moving = [n for n, (_, v) in enumerate(access.split_index()) if v is not None]
    if access.ref is not block or len(moving) != 1:
        return None
    (dim,) = moving
    entry = access.index[dim]
    shape, index = list(block.ref.shape), list(access.index)
    length, _ = shape.pop(dim), index.pop(dim)
    if isinstance(entry, Gather) or not covers_whole(shape, tuple(index)):
        return None
    size = entry.size if isinstance(entry, Span) else 1
    forms = Forms([loop.index])
    forms.add_ops(o for o in body.ops if not o.regions)
    forms.add_ops(loop.body.ops)
    form = forms.of(access.index_operands[0])
    forwards, backwards = Affine((size,), 0), Affine((-size,), size * (limit - 1))
    is_affine = form.affine in (forwards, backwards) and not form.spread
    is_dense = not isinstance(entry, Span) or entry.stride == 1
    found = StepPart(op, loop, access, dim, size, limit, form.affine == forwards)
    if access.mask is None:
        covers = size * limit == length
    else:
        covers = 0 <= size * limit - length < size and is_of_inside(found, length, made)
    return found if is_affine and is_dense and covers else None


def is_of_inside(part: StepPart, length: int, made: dict[Value, Op]) -> bool:
    """Whether a mask is that of positions inside: `start + iota < length`."""
    (start,) = part.access.index_operands
    assert part.access.mask is not None
    test = made.get(part.access.mask)
    if test is None or test.name != "lt":
        return False
    position = made.get(_spread(test.operands[0], made))
    limit = number_of(made, _spread(test.operands[1], made))
    if limit != length or position is None or position.name != "add":
        return False
    # Dimensions that a point drops are not the tile's.
    before = part.access.index[: part.dim]
    dim = sum(not isinstance(e, At) for e in before)
    parts = {_spread(v, made) for v in position.operands} - {start}
    iotas = [made[v] for v in parts if v in made]
    return len(parts) == 1 and any(
        op.name == "iota"
        and op.attrs["dim"] == (dim if op.result.tile.rank > 1 else 0)
        and op.result.tile.shape[op.attrs["dim"]] == part.size
        for op in iotas
    )


def _spread(value: Value, made: dict[Value, Op]) -> Value:
    """The value that one repeats."""
    while (op := made.get(value)) is not None and op.name == "broadcast_in_dim":
        (value,) = op.operands
    return value


def joined_addends(body: Block, block: Value, addends: Sequence[Op]) -> Block:
    """The program with one addend of a block, in a loop; itself if it has to have more.

    Args:
        body: a program.
        block: what is added to.
        addends: the ops that add to it, in order.
    """
    if all(op in body.ops for op in addends):
        return _in_one_place(body, addends)
    parts = [step_part(op, block, body) for op in addends]
    last = next((part for part in reversed(parts) if part is not None), None)
    if last is None or any(op.attrs["kind"] != "add" for op in addends):
        return body
    joined = _Joined(body, last)
    for op, part in zip(addends, parts, strict=True):
        if op is not last.op and not joined.adds(op, part):
            return body
    return joined.body()


def _in_one_place(body: Block, addends: Sequence[Op]) -> Block:
    """The program with the addends that follow each other summed before the last."""
    first, *others = map(Access.of, addends)
    where = lambda a: (a.ref, a.index, a.index_operands, a.mask)
    used = {v for op in walk(body) for v in op.operands}
    if any(where(other) != where(first) for other in others):
        return body
    if any(op.attrs["kind"] != "add" or op.result in used for op in addends):
        return body
    b, total = Builder(addends[-1].loc), first.value
    for other in others:
        assert total is not None and other.value is not None
        total = b.add(total, other.value)
    last, ops = addends[-1], list[Op]()
    for op in body.ops:
        if op is last:
            value = Access.of(op).value
            operands = tuple(total if v is value else v for v in op.operands)
            ops += [*b.ops, op.with_(operands=operands)]
        elif op not in addends:
            ops.append(op)
    return Block(body.params, tuple(ops), body.yields)


class _Joined:
    def __init__(self, body: Block, last: StepPart):
        self.old, self.last, self.roots = body, last, Roots(body)
        self.written = self.roots.written(body)
        self.b = Builder(last.op.loc)
        at = body.ops.index(last.loop.op)
        self.after = {v for o in body.ops[at:] for v in o.results}
        self.gone = {last.op}
        assert last.access.value is not None
        self.total = last.access.value

    def adds(self, op: Op, part: StepPart | None) -> bool:
        """Add what another op adds; whether that was possible."""
        if part is None:
            more = self.element(op)
        elif not part.is_like(self.last):
            return False
        elif part.loop.op is self.last.loop.op:
            more = part.access.value if part.access.mask is None else None
        else:
            more = self.of_iteration(part)
        if more is None or more.tile.dtype != self.total.tile.dtype:
            return False
        more = self.b.broadcast(more, self.total.tile.shape)
        self.total = self.b.add(more, self.total)
        self.gone.add(op)
        return True

    def of_iteration(self, part: StepPart) -> Value | None:
        """What the iteration of another loop adds to the same part."""
        value, mask = part.access.value, part.access.mask
        assert value is not None
        wanted = [value] if mask is None else [value, mask]
        made = {v: op for op in part.loop.body.ops for v in op.results}
        needed, pending = set[Op](), [*wanted]
        while pending:
            each = pending.pop()
            op = made.get(each)
            if op is None:
                if each in self.after or each in part.loop.carried:
                    return None
            elif op not in needed:
                if not self.may_repeat(op):
                    return None
                needed.add(op)
                pending += op.operands
        ops = tuple(op for op in part.loop.body.ops if op in needed)
        index = self.last.loop.index
        if part.forwards != self.last.forwards:
            index = self.b.op("sub", self.b.like(part.limit - 1, index), index)
        code = Block((part.loop.index,), ops, tuple(wanted))
        made_value, *masks = inline(self.b, code, [index])
        for each in masks:
            made_value = self.b.select(each, made_value, self.b.like(0, made_value))
        return made_value

    def may_repeat(self, op: Op) -> bool:
        """Whether an op is cheap, and gives the same in another loop."""
        if op.name in ("load", "subview", "block_view"):
            return self.roots.of(op.operands[0]) not in self.written
        pure = table()[op.name].effect is Effect.PURE
        return pure and not op.regions and op.name != "dot"

    def element(self, op: Op) -> Value | None:
        """What is added to the part where an index is inside, and zero elsewhere."""
        access, last = Access.of(op), self.last.access
        value, shape = access.value, self.total.tile.shape
        is_known = self.after.isdisjoint(op.operands)
        is_block = access.ref is last.ref and access.mask is None
        if op not in self.old.ops or not (is_known and is_block):
            return None
        if value is None or any(isinstance(e, At) for e in last.index):
            return None
        is_there, dims = None, list[int]()
        pairs = zip(access.ref.ref.shape, access.split_index(), strict=True)
        for d, (n, (entry, index)) in enumerate(pairs):
            if not isinstance(entry, At):
                if d == self.last.dim or not covers_whole((n,), (entry,)):
                    return None
                dims.append(d)
                continue
            place = index if index is not None else self.b.index(entry.start or 0)
            limits = [self.b.like(k, place) for k in (0, n - 1)]
            place = self.b.cast(self.b.op("clamp", limits[0], place, limits[1]), I32)
            line = self.b.op("iota", type=TileType(shape, I32), dim=d)
            if d == self.last.dim:
                first = self.b.cast(last.index_operands[0], I32)
                line = self.b.add(line, self.b.broadcast(first, shape))
            same = self.b.eq(line, self.b.broadcast(place, shape))
            is_there = same if is_there is None else self.b.op("and", is_there, same)
        if is_there is None:
            return None
        value = self.b.broadcast(value, shape, dims)
        return self.b.select(is_there, value, self.b.like(0, value))

    def body(self) -> Block:
        def rest(block: Block) -> Block:
            ops = list[Op]()
            for op in block.ops:
                if op is self.last.op:
                    ops += self.b.ops
                    access = Access.of(op)
                    operands = [
                        self.total if v is access.value else v for v in op.operands
                    ]
                    ops.append(op.with_(operands=tuple(operands)))
                elif op not in self.gone:
                    regions = tuple(rest(r) for r in op.regions)
                    ops.append(op.with_(regions=regions) if regions else op)
            return Block(block.params, tuple(ops), block.yields)

        return rest(self.old)
