"""Recurrences, stencils and histograms, as emitted, on the simulator."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.passes.run import run
from pallasite.passes.schedule import shifted_parts
from pallasite.sites import kernels_in
from tests.backends.triton.harness import compiled, simulated
from tests.ops.sampling import evaluate

F32, I32 = jnp.float32, jnp.int32
ROWS = pl.BlockSpec((24, 128), lambda i: (i, 0))


def by_scan(x_ref, o_ref):
    def step(h, x):
        h = 0.5 * h + x
        return h, h

    o_ref[...] = lax.scan(step, jnp.zeros((128,), F32), x_ref[...])[1]


def rolled(x_ref, o_ref):
    x = x_ref[...]
    up = jnp.concatenate([x[1:], x[:1]], axis=0)
    o_ref[...] = jnp.roll(x, 3, axis=1) + up


def taps(x_ref, o_ref, last_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        last_ref[...] = jnp.ones_like(last_ref)

    x = jnp.concatenate([last_ref[...], x_ref[...]], axis=0)
    o_ref[...] = x[1:-1] + 2 * x[2:]
    last_ref[...] = x[-2:]


@pytest.mark.parametrize("body", [by_scan, rolled, taps])
def test_rows(body, monkeypatch):
    monkeypatch.setattr(shifted_parts, "LARGE", 1024)
    monkeypatch.setattr(shifted_parts, "PART", 256)
    scratch = [pltpu.VMEM((2, 128), F32)] if body is taps else []
    shape = jax.ShapeDtypeStruct((72, 128), F32)
    call = pl.pallas_call(
        body,
        out_shape=shape,
        grid=(3,),
        in_specs=[ROWS],
        out_specs=ROWS,
        scratch_shapes=scratch,
    )
    kernel = run(kernels_in(call, shape)[0])
    x = np.random.default_rng(0).integers(-9, 9, shape.shape).astype(np.float32)
    text, _ = compiled(kernel)
    assert "tt.cat" not in text and "tt.join" not in text
    (got,), (want,) = simulated(kernel, [x]), evaluate(kernel, [x])
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_weights_are_added_without_atomics():
    def body(x_ref, w_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        pl.atomic_add(o_ref, (x_ref[...],), w_ref[...])

    spec = pl.BlockSpec((64,), lambda i: (i,))
    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((24,), F32),
        grid=(3,),
        in_specs=[spec, spec],
        out_specs=pl.BlockSpec((24,), lambda i: (0,)),
    )
    given = [jax.ShapeDtypeStruct((192,), dtype) for dtype in (I32, F32)]
    kernel = run(kernels_in(call, *given)[0])
    assert "atomic" not in compiled(kernel)[0]
    rng = np.random.default_rng(0)
    x, w = rng.integers(-30, 30, 192).astype(np.int32), rng.integers(0, 9, 192)
    operands = [x, w.astype(np.float32)]
    (got,), (want,) = simulated(kernel, operands), evaluate(kernel, operands)
    np.testing.assert_array_equal(got, want)


def segments(ids_ref, x_ref, o_ref, weight):
    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    first, ids = 32 * pl.program_id(0), ids_ref[...]

    @pl.when((ids[:, 0].max() >= first) & (ids[:, 0].min() < first + 32))
    def _():
        hot = ids == first + lax.broadcasted_iota(I32, (128, 32), 1)
        hot, dims = jnp.where(hot, weight, 0.0), (((0,), (0,)), ((), ()))
        o_ref[...] += lax.dot_general(hot, x_ref[...], dims,
                                      preferred_element_type=F32)  # fmt: skip


@pytest.mark.parametrize(
    ("weight", "depth", "count"), [(0.3, "x16xf32", 1), (1.0, "x32xbf16", 3)]
)
def test_exact_products_are_shallow_although_their_rows_are_reduced(
    weight, depth, count
):
    """The branch asks for all rows; the product takes few of them at a time, as f32 or
    in pieces of bf16."""
    call = pl.pallas_call(
        functools.partial(segments, weight=weight),
        jax.ShapeDtypeStruct((256, 4096), F32),
        grid=(8, 64),
        in_specs=[
            pl.BlockSpec((128, 1), lambda i, j: (j, 0)),
            pl.BlockSpec((128, 4096), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((32, 4096), lambda i, j: (i, 0)),
    )
    shapes = ((8192, 1), I32), ((8192, 4096), F32)
    (kernel,) = kernels_in(call, *(jax.ShapeDtypeStruct(*s) for s in shapes))
    text, _ = compiled(run(kernel))
    products = [line for line in text.splitlines() if "tt.dot" in line]
    assert len(products) == count
    assert all(f"{depth}> * tensor<{depth[1:3]}x" in line for line in products)
    assert "tensor<128x1x!tt.ptr<i32>>" in text  # of the reductions


def test_products_that_data_ask_for_have_small_results():
    """The same product of all rows has tiles four times as large."""

    def unasked(ids_ref, x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        slots = 128 * pl.program_id(0) + lax.broadcasted_iota(I32, (512, 128), 1)
        hot = (ids_ref[...] == slots).astype(F32)
        o_ref[...] += lax.dot_general(hot, x_ref[...], (((0,), (0,)), ((), ())))

    def asked(ids_ref, x_ref, o_ref):
        first, ids = 128 * pl.program_id(0), ids_ref[...]

        @pl.when((ids[:, 0].max() >= first) & (ids[:, 0].min() < first + 128))
        def _():
            unasked(ids_ref, x_ref, o_ref)

    def sizes(body):
        call = pl.pallas_call(
            body,
            jax.ShapeDtypeStruct((8192, 512), F32),
            grid=(64, 128),
            in_specs=[
                pl.BlockSpec((512, 1), lambda i, j: (j, 0)),
                pl.BlockSpec((512, 512), lambda i, j: (j, 0)),
            ],
            out_specs=pl.BlockSpec((128, 512), lambda i, j: (i, 0)),
        )
        shapes = ((65536, 1), I32), ((65536, 512), F32)
        (kernel,) = kernels_in(call, *(jax.ShapeDtypeStruct(*s) for s in shapes))
        text, _ = compiled(run(kernel))
        found = re.findall(r"tt.dot .*-> tensor<(\d+)x(\d+)xf32>", text)
        assert len(found) == 3
        return [int(m) * int(n) for m, n in found]

    assert max(sizes(asked)) * 4 == max(sizes(unasked))


def looked_up(ids_ref, table_ref, o_ref):
    """Rows of a table in blocks, as the derivative of a segment sum reads them."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    first, ids = 32 * pl.program_id(1), ids_ref[...]

    @pl.when((ids[:, 0].max() >= first) & (ids[:, 0].min() < first + 32))
    def _():
        hot = (ids == first + lax.broadcasted_iota(I32, (64, 32), 1)).astype(F32)
        o_ref[...] += hot @ table_ref[...]


@pytest.mark.parametrize("bad", [(), (np.inf,), (np.nan,), (np.inf, -np.inf)])
def test_lookups_are_loads_of_rows(bad):
    call = pl.pallas_call(
        looked_up,
        jax.ShapeDtypeStruct((128, 1024), F32),
        grid=(2, 3),
        in_specs=[
            pl.BlockSpec((64, 1), lambda i, j: (i, 0)),
            pl.BlockSpec((32, 1024), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((64, 1024), lambda i, j: (i, 0)),
    )
    shapes = ((128, 1), I32), ((96, 1024), F32)
    (kernel,) = kernels_in(call, *(jax.ShapeDtypeStruct(*s) for s in shapes))
    kernel = run(kernel)
    rng = np.random.default_rng(0)
    ids = rng.integers(-20, 120, (128, 1)).astype(np.int32)
    table = rng.normal(size=(96, 1024)).astype(np.float32)
    ids[3:5] = 40
    for place, number in zip((40, 41), bad, strict=False):
        table[place, 7] = number
    text, launch = compiled(kernel)
    assert "tt.dot" not in text
    # Parts of rows: each program loads a part of the table, of which it reads rows.
    assert "tensor<32x256xf32>" in text and launch.config["grid_x"] == 16
    with np.errstate(invalid="ignore"):
        (got,), (want,) = (f(kernel, [ids, table]) for f in (simulated, evaluate))
    np.testing.assert_array_equal(got, want)
    assert np.isnan(got).any() == bool(bad)
