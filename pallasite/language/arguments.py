"""The arguments of a function, its arrays apart from all else.

What traces a function (`pl.fuse`, `pl.explain`, `pl.profile`, `pl.autotune`) hands it
tracers in place of its arrays. Numbers, strings and the like stay what they are to it:
block sizes and options are given as to the function itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pallasite.language.spec_trees import is_shaped


class Arguments:
    """Arguments of one call.

    Attributes:
        arrays: those that are arrays, or types of arrays, in order.
        others: all else, in order.
        form: where each is.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None):
        leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs or {})))
        self._leaves, self._tree = leaves, tree
        self._places = [n for n, x in enumerate(leaves) if is_shaped(x)]
        self.arrays = [leaves[n] for n in self._places]
        self.others = [x for x in leaves if not is_shaped(x)]
        self.form = tree, tuple(self._places)

    def call(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """What a function makes of these arguments with other arrays in them."""
        leaves = list(self._leaves)
        for place, array in zip(self._places, arrays, strict=True):
            leaves[place] = array
        args, kwargs = self._tree.unflatten(leaves)
        return function(*args, **kwargs)

    def of_arrays(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, of the arrays only; a new one each time."""
        return lambda *arrays: self.call(function, *arrays)
