"""Which configuration a kernel has, and where it is from, for `pl.explain` and others.

Functions ask for configurations (`tune/choices.py`) before they call kernels. In a
`with kept():` block, `tell` notes what the function that asked got, and `of_call` finds
what holds for a kernel called anywhere inside that function.
"""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

import jax

from pallasite import config


@dataclass(frozen=True)
class Configured:
    """A kernel's configuration in words; `tuned`: it was measured for these shapes."""

    text: str
    tuned: bool = False


_told: ContextVar[list[tuple[FrameType, Configured]] | None]
_told = ContextVar("told", default=None)
_block = jax.make_user_context(None)  # part of the key of JAX's caches


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keeps what is told in the block; cached functions are traced again in it."""
    token = _told.set([])
    try:
        with _block(object()):
            yield
    finally:
        _told.reset(token)


def tell(configured: Configured) -> None:
    """Notes the configuration that the package's function being called now has."""
    told, frame = _told.get(), sys._getframe(1)
    if told is None:
        return
    while frame.f_back is not None and _is_ours(frame.f_back):
        frame = frame.f_back
    told.append((frame, configured))


def of_call() -> Configured | None:
    """What was last told to one of the functions that are being called now."""
    told, around, frame = _told.get(), set[int](), sys._getframe(1)
    if not told:
        return None
    while frame is not None:
        around.add(id(frame))
        frame = frame.f_back
    found = (each for frame, each in reversed(told) if id(frame) in around)
    return next(found, None)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(config.PACKAGE))
