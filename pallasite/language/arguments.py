"""The arguments of a function, with arrays separated from everything else.

Tools that trace a function (`pl.fuse`, `pl.explain`, `pl.profile`, `pl.autotune`)
replace its arrays by tracers. Numbers, strings and the like stay as they are, so block
sizes and options are passed as to the function itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pallasite.language.spec_trees import is_shaped


class Arguments:
    """Arguments of one call.

    Attributes:
        arrays: the arrays and array types, in order.
        others: everything else, in order.
        form: the position of each.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None):
        leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs or {})))
        self._leaves, self._tree = leaves, tree
        self._places = [n for n, x in enumerate(leaves) if is_shaped(x)]
        self.arrays = [leaves[n] for n in self._places]
        self.others = [x for x in leaves if not is_shaped(x)]
        self.form = tree, tuple(self._places)

    def call(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Calls a function with these arguments, replacing the arrays."""
        leaves = list(self._leaves)
        for place, array in zip(self._places, arrays, strict=True):
            leaves[place] = array
        args, kwargs = self._tree.unflatten(leaves)
        return function(*args, **kwargs)

    def of_arrays(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of the arrays only; a new object each time."""
        return lambda *arrays: self.call(function, *arrays)
