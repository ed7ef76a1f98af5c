"""Every name of upstream's `pltpu` is here, or refused by name: none is missing."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import KernelTypeError, SpecError, UnsupportedError
from pallasite.missing import Missing

REFUSED = {"core", "dma_semaphore", "matmul_lhs_fifo", "matmul_pop_fifo"}


def upstream_names() -> set[str]:
    module = importlib.import_module("jax.experimental.pallas.tpu")
    return {name for name in dir(module) if not name.startswith("_")}


def test_no_name_is_missing():
    names = upstream_names()
    assert not {name for name in names if not hasattr(pltpu, name)}
    refused = {n for n in names if isinstance(getattr(pltpu, n), Missing)}
    assert refused == REFUSED & names


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_name_says_what_to_do_instead(name):
    with pytest.raises(UnsupportedError, match=f"pallasite.tpu.{name}") as raised:
        getattr(pltpu, name)()
    assert "fix" in str(raised.value)


def test_fields_of_upstream_settings_are_here():
    module = importlib.import_module("jax.experimental.pallas.tpu")
    for name in ("InterpretParams", "CompilerParams"):
        theirs = set(getattr(module, name).__dataclass_fields__)
        ours = set(getattr(pltpu, name).__dataclass_fields__)
        assert not theirs - ours, (name, theirs - ours)


# --- copies and pipelines ---

ROW = pl.BlockSpec((1, 128), lambda i, j: (i, j))
ROWS = np.arange(6 * 256, dtype=np.float32).reshape(6, 256)
HBM = pl.BlockSpec(memory_space=pltpu.HBM)
MODES = pytest.mark.parametrize("mode", [False, True, pl.Checked()])


@MODES
def test_a_copy_whose_reader_alone_is_waited_for(mode):
    def kernel(x_ref, o_ref, sem):
        copy = pltpu.async_copy(x_ref, o_ref, src_sem=sem)
        copy.wait_read()

    got = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype),
        in_specs=[HBM],
        out_specs=HBM,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        interpret=mode,
    )(ROWS)
    np.testing.assert_array_equal(got, ROWS)


@pytest.mark.parametrize("names, word", [((), "none"), (("sem", "src_sem"), "both")])
def test_a_copy_has_one_semaphore(names, word):
    def kernel(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, **dict.fromkeys(names, sem))

    with pytest.raises(KernelTypeError, match=f"one semaphore, got {word}"):
        pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        )(ROWS)


@MODES
def test_a_step_knows_how_many_its_core_has_run(mode):
    """Of rows 0 to 5, the first core runs 0 to 2; each counts from zero."""
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)

    @pl.kernel(out_type=jax.ShapeDtypeStruct((6, 256), jnp.float32), mesh=mesh,
               interpret=mode)  # fmt: skip
    def kernel(o_ref):
        def body(step, o_ref):
            assert isinstance(step, pltpu.PipelineStep) and len(step.index) == 2
            number = 100 * step.index[0] + 10 * step.index[1] + step.local_index
            o_ref[...] = jnp.full(o_ref.shape, number, jnp.float32)

        pltpu.emit_pipeline(
            body,
            grid=(6, 2),
            out_specs=[ROW],
            core_axis_name="core",
            dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
            _explicit_indices=True,
        )(o_ref)

    got = np.asarray(kernel())[:, ::128]
    expected = [[100 * i + 10 * j + (i % 3) * 2 + j for j in (0, 1)] for i in range(6)]
    np.testing.assert_array_equal(got, expected)


@MODES
def test_a_pipeline_fetches_what_another_kernel_might_have_prefetched(mode):
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)

    def body(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    pipeline, prefetch = pltpu.emit_pipeline_with_async_prefetch(
        body, grid=(6, 2), in_specs=[ROW], out_specs=[ROW], mesh=mesh
    )

    @pl.kernel(out_type=jax.ShapeDtypeStruct((6, 256), jnp.float32), mesh=mesh,
               interpret=mode)  # fmt: skip
    def kernel(allocations, x_ref, o_ref):
        pipeline(x_ref, o_ref, allocations=allocations)

    np.testing.assert_array_equal(kernel(prefetch(ROWS), ROWS), 2 * ROWS)


def test_a_buffered_ref_keeps_what_it_was_told():
    spec = pl.BlockSpec((2, 128), lambda i: (i, 0))
    made = pltpu.BufferedRef.input(spec, jnp.float32, prefetched_count=1)
    assert (made.prefetched_count, made.await_prefetch) == (1, False)
    assert not made.output_wait_read_only


# --- bits as another type ---


@pytest.mark.parametrize("mode", [True, False, pl.Checked()])
def test_bits_as_another_type_along_either_dimension(mode):
    x = np.random.default_rng(0).integers(-9, 9, (8, 6), dtype=np.int32)

    def kernel(x_ref, o_ref, rows_ref):
        narrow = pltpu.bitcast(x_ref[...], jnp.int16, dim=-1)
        o_ref[...] = pltpu.bitcast(narrow, jnp.int32, 1) + 1
        rows_ref[...] = narrow

    types = [jax.ShapeDtypeStruct(x.shape, jnp.int32)]
    types += [jax.ShapeDtypeStruct((8, 12), jnp.int16)]
    got, narrow = pl.pallas_call(kernel, types, interpret=mode)(x)
    np.testing.assert_array_equal(got, x + 1)
    np.testing.assert_array_equal(narrow, x.view(np.int16))


def test_bits_that_do_not_fit():
    with pytest.raises(SpecError, match="cannot resize dimension 0"):
        pltpu.bitcast(jnp.ones((2, 4, 4)), jnp.int16, 0)
    with pytest.raises(SpecError, match="cannot resize dimension -2"):
        pltpu.bitcast(jnp.ones(4), jnp.int16)
    with pytest.raises(SpecError, match="3 elements of int16 are no whole number"):
        pltpu.bitcast(jnp.ones((4, 3), jnp.int16), jnp.int32, -1)


# --- bytes made of two and four bits ---


@pytest.mark.parametrize("mode", [True, pl.Checked()], ids=["emulated", "checked"])
def test_bytes_are_split_and_joined_again(mode):
    def kernel(x_ref, o_ref):
        two, four = pltpu.pack_fp6(x_ref[...])
        o_ref[0] = pltpu.unpack_fp6(two, four)
        o_ref[1] = pltpu.join_bits(four_bits=four)
        low, high = pltpu.split_bits(x_ref[...], (2, 4))
        o_ref[2] = pltpu.join_bits(two_bits=low)
        o_ref[3] = high.astype(jnp.int8)

    x = np.arange(-128, 128).astype(np.int8)
    out = jax.ShapeDtypeStruct((4, 256), jnp.int8)
    got = np.asarray(pl.pallas_call(kernel, out, interpret=mode)(x))
    np.testing.assert_array_equal(got[0], x & 63)
    np.testing.assert_array_equal(got[1], x & 15)
    np.testing.assert_array_equal(got[2], x & 3)
    four = (x >> 2) & 15
    np.testing.assert_array_equal(got[3], np.where(four > 7, four - 16, four))


def test_only_bytes_are_split():
    with pytest.raises(KernelTypeError, match="needs an 8-bit dtype"):
        pltpu.split_bits(jnp.zeros(4, jnp.int32), (4,))
    with pytest.raises(KernelTypeError, match="8 in all"):
        pltpu.split_bits(jnp.zeros(4, jnp.int8), (4, 4, 2))
    with pytest.raises(KernelTypeError, match="at least one"):
        pltpu.join_bits()


def test_a_ref_anywhere_is_in_main_memory():
    def kernel(x_ref, o_ref):
        @pl.when(pltpu.has_memory_space(x_ref, pltpu.HBM))
        def _():
            pltpu.sync_copy(x_ref, o_ref)

    x = jnp.arange(8.0)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(kernel, x, in_specs=[anywhere], interpret=True)
    np.testing.assert_array_equal(call(x), x)


def test_side_effects_are_those_of_upstream():
    assert not pltpu.SideEffectType.PURE
    assert pltpu.SideEffectType.SIDE_EFFECTING
