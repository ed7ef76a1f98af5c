"""How a kernel may be partitioned over devices, from its grid and its windows.

`derive(kernel)` determines for each grid axis whether its steps may be distributed:
either each step writes its own blocks ("own"), or the outputs are sums over it ("sum");
for each array, which dimension follows which axis; and for the rest, why not.
`shard.py` makes the kernel that one device runs. `docs/sharding.md` shows the printed
form.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import lcm

import numpy as np

from pallasite.ir.nodes import Kernel, Value, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.affine import Affine
from pallasite.passes.analysis.block_table import evaluate_map
from pallasite.passes.analysis.grid import GridInfo, analyze, find_pipeline
from pallasite.passes.analysis.sums import Sums, find_sums
from pallasite.passes.normal.canonicalize import canonicalize

OWN, SUM, WHOLE = "own", "sum", "whole"


@dataclass(frozen=True)
class AxisRule:
    """How devices may share one grid axis."""

    size: int | None
    kind: str  # OWN, SUM or WHOLE
    reason: str
    granule: int = 1  # steps that must stay together
    # Comparisons with its first or last step that become a device's own: their results.
    gates: Mapping[Value, str] = field(default_factory=dict[Value, str])

    @property
    def parts(self) -> int:
        """The largest number of parts it can be split into."""
        if self.kind == WHOLE or self.size is None:
            return 1
        return self.size // self.granule


@dataclass(frozen=True)
class ArrayRule:
    """Which grid axis each dimension of an array follows (None: none)."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    whole: tuple[bool, ...]  # a block has all of this dimension

    def __str__(self) -> str:
        names = ("*" if a is None else f"i{a}" for a in self.axes)
        return f"{self.name}[{', '.join(names)}]"


@dataclass(frozen=True)
class PartitionRule:
    """What `derive` found: axes of a kernel's grid, arrays that follow them."""

    kernel: Kernel  # canonical: the one to partition
    axes: tuple[AxisRule, ...]
    inputs: tuple[ArrayRule, ...]
    outputs: tuple[ArrayRule, ...]
    pulls_back: bool = False  # parts add to outputs that do not follow their axis

    @property
    def arrays(self) -> tuple[ArrayRule, ...]:
        return (*self.inputs, *self.outputs)

    @property
    def splittable(self) -> tuple[int, ...]:
        return tuple(a for a, axis in enumerate(self.axes) if axis.parts > 1)

    def is_summed(self, output: ArrayRule, axis: int) -> bool:
        """Whether an output is the sum over the parts of an axis."""
        adds = self.pulls_back or self.axes[axis].kind == SUM
        return adds and axis not in output.axes

    def why_whole(self, array: int, dim: int) -> str:
        """Why a dimension of an array cannot be partitioned."""
        axis = self.arrays[array].axes[dim]
        if axis is not None:
            return self.axes[axis].reason
        if self.arrays[array].whole[dim]:
            return "every program gets all of it"
        return "it does not follow a grid axis block by block"

    def __str__(self) -> str:
        operands = ", ".join(map(str, self.inputs))
        lines = [f"{operands} -> {', '.join(map(str, self.outputs))}"]
        for number, axis in enumerate(self.axes):
            line = f"  axis {number}  {axis.kind:<5}  {axis.reason}"
            if axis.granule > 1:
                line += f" (in groups of {axis.granule} steps)"
            lines.append(line)
        return "\n".join(lines)


@lru_cache(maxsize=256)
def derive(kernel: Kernel) -> PartitionRule:
    """The partitioning rule of a kernel whose body is one pipeline."""
    return _Derivation(canonicalize(kernel)).rule()


def pull_back_rule(
    rule: PartitionRule, wanted: Sequence[bool], known: Sequence[bool]
) -> PartitionRule:
    """The rule of the kernel from operands and cotangents of results to cotangents.

    A cotangent is sharded like its primal. Every part of an axis adds to the cotangent
    of an operand that all of them use.

    Args:
        rule: the kernel's own.
        wanted: operands whose cotangents are computed.
        known: results whose cotangents are given.
    """
    given = [a for a, k in zip(rule.outputs, known, strict=True) if k]
    made = [a for a, w in zip(rule.inputs, wanted, strict=True) if w]
    return replace(
        rule, inputs=(*rule.inputs, *given), outputs=tuple(made), pulls_back=True
    )


@dataclass(frozen=True)
class _Follows:
    """A dimension advances by one block every `granule` steps of `axis`, or by as many
    blocks per step as the axis `within` has steps."""

    axis: int
    granule: int = 1
    within: int | None = None


class _Derivation:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.pipeline = Pipeline.of(find_pipeline(kernel))
        self.info: GridInfo = analyze(kernel)
        self.grid = self.pipeline.grid
        arrays = self.pipeline.arrays
        self.windows_of: dict[Value, list[int]] = {}
        for number, array in enumerate(arrays):
            self.windows_of.setdefault(array, []).append(number)
        for array in {v for op in walk(self.pipeline.body) for v in op.operands}:
            self.windows_of.pop(array, None)  # programs see all of it besides
        self.block_of = dict(zip(arrays, self.pipeline.blocks, strict=True))

    def rule(self) -> PartitionRule:
        follows = {p: self.follows(p) for p in self.kernel.params}
        for i, o in self.kernel.aliases:
            operand, result = self.kernel.inputs[i], self.kernel.outputs[o]
            if follows[operand] != follows[result]:  # one buffer has one sharding
                nothing = (None,) * len(follows[result])
                follows[operand] = follows[result] = nothing
        axes = tuple(self.axis(a, follows) for a in range(len(self.grid)))
        arrays = tuple(
            ArrayRule(
                p.name or f"array {n}",
                p.ref.shape,
                tuple(f.axis if f is not None else None for f in follows[p]),
                self.whole(p),
            )
            for n, p in enumerate(self.kernel.params)
        )
        count = len(self.kernel.inputs)
        return PartitionRule(self.kernel, axes, arrays[:count], arrays[count:])

    # --- arrays ---

    def follows(self, param: Value) -> tuple[_Follows | None, ...]:
        """What each dimension follows in all windows on an array."""
        nothing = (None,) * param.ref.rank
        each = [self.shown(param, n) for n in self.windows_of.get(param, ())]
        same = (fs[0] if len({*fs}) == 1 else None for fs in zip(*each, strict=True))
        return tuple(same) if each else nothing

    def shown(self, param: Value, number: int) -> tuple[_Follows | None, ...]:
        window = self.pipeline.windows[number]
        found: list[_Follows | None] = []
        position = 0  # among the index map's yields
        for block, size in zip(window.dims, param.ref.shape, strict=True):
            match = None
            if block.kind in ("blocked", "squeezed"):
                match = self.match(number, position, size, block.size)
            taken = {f.axis for f in found if f is not None}
            found.append(None if match is None or match.axis in taken else match)
            position += 2 if block.kind == "bounded" else 1
        return tuple(found)

    def whole(self, param: Value) -> tuple[bool, ...]:
        windows = [self.pipeline.windows[n] for n in self.windows_of.get(param, ())]
        return tuple(
            all(w.dims[d].size >= n for w in windows)
            for d, n in enumerate(param.ref.shape)
        )

    def match(
        self, number: int, position: int, size: int, block: int
    ) -> _Follows | None:
        """Whether a dimension's blocks are exactly those of an axis, in order."""
        form = self.info.windows[number].forms[position]
        if len(form.axes) == 2 and form.affine is not None and size % block == 0:
            return self.match_two(form.axes, form.affine, size // block)
        if len(form.axes) != 1:
            return None
        (axis,) = form.axes
        steps = self.grid[axis]
        if steps is None or steps < 2 or size % block or not size:
            return None
        blocks = size // block
        if blocks < 2 or steps % blocks:
            return None
        affine, granule = form.affine, steps // blocks
        if affine is not None:
            unit = tuple(int(a == axis) for a in range(len(self.grid)))
            exact = granule == 1 and affine.coeffs == unit and affine.const == 0
            return _Follows(axis) if exact else None
        ids = np.zeros((len(self.grid), steps), np.int32)
        ids[axis] = np.arange(steps)
        values = evaluate_map(self.pipeline.maps[number], ids)
        if values is None or np.any(values[position] != ids[axis] // granule):
            return None
        return _Follows(axis, granule)

    def match_two(
        self, axes: Iterable[int], affine: Affine, blocks: int
    ) -> _Follows | None:
        """Whether two axes index the blocks like two digits."""
        inner, outer = sorted(axes, key=lambda a: affine.coeffs[a])
        high, low = self.grid[outer], self.grid[inner]
        if high is None or low is None or affine.const != 0 or high * low != blocks:
            return None
        if affine.coeffs[inner] != 1 or affine.coeffs[outer] != low:
            return None
        return _Follows(outer, within=inner)

    # --- axes ---

    def axis(
        self, axis: int, follows: dict[Value, tuple[_Follows | None, ...]]
    ) -> AxisRule:
        size = self.grid[axis]
        if size is None:
            return AxisRule(size, WHOLE, "its size is known only at run time")
        if size < 2:
            return AxisRule(size, WHOLE, "it has one step")
        for f in (f for fs in follows.values() for f in fs):
            if f is not None and f.within == axis:
                reason = f"blocks along it stay together, one step of axis {f.axis}"
                return AxisRule(size, WHOLE, reason)
        steps = [
            f.granule for fs in follows.values() for f in fs if f and f.axis == axis
        ]
        if not steps:
            return AxisRule(size, WHOLE, "no array is divided into blocks along it")
        rule = AxisRule(size, OWN, self.info.axes[axis].reason, lcm(*steps))
        loose = [
            p
            for p in self.kernel.outputs
            if not any(f is not None and f.axis == axis for f in follows[p])
        ]
        if not loose:
            if self.info.axes[axis].parallel:
                return rule
            return replace(rule, kind=WHOLE)
        sums = self.sums(axis, loose)
        if sums.reason is not None:
            return replace(rule, kind=WHOLE, reason=sums.reason)
        names = ", ".join(p.name or "an output" for p in loose)
        verb = "is a sum" if len(loose) == 1 else "are sums"
        return replace(
            rule, kind=SUM, reason=f"{names} {verb} over it", gates=sums.gates
        )

    def sums(self, axis: int, loose: Sequence[Value]) -> Sums:
        for param in loose:
            if param not in self.block_of:
                return Sums(f"{param.name or 'an output'} has no blocks")
        if self.kernel.aliases:
            name = loose[0].name or "an output"
            return Sums(f"{name} has no blocks along it, and memory is aliased")
        blocks = {self.block_of[p] for p in loose}
        return find_sums(self.pipeline.op, self.info, axis, blocks)
