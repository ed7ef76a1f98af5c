"""rows_out: rows that a kernel splits into several dimensions are stored as rows.

In: a kernel after `promote` that reshapes a matrix `(4 * 28, n)` to `(4, 28, n)`,
computes with its elements and stores them in a block of that shape. Out: it computes
with the matrix and stores that in the block, seen as a matrix too. Threads hold tiles
in the layout of a matrix instruction, which has rows and columns only. Proof: both
shapes have the same elements in the same order, in the tile and in the block, whose
rows are contiguous in its array.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Access, Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, dead_code, is_elementwise, map_ops
from pallasite.passes.analysis.carried import covers_whole


def rows_out(kernel: Kernel) -> Kernel:
    """The kernel with matrices instead of tiles with their rows in several dims."""
    new = map_ops(kernel, _rewritten)
    return kernel if new is kernel else dead_code(new)


def _rewritten(op: Op, b: Rewriter) -> Sequence[Value] | Value | None:
    if op.name == "store":
        return _stored(op, b)
    if is_elementwise(op) and len(op.results) == 1:
        return _computed(op, b)
    return None


def _computed(op: Op, b: Rewriter) -> Value | None:
    """An elementwise op of split rows, on the matrix."""
    shape = op.result.tile.shape
    matrices = [_matrix(v, b) for v in op.operands]
    rows = next((m.tile.shape for m in matrices if m is not None), None)
    if rows is None or any(v.tile.shape not in ((), shape) for v in op.operands):
        return None
    made = list[Value]()
    for value, matrix in zip(op.operands, matrices, strict=True):
        constant = b.producer(value, "constant")
        if matrix is None and constant is not None and value.tile.shape:
            number = constant.attrs["value"]
            matrix = b.constant(number, value.tile.with_shape(rows))
        if matrix is None and value.tile.shape:
            return None
        made.append(value if matrix is None else matrix)
    return b.reshape(b.op(op.name, *made, **op.attrs), shape=shape)


def _matrix(value: Value, b: Rewriter) -> Value | None:
    """The matrix whose rows a tile has in several dimensions."""
    op = b.producer(value, "reshape")
    if op is None or op.operands[0].tile.rank != 2:
        return None
    (matrix,) = op.operands
    split = value.tile.rank > 2 and matrix.tile.shape[-1] == value.tile.shape[-1]
    return matrix if split else None


def _stored(op: Op, b: Rewriter) -> Sequence[Value] | None:
    access = Access.of(op)
    assert access.value is not None
    matrix = _matrix(access.value, b)
    view = b.producer(access.ref, "block_view")
    if matrix is None or view is None or access.mask is not None:
        return None
    if not covers_whole(access.ref.ref.shape, access.index) or not _is_rows(view):
        return None
    b.store(b.op("reshape_view", access.ref, shape=matrix.tile.shape), matrix)
    return []


def _is_rows(view: Op) -> bool:
    """Whether the rows of a block are contiguous in its array, and all inside."""
    dims = list(zip(view.attrs["window"].dims, view.operands[0].ref.shape, strict=True))
    if any(dim.kind not in ("blocked", "squeezed") for dim, _ in dims):
        return False
    kept = [(dim.size, n) for dim, n in dims if dim.kind == "blocked"]
    first, *inner = [each for each in kept[:-1] if each != (1, 1)] or [(1, 1)]
    inside = first[1] % first[0] == 0
    apart = any(dim.kind == "squeezed" for dim, _ in _after_first(dims))
    return inside and not apart and all(size == n for size, n in inner)


def _after_first(dims: Sequence) -> Sequence:
    """The dimensions after the first that a block keeps."""
    first = next((n for n, (d, _) in enumerate(dims) if d.kind == "blocked"), 0)
    return dims[first:]
