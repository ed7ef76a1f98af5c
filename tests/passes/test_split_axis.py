"""Axes that carry sums, extremes, atomics or prefixes, split into parts and merged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import primitive
from pallasite import tpu as pltpu
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify
from pallasite.passes.analysis.axis_state import AxisState, state_along
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.run import run
from pallasite.passes.schedule.split_axis import Program, even_parts, split
from tests.zoo import all_cases

F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16


def evaluate(kernel: Kernel, arrays: list[np.ndarray]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        copies = [array.copy() for array in arrays]
        return [np.asarray(out) for out in Walker(kernel, NumpyNumbers()).run(copies)]


def evaluate_program(program: Program, arrays: list[np.ndarray]) -> list[np.ndarray]:
    values = list(arrays)
    for step in program.steps:
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
    return run(primitive.kernels_in(call, x)[0])


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


@pytest.mark.parametrize("steps", [2, 5, 8])
def test_prefix_sums(steps):
    n = 8 * steps
    call = pl.pallas_call(
        prefix_kernel,
        out_shape=[jax.ShapeDtypeStruct((n,), F32), jax.ShapeDtypeStruct((1,), F32)],
        grid=(steps,),
        in_specs=[pl.BlockSpec((8,), lambda i: (i,))],
        out_specs=[
            pl.BlockSpec((8,), lambda i: (i,)),
            pl.BlockSpec((1,), lambda i: (0,)),
        ],
        scratch_shapes=[pltpu.VMEM((1,), F32)],
    )
    kernel = run(primitive.kernels_in(call, jax.ShapeDtypeStruct((n,), F32))[0])
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
    kernel = run(primitive.kernels_in(call, given)[0])
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
    kernel = run(primitive.kernels_in(call, given)[0])
    state, inner = states_of(kernel)
    x = np.random.default_rng(0).normal(size=given.shape).astype(np.float32)
    check(kernel, [x], state, rtol=1e-5, atol=1e-5)
    assert "also carries along axis 0" in inner.reason


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
    kernel = run(primitive.kernels_in(call, jax.ShapeDtypeStruct((32,), F32))[0])
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
