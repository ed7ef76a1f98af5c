"""How long kernels take to compile for an H200, against XLA, on a machine without one.

    make gpu GPU_ARGS=softmax         # once: installs XLA's compiler for GPUs
    python -m benchmarks.compile_time_gpu
    python -m benchmarks.compile_time_gpu sin sort --uses 50 200 --backend triton

Rows are kernels with 50, 200 or 800 uses of a function on blocks of 8 x 1024, sorts of
rows, and a stencil. Times are CPU seconds of this process and those it starts (ptxas):
our lowering (tracing, passes, stages; for `cuda` NVRTC), XLA's compilation of it, and
XLA's of the same in plain JAX. What the driver does with the PTX of `cuda` is missing.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.backends.gpu_compile import environment, sharding

FUNCTIONS = ("sin", "cos", "tan", "tanh", "exp", "log", "log1p", "expm1", "erf", "atan")
USES = (50, 200, 800)
SORTED = (64, 256, 1024, 4096)
SHAPE, ROWS = (1024, 1024), 8
MOST_SECONDS = 60.0  # a row this slow is not measured with more uses


class Row(NamedTuple):
    name: str
    uses: int
    body: Callable[[Any], Any]  # of a block; in plain JAX, of the whole array
    shape: tuple[int, int]
    rows: int  # of a block


def all_rows(uses: Sequence[int]) -> Iterator[Row]:
    import jax.numpy as jnp
    from jax import lax

    def repeated(function: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
        def body(x: Any) -> Any:
            for _ in range(count):
                x = function(x)
            return x

        return body

    for name in FUNCTIONS:
        for n in uses:
            yield Row(name, n, repeated(getattr(lax, name), n), SHAPE, ROWS)
    for n in SORTED:
        yield Row(f"sort {n}", 1, lambda x: jnp.sort(x, axis=1), (256, n), 1)
        yield Row(f"sort 8 x {n}", 1, lambda x: jnp.sort(x, axis=1), (256, n), 8)
        argsort = lambda x: jnp.argsort(x, axis=1).astype(x.dtype)
        yield Row(f"argsort {n}", 1, argsort, (256, n), 1)

    def shifted(x: Any) -> Any:
        zero = jnp.zeros((x.shape[0], 1), x.dtype)
        left = jnp.concatenate([zero, x[:, :-1]], 1)
        return x + left + jnp.concatenate([x[:, 1:], zero], 1)

    yield Row("shifted rows", 1, shifted, (1024, 4096), 8)


def by_blocks(row: Row, backend: str | None) -> Callable[[Any], Any]:
    import jax
    import jax.numpy as jnp

    import pallasite as pl

    def kernel(x_ref, o_ref):
        o_ref[...] = row.body(x_ref[...])

    spec = pl.BlockSpec((row.rows, row.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(row.shape, jnp.float32),
        grid=(row.shape[0] // row.rows,),
        in_specs=[spec],
        out_specs=spec,
        backend=backend,
    )


def seconds(function: Callable[[Any], Any], row: Row) -> tuple[float, float]:
    """Of lowering, and of XLA's compilation."""
    import jax
    import jax.numpy as jnp

    from pallasite import config

    jax.clear_caches()
    x = jax.ShapeDtypeStruct(row.shape, jnp.float32, sharding=sharding("h200"))
    with config.override(target="h200"):
        times = [sum(os.times()[:4])]
        lowered = jax.jit(function).lower(x)
        times.append(sum(os.times()[:4]))
        lowered.compile()
        times.append(sum(os.times()[:4]))
    return times[1] - times[0], times[2] - times[1]


def measure(options: argparse.Namespace) -> None:
    rows = list(all_rows(options.uses))
    warm = next(row for row in rows if row.name.startswith("sort"))
    for function in (by_blocks(warm, options.backend), warm.body):
        seconds(function, warm)
    print(f"{'kernel':16} {'uses':>4}   lower compile   total     XLA  ratio")
    too_slow: set[str] = set()
    for row in rows:
        chosen = not options.names or any(n in row.name for n in options.names)
        if not chosen or row.name in too_slow:
            continue
        lower, compile_ = seconds(by_blocks(row, options.backend), row)
        total, xla = lower + compile_, sum(seconds(row.body, row))
        if max(total, xla) > MOST_SECONDS:
            too_slow.add(row.name)
        cells = "".join(f"{t:8.2f}" for t in (lower, compile_, total, xla))
        print(f"{row.name:16} {row.uses:4}{cells}{total / xla:7.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="rows whose name contains one of them")
    parser.add_argument("--uses", type=int, nargs="+", default=USES)
    parser.add_argument("--backend", choices=("cuda", "triton"))
    default = Path(sys.prefix) / "gpu_compiler"
    parser.add_argument("--plugin", type=Path, default=default, help="its folder")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        measure(options)
        return 0
    if not (options.plugin / "jax_plugins").is_dir():
        parser.error(f"no JAX plugin for CUDA in {options.plugin}: run `make gpu`")
    command = [sys.executable, "-m", "benchmarks.compile_time_gpu", "--run"]
    settings = {**environment(options.plugin.resolve()), "PALLASITE_CACHE_DIR": "off"}
    return subprocess.run(
        [*command, *sys.argv[1:]], env={**os.environ, **settings}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
