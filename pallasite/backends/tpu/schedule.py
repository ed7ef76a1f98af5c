"""Lowers pipelines inside a kernel to loops with double-buffered copies.

Mosaic runs the outermost grid itself. An inner pipeline (`emit_pipeline`) becomes one
loop over its steps: while a step computes, the next step's blocks are prefetched and
finished blocks are written back. Kernel in, Kernel out: the evaluator can run the
result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pallasite.backends.tpu.windows import check_window
from pallasite.errors import UnsupportedError
from pallasite.ir.build import Builder
from pallasite.ir.levels import with_level
from pallasite.ir.nodes import At, Block, Index, Kernel, Op, Span, Value, Window
from pallasite.ir.rewrite import Rewrite, Rewriter, inline, map_ops
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import BOOL, I32, INDEX, RefType, TileType

MAIN_MEMORY = ("any", "hbm")
FLAG = TileType((), BOOL)


def main_pipeline(kernel: Kernel) -> Op | None:
    """The pipeline that makes up the whole kernel, if there is one."""
    *before, last = kernel.body.ops or (None,)
    if last is None or last.name != "pipeline":
        return None
    simple = all(not op.regions and op.name != "store" for op in before)
    return last if simple else None


def schedule(kernel: Kernel) -> Kernel:
    """The kernel with every pipeline but the main one lowered to a loop."""
    main = main_pipeline(kernel)
    if main is None:
        return with_level(map_ops(kernel, _unroller(kernel)))
    pipeline = Pipeline.of(main)
    new = map_ops(pipeline.body, _unroller(kernel))
    if new is pipeline.body:
        return kernel
    ops = (*kernel.body.ops[:-1], pipeline.with_(body=new).to_op())
    body = Block(kernel.body.params, ops, kernel.body.yields)
    return with_level(kernel.with_(body=body))


def _unroller(kernel: Kernel) -> Rewrite:
    def unroll(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "pipeline":
            return None
        _PipelineLoop(kernel, op).emit(b)
        return ()

    return unroll


@dataclass(frozen=True)
class _Stream:
    """One window: the array it moves over, and its double buffer."""

    ref: Value
    window: Window
    index_map: Block
    buffer: Value | None  # None: the array is already on the chip
    semaphore: Value | None

    def block(self, b: Builder, index: Sequence[Value]) -> Value:
        """The part of the array at the block indices."""
        entries: list[At | Span] = []
        operands: list[Value] = []
        dims = zip(self.window.dims, self.ref.ref.shape, index, strict=True)
        for dim, size, number in dims:
            if dim.kind == "squeezed":
                entries.append(At(None))
                operands.append(number)
            elif dim.size == size:
                entries.append(Span(0, size))
            else:
                entries.append(Span(None, dim.size))
                by = b.index(dim.size if dim.kind == "blocked" else 1)
                operands.append(b.mul(number, by))
        return b.subview(self.ref, tuple(entries), operands)

    def slot(self, b: Builder, count: Value) -> Value:
        """The buffer of the `count`-th block."""
        assert self.buffer is not None
        shape = self.buffer.ref.shape
        rest: Index = tuple(Span(0, n) for n in shape[1:])
        if self.window.block_shape != shape[1:]:
            rest = (At(0), *rest[1:])
        parity = b.and_(count, b.index(1))
        return b.subview(self.buffer, (At(None), *rest), [parity])

    def signal(self, b: Builder, count: Value) -> Value:
        assert self.semaphore is not None
        return b.subview(self.semaphore, (At(None),), [b.and_(count, b.index(1))])

    def indices(self, b: Builder, ids: Sequence[Value]) -> tuple[Value, ...]:
        return inline(b, self.index_map, ids)


@dataclass(frozen=True)
class _At:
    """A stream at one iteration of the loop."""

    stream: _Stream
    count: Value  # blocks before this one
    entered: Value  # the previous step had another block
    index: tuple[Value, ...]
    next_index: tuple[Value, ...]
    leaves: Value  # the next step has another block


class _PipelineLoop:
    """Emits one pipeline as a loop."""

    def __init__(self, kernel: Kernel, op: Op):
        self.kernel, self.op, self.pipeline = kernel, op, Pipeline.of(op)

    def emit(self, b: Builder) -> None:
        streams = [self._stream(b, each) for each in self.pipeline.shown]
        moving = [s for s in streams if s.buffer is not None]
        sizes = self._all_sizes(b)
        total = sizes[0] if sizes else b.index(1)
        for size in sizes[1:]:
            total = b.mul(total, size)
        zero = [b.index(0)] * len(sizes)
        inputs = [s for s in moving if s.window.mode == "in"]
        _when(b, b.gt(total, b.index(0)), lambda c: _start_first(c, inputs, zero))

        step, ids = Value(INDEX, "step"), [Value(INDEX) for _ in sizes]
        counts = [Value(INDEX) for _ in moving]
        flags = [Value(FLAG) for _ in moving]
        inner = Builder(b.loc)
        following = _increment(inner, ids, sizes)
        last = inner.eq(step, inner.sub(total, inner.index(1)))
        states = [
            self._state(inner, *each, ids, following, last)
            for each in zip(moving, counts, flags, strict=True)
        ]
        self._emit_step(inner, streams, states, ids, last)
        after = [inner.add(s.count, inner.cast(s.leaves, I32)) for s in states]
        yields = [*following, *after, *(s.leaves for s in states)]
        region = inner.block((step, *ids, *counts, *flags), yields)
        first = [b.index(0)] * len(moving)
        entered = [b.constant(True, FLAG)] * len(moving)
        carried = [*zero, *first, *entered]
        results = b.emit(
            "for", b.index(0), total, b.index(1), *carried, regions=(region,)
        )
        ends = results[len(sizes) : len(sizes) + len(moving)]
        for stream, count in zip(moving, ends, strict=True):
            if stream.window.mode == "out":
                _wait_rest(b, stream, count)

    # --- parts ---

    def _stream(self, b: Builder, shown: Shown) -> _Stream:
        ref, window = shown.array, shown.window
        self._check(ref, window)
        buffer = semaphore = None
        if ref.ref.space in MAIN_MEMORY:
            space = "vmem" if window.space == "block" else window.space
            shape = window.block_shape
            # One row per buffer: single rows of packed types cannot be copied.
            shape = (1, *shape) if len(shape) < 2 else shape
            kind = RefType((2, *shape), ref.ref.dtype, space)
            buffer = b.op("alloc", type=kind)
            semaphore = b.op("alloc", type=RefType((2,), I32, "dma_sem"))
        return _Stream(ref, window, shown.index_map, buffer, semaphore)

    def _check(self, ref: Value, window: Window) -> None:
        if ref.ref.space in MAIN_MEMORY:
            check_window(self.kernel, ref, window, self.op.loc)
        pairs = list(zip(window.dims, ref.ref.shape, strict=True))
        facts = [("array", ref.ref.tile), ("block", window.block_shape)]
        if any(d.kind in ("element", "bounded") or any(d.padding) for d, _ in pairs):
            raise UnsupportedError(
                "backend 'tpu': an inner pipeline supports only blocked windows",
                facts,
                at=self.op.loc,
                fix="use plain blocks, or copy with make_async_copy",
            )
        if any(n % d.size for d, n in pairs if d.kind == "blocked"):
            raise UnsupportedError(
                "backend 'tpu': a block of an inner pipeline extends past the edge",
                facts,
                at=self.op.loc,
                fix="choose a block that divides the array, or pad the array",
            )

    def _all_sizes(self, b: Builder) -> list[Value]:
        sizes = self.pipeline.sizes
        return [b.index(n) if isinstance(n, int) else n for n in sizes]

    def _state(
        self,
        b: Builder,
        stream: _Stream,
        count: Value,
        entered: Value,
        ids: Sequence[Value],
        following: Sequence[Value],
        last: Value,
    ) -> _At:
        index, after = stream.indices(b, ids), stream.indices(b, following)
        leaves = last
        for old, new in zip(index, after, strict=True):
            leaves = b.or_(leaves, b.ne(old, new))
        return _At(stream, count, entered, index, after, leaves)

    def _emit_step(
        self,
        b: Builder,
        streams: Sequence[_Stream],
        states: Sequence[_At],
        ids: Sequence[Value],
        last: Value,
    ) -> None:
        """Await blocks, prefetch the next, compute, write finished ones back."""
        for state in states:
            if state.stream.window.mode == "in":
                _when(b, state.entered, lambda c, s=state: _receive(c, s))
                goes_on = b.and_(state.leaves, b.not_(last))
                _when(b, goes_on, lambda c, s=state: _request(c, s))
            else:
                reused = b.and_(state.entered, b.ge(state.count, b.index(2)))
                _when(b, reused, lambda c, s=state: _wait_sent(c, s))
        by_stream = {id(s.stream): s for s in states}
        blocks = []
        for stream in streams:
            state = by_stream.get(id(stream))
            if state is None:
                blocks.append(stream.block(b, stream.indices(b, ids)))
            else:
                blocks.append(stream.slot(b, state.count))
        inline(b, self.pipeline.body, [*ids, *blocks])
        for state in states:
            if state.stream.window.mode == "out":
                _when(b, state.leaves, lambda c, s=state: _send(c, s))


def _increment(b: Builder, ids: Sequence[Value], sizes: Sequence[Value]) -> list[Value]:
    """The grid index of the next step: count up the last axis, carry to the left."""
    result: list[Value] = []
    carry = b.constant(True, FLAG)
    for index, size in reversed(list(zip(ids, sizes, strict=True))):
        counted = b.add(index, b.cast(carry, I32))
        carry = b.ge(counted, size)
        result.append(b.select(carry, b.index(0), counted))
    return result[::-1]


def _when(b: Builder, predicate: Value, emit: Callable[[Builder], None]) -> None:
    then = Builder(b.loc)
    emit(then)
    b.emit("cond", b.cast(predicate, I32), regions=(Block(), then.block()))


def _start_first(b: Builder, streams: Sequence[_Stream], ids: Sequence[Value]) -> None:
    for stream in streams:
        source = stream.block(b, stream.indices(b, ids))
        _copy(b, "copy_start", stream, source, b.index(0))


def _receive(b: Builder, state: _At) -> None:
    source = state.stream.block(b, state.index)
    _copy(b, "copy_wait", state.stream, source, state.count)


def _request(b: Builder, state: _At) -> None:
    source = state.stream.block(b, state.next_index)
    following = b.add(state.count, b.index(1))
    _copy(b, "copy_start", state.stream, source, following)


def _send(b: Builder, state: _At) -> None:
    target = state.stream.block(b, state.index)
    _copy(b, "copy_start", state.stream, target, state.count)


def _wait_sent(b: Builder, state: _At) -> None:
    """The block that used this buffer before must have been written back."""
    target = state.stream.block(b, state.index)
    _copy(b, "copy_wait", state.stream, target, state.count)


def _wait_rest(b: Builder, stream: _Stream, count: Value) -> None:
    """After the loop: up to two blocks are still in flight."""
    for back in (2, 1):

        def wait(c: Builder, back: int = back) -> None:
            nowhere = [c.index(0)] * len(stream.window.dims)
            number = c.sub(count, c.index(back))
            _copy(c, "copy_wait", stream, stream.block(c, nowhere), number)

        _when(b, b.ge(count, b.index(back)), wait)


def _copy(b: Builder, name: str, stream: _Stream, array: Value, count: Value) -> None:
    """Start or await the copy between part of an array and its buffer."""
    slot, signal = stream.slot(b, count), stream.signal(b, count)
    inward = stream.window.mode == "in"
    pair = (array, slot) if inward else (slot, array)
    if name == "copy_start":
        b.emit(name, *pair, signal, priority=0)
    else:
        b.emit(name, *pair, signal)
