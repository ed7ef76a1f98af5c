"""Whether a rewritten kernel computes what it did, and without new bugs."""

import numpy as np

import pallasite as pl
from pallasite.interpret import Walker
from pallasite.interpret.checked import run_checked
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify


def operands(kernel: Kernel, seed: int = 0) -> list[np.ndarray]:
    """Random operands: floats, and integers that are likely to be valid indices."""
    rng = np.random.default_rng(seed)

    def one(ref):
        if ref.dtype.is_float:
            return rng.standard_normal(ref.shape).astype(ref.dtype.np)
        return rng.integers(0, 4, ref.shape).astype(ref.dtype.np)

    return [one(p.ref) for p in kernel.inputs]


def outputs(kernel: Kernel, arrays: list[np.ndarray]) -> list[np.ndarray]:
    copies = [array.copy() for array in arrays]
    with np.errstate(all="ignore"):
        return [np.asarray(out) for out in Walker(kernel, NumpyNumbers()).run(copies)]


def assert_same_meaning(
    kernel: Kernel,
    new: Kernel,
    arrays: list[np.ndarray] | None = None,
    checked: bool = True,
) -> None:
    """Both give the same; `checked`: checked mode finds nothing in the new one."""
    verify(new)
    arrays = operands(kernel) if arrays is None else arrays
    for a, b in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        np.testing.assert_array_equal(a, b)
    if checked:
        run_checked(new, [array.copy() for array in arrays], pl.Checked())
