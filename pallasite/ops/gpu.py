"""Ops of the explicit level that Hopper GPUs have: barriers in shared memory, products
of a warpgroup that are in flight, copies by the copy engine.

No author writes these yet; `backends/cuda/specialize.py` makes them. A copy with a
barrier (`copy_start`) adds its bytes to what the barrier's phase has received. A
`wgmma` is a group of its own: its result is *pending*, to be used by another wgmma or
by `wgmma_wait` only, until one that leaves fewer groups pending.
"""

from typing import Any

from pallasite.ir.opdef import (
    EXPLICIT,
    Attrs,
    Effect,
    OpDef,
    TypeRule,
    TypeRuleError,
    Unit,
    register,
)
from pallasite.ir.types import INDEX, RefType, TileType, Type
from pallasite.ops.elementwise import tiles


def _barrier(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    barrier = types[0]
    if not isinstance(barrier, RefType) or barrier.space != "mbarrier":
        raise TypeRuleError(f"{barrier} is not an mbarrier")
    if barrier.shape:
        raise TypeRuleError(f"{barrier} is {barrier.size} barriers, not one")
    if types[1:] not in ((), (INDEX,)):
        raise TypeRuleError(f"the parity is one i32, got {types[1]}")
    return ()


def _wgmma(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """Operands: what is added to, the left side (tile or ref), the right side (ref)."""
    sums, lhs, rhs = types
    if not isinstance(sums, TileType) or not isinstance(rhs, RefType):
        raise TypeRuleError("adds to a tile; the right side is in shared memory")
    contract: tuple[tuple[int], tuple[int]] = attrs["contract"]
    (left,), (right,) = contract
    shape = (lhs.shape[1 - left], rhs.shape[1 - right])
    if lhs.shape[left] != rhs.shape[right] or sums.shape != shape:
        raise TypeRuleError(f"{lhs} times {rhs} does not fit {sums}")
    return (sums,)


def _tiles(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return tiles(types)


def _nothing(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return ()


def _row(
    name: str, rule: TypeRule, arity: int | None, attrs: tuple[str, ...], **kw: Any
) -> OpDef:
    kw = {"unit": Unit.MEMORY, **kw}
    row = OpDef(name, rule, arity, attrs=attrs, effect=Effect.WRITE, level=EXPLICIT,
                layouts=True, **kw)  # fmt: skip
    return register(row)


_row(
    "barrier_expect",
    _barrier,
    1,
    ("bytes",),
    doc="arrives, and lets the phase wait for that many bytes of copies too",
)
_row("barrier_arrive", _barrier, 1, (), doc="one arrival, of each warp that runs it")
_row(
    "barrier_wait",
    _barrier,
    2,
    (),
    doc="waits until the phase of that parity is complete",
)
_row(
    "wgmma",
    _wgmma,
    3,
    ("contract",),
    unit=Unit.MATRIX,
    doc="starts adding a product, by a warpgroup; the result is pending",
)
_row(
    "wgmma_wait",
    _tiles,
    None,
    ("pending",),
    unit=Unit.CONTROL,
    doc="waits until at most `pending` products are in flight; gives the same tiles",
)
_row(
    "named_barrier",
    _nothing,
    0,
    ("id", "threads", "arrive_only"),
    doc="warps meet, or say that they were here",
)
