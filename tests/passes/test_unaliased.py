"""Results that need nothing of the operands they alias have memory of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify
from pallasite.passes.transform.unaliased import unaliased
from pallasite.sites import kernels_in
from tests.fuzz.agreement import run_numpy

F32 = jnp.float32
SHAPE, BLOCK = (24, 128), (8, 128)
ROWS = pl.BlockSpec(BLOCK, lambda i: (i, 0))
ALIASES = {0: 0}


def caller(body, grid=(3,), specs=(ROWS, ROWS), out=ROWS, shape=SHAPE):
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct(shape, F32),
        grid=grid,
        in_specs=list(specs),
        out_specs=out,
        input_output_aliases=ALIASES,
    )


def kernel_of(*args, **options) -> Kernel:
    shape = jax.ShapeDtypeStruct(options.get("shape", SHAPE), F32)
    (made,) = kernels_in(caller(*args, **options), shape, shape)
    return made


def update(x_ref, y_ref, o_ref):
    """Reads what it has written, but only through the result."""
    y = y_ref[...]
    o_ref[...] = x_ref[...] * 2 + y
    o_ref[...] = o_ref[...] - y * 3


def unread(x_ref, y_ref, o_ref):
    o_ref[...] = y_ref[...] + 1


def in_a_loop(x_ref, y_ref, o_ref):
    total = lax.fori_loop(0, 8, lambda n, a: a + x_ref[n, :], jnp.zeros(128, F32))
    o_ref[...] = y_ref[...] + total


def read_after(x_ref, y_ref, o_ref):
    o_ref[...] = y_ref[...]
    o_ref[...] = x_ref[...] + o_ref[...]


def added_to(x_ref, y_ref, o_ref):
    o_ref[...] += y_ref[...]


def one_row(x_ref, y_ref, o_ref):
    o_ref[0, :] = x_ref[0, :] + y_ref[0, :]


def guarded(x_ref, y_ref, o_ref):
    @pl.when(pl.program_id(0) != 1)
    def _():
        o_ref[...] = x_ref[...] + y_ref[...]


def masked(x_ref, y_ref, o_ref):
    mask = y_ref[...] > 0
    pl.store(o_ref, (slice(None), slice(None)), x_ref[...] + 1, mask=mask)


def written(x_ref, y_ref, o_ref):
    x = x_ref[...]
    x_ref[...] = x + 1
    o_ref[...] = x + y_ref[...]


NEXT = pl.BlockSpec(BLOCK, lambda i: ((i + 1) % 3, 0))
ALL = pl.BlockSpec(SHAPE, lambda i: (0, 0))
FIRST = pl.BlockSpec(BLOCK, lambda i: (0, 0))
ANY = pl.BlockSpec(memory_space=pl.ANY)
TWICE = pl.BlockSpec(BLOCK, lambda i, j: (i, 0))


def copied(x_ref, y_ref, o_ref):
    o_ref[:, :] = x_ref[:, :] + y_ref[:, :]


APART = {
    "update": dict(body=update),
    "unread": dict(body=unread),
    "in a loop": dict(body=in_a_loop),
    "past the edge": dict(body=update, shape=(22, 128)),
    "one block": dict(body=update, grid=(), specs=(None, None), out=None),
}
TOGETHER = {
    "read after": dict(body=read_after),
    "added to": dict(body=added_to),
    "one row": dict(body=one_row),
    "guarded": dict(body=guarded),
    "masked": dict(body=masked),
    "written": dict(body=written),
    "not all blocks": dict(body=update, grid=(2,)),
    "of another block": dict(body=update, specs=(NEXT, ROWS)),
    "of all blocks": dict(
        body=lambda x, y, o: o.__setitem__(..., x[:8, :] + y[...]), specs=(ALL, ROWS)
    ),
    "one block in all steps": dict(body=update, specs=(FIRST, ROWS), out=FIRST),
    "two steps a block": dict(
        body=update, grid=(3, 2), specs=(TWICE, TWICE), out=TWICE
    ),
    "no window": dict(body=copied, grid=(), specs=(ANY, ANY), out=ANY),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_overwritten_before_it_is_read_is_apart(name: str):
    options = dict(APART[name])
    before = kernel_of(options.pop("body"), **options)
    after = unaliased(before, {0, 1})
    verify(after)
    assert before.aliases == ((0, 0),) and not after.aliases
    rng = np.random.default_rng(0)
    shape = options.get("shape", SHAPE)
    operands = [rng.normal(size=shape).astype(np.float32) for _ in range(2)]
    (want,), (got,) = (run_numpy(k, list(operands)) for k in (before, after))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", TOGETHER)
def test_others_share_memory(name: str):
    options = dict(TOGETHER[name])
    before = kernel_of(options.pop("body"), **options)
    assert unaliased(before, {0, 1}) is before


def test_only_operands_that_are_copied():
    before = kernel_of(update)
    assert unaliased(before, {1}) is before and unaliased(before, ()) is before


def aliased(function, *operands, **options) -> tuple[bool, int]:
    """Whether the call aliases, and how many copies XLA makes."""
    made = jax.jit(function, **options).lower(*operands)
    copies = made.compile().as_text().count(" copy(")
    return "output_operand_alias<" in made.as_text(), copies


def test_arguments_that_are_kept_are_not_copied():
    call, x = caller(update), jnp.ones(SHAPE, F32)
    assert aliased(call, x, x) == (False, 0)
    assert aliased(call, x, x, donate_argnums=0) == (True, 0)
    made, _ = aliased(lambda x, y: call(x + 1, y), x, x)
    needed, copies = aliased(caller(one_row), x, x)
    assert made and needed and copies == 1


def test_results_are_those_of_the_emulation():
    x = jax.random.normal(jax.random.key(0), SHAPE)
    call = caller(update)
    twice = lambda x, y: call(x, y) + call(y, x)
    want = (2 * x + x - 3 * x) * 2
    for function in (twice, jax.jit(twice), jax.jit(twice, donate_argnums=0)):
        np.testing.assert_allclose(function(x + 0, x), want, 1e-6, 1e-6)
    got = jax.vmap(call)(jnp.stack([x, x]), jnp.stack([x, x]))
    np.testing.assert_allclose(got, jnp.stack([want, want]) / 2, 1e-6, 1e-6)
    slope = jax.grad(lambda x: call(x, 2 * x).sum())(x)
    np.testing.assert_allclose(slope, jnp.full(SHAPE, -2.0))
