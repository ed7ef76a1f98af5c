"""merge_parts: kernels that merge the states of parts (`split_axis.py`), in order."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, BlockDim, Index, Kernel, Span, Value, Window
from pallasite.ir.rewrite import clone
from pallasite.passes.analysis.axis_state import State

MERGE_ELEMENTS = 1 << 14  # of the states that one program of the merge reads


def merge_kernel(
    name: str, merge: str, parts: int, size: int, dtype: T.DType, scan: bool
) -> Kernel:
    """A kernel that merges the rows of an array of (parts, size), in order.

    Args:
        name: of the kernel.
        merge: a kind of reduction.
        parts: rows.
        size: columns.
        dtype: the element type.
        scan: whether the result is every row merged with those before it.
    """
    width = max(1, min(1 << (MERGE_ELEMENTS // parts).bit_length() - 1, size))
    rows = Value(T.RefType((parts, size), dtype, "any"), "parts")
    shape = (parts, size) if scan else (size,)
    out = Value(T.RefType(shape, dtype, "any"), "merged")
    i = Value(T.INDEX, "i0")
    b = Builder()
    by_rows = b.block((i,), (b.index(0), i))
    block = Window((BlockDim(parts), BlockDim(width)), "in")
    made = replace(block, mode="out") if scan else Window((BlockDim(width),), "out")
    j = Value(T.INDEX, "i0")
    own = Value(T.INDEX, "i0")
    source = Value(T.RefType((parts, width), dtype, "block"), "parts")
    target = Value(T.RefType(made.block_shape, dtype, "block"), "merged")
    code = Builder()
    # Sums of narrow floats are rounded once.
    wide = T.F32 if dtype.is_float and dtype.bits < 32 else dtype
    tile = code.cast(code.load(source), wide)
    if scan:
        tile = code.op("scan", tile, kind=merge, axis=0, reverse=False)
    else:
        tile = code.op("reduce", tile, kind=merge, axes=(0,))
    code.store(target, code.cast(tile, dtype))
    body = code.block((own, source, target))
    top = Builder()
    maps = (by_rows, clone(by_rows) if scan else Block((j,), (), (j,)))
    top.emit(
        "pipeline",
        rows,
        out,
        regions=(*maps, body),
        grid=(-(-size // width),),
        windows=(block, made),
        semantics=("parallel",),
    )
    return Kernel(name, (rows, out), top.block(), 1)


def finite_start(state: State) -> float:
    """What a maximum of a part starts with, if sums are kept relative to it.

    The author's number, if it is finite. Minus infinity, less itself, is no number: a
    block without any number would spoil the sums of a part that it begins.
    """
    if state.start is not None and state.start > -inf:
        return state.start
    return _lowest(state.ref.ref.dtype)


def _lowest(dtype: T.DType) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype.np).min)


def online_merge(
    name: str, parts: int, outer: int, maximum: State, sums: Sequence[State]
) -> Kernel:
    """A kernel that merges maxima, and the sums that are kept relative to them.

    Args:
        name: of the kernel.
        parts: how many; the first dimension of every operand.
        outer: independent states of each part; the second dimension.
        maximum: the state that the sums are relative to.
        sums: those sums.
    """
    i = Value(T.INDEX, "i0")
    group = [maximum, *sums]
    inputs, outputs, windows, maps, blocks = [], [], [], [], []
    for mode, lead, refs in (("in", (parts,), inputs), ("out", (), outputs)):
        for state in group:
            ref, shape = state.ref.ref, state.ref.ref.shape
            refs.append(
                Value(
                    T.RefType((*lead, outer, *shape), ref.dtype, "any"), state.ref.name
                )
            )
            dims = [*(BlockDim(n) for n in lead), BlockDim(1, "squeezed")]
            windows.append(Window((*dims, *(BlockDim(n) for n in shape)), mode))
            b, own = Builder(), Value(T.INDEX, "i0")
            zeros = [b.index(0) for _ in (*lead, *shape)]
            maps.append(
                b.block((own,), (*zeros[: len(lead)], own, *zeros[len(lead) :]))
            )
            blocks.append(Value(T.RefType((*lead, *shape), ref.dtype), state.ref.name))
    body = _online_body(parts, group, blocks)
    top = Builder()
    top.emit(
        "pipeline",
        *inputs,
        *outputs,
        regions=(*maps, body.block((i, *blocks))),
        grid=(outer,),
        windows=tuple(windows),
        semantics=("parallel",),
    )
    return Kernel(name, (*inputs, *outputs), top.block(), len(outputs))


def _online_body(
    parts: int, group: Sequence[State], blocks: Sequence[Value]
) -> Builder:
    b = Builder()
    read, written = blocks[: len(group)], blocks[len(group) :]
    maxima = b.load(read[0])
    most = b.op("reduce", maxima, kind="max", axes=(0,))
    merged: list[Value] = []
    for state, source, target in zip(group[1:], read[1:], written[1:], strict=True):
        size = state.ref.ref.size
        if state.first:
            merged.append(_of_first(b, maxima, most, b.load(source)))
        elif parts * size <= 2 * MERGE_ELEMENTS:
            all_most = b.broadcast(most, maxima.tile.shape)
            weights = _weights(b, maxima, all_most, state, lead=1)
            terms = b.mul(b.load(source), weights)
            merged.append(b.op("reduce", terms, kind="sum", axes=(0,)))
        else:
            merged.append(_in_turn(b, parts, state, read[0], source, most))
        b.store(target, merged[-1])
    start = group[0].start
    finite = any(state.rate < inf for state in group[1:])
    if finite and (start is None or start == -inf):
        # Parts start with a finite number instead. Nothing else was as large where
        # nothing was added, as what equals the maximum has the weight one; or no number
        # was, to the first part, which starts as the author's does.
        none = b.eq(most, b.like(_lowest(most.tile.dtype), most))
        for state, total in zip(group[1:], merged, strict=True):
            none = b.and_(none, _is_zero(b, total, state, most))
        most = b.select(none, b.like(-inf, most), most)
    b.store(written[0], most)
    return b


def _of_first(b: Builder, maxima: Value, most: Value, source: Value) -> Value:
    """What belongs to the first of equal maxima."""
    shape = maxima.tile.shape
    number = b.op("iota", type=maxima.tile.with_dtype(T.I32), dim=0)
    equal = b.eq(maxima, b.broadcast(most, shape))
    place = b.select(equal, number, b.like(shape[0], number))
    first = b.op("reduce", place, kind="min", axes=(0,))
    mine = b.eq(number, b.broadcast(first, shape))
    if shape != source.tile.shape:
        mine = b.op("reshape", mine, shape=source.tile.shape)
    chosen = b.select(mine, source, b.like(0, source))
    return b.op("reduce", chosen, kind="sum", axes=(0,))


def _is_zero(b: Builder, total: Value, state: State, most: Value) -> Value:
    """Whether no sum along the dimensions that the maximum does not have is a number
    other than zero."""
    some = b.and_(b.ne(total, b.like(0, total)), b.eq(total, total))
    test = b.cast(some, T.I32)
    own = [d for d, n in enumerate(most.tile.shape) if n > 1]
    kept = [state.axes.index(d) for d in own]
    others = tuple(d for d in range(len(total.tile.shape)) if d not in kept)
    if others:
        test = b.op("reduce", test, kind="max", axes=others)
    if kept != sorted(kept):
        perm = tuple(sorted(kept).index(d) for d in kept)
        test = b.op("transpose", test, perm=perm)
    if test.tile.shape != most.tile.shape:
        test = b.op("reshape", test, shape=most.tile.shape)
    return b.eq(test, b.like(0, test))


def _in_turn(
    b: Builder, parts: int, state: State, maxima: Value, source: Value, most: Value
) -> Value:
    """The sum of large states, part by part."""
    tile = state.ref.ref.tile
    p, total = Value(T.INDEX, "part"), Value(tile, "total")
    inside = Builder()

    def at(ref: Value) -> Value:
        rest = tuple(Span(0, n) for n in ref.ref.shape[1:])
        index: Index = (At(), *rest)
        return inside.load(ref, index, (p,))

    weights = _weights(inside, at(maxima), most, state, lead=0)
    new = inside.add(total, inside.mul(at(source), weights))
    bounds = (b.index(0), b.index(parts), b.index(1))
    body = Block((p, total), tuple(inside.ops), (new,))
    (result,) = b.emit("for", *bounds, b.constant(0, tile), regions=(body,))
    return result


def _weights(b: Builder, maxima: Value, most: Value, state: State, lead: int) -> Value:
    """`exp(rate * (maximum - the largest))`, in the shape of a sum."""
    less = b.like(0, maxima)
    if state.rate < inf:
        less = b.exp(b.mul(b.sub(maxima, most), b.like(state.rate, maxima)))
    # Equal infinities have no difference.
    weights = b.select(b.eq(maxima, most), b.like(1, maxima), less)
    weights = b.cast(weights, state.ref.ref.dtype)
    shape = maxima.tile.shape[lead:]
    kept = [d for d, n in enumerate(shape) if n > 1]
    places = [lead + state.axes.index(d) for d in kept]
    leading = maxima.tile.shape[:lead]
    small = (*leading, *(shape[d] for d in kept))
    if small != maxima.tile.shape:
        weights = b.op("reshape", weights, shape=small)
    full = (*leading, *state.ref.ref.shape)
    return b.broadcast(weights, full, (*range(lead), *places))
