"""`pl.profile(f)(*args)`: run a function, and see which kernels take the time.

`time_profile.py` defines the result, `recorded_runs.py` runs and records.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pallasite.errors import SpecError
from pallasite.language.arguments import Arguments
from pallasite.language.trace import user_location
from pallasite.tools.traces import kernels_of

if TYPE_CHECKING:
    from pallasite.tools.time_profile import Profile


def profile(
    function: Callable[..., Any], runs: int | None = None
) -> "Callable[..., Profile]":
    """Run a function a few times and time every kernel in it.

    On a CPU the machine code records which programs each thread runs, and when; on a
    GPU the times come from the device's own profiler.

    Args:
        function: any JAX function that calls kernels, also inside `jit`, `grad`,
            `vmap` or `scan`. It is compiled as a whole, as by `jax.jit`.
        runs: how often to run it; default: for half a second, at most 20 times.

    Returns:
        A function of the same arguments (arrays, or `jax.ShapeDtypeStruct`s, which get
        synthetic values; anything else is passed to `function` as it is). It returns a
        `Profile`: print it, look at its `kernels`, or `.save("trace.json")` it for
        Perfetto.

    Raises:
        SpecError: the function calls no kernel, or `runs` is not a valid number.
        UnsupportedError: recording is not possible on this device.

    Example:
        `print(pl.profile(f)(x))`
    """
    is_count = isinstance(runs, int) and not isinstance(runs, bool) and runs > 0
    if runs is not None and not is_count:
        raise SpecError(
            f"pl.profile: runs={runs!r} is not a number of runs",
            at=user_location(),
            fix="pass an integer of 1 or more, or remove it",
        )

    def profiled(*args: Any, **kwargs: Any) -> "Profile":
        from pallasite.tools.recorded_runs import run_recorded

        sites = kernels_of(function, *args, **kwargs)
        return run_recorded(function, Arguments(args, kwargs), sites, runs)

    return profiled
