"""A traced function as a graph of equations, with inner functions inlined.

Fusion moves equations. A jaxpr does not suit it: variables are unique only within one
jaxpr, and inner functions (`jit`, `custom_jvp`) would hide what to move.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from pallasite import jaxcompat

# Calls to inline. The differentiation rules of a custom_jvp are lost.
_INLINED = "jit pjit closed_call core_call remat2 checkpoint remat "
_INLINED += "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"
INLINED = frozenset(_INLINED.split())


@dataclass(eq=False)
class Val:
    """One value; identity is equality."""

    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def bytes(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count * self.aval.dtype.itemsize


@dataclass(eq=False)
class Const:
    """A literal in an equation."""

    value: Any
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)


Atom = Val | Const


@dataclass(eq=False)
class Node:
    """One equation."""

    primitive: Any
    params: dict[str, Any]
    operands: list[Atom]
    results: list[Val]

    def bind(self, operands: Sequence[Any]) -> list[Any]:
        params = self.primitive.get_bind_params(self.params)
        made = self.primitive.bind(*operands, **params)
        return list(made) if self.primitive.multiple_results else [made]


@dataclass
class Graph:
    """Equations in an executable order.

    Attributes:
        constants: the variables the function closes over, and their values.
        inputs, outputs: of the function, flat.
        nodes: the equations.
    """

    constants: list[tuple[Val, Any]]
    inputs: list[Val]
    outputs: list[Atom]
    nodes: list[Node] = field(default_factory=list)

    @staticmethod
    def of(fn: Callable[..., Any], *args: Any) -> "tuple[Graph, Any]":
        """The graph of `fn`, a function of flat arguments, and its tree of results."""
        made: list[Any] = []

        def flat(*flat_args: Any) -> list[Any]:
            leaves, tree = jax.tree.flatten(fn(*flat_args))
            made.append(tree)
            return leaves

        closed = jaxcompat.lower_high_level(jax.make_jaxpr(flat)(*args))
        return Graph.of_jaxpr(*jaxcompat.opened(closed)), made[0]

    @staticmethod
    def of_jaxpr(jaxpr: Any, values: Sequence[Any]) -> "Graph":
        """The graph of a jaxpr and its constants."""
        graph = Graph([], [Val(v.aval) for v in jaxpr.invars], [])
        consts = graph._constants(jaxpr, values)
        graph.outputs = graph._add(jaxpr, consts, graph.inputs)
        return graph

    def _constants(self, jaxpr: Any, values: Sequence[Any]) -> list[Val]:
        """The constants of a jaxpr; a value already known is not added again."""
        found = []
        for var, value in zip(jaxpr.constvars, values, strict=True):
            known = [val for val, other in self.constants if other is value]
            if not known:
                known = [Val(var.aval)]
                self.constants.append((known[0], value))
            found.append(known[0])
        return found

    def _add(
        self, jaxpr: Any, consts: Sequence[Atom], args: Sequence[Atom]
    ) -> list[Atom]:
        """Append the equations of a jaxpr; return its results."""
        env: dict[Any, Atom] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Atom:
            return Const(atom.val, atom.aval) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive.name in INLINED and inner is not None:
                opened, values = jaxcompat.opened(inner)
                held = self._constants(opened, values)
                results = self._add(opened, held, operands)
            else:
                results = [Val(v.aval) for v in eqn.outvars]
                node = Node(eqn.primitive, dict(eqn.params), operands, results)
                self.nodes.append(node)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def sort(self) -> None:
        """Drop what no output needs, and put the rest in an executable order."""
        makers = {value: node for node in self.nodes for value in node.results}
        done: dict[Node, None] = {}
        for value in self.outputs:
            waiting = [makers[value]] if value in makers else []
            while waiting:
                node = waiting[-1]
                before = [makers[v] for v in node.operands if v in makers]
                missing = [n for n in before if n not in done]
                if missing:
                    waiting += missing
                    continue
                done.setdefault(waiting.pop())
        self.nodes = list(done)

    def uses(self, value: Val) -> int:
        """How many equations and results use a value."""
        used = [v for node in self.nodes for v in dict.fromkeys(node.operands)]
        return sum(v is value for v in [*used, *self.outputs])

    def without_unused(self) -> list[Node]:
        """The equations that results need, in order."""
        needed = {v for v in self.outputs if isinstance(v, Val)}
        kept = []
        for node in reversed(self.nodes):
            effects = getattr(node.primitive, "name", "") in _EFFECTS
            if effects or any(v in needed for v in node.results):
                kept.append(node)
                needed.update(v for v in node.operands if isinstance(v, Val))
        return kept[::-1]

    def run(self, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results, by binding every equation again."""
        env: dict[Val, Any] = dict(zip(self.inputs, args, strict=True))
        env.update(zip((v for v, _ in self.constants), constants, strict=True))
        read = lambda atom: atom.value if isinstance(atom, Const) else env[atom]
        for node in self.nodes:
            results = node.bind([read(v) for v in node.operands])
            env.update(zip(node.results, results, strict=True))
        return [read(v) for v in self.outputs]


_EFFECTS = frozenset({"debug_callback", "debug_print", "io_callback"})
