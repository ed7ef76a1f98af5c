"""Values that code moved elsewhere computes again instead of keeping them.

`Again(ops, roots, body)` knows ops of a program, and what its body writes. A value
can be computed again if that is cheap and gives the same: elementwise ops, moved
elements, and loads from memory that nothing writes.
"""

from collections.abc import Iterable, Mapping

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import is_pure
from pallasite.passes.analysis.memory import Roots

_CHEAP = {"constant", "iota", "broadcast_in_dim", "reshape", "transpose", "cast"}


class Again:
    """The ops of a block, as far as later code may compute them again."""

    def __init__(self, ops: Iterable[Op], roots: Roots, body: Block):
        self.made = {v: op for op in ops for v in op.results}
        self.roots, self.written = roots, frozenset(roots.written(body))

    def can(self, value: Value) -> bool:
        """Whether a value is from elsewhere, or can be computed again."""
        op = self.made.get(value)
        if op is None:
            return True
        return self._is_cheap(op) and all(map(self.can, op.operands))

    def is_scalar(self, value: Value) -> bool:
        """Whether a value is from elsewhere, or arithmetic on such scalars."""
        op = self.made.get(value)
        if op is None:
            return True
        scalar = not value.is_ref and not value.tile.shape
        return scalar and is_pure(op) and all(map(self.is_scalar, op.operands))

    def _is_cheap(self, op: Op) -> bool:
        if op.regions:
            return False
        if op.name == "load":
            return self.roots.of(op.operands[0]) not in self.written
        row = table()[op.name]
        return is_pure(op) and (row.elementwise or op.name in _CHEAP)

    def emit(
        self, b: Builder, values: Iterable[Value], seen: Mapping[Value, Value]
    ) -> dict[Value, Value]:
        """Emit the ops that these values need; gives what replaces each.

        Args:
            b: where code goes.
            values: what is needed; those from elsewhere stay.
            seen: what replaces the values from elsewhere.
        """
        made: dict[Value, Value] = {}

        def visit(value: Value) -> Value:
            if value in made or value in seen:
                return made.get(value) or seen[value]
            op = self.made.get(value)
            if op is None:
                return value
            operands = tuple(map(visit, op.operands))
            results = tuple(Value(v.type, v.name) for v in op.results)
            made.update(zip(op.results, results, strict=True))
            b.ops.append(op.with_(operands=operands, results=results))
            return made[value]

        for value in values:
            visit(value)
        return made
