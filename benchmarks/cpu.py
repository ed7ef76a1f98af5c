"""Kernels as machine code on this CPU against plain XLA, upstream Pallas and torch.

Prints best-of-many times, all rivals of a row interleaved, how many times faster than
each we are, and the ratio we aim at where there is one. `--save FOLDER` keeps numbers
and a bar chart there (`cpu.json`, `cpu.svg`). Torch joins where it is installed, on as
many threads as XLA has; upstream's interpret mode joins where it can be waited for.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite
from pallasite import tpu as pltpu

LOG2_E = 1.4426950408889634
MASKED = -1e30  # finite, so that differences of masked scores stay finite
Rival = Callable[[], Any]  # runs once and waits for the result


@dataclass(frozen=True)
class Row:
    """One line of the table: ours first, then the rivals by name."""

    name: str
    runs: dict[str, Rival]
    targets: dict[str, float] = field(default_factory=dict[str, float])  # by rival


# --- kernels, in the form of any module that has the names of Pallas ---


def matmul(
    size: int, blocks: tuple[int, int, int], pl: Any = pallasite, **how: Any
) -> Callable:
    """A product of squares; `blocks`: rows, columns and steps of k."""
    rows, columns, depth = blocks

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(
            x_ref[...], y_ref[...], preferred_element_type=jnp.float32
        )

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((size, size), jnp.float32),
        grid=(size // rows, size // columns, size // depth),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, k: (i, k)),
            pl.BlockSpec((depth, columns), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
        **how,
    )


def rowwise(
    function: Callable, rows: int, block: int = 8, pl: Any = pallasite, **how: Any
) -> Callable:
    """`function(x, *vectors)` on blocks of whole rows."""

    def kernel(x_ref, *refs):
        *vectors, o_ref = refs
        result = function(x_ref[...], *(v[...] for v in vectors))
        o_ref[...] = result.astype(o_ref.dtype)

    def call(x, *others):
        spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
        whole = pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(rows // block,),
            in_specs=[spec, *(whole if o.shape[0] == 1 else spec for o in others)],
            out_specs=spec,
            **how,
        )(x, *others)

    return call


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layernorm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def gelu_chain(x, residual, bias):
    """Bias, gelu by tanh and a residual: 12 elementwise operations."""
    y = x + bias
    inner = 0.7978845608 * (y + 0.044715 * (y * y * y))
    return 0.5 * y * (1 + jnp.tanh(inner)) + residual


def scale_and_shift(x):
    return 2 * x + 1


def attention(q, k, v):
    """Plain causal attention."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
    n = q.shape[1]
    scores = jnp.where(jnp.tri(n, dtype=bool), scores, MASKED)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1), v)


def absorb(state, q, k, v, diagonal: bool):
    """One block of keys into the running softmax, of scores in powers of two."""
    highest, total, out = state
    scores = jax.lax.dot_general(
        q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    if diagonal:
        rows = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        columns = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(rows >= columns, scores, MASKED)
    new = jnp.maximum(highest, scores.max(1, keepdims=True))
    p = jnp.exp2(scores - new)
    shrink = jnp.exp2(highest - new)
    out = out * shrink + jnp.dot(p, v, preferred_element_type=jnp.float32)
    return new, total * shrink + p.sum(1, keepdims=True), out


def flash_scratch(q, k, v, block: int = 32):
    pl = pallasite
    heads, n, width = q.shape
    scale = width**-0.5 * LOG2_E

    def kernel(q_ref, k_ref, v_ref, o_ref, scaled_ref, *state):
        i, j = pl.program_id(1), pl.program_id(2)

        @pl.when(j == 0)
        def _():
            scaled_ref[...] = q_ref[...] * scale
            state[0][...] = jnp.full_like(state[0], MASKED)
            state[1][...] = jnp.zeros_like(state[1])
            state[2][...] = jnp.zeros_like(state[2])

        def step(diagonal: bool):
            old = tuple(ref[...] for ref in state)
            new = absorb(old, scaled_ref[...], k_ref[...], v_ref[...], diagonal)
            for ref, value in zip(state, new, strict=True):
                ref[...] = value

        pl.when(j < i)(lambda: step(diagonal=False))

        @pl.when(j == i)
        def _():
            step(diagonal=True)
            o_ref[...] = (state[2][...] * (1 / state[1][...])).astype(o_ref.dtype)

    query = pl.BlockSpec((None, block, width), lambda h, i, j: (h, i, 0))
    key = pl.BlockSpec((None, block, width), lambda h, i, j: (h, j, 0))
    column = pltpu.VMEM((block, 1), jnp.float32)
    rows = pltpu.VMEM((block, width), jnp.float32)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, n // block, n // block),
        in_specs=[query, key, key],
        out_specs=query,
        scratch_shapes=[rows, column, column, rows],
    )(q, k, v)


def flash_fori(q, k, v, block: int = 32):
    pl = pallasite
    heads, n, width = q.shape
    scale = width**-0.5 * LOG2_E

    def kernel(q_ref, k_ref, v_ref, o_ref):
        i = pl.program_id(1)
        q = q_ref[...] * scale

        def step(j, state, diagonal: bool = False):
            keys = pl.ds(j * block, block)
            return absorb(state, q, k_ref[keys], v_ref[keys], diagonal)

        column = jnp.zeros((block, 1), jnp.float32)
        start = (column + MASKED, column, jnp.zeros((block, width), jnp.float32))
        state = jax.lax.fori_loop(0, i, step, start)
        _, total, out = step(i, state, diagonal=True)
        o_ref[...] = (out * (1 / total)).astype(o_ref.dtype)

    query = pl.BlockSpec((None, block, width), lambda h, i: (h, i, 0))
    key = pl.BlockSpec((None, n, width), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, n // block),
        in_specs=[query, key, key],
        out_specs=query,
    )(q, k, v)


def vector_matrix(product: Callable, contract: int, block: int = 256) -> Callable:
    """`product` of a row with blocks of a matrix's columns (or rows)."""
    pl = pallasite

    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = product(x_ref[...], w_ref[...])

    def call(x, w):
        n, depth = w.shape[1 - contract], w.shape[contract]
        sizes = (depth, block) if contract == 0 else (block, depth)
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((1, n), x.dtype),
            grid=(n // block,),
            in_specs=[
                pl.BlockSpec((1, depth), lambda i: (0, 0)),
                pl.BlockSpec(sizes, lambda i: (i, 0) if contract else (0, i)),
            ],
            out_specs=pl.BlockSpec((1, block), lambda i: (0, i)),
        )(x, w)

    return call


def attend(q, k, v):
    """One head of plain attention, of a few queries."""
    scores = jnp.dot(q, k.T) * q.shape[-1] ** -0.5
    p = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.dot(p, v) / p.sum(-1, keepdims=True)


def decode(q, k, v):
    pl = pallasite

    def kernel(q_ref, k_ref, v_ref, o_ref):
        o_ref[...] = attend(q_ref[...], k_ref[...], v_ref[...])

    specs = [pl.BlockSpec((None, *a.shape[1:]), lambda h: (h, 0, 0)) for a in (q, k, v)]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=q.shape[:1],
        in_specs=specs,
        out_specs=specs[0],
    )(q, k, v)


# --- rows ---


def jitted(function: Callable, *args: Any) -> Rival:
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*args))


def cores() -> int:
    """As many as this process may use, where the system says so."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def torch_run(function: Callable, *args: Any) -> dict[str, Rival]:
    """Torch as a rival, where it is installed; `function` gets the module."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return {}
    torch.set_num_threads(cores())
    kinds = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    tensors = [
        torch.from_numpy(np.array(a, np.float32)).to(kinds[str(a.dtype)]) for a in args
    ]

    def run() -> Any:
        with torch.no_grad():
            return function(torch, *tensors)

    return {"torch": run}


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, dtype)


def matmul_rows(quick: bool) -> Iterator[Row]:
    for dtype in (jnp.float32, jnp.bfloat16):
        for size in (512, 1024) if quick else (512, 1024, 2048):
            x, y = normal(size, size, dtype=dtype), normal(size, size, dtype=dtype)
            plain = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
            # Four or more for each of two threads: the last one ends soon after.
            blocks = (min(size // 4, 512), min(size // 2, 512), 512)
            runs = {
                "ours": jitted(matmul(size, blocks), x, y),
                "xla": jitted(plain, x, y),
                **torch_run(lambda torch, a, b: a @ b, x, y),
            }
            targets = {"xla": 1.0, "torch": 0.92}
            if dtype == jnp.bfloat16:
                targets = {} if size == 512 else {"xla": 1.2, "torch": 0.95}
            yield Row(f"matmul {size} {x.dtype}", runs, targets)


def rowwise_rows(quick: bool) -> Iterator[Row]:
    for rows in (1024,) if quick else (1024, 4096):
        x, scale, bias = normal(rows, 1024), normal(1, 1024), normal(1, 1024)
        softmaxes = torch_run(lambda torch, a: torch.softmax(a, -1), x)
        yield compared(f"softmax {rows}x1024", softmax, 1.3, x, rivals=softmaxes)
        norms = torch_run(_torch_layernorm, x, scale, bias)
        args = (x, scale, bias)
        yield compared(f"layernorm {rows}x1024", layernorm, 1.3, *args, rivals=norms)
    x, residual, bias = normal(1024, 1024), normal(1024, 1024) + 1, normal(1, 1024)
    yield compared("gelu chain 1024x1024", gelu_chain, 1.0, x, residual, bias)
    half = [a.astype(jnp.bfloat16) for a in (x, residual, bias)]
    yield compared("gelu chain 1024x1024 bf16", gelu_chain, None, *half)


def compared(
    name: str,
    function: Callable,
    target: float | None,
    *args: Any,
    rivals: dict[str, Rival] | None = None,
) -> Row:
    ours = jitted(rowwise(function, args[0].shape[0]), *args)
    runs = {"ours": ours, "xla": jitted(function, *args), **(rivals or {})}
    return Row(name, runs, {} if target is None else {"xla": target})


def _torch_layernorm(torch, x, scale, bias):
    functional = torch.nn.functional
    return functional.layer_norm(x, x.shape[-1:], scale[0], bias[0])


def attention_rows(quick: bool) -> Iterator[Row]:
    for length in (512,) if quick else (512, 2048):
        q, k, v = (normal(8, length, 64) + n for n in (0, 0.1, 0.2))
        scratch, fori = (jitted(f, q, k, v) for f in (flash_scratch, flash_fori))
        runs = {
            "ours": scratch,
            "xla": jitted(attention, q, k, v),
            **torch_run(_torch_attention, q, k, v),
        }
        targets = {"xla": 3.0, "torch": 1.2}
        yield Row(f"causal attention H8 S{length} D64", runs, targets)
        runs = {"ours": fori, "ours in scratch": scratch}
        yield Row(
            f"attention S{length} in a fori_loop", runs, {"ours in scratch": 1 / 1.15}
        )


def _torch_attention(torch, q, k, v):
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q[None], k[None], v[None], is_causal=True)


def decode_rows() -> Iterator[Row]:
    """One token: what matters is how fast a large operand is read once."""
    x, w = normal(1, 4096), normal(4096, 4096)
    for name, contract in (("", 0), (".T", 1)):
        dims = (((1,), (contract,)), ((), ()))
        product = functools.partial(jax.lax.dot_general, dimension_numbers=dims)
        turn = (lambda t: t.T) if contract else (lambda t: t)
        runs = {
            "ours": jitted(vector_matrix(product, contract), x, w),
            "xla": jitted(product, x, w),
            **torch_run(lambda torch, a, b, turn=turn: a @ turn(b), x, w),
        }
        yield Row(f"vector @ matrix{name} 4096", runs)
    q, k, v = (normal(32, n, 64) for n in (1, 4096, 4096))
    runs = {"ours": jitted(decode, q, k, v), "xla": jitted(jax.vmap(attend), q, k, v)}
    yield Row("one query H32 S4096 D64", runs)


def small_rows() -> Iterator[Row]:
    x = normal(10_000, 128)
    ours = jitted(rowwise(scale_and_shift, 10_000, 1), x)
    runs = {"ours": ours, "xla": jitted(scale_and_shift, x)}
    yield Row("10,000 programs of 1x128", runs, {"xla": 0.25})
    x = normal(1, 16)
    ours = jitted(rowwise(scale_and_shift, 1, 1), x)
    runs = {"ours": ours, "xla": jitted(jnp.sin, x)}
    yield Row("dispatch of 16 floats", runs, {"xla": 1 / 1.15})


def upstream_rows(quick: bool) -> Iterator[Row]:
    from jax.experimental import pallas as upstream

    size = 512 if quick else 1024
    x, y = normal(size, size), normal(size, size)
    theirs = matmul(size, (128, 128, 128), upstream, interpret=True)
    runs = {
        "ours": jitted(matmul(size, (128, 128, 128)), x, y),
        "interpret": jitted(theirs, x, y),
    }
    yield Row(f"matmul {size} in blocks of 128", runs, {"interpret": 30.0})
    count = 1000 if quick else 10_000
    x = normal(count, 128)
    theirs = rowwise(scale_and_shift, count, 1, upstream, interpret=True)
    ours = jitted(rowwise(scale_and_shift, count, 1), x)
    runs = {"ours": ours, "interpret": jitted(theirs, x)}
    yield Row(f"{count} programs of 1x128", runs, {"interpret": 1000.0})


# --- measuring ---


def measure(row: Row, seconds: float) -> dict[str, float]:
    """Best time of each, in milliseconds, taking turns in an order that varies.

    Who runs after whom matters: caches, clock and power still show what came before.
    """
    best, order = {}, random.Random(0)
    for name, run in row.runs.items():
        run()
        best[name] = float("inf")
    end = time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end or rounds < 3:
        rounds += 1
        for name, run in order.sample(list(row.runs.items()), len(row.runs)):
            # Twice in a row: the first one has the other's data in the caches.
            for _ in range(2):
                start = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - start)
            # OpenMP's threads spin for more work some 15 ms before they come to rest.
            time.sleep(0.02)
        if best.get("interpret", 0) > seconds:
            break
    return {name: 1e3 * t for name, t in best.items()}


COMPILE = """
import time, jax, jax.numpy as jnp, sys
sys.path.insert(0, {folder!r})
import cpu, pallasite as pl
from pallasite import config
shape = jax.ShapeDtypeStruct((8, 512, 64), jnp.float32)
jax.jit(jnp.sin).lower(shape).compile()
with config.override(cache_dir="off"):
    tiny = lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...])
    jax.jit(pl.pallas_call(tiny, out_shape=shape)).lower(shape).compile()
start = time.perf_counter()
jax.jit(cpu.flash_scratch).lower(shape, shape, shape).compile()
print(1e3 * (time.perf_counter() - start))
"""


def compile_times() -> dict[str, float]:
    """The flash kernel from trace to machine code, cold and from disk: best of 3."""
    program = COMPILE.format(folder=str(Path(__file__).resolve().parent))
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        for temperature in ("cold", "warm"):
            found = []
            for n in range(3):
                cache = f"{folder}/{n if temperature == 'cold' else 0}"
                environment = {**os.environ, "PALLASITE_CACHE_DIR": cache}
                child = subprocess.run(
                    [sys.executable, "-c", program],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                found.append(float(child.stdout.split()[-1]))
            times[temperature] = min(found)
    return times


# --- output ---

COMPILE_TARGETS = {"cold": 500.0, "warm": 100.0}  # ms


def show(row: Row, times: dict[str, float]) -> None:
    ours = times["ours"]
    cells = [f"{row.name:<31} {ours:>8.3f}"]
    for rival, ms in times.items():
        if rival != "ours":
            aim = row.targets.get(rival)
            wanted = "" if aim is None else f", aim {aim:.3g}"
            mark = "!" if aim is not None and ms / ours < aim else " "
            cells.append(f"{rival} {ms:>8.3f} ({ms / ours:.2f}x{wanted}){mark}")
    print("  ".join(cells), flush=True)


def chart(results: dict[str, dict[str, float]]) -> str:
    """Bars of speed against plain XLA (or the first rival), longer is faster."""
    bars = []
    for name, times in results.items():
        base = times.get("xla") or next(t for n, t in times.items() if n != "ours")
        bars += [(f"{name}: {rival}", base / ms) for rival, ms in times.items()]
    return svg(bars)


def facts() -> dict[str, Any]:
    """When and where: date, versions, chip."""
    versions = {"python": platform.python_version(), "pallasite": pallasite.__version__}
    for package in ("jax", "jaxlib", "numpy", "llvmlite", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    chip = {"architecture": platform.machine(), "cores": cores()}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = [line.split(":")[1].strip() for line in lines if "model name" in line]
        chip |= {"name": named[0]} if named else {}
    chip["llvm"] = importlib.import_module("llvmlite.binding").get_host_cpu_name()
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "versions": versions, "chip": chip}


def svg(bars: list[tuple[str, float]]) -> str:
    unit, left, height, longest = 90, 330, 18, 6.0
    lines = []
    for n, (label, value) in enumerate(bars):
        y, length = height * n + 20, unit * min(value, longest)
        colour = "#c33" if "ours" in label.rsplit(": ", 1)[1] else "#88a"
        lines.append(
            f'<text x="{left - 6}" y="{y + 11}" text-anchor="end">{label}</text>'
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="13" '
            f'fill="{colour}"/><text x="{left + length + 4:.1f}" y="{y + 11}">'
            f"{value:.2f}</text>"
        )
    total = height * len(bars) + 30
    width = left + unit * longest + 60
    line = f'<path d="M{left + unit} 10V{total}" stroke="black" stroke-dasharray="3"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
        f'height="{total}" font-family="sans-serif" font-size="11">'
        f'<text x="{left}" y="10">times as fast as plain XLA</text>'
        f"{''.join(lines)}{line}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4, help="per row")
    parser.add_argument("--quick", action="store_true", help="smaller sizes only")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--save", type=Path, help="folder for cpu.json and cpu.svg")
    options = parser.parse_args()
    about = facts()
    print(about, "\nbest times in ms (times as fast as the rival, ! below the aim)")
    results, targets = {}, {}
    for rows in (
        matmul_rows(options.quick),
        rowwise_rows(options.quick),
        attention_rows(options.quick),
        decode_rows(),
        small_rows(),
        upstream_rows(options.quick),
    ):
        for row in rows:
            if options.only in row.name:
                results[row.name] = measure(row, options.seconds)
                targets[row.name] = row.targets
                show(row, results[row.name])
    compiled = {}
    if options.only in "compile":
        compiled = compile_times()
        for name, ms in compiled.items():
            print(
                f"flash kernel, {name}: {ms:.0f} ms (aim {COMPILE_TARGETS[name]:.0f})"
            )
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        rounded = {
            n: {r: round(ms, 4) for r, ms in t.items()} for n, t in results.items()
        }
        kept = {"ms": rounded, "aims": targets, "compile_ms": compiled}
        text = json.dumps({**about, **kept}, indent=1)
        (options.save / "cpu.json").write_text(text + "\n")
        (options.save / "cpu.svg").write_text(chart(results))


if __name__ == "__main__":
    main()
