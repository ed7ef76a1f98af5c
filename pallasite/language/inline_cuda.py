"""CUDA C++ inside a kernel of warpgroups: `plgpu.inline_cuda`."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, SpecError
from pallasite.language.refs import kernel_primitive
from pallasite.language.trace import trace, user_location

inline_cuda_p = kernel_primitive("inline_cuda", multiple_results=True)
inline_cuda_p.def_effectful_abstract_eval(
    lambda *avals, types, **_: (
        [jax.core.ShapedArray(shape, dtype) for shape, dtype in types],
        {jaxcompat.debug_effect()},
    )
)
# What C++ and the code around the text mean by themselves.
_TAKEN = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t
char32_t class compl const const_cast constexpr continue decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if
inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq
private protected public register reinterpret_cast return short signed sizeof static
static_assert static_cast struct switch template this thread_local throw true try
typedef typeid typename union unsigned using virtual void volatile wchar_t while xor
xor_eq DEVICE EACH
"""
_EXAMPLE = (
    'plgpu.inline_cuda("y = x * x;", dict(x=x), dict(y=jax.ShapeDtypeStruct(x.shape, '
    "x.dtype)), reference=lambda x: x * x)"
)


def inline_cuda(
    text: str,
    operands: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
    *,
    reference: Callable[..., Any] | None = None,
) -> list[jax.Array]:
    """Run CUDA C++ in each thread of the warpgroup, for each element it holds.

    A GPU compiles the text; the emulation and checked mode run `reference` instead.

    Args:
        text: statements, which may hold `asm volatile(...)`. Each operand is a constant
            of its name, and each result a variable that the text assigns to: the number
            itself for scalars, one element for tiles, of the same position in all of
            them. Which thread holds an element is the compiler's choice; a text may run
            for positions past the end of a tile, and its results there are dropped.
            Floats of 16 and 8 bits are their bits (`unsigned short`, `unsigned char`).
        operands: values by name: tiles of one shape, and scalars. Load refs before.
        results: by name, `jax.ShapeDtypeStruct`s of that shape, or scalars, which have
            to be the same in all threads; none if the text only has effects.
        reference: the same as a function of whole operands, passed by name, that
            returns the result, or a sequence of several. Without it the kernel runs on
            GPUs only.

    Returns:
        The results, in the order in which they were named.
    """
    values = {name: jnp.asarray(x) for name, x in (operands or {}).items()}
    types = dict(results or {})
    _check_names(text, values, types)
    _check_shapes(values, types)
    given = tuple((tuple(t.shape), jnp.dtype(t.dtype)) for t in types.values())
    jaxpr = None
    if reference is not None:
        jaxpr = _traced(reference, values, given)
    return inline_cuda_p.bind(
        *values.values(),
        text=text,
        names=(*values, *types),
        types=given,
        jaxpr=jaxpr,
    )


def _check_names(text: str, values: Mapping[str, Any], types: Mapping[str, Any]):
    words = set(re.findall(r"\w+", text))
    for name in (*values, *types):
        problem = None
        if not (name.isidentifier() and name.isascii()) or name in _TAKEN.split():
            problem = f"{name!r} cannot be a name in the text of plgpu.inline_cuda"
        elif name in values and name in types:
            problem = f"{name!r} is both an operand and a result of plgpu.inline_cuda"
        elif name not in words:
            kind = "operand" if name in values else "result"
            problem = f"the text of plgpu.inline_cuda does not name its {kind} {name!r}"
        if problem is not None:
            facts = [("text", text), ("operands", tuple(values)), ("results", [*types])]
            raise SpecError(problem, facts, user_location(), _EXAMPLE)


def _check_shapes(values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    tiles = {x.shape for x in values.values() if x.shape}
    made = {tuple(t.shape) for t in types.values()}
    if len(tiles | made - {()}) > 1 or (tiles and () in made):
        given = [f"{n}: {x.dtype}{list(x.shape)}" for n, x in values.items()]
        wanted = [f"{n}: {t.dtype}{list(t.shape)}" for n, t in types.items()]
        raise KernelTypeError(
            "tiles and results of plgpu.inline_cuda have one shape, that of the tiles",
            [("operands", ", ".join(given)), ("results", ", ".join(wanted))],
            user_location(),
            "broadcast the operands first; reduce a tile before or after the text",
        )


def _traced(
    reference: Callable[..., Any],
    values: Mapping[str, Any],
    types: Sequence[tuple[Any, Any]],
) -> Any:
    """The reference, as code of whole operands."""
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values.values()]
    tree = jax.tree.structure(((), dict.fromkeys(values, 0)))
    order = [list(values).index(name) for name in sorted(values)]

    def call(**named: Any) -> Any:
        found = reference(**named)
        return list(found) if isinstance(found, (list, tuple)) else [found]

    inside = [avals[n] for n in order]  # a dict's leaves are sorted by name
    role = ("reference", getattr(reference, "__name__", "reference"))
    made = trace(call, tree, inside, reference, role=role)
    got = [(tuple(v.aval.shape), jnp.dtype(v.aval.dtype)) for v in made.jaxpr.outvars]
    problem = None
    if made.captured:
        problem = "the reference of plgpu.inline_cuda uses arrays it is not given"
    elif got != list(types):
        problem = "the reference of plgpu.inline_cuda returns other types than results"
    if problem is not None:
        show = lambda kinds: ", ".join(f"{d}{list(s)}" for s, d in kinds)
        facts = [("returns", show(got)), ("results", show(types))]
        fix = "pass what it uses as operands, and .astype what it returns"
        raise KernelTypeError(problem, facts, user_location(), fix)
    invars = [made.jaxpr.invars[order.index(n)] for n in range(len(order))]
    return made.jaxpr.replace(invars=invars)
