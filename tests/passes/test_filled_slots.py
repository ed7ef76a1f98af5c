"""Buffers that copies fill ahead by hand are loads of where they copy from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.verify import verify
from pallasite.passes.lower.filled_slots import filled_slots
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.fuzz.agreement import run_numpy

ROWS, PART = 3, 5
ANY = pl.BlockSpec(memory_space=pl.ANY)


def summed(parts=6, slots=2, ahead=1, dtype=jnp.float32, **other) -> Kernel:
    """Squares of rows in parts, of which some are copied ahead.

    `other` changes what a part is filled with, whether it is, and what is read:
    functions of its number.
    """
    filled = other.get("filled", lambda c: c)
    is_filled = other.get("is_filled", lambda c: c < parts)
    early, read = other.get("early", lambda c: c), other.get("read", lambda c: c)

    def kernel(x_ref, o_ref, buf_ref, sem):
        i = pl.program_id(0)

        def copy(c, slot, part):
            where = x_ref.at[pl.ds(i * ROWS, ROWS), pl.ds(part * PART, PART)]
            return pltpu.make_async_copy(where, buf_ref.at[slot], sem.at[slot])

        for c in range(ahead):
            copy(c, c % slots, early(c)).start()

        def step(c, acc):
            @pl.when(is_filled(c + ahead))
            def _():
                copy(c + ahead, (c + ahead) % slots, filled(c + ahead)).start()

            copy(c, c % slots, filled(c)).wait()
            x = buf_ref[read(c) % slots].astype(jnp.float32)
            return acc + jnp.sum(x * x, axis=1, keepdims=True)

        o_ref[...] = jax.lax.fori_loop(0, parts, step, jnp.zeros((ROWS, 1)))

    shape = jax.ShapeDtypeStruct((2 * ROWS, parts * PART), dtype)
    scratch = [pltpu.VMEM((slots, ROWS, PART), dtype)]
    scratch += [pltpu.SemaphoreType.DMA((slots,))]
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((2 * ROWS, 1), jnp.float32),
        grid=(2,),
        in_specs=[ANY],
        out_specs=pl.BlockSpec((ROWS, 1), lambda i: (i, 0)),
        scratch_shapes=scratch,
    )
    (found,) = kernels_in(call, shape)
    return run(found)


def allocated(kernel: Kernel) -> list[str]:
    return [str(op.result.type) for op in walk(kernel.body) if op.name == "alloc"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize(
    "parts, slots, ahead", [(6, 2, 1), (5, 2, 1), (7, 3, 2), (7, 4, 2)]
)
def test_parts_are_loaded_where_they_lie(parts, slots, ahead, dtype):
    kernel = summed(parts, slots, ahead, dtype)
    after = filled_slots(kernel)
    verify(after)
    assert not allocated(after) and "cond" not in after.text
    x = np.random.default_rng(0).integers(-9, 9, (2 * ROWS, parts * PART))
    (got,) = run_numpy(after, [x.astype(dtype)])
    np.testing.assert_array_equal(got[:, 0], (x * x).sum(1))


@pytest.mark.parametrize(
    "other",
    [
        {"ahead": 2},  # what is read was filled again
        {"is_filled": lambda c: c < 5},  # the last part is what was there before
        {"early": lambda c: c + 1},  # the first part is another
        {"filled": lambda c: (c * c) % 6},  # the first ones differ
        {"slots": 4, "ahead": 2, "read": lambda c: c + 3},  # read before it is filled
    ],
    ids=["ahead", "is_filled", "early", "filled", "read"],
)
def test_what_is_read_is_not_what_was_copied(other):
    kernel = summed(**other)
    assert filled_slots(kernel) is kernel


def test_pages_that_a_table_names():
    """As many as a length says; the table names those that are copied."""
    pages, depth = 8, 4

    def kernel(lengths_ref, table_ref, x_ref, o_ref, buf_ref, sem):
        i = pl.program_id(0)
        count = lengths_ref[i]

        def copy(n):
            slot = jax.lax.rem(n, 2)
            page = x_ref.at[table_ref[i, n]]
            return pltpu.make_async_copy(page, buf_ref.at[slot], sem.at[slot])

        copy(0).start()

        def step(n, acc):
            @pl.when(n + 1 < count)
            def _():
                copy(n + 1).start()

            copy(n).wait()
            return acc + buf_ref[jax.lax.rem(n, 2)]

        zero = jnp.zeros((ROWS, depth))
        o_ref[0] = jax.lax.fori_loop(0, count, step, zero)

    i32 = jnp.int32
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(2,),
        in_specs=[ANY],
        out_specs=pl.BlockSpec((1, ROWS, depth), lambda i, *_: (i, 0, 0)),
        scratch_shapes=[
            pltpu.VMEM((2, ROWS, depth), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )
    out = jax.ShapeDtypeStruct((2, ROWS, depth), jnp.float32)
    call = pl.pallas_call(kernel, out, grid_spec=spec)
    shapes = [((2,), i32), ((2, 5), i32), ((pages, ROWS, depth), jnp.float32)]
    (found,) = kernels_in(call, *(jax.ShapeDtypeStruct(*each) for each in shapes))
    after = filled_slots(run(found))
    verify(after)
    assert not allocated(after)
    rng = np.random.default_rng(1)
    lengths = np.array([5, 1], np.int32)
    table = rng.integers(0, pages, (2, 5)).astype(np.int32)
    x = rng.integers(-9, 9, shapes[2][0]).astype(np.float32)
    (got,) = run_numpy(after, [lengths, table, x])
    want = [x[table[i, :n]].sum(0) for i, n in enumerate(lengths)]
    np.testing.assert_array_equal(got, want)
