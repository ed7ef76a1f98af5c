"""Keeps windows still in the steps that ignore them.

A grid step whose work is guarded (`pl.when(j * bk < (i + 1) * bq)`) still moves its
windows, fetching blocks that nothing reads. Where all uses of a block are guarded and
`analysis/guards.py` can solve the guards for an axis that moves the window, the index
map gets that axis clamped to the steps that any guard lets through: before the first
and after the last of them the block does not change. For backends that fetch a block
only if its index changed; in all other steps the map yields what it did before.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, inline, map_ops, uses
from pallasite.ir.roles import Pipeline, Shown
from pallasite.passes.analysis.guards import Bounds, Guard, Solver, guard_of
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.memory import constant_inputs
from pallasite.passes.normal.canonicalize import canonicalize


def idle_windows(kernel: Kernel) -> Kernel:
    """Hold the windows of every pipeline still in steps that ignore them."""
    readable = constant_inputs(kernel)

    def rewrite(op: Op, builder: Rewriter) -> Sequence[Value] | None:
        if op.name != "pipeline":
            return None
        new = _Standstill(Pipeline.of(op), readable).pipeline()
        if new is None:
            return None
        builder.ops.append(new.to_op())
        return ()

    new = map_ops(kernel, rewrite)
    return kernel if new is kernel else canonicalize(new)


class _Standstill:
    """One pipeline and its guards."""

    def __init__(self, pipeline: Pipeline, readable: frozenset[Value]):
        self.whole, self.readable = pipeline, readable
        self.inside = {v: op for op in pipeline.body.ops for v in op.results}
        self.facts = Facts()
        self.facts.note_grid(pipeline.ids, pipeline.grid)
        for op in pipeline.body.ops:
            self.facts.note_op(op)

    def pipeline(self) -> Pipeline | None:
        maps = [self.kept(each) for each in self.whole.shown]
        if all(new is old for new, old in zip(maps, self.whole.maps, strict=True)):
            return None
        return self.whole.with_(maps=tuple(maps))

    def kept(self, shown: Shown) -> Block:
        """The index map of a window, with one axis clamped to the steps that matter."""
        index_map = shown.index_map
        # A block of memory that is written may have to be fetched again.
        if shown.window.mode != "in" or shown.array not in self.readable:
            return index_map
        axis, guards = self.moving_axis(index_map), self.guards(shown.block)
        if axis is None or not guards:
            return index_map
        return self.within(index_map, axis, guards)

    def moving_axis(self, index_map: Block) -> int | None:
        """The fastest axis that moves a window, if its size is known."""
        used = {v for op in walk(index_map) for v in op.operands} | {*index_map.yields}
        sizes = enumerate(zip(index_map.params, self.whole.grid, strict=True))
        axes = [a for a, (v, n) in sizes if v in used and n != 1]
        return axes[-1] if axes and self.whole.grid[axes[-1]] else None

    def guards(self, ref: Value) -> list[Guard]:
        """The guards that cover all uses of a block; none if some use is unguarded."""
        users = [op for op in self.whole.body.ops if uses(op, ref)]
        found = [guard_of(op, self.inside) for op in users]
        return [] if None in found else [guard for guard in found if guard is not None]

    def within(self, index_map: Block, axis: int, guards: Sequence[Guard]) -> Block:
        b = Builder(guards[0].op.loc, watch=self.facts.note_op)
        self.facts.note_grid(index_map.params, self.whole.grid)
        solver = self.solver(index_map, axis, b)
        found: list[Bounds] = []
        for guard in guards:
            bounds = Bounds()
            for part in guard.parts:
                bounds &= solver.solve(part) or Bounds()
            found.append(bounds)
        bounds = solver.hull(found)
        if not bounds.lows and not bounds.highs:
            return index_map
        b.ops += solver.ops
        params = list(index_map.params)
        last = self.facts.of(params[axis]).high
        step = params[axis]
        for high in bounds.highs:
            step = b.min(step, b.sub(high, b.like(1, high)))
        for low in bounds.lows:
            step = b.max(step, low)
        fact = self.facts.of(step)
        if fact.low < 0:
            step = b.max(step, b.like(0, step))
        if fact.high > last:
            step = b.min(step, b.like(last, step))
        arguments = [*params[:axis], step, *params[axis + 1 :]]
        return b.block(params, inline(b, index_map, arguments))

    def solver(self, index_map: Block, axis: int, b: Builder) -> Solver:
        """Solves for an axis by what a map can see: slower axes, and scalars."""
        ids = dict(zip(self.whole.ids, index_map.params, strict=True))
        index = self.whole.ids[axis]
        known = {*self.whole.ids[:axis]}
        scalars = {ref for ref in self.readable if ref.ref.space == "smem"}
        solver = Solver(
            index,
            b.index(0),
            self.inside,
            lambda value: value in known or value in scalars,
            lambda op: op.name == "load" and op.operands[0] in scalars,
            self.facts,
        )
        solver.made.update({old: new for old, new in ids.items() if old is not index})
        return solver
