"""Memory that outlives a call: one block per process, for the next call that needs it.

Packed operands may take tens of megabytes. Above some size malloc returns such memory
to the system at once, and the next call would fault in every page again. A call takes
the spare block out of its slot, or allocates one if the slot is empty or the block too
small, and puts it back when it is done; concurrent calls have separate blocks, of which
one is kept.
"""

import ctypes

from pallasite.backends.cpu.llvm.writer import NULL, Function, Module, Val, integer

SLOT = "pallasite_spare"  # the name under which `slot` is linked
MOST_BYTES = 128 << 20  # of a block that is kept
HEADER = 8  # bytes at a block's start that hold its size

slot = ctypes.c_void_p()
# Calls may still run while the interpreter tears down its modules.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(slot))


def take(f: Function, size: Val) -> Val:
    """A block with a header and `size` bytes, or null."""
    _define(f.module)
    return f.value("ptr", f"call ptr @take_block({size})")


def put_back(f: Function, block: Val) -> None:
    _define(f.module)
    f.call_defined("put_back", block)


def _define(module: Module) -> None:
    if not module.defines("take_block"):
        module.external(SLOT, "ptr")
        _emit_take(module)
        _emit_put_back(module)


def _exchange(f: Function, block: Val, order: str) -> Val:
    return f.value("ptr", f"atomicrmw xchg ptr @{SLOT}, {block} {order}")


def _emit_take(module: Module) -> None:
    f = Function(module, "take_block", [("i64", "size")], "ptr", "internal")
    (size,) = f.params
    spare = _exchange(f, NULL, "acquire")
    with f.when(f.compare("icmp ne", spare, NULL)):
        with f.when(f.compare("icmp sge", f.load("i64", spare), size)):
            f.line(f"ret {spare}")
            f.label(*f.labels("unreached"))
        f.call("free", "void", spare)
    block = f.call("malloc", "ptr", f.add(size, integer(HEADER)))
    with f.when(f.compare("icmp ne", block, NULL)):
        f.store(size, block)
    f.line(f"ret {block}")


def _emit_put_back(module: Module) -> None:
    f = Function(module, "put_back", [("ptr", "block")], "void", "internal")
    (block,) = f.params
    with f.when(f.compare("icmp sgt", f.load("i64", block), integer(MOST_BYTES))):
        f.call("free", "void", block)
        f.line("ret void")
        f.label(*f.labels("unreached"))
    other = _exchange(f, block, "acq_rel")
    f.call("free", "void", other)  # which may be null
    f.line("ret void")
