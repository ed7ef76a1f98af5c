"""Atomic additions of floats, in a fixed order where one program makes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import sites
from pallasite import tpu as pltpu
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify
from pallasite.passes.run import run
from pallasite.passes.schedule.ordered_sums import ordered_sums

F32, I32 = jnp.float32, jnp.int32


def histogram(x_ref, w_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    pl.atomic_add(o_ref, (x_ref[...],), w_ref[...])


def masked(x_ref, w_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.ones_like(o_ref)

    pl.atomic_add(o_ref, (x_ref[...],), w_ref[...], mask=w_ref[...] > 0)


def kernel_of(body, bins=20, dtype=F32, semantics=("arbitrary",)) -> Kernel:
    spec = pl.BlockSpec((16,), lambda i: (i,))
    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((bins,), dtype),
        grid=(5,),
        in_specs=[spec, spec],
        out_specs=pl.BlockSpec((bins,), lambda i: (0,)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
    )
    given = [jax.ShapeDtypeStruct((80,), t) for t in (I32, dtype)]
    return run(sites.kernels_in(call, *given)[0])


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16])
@pytest.mark.parametrize("body", [histogram, masked])
def test_sums_are_those_of_atomics(body, dtype):
    before = kernel_of(body, dtype=dtype)
    after = ordered_sums(before)
    verify(after)
    assert "atomic" not in after.text
    rng = np.random.default_rng(0)
    # Repeated, negative and out of range, on both sides; sums are exact.
    x = rng.integers(-25, 25, 80).astype(np.int32)
    w = rng.integers(-3, 4, 80).astype(dtype)
    one, two = (Walker(k, NumpyNumbers()).run([x, w])[0] for k in (before, after))
    np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def test_a_nan_stays_in_its_bin():
    x, w = np.arange(80, dtype=np.int32) % 20, np.ones(80, np.float32)
    w[3] = np.nan
    (found,) = Walker(ordered_sums(kernel_of(histogram)), NumpyNumbers()).run([x, w])
    assert np.isnan(found[3]) and np.isfinite(np.delete(np.asarray(found), 3)).all()


def test_what_programs_share_stays_atomic():
    before = kernel_of(histogram, semantics=("parallel",))
    assert ordered_sums(before) is before


@pytest.mark.parametrize("more", [{"dtype": I32}, {"bins": 5000}], ids=str)
def test_integers_and_large_blocks_stay_atomic(more):
    before = kernel_of(histogram, **more)
    assert ordered_sums(before) is before


def test_old_contents_that_are_used_stay():
    def body(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        old = pl.atomic_add(o_ref, (x_ref[...],), w_ref[...])
        pl.atomic_add(o_ref, (x_ref[...],), old)

    assert "atomic" in ordered_sums(kernel_of(body)).text
