"""reload_operands: matmul operands that do not fit in shared memory are loaded again.

In: a scheduled kernel before `launch`. Out: the same kernel, if its operands fit.
Otherwise each operand that is kept in shared memory while other matmuls need the room
is loaded anew before every matmul that takes it: from its array, or, if it is computed,
from scratch in main memory, which the caches hold. A matmul whose own operands do not
fit becomes a loop over parts of its depth, which are loaded from there.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pallasite.backends.triton.launch import AGAIN, Need, chosen_warps
from pallasite.backends.triton.shared_memory import SharedMemory, operand_bytes
from pallasite.ir.build import Builder, access_operands, part_start
from pallasite.ir.nodes import Access, Block, Kernel, Op, Span, Value, full_index
from pallasite.ir.rewrite import dead_code, with_regions
from pallasite.ir.roles import Dot, DotSide
from pallasite.ir.types import INDEX, RefType
from pallasite.passes.analysis.memory import Roots, constant_inputs
from pallasite.target import Gpu

LEAST_DEPTH = 16  # of a matmul
# Of shared memory, once there are reloads: Triton's allocations leave gaps.
FILLED = 0.5


def reload_operands(kernel: Kernel, params: Mapping[str, Any], chip: Gpu) -> Kernel:
    """Load operands of matmuls again where they do not all fit in shared memory."""
    available = chip.shared.bytes
    tried = set[Value | Op]()
    while True:
        warps = chosen_warps(Need.of(kernel), params, chip)
        shared = SharedMemory(kernel, warps, chip)
        size, op, kept = shared.peak(stages=1)
        if size <= available or op is None:
            return kernel
        available = int(FILLED * chip.shared.bytes)
        own = shared.multiplied(op)
        others = {v for v in kept - own - tried if not _is_again(shared, v)}
        across = [v for v in shared.held if v in others]
        if across:
            value = max(across, key=lambda v: shared.held[v])
            tried.add(value)
            kernel = _Reloads(kernel, shared, value).kernel()
        elif op.name == "dot" and op not in tried:
            room = available - size + sum(shared.held[v] for v in own)
            made = _Rounds(kernel, shared, op, room).kernel()
            tried.add(op)
            if made is None:
                return kernel
            kernel = made
        else:
            return kernel


def _is_again(shared: SharedMemory, value: Value) -> bool:
    """Whether an operand is already loaded right before its matmul, and its views."""
    made = shared.producers.get(value)
    return made is not None and bool(made.attrs.get(AGAIN))


class _Edit(ABC):
    """A rewrite around matmuls; `scratch` collects what it allocates."""

    def __init__(self, kernel: Kernel, shared: SharedMemory):
        self.original, self.shared = kernel, shared
        self.scratch = Builder(kernel.loc)
        self.stored = dict[Value, Value]()  # tile -> scratch
        self.roots, self.constant = Roots(kernel), constant_inputs(kernel)

    def can_repeat(self, op: Op | None) -> bool:
        """Whether an op loads what nothing in the kernel writes."""
        if op is None or op.name != "load":
            return False
        return self.roots.of(op.operands[0]) in self.constant

    def allocate(self, value: Value) -> None:
        if value not in self.stored:
            kind = RefType(value.tile.shape, value.tile.dtype, "vmem")
            self.stored[value] = self.scratch.op("alloc", type=kind)

    def rewritten(self) -> Kernel:
        body = self.block(self.original.body)
        ops = []
        for op in body.ops:
            if op.name == "pipeline":
                *maps, inner = op.regions
                inner = replace(inner, ops=(*self.scratch.ops, *inner.ops))
                op = with_regions(op, [*maps, inner])
            ops.append(op)
        return dead_code(self.original.with_(body=replace(body, ops=tuple(ops))))

    def block(self, block: Block) -> Block:
        b = Builder()
        self.store(b, block.params)
        for op in block.ops:
            b.loc = op.loc
            if op.regions:
                op = with_regions(op, [self.block(region) for region in op.regions])
            if op.name == "dot":
                self.dot(b, op)
            else:
                b.ops.append(op)
            self.store(b, op.results)
        return b.block(block.params, block.yields)

    def store(self, b: Builder, made: Iterable[Value]) -> None:
        for value in made:
            if value in self.stored:
                b.store(self.stored[value], value)

    @abstractmethod
    def dot(self, b: Builder, op: Op) -> None:
        """Emit what replaces a matmul."""


class _Reloads(_Edit):
    """One operand, loaded before each matmul that takes it."""

    def __init__(self, kernel: Kernel, shared: SharedMemory, value: Value):
        super().__init__(kernel, shared)
        self.value = value
        self.load = shared.producers.get(value)
        if not self.can_repeat(self.load):
            self.allocate(value)

    def kernel(self) -> Kernel:
        return self.rewritten()

    def dot(self, b: Builder, op: Op) -> None:
        operands = [
            self.again(b, v) if self.shared.source(v) is self.value else v
            for v in op.operands
        ]
        b.ops.append(op.with_(operands=tuple(operands)))

    def again(self, b: Builder, value: Value) -> Value:
        """The operand, and whatever views of it are multiplied."""
        note: dict[str, Any] = {AGAIN: True}
        if value is self.value:
            if value in self.stored:
                return b.load(self.stored[value], **note)
            assert self.load is not None
            return b.op("load", *self.load.operands, **{**self.load.attrs, **note})
        view = self.shared.producers[value]
        return b.op(view.name, self.again(b, view.operands[0]), **view.attrs)


class _Rounds(_Edit):
    """One matmul as a loop over parts of its depth."""

    def __init__(self, kernel: Kernel, shared: SharedMemory, op: Op, room: int):
        super().__init__(kernel, shared)
        self.op, self.parts = op, Dot.of(op)
        self.depth = self.deepest(room)
        if self.depth is not None:
            for side in self.parts.sides:
                if self.sliced(side) is None:
                    self.allocate(side.value)

    def kernel(self) -> Kernel | None:
        return None if self.depth is None else self.rewritten()

    def deepest(self, room: int) -> int | None:
        """The largest part whose operands fit, else the smallest; None: it has none."""
        dot = self.parts
        if any(len(side.contract) != 1 or side.batch for side in dot.sides):
            return None
        whole = sum(operand_bytes(dot, side) for side in dot.sides)
        halves = [dot.depth >> n for n in range(1, 12) if not dot.depth % (1 << n)]
        depths = [n for n in halves if n >= LEAST_DEPTH]
        fits = [n for n in depths if whole * n <= room * dot.depth]
        return next(iter(fits or depths[-1:]), None)

    def sliced(self, side: DotSide) -> tuple[Op, int, Sequence[Op]] | None:
        """The load of an operand, the dimension of depth in what it loads and the
        transposes in between; None: its parts cannot be loaded."""
        value, (dim,) = side.value, side.contract
        views = list[Op]()
        producers = self.shared.producers
        while (op := producers.get(value)) is not None and op.name == "transpose":
            dim, value = op.attrs["perm"][dim], op.operands[0]
            views.append(op)
        if op is None or not self.can_repeat(op) or Access.of(op).mask is not None:
            return None
        spans = all(isinstance(entry, Span) for entry in op.attrs["index"])
        return (op, dim, views[::-1]) if spans else None

    def dot(self, b: Builder, op: Op) -> None:
        if op is not self.op:
            b.ops.append(op)
            return
        assert self.depth is not None
        first, sums = Value(INDEX, "k"), Value(op.result.tile)
        inner = Builder(op.loc)
        sides = [self.part(inner, side, first) for side in self.parts.sides]
        total = inner.add(sums, inner.op("dot", *sides, **op.attrs))
        bounds = [b.index(n) for n in (0, self.parts.depth, self.depth)]
        body = inner.block((first, sums), (total,))
        start = b.constant(0, op.result.tile)
        b.emit("for", *bounds, start, regions=(body,))
        b.ops[-1] = b.ops[-1].with_(results=op.results)

    def part(self, b: Builder, side: DotSide, first: Value) -> Value:
        found = self.sliced(side)
        assert self.depth is not None
        if found is None:
            (dim,) = side.contract
            index = list(full_index(side.value.tile.shape))
            index[dim] = Span(None, self.depth)
            return b.load(self.stored[side.value], tuple(index), [first])
        load, dim, views = found
        access = Access.of(load)
        entries = access.split_index()
        entry, start = entries[dim]
        assert isinstance(entry, Span)
        size = access.ref.ref.shape[dim]
        begin = part_start(b, entry, start, size, first, masked=False)
        entries[dim] = (Span(None, self.depth, entry.stride), begin)
        part = replace(
            access,
            index=tuple(each for each, _ in entries),
            index_operands=tuple(v for _, v in entries if v is not None),
        )
        attrs = {**load.attrs, "index": part.index}
        value = b.op("load", *access_operands(part), **attrs)
        for view in views:
            value = b.op("transpose", value, perm=view.attrs["perm"])
        return value
