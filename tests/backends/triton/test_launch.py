"""Warps, stages and program order: what the cost model chooses, as text."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from benchmarks import gpu
from pallasite import tpu as pltpu
from pallasite.autodiff.explain_grad import full_plan
from pallasite.backends import base, triton
from pallasite.backends.triton import PASSES
from pallasite.backends.triton.launch import (
    GROUP,
    STAGES,
    WARPS,
    Need,
    chosen_warps,
    schedule_launch,
)
from pallasite.backends.triton.shared_memory import SharedMemory
from pallasite.errors import ChipMemoryError, ResourceError
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Value, walk
from pallasite.ir.types import F32, RefType, TileType
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.run import run as run_passes
from pallasite.sites import kernels_in
from pallasite.target import GPUS, Machine
from tests.backends.gpu_trial import TRIALS
from tests.backends.triton.harness import compiled, simulated

H200 = GPUS["h200"]


def notes(function, *operands, chip=H200, **params):
    """What is noted on the grid of the function's only kernel, in its own blocks."""
    (kernel,) = kernels_in(function, *operands)
    scheduled = run_passes(run_passes(kernel), PASSES)
    return dict(find_pipeline(schedule_launch(scheduled, params, chip)).attrs)


def warps_and_stages(function, *operands, **how):
    found = notes(function, *operands, **how)
    return found[WARPS], found[STAGES]


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


# --- matrix products ---


def matmul(m, n, k):
    """Accumulates along the third grid axis into scratch."""

    def kernel(x_ref, y_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(
            x_ref[...], y_ref[...], preferred_element_type=jnp.float32
        )

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def call(x, y):
        (rows, depth), columns = x.shape, y.shape[1]
        return pl.pallas_call(
            kernel,
            out_shape=shape(rows, columns, dtype=x.dtype),
            grid=(pl.cdiv(rows, m), pl.cdiv(columns, n), pl.cdiv(depth, k)),
            in_specs=[
                pl.BlockSpec((m, k), lambda i, j, k: (i, k)),
                pl.BlockSpec((k, n), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((m, n), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)],
        )(x, y)

    return call


LARGE = shape(8192, 8192)


@pytest.mark.parametrize(
    ("blocks", "want"),
    [
        ((128, 256, 64), (8, 4)),
        ((256, 128, 64), (8, 4)),
        ((128, 128, 64), (8, 3)),  # two programs share a multiprocessor
        ((64, 64, 64), (4, 3)),
        ((256, 256, 32), (16, 4)),  # 256 registers per thread would be too many
        ((32, 32, 32), (4, 4)),
    ],
    ids=str,
)
def test_matmul(blocks, want):
    assert warps_and_stages(matmul(*blocks), LARGE, LARGE) == want


def test_fewer_stages_where_less_shared_memory_is():
    blocks = matmul(128, 256, 64)
    assert warps_and_stages(blocks, LARGE, LARGE, chip=GPUS["a100"]) == (8, 3)


def test_operands_beyond_shared_memory_are_refused_with_numbers():
    with pytest.raises(ResourceError) as refusal:
        notes(matmul(512, 512, 512), LARGE, LARGE)
    text = str(refusal.value)
    assert "1048576 bytes" in text and "h200" in text and "smaller blocks" in text


def test_what_the_author_gives_is_taken():
    found = warps_and_stages(
        matmul(128, 256, 64), LARGE, LARGE, num_warps=4, num_stages=2
    )
    assert found == (4, 2)


# --- attention ---


def attention(block_q, block_k):
    def kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        scores = jnp.dot(q_ref[0], k_ref[0].T, preferred_element_type=jnp.float32)
        m = jnp.maximum(m_ref[...], scores.max(1, keepdims=True))
        p, alpha = jnp.exp(scores - m), jnp.exp(m_ref[...] - m)
        l_ref[...] = alpha * l_ref[...] + p.sum(1, keepdims=True)
        acc_ref[...] = alpha * acc_ref[...] + jnp.dot(
            p.astype(v_ref.dtype), v_ref[0], preferred_element_type=jnp.float32
        )
        m_ref[...] = m

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            o_ref[0] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)

    def call(q, k, v):
        heads, length, depth = q.shape
        row = pl.BlockSpec((1, block_q, depth), lambda h, i, j: (h, i, 0))
        column = pl.BlockSpec((1, block_k, depth), lambda h, i, j: (h, j, 0))
        return pl.pallas_call(
            kernel,
            out_shape=shape(*q.shape, dtype=q.dtype),
            grid=(heads, length // block_q, length // block_k),
            in_specs=[row, column, column],
            out_specs=row,
            scratch_shapes=[
                pltpu.VMEM((block_q, 1), jnp.float32),
                pltpu.VMEM((block_q, 1), jnp.float32),
                pltpu.VMEM((block_q, depth), jnp.float32),
            ],
        )(q, k, v)

    return call


@pytest.mark.parametrize(
    ("blocks", "want"), [((128, 128), (8, 3)), ((64, 64), (4, 3))], ids=str
)
def test_attention(blocks, want):
    heads = shape(64, 4096, 128)
    found = notes(attention(*blocks), heads, heads, heads)
    assert (found[WARPS], found[STAGES]) == want
    assert GROUP not in found  # programs of one head follow one another already


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("maker", [gpu.grid_attention, gpu.loop_attention])
def test_masks_of_attention_take_no_registers(maker, causal):
    """Row and column numbers are spread over a tile: equal elements are one."""
    heads = shape(64, 4096, 128)
    for blocks, want in (((128, 128), 8), ((64, 64), 4)):
        call = maker(blocks, causal)
        assert warps_and_stages(call, heads, heads, heads)[0] == want


# --- rows ---


def softmax(x):
    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        e = jnp.exp(x - x.max(-1, keepdims=True))
        o_ref[...] = (e / e.sum(-1, keepdims=True)).astype(o_ref.dtype)

    row = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=shape(*x.shape),
        grid=x.shape[0],
        in_specs=[row],
        out_specs=row,
    )(x)


def copy(block):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def call(x):
        part = pl.BlockSpec((block,), lambda i: (i,))
        return pl.pallas_call(
            kernel,
            out_shape=shape(*x.shape, dtype=x.dtype),
            grid=pl.cdiv(x.size, block),
            in_specs=[part],
            out_specs=part,
        )(x)

    return call


@pytest.mark.parametrize(
    ("columns", "want"), [(1024, 4), (8192, 4), (32768, 16), (256, 1)]
)
def test_rows_get_as_many_warps_as_their_registers_need(columns, want):
    assert warps_and_stages(softmax, shape(4096, columns)) == (want, 1)


@pytest.mark.parametrize(
    ("block", "dtype", "want"),
    [(128, "float32", 1), (128, "int8", 1), (512, "float32", 4), (4096, "int8", 4)],
)
def test_every_thread_loads_sixteen_bytes(block, dtype, want):
    assert warps_and_stages(copy(block), shape(1 << 20, dtype=dtype)) == (want, 1)


def test_backward_of_softmax_keeps_its_tiles_in_registers():
    backward = lambda x, g: jax.vjp(softmax, x)[1](g)[0]
    x = shape(16384, 8192)
    kernel = kernels_in(backward, x, x)[-1]
    made = base.Compiled(base.get("triton"), kernel, base.Options(chip=H200))
    assert find_pipeline(made.scheduled).attrs[WARPS] == 8  # with 4 they would spill


# --- loops that stream ---


def column_sums(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].astype(jnp.float32).sum(0, keepdims=True)

    rows, columns = x.shape
    return pl.pallas_call(
        kernel,
        out_shape=shape(1, columns, dtype=jnp.float32),
        grid=(columns // 128, rows // 8),
        in_specs=[pl.BlockSpec((8, 128), lambda j, i: (i, j))],
        out_specs=pl.BlockSpec((1, 128), lambda j, i: (0, j)),
    )(x)


def test_a_loop_that_streams_memory_loads_ahead():
    (kernel,) = kernels_in(column_sums, shape(64, 256))
    text, launch = compiled(kernel)
    assert "} {tt.num_stages = 3 : i32}" in text
    assert launch.config["num_stages"] == 1  # of products, which there are none
    text, _ = compiled(kernel, num_stages=1)
    assert "tt.num_stages" not in text
    x = np.arange(64 * 256, dtype=np.float32).reshape(64, 256).astype(jnp.bfloat16)
    want = x.astype(np.float32).sum(0, keepdims=True)
    np.testing.assert_allclose(simulated(kernel, [x])[0], want)


def test_a_loop_that_reads_what_it_writes_does_not_load_ahead():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        def step(i, _):
            o_ref[pl.ds(i + 1, 1), :] = o_ref[pl.ds(i, 1), :] + 1

        jax.lax.fori_loop(0, 7, step, None)

    call = pl.pallas_call(kernel, out_shape=shape(8, 128, dtype=jnp.float32))
    (kernel,) = kernels_in(call, shape(8, 128, dtype=jnp.float32))
    text, _ = compiled(kernel)
    assert "scf.for" in text and "tt.num_stages = 1 " in text


# --- program order ---


def test_tiles_of_large_products_are_run_in_groups():
    assert notes(matmul(128, 256, 64), LARGE, LARGE)[GROUP] == 16


def test_no_groups_where_the_grid_is_narrow():
    narrow = shape(8192, 512)
    assert GROUP not in notes(matmul(128, 256, 64), LARGE, narrow)


@pytest.mark.parametrize("rows", [7, 8])
def test_groups_change_the_order_not_the_result(rows):
    """Every tile once, with and without a last group of fewer rows."""
    chip = replace(H200, cores=1)
    x = np.random.default_rng(0).integers(-4, 5, (16 * rows, 16)).astype(np.float32)
    y = np.random.default_rng(1).integers(-4, 5, (16, 16 * 12)).astype(np.float32)
    (kernel,) = kernels_in(matmul(16, 16, 8), x, y)
    made = base.Compiled(base.get("triton"), kernel, base.Options(chip=chip))
    assert find_pipeline(made.scheduled).attrs[GROUP] == 4
    assert ("arith.minsi" in made["ttir"]) == (rows == 7)
    (got,) = simulated(run_passes(kernel), [x, y], chip=chip)
    np.testing.assert_array_equal(got, x @ y)


def memory_of(scheduled):
    """The model of a scheduled kernel's shared memory, and the stages chosen."""
    attrs = find_pipeline(scheduled).attrs
    return SharedMemory(scheduled, attrs[WARPS]), attrs[STAGES]


def assert_fits(scheduled):
    memory, stages = memory_of(scheduled)
    assert memory.bytes(stages) <= H200.shared.bytes


# What Triton 3.9 allocates for an H200: the trial, warps, stages, bytes.
MEASURED = [
    ("attention_with_bias", 8, 4, 245760),  # a load that is added to a product
    ("attention_soft_cap_window", 8, 4, 147456),
    ("attention_causal", 4, 4, 212992),
    ("matmul_with_int8_weights", 4, 4, 147456),
    ("split_k", 4, 3, 212992),  # the product is added to memory in each step
]


def scheduled_trial(name):
    trial = TRIALS[name]()
    kernel = kernels_in(trial.run, *trial.arrays)[0]
    options = base.Options(chip=H200)
    return base.Compiled(base.get("triton"), kernel, options).scheduled


@pytest.mark.parametrize(("name", "warps", "stages", "size"), MEASURED, ids=str)
def test_shared_memory_is_what_triton_allocates(name, warps, stages, size, monkeypatch):
    monkeypatch.setattr(triton, "edge_fills", lambda kernel: kernel)  # masks stay
    assert SharedMemory(scheduled_trial(name), warps).bytes(stages) == size


@pytest.mark.parametrize("name", dict.fromkeys(row[0] for row in MEASURED))
def test_stages_fit_into_shared_memory(name):
    assert_fits(scheduled_trial(name))


def test_sums_over_rows_without_products_take_no_shared_memory():
    """As in the gradient of a norm's weights."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].sum(axis=0, keepdims=True)

    call = pl.pallas_call(kernel, out_shape=shape(1, 8192, dtype=jnp.float32))
    assert warps_and_stages(call, shape(4, 8192, dtype=jnp.float32))[0] == 16


def test_loads_that_are_converted_before_a_product_are_loaded_ahead_too():
    """A left side of f32, rounded in the kernel: three buffers of it for four stages
    (Triton 3.9: 327680 bytes with four stages, more than there is)."""

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        x = x_ref[...].astype(jnp.bfloat16)
        o_ref[...] += jnp.dot(x, y_ref[...], preferred_element_type=jnp.float32)

    def call(x, y):
        return pl.pallas_call(
            kernel,
            out_shape=shape(512, 512, dtype=jnp.float32),
            grid=(4, 4, 4),
            in_specs=[
                pl.BlockSpec((128, 128), lambda i, j, k: (i, k)),
                pl.BlockSpec((128, 128), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((128, 128), lambda i, j, k: (i, j)),
        )(x, y)

    operands = shape(512, 512, dtype=jnp.float32), shape(512, 512)
    assert warps_and_stages(call, *operands)[1] == 2


def test_computed_tiles_that_are_multiplied_transposed_take_shared_memory():
    """p^T of a gradient, beside ds on the right and the blocks of keys and values."""
    run = gpu.grid_attention((128, 128), causal=False)
    (kernel,) = kernels_in(run, *[shape(64, 4096, 128)] * 3)
    over_keys = full_plan(kernel, machine=Machine.usual(H200)).steps[2].kernel
    options = base.Options(chip=H200)
    scheduled = base.Compiled(base.get("triton"), over_keys, options).scheduled
    assert_fits(scheduled)


def test_dimensions_that_cannot_be_divided_one_after_another():
    """Blocks that fit are found for each kernel of a gradient."""
    run = gpu.loop_attention((128, 128), causal=True)
    (kernel,) = kernels_in(run, *[shape(64, 4096, 128)] * 3)
    for step in full_plan(kernel, machine=Machine.usual(H200)).steps:
        options = base.Options(chip=H200)
        scheduled = base.Compiled(base.get("triton"), step.kernel, options).scheduled
        assert_fits(scheduled)


def test_a_batch_of_matmuls_is_split_between_programs():
    def kernel(x_ref, y_ref, o_ref):
        s = jnp.einsum("bij,bkj->bik", x_ref[...], y_ref[...])
        o_ref[...] = jnp.einsum("bik,bkj->bij", s, y_ref[...])

    def run(x, y):
        block = pl.BlockSpec((4, 64, 64), lambda b: (b, 0, 0))
        return pl.pallas_call(
            kernel, grid=(2,), in_specs=[block] * 2, out_specs=block, out_shape=x
        )(x, y)

    (found,) = pl.lower(run)(shape(8, 64, 64), shape(8, 64, 64)).kernels
    made = base.Compiled(base.get("triton"), found, base.Options(chip=H200))
    assert find_pipeline(made.scheduled).attrs["grid"] == (8,)
    products = [line for line in made["ttir"].splitlines() if "tt.dot" in line]
    assert len(products) == 2
    assert all("tensor<64x64xbf16> * tensor<64x64xbf16>" in p for p in products)


def test_the_widest_instruction_fits_the_registers_of_its_threads():
    """With 16 warps a thread has 128, as many as its sums of 256 columns."""

    def warps(columns, chip=H200):
        need = Need(0, 0, 2, 0, rows=128, columns=frozenset({64, columns}))
        return chosen_warps(need, {"num_warps": 16}, chip)

    assert warps(256) == warps(512) == 8
    assert warps(128) == warps(512, GPUS["a100"]) == 16


def test_gradients_of_whole_rows_of_attention_have_enough_registers():
    """ptxas ended with "insufficient registers" for 16 warps."""

    def kernel(q_ref, k_ref, v_ref, o_ref):
        scores = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores, axis=-1).astype(v_ref.dtype)
        o_ref[...] = jnp.dot(weights, v_ref[...])

    def total(*operands):
        rows = pl.BlockSpec((None, 128, 64), lambda h, i: (h, i, 0))
        whole = pl.BlockSpec((None, 512, 64), lambda h, i: (h, 0, 0))
        run = pl.pallas_call(
            kernel,
            grid=(8, 4),
            in_specs=[rows, whole, whole],
            out_specs=rows,
            out_shape=shape(8, 512, 64),
        )
        return run(*operands).astype(jnp.float32).sum()

    found = pl.lower(jax.grad(total, (0, 1, 2)))(*[shape(8, 512, 64)] * 3).kernels
    made = base.Compiled(base.get("triton"), found[-1], base.Options(chip=H200))
    assert found[-1].num_outputs == 3
    assert find_pipeline(made.scheduled).attrs[WARPS] == 8


def large(kernel, out, *shapes):
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    out = jax.ShapeDtypeStruct(out, jnp.float32)
    run = lambda *xs: pl.pallas_call(kernel, out_shape=out, backend="triton")(*xs)
    (found,) = pl.lower(run)(*arrays).kernels
    return base.Compiled(base.get("triton"), found, base.Options(chip=H200))


def summed_along_all(x):
    """A tile of which no part can be computed alone, nor one after another."""
    for axis in range(x.ndim):
        x = jax.lax.cumsum(jax.lax.cumsum(x, axis=axis), axis=axis, reverse=True)
    return x


def test_operands_of_f32_take_shared_memory_too():
    """As measured with Triton 3.9: both operands of a product, of any width."""

    def kernel(x_ref, y_ref, o_ref):
        x = summed_along_all(x_ref[...])  # all of it is needed in every program
        o_ref[...] = jnp.einsum("bij,bjk->bik", x, y_ref[...])

    said = "operands of a matmul do not fit in shared memory"
    with pytest.raises(ChipMemoryError, match=said) as caught:
        large(kernel, (2, 256, 128), (2, 256, 128), (2, 128, 128))["ttir"]
    assert "232448 bytes" in str(caught.value)


def test_a_transposed_tile_goes_through_shared_memory():
    def kernel(x_ref, o_ref):
        o_ref[...] = summed_along_all(x_ref[...]).T

    large(kernel, (256, 128), (128, 256))["ttir"]
    with pytest.raises(ChipMemoryError, match="transposed tile") as caught:
        large(kernel, (256, 256), (256, 256))["ttir"]
    assert "262144 bytes" in str(caught.value)


@pytest.mark.parametrize("rows, size", [(56, 1 << 17), (64, 0)])
def test_reshapes_that_move_padding_go_through_shared_memory(rows: int, size: int):
    """As measured with Triton 3.8: all of the tile, as one vector."""
    b, tile = Builder(), TileType((2, rows, 256), F32)
    ref, out = Value(RefType(tile.shape, F32)), Value(RefType((2 * rows, 256), F32))
    b.store(out, b.op("reshape", b.load(ref), shape=(2 * rows, 256)))
    kernel = Kernel("k", (ref, out), b.block(), 1)
    assert SharedMemory(kernel, warps=4).bytes(stages=1) == size
    assert SharedMemory(kernel, warps=1).bytes(stages=1) == 0


# --- loops whose iterations stay in order ---


def repeated_updates(steps):
    """A branch overwrites a whole ref, which the rest of each step adds to."""

    def kernel(x_ref, o_ref):
        @pl.loop(0, steps)
        def _(i):
            x = x_ref[i]

            @pl.when(i % 3 == 0)
            def _():
                o_ref[...] = x

            pl.atomic_add(o_ref, (pl.ds(0, 8),), x[:8])

    return kernel


@pytest.mark.parametrize("asked", [{}, {"num_stages": 3}], ids=["chosen", "asked"])
def test_writes_of_a_branch_and_beside_it_stay_in_order(asked):
    """Triton's pipelining puts such a branch behind all else, whatever is asked for."""
    out = jax.ShapeDtypeStruct((32,), jnp.float32)
    call = pl.pallas_call(repeated_updates(5), out_shape=out)
    (kernel,) = kernels_in(call, jax.ShapeDtypeStruct((5, 32), jnp.float32))
    scheduled = schedule_launch(run_passes(run_passes(kernel), PASSES), asked, H200)
    (loop,) = (op for op in walk(scheduled.body) if op.name == "for")
    assert any(op.name == "cond" for op in walk(loop.regions[0]))
    assert loop.attrs[STAGES] == 1
