"""A block number out of range is the nearest one, on every backend.

Each case is a kernel with one input and one output over ten programs, whose index maps
leave the arrays on one side or both. Results are written down by hand, in numpy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.passes.run import run as run_passes
from pallasite.sites import kernels_in
from tests.backends.cpu.direct import Code, Guarded
from tests.backends.tpu import harness as tpu
from tests.backends.triton import harness as triton

BLOCKS, ROWS, LANES = 6, 8, 128
X = np.arange(BLOCKS * ROWS * LANES, dtype=np.float32).reshape(-1, LANES)
START = -X
PROGRAMS = 10

MAPS = {
    "past the end": lambda i: i + 2,
    "before the first": lambda i: i - 2,
    "every second": lambda i: 2 * i + 1,
    "backwards": lambda i: 7 - i,
    "far away": lambda i: (i - 4) * 2**27,
    "always too far": lambda i: 40,
    "always below": lambda i: -1,
}


def engine_results(name, function, arrays):
    if name == "emulation":
        return [np.asarray(jax.jit(function)(*arrays))]
    (kernel,) = kernels_in(function, *arrays)
    kernel = run_passes(kernel)
    if name == "cpu":
        return Code(kernel, memory=Guarded())(*arrays)
    return {"triton": triton, "tpu": tpu}[name].simulated(kernel, arrays)


each_engine = pytest.mark.parametrize("engine", ["emulation", "cpu", "triton", "tpu"])
each_map = pytest.mark.parametrize("name", MAPS)


def add_program(x_ref, _, o_ref):
    o_ref[...] = x_ref[...] + pl.program_id(0).astype(jnp.float32)


def call(in_map, out_map):
    block = (ROWS, LANES)
    return pl.pallas_call(
        add_program,
        out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype),
        grid=PROGRAMS,
        in_specs=[
            pl.BlockSpec(block, lambda i: (in_map(i), 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(block, lambda i: (out_map(i), 0)),
        input_output_aliases={1: 0},
        interpret=True,
    )


def nearest(index):
    return slice(ROWS * np.clip(index, 0, BLOCKS - 1), None)


def wanted(in_map, out_map):
    result = START.copy()
    for i in range(PROGRAMS):
        seen = X[nearest(np.clip(in_map(i), -9, 99))][:ROWS]
        result[nearest(np.clip(out_map(i), -9, 99))][:ROWS] = seen + i
    return result


@each_engine
@each_map
def test_input_block(name, engine):
    blocks = MAPS[name], lambda i: i % BLOCKS
    (got,) = engine_results(engine, call(*blocks), (X, START))
    np.testing.assert_array_equal(got, wanted(*blocks))


@each_engine
@each_map
def test_output_block(name, engine):
    """The last program that is moved to a block leaves its result there."""
    blocks = lambda i: i % BLOCKS, MAPS[name]
    (got,) = engine_results(engine, call(*blocks), (X, START))
    np.testing.assert_array_equal(got, wanted(*blocks))


@each_engine
def test_block_from_a_prefetched_scalar(engine):
    table = np.array([-1, 99, 3, 2**31 - 1, -(2**31), 5, 6, 0, 1, 4], np.int32)

    def kernel(table_ref, *refs):
        add_program(*refs)

    block = (ROWS, LANES)
    looked_up = pl.BlockSpec(block, lambda i, table_ref: (table_ref[i], 0))
    function = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=PROGRAMS,
            in_specs=[looked_up, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=looked_up,
        ),
        input_output_aliases={2: 0},
        interpret=True,
    )
    (got,) = engine_results(engine, function, (table, X, START))
    entry = lambda i: int(table[i])
    np.testing.assert_array_equal(got, wanted(entry, entry))


@each_engine
@pytest.mark.parametrize("name", ["past the end", "before the first", "backwards"])
def test_block_of_an_inner_pipeline(name, engine):
    def kernel(x_ref, _, o_ref):
        block = pl.BlockSpec((ROWS, LANES), lambda i: (MAPS[name](i), 0))
        body = lambda x_block, o_block: add_program(x_block, None, o_block)
        pltpu.emit_pipeline(body, grid=PROGRAMS, in_specs=[block], out_specs=[block])(
            x_ref, o_ref
        )

    whole = pl.BlockSpec(memory_space=pl.ANY)
    function = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype),
        in_specs=[whole, whole],
        out_specs=whole,
        input_output_aliases={1: 0},
        interpret=True,
    )
    (got,) = engine_results(engine, function, (X, START))
    np.testing.assert_array_equal(got, wanted(MAPS[name], MAPS[name]))


@each_engine
@pytest.mark.parametrize("name", ["past the end", "before the first", "far away"])
def test_first_element_in_the_padding(name, engine):
    """Elements are clamped to the array and its padding, where the fill value is."""
    size, padding = 2, (3, 4)
    x = np.arange(5.0 * ROWS * LANES, dtype=np.float32).reshape(5, ROWS, LANES)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec(
        (pl.Element(size, padding), ROWS, LANES),
        lambda i: (MAPS[name](2 * i), 0, 0),
        fill=-1.0,
    )
    function = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((size * PROGRAMS, ROWS, LANES), x.dtype),
        grid=PROGRAMS,
        in_specs=[spec],
        out_specs=pl.BlockSpec((size, ROWS, LANES), lambda i: (i, 0, 0)),
        interpret=True,
    )
    (got,) = engine_results(engine, function, (x,))
    padded = np.pad(x, [padding, (0, 0), (0, 0)], constant_values=-1.0)
    longer = np.pad(padded, [(0, size), (0, 0), (0, 0)], constant_values=-1.0)
    for i in range(PROGRAMS):
        first = np.clip(MAPS[name](2 * i), 0, len(padded) - 1)
        np.testing.assert_array_equal(
            got[size * i : size * (i + 1)], longer[first : first + size]
        )
