"""Makes a grid axis of the loop that a backward kernel is, where it may be split.

The reverse of a program whose steps hand something on is a loop that hands on its
cotangent, from the last step to the first, in each program; a prefix sum has a single
one. Sums of what it hands on merge (`passes/analysis/axis_state.py`), so that a chip
could compute parts of such a loop at the same time (`passes/schedule/plan_parts.py`),
were it an axis of the grid. It becomes one, and what it hands on becomes scratch.

In the reverse of a prefix sum, what is handed on is the cotangent of the last element
of the step before: it is added to one element of a tile, of which sums are taken.
`apart` adds it to those sums instead; they are taken in another order.
"""

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, inline, map_ops
from pallasite.ir.roles import Loop, Pipeline
from pallasite.ir.types import INDEX, RefType
from pallasite.passes.analysis.axis_state import state_along
from pallasite.passes.analysis.grid import analyze, find_pipeline, with_pipeline
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.loop_axes import moves_results, only_loop, with_axis
from pallasite.passes.normal.narrow_windows import narrow_windows


def carried_axis(kernel: Kernel) -> Kernel:
    """The kernel with its loop as an axis; unchanged if that cannot be split."""
    whole = Pipeline.of(find_pipeline(kernel))
    loop = only_loop(kernel, whole)
    if loop is None or not loop.inits:
        return kernel
    around = (*kernel.body.ops, *whole.body.ops)
    constants = {op.result for op in around if op.name == "constant"}
    known = constants.issuperset(loop.bounds)
    if not known or any(v.is_ref or not v.tile.rank for v in loop.inits):
        return kernel
    outer = Builder(loop.op.loc)
    refs = [
        outer.op("alloc", type=RefType(v.tile.shape, v.tile.dtype, "vmem"))
        for v in loop.inits
    ]
    start, b = Builder(loop.op.loc), Builder(loop.op.loc)
    for init, ref in zip(loop.inits, refs, strict=True):
        start.store(ref, init)
    is_first = b.cast(b.eq(loop.index, loop.first), INDEX.dtype)
    b.emit("cond", is_first, regions=(Block(), start.block()))
    yields = inline(b, loop.body, (loop.index, *(b.load(ref) for ref in refs)))
    for ref, value in zip(refs, yields, strict=True):
        b.store(ref, value)
    plain = loop.with_(inits=(), results=(), body=b.block((loop.index,))).to_op()
    ops = (plain if op is loop.op else op for op in whole.body.ops)
    held = whole.with_(body=Block(whole.body.params, tuple(ops)))
    made = with_pipeline(kernel, with_axis(kernel, held, Loop.of(plain)).to_op())
    made = made.with_(body=Block((), (*outer.ops, *made.body.ops)))
    made = narrow_windows(canonicalize(apart(made)))
    info = analyze(made)
    axis = len(whole.grid)
    if not moves_results(made) or axis not in info.sequential:
        return kernel
    return kernel if state_along(made, axis, info).reason else made


def apart(kernel: Kernel) -> Kernel:
    """Sums over a tile to which few elements were added, as two sums."""

    def rewrite(op: Op, b: Rewriter) -> Value | None:
        if op.name not in ("reduce", "scan") or op.attrs["kind"] != "sum":
            return None
        total = b.producer(op.operands[0], "add")
        if total is None or not op.result.tile.dtype.is_float:
            return None
        for x, y in (total.operands, total.operands[::-1]):
            pad = b.producer(x, "pad")
            if pad is None or not _is_zero(b, pad) or b.producer(y, "pad"):
                continue
            few = _summed(b, op, pad)
            if few is not None:
                return b.add(few, b.op(op.name, y, **op.own_attrs))
        return None

    return map_ops(kernel, rewrite)


def _is_zero(b: Rewriter, pad: Op) -> bool:
    fill = b.producer(pad.operands[1], "constant")
    return fill is not None and fill.attrs["value"] == 0


def _summed(b: Rewriter, op: Op, pad: Op) -> Value | None:
    """The sum, or the running sums, of a padded tile."""
    x, shape = pad.operands[0], op.result.tile.shape
    is_sum = op.name == "reduce"
    along = op.attrs["axes"] if is_sum else (op.attrs["axis"],)
    sides = list(zip(pad.attrs["low"], pad.attrs["high"], strict=True))
    rest = [side for d, side in enumerate(sides) if d not in along]
    if any(side != (0, 0) for side in rest) or min(map(min, sides)) < 0:
        return None
    if is_sum and all(x.tile.shape[d] == 1 for d in along):
        return b.op("reshape", x, shape=shape)
    if is_sum:
        return b.op("reduce", x, **op.own_attrs)
    (axis,) = along
    # The one element from which the running sums start is in all of them.
    before = sides[axis][1 if op.attrs["reverse"] else 0]
    if x.tile.shape[axis] != 1 or before:
        return None
    return b.broadcast(x, shape, range(len(shape)))
