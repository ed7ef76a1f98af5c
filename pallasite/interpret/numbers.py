"""What a number system gives the evaluator: arrays, memory and control flow.

A `Numbers` works on its own array type (numpy arrays, JAX tracers). Scalars are rank-0
arrays. Memory is one array per root; `take` and `put` read and write parts of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pallasite.ir.nodes import Op
from pallasite.ir.opdef import OpDef, table
from pallasite.ir.rule_table import RuleTable
from pallasite.ir.types import DType, RefType, TileType

Array = Any


@dataclass(frozen=True)
class Pick:
    """What an access takes along one dimension of a root array.

    Either a run of `size` elements from `start`, `stride` apart (`kept` False: one
    element, and the result has no such dimension), or, with `gather`, the elements an
    index array names. Indices are positions in the root. `low` and `high` bound the
    elements the access may touch where that is not already certain: reads outside are
    unspecified, writes outside are dropped. `clip` is the ref's own range: reads
    bring their positions in there first.
    """

    start: Array | int = 0
    size: int = 1
    stride: int = 1
    kept: bool = True
    gather: Array | None = None
    low: Array | int | None = None
    high: Array | int | None = None
    clip: tuple[Array | int, Array | int] | None = None  # first and past-last position

    @property
    def is_bounded(self) -> bool:
        return self.low is not None

    @property
    def extent(self) -> int:
        return (self.size - 1) * self.stride + 1 if self.size else 0


Picks = Sequence[Pick]


def picked_shape(picks: Picks) -> tuple[int, ...]:
    """Gathered dimensions first, then the kept runs."""
    gathered = next((tuple(p.gather.shape) for p in picks if p.gather is not None), ())
    return (*gathered, *(p.size for p in picks if p.gather is None and p.kept))


class Numbers(Protocol):
    """A number system. `functional`: arrays are immutable, control flow is staged."""

    functional: bool

    # --- tiles ---
    def elementwise(
        self, row: OpDef, operands: Sequence[Array], attrs: Mapping, result: TileType
    ) -> Array: ...

    def tile_op(self, op: Op, operands: Sequence[Array]) -> Sequence[Array]: ...

    def scalar(self, value: int, dtype: DType) -> Array: ...

    # --- memory ---
    def uninitialised(self, type: RefType) -> Array: ...

    def pad(self, array: Array, low: Sequence[int], high: Sequence[int], fill: Any): ...

    def unpad(self, array: Array, low: Sequence[int], shape: Sequence[int]): ...

    def take(
        self, array: Array, picks: Picks, mask: Array | None, other: Array | None
    ) -> Array: ...

    def put(self, array: Array, picks: Picks, value: Array, mask: Array | None): ...

    def rmw(self, array: Array, picks: Picks, kind: str, value: Array, mask) -> Any: ...

    def fill_outside(self, value: Array, picks: Picks, fill: Any) -> Array: ...

    def reinterpret(self, value: Array, kind: str, arg: Any) -> Array: ...

    def restore(self, before: Array, kind: str, arg: Any, value: Array) -> Array: ...

    # --- index arithmetic on scalars (Python ints where everything is static) ---
    def clamp(self, index: Array | int, low: Any, high: Any) -> Array | int: ...

    def add(self, a: Array | int, b: Array | int) -> Array | int: ...

    def mul(self, a: Array | int, b: int) -> Array | int: ...

    def larger(self, a: Array | int, b: Array | int) -> Array | int: ...

    def smaller(self, a: Array | int, b: Array | int) -> Array | int: ...

    # --- choice ---
    def combine(self, kind: str, a: Array, b: Array) -> Array: ...

    def select(self, predicate: Array, on_true: Array, on_false: Array) -> Array: ...

    def is_branch(self, which: Array, n: int, count: int) -> Array: ...

    # --- control ---
    def counted(
        self,
        first: Array,
        limit: Array,
        step: Array,
        carry: list[Array],
        body: Callable[[Array, list[Array]], list[Array]],
    ) -> list[Array]: ...

    def while_(self, go_on: Callable, body: Callable, carry: list[Array]) -> list: ...

    def branch(
        self, which: Array, branches: Sequence[Callable], carry: list[Array]
    ) -> list[Array]: ...

    def grid(
        self,
        sizes: Sequence[int | Array],
        carry: list[Array],
        body: Callable[[list[Array], list[Array]], list[Array]],
    ) -> list[Array]: ...

    # --- debugging ---
    def debug_print(
        self, fmt: str, values: Sequence[Array], when: Array | None
    ) -> None: ...

    def debug_check(
        self, ok: Array, message: str, values: Sequence[Array], op: Op
    ) -> None: ...


def run_pure(numbers: Numbers, op: Op, operands: Sequence[Array]) -> Sequence[Array]:
    """The results of an op that only computes tiles from tiles."""
    row = table()[op.name]
    # A bitcast is elementwise unless the width changes, and with it the shape.
    if row.elementwise and op.name != "bitcast":
        return (numbers.elementwise(row, operands, op.own_attrs, op.result.tile),)
    return numbers.tile_op(op, operands)


def run_rule(rules: RuleTable, op: Op, operands: Sequence[Array]) -> Sequence[Array]:
    """The results of a tile op, by a number system's table of them."""
    out = rules[op.name](op, *operands)
    return out if isinstance(out, (tuple, list)) else (out,)
