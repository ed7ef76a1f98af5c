"""How integer code depends on the grid indices: affine forms and ranges.

`Forms` walks the ops of a block and gives each integer value a `Form`: which axes it
may depend on and, if it is affine, the sum `const + coefficient * index + ...`. Grid
analysis (`grid.py`) uses them for block indices and store indices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np

from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.types import TileType

_INDEX_BITS = 32  # of grid indices and results of index maps
Sizes = Sequence[int | None]  # per axis; None: known only at run time


@dataclass(frozen=True)
class Affine:
    """`const + sum(coeffs[a] * index[a])`; const None: unknown but invariant."""

    coeffs: tuple[int, ...]
    const: int | None = 0

    @property
    def is_fixed(self) -> bool:
        return not any(self.coeffs)

    @property
    def number(self) -> int | None:
        return self.const if self.is_fixed else None

    def plus(self, other: "Affine", sign: int = 1) -> "Affine":
        pairs = zip(self.coeffs, other.coeffs, strict=True)
        known = self.const is not None and other.const is not None
        const = self.const + sign * other.const if known else None  # type: ignore[operator]
        return Affine(tuple(a + sign * b for a, b in pairs), const)

    def times(self, factor: int) -> "Affine":
        const = None if self.const is None else self.const * factor
        return Affine(tuple(c * factor for c in self.coeffs), const)

    def range(self, sizes: Sizes) -> tuple[float, float]:
        """The minimum and maximum over the grid."""
        if self.const is None:
            return -inf, inf
        low = high = float(self.const)
        for c, n in zip(self.coeffs, sizes, strict=True):
            reach = c * (max(n - 1, 0) if isinstance(n, int) else inf) if c else 0
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high

    def __str__(self) -> str:
        terms = [_term(c, f"i{a}") for a, c in enumerate(self.coeffs) if c]
        if self.const is None:
            terms.append("?")
        elif self.const or not terms:
            terms.append(str(self.const))
        return " + ".join(terms).replace("+ -", "- ")


def _term(coefficient: int, name: str) -> str:
    return {1: name, -1: f"-{name}"}.get(coefficient, f"{coefficient}*{name}")


@dataclass(frozen=True)
class Form:
    """What is known about one integer value; for a tile, about all its elements.

    `affine` is None where the value is not a sum of multiples of grid indices. Elements
    of a tile are at least that sum and at most `spread` above it.
    """

    axes: frozenset[int]
    affine: Affine | None = None
    spread: int = 0

    def __str__(self) -> str:
        if self.affine is None:
            return f"f({', '.join(f'i{a}' for a in sorted(self.axes))})"
        return str(self.affine)


class Forms:
    """Forms of the values of one block, seeded with its grid indices."""

    def __init__(self, ids: Sequence[Value], outer: Mapping[Value, Form] | None = None):
        self.rank = len(ids)
        self.known: dict[Value, Form] = dict(outer or {})
        for axis, value in enumerate(ids):
            coeffs = tuple(int(a == axis) for a in range(self.rank))
            self.known[value] = Form(frozenset([axis]), Affine(coeffs))

    def of(self, value: Value) -> Form:
        """Values from outside the block are unknown but the same at every step."""
        return self.known.get(value) or self.fixed(None)

    def fixed(self, const: int | None) -> Form:
        return Form(frozenset(), Affine((0,) * self.rank, const))

    def anything(self) -> Form:
        return Form(frozenset(range(self.rank)))

    def add_ops(self, ops: Iterable[Op], loads_vary: bool = True) -> None:
        """Process ops, in order. `loads_vary`: memory may change from step to step."""
        for op in ops:
            form = self._form(op, loads_vary)
            for result in op.results:
                self.known[result] = form
            for region in op.regions:
                for param in region.params:
                    self.known[param] = self.anything()
                self.add_ops(region.ops, loads_vary)

    def _form(self, op: Op, loads_vary: bool) -> Form:
        if op.name == "constant":
            value = op.attrs["value"]
            return self.fixed(value if isinstance(value, int) else None)
        if op.name == "iota":
            tile: TileType = op.attrs["type"]
            spread = tile.shape[op.attrs["dim"]] - 1
            return replace(self.fixed(0), spread=max(spread, 0))
        if op.regions or (op.name == "load" and loads_vary):
            inside = (op, *self._inside(op))
            used = [v for o in inside for v in o.operands]
            used += [v for o in inside for r in o.regions for v in r.yields]
            axes = frozenset[int]().union(*(self.of(v).axes for v in used))
            return self.anything() if op.name == "load" else self._opaque(axes)
        operands = [self.of(v) for v in op.operands]
        axes = frozenset[int]().union(*(f.axes for f in operands))
        rule = _RULES.get(op.name)
        integer = all(
            isinstance(r.type, TileType) and r.type.dtype.is_integer for r in op.results
        )
        form = rule(operands) if rule and integer and not _narrows(op) else None
        if form is None and all(f.affine and not f.spread for f in operands):
            form = self._folded(op, operands)
        return form or self._opaque(axes)

    def _inside(self, op: Op) -> Iterable[Op]:
        return (o for region in op.regions for o in walk(region))

    def _opaque(self, axes: frozenset[int]) -> Form:
        if axes:
            return Form(axes)
        return Form(axes, Affine((0,) * self.rank, None), 0)

    def _folded(self, op: Op, operands: Sequence[Form]) -> Form | None:
        numbers = [f.affine.number if f.affine else None for f in operands]
        result = fold_scalar(op, numbers)
        return None if result is None else self.fixed(int(result))


def moving_axes(index_map: Block) -> frozenset[int]:
    """The axes along which an index map may show another block."""
    forms = Forms(index_map.params)
    forms.add_ops(index_map.ops, loads_vary=False)
    return frozenset[int]().union(*(forms.of(v).axes for v in index_map.yields))


def _narrows(op: Op) -> bool:
    """Whether a cast may lose bits, so that distinct numbers become equal."""
    if op.name != "cast":
        return False
    before, after = op.operands[0].tile.dtype, op.result.tile.dtype
    return not before.is_integer or after.bits < min(before.bits, _INDEX_BITS)


def fold_scalar(op: Op, operands: Sequence[int | bool | None]) -> int | bool | None:
    """The integer or bool result of an elementwise scalar op, if known."""
    if op.name not in ("and", "or") and None in operands:
        return None
    return _folded(op, tuple(operands))


# The same numbers are asked for again: once per ref, axis and candidate of a schedule.
@lru_cache(maxsize=4096)
def _folded(op: Op, operands: tuple[int | bool | None, ...]) -> int | bool | None:
    if op.name in ("and", "or") and op.result.tile.dtype.is_bool:
        decides = op.name == "or"
        if any(n is decides for n in operands):
            return decides
    found = fold_columns(op, operands)
    result = None if found is None else found.item()
    return result if isinstance(result, (bool, int)) else None


def fold_columns(op: Op, operands: Sequence[Any]) -> np.ndarray | None:
    """The same of arrays of numbers for each operand, all of a length, or of one."""
    if any(n is None for n in operands):
        return None
    row = table().get(op.name)
    if row is None or not row.elementwise or row.meaning is None or not op.operands:
        return None
    types = [v.type for v in (*op.operands, *op.results)]
    if any(not isinstance(t, TileType) or t.shape or t.dtype.is_float for t in types):
        return None
    arrays = [
        np.asarray(n).astype(v.tile.dtype.np)
        for n, v in zip(operands, op.operands, strict=True)
    ]
    with np.errstate(all="ignore"):
        return np.asarray(row.meaning(*arrays, **op.own_attrs))


def _sum(sign: int):
    def rule(operands: Sequence[Form]) -> Form | None:
        x, y = operands
        if x.affine is None or y.affine is None or (sign < 0 and y.spread):
            return None
        affine = x.affine.plus(y.affine, sign)
        return Form(x.axes | y.axes, affine, x.spread + y.spread)

    return rule


def _product(operands: Sequence[Form]) -> Form | None:
    x, y = operands
    for form, other in ((x, y), (y, x)):
        factor = other.affine.number if other.affine and not other.spread else None
        if form.affine is not None and factor is not None:
            if factor < 0 and form.spread:
                return None
            return Form(form.axes, form.affine.times(factor), form.spread * factor)
    return None


def _negated(operands: Sequence[Form]) -> Form | None:
    (x,) = operands
    if x.affine is None or x.spread:
        return None
    return Form(x.axes, x.affine.times(-1))


def _same(operands: Sequence[Form]) -> Form | None:
    return operands[0]


_RULES = {
    "add": _sum(1),
    "sub": _sum(-1),
    "mul": _product,
    "neg": _negated,
    "cast": _same,
    "assume_multiple": _same,
    "broadcast_in_dim": _same,
    "reshape": _same,
    "transpose": _same,
}


def recoverable(
    forms: Iterable[tuple[Affine | None, int]], sizes: Sizes
) -> frozenset[int]:
    """The axes whose index can be recovered from the values of `forms`.

    Each form has a slack: its value is known only to within that much. An index can be
    recovered from `c * index + rest` if the rest spans fewer than `c` numbers.
    """
    forms = [(f, slack) for f, slack in forms if f is not None]
    found = {axis for axis, n in enumerate(sizes) if n == 1}
    before = -1
    while len(found) != before:
        before = len(found)
        for affine, slack in forms:
            found |= _peel(affine, slack, sizes, found)
    return frozenset(found)


def _peel(affine: Affine, slack: int, sizes: Sizes, found: set[int]) -> set[int]:
    """Axes recovered from one form, largest coefficient first."""
    rest = sorted((abs(c), a) for a, c in enumerate(affine.coeffs) if c)
    rest = [(c, a) for c, a in rest if a not in found]
    new: set[int] = set()
    while rest:
        step, axis = rest.pop()
        reach = slack + sum(c * ((sizes[a] or inf) - 1) for c, a in rest)
        if step <= reach:
            break
        new.add(axis)
    return new
