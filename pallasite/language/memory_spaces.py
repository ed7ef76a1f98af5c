"""Memory spaces as the author names them, and descriptions of a kernel's memory.

`VMEM((128, 128), jnp.float32)` describes scratch; `MemorySpace.ANY` in a BlockSpec says
that an operand has no window. Each space carries its name in the IR.
"""

import enum
import operator
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax.core
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import SpecError
from pallasite.language.trace import user_location


class MemorySpace(enum.Enum):
    """Where a ref lives. Calling a space describes an allocation in it."""

    ANY = "any"
    HBM = "hbm"
    HOST = "host"
    VMEM = "vmem"
    SMEM = "smem"
    CMEM = "cmem"
    VMEM_SHARED = "vmem_shared"
    GMEM = "gmem"
    TMEM = "tmem"
    REGS = "regs"
    BLOCK = "block"
    SEMAPHORE = "sem"
    DMA_SEMAPHORE = "dma_sem"
    BARRIER_SEMAPHORE = "barrier_sem"

    def __call__(self, shape: Any, dtype: Any = None) -> "MemoryRef":
        sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
        try:
            if dtype is None:
                raise TypeError("no dtype")
            sizes = tuple(
                n if jaxcompat.is_symbolic(n) else operator.index(n) for n in sizes
            )
            return MemoryRef(sizes, np.dtype(dtype), self)
        except TypeError as error:
            raise SpecError(
                f"{self.name} memory needs a shape of ints and a dtype",
                [("shape", repr(shape)), ("dtype", repr(dtype)), ("problem", error)],
                user_location(),
                f"pltpu.{self.name}((128, 128), jnp.float32)",
            ) from None

    def like(self, x: Any) -> "MemoryRef":
        """Memory in this space with the shape and dtype of `x`."""
        return self(x.shape, x.dtype)

    def __str__(self) -> str:
        return self.value

    @property
    def has_windows(self) -> bool:
        """Whether an operand in this space has blocks by default."""
        return self not in (
            MemorySpace.ANY,
            MemorySpace.HBM,
            MemorySpace.HOST,
            MemorySpace.GMEM,
            MemorySpace.SEMAPHORE,
            MemorySpace.DMA_SEMAPHORE,
            MemorySpace.BARRIER_SEMAPHORE,
        )


@dataclass(frozen=True, init=False)
class MemoryRef:
    """Memory that a kernel requests: shape, dtype and space.

    `MemoryRef(shape, dtype, space)`, or `MemoryRef(inner_aval, space)`, of an array
    type.
    """

    shape: tuple[int, ...]
    dtype: Any
    memory_space: MemorySpace

    def __init__(
        self,
        shape: Any = None,
        dtype: Any = None,
        memory_space: Any = None,
        *,
        inner_aval: Any = None,
    ):
        if inner_aval is not None:
            shape, dtype = inner_aval.shape, inner_aval.dtype
        elif memory_space is None:
            shape, dtype, memory_space = shape.shape, shape.dtype, dtype
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "dtype", np.dtype(dtype))
        object.__setattr__(self, "memory_space", memory_space)

    @property
    def inner_aval(self) -> Any:
        return self.get_array_aval()

    def get_array_aval(self) -> Any:
        return jax.core.ShapedArray(self.shape, self.dtype)

    def get_ref_aval(self) -> Any:
        return jaxcompat.abstract_ref(self.shape, self.dtype, self.memory_space)


class SemaphoreType(enum.Enum):
    """Kinds of semaphore: `SemaphoreType.DMA` is one, `SemaphoreType.DMA((2,))` two."""

    REGULAR = "sem"
    DMA = "dma_sem"
    BARRIER = "barrier_sem"

    def __call__(self, shape: tuple[int, ...] | int = ()) -> MemoryRef:
        return MemorySpace(self.value)(shape, np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def dtype(self) -> Any:
        return np.dtype(np.int32)

    @property
    def memory_space(self) -> MemorySpace:
        return MemorySpace(self.value)

    def get_array_aval(self) -> Any:
        return self().get_array_aval()

    def get_ref_aval(self) -> Any:
        return self().get_ref_aval()


def as_memory_ref(spec: Any) -> MemoryRef | None:
    """A scratch entry (or semaphore type, or shape and dtype) as a MemoryRef."""
    if isinstance(spec, MemoryRef):
        return spec
    if isinstance(spec, SemaphoreType):
        return spec()
    if hasattr(spec, "shape") and isinstance(getattr(spec, "dtype", None), np.dtype):
        space = jaxcompat.memory_space_of(spec)
        space = space if isinstance(space, MemorySpace) else MemorySpace.VMEM
        return MemoryRef(tuple(spec.shape), np.dtype(spec.dtype), space)
    return None


# --- memory private to one of several warpgroups ---


def as_axes(given: Any) -> tuple[Hashable, ...]:
    """The names of axes, of which one may be given alone; any hashable is a name."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


# The warpgroup axis of the kernel being traced, if it has several warpgroups.
warpgroup_axis: ContextVar[Hashable | None] = ContextVar("warpgroup_axis", default=None)


@dataclass(frozen=True)
class OwnSpace:
    """A memory space of which each warpgroup of a thread block has its own part."""

    space: Any
    is_own: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "space"), name)


@dataclass(frozen=True)
class SharedSpace:
    """A space of semaphores, and who shares them: programs and warpgroups along these
    axes, or None for all of the call. Only GPUs tell them apart."""

    space: Any
    axes: tuple[Hashable, ...] | None

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "space"), name)


def is_semaphore_space(space: Any) -> bool:
    return getattr(space, "value", None) in ("sem", "dma_sem", "barrier_sem")


def of_whom(memory: MemoryRef, collective_axes: Any) -> MemoryRef:
    """Scoped memory, shared by all warpgroups if they allocate it together."""
    axis, axes = warpgroup_axis.get(), as_axes(collective_axes)
    space = getattr(memory.memory_space, "value", None)
    if is_semaphore_space(memory.memory_space) and axes:
        return MemoryRef(
            memory.shape, memory.dtype, SharedSpace(memory.memory_space, axes)
        )
    if axis is None or axis in axes or space not in ("smem", "mbarrier", "tmem"):
        return memory
    return MemoryRef(memory.shape, memory.dtype, OwnSpace(memory.memory_space))
