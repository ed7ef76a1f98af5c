"""join_products: merges matmuls with the same right operand into one.

In: code without branches between several matmuls of few rows each that have the same
right operand, as in programs that `gather_steps.py` merges: blocks of queries with the
same keys, and weights with the same values. Out: one matmul, whose rows are split again
afterwards. A matrix unit holds a part of the right operand while rows stream through
it; rows are few if they take no longer than loading the next part does.

Rows that are adjacent in memory that nothing writes are loaded as one tile, at the
first of the matmuls. Others are concatenated at the last one; code that uses the
results of the earlier ones moves after it, in the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import producers_of, substitute, used_values, with_regions
from pallasite.ir.roles import Dot
from pallasite.passes.analysis.memory import Roots, written_refs
from pallasite.passes.normal.canonicalize import canonicalize


def join_products(
    kernel: Kernel, few_rows: int, granule: int, most_bytes: int
) -> Kernel:
    """Merge matmuls of few rows.

    Args:
        kernel: what to rewrite.
        few_rows: matmuls with at least this many rows stay as they are.
        granule: what must divide the rows of each: whole vector registers.
        most_bytes: of a merged matmul's result and of its rows.
    """
    body = _Joining(kernel, few_rows, granule, most_bytes).block(kernel.body)
    return kernel if body is kernel.body else canonicalize(kernel.with_(body=body))


@dataclass(frozen=True)
class _Product:
    """A matmul that may be merged.

    Attributes:
        op: the dot.
        same: what it must share with others: the right operand, the kind of matmul, and
            the memory that its rows are in.
        rows: of the left operand.
        load: of these rows, if it gives the same value wherever it is placed.
    """

    op: Op
    same: tuple[Any, ...]
    rows: int
    load: Access | None

    def is_followed_by(self, other: "_Product") -> bool:
        """Whether the rows of matmuls with the same key are adjacent."""
        if self.load is None or other.load is None:
            return True
        (first, *rest), (second, *others) = self.load.index, other.load.index
        assert isinstance(first, Span) and isinstance(second, Span)
        return second.start == (first.start or 0) + first.size and rest == others

    def memory(self, rows: int) -> int:
        """The size of the result of this many rows, and of the rows."""
        tiles = [self.op.result.tile]
        if self.load is None:
            tiles.append(self.op.operands[0].tile)
        return sum(rows * prod(t.shape[1:]) * t.dtype.bytes for t in tiles)


class _Joining:
    def __init__(self, kernel: Kernel, few_rows: int, granule: int, most_bytes: int):
        self.few_rows, self.granule, self.most_bytes = few_rows, granule, most_bytes
        self.roots = Roots(kernel)
        self.made = producers_of(kernel.body)
        refs = (ref for op in walk(kernel.body) for ref in written_refs(op))
        self.written = {self.roots.of(ref) for ref in refs}

    def block(self, block: Block) -> Block:
        """A block with matmuls merged, also in nested regions."""
        inside = lambda op: with_regions(op, [self.block(r) for r in op.regions])
        ops = tuple(map(inside, block.ops))
        changed = any(a is not b for a, b in zip(ops, block.ops, strict=True))
        new = replace(block, ops=ops) if changed else block
        for group in self.groups(new):
            new = self.joined(new, group) or new
        return new

    # --- which matmuls ---

    def groups(self, block: Block) -> Iterator[list[_Product]]:
        """Matmuls that may become one, in program order."""
        found: dict[tuple[Any, ...], list[list[_Product]]] = {}
        for op in block.ops:
            product = self.product(op) if op.name == "dot" else None
            if product is None:
                continue
            groups = found.setdefault(product.same, [[]])
            if not groups[-1] or self.has_room(groups[-1], product):
                groups[-1].append(product)
            else:
                groups.append([product])
        for groups in found.values():
            yield from (group for group in groups if len(group) > 1)

    def has_room(self, group: Sequence[_Product], new: _Product) -> bool:
        rows = sum(each.rows for each in group) + new.rows
        return group[-1].is_followed_by(new) and new.memory(rows) <= self.most_bytes

    def product(self, op: Op) -> _Product | None:
        """A matmul's description, if it has few rows."""
        dot = Dot.of(op)
        lhs, rhs = dot.sides
        shapes = lhs.value.tile.shape, rhs.value.tile.shape
        if dot.lhs.batch or lhs.free != (0,) or list(map(len, shapes)) != [2, 2]:
            return None
        rows = shapes[0][0]
        if rows >= self.few_rows or rows % self.granule:
            return None
        right = self.steady_load(rhs.value)
        what = rhs.value if right is None else (right.ref, right.index)
        kind = tuple(sorted((name, str(n)) for name, n in op.attrs.items()))
        load = self.steady_load(lhs.value)
        memory = None if load is None else load.ref
        same = (what, memory, shapes[0][1], lhs.value.tile.dtype, kind)
        return _Product(op, same, rows, load)

    def steady_load(self, value: Value) -> Access | None:
        """A load at a known position of memory that nothing writes."""
        op = self.made.get(value)
        if op is None or op.name != "load" or len(op.operands) > 1:
            return None
        access = Access.of(op)
        if self.roots.of(access.ref) in self.written:
            return None
        plain = all(isinstance(e, Span) and e.stride == 1 for e in access.index)
        return access if plain else None

    # --- merging ---

    def joined(self, block: Block, group: Sequence[_Product]) -> Block | None:
        """The block with one matmul for a group; None: other ops prevent it."""
        results = [each.op.result for each in group]
        # By results: other groups may have changed the operands.
        dots = [op for op in block.ops if op.name == "dot" and op.result in results]
        places = [n for n, op in enumerate(block.ops) if op in dots]
        first, end = places[0], places[-1] + 1
        between = [op for op in block.ops[first:end] if op not in dots]
        b = Builder(dots[0].loc)
        right = self.steady_load(dots[0].operands[1])
        if group[0].load is not None and right is not None:
            waiting = between
            rows, other = self.loaded(b, group), b.load(right.ref, right.index)
        else:
            waiting = self.waiting(between, {*results})
            if waiting is None or self.uses(dots, waiting):
                return None
            rows = b.op("concatenate", *(op.operands[0] for op in dots), axis=0)
            other = dots[-1].operands[1]
        before = [op for op in between if op not in waiting]
        parts = self.parts(b, b.op("dot", rows, other, **dots[0].attrs), group)
        ops = (*block.ops[:first], *before, *b.ops, *waiting, *block.ops[end:])
        renamed = dict(zip(results, parts, strict=True))
        return substitute(replace(block, ops=ops), renamed)

    def loaded(self, b: Builder, group: Sequence[_Product]) -> Value:
        """The rows of all matmuls, which are adjacent in memory."""
        load = group[0].load
        assert load is not None
        span, *rest = load.index
        assert isinstance(span, Span)
        whole = replace(span, size=sum(each.rows for each in group))
        return b.load(load.ref, (whole, *rest))

    def parts(
        self, b: Builder, product: Value, group: Sequence[_Product]
    ) -> list[Value]:
        """Each group member's rows of the merged matmul."""
        found: list[Value] = []
        start, columns = 0, product.tile.shape[1]
        for each in group:
            end = start + each.rows
            places = {"starts": (start, 0), "limits": (end, columns)}
            found.append(b.op("slice", product, **places, strides=(1, 1)))
            start = end
        return found

    def waiting(self, ops: Sequence[Op], values: set[Value]) -> list[Op] | None:
        """Ops that depend on some values; None if the effects of one are unknown."""
        found: list[Op] = []
        made, read, written = set(values), set[Value](), set[Value]()
        for op in ops:
            touched = self.roots.touched(op)
            if touched is None:
                return None
            reads, writes = touched
            clashes = writes & (read | written) or reads & written
            if clashes or made.intersection(used_values(Block((), (op,)))):
                found.append(op)
                made.update(op.results)
                read |= reads
                written |= writes
        return found

    def uses(self, dots: Sequence[Op], waiting: Sequence[Op]) -> bool:
        """Whether a matmul depends on the results of the others."""
        made = {v for op in (*waiting, *dots) for v in op.results}
        return any(made.intersection(op.operands) for op in dots)
