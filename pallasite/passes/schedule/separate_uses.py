"""separate_uses: a window for each way in which a kernel uses an operand.

In `x[:, None] - x[None, :]`, or in `x @ x.T`, the rows and the columns of the result
are both the rows of x, so no part of either can be computed alone. With two windows on
x each has its own, and `reblock.py` can split them. Loads, and what is computed from
them element by element, are repeated for each use.

A small operand may also be reduced along a dimension that results have, as ids of rows
are whose least and greatest say whether there is anything to do. The reduction gets a
window that stays whole, and programs of fewer rows repeat it.

In: any kernel. Out: the same kernel, unless a dimension occurs twice in a tile, or is
reduced so.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import (
    Rewriter,
    clone,
    dead_code,
    map_ops,
    substitute,
    used_values,
)
from pallasite.ir.roles import Pipeline, Shown
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims, loop_dims

MOST_COPIES = 256  # ops; a kernel with more repeats too much
SMALL = 1 / 64  # of what is written: blocks that are reduced again by every program
_OF_NOTHING = ("constant", "iota")  # one value may be used in several ways
# These relate the dimensions of their operand and result in different ways.
_RESHAPING = ("broadcast_in_dim", "transpose", "reshape")


def separate_uses(kernel: Kernel) -> Kernel:
    """The kernel with a window per way of using an operand, where that is of use."""
    found = loop_dims(kernel)
    if found is None or found.refused:
        return kernel
    reduced = None
    if not any(d.is_twice for d in found.dims):
        every = (_reduced(found, dim) for dim in found.dims)
        reduced = frozenset(op.result for ops in every for op in ops)
        if not reduced:
            return kernel
    copies = _Copies(found, reduced)
    body = map_ops(found.pipeline.body, copies.rewrite)
    least = 2 if reduced is None else 1
    if len(copies.shown) < least or copies.count > MOST_COPIES:
        return kernel
    same = _alike(_with_windows(found, body, copies.shown), copies.shown)
    kept = [each for each in copies.shown if same[each.block] is each.block]
    return _with_windows(found, substitute(body, same), kept)


def _reduced(found: LoopDims, dim: LoopDim) -> Sequence[Op]:
    """The reductions that alone keep results whole along a dimension, if all are small.

    Of inputs: what is computed from them is as long along the dimension.
    """
    written = [v for v in dim.members if v in found.written]
    if dim.besides is not None or dim.products or not written:
        return ()
    most = SMALL * sum(_bytes(v) for v in written)
    return (
        dim.reduces if all(_bytes(o.operands[0]) <= most for o in dim.reduces) else ()
    )


def _bytes(value: Value) -> int:
    return prod(value.type.shape) * value.type.dtype.bytes


class _Copies:
    """Gives uses of a loaded tile a load from a block of their own.

    Args:
        found: the kernel.
        users: the results of the ops whose uses are meant; None: of all ops.
    """

    def __init__(self, found: LoopDims, users: frozenset[Value] | None = None):
        self.users = users
        aliased = {found.kernel.inputs[i] for i, _ in found.kernel.aliases}
        arrays = [each.array for each in found.pipeline.shown]
        self.read_only = {
            each.block: each
            for each in found.pipeline.shown
            if each.block not in found.written
            and each.array not in aliased
            and arrays.count(each.array) == 1
        }
        self.shown: list[Shown] = []
        self.count = 0
        self.loaded: dict[Value, bool] = {}  # whether a tile is to be copied

    def rewrite(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        if self._is_copied(op, b) or self.count > MOST_COPIES:
            return None  # its users have copies
        if self.users is not None and self.users.isdisjoint(op.results):
            return None
        operands = tuple(self._copy(b, v, {}) for v in op.operands)
        if operands == op.operands:
            return None
        b.ops.append(op.with_(operands=operands))
        return op.results

    def _is_copied(self, op: Op, b: Rewriter) -> bool:
        """Whether an op loads an operand, or computes with elements of such loads."""
        if len(op.results) != 1:
            return False
        if op.result not in self.loaded:
            if op.name == "load":
                found = op.operands[0] in self.read_only
            else:
                simple = table()[op.name].elementwise or op.name in _RESHAPING
                made = [p for v in op.operands if (p := b.producer(v))]
                found = simple and any(self._is_copied(p, b) for p in made)
            self.loaded[op.result] = found
        return self.loaded[op.result]

    def _copy(self, b: Rewriter, value: Value, copied: dict[Value, Value]) -> Value:
        """A copy of a tile; `copied`: what this use has copies of."""
        op = b.producer(value)
        if op is None or not (op.name in _OF_NOTHING or self._is_copied(op, b)):
            return value
        if value in copied:
            return copied[value]
        self.count += 1
        if self.count > MOST_COPIES:
            return value
        if op.name == "load":
            ref, *rest = op.operands
            operands = (self._block(ref), *rest)
        else:
            # Elements of one tile belong together; a reshaped one is another use.
            within = {} if op.name in _RESHAPING else copied
            operands = tuple(self._copy(b, v, within) for v in op.operands)
        made = Value(value.type, value.name)
        b.ops.append(op.with_(operands=operands, results=(made,)))
        copied[value] = made
        return made

    def _block(self, ref: Value) -> Value:
        made, shown = Value(ref.type, ref.name), self.read_only[ref]
        self.shown.append(shown._replace(block=made, index_map=clone(shown.index_map)))
        return made


def _with_windows(found: LoopDims, body: Block, more: Sequence[Shown]) -> Kernel:
    """The kernel with further windows, without those that they replace."""
    of_array: dict[Value, list[Shown]] = defaultdict(list)
    for each in more:
        of_array[each.array].append(each)
    every = [s for own in found.pipeline.shown for s in (own, *of_array[own.array])]
    made = _showing(found, every, body)
    live = Pipeline.of(find_pipeline(made))
    used = {*used_values(live.body)}
    kept = [s for s in live.shown if s.block in used or not of_array[s.array]]
    return _showing(found, kept, live.body)


def _showing(found: LoopDims, shown: Sequence[Shown], body: Block) -> Kernel:
    pipeline, kernel = found.pipeline, found.kernel
    params = (*pipeline.ids, *(each.block for each in shown))
    op = pipeline.showing(shown, replace(body, params=params)).to_op()
    ops = tuple(op if each is pipeline.op else each for each in kernel.body.ops)
    return dead_code(kernel.with_(body=replace(kernel.body, ops=ops)))


def _alike(kernel: Kernel, copies: Sequence[Shown]) -> Mapping[Value, Value]:
    """For each block, the first of those whose dimensions belong together with its."""
    found = loop_dims(kernel)
    assert found is not None
    numbers = {each.block: n for n, each in enumerate(found.pipeline.shown)}
    first, same = dict[tuple[object, ...], Value](), dict[Value, Value]()
    for each in copies:
        places = ((numbers[each.block], d) for d in range(each.array.ref.rank))
        dims = (found.at(place) for place in places)
        key = (each.array, *(dim if _may_split(dim) else None for dim in dims))
        same[each.block] = first.setdefault(key, each.block)
    return same


def _may_split(dim: LoopDim | None) -> bool:
    return dim is not None and (dim.whole is None or dim.is_twice)
