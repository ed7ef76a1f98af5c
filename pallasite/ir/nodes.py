"""The nodes of the Kernel IR: Value, Op, Block, Kernel, and the user's source line.

Nodes are immutable. A Value is defined once, by an Op, a Block or a Kernel; Blocks may
use the values of enclosing code. `text.py` prints and parses nodes, `verify.py` defines
which are legal, `build.py` makes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pallasite.ir.types import RefType, TileType, Type


@dataclass(frozen=True)
class Loc:
    """Where in the user's source an op comes from."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        where = f" in {self.function}" if self.function else ""
        return f"{self.file}:{self.line}{where}"

    @property
    def comment(self) -> str:
        """The comment that generated code puts on lines that come from here."""
        return f"  // {self.file}:{self.line}"


@dataclass(frozen=True, eq=False)
class Value:
    """One SSA value, compared by identity. `name` is a hint for the printed form."""

    type: Type
    name: str = ""

    @property
    def tile(self) -> TileType:
        assert isinstance(self.type, TileType), self.type
        return self.type

    @property
    def ref(self) -> RefType:
        assert isinstance(self.type, RefType), self.type
        return self.type

    @property
    def is_ref(self) -> bool:
        return isinstance(self.type, RefType)


# --- how a load, store or subview selects elements: one entry per ref dimension ---


@dataclass(frozen=True)
class At:
    """One element; drops the dimension. `start` None: the next index operand."""

    start: int | None = None


@dataclass(frozen=True)
class Span:
    """`size` elements from `start`, `stride` apart. `start` None: an index operand."""

    start: int | None
    size: int
    stride: int = 1

    @property
    def extent(self) -> int:
        """Elements from the first to the last selected one, inclusive."""
        return (self.size - 1) * self.stride + 1 if self.size else 0


@dataclass(frozen=True)
class Gather:
    """Elements at the indices in an integer tile, which is the next index operand.

    The tiles of all Gather entries of one index have the same shape and advance
    together; that shape comes first in the result, before the Span dimensions.
    """


Index = tuple[At | Span | Gather, ...]


@dataclass(frozen=True)
class BlockDim:
    """How one dimension of an array is divided into blocks.

    kind "blocked": the index map gives a block index; "element": the offset of the
    first element, counted from `padding[0]` elements before the array; "squeezed": an
    element index, and the block lacks the dimension; "bounded": a first element and a
    length of at most `size`.
    """

    size: int
    kind: str = "blocked"
    padding: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Window:
    """What one operand of a pipeline shows the body at each step."""

    dims: tuple[BlockDim, ...]
    mode: str  # "in" or "out"
    space: str = "block"
    fill: float | int | bool | None = None  # read past the edge; None: undefined
    buffers: int | None = None

    @property
    def block_shape(self) -> tuple[int, ...]:
        return tuple(d.size for d in self.dims if d.kind != "squeezed")

    def may_hang_over(self, shape: Sequence[int]) -> bool:
        """Whether a block can extend past the edge of an array of this shape."""
        return any(
            d.kind != "squeezed" and (d.kind != "blocked" or n % max(d.size, 1) != 0)
            for d, n in zip(self.dims, shape, strict=True)
        )


@dataclass(frozen=True, eq=False)
class Block:
    """Straight-line code with parameters; `yields` are the values it returns."""

    params: tuple[Value, ...] = ()
    ops: tuple["Op", ...] = ()
    yields: tuple[Value, ...] = ()


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. `name` is a key of the op table (`opdef.OPS`)."""

    name: str
    operands: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    regions: tuple[Block, ...] = ()
    loc: Loc | None = None

    @property
    def result(self) -> Value:
        assert len(self.results) == 1, self.name
        return self.results[0]

    @property
    def own_attrs(self) -> Mapping[str, Any]:
        """The attributes its row names, without backends' notes (`cpu.until`)."""
        if not any("." in key for key in self.attrs):
            return self.attrs
        return {key: value for key, value in self.attrs.items() if "." not in key}

    def with_(self, **changes: Any) -> "Op":
        return Op(**{**self.__dict__, **changes})


def _symbolic(param: Value) -> list[Any]:
    """The sizes of an operand that are symbols of an export."""
    sizes: tuple[Any, ...] = param.ref.shape
    return [n for n in sizes if hasattr(n, "scope")]


@dataclass(frozen=True, eq=False)
class Kernel:
    """A whole kernel: refs in main memory and code, whose only results are its stores.

    `params` are the operand refs, then `num_outputs` output refs. `aliases` maps an
    operand position to an output position: both refs are the same memory.
    """

    name: str
    params: tuple[Value, ...]
    body: Block
    num_outputs: int
    aliases: tuple[tuple[int, int], ...] = ()
    level: str = "tile"
    loc: Loc | None = None

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.params[: len(self.params) - self.num_outputs]

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.params[len(self.params) - self.num_outputs :]

    @property
    def aliased_results(self) -> dict[Value, Value]:
        """For each aliased operand, the output that shares its memory."""
        return {self.inputs[i]: self.outputs[o] for i, o in self.aliases}

    @cached_property
    def symbols(self) -> str:
        """The operands and results of symbolic shape; empty if there are none."""
        found = [p for p in self.params if _symbolic(p)]
        return ", ".join(f"{p.name or 'unnamed'}: {p.ref.tile}" for p in found)

    def with_(self, **changes: Any) -> "Kernel":
        return replace(self, **changes)

    @cached_property
    def text(self) -> str:
        """The printed form without source lines: what identifies a kernel."""
        from pallasite.ir.text import print_kernel

        return print_kernel(self)

    @cached_property
    def _scope(self) -> Any:
        """What tells the symbols of one export from those of another (`jax.export`)."""
        sizes: list[Any] = [n for p in self.params for n in _symbolic(p)]
        return sizes[0].scope if sizes else None

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Kernel):
            return self is other
        return self.text == other.text and self._scope is other._scope

    def __hash__(self) -> int:
        return hash(self.text)


def walk(block: Block) -> Iterator[Op]:
    """Every op of a block and of the regions inside it, in program order."""
    # Iterative: with recursive generators each op would be re-yielded once per level.
    ahead = [iter(block.ops)]
    while ahead:
        for op in ahead[-1]:
            yield op
            if op.regions:
                ahead += [iter(region.ops) for region in reversed(op.regions)]
                break
        else:
            ahead.pop()


# --- the operands of memory ops, by role ---


@dataclass(frozen=True)
class Access:
    """A load, store, atomic or subview, decomposed into its named parts."""

    ref: Value
    index: Index
    index_operands: tuple[Value, ...]
    value: Value | None = None
    compare: Value | None = None
    mask: Value | None = None
    other: Value | None = None

    @staticmethod
    def of(op: Op) -> "Access":
        """Operand order: ref, [compare], [value], index operands, [mask], [other]."""
        rest = list(op.operands[1:])
        compare = rest.pop(0) if op.name == "atomic_cas" else None
        takes_value = op.name in ("store", "atomic_rmw", "atomic_cas")
        value = rest.pop(0) if takes_value else None
        other = rest.pop() if op.attrs.get("other") else None
        mask = rest.pop() if op.attrs.get("mask") else None
        return Access(
            op.operands[0],
            op.attrs["index"],
            tuple(rest),
            value,
            compare,
            mask,
            other,
        )

    @property
    def is_whole(self) -> bool:
        """Whether it is of all elements as they are in the ref, without a mask."""
        return self.mask is None and self.index == full_index(self.ref.ref.shape)

    def split_index(self) -> list[tuple[At | Span | Gather, Value | None]]:
        """Each index entry with its operand, if any."""
        pending = iter(self.index_operands)
        return [
            (e, next(pending) if isinstance(e, Gather) or e.start is None else None)
            for e in self.index
        ]


def dynamic_count(index: Index) -> int:
    """How many operands an index takes."""
    return sum(isinstance(e, Gather) or e.start is None for e in index)


def full_index(shape: tuple[int, ...]) -> Index:
    return tuple(Span(0, n) for n in shape)
