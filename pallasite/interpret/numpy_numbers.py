"""The numpy number system: one program after another, memory changed in place.

Elementwise ops are their rows' meaning, ops on whole tiles are in `numpy_tiles.py`.
`shadow.py` builds checked mode's number system on this one. Callers silence numpy's
warnings (`np.errstate`) once around a whole run.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pallasite.errors import CheckError, failed_check
from pallasite.interpret import numpy_tiles
from pallasite.interpret.numbers import Picks
from pallasite.interpret.numpy_memory import Gathered, region_of
from pallasite.ir.nodes import Op
from pallasite.ir.opdef import OpDef
from pallasite.ir.types import DType, RefType, TileType

Array = Any  # an ndarray, or a numpy scalar where the rank is 0


class NumpyNumbers:
    """The number system of checked mode, without the checks."""

    functional = False

    def __init__(self):
        self._constants: dict[Op, Sequence[Array]] = {}

    # --- tiles ---

    def elementwise(
        self,
        row: OpDef,
        operands: Sequence[Array],
        attrs: Mapping[str, Any],
        result: TileType,
    ) -> Array:
        assert row.meaning is not None, row.name
        value = row.meaning(*operands, **attrs)
        wanted = result.dtype.np
        return value if value.dtype == wanted else value.astype(wanted)

    def tile_op(self, op: Op, operands: Sequence[Array]) -> Sequence[Array]:
        if operands:
            return numpy_tiles.run(op, operands)
        known = self._constants.get(op)
        if known is None:
            known = self._constants[op] = numpy_tiles.run(op, operands)
        return known

    def scalar(self, value: int, dtype: DType) -> Array:
        return dtype.np.type(value)

    # --- memory ---

    def uninitialised(self, type: RefType) -> Array:
        fill = 0 if type.is_semaphore else poison(type.dtype.np)
        return np.full(type.shape, fill, type.dtype.np)

    def pad(
        self, array: Array, low: Sequence[int], high: Sequence[int], fill: Any
    ) -> Array:
        value = poison(array.dtype) if fill is None else fill
        widths = list(zip(low, high, strict=True))
        return np.pad(array, widths, constant_values=np.array(value, array.dtype))

    def unpad(self, array: Array, low: Sequence[int], shape: Sequence[int]) -> Array:
        return array[tuple(slice(lo, lo + n) for lo, n in zip(low, shape, strict=True))]

    def take(
        self,
        array: Array,
        picks: Picks,
        mask: Array | None = None,
        other: Array | None = None,
    ) -> Array:
        array = np.asarray(array)
        value = region_of(picks, array.shape).take(array, poison(array.dtype))
        if mask is None or other is None:
            return value
        return np.where(mask, value, other).astype(array.dtype)

    def put(
        self, array: Array, picks: Picks, value: Array, mask: Array | None
    ) -> Array:
        array = np.asarray(array)  # a view of one element may be a numpy scalar
        region_of(picks, array.shape).put(array, value, mask)
        return array

    def rmw(
        self, array: Array, picks: Picks, kind: str, value: Array, mask: Array | None
    ) -> tuple[Array, Array]:
        array = np.asarray(array)
        region = region_of(picks, array.shape)
        old = region.take(array, poison(array.dtype))
        if isinstance(region, Gathered):
            _rmw_gathered(array, region, kind, value, mask)
        else:
            region.put(array, self.combine(kind, old, value), mask)
        return array, old

    def fill_outside(self, value: Array, picks: Picks, fill: Any) -> Array:
        missing = outside_bounds(picks)
        if missing is None:
            return value
        return np.where(missing, np.array(fill, value.dtype), value)

    def reinterpret(self, value: Array, kind: str, arg: Any) -> Array:
        if kind == "reshape":
            return np.reshape(value, arg)
        if kind == "transpose":
            return np.transpose(value, arg)
        before, after = arg
        return _bitcast_rows(value, before, after)

    def restore(self, before: Array, kind: str, arg: Any, value: Array) -> Array:
        if kind == "reshape":
            return np.reshape(value, before.shape)
        if kind == "transpose":
            return np.transpose(value, np.argsort(arg))
        return _bitcast_rows(value, arg[1], arg[0])

    # --- scalars and selection: places in memory are Python ints ---

    def clamp(self, index: Any, low: Any, high: Any) -> Any:
        if np.ndim(index):  # an index tile
            if index.dtype == np.uint64:  # does not fit into int64
                index = np.minimum(index, np.uint64(high))
            return np.clip(index.astype(np.int64), low, high)
        return min(max(int(index), int(low)), int(high))

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def mul(self, a: Any, b: int) -> Any:
        return a * b

    def larger(self, a: Any, b: Any) -> Any:
        return max(a, b)

    def smaller(self, a: Any, b: Any) -> Any:
        return min(a, b)

    def combine(self, kind: str, a: Array, b: Array) -> Array:
        if kind == "xchg":
            return b
        return _COMBINE[kind](a, b)

    def select(self, predicate: Array, on_true: Array, on_false: Array) -> Array:
        return np.where(predicate, on_true, on_false)

    def is_branch(self, which: Array, n: int, count: int) -> bool:
        return min(max(int(which), 0), count - 1) == n

    # --- control ---

    def counted(
        self,
        first: Array,
        limit: Array,
        step: Array,
        carry: list[Array],
        body: Callable[[Array, list[Array]], list[Array]],
    ) -> list[Array]:
        for i in self.counter(first, limit, step):
            carry = body(i, carry)
        return carry

    def counter(self, first: Array, limit: Array, step: Array) -> Iterator[Array]:
        """The numbers a loop counts."""
        return map(first.dtype.type, range(int(first), int(limit), int(step)))

    def while_(self, go_on: Callable, body: Callable, carry: list[Array]) -> list:
        while self.truth(go_on(carry)):
            carry = body(carry)
        return carry

    def truth(self, value: Array) -> bool:
        return bool(value)

    def branch(
        self, which: Array, branches: Sequence[Callable], carry: list[Array]
    ) -> list[Array]:
        return branches[self.chosen(which, len(branches))](carry)

    def chosen(self, which: Array, count: int) -> int:
        """The branch that is taken, of `count`."""
        return min(max(int(which), 0), count - 1)

    def grid(
        self,
        sizes: Sequence[int | Array],
        carry: list[Array],
        body: Callable[[list[Array], list[Array]], list[Array]],
    ) -> list[Array]:
        for ids in self.programs(sizes):
            carry = body(ids, carry)
        return carry

    def programs(self, sizes: Sequence[int | Array]) -> Iterator[list[Array]]:
        """The ids of a grid's programs, in order."""
        axes = [[np.int32(i) for i in range(int(size))] for size in sizes]
        return map(list, itertools.product(*axes))

    # --- debugging ---

    def debug_print(self, fmt: str, values: Sequence[Array], when: Any = None) -> None:
        print(fmt.rstrip("\n").format(*values))

    def debug_check(
        self, ok: Array, message: str, values: Sequence[Array], op: Op
    ) -> None:
        if not self.truth(ok):
            raise CheckError(failed_check(message, values), at=op.loc, kind="check")


_COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "eq": np.equal,
}


def poison(dtype: np.dtype) -> Any:
    """What unwritten memory holds: NaN, the least integer, or 0."""
    found = _POISON.get(dtype)
    if found is None:
        found = _POISON[dtype] = _find_poison(dtype)
    return found


_POISON: dict[np.dtype, Any] = {}


def _find_poison(dtype: np.dtype) -> Any:
    if dtype.kind == "b":
        return dtype.type(False)
    try:
        return dtype.type(ml_dtypes.iinfo(dtype).min)
    except ValueError:
        nan = np.array(np.nan).astype(dtype)
        return nan[()] if np.isnan(nan.astype(np.float32)) else dtype.type(0)


def outside_bounds(picks: Picks) -> np.ndarray | None:
    """Which picked elements are outside their bounds; None where none is."""
    # Positions outside every array count as outside their bounds only.
    limits = [_limit(p) for p in picks]
    return region_of(picks, limits).outside()


def _limit(p: Any) -> int:
    if p.high is not None:
        return int(p.high)
    if p.clip is not None:
        return int(p.clip[1])
    if p.gather is not None:
        return int(np.max(p.gather, initial=0)) + 1
    return int(p.start) + p.extent


def _rmw_gathered(
    array: np.ndarray, region: Gathered, kind: str, value: Array, mask: Array | None
) -> None:
    """Equal indices may repeat: each update sees the one before."""
    where = region.chosen(mask)
    value = np.broadcast_to(value, region.shape)
    positions = region.positions
    if where is not None:
        value, positions = value[where], tuple(p[where] for p in positions)
    if kind == "xchg":
        array[positions] = value
    else:
        _COMBINE[kind].at(array, positions, value)  # type: ignore[attr-defined]


def _bitcast_rows(value: Array, before: TileType, after: TileType) -> Array:
    """Reinterpret element width along the second-last dimension."""
    old, new = before.dtype, after.dtype
    if old.bits == new.bits:
        return numpy_tiles.bitcast(value, old, new)
    if old.bits > new.bits:
        wide = numpy_tiles.bitcast(value, old, new)
        return np.moveaxis(wide, -1, -2).reshape(after.shape)
    factor = new.bits // old.bits
    rows = before.shape[-2] // factor
    split = value.reshape(*before.shape[:-2], rows, factor, before.shape[-1])
    return numpy_tiles.bitcast(np.moveaxis(split, -2, -1), old, new)
