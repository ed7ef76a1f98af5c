"""Adds shares of cotangents as they were computed, in f32.

A kernel that scales its bf16 queries in each step has, per step, a cotangent of the
scaled ones: a matmul's f32, rounded to bf16, scaled, and added in f32 to those of other
steps. Without the rounding it is more exact, and a matmul that only adds to a sum.
"""

from collections.abc import Mapping

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops, producers_of, users_of
from pallasite.ir.types import F32

# Ops that are linear in their first operand, and those linear in either.
FIRST = ("neg", "transpose", "reshape", "broadcast_in_dim", "div")
EITHER = ("mul",)


def unrounded(body: Block) -> Block:
    """Code that does not round f32 numbers before it adds them to f32 memory."""
    chains = _Chains(body)

    def rewrite(op: Op, b: Rewriter) -> list[Value] | None:
        if op.name != "atomic_rmw" or op.attrs["kind"] != "add":
            return None
        added = Access.of(op).value
        made = None if added is None else chains.made.get(added)
        if made is None or made.name != "cast" or made.result.tile.dtype != F32:
            return None
        new = chains.wide(b, made.operands[0])
        if new is None:
            return None
        operands = tuple(new if v is added else v for v in op.operands)
        b.ops.append(op.with_(operands=operands))
        return list(op.results)

    return map_ops(body, rewrite)


class _Chains:
    def __init__(self, body: Block):
        self.made: Mapping[Value, Op] = producers_of(body)
        self.users = users_of(body)

    def wide(self, b: Builder, value: Value) -> Value | None:
        """A linear function of rounded numbers, of the numbers before that."""
        op = self.made.get(value)
        if op is None or len(self.users[value]) > 1 or not value.tile.dtype.is_float:
            return None
        if op.name == "cast":
            (source,) = op.operands
            return source if source.tile.dtype == F32 else None
        places = range(2) if op.name in EITHER else range(op.name in FIRST)
        for place in places:
            new = self.wide(b, op.operands[place])
            if new is not None:
                operands = [b.cast(v, F32) for v in op.operands]
                operands[place] = new
                result = Value(value.tile.with_dtype(F32), value.name)
                b.ops.append(op.with_(operands=tuple(operands), results=(result,)))
                return result
        return None
