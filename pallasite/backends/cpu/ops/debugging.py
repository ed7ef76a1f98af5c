"""debug_print and debug_check.

Machine code prints by calling back into Python, which knows how to format: `printer` is
the function, linked under the name `PRINT`. A failing check ends the call; XLA raises
its message.
"""

import ctypes
from functools import cache
from math import prod
from typing import Any

import numpy as np

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm.writer import integer
from pallasite.backends.cpu.tiles.tiles import Ref
from pallasite.ir.nodes import Op
from pallasite.ir.types import DTYPES, I64

PRINT = "pallasite_print"


def emit_debug_check(e: Emitter, op: Op) -> None:
    f = e.f
    good, bad = f.labels("good", "bad")
    where = f" at {op.loc}" if op.loc else ""
    message = f.module.text_constant(
        f"debug_check failed: {op.attrs['message']}{where}"
    )
    f.branch_if(e.scalar(op.operands[0]), good, bad)
    f.label(bad)
    f.line(f"ret {message}")
    f.label(good)


def emit_debug_print(e: Emitter, op: Op) -> None:
    """Store the values without gaps and hand over their addresses."""
    f = e.f
    table = e.temporary((len(op.operands),), I64)
    places = Ref((len(op.operands),), I64, table)
    for n, value in enumerate(op.operands):
        buffer = e.temporary(value.tile.shape, value.tile.dtype)
        e.fill(buffer, e.as_tile(value))
        address = f.convert("ptrtoint", buffer.pointer, "i64")
        places.write(f, [integer(n)], address)
    types = " ".join(f"{v.tile.dtype}:{_shape_text(v.tile.shape)}" for v in op.operands)
    texts = [f.module.text_constant(t) for t in (op.attrs["format"], types)]
    f.call(PRINT, "void", *texts, table.pointer)


def _shape_text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


@cache
def printer() -> Any:
    """The C function that prints: format, types, addresses of the values."""
    pointers = ctypes.POINTER(ctypes.c_void_p)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, pointers)
    return kind(_print)


def _print(template: bytes, types: bytes, addresses: Any) -> None:
    pairs = enumerate(types.decode().split())
    values = [_array_at(addresses[n], *text.split(":")) for n, text in pairs]
    print(template.decode().rstrip("\n").format(*values), flush=True)


def _array_at(address: int, dtype_name: str, shape_text: str) -> np.ndarray:
    shape = tuple(int(n) for n in shape_text.split(",") if n)
    dtype = DTYPES[dtype_name]
    data = ctypes.string_at(address, prod(shape) * dtype.bytes)
    return np.frombuffer(data, dtype.np).reshape(shape)[()]


RULES = {"debug_check": emit_debug_check, "debug_print": emit_debug_print}
