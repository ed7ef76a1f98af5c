"""Races, and the order of programs along parallel axes.

Programs that differ along an axis declared parallel, which grid analysis does not prove
to be, are in different lanes. No element may be written in one lane and touched in
another. Axes that are parallel although nobody declared them so are proved to be by
grid analysis, which made them parallel.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pallasite.interpret.races import racing_axes
from pallasite.interpret.resume import core_axes
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.nodes import walk as walk_ops
from pallasite.ir.roles import Pipeline
from pallasite.ops.gpu import concurrent_axes
from pallasite.passes.analysis.grid import PARALLEL, GridInfo, analyze
from pallasite.passes.run import run
from pallasite.proofs.cells import Cells, TooManyError
from pallasite.proofs.places import Names
from pallasite.proofs.replay import Replay
from pallasite.proofs.tables import Table
from pallasite.proofs.touches import Touch, Walk
from pallasite.proofs.verdicts import PROVED, REFUTED, UNKNOWN, Claim, worst

_NONE = np.iinfo(np.int64).max


def races(walk: Walk, replay: Replay) -> Claim:
    """Whether programs along parallel axes leave each other's elements alone."""
    kernel = walk.kernel
    pipelines = [op for op in kernel.body.ops if op.name == "pipeline"]
    beside = _side_by_side(kernel)
    if len(pipelines) != 1 or beside is not None:
        return _without_grid(kernel, pipelines, beside)
    axes = racing_axes(kernel)
    if not axes:
        known = analyze(kernel).parallel
        along = " and ".join(f"i{a}" for a in known)
        what = f"programs along {along} share nothing that one writes"
        return Claim("races", PROVED, what if known else "no axis is parallel")
    judge = _Judge(walk, pipelines[0], axes, replay)
    along = " and ".join(f"i{a}" for a in axes)
    return worst(
        "races", judge.claims(), f"programs along {along} share nothing that one writes"
    )


def _analysed(kernel: Kernel) -> GridInfo | None:
    normal = run(kernel)
    found = [op for op in normal.body.ops if op.name == "pipeline"]
    return analyze(normal) if len(found) == 1 else None


def _side_by_side(kernel: Kernel) -> Op | None:
    """What runs concurrently other than programs of the grid."""
    ops = list(walk_ops(kernel.body))
    beside = ("roles", "warps")
    return next(
        (
            op
            for op in ops
            if op.name in beside or core_axes(kernel, op) or concurrent_axes(kernel, op)
        ),
        None,
    )


def _without_grid(kernel: Kernel, pipelines: Sequence[Op], beside: Op | None) -> Claim:
    if beside is not None:
        why = "cores, roles or thread blocks run at once, ordered by their signals"
        return Claim("races", UNKNOWN, why, str(beside.loc or ""))
    said = [w for op in pipelines for w in Pipeline.of(op).semantics if w in PARALLEL]
    if said:
        why = "several grids with parallel axes follow each other"
        return Claim("races", UNKNOWN, why, str(pipelines[0].loc or ""))
    return Claim("races", PROVED, "one thread of control, no parallel axis")


class _Judge:
    def __init__(self, walk: Walk, op: Op, axes: Sequence[int], replay: Replay):
        self.walk, self.op, self.replay = walk, op, replay
        self.pipeline, self.names = Pipeline.of(op), Names(walk.kernel)
        # The kernel's own grid has the outermost steps.
        self.axes = tuple(axes)
        self.sizes = [self.pipeline.grid[a] for a in axes]

    def claims(self) -> list[Claim]:
        if any(n is None for n in self.sizes):
            why = "the size of a parallel axis is known only at run time"
            return [Claim("races", UNKNOWN, why, str(self.op.loc or ""))]
        roots = dict.fromkeys(t.root for t in self.walk.touches if t.writes)
        return [self._root(root) for root in roots]

    def _root(self, root: Value) -> Claim:
        touches = [t for t in self.walk.touches if t.root is root]
        name = self.names.ref(root)
        if root not in self.walk.kernel.params:
            return self._scratch(root, name, touches)
        lost = [t for t in touches if t.parts is None and t.points is None]
        if lost:
            why = f"which elements of {name} are touched is not known: {lost[0].why}"
            return self._unknown(why, lost)
        try:
            clash = self._clash(root, touches)
        except TooManyError:
            return self._unknown(
                f"{name} has too many blocks and steps to try them all", touches
            )
        if clash is None:
            return Claim("races", PROVED, "")
        element, one, other, certain, touch = clash
        text = f"{name}{list(element)}, with {self._lane(other)}"
        example = self.replay.example("races", self._lane(one), text)
        line = str(touch.op.loc or "")
        if certain and self.replay.report("races"):
            what = f"two programs along a parallel axis use one element of {name}"
            return Claim("races", REFUTED, what, line, example)
        what = f"programs along a parallel axis may use one element of {name}"
        why = touch.place.why or touch.why or "whether their values differ is not known"
        return Claim("races", UNKNOWN, f"{what}: {why}", line, None)

    def _scratch(self, root: Value, name: str, touches: Sequence[Touch]) -> Claim:
        """Scratch is each lane's own, but what it holds at first is another's."""
        if any(
            op.result is root for op in self.pipeline.body.ops if op.name == "alloc"
        ):
            return Claim("races", PROVED, "")
        info = analyze(self.walk.kernel)
        carried = [c for c in info.carries if c.name == name]
        if carried and not any(set(self.axes) & c.axes for c in carried):
            return Claim("races", PROVED, "")
        if self._filled_first(root, touches):
            return Claim("races", PROVED, "")
        if self.replay.report("races"):
            what = f"the scratch {name} carries values along a parallel axis"
            example = self.replay.example("races", "", name)
            return Claim("races", REFUTED, what, self._line(touches), example)
        return self._unknown(
            f"the scratch {name} may carry values along a parallel axis", touches
        )

    def _filled_first(self, root: Value, touches: Sequence[Touch]) -> bool:
        """Whether each lane certainly writes an element before it reads it.

        A lane runs its programs in the grid's order, and a program its ops in theirs;
        stores in loops do not count, as their rounds may come after a read.
        """
        sizes, tables = self.pipeline.grid, self.walk.tables
        reads = [t for t in touches if t.reads]
        if any(n is None for n in sizes) or any(
            t.parts is None and t.points is None for t in reads
        ):
            return False
        time = tables.scalar(0)
        for axis, n in enumerate(sizes):
            time = time * (n or 1) + tables.counted(n or 1, axis)
        known = [t for t in touches if t.parts is not None or t.points is not None]
        try:
            cells = Cells(root, known, tables.rank)
            lanes = int(np.prod([n or 1 for n in self.sizes]))
            first_read = np.full((lanes, *cells.counts), _NONE)
            first_written = first_read.copy()
            for number, touch in enumerate(known):
                fills = touch.writes and touch.sure and touch.place.depth == len(sizes)
                if not touch.reads and not fills:
                    continue
                key = time * len(known) + number
                where, lane, keys = self._hits(cells, touch, range(len(sizes)), key)
                first = first_read if touch.reads else first_written
                np.minimum.at(first, (lane, *where), keys)
        except TooManyError:
            return False
        return bool(np.all((first_read == _NONE) | (first_written < first_read)))

    def _clash(self, root: Value, touches: Sequence[Touch]):
        """An element that a lane writes and another touches, if there is one."""
        cells = Cells(root, touches, self.walk.tables.rank)
        low = np.full(cells.counts, _NONE)
        high = np.full(cells.counts, -1)
        wlow, whigh = low.copy(), high.copy()
        for touch in touches:
            if touch.atomic and len({t.op.name for t in touches}) == 1:
                continue  # nothing but atomics: they add up in any order
            where, lanes = self._lanes(cells, touch)
            # A dimension in front, as a scalar has no place to index.
            at = (np.zeros_like(lanes), *where)
            np.minimum.at(low[None], at, lanes)
            np.maximum.at(high[None], at, lanes)
            if touch.writes:
                np.minimum.at(wlow[None], at, lanes)
                np.maximum.at(whigh[None], at, lanes)
        bad = (whigh >= 0) & (low != high)
        if not bad.any():
            return None
        cell = tuple(np.argwhere(bad)[0])
        involved = [t for t in touches if self._touches(cells, t, cell)]
        writer = next(t for t in involved if t.writes)
        unsure = [t for t in involved if not t.sure]
        first = unsure[0] if unsure else writer
        return (
            cells.first_element(cell),
            int(low[cell]),
            int(high[cell]),
            not unsure,
            first,
        )

    def _touches(self, cells: Cells, touch: Touch, cell: Sequence[int]) -> bool:
        where, lanes = self._lanes(cells, touch)
        same = np.ones(len(lanes), bool)
        for found, wanted in zip(where, cell, strict=True):
            same &= found == wanted
        return bool(same.any())

    def _lanes(
        self, cells: Cells, touch: Touch
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """The cells that a touch hits, and the lane that does, at all its steps."""
        where, lanes, _ = self._hits(cells, touch, self.axes, None)
        return where, lanes

    def _hits(
        self, cells: Cells, touch: Touch, axes: Sequence[int], key: Table | None
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
        """The same with a key of each step, told apart along axes of the grid."""
        lane: Table = self.walk.tables.scalar(0)
        for axis, n in zip(self.axes, self.sizes, strict=True):
            assert n is not None
            lane = lane * n + self.walk.tables.counted(n, axis)
        key = lane if key is None else key
        # Every lane takes part, also along axes on which no place depends.
        active = touch.place.active & np.ones_like(lane, bool) & np.ones_like(key, bool)
        keep = [d for d in range(active.ndim) if d in axes or _moves(touch, d)]
        drop = tuple(d for d in range(active.ndim) if d not in keep)
        active = np.asarray(active.any(axis=drop, keepdims=True))
        hits = cells.hits(_at(touch, active))

        def chosen(table: Table) -> np.ndarray:
            own = table.reshape(table.shape + (1,) * (hits.valid.ndim - table.ndim))
            return np.broadcast_to(own, hits.valid.shape)[hits.valid]

        where = tuple(c[hits.valid] for c in hits.cells)
        return where, chosen(lane), chosen(key)

    def _lane(self, number: int) -> str:
        ids = [int(i) for i in np.unravel_index(number, [n or 1 for n in self.sizes])]
        words = (f"i{a} = {i}" for a, i in zip(self.axes, ids, strict=True))
        return "programs with " + " and ".join(words)

    def _unknown(self, why: str, touches: Sequence[Touch]) -> Claim:
        return Claim("races", UNKNOWN, why, self._line(touches))

    def _line(self, touches: Sequence[Touch]) -> str:
        writes = [t for t in touches if t.writes]
        return next((str(t.op.loc) for t in (*writes, *touches) if t.op.loc), "")


def _moves(touch: Touch, d: int) -> bool:
    tables = [p.start for p in touch.parts or ()]
    if touch.points is not None:
        tables = [*touch.points, touch.on] if touch.on is not None else [*touch.points]
    return any(t.shape[d] > 1 for t in tables)


def _at(touch: Touch, active: Table) -> Touch:
    return replace(touch, place=replace(touch.place, active=active))


def order(walk: Walk, races: Claim) -> Claim:
    """Whether results do not depend on the order of programs along parallel axes."""
    if races.verdict != PROVED:
        why = f"see races: {races.reason}"
        return Claim("order", races.verdict, why, races.line, races.counterexample)
    if not _has_parallel_axes(walk.kernel):
        return Claim("order", PROVED, "programs run in the order of the grid")
    for touch in walk.touches:
        if touch.atomic and touch.root.ref.dtype.is_float:
            why = (
                "atomics on floats round by their order, which parallel axes do not fix"
            )
            return Claim("order", UNKNOWN, why, str(touch.op.loc or ""))
    what = "no program sees what another along a parallel axis does"
    return Claim("order", PROVED, what)


def _has_parallel_axes(kernel: Kernel) -> bool:
    said = (
        word in PARALLEL
        for op in walk_ops(kernel.body)
        if op.name == "pipeline"
        for word in Pipeline.of(op).semantics
    )
    if any(said):
        return True
    info = _analysed(kernel)
    return info is not None and bool(info.parallel)
