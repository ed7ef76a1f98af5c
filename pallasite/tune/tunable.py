"""`pl.tunable`: a function whose keyword arguments the tuner may choose."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import jax

from pallasite.errors import SpecError
from pallasite.language.spec_trees import is_shaped
from pallasite.language.trace import user_location
from pallasite.tune import choices
from pallasite.tune.space import Config, Space
from pallasite.tune.table import SOURCE


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
    title, source = name or function.__name__, source_of(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() & default.keys():
            return function(*args, **kwargs)

        def rule(config: Config) -> bool:
            return allows is None or allows(*args, **kwargs, **config)

        site = _site(title, source, args, kwargs)
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


def source_of(function: Callable[..., Any]) -> str:
    """A hash of a function's text and of the functions of its module that it names.

    Another function of the same name, or this one after a change, is not the function
    that was tuned.
    """
    function, texts, seen = inspect.unwrap(function), [], set[Any]()
    module = getattr(function, "__module__", None)
    waiting: list[Any] = [function]
    while waiting:
        each = waiting.pop()
        code = getattr(each, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        try:
            texts.append(inspect.getsource(each))
        except (OSError, TypeError):  # made by exec, or in an interactive session
            texts.append(_shape_of(code))
        known = each.__globals__
        named = [known.get(name) for name in sorted(_names(code))]
        waiting += [x for x in named if getattr(x, "__module__", None) == module]
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


def _shape_of(code: CodeType) -> str:
    """A function's instructions, names and constants, without places and addresses."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    plain = [c for c in code.co_consts if not isinstance(c, CodeType)]
    own = f"{code.co_code!r} {code.co_names} {code.co_varnames} {plain}"
    return " ".join([own, *map(_shape_of, inner)])


def _names(code: CodeType) -> set[str]:
    """The global names that a function's code and the functions in it use."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _site(
    name: str, source: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> choices.Site:
    """The site of a call: arrays by dtype and shape, everything else by its repr."""
    leaves, _ = jax.tree.flatten((args, kwargs))
    arrays = [x for x in leaves if is_shaped(x)]
    others = [_shown(x) for x in leaves if not is_shaped(x)]
    options = {str(n): x for n, x in enumerate(others)}
    return choices.site_of(name, arrays, {**options, SOURCE: source})


def _shown(x: Any) -> str:
    # A function's repr contains an address, which differs from run to run.
    return getattr(x, "__qualname__", None) or repr(x)
