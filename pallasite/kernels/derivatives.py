"""Operations whose derivatives have kernels of their own, in both directions.

A function with `jax.custom_vjp` has no forward mode. `Differentiable` takes the same
functions and one more, its tangent, which is linear: JAX evaluates it in forward mode,
and in reverse mode it stands for its transpose, which is the backward function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from pallasite import jaxcompat, sites

linear_p = jaxcompat.Primitive("pallasite_linear")
linear_p.multiple_results = True


class Differentiable:
    """A function with derivatives by hand, to be defined by `define`.

    Args:
        function: of arrays, and of what `static` says.
        static: positions of arguments that are no arrays, but hashable.
    """

    def __init__(self, function: Callable[..., Any], static: Sequence[int] = ()):
        functools.update_wrapper(self, function)
        self._function = function
        self._static = tuple(static)

    def define(self, forward: Callable, tangent: Callable, backward: Callable) -> None:
        """Defines the derivatives.

        Args:
            forward: of the same arguments; returns the results and what to keep.
            tangent: of the static arguments, what was kept, and a tuple with the
                tangent of each array, None for integers; returns the tangents of the
                results, None for integers. It uses no array but its arguments.
            backward: of the static arguments, what was kept, and the cotangents of the
                results; returns those of the arrays, None for integers and zeros.
        """
        self._forward, self._tangent, self._backward = forward, tangent, backward

    def __call__(self, *args: Any) -> Any:
        fixed, count = {n: args[n] for n in self._static}, len(args)

        def filled(arrays: Sequence[Any]) -> list[Any]:
            pending = iter(arrays)
            return [fixed[n] if n in fixed else next(pending) for n in range(count)]

        call = jax.custom_jvp(lambda *arrays: self._function(*filled(arrays)))

        @call.defjvp
        def _(primals, tangents):
            results, kept = self._forward(*filled(primals))
            statics = tuple(fixed.values())
            return results, self._push(statics, primals, results, kept, tangents)

        return call(*(x for n, x in enumerate(args) if n not in fixed))

    def _push(self, statics, primals, results, kept, tangents) -> Any:
        """The tangents of the results, as a linear function that can be transposed."""
        residuals, tree = jax.tree.flatten(kept)
        leaves, out = jax.tree.flatten(results)
        moving = [n for n, t in enumerate(tangents) if t.dtype != jax.dtypes.float0]
        # Functions that outlive this trace must not hold its values.
        kinds = [(jnp.shape(r), r.dtype) for r in leaves]
        types = [(jnp.shape(x), x.dtype) for x in primals]
        floats = [n for n, (_, t) in enumerate(kinds) if jnp.issubdtype(t, jnp.inexact)]
        count = len(residuals)

        def push(*operands):
            kept = jax.tree.unflatten(tree, operands[:count])
            given = dict(zip(moving, operands[count:], strict=True))
            each = tuple(given.get(n) for n in range(len(types)))
            made = out.flatten_up_to(self._tangent(*statics, kept, each))
            return [made[n].astype(kinds[n][1]) for n in floats]

        def pull(*operands):
            kept = jax.tree.unflatten(tree, operands[:count])
            given = dict(zip(floats, operands[count:], strict=True))
            each = [
                given[n] if n in given else _no_tangent(shape)
                for n, (shape, _) in enumerate(kinds)
            ]
            cotangents = jax.tree.unflatten(out, each)
            made = self._backward(*statics, kept, cotangents)
            return [
                jnp.zeros(*types[n]) if made[n] is None else made[n].astype(types[n][1])
                for n in moving
            ]

        outputs = tuple(kinds[n] for n in floats)
        given = [tangents[n] for n in moving]
        found = _linear(push, pull, outputs, residuals, given)
        pushed: list[Any] = [_no_tangent(shape) for shape, _ in kinds]
        for n, tangent in zip(floats, found, strict=True):
            pushed[n] = tangent
        return jax.tree.unflatten(out, pushed)


def _no_tangent(shape: Sequence[int]) -> np.ndarray:
    """The tangent of integers."""
    return np.zeros(shape, jax.dtypes.float0)


def _linear(push, pull, outputs, residuals, given) -> list[Any]:
    operands = jaxcompat.vary_alike([*residuals, *given])
    return linear_p.bind(
        *operands, push=push, pull=pull, outputs=outputs, residuals=len(residuals)
    )


@linear_p.def_abstract_eval
def _types(*avals, push, pull, outputs, residuals):
    del push, pull, residuals
    return [jaxcompat.out_aval_like(avals, shape, dtype) for shape, dtype in outputs]


@linear_p.def_impl
def _run(*operands, push, pull, outputs, residuals):
    del pull, outputs, residuals
    return push(*operands)


def _lower(ctx: Any, *operands: Any, push, pull, outputs, residuals) -> Any:
    del pull, outputs, residuals
    plain = ctx.replace(
        avals_in=jaxcompat.plain_avals(ctx.avals_in),
        avals_out=jaxcompat.plain_avals(ctx.avals_out),
    )
    return mlir.lower_fun(push, multiple_results=True)(plain, *operands)


def _jvp(primals, tangents, *, push, pull, outputs, residuals):
    """Linear in what follows the residuals; in those, as JAX differentiates `push`."""
    params = dict(push=push, pull=pull, outputs=outputs, residuals=residuals)
    results = linear_p.bind(*primals, **params)
    kept, given = primals[:residuals], primals[residuals:]
    moving = [n for n in range(residuals) if type(tangents[n]) is not ad.Zero]
    moving = [n for n in moving if tangents[n].dtype != jax.dtypes.float0]
    parts = []
    if any(type(t) is not ad.Zero for t in tangents[residuals:]):
        changes = map(ad.instantiate_zeros, tangents[residuals:])
        parts.append(linear_p.bind(*kept, *changes, **params))
    if moving:

        def of_residuals(*values):
            known = dict(zip(moving, values, strict=True))
            return push(*(known.get(n, x) for n, x in enumerate(kept)), *given)

        values = tuple(kept[n] for n in moving)
        changes = tuple(tangents[n] for n in moving)
        parts.append(jax.jvp(of_residuals, values, changes)[1])
    if not parts:
        return results, [
            ad.Zero(jaxcompat.aval_of(r).to_tangent_aval()) for r in results
        ]
    return results, [sum(each[1:], each[0]) for each in zip(*parts, strict=True)]


def _transpose(cotangents, *operands, push, pull, outputs, residuals):
    del push, outputs
    if all(type(c) is ad.Zero for c in cotangents):
        return [None] * len(operands)
    given = list(map(ad.instantiate_zeros, cotangents))
    found = pull(*operands[:residuals], *given)
    wanted = map(ad.is_undefined_primal, operands[residuals:])
    pairs = zip(found, wanted, strict=True)
    return [*[None] * residuals, *(c if w else None for c, w in pairs)]


def _batch(operands, dims, *, push, pull, outputs, residuals):
    size = next(
        x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
    )
    moved, axes = [], []
    for n, (x, d) in enumerate(zip(operands, dims, strict=True)):
        if d is not None:
            x, axis = jnp.moveaxis(x, d, 0), 0
        elif n >= residuals:  # each cotangent is of its own
            x, axis = jnp.broadcast_to(x, (size, *x.shape)), 0
        else:
            axis = None
        moved.append(x)
        axes.append(axis)
    kept = axes[:residuals]
    made = linear_p.bind(
        *moved,
        push=jax.vmap(push, axes),
        pull=jax.vmap(pull, [*kept, *[0] * len(outputs)]),
        outputs=tuple(((size, *shape), dtype) for shape, dtype in outputs),
        residuals=residuals,
    )
    return made, [0] * len(made)


mlir.register_lowering(linear_p, _lower)
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
sites.MEANINGS[linear_p] = lambda *, push, **_: push
