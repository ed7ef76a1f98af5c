"""Makes the tables of configurations that come with the package.

Each problem is an operation of `pallasite.kernels` at shapes that models have. For TPUs
it is tuned by libtpu's estimates (no TPU is needed), and results are checked where JAX
runs; for a GPU on that GPU, which nothing else should use meanwhile: problems are
compiled side by side and measured one by one.

    python benchmarks/tune_tables.py                        # all TPUs, in this process
    python benchmarks/tune_tables.py --chip h200 --processes 14 --seconds 140
    python benchmarks/tune_tables.py --chip v6e attention   # those of such names
    python benchmarks/tune_tables.py --processes 16         # that many at once
    python benchmarks/tune_tables.py --list                 # what there is

A table of each chip goes to `pallasite/tune/tables`, or to the folder that `--output`
names; entries for other problems stay. A kernel of which no entry gains 2 percent over
the default is left out: calls of near shapes take an entry too, and defaults know
shapes.
"""

import argparse
import json
import math
import os
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
import numpy as np
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
        yield f"attention {length}", (attention, heads)
        yield f"causal attention {length}", (causal_attention, heads)
        yield f"window attention {length}", (_window_attention, heads)
    heads = [Shape((1, 2048, 8, 64), BF16)] * 3
    yield "attention 2048 x 64", (attention, heads)
    yield "causal attention 2048 x 64", (causal_attention, heads)
    heads = [Shape((1, 2048, 4, WIDTH), BF16)] * 3
    yield "attention gradient", (_gradient(attention), heads)
    yield "causal attention gradient", (_gradient(causal_attention), heads)
    for rows in (16, 256):
        operands = [Shape((rows, 4096), BF16), Shape((4096, 14336), BF16)]
        yield f"matmul of {rows} rows", (kernels.matmul, operands)
    matrix = Shape((4096, 2048), BF16), Shape((2048, 8192), BF16)
    yield "gated matmul", (_gated_matmul, [matrix[0], matrix[1], matrix[1]])
    for bits in (4, 8):
        for rows in (16, 256):
            yield (
                f"weight_only_matmul {bits} bits, {rows} rows",
                (_weight_only(bits), _quantised(bits, rows, 4096)),
            )
    tokens = Shape((4096, 2048), BF16), Shape((4096,), jnp.int32)
    yield (
        "cross entropy gradient",
        (_loss_gradient, [*tokens, Shape((2048, 32768), BF16)]),
    )
    for width in (2048, 8192):
        yield from _of_rows(8192, width)
    yield from _of_sequences(2)


def gpu_problems() -> Iterator[tuple[str, Problem]]:
    """Several shapes of each kernel: an entry serves what is at most a factor away.

    Of a size at which a kernel takes longer than a host takes to start it. What takes
    longest to tune comes first.
    """
    tokens = Shape((8192, 2048), BF16), Shape((8192,), jnp.int32)
    yield (
        "cross entropy gradient",
        (_loss_gradient, [*tokens, Shape((2048, 32768), BF16)]),
    )
    heads = [Shape((2, 4096, 16, WIDTH), BF16)] * 3
    yield "attention gradient", (_gradient(attention), heads)
    yield "causal attention gradient", (_gradient(causal_attention), heads)
    for rows in (16, 64):
        wide, few = Shape((16384, 16384), BF16), Shape((rows, 16384), BF16)
        yield f"matmul of {rows} rows", (kernels.matmul, [few, wide])
    for batch in (64, 16, 4):
        yield f"paged_attention {batch}", (_paged_attention, _paged(batch, 8192))
    for batch in (64, 8):
        cache = [Shape((batch, 8192, 8, WIDTH), BF16)] * 2
        query = Shape((batch, 32, WIDTH), BF16)
        yield f"decode_attention {batch}", (_decode_attention, [query, *cache])
    for length, number, width in ((4096, 32, 128), (4096, 32, 64), (16384, 8, 128)):
        heads = [Shape((1, length, number, width), BF16)] * 3
        of = f"{length} x {width}"
        yield f"attention {of}", (attention, heads)
        yield f"causal attention {of}", (causal_attention, heads)
        yield f"window attention {of}", (_window_attention, heads)
    for m, k, n in ((4096, 4096, 4096), (8192, 8192, 2048), (1024, 4096, 14336)):
        yield (
            f"matmul {m} x {k} x {n}",
            (kernels.matmul, [Shape((m, k), BF16), Shape((k, n), BF16)]),
        )
    matrix = Shape((2048, 4096), BF16), Shape((4096, 14336), BF16)
    yield "gated matmul", (_gated_matmul, [matrix[0], matrix[1], matrix[1]])
    for groups in (8, 64):
        grouped = [Shape((8192, 2048), BF16), Shape((groups, 2048, 4096), BF16)]
        yield f"grouped_matmul {groups}", (_grouped_matmul, grouped)
    for bits in (4, 8):
        for rows in (16, 64):
            yield (
                f"weight_only_matmul {bits} bits, {rows} rows",
                (_weight_only(bits), _quantised(bits, rows, 16384)),
            )
    fp8, scales = jnp.float8_e4m3fn, jnp.float32
    yield (
        "block_scaled_matmul",
        (
            kernels.block_scaled_matmul,
            [
                *[Shape((4096, 4096), fp8)] * 2,
                Shape((4096, 32), scales),
                Shape((32, 32), scales),
            ],
        ),
    )
    for number, width in ((32768, 2048), (8192, 8192)):
        yield from _of_rows(number, width)
    yield from _of_sequences(8)


def _of_rows(number: int, width: int) -> Iterator[tuple[str, Problem]]:
    rows, weights = Shape((number, width), BF16), Shape((width,), BF16)
    yield f"rms_norm {width}", (kernels.rms_norm, [rows, weights])
    yield f"layer_norm {width}", (kernels.layer_norm, [rows, weights, weights])
    yield f"softmax {width}", (kernels.softmax, [rows])


def _of_sequences(batch: int) -> Iterator[tuple[str, Problem]]:
    lead = (batch, 4096)
    states = [Shape((*lead, 1, 128), BF16)] * 2
    scan = [Shape((*lead, 32, 64), BF16), Shape((*lead, 32), jnp.float32), *states]
    yield "state_space_scan", (decaying_scan, scan)
    like_x = Shape((*lead, 2048), BF16)
    yield "causal_conv1d", (kernels.causal_conv1d, [like_x, Shape((4, 2048), BF16)])


def _gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """A step of training: what is kept for the gradient is part of it."""

    def step(*operands):
        out, pull = jax.vjp(function, *operands)
        return out, pull(out)

    return step


def _loss_gradient(x, labels, weights):
    del labels  # made-up ones would all be the same
    labels = jax.random.randint(jax.random.key(1), x.shape[:1], 0, weights.shape[1])
    weights = weights * jnp.asarray(len(weights) ** -0.5, weights.dtype)
    loss = lambda x, w: kernels.linear_softmax_cross_entropy_loss(x, labels, w)
    return jax.value_and_grad(loss, (0, 1))(x, weights)


def _gated_matmul(x, y, gate):
    return kernels.matmul(x, y, gate=gate, activation="swish")


def _grouped_matmul(x, matrices):
    """Groups of uneven sizes."""
    share = np.random.default_rng(0).dirichlet(np.ones(len(matrices)))
    sizes = np.floor(share * len(x)).astype(np.int32)
    sizes[-1] += len(x) - sizes.sum()
    return kernels.grouped_matmul(x, matrices, jnp.asarray(sizes))


def _quantised(bits: Any, rows: int, side: int) -> list[Shape]:
    values = jax.eval_shape(
        lambda w: kernels.quantize_weights(w, bits=bits, group_size=128),
        Shape((side, side), BF16),
    )
    return [Shape((rows, side), BF16), values.values, values.scales]


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


def decaying_scan(x, log_decay, b, c):
    return kernels.state_space_scan(x, -jnp.abs(log_decay), b, c)


def _weight_only(bits: Any) -> Callable[..., Any]:
    def product(x, values, scales):
        weights = kernels.QuantizedWeights(values, scales, bits)
        return kernels.weight_only_matmul(x, weights)

    return product


def problems_of(chip: str) -> dict[str, Problem]:
    return dict(gpu_problems() if chip in GPUS else problems())


def attention(q, k, v):
    return kernels.attention(q, k, v)


def causal_attention(q, k, v):
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


def in_a_process(name: str, chip: str, limit: float, until: float) -> list[table.Entry]:
    """What is found until a time; a problem that is not done then has no entry."""
    left = until - time.perf_counter()
    if left <= 0:
        return []
    command = [sys.executable, __file__, name, "--chip", chip, "--print"]
    command += ["--limit", str(limit)]
    # A GPU's memory is for all processes.
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env=variables,
            timeout=None if left == math.inf else left,
        )
    except subprocess.TimeoutExpired:
        print(f"{chip} {name}: not done in time", file=sys.stderr, flush=True)
        return []
    return [table.Entry.from_json(json.loads(x)) for x in done.stdout.splitlines()]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems; default: all")
    parser.add_argument("--chip", action="append", choices=TPUS + GPUS)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all")
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
    until = time.perf_counter() + options.seconds
    if options.processes:
        with ThreadPoolExecutor(options.processes) as pool:
            found = list(
                pool.map(lambda w: in_a_process(w[0], w[1], w[2], until), work)
            )
    else:
        found = (list(tuned(*each, options.share)) for each in work)
    made: dict[str, list[table.Entry]] = {}
    for (_, chip, _), entries in zip(work, found, strict=False):
        made.setdefault(chip, []).extend(entries)
        if entries:
            write(made[chip], options.output / f"{chip}.json")
        if not options.processes and time.perf_counter() > until:
            break


def write(entries: Sequence[table.Entry], path: Path) -> None:
    """Adds entries to a table; one of another version is replaced.

    Those of a kernel with such options are left out together, if none of them gains:
    beside one that does, the others say at which shapes the default is best.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    everything = merged(entries, path)
    gains = {_group(e) for e in everything if e.seconds < GAIN * e.default_seconds}
    table.Table([e for e in everything if _group(e) in gains]).save(path)


def merged(entries: Sequence[table.Entry], path: Path) -> list[table.Entry]:
    """Entries and those of a file, if there is one, for other sites."""
    sites = {entry.site for entry in entries}
    known = table.load(path).entries if path.exists() else ()
    rest = [entry for entry in known if entry.site not in sites]
    return sorted((*rest, *entries), key=lambda entry: str(entry.site))


def _group(entry: table.Entry) -> tuple[str, Any]:
    return entry.site.kernel, entry.site.options


if __name__ == "__main__":
    main()
