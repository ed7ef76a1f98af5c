"""`pl.fuse(f)`: fuses the code around a function's kernel calls into the kernels."""

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr

from pallasite import config, jaxcompat
from pallasite.language.arguments import Arguments

if TYPE_CHECKING:
    from pallasite.fusion.graph import Graph

MOST_KEPT = 256  # traced programs per function
# Immutable arguments besides arrays: with any other kind, a function is retraced at
# each call.
_NUMBERS = (bool, int, float, complex, str, bytes)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type(jax.jit(len)))
_CONSTANTS = (type, np.dtype, Enum, *_FUNCTIONS)


def fuse(function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Fuse what surrounds kernel calls into the kernels, block by block.

    Functions that produce a kernel's operand (elementwise, casts, broadcasts,
    transposes, reshapes, slices, reductions) move into its loads, functions of its
    results into its stores, where that moves fewer bytes. The arrays in between are
    never materialised. `pl.explain` says what was fused, what was not, and why.

    Args:
        function: any JAX function; kernel calls in its loops and branches stay as they
            are. It is traced once per kind of arguments, as by `jax.jit`; arguments
            that are not arrays are passed as they are.

    Returns:
        A function of the same arguments. Its derivatives are those of `function`,
        unfused.

    Example:
        `jax.jit(pl.fuse(lambda x, w, b: jax.nn.gelu(matmul(x, w) + b)))`
    """
    if function is None:
        return fuse

    kept: dict[Any, _Program] = {}

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        given = Arguments(args, kwargs)
        key = _key(given)
        program = None if key is None else kept.get(key)
        if program is None:
            program = _Program(function, given)
            if key is not None and program.is_closed:
                if len(kept) >= MOST_KEPT:
                    kept.clear()
                kept[key] = program
        return program(given.arrays)

    return fused


def _key(given: Arguments) -> Any:
    """What tracing depends on; None if an argument is mutable."""
    others = []
    for x in given.others:
        if isinstance(x, _NUMBERS):
            others.append((type(x), repr(x)))  # 0.0 == -0.0, 1 == True
        elif isinstance(x, _CONSTANTS):
            others.append(x)
        else:
            return None
    knobs = tuple(config.get(name) for name in ("target", "backend", "interpret"))
    types = tuple(jax.typeof(x) for x in given.arrays)
    key = given.form, types, tuple(others), knobs, jaxcompat.trace_context()
    try:
        hash(key)
    except TypeError:  # a pytree with an unhashable node
        return None
    return key


class _Program:
    """A function, traced and fused for one kind of arguments.

    Attributes:
        is_closed: whether it can be reused: none of its values belongs to a trace.
    """

    def __init__(self, function: Callable[..., Any], given: Arguments):
        trees: list[Any] = []

        def run(*arrays: Any) -> list[Any]:
            results, tree = jax.tree.flatten(given.call(function, *arrays))
            trees.append(tree)
            return results

        traced = jax.make_jaxpr(run)(*given.arrays)
        self._jaxpr, self._values = jaxcompat.opened(traced)
        self._tree = trees[0]
        self._graph = None
        if self._jaxpr.effects:
            kinds = sorted({type(e).__name__ for e in self._jaxpr.effects})
            note = f"nothing: the function has side effects ({', '.join(kinds)})"
            self._jaxpr = _noted(self._jaxpr, note)
        else:
            self._graph = _planned(self._jaxpr, self._values)
        held = [value for _, value in self._graph.constants] if self._graph else []
        values = (*self._values, *held)
        self.is_closed = not any(isinstance(x, Tracer) for x in values)

    def __call__(self, arrays: Sequence[Any]) -> Any:
        run = self._unfused if self._graph is None else self._fused(self._graph)
        found = run(*self._values, *arrays)
        results = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in found]
        return jax.tree.unflatten(self._tree, results)

    def _unfused(self, *both: Any) -> list[Any]:
        count = len(self._values)
        return eval_jaxpr(self._jaxpr, both[:count], *both[count:])

    def _fused(self, graph: "Graph") -> Callable[..., list[Any]]:
        count = len(self._values)

        @jax.custom_jvp
        def fused(*both: Any) -> list[Any]:
            held = [value for _, value in graph.constants[count:]]
            results = graph.run([*both[:count], *held], both[count:])
            # Kernels return no weak types; later code must promote as if unfused.
            return [
                jaxcompat.weakly_typed(x) if var.aval.weak_type else x
                for x, var in zip(results, self._jaxpr.outvars, strict=True)
            ]

        @fused.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            return jax.jvp(self._unfused, primals, tangents)

        return fused


def _noted(jaxpr: Any, note: str) -> Any:
    """A jaxpr whose kernel calls note what was not fused, and why."""
    from pallasite.fusion.graph import INLINED
    from pallasite.primitive import call_p

    equations = []
    for eqn in jaxcompat.opened(jaxpr)[0].eqns:
        params = dict(eqn.params)
        if eqn.primitive is call_p:
            params["call"] = replace(params["call"], fused=(note,))
        elif eqn.primitive.name in INLINED and "jaxpr" in params:
            params["jaxpr"] = _noted(params["jaxpr"], note)
        equations.append(eqn.replace(params=params))
    return jaxcompat.with_equations(jaxpr, equations)


def _planned(jaxpr: Any, constants: list[Any]) -> "Graph | None":
    """The fused graph; None if there is nothing to fuse."""
    from pallasite.fusion.graph import Graph
    from pallasite.fusion.plan import plan
    from pallasite.primitive import call_p

    closed = jaxcompat.lower_high_level(jaxpr)
    graph = Graph.of_jaxpr(jaxcompat.opened(closed)[0], constants)
    if all(node.primitive is not call_p for node in graph.nodes):
        return None
    plan(graph)
    return graph
