"""Programs with a backward pass, built with `jax.vjp`.

The forward program returns the results and the residuals, except residuals that are
operands or results anyway and those that the backward pass does not read.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch

from pallasite import jaxcompat
from pallasite.torch import tensors
from pallasite.torch.programs import Arrays, Backward, Function, Program, is_literal


def with_backward(
    label: str,
    function: Function,
    avals: Arrays,
    wanted: tuple[int, ...],
    device: torch.device,
) -> Program:
    """The program of `function`, with what the gradients of operands `wanted` need."""
    saved: dict[str, Any] = {}

    def saving(*arrays: Any) -> Arrays:
        def of_wanted(*varied: Any) -> tuple[Any, ...]:
            every = list(arrays)
            for n, array in zip(wanted, varied, strict=True):
                every[n] = array
            return tuple(function(*every))

        results, pull = jax.vjp(of_wanted, *(arrays[n] for n in wanted))
        residuals, saved["pull"] = jax.tree.flatten(pull)
        saved["results"] = len(results)
        return [*results, *residuals]

    with jax.default_device(tensors.jax_device(device)):
        forward = jax.make_jaxpr(saving)(*avals)
        count = saved["results"]
        result_avals = forward.out_avals[:count]
        residual_avals = forward.out_avals[count:]
        differentiable = tuple(
            n
            for n, aval in enumerate(result_avals)
            if jnp.issubdtype(aval.dtype, np.inexact)
        )
        gradients = _gradients(saved["pull"], result_avals, differentiable)
        cotangent_avals = [result_avals[n] for n in differentiable]
        backward = jax.make_jaxpr(gradients)(residual_avals, cotangent_avals)
    read = _read(backward, len(residual_avals))
    places, returned = _places(forward, count, read)

    def returning(*arrays: Any) -> Arrays:
        outs = jax.core.eval_jaxpr(*jaxcompat.opened(forward), *arrays)
        return [outs[n] for n in returned]

    def reading(*arrays: Any) -> Arrays:
        residuals: list[Any] = [None] * len(residual_avals)
        for n, array in zip(read, arrays[: len(read)], strict=True):
            residuals[n] = array
        cotangents = arrays[len(read) :]
        opened = jaxcompat.opened(backward)
        return jax.core.eval_jaxpr(*opened, *residuals, *cotangents)

    program = Program(label, returning, avals, device)
    program.results = count
    program.backward = Backward(
        Program(
            f"{label}_backward",
            reading,
            [*(residual_avals[n] for n in read), *cotangent_avals],
            device,
        ),
        wanted,
        places,
        differentiable,
    )
    return program


def _gradients(
    pull: Any, result_avals: Arrays, differentiable: tuple[int, ...]
) -> Callable[[Arrays, Arrays], Arrays]:
    """The backward pass from residuals and cotangents; `pull` is a vjp's pytree."""

    def gradients(residuals: Arrays, cotangents: Arrays) -> Arrays:
        every: list[Any] = [
            np.zeros(aval.shape, jax.dtypes.float0) for aval in result_avals
        ]
        for n, cotangent in zip(differentiable, cotangents, strict=True):
            every[n] = _conjugate(cotangent)
        pulled = jax.tree.unflatten(pull, residuals)(tuple(every))
        return list(map(_conjugate, pulled))

    return gradients


def _conjugate(x: Any) -> Any:
    """Conjugates complex gradients, as torch's are the conjugates of JAX's."""
    return jnp.conj(x) if jnp.issubdtype(x.dtype, np.complexfloating) else x


def _read(backward: Any, count: int) -> list[int]:
    """Which of its first `count` inputs a jaxpr uses."""
    jaxpr, _ = jaxcompat.opened(backward)
    used = [*jaxpr.outvars, *(x for eqn in jaxpr.eqns for x in eqn.invars)]
    variables = {x for x in used if not is_literal(x)}
    return [n for n, x in enumerate(jaxpr.invars[:count]) if x in variables]


def _places(
    forward: Any, count: int, read: list[int]
) -> tuple[tuple[tuple[str, int], ...], list[int]]:
    """Where to find each residual that is read, and what a program must return.

    Args:
        forward: returns `count` results, then the residuals.
    """
    jaxpr, _ = jaxcompat.opened(forward)
    returned = list(range(count))
    known: dict[Any, tuple[str, int]] = {
        variable: ("operand", n) for n, variable in enumerate(jaxpr.invars)
    }
    for n, out in enumerate(jaxpr.outvars[:count]):
        if not is_literal(out):
            known.setdefault(out, ("result", n))
    places: list[tuple[str, int]] = []
    for n in read:
        out = jaxpr.outvars[count + n]
        place = None if is_literal(out) else known.get(out)
        if place is None:
            place = ("result", len(returned))
            returned.append(count + n)
            if not is_literal(out):
                known[out] = place
        places.append(place)
    return tuple(places), returned
