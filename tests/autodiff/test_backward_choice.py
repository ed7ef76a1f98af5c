"""Which backward kernels a chip gets where there are several ways; all are right."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff import backward
from pallasite.autodiff.explain_grad import full_plan
from pallasite.autodiff.normal_program import normal_program
from pallasite.autodiff.partial_sums import Sums
from pallasite.backends import base
from pallasite.ir.nodes import walk
from pallasite.ir.rewrite import users_of
from pallasite.ir.types import BF16
from pallasite.passes.normal import whole_loops
from pallasite.placement import chip_for
from pallasite.sites import calls_in, kernels_in
from pallasite.target import AVX2, Host, Machine, chip
from tests.backends.triton import harness
from tests.xla import pull_back, put

MASKED = -1e30
# Slow cores, so that the start of a kernel does not count.
MANY_CORES = Host(32, 16, AVX2.features, threads=4096, ns_per_flop=100)
TWO_CORES = Host(32, 16, AVX2.features, threads=2)


def scores_of(q, k, i, j, is_causal):
    scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32) / math.sqrt(q.shape[1])
    if is_causal:
        rows = i * q.shape[0] + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        columns = j * k.shape[0] + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(rows >= columns, scores, MASKED)
    return scores


def absorb(state, scores, v, exp=jnp.exp):
    highest, total, out = state
    new = jnp.maximum(highest, scores.max(1, keepdims=True))
    shrink, weights = exp(highest - new), exp(scores - new)
    total = total * shrink + weights.sum(1, keepdims=True)
    weighted = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new, total, out * shrink + weighted


def start(rows, width):
    column = jnp.zeros((rows, 1), jnp.float32)
    return column + MASKED, column, jnp.zeros((rows, width), jnp.float32)


def along_the_grid(q, k, v, is_causal, bq=16, bk=8, lanes=1):
    """Softmax statistics in scratch, carried along the last grid axis."""
    heads, length, width = q.shape

    def kernel(q_ref, k_ref, v_ref, o_ref, *state):
        i, j = pl.program_id(1), pl.program_id(2)

        def write(values):
            for ref, value in zip(state, values, strict=True):
                ref[...] = jnp.broadcast_to(value, ref.shape)

        def read():
            highest, total, out = state
            return highest[:, :1], total[:, :1], out[...]

        pl.when(j == 0)(lambda: write(start(bq, width)))

        def step():
            scores = scores_of(q_ref[...], k_ref[...], i, j, is_causal)
            write(absorb(read(), scores, v_ref[...]))

        if is_causal:
            pl.when(j * bk < (i + 1) * bq)(step)
        else:
            step()

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            _, total, out = read()
            o_ref[...] = (out / total).astype(o_ref.dtype)

    query = pl.BlockSpec((None, bq, width), lambda h, i, j: (h, i, 0))
    key = pl.BlockSpec((None, bk, width), lambda h, i, j: (h, j, 0))
    shapes = [(bq, lanes), (bq, lanes), (bq, width)]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, length // bq, k.shape[1] // bk),
        in_specs=[query, key, key],
        out_specs=query,
        scratch_shapes=[pltpu.VMEM(s, jnp.float32) for s in shapes],
    )(q, k, v)


def over_lanes(*args, **options):
    """A TPU idiom: columns of statistics are as wide as a vector."""
    return along_the_grid(*args, **options, lanes=128)


def in_a_loop(q, k, v, is_causal, bq=16, bk=8):
    """All keys in one block, and a loop over them."""
    heads, length, width = q.shape

    def kernel(q_ref, k_ref, v_ref, o_ref):
        i, q = pl.program_id(1), q_ref[...]

        def step(j, state):
            keys = pl.ds(j * bk, bk)
            return absorb(
                state, scores_of(q, k_ref[keys, :], i, j, is_causal), v_ref[keys, :]
            )

        steps = k_ref.shape[0] // bk
        if is_causal:
            steps = lax.div((i + 1) * bq + bk - 1, bk)
        _, total, out = lax.fori_loop(0, steps, step, start(bq, width))
        o_ref[...] = (out / total).astype(o_ref.dtype)

    query = pl.BlockSpec((None, bq, width), lambda h, i: (h, i, 0))
    keys = pl.BlockSpec((None, k.shape[1], width), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, length // bq),
        in_specs=[query, keys, keys],
        out_specs=query,
    )(q, k, v)


def attention(q, k, v, is_causal):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / math.sqrt(q.shape[-1])
    if is_causal:
        allowed = jnp.tri(q.shape[1], k.shape[1], dtype=bool)
        scores = jnp.where(allowed, scores, MASKED)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1), v)


STYLES = pytest.mark.parametrize("style", [along_the_grid, over_lanes, in_a_loop])
CAUSAL = pytest.mark.parametrize("is_causal", [False, True])


def plan_of(run, args, target):
    (kernel,) = kernels_in(run, *args)
    return full_plan(kernel, machine=Machine.usual(target))


def heads(count, length, width, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct((count, length, width), dtype)] * 3


def products(kernel):
    return sum(op.name == "dot" for op in walk(kernel.body))


def normal(seed, *shape):
    return put(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def check(run, reference, *args, target, monkeypatch, tol=2e-5, kernels=None):
    """Cotangents as one target computes them are those of plain jnp."""
    monkeypatch.setattr(backward, "chip_for", lambda _: target)
    if kernels is not None:
        assert len(plan_of(run, args, target).steps) == kernels
    results = jax.eval_shape(reference, *args)
    seeds = jax.tree.map(lambda r: normal(7, *r.shape).astype(r.dtype), results)
    want = pull_back(reference, args, seeds)
    for x, y in zip(pull_back(run, args, seeds), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=tol, atol=tol * np.abs(y).max())


@STYLES
@CAUSAL
def test_a_gpu_gets_kernels_over_queries_and_over_keys(style, is_causal):
    run = functools.partial(style, is_causal=is_causal, bq=64, bk=64)
    args = heads(64, 2048, 64, jnp.bfloat16)
    made = plan_of(run, args, chip("h200"))
    statistics, over_queries, over_keys = (step.kernel for step in made.steps)
    # Scores and output; scores, weights' cotangent and dq; those two, dv and dk.
    assert [products(s.kernel) for s in made.steps] == [2, 3, 4]
    parallel = 'semantics=("parallel", "parallel", "sequential")'
    for kernel in (over_queries, over_keys):
        assert "grid=(64, 32, 32)" in kernel.text and parallel in kernel.text
    names = [p.name for p in over_keys.outputs]
    assert sorted(names) == ["d_k_ref", "d_v_ref"]
    # What is saved is two columns per block of queries, and the cotangent of the result
    # as it is multiplied; not a tile per step.
    saved = [(p.ref.shape, str(p.ref.dtype)) for p in statistics.outputs]
    rows, column = ((64, 2048), "f32"), ((64, 2048, 1), "f32")
    assert sorted(saved) == [rows, column, ((64, 2048, 64), "bf16")]
    # Sums of steps are stored in the type of what they are the cotangents of.
    results = (*over_queries.outputs, *over_keys.outputs)
    assert {str(p.ref.dtype) for p in results} == {"bf16"}
    assert made.choices[0].estimate.programs == (2048, 2048, 2048)
    assert made.choices[1].estimate.programs == (64,)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_blocks_of_exact_products_are_cut_as_far_as_they_can_be(dtype):
    """Not all dimensions of these kernels can be divided after one another."""
    run = functools.partial(along_the_grid, is_causal=False, bq=128, bk=128)
    for step in plan_of(run, heads(2, 1024, 128, dtype), chip("h200")).steps:
        options = base.Options(chip=chip("h200"))
        assert base.Compiled(base.get("triton"), step.kernel, options)["scheduled"]


@pytest.mark.parametrize("count", [128, 512])
def test_a_program_per_head_is_not_enough_for_a_gpu(count):
    """Also if all multiprocessors have one: sums in main memory are waited for."""
    run = functools.partial(along_the_grid, is_causal=True, bq=128, bk=128)
    made = plan_of(run, heads(count, 2048, 64, jnp.bfloat16), chip("h200"))
    assert made.choices[0].estimate.programs == (count * 16,) * 3
    assert made.choices[1].estimate.programs == (count,)


def with_cdiv(q, k, v, is_causal, bq=16, bk=8):
    """A loop whose length is rounded up by jnp: a dozen ops for `i + 1`."""

    def kernel(q_ref, k_ref, v_ref, o_ref):
        i, q = pl.program_id(1), q_ref[...]

        def step(j, state):
            keys = pl.ds(j * bk, bk)
            return absorb(
                state, scores_of(q, k_ref[keys, :], i, j, is_causal), v_ref[keys, :]
            )

        steps = pl.cdiv((i + 1) * bq, bk)
        _, total, out = lax.fori_loop(0, steps, step, start(bq, q.shape[1]))
        o_ref[...] = (out / total).astype(o_ref.dtype)

    heads, length, width = q.shape
    query = pl.BlockSpec((None, bq, width), lambda h, i: (h, i, 0))
    keys = pl.BlockSpec((None, length, width), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, length // bq),
        in_specs=[query, keys, keys],
        out_specs=query,
    )(q, k, v)


def test_the_length_of_a_loop_may_be_a_quotient(monkeypatch):
    run = functools.partial(with_cdiv, is_causal=True, bq=64, bk=64)
    made = plan_of(run, heads(64, 2048, 64, jnp.bfloat16), chip("h200"))
    assert [products(s.kernel) for s in made.steps] == [2, 3, 4]
    assert "grid=(64, 32, 32)" in made.steps[2].kernel.text
    check(
        functools.partial(with_cdiv, is_causal=True),
        functools.partial(attention, is_causal=True),
        *(normal(n, 2, 64, 16) for n in range(3)),
        target=MANY_CORES, monkeypatch=monkeypatch, kernels=3,
    )  # fmt: skip


@STYLES
@CAUSAL
def test_the_forward_kernel_keeps_what_the_backward_kernels_need(
    style, is_causal, monkeypatch
):
    """Maximum and sum of each row; the accumulator comes from the result."""
    monkeypatch.setattr(backward, "chip_for", lambda _: MANY_CORES)
    run = functools.partial(style, is_causal=is_causal)
    args = [normal(n, 2, 64, 16) for n in range(4)]

    def gradient(q, k, v, seed):
        result, pull = jax.vjp(run, q, k, v)
        return result, *pull(seed)

    forward, *others = kernels_in(gradient, *args)
    assert [products(kernel) for kernel in (forward, *others)] == [2, 0, 3, 4]
    kept = [p.ref.shape for p in forward.outputs[1:]]
    assert kept == [(2, 64, 1)] * 2
    reference = functools.partial(attention, is_causal=is_causal)
    want = reference(*args[:3]), *pull_back(reference, args[:3], args[3])
    for x, y in zip(gradient(*args), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    # What is kept is of no use to a batch of calls, nor to other cotangents.
    loss = lambda f: lambda q: jax.grad(lambda q: (f(q, *args[1:3]) ** 2).sum())(q)
    twice = jnp.stack([args[0], args[3]])
    got, want = (jax.jit(jax.vmap(loss(f)))(twice) for f in (run, reference))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_the_second_derivative_of_a_kernel_that_keeps(monkeypatch):
    monkeypatch.setattr(backward, "chip_for", lambda _: MANY_CORES)
    _, k, v = args = [normal(n, 1, 32, 8) for n in range(3)]

    def twice(f):
        slope = jax.grad(lambda q: (f(q, k, v, is_causal=True) ** 2).sum())
        return jax.jit(jax.grad(lambda q: (slope(q) ** 2).sum()))(args[0])

    got, want = twice(in_a_loop), twice(attention)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def large_accumulator(x, w):
    """A product along the grid and a tanh: the reverse needs all of the product."""

    def kernel(x_ref, w_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], w_ref[...])

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = jnp.tanh(acc_ref[...])

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        grid=(4, 4, 2),
        in_specs=[
            pl.BlockSpec((16, 16), lambda i, j, k: (i, k)),
            pl.BlockSpec((16, 16), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((16, 16), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((16, 16), jnp.float32)],
    )(x, w)


def test_what_would_take_much_memory_is_not_kept(monkeypatch):
    monkeypatch.setattr(backward, "chip_for", lambda _: MANY_CORES)
    args = [normal(0, 64, 32), normal(1, 32, 64)]
    forward, *_ = kernels_in(
        lambda *a: jax.vjp(large_accumulator, *a)[1](args[0] @ args[1]), *args
    )
    assert len(forward.outputs) == 1


@STYLES
def test_cotangents_are_rounded_only_to_be_multiplied_or_stored(style):
    run = functools.partial(style, is_causal=True, bq=64, bk=64)
    for step in plan_of(run, heads(64, 2048, 64, jnp.bfloat16), chip("h200")).steps:
        users = users_of(step.kernel.body)
        for op in walk(step.kernel.body):
            if op.name == "cast" and op.attrs["dtype"] == BF16:
                names = {user.name for user in users[op.result]}
                assert names <= {"dot", "store", "reshape"}


@STYLES
@CAUSAL
def test_few_cores_get_one_kernel(style, is_causal):
    run = functools.partial(style, is_causal=is_causal, bq=64, bk=64)
    # Blocks for a TPU have 512 rows: there are several of them, as on a CPU.
    for target, length in ((TWO_CORES, 512), (chip("v5e"), 1024)):
        (step,) = plan_of(run, heads(64, length, 64), target).steps
        # Nothing of a step is kept for the reverse: it is computed again.
        assert products(step.kernel) == 7
        assert all(op.name != "alloc" for op in walk(step.kernel.body))
    # Two heads keep two of 64 cores busy.
    many = Host(32, 16, AVX2.features, threads=64)
    assert len(plan_of(run, heads(2, 512, 64), many).steps) == 3


@STYLES
@CAUSAL
def test_both_ways_are_right(style, is_causal, monkeypatch):
    run = functools.partial(style, is_causal=is_causal)
    reference = functools.partial(attention, is_causal=is_causal)
    args = [normal(n, 2, 64, 16) for n in range(3)]
    for target, kernels in ((TWO_CORES, 1), (MANY_CORES, 3)):
        check(
            run, reference, *args,
            target=target, monkeypatch=monkeypatch, kernels=kernels,
        )  # fmt: skip


@STYLES
@CAUSAL
def test_triton_runs_them(style, is_causal):
    run = functools.partial(style, is_causal=is_causal, bq=16, bk=16)
    args = [normal(n, 1, 32, 16) for n in range(3)]
    seed = normal(3, 1, 32, 16)
    (call,) = calls_in(run, *args)
    made = full_plan(call.kernel, machine=Machine.usual(chip("h200")))
    reference = functools.partial(attention, is_causal=is_causal)
    expected = pull_back(reference, args, seed)
    in_three = [way for way in made.choices if len(way.steps) == 3]
    assert in_three
    for way in in_three:
        arrays = dict(zip(made.primals, args, strict=True)) | {made.seeds[0]: seed}
        for step in way.steps:
            operands = [arrays[ref] for ref in step.operands]
            results = harness.simulated(step.kernel, operands, chip=chip("h200"))
            for ref, x, parts in zip(step.results, results, step.parts, strict=True):
                several = tuple(range(x.ndim - ref.ref.rank)) if parts > 1 else ()
                arrays[ref] = x.sum(several) if several else x
        for n, x in enumerate(expected):
            got = arrays[made.targets[n]]
            np.testing.assert_allclose(got, x, rtol=1e-4, atol=1e-4)


@STYLES
def test_guards_of_causal_steps_are_bounds_of_loops_on_a_gpu(style):
    run = functools.partial(style, is_causal=True, bq=64, bk=64)
    made = plan_of(run, heads(64, 2048, 64, jnp.bfloat16), chip("h200"))
    for step in made.steps:
        ttir, _ = harness.compiled(step.kernel)
        assert ttir.count("scf.for") == 1 and "scf.if" not in ttir


@pytest.mark.parametrize(
    ("backend", "target", "name"),
    [
        (None, "", "cpu"),
        (None, "v5e", "v5e"),
        ("cpu", "h200", "cpu"),
        ("triton", "", "h100"),
        ("triton", "b200", "b200"),
        ("interpret", "", "cpu"),
    ],
)
def test_the_chip_is_that_of_the_call_or_the_knob(backend, target, name, monkeypatch):
    monkeypatch.setenv("PALLASITE_TARGET", target)
    assert Machine.usual(chip_for(backend)).name == name


def test_explain_grad_says_what_each_way_takes(monkeypatch):
    monkeypatch.setenv("PALLASITE_TARGET", "h200")
    run = functools.partial(in_a_loop, is_causal=True, bq=64, bk=64)
    report = pl.explain_grad(run)(*heads(16, 1024, 64, jnp.bfloat16))
    chosen, again, other = report.ways
    assert chosen.startswith("kernel on h200: ")
    assert "0 + 3 + 4 matmuls, 256 + 256 + 256 programs" in chosen
    # Two columns of 16 x 1024 rows.
    assert chosen.endswith("; the forward kernel keeps 131,072 bytes for them")
    assert "2 + 3 + 4 matmuls, 256 + 256 + 256 programs" in again
    assert other.startswith("instead of kernel_d_q_d_k_d_v: 7 matmuls, 16 programs")
    assert str(report).endswith(other)


# --- sums relative to a running maximum ---


def rows_in_steps(kernel, out_shapes, x, *more, bk=8):
    """A kernel over blocks of 8 rows that is shown them whole."""
    rows = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    shared = [pl.BlockSpec(m.shape, lambda i: (0, 0)) for m in more]
    column = pl.BlockSpec((8, 1), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32)
    return pl.pallas_call(
        kernel,
        out_shape=[shape] * out_shapes,
        grid=x.shape[0] // 8,
        in_specs=[rows, *shared],
        out_specs=[column] * out_shapes,
    )(x, *more)


def log_sum(x_ref, exp, log, steps, bk):
    def step(j, state):
        highest, total = state
        x = x_ref[:, pl.ds(j * bk, bk)]
        new = jnp.maximum(highest, x.max(1, keepdims=True))
        total = total * exp(highest - new) + exp(x - new).sum(1, keepdims=True)
        return new, total

    column = jnp.zeros((8, 1), jnp.float32)
    return lax.fori_loop(0, steps, step, (column + MASKED, column))


def stacks(run, *args):
    """How many values of each step a backward kernel keeps."""
    made = plan_of(run, args, TWO_CORES)
    ops = (op for step in made.steps for op in walk(step.kernel.body))
    return sum(op.name == "alloc" for op in ops)


@pytest.fixture
def narrow_programs(monkeypatch):
    """Programs that cannot hold a row of 32 elements go through it in a loop."""
    monkeypatch.setattr(whole_loops, "WIDEST", 16)
    normal_program.cache_clear()
    yield
    normal_program.cache_clear()


@pytest.mark.usefixtures("narrow_programs")
@pytest.mark.parametrize("base", ["e", "2"])
def test_a_logsumexp_keeps_nothing(base, monkeypatch):
    exp, log = (jnp.exp, jnp.log) if base == "e" else (jnp.exp2, jnp.log2)

    def kernel(x_ref, o_ref):
        highest, total = log_sum(x_ref, exp, log, 4, 8)
        o_ref[...] = highest + log(total)

    run = lambda x: rows_in_steps(kernel, 1, x)[0]
    reference = lambda x: log(exp(x).sum(1, keepdims=True))
    x = normal(0, 16, 32)
    assert stacks(run, x) == 0
    check(run, reference, x, target=TWO_CORES, monkeypatch=monkeypatch)


@pytest.mark.usefixtures("narrow_programs")
def test_a_maximum_that_is_seen_keeps_its_cotangent(monkeypatch):
    """The results depend on the maximum itself, so it is no mere scale: it is that of
    the terms equal to it, and nothing has to be kept."""

    def kernel(x_ref, highest_ref, total_ref):
        highest_ref[...], total_ref[...] = log_sum(x_ref, jnp.exp, jnp.log, 4, 8)

    def reference(x):
        highest = x.max(1, keepdims=True)
        return highest, jnp.exp(x - highest).sum(1, keepdims=True)

    run = lambda x: tuple(rows_in_steps(kernel, 2, x))
    x = normal(0, 16, 32)
    assert stacks(run, x) == 0
    check(run, reference, x, target=TWO_CORES, monkeypatch=monkeypatch)


def test_a_sum_that_varies_along_the_maximum_is_no_plain_sum(monkeypatch):
    """Rows are added up, each with a maximum of its own: nothing to factor out."""

    def kernel(x_ref, o_ref):
        def step(j, state):
            highest, total = state
            x = x_ref[:, pl.ds(j * 8, 8)]
            new = jnp.maximum(highest, x.max(1, keepdims=True))
            return new, total + jnp.exp(x - new).sum(0, keepdims=True).sum()

        first = jnp.full((8, 1), MASKED, jnp.float32), jnp.float32(0)
        _, total = lax.fori_loop(0, 4, step, first)
        o_ref[...] = jnp.full((8, 1), total)

    def reference(x):
        highest = lax.cummax(x.reshape(2, 8, 4, 8).max(3), axis=2)
        each = jnp.exp(x.reshape(2, 8, 4, 8) - highest[..., None])
        return jnp.repeat(each.sum((1, 2, 3)), 8)[:, None]

    run = lambda x: rows_in_steps(kernel, 1, x)[0]
    x = normal(0, 16, 32)
    check(run, reference, x, target=TWO_CORES, monkeypatch=monkeypatch, tol=1e-4)


def cross_entropy(x, w, labels_of, bk=16):
    """-log softmax(x @ w)[label], with the classes seen block by block."""

    def kernel(x_ref, w_ref, o_ref):
        x = x_ref[...]
        label = labels_of(pl.program_id(0) * 8 + jnp.arange(8))[:, None]

        def step(j, state):
            highest, total, picked = state
            logits = jnp.dot(x, w_ref[:, pl.ds(j * bk, bk)])
            new = jnp.maximum(highest, logits.max(1, keepdims=True))
            weights = jnp.exp(logits - new)
            total = total * jnp.exp(highest - new) + weights.sum(1, keepdims=True)
            column = j * bk + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            mine = jnp.where(column == label, logits, 0)
            return new, total, picked + mine.sum(1, keepdims=True)

        column = jnp.zeros((8, 1), jnp.float32)
        state = lax.fori_loop(
            0, w_ref.shape[1] // bk, step, (column + MASKED, column, column)
        )
        highest, total, picked = state
        o_ref[...] = highest + jnp.log(total) - picked

    return rows_in_steps(kernel, 1, x, w)[0]


def test_cross_entropy_over_blocks_of_classes(monkeypatch):
    labels_of = lambda row: (row * 7) % 64

    def reference(x, w):
        logits = x @ w
        picked = jnp.take_along_axis(logits, labels_of(jnp.arange(32))[:, None], 1)
        return jax.nn.logsumexp(logits, 1, keepdims=True) - picked

    run = functools.partial(cross_entropy, labels_of=labels_of)
    args = normal(0, 32, 16), normal(1, 16, 64)
    assert stacks(run, *args) == 0
    for target in (TWO_CORES, MANY_CORES):
        check(run, reference, *args, target=target, monkeypatch=monkeypatch)
    # dx over blocks of rows, dw over blocks of classes.
    steps = plan_of(run, args, MANY_CORES).steps
    assert [len(step.results) for step in steps][1:] == [1, 1]


def weighted_norm(rows):
    def kernel(x_ref, w_ref, o_ref):
        x = x_ref[...]
        mean = jnp.square(x).mean(axis=-1, keepdims=True)
        o_ref[...] = x * lax.rsqrt(mean + 1e-6) * w_ref[...]

    def call(x, w):
        block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.shape[0] // rows,),
            in_specs=[block, pl.BlockSpec(w.shape, lambda i: (0, 0))],
            out_specs=block,
        )(x, w)

    return call


def test_rows_that_a_gradient_adds_up_are_cut_before():
    """Each row has a share in the cotangent of the weights; on a GPU, four rows of this
    size do not fit into a program's registers."""
    x, w = (jax.ShapeDtypeStruct((n, 8192), jnp.float32) for n in (64, 1))
    (kernel,) = kernels_in(weighted_norm(4), x, w)
    (step,) = full_plan(kernel, machine=Machine.usual(chip("h200"))).steps
    tiles = {v.type.shape for op in walk(step.kernel.body) for v in op.results}
    assert (1, 8192) in tiles and (4, 8192) not in tiles


def test_gradient_of_rows_that_are_cut():
    rng = np.random.default_rng(0)
    x, w, c = (rng.standard_normal((n, 8192)).astype(np.float32) for n in (8, 1, 8))

    def reference(x, w):
        mean = jnp.square(x).mean(axis=-1, keepdims=True)
        return x * lax.rsqrt(mean + 1e-6) * w

    want = jax.vjp(reference, x, w)[1](c)
    with config.override(target="h200"):
        got = jax.vjp(weighted_norm(4), x, w)[1](c)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


def test_matmuls_in_loops_are_work():
    """As often as the loop runs; of one that data bound, it is not known how often."""

    def kernel(n_ref, x_ref, o_ref):
        def square(_, state):
            return jnp.tanh(state @ x_ref[...])

        state = lax.fori_loop(0, 5, square, x_ref[...])
        o_ref[...] = lax.fori_loop(0, n_ref[0, 0], square, state)

    whole = lambda *shape: pl.BlockSpec(shape, lambda i: (0, 0))
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((64, 16), jnp.float32),
        grid=4,
        in_specs=[whole(1, 1), whole(16, 16)],
        out_specs=pl.BlockSpec((16, 16), lambda i: (i, 0)),
    )
    n, x = jax.ShapeDtypeStruct((1, 1), "i4"), jax.ShapeDtypeStruct((16, 16), "f4")
    (found,) = kernels_in(call, n, x)
    machine = Machine.usual(chip("h200"))
    old, program = normal_program(found, machine)
    assert dict(Sums.of(old, machine, {}).with_work(program).work) == {
        "f32": 4 * 5 * 2 * 16**3
    }
