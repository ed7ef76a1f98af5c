"""Makes the tables of configurations that come with the package.

Each problem is an operation of `pallasite.kernels` at shapes that models have. For TPUs
it is tuned by libtpu's estimates (no TPU is needed), and results are checked where JAX
runs; for a GPU on that GPU, which nothing else should use meanwhile.

    python benchmarks/tune_tables.py                        # all TPUs, in this process
    python benchmarks/tune_tables.py --chip h200 --seconds 120
    python benchmarks/tune_tables.py --chip v6e attention   # those of such names
    python benchmarks/tune_tables.py --processes 16         # that many at once
    python benchmarks/tune_tables.py --list                 # what there is

A table of each chip goes to `pallasite/tune/tables`, or to the folder that `--output`
names; entries for other problems stay. What gains less than 2 percent over the default
is left out: calls of other shapes take the nearest entry, and defaults know shapes.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

import pallasite as pl
from pallasite import config, kernels
from pallasite.kernels import masks
from pallasite.tune import table

TPUS = ("v5e", "v6e", "v5p")
GPUS = ("h200",)
BF16 = jnp.bfloat16
WIDTH = 128
GAIN = 0.98  # of the cycles by default: what is not below that is not worth an entry

Problem = tuple[Callable[..., Any], Sequence[Shape]]


def problems() -> Iterator[tuple[str, Problem]]:
    """By name: an operation and its operands.

    None whose programs skip work by numbers in arrays, such as the grouped matmul:
    libtpu does not know how many, and estimates less than what the products take.
    """
    for n in (1024, 4096):
        yield f"matmul {n}", (kernels.matmul, [Shape((n, n), BF16)] * 2)
    for length, number in ((2048, 8), (8192, 2)):
        heads = [Shape((1, length, number, WIDTH), BF16)] * 3
        yield f"attention {length}", (_attention, heads)
        yield f"causal attention {length}", (_causal_attention, heads)
        yield f"window attention {length}", (_window_attention, heads)
    rows = Shape((8192, 2048), BF16)
    yield "rms_norm", (kernels.rms_norm, [rows])
    yield "softmax", (kernels.softmax, [rows])


def gpu_problems() -> Iterator[tuple[str, Problem]]:
    """What is worth tuning on a GPU, most rewarding first.

    Products and rows are not: the backend chooses their tiles itself.
    """
    like_x = Shape((8, 4096, 2048), BF16)
    yield "linear_recurrence", (kernels.linear_recurrence, [like_x] * 2)
    wide, few = Shape((16384, 4096), BF16), Shape((16, 16384), BF16)
    yield "matmul of 16 rows", (kernels.matmul, [few, wide])
    yield "paged_attention 64", (_paged_attention, _paged(64, 8192))
    yield "paged_attention 4", (_paged_attention, _paged(4, 8192))
    cache = Shape((64, 8192, 8, WIDTH), BF16)
    query = Shape((64, 32, WIDTH), BF16)
    yield "decode_attention", (_decode_attention, [query, cache, cache])
    heads = [Shape((2, 4096, 16, WIDTH), BF16)] * 3
    yield "attention", (_attention, heads)
    yield "causal attention", (_causal_attention, heads)
    states = [Shape((8, 4096, 1, 128), BF16)] * 2
    scan = [Shape((8, 4096, 32, 64), BF16), Shape((8, 4096, 32), jnp.float32), *states]
    yield "state_space_scan", (_scan, scan)
    yield "causal_conv1d", (kernels.causal_conv1d, [like_x, Shape((4, 2048), BF16)])
    weights = [Shape((4096, 8192), jnp.int8), Shape((64, 8192), BF16)]
    yield "weight_only_matmul", (_weight_only, [Shape((16, 8192), BF16), *weights])


def _paged(batch: int, keys: int) -> list[Shape]:
    pages = Shape((batch * keys // 128, 128, 8, WIDTH), BF16)
    return [Shape((batch, 32, WIDTH), BF16), pages, pages]


def _paged_attention(q, k, v):
    """Of full caches, whose pages are in some order."""
    batch, pages = len(q), len(k)
    lengths = jnp.full(batch, pages // batch * k.shape[1], jnp.int32)
    table = jax.random.permutation(jax.random.key(0), pages).reshape(batch, -1)
    return kernels.paged_attention(q, k, v, lengths, table.astype(jnp.int32))


def _decode_attention(q, k, v):
    lengths = jnp.full(len(q), k.shape[1], jnp.int32)
    return kernels.decode_attention(q, k, v, lengths)


def _scan(x, log_decay, b, c):
    return kernels.state_space_scan(x, -jnp.abs(log_decay), b, c)


def _weight_only(x, values, scales):
    return kernels.weight_only_matmul(x, kernels.QuantizedWeights(values, scales, 4))


def problems_of(chip: str) -> dict[str, Problem]:
    return dict(gpu_problems() if chip in GPUS else problems())


def _attention(q, k, v):
    return kernels.attention(q, k, v)


def _causal_attention(q, k, v):
    return kernels.attention(q, k, v, mask=masks.Causal())


def _window_attention(q, k, v):
    return kernels.attention(q, k, v, mask=masks.Window(511, 0))


def tuned(
    name: str, chip: str, limit: float, share: float = 0.25
) -> Iterator[table.Entry]:
    """What is found, with a line of how."""
    function, operands = problems_of(chip)[name]
    # On a GPU processes beside this one would change what is measured.
    workers = 0 if chip in GPUS else None
    with tempfile.TemporaryDirectory() as folder, config.override(cache_dir=folder):
        run = pl.autotune(
            function,
            target=chip,
            limit=limit,
            progress=False,
            workers=workers,
            share=share,
        )
        found = run(*operands)
        again = run(*operands)
    for site, second in zip(found.sites, again.sites, strict=True):
        entry = site.entry
        print(
            f"{chip} {name}: {site.compiled} of {site.considered} compiled, "
            f"{_amount(entry.seconds, chip)} with {entry.config}, "
            f"{_amount(entry.default_seconds, chip)} by default, "
            f"then {second.compiled} compiled",
            file=sys.stderr,
            flush=True,
        )
        yield entry


def _amount(measured: float, chip: str) -> str:
    """What the tuner compares by: time, or libtpu's cycles."""
    return f"{1e6 * measured:,.1f} us" if chip in GPUS else f"{measured:,.0f} cycles"


def in_a_process(name: str, chip: str, limit: float) -> list[table.Entry]:
    command = [sys.executable, __file__, name, "--chip", chip, "--print"]
    command += ["--limit", str(limit)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return [table.Entry.from_json(json.loads(x)) for x in done.stdout.splitlines()]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems; default: all")
    parser.add_argument("--chip", action="append", choices=TPUS + GPUS)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="within which problems start")
    parser.add_argument("--share", type=float, default=0.25, help="that is compiled")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per kernel")
    parser.add_argument("--output", type=Path, default=table.SHIPPED)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--print", action="store_true", help="entries, and no files")
    options = parser.parse_args(argv)
    chips = options.chip or TPUS
    known = dict.fromkeys(n for chip in chips for n in problems_of(chip))
    names = [n for n in known if not options.names or n in options.names]
    if options.list:
        print(*names, sep="\n")
        return
    if options.print:
        for entry in (
            e
            for n in names
            for c in chips
            if n in problems_of(c)
            for e in tuned(n, c, options.limit)
        ):
            print(json.dumps(entry.to_json()), flush=True)
        return
    work = [
        (name, chip, options.limit)
        for name in names
        for chip in chips
        if name in problems_of(chip)
    ]
    if options.processes:
        with ThreadPoolExecutor(options.processes) as pool:
            found = pool.map(lambda each: in_a_process(*each), work)
    else:
        found = (list(tuned(*each, options.share)) for each in work)
    start = time.perf_counter()
    for (_, chip, _), entries in zip(work, found, strict=False):
        if entries:
            write(entries, options.output / f"{chip}.json")
        if time.perf_counter() - start > (options.seconds or math.inf):
            break


def write(entries: Sequence[table.Entry], path: Path) -> None:
    """Adds entries to a table; one of another version is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sites = {entry.site for entry in entries}
    gains = [e for e in entries if e.seconds < GAIN * e.default_seconds]
    known = table.load(path).entries if path.exists() else ()
    rest = [entry for entry in known if entry.site not in sites]
    everything = sorted((*rest, *gains), key=lambda entry: str(entry.site))
    table.Table(everything).save(path)


if __name__ == "__main__":
    main()
