"""Upstream's `pallas.mosaic_gpu`: kernels of warpgroups that the author schedules.

`kernel` says what runs them. Names that are not here yet raise an error when used.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from pallasite import config, missing
from pallasite.calls.gpu_kernel import Mesh as Mesh
from pallasite.calls.gpu_kernel import kernel as kernel
from pallasite.calls.gpu_pipeline import BlockSpec as BlockSpec
from pallasite.calls.gpu_pipeline import PipelinePipeline as PipelinePipeline
from pallasite.calls.gpu_pipeline import emit_pipeline as emit_pipeline
from pallasite.calls.gpu_pipeline import (
    emit_pipeline_warp_specialized as emit_pipeline_warp_specialized,
)
from pallasite.checking import InterpretGPUParams as InterpretGPUParams
from pallasite.language.gpu import CompilerParams as CompilerParams
from pallasite.language.gpu import LoweringSemantics as LoweringSemantics
from pallasite.language.gpu import NDLoopInfo as NDLoopInfo
from pallasite.language.gpu import TraceScope as TraceScope
from pallasite.language.gpu import TryClusterCancelResult as TryClusterCancelResult
from pallasite.language.gpu import WarpMesh as WarpMesh
from pallasite.language.gpu import (
    async_copy_scales_to_tmem as async_copy_scales_to_tmem,
)
from pallasite.language.gpu import async_copy_smem_to_tmem as async_copy_smem_to_tmem
from pallasite.language.gpu import (
    async_copy_sparse_metadata_to_tmem as async_copy_sparse_metadata_to_tmem,
)
from pallasite.language.gpu import async_load_tmem as async_load_tmem
from pallasite.language.gpu import async_prefetch as async_prefetch
from pallasite.language.gpu import async_store_smem as async_store_smem
from pallasite.language.gpu import async_store_tmem as async_store_tmem
from pallasite.language.gpu import barrier_arrive as barrier_arrive
from pallasite.language.gpu import barrier_arrive_and_wait as barrier_arrive_and_wait
from pallasite.language.gpu import barrier_test as barrier_test
from pallasite.language.gpu import barrier_wait as barrier_wait
from pallasite.language.gpu import broadcasted_iota as broadcasted_iota
from pallasite.language.gpu import commit_smem as commit_smem
from pallasite.language.gpu import (
    commit_smem_to_gmem_group as commit_smem_to_gmem_group,
)
from pallasite.language.gpu import commit_tmem as commit_tmem
from pallasite.language.gpu import copy_gmem_to_smem as copy_gmem_to_smem
from pallasite.language.gpu import copy_smem_to_gmem as copy_smem_to_gmem
from pallasite.language.gpu import dynamic_scheduling_loop as dynamic_scheduling_loop
from pallasite.language.gpu import (
    griddepcontrol_launch_dependents as griddepcontrol_launch_dependents,
)
from pallasite.language.gpu import griddepcontrol_wait as griddepcontrol_wait
from pallasite.language.gpu import layout_cast as layout_cast
from pallasite.language.gpu import load as load
from pallasite.language.gpu import mma as mma
from pallasite.language.gpu import named_barrier as named_barrier
from pallasite.language.gpu import nd_loop as nd_loop
from pallasite.language.gpu import planar_snake as planar_snake
from pallasite.language.gpu import query_cluster_cancel as query_cluster_cancel
from pallasite.language.gpu import set_max_registers as set_max_registers
from pallasite.language.gpu import tcgen05_commit_arrive as tcgen05_commit_arrive
from pallasite.language.gpu import tcgen05_mma as tcgen05_mma
from pallasite.language.gpu import transform_ref as transform_ref
from pallasite.language.gpu import transpose_ref as transpose_ref
from pallasite.language.gpu import try_cluster_cancel as try_cluster_cancel
from pallasite.language.gpu import wait_gmem_to_smem as wait_gmem_to_smem
from pallasite.language.gpu import wait_load_tmem as wait_load_tmem
from pallasite.language.gpu import wait_smem_to_gmem as wait_smem_to_gmem
from pallasite.language.gpu import warp_map as warp_map
from pallasite.language.gpu import wgmma as wgmma
from pallasite.language.gpu import wgmma_accumulator_load as wgmma_accumulator_load
from pallasite.language.gpu import wgmma_wait as wgmma_wait
from pallasite.language.gpu_arrays import atomic_add as atomic_add
from pallasite.language.gpu_arrays import atomic_and as atomic_and
from pallasite.language.gpu_arrays import atomic_max as atomic_max
from pallasite.language.gpu_arrays import atomic_min as atomic_min
from pallasite.language.gpu_arrays import atomic_or as atomic_or
from pallasite.language.gpu_arrays import atomic_xor as atomic_xor
from pallasite.language.gpu_arrays import (
    format_tcgen05_sparse_metadata as format_tcgen05_sparse_metadata,
)
from pallasite.language.gpu_arrays import max as max
from pallasite.language.gpu_arrays import min as min
from pallasite.language.gpu_arrays import prod as prod
from pallasite.language.gpu_arrays import store as store
from pallasite.language.gpu_arrays import sum as sum
from pallasite.language.gpu_layouts import Layout as Layout
from pallasite.language.gpu_layouts import RefType as RefType
from pallasite.language.gpu_layouts import Replicated as Replicated
from pallasite.language.gpu_layouts import ShapeDtypeStruct as ShapeDtypeStruct
from pallasite.language.gpu_layouts import Tiling as Tiling
from pallasite.language.gpu_layouts import TMEMLayout as TMEMLayout
from pallasite.language.gpu_layouts import Transform as Transform
from pallasite.language.gpu_layouts import print_layout as print_layout
from pallasite.language.gpu_memory import Accumulator, SharedMemory, TensorMemory
from pallasite.language.gpu_memory import Barrier as Barrier
from pallasite.language.gpu_memory import ClusterBarrier as ClusterBarrier
from pallasite.language.gpu_memory import CopyPartition as CopyPartition
from pallasite.language.gpu_memory import OOBFillMode as OOBFillMode
from pallasite.language.gpu_memory import RefUnion as RefUnion
from pallasite.language.gpu_memory import SwizzleTransform as SwizzleTransform
from pallasite.language.gpu_memory import TilingTransform as TilingTransform
from pallasite.language.gpu_memory import find_swizzle as find_swizzle
from pallasite.language.gpu_semaphores import SemaphoreSignal as SemaphoreSignal
from pallasite.language.gpu_semaphores import (
    semaphore_signal as semaphore_signal,
)
from pallasite.language.gpu_semaphores import (
    semaphore_signal_multicast as semaphore_signal_multicast,
)
from pallasite.language.gpu_semaphores import (
    semaphore_signal_parallel as semaphore_signal_parallel,
)
from pallasite.language.gpu_semaphores import semaphore_wait as semaphore_wait
from pallasite.language.inline_cuda import inline_cuda as inline_cuda
from pallasite.language.memory_spaces import MemorySpace as MemorySpace
from pallasite.language.memory_spaces import SemaphoreType as SemaphoreType
from pallasite.language.peers import PeerMemRef as PeerMemRef
from pallasite.language.peers import cluster_ref as cluster_ref
from pallasite.language.peers import multicast_ref as multicast_ref
from pallasite.language.peers import multimem_load_reduce as multimem_load_reduce
from pallasite.language.peers import multimem_store as multimem_store
from pallasite.language.peers import remote_ref as remote_ref

GMEM = MemorySpace.GMEM
SMEM = SharedMemory()
TMEM = TensorMemory()
REGS = MemorySpace.REGS
GPUMesh, GPUCompilerParams, GPUMemorySpace = Mesh, CompilerParams, MemorySpace
ACC = WGMMAAccumulatorRef = Accumulator()


def force_gpu_interpret_mode(
    params: Any = None,
) -> contextlib.AbstractContextManager[None]:
    """Run every call in a `with` block in checked mode, with these parameters."""
    return config.override(interpret=params or InterpretGPUParams())


def set_gpu_interpret_mode(params: Any = None) -> None:
    """Run every call from now on in checked mode; `params=False` ends that."""
    given = None if params is False else params or InterpretGPUParams()
    config.keep("interpret", given)


def as_torch_kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function with kernels for tensors of PyTorch: `pallasite.torch.wrap(fn)`."""
    from pallasite import torch

    return torch.wrap(fn)


__getattr__ = missing.names(
    "pallasite.mosaic_gpu",
    missing.hints("im2col_ref", "copy a window's rows, one copy_gmem_to_smem each")
    | missing.hints(
        "inline_mgpu",
        "its code is for upstream's compiler, which does not run here: use jnp, lax "
        "and plgpu operations (docs/compat.md has a table), or plgpu.inline_cuda",
    )
    | missing.hints(
        "alloc_semaphore",
        "pl.get_global(plgpu.SemaphoreType.REGULAR), or scratch_shapes=",
    ),
    decorators=("inline_mgpu",),
)
