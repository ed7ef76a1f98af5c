"""What XLA makes of operands before a call agrees with what blocks show at the edge."""

from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.backends import cuda
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from pallasite.target import GPUS
from tests.passes.normal.meaning import operands, outputs

BF16, F32 = jnp.bfloat16, jnp.float32
DEPTH = 100  # of blocks of 128


@pytest.fixture(autouse=True)
def always_pays(monkeypatch):
    module = import_module("pallasite.backends.cuda.repack")
    monkeypatch.setattr(module, "_pays", lambda *_: True)


def after(name: str, factor: float, fill: float | None):
    """A matmul before and after a pass of the backend."""

    def kernel(x_ref, y_ref, o_ref):
        y = y_ref[...] * jnp.bfloat16(factor)
        o_ref[...] = jnp.dot(x_ref[...], y, preferred_element_type=F32)

    block = lambda *shape: pl.BlockSpec(shape, lambda i: (0, 0), fill=fill)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((64, 128), F32),
        grid=(1,),
        in_specs=[block(64, 128), block(128, 128)],
        out_specs=pl.BlockSpec((64, 128), lambda i: (0, 0)),
    )
    shapes = [jax.ShapeDtypeStruct(s, BF16) for s in ((64, DEPTH), (DEPTH, 128))]
    new = run(*kernels_in(call, *shapes))
    for each in cuda.passes_for(GPUS["h200"]):
        old, new = new, each.function(new)
        if each.name == name:
            return old, new
    raise AssertionError(name)


@pytest.mark.parametrize("fill", [0.0, 1.0, -2.0, float("nan")])
def test_columns_are_appended_where_the_fill_is_zero(fill):
    old, new = after("repack", 1.0, fill)
    padded = [
        p.ref.shape != q.ref.shape for p, q in zip(old.params, new.params, strict=True)
    ]
    assert padded == [not fill, False, False]
    x, y = operands(old)
    more = np.pad(x, ((0, 0), (0, new.inputs[0].ref.shape[1] - DEPTH)))
    for got, want in zip(outputs(new, [more, y]), outputs(old, [x, y]), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fill", [0.0, 1.0, -2.0, float("nan")])
def test_factors_are_taken_where_the_fill_is_zero(fill):
    old, new = after("factors_before", 0.37, fill)
    assert (new is old) == bool(fill)
    x, y = operands(old)
    scaled = y if fill else y * y.dtype.type(0.37)
    pairs = zip(outputs(new, [x, scaled]), outputs(old, [x, y]), strict=True)
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)


def test_operands_beside_a_matmul_may_be_copied():
    """What is done with an operand need not have a result."""

    def kernel(x_ref, y_ref, o_ref, copy_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...], preferred_element_type=jnp.float32)
        copy_ref[...] = y_ref[...]

    x, y = (jax.ShapeDtypeStruct(s, BF16) for s in ((64, 64), (8, 128)))
    outs = [jax.ShapeDtypeStruct((64, 64), jnp.float32), y]
    (kernel_,) = kernels_in(pl.pallas_call(kernel, outs, grid=1), x, y)
    names = [each.name for each in cuda.passes_for(GPUS["h200"])]
    passes = cuda.passes_for(GPUS["h200"])[: names.index("factors_before") + 1]
    assert run(kernel_, passes).outputs
