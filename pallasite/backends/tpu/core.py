"""Shared by all parts of the emitter: the names of values, and rejections.

`convert.py` adds conversions; `elementwise.py`, `tiles.py`, `memory.py` and
`control.py` add ops by family; `emit.py` combines them into whole functions.
"""

from typing import NoReturn

from pallasite.backends.tpu.writer import ELEMENTS, Writer
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.types import TileType, Type
from pallasite.passes.analysis.intervals import Facts


class Core:
    """Emits one function; subclasses know the ops."""

    def __init__(self, with_locations: bool = False):
        self.out = Writer(with_locations)
        self.facts = Facts()
        self.names: dict[Value, str] = {}
        self.constants: dict[Value, float | int | bool] = {}
        self.repeated: set[Value] = set()  # tiles that do not vary along all dims
        self.varies_starts = False  # whether loops start with tiles as if varying
        self.turns_columns = False  # whether (n, 1) becomes (n,) by a transpose
        self.op: Op | None = None  # being emitted: what an error points at

    # --- values ---

    def name(self, value: Value) -> str:
        return self.names[value]

    def tile_type(self, value: Value) -> TileType:
        """The type of a tile operand; rejected if the chip has no such elements."""
        tile = value.tile
        if tile.dtype.name not in ELEMENTS:
            self.refuse(
                f"TPUs do not support {tile.dtype}",
                fix="use float32, bfloat16, int32 or another type the chip has",
            )
        return tile

    def emit_block(self, block: Block) -> tuple[str, ...]:
        """Emit a block's ops; returns the names of its yields."""
        raise NotImplementedError("control.py writes blocks")

    # --- rejections ---

    def refuse(self, why: str, fix: str = "", **facts: object) -> NoReturn:
        """Raise that the op being emitted cannot run on a TPU, with a fix."""
        op = self.op
        if op is None:
            raise UnsupportedError(f"backend 'tpu': {why}", facts.items(), fix=fix)
        rows = [("op", signature(op)), ("why", why), *facts.items()]
        what = f"backend 'tpu' cannot run {op.name}"
        raise UnsupportedError(what, rows, at=op.loc, fix=fix)


def signature(op: Op) -> str:
    """`reduce(f32[8,128]) {kind=prod, axes=(1,)} -> f32[8]`."""

    def listed(types: tuple[Type, ...]) -> str:
        return ", ".join(map(str, types))

    attrs = ", ".join(f"{k}={v}" for k, v in op.attrs.items() if k != "regions")
    text = f"{op.name}({listed(tuple(v.type for v in op.operands))})"
    text += f" {{{attrs}}}" if attrs else ""
    results = tuple(v.type for v in op.results)
    return f"{text} -> {listed(results)}" if results else text
