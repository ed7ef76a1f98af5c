"""`pl.profile(f)(*args)`: run a function, and see which kernels take the time.

`time_profile.py` has what it gives, `recorded_runs.py` runs and records.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pallasite.tools.explain import kernels_of

if TYPE_CHECKING:
    from pallasite.tools.time_profile import Profile


def profile(
    function: Callable[..., Any], runs: int | None = None
) -> "Callable[..., Profile]":
    """Run a function a few times and take the time of every kernel in it.

    On a CPU machine code records when each thread takes which programs; on a GPU the
    times are those of the device's own profiler.

    Args:
        function: any JAX function that calls kernels, also inside `jit`, `grad`,
            `vmap` or `scan`. It is compiled as one, as `jax.jit` does.
        runs: how often it is run; default: for half a second, 20 times at most.

    Returns:
        A function of the same arguments (arrays, or `jax.ShapeDtypeStruct`s for which
        numbers are made up). It gives a `Profile`: print it, look at its `kernels`,
        `.save("trace.json")` it for Perfetto.

    Raises:
        SpecError: the function calls no kernel.
        UnsupportedError: there is no way to record on this device.

    Example:
        `print(pl.profile(f)(x))`
    """

    def profiled(*args: Any) -> "Profile":
        from pallasite.tools.recorded_runs import run_recorded

        return run_recorded(function, args, kernels_of(function, *args), runs)

    return profiled
