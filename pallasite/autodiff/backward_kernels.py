"""The kernels of a stage: which of its results share one, and in which order.

`backward.py` asks for them. A result has the axes of the grid to itself that choose its
block, or programs of its own for the blocks that memory names (`sorted_steps.py`) and
for rows between offsets (`owned_rows.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from pallasite.autodiff.backward_choice import estimate
from pallasite.autodiff.backward_windows import (
    Built,
    Placement,
    apart,
    build,
    only,
    place,
)
from pallasite.autodiff.carried_axes import carried_axis
from pallasite.autodiff.owned_rows import owned_rows
from pallasite.autodiff.partial_sums import Sums, bytes_of, cut_into_parts
from pallasite.autodiff.sorted_steps import by_sorted_steps, sorted_steps
from pallasite.ir.nodes import Value, walk
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program


def products_of(stage: Program) -> int:
    """How many matmuls a stage has."""
    return sum(op.name == "dot" for op in walk(stage.body))


def kernels_of(
    stage: Program, results: Sequence[Value], changing: set[Value], sums: Sums
) -> list[Built]:
    """One kernel per group of results that can share a grid order."""
    refs = Roots(stage.body).written(stage.body)
    mine = [place(stage, ref) for ref in results if ref in refs]
    mine = [replace(p, changes=p.ref in changing) for p in mine]
    stage, mine, same = (stage, mine, {}) if changing else apart(stage, mine)
    sums, built = sums.renamed(same), list[Built]()
    is_gpu = sums.machine.gpu is not None
    shared = [p.ref for p in mine if not all(p.kept)] if is_gpu else []
    for refs in sorted_steps(stage, shared) if not changing else ():
        made = by_sorted_steps(stage, refs)
        mine = [p for p in mine if p.ref not in refs]
        one, typical = (
            _kernel(each, [place(each, r) for r in refs], stage.name, False, sums)
            for each in (made.program, made.typical)
        )
        built.append(replace(one, steps=made.sorting, typical=typical.kernel))
    if sums.machine.cores > 1 and not changing:
        enough = min(sums.machine.enough_programs, prod(stage.sizes))
        alone = lambda p: all(p.kept) and prod(stage.sizes[a] for a in p.own) >= enough
        for p in [p for p in mine if not alone(p)]:
            made = owned_rows(stage, p.ref, is_gpu)
            if made is not None:
                mine.remove(p)
                reach = [place(made.reach, ref) for ref in made.refs]
                built.append(_kernel(made.reach, reach, stage.name, False, sums))
                one, typical = (
                    _kernel(each, [place(each, p.ref)], stage.name, False, sums)
                    for each in (made.rows, made.typical)
                )
                built.append(replace(one, steps=made.steps, typical=typical.kernel))
    chains = [together(mine)] if changing else groups(mine)
    for chain in chains:
        one = only(stage, [p.ref for p in chain])
        built.append(_kernel(one, chain, stage.name, bool(changing), sums))
    if len(chains) > 1 and not changing:
        joined = _joined([p for chain in chains for p in chain], stage, sums)
        several = built[-len(chains) :]
        if joined is not None and _seconds([joined], sums) < _seconds(several, sums):
            built[-len(chains) :] = [joined]
    return [
        replace(one, results=tuple(same.get(r, r) for r in one.results))
        for one in built
    ]


def _kernel(
    program: Program,
    group: Sequence[Placement],
    name: str,
    changing: bool,
    sums: Sums,
) -> Built:
    """The kernel of some results, with sums in parts where that fills cores."""
    order = grid_order(group, len(program.sizes))
    own = sums.with_work(program)
    parts = {} if changing else cut_into_parts(group, order, program.sizes, own)
    one = build(program, _named(name, group), group, order, parts)
    loops = any(op.name in ("dot", "for", "while") for op in walk(program.body))
    if parts and sums.machine.gpu is not None and not loops:
        whole = build(program, _named(name, group), group, order)
        one = replace(one, whole=whole.kernel)
    few = prod(program.sizes) < sums.machine.enough_programs
    if few and not sums.machine.endless:
        one = replace(one, kernel=carried_axis(one.kernel))
    return one


def _named(name: str, group: Sequence[Placement]) -> str:
    names = [p.ref.name.removesuffix("_ref") for p in group]
    return f"{name}_{'_'.join(dict.fromkeys(names))}"


def _joined(group: list[Placement], stage: Program, sums: Sums) -> Built | None:
    """One kernel for groups of results, whose programs all write sums of their own.

    Kernels apart would each go through the same loops again. Products have blocks for
    the sums that they are added to, so that these are apart.
    """
    program = only(stage, [p.ref for p in group])
    if products_of(program):
        return None
    order = grid_order(group, len(program.sizes))
    parts = cut_into_parts(group, order, program.sizes, sums)
    shared = frozenset[int].intersection(*(p.own for p in group))
    whole = {a: n for a, n in enumerate(program.sizes) if a not in shared and n > 1}
    if parts != whole:
        return None
    return build(program, _named(stage.name, group), group, order, parts)


def _seconds(kernels: Sequence[Built], sums: Sums) -> float:
    """How long some kernels take, with adding up what they sum in parts."""
    taken = [
        bytes_of(ref) * n
        for one in kernels
        for ref, n in zip(one.results, one.parts, strict=True)
        if n > 1
    ]
    adding = sums.machine.copying(sum(taken)) if taken else 0.0
    return estimate([one.kernel for one in kernels], sums.machine).seconds + adding


def together(placements: Sequence[Placement]) -> list[Placement]:
    """One group for all: what does not fit its order is shown whole."""
    chain: list[Placement] = []
    for placement in sorted(placements, key=lambda p: -len(p.own)):
        if chain and not placement.own <= chain[-1].own:
            whole = (False,) * len(placement.kept)
            placement = replace(placement, kept=whole, own=frozenset())
        chain.append(placement)
    return chain


def groups(placements: Sequence[Placement]) -> list[list[Placement]]:
    """Groups of results whose own axes are nested, so that one order serves them."""
    chains: list[list[Placement]] = []
    for placement in sorted(placements, key=lambda p: -len(p.own)):
        for chain in chains:
            if placement.own <= chain[-1].own:
                chain.append(placement)
                break
        else:
            chains.append([placement])
    return chains


def grid_order(group: Sequence[Placement], rank: int) -> list[int]:
    """Axes that more results have as their own come first."""
    return sorted(range(rank), key=lambda a: -sum(a in p.own for p in group))
