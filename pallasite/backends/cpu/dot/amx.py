"""dot on AMX tiles: bf16 to f32, and 8-bit integers to i32.

A tile has 16 rows of 64 bytes. Rows are packed as [m][k], columns as [k / group][n]
[group], where a group is the 4 bytes along k that one instruction multiplies; 2x2
accumulator tiles stay in tile registers (Intel SDM vol. 2, TDPBF16PS, TDPBSSD). Linux
must have granted tile state, see `target.py`.
"""

from dataclasses import dataclass

from pallasite.backends.cpu.dot.microkernel import product_function
from pallasite.backends.cpu.dot.packing import direction, packing_function
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

SIDE = 16  # rows of a tile, and words in each
TILE_BYTES = 64 * SIDE
PANEL = 2 * SIDE
SUMS, ROWS, COLUMNS = 0, 4, 6  # first tile register of each role

_SIGNS = integer(0x80808080 - (1 << 32), "i32")  # of four bytes
_INSTRUCTIONS = {
    (BF16, BF16): "tdpbf16ps",
    (I8, I8): "tdpbssd",
    (I8, U8): "tdpbsud",
    (U8, I8): "tdpbusd",
    (U8, U8): "tdpbuud",
}


def scheme_for(
    host: Host, lhs: DType, rhs: DType, sums: DType, sizes: Sizes
) -> "TileScheme | None":
    """Tiles, if this CPU has them for these types and the matmul fills some."""
    feature = "amx-bf16" if lhs == BF16 else "amx-int8"
    wanted = F32 if lhs == BF16 else I32
    if (lhs, rhs) not in _INSTRUCTIONS or sums != wanted:
        return None
    if not (host.has("amx-tile") and host.has(feature)):
        return None
    fills = min(sizes.rows, sizes.columns) >= 8 and sizes.depth * lhs.bytes >= 32
    return TileScheme(lhs, rhs, sums) if fills else None


@dataclass(frozen=True)
class TileScheme(Scheme):
    """The scheme of `scheme.py` for tile registers."""

    row_dtype: DType
    column_dtype: DType
    sums: DType
    rows: int = PANEL
    columns: int = PANEL

    @property
    def depth_step(self) -> int:
        return 64 // self.row_dtype.bytes

    def begin(self, f: Function) -> None:
        # Palette 1, then bytes per row (16 bits each) at 16, rows at 48.
        data = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8]
        listed = ", ".join(f"i8 {n}" for n in data)
        config = f.module.constant("tile_config", f"[64 x i8] [{listed}]")
        f.call("llvm.x86.ldtilecfg", "void", config)

    def end(self, f: Function) -> None:
        f.call("llvm.x86.tilerelease", "void")

    def pack(
        self, f: Function, operand: Operand, place: PanelPlace, is_rows: bool
    ) -> None:
        pack_tiles(f, operand, place, is_rows)

    def multiply(self, f: Function, call: PanelProduct) -> None:
        name = f"tiles_{self.row_dtype}_{self.column_dtype}"
        name += f"_{call.valid_rows}x{call.valid_columns}"
        if not f.module.defines(name):
            sizes = call.valid_rows, call.valid_columns
            _emit_product(f.module, name, self, *sizes)
        call.emit(f, name)


# --- the matmul of two panels ---


def _emit_product(
    module: Module, name: str, scheme: TileScheme, rows: int, columns: int
) -> None:
    f = product_function(module, name)
    _, _, sums, depth, stride, overwrite = f.params
    used = [(i, j) for i in range(-(-rows // SIDE)) for j in range(-(-columns // SIDE))]
    if rows % SIDE == columns % SIDE == 0:
        pitch = f.mul(stride, integer(4))
        places = {ij: _sums_tile(f, sums, pitch, ij) for ij in used}
        _start_sums(f, used, places, pitch, overwrite)
        _steps(f, scheme, used, depth)
        for ij, place in places.items():
            f.call("llvm.x86.tilestored64", "void", _tile(ij), place, pitch)
    else:
        buffer = f.value("ptr", f"alloca [{PANEL * PANEL} x i32], align 64")
        pitch = integer(4 * PANEL)
        for ij in used:
            f.call("llvm.x86.tilezero", "void", _tile(ij))
        _steps(f, scheme, used, depth)
        for ij in used:
            place = _sums_tile(f, buffer, pitch, ij)
            f.call("llvm.x86.tilestored64", "void", _tile(ij), place, pitch)
        _add_edge(f, scheme.sums, buffer, sums, stride, overwrite, (rows, columns))
    f.line("ret void")


def _tile(ij: tuple[int, int]) -> Val:
    return integer(SUMS + 2 * ij[0] + ij[1], "i8")


def _sums_tile(f: Function, base: Val, pitch: Val, ij: tuple[int, int]) -> Val:
    down = f.mul(integer(SIDE * ij[0]), pitch)
    return f.element(base, "i8", f.add(down, integer(64 * ij[1])))


def _start_sums(
    f: Function,
    used: list[tuple[int, int]],
    places: dict[tuple[int, int], Val],
    pitch: Val,
    overwrite: Val,
) -> None:
    zero, load, done = f.labels("zero", "load", "ready")
    f.branch_if(overwrite, zero, load)
    f.label(zero)
    for ij in used:
        f.call("llvm.x86.tilezero", "void", _tile(ij))
    f.branch(done)
    f.label(load)
    for ij in used:
        f.call("llvm.x86.tileloadd64", "void", _tile(ij), places[ij], pitch)
    f.branch(done)
    f.label(done)


def _steps(
    f: Function, scheme: TileScheme, used: list[tuple[int, int]], depth: Val
) -> None:
    rows, columns = f.params[:2]
    instruction = _INSTRUCTIONS[scheme.row_dtype, scheme.column_dtype]
    up = f.add(depth, integer(scheme.depth_step - 1))
    pitch = integer(64)
    with f.loop(f.binary("udiv", up, integer(scheme.depth_step))) as loop:
        start = f.mul(loop.index, integer(2 * TILE_BYTES))
        _prefetch_next_sums(f, loop.index)
        # Columns are loaded with a non-temporal hint, so that they do not evict rows
        # from the L1 cache: a sixth faster.
        for load, first, base, numbers in (
            ("tileloadd64", ROWS, rows, sorted({i for i, _ in used})),
            ("tileloaddt164", COLUMNS, columns, sorted({j for _, j in used})),
        ):
            for n in numbers:
                place = f.element(base, "i8", f.add(start, integer(n * TILE_BYTES)))
                register = integer(first + n, "i8")
                f.call(f"llvm.x86.{load}", "void", register, place, pitch)
        for i, j in used:
            operands = integer(ROWS + i, "i8"), integer(COLUMNS + j, "i8")
            f.call(f"llvm.x86.{instruction}", "void", _tile((i, j)), *operands)


def _prefetch_next_sums(f: Function, step: Val) -> None:
    """Prefetch two rows of the accumulators on the right, which come next.

    They are too far apart for hardware prefetching.
    """
    sums, stride = f.params[2], f.params[4]
    for n in range(2):
        row = f.least(f.add(f.mul(step, integer(2)), integer(n)), integer(PANEL - 1))
        right = f.add(f.mul(row, stride), integer(PANEL))
        for line in range(2):
            f.prefetch_to_write(
                vec.offset(f, sums, "i32", f.add(right, integer(line * SIDE)))
            )


def _add_edge(
    f: Function,
    dtype: DType,
    buffer: Val,
    sums: Val,
    stride: Val,
    overwrite: Val,
    sizes: tuple[int, int],
) -> None:
    """Add the valid part of a block of sums to the result."""
    rows, columns = sizes
    type = vec.vector(scalars.memory(dtype), columns)
    plus = "fadd" if dtype.is_float else "add"
    with f.loop(integer(rows)) as loop:
        source = vec.offset(f, buffer, "i32", f.mul(loop.index, integer(PANEL)))
        target = vec.offset(f, sums, "i32", f.mul(loop.index, stride))
        value = vec.load(f, type, source, 4)
        with f.when(overwrite):
            vec.store(f, value, target, 4)
        with f.when(f.negate(overwrite)):
            total = f.binary(plus, vec.load(f, type, target, 4), value)
            vec.store(f, total, target, 4)


# --- packing ---


def pack_tiles(
    f: Function,
    operand: Operand,
    place: PanelPlace,
    is_rows: bool,
    is_flipped: bool = False,
) -> None:
    """Pack panels of tiles; `is_flipped`: of bytes plus 128."""
    dtype = operand.dtype
    along = direction(dtype, dtype, operand.width, operand.depth)
    packing = TilePacking(dtype, is_rows, place.valid, along, is_flipped)
    if not f.module.defines(packing.name):
        _emit_packing(f.module, packing)
    strides = operand.width, operand.depth
    rest = place.target, place.panels, place.depth, place.panel_depth
    f.call_defined(packing.name, place.source, *strides, *rest)


@dataclass(frozen=True)
class TilePacking:
    """Panels of two tiles per step of k, with `valid` existing rows or columns."""

    dtype: DType
    is_rows: bool
    valid: int
    along: str
    is_flipped: bool = False

    @property
    def name(self) -> str:
        side = "rows" if self.is_rows else "columns"
        flipped = "_flipped" if self.is_flipped else ""
        return f"pack_tiles_{self.dtype}_{side}_{self.valid}_{self.along}{flipped}"

    @property
    def group(self) -> int:
        return 4 // self.dtype.bytes

    @property
    def step(self) -> int:
        return SIDE * self.group

    @property
    def element(self) -> str:
        return scalars.memory(self.dtype)


def _emit_packing(module: Module, packing: TilePacking) -> None:
    f = packing_function(module, packing.name)
    source, across, _, target, panels, depth, panel_depth = f.params
    step, up = integer(packing.step), integer(packing.step - 1)
    steps, steps_apart = (
        f.binary("udiv", f.add(number, up), step) for number in (depth, panel_depth)
    )
    whole = f.binary("udiv", depth, step) if packing.along != "none" else integer(0)
    apart = f.mul(steps_apart, integer(2 * TILE_BYTES))

    def places(panel: Val) -> tuple[Val, Val]:
        first = f.mul(panel, integer(PANEL))
        here = vec.offset(f, source, packing.element, f.mul(first, across))
        return here, f.element(target, "i8", f.mul(panel, apart))

    # Read in memory order.
    if packing.along == "width":
        with f.nest([whole, panels]) as (k, panel):
            _pack_tiles(f, packing, *places(panel), k)
    elif packing.along == "depth":
        with f.nest([panels, whole]) as (panel, k):
            _pack_tiles(f, packing, *places(panel), k)
    with f.nest([panels, f.sub(steps, whole)]) as (panel, k):
        _pack_elements(f, packing, *places(panel), f.add(whole, k))
    f.line("ret void")


def _pack_tiles(
    f: Function, packing: TilePacking, source: Val, target: Val, step: Val
) -> None:
    """Both tiles of one full step of k."""
    _, across, down, *_ = f.params
    k = f.mul(step, integer(packing.step))
    for tile in range(-(-packing.valid // SIDE)):
        count = min(SIDE, packing.valid - tile * SIDE)
        here = vec.offset(
            f, source, packing.element, f.mul(integer(tile * SIDE), across)
        )
        here = vec.offset(f, here, packing.element, f.mul(k, down))
        if packing.along == "depth":
            words = _words_along_depth(f, packing, here, across, count)
        else:
            words = _words_along_width(f, packing, here, down, count)
        if packing.is_rows == (packing.along == "width"):
            words = vec.transpose(f, words)
        start = f.add(f.mul(step, integer(2 * TILE_BYTES)), integer(tile * TILE_BYTES))
        there = f.element(target, "i8", start)
        for n, word in enumerate(words):
            if packing.is_flipped:
                word = f.binary("xor", word, vec.splat(f, _SIGNS, SIDE))
            vec.store(f, word, f.element(there, "i8", integer(64 * n)), 64)


def _words_along_depth(
    f: Function, packing: TilePacking, source: Val, across: Val, count: int
) -> list[Val]:
    """Vector n: row n, all k. Missing rows repeat the last one."""
    words = []
    for n in range(SIDE):
        row = f.mul(integer(min(n, count - 1)), across)
        place = vec.offset(f, source, packing.element, row)
        words.append(vec.load(f, vec.vector("i32", SIDE), place, packing.dtype.bytes))
    return words


def _words_along_width(
    f: Function, packing: TilePacking, source: Val, down: Val, count: int
) -> list[Val]:
    """Vector n: all rows, the n-th group of k."""
    type, size = vec.vector(packing.element, count), packing.dtype.bytes
    words = []
    for n in range(SIDE):
        parts = []
        for g in range(packing.group):
            k = f.mul(integer(n * packing.group + g), down)
            place = vec.offset(f, source, packing.element, k)
            part = vec.load(f, type, place, size)
            parts.append(vec.resized(f, part, SIDE) if count < SIDE else part)
        words.append(_interleave(f, parts))
    return words


def _interleave(f: Function, parts: list[Val]) -> Val:
    """Vectors of narrow elements as one of words, element by element."""
    while len(parts) > 1:
        picks = [n for low in range(SIDE) for n in (low, low + SIDE)]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        joined = [f.shuffle(a, b, picks) for a, b in pairs]
        bits = 32 // (len(parts) // 2)
        wider = vec.vector(f"i{bits}", SIDE)
        parts = [f.pure(wider, f"bitcast {j} to {wider}") for j in joined]
    return parts[0]


def _pack_elements(
    f: Function, packing: TilePacking, source: Val, target: Val, step: Val
) -> None:
    """Both tiles of one step, element by element, zero past the end of k."""
    _, across, down, _, _, depth, _ = f.params
    group, element = packing.group, packing.element
    base = f.element(target, "i8", f.mul(step, integer(2 * TILE_BYTES)))
    zero = Val(element, "0")
    last = f.sub(depth, integer(1))
    with f.nest([packing.valid, packing.step]) as (w, kk):
        k = f.add(f.mul(step, integer(packing.step)), kk)
        where = f.add(f.mul(w, across), f.mul(f.least(k, last), down))
        raw = f.load(element, vec.offset(f, source, element, where))
        raw = f.select(f.compare("icmp slt", k, depth), raw, zero)
        if packing.is_flipped:
            raw = f.binary("xor", raw, integer(-128, element))
        tile, i = (f.binary(op, w, integer(SIDE)) for op in ("udiv", "urem"))
        if packing.is_rows:
            inside = f.add(f.mul(i, integer(packing.step)), kk)
        else:
            row, g = (f.binary(op, kk, integer(group)) for op in ("udiv", "urem"))
            inside = f.add(f.mul(row, integer(packing.step)), f.mul(i, integer(group)))
            inside = f.add(inside, g)
        size = TILE_BYTES // packing.dtype.bytes
        there = f.add(f.mul(tile, integer(size)), inside)
        f.store(raw, vec.offset(f, base, element, there))
