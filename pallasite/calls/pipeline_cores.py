"""Splits a pipeline's grid among cores: each runs its part of one parallel axis.

`emit_pipeline(core_axis_name="core")` runs on every core of a mesh. `share` chooses the
axis to split, how many of its steps this core runs, and the first of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallasite.errors import SpecError, UnsupportedError
from pallasite.language.refs import num_programs, program_id


@dataclass(frozen=True)
class Share:
    """This core's steps: `count` of them along `axis`, from `first` on."""

    axis: int
    count: Any
    first: Any


def share(
    grid: Sequence[Any], semantics: Sequence[str], core_axis: Any, at: Any
) -> Share | None:
    """The part of `grid` that this core runs; None: all of it.

    `core_axis` is an axis of the enclosing grid, or a name of a mesh axis (or several
    of either).
    """
    cores, core = _number_and_place(core_axis)
    if not isinstance(cores, int):
        raise UnsupportedError(
            "a pipeline cannot be split among a number of cores known only at run time",
            [("core_axis", core_axis)],
            at,
            fix="use a mesh whose number of cores is a Python int",
        )
    if cores == 1:
        return None
    parallel = [n for n, s in enumerate(semantics) if s == "parallel"]
    if not parallel:
        raise SpecError(
            "cores can split a pipeline only along a parallel axis",
            [("cores", cores), ("dimension_semantics", tuple(semantics))],
            at,
            "dimension_semantics=(pltpu.PARALLEL, ...) where steps do not depend on "
            "each other",
        )
    axis = _axis_to_cut(grid, parallel, cores)
    size = grid[axis]
    if isinstance(size, int) and size % cores == 0:
        return Share(axis, size // cores, core * (size // cores))
    each, left = size // cores, size % cores  # the first `left` cores run one more
    count = each + jnp.where(core < left, 1, 0)
    first = core * each + jnp.minimum(core, left)
    return Share(axis, count.astype(jnp.int32), first.astype(jnp.int32))


def _number_and_place(core_axis: Any) -> tuple[Any, Any]:
    """The number of cores, and this core's number."""
    axes = core_axis if isinstance(core_axis, tuple) else (core_axis,)
    cores: Any = 1
    core: Any = 0
    for axis in axes:
        if isinstance(axis, str):
            size, place = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        else:
            size, place = num_programs(axis), program_id(axis)
        cores, core = cores * size, core * size + place
    return cores, core


def _axis_to_cut(grid: Sequence[Any], parallel: Sequence[int], cores: int) -> int:
    """An axis that splits evenly, else the longest, else one of dynamic size."""
    known = [n for n in parallel if isinstance(grid[n], int)]
    even = [n for n in known if grid[n] % cores == 0]
    if even:
        return even[0]
    longest = max(known, key=lambda n: grid[n], default=None)
    return parallel[0] if longest is None else longest
