"""carried_shapes: loops carry tiles in the shape in which they compute them.

In: a loop that carries `f32[1, 8192]`, because that is the shape of the block it adds
to, but adds `f32[8192]`: it reshapes what it carries, and what it yields back. Out: it
carries `f32[8192]`, and the result is reshaped after the loop. Triton has a layout for
each of both shapes, and moves tiles from one to the other through shared memory.

Proof: a reshape keeps the elements and their order; so does a broadcast that only adds
dimensions of size one.
"""

from collections.abc import Sequence
from math import prod

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, inline, map_ops, users_of
from pallasite.ir.roles import Loop
from pallasite.passes.normal.canonicalize import canonicalize

Shape = tuple[int, ...]


def carried_shapes(kernel: Kernel) -> Kernel:
    """Move reshapes of carried tiles out of loops."""
    new = map_ops(kernel, _with_own_shapes)
    return kernel if new is kernel else canonicalize(new)


def _with_own_shapes(op: Op, b: Rewriter) -> Sequence[Value] | None:
    if op.name != "for":
        return None
    loop = Loop.of(op)
    shapes = _own_shapes(loop)
    if not any(shapes):
        return None
    index = Value(loop.index.type, loop.index.name)
    inits = [_reshaped(b, v, s) for v, s in zip(loop.inits, shapes, strict=True)]
    carried = [Value(v.type, c.name) for v, c in zip(inits, loop.carried, strict=True)]
    inside = Builder(op.loc)
    args = [
        _reshaped(inside, v, s and c.tile.shape)
        for v, s, c in zip(carried, shapes, loop.carried, strict=True)
    ]
    yields = inline(inside, loop.body, [index, *args])
    yields = [_reshaped(inside, v, s) for v, s in zip(yields, shapes, strict=True)]
    body = inside.block([index, *carried], yields)
    results = b.emit("for", *loop.bounds, *inits, regions=(body,), **op.attrs)
    return [
        _reshaped(b, new, s and old.tile.shape)
        for new, s, old in zip(results, shapes, loop.results, strict=True)
    ]


def _own_shapes(loop: Loop) -> list[Shape | None]:
    """Per carried value, another shape in which all of the loop computes it."""
    made = {v: op for op in loop.body.ops for v in op.results}
    users = users_of(loop.body)
    found: list[Shape | None] = []
    for value, yielded in zip(loop.carried, loop.yields, strict=True):
        last, uses = made.get(yielded), users[value]
        shape = _only_reshaped(last) if last is not None else None
        same = shape is not None and uses and all(_is_to(op, shape) for op in uses)
        found.append(shape if same else None)
    return found


def _only_reshaped(op: Op) -> Shape | None:
    """The shape of the same elements before a reshape, or a broadcast that is one."""
    if op.name not in ("reshape", "broadcast_in_dim"):
        return None
    old, new = op.operands[0].tile.shape, op.result.tile.shape
    dims = op.attrs.get("dims", ())
    is_plain = prod(old) == prod(new) and tuple(dims) == tuple(sorted(dims))
    return old if is_plain and old != new else None


def _is_to(op: Op, shape: Shape) -> bool:
    return _only_reshaped(op) is not None and op.result.tile.shape == shape


def _reshaped(b: Builder, value: Value, shape: Shape | None) -> Value:
    return value if shape is None else b.op("reshape", value, shape=shape)
