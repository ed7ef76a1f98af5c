"""Tiles that are rematerialised after a reduction instead of staying live.

A tile of 16-bit floats takes half the registers of what it is converted to. Where the
conversion, or a few cheap ops on it, is needed both before and after a reduction, only
the loaded tile stays live, which raises occupancy. The compiler would keep the results
instead, so each reduction is followed by an opaque update of the loaded tile.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.roles import Loop

CHEAP = ("add", "sub", "mul", "neg")
MOST_OPS = 3  # starting from the loaded tile


@dataclass(frozen=True)
class Again:
    """What is computed at its uses, and which tiles change after which reduction."""

    values: set[Value] = field(default_factory=set[Value])
    after: dict[Op, list[Value]] = field(default_factory=dict[Op, list[Value]])


def computed_again(body: Block) -> Again:
    """For a program and for each of its loops separately."""
    found = Again()
    for block in _blocks(body):
        _add(block, found)
    return found


def _blocks(body: Block) -> Iterator[Block]:
    yield body
    for op in walk(body):
        if op.name == "for":
            yield Loop.of(op).body


def _add(block: Block, found: Again) -> None:
    reductions = [n for n, op in enumerate(block.ops) if op.name == "reduce"]
    if not reductions:
        return
    made = {v: op for op in block.ops for v in op.results}
    last = _last_uses(block)
    places = {op: n for n, op in enumerate(block.ops)}

    def loaded(value: Value, ops: int) -> Value | None:
        """The tile from which a value is cheaply computed."""
        op = made.get(value)
        if op is None or ops > MOST_OPS or value.tile.dtype.name != "f32":
            return None
        if op.name == "cast":
            source = made.get(op.operands[0])
            narrow = op.operands[0].tile.dtype.name in ("bf16", "f16")
            is_load = source is not None and source.name == "load"
            return op.operands[0] if narrow and is_load else None
        if op.name not in CHEAP:
            return None
        sources = [loaded(v, ops + 1) for v in op.operands if not _is_small(v, made)]
        return sources[0] if len(sources) == 1 else None

    chosen: dict[Value, Value] = {}
    for op in block.ops:
        for value in op.results:
            if value.is_ref or value.tile.rank < 1:
                continue
            waits = any(places[op] < n < last.get(value, -1) for n in reductions)
            source = (
                loaded(value, 0) if waits and not _is_stored(value, block) else None
            )
            if source is not None:
                chosen[value] = source
    for value, source in chosen.items():
        found.values.add(value)
        for n in reductions:
            if places[made[source]] < n < last[value]:
                waiting = found.after.setdefault(block.ops[n], [])
                if source not in waiting:
                    waiting.append(source)


def _is_small(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether a thread holds few distinct elements of a tile."""
    op = made.get(value)
    if op is None:
        return not value.tile.shape
    if op.name == "broadcast_in_dim":
        return op.operands[0].tile.size * 32 <= value.tile.size
    return op.name == "constant" or not value.tile.shape


def _is_stored(value: Value, block: Block) -> bool:
    return any(op.name == "store" and value is op.operands[1] for op in block.ops)


def _last_uses(block: Block) -> dict[Value, int]:
    """The position of the last op of a block that uses a value, also in its regions."""
    last = dict.fromkeys(block.yields, len(block.ops))
    for n, op in reversed(list(enumerate(block.ops))):
        inner = [o for region in op.regions for o in walk(region)]
        yields = [v for o in (op, *inner) for r in o.regions for v in r.yields]
        for value in (*op.operands, *(v for o in inner for v in o.operands), *yields):
            last.setdefault(value, n)
    return last
