"""Calls whose sequential axis is split: jit, vmap, grad, shard_map, tools, warnings."""

import functools
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import sites, target
from pallasite import tpu as pltpu
from pallasite.errors import PerformanceWarning
from pallasite.passes.analysis.axis_state import state_along
from pallasite.passes.run import run
from pallasite.passes.schedule.plan_parts import plan
from pallasite.passes.schedule.split_axis import split
from pallasite.target import GPUS
from tests.backends.triton import harness
from tests.passes.normal.meaning import outputs

ROWS, STEPS = 64, 60


@pytest.fixture(autouse=True)
def four_threads():
    """Whether an axis is split depends on the number of threads."""
    with target.using(replace(target.host(), threads=4)):
        yield
    jax.clear_caches()


def sums_kernel(x_ref, o_ref, n_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)
        n_ref[...] = jnp.zeros_like(n_ref)

    x = x_ref[...]
    o_ref[...] += jnp.sum(x, axis=0, keepdims=True)
    n_ref[...] += jnp.sum((x > 1).astype(jnp.int32), keepdims=True)


def sums(x, rows=ROWS, **call):
    steps = x.shape[0] // rows
    return pl.pallas_call(
        sums_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((1, x.shape[1]), jnp.float32),
            jax.ShapeDtypeStruct((1, 1), jnp.int32),
        ],
        grid=(steps,),
        in_specs=[pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))],
        out_specs=[
            pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0)),
            pl.BlockSpec((1, 1), lambda i: (0, 0)),
        ],
        **call,
    )(x)


def example(*lead):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(*lead, ROWS * STEPS, 257)), jnp.float32)


def calls(f, *args) -> int:
    return jax.jit(f).lower(*args).as_text().count("custom_call @pallasite_cpu")


def check(found, x):
    total, count = found
    np.testing.assert_allclose(total[..., 0, :], x.sum(-2), rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(count[..., 0, 0], (x > 1).sum((-1, -2)))


def test_jit_and_bits():
    x = example()
    assert calls(sums, x) == 3  # the parts, and a merge for each sum
    found = jax.jit(sums)(x)
    check(found, np.asarray(x))
    again = jax.jit(lambda x: sums(x))(x)
    for a, b in zip(found, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_sequential_forbids_it():
    x = example()
    asked = pltpu.CompilerParams(dimension_semantics=("sequential",))
    in_order = lambda x: sums(x, compiler_params=asked)
    assert calls(in_order, x) == 1
    check(in_order(x), np.asarray(x))


def test_vmap():
    x = example(2)
    check(jax.jit(jax.vmap(sums))(x), np.asarray(x))


def test_grad():
    x = example()
    slope = jax.jit(jax.grad(lambda x: sums(x)[0].sum()))(x)
    np.testing.assert_allclose(slope, np.ones_like(x))


def test_shard_map():
    x = example()
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    rows = jax.sharding.PartitionSpec(None, None)
    split = jax.shard_map(sums, mesh=mesh, in_specs=rows, out_specs=rows)
    check(jax.jit(split)(x), np.asarray(x))


def test_export():
    """Elsewhere the emulation runs it whole, on any platform."""
    x = example()
    found = jax.export.export(jax.jit(sums), platforms=("cpu",))(x)
    check(found.call(x), np.asarray(x))


def test_tools_show_all_kernels():
    x = example()
    lowered = pl.lower(sums)(x)
    assert len(lowered.kernels) == 1
    names = [kernel.name for kernel in lowered.in_parts("cpu").kernels]
    assert names == ["sums_kernel_parts", "sums_kernel_merge", "sums_kernel_merge"]
    text = str(pl.explain(sums, target="gpu:h200", measure=False)(x))
    assert "kernel 3 of 3 of sums_kernel: i0 (60 steps, sum) runs as 60 parts" in text


@pytest.mark.parametrize("steps", [60, 59])
def test_on_a_gpu(steps):
    """Every kernel through Triton and the simulator, programs in random order."""
    chip = GPUS["h200"]
    x = np.asarray(example())[: 2 * steps, :19]
    (kernel,) = sites.kernels_in(functools.partial(sums, rows=2), jnp.asarray(x))
    program = plan(kernel, chip).program
    assert program is not None
    values = [x]
    for step in program.steps:
        pairs = zip(step.operands, step.kernel.inputs, strict=True)
        given = [values[n].reshape(p.ref.shape) for n, p in pairs]
        values += harness.simulated(step.kernel, given, chip=chip)
    total, count = (values[r.array] for r in program.results)
    check((total.reshape(1, -1), count.reshape(1, 1)), x)


def unknown_kernel(x_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] = jnp.sin(acc_ref[...] + x_ref[...])
    o_ref[...] = acc_ref[...]


def test_what_stays_serial_is_said():
    x = example()

    def unknown(x, **call):
        spec = pl.BlockSpec((ROWS, x.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(
            unknown_kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(STEPS,),
            in_specs=[spec],
            out_specs=spec,
            scratch_shapes=[pltpu.VMEM((ROWS, x.shape[1]), jnp.float32)],
            **call,
        )(x)

    with pytest.warns(PerformanceWarning) as said:
        jax.jit(unknown)(x)
    (message,) = {str(each.message) for each in said}
    assert "acc_ref carries values that do not merge" in message
    assert "test_split_axes.py" in message and "in unknown_kernel" in message
    asked = pltpu.CompilerParams(dimension_semantics=("sequential",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: unknown(x, compiler_params=asked))(x)


def test_derivatives_that_stay_serial_are_said(monkeypatch):
    """Entries between offsets in memory, a few at a time: nothing has their number."""
    monkeypatch.setenv("PALLASITE_TARGET", "gpu:h200")
    rows, entries, width = 1 << 16, 1 << 20, 32

    def kernel(ptr_ref, col_ref, val_ref, x_ref, y_ref):
        r = pl.program_id(0)
        end = ptr_ref[r + 1]

        def body(at):
            offs = at + jnp.arange(width)
            mask = offs < end
            cols = pl.load(col_ref, offs, mask=mask, other=0)
            vals = pl.load(val_ref, offs, mask=mask, other=0.0)
            y_ref[r] += jnp.sum(jnp.where(mask, vals * x_ref[cols], 0.0))
            return at + width

        y_ref[r] = 0.0
        jax.lax.while_loop(lambda at: at < end, body, ptr_ref[r])

    def product(x, ptr, col, val):
        shape = jax.ShapeDtypeStruct((rows,), jnp.float32)
        return pl.pallas_call(kernel, shape, grid=(rows,))(ptr, col, val, x)

    struct = jax.ShapeDtypeStruct
    given = struct((rows,), jnp.float32), struct((rows + 1,), jnp.int32)
    given += struct((entries,), jnp.int32), struct((entries,), jnp.float32)
    gradient = jax.grad(lambda *args: jnp.sin(product(*args)).sum())
    with pytest.warns(PerformanceWarning) as said:
        jax.jit(gradient).trace(*given).lower(lowering_platforms=("cuda",))
    (message,) = {str(each.message) for each in said}
    assert "grid axis 0 of a derivative" in message and "d_x_ref" in message
    assert "test_split_axes.py" in message and "jax.custom_vjp" in message


def decode_kernel(n_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, length, block = pl.program_id(1), n_ref[pl.program_id(0)], k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, -1e30)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(j * block < length)
    def _():
        s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32)
        at = j * block + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
        s = jnp.where(at < length, s, -1e30)
        old = m_ref[...]
        new = jnp.maximum(old, s.max(axis=1, keepdims=True))
        p, alpha = jnp.exp(s - new), jnp.exp(old - new)
        l_ref[...] = alpha * l_ref[...] + p.sum(axis=1, keepdims=True)
        m_ref[...] = new
        p = jnp.dot(
            p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32
        )
        acc_ref[...] = alpha * acc_ref[...] + p

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


def decode(rows, keys, block, dtype):
    row = pl.BlockSpec((None, 8, 64), lambda b, j, _: (b, 0, 0))
    column = pl.BlockSpec((None, block, 64), lambda b, j, _: (b, j, 0))
    call = pl.pallas_call(
        decode_kernel,
        out_shape=jax.ShapeDtypeStruct((rows, 8, 64), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, keys // block),
            in_specs=[row, column, column],
            out_specs=row,
            scratch_shapes=[pltpu.VMEM((8, n), jnp.float32) for n in (1, 1, 64)],
        ),
    )
    shapes = [(rows,), (rows, 8, 64), (rows, keys, 64), (rows, keys, 64)]
    types = [jnp.int32, dtype, dtype, dtype]
    structs = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, types, strict=True)]
    (kernel,) = sites.kernels_in(call, *structs)
    return kernel


def test_programs_with_lengths_of_their_own_are_split():
    """The last of them would run alone."""
    kernel = decode(256, 16384, 256, jnp.bfloat16)
    found = plan(kernel, GPUS["h200"])
    assert found.kind == "online softmax" and found.parts >= 4
    assert plan(decode(4096, 1024, 256, jnp.bfloat16), GPUS["h200"]).program is None
    small = decode(3, 64, 16, jnp.float32)
    kernel = run(small)
    program = split(kernel, state_along(kernel, 1), 2)
    rng = np.random.default_rng(0)
    shapes = [p.ref.shape for p in kernel.inputs[1:]]
    given = [np.array([5, 64, 33], np.int32)]
    given += [rng.normal(size=s).astype(np.float32) for s in shapes]
    values = list(given)
    for step in program.steps:
        pairs = zip(step.operands, step.kernel.inputs, strict=True)
        operands = [values[n].reshape(p.ref.shape) for n, p in pairs]
        values += harness.simulated(step.kernel, operands, chip=GPUS["h200"])
    (want,) = outputs(small, given)
    result = values[program.results[0].array].reshape(want.shape)
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [8192, 256])
def test_blocks_are_divided_before_an_axis_is_split(rows):
    """Programs for fewer rows each need no second kernel."""

    def kernel(a_ref, x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.sum(a_ref[...] * x_ref[...], axis=1, keepdims=True)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, 1), jnp.float32),
        grid=(rows // 256, 32),
        in_specs=[
            pl.BlockSpec((256, 512), lambda i, k: (i, k)),
            pl.BlockSpec((1, 512), lambda i, k: (0, k)),
        ],
        out_specs=pl.BlockSpec((256, 1), lambda i, k: (i, 0)),
    )
    shapes = [(rows, 16384), (1, 16384)]
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    (made,) = sites.kernels_in(call, *structs)
    assert (plan(made, GPUS["h200"]).program is None) == (rows == 8192)
