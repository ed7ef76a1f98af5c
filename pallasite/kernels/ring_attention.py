"""`ring_attention`: attention over sequences whose parts are on several devices.

Every device keeps its queries; keys and values travel around the ring, and what a
device computes of each part is joined by the log-sum-exps. Parts that the mask rules
out are skipped whole. The gradient is a second ring, on which the cotangents of keys
and values travel with them.
"""

import dataclasses
import functools
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite import jaxcompat
from pallasite.kernels import common, masks
from pallasite.kernels.attention import AttentionConfig, attention
from pallasite.kernels.devices import Ring, check_divides

# How a sequence is divided among n devices:
# "contiguous": device i has the i-th of n parts.
# "zigzag": device i has the i-th and the i-th last of 2 n parts, so that all devices
# have the same work under a causal mask.
Order = Literal["contiguous", "zigzag"]


def zigzag_order(length: int, devices: int) -> np.ndarray:
    """The positions of a sequence in the order in which devices have them.

    `x[:, zigzag_order(length, devices)]`, sharded evenly, is what `ring_attention`
    takes with order="zigzag"; `argsort` of it is the way back.
    """
    for name, value, least in (("length", length, 0), ("devices", devices, 1)):
        fix = f"pass an integer, {least} or more"
        common.check_count("zigzag_order", name, value, least, fix)
    positions = np.arange(length)
    check_divides("zigzag_order", "a sequence", positions, 0, 2 * devices, "parts")
    parts = np.split(positions, 2 * devices)
    return np.concatenate([np.r_[parts[n], parts[-1 - n]] for n in range(devices)])


@overload
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: masks.Mask | None = ...,
    *,
    axis: str,
    order: Order = ...,
    scale: float | None = ...,
    soft_cap: float | None = ...,
    return_log_sum_exp: Literal[False] = ...,
    implementation: common.Implementation = ...,
    config: AttentionConfig | None = ...,
) -> jax.Array: ...
@overload
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: masks.Mask | None = ...,
    *,
    axis: str,
    order: Order = ...,
    scale: float | None = ...,
    soft_cap: float | None = ...,
    return_log_sum_exp: Literal[True],
    implementation: common.Implementation = ...,
    config: AttentionConfig | None = ...,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: masks.Mask | None = ...,
    *,
    axis: str,
    order: Order = ...,
    scale: float | None = ...,
    soft_cap: float | None = ...,
    return_log_sum_exp: bool = ...,
    implementation: common.Implementation = ...,
    config: AttentionConfig | None = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: masks.Mask | None = None,
    *,
    axis: str,
    order: Order = "contiguous",
    scale: float | None = None,
    soft_cap: float | None = None,
    return_log_sum_exp: bool = False,
    implementation: common.Implementation = "pallasite",
    config: AttentionConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention inside `shard_map`, as `attention` of one device.

    Each device sends its keys and values, and in the gradient their cotangents as
    float32, devices - 1 times.

    Args:
        query: (batch, queries, heads, width): this device's part of the sequence.
        key: (batch, keys, kv_heads, width), and
        value: (batch, keys, kv_heads, value_width), too.
        mask: which pairs are allowed, by positions in the whole sequence. Ids of
            `Segments` are this device's, lengths of `Prefix` those of whole sequences.
        axis: the mesh axis along which devices have the parts.
        order: which positions a device has: "contiguous", or "zigzag" for equal work
            under causal masks (`zigzag_order`).
        scale, soft_cap, return_log_sum_exp, config: those of `attention`.

    Returns:
        (batch, queries, heads, value_width) in query's dtype.
    """
    operation = "ring_attention"
    for name, x in {"query": query, "key": key, "value": value}.items():
        common.check_rank(operation, name, x, "batch, length, heads, width")
    common.check_option(operation, "order", order, get_args(Order))
    if scale is not None:
        common.check_numbers(operation, scale=scale)
    common.check_soft_cap(operation, soft_cap)
    if mask is not None:
        masks.check_mask(operation, mask)
    ring = Ring.of(operation, axis)
    parts = 2 if order == "zigzag" else 1
    for name, x in {"query": query, "key": key}.items():
        check_divides(operation, name, x, 1, parts, "parts of order='zigzag'")
    given: masks.Mask = masks.Everything() if mask is None else mask
    given = jax.tree.map(jnp.asarray, given)
    masks.checked_arrays(
        masks.Shifted(given), query.shape[0], query.shape[1], key.shape[1]
    )
    how = _How(ring, order, scale, soft_cap, config)
    compute = common.choose(implementation, _by_ring, _plain)
    out, log_sum_exp = compute(query, key, value, mask=given, how=how)
    return (out, log_sum_exp) if return_log_sum_exp else out


@dataclasses.dataclass(frozen=True)
class _How:
    """What decides the code besides the operands."""

    ring: Ring
    order: Order
    scale: float | None
    soft_cap: float | None
    config: AttentionConfig | None

    @property
    def parts(self) -> int:
        """Of the sequence, on each device."""
        return 2 if self.order == "zigzag" else 1

    def start(self, device: Any, part: int, size: int) -> Any:
        """The position of the first of a device's `size` elements of a part."""
        if part == 0:
            return device * size
        return (2 * self.ring.size - 1 - device) * size

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: masks.Mask,
        implementation: common.Implementation = "pallasite",
    ) -> Any:
        """The result and log-sum-exp of one device's queries and keys."""
        return attention(
            query,
            key,
            value,
            mask=mask,
            scale=self.scale,
            soft_cap=self.soft_cap,
            return_log_sum_exp=True,
            implementation=implementation,
            config=self.config,
        )


def _parts(x: Any, count: int, dimension: int = 1) -> list[Any]:
    return jnp.split(x, count, dimension) if count > 1 else [x]


# --- plain ---


def _plain(query, key, value, *, mask, how: _How):
    """With everyone's keys and values gathered, in the order of the sequence."""
    ring = how.ring
    devices = [
        (device, part) for part in range(how.parts) for device in range(ring.size)
    ]
    in_order = sorted(devices, key=lambda at: how.start(*at, 1))

    def everyone(x):
        gathered = lax.all_gather(x, ring.axis)
        by_part = _parts(gathered, how.parts, 2)
        return jnp.concatenate([by_part[p][d] for d, p in in_order], 1)

    key, value = everyone(key), everyone(value)
    sides = [side for _, side, _ in mask.arrays()]
    leaves, tree = jax.tree.flatten(mask)
    leaves = [
        everyone(x) if s == "key" else x for x, s in zip(leaves, sides, strict=True)
    ]
    found = []
    for part, own in enumerate(_parts(query, how.parts)):
        ids = [
            _parts(x, how.parts)[part] if side == "query" else x
            for x, side in zip(leaves, sides, strict=True)
        ]
        start = how.start(ring.place, part, own.shape[1])
        here = masks.Shifted(tree.unflatten(ids), start, 0)
        found.append(how.attend(own, key, value, here, "xla"))
    outs, log_sum_exps = zip(*found, strict=True)
    return jnp.concatenate(outs, 1), jnp.concatenate(log_sum_exps, 2)


# --- the ring ---


def _by_ring(query, key, value, *, mask, how: _How):
    leaves, tree = jax.tree.flatten((query, key, value, mask))
    return _ring(*tree.unflatten(how.ring.varying(*leaves)), how)


class _Travelling:
    """The mask of a device's queries and the keys that are on it, part by part."""

    def __init__(self, mask: masks.Mask, batch: int, how: _How):
        self.how, self.batch = how, batch
        self.is_everything = isinstance(mask, masks.Everything)
        self.sides = [side for _, side, _ in mask.arrays()]
        self.leaves, self.tree = jax.tree.flatten(mask)

    @property
    def of_keys(self) -> list[Any]:
        """The arrays that travel with the keys."""
        sides = zip(self.leaves, self.sides, strict=True)
        return [x for x, side in sides if side == "key"]

    def between(self, of_keys, source, rows: "_Part", columns: "_Part") -> masks.Mask:
        """The mask of a part of the queries and a part of another device's keys."""
        if self.is_everything:
            return masks.Everything()
        take, parts, how = iter(of_keys), self.how.parts, self.how
        leaves = []
        for leaf, side in zip(self.leaves, self.sides, strict=True):
            if side == "key":
                leaves.append(_parts(next(take), parts)[columns.number])
            elif side == "query":
                leaves.append(_parts(leaf, parts)[rows.number])
            else:
                leaves.append(leaf)
        return masks.Shifted(
            self.tree.unflatten(leaves),
            how.start(how.ring.place, rows.number, rows.size),
            how.start(source, columns.number, columns.size),
        )

    def may_allow(self, mask: masks.Mask, rows: "_Part", columns: "_Part") -> Any:
        """False only if no pair of the two parts is allowed."""
        if self.is_everything:
            return True
        values = []
        for _, side, array in masks.checked_arrays(
            mask, self.batch, rows.size, columns.size
        ):
            shape = {"batch": (-1, 1, 1), "query": (-1, rows.size, 1)}
            values.append(array.reshape(shape.get(side, (-1, 1, columns.size))))
        whole = masks.Span(0, rows.size), masks.Span(0, columns.size)
        each = jax.vmap(lambda *v: mask.may_allow(*whole, masks.Data(v)))
        return jnp.any(each(*values))


@dataclasses.dataclass(frozen=True)
class _Part:
    """One of the parts of a sequence that a device has."""

    number: int
    size: int


def _pairs(how: _How, queries: int, keys: int) -> list[tuple[_Part, _Part]]:
    return [
        (_Part(q, queries // how.parts), _Part(k, keys // how.parts))
        for q in range(how.parts)
        for k in range(how.parts)
    ]


def _when(condition: Any, compute: Any, *values: Any) -> Any:
    """`compute(*values)`, or the values as they are."""
    if condition is True:
        return compute(*values)
    return lax.cond(condition, compute, lambda *same: same, *values)


def _share(part: Any, whole: Any) -> Any:
    """exp(part - whole) of log-sum-exps; a part without weight has no share."""
    return jnp.where(jnp.isneginf(part), 0, jnp.exp(part - whole))


def _over_width(x: Any) -> Any:
    """A number per head and query, (batch, heads, queries), as outputs have them."""
    return x.swapaxes(1, 2)[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(query, key, value, mask, how: _How):
    ring, wide = how.ring, common.statistics_dtype(query.dtype)
    batch, queries, heads, _ = query.shape
    travelling = _Travelling(mask, batch, how)
    own = _parts(query, how.parts)
    pairs = _pairs(how, queries, key.shape[1])

    def join(step, held, sums):
        key, value, of_keys = held
        sums = list(sums)
        for rows, columns in pairs:
            here = travelling.between(of_keys, ring.source(step), rows, columns)

            def add(out, total, rows=rows, columns=columns, here=here):
                part, its_total = how.attend(
                    own[rows.number],
                    _parts(key, how.parts)[columns.number],
                    _parts(value, how.parts)[columns.number],
                    here,
                )
                both = jnp.logaddexp(total, its_total)
                out = out * _over_width(_share(total, both))
                part = part.astype(wide) * _over_width(_share(its_total, both))
                return out + part, both

            may = travelling.may_allow(here, rows, columns)
            sums[rows.number] = _when(may, add, *sums[rows.number])
        return sums

    def step(number, carry):
        held, sums = carry
        arriving = ring.pass_on(held)  # while this part is attended to
        return arriving, join(number, held, sums)

    size = queries // how.parts
    nothing = [
        (
            jnp.zeros((batch, size, heads, value.shape[-1]), wide),
            jnp.full((batch, heads, size), -jnp.inf, wide),
        )
    ] * how.parts
    carry = _alike(query, ((key, value, travelling.of_keys), nothing))
    held, sums = lax.fori_loop(0, ring.size - 1, step, carry)
    outs, totals = zip(*join(ring.size - 1, held, sums), strict=True)
    return jnp.concatenate(outs, 1).astype(query.dtype), jnp.concatenate(totals, 2)


def _alike(like: Any, tree: Any) -> Any:
    """Values marked as different wherever `like` is."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(jaxcompat.vary_alike([*leaves, like])[:-1])


def _ring_fwd(query, key, value, mask, how):
    made: Any = _ring(query, key, value, mask, how)
    out, total = made
    return (out, total), (query, key, value, mask, out, total)


def _ring_bwd(how: _How, kept, cotangents):
    query, key, value, mask, out, total = kept
    ring, wide = how.ring, common.statistics_dtype(query.dtype)
    travelling = _Travelling(mask, query.shape[0], how)
    d_out, d_total = (x.astype(wide) for x in cotangents)
    # What every score has in common: the weights of a query sum to one.
    common_part = d_total - jnp.sum(d_out * out.astype(wide), -1).swapaxes(1, 2)
    own = [_parts(x, how.parts) for x in (query, d_out)]
    of_heads = [_parts(x, how.parts, 2) for x in (total, common_part)]
    pairs = _pairs(how, query.shape[1], key.shape[1])

    def pull(step, held, d_queries):
        (key, value, of_keys), (d_keys, d_values) = held
        sums = [list(x) for x in (d_queries, d_keys, d_values)]
        for rows, columns in pairs:
            here = travelling.between(of_keys, ring.source(step), rows, columns)
            at_rows = [x[rows.number] for x in (*own, *of_heads)]
            of_columns = [_parts(x, how.parts)[columns.number] for x in (key, value)]
            places = (rows.number, columns.number, columns.number)

            def add(*sums, at_rows=at_rows, of_columns=of_columns, here=here):
                query, d_out, total, common_part = at_rows
                attend = lambda q, k, v: how.attend(q, k, v, here)
                (part, its_total), back = jax.vjp(attend, query, *of_columns)
                share = _share(its_total, total)
                inner = jnp.sum(d_out * part.astype(wide), -1).swapaxes(1, 2)
                d_part = (d_out * _over_width(share)).astype(part.dtype)
                found = back((d_part, share * (inner + common_part)))
                return tuple(
                    s + f.astype(wide) for s, f in zip(sums, found, strict=True)
                )

            may = travelling.may_allow(here, rows, columns)
            found = _when(may, add, *(s[n] for s, n in zip(sums, places, strict=True)))
            for s, n, f in zip(sums, places, found, strict=True):
                s[n] = f
        return (held[0], tuple(sums[1:])), sums[0]

    def step(number, carry):
        held, d_queries = pull(number, *carry)
        return ring.pass_on(held), d_queries

    def zeros(x):
        return [jnp.zeros(p.shape, wide) for p in _parts(x, how.parts)]

    held = (key, value, travelling.of_keys), (zeros(key), zeros(value))
    carry = _alike(query, (held, zeros(query)))
    carry = lax.fori_loop(0, ring.size - 1, step, carry)
    (_, sums), d_queries = pull(ring.size - 1, *carry)
    d_keys, d_values = ring.pass_on(sums)  # home
    found = zip((d_queries, d_keys, d_values), (query, key, value), strict=True)
    return *(jnp.concatenate(d, 1).astype(x.dtype) for d, x in found), None


_ring.defvjp(_ring_fwd, _ring_bwd)
