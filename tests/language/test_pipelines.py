"""Pipelines inside kernels: shared by cores, over trees of refs, with allocations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import SpecError
from pallasite.passes.run import run
from pallasite.sites import kernels_in

S = jax.ShapeDtypeStruct
f32 = jnp.float32
X = np.arange(6 * 128, dtype=np.float32).reshape(6, 128)
HBM = pl.BlockSpec(memory_space=pltpu.HBM)
ROW = pl.BlockSpec((1, 128), lambda i: (i, 0))
MODES = pytest.mark.parametrize(
    "mode", [False, True, pl.Checked()], ids=["cpu", "emulated", "checked"]
)


def over_rows(kernel, *args, **kw):
    specs = dict(in_specs=[HBM] * len(args), out_specs=HBM)
    return pl.pallas_call(kernel, out_shape=S(X.shape, f32), **specs, **kw)(*args)


# --- cores ---


def test_a_pipeline_on_one_core_is_a_grid():
    mesh = pltpu.create_tensorcore_mesh("core")

    @pl.kernel(out_type=S(X.shape, f32), mesh=mesh)
    def kernel(x_ref, o_ref):
        def step(xb_ref, ob_ref):
            ob_ref[...] = 2 * xb_ref[...]

        pltpu.emit_pipeline(step, grid=(6,), in_specs=[ROW], out_specs=ROW)(
            x_ref, o_ref
        )

    np.testing.assert_array_equal(kernel(X), 2 * X)
    (found,) = kernels_in(kernel, X)
    assert "grid=(1, 6), windows=(in[1, 128], out[1, 128])" in run(found).text


@MODES
@pytest.mark.parametrize("rows", [6, 5])
def test_cores_share_the_steps_of_a_parallel_axis(mode, rows):
    """Each step adds to what is there, so that one run twice would show."""
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)

    @pl.kernel(out_type=S((rows, 128), f32), mesh=mesh, interpret=mode)
    def kernel(x_ref, o_ref):
        def step(x_ref, o_ref):
            @pl.when(pl.program_id(1) == 0)
            def _():
                o_ref[...] = jnp.zeros_like(o_ref)

            o_ref[...] += x_ref[...] + pl.program_id(0) + 10 * lax.axis_index("core")

        pltpu.emit_pipeline(
            step,
            grid=(rows, 2),
            in_specs=[pl.BlockSpec((1, 128), lambda i, j: (i, 0))],
            out_specs=pl.BlockSpec((1, 128), lambda i, j: (i, 0)),
            core_axis_name="core",
            dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
        )(x_ref, o_ref)

    place = np.arange(rows)[:, None]
    core = place // 3
    np.testing.assert_array_equal(kernel(X[:rows]), 2 * (X[:rows] + place + 10 * core))


def test_cores_need_a_parallel_axis_to_share():
    def kernel(x_ref, o_ref):
        def step(x_ref, o_ref):
            o_ref[...] = x_ref[...]

        pltpu.emit_pipeline(
            step, grid=(6,), in_specs=[ROW], out_specs=[ROW], core_axis=0
        )(x_ref, o_ref)

    np.testing.assert_array_equal(over_rows(kernel, X, grid=(1,)), X)
    with pytest.raises(SpecError, match="split a pipeline only along a parallel axis"):
        over_rows(kernel, X, grid=(2,))


# --- grids ---


def test_grid_sizes_are_python_ints_where_they_are_known():
    @jax.jit
    def add_sizes(x):  # traced once per grid, though it is one function
        return x + pl.num_programs(0)

    def kernel(x_ref, o_ref):
        assert pl.num_programs(0) == 6
        o_ref[...] = add_sizes(x_ref[...])

    def with_columns(x_ref, o_ref):
        o_ref[...] = add_sizes(x_ref[...]) + pl.num_programs(1)

    last_first = lambda i: (pl.num_programs(0) - 1 - i, 0)
    specs = dict(in_specs=[pl.BlockSpec((1, 128), last_first)], out_specs=ROW)
    call = pl.pallas_call(kernel, out_shape=S(X.shape, f32), grid=6, **specs)
    np.testing.assert_array_equal(call(X), X[::-1] + 6)

    def with_any_rank(x_ref, o_ref):
        places = []
        with pytest.raises(ValueError, match="the grid has 2 axes"):
            while True:
                places.append(pl.program_id(len(places)))
        o_ref[...] = x_ref[...] + sum(places)

    whole = dict(out_shape=S(X.shape, f32), grid=(3, 1))
    np.testing.assert_array_equal(pl.pallas_call(with_any_rank, **whole)(X), X + 2)
    np.testing.assert_array_equal(pl.pallas_call(with_columns, **whole)(X), X + 4)

    @jax.jit
    def sized(x, n):
        out = S(X.shape, f32)
        return pl.pallas_call(
            lambda x_ref, o_ref: kernel_of_any_size(x_ref, o_ref),
            out_shape=out,
            grid=(n,),
            **specs,
        )(x)

    def kernel_of_any_size(x_ref, o_ref):
        assert not isinstance(pl.num_programs(0), int)
        o_ref[...] = x_ref[...] + pl.num_programs(0)

    np.testing.assert_array_equal(sized(X, 6), X[::-1] + 6)


def test_grid_specs_keep_lists_as_tuples():
    spec = pl.GridSpec((6,), in_specs=[ROW, [ROW]], out_specs=[ROW])
    assert (spec.in_specs, spec.out_specs) == ((ROW, [ROW]), (ROW,))
    assert pl.GridSpec((6,), in_specs=ROW).in_specs is ROW


# --- refs in trees, refs without blocks, blocks that stay in main memory ---


@MODES
def test_bodies_get_the_structure_of_the_specs(mode):
    def kernel(x_ref, y_ref, unused_ref, o_ref):
        def step(pair, nothing, out):
            assert nothing is None
            out["o"][...] = pair[0][...] - pair[1][...]

        pltpu.emit_pipeline(
            step, grid=(6,), in_specs=((ROW, ROW), pl.no_block_spec),
            out_specs=({"o": ROW},),
        )((x_ref, y_ref), unused_ref, {"o": o_ref})  # fmt: skip

    got = over_rows(kernel, 3 * X, X, X, interpret=mode)
    np.testing.assert_array_equal(got, 2 * X)


@MODES
def test_blocks_in_main_memory_are_copied_from(mode):
    def kernel(x_ref, o_ref):
        row_in_hbm = pl.BlockSpec((1, 128), lambda i: (i, 0), memory_space=pltpu.HBM)
        all_in_hbm = pl.BlockSpec(X.shape, lambda i: (0, 0), memory_space=pltpu.HBM)

        @functools.partial(
            pltpu.emit_pipeline, grid=(6,), in_specs=row_in_hbm, out_specs=all_in_hbm
        )
        def pipeline(x_ref, o_ref):
            pltpu.sync_copy(x_ref, o_ref.at[pl.ds(pl.program_id(0), 1)])

        pipeline(x_ref, o_ref)

    np.testing.assert_array_equal(over_rows(kernel, X, interpret=mode), X)


# --- allocations, as upstream's kernels make them ---


def test_pipelines_take_upstream_allocations():
    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    def kernel(x_ref, o_ref):
        pipeline, allocate = pltpu.emit_pipeline_with_allocations(
            double, grid=(6,), in_specs=[ROW], out_specs=[ROW]
        )

        @functools.partial(pl.run_scoped, allocations=allocate(x_ref, o_ref))
        def _(allocations):
            x_blocks, o_blocks = allocations
            assert x_blocks.spec is ROW
            assert x_blocks.dtype == f32
            pipeline(x_ref, o_ref, allocations=(x_blocks, o_blocks))

    np.testing.assert_array_equal(over_rows(kernel, X), 2 * X)


@MODES
def test_specs_may_come_with_the_allocations(mode):
    """An input_output block shows what is in main memory."""

    def kernel(x_ref, _, o_ref, x_blocks, o_blocks):
        def add(x_ref, o_ref):
            o_ref[...] += x_ref[...]

        pipeline = pltpu.emit_pipeline(add, grid=(6,))
        pipeline(x_ref, o_ref, allocations=[x_blocks, o_blocks])

    scratch = [
        pltpu.BufferedRef.input(ROW, f32),
        pltpu.BufferedRef.input_output(ROW, f32),
    ]
    aliased = dict(input_output_aliases={1: 0}, scratch_shapes=scratch)
    got = over_rows(kernel, X, jnp.asarray(3 * X), interpret=mode, **aliased)
    np.testing.assert_array_equal(got, 4 * X)
