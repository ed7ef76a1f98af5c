"""ordered_sums: atomic additions of floats by one program, in a fixed order.

In: `pl.atomic_add` of a tile at computed indices, as in a histogram of weights, to a
block that no program shares with another that may run at the same time. Out: for every
element of the block the sum of what has its index, added by a plain load and store.
Threads of a GPU reach an atomic in any order, so sums of floats would differ from run
to run; a reduction's order is fixed. (Integers are exact in any order and stay.)

Proof: as nobody else accesses the block meanwhile, an atomic is a load, an addition and
a store. Repeated indices are counted, and one that is out of range equals no position,
so nothing is added for it, as for an atomic.

Every element is compared with every index, so large blocks stay atomic.
"""

from pallasite.ir import types as T
from pallasite.ir.nodes import Access, Gather, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops, users_of
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import analyze, find_pipeline

MOST_ELEMENTS = 1 << 10  # of the block
MOST_COMPARED = 1 << 18  # pairs of an element and an index


def ordered_sums(kernel: Kernel) -> Kernel:
    """Sums by comparison instead of atomics, where those add floats to few elements."""
    atomics = [op for op in walk(kernel.body) if op.name == "atomic_rmw"]
    pipelines = sum(op.name == "pipeline" for op in walk(kernel.body))
    if not atomics or pipelines != 1:
        return kernel
    blocks = _own_blocks(kernel)
    users = users_of(kernel.body)

    def rewrite(op: Op, b: Rewriter) -> tuple[Value, ...] | None:
        if op.name != "atomic_rmw" or users.get(op.result):
            return None
        access = Access.of(op)
        if op.attrs["kind"] != "add" or access.ref not in blocks:
            return None
        if not _is_small(access):
            return None
        _add(b, access)
        return (b.constant(0, op.result.tile),)  # nobody uses it

    return dead_code(map_ops(kernel, rewrite))


def _own_blocks(kernel: Kernel) -> set[Value]:
    """Blocks that programs which may run at the same time do not share."""
    pipeline, info = Pipeline.of(find_pipeline(kernel)), analyze(kernel)
    parallel = {a for a in info.parallel if info.axes[a].size != 1}
    return {
        shown.block
        for shown, moves in zip(pipeline.shown, info.windows, strict=True)
        if parallel <= moves.apart
    }


def _is_small(access: Access) -> bool:
    ref, value = access.ref.ref, access.value
    assert value is not None
    if not ref.dtype.is_float or access.index != (Gather(),):
        return False
    pairs = ref.size * value.tile.size
    return ref.size <= MOST_ELEMENTS and pairs <= MOST_COMPARED and value.tile.size > 1


def _add(b: Rewriter, access: Access) -> None:
    ref, value = access.ref, access.value
    (where,) = access.index_operands
    assert value is not None
    bins, count = ref.ref.size, value.tile.size
    shape = (count, bins)
    flat = lambda x: b.op("reshape", x, shape=(count,))
    at = b.as_index(flat(where))
    at = b.broadcast(at, shape, (0,))
    position = b.op("iota", dim=1, type=T.TileType(shape, T.I32))
    hit = b.eq(at, position)
    if access.mask is not None:
        hit = b.and_(hit, b.broadcast(flat(access.mask), shape, (0,)))
    wide = T.F32 if ref.ref.dtype.bits < 32 else ref.ref.dtype
    terms = b.broadcast(b.cast(flat(value), wide), shape, (0,))
    terms = b.select(hit, terms, b.like(0, terms))
    total = b.op("reduce", terms, kind="sum", axes=(0,))
    new = b.add(b.cast(b.load(ref), wide), total)
    b.store(ref, b.cast(new, ref.ref.dtype))
