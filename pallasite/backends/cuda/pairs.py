"""Elementwise ops on two 16-bit floats at once, where a tile is held as words of two.

Sums, differences and products of 16-bit floats are the same whether computed so or in
f32 and rounded: f32 has more than twice their digits. A pair of 8-bit integers becomes
a pair of floats by putting its bits into those of a larger number, which is taken off.
Instructions of Hopper and later.
"""

from collections.abc import Sequence

from pallasite.backends.cuda.core import Tile
from pallasite.ir.nodes import Op

ARITHMETIC = ("add", "sub", "mul")
FLOATS = ("bf16", "f16")


def _arithmetic(name: str, kind: str) -> str:
    return (
        f"DEVICE u32 pairs_{name}_{kind}(u32 x, u32 y) {{ u32 r; "
        f'asm("{name}.rn.{kind}x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y)); '
        "return r; }\n"
    )


FUNCTIONS = {
    # A constant that ptxas takes for a variable, or it would make it anew for each use.
    # Launches have one dimension.
    "in_register": "DEVICE u32 in_register(u32 x) { return x | blockIdx.z; }\n",
    **{
        f"pairs_{name}_{kind}": _arithmetic(name, kind)
        for name in ARITHMETIC
        for kind in FLOATS
    },
    # 128 plus the low bits, minus 128 or, of negative numbers, 256.
    "pairs_of_i8_bf16": (
        "DEVICE u32 pairs_of_i8_bf16(u8 x, u8 y) {\n"
        "  const u32 both = __byte_perm(x | y << 8, in_register(0x43), 0x4140);\n"
        "  return pairs_sub_bf16(both & 0xff7fff7f, both & 0xff80ff80);\n}\n"
    ),
    # 1024 + 128 + the number, minus 1152.
    "pairs_of_i8_f16": (
        "DEVICE u32 pairs_of_i8_f16(u8 x, u8 y) {\n"
        "  const u32 both = __byte_perm(x | y << 8, 0, 0x4140);\n"
        "  return pairs_sub_f16(both ^ 0x64806480, 0x64806480);\n}\n"
    ),
}


def pairs(op: Op, result: Tile, operands: Sequence[Tile], i: str = "i") -> str | None:
    """The pair number `i` of a result; None: there is no such instruction."""
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
    if op.name == "cast" and x.dtype.name == "i8":
        return f"pairs_of_i8_{kind}({x.held(f'2 * {i}')}, {x.held(f'2 * {i} + 1')})"
    return None
