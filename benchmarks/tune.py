"""The tuner against an exhaustive search of the same space.

For each problem: how many candidates each of them compiles, what the best one takes,
whether a second run does any work, and what both choices take side by side (the times
of the searches are each the least of many).

    python benchmarks/tune.py                         # on the device JAX uses
    python benchmarks/tune.py matmul --target v5e     # by libtpu's estimates

Configurations go to a folder that is removed at the end.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

import pallasite as pl
from pallasite import config, kernels
from pallasite.kernels import masks
from pallasite.tune.measure import interleaved
from pallasite.tune.progress import shown_time
from pallasite.tune.table import user_table

SIZES = (64, 128, 256)


@pl.tunable(block_m=SIZES, block_n=SIZES, block_k=SIZES)
def matmul(x, y, *, block_m=128, block_n=128, block_k=128):
    (m, k), (_, n) = x.shape, y.shape

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(
            x_ref[...], y_ref[...], preferred_element_type=jnp.float32
        )

    return pl.pallas_call(
        kernel,
        out_shape=Shape((m, n), jnp.float32),
        grid=(pl.cdiv(m, block_m), pl.cdiv(n, block_n), pl.cdiv(k, block_k)),
        in_specs=[
            pl.BlockSpec((block_m, block_k), lambda i, j, k: (i, k)),
            pl.BlockSpec((block_k, block_n), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block_m, block_n), lambda i, j, k: (i, j)),
        name="matmul",
    )(x, y)


def attention(q, k, v):
    return kernels.attention(q, k, v, mask=masks.Causal())


def problems(target: str | None):
    """What a CPU is quick at; for a TPU that is not here it checks the results."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.float32 if on_cpu and target is None else jnp.bfloat16
    size = (1024 if target else 512) if on_cpu else 4096
    heads = Shape((1, size, 2 if on_cpu else 16, 128 if target else 64), dtype)
    return {
        "matmul": (matmul, [Shape((size, size), dtype)] * 2),
        "attention": (attention, [heads] * 3),
        "rms_norm": (kernels.rms_norm, [Shape((2 * size, size), dtype)]),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems; default: all")
    parser.add_argument("--target", help="a chip that need not be here, such as v5e")
    parser.add_argument("--output", help="a file for what is found (see pl.configs)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per kernel")
    options = parser.parse_args(argv)
    chosen = problems(options.target)
    with tempfile.TemporaryDirectory() as folder, config.override(cache_dir=folder):
        for name in options.names or chosen:
            function, operands = chosen[name]
            compare(name, function, operands, options)
        if options.output:
            user_table().save(options.output)


def compare(name: str, function, operands: list[Shape], options) -> None:
    known = {"target": options.target, "limit": options.limit}
    lines, chosen = [], {}
    for title, how in {
        "tuner": {},
        "second run": {},
        "exhaustive": {"share": 1.0, "again": True},
    }.items():
        started = time.perf_counter()
        found = pl.autotune(function, **known, **how)(*operands)
        chosen[title] = found
        (site,) = found.sites
        took = time.perf_counter() - started
        best = shown_time(site.entry.seconds, found.unit)
        default = shown_time(site.entry.default_seconds, found.unit)
        lines.append(
            f"{title:<12}{site.compiled:>3} of {site.considered} compiled in "
            f"{took:6.1f} s, best {best}, default {default}, {site.entry.config}"
        )
    if options.target is None:
        arrays = [
            jax.random.normal(jax.random.key(0), x.shape, x.dtype) for x in operands
        ]
        runs = [compiled(function, arrays, chosen[n]) for n in ("tuner", "exhaustive")]
        calls = [lambda run=run: run(*arrays) for run in runs]
        jax.block_until_ready([call() for call in calls])  # first calls are slow
        times = [shown_time(t, "s") for t in interleaved(calls, rounds=21)]
        lines.append(f"side by side: tuner's {times[0]}, exhaustive's {times[1]}")
    print(f"{name} {operands[0].shape}", *lines, sep="\n  ", flush=True)


def compiled(function: Callable, arrays: list[jax.Array], found: Any) -> Callable:
    """A function with the configurations that were found."""
    with pl.configs(found.table):
        return jax.jit(lambda *xs: function(*xs)).lower(*arrays).compile()


if __name__ == "__main__":
    main()
