"""Ops of the explicit level that Hopper GPUs have: barriers in shared memory, matmuls
of a warpgroup in flight, copies by the copy engine.

Authors write them as `plgpu`, `backends/cuda/specialize.py` creates them, and
`interpret/gpu_level.py` defines their meaning. A copy with a barrier (`copy_start`)
adds its transaction bytes to the barrier's current phase; one without, from shared
memory, is a store in a bulk group. A `wgmma` is a group of its own: its result is
*pending*, usable only by another wgmma or by `wgmma_wait`, until a wait that leaves
fewer groups pending. Axes of a cluster are those of the grid, -1 being its last.
"""

from typing import Any

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import (
    EXPLICIT,
    Attrs,
    Effect,
    OpDef,
    TypeRule,
    TypeRuleError,
    Unit,
    Use,
    register,
)
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import BOOL, INDEX, RefType, TileType, Type
from pallasite.ops.effects import check_region
from pallasite.ops.elementwise import tiles


def barrier_rule(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    barrier = types[0]
    if not isinstance(barrier, RefType) or barrier.space != "mbarrier":
        raise TypeRuleError(f"{barrier} is not an mbarrier")
    if barrier.shape:
        raise TypeRuleError(f"{barrier} is {barrier.size} barriers, not one")
    if types[1:] not in ((), (INDEX,)):
        raise TypeRuleError(f"the parity is one i32, got {types[1]}")
    return ()


def _wgmma(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """Operands: accumulator, left operand (tile or ref), right operand (ref)."""
    sums, lhs, rhs = types
    if not isinstance(sums, TileType) or not isinstance(rhs, RefType):
        raise TypeRuleError("adds to a tile; the right side is in shared memory")
    for side in (lhs, rhs):
        if isinstance(side, RefType) and side.space != "smem":
            raise TypeRuleError(f"{side} is not in shared memory")
    if lhs.rank != 2 or rhs.rank != 2:
        raise TypeRuleError(f"multiplies matrices, got {lhs} and {rhs}")
    contract: tuple[tuple[int], tuple[int]] = attrs["contract"]
    (left,), (right,) = contract
    shape = (lhs.shape[1 - left], rhs.shape[1 - right])
    if lhs.shape[left] != rhs.shape[right] or sums.shape != shape:
        raise TypeRuleError(f"{lhs} times {rhs} does not match {sums}")
    return (sums,)


def _tiles(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return tiles(types)


def _bulk_wait(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    if attrs["pending"] < 0:
        raise TypeRuleError(f"{attrs['pending']} groups cannot be pending")
    return ()


def _registers(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    count = attrs["count"]
    if not 24 <= count <= 256 or count % 8:
        raise TypeRuleError(f"{count} registers: a multiple of 8 from 24 to 256")
    return ()


def product_of(op: Op) -> Block:
    """The result of a wgmma, on tiles: accumulator, left and right operand."""
    sums, *sides = (Value(TileType(v.type.shape, v.type.dtype)) for v in op.operands)
    b = Builder(op.loc)
    product = b.op("dot", *sides, contract=op.attrs["contract"], batch=((), ()),
                   dtype=sums.tile.dtype, precision=None)  # fmt: skip
    return b.block((sums, *sides), (b.op("add", sums, product),))


def nothing(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return ()


def _cluster_copy(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    source, target, barrier = types
    if not isinstance(target, RefType) or target.space != "smem":
        raise TypeRuleError(f"{target} is not in shared memory")
    if source.shape != target.shape or source.dtype != target.dtype:
        raise TypeRuleError(f"copies {source} to {target}")
    return barrier_rule((barrier,), attrs)


def _peer(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    ref, *numbers = types
    if not isinstance(ref, RefType):
        raise TypeRuleError(f"{ref} is not a ref")
    if any(number != INDEX for number in numbers):
        raise TypeRuleError(f"places are numbered by i32, got {numbers}")
    return (ref,)


def _peer_block(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    if len(attrs["axes"]) != len(types) - 1 or not attrs["axes"]:
        raise TypeRuleError(f"{len(types) - 1} numbers for axes {attrs['axes']}")
    if isinstance(types[0], RefType) and types[0].space not in ("smem", "mbarrier"):
        raise TypeRuleError(f"{types[0]} is no memory of a thread block")
    return _peer(types, attrs)


def _async_store(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    value, target, barrier = types
    if not isinstance(target, RefType) or target.space != "smem":
        raise TypeRuleError(f"{target} is not in shared memory")
    if (value.shape, value.dtype) != (target.shape, target.dtype):
        raise TypeRuleError(f"stores {value} to {target}")
    return barrier_rule((barrier,), attrs)


def _barrier_test(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    barrier_rule(types, attrs)
    return (TileType((), BOOL),)


def _inline_cuda(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    results: tuple[TileType, ...] = attrs["types"]
    kinds = [t for t in (*types, *results) if isinstance(t, TileType)]
    if not len(types) + len(results) == len(kinds) == len(attrs["symbols"]):
        raise TypeRuleError("operands and results are tiles with a name each")
    if len({t.shape for t in kinds if t.shape}) > 1:
        raise TypeRuleError("tiles differ in shape")
    for region in attrs.get("regions", ()):
        check_region(region, types, results)
    return results


# A note on a copy: the author promises that it stays inside the array.
NOT_OUTSIDE = "gpu.inside"
GPU_LEVEL: set[str] = {"roles"}  # ops that only kernels of warpgroups have


def gpu_row(
    name: str, rule: TypeRule, arity: int | None, attrs: tuple[str, ...], **kw: Any
) -> OpDef:
    kw = {"unit": Unit.MEMORY, **kw}
    row = OpDef(name, rule, arity, attrs=attrs, effect=Effect.WRITE, level=EXPLICIT,
                layouts=True, **kw)  # fmt: skip
    GPU_LEVEL.add(name)
    return register(row)


COUNTS = (Use.WRITE,)  # a barrier counts arrivals and bytes
SEMAPHORES = "gpu_sem"  # the space of semaphores


def between_programs(kernel: Kernel) -> list[Value]:
    """The semaphores that all programs of a kernel share.

    Those of one program are allocated in its body.
    """
    allocs = (op.result for op in kernel.body.ops if op.name == "alloc")
    return [ref for ref in allocs if ref.ref.space == SEMAPHORES]


def concurrent_axes(kernel: Kernel, op: Op) -> tuple[int, ...]:
    """The axes of a kernel's own grid whose programs wait for each other: those of a
    cluster, or all of them where programs share semaphores or, in kernels for GPUs,
    wait for other devices."""
    if op.name != "pipeline" or op not in kernel.body.ops:
        return ()
    pipeline, every = Pipeline.of(op), bool(between_programs(kernel))
    every = every or _meets_devices(op)
    axes = enumerate(zip(pipeline.grid, pipeline.semantics, strict=True))
    return tuple(n for n, (size, s) in axes if size != 1 and (every or s == "cluster"))


def _meets_devices(pipeline: Op) -> bool:
    ops = list(walk(Block((), (pipeline,))))
    of_gpu = any(o.name == "alloc" and o.result.ref.space == SEMAPHORES for o in ops)
    return of_gpu and any(op.name == "sem_signal_device" for op in ops)


def is_group_load(op: Op) -> bool:
    """Whether an op is a copy to shared memory without a barrier."""
    if op.name != "copy_start" or len(op.operands) != 2:
        return False
    return [v.ref.space for v in op.operands] == ["gmem", "smem"]


def is_of_warpgroups(op: Op) -> bool:
    """Whether only kernels of warpgroups have an op."""
    if op.name == "alloc":
        return op.result.ref.space == SEMAPHORES
    return op.name in GPU_LEVEL


gpu_row(
    "sem_reach",
    nothing,
    2,
    (),
    uses=COUNTS,
    doc="semaphore, i32 amount: waits until the count is at least that, and leaves it",
)

gpu_row(
    "barrier_expect",
    barrier_rule,
    1,
    ("bytes",),
    uses=COUNTS,
    doc="one arrival; the phase also waits for that many bytes of copies",
)
gpu_row(
    "barrier_arrive",
    barrier_rule,
    1,
    (),
    uses=COUNTS,
    doc="one arrival per warp that runs it",
)
gpu_row(
    "barrier_wait",
    barrier_rule,
    2,
    (),
    uses=COUNTS,
    doc="waits until the phase of that parity is complete",
)
gpu_row(
    "barrier_test",
    _barrier_test,
    2,
    (),
    uses=COUNTS,
    doc="whether the phase of that parity is complete; does not wait",
)
gpu_row(
    "wgmma",
    _wgmma,
    3,
    ("contract",),
    unit=Unit.MATRIX,
    uses=(Use.READ,),
    doc="starts a matmul of a warpgroup into an accumulator; the result is in flight",
)
gpu_row(
    "wgmma_wait",
    _tiles,
    None,
    ("pending",),
    unit=Unit.CONTROL,
    doc="waits until at most `pending` matmuls are in flight; returns the same tiles",
)
gpu_row(
    "named_barrier",
    nothing,
    0,
    ("id", "threads", "arrive_only"),
    doc="warps synchronise, or arrive without waiting (`arrive_only`)",
)
gpu_row(
    "fence_async",
    nothing,
    0,
    (),
    doc="makes earlier stores to shared memory visible to later async copies and "
    "matmuls",
)
gpu_row(
    "cluster_barrier", nothing, 0, (), doc="the thread blocks of a cluster synchronise"
)
gpu_row(
    "cluster_arrive",
    barrier_rule,
    1,
    ("axes", "to"),
    uses=COUNTS,
    doc="one arrival at that barrier in `all` blocks along axes of the cluster, or in "
    "the `first`",
)
gpu_row(
    "cluster_copy",
    _cluster_copy,
    3,
    ("axes", "to"),
    uses=(Use.READ, Use.WRITE),
    doc="an async copy that arrives at a barrier: to the same shared memory in `all` "
    "blocks along axes of the cluster, or to this block's, with the barrier of "
    "the `first` block",
)
gpu_row(
    "async_store",
    _async_store,
    3,
    ("atomic",),
    uses=(Use.READ, Use.WRITE, Use.WRITE),
    doc="starts storing a tile to shared memory, or combining with what is there "
    "(`atomic`); one arrival at the barrier, whose phase waits for the bytes",
)
_peer_row: dict[str, Any] = dict(effect=Effect.PURE, uses=(Use.VIEW,), level=EXPLICIT)
register(
    OpDef(
        "peer_block",
        _peer_block,
        attrs=("axes",),
        layouts=True,
        doc="the same shared memory, or barrier, in the thread block with those "
        "numbers along axes of the cluster",
        **_peer_row,
    )
)
register(
    OpDef(
        "peer_device",
        _peer,
        2,
        layouts=True,
        doc="the same main memory on the device of that number",
        **_peer_row,
    )
)
GPU_LEVEL.add("peer_block")
gpu_row(
    "bulk_commit",
    nothing,
    0,
    (),
    doc="commits the async stores since the last commit as a group",
)
gpu_row(
    "bulk_wait",
    _bulk_wait,
    0,
    ("pending", "read"),
    unit=Unit.CONTROL,
    doc="waits until at most `pending` groups of stores are in flight, or with `read` "
    "until the others have read their sources",
)
gpu_row(
    "load_wait",
    _bulk_wait,
    0,
    ("pending",),
    unit=Unit.CONTROL,
    doc="waits until at most `pending` copies to shared memory without a barrier are "
    "in flight",
)
gpu_row(
    "inline_cuda",
    _inline_cuda,
    None,
    ("text", "symbols", "types"),
    unit=Unit.ALU,
    regions=None,
    doc="CUDA C++ for each element of tiles; `symbols` name operands, then results. A "
    "region, if there is one, is the same for whole tiles",
)
gpu_row(
    "set_registers",
    _registers,
    0,
    ("count", "more"),
    unit=Unit.CONTROL,
    doc="sets the register count of each thread of the warpgroup, to `more` than "
    "before or fewer",
)
