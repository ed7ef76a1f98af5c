"""The code around operands of dots that are packed once (`pack_once.py` chooses them).

`find_packed` checks whether a dot's box has been packed and, if not, packs it together
with other threads that wait for it. So a box is in the caches when it is used, and no
thread waits for a box that is not needed yet.
"""

from pallasite.backends.cpu.call import threads
from pallasite.backends.cpu.dot.cache_blocks import PackedLayout, emit_packing
from pallasite.backends.cpu.dot.choose_scheme import Groups
from pallasite.backends.cpu.dot.pack_once import COUNTERS_BYTES, DONE, Boxes, Role
from pallasite.backends.cpu.dot.scheme import Operand
from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm.writer import Function, Module, Val, integer
from pallasite.backends.cpu.tiles.tiles import Tile
from pallasite.ir.nodes import Value


def find_packed(
    e: Emitter, value: Value, groups: Groups, tile: Tile, layout: PackedLayout
) -> Val | None:
    """The address of the packed box that a dot reads; None if it is not packed once."""
    number = e.packed_once.roles.get(Role(value, groups, layout))
    if number is None or tile.buffer is None:
        return None
    f, each = e.f, e.packed_once.boxes[number]
    array = e.ref(each.cut.array)
    # A copy of a window also has its array's root, but never gets here: `_open` takes
    # only windows that are views of their array at every step.
    if tile.buffer.root is not array.root:
        return None
    assert array.buffer is not None, "an operand of the kernel"
    begin, here = (
        f.convert("ptrtoint", b.pointer, "i64") for b in (array.buffer, tile.buffer)
    )
    size = integer(array.dtype.bytes)
    box = each.cut.number(f, f.binary("udiv", f.sub(here, begin), size))
    at = f.add(integer(each.counters_at), f.mul(box, integer(COUNTERS_BYTES)))
    counters = f.element(e.shared, "i8", at)
    at = f.add(integer(each.packed_at), f.mul(box, integer(layout.bytes)))
    packed = f.element(e.shared, "i8", at)
    done = f.element(counters, "i8", integer(DONE))
    count = f.value("i64", f"load atomic i64, {done} acquire, align 8")
    with f.when(f.compare("icmp ult", count, integer(each.parts.count))):
        name = _packer(f.module, each, number)
        f.call_defined(name, tile.buffer.pointer, packed, counters)
    return packed


def _packer(module: Module, boxes: Boxes, number: int) -> str:
    """The name of a function that packs a box: source, target, counters.

    Threads that need the same box take its parts in turn; each returns when all are
    done.
    """
    name = f"pack_box_{number}"
    if module.defines(name):
        return name
    params = [("ptr", "source"), ("ptr", "target"), ("ptr", "counters")]
    attributes = "noinline cold nounwind"
    f = Function(module, name, params, linkage="internal", attributes=attributes)
    source, target, counters = f.params
    parts = boxes.parts
    count = integer(parts.count)
    done = f.element(counters, "i8", integer(DONE))
    claim, pack, leave = f.labels("claim", "pack", "leave")
    f.branch(claim)
    f.label(claim)
    part = f.value("i64", f"atomicrmw add {counters}, i64 1 monotonic")
    f.branch_if(f.compare("icmp ult", part, count), pack, leave)
    f.label(pack)
    operand = Operand(boxes.cut.array.ref.dtype, source, *boxes.operand_strides)
    emit_packing(f, boxes.blocking, operand, parts, part, target)
    if parts.count == 1:
        # A plain store, unlike an atomic addition, need not wait for earlier ones.
        f.line(f"store atomic i64 1, {done} release, align 8")
        f.line("ret void")
    else:
        f.value("i64", f"atomicrmw add {done}, i64 1 release")
        f.branch(claim)
    f.label(leave)
    threads.wait_for(f, done, count)
    f.line("ret void")
    return name
