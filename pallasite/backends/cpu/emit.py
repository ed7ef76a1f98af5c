"""Kernel IR (level "tile") to LLVM IR text: the walk over blocks and its bookkeeping.

`emit_kernel` makes one function with the kernel's loops and one XLA FFI handler around
it. The rules for each op are in the modules named in `RULES`; this one keeps what they
share: which value is where, when formulas become buffers, and the arena's plan.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

from pallasite.backends.cpu.call import handler
from pallasite.backends.cpu.call.parallel_units import (
    Share,
    Sharing,
    count_units,
)
from pallasite.backends.cpu.dot import dot
from pallasite.backends.cpu.dot.fusion import fuse_addends
from pallasite.backends.cpu.dot.pack_once import PackedOnce, find_packed_once
from pallasite.backends.cpu.llvm import cut_loops, scalars, vector_loops
from pallasite.backends.cpu.llvm.writer import NULL, Function, Module, Val, integer
from pallasite.backends.cpu.ops import (
    arithmetic,
    called_functions,
    control,
    debugging,
    gathers,
    memory,
    pipeline,
    reductions,
    shapes,
    sorting,
    top_k,
)
from pallasite.backends.cpu.tiles import transpose_copy
from pallasite.backends.cpu.tiles.arena import Arena
from pallasite.backends.cpu.tiles.lifetimes import Uses, has_writes, uses_of
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
from pallasite.errors import ResourceError, UnsupportedError
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import DType

MOST_BYTES, MOST_PROGRAMS = 1 << 56, 1 << 62
MAX_DEPTH = 40  # of formulas in formulas: bounds the size of one loop's body

Meaning = Val | Tile | Ref  # what an IR value stands for: a register, a tile, memory

RULES: dict[str, Callable[["Emitter", Op], None]] = {
    **shapes.RULES,
    **reductions.RULES,
    **dot.RULES,
    **top_k.RULES,
    **sorting.RULES,
    **gathers.RULES,
    **memory.RULES,
    **control.RULES,
    **debugging.RULES,
    **pipeline.RULES,
}
NATIVE = frozenset([*RULES, *arithmetic.NATIVE])


def is_native(op: Op) -> bool:
    """Whether there is a rule for an op with these operands."""
    return op.name in NATIVE and (op.name != "top_k" or top_k.has_top_k(op))


def emit_kernel(kernel: Kernel) -> str:
    """The LLVM module of a kernel; its entry point is the function `handler`.

    The kernel writes only memory it owns (`own_inputs`), and its index maps yield
    numbers of blocks there are (`place_windows`).
    """
    module, sharing = Module(), Sharing.of(kernel)
    module.called = called_functions.called_kinds(kernel)
    ahead = find_packed_once(kernel)
    params = _pointer_params(kernel, sharing)
    more = [("ptr align 64", "shared")] if ahead.boxes else []
    units = [("i64", "first"), ("i64", "last")] if sharing else []
    arena_param = ("ptr noalias align 64", "arena")
    all_params = [*params, *more, *units, arena_param]
    f = Function(module, "kernel", all_params, "ptr", "internal")
    refs = _operand_refs(kernel, f.params)
    emitter = Emitter(f, dict(zip(kernel.params, refs, strict=True)))
    if ahead.boxes:
        emitter.ahead, emitter.shared = ahead, f.params[len(params)]
    if sharing:
        emitter.share = Share(sharing, *f.params[len(params) + len(more) : -1])
        if sharing.has_atomics:
            emitter.shared_roots = frozenset(ref.root for ref in refs)
    with emitter.block(kernel.body, ()):
        f.line("ret ptr null")
    cut_loops.cut_at_loops(f)
    _check_size(kernel, emitter.arena.size)
    if sharing and sharing.units is None:
        _emit_units(module, kernel, sharing)
    handler.emit_handler(
        module,
        arguments=len(kernel.inputs),
        results=kernel.num_outputs,
        arena_bytes=emitter.arena.size,
        shared_bytes=ahead.bytes,
        zero_bytes=ahead.counter_bytes,
        sharing=sharing,
    )
    return module.text


def _check_size(kernel: Kernel, arena_bytes: int) -> None:
    """Refuse what no machine has: the numbers in the code would wrap around."""
    if arena_bytes > MOST_BYTES:
        raise ResourceError(
            f"kernel '{kernel.name}' needs more memory for temporaries than can exist",
            [("bytes", arena_bytes)],
            kernel.loc,
            "smaller scratch and blocks",
        )
    for op in walk(kernel.body):
        grid = Pipeline.of(op).grid if op.name == "pipeline" else ()
        if prod(n for n in grid if n) > MOST_PROGRAMS:
            raise ResourceError(
                f"kernel '{kernel.name}' has more programs than could ever run",
                [("grid", grid)],
                kernel.loc,
                "larger blocks",
            )


def _pointer_params(kernel: Kernel, sharing: Sharing | None) -> list[tuple[str, str]]:
    """One parameter per operand and result; `noalias` if nobody else writes there."""
    aliased = {place for pair in _aliases(kernel) for place in pair}
    if sharing and sharing.has_atomics:
        aliased = set(range(len(kernel.params)))
    return [
        ("ptr" if place in aliased else "ptr noalias", f"a{place}")
        for place in range(len(kernel.params))
    ]


def _emit_units(module: Module, kernel: Kernel, sharing: Sharing) -> None:
    """Add `@units`: how many there are where the grid's sizes are operands.

    As a negative number if they must not run at once.
    """
    params = [*_pointer_params(kernel, sharing), ("ptr", "arena")]
    f = Function(module, "units", params, "i64", "internal")
    refs = _operand_refs(kernel, f.params)
    emitter = Emitter(f, dict(zip(kernel.params, refs, strict=True)))
    before = [op for op in kernel.body.ops[:-1] if op.name != "alloc"]
    sizes = [v for v in sharing.op.operands if not v.is_ref]
    with emitter.block(Block((), tuple(before), tuple(sizes)), ()):
        units, at_once = count_units(emitter, sharing)
        f.line(f"ret {f.select(at_once, units, f.sub(integer(0), units))}")


def _aliases(kernel: Kernel) -> list[tuple[int, int]]:
    """Pairs of positions among the parameters that are the same memory."""
    return [(i, len(kernel.inputs) + o) for i, o in kernel.aliases]


def _operand_refs(kernel: Kernel, pointers: Sequence[Val]) -> list[Ref]:
    shared = dict(_aliases(kernel))
    roots = [
        Root(
            f"operand {n}",
            mutable=n in shared or n >= len(kernel.inputs),
            is_array=n < len(kernel.inputs),
        )
        for n in range(len(kernel.params))
    ]
    for first, second in shared.items():
        roots[first] = roots[second]
    refs = []
    for param, pointer, root in zip(kernel.params, pointers, roots, strict=False):
        type = param.ref
        buffer = Buffer(pointer, row_major(type.shape), root)
        refs.append(Ref(type.shape, type.dtype, buffer))
    return refs


@dataclass
class Scope:
    """A block being emitted."""

    number: int
    uses: Uses
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
        """Of the op being emitted."""
        return self.ops[self.position].results if self.position < self.end else ()


class Emitter:
    """The state of emitting one kernel function."""

    def __init__(self, f: Function, operands: dict[Value, Ref]):
        self.f = f
        self.arena = Arena()
        self._arena_pointer = f.params[-1]
        self._env: dict[Value, Meaning] = {**operands}
        self.whole_arrays = frozenset(operands.values())
        self._scopes: list[Scope] = []
        self._count = 0
        self.share: Share | None = None  # the units to run, where threads share them
        self.shared_roots = frozenset[Root]()  # memory of which updates are atomic
        self.ahead = PackedOnce()  # operands of dots that are packed once, in `shared`
        self.shared = NULL
        # Buffers that values are to be stored to, each with the value it holds before.
        self.offered: dict[Value, tuple[Value, Buffer]] = {}

    # --- walking ---

    @contextmanager
    def block(
        self, block: Block, arguments: Sequence[Meaning]
    ) -> Iterator[list[Meaning]]:
        """Emit a block's ops; inside, its yields can be used."""
        self._count += 1
        for param, argument in zip(block.params, arguments, strict=True):
            self._env[param] = argument
        block = fuse_addends(block, self._root_of)
        scope = Scope(self._count, uses_of(block), block.ops)
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
        rule = RULES.get(op.name)
        if rule is None and op.name in arithmetic.NATIVE:
            rule = emit_elementwise
        if rule is None:
            raise UnsupportedError(f"backend 'cpu' has no op '{op.name}'", *_facts(op))
        if op.regions and has_writes(op):
            self.before_write(None, self.scope.position)
        try:
            for value in op.results:  # here, where the op is known, not at its use
                scalars.spelling(value.type.dtype)
            rule(self, op)
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

    def _root_of(self, value: Value) -> Root | None:
        """The memory of a ref, if it has been given one."""
        meaning = self._env.get(value)
        return meaning.root if isinstance(meaning, Ref) else None

    def index(self, value: Value) -> Val:
        """An integer scalar as i64."""
        return scalars.index(self.f, self.scalar(value), value.tile.dtype)

    def as_tile(self, value: Value) -> Tile:
        """The value as a tile; a scalar becomes one without dimensions."""
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
        """Those of the values that are not scalars."""
        found = (self._env[value] for value in values)
        return [meaning for meaning in found if isinstance(meaning, Tile)]

    def define(self, value: Value, meaning: Meaning) -> None:
        """Bind an op's result; decides whether a formula is stored now or left."""
        self._env[value] = meaning
        if not isinstance(meaning, Tile) or meaning.scope >= 0:
            return
        scope = self.scope
        meaning.scope, meaning.last = scope.number, scope.uses.last[value]
        scope.tiles.append(meaning)
        if meaning.buffer is not None or meaning.is_free:
            return
        if meaning.parts:
            if value not in scope.uses.moved:
                self.force(meaning)
            return
        meaning.keep = value in scope.uses.kept
        at_once = value in scope.uses.stored and not meaning.keep
        if at_once or meaning.depth > MAX_DEPTH:
            self.force(meaning)

    def define_lazy(self, op: Op, tile: Tile) -> None:
        """Bind a tile; one without dimensions is computed at once."""
        if tile.shape:
            self.define(op.result, tile)
        else:
            self.define(op.result, tile.at(self.f, ()))

    # --- buffers ---

    def temporary(
        self, shape: Sequence[int], dtype: DType, until: int | None = None
    ) -> Buffer:
        """Arena memory, given back after position `until` (this op if not given)."""
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
        """Memory for a result that lasts as long as the result."""
        type, until = result.tile, self._end_of(result)
        return self.temporary(type.shape, dtype or type.dtype, until)

    def _end_of(self, value: Value) -> int:
        """The position after which nobody needs a value of this block."""
        return max(self.scope.uses.last[value], self.scope.position)

    def force(self, tile: Tile) -> Buffer:
        """Evaluate a tile into a buffer of its own."""
        buffer = self.room_for(tile)
        self.fill(buffer, tile)
        if tile.scope == self.scope.number:
            tile.source = buffer
        return buffer

    def place_for(
        self, op: Op, dtype: DType, read: Sequence[Tile], replaced: Sequence[Tile]
    ) -> Buffer:
        """Memory for a result: where it will be stored anyway, if that is free now.

        While it is written, `read` are needed all the time, and of `replaced` each
        element until it is itself written.
        """
        if op.result in self.offered and dtype == op.result.tile.dtype:
            old, buffer = self.offered[op.result]
            is_free = self.scope.uses.last[old] <= self.scope.position
            apart = not any(buffer.root in tile.reads() for tile in read)
            if is_free and apart and all(t.may_overwrite(buffer) for t in replaced):
                return buffer
        return self.result_buffer(op, dtype)

    def room_for(self, tile: Tile) -> Buffer:
        """Memory for a tile that lasts as long as it is needed here.

        A tile of a block outside is needed by the op being emitted, and where that
        leaves its results to be computed later, by whoever uses those.
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
        """Store every element of a tile, in the order of the memory it goes to."""
        while (instead := ungrouped(self.f, tile, buffer)) is not None:
            tile, buffer = instead
        if tile.parts:
            self._fill_parts(buffer, tile)
            return
        source, shape = tile.buffer, tile.shape
        if source and transpose_copy.turn(self.f, tile.dtype, shape, source, buffer):
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

        Those that run across are copied: lanes would gather from a line per element.
        """
        elsewhere: list[tuple[Tile, Buffer]] = []
        for part in tile.pointwise_sources():
            view = part.buffer
            if view and transpose_copy.runs_across(part.shape, view, along) is not None:
                if part.scope != self.scope.number:
                    elsewhere.append((part, view))
                part.source = self.force(part)
        yield
        for part, view in elsewhere:
            part.source = view

    def before_write(self, root: Root | None, after: int) -> None:
        """Evaluate what still reads memory about to change (`root` None: any).

        Only tiles needed at position `after` or later matter.
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


def emit_elementwise(e: Emitter, op: Op) -> None:
    result = op.result.tile
    dtypes = tuple(v.tile.dtype for v in op.operands)
    elements = {v: e.element(v) for v in op.operands}

    def element(indices: Indices) -> Val:
        # One evaluation per operand, however often it appears: x * x of x * x of ...
        known = {v: at(indices) for v, at in elements.items()}
        values = [known[v] for v in op.operands]
        return called_functions.element(
            e.f, op.name, op.attrs, dtypes, result.dtype, values
        )

    operands = e.tiles_of(list(elements))
    tile = formula(result.shape, result.dtype, element, operands, pointwise=True)
    e.define_lazy(op, tile)


def _facts(op: Op) -> tuple[list[tuple[str, object]], object, str]:
    types = ", ".join(str(v.type) for v in op.operands)
    fix = "use interpret=True for this call, or write it with other operations"
    return [("op", f"{op.name}({types})")], op.loc, fix
