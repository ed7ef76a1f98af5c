"""Names of upstream's `pl` and `plsc`: there or refused; and `pl.select_ref`."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite import tpu as pltpu
from pallasite import tpu_sc as plsc
from pallasite import triton as plt
from pallasite.errors import KernelTypeError, SpecError
from pallasite.missing import Missing

REFUSED = {
    "pallas": {"Indirect"},
    "pallas.triton": set(),
    "pallas.tpu_sc": {"slice_subcore_vmem_from_shared"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "ours"),
    [("pallas", pl), ("pallas.tpu_sc", plsc), ("pallas.triton", plt)],
    ids=["pl", "plsc", "plt"],
)
def test_no_name_is_missing(module, ours):
    upstream = importlib.import_module(f"jax.experimental.{module}")
    names = {n for n in vars(upstream) if n[0] != "_"}
    names = {n for n in names if not hasattr(vars(upstream)[n], "__path__")}
    names -= {"typing", "annotations", "tpu", "triton", "mosaic_gpu", "tpu_sc"}
    assert not {n for n in names if not hasattr(ours, n)}
    refused = {n for n in names if isinstance(getattr(ours, n), Missing)}
    assert refused == REFUSED[module] & names
    for name in refused:
        with pytest.raises(NotImplementedError, match=f"{name} is not") as raised:
            getattr(ours, name)()
        assert "fix" in str(raised.value)


X = np.arange(48, dtype=np.float32).reshape(3, 2, 8)
MODES = {"emulated": True, "cpu": False, "checked": pl.Checked()}


def picking(a_ref, b_ref, o_ref, semaphore):
    which = pl.program_id(0) % 2
    source = pl.select_ref(which, a_ref.at[0], b_ref)
    copy = pltpu.async_copy(source, o_ref.at[0], semaphore)
    copy.wait()
    pltpu.sync_copy(b_ref, pl.select_ref(1 - which, o_ref.at[1], o_ref.at[2]))
    pltpu.sync_copy(a_ref.at[2], pl.select_ref(which, o_ref.at[1], o_ref.at[2]))


@pytest.mark.parametrize("mode", MODES)
def test_copies_go_where_a_number_says(mode):
    call = pl.pallas_call(
        picking,
        jax.ShapeDtypeStruct((2, *X.shape), jnp.float32),
        grid=2,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_specs=pl.BlockSpec((None, 3, 2, 8), lambda i: (i, 0, 0, 0)),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        interpret=MODES[mode],
    )
    a, b = X, -X[1]
    np.testing.assert_array_equal(call(a, b), [[a[0], a[2], b], [b, b, a[2]]])


def test_a_selected_ref_is_for_copies():
    def kernel(a_ref, b_ref, o_ref):
        o_ref[...] = pl.select_ref(0, a_ref, b_ref)[...]

    with pytest.raises(KernelTypeError, match="source or destination of a copy"):
        pl.pallas_call(kernel, jax.typeof(jnp.asarray(X)), interpret=True)(X, X)
    with pytest.raises(KernelTypeError, match="at least two refs"):
        pl.select_ref(0)


# --- types, switches and exports ---


def test_types_of_settings_and_of_dimensions():
    settings = pltpu.CompilerParams, plgpu.CompilerParams, plt.CompilerParams
    assert all(isinstance(make(), pl.CompilerParams) for make in settings)
    assert not isinstance(pl.Element(8), pl.CompilerParams)
    dims = pl.Element(8), pl.Blocked(8), pl.squeezed, pl.BoundedSlice(8)
    assert all(isinstance(dim, pl.BlockDim) for dim in dims)
    assert not isinstance(8, pl.BlockDim)


def checking(x_ref, o_ref):
    pl.debug_check(jnp.all(x_ref[...] < 3), "too large")
    o_ref[...] = x_ref[...]


@pytest.mark.parametrize("mode", MODES)
def test_checks_are_switched_off(mode):
    call = jax.jit(pl.pallas_call(checking, ROWS, interpret=MODES[mode]))
    assert pl.debug_checks_enabled()
    with pl.enable_debug_checks(False):
        assert not pl.debug_checks_enabled()
        np.testing.assert_array_equal(call(X[0]), X[0])
    with pl.enable_debug_checks(True), pytest.raises(Exception, match="too large"):
        jax.block_until_ready(call(X[0]))


ROWS = jax.ShapeDtypeStruct(X.shape[1:], jnp.float32)


def doubling(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def test_calls_are_equations_of_one_primitive():
    jaxpr = jax.make_jaxpr(pl.pallas_call(doubling, ROWS))(X[0])
    assert [eqn.primitive for eqn in jaxpr.eqns] == [pl.pallas_call_p]


def test_the_text_of_an_export():
    call = pl.pallas_call(doubling, ROWS)
    with pl.pallas_export_experimental(dynamic_shapes=True):
        text = pl.lower_as_mlir(call, ROWS, platforms=["cpu"])
        assert "module @" in text
        assert "tpu_custom_call" in pl.lower_as_mlir(call, ROWS, dynamic_shapes=False)


def test_generations_of_gpus(monkeypatch):
    info = plt.get_gpu_info_from_version(plt.GpuVersion.H200)
    assert (info.compute_capability, info.arch_name) == (90, "9.0")
    for version in plt.GpuVersion:
        assert plt.get_gpu_info_from_version(version).gpu_version is version
    for target, expected in (("a100", 80), ("h100", 90), ("b200", 100)):
        monkeypatch.setenv("PALLASITE_TARGET", target)
        assert plt.get_gpu_info().compute_capability == expected
    monkeypatch.setenv("PALLASITE_TARGET", "v5e")
    with pytest.raises(SpecError, match="no GPU is known by the name"):
        plt.get_gpu_info()
    assert plt.CUSTOM_CALL_TARGET_NAME == "__gpu$xla.gpu.triton"
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        _ = plt.Absent
    assert plt.is_gpu_device() == (jax.default_backend() == "gpu")
