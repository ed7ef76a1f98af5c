"""At least one op of every row of the table, in small verified kernels."""

from collections.abc import Callable

from pallasite.ir.build import Builder
from pallasite.ir.levels import level_of
from pallasite.ir.nodes import (
    At,
    Block,
    BlockDim,
    Gather,
    Kernel,
    Loc,
    Span,
    Value,
    Window,
)
from pallasite.ir.opdef import OpDef, table
from pallasite.ir.types import (
    BF16,
    BOOL,
    F32,
    I32,
    INDEX,
    DType,
    Layout,
    RefType,
    TileType,
    scalar,
)
from tests.ir import kernels

TILE = (8, 16)
ATTRS = {
    "rounding_method": 1,
    "exponent_bits": 8,
    "mantissa_bits": 7,
    "y": 3,
    "dtype": I32,
}


PRODUCT = dict(contract=((1,), (0,)), batch=((), ()), dtype=F32, precision=None)


def kernel_of(name: str) -> Kernel:
    """A kernel that uses op `name`, with a ref `x` of 8 by 16 floats."""
    row = table()[name]
    x = kernels.main_ref("x", *TILE)
    b = Builder(Loc("samples.py", 7, f"make.<locals>.{name}"))
    if row.elementwise:
        elementwise(b, row)
    else:
        SAMPLES[name](b, x)
    body = b.block()
    return Kernel(name, (x,), body, 1, level=level_of(body))


def elementwise(b: Builder, row: OpDef) -> None:
    for dtype in row.dtypes:
        if row.name == "select_n":
            operands = [number(b, BOOL), number(b, dtype), number(b, dtype)]
        else:
            operands = [number(b, dtype) for _ in range(row.arity or 2)]
        attrs = {k: ATTRS[k] for k in row.attrs}
        if row.name == "bitcast":
            attrs["dtype"] = dtype
        b.emit(row.name, *operands, **attrs)


def number(b: Builder, dtype: DType, *shape: int) -> Value:
    return b.constant(1, TileType(shape or TILE, dtype))


def mbarrier(b: Builder) -> Value:
    layout = Layout("arrivals", (4,))
    return b.op("alloc", type=RefType((), I32, "mbarrier", layout))


def swizzled(b: Builder, *shape: int) -> Value:
    return b.op("alloc", type=RefType(shape, BF16, "smem", Layout("swizzle", (128,))))


def tile(b: Builder, *shape: int, dtype: DType = F32) -> Value:
    return number(b, dtype, *(shape or TILE))


def tensor_memory(b: Builder, *shape: int, dtype: DType = F32) -> Value:
    return b.op("alloc", type=RefType(shape, dtype, "tmem"))


def semaphore(b: Builder) -> Value:
    return b.op("alloc", type=RefType((), I32, "dma_sem"))


def _load(b: Builder, x: Value) -> None:
    i, picked = b.index(3), b.op("iota", type=TileType((5,), I32), dim=0)
    b.load(x)
    b.load(x, (At(2), Span(4, 3, 2)))
    b.load(x, (At(), Span(None, 4)), (i, i))
    b.load(x, (Span(None, 2, 3), Gather()), (i, picked))
    mask = tile(b, 5, dtype=BOOL)
    b.load(x, (Gather(), Gather()), (picked, picked), mask, tile(b, 5))
    b.load(x, mask=tile(b, dtype=BOOL))


def _store(b: Builder, x: Value) -> None:
    i = b.index(3)
    b.store(x, tile(b))
    b.store(x, b.constant(-0.0, scalar(F32)), (At(0), At()), (i,))
    b.store(x, tile(b, 2, 16), (Span(None, 2), Span(0, 16)), (i,))
    b.store(x, tile(b), mask=tile(b, dtype=BOOL))


def _atomic_rmw(b: Builder, x: Value) -> None:
    one = b.constant(1.0, scalar(F32))
    index = (At(), At(2))
    b.op("atomic_rmw", x, one, b.index(0), kind="add", index=index, mask=False)
    mask = b.constant(True, scalar(BOOL))
    b.op("atomic_rmw", x, one, b.index(0), mask, kind="max", index=index, mask=True)


def _atomic_cas(b: Builder, x: Value) -> None:
    one = b.constant(1.0, scalar(F32))
    b.op("atomic_cas", x, one, one, b.index(0), index=(At(), At(2)))


def _for(b: Builder, x: Value) -> None:
    body = Builder()
    i, carry, total = Value(INDEX, "i"), Value(INDEX, "sum"), Value(scalar(F32), "sum")
    added = body.add(carry, i)
    region = body.block((i, carry, total), (added, total))
    zero, start = b.index(0), b.constant(0.5, scalar(F32))
    b.emit("for", zero, b.index(8), b.index(1), zero, start, regions=(region,))


def _custom(b: Builder, x: Value) -> None:
    body, i = Builder(), Value(INDEX, "i")
    region = body.block((i,), (body.add(i, body.index(1)),))
    b.emit("custom", b.index(0), regions=(region,), rule="next")


def _matrix_unit(b: Builder, x: Value) -> None:
    body, rhs = Builder(), Value(TileType((8, 8), F32), "rhs")
    region = body.block((rhs,), (rhs,))
    attrs = {"unit": 0, "load": None, "transpose": False}
    for instruction, place, type_ in (("push", 1, None), ("pop", 4, rhs.tile)):
        operand = () if type_ else (b.constant(0.5, rhs.tile),)
        kept = {**attrs, "instruction": instruction, "place": place, "type": type_}
        b.emit("matrix_unit", *operand, **kept)
    kept = {**attrs, "instruction": "pop", "place": 0, "type": rhs.tile}
    b.emit("matrix_unit", b.constant(0.5, rhs.tile), regions=(region,), **kept)


def _while(b: Builder, x: Value) -> None:
    test, body = Builder(), Builder()
    i, j = Value(INDEX, "i"), Value(INDEX, "j")
    small = test.lt(i, test.index(8))
    more = body.add(j, body.index(1))
    regions = (test.block((i,), (small,)), body.block((j,), (more,)))
    b.emit("while", b.index(0), regions=regions)


def _cond(b: Builder, x: Value) -> None:
    yes, no = Builder(), Builder()
    regions = (yes.block((), (yes.index(1),)), no.block((), (no.index(2),)))
    b.emit("cond", b.index(0), regions=regions, names=("picked",))
    b.emit("cond", b.index(0), regions=(Block(),))


def _pipeline(b: Builder, x: Value) -> None:
    dims = (BlockDim(4, "element", (1, 1)), BlockDim(1, "squeezed"))
    more = (BlockDim(4, "bounded"), BlockDim(16))
    windows = (
        Window(dims, "in", fill=-0.5, buffers=3),
        Window(more, "in", "vmem", fill=False),
        Window(dims, "out", "smem"),
    )
    ids = lambda: (Value(INDEX, "i"), Value(INDEX))
    maps: list[Block] = []
    for window in windows:
        i, j = ids()
        maps.append(Block((i, j), (), (i, j, j) if window.dims == more else (i, j)))
    blocks = kernels.block_refs((x, x, x), windows)
    body = Block((*ids(), *blocks))
    size = b.load(b.subview(x, (At(0), At(0))), ())
    size = b.cast(size, I32)
    attrs = dict(windows=windows, semantics=("parallel", "arbitrary"))
    b.emit("pipeline", size, x, x, x, regions=(*maps, body), grid=(None, 4), **attrs)


def _copy(name: str, **attrs: object):
    def emit(b: Builder, x: Value) -> None:
        target = b.op("alloc", type=RefType(TILE, F32, "vmem"))
        b.emit(name, x, target, semaphore(b), **attrs)

    return emit


def _sort(b: Builder, x: Value) -> None:
    b.emit("sort", tile(b), tile(b, dtype=I32), axis=1, num_keys=1, stable=True)


GATHER = {
    "offset_dims": (1,),
    "collapsed_slice_dims": (0,),
    "start_index_map": (0,),
    "operand_batching_dims": (),
}
I32_TILE = TileType(TILE, I32)


def _indexed_copy(name: str, **attrs: object):
    def emit(b: Builder, x: Value) -> None:
        rows, target = 3, b.op("alloc", type=RefType((3, TILE[1]), F32, "vmem"))
        numbers = tile(b, rows, dtype=I32)
        b.emit(name, x, target, semaphore(b), numbers, indexed="source", **attrs)

    return emit


def _tensor_mma(b: Builder, x: Value) -> None:
    sides = swizzled(b, 128, 64), swizzled(b, 64, 32)
    adds = b.constant(True, scalar(BOOL))
    sums = tensor_memory(b, 128, 32)
    b.emit("tensor_mma", sums, *sides, adds, contract=((1,), (0,)), axes=())


def _warps(b: Builder, x: Value) -> None:
    b.emit("warps", regions=tuple(Builder(b.loc).block() for _ in range(4)))


def _roles(b: Builder, x: Value) -> None:
    roles = []
    for _ in range(2):
        role = Builder(b.loc)
        role.emit("barrier")
        roles.append(role.block())
    b.emit("roles", regions=tuple(roles))


SAMPLES: dict[str, Callable[[Builder, Value], object]] = {
    "constant": lambda b, x: [
        b.constant(value, scalar(F32))
        for value in (0.0, -0.0, 0.1, 1e22, 1e-45, float("inf"), float("-inf"))
    ],
    "iota": lambda b, x: b.op("iota", type=I32_TILE, dim=1),
    "broadcast_in_dim": lambda b, x: b.broadcast(tile(b, 1), (3, 4), (1,)),
    "reshape": lambda b, x: b.reshape(tile(b), shape=(128,)),
    "transpose": lambda b, x: b.transpose(tile(b), perm=(1, 0)),
    "slice": lambda b, x: b.slice(
        tile(b), starts=(0, 1), limits=(8, 9), strides=(1, 2)
    ),
    "concatenate": lambda b, x: b.concatenate(tile(b), tile(b), axis=1),
    "pad": lambda b, x: b.pad(
        tile(b), b.constant(0.0, scalar(F32)), low=(1, -1), high=(0, 0), interior=(1, 0)
    ),
    "rev": lambda b, x: b.rev(tile(b), axes=(0,)),
    "exchange": lambda b, x: b.op("exchange", tile(b), axis=1, distance=2),
    "reduce": lambda b, x: b.reduce(tile(b), kind="sum", axes=(0, 1)),
    "arg_reduce": lambda b, x: b.arg_reduce(tile(b), kind="max", axis=1, dtype=I32),
    "scan": lambda b, x: b.scan(tile(b), kind="sum", axis=1, reverse=True),
    "scaled": lambda b, x: b.op(
        "scaled", tile(b, 128, 16), tile(b, 1, 1, 512), dtype=BF16
    ),
    "dot_add": lambda b, x: b.op(
        "dot_add",
        tile(b),
        tile(b, 16, 4),
        *(tile(b, 8, 4), tile(b, 8, 4), tile(b, 8)),
        **PRODUCT,
        scaled=True,
    ),
    "dot_store": lambda b, x: b.emit(
        "dot_store",
        *(tile(b, 4, 8), tile(b, 8, 16), x, b.index(2), tile(b, 4, 16), b.index(0)),
        **PRODUCT,
        index=(Span(None, 4), Span(0, 16)),
        addend=True,
        scaled=False,
        overwrite=True,
    ),
    "dot": lambda b, x: b.dot(
        tile(b, 2, 8, 16),
        tile(b, 2, 16, 4),
        contract=((2,), (1,)),
        batch=((0,), (0,)),
        dtype=F32,
        precision="highest",
    ),
    "dynamic_slice": lambda b, x: b.dynamic_slice(
        tile(b), b.index(0), b.index(1), sizes=(2, 2)
    ),
    "dynamic_update_slice": lambda b, x: b.dynamic_update_slice(
        tile(b), tile(b, 2, 2), b.index(0), b.index(1)
    ),
    "sort": _sort,
    "top_k": lambda b, x: b.emit("top_k", tile(b), axis=1, k=3),
    "gather": lambda b, x: b.gather(
        tile(b),
        tile(b, 4, 1, dtype=I32),
        dimension_numbers=GATHER,
        slice_sizes=(1, 16),
        mode="clip",
        fill_value=None,
        type=TileType((4, 16), F32),
    ),
    "scatter": lambda b, x: b.scatter(
        tile(b),
        tile(b, 4, 1, dtype=I32),
        tile(b, 4, 16),
        dimension_numbers=GATHER,
        kind="add",
        mode="fill",
        type=TileType(TILE, F32),
    ),
    "load": _load,
    "store": _store,
    "atomic_rmw": _atomic_rmw,
    "atomic_cas": _atomic_cas,
    "subview": lambda b, x: b.subview(x, (Span(None, 4), At(1)), (b.index(2),)),
    "reshape_view": lambda b, x: b.reshape_view(x, shape=(128,)),
    "bitcast_view": lambda b, x: b.bitcast_view(x, dtype=I32),
    "transpose_view": lambda b, x: b.transpose_view(x, perm=(1, 0)),
    "block_view": lambda b, x: b.block_view(
        x, b.index(1), b.index(0), window=kernels.blocked("in", 4, 16)
    ),
    "alloc": lambda b, x: b.op("alloc", type=RefType((), I32, "smem")),
    "for": _for,
    "while": _while,
    "cond": _cond,
    "custom": _custom,
    "matrix_unit": _matrix_unit,
    "pipeline": _pipeline,
    "copy_start": _copy("copy_start", priority=1),
    "copy_wait": _copy("copy_wait"),
    "sem_signal": lambda b, x: b.emit("sem_signal", semaphore(b), b.index(1)),
    "sem_wait": lambda b, x: b.emit("sem_wait", semaphore(b), b.index(1)),
    "sem_reach": lambda b, x: b.emit("sem_reach", semaphore(b), b.index(1)),
    "sem_read": lambda b, x: b.sem_read(semaphore(b)),
    "sem_signal_core": lambda b, x: b.emit(
        "sem_signal_core", semaphore(b), b.index(1), b.index(0)
    ),
    "fetch_and_add": lambda b, x: b.fetch_and_add(
        b.op("alloc", type=RefType((), I32, "smem")), b.index(2), b.index(1)
    ),
    "remote_copy_start": lambda b, x: b.emit(
        "remote_copy_start", x, x, semaphore(b), semaphore(b), b.index(1), priority=0
    ),
    "sem_signal_device": lambda b, x: b.emit(
        "sem_signal_device", semaphore(b), b.index(1), b.index(1), b.index(0)
    ),
    "barrier_semaphore": lambda b, x: b.op("barrier_semaphore"),
    "device_number": lambda b, x: b.op("device_number", count=4),
    "barrier_expect": lambda b, x: b.emit("barrier_expect", mbarrier(b), bytes=512),
    "barrier_arrive": lambda b, x: b.emit("barrier_arrive", mbarrier(b)),
    "barrier_wait": lambda b, x: b.emit("barrier_wait", mbarrier(b), b.index(0)),
    "barrier_test": lambda b, x: b.op("barrier_test", mbarrier(b), b.index(0)),
    "load_wait": lambda b, x: b.emit("load_wait", pending=1),
    "async_store": lambda b, x: b.emit(
        "async_store",
        tile(b, 64, 8),
        b.op("alloc", type=RefType((64, 8), F32, "smem")),
        mbarrier(b),
        atomic=None,
    ),
    "peer_block": lambda b, x: b.op(
        "peer_block", swizzled(b, 64, 8), b.index(0), axes=("x",)
    ),
    "peer_device": lambda b, x: b.op("peer_device", x, b.index(1)),
    "inline_cuda": lambda b, x: b.emit(
        "inline_cuda",
        tile(b),
        b.index(2),
        text='y = x * n; // "\\"\nm = n;',
        symbols=("x", "n", "y", "m"),
        types=(tile(b).tile, scalar(I32)),
    ),
    "named_barrier": lambda b, x: b.emit(
        "named_barrier", id=1, threads=128, arrive_only=True
    ),
    "fence_async": lambda b, x: b.emit("fence_async"),
    "bulk_commit": lambda b, x: b.emit("bulk_commit"),
    "bulk_wait": lambda b, x: b.emit("bulk_wait", pending=1, read=True),
    "set_registers": lambda b, x: b.emit("set_registers", count=40, more=False),
    "wgmma": lambda b, x: b.op(
        "wgmma",
        tile(b, 64, 8),
        swizzled(b, 64, 64),
        swizzled(b, 64, 8),
        contract=((1,), (0,)),
    ),
    "wgmma_wait": lambda b, x: b.emit("wgmma_wait", tile(b), tile(b, 4), pending=1),
    "cluster_barrier": lambda b, x: b.emit("cluster_barrier"),
    "cluster_arrive": lambda b, x: b.emit(
        "cluster_arrive", mbarrier(b), axes=("x",), to="all"
    ),
    "cluster_copy": lambda b, x: b.emit(
        "cluster_copy",
        swizzled(b, 64, 8),
        swizzled(b, 64, 8),
        mbarrier(b),
        axes=("x",),
        to="first",
    ),
    "tensor_mma": _tensor_mma,
    "tensor_copy": lambda b, x: b.emit(
        "tensor_copy", swizzled(b, 8, 16), tensor_memory(b, 8, 16, dtype=BF16), axes=()
    ),
    "tensor_commit": lambda b, x: b.emit("tensor_commit", mbarrier(b), axes=()),
    "tensor_wait": lambda b, x: b.emit("tensor_wait", what="loads"),
    "warps": _warps,
    "indexed_copy_start": _indexed_copy("indexed_copy_start", add=False),
    "indexed_copy_wait": _indexed_copy("indexed_copy_wait"),
    "roles": _roles,
    "barrier": _roles,
    "debug_print": lambda b, x: b.emit(
        "debug_print", tile(b), format='x = {}\n"\\quoted" ü'
    ),
    "debug_check": lambda b, x: b.emit(
        "debug_check", b.constant(True, scalar(BOOL)), message="bad"
    ),
    "delay": lambda b, x: b.emit("delay", b.index(100)),
    "inline_asm": lambda b, x: b.emit(
        "inline_asm",
        tile(b),
        asm='{ .reg .b32 t; mov.b32 $0, "$1"; }\n',
        constraints="=r,r",
        pack=1,
        types=(tile(b).tile, tile(b).tile.with_dtype(I32)),
    ),
    "assume_multiple": lambda b, x: b.assume_multiple(b.index(8), multiple=8),
}
