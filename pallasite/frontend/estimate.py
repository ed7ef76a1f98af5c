"""estimate_cost: what a plain JAX function costs, for `cost_estimate=`."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import numpy as np

from pallasite.frontend.spec import CostEstimate


def estimate_cost(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> CostEstimate:
    """Floating-point operations, transcendentals and bytes of `fun(*args)`.

    Args:
        fun: a JAX function, usually the plain version of a kernel.
        args, kwargs: arrays or `jax.ShapeDtypeStruct`s; anything else is handed to
            `fun` as it is.

    Returns:
        A CostEstimate; bytes are those of the inputs and outputs.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    shapes = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for n, x in enumerate(leaves)
        if _is_array(x)
    }

    def of_arrays(arrays: dict[int, Any]) -> Any:
        args, kwargs = tree.unflatten(arrays.get(n, x) for n, x in enumerate(leaves))
        return fun(*args, **kwargs)

    lowered = jax.jit(of_arrays).lower(shapes)
    analysis = lowered.cost_analysis() or {}
    if isinstance(analysis, list):
        analysis = analysis[0]
    arrays = [*shapes.values(), *jax.tree.leaves(lowered.out_info)]
    size = sum(prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)
    return CostEstimate(
        flops=int(analysis.get("flops", 0)),
        transcendentals=int(analysis.get("transcendentals", 0)),
        bytes_accessed=size,
    )


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
