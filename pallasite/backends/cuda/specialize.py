"""specialize: warp specialisation of programs with matmuls into concurrent roles.

In: a kernel after `promote` (programs, loops, values). Out: a persistent grid of as
many programs as the chip has SMs, in each of which one thread copies operands of
matmuls into ring buffers in shared memory (role "load") and whole warpgroups do
everything else (role "compute"). They also multiply, unless accumulators are in tensor
memory: then one thread does (role "multiply"). All run the same programs in the same
order; mbarriers pass the slots of rings from one to the other.

The loading role is the program without everything that no copy needs (`Loading`). The
computing role is the program with its loads replaced by waits and its matmuls by
`wgmma`, which are waited for at the first use of their result (`Computing`), or with
its matmuls left to the multiplying role (`Issuing`, `Finishing`). Nothing here depends
on what the matmuls are for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from pallasite.backends.cuda.block_pairs import PAIR, halve, pair_axis
from pallasite.backends.cuda.clusters import CLUSTER
from pallasite.backends.cuda.computing import Computing
from pallasite.backends.cuda.finishing import Finishing
from pallasite.backends.cuda.issuing import Issuing
from pallasite.backends.cuda.loading import Loading
from pallasite.backends.cuda.order import Order
from pallasite.backends.cuda.products import Plan
from pallasite.backends.cuda.rings import Ring, RingMemory
from pallasite.backends.cuda.roles import Role
from pallasite.backends.cuda.tensor_sums import TensorPlan
from pallasite.ir.build import Builder
from pallasite.ir.levels import with_level
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import clone, inline
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import INDEX, TileType
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.lower.promote import promote_refs
from pallasite.passes.optimise.unused import drop_unused
from pallasite.target import Gpu

LOAD, MULTIPLY, COMPUTE = "load", "multiply", "compute"
MANY = 200  # registers for tiles, which are nearly all


def specialize(kernel: Kernel, chip: Gpu) -> Kernel:
    """Roles instead of a program, where it has matmuls."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    if not any(op.name == "dot" for op in walk(pipeline.body)):
        return kernel
    plan = Plan(kernel, pipeline.body, chip)
    where = _places(plan, pipeline, chip)
    memory, roles = _roles(plan)
    inner = Builder(pipeline.op.loc)
    inner.ops += memory
    if plan.is_paired:
        inner.emit("cluster_barrier")
    ids, regions = [Value(INDEX, "block"), Value(INDEX, "rank")], []
    ids = ids[: len(where.grid)]
    for role in roles.values():
        alone = _persistent(kernel, pipeline, role, where)
        made = Pipeline.of(find_pipeline(drop_unused(promote_refs(alone))))
        same = dict(zip(made.ids, ids, strict=True))
        regions.append(clone(Block((), made.body.ops), same))
    for region in regions[:-1]:
        _check_scalar(plan, region)
    # A second single thread is in the first one's warpgroup.
    notes = {
        "cuda.names": tuple(roles),
        "cuda.warpgroups": (1, *(0 for _ in regions[2:]), plan.warpgroups),
        "cuda.registers": _registers(plan),
        "cuda.per_core": plan.per_core,
    }
    inner.ops.append(
        Op("roles", attrs=notes, regions=tuple(regions), loc=pipeline.op.loc)
    )
    return _with_program(kernel, pipeline, inner.block(ids), where)


@dataclass(frozen=True)
class _Places:
    """Where programs run: in how many thread blocks, or pairs of them, in which order.

    The first and second block of a pair have neighbours along `axis`.
    """

    order: Order
    count: int
    axis: int | None

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.count,) if self.axis is None else (self.count, PAIR)


def _places(plan: Plan, pipeline: Pipeline, chip: Gpu) -> _Places:
    axis, grid = pair_axis(plan, pipeline), pipeline.grid
    most = chip.cores * plan.per_core
    if axis is not None and most >= PAIR:
        halve(plan)
        plan.is_paired = True
        plan.choose_stages()
        halved = (n // PAIR if d == axis and n else n for d, n in enumerate(grid))
        pipeline, most = pipeline.with_(grid=tuple(halved)), most // PAIR
    else:
        axis = None
    programs = prod(n for n in pipeline.grid if n is not None)
    count = min(programs, most)
    plan.repeats = programs > count
    return _Places(Order.of(pipeline, count), count, axis)


def _roles(plan: Plan) -> tuple[Sequence[Op], dict[str, Role]]:
    """The roles by name, and the allocations of what they pass to each other."""
    warps = 4 * plan.warpgroups
    if not plan.set.has_tensor_memory:
        memory = RingMemory(plan.rings, lambda ring: warps)
        computing = Computing(plan, memory)
        return memory.ops, {LOAD: Loading(plan, memory), COMPUTE: computing}

    def arrivals(ring: Ring) -> int:
        """A commit, and the warps where threads load tiles as well."""
        return 1 + (warps if ring.loaded else 0)

    memory, b = RingMemory(plan.rings, arrivals), Builder()
    tensors = TensorPlan(plan, b)
    memory.zeros_after_rows(b)  # before there are roles: another one reads them
    return [*memory.ops, *b.ops], {
        LOAD: Loading(plan, memory),
        MULTIPLY: Issuing(tensors, memory),
        COMPUTE: Finishing(tensors, memory),
    }


def _registers(plan: Plan) -> tuple[int, int] | None:
    """Registers of a thread that is alone in its role, and of the others."""
    key = plan.warpgroups, plan.per_core
    usual = plan.set.registers[key]
    is_full = plan.registers_of_a_step > MANY
    return plan.set.full_registers.get(key, usual) if is_full else usual


def _check_scalar(plan: Plan, body: Block) -> None:
    """A single thread has no tiles."""
    for op in walk(body):
        for value in op.results:
            if isinstance(value.type, TileType) and value.type.shape:
                plan.refuse(
                    plan.products[0].dot,
                    f"the addresses of its operands depend on a computed {value.type}",
                )


# --- the programs of one thread block, one after another ---


def _persistent(
    kernel: Kernel, pipeline: Pipeline, role: Role, where: _Places
) -> Kernel:
    """Each thread block runs its share of the programs."""
    order, blocks, axis = where.order, where.count, where.axis
    program = role.block(pipeline.body)
    turn, block = Value(INDEX, "turn"), Value(INDEX, "block")
    inside = Builder(pipeline.op.loc)
    number = order.program(inside, turn, block, blocks)
    ids = order.decoded(inside, number)
    if axis is not None:
        ids[axis] = inside.add(inside.mul(ids[axis], inside.index(PAIR)), role.rank)
    inline(inside, program, ids)
    body = Builder(pipeline.op.loc)
    body.ops += role.states
    first, step = body.index(0), body.index(1)
    limit = order.rounds(body, block, blocks)
    loop = Builder(pipeline.op.loc)
    loop.emit("for", first, limit, step, regions=(inside.block([turn]),))
    if isinstance(role, Issuing):
        role.in_first(loop, body)
    else:
        body.ops += loop.ops
    role.end(body)
    params = [block, role.rank][: len(where.grid)]
    return _with_program(kernel, pipeline, body.block(params), where)


def _with_program(
    kernel: Kernel, pipeline: Pipeline, body: Block, where: _Places
) -> Kernel:
    outside = Builder(pipeline.op.loc)
    outside.ops += [op for op in kernel.body.ops if op is not pipeline.op]
    notes = {k: v for k, v in pipeline.op.attrs.items() if "." in k}
    outside.emit(
        "pipeline",
        regions=(body,),
        grid=where.grid,
        windows=(),
        semantics=("parallel", CLUSTER)[: len(where.grid)],
        **notes,
    )
    return with_level(kernel.with_(body=outside.block()))
