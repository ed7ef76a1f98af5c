"""The table of chips, used by schedules, estimates and errors.

`chip("v5e")` returns a row; `host()` is this computer's CPU; `Machine` turns counted
work into seconds. No other part of the package contains facts about a chip.
"""

from pallasite.target.chip import Chip, Gpu, Memory, SparseCore, Tpu, physical
from pallasite.target.cpu import AVX2, NEON, SSE, Host, host, host_of, using
from pallasite.target.machine import Machine
from pallasite.target.names import Named, known, named
from pallasite.target.table import (
    CHIPS,
    GPU_PLATFORMS,
    GPUS,
    TPUS,
    chip,
    chip_of_device,
    chips,
    usual,
)

__all__ = [
    "AVX2",
    "CHIPS",
    "GPUS",
    "GPU_PLATFORMS",
    "NEON",
    "SSE",
    "TPUS",
    "Chip",
    "Gpu",
    "Host",
    "Machine",
    "Memory",
    "Named",
    "SparseCore",
    "Tpu",
    "chip",
    "chip_of_device",
    "chips",
    "host",
    "host_of",
    "known",
    "named",
    "physical",
    "using",
    "usual",
]
