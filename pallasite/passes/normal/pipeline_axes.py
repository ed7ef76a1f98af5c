"""pipeline_axes: a pipeline inside each program becomes axes of the grid.

In: programs whose body is one `emit_pipeline`, with or without code around it. Out: a
grid with the axes of both, outer ones first. Programs run in lexicographic order and
blocks are windows onto their arrays, so the steps are the same ones in the same order.
Code before the pipeline runs in the first of its steps, code after it in the last; this
needs at least one step, so the sizes must then be known. A size that each program
computes becomes its upper bound, and a guard skips the steps beyond it. What the code
before computes for later is computed again: it must be cheap, and read only memory that
nothing writes.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, BlockDim, Kernel, Op, Value, Window, walk
from pallasite.ir.rewrite import clone, inline, used_values, writes
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.intervals import HIGHEST, Fact, Facts
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.place_windows import number_facts
from pallasite.passes.normal.again import Again
from pallasite.passes.normal.canonicalize import canonicalize

# Axes that count cores or thread blocks, not steps of one core.
_CORES = ("core_parallel", "subcore_parallel", "cluster")


def pipeline_axes(kernel: Kernel) -> Kernel:
    """The kernel with the axes of nested pipelines as axes of its grid."""
    new = kernel
    while (merged := _merged(new)) is not None:
        new = merged
    return kernel if new is kernel else canonicalize(new)


def _merged(kernel: Kernel) -> Kernel | None:
    """The kernel with one level fewer of pipelines."""
    outer = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(outer) != 1:
        return None
    whole = Pipeline.of(outer[0])
    inner = [op for op in walk(whole.body) if op.name == "pipeline"]
    if len(inner) != 1 or inner[0] not in whole.body.ops:
        return None
    if any(said in _CORES for said in whole.semantics):
        return None
    nested = Pipeline.of(inner[0])
    blocks = {*whole.blocks}
    if any(v in blocks for m in nested.maps for op in walk(m) for v in op.operands):
        return None  # a map of the grid cannot read a program's blocks
    merge = _Merge(kernel, whole, nested)
    return merge.kernel() if merge.is_possible() else None


class _Merge:
    """An outer pipeline and the one in its body."""

    def __init__(self, kernel: Kernel, outer: Pipeline, inner: Pipeline):
        self.whole, self.outer, self.inner = kernel, outer, inner
        ops = outer.body.ops
        at = ops.index(inner.op)
        self.allocs = [op for op in ops[:at] if op.name == "alloc"]
        self.before = [op for op in ops[:at] if op.name != "alloc"]
        self.after = list(ops[at + 1 :])
        self.ids = tuple(Value(INDEX, v.name) for v in (*outer.ids, *inner.ids))
        self.split = len(outer.ids)
        self.again = Again(self.before, Roots(kernel), outer.body)
        self.showing = {each.block: each for each in outer.shown}
        self.made = {v for op in ops[:at] for v in op.results}
        self.made |= {*outer.ids, *outer.blocks}
        self.grid = self.bounds()

    def bounds(self) -> tuple[int | None, ...]:
        """The sizes of the inner axes; an upper bound if a program computes one."""
        facts = Facts()
        facts.note_grid(self.outer.ids, self.outer.grid)
        for op in (*self.whole.body.ops, *self.before):
            facts.note_op(op)
        found: list[int | None] = []
        for size in self.inner.sizes:
            if isinstance(size, int):
                found.append(size)
            else:
                most = facts.of(size).high
                known = size in self.made and most < HIGHEST
                found.append(max(most, 0) if known else None)
        return tuple(found)

    @property
    def sizes(self) -> list[tuple[int | Value, int | None]]:
        """The size of each inner axis as it was, and in the grid."""
        return list(zip(self.inner.sizes, self.grid, strict=True))

    def is_possible(self) -> bool:
        if any(op.result.ref.is_semaphore for op in self.allocs):
            return False
        if self.has_code and not all(self.grid):
            return False
        if set(self.inner.op.attrs) != {"grid", "windows", "semantics"}:
            return False
        if any(v in self.made and n is None for v, n in self.sizes):
            return False
        scalars = [v for m in self.inner.maps for v in used_values(m)]
        scalars += self.inner.dynamic_sizes
        if not all(map(self.again.is_scalar, scalars)):
            return False
        late = Block((), tuple(self.after))
        used = [*scalars, *used_values(self.inner.body), *used_values(late)]
        if not all(map(self.again.can, used)):
            return False
        return all(map(self.can_show, self.inner.shown))

    @property
    def has_code(self) -> bool:
        """Whether something besides the pipeline has effects."""
        return any(map(writes, (*self.before, *self.after)))

    # --- windows ---

    def can_show(self, shown: Shown) -> bool:
        if shown.array in self.whole.params:
            return True
        outer = self.showing.get(shown.array)
        if outer is None or outer.window.mode != shown.window.mode:
            return False
        if not all(_is_blocked(d) for w in (outer, shown) for d in w.window.dims):
            return False
        return all(self.divides(*each) for each in self.dims(outer, shown))

    def dims(self, outer: Shown, inner: Shown):
        """Per dimension of the array: its size, and how each window divides it."""
        kept = iter(inner.window.dims)
        shape = outer.array.ref.shape
        for n, dim in zip(shape, outer.window.dims, strict=True):
            yield n, dim, None if dim.kind == "squeezed" else next(kept)

    def divides(self, n: int, outer: BlockDim, inner: BlockDim | None) -> bool:
        """Whether blocks of blocks are blocks of the array."""
        if inner is None or outer.size == n:
            return True
        return bool(inner.size) and not (n % outer.size or outer.size % inner.size)

    def shown(self) -> list[Shown]:
        """The windows of both, each with a map from all grid indices."""
        result = []
        for each in self.outer.shown:
            ids = self.fresh()
            b = Builder(self.outer.op.loc)
            yields = inline(b, each.index_map, ids[: self.split])
            result.append(each._replace(index_map=b.block(ids, yields)))
        for each in self.inner.shown:
            ids = self.fresh()
            b = Builder(self.inner.op.loc)
            seen = dict(zip(self.outer.ids, ids, strict=False))
            yields = self.inner_numbers(b, each, ids, seen)
            array, window = each.array, each.window
            if each.array in self.showing:
                array, window, yields = self.composed(b, each, ids, yields)
            index_map = b.block(ids, yields)
            result.append(Shown(array, window, index_map, each.block))
        return result

    def fresh(self) -> tuple[Value, ...]:
        return tuple(Value(INDEX, v.name) for v in self.ids)

    def inner_numbers(
        self, b: Builder, shown: Shown, ids: Sequence[Value], seen: dict[Value, Value]
    ) -> tuple[Value, ...]:
        needed = used_values(shown.index_map)
        seen |= self.again.emit(b, needed, seen)
        own = dict(zip(shown.index_map.params, ids[self.split :], strict=True))
        code = Block((), shown.index_map.ops, shown.index_map.yields)
        copy = clone(code, seen | own)
        b.ops += copy.ops
        return copy.yields

    def composed(
        self,
        b: Builder,
        inner: Shown,
        ids: Sequence[Value],
        numbers: Sequence[Value],
    ) -> tuple[Value, Window, tuple[Value, ...]]:
        """A window onto a block of a window, as a window onto its array."""
        outer = self.showing[inner.array]
        shape = outer.array.ref.shape
        places = inline(b, outer.index_map, ids[: self.split])
        shows = number_facts(outer.index_map, outer.window, shape, self.outer.grid)
        facts = number_facts(
            inner.index_map, inner.window, inner.array.ref.shape, self.inner.grid
        )
        inside = iter(zip(numbers, facts, strict=True))
        dims, yields = [], []
        rows = list(self.dims(outer, inner))
        for (n, dim, part), place, shown in zip(rows, places, shows, strict=True):
            if part is None:
                dims.append(dim)
                yields.append(place)
                continue
            number, fact = next(inside)
            dims.append(part)
            if dim.size == n:
                yields.append(number)
                continue
            count = dim.size // part.size
            number = _nearest(b, number, fact, count)
            place = _nearest(b, place, shown, n // dim.size)
            yields.append(b.add(b.mul(place, b.index(count)), number))
        window = replace(inner.window, dims=tuple(dims))
        return outer.array, window, tuple(yields)

    # --- code ---

    def kernel(self) -> Kernel:
        shown = self.shown()
        blocks = [each.block for each in shown]
        b = Builder(self.inner.op.loc)
        seen = dict(zip((*self.outer.ids, *self.inner.ids), self.ids, strict=True))
        late = Block((), tuple(self.after))
        self.guarded(b, self.before, seen, first=True)
        self.step(b, seen)
        self.guarded(b, self.after, seen, first=False, again=used_values(late))
        body = b.block((*self.ids, *blocks))
        used = set(used_values(body))
        place = {ref: n for n, ref in enumerate(self.whole.params)}
        shown = [each for each in shown if each.block in used]
        shown.sort(key=lambda each: place.get(each.array, len(place)))
        body = replace(body, params=(*self.ids, *(each.block for each in shown)))
        merged = self.outer.with_(
            grid=self.outer.grid + self.grid,
            dynamic_sizes=(
                *self.outer.dynamic_sizes,
                *(v for v, n in self.sizes if isinstance(v, Value) and n is None),
            ),
            semantics=self.outer.semantics + self.inner.semantics,
            body=replace(body, params=self.ids),
        )
        new = merged.showing(shown, body).to_op()
        ops = []
        for op in self.whole.body.ops:
            ops += [*self.allocs, new] if op is self.outer.op else [op]
        return self.whole.with_(body=replace(self.whole.body, ops=tuple(ops)))

    def step(self, b: Builder, seen: dict[Value, Value]) -> None:
        """Emit the inner body, for the steps that the program has."""
        pairs = zip(self.sizes, self.ids[self.split :], strict=True)
        bounded = [
            (index, size)
            for (size, most), index in pairs
            if isinstance(size, Value) and most is not None
        ]
        limits = self.again.emit(b, [size for _, size in bounded], seen)
        tests = [b.lt(index, limits.get(v) or seen.get(v, v)) for index, v in bounded]
        inside = Builder(b.loc) if tests else b
        values = self.again.emit(inside, used_values(self.inner.body), seen | limits)
        code = Block((), self.inner.body.ops)
        inside.ops += clone(code, seen | limits | values).ops
        if tests:
            _guard(b, tests, inside)

    def guarded(
        self,
        b: Builder,
        ops: Sequence[Op],
        seen: dict[Value, Value],
        first: bool,
        again: Sequence[Value] = (),
    ) -> None:
        """Emit code that runs in the first or the last step of the inner axes."""
        if not any(map(writes, ops)):
            return
        pairs = zip(self.grid, self.ids[self.split :], strict=True)
        moving = [(n, index) for n, index in pairs if n is not None and n > 1]
        inside = Builder(b.loc) if moving else b
        values = self.again.emit(inside, again, seen)
        inside.ops += clone(Block((), tuple(ops)), seen | values).ops
        if not moving:
            return
        tests = [b.eq(index, b.index(0 if first else n - 1)) for n, index in moving]
        _guard(b, tests, inside)


def _guard(b: Builder, tests: Sequence[Value], inside: Builder) -> None:
    """Emit code that runs only if all tests hold."""
    test = tests[0]
    for other in tests[1:]:
        test = b.and_(test, other)
    which = b.cast(test, INDEX.dtype)
    b.emit("cond", which, regions=(Block(), inside.block()))


def _nearest(b: Builder, number: Value, fact: Fact, count: int) -> Value:
    """The nearest of `count` blocks, which is what a number out of range means."""
    if fact.within(0, count - 1):
        return number
    return b.clamp(b.index(0), number, b.index(count - 1))


def _is_blocked(dim: BlockDim) -> bool:
    return dim.kind in ("blocked", "squeezed")
