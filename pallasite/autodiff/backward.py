"""Backward kernels: the cotangents of a kernel call, computed by generated kernels.

`cotangents` runs them; `plan` makes them, once per kernel. The path: the kernel as a
program (`normal_program.py`), its reverse (`reverse.py`), split into stages
(`backward_stages.py`), each as one or more kernels (`backward_windows.py`). They are
ordinary kernels: every backend runs them, and they can be batched and differentiated.
"""

import functools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from typing import Any

import jax.numpy as jnp

from pallasite.autodiff.backward_axes import split_axes
from pallasite.autodiff.backward_choice import Estimate, estimate, has_products, sum_of
from pallasite.autodiff.backward_kernels import groups, kernels_of, products_of
from pallasite.autodiff.backward_stages import Stages, split, sums_apart
from pallasite.autodiff.backward_windows import Built, apart, only, place
from pallasite.autodiff.edges import harmless_edges
from pallasite.autodiff.first_products import cut
from pallasite.autodiff.gather_overlaps import gather_overlaps
from pallasite.autodiff.loop_products import loop_products
from pallasite.autodiff.narrow_results import narrow_results
from pallasite.autodiff.normal_program import expected_cotangents, normal_program
from pallasite.autodiff.partial_sums import Sums, bytes_of
from pallasite.autodiff.rerolled import rerolled
from pallasite.autodiff.rescaled_sums import plain_sums
from pallasite.autodiff.residuals import keep
from pallasite.autodiff.reverse import Reversed, reverse_program
from pallasite.autodiff.reverse_rules import accumulated
from pallasite.autodiff.row_blocks import row_blocks
from pallasite.autodiff.scattered import Merge, merge_seconds, merged, scattered
from pallasite.autodiff.sink_broadcasts import sink_broadcasts
from pallasite.autodiff.sorted_steps import sorted_steps, with_row_views
from pallasite.autodiff.states_apart import states_apart
from pallasite.autodiff.unrounded import unrounded
from pallasite.autodiff.zero_cotangents import without
from pallasite.backends.base import Together, lowered_together
from pallasite.errors import NoBackwardKernel
from pallasite.ir import types as T
from pallasite.ir.nodes import Kernel, Value, walk
from pallasite.ir.rewrite import substitute
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.analysis.shared_operands import shared_operands
from pallasite.passes.lower.per_program import Program, kernel_of, main_refs
from pallasite.passes.optimise.fold_exp2 import fold_exp2
from pallasite.placement import chip_for
from pallasite.sharding.rule import Partition, inherit
from pallasite.target import Gpu, Machine

MOST_SCATTERED = 2  # times the bytes of operands and results
FEW_SCATTERED = 1 << 32  # bytes that any GPU has; adding in place would be in sequence
MOST_STATES = 4  # times the bytes of operands
KEPT_SHARE = 1 / 8  # of the bytes of operands and results, for residuals
UNREPEATABLE = ("debug_print", "debug_check", "delay", "atomic_rmw", "atomic_cas")


@dataclass(frozen=True)
class BackwardPlan:
    """The kernels that compute some cotangents of a kernel, in order."""

    steps: tuple[Built, ...]
    primals: tuple[Value, ...]  # the kernel's operands
    seeds: dict[int, Value]  # the refs of cotangents of results, by their position
    targets: dict[int, Value]  # the refs of wanted cotangents, by operand position
    changing: dict[int, Value]  # refs that start as seeds, by the result's position
    choices: tuple["Way", ...]  # all alternatives, the chosen one first
    machine: Machine  # for which it was chosen
    merges: tuple[Merge, ...] = ()  # of what programs scatter, after all steps

    @property
    def flowing(self) -> set[Value]:
        """The refs of all cotangents of results."""
        return {*self.seeds.values(), *self.changing.values()}


@dataclass(frozen=True)
class Way:
    """One way to divide the work among kernels, and its cost."""

    steps: tuple[Built, ...]
    estimate: Estimate
    stages: Stages
    merges: tuple[Merge, ...] = ()


@dataclass(frozen=True)
class KeepingPlan:
    """A forward kernel that keeps residuals, and the backward kernels that use them."""

    forward: Built  # the kernel's results, and `kept`
    kept: tuple[Value, ...]  # refs that no operand of the call holds
    results: tuple[Value, ...]  # the kernel's; the backward kernels read some
    known: tuple[bool, ...]  # the results whose cotangents it takes
    backward: BackwardPlan
    stages: tuple[Program, ...]  # of which its steps consist


def keeping(
    call: Any, primals: Sequence[Any], active: Sequence[bool]
) -> tuple[list[Any], list[Any]] | None:
    """Results of a call, and the residuals of the forward kernel for `cotangents`.

    None if it keeps nothing.

    Args:
        call: the `Call`.
        primals: the operands.
        active: those whose cotangents will be requested.
    """
    made = keeping_plan(call.kernel, tuple(active), _machine(call))
    if made is None:
        return None
    _note_together(made.forward.kernel, made.backward)
    arrays: dict[Value, Any] = dict(zip(made.backward.primals, primals, strict=True))
    names = _names(call.partition, made.backward)
    arrays |= _run(call, made.forward, arrays, names, set())
    results = [arrays[ref] for ref in made.results]
    return results, [arrays[ref] for ref in (*made.results, *made.kept)]


def cotangents(
    call: Any,
    primals: Sequence[Any],
    cotangents: Sequence[Any],
    wanted: Sequence[bool],
    kept: Sequence[Any] = (),
) -> list[Any]:
    """The cotangents of a call's operands, by backward kernels.

    Args:
        call: the `Call`; its options apply to the backward kernels too.
        primals: the operands.
        cotangents: of the results; None is zero, as for every integer result.
        wanted: the operands whose cotangents are requested.
        kept: what `keeping` returned for the same operands; or nothing.

    Returns:
        One array per operand; None where it is zero or was not requested.

    Raises:
        NoBackwardKernel: there is none; the message says which op and why.
    """
    known = tuple(c is not None for c in cotangents)
    if not any(known):
        return [None] * len(primals)
    machine = _machine(call)
    wanted = tuple(map(bool, wanted))
    keeps = keeping_plan(call.kernel, wanted, machine) if kept else None
    if keeps is not None and all(k for n, k in enumerate(keeps.known) if known[n]):
        made = using_kept(call.kernel, wanted, known, machine)
        there = (*keeps.results, *keeps.kept)
    else:
        made, there, kept = plan(call.kernel, wanted, known, machine), (), ()
        _note_together(call.kernel, made)
    arrays: dict[Value, Any] = dict(zip(made.primals, primals, strict=True))
    arrays |= dict(zip(there, kept, strict=True))
    arrays |= {ref: cotangents[n] for n, ref in made.seeds.items()}
    for n, ref in made.changing.items():
        start = cotangents[n]
        if start is None:
            start = jnp.zeros(ref.ref.shape, ref.ref.dtype.np)
        arrays[ref] = start.astype(ref.ref.dtype.np)
    names = _names(call.partition, made)
    over_rows = {r for n, r in made.targets.items() if n in _shared(call)}
    for step in made.steps:
        own = _for_any_batch(call, over_rows.issuperset(step.results))
        arrays |= _run(own, step, arrays, names, made.flowing)
    final = {ref: made.primals[n].ref.dtype for n, ref in made.targets.items()}
    run = partial(_run_plain, call)
    for merge in made.merges:
        target = merge.target
        arrays[target] = merged(merge, arrays, final[target], run, machine)
    found: list[Any] = [None] * len(primals)
    for n, ref in made.targets.items():
        if ref in arrays:
            found[n] = arrays[ref].astype(primals[n].dtype)
    return found


def _machine(call: Any) -> Machine:
    """What runs the kernels of a call."""
    machine = Machine.usual(chip_for(call.backend))
    return replace(machine, endless=call.options.batch_invariant)


def _shared(call: Any) -> frozenset[int]:
    """The operands whose cotangents are sums over rows, if that matters."""
    invariant = call.options.batch_invariant
    return shared_operands(call.kernel) if invariant else frozenset()


def _for_any_batch(call: Any, over_rows: bool) -> Any:
    """The call for results that are sums over rows: these depend on all of them."""
    if not over_rows:
        return call
    params = (p for p in call.compiler_params if p[0] != "batch_invariant")
    return replace(call, compiler_params=tuple(params))


def _note_together(forward: Kernel, made: BackwardPlan) -> None:
    """Note what is lowered soon after a forward kernel."""
    steps = [Together(s.kernel, s.taking(made.flowing)) for s in made.steps]
    lowered_together([Together(forward, ()), *steps])


def _run_plain(call: Any, kernel: Kernel, operands: Sequence[Any]) -> list[Any]:
    """Results of a kernel that is no part of the author's partitioning."""
    from pallasite.primitive import bind_call

    options = replace(call, kernel=kernel, cost_estimate=None, partition=None)
    options = replace(options, flowing=())
    return bind_call(options, operands)


def _names(
    rule: bool | Partition | None, made: BackwardPlan
) -> dict[Value, Sequence[str]]:
    """The author's names for dimensions of arrays and of their cotangents."""
    if not isinstance(rule, Partition):
        return {}
    return {
        **dict(zip(made.primals, rule.operands, strict=True)),
        **{ref: rule.operands[n] for n, ref in made.targets.items()},
        **{ref: rule.results[n] for n, ref in (made.seeds | made.changing).items()},
    }


def _run(
    call: Any,
    step: Built,
    arrays: dict[Value, Any],
    names: dict[Value, Sequence[str]],
    flowing: Collection[Value],
) -> dict[Value, Any]:
    """The results of one kernel; `flowing`: refs of cotangents that it may take.

    XLA has parts of its own for a sum of a whole array. Of one kernel's parts it makes
    sums of small rows, in one fusion with all that the kernel maps.
    """
    from pallasite.primitive import bind_call, on_arrays

    if step.steps is not None:
        arrays = arrays | step.steps.arrays(arrays)
    known = [names.get(ref, ()) for ref in (*step.operands, *step.results)]
    rule = inherit(call.partition, step.kernel, known)
    options = replace(call, kernel=step.kernel, cost_estimate=None, partition=rule)
    options = replace(options, flowing=step.taking(flowing))
    if step.whole is not None:
        whole = replace(options, kernel=step.whole)
        chip = chip_for(call.backend)
        platform = chip.platform if isinstance(chip, Gpu) else "cuda"
        if on_arrays(whole, platform) is not None:
            options, step = whole, replace(step, parts=(1,) * len(step.parts))
    operands = [
        arrays[ref].astype(operand.ref.dtype.np)
        for ref, operand in zip(step.operands, step.kernel.inputs, strict=True)
    ]
    results = bind_call(options, operands)
    whole = [
        jnp.sum(x, axis=tuple(range(x.ndim - ref.ref.rank))) if parts > 1 else x
        for x, ref, parts in zip(results, step.results, step.parts, strict=True)
    ]
    found: dict[Value, Any] = {}
    starts = step.starts or ((),) * len(whole)
    for ref, x, start in zip(step.results, whole, starts, strict=True):
        if x.shape != ref.ref.shape:
            sizes = zip(start, x.shape, ref.ref.shape, strict=True)
            x = jnp.pad(x, [(first, n - size - first) for first, size, n in sizes])
        # An operand that is added to in two places, or by two stages, gets both sums.
        before = found.get(ref, None if ref in step.changing else arrays.get(ref))
        found[ref] = x if before is None else before + x
    return found


@functools.lru_cache(maxsize=1024)
def plan(
    kernel: Kernel,
    wanted: tuple[bool, ...],
    known: tuple[bool, ...],
    machine: Machine,
) -> BackwardPlan:
    """The backward kernels of a kernel.

    Args:
        kernel: what was called.
        wanted: per operand, whether its cotangent is requested.
        known: per result, whether it has a cotangent.
        machine: what will run them; it decides between alternatives.

    Raises:
        NoBackwardKernel: there are none.
    """
    made = _plan(kernel, wanted, known, machine)
    composed = _composed(made, kernel, wanted, known)
    if composed is None:
        return made
    way, other = composed.choices[0], made.choices[0]
    return composed if way.estimate.seconds < other.estimate.seconds else made


def _is_composed(made: BackwardPlan) -> bool:
    return not made.choices[0].stages.programs


def _composed(
    made: BackwardPlan,
    kernel: Kernel,
    wanted: tuple[bool, ...],
    known: tuple[bool, ...],
) -> BackwardPlan | None:
    """The kernels of a program in two parts (`first_products.py`), if there are two."""
    machine = made.machine
    normal, program = normal_program(kernel, machine)
    if machine.gpu is None or normal.aliases or not has_products(kernel):
        return None
    found = cut(program)
    if found is None:
        return None
    sums = Sums.of(normal, machine, {})
    (first, *more) = kernels_of(found.first, [found.array], set(), sums)
    (second, *others) = kernels_of(found.second, normal.outputs, set(), sums)
    if more or others or prod((*first.parts, *second.parts)) > 1:
        return None
    number = {ref: n for n, ref in enumerate(normal.inputs)}
    early = tuple(wanted[number[ref]] for ref in first.operands)
    late = [ref is found.array or wanted[number[ref]] for ref in second.operands]
    late[second.operands.index(found.array)] = any(early)
    order = [normal.outputs.index(ref) for ref in second.results]
    plans = [plan(second.kernel, tuple(late), tuple(known[n] for n in order), machine)]
    if any(early):
        plans.append(plan(first.kernel, early, (True,), machine))
    if any(each.changing or each.merges for each in plans):
        return None
    same, targets = dict[Value, Value](), dict[int, Value]()
    between = second.operands.index(found.array)
    for each, part in zip(plans, (second, first), strict=False):
        same.update(zip(each.primals, part.operands, strict=True))
        for n, ref in each.targets.items():
            if part.operands[n] is not found.array:
                target = targets.setdefault(number[part.operands[n]], ref)
                same[ref] = target
        if part is first:
            same[each.seeds[0]] = plans[0].targets[between]
    renamed = lambda refs: tuple(same.get(ref, ref) for ref in refs)
    steps = [first]
    for step in (step for each in plans for step in each.steps):
        own = {"operands": renamed(step.operands), "results": renamed(step.results)}
        steps.append(replace(step, **own))
    ways = [each.choices[0].estimate for each in plans]
    total = sum_of([estimate([first.kernel], machine), *ways])
    way = Way(tuple(steps), total, Stages(()))
    seeds = {order[n]: ref for n, ref in plans[0].seeds.items()}
    return replace(
        made,
        steps=way.steps,
        primals=normal.inputs,
        seeds=seeds,
        targets=targets,
        choices=(way, *made.choices),
        merges=(),
    )


@functools.lru_cache(maxsize=1024)
def keeping_plan(
    kernel: Kernel, wanted: tuple[bool, ...], machine: Machine
) -> KeepingPlan | None:
    """Backward kernels that use residuals of the forward kernel, where that pays off.

    It does if backward kernels would otherwise repeat matmuls of the program, and the
    residuals are small compared with operands and results.
    """
    if not has_products(kernel):
        return None
    if any(op.name in UNREPEATABLE for op in walk(kernel.body)):
        return None
    try:
        normal, program = normal_program(kernel, machine)
        if normal.aliases:
            return None
        known = expected_cotangents(kernel, machine)
        has_parts = machine.gpu is not None and cut(program) is not None
        if has_parts and _is_composed(plan(kernel, wanted, known, machine)):
            return None
        made = _plan(kernel, wanted, known, machine, kernel.outputs)
        if made.changing or made.merges:
            return None
        found = (_keeping(made, way, kernel, known) for way in made.choices)
        seconds = lambda plan: plan.backward.choices[0].estimate.seconds
        return min(filter(None, found), key=seconds, default=None)
    except NoBackwardKernel:
        return None


@functools.lru_cache(maxsize=1024)
def using_kept(
    kernel: Kernel,
    wanted: tuple[bool, ...],
    known: tuple[bool, ...],
    machine: Machine,
) -> BackwardPlan:
    """The backward kernels of a `keeping_plan`; `known` as in `plan`."""
    keeps = keeping_plan(kernel, wanted, machine)
    assert keeps is not None
    made = keeps.backward
    zero = {ref for n, ref in made.seeds.items() if not known[n]}
    if not zero:
        return made
    stages = [without(stage, zero) for stage in keeps.stages]
    steps = _steps(stages, made, kernel, made.choices[0].stages.saved)
    seeds = {n: ref for n, ref in made.seeds.items() if ref not in zero}
    return replace(made, steps=steps, seeds=seeds)


def _steps(
    stages: Sequence[Program],
    made: BackwardPlan,
    kernel: Kernel,
    saved: Sequence[Value],
) -> tuple[Built, ...]:
    """The kernels of some stages that change no memory."""
    sums = Sums.of(kernel, made.machine, made.targets)
    results = [*made.targets.values(), *saved]
    steps = [built for s in stages for built in kernels_of(s, results, set(), sums)]
    final = {ref: kernel.inputs[n].ref.dtype for n, ref in made.targets.items()}
    return tuple(_narrowed(steps, final))


def _keeping(
    made: BackwardPlan, way: Way, kernel: Kernel, known: tuple[bool, ...]
) -> KeepingPlan | None:
    """A way with its first stage split; its stages write the results."""
    if way.merges or not way.stages.programs:
        return None
    first, *rest = way.stages.programs
    kept = keep(first, list(made.seeds.values()), kernel.outputs)
    most = KEPT_SHARE * sum(map(bytes_of, kernel.params))
    if kept is None or sum(map(bytes_of, kept.refs)) > most:
        return None
    others = {*Roots(first.body).written(first.body)} - {*kernel.outputs}
    if products_of(kept.stage) >= products_of(only(first, [*others])):
        return None
    sums = Sums.of(kernel, made.machine, made.targets)
    forward = kernels_of(kept.forward, [*kernel.outputs, *kept.refs], set(), sums)
    if len(forward) != 1:
        return None
    (one,) = forward
    one = replace(one, kernel=one.kernel.with_(name=kernel.name))
    stages = (kept.stage, *rest)
    steps = _steps(stages, made, kernel, way.stages.saved)
    estimated = estimate([step.kernel for step in steps], made.machine)
    fits = estimate([one.kernel], made.machine).seconds < inf
    if not fits or estimated.seconds >= made.choices[0].estimate.seconds:
        return None
    new = Way(steps, estimated, way.stages)
    backward = replace(made, steps=steps, choices=(new, *made.choices))
    return KeepingPlan(one, kept.refs, kernel.outputs, known, backward, stages)


def _plan(
    kernel: Kernel,
    wanted: tuple[bool, ...],
    known: tuple[bool, ...],
    machine: Machine,
    written: Sequence[Value] = (),
) -> BackwardPlan:
    """See `plan`; `written`: results that the stages also write."""
    kernel, program = normal_program(kernel, machine)
    shared = {o: i for i, o in kernel.aliases}
    targets = {
        n: _cotangent_ref(ref, accumulated(ref.ref.dtype), f"operand{n}")
        for n, (ref, is_wanted) in enumerate(zip(kernel.inputs, wanted, strict=True))
        if is_wanted and ref.ref.dtype.is_float
    }
    seeds = {
        n: _cotangent_ref(ref, ref.ref.dtype, f"result{n}")
        for n, (ref, is_known) in enumerate(zip(kernel.outputs, known, strict=True))
        if (is_known or shared.get(n) in targets) and ref.ref.dtype.is_float
    }
    memory = {
        n: kernel.inputs[shared[n]] if n in shared else kernel.outputs[n] for n in seeds
    }
    given = {memory[n]: seeds[n] for n in seeds}
    made = _reversed(kernel, program, targets, given, written)
    changing = {n: made.changing[r] for n, r in memory.items() if r in made.changing}
    for n, ref in changing.items():
        if shared.get(n) in targets:
            targets[shared[n]] = ref
    results = list(dict.fromkeys([*targets.values(), *changing.values()]))
    program = split_axes(program.with_body(made.body), results)
    if machine.base_two:
        program = _in_base_two(program)
    # One that nothing is stored to passes on as it is.
    written = Roots(program.body).written(program.body)
    moving = {ref for ref in changing.values() if ref in written}
    variants: list[tuple[Program, list[Merge]]] = [(program, [])]
    gathered = list[Program]()
    if not moving:
        program = program.simplified()
        few = prod(program.sizes) < 2 * machine.cores and not machine.endless
        if machine.gpu is not None and few:
            program = row_blocks(program)
        in_blocks = machine.gpu is not None
        program, gathered = gather_overlaps(program, results, in_blocks)
        if machine.gpu is not None:
            program, more = rerolled(program, results)
            gathered += more
            program = with_row_views(program, list(targets.values()))
        most = MOST_SCATTERED * sum(map(bytes_of, kernel.params))
        variants = _scattered(program, list(targets.values()), most, machine)
    # Partial sums are for small operands, such as the weights of a norm.
    sums = Sums.of(kernel, machine, targets)
    final = {ref: kernel.inputs[n].ref.dtype for n, ref in targets.items()}
    ways = _Ways(results, moving, sums, final).all(variants, gathered, made)
    return BackwardPlan(
        ways[0].steps,
        kernel.inputs,
        seeds,
        targets,
        changing,
        tuple(ways),
        machine,
        ways[0].merges,
    )


@dataclass(frozen=True)
class _Ways:
    """What the ways to divide the work have in common."""

    results: Sequence[Value]
    moving: set[Value]
    sums: "Sums"
    final: dict[Value, T.DType]  # the types of the cotangents

    def all(
        self,
        variants: Sequence[tuple[Program, Sequence[Merge]]],
        gathered: Sequence[Program],
        made: Reversed,
    ) -> list[Way]:
        """All of them, the fastest first; `gathered`: programs that all have."""
        for program in gathered:
            _check_lost(program, made)
        ways = [
            self.way(stages.with_more(gathered), merges)
            for program, merges in variants
            for stages in _alternatives(
                program, made, self.added(merges), bool(self.moving), self.sums
            )
        ]
        if self.sums.machine.gpu is not None and not self.moving:
            apart = loop_products(ways[-1].stages)
            ways += [] if apart is None else [self.way(apart, ways[-1].merges)]
        if all(way.estimate.seconds == inf for way in ways) and not self.moving:
            ways += filter(None, map(self._with_sums_apart, ways))
        # What does not fit waits for memory: the less of it there is, the better.
        taken = lambda way: (way.estimate.seconds, way.estimate.spilling)
        return sorted(ways, key=taken)

    def _with_sums_apart(self, one: Way) -> Way | None:
        """The same, with stages of their own for sums that do not fit together."""
        way = lambda stages: self.way(stages, one.merges)
        fits = lambda stage: way(Stages((stage,))).estimate.seconds < inf
        apart = sums_apart(one.stages, fits)
        return None if apart is None else way(apart)

    def added(self, merges: Sequence[Merge]) -> list[Value]:
        """The refs that stages add to."""
        mine = [r for r in self.results if all(r is not m.target for m in merges)]
        return [*mine, *(ref for merge in merges for ref in merge.refs)]

    def way(self, stages: Stages, merges: Sequence[Merge]) -> Way:
        refs = [*self.added(merges), *stages.saved]
        steps = [
            built
            for stage in stages.programs
            for built in kernels_of(stage, refs, self.moving, self.sums)
        ]
        steps = _narrowed(steps, self.final)
        machine = self.sums.machine
        estimated = estimate([step.typical or step.kernel for step in steps], machine)
        merging = sum(merge_seconds(merge, machine) for merge in merges)
        estimated = replace(estimated, seconds=estimated.seconds + merging)
        return Way(tuple(steps), estimated, stages, tuple(merges))


def _scattered(
    program: Program, targets: Sequence[Value], most: int, machine: Machine
) -> list[tuple[Program, list[Merge]]]:
    """Let programs write what they scatter, where adding it up would run in sequence.

    Rows are also added where they belong, one after another: a CPU may have added them
    before it has sorted them. On a GPU one program is never faster than all.

    `most`: the bytes that this may take.
    """
    scattering, merges = program, list[Merge]()
    enough = min(machine.enough_programs, prod(program.sizes))
    for ref in targets if machine.cores > 1 else ():
        if prod(program.sizes[a] for a in place(scattering, ref).own) >= enough:
            continue
        if machine.gpu is not None and _is_sorted(scattering, ref):
            continue  # its addends need no memory
        found = scattered(scattering, ref)
        # Where nothing else is parallel, a GPU has memory for more.
        alone = machine.gpu is not None and not sorted_steps(scattering, [ref])
        limit = max(most, FEW_SCATTERED) if alone else most
        if found is not None and sum(map(bytes_of, found[1].refs)) <= limit:
            scattering = found[0]
            merges.append(found[1])
    rows = machine.one_unit and all(merge.is_rows for merge in merges)
    return [(scattering, merges), *([(program, [])] if merges and rows else [])]


def _is_sorted(program: Program, ref: Value) -> bool:
    """Whether sorted steps add to a cotangent, and compute nothing costly twice."""
    if not sorted_steps(program, [ref]):
        return False
    costly = ("dot", "for", "while")
    return all(op.name not in costly for op in walk(only(program, [ref]).body))


def _narrowed(steps: list[Built], final: dict[Value, T.DType]) -> list[Built]:
    """Results that one kernel alone computes, in one piece, in their final type."""
    made = Counter(ref for step in steps for ref in step.results)
    narrowed = []
    for step in steps:
        dtypes = {
            n: final[ref]
            for n, (ref, parts) in enumerate(zip(step.results, step.parts, strict=True))
            if ref in final and parts == made[ref] == 1 and ref not in step.changing
        }
        taken = {ref for other in steps for ref in other.operands}
        dtypes = {n: d for n, d in dtypes.items() if step.results[n] not in taken}
        kernel = narrow_results(step.kernel, dtypes)
        narrowed.append(replace(step, kernel=kernel))
    return narrowed


def _reversed(
    kernel: Kernel,
    program: Program,
    targets: dict[int, Value],
    seeds: dict[Value, Value],
    written: Sequence[Value],
) -> Reversed:
    unseen = [ref for ref in kernel.outputs if ref not in seeds]
    sums = plain_sums(sink_broadcasts(program.body), unseen)
    body, copies = harmless_edges(sums.body)
    made = reverse_program(
        body,
        {kernel.inputs[n]: ref for n, ref in targets.items()},
        seeds,
        program.sizes,
        copies | sums.scales,
        kernel.inputs,
        written,
    )
    # The reverse is that of plain sums; their values come from the original loop.
    return replace(made, body=unrounded(substitute(made.body, sums.same)))


def _in_base_two(program: Program) -> Program:
    """Convert exponentials to base two, before maxima are kept or saved.

    Of the reverse, because a maximum that is stored in its own base is compared with
    the masking value, which hides that nothing depends on it.
    """
    folded = fold_exp2(kernel_of(program, main_refs(program.body), ()))
    return program.with_body(Pipeline.of(find_pipeline(folded)).body)


def _alternatives(
    program: Program,
    made: Reversed,
    results: Sequence[Value],
    moving: bool,
    sums: Sums,
) -> list[Stages]:
    """Split into stages, unless several would have to change the same memory.

    A loop that adds to several cotangents may be one stage whose kernels each recompute
    what they share; if that includes matmuls, a single kernel is an alternative. Where
    programs leave cores idle, another one is to have a program for each step of a loop.
    """
    program = program.simplified()
    _check_lost(program, made)
    if moving:
        return [Stages((program,))]
    repeating, named = False, sums.machine.gpu is not None

    def repeats_nothing(stage: Program) -> bool:
        nonlocal repeating
        repeats = _repeats_products(stage, results)
        repeating |= repeats
        return not repeats

    careful = split(program, repeats_nothing, named)
    found = [careful, split(program, lambda _: True, named)] if repeating else [careful]
    few = named and prod(program.sizes) < sums.machine.cores
    states = states_apart(program) if few else None
    if states is None or sum(map(bytes_of, states.saved)) > MOST_STATES * sums.budget:
        return found
    return [*found, states]


def _check_lost(program: Program, made: Reversed) -> None:
    for ref in main_refs(program.body):
        if ref in made.lost:
            raise NoBackwardKernel(
                "the backward pass needs a value that was stored to a result or an "
                "operand",
                at=made.lost[ref].loc,
            )


def _repeats_products(stage: Program, results: Sequence[Value]) -> bool:
    """Whether the kernels of a stage would compute some matmul more than once."""
    refs = Roots(stage.body).written(stage.body)
    stage, placed, _ = apart(stage, [place(stage, r) for r in results if r in refs])
    parts = [only(stage, [p.ref for p in chain]) for chain in groups(placed)]
    joined = only(stage, [p.ref for p in placed])
    return sum(map(products_of, parts)) > products_of(joined)


def _cotangent_ref(ref: Value, dtype: T.DType, name: str) -> Value:
    return Value(replace(ref.ref, dtype=dtype, space="any"), f"d_{ref.name or name}")
