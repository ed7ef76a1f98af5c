"""Activity analysis: which memory and values have tangents, given active operands.

A forward fixpoint over the IR. It is conservative: it may call something active that is
not (an op with a zero derivative), never the reverse.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.roles import Cond, Loop, While
from pallasite.ir.types import TileType
from pallasite.passes.analysis.memory import Roots


@dataclass(frozen=True)
class Activity:
    """The result: roots of active memory, active tiles, semaphores of active copies."""

    kernel: Kernel
    roots: Roots
    memory: frozenset[Value]
    tiles: frozenset[Value]
    semaphores: frozenset[Value]

    def is_active(self, value: Value) -> bool:
        """Whether a ref or a tile has a tangent."""
        if value.is_ref:
            root = self.roots.of(value)
            return root in self.memory or root in self.semaphores
        return value in self.tiles

    @property
    def inputs(self) -> tuple[int, ...]:
        """Positions of the inputs with a tangent: the chosen ones, and those into whose
        memory the kernel writes a tangent or copies one."""
        return tuple(n for n, p in enumerate(self.kernel.inputs) if self.is_active(p))

    @property
    def outputs(self) -> tuple[int, ...]:
        """Positions of the outputs with a tangent."""
        return tuple(n for n, p in enumerate(self.kernel.outputs) if self.is_active(p))


@functools.lru_cache(maxsize=1024)
def activity(kernel: Kernel, active: tuple[bool, ...]) -> Activity:
    """What is active in a kernel, given its `active` inputs."""
    return _Finder(kernel, active).run()


class _Finder:
    def __init__(self, kernel: Kernel, active: Sequence[bool]):
        self.kernel, self.roots = kernel, Roots(kernel)
        pairs = zip(kernel.inputs, active, strict=True)
        self.memory = {self.roots.of(p) for p, a in pairs if a}
        self.tiles: set[Value] = set()
        self.semaphores: set[Value] = set()

    def run(self) -> Activity:
        size = -1
        while size != self._size():
            size = self._size()
            for op in walk(self.kernel.body):
                self._op(op)
        return Activity(
            self.kernel,
            self.roots,
            frozenset(self.memory),
            frozenset(self.tiles),
            frozenset(self.semaphores),
        )

    def _size(self) -> int:
        return len(self.memory) + len(self.tiles) + len(self.semaphores)

    def _op(self, op: Op) -> None:
        if op.name in ("load", "store", "atomic_rmw", "atomic_cas"):
            self._access(op)
        elif op.name in ("copy_start", "copy_wait"):
            self._copy(op)
        elif op.name == "for":
            loop = Loop.of(op)
            self._loop(op, loop.inits, loop.carried, loop.body)
        elif op.name == "while":
            loop = While.of(op)
            self._loop(op, loop.inits, loop.body.params, loop.body)
            self._same(loop.condition.params, loop.body.params)
        elif op.name == "cond":
            for branch in Cond.of(op).branches:
                self._same(op.results, branch.yields)
        elif op.name != "stop_gradient" and any(v in self.tiles for v in op.operands):
            self._activate(op.results)

    def _activate(self, values: Sequence[Value]) -> None:
        for value in values:
            if isinstance(value.type, TileType) and value.type.dtype.is_float:
                self.tiles.add(value)

    def _same(self, targets: Sequence[Value], sources: Sequence[Value]) -> None:
        pairs = zip(targets, sources, strict=True)
        self.tiles.update(t for t, s in pairs if s in self.tiles)

    def _loop(
        self, op: Op, initial: Sequence[Value], params: Sequence[Value], body: Block
    ) -> None:
        for sources in (initial, body.yields):
            self._same(params, sources)
        for sources in (params, body.yields):
            self._same(op.results, sources)

    def _access(self, op: Op) -> None:
        access = Access.of(op)
        root = self.roots.of(access.ref)
        if access.value in self.tiles or access.compare in self.tiles:
            self.memory.add(root)
        if root in self.memory or access.other in self.tiles:
            self._activate(op.results)

    def _copy(self, op: Op) -> None:
        """The tangent is copied separately, with its own semaphore: either all copies
        that one semaphore counts are active, or none is."""
        source, target, *rest = (self.roots.of(v) for v in op.operands)
        joined = {source, target}
        started = op.name == "copy_start" and source in self.memory
        if started or target in self.memory or any(s in self.semaphores for s in rest):
            self.memory |= joined
            self.semaphores.update(rest)
