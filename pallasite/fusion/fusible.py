"""Kernels that take functions in place of operands: `fusible`, `Fusion` and `fuse`.

`fusible` marks a function that calls a kernel. Inside `fuse` it receives, for each
operand, the function that produces it (a `Fusion`), and one from its results to what
the caller wants; elsewhere it receives trivial ones.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.core import eval_jaxpr
from jax.interpreters import ad, batching, mlir

from pallasite import jaxcompat
from pallasite.errors import SpecError
from pallasite.fusion.graph import Atom, Const, Graph, Node, Val
from pallasite.language.trace import user_location

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Fusion(Generic[P, R]):
    """A function that a kernel computes on blocks, with its types.

    Attributes:
        func: the function.
        in_type: the types of its positional and keyword arguments.
        out_type: the type of its result.
        strict_mode: as for `pull_block_spec`.
    """

    func: Callable[P, R]
    in_type: tuple[tuple[Any, ...], dict[str, Any]]
    out_type: Any
    strict_mode: bool = True

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.func(*args, **kwargs)

    @property
    def type(self) -> Any:
        return self.out_type

    @property
    def shape(self) -> Any:
        return jax.tree.map(lambda x: x.shape, self.out_type)

    @property
    def dtype(self) -> Any:
        return jax.tree.map(lambda x: x.dtype, self.out_type)

    @property
    def in_shape(self) -> Any:
        return jax.tree.map(lambda x: x.shape, self.in_type)

    @property
    def in_dtype(self) -> Any:
        return jax.tree.map(lambda x: x.dtype, self.in_type)


# --- the primitive ---

fusible_p = jaxcompat.Primitive("fusible")
fusible_p.multiple_results = True


@dataclass(frozen=True, eq=False)
class _Fusible:
    """What the primitive stands for."""

    function: Callable[..., Any]  # a function of fusions
    unfused: Any  # the jaxpr from operands, without its constants
    num_constants: int
    in_tree: Any
    out_tree: Any
    prefix: Any  # how results are grouped

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", "fusible")


def _run(*operands: Any, fusible: _Fusible) -> list[Any]:
    n = fusible.num_constants
    return eval_jaxpr(fusible.unfused, operands[:n], *operands[n:])


def _types(*avals: Any, fusible: _Fusible) -> tuple[list[Any], Any]:
    return [v.aval for v in fusible.unfused.outvars], fusible.unfused.effects


fusible_p.def_impl(_run)
fusible_p.def_effectful_abstract_eval(_types)
mlir.register_lowering(fusible_p, mlir.lower_fun(_run, multiple_results=True))


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    run = jax.vmap(functools.partial(_run, **params), in_axes=tuple(dims))
    results = run(*operands)
    return results, [0] * len(results)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    given = [ad.instantiate_zeros(t) for t in tangents]
    run = functools.partial(_run, **params)
    return jax.jvp(run, tuple(primals), tuple(given))


batching.primitive_batchers[fusible_p] = _batch
ad.primitive_jvps[fusible_p] = _jvp


def fusible(f: Any = None, *, output_fusion_prefix: Any = True) -> Any:
    """Mark a function that calls a kernel as one that `fuse` can fuse into.

    Args:
        f: called as `f(*fusions, output_fusions)`: a `Fusion` for each operand, and for
            the results a `Fusion`, or None if there is nothing to do.
        output_fusion_prefix: a pytree whose leaves are groups of results; each has its
            own output fusion.

    Returns:
        A function of arrays, or a decorator if `f` is not given.
    """
    if f is None:
        return functools.partial(fusible, output_fusion_prefix=output_fusion_prefix)
    none = jax.tree.map(lambda _: None, output_fusion_prefix)

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        function = functools.partial(f, **kwargs) if kwargs else f
        flat, tree = jax.tree.flatten(args)
        out_trees: list[Any] = []

        def unfused(*leaves: Any) -> list[Any]:
            fusions = jax.tree.unflatten(tree, [_constant_fusion(x) for x in leaves])
            results, out_tree = jax.tree.flatten(function(*fusions, none))
            out_trees.append(out_tree)
            return results

        jaxpr, constants = jaxcompat.opened(jax.make_jaxpr(unfused)(*flat))
        params = _Fusible(
            function, jaxpr, len(constants), tree, out_trees[0], output_fusion_prefix
        )
        results = fusible_p.bind(*constants, *flat, fusible=params)
        return jax.tree.unflatten(out_trees[0], results)

    return wrapper


def _constant_fusion(x: Any) -> Fusion[Any, Any]:
    return Fusion(lambda: x, ((), {}), jaxcompat.aval_of(x))


# --- fuse ---


def fuse(
    f: Any = None,
    *,
    resolve_fusion_dtypes: bool = True,
    debug: bool = False,
    strict_mode: bool = True,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
) -> Any:
    """Fuse what a function does around its one `fusible` into that `fusible`.

    Args:
        f: the function.
        resolve_fusion_dtypes: without effect, as there are no special dtypes here.
        debug: print what there is to fuse.
        strict_mode: as for `pull_block_spec`; the kernel passes it on.
        static_argnums, static_argnames: arguments that `f` gets as they are, as for
            `jax.jit`.

    Returns:
        A function of the same arguments, or a decorator if `f` is not given.
    """
    if f is None:
        more = dict(static_argnums=static_argnums, static_argnames=static_argnames)
        return functools.partial(fuse, debug=debug, strict_mode=strict_mode, **more)
    static = _static_names(f, static_argnums, static_argnames)

    @functools.wraps(f)
    def fused(*args: Any, **kwargs: Any) -> Any:
        known = [n in static for n in range(len(args))]
        traced = [None if k else a for a, k in zip(args, known, strict=True)]
        constant = {name: x for name, x in kwargs.items() if name in static}
        named = {name: x for name, x in kwargs.items() if name not in static}
        flat, tree = jax.tree.flatten((traced, named))

        def run(*leaves: Any) -> Any:
            mine, own_named = jax.tree.unflatten(tree, leaves)
            own = (a if k else x for a, k, x in zip(args, known, mine, strict=True))
            return f(*own, **own_named, **constant)

        graph, out_tree = Graph.of(run, *flat)
        if debug:
            names = [node.primitive.name for node in graph.nodes]
            print(f"{getattr(f, '__name__', f)}: {' '.join(names)}")
        return jax.tree.unflatten(out_tree, _fuse(graph, flat, strict_mode, f))

    return fused


def _static_names(
    f: Any, numbers: int | Sequence[int] | None, names: str | Sequence[str] | None
) -> set[int | str]:
    """Static arguments by position and by name: one that is either is both."""
    if numbers is None and names is None:
        return set()
    known = list(inspect.signature(f).parameters)
    given = (numbers,) if isinstance(numbers, int) else tuple(numbers or ())
    words = (names,) if isinstance(names, str) else tuple(names or ())
    places = {n % len(known) for n in given}
    places |= {known.index(word) for word in words if word in known}
    return {*places, *words, *(known[n] for n in places)}


def _fuse(graph: Graph, args: Sequence[Any], strict: bool, f: Any) -> list[Any]:
    calls = [node for node in graph.nodes if node.primitive is fusible_p]
    if len(calls) != 1:
        raise SpecError(
            f"{len(calls)} calls of a fusible function; fuse supports one",
            [("function", getattr(f, "__name__", repr(f)))],
            user_location(),
            "fuse a function for each of them",
        )
    (node,) = calls
    env = dict(zip(graph.inputs, args, strict=True))
    env.update(graph.constants)
    outside = [other for other in graph.nodes if other is not node]
    fused = node.params["fusible"]

    inputs = [
        _fusion(outside, env, [], [v], strict)
        for v in node.operands[fused.num_constants :]
    ]
    groups = _groups(node, fused)
    depends = [_downstream(outside, group) for group in groups]
    wanted = [
        [n for n, v in enumerate(graph.outputs) if isinstance(v, Val) and v in found]
        for found in depends
    ]
    claimed = [n for group in wanted for n in group]
    if len(set(claimed)) != len(claimed):
        raise SpecError(
            "a result depends on two groups of the kernel's results",
            [("output_fusion_prefix", fused.prefix)],
            user_location(),
            "put them into one group",
        )
    outputs: list[Any] = []
    for group, numbers in zip(groups, wanted, strict=True):
        results = [graph.outputs[n] for n in numbers]
        trivial = results == list(group)
        made = _fusion(outside, env, list(group), results, strict, True)
        outputs.append(None if trivial else made)
    if not claimed:
        return _evaluated(outside, env, graph.outputs)
    fusions = jax.tree.unflatten(fused.in_tree, inputs)
    prefix = jax.tree.structure(fused.prefix)
    found = fused.function(*fusions, jax.tree.unflatten(prefix, outputs))
    made = dict(zip(claimed, jax.tree.leaves(found), strict=True))
    rest = [n for n in range(len(graph.outputs)) if n not in made]
    others = _evaluated(outside, env, [graph.outputs[n] for n in rest])
    made.update(zip(rest, others, strict=True))
    return [made[n] for n in range(len(graph.outputs))]


def _groups(node: Node, fused: _Fusible) -> list[list[Val]]:
    results = jax.tree.unflatten(fused.out_tree, node.results)
    parts = jax.tree.structure(fused.prefix).flatten_up_to(results)
    return [jax.tree.leaves(part) for part in parts]


def _downstream(nodes: Sequence[Node], sources: Sequence[Val]) -> set[Val]:
    found = set(sources)
    for node in nodes:
        if any(isinstance(v, Val) and v in found for v in node.operands):
            found.update(node.results)
    return found


def _fusion(
    nodes: Sequence[Node],
    env: dict[Val, Any],
    arguments: Sequence[Val],
    results: Sequence[Atom],
    strict: bool,
    several: bool = False,
) -> Fusion[Any, Any]:
    """The equations from some values to others, as a function."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        own = {**env, **dict(zip(arguments, leaves, strict=True))}
        made = _evaluated(nodes, own, results)
        return tuple(made) if several else made[0]

    types = [v.aval for v in results]
    in_type = tuple(v.aval for v in arguments)
    return Fusion(run, (in_type, {}), tuple(types) if several else types[0], strict)


def _evaluated(
    nodes: Sequence[Node], env: dict[Val, Any], results: Sequence[Atom]
) -> list[Any]:
    """Some values of a graph; only the equations they need run."""
    graph = Graph([], [], list(results), list(nodes))
    known = dict(env)
    read = lambda atom: atom.value if isinstance(atom, Const) else known[atom]
    needed = [n for n in graph.without_unused() if n.results[0] not in known]
    for node in needed:
        if all(isinstance(v, Const) or v in known for v in node.operands):
            made = node.bind([read(v) for v in node.operands])
            known.update(zip(node.results, made, strict=True))
    return [read(v) for v in results]
