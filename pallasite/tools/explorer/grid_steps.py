"""The steps of a grid in the order that a chip runs them, and the blocks of each.

Index maps are evaluated for the first steps, all at once; values that a map reads from
memory are known only at run time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from pallasite import target
from pallasite.backends.base import Compiled
from pallasite.backends.cpu.call.handler import CHUNKS_PER_THREAD
from pallasite.backends.cpu.call.parallel_units import Sharing
from pallasite.ir.nodes import Kernel, Op
from pallasite.ir.roles import Pipeline, Shown
from pallasite.passes.analysis.block_table import evaluate_map
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.analysis.memory import MAIN_MEMORY
from pallasite.passes.analysis.work import extent

MOST_STEPS = 1024
GROUP = "triton.group"


@dataclass(frozen=True)
class Order:
    """Grid indices of the first steps, a row per axis; `text` describes the order."""

    steps: np.ndarray
    text: str


def grids_of(
    kernel: Kernel, compiled: Compiled | None, platform: str
) -> list[dict[str, Any]]:
    """What the page shows of a kernel's grid: as written, and as run.

    A `note` says why there are no steps.

    Args:
        kernel: after the shared passes.
        compiled: the target backend's result, if it supports the kernel.
        platform: of the target.
    """
    chosen = _with_windows(kernel, compiled)
    order = partial(_order, compiled=compiled, platform=platform)
    run = _grid("as run", chosen, order)
    written = _grid("as written", kernel, _in_order)
    if "note" in run:
        return [run] if "note" in written else [written]
    # Which steps are parallel is known best for the kernel as written.
    if len(written.get("parallel", ())) == len(run["parallel"]):
        run["parallel"] = written["parallel"]
    return [run, written]


def _grid(name: str, kernel: Kernel, order: Callable[..., Order]) -> dict[str, Any]:
    op = _only_grid(kernel)
    if op is None:
        return {"name": name, "note": "the kernel has no grid of its own"}
    pipeline = Pipeline.of(op)
    sizes = [n for n in pipeline.grid if n is not None]
    if len(sizes) < len(pipeline.grid):
        note = "the grid size is known only at run time"
        return {"name": name, "note": note}
    if not prod(sizes):
        return {"name": name, "note": "the grid has no programs"}
    found = order(kernel, sizes)
    return {
        "name": name,
        "sizes": sizes,
        "parallel": [axis.parallel for axis in analyze(kernel).axes],
        "steps": found.steps.T.tolist(),
        "total": prod(sizes),
        "order": found.text,
        "operands": [_operand(each, found.steps) for each in pipeline.shown],
        "scratch": [_scratch(each) for each in kernel.body.ops if each.name == "alloc"],
    }


def _with_windows(kernel: Kernel, compiled: Compiled | None) -> Kernel:
    """The last form of a kernel whose grid still has windows."""
    if compiled is not None:
        for step in reversed(compiled.steps):
            op = _only_grid(step.kernel)
            if op is not None and Pipeline.of(op).windows:
                return step.kernel
    return kernel


def _only_grid(kernel: Kernel) -> Op | None:
    found = [op for op in kernel.body.ops if op.name == "pipeline"]
    return found[0] if len(found) == 1 and Pipeline.of(found[0]).grid else None


# --- order ---


def _order(
    kernel: Kernel, sizes: Sequence[int], compiled: Compiled | None, platform: str
) -> Order:
    if platform in target.GPU_PLATFORMS:
        return _of_gpu(kernel, sizes, compiled)
    if platform == "cpu" and compiled is not None:
        sharing = Sharing.of(compiled.scheduled)
        if sharing is not None and sharing.units is not None:
            return _of_threads(sharing, sizes, sharing.units)
        return Order(
            _numbered(sizes, _first(sizes)), "one thread runs all of them, in order"
        )
    return _in_order(kernel, sizes)


def _in_order(kernel: Kernel, sizes: Sequence[int]) -> Order:
    """The order that defines the results, and in which a TPU runs."""
    text = "grid order, the last axis fastest"
    return Order(_numbered(sizes, _first(sizes)), text)


def _first(sizes: Sequence[int]) -> np.ndarray:
    return np.arange(min(prod(sizes), MOST_STEPS))


def _numbered(sizes: Sequence[int], numbers: np.ndarray) -> np.ndarray:
    """Grid indices of steps numbered in grid order."""
    indices = np.unravel_index(numbers, tuple(sizes))
    return np.stack(indices).astype(np.int32)


def _nested(
    sizes: Sequence[int], outer: Sequence[int], units: np.ndarray
) -> np.ndarray:
    """For each number along the outer axes, all steps along the others."""
    inner = [a for a in range(len(sizes)) if a not in outer]
    inside = prod(sizes[a] for a in inner)
    numbers = np.arange(min(len(units) * inside, MOST_STEPS))
    steps = np.zeros((len(sizes), len(numbers)), np.int32)
    if outer:
        own = units[numbers // inside]
        steps[list(outer)] = _numbered([sizes[a] for a in outer], own)
    if inner:
        own = numbers % inside
        steps[inner] = _numbered([sizes[a] for a in inner], own)
    return steps


def _of_threads(sharing: Sharing, sizes: Sequence[int], units: int) -> Order:
    """Thread 0 takes its part from the end, in chunks, then steals from the others."""
    threads = target.host().threads
    parts = threads * CHUNKS_PER_THREAD
    chunk = max(-(-units // parts), sharing.least_chunk)
    workers = max(min(threads, -(-units // chunk)), 1)
    length = -(-units // workers)
    taken: list[int] = []
    for part in range(workers):
        low, last = part * length, min((part + 1) * length, units)
        while last > low and len(taken) < MOST_STEPS:
            first = max(last - chunk, low)
            taken += range(first, min(last, first + MOST_STEPS))
            last = first
    steps = _nested(sizes, sharing.parallel, np.array(taken, np.int64))
    text = (
        f"that of one of {workers} threads: each has a part of the parallel axes, and "
        f"takes ranges of {chunk} from its end, then steals from the others"
    )
    return Order(
        steps, text if workers > 1 else "one thread runs all of them, in ranges"
    )


def _of_gpu(kernel: Kernel, sizes: Sequence[int], compiled: Compiled | None) -> Order:
    info = analyze(kernel)
    outer = list(info.parallel)
    shape = [sizes[a] for a in outer]
    units = np.arange(min(prod(shape), MOST_STEPS))
    text = "thread blocks in the order they start, as many concurrently as fit"
    scheduled = _only_grid(compiled.scheduled) if compiled is not None else None
    group = scheduled.attrs.get(GROUP, 1) if scheduled is not None else 1
    if group > 1 and len(outer) >= 2:
        units = _grouped(units, shape, group)
        text += f"; {group} rows at a time, column by column"
    if len(outer) < len(sizes):
        text += "; the sequential axes are a loop in each"
    return Order(_nested(sizes, outer, units), text)


def _grouped(number: np.ndarray, shape: Sequence[int], group: int) -> np.ndarray:
    """The reordering of program ids by `triton.group`, along the last two axes."""
    rows, columns = shape[-2:]
    outside, tile = np.divmod(number, rows * columns)
    before, within = np.divmod(tile, group * columns)
    first = before * group
    height = np.minimum(group, rows - first)
    row, column = first + within % height, within // height
    return (outside * rows + row) * columns + column


# --- blocks ---


def _operand(shown: Shown, steps: np.ndarray) -> dict[str, Any]:
    array, window = shown.array.ref, shown.window
    found: dict[str, Any] = {
        "name": shown.array.name or "unnamed",
        "mode": window.mode,
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "block": [1 if d.kind == "squeezed" else d.size for d in window.dims],
        "starts": None,
    }
    if window.space in MAIN_MEMORY:
        return found | {"note": "stays in main memory, accessed directly"}
    numbers = evaluate_map(shown.index_map, steps)
    if numbers is None or any(dim.kind == "bounded" for dim in window.dims):
        return found | {"note": "the positions of its blocks depend on data"}
    count = steps.shape[1]
    starts = []
    for dim, n, each in zip(window.dims, array.shape, numbers, strict=True):
        column = np.broadcast_to(np.asarray(each, np.int64), (count,))
        starts.append(extent(dim, n, column)[0].tolist())
    return found | {"starts": starts}


def _scratch(op: Op) -> dict[str, str]:
    return {"name": op.result.name or "scratch", "type": str(op.result.type)}
