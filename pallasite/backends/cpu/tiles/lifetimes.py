"""Uses and lifetimes of each value of a block, which determine buffers.

`uses_of(block)` analyses one block; uses in nested regions count as uses by the op that
has the region. A lazy tile keeps its operands alive as long as itself. `plan_memory.py`
notes the answers on the ops.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from pallasite.backends.cpu.llvm.vector_loops import vector_dim
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.opdef import Effect, Unit, table
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.memory import Roots
from pallasite.target import host

# Ops whose results are complete in a buffer (or a scalar) when the op is done. All
# others without regions may be evaluated as late as their own last use, and so may
# concatenations if their result is only moved, and pads of whole rows.
COMPLETE = frozenset(
    [
        *("reduce", "scan", "top_k", "sort", "dot", "dot_add", "concatenate", "pad"),
        *("dynamic_update_slice", "atomic_rmw", "atomic_cas", "sem_read", "scatter"),
    ]
)


CHEAP = 3  # recomputing this many instructions beats storing their result
MANY_TIMES = 4  # but not more often than this


@dataclass(frozen=True)
class Uses:
    """Facts about the values one block defines or uses."""

    last: dict[Value, int]  # position after which nothing evaluates the value
    stored: frozenset[Value]  # elementwise results that get a buffer
    kept: frozenset[Value]  # of those, the ones that the first reduction stores
    moved: frozenset[Value]  # concatenations that are only stored once
    found: frozenset[Value]  # those of which one loop computes with the elements


def uses_of(block: Block) -> Uses:
    """Walks backwards: the uses of a value are known before its operands."""
    last: dict[Value, int] = defaultdict(lambda: -1)
    # The loops in which a value is computed if it is not stored.
    loops: dict[Value, set[Hashable]] = defaultdict(set)
    first: dict[Value, int] = {}
    captured, stored, kept = set[Value](), set[Value](), set[Value]()
    moved, wanted, found = set[Value](), set[Value](), set[Value]()
    whole = {*block.yields}  # operands of ops that are not elementwise
    consumers, costs = dict[Value, int](), _costs(block)
    for place, value in enumerate(block.yields):
        last[value] = first[value] = len(block.ops)
        loops[value].add(("yield", place))
        consumers[value] = consumers.get(value, 0) + 1
    for position in reversed(range(len(block.ops))):
        op = block.ops[position]
        inside = set(_free_values(op))
        captured |= inside
        for result in op.results:
            if _is_elementwise(op) and (
                result in captured or _is_shared(costs[result], loops[result])
            ):
                stored.add(result)
                if _reduces(block, first.get(result), result):
                    kept.add(result)
            if result in wanted and consumers[result] == 1:
                moved.add(result)
            elif len(loops[result]) == 1 and result not in whole | captured:
                found |= {result} if _may_be_found(op) else set()
        waits = moved | found
        done = [v for v in op.results if _is_complete(op) and v not in waits]
        late = [v for v in op.results if v not in done]
        until = max(
            [position, *(_until(op, v, last, first, stored, kept) for v in late)]
        )
        if found.isdisjoint(op.results):
            wanted |= {v for v in op.operands if _only_moves(op, v, moved)}
        if not table()[op.name].elementwise:
            whole.update(op.operands)
        through = _loops_of_operands(op, position, loops, stored | found)
        for value in {*op.operands, *inside}:
            last[value] = max(last[value], until if value in op.operands else position)
            first[value] = position
            loops[value] |= through
            consumers[value] = consumers.get(value, 0) + 1
    sets = (frozenset(each) for each in (stored, kept, moved, found))
    return Uses(last, *sets)


def _is_complete(op: Op) -> bool:
    return op.name in COMPLETE and not pads_rows(op)


def pads_rows(op: Op) -> bool:
    """Whether it is a pad with no lanes along it, so that elements are cheap to
    find."""
    if op.name != "pad" or any(op.attrs["interior"]):
        return False
    inner, outer = op.operands[0].tile.shape, op.result.tile.shape
    along = vector_dim(outer)
    if along is None or 0 in inner:
        return False
    return op.attrs["low"][along] == 0 and inner[along] == outer[along]


def _may_be_found(op: Op) -> bool:
    """Whether it is a concatenation whose elements are cheap to find in its parts.

    If those are side by side in a vector, both parts are loaded with masks.
    """
    if op.name not in ("concatenate", "pad"):
        return False
    inner, outer = op.operands[0].tile.shape, op.result.tile.shape
    along = vector_dim(outer)
    if along is None or any(0 in v.tile.shape for v in op.operands):
        return False
    if op.name == "concatenate":
        return len(op.operands) == 2 and (op.attrs["axis"] != along or has_masks())
    if any(op.attrs["interior"]):
        return False
    return has_masks() or (op.attrs["low"][along] == 0 and inner[along] == outer[along])


def has_masks() -> bool:
    """Whether loads of some lanes are as fast as loads of all."""
    return host().has("avx512bw")


def _is_elementwise(op: Op) -> bool:
    return table()[op.name].elementwise and bool(op.result.tile.rank)


def _is_shared(cost: int, loops: set[Hashable]) -> bool:
    """Whether storing a value is better than computing it in each of these loops."""
    return len(loops) > 1 and (cost > CHEAP or len(loops) > MANY_TIMES)


def _reduces(block: Block, position: int | None, value: Value) -> bool:
    if position is None or position >= len(block.ops):
        return False
    return block.ops[position].name == "reduce"


def _until(
    op: Op,
    result: Value,
    last: dict[Value, int],
    first: dict[Value, int],
    stored: set[Value],
    kept: set[Value],
) -> int:
    """How late the result may be computed from the op's operands."""
    if op.regions or (not result.is_ref and not result.tile.rank):
        return -1
    if result in kept:
        return first[result]
    return -1 if result in stored else last[result]


def _only_moves(op: Op, operand: Value, moved: set[Value]) -> bool:
    """Whether the op only stores the operand, or concatenates it with others."""
    if op.operands.count(operand) != 1:
        return False
    if op.name == "slice":
        return op.result in moved and set(op.attrs["strides"]) == {1}
    if op.name == "pad":
        is_joined = op.result in moved or not pads_rows(op)
        return is_joined and operand is op.operands[0]
    if op.name == "store":
        return operand is op.operands[1]
    return op.name == "concatenate"


def _loops_of_operands(
    op: Op, position: int, loops: dict[Value, set[Hashable]], stored: set[Value]
) -> set[Hashable]:
    if op.regions or _is_complete(op) or len(op.results) != 1:
        return {position}
    result = op.result
    if result.is_ref or not result.tile.rank or result in stored or _grows(op):
        return {position}
    if _is_elementwise(op):
        return loops[result]
    # Views: the same loops, but at other indices.
    return {(position, loop) for loop in loops[result]}


def _grows(op: Op) -> bool:
    """Whether it is a broadcast, which stores its operand."""
    broadcast = op.name == "broadcast_in_dim"
    return broadcast and op.result.tile.size > op.operands[0].tile.size


def _costs(block: Block) -> dict[Value, int]:
    """Roughly the instructions per element, starting from memory."""
    costs: dict[Value, int] = defaultdict(int)
    for op in block.ops:
        if op.regions or _is_complete(op) or len(op.results) != 1 or _grows(op):
            continue
        if op.result.is_ref or not op.result.tile.rank:
            continue
        own = _WEIGHTS.get(table()[op.name].unit, 1) if _is_elementwise(op) else 0
        own = _DIVISION if op.name in ("div", "rem", "sqrt", "rsqrt") else own
        total = own + sum(costs[v] for v in set(op.operands))
        costs[op.result] = min(total, 10**6)
    return costs


_WEIGHTS = {Unit.SPECIAL: 12}
_DIVISION = 5


def _free_values(op: Op) -> Iterator[Value]:
    for region in op.regions:
        yield from region.yields
        for inner in walk(region):
            yield from inner.operands
            for nested in inner.regions:
                yield from nested.yields


# --- writes ---


def has_writes(op: Op) -> bool:
    """Whether the op, or code in its regions, may write memory."""
    return any(_writes(inner) for inner in (op, *_inside(op)))


def _inside(op: Op) -> Iterator[Op]:
    for region in op.regions:
        yield from walk(region)


def _writes(op: Op) -> bool:
    control = op.name in ("for", "while", "cond", "pipeline", "alloc")
    return table()[op.name].effect is Effect.WRITE and not control


def flattened_refs(block: Block) -> set[Value]:
    """Refs that some view reshapes: their memory should have no gaps."""
    views = (op for op in walk(block) if op.name == "reshape_view")
    # Not through windows: a reshaped block is copied, its array is not.
    return Roots(block, windows=False).reached(op.operands[0] for op in views)


def window_refs(op: Op) -> list[tuple[Value, bool]]:
    """The arrays a pipeline has windows of, and whether it writes there."""
    pipeline = Pipeline.of(op)
    written = Roots(pipeline.body).all_written(pipeline.body)
    return [
        (each.array, each.window.mode == "out" or each.block in written)
        for each in pipeline.shown
    ]
