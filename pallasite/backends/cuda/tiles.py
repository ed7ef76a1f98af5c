"""Ops on whole tiles: elementwise, constants, shapes and reductions."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from pallasite.backends.cuda.assign import narrowed as narrowed_spread
from pallasite.backends.cuda.assign import part_of, reshaped
from pallasite.backends.cuda.core import VECTOR_BYTES, Core, Tile
from pallasite.backends.cuda.elementwise import (
    NATIVE,
    OF_BITS,
    ROUGH,
    called,
    choice,
    computed,
    infix,
    narrowed,
)
from pallasite.backends.cuda.layouts import WARP, Lane, Spread
from pallasite.backends.cuda.pairs import half_of_bytes, pairs
from pallasite.backends.cuda.text import c_type, is_narrow, number
from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import BOOL, F32, I32, DType
from pallasite.ops.neutral import neutral

# Integer ops that are cheaper to recompute than to keep in registers.
POSITIONAL = frozenset(
    ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not")
)
LONGEST_POSITION = 400
LINEAR = ("iota", "add", "sub", "mul", "broadcast_in_dim")


class Tiles(Core):
    """Emits ops whose operands and results are tiles."""

    def emit_elementwise(self, op: Op) -> None:
        tile, row = op.result.tile, NATIVE[op.name]
        if self.is_rough(op) and op.name in ROUGH:
            row = ROUGH[op.name]
        elif (op.name, op.operands[0].type) in self.called:
            row = called(row)
        for value in (*op.operands, op.result):
            self.type(value.tile.dtype, op)
        if op.name == "bitcast" and op.operands[0].tile.dtype.bits != tile.dtype.bits:
            self.refuse(op, "the two dtypes differ in width")
        if tile.dtype.name.startswith("f8") and op.name not in OF_BITS:
            self.refuse(op, "8-bit floats support only loads, bitcasts and matmuls")
        spread = self.spread(op.result, op)
        lanes = self.assignment.partial.get(op.result, ())
        operands = [self.operand_of(op, v, spread, lanes) for v in op.operands]
        as_bits = op.name in OF_BITS

        def element(i: str) -> str:
            return row(op, *(x.held(i) if as_bits else x.element(i) for x in operands))

        if spread is None:
            kind, name = self.type(tile.dtype, op), self.out.fresh()
            text = element("0")
            text = text if as_bits else narrowed(text, tile.dtype)
            self.out.line(f"const {kind} {name} = {text};")
            self.env[op.result] = Tile(name, tile.dtype)
            return
        if self.is_position(op, operands) or op.result in self.again.values:
            self.env[op.result] = Tile(f"({element('@')})", tile.dtype, spread, True)
            return
        result = replace(self.declare(tile.dtype, spread, op), lanes=lanes)
        in_pairs = self.in_pairs(op, result, operands, "i") if self.arch else None
        if in_pairs is not None:
            self.out.line(
                f"EACH({result.registers // 2}) {result.name}[i] = {in_pairs};"
            )
        elif op.name == "select_n" and self.is_mask(op, operands):
            self.masked(op, result, operands)
        elif as_bits:
            self.put(result, element)
        else:
            self.fill(result, element)
        self.env[op.result] = result

    def in_pairs(
        self, op: Op, result: Tile, operands: Sequence[Tile], i: str
    ) -> str | None:
        """Pair `i` of a result; None: there is no such instruction."""
        is_cast = op.name == "cast"
        half = half_of_bytes(op.operands[0], self.producers) if is_cast else None
        if half is None:
            return pairs(op, result, operands, i)
        name, value = half
        text = pairs(op, result, [self.env[value]], i)
        return text and text.replace("_of_i8_", f"_of_{name}_i4_")

    def is_rough(self, op: Op) -> bool:
        """Whether the result is rounded to 16 bits or fewer, here or further on.

        Or the author prefers speed to full f32 accuracy.
        """
        dtype = op.result.tile.dtype
        if self.approx_math and computed(dtype) == F32:
            return True
        return is_narrow(dtype) or op.result in self.rounded_away

    def operand_of(
        self, op: Op, value: Value, spread: Spread | None, lanes: tuple[Lane, ...]
    ) -> Tile:
        """An operand of an elementwise op, whose result may be partial sums."""
        is_part = op.name == "add" or value in self.assignment.partial
        if lanes and is_part and value.type.shape:
            return self.part(value, lanes, spread, op)
        return self.get(value, spread if value.type.shape else None, op)

    def is_position(self, op: Op, operands: Sequence[Tile]) -> bool:
        """Whether a tile is cheap to compute from positions wherever it is used."""
        if op.name not in POSITIONAL or not any(x.is_computed for x in operands):
            return False
        if any(x.dtype.is_float for x in operands) or op.result.tile.dtype.is_float:
            return False
        plain = all(x.is_computed or x.spread is None for x in operands)
        return plain and sum(len(x.name) for x in operands) < LONGEST_POSITION

    # --- masks ---

    def is_mask(self, op: Op, operands: Sequence[Tile]) -> bool:
        """Whether a select by position is often uniform over a thread's part."""
        which, *cases = operands
        tiles = len(cases) == 2 and cases[1].spread is not None
        convex = which.is_computed and self.is_convex(op.operands[0])
        return tiles and convex and not cases[1].is_computed and which.registers > 8

    def is_convex(self, value: Value) -> bool:
        """Whether a bool that is true at the corners of a box is true throughout."""
        op = self.producers.get(value)
        if op is None:
            return False
        if op.name == "and":
            return all(map(self.is_convex, op.operands))
        return op.name in ("lt", "le", "gt", "ge") and all(
            map(self.is_linear, op.operands)
        )

    def is_linear(self, value: Value) -> bool:
        """Whether an integer is a sum of multiples of positions."""
        if not self.env[value].is_computed:
            return self.env[value].spread is None
        op, fact = self.producers.get(value), self.facts.of(value)
        if op is None or op.name not in LINEAR:
            return False
        if (fact.low, fact.high) == value.tile.dtype.limits:
            return False  # it may wrap around
        if op.name == "mul" and all(self.env[v].is_computed for v in op.operands):
            return False
        return all(map(self.is_linear, op.operands))

    def masked(self, op: Op, result: Tile, operands: Sequence[Tile]) -> None:
        """Elements are tested one by one only where a corner is masked out."""
        which, other, kept = operands
        assert which.spread is not None
        corners = [which.held(str(n)) for n in which.spread.corners()]
        self.copy(result, kept)
        test = " && ".join(dict.fromkeys(corners))
        with self.out.block(f"if (!__all_sync(~0u, {test}))"):
            cases = lambda i: f"{kept.held(i)} : {other.held(i)}"
            self.put(result, lambda i: f"{which.held(i)} ? {cases(i)}")

    # --- making tiles ---

    def emit_constant(self, op: Op) -> None:
        tile = op.result.tile
        self.type(tile.dtype, op)
        text = number(op.attrs["value"], tile.dtype)
        self.env[op.result] = self.let(tile.dtype, text, op, "c")

    def emit_iota(self, op: Op) -> None:
        tile, spread = op.result.tile, self.spread(op.result, op)
        assert spread is not None
        kind = c_type(computed(tile.dtype))
        if not tile.dtype.is_float:
            at = self.coordinate(spread, op.attrs["dim"], "@")
            self.env[op.result] = Tile(f"({kind})({at})", tile.dtype, spread, True)
            return
        result, dim = self.declare(tile.dtype, spread, op), op.attrs["dim"]
        self.fill(result, lambda i: f"({kind})({self.coordinate(spread, dim, i)})")
        self.env[op.result] = result

    # --- shapes ---

    def emit_broadcast_in_dim(self, op: Op) -> None:
        (value,) = op.operands
        source = self.env[value]
        spread = self.spread(op.result, op)
        if source.spread is None or spread is None:
            self.env[op.result] = source
            return
        part, lanes = narrowed_spread(op, spread), self.assignment.partial
        if op.result in lanes:
            source = self.part(value, lanes[op.result], part, op)
            self.env[op.result] = replace(source, spread=spread)
            return
        source = self.get(value, part, op)
        x, dims = value.tile, op.attrs["dims"]
        gone = [
            d
            for d in range(len(spread.shape))
            if d not in dims or x.shape[dims.index(d)] != spread.shape[d]
        ]

        def element(i: str) -> str:
            i = i if i.isidentifier() else f"({i})"
            return source.held(spread.register_without(gone, i))

        if source.is_computed:
            text = element("@")
            self.env[op.result] = Tile(text, source.dtype, spread, True)
            return
        result = self.declare(source.dtype, spread, op)
        self.put(result, element)
        self.env[op.result] = result

    def emit_reshape(self, op: Op) -> None:
        (value,) = op.operands
        source = self.env[value]
        spread = self.spread(op.result, op)
        if source.spread is None or spread is None:
            if source.spread is not None:
                self.scalar_of(op, source)
                return
            self.env[op.result] = source
            return
        part, lanes = reshaped(spread, value.tile.shape), self.assignment.partial
        if part is None:
            self.refuse(op, "reshapes may only add or drop dimensions of size 1")
        if op.result in lanes:
            source = self.part(value, lanes[op.result], part, op)
        else:
            source = self.get(value, part, op)
        self.env[op.result] = replace(source, spread=spread)

    def emit_slice(self, op: Op) -> None:
        """Registers of the whole tile, already in each thread."""
        (value,) = op.operands
        source = self.whole(value, op)
        if source.spread is None:
            self.env[op.result] = source
            return
        whole = source.spread
        found = part_of(op, whole)
        if found is None or source.is_computed:
            self.refuse(
                op, f"the slice does not select whole registers of the layout {whole}"
            )
        spread, first = found
        result = self.declare(source.dtype, spread, op)
        at = lambda i: (
            f"{first} + "
            + spread.register_in(whole, i if i.isidentifier() else f"({i})")
        )
        self.put(result, lambda i: source.held(at(i)))
        wanted = self.spread(op.result, op)
        assert wanted is not None
        self.env[op.result] = (
            result if spread == wanted else self.moved(result, wanted, op)
        )

    def scalar_of(self, op: Op, source: Tile) -> None:
        """A tile of one element as a scalar: each thread may need it."""
        assert source.spread is not None
        if source.spread.lanes or source.registers != 1:
            kind = self.type(source.dtype, op)
            offset = self.reserve(source.dtype.bytes)
            place = f"*({kind}*)(shared + {offset})"
            self.sync_before_reuse()
            self.each_inside(source.spread, f"{place} = {source.held()};")
            self.sync()
            self.env[op.result] = self.declare(source.dtype, None, op)
            self.out.line(f"{self.env[op.result].name} = {place};")
            return
        self.env[op.result] = self.declare(source.dtype, None, op)
        self.out.line(f"{self.env[op.result].name} = {source.held('0')};")

    def emit_transpose(self, op: Op) -> None:
        (value,) = op.operands
        spread, perm = self.spread(op.result, op), op.attrs["perm"]
        if spread is None:
            self.env[op.result] = self.env[value]
            return
        back = [perm.index(d) for d in range(len(perm))]
        source = self.get(value, spread.permuted(back), op)
        self.env[op.result] = replace(source, spread=spread)

    # --- reductions ---

    def emit_reduce(self, op: Op) -> None:
        source = self.whole(op.operands[0], op)
        if source.spread is None:
            self.reduce_uniform(op, source)
            return
        self.reduce_spread(op, source)
        for value in self.again.after.get(op, ()):
            tile = self.env[value]
            if tile.is_packed:
                count, name = tile.registers // 2, tile.name
                self.out.line(f"EACH({count}) changed({name}[i]);")

    def reduce_spread(self, op: Op, source: Tile) -> None:
        kind, axes = op.attrs["kind"], op.attrs["axes"]
        (value,) = op.operands
        assert source.spread is not None
        spread, dtype = source.spread, value.tile.dtype
        wide = I32 if dtype == BOOL else computed(dtype)
        left = spread.without(axes)
        sums = self.declare(wide, left, op)
        start = number(neutral(kind, dtype), wide)
        self.fill(sums, lambda i: start)
        to = sums.held(spread.register_without(axes))
        text = self.combined(op, kind, wide, to, source.element())
        inside = self.inside(spread, axes)
        test = f"if ({inside}) " if inside else ""
        self.out.line(f"EACH({source.registers}) {test}{to} = {text};")
        lanes = self.assignment.partial.get(op.result)
        if lanes is not None:
            self.env[op.result] = replace(sums, lanes=lanes)
            return
        moving = [lane for lane in spread.lanes if lane.dim in axes]
        self.across_lanes(op, kind, sums, moving)
        self.across_warps(op, kind, sums, moving)
        self.finish_reduce(op, sums, dtype)

    def reduce_uniform(self, op: Op, source: Tile) -> None:
        """The reduction of a uniform tile."""
        kind, dtype = op.attrs["kind"], source.dtype
        count = op.operands[0].tile.size // op.result.tile.size
        if count > 1 and kind in ("prod", "xor"):
            self.refuse(op, f"a {kind} reduction of a uniform tile")
        if count == 1 or kind != "sum":
            self.env[op.result] = source
            return
        times = op.with_(operands=(Value(op.result.tile.with_dtype(computed(dtype))),))
        total = infix("*")(times, source.element(), number(count, computed(dtype)))
        self.env[op.result] = self.let(dtype, total, op)

    def combined(self, op: Op, kind: str, dtype: DType, x: str, y: str) -> str:
        if kind in ("max", "min"):
            typed = op.with_(operands=(Value(op.result.tile.with_dtype(dtype)),))
            return choice(kind)(typed, x, y)
        words = {"sum": "+", "prod": "*", "and": "&", "or": "|", "xor": "^"}
        typed = op.with_(operands=(Value(op.result.tile.with_dtype(dtype)),))
        return infix(words[kind])(typed, x, y)

    def across_lanes(
        self, op: Op, kind: str, sums: Tile, moving: Sequence[Lane]
    ) -> None:
        for lane in moving:
            step = lane.unit
            while step < min(lane.unit * lane.count, WARP):
                if lane.count & (lane.count - 1):
                    self.refuse(
                        op,
                        f"{lane.count} threads, not a power of two, share a reduction",
                    )
                other = f"__shfl_xor_sync(~0u, {sums.held()}, {step})"
                if sums.dtype.bytes < 4:  # shuffled as an int
                    other = f"({self.type(sums.dtype, op)}){other}"
                text = self.combined(op, kind, sums.dtype, sums.held(), other)
                self.out.line(f"EACH({sums.registers}) {sums.held()} = {text};")
                step *= 2

    def across_warps(
        self, op: Op, kind: str, sums: Tile, moving: Sequence[Lane]
    ) -> None:
        """Through shared memory, where warps share a sum.

        The values of the threads that share a sum are contiguous there, so that each of
        them reads them in few loads; lanes that already agree have one slot.
        """
        # Lanes that differ only in what is summed already agree: the others are kept.
        apart = WARP
        for lane in sorted(moving, key=lambda p: -p.unit):
            if lane.unit < apart <= lane.unit * lane.count:
                apart = lane.unit
        for lane in moving:
            unit = max(lane.unit, WARP)
            count = lane.unit * lane.count // unit
            if count <= 1:
                continue
            element = self.type(sums.dtype, op)
            place, kept = self.out.fresh("s"), self.threads // WARP * apart
            offset = self.reserve(kept * sums.registers * sums.dtype.bytes)
            self.out.line(f"{element}* {place} = ({element}*)(shared + {offset});")
            self.sync_before_reuse()
            inner = _place_in(unit, apart)
            slot = (
                f"(thread / {unit * count} * {unit // WARP * apart}{inner}) * {count}"
            )
            slot = f"i * {kept} + {slot}"
            mine = f"{place}[{slot} + thread / {unit} % {count}] = {sums.held()};"
            first = {WARP: "", 1: f"if (thread % {WARP} == 0) "}.get(
                apart, f"if (thread % {WARP} < {apart}) "
            )
            self.out.line(f"{first}EACH({sums.registers}) {mine}")
            self.sync()
            width = gcd(count, max(1, VECTOR_BYTES // sums.dtype.bytes))
            total = self.combined(op, kind, sums.dtype, "t", "all[w]")
            with self.out.block(f"EACH({sums.registers})"):
                self.out.line(f"__align__(16) {element} all[{count}];")
                self.out.line(
                    f'_Pragma("unroll") for (int w = 0; w < {count}; w += {width}) '
                    f"get<{width * sums.dtype.bytes}>(all + w, {place} + {slot} + w);"
                )
                self.out.line(f"{element} t = all[0];")
                self.out.line(
                    f'_Pragma("unroll") for (int w = 1; w < {count}; ++w) t = {total};'
                )
                self.out.line(f"{sums.held()} = t;")

    def finish_reduce(self, op: Op, sums: Tile, dtype: DType) -> None:
        spread, result = self.spread(op.result, op), sums
        if spread is None:
            result = self.declare(dtype, None, op)
            sums = Tile(f"{sums.name}[0]", sums.dtype)
        elif sums.dtype != dtype:
            result = self.declare(dtype, sums.spread, op)
        if result is not sums:
            test = " != 0" if dtype == BOOL else ""
            self.fill(result, lambda i: sums.held(i) + test)
        if spread is not None and result.spread != spread:
            result = self.moved(result, spread, op)
        self.env[op.result] = result


def _place_in(unit: int, apart: int) -> str:
    """The number of a thread among `unit`, where only `apart` lanes of a warp count."""
    if apart == WARP:
        return f" + thread % {unit}"
    warps = f" + thread % {unit} / {WARP}" if unit > WARP else ""
    if apart == 1:
        return warps
    return f"{warps}{f' * {apart}' if warps else ''} + thread % {apart}"


RULES = {
    **dict.fromkeys(NATIVE, Tiles.emit_elementwise),
    "constant": Tiles.emit_constant,
    "iota": Tiles.emit_iota,
    "broadcast_in_dim": Tiles.emit_broadcast_in_dim,
    "reshape": Tiles.emit_reshape,
    "slice": Tiles.emit_slice,
    "transpose": Tiles.emit_transpose,
    "reduce": Tiles.emit_reduce,
}
