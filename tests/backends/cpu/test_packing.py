"""Panels of dot's operands: each element in its place, and nothing past the end."""

import ctypes

import numpy as np
import pytest

from pallasite.backends.cpu.call import compile as compiler
from pallasite.backends.cpu.dot.packing import Packing, packer
from pallasite.backends.cpu.llvm.writer import Function, Module
from pallasite.ir.types import F16, F32

PANELS, PANEL_DEPTH, UNTOUCHED = 2, 48, 777.0


def machine_code(packing: Packing):
    """The packing as a function of addresses and numbers, and what keeps it alive."""
    module = Module()
    kinds = ["ptr", "i64", "i64", "ptr", "i64", "i64", "i64"]
    f = Function(module, "handler", [(kind, f"p{n}") for n, kind in enumerate(kinds)])
    f.call_defined(packer(module, packing), *f.params)
    f.line("ret void")
    code = compiler._machine().emit_object(compiler._optimized(module.text))
    address, tracker = compiler._link(f"test_{packing.name}", code)
    types = [ctypes.c_void_p if kind == "ptr" else ctypes.c_int64 for kind in kinds]
    return ctypes.CFUNCTYPE(None, *types)(address), tracker


@pytest.mark.parametrize("along", ["depth", "width", "none"])
@pytest.mark.parametrize(
    ("lanes", "width", "valid"),
    [(16, 6, 6), (16, 6, 4), (16, 13, 13), (16, 1, 1), (16, 32, 32), (8, 14, 14)],
)
def test_packing(along: str, lanes: int, width: int, valid: int):
    source = F16 if valid == 13 else F32
    pack, _alive = machine_code(Packing(source, F32, lanes, width, valid, along))
    rng = np.random.default_rng(width)
    for depth in (1, 15, 16, 17, 32, 40):
        # Other parts of the operand are around it: rows are a few elements apart.
        shape = (PANELS * width, depth + 3)
        rows = rng.normal(size=shape).astype(source.numpy_name)
        if along == "width":
            rows = np.asfortranarray(rows)
        elif along == "none":
            rows = np.repeat(rows, 2, 1)[:, ::2]
        strides = [s // rows.itemsize for s in rows.strides]
        packed = np.full(PANELS * PANEL_DEPTH * width, UNTOUCHED, np.float32)
        pack(rows.ctypes.data, *strides, packed.ctypes.data, PANELS, depth, PANEL_DEPTH)
        panels = packed.reshape(PANELS, PANEL_DEPTH, width)
        want = rows[:, :depth].reshape(PANELS, width, depth).transpose(0, 2, 1)
        np.testing.assert_array_equal(panels[:, :depth, :valid], want[:, :, :valid])
        assert (panels[:, depth:] == UNTOUCHED).all(), depth
