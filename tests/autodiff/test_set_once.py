"""What one step of an axis sets is a sum over the axis for derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.autodiff.backward import plan
from pallasite.autodiff.normal_program import normal_program
from pallasite.ir.nodes import walk
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.sites import calls_in
from pallasite.target import GPUS, Machine

N, D, B = 24, 16, 8
W = 5 * B  # more steps than are written out


def contrastive(by_branch: bool, start: float = 0.0, twice: bool = False):
    """Rows of `x @ y.T`: their sum of squares, minus three times the diagonal."""

    def kernel(x_ref, y_ref, o_ref, s_ref, d_ref):
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j == 0)
        def _():
            s_ref[...] = jnp.zeros_like(s_ref)
            d_ref[...] = jnp.full_like(d_ref, start)

        scores = x_ref[...] @ y_ref[...].T
        rows = jax.lax.broadcasted_iota(jnp.int32, (B, B), 0)
        columns = jax.lax.broadcasted_iota(jnp.int32, (B, B), 1)
        own = jnp.where(rows == columns, scores, 0.0).sum(axis=1)
        here = (i <= j) if twice else (i == j)
        if by_branch:

            @pl.when(here)
            def _():
                d_ref[...] = own

        else:
            d_ref[...] = jnp.where(here, own, d_ref[...])
        s_ref[...] += (scores * scores).sum(axis=1)

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = s_ref[...] - 3.0 * d_ref[...] * d_ref[...]

    rows = lambda axis: pl.BlockSpec((B, D), lambda *at: (at[axis], 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((N,), jnp.float32),
        grid=(N // B, N // B),
        in_specs=[rows(0), rows(1)],
        out_specs=pl.BlockSpec((B,), lambda i, j: (i,)),
        scratch_shapes=[pltpu.VMEM((B,), jnp.float32)] * 2,
    )


def handed_on(call) -> int:
    """How many values the program's loop carries and does not only add to."""
    shape = jax.ShapeDtypeStruct((N, D), jnp.float32)
    (found,) = calls_in(call, shape, shape)
    _, program = normal_program(found.kernel, Machine.usual(GPUS["h200"]))
    (loop,) = (Loop.of(op) for op in walk(program.body) if op.name == "for")
    made = {op.results[0]: op for op in loop.body.ops if op.name == "add"}
    pairs = zip(loop.carried, loop.yields, strict=True)
    return sum(v not in made or c not in made[v].operands for c, v in pairs)


@pytest.mark.parametrize("by_branch", [True, False])
def test_it_is_added(by_branch: bool):
    assert handed_on(contrastive(by_branch)) == 0
    # It would count twice, or start at another number.
    assert handed_on(contrastive(by_branch, twice=True)) == 1
    assert handed_on(contrastive(by_branch, start=2.0)) == 1


@pytest.mark.parametrize("by_branch", [True, False])
@pytest.mark.parametrize("twice", [False, True])
def test_gradient(by_branch: bool, twice: bool):
    x, y = (jax.random.normal(jax.random.key(n), (N, D)) for n in (0, 1))
    call, weights = contrastive(by_branch, twice=twice), jnp.cos(jnp.arange(N))

    def reference(x, y):
        scores = x @ y.T
        last = y[(jnp.arange(N) % B) + N - B] if twice else y
        own = (x * last).sum(axis=1)
        return (scores * scores).sum(axis=1) - 3.0 * own * own

    got = jax.jit(jax.grad(lambda *a: (call(*a) * weights).sum(), (0, 1)))(x, y)
    want = jax.grad(lambda *a: (reference(*a) * weights).sum(), (0, 1))(x, y)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def both_cotangents(guard: str, start: str):
    """A layer's cotangents, of which the bias's is a sum in one of the outer steps."""

    def kernel(x_ref, dy_ref, dw_ref, db_ref):
        i, t = pl.program_id(1), pl.program_id(2)

        @pl.when(t == 0)
        def _():
            dw_ref[...] = jnp.zeros_like(dw_ref)

        dw_ref[...] += x_ref[...].T @ dy_ref[...]

        @pl.when(i == 0 if guard == "first" else i == 1)
        def _():
            part = dy_ref[...].sum(0)
            if start == "select":
                db_ref[...] = jnp.where(t == 0, part, db_ref[...] + part)
            else:

                @pl.when(t == 0)
                def _():
                    db_ref[...] = jnp.zeros_like(db_ref)

                db_ref[...] += part

    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((W, N), (N,))],
        grid=(N // B, W // B, 4),
        in_specs=[
            pl.BlockSpec((B, B), lambda j, i, t: (t, i)),
            pl.BlockSpec((B, B), lambda j, i, t: (t, j)),
        ],
        out_specs=[
            pl.BlockSpec((B, B), lambda j, i, t: (i, j)),
            pl.BlockSpec((B,), lambda j, i, t: (j,)),
        ],
    )


@pytest.mark.parametrize("guard", ["first", "second"])
@pytest.mark.parametrize("start", ["select", "branch"])
def test_a_sum_in_some_steps_of_an_axis_around_it(guard: str, start: str):
    call = both_cotangents(guard, start)
    x, dy = (
        jax.random.normal(jax.random.key(n), (4 * B, w)) for n, w in ((0, W), (1, N))
    )
    (found,) = calls_in(call, x, dy)
    machine = Machine.usual(GPUS["h200"])
    _, program = normal_program(found.kernel, machine)
    adds = [op for op in program.body.ops if op.name == "store"]
    assert bool(adds) == (guard == "first")  # of the sum, behind all steps
    steps = plan(found.kernel, (True, True), (True, True), machine).steps
    grids = [find_pipeline(s.kernel).attrs["semantics"] for s in steps]
    assert guard != "first" or all("parallel" in kinds for kinds in grids)
    weights = jnp.cos(jnp.arange(W * N).reshape(W, N)), jnp.sin(jnp.arange(N))

    def loss(function):
        total = lambda *args: sum(
            (out * w).sum() for out, w in zip(function(*args), weights, strict=True)
        )
        return jax.grad(total, argnums=(0, 1))

    got = loss(call)(x, dy)
    want = loss(lambda x, dy: (x.T @ dy, dy.sum(0)))(x, dy)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
