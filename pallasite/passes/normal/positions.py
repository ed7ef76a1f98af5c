"""positions: tiles of positions are iotas of the shape in which they are used.

In: positions made as a column or row and then broadcast (`jnp.arange(n)[:, None]`),
transposed or reshaped from a row to a column, or taken one by one from `jnp.arange(n)`,
as `lax.scan` does. Out: an iota of the whole shape; the index itself. Broadcasting,
transposing and slicing are renamings of elements, and so are reshapes that only move
dimensions of size one. The ops in between act element by element, so all commute.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, apply_patterns, is_elementwise
from pallasite.passes.normal.canonicalize import canonicalize


def positions(kernel: Kernel) -> Kernel:
    """Make positions in the shapes in which they are used."""
    new = apply_patterns(kernel, PATTERNS)
    return kernel if new is kernel else canonicalize(new)


def _is_position(b: Rewriter, value: Value, depth: int = 8) -> bool:
    """Whether a tile of integers or bools is made of iotas, constants and scalars."""
    op = b.producer(value)
    if op is None or not depth or value.type.dtype.is_float or len(op.results) != 1:
        return False
    if op.name in ("iota", "constant"):
        return True
    if op.name == "broadcast_in_dim":
        return not op.operands[0].type.shape
    if op.regions or not is_elementwise(op):
        return False
    return all(not v.type.shape or _is_position(b, v, depth - 1) for v in op.operands)


def broadcast_positions(op: Op, b: Rewriter) -> Value | None:
    """Broadcast what positions are made of, rather than the positions."""
    (x,), shape, dims = op.operands, op.attrs["shape"], op.attrs["dims"]
    if not x.type.shape or x.type.size == 1 or not _is_position(b, x):
        return None
    return _broadcast(b, x, shape, dims)


def moved_positions(op: Op, b: Rewriter) -> Value | None:
    """Make positions where a transposition or a reshape puts them."""
    (x,), shape = op.operands, op.result.type.shape
    if x.type.size == 1 or not _is_position(b, x):
        return None
    dims = [0] * len(x.type.shape)
    if op.name == "transpose":
        pairs = [(d, n) for n, d in enumerate(op.attrs["perm"])]
    else:
        old = [d for d, n in enumerate(x.type.shape) if n != 1]
        new = [d for d, n in enumerate(shape) if n != 1]
        if [x.type.shape[d] for d in old] != [shape[d] for d in new]:
            return None
        pairs = list(zip(old, new, strict=True))
    for before, after in pairs:
        dims[before] = after
    return _broadcast(b, x, shape, dims)


def _broadcast(
    b: Rewriter, x: Value, shape: Sequence[int], dims: Sequence[int]
) -> Value:
    made, tile = b.producer(x), x.tile.with_shape(shape)
    assert made is not None
    if made.name == "constant":
        return b.constant(made.attrs["value"], tile)
    if made.name == "iota":
        dim = made.attrs["dim"]
        if x.type.shape[dim] == 1:
            return b.constant(0, tile)
        return b.op("iota", type=tile, dim=dims[dim])
    if made.name == "broadcast_in_dim":
        return b.broadcast(made.operands[0], shape, ())
    operands = [
        _broadcast(b, v, shape, dims) if v.type.shape else v for v in made.operands
    ]
    return b.op(made.name, *operands, **made.attrs)


def slice_positions(op: Op, b: Rewriter) -> Value | None:
    """Slice what positions are made of; an iota from a start is the iota plus it."""
    x = op.operands[0]
    if not _is_position(b, x):
        return None
    return _sliced(b, op, x)


def _sliced(b: Rewriter, op: Op, x: Value) -> Value:
    made = b.producer(x)
    tile = x.tile.with_shape(op.result.type.shape)
    assert made is not None
    if made.name == "constant":
        return b.constant(made.attrs["value"], tile)
    if made.name == "broadcast_in_dim":
        return b.broadcast(made.operands[0], tile.shape, ())
    if made.name != "iota":
        operands = [_sliced(b, op, v) if v.type.shape else v for v in made.operands]
        return b.op(made.name, *operands, **made.attrs)
    dim, base = made.attrs["dim"], b.op("iota", type=tile, dim=made.attrs["dim"])
    if op.name == "slice":
        base = b.mul(base, b.like(op.attrs["strides"][dim], base))
        return b.add(base, b.like(op.attrs["starts"][dim], base))
    most = x.type.shape[dim] - tile.shape[dim]
    start = b.as_index(op.operands[1 + dim])
    start = b.clamp(b.index(0), start, b.index(most))
    return b.add(base, b.broadcast(b.cast(start, tile.dtype), tile.shape, ()))


PATTERNS = (
    ("broadcast_in_dim", broadcast_positions),
    ("reshape", moved_positions),
    ("transpose", moved_positions),
    ("slice", slice_positions),
    ("dynamic_slice", slice_positions),
)
