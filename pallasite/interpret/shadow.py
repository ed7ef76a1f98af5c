"""Arrays that are only partly defined, and the number system over them.

A `Partly` is a numpy array with a code per element: 0 is defined, anything else numbers
the origin of the undefined element (`monitor.py`). Plain numpy arrays are entirely
defined. Codes travel with values through every op; an undefined value is reported only
where it matters: it determines a branch or an index, or stays in an output.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pallasite.errors import failed_check
from pallasite.interpret import shadow_tiles
from pallasite.interpret.monitor import EDGE, MASKED, Monitor
from pallasite.interpret.numbers import Picks
from pallasite.interpret.numpy_memory import Gathered, Region, region_of
from pallasite.interpret.numpy_numbers import NumpyNumbers, outside_bounds
from pallasite.interpret.shadow_tiles import Partly, codes_of, partly, value_of
from pallasite.ir.nodes import Op
from pallasite.ir.opdef import OpDef
from pallasite.ir.types import RefType, TileType

Array = Any


class CheckedNumbers(NumpyNumbers):
    """Numpy arrays whose elements may be undefined."""

    def __init__(self, monitor: Monitor, prints: bool = True):
        super().__init__()
        self.monitor, self.prints = monitor, prints
        options = monitor.options
        self.watched = [k for k in ("nan", "inf") if getattr(options, k)]
        self.zeros = options.machine.zeros
        self.skips_floats = options.machine.skips_floats

    # --- tiles ---

    def elementwise(
        self,
        row: OpDef,
        operands: Sequence[Array],
        attrs: Mapping[str, Any],
        result: TileType,
    ) -> Array:
        if self.skips_floats and result.dtype.is_float:
            return _infinity(result)
        if Partly not in map(type, operands):
            value = super().elementwise(row, operands, attrs, result)
        else:
            plain = [value_of(x) for x in operands]
            value = super().elementwise(row, plain, attrs, result)
            value = partly(value, shadow_tiles.elementwise(row.name, operands, value))
        if self.watched and result.dtype.is_float:
            self._look_for_nan(operands, value, by_element=True)
        return value

    def tile_op(self, op: Op, operands: Sequence[Array]) -> Sequence[Array]:
        if self.skips_floats and all(v.tile.dtype.is_float for v in op.results):
            return [_infinity(v.tile) for v in op.results]
        if Partly not in map(type, operands):
            results = super().tile_op(op, operands)
        else:
            plain = super().tile_op(op, [value_of(x) for x in operands])
            codes = shadow_tiles.tile_op(op, operands)
            results = [partly(x, c) for x, c in zip(plain, codes, strict=True)]
        if self.watched and operands and op.results[0].tile.dtype.is_float:
            self._look_for_nan(operands, results[0], by_element=False)
        return results

    def _look_for_nan(self, operands: Sequence, value: Array, by_element: bool) -> None:
        for kind in self.watched:
            is_bad = np.isnan if kind == "nan" else np.isinf
            bad = _defined_and(is_bad, value)
            if not bad.any():
                continue
            for x in operands:
                if not shadow_tiles.is_float(value_of(x)):
                    continue
                # An infinity that a NaN or another infinity led to is not the first.
                before = _defined_and(is_bad, x)
                if kind == "inf":
                    before = before | _defined_and(np.isnan, x)
                bad = bad & ~before if by_element else bad & ~before.any()
            if bad.any():
                self._report_nan(kind, bad, value)

    def _report_nan(self, kind: str, bad: np.ndarray, value: Array) -> None:
        name = "a NaN" if kind == "nan" else "an infinity"
        op = self.monitor.op
        facts: list[tuple[str, Any]] = [
            ("op", f"{op.name} -> {op.results[0].tile}" if op is not None else None)
        ]
        if np.ndim(bad):
            first = tuple(int(i) for i in np.argwhere(bad)[0])
            facts.append(("element", f"{first}, {int(bad.sum())} in all"))
        self.monitor.report(
            kind, f"{name} is produced here, from operands without", facts
        )

    # --- memory ---

    def uninitialised(self, type: RefType) -> Array:
        data = super().uninitialised(type)
        if self.zeros:
            data = np.zeros_like(data)
        if type.is_semaphore:
            return data
        return Partly(data, np.ones(type.shape, np.int32))

    def take(
        self,
        array: Array,
        picks: Picks,
        mask: Array | None = None,
        other: Array | None = None,
    ) -> Array:
        data, codes = value_of(array), codes_of(array)
        region = region_of(picks, np.shape(data))
        missing = region.outside()
        plain = codes is None and missing is None
        value = super().take(data, picks, value_of(mask), value_of(other))
        if plain and mask is None:
            return value
        if missing is not None and self.zeros:
            value = np.where(missing, np.zeros((), data.dtype), value)
        found = np.zeros(region.shape, np.int32)
        if codes is not None:
            found = region.take(codes, 0)
        if missing is not None:
            found = np.where(missing, np.int32(self.monitor.code_here(EDGE)), found)
        if mask is not None:
            found = self._masked(found, mask, other)
        return partly(value, found)

    def _masked(self, found: np.ndarray, mask: Array, other: Array | None) -> Array:
        off = codes_of(other)
        if off is None:
            off = np.int32(0 if other is not None else self.monitor.code_here(MASKED))
        found = np.where(value_of(mask), found, off)
        unsure = codes_of(mask)
        return found if unsure is None else np.maximum(found, unsure)

    def put(
        self, array: Array, picks: Picks, value: Array, mask: Array | None
    ) -> Array:
        codes, unsure = codes_of(value), codes_of(mask)
        array = self._with_codes(array, codes, unsure)
        data, where = value_of(array), value_of(mask)
        region = region_of(picks, data.shape)
        region.put(data, value_of(value), where)
        if type(array) is Partly:
            region.put(array.codes, 0 if codes is None else codes, where)
            if unsure is not None:  # perhaps written: its value is unknown
                region.put(array.codes, unsure, unsure != 0)
        return array

    def _with_codes(self, array: Array, *codes: Array | None) -> Array:
        """Memory that can hold undefined elements, where they are to be stored."""
        if type(array) is Partly:
            return Partly(np.asarray(array.value), np.asarray(array.codes))
        array = np.asarray(array)  # a view of one element may be a numpy scalar
        if all(c is None for c in codes):
            return array
        return Partly(array, np.zeros(array.shape, np.int32))

    def rmw(
        self, array: Array, picks: Picks, kind: str, value: Array, mask: Array | None
    ) -> tuple[Array, Array]:
        codes, unsure = codes_of(value), codes_of(mask)
        array = self._with_codes(array, codes, unsure)
        data, where = value_of(array), value_of(mask)
        old = self.take(array, picks, mask)
        super().rmw(data, picks, kind, value_of(value), where)
        if type(array) is Partly:
            region = region_of(picks, data.shape)
            _combine_codes(array.codes, region, kind, codes, where)
            if unsure is not None:
                region.put(array.codes, unsure, unsure != 0)
        return array, old

    def fill_outside(self, value: Array, picks: Picks, fill: Any) -> Array:
        if type(value) is not Partly:
            return value
        filled = super().fill_outside(value.value, picks, fill)
        missing = outside_bounds(picks)
        codes = value.codes if missing is None else np.where(missing, 0, value.codes)
        return partly(filled, codes)

    def reinterpret(self, value: Array, kind: str, arg: Any) -> Array:
        plain = super().reinterpret(value_of(value), kind, arg)
        if type(value) is not Partly:
            return plain
        return Partly(plain, self._view_codes(value.codes, kind, arg, back=False))

    def restore(self, before: Array, kind: str, arg: Any, value: Array) -> Array:
        plain = super().restore(value_of(before), kind, arg, value_of(value))
        if type(value) is not Partly:
            return plain
        if kind == "bitcast":
            return Partly(plain, self._view_codes(value.codes, kind, arg, back=True))
        return Partly(plain, super().restore(before, kind, arg, value.codes))

    def _view_codes(self, codes: np.ndarray, kind: str, arg: Any, back: bool) -> Array:
        if kind != "bitcast":
            return super().reinterpret(codes, kind, arg)
        before, after = arg[::-1] if back else arg
        return shadow_tiles.bitcast_rows(codes, before, after)

    # --- selection and control: here undefined values matter ---

    def combine(self, kind: str, a: Array, b: Array) -> Array:
        value = super().combine(kind, value_of(a), value_of(b))
        return partly(value, shadow_tiles.merged([a, b], np.shape(value)))

    def select(self, predicate: Array, on_true: Array, on_false: Array) -> Array:
        operands = [predicate, on_false, on_true]
        value = super().select(*(value_of(x) for x in (predicate, on_true, on_false)))
        return partly(value, shadow_tiles.elementwise("select_n", operands, value))

    def counter(self, first: Array, limit: Array, step: Array) -> Iterator[Array]:
        numbers = (self.certain(x, "a loop's trip count") for x in (first, limit, step))
        return super().counter(*numbers)

    def chosen(self, which: Array, count: int) -> int:
        return super().chosen(self.certain(which, "a branch"), count)

    def truth(self, value: Array) -> bool:
        return bool(self.certain(value, "whether a loop continues"))

    def programs(self, sizes: Sequence[int | Array]) -> Iterator[list[Array]]:
        return super().programs([self.certain(s, "the grid") for s in sizes])

    def certain(self, value: Array, decides: str) -> Array:
        """The plain value; a report if it is not defined."""
        if type(value) is Partly:
            code = int(value.codes.max(initial=0))
            what = f"an undefined value determines {decides}"
            self.monitor.report_undefined(code, what)
            return value.value
        return value

    # --- debugging ---

    def debug_print(self, fmt: str, values: Sequence[Array], when: Any = None) -> None:
        if self.prints:
            super().debug_print(fmt, [value_of(v) for v in values], when)

    def debug_check(
        self, ok: Array, message: str, values: Sequence[Array], op: Op
    ) -> None:
        if not self.certain(ok, "a debug_check"):
            text = failed_check(message, [value_of(v) for v in values])
            self.monitor.report("check", text)


def _infinity(tile: TileType) -> np.ndarray:
    return np.full(tile.shape, np.inf).astype(tile.dtype.np)


def _defined_and(test: Callable, x: Array) -> np.ndarray:
    found = np.asarray(test(value_of(x)))
    return found & (x.codes == 0) if type(x) is Partly else found


def _combine_codes(
    memory: np.ndarray, region: Region, kind: str, codes: Array | None, mask: Any
) -> None:
    """Codes after a read-modify-write: undefined if old or new was."""
    new = np.int32(0) if codes is None else codes
    if kind == "xchg":
        region.put(memory, new, mask)
    elif codes is None:
        return
    elif isinstance(region, Gathered):
        elements = region.chosen(mask)
        positions = region.positions
        if elements is not None:
            new, positions = codes[elements], tuple(p[elements] for p in positions)
        np.maximum.at(memory, positions, new)
    else:
        region.put(memory, np.maximum(region.take(memory, 0), new), mask)
