"""The state of emitting one kernel function: where each value is, and its memory.

`Emitter.block` walks a block and calls a rule per op (`emit.py` lists them all); the
rest is shared by the rules: when formulas are forced into buffers, and the arena's
plan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pallasite.backends.cpu.call.parallel_units import Share
from pallasite.backends.cpu.dot.pack_once import PackedOnce
from pallasite.backends.cpu.llvm import scalars, vector_loops
from pallasite.backends.cpu.llvm.writer import NULL, Function, Val, integer
from pallasite.backends.cpu.ops.known_tiles import KnownTiles
from pallasite.backends.cpu.tiles import transpose_copy
from pallasite.backends.cpu.tiles.arena import Arena
from pallasite.backends.cpu.tiles.lifetimes import has_writes
from pallasite.backends.cpu.tiles.plan_memory import MemoryPlan
from pallasite.backends.cpu.tiles.tiles import (
    Buffer,
    Indices,
    Ref,
    Root,
    Tile,
    cut,
    formula,
    lanes_last,
    row_major,
    transpose,
    ungrouped,
)
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.types import DType

MAX_DEPTH = 40  # nesting of formulas: bounds the size of one loop's body

Meaning = Val | Tile | Ref  # of an IR value: a register, a tile, memory
Rule = Callable[["Emitter", Op], None]


@dataclass
class Scope:
    """A block being emitted."""

    number: int
    ops: tuple[Op, ...]
    position: int = 0
    tiles: list[Tile] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)  # until, arena offset

    @property
    def end(self) -> int:
        """The position after the last op."""
        return len(self.ops)

    @property
    def results(self) -> tuple[Value, ...]:
        """Results of the op being emitted."""
        return self.ops[self.position].results if self.position < self.end else ()


class Emitter:
    """The state of emitting one kernel function."""

    def __init__(
        self,
        f: Function,
        operands: dict[Value, Ref],
        rules: Mapping[str, Rule],
        plan: MemoryPlan,
    ):
        self.f, self.rules, self.plan = f, rules, plan
        self.arena = Arena()
        self._arena_pointer = f.params[-1]
        self._env: dict[Value, Meaning] = {**operands}
        self.whole_arrays = frozenset(operands.values())
        self._scopes: list[Scope] = []
        self._count = 0
        self.share: Share | None = None  # the units to run, if threads share them
        self.shared_roots = frozenset[Root]()  # memory whose updates are atomic
        self.known = KnownTiles(())
        self.packed_once = PackedOnce()  # operands of dots, packed in `shared`
        self.shared = NULL
        # Destination buffers of values, each with the value it holds before.
        self.offered: dict[Value, tuple[Value, Buffer]] = {}

    # --- walking ---

    @contextmanager
    def block(
        self, block: Block, arguments: Sequence[Meaning]
    ) -> Iterator[list[Meaning]]:
        """Emit a block's ops; inside the `with`, its yields can be used."""
        self._count += 1
        for param, argument in zip(block.params, arguments, strict=True):
            self._env[param] = argument
        scope = Scope(self._count, block.ops)
        self._scopes.append(scope)
        for position, op in enumerate(block.ops):
            scope.position = position
            self._emit(op)
            self._release(scope, position)
        scope.position = scope.end
        yield [self._env[value] for value in block.yields]
        self._release(scope, scope.end)
        self._scopes.pop()

    def _emit(self, op: Op) -> None:
        rule = self.rules.get(op.name)
        if rule is None:
            raise UnsupportedError(
                f"backend 'cpu' does not support '{op.name}'", *_facts(op)
            )
        if op.regions and has_writes(op):
            self.before_write(None, self.scope.position)
        module = self.f.module
        outer, module.origin = module.origin, module.origin_of(op.loc)
        try:
            for value in op.results:  # here, where the op is known, not at its use
                scalars.spelling(value.type.dtype)
            rule(self, op)
            module.origin = outer
        except UnsupportedError as error:
            if error.at is not None:
                raise
            facts, at, fix = _facts(op)
            facts = [*error.facts, *facts]
            raise UnsupportedError(error.what, facts, at, error.fix or fix) from None

    @property
    def scope(self) -> Scope:
        return self._scopes[-1]

    # --- values ---

    def scalar(self, value: Value) -> Val:
        meaning = self._env[value]
        assert isinstance(meaning, Val), value.type
        return meaning

    def tile(self, value: Value) -> Tile:
        meaning = self._env[value]
        assert isinstance(meaning, Tile), value.type
        return meaning

    def ref(self, value: Value) -> Ref:
        meaning = self._env[value]
        assert isinstance(meaning, Ref), value.type
        return meaning

    def index(self, value: Value) -> Val:
        """An integer scalar as i64."""
        return scalars.index(self.f, self.scalar(value), value.tile.dtype)

    def as_tile(self, value: Value) -> Tile:
        """The value as a tile; a scalar becomes a rank-0 one."""
        meaning = self._env[value]
        if isinstance(meaning, Val):
            return formula((), value.tile.dtype, lambda _: meaning, free=True)
        return self.tile(value)

    def element(self, value: Value) -> Callable[[Indices], Val]:
        """How to get one element; a scalar gives itself everywhere."""
        meaning = self._env[value]
        if isinstance(meaning, Val):
            return lambda _: meaning
        tile = self.tile(value)
        return lambda indices: tile.at(self.f, indices)

    def tiles_of(self, values: Sequence[Value]) -> list[Tile]:
        """The values that are not scalars."""
        found = (self._env[value] for value in values)
        return [meaning for meaning in found if isinstance(meaning, Tile)]

    def last_use(self, value: Value) -> int:
        """The position in its block after which nothing evaluates a value."""
        return self.plan.until.get(value, -1)

    def define(self, value: Value, meaning: Meaning) -> None:
        """Bind an op's result; decides whether a formula is stored now or lazily."""
        self._env[value] = meaning
        if not isinstance(meaning, Tile) or meaning.scope >= 0:
            return
        scope = self.scope
        meaning.scope, meaning.last = scope.number, self.last_use(value)
        meaning.origin = self.f.module.origin
        scope.tiles.append(meaning)
        if meaning.buffer is not None or meaning.is_free:
            return
        if meaning.parts:
            if self.plan.memory.get(value) != "moved":
                self.force(meaning)
            return
        meaning.keep = self.plan.memory.get(value) == "kept"
        at_once = self.plan.memory.get(value) == "stored"
        if at_once or meaning.depth > MAX_DEPTH:
            self.force(meaning)

    def define_lazy(self, op: Op, tile: Tile) -> None:
        """Bind a tile; a rank-0 one is computed at once."""
        if tile.shape:
            self.define(op.result, tile)
        else:
            self.define(op.result, tile.at(self.f, ()))

    # --- buffers ---

    def temporary(
        self, shape: Sequence[int], dtype: DType, until: int | None = None
    ) -> Buffer:
        """Arena memory, released after position `until` (default: this op)."""
        size = dtype.bytes
        for n in shape:
            size *= n
        offset = self.arena.take(size)
        until = self.scope.position if until is None else until
        self.scope.held.append((until, offset))
        pointer = self.f.element(self._arena_pointer, "i8", integer(offset))
        return Buffer(pointer, row_major(shape))

    def result_buffer(self, op: Op, dtype: DType | None = None) -> Buffer:
        """Memory for the result of an op that has one."""
        return self.lasting(op.result, dtype)

    def lasting(self, result: Value, dtype: DType | None = None) -> Buffer:
        """Memory whose lifetime is that of the result."""
        type, until = result.tile, self._end_of(result)
        return self.temporary(type.shape, dtype or type.dtype, until)

    def _end_of(self, value: Value) -> int:
        """The position after which nothing needs a value of this block."""
        return max(self.last_use(value), self.scope.position)

    def force(self, tile: Tile) -> Buffer:
        """Evaluate a tile into a buffer of its own."""
        buffer = self.buffer_for(tile)
        self.fill(buffer, tile)
        if tile.scope == self.scope.number:
            tile.source = buffer
        return buffer

    def place_for(
        self, op: Op, dtype: DType, read: Sequence[Tile], replaced: Sequence[Tile]
    ) -> Buffer:
        """Memory for a result: its eventual destination, if that is free now.

        While it is written, `read` are live throughout, and of `replaced` each element
        until it is itself written.
        """
        if op.result in self.offered and dtype == op.result.tile.dtype:
            old, buffer = self.offered[op.result]
            is_free = self.last_use(old) <= self.scope.position
            apart = not any(buffer.root in tile.reads() for tile in read)
            if is_free and apart and all(t.may_overwrite(buffer) for t in replaced):
                return buffer
        return self.result_buffer(op, dtype)

    def buffer_for(self, tile: Tile) -> Buffer:
        """Memory for a tile whose lifetime is as long as it is needed here.

        A tile of an outer block is needed by the op being emitted and, if that op's
        results are lazy, by whoever uses those.
        """
        if tile.scope == self.scope.number:
            until = max(tile.last, self.scope.position)
        else:
            until = max(map(self._end_of, self.scope.results), default=None)
        return self.temporary(tile.shape, tile.dtype, until)

    def stored(self, tile: Tile) -> Tile:
        """The same tile, but cheap to evaluate many times."""
        if tile.buffer is not None or tile.is_free:
            return tile
        return Tile(tile.shape, tile.dtype, self.force(tile))

    def fill(self, buffer: Buffer, tile: Tile) -> None:
        """Store every element of a tile, in the destination's memory order."""
        while (instead := ungrouped(self.f, tile, buffer)) is not None:
            tile, buffer = instead
        if tile.parts:
            self._fill_parts(buffer, tile)
            return
        source, shape = tile.buffer, tile.shape
        if source and transpose_copy.copy_transposed(
            self.f, tile.dtype, shape, source, buffer
        ):
            return
        along = transpose_copy.contiguous_dim(shape, buffer)
        with self.straightened(tile, along):
            order = lanes_last(shape, along)
            if order is not None:
                tile = transpose(self.f, tile, order)
                strides = tuple(buffer.strides[d] for d in order)
                buffer = Buffer(buffer.pointer, strides, buffer.root)

            def body(indices: Indices) -> None:
                value = tile.at(self.f, indices)
                address = buffer.address(self.f, tile.dtype, indices)
                scalars.store(self.f, tile.dtype, value, address)

            vector_loops.each(self.f, tile.shape, body)

    def _fill_parts(self, buffer: Buffer, tile: Tile) -> None:
        whole, steps = Tile(tile.shape, tile.dtype, buffer), [1] * len(tile.shape)
        for starts, part in tile.parts:
            first = [integer(n) for n in starts]
            target = cut(self.f, whole, part.shape, first, steps).buffer
            assert target is not None
            self.fill(target, part)

    @contextmanager
    def straightened(self, tile: Tile, along: int | None) -> Iterator[None]:
        """Inside, the views a tile is computed from run `along` the same dimension.

        Those that run across are copied: their lanes would each touch another cache
        line. So are lines that are repeated, which would be gathered again each time.
        """
        elsewhere: list[tuple[Tile, Buffer]] = []
        for part in tile.pointwise_sources():
            view = part.buffer
            if not view:
                continue
            if transpose_copy.runs_across(part.shape, view, along) is not None:
                if part.scope != self.scope.number:
                    elsewhere.append((part, view))
                part.source = self.force(part)
            elif transpose_copy.repeats_across(part.shape, view, along):
                elsewhere.append((part, view))
                part.source = self._repeated(part, view)
        yield
        for part, view in elsewhere:
            part.source = view

    def _repeated(self, tile: Tile, view: Buffer) -> Buffer:
        """A copy of a view without what is repeated in it, until after this op."""
        pairs = zip(tile.shape, view.strides, strict=True)
        shape = tuple(1 if stride.constant == 0 else n for n, stride in pairs)
        copy = self.temporary(shape, tile.dtype)
        self.fill(copy, Tile(shape, tile.dtype, view))
        pairs = zip(copy.strides, view.strides, strict=True)
        strides = (old if old.constant == 0 else new for new, old in pairs)
        return Buffer(copy.pointer, tuple(strides))

    def before_write(self, root: Root | None, after: int) -> None:
        """Evaluate what still reads memory about to change (`root` None: any).

        Only tiles live at position `after` or later matter.
        """
        for tile in self.scope.tiles:
            if tile.last < after:
                continue
            touched = {r for r in tile.reads() if r.mutable}
            if touched and (root is None or root in touched):
                self.force(tile)

    def _release(self, scope: Scope, position: int) -> None:
        for until, offset in scope.held:
            if until <= position:
                self.arena.give_back(offset)
        scope.held = [h for h in scope.held if h[0] > position]
        scope.tiles = [tile for tile in scope.tiles if tile.last > position]


def _facts(op: Op) -> tuple[list[tuple[str, object]], object, str]:
    types = ", ".join(str(v.type) for v in op.operands)
    fix = "use interpret=True for this call, or other operations"
    return [("op", f"{op.name}({types})")], op.loc, fix
