"""Operations of SparseCore kernels: short vectors, and indexed memory access.

Each is expressed in the language itself, so it means the same everywhere; a vector
subcore has most of them as single instructions.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, UnsupportedError
from pallasite.language import refs
from pallasite.language.refs import atomic_add, kernel_primitive, load, store
from pallasite.language.trace import user_location

# --- indexed memory access ---


def load_gather(ref: Any, indices: Sequence[Any], *, mask: Any = None) -> jax.Array:
    """Gather elements of a ref: one index array per dimension, of equal lengths.

    Where `mask` is false nothing is read, and the result is 0.
    """
    places = _places(ref, indices)
    if mask is None:
        return ref[places]
    return load(ref, places, mask=mask, other=jnp.zeros((), ref.dtype))


def store_scatter(
    ref: Any, indices: Sequence[Any], x: Any, *, mask: Any = None
) -> None:
    """Scatter to elements of a ref: one index array per dimension, equal lengths."""
    store(ref, _places(ref, indices), x, mask=mask)


def addupdate_scatter(
    ref: Any, indices: Sequence[Any], x: Any, *, mask: Any = None
) -> None:
    """Add to elements of a ref; duplicate indices accumulate."""
    atomic_add(ref, _places(ref, indices), x, mask=mask)


def _places(ref: Any, indices: Sequence[Any]) -> tuple[Any, ...]:
    shapes = {jnp.shape(index) for index in indices}
    if len(indices) != len(ref.shape) or len(shapes) != 1 or len(shapes.pop()) != 1:
        raise KernelTypeError(
            "an indexed access needs one index array per dimension, all of the same "
            "length",
            [("ref", ref.shape), ("indices", [jnp.shape(i) for i in indices])],
            user_location(),
            fix="pass one int32 vector per dimension of the ref, of the same length",
        )
    return tuple(indices)


def addupdate(ref: Any, x: Any) -> None:
    """Add to a ref or a view of it."""
    ref[...] = ref[...] + x


def _slots(mask: Any) -> jax.Array:
    """For each element, how many earlier ones are selected."""
    chosen = mask.astype(jnp.int32)
    return jnp.cumsum(chosen) - chosen


def load_expanded(ref: Any, *, mask: Any) -> jax.Array:
    """Expand the first elements of a ref to where `mask` is true; 0 elsewhere."""
    return load_gather(ref, [_slots(mask)], mask=mask)


def store_compressed(ref: Any, x: Any, *, mask: Any) -> None:
    """Store the elements of `x` where `mask` is true contiguously from the start."""
    store_scatter(ref, [_slots(mask)], x, mask=mask)


def addupdate_compressed(ref: Any, x: Any, *, mask: Any) -> None:
    """Like `store_compressed`, but adds."""
    addupdate_scatter(ref, [_slots(mask)], x, mask=mask)


def Indices(values: Any, ignored_value: int | None = None) -> Any:
    """Row indices for a copy: returns the values themselves."""
    if ignored_value is not None:
        raise UnsupportedError(
            "plsc.Indices(ignored_value=...) is not supported",
            [("ignored_value", ignored_value)],
            user_location(),
            "let those indices select a row of the table that nothing else uses",
        )
    return values


# --- subcores of one core ---

subcore_barrier_p = kernel_primitive("subcore_barrier", multiple_results=True)
subcore_barrier_p.def_effectful_abstract_eval(lambda: ([], {jaxcompat.debug_effect()}))


def subcore_barrier() -> None:
    """Wait until every subcore of this SparseCore has arrived."""
    subcore_barrier_p.bind()


fetch_and_add_p = kernel_primitive("fetch_and_add")
fetch_and_add_p.def_effectful_abstract_eval(
    lambda *a, tree: (jax.core.ShapedArray((), jnp.int32), refs.ref_effects(a))
)


def fetch_and_add(x_ref: Any, value: Any, *, subcore_id: Any) -> jax.Array:
    """Add to the value that another subcore of this SparseCore has in this ref.

    Args:
        x_ref: one int32 in scalar memory.
        value: what to add.
        subcore_id: the owner; after it initialises the ref, use `subcore_barrier`.

    Returns:
        The old value.
    """
    if x_ref.shape and set(x_ref.shape) == {1}:
        x_ref = x_ref.at[(0,) * len(x_ref.shape)]
    flat, tree = refs.flatten_views(x_ref)
    numbers = (jnp.asarray(x, jnp.int32) for x in (value, subcore_id))
    return fetch_and_add_p.bind(*numbers, *flat, tree=tree)


class SparseCorePushStreamWarning(UserWarning):
    """Upstream's warning about a slow order of copies; Pallasite never issues it."""


# --- along a vector ---


def bitcast(x: Any, dtype: Any) -> jax.Array:
    """The same bits as another type; a width change resizes the last dimension."""
    before, after = (jnp.dtype(d).itemsize for d in (x.dtype, dtype))
    if before < after:
        x = x.reshape(*x.shape[:-1], -1, after // before)
    seen = lax.bitcast_convert_type(x, dtype)
    return seen.reshape(*x.shape[:-1], -1) if before > after else seen


def cumsum(x: Any, *, mask: Any = None) -> jax.Array:
    """Cumulative sum; elements where `mask` is false count as 0."""
    return jnp.cumsum(x if mask is None else jnp.where(mask, x, 0), dtype=x.dtype)


def cummax(x: Any, *, mask: Any = None) -> jax.Array:
    """Cumulative maximum; before the first selected element, `x` itself."""
    return _extreme(x, mask, lax.cummax, _limits(x.dtype)[0])


def cummin(x: Any, *, mask: Any = None) -> jax.Array:
    """Cumulative minimum; before the first selected element, `x` itself."""
    return _extreme(x, mask, lax.cummin, _limits(x.dtype)[1])


def _extreme(x: Any, mask: Any, scan: Callable, neutral: Any) -> jax.Array:
    if mask is None:
        return scan(x)
    found = scan(jnp.where(mask, x, jnp.asarray(neutral, x.dtype)))
    any_yet = jnp.cumsum(mask.astype(jnp.int32)) > 0
    return jnp.where(any_yet, found, x)


def _limits(dtype: Any) -> tuple[Any, Any]:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf, jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.min, limits.max


def sort_key_val(
    keys: Any, values: Any, *, mask: Any = None, descending: bool = False
) -> Any:
    """Sort keys with their values; elements where `mask` is false come last.

    Returns:
        Keys, values and, with `mask`, the mask in the same order.
    """
    order = keys
    if descending:  # complementing an integer cannot overflow
        is_float = jnp.issubdtype(keys.dtype, jnp.floating)
        order = -keys if is_float else ~keys
    if mask is None:
        _, *results = lax.sort((order, keys, values), num_keys=1)
        return tuple(results)
    last = jnp.logical_not(mask).astype(jnp.int32)
    last, _, *results = lax.sort((last, order, keys, values), num_keys=2)
    return (*results, last == 0)


def scan_count(x: Any, mask: Any = None) -> tuple[jax.Array, jax.Array]:
    """How often each element has occurred so far, including itself.

    Returns:
        The counts, and a mask of the last occurrence of each value. Elements where
        `mask` is false are neither counted nor marked.
    """
    n = x.shape[0]
    counted = jnp.ones((n,), bool) if mask is None else mask
    row, column = (lax.broadcasted_iota(jnp.int32, (n, n), d) for d in (0, 1))
    same = jnp.equal(x[:, None], x[None, :]) & counted[None, :]
    counts = jnp.where(same & (column <= row), 1, 0).sum(axis=1)
    later = jnp.where(same & (column > row), 1, 0).sum(axis=1)
    return counts.astype(jnp.int32), counted & (later == 0)


def all_reduce_population_count(x: Any, *, reduce: int = 1) -> jax.Array:
    """The number of true elements, broadcast to every element of the result."""
    total = x.astype(jnp.int32).sum()
    return jnp.full((x.shape[0] // reduce,), total, jnp.int32)


def all_reduce_ffs(x: Any, *, reduce: int = 1) -> jax.Array:
    """The index of the first true element, or else the length, broadcast."""
    n = x.shape[0]
    places = jnp.where(x, lax.broadcasted_iota(jnp.int32, (n,), 0), n)
    return jnp.full((n // reduce,), places.min(), jnp.int32)


# --- packing ---


class PackFormat(enum.Enum):
    """The order of two vectors packed into one of narrower elements."""

    COMPRESSED = "compressed"  # [a0, a1], [b0, b1] -> [[a0, a1], [b0, b1]]
    INTERLEAVED = "interleaved"  # [a0, a1], [b0, b1] -> [a0, b0, a1, b1]


_NARROW = {"float32": jnp.bfloat16, "int32": jnp.int16}
_WIDE = {"bfloat16": jnp.float32, "int16": jnp.int32}


def pack(
    a: Any, b: Any, /, *, format: PackFormat, preferred_element_type: Any = None
) -> jax.Array:
    """Pack two vectors into one with elements half as wide."""
    narrow = preferred_element_type or _NARROW[str(a.dtype)]
    halves = a.astype(narrow), b.astype(narrow)
    if format is PackFormat.COMPRESSED:
        return jnp.concatenate(halves).reshape(-1, 2)
    return jnp.stack(halves, axis=1).reshape(-1)


def unpack(
    ab: Any, /, *, format: PackFormat, preferred_element_type: Any = None
) -> tuple[jax.Array, jax.Array]:
    """The two vectors that `pack` combined."""
    wide = preferred_element_type or _WIDE[str(ab.dtype)]
    if format is PackFormat.COMPRESSED:
        both = ab.reshape(2, -1)
        return both[0].astype(wide), both[1].astype(wide)
    both = ab.reshape(-1, 2)
    return both[:, 0].astype(wide), both[:, 1].astype(wide)


# --- loops ---


def parallel_loop(
    lower: Any, upper: Any, step: Any = 1, *, unroll: int = 1, carry: Any = None
) -> Callable[[Callable[..., Any]], Any]:
    """A loop whose iterations do not depend on each other's writes.

    Decorates the body, which is called with the index and, if there is a `carry`, its
    current value; the decorated name becomes the final carry.
    """
    del unroll

    def run(body: Callable[..., Any]) -> Any:
        rounds = (upper - lower + step - 1) // step

        def one_round(n: Any, carried: Any) -> Any:
            index = jnp.int32(lower) + n * step
            if carry is None:
                body(index)
                return None
            return body(index, carried)

        return lax.fori_loop(0, rounds, one_round, carry)

    return run
