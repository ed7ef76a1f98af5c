"""sums_of_products: a sum of products of two matrices is a dot.

In: `jnp.sum(q[:, None, :] * k[None, :, :], axis=2)`. Out: `dot` of q and k, which has
no tile of all the products. Both sides must have rows of their own; with a vector on
one side it stays a sum.

Where a product and the sum it is added to may be rounded once, as on NVIDIA GPUs, a dot
of the precision "highest" means the same.
"""

from math import prod
from typing import NamedTuple

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, apply_patterns
from pallasite.ir.types import F32
from pallasite.passes.normal.canonicalize import canonicalize

LEAST_DEPTH, LEAST_ROWS = 16, 2


def sums_of_products(kernel: Kernel) -> Kernel:
    """Dots instead of sums of products."""
    new = apply_patterns(kernel, (("reduce", _as_dot),))
    return kernel if new is kernel else canonicalize(new)


class _Side(NamedTuple):
    """A factor before it was broadcast to the shape of all products."""

    value: Value
    dims: tuple[int, ...]  # of the products: those along which it has elements

    @property
    def has(self) -> frozenset[int]:
        return frozenset(self.dims)


def _as_dot(op: Op, b: Rewriter) -> Value | None:
    if (
        op.attrs["kind"] != "sum"
        or len(op.operands) != 1
        or op.result.type.dtype != F32
    ):
        return None
    product = b.producer(op.operands[0], "mul")
    if product is None:
        return None
    shape, axes = product.result.tile.shape, op.attrs["axes"]
    left, right = (_side(b, v, shape) for v in product.operands)
    both, either = left.has & right.has, left.has | right.has
    real = {d for d, n in enumerate(shape) if n > 1}
    rows = [s for s in (left, right) if _size(shape, s.has - both) >= LEAST_ROWS]
    depth = _size(shape, frozenset(axes))
    if len(rows) < 2 or depth < LEAST_DEPTH or not set(axes) <= both or either != real:
        return None
    if both != set(axes):  # a batch
        return None
    first = min(left.has - both) < min(right.has - both)
    sides = [left, right] if first else [right, left]
    free = [d for side in sides for d in side.dims if d not in axes]
    if free != sorted(free):
        return None
    contract = tuple(tuple(s.dims.index(a) for a in axes) for s in sides)
    made = b.op(
        "dot",
        *(_factor(b, side.value) for side in sides),
        contract=contract,
        batch=((), ()),
        dtype=F32,
        precision="highest",
    )
    return b.op("reshape", made, shape=op.result.type.shape)


def _side(b: Rewriter, value: Value, shape: tuple[int, ...]) -> _Side:
    """What a factor is broadcast from."""
    dims = tuple(range(len(shape)))
    op = b.producer(value, "broadcast_in_dim")
    if op is not None and op.operands[0].tile.shape:
        value, dims = op.operands[0], op.attrs["dims"]
    pairs = zip(dims, value.tile.shape, strict=True)
    return _Side(value, tuple(d for d, n in pairs if n > 1))


def _size(shape: tuple[int, ...], dims: frozenset[int]) -> int:
    return prod(shape[d] for d in dims)


def _factor(b: Rewriter, value: Value) -> Value:
    """Without dimensions of size one."""
    return b.op("reshape", value, shape=tuple(n for n in value.tile.shape if n > 1))
