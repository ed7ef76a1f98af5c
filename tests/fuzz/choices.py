"""Where a random kernel's choices come from: hypothesis, or a seeded generator.

The generator asks only for what `Choices` offers. Drawn choices shrink: towards the
low end, the first option, no. Seeded ones are for long runs outside the tests.
"""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices(Protocol):
    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        ...


class Drawn:
    """Choices that hypothesis makes, and can shrink."""

    def __init__(self, draw: Callable[[Any], Any]):
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return low if low == high else self._draw(_integers(low, high))


@functools.cache
def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


class Seeded:
    """The same choices for the same seed."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


def pick(choices: Choices, options: Sequence[T]) -> T:
    """One of the options; the first is the simplest."""
    return options[choices.integer(0, len(options) - 1)]


def chance(choices: Choices, percent: int) -> bool:
    """Yes in so many percent of cases; no is simpler."""
    return choices.integer(0, 99) >= 100 - percent
