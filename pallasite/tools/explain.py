"""`pl.explain(f)(*args)`: every kernel of a function, what runs it, and how well.

One report per kernel call (`report.py`): backend, grid, traffic, what the passes did,
the chip's bound and the time taken, and what would make it faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from pallasite import config
from pallasite.errors import SpecError
from pallasite.language.trace import user_location
from pallasite.primitive import Site, sites_in
from pallasite.target import Named, Tpu, chip_of_device, measured, named
from pallasite.target.names import of_chip
from pallasite.tools.analysis import Analysis, analyse, bound_of
from pallasite.tools.measure import cannot_measure, measure
from pallasite.tools.report import Report


def explain(
    function: Callable[..., Any],
    target: str | Sequence[str] | None = None,
    measure: bool | None = None,
) -> Callable[..., Report]:
    """See what runs the kernels of a function, what they cost and what limits them.

    Args:
        function: any JAX function that calls kernels, also inside `jit`, `grad`,
            `vmap`, `scan` or `shard_map`.
        target: "cpu", "tpu:v6e", "gpu:h200" and so on, or several; default: this
            computer.
        measure: run each kernel, with operands made up, and take the time; default:
            on this computer only. For a TPU that is not here its compiler's estimate
            is asked for instead, where libtpu is installed.

    Returns:
        A function of the same arguments (arrays or `jax.ShapeDtypeStruct`s). It gives
        a `Report`: print it, or look at its `kernels`.

    Raises:
        SpecError: the function calls no kernel, or a target is not known.

    Example:
        `print(pl.explain(f)(x))`
    """
    wanted = [target] if isinstance(target, str) else target

    def explained(*args: Any) -> Report:
        targets = [named(each) for each in wanted] if wanted else [this_computer()]
        sites = kernels_of(function, *args)
        found = [_one(site, t, measure) for t in targets for site in sites]
        return Report(tuple(each.report for each in found))

    return explained


def kernels_of(function: Callable[..., Any], *args: Any) -> list[Site]:
    """The kernel calls of a function, of which it must have one."""
    sites = sites_in(function, *args)
    if not sites:
        name = getattr(function, "__name__", repr(function))
        raise SpecError(
            f"'{name}' calls no kernel",
            at=user_location(),
            fix="give a function that calls pl.pallas_call(...)(...)",
        )
    return sites


def this_computer() -> Named:
    """The target of the knob, else the device that JAX uses."""
    if config.get("target"):
        return named(config.get("target"))
    device = jax.devices()[0]
    chip = chip_of_device(device.device_kind)
    return named("cpu") if chip is None else of_chip(chip)


def is_here(target: Named) -> bool:
    """Whether JAX sees such a device."""
    if target.platform == "cpu":
        return jax.default_backend() == "cpu"
    try:
        devices = jax.devices(target.platform)
    except RuntimeError:
        return False
    return any(chip_of_device(d.device_kind) is target.chip for d in devices)


def _one(site: Site, target: Named, wanted: bool | None) -> Analysis:
    found = analyse(site, target)
    here = is_here(target)
    if here and wanted is not False:
        return _measured(found)
    if isinstance(target.chip, Tpu) and wanted is None:
        from pallasite.tools.check import estimated, has_libtpu

        if not has_libtpu():
            return found.with_report(note="libtpu is not installed: no estimate")
        (found,) = estimated([found])
    return found


def _measured(found: Analysis) -> Analysis:
    why_not = cannot_measure(found.site.call)
    if why_not:
        return found.with_report(note=why_not)
    seconds = measure(found.site.call)
    bound = found.report.bound
    if bound is not None and seconds < bound.seconds:
        # The chip did better than its rates: they were measured while it was busy.
        measured.measure_again()
        _, bound, _ = bound_of(found.site, found.site.call.kernel, found.target)
    found = found.with_report(measured=seconds, bound=bound)
    if found.facts is not None and bound is not None:
        found = replace(found, facts=replace(found.facts, bound=bound))
    return found.with_hints()
