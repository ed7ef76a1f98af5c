"""The small functions that emitted kernels call; those used precede a kernel.

`used(text)` gives typedefs and the functions whose names occur in a kernel's text,
including those that they call. There is no #include: NVRTC has everything built in.
"""

import re
from collections.abc import Mapping

from pallasite.backends.cuda import ampere, blackwell, hopper, pairs

HEAD = """\
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef u16 bf16;  // floats of 8 and 16 bits are held as their bits
typedef u16 f16;
typedef u8 f8e4m3fn;
typedef u8 f8e5m2;
#define DEVICE __device__ __forceinline__
#define EACH(n) _Pragma("unroll") for (int i = 0; i < (n); ++i)
"""


def _convert(name: str, params: str, result: str, asm: str, out: str, ins: str) -> str:
    return (
        f"DEVICE {result} {name}({params}) {{ {result} r; "
        f'asm("{asm}" : "={out}"(r) : {ins}); return r; }}\n'
    )


def _from_f8(name: str, kind: str) -> str:
    return (
        f"DEVICE float {name}(u8 x) {{ u32 r; "
        f'asm("cvt.rn.f16x2.{kind}x2 %0, %1;" : "=r"(r) : "h"((u16)x)); '
        "return from_f16((u16)r); }\n"
    )


def _not_inlined(name: str, operands: int) -> dict[str, str]:
    """`called_sinf` and `called_sin`, for kernels that use `sin` often."""
    made = {}
    for kind, symbol in (("float", f"{name}f"), ("double", name)):
        params = ", ".join(f"{kind} x{n}" for n in range(operands))
        args = ", ".join(f"x{n}" for n in range(operands))
        made[f"called_{symbol}"] = (
            f"__device__ __noinline__ {kind} called_{symbol}({params}) "
            f"{{ return {symbol}({args}); }}\n"
        )
    return made


_LONG = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh")
_LONG += ("acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "cbrt")
_LONG += ("exp", "expm1", "log", "log1p", "log2")

FUNCTIONS: dict[str, str] = {
    **{k: v for name in _LONG for k, v in _not_inlined(name, 1).items()},
    **_not_inlined("pow", 2),
    **_not_inlined("atan2", 2),
    "from_bf16": (
        "DEVICE float from_bf16(bf16 x) { return __uint_as_float((u32)x << 16); }\n"
    ),
    "to_bf16": _convert(
        "to_bf16", "float x", "bf16", "cvt.rn.bf16.f32 %0, %1;", "h", '"f"(x)'
    ),
    "from_f16": _convert(
        "from_f16", "f16 x", "float", "cvt.f32.f16 %0, %1;", "f", '"h"(x)'
    ),
    "to_f16": _convert(
        "to_f16", "float x", "f16", "cvt.rn.f16.f32 %0, %1;", "h", '"f"(x)'
    ),
    # The first of a pair is the low half.
    "pack_bf16": _convert(
        "pack_bf16", "float x, float y", "u32", "cvt.rn.bf16x2.f32 %0, %2, %1;", "r",
        '"f"(x), "f"(y)',
    ),
    "pack_f16": _convert(
        "pack_f16", "float x, float y", "u32", "cvt.rn.f16x2.f32 %0, %2, %1;", "r",
        '"f"(x), "f"(y)',
    ),
    "from_f8e4m3fn": _from_f8("from_f8e4m3fn", "e4m3"),
    "from_f8e5m2": _from_f8("from_f8e5m2", "e5m2"),
    "max_f32": _convert(
        "max_f32", "float x, float y", "float", "max.NaN.f32 %0, %1, %2;", "f",
        '"f"(x), "f"(y)',
    ),
    "min_f32": _convert(
        "min_f32", "float x, float y", "float", "min.NaN.f32 %0, %1, %2;", "f",
        '"f"(x), "f"(y)',
    ),
    "max_f64": (
        "DEVICE double max_f64(double x, double y) "
        "{ return x != x || y != y ? x + y : fmax(x, y); }\n"
    ),
    "min_f64": (
        "DEVICE double min_f64(double x, double y) "
        "{ return x != x || y != y ? x + y : fmin(x, y); }\n"
    ),
    "least": (
        "template <class T> DEVICE T least(T x, T y) { return y < x ? y : x; }\n"
    ),
    "greatest": (
        "template <class T> DEVICE T greatest(T x, T y) { return x < y ? y : x; }\n"
    ),
    # x / 0 has all bits set, x % 0 is x, and INT_MIN / -1 is INT_MIN.
    "divide": (
        "template <class T> DEVICE T divide(T x, T y) {\n"
        "  if (y == 0) return (T)-1;\n"
        "  if ((T)-1 < 0 && y == (T)-1) return (T)(0 - (u64)x);\n"
        "  return x / y;\n"
        "}\n"
    ),
    "remainder_of": (
        "template <class T> DEVICE T remainder_of(T x, T y) {\n"
        "  if (y == 0) return x;\n"
        "  if ((T)-1 < 0 && y == (T)-1) return 0;\n"
        "  return x % y;\n"
        "}\n"
    ),
    # No neg.s32: on Hopper, ptxas up to CUDA 13.0 turns max(max(x, -z), y) into
    # max(x, y): it fuses both into one VIMNMX3 and loses the negation.
    "negated": _convert(
        "negated", "int x", "int", "not.b32 %0, %1; add.s32 %0, %0, 1;", "r", '"r"(x)'
    ),
    "sign_of": (
        "template <class T> DEVICE T sign_of(T x) "
        "{ return x < (T)0 ? (T)-1 : x > (T)0 ? (T)1 : x; }\n"
    ),
    "bits_as": (
        "template <class A, class B> DEVICE A bits_as(B x) "
        "{ union { B from; A to; } u; u.from = x; return u.to; }\n"
    ),
    "reciprocal_root": (
        "DEVICE float reciprocal_root(float x) { float r; "
        'asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }\n'
    ),
    # Within one ulp, without the branch for correct rounding.
    "reciprocal": _convert(
        "reciprocal", "float x", "float", "rcp.approx.f32 %0, %1;", "f", '"f"(x)'
    ),
    "divide_fast": _convert(
        "divide_fast", "float x, float y", "float", "div.full.f32 %0, %1, %2;", "f",
        '"f"(x), "f"(y)',
    ),
    "exp2_fast": _convert(
        "exp2_fast", "float x", "float", "ex2.approx.ftz.f32 %0, %1;", "f", '"f"(x)'
    ),
    # For small integers: adds them to the bits of 1.5 * 2^23, as conversions are slow.
    "float_of": (
        "DEVICE float float_of(int x) "
        "{ return __uint_as_float(0x4b400000u + x) - 12582912.0f; }\n"
    ),
    # Computes nothing, but is opaque to the compiler.
    "changed": 'DEVICE void changed(u32& x) { asm volatile("" : "+r"(x)); }\n',
    "Bytes": (
        "template <int B> struct Bytes;\n"
        "template <> struct Bytes<16> { typedef uint4 T; };\n"
        "template <> struct Bytes<8> { typedef uint2 T; };\n"
        "template <> struct Bytes<4> { typedef u32 T; };\n"
        "template <> struct Bytes<2> { typedef u16 T; };\n"
        "template <> struct Bytes<1> { typedef u8 T; };\n"
    ),
    # Between registers and global memory, B bytes at a time.
    "get": (
        "template <int B, class X, class Y> DEVICE void get(X* to, const Y* from) {\n"
        "  typedef typename Bytes<B>::T T;\n"
        "  *reinterpret_cast<T*>(to) = *reinterpret_cast<const T*>(from);\n"
        "}\n"
    ),
    # The same for data accessed once (`streams.py`).
    "get_once": (
        "template <int B, class X, class Y> "
        "DEVICE void get_once(X* to, const Y* from) {\n"
        "  typedef typename Bytes<B>::T T;\n"
        "  *reinterpret_cast<T*>(to) = __ldcg(reinterpret_cast<const T*>(from));\n"
        "}\n"
    ),
    "put_once": (
        "template <int B, class X, class Y> "
        "DEVICE void put_once(X* to, const Y* from) {\n"
        "  typedef typename Bytes<B>::T T;\n"
        "  __stcs(reinterpret_cast<T*>(to), *reinterpret_cast<const T*>(from));\n"
        "}\n"
    ),
    # An element's offset in swizzled memory: panels of ROWS rows of SWIZZLE bytes.
    "swizzled": (
        "template <int SWIZZLE, int BYTES, int ROWS> "
        "DEVICE int swizzled(int row, int column) {\n"
        "  const int x = column * BYTES;\n"
        "  const int panel = x / SWIZZLE * (ROWS * SWIZZLE);\n"
        "  const int at = panel + row * SWIZZLE + x % SWIZZLE;\n"
        "  return (at ^ (at >> 7 & SWIZZLE / 16 - 1) << 4) / BYTES;\n}\n"
    ),
    # What a column's register part must be XORed with, see `in_parts`.
    "swizzled_part": (
        "template <int SWIZZLE, int BYTES> "
        "DEVICE int swizzled_part(int row, int column) {\n"
        "  const int x = row * SWIZZLE >> 7 & SWIZZLE / 16 - 1;\n"
        "  return column ^ x * (16 / BYTES);\n}\n"
    ),
    **pairs.FUNCTIONS,
    **ampere.FUNCTIONS,
    **hopper.BARRIERS,
    **hopper.MAPS,
    **hopper.COPIES,
    **hopper.CLUSTERS,
    **hopper.SEMAPHORES,
    **hopper.PEERS,
    **blackwell.TENSORS,
}  # fmt: skip


def used(text: str, more: Mapping[str, str]) -> str:
    """The functions that a text calls, including those from `more`."""
    known = {**FUNCTIONS, **more}
    found: set[str] = set()
    pending = [text]
    while pending:
        words = set(re.findall(r"\w+", pending.pop()))
        new = [name for name in known if name in words and name not in found]
        found.update(new)
        pending += [known[name] for name in new]
    return HEAD + "".join(body for name, body in known.items() if name in found)
