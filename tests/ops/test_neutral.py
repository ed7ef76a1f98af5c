"""The neutral element of each reduction changes nothing, in every type."""

import numpy as np
import pytest

from pallasite.ir.types import BF16, BOOL, DTYPES, F32, DType
from pallasite.ops.neutral import neutral
from pallasite.ops.tile import REDUCE_KINDS, SCAN_KINDS

INTEGERS = [DTYPES[name] for name in ("i8", "u8", "i16", "u16", "i32", "u32", "i64")]
COMBINE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "logsumexp": np.logaddexp,
}


@pytest.mark.parametrize("kind", sorted({*REDUCE_KINDS, *SCAN_KINDS}))
@pytest.mark.parametrize("dtype", [BOOL, *INTEGERS, F32, BF16], ids=str)
def test_neutral(kind: str, dtype: DType):
    if dtype.is_float and kind in ("and", "or", "xor"):
        pytest.skip("no bits of floats are combined")
    if kind == "logsumexp" and not dtype.is_float:
        pytest.skip("logarithms are floats")
    start = np.asarray(neutral(kind, dtype)).astype(dtype.np)
    samples = np.asarray([0, 1] if dtype.is_bool else [0, 1, 3, 100], dtype.np)
    if not dtype.is_bool:
        samples = np.append(samples, samples.dtype.type(dtype_end(dtype)))
    combined = COMBINE[kind](np.full_like(samples, start), samples)
    np.testing.assert_array_equal(combined.astype(dtype.np), samples)


def dtype_end(dtype: DType) -> float:
    return -100.0 if dtype.is_float else dtype.limits[0]
