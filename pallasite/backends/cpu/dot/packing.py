"""Packing: copies operands of dot to the order in which microkernels read them.

A panel holds `width` neighbouring rows (or columns) as [k][width], widened to the type
of the sums. The source is any strided view: vectors are read along whichever dimension
is contiguous, and transposed in registers if that is k. Packing is a separate function,
so that a caller can do it once for several matmuls.
"""

from dataclasses import dataclass

from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm import vector_ops as vec
from pallasite.backends.cpu.llvm.writer import Function, Module, Val, integer
from pallasite.ir.types import DType


@dataclass(frozen=True)
class Packing:
    """How panels are made: `valid` of `width` rows exist; vectors run `along` one
    dimension, "width" or "depth", or "none" if neither is contiguous."""

    source: DType
    target: DType
    lanes: int
    width: int
    valid: int
    along: str

    @property
    def name(self) -> str:
        types = f"{self.source}_{self.target}_{self.lanes}"
        sizes = f"{self.valid}in{self.width}"
        return f"pack_{types}_{sizes}_{self.along}"


def direction(source: DType, target: DType, width: Val, depth: Val) -> str:
    """The dimension along which vectors can be read, given the strides of both."""
    if not vec.can_widen(source, target):
        return "none"
    if width.constant == 1:
        return "width"
    return "depth" if depth.constant == 1 else "none"


def packer(module: Module, packing: Packing) -> str:
    """The name of the function, which is added to the module the first time.

    It takes source, stride of the width, stride of the depth, target, number of panels,
    depth, and the number of steps of k from one panel to the next.
    """
    if not module.defines(packing.name):
        _emit(module, packing)
    return packing.name


def packing_function(module: Module, name: str) -> Function:
    """A function with the parameters that every scheme's packing shares."""
    params = [
        ("ptr noalias readonly", "source"),
        ("i64", "width_stride"),
        ("i64", "depth_stride"),
        ("ptr noalias", "target"),
        ("i64", "panels"),
        ("i64", "depth"),
        ("i64", "panel_depth"),
    ]
    attributes = "noinline nounwind"
    return Function(module, name, params, linkage="internal", attributes=attributes)


def _emit(module: Module, packing: Packing) -> None:
    f = packing_function(module, packing.name)
    if packing.along == "width":
        _copy_rows(f, packing)
    else:
        _transpose_panels(f, packing)
    f.line("ret void")


def _copy_rows(f: Function, packing: Packing) -> None:
    """All panels of one k, then of the next: in the source's memory order."""
    source, _, down, target, panels, depth, panel_depth = f.params
    read, write = scalars.memory(packing.source), scalars.memory(packing.target)
    width = integer(packing.width)
    with f.loop(depth) as loop, f.loop(panels) as panel:
        column = f.mul(panel.index, width)
        place = f.add(f.mul(loop.index, down), column)
        here = vec.offset(f, source, read, place)
        place = f.add(f.mul(loop.index, width), f.mul(column, panel_depth))
        there = vec.offset(f, target, write, place)
        for first in range(0, packing.valid, packing.lanes):
            count = min(packing.lanes, packing.valid - first)
            raw = _read(f, packing, vec.offset(f, here, read, first), count)
            place = vec.offset(f, there, write, first)
            vec.store(f, raw, place, packing.target.bytes)


def _transpose_panels(f: Function, packing: Packing) -> None:
    source, across, down, target, panels, depth, panel_depth = f.params
    read, write = scalars.memory(packing.source), scalars.memory(packing.target)
    with f.loop(panels) as loop:
        first = f.mul(loop.index, integer(packing.width))
        here = vec.offset(f, source, read, f.mul(first, across))
        there = vec.offset(f, target, write, f.mul(first, panel_depth))
        done = integer(0)
        if packing.along == "depth":
            done = _transpose_squares(f, packing, here, across, there, depth)
        _copy_elements(f, packing, here, across, down, there, done, depth)


def _read(f: Function, packing: Packing, place: Val, count: int) -> Val:
    type = vec.vector(scalars.memory(packing.source), count)
    raw = vec.load(f, type, place, packing.source.bytes)
    return vec.widen(f, raw, count, packing.source, packing.target)


def _transpose_squares(
    f: Function, packing: Packing, source: Val, stride: Val, target: Val, depth: Val
) -> Val:
    """Pack as many steps of k as fill whole vectors; returns how many.

    If the width is less than a vector, a store reaches past a step's end: into steps
    that are written next, but never past the last one of a square, since the memory
    after it may belong to another thread.
    """
    lanes, width = packing.lanes, packing.width
    read, write = scalars.memory(packing.source), scalars.memory(packing.target)
    squares, square_size = f.binary("udiv", depth, integer(lanes)), lanes * width
    unused = Val(vec.vector(scalars.register(packing.target), lanes), "poison")
    # Missing rows repeat the last one; their results are unused.
    rows = [
        vec.offset(f, source, read, f.mul(integer(min(i, packing.valid - 1)), stride))
        for i in range(width)
    ]
    # One group after the other, each from its first k to its last: in memory order,
    # which suits the hardware prefetcher.
    for first in range(0, width, lanes):
        some = rows[first : first + lanes]
        with f.loop(squares) as loop:
            start = f.mul(loop.index, integer(lanes))
            square = [
                _read(f, packing, vec.offset(f, row, read, start), lanes)
                for row in some
            ]
            square += [unused] * (lanes - len(square))
            there = f.add(f.mul(start, integer(width)), integer(first))
            for k, column in enumerate(vec.transpose(f, square)):
                place = f.add(there, integer(k * width))
                if len(some) < lanes and (first or k * width + lanes > square_size):
                    column = vec.resized(f, column, len(some))
                address = vec.offset(f, target, write, place)
                vec.store(f, column, address, packing.target.bytes)
    return f.mul(squares, integer(lanes))


def _copy_elements(
    f: Function,
    packing: Packing,
    source: Val,
    across: Val,
    down: Val,
    target: Val,
    done: Val,
    depth: Val,
) -> None:
    """Pack the steps from `done` on, element by element."""
    read, write = scalars.memory(packing.source), scalars.memory(packing.target)
    with f.loop(f.sub(depth, done)) as loop:
        k = f.add(done, loop.index)
        with f.loop(integer(packing.valid)) as row:
            place = f.add(f.mul(row.index, across), f.mul(k, down))
            value = scalars.load(f, packing.source, vec.offset(f, source, read, place))
            value = scalars.cast(f, value, packing.source, packing.target)
            there = f.add(f.mul(k, integer(packing.width)), row.index)
            scalars.store(f, packing.target, value, vec.offset(f, target, write, there))
