"""`pl.explain(f)(*args)`: every kernel of a function, what runs it, and how well.

One report per kernel call (`report.py`): backend, grid, traffic, what the passes did,
the chip's bound and the measured time, and what would make it faster. `timing.py` makes
the reports.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pallasite.tools.traces import kernels_of

if TYPE_CHECKING:
    from pallasite.tools.report import Report


def explain(
    function: Callable[..., Any],
    target: str | Sequence[str] | None = None,
    measure: bool | None = None,
) -> "Callable[..., Report]":
    """See what runs the kernels of a function, what they cost and what limits them.

    Args:
        function: any JAX function that calls kernels, also inside `jit`, `grad`,
            `vmap`, `scan` or `shard_map`.
        target: "cpu", "tpu:v6e", "gpu:h200" and so on, or several; default: this
            computer.
        measure: whether to run and time each kernel, with synthetic operands; default:
            on this computer only. For a TPU that is not present, its compiler's
            estimate is used instead, if libtpu is installed.

    Returns:
        A function of the same arguments (arrays or `jax.ShapeDtypeStruct`s; anything
        else is passed to `function` as it is). It returns a `Report`: print it, or
        look at its `kernels`.

    Raises:
        SpecError: the function calls no kernel, or a target is not known.

    Example:
        `print(pl.explain(f)(x))`
    """
    is_list = target is None or isinstance(target, list | tuple)
    wanted: Any = target if is_list else [target]

    def explained(*args: Any, **kwargs: Any) -> "Report":
        from pallasite.tools.timing import explain_sites

        trace = partial(kernels_of, function, *args, **kwargs)
        return explain_sites(trace, wanted, measure)

    return explained
