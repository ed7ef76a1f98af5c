"""Steps that share only memory into which atomics merge, at once and in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import sites
from pallasite import tpu as pltpu
from pallasite.ir.verify import verify
from pallasite.passes.run import run
from pallasite.passes.schedule.commuting_steps import commuting_steps, in_any_order
from pallasite.passes.schedule.plan_parts import plan
from pallasite.target import GPUS
from tests.backends.triton import harness
from tests.passes.test_split_axis import evaluate, evaluate_program

F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16
N, ROWS, WIDTH, SLOTS = 20, 4, 24, 7


def places(ids_ref, x_ref, first=0):
    rows, width = x_ref.shape
    columns = first + lax.broadcasted_iota(I32, (rows, width), 1)
    return jnp.broadcast_to(ids_ref[...][:, None], (rows, width)), columns


def first_step(axes=1):
    test = pl.program_id(0) == 0
    for axis in range(1, axes):
        test &= pl.program_id(axis) == 0
    return pl.when(test)


def aliased(ids_ref, x_ref, before_ref, o_ref):
    pl.atomic_add(o_ref, places(ids_ref, x_ref), x_ref[...])


def started(ids_ref, x_ref, o_ref):
    @first_step()
    def _():
        o_ref[...] = jnp.full_like(o_ref, 3)

    pl.atomic_add(o_ref, places(ids_ref, x_ref), x_ref[...])


def largest(ids_ref, x_ref, o_ref):
    @first_step()
    def _():
        o_ref[...] = jnp.full_like(o_ref, -100)

    @pl.when(ids_ref[0] > 1)
    def _():
        pl.atomic_max(o_ref, places(ids_ref, x_ref), x_ref[...])


def by_columns(ids_ref, x_ref, o_ref):
    @first_step(2)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    where = places(ids_ref, x_ref, pl.program_id(0) * x_ref.shape[1])
    pl.atomic_add(o_ref, where, x_ref[...])


def row_by_row(ids_ref, x_ref, o_ref):
    @first_step()
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    def step(row, _):
        columns = lax.broadcasted_iota(I32, (WIDTH,), 0)
        where = jnp.broadcast_to(ids_ref[row], (WIDTH,)), columns
        pl.atomic_add(o_ref, where, x_ref[row])

    lax.fori_loop(0, ROWS, step, None)


WHOLE = pl.BlockSpec(memory_space=pl.ANY)
BLOCK = pl.BlockSpec((SLOTS, WIDTH), lambda *_: (0, 0))
BODIES = {
    "aliased": (aliased, 1, WHOLE),
    "aliased_block": (aliased, 1, BLOCK),
    "whole": (started, 1, WHOLE),
    "block": (started, 1, BLOCK),
    "largest": (largest, 1, WHOLE),
    "by_columns": (by_columns, 2, WHOLE),
    "row_by_row": (row_by_row, 1, BLOCK),
}


def kernel_of(body, axes=1, out=WHOLE, dtype=F32, **call):
    width = WIDTH // axes
    specs = [
        pl.BlockSpec((ROWS,), lambda *i: (i[-1],)),
        pl.BlockSpec((ROWS, width), lambda *i: (i[-1], i[0] if axes > 1 else 0)),
    ]
    shape = jax.ShapeDtypeStruct((SLOTS, WIDTH), dtype)
    operands = [
        jax.ShapeDtypeStruct((N,), I32),
        jax.ShapeDtypeStruct((N, WIDTH), dtype),
    ]
    if body is aliased:
        specs, call = [*specs, out], {**call, "input_output_aliases": {2: 0}}
        operands.append(shape)
    made = pl.pallas_call(
        body,
        out_shape=shape,
        grid=(N // ROWS,) if axes == 1 else (axes, N // ROWS),
        in_specs=specs,
        out_specs=out,
        **call,
    )
    return run(sites.kernels_in(made, *operands)[0])


def arrays(kernel):
    rng = np.random.default_rng(0)
    (rows,) = kernel.inputs[0].ref.shape
    ids = rng.integers(-2, SLOTS + 2, rows).astype(np.int32)
    shapes = [(p.ref.shape, p.ref.dtype.np) for p in kernel.inputs[1:]]
    return [ids, *(rng.integers(-9, 9, s).astype(t) for s, t in shapes)]


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, F32) for name in BODIES), ("block", BF16), ("largest", I32)],
    ids=str,
)
def test_any_order(name, dtype):
    """Sums of small whole numbers are exact in any order."""
    kernel = kernel_of(*BODIES[name], dtype)
    found = commuting_steps(kernel)
    assert found is not None and len(found.axes) == BODIES[name][1]
    program = in_any_order(kernel, found)
    assert len(program.kernels) == (1 if name.startswith("aliased") else 2)
    given = arrays(kernel)
    (expected,) = evaluate(kernel, given)
    (result,) = evaluate_program(program, given)
    np.testing.assert_array_equal(result, expected)
    values = list(given)
    for step in program.steps:
        verify(step.kernel)
        operands = [values[n] for n in step.operands]
        values += harness.simulated(step.kernel, operands, chip=GPUS["h200"])
    np.testing.assert_array_equal(values[program.results[0].array], expected)


def test_text():
    kernel = kernel_of(*BODIES["whole"])
    found = commuting_steps(kernel)
    start, steps = in_any_order(kernel, found).kernels
    assert "atomic_rmw" not in start.text and "grid=(1,)" in start.text
    assert "store" not in steps.text and 'semantics=("parallel",)' in steps.text
    assert "aliases {2: 0}" in steps.text


def used(ids_ref, x_ref, o_ref):
    started(ids_ref, x_ref, o_ref)
    old = pl.atomic_add(o_ref, places(ids_ref, x_ref), x_ref[...])
    pl.atomic_add(o_ref, places(ids_ref, x_ref), old)


def two_ways(ids_ref, x_ref, o_ref):
    started(ids_ref, x_ref, o_ref)
    pl.atomic_max(o_ref, places(ids_ref, x_ref), x_ref[...])


def halved(ids_ref, x_ref, o_ref):
    started(ids_ref, x_ref, o_ref)

    @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = o_ref[...] / 2


def started_again(ids_ref, x_ref, o_ref):
    @pl.when(pl.program_id(0) % 2 == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    pl.atomic_add(o_ref, places(ids_ref, x_ref), x_ref[...])


def started_late(ids_ref, x_ref, o_ref):
    pl.atomic_add(o_ref, places(ids_ref, x_ref), x_ref[...])

    @first_step()
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)


def started_by_columns(ids_ref, x_ref, o_ref):
    @pl.when(pl.program_id(1) == 0)  # again for each block of columns
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    where = places(ids_ref, x_ref, pl.program_id(0) * x_ref.shape[1])
    pl.atomic_add(o_ref, where, x_ref[...])


BAD = [used, two_ways, halved, started_again, started_late, started_by_columns]


@pytest.mark.parametrize("body", BAD, ids=lambda f: f.__name__)
def test_refused(body):
    axes = 2 if body is started_by_columns else 1
    assert commuting_steps(kernel_of(body, axes, BLOCK)) is None


def test_sequential_forbids_it():
    params = pltpu.CompilerParams(dimension_semantics=("sequential",))
    kernel = kernel_of(*BODIES["aliased"], compiler_params=params)
    assert commuting_steps(kernel) is None


def scatter(rows, width, slots):
    made = pl.pallas_call(
        aliased,
        out_shape=jax.ShapeDtypeStruct((slots, width), F32),
        grid=(rows // 8,),
        in_specs=[
            pl.BlockSpec((8,), lambda i: (i,)),
            pl.BlockSpec((8, width), lambda i: (i, 0)),
            WHOLE,
        ],
        out_specs=WHOLE,
        input_output_aliases={2: 0},
    )
    shapes = ((rows,), I32), ((rows, width), F32), ((slots, width), F32)
    return sites.kernels_in(made, *(jax.ShapeDtypeStruct(*s) for s in shapes))[0]


def test_plan():
    found = plan(scatter(65536, 512, 8192), GPUS["h200"])
    assert found.kind == "atomics in any order" and found.parts == 8192
    # Where nobody reads, other memory need not be visible.
    text, _ = harness.compiled(found.program.kernels[0])
    assert "atomic_rmw fadd, relaxed, gpu" in text


def in_a_loop(ids_ref, x_ref, before_ref, o_ref):
    width = x_ref.shape[1]

    def step(i, _):
        rows = pl.ds(8 * i, 8)
        columns = lax.broadcasted_iota(I32, (8, width), 1)
        where = jnp.broadcast_to(ids_ref[rows][:, None], (8, width)), columns
        pl.atomic_add(o_ref, where, x_ref[rows])

    lax.fori_loop(0, x_ref.shape[0] // 8, step, None)


def in_a_pipeline(ids_ref, x_ref, before_ref, o_ref):
    def step(ids_ref, x_ref):
        pl.atomic_add(o_ref, places(ids_ref, x_ref), x_ref[...])

    specs = [
        pl.BlockSpec((8,), lambda i: (i,)),
        pl.BlockSpec((8, x_ref.shape[1]), lambda i: (i, 0)),
    ]
    grid = (x_ref.shape[0] // 8,)
    pltpu.emit_pipeline(step, grid=grid, in_specs=specs)(ids_ref, x_ref)


@pytest.mark.parametrize("body", [in_a_loop, in_a_pipeline], ids=lambda f: f.__name__)
def test_loops_are_steps(body):
    def kernel(rows, width, slots):
        shapes = ((rows,), I32), ((rows, width), F32), ((slots, width), F32)
        structs = [jax.ShapeDtypeStruct(*s) for s in shapes]
        made = pl.pallas_call(
            body,
            out_shape=structs[-1],
            in_specs=[WHOLE] * 3,
            out_specs=WHOLE,
            input_output_aliases={2: 0},
        )
        return sites.kernels_in(made, *structs)[0]

    assert plan(kernel(65536, 512, 8192), GPUS["h200"]).parts == 8192
    small = kernel(24, 16, 7)
    program = plan(small, GPUS["h200"]).program
    assert program is not None
    given = arrays(small)
    (expected,) = evaluate(small, given)
    np.testing.assert_array_equal(evaluate_program(program, given)[0], expected)
