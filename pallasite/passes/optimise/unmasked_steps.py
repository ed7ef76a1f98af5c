"""Runs steps without masks where the masks are all true.

An iteration of a loop or a grid step that masks a tile by position (`rows >= columns`
in causal attention, `columns < length`, the edge of an array) rarely needs the mask.
Where one scalar comparison implies that every element passes, the step is versioned:
without its masks if that holds, with them otherwise. For backends where a branch is
cheap and a mask is not; others omit this pass.

Where such iterations of a loop are contiguous, `unmasked_loops` gives them a loop of
their own instead: for backends that keep work in flight between iterations, which a
branch would interrupt.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import clone, substitute
from pallasite.ir.roles import Loop, Pipeline
from pallasite.ir.types import I32, TileType, scalar
from pallasite.passes.analysis.guards import OPPOSITE, Bounds, Part, Solver, parts_of
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.outcomes import known_outcome
from pallasite.passes.facts_walk import FactsWalk
from pallasite.passes.normal.canonicalize import canonicalize

FEW = 3  # iterations of a loop not worth splitting


def unmasked_steps(kernel: Kernel, least: int, needed: str | None = "dot") -> Kernel:
    """Version steps by whether their masks let everything through.

    Args:
        kernel: what to rewrite.
        least: elements of a mask from which a branch pays off.
        needed: an op that a step must have; most others are memory-bound, and a mask
            costs them nothing. None: any step.
    """
    body = _Walk(least, needed).block(kernel.body)
    if body is kernel.body:
        return kernel
    return canonicalize(kernel.with_(body=body))  # removes masks that are now unused


class _Walk(FactsWalk):
    def __init__(self, least: int, needed: str | None):
        super().__init__()
        self.least, self.needed = least, needed

    def block(self, block: Block) -> Block:
        return self.versions(super().block(block))

    def regions(self, op: Op) -> Sequence[Block]:
        if op.name != "pipeline":
            return super().regions(op)
        pipeline = Pipeline.of(op)
        return [*pipeline.maps, self.block(pipeline.body)]

    def versions(self, block: Block) -> Block:
        """The block with its step in two versions, if a mask in it may be all true."""
        before, step, after = _step(block)
        if self.needed is not None and all(op.name != self.needed for op in step):
            return block
        own = {v: op for op in step for v in op.results}
        used = {v for op in walk(Block((), after)) for v in op.operands}
        used |= {
            v for op in walk(Block((), after)) for r in op.regions for v in r.yields
        }
        results = [v for v in own if v in used or v in block.yields]
        if any(v.is_ref for v in results):
            return block
        again = _positions(step, results)
        results = [v for v in results if v not in again]
        test = _Test(self.facts, self.producers, own)
        chosen: dict[Value, Value] = {}
        for op in step:
            if op.name == "select_n" and op.operands[0].type.size >= self.least:
                chosen |= test.case(op, chosen)
        if not chosen:
            return block
        b = Builder(step[0].loc)
        b.ops += [*before, *test.b.ops]
        regions = (
            _version(step, results, {}),
            _version(step, results, chosen),
        )
        which = b.cast(test.result(b), I32)
        made = b.emit("cond", which, regions=regions, names=[v.name for v in results])
        rest = clone(Block((), tuple(again.values())))
        copies = zip(again, (op.result for op in rest.ops), strict=True)
        rest = Block(block.params, (*rest.ops, *after), block.yields)
        rest = substitute(
            rest, {**dict(zip(results, made, strict=True)), **dict(copies)}
        )
        return Block(block.params, (*b.ops, *rest.ops), rest.yields)


def unmasked_loops(kernel: Kernel, least: int, needed: str | None = "dot") -> Kernel:
    """Move iterations of innermost loops that need no mask to a loop without masks.

    Args:
        kernel: what to rewrite.
        least: elements of a mask from which an extra loop pays off.
        needed: an op that an iteration must have, as above.
    """
    body = _LoopWalk(least, needed).block(kernel.body)
    if body is kernel.body:
        return kernel
    return canonicalize(kernel.with_(body=body))


class _LoopWalk(FactsWalk):
    def __init__(self, least: int, needed: str | None):
        super().__init__()
        self.least, self.needed = least, needed

    def rewritten(self, op: Op) -> Sequence[Op]:
        return self.loop(Loop.of(op)) if op.name == "for" else (op,)

    def loop(self, loop: Loop) -> list[Op]:
        """The loop, or up to three in its place: masked, unmasked, masked."""
        is_innermost = all(not op.regions for op in loop.body.ops)
        if self.needed is not None and all(
            op.name != self.needed for op in loop.body.ops
        ):
            return [loop.op]
        most = self.facts.of(loop.limit).high - self.facts.of(loop.first).low
        if not is_innermost or self.facts.of(loop.step).number != 1 or most < FEW:
            return [loop.op]
        test, chosen = _Test(self.facts, self.producers, {}), dict[Value, Value]()
        for op in loop.body.ops:
            if op.name == "select_n" and op.operands[0].type.size >= self.least:
                chosen |= test.case(op, chosen)
        b = Builder(loop.op.loc, watch=self.facts.note_op)
        bounds = self.solved(loop, test, b) if chosen else None
        if bounds is None:
            return [loop.op]
        start, end = loop.first, loop.limit
        for low in bounds.lows:
            start = b.max(start, low)
        start = b.min(start, loop.limit) if bounds.lows else start
        for high in bounds.highs:
            end = b.min(end, high)
        for needed in bounds.needed:
            end = b.select(needed, end, start)
        end = b.max(end, start)
        plain = substitute(Block((), loop.body.ops, loop.body.yields), chosen)
        plain = Block(loop.body.params, plain.ops, plain.yields)
        parts = [(start, end, plain)]
        if bounds.lows:
            parts.insert(0, (loop.first, start, loop.body))
        if bounds.highs or bounds.needed:
            parts.append((end, loop.limit, loop.body))
        state = loop.inits
        for number, (first, limit, body) in enumerate(parts, 1):
            last = number == len(parts)
            results = [Value(v.type, v.name) for v in loop.results]
            part = loop.with_(
                first=first,
                limit=limit,
                inits=tuple(state),
                body=clone(body),
                results=loop.results if last else tuple(results),
            )
            b.ops.append(part.to_op())
            state = part.results
        return b.ops

    def solved(self, loop: Loop, test: "_Test", b: Builder) -> Bounds | None:
        """The iterations in which all tests hold; None if they are not contiguous."""
        inside = {v: op for op in (*loop.body.ops, *test.b.ops) for v in op.results}
        params = set(loop.body.params)
        solver = Solver(
            loop.index,
            loop.first,
            inside,
            outside=lambda value: value not in params,
            is_stable=lambda op: False,
            facts=self.facts,
        )
        bounds = Bounds()
        for each in test.tests:
            found = solver.solve(Part(each), loop.op.loc)
            if found is None:
                return None
            bounds &= found
        b.ops += solver.ops
        return bounds


Ops = tuple[Op, ...]


def _version(step: Ops, results: list[Value], chosen: dict[Value, Value]) -> Block:
    """A copy of a step with some values replaced."""
    block = substitute(Block((), step, tuple(results)), chosen)
    return clone(block)


def _positions(step: Ops, results: Sequence[Value]) -> dict[Value, Op]:
    """Of the results of a step, scalars and positions: cheaper to rematerialise.

    Includes what they are computed from, as far as it belongs to the step.
    """
    own = {v for op in step for v in op.results}
    found: dict[Value, Op] = {}
    for op in step:
        if op.regions or table()[op.name].effect is not Effect.PURE:
            continue
        if len(op.results) != 1 or op.result.is_ref:
            continue
        cheap = op.name == "constant" or not op.result.tile.dtype.is_float
        if cheap and all(v in found or v not in own for v in op.operands):
            found[op.result] = op
    needed, pending = set[Value](), [v for v in results if v in found]
    while pending:
        value = pending.pop()
        needed.add(value)
        pending += [v for v in found[value].operands if v in found]
    return {v: op for v, op in found.items() if v in needed}


def _step(block: Block) -> tuple[Ops, Ops, Ops]:
    """Its ops on tiles; what comes before and after them is not duplicated.

    Steps in branches are versioned on their own; the block's step ends before them.
    """
    heavy = [n for n, op in enumerate(block.ops) if not _is_light(op)]
    inner = (n for n, op in enumerate(block.ops) if _has_products(op))
    end = next(inner, len(block.ops))
    heavy = [n for n in heavy if n < end]
    start, stop = (heavy[0], heavy[-1] + 1) if heavy else (0, 0)
    return block.ops[:start], block.ops[start:stop], block.ops[stop:]


def _has_products(op: Op) -> bool:
    return any(inner.name == "dot" for region in op.regions for inner in walk(region))


def _is_light(op: Op) -> bool:
    scalars = all(not v.is_ref and not v.tile.shape for v in op.results)
    return bool(op.regions) or (bool(op.results) and scalars) or op.name == "alloc"


class _Spread(NamedTuple):
    """A tile whose elements all lie between `base + low` and `base + high`."""

    base: Value | None  # None: 0
    low: int
    high: int


_KNOWN = {"add", "sub", "and", "div"}


def _rounded_down(x: _Spread, mask: int) -> _Spread | None:
    """`x & mask` where that rounds `x` down to a multiple: `mask` = -2**n."""
    if mask >= 0 or -mask & (-mask - 1):
        return None
    return _Spread(x.base, x.low + mask + 1, x.high)


def _quotient(x: _Spread, by: int) -> _Spread | None:
    """`x / by`, for known, non-negative numbers."""
    if x.base is not None or x.low < 0 or by <= 0:
        return None
    return _Spread(None, x.low // by, x.high // by)


class _Test:
    """Collects scalar comparisons that imply that masks let everything through.

    Args:
        facts: about the integers; no arithmetic here may wrap around.
        makers: the op that defines each value.
        own: the same for values of the step, which are not available before it.
    """

    def __init__(self, facts: Facts, makers: dict[Value, Op], own: dict[Value, Op]):
        self.facts, self.makers, self.own = facts, makers, own
        self.b = Builder(watch=facts.note_op)
        self.made: dict[Value, Value] = {}
        self.tests: list[Value] = []

    def result(self, b: Builder) -> Value:
        result = self.tests[0]
        for test in self.tests[1:]:
            result = b.and_(result, test)
        return result

    def case(self, op: Op, chosen: Mapping[Value, Value]) -> dict[Value, Value]:
        """The case that a select takes where its mask is uniform."""
        mask, *cases = op.operands
        if not mask.tile.dtype.is_bool or not mask.tile.shape or len(cases) != 2:
            return {}
        on_false, on_true = cases
        maker = self.makers.get(on_true)
        truth = maker is None or maker.name != "constant"
        tests = [
            self.comparison(part.value, part.truth)
            for part in parts_of(mask, truth, self.makers)
        ]
        found = [test for test in tests if test is not None]
        if len(found) < len(tests):
            return {}
        self.tests += found
        case = on_true if truth else on_false
        return {op.result: chosen.get(case, case)}

    def comparison(self, value: Value, truth: bool) -> Value | None:
        """A scalar test that all elements of a tile of bools are `truth`.

        None: there is none, or no step passes it.
        """
        op = self.makers.get(value)
        if op is None or op.name not in OPPOSITE:
            return None
        kind = op.name if truth else OPPOSITE[op.name]
        if kind in ("eq", "ne") or op.operands[0].tile.dtype.is_float:
            return None
        x, y = (self.spread(v) for v in op.operands)
        if x is None or y is None:
            return None
        type_ = scalar(op.operands[0].tile.dtype)
        if kind in ("lt", "le"):
            left, right = self.end(x, x.high, type_), self.end(y, y.low, type_)
        else:
            left, right = self.end(x, x.low, type_), self.end(y, y.high, type_)
        if left is None or right is None:
            return None
        test = self.b.op(kind, left, right)
        never = known_outcome(self.b.ops[-1], self.facts) is False
        return None if never else test

    def end(self, spread: _Spread, number: int, type_: TileType) -> Value | None:
        low, high = type_.dtype.limits
        if not low <= number <= high:
            return None
        value = self.b.constant(number, type_)
        return value if spread.base is None else self.exact("add", spread.base, value)

    def exact(self, name: str, *operands: Value) -> Value | None:
        result = self.b.op(name, *operands)
        return None if self.facts.may_wrap(self.b.ops[-1]) else result

    def before(self, value: Value) -> Value | None:
        """A scalar of the step, computed before the step."""
        op = self.own.get(value)
        if op is None or value in self.made:
            return self.made.get(value, value)
        if op.regions or table()[op.name].effect is not Effect.PURE:
            return None
        operands = [self.before(v) for v in op.operands]
        known = [v for v in operands if v is not None]
        if len(known) < len(operands):
            return None
        self.made[value] = self.b.op(op.name, *known, **op.attrs)
        return self.made[value]

    def spread(self, value: Value) -> _Spread | None:
        """The known range of the elements of an integer tile."""
        op = self.makers.get(value)
        if not value.tile.shape:
            base = self.before(value)
            return None if base is None else _Spread(base, 0, 0)
        if op is None:
            return None
        if op.name == "constant":
            number = int(op.attrs["value"])
            return _Spread(None, number, number)
        if op.name == "iota":
            return _Spread(None, 0, max(value.tile.shape[op.attrs["dim"]] - 1, 0))
        if op.name in ("broadcast_in_dim", "reshape", "transpose", "slice"):
            return self.spread(op.operands[0])
        if op.name not in _KNOWN or self.facts.may_wrap(op):
            return None
        x, y = (self.spread(v) for v in op.operands)
        if x is None or y is None:
            return None
        if op.name in ("add", "sub"):
            return self.combined(op.name, x, y)
        number = y.low if y.base is None and y.low == y.high else 0
        if op.name == "and":
            return _rounded_down(x, number)
        return _quotient(x, number)

    def combined(self, name: str, x: _Spread, y: _Spread) -> _Spread | None:
        low, high = (y.low, y.high) if name == "add" else (-y.high, -y.low)
        base = x.base
        if y.base is not None:
            if base is None and name == "add":
                base = y.base
            elif base is None:
                base = self.exact("neg", y.base)
            else:
                base = self.exact(name, base, y.base)
            if base is None:
                return None
        return _Spread(base, x.low + low, x.high + high)
