"""Passes for kernels that authors write at the explicit level.

`one_role`: turns a kernel of a single warpgroup into one with roles, so that the
emitter sees only one kind of explicit kernel. Such kernels are for one generation of
chips; on others they are rejected here. `share_core`: lets two programs share an SM
where the registers that the author asks for leave room for only one. `rounds`: launches
only as many thread blocks as run concurrently, and each runs several programs in turn.
`all_at_once`: rejects programs that wait for each other and cannot all run at once.
"""

from dataclasses import replace
from math import prod

from pallasite.backends.cuda.clusters import CLUSTER
from pallasite.backends.cuda.instruction_sets import (
    BLACKWELL,
    BLACKWELL_ULTRA,
    HOPPER,
)
from pallasite.backends.cuda.layouts import WARPGROUP
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, is_pure, map_ops
from pallasite.ir.roles import Loop, Pipeline
from pallasite.ops.gpu import between_programs, is_group_load
from pallasite.passes.analysis.grid import find_pipeline, with_pipeline
from pallasite.passes.analysis.live_tiles import LiveTiles
from pallasite.passes.lower.device_numbers import talks_to_devices
from pallasite.target import Gpu

WARPGROUP_OPS = {"barrier_wait", "copy_start", "wgmma", "bulk_wait", "set_registers"}
WARPGROUP_OPS |= {"cluster_barrier", "tensor_mma", "warps"}
WARPGROUP_OPS |= {"sem_signal", "sem_wait", "sem_reach", "sem_read"}
WARPGROUP_OPS |= {"sem_signal_device", "peer_device"}
WARPGROUP_OPS |= {"barrier_test", "peer_block", "dot_add", "load_wait", "inline_cuda"}
WARPGROUP_OPS |= {"named_barrier", "barrier_arrive", "barrier_expect"}
# The chips that have an op, for ops that not all have.
ONLY_ON = {
    "wgmma": (HOPPER.arch,),
    "tensor_mma": (BLACKWELL.arch, BLACKWELL_ULTRA.arch),
}
# The chips that products in registers and copies without barriers run on.
SINCE_AMPERE = ("sm_80", "sm_86", "sm_89", HOPPER.arch, BLACKWELL.arch)
SINCE_AMPERE = (*SINCE_AMPERE, BLACKWELL_ULTRA.arch)
FOR_ALL = {"dot_add", "load_wait", "named_barrier", "inline_cuda"}
PROGRAMS = 2  # that share an SM
FEWEST_REGISTERS = 24  # per thread
OTHER_REGISTERS = 32  # of a multiplying thread, besides its tiles
# The same, if it runs several programs: for JAX's attention, ptxas spills 40 bytes
# more in such a loop than without it if tiles take 195 of 232, and none at 161.
REPEATED_REGISTERS = 48
# Shared memory besides what is allocated: reserved by the chip, and for the tensor
# maps of arrays.
OTHER_BYTES, ALIGNMENT = 3072, 1024
MOST_THREADS = 1024  # of thread blocks that share an SM: 64 registers for each
GRANULE = 8  # granularity of a thread's register count
# What makes some programs take longer, and what leaves something to the next one.
ONLY_ONCE = {"while", "alloc", "named_barrier", "tensor_mma", "warps"}
ONLY_ONCE |= {"sem_signal", "sem_wait", "sem_reach", "sem_read", "barrier_test"}
ONLY_ONCE |= {"sem_signal_device", "peer_device"}
BEFORE_ROLES = {"alloc", "constant"}  # what no program of a thread block changes
NO_COPIES: frozenset[str] = frozenset()
BLOCKS = "cuda.blocks"  # thread blocks, where they are fewer than a pipeline's programs


def is_for_all(op: Op) -> bool:
    """Whether all chips since Ampere have an op of `WARPGROUP_OPS`."""
    return op.name in FOR_ALL or is_group_load(op)


def one_role(kernel: Kernel, chip: Gpu) -> Kernel:
    """The program of one warpgroup as a role; memory is allocated before it."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    explicit = [op for op in walk(pipeline.body) if op.name in WARPGROUP_OPS]
    special = [op for op in explicit if not is_for_all(op)]
    most = [op for op in special if op.name in ONLY_ON] or special or explicit
    chips = ONLY_ON.get(most[0].name, (HOPPER.arch,)) if special else SINCE_AMPERE
    if most and chip.arch not in chips:
        op = most[0]
        needed = " or ".join(chips)
        raise UnsupportedError(
            f"backend 'cuda' supports {op.name} only on {needed}, the chip is "
            f"{chip.arch}",
            [("kernel", kernel.name)],
            op.loc or kernel.loc,
            f"run it on an {needed} GPU, or with interpret=pl.Checked()",
        )
    if not explicit or any(op.name == "roles" for op in walk(pipeline.body)):
        return kernel
    body = pipeline.body
    memory = [op for op in body.ops if op.name == "alloc"]
    rest = Block((), tuple(op for op in body.ops if op.name != "alloc"))
    notes = {"cuda.names": ("wg",), "cuda.warpgroups": (1,)}
    role = Op("roles", attrs=notes, regions=(rest,), loc=pipeline.op.loc)
    block = Block(body.params, (*memory, role))
    return with_pipeline(kernel, pipeline.with_(body=block).to_op())


def stores_at_once(kernel: Kernel) -> Kernel:
    """Stores to other thread blocks that are done when they are started: the stores,
    then the arrival, which a fence orders. They could land later; none has to."""

    def change(op: Op, b: Rewriter) -> tuple[Value, ...] | None:
        if op.name != "async_store":
            return None
        if op.attrs["atomic"] is not None:
            raise UnsupportedError(
                "backend 'cuda' has no atomics: async_store_smem(atomic=...)",
                [("kernel", kernel.name)],
                op.loc or kernel.loc,
                "store to a part of its own for each thread block, and add them up",
            )
        value, target, barrier = op.operands
        b.store(target, value)
        b.emit("barrier_expect", barrier, bytes=0)
        return ()

    return map_ops(kernel, change)


def share_core(kernel: Kernel, chip: Gpu) -> Kernel:
    """Let two programs share an SM if one warpgroup of each multiplies.

    A single one leaves the tensor cores idle while it does the rest. The number of
    registers of a warpgroup affects no result, so the copying ones get the minimum and
    the multiplying one the rest of its program's half.
    """
    pipeline = Pipeline.of(find_pipeline(kernel))
    roles = [op for op in pipeline.body.ops if op.name == "roles"]
    if not roles or "cuda.registers" in roles[0].attrs:
        return kernel
    wanted = [
        {op.attrs["more"] for op in walk(region) if op.name == "set_registers"}
        for region in roles[0].regions
    ]
    if sorted(map(list, wanted)) != [[False]] * (len(wanted) - 1) + [[True]]:
        return kernel
    all_roles = chip.registers // (PROGRAMS * WARPGROUP)
    registers = all_roles - FEWEST_REGISTERS * (len(wanted) - 1)
    tiles = LiveTiles(kernel).peak_words() // WARPGROUP
    if tiles + OTHER_REGISTERS > registers or not _fits_twice(pipeline.body, chip):
        return kernel

    def change(op: Op, b: Rewriter) -> tuple[Value, ...] | None:
        if op.name == "set_registers":
            most = registers if op.attrs["more"] else FEWEST_REGISTERS
            count = min(op.attrs["count"], most)
            b.ops.append(replace(op, attrs={**op.attrs, "count": count}))
            return ()
        if op.name == "roles":
            b.ops.append(replace(op, attrs={**op.attrs, "cuda.per_core": PROGRAMS}))
            return ()
        return None

    return map_ops(kernel, change)


def rounds(kernel: Kernel, chip: Gpu) -> Kernel:
    """Let thread blocks run several programs, so that each is set up once.

    Building the tensor maps takes two trips to L2, a microsecond, and later thread
    blocks on an SM would have to repeat it. This is only for programs that take equally
    long (the chip balances others better), and only if the number that runs
    concurrently is certain.
    """
    pipeline = Pipeline.of(find_pipeline(kernel))
    known = [n for n in pipeline.grid if n is not None]
    if len(known) < len(pipeline.grid) or CLUSTER in pipeline.semantics:
        return kernel
    names = [op.name for op in pipeline.body.ops if op.name not in BEFORE_ROLES]
    if names != ["roles"]:
        return kernel
    (roles,) = (op for op in pipeline.body.ops if op.name == "roles")
    constants = {op.result for op in walk(pipeline.body) if op.name == "constant"}
    is_authored = "cuda.registers" not in roles.attrs
    if not is_authored or not all(_can_repeat(r, constants) for r in roles.regions):
        return kernel
    blocks = chip.cores * _programs_at_a_time(pipeline.body, roles, chip)
    if not 0 < blocks < prod(known) or not _leaves_registers(kernel, roles):
        return kernel
    attrs = {**pipeline.op.attrs, BLOCKS: blocks}
    return with_pipeline(kernel, replace(pipeline.op, attrs=attrs))


def all_at_once(kernel: Kernel, chip: Gpu) -> Kernel:
    """Reject programs that wait for each other and that the chip cannot run at once.

    A thread block holds its place until it ends, so one that has no place would be
    waited for forever. Where several have to share an SM, the launch bounds leave them
    the registers for it. How many clusters fit depends on which SMs a chip has: half of
    the SMs are certain.
    """
    if not between_programs(kernel) and not talks_to_devices(kernel.body):
        return kernel
    pipeline = Pipeline.of(find_pipeline(kernel))
    sizes = [n for n in pipeline.grid if n is not None]
    programs, places = prod(sizes), chip.cores
    if CLUSTER in pipeline.semantics:
        places //= 2
    per_core = -(-programs // places)
    roles = next((op for op in pipeline.body.ops if op.name == "roles"), None)
    if roles is None:  # nothing is waited for
        return kernel
    is_known = len(sizes) == len(pipeline.grid)
    if not is_known or not _share(pipeline.body, roles, per_core, chip):
        raise UnsupportedError(
            "thread blocks that wait for each other have to run at the same time: "
            f"{chip.name} has no room for {programs}",
            [
                ("kernel", kernel.name),
                ("SMs", chip.cores),
                ("shared memory of a thread block", _shared_bytes(pipeline.body)),
            ],
            kernel.loc,
            f"use a grid of at most {places} programs, each of which loops over work "
            "(plgpu.nd_loop)",
        )
    most = max(per_core, roles.attrs.get("cuda.per_core", 1))

    def change(op: Op, b: Rewriter) -> tuple[Value, ...] | None:
        if op.name != "roles":
            return None
        b.ops.append(replace(op, attrs={**op.attrs, "cuda.per_core": most}))
        return ()

    return map_ops(kernel, change)


def _share(body: Block, roles: Op, count: int, chip: Gpu) -> bool:
    """Whether an SM certainly has room for that many thread blocks."""
    if count <= 1:
        return True
    threads = count * sum(roles.attrs["cuda.warpgroups"]) * WARPGROUP
    exchanged = any(op.name == "set_registers" for op in walk(body))
    fits = count * (OTHER_BYTES + _shared_bytes(body)) <= chip.shared.bytes
    return fits and not exchanged and threads <= MOST_THREADS


def _programs_at_a_time(body: Block, roles: Op, chip: Gpu) -> int:
    """How many programs share an SM; 0 if that is not certain.

    A thread has at most the registers that the launch bounds allow, and exactly that
    many if roles exchange them. Shared memory is slightly more than what is allocated.
    """
    threads = sum(roles.attrs["cuda.warpgroups"]) * WARPGROUP
    share = chip.registers // roles.attrs.get("cuda.per_core", 1) // threads
    registers = min(share // GRANULE * GRANULE, chip.registers_per_thread + 1)
    by_registers, bytes_ = chip.registers // (registers * threads), _shared_bytes(body)
    fewest = min(by_registers, chip.shared.bytes // (bytes_ + OTHER_BYTES))
    most = chip.shared.bytes // max(bytes_, 1)
    if any(op.name == "set_registers" for op in walk(body)):
        most = min(most, by_registers)
    return fewest if fewest == most else 0


def _leaves_registers(kernel: Kernel, roles: Op) -> bool:
    """Whether tiles leave room for what a loop over programs keeps in registers.

    Only an author who asks for registers counts on using them all.
    """
    ops = (op for region in roles.regions for op in walk(region))
    counts = [op.attrs["count"] for op in ops if op.name == "set_registers"]
    tiles = LiveTiles(kernel).peak_words() // WARPGROUP
    return not counts or tiles + REPEATED_REGISTERS <= max(counts)


def _can_repeat(role: Block, constants: set[Value]) -> bool:
    """Whether threads may run a role repeatedly, and all programs take equally long."""
    ops = list(walk(role))
    bounds = [v for op in ops if op.name == "for" for v in Loop.of(op).bounds]
    once = ONLY_ONCE & {op.name for op in ops}
    if once or not constants.issuperset(bounds):
        return False
    # Registers are exchanged before the first program: nothing may precede that.
    exchanges = [op for op in ops if op.name == "set_registers"]
    effects = [op for op in role.ops if not is_pure(op)]
    return exchanges in ([], effects[:1]) and not _copies_out(role, NO_COPIES)


def _copies_out(block: Block, before: frozenset[str]) -> frozenset[str]:
    """The copies out of shared memory that may not have been waited for.

    They are "open" until committed to a group, and "grouped" until a wait for all
    groups.
    """
    left = before
    for op in block.ops:
        if op.name == "copy_start" and op.operands[1].ref.space != "smem":
            left |= {"open"}
        elif op.name == "bulk_commit" and left:
            left = frozenset({"grouped"})
        elif op.name == "bulk_wait" and op.attrs["pending"] == 0:
            left -= {"grouped"}
        elif op.name == "cond":
            left = NO_COPIES.union(*(_copies_out(each, left) for each in op.regions))
        else:  # a loop, whose trip count may be zero
            left = left.union(*(_copies_out(each, left) for each in op.regions))
    return left


def _shared_bytes(body: Block) -> int:
    """The shared memory that a program allocates."""
    memory = [op.result.ref for op in body.ops if op.name == "alloc"]
    sizes = [ref.size * ref.dtype.bytes for ref in memory]
    return sum(-(-n // ALIGNMENT) * ALIGNMENT for n in sizes)


def _fits_twice(body: Block, chip: Gpu) -> bool:
    """Whether shared memory suffices for two programs."""
    return PROGRAMS * (OTHER_BYTES + _shared_bytes(body)) <= chip.shared.bytes
