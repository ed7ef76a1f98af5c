"""What a kernel computes of a row, as text without the number of rows in a block.

Two kernels whose rows depend on nothing but themselves (`batch.py`) compute the same
bits for a row if these texts are equal. What is left out cannot matter to a row: sizes
along rows, which are never combined, and sizes of dimensions along which all elements
are equal, except in ops that combine elements (`_SIZES_MATTER_NOT` has the others).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from pallasite.ir.nodes import Access, Block, Kernel, Op, Span, Value
from pallasite.ir.opdef import table
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import TileType
from pallasite.proofs.batch import Found, Rows

_SIZES_MATTER_NOT = {
    "alloc",
    "assume_multiple",
    "broadcast_in_dim",
    "cond",
    "constant",
    "for",
    "iota",
    "load",
    "reshape",
    "store",
    "transpose",
    "while",
}
_SHAPES = ("shape", "limits", "sizes")  # attributes with a number per dimension


def row_code(kernel: Kernel, found: Found) -> list[str]:
    """The lines; `found` is what `batch` says of this kernel."""
    return list(_Text(found).kernel(kernel))


class _Text:
    def __init__(self, found: Found):
        self.found, self.next = found, count()
        self.numbers = dict[Value, int]()

    def kernel(self, kernel: Kernel) -> Iterator[str]:
        for param in kernel.params:
            yield self._made(param)
        for op in kernel.body.ops:
            if op.name == "pipeline":
                yield from self._pipeline(Pipeline.of(op))
            else:
                yield from self._op(op)

    def _pipeline(self, pipeline: Pipeline) -> Iterator[str]:
        grid = list[Any](pipeline.grid)
        if self.found.axis is not None:
            grid[self.found.axis] = "rows"
        yield f"pipeline {grid} {pipeline.semantics}"
        for array, window, index_map, _ in pipeline.shown:
            dims = list[Any](window.dims)
            if (rows := self.found.dims.get(array)) is not None:
                dims[rows] = "rows"
            how = window.mode, window.space, window.fill
            yield f"window {self._name(array)} {dims} {how}"
            yield from self._block(index_map)
        yield from self._block(pipeline.body)

    def _block(self, block: Block) -> Iterator[str]:
        yield " ".join(["block", *map(self._made, block.params)])
        for op in block.ops:
            yield from self._op(op)
        yield " ".join(["yield", *map(self._name, block.yields)])

    def _op(self, op: Op) -> Iterator[str]:
        attrs = {k: self._attribute(op, k, v) for k, v in op.attrs.items()}
        if table()[op.name].indexed:
            access = Access.of(op)
            attrs["index"] = [
                "all" if self._is_free(access.ref, d, e) else e
                for d, e in enumerate(access.index)
            ]
        matters = [_matter(op, v) for v in op.operands]
        operands = [
            f"{self._name(v)}: {self._type(v, dims)}" if dims else self._name(v)
            for v, dims in zip(op.operands, matters, strict=True)
        ]
        yield f"{op.name} {sorted(attrs.items())} {operands}"
        for region in op.regions:
            yield from self._block(region)
        for result in op.results:
            yield self._made(result, _matter(op, result))

    def _attribute(self, op: Op, name: str, value: Any) -> Any:
        if name in ("type", "types"):
            return ""  # those of the results
        if name not in _SHAPES or not op.results:
            return value
        free = self._free(op.results[0])
        return tuple("?" if d in free else n for d, n in enumerate(value))

    def _is_free(self, ref: Value, d: int, entry: Any) -> bool:
        return d in self._free(ref) and entry == Span(0, ref.ref.shape[d])

    def _made(self, value: Value, matter: Iterable[int] = ()) -> str:
        self.numbers[value] = next(self.next)
        return f"{self._name(value)}: {self._type(value, matter)}"

    def _name(self, value: Value) -> str:
        return f"%{self.numbers[value]}"

    def _type(self, value: Value, matter: Iterable[int]) -> str:
        free, tile = self._free(value, matter), _tile(value)
        shape = ["?" if d in free else str(n) for d, n in enumerate(tile.shape)]
        space = value.ref.space if value.is_ref else ""
        return f"{tile.dtype}[{','.join(shape)}] {space}"

    def _free(self, value: Value, matter: Iterable[int] = ()) -> set[int]:
        """The dimensions whose sizes do not matter to a row."""
        if (dim := self.found.dims.get(value)) is not None:
            return {dim}
        known: Rows | None = self.found.of.get(value)
        if known is None:
            return set()
        equal = set(range(_tile(value).rank)) - known.varies - set(matter)
        return equal | ({known.dim} if known.dim is not None else set())


def _tile(value: Value) -> TileType:
    return value.ref.tile if value.is_ref else value.tile


def _matter(op: Op, value: Value) -> Sequence[int]:
    """The dimensions of an operand or result along which an op combines elements."""
    rank = _tile(value).rank
    if op.name in _SIZES_MATTER_NOT or table()[op.name].elementwise:
        return ()
    if "axis" in op.attrs or "axes" in op.attrs:
        axes = op.attrs["axes"] if "axes" in op.attrs else (op.attrs["axis"],)
        return axes if rank == _tile(op.operands[0]).rank else ()
    return range(rank)
