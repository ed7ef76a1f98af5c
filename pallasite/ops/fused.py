"""Fused matmuls: what passes make of dot, add and store.

No author writes these; a backend whose dots can accumulate requests them
(`backends/cpu/dot/fusion.py`). Their `lower` defines their meaning.
"""

from typing import Any

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value, dynamic_count
from pallasite.ir.opdef import (
    Attrs,
    Effect,
    OpDef,
    TypeRuleError,
    Unit,
    Use,
    register,
    table,
)
from pallasite.ir.roles import DotStore
from pallasite.ir.types import RefType, Type
from pallasite.ops.effects import index_result_shape
from pallasite.ops.tile import dot_type

PRODUCT = ("contract", "batch", "dtype", "precision")


def written_out(op: Op) -> Block:
    """The ops that an op of this file stands for."""
    b, lower = Builder(op.loc), table()[op.name].lower
    assert lower is not None, op.name
    return b.block((), lower(b, *op.operands, **op.own_attrs))


def _dot_add(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (result,) = dot_type(types[:2], attrs)
    if len(types) != (5 if attrs["scaled"] else 3) or types[2] != result:
        raise TypeRuleError(f"{result} cannot be added to {types[2:]}")
    return (result,)


def _dot_store(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (result,) = dot_type(types[:2], attrs)
    ref, count = types[2], dynamic_count(attrs["index"])
    if not isinstance(ref, RefType):
        raise TypeRuleError(f"{ref} is not a ref")
    rest = bool(attrs["addend"]) + 2 * bool(attrs["scaled"]) + bool(attrs["overwrite"])
    if len(types) != 3 + count + rest:
        raise TypeRuleError(f"{len(types)} operands, not {3 + count + rest}")
    picked = index_result_shape(ref, attrs["index"], types[3 : 3 + count])
    if (picked, ref.dtype) != (result.shape, result.dtype):
        raise TypeRuleError(
            f"{result} does not match {ref.dtype}{list(picked)} of {ref}"
        )
    return ()


def _add(b: Builder, lhs: Value, rhs: Value, addend: Value, *_: Value, **attrs: Any):
    product = b.op("dot", lhs, rhs, **{key: attrs[key] for key in PRODUCT})
    return (b.op("add", addend, product),)


def _store(b: Builder, *operands: Value, **attrs: Any) -> tuple[Value, ...]:
    parts = DotStore.of(Op("dot_store", operands, attrs=attrs))
    product = b.op("dot", *operands[:2], **{key: attrs[key] for key in PRODUCT})
    where = (parts.ref, *parts.index_operands)
    sums = parts.addend
    if sums is None:
        sums = b.op("load", *where, index=parts.index, mask=False, other=False)
    if parts.overwrite is not None:
        above = b.op("gt", parts.overwrite, b.like(0, parts.overwrite))
        sums = b.op("select_n", above, sums, b.constant(0, sums.tile))
    total = b.op("add", sums, product)
    ref, *indices = where
    b.emit("store", ref, total, *indices, index=parts.index, mask=False)
    return ()


register(
    OpDef(
        "dot_add",
        _dot_add,
        attrs=(*PRODUCT, "scaled"),
        lower=_add,
        unit=Unit.MATRIX,
        doc="a dot plus its third operand; with `scaled` the addend is the fourth "
        "operand, each row multiplied by its element of the fifth",
    )
)
register(
    OpDef(
        "dot_store",
        _dot_store,
        attrs=(*PRODUCT, "index", "addend", "scaled", "overwrite"),
        lower=_store,
        unit=Unit.MATRIX,
        effect=Effect.WRITE,
        uses=(Use.NONE, Use.NONE, Use.UPDATE),
        doc="a dot plus the contents of a ref, or plus `addend`, stored to the ref; "
        "the contents are ignored where `overwrite` is positive",
    )
)
