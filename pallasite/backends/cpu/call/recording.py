"""A trace of what runs when, on which thread, which machine code records on demand.

Every call, and every range of programs that a thread takes, reads one pointer (`slot`).
It is null unless `recorded()` has set it to a table of spans; then both append one.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from pallasite.backends.cpu.llvm.writer import Function, Module, Val

SLOT = "pallasite_recorder"  # the name under which `slot` is linked
MOST_SPANS = 1 << 18
# A table consists of 64-bit words: the number of spans written, the capacity, then the
# spans: handler, thread, begin, end, first unit, the one after the last.
COUNT, MOST, SPANS, SPAN_WORDS = 0, 1, 8, 6
WHOLE_CALL = -1  # as the last unit

slot = ctypes.c_void_p()
# Calls may still run while the interpreter tears down its modules.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(slot))
# One table forever: a thread that read the pointer may write a little later.
_table = np.zeros(0, np.int64)
_only_one = threading.Lock()


class Span(NamedTuple):
    """Something that a thread did.

    Attributes:
        handler: the address of the kernel's handler (`Launch.handler`).
        thread: the system's thread number.
        begin: nanoseconds, by the clock of `time.monotonic_ns`.
        end: the same.
        first: the first unit (a position along the parallel axes, flattened).
        last: the unit after the last; `WHOLE_CALL`: the span is that of a call.
    """

    handler: int
    thread: int
    begin: int
    end: int
    first: int
    last: int


class Spans(list[Span]):
    """Spans in the order they ended; `lost` more did not fit."""

    lost: int = 0


@contextmanager
def recorded() -> Iterator[Spans]:
    """The spans of all kernels that run in a `with` block; filled when it ends."""
    global _table
    found = Spans()
    with _only_one:
        if not _table.size:
            _table = np.zeros(SPANS + SPAN_WORDS * MOST_SPANS, np.int64)
        _table[[COUNT, MOST]] = 0, MOST_SPANS
        slot.value = _table.ctypes.data
        try:
            yield found
        finally:
            slot.value = None
            written = min(int(_table[COUNT]), MOST_SPANS)
            found.lost = int(_table[COUNT]) - written
            rows = _table[SPANS:][: SPAN_WORDS * written].reshape(-1, SPAN_WORDS)
            # A thread that has counted a span may not have filled it yet.
            found.extend(Span(*row) for row in rows.tolist() if row[3])
            rows[:] = 0


def begin(f: Function) -> Val:
    """The current time; 0 if nothing is recorded."""
    define(f.module)
    return f.value("i64", "call i64 @now()")


def end_of_call(f: Function, since: Val) -> None:
    f.call_defined("record", since, Val("i64", "0"), Val("i64", str(WHOLE_CALL)))


def end_of_units(f: Function, since: Val, first: Val, last: Val) -> None:
    f.call_defined("record", since, first, last)


def define(module: Module) -> None:
    """Add `@now()` and `@record(since, first, last)`, once."""
    if module.defines("now"):
        return
    module.external(SLOT, "ptr")
    module.declare("clock_gettime", "i32", ["i32", "ptr"])
    module.declare("pthread_self", "ptr", [])
    rare = "noinline cold"
    f = Function(module, "read_clock", [], "i64", "internal", rare)
    f.write(f"""
        %time = alloca [2 x i64], align 8
        %ignored = call i32 @clock_gettime(i32 {time.CLOCK_MONOTONIC}, ptr %time)
        %seconds = load i64, ptr %time
        %rest.at = getelementptr inbounds i8, ptr %time, i64 8
        %rest = load i64, ptr %rest.at
        %scaled = mul i64 %seconds, 1000000000
        %nanoseconds = add i64 %scaled, %rest
        ret i64 %nanoseconds
    """)
    f = Function(module, "now", [], "i64", "internal")
    f.write(f"""
        %table = load atomic ptr, ptr @{SLOT} monotonic, align 8
        %off = icmp eq ptr %table, null
        br i1 %off, label %leave, label %read
        leave:
        ret i64 0
        read:
        %time = call i64 @read_clock()
        ret i64 %time
    """)
    params = [("i64", "since"), ("i64", "first"), ("i64", "last")]
    f = Function(module, "append_span", params, linkage="internal", attributes=rare)
    f.write(f"""
        %table = load atomic ptr, ptr @{SLOT} acquire, align 8
        %off = icmp eq ptr %table, null
        br i1 %off, label %leave, label %count
        leave:
        ret void
        count:
        %number = atomicrmw add ptr %table, i64 1 monotonic
        %most.at = getelementptr inbounds i64, ptr %table, i64 {MOST}
        %most = load i64, ptr %most.at
        %fits = icmp slt i64 %number, %most
        br i1 %fits, label %append, label %leave
        append:
        %words = mul i64 %number, {SPAN_WORDS}
        %offset = add i64 %words, {SPANS}
        %span = getelementptr inbounds i64, ptr %table, i64 %offset
        %thread.at = getelementptr inbounds i64, ptr %span, i64 1
        %begin.at = getelementptr inbounds i64, ptr %span, i64 2
        %end.at = getelementptr inbounds i64, ptr %span, i64 3
        %first.at = getelementptr inbounds i64, ptr %span, i64 4
        %last.at = getelementptr inbounds i64, ptr %span, i64 5
        store ptr @handler, ptr %span
        %thread = call ptr @pthread_self()
        store ptr %thread, ptr %thread.at
        store i64 %since, ptr %begin.at
        store i64 %first, ptr %first.at
        store i64 %last, ptr %last.at
        %now = call i64 @read_clock()
        store i64 %now, ptr %end.at
        ret void
    """)
    f = Function(module, "record", params, linkage="internal")
    f.write("""
        %off = icmp eq i64 %since, 0
        br i1 %off, label %leave, label %append
        append:
        call void @append_span(i64 %since, i64 %first, i64 %last)
        br label %leave
        leave:
        ret void
    """)
