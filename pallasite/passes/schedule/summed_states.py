"""summed_states: sums that are added up at the end are kept added up.

In: scratch to which steps add tiles, and of which the last step uses only the sum along
some dimensions, as one keeps a sum in the lanes of a vector. Out: scratch of size one
along these dimensions; each step adds the sum of its tile. Parts of the steps then hand
on a number each, not a tile. Sums are taken in another order.

For GPUs: a TPU adds vectors in one instruction, and sums along one take several.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Access, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops, producers_of, users_of
from pallasite.ir.roles import number_of
from pallasite.passes.analysis.carried import accesses_all


def summed_states(kernel: Kernel) -> Kernel:
    """Shrink each such scratch."""
    before = kernel
    for op in walk(before.body):
        if op.name == "alloc" and op.result.ref.dtype.is_float:
            axes = _summed_axes(kernel, op.result)
            if axes is not None:
                kernel = map_ops(kernel, _Summed(op.result, axes).rewritten)
    return kernel if kernel is before else dead_code(kernel)


def _summed_axes(kernel: Kernel, ref: Value) -> tuple[int, ...] | None:
    """The dimensions along which all of it is summed before anything else is done."""
    made, users = producers_of(kernel.body), users_of(kernel.body)
    uses = [op for op in walk(kernel.body) if ref in op.operands]
    if not all(map(accesses_all, uses)):
        return None
    olds = set[Op]()
    for store in (op for op in uses if op.name == "store"):
        value = Access.of(store).value
        assert value is not None
        if number_of(made, value) == 0:
            continue
        add = made.get(value)
        old = add and next(
            (o for v in add.operands if (o := made.get(v)) in uses), None
        )
        if add is None or add.name != "add" or old is None:
            return None
        if users[old.result] != [add] or users[value] != [store]:
            return None
        olds.add(old)
    sums = [
        u for o in uses if o.name == "load" and o not in olds for u in users[o.result]
    ]
    found = {op.attrs.get("axes") for op in sums}
    is_sum = all(op.name == "reduce" and op.attrs["kind"] == "sum" for op in sums)
    if not olds or not sums or not is_sum or len(found) != 1:
        return None
    axes = found.pop() or ()
    return axes if any(ref.ref.shape[d] > 1 for d in axes) else None


class _Summed:
    """Rewrites the accesses to one scratch."""

    def __init__(self, ref: Value, axes: Sequence[int]):
        self.ref, self.axes = ref, tuple(axes)
        pairs = enumerate(ref.ref.shape)
        self.shape = tuple(1 if d in self.axes else n for d, n in pairs)
        self.new: Value | None = None
        self.loaded: set[Value] = set()

    def rewritten(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.results == (self.ref,):
            type_ = self.ref.ref.with_shape(self.shape)
            self.new = b.op("alloc", type=type_, names=[self.ref.name])
            return [self.new]
        if self.new is not None and op.name == "load" and op.operands[0] is self.new:
            loaded = b.load(self.new)
            self.loaded.add(loaded)
            return [loaded]
        if op.name == "add" and self.loaded & set(op.operands):
            old, part = op.operands
            if part in self.loaded:
                old, part = part, old
            total = b.add(old, self.summed(b, part))
            return [total]
        if self.new is not None and op.name == "store" and op.operands[0] is self.new:
            value = Access.of(op).value
            assert value is not None
            if value.tile.shape != self.shape:
                value = b.constant(0, value.tile.with_shape(self.shape))
            b.store(self.new, value)
            return []
        return None

    def summed(self, b: Rewriter, part: Value) -> Value:
        total = b.op("reduce", part, kind="sum", axes=self.axes)
        dims = [d for d in range(part.tile.rank) if d not in self.axes]
        return b.op("broadcast_in_dim", total, shape=self.shape, dims=tuple(dims))
