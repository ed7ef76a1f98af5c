"""`pltpu.get_tpu_info`: upstream's view of the TPU rows of `target/table.py`."""

import enum
from dataclasses import dataclass
from typing import Any

import jax

from pallasite import config, target
from pallasite.errors import SpecError
from pallasite.ir import types as T
from pallasite.language.trace import user_location


class ChipVersion(enum.Enum):
    """A generation of TPU."""

    TPU_V4 = "v4"
    TPU_V5E = "v5e"
    TPU_V5P = "v5p"
    TPU_V6E = "v6e"
    TPU_7X = "7x"

    def __str__(self) -> str:
        return self.value

    @property
    def is_lite(self) -> bool:
        return target.TPUS[self.value].is_lite

    @property
    def num_physical_tensor_cores_per_chip(self) -> int:
        return target.TPUS[self.value].chip_cores

    @property
    def supports_megacore(self) -> bool:
        return target.TPUS[self.value].cores > 1


_FLOATS = frozenset({"f32", "bf16"})
_OLD_F8 = frozenset({"f8e5m2", "f8e4m3b11fnuz"})
_NEW_F8 = frozenset({"f8e5m2", "f8e4m3fn"})
_BYTES, _HALF_BYTES = frozenset({"i8", "u8"}), frozenset({"i4", "u4"})
_SINCE_V5 = (
    (_FLOATS | _OLD_F8, _FLOATS | _OLD_F8),
    (_BYTES, _BYTES),
    (_HALF_BYTES, _HALF_BYTES),
)
# What matrix units multiply, by generation: types of the left and the right operand.
_MULTIPLIED = {
    4: ((_FLOATS, _FLOATS | {"i8"}),),
    5: _SINCE_V5,
    6: _SINCE_V5,
    7: ((_FLOATS, _FLOATS), (_FLOATS | _NEW_F8, _NEW_F8)),
}


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
    num_lanes: int
    num_sublanes: int
    mxu_column_size: int
    num_mxus: int
    num_accumulators: int  # of one matrix unit; 0: it has none of its own
    vmem_capacity_bytes: int
    cmem_capacity_bytes: int
    smem_capacity_bytes: int
    hbm_capacity_bytes: int
    mem_bw_bytes_per_second: int
    bf16_ops_per_second: int
    int8_ops_per_second: int  # 0, as those below: not published, or not in hardware
    fp8_ops_per_second: int
    int4_ops_per_second: int
    sparse_core: SparseCoreInfo | None = None  # None: the chip has none

    @property
    def is_lite(self) -> bool:
        return self._row.is_lite

    @property
    def is_megacore(self) -> bool:
        """Whether several cores are one device."""
        return self.num_cores > 1

    @property
    def is_split_chip(self) -> bool:
        """Whether the cores of a chip are a device each."""
        return (
            self.num_cores == 1
            and self.chip_version.num_physical_tensor_cores_per_chip > 1
        )

    def is_matmul_supported(self, lhs_dtype: Any, rhs_dtype: Any) -> bool:
        """Whether the matrix unit multiplies these types without conversions."""
        pair = [
            getattr(T.dtype_of(dtype), "name", "") for dtype in (lhs_dtype, rhs_dtype)
        ]
        kinds = _MULTIPLIED.get(self.generation, ())
        return any(pair[0] in left and pair[1] in right for left, right in kinds)

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


def get_tpu_info_for_chip(
    chip_version: ChipVersion, num_tensor_cores_per_logical_device: int | None = None
) -> TpuInfo:
    """The properties of a given chip; by default, of all cores that can be one device.

    Args:
        chip_version: the chip.
        num_tensor_cores_per_logical_device: how many cores are one device; 2 only
            where the chip supports it.
    """
    row, cores = target.TPUS[chip_version.value], num_tensor_cores_per_logical_device
    if cores is not None and not 1 <= cores <= row.cores:
        raise SpecError(
            f"a device of {row.name} has at most {row.cores} TensorCores, not {cores}",
            at=user_location(),
            fix=f"pass a number from 1 to {row.cores}, or leave it out",
        )
    return _info(row, cores)


def _info(row: target.Tpu, cores: int | None = None) -> TpuInfo:
    sparse, rates = row.sparse, {**row.rates, **row.narrow_rates}
    eight = max(rates.get(name, 0) for name in ("f8e4m3fn", "f8e5m2"))
    return TpuInfo(
        chip_version=ChipVersion(row.name),
        generation=row.generation,
        num_cores=cores or row.cores,
        num_lanes=row.lanes,
        num_sublanes=row.sublanes,
        mxu_column_size=row.mxu_size,
        num_mxus=row.mxus,
        num_accumulators=row.accumulators,
        vmem_capacity_bytes=row.vmem.bytes,
        cmem_capacity_bytes=row.cmem_bytes,
        smem_capacity_bytes=row.smem.bytes,
        hbm_capacity_bytes=row.main.bytes,
        mem_bw_bytes_per_second=int(row.main.bytes_per_second or 0),
        bf16_ops_per_second=int(rates["bf16"]),
        int8_ops_per_second=int(rates.get("i8", 0)),
        fp8_ops_per_second=int(eight),
        int4_ops_per_second=int(rates.get("i4", 0)),
        sparse_core=sparse
        and SparseCoreInfo(
            sparse.cores,
            sparse.subcores,
            sparse.lanes,
            sparse.vmem_bytes,
            sparse.copy_bytes,
        ),
    )
