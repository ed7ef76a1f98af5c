"""legalize: replaces ops that a backend lacks with their decompositions.

In: a kernel, and which ops the backend has natively (names, or a predicate on ops where
that depends on types). Out: a kernel of native ops only. A missing op is computed, in
order of preference, in a wider type in which the backend has it, by a shortcut through
an op the backend has, or by its row's `lower` (`ops/decompose.py`), whose ops are
legalized recursively.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallasite.errors import UnsupportedError
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.opdef import OpDef, table
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.text import print_op
from pallasite.ir.types import F32, I32, DType
from pallasite.ops.decompose import SHORTCUTS
from pallasite.ops.formula import NotApplicable

Native = frozenset[str] | Callable[[Op], bool]
# Builds the op's results; raises NotApplicable where it cannot.
Attempt = tuple[str, Callable[[Builder], Sequence[Value]]]


def legalize(kernel: Kernel, native: Native, backend: str) -> Kernel:
    """The kernel with native ops only.

    Args:
        kernel: at any level.
        native: the names of the ops the backend has, or a predicate on an op.
        backend: its name, for messages.

    Raises:
        UnsupportedError: an op is not native and no decomposition leads to native ops.
    """
    return _Legalizer(native, backend).kernel(kernel)


class _Legalizer:
    def __init__(self, native: Native, backend: str):
        if callable(native):
            self.is_native = native
        else:
            self.is_native = lambda op: op.name in native
        self.backend = backend
        self.table = table()
        self.within: Kernel | None = None
        self.open: list[str] = []  # ops being replaced, to detect cycles

    def kernel(self, kernel: Kernel) -> Kernel:
        self.within = kernel
        return map_ops(kernel, self.rewrite)

    def rewrite(self, op: Op, builder: Rewriter) -> Sequence[Value] | None:
        if self.is_native(op):
            return None
        block = self.replacement(op)
        builder.ops += block.ops
        return block.yields

    def replacement(self, op: Op) -> Block:
        """Native ops that replace a non-native one."""
        key = f"{op.name} {' '.join(str(v.type) for v in op.operands)}"
        tried = [f"native (not listed for {self.backend})"]
        if key in self.open:
            raise self.unsupported(op, [*tried, "its own decomposition needs it"])
        self.open.append(key)
        try:
            for name, attempt in self.attempts(op):
                scratch = Builder(op.loc)
                try:
                    results = tuple(attempt(scratch))
                    made = Block((), tuple(scratch.ops), results)
                    return map_ops(made, self.rewrite)
                except NotApplicable as refusal:
                    tried.append(f"{name} ({refusal})")
                except UnsupportedError as missing:
                    tried.append(f"{name} ({missing.what})")
        finally:
            self.open.pop()
        raise self.unsupported(op, tried)

    def attempts(self, op: Op) -> Iterator[Attempt]:
        row = self.table[op.name]
        wide = _widened_types(op, row)
        if wide is not None:
            yield (
                f"computing in {wide}",
                lambda b: _widen(b, op, wide, self.is_native),
            )
        for through, lower in SHORTCUTS.get(op.name, ()):
            yield (
                f"by {through}",
                lambda b, t=through, f=lower: self.shortcut(b, op, t, f),
            )
        if (lower := row.lower) is not None:
            yield (
                f"decomposition {lower.__name__.strip('_')}",
                lambda b: _results(lower, b, op),
            )

    def shortcut(
        self, b: Builder, op: Op, through: str, lower: Callable[..., Any]
    ) -> Sequence[Value]:
        """A decomposition that pays off only where the op it is built on is native."""
        results = _results(lower, b, op)
        if all(self.is_native(made) for made in b.ops if made.name == through):
            return results
        raise NotApplicable(f"{through} is not native either")

    def unsupported(self, op: Op, tried: list[str]) -> UnsupportedError:
        types = ", ".join(str(v.type) for v in op.operands if not v.is_ref)
        on = f" on {types}" if types else ""
        text = print_op(op, self.within, regions=False)
        return UnsupportedError(
            f"backend {self.backend!r} cannot run {op.name}{on}",
            [("op", text), ("tried", "\n".join(tried))],
            at=op.loc,
            fix="use other operations, or run the kernel with interpret=True",
        )


def _results(lower: Callable[..., Any], b: Builder, op: Op) -> Sequence[Value]:
    """The results of a row's `lower`, always as a sequence."""
    made = lower(b, *op.operands, **op.attrs)
    return (made,) if isinstance(made, Value) else tuple(made)


# --- computing in a wider type ---

# Excluded: the results of these depend on the width of the type.
_OWN_WIDTH = frozenset({"bitcast", "cast", "clz", "nextafter", "pow"})
_OWN_WIDTH |= {"reduce_precision"}
# The signed operand of these must be zero-extended.
_OF_BITS = frozenset({"shift_right_logical", "population_count"})
_TILE_OPS = frozenset({"reduce", "scan", "arg_reduce", "broadcast_in_dim", "transpose"})
_TILE_OPS |= {"reshape", "slice", "concatenate", "pad", "rev", "exchange", "sort"}
_MAKERS = frozenset({"constant", "iota"})


def wider(dtype: DType) -> DType | None:
    """The 32-bit type that represents every value of a narrower one."""
    if dtype.bits >= 32 or dtype.is_bool:
        return None
    return F32 if dtype.is_float else I32


def _widened_types(op: Op, row: OpDef) -> DType | None:
    """The type to compute in, if one gives the same results."""
    if op.regions or op.name in _OWN_WIDTH:
        return None
    if not (row.elementwise or op.name in _TILE_OPS or op.name in _MAKERS):
        return None
    if op.name == "shift_right_arithmetic" and op.operands[0].tile.dtype.kind == "uint":
        return None
    found = {wider(v.tile.dtype) for v in (*op.operands, *op.results)} - {None}
    return found.pop() if len(found) == 1 else None


def _widen(
    b: Builder, op: Op, wide: DType, is_native: Callable[[Op], bool]
) -> Sequence[Value]:
    """Cast narrow operands, run the op, cast the results back.

    Sums and products wrap when cast back; f32 has more than twice the bits of f16 and
    bf16, so double rounding is harmless.
    """
    operands = [_extended(b, op, v, wide) for v in op.operands]
    attrs = dict(op.attrs)
    if op.name in _MAKERS:
        attrs["type"] = attrs["type"].with_dtype(wide)
    results = b.emit(op.name, *operands, **attrs)
    if not is_native(b.ops[-1]):
        raise NotApplicable(f"{op.name} is not native in {wide} either")
    return [
        b.cast(new, old.tile.dtype)
        for new, old in zip(results, op.results, strict=True)
    ]


def _extended(b: Builder, op: Op, value: Value, wide: DType) -> Value:
    narrow = value.tile.dtype
    if wider(narrow) is None:
        return value
    result = b.cast(value, wide)
    if op.name in _OF_BITS and narrow.is_signed_int and value is op.operands[0]:
        result = b.and_(result, b.like((1 << narrow.bits) - 1, result))
    return result


__all__ = ["legalize", "wider"]
