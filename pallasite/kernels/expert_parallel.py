"""`expert_parallel_mixture`: a mixture of experts split across devices.

Each device sends its tokens to the devices of their experts and receives the results,
in two all-to-alls of `capacity` rows per pair of devices. In between, the rows that
arrived are sorted by expert and multiplied by `grouped_matmul`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasite.kernels import common
from pallasite.kernels.devices import Ring
from pallasite.kernels.grouped_matmul import grouped_matmul
from pallasite.kernels.matmul import MatmulConfig
from pallasite.kernels.moe import (
    Routing,
    checked_routing,
    permute,
    sort_by_expert,
    unpermute,
)


def expert_parallel_mixture(
    x: jax.Array,
    routing: Routing,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    axis: str,
    capacity: int | None = None,
    activation: str = "swish",
    implementation: common.Implementation = "pallasite",
    config: MatmulConfig | None = None,
) -> jax.Array:
    """`mixture_of_experts` in `shard_map`; device i has the i-th share of experts.

    Args:
        x: (tokens, width), floating point: this device's tokens.
        routing: of this device's tokens; experts are numbered over all devices. An
            expert number out of range contributes nothing.
        gate, up: (experts / devices, width, hidden): this device's experts.
        down: (experts / devices, hidden, width).
        axis: the mesh axis along which tokens and experts are split.
        capacity: the most rows (a token for one of its experts) that a device sends to
            another. If there are more, the first are sent, in order of expert and then
            of token, and the rest contribute nothing. By default tokens * k, which
            drops none whatever the routing. Each device allocates devices * capacity
            rows.

    Returns:
        Like x.
    """
    operation = "expert_parallel_mixture"
    tokens, width = common.check_rank(operation, "x", x, "tokens, width")
    share, _, hidden = common.check_rank(operation, "up", up, "experts, width, hidden")
    common.check_floats(operation, x=x, gate=gate, up=up, down=down)
    for name, w in {"gate": gate, "up": up}.items():
        common.check_shape(operation, name, w, (share, width, hidden))
    common.check_shape(operation, "down", down, (share, hidden, width))
    weights, chosen = checked_routing(operation, routing)
    common.check_integers(operation, experts=chosen)
    common.check_shape(operation, "experts", chosen, (tokens, chosen.shape[1]))
    common.check_shape(operation, "weights", weights, chosen.shape)
    if capacity is not None:
        fix = f"pass 1 to {chosen.size} (all rows of {tokens} tokens), or None"
        common.check_count(operation, "capacity", capacity, 1, fix)
    ring = Ring.of(operation, axis)
    compute = common.choose(implementation, _exchanged, _plain)
    return compute(
        *ring.varying(x, weights, chosen, gate, up, down),
        ring=ring,
        capacity=min(capacity or chosen.size, chosen.size),
        activation=activation,
        config=config,
    )


class _Sent:
    """Which rows a device sends where: sorted by expert, at most `capacity` to each.

    Attributes:
        permutation: sorts the rows by expert, and so by device.
        sizes: (devices, experts per device): rows sent to each expert.
        first: (devices,): the first sorted row for each device.
        place: (tokens, k): the index of each choice among the rows for its device.
        device: (tokens, k): its destination.
        kept: (tokens, k): whether it is sent.
    """

    def __init__(self, chosen: jax.Array, devices: int, share: int, capacity: int):
        self.permutation = sort_by_expert(chosen, devices * share)
        wanted = self.permutation.group_sizes.reshape(devices, share)
        ends = jnp.minimum(jnp.cumsum(wanted, 1), capacity)
        self.sizes = jnp.diff(ends, axis=1, prepend=0)
        rows = jnp.sum(wanted, 1)
        self.first = jnp.cumsum(rows) - rows
        known = (chosen >= 0) & (chosen < devices * share)
        self.device = jnp.where(known, chosen // share, 0)
        self.place = self.permutation.place - self.first[self.device]
        self.kept = known & (self.place < capacity)


def _layer(rows, sizes, gate, up, down, *, activation, **how: Any):
    """The experts' layers on rows sorted by expert; rows of no expert give zeros."""
    hidden = grouped_matmul(rows, up, sizes, gate=gate, activation=activation, **how)
    return grouped_matmul(hidden, down, sizes, **how)


def _plain(x, weights, chosen, gate, up, down, *, ring, capacity, activation, config):
    """Every device runs its experts on all tokens; a reduce-scatter adds them up."""
    del config  # only kernels have blocks
    share = gate.shape[0]
    kept = _Sent(chosen, ring.size, share, capacity).kept
    weights = jnp.where(kept, weights, 0)
    x, weights, chosen = (
        lax.all_gather(a, ring.axis, tiled=True) for a in (x, weights, chosen)
    )
    permutation = sort_by_expert(chosen - ring.place * share, share)
    rows = permute(x, permutation)
    how: Any = {"implementation": "xla", "activation": activation}
    rows = _layer(rows, permutation.group_sizes, gate, up, down, **how)
    return lax.psum_scatter(
        unpermute(rows, permutation, weights), ring.axis, tiled=True
    )


def _exchanged(
    x, weights, chosen, gate, up, down, *, ring, capacity, activation, config
):
    share, width = gate.shape[0], x.shape[1]
    if not chosen.size:
        return jnp.zeros_like(x)
    sent = _Sent(chosen, ring.size, share, capacity)
    swapped = lambda rows: lax.all_to_all(rows, ring.axis, 0, 0)

    # Rows for each device: (devices, capacity, width), zeros past the last.
    places = jnp.arange(capacity)
    rows = jnp.take(sent.permutation.source, sent.first[:, None] + places, mode="clip")
    is_row = places < jnp.sum(sent.sizes, 1, keepdims=True)
    arrived = swapped(jnp.where(is_row[..., None], jnp.take(x, rows, axis=0), 0))

    # Each sender's rows are sorted by expert: those before an expert's end belong to it
    # or to an earlier expert. Rows past the last end belong to none.
    ends = jnp.cumsum(swapped(sent.sizes), 1)
    experts = jnp.sum(places[:, None] >= ends[:, None], -1)
    order = sort_by_expert(experts.reshape(-1, 1), share)
    found = _layer(
        permute(arrived.reshape(-1, width), order),
        order.group_sizes,
        gate,
        up,
        down,
        activation=activation,
        config=config,
    )
    found = jnp.take(found, order.place.reshape(ring.size, capacity), axis=0)
    returned = swapped(found).reshape(-1, width)

    wide = common.statistics_dtype(x.dtype)
    at = sent.device * capacity + jnp.where(sent.kept, sent.place, 0)
    weights = jnp.where(sent.kept, weights, 0).astype(wide)
    total = jnp.einsum(
        "tkd,tk->td", jnp.take(returned, at, axis=0).astype(wide), weights
    )
    return total.astype(x.dtype)
