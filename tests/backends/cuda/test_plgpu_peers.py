"""Thread blocks that reach each other, as CUDA C++: run on the CPU, and compiled."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.backends import base
from pallasite.backends.cuda import nvrtc
from pallasite.errors import UnsupportedError
from tests.backends.cuda import host
from tests.language import test_plgpu_ampere as ampere
from tests.language import test_plgpu_peers as forms

F32 = jnp.float32
S = jax.ShapeDtypeStruct
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def lowered(kernel, x, out=None, scratch=(forms.BUFFER, forms.BARRIER), **options):
    call = plgpu.kernel(kernel, x if out is None else out, scratch_shapes=scratch)
    if options:
        more = dict(scratch_shapes=scratch, **options)
        call = plgpu.kernel(kernel, x if out is None else out, **more)
    (found,) = pl.lower(call)(x).kernels
    return found


def in_pairs(kernel, x, **more):
    return lowered(kernel, x, **forms.PAIR, **more)


def column_sums(x, o, mine, full):
    """Each block reads the rows that the others keep, and adds them up."""
    me, total = lax.axis_index("four"), jnp.zeros((32,), F32)
    mine[...] = x[me]
    for other in range(4):
        plgpu.barrier_arrive(plgpu.cluster_ref(full, {"four": other}))
    plgpu.barrier_wait(full)
    for other in range(4):
        there = plgpu.cluster_ref(mine, {"four": other})
        total += jnp.sum(there[...], axis=0)
    o[me] = total


def operand(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@needs_compiler
def test_blocks_store_to_each_others_memory(tmp_path):
    x = operand(2, 8, 32)
    (got,) = host.run(in_pairs(forms.swap(forms.assign), x), [x], tmp_path)
    np.testing.assert_array_equal(got, x[::-1])


@needs_compiler
def test_blocks_read_each_others_memory(tmp_path):
    x = operand(4, 8, 32)
    scratch = (forms.BUFFER, plgpu.Barrier(num_arrivals=4))
    four = dict(cluster=(4,), cluster_names=("four",))
    found = lowered(column_sums, x, S((4, 32), F32), scratch, **four)
    (got,) = host.run(found, [x], tmp_path)
    np.testing.assert_allclose(got, np.tile(x.sum((0, 1)), (4, 1)), rtol=1e-5)


@needs_compiler
def test_an_async_store_arrives(tmp_path):
    x = operand(2, 8, 32)
    (got,) = host.run(in_pairs(forms.exchange(), x), [x], tmp_path)
    np.testing.assert_array_equal(got, 2 * x[::-1])


@needs_compiler
@pytest.mark.parametrize("swizzle", (None, 128))
def test_memory_with_a_layout_is_stored_to(tmp_path, swizzle):
    layout = [plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)]
    buffer = plgpu.SMEM((8, 32), F32, transforms=layout if swizzle else ())
    x = operand(2, 8, 32)
    found = in_pairs(forms.exchange(), x, scratch=(buffer, forms.BARRIER))
    (got,) = host.run(found, [x], tmp_path)
    np.testing.assert_array_equal(got, 2 * x[::-1])


@needs_compiler
def test_a_barrier_is_polled(tmp_path):
    x = operand(8, 32)
    groups = dict(num_threads=2, thread_name="group")
    (got,) = host.run(lowered(forms.polled(), x, **groups), [x], tmp_path)
    np.testing.assert_array_equal(got, x)


@needs_compiler
def test_memory_is_allocated_again_when_all_are_done_with_it(tmp_path):
    x = operand(3, 8, 32)
    groups = dict(num_threads=2, thread_name="group")
    found = lowered(forms.again, x, scratch=(), **groups)
    assert (
        "meet(15, 256);" in base.Compiled(host.BACKEND, found, base.Options())["cuda"]
    )
    (got,) = host.run(found, [x], tmp_path)
    np.testing.assert_array_equal(got, x)


def test_atomic_stores_are_refused():
    x = operand(2, 8, 32)
    scratch = (forms.BUFFER, forms.BARRIER, forms.BARRIER)
    found = in_pairs(forms.exchange(atomic="add"), x, scratch=scratch)
    with pytest.raises(UnsupportedError, match="has no atomics: async_store_smem"):
        base.Compiled(host.BACKEND, found, base.Options())["cuda"]


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs NVRTC")
@pytest.mark.parametrize(
    "kernel, says",
    [
        (forms.exchange(), r"mapa\.u64"),
        (forms.exchange(), r"mbarrier\.arrive\.shared::cluster"),
        (forms.exchange(), r"fence\.acq_rel\.cluster"),
    ],
)
def test_it_compiles(kernel, says):
    found = in_pairs(kernel, operand(2, 8, 32))
    ptx = base.Compiled(host.BACKEND, found, base.Options())["ptx"]
    assert re.search(says, ptx)


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs NVRTC")
def test_a_test_of_a_barrier_compiles():
    groups = dict(num_threads=2, thread_name="group")
    found = lowered(forms.polled(), operand(8, 32), **groups)
    ptx = base.Compiled(host.BACKEND, found, base.Options())["ptx"]
    assert "mbarrier.test_wait.parity.shared::cta.b64" in ptx


@needs_compiler
def test_warpgroups_meet_at_a_numbered_barrier(tmp_path):
    x = operand(8, 32)
    groups = dict(num_threads=2, thread_name="group")
    found = lowered(ampere.handed_over(), x, scratch=(forms.BUFFER,), **groups)
    (got,) = host.run(found, [x], tmp_path)
    np.testing.assert_array_equal(got, 2 * x)
