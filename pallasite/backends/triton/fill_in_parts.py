"""fill_in_parts: fills of more elements than a Triton tensor may have become loops.

In: a promoted kernel. Out: the same kernel, in which a store of one number to a large
ref (a gradient that starts as zeros and stays in memory) stores a part at a time.
"""

from math import prod

from pallasite.backends.triton.core import MAX_ELEMENTS
from pallasite.ir.build import Builder, part_start
from pallasite.ir.nodes import Access, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops
from pallasite.ir.types import INDEX, TileType
from pallasite.target.chip import physical

PART = 1 << 14  # elements that are stored at a time


def fill_in_parts(kernel: Kernel) -> Kernel:
    """Split stores of constants that exceed Triton's limit."""
    made = {op.result: op for op in walk(kernel.body) if op.name == "constant"}

    def rewrite(op: Op, b: Rewriter) -> list[Value] | None:
        if op.name != "store":
            return None
        access = Access.of(op)
        constant = made.get(access.value) if access.value is not None else None
        if constant is None or access.mask is not None:
            return None
        spans = all(isinstance(entry, Span) for entry in access.index)
        shape = constant.result.tile.shape
        if not spans or prod(physical(shape)) <= MAX_ELEMENTS:
            return None
        _Fill(access, constant).along(b, 0, [])
        return []

    new = map_ops(kernel, rewrite)
    return kernel if new is kernel else dead_code(new)


class _Fill:
    def __init__(self, access: Access, constant: Op):
        self.access, self.number = access, constant.attrs["value"]
        self.tile: TileType = constant.result.tile
        self.sizes = self.parts()

    def parts(self) -> list[int]:
        """How much of each dimension is stored at a time: all of the last ones."""
        left, sizes = PART, list[int]()
        for n in reversed(self.tile.shape):
            most = (m for m in range(min(n, left), 0, -1) if n % m == 0)
            sizes.append(next(most, 1))
            left = left // sizes[-1] if sizes[-1] == n else 1
        return sizes[::-1]

    def along(self, b: Builder, dim: int, starts: list[Value | None]) -> None:
        """Store along the dimensions from `dim` on; None: all of a dimension."""
        if dim == len(self.sizes):
            self.store(b, starts)
        elif self.sizes[dim] == self.tile.shape[dim]:
            self.along(b, dim + 1, [*starts, None])
        else:
            first, inner = Value(INDEX, "k"), Builder(b.loc)
            self.along(inner, dim + 1, [*starts, first])
            bounds = [b.index(n) for n in (0, self.tile.shape[dim], self.sizes[dim])]
            b.emit("for", *bounds, regions=(inner.block((first,), ()),))

    def store(self, b: Builder, starts: list[Value | None]) -> None:
        index, operands = list[Span](), list[Value]()
        shape = self.access.ref.ref.shape
        pairs = zip(self.access.split_index(), starts, self.sizes, shape, strict=True)
        for (entry, begin), start, size, n in pairs:
            assert isinstance(entry, Span)
            if start is None:
                index.append(entry)
                operands += [] if begin is None else [begin]
                continue
            index.append(Span(None, size, entry.stride))
            operands.append(part_start(b, entry, begin, n, start, masked=False))
        part = b.constant(self.number, self.tile.with_shape(self.sizes))
        b.store(self.access.ref, part, tuple(index), operands)
