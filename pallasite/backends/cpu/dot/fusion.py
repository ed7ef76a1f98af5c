"""fuse_dot_sums: fuses dots with the additions and stores of their results.

In: add(x, dot(a, b)). Out: a `dot_add`, or, if the sum is only stored, one `dot_store`
in place of dot, add and store. Where an earlier branch sets that ref to zero, the
dot_store takes over the condition (`overwrite`) and the branch loses the store.
`dot.py` emits both; `ops/fused.py` defines their meaning.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from pallasite.backends.cpu.dot.choose_scheme import sizes_of
from pallasite.backends.cpu.tiles.lifetimes import has_writes
from pallasite.ir.nodes import Access, Block, Gather, Kernel, Op, Value, walk
from pallasite.ir.rewrite import with_regions
from pallasite.ir.roles import Cond, Dot, DotStore
from pallasite.ir.types import F32, F64, I32, DType
from pallasite.passes.analysis.memory import Roots


def running_dtype(lhs: DType, rhs: DType, result: DType) -> DType:
    """The accumulator type: f32 or f64; for integers at least 32 bits."""
    if F64 in (lhs, rhs, result):
        return F64
    if lhs.is_float or rhs.is_float or result.is_float:
        return F32
    return result if result.bits >= 32 else I32


def fuse_dot_sums(kernel: Kernel) -> Kernel:
    """The kernel with fused dots, each at the place of the op it replaces."""
    if not any(op.name == "dot" for op in walk(kernel.body)):
        return kernel
    body = _fused(kernel.body, _Memory(kernel))
    return kernel if body is kernel.body else kernel.with_(body=body)


def _fused(block: Block, memory: "_Memory") -> Block:
    inner = [_with_fused_regions(op, memory) for op in block.ops]
    if any(new is not old for new, old in zip(inner, block.ops, strict=True)):
        block = replace(block, ops=tuple(inner))
    if not any(op.name == "dot" for op in block.ops):
        return block
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
        if _is_zero(made.get(addend)):
            ops[place] = dot.with_(results=op.results)
            continue
        store = _only_store(block, op.result, uses)
        scaled = _factors(dot, made.get(addend), made, uses)
        if store is None:
            ops[place] = dot.with_(
                name="dot_add",
                operands=(*dot.operands, addend, *scaled),
                results=op.results,
                attrs={**dot.attrs, "scaled": bool(scaled)},
            )
            continue
        ops[place] = None
        summing = _dot_store(block, places, dot, addend, scaled, store, made)
        ops[places[store]] = summing
        if not summing.attrs["addend"] and uses[addend] == 1:
            _take_over_zeros(ops, places[store], addend, memory)
    if all(new is old for new, old in zip(ops, block.ops, strict=True)):
        return block
    return replace(block, ops=tuple(op for op in ops if op is not None))


def _with_fused_regions(op: Op, memory: "_Memory") -> Op:
    return with_regions(op, [_fused(region, memory) for region in op.regions])


def _count_uses(block: Block) -> Counter[Value]:
    """How often values are used in a block, including nested regions."""
    uses = Counter[Value](block.yields)
    for op in walk(block):
        uses.update(op.operands)
        for region in op.regions:
            uses.update(region.yields)
    return uses


def _with_addend(
    add: Op, made: dict[Value, Op], uses: Counter[Value]
) -> tuple[Op, Value] | None:
    """The dot that an addition can fuse with, and the addend."""
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


def _factors(
    dot: Op, addend: Op | None, made: dict[Value, Op], uses: Counter[Value]
) -> tuple[Value, ...]:
    """A tile and per-row factors whose product is the addend, if it is one."""
    if addend is None or addend.name != "mul" or uses[addend.result] != 1:
        return ()
    if dot.result.tile.shape != sizes_of(dot)[1:3]:
        return ()  # the result's rows are not the product's
    for tile, factor in (addend.operands, addend.operands[::-1]):
        spread = made.get(factor)
        if spread is not None and _is_per_row(spread):
            return tile, spread.operands[0]
    return ()


def _is_per_row(op: Op) -> bool:
    """Whether the op broadcasts one number per row along a matrix's columns."""
    if op.name != "broadcast_in_dim" or op.result.tile.rank != 2:
        return False
    rows, dims = op.result.tile.shape[0], op.attrs["dims"]
    shape = op.operands[0].tile.shape
    return (shape, tuple(dims)) in (((rows,), (0,)), ((rows, 1), (0, 1)))


def _only_store(block: Block, value: Value, uses: Counter[Value]) -> Op | None:
    """The plain store that is a value's only use."""
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
    scaled: tuple[Value, ...],
    store: Op,
    made: dict[Value, Op],
) -> Op:
    """Has no addend if the ref already holds it: nothing is stored first."""
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
    kept = () if in_place else (addend, *scaled)
    notes = {
        "index": store.attrs["index"],
        "addend": not in_place,
        "scaled": bool(scaled) and not in_place,
        "overwrite": False,
    }
    operands = (*dot.operands, ref, *indices, *kept)
    attrs = {**dot.attrs, **notes}
    return dot.with_(name="dot_store", operands=operands, results=(), attrs=attrs)


# --- refs that an earlier branch zeroes ---


def _take_over_zeros(
    ops: list[Op | None], place: int, addend: Value, memory: "_Memory"
) -> None:
    """Let the dot at `place` overwrite where a branch would store zeros."""
    summing = ops[place]
    assert summing is not None
    stored = DotStore.of(summing)
    for n in reversed(range(place)):
        op = ops[n]
        if op is None or addend in op.results:
            continue
        less = _without_zeros(op, stored, memory)
        if less is not None:
            ops[n] = less
            operands = (*summing.operands, Cond.of(op).which)
            attrs = {**summing.attrs, "overwrite": True}
            ops[place] = summing.with_(operands=operands, attrs=attrs)
        if memory.is_touched(op, stored.ref):
            return


def _without_zeros(cond: Op, stored: DotStore, memory: "_Memory") -> Op | None:
    """The op without its zeroing store, if it is a branch that has one."""
    if cond.name != "cond" or len(cond.regions) != 2 or cond.results:
        return None
    other, branch = Cond.of(cond).branches
    made = {result: op for op in branch.ops for result in op.results}
    for op in branch.ops:
        if op.name != "store" or op.operands[0] is not stored.ref:
            continue
        everywhere = op.attrs["index"] == stored.index and len(op.operands) == 2
        rest = replace(branch, ops=tuple(o for o in branch.ops if o is not op))
        alone = not any(memory.is_reached(b, op.operands[0]) for b in (other, rest))
        if everywhere and alone and _is_zero(made.get(op.operands[1])):
            return cond.with_(regions=(other, rest))
    return None


def _is_zero(op: Op | None) -> bool:
    return op is not None and op.name == "constant" and not np.any(op.attrs["value"])


class _Memory:
    """Which refs of a kernel may alias."""

    def __init__(self, kernel: Kernel):
        self.roots = Roots(kernel)

    def is_touched(self, op: Op, ref: Value) -> bool:
        """Whether the op, or code nested in it, may access the memory of a ref."""
        root = self.roots.of(ref)
        used = (v for v in op.operands if v.is_ref)
        return any(self.roots.of(v) is root for v in used) or any(
            self.is_reached(region, ref) for region in op.regions
        )

    def is_reached(self, block: Block, ref: Value) -> bool:
        return any(self.is_touched(op, ref) for op in block.ops)
