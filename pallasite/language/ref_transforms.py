"""vmap and grad rules of the language's own primitives, for use inside a kernel.

JAX's ref primitives have their own rules. Accesses and prints run for one mapped
element after another, which preserves program order. A ref is never mapped or
differentiated: what is read from it is a constant to the derivative.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from pallasite import jaxcompat
from pallasite.language import refs


def _in_sequence(primitive: jaxcompat.Primitive) -> None:
    """vmap as a loop over the mapped elements."""

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        mapped = [n for n, d in enumerate(dims) if d is not None]
        rows = [jnp.moveaxis(args[n], dims[n], 0) for n in mapped]

        def one(values: Sequence[Any]) -> Any:
            whole = list(args)
            for n, value in zip(mapped, values, strict=True):
                whole[n] = value
            return primitive.bind(*whole, **params)

        results = jax.lax.map(one, rows)
        return results, [0] * len(results) if primitive.multiple_results else 0

    batching.primitive_batchers[primitive] = batch


def _promise_for_each(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    return refs.multiple_of_p.bind(*args, **params), dims[0]


def _load_tangent(primals: Sequence[Any], tangents: Sequence[Any], **params: Any):
    """Only `other` carries a derivative."""
    out = refs.masked_load_p.bind(*primals, **params)
    if all(type(t) is ad.Zero for t in tangents):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    _, mask, other = jax.tree.unflatten(params["tree"], primals[1:])
    _, _, tangent = jax.tree.unflatten(params["tree"], tangents[1:])
    if other is None or type(tangent) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, jnp.where(mask, jnp.zeros_like(tangent), tangent)


def _print_tangent(primals: Sequence[Any], tangents: Sequence[Any], **params: Any):
    return refs.debug_print_p.bind(*primals, **params), []


_IN_SEQUENCE = (
    refs.masked_load_p,
    refs.masked_swap_p,
    refs.atomic_rmw_p,
    refs.atomic_cas_p,
    refs.debug_print_p,
    refs.debug_check_p,
)


def register() -> None:
    """Registers the rules above with JAX; `calls/pallas_call.py` calls it once."""
    for primitive in _IN_SEQUENCE:
        _in_sequence(primitive)
    batching.primitive_batchers[refs.multiple_of_p] = _promise_for_each
    ad.primitive_jvps[refs.masked_load_p] = _load_tangent
    ad.primitive_jvps[refs.debug_print_p] = _print_tangent
