"""whole_arrays: a kernel whose programs map blocks becomes one program on whole arrays.

In: parallel programs that read blocks, compute each element from those at its position
(or in its row), move dimensions, and write whole blocks. Out: one program whose blocks
are the arrays. Its ops are then operations on arrays as XLA has them, so XLA can fuse
them with what makes the operands and with what uses the results, which it cannot do
with a kernel.
Axes that index single elements (a batch) are left to `jax.vmap` (`unbatch.py`).

Proof: `reblock.py` merges programs along an axis only if each position is computed from
the same position of everything else; what is past the end of an array is not computed.
Whether it pays off is a question of bytes (`why_native`): an operand that another
operation computes is no longer written and read. Results that are sums of what programs
map are added up by XLA, too (`addends_apart.py`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from pallasite.ir.nodes import Access, At, Kernel, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import is_elementwise
from pallasite.ir.roles import Pipeline, Shown
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.cost import cost
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.loop_dims import loop_dims
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.run import run
from pallasite.passes.schedule.addends_apart import AddendsApart, addends_apart
from pallasite.passes.schedule.reblock import NO_AXIS, grow_whole
from pallasite.passes.schedule.shifted_arrays import NotShifted, shifted_arrays
from pallasite.passes.transform.unbatch import Unbatched, unbatch
from pallasite.target import Machine

# Besides elementwise ops. Others (`pad`, `concatenate`) are cheap for a program that
# keeps its block in registers; XLA computes them again for each element that uses them.
_OPS = ("constant", "iota", "broadcast_in_dim", "reshape", "transpose", "reduce")
_OPS += ("load", "store")
_MOVES = ("slice", "pad", "concatenate")
_LEAST_SAVED = 0.1  # of the bytes that a kernel and what makes its operands move
_LONGEST_ROW = 1024  # that XLA keeps on chip from one reduction to the next


@dataclass(frozen=True)
class WholeArrays:
    """A kernel as one program on whole arrays, mapped over batches, the last first.

    Where results are sums, it gives what is added up (`addends_apart.py`).
    """

    kernel: Kernel
    batches: tuple[Unbatched, ...] = ()
    shifted: bool = False
    sums: AddendsApart | None = None

    def results(
        self, made: Sequence[Any], run: Callable[[Kernel, Sequence[Any]], Sequence[Any]]
    ) -> list[Any]:
        """The results of the kernel, from those of the program; `run` runs kernels."""
        if self.sums is None:
            return [*made]
        count = len(made) - len(self.sums.total.inputs)
        totals = iter(run(self.sums.total, made[count:]))
        maps = iter(made[:count])
        every = range(count + len(self.sums.sums))
        return [next(totals if n in self.sums.sums else maps) for n in every]


@functools.lru_cache(maxsize=1024)
def on_whole_arrays(kernel: Kernel) -> WholeArrays | str:
    """The kernel as one program on whole arrays, or why it is none."""
    sums = None
    if _may_sum(kernel):
        sums = addends_apart(run(kernel))
        kernel = kernel if sums is None else sums.addends
    reason = _other_than_map(kernel)
    if reason:
        return reason
    kernel = run(kernel)
    made = _merged(kernel)
    if sums is not None and not isinstance(made, str):
        return replace(made, sums=sums)
    if isinstance(made, str) and _blocks_overlap(kernel):
        try:
            return WholeArrays(shifted_arrays(kernel), shifted=True, sums=sums)
        except NotShifted:
            return made
    return made


def _merged(kernel: Kernel) -> WholeArrays | str:
    batches = list[Unbatched]()
    while (one := _unbatched(kernel)) is not None:
        batches.append(one)
        kernel = one.kernel
    reason = _takes_parts(kernel)
    if reason:
        return reason
    try:
        made = _grown(kernel)
    except CannotReblock as error:
        return str(error)
    return _shows_less(made) or WholeArrays(made, tuple(batches))


def _unbatched(kernel: Kernel) -> Unbatched | None:
    axes = range(len(Pipeline.of(find_pipeline(kernel)).grid))
    return next(filter(None, (unbatch(kernel, axis) for axis in axes)), None)


def for_xla(
    kernel: Kernel, given: tuple[int, ...], machine: Machine
) -> WholeArrays | None:
    """The kernel on whole arrays, if XLA is to compute it; arguments: `why_native`."""
    if why_native(kernel, given, machine):
        return None
    made = on_whole_arrays(kernel)
    return None if isinstance(made, str) else made


def why_native(kernel: Kernel, given: tuple[int, ...], machine: Machine) -> str:
    """Why a kernel stays one; nothing if XLA is to compute it on whole arrays.

    Args:
        kernel: the kernel.
        given: the operands that operations of XLA are likely to have just computed.
        machine: what runs it.
    """
    moved = sum(_bytes(p) for p in kernel.params)
    fused = sum(_bytes(kernel.inputs[n]) for n in given)
    few = 2 * fused < _LEAST_SAVED * (moved + fused)
    reason = "hardly any of its bytes are operands that XLA computes"
    # On a GPU, XLA moves the same bytes for a map; it adds results to those of others.
    rows = machine.gpu is None or any(o.name == "reduce" for o in walk(kernel.body))
    if few and rows:
        return reason
    made = on_whole_arrays(kernel)
    if isinstance(made, str):
        return made
    if few and made.shifted:
        return reason
    if made.shifted and machine.gpu is None:
        return "its blocks overlap"
    if made.sums is not None and machine.gpu is None:
        return "it adds up what its programs compute"
    work = cost(made.kernel).times(prod(one.size for one in made.batches))
    reason = _why_rows_stay(made.kernel, machine, made.sums is not None)
    if reason:
        return reason
    if machine.computing(work.flops, work.transcendentals) > machine.copying(moved):
        return "it takes longer to compute than to read and write"
    return ""


def _other_than_map(kernel: Kernel) -> str:
    """The first thing in a kernel that is no map, if any; needs no passes."""
    if kernel.level != TILE or kernel.symbols:
        return "its shapes are symbolic, or it has explicit copies"
    if any(0 in p.ref.shape for p in kernel.params):
        return "an array has no elements"
    if [op.name for op in kernel.body.ops if op.name != "constant"] != ["pipeline"]:
        return "it has scratch memory"
    for op in walk(find_pipeline(kernel).regions[-1]):
        if op.regions:
            return f"it has a {op.name!r}"
        if op.name not in (*_OPS, *_MOVES) and not is_elementwise(op):
            return f"{op.name!r} is not elementwise"
    return ""


def _may_sum(kernel: Kernel) -> bool:
    """Whether results may be sums of what a map computes; needs no passes."""
    names = {op.name for op in walk(kernel.body)}
    sums, others = {"reduce", "cond"}, {"dot", "for", "while"}
    plain = kernel.level == TILE and not kernel.symbols
    return plain and not names.isdisjoint(sums) and names.isdisjoint(others)


def _blocks_overlap(kernel: Kernel) -> bool:
    """Whether programs read the same elements, as may those of XLA."""
    windows = Pipeline.of(find_pipeline(kernel)).windows
    return any(d.kind == "element" for w in windows for d in w.dims if w.mode == "in")


def _takes_parts(kernel: Kernel) -> str:
    """The first op of a program that does not compute positions, or rows, alike."""
    for op in find_pipeline(kernel).regions[-1].ops:
        if op.name in _MOVES:
            return f"{op.name!r} is not elementwise"
        if op.name in ("load", "store"):
            access = Access.of(op)
            at = op.name == "load" and access.mask is None
            sizes = zip(access.ref.ref.shape, access.index, strict=True)
            rest = [(n, e) for n, e in sizes if not (at and isinstance(e, At))]
            if not all(covers_whole((n,), (e,)) for n, e in rest):
                return f"a {op.name} takes a part of a block"
        if op.name == "reduce" and op.attrs["axes"] != (op.operands[0].tile.rank - 1,):
            return "it reduces another dimension than the last"
    return ""


def _why_rows_stay(kernel: Kernel, machine: Machine, sums: bool) -> str:
    """Why rows are not reduced by XLA, if they are reduced at all.

    A program reads its rows once. On a GPU, XLA does too if the reductions follow from
    a first one (softmax, the norm of a layer): it tiles them as one fusion. Of several
    that start from operands (the norm by squares), it makes kernels that each read all
    rows; counted in what XLA's compiler for an H200 makes of either.
    """
    after = set[Value]()  # values that depend on a reduction
    first, sizes = 0, set[int]()
    for op in find_pipeline(kernel).regions[-1].ops:
        depends = not after.isdisjoint(op.operands)
        if op.name == "reduce":
            first += not depends
            sizes.add(op.operands[0].tile.shape[-1])
        if depends or op.name == "reduce":
            after.update(op.results)
    if not sizes:
        return ""
    if sums or machine.gpu is None or max(sizes) > _LONGEST_ROW or len(sizes) > 1:
        return "it reduces rows, which its programs read only once"
    shown = Pipeline.of(find_pipeline(kernel)).shown
    pairs = ((s.window.dims, s.array.ref.shape) for s in shown)
    if any(
        d.size > n for dims, shape in pairs for d, n in zip(dims, shape, strict=True)
    ):
        return "its blocks are wider than its rows: XLA would pad the arrays"
    if first > 1:
        return "it reduces rows in several ways at once: XLA would read them each time"
    return ""


def _grown(kernel: Kernel) -> Kernel:
    """All programs merged.

    Raises:
        CannotReblock: along some axis, they are not parts of one.
    """
    merged, reasons = None, list[str]()
    while merged is not kernel:
        kernel, reasons = merged or kernel, []
        found = loop_dims(kernel)
        if found is None or found.refused:
            raise CannotReblock(found.refused if found else "its body is no grid")
        merged = kernel
        for dim in found.dims:
            try:
                merged = grow_whole(kernel, dim.windows[0])
            except CannotReblock as error:
                reasons.append(str(error))
            if merged is not kernel:
                break
    if prod(n or 0 for n in Pipeline.of(find_pipeline(kernel)).grid) != 1:
        raise CannotReblock(next((r for r in reasons if r != NO_AXIS), NO_AXIS))
    return kernel


def _shows_less(kernel: Kernel) -> str:
    """Which array the program does not see as a whole, if any."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    for shown in pipeline.shown:
        if not _is_whole(shown):
            return f"its block of {shown.array.name or 'an operand'} is computed"
    shows = {shown.array for shown in pipeline.shown}
    if not shows.issuperset(kernel.outputs):
        return "it writes an array without a window"
    return ""


def _is_whole(shown: Shown) -> bool:
    sizes = zip(shown.window.dims, shown.array.ref.shape, strict=True)
    return all(n > 0 and d.kind == "blocked" and d.size >= n for d, n in sizes)


def _bytes(ref: Value) -> int:
    return ref.ref.size * ref.ref.dtype.bytes
