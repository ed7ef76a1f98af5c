"""Elementary functions: error in ulp against f64, within the bounds of the op table.

One kernel per element type computes every function on samples of its domain. The tiles
are long enough for whole vectors, and odd, so that what is left over is seen too.
"""

import ml_dtypes
import numpy as np
import pytest

from pallasite.backends.cpu.ops.functions import FUNCTIONS
from pallasite.ir.opdef import OpDef, table
from pallasite.ir.types import DTYPES, DType
from tests.backends.cpu.running import compute
from tests.ops.sampling import FLOAT_NAMES, samples, ulp_error

COUNT = 20_001
ROWS = [table()[name] for name in sorted(FUNCTIONS.keys() | {"sqrt", "rsqrt"})]
# lgamma is a difference of large terms around its zeros: accurate to this instead.
ABSOLUTE = {"lgamma": 1e-6}


def exact(row: OpDef, operands: list[np.ndarray]) -> np.ndarray:
    """The value in f64; of f64 operands, numpy's own, which is right to an ulp."""
    with np.errstate(all="ignore"):
        return np.asarray(row.meaning(*(x.astype(np.float64) for x in operands)))


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_errors_are_within_the_stated_bounds(name: str):
    dtype: DType = DTYPES[name]
    operands = [samples(row, dtype, COUNT, seed=n) for n, row in enumerate(ROWS)]
    flat = [x for group in operands for x in group]

    def emit(b, *tiles):
        pending = iter(tiles)
        return [
            b.op(row.name, *(next(pending) for _ in group))
            for row, group in zip(ROWS, operands, strict=True)
        ]

    largest, wrong = float(ml_dtypes.finfo(dtype.np).max), []
    for row, group, got in zip(ROWS, operands, compute(emit, *flat), strict=True):
        want = exact(row, group)
        # The largest number rounds up to infinity half a unit above it.
        overflows = np.isinf(got) & (np.abs(want) >= largest)
        error = ulp_error(got, np.where(overflows, got, want), dtype)
        # A result between two numbers of a type is half a unit off at best.
        bound = row.max_ulp + (0.5 if dtype.bits < 64 else 1.0)
        close = np.abs(got.astype(np.float64) - want) <= ABSOLUTE.get(row.name, 0.0)
        error = np.where(close, 0.0, error)
        worst = int(np.argmax(error))
        if error[worst] > bound:
            given = [x[worst] for x in group]
            wrong.append(f"{row.name}{given}: {got[worst]}, {error[worst]:.2f} ulp")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["exp", "exp2"])
def test_exponentials_far_outside(name: str):
    """Where rounding to whole numbers has no digits left, and at the ends of f32."""
    far = np.float32([200, 1e3, 2.0**23 + 1, 7e13, 1e14, 1e30, 3.4e38, np.inf])
    x = np.concatenate([far, -far, np.float32([0, -0.0, np.nan])])
    got = compute(lambda b, tile: b.op(name, tile), x)
    want = [*[np.inf] * len(far), *[0] * len(far), 1, 1, np.nan]
    np.testing.assert_array_equal(got, np.float32(want))
    whole = np.arange(-126, 128, dtype=np.float32)
    if name == "exp2":
        got = compute(lambda b, tile: b.op(name, tile), whole)
        np.testing.assert_array_equal(got, np.ldexp(np.float32(1), whole.astype(int)))
