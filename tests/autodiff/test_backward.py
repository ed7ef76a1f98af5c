"""Backward kernels give the cotangents that plain `jnp` gives, as machine code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from benchmarks.grad import dot, layernorm, rowwise, softmax
from pallasite import tpu as pltpu
from pallasite.autodiff.backward import cotangents, plan
from pallasite.ir.nodes import walk
from pallasite.sites import calls_in
from pallasite.target import Machine, host
from tests.xla import put

MASKED = -1e30


def normal(seed, *shape, dtype=jnp.float32):
    return put(np.random.default_rng(seed).normal(size=shape), dtype)


def backward(run, args, kernels=None):
    """Cotangents of the one kernel call in `run`, with cotangents for its results."""
    (call,) = calls_in(run, *args)
    wanted = tuple(jnp.issubdtype(x.dtype, jnp.floating) for x in args)
    known = (True,) * call.kernel.num_outputs
    made = plan(call.kernel, wanted, known, Machine.usual(host()))
    if kernels is not None:
        assert len(made.steps) == kernels, [s.kernel.name for s in made.steps]
    seeds = [
        normal(7 + n, *p.ref.shape, dtype=p.ref.dtype.np)
        for n, p in enumerate(call.kernel.outputs)
    ]
    found = jax.jit(lambda a, s: cotangents(call, a, s, wanted))(args, seeds)
    return found, seeds


def check(run, reference, *args, tol=2e-5, kernels=None):
    found, seeds = backward(run, args, kernels)
    floats = [n for n, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floats(*some):
        full = list(args)
        for n, x in zip(floats, some, strict=True):
            full[n] = x
        return jax.tree.leaves(reference(*full))

    @jax.jit
    def want(some, seeds):
        return jax.vjp(of_floats, *some)[1](seeds)

    expected = want([args[n] for n in floats], seeds)
    for n, x in zip(floats, expected, strict=True):
        assert found[n].dtype == x.dtype and found[n].shape == x.shape
        got, x = np.asarray(found[n], np.float32), np.asarray(x, np.float32)
        np.testing.assert_allclose(got, x, rtol=tol, atol=tol * np.abs(x).max())
    return found


# --- rows ---


def rmsnorm(x, scale):
    # No epsilon: a row of zeros would be 0/0.
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True))
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def chain(x, residual, bias):
    return gelu(x + bias) * jnp.log(residual * residual) + residual


@pytest.mark.parametrize("rows, block", [(32, 8), (30, 8), (5, 16)])
def test_elementwise_chain(rows, block):
    args = normal(0, rows, 40), normal(1, rows, 40), normal(2, 1, 40)
    check(functools.partial(rowwise, chain, block), chain, *args, kernels=1)


@pytest.mark.parametrize("rows, block", [(32, 8), (29, 8)])
def test_row_softmax(rows, block):
    run = functools.partial(rowwise, softmax, block)
    check(run, softmax, normal(0, rows, 33), kernels=1)


@pytest.mark.parametrize("rows, block", [(64, 8), (51, 8)])
def test_layernorm(rows, block):
    args = normal(0, rows, 48), normal(1, 1, 48), normal(2, 1, 48)
    check(functools.partial(rowwise, layernorm, block), layernorm, *args, kernels=1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rmsnorm_at_an_edge(dtype):
    args = normal(0, 43, 48, dtype=dtype), normal(1, 1, 48, dtype=dtype)
    tol = 2e-5 if dtype == jnp.float32 else 2e-2
    run = functools.partial(rowwise, rmsnorm, 8)
    check(run, rmsnorm, *args, tol=tol, kernels=1)


POLES = {
    "div": lambda x, scale: scale * x / x.sum(1, keepdims=True),
    "rsqrt": lambda x, scale: scale * x * lax.rsqrt((x * x).sum(1, keepdims=True)),
    "log": lambda x, scale: scale * jnp.log(x),
    "log of log": lambda x, scale: scale * jnp.log(2 - jnp.log(x) / 8),
    "not followed": lambda x, scale: scale * jnp.atan2(x, x),
}


@pytest.mark.parametrize("function", POLES.values(), ids=POLES.keys())
def test_poles_past_an_edge(function):
    """Rows past the edge read zero, where these are not finite, nor derivatives."""
    args = 1 + jnp.abs(normal(0, 43, 48)), normal(1, 1, 48)
    check(functools.partial(rowwise, function, 8), function, *args, kernels=1)


def test_a_filled_edge_has_no_pole():
    """The sum of a filled row is zero, and the row is not in the result."""

    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = w_ref[...] * x_ref[...] / x_ref[...].sum(1, keepdims=True)

    def run(x, w):
        rows = pl.BlockSpec((8, 48), lambda i: (i, 0), fill=0.0)
        out = pl.BlockSpec((8, 48), lambda i: (i, 0))
        weights = pl.BlockSpec((1, 48), lambda i: (0, 0))
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=pl.cdiv(x.shape[0], 8),
            in_specs=[rows, weights],
            out_specs=out,
        )(x, w)

    args = 1 + jnp.abs(normal(0, 43, 48)), normal(1, 1, 48)
    check(run, lambda x, w: w * x / x.sum(1, keepdims=True), *args, kernels=1)


def test_narrow_operands_are_summed_in_f32():
    """512 addends of 1: a sum in bf16 stops at 256."""
    x, scale = jnp.ones((512, 8), jnp.bfloat16), jnp.ones((1, 8), jnp.bfloat16)
    run = functools.partial(rowwise, lambda x, scale: x * scale, 1)
    (call,) = calls_in(run, x, scale)
    ones = jnp.ones((512, 8), jnp.bfloat16)
    found = cotangents(call, (x, scale), [ones], (False, True))
    assert found[0] is None
    np.testing.assert_array_equal(np.asarray(found[1], np.float32), 512.0)


# --- products ---


def accumulate(x_ref, y_ref, o_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += dot(x_ref[...], y_ref[...])


def in_scratch(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += dot(x_ref[...], y_ref[...])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def bias_gelu(x_ref, y_ref, bias_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += dot(x_ref[...], y_ref[...])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = gelu(acc_ref[...] + bias_ref[...])


def bias_gelu_at_once(x_ref, y_ref, bias_ref, o_ref):
    o_ref[...] = gelu(dot(x_ref[...], y_ref[...]) + bias_ref[...])


def product(kernel, blocks, x, y, *bias, fill=0.0):
    """`kernel` with m, n and k on the grid; k is filled where blocks hang over."""
    (m, k), n = x.shape, y.shape[1]
    bm, bn, bk = blocks
    scratch = [pltpu.VMEM((bm, bn), jnp.float32)]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(pl.cdiv(m, bm), pl.cdiv(n, bn), pl.cdiv(k, bk)),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k), fill=fill),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j), fill=fill),
            *[pl.BlockSpec((1, bn), lambda i, j, k: (0, j)) for _ in bias],
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        scratch_shapes=scratch if kernel in (in_scratch, bias_gelu) else [],
    )(x, y, *bias)


def gelu_reference(x, y, bias):
    return gelu(dot(x, y) + bias)


@pytest.mark.parametrize("kernel", [accumulate, in_scratch])
@pytest.mark.parametrize("m, n, k", [(32, 48, 64), (30, 41, 50)])
def test_matmul_with_k_on_the_grid(kernel, m, n, k):
    run = functools.partial(product, kernel, (16, 16, 16))
    args = normal(0, m, k), normal(1, k, n)
    check(run, dot, *args, kernels=2)


def test_matmul_bf16():
    args = normal(0, 32, 64, dtype=jnp.bfloat16), normal(1, 64, 48, dtype=jnp.bfloat16)
    run = functools.partial(product, in_scratch, (16, 16, 32))
    check(run, lambda x, y: dot(x, y).astype(x.dtype), *args, tol=2e-2, kernels=2)


def test_bias_gelu_epilogue_with_a_k_axis():
    """A first kernel saves the cotangent of the accumulator; two more use it."""
    args = normal(0, 30, 48), normal(1, 48, 40), normal(2, 1, 40)
    run = functools.partial(product, bias_gelu, (16, 16, 16))
    check(run, gelu_reference, *args, kernels=3)


def test_bias_gelu_epilogue_without_one():
    args = normal(0, 30, 24), normal(1, 24, 40), normal(2, 1, 40)
    run = functools.partial(product, bias_gelu_at_once, (16, 16, 24))
    check(run, gelu_reference, *args, kernels=2)


def test_batched_matmul():
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = dot(x_ref[...], y_ref[...])

    def run(x, y):
        batch, m, k = x.shape
        n = y.shape[2]
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((batch, m, n), jnp.float32),
            grid=(batch, pl.cdiv(m, 16), pl.cdiv(n, 16)),
            in_specs=[
                pl.BlockSpec((None, 16, k), lambda b, i, j: (b, i, 0)),
                pl.BlockSpec((None, k, 16), lambda b, i, j: (b, 0, j)),
            ],
            out_specs=pl.BlockSpec((None, 16, 16), lambda b, i, j: (b, i, j)),
        )(x, y)

    args = normal(0, 3, 20, 24), normal(1, 3, 24, 33)
    check(run, functools.partial(jnp.einsum, "bik,bkj->bij"), *args)


@pytest.mark.parametrize(
    "contract, batch",
    [(((1,), (0,)), ((), ())), (((0,), (1,)), ((), ())), (((0,), (0,)), ((), ())),
     (((2,), (2,)), ((0,), (0,))), (((1, 2), (2, 0)), ((), ())),
     (((1,), (2,)), ((2,), (1,)))],
)  # fmt: skip
def test_every_layout_of_a_dot(contract, batch):
    sizes = {"batch": 3, "contract": (4, 5)}
    shapes = []
    for side in range(2):
        rank = max(len(contract[side]) + len(batch[side]) + 1, 2)
        shape = [6 + side] * rank
        for dims, size in ((contract[side], sizes["contract"]), (batch[side], (3,))):
            for d, n in zip(dims, size, strict=False):
                shape[d] = n
        shapes.append(shape)
    numbers = (contract, batch)
    reference = lambda x, y: lax.dot_general(x, y, numbers)

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = lax.dot_general(x_ref[...], y_ref[...], numbers)

    args = normal(0, *shapes[0]), normal(1, *shapes[1])
    out = jax.eval_shape(reference, *args)
    check(pl.pallas_call(kernel, out_shape=out), reference, *args, kernels=1)


# --- attention ---


def flash(q, k, v, is_causal, block_q=16, block_kv=8):
    """Keys in a loop; gives the logsumexp too."""
    heads, length, width = q.shape

    def kernel(q_ref, k_ref, v_ref, o_ref, log_sum_ref):
        q = q_ref[...]
        q_start = pl.program_id(1) * block_q

        def step(j, state):
            highest, total, out = state
            keys = pl.ds(j * block_kv, block_kv)
            scores = lax.dot_general(
                q, k_ref[keys, :], (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            rows = q_start + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            columns = j * block_kv + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            if is_causal:
                scores = jnp.where(rows >= columns, scores, MASKED)
            new = jnp.maximum(highest, scores.max(-1, keepdims=True))
            shrink, weights = jnp.exp(highest - new), jnp.exp(scores - new)
            total = total * shrink + weights.sum(-1, keepdims=True)
            weighted = dot(weights.astype(v_ref.dtype), v_ref[keys, :])
            return new, total, out * shrink + weighted

        column = jnp.zeros((block_q, 1), jnp.float32)
        start = (column + MASKED, column, jnp.zeros((block_q, width), jnp.float32))
        steps = k_ref.shape[0] // block_kv
        if is_causal:
            steps = lax.div(q_start + block_q + block_kv - 1, block_kv)
        highest, total, out = lax.fori_loop(0, steps, step, start)
        o_ref[...] = (out / total).astype(o_ref.dtype)
        log_sum_ref[...] = highest + jnp.log(total)

    query = pl.BlockSpec((None, block_q, width), lambda h, i: (h, i, 0))
    keys = pl.BlockSpec((None, k.shape[1], width), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((heads, length, 1), jnp.float32),
        ),
        grid=(heads, length // block_q),
        in_specs=[query, keys, keys],
        out_specs=(query, pl.BlockSpec((None, block_q, 1), lambda h, i: (h, i, 0))),
    )(q, k, v)


def attention(q, k, v, is_causal):
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    wq, wk, wv = wide
    scores = jnp.einsum("hqd,hkd->hqk", wq, wk)
    if is_causal:
        allowed = jnp.tri(q.shape[1], k.shape[1], dtype=bool)
        scores = jnp.where(allowed, scores, MASKED)
    out = jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1), wv)
    log_sum = jax.nn.logsumexp(scores, -1, keepdims=True)
    return out.astype(q.dtype), log_sum


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_flash_attention(is_causal, dtype):
    args = [0.5 * normal(n, 2, 32, 16, dtype=dtype) for n in range(3)]
    run = functools.partial(flash, is_causal=is_causal)
    reference = functools.partial(attention, is_causal=is_causal)
    tol = 5e-5 if dtype == jnp.float32 else 4e-2
    check(run, reference, *args, tol=tol, kernels=1)


def test_statistics_kept_over_several_lanes():
    """A TPU idiom: a column in scratch that is 8 wide, read as its first column."""
    rows, columns = 8, 16

    def kernel(x_ref, o_ref, highest_ref, total_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            highest_ref[...] = jnp.full_like(highest_ref, MASKED)
            total_ref[...] = jnp.zeros_like(total_ref)

        x, old = x_ref[...], highest_ref[:, :1]
        new = jnp.maximum(old, x.max(-1, keepdims=True))
        sums = jnp.exp(x - new).sum(-1, keepdims=True)
        total = total_ref[:, :1] * jnp.exp(old - new) + sums
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        highest_ref[...] = jnp.broadcast_to(new, highest_ref.shape)

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = highest_ref[:, :1] + jnp.log(total_ref[:, :1])

    run = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((2 * rows, 1), jnp.float32),
        grid=(2, 3),
        in_specs=[pl.BlockSpec((rows, columns), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((rows, 1), lambda i, j: (i, 0)),
        scratch_shapes=[pltpu.VMEM((rows, 8), jnp.float32)] * 2,
    )
    reference = functools.partial(jax.nn.logsumexp, axis=-1, keepdims=True)
    check(run, reference, normal(0, 2 * rows, 3 * columns))


# --- shared blocks, prefetched indices, overlapping windows ---


def test_blocks_shared_by_a_quotient_of_an_index():
    """Three programs in a row see one block of `y`."""

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] * jnp.sin(y_ref[...])

    run = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((6, 8), jnp.float32),
        grid=(6,),
        in_specs=[
            pl.BlockSpec((1, 8), lambda i: (i, 0)),
            pl.BlockSpec((1, 8), lambda i: (i // 3, 0)),
        ],
        out_specs=pl.BlockSpec((1, 8), lambda i: (i, 0)),
    )
    reference = lambda x, y: x * jnp.sin(jnp.repeat(y, 3, axis=0))
    args = normal(0, 6, 8), normal(1, 2, 8)
    check(run, reference, *args)
    # Each group of programs has a block of its own, so groups run in parallel.
    (kernel_made,) = pl.explain_grad(run)(*args).kernels
    (pipeline,) = (op for op in walk(kernel_made.body) if op.name == "pipeline")
    assert pipeline.attrs["grid"] == (2, 3)
    assert pipeline.attrs["semantics"] == ("parallel", "sequential")


def test_blocks_nobody_reads_have_zero_cotangents():
    run = pl.pallas_call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] ** 2),
        out_shape=jax.ShapeDtypeStruct((16,), jnp.float32),
        grid=(2,),
        in_specs=[pl.BlockSpec((8,), lambda i: (2 * i + 1,))],
        out_specs=pl.BlockSpec((8,), lambda i: (i,)),
    )
    reference = lambda x: x.reshape(4, 8)[1::2].reshape(-1) ** 2
    check(run, reference, normal(0, 32))


def test_block_numbers_past_the_last_block():
    """Programs 1 to 3 all see the last block, which hangs over the edge."""

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.log(x_ref[...]) * (1 + pl.program_id(0))

    run = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((4, 5), jnp.float32),
        grid=(4,),
        in_specs=[pl.BlockSpec((5,), lambda i: (i,))],
        out_specs=pl.BlockSpec((None, 5), lambda i: (i, 0)),
    )

    def reference(x):
        y = jnp.log(x)
        rows = [y[:5]] + [(1 + i) * jnp.pad(y[5:], (0, 2)) for i in (1, 2, 3)]
        return jnp.stack(rows)

    # The two elements past the edge count for nothing.
    check(run, reference, 1 + jnp.arange(8.0))


def test_rows_picked_by_prefetched_indices():
    def kernel(rows_ref, table_ref, o_ref):
        o_ref[...] = jnp.exp(table_ref[...])

    def run(rows, table):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((5, 8), jnp.float32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(5,),
                in_specs=[pl.BlockSpec((1, 8), lambda i, rows: (rows[i], 0))],
                out_specs=pl.BlockSpec((1, 8), lambda i, rows: (i, 0)),
            ),
        )(rows, table)

    rows = jnp.asarray([3, 0, 3, 1, 3], jnp.int32)
    found = check(run, lambda rows, t: jnp.exp(t[rows]), rows, normal(0, 4, 8))
    assert found[0] is None


def test_windows_that_overlap():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[:8] * x_ref[1:9] + x_ref[2:10]

    run = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((32,), jnp.float32),
        grid=(4,),
        in_specs=[pl.BlockSpec((pl.Element(10),), lambda i: (8 * i,))],
        out_specs=pl.BlockSpec((8,), lambda i: (i,)),
    )
    reference = lambda x: x[:32] * x[1:33] + x[2:34]
    check(run, reference, normal(0, 34))


def test_stores_that_overlap():
    """A later store hides an earlier one, also where it stores a constant."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2
        o_ref[2:6] = x_ref[2:6] ** 2
        o_ref[5:7] = jnp.zeros((2,), jnp.float32)

    reference = lambda x: (2 * x).at[2:6].set(x[2:6] ** 2).at[5:7].set(0.0)
    run = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32))
    check(run, reference, normal(0, 8), kernels=1)


def test_loops_that_keep_their_carries():
    """A recurrence that needs each of its values again, in a nested loop."""

    def step(h, x):
        return lax.fori_loop(0, 2, lambda _, h: jnp.sin(h) + 0.5 * h * x, h)

    def kernel(x_ref, o_ref):
        def body(t, h):
            h = step(h, x_ref[t])
            o_ref[t] = h
            return h

        lax.fori_loop(0, x_ref.shape[0], body, jnp.ones((8,), jnp.float32))

    def reference(x):
        def body(h, row):
            h = step(h, row)
            return h, h

        return lax.scan(body, jnp.ones((8,), jnp.float32), x)[1]

    run = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((6, 16), jnp.float32),
        grid=(2,),
        in_specs=[pl.BlockSpec((6, 8), lambda i: (0, i))],
        out_specs=pl.BlockSpec((6, 8), lambda i: (0, i)),
    )
    both = lambda x: jnp.concatenate([reference(x[:, :8]), reference(x[:, 8:])], 1)
    check(run, both, normal(0, 6, 16), kernels=1)


def test_a_carry_that_starts_as_a_value_the_loop_uses():
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = lax.fori_loop(0, 3, lambda _, power: power * x, x)

    run = lambda x: pl.pallas_call(kernel, out_shape=x)(x)
    check(run, lambda x: x * x * x * x, normal(0, 4, 8), kernels=1)


def test_a_while_loop_that_counts_is_a_loop_with_a_bound():
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        step = lambda state: (state[0] + 1, state[1] * x)
        _, power = lax.while_loop(lambda state: state[0] < 3, step, (0, x))
        o_ref[...] = power

    run = lambda x: pl.pallas_call(kernel, out_shape=x)(x)
    check(run, lambda x: x * x * x * x, normal(0, 4, 8), kernels=1)


def test_a_cotangent_that_is_not_known():
    """Results without a cotangent take no part."""

    def kernel(x_ref, o_ref, p_ref):
        o_ref[...] = jnp.sin(x_ref[...])
        p_ref[...] = jnp.exp(x_ref[...])

    out = jax.ShapeDtypeStruct((8,), jnp.float32)
    x, seed = normal(0, 8), normal(1, 8)
    (call,) = calls_in(pl.pallas_call(kernel, out_shape=(out, out)), x)
    (found,) = cotangents(call, [x], [seed, None], [True])
    np.testing.assert_allclose(found, jnp.cos(x) * seed, rtol=1e-5)
    assert cotangents(call, [x], [None, None], [True]) == [None]


def test_what_an_atomic_add_drops_has_no_gradient():
    places = jnp.array([-1, 7, 8, 5, 5, -9, 77, 0])  # 8, -9 and 77 are dropped
    weights = jnp.arange(1.0, 25.0).reshape(8, 3)

    def add_up(x_ref, places_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        pl.atomic_add(o_ref, (places_ref[...],), x_ref[...])

    def weighted(x):
        out = jax.ShapeDtypeStruct((8, 3), x.dtype)
        return jnp.sum(weights * pl.pallas_call(add_up, out)(x, places))

    read = jnp.where(places < 0, places + 8, places)
    inside = (read >= 0) & (read < 8)
    expected = jnp.where(inside[:, None], weights[jnp.clip(read, 0, 7)], 0)
    np.testing.assert_array_equal(jax.grad(weighted)(jnp.ones((8, 3))), expected)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int32])
def test_index_arrays_of_types_narrower_than_the_ref_is_long(dtype):
    places = jnp.array([0, 5, 120, 127]).astype(dtype)
    if dtype == jnp.uint8:
        places = places + dtype(128)

    def kernel(x_ref, places_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        pl.atomic_add(o_ref, (places_ref[...],), x_ref[places_ref[...]])

    weights, wide = normal(0, 300), places.astype(jnp.int32)
    out = jax.ShapeDtypeStruct((300,), jnp.float32)
    run = lambda x: jnp.sum(weights * pl.pallas_call(kernel, out)(x, places))
    expected = jnp.zeros(300).at[wide].set(weights[wide])
    np.testing.assert_array_equal(jax.grad(run)(normal(1, 300)), expected)
