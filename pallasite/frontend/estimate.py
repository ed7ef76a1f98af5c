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
        args, kwargs: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        A CostEstimate; bytes are those of the inputs and outputs.
    """
    lowered = jax.jit(fun).lower(*args, **kwargs)
    analysis = lowered.cost_analysis() or {}
    if isinstance(analysis, list):
        analysis = analysis[0]
    out = jax.eval_shape(fun, *args, **kwargs)
    leaves = jax.tree.leaves((args, kwargs, out))
    arrays = [x for x in leaves if hasattr(x, "shape") and hasattr(x, "dtype")]
    size = sum(prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)
    return CostEstimate(
        flops=int(analysis.get("flops", 0)),
        transcendentals=int(analysis.get("transcendentals", 0)),
        bytes_accessed=size,
    )
