"""Parts of large arrays in main memory: what is copied means what was loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.backends.base import Compiled, Options, get
from pallasite.backends.tpu import fetch_slices, resident
from pallasite.backends.tpu.order_axes import order_axes
from pallasite.ir.roles import Pipeline
from tests.backends.tpu.bounds import outside
from tests.backends.tpu.harness import random_arrays, run_compiled
from tests.backends.tpu.test_fit import array, kernel_of
from tests.fuzz.agreement import run_numpy

ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
IDS = pl.BlockSpec((8,), lambda i: (i,))


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(resident, "MOST_BYTES", 0)


def assert_copied(kernel, arrays):
    """The simulator's results are numpy's, by copies that stay inside."""
    compiled = Compiled(get("tpu"), kernel, Options(), shared=())
    assert "copy_start" in compiled.scheduled.text
    assert not outside(compiled)
    got, want = run_compiled(compiled, arrays), run_numpy(kernel, arrays)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def numbered(kernel, ids):
    """Operands of which the first are numbers of rows."""
    return [np.asarray(ids, np.int32), *random_arrays(kernel)[1:]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rows", [64, 50])
def test_rows_by_an_index_array(rows, dtype):
    def f(ids_ref, table_ref, o_ref):
        o_ref[...] = table_ref[ids_ref[...], :]

    out = pl.BlockSpec((8, 128), lambda i: (i, 0))
    call = pl.pallas_call(f, out_shape=array(16, 128, dtype=dtype), grid=(2,),
                          in_specs=[IDS, ANYWHERE], out_specs=out)  # fmt: skip
    kernel = kernel_of(call, array(16, dtype=jnp.int32), array(rows, 128, dtype=dtype))
    ids = [0, 1, 7, 8, 31, 32, 47, 48, rows - 1, -1, -2, 49, 5, 3, 20, 33]
    assert_copied(kernel, numbered(kernel, np.clip(ids, -rows, rows - 1)))


@pytest.mark.parametrize("size", [3, 8])
def test_slices_that_start_anywhere(size):
    def f(starts_ref, x_ref, o_ref):
        x = x_ref[pl.ds(starts_ref[pl.program_id(0)], size), :]
        o_ref[...] = x.sum(axis=0)[None, None, :]

    spec = pl.BlockSpec((1, 1, 256), lambda i, _: (i, 0, 0))
    call = pl.pallas_call(
        f, out_shape=array(4, 1, 256),
        grid_spec=pltpu.PrefetchScalarGridSpec(1, (4,), [ANYWHERE], spec),
    )  # fmt: skip
    kernel = kernel_of(call, array(4, dtype=jnp.int32), array(21, 256))
    assert_copied(kernel, numbered(kernel, [0, 5, 9, 99]))


def test_a_masked_slice_past_the_end():
    def f(starts_ref, x_ref, o_ref):
        start = starts_ref[0] + 4 * pl.program_id(0)
        inside = start + jax.lax.broadcasted_iota(jnp.int32, (8, 128), 0) < 21
        o_ref[...] = pl.load(x_ref, (pl.ds(start, 8), slice(None)), mask=inside,
                             other=0.0)  # fmt: skip

    out = pl.BlockSpec((8, 128), lambda i, _: (i, 0))
    call = pl.pallas_call(
        f, out_shape=array(32, 128),
        grid_spec=pltpu.PrefetchScalarGridSpec(1, (4,), [ANYWHERE], out),
    )  # fmt: skip
    kernel = kernel_of(call, array(1, dtype=jnp.int32), array(21, 128))
    assert_copied(kernel, numbered(kernel, [6]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stores_of_rows_and_of_lanes(dtype):
    def f(ids_ref, x_ref, o_ref):
        for n in range(8):
            o_ref[ids_ref[n], 128:256] = x_ref[n, :]
            o_ref[ids_ref[n] + 1, 0:128] = 2 * x_ref[n, :]

    x = pl.BlockSpec((8, 128), lambda i: (i, 0))
    smem = pl.BlockSpec((8,), lambda i: (i,), memory_space=pltpu.SMEM)
    call = pl.pallas_call(f, out_shape=array(32, 256, dtype=dtype), grid=(2,),
                          in_specs=[smem, x], out_specs=ANYWHERE)  # fmt: skip
    operands = array(16, dtype=jnp.int32), array(16, 128, dtype=dtype)
    kernel = kernel_of(call, *operands)
    ids = np.arange(16)[::-1] * 2
    arrays = numbered(kernel, ids)
    compiled = Compiled(get("tpu"), kernel, Options(), shared=())
    assert not outside(compiled)
    (got,), (want,) = run_compiled(compiled, arrays), run_numpy(kernel, arrays)
    np.testing.assert_array_equal(got[ids, 128:], want[ids, 128:])
    np.testing.assert_array_equal(got[ids + 1, :128], want[ids + 1, :128])


@pytest.mark.parametrize("spelling", ["rows", "elements"])
def test_atomics_of_rows(spelling):
    def f(ids_ref, x_ref, zero_ref, o_ref):
        del zero_ref
        ids = ids_ref[...]
        if spelling == "rows":
            pl.atomic_add(o_ref, (ids, slice(None)), x_ref[...])
            return
        columns = jax.lax.broadcasted_iota(jnp.int32, (8, 128), 1)
        where = jnp.broadcast_to(ids[:, None], (8, 128))
        pl.atomic_add(o_ref, (where, columns), x_ref[...])

    x = pl.BlockSpec((8, 128), lambda i: (i, 0))
    call = pl.pallas_call(
        f, out_shape=array(20, 128), grid=(2,), in_specs=[IDS, x, ANYWHERE],
        out_specs=ANYWHERE, input_output_aliases={2: 0},
    )  # fmt: skip
    shapes = array(16, dtype=jnp.int32), array(16, 128), array(20, 128)
    kernel = kernel_of(call, *shapes)
    ids = [3, 3, 0, 19, 3, 7, 8, 19, 1, 2, 3, 4, 5, 6, 7, 8]
    assert_copied(kernel, numbered(kernel, ids))


SHAPES = [((64, 128), False), ((4096,), False), ((6, 8, 128), False)]


@pytest.mark.parametrize("shape, viewed", [*SHAPES, ((6, 8, 128), True)])
def test_blocks_without_room_stay_in_main_memory(shape, viewed, monkeypatch):
    """A running sum from the end to the start, in one program."""
    monkeypatch.setattr(fetch_slices, "ROOM", 1e-4)  # 13 KB
    steps, size = (4, shape[0] // 4) if len(shape) < 3 else (6, None)

    def f(x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        def step(n, total):
            at = steps - 1 - n
            part = at if size is None else pl.ds(at * size, size)
            total = total + (x_ref.at[part][...] if viewed else x_ref[part])
            o_ref[part] = total
            return total

        zero = jnp.zeros(shape[1:] if size is None else (size, *shape[1:]), jnp.float32)
        jax.lax.fori_loop(0, steps, step, zero)

    call = pl.pallas_call(f, out_shape=array(*shape))
    kernel = kernel_of(call, array(*shape))
    assert_copied(kernel, random_arrays(kernel))


def test_results_entered_again_are_visited_one_after_another():
    """k is the first axis of the grid, and the result too large to stay on the chip."""

    def f(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] * y_ref[...]

    block = lambda where: pl.BlockSpec((8, 128), where)
    call = pl.pallas_call(
        f, out_shape=array(1024, 1024), grid=(2, 128, 8),
        in_specs=[block(lambda k, i, j: (i, k)), block(lambda k, i, j: (k, j))],
        out_specs=block(lambda k, i, j: (i, j)),
    )  # fmt: skip
    kernel = kernel_of(call, array(1024, 256), array(16, 1024))
    ordered = order_axes(kernel)
    assert Pipeline.of(ordered.body.ops[-1]).grid == (128, 8, 2)
    arrays = random_arrays(kernel)
    for got, want in zip(run_numpy(ordered, arrays), run_numpy(kernel, arrays),
                         strict=True):  # fmt: skip
        np.testing.assert_array_equal(got, want)
    assert order_axes(ordered) is ordered
