"""Tracebacks of our errors, without our frames: `folds` marks what users call."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import jax

from pallasite.errors import PallasError, is_users

F = TypeVar("F", bound=Callable[..., Any])


def folds(function: F) -> F:
    """A function whose errors show the user's frames: ours and JAX's are left out.

    JAX does the same for its own, and `jax_traceback_filtering` is the switch of both.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PallasError as error:
            mode = getattr(jax.config, "jax_traceback_filtering", "")
            if mode == "off":
                raise
            raise error.with_traceback(_folded(error.__traceback__)) from (
                error.__cause__
            )

    return call  # pyright: ignore[reportReturnType]


def _folded(found: TracebackType | None) -> TracebackType | None:
    if found is None:
        return None
    rest = _folded(found.tb_next)
    if not is_users(found.tb_frame):
        return rest
    return TracebackType(rest, found.tb_frame, found.tb_lasti, found.tb_lineno)
