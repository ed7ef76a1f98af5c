"""place_windows: every number that an index map yields names a block there is.

A block number out of range is the nearest one (docs/semantics.md, "Blocks"). In: maps
as their author wrote them. Out: a `clamp` on each number that is not known to stay in
range over the grid; maps that stay in range are left as they are. Backends place blocks
from these numbers without another look at the array's bounds; only a block that hangs
over the edge is still theirs to cut.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Loc, Op, Value, Window, window_arrays
from pallasite.ir.rewrite import with_regions
from pallasite.ir.types import I32
from pallasite.passes.analysis.block_table import all_steps, evaluate_map, last_number
from pallasite.passes.analysis.ranges import Range, Ranges, loop_range, type_range

Grid = Sequence[int | None]


def place_windows(kernel: Kernel) -> Kernel:
    """Clamp what index maps yield, in all pipelines, where it may be out of range."""
    body = _Placing().block(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


class _Placing:
    """Walks a kernel with what is known of its integers so far."""

    def __init__(self) -> None:
        self.ranges = Ranges()

    def block(self, block: Block) -> Block:
        ops = [self.op(op) for op in block.ops]
        if all(new is old for new, old in zip(ops, block.ops, strict=True)):
            return block
        return Block(block.params, tuple(ops), block.yields)

    def op(self, op: Op) -> Op:
        self.ranges.add(op)
        if op.name == "pipeline":
            return self.pipeline(op)
        if op.name == "for" and op.regions[0].params[0].tile.dtype.is_signed_int:
            found = loop_range(self.ranges, op.operands)
            if found is not None:
                self.ranges.set(op.regions[0].params[0], *found)
        return with_regions(op, [self.block(region) for region in op.regions])

    def pipeline(self, op: Op) -> Op:
        *maps, body = op.regions
        grid, windows = op.attrs["grid"], op.attrs["windows"]
        new = []
        for array, window, index_map in zip(
            window_arrays(op), windows, maps, strict=True
        ):
            found = number_ranges(index_map, window, array.ref.shape, grid, self.ranges)
            limits = number_limits(window, array.ref.shape)
            new.append(_clamped(index_map, found, limits, op.loc))
        note_grid(self.ranges, body.params[: len(grid)], grid)
        return with_regions(op, [*new, self.block(body)])


def _clamped(
    index_map: Block, found: Sequence[Range], limits: Sequence[int], loc: Loc | None
) -> Block:
    if all(map(_is_within, found, limits)):
        return index_map
    b = Builder(loc)
    b.ops += index_map.ops
    yields = [
        value if _is_within(each, last) else b.clamp(b.index(0), value, b.index(last))
        for value, each, last in zip(index_map.yields, found, limits, strict=True)
    ]
    return b.block(index_map.params, yields)


# --- what is known of the numbers of a window ---


def number_limits(window: Window, shape: Sequence[int]) -> list[int]:
    """The greatest of each number that an index map yields; the least is 0."""
    limits = []
    for dim, n in zip(window.dims, shape, strict=True):
        limits.append(last_number(dim, n))
        if dim.kind == "bounded":
            limits.append(dim.size)
    return [min(last, type_range(I32)[1]) for last in limits]


def number_ranges(
    index_map: Block,
    window: Window,
    shape: Sequence[int],
    grid: Grid,
    ranges: Ranges | None = None,
) -> list[Range]:
    """What each number that an index map yields can be over the grid.

    A proof: arithmetic wraps around here as it does when the kernel runs. `ranges`
    knows the values from outside the map.
    """
    ranges = ranges or Ranges()
    note_grid(ranges, index_map.params, grid)
    for op in index_map.ops:
        ranges.add(op)
    found = [ranges.of(v) for v in index_map.yields]
    steps = all_steps(grid)
    if steps is None or all(map(_is_within, found, number_limits(window, shape))):
        return found
    tried = evaluate_map(index_map, steps)
    return found if tried is None else [(int(x.min()), int(x.max())) for x in tried]


def _is_within(found: Range, last: int) -> bool:
    return found[0] >= 0 and found[1] <= last


def note_grid(ranges: Ranges, ids: Sequence[Value], grid: Grid) -> None:
    for value, n in zip(ids, grid, strict=True):
        ranges.set(value, 0, type_range(I32)[1] if n is None else max(n - 1, 0))


def unclamped(
    index_map: Block, window: Window, shape: Sequence[int]
) -> tuple[Value, ...]:
    """What an index map yields, before clamps to the very blocks there are.

    They change nothing, since numbers out of range are the nearest one in any case;
    analyses that know this see the sum that is under such a clamp.
    """
    made = {v: op for op in index_map.ops for v in op.results}

    def number(value: Value) -> int | None:
        op = made.get(value)
        if op is None or op.name != "constant":
            return None
        return op.attrs["value"]

    def before(value: Value, last: int) -> Value:
        op = made.get(value)
        if op is None or op.name != "clamp":
            return value
        low, inner, high = op.operands
        return inner if (number(low), number(high)) == (0, last) else value

    limits = number_limits(window, shape)
    return tuple(map(before, index_map.yields, limits))
