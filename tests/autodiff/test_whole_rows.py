"""Rows that steps of a grid go through part by part are whole in backward kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff.explain_grad import chosen_plan
from pallasite.ir.nodes import walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.sites import calls_in
from tests.forms import all_forms
from tests.forms.form import SIZES

FORMS = {form.name: form for form in all_forms()}
ROWS, CHUNK, STEPS = 8, 128, 3


def steps_of(function, *operands, target: str):
    with config.override(target=target):
        (call,) = calls_in(function, *operands)
        return chosen_plan(call.kernel, call.backend).steps


@pytest.mark.parametrize(
    "name",
    [
        "softmax online over a grid",
        "logsumexp online over a grid",
        "rms norm in vector scratch over a grid",
        "row maximum over a grid",
    ],
)
def test_one_kernel_reads_each_row_once(name: str):
    form, size = FORMS[name], SIZES["model"]
    structs = form.problem.structs(size)
    (step,) = steps_of(form.make(size), *structs, target="gpu:h200")
    pipeline = Pipeline.of(find_pipeline(step.kernel))
    assert all(op.name != "for" for op in walk(pipeline.body))
    assert pipeline.grid[0] >= 256
    assert step.kernel.outputs[0].ref == step.kernel.inputs[0].ref  # bf16


def normalised(x, g):
    """Squares added up along the grid in one turn, results in the next."""

    def kernel(x_ref, g_ref, o_ref, sum_ref):
        turn, j = pl.program_id(1), pl.program_id(2)

        @pl.when((turn == 0) & (j == 0))
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        x = x_ref[...].astype(jnp.float32)

        @pl.when(turn == 0)
        def _():
            sum_ref[...] += (x * x).sum(axis=1)

        @pl.when(turn == 1)
        def _():
            scale = jax.lax.rsqrt(sum_ref[...] + 1)[:, None]
            o_ref[...] = (x * scale * g_ref[...]).astype(o_ref.dtype)

    at = lambda i, t, j: (i, j)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], ROWS), 2, STEPS),
        in_specs=[
            pl.BlockSpec((ROWS, CHUNK), at),
            pl.BlockSpec((1, CHUNK), lambda i, t, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((ROWS, CHUNK), lambda i, t, j: (i, j * t)),
        scratch_shapes=[pltpu.VMEM((ROWS,), jnp.float32)],
    )(x, g)


def plain(x, g):
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt((x32 * x32).sum(axis=1, keepdims=True) + 1)
    return (x32 * scale * g).astype(x.dtype)


def largest(x):
    def kernel(x_ref, o_ref):
        top = x_ref[...].max(axis=1, keepdims=True)

        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = top

        @pl.when(pl.program_id(1) > 0)
        def _():
            o_ref[...] = jnp.maximum(o_ref[...], top)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], 1), x.dtype),
        grid=(pl.cdiv(x.shape[0], ROWS), STEPS),
        in_specs=[pl.BlockSpec((ROWS, CHUNK), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((ROWS, 1), lambda i, j: (i, 0)),
    )(x)


def gradients(function, *operands):
    def loss(*operands):
        out = function(*operands).astype(jnp.float32)
        return (out * (jnp.arange(out.size) % 7 - 2.5).reshape(out.shape)).sum()

    return jax.grad(loss, argnums=tuple(range(len(operands))))(*operands)


@pytest.mark.parametrize(("rows", "dtype"), [(16, jnp.float32), (13, jnp.bfloat16)])
def test_gradients_are_those_of_the_plain_function(rows: int, dtype):
    x = jax.random.normal(jax.random.key(0), (rows, CHUNK * STEPS)).astype(dtype)
    g = jax.random.normal(jax.random.key(1), (1, CHUNK * STEPS))
    steps = steps_of(normalised, x, g, target="cpu")
    assert all(op.name != "for" for s in steps for op in walk(s.kernel.body))
    close = dict.fromkeys(("rtol", "atol"), 2e-2 if dtype == jnp.bfloat16 else 1e-4)
    pairs = gradients(normalised, x, g), gradients(plain, x, g)
    for got, want in zip(*pairs, strict=True):
        np.testing.assert_allclose(*(np.float32(a) for a in (got, want)), **close)


def test_a_maximum_that_the_first_step_stores():
    x = jax.random.normal(jax.random.key(0), (13, CHUNK * STEPS))
    x = x.at[3, :2].set(9.0)  # they share the cotangent
    (step,) = steps_of(largest, x, target="cpu")
    assert all(op.name not in ("for", "cond") for op in walk(step.kernel.body))
    want = gradients(lambda x: x.max(axis=1, keepdims=True), x)
    np.testing.assert_allclose(gradients(largest, x)[0], want[0], rtol=1e-6)


def scaled_later(x):
    """Each step has a factor of its own: not a sum over rows."""

    def kernel(x_ref, o_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        part = x_ref[...].astype(jnp.float32).sum(axis=1, keepdims=True)
        o_ref[...] += (part - o_ref[...]) / (j + 1).astype(jnp.float32)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32),
        grid=(x.shape[0] // ROWS, STEPS),
        in_specs=[pl.BlockSpec((ROWS, CHUNK), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((ROWS, 1), lambda i, j: (i, 0)),
    )(x)


def test_what_a_loop_stores_has_its_operands_type():
    x = jax.random.normal(jax.random.key(0), (ROWS, CHUNK * STEPS)).astype("bfloat16")
    (step,) = steps_of(scaled_later, x, target="gpu:h200")
    assert str(step.kernel.outputs[0].ref.dtype) == "bf16"
    mean = lambda x: x.astype(jnp.float32).sum(axis=1, keepdims=True) / STEPS
    got, want = gradients(scaled_later, x)[0], gradients(mean, x)[0]
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=1e-2)


# --- maxima of whole rows ---


def by_rows(body):
    """A function that applies `body` to blocks of rows."""

    def kernel(x_ref, *o_refs):
        made = body(x_ref[...].astype(jnp.float32))
        for ref, value in zip(o_refs, made, strict=True):
            ref[...] = value.astype(ref.dtype)

    def run(x):
        shapes = jax.eval_shape(lambda x: body(x.astype(jnp.float32)), x)
        block = lambda s: pl.BlockSpec((ROWS, s.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=tuple(jax.ShapeDtypeStruct(s.shape, x.dtype) for s in shapes),
            grid=(pl.cdiv(x.shape[0], ROWS),),
            in_specs=[block(x)],
            out_specs=tuple(block(s) for s in shapes),
        )(x)

    return run


def softmax(x):
    p = jnp.exp(x - x.max(axis=1, keepdims=True))
    return (p / p.sum(axis=1, keepdims=True),)


def logsumexp(x):
    top = x.max(axis=1)
    return ((top + jnp.log(jnp.exp(x - top[:, None]).sum(axis=1)))[:, None],)


def scaled(x):
    return (x / x.max(axis=1, keepdims=True),)


def with_maximum(x):
    top = x.max(axis=1, keepdims=True)
    return jnp.exp(x - top) / jnp.exp(x - top).sum(axis=1, keepdims=True), top


@pytest.mark.parametrize(
    ("body", "sums"),
    [(softmax, 2), (logsumexp, 1), (scaled, None), (with_maximum, None)],
)
def test_a_maximum_on_which_no_result_depends_has_no_cotangent(body, sums):
    dtype = jnp.bfloat16 if body is softmax else jnp.float32
    x = jax.random.normal(jax.random.key(2), (13, 200)).astype(dtype)
    run = by_rows(body)
    (step,) = steps_of(run, x, target="cpu")
    found = [op.attrs["kind"] for op in walk(step.kernel.body) if op.name == "reduce"]
    if sums is None:
        assert "eq" in step.kernel.text  # the elements that are the maximum
    else:
        assert sorted(found) == ["max"] + ["sum"] * sums
    total = lambda f: (
        lambda x: sum(
            (
                o.astype(jnp.float32) * (jnp.arange(o.size) % 7 - 2).reshape(o.shape)
            ).sum()
            for o in f(x)
        )
    )
    got, want = (
        jax.grad(total(f))(x)
        for f in (run, lambda x: [o.astype(dtype) for o in body(x.astype("f4"))])
    )
    close = dict.fromkeys(("rtol", "atol"), 2e-2 if dtype == jnp.bfloat16 else 1e-4)
    np.testing.assert_allclose(np.float32(got), np.float32(want), **close)


# --- attention of whole rows ---


def with_lse(q, k, v, rows: int, scale: float):
    """Whole rows of scores, blocks of rows before heads; two results."""

    def kernel(q_ref, k_ref, v_ref, o_ref, lse_ref):
        s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32)
        top = jnp.max(s * scale, axis=1, keepdims=True)
        e = jnp.exp(s * scale - top)
        total = jnp.sum(e, axis=1, keepdims=True)
        o_ref[...] = jnp.dot((e / total).astype(v_ref.dtype), v_ref[...])
        lse_ref[...] = top + jnp.log(total)

    heads, n, depth = q.shape
    block = lambda size: pl.BlockSpec((None, rows, size), lambda i, h: (h, i, 0))
    every = pl.BlockSpec((None, n, depth), lambda i, h: (h, 0, 0))
    lse = jax.ShapeDtypeStruct((heads, n, 1), jnp.float32)
    return pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), lse),
        grid=(n // rows, heads),
        in_specs=[block(depth), every, every],
        out_specs=(block(depth), block(1)),
    )(q, k, v)


def plain_with_lse(q, k, v, rows: int, scale: float):
    s = jnp.einsum("hld,hmd->hlm", q, k, preferred_element_type=jnp.float32) * scale
    p = jax.nn.softmax(s).astype(v.dtype)
    o = jnp.einsum("hlm,hmd->hld", p, v)
    return o, jax.nn.logsumexp(s, axis=2, keepdims=True)


@pytest.mark.parametrize(("rows", "dtype"), [(32, jnp.bfloat16), (16, jnp.float32)])
def test_attention_whose_statistics_have_cotangents(rows: int, dtype):
    """No result depends on the maximum, and what is saved is in rows of the operand."""
    keys = jax.random.split(jax.random.key(3), 3)
    q, k, v = (jax.random.normal(key, (2, 1024, 64)).astype(dtype) for key in keys)

    def loss(f, *operands):
        outs = (o.astype(jnp.float32) for o in f(*operands, rows, 0.1))
        return sum(
            (o * jnp.cos(jnp.arange(o.size)).reshape(o.shape)).sum() for o in outs
        )

    gradient = lambda f: jax.grad(lambda *operands: loss(f, *operands), (0, 1, 2))
    with config.override(target="gpu:h200"):
        calls = calls_in(gradient(with_lse), q, k, v)
        made = jax.make_jaxpr(gradient(with_lse))(q, k, v)
    assert [call.kernel.text.count("= dot") for call in calls] == [2, 0, 3, 4]
    kept = [ref.ref.shape for ref in calls[0].kernel.outputs[2:]]
    assert kept == [(2, 1024, 1)] * 2
    got = jax.core.eval_jaxpr(made.jaxpr, made.consts, q, k, v)
    close = dict.fromkeys(("rtol", "atol"), 5e-2 if dtype == jnp.bfloat16 else 1e-4)
    for a, b in zip(got, gradient(plain_with_lse)(q, k, v), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), **close)
