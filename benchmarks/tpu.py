"""Kernels for TPUs against upstream Pallas: libtpu's estimates, without a TPU.

Each problem is one portable source, compiled by this package and by upstream as it is
written. The cycles are libtpu's own static estimate of a call (one TensorCore, copies
modelled, nothing measured). "flash by hand" is the attention kernel that upstream
tunes for TPUs: its cycles stand in place of those of the portable source. "library"
are all kernels that JAX ships for TPUs, unmodified, by both (`tpu_library.py`).
"operation" are those of `pallasite.kernels` beside that library (`tpu_operations.py`).

    python benchmarks/tpu.py                      # all problems, v5e, v6e and v5p
    python benchmarks/tpu.py matmul --chip v6e    # problems with this in their names
    python benchmarks/tpu.py --processes 16       # that many compilers at once
    python benchmarks/tpu.py --only ours          # upstream's numbers as they were
    python benchmarks/tpu.py --python PYTHON      # another Python that has libtpu

Numbers go to benchmarks/results/tpu.json, or where `--results` says; those that were
not run stay.
"""

import argparse
import functools
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape
from jax import lax

from benchmarks.tpu_library import CASES, jobs_in, lowering_for
from benchmarks.tpu_operations import Operation, operations
from pallasite import config
from pallasite.backends.base import Compiled, Options, get
from pallasite.passes.run import run as run_shared_passes
from pallasite.runtime.aot import Job, compile_all
from pallasite.sites import calls_in
from pallasite.target import TPUS

RESULTS = Path(__file__).parent / "results" / "tpu.json"
CHIPS = ("v5e", "v6e", "v5p")
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
MASKED = -1e30


class Pallas(NamedTuple):
    """One implementation: its names, and its names for TPUs."""

    pl: ModuleType
    tpu: ModuleType


@dataclass(frozen=True)
class Problem:
    """A portable source.

    Args:
        name: what is selected on the command line.
        make: the function, given an implementation.
        operands: what it is called with.
        rival: upstream's own function for the problem, where it is not this source.
    """

    name: str
    make: Callable[[Pallas], Callable]
    operands: Sequence[Shape]
    rival: Callable[[], Callable] | None = None


# --- the sources ---


def matmul(on: Pallas, block: int, n: int = 4096) -> Callable:
    pl = on.pl

    def kernel(x_ref, y_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=Shape((n, n), BF16),
        grid=(n // block,) * 3,
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        scratch_shapes=[on.tpu.VMEM((block, block), F32)],
    )


def absorb(q, k, v, refs, scale, mask=None) -> None:
    """One step of the running softmax, whose state is in scratch."""
    top_ref, total_ref, acc_ref = refs
    scores = lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=F32)
    scores *= scale
    if mask is not None:
        scores = jnp.where(mask(scores.shape), scores, MASKED)
    old, keep = top_ref[...], len(top_ref.shape) == 2
    top = jnp.maximum(old, scores.max(axis=-1, keepdims=keep))
    shrink, weights = jnp.exp(old - top), jnp.exp(scores - column(top))
    top_ref[...] = top
    total_ref[...] = shrink * total_ref[...] + weights.sum(axis=-1, keepdims=keep)
    product = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=F32)
    acc_ref[...] = column(shrink) * acc_ref[...] + product


def column(x):
    """One number per row, of shape (rows, 1)."""
    return x[:, None] if x.ndim == 1 else x


def begin(refs) -> None:
    top_ref, total_ref, acc_ref = refs
    top_ref[...] = jnp.full_like(top_ref, MASKED)
    total_ref[...] = jnp.zeros_like(total_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)


def finish(refs, o_ref) -> None:
    _, total_ref, acc_ref = refs
    o_ref[...] = (acc_ref[...] / column(total_ref[...])).astype(o_ref.dtype)


def softmax_state(on: Pallas, rows: int, width: int, rank: int = 2) -> list[Any]:
    each = (rows, 1)[:rank]
    return [on.tpu.VMEM(shape, F32) for shape in (each, each, (rows, width))]


HEADS, LENGTH, WIDTH = 8, 2048, 128


def flash(on: Pallas, block: int, causal: bool = False, rank: int = 2) -> Callable:
    """Attention; `rank`: 2 for statistics of shape (rows, 1), 1 for (rows,)."""
    pl = on.pl

    def kernel(q_ref, k_ref, v_ref, o_ref, *refs):
        i, j = pl.program_id(1), pl.program_id(2)

        def mask(shape):
            rows = i * block + lax.broadcasted_iota(I32, shape, 0)
            return rows >= j * block + lax.broadcasted_iota(I32, shape, 1)

        @pl.when(j == 0)
        def _():
            begin(refs)

        @pl.when(j <= i if causal else j >= 0)
        def _():
            scale = WIDTH**-0.5
            operands = q_ref[...], k_ref[...], v_ref[...]
            absorb(*operands, refs, scale, mask if causal else None)

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            finish(refs, o_ref)

    queries = pl.BlockSpec((None, block, WIDTH), lambda h, i, j: (h, i, 0))
    keys = pl.BlockSpec((None, block, WIDTH), lambda h, i, j: (h, j, 0))
    return pl.pallas_call(
        kernel,
        out_shape=Shape((HEADS, LENGTH, WIDTH), BF16),
        grid=(HEADS, LENGTH // block, LENGTH // block),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        scratch_shapes=softmax_state(on, block, WIDTH, rank),
    )


def flash_in_a_loop(on: Pallas, block: int) -> Callable:
    """Attention as one writes it for GPUs: keys in a loop, the state in values."""
    pl = on.pl

    def kernel(q_ref, k_ref, v_ref, o_ref):
        q = q_ref[...]

        def step(j, state):
            top, total, acc = state
            k, v = (ref[pl.ds(j * block, block), :] for ref in (k_ref, v_ref))
            dims = ((1,), (1,)), ((), ())
            scores = lax.dot_general(q, k, dims, preferred_element_type=F32)
            scores *= WIDTH**-0.5
            new = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
            shrink, weights = jnp.exp(top - new), jnp.exp(scores - new)
            total = shrink * total + weights.sum(axis=-1, keepdims=True)
            product = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=F32)
            return new, total, shrink * acc + product

        fill = lambda width, value: jnp.full((block, width), value, F32)
        state = fill(1, MASKED), fill(1, 0.0), fill(WIDTH, 0.0)
        _, total, acc = lax.fori_loop(0, LENGTH // block, step, state)
        o_ref[...] = (acc / total).astype(o_ref.dtype)

    queries = pl.BlockSpec((None, block, WIDTH), lambda h, i: (h, i, 0))
    keys = pl.BlockSpec((None, LENGTH, WIDTH), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=Shape((HEADS, LENGTH, WIDTH), BF16),
        grid=(HEADS, LENGTH // block),
        in_specs=[queries, keys, keys],
        out_specs=queries,
    )


def flash_by_hand(causal: bool) -> Callable:
    rival = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
    sizes = rival.BlockSizes(block_q=512, block_k_major=512, block_k=512, block_b=1)

    def run(q, k, v):
        call = functools.partial(
            rival.flash_attention, causal=causal, block_sizes=sizes
        )
        return call(q[None], k[None], v[None], sm_scale=WIDTH**-0.5)

    return run


def softmax(on: Pallas, rows: int, n: int = 8192, width: int = 2048) -> Callable:
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        weights = jnp.exp(x - x.max(axis=-1, keepdims=True))
        o_ref[...] = weights / weights.sum(axis=-1, keepdims=True)

    spec = on.pl.BlockSpec((rows, width), lambda i: (i, 0))
    return on.pl.pallas_call(
        kernel,
        out_shape=Shape((n, width), F32),
        grid=(n // rows,),
        in_specs=[spec],
        out_specs=spec,
    )


def layer_norm(on: Pallas, rows: int, n: int = 8192, width: int = 2048) -> Callable:
    def kernel(x_ref, scale_ref, shift_ref, o_ref):
        x = x_ref[...].astype(F32)
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = lax.rsqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-6)
        scaled = centred * deviation * scale_ref[...] + shift_ref[...]
        o_ref[...] = scaled.astype(o_ref.dtype)

    spec = on.pl.BlockSpec((rows, width), lambda i: (i, 0))
    vector = on.pl.BlockSpec((1, width), lambda i: (0, 0))
    return on.pl.pallas_call(
        kernel,
        out_shape=Shape((n, width), BF16),
        grid=(n // rows,),
        in_specs=[spec, vector, vector],
        out_specs=spec,
    )


def grouped(on: Pallas, rows: int, columns: int, depth: int) -> Callable:
    """Tiles of rows, each of which belongs to one group with its own weights."""
    pl, (n, k, m) = on.pl, (4096, 2048, 2048)

    def kernel(group_ref, x_ref, w_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=Shape((n, m), BF16),
        grid_spec=on.tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(n // rows, m // columns, k // depth),
            in_specs=[
                pl.BlockSpec((rows, depth), lambda i, j, k, groups: (i, k)),
                pl.BlockSpec(
                    (None, depth, columns), lambda i, j, k, groups: (groups[i], k, j)
                ),
            ],
            out_specs=pl.BlockSpec((rows, columns), lambda i, j, k, groups: (i, j)),
            scratch_shapes=[on.tpu.VMEM((rows, columns), F32)],
        ),
    )


def paged_decode(on: Pallas, page: int, pages: int) -> Callable:
    """One new token for each of 8 sequences; keys and values in pages of a pool."""
    pl, sequences, heads, group = on.pl, 8, 4, 8

    def kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, *refs):
        number = pl.program_id(2)
        length = lengths_ref[pl.program_id(0)]

        def mask(shape):
            return number * page + lax.broadcasted_iota(I32, shape, 1) < length

        @pl.when(number == 0)
        def _():
            begin(refs)

        @pl.when(number * page < length)
        def _():
            scale = WIDTH**-0.5
            absorb(q_ref[...], k_ref[...], v_ref[...], refs, scale, mask)

        @pl.when(number == pl.num_programs(2) - 1)
        def _():
            finish(refs, o_ref)

    queries = pl.BlockSpec((None, None, group, WIDTH), lambda b, h, p, *_: (b, h, 0, 0))
    keys = pl.BlockSpec(
        (None, None, page, WIDTH),
        lambda b, h, p, lengths, table: (table[b, p], h, 0, 0),
    )
    return pl.pallas_call(
        kernel,
        out_shape=Shape((sequences, heads, group, WIDTH), BF16),
        grid_spec=on.tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(sequences, heads, pages),
            in_specs=[queries, keys, keys],
            out_specs=queries,
            scratch_shapes=softmax_state(on, group, WIDTH),
        ),
    )


def stencil(on: Pallas, rows: int, n: int = 4096, width: int = 2048) -> Callable:
    """Second differences: the block above, this one and the one below."""
    pl, last = on.pl, n // rows - 1

    def kernel(above_ref, here_ref, below_ref, o_ref):
        i = pl.program_id(0)
        above = jnp.where(i > 0, above_ref[rows - 1 :, :], 0.0)
        below = jnp.where(i < last, below_ref[:1, :], 0.0)
        x = here_ref[...]
        up = jnp.concatenate([above, x[:-1]], axis=0)
        down = jnp.concatenate([x[1:], below], axis=0)
        o_ref[...] = up - 2.0 * x + down

    specs = [
        pl.BlockSpec((rows, width), lambda i: (jnp.maximum(i - 1, 0), 0)),
        pl.BlockSpec((rows, width), lambda i: (i, 0)),
        pl.BlockSpec((rows, width), lambda i: (jnp.minimum(i + 1, last), 0)),
    ]
    call = pl.pallas_call(
        kernel,
        out_shape=Shape((n, width), F32),
        grid=(n // rows,),
        in_specs=specs,
        out_specs=specs[1],
    )
    return lambda x: call(x, x, x)


def problems() -> Iterator[Problem]:
    for n in (2048, 4096):
        square = Shape((n, n), BF16)
        for block in (128, 256, 512):
            make = functools.partial(matmul, block=block, n=n)
            yield Problem(f"matmul {n}, blocks of {block}", make, (square, square))
    head = Shape((HEADS, LENGTH, WIDTH), BF16)
    for block in (128, 256, 512):
        for causal in (False, True):
            make = functools.partial(flash, block=block, causal=causal)
            name = f"flash{' causal' * causal}, blocks of {block}"
            yield Problem(name, make, (head,) * 3)
        make = functools.partial(flash_in_a_loop, block=block)
        yield Problem(f"flash in a loop, blocks of {block}", make, (head,) * 3)
    make = functools.partial(flash, block=512, rank=1)
    yield Problem("flash with statistics of rank 1", make, (head,) * 3)
    for causal in (False, True):
        make = functools.partial(flash, block=512, causal=causal)
        hand = functools.partial(flash_by_hand, causal)
        name = f"flash{' causal' * causal} by hand"
        yield Problem(name, make, (head,) * 3, hand)
    for rows in (8, 256):
        make = functools.partial(softmax, rows=rows)
        yield Problem(f"softmax, {rows} rows", make, (Shape((8192, 2048), F32),))
    vector = Shape((1, 2048), F32)
    for rows in (8, 256):
        make = functools.partial(layer_norm, rows=rows)
        operands = Shape((8192, 2048), BF16), vector, vector
        yield Problem(f"layer norm, {rows} rows", make, operands)
    for block in (128, 512):
        make = functools.partial(grouped, rows=128, columns=block, depth=block)
        operands = (
            Shape((4096 // 128,), I32),
            Shape((4096, 2048), BF16),
            Shape((8, 2048, 2048), BF16),
        )
        yield Problem(f"grouped matmul, blocks of {block}", make, operands)
    for page in (16, 128):
        pages = 2048 // page
        pool = Shape((8 * pages, 4, page, WIDTH), BF16)
        operands = (
            Shape((8,), I32),
            Shape((8, pages), I32),
            Shape((8, 4, 8, WIDTH), BF16),
            pool,
            pool,
        )
        make = functools.partial(paged_decode, page=page, pages=pages)
        yield Problem(f"paged decode, pages of {page}", make, operands)
    for rows in (8, 128):
        make = functools.partial(stencil, rows=rows)
        yield Problem(f"stencil, {rows} rows", make, (Shape((4096, 2048), F32),))


# --- what libtpu compiles ---


def our_jobs(problem: Problem | Operation, chip: str) -> Iterator[Job]:
    if isinstance(problem, Operation):
        function, operands = problem.ours()
    else:
        pl = importlib.import_module("pallasite")
        tpu = importlib.import_module("pallasite.tpu")
        function, operands = problem.make(Pallas(pl, tpu)), problem.operands
    with config.override(target=chip):
        calls = calls_in(function, *operands)
    backend = get("tpu")
    for call in calls:
        kernel = run_shared_passes(call.kernel)
        options = Options(chip=TPUS[chip])
        launch = backend.launch(Compiled(backend, kernel, options, shared=()))
        yield Job.of(problem.name, kernel, launch)


def upstream_jobs(problem: Problem | Operation, chip: str) -> Iterator[Job]:
    if isinstance(problem, Operation):
        function, operands = problem.rival()
        with lowering_for(chip):
            yield from list(jobs_in(function, operands))
        return
    if problem.rival is not None:
        function = problem.rival()
    else:
        pl = importlib.import_module("jax.experimental.pallas")
        tpu = importlib.import_module("jax.experimental.pallas.tpu")
        function = problem.make(Pallas(pl, tpu))
    yield from jobs_in(function, problem.operands)


def library_jobs(names: Sequence[str], who: str, chip: str) -> Iterator[Job]:
    """Calls of the kernels that JAX ships, by one of the two backends."""
    script = Path(__file__).with_name("tpu_library.py")
    command = [sys.executable, str(script), who, chip, *names]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for line in made.stdout.splitlines():
        yield Job(**json.loads(line))


# --- numbers ---

NO_ESTIMATE = "compiled, but libtpu has no estimate"


class Work(NamedTuple):
    """What one contender runs for a problem on a chip: calls, whose cycles add up."""

    chip: str
    who: str
    name: str
    jobs: Sequence[Job]


def measured(work: Work, timeout: float) -> int | None:
    """Estimated cycles of the calls; None, with the reason printed, if one has none."""
    total = 0
    for result in compile_all(work.jobs, work.chip, cycles=True, timeout=timeout):
        error = result.error if not result.ok else "" if result.cycles else NO_ESTIMATE
        if error or result.cycles is None:
            print(f"{work.name}, {work.who}, {work.chip}: {error[:600]}", flush=True)
            return None
        total += result.cycles
    return total


def work_of(
    chosen: Sequence[Problem | Operation],
    library: Sequence[str],
    who: Sequence[str],
    chip: str,
) -> Iterator[Work]:
    makers = {"ours": our_jobs, "upstream": upstream_jobs}
    for problem in chosen:
        for name in who:
            try:
                yield Work(chip, name, problem.name, list(makers[name](problem, chip)))
            except Exception as error:
                text = str(error).strip() or repr(error)
                print(f"{problem.name}, {name}, {chip}: {text[:600]}", flush=True)
    for name in who:
        for job in library_jobs(library, name, chip) if library else ():
            yield Work(chip, name, job.name, [job])


def shown(cycles: dict[str, dict[str, Any]]) -> None:
    width = max(map(len, cycles), default=0)
    print(f"{''.ljust(width)}  {'ours':>12}  {'upstream':>12}  ratio")
    ratios = []
    for name, row in cycles.items():
        ours, upstream = row.get("ours"), row.get("upstream")
        cells = [f"{n:,}" if n else "-" for n in (ours, upstream)]
        ratio = ""
        if ours and upstream:
            ratio = f"{ours / upstream:5.3f}"
            ratios.append(ours / upstream)
        print(f"{name.ljust(width)}  {cells[0]:>12}  {cells[1]:>12}  {ratio}")
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean {mean:.3f}, largest {max(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--chip", action="append", choices=CHIPS)
    parser.add_argument("--only", choices=("ours", "upstream"))
    parser.add_argument("--python", help="the one that has libtpu", default="")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=3000, help="seconds for each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = arguments.results
    wanted = lambda name: not arguments.names or any(n in name for n in arguments.names)
    every = (*problems(), *operations())
    chosen = [problem for problem in every if wanted(problem.name)]
    library = [name for name in CASES if wanted(name)]
    who = (arguments.only,) if arguments.only else ("ours", "upstream")
    chips = arguments.chip or CHIPS
    work = [each for chip in chips for each in work_of(chosen, library, who, chip)]
    sys.executable = arguments.python or sys.executable
    stored = json.loads(results.read_text()) if results.exists() else {}
    stored["versions"] = {n: metadata.version(n) for n in ("jax", "jaxlib")}
    stored["date"] = datetime.now(UTC).date().isoformat()
    same: dict[
        tuple[str, str], list[Work]
    ] = {}  # of several blocks often one kernel is made
    for each in work:
        calls = json.dumps([asdict(replace(job, name="")) for job in each.jobs])
        same.setdefault((each.chip, calls), []).append(each)
    with ThreadPoolExecutor(arguments.processes) as pool:
        limit = arguments.timeout
        started = {pool.submit(measured, w[0], limit): w for w in same.values()}
        for future in as_completed(started):
            for done in started[future] if future.result() is not None else ():
                rows = stored.setdefault("cycles", {}).setdefault(done.chip, {})
                rows.setdefault(done.name, {})[done.who] = future.result()
            results.write_text(json.dumps(stored, indent=1) + "\n")
    for chip in chips:
        rows = stored.get("cycles", {}).get(chip, {})
        print(f"--- {chip}, estimated cycles")
        shown({name: row for name, row in rows.items() if wanted(name)})


if __name__ == "__main__":
    main()
