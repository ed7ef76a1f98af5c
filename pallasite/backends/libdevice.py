"""How long the functions of libdevice are, and when a kernel should call them.

NVIDIA's compilers inline a function of libdevice once for each element that a thread
holds: `sin` of a tile with 64 elements per thread is 8,000 instructions, which LLVM and
ptxas take a second for. Where a kernel would have too many, the GPU backends emit a
function that is not inlined; few uses are optimised with the code around them.
"""

from pallasite.ir.types import TileType

INLINE_LINES = 25_000  # of one kind in a kernel: about three seconds
FEW = 2  # uses that are always inline: a function saves at most half of them
# Instructions of a function per element, as NVRTC compiles it for f32.
LINES = {
    "sin": 126,
    "cos": 127,
    "tan": 128,
    "asin": 36,
    "acos": 40,
    "atan": 33,
    "atan2": 59,
    "sinh": 39,
    "cosh": 26,
    "tanh": 26,
    "asinh": 62,
    "acosh": 64,
    "atanh": 58,
    "erf": 28,
    "erfc": 73,
    "erf_inv": 46,
    "lgamma": 323,
    "cbrt": 19,
    "exp": 19,
    "expm1": 42,
    "log": 42,
    "log1p": 48,
    "log2": 45,
    "logistic": 27,
    "pow": 130,
}
DOUBLE = 2  # times as many for f64


def is_called(name: str, tile: TileType, held: int, uses: int) -> bool:
    """Whether `uses` of a function on a tile are too many to inline.

    Args:
        name: of the op.
        tile: its operand.
        held: elements of it that a thread holds.
        uses: in the whole kernel.
    """
    times = DOUBLE if tile.dtype.bits == 64 else 1
    return uses > FEW and uses * max(1, held) * LINES[name] * times > INLINE_LINES
