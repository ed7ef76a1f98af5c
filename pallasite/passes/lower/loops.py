"""Turns a kernel's pipeline into programs and loops.

`to_loops(kernel, info)` keeps the parallel axes as a pipeline without windows (one
program per step) and turns the sequential ones into `for` loops inside each program,
last axis innermost; axes with one step disappear. A window becomes a `block_view`,
opened in the outermost loop whose body needs it moved; scratch becomes private to each
program. Nested pipelines become loops too. Runs after grid analysis (`grid.py`), before
`promote.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, inline, map_ops
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import INDEX
from pallasite.ops.gpu import SEMAPHORES
from pallasite.passes.analysis.grid import GridInfo, analyze_pipeline, find_pipeline


def to_loops(kernel: Kernel, info: GridInfo) -> Kernel:
    """One program per step along the parallel axes; loops along the others.

    Args:
      kernel: a kernel whose body is one pipeline.
      info: its grid analysis.

    An axis whose size is known only at run time becomes a loop.
    """
    pipeline = find_pipeline(kernel)
    nest = _Nest(pipeline, info, lambda a: a is not None)
    program = Builder(pipeline.loc)
    scratch = _scratch_ops(kernel)
    program.ops += scratch
    ids = [Value(INDEX, nest.ids[a].name or f"i{a}") for a in nest.outer]
    said = Pipeline.of(pipeline).semantics
    nest.fill(program, ids)

    outside = Builder(pipeline.loc)
    moved = {id(op) for op in (*scratch, pipeline)}
    outside.ops += [op for op in kernel.body.ops if id(op) not in moved]
    body = map_ops(program.block(ids), _inner_pipeline, outside.ops)
    notes = {name: attr for name, attr in pipeline.attrs.items() if "." in name}
    outside.emit(
        "pipeline",
        *[n for a in nest.outer if isinstance(n := nest.sizes[a], Value)],
        regions=(body,),
        grid=tuple(nest.grid[a] for a in nest.outer),
        windows=(),
        semantics=tuple(
            "cluster" if said[a] == "cluster" else "parallel" for a in nest.outer
        ),
        **notes,
    )
    outside.ops += kernel.body.ops[kernel.body.ops.index(pipeline) + 1 :]
    return kernel.with_(body=outside.block())


def _scratch_ops(kernel: Kernel) -> list[Op]:
    """Allocations and their initialisation: each program has its own, except of what
    programs count with together."""
    refs: set[Value] = set()
    found: list[Op] = []
    for op in kernel.body.ops:
        if op.name == "alloc" and op.result.ref.space == SEMAPHORES:
            continue
        if op.name == "alloc":
            refs.add(op.result)
        elif op.name == "pipeline" or refs.isdisjoint(op.operands):
            continue
        found.append(op)
    return found


def _inner_pipeline(op: Op, builder: Rewriter) -> Sequence[Value] | None:
    """A pipeline inside a program: every axis is a loop."""
    if op.name != "pipeline":
        return None
    before = [builder.producers[v] for v in builder.producers]
    info = analyze_pipeline(op, list(dict.fromkeys(before)))
    _Nest(op, info, lambda size: False).fill(builder, [])
    return ()


@dataclass
class _Window:
    number: int
    loops: frozenset[int]  # the loops along axes that move it


class _Nest:
    """The loop nest of one pipeline."""

    def __init__(self, op: Op, info: GridInfo, may_be_program):
        pipeline = Pipeline.of(op)
        self.op, self.grid, self.ids = op, pipeline.grid, pipeline.ids
        self.sizes, self.shown, self.body = (
            pipeline.sizes,
            pipeline.shown,
            pipeline.body,
        )
        # Ops name the axes of a cluster by their distance from the last: all remain.
        clusters = {a for a, said in enumerate(pipeline.semantics) if said == "cluster"}
        self.single = [
            a for a, n in enumerate(self.grid) if n == 1 and a not in clusters
        ]
        rest = [a for a in range(len(self.grid)) if a not in self.single]
        parallel = set(info.parallel)
        self.outer = [a for a in rest if a in parallel and may_be_program(self.grid[a])]
        self.looped = [a for a in rest if a not in self.outer]
        inner = frozenset(self.looped)
        self.pending = [
            _Window(n, window.axes & inner) for n, window in enumerate(info.windows)
        ]

    def fill(self, builder: Builder, ids: Sequence[Value]) -> None:
        """Emit the loop nest; `ids` are the program's indices along the outer axes."""
        self.at = dict(zip(self.outer, ids, strict=True))
        self.at |= {a: builder.index(0) for a in self.single}
        self.views: dict[int, Value] = {}
        self.level(builder, 0)

    def level(self, builder: Builder, depth: int) -> None:
        done = frozenset(self.looped[:depth])
        for window in list(self.pending):
            if window.loops <= done:
                self.pending.remove(window)
                self.views[window.number] = self.open(builder, window.number)
        if depth == len(self.looped):
            ids = [self.at[a] for a in range(len(self.grid))]
            views = [self.views[n] for n in range(len(self.shown))]
            inline(builder, self.body, [*ids, *views])
            return
        axis = self.looped[depth]
        index = Value(INDEX, self.ids[axis].name or f"i{axis}")
        self.at[axis] = index
        inside = Builder(self.op.loc)
        self.level(inside, depth + 1)
        size = self.sizes[axis]
        limit = size if isinstance(size, Value) else builder.index(size)
        first, step = builder.index(0), builder.index(1)
        builder.emit("for", first, limit, step, regions=(inside.block([index]),))

    def open(self, builder: Builder, number: int) -> Value:
        # The map does not depend on loops not yet open: any index will do.
        zero = None
        arguments = []
        for axis in range(len(self.grid)):
            if axis not in self.at and zero is None:
                zero = builder.index(0)
            arguments.append(self.at.get(axis, zero))
        shown = self.shown[number]
        indices = inline(builder, shown.index_map, arguments)
        (view,) = builder.emit(
            "block_view",
            shown.array,
            *indices,
            names=[shown.block.name],
            window=shown.window,
        )
        return view
