"""Code of several iterations of a loop at once, stacked along a new first dimension.

`guard_range.py` asks a test of many steps at a time by it, and `autodiff/owned_rows.py`
adds to many rows. What does not depend on the iteration is computed once. How memory is
accessed depends on what an iteration's index chooses there: subclasses say.
"""

from collections.abc import Mapping, Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.rewrite import clone, is_elementwise


class Stacked:
    """Emits ops of an iteration for `size` iterations.

    Args:
        b: where to.
        index: of the loop. It has a value, a vector, if `env` has one.
        size: the number of iterations.
        env: what values from before the loop have become.
    """

    def __init__(self, b: Builder, index: Value, size: int, env: Mapping[Value, Value]):
        self.b, self.index, self.size, self.env = b, index, size, dict(env)
        self.varies = {index} & self.env.keys()  # what is stacked

    def new(self, value: Value) -> Value:
        return self.env.get(value, value)

    def depends(self, values: Sequence[Value]) -> bool:
        """Whether some value differs between iterations."""
        return any(v is self.index or v in self.varies for v in values)

    def emit(self, op: Op) -> bool:
        """Emit an op; False if it cannot be stacked."""
        if not self.depends(op.operands):
            if op.regions:
                return False
            copy = clone(Block((), (op,), op.results), self.env)
            self.b.ops += copy.ops
            self.env |= zip(op.results, copy.yields, strict=True)
            return True
        if len(op.results) != 1 or op.regions:
            return False
        is_access = op.name == "load" or op.result.is_ref
        made = self.access(op) if is_access else self._tile(op)
        if made is None:
            return False
        self.env[op.result] = made
        self.varies.add(op.result)
        return True

    def access(self, op: Op) -> Value | None:
        """A load, or a view, of all iterations; None if it cannot be stacked."""
        del op
        return None

    def wide(self, value: Value, shape: Sequence[int]) -> Value | None:
        """A value of this shape, or a scalar, with a first dimension for iterations."""
        new, dims = self.new(value), range(1, 1 + len(shape))
        if value is self.index and value not in self.varies:
            return None
        if value in self.varies:
            dims = (0, *(dims if new.tile.rank > 1 else ()))
        elif not value.tile.shape:
            dims = ()
        return self.b.broadcast(new, (self.size, *shape), dims)

    def _tile(self, op: Op) -> Value | None:
        shape, attrs = op.result.tile.shape, dict(op.own_attrs)
        if is_elementwise(op):
            operands = [self.wide(v, shape) for v in op.operands]
            known = [v for v in operands if v is not None]
            done = len(known) == len(operands)
            return self.b.op(op.name, *known, **attrs) if done else None
        if op.operands[0] not in self.varies:
            return None
        x = self.new(op.operands[0])
        if op.name == "broadcast_in_dim":
            dims = (0, *(1 + d for d in attrs["dims"]))
            return self.b.broadcast(x, (self.size, *shape), dims)
        if op.name == "reshape":
            return self.b.op("reshape", x, shape=(self.size, *shape))
        if op.name == "reduce" and len(op.operands) == 1:
            attrs["axes"] = tuple(1 + d for d in attrs["axes"])
            return self.b.op("reduce", x, **attrs)
        return None
