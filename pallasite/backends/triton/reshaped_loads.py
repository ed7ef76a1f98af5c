"""reshaped_loads: what is loaded only to be reshaped is loaded in the new shape.

In: a load and a reshape that moves padding, as of (8, 14, 48) to (112, 48), or such a
reshape and a store: Triton pads every dimension to a power of two, so elements would
move through shared memory. Out: a load or store at computed indices, whose arithmetic
does not depend on the iteration of a loop. Only where rows are as long as a thread's
widest access in either shape.

Proof: a reshape keeps the order of elements, so that of the number p is loaded from, or
stored to, where the p-th element of the tile lies. A transpose of dimensions of size
one is a reshape.
"""

from collections.abc import Sequence

from pallasite.backends.triton.shared_memory import keeps_padding
from pallasite.ir import types as T
from pallasite.ir.build import part_start
from pallasite.ir.nodes import Access, At, Gather, Kernel, Op, Span, Value
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops, users_of
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.uniform_dims import groups

VECTOR_BYTES = 16  # of a thread's widest access


def reshaped_loads(kernel: Kernel) -> Kernel:
    """The kernel with loads and stores in the shapes that tiles have between them."""
    plain = map_ops(kernel, _in_order)
    plain = kernel if plain is kernel else canonicalize(plain)
    users = users_of(plain.body)

    def rewrite(op: Op, b: Rewriter) -> Value | Sequence[Value] | None:
        if op.name == "store":
            return _stored(op, b)
        load = b.producer(op.operands[0], "load") if op.name == "reshape" else None
        if load is None or len(users[load.result]) > 1:
            return None
        access, shape = Access.of(load), op.result.tile.shape
        if not _is_better(access, load.result, op.result):
            return None
        index, starts = _elements(b, access, load.result.tile.shape, shape)
        return b.load(access.ref, index, starts)

    new = map_ops(plain, rewrite)
    return kernel if new is plain else canonicalize(dead_code(new))


def _in_order(op: Op, b: Rewriter) -> Value | None:
    """A transpose that moves dimensions of size one, as a reshape."""
    if op.name != "transpose" or op.operands[0].is_ref:
        return None
    (x,), perm = op.operands, op.attrs["perm"]
    long = [d for d in perm if x.tile.shape[d] != 1]
    return b.reshape(x, shape=op.result.tile.shape) if long == sorted(long) else None


def _stored(op: Op, b: Rewriter) -> Sequence[Value] | None:
    access = Access.of(op)
    fold = b.producer(op.operands[1], "reshape")
    if fold is None or not _is_better(access, op.operands[1], fold.operands[0]):
        return None
    (x,) = fold.operands
    index, starts = _elements(b, access, op.operands[1].tile.shape, x.tile.shape)
    b.store(access.ref, x, index, starts)
    return ()


def _is_better(access: Access, there: Value, here: Value) -> bool:
    """`there`: the tile as it is in memory; `here`: as it is computed with."""
    if access.mask is not None or any(isinstance(e, Gather) for e in access.index):
        return False
    old, new = there.tile.shape, here.tile.shape
    if not (old and new and here.tile.size) or keeps_padding(old, new):
        return False
    return min(old[-1], new[-1]) * here.tile.dtype.bytes >= VECTOR_BYTES


def _elements(
    b: Rewriter, access: Access, old: Sequence[int], new: Sequence[int]
) -> tuple[tuple[At | Gather, ...], list[Value]]:
    """The index of an access and its operands, for a tile of another shape."""
    places = _places(b, old, new)
    index, operands, along = list[At | Gather](), list[Value](), 0
    sizes = access.ref.ref.shape
    for n, (entry, start) in zip(sizes, access.split_index(), strict=True):
        if isinstance(entry, At):
            index.append(entry)
            operands += [] if start is None else [start]
        elif isinstance(entry, Span):
            first = part_start(b, entry, start, n, b.index(0), False)
            spot = b.mul(places[along], b.like(entry.stride, places[along]))
            index.append(Gather())
            operands.append(b.add(spot, b.broadcast(first, new)))
            along += 1
    return tuple(index), operands


def _places(b: Rewriter, old: Sequence[int], new: Sequence[int]) -> list[Value]:
    """Where each element of the new shape is along each dimension of the old one."""
    type_ = T.TileType(tuple(new), T.I32)
    found = dict[int, Value]()
    for before, after in groups(old, new):
        number, size = b.constant(0, type_), 1
        for d in reversed(after):
            digit = b.op("iota", type=type_, dim=d)
            number = b.add(number, b.mul(digit, b.constant(size, type_)))
            size *= new[d]
        for d in (d for d in reversed(before) if old[d] != 1):
            length = b.constant(old[d], type_)
            found[d] = number if d == before[0] else b.op("rem", number, length)
            number = b.div(number, length)
    return [found.get(d, b.constant(0, type_)) for d in range(len(old))]
