"""Makes the tables of configurations that come with the package, for TPUs.

Each problem is an operation of `pallasite.kernels` at shapes that models have, tuned by
libtpu's estimates (no TPU is needed). Results are checked where JAX runs.

    python benchmarks/tune_tables.py                        # all, in this process
    python benchmarks/tune_tables.py --chip v6e attention   # those of such names
    python benchmarks/tune_tables.py --processes 16         # that many at once
    python benchmarks/tune_tables.py --list                 # what there is

A table of each chip goes to `pallasite/tune/tables`, or to the folder that `--output`
names; entries for other problems stay. What gains less than 2 percent over the default
is left out: calls of other shapes take the nearest entry, and defaults know shapes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

import pallasite as pl
from pallasite import config, kernels
from pallasite.kernels import masks
from pallasite.tune import table

CHIPS = ("v5e", "v6e", "v5p")
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


def _attention(q, k, v):
    return kernels.attention(q, k, v)


def _causal_attention(q, k, v):
    return kernels.attention(q, k, v, mask=masks.Causal())


def _window_attention(q, k, v):
    return kernels.attention(q, k, v, mask=masks.Window(511, 0))


def tuned(name: str, chip: str, limit: float) -> Iterator[table.Entry]:
    """What is found, with a line of how."""
    function, operands = dict(problems())[name]
    with tempfile.TemporaryDirectory() as folder, config.override(cache_dir=folder):
        run = pl.autotune(function, target=chip, limit=limit, progress=False)
        found = run(*operands)
        again = run(*operands)
    for site, second in zip(found.sites, again.sites, strict=True):
        entry = site.entry
        print(
            f"{chip} {name}: {site.compiled} of {site.considered} compiled, "
            f"{entry.seconds:,.0f} cycles with {entry.config}, "
            f"{entry.default_seconds:,.0f} by default, then {second.compiled} compiled",
            file=sys.stderr,
            flush=True,
        )
        yield entry


def in_a_process(name: str, chip: str, limit: float) -> list[table.Entry]:
    command = [sys.executable, __file__, name, "--chip", chip, "--print"]
    command += ["--limit", str(limit)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return [table.Entry.from_json(json.loads(x)) for x in done.stdout.splitlines()]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems; default: all")
    parser.add_argument("--chip", action="append", choices=CHIPS)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per kernel")
    parser.add_argument("--output", type=Path, default=table.SHIPPED)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--print", action="store_true", help="entries, and no files")
    options = parser.parse_args(argv)
    names = [n for n, _ in problems() if not options.names or n in options.names]
    chips = options.chip or CHIPS
    if options.list:
        print(*names, sep="\n")
        return
    if options.print:
        for entry in (
            e for n in names for c in chips for e in tuned(n, c, options.limit)
        ):
            print(json.dumps(entry.to_json()), flush=True)
        return
    work = [(name, chip, options.limit) for name in names for chip in chips]
    if options.processes:
        with ThreadPoolExecutor(options.processes) as pool:
            found = list(pool.map(lambda each: in_a_process(*each), work))
    else:
        found = [list(tuned(*each)) for each in work]
    entries = [entry for some in found for entry in some]
    for chip in chips:
        own = [entry for entry in entries if entry.chip == chip]
        if own:
            write(own, options.output / f"{chip}.json")


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
