"""`pl.fuse(f)`: what a function does around its kernel calls, done in the kernels."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from pallasite import jaxcompat

if TYPE_CHECKING:
    from pallasite.fusion.graph import Graph


def fuse(function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Compute what is around kernel calls on the blocks of the kernels.

    Functions that make an operand of a kernel (elementwise, casts, broadcasts,
    transposes, reshapes, slices, reductions) move into its loads, those of its results
    into its stores, where that moves fewer bytes. Arrays between them are not made.
    `pl.explain` says what was fused, and what was not and why.

    Args:
        function: any JAX function; kernel calls in its loops and branches stay as they
            are.

    Returns:
        A function of the same arguments. Its derivatives are those of `function`,
        unfused.

    Example:
        `jax.jit(pl.fuse(lambda x, w, b: jax.nn.gelu(matmul(x, w) + b)))`
    """
    if function is None:
        return fuse

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        # Python's numbers, strings and the like stay what they are to the function.
        is_array = [hasattr(x, "dtype") and hasattr(x, "shape") for x in leaves]
        flat = [x for x, a in zip(leaves, is_array, strict=True) if a]
        trees: list[Any] = []

        def run(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            pairs = zip(leaves, is_array, strict=True)
            both = [next(given) if a else x for x, a in pairs]
            own_args, own_kwargs = jax.tree.unflatten(tree, both)
            results, out_tree = jax.tree.flatten(function(*own_args, **own_kwargs))
            trees.append(out_tree)
            return results

        jaxpr, values = jaxcompat.opened(jax.make_jaxpr(run)(*flat))
        found = _run(jaxpr, [*values, *flat], len(values))
        results = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in found]
        return jax.tree.unflatten(trees[0], results)

    return fused


def _run(jaxpr: Any, operands: list[Any], count: int) -> list[Any]:
    """The results of a jaxpr; the first `count` operands are its constants."""

    def unfused(*both: Any) -> list[Any]:
        return eval_jaxpr(jaxpr, both[:count], *both[count:])

    graph = _planned(jaxpr, operands[:count])
    if graph is None:
        return unfused(*operands)

    @jax.custom_jvp
    def fused(*both: Any) -> list[Any]:
        held = [value for _, value in graph.constants[count:]]
        results = graph.run([*both[:count], *held], both[count:])
        # Kernels give no weak types; what follows is promoted as without them.
        return [
            jaxcompat.weakly_typed(x) if var.aval.weak_type else x
            for x, var in zip(results, jaxpr.outvars, strict=True)
        ]

    @fused.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(unfused, primals, tangents)

    return fused(*operands)


def _planned(jaxpr: Any, constants: list[Any]) -> "Graph | None":
    """The fused graph; None where there is nothing to fuse."""
    from pallasite.fusion.graph import Graph
    from pallasite.fusion.plan import plan
    from pallasite.primitive import call_p

    if jaxpr.effects:
        return None
    closed = jaxcompat.lower_high_level(jaxpr)
    graph = Graph.of_jaxpr(jaxcompat.opened(closed)[0], constants)
    if all(node.primitive is not call_p for node in graph.nodes):
        return None
    plan(graph)
    return graph
