"""Translates libtpu's errors about a kernel: what is wrong, where, and what to do."""

import re
from typing import NamedTuple

from pallasite.errors import CompileError
from pallasite.ir.nodes import Kernel, Loc

TAIL = 400  # characters of the compiler's own text


class _Words(NamedTuple):
    pattern: str  # in the compiler's text
    what: str
    fix: str


WORDS = (
    _Words(
        r"ScopedVmemOom|Ran out of memory in memory space vmem|exceeded scoped vmem",
        "the kernel needs more vector memory (VMEM) than its limit",
        "use smaller blocks, or raise vmem_limit_bytes in CompilerParams",
    ),
    _Words(
        r"memory space smem|Smem",
        "the kernel needs more scalar memory (SMEM) than the chip has",
        "keep large tables in pl.ANY and copy the part in use",
    ),
    _Words(
        r"MisalignedBlockAndTiling|not divisible by tiling",
        "a block is not made of whole tiles",
        "make the last two dimensions of a block multiples of (8, 128), or the array's",
    ),
    _Words(
        r"UnprovenMemoryAccessAlignment|cannot statically prove",
        "a dynamic index is not known to be aligned to a tile",
        "use pl.multiple_of(index, 8) for rows, 128 for lanes",
    ),
    _Words(
        r"Offsets along tiled dimensions must be aligned",
        "a copy does not start at a tile boundary",
        "start slices of copies at multiples of the tile, or use "
        "pl.multiple_of(index, 8)",
    ),
    _Words(
        r"divisible by 512 bytes|Slice sizes along tiled dimensions",
        "a copy is not made of whole tiles",
        "copy whole rows of 128 lanes",
    ),
    _Words(
        r"shape cast|tpu\.reshape|vector\.shape_cast",
        "a reshape mixes rows and lanes in a way that the chip has no instruction for",
        "keep the last dimension, or reshape before the call",
    ),
    _Words(
        r"Iteration bounds are too large",
        "the grid has more steps than a TPU supports",
        "use larger blocks, or several calls",
    ),
    _Words(
        r"did not end within",
        "libtpu takes too long to compile the kernel",
        "use smaller blocks, which make less code, or raise --timeout",
    ),
    _Words(
        r"semaphore|sem_barrier|collective_id",
        "libtpu rejects how the kernel uses semaphores",
        "a barrier between devices needs collective_id in CompilerParams",
    ),
    _Words(
        r"bitwidth|Unsupported element|element type|Invalid vector type",
        "an operation does not support its element type",
        "compute in float32 or int32, and cast after loads and before stores",
    ),
    _Words(
        r"libtpu aborted",
        "libtpu crashes on the code generated for the kernel",
        "this is a bug in Pallasite or libtpu; please report the kernel",
    ),
)
_OTHERWISE = _Words(
    "",
    "libtpu rejects the code generated for the kernel",
    "this is a bug in Pallasite; please report the kernel with the --dump directory",
)


def in_words(text: str, kernel: Kernel) -> CompileError:
    """An error that explains the compiler's text and keeps its first lines."""
    words = next((w for w in WORDS if re.search(w.pattern, text)), _OTHERWISE)
    return CompileError(
        words.what,
        [("kernel", kernel.name), ("libtpu", _own_text(text))],
        _place(text) or kernel.loc,
        words.fix,
    )


def _place(text: str) -> Loc | None:
    """The author's line, if libtpu's text contains it."""
    found = re.search(r'loc\((?:[^()]*\()*"([^"<>]+\.py)":(\d+)', text)
    return Loc(found[1], int(found[2])) if found else None


def _own_text(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if "report a bug" not in line.lower()]
    return "\n".join(kept)[:TAIL] or "nothing"
