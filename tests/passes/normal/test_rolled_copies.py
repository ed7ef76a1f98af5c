"""Copies that the author unrolled become a loop, and then an axis."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallasite as pl
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.loop_axes import loop_axes
from pallasite.passes.run import NORMAL, run
from pallasite.sites import kernels_in
from tests.passes.normal.meaning import assert_same_meaning

ROWS, COPIES, TERMS, WIDTH = 12, 4, 5, 16


def bag(place=lambda r: r, more=lambda r, total: total, order=range(COPIES)):
    """Sums of chosen rows of a table, for several rows of a block."""

    def kernel(table_ref, index_ref, weight_ref, o_ref):
        for r in order:

            def add(t, total, r=r):
                row = table_ref[index_ref[r, t], :]
                return total + row * weight_ref[r, t]

            total = lax.fori_loop(0, TERMS, add, jnp.zeros((WIDTH,)))
            o_ref[place(r), :] = more(r, total)

    some = pl.BlockSpec((COPIES, TERMS), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        grid=(ROWS // COPIES,),
        in_specs=[pl.BlockSpec((7, WIDTH), lambda i: (0, 0)), some, some],
        out_specs=pl.BlockSpec((COPIES, WIDTH), lambda i: (i, 0)),
    )
    shapes = ((7, WIDTH), jnp.float32), ((ROWS, TERMS), jnp.int32)
    structs = [jax.ShapeDtypeStruct(*each) for each in shapes]
    weights = jax.ShapeDtypeStruct((ROWS, TERMS), jnp.float32)
    (imported,) = kernels_in(call, *structs, weights)
    return canonicalize(imported)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(place=lambda r: COPIES - 1 - r),
        dict(order=reversed(range(COPIES))),
        dict(more=lambda r, total: jnp.where(total > 0, total, 2.0)),
        dict(more=lambda r, total: total * (pl.program_id(0) + 3 * r)),
    ],
    ids=["rows", "reversed rows", "reversed copies", "constants", "numbers"],
)
def test_copies_of_a_loop_are_programs(changes):
    kernel = bag(**changes)
    new = loop_axes(kernel)
    assert_same_meaning(kernel, new)
    assert f"grid=({ROWS // COPIES}, {COPIES})" in new.text
    normal = run(kernel, NORMAL)
    assert_same_meaning(kernel, normal)
    assert normal.text.count(" = for ") == 1
    assert loop_axes(new) is new


@pytest.mark.parametrize(
    "changes",
    [
        dict(place=lambda r: r * r % COPIES),  # no line
        dict(more=lambda r, total: total + 1 if r == 2 else total),  # other code
        dict(more=lambda r, total: total + jnp.float32(r * r)),
    ],
    ids=["places", "code", "numbers"],
)
def test_other_copies_stay(changes):
    kernel = bag(**changes)
    assert loop_axes(kernel) is kernel


def rows_of(code, rows=8):
    def kernel(x_ref, o_ref):
        code(x_ref, o_ref)

    call = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    )
    (kernel_,) = kernels_in(call, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32))
    return canonicalize(kernel_)


def test_straight_copies_stay():
    def code(x_ref, o_ref):
        for r in range(8):
            o_ref[r, :] = x_ref[r, :] * 2

    kernel = rows_of(code)
    assert loop_axes(kernel) is kernel


def test_copies_that_use_an_earlier_one_stay():
    def code(x_ref, o_ref):
        total = jnp.zeros((WIDTH,))
        for r in range(8):
            step = lambda t, v, r=r: v + x_ref[r, :]
            total = lax.fori_loop(0, 3, step, total)
            o_ref[r, :] = total

    kernel = rows_of(code)
    assert loop_axes(kernel) is kernel


def test_copies_that_read_what_others_wrote_are_in_order():
    def code(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        for r in range(7):
            step = lambda t, v, r=r: v + x_ref[r, :]
            more = lax.fori_loop(0, 3, step, o_ref[r, :])
            o_ref[r + 1, :] = more

    kernel = rows_of(code)
    assert_same_meaning(kernel, run(kernel, NORMAL))


def test_results_of_one_loop_stay():
    def code(x_ref, o_ref):
        step = lambda t, sums: tuple(a + x_ref[t, :] * n for n, a in enumerate(sums))
        sums = lax.fori_loop(0, 8, step, (jnp.zeros((WIDTH,)),) * 8)
        for r in range(8):
            o_ref[r, :] = sums[r]

    kernel = rows_of(code)
    assert loop_axes(kernel) is kernel
