"""Sums that a dot may add to directly, found before a block is emitted.

`fuse_addends` replaces add(x, dot(a, b)) by a dot with x as third operand, and where
the sum is only stored, dot, add and store by one dot that multiplies straight into the
ref (it has `store` among its attributes and no result). Where a branch before it sets
that ref to zero, the dot takes the condition (`fresh_if`) and the branch loses the
store. `dot.py` emits all of these.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pallasite.backends.cpu.dot.choose_scheme import sizes_of
from pallasite.backends.cpu.tiles.lifetimes import has_writes
from pallasite.ir.nodes import Access, Block, Gather, Op, Value, walk
from pallasite.ir.roles import Cond, Dot
from pallasite.ir.types import F32, F64, I32, DType
from pallasite.passes.analysis.memory import Roots


def running_dtype(lhs: DType, rhs: DType, result: DType) -> DType:
    """Sums are kept in f32 or f64, and for integers in at least 32 bits."""
    if F64 in (lhs, rhs, result):
        return F64
    if lhs.is_float or rhs.is_float or result.is_float:
        return F32
    return result if result.bits >= 32 else I32


def fuse_addends(block: Block, root_of: Callable[[Value], object]) -> Block:
    """The block with dots that add, each at the place of the op it replaces.

    `root_of` gives the memory of a ref from outside the block; None: not known.
    """
    if not any(op.name == "dot" for op in block.ops):
        return block
    memory = _Memory(block, root_of)
    uses = _count_uses(block)
    made = {result: op for op in block.ops for result in op.results}
    ops: list[Op | None] = list(block.ops)
    places = {op: n for n, op in enumerate(block.ops)}
    for place, op in enumerate(block.ops):
        fused = _with_addend(op, made, uses) if op.name == "add" else None
        if fused is None:
            continue
        dot, addend = fused
        ops[places[dot]] = None
        store = _only_store(block, op.result, uses)
        dot = _with_factors(dot, made.get(addend), made, uses)
        if store is None:
            operands = (*dot.operands[:2], addend, *dot.operands[2:])
            ops[place] = dot.with_(operands=operands, results=op.results)
        else:
            ops[place] = None
            summing = _dot_store(block, places, dot, addend, store, made)
            ops[places[store]] = summing
            if summing.attrs["in_place"] and uses[addend] == 1:
                _take_over_zeros(ops, places[store], memory)
    return replace(block, ops=tuple(op for op in ops if op is not None))


def _count_uses(block: Block) -> Counter[Value]:
    """How often values are used in a block and the regions inside it."""
    uses = Counter[Value](block.yields)
    for op in walk(block):
        uses.update(op.operands)
        for region in op.regions:
            uses.update(region.yields)
    return uses


def _with_addend(
    add: Op, made: dict[Value, Op], uses: Counter[Value]
) -> tuple[Op, Value] | None:
    """The dot an addition waits for, and what it is added to."""
    for value, other in (add.operands, add.operands[::-1]):
        dot = made.get(value)
        if dot is None or dot.name != "dot" or uses[value] != 1:
            continue
        if not value.tile.rank or other is value:
            continue
        lhs, rhs = (side.value.tile.dtype for side in Dot.of(dot).sides)
        if running_dtype(lhs, rhs, value.tile.dtype) == value.tile.dtype:
            return dot, other
    return None


def _with_factors(
    dot: Op, addend: Op | None, made: dict[Value, Op], uses: Counter[Value]
) -> Op:
    """The dot, knowing that the addend is a tile times a factor per row, if it is.

    Both are then operands after lhs and rhs.
    """
    if addend is None or addend.name != "mul" or uses[addend.result] != 1:
        return dot
    if dot.result.tile.shape != sizes_of(dot)[1:3]:
        return dot  # the result's rows are not the product's
    for tile, factor in (addend.operands, addend.operands[::-1]):
        spread = made.get(factor)
        if spread is not None and _is_per_row(spread):
            return dot.with_(operands=(*dot.operands, tile, spread.operands[0]))
    return dot


def _is_per_row(op: Op) -> bool:
    """Does the op repeat one number per row along a matrix's columns?"""
    if op.name != "broadcast_in_dim" or op.result.tile.rank != 2:
        return False
    rows, dims = op.result.tile.shape[0], op.attrs["dims"]
    shape = op.operands[0].tile.shape
    return (shape, tuple(dims)) in (((rows,), (0,)), ((rows, 1), (0, 1)))


def _only_store(block: Block, value: Value, uses: Counter[Value]) -> Op | None:
    """The plain store that is all that happens to a value."""
    if uses[value] != 1:
        return None
    for op in block.ops:
        if op.name == "store" and op.operands[1] is value:
            access = Access.of(op)
            gathers = any(isinstance(entry, Gather) for entry in access.index)
            plain = access.mask is None and not gathers
            return op if plain and value is not access.ref else None
    return None


def _dot_store(
    block: Block,
    places: dict[Op, int],
    dot: Op,
    addend: Value,
    store: Op,
    made: dict[Value, Op],
) -> Op:
    """`in_place`: the addend is what the ref holds, so nothing is stored first."""
    load = made.get(addend)
    in_place = (
        load is not None
        and load.name == "load"
        and load.operands == (store.operands[0], *store.operands[2:])
        and load.attrs["index"] == store.attrs["index"]
        and not load.attrs.get("mask")
        and not any(map(has_writes, block.ops[places[load] + 1 : places[store]]))
    )
    ref, _, *indices = store.operands
    kept = () if in_place else (addend,)
    more = {"dot": dot, "store": store, "in_place": in_place, "addend": addend}
    operands = (*dot.operands, *kept, ref, *indices)
    return dot.with_(operands=operands, results=(), attrs={**dot.attrs, **more})


# --- refs that a branch sets to zero first ---


def _take_over_zeros(ops: list[Op | None], place: int, memory: "_Memory") -> None:
    """Let the dot at `place` start from nothing where a branch would store zeros."""
    summing = ops[place]
    assert summing is not None
    store, addend = summing.attrs["store"], summing.attrs["addend"]
    for n in reversed(range(place)):
        op = ops[n]
        if op is None or addend in op.results:
            continue
        less = _without_zeros(op, store, memory)
        if less is not None:
            ops[n], which = less, op.operands[0]
            attrs = {**summing.attrs, "fresh_if": which}
            operands = (*summing.operands, which)
            ops[place] = summing.with_(operands=operands, attrs=attrs)
        if memory.is_touched(op, store.operands[0]):
            return


def _without_zeros(cond: Op, store: Op, memory: "_Memory") -> Op | None:
    """The op, if it is a branch that sets what `store` stores to, without doing so."""
    if cond.name != "cond" or len(cond.regions) != 2 or cond.results:
        return None
    other, branch = Cond.of(cond).branches
    made = {result: op for op in branch.ops for result in op.results}
    for op in branch.ops:
        if op.name != "store" or op.operands[0] is not store.operands[0]:
            continue
        everywhere = op.attrs["index"] == store.attrs["index"] and len(op.operands) == 2
        rest = replace(branch, ops=tuple(o for o in branch.ops if o is not op))
        alone = not any(memory.is_reached(b, op.operands[0]) for b in (other, rest))
        if everywhere and alone and _is_zero(made.get(op.operands[1])):
            return cond.with_(regions=(other, rest))
    return None


def _is_zero(op: Op | None) -> bool:
    return op is not None and op.name == "constant" and not np.any(op.attrs["value"])


class _Memory:
    """Which refs of a block may be the same memory."""

    def __init__(self, block: Block, root_of: Callable[[Value], object]):
        self.root_of, self.roots = root_of, Roots(block)

    def root(self, ref: Value) -> object:
        return self.root_of(self.roots.of(ref))

    def is_touched(self, op: Op, ref: Value) -> bool:
        """May the op, or code inside it, use the memory of a ref?"""
        used = (v for v in op.operands if v.is_ref)
        return any(self.root(v) in (None, self.root(ref)) for v in used) or any(
            self.is_reached(region, ref) for region in op.regions
        )

    def is_reached(self, block: Block, ref: Value) -> bool:
        return any(self.is_touched(op, ref) for op in block.ops)
