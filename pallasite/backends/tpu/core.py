"""What every part of the emitter shares: names of values, conversions, refusals.

`elementwise.py`, `tiles.py`, `memory.py` and `control.py` add the ops by family;
`emit.py` puts them together and writes whole functions.
"""

from typing import NoReturn

from pallasite.backends.tpu.facts import Facts
from pallasite.backends.tpu.writer import ELEMENTS, Writer, tile_text
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.types import BOOL, F32, I32, DType, TileType, Type


class Core:
    """Writes one function; subclasses know the ops."""

    def __init__(self, with_locations: bool = False):
        self.out = Writer(with_locations)
        self.facts = Facts()
        self.names: dict[Value, str] = {}
        self.constants: dict[Value, float | int | bool] = {}
        self.op: Op | None = None  # being written: what a refusal points at

    # --- values ---

    def name(self, value: Value) -> str:
        return self.names[value]

    def tile_type(self, value: Value) -> TileType:
        """The type of a tile operand, refused if the chip has no such elements."""
        tile = value.tile
        if tile.dtype.name not in ELEMENTS:
            self.refuse(
                f"the TPU has no {tile.dtype} values",
                fix="use float32, bfloat16, int32 or another type the chip has",
            )
        return tile

    def emit_block(self, block: Block) -> tuple[str, ...]:
        """Write a block's ops; the names of what it yields."""
        raise NotImplementedError("control.py writes blocks")

    # --- conversions ---

    def convert(self, name: str, tile: TileType, dtype: DType) -> str:
        """`name`, a value of type `tile`, with elements of `dtype` (as `cast` means)."""
        source = tile.dtype
        if source == dtype:
            return name
        if dtype.is_bool:
            return self._to_bool(name, tile)
        if source.is_bool:
            wide = self._spell("arith.extui", name, tile, tile.with_dtype(I32))
            return self.convert(wide, tile.with_dtype(I32), dtype)
        if source.is_float and dtype.is_float:
            return self._float_to_float(name, tile, dtype)
        if source.is_float:
            return self._float_to_integer(name, tile, dtype)
        if dtype.is_float:
            wide = self.convert(name, tile, I32 if source.bits < 32 else source)
            op = "arith.uitofp" if source.name == "u32" else "arith.sitofp"
            wide = self._spell(op, wide, tile.with_dtype(I32), tile.with_dtype(F32))
            return self.convert(wide, tile.with_dtype(F32), dtype)
        return self._integer_to_integer(name, tile, dtype)

    def _spell(self, op: str, name: str, source: TileType, target: TileType) -> str:
        return self.out.value(
            f"{op} {name} : {tile_text(source)} to {tile_text(target)}"
        )

    def _to_bool(self, name: str, tile: TileType) -> str:
        if not tile.shape:
            name, tile = self.in_words(name, tile)
        zero, text = self.out.number(0, tile), tile_text(tile)
        if not tile.dtype.is_float:
            return self.out.value(f"arith.cmpi ne, {name}, {zero} : {text}")
        # NaN counts as true, so: not equal to zero.
        same = self.out.value(f"arith.cmpf oeq, {name}, {zero} : {text}")
        return self.flipped(same, tile.with_dtype(BOOL))

    def flipped(self, name: str, tile: TileType) -> str:
        """All bits inverted; of bools, `not`."""
        ones = self.out.number(True if tile.dtype.is_bool else -1, tile)
        return self.out.value(f"arith.xori {name}, {ones} : {tile_text(tile)}")

    def _float_to_float(self, name: str, tile: TileType, dtype: DType) -> str:
        target = tile.with_dtype(dtype)
        if tile.dtype.bits < dtype.bits:
            return self._spell("arith.extf", name, tile, target)
        if tile.dtype.bits > dtype.bits:
            return self._spell("arith.truncf", name, tile, target)
        wide = self._spell("arith.extf", name, tile, tile.with_dtype(F32))
        return self._spell("arith.truncf", wide, tile.with_dtype(F32), target)

    def _float_to_integer(self, name: str, tile: TileType, dtype: DType) -> str:
        wide = tile.with_dtype(F32)
        name = self.convert(name, tile, F32)
        if dtype.name == "u32":
            return self._spell("arith.fptoui", name, wide, tile.with_dtype(dtype))
        whole = tile.with_dtype(I32)
        name = self._spell("arith.fptosi", name, wide, whole)
        if dtype == I32:
            return name
        low, high = integer_range(dtype)
        text = tile_text(whole)
        name = self.out.value(
            f"arith.maxsi {name}, {self.out.number(low, whole)} : {text}"
        )
        name = self.out.value(
            f"arith.minsi {name}, {self.out.number(high, whole)} : {text}"
        )
        return self._spell("arith.trunci", name, whole, tile.with_dtype(dtype))

    def _integer_to_integer(self, name: str, tile: TileType, dtype: DType) -> str:
        source, target = tile.dtype, tile.with_dtype(dtype)
        if source.bits == dtype.bits:
            return name  # MLIR integers carry no sign
        if source.bits > dtype.bits:
            return self._spell("arith.trunci", name, tile, target)
        op = "arith.extsi" if source.is_signed_int else "arith.extui"
        return self._spell(op, name, tile, target)

    def in_words(self, name: str, tile: TileType) -> tuple[str, TileType]:
        """The same value in 32-bit elements, which every Mosaic op takes."""
        dtype = word_dtype(tile.dtype)
        return self.convert(name, tile, dtype), tile.with_dtype(dtype)

    # --- refusals ---

    def refuse(self, why: str, fix: str = "", **facts: object) -> NoReturn:
        """Say that the op being written cannot run on a TPU, and what to do."""
        op = self.op
        if op is None:
            raise UnsupportedError(f"backend 'tpu': {why}", facts.items(), fix=fix)
        rows = [("op", signature(op)), ("why", why), *facts.items()]
        what = f"backend 'tpu' cannot run {op.name}"
        raise UnsupportedError(what, rows, at=op.loc, fix=fix)


def word_dtype(dtype: DType) -> DType:
    """The 32-bit type that holds every value of `dtype`."""
    if dtype.is_float:
        return F32
    return I32 if dtype.bits < 32 or dtype == BOOL else dtype


def integer_range(dtype: DType) -> tuple[int, int]:
    if dtype.is_signed_int:
        return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1
    return 0, 2**dtype.bits - 1


def signature(op: Op) -> str:
    """`reduce(f32[8,128]) {kind=prod, axes=(1,)} -> f32[8]`."""

    def listed(types: tuple[Type, ...]) -> str:
        return ", ".join(map(str, types))

    attrs = ", ".join(f"{k}={v}" for k, v in op.attrs.items() if k != "regions")
    text = f"{op.name}({listed(tuple(v.type for v in op.operands))})"
    text += f" {{{attrs}}}" if attrs else ""
    results = tuple(v.type for v in op.results)
    return f"{text} -> {listed(results)}" if results else text
