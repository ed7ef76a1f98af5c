"""The rows of the table: TPUs and GPUs.

From the makers' public descriptions (Google Cloud's TPU documentation; NVIDIA's
architecture whitepapers and data sheets; AMD's data sheets, and its guides to the
instruction sets); rates are dense, without sparsity.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from pallasite import plugins
from pallasite.errors import SpecError
from pallasite.target.chip import GIB, KIB, MIB, Chip, Gpu, Memory, SparseCore, Tpu

T = 1e12


def _tpu(
    name: str, main: tuple[float, float], vmem: int, rates: Mapping[str, float], **more
) -> Tpu:
    memories = {
        "main": Memory(int(main[0] * GIB), main[1] * 1e9),
        "vmem": Memory(vmem * MIB),
        "smem": Memory(MIB),
    }
    return Tpu(name=name, memories=memories, rates=rates, **more)


def _gpu(
    name: str,
    main: tuple[float, float],
    cache: int,
    shared: int,
    rates: Mapping[str, float],
    **more,
) -> Gpu:
    memories = {
        "main": Memory(int(main[0] * GIB), main[1] * 1e9),
        "l2": Memory(cache * MIB),
        "shared": Memory(shared * KIB),
    }
    return Gpu(name=name, memories=memories, rates=rates, **more)


TPUS: dict[str, Tpu] = {
    row.name: row
    for row in (
        _tpu(
            "v4", (16, 614), 16, {"bf16": 137.5 * T},
            device_kinds=("TPU v4",), cores=2, chip_cores=2, generation=4, mxus=4,
            mxu_size=128, clock=1.05e9, topology="v4:2x2x1", chip_config="megacore",
            cmem_bytes=64 * MIB,
        ),
        _tpu(
            "v5e", (16, 819), 128, {"bf16": 197 * T, "i8": 394 * T},
            device_kinds=("TPU v5 lite", "TPU v5e"), cores=1, generation=5, mxus=4,
            mxu_size=128, clock=1.5e9, topology="v5e:2x2", is_lite=True,
            narrow_rates={"i4": 788 * T},
        ),
        _tpu(
            "v5p", (47.5, 1382), 64, {"bf16": 229.5 * T, "i8": 459 * T},
            device_kinds=("TPU v5", "TPU v5p"), cores=2, chip_cores=2, generation=5,
            mxus=4, mxu_size=128, clock=1.75e9, topology="v5p:2x2x1",
            narrow_rates={"i4": 918 * T}, sparse=SparseCore(4, 16, 8, 512 * KIB),
        ),
        _tpu(
            "v6e", (32, 1640), 128, {"bf16": 918 * T, "i8": 1836 * T},
            device_kinds=("TPU v6 lite", "TPU v6e"), cores=1, generation=6, mxus=2,
            mxu_size=256, clock=1.75e9, topology="v6e:2x2", is_lite=True,
            narrow_rates={"f8e5m2": 918 * T, "i4": 3672 * T},
            sparse=SparseCore(2, 16, 8, 256 * KIB), scoped_vmem=32 * MIB,
        ),
        _tpu(
            "7x", (96, 3690), 64, {"bf16": 1153 * T, "f8e4m3fn": 2307 * T},
            device_kinds=("TPU7x", "TPU 7x"), cores=1, generation=7, mxus=2,
            mxu_size=256, clock=2.2e9, topology="TPU7x:2x2x1", chip_cores=2,
            accumulators=128,
            sparse=SparseCore(2, 16, 16, 512 * KIB), scoped_vmem=32 * MIB,
        ),
    )
}  # fmt: skip

# A compute unit has 64 KiB of shared memory (LDS) or more, all of which one block may
# take. Only gfx950 loads into it without registers between. TF32 is gfx942's alone: the
# others multiply f32, which their "f32" below is. With results of matmuls in
# more registers than this, LLVM spills operands.
CDNA = dict[str, Any](
    wave=64, stages=2, registers=131072, registers_per_thread=512, share_of_results=0.25
)
RDNA4 = dict[str, Any](
    arch="gfx1201", matrix=(16, 16, 16), stages=2, stages_in_registers=1, cores=64,
    registers=98304, registers_per_thread=256, threads_per_core=1024,
    share_of_results=0.25,
)  # fmt: skip

GPUS: dict[str, Gpu] = {
    row.name: row
    for row in (
        _gpu(
            "a100", (80, 2039), 40, 163,
            {"f64": 19.5 * T, "f32": 156 * T, "bf16": 312 * T, "f16": 312 * T,
             "i8": 624 * T},
            device_kinds=("NVIDIA A100",), cores=108, arch="sm_80",
        ),
        _gpu(
            "h100", (80, 3350), 50, 227,
            {"f64": 67 * T, "f32": 494 * T, "bf16": 989 * T, "f16": 989 * T,
             "f8e4m3fn": 1979 * T, "i8": 1979 * T},
            device_kinds=("NVIDIA H100",), cores=132, arch="sm_90",
            matrix=(64, 256, 16),
        ),
        _gpu(
            "h200", (141, 4800), 50, 227,
            {"f64": 67 * T, "f32": 494 * T, "bf16": 989 * T, "f16": 989 * T,
             "f8e4m3fn": 1979 * T, "i8": 1979 * T},
            device_kinds=("NVIDIA H200",), cores=132, arch="sm_90",
            matrix=(64, 256, 16), ran=True,
        ),
        _gpu(
            "b200", (180, 8000), 126, 227,
            {"f64": 37 * T, "f32": 1125 * T, "bf16": 2250 * T, "f16": 2250 * T,
             "f8e4m3fn": 4500 * T, "f4e2m1fn": 9000 * T, "i8": 4500 * T},
            device_kinds=("NVIDIA B200",), cores=148, arch="sm_100",
            matrix=(256, 256, 16),
        ),
        # Twice the exponentials of its predecessor, and no matmuls of integers.
        _gpu(
            "b300", (288, 8000), 126, 227,
            {"f64": 1.2 * T, "f32": 1125 * T, "bf16": 2250 * T, "f16": 2250 * T,
             "f8e4m3fn": 4500 * T, "f4e2m1fn": 13500 * T},
            device_kinds=("NVIDIA B300", "NVIDIA GB300"), cores=148, arch="sm_103",
            matrix=(256, 256, 16), special_lanes=32,
        ),
        _gpu(
            "mi300x", (192, 5300), 32, 64,
            {"f64": 163.4 * T, "f32": 653.7 * T, "bf16": 1307.4 * T, "f16": 1307.4 * T,
             "f8e4m3fnuz": 2614.9 * T, "f8e5m2fnuz": 2614.9 * T, "i8": 2614.9 * T},
            device_kinds=("AMD Instinct MI300X",), cores=304, arch="gfx942",
            matrix=(32, 32, 8), stages_in_registers=1, clock=2.1e9, **CDNA,
        ),
        _gpu(
            "mi325x", (256, 6000), 32, 64,
            {"f64": 163.4 * T, "f32": 653.7 * T, "bf16": 1307.4 * T, "f16": 1307.4 * T,
             "f8e4m3fnuz": 2614.9 * T, "f8e5m2fnuz": 2614.9 * T, "i8": 2614.9 * T},
            device_kinds=("AMD Instinct MI325X",), cores=304, arch="gfx942",
            matrix=(32, 32, 8), stages_in_registers=1, clock=2.1e9, **CDNA,
        ),
        _gpu(
            "mi355x", (288, 8000), 32, 160,
            {"f64": 78.6 * T, "f32": 157.3 * T, "bf16": 2516.6 * T, "f16": 2516.6 * T,
             "f8e4m3fn": 5033.2 * T, "f8e5m2": 5033.2 * T, "f4e2m1fn": 10066.3 * T,
             "i8": 5033.2 * T},
            device_kinds=("AMD Instinct MI355X",), cores=256, arch="gfx950",
            matrix=(32, 32, 16), clock=2.4e9, special_lanes=32, **CDNA,
        ),
        _gpu(
            "r9700", (32, 640), 8, 64,
            {"f32": 47.8 * T, "bf16": 191 * T, "f16": 191 * T, "f8e4m3fn": 383 * T,
             "f8e5m2": 383 * T, "i8": 383 * T},
            device_kinds=("AMD Radeon AI PRO R9700",), clock=2.92e9, **RDNA4,
        ),
        _gpu(
            "rx9070xt", (16, 640), 8, 64,
            {"f32": 48.7 * T, "bf16": 195 * T, "f16": 195 * T, "f8e4m3fn": 389 * T,
             "f8e5m2": 389 * T, "i8": 389 * T},
            device_kinds=("AMD Radeon RX 9070 XT",), clock=2.97e9, **RDNA4,
        ),
    )
}  # fmt: skip

CHIPS: dict[str, Chip] = {**TPUS, **GPUS}
GPU_PLATFORMS = ("cuda", "rocm")
_USUAL = {"tpu": "v5e", "cuda": "h100", "rocm": "mi300x"}


def usual(platform: str) -> Chip:
    """What code for a platform is made for, if nobody says for which chip."""
    return CHIPS[_USUAL.get(platform, "h100")]


@cache
def chips() -> Mapping[str, Chip]:
    """The table, then the rows that other packages add."""
    added = plugins.declared(plugins.CHIPS, tuple(CHIPS))
    return {**CHIPS, **{n: _row(n, entry) for n, entry in added.items()}}


def _row(name: str, entry: EntryPoint) -> Chip:
    return replace(plugins.loaded(entry, Chip), name=name)


def chip(name: str) -> Chip:
    """The row of that name.

    Raises:
        SpecError: there is none.
    """
    if name not in chips():
        raise SpecError(f"unknown chip {name!r}", fix=f"one of {', '.join(chips())}")
    return chips()[name]


def chip_of_device(kind: str) -> Chip | None:
    """The row for JAX's `device.device_kind`, by the longest matching name."""
    kind = re.sub(r"\s+", " ", kind)
    named = [(name, row) for row in chips().values() for name in row.device_kinds]
    fits = [pair for pair in named if re.match(rf"{re.escape(pair[0])}\b", kind)]
    return max(fits, key=lambda pair: len(pair[0]))[1] if fits else None
