"""Tiles that a loop takes and makes row by row stay in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import sites
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.rows_in_place import rows_in_place
from pallasite.passes.run import run
from tests.passes.normal_text import normal_text

F32 = jnp.float32


def decayed(h, row):
    x, a = row
    h = a * h + x
    return h, h


def by_scan(x_ref, a_ref, o_ref):
    start = jnp.zeros((o_ref.shape[-1],), F32)
    o_ref[...] = jax.lax.scan(decayed, start, (x_ref[...], a_ref[...]))[1]


def by_rows(x_ref, a_ref, o_ref):
    def step(t, h):
        x, a = (ref[pl.ds(t, 1), :].reshape(-1) for ref in (x_ref, a_ref))
        h = a * h + x
        o_ref[pl.ds(t, 1), :] = h[None]
        return h

    jax.lax.fori_loop(0, o_ref.shape[0], step, jnp.zeros((o_ref.shape[-1],), F32))


def kernel_of(body, lead: int | None = None, dtype=F32) -> Kernel:
    shape = jax.ShapeDtypeStruct((12, 7, 128), dtype)
    spec = pl.BlockSpec((lead, 7, 128), lambda i: (i, 0, 0))
    call = pl.pallas_call(
        body, out_shape=shape, grid=(12,), in_specs=[spec, spec], out_specs=spec
    )
    return sites.kernels_in(call, shape, shape)[0]


def names_in(kernel: Kernel) -> set[str]:
    return {op.name for op in walk(kernel.body)}


def evaluated(kernel: Kernel) -> np.ndarray:
    rng = np.random.default_rng(0)
    dtypes = [p.ref.dtype.np for p in kernel.inputs]
    arrays = [rng.normal(size=(12, 7, 128)).astype(dtype) for dtype in dtypes]
    return np.asarray(Walker(kernel, NumpyNumbers()).run(arrays)[0])


def test_a_scan_reads_as_a_loop_over_rows():
    assert normal_text(kernel_of(by_scan)) == normal_text(kernel_of(by_rows))


def test_elements_of_a_leading_dimension():
    def kernel(x_ref, a_ref, o_ref):
        start = jnp.zeros((o_ref.shape[-1],), F32)
        o_ref[0] = jax.lax.scan(decayed, start, (x_ref[0], a_ref[0]))[1]

    before = kernel_of(kernel, 1)
    after = run(before)
    verify(after)
    assert not names_in(after) & {"dynamic_slice", "dynamic_update_slice"}
    np.testing.assert_array_equal(evaluated(before), evaluated(after))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_first_rows_may_keep_what_the_tile_started_with(reverse):
    """A loop that leaves rows out: the initial tile is stored first."""

    def kernel(x_ref, a_ref, o_ref):
        x, n = x_ref[...], o_ref.shape[0]

        def step(t, made):
            t = n - 1 - t if reverse else t
            row = jax.lax.dynamic_slice(x, (t, 0), (1, x.shape[1]))
            return jax.lax.dynamic_update_slice(made, row * 2, (t, 0))

        o_ref[...] = jax.lax.fori_loop(0, n - 2, step, a_ref[...])

    before = kernel_of(kernel)
    after = rows_in_place(before)
    verify(after)
    assert not names_in(after) & {"dynamic_slice", "dynamic_update_slice"}
    np.testing.assert_array_equal(evaluated(before), evaluated(after))


def read_back(x_ref, a_ref, o_ref):
    """The loop reads what is in the output meanwhile."""
    o_ref[...] = a_ref[...]

    def step(t, made):
        row = o_ref[pl.ds(t, 1), :] + 1
        return jax.lax.dynamic_update_slice(made, row, (t, 0))

    zeros = jnp.zeros(o_ref.shape, o_ref.dtype)
    o_ref[...] = jax.lax.fori_loop(0, o_ref.shape[0], step, zeros)


def used_twice(x_ref, a_ref, o_ref):
    """A row depends on rows of the tile itself."""

    def step(t, made):
        row = jax.lax.dynamic_slice(made, (t - 1, 0), (1, made.shape[1])) + 1
        return jax.lax.dynamic_update_slice(made, row, (t, 0))

    o_ref[...] = jax.lax.fori_loop(1, o_ref.shape[0], step, x_ref[...])


@pytest.mark.parametrize("body", [read_back, used_twice])
def test_others_stay(body):
    before = kernel_of(body)
    after = rows_in_place(before)
    assert "dynamic_update_slice" in names_in(after)
    np.testing.assert_array_equal(evaluated(before), evaluated(after))


def test_a_written_array_is_loaded_where_it_was():
    text = """\
kernel @k(%x: ref<f32[8,128] any>, %o: ref<f32[8,128] any>) outputs 1 aliases {0: 0} {
  %0: i32 = constant {value=0}
  %1: i32 = constant {value=1}
  %n: i32 = constant {value=7}
  %all: f32[8,128] = load %x[:, :]
  for %0, %n, %1
    body (%i: i32) {
      %row: f32[1,128] = dynamic_slice %all, %i, %0 {sizes=(1, 128)}
      %next: i32 = add %i, %1
      store %o[%next:+1, :] = %row
    }
}
"""
    before = parse_kernel(text)
    assert rows_in_place(before) is before
