"""Cotangents whose blocks memory names: programs of their own on a GPU."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff import backward
from pallasite.autodiff.explain_grad import chosen_plan, full_plan
from pallasite.backends import base
from pallasite.emulation.step_order import sorted_by
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.run import run as shared_passes
from pallasite.sites import calls_in
from pallasite.target import Machine, chip
from tests.backends.triton import harness
from tests.xla import pull_back, put

F32, BF16 = jnp.float32, jnp.bfloat16
TILES, ROWS, DEPTH, WIDTH, EXPERTS = 6, 4, 8, 5, 3


def grouped(which, x, w):
    """Tiles of rows, each times the matrix that a prefetched number names."""

    def kernel(which_ref, x_ref, w_ref, o_ref):
        product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)
        o_ref[...] = product.astype(o_ref.dtype)

    tiles, rows = which.shape[0], x.shape[0] // which.shape[0]
    _, depth, width = w.shape
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(tiles,),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, n: (i, 0)),
            pl.BlockSpec((None, depth, width), lambda i, n: (n[i], 0, 0)),
        ],
        out_specs=pl.BlockSpec((rows, width), lambda i, n: (i, 0)),
    )
    shape = jax.ShapeDtypeStruct((x.shape[0], width), x.dtype)
    return pl.pallas_call(kernel, shape, grid_spec=grid)(which, x, w)


def reference(which, x, w):
    rows = x.shape[0] // which.shape[0]
    chosen = w[jnp.clip(which, 0, w.shape[0] - 1)]
    tiles = x.reshape(which.shape[0], rows, -1)
    return jnp.einsum("trd,tdn->trn", tiles, chosen).reshape(x.shape[0], -1)


def pipelines(function, *structs):
    """The grids of backward kernels on an H200, with kernels, by name."""
    with config.override(target="gpu:h200"):
        (call,) = calls_in(function, *structs)
        steps = chosen_plan(call.kernel).steps
    return {s.kernel.name: (Pipeline.of(find_pipeline(s.kernel)), s) for s in steps}


def test_blocks_are_an_axis_of_the_grid():
    operands = [jax.ShapeDtypeStruct((256,), jnp.int32),
                jax.ShapeDtypeStruct((256 * 16, 256), BF16),
                jax.ShapeDtypeStruct((8, 256, 256), BF16)]  # fmt: skip
    pipeline, step = pipelines(grouped, *operands)["kernel_d_w"]
    assert (pipeline.grid, pipeline.semantics) == ((8,), ("parallel",))
    assert step.steps.sizes == (256,) and step.steps.typical == 32
    # Its sums are one block, not all of them, and stored as the operand's type.
    assert "f32[8,256,256]" not in step.kernel.text
    assert step.kernel.outputs[0].ref.dtype.name == "bf16"


def bag(index, weight, table, per=None):
    """Weighted sums of rows that indices name, a row in each step or iteration."""
    (b, k), (v, d) = index.shape, table.shape

    def of_row(index_ref, w_ref, row_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        @pl.when(index_ref[pl.program_id(0), pl.program_id(1)] < v)
        def _():
            o_ref[...] += row_ref[...] * w_ref[0, pl.program_id(1)]

    def of_table(index_ref, w_ref, table_ref, o_ref):
        def add(t, acc):
            at = index_ref[pl.program_id(0), t]
            row = table_ref[pl.ds(jnp.minimum(at, v - 1), 1), :]
            return acc + row * jnp.where(at < v, w_ref[0, t], 0)

        o_ref[...] = jax.lax.fori_loop(0, k, add, jnp.zeros((1, d), F32))

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(b,) if per else (b, k),
        in_specs=[
            pl.BlockSpec((1, k), lambda i, *_: (i, 0)),
            pl.BlockSpec((v, d), lambda i, _: (0, 0))
            if per
            else pl.BlockSpec((1, d), lambda i, t, index: (index[i, t], 0)),
        ],
        out_specs=pl.BlockSpec((1, d), lambda i, *_: (i, 0)),
    )
    shape = jax.ShapeDtypeStruct((b, d), table.dtype)
    kernel = of_table if per else of_row
    return pl.pallas_call(kernel, shape, grid_spec=grid)(index, weight, table)


@pytest.mark.parametrize("per", [None, "loop"])
def test_rows_of_a_table(per):
    """Odd shapes, repeated rows, rows that none names, rows that a guard skips."""
    rng = np.random.default_rng(0)
    index = put(rng.integers(0, 9, (5, 3)), jnp.int32).at[0].set(3).at[1, 1].set(100)
    weight, table = (
        put(rng.normal(size=(5, 3)), F32),
        put(rng.normal(size=(11, 7)), F32),
    )
    seed = put(rng.normal(size=(5, 7)), F32)

    def plain(weight, table):
        w = jnp.where(index < 11, weight, 0)
        return (table[jnp.minimum(index, 10)] * w[..., None]).sum(1)

    mine = lambda weight, table: bag(index, weight, table, per)
    want = pull_back(plain, (weight, table), seed)
    with config.override(target="gpu:h200"):
        got = pull_back(mine, (weight, table), seed)
        again = pull_back(mine, (weight, table), seed)
    for a, b, c in zip(got, want, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(a, c)
    structs = [jax.ShapeDtypeStruct((2048, 16), jnp.int32),
               jax.ShapeDtypeStruct((2048, 16), F32),
               jax.ShapeDtypeStruct((5000, 128), F32)]  # fmt: skip
    found = pipelines(lambda *operands: bag(*operands, per), *structs)
    counts = [
        prod(p.grid) for p, _ in found.values() if "sequential" not in p.semantics
    ]
    assert 5000 in counts
    (sorting,) = {step.steps for _, step in found.values() if step.steps}
    assert sorting.sizes == (2048, 16)


def test_steps_that_a_guard_skips_are_not_visited():
    blocks, order = sorted_by(jnp.array([2, 0, 3, 2, 0], jnp.int32), 3)
    assert [*map(int, blocks)] == [0, 2, 2, 4]
    assert [*map(int, order)][:4] == [1, 4, 0, 3]


@pytest.mark.parametrize("count, key", [(65535, "ui16"), (65536, "ui32")])
def test_numbers_are_sorted_by_unsigned_keys(count: int, key: str):
    """XLA has CUB sort pairs on a GPU, if their keys are."""
    numbers = jnp.array([count, 7, 0, count - 1, 7], jnp.int32)
    blocks, order = sorted_by(numbers, count)
    assert [*map(int, order)] == [2, 1, 4, 3, 0]
    assert [int(blocks[n]) for n in (0, 1, 7, 8, count - 1, count)] == [
        0,
        1,
        1,
        3,
        3,
        4,
    ]
    text = jax.jit(lambda x: sorted_by(x, count)).lower(numbers).as_text()
    assert f"(tensor<5x{key}>, tensor<5xi32>) -> (tensor<5x{key}>" in text


def shapes(dtype):
    return (((TILES,), jnp.int32), ((TILES * ROWS, DEPTH), dtype),
            ((EXPERTS, DEPTH, WIDTH), dtype))  # fmt: skip


def arrays(dtype):
    rng = np.random.default_rng(0)
    which = put(np.array([1, 0, 1, 7, -3, 1]), jnp.int32)  # outside: the nearest
    (_, x, w) = shapes(dtype)
    return which, put(rng.normal(size=x[0]), dtype), put(rng.normal(size=w[0]), dtype)


@pytest.mark.parametrize("most", [0, 100])  # the other way writes all addends
@pytest.mark.parametrize("dtype, tol", [(F32, 1e-5), (BF16, 2e-2)])
def test_gradient_of_chosen_matrices(dtype, tol, most, monkeypatch):
    monkeypatch.setattr(backward, "MOST_SCATTERED", most)
    backward.plan.cache_clear()
    which, x, w = arrays(dtype)
    seed = put(np.random.default_rng(1).normal(size=(TILES * ROWS, WIDTH)), dtype)
    want = pull_back(lambda x, w: reference(which, x, w), (x, w), seed)
    with config.override(target="gpu:h200"):
        got = pull_back(lambda x, w: grouped(which, x, w), (x, w), seed)
    for mine, theirs in zip(got, want, strict=True):
        mine, theirs = (np.asarray(v, np.float32) for v in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=tol, atol=tol * abs(theirs).max())


def test_triton_runs_it(monkeypatch):
    monkeypatch.setattr(backward, "MOST_SCATTERED", 0)
    backward.plan.cache_clear()
    which, x, w = arrays(F32)
    seed = (
        np.random.default_rng(1).normal(size=(TILES * ROWS, WIDTH)).astype(np.float32)
    )
    (call,) = calls_in(grouped, which, x, w)
    made = full_plan(call.kernel, machine=Machine.usual(chip("h200")))
    known = dict(zip(made.primals, (which, x, w), strict=True)) | {made.seeds[0]: seed}
    want = pull_back(lambda x, w: reference(which, x, w), (x, w), seed)
    for step in made.steps:
        if step.steps is not None:
            made_now = step.steps.arrays(known)
            known |= {ref: np.asarray(x) for ref, x in made_now.items()}
        operands = [known[ref] for ref in step.operands]
        found = harness.simulated(
            shared_passes(step.kernel), operands, chip=chip("h200")
        )
        known |= dict(zip(step.results, found, strict=True))
    for n, theirs in zip((1, 2), want, strict=True):
        np.testing.assert_allclose(known[made.targets[n]], theirs, rtol=1e-4, atol=1e-4)


def sparse_attention(table, count, q, k, v, rows=128):
    """A program has a block of queries, and the blocks of keys that a table names."""
    length, depth = q.shape

    def kernel(table_ref, count_ref, q_ref, k_ref, v_ref, o_ref):
        i = pl.program_id(0)

        def step(j, state):
            top, total, acc = state
            at = pl.ds(table_ref[i, j] * rows, rows)
            s = jnp.dot(q_ref[...], k_ref[at, :].T, preferred_element_type=F32)
            new = jnp.maximum(top, s.max(1, keepdims=True))
            p, scale = jnp.exp(s - new), jnp.exp(top - new)
            total = scale * total + p.sum(1, keepdims=True)
            p = p.astype(v_ref.dtype)
            added = jnp.dot(p, v_ref[at, :], preferred_element_type=F32)
            return new, total, acc * scale + added

        column = jnp.zeros((rows, 1), F32)
        start = column - 1e30, column, jnp.zeros((rows, depth), F32)
        used = lambda j: j < count_ref[i]
        either = lambda j, state: jax.lax.cond(
            used(j), lambda s: step(j, s), lambda s: s, state
        )
        _, total, acc = jax.lax.fori_loop(0, table.shape[1], either, start)
        o_ref[...] = (acc / total).astype(o_ref.dtype)

    own = pl.BlockSpec((rows, depth), lambda i, *_: (i, 0))
    whole = pl.BlockSpec((length, depth), lambda i, *_: (0, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(length // rows,),
        in_specs=[own, whole, whole],
        out_specs=own,
    )
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return pl.pallas_call(kernel, shape, grid_spec=grid)(table, count, q, k, v)


def test_rows_of_programs_are_those_of_sorted_steps():
    """Sums of two blocks of keys fit two warpgroups with steps of 64 queries; what has
    no order keeps programs of 128."""
    tile = jax.ShapeDtypeStruct((4096, 128), BF16)
    numbers = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((32, 32), (32,))]
    found = pipelines(sparse_attention, *numbers, tile, tile, tile)
    (sums,) = (step for name, (_, step) in found.items() if "d_k" in name)
    assert sums.steps is not None and "f32[64,128] = dot" in sums.kernel.text
    chosen = base.Compiled(
        base.get("cuda"), shared_passes(sums.kernel), base.Options(chip=chip("h200"))
    )
    assert "cuda.warpgroups=(1, 2)" in chosen.scheduled.text


@pytest.mark.parametrize("target", ["gpu:h200", "cpu"])
def test_gradient_of_blocks_from_a_table(target):
    rng, length = np.random.default_rng(0), 512
    q, k, v, seed = (put(rng.normal(size=(length, 16)) / 4, F32) for _ in range(4))
    table = put(
        np.array([[2, 0, 1, 0], [1, 3, 0, 0], [3, 0, 0, 0], [0] * 4]), jnp.int32
    )
    count = put(np.array([3, 2, 1, 1]), jnp.int32)

    def plain(q, k, v):
        blocks = jnp.arange(length) // 128
        used = jnp.arange(4) < count[:, None]
        allowed = (table[:, :, None] == jnp.arange(4)) & used[:, :, None]
        mask = allowed.any(1)[blocks][:, blocks]
        s = jnp.where(mask, jnp.dot(q, k.T, precision="highest"), -jnp.inf)
        return jnp.dot(jax.nn.softmax(s, -1), v, precision="highest")

    want = pull_back(plain, (q, k, v), seed)
    with config.override(target=target):
        got = pull_back(partial(sparse_attention, table, count), (q, k, v), seed)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_rows_of_what_programs_have_for_themselves():
    """A whole result is filled, and its rows are added to: the reverse has memory."""
    steps, rows, width = 6, 5, 4

    def kernel(s_ref, x_ref, o_ref):
        t = pl.program_id(0)

        @pl.when(t == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[s_ref[t], :] += x_ref[0, :]

    def function(table, x):
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[pl.BlockSpec((1, width), lambda t, s: (t, 0))],
            out_specs=pl.BlockSpec((rows, width), lambda t, s: (0, 0)),
        )
        shape = jax.ShapeDtypeStruct((rows, width), F32)
        return pl.pallas_call(kernel, shape, grid_spec=grid)(table, x)

    rng = np.random.default_rng(0)
    table, x = put([3, 0, 3, 1, 4, 0], jnp.int32), put(rng.normal(size=(6, 4)), F32)
    loss = lambda x: jnp.sin(function(table, x)).sum()
    want = jnp.cos(jax.ops.segment_sum(x, table, rows))[table]
    with config.override(target="gpu:h200"):
        np.testing.assert_allclose(jax.grad(loss)(x), want, rtol=1e-5)
