"""`pl.autotune(f)(*args)`: finds good configurations of all kernels in a function.

`tuner.py`, which is loaded when something is tuned, does the work.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallasite.errors import KernelTypeError, SpecError
from pallasite.language.arguments import Arguments
from pallasite.language.trace import user_location
from pallasite.tune.results import Tuned
from pallasite.tune.tunable import declared


def autotune(
    function: Callable[..., Any],
    *,
    space: Mapping[str, Sequence[Any]] | None = None,
    target: str | None = None,
    limit: float = 60.0,
    workers: int | None = None,
    tolerance: float | None = None,
    share: float = 0.25,
    again: bool = False,
    keep: bool = True,
    progress: bool | None = None,
) -> Callable[..., Tuned]:
    """Finds fast configurations for every tunable kernel in a function.

    Args:
        function: any JAX function: one kernel, or a whole training step. What it calls
            of `pallasite.kernels` and of functions declared by `pl.tunable` is tuned,
            unless it is called with a configuration.
        space: values of the function's own keyword arguments, as for `pl.tunable`.
        target: the chip to tune for, "v6e" for example; default: the one JAX uses. A
            TPU need not be here: candidates are then compared by libtpu's estimates.
        limit: seconds that a kernel may take to compile and run once.
        workers: processes that compile; default: one per core. 0: this one, where
            nothing guards against a kernel that does not end.
        tolerance: relative difference from the default configuration's result that is
            accepted; default: by dtype.
        share: how many of a space's configurations are compiled at most; 1: all.
        again: search even if it is known what is best.
        keep: write what is found to the user's file of configurations.
        progress: show a line with progress; default: on a terminal.

    Returns:
        A function of the arguments to tune with (arrays, or `jax.ShapeDtypeStruct`s,
        for which random numbers and zeros are taken). It gives a `Tuned`; calling that
        calls the function with what was found. Ctrl-C ends the search and gives what
        was found by then.

    Raises:
        SpecError: the function has nothing to tune, or the chip is not here.

    Example:
        `step = pl.autotune(step)(params, batch)`
    """
    count = (os.cpu_count() or 1) if workers is None else workers
    _check("limit", limit, limit > 0, "seconds, more than 0")
    _check("workers", workers, count >= 0, "how many processes, 0 or more")
    _check("share", share, 0 < share <= 1, "a number above 0 and up to 1")
    _check("tolerance", tolerance, (tolerance or 0) >= 0, "0 or more, or None")
    if not callable(function):
        raise KernelTypeError(
            "pl.autotune: there is no function to tune",
            [("is of type", type(function).__name__)],
            user_location(),
            fix="pl.autotune(f)(*args), not pl.autotune(f(*args))",
        )
    if space is not None:
        function = declared(function, space)

    def tune(*args: Any, **kwargs: Any) -> Tuned:
        from pallasite.tune.tuner import Options, Tuner

        options = Options(limit, count, tolerance, share, again, keep, progress)
        return Tuner(function, Arguments(args, kwargs), target, options).tune()

    return tune


def _check(name: str, value: Any, is_right: bool, fix: str) -> None:
    if not is_right:
        raise SpecError(
            f"pl.autotune: {name} is {value}", at=user_location(), fix=f"pass {fix}"
        )
