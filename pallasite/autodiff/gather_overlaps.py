"""Cotangents of overlapping blocks, gathered where they would be scattered.

A kernel that reads overlapping blocks of an operand (a convolution, a stencil, its
neighbours' edges) has a reverse that adds to overlapping blocks of its cotangent, which
programs can only do in sequence, in memory. An element's sum may be written the other
way round: as what the programs around it add to it. In a program of its own, each block
of the cotangent is such a sum, and belongs to one program.

What is added is taken apart into terms: sums, padding, slices and concatenations only
say where a tile of them lies. Program `p` adds a term at `step * p + first`, so block
`b` of `step` elements gets parts of the tiles of programs `b - k`, for few numbers `k`.
These are computed again where they are needed (`moved_tiles.py`). Places may go round,
as those of a periodic stencil's neighbours: then all this is modulo the programs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import prod

import numpy as np

from pallasite.autodiff.backward_windows import index_count, only, place
from pallasite.autodiff.moved_tiles import Along, MovedTiles, NotMoved
from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    BlockDim,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.rewrite import producers_of
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.analysis.step_table import StepTable
from pallasite.passes.lower.per_program import Program

MOST_TERMS = 64
MOST_PIECES = 64
Range = tuple[int, int]


def gather_overlaps(
    program: Program, results: Iterable[Value], in_blocks: bool
) -> tuple[Program, list[Program]]:
    """The program without sums that can be gathered, and a program for each of them.

    `in_blocks`: also those over overlapping parts of one block. Registers, where GPUs
    keep sums, have no parts.
    """
    gathered = []
    for ref in results:
        found = _gathered(only(program, [ref]), ref, in_blocks)
        if found is not None:
            gathered.append(found)
            program = without(program, ref)
    return program, gathered


def without(program: Program, ref: Value) -> Program:
    """The program without its effects on a result."""
    written = Roots(program.body).written(program.body)
    return only(program, [other for other in written if other is not ref])


@dataclass(frozen=True)
class _Term:
    """A tile of which a part is added to a result.

    Attributes:
        add: which of the additions it belongs to.
        value: the tile.
        taken: per dimension, the elements of it that are added.
        moved: per dimension, where its element 0 is in what is added.
        guards: scalars, and what they have to be.
    """

    add: int
    value: Value
    taken: tuple[Range, ...]
    moved: tuple[int, ...]
    guards: tuple[tuple[Value, bool], ...] = ()


@dataclass(frozen=True)
class _Dim:
    """A dimension of the result.

    Attributes:
        tile_dim: that of the tiles that are added; None: they have none.
        step: how many elements a program's own block has.
        axis: the grid axis along which places advance by that; None: they stay.
        own: whether a block of the program's is divided by the grid as it is.
        wraps: whether places go round: past the last block is the first.
    """

    tile_dim: int | None
    step: int
    axis: int | None = None
    own: bool = False
    wraps: bool = False


@dataclass(frozen=True)
class _Piece:
    """What a block gets of one term of program `b - k`, per dimension of the result."""

    term: _Term
    shifts: tuple[int, ...]
    inside: tuple[Range, ...]  # the elements of the block
    taken: tuple[Range, ...]  # per dimension of the tile, its elements


def _gathered(program: Program, ref: Value, in_blocks: bool) -> Program | None:
    kept = place(program, ref).kept
    uses = [op for op in walk(program.body) if ref in op.operands]
    if not uses or not program.sizes or (all(kept) and not (in_blocks and kept)):
        return None
    try:
        return _Gather(program, ref, all(kept)).program_of_blocks()
    except NotMoved:
        return None


class _Gather:
    def __init__(self, program: Program, ref: Value, in_block: bool):
        self.program, self.ref, self.in_block = program, ref, in_block
        self.body = program.body
        self.made = producers_of(program.body)
        self.table = StepTable(program.body.params, program.sizes)
        self.table.add_ops(program.body.ops)
        self.builder = Builder(program.loc)
        self.views = [op for op in self.body.ops if ref in op.operands]
        shown = {op.result for op in self.views if op.name == "block_view"}
        self.adds = [
            op
            for op in self.body.ops
            if op.name == "atomic_rmw" and (op.operands[0] in {ref, *shown})
        ]
        others = {op for op in self.views if op.name != "block_view"}
        uses = [op for op in walk(self.body) if {ref, *shown} & {*op.operands}]
        if {*uses} != {*self.adds, *self.views} or not others <= {*self.adds}:
            raise NotMoved
        for op in self.adds:
            if op.attrs["kind"] != "add" or op.attrs["mask"]:
                raise NotMoved
        self.placed = place(program, ref)
        self.stays = [
            self.tile_dims(d)
            for d, is_kept in enumerate(self.placed.kept)
            if not in_block and (is_kept or self.is_whole(d))
        ]
        self.terms = [t for n, op in enumerate(self.adds) for t in self.terms_of(n, op)]
        if len(self.terms) > MOST_TERMS:
            raise NotMoved
        self.dims = self.find_dims()

    # --- terms ---

    def terms_of(self, number: int, op: Op) -> list[_Term]:
        value = Access.of(op).value
        assert value is not None
        shape = value.tile.shape
        taken, moved = tuple((0, n) for n in shape), (0,) * len(shape)
        return self.parts(_Term(number, value, taken, moved))

    def parts(self, term: _Term) -> list[_Term]:
        """The terms of which a term is the sum."""
        if any(low >= high for low, high in term.taken):
            return []
        op = self.made.get(term.value)
        if op is None:
            return [term]
        if op.name == "add":
            return [p for v in op.operands for p in self.parts(replace(term, value=v))]
        if op.name in ("pad", "slice", "concatenate") and self.moves(op):
            return self.moved(term, op)
        if op.name == "select_n" and not op.operands[0].tile.shape:
            which, *values = op.operands
            zeros = [self.is_zero(v) for v in values]
            if sum(zeros) == 1 and len(values) == 2:
                taken = zeros.index(False)
                guards = (*term.guards, (which, bool(taken)))
                return self.parts(replace(term, value=values[taken], guards=guards))
        if op.name == "cast":
            return self.widened(term, op)
        return [term]

    def moves(self, op: Op) -> bool:
        """Whether an op moves elements along a dimension in which blocks overlap."""
        if op.name == "concatenate":
            return op.attrs["axis"] not in self.stays
        old, new = op.operands[0].tile.shape, op.result.tile.shape
        sizes = enumerate(zip(old, new, strict=True))
        return any(a != b for d, (a, b) in sizes if d not in self.stays)

    def moved(self, term: _Term, op: Op) -> list[_Term]:
        if op.name == "concatenate":
            return self.joined(term, op)
        if op.name == "slice" and set(op.attrs["strides"]) <= {1}:
            return self.piece(term, op.operands[0], [-n for n in op.attrs["starts"]])
        is_plain = op.name == "pad" and not any(op.attrs["interior"])
        if is_plain and self.is_zero(op.operands[1]):
            return self.piece(term, op.operands[0], op.attrs["low"])
        return [term]

    def piece(self, term: _Term, value: Value, low: Sequence[int]) -> list[_Term]:
        """The part of a term that is in a tile, which lies `low` elements further."""
        triples = zip(term.taken, low, value.tile.shape, strict=True)
        taken = tuple((max(a - n, 0), min(b - n, size)) for (a, b), n, size in triples)
        moved = tuple(m + n for m, n in zip(term.moved, low, strict=True))
        return self.parts(replace(term, value=value, taken=taken, moved=moved))

    def joined(self, term: _Term, op: Op) -> list[_Term]:
        axis, end, found = op.attrs["axis"], 0, list[_Term]()
        for value in op.operands:
            low = [0] * value.tile.rank
            low[axis], end = end, end + value.tile.shape[axis]
            found += self.piece(term, value, low)
        return found

    def widened(self, term: _Term, op: Op) -> list[_Term]:
        """The terms of a sum that is widened, each widened before it is added."""
        (x,), dtype = op.operands, op.result.tile.dtype
        wider = x.tile.dtype.is_float and x.tile.dtype.bits <= dtype.bits
        found = self.parts(replace(term, value=x)) if wider else []
        if not found or [t.value for t in found] == [x]:
            return [term]
        wide = []
        for each in found:
            value = self.builder.cast(each.value, dtype)
            self.made[value] = self.builder.ops[-1]
            wide.append(replace(each, value=value))
        return wide

    def is_zero(self, value: Value) -> bool:
        op = self.made.get(value)
        if op is not None and op.name == "broadcast_in_dim":
            return self.is_zero(op.operands[0])
        return op is not None and op.name == "constant" and op.attrs["value"] == 0

    # --- where they are added ---

    def find_dims(self) -> list[_Dim]:
        self.firsts: list[dict[int, int]] = []
        dims = []
        for d, is_kept in enumerate(self.placed.kept):
            dims.append(self.own_dim(d) if is_kept else self.advancing_dim(d))
        used = [dim.axis for dim in dims if dim.axis is not None]
        if len(set(used)) < len(used) or self.placed.own & {*used}:
            raise NotMoved
        return dims

    def entries(self, op: Op) -> list[tuple[At | Span, Value | None] | None]:
        """Per dimension of the result, the entry of an addition's index."""
        index = iter(Access.of(op).split_index())
        view = self.made.get(op.operands[0])
        dims = view.attrs["window"].dims if view is not None else ()
        found: list[tuple[At | Span, Value | None] | None] = []
        for d in range(self.ref.ref.rank):
            if dims and dims[d].kind == "squeezed":
                found.append(None)
                continue
            entry, operand = next(index)
            if not isinstance(entry, (At, Span)) or getattr(entry, "stride", 1) != 1:
                raise NotMoved
            found.append((entry, operand))
        return found

    def is_whole(self, d: int) -> bool:
        """Whether all of a dimension is added to, in one piece."""
        whole = (Span(0, self.ref.ref.shape[d]), None)
        alone = all(op.operands[0] is self.ref for op in self.adds)
        return alone and all(self.entries(op)[d] == whole for op in self.adds)

    def tile_dims(self, d: int) -> int | None:
        """Which dimension of the added tiles lies along one of the result."""
        found = set[int | None]()
        for op in self.adds:
            entries = self.entries(op)
            spans = [e is not None and isinstance(e[0], Span) for e in entries]
            found.add(sum(spans[:d]) if spans[d] else None)
        if len(found) != 1:
            raise NotMoved
        return found.pop()

    def own_dim(self, d: int) -> _Dim:
        firsts: dict[int, int] = {}
        for n, op in enumerate(self.adds):
            entry = self.entries(op)[d]
            if entry is not None and entry[1] is not None:
                raise NotMoved
            firsts[n] = 0 if entry is None else entry[0].start or 0
        self.firsts.append(firsts)
        view = self.views[0]
        size = view.attrs["window"].dims[d].size or 1
        return _Dim(self.tile_dims(d), size, own=True)

    def advancing_dim(self, d: int) -> _Dim:
        """Places advance by the same step along one axis, in all terms, or stay."""
        axes, steps = set[int](), set[int]()
        n = self.ref.ref.shape[d]
        tables: dict[_Term, dict[int, int]] = {}
        for term in self.terms:
            start = self.start(self.adds[term.add], d)
            active = self.active(term)
            shape = np.broadcast_shapes(start.shape, active.shape)
            start, active = (
                np.broadcast_to(start, shape),
                np.broadcast_to(active, shape),
            )
            varies = [a for a in range(len(shape)) if _varies(start, active, a)]
            if len(varies) > 1:
                raise NotMoved
            axis = varies[0] if varies else None
            along = 0 if axis is None else axis
            numbers: dict[int, int] = {}
            for at in np.argwhere(active):
                numbers.setdefault(int(at[along]), int(start[tuple(at)]))
            tables[term] = numbers
            if axis is not None:
                axes.add(axis)
                steps |= _steps(numbers)
        wraps = len(steps) > 1 or any(step < 0 for step in steps)
        steps = {step % n for step in steps} if wraps else steps
        return self.advancing(d, tables, axes, steps, wraps)

    def advancing(
        self,
        d: int,
        tables: dict[_Term, dict[int, int]],
        axes: set[int],
        steps: set[int],
        wraps: bool,
    ) -> _Dim:
        n = self.ref.ref.shape[d]
        if len(axes) > 1 or len(steps) > 1 or any(step <= 0 for step in steps):
            raise NotMoved
        axis, step = (axes.pop(), steps.pop()) if axes else (None, 0)
        if wraps and (axis is None or step * self.program.sizes[axis] != n):
            raise NotMoved
        firsts: dict[int, int] = {}
        for term, numbers in tables.items():
            first = {x - step * i for i, x in numbers.items()}
            if wraps and axis is not None:
                if len(numbers) < self.program.sizes[axis]:
                    raise NotMoved
                # The nearest place before or after, of those that are the same.
                first = {(x + n // 2) % n - n // 2 for x in first}
            first |= {firsts[term.add]} if term.add in firsts else set()
            if len(first) > 1:
                raise NotMoved
            if first:
                firsts[term.add] = first.pop()
        self.terms = [term for term in self.terms if tables[term]]
        self.firsts.append(firsts)
        return _Dim(self.tile_dims(d), step or n, axis, wraps=wraps)

    def start(self, op: Op, d: int) -> np.ndarray:
        """At every step, where an addition starts along a dimension."""
        entry, view = self.entries(op)[d], self.made.get(op.operands[0])
        start = np.zeros((1,) * len(self.program.sizes), np.int64)
        if view is not None:
            dim = view.attrs["window"].dims[d]
            index = self.number(view.operands[1 + d])
            count = index_count(dim, self.ref.ref.shape[d])
            if count is None:
                raise NotMoved
            index = np.clip(index, 0, max(count, 1) - 1)
            start = index * (dim.size if dim.kind == "blocked" else 1)
            start = start - dim.padding[0]
        if entry is not None:
            fixed, operand = entry
            if operand is None:
                return start + (fixed.start or 0)
            # A start is clamped so that what is accessed fits.
            shown = self.shown_size(op, d)
            last = shown - (fixed.size if isinstance(fixed, Span) else 1)
            start = start + np.clip(self.number(operand), 0, last)
        return start

    def shown_size(self, op: Op, d: int) -> int:
        """The elements along a dimension of the result that an addition may access."""
        view = self.made.get(op.operands[0])
        size = None if view is None else view.attrs["window"].dims[d].size
        return self.ref.ref.shape[d] if size is None else size

    def number(self, value: Value) -> np.ndarray:
        found = self.table.of(value)
        if found is None:
            raise NotMoved
        return found.astype(np.int64)

    def active(self, term: _Term) -> np.ndarray:
        """The steps at which a term is added, as far as that is known."""
        found = np.ones((1,) * len(self.program.sizes), bool)
        for value, truth in term.guards:
            test = self.table.of(value)
            if test is not None:
                found = found & (test.astype(bool) == truth)
        return found

    # --- the blocks ---

    def program_of_blocks(self) -> Program:
        stay = all(dim.axis is None for dim in self.dims)
        if not self.terms or stay != self.in_block:
            raise NotMoved
        pieces = [p for term in self.terms for p in self.pieces(term)]
        if not pieces or len(pieces) > MOST_PIECES:
            raise NotMoved
        if self.in_block and not any(
            one.inside != two.inside and not _are_apart(one.inside, two.inside)
            for one, two in combinations(pieces, 2)
        ):
            raise NotMoved
        sizes = list(self.program.sizes)
        shape = self.ref.ref.shape
        for n, dim in zip(shape, self.dims, strict=True):
            if dim.axis is not None:
                sizes[dim.axis] = -(-n // dim.step)
        round_ = {dim.axis for dim in self.dims if dim.wraps and dim.axis is not None}
        self.tiles = MovedTiles(
            self.builder, self.program, self.made, sizes, self.table, round_
        )
        total: Value | None = None
        for value in self.values(pieces):
            total = value if total is None else self.builder.add(total, value)
        assert total is not None
        self.add_to_own_block(total)
        ops = [op for op in self.body.ops if op not in (*self.adds, *self.views)]
        body = Block(self.body.params, (*ops, *self.builder.ops))
        made = replace(self.program, body=body, sizes=tuple(sizes))
        return made.simplified()

    def pieces(self, term: _Term) -> Iterator[_Piece]:
        """What blocks get of a term: parts of it, of programs before and after."""
        options = [self.along(term, d) for d in range(len(self.dims))]
        for chosen in product(*options):
            shifts = tuple(k for k, _, _ in chosen)
            inside = tuple(r for _, r, _ in chosen)
            taken = list(term.taken)
            for dim, (_, _, part) in zip(self.dims, chosen, strict=True):
                if dim.tile_dim is not None:
                    taken[dim.tile_dim] = part
            yield _Piece(term, shifts, inside, tuple(taken))

    def along(self, term: _Term, d: int) -> list[tuple[int, Range, Range]]:
        """`k`, and the ranges in the block and in the tile, along a dimension."""
        dim, first = self.dims[d], self.firsts[d].get(term.add, 0)
        low, high = 0, 1
        if dim.tile_dim is not None:
            low, high = term.taken[dim.tile_dim]
            first += term.moved[dim.tile_dim]
        shifts = [0]
        if dim.axis is not None:
            step = dim.step
            shifts = [*range((first + low) // step, (first + high - 1) // step + 1)]
        found = []
        for k in shifts:
            start = first - k * dim.step if dim.axis is not None else first
            a, b = max(start + low, 0), min(start + high, dim.step)
            if a < b:
                found.append((k, (a, b), (a - start, b - start)))
        return found

    def block_shape(self) -> list[int]:
        return [dim.step for dim in self.dims if dim.tile_dim is not None]

    def values(self, pieces: Sequence[_Piece]) -> Iterator[Value]:
        """The tiles whose sum is a block: pieces that adjoin are one, if they can."""
        groups: dict[object, list[_Piece]] = {}
        for piece in pieces:
            groups.setdefault(self.group(piece), []).append(piece)
        # No window goes round.
        plain = not any(dim.wraps for dim in self.dims)
        wide = [group for group in groups.values() if plain and self.is_wide(group)]
        places = [along for group in wide for along in self.ahead(group[0])]
        if all(a.first == 0 and a.size == a.step for a in places):
            wide = []
        self.tiles.reach([self.ahead(group[0]) for group in wide])
        for group in groups.values():
            if group in wide:
                try:
                    yield self.tiles.extended(group[0].term.value, self.ahead(group[0]))
                    continue
                except NotMoved:
                    pass
            if self.in_block:
                raise NotMoved
            for piece in group:
                yield self.padded(piece)

    def group(self, piece: _Piece) -> object:
        """A key that is equal for pieces of a tile that lie as far from each other in
        the block as in the tile and in those of the programs beside it."""
        return piece.term.value, tuple((a.tile_dim, a.first) for a in self.ahead(piece))

    def ahead(self, piece: _Piece) -> tuple[Along, ...]:
        """Where the block's element 0 is in the tile, continued by those beside it."""
        found = []
        shape = piece.term.value.tile.shape
        for d, (dim, k, (start, _)) in enumerate(
            zip(self.dims, piece.shifts, piece.inside, strict=True)
        ):
            at = 0 if dim.tile_dim is None else piece.taken[dim.tile_dim][0]
            size = 1 if dim.tile_dim is None else shape[dim.tile_dim]
            first = at - start - (k * dim.step if dim.axis is not None else 0)
            found.append(Along(d, dim.tile_dim, dim.axis, dim.step, size, first))
        return tuple(found)

    def is_wide(self, group: Sequence[_Piece]) -> bool:
        """Whether pieces of some programs are all of the block, each element once.

        Along dimensions that no axis divides there is zero beside a tile.
        """
        for along in self.ahead(group[0]):
            if along.axis is not None and along.size != along.step:
                return False
        alone = [dim.tile_dim for dim in self.dims if dim.axis is None]
        for piece in group:
            shape = piece.term.value.tile.shape
            if any(piece.taken[d] != (0, shape[d]) for d in alone if d is not None):
                return False
            if not all(self.is_sure(piece, guard) for guard in piece.term.guards):
                return False
        boxes = [
            [
                r
                for r, dim in zip(p.inside, self.dims, strict=True)
                if dim.axis is not None
            ]
            for p in group
        ]
        volume = sum(prod(b - a for a, b in box) for box in boxes)
        apart = all(_are_apart(*pair) for pair in combinations(boxes, 2))
        whole = prod(dim.step for dim in self.dims if dim.axis is not None)
        return apart and volume == whole

    def is_sure(self, piece: _Piece, guard: tuple[Value, bool]) -> bool:
        """Whether a guard holds in all programs that add the piece to some block."""
        value, truth = guard
        test = self.table.of(value)
        if test is None:
            return False
        test = test.astype(bool) == truth
        for dim, k, n in zip(self.dims, piece.shifts, self.ref.ref.shape, strict=True):
            if dim.axis is not None and test.shape[dim.axis] > 1 and not dim.wraps:
                blocks = -(-n // dim.step)
                programs = range(max(-k, 0), min(blocks - k, test.shape[dim.axis]))
                test = np.take(test, [*programs], dim.axis)
        return bool(test.all())

    def padded(self, piece: _Piece) -> Value:
        """A piece where it lies in the block, and zero beside it."""
        b = self.builder
        shifts = {
            dim.axis: k
            for dim, k in zip(self.dims, piece.shifts, strict=True)
            if dim.axis is not None and k
        }
        value = self.tiles.piece(piece.term.value, shifts, piece.taken)
        tests = self.tiles.there(shifts)
        for guard in piece.term.guards:
            if not self.is_sure(piece, guard):
                test = self.tiles.piece(guard[0], shifts, ())
                tests.append(test if guard[1] else b.op("not", test))
        for test in tests:
            value = b.select(test, value, b.like(0.0, value))
        ranges = [
            (r, dim.step)
            for r, dim in zip(piece.inside, self.dims, strict=True)
            if dim.tile_dim is not None
        ]
        low = tuple(a for (a, _), _ in ranges)
        high = tuple(n - end for (_, end), n in ranges)
        if any((*low, *high)):
            zero = b.constant(0.0, value.tile.with_shape(()))
            rest = (0,) * len(low)
            value = b.op("pad", value, zero, low=low, high=high, interior=rest)
        return value

    def add_to_own_block(self, total: Value) -> None:
        b, view = self.builder, self.views[0]
        indices: list[Value] = []
        dims: list[BlockDim] = []
        for d, dim in enumerate(self.dims):
            if dim.own:
                dims.append(view.attrs["window"].dims[d])
                indices.append(view.operands[1 + d])
                if dim.tile_dim is None and dims[-1].kind != "squeezed":
                    raise NotMoved
                continue
            is_one = dim.tile_dim is None and dim.step == 1
            if dim.tile_dim is None and not is_one:
                raise NotMoved
            dims.append(BlockDim(1, "squeezed") if is_one else BlockDim(dim.step))
            stays = dim.axis is None
            indices.append(b.index(0) if stays else self.body.params[dim.axis or 0])
        block = b.op(
            "block_view", self.ref, *indices, window=Window(tuple(dims), "out")
        )
        spans = tuple(Span(0, n) for n in block.ref.shape)
        b.emit("atomic_rmw", block, total, kind="add", index=spans, mask=False)


def _steps(numbers: Mapping[int, int]) -> set[int]:
    """By how much places advance from one program to the next."""
    pairs = pairwise(sorted(numbers.items()))
    return {(y - x) // (j - i) for (i, x), (j, y) in pairs}


def _are_apart(one: Sequence[Range], two: Sequence[Range]) -> bool:
    """Whether boxes have no element in common."""
    return any(b <= c or d <= a for (a, b), (c, d) in zip(one, two, strict=True))


def _varies(numbers: np.ndarray, active: np.ndarray, axis: int) -> bool:
    """Whether numbers differ along an axis, where they are active."""
    if numbers.shape[axis] < 2:
        return False
    top = np.iinfo(np.int64)
    high = np.where(active, numbers, top.min).max(axis)
    low = np.where(active, numbers, top.max).min(axis)
    return bool((high > low).any())
