"""Assigns a spread to each tile of a kernel.

`assign` gives matmuls the layout of their instruction, then gives the largest remaining
tiles a striped layout, and propagates each choice through the ops: elementwise ops keep
a layout, reductions and broadcasts drop or add dimensions. A tile filled with one
number is *uniform* and needs no layout. Where the operands of an op differ in layout,
the emitter converts them through shared memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pallasite.backends.cuda.layouts import Lane, Spread, striped
from pallasite.backends.cuda.unfinished_sums import partial_sums
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.roles import Cond, Loop, While
from pallasite.ir.types import TileType

Change = Callable[[Spread], Spread | None]
Relation = tuple[Value, Value, Change | None, Change | None]  # both directions


@dataclass(frozen=True)
class Assignment:
    """The spread of each tile, and which tiles are uniform or hold partial sums."""

    spreads: Mapping[Value, Spread]
    uniform: frozenset[Value]
    partial: Mapping[Value, tuple[Lane, ...]] = field(default_factory=dict)


def assign(
    body: Block, threads: int, vector: int, anchors: Mapping[Value, Spread]
) -> Assignment:
    """Spreads of all tiles of a program.

    Args:
        body: the program's code.
        threads: how many run it together.
        vector: maximum number of consecutive elements of a tile that a thread holds.
        anchors: tiles whose spread their definition or use fixes.
    """
    uniform = _uniform(body)
    spreads: dict[Value, Spread] = {}
    neighbours: dict[Value, list[tuple[Value, Change]]] = {}
    for op in walk(body):
        for x, y, forth, back in _relations(op):
            if forth is not None:
                neighbours.setdefault(x, []).append((y, forth))
            if back is not None:
                neighbours.setdefault(y, []).append((x, back))

    def spread_from(value: Value, spread: Spread) -> None:
        pending = [(value, spread)]
        while pending:
            value, spread = pending.pop()
            if value in uniform or value in spreads or not is_spread(value):
                continue
            spreads[value] = spread
            for other, change in neighbours.get(value, ()):
                new = change(spread)
                if new is not None:
                    pending.append((other, new))

    for value, spread in anchors.items():
        spread_from(value, spread)
    tiles = [v for v in _values(body) if is_spread(v) and v not in uniform]
    for value in sorted(tiles, key=lambda v: -v.tile.size):
        if value not in spreads:
            spread_from(value, striped(value.tile.shape, threads, vector))
    return Assignment(spreads, frozenset(uniform), partial_sums(body, spreads))


def is_spread(value: Value) -> bool:
    """Whether a value is a tile rather than a scalar."""
    return isinstance(value.type, TileType) and bool(value.type.shape)


def _values(body: Block) -> Iterator[Value]:
    yield from body.params
    for op in walk(body):
        yield from op.results
        for region in op.regions:
            yield from region.params


def _uniform(body: Block) -> set[Value]:
    rows, found = table(), set[Value]()
    moves = ("broadcast_in_dim", "reshape", "transpose")
    for op in walk(body):
        if op.name == "constant":
            same = True
        elif op.name in moves or rows[op.name].elementwise:
            same = all(v in found or not v.type.shape for v in op.operands)
        else:
            same = False
        if same:
            found.update(v for v in op.results if is_spread(v))
    return found


# --- how the spreads of an op's values constrain each other ---


def _same(spread: Spread) -> Spread:
    return spread


def _relations(op: Op) -> Iterator[Relation]:
    if op.name in _CONTROL:
        yield from ((x, y, _same, _same) for x, y in _CONTROL[op.name](op))
    elif op.name in _MOVES:
        yield (op.operands[0], op.result, *_MOVES[op.name](op))
    elif table()[op.name].elementwise and op.name != "bitcast":
        for x in op.operands:
            if x.type.shape == op.result.type.shape:
                yield x, op.result, _same, _same


def _carried(op: Op) -> Iterator[tuple[Value, Value]]:
    loop = Loop.of(op)
    for parts in (loop.inits, loop.yields, loop.results):
        yield from zip(loop.carried, parts, strict=True)


def _repeated(op: Op) -> Iterator[tuple[Value, Value]]:
    loop = While.of(op)
    for parts in (loop.inits, loop.body.params, loop.body.yields, op.results):
        yield from zip(loop.condition.params, parts, strict=True)


def _chosen(op: Op) -> Iterator[tuple[Value, Value]]:
    for branch in Cond.of(op).branches:
        yield from zip(op.results, branch.yields, strict=True)


def _broadcast(op: Op) -> tuple[Change | None, Change | None]:
    """Forward only where dimensions of size one are added: a per-row number stays with
    the threads that have it."""
    x, result = op.operands[0].tile, op.result.tile
    forth = (lambda s: reshaped(s, result.shape)) if x.size == result.size else None
    return forth, lambda spread: narrowed(op, spread)


def narrowed(op: Op, spread: Spread) -> Spread:
    """The spread of a broadcast's operand that matches one of its result."""
    x, dims = op.operands[0].tile, op.attrs["dims"]
    kept = [d for n, d in enumerate(dims) if x.shape[n] == spread.shape[d]]
    gone = [d for d in range(len(spread.shape)) if d not in kept]
    places = [dims.index(d) for d in kept]
    return spread.without(gone).with_units(x.shape, places)


def _reduce(op: Op) -> tuple[Change | None, Change | None]:
    x, axes = op.operands[0].tile, op.attrs["axes"]
    back = None
    if all(x.shape[d] == 1 for d in axes):
        back = lambda spread: reshaped(spread, x.shape)
    return lambda spread: spread.without(axes), back


def _transpose(op: Op) -> tuple[Change | None, Change | None]:
    perm = op.attrs["perm"]
    back = [perm.index(d) for d in range(len(perm))]
    return lambda s: s.permuted(perm), lambda s: s.permuted(back)


def _slice(op: Op) -> tuple[Change | None, Change | None]:
    def change(spread: Spread) -> Spread | None:
        found = part_of(op, spread)
        return None if found is None else found[0]

    return change, None


def part_of(op: Op, spread: Spread) -> tuple[Spread, int] | None:
    """The spread and the first register of a slice of whole registers; else None."""
    if any(step != 1 for step in op.attrs["strides"]):
        return None
    return spread.sliced(op.attrs["starts"], op.attrs["limits"])


def _reshape(op: Op) -> tuple[Change | None, Change | None]:
    old, new = op.operands[0].tile.shape, op.result.tile.shape
    return lambda s: reshaped(s, new), lambda s: reshaped(s, old)


def reshaped(spread: Spread, shape: Sequence[int]) -> Spread | None:
    """For a shape that differs only in dimensions of size one; otherwise None."""
    old = [d for d, n in enumerate(spread.shape) if n != 1]
    new = [d for d, n in enumerate(shape) if n != 1]
    if [spread.shape[d] for d in old] != [shape[d] for d in new]:
        return None
    ones = [d for d in range(len(spread.shape)) if d not in old]
    return spread.without(ones).with_units(shape, new)


def _added(op: Op) -> Iterator[tuple[Value, Value]]:
    yield op.operands[0], op.result


def _summed(op: Op) -> Iterator[tuple[Value, Value]]:
    yield op.operands[2], op.result


def _by_element(op: Op) -> Iterator[tuple[Value, Value]]:
    tiles = [v for v in (*op.operands, *op.results) if is_spread(v)]
    yield from ((tiles[0], other) for other in tiles[1:])


def _waited(op: Op) -> Iterator[tuple[Value, Value]]:
    yield from zip(op.operands, op.results, strict=True)


_CONTROL: dict[str, Callable[[Op], Iterator[tuple[Value, Value]]]] = {
    "for": _carried,
    "while": _repeated,
    "cond": _chosen,
    "dot_add": _summed,
    "inline_cuda": _by_element,
    "wgmma": _added,
    "wgmma_wait": _waited,
}
_MOVES: dict[str, Callable[[Op], tuple[Change | None, Change | None]]] = {
    "broadcast_in_dim": _broadcast,
    "reduce": _reduce,
    "transpose": _transpose,
    "reshape": _reshape,
    "slice": _slice,
}
