"""`pltpu.get_tpu_info`: upstream's view of the TPU rows of `target/table.py`."""

import enum
from dataclasses import dataclass

import jax

from pallasite import config, target
from pallasite.errors import SpecError
from pallasite.ir import types as T


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
    dma_granule_size_bytes: int


@dataclass(frozen=True)
class TpuInfo:
    """One core of a chip: its shape, memories, bandwidth and throughput."""

    chip_version: ChipVersion
    generation: int
    num_cores: int
    mxu_column_size: int
    num_mxus: int
    vmem_capacity_bytes: int
    hbm_capacity_bytes: int
    mem_bw_bytes_per_second: int
    bf16_ops_per_second: int
    num_lanes: int
    num_sublanes: int
    smem_capacity_bytes: int
    sparse_core: SparseCoreInfo | None  # None: the chip has none

    @property
    def is_lite(self) -> bool:
        return self._row.is_lite

    def get_sublane_tiling(self, dtype: object) -> int:
        """How many rows a tile of this dtype has."""
        known = T.dtype_of(dtype)
        assert known is not None, dtype
        return self._row.sublanes_of(known.bits)

    @property
    def _row(self) -> target.Tpu:
        return target.TPUS[self.chip_version.value]


def get_tpu_info() -> TpuInfo:
    """The properties of the target TPU.

    The target is the one the knob `target` names, else this machine's. On other
    machines it is a v5e with one core, so that a kernel that chooses its blocks by them
    can run there too.
    """
    return _info(_target() or target.TPUS["v5e"])


def get_sparse_core_info() -> SparseCoreInfo:
    """The properties of the target chip's SparseCores.

    The target is the one the knob `target` names, else this machine's. On other
    machines it is a v6e, so that a kernel that splits its work by them can run there.
    """
    tpu = _target() or target.TPUS["v6e"]
    found = _info(tpu).sparse_core
    if found is None:
        raise SpecError(
            f"{tpu.name} has no SparseCores",
            fix=f"choose a chip that has them: PALLASITE_TARGET={_with_sparse_cores()}",
        )
    return found


def _target() -> target.Tpu | None:
    """The TPU that the knob names, else this machine's; None: neither is one."""
    if name := config.get("target"):
        row = target.named(name).chip
    else:
        row = target.chip_of_device(jax.devices()[0].device_kind)
    return row if isinstance(row, target.Tpu) else None


def _with_sparse_cores() -> str:
    return " or ".join(name for name, row in target.TPUS.items() if row.sparse)


def get_tpu_info_for_chip(chip_version: ChipVersion, *_: int) -> TpuInfo:
    """The properties of a given chip."""
    return _info(target.TPUS[chip_version.value])


def _info(row: target.Tpu) -> TpuInfo:
    sparse = row.sparse
    return TpuInfo(
        chip_version=ChipVersion(row.name),
        generation=row.generation,
        num_cores=row.cores,
        mxu_column_size=row.mxu_size,
        num_mxus=row.mxus,
        vmem_capacity_bytes=row.vmem.bytes,
        hbm_capacity_bytes=row.main.bytes,
        mem_bw_bytes_per_second=int(row.main.bytes_per_second or 0),
        bf16_ops_per_second=int(row.rates["bf16"]),
        num_lanes=row.lanes,
        num_sublanes=row.sublanes,
        smem_capacity_bytes=row.smem.bytes,
        sparse_core=sparse
        and SparseCoreInfo(
            sparse.cores,
            sparse.subcores,
            sparse.lanes,
            sparse.vmem_bytes,
            sparse.copy_bytes,
        ),
    )
