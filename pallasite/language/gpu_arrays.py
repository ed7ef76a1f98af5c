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
