"""Every stage of a kernel as text: `pl.lower(f)(*args).stages()`.

Traces a JAX function, finds its kernels and shows what the passes and a backend turn
them into. Nothing is run. `PALLASITE_DUMP` writes the same texts during normal use.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pallasite import config
from pallasite.backends import base
from pallasite.errors import PerformanceWarning, SpecError
from pallasite.ir.nodes import Kernel
from pallasite.language.trace import user_location
from pallasite.placement import accelerator, own_platform
from pallasite.primitive import Call, Choice, check_platform, choose
from pallasite.sites import Site, calls_in, in_parts
from pallasite.target import named


@dataclass(frozen=True)
class Lowered:
    """The kernel calls of a function, as `pl.lower` found them."""

    calls: tuple[Call, ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels' IR, in the order of the calls."""
        return tuple(call.kernel for call in self.calls)

    def stages(self, backend: str | None = None, kernel: int = 0) -> dict[str, str]:
        """One kernel after each stage, by the stage's name.

        Args:
            backend: "cpu", "triton", "cuda" or "tpu"; by default the call's own, else
                the one for the platform JAX uses.
            kernel: the index in `kernels`.

        Returns:
            Texts in order: "import" (the IR as traced), one per pass (repeated passes
            are numbered: "canonicalize.2"), "scheduled" (the result of the last pass),
            then the backend's stages: for "cpu", "llvm" and "asm".

        Raises:
            UnsupportedError: the backend cannot compile the kernel.
        """
        from pallasite.ir.text import print_kernel

        call = self.calls[kernel]
        chosen = base.get(backend or _default_backend(call))
        options = replace(call.options, debug=True, chip=accelerator(*chosen.platforms))
        made = base.Compiled(chosen, call.kernel, options)
        stages = made.texts()
        texts = {"import": print_kernel(call.kernel, locs=True)}
        for step in made.steps:
            earlier = sum(name.split(".")[0] == step.name for name in texts)
            name = f"{step.name}.{earlier + 1}" if earlier else step.name
            texts[name] = print_kernel(step.kernel, locs=True)
        return texts | stages

    def choice(self, platform: str | None = None, kernel: int = 0) -> Choice:
        """The backend that runs one kernel on a platform, and why.

        Args:
            platform: "cpu", "cuda", "rocm" or "tpu"; by default the one JAX uses.
            kernel: the index in `kernels`.

        Raises:
            UnsupportedError: the backend that the call names cannot run it there.
        """
        call, platform = self.calls[kernel], platform or own_platform()
        check_platform(call, (platform,))
        # How fast it would be there was not asked.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)
            return choose(call, platform)

    def in_parts(self, platform: str | None = None) -> "Lowered":
        """The calls as they run: one call may be several kernels.

        Args:
            platform: "cpu", "cuda", "rocm" or "tpu"; by default the one JAX uses.
        """
        platform = platform or own_platform()
        chip = None
        if config.get("target"):
            found = named(config.get("target"))
            chip = found.chip if found.platform == platform else None
        parts = (in_parts(Site(call), platform, chip) for call in self.calls)
        return Lowered(tuple(site.call for sites in parts for site in sites))

    def __str__(self) -> str:
        return "\n".join(kernel.text for kernel in self.kernels)


def lower(function: Callable[..., Any]) -> Callable[..., Lowered]:
    """See what the kernels in a function are compiled to.

    Args:
        function: any JAX function that calls kernels.

    Returns:
        A function of the same arguments (arrays or `jax.ShapeDtypeStruct`s; anything
        else is passed to `function` as it is). It returns a `Lowered`: `.kernels` and
        `.stages()`.

    Raises:
        SpecError: the function calls no kernel.

    Example:
        `print(pl.lower(f)(x).stages()["llvm"])`
    """

    def lowered(*args: Any, **kwargs: Any) -> Lowered:
        calls = tuple(calls_in(function, *args, **kwargs))
        if not calls:
            name = getattr(function, "__name__", repr(function))
            raise SpecError(
                f"pl.lower: '{name}' calls no kernel",
                at=user_location(),
                fix="pass a function that calls pl.pallas_call(...)(...)",
            )
        return Lowered(calls)

    return lowered


def _default_backend(call: Call) -> str:
    named = call.backend or config.get("backend")
    if named and named != "interpret":
        return named
    platform = own_platform()
    # A backend that is not yet the default can be inspected all the same.
    usable = [name for name in base.names() if platform in base.get(name).platforms]
    return next(iter((*base.defaults(platform, call.kernel), *usable)), "cpu")
