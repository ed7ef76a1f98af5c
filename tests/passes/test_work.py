"""work: counts of zoo kernels and of kernels built by hand, against counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.backends import base
from pallasite.passes.analysis.work import Work, count
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.forms.form import SIZES
from tests.forms.pairs import call_of
from tests.forms.spellings import BASES, Spelling
from tests.ir import kernels
from tests.zoo import all_cases

F32 = 4  # bytes


def work_of(function, *operands) -> Work:
    (kernel,) = kernels_in(function, *operands)
    return count(run(kernel))


def work_in_zoo(name: str) -> Work:
    (case,) = (case for case in all_cases() if case.name == name)
    return work_of(case.run, *case.make_args(np.random.default_rng(0)))


# Per kernel: operations of products, other operations on floats, transcendentals,
# bytes copied, bytes touched. The sizes are those of the zoo's arguments.
BY_HAND = {
    # x + y of 1024 numbers
    "add_vectors": (0, 1024, 0, 3 * 1024 * F32, 3 * 1024 * F32),
    # 3 - 2 x + x x in 11 blocks of 96; 1003 numbers are read and written
    "odd_parabola": (0, 4 * 11 * 96, 0, 2 * 1003 * F32, 2 * 1003 * F32),
    # 3 x 4 blocks of 16 x 32; the row of 100 is read again for each of 3 bands
    "bias_residual": (
        0,
        3 * 12 * 16 * 32,
        0,
        (3 * 37 * 100 + 3 * 100) * F32,
        (3 * 37 * 100 + 100) * F32,
    ),
    # 4 bands of 16 x 80: maximum, difference, sum, quotient
    "row_softmax": (0, 4 * 4 * 16 * 80, 4 * 16 * 80, 2 * 4000 * F32, 2 * 4000 * F32),
    # two sums, difference, square, three more per element; two quotients and an
    # addition per row; scale and shift are read once
    "layer_norm": (
        0,
        7 * 32 * 96 + 3 * 32,
        32,
        (2 * 32 * 96 + 2 * 96 + 2 * 32) * F32,
        (2 * 32 * 96 + 2 * 96 + 2 * 32) * F32,
    ),
    # the maximum of 24 x 20 x 8 numbers, four at a time
    "max_pool": (0, 24 * 20 * 8, 0, 1.25 * 3840 * F32, 1.25 * 3840 * F32),
    # 64 x 96 x 64 in blocks of 32: each side is read twice
    "matmul_accumulate": (
        2 * 64 * 96 * 64,
        3 * 64 * 64,
        0,
        (2 * 2 * 64 * 96 + 64 * 64) * F32,
        (2 * 64 * 96 + 64 * 64) * F32,
    ),
    # 3 x 4 blocks of 16 x 16, over the edges of 40 x 56; rows are read once,
    # columns for each of 3 bands
    "matmul_transposed_rhs": (
        2 * 12 * 16 * 16 * 48,
        0,
        0,
        (40 * 48 + 3 * 56 * 48 + 40 * 56) * F32,
        (40 * 48 + 56 * 48 + 40 * 56) * F32,
    ),
    # 2 heads of 64 x 16, queries by 16 and keys by 32; keys for each of 4 bands
    "flash_scratch": (
        2 * 2 * 2 * 64 * 64 * 16,
        None,
        2 * (64 * 64 + 2 * 64),
        2 * (2 * 64 * 16 + 4 * 2 * 64 * 16) * F32,
        4 * 2 * 64 * 16 * F32,
    ),
    # queries by 32 and keys by 16: of 8 pairs of blocks, 2 + 4 are not masked
    "flash_scratch_causal": (
        2 * 6 * 2 * 2 * 32 * 16 * 16,
        None,
        2 * 6 * (32 * 16 + 32),
        2 * (2 * 64 * 16 + 2 * 2 * 64 * 16) * F32,
        4 * 2 * 64 * 16 * F32,
    ),
    # the guard at the last step of 2 runs the activation once per element
    "matmul_bias_gelu": (
        2 * 32 * 64 * 48,
        None,
        32 * 48,
        (3 * 32 * 64 + 2 * 64 * 48 + 2 * 48 + 32 * 48) * F32,
        (32 * 64 + 64 * 48 + 48 + 32 * 48) * F32,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_zoo_kernel_against_a_count_by_hand(name):
    products, arithmetic, transcendentals, copied, touched = BY_HAND[name]
    found = work_in_zoo(name)
    assert sum(found.products.values()) == products
    assert arithmetic is None or found.arithmetic == arithmetic
    assert found.transcendentals == transcendentals
    assert (found.bytes, found.distinct_bytes) == (copied, touched)
    assert found.exact and all(row.exact for row in found.traffic)


def test_loops_as_long_as_the_grid_says():
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        body = lambda n, acc: acc + x_ref[...] * (n * 1.0)
        o_ref[...] = lax.fori_loop(0, i, body, jnp.zeros_like(x_ref))

    rows = pl.BlockSpec((8,), lambda i: (i,))
    x = jax.ShapeDtypeStruct((32,), jnp.float32)
    call = pl.pallas_call(kernel, out_shape=x, grid=4, in_specs=[rows], out_specs=rows)
    found = work_of(call, x)
    rounds = 0 + 1 + 2 + 3
    assert found.arithmetic == rounds * 2 * 8
    assert found.exact


def test_what_only_data_decide():
    def kernel(x_ref, o_ref):
        @pl.when(x_ref[0] > 0)
        def _():
            o_ref[...] = jnp.exp(x_ref[...])

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    (imported,) = kernels_in(pl.pallas_call(kernel, out_shape=x), x)
    most, least = count(run(imported)), count(run(imported), least=True)
    assert not most.exact
    assert (most.transcendentals, least.transcendentals) == (8, 0)


def test_bits_of_scalars_are_followed():
    """Which blocks are read may depend on bits of numbers, as hashes do."""

    def kernel(x_ref, o_ref):
        bits = lax.bitcast_convert_type(pl.program_id(0) * 1.0, jnp.int32)

        @pl.when((bits & (1 << 30)) != 0)  # of 2.0 and 3.0
        def _():
            o_ref[...] = jnp.exp(x_ref[...])

    rows = pl.BlockSpec((8,), lambda i: (i,))
    x = jax.ShapeDtypeStruct((32,), jnp.float32)
    call = pl.pallas_call(kernel, out_shape=x, grid=4, in_specs=[rows], out_specs=rows)
    found = work_of(call, x)
    assert found.transcendentals == 2 * 8 and found.exact


def test_a_block_that_data_place_is_taken_to_move_every_time():
    found = work_in_zoo("gather_rows")
    table = [row for row in found.traffic if not row.exact]
    assert len(table) == 1 and table[0].moves * table[0].distinct == table[0].bytes


def test_a_large_grid_is_counted_as_a_whole():
    found = count(kernels.matmul(1 << 14, 1 << 14, 1 << 14, (128, 128, 128)))
    assert sum(found.products.values()) == 2 << 42
    assert found.traffic[0].bytes == (1 << 28) * F32 * 128


def test_what_a_cpu_fuses_with_a_product_counts_as_before():
    """`dot_store` is a product, an addition and a store."""
    base_of = BASES["matmul"]
    one = Spelling(base_of, base_of.whats[0], base_of.style())
    kernel = call_of(one, SIZES["model"]).kernel
    scheduled = base.Compiled(base.get("cpu"), kernel, base.Options()).scheduled
    assert "dot_store" in scheduled.text
    assert count(scheduled).products == count(run(kernel)).products
