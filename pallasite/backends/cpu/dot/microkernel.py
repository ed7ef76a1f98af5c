"""The innermost step of dot: a few rows times a few vectors, all in registers.

A microkernel multiplies a few rows, packed as [k][rows] or in place as [rows][k], by
columns, packed or in place as [k][columns], and stores or accumulates the block of
sums. Each shape is one function that is never inlined, so that its registers are
allocated separately; `cache_blocks.py` loops over it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm import vector_ops as vec
from pallasite.backends.cpu.llvm.writer import Function, Module, Val, integer
from pallasite.ir.types import DType
from pallasite.target import Host

UNROLL = 4  # steps of k per iteration
LEAST_ROWS = 6  # of a full block: with fewer, columns are read too often
MOST_ROWS = 16


@dataclass(frozen=True)
class Micro:
    """One shape. The last panel of a row may be wider than the block."""

    dtype: DType
    lanes: int
    rows: int
    columns: int
    row_step: int  # elements from one row to the next, for the same k
    depth_step: int  # and from one k to the next
    column_step: int  # elements of the columns from one k to the next
    in_place: bool  # columns are not packed: nothing may be read past the last
    fused: bool  # whether the CPU has fused multiply-add
    scaled: bool = False  # whether sums are first multiplied by a factor per row

    @property
    def vectors(self) -> int:
        return -(-self.columns // self.lanes)

    @property
    def name(self) -> str:
        part_of = "of" if self.in_place else "in"
        sizes = f"{self.rows}x{self.columns}{part_of}{self.column_step}"
        steps = f"{self.row_step}_{self.depth_step}"
        scaled = "_scaled" if self.scaled else ""
        return f"dot_{self.dtype}_{self.lanes}_{sizes}_{steps}{scaled}"


def has_fused(host: Host) -> bool:
    return any(host.has(name) for name in ("fma", "avx512f", "neon"))


def block_shape(
    host: Host, dtype: DType, rows: int, columns: int
) -> tuple[int, int, int]:
    """Rows and columns of a register block, and lanes, for sums of that size.

    Accumulators, one vector per column group and one broadcast element fill the
    registers. Wide blocks take fewer instructions per product than tall ones of the
    same size, since an element is broadcast once for all vectors. Both sides are
    divided evenly, so that the last block is not a thin one.
    """
    lanes = host.lanes(dtype.bits)
    across = -(-columns // lanes)
    widest = (host.registers - 1) // (min(rows, LEAST_ROWS) + 1)
    vectors = -(-across // -(-across // widest))
    most = min((host.registers - vectors - 1) // vectors, MOST_ROWS)
    blocks = -(-rows // most)
    # One more block, if all are then alike: one function to compile instead of two, and
    # as fast as long as half of the registers hold accumulators (the latency of an
    # addition).
    alike = rows % blocks and rows % (blocks + 1) == 0
    if alike and rows // (blocks + 1) * vectors >= host.registers // 2:
        blocks += 1
    return -(-rows // blocks), vectors * lanes, lanes


def high_shape(
    host: Host, dtype: DType, rows: int, columns: int
) -> tuple[int, int, int] | None:
    """The same with all rows in one block, as wide as fits; None if nothing fits."""
    lanes = host.lanes(dtype.bits)
    vectors = min((host.registers - 1) // (rows + 1), -(-columns // lanes))
    if rows > MOST_ROWS or not vectors:
        return None
    return rows, vectors * lanes, lanes


def microkernel(module: Module, micro: Micro) -> str:
    """The name of the function, which is added to the module the first time."""
    if not module.defines(micro.name):
        _emit(module, micro)
    return micro.name


def product_function(module: Module, name: str, *more: tuple[str, str]) -> Function:
    """A function with the parameters that all schemes' microkernels share, and more."""
    params = [
        ("ptr noalias", "rows"),
        ("ptr noalias", "columns"),
        ("ptr noalias", "sums"),
        ("i64", "depth"),
        ("i64", "stride"),
        ("i1", "overwrite"),
        *more,
    ]
    attributes = "noinline nounwind"
    return Function(module, name, params, linkage="internal", attributes=attributes)


def rows_of_sums(
    f: Function, element: str, sums: Val, stride: Val, count: int
) -> list[Val]:
    """The address of each row of a block."""
    return [
        vec.offset(f, sums, element, f.mul(integer(i), stride)) for i in range(count)
    ]


def _emit(module: Module, micro: Micro) -> None:
    more = [("ptr noalias", "factors")] if micro.scaled else []
    f = product_function(module, micro.name, *more)
    rows, columns, sums, depth, stride, overwrite, *factors = f.params
    element = scalars.memory(micro.dtype)
    places = rows_of_sums(f, element, sums, stride, micro.rows)
    zero = Val(vec.vector(element, micro.lanes), "zeroinitializer")
    start = [rows, columns, *[zero] * (micro.rows * micro.vectors)]
    rounds = f.binary("udiv", depth, integer(UNROLL))
    with f.loop(rounds, start) as loop:
        loop.carries = _steps(f, micro, loop.carries, UNROLL)
    rest = f.binary("urem", depth, integer(UNROLL))
    with f.loop(rest, loop.carries) as loop:
        loop.carries = _steps(f, micro, loop.carries, 1)
    totals = loop.carries[2:]
    scales = [
        vec.load(f, element, vec.offset(f, factors[0], element, i), micro.dtype.bytes)
        for i in range(micro.rows if micro.scaled else 0)
    ]
    store_sums(
        f, micro.dtype, micro.lanes, micro.columns, places, totals, overwrite, scales
    )
    f.line("ret void")


def _steps(f: Function, micro: Micro, carries: list[Val], count: int) -> list[Val]:
    rows, columns, *totals = carries
    element, lanes = scalars.memory(micro.dtype), micro.lanes
    size = micro.dtype.bytes
    for k in range(count):
        here = vec.offset(f, columns, element, k * micro.column_step)
        right = [
            _vector_of_columns(f, micro, here, first)
            for first in range(0, micro.columns, lanes)
        ]
        for i in range(micro.rows):
            step = k * micro.depth_step + i * micro.row_step
            place = vec.offset(f, rows, element, step)
            left = vec.splat(f, vec.load(f, element, place, size), lanes)
            for j in range(micro.vectors):
                n = i * micro.vectors + j
                totals[n] = multiply_add(f, micro.fused, left, right[j], totals[n])
    rows = vec.offset(f, rows, element, count * micro.depth_step)
    columns = vec.offset(f, columns, element, count * micro.column_step)
    return [rows, columns, *totals]


def _vector_of_columns(f: Function, micro: Micro, row: Val, first: int) -> Val:
    element, lanes = scalars.memory(micro.dtype), micro.lanes
    count = min(lanes, micro.columns - first) if micro.in_place else lanes
    place = vec.offset(f, row, element, first)
    some = vec.load(f, vec.vector(element, count), place, micro.dtype.bytes)
    return some if count == lanes else vec.resized(f, some, lanes)


def multiply_add(f: Function, fused: bool, a: Val, b: Val, total: Val) -> Val:
    element = a.type.split(" x ")[1].rstrip(">")
    if element not in ("float", "double"):
        return f.binary("add", f.binary("mul", a, b), total)
    if not fused:
        return f.binary("fadd", f.binary("fmul", a, b), total)
    lanes = int(a.type[1:].split()[0])
    name = f"llvm.fma.v{lanes}{'f32' if element == 'float' else 'f64'}"
    return f.call(name, a.type, a, b, total, pure=True)


def store_sums(
    f: Function,
    dtype: DType,
    lanes: int,
    columns: int,
    places: list[Val],
    totals: list[Val],
    overwrite: Val,
    scales: Sequence[Val] = (),
) -> None:
    """Store the sums if `overwrite`, else add them to the old contents.

    `places` has one address per row, `totals` the vectors of one row after the other;
    `scales`, if any, has one factor per row for the old contents.
    """
    first, more, done = f.labels("first", "more", "done")
    f.branch_if(overwrite, first, more)
    each = len(totals) // len(places)
    for label, adds in ((first, False), (more, True)):
        f.label(label)
        for i, place in enumerate(places):
            row = totals[i * each : (i + 1) * each]
            scale = scales[i] if scales else None
            _store_row(f, dtype, lanes, columns, place, row, adds, scale)
        f.branch(done)
    f.label(done)


def _store_row(
    f: Function,
    dtype: DType,
    lanes: int,
    columns: int,
    place: Val,
    row: list[Val],
    adds: bool,
    scale: Val | None,
) -> None:
    element, size = scalars.memory(dtype), dtype.bytes
    plus = "fadd" if dtype.is_float else "add"
    for j, total in enumerate(row):
        here = vec.offset(f, place, element, j * lanes)
        count = min(lanes, columns - j * lanes)
        if count < lanes:
            total = vec.resized(f, total, count)
        if adds:
            old = vec.load(f, total.type, here, size)
            if scale is not None:
                times = "fmul" if dtype.is_float else "mul"
                old = f.binary(times, old, vec.splat(f, scale, count))
            total = f.binary(plus, old, total)
        vec.store(f, total, here, size)
