"""Results that steps read become scratch that the last step stores. Text to text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import walk
from pallasite.ir.verify import verify
from pallasite.passes.analysis.axis_state import state_along
from pallasite.passes.analysis.grid import analyze, find_pipeline
from pallasite.passes.run import run
from pallasite.passes.schedule.plan_parts import plan
from pallasite.passes.schedule.split_axis import split
from pallasite.passes.schedule.states_in_scratch import states_in_scratch
from pallasite.sites import kernels_in
from pallasite.target import GPUS

F32 = jnp.float32


def evaluate(kernel, arrays):
    with np.errstate(all="ignore"):
        found = Walker(kernel, NumpyNumbers()).run([a.copy() for a in arrays])
    return [np.asarray(x) for x in found]


def statistics(rows, columns, block, dtype=F32, lead=False, start=-jnp.inf):
    """The maximum of each column, and the sum of exponentials relative to it."""
    br, bc = block

    def kernel(x_ref, m_ref, l_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, start)
            l_ref[...] = jnp.zeros_like(l_ref)

        at = pl.program_id(1) * br + jax.lax.broadcasted_iota(jnp.int32, block, 0)
        x = jnp.where(at < rows, x_ref[...].astype(F32), start)
        m = jnp.maximum(m_ref[...], x.max(0, keepdims=not lead))
        more = jnp.exp(x - m).sum(0, keepdims=not lead)
        l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - m) + more
        m_ref[...] = m

    row = pl.BlockSpec((None, bc) if lead else (1, bc), lambda j, i: (0, j))
    call = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((1, columns), F32)] * 2,
        grid=(pl.cdiv(columns, bc), pl.cdiv(rows, br)),
        in_specs=[pl.BlockSpec(block, lambda j, i: (i, j))],
        out_specs=[row, row],
    )
    (made,) = kernels_in(call, jax.ShapeDtypeStruct((rows, columns), dtype))
    return run(made)


CASES = [
    (40, 64, (8, 32), F32, False, -jnp.inf),
    (37, 50, (8, 32), jnp.bfloat16, False, -jnp.inf),
    (37, 50, (8, 32), F32, True, -1e30),
]


@pytest.mark.parametrize("case", CASES)
def test_statistics_merge_as_scratch(case):
    before = statistics(*case)
    info = analyze(before)
    assert "rescaled" in state_along(before, 1, info).reason
    after = states_in_scratch(before, 1, info)
    verify(after)
    assert [op.name for op in after.body.ops].count("alloc") == 2
    body = find_pipeline(after).regions[-1]
    assert body.ops[-1].name == "cond"
    assert [op.name for op in walk(body.ops[-1].regions[1])] == ["load", "store"] * 2
    state = state_along(after, 1)
    assert state.kind == "online softmax"
    rng = np.random.default_rng(0)
    x = np.array(jnp.asarray(3 * rng.normal(size=case[:2]), case[3]))
    x[1, 3], x[2, 5], x[3, 7] = np.nan, np.inf, -np.inf
    want = evaluate(before, [x])
    for got, expected in zip(evaluate(after, [x]), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    in_parts(after, state, x, want)


def in_parts(kernel, state, x, want):
    for parts in (2, 5):
        program = split(kernel, state, parts)
        arrays = [x]
        for step in program.steps:
            verify(step.kernel)
            pairs = zip(step.operands, step.kernel.inputs, strict=True)
            given = [arrays[n].reshape(ref.ref.shape) for n, ref in pairs]
            arrays += evaluate(step.kernel, given)
        for result, expected in zip(program.results, want, strict=True):
            got = arrays[result.array].reshape(expected.shape)
            np.testing.assert_allclose(got, expected, 1e-5)


def test_long_columns_of_few_programs_are_split():
    made = plan(statistics(8192, 4096, (128, 256)), GPUS["h200"])
    assert made.kind == "online softmax" and made.parts * 16 >= 132
    assert plan(statistics(256, 4096, (128, 256)), GPUS["h200"]).program is None


@pytest.mark.parametrize("index", [lambda j, i: (0, 0), lambda j, i: (0, i)])
def test_blocks_that_others_see_stay(index):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] = jnp.maximum(o_ref[...], x_ref[...])

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 512), F32),
        grid=(4, 4),
        in_specs=[pl.BlockSpec((8, 128), lambda j, i: (j, i))],
        out_specs=pl.BlockSpec((8, 128), index),
    )
    (made,) = kernels_in(call, jax.ShapeDtypeStruct((32, 512), F32))
    made = run(made)
    for axis in range(len(analyze(made).axes)):
        assert states_in_scratch(made, axis, analyze(made)) is made


def counting(also_sums, of=lambda x, most: most):
    """How many blocks of a column reach its maximum."""

    def kernel(x_ref, m_ref, n_ref, l_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            n_ref[...] = jnp.zeros_like(n_ref)
            l_ref[...] = jnp.zeros_like(l_ref)

        x, old, none = x_ref[...], m_ref[...], jnp.zeros(m_ref.shape, F32)
        most = x.max(0, keepdims=True)
        m = jnp.maximum(old, most)
        more = jnp.where(of(x, most) == m, none + 1, none)
        n_ref[...] = jnp.where(old == m, n_ref[...], none) + more
        if also_sums:
            total = jnp.exp(x - m).sum(0, keepdims=True)
            l_ref[...] = l_ref[...] * jnp.exp(old - m) + total
        else:
            l_ref[...] += 1.0
        m_ref[...] = m

    out = pl.BlockSpec((1, 64), lambda i: (0, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((1, 64), F32)] * 3,
        grid=(10,),
        in_specs=[pl.BlockSpec((4, 64), lambda i: (i, 0))],
        out_specs=[out] * 3,
    )
    (made,) = kernels_in(call, jax.ShapeDtypeStruct((40, 64), F32))
    made = run(made)
    return made, states_in_scratch(made, 0, analyze(made))


@pytest.mark.parametrize("also_sums", [False, True])
def test_counts_of_a_maximum_merge_too(also_sums):
    before, after = counting(also_sums)
    state = state_along(after, 0)
    assert not state.reason, state.reason
    x = np.random.default_rng(0).integers(0, 4, (40, 64)).astype(np.float32)
    x[11, 3], x[2, 5], x[3, 7] = np.nan, np.inf, -np.inf
    if not also_sums:  # minus infinity less itself is no number
        x[:, 9], x[:12, 10] = -np.inf, -np.inf
        x[:, 11], x[:, 12] = np.finfo(np.float32).min, np.inf
    want = evaluate(before, [x])
    assert want[1].max() > 2
    in_parts(after, state, x, want)


def test_what_is_not_below_the_maximum_is_not_counted_in_parts():
    _, after = counting(False, lambda x, most: x.min(0, keepdims=True) + 2)
    assert "n_ref" in state_along(after, 0).reason
