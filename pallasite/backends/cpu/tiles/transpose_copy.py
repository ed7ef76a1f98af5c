"""Copies between views that are contiguous along different dimensions: transposes.

A loop along either dimension would read or write a cache line for a single element. So
squares are copied: lines of the source are loaded as vectors, transposed in registers
and stored as lines of the target. There is one function per element width, for any
shape, which treats elements as bits. `Emitter.fill` tries this first.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

from pallasite.backends.cpu.llvm import vector_ops as vec
from pallasite.backends.cpu.llvm.values import bytes_of
from pallasite.backends.cpu.llvm.writer import Function, Module, Val, integer
from pallasite.backends.cpu.tiles.tiles import Buffer
from pallasite.ir.types import DType
from pallasite.target import host

SMALLEST = 4  # smaller squares gain nothing
LARGEST = 16  # larger ones do not fit the registers
BLOCK_BYTES = 128  # of a line, moved before the next lines are started


def runs_across(shape: Sequence[int], buffer: Buffer, along: int | None) -> int | None:
    """The contiguous dimension of a view, if lanes `along` another are strided."""
    if along is None or 0 in shape or buffer.strides[along].constant in (0, 1):
        return None
    if shape[along] < SMALLEST:
        return None
    long = (d for d, n in enumerate(shape) if n >= SMALLEST)
    return next((d for d in long if buffer.strides[d].constant == 1), None)


def repeats_across(shape: Sequence[int], buffer: Buffer, along: int | None) -> bool:
    """Whether lanes `along` a dimension are strided in a view that repeats them."""
    if along is None or 0 in shape or buffer.strides[along].constant in (0, 1):
        return False
    pairs = zip(shape, buffer.strides, strict=True)
    repeats = prod(n for n, stride in pairs if stride.constant == 0)
    return repeats >= SMALLEST and shape[along] >= SMALLEST


def copy_transposed(
    f: Function, dtype: DType, shape: Sequence[int], source: Buffer, target: Buffer
) -> bool:
    """Copy all elements by squares if that is faster; returns whether it did."""
    row = contiguous_dim(shape, target)
    column = runs_across(shape, source, row)
    if row is None or column is None or runs_across(shape, target, column) is None:
        return False
    bits = 8 * dtype.bytes
    name = _transposer(f.module, bits, _side(bits, shape[row], shape[column]))
    others = [1 if d in (row, column) else n for d, n in enumerate(shape)]
    with f.nest(others) as indices:
        f.call_defined(
            name,
            source.address(f, dtype, indices),
            source.strides[row],
            target.address(f, dtype, indices),
            target.strides[column],
            integer(shape[row]),
            integer(shape[column]),
        )
    return True


def contiguous_dim(shape: Sequence[int], buffer: Buffer) -> int | None:
    """The last dimension that is contiguous in memory."""
    dims = [d for d, n in enumerate(shape) if n > 1]
    return next((d for d in reversed(dims) if buffer.strides[d].constant == 1), None)


def _side(bits: int, rows: int, columns: int) -> int:
    """The elements along one side of the largest square."""
    most = min(LARGEST, host().lanes(bits))
    return min(most, _power_within(rows), _power_within(columns))


def _power_within(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _transposer(module: Module, bits: int, side: int) -> str:
    """The name of the function, which is added to the module the first time.

    It takes the source and its row stride, the target and its column stride, and the
    numbers of rows and columns: at least `side`.
    """
    name = f"transpose_i{bits}_{side}"
    if not module.defines(name):
        _emit(module, name, f"i{bits}", side)
    return name


def _emit(module: Module, name: str, type: str, side: int) -> None:
    params = [
        ("ptr noalias readonly", "source"),
        ("i64", "across"),
        ("ptr noalias", "target"),
        ("i64", "down"),
        ("i64", "rows"),
        ("i64", "columns"),
    ]
    attributes = "noinline nounwind"
    f = Function(module, name, params, linkage="internal", attributes=attributes)
    source, across, target, down, rows, columns = f.params
    block = max(BLOCK_BYTES // bytes_of(type), side)
    with (
        _blocks(f, rows, block) as (first_row, last_row),
        _blocks(f, columns, block) as (first_column, last_column),
        _squares(f, first_column, last_column, side) as column,
        _squares(f, first_row, last_row, side) as row,
    ):
        here = vec.offset(f, source, type, f.add(f.mul(row, across), column))
        there = vec.offset(f, target, type, f.add(f.mul(column, down), row))
        _transpose_square(f, side, type, here, across, there, down)
    f.line("ret void")


@contextmanager
def _blocks(f: Function, n: Val, size: int) -> Iterator[tuple[Val, Val]]:
    """Where blocks of 0 up to n start and end."""
    count = f.binary("udiv", f.add(n, integer(size - 1)), integer(size))
    with f.loop(count) as loop:
        first = f.mul(loop.index, integer(size))
        yield first, f.least(f.add(first, integer(size)), n)


@contextmanager
def _squares(f: Function, first: Val, last: Val, side: int) -> Iterator[Val]:
    """Where squares from `first` to `last` start.

    The last one is moved back so that it ends there, and copies some elements again.
    """
    n = f.add(f.sub(last, first), integer(side - 1))
    with f.loop(f.binary("udiv", n, integer(side))) as loop:
        place = f.add(first, f.mul(loop.index, integer(side)))
        yield f.least(place, f.sub(last, integer(side)))


def _transpose_square(
    f: Function,
    side: int,
    type: str,
    source: Val,
    across: Val,
    target: Val,
    down: Val,
) -> None:
    line, align = vec.vector(type, side), bytes_of(type)
    lines = [
        vec.load(f, line, vec.offset(f, source, type, f.mul(across, integer(k))), align)
        for k in range(side)
    ]
    for k, column in enumerate(vec.transpose(f, lines)):
        place = vec.offset(f, target, type, f.mul(down, integer(k)))
        vec.store(f, column, place, align)
