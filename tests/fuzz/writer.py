"""Writes random code into one block: the values it may use, and how exact they are.

A `Writer` belongs to a block; nested blocks get writers of their own that see what is
visible outside. Modules `arithmetic`, `shapes`, `memory` and `control` add one random
step each to a writer; `generate.py` puts kernels together.

Engines agree on integers bit for bit, on floats up to the op table's errors. An error
must not decide anything: `level` says how far a float value can be relied on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from tests.fuzz import choices as ch

# How far engines agree on a float value.
ROUGH = 0  # up to rounding
EXACT = 1  # the same number (a zero may have either sign)
BITS = 2  # the same bits

DIMENSIONS = (4, 1, 2, 3, 5, 8, 7)
RANKS = (1, 2, 2, 3, 0)
MAX_SIZE = 96

_MOVING = ("broadcast_in_dim", "reshape", "slice", "pad")

Option = TypeVar("Option")


@dataclass
class World:
    """What all writers of one kernel share."""

    choices: ch.Choices
    dtypes: tuple[T.DType, ...]
    for_tpu: bool = False  # last dimensions of windows are whole
    level: dict[Value, int] = field(default_factory=dict)
    used: set[Value] = field(default_factory=set)
    # Tiles a compiler cannot know: read from an input, and only moved since.
    unknown: set[Value] = field(default_factory=set)
    # Tiles with elements that are not defined: these must stay where they are.
    hanging: set[Value] = field(default_factory=set)

    def integer(self, low: int, high: int) -> int:
        return self.choices.integer(low, high)

    def pick(self, options: Sequence[Option]) -> Option:
        return ch.pick(self.choices, options)

    def chance(self, percent: int) -> bool:
        return ch.chance(self.choices, percent)

    def shape(self, ranks: Sequence[int] = RANKS) -> tuple[int, ...]:
        shape: tuple[int, ...] = ()
        for _ in range(self.pick(ranks)):
            n = self.pick(DIMENSIONS)
            shape += (n if n * prod(shape) <= MAX_SIZE else 1,)
        return shape

    def dtype(self, among: Sequence[T.DType] = T.ALL) -> T.DType:
        return self.pick([d for d in self.dtypes if d in among])

    def number(self, dtype: T.DType) -> bool | int | float:
        """A number worth trying as a constant."""
        if dtype.is_bool:
            return self.pick((False, True))
        if dtype.is_float:
            return self.pick((1.0, 0.0, -1.5, 0.5, 3.0, -2.0, 64.0))
        high = 2 ** (dtype.bits - dtype.is_signed_int) - 1
        low = -high - 1 if dtype.is_signed_int else 0
        return self.pick((1, 0, 2, 3, 7, high, low, high - 1, max(low, -1)))


@dataclass(frozen=True)
class Memory:
    """A ref that random code may go through."""

    ref: Value
    level: int = ROUGH  # of the floats loaded from it
    writable: bool = False
    solid: bool = True  # reading any element of it is defined
    shared: bool = False  # an output is the same memory

    @property
    def type(self) -> T.RefType:
        return self.ref.ref

    def moved(self, ref: Value) -> "Memory":
        """The same memory through another ref."""
        return replace(self, ref=ref)


class Writer:
    """Emits ops into one block and knows the tiles and memory visible there."""

    def __init__(self, world: World, outer: "Writer | None" = None, depth: int = 0):
        self.world, self.b, self.depth = world, Builder(), depth
        self.tiles: list[Value] = list(outer.tiles) if outer else []
        self.memories: list[Memory] = list(outer.memories) if outer else []
        self.own: list[Value] = []  # tiles made in this block

    def inner(self) -> "Writer":
        return Writer(self.world, self, self.depth + 1)

    # --- making values ---

    def add(self, value: Value, level: int = BITS) -> Value:
        """Make a tile available to the code that follows."""
        self.world.level[value] = level
        self.tiles.append(value)
        self.own.append(value)
        return value

    def emit_all(
        self, name: str, *operands: Value, most: int = BITS, **attrs: Any
    ) -> tuple[Value, ...]:
        """Emit an op whose float results are at most as exact as `most`."""
        world = self.world
        given = min([BITS, *(world.level.get(v, BITS) for v in operands)])
        results = self.b.emit(name, *operands, **attrs)
        world.used.update(operands)
        if not world.hanging.isdisjoint(operands):
            world.hanging.update(results)
        if name in _MOVING and operands[0] in world.unknown:
            world.unknown.update(results)
        for value in results:
            if not value.is_ref:
                is_float = value.tile.dtype.is_float
                exact = is_float or given > ROUGH
                assert exact, f"{name} makes {value.type} of a rough value"
                self.add(value, min(most, given) if is_float else BITS)
        return results

    def emit(
        self, name: str, *operands: Value, most: int = BITS, **attrs: Any
    ) -> Value:
        (result,) = self.emit_all(name, *operands, most=most, **attrs)
        return result

    def constant(self, dtype: T.DType, shape: Sequence[int] = ()) -> Value:
        return self.number(self.world.number(dtype), dtype, shape)

    def number(self, value: Any, dtype: T.DType, shape: Sequence[int] = ()) -> Value:
        """A constant that later code does not pick as an operand."""
        return self.b.constant(value, T.TileType(tuple(shape), dtype))

    # --- finding operands ---

    def level(self, value: Value) -> int:
        return self.world.level.get(value, BITS)

    def any_tile(self) -> Value:
        """One of the tiles made so far, rather a late or unused one."""
        recent = self.tiles[::-1][:12]
        unused = [v for v in recent if v not in self.world.used]
        return self.world.pick((unused or recent) if self.world.chance(60) else recent)

    def operand(
        self,
        dtype: T.DType,
        shape: Sequence[int] | None = None,
        level: int = ROUGH,
    ) -> Value:
        """A tile of this type, made to fit where there is none."""
        fits = [v for v in self.tiles[::-1] if v.tile.dtype == dtype]
        fits = [v for v in fits if self.level(v) >= level]
        if shape is not None:
            same = [v for v in fits if v.tile.shape == tuple(shape)]
            fits = same if same and self.world.chance(80) else fits
        unused = [v for v in fits if v not in self.world.used]
        if unused and self.world.chance(60):
            fits = unused
        if fits and not self.world.chance(5):
            value = self.world.pick(fits[:8])
        else:
            value = self._converted(dtype, shape, level)
        return value if shape is None else self.fit(value, shape)

    def _converted(
        self, dtype: T.DType, shape: Sequence[int] | None, level: int
    ) -> Value:
        """A tile of another type, cast; a constant where none can be."""
        needed = level if dtype.is_float else EXACT
        others = [v for v in self.tiles[::-1] if self.level(v) >= needed]
        others = [v for v in others if v.tile.dtype != dtype]
        if others and level < BITS:
            value = self.cast(self.world.pick(others[:8]), dtype)
            if self.level(value) >= level:
                return value
        return self.constant(dtype, self.world.shape() if shape is None else shape)

    def cast(self, value: Value, dtype: T.DType) -> Value:
        source = value.tile.dtype
        if source == dtype:
            return value
        return self.emit("cast", value, dtype=dtype, most=_cast_level(source, dtype))

    def fit(self, value: Value, shape: Sequence[int]) -> Value:
        """`value` with another shape: elements repeated, dropped or padded."""
        shape, have = tuple(shape), value.tile.shape
        if have == shape:
            return value
        if value in self.world.hanging:
            return self.constant(value.tile.dtype, shape)
        if have == ():
            return self.emit("broadcast_in_dim", value, shape=shape, dims=())
        size, wanted = prod(have), prod(shape)
        if len(have) > 1:
            value = self.emit("reshape", value, shape=(size,))
        if size > wanted:
            bounds = dict(starts=(0,), limits=(wanted,), strides=(1,))
            value = self.emit("slice", value, **bounds)
        elif size < wanted:
            filler = self.constant(value.tile.dtype)
            more = dict(low=(0,), high=(wanted - size,), interior=(0,))
            value = self.emit("pad", value, filler, **more)
        return value if value.tile.shape == shape else self.emit(
            "reshape", value, shape=shape
        )  # fmt: skip

    def scalar(self, dtype: T.DType = T.I32) -> Value:
        """A scalar that is already there, or a constant."""
        fits = [v for v in self.tiles[::-1] if v.type == T.scalar(dtype)]
        if fits and self.world.chance(70):
            return self.world.pick(fits[:6])
        return self.constant(dtype)

    def small_integer(self, low: int, high: int, dtype: T.DType = T.I32) -> Value:
        """A scalar from `low` to `high`: a constant, or known only when it runs."""
        if self.world.chance(50):
            return self.number(self.world.integer(low, high), dtype)
        bounds = [self.number(n, dtype) for n in (low, high)]
        value = self.cast(self.scalar(), dtype)
        return self.emit("clamp", bounds[0], value, bounds[1])

    def bool_tile(self, shape: Sequence[int]) -> Value:
        """A predicate of this shape that is neither all true nor all false, mostly."""
        shape = tuple(shape)
        if shape and self.world.chance(40):
            dim = self.world.integer(0, len(shape) - 1)
            line = self.emit("iota", type=T.TileType(shape, T.I32), dim=dim)
            limit = self.number(self.world.integer(0, shape[dim]), T.I32, shape)
            return self.emit(self.world.pick(("lt", "ge", "ne")), line, limit)
        if self.world.chance(60):
            dtype = self.world.dtype()
            operands = [self.operand(dtype, shape, EXACT) for _ in range(2)]
            return self.emit(self.world.pick(("lt", "ne", "ge")), *operands)
        return self.operand(T.BOOL, shape)

    # --- what is left over ---

    def unused(self) -> list[Value]:
        """Tiles of this block that nothing reads yet, latest first."""
        return [v for v in self.own[::-1] if v not in self.world.used]


def _cast_level(source: T.DType, target: T.DType) -> int:
    """Engines may round twice where a conversion goes through a middle type."""
    if not target.is_float:
        return BITS
    if source.is_float:
        return ROUGH if source.bits == 64 and target.bits < 32 else EXACT
    digits = {"bf16": 8, "f16": 11, "f32": 24, "f64": 53}.get(target.name, 3)
    return EXACT if source.is_bool or source.bits <= digits else ROUGH
