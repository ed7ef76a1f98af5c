"""loop_over_rows: splits what is reduced along a dimension into loops over its parts.

In: a body that computes a large tile and reduces it along a dimension, one reduction
after another, as `exp(s - max(s))`, its sum, and its product with values: attention
that sees all keys at once, or a norm of an image. Out: a loop over parts of the
dimension for each reduction, which computes a part of the tile anew, and one that
stores results along the dimension part by part. Those that do not need each other share
a loop. A scan is computed by each loop that needs it, which carries the sum so far. So
only one part is on chip at a time; `loop_over_k.py` does this for matmuls of
what is loaded, and keeps reductions whole.

Sums that are kept relative to a maximum (`analysis/exponents.py`) share its loop, too:
they are rescaled when it grows, as in an online softmax. And a matmul of rows that are
divided by such a sum is divided afterwards, so that it need not wait for the sum.

Proof: each element is computed as before, from operands that nothing writes, and stored
where it was, to memory that nothing reads. Maxima are the same; of equal ones that of
the first part has its position, as the first NaN has. Sums are taken in another order,
of results as wide as a matmul's sums; those of a scan are that of the part and what
came before it. A
running maximum starts as the least finite number, relative to which nothing overflows
and minus infinity vanishes; where it is seen itself, other than with the log of its
sum, another one starts as minus infinity. Rows are linear in what they are divided by;
results differ by the rounding of sums and products.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import (
    Rewriter,
    dead_code,
    map_ops,
    producers_of,
    with_regions,
)
from pallasite.ir.roles import Dot
from pallasite.ir.types import F32, INDEX, DType, TileType
from pallasite.ops.neutral import neutral
from pallasite.passes.analysis.exponents import Power, Powers
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims, Place
from pallasite.passes.normal.resized_code import CannotReblock, Part
from pallasite.passes.schedule.loop_over_k import why_not_computed_in_parts
from pallasite.passes.schedule.reblock import in_pipeline, padded

MERGED = {"sum": "add", "max": "max", "min": "min"}
MOVES = {"broadcast_in_dim", "reshape", "cast", "stop_gradient"}


def loop_over_rows(kernel: Kernel, place: Place, size: int) -> Kernel:
    """Every reduction and matmul along a dimension, in parts of `size` elements.

    Args:
        kernel: what to rewrite.
        place: a window and a dimension of its array.
        size: of a part; the last one may end past the arrays.

    Raises:
        CannotReblock: the dimension is used for something else.
    """
    found, dim = in_pipeline(kernel, place)
    kernel = _divided_last(found, dim)
    found, dim = in_pipeline(kernel, place)
    reason = _why_not(found, dim, size)
    if reason is not None:
        raise CannotReblock(reason)
    if dim.size % size:
        more = -(-dim.size // size) * size
        return loop_over_rows(padded(kernel, place, more), place, size)
    body = _Loops(found, dim, size).block(found.pipeline.body)
    return dead_code(with_pipeline(kernel, found.pipeline.with_(body=body).to_op()))


def _why_not(found: LoopDims, dim: LoopDim, size: int) -> str | None:
    along = (*dim.reduces, *dim.scans)
    if dim.held is not None or dim.is_twice or not along:
        return dim.held or "nothing is reduced along it, or two dimensions are one"
    if dim.size <= size:
        return f"{dim.size} elements are not several parts of {size}"
    if any(op.attrs["kind"] not in MERGED for op in along):
        return "a reduction cannot be taken in parts"
    ways = {op.attrs["reverse"] for op in dim.scans}
    firsts = any(op.name == "arg_reduce" for op in dim.reduces)
    if len(ways) > 1 or (firsts and True in ways):
        return "parts are taken in two orders"
    if ways and dim.size % size:
        return f"{dim.size} elements are not whole parts of {size}"
    return why_not_computed_in_parts(found, dim, _only_stored(found))


def _only_stored(found: LoopDims) -> set[Value]:
    """Results to which the body itself stores, and that nothing else accesses."""
    aliased = {found.kernel.outputs[o] for _, o in found.kernel.aliases}
    shown = {e.block for e in found.pipeline.shown if e.window.mode == "out"}
    shown -= {e.block for e in found.pipeline.shown if e.array in aliased}
    body = found.pipeline.body
    others = [op for op in walk(body) if op.name != "store" or op not in body.ops]
    return shown.difference(v for op in others for v in op.operands)


def _divided_last(found: LoopDims, dim: LoopDim) -> Kernel:
    """Matmuls of rows that are divided by a sum along the dimension, divided later."""
    made = producers_of(found.pipeline.body)

    def is_summed(value: Value) -> bool:
        op = made.get(value)
        if op is None or op.regions:
            return False
        is_sum = op in dim.reduces and op.attrs["kind"] == "sum"
        return is_sum or any(map(is_summed, op.operands))

    def rewrite(op: Op, b: Rewriter) -> Value | None:
        if op.name != "dot" or not any(op.result is d.result for d in dim.products):
            return None
        lhs, dtype = Dot.of(op).lhs, op.operands[0].tile.dtype
        scaled = made.get(lhs.value)
        if scaled is not None and scaled.name == "cast":
            scaled = made.get(scaled.operands[0])
        if scaled is None or scaled.name not in ("mul", "div"):
            return None
        x, w = scaled.operands
        wide = made.get(w)
        if wide is None or wide.name != "broadcast_in_dim" or is_summed(x):
            return None
        (u,), to = wide.operands, wide.attrs["dims"]
        places = {d: n for n, d in enumerate((*lhs.batch, *lhs.free))}
        rows = [(n, d) for n, d in zip(u.tile.shape, to, strict=True) if n != 1]
        if not is_summed(u) or any(d not in places for _, d in rows):
            return None
        own = op.result.tile.dtype
        attrs = {**op.attrs, "dtype": F32} if own.bits < F32.bits else op.attrs
        total = b.op("dot", b.cast(x, dtype), op.operands[1], **attrs)
        sizes = tuple(n for n, _ in rows)
        u = u if u.tile.shape == sizes else b.reshape(u, shape=sizes)
        each = b.broadcast(u, total.tile.shape, [places[d] for _, d in rows])
        each = b.cast(each, total.tile.dtype)
        return b.cast(b.op(scaled.name, total, each), own)

    return dead_code(map_ops(found.kernel, rewrite))


class _Rescaled(NamedTuple):
    """How a sum depends on a maximum: relative to it.

    Attributes:
        power: the exponent.
        dims: the sum's dimensions along which the maximum varies.
        is_stopped: the maximum is a constant to derivatives.
    """

    power: float
    dims: tuple[int, ...]
    is_stopped: bool


class _State:
    """What the iterations of a loop hand on: what they are given, and the new values.

    Args:
        before: code before the loop.
    """

    def __init__(self, before: Builder):
        self.before = before
        self.carried, self.starts = list[Value](), list[Value]()
        self.new = list[Value]()

    def old(self, type_: TileType, start: int | float) -> Value:
        self.starts.append(self.before.constant(start, type_))
        self.carried.append(Value(type_))
        return self.carried[-1]


class _Loops:
    def __init__(self, found: LoopDims, dim: LoopDim, size: int):
        self.dim, self.size = dim, size
        body = found.pipeline.body
        self.made, self.ops = producers_of(body), tuple(walk(body))
        tiles = {v: d for v, d in dim.members.items() if not v.is_ref}
        loads = {op for op in self.made.values() if op.name == "load"}
        stores = {op for op in body.ops if op.name == "store"}
        self.stores = {op for op in stores if Access.of(op).value in tiles}
        self.sinks = {*dim.reduces, *dim.products, *self.stores}
        self.constant = set(found.pipeline.blocks) - found.written
        spans = {op for op in loads if op.result in tiles} | self.stores
        # In a loop refs stay whole: only the loads take a part.
        self.inside = replace(dim, members=tiles, spans=frozenset(spans))
        self.is_backward = any(op.attrs["reverse"] for op in dim.scans)
        self.replaced: dict[Value, Value] = {}
        self.after: set[Value] = set()  # what depends on a running maximum
        self.seen: set[Value] = set()  # what the code so far computes

    @cached_property
    def levels(self) -> dict[Op, int]:
        """How many of the reductions that each needs come one after another."""
        known: dict[Value, int] = {}
        found: dict[Op, int] = {}

        def level(value: Value) -> int:
            op = self.made.get(value)
            if op is None or op.regions:
                return 0
            if value not in known:
                known[value] = max(map(level, op.operands), default=0)
                if op in self.sinks:
                    found[op] = known[value] = known[value] + 1
            return known[value]

        for op in self.sinks - self.stores:
            level(op.result)
        needed = (v for op in self.stores for v in op.operands if not v.is_ref)
        last = max(map(level, needed), default=0) + 1
        return found | dict.fromkeys(self.stores, last)

    def block(self, block: Block) -> Block:
        b = Builder()
        groups = dict[int, list[Op]]()
        for op in block.ops:
            if op in self.sinks:
                groups.setdefault(self.levels[op], []).append(op)
        running = self._running(groups)
        first = {group[0]: group for group in groups.values()}
        for op in block.ops:
            if op in first:
                scale = running if running in op.results else None
                self._loop(b, first[op], scale)
            elif op not in self.sinks:
                operands = tuple(self.replaced.get(v, v) for v in op.operands)
                op_here = op.with_(operands=operands) if operands != op.operands else op
                b.ops.append(with_regions(op_here, [self.block(r) for r in op.regions]))
            self.seen.update(op.results)
        yields = tuple(self.replaced.get(v, v) for v in block.yields)
        return b.block(block.params, yields)

    def _running(self, groups: dict[int, list[Op]]) -> Value | None:
        """The maximum whose loop the next sums share; then they join its group."""
        top, sums = groups.get(1, []), groups.get(2, [])
        if len(top) != 1 or top[0].name != "reduce" or top[0].attrs["kind"] != "max":
            return None
        scale = top[0].result
        if (
            not scale.tile.dtype.is_float
            or not sums
            or scale.tile.dtype.bits < F32.bits
        ):
            return None
        self.powers = Powers(self.made, {})
        self.powers.add_scale(scale)
        self.powers.block(self.made.values())
        found = [self._rescaled(op, scale) for op in sums]
        kinds = {None if each is None else each.is_stopped for each in found}
        if len(kinds) != 1 or None in kinds:
            return None
        self.after = {scale}
        for value, op in self.made.items():
            if self.after.intersection(op.operands) and op not in self.sinks:
                self.after.add(value)
        groups[1] = [*top, *groups.pop(2)]
        return scale

    def _is_seen(self, value: Value, scale: Value) -> bool:
        """Whether a maximum is more than what something is relative to."""
        return any(
            self._is_seen(op.result, scale)
            if op.name in MOVES
            else op.name != "sub" and not self._is_log_of_sum(op, value, scale)
            for op in self.ops
            if value in op.operands
        )

    def _is_log_of_sum(self, op: Op, value: Value, scale: Value) -> bool:
        """Whether it adds a maximum to the log of a sum that is relative to it.

        Where all elements are minus infinity the sum is zero, and its log says so.
        """
        if op.name != "add" or op.operands[0] is op.operands[1]:
            return False
        (other,) = (v for v in op.operands if v is not value)
        log = self._source(other)
        total = (
            None if log is None or log.name != "log" else self._source(*log.operands)
        )
        return total in self.sinks and self._rescaled(total, scale) is not None

    def _source(self, value: Value) -> Op | None:
        op = self.made.get(value)
        return self._source(*op.operands) if op is not None and op.name in MOVES else op

    def _rescaled(self, op: Op, scale: Value) -> "_Rescaled | None":
        """How a sum depends on a maximum; None: not by an exponent."""
        power = self.powers.of(op.result) if op.results else None
        if not isinstance(power, Power) or not power.is_factor:
            return None
        if _merging(op)[0] != "sum" or [s for s, _ in power.powers] != [scale]:
            return None
        where = {a: d for d, a in enumerate(power.axes) if a is not None}
        long = [d for d, n in enumerate(scale.tile.shape) if n > 1]
        if power.total >= 0 or sorted(where) != long or len(long) != scale.tile.rank:
            return None
        dims = tuple(where[d] for d in long)
        return _Rescaled(power.total, dims, power.is_stopped)

    def _is_inside(self, value: Value) -> bool:
        return value in self.inside.members

    def _loop(self, b: Builder, group: Sequence[Op], scale: Value | None) -> None:
        """The reductions of a group, in one loop; sums are relative to `scale`."""
        b.loc = group[0].loc
        number, inner = Value(INDEX, "part"), Builder(b.loc)
        count = self.dim.size // self.size
        at = inner.sub(inner.index(count - 1), number) if self.is_backward else number
        first = inner.mul(at, inner.index(self.size))
        part = Part(self.inside, self.size, first)
        part.new.update(self.replaced)
        state, last = _State(b), dict[Op, Value]()
        done = set[Op]()
        for sink in group:
            for each in self._needed(sink.operands):
                if each not in done:
                    if each in self.dim.scans:
                        part.new[each.result] = _scanned(inner, each, part, state)
                    else:
                        part.op(inner, each)
                    done.add(each)
            inner.loc = sink.loc
            if sink in self.stores:
                part.op(inner, sink)
                continue
            if sink.name == "arg_reduce":
                last[sink] = self._first_extreme(inner, sink, part, state)
                continue
            kind, dtype = _merging(sink)
            is_scale = sink.result is scale
            start = float(np.finfo(dtype.np).min) if is_scale else neutral(kind, dtype)
            last[sink] = old = state.old(sink.result.tile.with_dtype(dtype), start)
            attrs = {**sink.attrs, "dtype": dtype} if sink.name == "dot" else sink.attrs
            share = inner.op(sink.name, *part.mapped(sink.operands), **attrs)
            if scale is not None and is_scale:
                part.new[scale] = new = inner.op(MERGED[kind], old, share)
                state.new.append(new)
                if self._is_seen(scale, scale):
                    last[sink] = most = state.old(scale.tile, neutral(kind, dtype))
                    state.new.append(inner.op(MERGED[kind], most, share))
                apart = [old, new]
                if (end := self._rescaled(group[-1], scale)) and end.is_stopped:
                    apart = [inner.op("stop_gradient", v) for v in apart]
                change = inner.sub(*apart)
            else:
                kept = old
                if scale is not None:
                    kept = inner.mul(old, self._factor(inner, sink, scale, change, old))
                state.new.append(inner.op(MERGED[kind], kept, share))
        bounds = [b.index(n) for n in (0, count, 1)]
        body = inner.block((number, *state.carried), state.new)
        made = b.emit("for", *bounds, *state.starts, regions=(body,))
        results = dict(zip(state.carried, made, strict=True))
        for sink, old in last.items():
            self.replaced[sink.result] = b.cast(results[old], sink.result.tile.dtype)

    def _first_extreme(
        self, b: Builder, sink: Op, part: Part, state: "_State"
    ) -> Value:
        """The position of the first extreme so far, or of the first NaN."""
        (x,) = part.mapped(sink.operands)
        axis, kind = sink.attrs["axis"], sink.attrs["kind"]
        type_ = sink.result.tile
        most = state.old(type_.with_dtype(x.tile.dtype), neutral(kind, x.tile.dtype))
        place = state.old(type_, 0)
        share = b.op("reduce", x, kind=kind, axes=(axis,))
        own = b.op("arg_reduce", x, **sink.attrs)
        first = b.cast(part.first_of(b, sink.operands[0]), type_.dtype)
        own = b.add(own, b.broadcast(first, type_.shape))
        is_new = b.op("gt" if kind == "max" else "lt", share, most)
        if x.tile.dtype.is_float:
            nans = b.and_(b.op("ne", share, share), b.op("eq", most, most))
            is_new = b.or_(is_new, nans)
        state.new += [b.op(MERGED[kind], most, share), b.select(is_new, own, place)]
        return place

    def _factor(
        self, b: Builder, sink: Op, scale: Value, change: Value, sums: Value
    ) -> Value:
        """What a sum is multiplied by when its maximum has grown by -`change`."""
        found = self._rescaled(sink, scale)
        assert found is not None
        if found.power != -1:
            change = b.mul(change, b.like(-found.power, change))
        shrunk = b.cast(b.exp(change), sums.tile.dtype)
        return b.broadcast(shrunk, sums.tile.shape, found.dims)

    def _needed(self, values: Sequence[Value]) -> list[Op]:
        """The ops that compute these values in a loop, in order.

        Those along the dimension, what depends on a running maximum, and what the code
        before the loop does not compute.
        """
        needed: dict[Op, None] = {}

        def visit(value: Value) -> None:
            op = self.made.get(value)
            if op is None or op in needed or op in self.sinks:
                return
            here = self._is_inside(value) or value in self.after
            if value in self.seen and not here:
                return
            pure = table()[op.name].effect is Effect.PURE and not op.regions
            is_load = op.name == "load" and (here or op.operands[0] in self.constant)
            if not pure and not is_load:
                raise CannotReblock("a reduction needs what comes after another")
            for operand in op.operands:
                visit(operand)
            needed[op] = None

        for value in values:
            visit(value)
        return list(needed)


def _scanned(b: Builder, scan: Op, part: Part, state: _State) -> Value:
    """A part of a scan, which goes on from the parts before it."""
    (x,), (kind, dtype) = part.mapped(scan.operands), _merging(scan)
    axis, own = scan.attrs["axis"], x.tile.dtype
    shape = x.tile.shape
    line = (*shape[:axis], *shape[axis + 1 :])
    before = state.old(TileType(line, dtype), neutral(kind, dtype))
    x = b.cast(x, dtype)
    total = b.op("reduce", x, kind=kind, axes=(axis,))
    state.new.append(b.op(MERGED[kind], before, total))
    to = [d for d in range(len(shape)) if d != axis]
    each = b.op("scan", x, **scan.attrs)
    each = b.op(MERGED[kind], each, b.broadcast(before, shape, to))
    return b.cast(each, own)


def _merging(sink: Op) -> tuple[str, DType]:
    """How parts of a reduction are merged, and in what type."""
    dtype = sink.result.tile.dtype
    is_narrow = dtype.is_float and dtype.bits < F32.bits
    kind = "sum" if sink.name == "dot" else sink.attrs["kind"]
    return kind, F32 if is_narrow and sink.name in ("dot", "scan") else dtype
