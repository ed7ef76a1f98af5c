"""Operands of dot that are packed once per call, before the grid runs.

A window that stays where it is along an axis of the grid would be packed again at every
step along it. `find_ahead` looks for blocks that are loaded whole, multiplied and seen
at several steps; `emit_prepare` writes `@prepare`, which packs one part of their arrays
into memory that all threads share; `bind` tells `dot.py` where the blocks of a step
lie. What does not fit this mould is packed where it is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from pallasite.backends.cpu import scalars, tiles
from pallasite.backends.cpu.dot_driver import Ahead, Layout, Plan, emit_packing
from pallasite.backends.cpu.dot_fusion import running_dtype
from pallasite.backends.cpu.dot_scheme import Lies, Operand
from pallasite.backends.cpu.dot_shapes import groups_of, is_small, scheme_for, sizes_of
from pallasite.backends.cpu.llvm import Function, Module, Val, integer
from pallasite.backends.cpu.uses import flattened_refs, written_refs
from pallasite.errors import InternalError
from pallasite.ir.nodes import Kernel, Op, Value, Window, full_index, walk
from pallasite.passes.grid import find_pipeline

if TYPE_CHECKING:
    from pallasite.backends.cpu.emit import Emitter
    from pallasite.backends.cpu.pipeline import OpenWindow

USES = 2  # on average, of a packed block, from which packing ahead pays
MOST_BYTES = 64 << 20  # in all, which stays with the process (`spare.py`)

# An operand of a dot: its value, whether it is rows, and its dimensions by role.
Groups = tuple[tuple[int, ...], ...]
Role = tuple[Value, bool, Groups]


@dataclass(frozen=True)
class PackedWindow:
    """All blocks of an array, packed as rows or columns."""

    window: int  # among the pipeline's
    is_rows: bool
    groups: Groups
    values: tuple[Value, ...]  # what the body loads from that window to multiply so
    array: int  # among the kernel's operands
    counts: tuple[int, ...]  # blocks along each dimension of the array
    plan: Plan
    offset: int  # in the shared memory

    @property
    def layout(self) -> Layout:
        return self.plan.layout(self.is_rows)

    @property
    def parts(self) -> int:
        """Pieces that it is packed in."""
        return prod(self.counts) * self.layout.regions

    @property
    def bytes(self) -> int:
        return prod(self.counts) * self.layout.bytes


@dataclass(frozen=True)
class AllAhead:
    """What a kernel packs ahead; nothing, if `windows` is empty."""

    op: Op | None = None  # the pipeline
    windows: tuple[PackedWindow, ...] = ()

    @property
    def parts(self) -> int:
        """Calls of `@prepare`; each packs its share of every window."""
        return max((each.parts for each in self.windows), default=0)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.windows)

    def bind(self, e: "Emitter", op: Op, opened: Sequence["OpenWindow"]) -> None:
        """Let dots find the packed blocks of this step."""
        if op is not self.op:
            return
        f, shared = e.f, e.shared
        for each in self.windows:
            extents = opened[each.window].extents
            number = integer(0)
            for extent, count in zip(extents, each.counts, strict=True):
                place = f.binary("udiv", extent.start, integer(extent.size))
                number = f.add(f.mul(number, integer(count)), place)
            offset = f.mul(number, integer(each.layout.bytes))
            offset = f.add(integer(each.offset), offset)
            packed = Ahead(f.element(shared, "i8", offset), each.layout)
            for value in each.values:
                e.packed[value, each.is_rows, each.groups] = packed


# --- what to pack ahead ---


def find_ahead(kernel: Kernel) -> AllAhead:
    try:
        op = find_pipeline(kernel)
    except InternalError:
        return AllAhead()
    if not op.attrs["grid"] or None in op.attrs["grid"]:
        return AllAhead()
    found: list[PackedWindow] = []
    total = 0
    for (window, is_rows, groups), uses in _roles(op).items():
        each = _packed_window(kernel, op, window, is_rows, groups, uses, total)
        if each is not None and total + each.bytes <= MOST_BYTES:
            found.append(each)
            total += each.bytes
    return AllAhead(op, tuple(found))


def _roles(op: Op) -> dict[tuple[int, bool, Groups], list[tuple[Value, Op]]]:
    """Whole blocks in dots, by window, side and dimensions: their values and dots."""
    *_, body = op.regions
    windows = body.params[len(op.attrs["grid"]) :]
    kept = set(windows) - written_refs(body) - flattened_refs(body)
    loads = {
        inner.result: windows.index(inner.operands[0])
        for inner in walk(body)
        if inner.name == "load" and inner.operands[0] in kept and _is_whole(inner)
    }
    found: dict[tuple[int, bool, Groups], list[tuple[Value, Op]]] = {}
    for dot in walk(body):
        if dot.name == "dot":
            for side, value in enumerate(dot.operands[:2]):
                if value in loads:
                    groups = tuple(tuple(group) for group in groups_of(dot)[side])
                    key = (loads[value], side == 0, groups)
                    found.setdefault(key, []).append((value, dot))
    return found


def _is_whole(load: Op) -> bool:
    shape = load.operands[0].ref.shape
    return load.attrs["index"] == full_index(shape) and len(load.operands) == 1


def _packed_window(
    kernel: Kernel,
    op: Op,
    number: int,
    is_rows: bool,
    groups: Groups,
    uses: list[tuple[Value, Op]],
    offset: int,
) -> PackedWindow | None:
    """A window packed ahead, if that is possible and pays."""
    window: Window = op.attrs["windows"][number]
    array = op.operands[len(op.operands) - len(op.attrs["windows"]) + number]
    aliased = {kernel.inputs[i] for i, _ in kernel.aliases}
    counts = _block_counts(window, array.ref.shape)
    if array not in kernel.inputs or array in aliased or counts is None:
        return None
    strides = _strides(array, window, groups)
    dot = uses[0][1]
    sizes = sizes_of(dot)
    seldom = prod(op.attrs["grid"]) < USES * prod(counts)
    if strides is None or seldom or is_small(sizes, in_rows=True):
        return None
    lhs, rhs, result = (v.tile.dtype for v in (*dot.operands[:2], dot.result))
    running = running_dtype(lhs, rhs, result)
    here = Lies.of(lhs if is_rows else rhs, running, *strides[1:])
    lies = {"rows" if is_rows else "columns": here}
    scheme = scheme_for(lhs, rhs, running, sizes, **lies)
    other = sizes.columns if is_rows else sizes.rows
    if other >= scheme.ahead_below or scheme.pitch(is_rows):
        return None
    plan = Plan.of(scheme, sizes)
    place, values = kernel.params.index(array), tuple(value for value, _ in uses)
    return PackedWindow(number, is_rows, groups, values, place, counts, plan, offset)


def _block_counts(window: Window, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Blocks along each dimension; None if they do not divide the array evenly."""
    counts = []
    for dim, n in zip(window.dims, shape, strict=True):
        if dim.kind not in ("blocked", "squeezed") or not dim.size or n % dim.size:
            return None
        counts.append(n // dim.size)
    return tuple(counts) if prod(counts) else None


def _strides(array: Value, window: Window, groups: Groups) -> list[Val] | None:
    """Strides of batch, width and depth in a block; None if they are not regular."""
    unused = Function(Module(), "unused")
    all_strides = tiles.row_major(array.ref.shape)
    kept = [
        stride
        for dim, stride in zip(window.dims, all_strides, strict=True)
        if dim.kind != "squeezed"
    ]
    order = [d for group in groups for d in group]
    old = [window.block_shape[d] for d in order]
    new = [prod(window.block_shape[d] for d in group) for group in groups]
    return tiles.reshape_strides(unused, old, [kept[d] for d in order], new)


# --- packing it ---


def emit_prepare(module: Module, kernel: Kernel, ahead: AllAhead) -> None:
    """Add `@prepare(operands, shared, part)`."""
    params = [("ptr", f"a{n}") for n in range(len(kernel.params))]
    params += [("ptr", "shared"), ("i64", "part")]
    f = Function(module, "prepare", params, linkage="internal")
    *pointers, shared, part = f.params
    for each in ahead.windows:
        # Neighbouring parts of all windows together: whoever packs them uses them.
        share = lambda n, each=each: f.binary(
            "udiv", f.mul(n, integer(each.parts)), integer(ahead.parts)
        )
        first = share(part)
        with f.loop(f.sub(share(f.add(part, integer(1))), first)) as loop:
            here, pointer = f.add(first, loop.index), pointers[each.array]
            _emit_part(f, kernel, ahead, each, pointer, shared, here)
    f.line("ret void")


def _emit_part(
    f: Function,
    kernel: Kernel,
    ahead: AllAhead,
    each: PackedWindow,
    pointer: Val,
    shared: Val,
    part: Val,
) -> None:
    assert ahead.op is not None
    window: Window = ahead.op.attrs["windows"][each.window]
    array, layout = kernel.params[each.array], each.layout
    regions = integer(layout.regions)
    block, region = (f.binary(name, part, regions) for name in ("udiv", "urem"))
    rest, start = block, integer(0)
    steps = tiles.row_major(array.ref.shape)
    dims = zip(each.counts, window.dims, steps, strict=True)
    for count, dim, step in reversed([*dims]):
        place = f.binary("urem", rest, integer(count))
        rest = f.binary("udiv", rest, integer(count))
        start = f.add(start, f.mul(f.mul(place, integer(dim.size)), step))
    dtype = array.ref.dtype
    source = f.element(pointer, scalars.memory(dtype), start)
    strides = _strides(array, window, each.groups)
    assert strides is not None
    offset = f.add(integer(each.offset), f.mul(block, integer(layout.bytes)))
    target = f.element(shared, "i8", offset)
    operand = Operand(dtype, source, *strides)
    emit_packing(f, each.plan, operand, each.is_rows, region, target)
