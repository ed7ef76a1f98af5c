"""debug_print and debug_check.

Machine code prints by calling back into Python, which does the formatting: `printer` is
the function, linked under the name `PRINT`. A failing check ends the call; XLA raises
its message, whose fields, if any, are filled in by `filler`, linked as `FILL`.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm.writer import Val, integer
from pallasite.backends.cpu.tiles.tiles import Ref
from pallasite.errors import failed_check
from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import DTYPES, I64

PRINT = "pallasite_print"
FILL = "pallasite_fill_message"


def emit_debug_check(e: Emitter, op: Op) -> None:
    f = e.f
    good, bad = f.labels("good", "bad")
    ok, *values = op.operands
    f.branch_if(e.scalar(ok), good, bad)
    f.label(bad)
    if values:
        template = f.module.text_constant(op.attrs["message"])
        at = f.module.text_constant(str(op.loc or ""))
        message = f.call(FILL, "ptr", template, at, *_handed_over(e, values))
    else:
        text = failed_check(op.attrs["message"], (), op.loc)
        message = f.module.text_constant(text)
    f.line(f"ret {message}")
    f.label(good)


def emit_debug_print(e: Emitter, op: Op) -> None:
    template = e.f.module.text_constant(op.attrs["format"])
    e.f.call(PRINT, "void", template, *_handed_over(e, op.operands))


def _handed_over(e: Emitter, values: Sequence[Value]) -> tuple[Val, Val]:
    """Store values contiguously: text of their types, and a table of addresses."""
    f = e.f
    table = e.temporary((len(values),), I64)
    places = Ref((len(values),), I64, table)
    for n, value in enumerate(values):
        buffer = e.temporary(value.tile.shape, value.tile.dtype)
        e.fill(buffer, e.as_tile(value))
        address = f.convert("ptrtoint", buffer.pointer, "i64")
        places.write(f, [integer(n)], address)
    types = " ".join(f"{v.tile.dtype}:{_shape_text(v.tile.shape)}" for v in values)
    return f.module.text_constant(types), table.pointer


def _shape_text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


@cache
def printer() -> Any:
    """The C function that prints: format, types, addresses of the values."""
    pointers = ctypes.POINTER(ctypes.c_void_p)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, pointers)
    return kind(_print)


def _print(template: bytes, types: bytes, addresses: Any) -> None:
    values = _arrays_at(types, addresses)
    print(template.decode().rstrip("\n").format(*values), flush=True)


@cache
def filler() -> Any:
    """The C function that fills a message: format, its line, types, addresses."""
    pointers = ctypes.POINTER(ctypes.c_void_p)
    texts = [ctypes.c_char_p] * 3
    return ctypes.CFUNCTYPE(ctypes.c_void_p, *texts, pointers)(_fill)


# Messages live until XLA has read them: programs of one call may fail on each thread.
_filled: deque[Any] = deque(maxlen=1024)


def _fill(template: bytes, at: bytes, types: bytes, addresses: Any) -> int | None:
    values = _arrays_at(types, addresses)
    text = failed_check(template.decode(), values, at.decode())
    message = ctypes.create_string_buffer(text.encode())
    _filled.append(message)
    return ctypes.addressof(message)


def _arrays_at(types: bytes, addresses: Any) -> list[Any]:
    pairs = enumerate(types.decode().split())
    return [_array_at(addresses[n], *text.split(":")) for n, text in pairs]


def _array_at(address: int, dtype_name: str, shape_text: str) -> np.ndarray:
    shape = tuple(int(n) for n in shape_text.split(",") if n)
    dtype = DTYPES[dtype_name]
    data = ctypes.string_at(address, prod(shape) * dtype.bytes)
    return np.frombuffer(data, dtype.np).reshape(shape)[()]


RULES = {"debug_check": emit_debug_check, "debug_print": emit_debug_print}
