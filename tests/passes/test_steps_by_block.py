"""Steps that share blocks which they name: sorted by block, a program for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import errors, sites
from pallasite import tpu as pltpu
from pallasite.emulation.step_order import ordered
from pallasite.passes.run import run
from pallasite.passes.schedule.commuting_steps import first_stores
from pallasite.passes.schedule.plan_parts import plan
from pallasite.passes.schedule.split_axis import Order, Step
from pallasite.passes.schedule.steps_by_block import by_block, steps_by_block
from pallasite.target import GPUS
from tests.backends.triton import harness
from tests.passes.test_split_axis import evaluate, evaluate_program

F32, I32 = jnp.float32, jnp.int32
Struct = jax.ShapeDtypeStruct
STEPS, BLOCKS, WIDTH = 24, 5, 8


def is_new(table, t):
    """Whether a step is the first, or of another block than the one before it."""
    return (t == 0) | (table[jnp.maximum(t - 1, 0)] != table[t])


def by_table(body, out, shape=(BLOCKS, WIDTH), grid=(STEPS,), scratch=(), **more):
    """A function of a table and of rows, one for each step."""

    def function(table, x):
        return pl.pallas_call(
            body,
            out_shape=jax.tree.map(lambda _: Struct(shape, F32), out),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[pl.BlockSpec((1, shape[1]), lambda t, *_: (t, 0))],
                out_specs=out,
                scratch_shapes=scratch,
            ),
            **more,
        )(table, x)

    return function


ROW = pl.BlockSpec((1, WIDTH), lambda t, s: (s[t], 0))


def summed(s_ref, x_ref, o_ref):
    @pl.when(is_new(s_ref, pl.program_id(0)))
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...]


def largest(s_ref, x_ref, o_ref):
    new = is_new(s_ref, pl.program_id(0))
    o_ref[...] = jnp.where(new, x_ref[...], jnp.maximum(o_ref[...], x_ref[...]))


def counted(s_ref, x_ref, o_ref, n_ref):
    summed(s_ref, x_ref, o_ref)

    @pl.when(is_new(s_ref, pl.program_id(0)))
    def _():
        n_ref[...] = jnp.zeros_like(n_ref)

    n_ref[...] += 1


def decayed(s_ref, x_ref, o_ref):
    """No sum: nothing that merges."""
    new = is_new(s_ref, pl.program_id(0))
    o_ref[...] = jnp.where(new, 0.0, jnp.sin(o_ref[...])) + x_ref[...]


def in_scratch(s_ref, x_ref, o_ref, acc_ref):
    """The sum of a run is stored by its last step."""
    t = pl.program_id(0)

    @pl.when(is_new(s_ref, t))
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += x_ref[...]

    @pl.when((t == STEPS - 1) | (s_ref[jnp.minimum(t + 1, STEPS - 1)] != s_ref[t]))
    def _():
        o_ref[...] = acc_ref[...]


def carried(s_ref, x_ref, o_ref, acc_ref):
    """What scratch has at the start of a run is from another block's steps."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += x_ref[...]
    o_ref[...] = acc_ref[...]


def of_whole(s_ref, x_ref, o_ref):
    t = pl.program_id(0)

    @pl.when(is_new(s_ref, t))
    def _():
        o_ref[s_ref[t], :] = jnp.zeros((WIDTH,), F32)

    o_ref[s_ref[t], :] = o_ref[s_ref[t], :] + x_ref[0]


def of_neighbour(s_ref, x_ref, o_ref):
    """A step reads the row of another."""
    t = pl.program_id(0)
    o_ref[s_ref[t], :] = o_ref[jnp.maximum(s_ref[t] - 1, 0), :] + x_ref[0]


def filled_first(s_ref, x_ref, o_ref):
    """The first step fills a whole result; all add to a row of it."""
    t = pl.program_id(0)

    @pl.when(t == 0)
    def _():
        o_ref[...] = jnp.ones_like(o_ref)

    o_ref[s_ref[t], :] += x_ref[0]


SCRATCH = [pltpu.VMEM((1, WIDTH), F32)]
WHOLE = pl.BlockSpec((BLOCKS, WIDTH), lambda t, s: (0, 0))
KERNELS = {
    "sum": by_table(summed, ROW),
    "maximum": by_table(largest, ROW),
    "sum and count": by_table(counted, (ROW, ROW)),
    "anything": by_table(decayed, ROW),
    "clamped numbers": by_table(
        summed, pl.BlockSpec((1, WIDTH), lambda t, s: (2 * s[t] - 3, 0))
    ),
    "quotients": by_table(
        summed, pl.BlockSpec((1, WIDTH), lambda t, s: (jnp.bitwise_and(s[t], 1), 0))
    ),
    "blocks of two rows": by_table(
        summed, pl.BlockSpec((2, WIDTH), lambda t, s: (s[t], 0))
    ),
    "scratch of a run": by_table(in_scratch, ROW, scratch=SCRATCH),
    "rows of a whole result": by_table(of_whole, WHOLE),
}
OTHERS = {
    "scratch from run to run": by_table(carried, ROW, scratch=SCRATCH),
    "rows of others": by_table(of_neighbour, WHOLE),
    "in order, as asked": by_table(
        summed,
        ROW,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("sequential",)),
    ),
    "a block of all": by_table(summed, pl.BlockSpec((1, WIDTH), lambda t, s: (0, 0))),
}


def planned(function, *operands):
    (kernel,) = sites.kernels_in(function, *operands)
    kernel = run(kernel)
    found = steps_by_block(kernel)
    return kernel, found


def operands(is_sorted: bool):
    rng = np.random.default_rng(0)
    table = rng.integers(0, BLOCKS, STEPS).astype(np.int32)
    x = rng.standard_normal((STEPS, WIDTH)).astype(np.float32)
    return np.sort(table) if is_sorted else table, x


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_results_are_bit_equal(name: str, is_sorted: bool):
    given = operands(is_sorted)
    kernel, found = planned(KERNELS[name], *given)
    assert found is not None
    program, _ = by_block(found)
    pairs = zip(
        evaluate(kernel, list(given)),
        evaluate_program(program, list(given)),
        strict=True,
    )
    for want, got in pairs:
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize("name", KERNELS)
def test_gpus_compute_the_same(name: str):
    given = [*operands(False)]
    kernel, found = planned(KERNELS[name], *given)
    assert found is not None
    program, _ = by_block(found)
    order, step = program.steps
    assert isinstance(order, Order) and isinstance(step, Step)
    sort = ordered(order.number, order.sizes, order.count)
    firsts, steps = map(np.asarray, sort(*(given[n] for n in order.operands)))
    got = harness.simulated(step.kernel, [*given, firsts, steps], chip=GPUS["h200"])
    seen = np.repeat(np.diff(firsts) > 0, -(-BLOCKS // order.count))[:BLOCKS]
    for a, b in zip(got, evaluate(kernel, given), strict=True):
        np.testing.assert_array_equal(a[seen], b[seen])


@pytest.mark.parametrize("name", OTHERS)
def test_other_steps_stay_in_order(name: str):
    assert planned(OTHERS[name], *operands(True))[1] is None


def test_a_grid_of_columns_and_a_table_of_both():
    """Blocks by two numbers of a 2-D table; another axis chooses columns, and batches
    have tables of their own."""

    def kernel(s_ref, x_ref, o_ref):
        t = pl.program_id(1)
        new = (s_ref[jnp.maximum(t - 1, 0), 0] != s_ref[t, 0]) | (
            s_ref[jnp.maximum(t - 1, 0), 1] != s_ref[t, 1]
        )
        before = jnp.where((t == 0) | new, 0.0, o_ref[0])
        o_ref[0] = before + x_ref[...]

    def function(table, x):
        return pl.pallas_call(
            kernel,
            out_shape=Struct((3, 2, WIDTH), F32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(2, STEPS),
                in_specs=[pl.BlockSpec((1, WIDTH // 2), lambda j, t, s: (t, j))],
                out_specs=pl.BlockSpec(
                    (1, 1, WIDTH // 2), lambda j, t, s: (s[t, 0], s[t, 1], j)
                ),
            ),
        )(table, x)

    rng = np.random.default_rng(1)
    table = np.sort(rng.integers(0, 6, (2, STEPS)), axis=1).astype(np.int32)
    table = np.stack([table // 2, table % 2], -1)
    x = rng.standard_normal((2, STEPS, WIDTH)).astype(np.float32)
    for f, given in ((function, (table[0], x[0])), (jax.vmap(function), (table, x))):
        kernel_, found = planned(f, *given)
        assert found is not None and found.counts == (3, 2)
        program, _ = by_block(found)
        (want,), (got,) = (
            evaluate(kernel_, list(given)),
            evaluate_program(program, list(given)),
        )
        seen = [tuple(i) for i in table[0].tolist()]
        lead = () if f is function else (0,)
        for i in seen:
            np.testing.assert_array_equal(want[*lead, *i], got[*lead, *i])


def large(body, **more):
    steps, blocks, width = 8192, 512, 1024
    row = pl.BlockSpec((1, width), lambda t, s: (s[t], 0))
    function = by_table(body, row, (blocks, width), (steps,), **more)
    return function, (Struct((steps,), I32), Struct((steps, width), F32))


@pytest.mark.parametrize("body", [summed, largest, decayed])
def test_gpus_sort_the_steps_of_long_tables(body):
    function, given = large(body)
    (kernel,) = sites.kernels_in(function, *given)
    found = plan(kernel, GPUS["h200"])
    assert found.kind == "steps by block" and found.program is not None
    (made,) = found.program.kernels
    assert "grid=(512,)" in made.text


def test_what_the_first_step_stores_is_a_kernel_of_its_own():
    """As gradients of embeddings by hand: their table may be as large as memory."""
    steps, blocks, width = 8192, 50000, 1024
    whole = pl.BlockSpec((blocks, width), lambda t, s: (0, 0))
    function = by_table(filled_first, whole, (blocks, width), (steps,))
    given = Struct((steps,), I32), Struct((steps, width), F32)
    found = plan(sites.kernels_in(function, *given)[0], GPUS["h200"])
    assert found.kind == "steps by block" and found.program is not None
    start, rest = found.program.kernels
    assert "grid=(1,)" in start.text and f"grid=({blocks},)" in rest.text


def test_rows_that_no_step_adds_to_keep_what_the_first_step_stored():
    table, x = operands(False)
    table = table // 2
    kernel, found = planned(by_table(filled_first, WHOLE), table, x)
    assert found is None
    starts = first_stores(kernel)
    assert starts is not None
    found = steps_by_block(starts.kernels[1])
    assert found is not None
    program = starts.with_step(1, by_block(found)[0], len(kernel.inputs))
    (want,), (got,) = (
        evaluate(kernel, [table, x]),
        evaluate_program(program, [table, x]),
    )
    np.testing.assert_array_equal(want, got)
    assert (got[table.max() + 1 :] == 1).all()


def test_gpus_run_few_steps_in_order():
    (kernel,) = sites.kernels_in(KERNELS["sum"], *operands(True))
    assert plan(kernel, GPUS["h200"]).program is None


def test_xla_sorts(monkeypatch):
    monkeypatch.setenv("PALLASITE_TARGET", "gpu:h200")
    function, given = large(summed)
    traced = jax.jit(function).trace(*given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('"stablehlo.sort"') == 1
    assert text.count("stablehlo.custom_call") == 1


def test_gradients_are_sorted_too(monkeypatch):
    """The cotangent of a block changes from step to step."""
    monkeypatch.setenv("PALLASITE_TARGET", "gpu:h200")
    function, (table, x) = large(summed)
    gradient = jax.grad(lambda x, table: function(table, x).sum())
    *_, kernel = sites.kernels_in(gradient, x, table)
    found = plan(kernel, GPUS["h200"])
    assert found.kind == "steps by block"


def test_gradients_in_small():
    table, x = operands(True)
    gradient = jax.grad(lambda x, table: jnp.sin(KERNELS["sum"](table, x)).sum())
    want = np.cos(jax.ops.segment_sum(x, table, BLOCKS))[table]
    np.testing.assert_allclose(gradient(x, table), want, rtol=1e-5, atol=1e-5)


def test_long_loops_of_few_programs_are_said():
    """A program waits for each of its iterations, and most cores are idle."""
    count, width, programs = 1 << 16, 32, 32

    def kernel(x_ref, o_ref):
        step = lambda n, y: jnp.sin(y - y.max()) + x_ref[n, :]
        o_ref[0, :] = jax.lax.fori_loop(0, count, step, jnp.zeros((width,), F32))

    function = pl.pallas_call(
        kernel,
        Struct((1, width * programs), F32),
        grid=(programs,),
        in_specs=[pl.BlockSpec((count, width), lambda i: (0, i))],
        out_specs=pl.BlockSpec((1, width), lambda i: (0, i)),
    )
    (found,) = sites.kernels_in(function, Struct((count, width * programs), F32))
    serial = plan(found, GPUS["h200"]).serial
    assert serial is not None and "do not merge" in serial.reason


def test_derivatives_that_are_emulated_are_said(monkeypatch):
    monkeypatch.setenv("PALLASITE_TARGET", "gpu:h200")
    function, (table, x) = large(decayed)
    with pytest.warns(errors.FallbackWarning, match="derivative of kernel 'decayed'"):
        jax.make_jaxpr(jax.grad(lambda x, t: function(t, x).sum()))(x, table)
