"""Lowers tiles that repeat another one (`jnp.tile`) to concatenated copies.

In the IR a tile is repeated along a new dimension, which a reshape merges with the next
one. On a TPU the new dimension would be one of vregs, and merging it moves every
element; concatenated copies are the same vregs, used several times.

Kernel in, Kernel out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.passes.normal.canonicalize import canonicalize

MOST_COPIES = 64


def join_repeats(kernel: Kernel) -> Kernel:
    """The kernel with concatenated copies in place of repeats that are merged."""
    new = map_ops(kernel, _joined)
    return kernel if new is kernel else canonicalize(new)


@dataclass(frozen=True)
class _Dim:
    """A dimension of the result: copies of a number of elements."""

    copies: int
    elements: int


def _joined(op: Op, b: Rewriter) -> Value | None:
    repeat = b.producer(op.operands[0], "broadcast_in_dim") if op.operands else None
    if op.name != "reshape" or repeat is None:
        return None
    dims = list(_dims(repeat, op.result.tile.shape))
    together = [d for d in dims if d.copies > 1 and d.elements > 1]
    few = prod(d.copies for d in together) <= MOST_COPIES
    if len(dims) != op.result.tile.rank or not together or not few:
        return None
    x = b.op("reshape", repeat.operands[0], shape=tuple(d.elements for d in dims))
    return _repeated(b, x, dims)


def _repeated(b: Builder, x: Value, dims: Sequence[_Dim]) -> Value:
    for axis, dim in enumerate(dims):
        if dim.copies > 1 and dim.elements > 1:
            x = b.op("concatenate", *[x] * dim.copies, axis=axis)
    shape = tuple(d.copies * d.elements for d in dims)
    if shape == x.tile.shape:
        return x
    every = tuple(range(len(shape)))
    return b.op("broadcast_in_dim", x, shape=shape, dims=every)


def _dims(repeat: Op, shape: Sequence[int]) -> Iterator[_Dim]:
    """The dimensions of the reshaped tile, up to the first that is not copies."""
    given = dict(zip(repeat.attrs["dims"], repeat.operands[0].tile.shape, strict=True))
    wide = list(enumerate(repeat.attrs["shape"]))
    for size in shape:
        copies = elements = 1
        while copies * elements < size and wide:
            d, n = wide.pop(0)
            if given.get(d, 1) == n:
                elements *= n
            elif elements == 1:
                copies *= n
            else:
                return  # elements repeated one by one
        while wide and wide[0][1] == 1:
            wide.pop(0)
        if copies * elements != size:
            return
        yield _Dim(copies, elements)
