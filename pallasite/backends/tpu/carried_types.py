"""Element types that the chip lacks, carried in ones it has.

float16 numbers are float32 numbers that are rounded to float16 wherever the kernel
rounds; arrays of bools hold bytes (words in scalar memory). Kernel in, Kernel out: the
parameters have the carrier types, and XLA converts the arrays (`runtime/forms.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pallasite.errors import UnsupportedError
from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, Window, walk
from pallasite.ir.types import BOOL, F16, F32, I8, I32, U32, DType, RefType, TileType
from pallasite.passes.analysis.memory import is_access

# The results of these are float16 numbers if their operands are.
_SHAPE = ("broadcast_in_dim", "reshape", "transpose", "slice", "concatenate", "pad")
_CHOICE = (
    "rev",
    "exchange",
    "sort",
    "select_n",
    "max",
    "min",
    "clamp",
    "gather",
    "top_k",
)
_EXACT = frozenset((*_SHAPE, *_CHOICE, "neg", "abs", "sign", "floor", "ceil", "round"))
_EXACT |= {"load", "atomic_rmw", "atomic_cas", "constant", "stop_gradient"}
_EXACT |= {"for", "while", "cond", "custom"}
_EXACT_REDUCTIONS = ("max", "min")
LARGEST, SMALLEST_NORMAL = 65504.0, 2.0**-14


def carry_types(kernel: Kernel) -> Kernel:
    """The kernel without float16 and without arrays of bools."""
    values = [*kernel.params, *(v for op in walk(kernel.body) for v in op.results)]
    if not any(_carried(v.type) != v.type for v in values):
        return kernel
    return _Carrying().kernel(kernel)


def _carried(type_: Any) -> Any:
    """A type, or an attribute's value, with elements the chip has."""
    if type_ == F16:
        return F32
    if isinstance(type_, TileType):
        return type_.with_dtype(_carried(type_.dtype))
    if isinstance(type_, RefType) and not type_.is_semaphore:
        return replace(type_, dtype=_in_memory(type_.dtype, type_.space))
    return type_


def _in_memory(dtype: DType, space: str) -> DType:
    if dtype == BOOL:
        return I32 if space == "smem" else I8
    return _carried(dtype)


class _Carrying:
    """Rebuilds a kernel with other types; `values` has the replacement of each
    value."""

    def __init__(self) -> None:
        self.values: dict[Value, Value] = {}

    def kernel(self, kernel: Kernel) -> Kernel:
        params = self.bound(kernel.params)
        return kernel.with_(params=params, body=self.block(kernel.body))

    def block(self, block: Block) -> Block:
        params, b = self.bound(block.params), Builder()
        for op in block.ops:
            b.loc = op.loc
            self.op(b, op)
        return Block(params, tuple(b.ops), self.of(block.yields))

    def bound(self, values: Sequence[Value]) -> tuple[Value, ...]:
        for value in values:
            carried = _carried(value.type)
            same = carried == value.type
            self.values[value] = value if same else Value(carried, value.name)
        return self.of(values)

    def of(self, values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(self.values.get(v, v) for v in values)

    def op(self, b: Builder, op: Op) -> None:
        if op.name == "cast" and self.cast(b, op):
            return
        if op.name == "bitcast" and F16 in (_element(op.operands[0]), _element(op)):
            self.values[op.result] = self.bitcast(b, op)
            return
        if is_access(op) and op.operands[0].ref.dtype == BOOL:
            self.access_of_bools(b, op)
            return
        if op.name == "bitcast_view":
            _check_view(op)
        if (
            op.name == "atomic_rmw"
            and _element(op) == F16
            and op.attrs["kind"] == "add"
        ):
            self.values[op.result] = self.added(b, op)
            return
        regions = [self.block(region) for region in op.regions]
        made = op.with_(
            operands=self.of(op.operands),
            results=self.bound(op.results),
            attrs=_attributes(op),
            regions=tuple(regions),
        )
        b.ops.append(made)
        for old, new in zip(op.results, made.results, strict=True):
            if old.is_ref or old.tile.dtype == new.tile.dtype:
                continue
            if not _is_exact(op):
                self.values[old] = rounded(b, new)

    def cast(self, b: Builder, op: Op) -> bool:
        """A cast to or from float16, as one of float32."""
        (x,), wanted = self.of(op.operands), op.attrs["dtype"]
        if F16 not in (wanted, op.operands[0].tile.dtype):
            return False
        x = b.cast(x, _carried(wanted))
        self.values[op.result] = rounded(b, x) if wanted == F16 else x
        return True

    def bitcast(self, b: Builder, op: Op) -> Value:
        (x,), wanted = self.of(op.operands), op.attrs["dtype"]
        if wanted == op.operands[0].tile.dtype:
            return x
        if wanted != F16:
            return b.cast(half_bits(b, x), wanted)
        bits = b.and_(b.cast(x, U32), b.constant(0xFFFF, x.tile.with_dtype(U32)))
        return from_half_bits(b, bits)

    def access_of_bools(self, b: Builder, op: Op) -> None:
        """Values move between integer memory and tiles of bools by casts."""
        access = Access.of(op)
        stored = self.values[access.ref].ref.dtype
        roles = {"value": access.value, "compare": access.compare}
        roles["other"] = access.other
        casts = {
            role: b.cast(self.values.get(value, value), stored)
            for role, value in roles.items()
            if value is not None
        }
        operands = access_operands(replace(access, **casts))
        made = b.emit(op.name, *self.of(operands), **op.attrs)
        for old, new in zip(op.results, made, strict=True):
            self.values[old] = b.cast(new, BOOL)

    def added(self, b: Builder, op: Op) -> Value:
        """An atomic addition rounds: programs of a core run sequentially."""
        access = Access.of(op)
        ref, value = self.of([access.ref, access.value])  # type: ignore[list-item]
        where = self.of(access.index_operands)
        mask = None if access.mask is None else self.values.get(access.mask)
        old = b.load(ref, access.index, where)
        b.store(ref, rounded(b, b.add(old, value)), access.index, where, mask)
        return old


def _check_view(op: Op) -> None:
    """Reject views of bytes that are carried in another type."""
    for dtype in (op.operands[0].ref.dtype, op.attrs["dtype"]):
        if dtype in (F16, BOOL):
            raise UnsupportedError(
                f"backend 'tpu' does not support views of memory as {dtype}",
                [("ref", op.operands[0].ref), ("view", op.result.ref)],
                at=op.loc,
                fix="load the values and use jax.lax.bitcast_convert_type",
            )


def _element(node: Op | Value) -> DType | None:
    """The element type of a tile, or of an op's result."""
    value = node.result if isinstance(node, Op) else node
    return None if value.is_ref else value.tile.dtype


def _attributes(op: Op) -> Mapping[str, Any]:
    attrs = {key: _carried(value) for key, value in op.attrs.items()}
    if "windows" in attrs:
        attrs["windows"] = tuple(map(_window, attrs["windows"]))
    if op.name == "dot" and any(v.tile.dtype == F16 for v in op.operands):
        attrs["precision"] = "highest"  # by default float32 is rounded to bfloat16
    return attrs


def _window(window: Window) -> Window:
    fill = window.fill
    return replace(window, fill=int(fill)) if isinstance(fill, bool) else window


def _is_exact(op: Op) -> bool:
    if op.name in ("reduce", "scan"):
        return op.attrs["kind"] in _EXACT_REDUCTIONS
    if op.name == "scatter":
        return op.attrs["kind"] in ("set", *_EXACT_REDUCTIONS)
    return op.name in _EXACT


# --- float16 numbers as float32 ---


def rounded(b: Builder, x: Value) -> Value:
    """The nearest float16 number, ties to even, of a float32 one."""
    sign, size = _sign_and_size(b, x)
    near = b.op("reduce_precision", size, exponent_bits=8, mantissa_bits=10)
    infinity = b.like(float("inf"), size)
    near = b.select(b.gt(near, b.like(LARGEST, near)), infinity, near)
    # Below the normal range, float16 has a spacing of 2^-24, as float32 has here.
    step = b.like(0.75, size)
    tiny = b.sub(b.add(size, step), step)
    is_tiny = b.lt(size, b.like(SMALLEST_NORMAL, size))
    return _with_sign(b, b.select(is_tiny, tiny, near), sign)


def _sign_and_size(b: Builder, x: Value) -> tuple[Value, Value]:
    bits = b.op("bitcast", x, dtype=I32)
    return b.and_(bits, b.like(-(2**31), bits)), b.abs(x)


def _with_sign(b: Builder, size: Value, sign: Value) -> Value:
    bits = b.or_(b.op("bitcast", size, dtype=I32), sign)
    return b.op("bitcast", bits, dtype=F32)


def half_bits(b: Builder, x: Value) -> Value:
    """The bits of a float16 number, given as float32, in a word."""
    bits = b.op("bitcast", x, dtype=U32)
    number = lambda n: b.like(n, bits)
    shift = lambda name, v, n: b.op(name, v, number(n))
    sign = b.and_(shift("shift_right_logical", bits, 16), number(0x8000))
    size = b.and_(bits, number(0x7FFFFFFF))
    normal = shift("shift_right_logical", b.sub(size, number(112 << 23)), 13)
    scaled = b.mul(b.abs(x), b.like(2.0**24, x))
    tiny = b.cast(scaled, U32)
    result = b.select(b.lt(size, number(113 << 23)), tiny, normal)
    mantissa = b.and_(shift("shift_right_logical", size, 13), number(0x3FF))
    special = b.or_(number(0x7C00), mantissa)
    result = b.select(b.ge(size, number(0x7F800000)), special, result)
    return b.or_(sign, result)


def from_half_bits(b: Builder, bits: Value) -> Value:
    """The number whose float16 bits are in a word, as float32."""
    number = lambda n: b.like(n, bits)
    size = b.and_(bits, number(0x7FFF))
    sign = b.op("shift_left", b.and_(bits, number(0x8000)), number(16))
    moved = b.op("shift_left", size, number(13))
    normal = b.add(moved, number(112 << 23))
    special = b.or_(moved, number(0x7F800000))
    result = b.select(b.ge(size, number(0x7C00)), special, normal)
    result = b.op("bitcast", result, dtype=F32)
    tiny = b.mul(b.cast(size, F32), b.like(2.0**-24, result))
    result = b.select(b.lt(size, number(0x400)), tiny, result)
    return _with_sign(b, result, b.op("bitcast", sign, dtype=I32))
