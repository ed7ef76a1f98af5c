"""estimate_cost: the cost of a plain JAX function, for `cost_estimate=`."""

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np

from pallasite import jaxcompat
from pallasite.ir.opdef import OpDef, Unit, table
from pallasite.language.arguments import Arguments
from pallasite.language.specs import CostEstimate
from pallasite.passes.analysis.cost import Cost
from pallasite.passes.analysis.cost import cost as kernel_cost
from pallasite.primitive import Call, call_p
from pallasite.sites import jaxprs_inside


def estimate_cost(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> CostEstimate:
    """Floating-point operations, transcendentals and bytes of `fun(*args)`.

    Args:
        fun: a JAX function, usually the plain version of a kernel.
        args, kwargs: arrays or `jax.ShapeDtypeStruct`s; anything else is passed to
            `fun` as it is.

    Returns:
        A CostEstimate of matmuls, elementwise arithmetic and kernels (by their own
        estimates); bytes are those of the inputs and outputs.
    """
    given = Arguments(args, kwargs)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given.arrays]
    jaxpr, out = jax.make_jaxpr(given.of_arrays(fun), return_shape=True)(*shapes)
    arrays = [*shapes, *jax.tree.leaves(out)]
    size = sum(prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)
    counted = _cost(jaxpr.jaxpr)
    return CostEstimate(
        flops=counted.flops,
        transcendentals=counted.transcendentals,
        bytes_accessed=size,
    )


def _cost(jaxpr: Any) -> Cost:
    """Counts matmuls and elementwise arithmetic; everything else only moves data."""
    total = Cost()
    for eqn in jaxpr.eqns:
        total += _cost_of(eqn)
    return total


def _cost_of(eqn: Any) -> Cost:
    name, params = eqn.primitive.name, eqn.params
    if eqn.primitive is call_p:
        return _cost_of_call(params["call"])
    inner = [_cost(jaxcompat.opened(j)[0]) for j in jaxprs_inside(eqn)]
    if name == "scan":
        return sum(inner, Cost()).times(params["length"])
    if name == "cond":
        return Cost.worst(inner)
    if inner:  # a while loop counts as one iteration
        return sum(inner, Cost())
    size = max((prod(v.aval.shape) for v in eqn.outvars), default=0)
    if name == "dot_general":
        (depth, _), _ = params["dimension_numbers"]
        return Cost(flops=2 * size * prod(eqn.invars[0].aval.shape[d] for d in depth))
    if name == "integer_pow":
        return Cost(flops=size * _multiplications(abs(params["y"])))
    row = _rows().get(name)
    if row is None or name in _MOVES:
        return Cost()
    if row.unit is Unit.SPECIAL:
        return Cost(transcendentals=size)
    return Cost(flops=size)


_MOVES = ("convert_element_type", "bitcast_convert_type", "stop_gradient")


def _cost_of_call(call: Call) -> Cost:
    given = call.cost_estimate
    if given is None:
        return kernel_cost(call.kernel)
    return Cost(given.flops, given.transcendentals)


def _multiplications(power: int) -> int:
    """Multiplications of a power by squaring; as upstream, one square per bit."""
    return power.bit_length() + power.bit_count() - 1 if power > 1 else 0


@cache
def _rows() -> dict[str, OpDef]:
    """Elementwise ops by the name of the primitive imported as them."""
    return {r.jax: r for r in table().values() if r.elementwise and r.jax}
