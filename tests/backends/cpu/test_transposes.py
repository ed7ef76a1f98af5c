"""Programs that meet somewhere take turns, however many threads there are.

Each kernel here could be taken for one whose programs are independent. Its programs
are made to meet often, and its result is that of one program after another.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.target import Host

STEPS = 64
RUNS = 20
F32 = jnp.float32
ROWS = pl.BlockSpec((8, 128), lambda i: (i, 0))
FIRST = pl.BlockSpec((8, 128), lambda i: (0, 0))
ANY = pl.BlockSpec(memory_space=pl.ANY)
VMEM = pltpu.VMEM((8, 128), F32)
SAID_PARALLEL = pltpu.CompilerParams(dimension_semantics=("parallel",))

X = np.random.default_rng(0).standard_normal((8 * STEPS, 128), np.float32)
BLOCKS = X.reshape(STEPS, 8, 128)
LAST = BLOCKS[-1]


@pytest.fixture(autouse=True)
def eager_threads(monkeypatch):
    """Use threads however little there is to do."""
    monkeypatch.setattr(Host, "least_part_ns", 0)
    monkeypatch.setattr(Host, "least_chunk_ns", 0)


def slowly(x):
    """Nearly the same number, after a while in which other threads may come between."""
    return jax.lax.fori_loop(0, 30, lambda _, v: v * (1 + 1e-7), x)


def copy(x_ref, o_ref):
    o_ref[...] = slowly(x_ref[...])


def check(kernel, want, *args, rows: int = len(X), out=ROWS, **options):
    """Many runs of a kernel over `X` (and `args`), all with the same result."""
    options.setdefault("grid", STEPS)
    options.setdefault("in_specs", [ROWS])
    call = jax.jit(
        pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((rows, 128), F32),
            out_specs=out,
            backend="cpu",
            **options,
        )
    )
    for _ in range(RUNS):
        np.testing.assert_allclose(call(X, *args), want, rtol=1e-3, atol=1e-4)


# --- in a block ---

CLAMPED = {
    "past_the_end": ROWS,
    "before_the_start": pl.BlockSpec((8, 128), lambda i: (i - STEPS, 0)),
    "by_no_sum": pl.BlockSpec((8, 128), lambda i: (i ^ 1, 0)),
}


@pytest.mark.parametrize("out", CLAMPED.values(), ids=CLAMPED.keys())
def test_clamped_block_numbers(out):
    check(copy, LAST, rows=8, out=out)


def test_clamped_elements():
    """All programs but the first write their first row to the last of the output."""
    out = pl.BlockSpec((pl.Element(8), pl.Element(128)), lambda i: (8 * i, 0))
    want = np.concatenate([BLOCKS[0][:7], LAST[:1]])
    check(copy, want, rows=8, out=out)


def test_numbers_that_wrap_around():
    number = lambda i: (i.astype(jnp.int8).astype(jnp.int32), 0)
    spec = pl.BlockSpec((1, 128), number)
    blocks = pl.BlockSpec((1, 128), lambda i: (i, 0))
    want = X[256:384].copy()  # 0 to 127: the second time round
    want[0] = X[511]  # all that became negative
    check(copy, want, rows=128, grid=512, in_specs=[blocks], out=spec)


@pytest.mark.parametrize("steps", [1, 2, 50])
@pytest.mark.parametrize("before", [(), (3,)], ids=["alone", "after_another"])
def test_grid_that_turns_out_larger_than_the_output(before, steps):
    """There are two blocks; the axis is parallel only up to that size."""

    @jax.jit
    def run(x, n):
        place = lambda *ids: (ids[-1], 0)
        spec = pl.BlockSpec((8, 128), place)
        return pl.pallas_call(
            copy,
            out_shape=jax.ShapeDtypeStruct((16, 128), F32),
            grid=(*before, n),
            in_specs=[spec],
            out_specs=spec,
            backend="cpu",
        )(x)

    for _ in range(RUNS):
        got = np.asarray(run(X, jnp.int32(steps)))
        np.testing.assert_allclose(got[:8], BLOCKS[0], rtol=1e-5)
        if steps > 1:
            np.testing.assert_allclose(got[8:], BLOCKS[steps - 1], rtol=1e-5)


def test_block_said_to_be_parallel_that_all_write():
    check(copy, LAST, rows=8, out=FIRST, compiler_params=SAID_PARALLEL)


def test_blocks_said_to_be_parallel_that_pairs_share():
    def pairs(x_ref, o_ref):
        @pl.when(pl.program_id(0) % 2 == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += slowly(x_ref[...])

    want = BLOCKS.reshape(-1, 2, 8, 128).sum(1).reshape(-1, 128)
    out = pl.BlockSpec((8, 128), lambda i: (i // 2, 0))
    check(pairs, want, rows=len(X) // 2, out=out, compiler_params=SAID_PARALLEL)


# --- in scratch ---


def test_scratch_said_to_be_parallel_that_only_the_first_fills():
    def kernel(x_ref, o_ref, first_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            first_ref[...] = x_ref[...]

        o_ref[...] = slowly(x_ref[...]) + first_ref[...]

    want = (BLOCKS + BLOCKS[0]).reshape(-1, 128)
    check(kernel, want, scratch_shapes=[VMEM], compiler_params=SAID_PARALLEL)


def test_scratch_that_an_inner_pipeline_adds_to():
    half = pl.BlockSpec((4, 128), lambda j: (j, 0))

    def kernel(x_ref, o_ref, sum_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        def step(x_block, sum_block, o_block):
            sum_block[...] += x_block[...]
            o_block[...] = sum_block[...]

        pltpu.emit_pipeline(step, grid=(2,), in_specs=[half], out_specs=[half, half])(
            x_ref, sum_ref, o_ref
        )

    want = BLOCKS.cumsum(0).reshape(-1, 128)
    check(kernel, want, scratch_shapes=[VMEM])


def test_semaphore_that_counts_programs():
    def kernel(x_ref, o_ref, count_ref):
        pl.semaphore_signal(count_ref, 1)
        o_ref[...] = x_ref[...] + pl.semaphore_read(count_ref).astype(F32)

    want = X + np.repeat(np.arange(1, STEPS + 1, dtype=np.float32), 8)[:, None]
    check(kernel, want, scratch_shapes=[pltpu.SemaphoreType.REGULAR])


# --- in main memory ---


def test_operand_read_by_blocks_and_written_without():
    """Every program reads what the one before it wrote to the memory both share."""

    def kernel(x_ref, o_ref):
        start = pl.multiple_of(pl.program_id(0) * 8, 8)
        o_ref[pl.ds(start, 8), :] = slowly(x_ref[...]) + 1

    before = pl.BlockSpec((8, 128), lambda i: (jnp.maximum(i - 1, 0), 0))
    want = np.concatenate([BLOCKS[0] + n for n in range(1, STEPS + 1)])
    aliases = {0: 0}
    check(kernel, want, in_specs=[before], out=ANY, input_output_aliases=aliases)


def test_table_that_programs_write_and_an_index_map_reads():
    def kernel(table_ref, x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[...] = slowly(x_ref[...])
        table_ref[jnp.minimum(i + 1, STEPS - 1)] = STEPS - 1 - i

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(STEPS,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, table: (table[i], 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, table: (i, 0)),
    )
    shape = jax.ShapeDtypeStruct(X.shape, F32)
    call = pl.pallas_call(kernel, out_shape=shape, grid_spec=spec, backend="cpu")
    order = np.array([0, *range(STEPS - 1, 0, -1)])
    for _ in range(RUNS):
        got = jax.jit(call)(np.zeros(STEPS, np.int32), X)
        np.testing.assert_allclose(got, BLOCKS[order].reshape(-1, 128), rtol=1e-5)
