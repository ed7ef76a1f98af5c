"""The programs of a grid: loops over all of them, or over one thread's units."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pallasite.backends.cpu.call.parallel_units import Sharing
from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm.writer import TRUE, Val, integer
from pallasite.ir.nodes import Op
from pallasite.ir.roles import Pipeline


def grid_sizes(e: Emitter, op: Op) -> list[Val]:
    """The size of each axis of a pipeline's grid."""
    sizes = Pipeline.of(op).sizes
    return [integer(n) if isinstance(n, int) else e.index(n) for n in sizes]


@contextmanager
def each_program(e: Emitter, op: Op, grid: Sequence[Val]) -> Iterator[Sequence[Val]]:
    """The loops over a grid; gives the position along each axis."""
    share = e.share
    if share is None or share.sharing.op is not op:
        with e.f.nest(grid) as positions:
            yield positions
        return
    f, sharing = e.f, share.sharing
    with f.loop(f.sub(share.last, share.first)) as loop:
        rest = f.add(share.first, loop.index)
        found: dict[int, Val] = {}
        for axis in reversed(sharing.parallel[1:]):
            found[axis] = f.binary("urem", rest, grid[axis])
            rest = f.binary("udiv", rest, grid[axis])
        found[sharing.parallel[0]] = rest
        with f.nest([grid[a] for a in sharing.sequential]) as inner:
            found.update(zip(sharing.sequential, inner, strict=True))
            yield [found[axis] for axis in range(len(grid))]


def count_units(e: Emitter, sharing: Sharing) -> tuple[Val, Val]:
    """The number of units, from the grid sizes in the kernel's operands.

    And whether they may run concurrently: no axis is too large for that.
    """
    f, grid = e.f, grid_sizes(e, sharing.op)
    total, at_once = integer(1), TRUE
    for axis, most_steps in zip(sharing.parallel, sharing.most, strict=True):
        size = f.greatest(grid[axis], integer(0))
        if most_steps is not None:
            fits = f.compare("icmp sle", size, integer(most_steps))
            at_once = f.both(at_once, fits)
        # More than this would never finish; the product must not wrap around.
        most = f.binary("udiv", integer(1 << 62), f.greatest(size, integer(1)))
        total = f.mul(f.least(total, most), size)
    return total, at_once
