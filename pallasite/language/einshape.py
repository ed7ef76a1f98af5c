"""pltpu.einshape: reshapes and transposes written as one equation."""

import math
import re
from typing import Any

import jax

from pallasite.errors import KernelTypeError
from pallasite.language.trace import user_location


def einshape(equation: str, x: Any, /, **sizes: int) -> jax.Array:
    """Split, permute and merge dimensions: `einshape("a(bc)->b(ac)", x, c=128)`.

    Args:
        equation: the dimensions before and after `->`, one letter each; letters in
            parentheses form one dimension, the last letter fastest.
        x: the array.
        sizes: the sizes of letters in split dimensions; one per group may be omitted.

    Returns:
        The rearranged array.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    before, after = _groups(left), _groups(right)
    letters = [c for group in before for c in group]
    if not arrow or sorted(letters) != sorted(c for group in after for c in group):
        raise _refused("each letter must stand once on either side of '->'", equation)
    if len(before) != x.ndim:
        raise _refused(f"it has {len(before)} dimensions for {x.ndim}", equation, x)
    known: dict[str, int] = {}
    for group, size in zip(before, x.shape, strict=True):
        known.update(_split(group, size, sizes, equation, x))
    x = x.reshape([known[c] for c in letters])
    x = x.transpose([letters.index(c) for group in after for c in group])
    return x.reshape([math.prod(known[c] for c in group) for group in after])


def _groups(side: str) -> list[str]:
    groups = re.findall(r"\((\w*)\)|(\w)", side)
    return [group or letter for group, letter in groups]


def _split(
    group: str, size: int, sizes: dict[str, int], equation: str, x: Any
) -> dict[str, int]:
    """The size of each letter in a group; one may be inferred from the others."""
    known = {c: sizes[c] for c in group if c in sizes}
    open_letters = [c for c in group if c not in sizes]
    if len(open_letters) > 1:
        raise _refused(f"Ambiguous split: give sizes of {group!r}", equation, x)
    rest, left_over = divmod(size, math.prod(known.values()))
    if left_over or (not open_letters and rest != 1):
        raise _refused(f"Cannot split size {size} by {known}", equation, x)
    return known | dict.fromkeys(open_letters, rest)


def _refused(problem: str, equation: str, x: Any = None) -> KernelTypeError:
    shape = [] if x is None else [("shape", x.shape)]
    facts = [("equation", repr(equation)), *shape]
    return KernelTypeError(f"einshape: {problem}", facts, user_location())
