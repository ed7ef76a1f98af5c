"""Which blocks a chip gets: only where they do not fit, or gain much."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct as Shape
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.verify import verify
from pallasite.kernels import masks
from pallasite.kernels.attention import AttentionConfig, attention
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.normalize import normalize
from pallasite.passes.run import run
from pallasite.passes.schedule import tpu_blocks
from pallasite.passes.schedule.choose_blocks import blocks_of, for_threads
from pallasite.passes.schedule.gpu_blocks import for_gpu
from pallasite.passes.schedule.gpu_tiles import largest_tile
from pallasite.passes.schedule.tpu_blocks import for_tpu
from pallasite.sites import calls_in
from pallasite.target import GPUS, TPUS, Memory
from tests.backends.triton.test_blocks import matmul
from tests.fuzz.agreement import run_numpy
from tests.fuzz.choices import Seeded
from tests.fuzz.generate import random_kernel
from tests.passes.test_reblock import COPY, OWN, head, parsed, rows
from tests.passes.test_same_meaning import outputs
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments

MANY_NS = 1e9
COLUMNS = """
%a: f32[8,4] = load %xb[:, :]
%b: f32[8,4] = scan %a {kind="sum", axis=0, reverse=False}
store %ob[:, :] = %b
"""


def shared(kernel, threads: int, nanoseconds: float = MANY_NS) -> str:
    return head(for_threads(kernel, threads, lambda _: nanoseconds))


@pytest.mark.parametrize(
    "threads, grid, block",
    [(1, 1, 512), (2, 2, 256), (4, 4, 128), (5, 4, 128), (7, 32, 16), (64, 64, 8)],
)
def test_one_program_becomes_enough_for_all_threads(threads, grid, block):
    text = shared(matmul(512, 512, 512, 512, "f32"), threads)
    assert f"grid=({grid}, 1, 1), windows=(in[{block}, 512]" in text


def test_columns_are_cut_where_rows_do_not_suffice():
    text = shared(matmul(512, 16, 512, 512, "f32"), 128)
    assert "grid=(64, 2, 1), windows=(in[8, 512], in[512, 256], out[8, 256])" in text


def test_programs_that_fill_all_threads_stay():
    for threads in (2, 4):
        kernel = rows(COPY, n=32)
        assert for_threads(kernel, threads, lambda _: MANY_NS) is kernel


def test_uneven_programs_are_cut():
    """Three programs on four threads leave one idle, six would leave two."""
    text = shared(matmul(384, 128, 384, 384, "f32"), 4)
    assert "grid=(12, 1, 1), windows=(in[32, 384]" in text


def test_small_work_stays_with_one_thread():
    kernel = matmul(512, 512, 512, 512, "f32")
    assert for_threads(kernel, 4, lambda _: 70_000) is kernel
    assert "grid=(2, 1, 1)" in shared(kernel, 4, 100_000)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_programs_of_one_element_of_a_product_are_joined(threads):
    text = shared(matmul(512, 1, 1, 512, "f32"), threads)
    assert "grid=(16, 8, 1), windows=(in[32, 512], in[512, 64], out[32, 64])" in text


def test_programs_are_joined_only_while_all_threads_have_one():
    text = shared(matmul(512, 1, 1, 512, "f32"), 1024)
    assert "grid=(128, 8, 1), windows=(in[4, 512], in[512, 64], out[4, 64])" in text


def test_rows_that_depend_on_each_other_stay():
    kernel = rows(COLUMNS, n=8, grid="(1,)", x_map=OWN)
    assert for_threads(kernel, 4, lambda _: MANY_NS) is kernel


def test_a_grid_sized_at_run_time_stays():
    text = rows(COPY).text.replace("grid=(4,)", "grid=(None,)")
    text = text.replace(
        "%x: ref<f32[32,4] any>", "%n: ref<i32[1] smem>, %x: ref<f32[32,4] any>"
    )
    text = text.replace("pipeline %x", "%count: i32 = load %n[0] pipeline %count, %x")
    kernel = parsed(text)
    assert for_threads(kernel, 64, lambda _: MANY_NS) is kernel


TINY_GPU = replace(
    GPUS["h100"],
    memories={**GPUS["h100"].memories, "shared": Memory(4096)},
    registers=512,
)
ONE_CORE = replace(GPUS["h100"], cores=1)
SLOW_TPU = replace(TPUS["v6e"], step_seconds=1.0)
CHIPS = {
    "tiny": lambda kernel: for_gpu(kernel, TINY_GPU),
    "one": lambda kernel: for_gpu(kernel, ONE_CORE),
    "tpu": lambda kernel: for_tpu(kernel, SLOW_TPU),
    "threads": lambda kernel: for_threads(kernel, 7, lambda _: MANY_NS),
}
NO_LIMITS = {
    "gpu_blocks": dict(LEAST_SIDE=2, SHORT_TILE=2, LEAST_LAUNCHES=0, GAIN=1),
    "gpu_tiles": dict(LEAST_ROW=1, TILE_ELEMENTS=16, GAIN_OF_PARTS=1),
    "choose_blocks": dict(LEAST_ROW=1, LEAST_ROWS=1),
}


@pytest.mark.parametrize("chip", CHIPS)
def test_whole_kernels_mean_the_same(chip: str, monkeypatch):
    """Each chip gets other kernels of the zoo, and limits that change most."""
    for module, limits in NO_LIMITS.items():
        for name, number in limits.items():
            monkeypatch.setattr(f"pallasite.passes.schedule.{module}.{name}", number)
    changed = 0
    first = list(CHIPS).index(chip)
    for case in all_cases()[first :: len(CHIPS)]:
        for call in calls_in(partial(case.run, interpret=False), *arguments(case, 0)):
            kernel = run(call.kernel)
            new = CHIPS[chip](kernel)
            if new is kernel or kernel.level != "tile":
                continue
            verify(new)
            changed += 1
            arrays = random_arrays(kernel)
            pairs = zip(outputs(new, arrays), outputs(kernel, arrays), strict=True)
            for got, want in pairs:
                got, want = (x.astype(np.float64) for x in (got, want))
                np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2)
    assert changed > 5


@pytest.mark.parametrize("axis, rows", [(1, 32), (0, 128)])
def test_tiles_of_pairs_are_smaller_than_blocks(axis: int, rows: int):
    """Each of a block is compared with each of another: 16,384 elements of four rows.
    What the threads of a warp share stays whole: here the columns."""

    def kernel(x_ref, y_ref, o_ref):
        x, y = x_ref[...], y_ref[...]
        gaps = sum(jnp.abs(x[n][:, None] - y[n][None, :]) for n in range(4))
        o_ref[...] = gaps.min(axis=axis)

    own = pl.BlockSpec((4, 128), lambda i: (0, i))
    first = pl.BlockSpec((4, 128), lambda i: (0, 0))
    specs = [own, first] if axis == 1 else [first, own]
    x, out = Shape((4, 4096), "float32"), Shape((4096,), "float32")
    result = pl.BlockSpec((128,), lambda i: (i,))
    call = pl.pallas_call(kernel, out, grid=(32,), in_specs=specs, out_specs=result)
    (found,) = calls_in(call, x, x)
    made = for_gpu(run(found.kernel), GPUS["h200"])
    verify(made)
    assert largest_tile(made) == rows * 128


def test_rows_of_a_program_are_fewer_where_many_tiles_are_live():
    """Eight scans are needed until the last of them; a sum of them is not."""

    def kernel(x_ref, o_ref):
        scans = [jnp.cumsum(x_ref[...] * n, axis=1) for n in range(1, 9)]
        total = sum(jnp.flip(scan, axis=1) for scan in reversed(scans))
        o_ref[...] = jnp.cumsum(total * scans[0], axis=1)

    def single(x_ref, o_ref):
        o_ref[...] = jnp.cumsum(x_ref[...], axis=1)

    def rows(kernel) -> int:
        spec = pl.BlockSpec((8, 1024), lambda i: (i, 0))
        x = Shape((64, 1024), "float32")
        call = pl.pallas_call(kernel, x, grid=(8,), in_specs=[spec], out_specs=spec)
        (found,) = calls_in(call, x)
        made = for_gpu(run(found.kernel), GPUS["h200"])
        verify(made)
        (blocks,) = {w.dims[0].size for op in walk(made.body) for w in windows(op)}
        return blocks

    windows = lambda op: op.attrs["windows"] if op.name == "pipeline" else ()
    assert rows(single) == 8
    assert rows(kernel) < 8


@pytest.mark.parametrize(
    "mask, steps", [(masks.Causal(), 10), (masks.Window(511, 0), 7)]
)
def test_queries_of_masked_attention_are_one_program(mask: masks.Mask, steps: int):
    """Where all queries are in one, only blocks that one of them needs are left."""
    heads = [Shape((1, 2048, 1, 128), "bfloat16")] * 3
    blocks = AttentionConfig(512, 512)
    attend = partial(attention, mask=mask, config=blocks)
    (call,) = calls_in(attend, *heads)
    kernel = run(call.kernel)
    new = canonicalize(for_tpu(kernel, TPUS["v6e"]))
    verify(new)
    assert "grid=(1, 1, 1, 1)" in head(new)
    assert all(op.name != "cond" for op in walk(new.body))
    assert sum(op.name == "dot" for op in walk(new.body)) == 2 * steps
    arrays = random_arrays(kernel)
    for got, want in zip(outputs(new, arrays), outputs(kernel, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def causal(loop: bool, block: int, length: int = 1024):
    """Attention that skips blocks of keys after its queries: steps, or a loop."""

    def step(q_ref, k, v, j, state):
        top, total, acc = state
        scores = jnp.dot(q_ref[...], k.T, preferred_element_type=jnp.float32)
        rows = pl.program_id(1) * block + lax.broadcasted_iota(int, scores.shape, 0)
        columns = j * block + lax.broadcasted_iota(int, scores.shape, 1)
        scores = jnp.where(rows >= columns, scores, -1e30)
        new = jnp.maximum(top, scores.max(-1, keepdims=True))
        shrink, weights = jnp.exp(top - new), jnp.exp(scores - new)
        total = shrink * total + weights.sum(-1, keepdims=True)
        product = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=float)
        return new, total, shrink * acc + product

    def start():
        column = jnp.zeros((block, 1), jnp.float32)
        return column - 1e30, column, jnp.zeros((block, 128), jnp.float32)

    def in_a_loop(q_ref, k_ref, v_ref, o_ref):
        def body(j, state):
            rows = pl.ds(j * block, block)
            return step(q_ref, k_ref[rows, :], v_ref[rows, :], j, state)

        _, total, acc = lax.fori_loop(0, pl.program_id(1) + 1, body, start())
        o_ref[...] = (acc / total).astype(o_ref.dtype)

    def in_steps(q_ref, k_ref, v_ref, o_ref, *refs):
        i, j = pl.program_id(1), pl.program_id(2)

        @pl.when(j == 0)
        def _():
            for ref, value in zip(refs, start(), strict=True):
                ref[...] = value

        @pl.when(j <= i)
        def _():
            state = [ref[...] for ref in refs]
            new = step(q_ref, k_ref[...], v_ref[...], j, state)
            for ref, value in zip(refs, new, strict=True):
                ref[...] = value

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = (refs[2][...] / refs[1][...]).astype(o_ref.dtype)

    shape, blocks = (4, length, 128), length // block
    queries = pl.BlockSpec((None, block, 128), lambda h, i, *_: (h, i, 0))
    keys = pl.BlockSpec((None, block, 128), lambda h, i, j: (h, j, 0))
    whole = pl.BlockSpec((None, length, 128), lambda h, i: (h, 0, 0))
    scratch = [pltpu.VMEM((block, n), jnp.float32) for n in (1, 1, 128)]
    attend = pl.pallas_call(
        in_a_loop if loop else in_steps,
        out_shape=Shape(shape, jnp.bfloat16),
        grid=(4, blocks) if loop else (4, blocks, blocks),
        in_specs=[queries, *[whole if loop else keys] * 2],
        out_specs=queries,
        scratch_shapes=[] if loop else scratch,
    )
    (call,) = calls_in(attend, *[Shape(shape, jnp.bfloat16)] * 3)
    return run(call.kernel)


@pytest.mark.parametrize("loop", [False, True])
def test_small_blocks_of_causal_attention_skip_as_large_ones(loop: bool):
    """Of two merged programs, one skips half of the keys: three products of four."""
    kernel = causal(loop, 128)
    new = canonicalize(for_tpu(kernel, TPUS["v6e"]))
    verify(new)
    assert "grid=(4, 1, 1)" in head(new)
    assert all(op.name not in ("cond", "for") for op in walk(new.body))
    dots = [op.result.tile.shape for op in walk(new.body) if op.name == "dot"]
    assert dots.count((512, 512)) == 3
    assert len(dots) == 6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_constants_do_not_tie_rows_to_columns(dtype):
    """Square blocks, masked along k on both sides: zeros and starts are the same."""
    n = 8

    def kernel(x_ref, y_ref, o_ref, acc_ref):
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        inside = lambda d: k * n + lax.broadcasted_iota(jnp.int32, (n, n), d) < 20
        x = jnp.where(inside(1), x_ref[...], 0)
        y = jnp.where(inside(0), y_ref[...], 0)
        acc_ref[...] += jnp.dot(x, y, preferred_element_type=jnp.float32)

        @pl.when(k == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    call = pl.pallas_call(
        kernel,
        Shape((30, 40), dtype),
        grid=(4, 5, 3),
        in_specs=[
            pl.BlockSpec((n, n), lambda i, j, k: (i, k)),
            pl.BlockSpec((n, n), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((n, n), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((n, n), jnp.float32)],
    )
    (found,) = calls_in(call, Shape((30, 20), dtype), Shape((20, 40), dtype))
    old = run(found.kernel)
    blocks = blocks_of(old)
    assert blocks is not None
    rows, _ = blocks.free
    new = blocks.rewritten({rows: 16})
    verify(new)
    assert "out[16, 8]" in head(new)
    arrays = random_arrays(old)
    for got, want in zip(outputs(new, arrays), outputs(old, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def test_programs_are_not_merged_to_more_code_than_a_chip_takes(monkeypatch):
    made: list[int] = []
    real = tpu_blocks.gather_programs

    def gather(kernel: Kernel, axis: int, factor: int) -> Kernel:
        made.append(factor)
        return real(kernel, axis, factor)

    monkeypatch.setattr(tpu_blocks, "gather_programs", gather)
    kernel = parsed("""
        kernel @k(%x: ref<f32[12,16,128] any>, %o: ref<f32[12,16,128] any>) outputs 1 {
          pipeline %x, %o {grid=(12,), semantics=("arbitrary",),
              windows=(in[squeezed 1, 16, 128], out[squeezed 1, 16, 128])}
            map (%i: i32) { %z: i32 = constant {value=0} yield %i, %z, %z }
            map (%j: i32) { %u: i32 = constant {value=0} yield %j, %u, %u }
            body (%p: i32, %xb: ref<f32[16,128] block>, %ob: ref<f32[16,128] block>) {
              %a: f32[16,128] = load %xb[:, :]
              %b: f32[16,128] = exp %a
              store %ob[:, :] = %b
            }
        }
    """)
    size = tpu_blocks.code_size(kernel.body, SLOW_TPU)
    monkeypatch.setattr(tpu_blocks, "MOST_CODE", 3 * size)
    for_tpu(kernel, SLOW_TPU)
    assert made == [2, 3]  # and not 4 and 6


def random_arrays(kernel: Kernel) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = []
    for ref in (p.ref for p in kernel.inputs):
        draw = rng.normal(size=ref.shape)
        if not ref.dtype.is_float:
            draw = rng.integers(0, 2 if ref.dtype.is_bool else 3, ref.shape)
        arrays.append(draw.astype(ref.dtype.np))
    return arrays


@pytest.mark.parametrize(
    ("family", "seed"), [("tiles", 20132), ("control", 20088), ("memory", 20115)]
)
def test_random_kernels_keep_the_rules(family: str, seed: int):
    """Of a broadcast scalar with a new name, and of masks of one element."""
    case = random_kernel(Seeded(seed), family)
    new = for_tpu(normalize(case.kernel), TPUS["v6e"])
    verify(new)
    wanted = run_numpy(case.kernel, case.arrays)
    for a, b in zip(run_numpy(new, case.arrays), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_formulas_count_as_their_operations():
    """A sine is about a hundred operations of a TPU, and no loop: many make much code,
    which compiles for minutes."""

    def sines(x_ref, o_ref):
        y = x_ref[...]
        for _ in range(50):
            y = jnp.sin(y) + 1.0
        o_ref[...] = y

    x = Shape((512, 128), jnp.float32)
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    call = pl.pallas_call(sines, x, grid=64, in_specs=[rows], out_specs=rows)
    (made,) = calls_in(call, x)
    new = for_tpu(run(made.kernel), TPUS["v6e"])
    assert "grid=(16,), windows=(in[32, 128], out[32, 128])" in new.text
    size = tpu_blocks.code_size(blocks_of(new).body, TPUS["v6e"])
    assert 50 * 4 * 100 <= size < tpu_blocks.MOST_CODE


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_programs_of_a_row_that_data_picks_fill_tiles(dtype):
    def kernel(ids_ref, table_ref, o_ref):
        o_ref[0, :] = table_ref[ids_ref[pl.program_id(0)], :]

    ids, table = Shape((128,), jnp.int32), Shape((40, 128), dtype)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=128,
        in_specs=[pl.BlockSpec((40, 128), lambda i, ids: (0, 0))],
        out_specs=pl.BlockSpec((1, 128), lambda i, ids: (i, 0)),
    )
    call = pl.pallas_call(kernel, Shape((128, 128), dtype), grid_spec=spec)
    (made,) = calls_in(call, ids, table)
    old = run(made.kernel)
    new = for_tpu(old, TPUS["v6e"])
    verify(new)
    assert "grid=(2,)" in new.text and "out[64, 128]" in new.text
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 40, 128, np.int32), rng.normal(size=(40, 128))]
    arrays[1] = arrays[1].astype(jnp.dtype(dtype))
    (got,), (want,) = run_numpy(new, arrays), run_numpy(old, arrays)
    np.testing.assert_array_equal(got, want)
