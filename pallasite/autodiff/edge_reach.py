"""Follows what a program computes from zeros past the edge of an array.

A load whose window reads 0 there has rows (or columns) past the edge. `reach_of` says
along which dimensions of which values they are found, and which ops with a pole use
such values. A sum or a dot over the dimension ends it: what is past the edge must not
count in a kernel's result, so the author masked it, and a zero adds nothing to a
cotangent. A load is *lost* if some op that uses it is not understood.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.roles import Cond, Dot, Loop
from pallasite.passes.analysis.memory import VIEWS, Roots

# Operands in which an op or its derivative is not finite at 0, but is at 1.
POLES: Mapping[str, tuple[int, ...]] = {
    "div": (1,),
    "log": (0,),
    "log2": (0,),
    "sqrt": (0,),
    "rsqrt": (0,),
}
# Finite for all finite operands near zero, and so are their derivatives.
_FINITE = {"add", "sub", "mul", "neg", "max", "min", "abs", "sign", "clamp"}
_FINITE |= {"exp", "exp2", "expm1", "logistic", "tanh", "sin", "cos", "erf"}
_FINITE |= {"select_n", "cast", "floor", "ceil", "round"}


class Edge(NamedTuple):
    """A dimension of a loaded tile that may pass the edge of an array."""

    load: Op
    axis: int  # of the tile
    dim: int  # of the block
    is_fixed: bool  # the same in every iteration of loops


Dims = frozenset[tuple[int, Edge]]


@dataclass
class Reach:
    """Where rows past an edge are used.

    Attributes:
        poles: by op with a pole, the operand and its dimension along an edge.
        lost: the loaded tiles that were not followed to all their uses.
    """

    poles: dict[Op, list[tuple[int, int, Edge]]] = field(default_factory=dict)
    lost: set[Value] = field(default_factory=set)


def reach_of(body: Block, edges: Mapping[Value, Iterable[Edge]]) -> Reach:
    """Where the edges of loaded tiles are used, and which tiles are lost.

    Args:
        body: a program.
        edges: by the result of a load, its edges.
    """
    dims = {v: frozenset((e.axis, e) for e in es) for v, es in edges.items()}
    walker = _Walk(body, dims)
    while True:
        before = dict(walker.dims)
        walker.block(body)
        if walker.dims == before:
            return walker.found


class _Walk:
    def __init__(self, body: Block, dims: dict[Value, Dims]) -> None:
        self.dims, self.found, self.roots = dims, Reach(), Roots(body)
        uses = [op for op in walk(body) if op.name not in ("store", *VIEWS)]
        refs = [v for op in uses for v in op.operands if v.is_ref]
        self.read = {self.roots.of(ref) for ref in refs}

    def of(self, value: Value) -> Dims:
        return self.dims.get(value, frozenset())

    def add(self, value: Value, dims: Iterable[tuple[int, Edge]]) -> None:
        new = self.of(value) | frozenset(dims)
        if new:
            self.dims[value] = new

    def lose(self, value: Value) -> None:
        self.found.lost |= {edge.load.result for _, edge in self.of(value)}

    def block(self, block: Block) -> None:
        for op in block.ops:
            if any(self.of(v) for v in op.operands) or op.regions:
                self.op(op)

    def op(self, op: Op) -> None:
        rule = _RULES.get(op.name)
        if rule is not None:
            rule(self, op)
        elif op.name in POLES or op.name in _FINITE:
            self.elementwise(op)
        elif table()[op.name].elementwise and not op.result.tile.dtype.is_float:
            pass  # a comparison, a number: finite anyway
        else:
            for region in op.regions:
                self.block(region)
            leaving = [v for region in op.regions for v in region.yields]
            for value in [*op.operands, *leaving]:
                self.lose(value)

    def elementwise(self, op: Op) -> None:
        for position, value in enumerate(op.operands):
            for dim, edge in self.of(value):
                if position in POLES.get(op.name, ()):
                    use = (position, dim, edge)
                    uses = self.found.poles.setdefault(op, [])
                    uses += [use] * (use not in uses)
                if value.tile.shape == op.result.tile.shape:
                    self.add(op.result, [(dim, edge)])

    def hand_on(self, values: Iterable[Value], to: Iterable[Value]) -> None:
        """Values become others where a region starts or ends."""
        for value, other in zip(values, to, strict=True):
            dims = self.of(value)
            self.found.lost |= {e.load.result for _, e in dims if not e.is_fixed}
            self.add(other, dims)


def _broadcast(w: _Walk, op: Op) -> None:
    (value,), dims = op.operands, op.attrs["dims"]
    for dim, edge in w.of(value):
        if value.tile.shape[dim] == op.attrs["shape"][dims[dim]]:
            w.add(op.result, [(dims[dim], edge)])
        else:
            w.lose(value)


def _transpose(w: _Walk, op: Op) -> None:
    perm = op.attrs["perm"]
    w.add(op.result, [(perm.index(d), e) for d, e in w.of(op.operands[0])])


def _reduce(w: _Walk, op: Op) -> None:
    (value,), axes = op.operands, op.attrs["axes"]
    if op.attrs["kind"] not in ("sum", "max", "min"):
        w.lose(value)  # the derivative of a product divides by its factors
    left = [(d, edge) for d, edge in w.of(value) if d not in axes]
    w.add(op.result, [(d - sum(a < d for a in axes), edge) for d, edge in left])


def _dot(w: _Walk, op: Op) -> None:
    dot = Dot.of(op)
    batch = list(range(len(dot.lhs.batch)))
    starts = (len(batch), len(batch) + len(dot.lhs.free))
    for side, start in zip(dot.sides, starts, strict=True):
        places = dict(zip(side.batch, batch, strict=True))
        places |= {d: start + n for n, d in enumerate(side.free)}
        dims = w.of(side.value)
        w.add(op.result, [(places[d], edge) for d, edge in dims if d in places])


def _loop(w: _Walk, op: Op) -> None:
    loop = Loop.of(op)
    w.hand_on(loop.inits, loop.carried)
    w.hand_on(loop.inits, loop.results)
    w.block(loop.body)
    w.hand_on(loop.yields, loop.carried)
    w.hand_on(loop.yields, loop.results)


def _cond(w: _Walk, op: Op) -> None:
    for branch in Cond.of(op).branches:
        w.block(branch)
        w.hand_on(branch.yields, op.results)


def _store(w: _Walk, op: Op) -> None:
    """What is stored past the edge is dropped; but memory on chip has no edge."""
    if w.roots.of(op.operands[0]) in w.read:
        for value in op.operands:
            w.lose(value)


_RULES: dict[str, Callable[[_Walk, Op], None]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reduce": _reduce,
    "dot": _dot,
    "for": _loop,
    "cond": _cond,
    "store": _store,
}
