"""Published numbers of TPUs, which kernels use to choose block sizes.

From Google Cloud's TPU documentation and the chips' public descriptions, per core.
"""

import enum
import re
from dataclasses import dataclass
from typing import Any

import jax

from pallasite.ir import types as T

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


class ChipVersion(enum.Enum):
    """A generation of TPU."""

    TPU_V4 = "v4"
    TPU_V5E = "v5e"
    TPU_V5P = "v5p"
    TPU_V6E = "v6e"
    TPU_7X = "7x"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class SparseCoreInfo:
    """The SparseCores of a chip, and one of their vector subcores."""

    num_cores: int
    num_subcores: int
    num_lanes: int
    vmem_capacity_bytes: int
    dma_granule_size_bytes: int = 32


@dataclass(frozen=True)
class TpuInfo:
    """One core of a chip: its shape, its memories, what it moves and computes."""

    chip_version: ChipVersion
    generation: int
    num_cores: int
    mxu_column_size: int
    num_mxus: int
    vmem_capacity_bytes: int
    hbm_capacity_bytes: int
    mem_bw_bytes_per_second: int
    bf16_ops_per_second: int
    num_lanes: int = 128
    num_sublanes: int = 8
    smem_capacity_bytes: int = _MIB
    sparse_core: SparseCoreInfo | None = None  # None: the chip has none

    @property
    def is_lite(self) -> bool:
        return self.chip_version in (ChipVersion.TPU_V5E, ChipVersion.TPU_V6E)

    def get_sublane_tiling(self, dtype: object) -> int:
        """How many rows of a type one tile has."""
        known = T.dtype_of(dtype)
        assert known is not None, dtype
        # Before 7x arrays of 16 bits keep eight rows, two of them in each word.
        if known.bits == 16 and self.generation < 7:
            return self.num_sublanes
        return self.num_sublanes * (32 // known.bits)


def _chip(version: ChipVersion, generation: int, cores: int, **per_core: Any):
    return version, TpuInfo(version, generation, cores, **per_core)


_CHIPS = dict(
    [
        _chip(
            ChipVersion.TPU_V4, 4, 2, mxu_column_size=128, num_mxus=4,
            vmem_capacity_bytes=16 * _MIB, hbm_capacity_bytes=16 * _GIB,
            mem_bw_bytes_per_second=int(614e9), bf16_ops_per_second=int(137.5e12),
        ),
        _chip(
            ChipVersion.TPU_V5E, 5, 1, mxu_column_size=128, num_mxus=4,
            vmem_capacity_bytes=128 * _MIB, hbm_capacity_bytes=16 * _GIB,
            mem_bw_bytes_per_second=int(819e9), bf16_ops_per_second=int(197e12),
        ),
        _chip(
            ChipVersion.TPU_V5P, 5, 2, mxu_column_size=128, num_mxus=4,
            vmem_capacity_bytes=64 * _MIB, hbm_capacity_bytes=int(47.5 * _GIB),
            mem_bw_bytes_per_second=int(1382e9), bf16_ops_per_second=int(229.5e12),
            sparse_core=SparseCoreInfo(4, 16, 8, 512 * _KIB),
        ),
        _chip(
            ChipVersion.TPU_V6E, 6, 1, mxu_column_size=256, num_mxus=2,
            vmem_capacity_bytes=128 * _MIB, hbm_capacity_bytes=32 * _GIB,
            mem_bw_bytes_per_second=int(1640e9), bf16_ops_per_second=int(918e12),
            sparse_core=SparseCoreInfo(2, 16, 8, 256 * _KIB),
        ),
        _chip(
            ChipVersion.TPU_7X, 7, 1, mxu_column_size=256, num_mxus=2,
            vmem_capacity_bytes=64 * _MIB, hbm_capacity_bytes=96 * _GIB,
            mem_bw_bytes_per_second=int(3690e9), bf16_ops_per_second=int(1153e12),
            sparse_core=SparseCoreInfo(2, 16, 16, 512 * _KIB),
        ),
    ]
)  # fmt: skip
# What JAX calls the devices.
_KINDS = {
    "TPU v4": ChipVersion.TPU_V4,
    "TPU v5 lite": ChipVersion.TPU_V5E,
    "TPU v5e": ChipVersion.TPU_V5E,
    "TPU v5": ChipVersion.TPU_V5P,
    "TPU v5p": ChipVersion.TPU_V5P,
    "TPU v6 lite": ChipVersion.TPU_V6E,
    "TPU v6e": ChipVersion.TPU_V6E,
    "TPU7x": ChipVersion.TPU_7X,
}
_ELSEWHERE = ChipVersion.TPU_V5E


def get_tpu_info() -> TpuInfo:
    """Numbers of this machine's TPU.

    On other machines those of a v5e with one core, so that a kernel that chooses its
    blocks by them can run there too.
    """
    kind = re.sub(r"\s+", " ", jax.devices()[0].device_kind)
    return _CHIPS[_KINDS.get(kind, _ELSEWHERE)]


def get_tpu_info_for_chip(chip_version: ChipVersion, *_: int) -> TpuInfo:
    """Numbers of a named chip."""
    return _CHIPS[chip_version]
