"""What one seeded bug is: a kernel with it and without, and the report it must give."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = "# BUG"


@dataclass(frozen=True)
class Bug:
    """One kernel: `run(fixed)` calls it with the bug, or without."""

    name: str
    run: Callable[[bool], Any]
    kind: str
    ref: str | None
    program: str | None
    line: int  # of the mark, where the report must point

    def __repr__(self) -> str:
        return self.name


BUGS: list[Bug] = []


def bug(kind: str, ref: str | None, program: str | None) -> Callable:
    """Registers a function of `fixed`; its line with the mark is the buggy one."""

    def register(function: Callable[[bool], Any]) -> Callable[[bool], Any]:
        lines, first = inspect.getsourcelines(function)
        (line,) = [first + n for n, text in enumerate(lines) if MARK in text]
        BUGS.append(Bug(function.__name__, function, kind, ref, program, line))
        return function

    return register
