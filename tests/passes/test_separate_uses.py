"""A window for each way of using an operand: more can be split, with one meaning."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.nodes import Kernel
from pallasite.ir.roles import Pipeline
from pallasite.ir.verify import verify
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.loop_dims import loop_dims
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.choose_blocks import for_threads
from pallasite.passes.schedule.gpu_blocks import for_gpu
from pallasite.passes.schedule.reblock import cut
from pallasite.passes.schedule.separate_uses import separate_uses
from pallasite.sites import kernels_in
from pallasite.target import GPUS, Memory
from tests.fuzz.agreement import run_numpy


def kernel_of(function: Callable, *arrays: np.ndarray) -> Kernel:
    """Computes `function` of whole operands in one program."""

    def kernel(*refs):
        *operands, out = refs
        out[...] = function(*(ref[...] for ref in operands))

    out = jax.eval_shape(function, *arrays)
    (made,) = kernels_in(pl.pallas_call(kernel, out), *arrays)
    return canonicalize(made)


def windows_of(kernel: Kernel) -> list[tuple[int, ...]]:
    """The blocks of inputs."""
    windows = Pipeline.of(find_pipeline(kernel)).windows
    return [window.block_shape for window in windows if window.mode == "in"]


def free_sizes(kernel: Kernel) -> list[int]:
    found = loop_dims(kernel)
    assert found is not None and found.refused is None
    return [dim.size for dim in found.dims if found.why_not_free(dim) is None]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(-3, 4, shape).astype(np.float32)


# A function, its operands, how many windows it has afterwards and what can be split.
USES = {
    "pairs": (lambda x: x[:, None] * x[None, :], [numbers(12)], 2, [12, 12]),
    "counts": (lambda x: jnp.sum(x[:, None] == x, axis=1), [numbers(12)], 2, [12]),
    "distances": (
        lambda x: jnp.sum((x[:, None] - x[None]) ** 2, axis=-1),
        [numbers(12, 3)],
        2,
        [12, 12],
    ),
    "matmul": (lambda x: x @ x, [numbers(12, 12)], 2, [12, 12]),
    "transposed": (lambda x: x.T @ x, [numbers(8, 12)], 2, [12, 12]),
    "computed first": (
        lambda x: jnp.max(jnp.abs(2 * x)[:, None] - jnp.abs(2 * x), axis=1),
        [numbers(12)],
        2,
        [12],
    ),
    "used alike": (  # three uses, two ways
        lambda x: (x[:, None] - x[None, :]) * (x[:, None] + 1),
        [numbers(12)],
        2,
        [12, 12],
    ),
    "with another": (
        lambda x, y: x @ x.T + y,
        [numbers(12, 4), numbers(12)],
        3,
        [12, 12],
    ),
}


@pytest.mark.parametrize("name", USES)
def test_each_way_of_using_an_operand_has_a_window(name: str):
    function, arrays, count, free = USES[name]
    kernel = kernel_of(function, *arrays)
    assert len(free_sizes(kernel)) < len(free)
    made = separate_uses(kernel)
    verify(made)
    assert len(windows_of(made)) == count
    assert sorted(free_sizes(made)) == free
    for got, want in zip(
        run_numpy(made, arrays), run_numpy(kernel, arrays), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "function",
    [lambda x: x * x + x.sum(axis=1, keepdims=True), lambda x: x @ jnp.ones((8, 8))],
)
def test_kernels_without_such_uses_stay_as_they_are(function: Callable):
    kernel = kernel_of(function, numbers(8, 8))
    assert separate_uses(kernel) is kernel


@pytest.mark.parametrize("guards", [1, 2])
def test_small_operands_that_are_reduced_have_a_window_for_it(guards: int):
    def rows(ids, x):
        some = ids.max() > 3
        some &= ids.min() < 2 if guards == 2 else True
        return jnp.where(some, x * ids[:, None], 0.0)

    ids, x = numbers(12).astype(np.int32), numbers(12, 64)
    kernel = kernel_of(rows, ids, x)
    assert free_sizes(kernel) == [64]
    made = separate_uses(kernel)
    verify(made)
    assert windows_of(made) == [(12,), (12,), (12, 64)]
    assert free_sizes(made) == [12, 64]
    for split in (made, cut(made, (0, 0), 3)):
        np.testing.assert_array_equal(
            *(run_numpy(k, [ids, x])[0] for k in (split, kernel))
        )


def test_large_operands_that_are_reduced_keep_their_window():
    function = lambda x: x * jnp.sum(x, axis=0)
    kernel = kernel_of(function, numbers(12, 64))
    assert separate_uses(kernel) is kernel


def test_operands_that_are_written_keep_their_window():
    def kernel(x_ref, o_ref):
        x_ref[0] = 5.0
        o_ref[...] = x_ref[...][:, None] * x_ref[...]

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    (made,) = map(canonicalize, kernels_in(call, numbers(8)))
    assert len(windows_of(separate_uses(made))) == 1


def test_aliased_operands_keep_their_window():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] @ x_ref[...]

    out = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    call = pl.pallas_call(kernel, out, input_output_aliases={0: 0})
    (made,) = map(canonicalize, kernels_in(call, numbers(8, 8)))
    assert separate_uses(made) is made


def test_code_that_would_be_repeated_too_often_stays():
    def function(x):
        for _ in range(300):
            x = x * 0.5 + 1
        return x[:, None] * x[None, :]

    kernel = kernel_of(function, numbers(8))
    assert separate_uses(kernel) is kernel


def test_whole_blocks_fit_a_gpu():
    """Which they did not: 'a block needs more shared memory'."""
    kernel = kernel_of(lambda x: x.T @ x, numbers(300, 300))
    assert max(shape[1] for shape in windows_of(for_gpu(kernel, GPUS["h200"]))) < 300


# --- random functions of one operand ---

SMALL_GPU = replace(
    GPUS["h100"],
    memories={**GPUS["h100"].memories, "shared": Memory(512)},
    registers=64,
)
CHOICES = {
    "gpu": lambda kernel: for_gpu(kernel, SMALL_GPU),
    "threads": lambda kernel: for_threads(kernel, 64, lambda _: 1e9),
}


def random_function(draw: random.Random) -> Callable[[jax.Array], jax.Array]:
    """Of the rows of a matrix: all pairs of them, reduced or not."""
    before = [lambda x: x, lambda x: x * 2 + 1, lambda x: jnp.abs(x) - x]
    first, second = draw.choices(before, k=2)
    pairs: Sequence[Callable] = [
        lambda x: first(x)[:, None, 0] + second(x)[None, :, 0],
        lambda x: first(x) @ second(x).T,
        lambda x: jnp.max(first(x)[:, None] - second(x)[None], axis=-1),
        lambda x: jnp.where(first(x)[:, :1] > x[:, 0], x[:, 1:2], x[:, 0]),
        lambda x: jnp.einsum("ij,kj->ki", first(x), x),
    ]
    after: Sequence[Callable] = [
        lambda p, x: p,
        lambda p, x: p.sum(axis=1),
        lambda p, x: p.max(axis=0),
        lambda p, x: p @ x,
        lambda p, x: p * x[:, 0] - x[:, 1:2],
        lambda p, x: jnp.cumsum(p, axis=1),
    ]
    chosen, last = draw.choices(pairs, k=2), draw.choice(after)
    return lambda x: last(reduce(jnp.add, [pair(x) for pair in chosen]), x)


@pytest.mark.parametrize("chip", CHOICES)
def test_random_pairs_mean_the_same(chip: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pallasite.passes.schedule.choose_blocks.LEAST_ROWS", 1)
    monkeypatch.setattr("pallasite.passes.schedule.choose_blocks.LEAST_ROW", 1)
    monkeypatch.setattr("pallasite.passes.schedule.gpu_tiles.LEAST_ROW", 1)
    monkeypatch.setattr("pallasite.passes.schedule.gpu_tiles.TILE_ELEMENTS", 2)
    separated = 0
    for seed in range(40):
        draw = random.Random(seed)
        x = numbers(draw.choice([4, 6, 12]), draw.choice([2, 3, 4]))
        kernel = kernel_of(random_function(draw), x)
        made = separate_uses(kernel)
        chosen = CHOICES[chip](kernel)
        separated += len(windows_of(chosen)) > 1
        (want,) = run_numpy(kernel, [x])
        for each in (made, *all_cut(made), chosen):
            verify(each)
            (got,) = run_numpy(each, [x])
            np.testing.assert_array_equal(got, want, err_msg=each.text)
    assert separated > 20


def all_cut(kernel: Kernel) -> list[Kernel]:
    """The kernel with each dimension that can be split in two."""
    found, made = loop_dims(kernel), []
    for dim in found.dims if found is not None else ():
        try:
            made.append(cut(kernel, dim.windows[0], 2))
        except CannotReblock:
            continue
    return made
