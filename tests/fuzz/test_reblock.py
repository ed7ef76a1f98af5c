"""Random kernels mean the same with any blocks that they may have instead."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from pallasite.errors import ResourceError
from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify
from pallasite.passes.analysis.loop_dims import LoopDim, loop_dims
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.choose_blocks import for_threads
from pallasite.passes.schedule.cut_steps import cut_steps
from pallasite.passes.schedule.gpu_blocks import for_gpu
from pallasite.passes.schedule.loop_over_k import loop_over_k
from pallasite.passes.schedule.reblock import cut, grow
from pallasite.passes.schedule.separate_uses import separate_uses
from pallasite.passes.schedule.tpu_blocks import for_tpu
from pallasite.passes.schedule.whole_arrays import WholeArrays, on_whole_arrays
from pallasite.passes.transform.batch import batch_kernel
from pallasite.target import GPUS, TPUS, Memory
from tests.fuzz.agreement import beyond_op_table, run_numpy, same
from tests.fuzz.blocks import block_kernel
from tests.fuzz.choices import Seeded, Stream, pick
from tests.fuzz.generate import Case
from tests.fuzz.test_passes import families, for_random_kernels
from tests.share import SHARE

Rewrite = Callable[[Kernel, LoopDim, Stream], Kernel]


def cut_somehow(kernel: Kernel, dim: LoopDim, choices) -> Kernel:
    parts = [n for n in range(1, dim.size + 1) if dim.size % n == 0]
    return cut(kernel, dim.windows[0], pick(choices, parts))


def grow_somehow(kernel: Kernel, dim: LoopDim, choices) -> Kernel:
    return grow(kernel, dim.windows[0], pick(choices, (2, 3, 4)))


def in_rounds_somehow(kernel: Kernel, dim: LoopDim, choices) -> Kernel:
    depths = [n for n in range(1, dim.size + 1) if dim.size % n == 0]
    return loop_over_k(kernel, dim.windows[0], pick(choices, depths))


def split_somehow(kernel: Kernel, dim: LoopDim, choices) -> Kernel:
    return cut_steps(kernel, pick(choices, (1, 2, 4)))


REWRITES = (cut_somehow, grow_somehow, in_rounds_somehow, split_somehow)


def rewritten(kernel: Kernel, rewrites, choices) -> Iterator[Kernel]:
    """The kernel with other blocks along each dimension that allows it."""
    found = loop_dims(kernel)
    for dim in found.dims if found is not None else ():
        for rewrite in rewrites:
            try:
                new = rewrite(kernel, dim, choices)
            except CannotReblock:
                continue
            verify(new)
            yield new


def check_blocks(case: Case, choices, rewrites=REWRITES) -> int:
    """Every rewrite, and one more of each result; gives how many there were."""
    wanted, count = run_numpy(case.kernel, case.arrays), 0
    for new in rewritten(case.kernel, rewrites, choices):
        both = [new, *list(rewritten(canonicalize(new), rewrites, choices))[:1]]
        for each in both:
            count += 1
            for got, want in zip(run_numpy(each, case.arrays), wanted, strict=True):
                # NaN is what programs read outside: unspecified.
                right = same(got, want) | np.isnan(want)
                assert right.all(), f"{got}\nnot {want}\n{case!r}\n{each.text}"
    return count


def test_kernels_over_rows_mean_the_same():
    """Most can be rewritten: else this would test nothing."""
    counts = []
    for seed in range(max(60 // SHARE, 20)):
        choices = Seeded(seed)
        counts.append(check_blocks(block_kernel(choices), choices))
    assert sum(n > 0 for n in counts) > len(counts) // 2, counts


TINY_GPU = replace(
    GPUS["h100"],
    memories={**GPUS["h100"].memories, "shared": Memory(512)},
    registers=64,
)
CHOICES = {
    "gpu": lambda kernel: for_gpu(kernel, TINY_GPU),
    "tpu": lambda kernel: for_tpu(kernel, TPUS["v5e"]),
    "threads": lambda kernel: for_threads(kernel, 64, lambda _: 1e9),
}


@pytest.mark.parametrize("chip", CHOICES)
def test_what_is_chosen_means_the_same(chip: str, monkeypatch):
    """For chips on which nothing fits, or nothing is large enough."""
    monkeypatch.setattr("pallasite.passes.schedule.choose_blocks.LEAST_ROWS", 1)
    monkeypatch.setattr("pallasite.passes.schedule.choose_blocks.LEAST_ROW", 1)
    monkeypatch.setattr("pallasite.passes.schedule.gpu_tiles.LEAST_ROW", 1)
    monkeypatch.setattr("pallasite.passes.schedule.gpu_blocks.LEAST_SIDE", 1)
    monkeypatch.setattr("pallasite.passes.schedule.gpu_tiles.TILE_ELEMENTS", 2)
    monkeypatch.setattr("pallasite.passes.schedule.gpu_tiles.GAIN_OF_PARTS", 1)
    changed = 0
    for seed in range(max(80 // SHARE, 40)):
        case = block_kernel(Seeded(seed))
        kernel = canonicalize(case.kernel) if seed % 2 else case.kernel
        try:
            new = CHOICES[chip](kernel)
        except ResourceError:
            continue
        verify(new)
        changed += new is not kernel
        wanted = run_numpy(case.kernel, case.arrays)
        for got, want in zip(run_numpy(new, case.arrays), wanted, strict=True):
            right = same(got, want) | np.isnan(want)
            assert right.all(), f"{got}\nnot {want}\n{case!r}\n{new.text}"
    assert changed > 5


@families
def test_other_kernels_mean_the_same(family: str):
    def check(case: Case, choices: Stream) -> None:
        apart = separate_uses(case.kernel)
        news = [] if apart is case.kernel else [apart]
        news += rewritten(apart, REWRITES, choices)
        runs = (run_numpy(new, case.arrays) for new in news)
        wrong = beyond_op_table(case, runs) if news else None
        texts = "\n".join(new.text for new in news)
        assert wrong is None, f"{wrong}\n{case!r}\n{texts}"

    for_random_kernels(family, check)


def run_whole(made: WholeArrays, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A kernel on whole arrays, by the numpy evaluator; batches in turn."""
    if made.sums is not None:
        maps = run_whole(replace(made, sums=None), arrays)
        return made.results(maps, run_numpy)
    if not made.batches:
        return run_numpy(made.kernel, arrays)
    (batch, *others), rest = made.batches, []
    for n in range(batch.size):
        one = [
            x if d is None else x.take(n, d)
            for x, d in zip(arrays, batch.inputs, strict=True)
        ]
        rest.append(run_whole(WholeArrays(made.kernel, tuple(others)), one))
    columns = zip(*rest, strict=True)
    return [np.stack(x, d) for x, d in zip(columns, batch.outputs, strict=True)]


def check_whole(kernel: Kernel, arrays: Sequence[np.ndarray]) -> int:
    made = on_whole_arrays(kernel)
    if isinstance(made, str):
        return 0
    verify(made.kernel)
    wanted = run_numpy(kernel, arrays)
    for got, want in zip(run_whole(made, arrays), wanted, strict=True):
        # A reduction of a row has another order; NaN is what programs read outside.
        near = np.isclose(*(x.astype(np.float64) for x in (got, want)), 1e-5, 1e-5)
        right = same(got, want) | np.isnan(want) | near
        assert right.all(), f"{got}\nnot {want}\n{kernel.text}\n{made.kernel.text}"
    return 1


def test_maps_of_blocks_mean_the_same_on_whole_arrays():
    counts = []
    for seed in range(max(120 // SHARE, 40)):
        case = block_kernel(Seeded(seed))
        counts.append(check_whole(case.kernel, case.arrays))
        batched = [np.stack([a, a + a]) for a in case.arrays]
        kernel = batch_kernel(case.kernel, [True] * len(batched), 2)
        counts.append(check_whole(kernel, batched))
    assert sum(counts) > 2, counts
