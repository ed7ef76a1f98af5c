"""What authors of `plgpu` kernels call: barriers, the copy engine, async matmuls.

Each function stages a primitive; `importer/gpu.py` turns it into ops of the explicit
level. A *thread* here is a warpgroup, as in upstream's names.
"""

import enum
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, SpecError, UnsupportedError
from pallasite.language import refs, specs
from pallasite.language.gpu_memory import CopyPartition, OOBFillMode, SwizzleTransform
from pallasite.language.helpers import when
from pallasite.language.memory_spaces import MemoryRef, MemorySpace, as_axes
from pallasite.language.peers import cluster_ref, each_device
from pallasite.language.refs import flatten_views, kernel_primitive
from pallasite.language.trace import trace, user_location
from pallasite.ops.tensor_memory import KEPT_TILE

# --- primitives ---


def _effect_primitive(name: str) -> jaxcompat.Primitive:
    primitive = kernel_primitive(name, multiple_results=True)
    primitive.def_effectful_abstract_eval(
        lambda *a, **_: ([], refs.ref_effects(a) or {jaxcompat.debug_effect()})
    )
    return primitive


barrier_arrive_p = _effect_primitive("barrier_arrive")
barrier_wait_p = _effect_primitive("barrier_wait")
load_to_smem_p = _effect_primitive("copy_gmem_to_smem")
store_to_gmem_p = _effect_primitive("copy_smem_to_gmem")
wait_loads_p = _effect_primitive("wait_gmem_to_smem")
named_barrier_p = _effect_primitive("named_barrier")
wait_stores_p = _effect_primitive("wait_smem_to_gmem")
commit_stores_p = _effect_primitive("commit_smem_to_gmem_group")
commit_smem_p = _effect_primitive("commit_smem")
wgmma_p = _effect_primitive("wgmma")
wgmma_wait_p = _effect_primitive("wgmma_wait")
set_max_registers_p = _effect_primitive("set_max_registers")
warps_p = _effect_primitive("warps")
tensor_mma_p = _effect_primitive("tcgen05_mma")
tensor_commit_p = _effect_primitive("tcgen05_commit_arrive")
tensor_copy_p = _effect_primitive("async_copy_smem_to_tmem")
tensor_wait_p = _effect_primitive("wait_tmem")
async_store_p = _effect_primitive("async_store_smem")
barrier_test_p = kernel_primitive("barrier_test")
barrier_test_p.def_effectful_abstract_eval(
    lambda *a, **_: (
        jax.core.ShapedArray((), jnp.bool_),
        refs.ref_effects(a) or {jaxcompat.debug_effect()},
    )
)


def barrier_arrive(barrier: Any, *, predicate: Any = None) -> None:
    """Arrive once, as this warpgroup; where `predicate` is false, do nothing."""
    if predicate is not None:
        when(predicate)(lambda: barrier_arrive(barrier))
        return
    flat, tree = flatten_views(barrier)
    barrier_arrive_p.bind(*flat, tree=tree)


def barrier_wait(barrier: Any) -> None:
    """Wait for the phase after the last one this warpgroup waited for."""
    flat, tree = flatten_views(barrier)
    barrier_wait_p.bind(*flat, tree=tree)


def barrier_test(barrier: Any) -> jax.Array:
    """Whether the phase after the last one waited for is over; if so, that was the wait
    for it. Does not wait."""
    flat, tree = flatten_views(barrier)
    return barrier_test_p.bind(*flat, tree=tree)


def barrier_arrive_and_wait(barrier: Any) -> None:
    """Arrive, then wait for the end of the phase."""
    barrier_arrive(barrier)
    barrier_wait(barrier)


def copy_gmem_to_smem(
    src: Any,
    dst: Any,
    barrier: Any = None,
    *,
    collective_axes: Hashable | Sequence[Hashable] = None,
    leader_tracked: CopyPartition | None = None,
    oob_mode: OOBFillMode | None = OOBFillMode.ZEROS,
    predicate: Any = None,
) -> None:
    """Start a copy into shared memory; `barrier` gets one arrival on completion.

    Args:
        src, dst, barrier: main memory, shared memory, one barrier. Without a barrier,
            as before Hopper, `wait_gmem_to_smem` waits for the copy.
        collective_axes: cluster axes whose thread blocks all start this copy and all
            receive the data, each copying a part of it.
        leader_tracked: each thread block copies its part or all of `src` for itself;
            the first one's barrier counts the copies of all.
        oob_mode: elements outside the array are zeros in every mode; checked mode
            reports a copy that leaves the array with `PROMISE_IN_BOUNDS`.
        predicate: where it is false, there is neither a copy nor an arrival.
    """
    if predicate is not None:
        more = dict(leader_tracked=leader_tracked, oob_mode=oob_mode)
        axes = collective_axes
        copy = functools.partial(copy_gmem_to_smem, src, dst, barrier, **more)
        when(predicate)(lambda: copy(collective_axes=axes))
        return
    if leader_tracked is not None and collective_axes is None:
        raise SpecError(
            "copy_gmem_to_smem: leader_tracked needs collective_axes",
            at=user_location(),
            fix="pass collective_axes, too",
        )
    if barrier is None and collective_axes is not None:
        raise SpecError(
            "a copy for several thread blocks needs a barrier",
            at=user_location(),
            fix="plgpu.Barrier() in scratch_shapes; or remove collective_axes",
        )
    flat, tree = flatten_views(src, dst, *(() if barrier is None else (barrier,)))
    load_to_smem_p.bind(
        *flat,
        tree=tree,
        axes=as_axes(collective_axes),
        first=leader_tracked,
        inside=oob_mode is OOBFillMode.PROMISE_IN_BOUNDS,
    )


def copy_smem_to_gmem(
    src: Any,
    dst: Any,
    predicate: Any = None,
    *,
    commit_group: bool = True,
    reduction_op: Any = None,
) -> None:
    """Start a copy from shared memory, in a group for `wait_smem_to_gmem`.

    `dst` may be a `multicast_ref`: then several devices get the copy.
    """
    several = each_device(dst)
    if several is not None:
        more = dict(commit_group=False, reduction_op=reduction_op)
        for there in several:
            copy_smem_to_gmem(src, there, predicate, **more)
        if commit_group:
            commit_smem_to_gmem_group()
        return
    if reduction_op is not None:
        raise UnsupportedError(
            "copy_smem_to_gmem(reduction_op=...) is not supported",
            at=user_location(),
            fix="accumulate in registers before the copy, or remove it",
        )
    flat, tree = flatten_views(src, dst)
    if predicate is None:
        store_to_gmem_p.bind(*flat, tree=tree)
    else:
        when(predicate)(lambda: copy_smem_to_gmem(src, dst, commit_group=False))
    if commit_group:
        commit_smem_to_gmem_group()


def commit_smem_to_gmem_group() -> None:
    """Group the copies from shared memory started since the last group."""
    commit_stores_p.bind()


def wait_gmem_to_smem(n: int) -> None:
    """Wait until at most `n` copies without a barrier, of this warpgroup, are in
    flight."""
    wait_loads_p.bind(pending=int(n))


def mma(acc: Any, a: Any, b: Any, /) -> jax.Array:
    """`acc + a @ b` of values, at once: the matrix instructions before Hopper's.

    On a GPU, `a` and `b` are of bfloat16, float16, int8, uint8 or float32, of which 19
    bits are multiplied, and `acc` is of float32 or int32.
    """
    acc, a, b = (jnp.asarray(x) for x in (acc, a, b))
    shapes = [x.shape for x in (acc, a, b)]
    fits = all(len(s) == 2 for s in shapes) and (
        shapes[0] == (shapes[1][0], shapes[2][1]) and shapes[1][1] == shapes[2][0]
    )
    if not fits or a.dtype != b.dtype:
        types = [f"{x.dtype}{list(x.shape)}" for x in (acc, a, b)]
        raise KernelTypeError(
            "mma adds the product of (m, k) and (k, n) of one dtype to (m, n)",
            [*zip(("acc", "a", "b"), types, strict=True)],
            user_location(),
            "load the operands with .at[...] of the right shape, and .astype one",
        )
    # What the instructions multiply; the emulation multiplies all bits.
    how = jax.lax.DotAlgorithmPreset.TF32_TF32_F32 if a.dtype == jnp.float32 else None
    return acc + jax.lax.dot(a, b, precision=how, preferred_element_type=acc.dtype)


def named_barrier(number: int, threads: int, *, wait: bool = True) -> None:
    """Meet other warpgroups at a numbered barrier, without memory of its own.

    Args:
        number: 0 to 5.
        threads: of all warpgroups that meet there, 128 each.
        wait: False arrives and goes on (PTX's `barrier.arrive`).
    """
    if not 0 <= number < NAMED_BARRIERS or threads < 128 or threads % 128:
        raise SpecError(
            f"there is no barrier {number} for {threads} threads",
            at=user_location(),
            fix=f"numbers 0 to {NAMED_BARRIERS - 1}, a multiple of 128 threads",
        )
    named_barrier_p.bind(number=int(number), threads=int(threads), wait=bool(wait))


NAMED_BARRIERS = 6  # of the 16 of a thread block; the others are the backend's


def wait_smem_to_gmem(n: int, wait_read_only: bool = False) -> None:
    """Wait until at most `n` groups are in flight (or yet to read their source)."""
    wait_stores_p.bind(pending=int(n), read=bool(wait_read_only))


def commit_smem() -> None:
    """Make earlier stores to shared memory visible to later copies and matmuls."""
    commit_smem_p.bind()


def wgmma(acc: Any, a: Any, b: Any) -> None:
    """Start adding `a @ b` to an accumulator; `a` is in shared memory or a value."""
    if not jaxcompat.is_ref(b):
        raise KernelTypeError(
            "the right operand of a wgmma must be in shared memory, got a value",
            at=user_location(),
            fix="store it to a plgpu.SMEM ref and commit_smem() first",
        )
    is_tile = not jaxcompat.is_ref(a)
    views = (acc, b) if is_tile else (acc, b, a)
    flat, tree = flatten_views(*views)
    wgmma_p.bind(*([a] if is_tile else []), *flat, tree=tree, is_tile=is_tile)


def wgmma_wait(n: int) -> None:
    """Wait until at most `n` matmuls of this warpgroup are in flight."""
    wgmma_wait_p.bind(pending=int(n))


def wgmma_accumulator_load(acc: Any, *, wait_n: int | None = 0) -> jax.Array:
    """An accumulator's value, after its matmuls have completed."""
    if wait_n != 0:
        raise UnsupportedError(
            f"wgmma_accumulator_load(wait_n={wait_n}) is not supported",
            at=user_location(),
            fix="wait_n=0, or acc_ref[...]",
        )
    return acc[...]


def async_store_smem(
    src: Any,
    ref: Any,
    barrier: Any,
    *,
    cluster_idx: Any,
    cluster_dim: Hashable,
    optimized: bool = True,
    atomic: str | None = None,
) -> None:
    """Start storing a value to shared memory of a thread block of the cluster; its
    `barrier` gets one arrival on completion.

    Args:
        src: the value.
        ref, barrier: shared memory and a barrier, named as this block's own.
        cluster_idx, cluster_dim: the position of the other block along an axis of the
            cluster.
        optimized: does not change results.
        atomic: "add", "max", "min", "and", "or" or "xor": combine with what is there,
            element by element; several blocks may do so at once.
    """
    del optimized
    if atomic is not None and atomic not in ATOMIC_STORES:
        raise SpecError(
            f"async_store_smem has no atomic {atomic!r}",
            at=user_location(),
            fix=f"one of {', '.join(ATOMIC_STORES)}",
        )
    views = (cluster_ref(x, {cluster_dim: cluster_idx}) for x in (ref, barrier))
    flat, tree = flatten_views(*views)
    async_store_p.bind(jnp.asarray(src), *flat, tree=tree, atomic=atomic)


ATOMIC_STORES = ("add", "max", "min", "and", "or", "xor")


# --- tensor memory ---


def tcgen05_mma(
    acc: Any,
    a: Any,
    b: Any,
    barrier: Any = None,
    *,
    a_scale: Any = None,
    b_scale: Any = None,
    a_sparse_metadata: Any = None,
    accumulate: bool | jax.Array = True,
    collective_axis: Hashable = None,
) -> None:
    """Start adding `a @ b` to tensor memory.

    Args:
        acc: the accumulator, in tensor memory.
        a, b: the operands; `b` is in shared memory, `a` there or in tensor memory.
        barrier: gets one arrival when this and all earlier matmuls have completed.
        a_scale, b_scale: tensor memory, (m, k // block) and (n, k // block): each block
            along k of a row of `a`, and of a column of `b`, is multiplied by one. In
            checked mode only.
        a_sparse_metadata: tensor memory, (m, k // 2) of uint2: `a` is (m, k // 2), two
            of each four elements of a row, whose places these are. In checked mode
            only.
        accumulate: False overwrites `acc`.
        collective_axis: a cluster axis of two thread blocks. The first one starts the
            matmul of both: each has its rows of `a` and `acc`, and half of the columns
            of `b`.
    """
    scales = [scale for scale in (a_scale, b_scale) if scale is not None]
    if len(scales) == 1:
        raise SpecError(
            "tcgen05_mma has scales of both operands, or of none",
            at=user_location(),
            fix="pass a_scale and b_scale",
        )
    places = () if a_sparse_metadata is None else (a_sparse_metadata,)
    flat, tree = flatten_views(acc, a, b, *scales, *places)
    adds = jnp.asarray(accumulate, jnp.bool_)
    axes = () if collective_axis is None else (collective_axis,)
    tensor_mma_p.bind(adds, *flat, tree=tree, axes=axes)
    if barrier is not None:
        tcgen05_commit_arrive(barrier, collective_axis)


def tcgen05_commit_arrive(
    barrier: Any, collective_axis: Hashable = None, *, predicate: Any = None
) -> None:
    """Arrive once all earlier matmuls and copies into tensor memory have completed,
    at the barriers of both thread blocks along `collective_axis`; where `predicate` is
    false, do nothing."""
    if predicate is not None:
        when(predicate)(lambda: tcgen05_commit_arrive(barrier, collective_axis))
        return
    flat, tree = flatten_views(barrier)
    axes = () if collective_axis is None else (collective_axis,)
    tensor_commit_p.bind(*flat, tree=tree, axes=axes)


def async_copy_smem_to_tmem(
    smem_ref: Any, tmem_ref: Any, collective_axis: Hashable = None
) -> None:
    """Start a copy into tensor memory; matmuls started afterwards see it."""
    flat, tree = flatten_views(smem_ref, tmem_ref)
    axes = () if collective_axis is None else (collective_axis,)
    tensor_copy_p.bind(*flat, tree=tree, axes=axes)


def async_copy_scales_to_tmem(
    smem_ref: Any, tmem_ref: Any, collective_axis: Hashable = None
) -> None:
    """Start a copy of scales, for `tcgen05_mma`, into tensor memory; matmuls started
    afterwards see it. In checked mode only.

    Args:
        smem_ref: (rows // 128, blocks // 4, 32, 16): row 128 i + 32 q + r and block
            4 j + c are at [i, j, r, 4 q + c].
        tmem_ref: (rows, blocks).
        collective_axis: a cluster axis of two thread blocks, both of which copy.
    """
    shape = tuple(smem_ref.shape)
    if len(shape) != 4 or shape[2:] != (32, 16):
        raise KernelTypeError(
            "scales in shared memory have the shape (rows // 128, blocks // 4, 32, 16)",
            [("got", f"{smem_ref.dtype}{list(shape)}")],
            user_location(),
            "x.reshape(rows // 128, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4)"
            ".reshape(rows // 128, blocks // 4, 32, 16)",
        )
    tiles, groups = shape[:2]
    view = smem_ref.reshape(tiles, groups, 32, 4, 4).transpose((0, 3, 2, 1, 4))
    view = view.reshape(tiles * 128, groups * 4)
    async_copy_smem_to_tmem(view, tmem_ref, collective_axis)


def async_copy_sparse_metadata_to_tmem(
    smem_ref: Any, tmem_ref: Any, collective_axis: Hashable = None
) -> None:
    """Start a copy of what `format_tcgen05_sparse_metadata` made into tensor memory of
    (m, k // 2), for `tcgen05_mma`. In checked mode only."""
    shape = tuple(smem_ref.shape)
    if len(shape) != 4 or shape[2:] != KEPT_TILE:
        raise KernelTypeError(
            "metadata in shared memory has the shape (m // 128, k // 128, 128, 64)",
            [("got", f"{smem_ref.dtype}{list(shape)}")],
            user_location(),
            "plgpu.format_tcgen05_sparse_metadata(metadata, dtype)",
        )
    view = smem_ref.transpose((0, 2, 1, 3))
    view = view.reshape(shape[0] * shape[2], shape[1] * shape[3])
    async_copy_smem_to_tmem(view, tmem_ref, collective_axis)


def async_load_tmem(src: Any, *, layout: Any = None, reduce: str | None = None) -> Any:
    """Load tensor memory. Call `wait_load_tmem` before overwriting it.

    With `reduce` ("max", "min", "absmax" or "absmin"), returns the value and what it
    reduces to along its last dimension.
    """
    del layout
    value = src[...]
    if reduce is None:
        return value
    if reduce not in _TENSOR_REDUCTIONS:
        raise SpecError(
            f"async_load_tmem cannot reduce by {reduce!r}",
            at=user_location(),
            fix=f"one of {', '.join(_TENSOR_REDUCTIONS)}",
        )
    sizes = jnp.abs(value) if reduce.startswith("abs") else value
    return value, _TENSOR_REDUCTIONS[reduce](sizes, axis=-1)


_TENSOR_REDUCTIONS = dict(max=jnp.max, min=jnp.min, absmax=jnp.max, absmin=jnp.min)


def async_store_tmem(ref: Any, value: Any) -> None:
    """Write tensor memory; matmuls and loads after `commit_tmem` see it."""
    ref[...] = value


def wait_load_tmem() -> None:
    """Wait until this warpgroup's loads of tensor memory have completed."""
    tensor_wait_p.bind(what="loads")


def commit_tmem() -> None:
    """Wait until this warpgroup's stores to tensor memory have completed."""
    tensor_wait_p.bind(what="stores")


# --- single warps ---


@dataclass(frozen=True)
class WarpMesh:
    """The four warps of a warpgroup, for `pl.core_map`."""

    axis_name: Any

    @property
    def shape(self) -> dict[Any, int]:
        return {self.axis_name: WARPS}


WARPS = 4  # per warpgroup


def run_warps(mesh: WarpMesh, function: Callable[[], Any]) -> None:
    """Run a function, which reads and writes refs, on each warp of the warpgroup."""
    no_arguments = jax.tree.structure(((), {}))
    traced = trace(function, no_arguments, (), function, tuple(mesh.shape.items()))
    warps_p.bind(*traced.captured, jaxpr=traced.jaxpr, axis=mesh.axis_name)


def warp_map(f: Callable[[Any], Any], /) -> None:
    """Run a function on each warp of the warpgroup, passing the warp's number."""
    axis = object()
    run_warps(WarpMesh(axis), lambda: f(jax.lax.axis_index(axis)))


# --- hints that do not change results ---


def set_max_registers(n: int, *, action: str) -> None:
    """Set the registers per thread of this warpgroup; does not change results."""
    if action not in ("increase", "decrease"):
        raise SpecError(
            f"action must be 'increase' or 'decrease', got {action!r}",
            at=user_location(),
            fix='plgpu.set_max_registers(n, action="increase")',
        )
    if not 24 <= n <= 256 or n % 8:
        raise SpecError(
            f"registers per thread must be a multiple of 8 from 24 to 256, got {n}",
            at=user_location(),
            fix="use the nearest multiple of 8 in that range",
        )
    set_max_registers_p.bind(count=int(n), more=action == "increase")


def async_prefetch(
    ref: Any,
    *,
    collective_axes: Any = None,
    leader_tracked: Any = None,
    predicate: Any = None,
) -> None:
    """A hint to prefetch what will be copied; does not change results."""
    del ref, collective_axes, leader_tracked, predicate


def griddepcontrol_wait() -> None:
    """Does nothing: earlier kernels have completed when this one starts."""


def griddepcontrol_launch_dependents() -> None:
    """Does nothing: later kernels start when this one has completed."""


def TryClusterCancelResult(num_buffers: int | None = None) -> MemoryRef:
    """Shared memory for what `try_cluster_cancel` finds: one result, or several."""
    several = () if num_buffers is None else (num_buffers,)
    return MemorySpace.SMEM((*several, CANCEL_BYTES), jnp.int8)


CANCEL_BYTES = 16


def try_cluster_cancel(
    result_ref: Any, barrier: Any, *, collective_axes: Any = ()
) -> None:
    """Ask for the work of a thread block that has not started; `barrier` gets this
    warpgroup's arrival once the answer is there.

    The answer is always that there is none, as from a chip on which all have started:
    each thread block does its own work (`dynamic_scheduling_loop`).

    Args:
        result_ref: from `TryClusterCancelResult`.
        barrier: its phase ends when the answer is there.
        collective_axes: the axes along which several ask together.
    """
    if tuple(result_ref.shape) != (CANCEL_BYTES,):
        raise KernelTypeError(
            f"the answer to try_cluster_cancel has {CANCEL_BYTES} bytes",
            [("got", f"{result_ref.dtype}{list(result_ref.shape)}")],
            user_location(),
            "plgpu.TryClusterCancelResult(); index it if it holds several: ref.at[0]",
        )
    del collective_axes
    barrier_arrive(barrier)


def query_cluster_cancel(
    result_ref: Any, grid_names: Sequence[Hashable]
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """What `try_cluster_cancel` was told: indices along the axes of the grid, which
    mean something if the second result is true; here it is always false."""
    del result_ref
    return tuple(jnp.int32(0) for _ in grid_names), jnp.bool_(False)


def layout_cast(x: Any, new_layout: Any) -> Any:
    """The same value; layouts do not change results."""
    del new_layout
    return x


def broadcasted_iota(
    dtype: Any, shape: Sequence[int], dimension: int, *, layout: Any = None
) -> jax.Array:
    """Like `jax.lax.broadcasted_iota`."""
    del layout
    return jax.lax.broadcasted_iota(dtype, tuple(shape), dimension)


def load(
    src: Any, idx: Any = (), *, layout: Any = None, optimized: bool = True, **more: Any
) -> jax.Array:
    """Read elements of a ref."""
    del layout, optimized
    if more:
        return refs.load(src, None if idx == () else idx, **more)
    return src[...] if idx == () else src[idx]


def transpose_ref(ref: Any, permutation: Sequence[int]) -> Any:
    """A view of a ref with permuted dimensions."""
    return ref.transpose(tuple(permutation))


def transform_ref(ref: Any, transform: Any) -> Any:
    """A view of a ref through a view transform: one that JAX's views are made of, or a
    layout of shared memory, which changes nothing here unless it changes the shape."""
    if isinstance(transform, SwizzleTransform):
        return ref
    if not hasattr(transform, "transform_type"):
        raise KernelTypeError(
            "transform_ref needs a transform of views",
            [("got", repr(transform))],
            user_location(),
            "ref.reshape(...), ref.transpose(...), plgpu.transpose_ref(ref, order)",
        )
    return jaxcompat.transformed_ref(ref, transform)


# --- loops over work shared by thread blocks ---


@dataclass(frozen=True)
class NDLoopInfo:
    """The position of one iteration of `nd_loop`."""

    index: tuple[Any, ...]
    local_index: Any
    num_local_steps: Any


def nd_loop(
    grid: Sequence[Any],
    *,
    collective_axes: Any,
    tiling: Any = None,
    init_carry: Any = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Run a function for each index of `grid`, shared among programs along some axes.

    Args:
        grid: the sizes.
        collective_axes: names of the axes whose programs share the work.
        tiling: sizes of grid tiles, which are traversed one tile at a time.
        init_carry: if given, carried between iterations as the keyword `carry`.
    """
    grid = tuple(grid)
    tiles = tuple(tiling or (1,) * len(grid))
    uneven = [
        size
        for size, tile in zip(grid, tiles, strict=False)
        if isinstance(size, int) and size % tile
    ]
    if len(tiles) != len(grid) or uneven:
        raise SpecError(
            "nd_loop needs one tile size per grid axis, which must divide it",
            [("grid", grid), ("tiling", tiles)],
            user_location(),
            fix="use tile sizes that divide the grid, one per axis",
        )
    counts = tuple(size // tile for size, tile in zip(grid, tiles, strict=True))
    axes = as_axes(collective_axes)
    first, programs = jnp.int32(0), 1
    for axis in axes:
        size = jax.lax.axis_size(axis)
        first, programs = first * size + jax.lax.axis_index(axis), programs * size
    total = math.prod(grid)

    def decorate(body: Callable[..., Any]) -> Any:
        steps = jnp.int32((total - first + programs - 1) // programs)

        def step(n: Any, carry: Any) -> Any:
            rest, index = first + n * programs, []
            for size in reversed((*counts, *tiles) if tiling else grid):
                index.append(jax.lax.rem(rest, jnp.int32(size)))
                rest = jax.lax.div(rest, jnp.int32(size))
            index = index[::-1]
            if tiling:
                tile, inside = index[: len(grid)], index[len(grid) :]
                parts = zip(tile, tiles, inside, strict=True)
                index = [t * size + i for t, size, i in parts]
            info = NDLoopInfo(tuple(index), n, steps)
            if init_carry is None:
                body(info)
                return carry
            return body(info, carry=carry)

        carry = 0 if init_carry is None else init_carry
        result = jax.lax.fori_loop(0, steps, step, carry)
        return None if init_carry is None else result

    return decorate


def dynamic_scheduling_loop(
    grid_names: Sequence[Any],
    *,
    thread_axis: Any = None,
    cluster_axes: Sequence[Any] = (),
    init_carry: Any = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Run a function for the grid indices that a thread block claims.

    Running thread blocks may take over the work of those not yet started. How much is
    unspecified; here each does its own, which is one iteration. After the last one,
    copies to main memory have read their sources.

    Args:
        grid_names: the axes of the grid.
        thread_axis, cluster_axes: the axis of warpgroups and those of the cluster.
        init_carry: if given, carried between iterations as the keyword `carry`.
    """
    del thread_axis, cluster_axes

    def decorate(body: Callable[..., Any]) -> Any:
        index = tuple(jax.lax.axis_index(name) for name in grid_names)
        info = NDLoopInfo(index, jnp.int32(0), None)
        more = {} if init_carry is None else {"carry": init_carry}
        carry = body(info, **more)
        wait_smem_to_gmem(0, wait_read_only=True)
        return carry

    return decorate


def planar_snake(
    lin_idx: Any, shape: tuple[Any, Any], minor_dim: int, tile_width: int
) -> tuple[Any, Any]:
    """The position of a step in a plane traversed in strips, back and forth.

    Args:
        lin_idx: the step's number.
        shape: the plane's shape.
        minor_dim: the dimension along which a strip is `tile_width` wide.
        tile_width: a strip's width; the last strip may be narrower.
    """
    minor, major = shape[minor_dim], shape[1 - minor_dim]
    strip = lin_idx // (tile_width * major)
    inside = lin_idx - strip * tile_width * major
    width = jnp.minimum(tile_width, minor - strip * tile_width)
    row = inside // width
    column = strip * tile_width + inside - row * width
    row = jnp.where(strip % 2 == 0, row, major - 1 - row)
    return (column, row) if minor_dim == 0 else (row, column)


class TraceScope(enum.Enum):
    """Whose events upstream's profiler records; Pallasite has no such profiler."""

    WARP = "warp"
    WARPGROUP = "warpgroup"


class LoweringSemantics(enum.Enum):
    """How upstream's compiler views code; ignored here."""

    Lane = 0
    Warpgroup = 1


@dataclass(frozen=True)
class CompilerParams(specs.CompilerParams):
    """Settings of upstream's compiler, ignored except for `approx_math`."""

    approx_math: bool = False
    dimension_semantics: Any = None
    max_concurrent_steps: int = 1
    unsafe_no_auto_barriers: bool = False
    reduction_scratch_bytes: int | None = None
    profile_space: int = 0
    profile_dir: str = ""
    profile_trace_scope: TraceScope = TraceScope.WARPGROUP
    profile_bounds_check: bool = False
    lowering_semantics: LoweringSemantics = LoweringSemantics.Lane
    skip_device_barrier: bool = False
    is_multi_process: bool = False

    def replace(self, **changes: Any) -> "CompilerParams":
        """The same settings with changes."""
        return replace(self, **changes)
