"""The kernel calls of a JAX function: where each is, and how often it runs.

For tools, tests and derivatives; nothing is compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pallasite import jaxcompat
from pallasite.errors import SpecError
from pallasite.ir.nodes import Kernel
from pallasite.language.arguments import Arguments
from pallasite.language.trace import user_location
from pallasite.primitive import Call, call_p, for_platform, parts_of, planned
from pallasite.target import Chip, Host


@dataclass(frozen=True)
class Site:
    """A kernel call and its context in a function.

    Attributes:
        call: the call.
        inside: the control flow around it, outermost first ("scan", "shard_map").
        times: how often one run of the function makes it; None: data-dependent.
        sources: per operand, the first operand that is the same array.
        split: for one of the kernels that a call is run as: of which, and why.
    """

    call: Call
    inside: tuple[str, ...] = ()
    times: int | None = 1
    sources: tuple[int, ...] = ()
    split: str = ""


def in_parts(site: Site, platform: str, chip: Chip | Host | None) -> list[Site]:
    """The kernels that a call is run as on a chip: itself, or those of its parts."""
    call = for_platform(site.call, platform)
    found = planned(call, platform, chip=chip if isinstance(chip, Chip) else None)
    if found.program is None:
        return [site]
    parts = parts_of(call, found.program)
    whole = f"{len(parts)} of {call.kernel.name}"
    return [
        Site(part, site.inside, site.times, split=f"kernel {n} of {whole}: {found.why}")
        for n, part in enumerate(parts, 1)
    ]


_NOT_CONTROL = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call")
# Primitives that stand for functions: maps parameters to them. `autodiff` adds some.
MEANINGS: dict[Any, Callable[..., Callable[..., Any]]] = {}


def jaxprs_inside(eqn: Any) -> list[Any]:
    """The jaxprs in an equation's parameters, or what it is lowered to."""
    meaning = MEANINGS.get(eqn.primitive)
    if meaning is None:
        return list(jaxcompat.jaxprs_in_params(eqn.params))
    operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return [jax.make_jaxpr(meaning(**eqn.params))(*operands)]


def sites_in(fn: Any, *args: Any, **kwargs: Any) -> list[Site]:
    """The kernel calls of a JAX function, in order, and the context of each.

    Arguments that are not arrays are passed as they are.
    """
    if not callable(fn):
        raise SpecError(
            f"a JAX function is needed, not {type(fn).__name__}",
            at=user_location(),
            fix="pass the function, and its arguments in a second call: "
            "pl.explain(f)(x)",
        )
    given = Arguments(args, kwargs)
    return sites_of_jaxpr(jax.make_jaxpr(given.of_arrays(fn))(*given.arrays))


def sites_of_jaxpr(jaxpr: Any) -> list[Site]:
    """The kernel calls in a traced function, in order, and the context of each."""
    found: list[Site] = []

    def visit(jaxpr: Any, inside: tuple[str, ...], times: int | None) -> None:
        for eqn in jaxcompat.opened(jaxpr)[0].eqns:
            if eqn.primitive is call_p:
                first = [eqn.invars.index(v) for v in eqn.invars]
                found.append(Site(eqn.params["call"], inside, times, tuple(first)))
            name, rounds = eqn.primitive.name, times
            if name == "scan" and times is not None:
                rounds = times * eqn.params["length"]
            elif name == "while":
                rounds = None
            is_control = name not in _NOT_CONTROL and eqn.primitive not in MEANINGS
            around = (*inside, name) if is_control else inside
            for inner in jaxprs_inside(eqn):
                visit(inner, around, rounds)

    visit(jaxpr, (), 1)
    return found


def calls_in(fn: Any, *args: Any, **kwargs: Any) -> list[Call]:
    """The kernel calls of a JAX function, in order."""
    return [site.call for site in sites_in(fn, *args, **kwargs)]


def kernels_in(fn: Any, *args: Any) -> list[Kernel]:
    """The kernels a JAX function calls, in order (for tests, dumps and tools)."""
    return [call.kernel for call in calls_in(fn, *args)]
