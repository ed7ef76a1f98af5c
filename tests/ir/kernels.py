"""Three kernels built by hand, as the frontend would import them.

`vector_add`, `matmul` (three grid axes, accumulating in the output block) and
`flash_attention` (running maximum, sum and result carried in scratch).
"""

from collections.abc import Callable, Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, BlockDim, Kernel, Value, Window
from pallasite.ir.types import F32, I32, INDEX, DType, RefType

IndexMap = Callable[..., Sequence[Value]]


def main_ref(name: str, *shape: int, dtype: DType = F32) -> Value:
    """A kernel parameter: a whole array in main memory."""
    return Value(RefType(shape, dtype, "any"), name)


def blocked(mode: str, *sizes: int) -> Window:
    return Window(tuple(map(BlockDim, sizes)), mode)


def grid_ids(axes: int) -> tuple[Value, ...]:
    return tuple(Value(INDEX, name) for name in "ijkl"[:axes])


def block_refs(refs: Sequence[Value], windows: Sequence[Window]) -> list[Value]:
    return [
        Value(RefType(w.block_shape, r.ref.dtype, w.space), r.name + "_block")
        for r, w in zip(refs, windows, strict=True)
    ]


def emit_pipeline(
    b: Builder,
    refs: Sequence[Value],
    windows: Sequence[Window],
    maps: Sequence[IndexMap],
    grid: tuple[int, ...],
    body: Callable[..., None],
    semantics: tuple[str, ...] | None = None,
) -> None:
    """`body(builder, ids, *block_refs)` emits the code of one program."""
    regions: list[Block] = []
    for index_map in maps:
        ids, inner = grid_ids(len(grid)), Builder()
        yields = index_map(inner, *ids)
        regions.append(inner.block(ids, yields))
    ids, blocks, inner = grid_ids(len(grid)), block_refs(refs, windows), Builder()
    body(inner, ids, *blocks)
    regions.append(inner.block((*ids, *blocks)))
    b.emit(
        "pipeline",
        *refs,
        regions=regions,
        grid=grid,
        windows=tuple(windows),
        semantics=semantics or ("arbitrary",) * len(grid),
    )


def when(b: Builder, predicate: Value, emit: Callable[[Builder], None]) -> None:
    """`pl.when`: a two-way cond whose first branch is empty."""
    then = Builder()
    emit(then)
    number = b.cast(predicate, I32)
    b.emit("cond", number, regions=(Block(), then.block()))


def vector_add(size: int = 1024, block: int = 128, dtype: DType = F32) -> Kernel:
    refs = [main_ref(name, size, dtype=dtype) for name in ("x", "y", "o")]
    windows = [blocked(mode, block) for mode in ("in", "in", "out")]

    def body(b: Builder, ids: tuple[Value, ...], x: Value, y: Value, o: Value):
        b.store(o, b.add(b.load(x), b.load(y)))

    b = Builder()
    maps = [lambda b, i: (i,)] * 3
    emit_pipeline(b, refs, windows, maps, (-(-size // block),), body, ("parallel",))
    return Kernel("vector_add", tuple(refs), b.block(), 1)


def matmul(
    m: int = 256, n: int = 256, k: int = 256, block: tuple[int, int, int] = (128,) * 3
) -> Kernel:
    """`block`: rows, columns and depth of one step."""
    bm, bn, bk = block
    refs = [main_ref("x", m, k), main_ref("y", k, n), main_ref("o", m, n)]
    windows = [blocked("in", bm, bk), blocked("in", bk, bn), blocked("out", bm, bn)]
    maps = [lambda b, i, j, k: (i, k), lambda b, i, j, k: (k, j)]
    maps += [lambda b, i, j, k: (i, j)]

    def body(b: Builder, ids: tuple[Value, ...], x: Value, y: Value, o: Value):
        first = b.eq(ids[2], b.index(0))
        when(b, first, lambda c: c.store(o, c.constant(0.0, o.ref.tile)))
        product = dot(b, b.load(x), b.load(y), 1, 0)
        b.store(o, b.add(b.load(o), product))

    b = Builder()
    grid = (-(-m // bm), -(-n // bn), -(-k // bk))
    semantics = ("parallel", "parallel", "arbitrary")
    emit_pipeline(b, refs, windows, maps, grid, body, semantics)
    return Kernel("matmul", tuple(refs), b.block(), 1)


def dot(b: Builder, x: Value, y: Value, x_dim: int, y_dim: int) -> Value:
    attrs = dict(batch=((), ()), dtype=F32, precision=None)
    return b.op("dot", x, y, contract=((x_dim,), (y_dim,)), **attrs)


def flash_attention(
    queries: int = 256, keys: int = 256, depth: int = 64, block: int = 128
) -> Kernel:
    """softmax(q k^T / sqrt(depth)) v for one head, keys along the last grid axis."""
    refs = [
        main_ref("q", queries, depth),
        main_ref("k", keys, depth),
        main_ref("v", keys, depth),
        main_ref("o", queries, depth),
    ]
    windows = [blocked(mode, block, depth) for mode in ("in", "in", "in", "out")]
    zero = lambda b: b.index(0)
    by_query = lambda b, i, j: (i, zero(b))
    by_key = lambda b, i, j: (j, zero(b))
    grid = (-(-queries // block), -(-keys // block))

    b = Builder()
    scratch = {
        name: b.emit("alloc", names=[name], type=RefType(shape, F32, "vmem"))[0]
        for name, shape in (
            ("top", (block, 1)),
            ("total", (block, 1)),
            ("acc", (block, depth)),
        )
    }

    def body(b: Builder, ids: tuple[Value, ...], *blocks: Value):
        _attention_step(b, ids, blocks, scratch, grid[1], depth**-0.5)

    maps = [by_query, by_key, by_key, by_query]
    emit_pipeline(b, refs, windows, maps, grid, body, ("parallel", "arbitrary"))
    return Kernel("flash_attention", tuple(refs), b.block(), 1)


def _attention_step(
    b: Builder,
    ids: tuple[Value, ...],
    blocks: Sequence[Value],
    scratch: dict[str, Value],
    steps: int,
    scale: float,
) -> None:
    q, k, v, o = blocks
    top, total, acc = scratch["top"], scratch["total"], scratch["acc"]

    def start(c: Builder) -> None:
        c.store(top, c.constant(float("-inf"), top.ref.tile))
        c.store(total, c.constant(0.0, total.ref.tile))
        c.store(acc, c.constant(0.0, acc.ref.tile))

    def finish(c: Builder) -> None:
        divisor = c.broadcast(c.load(total), acc.ref.shape, (0, 1))
        c.store(o, c.div(c.load(acc), divisor))

    when(b, b.eq(ids[1], b.index(0)), start)
    scores = dot(b, b.load(q), b.load(k), 1, 1)
    scores = b.mul(scores, b.like(scale, scores))
    rows = top.ref.shape
    old_top = b.load(top)
    new_top = b.max(
        old_top, b.reshape(b.reduce(scores, kind="max", axes=(1,)), shape=rows)
    )
    weights = b.exp(b.sub(scores, b.broadcast(new_top, scores.tile.shape, (0, 1))))
    decay = b.exp(b.sub(old_top, new_top))
    row_sum = b.reshape(b.reduce(weights, kind="sum", axes=(1,)), shape=rows)
    b.store(total, b.add(b.mul(b.load(total), decay), row_sum))
    kept = b.mul(b.load(acc), b.broadcast(decay, acc.ref.shape, (0, 1)))
    b.store(acc, b.add(kept, dot(b, weights, b.load(v), 1, 0)))
    b.store(top, new_top)
    when(b, b.eq(ids[1], b.index(steps - 1)), finish)


ALL = (vector_add, matmul, flash_attention)
