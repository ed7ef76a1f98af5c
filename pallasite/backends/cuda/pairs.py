"""Elementwise ops on two 16-bit floats at once, where a tile is held as packed pairs.

Sums, differences and products of 16-bit floats are the same whether computed so or in
f32 and rounded: f32 has more than twice their digits. A pair of 8-bit integers is
converted to floats by inserting its bits into those of a larger number, which is then
subtracted; so is a pair of 4-bit integers that are halves of bytes, from the bytes.
Instructions of Hopper and later.
"""

from collections.abc import Mapping, Sequence

from pallasite.backends.cuda.core import Tile
from pallasite.ir.nodes import Op, Value

ARITHMETIC = ("add", "sub", "mul")
FLOATS = ("bf16", "f16")


def _arithmetic(name: str, kind: str) -> str:
    return (
        f"DEVICE u32 pairs_{name}_{kind}(u32 x, u32 y) {{ u32 r; "
        f'asm("{name}.rn.{kind}x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y)); '
        "return r; }\n"
    )


# For each float type: a number whose last bits are units, plus 8.
LARGE = {"bf16": 0x4308, "f16": 0x6408}  # 128 + 8; 1024 + 8


def _of_halves(half: str, kind: str) -> str:
    """8 plus the 4-bit integers within a large number, which is then subtracted."""
    shift = " >> 4" if half == "high" else ""
    large = f"in_register({LARGE[kind] * 0x10001:#x})"
    return (
        f"DEVICE u32 pairs_of_{half}_i4_{kind}(u32 x, u32 y, u32 byte = 0) {{\n"
        f"  const u32 both = bytes_of(x, y, byte), large = {large};\n"
        f"  return pairs_sub_{kind}(both{shift} & 0xf000f ^ large, large);\n}}\n"
    )


FUNCTIONS = {
    # A constant that ptxas takes for a variable, or it would rematerialise it at each
    # use. Launches have one dimension.
    "in_register": "DEVICE u32 in_register(u32 x) { return x | blockIdx.z; }\n",
    **{
        f"pairs_{name}_{kind}": _arithmetic(name, kind)
        for name in ARITHMETIC
        for kind in FLOATS
    },
    # A byte of x, twice, and the same one of y.
    "bytes_of": (
        "DEVICE u32 bytes_of(u32 x, u32 y, u32 byte) {\n"
        "  return __byte_perm(x, y, 0x4400 + byte * 0x1111);\n}\n"
    ),
    # 128 plus the low bits, minus 128 or, for negative numbers, 256.
    "pairs_of_i8_bf16": (
        "DEVICE u32 pairs_of_i8_bf16(u32 x, u32 y, u32 byte = 0) {\n"
        "  const u32 both = bytes_of(x, y, byte);\n"
        "  const u32 large = in_register(0x43004300);\n"
        "  return pairs_sub_bf16(both & 0x7f007f | large, both & 0x800080 | large);\n"
        "}\n"
    ),
    # The same for two adjacent bytes of a word.
    "pair_of_i8_bf16": (
        "DEVICE u32 pair_of_i8_bf16(u32 pair) {\n"
        "  const u32 both = __byte_perm(pair, in_register(0x43), 0x4140);\n"
        "  return pairs_sub_bf16(both & 0xff7fff7f, both & 0xff80ff80);\n}\n"
    ),
    "pair_of_i8_f16": (
        "DEVICE u32 pair_of_i8_f16(u32 pair) {\n"
        "  const u32 both = __byte_perm(pair, in_register(0x64), 0x4140);\n"
        "  return pairs_sub_f16(both ^ 0x800080, 0x64806480);\n}\n"
    ),
    # 1024 + 128 + the number, minus 1152.
    "pairs_of_i8_f16": (
        "DEVICE u32 pairs_of_i8_f16(u32 x, u32 y, u32 byte = 0) {\n"
        "  const u32 both = bytes_of(x, y, byte) & 0xff00ff;\n"
        "  return pairs_sub_f16(both ^ 0x64806480, 0x64806480);\n}\n"
    ),
    **{
        f"pairs_of_{half}_i4_{kind}": _of_halves(half, kind)
        for half in ("low", "high")
        for kind in FLOATS
    },
}


def half_of_bytes(value: Value, made: Mapping[Value, Op]) -> tuple[str, Value] | None:
    """Which half of the bytes of another tile 4-bit integers are, and that tile."""
    bytes_ = _shifted("shift_right_arithmetic", value, made)
    if bytes_ is None or bytes_.tile.dtype.name != "i8":
        return None
    below = _shifted("shift_left", bytes_, made)
    return ("high", bytes_) if below is None else ("low", below)


def _shifted(name: str, value: Value, made: Mapping[Value, Op]) -> Value | None:
    """The tile that is shifted by half a byte to give this one, if any."""
    op = made.get(value)
    if op is None or op.name != name:
        return None
    count = made.get(op.operands[1])
    while count is not None and count.name == "broadcast_in_dim":
        count = made.get(count.operands[0])
    is_half = count is not None and count.attrs.get("value") == 4
    return op.operands[0] if is_half else None


def pairs(op: Op, result: Tile, operands: Sequence[Tile], i: str = "i") -> str | None:
    """Pair `i` of a result; None: there is no such instruction."""
    kind = result.dtype.name
    if kind not in FLOATS or not result.is_packed:
        return None
    alike = all(x.spread == result.spread and not x.is_computed for x in operands)
    if not alike or any(x.lanes for x in operands):
        return None
    if op.name in ARITHMETIC:
        texts = ", ".join(f"{x.name}[{i}]" for x in operands)
        return f"pairs_{op.name}_{kind}({texts})"
    (x, *_) = operands
    if op.name == "cast" and x.dtype.name == "i8" and x.words:
        first = f"{x.words}[{i} / 2 * 2"
        return f"pairs_of_i8_{kind}({first}], {first} + 1], {i} % 2)"
    if op.name == "cast" and x.dtype.name == "i8" and x.pairs:
        return f"pair_of_i8_{kind}({x.pairs}[{i}])"
    if op.name == "cast" and x.dtype.name == "i8":
        return f"pairs_of_i8_{kind}({x.held(f'2 * {i}')}, {x.held(f'2 * {i} + 1')})"
    return None
