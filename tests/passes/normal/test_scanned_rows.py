"""Loops load and store by parts what `lax.scan` slices and updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.scanned_rows import scanned_rows
from pallasite.sites import kernels_in
from tests.passes.normal.meaning import assert_same_meaning

KERNEL = """
kernel @k(%x: ref<f32[12,5] any>, %o: ref<bf16[12,5] any>) outputs 1 {
  pipeline %x, %o {grid=(), windows=(in[12, 5], out[12, 5]), semantics=()}
    map () {
      %z: i32 = constant {value=0}
      yield %z, %z
    }
    map () {
      %z_1: i32 = constant {value=0}
      yield %z_1, %z_1
    }
    body (%b: ref<f32[12,5] block>, %r: ref<bf16[12,5] block>) {
      %0: i32 = constant {value=0}
      %n: i32 = constant {value=LIMIT}
      %step: i32 = constant {value=STEP}
      %start: f32[1,5] = constant {value=1.0}
      %tile: f32[12,5] = constant {value=0.0}
      %rows: f32[12,5] = load %b[:, :]
      BEFORE
      %last: f32[1,5], %all: f32[12,5] = for %0, %n, %step, %start, %tile
        body (%i: i32, %h: f32[1,5], %sofar: f32[12,5]) {
          %row: f32[1,5] = dynamic_slice %rows, %i, %0 {sizes=(1, 5)}
          %new: f32[1,5] = add %h, %row
          %more: f32[12,5] = dynamic_update_slice %sofar, %new, %i, %0
          yield %new, %more
        }
      %narrow: bf16[12,5] = cast %all {dtype=bf16}
      AFTER
      store %r[:, :] = %narrow
    }
}
"""


def kernel(limit: int = 12, step: int = 1, before: str = "", after: str = ""):
    text = KERNEL.replace("LIMIT", str(limit)).replace("STEP", str(step))
    return parse_kernel(text.replace("BEFORE", before).replace("AFTER", after))


def test_rows_are_loaded_and_stored_in_the_loop():
    before = kernel()
    after = scanned_rows(before)
    assert "f32[12,5] = " not in after.text and "dynamic" not in after.text
    assert_same_meaning(before, after)


@pytest.mark.parametrize("limit, step", [(11, 1), (12, 2)])
def test_rows_that_no_iteration_makes_stay_zero(limit: int, step: int):
    before = kernel(limit, step)
    after = scanned_rows(before)
    assert "dynamic_slice" not in after.text and "dynamic_update_slice" in after.text
    assert_same_meaning(before, after)


def test_a_slice_that_is_clamped_stays():
    assert "dynamic_slice" in scanned_rows(kernel(13)).text


def test_a_result_that_is_read_before_it_is_stored_stays():
    read = "%old: bf16[12,5] = load %r[:, :]\n      store %r[:, :] = %old"
    after = scanned_rows(kernel(before="%z2: bf16[12,5] = constant {value=0.0}\n"
                                "      store %r[:, :] = %z2", after=read))  # fmt: skip
    assert "dynamic_update_slice" in after.text


def test_scan():
    def body(x_ref, o_ref):
        def step(h, x):
            h = 0.5 * h + x
            return h, jnp.tanh(h)

        _, o_ref[...] = jax.lax.scan(step, jnp.zeros(7), x_ref[...])

    x = np.random.default_rng(0).standard_normal((9, 7)).astype(np.float32)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(body, out_shape=shape, interpret=True)
    (before,) = kernels_in(call, x)
    after = scanned_rows(before)
    assert "[9,7] = " not in after.text
    assert_same_meaning(before, after, [x])
