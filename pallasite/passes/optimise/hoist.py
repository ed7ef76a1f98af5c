"""Loop-invariant code motion, and peeling of the first and last iteration.

Moved out of a `for`: loop invariants (pure ops, loads of memory the kernel never
writes, and loops of these); a reset at the first iteration, of carried values, which
becomes their initial value, or of memory, which moves before the loop; and code for the
last iteration only, which moves after it. The last two are how kernels written for a
grid start and end an accumulation.
"""

from collections.abc import Callable, Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import (
    Rewriter,
    clone,
    map_ops,
    producers_of,
    substitute,
    used_values,
    uses,
)
from pallasite.ir.roles import Cond, Loop
from pallasite.ir.types import I32
from pallasite.passes.analysis.affine import fold_scalar
from pallasite.passes.analysis.guards import parts_of
from pallasite.passes.analysis.memory import constant_inputs, root_among


def hoist(kernel: Kernel) -> Kernel:
    """Apply to every loop, inner ones first."""
    readable = constant_inputs(kernel)

    def rewrite(op: Op, builder: Rewriter) -> Sequence[Value] | None:
        if op.name != "for":
            return None
        loop = _HoistedLoop(op, builder, readable, not kernel.aliases)
        loop.move_invariants()
        loop.move_first_step()
        after = loop.take_last_steps()
        builder.ops.append(loop.loop.to_op())
        for emit in after:
            emit(builder)
        return op.results

    return map_ops(kernel, rewrite)


class _HoistedLoop:
    """One `for` being hoisted from and peeled."""

    def __init__(
        self, op: Op, builder: Rewriter, readable: frozenset[Value], apart: bool
    ):
        self.loop, self.builder, self.readable = Loop.of(op), builder, readable
        self.apart = apart  # whether each ref has memory of its own
        self.producers = dict(builder.producers)
        self.producers |= producers_of(self.body)

    @property
    def body(self) -> Block:
        return self.loop.body

    @property
    def index(self) -> Value:
        return self.loop.index

    def number(self, value: Value) -> int | bool | None:
        op = self.producers.get(value)
        if op is None:
            return None
        if op.name == "constant":
            known = op.attrs["value"]
            return known if isinstance(known, int) and not value.tile.shape else None
        if not table()[op.name].elementwise or value.tile.shape:
            return None
        return fold_scalar(op, [self.number(v) for v in op.operands])

    def bounds(self) -> tuple[int, int] | None:
        """First and last index of a loop that runs at least once, with step one."""
        first, limit, step = (self.number(v) for v in self.loop.bounds)
        if first is None or limit is None or step != 1 or not first < limit:
            return None
        return int(first), int(limit) - 1

    def inside(self) -> set[Value]:
        values = set(self.body.params)
        for op in self.body.ops:
            values.update(op.results)
        return values

    def replace_body(self, block: Block) -> None:
        self.loop = self.loop.with_(body=block)

    # --- loop invariants ---

    def move_invariants(self) -> None:
        inside = self.inside()
        kept: list[Op] = []
        for op in self.body.ops:
            fixed = inside.isdisjoint(used_values(Block((), (op,))))
            if fixed and all(map(self.is_repeatable, walk(Block((), (op,))))):
                self.builder.ops.append(op)
                inside.difference_update(op.results)
            else:
                kept.append(op)
        self.replace_body(Block(self.body.params, tuple(kept), self.body.yields))

    def is_repeatable(self, op: Op) -> bool:
        """Whether what the op itself does, regions apart, is the same at any time."""
        return op.name == "for" or self.is_pure(op) or self.is_stable(op)

    def is_pure(self, op: Op) -> bool:
        return not op.regions and table()[op.name].effect is Effect.PURE

    def is_stable(self, op: Op) -> bool:
        """Whether the op is a load of memory that nothing writes."""
        if op.name != "load":
            return False
        return root_among(self.producers, op.operands[0]) in self.readable

    # --- the first iteration ---

    def move_first_step(self) -> None:
        bounds = self.bounds()
        if bounds is None:
            return
        for op in self.body.ops:
            if self.is_step(op, bounds[0]) and op.results:
                self.move_reset(op)
        self.move_first_effects(bounds[0])

    def move_first_effects(self, first: int) -> None:
        """Move memory effects at the start of the first iteration before the loop."""
        for op in self.body.ops:
            if self.is_step(op, first) and not op.results:
                known = dict(zip(self.loop.carried, self.loop.inits, strict=True))
                emit = self.cut(op, _Replay(self, first, known))
                if emit is None:
                    return
                emit(self.builder)
            elif op.regions or not (self.is_pure(op) or self.is_stable(op)):
                return

    def is_step(self, op: Op, number: int) -> bool:
        """Whether an op is a `cond` with one non-empty branch, taken when the index is
        `number` and further loop-invariant conditions hold."""
        tests = self.tests(op)
        own = [test for test in tests if self.is_at(test, number)]
        rest = [test for test in tests if test not in own]
        return len(own) == 1 and not set(rest) & self.inside()

    def tests(self, op: Op) -> list[Value]:
        """The conditions under which the only non-empty branch of a `cond` runs."""
        if op.name != "cond" or len(op.regions) != 2:
            return []
        which, (otherwise, _) = Cond.of(op).which, Cond.of(op).branches
        cast = self.producers.get(which) if not otherwise.ops else None
        if cast is None or cast.name != "cast":
            return []
        parts = parts_of(cast.operands[0], True, self.producers)
        return [p.value for p in parts] if all(p.truth for p in parts) else []

    def is_at(self, test: Value, number: int) -> bool:
        op = self.producers.get(test)
        if op is None or op.name != "eq" or self.index not in op.operands:
            return False
        x, y = op.operands
        return self.number(y if x is self.index else x) == number

    def other_tests(self, op: Op, b: Builder) -> Value | None:
        """Whether the conditions on other indices hold, computed outside the loop."""
        inside = self.inside()
        rest = [test for test in self.tests(op) if test not in inside]
        if not rest:
            return None
        both = rest[0]
        for test in rest[1:]:
            both = b.and_(both, test)
        return b.cast(both, I32)

    def move_reset(self, op: Op) -> None:
        """Make what the first iteration sets the loop's initial values."""
        otherwise, reset = Cond.of(op).branches
        inside = self.inside()
        carries = self.loop.carried
        if any(v not in carries for v in otherwise.yields):
            return
        if len(set(otherwise.yields)) != len(otherwise.yields):
            return
        own = {v for inner in reset.ops for v in inner.results}
        used = {v for inner in walk(reset) for v in inner.operands} | set(reset.yields)
        movable = all(self.is_pure(o) or self.is_stable(o) for o in reset.ops)
        if (used - own) & inside or not movable:
            return
        others = [o for o in self.body.ops if o is not op]
        if any(
            v in self.body.yields or any(uses(o, v) for o in others)
            for v in otherwise.yields
        ):
            return
        inits = list(self.loop.inits)
        which, values = self.other_tests(op, self.builder), reset.yields
        if which is None:
            self.builder.ops += reset.ops
        else:
            kept = Block(
                (), (), tuple(inits[carries.index(v)] for v in otherwise.yields)
            )
            values = self.builder.emit("cond", which, regions=(kept, reset))
        for param, value in zip(otherwise.yields, values, strict=True):
            inits[carries.index(param)] = value
        mapping = dict(zip(op.results, otherwise.yields, strict=True))
        block = Block(self.body.params, tuple(others), self.body.yields)
        self.loop = self.loop.with_(inits=tuple(inits))
        self.replace_body(substitute(block, mapping))

    # --- the last iteration ---

    def take_last_steps(self) -> list[Callable[[Builder], None]]:
        """Remove trailing last-iteration code; gives what emits it after the loop."""
        after: list[Callable[[Builder], None]] = []
        while (emit := self.take_last_step()) is not None:
            after.insert(0, emit)
        return after

    def take_last_step(self) -> Callable[[Builder], None] | None:
        """Remove the last piece of it."""
        bounds = self.bounds()
        if bounds is None:
            return None
        stored = set[Value]()  # by the code behind it, which must not see the move
        for op in reversed(self.body.ops):
            if self.is_step(op, bounds[1]) and not op.results:
                if not self.roots(op).isdisjoint(stored):
                    return None
                known = dict(zip(self.body.yields, self.loop.results, strict=True))
                return self.cut(op, _Replay(self, bounds[1], known))
            if op.name == "store" and self.apart:
                stored |= self.roots(op)
            elif op.regions or not (self.is_pure(op) or self.is_stable(op)):
                break
        return None

    def roots(self, op: Op) -> set[Value]:
        """The memory that an op may access."""
        inside = [v for each in walk(Block((), (op,))) for v in each.operands]
        made = self.producers | producers_of(Block((), (op,)))
        return {root_among(made, v) for v in inside if v.is_ref}

    def cut(self, op: Op, plan: "_Replay") -> Callable[[Builder], None] | None:
        """Remove the code of one iteration; returns a function to emit it outside."""
        _, branch = Cond.of(op).branches
        defined = {v for inner in walk(branch) for v in inner.results}
        defined |= {
            v for inner in walk(branch) for r in inner.regions for v in r.params
        }
        used = [v for inner in walk(branch) for v in inner.operands]
        used += [v for inner in walk(branch) for r in inner.regions for v in r.yields]
        free = [v for v in dict.fromkeys(used) if v not in defined]
        if not all(map(plan.can, free)):
            return None
        which = self.other_tests(op, self.builder)
        kept = tuple(o for o in self.body.ops if o is not op)
        self.replace_body(Block(self.body.params, kept, self.body.yields))

        def emit(builder: Builder) -> None:
            mapping = {v: plan.value(v, builder) for v in free}
            ops = clone(Block((), branch.ops), mapping).ops
            if which is None:
                builder.ops += ops
            else:
                builder.emit("cond", which, regions=(Block(), Block((), ops)))

        return emit


class _Replay:
    """Recomputes values of the first or the last iteration outside the loop.

    `known` has those already available: the values carried in, or out.
    """

    def __init__(self, loop: _HoistedLoop, number: int, known: dict[Value, Value]):
        self.loop, self.number, self.known = loop, number, known
        self.inside = loop.inside()
        self.made: dict[Value, Value] = {}

    def can(self, value: Value) -> bool:
        if value not in self.inside or value in self.known:
            return True
        if value is self.loop.index:
            return True
        op = self.loop.producers.get(value)
        if op is None or op.regions or value in self.loop.body.params:
            return False
        return self.loop.is_pure(op) and all(map(self.can, op.operands))

    def value(self, value: Value, builder: Builder) -> Value:
        if value not in self.inside:
            return value
        if value in self.known:
            return self.known[value]
        if value is self.loop.index:
            return builder.constant(self.number, value.tile)
        if value not in self.made:
            op = self.loop.producers[value]
            operands = [self.value(v, builder) for v in op.operands]
            self.made[value] = builder.op(op.name, *operands, **op.attrs)
        return self.made[value]
