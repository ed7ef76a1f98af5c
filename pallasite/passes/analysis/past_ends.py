"""What tiles hold past the end of the array that their block is wider than.

A row padded to a power of two is loaded with a mask that is off there, so that each
element is a known number: what the load gives instead, and what is computed from that.
"""

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

import numpy as np

from pallasite.ir.build import python_scalar
from pallasite.ir.nodes import Access, Op, Value
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import is_elementwise
from pallasite.ops.neutral import neutral
from pallasite.passes.analysis.loop_dims import LoopDim

# Of NaN and other numbers, these make NaN.
_KEEPS_NAN = {"exp", "exp2", "neg", "add", "sub", "mul", "div"}


class Past(NamedTuple):
    """The number in all elements past the end.

    `or_nan`: they may be NaN instead, where all elements before the end are, too.
    """

    number: Any
    or_nan: bool = False


class PastEnd:
    """The elements of tiles at positions from `end` on along a dimension."""

    def __init__(self, dim: LoopDim, end: int, made: Mapping[Value, Op]):
        self.dim, self.end, self.made = dim, end, made
        self.known: dict[Value, Past | None] = {}

    def is_neutral(self, reduce: Op) -> bool:
        """Whether they change nothing of a reduction."""
        kind, dtype = reduce.attrs["kind"], reduce.operands[0].tile.dtype
        return self.bound(reduce) == neutral(kind, dtype)

    def bound(self, reduce: Op) -> Any:
        """What a reduction is to be combined with in their place; None: unknown."""
        if reduce.name != "reduce":
            return None
        (x,), kind = reduce.operands, reduce.attrs["kind"]
        past = self.of(x)
        if past is None or kind in ("max", "min"):
            return past and past.number
        return past.number if past.number == neutral(kind, x.tile.dtype) else None

    def is_off(self, mask: Value | None) -> bool:
        past = None if mask is None else self.of(mask)
        return past is not None and not past.number

    def of(self, value: Value) -> Past | None:
        if value not in self.known:
            op = self.made.get(value)
            self.known[value] = None if op is None else self._of(op)
        return self.known[value]

    def _of(self, op: Op) -> Past | None:
        if op.name == "constant":
            return Past(op.attrs["value"])
        if op.name in ("broadcast_in_dim", "reshape", "transpose"):
            (x,) = op.operands
            return self.of(x) if x in self.dim.members or not x.type.shape else None
        if op.name == "load":
            return self._loaded(op)
        if op.name in ("lt", "le", "gt", "ge"):
            return self._compared(op)
        if op.name == "select_n":
            return self._selected(op)
        if op.name == "and" and Past(False) in map(self.of, op.operands):
            return Past(False)
        if not is_elementwise(op):
            return None
        return self._less_maximum(op) or self._computed(op)

    def _loaded(self, op: Op) -> Past | None:
        access = Access.of(op)
        if access.other is None or not self.is_off(access.mask):
            return None
        return self.of(access.other)

    def _compared(self, op: Op) -> Past | None:
        """A comparison of positions from `end` on."""
        ranges = [self._range(v) for v in op.operands]
        if ranges[0] is None or ranges[1] is None:
            return None
        if op.name in ("gt", "ge"):
            ranges.reverse()
        (low, high), (first, last) = ranges  # type: ignore[misc]
        strict = op.name in ("lt", "gt")
        if high < first or (high == first and not strict):
            return Past(True)
        if low > last or (low == last and strict):
            return Past(False)
        return None

    def _range(self, value: Value) -> tuple[float, float] | None:
        op, past = self.made.get(value), self.of(value)
        if past is not None:
            return None if past.or_nan else (past.number, past.number)
        while op is not None and op.name == "broadcast_in_dim":
            value = op.operands[0]
            op = self.made.get(value)
        d = self.dim.members.get(value)
        if op is None or op.name != "iota" or d is None:
            return None
        if op.attrs["dim"] != d:
            return None
        # Small integers wrap around, and narrow floats are rounded.
        positions = np.arange(self.end, value.tile.shape[d])
        numbers = positions.astype(value.tile.dtype.np).astype(float)
        return numbers.min(), numbers.max()

    def _selected(self, op: Op) -> Past | None:
        which, *cases = op.operands
        past = self.of(which)
        chosen = None if past is None else self.of(cases[int(past.number)])
        # Elements before the end may be those of another case.
        return None if chosen is None or chosen.or_nan else chosen

    def _less_maximum(self, op: Op) -> Past | None:
        """Minus infinity, less the maximum of the same tile: NaN if that is all
        minus infinity, and then all elements are."""
        past = self.of(op.operands[0])
        if op.name != "sub" or past is None or past.number != -inf or past.or_nan:
            return None
        most = self.made.get(op.operands[1])
        while most is not None and most.name in ("broadcast_in_dim", "reshape"):
            most = self.made.get(most.operands[0])
        is_own = most is not None and most.operands[0] is op.operands[0]
        is_most = is_own and most in self.dim.reduces and most.attrs["kind"] == "max"
        return Past(-inf, or_nan=True) if is_most else None

    def _computed(self, op: Op) -> Past | None:
        """An op of known numbers."""
        past = [p for v in op.operands if (p := self.of(v)) is not None]
        row, result = table()[op.name], op.result.tile.dtype
        dtypes = [v.tile.dtype for v in op.operands]
        if len(past) < len(dtypes) or row.meaning is None or op.name == "bitcast":
            return None
        or_nan = any(p.or_nan for p in past)
        if or_nan and not (op.name in _KEEPS_NAN and result.is_float):
            return None
        if any(dtype.bits < 8 for dtype in (*dtypes, result)):
            return None
        pairs = zip(past, dtypes, strict=True)
        arrays = [np.full((1,), p.number, dtype.np) for p, dtype in pairs]
        try:
            with np.errstate(all="ignore"):
                (number,) = np.asarray(row.meaning(*arrays, **op.own_attrs))
        except TypeError:  # numpy lacks the function for some narrow floats
            return None
        return Past(python_scalar(number, result), or_nan)
