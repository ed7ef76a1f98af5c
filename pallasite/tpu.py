"""The names of upstream's `pltpu`: `from pallasite import tpu as pltpu`."""

import contextlib
import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import config, missing
from pallasite.calls.buffered_ref import BufferedRef as BufferedRef
from pallasite.calls.buffered_ref import BufferedRefBase as BufferedRefBase
from pallasite.calls.buffered_ref import BufferType as BufferType
from pallasite.calls.emit_pipeline import PipelineStep as PipelineStep
from pallasite.calls.emit_pipeline import emit_pipeline as emit_pipeline
from pallasite.calls.emit_pipeline import (
    emit_pipeline_with_allocations as emit_pipeline_with_allocations,
)
from pallasite.calls.emit_pipeline import (
    emit_pipeline_with_async_prefetch as emit_pipeline_with_async_prefetch,
)
from pallasite.calls.mesh import TensorCoreMesh as TensorCoreMesh
from pallasite.calls.mesh import create_tensorcore_mesh as create_tensorcore_mesh
from pallasite.checking import InterpretParams as InterpretParams
from pallasite.errors import SpecError, UnsupportedError
from pallasite.importer.seeded_random import prng_random_bits as prng_random_bits
from pallasite.importer.seeded_random import prng_seed as prng_seed
from pallasite.importer.seeded_random import stateful_bernoulli as stateful_bernoulli
from pallasite.importer.seeded_random import stateful_bits as stateful_bits
from pallasite.importer.seeded_random import stateful_normal as stateful_normal
from pallasite.importer.seeded_random import stateful_uniform as stateful_uniform
from pallasite.language import specs
from pallasite.language.device_ids import DeviceIdType as DeviceIdType
from pallasite.language.einshape import einshape as einshape
from pallasite.language.helpers import reciprocal as reciprocal
from pallasite.language.matrix_units import AccumulatorSpace
from pallasite.language.matrix_units import conv as conv
from pallasite.language.matrix_units import matmul_acc_lhs as matmul_acc_lhs
from pallasite.language.matrix_units import matmul_pop as matmul_pop
from pallasite.language.matrix_units import matmul_push_rhs as matmul_push_rhs
from pallasite.language.memory_spaces import MemorySpace as MemorySpace
from pallasite.language.memory_spaces import SemaphoreType as SemaphoreType
from pallasite.language.packing import pack_elementwise as pack_elementwise
from pallasite.language.packing import stochastic_round as stochastic_round
from pallasite.language.packing import unpack_elementwise as unpack_elementwise
from pallasite.language.random_keys import sample_block as sample_block
from pallasite.language.random_keys import to_pallas_key as to_pallas_key
from pallasite.language.refs import async_copy as async_copy
from pallasite.language.refs import delay as delay
from pallasite.language.refs import load as load
from pallasite.language.refs import make_async_copy as make_async_copy
from pallasite.language.refs import semaphore_read as semaphore_read
from pallasite.language.refs import semaphore_signal as semaphore_signal
from pallasite.language.refs import semaphore_wait as semaphore_wait
from pallasite.language.refs import store as store
from pallasite.language.refs import sync_copy as sync_copy
from pallasite.language.remote import async_remote_copy as async_remote_copy
from pallasite.language.remote import core_barrier as core_barrier
from pallasite.language.remote import get_barrier_semaphore as get_barrier_semaphore
from pallasite.language.remote import make_async_remote_copy as make_async_remote_copy
from pallasite.language.sparse_core import bitcast as bitcast_columns
from pallasite.language.specs import PrefetchScalarGridSpec as PrefetchScalarGridSpec
from pallasite.language.sub_byte import join_bits as join_bits
from pallasite.language.sub_byte import pack_fp6 as pack_fp6
from pallasite.language.sub_byte import split_bits as split_bits
from pallasite.language.sub_byte import unpack_fp6 as unpack_fp6
from pallasite.language.tpu_info import ChipVersion as ChipVersion
from pallasite.language.tpu_info import SparseCoreInfo as SparseCoreInfo
from pallasite.language.tpu_info import TpuInfo as TpuInfo
from pallasite.language.tpu_info import get_tpu_info as get_tpu_info
from pallasite.language.tpu_info import get_tpu_info_for_chip as get_tpu_info_for_chip

ANY = MemorySpace.ANY
HBM = MemorySpace.HBM
VMEM = MemorySpace.VMEM
SMEM = MemorySpace.SMEM
CMEM = MemorySpace.CMEM
VMEM_SHARED = MemorySpace.VMEM_SHARED
HOST = MemorySpace.HOST
ACC = AccumulatorSpace
SEMAPHORE = MemorySpace.SEMAPHORE
semaphore = MemorySpace.SEMAPHORE
TPUMemorySpace = MemorySpace
LoweringException = UnsupportedError  # for what a backend cannot run


class CoreType(enum.Enum):
    """A kind of core on a TPU; kernels here run on TensorCores (`TC`)."""

    TC = "tc"
    SC_SCALAR_SUBCORE = "sc_scalar_subcore"
    SC_VECTOR_SUBCORE = "sc_vector_subcore"

    def __str__(self) -> str:
        return self.value


class SideEffectType(enum.Enum):
    """What XLA must not do with a call: `CompilerParams(has_side_effects=...)`."""

    PURE = "pure"
    DATAFLOW_SIDE_EFFECTING = "dataflow_side_effecting"  # merge it with an equal one
    SIDE_EFFECTING = "side_effecting"  # nor drop it

    def __bool__(self) -> bool:
        return self is not SideEffectType.PURE


class Tiling(enum.Enum):
    """How a TPU lays out memory in tiles; results do not depend on it."""

    COMPACT = "compact"
    SPARSE_CORE = "sparse_core"

    @property
    def shape(self) -> tuple[int, ...]:
        return (8, 128) if self is Tiling.COMPACT else (8,)


class GridDimensionSemantics(enum.Enum):
    """What the author knows about a grid axis."""

    PARALLEL = "parallel"  # programs along it may run concurrently
    CORE_PARALLEL = "core_parallel"
    SUBCORE_PARALLEL = "subcore_parallel"
    ARBITRARY = "arbitrary"  # Pallasite determines it by itself


PARALLEL = GridDimensionSemantics.PARALLEL
CORE_PARALLEL = GridDimensionSemantics.CORE_PARALLEL
SUBCORE_PARALLEL = GridDimensionSemantics.SUBCORE_PARALLEL
ARBITRARY = GridDimensionSemantics.ARBITRARY


@dataclass(frozen=True)
class CompilerParams(specs.CompilerParams):
    """Settings for the TPU backend; other backends use what applies to them.

    Args:
        dimension_semantics: one per grid axis: "parallel" or "arbitrary".
        vmem_limit_bytes: on-chip memory the kernel may use.
        batch_invariant: whether a row's bits may not depend on how many there are
            (docs/semantics.md).
        The other fields are accepted for compatibility.
    """

    dimension_semantics: Any = None
    vmem_limit_bytes: int | None = None
    has_side_effects: Any = None
    allow_input_fusion: Any = None
    collective_id: int | None = None
    flags: Any = None
    internal_scratch_in_bytes: int | None = None
    serialization_format: int | None = None
    disable_bounds_checks: bool | None = None
    disable_semaphore_checks: bool | None = None
    skip_device_barrier: bool | None = None
    needs_layout_passes: bool | None = None
    use_tc_tiling_on_sc: bool | None = None
    kernel_type: Any = None
    shape_invariant_numerics: bool | None = None
    fuse_transposed_lhs_in_matmul: bool | None = None
    allow_collective_id_without_custom_barrier: bool | None = None
    opt_level: int | None = None
    batch_invariant: bool | None = None


TPUCompilerParams = CompilerParams


TPUInterpretParams = InterpretParams


def repeat(x: Any, repeats: int, axis: int) -> jax.Array:
    """`x` repeated along an axis, copy after copy (like `jnp.tile`)."""
    return jnp.concatenate([x] * repeats, axis=axis)


def roll(
    x: Any, shift: Any, axis: int, *, stride: Any = None, stride_axis: Any = None
) -> jax.Array:
    """Rotate along an axis; with `stride`, index n of `stride_axis` n*stride more."""
    if stride is None:
        return jnp.roll(x, shift, axis)
    rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, stride_axis)
    columns = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    source = (columns - shift - rows * stride) % x.shape[axis]
    return jnp.take_along_axis(x, source, axis=axis)


def bitcast(x: Any, ty: Any, dim: int = -2) -> jax.Array:
    """The same bits as another type; a width change resizes a dimension, the last or,
    by default, the one before it."""
    rank = len(x.shape)
    if not rank - 2 <= dim % max(rank, 1) < rank or dim < -rank:
        raise SpecError(
            f"bitcast cannot resize dimension {dim}",
            [("got", jax.typeof(x).str_short())],
            fix="dim=-2, or -1 for arrays of one dimension",
        )
    from pallasite.emulation.emulate import bitcast_rows
    from pallasite.ir import types as T

    before, after = T.dtype_of(x.dtype), T.dtype_of(ty)
    assert before is not None and after is not None
    shape = list(x.shape)
    if x.shape[dim] * before.bits % after.bits:
        raise SpecError(
            f"{x.shape[dim]} elements of {x.dtype} are no whole number of {ty}",
            [("got", jax.typeof(x).str_short()), ("dim", dim)],
            fix="pad that dimension, or choose the other one",
        )
    if dim % rank == rank - 1:
        return bitcast_columns(x, ty)
    if before.bits != after.bits:
        shape[-2] = shape[-2] * before.bits // after.bits
    source = T.TileType(tuple(x.shape), before)
    return bitcast_rows(x, source, T.TileType(tuple(shape), after))


def annotate(ref: Any, **assumptions: bool) -> Any:
    """A promise about how a ref is accessed; results do not depend on it."""
    del assumptions
    return ref


def touch(ref: Any) -> None:
    """Marks a ref as used; results do not depend on it."""
    del ref


def trace_value(label: str, value: Any) -> None:
    """A mark in a TPU's profile; results do not depend on it."""
    del label, value


def is_tpu_device() -> bool:
    """Whether calls run on a TPU by default."""
    return jax.default_backend() == "tpu"


def force_tpu_interpret_mode(params: Any = None) -> contextlib.AbstractContextManager:
    """Emulate every call in a `with` block, as `interpret=True` does for one, or run it
    with the given `InterpretParams`."""
    return config.override(interpret=params or "1")


def set_tpu_interpret_mode(params: Any = None) -> None:
    """Emulate every call from now on, as `interpret=True` does for one, or run it with
    the given `InterpretParams`. `params=False` ends that."""
    config.keep("interpret", None if params is False else params or "1")


def reset_tpu_interpret_mode_state() -> None:
    """Does nothing: the emulation keeps no state between calls."""


def has_memory_space(ref: Any, memory_space: Any) -> jax.Array:
    """Whether a ref in `pl.ANY` is in a memory space; here it is in main memory."""
    del ref
    return jnp.asarray(memory_space is HBM)


def with_memory_space_constraint(x: Any, memory_space: Any) -> Any:
    """A hint about where an operand should live; results do not depend on it."""
    del memory_space
    return x


def run_on_first_core(core_axis_name: str) -> Any:
    """Run the decorated function on core 0 of a mesh axis."""
    from pallasite.language.helpers import when

    return when(jax.lax.axis_index(core_axis_name) == 0)


__getattr__ = missing.names(
    "pallasite.tpu",
    {
        **missing.hints(
            "matmul_lhs_fifo matmul_pop_fifo",
            "use matmul_acc_lhs and matmul_pop, which name the accumulator",
        ),
        "core": "that is upstream's own code; all names of pltpu are in pallasite.tpu",
        "dma_semaphore": "pltpu.SemaphoreType.DMA is the type of such a semaphore",
    },
)
