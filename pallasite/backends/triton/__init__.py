"""The Triton backend: tile IR to TTIR, compiled and run by XLA on NVIDIA GPUs.

Reading order: `BACKEND` below, `passes/promote.py` (grid to programs and loops, refs to
values), `emit.py` and the op families next to it. XLA embeds Triton's compiler, so
neither the triton package nor any CUDA tool is needed.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from pallasite.backends.base import Launch, Options, Stage
from pallasite.backends.triton import emit
from pallasite.backends.triton.elementwise import NATIVE
from pallasite.backends.triton.schedule import schedule, stages_and_warps
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.text import parse_kernel, print_kernel

TARGET = "__gpu$xla.gpu.triton"


class TritonBackend:
    """See `backends/base.py` for what the members mean."""

    name = "triton"
    platforms = ("cuda",)
    level = "tile"
    native = frozenset(NATIVE) | emit.STRUCTURED

    def stages(self, kernel: Kernel, options: Options) -> dict[str, Stage]:
        return {"scheduled": make_scheduled, "ttir": make_ttir}

    def launch(
        self, kernel: Kernel, outputs: Mapping[str, Any], options: Options
    ) -> Launch:
        scheduled = parse_kernel(outputs["scheduled"])
        stages, warps = stages_and_warps(scheduled, options.compiler_params)
        config = {
            "name": emit.function_name(scheduled),
            "ir": outputs["ttir"],
            "num_stages": np.int32(stages),
            "num_warps": np.int32(warps),
            "grid_x": np.int32(max(1, prod(emit.program_grid(scheduled)))),
            "grid_y": np.int32(1),
            "grid_z": np.int32(1),
            "debug": bool(options.debug),
        }
        scratch = emit.scratch_of(scheduled)
        return Launch(
            TARGET,
            config,
            api_version=4,
            aliases=kernel.aliases,
            has_side_effect=any(op.name == "debug_print" for op in walk(kernel.body)),
            scratch_results=tuple((s.shape, s.numpy_dtype) for s in scratch),
        )

    def version(self) -> str:
        return "triton-1"


def make_scheduled(kernel: Kernel) -> str:
    """The kernel as programs, loops and values, printed with source lines."""
    return print_kernel(schedule(kernel, TritonBackend.native), locs=True)


def make_ttir(scheduled: str) -> str:
    """The TTIR module of a scheduled kernel."""
    return emit.emit(parse_kernel(scheduled))


BACKEND = TritonBackend()
