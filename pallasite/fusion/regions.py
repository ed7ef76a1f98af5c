"""Finds what around a kernel call can be computed on its blocks.

`producers_of` starts at an operand and follows blocks back through the equations that
produce it; `consumers_of` starts at a result and follows blocks forward, then back to
the equations' other operands. Both return an `Expression`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import NotFusible
from pallasite.fusion.block_rules import (
    BlockIndexTransform,
    Blocks,
    is_numbered,
    rule_of,
    seen_shape,
    size_of,
)
from pallasite.fusion.graph import Atom, Const, Graph, Node, Val
from pallasite.fusion.propagate import (
    equation,
    evaluate,
    is_scalar_arithmetic,
    pull_through,
    push_through,
    same_blocks,
)
from pallasite.ir import types as T
from pallasite.language.specs import Element

INDEX = jax.ShapeDtypeStruct((), "int32")
MOST_STEPS = 1 << 20  # that are compared one by one


@dataclass(frozen=True)
class Expression:
    """Equations to compute on blocks.

    Attributes:
        rank: number of indices of the block that determines all others.
        nodes: the equations, in order.
        given: the value whose block is available: the result; None for operands.
        leaves: the values it reads.
        results: the values it computes.
        blocks: the blocks of all these values; None for scalars.
        scalars: the leaves that block indices depend on.
    """

    rank: int
    nodes: tuple[Node, ...]
    given: Val | None
    leaves: tuple[Atom, ...]
    results: tuple[Val, ...]
    blocks: Mapping[Atom, Blocks]
    scalars: tuple[Val, ...] = ()

    @property
    def names(self) -> str:
        """The names of its primitives, for reports."""
        return ", ".join(dict.fromkeys(node.primitive.name for node in self.nodes))

    def block_type(self, value: Atom) -> jax.ShapeDtypeStruct:
        blocks = self.blocks[value]
        shape = () if blocks is None else seen_shape(blocks.dims)
        return jax.ShapeDtypeStruct(shape, value.aval.dtype)

    def traced(self) -> Any:
        """The jaxpr from indices, leaf blocks and the given block to results."""

        def run(*args: Any) -> list[Any]:
            indices, pending = args[: self.rank], iter(args[self.rank :])
            known: dict[Atom, Any] = {leaf: next(pending) for leaf in self.leaves}
            if self.given is not None:
                known[self.given] = next(pending)
            outer = (*indices, *(known[s] for s in self.scalars))

            def read(atom: Atom) -> Any:
                if isinstance(atom, Const) and atom not in known:
                    return atom.value
                return known[atom]

            for node in self.nodes:
                operands = [read(v) for v in node.operands]
                made = evaluate(node, operands, self.blocks, lambda: outer)
                known.update(zip(node.results, made, strict=True))
            return [known[v] for v in self.results]

        types = [self.block_type(leaf) for leaf in self.leaves]
        if self.given is not None:
            types.append(self.block_type(self.given))
        with jaxcompat.own_tracing():
            made = jax.make_jaxpr(run)(*[INDEX] * self.rank, *types)
            return jaxcompat.lower_high_level(made)


class Region:
    """Blocks of values around a call, found by walking the graph backwards.

    Attributes:
        reasons: why equations were left out, the first of each kind.
    """

    def __init__(self, graph: Graph, value: Val, dims: Sequence[Any]):
        self.graph, self.rank = graph, len(dims)
        self.counts = block_counts(value.shape, dims)  # one step per block
        self.nodes: list[Node] = []
        self.blocks: dict[Atom, Blocks] = {}
        self.scalars: list[Val] = []  # that block indices depend on
        self.reasons: list[str] = []

    def walk_back(
        self,
        needed: Sequence[Node],
        barred: set[Val],
        given: Val | None = None,
        shrinking: bool = True,
    ) -> None:
        """Follow blocks from results to operands, through all equations that allow it.

        Args:
            needed: equations that must allow it.
            barred: values of the call itself and what depends on it.
            given: where to stop.
            shrinking: also go through equations whose results are smaller than their
                operands.

        Raises:
            NotFusible: one of `needed` does not allow it.
        """
        must = set(needed)
        for node in reversed(self.graph.nodes):
            outs = tuple(self.blocks.get(v) for v in node.results)
            is_number = node.results[0] in self.blocks and is_scalar_arithmetic(node)
            if all(out is None for out in outs) and not is_number:
                continue
            if given in node.results or set(self.scalars) & set(node.results):
                continue
            if node not in must and barred & set(node.results):
                continue
            try:
                if node not in must and not shrinking and _shrinks(node):
                    continue
                self._enter(node, outs)
            except NotFusible as error:
                if node in must:
                    raise
                self.reasons.append(error.what)

    def _enter(self, node: Node, outs: tuple[Blocks, ...]) -> None:
        if any(v not in self.blocks for v in node.results):
            raise NotFusible(f"only some results of {node.primitive} are used")
        ins = [None] * len(node.operands)
        if any(out is not None for out in outs):
            self._note_scalars(node)
            ins = pull_through(node, outs, self._scalars)
        found = dict(self.blocks)
        for value, blocks in zip(node.operands, ins, strict=True):
            if T.dtype_of(value.aval.dtype) is None:
                raise NotFusible(f"kernels do not support {value.aval.dtype}")
            if blocks is not None and not _numbered_alike(blocks, outs):
                raise NotFusible(
                    f"blocks of {node.primitive} are not aligned with the blocks"
                )
            if value in found and not self.same(value, found[value], blocks):
                raise NotFusible("two uses of a value need different blocks of it")
            if isinstance(value, Val) or value.shape:
                found[value] = blocks
        self.blocks = found
        self.nodes.append(node)

    def _note_scalars(self, node: Node) -> None:
        eqn = equation(node)
        rule = rule_of(eqn)
        for n in rule.scalar_operands(eqn) if rule.is_indexed else ():
            value = node.operands[n]
            if isinstance(value, Val) and value not in self.scalars:
                self.scalars.append(value)

    def _scalars(self, outer: Sequence[Any]) -> dict[Val, Any]:
        return dict(zip(self.scalars, outer[self.rank :], strict=False))

    def same(self, value: Atom, a: Blocks, b: Blocks) -> bool:
        """Whether two descriptions denote the same block of a value at every step."""
        if a is None or b is None or tuple(a.dims) != tuple(b.dims):
            return a is b
        if self.scalars or prod(self.counts) > MOST_STEPS:
            numbers = [INDEX] * (self.rank + len(self.scalars))
            return same_blocks(a, b, numbers)
        steps = np.meshgrid(*map(np.arange, self.counts), indexing="ij", sparse=True)
        last = [n - 1 for n in block_counts(value.shape, a.dims)]
        with jax.ensure_compile_time_eval():
            pairs = zip(a.at(steps), b.at(steps), last, strict=True)
            return all(
                bool(np.all(np.minimum(i, n) == np.minimum(j, n))) for i, j, n in pairs
            )

    def expression(
        self, results: Sequence[Val], given: Val | None = None
    ) -> Expression:
        made = {v for node in self.nodes for v in node.results}
        leaves = tuple(v for v in self.blocks if v not in made and v is not given)
        nodes = tuple(reversed(self.nodes))
        return Expression(
            self.rank,
            nodes,
            given,
            leaves,
            tuple(results),
            dict(self.blocks),
            tuple(s for s in self.scalars if s in self.blocks),
        )


def block_counts(shape: Sequence[int], dims: Sequence[Any]) -> list[int]:
    """How many block indices each dimension of an array has."""
    pairs = zip(shape, dims, strict=True)
    return [ceil(n / size_of(d)) if is_numbered(d) else n for n, d in pairs]


def _numbered_alike(blocks: BlockIndexTransform, outs: Sequence[Blocks]) -> bool:
    """Whether blocks are indexed by element only if those they come from are."""
    starts = lambda b: any(isinstance(d, Element) for d in b.dims)
    return not starts(blocks) or any(b is not None and starts(b) for b in outs)


def _shrinks(node: Node) -> bool:
    operands = [prod(v.shape) for v in node.operands]
    return max(operands, default=0) > max(prod(v.shape) for v in node.results)


def whole(dims: Sequence[Any]) -> BlockIndexTransform:
    """The blocks that determine all others."""
    return BlockIndexTransform(tuple(dims), lambda *outer: outer[: len(dims)])


def producers_of(
    graph: Graph, value: Val, dims: Sequence[Any], shrinking: bool
) -> tuple[Expression, list[str]]:
    """The equations that produce an operand block by block, and why not more.

    Args:
        graph: the graph with the call.
        value: the operand.
        dims: its blocks.
        shrinking: also go through reductions and slices.
    """
    region = Region(graph, value, dims)
    region.blocks[value] = whole(dims)
    region.walk_back((), set(), shrinking=shrinking)
    return region.expression([value]), region.reasons


def consumers_of(
    graph: Graph, call: Node, value: Val, dims: Sequence[Any]
) -> tuple[Expression | None, list[str]]:
    """The equations that use a result block by block, and why not more.

    Args:
        graph: the graph with the call.
        call: the call.
        value: its result.
        dims: the result's blocks.
    """
    after = _downstream(graph, call)
    refused: set[Node] = set()
    reasons: list[str] = []
    while True:
        region, pushed = _pushed(graph, value, dims, after, refused, reasons)
        if not region:
            return None, reasons
        results = _escaping(graph, region)
        back = Region(graph, value, dims)
        back.blocks = {v: pushed[v] for v in results}
        try:
            back.walk_back(region, after, given=value)
            _check_blocks(back, pushed)
            if value not in back.blocks:
                raise NotFusible("the functions of the result do not use its elements")
        except NotFusible as error:
            # The region's last equation that leads there must be excluded.
            reasons.append(error.what)
            refused.add(region[-1])
            continue
        return back.expression(results, value), reasons


def _downstream(graph: Graph, call: Node) -> set[Val]:
    found = set(call.results)
    for node in graph.nodes:
        if any(isinstance(v, Val) and v in found for v in node.operands):
            found.update(node.results)
    return found


def _pushed(
    graph: Graph,
    value: Val,
    dims: Sequence[Any],
    after: set[Val],
    refused: set[Node],
    reasons: list[str],
) -> tuple[list[Node], dict[Atom, Blocks]]:
    """The equations that a result's blocks reach, and the blocks they produce."""
    blocks: dict[Atom, Blocks] = {value: whole(dims)}
    region: list[Node] = []
    for node in graph.nodes:
        if node in refused:
            continue
        following = [v for v in node.operands if isinstance(v, Val) and v in after]
        if not following:
            continue
        if any(v not in blocks for v in following):
            if any(v in blocks for v in following):
                reasons.append(f"{node.primitive} also depends on other results")
            continue
        try:
            outs = push_through(node, [blocks.get(v) for v in node.operands])
            sizes = [prod(v.shape) for v in node.operands]
            if any(prod(v.shape) > max(sizes) for v in node.results):
                raise NotFusible(
                    f"{node.primitive} produces more elements than it reads"
                )
            if any(T.dtype_of(v.aval.dtype) is None for v in node.results):
                raise NotFusible(
                    f"{node.primitive} produces a dtype that kernels do not support"
                )
        except NotFusible as error:
            reasons.append(error.what)
            continue
        region.append(node)
        blocks.update(zip(node.results, outs, strict=True))
    return region, blocks


def _escaping(graph: Graph, region: Sequence[Node]) -> list[Val]:
    """The values a region produces that others use."""
    inside = set(region)
    used = {v for v in graph.outputs if isinstance(v, Val)}
    for node in graph.nodes:
        if node not in inside:
            used.update(v for v in node.operands if isinstance(v, Val))
    return [v for node in region for v in node.results if v in used]


def _check_blocks(region: Region, pushed: Mapping[Atom, Blocks]) -> None:
    """Checks that the blocks needed are those available."""
    for value, blocks in pushed.items():
        needed = region.blocks.get(value)
        if needed is not None and not region.same(value, needed, blocks):
            raise NotFusible("a block is needed that another grid step computes")


def index_jaxpr(blocks: BlockIndexTransform, rank: int, scalars: int) -> Any:
    """The jaxpr from `rank` indices and scalars to other block indices."""

    def run(*outer: Any) -> list[Any]:
        return [jnp.asarray(i, jnp.int32) for i in blocks.at(outer)]

    with jaxcompat.own_tracing():
        types = [INDEX] * (rank + scalars)
        return jaxcompat.lower_high_level(jax.make_jaxpr(run)(*types))
