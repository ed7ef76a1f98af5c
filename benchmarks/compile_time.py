"""How long kernels with many uses of one op take to compile on this CPU, against XLA.

Each row is a kernel in which one op (or a few that go together) is used 50, 200 or 800
times, compiled from the Python function on, nothing cached: our stages, their sum,
XLA's compilation of the same function in plain JAX, and the ratio. Times are CPU
seconds of this process, so that other work on the machine does not count. `--save FILE`
keeps the rows as JSON, `--against FILE` prints the totals of such a file beside the new
ones. `--over 4` prints only rows that take more than 4 times as long as XLA's,
`--seconds` stops after that time, `--ops` lists which rows use each op of the op table.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

os.environ["PALLASITE_CACHE_DIR"] = "off"
import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.backends import base
from pallasite.backends.cpu.call import compile as compiler
from pallasite.ir.nodes import walk
from pallasite.ir.opdef import table
from pallasite.sites import calls_in, kernels_in

STAGES = ("trace", "passes", "text", "llvm", "code")
USES = (50, 200, 800)
SHAPE = (8, 128)
MOST_SECONDS = 60.0  # a row this slow is not measured with more uses
MOST_XLA_SECONDS = 5.0  # the same for XLA, whose time grows with the square of the uses

Step = Callable[[Any, int], Any]  # what one use makes of the value; which use it is

# Ops without a counterpart in plain JAX (or in the oldest JAX: log2), that passes make
# of others, or that become part of an access (subview).
WITHOUT_ROW = (
    *("copy_start", "copy_wait", "sem_signal", "sem_signal_core", "sem_wait"),
    *("sem_read", "roles", "barrier", "debug_print", "debug_check", "delay"),
    *("assume_multiple", "custom", "block_view", "dot_add", "dot_store"),
    *("subview", "log2"),
)


@dataclass(frozen=True)
class Row:
    """A kernel and the same in plain JAX, both of a number of uses."""

    name: str
    kernel: Callable[[int], Callable[..., Any]]
    plain: Callable[[int], Callable[..., Any]]
    args: tuple[Any, ...]
    uses: Sequence[int] = USES


# --- what is compiled ---


def whole(body: Callable[..., Any], like: Any) -> Callable[..., Any]:
    """A call of a kernel without a grid; `body` gets the refs."""
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(like.shape, like.dtype))


def repeated(step: Step, x: Any, uses: int) -> Any:
    for n in range(uses):
        x = step(x, n)
    return x


def chain(name: str, step: Step, x: Any) -> Row:
    """Each use takes the result of the one before."""

    def kernel(uses: int) -> Callable[..., Any]:
        def body(x_ref, o_ref):
            o_ref[...] = repeated(step, x_ref[...], uses).astype(o_ref.dtype)

        return whole(body, x)

    def plain(uses: int) -> Callable[..., Any]:
        return lambda x: repeated(step, x, uses).astype(x.dtype)

    return Row(name, kernel, plain, (x,))


def spread(name: str, step: Step, x: Any) -> Row:
    """Every use takes the operand; the results are added up."""
    added = lambda x, uses: sum((step(x * n, n) for n in range(1, uses)), step(x, 0))

    def kernel(uses: int) -> Callable[..., Any]:
        def body(x_ref, o_ref):
            o_ref[...] = added(x_ref[...], uses)

        return whole(body, x)

    return Row(name, kernel, lambda uses: lambda x: added(x, uses), (x,))


def stores(name: str, step: Step, x: Any) -> Row:
    """Every use loads one row from memory and stores one."""

    def kernel(uses: int) -> Callable[..., Any]:
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...]
            for n in range(uses):
                o_ref[n % 8, :] = step(o_ref[(n + 3) % 8, :], n)

        return whole(body, x)

    def plain(uses: int) -> Callable[..., Any]:
        def function(x):
            for n in range(uses):
                x = x.at[n % 8, :].set(step(x[(n + 3) % 8, :], n))
            return x

        return function

    return Row(name, kernel, plain, (x,))


def scalars(name: str, step: Step, x: Any) -> Row:
    """A chain of numbers, not tiles."""

    def kernel(uses: int) -> Callable[..., Any]:
        def body(x_ref, o_ref):
            number = repeated(step, x_ref[0, 0], uses)
            o_ref[...] = jnp.full(x.shape, number, x.dtype)

        return whole(body, x)

    plain = lambda uses: (
        lambda x: jnp.full(x.shape, repeated(step, x[0, 0], uses), x.dtype)
    )
    return Row(name, kernel, plain, (x,))


def in_memory(name: str, step: Callable[[Any, int], None], plain: Step, x: Any) -> Row:
    """Every use changes the result's ref, as `plain` changes an array."""

    def kernel(uses: int) -> Callable[..., Any]:
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...]
            for n in range(uses):
                step(o_ref, n)

        return whole(body, x)

    return Row(name, kernel, lambda uses: lambda x: repeated(plain, x, uses), (x,))


# --- the rows ---

FLOATS = np.linspace(0.1, 0.9, 1024, dtype=np.float32).reshape(SHAPE)
HALVES = jnp.asarray(FLOATS, jnp.bfloat16)
INTEGERS = np.arange(1, 1025, dtype=np.int32).reshape(SHAPE)
SMALL = np.linspace(-0.1, 0.1, 256, dtype=np.float32).reshape(16, 16)

UNARY = (
    *("exp", "exp2", "expm1", "log", "log1p", "logistic", "cbrt", "sqrt", "rsqrt"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "lgamma"),
    *("neg", "abs", "sign", "floor", "ceil", "square"),
)
BINARY = ("add", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter")
ON_INTEGERS = (
    *("add", "mul", "div", "rem", "max", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic"),
)


def elementwise_rows() -> Iterator[Row]:
    for name in UNARY:
        function = getattr(lax, name)
        # Half of it, so that nothing is simplified away.
        yield chain(name, lambda x, n, f=function: f(x) * np.float32(0.5), FLOATS)
    for name in BINARY:
        function = getattr(lax, name)
        yield chain(name, lambda x, n, f=function: f(x, x * np.float32(n)), FLOATS)
    for name in ON_INTEGERS:
        function = getattr(lax, name)
        yield chain(
            f"{name} i32", lambda x, n, f=function: f(x, x + np.int32(n)), INTEGERS
        )
    for name in ("population_count", "clz", "bitwise_not", "sign"):
        function = getattr(lax, name)
        yield chain(
            f"{name} i32", lambda x, n, f=function: f(x) + np.int32(n), INTEGERS
        )
    yield chain("integer_pow", lambda x, n: lax.integer_pow(x, 3 + n % 5), FLOATS)
    yield chain("round", lambda x, n: lax.round(x) * np.float32(0.3), FLOATS)
    yield chain(
        "reduce_precision",
        lambda x, n: lax.reduce_precision(x * np.float32(0.9), 6, 11),
        FLOATS,
    )
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        function = getattr(lax, name)
        yield chain(
            name,
            lambda x, n, f=function: jnp.where(f(x, x * np.float32(n)), x, x + n),
            FLOATS,
        )
    yield chain(
        "is_finite", lambda x, n: jnp.where(lax.is_finite(x * n), x, x + n), FLOATS
    )
    yield chain("stop_gradient", lambda x, n: lax.stop_gradient(x) + n, FLOATS)
    yield chain("clamp", lambda x, n: lax.clamp(x * 0.5, x, x + n), FLOATS)
    yield chain("select", lambda x, n: jnp.where(x > n / 900, x * 0.5, x + 1), FLOATS)
    yield chain(
        "cast", lambda x, n: (x * 3).astype(jnp.int32) * np.float32(0.1), FLOATS
    )
    yield chain(
        "cast to bf16",
        lambda x, n: (x * 3).astype(jnp.bfloat16).astype(x.dtype),
        FLOATS,
    )
    yield chain(
        "bitcast",
        lambda x, n: lax.bitcast_convert_type(
            lax.bitcast_convert_type(x, jnp.int32) + np.int32(n), jnp.float32
        ),
        FLOATS,
    )
    yield chain("sin bf16", lambda x, n: lax.sin(x), HALVES)
    yield chain("add bf16", lambda x, n: x + x, HALVES)
    yield spread("sin, summed", lambda x, n: lax.sin(x), FLOATS)
    yield spread("exp, summed", lambda x, n: lax.exp(x), FLOATS)
    yield spread("add, summed", lambda x, n: x + n, FLOATS)
    yield scalars("sin of numbers", lambda x, n: lax.sin(x), FLOATS)
    yield scalars("add of numbers", lambda x, n: x + n, FLOATS)


def tile_rows() -> Iterator[Row]:
    half = np.float32(0.5)
    pick = INTEGERS % 8
    yield chain("reduce sum", lambda x, n: x - x.sum(1, keepdims=True), FLOATS)
    yield chain("reduce max, rows", lambda x, n: x - x.max(0, keepdims=True), FLOATS)
    yield chain("argmax", lambda x, n: x + x.argmax(1).astype(x.dtype)[:, None], FLOATS)
    yield chain("cumsum", lambda x, n: jnp.cumsum(x, 1) * half, FLOATS)
    yield chain("cumsum, rows", lambda x, n: jnp.cumsum(x, 0) * half, FLOATS)
    yield chain("dot", lambda x, n: jnp.dot(x, x), SMALL)
    yield chain("dot, transposed", lambda x, n: jnp.dot(x, x.T), SMALL)
    yield chain("sort", lambda x, n: jnp.sort(x * x - half, 1), FLOATS)
    yield chain("top_k", lambda x, n: x - lax.top_k(x, 4)[0][:, :1], FLOATS)
    yield chain(
        "gather",
        lambda x, n: jnp.take_along_axis(x * half, pick, axis=1),
        FLOATS,
    )
    yield chain("broadcast", lambda x, n: x + x[n % 8, :][None, :] * half, FLOATS)
    yield chain(
        "concatenate",
        lambda x, n: jnp.concatenate([x[:, 5:], x[:, :5] * half], 1),
        FLOATS,
    )
    yield chain("pad", lambda x, n: jnp.pad(x[:, 1:] * half, ((0, 0), (0, 1))), FLOATS)
    yield chain("transpose", lambda x, n: x.T * half + x, SMALL)
    yield chain(
        "reshape", lambda x, n: (x.reshape(16, 64) * half).reshape(8, 128) + x, FLOATS
    )
    yield chain("rev", lambda x, n: x[:, ::-1] * half, FLOATS)
    yield chain(
        "iota",
        lambda x, n: x + lax.broadcasted_iota(jnp.int32, x.shape, n % 2) * half,
        FLOATS,
    )
    yield chain(
        "dynamic_slice",
        lambda x, n: x + lax.dynamic_slice(x, (x[0, 0].astype(int), 0), (1, 128)),
        FLOATS,
    )
    yield chain(
        "dynamic_update_slice",
        lambda x, n: lax.dynamic_update_slice(x, x[:1], (x[0, 0].astype(int), 0)) + n,
        FLOATS,
    )
    yield chain("scatter", lambda x, n: x.at[pick[0, :4]].add(half), FLOATS)
    yield stores("load, store", lambda x, n: x * half, FLOATS)
    yield stores("load, sin, store", lambda x, n: lax.sin(x), FLOATS)


def control_rows() -> Iterator[Row]:
    yield chain(
        "for",
        lambda x, n: lax.fori_loop(0, 3 + n % 2, lambda i, y: y * 0.5 + i, x),
        FLOATS,
    )
    yield chain(
        "while",
        lambda x, n: lax.while_loop(lambda y: y[0, 0] > n, lambda y: y * 0.5, x),
        FLOATS,
    )
    yield chain(
        "cond",
        lambda x, n: lax.cond(x[0, 0] > n, lambda y: y * 0.5, lambda y: y + 1, x),
        FLOATS,
    )


def memory_rows() -> Iterator[Row]:
    def atomic_add(ref, n):
        pl.atomic_add(ref, (n % 8, slice(None)), ref[(n + 3) % 8, :])

    def compare_and_swap(ref, n):
        pl.atomic_cas(ref.at[n % 8, 0], n, n + 1)

    def swapped(x, n):
        old = x[n % 8, 0]
        return x.at[n % 8, 0].set(jnp.where(old == n, n + 1, old))

    def masked(ref, n):
        row = ref[n % 8, :]
        pl.store(ref.at[(n + 3) % 8, :], row * 0.5, mask=row > n)

    def masked_set(x, n):
        row, old = x[n % 8, :], x[(n + 3) % 8, :]
        return x.at[(n + 3) % 8, :].set(jnp.where(row > n, row * 0.5, old))

    def scoped(ref, n):
        def body(scratch):
            scratch[...] = ref[n % 8, :] * 0.5
            ref[(n + 3) % 8, :] = scratch[...]

        pl.run_scoped(body, pltpu.VMEM((128,), jnp.float32))

    def some_rows(ref, n):
        rows = ref.at[pl.ds(n % 4, 4), :]
        rows[...] = rows[...] * 0.5

    def reshaped(ref, n):
        half = ref.reshape(16, 64)
        half[n % 16, :] = half[(n + 3) % 16, :] * 0.5

    def bits(ref, n):
        words = ref.bitcast(jnp.int32)
        words[n % 8, :] = words[(n + 3) % 8, :] + 1

    def add_to_bits(x, n):
        words = lax.bitcast_convert_type(x[(n + 3) % 8, :], jnp.int32) + 1
        return x.at[n % 8, :].set(lax.bitcast_convert_type(words, jnp.float32))

    def turned(ref, n):
        other = ref.transpose((1, 0))
        other[:, n % 8] = other[:, (n + 3) % 8] * 0.5

    def accumulated(ref, n):
        x = ref[...]
        ref[...] += jnp.dot(x, x)

    def moved(x, n):
        return x.at[n % 8, :].set(x[(n + 3) % 8, :] * 0.5)

    yield in_memory(
        "atomic_add",
        atomic_add,
        lambda x, n: x.at[n % 8, :].add(x[(n + 3) % 8, :]),
        FLOATS,
    )
    yield in_memory("atomic_cas", compare_and_swap, swapped, INTEGERS)
    yield in_memory("masked store", masked, masked_set, FLOATS)
    yield in_memory(
        "run_scoped", scoped, lambda x, n: moved(x, n)[jnp.arange(8)], FLOATS
    )
    yield in_memory(
        "subview",
        some_rows,
        lambda x, n: x.at[n % 4 : n % 4 + 4, :].multiply(0.5),
        FLOATS,
    )
    yield in_memory(
        "reshape of a ref",
        reshaped,
        lambda x, n: x.at[n % 8, :64].set(x[(n + 3) % 8, 64:] * 0.5),
        FLOATS,
    )
    yield in_memory("bitcast of a ref", bits, add_to_bits, FLOATS)
    yield in_memory("transpose of a ref", turned, moved, FLOATS)
    yield in_memory(
        "dot, accumulated", accumulated, lambda x, n: x + jnp.dot(x, x), SMALL
    )


# --- kernels of a usual kind ---


def exchange(x: Any, distance: int, size: int) -> Any:
    """One step of a bitonic network over the last dimension."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    up, down = jnp.roll(x, -distance, -1), jnp.roll(x, distance, -1)
    first = (lane & distance) == 0
    other = jnp.where(first, up, down)
    rising = (lane & size) == 0
    return jnp.where(first == rising, jnp.minimum(x, other), jnp.maximum(x, other))


def bitonic(x: Any, width: int) -> Any:
    size = 2
    while size <= width:
        distance = size // 2
        while distance:
            x = exchange(x, distance, size)
            distance //= 2
        size *= 2
    return x


def bitonic_refs(x_ref: Any, o_ref: Any, width: int) -> None:
    """Each step reads the block and writes it again."""
    o_ref[...] = x_ref[...]
    size = 2
    while size <= width:
        distance = size // 2
        while distance:
            o_ref[...] = exchange(o_ref[...], distance, size)
            distance //= 2
        size *= 2


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: (function(*args) ** 2).sum(), argnums=0)


def attend(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.dot(q, k.T)
    p = jnp.exp(scores - scores.max(1, keepdims=True))
    return jnp.dot(p, v) / p.sum(1, keepdims=True)


def flash(q: Any, k: Any, v: Any, block: int = 32) -> Any:
    def kernel(q_ref, k_ref, v_ref, o_ref):
        q = q_ref[...]

        def step(j, state):
            highest, total, out = state
            keys = pl.ds(j * block, block)
            scores = jnp.dot(q, k_ref[keys].T)
            new = jnp.maximum(highest, scores.max(1, keepdims=True))
            p, shrink = jnp.exp(scores - new), jnp.exp(highest - new)
            total = total * shrink + p.sum(1, keepdims=True)
            return new, total, out * shrink + jnp.dot(p, v_ref[keys])

        column = jnp.zeros((block, 1), jnp.float32)
        start = (column - 1e30, column, jnp.zeros((block, q.shape[1]), jnp.float32))
        _, total, out = lax.fori_loop(0, k.shape[0] // block, step, start)
        o_ref[...] = out / total

    query = pl.BlockSpec((block, q.shape[1]), lambda i: (i, 0))
    key = pl.BlockSpec(k.shape, lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0] // block,),
        in_specs=[query, key, key],
        out_specs=query,
    )(q, k, v)


def kernel_rows() -> Iterator[Row]:
    x = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)
    sort = whole(partial(bitonic_refs, width=64), x)
    plain = partial(bitonic, width=64)
    yield Row("bitonic sort", lambda _: sort, lambda _: plain, (x,), [1])
    yield Row(
        "bitonic sort, gradient",
        lambda _: gradient(sort),
        lambda _: gradient(plain),
        (x,),
        [1],
    )
    rows = np.linspace(-1, 1, 256 * 64, dtype=np.float32).reshape(256, 64)
    yield Row("attention", lambda _: flash, lambda _: attend, (rows,) * 3, [1])
    yield Row(
        "attention, gradient",
        lambda _: gradient(flash),
        lambda _: gradient(attend),
        (rows,) * 3,
        [1],
    )


def all_rows() -> list[Row]:
    rows = [*kernel_rows(), *elementwise_rows(), *tile_rows()]
    return [*rows, *control_rows(), *memory_rows()]


def print_ops(rows: list[Row]) -> None:
    """Which rows use each op of the op table; ops that none uses are marked."""
    users: dict[str, list[str]] = {name: [] for name in table()}
    for row in rows:
        kernels = kernels_in(row.kernel(2), *row.args)
        for name in {op.name for kernel in kernels for op in walk(kernel.body)}:
            users[name].append(row.name)
    for name, found in users.items():
        none = "(see WITHOUT_ROW)" if name in WITHOUT_ROW else "NO ROW"
        print(f"{name:24} {', '.join(found[:6]) or none}")


# --- measuring ---


@contextmanager
def timed(times: dict[str, float], stage: str) -> Iterator[None]:
    start = time.process_time()
    yield
    times[stage] = times.get(stage, 0.0) + time.process_time() - start


def ours(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, float]:
    """CPU seconds by stage, over all kernels of the function."""
    times: dict[str, float] = {}
    jax.clear_caches()
    with timed(times, "trace"):
        calls = list(calls_in(function, *args))
    for call in calls:
        compiled = base.Compiled(base.get("cpu"), call.kernel, call.options)
        with timed(times, "passes"):
            compiled["scheduled"]
        with timed(times, "text"):
            text = compiled["llvm"]
        with timed(times, "llvm"):
            module = compiler._optimized(text)
        with timed(times, "code"):
            compiler._machine().emit_object(module)
    return times


def theirs(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """CPU seconds of XLA from the Python function to machine code."""
    times: dict[str, float] = {}
    jax.clear_caches()
    with timed(times, "xla"):
        jax.jit(function).lower(*args).compile()
    return times["xla"]


def warm_up() -> None:
    """Imports, and tables that are made once per process."""
    row = chain("add", lambda x, n: jnp.dot(x, x.T) @ x + lax.sin(x), FLOATS)
    ours(row.kernel(1), row.args)
    theirs(row.plain(1), row.args)


def measured(
    rows: list[Row], uses: Sequence[int], with_xla: bool
) -> Iterator[dict[str, Any]]:
    for row in rows:
        xla: float | None = 0.0 if with_xla else None
        for n in [n for n in row.uses if n in uses or n == 1]:
            stages = ours(row.kernel(n), row.args)
            total = sum(stages.values())
            if xla is not None:
                xla = theirs(row.plain(n), row.args) if xla < MOST_XLA_SECONDS else None
            yield {"name": row.name, "uses": n, **stages, "total": total, "xla": xla}
            if total > MOST_SECONDS:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="rows whose name contains one of these"
    )
    parser.add_argument("--uses", type=int, nargs="+", default=USES)
    parser.add_argument("--ours", action="store_true", help="leave XLA out")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--over", type=float, help="print only rows above this ratio")
    parser.add_argument("--seconds", type=float, help="stop after so much time")
    parser.add_argument("--ops", action="store_true", help="list ops and their rows")
    chosen = parser.parse_args()
    rows = all_rows()
    if chosen.names:
        rows = [row for row in rows if any(name in row.name for name in chosen.names)]
    if chosen.ops:
        print_ops(rows)
        return
    before: dict[Any, Any] = {}
    if chosen.against:
        for old in json.loads(chosen.against.read_text()):
            before[old["name"], old["uses"]] = old
    warm_up()
    columns = (*STAGES, "total", "xla", "ratio", *(["before"] if before else []))
    print(f"{'op':24} {'uses':>4}" + "".join(f"{name:>8}" for name in columns))
    kept: list[dict[str, Any]] = []
    start = time.perf_counter()
    for found in measured(rows, chosen.uses, with_xla=not chosen.ours):
        kept.append(found)
        total, xla = found["total"], found["xla"]
        old = before.get((found["name"], found["uses"]))
        cells = "".join(f"{found.get(s, 0):8.2f}" for s in (*STAGES, "total"))
        cells += f"{xla:8.2f}{total / xla:8.1f}" if xla else f"{'-':>8}{'-':>8}"
        cells += f"{old['total']:8.2f}" if old else ""
        if not chosen.over or (xla and total / xla > chosen.over):
            print(f"{found['name']:24} {found['uses']:4}{cells}", flush=True)
        if chosen.save:
            chosen.save.write_text(json.dumps(kept, indent=1))
        if chosen.seconds and time.perf_counter() - start > chosen.seconds:
            print(f"stopped after {chosen.seconds:.0f} s, at {found['name']!r}")
            break
    if chosen.over:
        compared = [found for found in kept if found["xla"]]
        slow = sum(found["total"] > chosen.over * found["xla"] for found in compared)
        print(f"{slow} of {len(compared)} rows over {chosen.over:g} times XLA's time")


if __name__ == "__main__":
    main()
