"""Integers of 64 bits that are known to fit into 32 are computed in 32.

In JAX's 64-bit mode, counters of loops and `jnp.arange` have 64 bits, which a chip may
lack. Arithmetic whose operands and result are within the range of int32 gives the same
numbers there. Others stay as they are: the backend refuses them by name.
"""

from collections.abc import Container, Sequence
from typing import Any

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.roles import Loop
from pallasite.ir.types import I32, TileType
from pallasite.passes.analysis.intervals import Fact, Facts

_ARITHMETIC = "add sub mul neg abs sign max min clamp rem div select_n cast iota "
_ARITHMETIC += "constant eq ne lt le gt ge arg_reduce assume_multiple stop_gradient "
_SHAPE = "broadcast_in_dim reshape transpose slice rev concatenate dynamic_slice"
_SAME_IN_32 = frozenset((_ARITHMETIC + _SHAPE).split())
_ACCESSES = ("load", "store", "atomic_rmw", "atomic_cas")


def narrow_integers(kernel: Kernel) -> Kernel:
    """The kernel with int32 in place of 64-bit integers that fit."""
    if not any(_is_wide(v) for op in walk(kernel.body) for v in op.results):
        return kernel
    return _Narrowing().kernel(kernel)


def _is_wide(value: Value) -> bool:
    t = value.type
    return isinstance(t, TileType) and not t.dtype.is_float and t.dtype.bits == 64


class _Narrowing:
    """Rebuilds a kernel; `narrow` has the int32 value of each value that has one."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.narrow: dict[Value, Value] = {}

    def kernel(self, kernel: Kernel) -> Kernel:
        return kernel.with_(body=self.block(kernel.body))

    def block(self, block: Block, narrow_yields: Container[int] = ()) -> Block:
        """`narrow_yields`: which results of the block are int32 afterwards."""
        b = Builder()
        for op in block.ops:
            b.loc = op.loc
            self.op(b, op)
        yields = self.wide(b, block.yields, narrow_yields)
        params = tuple(self.narrow.get(p, p) for p in block.params)
        return Block(params, tuple(b.ops), tuple(yields))

    def wide(
        self, b: Builder, values: Sequence[Value], narrow: Container[int] = ()
    ) -> list[Value]:
        """Values in their own types, those at the places `narrow` in int32."""
        found = []
        for n, v in enumerate(values):
            new = self.narrow.get(v, v)
            found.append(new if new is v or n in narrow else b.cast(new, v.tile.dtype))
        return found

    def op(self, b: Builder, op: Op) -> None:
        self.facts.note_regions(op)
        if op.name == "for":
            self.loop(b, Loop.of(op))
            return
        if not op.regions:
            self.facts.note_op(op)
        if self.fits(op):
            self.computed(b, op)
            return
        operands = self.wide_but_indices(b, op)
        regions = [self.block(region) for region in op.regions]
        b.ops.append(op.with_(operands=tuple(operands), regions=tuple(regions)))

    def fits(self, op: Op) -> bool:
        """Whether an op on 64-bit integers is the same on their int32 values."""
        wide = [v for v in (*op.operands, *op.results) if _is_wide(v)]
        if op.name not in _SAME_IN_32 or not wide:
            return False
        if not all(v in self.narrow for v in op.operands if _is_wide(v)):
            return op.name == "cast" and self.is_small(op.result)
        return all(map(self.is_small, op.results))

    def is_small(self, value: Value) -> bool:
        return not _is_wide(value) or self.facts.of(value).within(*I32.limits)

    def computed(self, b: Builder, op: Op) -> None:
        if op.name == "cast":
            x = op.operands[0]
            result = op.result.tile.dtype
            made = b.cast(self.narrow.get(x, x), I32 if _is_wide(op.result) else result)
        else:
            operands = tuple(self.narrow.get(v, v) for v in op.operands)
            made = op.result
            if _is_wide(made):
                made = Value(made.tile.with_dtype(I32), made.name)
            attrs = {key: _in_32(value) for key, value in op.attrs.items()}
            b.ops.append(op.with_(operands=operands, results=(made,), attrs=attrs))
        if made is not op.result:
            self.narrow[op.result] = made

    def wide_but_indices(self, b: Builder, op: Op) -> list[Value]:
        """Operands in their own types, except what only says where memory is used."""
        if op.name not in _ACCESSES:
            return self.wide(b, op.operands)
        indices = set(Access.of(op).index_operands)
        return [
            self.narrow.get(v, v) if v in indices else self.wide(b, [v])[0]
            for v in op.operands
        ]

    # --- loops ---

    def loop(self, b: Builder, loop: Loop) -> None:
        """A loop whose counters of 64 bits are int32, if they stay in its range."""
        counted = {n for n, v in enumerate(loop.carried) if self.is_counter(loop, n)}
        for n in counted:
            for value in (loop.carried[n], loop.results[n]):
                self.narrow[value] = Value(value.tile.with_dtype(I32), value.name)
        if _is_wide(loop.index) and self.has_small_bounds(loop):
            bounds = [self.narrow[v] for v in loop.bounds]
            index = loop.index
            self.narrow[index] = Value(index.tile.with_dtype(I32), index.name)
        else:
            bounds = self.wide(b, loop.bounds)
        inits = self.wide(b, loop.inits, counted)
        results = [self.narrow[v] if n in counted else v
                   for n, v in enumerate(loop.results)]  # fmt: skip
        body = self.block(loop.body, counted)
        made = loop.op.with_(
            operands=(*bounds, *inits), results=tuple(results), regions=(body,)
        )
        b.ops.append(made)

    def has_small_bounds(self, loop: Loop) -> bool:
        if not all(v in self.narrow for v in loop.bounds):
            return False
        _, limit, step = map(self.facts.of, loop.bounds)
        return step.low >= 1 and limit.high - 1 + step.high <= I32.limits[1]

    def is_counter(self, loop: Loop, n: int) -> bool:
        """Whether a carried value takes a constant step per iteration and stays in the
        range of int32; its range is noted."""
        value, first = loop.carried[n], loop.inits[n]
        steps = self.facts.most_steps(loop)
        if not _is_wide(value) or first not in self.narrow or steps is None:
            return False
        made = next((op for op in loop.body.ops if loop.yields[n] in op.results), None)
        by = _constant_step(loop.body, made, value)
        if by is None or not steps or not Fact(by, by).within(*I32.limits):
            return False
        start = self.facts.of(first)
        last = [start.low + min(0, steps * by), start.high + max(0, steps * by)]
        if not Fact(*last).within(*I32.limits):
            return False
        self.facts.note(loop.results[n], Fact(*last))
        # Inside, one step fewer than the loop takes has been made at most.
        before = (steps - 1) * by
        self.facts.note(
            value, Fact(start.low + min(0, before), start.high + max(0, before))
        )
        return True


def _constant_step(body: Block, made: Op | None, value: Value) -> int | None:
    """By how much `value` grows, if `made` adds a constant to it."""
    if made is None or made.name != "add" or value not in made.operands:
        return None
    other = next((v for v in made.operands if v is not value), None)
    for op in body.ops:
        if op.name == "constant" and op.result is other:
            return int(op.attrs["value"])
    return None


def _in_32(attribute: Any) -> Any:
    """An attribute that is a type of 64-bit integers, in int32."""
    if isinstance(attribute, TileType):
        wide = not attribute.dtype.is_float and attribute.dtype.bits == 64
        return attribute.with_dtype(I32) if wide else attribute
    wide = getattr(attribute, "bits", 0) == 64 and not attribute.is_float
    return I32 if wide else attribute
