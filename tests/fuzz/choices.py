"""Where a random kernel's choices come from: bytes, or a seeded generator.

`Stream` reads them off a byte string, which hypothesis draws and `simplest` makes
simple: a 0 is the low end of a range, the first option, no. `Seeded` is for long runs
outside the tests.
"""

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Choices(Protocol):
    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        ...


class Stream:
    """Choices spelled out as bytes; after the last one all are the simplest."""

    def __init__(self, data: bytes):
        self._bytes = iter(data)

    def integer(self, low: int, high: int) -> int:
        count, number, reach = high - low + 1, 0, 1
        while reach < count:
            number = number * 256 + next(self._bytes, 0)
            reach *= 256
        return low + number % count


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
    """Yes in `percent` of 100 cases; no is simpler."""
    return choices.integer(0, 99) >= 100 - percent


def simplest(data: bytes, fails: Callable[[bytes], bool], tries: int = 200) -> bytes:
    """Bytes for which it still fails: shorter, and with more zeros."""
    size = len(data) // 2
    while size:
        for start in range(len(data) - size, -1, -size):
            end = start + size
            options = (
                data[:start] + data[end:],
                data[:start] + bytes(size) + data[end:],
            )
            for option in options:
                if tries and option != data:
                    tries -= 1
                    if fails(option):
                        data = option
                        break
        size //= 2
    return data
