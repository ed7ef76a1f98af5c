"""dot by instructions that multiply groups of narrow elements: AVX512-BF16 and VNNI.

One instruction accumulates, in each of 16 words, the products of two bf16 or of four
bytes. Panels are those of `amx.py`, which have the same groups; accumulators of a few
rows times two vectors stay in registers. VNNI multiplies unsigned by signed bytes: for
two signed operands, the rows are packed plus 128, and 128 times the columns' sums is
subtracted again (Intel SDM vol. 2, VDPBF16PS, VPDPBUSD).
"""

from dataclasses import dataclass

from pallasite.backends.cpu.dot.amx import PANEL, SIDE, TILE_BYTES, pack_tiles
from pallasite.backends.cpu.dot.microkernel import (
    product_function,
    rows_of_sums,
    store_sums,
)
from pallasite.backends.cpu.dot.scheme import (
    Operand,
    PanelPlace,
    PanelProduct,
    Scheme,
    Sizes,
)
from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm import vector_ops as vec
from pallasite.backends.cpu.llvm.writer import Function, Module, Val, integer
from pallasite.ir.types import BF16, F32, I8, I32, U8, DType
from pallasite.target import Host

ROWS = 13  # of accumulators in registers, each of two vectors
UNROLL = 4  # groups of k per iteration
_FEATURES = {BF16: "avx512bf16", I8: "avx512vnni", U8: "avx512vnni"}
_PAIRS = ((BF16, BF16), (U8, I8), (I8, U8), (I8, I8))
_WORDS = vec.vector("i32", SIDE)


def scheme_for(
    host: Host, lhs: DType, rhs: DType, sums: DType, sizes: Sizes
) -> "GroupScheme | None":
    """Groups, if this CPU has them for these types and the matmul is wide."""
    if (lhs, rhs) not in _PAIRS or not host.has(_FEATURES[lhs]):
        return None
    wide = sizes.columns > SIDE // 2 and sizes.depth * lhs.bytes >= 32
    wanted = F32 if lhs == BF16 else I32
    return GroupScheme(lhs, rhs, sums) if wide and sums == wanted else None


@dataclass(frozen=True)
class GroupScheme(Scheme):
    """The scheme of `scheme.py` for groups."""

    row_dtype: DType
    column_dtype: DType
    sums: DType
    rows: int = PANEL
    columns: int = PANEL
    rows_stay: bool = False
    pack_once_below: int = 256

    @property
    def depth_step(self) -> int:
        return 64 // self.row_dtype.bytes

    @property
    def is_flipped(self) -> bool:
        """Whether rows are packed plus 128."""
        return self.row_dtype == self.column_dtype == I8

    def form(self, is_rows: bool) -> str:
        return super().form(is_rows) + "_flipped" * (is_rows and self.is_flipped)

    def pack(
        self, f: Function, operand: Operand, place: PanelPlace, is_rows: bool
    ) -> None:
        pack_tiles(f, operand, place, is_rows, is_rows and self.is_flipped)

    def multiply(self, f: Function, call: PanelProduct) -> None:
        """Row blocks of even height, one function each."""
        blocks = -(-call.valid_rows // ROWS)
        height = -(-call.valid_rows // blocks)
        for first in range(0, call.valid_rows, height):
            count = min(height, call.valid_rows - first)
            block = _RowBlock(self, first, count, call.valid_columns)
            if not f.module.defines(block.name):
                _emit_block(f.module, block)
            sums = vec.offset(f, call.sums, "i32", f.mul(integer(first), call.stride))
            call._replace(sums=sums).emit(f, block.name)


@dataclass(frozen=True)
class _RowBlock:
    """Rows `first` up to `first + count` of a panel times its valid columns."""

    scheme: GroupScheme
    first: int
    count: int
    columns: int

    @property
    def name(self) -> str:
        types = f"{self.scheme.row_dtype}_{self.scheme.column_dtype}"
        return f"groups_{types}_{self.first}_{self.count}x{self.columns}"

    @property
    def vectors(self) -> int:
        return -(-self.columns // SIDE)

    def row_bytes(self, n: int) -> int:
        """The offset of the first group of a row in its panel."""
        tile, row = divmod(self.first + n, SIDE)
        return tile * TILE_BYTES + row * 64


def _emit_block(module: Module, block: _RowBlock) -> None:
    f = product_function(module, block.name)
    rows, columns, sums, depth, stride, overwrite = f.params
    scheme, element = block.scheme, scalars.memory(block.scheme.sums)
    step = integer(scheme.depth_step)
    steps = f.binary("udiv", f.add(depth, f.sub(step, integer(1))), step)
    zero = Val(vec.vector(element, SIDE), "zeroinitializer")
    extra = block.vectors if scheme.is_flipped else 0
    start = [zero] * (block.count * block.vectors + extra)
    with f.loop(steps, start) as loop:
        base = f.mul(loop.index, integer(2 * TILE_BYTES))
        places = f.element(rows, "i8", base), f.element(columns, "i8", base)
        with f.loop(integer(SIDE // UNROLL), loop.carries) as inner:
            group = f.mul(inner.index, integer(UNROLL))
            totals = inner.carries
            for n in range(UNROLL):
                here = f.add(group, integer(n))
                totals = _add_group(f, block, places, here, totals)
            inner.carries = totals
        loop.carries = inner.carries
    totals, taken = loop.carries[: len(start) - extra], loop.carries[-extra:]
    if extra:
        totals = [
            f.binary("sub", total, taken[n % extra]) for n, total in enumerate(totals)
        ]
    targets = rows_of_sums(f, element, sums, stride, block.count)
    store_sums(f, scheme.sums, SIDE, block.columns, targets, totals, overwrite)
    f.line("ret void")


def _add_group(
    f: Function, block: _RowBlock, places: tuple[Val, Val], group: Val, sums: list[Val]
) -> list[Val]:
    """The products of one group of k."""
    scheme, (rows, columns) = block.scheme, places
    types = scheme.row_dtype, scheme.column_dtype
    across, along = f.mul(group, integer(64)), f.mul(group, integer(4))
    right = []
    for j in range(block.vectors):
        where = f.add(across, integer(j * TILE_BYTES))
        right.append(vec.load(f, _WORDS, f.element(columns, "i8", where), 64))
    totals = list(sums)
    for i in range(block.count):
        where = f.add(along, integer(block.row_bytes(i)))
        word = vec.load(f, "i32", f.element(rows, "i8", where), 4)
        left = vec.splat(f, word, SIDE)
        for j in range(block.vectors):
            n = i * block.vectors + j
            totals[n] = multiply_groups(f, *types, totals[n], left, right[j])
    if scheme.is_flipped:
        offset = Val(_WORDS, f"splat (i32 {0x80808080 - (1 << 32)})")
        first = block.count * block.vectors
        for j in range(block.vectors):
            old = totals[first + j]
            totals[first + j] = multiply_groups(f, *types, old, offset, right[j])
    return totals


def multiply_groups(
    f: Function, lhs: DType, rhs: DType, total: Val, left: Val, right: Val
) -> Val:
    """Vectors of sums plus the products of groups, one in each word."""
    if lhs == BF16:
        name, narrow = "llvm.x86.avx512bf16.dpbf16ps.512", vec.vector("bfloat", 32)
    else:
        name, narrow = "llvm.x86.avx512.vpdpbusd.512", vec.vector("i8", 64)
        if rhs == U8:  # the unsigned operand comes first
            left, right = right, left
    a, b = (f.pure(narrow, f"bitcast {v} to {narrow}") for v in (left, right))
    return f.call(name, total.type, total, a, b, pure=True)
