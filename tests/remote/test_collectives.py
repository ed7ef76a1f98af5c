"""Collectives made of copies between devices give what XLA's collectives give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import KernelTypeError, UnsupportedError
from tests.remote import collectives
from tests.remote.collectives import ANYWHERE, DMA, REGULAR, over_mesh

SIZES = (4, 8)
S = jax.ShapeDtypeStruct
MODES = {"emulated": True, "checked": pl.Checked(orders=("early", "late", 0))}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def rows_of(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("size", SIZES)
@each_mode
def test_all_gather(size, mode):
    x = rows_of(size, 2, 8)
    got = over_mesh(collectives.all_gather, size, interpret=mode)(x)
    np.testing.assert_array_equal(got, np.broadcast_to(x, (size, *x.shape)))


@pytest.mark.parametrize("size", SIZES)
@each_mode
def test_reduce_scatter(size, mode):
    x = rows_of(size, size, 2, 8)
    got = over_mesh(collectives.reduce_scatter, size, interpret=mode)(x)
    np.testing.assert_array_equal(got, x.sum(0))


@pytest.mark.parametrize("size", SIZES)
@each_mode
def test_all_to_all(size, mode):
    x = rows_of(size, size, 2, 8)
    got = over_mesh(collectives.all_to_all, size, interpret=mode)(x)
    np.testing.assert_array_equal(got, x.swapaxes(0, 1))


@pytest.mark.parametrize("size", SIZES)
@each_mode
def test_gathered_matmul(size, mode):
    x, w = rows_of(size, 2, 8), rows_of(size, 8, 4) / 100
    got = over_mesh(collectives.gathered_matmul, size, interpret=mode)(x, w)
    np.testing.assert_allclose(got, np.einsum("nrk,dkc->dnrc", x, w), rtol=1e-5)


# --- how devices are named ---


def shifted(device_id, mesh, **call):
    """Each device's block goes to the one that `device_id()` names."""

    def kernel(x_ref, o_ref, send_sem, recv_sem):
        copy = pltpu.async_remote_copy(x_ref, o_ref, send_sem, recv_sem, **device_id())
        copy.wait_send()
        copy.wait_recv()

    def each(x):
        return pl.pallas_call(
            kernel,
            S(x.shape, x.dtype),
            in_specs=[ANYWHERE],
            out_specs=ANYWHERE,
            scratch_shapes=[DMA, DMA],
            interpret=True,
        )(x)

    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec))


def mesh_2x4():
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(auto, auto))


def next_of(axis: str):
    return lax.rem(lax.axis_index(axis) + 1, lax.axis_size(axis))


LOGICAL = pltpu.DeviceIdType.LOGICAL
NAMES = {
    "coordinates": lambda: dict(device_id=(lax.axis_index("x"), next_of("y"))),
    "one_axis": lambda: dict(device_id={"y": next_of("y")}),
    "two_axes": lambda: dict(
        device_id={("x", "y"): 4 * lax.axis_index("x") + next_of("y")}
    ),
    "number": lambda: dict(
        device_id=4 * lax.axis_index("x") + next_of("y"), device_id_type=LOGICAL
    ),
}


@pytest.mark.parametrize("device_id", NAMES.values(), ids=NAMES)
def test_a_device_is_named_by_coordinates_axes_or_number(device_id):
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    got = shifted(device_id, mesh_2x4())(x)
    np.testing.assert_array_equal(got.reshape(2, 4), np.roll(x.reshape(2, 4), 1, 1))


@pytest.mark.parametrize(
    ("device_id", "problem"),
    [
        (lambda: dict(device_id=(0,)), "1 coordinates for a mesh of 2 axes"),
        (lambda: dict(device_id={"z": 0}), "there is no mesh axis 'z'"),
        (
            lambda: dict(device_id=(0, 1), device_id_type=LOGICAL),
            "a LOGICAL device_id must be one number",
        ),
    ],
)
def test_a_device_id_that_names_nothing_is_refused(device_id, problem):
    with pytest.raises(KernelTypeError, match=problem):
        shifted(device_id, mesh_2x4())(np.zeros((8, 1), np.float32))


def test_a_copy_to_a_core_of_another_device_is_refused():
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=2)

    def kernel(x_ref, o_ref, sem):
        pltpu.make_async_remote_copy(x_ref, o_ref, sem, sem, device_id={"core": 1})

    with pytest.raises(UnsupportedError, match="memory of another core"):
        pl.kernel(kernel, S((2,), jnp.float32), mesh=mesh, scratch_shapes=[DMA])(
            jnp.zeros(2)
        )


# --- semaphores ---


def test_one_device_copies_and_signals_to_itself():
    def kernel(x_ref, o_ref, sems, regular):
        copy = pltpu.make_async_remote_copy(
            x_ref, o_ref, sems.at[0], sems.at[1], 0, LOGICAL
        )
        copy.start()
        copy.wait()
        pl.semaphore_signal(regular, 2, device_id=0, device_id_type=LOGICAL)
        pl.semaphore_wait(regular, 2, decrement=False)
        pl.semaphore_wait(regular, 2)

    x = jnp.arange(8.0)
    call = pl.pallas_call(
        kernel,
        S((8,), jnp.float32),
        in_specs=[ANYWHERE],
        out_specs=ANYWHERE,
        scratch_shapes=[DMA((2,)), REGULAR],
        interpret=True,
    )
    np.testing.assert_array_equal(call(x), x)
    np.testing.assert_array_equal(jax.jit(call)(x), x)


@pytest.mark.parametrize("mode", [True, pl.Checked()], ids=["emulated", "checked"])
def test_cores_wait_for_each_other(mode):
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=2)

    def kernel(x_ref, o_ref, shared_ref, semaphore):
        core = lax.axis_index("core")
        shared_ref[core] = x_ref[core]
        pltpu.core_barrier(semaphore, core_axis_name="core")
        o_ref[core] = shared_ref[1 - core]

    x = jnp.arange(2.0)
    out = S((2,), jnp.float32)
    call = pl.kernel(
        kernel, [out, out], mesh=mesh, scratch_shapes=[REGULAR], interpret=mode
    )
    np.testing.assert_array_equal(call(x)[0], x[::-1])
