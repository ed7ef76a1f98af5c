"""The tuner's result: `Tuned`, a function with the configurations found for it."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pallasite.errors import SpecError
from pallasite.tune import choices
from pallasite.tune.table import Config, Entry, Table


@dataclass(frozen=True)
class Found:
    """The outcome for one site."""

    entry: Entry
    default: Config
    compiled: int  # candidates compiled; 0: it was already known
    considered: int  # the size of its space
    refused: tuple[tuple[str, str], ...] = ()  # configurations rejected, and why
    noise: float = 0.0  # the spread of times, where it is too large to trust them


@dataclass(eq=False)  # hashed by identity, as `jax.jit` requires
class Tuned:
    """What a tuner found. Calling it calls the function with those configurations.

    Attributes:
        function: what was tuned.
        sites: what was found, site by site.
        unit: the unit of times: "s", or "cycles" for a TPU that is not present.
        interrupted: whether Ctrl-C ended the search.
        table: what was found, for `pl.configs`.
    """

    function: Callable[..., Any]
    sites: list[Found] = field(default_factory=list)
    unit: str = "s"
    interrupted: bool = False
    table: Table = field(default_factory=Table)

    def add(self, found: Found) -> None:
        self.sites.append(found)
        self.table = self.table.with_entry(found.entry)

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
        try:
            self.table.save(path)
        except OSError as error:
            raise SpecError(
                "configuration file cannot be written",
                [("file", path), ("error", error)],
                fix="save(file) in a folder that exists and is writable",
            ) from None

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
            if found.noise:
                lines.append(f"  not to be trusted: times varied by {found.noise:.0%}")
            for config, reason in found.refused:
                lines.append(f"  rejected {config}: {reason.splitlines()[0]}")
        return "\n".join(lines)
