"""Who uses each value of a block, and until when: decides buffers and their lifetimes.

`uses_of(block)` looks at one block; what regions inside it use counts as used by the op
that has the region. A tile that is computed late keeps its operands alive as long.
`Emitter.define` decides what is late; the rule here must promise no less.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.opdef import Effect, table

# Ops whose results are complete in a buffer (or a scalar) when the op is done. All
# others without regions may be evaluated as late as their own last use.
COMPLETE = frozenset(
    [
        *("reduce", "arg_reduce", "scan", "dot", "concatenate", "pad"),
        *("dynamic_update_slice", "atomic_rmw", "atomic_cas", "sem_read"),
    ]
)


@dataclass(frozen=True)
class Uses:
    """Facts about the values one block defines or uses."""

    last: dict[Value, int]  # position after which nobody evaluates the value
    consumers: dict[Value, int]  # how many ops of the block use it
    captured: frozenset[Value]  # used inside a region


def uses_of(block: Block) -> Uses:
    last: dict[Value, int] = defaultdict(lambda: -1)
    consumers: dict[Value, int] = defaultdict(int)
    captured: set[Value] = set()
    for value in block.yields:
        last[value] = len(block.ops)
        consumers[value] += 1
    for position in reversed(range(len(block.ops))):
        op = block.ops[position]
        inside = set(_free_values(op))
        captured |= inside
        late = [v for v in op.results if _is_late(op, v, consumers[v], captured)]
        until = max([position, *(last[v] for v in late)])
        for value in {*op.operands, *inside}:
            last[value] = max(last[value], until if value in op.operands else position)
            consumers[value] += 1
    return Uses(last, consumers, frozenset(captured))


def _is_late(op: Op, result: Value, consumers: int, captured: set[Value]) -> bool:
    """May the result be computed from the operands long after the op?"""
    if (
        op.regions
        or op.name in COMPLETE
        or (not result.is_ref and not result.tile.rank)
    ):
        return False
    # What several ops need is stored at once, unless it is only a view.
    shared = consumers > 1 or result in captured
    return not (shared and table()[op.name].elementwise)


def _free_values(op: Op) -> Iterator[Value]:
    for region in op.regions:
        yield from region.yields
        for inner in walk(region):
            yield from inner.operands
            for nested in inner.regions:
                yield from nested.yields


# --- what is written ---


def has_writes(op: Op) -> bool:
    """May the op, or code in its regions, change memory?"""
    return any(_writes(inner) for inner in (op, *_inside(op)))


def _inside(op: Op) -> Iterator[Op]:
    for region in op.regions:
        yield from walk(region)


def _writes(op: Op) -> bool:
    control = op.name in ("for", "while", "cond", "pipeline", "alloc")
    return table()[op.name].effect is Effect.WRITE and not control


VIEWS = frozenset(["subview", "reshape_view", "bitcast_view", "transpose_view"])


def written_refs(block: Block) -> set[Value]:
    """The refs some op of the block writes, traced back through views."""
    return _traced(block, _targets)


def flattened_refs(block: Block) -> set[Value]:
    """The refs some view regroups, so that they must lie in memory without gaps."""
    regrouping = ("reshape_view", "bitcast_view")
    return _traced(block, lambda op: op.operands[:1] if op.name in regrouping else ())


def _traced(block: Block, pick) -> set[Value]:
    origin: dict[Value, Value] = {}
    found: set[Value] = set()
    for op in walk(block):
        if op.name in VIEWS:
            origin[op.result] = op.operands[0]
        found.update(pick(op))
    for value in list(found):
        while value in origin:
            value = origin[value]
            found.add(value)
    return found


def _targets(op: Op) -> tuple[Value, ...]:
    if op.name in ("store", "atomic_rmw", "atomic_cas", "sem_signal", "sem_wait"):
        return op.operands[:1]
    if op.name in ("copy_start", "copy_wait"):
        return op.operands[1:3]
    if op.name == "pipeline":
        windows = op.attrs["windows"]
        refs = op.operands[len(op.operands) - len(windows) :]
        return tuple(
            ref
            for ref, window in zip(refs, windows, strict=True)
            if window.mode == "out"
        )
    return ()
