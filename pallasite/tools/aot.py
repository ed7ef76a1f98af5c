"""`pl.aot(f, *args).compile("tpu:v6e")`: compiles kernels for chips not present.

`check.py` implements it; `pallasite check` is the same as a command.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pallasite.sites import Site
from pallasite.tools.traces import Trace, kernels_of, traced_for

if TYPE_CHECKING:
    from pallasite.tools.report import Report


@dataclass(frozen=True)
class Aot:
    """The kernels of a function, to compile for chips that need not be present."""

    trace: Trace

    @property
    def sites(self) -> tuple[Site, ...]:
        """The kernel calls, as they are traced for this computer."""
        return tuple(self.trace())

    def compile(
        self,
        *targets: str,
        dump: str | Path | None = None,
        timeout: float = 600,
        progress: Callable[[str], None] | None = None,
    ) -> "Report":
        """Compile all kernels for each target.

        Args:
            targets: "tpu:v6e", "gpu:h200", "cpu" and so on.
            dump: a folder for the text of every stage and libtpu's dumps.
            timeout: seconds for libtpu to compile one kernel.
            progress: called with a line of text at each event.

        Returns:
            One report per target and kernel.

        Raises:
            SpecError: a target is not known.
        """
        from pallasite.target import named
        from pallasite.tools.check import compile_sites
        from pallasite.tools.report import Report

        found = []
        for target in [named(each) for each in targets]:
            folder = Path(dump) / target.name.replace(":", "-") if dump else None
            sites = traced_for(target, self.trace)
            found += compile_sites(sites, target, folder, timeout, progress)
        return Report(tuple(found))


def aot(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Aot:
    """The kernels of a function, to compile ahead of time for any chip.

    Args:
        function: any JAX function that calls kernels.
        args, kwargs: arrays or `jax.ShapeDtypeStruct`s; anything else is passed to
            `function` as it is.

    Returns:
        An `Aot`, whose `compile("tpu:v6e")` returns a report. Nothing is run.

    Raises:
        SpecError: the function calls no kernel.

    Example:
        `print(pl.aot(f, x).compile("tpu:v5e", "tpu:v6e"))`
    """
    return Aot(partial(kernels_of, function, *args, **kwargs))
