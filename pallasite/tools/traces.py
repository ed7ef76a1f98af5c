"""The kernel calls of a function, as it is traced for a target."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from pallasite import config, configured
from pallasite.errors import SpecError
from pallasite.ir.nodes import Loc
from pallasite.language.trace import shorten, user_location
from pallasite.sites import Site, sites_in
from pallasite.target import Named

Trace = Callable[[], Sequence[Site]]  # the kernel calls of a function


def kernels_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Site]:
    """The kernel calls of a function; it must have at least one."""
    sites = sites_in(function, *args, **kwargs)
    if not sites:
        name = getattr(function, "__name__", repr(function))
        raise SpecError(
            f"'{name}' calls no kernel",
            at=user_location() or _definition(function),
            fix="pass a function that calls pl.pallas_call(...)(...)",
        )
    return sites


def traced_for(target: Named, trace: Trace) -> Sequence[Site]:
    """The kernel calls of a function as it is traced for a target.

    `pallasite.kernels` and backward kernels choose blocks by the chip.
    """
    with config.override(target=target.name), configured.kept():
        return trace()


def _definition(function: Callable[..., Any]) -> Loc | None:
    """Where a function is defined, if no line calls it (in a command)."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    return Loc(shorten(code.co_filename), code.co_firstlineno, code.co_name)
