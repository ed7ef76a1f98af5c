"""The kernel that one device runs when grid axes are split over devices.

`shard(rule, splits)` is the rule's kernel over parts of its arrays: smaller refs, a
smaller grid, the same blocks. Its body still sees global program ids: a device's first
step is an extra scalar operand for each axis that needs it. Windows that are split use
local ids; comparisons that start or end a sum use the device's own steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, Window, walk
from pallasite.ir.rewrite import Rewriter, dead_code, inline, map_ops, substitute
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.partition import ArrayRule, PartitionRule
from pallasite.passes.analysis.sums import LAST

Splits = Mapping[int, int]  # grid axis -> number of parts


@dataclass(frozen=True)
class Shard:
    """A kernel for one device's part.

    Its operands are the parts, then one int32 scalar per axis in `offset_axes`: the
    device's first step along it.
    """

    kernel: Kernel
    offset_axes: tuple[int, ...]


def shard(rule: PartitionRule, splits: Splits) -> Shard:
    """Split the axes of `splits` into that many parts each."""
    return _Sharding(rule, splits).result()


def local_shape(array: ArrayRule, splits: Splits) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    pairs = zip(array.shape, array.axes, strict=True)
    return tuple(n if a is None else n // splits.get(a, 1) for n, a in pairs)


class _Sharding:
    def __init__(self, rule: PartitionRule, splits: Splits):
        self.kernel, self.rule, self.splits = rule.kernel, rule, splits
        self.old = Pipeline.of(find_pipeline(self.kernel))
        self.rules = dict(zip(self.kernel.params, rule.arrays, strict=True))
        self.arrays = {
            p: Value(p.ref.with_shape(local_shape(r, splits)), p.name)
            for p, r in self.rules.items()
        }
        scalar = T.RefType((), T.I32, "smem")
        self.offsets = {a: Value(scalar, f"first_step{a}") for a in sorted(splits)}

    def result(self) -> Shard:
        pipeline = self.pipeline()
        ops = [pipeline if op is self.old.op else op for op in self.kernel.body.ops]
        body = substitute(Block((), tuple(ops)), self.arrays)
        kernel = dead_code(self.kernel.with_(body=body))
        used = {v for op in walk(kernel.body) for v in op.operands}
        axes = tuple(a for a, ref in self.offsets.items() if ref in used)
        params = (
            *(self.arrays[p] for p in self.kernel.inputs),
            *(self.offsets[a] for a in axes),
            *(self.arrays[p] for p in self.kernel.outputs),
        )
        return Shard(kernel.with_(params=params), axes)

    def pipeline(self) -> Op:
        maps = tuple(
            self.index_map(each.index_map, each.window, self.rules[each.array].axes)
            for each in self.old.shown
        )
        grid = tuple(
            n if n is None else n // self.splits.get(a, 1)
            for a, n in enumerate(self.old.grid)
        )
        return self.old.with_(grid=grid, maps=maps, body=self.body()).to_op()

    def global_ids(self, builder: Builder, ids: Sequence[Value]) -> list[Value]:
        """Program ids of the whole kernel; `dead_code` drops unused ones."""
        found = list(ids)
        for axis, ref in self.offsets.items():
            found[axis] = builder.add(ids[axis], builder.load(ref))
        return found

    def index_map(
        self, region: Block, window: Window, axes: Sequence[int | None]
    ) -> Block:
        """Split dimensions are indexed by local ids, all others by global ones."""
        builder = Builder()
        here = inline(builder, region, region.params)
        everywhere = inline(builder, region, self.global_ids(builder, region.params))
        yields: list[Value] = []
        for dim, axis in zip(window.dims, axes, strict=True):
            source = here if axis in self.splits else everywhere
            for _ in range(2 if dim.kind == "bounded" else 1):
                yields.append(source[len(yields)])
        return builder.block(region.params, yields)

    def body(self) -> Block:
        """The body over global ids, except in the comparisons that guard sums."""
        body, ids = self.old.body, self.old.ids
        builder = Builder()
        everywhere = self.global_ids(builder, ids)
        gates = {
            gate: (ids[axis], end, axis)
            for axis in self.splits
            for gate, end in self.rule.axes[axis].gates.items()
        }

        def keep_local(op: Op, b: Rewriter) -> Value | None:
            found = [gates[v] for v in op.results if v in gates]
            if not found:
                return None
            ((index, end, axis),) = found
            size = self.rule.axes[axis].size or 1
            step = size // self.splits[axis] - 1 if end == LAST else 0
            return b.eq(index, b.index(step))

        inner = substitute(body, dict(zip(ids, everywhere, strict=True)))
        inner = map_ops(inner, keep_local)
        return Block(body.params, (*builder.ops, *inner.ops), inner.yields)
