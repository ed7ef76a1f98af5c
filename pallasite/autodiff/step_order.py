"""Which steps each program of a kernel goes through, found before the kernel runs.

`sorted_steps.py` and `owned_rows.py` make the kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from pallasite.ir.nodes import Kernel, Value


@dataclass(frozen=True)
class Sorting:
    """Steps sorted by the block that they add to, before a kernel runs.

    Attributes:
        sizes: the axes of the steps.
        blocks: how many blocks there are.
        number: a kernel without a grid: the block of a step, given its grid indices.
        tables: the arrays that `number` reads besides.
        firsts: has the place of each block's first step in `order`, and the end.
        order: the steps.
    """

    sizes: tuple[int, ...]
    blocks: int
    number: Kernel
    tables: tuple[Value, ...]
    firsts: Value
    order: Value

    @property
    def refs(self) -> tuple[Value, Value]:
        return self.firsts, self.order

    @property
    def typical(self) -> int:
        """How many steps a block has, if all have as many."""
        return -(-prod(self.sizes) // self.blocks)

    def arrays(self, known: Mapping[Value, Any]) -> dict[Value, Any]:
        """The arrays of `refs`, from the tables' arrays."""
        from pallasite.emulation.emulate import emulate

        steps = jnp.arange(prod(self.sizes), dtype=jnp.int32)
        ids = jnp.unravel_index(steps, self.sizes)
        tables = [known[table] for table in self.tables]
        of_step = emulate(self.number)
        numbered = jax.vmap(lambda *ids: of_step(*ids, *tables)[0])
        numbers = numbered(*(i.astype(jnp.int32) for i in ids))
        return dict(zip(self.refs, sorted_by(numbers, self.blocks), strict=True))


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


@dataclass(frozen=True)
class Reaching:
    """The steps that may reach each block of rows.

    All that do are among them. If offsets ascend, as those of segments do, there are no
    others.

    Attributes:
        sizes: the grid that stores which rows a step reaches.
        own: those of its axes that the programs have, too: they go through the others.
        rows: how many there are, and in a block.
        low, high: of each step, the first row that it reaches, and the end of them.
        firsts, limits: of each block, the first of its steps, and the end of them.
    """

    sizes: tuple[int, ...]
    own: tuple[int, ...]
    rows: tuple[int, int]
    low: Value
    high: Value
    firsts: Value
    limits: Value

    def arrays(self, known: Mapping[Value, Any]) -> dict[Value, Any]:
        """The arrays of `firsts` and `limits`."""
        low, high = (known[ref].reshape(self.sizes) for ref in (self.low, self.high))
        low, high = low.min(self.own).ravel(), high.max(self.own).ravel()
        count, size = self.rows
        start = jnp.arange(0, count, size, dtype=jnp.int32)
        # No step before one reaches further than the maximum up to it.
        most, least = jax.lax.cummax(high), jax.lax.cummin(low, reverse=True)
        place = partial(jnp.searchsorted, side="right", method="scan_unrolled")
        firsts, limits = place(most, start), place(least, start + (size - 1))
        found = {self.firsts: firsts, self.limits: limits}
        return {ref: x.astype(jnp.int32) for ref, x in found.items()}
