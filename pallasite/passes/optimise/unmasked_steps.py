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

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import clone, substitute
from pallasite.ir.roles import Loop, Pipeline
from pallasite.ir.types import I32
from pallasite.passes.analysis.guards import Bounds, Part, Solver
from pallasite.passes.analysis.whole_masks import WholeMasks
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
        test = WholeMasks(self.facts, self.producers, own)
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
        test = WholeMasks(self.facts, self.producers, {})
        chosen: dict[Value, Value] = {}
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

    def solved(self, loop: Loop, test: WholeMasks, b: Builder) -> Bounds | None:
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
