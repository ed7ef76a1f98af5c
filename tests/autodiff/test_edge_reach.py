"""Blocks past an edge are read as zeros, so that what matmuls take stays loaded."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite.autodiff.backward import plan
from pallasite.ir import types as T
from pallasite.ir.nodes import walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.sites import calls_in
from pallasite.target import GPUS, Machine

N, BLOCK = 200, 64


def call_of(kernel, *args):
    run = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((N, N), jnp.float32),
        grid=(pl.cdiv(N, BLOCK), pl.cdiv(N, BLOCK)),
        in_specs=[
            pl.BlockSpec((BLOCK, 32), lambda i, j: (i, 0)),
            pl.BlockSpec((BLOCK, 32), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j: (i, j)),
    )
    (call,) = calls_in(run, *args)
    return call


def steps_of(kernel):
    x = jax.ShapeDtypeStruct((N, 32), jnp.bfloat16)
    call = call_of(kernel, x, x)
    made = plan(call.kernel, (True, True), (True,), Machine.usual(GPUS["h200"]))
    return [step.kernel for step in made.steps]


def operands(kernel):
    """The windows on what the kernel was called with."""
    shown = Pipeline.of(find_pipeline(kernel)).shown
    narrow = [s.window for s in shown if s.array.ref.dtype == T.BF16]
    return [window for window in narrow if window.mode == "in"]


def scores(x_ref, y_ref, o_ref, after):
    o_ref[...] = after(jnp.dot(x_ref[...], y_ref[...].T).astype(jnp.float32))


def masked(x_ref, y_ref, o_ref):
    y = y_ref[...]
    rows = pl.program_id(1) * BLOCK + jnp.arange(BLOCK)[:, None]
    y = jnp.where(rows < N, y, 0)
    o_ref[...] = jnp.exp(jnp.dot(x_ref[...], y.T).astype(jnp.float32))


@pytest.mark.parametrize(
    "kernel", [functools.partial(scores, after=jnp.exp), masked], ids=["plain", "mask"]
)
def test_operands_of_matmuls_stay_loaded(kernel):
    for each in steps_of(kernel):
        names = [op.name for op in walk(each.body)]
        assert "dot" in names and "select_n" not in names
        assert {window.fill for window in operands(each)} == {0}


def test_a_pole_has_its_mask_where_it_is():
    """The scores of rows past the edge are zero: their reciprocals are masked."""
    for each in steps_of(functools.partial(scores, after=lambda s: 1 / s)):
        made = {v: op for op in walk(each.body) for v in op.results}
        divided = [op for op in walk(each.body) if op.name in ("div", "integer_pow")]
        assert divided
        poles = [op.operands[-1] for op in divided]
        assert all(made[v].name == "select_n" for v in poles)


def test_what_is_not_followed_gets_copies():
    def sums(s):
        return jnp.exp(jnp.cumsum(s, axis=1))

    for each in steps_of(functools.partial(scores, after=sums)):
        assert {window.fill for window in operands(each)} == {None}
