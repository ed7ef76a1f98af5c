"""`pl.tunable`: a function whose keyword arguments the tuner may choose."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pallasite.errors import SpecError
from pallasite.language.spec_trees import is_shaped
from pallasite.language.trace import user_location
from pallasite.tune import choices
from pallasite.tune.space import Config, Space


def tunable(
    *,
    name: str | None = None,
    allows: Callable[..., bool] | None = None,
    **values: Sequence[Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares which values a function's keyword arguments may have.

    A call that passes none of them uses a tuned configuration for its operands, or
    else the defaults of the function's signature. `pl.autotune(f)(*args)` finds one.

    Args:
        name: the function's name in tables; by default its own name.
        allows: `allows(*args, **config)` says whether a combination of values is valid
            for these arguments.
        values: for each keyword argument, its values, ordered so that neighbours are
            similar.

    Raises:
        SpecError: the function has no such argument, or it has no default or values.

    Example:
        ```
        @pl.tunable(block_m=(64, 128, 256), block_n=(64, 128, 256))
        def matmul(x, y, *, block_m=128, block_n=128): ...
        ```
    """

    return functools.partial(declared, values=values, name=name, allows=allows)


def declared(
    function: Callable[..., Any],
    values: Mapping[str, Sequence[Any]],
    name: str | None = None,
    allows: Callable[..., bool] | None = None,
) -> Callable[..., Any]:
    """The function as `tunable` returns it."""
    default = _defaults(function, values)
    Space(values)  # reports errors now, not when the function is called
    title = name or function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() & default.keys():
            return function(*args, **kwargs)

        def rule(config: Config) -> bool:
            return allows is None or allows(*args, **kwargs, **config)

        site = _site(title, args, kwargs)
        config = choices.choose(site, default, Space(values, rule))
        return function(*args, **kwargs, **config)

    return call


def _defaults(function: Callable[..., Any], values: Mapping[str, Any]):
    if not values:
        raise SpecError(
            f"pl.tunable: no argument of '{function.__name__}' has values",
            at=user_location(),
            fix="pass one with its values: block=(64, 128, 256)",
        )
    parameters = inspect.signature(function).parameters
    for name in values:
        parameter = parameters.get(name)
        if parameter is None or parameter.default is parameter.empty:
            wrong = "has no default" if parameter else "does not exist"
            raise SpecError(
                f"pl.tunable: the argument {name!r} of '{function.__name__}' {wrong}",
                at=user_location(),
                fix=f"declare it in the signature, as in {name}=128",
            )
    return {name: parameters[name].default for name in values}


def _site(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]):
    """The site of a call: arrays by dtype and shape, everything else by its repr."""
    leaves, _ = jax.tree.flatten((args, kwargs))
    arrays = [x for x in leaves if is_shaped(x)]
    others = [_shown(x) for x in leaves if not is_shaped(x)]
    return choices.site_of(name, arrays, {str(n): x for n, x in enumerate(others)})


def _shown(x: Any) -> str:
    # A function's repr contains an address, which differs from run to run.
    return getattr(x, "__qualname__", None) or repr(x)
