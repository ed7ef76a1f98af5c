"""Backward kernels of whole operands in a block: cut to what a GPU's programs hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff import backward_choice
from pallasite.autodiff.explain_grad import chosen_plan
from pallasite.backends import base
from pallasite.passes.schedule import gpu_blocks
from pallasite.passes.schedule.plan_parts import plan
from pallasite.sites import calls_in
from pallasite.target import chip
from tests.xla import pull_back, put

F32, BF16 = jnp.float32, jnp.bfloat16


def kernels_of(function, *shapes, dtype=BF16):
    """The backward kernels on an H200, all of which Triton must take."""
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    with config.override(target="gpu:h200"):
        (call,) = calls_in(function, *operands)
        kernels = [step.kernel for step in chosen_plan(call.kernel).steps]
    for kernel in kernels:
        options = base.Options(chip=chip("h200"))
        assert base.Compiled(base.get("triton"), kernel, options)["scheduled"]
    return kernels


def assert_right(function, reference, *shapes, tol=2e-5):
    arrays = [put(np.random.default_rng(n).normal(size=s), F32)
              for n, s in enumerate(shapes)]  # fmt: skip
    shape = jax.eval_shape(reference, *arrays).shape
    seed = put(np.random.default_rng(9).normal(size=shape), F32)
    want = pull_back(reference, arrays, seed)
    with config.override(target="gpu:h200"):
        got = pull_back(function, arrays, seed)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tol, atol=tol * abs(theirs).max())


# --- rows of scores for all keys ---


def softmax(s):
    return jax.nn.softmax(s, axis=-1)  # which stops the gradient of the maximum


def by_hand(s):
    p = jnp.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def partly_stopped(s):
    """Not a softmax to derivatives: its maximum has a cotangent."""
    high = s.max(axis=-1, keepdims=True)
    p = jnp.exp(s - lax.stop_gradient(high))
    return p / jnp.exp(s - high).sum(axis=-1, keepdims=True)


def whole_keys(q, k, v, weights, rows):
    def kernel(q_ref, k_ref, v_ref, o_ref):
        s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=F32)
        o_ref[...] = (weights(s).astype(v_ref.dtype) @ v_ref[...]).astype(o_ref.dtype)

    each = pl.BlockSpec((rows, q.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec(k.shape, lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0] // rows,),
        in_specs=[each, whole, whole],
        out_specs=each,
    )(q, k, v)


@pytest.mark.parametrize("weights", [softmax, by_hand])
def test_all_keys_at_once_become_blocks_of_keys(weights):
    run = functools.partial(whole_keys, weights=weights, rows=64)
    made = kernels_of(run, (2048, 128), (1024, 128), (1024, 128))
    assert len(made) == 3  # statistics, over queries, over keys
    assert all("f32[1024" not in kernel.text for kernel in made)


@pytest.mark.parametrize("weights", [softmax, by_hand, partly_stopped])
def test_gradient_of_all_keys_at_once(weights, monkeypatch):
    monkeypatch.setattr(gpu_blocks, "TILE_ELEMENTS", 16)
    monkeypatch.setattr(gpu_blocks, "SUMMED_ELEMENTS", 64)
    monkeypatch.setattr(gpu_blocks, "STEP", 8)
    run = functools.partial(whole_keys, weights=weights, rows=4)
    reference = lambda q, k, v: weights(q @ k.T) @ v
    assert_right(run, reference, (12, 8), (24, 8), (24, 8))


# --- weights whole in a block ---


def mlp(x, w, u, rows, act=lambda h: jnp.maximum(h, 0)):
    def kernel(x_ref, w_ref, u_ref, o_ref):
        h = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)
        h = act(h).astype(x_ref.dtype)
        y = jnp.dot(h, u_ref[...], preferred_element_type=F32)
        o_ref[...] = y.astype(o_ref.dtype)

    each = lambda width: pl.BlockSpec((rows, width), lambda i: (i, 0))
    whole = lambda a: pl.BlockSpec(a.shape, lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], u.shape[1]), x.dtype),
        grid=(pl.cdiv(x.shape[0], rows),),
        in_specs=[each(x.shape[1]), whole(w), whole(u)],
        out_specs=each(u.shape[1]),
    )(x, w, u)


def test_whole_weights_get_a_kernel_each():
    """Their cotangents are sums over all rows: one program cannot hold two of them."""
    run = functools.partial(mlp, rows=64)
    made = kernels_of(run, (8192, 1024), (1024, 2048), (2048, 1024))
    assert [kernel.text.count("= dot") for kernel in made] == [2, 1, 1, 1]
    factors = made[0].outputs  # of the second product and of both others
    assert [(p.ref.shape, p.ref.dtype.name) for p in factors] == [
        ((8192, 2048), "bf16")
    ] * 2


def test_what_fits_is_one_kernel():
    run = functools.partial(mlp, rows=64)
    assert len(kernels_of(run, (1024, 64), (64, 64), (64, 64))) == 1


@pytest.mark.parametrize("act", [jnp.tanh, lambda h: h * h])
def test_gradient_of_whole_weights(act, monkeypatch):
    few = lambda kernel, chip: kernel.text.count("= dot") <= 2
    monkeypatch.setattr(backward_choice, "may_fit", few)
    run = functools.partial(mlp, rows=4, act=act)
    reference = lambda x, w, u: act(x @ w) @ u
    assert_right(run, reference, (10, 8), (8, 24), (24, 8))  # rows past the edge


# --- sums over hidden blocks and over steps of a vocabulary ---


def gated(x, w, v, u, rows, hidden):
    """A layer whose hidden blocks are added up in scratch."""

    def kernel(x_ref, w_ref, v_ref, u_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        gate, up = (
            jnp.dot(x_ref[...], ref[...], preferred_element_type=F32)
            for ref in (w_ref, v_ref)
        )
        h = (jnp.tanh(gate) * up).astype(x_ref.dtype)
        acc_ref[...] += jnp.dot(h, u_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    (t, d), f = x.shape, w.shape[1]
    each = pl.BlockSpec((rows, d), lambda i, j: (i, 0))
    columns = pl.BlockSpec((d, hidden), lambda i, j: (0, j))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((t, d), x.dtype),
        grid=(pl.cdiv(t, rows), f // hidden),
        in_specs=[
            each,
            columns,
            columns,
            pl.BlockSpec((hidden, d), lambda i, j: (j, 0)),
        ],
        out_specs=each,
        scratch_shapes=[pltpu.VMEM((rows, d), F32)],
    )(x, w, v, u)


def test_cotangents_of_a_gated_layer_are_a_kernel_each():
    """That of x adds two products, which share its sum."""
    run = functools.partial(gated, rows=128, hidden=256)
    made = kernels_of(run, (4096, 1024), *[(1024, 4096)] * 2, (4096, 1024))
    assert [kernel.text.count("= dot") for kernel in made] == [3, 1, 1, 1, 2]


def test_gradient_of_a_gated_layer(monkeypatch):
    few = lambda kernel, chip: kernel.text.count("= dot") <= 3
    monkeypatch.setattr(backward_choice, "may_fit", few)
    run = functools.partial(gated, rows=4, hidden=8)
    reference = lambda x, w, v, u: (jnp.tanh(x @ w) * (x @ v)) @ u
    assert_right(run, reference, (10, 8), (8, 24), (8, 24), (24, 8))


def losses(x, w, rows, block):
    """The logarithm of a sum of exponentials of x @ w.T, a block of w a step."""

    def kernel(x_ref, w_ref, o_ref, m_ref, l_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -1e30)
            l_ref[...] = jnp.zeros_like(l_ref)

        z = jnp.dot(x_ref[...], w_ref[...].T, preferred_element_type=F32)
        m = jnp.maximum(m_ref[...], z.max(1, keepdims=True))
        scale = jnp.exp(m_ref[...] - m)
        l_ref[...] = l_ref[...] * scale + jnp.exp(z - m).sum(1, keepdims=True)
        m_ref[...] = m

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = m_ref[...] + jnp.log(l_ref[...])

    column = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], 1), F32),
        grid=(pl.cdiv(x.shape[0], rows), w.shape[0] // block),
        in_specs=[
            pl.BlockSpec((rows, x.shape[1]), lambda i, j: (i, 0)),
            pl.BlockSpec((block, w.shape[1]), lambda i, j: (j, 0)),
        ],
        out_specs=column,
        scratch_shapes=[pltpu.VMEM((rows, 1), F32)] * 2,
    )(x, w)


def test_steps_that_are_too_wide_are_narrower():
    """Their parts are not loops in each step, which no kernel could order anew."""
    run = functools.partial(losses, rows=128, block=256)
    made = kernels_of(run, (4096, 2048), (32768, 2048))
    assert all(kernel.text.count("= dot") <= 1 for kernel in made)
    assert len(made) == 4  # sums, gradients of scores, that of w, that of x


def test_long_steps_of_few_programs_are_divided():
    """By the estimate with the best blocks: 64 rows a program, or 128 in parts."""
    run = functools.partial(losses, rows=128, block=256)
    shapes = [jax.ShapeDtypeStruct(s, BF16) for s in ((4096, 2048), (32768, 2048))]
    (call,) = calls_in(run, *shapes)
    assert plan(call.kernel, chip("h200")).parts > 1
    # Kernels that derivatives made have a loop where the author had steps.
    with config.override(target="gpu:h200"):
        forward, *_ = calls_in(jax.value_and_grad(lambda *a: run(*a).sum()), *shapes)
    assert plan(forward.kernel, chip("h200")).parts > 1


def test_gradient_of_steps_in_parts(monkeypatch):
    monkeypatch.setattr(gpu_blocks, "TILE_ELEMENTS", 16)
    monkeypatch.setattr(gpu_blocks, "SUMMED_ELEMENTS", 32)
    monkeypatch.setattr(gpu_blocks, "STEP", 4)
    run = functools.partial(losses, rows=4, block=8)
    reference = lambda x, w: jax.nn.logsumexp(x @ w.T, axis=1, keepdims=True)
    assert_right(run, reference, (10, 8), (24, 8))


# --- shifted parts of an image ---


def conv(x, w):
    """Four shifted products; each program has a whole image."""

    def kernel(x_ref, w_ref, o_ref):
        height, width, depth = o_ref.shape
        acc = jnp.zeros((height * width, depth), F32)
        for n in range(4):
            dy, dx = divmod(n, 2)
            part = x_ref[dy : dy + height, dx : dx + width, :]
            part = part.reshape(height * width, -1)
            acc += jnp.dot(part, w_ref[dy, dx], preferred_element_type=F32)
        o_ref[...] = acc.reshape(o_ref.shape).astype(o_ref.dtype)

    count, height, width, _ = x.shape
    image = lambda *shape: pl.BlockSpec((None, *shape), lambda i: (i, 0, 0, 0))
    out = (height - 1, width - 1, w.shape[3])
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((count, *out), x.dtype),
        grid=(count,),
        in_specs=[image(*x.shape[1:]), pl.BlockSpec(w.shape, lambda i: (0, 0, 0, 0))],
        out_specs=image(*out),
    )(x, w)


def test_cotangents_of_images_and_of_weights_apart():
    made = kernels_of(conv, (64, 29, 29, 128), (2, 2, 128, 128))
    assert all("d_w" not in kernel.name or "d_x" not in kernel.name for kernel in made)
    assert len(made) > 1


def conv_reference(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=numbers)


@pytest.mark.parametrize("most", [1, 4])
def test_gradient_of_shifted_products(most, monkeypatch):
    """A kernel for each cotangent, or for each product."""
    few = lambda kernel, chip: kernel.text.count("= dot") <= most
    monkeypatch.setattr(backward_choice, "may_fit", few)
    assert_right(conv, conv_reference, (2, 5, 4, 8), (2, 2, 8, 8))


# --- rows with indices of their own ---


def taken(x, at, rows):
    def kernel(x_ref, at_ref, o_ref):
        o_ref[...] = jnp.take_along_axis(x_ref[...], at_ref[...], axis=1)

    each = lambda a: pl.BlockSpec((rows, a.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(at.shape, x.dtype),
        grid=(x.shape[0] // rows,),
        in_specs=[each(x), each(at)],
        out_specs=each(at),
    )(x, at)


def test_rows_are_scattered_to_apart():
    """Eight rows of updates, each compared with eight rows, are too many for Triton."""
    operands = [jax.ShapeDtypeStruct((64, 4096), F32),
                jax.ShapeDtypeStruct((64, 512), jnp.int32)]  # fmt: skip
    run = functools.partial(taken, rows=8)
    with config.override(target="gpu:h200"):
        (call,) = calls_in(run, *operands)
        (step,) = chosen_plan(call.kernel).steps
    assert "f32[8,4096]" not in step.kernel.text
    options = base.Options(chip=chip("h200"))
    assert base.Compiled(base.get("triton"), step.kernel, options)["scheduled"]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradient_of_rows_with_indices_of_their_own(dtype, monkeypatch):
    monkeypatch.setattr(gpu_blocks, "TILE_ELEMENTS", 16)
    rng = np.random.default_rng(0)
    x, at = put(rng.normal(size=(12, 24)), dtype), put(rng.integers(0, 24, (12, 7)))
    seed = put(rng.normal(size=at.shape), dtype)
    want = pull_back(lambda x: jnp.take_along_axis(x, at, axis=1), (x,), seed)[0]
    with config.override(target="gpu:h200"):
        got = pull_back(lambda x: taken(x, at, 4), (x,), seed)[0]
    tol = 1e-6 if dtype == F32 else 1e-2
    np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (got, want)),
                               rtol=tol, atol=tol)  # fmt: skip
