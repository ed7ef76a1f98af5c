"""`pl.explain(f)(*args)`: every kernel of a function, what runs it, and how well.

One report per kernel call (`report.py`): backend, grid, traffic, what the passes did,
the chip's bound and the measured time, and what would make it faster. `timing.py` makes
the reports.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pallasite import config
from pallasite.errors import SpecError
from pallasite.ir.nodes import Loc
from pallasite.language.trace import shorten, user_location
from pallasite.primitive import Site, sites_in
from pallasite.target import Named

if TYPE_CHECKING:
    from pallasite.tools.report import Report


Trace = Callable[[], Sequence[Site]]  # the kernel calls of a function


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


def kernels_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Site]:
    """The kernel calls of a function; it must have at least one."""
    sites = sites_in(function, *args, **kwargs)
    if not sites:
        name = getattr(function, "__name__", repr(function))
        raise SpecError(
            f"'{name}' calls no kernel",
            at=user_location() or _definition(function),
            fix="pass a function that calls pl.pallas_call(...)(...)",
        )
    return sites


def traced_for(target: Named, trace: Trace) -> Sequence[Site]:
    """The kernel calls of a function as it is traced for a target.

    `pallasite.kernels` and backward kernels choose blocks by the chip.
    """
    with config.override(target=target.name):
        return trace()


def _definition(function: Callable[..., Any]) -> Loc | None:
    """Where a function is defined, if no line calls it (in a command)."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    return Loc(shorten(code.co_filename), code.co_firstlineno, code.co_name)
