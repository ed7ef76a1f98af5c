"""A mixture of experts: which experts a token goes to, and the experts' layers.

Tokens are sorted by expert and experts are grouped matmuls, so no token is dropped or
padded. Sorting and recombining are gathers, left to XLA.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallasite.errors import KernelTypeError
from pallasite.kernels import common
from pallasite.kernels.grouped_matmul import grouped_matmul
from pallasite.kernels.matmul import MatmulConfig
from pallasite.kernels.ordering import top_k as top_k_rows
from pallasite.kernels.softmax import softmax


class Routing(NamedTuple):
    """Where tokens go: the `k` experts of each, and their weights in its result."""

    weights: jax.Array  # (tokens, k), floating point
    experts: jax.Array  # (tokens, k), int32


def checked_routing(operation: str, routing: Any) -> Routing:
    """Checks that a routing is one, or two arrays in its place."""
    if not isinstance(routing, tuple | list) or len(routing) != 2:
        raise KernelTypeError(
            f"{operation}: routing is not a Routing",
            [("is of type", type(routing).__name__)],
            fix="pass kernels.route(logits, k), or kernels.Routing(weights, experts)",
        )
    for name, x in zip(Routing._fields, routing, strict=True):
        common.check_array(operation, name, x)
    common.check_rank(operation, "experts", routing[1], "tokens, k")
    return Routing(*routing)


def _check_permutation(operation: str, permutation: Any) -> None:
    if not isinstance(permutation, Permutation):
        raise KernelTypeError(
            f"{operation}: permutation is not a Permutation",
            [("is of type", type(permutation).__name__)],
            fix="pass kernels.sort_by_expert(experts, num_experts)",
        )


def route(
    logits: jax.Array,
    top_k: int,
    *,
    normalise: bool = True,
    implementation: common.Implementation = "pallasite",
) -> Routing:
    """The `top_k` experts of each token, by the softmax of its logits.

    Args:
        logits: (tokens, experts), floating point.
        normalise: whether a token's weights sum to 1; else they are probabilities.
    """
    _, among = common.check_rank("route", "logits", logits, "tokens, experts")
    common.check_floats("route", logits=logits)
    fix = f"pass a number of experts from 0 to {among}"
    common.check_count("route", "top_k", top_k, 0, fix, most=among)
    how: Any = {"implementation": implementation}
    probabilities = softmax(logits, **how)
    weights, experts = top_k_rows(probabilities, top_k, **how)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(weights, experts)


class Permutation(NamedTuple):
    """Rows sorted by expert.

    Attributes:
        source: (tokens * k,): the token of each sorted row.
        place: (tokens, k): the sorted row of each of a token's choices.
        group_sizes: (experts,): rows per expert.
    """

    source: jax.Array
    place: jax.Array
    group_sizes: jax.Array


def sort_by_expert(experts: jax.Array, num_experts: int) -> Permutation:
    """The permutation that makes all rows of an expert contiguous.

    Args:
        experts: (tokens, k) integers. Rows of experts outside 0 to num_experts - 1
            (those of other devices) come last, in no group.
    """
    tokens, k = common.check_rank("sort_by_expert", "experts", experts, "tokens, k")
    common.check_integers("sort_by_expert", experts=experts)
    fix = "pass how many experts there are; under jit, as a static argument"
    common.check_count("sort_by_expert", "num_experts", num_experts, 0, fix)
    experts = common.as_int32(experts)  # 8 bits need not hold num_experts
    inside = (experts >= 0) & (experts < num_experts)
    flat = jnp.where(inside, experts, num_experts).reshape(-1)
    # By unsigned keys: on a GPU XLA has CUB sort pairs only by these.
    order = jnp.argsort(flat.astype(jnp.uint32), stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    sizes = jnp.bincount(flat, length=num_experts + 1)[:num_experts]
    return Permutation(
        (order // max(k, 1)).astype(jnp.int32),
        place.reshape(tokens, k).astype(jnp.int32),
        sizes.astype(jnp.int32),
    )


def permute(x: jax.Array, permutation: Permutation) -> jax.Array:
    """Tokens (tokens, width) as sorted rows (tokens * k, width)."""
    _check_permutation("permute", permutation)
    _, width = common.check_rank("permute", "x", x, "tokens, width")
    common.check_shape("permute", "x", x, (len(permutation.place), width))
    return jnp.take(x, permutation.source, axis=0)


def unpermute(
    rows: jax.Array, permutation: Permutation, weights: jax.Array
) -> jax.Array:
    """Sorted rows back to tokens: the weighted sum of each token's rows."""
    _check_permutation("unpermute", permutation)
    _, width = common.check_rank("unpermute", "rows", rows, "rows, width")
    common.check_shape("unpermute", "rows", rows, (permutation.place.size, width))
    common.check_real("unpermute", rows=rows, weights=weights)
    common.check_shape("unpermute", "weights", weights, permutation.place.shape)
    wide = common.statistics_dtype(rows.dtype)
    chosen = rows[permutation.place]  # jnp.take gives another rank if empty
    total = jnp.einsum("tkd,tk->td", chosen.astype(wide), weights.astype(wide))
    return total.astype(rows.dtype)


def mixture_of_experts(
    x: jax.Array,
    routing: Routing,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    activation: str = "swish",
    implementation: common.Implementation = "pallasite",
    config: MatmulConfig | None = None,
) -> jax.Array:
    """The sum, over the experts of each token, of weight times expert(token).

    An expert is `(activation(x @ gate[e]) * (x @ up[e])) @ down[e]`.

    Args:
        x: (tokens, width), floating point.
        routing: from `route`, or your own.
        gate, up: (experts, width, hidden).
        down: (experts, hidden, width).

    Returns:
        Like x.
    """
    operation = "mixture_of_experts"
    tokens, width = common.check_rank(operation, "x", x, "tokens, width")
    experts, _, hidden = common.check_rank(
        operation, "up", up, "experts, width, hidden"
    )
    for name, w in {"gate": gate, "up": up}.items():
        common.check_shape(operation, name, w, (experts, width, hidden))
    common.check_shape(operation, "down", down, (experts, hidden, width))
    weights, chosen = checked_routing(operation, routing)
    common.check_shape(operation, "experts", chosen, (tokens, chosen.shape[-1]))
    common.check_shape(operation, "weights", weights, chosen.shape)
    permutation = sort_by_expert(chosen, experts)
    how = {"implementation": implementation, "config": config}
    sizes = permutation.group_sizes
    rows = permute(x, permutation)
    hidden_rows = grouped_matmul(
        rows, up, sizes, gate=gate, activation=activation, **how
    )
    rows = grouped_matmul(hidden_rows, down, sizes, **how)
    return unpermute(rows, permutation, weights)
