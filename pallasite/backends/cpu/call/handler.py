"""The XLA FFI handler: the function XLA calls, as LLVM IR.

It answers the version query, ignores every stage but execution, takes the buffers'
addresses from the call frame, allocates the arena, runs `@kernel` (on several threads
where that pays off: `threads.py`) and turns a message from it into an XLA error.
Offsets are those of XLA's C header `xla/ffi/api/c_api.h`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pallasite.backends.cpu.call import kept_memory, recording, threads
from pallasite.backends.cpu.call.parallel_units import Sharing
from pallasite.backends.cpu.llvm.writer import (
    FALSE,
    NULL,
    Function,
    Module,
    Val,
    integer,
)
from pallasite.backends.cpu.tiles.arena import ALIGNMENT

# Byte offsets in XLA_FFI_CallFrame and what it points to (64-bit).
FRAME_EXTENSION, FRAME_API, FRAME_STAGE = 8, 16, 32
FRAME_ARGS_COUNT, FRAME_ARGS = 56, 72
FRAME_RESULTS_COUNT, FRAME_RESULTS = 96, 112
BUFFER_DATA = 24
EXTENSION_TYPE, EXTENSION_METADATA = 8, 24
METADATA_MAJOR, METADATA_MINOR, METADATA_TRAITS = 24, 28, 32
API_ERROR_CREATE = 48

METADATA, EXECUTE = 1, 3  # an extension type, a stage
VERSION = (0, 1)  # every XLA with typed FFI accepts it
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 3, 8, 9


# Chunks per thread: with many, a late or slow thread does not delay the rest.
CHUNKS_PER_THREAD = 32
ARENAS_BYTES = 1 << 30  # limits the number of threads, which have an arena each


def emit_handler(
    module: Module,
    *,
    arguments: int,
    results: int,
    arena_bytes: int,
    shared_bytes: int = 0,
    zero_bytes: int = 0,
    sharing: Sharing | None = None,
) -> None:
    """Add `@handler` for a `@kernel` with that many operand and result pointers.

    With `shared_bytes`, the kernel then takes the address of that much memory, which
    starts with `zero_bytes` zeros and is shared by all threads. With a `sharing`, it
    also takes the first unit and the one after the last.
    """
    _emit_make_error(module)
    f = Function(module, "handler", [("ptr", "frame")], "ptr")
    frame = f.params[0]
    _answer_version_query(f, frame)
    stage = _field(f, frame, FRAME_STAGE, "i32")
    executing = f.compare("icmp eq", stage, integer(EXECUTE, "i32"))
    _return_unless(f, executing, NULL)

    counts = [(FRAME_ARGS_COUNT, arguments), (FRAME_RESULTS_COUNT, results)]
    for offset, expected in counts:
        count = _field(f, frame, offset, "i64")
        fits = f.compare("icmp eq", count, integer(expected))
        _fail_unless(f, frame, fits, INVALID_ARGUMENT, "wrong number of buffers")

    since = recording.begin(f)
    pointers = _buffers(f, frame, FRAME_ARGS, arguments)
    pointers += _buffers(f, frame, FRAME_RESULTS, results)
    memory = _CallMemory(arena_bytes, shared_bytes, zero_bytes)
    if sharing is None:
        block, pointers, arena = memory.allocate(f, frame, pointers, integer(1))
        message = _call_kernel(f, [*pointers, arena])
    else:
        block, message = _share(f, frame, sharing, pointers, memory)
    memory.release(f, block)
    recording.end_of_call(f, since)
    succeeded = f.compare("icmp eq", message, NULL)
    _fail_unless(f, frame, succeeded, FAILED_PRECONDITION, message)
    f.line("ret ptr null")


def _call_kernel(f: Function, arguments: Sequence[Val]) -> Val:
    return f.value("ptr", f"call ptr @kernel({', '.join(map(str, arguments))})")


class _CallMemory(NamedTuple):
    """What a call needs besides its operands: shared memory, then arenas."""

    arena_bytes: int
    shared_bytes: int
    zero_bytes: int

    def allocate(
        self, f: Function, frame: Val, pointers: list[Val], workers: Val
    ) -> tuple[Val, list[Val], Val]:
        """The block to free, the pointers including the shared memory's, the arenas."""
        arenas = f.mul(workers, integer(self.arena_bytes))
        size = f.add(arenas, integer(self.shared_bytes))
        block, start = _allocate(f, frame, size, is_kept=self.shared_bytes > 0)
        if not self.shared_bytes:
            return block, pointers, start
        zeros = [integer(0, "i8"), integer(self.zero_bytes), FALSE]
        f.call("llvm.memset.p0.i64", "void", start, *zeros)
        arena = f.element(start, "i8", integer(self.shared_bytes))
        return block, [*pointers, start], arena

    def release(self, f: Function, block: Val) -> None:
        if self.shared_bytes:
            kept_memory.put_back(f, block)
        elif block != NULL:
            f.call("free", "void", block)


def _share(
    f: Function, frame: Val, sharing: Sharing, pointers: list[Val], memory: _CallMemory
) -> tuple[Val, Val]:
    """Run all units on as many threads as pay off; gives memory block and message."""
    counted = _count_units(f, sharing, pointers)
    chunk, workers = _split(f, frame, sharing, counted, memory.arena_bytes)
    units = f.greatest(counted, f.sub(integer(0), counted))
    block, pointers, arenas = memory.allocate(f, frame, pointers, workers)
    threads.emit_jobs(f.module, len(pointers), sharing.is_even)
    alone, together, joined = f.labels("alone", "together", "joined")
    f.branch_if(f.compare("icmp eq", workers, integer(1)), alone, together)
    f.label(alone)
    since = recording.begin(f)
    message = _call_kernel(f, [*pointers, integer(0), units, arenas])
    recording.end_of_units(f, since, integer(0), units)
    end_alone = f.block
    f.branch(joined)
    f.label(together)
    runs = threads.runs_offset(len(pointers))
    size = f.add(integer(runs), f.mul(workers, integer(threads.LINE)))
    job = f.call("malloc", "ptr", size)
    exists = f.compare("icmp ne", job, NULL)
    _fail_unless(f, frame, exists, RESOURCE_EXHAUSTED, "out of memory for a job", block)
    fields = [(threads.REFS, integer(1)), (threads.UNITS, units)]
    fields += [(threads.CHUNK, chunk), (threads.RUNS, workers), (threads.MESSAGE, NULL)]
    stride = integer(memory.arena_bytes)
    fields += [(threads.ARENA, arenas), (threads.ARENA_STRIDE, stride)]
    fields += [(counter, integer(0)) for counter in threads.COUNTERS]
    fields += [(threads.OPERANDS + 8 * n, a) for n, a in enumerate(pointers)]
    for offset, value in fields:
        _set_field(f, job, offset, value)
    counters = f.element(job, "i8", integer(runs))
    lines = f.mul(workers, integer(threads.LINE))
    f.call("llvm.memset.p0.i64", "void", counters, integer(0, "i8"), lines, FALSE)
    helpers = f.sub(workers, integer(1))
    listed = ", ".join(map(str, [frame, job, helpers]))
    first = f.value("ptr", f"call ptr @run_job({listed})")
    end = f.block
    f.branch(joined)
    f.label(joined)
    return block, f.phi("ptr", [(message, end_alone), (first, end)])


def _count_units(f: Function, sharing: Sharing, pointers: list[Val]) -> Val:
    """The number of units; negative if one thread must run them in order."""
    if sharing.units is not None:
        return integer(sharing.units)
    listed = ", ".join(map(str, [*pointers, NULL]))
    return f.value("i64", f"call i64 @units({listed})")


def _split(
    f: Function, frame: Val, sharing: Sharing, units: Val, arena_bytes: int
) -> tuple[Val, Val]:
    """Units per chunk and the number of threads, at least one."""
    one = integer(1)
    found = f.value("i64", f"call i64 @count_threads({frame})")
    found = f.least(found, integer(max(1, ARENAS_BYTES // max(arena_bytes, 1))))
    many = f.compare("icmp sge", units, integer(sharing.least_units))
    found = f.select(many, found, one)
    parts = f.mul(found, integer(CHUNKS_PER_THREAD))
    round_up = lambda a, b: f.binary("sdiv", f.add(a, f.sub(b, one)), b)
    chunk = f.greatest(round_up(units, parts), integer(sharing.least_chunk))
    return chunk, f.greatest(f.least(found, round_up(units, chunk)), one)


def _field(f: Function, base: Val, offset: int, type: str) -> Val:
    return f.load(type, f.element(base, "i8", integer(offset)))


def _set_field(f: Function, base: Val, offset: int, value: Val) -> None:
    f.store(value, f.element(base, "i8", integer(offset)))


def _return_unless(f: Function, condition: Val, result: Val) -> None:
    leave, stay = f.labels("leave", "stay")
    f.branch_if(condition, stay, leave)
    f.label(leave)
    f.line(f"ret {result}")
    f.label(stay)


def _answer_version_query(f: Function, frame: Val) -> None:
    """XLA asks at registration; nothing else in the frame is valid then."""
    ask, query, run = f.labels("ask", "query", "run")
    extension = _field(f, frame, FRAME_EXTENSION, "ptr")
    f.branch_if(f.compare("icmp eq", extension, NULL), run, ask)
    f.label(ask)
    kind = _field(f, extension, EXTENSION_TYPE, "i32")
    f.branch_if(f.compare("icmp eq", kind, integer(METADATA, "i32")), query, run)
    f.label(query)
    metadata = _field(f, extension, EXTENSION_METADATA, "ptr")
    major, minor = VERSION
    _set_field(f, metadata, METADATA_MAJOR, integer(major, "i32"))
    _set_field(f, metadata, METADATA_MINOR, integer(minor, "i32"))
    _set_field(f, metadata, METADATA_TRAITS, integer(0, "i32"))
    f.line("ret ptr null")
    f.label(run)


def _buffers(f: Function, frame: Val, offset: int, count: int) -> list[Val]:
    """The data pointers of the operands or results."""
    if not count:
        return []
    table = _field(f, frame, offset, "ptr")
    buffers = [_field(f, table, 8 * n, "ptr") for n in range(count)]
    return [_field(f, buffer, BUFFER_DATA, "ptr") for buffer in buffers]


def _allocate(f: Function, frame: Val, size: Val, is_kept: bool) -> tuple[Val, Val]:
    """The block to release and the aligned address inside it."""
    if size.constant == 0:
        return NULL, NULL
    needed = f.add(size, integer(ALIGNMENT))
    block = kept_memory.take(f, needed) if is_kept else f.call("malloc", "ptr", needed)
    exists = f.compare("icmp ne", block, NULL)
    amount = "" if size.constant is None else f" ({size.constant} bytes)"
    message = f"out of memory for the kernel's temporaries{amount}"
    _fail_unless(f, frame, exists, RESOURCE_EXHAUSTED, message)
    begin = f.element(block, "i8", integer(kept_memory.HEADER)) if is_kept else block
    address = f.convert("ptrtoint", begin, "i64")
    missing = f.binary("sub", integer(0), address)
    missing = f.binary("and", missing, integer(ALIGNMENT - 1))
    return block, f.element(begin, "i8", missing)


def _fail_unless(
    f: Function,
    frame: Val,
    condition: Val,
    code: int,
    message: str | Val,
    block: Val = NULL,  # to free first
) -> None:
    fail, fine = f.labels("fail", "fine")
    f.branch_if(condition, fine, fail)
    f.label(fail)
    if block != NULL:
        f.call("free", "void", block)
    text = f.module.text_constant(message) if isinstance(message, str) else message
    listed = ", ".join(map(str, [frame, text, integer(code, "i32")]))
    error = f.value("ptr", f"call ptr @make_error({listed})")
    f.line(f"ret {error}")
    f.label(fine)


def _emit_make_error(module: Module) -> None:
    """Add `@make_error`: an XLA_FFI_Error, made by XLA itself."""
    params = [("ptr", "frame"), ("ptr", "message"), ("i32", "code")]
    f = Function(module, "make_error", params, "ptr", "internal")
    frame, message, code = f.params
    # XLA_FFI_Error_Create_Args: size, extension, message, code.
    args = f.value("ptr", "alloca [32 x i8], align 8")
    _set_field(f, args, 0, integer(28))
    _set_field(f, args, 8, NULL)
    _set_field(f, args, 16, message)
    _set_field(f, args, 24, code)
    create = _field(f, _field(f, frame, FRAME_API, "ptr"), API_ERROR_CREATE, "ptr")
    error = f.value("ptr", f"call ptr {create.text}({args})")
    f.line(f"ret {error}")
