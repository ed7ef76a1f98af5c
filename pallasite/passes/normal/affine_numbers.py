"""affine_numbers: numbers that are affine in the grid indices are written so.

In: quotients, remainders, minima and choices of grid indices, such as the `cdiv((i + 1)
* n, n)` that ends a causal loop, or the sum `i // n * n + i % n` of a flat number that
was taken apart. Out: `i + 1`, `i`. Where such a number is compared with another index,
`j < cdiv((i + 1) * n, m)`, the comparison may be one of positions, `j * m < i * n + n`,
although the number is none. Proof: by enumeration, both are equal at every step. What
is written as an affine form already stays as it is.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import gcd

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
_COMPARED = ("lt", "le", "gt", "ge")
_Sizes = Mapping[int, set[int]]  # of the blocks that an axis counts


def affine_numbers(kernel: Kernel) -> Kernel:
    """The kernel with affine forms for what other ops compute of grid indices."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(grids) != 1:
        return kernel
    whole = Pipeline.of(grids[0])
    maps = [_written_so(each, each.params, whole.grid) for each in whole.maps]
    body = _written_so(whole.body, whole.ids, whole.grid, _sizes(whole))
    pairs = zip((*maps, body), (*whole.maps, whole.body), strict=True)
    if all(new is old for new, old in pairs):
        return kernel
    new = whole.with_(maps=tuple(maps), body=body).to_op()
    return canonicalize(with_pipeline(kernel, new))


def _sizes(whole: Pipeline) -> _Sizes:
    found: dict[int, set[int]] = {axis: {1} for axis in range(len(whole.grid))}
    for index_map, window in zip(whole.maps, whole.windows, strict=True):
        for value, dim in zip(index_map.yields, window.dims, strict=False):
            if value in index_map.params and dim.kind == "blocked":
                found[index_map.params.index(value)].add(dim.size)
    return found


def _written_so(
    block: Block,
    ids: Sequence[Value],
    grid: Sequence[int | None],
    sizes: _Sizes | None = None,
) -> Block:
    found = [op for op in walk(block) if op.name in (*_NUMBERS, *_COMPARED)]
    if not any(op.name in _NUMBERS for op in found):
        return block
    table, forms = StepTable(ids, grid), Forms(ids)
    table.add_ops(block.ops)
    forms.add_ops(block.ops)

    def is_affine(value: Value) -> bool:
        form = forms.of(value).affine
        return form is not None and form.const is not None

    b, same = Builder(), dict[Value, Value]()
    for op in found:
        numbers = table.of(op.result)
        if numbers is None:
            continue
        b.loc = op.loc
        if op.name in _COMPARED:
            if sizes is not None and not all(map(is_affine, op.operands)):
                compared = _compared(b, numbers, ids, sizes)
                same |= {} if compared is None else {op.result: compared}
        elif op.result.tile == INDEX and not is_affine(op.result):
            affine = fitted(numbers)
            if affine is not None:
                same[op.result] = affine_value(b, affine, ids)
    if not same:
        return block
    new = substitute(block, same)
    return Block(block.params, (*b.ops, *new.ops), new.yields)


def _compared(
    b: Builder, which: np.ndarray, ids: Sequence[Value], sizes: _Sizes
) -> Value | None:
    """A comparison of two positions, in blocks of known sizes, that is true where an
    array is; None: there is none."""
    moving = [axis for axis, n in enumerate(which.shape) if n > 1]
    if len(moving) != 2 or which.all() or not which.any():
        return None
    outer, inner = moving
    i, j = (each.astype(np.int64) for each in np.indices(which.shape)[moving])
    for n, m in product(*(sorted(sizes[axis], reverse=True) for axis in moving)):
        n, m = n // gcd(n, m), m // gcd(n, m)
        apart = m * j - n * i
        yes, no = apart[which], apart[~which]
        below = yes.max() < no.min()
        if not below and yes.min() <= no.max():
            continue
        end = int(no.min() if below else yes.min())
        most = max(m * int(j.max()), n * int(i.max()) + abs(end))
        if most > INDEX.dtype.limits[1]:
            continue
        forms = [[0] * len(ids), [0] * len(ids)]
        forms[0][inner], forms[1][outer] = m, n
        x = affine_value(b, Affine(tuple(forms[0]), 0), ids)
        y = affine_value(b, Affine(tuple(forms[1]), end), ids)
        return b.lt(x, y) if below else b.ge(x, y)
    return None


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
