"""The one table of chips: what each has, where schedules, estimates and errors look.

`chip("v5e")` gives a row; `host()` is this computer's CPU. Nothing else in the package
keeps facts about a chip.
"""

from pallasite.target.chip import Chip, Gpu, Memory, SparseCore, Tpu
from pallasite.target.cpu import AVX2, NEON, SSE, Host, host, host_of, using
from pallasite.target.names import Named, known, named
from pallasite.target.table import CHIPS, GPUS, TPUS, chip, chip_of_device

__all__ = [
    "AVX2",
    "CHIPS",
    "GPUS",
    "NEON",
    "SSE",
    "TPUS",
    "Chip",
    "Gpu",
    "Host",
    "Memory",
    "Named",
    "SparseCore",
    "Tpu",
    "chip",
    "chip_of_device",
    "host",
    "host_of",
    "known",
    "named",
    "using",
]
