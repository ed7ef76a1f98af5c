"""folds: tiles are not folded into another shape to be computed with and folded back.

In: `reshape` of elementwise ops of a `reshape`, whose other operands are constants or
equal along the dimensions that were split or joined, as `exp(s.reshape(n, k, 128) -
m[:, None, :]).reshape(n, k * 128)`. Out: the same ops in the first shape. And matmuls
are added up in the shape of a matrix, where each would be folded before. Proof: these
ops act element by element, and reshapes keep the order of elements.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import Rewriter, dead_code, is_elementwise, map_ops
from pallasite.passes.normal.uniform_dims import groups


def folds(kernel: Kernel) -> Kernel:
    """The kernel with elementwise ops in the shape that tiles have outside them."""
    if kernel.level != TILE:
        return kernel
    new = map_ops(kernel, _unfolded)
    return kernel if new is kernel else dead_code(new)


def _folded_last(op: Op, b: Rewriter) -> Value | None:
    """The fold of a sum, of the sum of folded matmuls."""
    folds = [b.producer(v, "reshape") for v in op.operands]
    sources = [fold.operands[0] for fold in folds if fold is not None]
    if len(sources) < 2 or sources[0].tile.shape != sources[1].tile.shape:
        return None
    if not all(_is_product(b, v) for v in sources):
        return None
    return b.reshape(b.add(*sources), shape=op.result.tile.shape)


def _is_product(b: Rewriter, value: Value) -> bool:
    """Whether a tile is a sum of matmuls."""
    pending, seen = [value], set[Value]()
    while pending:
        value = pending.pop()
        op = b.producer(value)
        if op is None or op.name not in ("add", "dot"):
            return False
        if op.name == "add" and value not in seen:
            pending += op.operands
        seen.add(value)
    return True


def _unfolded(op: Op, b: Rewriter) -> Value | None:
    if op.name == "add":
        return _folded_last(op, b)
    if op.name != "reshape" or op.operands[0].is_ref:
        return None
    (x,), shape = op.operands, tuple(op.attrs["shape"])
    made = b.producer(x)
    if made is None or not is_elementwise(made) or not x.tile.rank:
        return None
    code = _Unfolded(b, shape, x.tile.shape)
    new = code.value(x)
    if new is None or not code.found:
        b.ops.clear()
        return None
    return new


class _Unfolded:
    """Values of one shape, computed in another; `found`: some were folded from it."""

    def __init__(self, b: Rewriter, shape: tuple[int, ...], folded: Sequence[int]):
        self.b, self.shape, self.folded = b, shape, tuple(folded)
        pairs = list(groups(folded, shape))
        # Dimensions that both shapes have, and where one dimension was split.
        self.kept = {old[0]: new[0] for old, new in pairs if len(old) == len(new) == 1}
        self.joined = {d: new[0] for old, new in pairs if len(new) == 1 for d in old}
        self.found = False
        self.known: dict[Value, Value | None] = {}

    def value(self, value: Value) -> Value | None:
        if not value.tile.shape:
            return value  # holds for all elements
        if value not in self.known:
            self.known[value] = self._made(value)
        return self.known[value]

    def _made(self, value: Value) -> Value | None:
        op, b = self.b.producer(value), self.b
        if op is None or value.tile.shape != self.folded:
            return None
        if op.name == "constant":
            return b.constant(op.attrs["value"], value.tile.with_shape(self.shape))
        if op.name == "reshape" and op.operands[0].tile.shape == self.shape:
            self.found = True
            return op.operands[0]
        if op.name == "broadcast_in_dim":
            return self._broadcast(op)
        if not is_elementwise(op):
            return None
        operands = [self.value(v) for v in op.operands]
        if any(v is None for v in operands):
            return None
        return b.op(op.name, *(v for v in operands if v is not None), **op.attrs)

    def _broadcast(self, op: Op) -> Value | None:
        """A broadcast of what is equal along all dimensions that are not kept."""
        (x,) = op.operands
        dims, sizes = list[int](), list[int]()
        for n, to in zip(x.tile.shape, op.attrs["dims"], strict=True):
            place = self.kept.get(to) if n != 1 else self.joined.get(to)
            if n != 1 and place is None:
                return None
            if place is not None and place not in dims:
                dims.append(place)
                sizes.append(n)
        if tuple(sizes) != x.tile.shape:
            x = self.b.reshape(x, shape=tuple(sizes))
        return self.b.broadcast(x, self.shape, dims)
