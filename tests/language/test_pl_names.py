"""Names of upstream's `pl` and `plsc`: there or refused; and `pl.select_ref`."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite import tpu_sc as plsc
from pallasite.errors import KernelTypeError
from pallasite.missing import Missing

REFUSED = {
    "pallas": {
        "BlockDim", "CompilerParams", "Indirect", "enable_debug_checks",
        "enable_poison_buffers", "lower_as_mlir", "pallas_call_p",
        "pallas_export_experimental",
    },
    "pallas.tpu_sc": {"slice_subcore_vmem_from_shared"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "ours"), [("pallas", pl), ("pallas.tpu_sc", plsc)], ids=["pl", "plsc"]
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
