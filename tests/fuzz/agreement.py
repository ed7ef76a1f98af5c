"""When two engines agree: integers bit for bit, floats up to the op table's errors.

The numpy evaluator gives the expected results. It runs again a few times with every
inexact op shaken by what its row allows; how far the results move is how far an engine
may be off. A value that moves between finite and not is not compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.opdef import OpDef
from pallasite.ir.types import TileType
from tests.fuzz.arithmetic import JUMPS, MOVES
from tests.fuzz.generate import Case
from tests.ops.test_meaning import LGAMMA_ABSOLUTE, XLA_ULP

SHAKES = 4
MARGIN = 16  # times the largest movement seen
Arrays = list[np.ndarray]


def run_numpy(kernel: Kernel, arrays: Sequence[np.ndarray], numbers: Any = None):
    """The kernel's results by the numpy evaluator."""
    with np.errstate(all="ignore"):
        walker = _Walker(kernel, numbers or Typed())
        results = walker.run([np.array(a) for a in arrays])
        return [np.asarray(r) for r in results]


class _Walker(Walker):
    """Tells the numbers which op they are asked for."""

    def op(self, op: Op) -> None:
        self.numbers.current = op
        super().op(op)


class Typed(NumpyNumbers):
    """The numpy numbers; each result is of the type the op table says."""

    current: Op

    def elementwise(
        self,
        row: OpDef,
        operands: Sequence[Any],
        attrs: Mapping[str, Any],
        result: TileType,
    ) -> Any:
        value = super().elementwise(row, operands, attrs, result)
        return _checked(row.name, value, result)

    def tile_op(self, op: Op, operands: Sequence[Any]) -> Sequence[Any]:
        results = super().tile_op(op, operands)
        pairs = zip(results, op.results, strict=True)
        return [_checked(op.name, value, v.tile) for value, v in pairs]


def _checked(name: str, value: Any, type_: TileType) -> Any:
    got, wanted = (value.shape, value.dtype), (type_.shape, type_.dtype.np)
    assert got == wanted, f"{name} gives {got}, not {wanted}"
    return value


class Shaken(Typed):
    """The numpy numbers with errors: each inexact result moves up or down a little."""

    def __init__(
        self, seed: int, rough: frozenset[Value], ulps: Mapping[str, float] = XLA_ULP
    ):
        super().__init__()
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.flushed = (1.0, 0.0, 0.5)[
            min(seed, 2)
        ]  # the part of tiny results that is 0
        self.rough, self.ulps = rough, ulps

    def elementwise(
        self,
        row: OpDef,
        operands: Sequence[Any],
        attrs: Mapping[str, Any],
        result: TileType,
    ) -> Any:
        value = super().elementwise(row, operands, attrs, result)
        if not result.dtype.is_float:
            return value
        if row.name in MOVES or row.name in JUMPS:
            return self.flip_zeros(value)
        ulps = max(row.max_ulp, 1, self.ulps.get(row.name, 0))
        if row.name == "lgamma":  # absolute accuracy around its zeros
            return self.shake(value, row.max_ulp, absolute=LGAMMA_ABSOLUTE)
        if row.name == "cast" and self.current.result not in self.rough:
            return value
        scale = np.abs(value)
        if row.name in ("add", "sub"):  # may be fused with a product
            for x in operands:
                scale = np.maximum(scale, np.abs(x))
        return self.shake(value, ulps, scale)

    def tile_op(self, op: Op, operands: Sequence[Any]) -> Sequence[Any]:
        results = super().tile_op(op, operands)
        error = _ERRORS.get(op.name)
        if error is None or not op.results[0].tile.dtype.is_float:
            return results
        sizes = super().tile_op(op, [_abs(x) for x in operands])
        pairs = zip(results, sizes, strict=True)
        shaken = [self.shake(value, *error(op, size)) for value, size in pairs]
        if op.attrs.get("kind") in ("max", "min"):
            return shaken
        # In another order some part of it may overflow, even if the whole does not. One
        # run has NaN there, another one does not: whatever the result, that moves it.
        grown = super().tile_op(op, [_at_least_one(x) for x in operands])
        anything = np.nan if self.seed % 2 else 0.0
        pairs = zip(shaken, grown, strict=True)
        return [np.where(np.isfinite(g), v, anything).astype(v.dtype) for v, g in pairs]

    def combine(self, kind: str, a: Any, b: Any) -> Any:
        value = super().combine(kind, a, b)
        is_sum = kind == "add" and _is_float(value)
        return self.shake(value, 1) if is_sum else value

    def shake(self, value: Any, ulps: float, scale: Any = None, absolute: float = 0):
        """Move each element by up to `ulps` units at `scale`, and flush tiny ones."""
        value = np.asarray(value)
        if not value.size:
            return value
        info = ml_dtypes.finfo(value.dtype)
        scale = np.abs(value) if scale is None else scale
        size = np.asarray(scale).astype(np.float64) * (ulps * float(info.eps))
        size = np.where(np.isfinite(size), size + absolute, 0.0)
        step = size * self.direction(value.shape)
        moved = (value.astype(np.float64) + step).astype(value.dtype)
        # A function may flush a part of what it computes, and so lose the whole.
        tiny = np.abs(value.astype(np.float64)) < 4 * float(info.smallest_normal)
        flushes = tiny & (value != 0) & (self.rng.random(value.shape) < self.flushed)
        zero = np.where(self.rng.random(value.shape) < 0.5, 0.0, -0.0)
        return np.where(flushes, zero, moved).astype(value.dtype)[()]

    def flip_zeros(self, value: Any) -> Any:
        """An exact zero may have either sign (max, min), and division shows it."""
        value = np.asarray(value)
        sign = np.broadcast_to(np.sign(self.direction(value.shape)), value.shape)
        zero = np.copysign(0.0, sign).astype(value.dtype)
        return np.where(value == 0, zero, value)[()]

    def direction(self, shape: Sequence[int]) -> Any:
        """All up, all down, then at random: beside a clamp only one way is seen."""
        if self.seed < 2:
            return 1.0 if self.seed else -1.0
        return self.rng.uniform(-1.0, 1.0, shape)


def _abs(x: Any) -> Any:
    return np.abs(x) if _is_float(x) else x


def _at_least_one(x: Any) -> Any:
    return np.maximum(np.abs(x), np.ones((), x.dtype)) if _is_float(x) else x


def _is_float(x: Any) -> bool:
    return np.asarray(x).dtype.kind in "fV"


def _reduction_error(op: Op, sizes: Any) -> tuple[float, Any]:
    """Any order of summation: the sum of sizes, as often as there are terms."""
    if op.attrs["kind"] in ("max", "min"):
        return 0, None
    if op.name == "scan":
        terms = op.operands[0].tile.shape[op.attrs["axis"]]
    else:
        terms = op.operands[0].tile.size // max(op.results[0].tile.size, 1)
    extra = 4 if op.attrs["kind"] == "logsumexp" else 0
    return _accumulated(op, terms) + extra, sizes


def _dot_error(op: Op, sizes: Any) -> tuple[float, Any]:
    lhs = op.operands[0].tile.shape
    terms = int(np.prod([lhs[d] for d in op.attrs["contract"][0]]))
    return _accumulated(op, terms), sizes


def _scatter_error(op: Op, sizes: Any) -> tuple[float, Any]:
    kind = op.attrs["kind"]
    return (16, sizes) if kind in ("add", "mul") else (0, None)


def _accumulated(op: Op, terms: int) -> float:
    """Units of the result type; small types are accumulated in f32."""
    return 1 + terms * (1.0 if op.results[0].tile.dtype.bits >= 32 else 1 / 64)


_ERRORS = {
    "reduce": _reduction_error,
    "scan": _reduction_error,
    "dot": _dot_error,
    "scatter": _scatter_error,
}


def close_to(case: Case) -> tuple[Arrays, list[np.ndarray | None]]:
    """The results, and bounds of a few units: at most what `expected` says."""
    results = run_numpy(case.kernel, case.arrays)
    inexact = [
        _is_float(result) and out not in case.exact
        for result, out in zip(results, case.kernel.outputs, strict=True)
    ]
    pairs = zip(results, inexact, strict=True)
    return results, [_bound(result, []) if some else None for result, some in pairs]


def expected(
    case: Case, ulps: Mapping[str, float] = XLA_ULP
) -> tuple[Arrays, list[np.ndarray | None]]:
    """The results, and how far each float may be off (None: not at all)."""
    results = run_numpy(case.kernel, case.arrays)
    shaken = [
        run_numpy(case.kernel, case.arrays, Shaken(n, case.rough, ulps))
        for n in range(SHAKES)
    ]
    bounds: list[np.ndarray | None] = []
    for n, result in enumerate(results):
        others = [run[n] for run in shaken]
        if not _is_float(result):
            for other in others:
                np.testing.assert_array_equal(
                    result, other, "a rounding error decides: the generator is wrong"
                )
            bounds.append(None)
            continue
        exact = case.kernel.outputs[n] in case.exact
        bounds.append(None if exact else _bound(result, others))
    return results, bounds


def beyond_op_table(case: Case, runs: Iterable[Arrays]) -> str | None:
    """What is wrong with some run's results by the op table's errors alone, or None.

    How far those go takes several runs, and is found out if a run is off.
    """
    wanted, is_exact = close_to(case), False
    for got in runs:
        wrong = mismatch(got, *wanted)
        if wrong is not None and not is_exact:
            wanted, is_exact = expected(case, ulps={}), True
            wrong = mismatch(got, *wanted)
        if wrong is not None:
            return wrong
    return None


def _bound(result: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    wide = result.astype(np.float64)
    reach = np.zeros(result.shape)
    for other in others:
        with np.errstate(all="ignore"):
            step = np.abs(other.astype(np.float64) - wide)
        step = np.where(same(other, result), 0.0, step)
        reach = np.maximum(reach, np.where(np.isfinite(step), step, np.inf))
    info = ml_dtypes.finfo(result.dtype)
    size = np.where(np.isfinite(wide), np.abs(wide), 0.0)
    unit = size * float(info.eps) + float(info.smallest_normal)
    return MARGIN * reach + 2 * unit


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | ((a != a) & (b != b))


def mismatch(
    got: Sequence[np.ndarray], results: Arrays, bounds: list[np.ndarray | None]
) -> str | None:
    """What is wrong with an engine's results, or None."""
    for n, (g, r, bound) in enumerate(zip(got, results, bounds, strict=True)):
        if (g.shape, g.dtype) != (r.shape, r.dtype):
            return f"output {n} is {g.dtype}{g.shape}, not {r.dtype}{r.shape}"
        wrong = ~same(g, r)
        if bound is not None:
            with np.errstate(all="ignore"):
                off = np.abs(g.astype(np.float64) - r.astype(np.float64))
            wrong &= ~(off <= bound) & ~np.isinf(bound)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            allowed = 0.0 if bound is None else bound[at]
            return (
                f"output {n} at {at}: got {g[at]!r}, numpy has {r[at]!r}, "
                f"allowed {allowed:.3g}; {wrong.sum()} of {wrong.size} differ"
            )
    return None
