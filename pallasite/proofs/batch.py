"""Batch invariance: a row's bits depend neither on other rows nor on where it stands.

Rows are one dimension of each output (`rows.py` says which). A grid axis that moves the
outputs' blocks along it, one block per step, is the row axis; an operand whose blocks
move along one dimension in the same way has rows too, and every other operand is shared
by all rows. Each value of the kernel is then *uniform* (the same in every program along
the row axis), or it has *rows* along one of its dimensions, where element p depends
only on row p and is computed in the same way for every p; or neither is known.

Where each program along the axis has one row, all that it computes belongs to that row.
Nothing else reaches it if scratch carries nothing along the axis, and if the number of
the row is used for nothing but to find the row's own elements of operands: of those
with blocks, and of tables, which have rows then. Tables may choose among the blocks of
operands that all rows share, such as pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pallasite.ir.nodes import Access, At, Block, Kernel, Op, Span, Value, full_index
from pallasite.ir.nodes import walk as walk_ops
from pallasite.ir.opdef import Use, table
from pallasite.ir.roles import Cond, Dot, Loop, Pipeline, While
from pallasite.passes.analysis.affine import Form
from pallasite.passes.analysis.grid import analyze_pipeline
from pallasite.passes.analysis.memory import Roots
from pallasite.proofs.verdicts import PROVED, UNKNOWN, Claim, listed


class MixedError(Exception):
    """A row may depend on others or on its place; says how and where."""

    def __init__(self, why: str, op: Op | None):
        super().__init__(why)
        self.why, self.line = why, str(op.loc or "") if op is not None else ""


@dataclass(frozen=True)
class Rows:
    """What a value has along the rows: `dim` None is uniform.

    A uniform value may still differ along its own dimensions, those in `varies`.
    """

    dim: int | None = None
    varies: frozenset[int] = frozenset()


UNIFORM = Rows()


@dataclass(frozen=True)
class Found:
    """The verdict, and which parameters have rows along which dimension."""

    claim: Claim
    outs: tuple[int, ...]  # of each output
    axis: int | None = None  # along which the rows are
    dims: dict[Value, int] = field(default_factory=dict)  # arrays that have rows
    of: dict[Value, Rows] = field(default_factory=dict)  # blocks, scratch and tiles


def batch(kernel: Kernel, outs: tuple[int, ...] = ()) -> Found:
    """Whether rows of the outputs depend on nothing but their own rows.

    Args:
        kernel: Kernel IR, as traced.
        outs: the dimension of each output that is its rows; the first unless given.
    """
    outs = outs or (0,) * kernel.num_outputs
    try:
        return _Judge(kernel, outs).judge()
    except MixedError as mixed:
        return Found(Claim("batch", UNKNOWN, mixed.why, mixed.line), outs)


@dataclass
class _Judge:
    kernel: Kernel
    outs: tuple[int, ...]
    of: dict[Value, Rows] = field(default_factory=dict)
    rows: dict[Value, int] = field(default_factory=dict)  # the dimension, of arrays
    memory: dict[Value, Rows] = field(default_factory=dict)  # scratch

    def judge(self) -> Found:
        kernel = self.kernel
        pipelines = [op for op in kernel.body.ops if op.name == "pipeline"]
        others = [op for op in kernel.body.ops if op.name not in ("alloc", "pipeline")]
        if len(pipelines) != 1 or any(op.name != "constant" for op in others):
            why = "it has no grid of its own, or does more than run it"
            raise MixedError(why, None)
        self.of.update((op.result, UNIFORM) for op in others)
        op = pipelines[0]
        self.pipeline, self.roots = Pipeline.of(op), Roots(kernel, windows=False)
        for inner in walk_ops(kernel.body):
            if inner is not op and inner.name in ("pipeline", "roles", "warps"):
                raise MixedError(f"it has an inner {inner.name}", inner)
        before = kernel.body.ops[: kernel.body.ops.index(op)]
        self.info = analyze_pipeline(op, before, kernel.aliased_results)
        self.axis = self._row_axis()
        alone = self._windows()
        if alone:
            self._one_row()
        claim = Claim("batch", PROVED, self._what())
        found = Found(claim, self.outs, self.axis, self.rows, self.of)
        try:
            self._carried()
            if not alone:
                self._fixpoint()
        except MixedError as mixed:
            claim = Claim("batch", UNKNOWN, mixed.why, mixed.line)
            return replace(found, claim=claim)
        self.of.update(self.memory)
        return found

    def _what(self) -> str:
        """Which arrays have rows, and which are shared by all of them."""
        used = {a for op in walk_ops(self.kernel.body) for a in op.operands}
        named = list[list[str]](([], []))
        for n, param in enumerate(self.kernel.params):
            if param in used:
                text, dim = param.name or f"operand {n}", self.rows.get(param)
                text += f" (dimension {dim})" if dim else ""
                named[dim is None].append(text)
        return f"rows of {listed(named[0])}; shared: {listed(named[1])}"

    def _row_axis(self) -> int:
        """The axis along which the blocks of all outputs move in their rows."""
        axes = set[int | None]()
        for shown, moves in zip(self.pipeline.shown, self.info.windows, strict=True):
            if shown.window.mode == "out":
                dim = self.outs[self.kernel.outputs.index(shown.array)]
                known = dim < len(moves.forms)
                axes.add(_moved_by(moves.forms[dim]) if known else None)
        if len(axes) != 1 or None in axes:
            raise MixedError(
                "no grid axis alone moves the outputs' blocks along their rows",
                self.pipeline.op,
            )
        (axis,) = axes
        assert axis is not None
        return axis

    def _windows(self) -> bool:
        """What blocks are; whether a program along the axis has one row."""
        op, sizes = self.pipeline.op, set[int]()
        for shown, moves in zip(self.pipeline.shown, self.info.windows, strict=True):
            array, window, index_map, block = shown
            name = array.name or "an operand"
            if self.axis not in moves.axes:
                if moves.written:
                    raise MixedError(f"all rows write the same block of {name}", op)
                self.of[block] = Rows(None, _wide(block.ref.shape))
                continue
            moved = [d for d, f in enumerate(moves.forms) if _moved_by(f) == self.axis]
            alone = all(
                d in moved or self.axis not in f.axes for d, f in enumerate(moves.forms)
            )
            if not (alone and len(moved) == 1) and moves.written:
                raise MixedError(f"the blocks of {name} do not move with its rows", op)
            if not alone or len(moved) != 1:
                self._by_tables(index_map, moved, name)
                sizes.add(1)
                for dim in moved:
                    self._has_rows(array, dim, op)
                continue
            (dim,) = moved
            self._has_rows(array, dim, op)
            first = window.dims[dim]
            if first.kind not in ("blocked", "squeezed"):
                raise MixedError(f"the blocks of {name} overlap", op)
            sizes.add(first.size if first.kind == "blocked" else 1)
            if moves.written and self.axis not in moves.own | moves.apart:
                raise MixedError(f"several programs write one row of {name}", op)
            place = sum(d.kind != "squeezed" for d in window.dims[:dim])
            many = first.kind == "blocked" and first.size > 1
            self.of[block] = Rows(place if many else -1)
        if len(sizes) > 1:
            raise MixedError("operands have blocks of different numbers of rows", op)
        for number, out in self.kernel.aliases:
            if self.rows.get(self.kernel.inputs[number]) != self.outs[out]:
                raise MixedError("an output begins with an operand without rows", op)
        for axis, value in enumerate(self.pipeline.ids):
            if axis != self.axis:
                self.of[value] = UNIFORM
        return sizes == {1}

    def _has_rows(self, array: Value, dim: int, op: Op) -> None:
        if self.rows.setdefault(array, dim) != dim:
            raise MixedError("one operand has rows along two dimensions", op)

    def _by_tables(self, index_map: Block, moved: Sequence[int], name: str) -> None:
        """Blocks that the row chooses: only through tables, and along its own rows."""
        row = index_map.params[self.axis]
        others = [v for d, v in enumerate(index_map.yields) if d not in moved]
        if row in others or not self._only_finds(index_map, row):
            why = f"the blocks of {name} do not move with its rows"
            raise MixedError(why, self.pipeline.op)

    def _one_row(self) -> None:
        """Check a body whose programs have one row each."""
        written = self.roots.written(self.kernel.body)
        outside = set(self.kernel.params) & set(written)
        for op in walk_ops(self.pipeline.body):
            is_known = op.name in _RULES or set(table()[op.name].uses) <= _SEES
            if not is_known:
                raise MixedError(f"what a {op.name} does to rows is not known", op)
            roots = {self.roots.of(v) for v in op.operands if v.is_ref}
            if roots & outside:
                why = "it uses an array that it writes, without a window"
                raise MixedError(why, op)
        self._only_finds(self.pipeline.body, self.pipeline.ids[self.axis], raises=True)

    def _only_finds(self, block: Block, row: Value, raises: bool = False) -> bool:
        """Whether the row's number only finds its elements of tables.

        These have rows along the dimension that it indexes.
        """
        written = self.roots.written(self.kernel.body)
        for op in walk_ops(block):
            used = sum(v is row for v in op.operands)
            used += sum(v is row for b in op.regions for v in b.yields)
            if not used:
                continue
            if op.name == "load" and used == 1:
                access = Access.of(op)
                entries = enumerate(access.split_index())
                at = [d for d, (e, v) in entries if v is row and isinstance(e, At)]
                held = access.ref in self.kernel.inputs and access.ref not in written
                if held and len(at) == 1:
                    self._has_rows(access.ref, at[0], op)
                    continue
            if raises:
                raise MixedError("it uses the number of the program along the rows", op)
            return False
        return True

    def _carried(self) -> None:
        for carry in self.info.carries:
            if self.axis in carry.axes:
                raise MixedError(
                    f"{carry.name} carries values from row to row", self.pipeline.op
                )

    def _fixpoint(self) -> None:
        """Memory that steps share begins as nothing and takes what is stored."""
        for _ in range(4 + len(self.kernel.body.ops)):
            before = dict(self.memory)
            self._block(self.pipeline.body)
            if self.memory == before:
                return
        raise MixedError("what scratch holds is not known", self.pipeline.op)

    # --- code ---

    def _block(self, block: Block) -> None:
        for op in block.ops:
            self._op(op)

    def _op(self, op: Op) -> None:
        rule = _RULES.get(op.name)
        if rule is not None:
            rule(self, op)
            return
        row = table()[op.name]
        if row.elementwise or op.name in ("assume_multiple",):
            self.of[op.result] = self._joined(op, op.operands)
        elif op.results and op.results[0].is_ref:
            self._view(op)
        elif op.regions or row.uses or not op.results:
            raise MixedError(f"what a {op.name} does to rows is not known", op)
        else:
            self._opaque(op)

    def _opaque(self, op: Op) -> None:
        """An op without a rule: of uniform values it makes uniform ones."""
        if any(self._known(v, op).dim is not None for v in op.operands):
            raise MixedError(f"what a {op.name} does to rows is not known", op)
        for result in op.results:
            self.of[result] = Rows(None, _wide(result.tile.shape))

    def _known(self, value: Value, op: Op) -> Rows:
        found = self.of.get(value)
        if found is None:
            if value in self.pipeline.ids:
                raise MixedError("it uses the number of the program along the rows", op)
            raise MixedError("it uses a value that is not followed", op)
        return found

    def _joined(self, op: Op, values: Sequence[Value]) -> Rows:
        return _join([self._known(v, op) for v in values], op)

    # --- memory ---

    def _root(self, ref: Value, op: Op) -> Value:
        root = self.roots.of(ref)
        if ref is not root:
            raise MixedError("it uses a view, which is not followed", op)
        return root

    def _view(self, op: Op) -> None:
        if op.name == "alloc":
            return
        raise MixedError("it uses a view, which is not followed", op)

    def load(self, op: Op) -> None:
        access = Access.of(op)
        root = self._root(access.ref, op)
        if root in self.kernel.inputs and root not in self.roots.written(
            self.kernel.body
        ):
            held = Rows(None, _wide(root.ref.shape))
        elif root in self.kernel.params:
            raise MixedError("it reads an array that it also writes, or an output", op)
        else:
            held = self.of[root] if root in self.of else self.memory.get(root, UNIFORM)
        self.of[op.result] = self._selected(op, access, held)

    def _selected(self, op: Op, access: Access, held: Rows) -> Rows:
        for value in (*access.index_operands, access.mask, access.other):
            if value is not None and self._known(value, op).dim is not None:
                raise MixedError("which elements it uses depends on the rows", op)
        if access.mask is not None and held.dim is not None:
            raise MixedError("it masks elements of rows", op)
        if any(not isinstance(e, At | Span) for e in access.index):
            if held.dim is not None:
                raise MixedError("it gathers from rows", op)
            return Rows(
                None, frozenset(range(op.result.tile.rank if op.results else 0))
            )
        new = dict[int, int]()
        for d, entry in enumerate(access.index):
            if isinstance(entry, Span):
                new[d] = len(new)
        if held.dim is not None and held.dim >= 0:
            n = access.ref.ref.shape[held.dim]
            if access.index[held.dim] != Span(0, n):
                raise MixedError("it uses some rows of a block by their place", op)
            return Rows(
                new[held.dim], frozenset(new[d] for d in held.varies if d in new)
            )
        varies = frozenset(new[d] for d in held.varies if d in new)
        return Rows(held.dim, varies)

    def store(self, op: Op) -> None:
        access = Access.of(op)
        root = self._root(access.ref, op)
        assert access.value is not None
        value = self._known(access.value, op)
        if root in self.kernel.params:
            raise MixedError("it stores to an array without a window", op)
        if root in self.of:
            held = self.of[root]
            if held.dim is None:
                raise MixedError("all rows write one block", op)
            if held.dim < 0:
                self._selected(op, access, held)
                return  # each program has one row
            place = self._selected(op, access, held)
            if value.dim is None and place.dim in value.varies:
                raise MixedError("what it stores depends on the place of the row", op)
            if value.dim is not None and value.dim != place.dim:
                raise MixedError("it stores rows along another dimension", op)
            return
        self._into_scratch(op, access, root, value)

    def _into_scratch(self, op: Op, access: Access, root: Value, value: Rows) -> None:
        spans = [d for d, e in enumerate(access.index) if isinstance(e, Span)]
        has_rows = value.dim is not None and value.dim >= 0
        if has_rows and (access.mask is not None or len(spans) < len(access.index)):
            raise MixedError("it stores rows into part of scratch", op)
        for v in access.index_operands:
            if self._known(v, op).dim is not None:
                raise MixedError("which elements it uses depends on the rows", op)
        if value.dim is not None and value.dim >= 0:
            if (
                access.index[spans[value.dim]]
                != full_index(root.ref.shape)[spans[value.dim]]
            ):
                raise MixedError("it stores rows into part of scratch", op)
            new = Rows(spans[value.dim], frozenset(spans[d] for d in value.varies))
        else:
            full = access.index == full_index(root.ref.shape) and access.mask is None
            new = Rows(value.dim, value.varies if full else _wide(root.ref.shape))
        old = self.memory.get(root)
        self.memory[root] = new if old is None else _join([old, new], op)

    # --- control ---

    def cond(self, op: Op) -> None:
        which = self._known(op.operands[0], op)
        if which.dim is not None:
            raise MixedError("whether code runs depends on the rows", op)
        for branch in Cond.of(op).branches:
            self._block(branch)
        for n, result in enumerate(op.results):
            self.of[result] = _join(
                [self._known(b.yields[n], op) for b in Cond.of(op).branches], op
            )

    def loop(self, op: Op) -> None:
        loop = Loop.of(op)
        if any(self._known(v, op).dim is not None for v in loop.bounds):
            raise MixedError("how often a loop runs depends on the rows", op)
        self.of[loop.index] = UNIFORM
        self._carry(op, loop.inits, loop.carried, loop.body)

    def while_(self, op: Op) -> None:
        loop = While.of(op)
        for param, init in zip(loop.condition.params, loop.inits, strict=True):
            self.of[param] = self._known(init, op)
        self._carry(op, loop.inits, loop.body.params, loop.body)
        for param, result in zip(loop.condition.params, op.results, strict=True):
            self.of[param] = self.of[result]
        self._block(loop.condition)
        if self._known(loop.condition.yields[0], op).dim is not None:
            raise MixedError("how often a loop runs depends on the rows", op)

    def _carry(
        self, op: Op, inits: Sequence[Value], params: Sequence[Value], body: Block
    ) -> None:
        state = [self._known(v, op) for v in inits]
        for _ in range(8):
            self.of.update(zip(params, state, strict=True))
            self._block(body)
            after = [
                _join([a, self._known(v, op)], op)
                for a, v in zip(state, body.yields, strict=True)
            ]
            if after == state:
                self.of.update(zip(op.results, state, strict=True))
                return
            state = after
        raise MixedError("what a loop carries is not known", op)

    # --- ops on tiles ---

    def constant(self, op: Op) -> None:
        self.of[op.result] = UNIFORM

    def iota(self, op: Op) -> None:
        self.of[op.result] = Rows(None, frozenset([op.attrs["dim"]]))

    def _moved(self, op: Op, new: Callable[[int], int | None]) -> None:
        x = self._known(op.operands[0], op)
        varies = frozenset(d for old in x.varies if (d := new(old)) is not None)
        dim = x.dim
        if dim is not None and dim >= 0:
            dim = new(dim)
            if dim is None:
                raise MixedError(f"a {op.name} loses the rows", op)
        self.of[op.result] = Rows(dim, varies)

    def broadcast(self, op: Op) -> None:
        dims, x = op.attrs["dims"], self._known(op.operands[0], op)
        if x.dim is not None and x.dim >= 0:
            before = op.operands[0].tile.shape[x.dim]
            if op.attrs["shape"][dims[x.dim]] != before:
                raise MixedError("it repeats a block's only row", op)
        self._moved(op, lambda d: dims[d])

    def transpose(self, op: Op) -> None:
        perm = op.attrs["perm"]
        self._moved(op, perm.index)

    def reshape(self, op: Op) -> None:
        """Dimensions that keep their place in the flat order stay dimensions."""
        before, after = op.operands[0].tile.shape, op.result.tile.shape
        places = {_flat(after, d): d for d, n in enumerate(after) if n > 1}
        x = self._known(op.operands[0], op)
        kept = {d: places.get(_flat(before, d)) for d in range(len(before))}
        lost = any(before[d] > 1 and kept[d] is None for d in x.varies)
        dim = x.dim
        if dim is not None and dim >= 0:
            dim = kept[dim] if before[dim] > 1 else None
            if dim is None:
                raise MixedError("a reshape merges rows with another dimension", op)
        varies = frozenset(k for d in x.varies if (k := kept[d]) is not None)
        if lost:
            varies = frozenset(range(len(after))) - (
                {dim} if dim is not None else set()
            )
        self.of[op.result] = Rows(dim, varies)

    def along(self, op: Op) -> None:
        """Ops along some dimensions: they must not be the rows."""
        x = self._joined(op, op.operands)
        axes = op.attrs["axes"] if "axes" in op.attrs else (op.attrs["axis"],)
        if x.dim in axes:
            raise MixedError(f"a {op.name} combines rows", op)
        if op.results[0].tile.rank == op.operands[0].tile.rank:
            for result in op.results:  # a sum so far of equal elements varies
                self.of[result] = Rows(x.dim, x.varies | set(axes))
            return
        left = [d for d in range(op.operands[0].tile.rank) if d not in axes]
        self._moved(op, lambda d: left.index(d) if d in left else None)

    def concatenate(self, op: Op) -> None:
        x, axis = self._joined(op, op.operands), op.attrs["axis"]
        if x.dim == axis:
            raise MixedError("it concatenates rows", op)
        self.of[op.result] = Rows(x.dim, x.varies | {axis})

    def slice(self, op: Op) -> None:
        x = self._known(op.operands[0], op)
        before, after = op.operands[0].tile.shape, op.result.tile.shape
        dim = -1 if x.dim is None else x.dim
        if dim >= 0 and before[dim] != after[dim]:
            raise MixedError("it slices rows", op)
        self.of[op.result] = x

    def dot(self, op: Op) -> None:
        dot = Dot.of(op)
        sides = [self._known(s.value, op) for s in dot.sides]
        found: list[int] = []
        lone = any(r.dim == -1 for r in sides)
        for number, (side, rows) in enumerate(zip(dot.sides, sides, strict=True)):
            if rows.dim is None or rows.dim < 0:
                continue
            if rows.dim in side.contract:
                raise MixedError("a dot adds rows up", op)
            if rows.dim in side.batch:
                found.append(side.batch.index(rows.dim))
                other = dot.sides[1 - number]
                pair = sides[1 - number]
                partner = other.batch[side.batch.index(rows.dim)]
                if pair.dim != partner and (
                    pair.dim is not None or partner in pair.varies
                ):
                    raise MixedError("a dot pairs rows with something else", op)
            else:
                first = len(dot.lhs.batch) + (len(dot.lhs.free) if number else 0)
                found.append(first + side.free.index(rows.dim))
        if len(set(found)) > 1 or (found and lone):
            raise MixedError("a dot combines rows with rows", op)
        everything = frozenset(range(op.result.tile.rank)) - set(found)
        dim = found[0] if found else (-1 if lone else None)
        self.of[op.result] = Rows(dim, everything)

    def ignore(self, op: Op) -> None:
        return


def _join(values: Sequence[Rows], op: Op) -> Rows:
    """What an elementwise op makes of values."""
    dims = {v.dim for v in values if v.dim is not None}
    if len(dims) > 1:
        raise MixedError("it combines rows with other rows", op)
    varies = frozenset[int]().union(*(v.varies for v in values))
    if not dims:
        return Rows(None, varies)
    (dim,) = dims
    if dim in varies:
        raise MixedError("a row's result depends on its place in the block", op)
    return Rows(dim, varies)


def _moved_by(form: Form) -> int | None:
    """The axis that an index is equal to; None if it is something else."""
    affine = form.affine
    if affine is None or affine.const != 0:
        return None
    moved = [a for a, c in enumerate(affine.coeffs) if c]
    return moved[0] if len(moved) == 1 and affine.coeffs[moved[0]] == 1 else None


_SEES = {Use.NONE, Use.VIEW}


def _wide(shape: Sequence[int]) -> frozenset[int]:
    """The dimensions along which a tile can differ at all."""
    return frozenset(d for d, n in enumerate(shape) if n > 1)


def _flat(shape: Sequence[int], dim: int) -> tuple[int, int]:
    """The size of a dimension, and how many elements its steps are apart."""
    apart = 1
    for n in shape[dim + 1 :]:
        apart *= n
    return shape[dim], apart


_RULES: dict[str, Callable[[_Judge, Op], None]] = {
    "load": _Judge.load,
    "store": _Judge.store,
    "cond": _Judge.cond,
    "for": _Judge.loop,
    "while": _Judge.while_,
    "constant": _Judge.constant,
    "iota": _Judge.iota,
    "broadcast_in_dim": _Judge.broadcast,
    "transpose": _Judge.transpose,
    "reshape": _Judge.reshape,
    "reduce": _Judge.along,
    "arg_reduce": _Judge.along,
    "scan": _Judge.along,
    "sort": _Judge.along,
    "top_k": _Judge.along,
    "rev": _Judge.along,
    "concatenate": _Judge.concatenate,
    "slice": _Judge.slice,
    "dot": _Judge.dot,
    "alloc": _Judge.ignore,
    "debug_print": _Judge.ignore,
}
