"""Axes that carry sums, extremes, atomics or prefixes, split into parts and merged."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import primitive, sites
from pallasite import tpu as pltpu
from pallasite.emulation.step_order import ordered
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify
from pallasite.passes.analysis.axis_state import AxisState, state_along
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.run import run
from pallasite.passes.schedule.plan_parts import plan
from pallasite.passes.schedule.split_axis import Order, Program, even_parts, split
from pallasite.target import GPUS
from tests.zoo import all_cases

F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16


def evaluate(kernel: Kernel, arrays: list[np.ndarray]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        copies = [array.copy() for array in arrays]
        return [np.asarray(out) for out in Walker(kernel, NumpyNumbers()).run(copies)]


def evaluate_program(program: Program, arrays: list[np.ndarray]) -> list[np.ndarray]:
    values = list(arrays)
    for step in program.steps:
        if isinstance(step, Order):
            verify(step.number)
            taken = [values[n] for n in step.operands]
            found = ordered(step.number, step.sizes, step.count)(*taken)
            values += map(np.asarray, found)
            continue
        verify(step.kernel)
        pairs = zip(step.operands, step.kernel.inputs, strict=True)
        values += evaluate(
            step.kernel, [values[n].reshape(p.ref.shape) for n, p in pairs]
        )
    return [values[r.array][-1] if r.last else values[r.array] for r in program.results]


def states_of(kernel: Kernel) -> list[AxisState]:
    """What each sequential axis of several steps carries."""
    if sum(op.name == "pipeline" for op in kernel.body.ops) != 1:
        return []
    info = analyze(kernel)
    axes = [a for a in info.sequential if (info.axes[a].size or 0) > 1]
    return [state_along(kernel, axis, info) for axis in axes]


def check(kernel: Kernel, arrays: list[np.ndarray], state: AxisState, **tolerances):
    """Whatever the number of parts, the results are those of the whole kernel."""
    assert not state.reason, state.reason
    expected = evaluate(kernel, arrays)
    size = analyze(kernel).axes[state.axis].size or 1
    for parts in sorted({2, 3, size - 1, size} - {0, 1}):
        found = evaluate_program(split(kernel, state, parts), arrays)
        for a, b in zip(expected, found, strict=True):
            a, b = (np.asarray(x) for x in (a, b.reshape(a.shape)))
            if a.dtype.kind in "iub":
                np.testing.assert_array_equal(a, b)
            else:
                wide = [x.astype(np.float64) for x in (a, b)]
                np.testing.assert_allclose(*wide, **tolerances)


# --- each kind of carry ---


def first(axis: int = 0):
    return pl.when(pl.program_id(axis) == 0)


def last(axis: int = 0):
    return pl.when(pl.program_id(axis) == pl.num_programs(axis) - 1)


def total_kernel(x_ref, o_ref):
    @first()
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.sum(x_ref[...].astype(o_ref.dtype), keepdims=True)


def mean_kernel(x_ref, o_ref):
    """The output is the accumulator, and the last step divides it."""
    total_kernel(x_ref, o_ref)

    @last()
    def _():
        o_ref[...] = (o_ref[...] / x_ref.size).astype(o_ref.dtype)


def started_kernel(x_ref, o_ref):
    """The first step stores what the others add to."""
    part = jnp.sum(x_ref[...].astype(o_ref.dtype), keepdims=True)

    @first()
    def _():
        o_ref[...] = part + 5

    @pl.when(pl.program_id(0) > 0)
    def _():
        o_ref[...] = o_ref[...] + part


def extremes_kernel(x_ref, o_ref):
    x = x_ref[...].astype(o_ref.dtype)

    @first()
    def _():
        o_ref[...] = jnp.full_like(o_ref, -1)

    o_ref[...] = jnp.maximum(o_ref[...], jnp.max(x, keepdims=True))


def norm_kernel(x_ref, o_ref, acc_ref):
    @first()
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    x = x_ref[...].astype(acc_ref.dtype)
    acc_ref[...] += jnp.sum(x * x, axis=0)

    @last()
    def _():
        total = jnp.sqrt(jnp.sum(acc_ref[...].astype(F32)))
        o_ref[...] = jnp.full(o_ref.shape, total).astype(o_ref.dtype)


def value_kernel(x_ref, o_ref, acc_ref):
    """The last step uses the sum itself, not what it stored."""

    @first()
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    new = acc_ref[...] + jnp.sum(x_ref[...].astype(acc_ref.dtype), axis=0)
    acc_ref[...] = new

    @last()
    def _():
        o_ref[...] = jnp.full(o_ref.shape, jnp.max(new) * 2).astype(o_ref.dtype)


def every_step_kernel(x_ref, o_ref, acc_ref):
    """Every step stores the sum so far; the last one's remains."""

    @first()
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.sum(x_ref[...].astype(acc_ref.dtype), axis=0)
    o_ref[...] = jnp.full(o_ref.shape, jnp.sum(acc_ref[...])).astype(o_ref.dtype)


def loop_kernel(x_ref, o_ref):
    """A loop inside adds row by row, starting from the old sum."""

    @first()
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    def add(row, total):
        return total + jnp.sum(x_ref[row].astype(o_ref.dtype))

    o_ref[0, 0] = jax.lax.fori_loop(0, x_ref.shape[0], add, o_ref[0, 0])


def selected_kernel(x_ref, o_ref, acc_ref):
    """A select starts one element, and another merges it."""
    start = pl.program_id(0) == 0
    part = jnp.sum(x_ref[...].astype(F32))
    acc_ref[2] = jnp.where(start, 3.0 - part, acc_ref[2]) + part
    o_ref[...] = jnp.full(o_ref.shape, acc_ref[2]).astype(o_ref.dtype)


def chosen_kernel(x_ref, o_ref, acc_ref):
    """Only after the first step is there something to add to."""
    part = jnp.sum(x_ref[...].astype(F32))
    later = pl.program_id(0) >= 1
    acc_ref[0] = jax.lax.cond(later, lambda: acc_ref[0] + part, lambda: part + 7)
    o_ref[...] = jnp.full(o_ref.shape, acc_ref[0]).astype(o_ref.dtype)


SCRATCH = [pltpu.VMEM((16,), F32)]
KINDS = {
    "total": (total_kernel, (), "sum"),
    "mean": (mean_kernel, (), "sum"),
    "started": (started_kernel, (), "sum"),
    "extremes": (extremes_kernel, (), "max"),
    "norm": (norm_kernel, SCRATCH, "sum"),
    "value": (value_kernel, SCRATCH, "sum"),
    "every_step": (every_step_kernel, SCRATCH, "sum"),
    "loop": (loop_kernel, (), "sum"),
    "selected": (selected_kernel, SCRATCH, "sum"),
    "chosen": (chosen_kernel, [pltpu.SMEM((1,), F32)], "sum"),
}


def into_one_block(body, scratch, steps, dtype, out_dtype):
    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((1, 1), out_dtype),
        grid=(steps,),
        in_specs=[pl.BlockSpec((4, 16), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, 1), lambda i: (0, 0)),
        scratch_shapes=scratch,
    )
    x = jax.ShapeDtypeStruct((4 * steps, 16), dtype)
    return run(sites.kernels_in(call, x)[0])


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (I32, I32)], ids=str)
@pytest.mark.parametrize("steps", [2, 7, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_one_block(kind, steps, dtypes):
    body, scratch, merge = KINDS[kind]
    kernel = into_one_block(body, scratch, steps, *dtypes)
    (state,) = states_of(kernel)
    assert state.kind == merge
    rng = np.random.default_rng(steps)
    x = (10 * rng.normal(size=(4 * steps, 16))).astype(jnp.dtype(dtypes[0]))
    check(kernel, [x], state, rtol=1e-5, atol=1e-5)


def test_a_maximum_keeps_nan():
    kernel = into_one_block(extremes_kernel, (), 6, F32, F32)
    (state,) = states_of(kernel)
    x = np.zeros((24, 16), np.float32)
    x[13, 3] = np.nan
    check(kernel, [x], state, rtol=0)
    assert np.isnan(evaluate_program(split(kernel, state, 3), [x])[0]).all()


def prefix_kernel(x_ref, o_ref, total_ref, carry_ref):
    @first()
    def _():
        carry_ref[...] = jnp.ones_like(carry_ref)

    y = jnp.cumsum(x_ref[...]) + carry_ref[0]
    o_ref[...] = y
    carry_ref[0] = y[-1]

    @last()
    def _():
        total_ref[...] = y[-1:]


def prefix_by_select_kernel(x_ref, o_ref, total_ref, carry_ref):
    start = pl.program_id(0) == 0
    before = jnp.where(start, 1.0, carry_ref[0])
    y = jnp.cumsum(x_ref[...])
    o_ref[...] = y + before
    carry_ref[0] = before + y[-1]
    total_ref[...] = (y + before)[-1:]


@pytest.mark.parametrize("space", [pltpu.VMEM, pltpu.SMEM])
@pytest.mark.parametrize("body", [prefix_kernel, prefix_by_select_kernel])
@pytest.mark.parametrize("steps", [2, 5, 8])
def test_prefix_sums(steps, body, space):
    n = 8 * steps
    call = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((n,), F32), jax.ShapeDtypeStruct((1,), F32)],
        grid=(steps,),
        in_specs=[pl.BlockSpec((8,), lambda i: (i,))],
        out_specs=[
            pl.BlockSpec((8,), lambda i: (i,)),
            pl.BlockSpec((1,), lambda i: (0,)),
        ],
        scratch_shapes=[space((1,), F32)],
    )
    kernel = run(sites.kernels_in(call, jax.ShapeDtypeStruct((n,), F32))[0])
    (state,) = states_of(kernel)
    assert state.kind == "prefix sum"
    x = np.random.default_rng(0).normal(size=n).astype(np.float32)
    check(kernel, [x], state, rtol=1e-5, atol=1e-5)


def columns_kernel(x_ref, o_ref, y_ref):
    """Sums along an outer axis, while an inner one moves; and a result per step."""

    @first()
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.sum(x_ref[...], axis=0, keepdims=True)
    y_ref[...] = x_ref[...] * 2


@pytest.mark.parametrize("rows", [3, 8, 13])
def test_columns_with_edges(rows):
    """Blocks extend past both edges; past them, `fill` is read."""
    call = pl.pallas_call(
        columns_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((1, 27), F32),
            jax.ShapeDtypeStruct((4 * rows - 1, 27), F32),
        ],
        grid=(rows, 4),
        in_specs=[pl.BlockSpec((4, 8), lambda i, j: (i, j), fill=0.0)],
        out_specs=[
            pl.BlockSpec((1, 8), lambda i, j: (0, j)),
            pl.BlockSpec((4, 8), lambda i, j: (i, j)),
        ],
    )
    given = jax.ShapeDtypeStruct((4 * rows - 1, 27), F32)
    kernel = run(sites.kernels_in(call, given)[0])
    (state,) = states_of(kernel)
    x = np.random.default_rng(0).normal(size=given.shape).astype(np.float32)
    check(kernel, [x], state, rtol=1e-5, atol=1e-5)


def two_axes_kernel(x_ref, o_ref, acc_ref):
    """One sum over two axes: the inner one carries as well."""
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when((i == 0) & (j == 0))
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.sum(x_ref[...], axis=0)

    @pl.when((i == pl.num_programs(0) - 1) & (j == pl.num_programs(1) - 1))
    def _():
        o_ref[...] = jnp.sum(acc_ref[...])[None]


def test_two_axes():
    call = pl.pallas_call(
        two_axes_kernel,
        out_shape=jax.ShapeDtypeStruct((1,), F32),
        grid=(5, 3),
        in_specs=[pl.BlockSpec((4, 8), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((1,), lambda i, j: (0,)),
        scratch_shapes=[pltpu.VMEM((8,), F32)],
    )
    given = jax.ShapeDtypeStruct((20, 24), F32)
    kernel = run(sites.kernels_in(call, given)[0])
    state, inner = states_of(kernel)
    x = np.random.default_rng(0).normal(size=given.shape).astype(np.float32)
    check(kernel, [x], state, rtol=1e-5, atol=1e-5)
    assert "also carries along axis 0" in inner.reason


# --- running maxima, and sums relative to them ---


def both_kernel(x_ref, o_ref, m_ref):
    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)

    o_ref[...] += (x_ref[...] ** 2).sum(keepdims=True)
    m_ref[...] = jnp.maximum(m_ref[...], x_ref[...].max(keepdims=True))


def test_few_parts_of_one_axis_have_parts_of_another():
    def call(shape, block):
        one = pl.BlockSpec((1, 1), lambda i, j: (0, 0))
        return pl.pallas_call(
            both_kernel,
            (jax.ShapeDtypeStruct((1, 1), jnp.float32),) * 2,
            grid=tuple(n // b for n, b in zip(shape, block, strict=True)),
            in_specs=[pl.BlockSpec(block, lambda i, j: (i, j))],
            out_specs=[one, one],
        )

    large = jax.ShapeDtypeStruct((1 << 13, 1 << 13), jnp.float32)
    (kernel,) = sites.kernels_in(call(large.shape, (512, 512)), large)
    found = plan(kernel, GPUS["h200"])
    assert found.program is not None and found.parts == 256
    x = np.random.default_rng(0).normal(size=(32, 48)).astype(np.float32)
    (kernel,) = sites.kernels_in(call(x.shape, (8, 16)), x)
    kernel = run(kernel)
    outer = split(kernel, state_along(kernel, 0, analyze(kernel)), 4)
    second = run(outer.kernels[0])
    axes = [a for a in analyze(second).sequential if analyze(second).axes[a].size == 3]
    inner = split(second, state_along(second, axes[-1], analyze(second)), 3)
    got = evaluate_program(outer.with_step(0, inner, 1), [x])
    for a, b in zip(got, evaluate(kernel, [x]), strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, 1e-5)


def attention_kernel(
    q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, base2, start
):
    i, j = pl.program_id(0), pl.program_id(1)

    @first(1)
    def _():
        m_ref[...] = jnp.full_like(m_ref, start)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(j * 8 <= i * 4 + 3)
    def _():
        exp = jnp.exp2 if base2 else jnp.exp
        s = jnp.dot(q_ref[...], k_ref[...].T)
        rows = i * 4 + jax.lax.broadcasted_iota(I32, s.shape, 0)
        s = jnp.where(
            rows >= j * 8 + jax.lax.broadcasted_iota(I32, s.shape, 1), s, start
        )
        m = m_ref[...]
        new = jnp.maximum(m, s.max(axis=1, keepdims=True))
        scale = exp(m - new)
        p = exp(s - new)
        l_ref[...] = l_ref[...] * scale[:, 0] + p.sum(axis=1)
        acc_ref[...] = acc_ref[...] * scale + jnp.dot(p, v_ref[...])
        m_ref[...] = new

    @last(1)
    def _():
        o_ref[...] = acc_ref[...] / l_ref[...][:, None]


@pytest.mark.parametrize("base2", [False, True])
@pytest.mark.parametrize("start", [-jnp.inf, -1e30])
def test_online_softmax(base2, start):
    """Causal attention: some parts see no key of a row at all."""
    call = pl.pallas_call(
        functools.partial(attention_kernel, base2=base2, start=start),
        out_shape=jax.ShapeDtypeStruct((40, 16), F32),
        grid=(10, 5),
        in_specs=[
            pl.BlockSpec((4, 16), lambda i, j: (i, 0)),
            pl.BlockSpec((8, 16), lambda i, j: (j, 0)),
            pl.BlockSpec((8, 16), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((4, 16), lambda i, j: (i, 0)),
        scratch_shapes=[
            pltpu.VMEM((4, 1), F32),
            pltpu.VMEM((4,), F32),
            pltpu.VMEM((4, 16), F32),
        ],
    )
    given = [jax.ShapeDtypeStruct((40, 16), F32)] * 3
    kernel = run(sites.kernels_in(call, *given)[0])
    (state,) = states_of(kernel)
    assert state.kind == "online softmax"
    rng = np.random.default_rng(0)
    arrays = [3 * rng.normal(size=x.shape).astype(np.float32) for x in given]
    check(kernel, arrays, state, rtol=1e-4, atol=1e-5)
    assert np.isfinite(evaluate(kernel, arrays)[0]).all()


def scalar_softmax_kernel(x_ref, o_ref, m, l, a):
    """The statistics of one row as scalars, and a sum of several rows beside them."""

    @first()
    def _():
        m[0], l[0] = -jnp.inf, 0.0
        a[...] = jnp.zeros_like(a)

    old = m[0]
    new = jnp.maximum(old, x_ref[0, :].max())
    p = jnp.exp(x_ref[0, :] - new)
    l[0] = l[0] * jnp.exp(old - new) + p.sum()
    a[...] = a[...] * jnp.exp(old - new) + jnp.dot(x_ref[...], p)
    m[0] = new

    @last()
    def _():
        o_ref[...] = a[...] / l[0]


def test_online_softmax_of_scalars():
    call = pl.pallas_call(
        scalar_softmax_kernel,
        jax.ShapeDtypeStruct((3,), F32),
        grid=(6,),
        in_specs=[pl.BlockSpec((3, 4), lambda t: (0, t))],
        out_specs=pl.BlockSpec((3,), lambda t: (0,)),
        scratch_shapes=[
            pltpu.SMEM((1,), F32),
            pltpu.SMEM((1,), F32),
            pltpu.VMEM((3,), F32),
        ],
    )
    x = 3 * np.random.default_rng(0).normal(size=(3, 24)).astype(np.float32)
    (state,) = states_of(kernel := run(sites.kernels_in(call, x)[0]))
    assert state.kind == "online softmax"
    check(kernel, [x], state, rtol=1e-5)


LEAST = float(np.finfo(np.float32).min)


def seen_maximum_kernel(x_ref, w_ref, top_ref, sum_ref, o_ref, m_ref, l_ref, a_ref):
    """The statistics of a softmax whose maximum is itself a result."""

    @first()
    def _():
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        a_ref[...] = jnp.zeros_like(a_ref)

    x, m = x_ref[...], m_ref[...]
    new = jnp.maximum(m, x.max(axis=1, keepdims=True))
    p = jnp.exp(x - new)
    l_ref[...] = l_ref[...] * jnp.exp(m - new)[:, 0] + p.sum(axis=1)
    a_ref[...] = a_ref[...] * jnp.exp(m - new).T + jnp.dot(w_ref[...], p.T)
    m_ref[...] = new

    @last()
    def _():
        top_ref[...] = m_ref[...][:, 0]
        sum_ref[...] = l_ref[...]
        o_ref[...] = a_ref[...]


def test_the_least_number_as_the_maximum_of_all():
    """A part starts there where the author's first step starts at minus infinity."""
    call = pl.pallas_call(
        seen_maximum_kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, F32) for shape in ((4,), (4,), (6, 4))],
        grid=(5,),
        in_specs=[
            pl.BlockSpec((4, 8), lambda i: (0, i)),
            pl.BlockSpec((6, 8), lambda i: (0, i)),
        ],
        out_specs=[
            pl.BlockSpec((4,), lambda i: (0,)),
            pl.BlockSpec((4,), lambda i: (0,)),
            pl.BlockSpec((6, 4), lambda i: (0, 0)),
        ],
        scratch_shapes=[pltpu.VMEM(shape, F32) for shape in ((4, 1), (4,), (6, 4))],
    )
    given = [jax.ShapeDtypeStruct((n, 40), F32) for n in (4, 6)]
    kernel = run(sites.kernels_in(call, *given)[0])
    (state,) = states_of(kernel)
    assert state.kind == "online softmax"
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=each.shape).astype(np.float32) for each in given)
    x[0], x[1, 8:] = LEAST, LEAST  # a row without a score, and parts without one
    x[2, :] = -np.inf
    x[2, [3, 9, 17, 25, 33]] = LEAST  # one in every step
    check(kernel, [x, w], state, rtol=1e-5, atol=1e-5)
    for parts in (2, 5):  # nothing at all: only the maximum is a number
        found = evaluate_program(
            split(kernel, state, parts), [np.full_like(x, -np.inf), w]
        )
        assert (found[0] == -np.inf).all()


def place_of_largest(spelling: str, shape: tuple[int, ...], strict: bool = True):
    """The largest of blocks of columns, and what belongs to the first such block."""

    def kernel(x_ref, w_ref, o_ref, i_ref, v_ref, m, a, w):
        t = pl.program_id(0)
        at = (0,) * len(shape) if shape == (1,) else ...

        @pl.when(t == 0)
        def _():
            m[at] = jnp.full_like(m[at], -jnp.inf)
            a[at] = jnp.full_like(a[at], -1)
            w[at] = jnp.full_like(w[at], 7.0)

        x, beside = x_ref[...], w_ref[...].sum(axis=1, keepdims=True)
        most = x.max(axis=1, keepdims=True)
        place = jnp.argmax(x, axis=1, keepdims=True).astype(I32) + t * x.shape[1]
        if shape == (1,):
            most, place, beside = most[0, 0], place[0, 0], beside[0, 0]
        old = m[at]
        better = most > old if strict else most >= old
        if spelling == "flipped":
            better = old < most
        if spelling == "guard":

            @pl.when(better if shape == (1,) else jnp.any(better))
            def _():
                a[at], w[at], m[at] = place, beside, most
        else:
            a[at] = jnp.where(better, place, a[at])
            w[at] = jnp.where(better, beside, w[at])
            larger = jnp.maximum(old, most)
            m[at] = larger if spelling == "max" else jnp.where(better, most, old)

        @last()
        def _():
            o_ref[at], i_ref[at], v_ref[at] = m[at], a[at], w[at]

    space = pltpu.SMEM if shape == (1,) else pltpu.VMEM
    rows = shape[0]
    out = pl.BlockSpec(shape, lambda t: (0,) * len(shape), memory_space=space)
    return pl.pallas_call(
        kernel,
        [jax.ShapeDtypeStruct(shape, dtype) for dtype in (F32, I32, F32)],
        grid=(6,),
        in_specs=[pl.BlockSpec((rows, 4), lambda t: (0, t))] * 2,
        out_specs=[out] * 3,
        scratch_shapes=[space(shape, dtype) for dtype in (F32, I32, F32)],
    )


@pytest.mark.parametrize("shape", [(1,), (5, 1)], ids=str)
@pytest.mark.parametrize("spelling", ["select", "flipped", "max", "guard"])
def test_what_belongs_to_a_maximum(spelling: str, shape: tuple[int, ...]):
    given = jax.ShapeDtypeStruct((shape[0], 24), F32)
    call = place_of_largest(spelling, shape)
    kernel = run(sites.kernels_in(call, given, given)[0])
    (state,) = states_of(kernel)
    if spelling == "guard" and shape != (1,):
        assert state.reason  # rows that are not better are overwritten, too
        return
    assert state.kind == "max and what belongs to it"
    for seed in range(8):
        rng = np.random.default_rng(seed)
        x = rng.integers(-2, 3, given.shape).astype(np.float32)  # many are equal
        x[rng.random(x.shape) < 0.3] = -np.inf
        x[:, : 4 * rng.integers(0, 6)] = -np.inf
        w = rng.choice([1.5, np.inf, -np.inf, 0.25], x.shape).astype(np.float32)
        check(kernel, [x, w], state)


def test_what_belongs_to_the_last_of_equal_maxima():
    """Steps that see no number store their own; not what parts do."""
    call = place_of_largest("select", (1,), strict=False)
    given = jax.ShapeDtypeStruct((1, 24), F32)
    (state,) = states_of(run(sites.kernels_in(call, given, given)[0]))
    assert "carries values that do not merge" in state.reason


def decayed_kernel(x_ref, o_ref, m_ref, l_ref):
    """Not an online softmax: the sum also decays."""
    m = m_ref[...]
    new = jnp.maximum(m, x_ref[...])
    l_ref[...] = l_ref[...] * jnp.exp(m - new) * 0.5 + jnp.exp(x_ref[...] - new)
    m_ref[...] = new


def unscaled_kernel(x_ref, o_ref, m_ref, l_ref):
    """Nor is this: what is added is not relative to the maximum."""
    m = m_ref[...]
    new = jnp.maximum(m, x_ref[...])
    l_ref[...] = l_ref[...] * jnp.exp(m - new) + x_ref[...]
    m_ref[...] = new


def late_kernel(x_ref, o_ref, m_ref, l_ref):
    """Nor this: the maximum that is kept is another."""
    m = m_ref[...]
    new = jnp.maximum(m, x_ref[...])
    l_ref[...] = l_ref[...] * jnp.exp(m - new) + jnp.exp(x_ref[...] - new)
    m_ref[...] = jnp.maximum(m, x_ref[...] + 1)


@pytest.mark.parametrize("body", [decayed_kernel, unscaled_kernel, late_kernel])
def test_no_online_softmax(body):
    @functools.wraps(body)
    def whole(x_ref, o_ref, m_ref, l_ref):
        @first()
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            l_ref[...] = jnp.zeros_like(l_ref)

        body(x_ref, o_ref, m_ref, l_ref)

        @last()
        def _():
            o_ref[...] = m_ref[...] + jnp.log(l_ref[...])

    call = pl.pallas_call(
        whole,
        out_shape=jax.ShapeDtypeStruct((8,), F32),
        grid=(4,),
        in_specs=[pl.BlockSpec((8,), lambda i: (i,))],
        out_specs=pl.BlockSpec((8,), lambda i: (0,)),
        scratch_shapes=[pltpu.VMEM((8,), F32)] * 2,
    )
    kernel = run(sites.kernels_in(call, jax.ShapeDtypeStruct((32,), F32))[0])
    (state,) = states_of(kernel)
    assert "l_ref" in state.reason


# --- what does not merge ---


def previous_kernel(x_ref, o_ref, acc_ref):
    o_ref[...] = acc_ref[...]
    acc_ref[...] = x_ref[...]


def squared_kernel(x_ref, o_ref, acc_ref):
    acc_ref[...] = acc_ref[...] * acc_ref[...] + x_ref[...]
    o_ref[...] = acc_ref[...]


def mixed_kernel(x_ref, o_ref, acc_ref):
    acc_ref[...] += x_ref[...]
    acc_ref[...] = jnp.maximum(acc_ref[...], 0)
    o_ref[...] = acc_ref[...]


def stale_kernel(x_ref, o_ref, acc_ref):
    """The sum starts from what was loaded before another store."""
    old = acc_ref[...]
    acc_ref[...] = old + x_ref[...]
    acc_ref[...] = old + 1
    o_ref[...] = acc_ref[...]


def shifted_kernel(x_ref, o_ref, acc_ref):
    acc_ref[1:] = acc_ref[:-1] + x_ref[1:]
    o_ref[...] = acc_ref[...]


def chosen_kernel(x_ref, o_ref, acc_ref):
    @pl.when(acc_ref[0] < 3)
    def _():
        acc_ref[...] += x_ref[...]

    o_ref[...] = acc_ref[...]


REFUSED = {
    previous_kernel: "carries values that do not merge",
    squared_kernel: "carries values that do not merge",
    mixed_kernel: "is merged in two ways",
    stale_kernel: "carries values that do not merge",
    shifted_kernel: "carries values that do not merge",
    chosen_kernel: "carries values that do not merge",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda f: f.__name__)
def test_refused(body):
    @functools.wraps(body)
    def started(x_ref, o_ref, acc_ref):
        @first()
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        body(x_ref, o_ref, acc_ref)

    call = pl.pallas_call(
        started,
        out_shape=jax.ShapeDtypeStruct((32,), F32),
        grid=(4,),
        in_specs=[pl.BlockSpec((8,), lambda i: (i,))],
        out_specs=pl.BlockSpec((8,), lambda i: (i,)),
        scratch_shapes=[pltpu.VMEM((8,), F32)],
    )
    kernel = run(sites.kernels_in(call, jax.ShapeDtypeStruct((32,), F32))[0])
    (state,) = states_of(kernel)
    assert REFUSED[body] in state.reason and state.kind == "unknown"
    assert state.loc is not None and "test_split_axis.py" in state.loc.file


def test_even_parts():
    assert even_parts(64, 7) == 8
    assert even_parts(13, 4) == 4  # 4, 4, 4 and 1 steps
    assert even_parts(3, 100) == 3
    assert even_parts(8192, 528) == 512


# --- the zoo ---


@functools.cache
def zoo_calls() -> tuple[tuple[str, Kernel, tuple[np.ndarray, ...]], ...]:
    """The kernels of the zoo that some axis carries something in, with operands."""
    found = []
    name = ""

    def evaluated(*operands, call):
        arrays = [np.asarray(x) for x in operands]
        kernel = run(call.kernel)
        found.append((name, kernel, tuple(arrays)))
        return [jnp.asarray(x) for x in evaluate(kernel, arrays)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitive.call_p, "impl", evaluated)
        for case in all_cases():
            if case.tags & {"mesh", "dma", "while", "pipeline"}:
                continue
            name = case.name
            case.run(*case.make_args(np.random.default_rng(0)))
    return tuple(found)


KNOWN = 20  # kernels of the zoo with an axis that merges


def test_zoo():
    known = 0
    for _name, kernel, arrays in zoo_calls():
        for state in states_of(kernel):
            if not state.reason:
                known += 1
                check(kernel, list(arrays), state, rtol=2e-3, atol=1e-3)
    assert known >= KNOWN


# --- random bodies: what is known to merge does ---


def _statements(i, x, refs):
    """What a step may do, by name; some of it merges."""
    a, b, each = refs
    n = pl.num_programs(0)

    def on(condition, do):
        return lambda: pl.when(condition)(do)

    def store(ref, value):
        return lambda: ref.__setitem__(..., value().astype(ref.dtype))

    def part(ref, index, value):
        return lambda: ref.__setitem__(index, value())

    def looped():
        def body(k, total):
            return total + x[k]

        a[2] = jax.lax.fori_loop(0, 3, body, a[2])

    return {
        "a += x": store(a, lambda: a[...] + x),
        "a -= 2x": store(a, lambda: a[...] - 2 * x),
        "a = max": store(a, lambda: jnp.maximum(a[...], x)),
        "a masked": store(a, lambda: jnp.where(x > 0, a[...] + x, a[...])),
        "a moved": store(a, lambda: (a[...].reshape(2, 4) + 1).reshape(8)),
        "a turned": store(a, lambda: a[...].reshape(2, 4).T.reshape(8) + x),
        "a part": part(a, slice(2, 5), lambda: a[2:5] + x[:3]),
        "a shifted": part(a, slice(2, 5), lambda: a[1:4] + x[:3]),
        "a at i": lambda: a.__setitem__(i % 8, a[i % 8] + 1),
        "a loop": looped,
        "a overwritten": store(a, lambda: x),
        "a doubled": store(a, lambda: a[...] + a[...]),
        "a from b": store(a, lambda: a[...] + b[...]),
        "b += a": store(b, lambda: b[...] + a[...]),
        "b += x": store(b, lambda: b[...] + x),
        "b = min": store(b, lambda: jnp.minimum(b[...], x)),
        "b atomic": lambda: pl.atomic_add(b, (jnp.arange(8) % 3,), x),
        "a at last": on(i == n - 1, store(a, lambda: a[...] * 2)),
        "b at last": on(i == n - 1, store(b, lambda: a[...] - 1)),
        "a if odd": on(i % 2 == 1, store(a, lambda: a[...] + 3)),
        "a if a": on(a[0] > 0, store(a, lambda: a[...] + 1)),
        "a at second": on(i == 1, store(a, lambda: x)),
        "a at first": on(i == 0, store(a, lambda: x + 7)),
        "each x": store(each, lambda: x * 2),
        "each a": store(each, lambda: a[...]),
        "each b": store(each, lambda: b[...] + x),
    }


NAMES = (
    "a += x",
    "a -= 2x",
    "a = max",
    "a masked",
    "a moved",
    "a turned",
    "a part",
    "a shifted",
    "a at i",
    "a loop",
    "a overwritten",
    "a doubled",
    "a from b",
    "b += a",
    "b += x",
    "b = min",
    "b atomic",
    "a at last",
    "b at last",
    "a if odd",
    "a if a",
    "a at second",
    "a at first",
    "each x",
    "each a",
    "each b",
)


def random_call(names: tuple[str, ...], steps: int):
    def body(x_ref, b_ref, each_ref, a_ref):
        i = pl.program_id(0)

        @first()
        def _():
            a_ref[...] = jnp.zeros_like(a_ref)
            b_ref[...] = jnp.ones_like(b_ref)

        each_ref[...] = jnp.zeros_like(each_ref)
        menu = _statements(i, x_ref[...], (a_ref, b_ref, each_ref))
        for name in names:
            menu[name]()

    return pl.pallas_call(
        body,
        out_shape=[
            jax.ShapeDtypeStruct((8,), I32),
            jax.ShapeDtypeStruct((8 * steps,), I32),
        ],
        grid=(steps,),
        in_specs=[pl.BlockSpec((8,), lambda i: (i,))],
        out_specs=[
            pl.BlockSpec((8,), lambda i: (0,)),
            pl.BlockSpec((8,), lambda i: (i,)),
        ],
        scratch_shapes=[pltpu.VMEM((8,), I32)],
    )


RANDOM = 100


def test_random_bodies():
    """Integers, so that results are equal whatever the order of merging."""
    rng = np.random.default_rng(0)
    known = 0
    for _ in range(RANDOM):
        steps = int(rng.choice([2, 3, 5, 6]))
        chosen = [rng.choice(["a += x", "a = max"]), rng.choice(["b += x", "b atomic"])]
        chosen += list(rng.choice(NAMES, size=rng.integers(0, 4)))
        names = tuple(map(str, rng.permutation(chosen)))
        call = random_call(names, steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = jax.ShapeDtypeStruct((8 * steps,), I32)
            kernel = run(sites.kernels_in(call, given)[0])
        x = rng.integers(-9, 9, size=8 * steps).astype(np.int32)
        for state in states_of(kernel):
            if state.reason:
                continue
            known += 1
            expected = evaluate(kernel, [x])
            for parts in {2, 3, steps}:
                found = evaluate_program(split(kernel, state, parts), [x])
                for a, b in zip(expected, found, strict=True):
                    np.testing.assert_array_equal(a, b.reshape(a.shape), str(names))
    assert known > RANDOM // 8
