"""What an author promises about the integers in a kernel's operands.

`assume={"table_ref": range(0, 64)}` says that every element of the operand that the
kernel calls `table_ref` is in the range; a number names an operand by its position.
What the kernel loads from it is then known to be in the range, unless the kernel writes
to it or a block shows what is past the operand's edge. An array instead of a range is
what the operand holds: what is loaded from known places is then known exactly.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np

from pallasite.errors import SpecError
from pallasite.ir.nodes import Access, Kernel, Op, Value, Window, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.intervals import Fact, Facts
from pallasite.passes.analysis.memory import Roots, constant_inputs

Assumed = Mapping[str | int, Any]  # ranges, or arrays of integers


def check_ranges(assume: Assumed) -> None:
    """Reject what says nothing about integers."""
    for name, values in assume.items():
        is_range = isinstance(values, range) and len(values) and values.step > 0
        dtype = getattr(values, "dtype", None)
        if not is_range and (dtype is None or not np.issubdtype(dtype, np.integer)):
            raise SpecError(
                "assume takes a range or an array of integers for each operand",
                [("operand", name), ("got", repr(values))],
                fix=f"assume={{{name!r}: range(0, n)}}: from 0 to n - 1; "
                "range(0, n, 8): multiples of 8",
            )


def check_names(assume: Assumed, kernels: Iterable[Kernel]) -> None:
    """Reject a name that no kernel's operand of integers has."""
    known = {n: p for kernel in kernels for n, p in _integers(kernel)}
    for name in assume:
        if name not in known:
            raise SpecError(
                f"no kernel has an operand of integers called {name!r}",
                [("operands of integers", ", ".join(map(str, known)) or "none")],
                fix="name the kernel's parameter, or number the operand from 0",
            )


def _integers(kernel: Kernel) -> Iterator[tuple[str | int, Value]]:
    """The operands of integers, by name and by number."""
    for number, param in enumerate(kernel.inputs):
        if param.ref.dtype.is_integer and not param.ref.is_semaphore:
            yield number, param
            if param.name:
                yield param.name, param


class Given:
    """What holds of one kernel's loads."""

    def __init__(self, kernel: Kernel, assume: Assumed | None = None):
        known = assume or {}
        found = {p: known[n] for n, p in _integers(kernel) if n in known}
        self.kernel = kernel
        self.tables = {
            p: _table(p, given)
            for p, given in found.items()
            if not isinstance(given, range)
        }
        self.ranges = {
            p: given if p not in self.tables else _range_of(self.tables[p])
            for p, given in found.items()
        }

    @property
    def text(self) -> tuple[str, ...]:
        """The promises about this kernel, for people."""
        inputs = self.kernel.inputs
        return tuple(
            _shown(
                p.name or f"operand {inputs.index(p)}",
                None if p in self.tables else values,
            )
            for p, values in self.ranges.items()
        )

    def example(self, param: Value) -> np.ndarray:
        """What an operand of integers may hold: zeros, if these may be."""
        if param in self.tables:
            return self.tables[param].copy()
        values = self.ranges.get(param, range(1))
        number = 0 if 0 in values else values[0]
        return np.full(param.ref.shape, number, param.ref.dtype.np)

    def contents(self, ref: Value) -> np.ndarray | None:
        """What an operand holds at any time, if that is known."""
        return self.tables.get(ref) if ref in self._memory[1] else None

    def loaded(self, op: Op, facts: Facts) -> Fact | None:
        """What is known of a load's elements."""
        if not self.ranges:
            return None
        access, (roots, constant, _) = Access.of(op), self._memory
        values = self.ranges.get(roots.of(access.ref))
        is_whole = self._shows_only_elements(access.ref)
        if values is None or roots.of(access.ref) not in constant or not is_whole:
            return None
        found = Fact(values[0], values[-1], gcd(values.start, values.step))
        if access.mask is None:
            return found
        if access.other is None:
            return None
        other = facts.of(access.other)
        low, high = min(found.low, other.low), max(found.high, other.high)
        return Fact(low, high, gcd(found.multiple, other.multiple))

    def _shows_only_elements(self, ref: Value) -> bool:
        """Whether a ref shows elements of its root, as they are and nothing else."""
        roots, _, hanging = self._memory
        dtype = ref.ref.dtype
        while ref in roots.parent:
            if ref in hanging or ref.ref.dtype != dtype:
                return False
            ref = roots.parent[ref]
        return ref.ref.dtype == dtype

    @cached_property
    def _memory(self) -> tuple[Roots, frozenset[Value], set[Value]]:
        hanging = {
            each.block
            for op in walk(self.kernel.body)
            if op.name == "pipeline"
            for each in Pipeline.of(op).shown
            if _hangs(each.window, each.array)
        }
        return Roots(self.kernel), constant_inputs(self.kernel), hanging


def _hangs(window: Window, array: Value) -> bool:
    return window.may_hang_over(array.ref.shape)


def _table(param: Value, given: Any) -> np.ndarray:
    if np.shape(given) != param.ref.shape:
        raise SpecError(
            f"assume has an array of another shape for {param.name or 'an operand'}",
            [("operand", param.ref.tile), ("given", list(np.shape(given)))],
            fix="give what the operand holds, or a range",
        )
    return np.asarray(given, param.ref.dtype.np)


def _range_of(table: np.ndarray) -> range:
    if not table.size:
        return range(1)
    return range(int(table.min()), int(table.max()) + 1)


def _shown(name: str, values: range | None) -> str:
    if values is None:
        return f"{name} as it is"
    step = f" step {values.step}" if values.step != 1 else ""
    return f"{name} in {values.start}:{values.stop}{step}"
