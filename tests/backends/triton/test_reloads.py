"""Operands that do not fit in shared memory, and fills of more than a tensor holds."""

from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.backends import base
from pallasite.backends.triton.launch import AGAIN
from pallasite.ir.nodes import walk
from pallasite.ir.text import parse_kernel
from pallasite.sites import kernels_in
from pallasite.target import GPUS
from tests.backends.triton import simulate
from tests.backends.triton.harness import BACKEND, simulated, with_shared

H200 = GPUS["h200"]


def scheduled(kernel, chip):
    made = base.Compiled(BACKEND, kernel, base.Options(chip=chip), shared=())
    simulate.verify_ttir(made["ttir"])
    return made.scheduled


def ops_of(kernel, name):
    return [op for op in walk(kernel.body) if op.name == name]


def several(x_ref, y_ref, z_ref, o_ref):
    """`x`, and `p`, which is computed, are multiplied first and last."""
    x, y, z = x_ref[...], y_ref[...], z_ref[...]
    p = jnp.tanh(x @ y)
    q = jnp.tanh(z @ y.T)
    o_ref[...] = p.T @ x + p @ q + jnp.max(p)


def one(x_ref, y_ref, z_ref, o_ref):
    """Neither operand is free to be split: of both there is a sum over all."""
    x, y = x_ref[...], y_ref[...]
    o_ref[...] = jnp.sin(x) @ y.T + jnp.sum(x) + jnp.sum(y) + z_ref[...]


def kernel_of(body, side=32):
    square = jax.ShapeDtypeStruct((side, side), jnp.float32)
    run = lambda *xs: pl.pallas_call(body, out_shape=square)(*xs)
    (kernel,) = kernels_in(run, square, square, square)
    return kernel


def operands(side=32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(side, side)).astype(np.float32) for _ in range(3)]


def test_an_operand_is_loaded_again_where_others_need_the_room():
    kernel = kernel_of(several)
    assert not any(AGAIN in op.attrs for op in walk(scheduled(kernel, H200).body))
    tight = with_shared(12 << 10)  # three tiles of 32 x 32
    made = scheduled(kernel, tight)
    again = [op for op in ops_of(made, "load") if AGAIN in op.attrs]
    assert again and ops_of(made, "alloc"), "from its array, or from scratch"
    how = base.Options(chip=tight)
    text = base.Compiled(BACKEND, kernel, how, shared=())["ttir"]
    assert text.count("isVolatile = true") == len(again)
    (got,), (want,) = (simulated(kernel, operands(), chip=c) for c in (tight, H200))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_matmul_that_does_not_fit_goes_over_parts_of_its_depth():
    kernel, tight = kernel_of(one), with_shared(7 << 10)  # two operands take 8 KB
    made = scheduled(kernel, tight)
    (loop,) = ops_of(made, "for")
    (product,) = [op for op in walk(loop.regions[0]) if op.name == "dot"]
    assert {v.tile.size for v in product.operands} == {32 * 16}
    (got,), (want,) = (simulated(kernel, operands(), chip=c) for c in (tight, H200))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_large_fill_is_a_loop(monkeypatch):
    def accumulate(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.ones_like(o_ref)

        row = pl.program_id(0) * 5 % 7
        o_ref[row] += x_ref[0]

    shape = jax.ShapeDtypeStruct((7, 6, 16), jnp.float32)
    run = lambda x: pl.pallas_call(
        accumulate,
        out_shape=shape,
        grid=x.shape[0],
        in_specs=[pl.BlockSpec((1, 6, 16), lambda i: (i, 0, 0))],
        out_specs=pl.BlockSpec((7, 6, 16), lambda i: (0, 0, 0)),
    )(x)
    x = np.random.default_rng(0).normal(size=(5, 6, 16)).astype(np.float32)
    (kernel,) = kernels_in(run, x)
    module = import_module("pallasite.backends.triton.fill_in_parts")
    monkeypatch.setattr(module, "MAX_ELEMENTS", 64)
    monkeypatch.setattr(module, "PART", 32)
    fills = [
        [v.tile.shape for v in op.operands if not v.is_ref and v.tile.rank > 1]
        for op in ops_of(scheduled(kernel, H200), "store")
    ]
    assert [(1, 2, 16)] in fills, "whole rows, and as many as fit"
    want = np.ones(shape.shape, np.float32)
    for n, rows in enumerate(x):
        want[n * 5 % 7] += rows
    np.testing.assert_allclose(simulated(kernel, [x])[0], want, rtol=1e-6)


@pytest.mark.parametrize("side", [32, 48])
def test_reloads_of_sides_that_are_no_power_of_two(side):
    kernel, tight = kernel_of(several, side), with_shared(24 << 10)
    given = operands(side)
    (got,), (want,) = (simulated(kernel, given, chip=c) for c in (tight, H200))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("start", [-3, 2, 1000])
def test_parts_are_clamped_as_one_whole(start, monkeypatch):
    """A start out of range moves the whole span, not each part by itself."""

    def fill(s_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        o_ref[pl.ds(s_ref[0], 32), pl.ds(s_ref[0], 5)] = jnp.ones((32, 5))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    shape = jax.ShapeDtypeStruct((40, 9), jnp.float32)
    run = lambda s: pl.pallas_call(
        fill, out_shape=shape, in_specs=[anywhere], out_specs=anywhere
    )(s)
    s = np.asarray([start], np.int32)
    (kernel,) = kernels_in(run, s)
    module = import_module("pallasite.backends.triton.fill_in_parts")
    monkeypatch.setattr(module, "MAX_ELEMENTS", 64)
    monkeypatch.setattr(module, "PART", 4)
    want = np.zeros(shape.shape, np.float32)
    row, column = np.clip(start, 0, 8), np.clip(start, 0, 4)
    want[row : row + 32, column : column + 5] = 1
    np.testing.assert_array_equal(simulated(kernel, [s])[0], want)


@pytest.mark.parametrize("start", [-3, 2, 1000])
def test_operands_loaded_in_parts_are_clamped_as_one_whole(start):
    def product(x_ref, y_ref, s_ref, o_ref):
        x, y = x_ref[:, pl.ds(s_ref[0], 32)], y_ref[...]
        o_ref[...] = x @ y + jnp.sum(x) + jnp.sum(y)

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=s).astype(np.float32) for s in ((32, 40), (32, 32)))
    s = np.asarray([start], np.int32)
    square = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    run = lambda *xs: pl.pallas_call(product, out_shape=square)(*xs)
    (kernel,) = kernels_in(run, x, y, s)
    tight = with_shared(7 << 10)  # two operands take 8 KB
    (loop,) = ops_of(scheduled(kernel, tight), "for")
    assert any(op.name == "load" for op in walk(loop.regions[0]))
    first = np.clip(start, 0, 8)
    part = x[:, first : first + 32]
    want = part @ y + part.sum() + y.sum()
    (got,) = simulated(kernel, [x, y, s], chip=tight)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


VIEWS = """
kernel @k(%x: ref<f32[6,9,32] any>, %y: ref<f32[32,32] any>, %o: ref<f32[28,32] any>)
    outputs 1 {
  pipeline {grid=(), windows=(), semantics=()}
    body () {
      %v: f32[6,9,32] = load %x[:, :, :]
      %t: f32[6,9,32] = tanh %v
      %w: f32[32,32] = load %y[:, :]
      %a: f32[4,7,32] =
        slice %t {starts=(0, 0, 0), limits=(4, 7, 32), strides=(1, 1, 1)}
      %b: f32[4,7,32] =
        slice %t {starts=(2, 1, 0), limits=(6, 8, 32), strides=(1, 1, 1)}
      %p: f32[28,32] = reshape %a {shape=(28, 32)}
      %q: f32[28,32] = reshape %b {shape=(28, 32)}
      %c: f32[28,32] = dot %p, %w {contract=((1,), (0,)), batch=((), ()), dtype=f32}
      %d: f32[28,32] = dot %q, %w {contract=((1,), (0,)), batch=((), ()), dtype=f32}
      %e: f32[28,32] = add %c, %d
      store %o[:, :] = %e
    }
}
"""


def test_an_operand_that_is_reshaped_is_loaded_again_once():
    """Right before its matmul it is held, however little room there is."""
    kernel = parse_kernel(VIEWS)
    module = import_module("pallasite.backends.triton.reload_operands")
    made = module.reload_operands(kernel, {}, with_shared(8 << 10))
    again = [op for op in ops_of(made, "load") if AGAIN in op.attrs]
    assert 0 < len(again) <= 4
