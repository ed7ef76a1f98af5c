"""The tuner's progress line: how far it is, the best so far, and the time taken."""

import sys
import time
from typing import TextIO

from pallasite.tune.search import Outcome

WIDTH = 20


class Progress:
    """One line on a terminal, rewritten in place; nothing without a terminal.

    Args:
        title: what is tuned.
        unit: "s" or "cycles", of the times shown.
        stream: where to write; by default standard error.
        shown: whether to show it; None: if the stream is a terminal.
    """

    def __init__(
        self,
        title: str,
        unit: str = "s",
        stream: TextIO | None = None,
        shown: bool | None = None,
    ):
        self.title, self.unit = title, unit
        self.stream = stream or sys.stderr
        self.shown = self.stream.isatty() if shown is None else shown
        self.started = time.monotonic()
        self.said = ""

    def say(self, what: str) -> None:
        if self.shown and what != self.said:
            self.said = what
            self.stream.write(f"\r\x1b[K{self.title}: {what}")
            self.stream.flush()

    def update(self, outcome: Outcome, doing: str = "") -> None:
        done, budget = outcome.compiled, outcome.budget
        filled = "#" * (WIDTH * min(done, budget) // budget)
        text = f"[{filled:<{WIDTH}}] {done}/{budget}"
        if outcome.best.seconds is not None:
            text += f", best {shown_time(outcome.best.seconds, self.unit)}"
            text += f" ({outcome.best})"
            left = (time.monotonic() - self.started) / max(done, 1) * (budget - done)
            text += f", {left:.0f} s left"
        self.say(text + (f", {doing}" if doing else ""))

    def close(self) -> None:
        if self.shown:
            self.stream.write("\n")


def shown_time(number: float, unit: str) -> str:
    if unit == "cycles":
        return f"{number:,.0f} cycles"
    for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if number >= scale:
            return f"{number / scale:.3g} {name}"
    return f"{number / 1e-9:.3g} ns"
