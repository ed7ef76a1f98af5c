"""Merges loops over adjoining ranges that hand on what they carry into one loop.

FlashAttention 2 goes through the blocks of keys that no mask cuts, and then through
those on the diagonal: `for j in [a, b)`, `for j in [b, c)`. The two compute almost the
same, and as one loop over `[a, c)` they have one reverse. In its iterations, a value
that the loops compute in different ways is chosen by whether `j < b`; only cheap ops
that cannot overflow are computed for both, as cotangents pass through all of them.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import producers_of, users_of
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.affine import Forms
from pallasite.passes.analysis.memory import VIEWS, written_refs
from pallasite.passes.lower.per_program import Program

# What iterations of one loop may compute for the other, too.
HARMLESS = frozenset(
    (
        *("add", "sub", "mul", "neg", "max", "min", "constant", "iota", "cast"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "select_n"),
        *("broadcast_in_dim", "reshape", "transpose"),
    )
)


def merge_adjoining(program: Program) -> Program:
    """Merge each loop with the one before it, where that hands on all it carries."""
    body = program.body
    for op in body.ops:
        if op.name != "for":
            continue
        made = {v: o for o in body.ops for v in o.results}
        second = Loop.of(op)
        before = made.get(second.inits[0]) if second.inits else None
        if before is None or before.name != "for":
            continue
        merged = _merged(program, body, Loop.of(before), second)
        if merged is not None:
            return merge_adjoining(program.with_body(merged))
    return program


def _merged(program: Program, body: Block, first: Loop, second: Loop) -> Block | None:
    places = body.ops.index(first.op), body.ops.index(second.op)
    between = body.ops[places[0] + 1 : places[1]]
    if not _adjoin(body, first, second) or not all(map(_is_quiet, between)):
        return None
    b = Builder(second.op.loc)
    forms = Forms(body.params)
    forms.add_ops(o for o in body.ops if not o.regions)

    def is_before(x: Value, y: Value) -> bool:
        x_form, y_form = forms.of(x).affine, forms.of(y).affine
        if x_form is None or y_form is None:
            return False
        return y_form.plus(x_form, -1).range(program.sizes)[0] >= 0

    start, middle, end = first.first, first.limit, second.limit
    if not is_before(start, middle):
        start = b.op("min", start, middle)
    if not is_before(middle, end):
        end = b.op("max", middle, end)
    region = _Merge(first, second).region()
    if region is None:
        return None
    loop = second.with_(first=start, limit=end, inits=first.inits, body=region)
    ops = [
        o
        for old in body.ops
        if old is not first.op
        for o in ((*b.ops, loop.to_op()) if old is second.op else (old,))
    ]
    return Block(body.params, tuple(ops), body.yields)


def _adjoin(body: Block, first: Loop, second: Loop) -> bool:
    """Whether one loop continues the other, and nothing else sees what is handed on."""
    made = producers_of(body)
    steps = [made.get(v) for v in (first.step, second.step)]
    if any(o is None or o.attrs.get("value") != 1 for o in steps):
        return False
    if first.limit is not second.first or first.results != second.inits:
        return False
    users = users_of(body)
    return all(users[v] == [second.op] for v in first.results)


def _is_quiet(op: Op) -> bool:
    return not op.regions and not written_refs(op)


class _Merge:
    """One iteration for both loops. Equal ops are computed once."""

    def __init__(self, first: Loop, second: Loop):
        self.loops = first, second
        self.b = Builder(second.op.loc)
        self.params = tuple(Value(p.type, p.name) for p in second.body.params)
        self.made = [{v: o for o in x.body.ops for v in o.results} for x in self.loops]
        self.alone = [
            dict(zip(x.body.params, self.params, strict=True)) for x in self.loops
        ]
        self.both: dict[tuple[Value, Value], Value] = {}
        self.known: dict[object, Value] = {}
        self.needed: dict[object, set[int]] = {}  # by which loops, by op
        self.possible = all(map(_can_merge, walk(Block((), (first.op, second.op)))))

    def region(self) -> Block | None:
        if not self.possible:
            return None
        first, second = self.loops
        index = self.alone[0][first.index]
        self.is_first = self.b.op("lt", index, first.limit)
        pairs = zip(first.yields, second.yields, strict=True)
        yields = [self.pair(x, y) for x, y in pairs]
        shared = all(len(loops) == 2 for loops in self.needed.values())
        both = self.possible and shared
        return self.b.block(self.params, yields) if both else None

    def pair(self, x: Value, y: Value) -> Value:
        """What is `x` in iterations of the first loop, `y` in those of the second."""
        if (x, y) not in self.both:
            self.both[x, y] = self.chosen(x, y)
        return self.both[x, y]

    def chosen(self, x: Value, y: Value) -> Value:
        ops = self.made[0].get(x), self.made[1].get(y)
        same = [self.alone[0].get(x, x), self.alone[1].get(y, y)]
        if not any(ops) and same[0] is same[1]:
            return same[0]
        if ops[0] is not None and ops[1] is not None and _alike(ops[0], ops[1]):
            pairs = zip(ops[0].operands, ops[1].operands, strict=True)
            return self.emit(ops[0], [self.pair(v, w) for v, w in pairs], {0, 1})
        if x.is_ref:
            self.possible = False
            return x
        left, right = self.only(0, x), self.only(1, y)
        return self.select(left, right)

    def only(self, side: int, value: Value) -> Value:
        """A value of one of the loops, computed in every iteration."""
        alone = self.alone[side]
        if value not in alone:
            op = self.made[side].get(value)
            if op is None:
                return value
            operands = [self.only(side, v) for v in op.operands]
            alone[value] = self.emit(op, operands, {side})
        return alone[value]

    def emit(self, op: Op, operands: Sequence[Value], loops: set[int]) -> Value:
        """An op that some loops need, unless there is an equal one."""
        key = (op.name, _attrs(op), tuple(map(id, operands)), op.result.type)
        if op.name not in HARMLESS:
            self.needed.setdefault(key, set()).update(loops)
        if key not in self.known:
            self.known[key] = Value(op.result.type, op.result.name)
            results = (self.known[key],)
            self.b.ops.append(op.with_(operands=tuple(operands), results=results))
        return self.known[key]

    def select(self, left: Value, right: Value) -> Value:
        if left is right:
            return left
        is_first = self.b.broadcast(self.is_first, left.tile.shape, ())
        masked = next((o for o in self.b.ops if o.results == (right,)), None)
        if masked is not None and masked.name == "select_n":
            pred, other, value = masked.operands
            if value is left and pred.tile.dtype.name == "bool":
                # The mask of one loop does not apply in the other.
                return self.b.select(self.b.op("or", is_first, pred), left, other)
        return self.b.select(is_first, left, right)


def _can_merge(op: Op) -> bool:
    if op.name == "for":
        return True
    pure = table()[op.name].effect is Effect.PURE
    is_read = op.name in ("load", *VIEWS)
    return (pure or is_read) and not op.regions and len(op.results) == 1


def _alike(x: Op, y: Op) -> bool:
    if x.name != y.name or len(x.operands) != len(y.operands):
        return False
    types = [v.type for v in (*x.operands, x.result)]
    return types == [v.type for v in (*y.operands, y.result)] and _attrs(x) == _attrs(y)


def _attrs(op: Op) -> object:
    return tuple(sorted((name, repr(value)) for name, value in op.attrs.items()))
