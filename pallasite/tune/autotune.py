"""`pl.autotune(f)(*args)`: finds good configurations of all kernels in a function.

What it gives is here; `tuner.py`, which is loaded when something is tuned, finds it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pallasite.errors import SpecError
from pallasite.tune import choices
from pallasite.tune.table import Config, Entry, Table
from pallasite.tune.tunable import tunable


@dataclass(frozen=True)
class Found:
    """What became of one site."""

    entry: Entry
    default: Config
    compiled: int  # candidates that were compiled; 0: it was known already
    considered: int  # the size of its space
    refused: tuple[tuple[str, str], ...] = ()  # configurations, and why not


@dataclass
class Tuned:
    """What a tuner found. Calling it calls the function with that.

    Attributes:
        function: what was tuned.
        sites: what was found, site by site.
        unit: of the times in it: "s", or "cycles" on a TPU that is not here.
        interrupted: whether Ctrl-C ended the search.
    """

    function: Callable[..., Any]
    sites: list[Found] = field(default_factory=list)
    unit: str = "s"
    interrupted: bool = False

    @property
    def table(self) -> Table:
        return self._table

    def __post_init__(self) -> None:
        self._table = Table()

    def add(self, found: Found) -> None:
        self.sites.append(found)
        self._table = self._table.with_entry(found.entry)

    @property
    def compiled(self) -> int:
        """How many candidates were compiled, over all sites."""
        return sum(found.compiled for found in self.sites)

    def config(self, kernel: str) -> Config:
        """The configuration found for the first site of a kernel."""
        for found in self.sites:
            if found.entry.site.kernel == kernel:
                return dict(found.entry.config)
        known = sorted({found.entry.site.kernel for found in self.sites})
        raise SpecError(
            f"no site of the kernel {kernel!r} was tuned",
            [("tuned", ", ".join(known) or "none")],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was found to a file for `pl.configs`."""
        self.table.save(path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with choices.configs(self.table):
            return self.function(*args, **kwargs)

    def __str__(self) -> str:
        from pallasite.tune.progress import shown_time

        lines = []
        for found in self.sites:
            entry = found.entry
            values = ", ".join(f"{k}={v}" for k, v in entry.config.items())
            new, old = (
                shown_time(x, self.unit) for x in (entry.seconds, entry.default_seconds)
            )
            work = f"{found.compiled} of {found.considered} compiled"
            lines.append(f"{entry.site}\n  {values}: {new}, default {old} ({work})")
        return "\n".join(lines)


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
    if space is not None:
        function = tunable(**space)(function)

    def tune(*args: Any) -> Tuned:
        from pallasite.tune.tuner import Options, Tuner

        count = (os.cpu_count() or 1) if workers is None else workers
        options = Options(limit, count, tolerance, share, again, keep, progress)
        return Tuner(function, args, target, options).tune()

    return tune
