"""Steps sorted by numbers, by XLA, for kernels that go through them in that order."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from pallasite.emulation.emulate import emulate
from pallasite.ir.nodes import Kernel


def ordered(
    number: Kernel, sizes: Sequence[int], count: int
) -> Callable[..., tuple[Any, Any]]:
    """A function that sorts the steps of a grid; see `sorted_by`.

    Args:
        number: the number of a step, given its grid indices, and further operands.
        sizes: of the grid.
        count: how many numbers there are.
    """

    def found(*tables: Any) -> tuple[Any, Any]:
        ids = jnp.unravel_index(jnp.arange(prod(sizes), dtype=jnp.int32), sizes)
        of_step = emulate(number)
        numbered = jax.vmap(lambda *ids: of_step(*ids, *tables)[0])
        return sorted_by(numbered(*(i.astype(jnp.int32) for i in ids)), count)

    return found


def sorted_by(numbers: Any, count: int) -> tuple[Any, Any]:
    """Where each of `count` numbers starts in the sorted order, and that order.

    The number `count` is last; none is larger, or negative.
    """
    steps = jnp.arange(len(numbers), dtype=jnp.int32)
    # On a GPU XLA has CUB sort pairs by unsigned keys, in a pass per byte; by others it
    # compares, in dozens of kernels.
    numbers = numbers.astype(jnp.uint16 if count < 1 << 16 else jnp.uint32)
    numbers, order = jax.lax.sort((numbers, steps), num_keys=1, is_stable=True)
    # One kernel on a GPU; counting would be atomics and a scan.
    which = jnp.arange(count + 1, dtype=numbers.dtype)
    firsts = jnp.searchsorted(numbers, which, method="scan_unrolled")
    return firsts.astype(jnp.int32), order
