"""The forms of `plgpu_forms.py` on the host, emulated, and on a GPU.

And what the host reports about text that leaves its memory, its cluster or its time.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from tests.backends.cuda import host
from tests.backends.cuda.plgpu_forms import FORMS

needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="g++, which compiles the emitted text, is missing"
)
# One of each kind; a GPU runs all.
ON_HOST = [
    "multicast x=2_",
    "multicast y=2_x",
    "multicast y=4_",
    "multicast xz=2_",
    "multicast xyz=2_",
    "late release static by hand (96, 128) 3 slots 2 late",
    "late release dynamic by hand (64, 64) 2 slots 1 late",
    "late release dynamic auto (32, 64) 4 slots 1 late",
    "late release repeated",
    "releases of different delays",
    "pipeline shared by a cluster",
    "copy in: row",
    "copy out dynamic: row of a slice",
    "copy in dynamic: row of a plane",
    "copy out: rows of planes",
    "copy in: columns of rows",
    "get and swap of swizzled memory",
    "get and swap of transposed memory",
    "get and swap of transposed f32 by 64 bytes",
    "products of loads from transposed memory",
    "products of a transposed left side",
]
EMULATED = [
    "multicast y=2_x",
    "late release static by hand (96, 128) 3 slots 2 late",
    "copy in dynamic: row of a plane",
    "pipeline shared by a cluster",
]


def kernel_of(name):
    function, args, want = FORMS[name]()
    (kernel,) = pl.lower(function)(*args).kernels
    return kernel, args, want


def assert_near(got, want):
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, atol=1e-2)


@needs_compiler
@pytest.mark.parametrize("name", ON_HOST)
def test_a_form_on_the_host(name, tmp_path):
    kernel, args, want = kernel_of(name)
    code = host.Code(kernel, tmp_path, optimise="-O0")
    for timing in host.TIMINGS:
        assert_near(code(*args, timing=timing)[0], want)


@pytest.mark.parametrize("name", EMULATED)
def test_an_emulated_form(name):
    function, args, want = FORMS[name]()
    assert_near(function(*args), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_a_form_on_a_gpu(name):
    function, args, want = FORMS[name]()
    assert_near(jax.jit(function)(*args), want)


# --- what the host reports ---


CHANGES = [
    ("multicast z=2_", "3 << (0)", "6 << (0)", "not in the cluster"),
    ("multicast z=2_", ", 2048, 4);", ", 1024, 4);", "other bytes"),
    ("multicast z=2_", "shared) + 0;", "shared) + 4096;", "outside shared memory"),
    ("copy in: planes", "(shared + 0)", "(shared - 8192)", "outside shared memory"),
    ("copy in: planes", "(shared + 0)", "(shared + 65536)", "outside shared memory"),
    ("copy in: planes", "get<16>(x", "get<16>(1 + x", "not aligned"),
    ("get and swap of transposed memory", "(2 * i + 1)", "2 * i + 1", "outside shared"),
    ("products of transposed memory", "operand(ring", "operand(128 + ring", "inside a"),
    ("copy out: row", "copies_together();", ";", "nothing waited for"),
]


@needs_compiler
@pytest.mark.parametrize("name, old, new, message", CHANGES)
def test_a_change_is_found(name, old, new, message, tmp_path):
    kernel, args, _ = kernel_of(name)

    def edit(text):
        assert old in text
        return text.replace(old, new)

    code = host.Code(kernel, tmp_path, optimise="-O0", edit=edit)
    with pytest.raises(AssertionError, match=message):
        code(*args)


@needs_compiler
@pytest.mark.parametrize("meets", [True, False])
def test_an_arrival_at_a_block_that_has_ended(meets, tmp_path):
    """Nothing waits for it, so only the last meeting of the blocks keeps them there."""

    def kernel(o_ref, barrier):
        plgpu.barrier_arrive(barrier)
        o_ref[...] = jnp.ones_like(o_ref)

    function = plgpu.kernel(
        kernel,
        jax.ShapeDtypeStruct((128,), jnp.float32),
        cluster=(2,),
        cluster_names=("pair",),
        scratch_shapes=[plgpu.ClusterBarrier(collective_axes=("pair",))],
    )
    (kernel,) = pl.lower(function)().kernels

    def edit(text):
        before, last, after = text.rpartition("blocks_meet();")
        assert last
        return text if meets else before + after

    code = host.Code(kernel, tmp_path, optimise="-O0", edit=edit)
    if meets:
        np.testing.assert_array_equal(code()[0], 1)
        return
    with pytest.raises(AssertionError, match="a block that has ended"):
        code()
