"""Pulls and pushes blocks through whole functions, by the rows of `block_rules.py`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import jaxcompat
from pallasite.errors import NotFusible
from pallasite.fusion.block_rules import (
    ELEMENTWISE,
    BlockIndexTransform,
    Blocks,
    Equation,
    rule_of,
)
from pallasite.fusion.graph import Atom, Const, Graph, Node, Val

Scalars = Callable[[Sequence[Any]], Mapping[Val, Any]]


def equation(node: Node, **more: Any) -> Equation:
    """A node as the rules see it."""
    return Equation(
        node.primitive,
        node.params,
        tuple(v.shape for v in node.operands),
        tuple(v.shape for v in node.results),
        **more,
    )


def scalar_values(graph: Graph) -> set[Val]:
    """Scalars that block indices, or blocks of one repeated number, depend on."""
    needed: set[Val] = set()
    for node in reversed(graph.nodes):
        if any(v in needed for v in node.results):
            operands: Sequence[Atom] = node.operands
        else:
            eqn = equation(node)
            try:
                operands = [node.operands[n] for n in rule_of(eqn).scalar_operands(eqn)]
            except NotFusible:
                continue
        needed.update(v for v in operands if isinstance(v, Val))
    return needed


def scalars_of(graph: Graph, values: Mapping[Val, Any]) -> dict[Val, Any]:
    """The values of a graph computable from the given ones alone."""
    env = dict(values)
    read = lambda atom: atom.value if isinstance(atom, Const) else env[atom]
    for node in graph.nodes:
        if node.operands and all(
            isinstance(v, Const) or v in env for v in node.operands
        ):
            results = node.bind([read(v) for v in node.operands])
            env.update(zip(node.results, results, strict=True))
    return env


def _known_operands(node: Node, scalars: Scalars) -> Callable[..., list[Any]]:
    def known(outer: Sequence[Any]) -> list[Any]:
        values = scalars(outer)
        return [
            v.value if isinstance(v, Const) else values.get(v) for v in node.operands
        ]

    return known


def pull_through(
    node: Node, outs: tuple[Blocks, ...], scalars: Scalars | None = None
) -> Sequence[Blocks]:
    """The blocks of a node's operands from which its results' blocks are computed.

    Raises:
        NotFusible: there are none.
    """
    known = None if scalars is None else _known_operands(node, scalars)
    eqn = equation(node, scalars=known)
    return rule_of(eqn).pull(eqn, outs)


def push_through(node: Node, ins: Sequence[Blocks]) -> Sequence[Blocks]:
    """The blocks of a node's results computed from its operands' blocks.

    Raises:
        NotFusible: there are none.
    """
    eqn = equation(node)
    push = rule_of(eqn).push
    if push is None:
        raise eqn.refuse("no rule for its results")
    return push(eqn, ins)


def is_scalar_arithmetic(node: Node) -> bool:
    """Whether a node computes a scalar from scalars."""
    if any(v.shape for v in (*node.operands, *node.results)):
        return False
    try:
        return rule_of(equation(node)).pull is ELEMENTWISE.pull
    except NotFusible:
        return False


def evaluate(
    node: Node,
    operands: Sequence[Any],
    blocks: Mapping[Any, Blocks],
    outer: Callable[[], Sequence[Any]] | None,
) -> list[Any]:
    """The blocks of a node's results, from those of its operands."""
    ins = tuple(map(blocks.get, node.operands))
    outs = tuple(map(blocks.get, node.results))
    eqn = equation(node, ins=ins, outs=outs, outer=outer)
    if all(out is None for out in outs) and not is_scalar_arithmetic(node):
        return node.bind(operands)
    made = rule_of(eqn).evaluate(eqn, *operands)
    return list(made) if node.primitive.multiple_results else [made]


def same_blocks(
    a: Blocks, b: Blocks, outer: Sequence[Any] | None, exact: bool = True
) -> bool:
    """Whether two descriptions always denote the same block.

    Args:
        a, b: the descriptions.
        outer: types of the indices of a step; None: unknown.
        exact: whether to compare indices as well as shapes.
    """
    if a is b or a is None or b is None:
        return a is b
    if tuple(a.dims) != tuple(b.dims):
        return False
    if not exact or a.block_index_transform is b.block_index_transform:
        return True
    return outer is not None and _indices_text(a, outer) == _indices_text(b, outer)


def _indices_text(blocks: BlockIndexTransform, outer: Sequence[Any]) -> str:
    def indices(*args: Any) -> list[Any]:
        return [jnp.asarray(i, jnp.int32) for i in jax.tree.leaves(blocks.at(args))]

    with jaxcompat.own_tracing():
        return str(jax.make_jaxpr(indices)(*outer))
