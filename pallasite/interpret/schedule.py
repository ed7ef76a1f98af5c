"""Concurrent contexts, and the order in which they are scheduled.

A context is a region that is being run: the kernel, a core of a mesh, a role. It runs
until it pauses: where it may have to wait, and where another context may see what it
did. A `Schedule` then chooses which one continues. Copies in flight are scheduled too:
their data moves at any time between start and wait. Orders: "early" (copies at their
start, contexts in program order), "late" (copies only when they are waited for, the
last context first), or the seed of a random order.
"""

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pallasite.errors import SpecError
from pallasite.ir.nodes import Op, Value

Order = str | int


class Pause:
    """Why a context stops for a moment: here, only to let others run."""

    polls = False  # goes on only after those that do not poll

    def __init__(self, op: Op):
        self.op = op

    def ready(self) -> bool:
        """Whether the context can continue."""
        return True

    def wanted(self) -> Sequence[Any]:
        """The copies in flight that it may be waiting for."""
        return ()

    def text(self) -> str:
        """What it waits for, in a report of a deadlock."""
        return ""

    def report(self) -> None:
        """Nothing else runs: report that the wait never ends."""


Steps = Generator[Pause, None, Any]


@dataclass(eq=False)
class Context:
    """Something that runs, and where it is."""

    name: str
    steps: Steps
    walker: Any  # of the device that it runs on
    env: dict[Value, Any]
    state: Any  # what checked mode saves for it while others run
    siblings: list["Context"] = field(default_factory=list["Context"])
    core: int | None = None  # its place among its siblings, for a core of a mesh
    # The memory of a core's own allocations, by the value that names them in the IR.
    memory: dict[Value, Value] | None = None
    # Where a block is in its cluster, by the axes of the grid (-1 is the last).
    place: dict[int, int] = field(default_factory=dict[int, int])
    pause: Pause | None = None
    done: bool = False
    arrived: int = 0  # barriers reached
    lane: int = 0  # its lane, for a role
    last_run: int = 0  # number of the switch at which it ran last

    @property
    def is_able(self) -> bool:
        return self.pause is None or self.pause.ready()


class Join(Pause):
    """A context waits for those that it started."""

    def __init__(self, op: Op, group: Sequence[Context]):
        super().__init__(op)
        self.group = group

    def ready(self) -> bool:
        return all(c.done for c in self.group)


class Schedule:
    """All contexts of a run.

    A context's walker saves and restores what it needs (`state`, `go_to`), has its
    copies in flight (`copies`), moves one (`move`), and reports that contexts wait for
    ever (`deadlock`); if that returns, the first of them goes on regardless.
    """

    def __init__(self, order: Order):
        if order not in ("early", "late") and type(order) is not int:
            raise SpecError(
                "orders of pl.Checked must be 'early', 'late' or the seed of a random "
                "one",
                [("got", repr(order))],
                fix='pl.Checked(orders=("early", "late", 7))',
            )
        self.is_early = order == "early"
        self.random = random.Random(order) if isinstance(order, int) else None
        self.walkers: list[Any] = []
        self.contexts: list[Context] = []
        self.current: Context | None = None
        self.switches = 0

    def run(self, walkers: Sequence[Any]) -> None:
        """Run the kernel of each walker, and all that it starts, to the end."""
        self.walkers = list(walkers)
        self.contexts = [
            Context(w.name, w.kernel_steps(), w, w.env, w.state()) for w in walkers
        ]
        while self.contexts:
            self._resume(self._next())
        self.current = None

    def fork(self, parts: Sequence[tuple[str, Steps]]) -> list[Context]:
        """New contexts, concurrent with the current one."""
        assert self.current is not None
        walker = self.current.walker
        group: list[Context] = []
        for name, steps in parts:
            env, state = dict(walker.env), walker.state()
            group.append(Context(name, steps, walker, env, state, group))
        for context in group:
            context.core, context.memory = self.current.core, self.current.memory
            context.place = self.current.place
        self.contexts += group
        return group

    def _resume(self, context: Context) -> None:
        self.switch_to(context)
        self.switches += 1
        context.last_run = self.switches
        try:
            context.pause = next(context.steps)
        except StopIteration:
            context.done = True
            self.contexts.remove(context)

    def switch_to(self, context: Context) -> None:
        if context is not self.current:
            if self.current is not None:
                self.current.state = self.current.walker.state()
            context.walker.go_to(context)
            self.current = context

    def _next(self) -> Context:
        while True:
            able = [c for c in self.contexts if c.is_able]
            chosen = self._random(able) if self.random else self._in_order(able)
            if isinstance(chosen, Context):
                return chosen
            if chosen is not None:
                self.move(chosen)
                continue
            stuck = [c for c in self.contexts if not isinstance(c.pause, Join)]
            stuck[0].walker.deadlock(stuck)
            return stuck[0]

    def pending(self) -> list[Any]:
        """The copies that are started and not moved yet."""
        return [copy for walker in self.walkers for copy in walker.copies.pending()]

    def move(self, copy: Any) -> None:
        """Move a copy's data, on the device where it is."""
        (walker,) = [w for w in self.walkers if copy in w.copies.flying]
        walker.move(copy)

    def _random(self, able: list[Context]) -> Any:
        assert self.random is not None
        choices = [*able, *self.pending()]
        return self.random.choice(choices) if choices else None

    def _in_order(self, able: list[Context]) -> Any:
        busy = [c for c in able if c.pause is None or not c.pause.polls]
        if busy:
            return busy[0 if self.is_early else -1]
        for context in self.contexts:
            wanted = context.pause.wanted() if context.pause is not None else ()
            if wanted:
                return wanted[0]
        return min(able, key=lambda c: c.last_run, default=None)
