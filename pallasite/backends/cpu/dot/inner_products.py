"""dot of few rows with columns that are contiguous along k.

Each sum is an inner product of two contiguous runs of memory: vectors run along k, a
few accumulators stay in registers, and their lanes are reduced at the end. Nothing is
packed: columns that are read only a few times are not worth it.
"""

from dataclasses import dataclass

from pallasite.backends.cpu.dot.grouped import multiply_groups
from pallasite.backends.cpu.dot.microkernel import (
    has_fused,
    multiply_add,
    product_function,
    rows_of_sums,
    store_sums,
)
from pallasite.backends.cpu.dot.scheme import (
    MemoryLayout,
    Operand,
    PanelPlace,
    PanelProduct,
    Scheme,
    Sizes,
)
from pallasite.backends.cpu.llvm import scalars, vector_loops
from pallasite.backends.cpu.llvm import vector_ops as vec
from pallasite.backends.cpu.llvm.values import Lanes
from pallasite.backends.cpu.llvm.writer import Function, Module, Val, integer
from pallasite.ir.types import BF16, F32, DType
from pallasite.target import Host

FEW_ROWS, MOST_ROWS = 4, 16  # with more, packing columns pays off
PANEL_ROWS = 6
DEEP = 16  # vectors of k from which the cost of reducing lanes is negligible


def scheme_for(
    host: Host,
    lhs: DType,
    rhs: DType,
    sums: DType,
    sizes: Sizes,
    rows: MemoryLayout,
    columns: MemoryLayout,
) -> "InnerScheme | None":
    """Inner products, where both operands are contiguous along k and rows are few."""
    if not rows.rows_apart or not columns.rows_apart or lhs != rhs:
        return None
    lanes = host.lanes(sums.bits)
    if lhs == sums and sums.is_float:
        is_deep = sizes.depth >= DEEP * lanes
    elif (lhs, sums) == (BF16, F32) and host.has("avx512bf16"):
        is_deep = False  # tiles and groups are soon faster
    else:
        return None
    if sizes.rows > (MOST_ROWS if is_deep else FEW_ROWS):
        return None
    height = -(-sizes.rows // -(-sizes.rows // PANEL_ROWS))
    across = lanes
    while height * (across + 1) + 1 > host.registers:
        across //= 2
    pitches = rows.rows_apart, columns.rows_apart
    return InnerScheme(host, lhs, rhs, sums, height, across, *pitches)


@dataclass(frozen=True)
class InnerScheme(Scheme):
    """The scheme of `scheme.py` for inner products."""

    host: Host
    row_dtype: DType
    column_dtype: DType
    sums: DType
    rows: int
    columns: int
    row_pitch: int  # elements from row to row
    column_pitch: int  # and from column to column
    rows_stay: bool = False

    @property
    def lanes(self) -> int:
        """Lanes of an accumulator vector."""
        return self.host.lanes(self.sums.bits)

    @property
    def step(self) -> int:
        """Elements of a vector along k."""
        return self.lanes * self.sums.bits // self.row_dtype.bits

    def apart(self, is_rows: bool) -> int:
        return self.row_pitch if is_rows else self.column_pitch

    def pack(
        self, f: Function, operand: Operand, place: PanelPlace, is_rows: bool
    ) -> None:
        raise AssertionError("nothing is packed")

    def multiply(self, f: Function, call: PanelProduct) -> None:
        block = _Block(self, call.valid_rows, call.valid_columns)
        if not f.module.defines(block.name):
            _emit(f.module, block)
        call.emit(f, block.name)


@dataclass(frozen=True)
class _Block:
    scheme: InnerScheme
    rows: int
    columns: int

    @property
    def name(self) -> str:
        scheme = self.scheme
        pitches = f"{scheme.row_pitch}_{scheme.column_pitch}"
        return f"inner_{scheme.row_dtype}_{self.rows}x{self.columns}_{pitches}"


def _emit(module: Module, block: _Block) -> None:
    f = product_function(module, block.name)
    _, _, sums, depth, stride, overwrite = f.params
    scheme, step = block.scheme, integer(block.scheme.step)
    element = scalars.memory(scheme.sums)
    zero = Val(vec.vector(element, scheme.lanes), "zeroinitializer")
    whole, rest = (f.binary(name, depth, step) for name in ("udiv", "urem"))
    with f.loop(whole, [zero] * (block.rows * block.columns)) as loop:
        loop.carries = _step(f, block, f.mul(loop.index, step), loop.carries)
    with f.loop(f.least(rest, integer(1)), loop.carries) as loop:
        # Missing elements are read as zero.
        numbers = f.written(Lanes(integer(0), scheme.step))
        f.mask = f.compare("icmp ult", numbers, rest)
        loop.carries = _step(f, block, f.mul(whole, step), loop.carries)
        f.mask = None
    totals = _added_up(f, block, loop.carries, zero)
    places = rows_of_sums(f, element, sums, stride, block.rows)
    width = scheme.columns, block.columns
    store_sums(f, scheme.sums, *width, places, totals, overwrite)
    f.line("ret void")


def _step(f: Function, block: _Block, k: Val, totals: list[Val]) -> list[Val]:
    """One vector of k."""
    scheme = block.scheme
    element = scalars.memory(scheme.row_dtype)

    def along_depth(base: Val, start: int) -> Val:
        place = Lanes(f.add(integer(start), k), scheme.step)
        return f.load(element, f.element(base, element, place))

    rows, columns = f.params[:2]
    left = [along_depth(rows, n * scheme.row_pitch) for n in range(block.rows)]
    right = [
        along_depth(columns, n * scheme.column_pitch) for n in range(block.columns)
    ]
    pairs = [(a, b) for a in left for b in right]
    return [
        _multiply_add(f, scheme, a, b, total)
        for (a, b), total in zip(pairs, totals, strict=True)
    ]


def _multiply_add(f: Function, scheme: InnerScheme, a: Val, b: Val, total: Val) -> Val:
    if scheme.row_dtype == scheme.sums:
        return multiply_add(f, has_fused(scheme.host), a, b, total)
    types = scheme.row_dtype, scheme.column_dtype
    return multiply_groups(f, *types, total, a, b)


def _added_up(f: Function, block: _Block, totals: list[Val], zero: Val) -> list[Val]:
    """The reduction of each accumulator's lanes: for each row, a vector of its sums."""
    scheme = block.scheme
    plus = lambda a, b: f.binary("fadd", a, b)
    rows = []
    for i in range(block.rows):
        row = totals[i * block.columns : (i + 1) * block.columns]
        rows += row + [zero] * (scheme.columns - block.columns)
    rows += [zero] * (-len(rows) % scheme.lanes)
    sums = [
        vector_loops.reduce_each(f, rows[n : n + scheme.lanes], plus)
        for n in range(0, len(rows), scheme.lanes)
    ]
    return [_part(f, scheme, sums, i * scheme.columns) for i in range(block.rows)]


def _part(f: Function, scheme: InnerScheme, sums: list[Val], first: int) -> Val:
    group, start = divmod(first, scheme.lanes)
    picks = [start + n for n in range(scheme.columns)]
    return f.shuffle(sums[group], sums[group], picks)
