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

from pallasite.emulation.step_order import ordered
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
        tables = [known[table] for table in self.tables]
        found = ordered(self.number, self.sizes, self.blocks)(*tables)
        return dict(zip(self.refs, found, strict=True))


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
