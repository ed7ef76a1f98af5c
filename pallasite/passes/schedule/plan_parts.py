"""plan_parts: which kernels a call runs as.

`plan(kernel, chip)` is asked once per kernel and chip, before a backend's own passes.
On a GPU, products that programs would compute again become kernels of their own
(`products_apart.py`). Otherwise a sequential axis may be split into parts. A kernel
that already fills the chip's cores stays as it is, and so does one that would
not get faster by the estimate of `analysis/cost.py`. Where an axis remains serial that
could have filled the chip, the plan has the reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, prod

from pallasite.errors import ChipMemoryError, InternalError
from pallasite.ir.nodes import Block, Kernel, Loc, Op, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import producers_of
from pallasite.ir.roles import Loop, Pipeline, number_of
from pallasite.passes.analysis.axis_state import AxisState, state_along
from pallasite.passes.analysis.cost import UNKNOWN_ROUNDS, bytes_of, cost, seconds
from pallasite.passes.analysis.grid import GridInfo, analyze, find_pipeline
from pallasite.passes.analysis.loop_dims import LoopDims
from pallasite.passes.analysis.memory import constant_inputs
from pallasite.passes.normal.loop_axes import loop_axes, only_merges
from pallasite.passes.normal.loop_steps import loop_steps
from pallasite.passes.run import run
from pallasite.passes.schedule.commuting_steps import (
    commuting_steps,
    first_stores,
    in_any_order,
    starts_apart,
)
from pallasite.passes.schedule.gpu_blocks import for_gpu, seconds_of_products
from pallasite.passes.schedule.last_writers import at_once, last_writers, names_places
from pallasite.passes.schedule.products_apart import apart
from pallasite.passes.schedule.reductions_apart import first_reduction
from pallasite.passes.schedule.reductions_in_steps import reductions_in_steps
from pallasite.passes.schedule.split_axis import (
    Program,
    Result,
    Step,
    even_parts,
    split,
)
from pallasite.passes.schedule.states_in_scratch import states_in_scratch
from pallasite.passes.schedule.steps_by_block import by_block, steps_by_block
from pallasite.passes.schedule.summed_states import summed_states
from pallasite.passes.schedule.whole_rows import ENOUGH, whole_rows
from pallasite.target import Chip, Gpu, Host, Machine, chips

GAIN = 1.5  # estimated, of a split that is made
# Matmuls are scheduled as a whole, and blocks of their results may yet be divided.
GAIN_OF_PRODUCTS = 4.0
# Of those that take as long as so many launches, the best blocks say more.
MANY_LAUNCHES = 80
# Of programs of which some have more to do than others, and of those at most so many
# per core.
GAIN_OF_EVEN, FEW = 1.15, 4
SMALL_BYTES = 1 << 22  # of states, for which any number of parts may have their own
SOONER = 0.9  # fewer parts are chosen if that saves a tenth
SORTING = 10  # launches that sorting steps takes as long as
SERIAL_SECONDS = 5e-4  # of a kernel whose idle cores are worth a warning
IDLE = 8  # how many times more cores than programs are worth one


@dataclass(frozen=True)
class Serial:
    """Why an axis, or all of a kernel, runs in order although cores are idle.

    `asked`: because its semantics say so, as an author's or those of a derivative.
    """

    axis: int | None
    reason: str
    loc: Loc | None
    asked: bool = False


@dataclass(frozen=True)
class Plan:
    """What to do with a kernel's sequential axes.

    Attributes:
        program: the kernels that replace it; None: it stays as it is.
        why: what they are, for tools.
        axis: what was split, if an axis was.
        parts: into how many.
        kind: what the axis carries.
        serial: why cores stay idle, if they do.
    """

    program: Program | None = None
    why: str = ""
    axis: int | None = None
    parts: int = 1
    kind: str = ""
    serial: Serial | None = None


def plan(kernel: Kernel, chip: Chip | Host | None) -> Plan:
    """How to run a kernel on a chip.

    Args:
        kernel: as imported.
        chip: what it is compiled for; only GPUs and CPUs have kernels split.
    """
    if isinstance(chip, Chip) and chips().get(chip.name) is chip:
        return _plan_by_name(kernel, chip.name)
    return (
        _plan_on_host(kernel, chip) if isinstance(chip, Host) else _plan(kernel, chip)
    )


@lru_cache(maxsize=1024)
def _plan_by_name(kernel: Kernel, name: str) -> Plan:
    return _plan(kernel, chips()[name])


@lru_cache(maxsize=1024)
def _plan_on_host(kernel: Kernel, host: Host) -> Plan:
    return _plan(kernel, host)


def _plan(kernel: Kernel, chip: Chip | Host | None) -> Plan:
    if not isinstance(chip, Gpu | Host) or _cores(chip) < 2:
        return Plan()
    found = _of_axes(kernel, chip)
    if found.program is None and _is_long(kernel := run(kernel), chip):
        programs = _programs(kernel, chip)
        if not _is_idle(kernel, chip, programs):
            return found
        stepped = reductions_in_steps(kernel)
        of_steps = Plan() if stepped is kernel else _of_steps(stepped, chip)
        if of_steps.program is not None:
            return of_steps
        found = _apart(kernel, chip, programs) or found
        if found.program is None:
            serial = found.serial or of_steps.serial
            if stepped is kernel and serial is None:
                serial = _undivided(kernel, chip, programs)
            return replace(found, serial=serial)
    return found


def _undivided(kernel: Kernel, chip: Gpu | Host, programs: int) -> Serial | None:
    """That a kernel has few programs, if that is worth a warning."""
    idle = _cores(chip) >= IDLE * programs and _is_wasteful(kernel, chip, programs)
    if not idle and not _is_in_turn(kernel, chip, programs):
        return None
    of = "one program does" if programs == 1 else f"{programs} programs do"
    return Serial(None, f"what {of} cannot be divided", None)


def _is_in_turn(kernel: Kernel, chip: Gpu | Host, programs: int) -> bool:
    """Whether half of a GPU's cores would be idle, while programs wait for each load of
    a long loop, which takes far longer than all cores take for the same bytes."""
    if not isinstance(chip, Gpu) or chip.cores < 2 * programs:
        return False
    pipeline, info = Pipeline.of(find_pipeline(kernel)), analyze(kernel)
    rounds = prod(info.axes[a].size or 1 for a in info.sequential)
    rounds *= max(_rounds(pipeline.body), 1)
    machine, moved = Machine.usual(chip), cost(kernel).bytes_accessed
    least = max(machine.copying(moved), SERIAL_SECONDS)
    return machine.kernel(0, 0, 0, rounds, 1) >= IDLE * least


def _rounds(block: Block) -> int:
    """How many iterations a program waits for, one after another, if all is known."""
    made, total = producers_of(block), 0
    for op in block.ops:
        inside = max(map(_rounds, op.regions), default=0)
        if op.name == "for":
            first, limit, step = (number_of(made, v) for v in Loop.of(op).bounds)
            if first is not None and limit is not None and step:
                inside = max(inside, 1) * len(range(first, limit, step))
        total += inside
    return total


def _apart(kernel: Kernel, chip: Gpu | Host, programs: int) -> Plan | None:
    """What depends on a reduction as a kernel of its own, if that is faster."""
    cut = first_reduction(kernel)
    if cut is None:
        return None
    count = len(kernel.inputs)
    number = {ref: n for n, ref in enumerate((*kernel.inputs, cut.array))}
    both = (cut.first, cut.second)
    steps = [Step(k, tuple(number[ref] for ref in k.inputs)) for k in both]
    results = [Result(count + 1 + n) for n in range(kernel.num_outputs)]
    program = Program(tuple(steps), tuple(results))
    for n in (1, 0):
        inner = _plan(both[n], chip).program
        if inner is not None and not any(result.last for result in inner.results):
            program = program.with_step(n, inner, count)
    after = _overhead(chip, len(program.kernels) - 1)
    after += sum(seconds(k, chip, _programs(run(k), chip)) for k in program.kernels)
    if seconds(kernel, chip, programs) < GAIN * after:
        return None
    return Plan(program, "what depends on a reduction is a kernel of its own")


def _of_axes(kernel: Kernel, chip: Gpu | Host) -> Plan:
    """What to do with the axes that the kernel's grid has."""
    merges = isinstance(chip, Gpu) and any(
        op.name == "atomic_rmw" for op in walk(kernel.body)
    )
    unordered = merges or (isinstance(chip, Gpu) and names_places(kernel))
    if not (unordered or any(_long_axes(kernel))):
        return Plan()
    kernel = run(kernel)
    if unordered:
        made = loop_axes(kernel, _is_unordered)
        kernel = made if merges or _at_places(made) else kernel
        if not any(_long_axes(kernel)):
            return _after_starts(kernel, chip)
    if isinstance(chip, Gpu):
        kernel = summed_states(whole_rows(kernel, chip))
        if not any(_long_axes(kernel)):
            return Plan()
        program = apart(kernel, chip)
        if program is not None:
            return Plan(program, "each product is computed once")
        kernel = loop_steps(kernel)
    return _of_steps(kernel, chip)


def _after_starts(kernel: Kernel, chip: Gpu | Host) -> Plan:
    """The steps of a loop at once, after a kernel for what is stored before it."""
    program = starts_apart(kernel)
    found = Plan() if program is None else _plan(program.kernels[1], chip)
    if program is None or found.program is None:
        return Plan()
    program = program.with_step(1, found.program, len(kernel.inputs))
    return replace(found, program=program)


def _is_unordered(kernel: Kernel) -> bool:
    return only_merges(kernel) or _at_places(kernel)


def _at_places(kernel: Kernel) -> bool:
    """Whether steps may run at once that change places which memory names."""
    found = last_writers(kernel) is not None
    return found or (names_places(kernel) and steps_by_block(kernel) is not None)


def _is_long(kernel: Kernel, chip: Gpu | Host) -> bool:
    """Whether a kernel of parallel programs takes long on few cores."""
    pipelines = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != TILE or len(pipelines) != 1:
        return False
    if "sequential" in Pipeline.of(pipelines[0]).semantics:
        return False
    info = analyze(kernel)
    programs = prod(info.axes[a].size or 1 for a in info.parallel)
    if programs >= _cores(chip):
        return False
    return seconds(kernel, chip, programs) >= GAIN * _overhead(chip, 2)


def _is_idle(kernel: Kernel, chip: Gpu | Host, programs: int) -> bool:
    """Whether a kernel leaves cores idle though its blocks are divided."""
    enough = ENOUGH if isinstance(chip, Gpu) and _only_adds(kernel) else 1
    return programs < enough * _cores(chip)


def _programs(kernel: Kernel, chip: Gpu | Host) -> int:
    """How many programs there may be once blocks are divided."""
    if isinstance(chip, Gpu):
        return _when_divided(kernel, chip)
    info, found = analyze(kernel), LoopDims(kernel)
    free = prod(d.size for d in found.dims if found.why_not_free(d) is None)
    return free * prod(info.axes[a].size or 1 for a in info.parallel)


def _of_steps(kernel: Kernel, chip: Gpu | Host) -> Plan:
    """What to do with the sequential axes of a kernel."""
    cores = _cores(chip)
    info = analyze(kernel)
    programs = prod(info.axes[a].size or 1 for a in info.parallel)
    uneven = isinstance(chip, Gpu) and programs < FEW * cores and _is_uneven(kernel)
    if programs >= cores and not uneven:
        return Plan()
    if isinstance(chip, Gpu) and names_places(kernel):
        places = last_writers(kernel, info) or commuting_steps(kernel, info)
        found = None if places else _by_block(kernel, info, chip, programs)
        if found is not None and found.parts * programs >= cores:
            return found
    if isinstance(chip, Gpu) and _divides_well(kernel, chip):
        return Plan()
    serial = best = asked = None
    for axis in info.sequential:
        if (info.axes[axis].size or 0) < 2:
            continue
        if Pipeline.of(find_pipeline(kernel)).semantics[axis] == "sequential":
            asked = _asked(info, axis) if isinstance(chip, Gpu) else None
            continue
        of, state = kernel, state_along(kernel, axis, info)
        if state.reason:
            stored = states_in_scratch(kernel, axis, info)
            again = state if stored is kernel else state_along(stored, axis)
            if again.reason:
                serial = serial or Serial(axis, state.reason, state.loc)
                continue
            of, state = stored, again
        found = _best(of, info, state, chip, programs, uneven)
        if found is not None and found.parts * programs >= cores:
            return found
        best = best or found
        if serial is None and found is None:
            why = f"parts of its {state.kind} would take longer to merge than they save"
            serial = Serial(axis, why, None)
    if best is not None:
        best = _in_more_parts(best, kernel, chip)
    unordered = _in_any_order(kernel, info, chip, programs)
    if unordered is not None or best is not None:
        return unordered or best or Plan()
    if (serial := serial or asked) is not None:
        waits = _is_in_turn(kernel, chip, programs)
        if waits or _is_wasteful(kernel, chip, programs):
            return Plan(serial=serial)
    return Plan()


def _asked(info: GridInfo, axis: int) -> Serial:
    """That semantics forbid an axis to be split."""
    moves = (m for m in info.windows if m.written and axis not in m.own)
    names = " and ".join(dict.fromkeys(m.name for m in moves)) or "scratch"
    return Serial(axis, f"its steps may change the same part of {names}", None, True)


def _in_more_parts(found: Plan, kernel: Kernel, chip: Gpu | Host) -> Plan:
    """A plan whose parts are too few for the cores, with parts along another axis."""
    assert found.program is not None
    inner = _plan(found.program.kernels[0], chip)
    if inner.program is None or any(result.last for result in inner.program.results):
        return found
    program = found.program.with_step(0, inner.program, len(kernel.inputs))
    parts = found.parts * inner.parts
    return replace(found, program=program, why=f"{found.why}; {inner.why}", parts=parts)


def _in_any_order(
    kernel: Kernel, info: GridInfo, chip: Gpu | Host, programs: int
) -> Plan | None:
    """All steps at once where nobody can tell their order, if that is faster.

    Only on GPUs: their caches add floats at the rate at which they store them.
    """
    if not isinstance(chip, Gpu):
        return None
    if (found := commuting_steps(kernel, info)) is not None:
        program, kind = in_any_order(kernel, found), "atomics in any order"
        what = "only merges by atomics: its steps run in any order"
    elif (found := last_writers(kernel, info)) is not None:
        program, kind = at_once(kernel, found), "last writers"
        what = "stores where memory says: its steps run at once, the last one stores"
    else:
        return _by_block(kernel, info, chip, programs)
    known = prod(info.axes[a].size or UNKNOWN_ROUNDS for a in found.axes)
    after = _overhead(chip, len(program.kernels) - 1)
    after += sum(seconds(k, chip, programs * known) for k in program.kernels)
    if seconds(kernel, chip, programs) < GAIN * after:
        return None
    names = ", ".join(f"i{a}" for a in found.axes)
    why = f"{names} ({known} steps) {what}"
    return Plan(program, why, found.axes[0], known, kind)


def _by_block(kernel: Kernel, info: GridInfo, chip: Gpu, programs: int) -> Plan | None:
    """The steps of each block in a program of its own, if that is faster; after what
    the first step stores to whole results."""
    found, starts = steps_by_block(kernel, info), None
    if found is None and (starts := first_stores(kernel, info)) is not None:
        found = steps_by_block(starts.kernels[1])
    if found is None:
        return None
    program, typical = by_block(found)
    busy = programs * min(found.blocks, found.steps)
    after = _overhead(chip, SORTING) + seconds(typical, chip, busy)
    if starts is not None:
        program = starts.with_step(1, program, len(kernel.inputs))
        after += seconds(program.kernels[0], chip, _cores(chip))
    if seconds(kernel, chip, programs) < GAIN * after:
        return None
    names = ", ".join(f"i{a}" for a in found.axes)
    why = f"the steps of {names} are sorted by the block that they see"
    return Plan(program, why, found.axes[0], found.blocks, "steps by block")


def _cores(chip: Chip | Host | None) -> int:
    return 1 if chip is None else Machine.usual(chip).cores


def _long_axes(kernel: Kernel) -> Iterator[bool]:
    """Whether an axis has several steps, for each; nothing if it is no plain grid."""
    try:
        grid = Pipeline.of(find_pipeline(kernel)).grid
    except InternalError:
        return
    for n in grid:
        yield n is None or n > 1


def _is_wasteful(kernel: Kernel, chip: Gpu | Host, programs: int) -> bool:
    idle = _cores(chip) >= min(IDLE, 2 if isinstance(chip, Host) else IDLE) * programs
    return idle and seconds(kernel, chip, programs) >= SERIAL_SECONDS


def _divides_well(kernel: Kernel, chip: Gpu) -> bool:
    """Whether there are enough programs once blocks are divided, of code that only
    loads and adds: its blocks are chosen without regard to programs."""
    return _only_adds(kernel) and _when_divided(kernel, chip) >= ENOUGH * chip.cores


def _only_adds(kernel: Kernel) -> bool:
    """Whether nothing else needs to be computed while programs wait for memory."""
    has_products = any(op.name == "dot" for op in walk(kernel.body))
    return not has_products and not cost(kernel).transcendentals


def _when_divided(kernel: Kernel, chip: Gpu) -> int:
    """How many programs there are once blocks are divided into what a program holds,
    with whole rows where steps go through them."""
    try:
        info = analyze(for_gpu(whole_rows(kernel, chip), chip))
    except ChipMemoryError:
        return 1
    return prod(info.axes[a].size or 1 for a in info.parallel)


def _is_uneven(kernel: Kernel) -> bool:
    """Whether numbers in operands, such as lengths, decide which steps do something."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    given = constant_inputs(kernel)
    given |= {each.block for each in pipeline.shown if each.array in given}
    read = set[Value]()
    for op in pipeline.body.ops:
        is_number = op.name == "load" and not op.result.tile.shape
        is_given = is_number and op.operands[0] in given
        if is_given or any(v in read for v in op.operands):
            read.update(op.results)
        if op.name == "cond" and op.operands[0] in read and _computes(op):
            return True
    return False


def _computes(op: Op) -> bool:
    inside = (v for r in op.regions for each in walk(r) for v in each.results)
    return any(not v.is_ref and v.tile.shape for v in inside)


def _best(
    kernel: Kernel,
    info: GridInfo,
    state: AxisState,
    chip: Gpu | Host,
    programs: int,
    uneven: bool,
) -> Plan | None:
    """The fastest number of parts, if one is faster than no split."""
    size = info.axes[state.axis].size or 1
    before = seconds(kernel, chip, programs, uneven)
    has_products = any(op.name == "dot" for op in walk(kernel.body))
    gain = GAIN_OF_PRODUCTS if has_products else GAIN
    # Programs that wait for the longest one are not computing.
    gain = min(gain, GAIN_OF_EVEN) if uneven else gain
    if before < gain * _overhead(chip, 2):
        return None
    found: tuple[float, int, Program] | None = None
    tried = set[int]()
    for wanted in _candidates(chip, programs, size, uneven):
        parts = even_parts(size, min(wanted, _most(kernel, state)))
        if parts < 2 or parts in tried:
            continue
        tried.add(parts)
        program = split(kernel, state, parts)
        first, *others = program.kernels
        after = _overhead(chip, len(others))
        after += seconds(first, chip, programs * parts, uneven)
        for other in others:
            again = state.prefix and other is others[-1]
            many = programs * parts if again else _cores(chip)
            after += seconds(other, chip, many)
        if found is None or after < SOONER * found[0]:
            found = after, parts, program
    if found is None:
        return None
    _, parts, program = found
    if before < gain * found[0]:
        if not has_products or not isinstance(chip, Gpu) or uneven:
            return None
        if not _gains_with_blocks(kernel, program, chip):
            return None
    why = f"i{state.axis} ({size} steps, {state.kind}) runs as {parts} parts"
    return Plan(program, why, state.axis, parts, state.kind)


def _gains_with_blocks(kernel: Kernel, program: Program, chip: Gpu) -> bool:
    """Whether a long kernel's matmuls are faster in parts, with the best blocks."""
    first, *others = program.kernels
    own, after = (seconds_of_products(k, chip)[1] for k in (kernel, first))
    after += sum(seconds(other, chip, chip.cores) for other in others)
    after += _overhead(chip, len(others))
    return _overhead(chip, MANY_LAUNCHES) <= own < inf and own >= GAIN * after


def _candidates(
    chip: Gpu | Host, programs: int, size: int, uneven: bool
) -> Iterator[int]:
    """Numbers of parts to compare: more of them first, which are spread more evenly."""
    per_core = (chip.programs_per_core, 2, 1) if isinstance(chip, Gpu) else (2, 1)
    if uneven:  # those that are done early are followed by others
        per_core = (4 * per_core[0], 2 * per_core[0], per_core[0])
    for each in per_core:
        yield min(size, -(-each * _cores(chip) // programs))


def _most(kernel: Kernel, state: AxisState) -> int:
    """How many parts' states take no more memory than what the kernel moves anyway."""
    arrays = Pipeline.of(find_pipeline(kernel)).arrays
    held = [
        s.ref.ref if s.output is None else arrays[s.output].ref for s in state.states
    ]
    one = sum(bytes_of(ref) for ref in held)
    return max(cost(kernel).bytes_accessed, SMALL_BYTES) // max(one, 1)


def _overhead(chip: Gpu | Host, launches: int) -> float:
    """Seconds that further kernels take besides their work."""
    # The first kernel of a CPU wakes its threads, too.
    return Machine.usual(chip).launch * (launches + isinstance(chip, Host))
