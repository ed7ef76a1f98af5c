"""Sums over parts of grid axes, where a backward kernel has too few parallel programs.

Each part of an axis adds up its own steps, in a result of its own; these are added up
after the kernel. Parts cost memory traffic, and win cores.
"""

from collections.abc import Mapping, Sequence
from math import prod, sqrt
from typing import NamedTuple

from pallasite.autodiff.backward_windows import Parts, Placement
from pallasite.ir.nodes import Block, Kernel, Value
from pallasite.ir.rewrite import producers_of
from pallasite.ir.roles import Dot, Loop
from pallasite.passes.analysis.shared_operands import shared_operands
from pallasite.passes.lower.per_program import Program
from pallasite.target import Machine

FEW_PARTS = 16  # for the cores of a CPU
MOST_PARTS = (
    256  # for a GPU, where they take no more than a share of the operands' bytes
)
SMALL_SHARE = 1 / 32
# Programs of a GPU wait for memory: two on each multiprocessor are worth more traffic.
GPU_SHARE = 1 / 8
GAIN_OF_ROUNDS = 1.25  # from which fuller rounds of programs are worth more sums
MOST_MEMORY = 4  # of the operands, for sums where matmuls would leave cores idle
LEAST_PARTS = 8  # devices share parts: with fewer, few devices could share the axis


def bytes_of(ref: Value) -> int:
    return ref.ref.size * ref.ref.dtype.bytes


class Sums(NamedTuple):
    """What decides whether kernels compute partial sums.

    Attributes:
        budget: bytes of the operands, of which partial sums may take a quarter, or half
            on a GPU.
        machine: what runs the kernels.
        work: multiplications and additions of a kernel's matmuls, by type.
        shared: the only results with partial sums, those that all rows share, where the
            others may not depend on how many rows there are; None: any.
    """

    budget: int
    machine: Machine
    work: tuple[tuple[str, float], ...] = ()
    shared: frozenset[Value] | None = None

    @staticmethod
    def of(kernel: Kernel, machine: Machine, targets: Mapping[int, Value]) -> "Sums":
        """`targets`: the refs of cotangents by their operand's position."""
        sums = Sums(sum(map(bytes_of, kernel.inputs)), machine)
        if not machine.endless:
            return sums
        shared = shared_operands(kernel)
        refs = (ref for n, ref in targets.items() if n in shared)
        return sums._replace(shared=frozenset(refs))

    def renamed(self, same: Mapping[Value, Value]) -> "Sums":
        """For other refs of some results."""
        if self.shared is None:
            return self
        more = {new for new, old in same.items() if old in self.shared}
        return self._replace(shared=self.shared | more)

    def stays(self, axis: int, group: Sequence[Placement]) -> bool:
        """Whether the steps of an axis add up to what must be one sum."""
        return self.shared is not None and any(
            axis not in p.own and p.ref not in self.shared for p in group
        )

    def with_work(self, program: Program) -> "Sums":
        """Of a program's matmuls; loops without known bounds may run any number of
        times."""
        work: dict[str, float] = {}
        made = producers_of(program.body)

        def count(block: Block, times: int) -> None:
            for op in block.ops:
                if op.name == "dot":
                    dot = Dot.of(op)
                    name = dot.lhs.value.tile.dtype.name
                    done = 2 * dot.op.result.tile.size * dot.depth * times
                    work[name] = work.get(name, 0) + done
                elif op.name == "for":
                    loop = Loop.of(op)
                    count(loop.body, times * len(loop.rounds(made)))

        count(program.body, prod(program.sizes))
        return self._replace(work=tuple(work.items()))


def cut_into_parts(
    group: Sequence[Placement], order: Sequence[int], sizes: Sequence[int], sums: Sums
) -> Parts:
    """Split sums over parts of axes where the grid has too few parallel programs."""
    shared = frozenset[int].intersection(*(p.own for p in group))
    programs = prod(sizes[a] for a in shared)
    parts: Parts = {}
    for axis in (a for a in order if a not in shared and sizes[a] > 1):
        if programs >= sums.machine.enough_programs or sums.stays(axis, group):
            break
        count = _parts_of(axis, group, sizes, sums, parts, programs)
        is_whole = count == sizes[axis]
        if count >= LEAST_PARTS or is_whole:
            parts[axis] = count
            programs *= count
        if not is_whole:
            break
    return parts


def _parts_of(
    axis: int,
    group: Sequence[Placement],
    sizes: Sequence[int],
    sums: Sums,
    others: Parts,
    programs: int,
) -> int:
    """How many parts to split an axis into, after others.

    On a GPU, `programs` on some cores have as much less bandwidth as cores are idle: it
    takes `cores / (programs * n)` of the time to read the operands, and sums of n parts
    are written and read. The sum of both is least at the square root below. But as
    much is moved for sums as for operands at most.
    """
    taken = sum(
        bytes_of(p.ref) * prod(n for a, n in others.items() if a not in p.own)
        for p in group
        if axis not in p.own
    )
    fits = sums.budget / max(taken, 1)  # parts that would take as much as the operands
    many = fits * SMALL_SHARE
    if sums.machine.gpu is not None:
        many = sqrt(fits * sums.machine.cores / (2 * programs))
        many = max(min(many, fits / 2), fits * GPU_SHARE)
    most = min(MOST_PARTS // prod(others.values()), max(min(FEW_PARTS, fits / 4), many))
    counts = [d for d in range(1, int(most) + 1) if sizes[axis] % d == 0]
    # Devices come in powers of two, and each should have whole parts.
    count = max(counts, key=lambda d: (d & -d, d), default=1)
    if sums.machine.gpu is None or not sums.work:
        return count
    return _even(count, sizes[axis], programs, taken, sums, prod(others.values()))


def _even(
    count: int, size: int, programs: int, taken: int, sums: Sums, others: int
) -> int:
    """As many parts, or more with which matmuls keep all cores of a GPU busy.

    Programs run in rounds, of which the last one may leave most cores idle.
    """
    machine = sums.machine
    working = machine.multiplying_all(dict(sums.work))

    def seconds(n: int) -> float:
        rounds = -(-programs * n // machine.cores)
        idle = rounds * machine.cores / (programs * n)
        adding = machine.copying(2 * n * taken) + machine.launch * (n > 1)
        return working * idle + adding

    most = min(MOST_PARTS // others, MOST_MEMORY * sums.budget // max(taken, 1))
    more = [n for n in range(count, most + 1) if size % n == 0]
    best = min(more, key=seconds, default=count)
    return best if GAIN_OF_ROUNDS * seconds(best) < seconds(count) else count
