"""The operands, attributes and regions of a structured op, by name.

`Pipeline.of(op)`, `Loop.of(op)`, `While.of(op)`, `Cond.of(op)`, `Dot.of(op)` and so on
decompose an op as `Access.of` (in `nodes.py`) does for memory ops; `to_op()` is the
inverse. The operand orders they assume are those of the type rules in `ops/`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from pallasite.ir.nodes import Access, Block, Index, Op, Value, Window, dynamic_count


def number_of(made: Mapping[Value, Op], value: Value) -> Any:
    """The number that fills a value, if a constant defines it; None if not.

    Args:
        made: the op that defines each value.
        value: any value.
    """
    op = made.get(value)
    return op.attrs["value"] if op is not None and op.name == "constant" else None


def filling(made: Mapping[Value, Op], value: Value) -> Any:
    """The number that fills a value, also through what repeats or converts it."""
    op = made.get(value)
    while op is not None and op.name in ("broadcast_in_dim", "cast", "reshape"):
        (value,) = op.operands
        op = made.get(value)
    return number_of(made, value)


class Shown(NamedTuple):
    """One window of a pipeline with its array, index map and block."""

    array: Value
    window: Window
    index_map: Block
    block: Value  # the body's ref


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline, decomposed: one array, window and index map per block of the body."""

    op: Op
    grid: tuple[int | None, ...]  # None: a size known only at run time
    dynamic_sizes: tuple[Value, ...]  # of the axes whose size in `grid` is None
    arrays: tuple[Value, ...]
    windows: tuple[Window, ...]
    semantics: tuple[str, ...]
    maps: tuple[Block, ...]
    body: Block

    @staticmethod
    def of(op: Op) -> "Pipeline":
        """Operands: dynamic sizes, then arrays. Regions: index maps, then the body."""
        windows, operands = op.attrs["windows"], op.operands
        sizes = len(operands) - len(windows)
        return Pipeline(
            op,
            op.attrs["grid"],
            operands[:sizes],
            operands[sizes:],
            windows,
            op.attrs["semantics"],
            op.regions[:-1],
            op.regions[-1],
        )

    @property
    def ids(self) -> tuple[Value, ...]:
        """The body's grid indices."""
        return self.body.params[: len(self.grid)]

    @property
    def blocks(self) -> tuple[Value, ...]:
        """The body's refs, one per window."""
        return self.body.params[len(self.grid) :]

    @property
    def sizes(self) -> tuple[int | Value, ...]:
        """The size of each axis: a number, or the value that holds it."""
        dynamic = iter(self.dynamic_sizes)
        return tuple(next(dynamic) if n is None else n for n in self.grid)

    @property
    def shown(self) -> list[Shown]:
        """The windows, each with its array, its index map and its block."""
        parts = zip(self.arrays, self.windows, self.maps, self.blocks, strict=True)
        return [Shown(*each) for each in parts]

    def with_(self, **changes: Any) -> "Pipeline":
        return replace(self, **changes)

    def showing(self, shown: Iterable[Shown], body: Block | None = None) -> "Pipeline":
        """Copy with other windows, and a body over their blocks (None: same ops)."""
        arrays, windows, maps, blocks = _columns(shown)
        if body is None:
            body = replace(self.body, params=(*self.ids, *blocks))
        return replace(self, arrays=arrays, windows=windows, maps=maps, body=body)

    def to_op(self) -> Op:
        attrs = {"grid": self.grid, "windows": self.windows}
        return self.op.with_(
            operands=(*self.dynamic_sizes, *self.arrays),
            attrs={**self.op.attrs, **attrs, "semantics": self.semantics},
            regions=(*self.maps, self.body),
        )


def _columns(shown: Iterable[Shown]) -> tuple[tuple[Any, ...], ...]:
    return tuple(zip(*shown, strict=True)) or ((), (), (), ())


@dataclass(frozen=True, eq=False)
class Loop:
    """A `for`, decomposed. Loop-carried values are `inits` before the loop, `carried`
    inside, `yields` at the end of an iteration and `results` after the loop."""

    op: Op
    first: Value
    limit: Value
    step: Value
    inits: tuple[Value, ...]
    body: Block
    results: tuple[Value, ...]

    @staticmethod
    def of(op: Op) -> "Loop":
        first, limit, step, *inits = op.operands
        (body,) = op.regions
        return Loop(op, first, limit, step, tuple(inits), body, op.results)

    @property
    def bounds(self) -> tuple[Value, Value, Value]:
        return self.first, self.limit, self.step

    @property
    def index(self) -> Value:
        return self.body.params[0]

    @property
    def carried(self) -> tuple[Value, ...]:
        return self.body.params[1:]

    @property
    def yields(self) -> tuple[Value, ...]:
        return self.body.yields

    def rounds(self, made: Mapping[Value, Op]) -> range:
        """The values of its index, going up; none where bounds are not constants."""
        numbers = [n for v in self.bounds if type(n := number_of(made, v)) is int]
        return range(*numbers) if len(numbers) == 3 and numbers[2] > 0 else range(0)

    def with_(self, **changes: Any) -> "Loop":
        return replace(self, **changes)

    def to_op(self) -> Op:
        return self.op.with_(
            operands=(*self.bounds, *self.inits),
            results=self.results,
            regions=(self.body,),
        )


@dataclass(frozen=True, eq=False)
class While:
    """A `while`, decomposed; both regions take the loop-carried values."""

    op: Op
    inits: tuple[Value, ...]
    condition: Block
    body: Block

    @staticmethod
    def of(op: Op) -> "While":
        condition, body = op.regions
        return While(op, op.operands, condition, body)


@dataclass(frozen=True, eq=False)
class Cond:
    """A `cond`, decomposed; the index is clamped to the existing branches."""

    op: Op
    which: Value
    branches: tuple[Block, ...]

    @staticmethod
    def of(op: Op) -> "Cond":
        return Cond(op, op.operands[0], op.regions)

    def branch(self, number: int) -> Block:
        """The branch that an index selects."""
        return self.branches[min(max(number, 0), len(self.branches) - 1)]


class DotSide(NamedTuple):
    """One operand of a dot, and its dimensions by role."""

    value: Value
    batch: tuple[int, ...]
    free: tuple[int, ...]  # rows of the left operand, columns of the right one
    contract: tuple[int, ...]

    def sizes(self, dims: Sequence[int]) -> list[int]:
        return [self.value.tile.shape[d] for d in dims]


@dataclass(frozen=True, eq=False)
class Dot:
    """A dot, decomposed. Paired dimensions are at the same position on both sides."""

    op: Op
    lhs: DotSide
    rhs: DotSide

    @staticmethod
    def of(op: Op) -> "Dot":
        pairs = zip(op.attrs["batch"], op.attrs["contract"], strict=True)
        sides = zip(op.operands, pairs, strict=False)  # a fused dot has more operands
        lhs, rhs = (_side(value, *dims) for value, dims in sides)
        return Dot(op, lhs, rhs)

    @property
    def sides(self) -> tuple[DotSide, DotSide]:
        return self.lhs, self.rhs

    @property
    def depth(self) -> int:
        """The number of products summed per element of the result."""
        return prod(self.lhs.sizes(self.lhs.contract))


@dataclass(frozen=True, eq=False)
class Wgmma:
    """A wgmma, decomposed: accumulator, both operands, contracted dimension of each."""

    sums: Value
    lhs: Value
    rhs: Value
    contract: tuple[int, int]

    @staticmethod
    def of(op: Op) -> "Wgmma":
        sums, lhs, rhs = op.operands
        (left,), (right,) = op.attrs["contract"]
        return Wgmma(sums, lhs, rhs, (left, right))


@dataclass(frozen=True, eq=False)
class TensorMma:
    """A tensor_mma, decomposed: like a wgmma, and whether it accumulates."""

    sums: Value
    lhs: Value
    rhs: Value
    adds: Value
    contract: tuple[int, int]
    scales: tuple[Value, ...] = ()  # of the left and of the right operand
    places: Value | None = None  # of what a sparse left operand has

    @staticmethod
    def of(op: Op) -> "TensorMma":
        sums, lhs, rhs, adds, *scales = op.operands
        places = scales.pop() if len(scales) % 2 else None
        (left,), (right,) = op.attrs["contract"]
        return TensorMma(sums, lhs, rhs, adds, (left, right), tuple(scales), places)

    @property
    def columns_dim(self) -> int:
        """The non-contracted dimension of the right operand."""
        return 1 - self.contract[1]


@dataclass(frozen=True)
class Roles:
    """What the notes on a `roles` op say about each role.

    Notes are optional for roles made for one chip: without them, each is one warpgroup.
    """

    names: tuple[str, ...]
    warpgroups: tuple[int, ...]

    @staticmethod
    def of(op: Op) -> "Roles":
        count = len(op.regions)
        each = "warp" if op.name == "warps" else "role"
        names = op.attrs.get("cuda.names") or [f"{each} {n}" for n in range(count)]
        return Roles(tuple(names), op.attrs.get("cuda.warpgroups") or (1,) * count)


@dataclass(frozen=True)
class DotStore:
    """A dot_store, decomposed.

    Operand order: lhs, rhs, ref, index operands, [addend], [tile, factors],
    [overwrite].
    """

    ref: Value
    index: Index
    index_operands: tuple[Value, ...]
    addend: Value | None
    scaled: tuple[Value, ...]  # a tile and per-row factors, whose product is the addend
    overwrite: Value | None

    @staticmethod
    def of(op: Op) -> "DotStore":
        index, rest = op.attrs["index"], list(op.operands[2:])
        ref = rest.pop(0)
        indices = [rest.pop(0) for _ in range(dynamic_count(index))]
        addend = rest.pop(0) if op.attrs["addend"] else None
        scaled = [rest.pop(0) for _ in range(2)] if op.attrs["scaled"] else []
        overwrite = rest.pop(0) if op.attrs["overwrite"] else None
        return DotStore(ref, index, tuple(indices), addend, tuple(scaled), overwrite)

    @property
    def access(self) -> Access:
        """Where the sums are stored, in the form a store has."""
        return Access(self.ref, self.index, self.index_operands)


def _side(value: Value, batch: Sequence[int], contract: Sequence[int]) -> DotSide:
    taken = (*batch, *contract)
    free = tuple(d for d in range(value.tile.rank) if d not in taken)
    return DotSide(value, tuple(batch), free, tuple(contract))
