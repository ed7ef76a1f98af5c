"""What the subcores of one SparseCore have in common: a barrier, and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite import tpu_sc as plsc
from pallasite.errors import CheckError, KernelTypeError, UnsupportedError
from tests.language.test_sparse_core import mesh

X = np.arange(64, dtype=np.float32).reshape(2, 4, 8)
MODES = {"emulated": True, "checked": pl.Checked()}


def place():
    return jax.lax.axis_index("core"), jax.lax.axis_index("subcore")


def shifted(wait, width=8):
    """Each subcore's row goes to the next one of its SparseCore."""

    def kernel(x_ref, o_ref, shared, own):
        core, subcore = place()
        pltpu.sync_copy(x_ref.at[core, subcore], shared.at[subcore])
        wait()
        pltpu.sync_copy(shared.at[(subcore + 1) % 4], own)
        pltpu.sync_copy(own, o_ref.at[core, subcore])

    out = jax.ShapeDtypeStruct((2, 4, width), jnp.float32)
    scratch = [pltpu.VMEM_SHARED((4, width), jnp.float32)]
    scratch += [pltpu.VMEM((width,), jnp.float32)]
    return lambda x=X, **how: pl.kernel(
        kernel, out, mesh=mesh(), scratch_shapes=scratch, **how
    )(x)


@pytest.mark.parametrize("mode", MODES)
def test_subcores_meet_and_share_memory(mode):
    call = shifted(plsc.subcore_barrier)
    np.testing.assert_array_equal(call(interpret=MODES[mode]), np.roll(X, -1, axis=1))


def test_without_the_barrier_there_is_a_race():
    with pytest.raises(CheckError, match="data race"):
        shifted(lambda: None)(interpret=pl.Checked())


def test_a_barrier_that_not_all_subcores_reach():
    def some():
        pl.when(place()[1] != 2)(plsc.subcore_barrier)

    with pytest.raises(CheckError, match="waits at a barrier for"):
        shifted(some)(interpret=pl.Checked(races=False))


@pytest.mark.parametrize("met", [plsc.subcore_barrier, plsc.fetch_and_add])
def test_subcores_meet_where_there_are_some(met):
    def kernel(o_ref, count):
        met() if met is plsc.subcore_barrier else met(count, 1, subcore_id=0)

    out = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(KernelTypeError, match="needs a mesh of vector subcores"):
        scratch = [pltpu.SMEM((1,), jnp.int32)]
        pl.pallas_call(kernel, out, interpret=True, scratch_shapes=scratch)()


def counted(lanes=16, **how):
    """Each subcore adds its number plus one to a counter of subcore 1."""

    def kernel(o_ref, count, own):
        core, subcore = place()
        count[0] = 10 * core
        plsc.subcore_barrier()
        plsc.fetch_and_add(count, subcore + 1, subcore_id=1)
        plsc.subcore_barrier()
        own[...] = jnp.full((lanes,), count[0])
        pltpu.sync_copy(own, o_ref.at[core, subcore])

    out = jax.ShapeDtypeStruct((2, 4, lanes), jnp.int32)
    scratch = [pltpu.SMEM((1,), jnp.int32), pltpu.VMEM((lanes,), jnp.int32)]
    return pl.kernel(kernel, out, mesh=mesh(), scratch_shapes=scratch, **how)()


@pytest.mark.parametrize("mode", MODES)
def test_a_subcore_adds_to_the_number_of_another(mode):
    got = counted(interpret=MODES[mode])[:, :, 0]
    np.testing.assert_array_equal(got, [[0, 10, 0, 0], [10, 20, 10, 10]])


@pytest.mark.parametrize("mode", MODES)
def test_vectors_are_seen_as_another_type(mode):
    def kernel(x_ref, o_ref, p_ref):
        o_ref[...] = plsc.bitcast(x_ref[...], jnp.int32)
        p_ref[...] = plsc.bitcast(x_ref[...], jnp.uint16)

    out = [jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((16,), "uint16")]
    x = X[1, 2]
    words, halves = pl.pallas_call(kernel, out, interpret=MODES[mode])(x)
    np.testing.assert_array_equal(words, x.view(np.int32))
    np.testing.assert_array_equal(halves, x.view(np.uint16))


def test_indices_are_their_values():
    numbers = jnp.array([3, 1])
    assert plsc.Indices(numbers) is numbers
    with pytest.raises(UnsupportedError, match="ignored_value"):
        plsc.Indices(numbers, ignored_value=-1)
    assert issubclass(plsc.SparseCorePushStreamWarning, UserWarning)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_core_map_captures_the_refs_of_run_state(jitted):
    """Traced values go into `run_state`, whose refs the kernel captures."""
    x = jnp.arange(6 * 128, dtype=jnp.float32).reshape(6, 128)

    def copied(x):
        def body(refs):
            mesh = pltpu.create_tensorcore_mesh("core", num_cores=1)

            @pl.core_map(mesh, interpret=True)
            def _():
                pltpu.sync_copy(refs[0], refs[1])

        return pl.run_state(body)((x, jnp.zeros_like(x)))[1]

    np.testing.assert_array_equal((jax.jit(copied) if jitted else copied)(x), x)
