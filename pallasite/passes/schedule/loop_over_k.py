"""loop_over_k: splits matmuls of deep blocks into a loop over parts of k.

In: a body that loads deep blocks and multiplies them. Out: the same matmul as a loop
that loads, computes and multiplies one part of k per iteration and carries the
accumulator, so that only one part is on chip at a time. For blocks that no grid axis
steps through along k (`cut_steps.py` is for those); whatever else is computed along k
keeps it whole, except reductions that the matmul does not need: they stay as they are.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import dead_code, producers_of, users_of, with_regions
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims, Place
from pallasite.passes.normal.resized_code import CannotReblock, Part
from pallasite.passes.schedule.reblock import in_pipeline

FEW_ROUNDS = 4  # of a matmul that is one of several terms: no loop


def loop_over_k(kernel: Kernel, place: Place, depth: int) -> Kernel:
    """Every matmul that contracts a dimension, as a loop over parts of size `depth`.

    Args:
        kernel: what to rewrite.
        place: a window and a dimension of its array.
        depth: divides the block's size.

    Raises:
        CannotReblock: the dimension is used for more than matmuls of what is loaded.
    """
    found, dim = in_pipeline(kernel, place)
    reason = why_not_in_rounds(found, dim, reduced=True)
    if reason is None and dim.size % depth:
        reason = f"{dim.size} elements are not a multiple of {depth}"
    if reason is not None:
        raise CannotReblock(reason)
    if depth == dim.size:
        return kernel
    body = _Rounds(found, dim, depth).block(found.pipeline.body)
    return dead_code(with_pipeline(kernel, found.pipeline.with_(body=body).to_op()))


def why_not_in_rounds(
    found: LoopDims, dim: LoopDim, reduced: bool = False
) -> str | None:
    """Why the matmuls over a dimension cannot become loops; None if they can.

    Args:
        found: the kernel.
        dim: what the matmuls contract.
        reduced: whether it may be reduced, too, if matmuls need neither the result of
            that nor of each other.
    """
    whole = None if dim.is_merged else dim.whole
    if reduced and dim.reduces and not dim.is_twice and _are_apart(found, dim):
        whole = dim.besides
    if whole is not None or not dim.products:
        return whole or "no matmul contracts it"
    if not all(map(adds_up, dim.products)):
        return "its accumulator has less precision than a matmul's"
    return why_not_computed_in_parts(found, dim)


def why_not_computed_in_parts(
    found: LoopDims, dim: LoopDim, stored: Collection[Value] = ()
) -> str | None:
    """Why what has a dimension cannot be loaded and computed part by part.

    `stored`: refs to which parts are stored.
    """
    made = {v for op in walk(found.pipeline.body) for v in op.results}
    for value in dim.members:
        if value.is_ref:
            is_written = value in found.written and value not in stored
            if is_written or value not in found.pipeline.blocks:
                return f"{value.name or 'a ref'} is written and has this dimension"
        elif value not in made:
            return "a loop carries values that have this dimension"
    for op in walk(found.pipeline.body):
        pure = table()[op.name].effect is Effect.PURE or op.name == "load"
        if any(v in dim.members for v in op.results) and (op.regions or not pure):
            return f"'{op.name}' produces values that have this dimension"
    return None


def _are_apart(found: LoopDims, dim: LoopDim) -> bool:
    """Whether matmuls over a dimension need no reduction along it, nor another."""
    made = producers_of(found.pipeline.body)
    seen = set[Value]()
    pending = [v for op in dim.products for v in op.operands]
    while pending:
        value = pending.pop()
        op = made.get(value)
        if value in seen or op is None:
            continue
        seen.add(value)
        if op in dim.reduces or op.name == "dot":
            return False
        pending += op.operands
    return True


class _Rounds:
    """Rewrites a body; see `loop_over_k`."""

    def __init__(self, found: LoopDims, dim: LoopDim, depth: int):
        self.dim, self.depth = dim, depth
        body = found.pipeline.body
        self.made = producers_of(body)
        self.users = users_of(body)
        self.replaced: dict[Value, Value] = {}
        loads = [op for op in self.made.values() if op.name == "load"]
        spans = frozenset(op for op in loads if op.result in dim.members)
        tiles = {v: d for v, d in dim.members.items() if not v.is_ref}
        # Inside an iteration refs stay whole: only the loads take a part.
        self.inside = replace(dim, members=tiles, spans=spans)
        # The op that each loop replaces: the dot, or the op that accumulates it.
        self.sums: dict[Op, Op] = {}
        for dot in dim.products:
            total = _only_user(self.users, dot.result, "add")
            taken = total is None or total in self.sums
            self.sums[dot if total is None or taken else total] = dot

    def block(self, block: Block) -> Block:
        b = Builder()
        here = set(block.ops)
        for op in block.ops:
            operands = tuple(self.replaced.get(v, v) for v in op.operands)
            op_here = op.with_(operands=operands) if operands != op.operands else op
            dot = self.sums.get(op)
            if dot is not None and (dot is op or dot in here):
                self._loop(b, op, dot, op_here)
            elif op in self.dim.products:
                if not any(d is op and total in here for total, d in self.sums.items()):
                    self._loop(b, op, op, op_here)  # it is accumulated in another block
            else:
                b.ops.append(with_regions(op_here, [self.block(r) for r in op.regions]))
        yields = tuple(self.replaced.get(v, v) for v in block.yields)
        return b.block(block.params, yields)

    def _loop(self, b: Builder, op: Op, dot: Op, op_here: Op) -> None:
        b.loc = dot.loc
        if op is dot:
            start = b.constant(0, op.result.tile)
        else:
            pairs = zip(op.operands, op_here.operands, strict=True)
            start = next(new for old, new in pairs if old is not dot.result)
        rounds = range(0, self.dim.size, self.depth)
        if len(rounds) <= FEW_ROUNDS and self._is_term(op):
            total = start
            for first in rounds:
                total = self._round(b, dot, b.index(first), total)
            self.replaced[op.result] = total
            return
        first, sums = Value(INDEX, "k"), Value(op.result.tile, op.result.name)
        inner = Builder(dot.loc)
        total = self._round(inner, dot, first, sums)
        bounds = [b.index(n) for n in (0, self.dim.size, self.depth)]
        (result,) = b.emit(
            "for", *bounds, start, regions=(inner.block((first, sums), (total,)),)
        )
        self.replaced[op.result] = result

    def _is_term(self, op: Op) -> bool:
        """Whether several matmuls add to one sum.

        Loops for each would wait for their sums before the next one starts.
        """
        before = {self.made.get(v) for v in op.operands}
        return any(o in self.sums for o in (*before, *self.users[op.result]))

    def _round(self, b: Builder, dot: Op, first: Value, sums: Value) -> Value:
        part = Part(self.inside, self.depth, first)
        part.new.update(self.replaced)
        for each in self._needed(dot.operands):
            part.op(b, each)
        b.loc = dot.loc
        return b.add(sums, b.op("dot", *part.mapped(dot.operands), **dot.attrs))

    def _needed(self, values: Sequence[Value]) -> list[Op]:
        """Of the ops along k, those that compute these values, in order."""
        needed: dict[Op, None] = {}

        def visit(value: Value) -> None:
            op = self.made.get(value)
            if value not in self.inside.members or op is None or op in needed:
                return
            for operand in op.operands:
                visit(operand)
            needed[op] = None

        for value in values:
            visit(value)
        return list(needed)


def adds_up(dot: Op) -> bool:
    """Whether no precision is lost between a matmul and the sum it is added to."""
    operands = (v.tile.dtype.bits for v in dot.operands)
    return dot.result.tile.dtype.bits >= max(32, *operands)


def _only_user(users: Mapping[Value, list[Op]], value: Value, name: str) -> Op | None:
    """The op that uses a value, if it is the only one and has that name."""
    found = users[value]
    return found[0] if len(found) == 1 and found[0].name == name else None
