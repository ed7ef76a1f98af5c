"""An operand and a result that are the same memory, through blocks of both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.backends.tpu.aliased import join_aliased
from pallasite.errors import UnsupportedError
from pallasite.passes.run import run as run_passes
from pallasite.sites import kernels_in
from tests.backends.tpu import harness
from tests.fuzz.agreement import run_numpy

ROWS, LANES = 8, 128
X = np.arange(4 * ROWS * LANES, dtype=np.float32).reshape(-1, LANES)
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)
BLOCK = (ROWS, LANES)
TABLE = np.array([2, 2, 0, 3, 0, 0], np.int32)


def one_row(x_ref, o_ref):
    o_ref[0, :] = x_ref[0, :] + 1


def one_row_of_the_result(x_ref, o_ref):
    o_ref[0, :] = o_ref[1, :] + 1


def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


def read_again(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1
    o_ref[...] = o_ref[...] + x_ref[...]


def nothing(x_ref, o_ref):
    pass


def read_in_a_loop(x_ref, o_ref):
    def step(i, carry):
        o_ref[...] = x_ref[...] + i
        return carry

    jax.lax.fori_loop(0, 3, step, 0)


def call(kernel, grid, index_map, in_spec=None):
    spec = pl.BlockSpec(BLOCK, index_map)
    return pl.pallas_call(
        kernel,
        out_shape=SHAPE,
        grid=grid,
        in_specs=[in_spec or spec],
        out_specs=spec,
        input_output_aliases={0: 0},
        interpret=True,
    )


def looked_up(kernel):
    spec = pl.BlockSpec(BLOCK, lambda i, table: (table[i], 0))
    return pl.pallas_call(
        lambda table, *refs: kernel(*refs),
        out_shape=SHAPE,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=len(TABLE), in_specs=[spec], out_specs=spec
        ),
        input_output_aliases={1: 0},
        interpret=True,
    )


def check(function, *arrays):
    (kernel,) = kernels_in(function, *arrays)
    kernel = run_passes(kernel)
    want = run_numpy(kernel, arrays)
    for got, right in zip(harness.simulated(kernel, arrays), want, strict=True):
        np.testing.assert_array_equal(got, right)
    for got, right in zip(run_numpy(join_aliased(kernel), arrays), want, strict=True):
        np.testing.assert_array_equal(got, right)
    return kernel


KERNELS = (one_row, one_row_of_the_result, add_one, read_again, nothing, read_in_a_loop)
GRIDS = {
    "each once": (4, lambda i: (i, 0)),
    "each twice in turn": ((4, 2), lambda i, j: (i, 0)),
    "each again later": ((2, 4), lambda i, j: (j, 0)),
    "halves": (8, lambda i: (i // 2, 0)),
    "clamped": (6, lambda i: (i - 1, 0)),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_operand_and_result_are_one_memory(kernel, grid):
    check(call(kernel, *GRIDS[grid]), X)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_blocks_that_are_looked_up(kernel):
    check(looked_up(kernel), TABLE, X)


def test_result_starts_out_as_an_operand_without_a_window():
    whole = pl.BlockSpec(memory_space=pl.ANY)
    check(call(one_row_of_the_result, 4, lambda i: (i, 0), whole), X)


def test_result_starts_out_as_an_operand_with_other_blocks():
    other = pl.BlockSpec(BLOCK, lambda i: (0, 0))
    check(call(one_row_of_the_result, 4, lambda i: (i, 0), other), X)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_one_program_and_one_block_of_several(kernel):
    check(call(kernel, (), lambda: (2, 0)), X)


def test_fill_value_is_read_outside_after_a_store():
    x = np.arange(12 * LANES, dtype=np.float32).reshape(12, LANES)

    def kernel(x_ref, o_ref):
        o_ref[0, :] = x_ref[1, :] + x_ref[...].sum(0)

    function = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=2,
        in_specs=[pl.BlockSpec(BLOCK, lambda i: (i, 0), fill=2.0)],
        out_specs=pl.BlockSpec(BLOCK, lambda i: (i, 0)),
        input_output_aliases={0: 0},
        interpret=True,
    )
    check(function, x)


def test_blocks_that_could_not_be_told_apart_stay_apart():
    """The usual update in place costs no copy, nor does a sum over steps."""

    def total(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros(BLOCK)

        o_ref[...] += 1.0

    for kernel in (
        check(call(add_one, 4, lambda i: (i, 0)), X),
        check(call(total, (4, 2), lambda i, j: (i, 0)), X),
    ):
        assert join_aliased(kernel) is kernel


def test_reading_what_an_earlier_program_stored_through_other_blocks_is_refused():
    function = call(
        add_one, 4, lambda i: (i, 0), pl.BlockSpec(BLOCK, lambda i: (3 - i, 0))
    )
    with pytest.raises(UnsupportedError) as error:
        check(function, X)
    text = str(error.value)
    assert "input 0 ('x_ref') and output 0 ('o_ref') alias" in text
    assert "program (3,) reads what program (0,) stores" in text
    assert "the same BlockSpec" in text


def test_reading_other_blocks_before_they_are_stored():
    """Each program reads what a later one stores."""
    one_later = pl.BlockSpec(BLOCK, lambda i: (i + 1, 0))
    check(call(add_one, 3, lambda i: (i, 0), one_later), X)
