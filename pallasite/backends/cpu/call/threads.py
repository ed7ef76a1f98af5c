"""Units of work on XLA's own threads: `@run_job` and what it needs, as LLVM IR.

The caller schedules helpers and works itself. The units are divided into as many
consecutive runs as there may be threads; each thread claims chunks of its own run,
whose data its caches hold, and then of the others'. The caller waits only for chunks
that a thread has already started, never for a helper that has not started, so it cannot
deadlock even if it occupies the pool's only thread. A helper that starts too late finds
nothing to claim; the last thread that drops the job frees its memory. Nothing here is
global or outlives the job. Where programs differ (causal attention), it is mostly the
later ones that take longer: chunks are then claimed from the last one down, and the
short ones fill the gaps. Otherwise they are claimed in order, so that prefetching past
the end of a chunk is useful.
"""

from pallasite import target
from pallasite.backends.cpu.call import recording
from pallasite.backends.cpu.llvm.writer import Function, Module, Val

# Byte offsets in a job. Counters that all threads write are on their own cache lines.
# After the operands, each run has a line with a counter of what has been claimed of it.
DONE, REFS, WORKERS = 0, 64, 136
COUNTERS = (DONE, WORKERS)
UNITS, CHUNK, MESSAGE, ARENA, ARENA_STRIDE, RUNS = 144, 152, 160, 168, 176, 184
OPERANDS = 192
LINE = 64

# Byte offsets in XLA_FFI_CallFrame and XLA_FFI_Api.
FRAME_API, FRAME_CONTEXT = 16, 24
API_ERROR_DESTROY, API_SCHEDULE, API_NUM_THREADS = 64, 136, 144

SPINS = 2000  # polls of the counter before the waiting caller yields its core


def runs_offset(operands: int) -> int:
    """The offset of the runs' counters in a job."""
    return -(-(OPERANDS + 8 * operands) // LINE) * LINE


def emit_jobs(module: Module, operands: int, in_order: bool) -> None:
    """Add `@run_job` and `@count_threads`, for a `@kernel` with that many operands."""
    module.declare("free", "void", ["ptr"])
    recording.define(module)
    _emit_work(module, operands, in_order)
    _emit_task(module)
    _emit_drop(module)
    _emit_wait(module)
    _emit_run(module)
    _emit_count_threads(module)


def _at(name: str, offset: int, base: str = "%job") -> str:
    return f"%{name} = getelementptr inbounds i8, ptr {base}, i64 {offset}"


def _xla_function(name: str, offset: int) -> str:
    """Loads the call's `%context`, and a function of XLA's table from `%frame`."""
    return f"""
        {_at("context.at", FRAME_CONTEXT, "%frame")}
        %context = load ptr, ptr %context.at
        {_at("api.at", FRAME_API, "%frame")}
        %api = load ptr, ptr %api.at
        {_at(f"{name}.at", offset, "%api")}
        %{name} = load ptr, ptr %{name}.at
    """


def wait_for(f: Function, counter: Val, count: Val) -> None:
    """Wait until other threads have brought a counter up to `count`."""
    _emit_wait(f.module)
    f.call_defined("wait_for", counter, count)


def _emit_work(module: Module, operands: int, in_order: bool) -> None:
    """`@work(job)`: run chunks until none is left."""
    f = Function(module, "work", [("ptr", "job")], "void", "internal")
    pointers = [f"%a{n}" for n in range(operands)]
    loads = "\n".join(
        f"{_at(f'a{n}.at', OPERANDS + 8 * n)}\n%a{n} = load ptr, ptr %a{n}.at"
        for n in range(operands)
    )
    listed = "".join(f"ptr {pointer}, " for pointer in pointers)
    f.write(
        f"""
        {_at("workers", WORKERS)}
        {_at("units.at", UNITS)}
        {_at("chunk.at", CHUNK)}
        {_at("arena.at", ARENA)}
        {_at("stride.at", ARENA_STRIDE)}
        {_at("message.at", MESSAGE)}
        {_at("runs.at", RUNS)}
        {_at("counters", runs_offset(operands))}
        {_at("done", DONE)}
        {loads}
        %id = atomicrmw add ptr %workers, i64 1 monotonic
        %units = load i64, ptr %units.at
        %chunk = load i64, ptr %chunk.at
        %arenas = load ptr, ptr %arena.at
        %stride = load i64, ptr %stride.at
        %offset = mul i64 %id, %stride
        %arena = getelementptr inbounds i8, ptr %arenas, i64 %offset
        %runs = load i64, ptr %runs.at
        {_claims(in_order)}
        claimed:
        %earlier = load atomic ptr, ptr %message.at monotonic, align 8
        %fine = icmp eq ptr %earlier, null
        br i1 %fine, label %run, label %finish
        run:
        %since = call i64 @now()
        %message = call ptr @kernel({listed}i64 %first, i64 %last, ptr %arena)
        call void @record(i64 %since, i64 %first, i64 %last)
        %good = icmp eq ptr %message, null
        br i1 %good, label %finish, label %report
        report:
        %swapped = cmpxchg ptr %message.at, ptr null, ptr %message monotonic monotonic
        br label %finish
        finish:
        %count = sub i64 %last, %first
        %total = atomicrmw add ptr %done, i64 %count release
        br label %claim
        none:
        ret void
        """,
    )


def _claims(in_order: bool) -> str:
    """Code that distributes all units, run by run, each from its first or last unit on.

    It branches to `claimed` with `first` and `last`, from where the surrounding code
    branches back to `claim`; when nothing is left, to `none`.
    """
    return f"""
        %up = add i64 %units, %runs
        %rounded = sub i64 %up, 1
        %length = sdiv i64 %rounded, %runs
        br label %run.begin
        run.begin:
        %tried = phi i64 [ 0, %entry ], [ %tried.next, %run.end ]
        %number = add i64 %id, %tried
        %which = urem i64 %number, %runs
        %line = mul i64 %which, {LINE}
        %counter = getelementptr inbounds i8, ptr %counters, i64 %line
        %low = mul i64 %which, %length
        %end = add i64 %low, %length
        %past = icmp sgt i64 %end, %units
        %high = select i1 %past, i64 %units, i64 %end
        br label %claim
        claim:
        %before = atomicrmw add ptr %counter, i64 %chunk monotonic
        {_UPWARDS if in_order else _DOWNWARDS}
        br label %claimed
        run.end:
        %tried.next = add i64 %tried, 1
        %more = icmp slt i64 %tried.next, %runs
        br i1 %more, label %run.begin, label %none
    """


_UPWARDS = """
        %first = add i64 %low, %before
        %some = icmp slt i64 %first, %high
        br i1 %some, label %found, label %run.end
        found:
        %stop = add i64 %first, %chunk
        %over = icmp sgt i64 %stop, %high
        %last = select i1 %over, i64 %high, i64 %stop
"""
_DOWNWARDS = """
        %last = sub i64 %high, %before
        %some = icmp sgt i64 %last, %low
        br i1 %some, label %found, label %run.end
        found:
        %start = sub i64 %last, %chunk
        %over = icmp slt i64 %start, %low
        %first = select i1 %over, i64 %low, i64 %start
"""


def _emit_wait(module: Module) -> None:
    """`@wait_for(counter, count)`, once: spin for a while, then yield."""
    if module.defines("wait_for"):
        return
    module.declare("sched_yield", "i32", [])
    params = [("ptr", "counter"), ("i64", "count")]
    f = Function(module, "wait_for", params, linkage="internal", attributes="noinline")
    f.write(
        f"""
        br label %wait
        wait:
        %spins = phi i64 [ 0, %entry ], [ %spins.next, %pause ], [ 0, %yield ]
        %counted = load atomic i64, ptr %counter acquire, align 8
        %reached = icmp sge i64 %counted, %count
        br i1 %reached, label %leave, label %idle
        idle:
        %tired = icmp sge i64 %spins, {SPINS}
        br i1 %tired, label %yield, label %pause
        pause:
        {_pause(module)}
        %spins.next = add i64 %spins, 1
        br label %wait
        yield:
        %ignored = call i32 @sched_yield()
        br label %wait
        leave:
        ret void
        """,
    )


def _emit_task(module: Module) -> None:
    """`@task(job)`: what a thread of the pool runs."""
    f = Function(module, "task", [("ptr", "job")], "void", "internal")
    f.write("call void @work(ptr %job)\ncall void @drop(ptr %job)\nret void")


def _emit_drop(module: Module) -> None:
    """`@drop(job)`: releases a reference; the last one frees the job."""
    f = Function(module, "drop", [("ptr", "job")], "void", "internal")
    f.write(
        f"""
        {_at("refs", REFS)}
        %before = atomicrmw sub ptr %refs, i64 1 acq_rel
        %last = icmp eq i64 %before, 1
        br i1 %last, label %free, label %leave
        free:
        call void @free(ptr %job)
        ret void
        leave:
        ret void
        """,
    )


def _emit_run(module: Module) -> None:
    """`@run_job(frame, job, helpers)`: run it all; the first message, or null.

    Takes over the caller's reference to the job.
    """
    params = [("ptr", "frame"), ("ptr", "job"), ("i64", "helpers")]
    f = Function(module, "run_job", params, "ptr", "internal")
    f.write(
        f"""
        %args = alloca [40 x i8], align 8
        %spoilt = alloca [24 x i8], align 8
        {_xla_function("schedule", API_SCHEDULE)}
        {_at("refs", REFS)}
        {_at("done", DONE)}
        {_at("units.at", UNITS)}
        {_at("message.at", MESSAGE)}
        %units = load i64, ptr %units.at
        {_at("args.extension", 8, "%args")}
        {_at("args.context", 16, "%args")}
        {_at("args.task", 24, "%args")}
        {_at("args.data", 32, "%args")}
        store i64 40, ptr %args
        store ptr null, ptr %args.extension
        store ptr %context, ptr %args.context
        store ptr @task, ptr %args.task
        store ptr %job, ptr %args.data
        br label %more
        more:
        %n = phi i64 [ 0, %entry ], [ %n.next, %scheduled ]
        %wanted = icmp slt i64 %n, %helpers
        br i1 %wanted, label %ask, label %work
        ask:
        %held = atomicrmw add ptr %refs, i64 1 monotonic
        %error = call ptr %schedule(ptr %args)
        %n.next = add i64 %n, 1
        %accepted = icmp eq ptr %error, null
        br i1 %accepted, label %scheduled, label %refused
        scheduled:
        br label %more
        refused:
        {_destroy_error()}
        call void @drop(ptr %job)
        br label %work
        work:
        call void @work(ptr %job)
        call void @wait_for(ptr %done, i64 %units)
        %message = load atomic ptr, ptr %message.at monotonic, align 8
        call void @drop(ptr %job)
        ret ptr %message
        """,
    )


def _destroy_error() -> str:
    """Give `%error` back to XLA, by way of the arguments in `%spoilt`."""
    return f"""
        {_at("spoilt.extension", 8, "%spoilt")}
        {_at("spoilt.error", 16, "%spoilt")}
        store i64 24, ptr %spoilt
        store ptr null, ptr %spoilt.extension
        store ptr %error, ptr %spoilt.error
        {_at("destroy.at", API_ERROR_DESTROY, "%api")}
        %destroy = load ptr, ptr %destroy.at
        call void %destroy(ptr %spoilt)
    """


def _pause(module: Module) -> str:
    """The spin-wait hint instruction."""
    architecture = target.host().architecture
    if architecture == "x86_64":
        module.declare("llvm.x86.sse2.pause", "void", [])
        return "call void @llvm.x86.sse2.pause()"
    if architecture == "aarch64":
        module.declare("llvm.aarch64.hint", "void", ["i32"])
        return "call void @llvm.aarch64.hint(i32 1)"
    return ""


def _emit_count_threads(module: Module) -> None:
    """`@count_threads(frame)`: the size of XLA's pool; 1 if XLA does not say."""
    f = Function(module, "count_threads", [("ptr", "frame")], "i64", "internal")
    f.write(
        f"""
        %args = alloca [32 x i8], align 8
        %count = alloca i64, align 8
        %spoilt = alloca [24 x i8], align 8
        {_xla_function("number", API_NUM_THREADS)}
        {_at("args.extension", 8, "%args")}
        {_at("args.context", 16, "%args")}
        {_at("args.count", 24, "%args")}
        store i64 32, ptr %args
        store ptr null, ptr %args.extension
        store ptr %context, ptr %args.context
        store ptr %count, ptr %args.count
        store i64 1, ptr %count
        %error = call ptr %number(ptr %args)
        %known = icmp eq ptr %error, null
        br i1 %known, label %leave, label %refused
        refused:
        {_destroy_error()}
        ret i64 1
        leave:
        %found = load i64, ptr %count
        %some = icmp sgt i64 %found, 1
        %threads = select i1 %some, i64 %found, i64 1
        ret i64 %threads
        """,
    )
