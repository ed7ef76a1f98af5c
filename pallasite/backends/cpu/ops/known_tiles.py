"""Tiles that only constants and positions make, computed while a kernel is compiled.

Tables of sines, decays or slopes, as in an FFT or a rotary embedding: each program
would compute them again. The values are those of the op table, as for folded scalars.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from pallasite.backends.cpu.llvm.writer import Module
from pallasite.backends.cpu.tiles.tiles import Buffer, Tile, row_major
from pallasite.ir.nodes import Op, Value
from pallasite.ir.opdef import Unit, table
from pallasite.ir.rewrite import is_elementwise

LARGEST = 1 << 12  # elements of a tile
MOST = 1 << 14  # in one kernel


class KnownTiles:
    """The known tiles of a kernel's ops."""

    def __init__(self, ops: Iterable[Op]) -> None:
        self.made = {value: op for op in ops for value in op.results}
        self.known: dict[Value, np.ndarray | None] = {}
        self.left = MOST

    def tile(self, module: Module, op: Op) -> Tile | None:
        """The result as a constant of the module, if it is known, and a load of it
        takes less time than the op."""
        type_ = op.result.tile
        if table()[op.name].unit is not Unit.SPECIAL:
            return None
        if not 1 < type_.size <= min(LARGEST, self.left):
            return None
        values = self.of(op.result)
        if values is None or not type_.dtype.is_float or type_.dtype.bits < 16:
            return None
        self.left -= type_.size
        words = np.ascontiguousarray(values).view(f"i{type_.dtype.bytes}").ravel()
        kind = f"i{type_.dtype.bits}"
        text = ", ".join(f"{kind} {word}" for word in words)
        name = f"tile.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        place = module.constant(name, f"[{type_.size} x {kind}] [{text}]")
        return Tile(type_.shape, type_.dtype, Buffer(place, row_major(type_.shape)))

    def of(self, value: Value) -> np.ndarray | None:
        """Its elements, if they are the same in every program."""
        if value not in self.known:
            op = self.made.get(value)
            is_tile = op is not None and not value.is_ref and value.tile.size <= LARGEST
            self.known[value] = self._of(op) if op is not None and is_tile else None
        return self.known[value]

    def _of(self, op: Op) -> np.ndarray | None:
        if op.name not in ("constant", "iota", "broadcast_in_dim", "reshape"):
            return self._computed(op) if is_elementwise(op) else None
        type_ = op.result.tile
        if op.name == "constant":
            return np.full(type_.shape, op.attrs["value"], type_.dtype.np)
        if op.name == "iota":
            dim = op.attrs["dim"]
            line = np.arange(type_.shape[dim]).astype(type_.dtype.np)
            line = line.reshape([-1 if d == dim else 1 for d in range(type_.rank)])
            return np.broadcast_to(line, type_.shape)
        x = self.of(op.operands[0])
        if x is None or op.name == "reshape":
            return None if x is None else x.reshape(type_.shape)
        places = dict(zip(op.attrs["dims"], x.shape, strict=True))
        shape = [places.get(d, 1) for d in range(type_.rank)]
        return np.broadcast_to(x.reshape(shape), type_.shape)

    def _computed(self, op: Op) -> np.ndarray | None:
        row, result = table()[op.name], op.result.tile
        arrays = [self.of(v) for v in op.operands]
        dtypes = [v.type.dtype for v in (*op.operands, *op.results)]
        if row.meaning is None or op.name == "bitcast" or not arrays:
            return None
        # The meaning of bit operations works on whole bytes.
        if any(a is None for a in arrays) or any(d.bits < 8 for d in dtypes):
            return None
        try:
            with np.errstate(all="ignore"):
                made = np.asarray(row.meaning(*arrays, **op.own_attrs))
        except TypeError:  # numpy lacks the function for some narrow floats
            return None
        is_right = made.dtype == result.dtype.np and made.shape == result.shape
        return made if is_right else None
