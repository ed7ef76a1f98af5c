"""`pl.autotune(f)(*args)`: finds good configurations for all kernels in a function.

`tuner.py` does the work; it is loaded only when something is tuned.
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
        function: any JAX function: one kernel, or a whole training step. Its calls of
            `pallasite.kernels` and of functions declared by `pl.tunable` are tuned,
            unless they pass a configuration.
        space: values of the function's own keyword arguments, as for `pl.tunable`.
        target: the chip to tune for, such as "v6e"; default: the one JAX uses. A TPU
            need not be present: candidates are then compared by libtpu's estimates.
        limit: seconds that a kernel may take to compile and run once.
        workers: processes that compile; default: one per core. 0: this process, where
            nothing guards against a kernel that does not terminate.
        tolerance: accepted relative difference from the default configuration's
            result; default: by dtype.
        share: the largest fraction of a space's configurations to compile, at least
            four of them; 1: all.
        again: search even if the best configuration is already known.
        keep: whether to write the results to the user's file of configurations.
        progress: whether to show a progress line; default: on a terminal.

    Returns:
        A function of the arguments to tune with (arrays, or `jax.ShapeDtypeStruct`s,
        which get random floats and zero integers). It returns a `Tuned`, which calls
        the function with the configurations found. Ctrl-C ends the search and returns
        what has been found so far.

    Raises:
        SpecError: the function has nothing to tune, or the chip is not present.

    Example:
        `step = pl.autotune(step)(params, batch)`
    """
    count = (os.cpu_count() or 1) if workers is None else workers
    _check("limit", limit, limit > 0, "seconds, more than 0")
    _check("workers", workers, count >= 0, "how many processes, 0 or more")
    _check("share", share, 0 < share <= 1, "a number above 0 and up to 1")
    is_number = isinstance(tolerance, int | float | None)
    is_right = is_number and (tolerance or 0) >= 0
    _check("tolerance", tolerance, is_right, "0 or more, or None")
    if not callable(function):
        raise KernelTypeError(
            "pl.autotune needs a function",
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
