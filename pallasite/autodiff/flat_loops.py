"""Makes one loop of a loop whose iterations are nothing but another loop.

Kernels for TPUs bring in large blocks of keys and go through them in smaller pieces:
`for j in range(8): for i in range(4)`, the inner one perhaps only where a mask lets
something through. As `for n in range(32)`, with `j = n // 4` and `i = n % 4`, pieces
are blocks of their own, which the reverse can distribute over a grid. Two loops along
two dimensions of an array stay: `n` says less of where a block is than `j` and `i`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import Access, At, Block, BlockDim, Op, Span, Value, walk
from pallasite.ir.rewrite import producers_of, substitute
from pallasite.ir.roles import Cond, Loop
from pallasite.passes.analysis.affine import Affine, Forms
from pallasite.passes.analysis.memory import written_refs
from pallasite.passes.lower.per_program import Program


def flat_loops(program: Program) -> Program:
    """The program with loops of loops at its top flattened."""
    made = producers_of(program.body)
    ops: list[Op] = []
    for op in program.body.ops:
        nest = _nest(Loop.of(op), made) if op.name == "for" else None
        ops += [op] if nest is None else nest.flat(program) or [op]
    if tuple(ops) == program.body.ops:
        return program
    body = Block(program.body.params, tuple(ops), program.body.yields)
    return flat_loops(program.with_body(body).simplified())


def _nest(outer: Loop, made: dict[Value, Op]) -> "_Nest | None":
    """What is inside a loop, if that is one other loop, at most guarded."""
    if not outer.body.ops or not outer.carried:
        return None
    *before, last = outer.body.ops
    which, within, guarded, handed_on = None, list[Op](), last, outer.yields
    if last.name == "cond":
        cond = Cond.of(last)
        if len(cond.branches) != 2 or cond.branches[0].ops:
            return None
        skipped, branch = cond.branches
        if skipped.yields != outer.carried or not branch.ops:
            return None
        if last.results != outer.yields:
            return None
        *within, guarded = branch.ops
        which, handed_on = cond.which, branch.yields
    if guarded.name != "for":
        return None
    inner = _in_order(Loop.of(guarded), outer.carried)
    if inner is None or inner.results != handed_on:
        return None
    if not all(map(_is_quiet, (*before, *within))):
        return None
    rounds = outer.rounds(made), inner.rounds(made)
    if any(not each or (each.start, each.step) != (0, 1) for each in rounds):
        return None
    count = len(rounds[1])
    return _Nest(outer, inner, tuple(before), tuple(within), which, count)


def _in_order(loop: Loop, carried: Sequence[Value]) -> Loop | None:
    """The loop with what it carries in the order of these values, if it starts so."""
    if len(loop.inits) != len(carried) or {*loop.inits} != {*carried}:
        return None
    places = [loop.inits.index(v) for v in carried]
    ordered = lambda values: tuple(values[place] for place in places)
    params = (loop.index, *ordered(loop.carried))
    body = Block(params, loop.body.ops, ordered(loop.body.yields))
    results = ordered(loop.results)
    return loop.with_(inits=tuple(carried), results=results, body=body)


def _is_flat(program: Program, region: Block, pair: Sequence[Value], n: int) -> bool:
    """Whether blocks that move with the inner loop move with the flat index."""
    forms = Forms(pair)
    forms.add_ops(op for op in program.body.ops if not op.regions)
    forms.add_ops(op for op in region.ops if not {*pair} & {*op.results})
    used = {v for op in walk(region) for v in op.operands}
    views = [op for op in walk(region) if op.name == "block_view" and op.result in used]
    found = (forms.of(v).affine for op in views for v in op.operands[1:])
    return all(f is None or f.coeffs[1] in (0, f.coeffs[0] / n) for f in found)


def _is_quiet(op: Op) -> bool:
    return not op.regions and not written_refs(op)


@dataclass(frozen=True, eq=False)
class _Nest:
    outer: Loop
    inner: Loop
    before: tuple[Op, ...]
    within: tuple[Op, ...]  # the branch, before the inner loop
    which: Value | None  # whether there is an inner loop
    steps: int  # of the inner loop

    def flat(self, program: Program) -> list[Op] | None:
        """The constants of the loop, and the loop; None if blocks would be lost."""
        b, inside = Builder(self.outer.op.loc), Builder(self.outer.op.loc)
        index = Value(self.outer.index.type, self.inner.index.name)
        steps = inside.constant(self.steps, index.tile)
        known = {
            self.outer.index: inside.op("div", index, steps),
            self.inner.index: inside.op("rem", index, steps),
            **dict(zip(self.inner.carried, self.outer.carried, strict=True)),
        }
        code = Block((), (*self.within, *self.pieces(program, index)))
        code = replace(code, yields=self.inner.yields)
        if self.which is None:
            ops, yields = code.ops, code.yields
        else:
            skipped = Block((), (), self.outer.carried)
            guard = Builder(self.outer.op.loc)
            yields = guard.emit("cond", self.which, regions=(skipped, code))
            ops = tuple(guard.ops)
        body = Block((), (*self.before, *ops), tuple(yields))
        body = substitute(body, known)
        params = (index, *self.outer.carried)
        region = Block(params, (*inside.ops, *body.ops), body.yields)
        pair = known[self.outer.index], known[self.inner.index]
        if not _is_flat(program, region, pair, self.steps):
            return None
        count = Loop.of(self.outer.op)
        total = b.mul(count.limit, b.constant(self.steps, count.limit.tile))
        return [*b.ops, self.outer.with_(limit=total, body=region).to_op()]

    def pieces(self, program: Program, index: Value) -> list[Op]:
        """The iteration of the inner loop, with pieces of blocks as blocks."""
        forms = Forms([self.inner.index])
        forms.add_ops(o for o in program.body.ops if not o.regions)
        for ops in (self.before, self.within, self.inner.body.ops):
            forms.add_ops(ops)
        views = {o.result: o for o in self.before if o.name == "block_view"}
        b = Builder(self.inner.op.loc)
        for op in self.inner.body.ops:
            is_access = op.name in ("load", "store")
            view = views.get(op.operands[0]) if is_access else None
            new = self.piece(b, op, view, forms, index) if view is not None else None
            b.ops.append(new or op)
        return b.ops

    def piece(
        self, b: Builder, op: Op, view: Op, forms: Forms, index: Value
    ) -> Op | None:
        """An access to the part of a block that the inner loop has come to."""
        access, window = Access.of(op), view.attrs["window"]
        shown = [d for d, dim in enumerate(window.dims) if dim.kind != "squeezed"]
        pairs = access.split_index()
        for place, (entry, start) in enumerate(pairs):
            if start is None or not isinstance(entry, At | Span):
                continue
            size = entry.size if isinstance(entry, Span) else 1
            dim, form = shown[place], forms.of(start)
            whole = window.dims[dim].size
            moves = form.affine == Affine((size,), 0) and not form.spread
            divides = size * self.steps == whole
            even = view.operands[0].ref.shape[dim] % whole == 0
            by_outer = view.operands[1 + dim] is self.outer.index
            is_block = window.dims[dim].kind == "blocked"
            is_dense = not isinstance(entry, Span) or entry.stride == 1
            if not (moves and divides and even and by_outer and is_block and is_dense):
                continue
            dims, numbers = list(window.dims), list(view.operands[1:])
            is_row = isinstance(entry, At)
            dims[dim] = BlockDim(1, "squeezed") if is_row else BlockDim(size)
            numbers[dim] = index
            new = replace(window, dims=tuple(dims))
            block = b.op("block_view", view.operands[0], *numbers, window=new)
            pairs[place : place + 1] = [] if is_row else [(Span(0, size), None)]
            entries = tuple(each for each, _ in pairs)
            starts = tuple(v for _, v in pairs if v is not None)
            access = replace(access, ref=block, index=entries, index_operands=starts)
            attrs = {**op.attrs, "index": entries}
            return op.with_(operands=access_operands(access), attrs=attrs)
        return None
