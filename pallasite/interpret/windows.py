"""Windows in the evaluator: a block's position, and padding past the edges.

Operands of the kernel's own grid are padded once, before the first program, so that a
block that extends past an edge is a plain slice of the padded root; `fill` is what the
padding holds. Windows of inner pipelines, over memory that cannot be padded, carry
bounds instead.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pallasite.interpret.numbers import Array, Numbers
from pallasite.interpret.views import Fill, Range, View, whole_picks
from pallasite.ir.nodes import Block, BlockDim, Kernel, Op, Value, Window
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.affine import Forms
from pallasite.passes.analysis.memory import Roots


@dataclass(frozen=True)
class Padding:
    """Elements added before and after each dimension of a root, and what they hold.

    `fills`: what windows want to read there; they hold the first.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    fills: tuple[Any, ...] = ()

    @property
    def fill(self) -> Any:
        return self.fills[0] if self.fills else None


def plan_padding(kernel: Kernel, roots: Roots) -> dict[Value, Padding]:
    """How far blocks of the kernel's grid can reach outside each root."""
    found: dict[Value, Padding] = {}
    for op in kernel.body.ops:
        if op.name != "pipeline":
            continue
        pipeline = Pipeline.of(op)
        for array, window, index_map, _ in pipeline.shown:
            root = roots.of(array)
            if root not in kernel.params:
                continue
            ranges = _start_ranges(index_map, pipeline.grid, window)
            reach = [
                _overhang(n, dim, bounds)
                for n, dim, bounds in zip(
                    root.ref.shape, window.dims, ranges, strict=True
                )
            ]
            low, high = (tuple(r[k] for r in reach) for k in (0, 1))
            if any(n != 0 for n in (*low, *high)):
                fills = () if window.fill is None else (window.fill,)
                found[root] = _join(found.get(root), Padding(low, high, fills))
    return found


def _join(a: Padding | None, b: Padding) -> Padding:
    if a is None:
        return b
    return Padding(
        tuple(map(_most, a.low, b.low)),
        tuple(map(_most, a.high, b.high)),
        (*a.fills, *b.fills),
    )


def _most(a: int, b: int) -> int:
    """At least the larger one: of two symbolic sizes, their sum."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return a if a == b else a + b


def _blocks(n: int, size: int) -> int:
    """How many blocks an array has; one, if it is empty."""
    count = -(-n // size) if size != 0 else 1
    return max(1, count) if isinstance(count, int) else count


def _last(n: int) -> int:
    return max(n - 1, 0) if isinstance(n, int) else n - 1


def _start_ranges(
    index_map: Block, grid: Sequence[int | None], window: Window
) -> list[tuple[float, float]]:
    """Least and greatest value of each index, as far as they are known."""
    forms = Forms(index_map.params)
    forms.add_ops(index_map.ops, loads_vary=True)
    ranges = []
    pending = iter(index_map.yields)
    for dim in window.dims:
        form = forms.of(next(pending))
        if dim.kind == "bounded":
            next(pending)
        unknown = (float("-inf"), float("inf"))
        ranges.append(unknown if form.affine is None else form.affine.range(grid))
    return ranges


def _overhang(n: int, dim: BlockDim, bounds: tuple[float, float]) -> tuple[int, int]:
    if dim.kind == "squeezed":
        return 0, (1 if n == 0 else 0)
    if dim.kind == "blocked":
        if not dim.size:
            return 0, 0
        blocks = _blocks(n, dim.size)
        if not isinstance(n, int):
            return 0, blocks * dim.size - n
        last = min(max(bounds[1], 0), blocks - 1)
        return 0, max(0, int(last + 1) * dim.size - n)
    low, high = dim.padding
    if not isinstance(n, int):
        return low, high + dim.size - 1
    first = min(max(bounds[0], 0), n + low + high)
    last = max(0, min(bounds[1], n + low + high - 1))
    before = max(0, low - int(first))
    return before, max(0, int(last) - low + dim.size - n)


def window_ranges(
    numbers: Numbers,
    window: Window,
    view: View,
    indices: Sequence[Array],
    padded: bool,
) -> View:
    """The block ref a program sees. Block indices are clamped to valid ones."""
    assert not view.steps, "a window over a reshaped ref"
    pending = iter(indices)
    dims = iter(window.dims)
    ranges, bounds = [], []
    for r in view.ranges:
        if not r.kept:
            ranges.append(r)
            bounds.append(None)
            continue
        dim = next(dims)
        index = next(pending)
        length = next(pending) if dim.kind == "bounded" else None
        start, ends = _place(numbers, dim, r, index, length)
        if padded and length is None:
            ends = None  # the root's padding holds what extends past the edge
        bounds.append(ends)
        kept, (low, high) = dim.kind != "squeezed", _within(numbers, r, ends)
        ranges.append(Range(start, dim.size, r.stride, kept, low, high))
    fills = view.fills
    if window.fill is not None and any(bounds):
        fills = (*fills, Fill(window.fill, tuple(bounds)))
    return View(view.root, tuple(ranges), (), fills)


def _within(numbers: Numbers, r: Range, ends: tuple[Any, Any] | None):
    """The bounds of a range, and of a block in it."""
    if ends is None or r.low is None or r.high is None:
        return ends or (r.low, r.high)
    return numbers.larger(r.low, ends[0]), numbers.smaller(r.high, ends[1])


def _place(numbers: Numbers, dim: BlockDim, r: Range, index: Array, length: Any):
    """Root start of a block along one dimension; the range's ends if it may leave it.

    With a length, it ends there at the latest.
    """
    n = r.size
    if dim.kind == "blocked":
        blocks = _blocks(n, dim.size)
        if isinstance(blocks, int) and blocks == 1:
            index = 0  # whatever it is; slices at known places are simpler
        offset = numbers.mul(numbers.clamp(index, 0, blocks - 1), dim.size)
        hangs = blocks * dim.size != n
    elif dim.kind == "squeezed":
        offset, hangs = numbers.clamp(index, 0, _last(n)), False
    else:
        low, high = dim.padding
        last = _last(n + low + high)
        offset = numbers.add(numbers.clamp(index, 0, last), -low)
        hangs = True
    start = numbers.add(r.start, numbers.mul(offset, r.stride))
    if not hangs:
        return start, None
    top = numbers.add(r.start, (n - 1) * r.stride + 1)
    if length is not None:
        end = numbers.add(start, numbers.clamp(length, 0, dim.size))
        top = numbers.smaller(top, end)
    return start, (r.start, top)


@contextlib.contextmanager
def blocks_as_roots(
    walker: Any, op: Op, written: Sequence[Value]
) -> Iterator[tuple[Value, ...]]:
    """Make the blocks that branches write into roots of their own for a while.

    A staged branch hands back whole arrays; handing back one block instead of the
    operand it belongs to keeps a program's cost in proportion to its blocks.
    """
    if not walker.numbers.functional:
        yield tuple(written)
        return
    used = walker.roots.outermost_refs(op.regions)
    outer = walker.standing_for
    inner = dict(outer)
    lifted: list[tuple[Value, View]] = []
    carried: list[Value] = []
    for root in written:
        refs = used.get(root, set())
        ref = next(iter(refs)) if len(refs) == 1 else None
        view = walker.env.get(ref) if ref is not None else None
        now = outer.get(root, root)
        if view is None or ref is now or view.steps or view.fills:
            carried.append(now)
            continue
        assert ref is not None and view.root is now
        block = walker.numbers.take(
            walker.memory[now], whole_picks(view.ranges), None, None
        )
        walker.memory[ref] = block
        sizes = view.rectangle_shape
        walker.env[ref] = View(ref, tuple(Range(0, size) for size in sizes))
        inner[root] = ref
        lifted.append((ref, view))
        carried.append(ref)
    walker.standing_for = inner
    yield tuple(carried)
    walker.standing_for = outer
    for ref, view in lifted:
        block = walker.memory.pop(ref)
        picks = whole_picks(view.ranges)
        root = view.root
        walker.memory[root] = walker.numbers.put(
            walker.memory[root], picks, block, None
        )
        walker.env[ref] = view
