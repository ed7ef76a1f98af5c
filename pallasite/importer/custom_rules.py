"""Functions with a derivative of their own (`jax.custom_jvp`, `jax.custom_vjp`) in a
kernel: the IR op `custom` has their code as its region and names their rule.

The rule itself is a JAX function, kept here under a name made from what it computes. So
`op_derivative.py` differentiates the op as it does every other: by asking JAX.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Op

# By name of the rule: the function, or why it cannot be used later on.
_FUNCTIONS: dict[str, Callable[..., Sequence[Any]] | str] = {}
_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {}  # of its operands


def register(call: Callable[..., Sequence[Any]], eqn: Any, jaxpr: Any) -> str:
    """Keep the function that an equation calls; the name of its rule.

    `jaxpr`: the function's code. Functions that compute the same in both directions
    share a name, so that tracing a kernel again gives an equal kernel.
    """
    kept: Callable[..., Sequence[Any]] | str = call
    try:
        content = _content(call, [v.aval for v in eqn.invars])
    except Exception as error:  # only a derivative needs the rule: it complains then
        kept = str(error).splitlines()[0]
        content = f"{jaxpr} {kept}"
    name = jaxcompat.function_name(jaxpr)
    rule = f"{name}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    _FUNCTIONS.setdefault(rule, kept)
    _SHAPES[rule] = tuple(tuple(v.aval.shape) for v in eqn.invars)
    return rule


def traced_shapes(op: Op) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of operands for which a `custom` op's function was traced."""
    return _SHAPES.get(op.attrs["rule"])


def _content(call: Callable, avals: Sequence[Any]) -> str:
    """The function and its derivative, printed, with the constants they use."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]

    def both(*operands: Any) -> Any:
        floats = [x for x in operands if _is_float(x)]
        results, pull = jax.vjp(lambda *some: moving(operands, some), *floats)
        return call(*operands), pull(results)

    def moving(operands: Sequence[Any], some: Sequence[Any]) -> list[Any]:
        pending = iter(some)
        results = call(*(next(pending) if _is_float(x) else x for x in operands))
        return [x for x in results if _is_float(x)]

    with jaxcompat.kernel_tracing():
        closed = jax.make_jaxpr(both)(*shapes)
    _, constants = jaxcompat.opened(closed)
    if not all(map(jaxcompat.is_concrete, constants)):
        raise ValueError("it closes over a traced value")
    return f"{closed} {[np.asarray(c).tobytes() for c in constants]}"


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def function(op: Op) -> Callable[..., Sequence[Any]]:
    """The JAX function of a `custom` op, with its rule.

    Raises:
        UnsupportedError: the rule uses values it was not given, or the kernel's text
            came from another process.
    """
    rule = op.attrs["rule"]
    kept = _FUNCTIONS.get(rule, "it was traced in another process")
    if not isinstance(kept, str):
        return kept
    raise UnsupportedError(
        "this custom_jvp or custom_vjp function cannot be differentiated in a kernel",
        [("function", rule.rsplit("_", 1)[0]), ("why", kept)],
        op.loc,
        "pass everything that the function uses as arguments",
    )
