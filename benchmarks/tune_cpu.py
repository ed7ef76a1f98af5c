"""Makes the table of configurations of this kind of CPU that comes with the package.

Each problem is an operation of `pallasite.kernels` at shapes that models have, in
float32. What the tuner finds is measured beside the default once more, in turns; it
stays only if it is faster in most of them, and by 3 percent or more in the middle one.

    python benchmarks/tune_cpu.py                       # all of them
    python benchmarks/tune_cpu.py "softmax 2048"        # those of such names
    taskset -c 0-3 python benchmarks/tune_cpu.py        # for four threads

The table goes to `pallasite/tune/tables`, or to the folder that `--output` names, under
the name of the CPU's kind and its number of threads.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Shape

import pallasite as pl
from benchmarks.tune_tables import (
    attention,
    causal_attention,
    decaying_scan,
    merged,
)
from pallasite import config, kernels
from pallasite.tune import choices, table

F32 = jnp.float32
ROUNDS = 15
GAIN = 1.03  # of the default's time in the middle round
VISIT_SECONDS = 0.03

Problem = tuple[Callable[..., Any], Sequence[Shape]]


def problems() -> Iterator[tuple[str, Problem]]:
    """By name: an operation and its operands, most rewarding first."""
    for batch, length, channels in ((1, 1024, 256), (4, 2048, 1024)):
        heads, rows = channels // 64, Shape((batch, length, channels), F32)
        yield f"linear_recurrence {length}", (kernels.linear_recurrence, [rows] * 2)
        taps = Shape((4, channels), F32)
        yield f"causal_conv1d {length}", (kernels.causal_conv1d, [rows, taps])
        scan = [
            Shape((batch, length, heads, 64), F32),
            Shape((batch, length, heads), F32),
            *[Shape((batch, length, 1, 128), F32)] * 2,
        ]
        yield f"state_space_scan {length}", (decaying_scan, scan)
    for length, heads in ((1024, 4), (4096, 8)):
        each = [Shape((1, length, heads, 64), F32)] * 3
        yield f"attention {length}", (attention, each)
        yield f"causal attention {length}", (causal_attention, each)
    shapes = [Shape((256, 256), F32), Shape((256, 8192), F32)]
    yield "loss", (_loss, shapes)
    for rows, width in ((2048, 2048), (16384, 512)):
        x = Shape((rows, width), F32)
        yield f"softmax {rows}", (kernels.softmax, [x])
        yield f"rms_norm {rows}", (kernels.rms_norm, [x])
        yield f"layer_norm {rows}", (kernels.layer_norm, [x])
    for n in (512, 1024):
        yield f"matmul {n}", (kernels.matmul, [Shape((n, n), F32)] * 2)


def _loss(x, weights):
    labels = jnp.arange(len(x), dtype=jnp.int32)
    return kernels.linear_softmax_cross_entropy_loss(x, labels, weights)


def found(function: Callable[..., Any], operands: Sequence[Shape]) -> list[table.Entry]:
    """What the tuner finds; nothing of it is kept elsewhere."""
    with tempfile.TemporaryDirectory() as folder, config.override(cache_dir=folder):
        run = pl.autotune(function, workers=0, progress=False)
        return [site.entry for site in run(*operands).sites]


def gains(problem: Problem, entries: Sequence[table.Entry]) -> list[float]:
    """How many times faster than the default in each round.

    Tables that are there already count for neither: an empty one comes first.
    """
    function, operands = problem
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in operands]
    runs = []
    for each in ((), entries):
        with choices.configs(table.Table(each)):
            runs.append(jax.jit(lambda *x: function(*x)).lower(*arrays).compile())
    return [_spent(runs[0], arrays) / _spent(runs[1], arrays) for _ in range(ROUNDS)]


def _spent(run: Callable[..., Any], arrays: Sequence[Any]) -> float:
    """Seconds of the best of several calls."""
    best, end = float("inf"), time.perf_counter() + VISIT_SECONDS
    jax.block_until_ready(run(*arrays))
    while time.perf_counter() < end or best == float("inf"):
        start = _clock()
        jax.block_until_ready(run(*arrays))
        best = min(best, _clock() - start)
    return best


def _clock() -> float:
    """Time that other programs do not count for, if there is one thread."""
    alone = len(os.sched_getaffinity(0)) == 1
    return time.process_time() if alone else time.perf_counter()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems; default: all")
    parser.add_argument("--output", type=Path, default=table.SHIPPED)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args(argv)
    path = options.output / f"{choices.chip_name()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    for name, problem in problems():
        late = time.perf_counter() - start > options.seconds
        if late or (options.names and name not in options.names):
            continue
        entries = found(*problem)
        if all(_is_default(entry) for entry in entries):
            print(f"{name}: the default", flush=True)
            continue
        ratios = gains(problem, entries)
        middle = statistics.median(ratios)
        wins = sum(r > 1 for r in ratios)
        kept = middle >= GAIN and wins > 0.8 * len(ratios)
        print(
            f"{name}: {[e.config for e in entries]} {middle:.2f} times faster,"
            f" in {wins} of {len(ratios)} rounds{'' if kept else ', left out'}",
            flush=True,
        )
        if kept:
            table.Table(merged(entries, path)).save(path)


def _is_default(entry: table.Entry) -> bool:
    return entry.seconds >= entry.default_seconds


if __name__ == "__main__":
    main()
