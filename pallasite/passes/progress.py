"""Says which step of a compilation takes long, while it does.

A compilation that takes minutes without a word looks like a hang. `watched` logs a
warning after `FIRST_SECONDS` in one step, and again whenever that time has doubled.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pallasite.ir.nodes import Kernel

FIRST_SECONDS = 10.0
_log = logging.getLogger("pallasite")


class Progress:
    """The step that a kernel's compilation is in."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.step, self.since = kernel, "", time.monotonic()

    def enter(self, step: str) -> None:
        self.step, self.since = step, time.monotonic()

    def tell(self, done: threading.Event) -> None:
        told: tuple[float, float] = (0.0, 0.0)  # since when, for how long
        wait = FIRST_SECONDS
        while not done.wait(wait):
            since, seconds = self.since, time.monotonic() - self.since
            least = 2 * told[1] if told[0] == since else FIRST_SECONDS
            wait = max(least - seconds, FIRST_SECONDS / 10)
            if seconds >= least:
                told, wait = (since, seconds), seconds
                at = f" ({self.kernel.loc})" if self.kernel.loc else ""
                _log.warning(
                    "compiling kernel %r%s: %s has taken %.0f s so far",
                    *(self.kernel.name, at, self.step, seconds),
                )


@contextmanager
def watched(kernel: Kernel) -> Iterator[Progress]:
    """Inside, `enter` names the steps."""
    progress, done = Progress(kernel), threading.Event()
    thread = threading.Thread(target=progress.tell, args=(done,), daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        done.set()
        thread.join()  # nothing is said of a compilation that has ended
