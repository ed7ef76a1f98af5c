"""early_loads: loops of small loads load for several iterations at once.

In: a loop that carries a value from row to row, such as a recurrence over time, or
stores something for each, and loads a row or two in each iteration. Out: the same
iterations in the same order, several in a row, after all their loads. What is carried
does not delay loads, but the few that Triton starts ahead do not cover the time that
memory takes. (On an H200, a recurrence over rows of 128 channels took 0.29 us per row.)

Proof: only loads of refs that the loop does not write move, with what computes their
places, and that depends on no carried value. All else keeps its order. Iterations that
do not fill a round of several run one by one after the others. Loops whose bounds are
known only at run time stay: those are mostly short, and would all need both loops.
"""

from collections.abc import Sequence
from math import isqrt

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import Rewriter, inline, map_ops
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.memory import Roots, constant_inputs, written_refs

FEW_ROUNDS, MOST_ROUNDS = 8, 32  # iterations that become one
IN_FLIGHT = 1 << 13  # bytes that one iteration shall load
# If some are what earlier code wrote: then no iteration starts loads for the next ones.
ALONE = 1 << 15
MOST_CODE = 400  # ops of all these iterations
# Loads times ops, where Triton starts the loads of next iterations: it looks at all the
# code for each of them. An access counts as many ops, because of its places.
MOST_AHEAD, ACCESS = 10_000, 7
# Elements that its ops compute: more take longer than a load, and what is loaded early
# is held in registers as often as it is used.
MOST_COMPUTED = 1 << 16


def early_loads(kernel: Kernel) -> Kernel:
    """Unroll loops that wait for small loads."""
    return map_ops(kernel, _Early(kernel).rewritten)


class _Early:
    def __init__(self, kernel: Kernel):
        self.roots, self.constant = Roots(kernel), constant_inputs(kernel)

    def rewritten(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "for":
            return None
        loop = Loop.of(op)
        factor = self.factor(loop)
        made = [b.producers.get(v) for v in loop.bounds]
        known = [op.attrs["value"] for op in made if op and op.name == "constant"]
        if factor < 2 or len(known) != 3 or known[2] < 1:
            return None
        first, limit, step = known
        rounds = len(range(first, limit, step))
        even = [n for n in range(factor, 1, -1) if rounds % n == 0]
        factor = even[0] if even and 2 * even[0] >= factor else factor
        if rounds < 2 * factor:
            return None
        times = rounds // factor
        body = self.several(loop, step, factor)
        bounds = [b.like(n, loop.first) for n in (0, times, 1)]
        ends = b.emit("for", *bounds, *loop.inits, regions=(body,))
        if times * factor == rounds:
            return ends
        middle = b.like(first + times * factor * step, loop.first)
        return b.emit("for", middle, *loop.bounds[1:], *ends, regions=(loop.body,))

    def factor(self, loop: Loop) -> int:
        """How many iterations load as much as one should."""
        ops = loop.body.ops
        rows = [table()[op.name] for op in ops]
        plain = all(
            op.name in ("load", "store") or row.effect is Effect.PURE
            for op, row in zip(ops, rows, strict=True)
        )
        if not plain or any(op.regions for op in ops):
            return 1
        # Triton itself starts loads ahead in loops that neither carry nor store.
        waits = bool(loop.carried) or any(op.name == "store" for op in ops)
        if not waits or any(op.name == "dot" for op in ops):
            return 1
        made = (v.tile.size for op in ops for v in op.results if not v.is_ref)
        if sum(made) > MOST_COMPUTED:
            return 1
        early = self.early(loop.body, set(loop.carried))
        tiles = [op.result.tile for op in early if op.name == "load"]
        loaded = sum(tile.size * tile.dtype.bits // 8 for tile in tiles)
        used = sum(op.name == "load" and bool(op.result.tile.shape) for op in ops)
        if not loaded or used != sum(bool(tile.shape) for tile in tiles):
            return 1
        shown = {self.roots.of(o.operands[0]) for o in early if o.name == "load"}
        ahead = shown <= self.constant
        most = IN_FLIGHT if ahead else ALONE
        rounds = max(min(FEW_ROUNDS, most // loaded), IN_FLIGHT // loaded)
        if ahead:
            accesses = sum(op.name in ("load", "store") for op in ops)
            code = len(ops) + (ACCESS - 1) * accesses
            rounds = min(rounds, isqrt(MOST_AHEAD // (len(tiles) * code)))
        return min(MOST_ROUNDS, rounds, MOST_CODE // len(ops))

    def early(self, block: Block, carried: set[Value]) -> list[Op]:
        """Loads that may come before all else, and what computes their places."""
        late, inside = set(carried), Roots(block)
        root = lambda ref: self.roots.of(inside.of(ref))
        written = {root(ref) for op in block.ops for ref in written_refs(op)}
        found: list[Op] = []
        for op in block.ops:
            movable = op.name != "store" and not late & set(op.operands)
            if op.name == "load":
                movable &= root(op.operands[0]) not in written
            if movable:
                found.append(op)
            else:
                late |= set(op.results)
        needed = set[Value]()
        kept: list[Op] = []
        for op in reversed(found):
            if op.name == "load" or needed & set(op.results):
                kept.append(op)
                needed |= set(op.operands)
        return kept[::-1]

    def several(self, loop: Loop, step: int, factor: int) -> Block:
        """A body of several iterations, loads first."""
        b = Builder(loop.op.loc)
        params = [Value(p.type, p.name) for p in loop.body.params]
        index, carried = params[0], params[1:]
        first = b.add(loop.first, b.mul(index, b.like(factor * step, index)))
        for number in range(factor):
            here = b.add(first, b.like(number * step, index)) if number else first
            carried = inline(b, loop.body, [here, *carried])
        block = b.block(params, carried)
        early = self.early(block, set(params[1:]))
        others = (op for op in block.ops if op not in set(early))
        ops = (*early, *others)
        return Block(block.params, ops, block.yields)
