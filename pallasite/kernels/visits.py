"""Schedules work on groups of rows of any sizes, for kernels with fixed-size blocks.

A *visit* is a block of rows and one group with rows in it. A block on the border of
groups is visited once for each of them, and each visit stores its own rows. XLA
computes the visits from the group sizes at run time; their maximum number is static:
one per block plus one per group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import pallasite as pl


class Visits(NamedTuple):
    """Per visit: its block of rows, its group, its rows (none if it is unused)."""

    tile: jax.Array
    group: jax.Array
    start: jax.Array
    end: jax.Array


def rows_of_groups(sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """The first and the end (exclusive) of each group's rows, among `m` rows."""
    end = jnp.cumsum(sizes)
    return jnp.minimum(end - sizes, m), jnp.minimum(end, m)


def visits_of_groups(group_sizes: jax.Array, m: int, block: int) -> Visits:
    """Visits of the blocks of `m` rows, in row order.

    Rows past all groups form one more group, so that every row belongs to a visit.
    """
    used = jnp.sum(group_sizes)
    sizes = jnp.append(group_sizes, jnp.maximum(m - used, 0))
    start, end = rows_of_groups(sizes, m)
    first = start // block
    counts = jnp.where(start < end, pl.cdiv(end, block) - first, 0)
    number = pl.cdiv(m, block) + len(group_sizes)
    visit = jnp.arange(number)
    group = jnp.repeat(jnp.arange(len(sizes)), counts, total_repeat_length=number)
    before = jnp.cumsum(counts) - counts
    tile = first[group] + visit - before[group]
    is_used = visit < jnp.sum(counts)
    tile = jnp.clip(tile, 0, max(pl.cdiv(m, block) - 1, 0))
    return Visits(
        *(
            a.astype(jnp.int32)
            for a in (
                tile,
                group,
                jnp.where(is_used, start[group], 0),
                jnp.where(is_used, end[group], 0),
            )
        )
    )
