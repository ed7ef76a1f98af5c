"""Forms that existing kernels use: loops with a carry, calls without results, names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.errors import SpecError

S = jax.ShapeDtypeStruct
f32 = jnp.float32
X = np.arange(8, dtype=np.float32)
MODES = pytest.mark.parametrize(
    "mode", [False, True, pl.Checked()], ids=["cpu", "emulated", "checked"]
)


@MODES
@pytest.mark.parametrize("unroll", [None, True])
def test_loops_carry_values(mode, unroll):
    def kernel(x_ref, o_ref):
        @pl.loop(1, 8, step=3, init_carry=(jnp.float32(0), jnp.int32(0)), unroll=unroll)
        def totals(i, carry):
            return carry[0] + x_ref[i], carry[1] + 1

        o_ref[0], o_ref[1] = totals[0], totals[1].astype(f32)

    got = pl.pallas_call(kernel, out_shape=S((2,), f32), interpret=mode)(X)
    np.testing.assert_array_equal(got, [1 + 4 + 7, 3])


def test_loops_outside_kernels_carry_values_too():
    @pl.loop(0, 4, init_carry=0)
    def total(i, carry):
        return carry + i

    assert total == 6


@MODES
def test_calls_without_results_run_for_what_they_print(mode, capfd):
    """As upstream, a kernel with `out_shape=None` gets None for its output."""

    def kernel(x_ref, nothing):
        assert nothing is None
        pl.debug_print("program {} has {}", pl.program_id(0), x_ref[0])

    block = pl.BlockSpec((4,), lambda i: (i,))
    call = pl.pallas_call(
        kernel, out_shape=None, grid=2, in_specs=[block], interpret=mode
    )
    assert call(X) is None
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert "program 0 has 0.0" in printed
    assert "program 1 has 4.0" in printed
    assert jax.jit(lambda x: (call(x), x + 1))(X)[0] is None


@MODES
def test_calls_with_an_empty_tuple_of_results(mode):
    def kernel(x_ref):
        pl.debug_check(x_ref[0] == 0, "the first element is not 0")

    assert pl.pallas_call(kernel, out_shape=(), interpret=mode)(X) == ()


def test_a_call_still_has_to_say_what_it_returns():
    with pytest.raises(SpecError, match="needs one of out_shape and out_type"):
        pl.pallas_call(lambda x_ref, o_ref: None)


def test_chips_say_whether_they_have_sparse_cores():
    assert pltpu.get_tpu_info().sparse_core is None  # a v5e
    with config.override(target="tpu:v6e"):
        assert pltpu.get_tpu_info().sparse_core is not None
    six = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1).sparse_core
    seven = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_7X, 1).sparse_core
    assert (six.num_cores, six.num_subcores, six.num_lanes) == (2, 16, 8)
    assert (seven.num_cores, seven.num_lanes) == (2, 16)


def test_names_that_kernels_pass_around():
    assert pl.DeviceIdType.MESH is pltpu.DeviceIdType.MESH
    assert pltpu.DeviceIdType.LOGICAL.value == "logical"
    assert str(pltpu.CoreType.TC) == "tc"
    assert pltpu.Tiling.COMPACT.shape == (8, 128)
    assert issubclass(pltpu.BufferedRef, pltpu.BufferedRefBase)


@MODES
def test_annotated_refs_are_the_refs(mode):
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * pltpu.annotate(x_ref, no_store=True)[...]

    got = pl.pallas_call(kernel, out_shape=S((8,), f32), interpret=mode)(X)
    np.testing.assert_array_equal(got, 2 * X)


def test_modules_may_name_layouts_of_gpus():
    """Tokamax does when it is imported, on any machine."""
    from pallasite import mosaic_gpu as plgpu

    assert plgpu.Layout.WGMMA is not plgpu.Layout.TCGEN05_TMEM_NATIVE
    assert plgpu.Layout.WGMMA.reduce(0) != plgpu.Layout.WGMMA.reduce(1)
