"""Updates of elements that other threads may be updating at the same time.

`update` is what `memory.py` uses for atomics when programs run in parallel: a
compare-and-exchange loop, which works for every element type and operation.
"""

from collections.abc import Callable

from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm.writer import Function, Val
from pallasite.ir.types import DType

# From the element's old value: the new one, and whether to store it.
Update = Callable[[Val], tuple[Val, Val]]


def update(
    f: Function, dtype: DType, address: Val, touched: Val, change: Update
) -> Val:
    """Atomically update one element, if `touched`; returns the old value."""
    size = dtype.bytes
    width = f"i{8 * size}"
    element = lambda bits: scalars.from_memory(
        f, dtype, f.convert("bitcast", bits, scalars.memory(dtype))
    )
    read = f"load atomic {width}, {address} monotonic, align {size}"
    first = f.value(width, read)
    before = f.block
    again, done = f.labels("again", "updated")
    f.branch_if(touched, again, done)
    f.label(again)
    (place,) = f.open_phis([width])
    seen = place[0]
    new, wanted = change(element(seen))
    raw = f.convert("bitcast", scalars.to_memory(f, dtype, new), width)
    raw = f.select(wanted, raw, seen)
    pair_type = f"{{ {width}, i1 }}"
    exchange = f"cmpxchg {address}, {seen}, {raw} acq_rel monotonic, align {size}"
    pair = f.value(pair_type, exchange)
    found = f.value(width, f"extractvalue {pair}, 0")
    succeeded = f.value("i1", f"extractvalue {pair}, 1")
    end = f.block
    f.close_phi(place, [(first, before), (found, end)])
    f.branch_if(succeeded, done, again)
    f.label(done)
    return element(f.phi(width, [(first, before), (seen, end)]))
