"""affine_numbers: numbers that are affine in the grid indices are written so.

In: quotients, remainders, minima and choices of grid indices, such as the `cdiv((i + 1)
* n, n)` that ends a causal loop, or the sum `i // n * n + i % n` of a flat number that
was taken apart. Out: `i + 1`, `i`. A number may not be affine while a comparison with
it has an affine line between true and false, as `j < cdiv((i + 1) * 64, 128)` has: then
what is compared are the sides of the line, `128 j < 64 i + 64`. Proof: by enumeration,
both are equal at every step. What is written as an affine form already stays as it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import producers_of, substitute
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.affine import Affine, Forms
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.step_table import StepTable
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.narrow_windows import affine_value

# What may be affine although its operands are not, or not known to be.
_NUMBERS = ("div", "rem", "min", "max", "clamp", "select_n", "add", "sub", "mul")
# Comparisons, and whether they hold where the left side is less.
_BELOW = {"lt": True, "le": True, "gt": False, "ge": False}


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
    found = [op for op in walk(block) if op.name in (*_NUMBERS, *_BELOW)]
    if not found:
        return block
    table, forms = StepTable(ids, grid), Forms(ids)
    table.add_ops(block.ops)
    forms.add_ops(block.ops)
    b, same = Builder(), dict[Value, Value]()
    lines = _Lines(block, table, forms)
    for op in found:
        b.loc = op.loc
        if op.name in _BELOW:
            test = lines.written(b, op, ids)
            same |= {} if test is None else {op.result: test}
            continue
        numbers = table.of(op.result)
        known = _known(forms, op.result) is not None
        if numbers is None or known or op.result.tile != INDEX:
            continue
        affine = fitted(numbers)
        if affine is not None:
            same[op.result] = affine_value(b, affine, ids)
    if not same:
        return block
    new = substitute(block, same)
    return Block(block.params, (*b.ops, *new.ops), new.yields)


def _known(forms: Forms, value: Value) -> Affine | None:
    """The affine form of a number, if all of it is known."""
    affine = forms.of(value).affine
    return None if affine is None or affine.const is None else affine


class _Lines:
    """Affine lines between the steps at which comparisons hold and the others."""

    def __init__(self, block: Block, table: StepTable, forms: Forms):
        self.table, self.forms = table, forms
        self.made = producers_of(block)

    def written(self, b: Builder, op: Op, ids: Sequence[Value]) -> Value | None:
        """A comparison with a line, instead of with a number that is not affine."""
        if any(v.tile != INDEX for v in op.operands):
            return None
        (x, y), below = op.operands, _BELOW[op.name]
        sides = _known(self.forms, x), _known(self.forms, y)
        if sides[0] is None:
            x, y, sides, below = y, x, sides[::-1], not below
        moving, holds = sides[0], self.table.of(op.result)
        if moving is None or sides[1] is not None or holds is None:
            return None
        here = holds if below else ~holds  # where x is below
        for number, coeffs in self.candidates(y):
            scaled = Affine(tuple(number * c for c in moving.coeffs), 0)
            line = _line(here, scaled, Affine(coeffs, 0))
            if line is None:
                continue
            scaled = replace(scaled, const=number * (moving.const or 0))
            line = replace(line, const=(line.const or 0) + (scaled.const or 0))
            if all(_fits(each, holds.shape) for each in (scaled, line)):
                left, right = (affine_value(b, each, ids) for each in (scaled, line))
                return b.op("lt" if below else "ge", left, right)
        return None

    def candidates(self, value: Value) -> Iterator[tuple[int, tuple[int, ...]]]:
        """By what to multiply, and rates of the line: of numbers that it is made of."""
        numbers, rates = {1: None}, dict[tuple[int, ...], None]()
        seen, pending = set[Value](), [value]
        while pending:
            each = pending.pop()
            if each in seen:
                continue
            seen.add(each)
            affine, op = _known(self.forms, each), self.made.get(each)
            if affine is not None and not affine.is_fixed:
                rates[affine.coeffs] = None
                rates[tuple(-c for c in affine.coeffs)] = None
            if op is not None and op.name == "div":
                by = _known(self.forms, op.operands[1])
                if by is not None and by.is_fixed and (by.const or 0) > 1:
                    numbers[by.const or 1] = None
            pending += op.operands if op is not None else ()
        return product(numbers, rates)


def _line(below: np.ndarray, x: Affine, rates: Affine) -> Affine | None:
    """`rates + const` such that x is less where a table says so, and only there."""
    shape = below.shape
    gap = np.broadcast_to(_numbers(x, shape) - _numbers(rates, shape), shape)
    if below.all() or not below.any():
        return None  # what is known is no comparison
    const = int(gap[~below].min())
    return replace(rates, const=const) if int(gap[below].max()) < const else None


def _numbers(affine: Affine, shape: Sequence[int]) -> np.ndarray:
    steps = np.indices(shape, sparse=True)
    parts = (c * s for c, s in zip(affine.coeffs, steps, strict=True))
    return sum(parts, np.array(affine.const or 0, np.int64))


def _fits(affine: Affine, shape: Sequence[int]) -> bool:
    """Whether a number, and every sum on the way to it, is an index."""
    most = sum(abs(c) * (n - 1) for c, n in zip(affine.coeffs, shape, strict=True))
    return most + abs(affine.const or 0) < 1 << 31


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
