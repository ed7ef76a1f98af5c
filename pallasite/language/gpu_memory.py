"""What authors of `plgpu` kernels allocate: shared memory and its layouts, tensor
memory, barriers and accumulators."""

import enum
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.errors import SpecError, UnsupportedError
from pallasite.ir import types as T
from pallasite.language.gpu_layouts import Transform
from pallasite.language.memory_spaces import MemoryRef, MemorySpace, as_axes
from pallasite.language.trace import user_location


@dataclass(frozen=True)
class BarrierSpace:
    """The space of barriers; it includes the arrivals that complete a phase.

    For a cluster's barriers, `arrivals` counts those of each thread block along
    `collective_axes`.
    """

    arrivals: int
    collective_axes: tuple[Hashable, ...] = ()
    is_first_only: bool = False  # only the first thread block's barrier counts
    orders_tensor_core: bool = False
    value: str = "mbarrier"


@dataclass(frozen=True)
class SwizzledSpace:
    """Shared memory swizzled in rows of `swizzle` bytes."""

    swizzle: int
    value: str = "smem"


def Barrier(
    *,
    num_arrivals: int = 1,
    num_barriers: int | Sequence[int] = 1,
    orders_tensor_core: bool = False,
) -> MemoryRef:
    """Barriers in shared memory: each phase ends after `num_arrivals` arrivals.

    Args:
        num_arrivals: from `barrier_arrive`, or one per copy that names the barrier.
        num_barriers: how many barriers; `ref.at[i]` is one of them.
        orders_tensor_core: for `tcgen05_mma` and for ordering accesses to TMEM.
    """
    return _barriers(
        num_barriers, BarrierSpace(num_arrivals, orders_tensor_core=orders_tensor_core)
    )


def ClusterBarrier(
    *,
    collective_axes: Hashable | Sequence[Hashable],
    num_barriers: int | Sequence[int] = 1,
    num_arrivals: int = 1,
    orders_tensor_core: bool = False,
    leader_tracked: bool = False,
) -> MemoryRef:
    """Barriers in each thread block of a cluster; an arrival counts at all of them.

    Args:
        collective_axes: the cluster axes whose thread blocks arrive.
        num_barriers: how many barriers.
        num_arrivals: arrivals of each thread block that together complete a phase.
        orders_tensor_core: as for `Barrier`.
        leader_tracked: arrivals count only at the first thread block's barrier.
    """
    axes = as_axes(collective_axes)
    space = BarrierSpace(num_arrivals, axes, leader_tracked, orders_tensor_core)
    return _barriers(num_barriers, space)


def _barriers(count: int | Sequence[int], space: BarrierSpace) -> MemoryRef:
    if space.arrivals < 1:
        raise SpecError(
            f"a barrier needs at least one arrival, got {space.arrivals}",
            at=user_location(),
            fix="plgpu.Barrier(num_arrivals=1)",
        )
    shape = (count,) if isinstance(count, int) else tuple(count)
    if math.prod(shape) < 1:
        raise SpecError(
            f"at least one barrier is needed, got num_barriers={count}",
            at=user_location(),
            fix="plgpu.Barrier(num_barriers=1)",
        )
    return MemoryRef(shape, np.int32, space)


@dataclass(frozen=True)
class CopyPartition:
    """What each thread block of a cluster copies if the first one counts the copies.

    `CopyPartition.PARTITIONED(axis)`: its part along an axis;
    `CopyPartition.REPLICATED`: the same as all others.
    """

    axis: int | None = None

    @staticmethod
    def PARTITIONED(axis: int) -> "CopyPartition":
        return CopyPartition(axis)


CopyPartition.REPLICATED = CopyPartition()  # type: ignore[attr-defined]


class OOBFillMode(enum.Enum):
    """What a copy reads outside an array: here zeros in every mode."""

    UNDEFINED = 0
    PROMISE_IN_BOUNDS = 1
    ZEROS = 2


@dataclass(frozen=True)
class SharedMemory:
    """`plgpu.SMEM`: a memory space; calling it describes shared memory."""

    value: str = "smem"

    def __call__(
        self, shape: Sequence[int], dtype: Any, *, transforms: Any = (), **more: Any
    ) -> MemoryRef:
        """Shared memory of a shape. Transforms describe its layout and do not change
        results; backends use only the swizzle."""
        given = sorted(k for k, v in more.items() if v is not None)
        if given:
            raise UnsupportedError(
                f"plgpu.SMEM({given[0]}=...) is not supported",
                at=user_location(),
                fix="remove it",
            )
        memory = MemorySpace.SMEM(shape, dtype)
        check_transforms(memory.shape, memory.dtype, transforms)
        swizzle = swizzle_of(transforms)
        if swizzle is None:
            return memory
        return MemoryRef(memory.shape, memory.dtype, SwizzledSpace(swizzle))


@dataclass(frozen=True)
class TensorSpace:
    """Tensor memory, possibly of two thread blocks that multiply together."""

    collective: bool = False
    packed: bool = False  # several small elements per word
    value: str = "tmem"


@dataclass(frozen=True)
class TensorMemory:
    """`plgpu.TMEM`: calling it describes tensor memory, for `tcgen05_mma`."""

    value: str = "tmem"

    def __call__(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        layout: Any = None,
        collective: bool | None = None,
        packed: bool | None = None,
    ) -> MemoryRef:
        """Tensor memory of a shape; `layout` does not change results."""
        del layout
        memory = MemorySpace.TMEM(shape, dtype)
        space = TensorSpace(bool(collective), bool(packed))
        return MemoryRef(memory.shape, memory.dtype, space)


@jax.tree_util.register_pytree_node_class
class RefUnion:
    """Groups of refs of which a kernel uses one after another.

    Upstream gives them the same memory, and leaves undefined what a ref holds after
    another one was written. Here each has its own, so that no use is undefined, and a
    thread block needs the sum of their sizes, not the largest.

    In the kernel the groups are elements: `first, (second, third) = union_ref`.
    """

    def __init__(self, *refs: Any):
        self.refs = refs
        found = {
            getattr(ref.memory_space, "value", None)
            for ref in jax.tree.leaves(refs)
            if isinstance(ref, MemoryRef)
        }
        if found - {"smem", "tmem"} or len(found) > 1:
            raise SpecError(
                "the refs of a RefUnion are in one memory space, plgpu.SMEM or "
                "plgpu.TMEM",
                [("got", ", ".join(sorted(map(str, found))))],
                user_location(),
                "give each memory space a RefUnion of its own",
            )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.refs)

    def __getitem__(self, group: int) -> Any:
        return self.refs[group]

    def tree_flatten(self) -> Any:
        return self.refs, None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "RefUnion":
        del aux
        made = object.__new__(cls)
        made.refs = tuple(children)
        return made


class Accumulator:
    """`plgpu.ACC((m, n), dtype)`: an accumulator of `wgmma`, initially zero."""

    def __call__(self, shape: Sequence[int], dtype: Any = jnp.float32) -> MemoryRef:
        """An accumulator of a shape, for `pl.run_scoped`."""
        return MemorySpace.REGS(tuple(shape), dtype)

    @staticmethod
    def init(value: Any) -> "StartedAt":
        """An accumulator for `pl.run_state` with an initial value."""
        return StartedAt(value)


@jax.tree_util.register_pytree_node_class
class StartedAt:
    """An accumulator's initial value."""

    memory_space = MemorySpace.REGS

    def __init__(self, value: Any):
        self.value = value

    def tree_flatten(self) -> Any:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "StartedAt":
        return cls(*children)


@dataclass(frozen=True)
class TilingTransform(Transform):
    """A tiled layout of shared memory. Does not change results."""

    tiling: tuple[int, ...]


SWIZZLES = (16, 32, 64, 128)  # in bytes; 16 means no swizzle


@dataclass(frozen=True)
class SwizzleTransform(Transform):
    """A swizzled layout of shared memory. Does not change results."""

    swizzle: int

    def __post_init__(self) -> None:
        if self.swizzle not in SWIZZLES:
            raise SpecError(
                f"a swizzle of {self.swizzle} bytes is not supported",
                at=user_location(),
                fix="use plgpu.SwizzleTransform(128), or 64, 32, 16 (bytes, not "
                "elements)",
            )


def _bits(dtype: Any) -> int:
    found = T.dtype_of(dtype)
    return 8 if found is None else found.bits


def check_transforms(shape: Sequence[int], dtype: Any, transforms: Any) -> None:
    """Reject tiles that do not divide the shape, and swizzles that do not match them.

    Other transforms are left to upstream.
    """
    rows = tuple(shape)  # the last dimension is swizzled
    for transform in transforms:
        if isinstance(transform, TilingTransform):
            tile = tuple(transform.tiling)
            last = rows[len(rows) - len(tile) :]
            if len(tile) > len(rows) or any(
                t < 1 or n % t for n, t in zip(last, tile, strict=True)
            ):
                raise SpecError(
                    "a tiling must divide the last dimensions of shared memory",
                    [("shape", tuple(shape)), ("tiling", tile)],
                    user_location(),
                    fix="use tile sizes that divide the shape",
                )
            rows = tile
        elif isinstance(transform, SwizzleTransform):
            bits = rows[-1] * _bits(dtype) if rows else 0
            if transform.swizzle > 16 and rows != tuple(shape):
                _check_swizzle(tuple(shape), rows, bits, transform.swizzle)


def _check_swizzle(
    shape: tuple[int, ...], tile: tuple[int, ...], bits: int, swizzle: int
) -> None:
    if bits != swizzle * 8:
        raise SpecError(
            f"a swizzle of {swizzle} bytes needs tiles with rows of {swizzle} bytes",
            [("shape", shape), ("tiling", tile), ("bytes per row", bits // 8)],
            user_location(),
            fix=f"plgpu.SwizzleTransform({bits // 8})"
            if bits // 8 in SWIZZLES
            else "plgpu.TilingTransform((8, swizzle // itemsize))",
        )


def swizzle_of(transforms: Sequence[Any]) -> int | None:
    """The swizzle among transforms, in bytes; 16 means none."""
    found = [t.swizzle for t in transforms if isinstance(t, SwizzleTransform)]
    return found[-1] if found and found[-1] > 16 else None


def find_swizzle(minor_dim_bits: int, what: str = "") -> int:
    """The largest swizzle, in bytes, that divides a row of `minor_dim_bits`."""
    for swizzle in (128, 64, 32, 16):
        if minor_dim_bits % (swizzle * 8) == 0:
            return swizzle
    raise SpecError(
        f"no swizzle fits rows of {minor_dim_bits} bits" + f" of {what}" * bool(what),
        at=user_location(),
        fix="make the last dimension a multiple of 16 bytes",
    )
