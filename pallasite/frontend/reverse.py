"""Reverse mode on the IR of one program: its code again, then backwards.

`reverse_program(body, targets, seeds, sizes)` takes the code of a program after
`passes/promote.py` and gives code that computes what the program did and then, op by
op from the last to the first, the cotangents. Memory has cotangents too: a `load` adds
to the cotangent of what it read (as `atomic_rmw` add, which `backward_windows.py`
spells out), a `store` takes the cotangent of what it wrote. Branches and loops are run
again inside their reverse; a loop keeps on a stack what that needs of its carries.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pallasite.errors import NoBackwardKernel
from pallasite.frontend.op_derivative import is_pure
from pallasite.frontend.reverse_activity import (
    Activity,
    ranges_of,
    used_values,
    written,
)
from pallasite.frontend.reverse_rules import accumulated, pull_back
from pallasite.ir import types as T
from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    Gather,
    Kernel,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.rewrite import clone, dead_code, substitute
from pallasite.passes.carry import VIEWS

Cotangents = dict[Value, Value]
# What a reverse leaves out when it runs code again.
EFFECTS = ("store", "atomic_rmw", "atomic_cas", "debug_print", "debug_check", "delay")
MOST_KEPT = 1 << 16  # steps of a loop whose carries may be kept on a stack


def reverse_program(
    body: Block,
    targets: Mapping[Value, Value],
    seeds: Mapping[Value, Value],
    sizes: Sequence[int | None],
    constants: Iterable[Value] = (),
) -> Block:
    """The program's code followed by its reverse.

    Args:
        body: a program; its parameters are the grid indices.
        targets: for each operand with a wanted cotangent, the ref that gets it added.
        seeds: for each result with a cotangent, the ref that holds it.
        sizes: the grid.
        constants: values that count as independent of the operands.

    Raises:
        NoBackwardKernel: something in the program has no reverse.
    """
    return _Reverse(body, targets, seeds, sizes, frozenset(constants)).run()


@dataclass
class _Reverse:
    body: Block
    targets: Mapping[Value, Value]
    seeds: Mapping[Value, Value]
    sizes: Sequence[int | None]
    constants: frozenset[Value]
    # refs and views by their primal twin
    memory: dict[Value, Value] = field(default_factory=dict)
    copied: set[Value] = field(default_factory=set)  # results whose seed is a copy

    def __post_init__(self) -> None:
        self.activity = Activity(self.body, self.targets, self.constants)
        self.ranges = ranges_of(self.body, self.sizes)
        self.memory |= self.targets

    def run(self) -> Block:
        b = Builder()
        b.ops += self.forward()
        self.open_scratch(b)
        self.open_seeds(b)
        self.backward(b, self.body.ops, {})
        return Block(self.body.params, tuple(b.ops))

    # --- what runs forward ---

    def forward(self) -> tuple[Op, ...]:
        """The program without its results: what scratch gets is kept."""
        private = {op.result for op in walk(self.body) if op.name == "alloc"}
        return _without_effects(self.body.ops, private, self.activity)

    def open_scratch(self, b: Builder) -> None:
        """Cotangents of scratch that depends on something, zero to begin with."""
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
            if result in self.activity.loaded:
                raise NoBackwardKernel(
                    f"{result.name} is read back in parts", at=self.where(result)
                )
            if self.is_written_once(result):
                self.memory[result] = seed
            else:
                self.copy_seed(b, result, seed)

    def where(self, root: Value) -> object:
        uses = (op for op in walk(self.body) if self.touches(op, root))
        return next((op.loc for op in uses if op.loc is not None), None)

    def touches(self, op: Op, root: Value) -> bool:
        return any(v.is_ref and self.activity.root(v) is root for v in op.operands)

    def is_written_once(self, result: Value) -> bool:
        """Whether one store writes the result, in no loop that might repeat it."""
        stores = list(_stores(self.body, self.activity, result))
        if len(stores) != 1:
            return not stores
        ((op, loops),) = stores
        return op.name == "store" and not any(
            self.may_repeat(op, loop) for loop in loops
        )

    def may_repeat(self, op: Op, loop: Op) -> bool:
        """Whether two steps of a loop may store to the same place.

        Not if one of the block's numbers is the loop's own index.
        """
        view = self.activity.view_ops.get(op.operands[0])
        index = loop.regions[0].params[0]
        return view is None or index not in view.operands[1:]

    def copy_seed(self, b: Builder, result: Value, seed: Value) -> None:
        """A block of the seed that stores can take from, and leave zero behind."""
        views = [
            op for op in walk(self.body) if op.operands[:1] == (result,) and op.results
        ]
        opened = [op for op in self.body.ops if op.name == "block_view" and op in views]
        if len(views) != 1 or opened != views:
            raise NoBackwardKernel(
                f"several steps of a loop may write one block of {result.name}",
                at=self.where(result),
            )
        (view,) = views
        source = self.same_view(b, view, seed)
        ref = replace(source.ref, dtype=accumulated(source.ref.dtype), space="vmem")
        copy = b.op("alloc", type=ref)
        b.store(copy, b.cast(b.load(source), ref.dtype))
        self.memory[view.result] = copy
        self.copied.add(result)

    # --- refs ---

    def twin(self, b: Builder, ref: Value) -> Value:
        """The ref that holds the cotangent of what `ref` shows."""
        if ref in self.memory:
            return self.memory[ref]
        op = self.activity.view_ops.get(ref)
        if op is None:
            raise NoBackwardKernel(f"{ref.name or 'a ref'} has no cotangent")
        if op.name == "bitcast_view":
            raise NoBackwardKernel("a ref is seen as another type", at=op.loc)
        return self.same_view(b, op, self.twin(b, op.operands[0]))

    def same_view(self, b: Builder, op: Op, ref: Value) -> Value:
        attrs = dict(op.attrs)
        if op.name == "block_view":
            attrs["window"] = self.twin_window(op.attrs["window"], ref)
        return b.op(op.name, ref, *op.operands[1:], **attrs)

    def twin_window(self, window: Window, ref: Value) -> Window:
        if ref in self.seeds.values():
            return replace(window, mode="in", fill=0)
        return replace(window, mode="out", fill=None)

    # --- going backwards ---

    def backward(self, b: Builder, ops: Sequence[Op], ct: Cotangents) -> None:
        """Emit the reverse of ops that were emitted before; `ct` grows and shrinks."""
        for op in reversed(ops):
            b.loc = op.loc
            handler = getattr(self, f"at_{op.name}", None)
            if handler is not None:
                handler(b, op, ct)
            elif op.name in VIEWS or op.name in ("alloc", "debug_print", "delay"):
                continue
            elif is_pure(op):
                self.at_pure(b, op, ct)
            elif any(map(self.activity.depends, (*op.operands, *op.results))):
                raise NoBackwardKernel(f"{op.name} has no reverse", at=op.loc)

    def add(self, b: Builder, ct: Cotangents, value: Value, more: Value) -> None:
        if value in self.activity.varied:
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
        ref = self.twin(b, access.ref)
        value = b.cast(_widest(b, cotangent, ref.ref.dtype), ref.ref.dtype)
        index_operands = tuple(_read_indices(b, access))
        new = Access(ref, access.index, index_operands, value, None, access.mask)
        b.emit(
            "atomic_rmw",
            *access_operands(new),
            kind="add",
            index=access.index,
            mask=access.mask is not None,
        )

    def at_store(self, b: Builder, op: Op, ct: Cotangents) -> None:
        access = Access.of(op)
        root = self.activity.root(access.ref)
        if root not in self.seeds and root not in self.activity.varied:
            return
        if root in self.activity.varied and not self.has_cotangent(root):
            return  # a result nobody has a cotangent for
        if any(isinstance(e, Gather) for e in access.index):
            raise NoBackwardKernel(
                "a store to gathered places may write one of them twice", at=op.loc
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
        other = None
        if access.mask is not None:
            other = b.constant(0, T.TileType(value.tile.shape, ref.ref.dtype))
        taken = b.load(ref, access.index, access.index_operands, access.mask, other)
        self.add(b, ct, value, b.cast(taken, value.tile.dtype))

    def at_atomic_rmw(self, b: Builder, op: Op, ct: Cotangents) -> None:
        access = Access.of(op)
        root = self.activity.root(access.ref)
        if not self.activity.depends(access.ref) or not self.has_cotangent(root):
            return
        if op.attrs["kind"] != "add" or op.result in ct:
            raise NoBackwardKernel(
                f"atomic {op.attrs['kind']} has no reverse", at=op.loc
            )
        self.take(b, access, self.twin(b, access.ref), ct)

    # --- branches ---

    def is_live(self, op: Op, ct: Cotangents) -> bool:
        """Whether an op with regions has cotangents to hand on."""
        if any(r in ct for r in op.results):
            return True
        refs = (r for inner in walk(Block((), (op,))) for r in written(inner))
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
            inner.ops += _without_effects(region.ops)
            self.backward(inner, region.ops, found)
            inside.append((inner, found))
        moved = [v for v in captured if any(v in found for _, found in inside)]
        regions = []
        for inner, found in inside:
            yields = [found.get(v) or inner.like(0, v) for v in moved]
            regions.append(self.finished(Block((), tuple(inner.ops), tuple(yields))))
        results = b.emit("cond", op.operands[0], regions=regions)
        for value, cotangent in zip(moved, results, strict=True):
            self.add(b, ct, value, cotangent)

    def finished(self, region: Block) -> Block:
        """A region of the reverse, with values of its own and no more than it needs."""
        region = _live(region)
        self.check_memory(region)
        return clone(region)

    def check_memory(self, region: Block) -> None:
        """Code that runs again must find in memory what it found the first time."""
        for op in walk(region):
            if op.name != "load":
                continue
            if self.activity.root(op.operands[0]) in self.activity.written:
                raise NoBackwardKernel(
                    "a loop or branch reads memory that the program writes", at=op.loc
                )

    def at_while(self, b: Builder, op: Op, ct: Cotangents) -> None:
        if self.is_live(op, ct):
            raise NoBackwardKernel("a while loop has no reverse", at=op.loc)

    # --- loops ---

    def at_for(self, b: Builder, op: Op, ct: Cotangents) -> None:
        if self.is_live(op, ct):
            _ReverseLoop(self, b, op, ct).emit()

    def most_steps(self, op: Op) -> int:
        first, limit, step = (self.ranges.of(v) for v in op.operands[:3])
        bound = -(-(limit[1] - first[0]) // max(step[0], 1))
        if step[0] < 1 or bound > MOST_KEPT:
            raise NoBackwardKernel(
                "the length of a loop whose values are needed again has no known bound",
                at=op.loc,
            )
        return max(bound, 1)


class _ReverseLoop:
    """The reverse of one `for`."""

    def __init__(self, outer: _Reverse, b: Builder, op: Op, ct: Cotangents):
        self.outer, self.b, self.op, self.ct = outer, b, op, ct
        (self.body,) = op.regions
        self.index, *self.params = self.body.params
        self.inner = Builder(op.loc)

    def emit(self) -> None:
        activity = self.outer.activity
        moving = [n for n, p in enumerate(self.params) if p in activity.varied]
        given = [_like(self.params[n]) for n in moving]
        found: Cotangents = {}
        for n, param in zip(moving, given, strict=True):
            self.outer.add(self.inner, found, self.body.yields[n], param)
        self.inner.ops += _without_effects(self.body.ops)
        self.outer.backward(self.inner, self.body.ops, found)
        yields = [self.cotangent(found, self.params[n]) for n in moving]
        captured = [v for v in activity.captured(self.body) if v in found]
        sums = [_like(v) for v in captured]
        for total, value in zip(sums, captured, strict=True):
            yields.append(self.inner.add(total, found[value]))
        block = Block((*given, *sums), tuple(self.inner.ops), tuple(yields))
        inits = [self.result_cotangent(n) for n in moving]
        inits += [self.ct.get(v) or self.b.constant(0, v.tile) for v in captured]
        results = self.emit_loop(_live(block), inits)
        for n, cotangent in zip(moving, results, strict=False):
            self.outer.add(self.b, self.ct, self.op.operands[3 + n], cotangent)
        for value, total in zip(captured, results[len(moving) :], strict=True):
            self.ct[value] = total

    def cotangent(self, found: Cotangents, value: Value) -> Value:
        # The same value may stand for a captured one: its share is taken once.
        return found.pop(value, None) or self.inner.constant(0, value.tile)

    def result_cotangent(self, n: int) -> Value:
        result = self.op.results[n]
        return self.ct.pop(result, None) or self.b.constant(0, result.tile)

    def emit_loop(self, block: Block, inits: list[Value]) -> Sequence[Value]:
        needed = [n for n, p in enumerate(self.params) if p in used_values(block)]
        if not needed and self.is_free(block):
            region = Block((self.index, *block.params), block.ops, block.yields)
            self.outer.check_memory(region)
            bounds = self.op.operands[:3]
            return self.b.emit("for", *bounds, *inits, regions=(clone(region),))
        stacks = self.keep(needed)
        count = self.count()
        counter = Value(T.INDEX, "back")
        head = Builder(self.op.loc)
        one = head.index(1)
        position = head.sub(head.sub(count, one), counter)
        first, _, step = self.op.operands[:3]
        moved = head.mul(head.cast(position, first.tile.dtype), step)
        known = {self.index: head.add(first, moved)}
        for n, stack in stacks.items():
            known[self.params[n]] = _at(head, stack, position)
        block = substitute(block, known)
        region = Block((counter, *block.params), (*head.ops, *block.ops), block.yields)
        self.outer.check_memory(region)
        bounds = (self.b.index(0), count, self.b.index(1))
        return self.b.emit("for", *bounds, *inits, regions=(clone(region),))

    def is_free(self, block: Block) -> bool:
        """Whether the steps may be taken in any order: they only add to sums."""
        moving = sum(p in self.outer.activity.varied for p in self.params)
        carried = zip(block.params[:moving], block.yields[:moving], strict=True)
        stores = any(op.name == "store" for op in walk(block))
        return all(p is y for p, y in carried) and not stores

    def count(self) -> Value:
        """How many steps the loop takes."""
        first, limit, step = self.op.operands[:3]
        b = self.b
        one = b.like(1, first)
        steps = b.add(b.div(b.sub(b.sub(limit, first), one), step), one)
        steps = b.select(b.op("lt", first, limit), steps, b.like(0, steps))
        return b.cast(steps, T.I32)

    def keep(self, needed: list[int]) -> dict[int, Value]:
        """Make the forward loop keep these of its carries, one entry per step."""
        if not needed:
            return {}
        depth = self.outer.most_steps(self.op)
        # The op there may lack effects of this one, and so be another object.
        place = next(
            i for i, op in enumerate(self.b.ops) if op.results == self.op.results
        )
        there = self.b.ops[place]
        before, head = Builder(self.op.loc), Builder(self.op.loc)
        first, _, step = self.op.operands[:3]
        position = head.div(head.sub(self.index, first), step)
        stacks = {}
        for n in needed:
            tile = self.params[n].tile
            type_ = T.RefType((depth, *tile.shape), tile.dtype, "vmem")
            stacks[n] = before.op("alloc", type=type_)
            index = (At(None), *(Span(0, size) for size in tile.shape))
            head.store(stacks[n], self.params[n], index, [position])
        forward = Block(
            self.body.params,
            (*head.ops, *there.regions[0].ops),
            self.body.yields,
        )
        kept = there.with_(regions=(forward,))
        self.b.ops[place : place + 1] = [*before.ops, kept]
        return stacks


def _at(b: Builder, stack: Value, position: Value) -> Value:
    index = (At(None), *(Span(0, size) for size in stack.ref.shape[1:]))
    return b.load(stack, index, [position])


def _like(value: Value) -> Value:
    return Value(value.tile, f"d_{value.name}" if value.name else "")


def _zeroed(b: Builder, ref: T.RefType) -> Value:
    made = b.op("alloc", type=ref)
    b.store(made, b.constant(0, ref.tile))
    return made


def _live(block: Block) -> Block:
    return dead_code(Kernel("reverse", (), block, 0)).body


def _stores(block: Block, activity: Activity, root: Value, loops: tuple[Op, ...] = ()):
    """The ops that write a root, each with the loops around it."""
    for op in block.ops:
        if any(activity.root(ref) is root for ref in written(op)):
            yield op, loops
        inner = (*loops, op) if op.name in ("for", "while") else loops
        for region in op.regions:
            yield from _stores(region, activity, root, inner)


def _without_effects(
    ops: Sequence[Op],
    private: set[Value] | None = None,
    activity: Activity | None = None,
) -> tuple[Op, ...]:
    """Ops without what they do to the world, except to `private` memory."""
    kept = []
    for op in ops:
        if op.name in EFFECTS and op.name not in ("debug_print", "debug_check"):
            mine = activity is not None and activity.root(op.operands[0]) in (
                private or ()
            )
            if not mine:
                continue
        elif op.name in EFFECTS:
            continue
        if op.regions:
            regions = [
                Block(r.params, _without_effects(r.ops, private, activity), r.yields)
                for r in op.regions
            ]
            if any(a.ops != b.ops for a, b in zip(regions, op.regions, strict=True)):
                op = op.with_(regions=tuple(regions))
        kept.append(op)
    return tuple(kept)


def _widest(b: Builder, value: Value, limit: T.DType) -> Value:
    """What a value was narrowed from just now, if that is no wider than `limit`."""
    op = next((o for o in reversed(b.ops) if value in o.results), None)
    if op is None or op.name != "cast":
        return value
    (source,) = op.operands
    fits = source.tile.dtype.is_float and source.tile.dtype.bits <= limit.bits
    return source if fits and source.tile.dtype.bits > value.tile.dtype.bits else value


def _read_indices(b: Builder, access: Access) -> list[Value]:
    """Index operands; gathered ones clamped, as a read clamps them."""
    result = []
    for n, (entry, operand) in zip(
        access.ref.ref.shape, access.split_index(), strict=True
    ):
        if operand is None:
            continue
        if isinstance(entry, Gather):
            low, high = (
                b.constant(k, T.scalar(operand.tile.dtype)) for k in (0, n - 1)
            )
            operand = b.op("clamp", low, operand, high)
        result.append(operand)
    return result
