"""Reverse mode on the IR of one program: its code again, then backwards.

`reverse_program(body, targets, seeds, sizes)` takes the code of a program after
`passes/lower/promote.py` and returns code that computes what the program did and then,
op by op from the last to the first, the cotangents. Memory has cotangents too: a `load`
adds to the cotangent of what it read (as `atomic_rmw` add, which `backward_windows.py`
lowers to plain ops), a `store` takes the cotangent of what it wrote. Branches and loops
are recomputed inside their reverse; a loop keeps the carried values that this needs on
a stack.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pallasite.autodiff.op_derivative import is_pure
from pallasite.autodiff.reverse_activity import Activity, facts_of
from pallasite.autodiff.reverse_loop import Cotangents, ReverseLoop, live
from pallasite.autodiff.reverse_rules import accumulated, cotangent_type, pull_back
from pallasite.errors import NoBackwardKernel
from pallasite.ir import types as T
from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import Access, Block, Gather, Op, Span, Value, Window, walk
from pallasite.ir.rewrite import clone
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.affine import Forms
from pallasite.passes.analysis.boxes import disjoint
from pallasite.passes.analysis.memory import VIEWS, written_refs

# What a reverse omits when it recomputes code.
EFFECTS = ("store", "atomic_rmw", "atomic_cas", "debug_print", "debug_check", "delay")
MOST_KEPT = 1 << 16  # iterations of a loop whose carried values may be kept on a stack


def reverse_program(
    body: Block,
    targets: Mapping[Value, Value],
    seeds: Mapping[Value, Value],
    sizes: Sequence[int | None],
    constants: Iterable[Value] = (),
    inputs: Iterable[Value] = (),
    results: Iterable[Value] = (),
) -> "Reversed":
    """The program's code followed by its reverse.

    A ref may have a target and a seed: an operand that aliases a result.

    Args:
        body: a program; its parameters are the grid indices.
        targets: for each operand with a wanted cotangent, the ref that gets it added.
        seeds: for each result with a cotangent, the ref that holds it.
        sizes: the grid.
        constants: values that count as independent of the operands.
        inputs: the refs that hold something when the program starts.
        results: refs that the code is to write as the program does.

    Raises:
        NoBackwardKernel: something in the program has no reverse.
    """
    return _Reverse(
        body,
        targets,
        seeds,
        sizes,
        frozenset(constants),
        frozenset(inputs),
        frozenset(results),
    ).run()


@dataclass(frozen=True)
class Reversed:
    """What `reverse_program` made."""

    body: Block
    # Refs whose cotangent changes while the reverse runs: it starts as the seed and, if
    # the ref has a target, ends as what the target gets.
    changing: Mapping[Value, Value]
    # Placeholders for memory that no longer exists: the reverse must not need them.
    lost: Mapping[Value, Op]


@dataclass
class _Reverse:
    body: Block
    targets: Mapping[Value, Value]
    seeds: Mapping[Value, Value]
    sizes: Sequence[int | None]
    constants: frozenset[Value]
    inputs: frozenset[Value]
    results: frozenset[Value]
    # refs and views by their primal twin
    memory: dict[Value, Value] = field(default_factory=dict[Value, Value])
    copied: set[Value] = field(default_factory=set[Value])  # their seed is a copy
    changing: dict[Value, Value] = field(default_factory=dict[Value, Value])
    lost_loads: dict[Value, Op] = field(default_factory=dict[Value, Op])
    stand_ins: dict[Value, Op] = field(default_factory=dict[Value, Op])

    def __post_init__(self) -> None:
        self.activity = Activity(self.body, self.targets, self.constants)
        self.facts = facts_of(self.body, self.sizes)
        self.memory |= self.targets
        self.scratch = {op.result for op in walk(self.body) if op.name == "alloc"}

    def run(self) -> Reversed:
        b = Builder()
        self.check_operands_are_kept()
        self.find_lost(self.body, set())
        for op in self.body.ops:
            is_result = op.name == "store" and self.writes_result(op)
            b.ops += [op] if is_result else self.again([op], first=True)
        self.open_scratch(b)
        self.open_seeds(b)
        self.backward(b, self.body.ops, {})
        lost = {op.operands[0]: self.lost_loads[v] for v, op in self.stand_ins.items()}
        return Reversed(Block(self.body.params, tuple(b.ops)), self.changing, lost)

    # --- the forward part ---

    def check_operands_are_kept(self) -> None:
        """An operand's cotangent is a sum of addends in any order; a store would take
        from it what later programs added, and must run between them."""
        for op in walk(self.body):
            for ref in written_refs(op):
                root = self.activity.root(ref)
                if root in self.targets and root not in self.seeds:
                    name = root.name or "an operand"
                    raise NoBackwardKernel(f"{name} is stored to", at=op.loc)

    def find_lost(self, block: Block, stored: set[Value]) -> None:
        """Loads of main memory that may see what this program stored there.

        The reverse does not repeat those stores. `stored`: roots that may have been
        stored to; is extended.
        """
        for op in block.ops:
            if op.name in ("for", "while"):
                inside = (r for o in walk(Block((), (op,))) for r in written_refs(o))
                stored.update(map(self.activity.root, inside))
            for region in op.regions:
                self.find_lost(region, stored)
            stored.update(map(self.activity.root, written_refs(op)))
            if op.name == "load":
                root = self.activity.root(op.operands[0])
                is_empty = root in self.seeds and root not in self.inputs
                if is_empty or (root in stored and root not in self.scratch):
                    self.lost_loads[op.result] = op
                    self.stand_ins[op.result] = _stand_in(op)

    def again(self, ops: Sequence[Op], first: bool = False) -> tuple[Op, ...]:
        """Ops without side effects; those on scratch are kept the `first` time."""
        kept = []
        for op in ops:
            if op.name in EFFECTS and not (first and self.is_private(op)):
                continue
            if op.name == "load" and op.result in self.stand_ins:
                op = self.stand_ins[op.result]
            if op.regions:
                regions = [
                    Block(r.params, self.again(r.ops, first), r.yields)
                    for r in op.regions
                ]
                op = op.with_(regions=tuple(regions))
            kept.append(op)
        return tuple(kept)

    def writes_result(self, op: Op) -> bool:
        return self.activity.root(op.operands[0]) in self.results

    def is_private(self, op: Op) -> bool:
        """Whether an op has an effect on scratch, and on nothing else."""
        if not op.operands or not op.operands[0].is_ref:
            return False
        return self.activity.root(op.operands[0]) in self.scratch

    def open_scratch(self, b: Builder) -> None:
        """Cotangents of scratch that depends on something, initially zero."""
        top = {op.result for op in self.body.ops if op.name == "alloc"}
        for op in walk(self.body):
            if op.name != "alloc" or op.result not in self.activity.varied:
                continue
            if op.result not in top:
                raise NoBackwardKernel("scratch inside a loop or branch", at=op.loc)
            ref = op.result.ref
            dtype = accumulated(ref.dtype)
            self.memory[op.result] = _zeroed(b, replace(ref, dtype=dtype))

    def open_seeds(self, b: Builder) -> None:
        """Cotangents of results; as copies where several stores may overlap."""
        for result, seed in self.seeds.items():
            if result in self.inputs or result in self.activity.loaded:
                self.change_seed(result, seed)
            elif self.is_written_once(result):
                self.memory[result] = seed
            elif not self.copy_seed(b, result, seed):
                self.change_seed(result, seed)

    def change_seed(self, result: Value, seed: Value) -> None:
        """Let the reverse change the whole cotangent as the program did the memory.

        In its own type if nothing is added to it, because nobody loads the memory.
        """
        is_added_to = result in self.activity.loaded
        dtype = accumulated(seed.ref.dtype) if is_added_to else seed.ref.dtype
        self.changing[result] = Value(replace(seed.ref, dtype=dtype), seed.name)
        self.memory[result] = self.changing[result]
        self.copied.add(result)

    def is_written_once(self, result: Value) -> bool:
        """Whether no element of the result is stored twice, in a loop or by two ops."""
        stores = list(_stores(self.body, self.activity, result))
        ops = [op for op, _ in stores]
        if len({op.operands[0] for op in ops}) > 1 or not disjoint(ops):
            return False
        return all(
            op.name == "store" and not any(self.may_repeat(op, loop) for loop in loops)
            for op, loops in stores
        )

    def may_repeat(self, op: Op, loop: Op) -> bool:
        """Whether two iterations of a loop may store to the same place.

        They do not if one of the block indices is the loop's own index, or the part
        that is stored to advances by at least its length.
        """
        index = Loop.of(loop).index
        view = self.activity.view_ops.get(op.operands[0])
        if view is not None and index in view.operands[1:]:
            return False
        forms = Forms([index])
        forms.add_ops(o for o in self.body.ops if not o.regions)
        forms.add_ops(Loop.of(loop).body.ops)
        for entry, start in Access.of(op).split_index():
            if start is None or isinstance(entry, Gather):
                continue
            form, size = forms.of(start), 1
            if isinstance(entry, Span):
                size = (entry.size - 1) * entry.stride + 1
            moves = form.affine is not None and not form.spread and form.axes == {0}
            if moves and abs(form.affine.coeffs[0]) >= size:  # type: ignore[union-attr]
                return False
        return True

    def copy_seed(self, b: Builder, result: Value, seed: Value) -> bool:
        """A block of the seed that stores can take from and set to zero.

        Only if one block is all the program sees of the result.
        """
        views = [
            op for op in walk(self.body) if op.operands[:1] == (result,) and op.results
        ]
        opened = [op for op in self.body.ops if op.name == "block_view" and op in views]
        if len(views) != 1 or opened != views:
            return False
        (view,) = views
        source = self.same_view(b, view, seed)
        ref = replace(source.ref, dtype=accumulated(source.ref.dtype), space="vmem")
        copy = b.op("alloc", type=ref)
        b.store(copy, b.cast(b.load(source), ref.dtype))
        self.memory[view.result] = copy
        self.copied.add(result)
        return True

    # --- refs ---

    def twin(self, b: Builder, ref: Value) -> Value:
        """The ref that holds the cotangent of what `ref` shows."""
        if ref in self.memory:
            return self.memory[ref]
        op = self.activity.view_ops.get(ref)
        if op is None:
            raise NoBackwardKernel(f"{ref.name or 'a ref'} has no cotangent")
        if op.name == "bitcast_view":
            raise NoBackwardKernel("a ref is viewed as another dtype", at=op.loc)
        return self.same_view(b, op, self.twin(b, op.operands[0]))

    def same_view(self, b: Builder, op: Op, ref: Value) -> Value:
        attrs = dict(op.attrs)
        if op.name == "block_view":
            attrs["window"] = self.twin_window(op.attrs["window"], ref)
        return b.op(op.name, ref, *op.operands[1:], **attrs)

    def twin_window(self, window: Window, ref: Value) -> Window:
        if ref in self.seeds.values():
            return replace(window, mode="in", fill=0)
        fill = 0 if ref in self.changing.values() else None
        return replace(window, mode="out", fill=fill)

    # --- the backward part ---

    def backward(self, b: Builder, ops: Sequence[Op], ct: Cotangents) -> None:
        """Emit the reverse of ops that were emitted before; updates `ct`."""
        for op in reversed(ops):
            b.loc = op.loc
            handler = _HANDLERS.get(op.name)
            if handler is not None:
                handler(self, b, op, ct)
            elif op.name in VIEWS or op.name in ("alloc", "debug_print", "delay"):
                continue
            elif is_pure(op):
                self.at_pure(b, op, ct)
            elif any(map(self.activity.depends, (*op.operands, *op.results))):
                raise NoBackwardKernel(f"{op.name} has no reverse-mode rule", at=op.loc)

    def add(self, b: Builder, ct: Cotangents, value: Value, more: Value) -> None:
        if value in self.activity.varied:
            more = b.cast(more, accumulated(value.tile.dtype))
            ct[value] = b.add(ct[value], more) if value in ct else more

    def at_pure(self, b: Builder, op: Op, ct: Cotangents) -> None:
        cotangents = [ct.pop(r, None) for r in op.results]
        if all(c is None for c in cotangents):
            return
        wanted = [v in self.activity.varied for v in op.operands]
        found = pull_back(b, op, cotangents, wanted)
        for value, cotangent in zip(op.operands, found, strict=True):
            if cotangent is not None:
                self.add(b, ct, value, cotangent)

    # --- memory ---

    def at_load(self, b: Builder, op: Op, ct: Cotangents) -> None:
        cotangent = ct.pop(op.result, None)
        if cotangent is None:
            return
        access = Access.of(op)
        if access.mask is not None:
            zero = b.like(0, cotangent)
            if access.other is not None and access.other in self.activity.varied:
                self.add(b, ct, access.other, b.select(access.mask, zero, cotangent))
        if not self.activity.depends(access.ref):
            return
        ref, mask = self.twin(b, access.ref), access.mask
        if mask is not None and not access.index_operands:
            # All of it is inside: an added zero is as good as none, and a sum that
            # takes all of a block may be its first value.
            cotangent = b.select(mask, cotangent, b.like(0, cotangent))
            mask = None
        value = b.cast(cotangent, ref.ref.dtype)
        index_operands = tuple(_read_indices(b, access))
        new = Access(ref, access.index, index_operands, value, None, mask)
        b.emit(
            "atomic_rmw",
            *access_operands(new),
            kind="add",
            index=access.index,
            mask=mask is not None,
        )

    def at_store(self, b: Builder, op: Op, ct: Cotangents) -> None:
        access = Access.of(op)
        root = self.activity.root(access.ref)
        if root not in self.seeds and root not in self.activity.varied:
            return
        if root in self.activity.varied and not self.has_cotangent(root):
            return  # a result without a cotangent
        if any(isinstance(e, Gather) for e in access.index):
            raise NoBackwardKernel(
                "a store with index arrays may write an element twice", at=op.loc
            )
        ref = self.twin(b, access.ref)
        self.take(b, access, ref, ct)
        if root in self.copied or root not in self.seeds:
            zero = b.constant(0, T.TileType(op.operands[1].tile.shape, ref.ref.dtype))
            b.store(ref, zero, access.index, access.index_operands, access.mask)

    def has_cotangent(self, root: Value) -> bool:
        return root in self.seeds or root in self.memory

    def take(self, b: Builder, access: Access, ref: Value, ct: Cotangents) -> None:
        """The cotangent of a stored value is that of the place it went to."""
        value = access.value
        assert value is not None
        if value not in self.activity.varied:
            return
        mask, other = _written(b, access), None
        if mask is not None:
            other = b.constant(0, T.TileType(value.tile.shape, ref.ref.dtype))
        taken = b.load(ref, access.index, access.index_operands, mask, other)
        self.add(b, ct, value, taken)

    def at_atomic_rmw(self, b: Builder, op: Op, ct: Cotangents) -> None:
        access = Access.of(op)
        root = self.activity.root(access.ref)
        if not self.activity.depends(access.ref) or not self.has_cotangent(root):
            return
        if op.attrs["kind"] != "add" or op.result in ct:
            raise NoBackwardKernel(
                f"atomic {op.attrs['kind']} has no reverse-mode rule", at=op.loc
            )
        self.take(b, access, self.twin(b, access.ref), ct)

    # --- branches ---

    def is_live(self, op: Op, ct: Cotangents) -> bool:
        """Whether an op with regions has cotangents to propagate."""
        if any(r in ct for r in op.results):
            return True
        refs = (r for inner in walk(Block((), (op,))) for r in written_refs(inner))
        return any(self.has_cotangent(self.activity.root(r)) for r in refs)

    def at_cond(self, b: Builder, op: Op, ct: Cotangents) -> None:
        if not self.is_live(op, ct):
            return
        cotangents = [ct.pop(r, None) for r in op.results]
        captured = self.activity.captured(*op.regions)
        inside: list[tuple[Builder, Cotangents]] = []
        for region in op.regions:
            inner, found = Builder(op.loc), Cotangents()
            for value, cotangent in zip(region.yields, cotangents, strict=True):
                if cotangent is not None:
                    self.add(inner, found, value, cotangent)
            inner.ops += self.again(region.ops)
            self.backward(inner, region.ops, found)
            inside.append((inner, found))
        active = [v for v in captured if any(v in found for _, found in inside)]
        for value in [*active]:
            # What every branch passes on unchanged does not depend on the branch.
            (first, *others) = (found.get(value) for _, found in inside)
            if first is None or first not in cotangents:
                continue
            if all(c is first for c in others):
                self.add(b, ct, value, first)
                active.remove(value)
        regions = []
        for inner, found in inside:
            yields = [
                found.get(v) or inner.constant(0, cotangent_type(v)) for v in active
            ]
            regions.append(self.finished(Block((), tuple(inner.ops), tuple(yields))))
        results = b.emit("cond", op.operands[0], regions=regions)
        for value, cotangent in zip(active, results, strict=True):
            self.add(b, ct, value, cotangent)

    def finished(self, region: Block) -> Block:
        """A region of the reverse, with its own values and only what it needs."""
        region = live(region)
        self.check_memory(region)
        return clone(region)

    def check_memory(self, region: Block) -> None:
        """Recomputed code must find in memory what it found the first time."""
        for op in walk(region):
            if op.name != "load":
                continue
            root = self.activity.root(op.operands[0])
            if root in self.scratch and root in self.activity.written:
                raise NoBackwardKernel(
                    "a loop or branch reads scratch that the program writes", at=op.loc
                )

    def at_while(self, b: Builder, op: Op, ct: Cotangents) -> None:
        if self.is_live(op, ct):
            raise NoBackwardKernel("a while loop has no reverse-mode rule", at=op.loc)

    # --- loops ---

    def at_for(self, b: Builder, op: Op, ct: Cotangents) -> None:
        if self.is_live(op, ct):
            ReverseLoop(self, b, op, ct).emit()

    def most_steps(self, op: Op) -> int:
        bound = self.facts.most_steps(Loop.of(op))
        if bound is None or bound > MOST_KEPT:
            raise NoBackwardKernel(
                "a loop whose values are needed again has no known bound on its trip "
                "count",
                at=op.loc,
            )
        return max(bound, 1)


_HANDLERS = {
    "load": _Reverse.at_load,
    "store": _Reverse.at_store,
    "atomic_rmw": _Reverse.at_atomic_rmw,
    "cond": _Reverse.at_cond,
    "while": _Reverse.at_while,
    "for": _Reverse.at_for,
}


def _zeroed(b: Builder, ref: T.RefType) -> Value:
    made = b.op("alloc", type=ref)
    b.store(made, b.constant(0, ref.tile))
    return made


def _stores(block: Block, activity: Activity, root: Value, loops: tuple[Op, ...] = ()):
    """The ops that write a root, each with its enclosing loops."""
    for op in block.ops:
        if any(activity.root(ref) is root for ref in written_refs(op)):
            yield op, loops
        inner = (*loops, op) if op.name in ("for", "while") else loops
        for region in op.regions:
            yield from _stores(region, activity, root, inner)


def _stand_in(op: Op) -> Op:
    """A placeholder load of the same type; nothing should use it in the end."""
    tile = op.result.tile
    nowhere = Value(T.RefType(tile.shape, tile.dtype, "any"), "lost")
    b = Builder(op.loc)
    b.load(nowhere)
    return b.ops[0].with_(results=op.results)


def _written(b: Builder, access: Access) -> Value | None:
    """Which elements a write does not drop; None: all. A read would clamp them."""
    mask, value = access.mask, access.value
    assert value is not None
    for n, (entry, operand) in zip(
        access.ref.ref.shape, access.split_index(), strict=True
    ):
        if operand is None or not isinstance(entry, Gather):
            continue
        operand = _wide(b, operand)
        inside = b.op(
            "and",
            b.ge(operand, b.like(0, operand)),
            b.lt(operand, b.like(n, operand)),
        )
        inside = b.broadcast(inside, value.tile.shape, range(operand.tile.rank))
        mask = inside if mask is None else b.op("and", mask, inside)
    return mask


def _wide(b: Builder, places: Value) -> Value:
    """An index tile in a type that can also hold the size of a dimension."""
    return b.cast(places, T.I32) if places.tile.dtype.bits < 32 else places


def _read_indices(b: Builder, access: Access) -> list[Value]:
    """Index operands; gathered ones clamped, as a read clamps them."""
    result = []
    for n, (entry, operand) in zip(
        access.ref.ref.shape, access.split_index(), strict=True
    ):
        if operand is None:
            continue
        if isinstance(entry, Gather):
            operand = _wide(b, operand)
            low, high = (
                b.constant(k, T.scalar(operand.tile.dtype)) for k in (0, n - 1)
            )
            operand = b.op("clamp", low, operand, high)
        result.append(operand)
    return result
