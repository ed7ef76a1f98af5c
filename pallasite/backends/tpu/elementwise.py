"""Elementwise ops: a table of spellings, and methods where a name is not enough.

A row of `SPELLINGS` names the MLIR op per kind of element. Vectors and scalars are
spelled alike. Types narrower than the computing unit are widened to 32 bits around the
op (`_compute_dtype`).
"""

from dataclasses import dataclass

from pallasite.backends.tpu.convert import Conversions
from pallasite.backends.tpu.writer import tile_text
from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import BF16, BOOL, DTYPES, F32, I32, U32, DType, TileType


@dataclass(frozen=True)
class Spelling:
    """The MLIR op for each kind of element; None where there is none."""

    floats: str | None = None
    ints: str | None = None
    uints: str | None = None
    bools: str | None = None
    vector_bf16: bool = True  # Mosaic accepts vectors of bf16

    def of(self, dtype: DType) -> str | None:
        kinds = {"float": self.floats, "int": self.ints, "uint": self.uints}
        return self.bools if dtype.is_bool else kinds[dtype.kind]


def _float(op: str, vector_bf16: bool = True) -> Spelling:
    return Spelling(op, vector_bf16=vector_bf16)


def _number(op: str) -> Spelling:
    return Spelling(f"{op}f", f"{op}i", f"{op}i")


def _bits(op: str) -> Spelling:
    return Spelling(None, op, op, op)


def _compare(floats: str, ints: str, uints: str | None = None) -> Spelling:
    return Spelling(
        f"arith.cmpf {floats},", f"arith.cmpi {ints},", f"arith.cmpi {uints or ints},"
    )


SPELLINGS: dict[str, Spelling] = {
    "add": _number("arith.add"),
    "sub": _number("arith.sub"),
    "mul": _number("arith.mul"),
    "max": Spelling("arith.maximumf", "arith.maxsi", "arith.maxui", "arith.ori"),
    "min": Spelling("arith.minimumf", "arith.minsi", "arith.minui", "arith.andi"),
    "div": _float("arith.divf"),  # integers: emit_div
    "rem": _float("arith.remf", vector_bf16=False),  # integers: emit_rem
    "neg": _float("arith.negf"),  # integers: emit_neg
    "abs": Spelling("math.absf", "math.absi"),
    "floor": _float("math.floor"),
    "ceil": _float("math.ceil"),
    "pow": _float("math.powf"),  # integers: emit_pow
    "sqrt": _float("math.sqrt"),
    "rsqrt": _float("math.rsqrt"),
    "exp": _float("math.exp"),
    "exp2": _float("math.exp2"),
    "log": _float("math.log"),
    "log1p": _float("math.log1p"),
    "log2": _float("math.log2"),
    "sin": _float("math.sin"),
    "cos": _float("math.cos"),
    "tan": _float("math.tan"),
    "tanh": _float("math.tanh"),
    "atan2": _float("math.atan2", vector_bf16=False),
    "erf": _float("math.erf"),
    "and": _bits("arith.andi"),
    "or": _bits("arith.ori"),
    "xor": _bits("arith.xori"),
    "eq": _compare("oeq", "eq"),
    "ne": _compare("oeq", "ne"),  # floats: emit_ne
    "lt": _compare("olt", "slt", "ult"),
    "le": _compare("ole", "sle", "ule"),
    "gt": _compare("ogt", "sgt", "ugt"),
    "ge": _compare("oge", "sge", "uge"),
}
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
ROUNDINGS = {0: "math.round", 1: "math.roundeven"}  # away from zero, to even


class Elementwise(Conversions):
    """Emits elementwise ops."""

    def emit_elementwise(self, op: Op) -> str:
        """Emit an op of the table; returns the name of its result."""
        if op.name in COMPARISONS and op.operands[0].tile.dtype.is_bool:
            return self._compare_masks(op)
        names, tile = self._computing(op)
        if op.name in ("max", "min") and tile.dtype != op.result.tile.dtype:
            name = self._extreme(op.name, *names, tile=tile)
        else:
            name = self.arith(self.spelled(op.name, tile.dtype), *names, tile=tile)
        if op.name in COMPARISONS:
            return name
        return self.convert(name, tile, op.result.tile.dtype)

    def spelled(self, name: str, dtype: DType) -> str:
        """The MLIR op for `name`, for elements of `dtype`."""
        found = SPELLINGS[name].of(dtype)
        if found is None:
            self.refuse(
                f"Mosaic has no {name} of {dtype}",
                fix="cast to float32 or int32 before it",
            )
        return found

    def arith(self, spelled: str, *names: str, tile: TileType) -> str:
        """Emit `spelled names : type`."""
        return self.out.value(f"{spelled} {', '.join(names)} : {tile_text(tile)}")

    def select(self, pred: str, yes: str, no: str, tile: TileType, masks: bool) -> str:
        """`yes` where `pred` holds; `masks`: the predicate is a vector of bits."""
        types = tile_text(tile)
        if masks and tile.shape:
            types = f"{tile_text(tile.with_dtype(BOOL))}, {types}"
        return self.out.value(f"arith.select {pred}, {yes}, {no} : {types}")

    def _extreme(self, name: str, x: str, y: str, tile: TileType) -> str:
        """max or min of two widened numbers: y + max(x - y, 0), x - max(x - y, 0).

        MLIR would fold the plain form back to the narrow type, which the chip cannot
        compare.
        """
        if tile.dtype.is_float:
            return self._extreme_float(name, x, y, tile)
        above = self.arith("arith.subi", x, y, tile=tile)
        zero = self.out.number(0, tile)
        above = self.arith("arith.maxsi", above, zero, tile=tile)
        if name == "max":
            return self.arith("arith.addi", y, above, tile=tile)
        return self.arith("arith.subi", x, above, tile=tile)

    def _extreme_float(self, name: str, x: str, y: str, tile: TileType) -> str:
        """The sum is NaN if an operand is, and then both comparisons are false."""
        first, second = ("ogt", "oge") if name == "max" else ("olt", "ole")
        found = self.arith("arith.addf", x, y, tile=tile)
        other = self.arith(f"arith.cmpf {second},", y, x, tile=tile)
        found = self.select(other, y, found, tile, True)
        own = self.arith(f"arith.cmpf {first},", x, y, tile=tile)
        return self.select(own, x, found, tile, True)

    def _computing(self, op: Op) -> tuple[list[str], TileType]:
        """The operands in the type the op is computed in, and that type."""
        first = self.tile_type(op.operands[0])
        dtype = self._compute_dtype(op.name, first)
        names = [self.convert(self.name(v), v.tile, dtype) for v in op.operands]
        return names, first.with_dtype(dtype)

    def _compute_dtype(self, name: str, tile: TileType) -> DType:
        dtype = tile.dtype
        if dtype.is_bool or dtype.bits >= 32:
            return dtype
        if not dtype.is_float:
            return I32 if dtype.is_signed_int else U32
        row = SPELLINGS.get(name)
        native = dtype == BF16 and tile.shape and (row is None or row.vector_bf16)
        return BF16 if native else F32

    def _compare_masks(self, op: Op) -> str:
        """Bools compared as bits: False < True."""
        tile = op.operands[0].tile
        x, y = (self.name(v) for v in op.operands)
        if op.name in ("eq", "ne"):
            differs = self.arith("arith.xori", x, y, tile=tile)
            return differs if op.name == "ne" else self.flipped(differs, tile)
        if op.name in ("gt", "le"):
            x, y = y, x
        less = self.arith("arith.andi", self.flipped(x, tile), y, tile=tile)
        return less if op.name in ("lt", "gt") else self.flipped(less, tile)

    # --- ops whose meaning takes more than one MLIR op ---

    def emit_not(self, op: Op) -> str:
        (x,), tile = self._computing(op)
        return self.convert(self.flipped(x, tile), tile, op.result.tile.dtype)

    def emit_neg(self, op: Op) -> str:
        if op.result.tile.dtype.is_float:
            return self.emit_elementwise(op)
        (x,), tile = self._computing(op)
        name = self.arith("arith.subi", self.out.number(0, tile), x, tile=tile)
        return self.convert(name, tile, op.result.tile.dtype)

    def emit_ne(self, op: Op) -> str:
        """Mosaic has only ordered float comparisons, and NaN is unequal to all."""
        name = self.emit_elementwise(op)
        if not op.operands[0].tile.dtype.is_float:
            return name
        return self.flipped(name, op.result.tile)

    def emit_square(self, op: Op) -> str:
        (x,), tile = self._computing(op)
        name = self.arith(self.spelled("mul", tile.dtype), x, x, tile=tile)
        return self.convert(name, tile, op.result.tile.dtype)

    def emit_sign(self, op: Op) -> str:
        (x,), tile = self._computing(op)
        zero, one = (self.out.number(n, tile) for n in (0, 1))
        greater, less = (self.spelled(n, tile.dtype) for n in ("gt", "lt"))
        positive = self.arith(greater, x, zero, tile=tile)
        # Zero and NaN are their own signs.
        other = x if tile.dtype.is_float else zero
        name = self.select(positive, one, other, tile, True)
        if tile.dtype.kind != "uint":
            negative = self.arith(less, x, zero, tile=tile)
            name = self.select(negative, self.out.number(-1, tile), name, tile, True)
        return self.convert(name, tile, op.result.tile.dtype)

    def emit_div(self, op: Op) -> str:
        """Integers truncate; x/0 is -1 (all bits), MIN/-1 is MIN: neither may trap."""
        if op.result.tile.dtype.is_float:
            return self.emit_elementwise(op)
        (x, y), tile = self._computing(op)
        signed = tile.dtype.is_signed_int
        spelled = "arith.divsi" if signed else "arith.divui"
        if self.constants.get(op.operands[1], 0) not in (0, -1):
            name = self.arith(spelled, x, y, tile=tile)
            return self.convert(name, tile, op.result.tile.dtype)
        zero, minus, safe = self._safe_divisor(y, tile)
        name = self.arith(spelled, x, safe, tile=tile)
        if signed:
            negated = self.arith("arith.subi", self.out.number(0, tile), x, tile=tile)
            name = self.select(minus, negated, name, tile, True)
        name = self.select(zero, self.out.number(-1, tile), name, tile, True)
        return self.convert(name, tile, op.result.tile.dtype)

    def emit_rem(self, op: Op) -> str:
        """Has the sign of the dividend; x rem 0 is x."""
        if op.result.tile.dtype.is_float:
            return self.emit_elementwise(op)
        (x, y), tile = self._computing(op)
        spelled = "arith.remsi" if tile.dtype.is_signed_int else "arith.remui"
        if self.constants.get(op.operands[1], 0) not in (0, -1):
            name = self.arith(spelled, x, y, tile=tile)
            return self.convert(name, tile, op.result.tile.dtype)
        zero, _, safe = self._safe_divisor(y, tile)
        name = self.arith(spelled, x, safe, tile=tile)
        name = self.select(zero, x, name, tile, True)
        return self.convert(name, tile, op.result.tile.dtype)

    def _safe_divisor(self, y: str, tile: TileType) -> tuple[str, str, str]:
        """Whether y is 0, whether it is -1, and y with 1 in place of both."""
        one = self.out.number(1, tile)
        zero = self.arith("arith.cmpi eq,", y, self.out.number(0, tile), tile=tile)
        minus = ""
        safe = self.select(zero, one, y, tile, True)
        if tile.dtype.is_signed_int:
            all_bits = self.out.number(-1, tile)
            minus = self.arith("arith.cmpi eq,", y, all_bits, tile=tile)
            safe = self.select(minus, one, safe, tile, True)
        return zero, minus, safe

    def emit_shift(self, op: Op) -> str:
        """Shifting by the width or more gives zeros, or copies of the sign."""
        arithmetic = op.name == "shift_right_arithmetic"
        x, tile = self._as_word(op.operands[0], signed=arithmetic)
        y, _ = self._as_word(op.operands[1], signed=False)
        bits = op.result.tile.dtype.bits
        amount = self.constants.get(op.operands[1])
        if amount is not None and 0 <= amount < bits:
            name = self.arith(_SHIFTS[op.name], x, y, tile=tile)
            return self.convert(name, tile, op.result.tile.dtype)
        limit, most = (self.out.number(n, tile) for n in (bits, bits - 1))
        inside = self.arith("arith.cmpi ult,", y, limit, tile=tile)
        y = self.select(inside, y, most, tile, True)
        name = self.arith(_SHIFTS[op.name], x, y, tile=tile)
        if not arithmetic:
            name = self.select(inside, name, self.out.number(0, tile), tile, True)
        return self.convert(name, tile, op.result.tile.dtype)

    def _as_word(self, value: Value, signed: bool) -> tuple[str, TileType]:
        """An integer's bits in 32, zero-extended or sign-extended."""
        tile = self.tile_type(value)
        narrow = tile.with_dtype(DTYPES[f"{'i' if signed else 'u'}{tile.dtype.bits}"])
        name = self.convert(self.name(value), tile, narrow.dtype)
        word = I32 if signed else U32
        return self.convert(name, narrow, word), tile.with_dtype(word)

    def emit_population_count(self, op: Op) -> str:
        x, tile = self._as_word(op.operands[0], signed=False)
        if not tile.shape:
            self.refuse(
                "the scalar unit does not support population_count", fix="use a vector"
            )
        name = self.arith("math.ctpop", x, tile=tile)
        return self.convert(name, tile, op.result.tile.dtype)

    def emit_clz(self, op: Op) -> str:
        x, tile = self._as_word(op.operands[0], signed=False)
        name = self.arith("math.ctlz", x, tile=tile)
        extra = 32 - op.result.tile.dtype.bits
        if extra:
            name = self.arith(
                "arith.subi", name, self.out.number(extra, tile), tile=tile
            )
        return self.convert(name, tile, op.result.tile.dtype)

    def emit_round(self, op: Op) -> str:
        (x,), tile = self._computing(op)
        name = self.arith(ROUNDINGS[op.attrs["rounding_method"]], x, tile=tile)
        return self.convert(name, tile, op.result.tile.dtype)

    def emit_is_finite(self, op: Op) -> str:
        (x,), tile = self._computing(op)
        size = self.arith("math.absf", x, tile=tile)
        infinity = self.out.number(float("inf"), tile)
        return self.arith("arith.cmpf olt,", size, infinity, tile=tile)

    def emit_logistic(self, op: Op) -> str:
        tile = op.result.tile.with_dtype(F32)
        x = self.convert(self.name(op.operands[0]), op.operands[0].tile, F32)
        one = self.out.number(1, tile)
        power = self.arith(
            "math.exp", self.arith("arith.negf", x, tile=tile), tile=tile
        )
        sum_ = self.arith("arith.addf", one, power, tile=tile)
        name = self.arith("arith.divf", one, sum_, tile=tile)
        return self.convert(name, tile, op.result.tile.dtype)

    def emit_pow(self, op: Op) -> str:
        base, exponent = (v.tile.dtype for v in op.operands)
        if not base.is_float:
            self.refuse(f"Mosaic has no pow of {base}", fix="cast to float32 first")
        tile = op.result.tile.with_dtype(F32)
        if not tile.shape:
            self.refuse("the scalar unit has no pow", fix="use a vector of one element")
        pairs = zip(op.operands, (base, exponent), strict=True)
        names = [self.convert(self.name(v), tile.with_dtype(d), F32) for v, d in pairs]
        name = self.arith("math.powf", *names, tile=tile)
        return self.convert(name, tile, base)

    def emit_integer_pow(self, op: Op) -> str:
        (x,), tile = self._computing(op)
        times, power = self.spelled("mul", tile.dtype), abs(op.attrs["y"])
        if op.attrs["y"] < 0 and not tile.dtype.is_float:
            self.refuse(
                "negative powers of integers are not supported",
                fix="cast to float32 first",
            )
        name: str | None = None
        while power:
            if power & 1:
                name = x if name is None else self.arith(times, name, x, tile=tile)
            power >>= 1
            x = self.arith(times, x, x, tile=tile) if power else x
        name = name or self.out.number(1, tile)
        if op.attrs["y"] < 0:
            name = self.arith("arith.divf", self.out.number(1, tile), name, tile=tile)
        return self.convert(name, tile, op.result.tile.dtype)

    def emit_clamp(self, op: Op) -> str:
        x = op.operands[1]
        tile = self.tile_type(x).with_dtype(self._compute_dtype("max", x.tile))
        low, middle, high = (self._spread(v, tile) for v in op.operands)
        if tile.dtype != x.tile.dtype:
            name = self._extreme("max", middle, low, tile)
            name = self._extreme("min", name, high, tile)
            return self.convert(name, tile, x.tile.dtype)
        largest, least = (self.spelled(n, tile.dtype) for n in ("max", "min"))
        name = self.arith(largest, middle, low, tile=tile)
        return self.arith(least, name, high, tile=tile)

    def _spread(self, value: Value, tile: TileType) -> str:
        """A value in `tile`'s type; a scalar is broadcast to its shape."""
        name = self.convert(self.name(value), value.tile, tile.dtype)
        if value.tile.shape == tile.shape:
            return name
        return self.repeat(name, tile.with_shape(()), tile.shape)

    def emit_select_n(self, op: Op) -> str:
        which, *cases = op.operands
        names = [self.name(c) for c in cases]
        tile = self.tile_type(cases[0])
        masks = bool(which.tile.shape)
        if which.tile.dtype.is_bool and len(cases) == 2:
            return self._choose(self.name(which), names[1], names[0], tile, masks)
        picked = names[0]
        number = self.convert(self.name(which), which.tile, I32)
        selector = which.tile.with_dtype(I32)
        for n, case in enumerate(names[1:], 1):
            limit = self.out.number(n, selector)
            hit = self.arith("arith.cmpi sge,", number, limit, tile=selector)
            picked = self._choose(hit, case, picked, tile, masks)
        return picked

    def _choose(self, pred: str, yes: str, no: str, tile: TileType, masks: bool) -> str:
        """`select`, by bitwise logic where the cases are masks themselves."""
        if not (tile.dtype.is_bool and tile.shape):
            return self.select(pred, yes, no, tile, masks)
        if not masks:
            pred = self.out.value(f"vector.broadcast {pred} : i1 to {tile_text(tile)}")
        first = self.arith("arith.andi", pred, yes, tile=tile)
        second = self.arith("arith.andi", self.flipped(pred, tile), no, tile=tile)
        return self.arith("arith.ori", first, second, tile=tile)

    def emit_cast(self, op: Op) -> str:
        self.tile_type(op.result)
        x = op.operands[0]
        return self.convert(self.name(x), self.tile_type(x), op.attrs["dtype"])

    def emit_bitcast(self, op: Op) -> str:
        source, target = self.tile_type(op.operands[0]), self.tile_type(op.result)
        name = self.name(op.operands[0])
        if source == target:
            return name
        if source.dtype.bits != target.dtype.bits or source.dtype.is_bool:
            self.refuse(
                "Mosaic bitcasts only between dtypes of the same width",
                fix="use a dtype of the same width",
            )
        if source.dtype.is_integer and target.dtype.is_integer:
            return self.convert(name, source, target.dtype)
        if not target.shape and source.dtype.bits < 32:
            return self._bitcast_half(name, source.dtype, target.dtype)
        if target.shape:
            types = f"{tile_text(source)} -> {tile_text(target)}"
            return self.out.value(f"tpu.bitcast {name} : {types}")
        types = f"{tile_text(source)} to {tile_text(target)}"
        return self.out.value(f"arith.bitcast {name} : {types}")

    def _bitcast_half(self, name: str, source: DType, target: DType) -> str:
        """Between bf16 and 16-bit integers: bf16 is the upper half of a float32."""
        half = self.out.i32(16)
        if source == BF16:
            name = self.out.value(f"arith.bitcast {name} : f32 to i32")
            shift = "arith.shrsi" if target.is_signed_int else "arith.shrui"
            return self.out.value(f"{shift} {name}, {half} : i32")
        if target != BF16:
            self.refuse(
                f"a scalar {source} cannot be bitcast to {target}", fix="use a vector"
            )
        name = self.out.value(f"arith.shli {name}, {half} : i32")
        return self.out.value(f"arith.bitcast {name} : i32 to f32")


# Ops that need more than a spelling.
RULES = {
    "shift_left": Elementwise.emit_shift,
    "shift_right_logical": Elementwise.emit_shift,
    "shift_right_arithmetic": Elementwise.emit_shift,
    "not": Elementwise.emit_not,
    "neg": Elementwise.emit_neg,
    "ne": Elementwise.emit_ne,
    "square": Elementwise.emit_square,
    "sign": Elementwise.emit_sign,
    "div": Elementwise.emit_div,
    "rem": Elementwise.emit_rem,
    "population_count": Elementwise.emit_population_count,
    "clz": Elementwise.emit_clz,
    "round": Elementwise.emit_round,
    "is_finite": Elementwise.emit_is_finite,
    "logistic": Elementwise.emit_logistic,
    "pow": Elementwise.emit_pow,
    "integer_pow": Elementwise.emit_integer_pow,
    "clamp": Elementwise.emit_clamp,
    "select_n": Elementwise.emit_select_n,
    "cast": Elementwise.emit_cast,
    "bitcast": Elementwise.emit_bitcast,
}


_SHIFTS = {
    "shift_left": "arith.shli",
    "shift_right_logical": "arith.shrui",
    "shift_right_arithmetic": "arith.shrsi",
}
