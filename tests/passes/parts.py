"""Runs a kernel whole and in parts, and compares: what partitioning rests on."""

from itertools import product

import numpy as np

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify
from pallasite.passes.analysis.partition import ArrayRule, PartitionRule, derive
from pallasite.passes.transform.shard import Splits, shard

Arrays = list[np.ndarray]


def run(kernel: Kernel, arrays: Arrays) -> Arrays:
    with np.errstate(all="ignore"):
        results = Walker(kernel, NumpyNumbers()).run([np.array(a) for a in arrays])
    return [np.asarray(r) for r in results]


def pieces(
    array: ArrayRule, splits: Splits, parts: dict[int, int]
) -> tuple[slice, ...]:
    """Where in an array the device with these parts works."""
    found = []
    for size, axis in zip(array.shape, array.axes, strict=True):
        step = size // splits.get(axis, 1)
        first = parts.get(axis, 0) * step if axis in splits else 0
        found.append(slice(first, first + step))
    return tuple(found)


def in_parts(rule: PartitionRule, splits: Splits, arrays: Arrays) -> Arrays:
    """Every device's results, put together or added up."""
    part = shard(rule, splits)
    verify(part.kernel)
    whole = [np.zeros(p.ref.shape, p.ref.dtype.np) for p in rule.kernel.outputs]
    for numbers in product(*(range(n) for n in splits.values())):
        parts = dict(zip(splits, numbers, strict=True))
        operands = [
            a[pieces(r, splits, parts)]
            for a, r in zip(arrays, rule.inputs, strict=True)
        ]
        for axis in part.offset_axes:
            steps = rule.axes[axis].size // splits[axis]
            operands.append(np.asarray(parts[axis] * steps, np.int32))
        for out, r, got in zip(
            whole, rule.outputs, run(part.kernel, operands), strict=True
        ):
            out[pieces(r, splits, parts)] += got
    return whole


def smallest_cut(parts: int) -> int:
    return next(n for n in range(2, parts + 1) if parts % n == 0)


def assert_parts_agree(kernel: Kernel, arrays: Arrays, **tolerance) -> list[Splits]:
    """Split each axis that may be split, then all of them; gives the splits made."""
    rule = derive(kernel)
    every = {a: smallest_cut(rule.axes[a].parts) for a in rule.splittable}
    tried = [{axis: n} for axis, n in every.items()]
    tried += [every] if len(every) > 1 else []
    want = run(kernel, arrays) if tried else []
    for splits in tried:
        for got, expected in zip(in_parts(rule, splits, arrays), want, strict=True):
            summed = any(rule.axes[a].kind == "sum" for a in splits)
            if summed and got.dtype.kind not in "iub":
                np.testing.assert_allclose(
                    got.astype(np.float64), expected.astype(np.float64), **tolerance
                )
            else:
                np.testing.assert_array_equal(got, expected)
    return tried
