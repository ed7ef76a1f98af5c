"""Values that get deeper along k: loads of merged steps, and what depends on them.

Where several iterations or steps are merged into one, it loads as much along k as all
of them did; where one is split, each loads a part. `Depths` follows such values to the
matmuls that contract k; `Deeper` rebuilds the ops that compute them. Used by
`merge_k_steps.py` and `merge_k_rounds.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from pallasite.ir.build import Builder, Scalar
from pallasite.ir.nodes import Op, Span, Value
from pallasite.ir.opdef import table
from pallasite.ir.roles import Dot


class Depths:
    """Which values get deeper, and along which dimension.

    `made`: the ops that define other values the code uses, where known.
    """

    def __init__(self, made: Mapping[Value, Op]):
        self.made = made
        self.dims: dict[Value, int] = {}
        self.loads: dict[Op, int] = {}  # and which index entry grows
        self.computed: list[Value] = []  # deeper values other than plain loads

    def add_load(self, op: Op, entry: int) -> None:
        spans = (isinstance(e, Span) for e in op.attrs["index"][:entry])
        self.dims[op.result] = sum(spans)
        self.loads[op] = entry

    def touches(self, op: Op) -> bool:
        return any(v in self.dims for v in op.operands)

    def follow(self, op: Op) -> bool:
        """Whether a deeper operand makes the result deeper and changes nothing else."""
        dims = {self.dims.get(v) for v in op.operands if self.number(v) is None}
        dim = dims.pop()
        if dims or dim is None:
            return False
        if op.name == "transpose":
            dim = op.attrs["perm"].index(dim)
        elif table()[op.name].elementwise:
            self.computed.append(op.result)
        else:
            return False
        self.dims[op.result] = dim
        return True

    def are_summed(self, dot: Op) -> bool:
        """Whether both operands contract the dimension that gets deeper."""
        lhs, rhs = Dot.of(dot).sides
        pairs = zip(lhs.contract, rhs.contract, strict=True)
        deeper = [self.dims.get(side.value) for side in (lhs, rhs)]
        return any(deeper == [*pair] for pair in pairs)

    def factor(self, steps: int, deepest: int, most_bytes: int) -> int:
        """How many steps to merge into one; divides the number of steps.

        No load gets deeper than `deepest`, and no tile computed from one larger than
        `most_bytes`: such tiles are stored before the matmul.
        """
        depth = max(v.tile.shape[self.dims[v]] for op in self.loads for v in op.results)
        sizes = [v.tile.size * v.tile.dtype.bytes for v in self.computed]
        limits = [deepest // max(depth, 1), *(most_bytes // max(n, 1) for n in sizes)]
        most = min(steps, *limits)
        return max((n for n in range(2, most + 1) if steps % n == 0), default=1)

    def number(self, value: Value) -> Scalar | None:
        op = self.made.get(value)
        return op.attrs["value"] if op is not None and op.name == "constant" else None


class Deeper:
    """Rebuilds ops whose results get `factor` times deeper (a fraction: shallower)."""

    def __init__(self, depths: Depths, factor: int | Fraction):
        self.depths, self.factor = depths, factor
        self.new: dict[Value, Value] = {}

    def emit(self, b: Builder, op: Op) -> None:
        """The op, deeper if its result is."""
        b.loc = op.loc
        if op in self.depths.loads:
            self.new[op.result] = self._load(b, op)
        elif any(v in self.depths.dims for v in op.results):
            dims = self.depths.dims
            dim = next(dims[v] for v in op.operands if v in dims)
            operands = [self.new.get(v) or self._number(b, v, dim) for v in op.operands]
            self.new[op.result] = b.op(op.name, *operands, **op.attrs)
        else:
            b.ops.append(op.with_(operands=self.mapped(op.operands)))

    def _load(self, b: Builder, op: Op) -> Value:
        index, entry = list(op.attrs["index"]), self.depths.loads[op]
        span = index[entry]
        assert isinstance(span, Span)
        index[entry] = replace(span, size=int(span.size * self.factor))
        ref, *starts = op.operands
        return b.load(self.new.get(ref, ref), tuple(index), starts)

    def _number(self, b: Builder, value: Value, dim: int) -> Value:
        if not value.tile.rank:
            return value
        number = self.depths.number(value)
        assert number is not None
        type = replace(value.tile, shape=self.shape(value.tile.shape, dim))
        return b.constant(number, type)

    def shape(self, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        return (*shape[:dim], int(shape[dim] * self.factor), *shape[dim + 1 :])

    def mapped(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(self.new.get(v, v) for v in values)


def adds_up(dot: Op) -> bool:
    """Whether no precision is lost between a matmul and the sum it is added to."""
    operands = (v.tile.dtype.bits for v in dot.operands)
    return dot.result.tile.dtype.bits >= max(32, *operands)


def only_user(users: Mapping[Value, list[Op]], value: Value, name: str) -> Op | None:
    """The op that uses a value, if it is the only one and has that name."""
    found = users[value]
    return found[0] if len(found) == 1 and found[0].name == name else None
