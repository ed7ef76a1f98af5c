"""merge_k_steps: merges grid steps that only accumulate matmuls into fewer, deeper
ones.

In: a kernel whose last axis runs along k: each step multiplies a block of rows by a
block of columns and adds the result to the same accumulators; branches at the first and
the last step initialise and finish them. Out: the same code with blocks that are
several times as deep, on a grid that is shorter by the same factor. Accumulators are
then read and written once where the author's depth would do so several times.
`split_k_steps` is the inverse, for chips on which the author's blocks are too deep.
Bodies that do anything else are left unchanged.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    Block,
    BlockDim,
    Kernel,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import Rewriter, map_ops, users_of, writes
from pallasite.ir.roles import Cond, Pipeline
from pallasite.passes.schedule.widen_k import (
    Deeper,
    Depths,
    adds_up,
    only_user,
)


def merge_k_steps(kernel: Kernel, deepest: int, most_bytes: int) -> Kernel:
    """Merge steps of pipelines.

    No block becomes deeper than `deepest`, no computed tile larger than `most_bytes`.
    """

    def factor(found: "_Steps") -> Fraction:
        return Fraction(found.depths.factor(found.count, deepest, most_bytes))

    return _with_other_steps(kernel, factor)


def split_k_steps(kernel: Kernel, depth: int) -> Kernel:
    """Divide steps of pipelines into ones that are `depth` deep, where that divides."""

    def factor(found: "_Steps") -> Fraction:
        sizes = {each.size for each in found.moving.values()}
        if any(n % depth or n < depth for n in sizes) or len(sizes) != 1:
            return Fraction(1)
        return Fraction(depth, sizes.pop())

    return _with_other_steps(kernel, factor)


def _with_other_steps(kernel: Kernel, factor: "Callable[[_Steps], Fraction]") -> Kernel:
    if kernel.aliases:  # refs may alias: read as one, written as another
        return kernel
    # None of these refs alias.
    allocated = (op.result for op in walk(kernel.body) if op.name == "alloc")
    apart = {*kernel.params, *allocated}

    def change(op: Op, b: Rewriter) -> tuple[()] | None:
        new = _changed(op, apart, factor) if op.name == "pipeline" else op
        if new is op:
            return None
        b.ops.append(new)
        return ()

    return map_ops(kernel, change)


def _changed(op: Op, apart: set[Value], choose: "Callable[[_Steps], Fraction]") -> Op:
    pipeline = Pipeline.of(op)
    moving = _moving(pipeline)
    if not moving or not apart.issuperset(pipeline.arrays):
        return op
    found = _Steps(pipeline, moving, apart)
    if not found.are_sums():
        return op
    *grid, _ = pipeline.grid
    factor = choose(found)
    if factor == 1 or any(
        each.outside(found.count, factor) for each in moving.values()
    ):
        return op
    windows = list(pipeline.windows)
    for each in moving.values():
        windows[each.number] = each.deeper(windows[each.number], factor)
    return pipeline.with_(
        grid=(*grid, int(found.count / factor)),
        windows=tuple(windows),
        body=_deeper(found, factor),
    ).to_op()


@dataclass(frozen=True)
class _Moving:
    """A window that shows the next part of one dimension at each step."""

    number: int  # of the window
    array: Value
    array_dim: int
    dim: int  # of the block
    size: int

    def outside(self, steps: int, factor: Fraction) -> bool:
        """Whether a block that extends past the edge would become deeper, or one that
        lies entirely past it would have to be shown."""
        extent = self.array.ref.shape[self.array_dim]
        if steps * self.size <= extent:
            return False
        return factor > 1 or steps * self.size - self.size * factor >= extent

    def deeper(self, window: Window, factor: Fraction) -> Window:
        dims = list(window.dims)
        dims[self.array_dim] = BlockDim(int(self.size * factor))
        return replace(window, dims=tuple(dims))


def _moving(pipeline: Pipeline) -> dict[Value, _Moving] | None:
    """Blocks that move along the last axis; None if one moves in another way."""
    steps = pipeline.grid[-1] if pipeline.grid else None
    if steps is None:
        return None
    found: dict[Value, _Moving] = {}
    for number, (array, window, index_map, block) in enumerate(pipeline.shown):
        *_, step = index_map.params
        if not _uses(index_map, step):
            continue
        dim = _only_dim(window, index_map, step)
        if dim is None or window.mode != "in":
            return None
        size = window.dims[dim].size
        if steps * size > array.ref.shape[dim] and window.fill != 0:
            return None  # the last block extends past the edge
        squeezed = sum(d.kind == "squeezed" for d in window.dims[:dim])
        found[block] = _Moving(number, array, dim, dim - squeezed, size)
    return found


def _uses(block: Block, value: Value) -> bool:
    return value in block.yields or any(value in op.operands for op in walk(block))


def _only_dim(window: Window, index_map: Block, step: Value) -> int | None:
    """The dimension whose block number is the last grid index, if that is all."""
    dims = [n for n, value in enumerate(index_map.yields) if value is step]
    inside = any(step in op.operands for op in walk(index_map))
    plain = all(d.kind in ("blocked", "squeezed") for d in window.dims)
    if len(dims) != 1 or inside or not plain:
        return None
    return dims[0] if window.dims[dims[0]].kind == "blocked" else None


class _Sum(NamedTuple):
    """`ref[...] += dot(a, b)`, as ops."""

    load: Op
    product: Op
    store: Op


class _Steps:
    """What the ops of a body do, seen from one step to the next."""

    def __init__(
        self, pipeline: Pipeline, moving: dict[Value, _Moving], apart: set[Value]
    ):
        self.body, self.moving, self.apart = pipeline.body, moving, apart
        self.arrays, count = pipeline.arrays, pipeline.grid[-1]
        assert count is not None
        self.count = count
        self.step, self.blocks = pipeline.ids[-1], pipeline.blocks
        self.depths = Depths({v: op for op in self.body.ops for v in op.results})
        self.users = users_of(self.body)
        self.sums = [s for op in self.body.ops if (s := self._sum(op)) is not None]
        self.when: dict[Value, str] = {}  # of bools: true at the first step, or last
        self.asks_for_last: set[Op] = set()
        self.begun, self.ended = set[Op](), set[Op]()  # stores of accumulators
        self.closed = False  # by a branch at the last step

    def are_sums(self) -> bool:
        """Whether steps only accumulate matmuls, between branches at the first and the
        last."""
        adds = all(map(self._only_adds_products, self.body.ops))
        return adds and len(self.sums) == len(self.ended) > 0

    def _only_adds_products(self, op: Op) -> bool:
        if self.step in op.operands or self.when.keys() & set(op.operands):
            return self._is_branch(op) if op.regions else self._is_question(op)
        if op.regions:
            return False
        if op.name == "load":
            return self._begins_sum(op) or self._is_part(op) or self._is_given(op)
        if op.name == "store":
            return self._ends_sum(op)
        pure = table()[op.name].effect is Effect.PURE
        if not pure or any(v.is_ref for v in (*op.operands, *op.results)):
            return False
        if op.name == "dot" and any(s.product is op for s in self.sums):
            return self.depths.are_summed(op)
        return not self.depths.touches(op) or self.depths.follow(op)

    # --- branches ---

    def _is_question(self, op: Op) -> bool:
        """Whether the step is the first or the last one, and maybe more than that."""
        if op.name == "eq" and self.step in op.operands:
            other = next((v for v in op.operands if v is not self.step), self.step)
            number = self.depths.number(other)
            if number not in (0, self.count - 1):
                return False
            self.when[op.result] = "last" if number else "first"
            self.asks_for_last |= {op} if number else set()
            return True
        known = {self.when[v] for v in op.operands if v in self.when}
        if op.name not in ("cast", "and") or self.step in op.operands:
            return False
        self.when[op.result] = min(known)
        return len(known) == 1

    def _is_branch(self, op: Op) -> bool:
        if op.name != "cond" or op.results or len(op.regions) != 2:
            return False
        which, (otherwise, branch) = Cond.of(op).which, Cond.of(op).branches
        if which not in self.when or otherwise.ops:
            return False
        if self.when[which] == "first":
            in_order = not self.begun
        else:
            in_order = self.closed = self.begun == self.ended
        changing = {self.step, *self.moving, *self.depths.dims, *self.when}
        inside = {v for inner in walk(branch) for v in inner.operands}
        return in_order and not changing & inside

    def _is_part(self, op: Op) -> bool:
        """A load of the whole block along the dimension that moves."""
        access = Access.of(op)
        each = self.moving.get(access.ref)
        if each is None or access.mask is not None or access.index_operands:
            return False
        if access.index[each.dim] != Span(0, each.size):
            return False
        self.depths.add_load(op, each.dim)
        return True

    # --- accumulators ---

    def _sum(self, dot: Op) -> _Sum | None:
        """The memory that a matmul is added to, if that is its only use."""
        if dot.name != "dot":
            return None
        total = only_user(self.users, dot.result, "add")
        store = total and only_user(self.users, total.result, "store")
        if total is None or store is None or not adds_up(dot):
            return None
        others = [
            self.depths.made.get(v) for v in total.operands if v is not dot.result
        ]
        load = others[0] if others else None
        if load is None or load.name != "load":
            return None
        ref, _, *place = store.operands
        same = load.operands == (ref, *place) and store.operands[1] is total.result
        same &= load.attrs["index"] == store.attrs["index"]
        masked = load.attrs.get("mask") or store.attrs.get("mask")
        alone = only_user(self.users, load.result, "add") is total
        apart = self.apart.difference(m.array for m in self.moving.values())
        is_sum = same and alone and not masked and self._memory(ref) in apart
        return _Sum(load, dot, store) if is_sum else None

    def _begins_sum(self, op: Op) -> bool:
        stores = {s.store for s in self.sums if s.load is op}
        self.begun |= stores
        return bool(stores) and not self.closed

    def _ends_sum(self, op: Op) -> bool:
        """Two accumulators in the same memory must have disjoint lifetimes."""
        self.ended.add(op)
        memory = self._memory(op.operands[0])
        others = (s for s in self.begun if self._memory(s.operands[0]) is memory)
        return op in self.begun and self.ended.issuperset(others)

    def _is_given(self, op: Op) -> bool:
        """A load of a block that steps neither move nor write."""
        ref = op.operands[0]
        written = any(writes(user) for user in self.users[ref])
        return ref in self.blocks and ref not in self.moving and not written

    def _memory(self, ref: Value) -> Value:
        """The array that a ref is a block of."""
        if ref in self.blocks:
            return self.arrays[self.blocks.index(ref)]
        return ref


def _deeper(found: _Steps, factor: Fraction) -> Block:
    body, deeper = found.body, Deeper(found.depths, factor)
    for block, each in found.moving.items():
        type = replace(block.ref, shape=deeper.shape(block.ref.shape, each.dim))
        deeper.new[block] = Value(type, block.name)
    b = Builder()
    for op in body.ops:
        if op in found.asks_for_last:
            last = b.index(int(found.count / factor) - 1)
            operands = tuple(v if v is found.step else last for v in op.operands)
            op = op.with_(operands=operands)
        deeper.emit(b, op)
    return replace(body, params=deeper.mapped(body.params), ops=tuple(b.ops))
