"""join_branches: merges branches that depend only on the grid, one version per outcome.

In: a body with several consecutive steps, each in its own branch (`gather_steps.py`),
whose conditions depend only on grid indices: whether a mask allows the block, whether
it needs the mask. Out: all of these conditions are evaluated first, and the steps that
are then taken are straight-line code. Only outcomes that some program has become
versions; in causal attention with four blocks there are four, of one to four steps.
Grid indices that all programs of a version share are constants in it: what merged
programs select and a step's masks then often fold (`known_comparisons.py`), so the
author's choice of blocks matters little.

For backends that overlap the matmuls of one step with the vector code of another as
long as there is no branch between them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import (
    clone,
    is_pure,
    map_ops,
    producers_of,
    substitute,
    users_of,
)
from pallasite.ir.roles import Cond, Pipeline
from pallasite.passes.analysis.block_table import all_steps, evaluate_map
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.known_comparisons import known_comparisons

Ops = tuple[Op, ...]


def join_branches(
    kernel: Kernel, size: Callable[[Block], float], most: float, needed: str = "dot"
) -> Kernel:
    """Merge the branches of steps.

    Args:
        kernel: what to rewrite.
        size: the code size of a block.
        most: the largest size of all versions of a body.
        needed: an op that each of the branches has; others are not worth versions.
    """

    def rewrite(op: Op, b: Builder) -> Sequence[Value] | None:
        if op.name != "pipeline":
            return None
        pipeline = Pipeline.of(op)
        body = _Joining(pipeline, size, most, needed).body()
        if body is pipeline.body:
            return None
        b.ops.append(pipeline.with_(body=body).to_op())
        return ()

    new = map_ops(kernel, rewrite)
    return kernel if new is kernel else canonicalize(known_comparisons(new))


class _Joining:
    """One body, and its branches that depend only on grid indices."""

    def __init__(
        self,
        pipeline: Pipeline,
        size: Callable[[Block], float],
        most: float,
        needed: str,
    ):
        self.pipeline, self.size, self.most = pipeline, size, most
        self.needed = needed
        self.made = producers_of(pipeline.body)
        self.left = most  # of the code that there may be
        self.numbers: dict[Value, np.ndarray | None] = {}
        self.movable: dict[Op, bool] = {}
        self.renamed: dict[Value, Value] = {}  # what is used after a run

    def body(self) -> Block:
        body = self.pipeline.body
        if self.steps is None or body.yields:
            return body
        ops: list[Op] = []
        for run in self.runs():
            ops += self.joined(run)
        if tuple(ops) == body.ops:
            return body
        return substitute(replace(body, ops=tuple(ops)), self.renamed)

    # --- conditions on grid indices ---

    @cached_property
    def asked(self) -> set[Value]:
        """Branch indices, and the values they are computed from."""
        found, pending = set[Value](), list[Value]()
        for op in walk(self.pipeline.body):
            if op.name == "cond":
                pending.append(Cond.of(op).which)
        while pending:
            value = pending.pop()
            if value not in found:
                found.add(value)
                maker = self.made.get(value)
                pending += () if maker is None or maker.regions else maker.operands
        return found

    @cached_property
    def steps(self) -> np.ndarray | None:
        """Grid indices of all programs that may differ; None: too many, or unknown."""
        pairs = zip(self.pipeline.ids, self.pipeline.grid, strict=True)
        return all_steps([n if v in self.asked else 1 for v, n in pairs])

    def number(self, op: Op) -> np.ndarray | None:
        """The branch that each program takes; None if it depends on more than its
        indices."""
        cond = Cond.of(op)
        if cond.which not in self.numbers:
            self.numbers[cond.which] = self._evaluated(cond.which)
        number = self.numbers[cond.which]
        if number is None:
            return None
        return np.clip(number.astype(np.int64), 0, len(cond.branches) - 1)

    def _evaluated(self, value: Value) -> np.ndarray | None:
        ops = self._slice(value)
        if ops is None or self.steps is None:
            return None
        found = evaluate_map(Block(self.pipeline.ids, ops, (value,)), self.steps)
        return None if found is None else found[0]

    def _slice(self, value: Value) -> Ops | None:
        """The ops that compute a scalar from grid indices, in order."""
        found: dict[Op, None] = {}

        def collect(value: Value) -> bool:
            op = self.made.get(value)
            if op is None:
                return value in self.pipeline.ids
            if op.regions or value.is_ref or value.tile.shape:
                return False
            if table()[op.name].effect is not Effect.PURE:
                return False
            if op not in found and not all(map(collect, op.operands)):
                return False
            found[op] = None
            return True

        return tuple(found) if collect(value) else None

    # --- runs of steps ---

    def runs(self) -> Iterator[Ops]:
        """The body in runs: steps that can be merged are in one run, with the ops
        between and around them."""
        run: list[Op] = []
        for op in self.pipeline.body.ops:
            if op.regions and not self.is_step(op):
                yield tuple(run)
                yield (op,)
                run = []
            else:
                run.append(op)
        yield tuple(run)

    def is_step(self, op: Op) -> bool:
        """Whether an op is a branch with matmuls that depends only on grid indices."""
        if op.name != "cond" or self.number(op) is None:
            return False
        return any(inner.name == self.needed for inner in walk(Block((), (op,))))

    def joined(self, run: Ops) -> Sequence[Op]:
        """The versions of a run, preceded by the code that selects one."""
        if sum(op.name == "cond" for op in run) < 2:
            return run
        moved = {op for op in run if self.is_movable(op)}
        code = tuple(op for op in run if op not in moved)
        others = Block((), tuple(op for op in self.pipeline.body.ops if op not in run))
        used = users_of(others)
        results = tuple(v for op in code for v in op.results if v in used)
        if any(v.is_ref for v in results):
            return run
        assert self.steps is not None
        left, b = self.left, Builder(code[0].loc)
        everyone = np.arange(self.steps.shape[1])
        block = self.version(Block((), code, results), everyone, results, b, {})
        if block is None:
            self.left = left
            return run
        pairs = zip(results, block.yields, strict=True)
        self.renamed |= {old: new for old, new in pairs if new is not old}
        return [*(op for op in run if op in moved), *b.ops, *block.ops]

    def is_movable(self, op: Op) -> bool:
        """Whether an op may move before all steps: it does not depend on memory."""
        if op not in self.movable:
            makers = [self.made.get(v) for v in op.operands]
            self.movable[op] = is_pure(op) and all(
                maker is None or self.is_movable(maker) for maker in makers
            )
        return self.movable[op]

    def version(
        self,
        code: Block,
        programs: np.ndarray,
        results: tuple[Value, ...],
        b: Builder,
        decided: dict[Value, Value],
    ) -> Block | None:
        """Code for some programs: a branch between versions, or the one they share.

        Args:
            code: what all programs run; it yields the values used after it.
            programs: by number.
            results: the names of the code's values after it.
            b: receives the code that selects a version.
            decided: caches that.

        Returns:
            None if it would be too large.
        """
        straight, branch = self.straight(code, programs)
        if branch is None:
            self.left -= self.size(straight)
            settled = clone(self.settled(straight, programs))
            return settled if self.left >= 0 else None
        cond, number = Cond.of(branch), self.number(branch)
        assert number is not None
        regions: list[Block] = []
        for n in range(len(cond.branches)):
            # A branch that no program takes may be any other.
            taking = programs[number[programs] == n]
            inner = tuple(Value(v.type, v.name) for v in results)
            some = taking if len(taking) else programs[:1]
            region = self.version(code, some, inner, b, decided)
            if region is None:
                return None
            regions.append(region)
        which = self._decided(cond.which, b, decided)
        op = branch.with_(operands=(which,), results=results, regions=tuple(regions))
        return Block((), (op,), results)

    def straight(self, code: Block, programs: np.ndarray) -> tuple[Block, Op | None]:
        """The code of some programs, up to the first branch that not all take."""
        pending, done = list(code.ops), list[Op]()
        known: dict[Value, Value] = {}
        while pending:
            op = pending.pop(0)
            number = self.number(op) if op.name == "cond" else None
            if number is None:
                done.append(op)
                continue
            taken = np.unique(number[programs])
            if len(taken) > 1:
                return code, op
            branch = Cond.of(op).branch(int(taken[0]))
            known |= zip(op.results, branch.yields, strict=True)
            pending[:0] = branch.ops
        for value in known:
            while known[value] in known:
                known[value] = known[known[value]]
        return substitute(Block((), tuple(done), code.yields), known), None

    def settled(self, code: Block, programs: np.ndarray) -> Block:
        """Code with the grid indices that its programs share as constants.

        Values computed from them before the versions are recomputed with these.
        """
        assert self.steps is not None
        b, known = Builder(), dict[Value, Value]()
        for v, n, values in zip(
            self.pipeline.ids, self.pipeline.grid, self.steps, strict=True
        ):
            shared = np.unique(values[programs])
            if len(shared) == 1 and (v in self.asked or n == 1):
                known[v] = b.constant(int(shared[0]), v.tile)
        for op in self._before(code):
            if any(v in known for v in op.operands):
                copy = clone(Block((), (op,), op.results), known)
                b.ops += copy.ops
                known |= zip(op.results, copy.yields, strict=True)
        return substitute(Block((), (*b.ops, *code.ops), code.yields), known)

    def _before(self, code: Block) -> Sequence[Op]:
        """The ops that code depends on and that may move before all steps."""
        used = {*users_of(code), *code.yields}
        found: list[Op] = []
        for op in reversed(self.pipeline.body.ops):
            if used.intersection(op.results) and self.is_movable(op):
                found.append(op)
                used.update(op.operands)
        return found[::-1]

    def _decided(self, value: Value, b: Builder, decided: dict[Value, Value]) -> Value:
        """The index of a branch, before any branch is taken."""
        if value not in decided:
            ops = self._slice(value)
            assert ops is not None
            copy = clone(Block((), ops, (value,)))
            b.ops += copy.ops
            (decided[value],) = copy.yields
        return decided[value]
