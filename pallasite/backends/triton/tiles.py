"""Ops on whole tiles: constants, shapes, reductions, scans, and moves along an axis.

A tile has a logical shape (ours) and a physical one (powers of two). The contents of
the padding are undefined, so ops that combine elements mask it: reductions insert the
neutral element, moves gather only from valid positions.
"""

import json
from collections.abc import Callable, Sequence
from math import prod

from pallasite.backends.triton.core import FLOAT_BITS
from pallasite.backends.triton.elementwise import Elementwise
from pallasite.backends.triton.flat_indices import MOST_GATHERED, held_bytes
from pallasite.backends.triton.shared_memory import keeps_padding
from pallasite.backends.triton.text import Val, type_text
from pallasite.ir.nodes import Op
from pallasite.ir.types import DType
from pallasite.ops.neutral import neutral
from pallasite.target.chip import physical

Combine = Callable[[Sequence[Val], Sequence[Val]], Sequence[Val]]


class Tiles(Elementwise):
    """Emits shape ops, reductions, scans and slices."""

    # --- making tiles ---

    def emit_constant(self, op: Op) -> None:
        shape, elem = self.layout(op.result.tile, op)
        self.env[op.result] = self.const(op.attrs["value"], elem, shape)

    def emit_iota(self, op: Op) -> None:
        tile = op.result.tile
        shape, elem = self.layout(tile, op)
        positions = self.along(shape, op.attrs["dim"])
        if tile.dtype.is_float:
            positions = self.convert("arith.sitofp", positions, "f32")
            positions = self.to_float(positions, elem)
        elif tile.dtype.bits > 32:
            positions = self.convert("arith.extsi", positions, elem)
        else:
            positions = self.convert("arith.trunci", positions, elem)
        self.env[op.result] = self.spread(positions, shape)

    # --- shapes ---

    def emit_broadcast_in_dim(self, op: Op) -> None:
        x = self.env[op.operands[0]]
        shape, _ = self.layout(op.result.tile, op)
        if x.shape:
            for d in range(len(shape)):
                if d not in op.attrs["dims"]:
                    x = self.expand(x, d)
        self.env[op.result] = self.spread(x, shape)

    def emit_reshape(self, op: Op) -> None:
        self.layout(op.result.tile, op)
        x = self.env[op.operands[0]]
        old, new = op.operands[0].tile.shape, op.result.tile.shape
        self.env[op.result] = self.regroup(x, old, new)

    def regroup(self, x: Val, old: Sequence[int], new: Sequence[int]) -> Val:
        """A logical reshape: plain where padding does not get in between."""
        target = physical(new)
        if 0 in new:  # only padding, which is never read: any elements will do
            old, new = x.shape, target
        elif keeps_padding(old, new):
            return self.reshape(x, target)
        source = self.reshape(x, (prod(x.shape),))
        position = self.positions(prod(target))
        number = self.renumber(position, target, new)
        index = self.renumber(number, tuple(old), x.shape)
        last = self.like(source.shape[0] - 1, index)
        picked = self.gather(source, self.apply("arith.minui", index, last), 0)
        return self.reshape(picked, target)

    def renumber(self, number: Val, old: Sequence[int], new: Sequence[int]) -> Val:
        """Row-major positions in `old` as row-major positions in `new`."""
        result = self.like(0, number)
        for d in range(len(old)):
            digit = number
            if prod(old[d + 1 :]) > 1:
                digit = self.scaled("arith.divui", digit, prod(old[d + 1 :]))
            if d:
                digit = self.scaled("arith.remui", digit, old[d])
            step = self.scaled("arith.muli", digit, prod(new[d + 1 :]))
            result = self.apply("arith.addi", result, step)
        return result

    def scaled(self, name: str, x: Val, number: int) -> Val:
        return self.apply(name, x, self.like(number, x))

    def emit_transpose(self, op: Op) -> None:
        x = self.env[op.operands[0]]
        self.env[op.result] = self.transpose(x, op.attrs["perm"])

    # --- moves along one axis ---

    def take(self, x: Val, index: Val, axis: int) -> Val:
        """Elements of `x` along `axis`, at positions of shape (1, n, 1)."""
        last = self.like(x.shape[axis] - 1, index)
        index = self.apply("arith.minui", index, last)
        n = index.shape[axis]
        shape = (*x.shape[:axis], n, *x.shape[axis + 1 :])
        return self.gather(x, self.spread(index, shape), axis)

    def halves(self, x: Val) -> tuple[Val, Val]:
        first, second = (Val(self.out.fresh(), x.shape[:-1], x.elem) for _ in range(2))
        self.out.line(f"{first}, {second} = tt.split {x} : {x.type} -> {first.type}")
        return first, second

    def joined(self, x: Val, y: Val) -> Val:
        shape = (*x.shape, 2)
        to = type_text(shape, x.elem)
        return self.let(f"tt.join {x}, {y} : {x.type} -> {to}", shape, x.elem)

    def is_pairs(self, x: Val, n: int) -> bool:
        """Whether `n` elements along the last dimension are pairs without padding.

        Neighbours are mostly in one thread, where a gather would exchange them.
        """
        return n > 1 and n == x.shape[-1] and n * len(x.shape) > 2 and x.elem != "i1"

    def has_halves(self, elements: int) -> bool:
        """Whether each thread has an element of either half of so many pairs.

        Triton keeps halves of fewer elements in several threads, and all that is joined
        from these: a tree of maxima was computed seven times.
        """
        return elements >= 4 * self.threads

    def emit_slice(self, op: Op) -> None:
        x = self.env[op.operands[0]]
        old = op.operands[0].tile.shape
        starts, strides = op.attrs["starts"], op.attrs["strides"]
        self.layout(op.result.tile, op)
        for d, n in enumerate(op.result.tile.shape):
            if n == old[d]:
                continue
            every_other = 2 * n == old[d] and (strides[d] == 2 or n == 1)
            every_other = every_other and self.has_halves(prod(x.shape) // 2)
            if d == len(old) - 1 and every_other and self.is_pairs(x, old[d]):
                pairs = x if n == 1 else self.reshape(x, (*x.shape[:-1], n, 2))
                x = self.halves(pairs)[starts[d]]
                x = self.expand(x, d) if n == 1 else x
                continue
            index = self.along(_with(x.shape, d, physical((n,))[0]), d)
            index = self.scaled("arith.muli", index, strides[d])
            x = self.take(x, self.scaled("arith.addi", index, starts[d]), d)
        self.env[op.result] = x

    def emit_rev(self, op: Op) -> None:
        x = self.env[op.operands[0]]
        for d in op.attrs["axes"]:
            index = self.along(x.shape, d)
            last = self.like(op.operands[0].tile.shape[d] - 1, index)
            x = self.take(x, self.apply("arith.subi", last, index), d)
        self.env[op.result] = x

    def emit_exchange(self, op: Op) -> None:
        x, axis = self.env[op.operands[0]], op.attrs["axis"]
        index = self.along(x.shape, axis)
        distance = self.like(op.attrs["distance"], index)
        partner = self.apply("arith.xori", index, distance)
        self.env[op.result] = self.gather(x, self.spread(partner, x.shape), axis)

    def emit_concatenate(self, op: Op) -> None:
        axis = op.attrs["axis"]
        shape, _ = self.layout(op.result.tile, op)
        if (
            len(op.operands) == 2
            and op.result.tile.shape[-1] == 2 == len(shape[axis:]) + 1
        ):
            pair = [self.env[v] for v in op.operands]
            fits = lambda v: v.shape[1:] and v.shape[-1] == 1 and v.elem != "i1"
            if all(fits(v) and self.has_halves(prod(v.shape)) for v in pair):
                first, second = (self.reshape(v, v.shape[:-1]) for v in pair)
                self.env[op.result] = self.joined(first, second)
                return
        position = self.along(shape, axis)
        result: Val | None = None
        first = 0
        for value in op.operands:
            x, n = self.env[value], value.tile.shape[axis]
            if not n:
                continue
            moved = self.take(x, self.scaled("arith.subi", position, first), axis)
            if result is not None:
                here = self.compare("sge", position, self.like(first, position))
                moved = self.select(self.spread(here, shape), moved, result)
            result, first = moved, first + n
        assert result is not None
        self.env[op.result] = result

    def emit_pad(self, op: Op) -> None:
        x, value = (self.env[v] for v in op.operands)
        self.layout(op.result.tile, op)
        attrs = zip(*(op.attrs[k] for k in ("low", "high", "interior")), strict=True)
        old = op.operands[0].tile.shape
        for d, (low, high, interior) in enumerate(attrs):
            if not (low or high or interior):
                continue
            n = physical(op.result.tile.shape)[d]
            between = interior == 1 and low + high == 1 and min(low, high) == 0
            between = between and self.has_halves(prod(x.shape))
            if d == len(old) - 1 and between and self.is_pairs(x, old[d]):
                both = x, self.spread(value, x.shape)
                pairs = self.joined(*(both[::-1] if low else both))
                x = self.reshape(pairs, (*x.shape[:-1], n))
                continue
            shape = _with(x.shape, d, n)
            index = self.scaled("arith.subi", self.along(shape, d), low)
            inside = self.compare("sge", index, self.like(0, index))
            if interior:
                rest = self.scaled("arith.remsi", index, interior + 1)
                whole = self.compare("eq", rest, self.like(0, index))
                inside = self.apply("arith.andi", inside, whole)
                index = self.scaled("arith.divsi", index, interior + 1)
            end = self.compare("slt", index, self.like(old[d], index))
            inside = self.apply("arith.andi", inside, end)
            x = self.take(x, index, d)
            x = self.select(self.spread(inside, shape), x, self.spread(value, shape))
        self.env[op.result] = x

    def clamped_start(self, op: Op, number: int, last: int) -> Val:
        start = self.env[op.operands[number]]
        start = self.index_value(start, op.operands[number].tile.dtype)
        low = self.apply("arith.maxsi", start, self.like(0, start))
        return self.apply("arith.minsi", low, self.like(last, low))

    def index_value(self, x: Val, dtype: DType) -> Val:
        """An integer as i32, saturated."""
        if x.elem == "i64":
            low, high = self.like(-(1 << 31), x), self.like((1 << 31) - 1, x)
            if dtype.is_signed_int:
                x = self.apply("arith.maxsi", x, low)
                x = self.apply("arith.minsi", x, high)
            else:
                x = self.apply("arith.minui", x, high)
            return self.convert("arith.trunci", x, "i32")
        if dtype.name == "u32":
            return self.apply("arith.minui", x, self.like((1 << 31) - 1, x))
        name = "arith.extsi" if dtype.is_signed_int else "arith.extui"
        return self.convert(name, x, "i32")

    def emit_dynamic_slice(self, op: Op) -> None:
        x = self.env[op.operands[0]]
        old, sizes = op.operands[0].tile.shape, op.attrs["sizes"]
        self.layout(op.result.tile, op)
        for d, n in enumerate(sizes):
            if n == old[d]:
                continue
            index = self.along(_with(x.shape, d, physical((n,))[0]), d)
            start = self.clamped_start(op, 1 + d, old[d] - n)
            start = self.spread(start, index.shape)
            x = self.take(x, self.apply("arith.addi", index, start), d)
        self.env[op.result] = x

    def emit_dynamic_update_slice(self, op: Op) -> None:
        x, update = self.env[op.operands[0]], self.env[op.operands[1]]
        whole, part = op.operands[0].tile.shape, op.operands[1].tile.shape
        inside: Val | None = None
        for d, (n, size) in enumerate(zip(whole, part, strict=True)):
            if n == size:
                continue
            start = self.clamped_start(op, 2 + d, n - size)
            index = self.along(_with(update.shape, d, x.shape[d]), d)
            index = self.apply("arith.subi", index, self.spread(start, index.shape))
            update = self.take(update, index, d)
            # Positions before the start wrap to large numbers.
            here = self.compare("ult", index, self.like(size, index))
            inside = self.both(inside, here)
        if inside is not None:
            update = self.select(self.spread(inside, x.shape), update, x)
        self.env[op.result] = update

    def emit_gather(self, op: Op) -> None:
        """Elements of a vector; `flat_indices.py` makes no other gathers."""
        x, index = (self.env[v] for v in op.operands)
        shape, _ = self.layout(op.result.tile, op)
        held = held_bytes(op)
        if held > MOST_GATHERED:
            self.refuse(
                op,
                f"the {held} bytes it picks from would be in shared memory; the limit "
                f"is {MOST_GATHERED}",
                "use smaller blocks, or index the ref",
            )
        index = self.reshape(index, (prod(shape),))
        last = op.operands[0].tile.size - 1
        index = self.apply("arith.maxsi", index, self.like(0, index))
        index = self.apply("arith.minsi", index, self.like(last, index))
        self.env[op.result] = self.reshape(self.gather(x, index, 0), shape)

    # --- reductions and scans ---

    def fold(
        self, name: str, xs: Sequence[Val], axis: int, combine: Combine, attrs: str = ""
    ) -> list[Val]:
        """`tt.reduce` or `tt.scan` of several tiles together along one axis."""
        keep = name == "tt.scan"
        first = xs[0].shape
        shape = first if keep else (*first[:axis], *first[axis + 1 :])
        names, types = (", ".join(map(str, v)) for v in (xs, [x.type for x in xs]))
        results = ", ".join(type_text(shape, x.elem) for x in xs)
        results = f"({results})" if len(xs) > 1 else results
        result = self.out.fresh()
        count = f":{len(xs)}" if len(xs) > 1 else ""
        start = f'{result}{count} = "{name}"({names}) <{{axis = {axis} : i32{attrs}}}>'
        self.out.line(f"{start} ({{")
        pairs = [[Val(self.out.fresh(), (), x.elem) for x in xs] for _ in range(2)]
        params = ", ".join(f"{v}: {v.type}" for pair in pairs for v in pair)
        self.out.line(f"^bb0({params}):")
        with self.out.region():
            out = combine(*pairs)
            values = ", ".join(map(str, out))
            self.out.line(f"{name}.return {values} : {', '.join(v.type for v in out)}")
        self.out.line(f"}}) : ({types}) -> {results}")
        names_out = [f"{result}#{n}" for n in range(len(xs))] if count else [result]
        return [Val(n, shape, x.elem) for n, x in zip(names_out, xs, strict=True)]

    def emit_reduce(self, op: Op) -> None:
        kind, axes = op.attrs["kind"], op.attrs["axes"]
        tile = op.operands[0].tile
        x, narrow = self.wide(self.env[op.operands[0]])
        x = self.without_padding(x, tile.shape, axes, neutral(kind, tile.dtype))
        name = self.combiner(op, kind, tile.dtype)
        if len(axes) == len(x.shape) > 1:  # in any order: no element has to move
            x = self.flattened(x)
            axes = (0,)
        for axis in sorted(axes, reverse=True):
            if x.shape[axis] == 1:
                x = self.reshape(x, (*x.shape[:axis], *x.shape[axis + 1 :]))
                continue
            (x,) = self.fold(
                "tt.reduce", [x], axis, lambda a, b: [self.apply(name, a[0], b[0])]
            )
        self.env[op.result] = self.narrowed(x, narrow)

    def flattened(self, x: Val) -> Val:
        """All elements as a vector, in an order of Triton's choice."""
        shape = (prod(x.shape),)
        to = type_text(shape, x.elem)
        text = f"tt.reshape {x} allow_reorder : {x.type} -> {to}"
        return self.let(text, shape, x.elem)

    def wide(self, x: Val) -> tuple[Val, str]:
        """Accumulate narrow floats in f32 and bools in i32."""
        if x.elem == "i1":
            return self.convert("arith.extui", x, "i32"), "i1"
        if FLOAT_BITS.get(x.elem, 32) < 32:
            return self.to_float(x, "f32"), x.elem
        return x, x.elem

    def narrowed(self, x: Val, elem: str) -> Val:
        if x.elem == elem:
            return x
        if elem == "i1":
            return self.compare("ne", x, self.like(0, x))
        return self.to_float(x, elem)

    def combiner(self, op: Op, kind: str, dtype: DType) -> str:
        name = _COMBINE[kind].get("int" if dtype.is_bool else dtype.kind)
        if name is None or (dtype.is_bool and kind in ("sum", "prod")):
            self.refuse(op, f"{kind} of {dtype}")
        return name

    def emit_arg_reduce(self, op: Op) -> None:
        kind, axis = op.attrs["kind"], op.attrs["axis"]
        tile = op.operands[0].tile
        x, _ = self.wide(self.env[op.operands[0]])
        index = self.spread(self.along(x.shape, axis), x.shape)
        # Padding gets the last positions, so that it loses every tie.
        x = self.without_padding(x, tile.shape, [axis], neutral(kind, tile.dtype))
        is_float = tile.dtype.is_float
        signed = "s" if tile.dtype.is_signed_int else "u"
        better = ("gt" if kind == "max" else "lt") if kind in ("max", "min") else None
        if better is None:
            self.refuse(op, f"arg_reduce {kind}")
        better = f"o{better}" if is_float else f"{signed}{better}"

        def combine(a: Sequence[Val], b: Sequence[Val]) -> Sequence[Val]:
            (x, i), (y, j) = a, b
            wins = self.compare(better, x, y)
            ties = self.compare("oeq" if is_float else "eq", x, y)
            if is_float:  # NaN beats all; of two NaNs, the first
                x_nan, y_nan = self.compare("uno", x, x), self.compare("uno", y, y)
                y_number = self.compare("ord", y, y)
                wins = self.apply("arith.ori", wins, x_nan)
                wins = self.apply("arith.andi", wins, y_number)
                both_nan = self.apply("arith.andi", x_nan, y_nan)
                ties = self.apply("arith.ori", ties, both_nan)
            first = self.apply("arith.andi", ties, self.compare("slt", i, j))
            take = self.apply("arith.ori", wins, first)
            return [self.select(take, x, y), self.select(take, i, j)]

        _, found = self.fold("tt.reduce", [x, index], axis, combine)
        elem = self.elem(op.attrs["dtype"], op)
        name = "arith.extsi" if elem == "i64" else "arith.trunci"
        self.env[op.result] = self.convert(name, found, elem)

    def emit_scan(self, op: Op) -> None:
        kind, axis, reverse = (op.attrs[k] for k in ("kind", "axis", "reverse"))
        tile = op.operands[0].tile
        x, narrow = self.wide(self.env[op.operands[0]])
        if reverse:
            x = self.without_padding(x, tile.shape, [axis], neutral(kind, tile.dtype))
        name = self.combiner(op, kind, tile.dtype)
        (x,) = self.fold(
            "tt.scan",
            [x],
            axis,
            lambda a, b: [self.apply(name, a[0], b[0])],
            f", reverse = {'true' if reverse else 'false'}",
        )
        self.env[op.result] = self.narrowed(x, narrow)

    def emit_inline_asm(self, op: Op) -> None:
        if not op.operands:
            self.refuse(op, "inline assembly without arguments")
        if self.amd:
            self.refuse(op, "PTX is for NVIDIA's GPUs", "use jnp or lax operations")
        layouts = [self.layout(v.tile, op) for v in op.results]
        operands = [self.env[v] for v in op.operands]
        attrs = (
            f"constraints = {json.dumps(op.attrs['constraints'])}, "
            f"packed_element = {op.attrs['pack']} : i32, pure = true"
        )
        name = self.out.fresh()
        count = f":{len(layouts)}" if len(layouts) > 1 else ""
        types = ", ".join(x.type for x in operands)
        results = ", ".join(type_text(*layout) for layout in layouts)
        self.out.line(
            f"{name}{count} = tt.elementwise_inline_asm {json.dumps(op.attrs['asm'])} "
            f"{{{attrs}}} {', '.join(map(str, operands))} : {types} -> {results}"
        )
        for number, (value, layout) in enumerate(zip(op.results, layouts, strict=True)):
            self.env[value] = Val(f"{name}#{number}" if count else name, *layout)


RULES = {
    "constant": Tiles.emit_constant,
    "iota": Tiles.emit_iota,
    "broadcast_in_dim": Tiles.emit_broadcast_in_dim,
    "reshape": Tiles.emit_reshape,
    "transpose": Tiles.emit_transpose,
    "slice": Tiles.emit_slice,
    "rev": Tiles.emit_rev,
    "exchange": Tiles.emit_exchange,
    "concatenate": Tiles.emit_concatenate,
    "pad": Tiles.emit_pad,
    "dynamic_slice": Tiles.emit_dynamic_slice,
    "dynamic_update_slice": Tiles.emit_dynamic_update_slice,
    "gather": Tiles.emit_gather,
    "reduce": Tiles.emit_reduce,
    "arg_reduce": Tiles.emit_arg_reduce,
    "scan": Tiles.emit_scan,
    "inline_asm": Tiles.emit_inline_asm,
}


_COMBINE: dict[str, dict[str, str]] = {
    "sum": {"float": "arith.addf", "int": "arith.addi", "uint": "arith.addi"},
    "prod": {"float": "arith.mulf", "int": "arith.muli", "uint": "arith.muli"},
    "max": {"float": "arith.maximumf", "int": "arith.maxsi", "uint": "arith.maxui"},
    "min": {"float": "arith.minimumf", "int": "arith.minsi", "uint": "arith.minui"},
    "and": {"int": "arith.andi", "uint": "arith.andi"},
    "or": {"int": "arith.ori", "uint": "arith.ori"},
    "xor": {"int": "arith.xori", "uint": "arith.xori"},
}


def _with(shape: Sequence[int], axis: int, n: int) -> tuple[int, ...]:
    return (*shape[:axis], n, *shape[axis + 1 :])
