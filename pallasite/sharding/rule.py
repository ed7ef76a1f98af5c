"""`pallas_call(..., partition=...)`: how the author lets a call be partitioned.

None: as the grid and the BlockSpecs allow. False: not at all. A `Partition` names the
dimensions that may be split; with a function for one device's arrays it also covers
kernels whose blocks do not show this. `rule_of` returns the rule of a call.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax

from pallasite.errors import SpecError
from pallasite.ir.nodes import Kernel
from pallasite.language.trace import user_location

if TYPE_CHECKING:
    from pallasite.passes.analysis.partition import PartitionRule

FREE = "*"  # a dimension that must stay whole
Names = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Partition:
    """How a kernel call may be partitioned across devices.

    Args:
        rule: one name per dimension of each operand and result, `*` for dimensions
            that stay whole: `"m k, k n -> m n"`. Dimensions with the same name are
            split the same way.
        local: a function from one device's parts of the operands to its parts of the
            results. Without it the kernel itself is partitioned, and each name must
            stand for a grid axis that can be split.
        sums: names over which the results of `local` must be summed.

    Example:
        >>> import pallasite as pl
        >>> pl.Partition("m k, k n -> m n").operands
        (('m', 'k'), ('k', 'n'))
    """

    rule: str
    local: Callable[..., Any] | None = None
    sums: tuple[str, ...] = ()

    @property
    def operands(self) -> Names:
        return _parse(self.rule)[0]

    @property
    def results(self) -> Names:
        return _parse(self.rule)[1]

    def batched(self, mapped: Sequence[bool]) -> "Partition":
        """The rule of the call under vmap: a new dimension, which may be split."""
        name = f"batch{self.rule.count('batch')}"
        pairs = zip(self.operands, mapped, strict=True)
        operands = [(name, *names) if m else names for names, m in pairs]
        results = [(name, *names) for names in self.results]
        local = self.local
        if local is not None:
            local = _Mapped(local, tuple(0 if m else None for m in mapped))
        return replace(self, rule=_text(operands, results), local=local)


@dataclass(frozen=True)
class Inherited(Partition):
    """The rule of a kernel derived from the author's, such as a derivative: dimensions
    keep their names, and those along which this kernel cannot be split stay whole."""


def inherit(
    given: bool | Partition | None, kernel: Kernel, names: Sequence[Sequence[str]]
) -> bool | Partition | None:
    """`partition=` of a kernel derived from the author's.

    Args:
        given: the author's. If it has a function for one device, that says nothing
            about this kernel, which is then partitioned as its own grid allows.
        kernel: the derived kernel.
        names: the names of the last dimensions of each of its arrays.
    """
    if not isinstance(given, Partition):
        return given
    if given.local is not None:
        return None
    pairs = zip(kernel.params, names, strict=True)
    full = [(*[FREE] * (p.ref.rank - len(own)), *own) for p, own in pairs]
    count = len(kernel.inputs)
    return Inherited(_text(full[:count], full[count:]))


# Classes, not closures: equal calls must compare equal to share compiled code.


@dataclass(frozen=True)
class _Mapped:
    local: Callable[..., Any]
    axes: tuple[int | None, ...]

    def __call__(self, *parts: Any) -> Any:
        return jax.vmap(self.local, in_axes=self.axes)(*parts)


@dataclass(frozen=True)
class _Without:
    """`local` without the operands that are not the author's."""

    local: Callable[..., Any]
    first: int
    last: int

    def __call__(self, *parts: Any) -> Any:
        return self.local(*parts[self.first : self.last])


@lru_cache(maxsize=256)
def _parse(rule: str) -> tuple[Names, Names]:
    left, arrow, right = rule.partition("->")
    if not arrow or "->" in right:
        raise SpecError(
            "a partition rule needs one '->'",
            [("rule", repr(rule))],
            user_location(),
            fix="'m k, k n -> m n': a name or * per dimension of operands and results",
        )
    sides = [tuple(tuple(a.split()) for a in s.split(",")) for s in (left, right)]
    return sides[0], sides[1]


def _text(operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]]) -> str:
    sides = [
        ", ".join(" ".join(names) for names in side) for side in (operands, results)
    ]
    return " -> ".join(sides)


def check(
    given: Any, kernel: Kernel, before: int, operands: int, at: Any
) -> bool | Partition | None:
    """`partition=` as stored in a call, with an entry for every kernel operand.

    Args:
        given: what the author wrote.
        kernel: the kernel.
        before: how many operands come before the author's (sizes of the grid).
        operands: how many operands the author passes.
        at: the author's line.
    """
    if given is None or given is True:
        return None
    if given is False:
        return False
    rule = Partition(given) if isinstance(given, str) else given
    if not isinstance(rule, Partition):
        raise SpecError(
            f"partition must be None, False or a pl.Partition, got {given!r}",
            at=at,
            fix='pl.Partition("i j, j k -> i k"), False for no partitioning, or '
            "remove it",
        )
    shapes = [p.ref.shape for p in kernel.params]
    mine = slice(before, before + operands)
    _check_ranks(rule.operands, shapes[: len(kernel.inputs)][mine], "operand", rule, at)
    _check_ranks(rule.results, shapes[len(kernel.inputs) :], "result", rule, at)
    everything = [(FREE,) * len(s) for s in shapes[: len(kernel.inputs)]]
    everything[mine] = rule.operands
    local = rule.local and _Without(rule.local, before, before + operands)
    full = replace(rule, rule=_text(everything, rule.results), local=local)
    _resolve(full, kernel, at)  # reports errors now, not when XLA calls back
    return full


def _check_ranks(
    names: Names, shapes: Sequence[tuple[int, ...]], what: str, rule: Partition, at: Any
) -> None:
    ranks = [len(s) for s in shapes]
    if [len(n) for n in names] != ranks:
        raise SpecError(
            f"a partition rule needs a name or * per dimension of each {what}",
            [
                ("rule", repr(rule.rule)),
                (f"{what}s", ", ".join(str(s) for s in shapes)),
            ],
            at,
            fix='as many names as the array has dimensions: "i j, j k -> i k"',
        )


def local_of(call: Any) -> Callable[..., Any] | None:
    """The author's function for one device, if the call has one."""
    given = call.partition
    return given.local if isinstance(given, Partition) else None


def rule_of(call: Any) -> "PartitionRule":
    """The rule of a call: the author's, or the one derived from its kernel."""
    given = call.partition
    if isinstance(given, Partition):
        return _resolve(given, call.kernel, call.kernel.loc)
    return _derive(call.kernel)


@lru_cache(maxsize=256)
def _resolve(given: Partition, kernel: Kernel, at: Any) -> "PartitionRule":
    if given.local is not None:
        return _stated(given, kernel, at)
    return _restricted(given, _derive(kernel), at)


def _derive(kernel: Kernel) -> "PartitionRule":
    from pallasite.passes.analysis.partition import derive

    return derive(kernel)


def _restricted(given: Partition, rule: "PartitionRule", at: Any) -> "PartitionRule":
    """The derived rule with only the axes that the author names."""
    if isinstance(given, Inherited):
        return _with_axes(rule, _named_axes(given, rule))
    axis_of: dict[str, int] = {}
    for number, names in enumerate((*given.operands, *given.results)):
        for dim, name in enumerate(names):
            axis = rule.arrays[number].axes[dim]
            if name == FREE:
                continue
            if axis is None or axis not in rule.splittable:
                raise SpecError(
                    f"the kernel cannot be partitioned along {name!r}",
                    [
                        ("rule", repr(given.rule)),
                        ("array", rule.arrays[number].name),
                        ("dimension", dim),
                        ("reason", rule.why_whole(number, dim)),
                    ],
                    at,
                    "write * there, or pass pl.Partition(..., local=function)",
                )
            if axis_of.setdefault(name, axis) != axis:
                raise SpecError(
                    f"{name!r} stands for grid axes {axis_of[name]} and {axis}",
                    [("rule", repr(given.rule)), ("kernel's own", rule)],
                    at,
                    "give dimensions that follow different grid axes different names",
                )
    return _with_axes(rule, set(axis_of.values()))


def _named_axes(given: Partition, rule: "PartitionRule") -> set[int]:
    """Grid axes that some named dimension follows."""
    every = zip((*given.operands, *given.results), rule.arrays, strict=True)
    pairs = [pair for n, a in every for pair in zip(n, a.axes, strict=True)]
    return {axis for name, axis in pairs if name != FREE and axis is not None}


def _with_axes(rule: "PartitionRule", allowed: set[int]) -> "PartitionRule":
    """The rule with only these axes to split."""
    from pallasite.passes.analysis.partition import WHOLE

    reason = "partition= keeps it whole"
    axes = tuple(
        axis if a in allowed else replace(axis, kind=WHOLE, reason=reason)
        for a, axis in enumerate(rule.axes)
    )
    return replace(rule, axes=axes)


def _stated(given: Partition, kernel: Kernel, at: Any) -> "PartitionRule":
    """The rule as the author states it: names stand in for grid axes."""
    from pallasite.passes.analysis.partition import (
        OWN,
        SUM,
        ArrayRule,
        AxisRule,
        PartitionRule,
    )

    every = (*given.operands, *given.results)
    names = list(dict.fromkeys(n for array in every for n in array if n != FREE))
    unknown = [n for n in given.sums if n not in names]
    if unknown:
        raise SpecError(
            f"sums= names {unknown[0]!r}, which is not in the rule",
            [("rule", repr(given.rule))],
            at,
            fix="use names of the rule",
        )
    for name in names:
        if name not in given.sums and any(name not in r for r in given.results):
            raise SpecError(
                f"a result does not have {name!r}, along which the operands are split",
                [("rule", repr(given.rule)), ("sums", given.sums)],
                at,
                f"sums=({name!r},) adds up the devices' results; * keeps it whole",
            )
    shapes = [p.ref.shape for p in kernel.params]

    def size(name: str) -> int:
        pairs = [zip(a, s, strict=True) for a, s in zip(every, shapes, strict=True)]
        return math.gcd(*(n for pair in pairs for found, n in pair if found == name))

    axes = tuple(
        AxisRule(size(n), SUM if n in given.sums else OWN, f"partition= names it {n}")
        for n in names
    )
    arrays = tuple(
        ArrayRule(
            p.name or f"array {number}",
            p.ref.shape,
            tuple(None if n == FREE else names.index(n) for n in array),
            (False,) * len(array),
        )
        for number, (p, array) in enumerate(zip(kernel.params, every, strict=True))
    )
    count = len(kernel.inputs)
    return PartitionRule(kernel, axes, arrays[:count], arrays[count:])
