"""Ref promotion: blocks and scratch that are only accessed whole become values.

In: a kernel after `to_loops`. Out: the same kernel with scratch refs, and output blocks
that are read back, as ordinary values carried through loops and branches; an output is
then stored once, at the end of its view's lifetime. Refs accessed in part (or by
atomics or copies) stay in memory, but scratch accessed in fixed parts can be promoted
too. `promote` is the whole path from a pipeline, for backends without addressable
on-chip memory (Triton).
"""

from collections.abc import Iterable, Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Index, Kernel, Op, Value, walk
from pallasite.ir.rewrite import dead_code, used_values
from pallasite.ir.roles import Loop, While
from pallasite.passes.analysis.boxes import box_at
from pallasite.passes.analysis.carried import Known, covers_whole, is_overwritten
from pallasite.passes.analysis.grid import analyze, find_pipeline
from pallasite.passes.lower.loops import to_loops
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.optimise.hoist import hoist


def promote(kernel: Kernel, in_parts: bool = False) -> Kernel:
    """Programs, loops and values instead of a pipeline over block refs.

    Args:
        kernel: what to rewrite.
        in_parts: also promote scratch accessed in fixed parts, which become slices; not
            every backend has those.
    """
    info = analyze(kernel)
    programs = set(info.parallel)
    refs = find_pipeline(kernel).operands[-len(info.windows) :]
    pairs = zip(refs, info.windows, strict=True) if info.windows else ()
    exclusive = {ref for ref, window in pairs if programs <= window.own}
    kernel = canonicalize(to_loops(kernel, info))
    kernel = dead_code(promote_refs(kernel, exclusive, in_parts))
    return canonicalize(hoist(kernel))


def promote_refs(
    kernel: Kernel, exclusive: Iterable[Value] = (), in_parts: bool = False
) -> Kernel:
    """Promote every ref that can be.

    Args:
      kernel: a kernel without windows (after `to_loops`).
      exclusive: main-memory refs of which each program writes a disjoint part. A block
        of another ref is promoted only if it is always overwritten, since writing it
        back unchanged could undo another program's write.
      in_parts: as for `promote`.
    """
    found = _Candidates(kernel, in_parts)
    promotion = _Promotion(found.result(), frozenset(exclusive))
    body = promotion.block(kernel.body)
    return kernel.with_(body=body)


def promote_accumulators(kernel: Kernel) -> Kernel:
    """Promote refs in registers to values: accumulators of matmuls in flight."""
    found = _Candidates(kernel, False).result()
    sums = frozenset(ref for ref in found if ref.ref.space == "regs")
    return kernel.with_(body=_Promotion(sums, frozenset()).block(kernel.body))


class _Candidates:
    """Finds the refs that are only loaded or stored as a whole.

    With `in_parts`, accesses to fixed parts of scratch count too.
    """

    def __init__(self, kernel: Kernel, in_parts: bool):
        self.kernel, self.in_parts = kernel, in_parts
        self.uses: dict[Value, list[Op]] = {}
        self.refused: set[Value] = set()
        self.defined: dict[Value, Op] = {}
        self.homes: dict[Value, Block] = {}
        self.visit(kernel.body, in_test=False)

    def visit(self, block: Block, in_test: bool) -> None:
        for op in block.ops:
            if op.name in ("alloc", "block_view"):
                self.defined[op.result], self.homes[op.result] = op, block
            for value in op.operands:
                if value.is_ref:
                    self.uses.setdefault(value, []).append(op)
                    if not self.is_value(op, value) or (in_test and op.name == "store"):
                        self.refused.add(value)
            if op.name == "roles":
                self.refused |= _exchanged(op)
            for number, region in enumerate(op.regions):
                is_test = op.name == "while" and number == 0
                self.visit(region, in_test or is_test or op.name == "warps")

    def is_value(self, op: Op, ref: Value) -> bool:
        """Whether a use of a ref can become a use of its value."""
        if op.name not in ("load", "store") or op.operands[0] is not ref:
            return False
        index, shape = op.attrs["index"], ref.ref.shape
        if covers_whole(shape, index):
            return True
        defined = self.defined.get(ref)
        is_scratch = defined is not None and defined.name == "alloc"
        return self.in_parts and is_scratch and fixed_part(index, shape) is not None

    def result(self) -> frozenset[Value]:
        return frozenset(ref for ref, op in self.defined.items() if self.can(ref, op))

    def can(self, ref: Value, op: Op) -> bool:
        if ref in self.refused or ref.ref.is_semaphore:
            return False
        if op.name == "alloc":
            return True
        names = {use.name for use in self.uses.get(ref, ())}
        # A block that is only written, or only read, needs no value.
        memory = op.operands[0]
        if names != {"load", "store"} or memory not in self.kernel.outputs:
            return False
        window = op.attrs["window"]
        if window.fill is not None and window.may_hang_over(memory.ref.shape):
            return False  # past the edge it reads as the fill, not as what was stored
        return self.uses[memory] == [op] and not self.stays(op)

    def has_scratch(self) -> bool:
        """Whether state is kept in scratch: results are then stored in the last step,
        which goes behind the loop only if they are not carried through it."""
        allocated = (v for v, op in self.defined.items() if op.name == "alloc")
        return any(self.uses.get(v) for v in allocated)

    def stays(self, view: Op) -> bool:
        """Whether a result's block, though read back, must stay in memory.

        Where an aliasing operand may be read after it is written: a promoted block is
        written at the end of the code it is opened in, and reads elsewhere see that.
        """
        kernel, memory = self.kernel, view.operands[0]
        twins = {
            kernel.inputs[i] for i, o in kernel.aliases if kernel.outputs[o] is memory
        }
        if not twins:
            return self.has_scratch()
        twins |= {v for v, op in self.defined.items() if twins & set(op.operands)}
        written = False
        for op in self.homes[view.result].ops:
            touched = {*used_values(Block((), (op,)))}
            here = view.result in touched and op.name != "load"
            if op.name != "block_view" and twins & touched and (written or here):
                return True
            written |= here
        return False


def _exchanged(roles: Op) -> set[Value]:
    """The memory through which roles exchange data: a value would be each one's own."""
    found, several = set[Value](), set[Value]()
    for region in roles.regions:
        refs = {v for v in used_values(region) if v.is_ref}
        several |= found & refs
        found |= refs
    return several


Current = dict[Value, Value]  # promoted ref -> its current value


class _Promotion:
    """Rewrites blocks in program order, tracking each promoted ref's current value."""

    def __init__(self, refs: frozenset[Value], exclusive: frozenset[Value]):
        self.refs, self.exclusive = set(refs), exclusive
        self.replaced: dict[Value, Value] = {}
        self.current: Current = {}
        self.known: Known = {}

    def block(
        self, block: Block, params: Sequence[Value] = (), modified: Sequence[Value] = ()
    ) -> Block:
        """Rewrite; `modified` refs enter as `params` and leave as extra yields."""
        outside = dict(self.current)
        self.current.update(zip(modified, params, strict=True))
        builder = Builder()
        views: list[Value] = []
        for position, op in enumerate(block.ops):
            builder.loc = op.loc
            if op.name == "block_view" and op.result in self.refs:
                self.open(op, block.ops[position + 1 :], builder, views)
            else:
                self.op(op, builder)
        for view in views:
            builder.store(view, self.current[view])
        yields = (*map(self.new, block.yields), *(self.current[r] for r in modified))
        self.current = outside
        return Block((*block.params, *params), tuple(builder.ops), yields)

    def new(self, value: Value) -> Value:
        return self.replaced.get(value, value)

    def op(self, op: Op, builder: Builder) -> None:
        ref = op.operands[0] if op.operands else None
        if op.name == "alloc" and op.result in self.refs:
            self.current[op.result] = builder.constant(0, op.result.ref.tile)
        elif op.name in ("load", "store") and ref in self.refs:
            self.access(op, builder)
        else:
            op = op.with_(operands=tuple(map(self.new, op.operands)))
            if op.name == "constant" and not op.result.tile.shape:
                value = op.attrs["value"]
                if isinstance(value, int):
                    self.known[op.result] = value
            if op.regions:
                op = self.with_regions(op)
            builder.ops.append(op)

    def open(
        self, op: Op, rest: Sequence[Op], builder: Builder, views: list[Value]
    ) -> None:
        """Open a promoted output block: its value on entry, its store at the end."""
        op = op.with_(operands=tuple(map(self.new, op.operands)))
        builder.ops.append(op)
        view = op.result
        if is_overwritten(rest, view, self.known):
            self.current[view] = builder.constant(0, view.ref.tile)
        elif op.operands[0] in self.exclusive:
            self.current[view] = builder.load(view)
        else:
            self.refs.discard(view)
            return
        views.append(view)

    def access(self, op: Op, builder: Builder) -> None:
        access = Access.of(op)
        mask = None if access.mask is None else self.new(access.mask)
        value = self.current[access.ref]
        part = fixed_part(access.index, access.ref.ref.shape)
        assert part is not None
        if access.value is None:
            seen = _part_of(builder, value, part)
            result = _reshaped(builder, seen, op.result.tile.shape)
            if mask is not None and access.other is not None:
                result = builder.select(mask, result, self.new(access.other))
            self.replaced[op.result] = result
            return
        stored = self.new(access.value)
        if mask is not None:
            old = _reshaped(builder, _part_of(builder, value, part), stored.tile.shape)
            stored = builder.select(mask, stored, old)
        stored = _reshaped(builder, stored, tuple(stop - start for start, stop in part))
        self.current[access.ref] = _with_part(builder, value, part, stored)

    def with_regions(self, op: Op) -> Op:
        modified = [r for r in self.current if _is_stored(r, op.regions)]
        handler = _IN_REGIONS.get(op.name)
        if handler is None or not modified:
            return op.with_(regions=tuple(self.block(r) for r in op.regions))
        return handler(self, op, modified)

    def in_for(self, op: Op, modified: list[Value]) -> Op:
        carried = tuple(self.current[r] for r in modified)
        body = self.block(Loop.of(op).body, _fresh(modified), modified)
        return self.with_results(op, modified, carried, (body,))

    def in_while(self, op: Op, modified: list[Value]) -> Op:
        carried = tuple(self.current[r] for r in modified)
        params = _fresh(modified)
        outside = dict(self.current)
        self.current.update(zip(modified, params, strict=True))
        loop = While.of(op)
        test = self.block(loop.condition)
        test = Block((*test.params, *params), test.ops, test.yields)
        self.current = outside
        body = self.block(loop.body, _fresh(modified), modified)
        return self.with_results(op, modified, carried, (test, body))

    def in_cond(self, op: Op, modified: list[Value]) -> Op:
        branches = []
        for region in op.regions:
            values = [self.current[r] for r in modified]
            branch = self.block(region, values, modified)
            branches.append(Block((), branch.ops, branch.yields))
        return self.with_results(op, modified, (), branches)

    def with_results(
        self,
        op: Op,
        modified: list[Value],
        carried: tuple[Value, ...],
        regions: Sequence[Block],
    ) -> Op:
        results = _fresh(modified)
        self.current.update(zip(modified, results, strict=True))
        return op.with_(
            operands=(*op.operands, *carried),
            results=(*op.results, *results),
            regions=tuple(regions),
        )


_IN_REGIONS = {
    "for": _Promotion.in_for,
    "while": _Promotion.in_while,
    "cond": _Promotion.in_cond,
}


Part = Sequence[tuple[int, int]]  # first element and end, per dimension


def fixed_part(index: Index, shape: Sequence[int]) -> Part | None:
    """The box that an index selects, if it is constant."""
    spans = box_at(index, shape)
    if spans is None or any(span.stride != 1 and span.size > 1 for span in spans):
        return None
    return [(span.start or 0, (span.start or 0) + span.size) for span in spans]


def _part_of(builder: Builder, value: Value, part: Part) -> Value:
    starts, limits = [a for a, _ in part], [b for _, b in part]
    if all(b - a == n for (a, b), n in zip(part, value.tile.shape, strict=True)):
        return value
    ones = (1,) * len(part)
    return builder.op(
        "slice", value, starts=tuple(starts), limits=tuple(limits), strides=ones
    )


def _with_part(
    builder: Builder, value: Value, part: Part, new: Value, dim: int = 0
) -> Value:
    """The value with a box of it replaced."""
    shape = value.tile.shape
    while dim < len(part) and part[dim] == (0, shape[dim]):
        dim += 1
    if dim == len(part):
        return new
    start, stop = part[dim]
    whole = [(0, n) for n in shape]

    def between(a: int, b: int) -> Value:
        return _part_of(builder, value, [*whole[:dim], (a, b), *whole[dim + 1 :]])

    inner = [*part[:dim], (0, stop - start), *part[dim + 1 :]]
    middle = _with_part(builder, between(start, stop), inner, new, dim + 1)
    ends = [between(0, start)] if start else []
    tail = [between(stop, shape[dim])] if stop < shape[dim] else []
    pieces = [*ends, middle, *tail]
    return builder.op("concatenate", *pieces, axis=dim)


def _fresh(refs: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(Value(r.ref.tile, r.name) for r in refs)


def _is_stored(ref: Value, regions: Iterable[Block]) -> bool:
    return any(
        op.name == "store" and op.operands[0] is ref
        for region in regions
        for op in walk(region)
    )


def _reshaped(builder: Builder, value: Value, shape: tuple[int, ...]) -> Value:
    if value.tile.shape == shape:
        return value
    return builder.op("reshape", value, shape=shape)
