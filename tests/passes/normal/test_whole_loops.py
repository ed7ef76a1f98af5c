"""Loops over the parts of rows compute with whole rows, where nobody can tell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.ir.nodes import Kernel, walk
from pallasite.passes.normal.normalize import normalize
from pallasite.passes.normal.whole_loops import whole_loops
from pallasite.sites import kernels_in
from tests.passes.normal.meaning import assert_same_meaning, operands, outputs
from tests.passes.normal_text import normal_text

F32 = jnp.float32
ROWS, WIDTH, PART = 4, 96, 16
COUNT = WIDTH // PART


def kernel_of(body, width: int = WIDTH, result=None) -> Kernel:
    x = jax.ShapeDtypeStruct((3 * ROWS, width), F32)
    o = result or x
    spec = lambda s: pl.BlockSpec((ROWS, s.shape[1]), lambda i: (i, 0))
    call = pl.pallas_call(
        body, out_shape=o, grid=(3,), in_specs=[spec(x)], out_specs=spec(o)
    )
    return kernels_in(call, x)[0]


def part(j):
    return slice(None), pl.ds(j * PART, PART)


def assert_close(kernel: Kernel, new: Kernel) -> None:
    """Sums are taken in another order."""
    arrays = operands(kernel)
    for a, b in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    assert_same_meaning(new, new)


def has_loop(kernel: Kernel) -> bool:
    return any(op.name == "for" for op in walk(kernel.body))


# --- one text, however the row is cut ---


def softmax(x_ref, o_ref):
    x = x_ref[...]
    p = jnp.exp(x - x.max(-1, keepdims=True))
    o_ref[...] = p / p.sum(-1, keepdims=True)


def softmax_in_parts(x_ref, o_ref):
    def absorb(j, state):
        m, l = state
        x = x_ref[part(j)]
        new = jnp.maximum(m, x.max(-1, keepdims=True))
        p = jnp.exp(x - new)
        return new, l * jnp.exp(m - new) + p.sum(-1, keepdims=True)

    start = jnp.full((ROWS, 1), -jnp.inf), jnp.zeros((ROWS, 1))
    m, l = lax.fori_loop(0, COUNT, absorb, start)

    def write(j, _):
        o_ref[part(j)] = jnp.exp(x_ref[part(j)] - m) / l

    lax.fori_loop(0, COUNT, write, None)


def softmax_in_three_loops(x_ref, o_ref):
    """The maximum, then the sum, both kept as vectors."""
    m = lax.fori_loop(
        0,
        COUNT,
        lambda j, m: jnp.maximum(m, x_ref[part(j)].max(-1)),
        jnp.full((ROWS,), -jnp.inf),
    )[:, None]
    l = lax.fori_loop(
        0,
        COUNT,
        lambda j, l: l + jnp.exp(x_ref[part(j)] - m).sum(-1),
        jnp.zeros((ROWS,)),
    )[:, None]

    def write(j, _):
        o_ref[part(j)] = jnp.exp(x_ref[part(j)] - m) / l

    lax.fori_loop(0, COUNT, write, None)


def centred(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = x - x.sum(-1, keepdims=True) * (1 / WIDTH)


def centred_by_lanes(x_ref, o_ref):
    """A tile of partial sums, added up after the loop, as in Triton's tutorial."""
    add = lambda j, total: total + x_ref[part(j)]
    total = lax.fori_loop(0, COUNT, add, jnp.zeros((ROWS, PART)))
    mean = total.sum(-1, keepdims=True) * (1 / WIDTH)

    def write(j, _):
        o_ref[part(j)] = x_ref[part(j)] - mean

    lax.fori_loop(0, COUNT, write, None)


def masked(x_ref, o_ref):
    x = x_ref[...]
    kept = jnp.where(jnp.arange(WIDTH)[None] < 50, x, 0)
    o_ref[...] = x * kept.sum(-1, keepdims=True)


def masked_in_parts(x_ref, o_ref):
    def absorb(j, total):
        at = j * PART + jnp.arange(PART)[None]
        return total + jnp.where(at < 50, x_ref[part(j)], 0).sum(-1, keepdims=True)

    total = lax.fori_loop(0, COUNT, absorb, jnp.zeros((ROWS, 1)))
    o_ref[...] = x_ref[...] * total


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        (softmax, softmax_in_parts),
        (softmax, softmax_in_three_loops),
        (centred, centred_by_lanes),
        (masked, masked_in_parts),
    ],
)
def test_loops_over_parts_read_as_whole_rows(whole, parts):
    kernel = kernel_of(parts)
    assert normal_text(kernel) == normal_text(kernel_of(whole))
    assert_close(kernel, normalize(kernel))


def test_a_loop_that_starts_and_steps_otherwise():
    def body(x_ref, o_ref):
        def absorb(j, total):
            at = slice(None), pl.ds(8 * j - 24, PART)
            return total + x_ref[at].sum(-1, keepdims=True)

        total = jnp.zeros((ROWS, 1))
        total = pl.loop(5, 13, step=2, init_carry=total)(absorb)
        o_ref[...] = x_ref[...] * total

    kernel = normalize(kernel_of(body))
    assert_close(kernel_of(body), kernel)
    assert not has_loop(kernel)


def test_views_of_parts():
    kernel = normalize(kernel_of(through_views))
    assert_close(kernel_of(through_views), kernel)


def test_a_start_other_than_zero_is_added():
    def body(x_ref, o_ref):
        total = lax.fori_loop(
            0,
            COUNT,
            lambda j, s: s + x_ref[part(j)].sum(-1, keepdims=True),
            jnp.full((ROWS, 1), 3.0),
        )
        o_ref[...] = x_ref[...] + total

    kernel = normalize(kernel_of(body))
    assert not has_loop(kernel)
    assert_close(kernel_of(body), kernel)


# --- what is kept ---


def running_sum(x_ref, o_ref):
    def step(j, total):
        total += x_ref[part(j)].sum(-1, keepdims=True)
        o_ref[part(j)] = x_ref[part(j)] + total
        return total

    lax.fori_loop(0, COUNT, step, jnp.zeros((ROWS, 1)))


def each_part_alone(x_ref, o_ref):
    highest = x_ref[...].max(-1, keepdims=True)

    def write(j, _):
        x = x_ref[part(j)]
        o_ref[part(j)] = x - x.max(-1, keepdims=True) + highest

    lax.fori_loop(0, COUNT, write, None)


def reads_what_others_stored(x_ref, o_ref):
    o_ref[...] = jnp.zeros_like(o_ref)

    def write(j, _):
        before = o_ref[part(jnp.maximum(j - 1, 0))]
        o_ref[part(j)] = x_ref[part(j)] + before

    lax.fori_loop(0, COUNT, write, None)


def overlapping_parts(x_ref, o_ref):
    def write(j, _):
        at = slice(None), pl.ds(j * PART // 2, PART)
        o_ref[at] = x_ref[at] * 2

    lax.fori_loop(0, 2 * COUNT - 1, write, None)


def the_last_part_is_clamped(x_ref, o_ref):
    add = lambda j, s: s + x_ref[part(j)].sum(-1, keepdims=True)
    total = lax.fori_loop(0, COUNT + 1, add, jnp.zeros((ROWS, 1)))
    o_ref[...] = x_ref[...] + total


def weighted_by_the_number(x_ref, o_ref):
    def step(j, s):
        return s + x_ref[part(j)].sum(-1, keepdims=True) * j.astype(F32)

    total = lax.fori_loop(0, COUNT, step, jnp.zeros((ROWS, 1)))
    o_ref[...] = x_ref[...] + total


def lanes_that_are_stored(x_ref, o_ref):
    add = lambda j, total: total + x_ref[part(j)]
    total = lax.fori_loop(0, COUNT, add, jnp.zeros((ROWS, PART)))
    o_ref[...] = jnp.zeros_like(o_ref)
    o_ref[:, :PART] = total


def through_views(x_ref, o_ref):
    def step(j, total):
        view = x_ref.at[:, pl.ds(j * PART, PART)]
        return total + view[...].sum(-1, keepdims=True)

    total = lax.fori_loop(0, COUNT, step, jnp.zeros((ROWS, 1)))
    o_ref[...] = x_ref[...] + total


def by_references(x_ref, o_ref):
    """A view of one row that the index picks."""

    def step(j, total):
        return total + x_ref.at[pl.ds(j % ROWS, 1)][...]

    o_ref[...] = x_ref[...] + lax.fori_loop(0, COUNT, step, jnp.zeros((1, WIDTH)))


def not_rescaled(x_ref, o_ref):
    """Sums relative to maxima that were not final, as nobody should."""

    def absorb(j, state):
        m, l = state
        x = x_ref[part(j)]
        new = jnp.maximum(m, x.max(-1, keepdims=True))
        return new, l + jnp.exp(x - new).sum(-1, keepdims=True)

    start = jnp.full((ROWS, 1), -jnp.inf), jnp.zeros((ROWS, 1))
    m, l = lax.fori_loop(0, COUNT, absorb, start)
    o_ref[...] = x_ref[...] * l + m


@pytest.mark.parametrize(
    "body",
    [
        running_sum,
        each_part_alone,
        reads_what_others_stored,
        overlapping_parts,
        the_last_part_is_clamped,
        weighted_by_the_number,
        lanes_that_are_stored,
        not_rescaled,
        by_references,
    ],
)
def test_loops_whose_iterations_are_told_apart_stay(body):
    kernel = normalize(kernel_of(body))
    assert has_loop(kernel)
    assert whole_loops(kernel) is kernel
    inside = body is not the_last_part_is_clamped
    assert_same_meaning(kernel_of(body), kernel, checked=inside)


def test_rows_that_a_program_cannot_hold_stay_in_parts():
    def body(x_ref, o_ref):
        def absorb(j, total):
            return total + x_ref[:, pl.ds(j * 4096, 4096)].sum(-1, keepdims=True)

        total = lax.fori_loop(0, x_ref.shape[1] // 4096, absorb, jnp.zeros((ROWS, 1)))
        o_ref[...] = x_ref[...] * total

    kernel = normalize(kernel_of(body, 5 * 4096))
    assert has_loop(kernel)
    assert not has_loop(normalize(kernel_of(body, 4 * 4096)))
