"""The small vocabulary of Triton code in which every op is emitted.

`Core` turns Python calls into TTIR lines: constants, arithmetic, broadcasting, index
tiles, padding masks, conversions, gathers along an axis. It holds what is known about
IR values (`env`, facts, producers). The op families are the mixins next to this file:
`elementwise.py`, `tiles.py`, `dots.py`, `memory.py`; `emit.py` combines them.
"""

import re
from collections.abc import Sequence
from math import prod
from typing import Any, NoReturn

from pallasite.backends.triton.text import (
    FLOATS_OF_8_BITS,
    Val,
    Writer,
    element,
    number_text,
    type_text,
)
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Op, Value
from pallasite.ir.text import print_op
from pallasite.ir.types import DType, TileType
from pallasite.passes.analysis.intervals import Facts
from pallasite.target.chip import physical

MAX_ELEMENTS = 1 << 20  # Triton rejects larger tensors
MOST_SHUFFLED = 64  # elements of a row that a gather finds by shuffles
MOST_WRITTEN_OUT = 1000  # lines of an expression that XLA may transpose at its leaves

FLOAT_BITS: dict[str, int] = dict.fromkeys(FLOATS_OF_8_BITS, 8)
FLOAT_BITS |= {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


class Core:
    """Emits Triton's own operations; independent of IR ops."""

    def __init__(self) -> None:
        self.out = Writer()
        self.env: dict[Value, Val] = {}
        self.facts = Facts()
        self.producers: dict[Value, Op] = {}
        self.rounded_away: frozenset[Value] = frozenset()  # see `analysis/rounding.py`
        self.gather_bytes = 0  # of shared memory that a gather may take
        self.threads = 0  # of a program
        self.amd = False  # is it for an AMD GPU?
        self.several_from_if = False  # is there an `scf.if` with several results?

    def refuse(self, op: Op, why: str = "", fix: str = "") -> NoReturn:
        """This backend does not have `op` on these operands."""
        shapes = ", ".join(str(v.type) for v in op.operands) or str(op.results[0].type)
        raise UnsupportedError(
            f"backend 'triton' cannot run {op.name} on {shapes}",
            [("op", print_op(op, regions=False)), ("why", why or None)],
            op.loc,
            fix or "use interpret=True or another backend for this kernel",
        )

    # --- types ---

    def elem(self, dtype: DType, op: Op) -> str:
        spelled = element(dtype)
        if spelled is None:
            self.refuse(op, f"Triton does not support element type {dtype}")
        return spelled

    def layout(self, tile: TileType, op: Op) -> tuple[tuple[int, ...], str]:
        """Physical shape and element type of a tile."""
        shape, count = physical(tile.shape), 1
        for n in shape:
            count *= n
        if count > MAX_ELEMENTS:
            self.refuse(
                op,
                f"{tile} takes {count} elements; Triton's limit is {MAX_ELEMENTS}",
                "use smaller blocks",
            )
        return shape, self.elem(tile.dtype, op)

    # --- expressions ---

    def let(
        self, text: str, shape: Sequence[int], elem: str, shared: bool = True
    ) -> Val:
        return Val(self.out.let(text, shared), tuple(shape), elem)

    def const(self, value: Any, elem: str, shape: Sequence[int] = ()) -> Val:
        if FLOAT_BITS.get(elem) == 8:
            return self.to_float(self.const(value, "f32", shape), elem)
        number = number_text(value, elem)
        if shape:
            number = f"dense<{number}>"
        tail = "" if elem == "i1" and not shape else f" : {type_text(shape, elem)}"
        return self.let(f"arith.constant {number}{tail}", shape, elem)

    def like(self, value: Any, other: Val) -> Val:
        return self.const(value, other.elem, other.shape)

    def apply(self, name: str, *operands: Val) -> Val:
        """An op whose operands and result have one type."""
        first = operands[0]
        names = ", ".join(v.name for v in operands)
        return self.let(f"{name} {names} : {first.type}", first.shape, first.elem)

    def compare(self, kind: str, x: Val, y: Val) -> Val:
        name = "arith.cmpf" if x.elem in FLOAT_BITS else "arith.cmpi"
        return self.let(f"{name} {kind}, {x}, {y} : {x.type}", x.shape, "i1")

    def select(self, which: Val, yes: Val, no: Val) -> Val:
        which = self.spread(which, yes.shape)
        text = f"arith.select {which}, {yes}, {no} : {which.type}, {yes.type}"
        if not yes.shape:
            text = f"arith.select {which}, {yes}, {no} : {yes.type}"
        return self.let(text, yes.shape, yes.elem)

    def convert(self, name: str, x: Val, elem: str, extra: str = "") -> Val:
        if x.elem == elem:
            return x
        to = type_text(x.shape, elem)
        return self.let(f"{name} {x}{extra} : {x.type} to {to}", x.shape, elem)

    def extern(self, symbol: str, *operands: Val, elem: str | None = None) -> Val:
        """A function of the chip's library, applied to each element."""
        first = operands[0]
        elem = elem or first.elem
        names = ", ".join(v.name for v in operands)
        types = ", ".join(v.type for v in operands)
        attrs = f'{{libname = "", libpath = "", pure = true, symbol = "{symbol}"}}'
        to = type_text(first.shape, elem)
        text = f"tt.extern_elementwise {names} {attrs} : ({types}) -> {to}"
        return self.let(text, first.shape, elem)

    def library(self, name: str, *operands: Val) -> Val:
        """A function of floats: NVIDIA's libdevice and AMD's OCML have all of them."""
        double = operands[0].elem == "f64"
        if self.amd:
            return self.extern(f"__ocml_{name}_f{64 if double else 32}", *operands)
        return self.extern(f"__nv_{name}" if double else f"__nv_{name}f", *operands)

    def assembly(self, text: str, x: Val) -> Val:
        """A line of PTX from a tile of 32-bit integers to another, `$1` to `$0`."""
        attrs = '{constraints = "=r,r", packed_element = 1 : i32, pure = true}'
        line = f'tt.elementwise_inline_asm "{text}" {attrs} {x} : {x.type} -> {x.type}'
        return self.let(line, x.shape, x.elem)

    def four_bits(self, x: Val, dtype: DType) -> Val:
        """The lower half of each byte, sign- or zero-extended."""
        if not dtype.is_signed_int:
            return self.apply("arith.andi", x, self.like(15, x))
        high = self.apply("arith.shli", x, self.like(4, x))
        return self.apply("arith.shrsi", high, self.like(4, high))

    # --- floats of other widths ---

    def to_float(self, x: Val, elem: str) -> Val:
        """Between float types, rounding to nearest even."""
        if x.elem == elem:
            return x
        old, new = FLOAT_BITS[x.elem], FLOAT_BITS[elem]
        if 8 in (old, new):
            if 64 in (old, new):
                return self.to_float(self.to_float(x, "f32"), elem)
            rounding = ", rounding = rtne" if new < old else ""
            to = type_text(x.shape, elem)
            text = f"tt.fp_to_fp {x}{rounding} : {x.type} -> {to}"
            return self.let(text, x.shape, elem)
        if old == new:  # f16 and bf16
            return self.to_float(self.to_float(x, "f32"), elem)
        return self.convert("arith.extf" if old < new else "arith.truncf", x, elem)

    # --- shapes ---

    def spread(self, x: Val, shape: Sequence[int]) -> Val:
        """Broadcast a scalar, or a tile of the same rank, to `shape`."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        to = type_text(shape, x.elem)
        name = "tt.broadcast" if x.shape else "tt.splat"
        return self.let(f"{name} {x} : {x.type} -> {to}", shape, x.elem)

    def expand(self, x: Val, axis: int) -> Val:
        if not x.shape:
            return self.spread(x, (1,))
        shape = (*x.shape[:axis], 1, *x.shape[axis:])
        to = type_text(shape, x.elem)
        text = f"tt.expand_dims {x} {{axis = {axis} : i32}} : {x.type} -> {to}"
        return self.let(text, shape, x.elem)

    def reshape(self, x: Val, shape: Sequence[int]) -> Val:
        """Row-major regrouping of physical elements."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        if not x.shape:
            return self.spread(x, shape)
        if not shape:
            x = self.reshape(x, (1,))
            return self.let(f"tt.unsplat {x} : {x.type}", (), x.elem)
        to = type_text(shape, x.elem)
        # XLA moves reshapes that drop unit dimensions up into the `scf.if` they come
        # from, and that `if` down to the reshape: past uses of its other results. It
        # leaves a reshape with this hint alone, and to Triton it means nothing here.
        hint = " efficient_layout" if self.several_from_if and 1 in x.shape else ""
        return self.let(f"tt.reshape {x}{hint} : {x.type} -> {to}", shape, x.elem)

    def transpose(self, x: Val, order: Sequence[int]) -> Val:
        if list(order) == list(range(len(x.shape))):
            return x
        if self.written_out(x) > MOST_WRITTEN_OUT:
            x = self.handed_on(x)
        shape = tuple(x.shape[d] for d in order)
        to = type_text(shape, x.elem)
        dims = ", ".join(map(str, order))
        text = f"tt.trans {x} {{order = array<i32: {dims}>}} : {x.type} -> {to}"
        return self.let(text, shape, x.elem)

    def written_out(self, x: Val) -> int:
        """Lines of an expression in which nothing is shared."""
        return self.out.written_out.get(x.name.split("#")[0], 1)

    def handed_on(self, x: Val) -> Val:
        """The same value, from a loop with one step, which Triton removes later.

        XLA moves a transpose up to the operands of what it transposes, and at each op
        writes once more what several ops share: twenty steps of `y = y * y + y` would
        be a million. It moves none into a loop.
        """
        zero, one = self.const(0, "i32"), self.const(1, "i32")
        name, counter, carried = (self.out.fresh() for _ in range(3))
        head = f"{name} = scf.for {counter} = {zero} to {one} step {one}"
        self.out.line(f"{head} iter_args({carried} = {x}) -> ({x.type}) : i32 {{")
        with self.out.region():
            self.out.line(f"scf.yield {carried} : {x.type}")
        self.out.line("}")
        return Val(name, x.shape, x.elem)

    def gather(self, x: Val, index: Val, axis: int) -> Val:
        """`x` gathered along `axis` by an i32 tile of the result's shape."""
        if x.elem == "i1":  # goes through shared memory, which has no i1
            wide = self.gather(self.convert("arith.extui", x, "i8"), index, axis)
            return self.compare("ne", wide, self.like(0, wide))
        if x.shape[axis] == 1:
            return self.spread(x, index.shape)
        to = type_text(index.shape, x.elem)
        # Triton would exchange elements within a warp: for each one, as many shuffles
        # as a thread has elements along the axis. With this hint it goes through shared
        # memory instead.
        size = prod(x.shape) * int(re.sub(r"\D", "", x.elem[:4])) // 8
        by_memory = x.shape[axis] > MOST_SHUFFLED and size <= self.gather_bytes
        hint = ", efficient_layout" if by_memory else ""
        attrs = f"{{axis = {axis} : i32{hint}}}"
        text = f"tt.gather {x}[{index}] {attrs} : ({x.type}, {index.type}) -> {to}"
        return self.let(text, index.shape, x.elem)

    # --- positions and padding ---

    def positions(self, count: int) -> Val:
        """0, 1, ... as a vector."""
        if count == 1:
            return self.const(0, "i32", (1,))
        text = f"tt.make_range {{end = {count} : i32, start = 0 : i32}}"
        return self.let(f"{text} : tensor<{count}xi32>", (count,), "i32")

    def along(self, shape: Sequence[int], axis: int) -> Val:
        """Positions along one axis, with size one along the others."""
        result = self.positions(shape[axis])
        for d in range(len(shape)):
            if d != axis:
                result = self.expand(result, d)
        return result

    def below(self, limit: int, shape: Sequence[int], axis: int) -> Val:
        position = self.along(shape, axis)
        return self.compare("slt", position, self.like(limit, position))

    def both(self, *masks: Val | None) -> Val | None:
        """The conjunction of masks, each of which may be missing or smaller."""
        result: Val | None = None
        for mask in masks:
            if mask is None:
                continue
            if result is None:
                result = mask
                continue
            shape = result.shape or mask.shape
            if result.shape and mask.shape:
                pairs = zip(result.shape, mask.shape, strict=True)
                shape = tuple(max(a, b) for a, b in pairs)
            x, y = self.spread(result, shape), self.spread(mask, shape)
            result = self.apply("arith.andi", x, y)
        return result

    def padding_mask(self, logical: Sequence[int], axes: Sequence[int]) -> Val | None:
        """True where an element is not padding along `axes`; None if none is."""
        shape = physical(logical)
        padded = [d for d in axes if shape[d] != logical[d]]
        return self.both(*(self.below(logical[d], shape, d) for d in padded))

    def without_padding(
        self, x: Val, logical: Sequence[int], axes: Sequence[int], value: Any
    ) -> Val:
        """`x` with `value` in the padding along `axes`."""
        mask = self.padding_mask(logical, axes)
        if mask is None:
            return x
        return self.select(self.spread(mask, x.shape), x, self.like(value, x))
