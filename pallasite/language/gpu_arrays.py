"""Operations on tiles in `plgpu` kernels as upstream spells them.

`sum`, `max`, `min` and `prod` keep the dtype; atomics take a view and return nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite.errors import SpecError
from pallasite.language import refs
from pallasite.language.trace import user_location
from pallasite.ops.tensor_memory import KEPT, KEPT_TILE

Axes = int | Sequence[int] | None


def _reduction(reduce: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def reduction(
        x: Any,
        axis: Axes = None,
        keepdims: bool = False,
        *,
        accumulator_ilp: int | None = None,
    ) -> jax.Array:
        """Reduce a tile along axes (None: all), in its own dtype.

        `accumulator_ilp`: how many partial results upstream's compiler keeps; accepted
        without effect.
        """
        ilp = accumulator_ilp
        if ilp is not None and (type(ilp) is not int or ilp < 1):
            raise SpecError(
                f"accumulator_ilp must be a positive integer, got {ilp!r}",
                at=user_location(),
                fix="leave it out",
            )
        axis = tuple(axis) if isinstance(axis, Sequence) else axis
        # Sums of small integers would have 32 bits.
        return reduce(x, axis=axis, keepdims=keepdims).astype(x.dtype)

    reduction.__name__ = reduction.__qualname__ = reduce.__name__
    return reduction


sum = _reduction(jnp.sum)
max = _reduction(jnp.max)
min = _reduction(jnp.min)
prod = _reduction(jnp.prod)


def _atomic(with_index: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    name = with_index.__name__

    def atomic(
        ref: Any, *index_and_value: Any, mask: Any = None, optimized: bool = True
    ) -> jax.Array:
        del optimized
        *index, value = index_and_value
        return with_index(ref, index[0] if index else None, value, mask=mask)

    atomic.__name__ = atomic.__qualname__ = name
    atomic.__doc__ = f"""{with_index.__doc__}

    `{name}(view, value)` is upstream's form, `{name}(ref, index, value)` that of
    `pl.{name}`. `optimized` is accepted without effect.
    """
    return atomic


atomic_add = _atomic(refs.atomic_add)
atomic_and = _atomic(refs.atomic_and)
atomic_max = _atomic(refs.atomic_max)
atomic_min = _atomic(refs.atomic_min)
atomic_or = _atomic(refs.atomic_or)
atomic_xor = _atomic(refs.atomic_xor)


def store(ref: Any, *index_and_value: Any, optimized: bool = True, **more: Any) -> None:
    """Write elements of a ref: `store(view, value)`, or as `pl.store`."""
    del optimized
    refs.store(ref, *index_and_value, **more)


def format_tcgen05_sparse_metadata(meta: Any, operand_dtype: Any) -> jax.Array:
    """The places of a sparse operand's elements, as `tcgen05_mma` needs them.

    Args:
        meta: (m, k // 4, 2) of uint2: in which places of each four elements of a row
            the operand has its two.
        operand_dtype: of the operand; 8 or 16 bits.

    Returns:
        (m // 128, k // 128, 128, 64), for `async_copy_sparse_metadata_to_tmem`.
    """
    bits, (tall, wide) = jnp.finfo(operand_dtype).bits, KEPT_TILE
    rows, count = meta.shape[0], 2 * meta.shape[1]
    is_right = meta.ndim == 3 and meta.shape[2] == 2 and meta.dtype == jnp.uint2
    if not is_right or bits not in KEPT or rows % tall or count % wide:
        raise SpecError(
            "metadata of a sparse operand is uint2, (m, k // 4, 2), m and k multiples "
            "of 128, for elements of 8 or 16 bits",
            [("got", f"{meta.dtype}{list(meta.shape)}"), ("operand", operand_dtype)],
            user_location(),
            "pad it with zeros",
        )
    down, along, order = KEPT[bits]
    tiles = meta.reshape(rows // tall, *down, count // wide, *along)
    first, second = 0, 1 + len(down)
    places = [*range(1, second), *range(second + 1, tiles.ndim)]
    tiles = tiles.transpose(first, second, *(places[d] for d in order))
    return tiles.reshape(rows // tall, count // wide, tall, wide)
