"""The names of upstream's `pallas.mosaic_gpu`, as they arrive."""

import enum
from typing import Any

from pallasite import missing
from pallasite.language.memory_spaces import MemorySpace as MemorySpace
from pallasite.language.refs import atomic_add as atomic_add
from pallasite.language.refs import atomic_and as atomic_and
from pallasite.language.refs import atomic_max as atomic_max
from pallasite.language.refs import atomic_min as atomic_min
from pallasite.language.refs import atomic_or as atomic_or
from pallasite.language.refs import atomic_xor as atomic_xor
from pallasite.language.refs import load as load
from pallasite.language.refs import store as store

GMEM = MemorySpace.GMEM
SMEM = MemorySpace.SMEM
TMEM = MemorySpace.TMEM
REGS = MemorySpace.REGS


class Layout(enum.Enum):
    """Layouts of a tile across threads, for modules that name one when imported.

    What takes a layout is not available here.
    """

    WGMMA = "wgmma"
    WGMMA_8BIT = "wgmma_8bit"
    WGMMA_TRANSPOSED = "wgmma_transposed"
    WGMMA_UPCAST_2X = "wgmma_upcast_2x"
    WGMMA_UPCAST_4X = "wgmma_upcast_4x"
    WG_SPLAT = "wg_splat"
    WG_STRIDED = "wg_strided"
    TCGEN05 = "tcgen05"
    TCGEN05_TRANSPOSED = "tcgen05_transposed"
    TCGEN05_M64_COLLECTIVE = "tcgen05_m64_collective"
    TCGEN05_M64_COLLECTIVE_NATIVE = "tcgen05_m64_collective_native"
    TCGEN05_TMEM_NATIVE = "tcgen05_tmem_native"
    SMEM_GMEM_COPY = "smem_gmem_copy"
    TMA_INDICES = "tma_indices"
    TMA_INDICES_4 = "tma_indices_4"
    TILED = "tiled"

    def reduce(self, axes: int | tuple[int, ...]) -> tuple["Layout", Any]:
        """The layout of a tile after a reduction."""
        return self, axes


__getattr__ = missing.names(
    "pallasite.mosaic_gpu",
    missing.hints(
        "ACC Barrier BlockSpec ClusterBarrier CompilerParams CopyPartition "
        "InterpretGPUParams LoweringSemantics Mesh NDLoopInfo OOBFillMode "
        "PeerMemRef PipelinePipeline RefType RefUnion Replicated SemaphoreSignal "
        "SemaphoreType ShapeDtypeStruct SwizzleTransform TMEMLayout Tiling "
        "TilingTransform TraceScope Transform TryClusterCancelResult "
        "WGMMAAccumulatorRef WarpMesh alloc_semaphore as_torch_kernel "
        "async_copy_scales_to_tmem async_copy_smem_to_tmem "
        "async_copy_sparse_metadata_to_tmem async_load_tmem async_prefetch "
        "async_store_smem async_store_tmem barrier_arrive barrier_arrive_and_wait "
        "barrier_test barrier_wait broadcasted_iota cluster_ref commit_smem "
        "commit_smem_to_gmem_group commit_tmem copy_gmem_to_smem copy_smem_to_gmem "
        "dynamic_scheduling_loop emit_pipeline emit_pipeline_warp_specialized "
        "find_swizzle force_gpu_interpret_mode format_tcgen05_sparse_metadata "
        "griddepcontrol_launch_dependents griddepcontrol_wait im2col_ref inline_mgpu "
        "kernel layout_cast max min mma multicast_ref multimem_load_reduce "
        "multimem_store nd_loop planar_snake print_layout prod query_cluster_cancel "
        "remote_ref semaphore_signal semaphore_signal_multicast "
        "semaphore_signal_parallel semaphore_wait set_gpu_interpret_mode "
        "set_max_registers sum tcgen05_commit_arrive tcgen05_mma try_cluster_cancel "
        "wait_gmem_to_smem wait_load_tmem wait_smem_to_gmem warp_map wgmma "
        "wgmma_accumulator_load wgmma_wait GPUCompilerParams GPUMesh "
        "GPUMemorySpace",
        "write the kernel with pl.pallas_call and BlockSpecs, which run everywhere",
    ),
    decorators=("inline_mgpu",),
)
