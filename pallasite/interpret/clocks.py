"""Vector clocks: which accesses of concurrent contexts are ordered, and which race.

Each context, and each copy in flight, is a *lane*. A lane knows, for every other lane,
which of its accesses happened before: it learns that from a signal it waits for, a
barrier, a copy it waits for, and the contexts that it starts and ends. An access races
with an earlier one of another lane if that did not happen before it.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallasite.interpret.numpy_memory import Elements
from pallasite.ir.nodes import Op, Value

Key = tuple[Hashable, ...]  # of a semaphore
Times = dict[int, int]  # per lane: the number of its last access that is known


@dataclass(frozen=True)
class Access:
    """One access, for a report."""

    op: Op | None
    program: int
    who: str | None
    monitor: Any = None  # of the device that it was on


class Clocks:
    """What each lane knows about the others."""

    def __init__(self):
        self.accesses: list[Access] = [Access(None, 0, None)]
        self._known: dict[int, Times] = {}
        # Per semaphore: what came before each signal that was not waited for yet.
        self._signals: dict[Key, deque[tuple[int, Times]]] = {}
        self._meetings: dict[Hashable, Times] = {}
        self._lanes: dict[Hashable, int] = {}
        self._last: dict[int, int] = {}  # per lane: the number of its last access

    def lane(self, *key: Hashable) -> int:
        """The number of a lane; always the same."""
        return self._lanes.setdefault(key, len(self._lanes) + 1)

    def known(self, lane: int) -> Times:
        return self._known.setdefault(lane, {})

    def _until_now(self, lane: int) -> Times:
        return {**self.known(lane), lane: len(self.accesses) - 1}

    def last(self, lane: int) -> int:
        """The number of a lane's last access."""
        return self._last.get(lane, 0)

    def add(self, lane: int, access: Access) -> int:
        """Number an access."""
        number = self._last[lane] = len(self.accesses)
        self.accesses.append(access)
        return number

    def signal(self, lane: int, semaphore: Key, amount: int) -> None:
        """What the lane did so far happens before any wait for this amount."""
        signals = self._signals.setdefault(semaphore, deque())
        signals.append((amount, self._until_now(lane)))

    def wait(self, lane: int, semaphore: Key, amount: int) -> None:
        """The lane continues after the first signals that add up to the amount.

        Not after all signals so far: the others might have come later.
        """
        signals = self._signals.setdefault(semaphore, deque())
        while amount > 0 and signals:
            count, before = signals.popleft()
            _merge(self.known(lane), before)
            if count > amount:
                signals.appendleft((count - amount, before))
            amount -= count

    def reach(self, lane: int, semaphore: Key, amount: int) -> None:
        """The same for a wait that leaves the signals to others."""
        for count, before in self._signals.get(semaphore, ()):
            if amount <= 0:
                break
            _merge(self.known(lane), before)
            amount -= count

    def forget(self, semaphores: tuple[Hashable, ...]) -> None:
        """Signals to these, given by the beginning of their keys, are gone."""
        count = len(semaphores)
        for key in [k for k in self._signals if k[:count] == semaphores]:
            del self._signals[key]

    def arrive(self, lane: int, barrier: Hashable) -> None:
        _merge(self._meetings.setdefault(barrier, {}), self._until_now(lane))

    def meet(self, lane: int, barrier: Hashable) -> None:
        """Every lane that synchronises there has arrived."""
        _merge(self.known(lane), self._meetings.get(barrier, {}))

    def fork(self, lane: int, child: int) -> None:
        _merge(self.known(child), self._until_now(lane))

    def join(self, lane: int, child: int) -> None:
        _merge(self.known(lane), self._until_now(child))


def _merge(into: Times, other: Times) -> None:
    for lane, time in other.items():
        into[lane] = max(into.get(lane, 0), time)


# Kinds of earlier accesses of another lane that an access conflicts with.
CLASHES = {
    "reads": ("writes", "updates"),
    "writes": ("writes", "reads", "updates"),
    "updates": ("writes", "reads"),
}


class Timed:
    """The last access of each lane, in each way, to each element of one root."""

    def __init__(self, root: Value):
        self.root = root
        self._times: dict[str, dict[int, np.ndarray]] = {how: {} for how in CLASHES}

    def clash(
        self, clocks: Clocks, lane: int, how: str, elements: Elements
    ) -> tuple[str, tuple[int, ...], Access] | None:
        """An earlier access that races with this one: how, where and by which lane."""
        known = clocks.known(lane)
        for earlier in CLASHES[how]:
            for other, times in self._times[earlier].items():
                if other == lane:
                    continue
                found = np.ravel(np.asarray(elements.of(times)))
                races = found > known.get(other, 0)
                if races.any():
                    n = int(np.argmax(races))
                    place = elements.position(times.shape, n)
                    return earlier, place, clocks.accesses[int(found[n])]
        return None

    def add(
        self, clocks: Clocks, lane: int, how: str, elements: Elements, access: Access
    ) -> None:
        times = self._times[how]
        if lane not in times:
            times[lane] = np.zeros(self.root.ref.shape, np.int64)
        elements.set(times[lane], clocks.add(lane, access))
