"""affine_numbers: numbers that are affine in the grid indices are written so.

In: quotients, remainders, minima and choices of grid indices, such as the `cdiv((i + 1)
* n, n)` that ends a causal loop, or the sum `i // n * n + i % n` of a flat number that
was taken apart. Out: `i + 1`, `i`. Proof: by enumeration, both are equal at every step.
What is written as an affine form already stays as it is.
"""

from collections.abc import Sequence

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Value, walk
from pallasite.ir.rewrite import substitute
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.affine import Affine, Forms
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.step_table import StepTable
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.narrow_windows import affine_value

# What may be affine although its operands are not, or not known to be.
_NUMBERS = ("div", "rem", "min", "max", "clamp", "select_n", "add", "sub", "mul")


def affine_numbers(kernel: Kernel) -> Kernel:
    """The kernel with affine forms for what other ops compute of grid indices."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(grids) != 1:
        return kernel
    whole = Pipeline.of(grids[0])
    maps = [_written_so(each, each.params, whole.grid) for each in whole.maps]
    body = _written_so(whole.body, whole.ids, whole.grid)
    pairs = zip((*maps, body), (*whole.maps, whole.body), strict=True)
    if all(new is old for new, old in pairs):
        return kernel
    new = whole.with_(maps=tuple(maps), body=body).to_op()
    return canonicalize(with_pipeline(kernel, new))


def _written_so(
    block: Block, ids: Sequence[Value], grid: Sequence[int | None]
) -> Block:
    found = [op for op in walk(block) if op.name in _NUMBERS]
    if not found:
        return block
    table, forms = StepTable(ids, grid), Forms(ids)
    table.add_ops(block.ops)
    forms.add_ops(block.ops)
    b, same = Builder(), dict[Value, Value]()
    for op in found:
        numbers, form = table.of(op.result), forms.of(op.result)
        known = form.affine is not None and form.affine.const is not None
        if numbers is None or known or op.result.tile != INDEX:
            continue
        affine = fitted(numbers)
        if affine is not None:
            b.loc = op.loc
            same[op.result] = affine_value(b, affine, ids)
    if not same:
        return block
    new = substitute(block, same)
    return Block(block.params, (*b.ops, *new.ops), new.yields)


def fitted(numbers: np.ndarray) -> Affine | None:
    """The affine form of the indices of an array that its elements are."""
    if not numbers.size:
        return None
    exact = numbers.astype(np.int64)
    const = int(exact.flat[0])
    coeffs: list[int] = []
    for d, n in enumerate(exact.shape):
        at = tuple(int(d == e) for e in range(exact.ndim))
        coeffs.append(int(exact[at]) - const if n > 1 else 0)
    steps = np.indices(exact.shape, sparse=True)
    same = const + sum(c * s for c, s in zip(coeffs, steps, strict=True))
    fits = np.array_equal(exact, np.broadcast_to(same, exact.shape))
    return Affine(tuple(coeffs), const) if fits else None
