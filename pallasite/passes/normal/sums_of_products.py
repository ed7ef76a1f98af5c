"""sums_of_products: a sum of products of two matrices is a dot.

In: `jnp.sum(q[:, None, :] * k[None, :, :], axis=2)`. Out: `dot` of q and k, which has no
tile of all the products. Both sides must have rows of their own; with a vector on one
side it stays a sum.

Where a product and the sum it is added to may be rounded once, as on NVIDIA GPUs, a dot
of the precision "highest" means the same. Products of numbers that were bf16 or f16 are
exact in f32, so these are multiplied as they were, whatever is in between.
"""

from typing import NamedTuple

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, apply_patterns
from pallasite.ir.types import F32
from pallasite.passes.normal.canonicalize import canonicalize

LEAST_DEPTH, LEAST_ROWS = 16, 2
EXACT = ("bf16", "f16")  # pairs of which have exact products in f32


def sums_of_products(kernel: Kernel) -> Kernel:
    """Dots instead of sums of products."""
    new = apply_patterns(kernel, (("reduce", _as_dot),))
    return kernel if new is kernel else canonicalize(new)


class _Side(NamedTuple):
    """A factor before it was broadcast to the shape of all products."""

    value: Value
    dims: tuple[int, ...]  # of the products, in the order of its own

    @property
    def has(self) -> frozenset[int]:
        return frozenset(self.dims)


def _as_dot(op: Op, b: Rewriter) -> Value | None:
    if op.attrs["kind"] != "sum" or len(op.operands) != 1 or op.result.type.dtype != F32:
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
        *_factors(b, sides[0].value, sides[1].value),
        contract=contract,
        batch=((), ()),
        dtype=F32,
        precision="highest",
    )
    return b.op("reshape", made, shape=op.result.type.shape)


def _side(b: Rewriter, value: Value, shape: tuple[int, ...]) -> _Side:
    """What a factor is broadcast from, without dimensions of size one."""
    dims = tuple(range(len(shape)))
    op = b.producer(value, "broadcast_in_dim")
    if op is not None and op.operands[0].tile.shape:
        value, dims = op.operands[0], op.attrs["dims"]
    sizes = value.tile.shape
    kept = [k for k, n in enumerate(sizes) if n > 1]
    if len(kept) < len(sizes):
        value = b.op("reshape", value, shape=tuple(sizes[k] for k in kept))
    return _Side(value, tuple(dims[k] for k in kept))


def _size(shape: tuple[int, ...], dims: frozenset[int]) -> int:
    size = 1
    for d in dims:
        size *= shape[d]
    return size


def _factors(b: Rewriter, x: Value, y: Value) -> tuple[Value, Value]:
    """Both as they were before they were widened, where they were of one narrow type."""
    narrow = [_narrow(b, v) for v in (x, y)]
    found = [v for v in narrow if v is not None]
    types = {v.type.dtype.name for v in found}
    if len(found) == 2 and len(types) == 1 and types <= set(EXACT):
        return found[0], found[1]
    return x, y


def _narrow(b: Rewriter, value: Value) -> Value | None:
    """What a tile was cast from, in the shape in which it is used."""
    op = b.producer(value)
    if op is None or op.name not in ("cast", "transpose", "reshape"):
        return None
    if op.name == "cast":
        return op.operands[0]
    source = _narrow(b, op.operands[0])
    return None if source is None else b.op(op.name, source, **op.attrs)
