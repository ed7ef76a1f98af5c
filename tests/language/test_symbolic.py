"""Operands and results of symbolic shape (`jax.export`): one program for all sizes."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from benchmarks.partitioning import normal
from pallasite import tpu as pltpu
from pallasite.errors import FallbackWarning, SpecError, UnsupportedError
from tests.language.test_export import double, double_kernel

S = jax.ShapeDtypeStruct
LEAVES_OPEN = "depends on a size that the export leaves open"


def softmax_kernel(x_ref, o_ref):
    x = x_ref[...].astype(jnp.float32)
    e = jnp.exp(x - x.max(axis=1, keepdims=True))
    o_ref[...] = (e / e.sum(axis=1, keepdims=True)).astype(o_ref.dtype)


def softmax(x):
    rows = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        softmax_kernel,
        out_shape=S(x.shape, x.dtype),
        grid=pl.cdiv(x.shape[0], 8),
        in_specs=[rows],
        out_specs=rows,
    )(x)


def product(x, y):
    """Blocks in all three dimensions, past every edge."""

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...])

    (m, k), n = x.shape, y.shape[1]
    block = lambda index_map: pl.BlockSpec((16, 16), index_map, fill=0.0)
    return pl.pallas_call(
        kernel,
        out_shape=S((m, n), x.dtype),
        grid=(pl.cdiv(m, 16), pl.cdiv(n, 16), pl.cdiv(k, 16)),
        in_specs=[block(lambda i, j, k: (i, k)), block(lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((16, 16), lambda i, j, k: (i, j)),
    )(x, y)


def column_means(x):
    """Sizes as numbers, in the kernel; scratch of symbolic size."""
    rows, columns = x.shape

    def kernel(x_ref, o_ref, sums):
        step = pl.program_id(0)

        @pl.when(step == 0)
        def _():
            sums[...] = jnp.zeros_like(sums)

        row = step * 8 + jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 0)
        kept = jnp.where(row < rows, x_ref[...], 0)
        sums[...] += kept.sum(axis=0, keepdims=True)

        @pl.when(step == pl.num_programs(0) - 1)
        def _():
            o_ref[...] = sums[...] / rows

    return pl.pallas_call(
        kernel,
        out_shape=S((1, columns), x.dtype),
        grid=pl.cdiv(rows, 8),
        in_specs=[pl.BlockSpec((8, columns), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, columns), lambda i: (0, 0)),
        scratch_shapes=[pltpu.VMEM((1, columns), jnp.float32)],
    )(x)


def running_sums(x):
    """A loop over all rows of the one block."""

    def kernel(x_ref, o_ref):
        def step(i, total):
            total = total + x_ref[i]
            o_ref[i] = total
            return total

        start = jnp.zeros(x.shape[1:])
        jax.lax.fori_loop(0, x.shape[0], step, start)

    return pl.pallas_call(kernel, out_shape=S(x.shape, x.dtype))(x)


def negated_after(x):
    """A result twice as long, written by slices of symbolic size."""
    rows, columns = x.shape

    def kernel(x_ref, o_ref):
        o_ref[:rows] = x_ref[...]
        o_ref[rows:] = -x_ref[...]

    return pl.pallas_call(kernel, out_shape=S((2 * rows, columns), x.dtype))(x)


def masked(x):
    (n,) = x.shape

    def kernel(x_ref, o_ref):
        i = pl.program_id(0) * 128 + jnp.arange(128)
        pl.store(o_ref, (i,), 2 * pl.load(x_ref, (i,), mask=i < n, other=0), mask=i < n)

    return pl.pallas_call(kernel, out_shape=S((n,), x.dtype), grid=pl.cdiv(n, 128))(x)


def by_table(table, x):
    """Rows chosen by scalar prefetch."""

    def kernel(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

    rows = pltpu.PrefetchScalarGridSpec(
        1,
        grid=table.shape,
        in_specs=[pl.BlockSpec((None, 8), lambda i, table_ref: (table_ref[i], 0))],
        out_specs=pl.BlockSpec((None, 8), lambda i, table_ref: (i, 0)),
    )
    out = S((table.shape[0], 8), x.dtype)
    return pl.pallas_call(kernel, out_shape=out, grid_spec=rows)(table, x)


def neighbours(x):
    """Blocks that overlap, with padding."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[0:8] + x_ref[2:10]

    around = pl.BlockSpec((pl.Element(10, (1, 1)),), lambda i: (8 * i,), fill=0.0)
    return pl.pallas_call(
        kernel,
        out_shape=S(x.shape, x.dtype),
        grid=pl.cdiv(x.shape[0], 8),
        in_specs=[around],
        out_specs=pl.BlockSpec((8,), lambda i: (i,)),
    )(x)


def inner_pipeline(x):
    def kernel(x_ref, o_ref):
        rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
        steps = pl.cdiv(x.shape[0], 8)
        pltpu.emit_pipeline(
            double_kernel, grid=(steps,), in_specs=[rows], out_specs=[rows]
        )(x_ref, o_ref)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel, out_shape=S(x.shape, x.dtype), in_specs=[whole], out_specs=whole
    )(x)


def squares(f):
    return jax.grad(lambda *operands: (f(*operands) ** 2).sum())


def table_of(n):
    return jnp.arange(n, dtype=jnp.int32) * 7 % 10


# A function, its operands as text (`int` first: a table), sizes for the symbols.
CASES = {
    "edge": (double, ["b, 128"], [5, 32]),
    "whole dimension": (softmax, ["b, n"], [(5, 33), (16, 7)]),
    "one block": (running_sums, ["b, n"], [(3, 4)]),
    "product": (product, ["m, k", "k, n"], [(5, 33, 7), (32, 16, 48)]),
    "size as a number": (column_means, ["b, n"], [(20, 5), (8, 130)]),
    "slices": (negated_after, ["b, n"], [(3, 4)]),
    "mask": (masked, ["n"], [5, 300]),
    "table": (by_table, ["int b", "10, 8"], [3, 20]),
    "padding": (neighbours, ["n"], [7, 40]),
    "inner pipeline": (inner_pipeline, ["n, 128"], [20]),
    "expression": (lambda x: double(x.reshape(-1, 128)), ["128*n"], [11]),
    "vmap": (jax.vmap(product), ["2, m, k", "2, k, n"], [(5, 33, 7)]),
    "vmap of symbolic size": (jax.vmap(softmax), ["k, b, n"], [(3, 5, 7)]),
    "grad": (squares(softmax), ["b, n"], [(5, 33)]),
    "grad of sums": (squares(column_means), ["b, n"], [(20, 5)]),
    "grad of vmap": (squares(jax.vmap(softmax)), ["k, b, n"], [(2, 3, 5)]),
    "vmap of grad": (jax.vmap(squares(softmax)), ["k, b, n"], [(2, 3, 5)]),
    "jvp": (lambda x: jax.jvp(softmax, (x,), (2 * x,))[1], ["b, n"], [(5, 33)]),
    "fuse": (pl.fuse(lambda x: softmax(2 * x) + 1), ["b, n"], [(5, 33)]),
}


def symbolic(*shapes, constraints=()):
    """Shapes in one scope."""
    scope = jax.export.SymbolicScope(constraints)
    return [
        S(
            jax.export.symbolic_shape(text.removeprefix("int "), scope=scope),
            jnp.int32 if text.startswith("int") else jnp.float32,
        )
        for text in shapes
    ]


def concrete(spec, sizes, n):
    known = dict(sizes)
    shape = [d if isinstance(d, int) else eval(str(d), {}, known) for d in spec.shape]
    return table_of(*shape) if spec.dtype == jnp.int32 else normal(n, *shape)


@pytest.mark.parametrize("case", CASES)
def test_one_export_serves_all_sizes(case):
    f, shapes, all_sizes = CASES[case]
    specs = symbolic(*shapes)
    exported = jax.export.export(jax.jit(f))(*specs)
    again = jax.export.deserialize(exported.serialize())
    texts = (str(d) for spec in specs for d in spec.shape if not isinstance(d, int))
    names = dict.fromkeys(text.removeprefix("128*") for text in texts)
    for sizes in all_sizes:
        sizes = sizes if isinstance(sizes, tuple) else (sizes,)
        given = list(zip(names, sizes, strict=True))
        xs = [concrete(spec, given, n) for n, spec in enumerate(specs)]
        np.testing.assert_allclose(again.call(*xs), f(*xs), rtol=1e-4, atol=1e-4)


def test_types_of_bfloat16():
    (x,) = symbolic("b, n")
    shape = jax.eval_shape(softmax, S(x.shape, jnp.bfloat16))
    assert shape.shape == x.shape and shape.dtype == jnp.bfloat16
    exported = jax.export.export(jax.jit(softmax))(S(x.shape, jnp.bfloat16))
    value = normal(0, 9, 37).astype(jnp.bfloat16)
    np.testing.assert_array_equal(exported.call(value), softmax(value))


def test_lowering_without_an_export():
    text = jax.jit(double).lower(*symbolic("b, 128")).as_text()
    assert "tensor<?x128xf32>" in text


def refusal(f, *specs, **options):
    with pytest.raises((SpecError, UnsupportedError)) as error:
        jax.export.export(jax.jit(f), **options)(*specs)
    return str(error.value)


def block_of_eight(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0), 8)]

    return pl.pallas_call(kernel, out_shape=S((8,), x.dtype), grid=1)(x)


def test_a_size_that_must_be_known_is_named_with_a_way_out():
    text = refusal(block_of_eight, *symbolic("n"))
    assert LEAVES_OPEN in text
    assert "'n' < '8' is inconclusive" in text and "constraints=['n >= 128']" in text
    assert "tests/language/test_symbolic.py" in text  # the line of the access


def test_a_constraint_makes_it_known():
    exported = jax.export.export(jax.jit(block_of_eight))(
        *symbolic("n", constraints=["n >= 8"])
    )
    np.testing.assert_array_equal(exported.call(jnp.arange(11.0)), jnp.arange(8.0))


def test_a_decision_in_the_kernel_is_explained():
    def f(x):
        def kernel(x_ref, o_ref):
            if x_ref.shape[0] > 4:
                o_ref[...] = x_ref[...]

        return pl.pallas_call(kernel, out_shape=x)(x)

    assert LEAVES_OPEN in refusal(f, *symbolic("n"))


def test_a_named_backend_needs_fixed_shapes():
    f = lambda x: double(x, backend="tpu")
    text = refusal(f, *symbolic("n, 128"), platforms=["tpu"])
    assert "'tpu' compiles kernels for fixed shapes, not" in text
    assert "x_ref: f32[n,128], o_ref: f32[n,128]" in text
    assert "interpret=True for plain StableHLO" in text


def test_checked_mode_needs_fixed_shapes():
    f = lambda x: double(x, interpret=pl.Checked())
    assert "checked mode runs kernels of fixed" in refusal(f, *symbolic("n, 128"))


def test_other_platforms_get_the_emulation_and_say_so():
    with pytest.warns(FallbackWarning, match="'tpu' compiles kernels for fixed"):
        exported = jax.export.export(jax.jit(double), platforms=["tpu"])(
            *symbolic("rows, 128")
        )
    assert "tpu_custom_call" not in exported.mlir_module()


def test_a_symbolic_block_is_the_whole_dimension():
    def f(x, like):
        rows = pl.BlockSpec((like.shape[0], 128), lambda: (0, 0))
        return pl.pallas_call(double_kernel, out_shape=x, in_specs=[rows])(x)

    text = refusal(f, S((16, 128), jnp.float32), *symbolic("n"))
    assert "a block size is n, a symbol that is not the size of the dimension" in text
