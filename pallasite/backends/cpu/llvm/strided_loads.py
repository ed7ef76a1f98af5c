"""Loads of lanes with a small stride, forwards or backwards.

Everything from the first lane to the last is loaded in whole vectors, and the lanes are
shuffled out in registers: a gather would read them one by one. `scalars.load` tries
this first.
"""

from pallasite.backends.cpu.llvm.values import Pointers, bytes_of, vector
from pallasite.backends.cpu.llvm.writer import Function, Val, integer

FARTHEST = 4  # elements; with a larger stride, most of what is loaded is unused


def near(f: Function, pointer: Val) -> Pointers | None:
    """The lanes if they are to be loaded here; a stride of one is a plain load."""
    if not isinstance(pointer, Pointers) or f.mask is not None:
        return None
    return pointer if pointer.step != 1 and abs(pointer.step) <= FARTHEST else None


def load(f: Function, type: str, pointers: Pointers) -> Val:
    """`type` is that of one lane. Nothing outside the first and last lane is read."""
    count, step = pointers.count, pointers.step
    extent = (count - 1) * abs(step) + 1
    first = pointers.base
    if step < 0:
        first = f.element(first, type, integer((count - 1) * step))
    offsets = [k * abs(step) for k in range(count)][:: 1 if step > 0 else -1]
    wide, align = vector(type, count), bytes_of(type)
    result = Val(wide, "poison")
    for number in sorted({offset // count for offset in offsets}):
        start = min(number * count, extent - count)
        place = f.element(first, type, integer(start))
        loaded = f.value(wide, f"load {wide}, {place}, align {align}")
        picks = [
            count + offset - start if offset // count == number else lane
            for lane, offset in enumerate(offsets)
        ]
        result = f.shuffle(result, loaded, picks)
    return result
