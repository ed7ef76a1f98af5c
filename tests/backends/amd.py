"""TTIR compiled for AMD's GPUs by the `triton` wheel, which needs no GPU.

It is the Triton that XLA is built with, at its own release: the same text, passes and
LLVM backend as on a machine with such a chip, without XLA's own choices.
"""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pallasite import config, primitive, sites
from pallasite.backends import base
from pallasite.target import Gpu

SAID = ("spills: ", "refused: ")  # beginnings of lines that are reports


class TooMuchMemory(Exception):
    """A program takes more shared memory than a compute unit has."""


@dataclass(frozen=True)
class Assembled:
    """What a compute unit gives one program, and its code."""

    shared_bytes: int  # LDS
    registers: int  # of a thread
    spilled: int  # registers of a thread that are in main memory
    text: str

    @staticmethod
    def of(shared_bytes: int, text: str) -> "Assembled":
        found = {n: int(v) for n, v in re.findall(r"\.(\w+_count): +(\d+)", text)}
        # Scalar registers spill into a vector register, not into memory.
        return Assembled(
            shared_bytes, found["vgpr_count"], found["vgpr_spill_count"], text
        )


@cache
def folder() -> Path:
    """For texts, and for Triton's cache."""
    return Path(tempfile.mkdtemp(prefix="triton-"))


def assemble(launch: base.Launch, chip: Gpu) -> Assembled:
    """Compile a launch of backend `triton`."""
    import triton
    from triton.backends.compiler import GPUTarget

    triton.knobs.cache.dir = str(folder())
    given: Any = launch.config
    path = folder() / "kernel.ttir"
    path.write_text(given["ir"])
    made = triton.compile(
        str(path),
        target=GPUTarget("hip", chip.arch, chip.wave),
        options={
            "num_warps": int(given["num_warps"]),
            "num_stages": int(given["num_stages"]),
            "enable_fp_fusion": True,  # as XLA does
        },
    )
    return Assembled.of(made.metadata.shared, made.asm["amdgcn"])


def compile_for(chip: Gpu, function: Callable[..., Any], *args: Any) -> None:
    """Compile the kernels of a function that run on backend `triton`."""
    with config.override(target=chip.name, verify=False):
        found = sites.sites_in(function, *args)
        parts = [part for s in found for part in sites.in_parts(s, "rocm", chip)]
        # Several steps of a gradient may call the same kernel.
        for call in {part.call.kernel.text: part.call for part in parts}.values():
            chosen = primitive.choose(call, "rocm", chip=chip)
            for _, error in chosen.refusals:
                print(f"refused: {call.kernel.name}: {' '.join(str(error).split())}")
            if chosen.launch is None:
                continue
            made = assemble(chosen.launch, chip)
            if made.shared_bytes > chip.shared.bytes:
                raise TooMuchMemory(f"{call.kernel.name}: {made.shared_bytes} bytes")
            if made.spilled:
                print(f"spills: {made.spilled} registers of {call.kernel.name}")
