"""GPU kernels that access other devices of a mesh: values, gradients and refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import KernelTypeError, SpecError

F32, P = jnp.float32, jax.sharding.PartitionSpec
REGULAR = plgpu.SemaphoreType.REGULAR
SIZE, SHAPE = 4, (8, 32)
ALONG = P("x")


def over(function: Any, *specs: Any, out: Any = ALONG, sizes=(SIZE,), names=("x",)):
    count = int(np.prod(sizes))
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), names)
    options: Any = dict(mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return jax.jit(jax.shard_map(function, **options))


def operand(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def leave(done: Any, axis: str = "x", size: int = SIZE) -> None:
    plgpu.semaphore_signal_multicast(done, collective_axes=axis)
    pl.semaphore_wait(done, size)


def gathered(x, size=SIZE):
    def kernel(x, o, done):
        me, rows = lax.axis_index("x"), x.shape[0]
        plgpu.multimem_store(x[...], o.at[pl.ds(me * rows, rows)], "x")
        leave(done, size=size)

    out = jax.ShapeDtypeStruct((size * x.shape[0], *x.shape[1:]), x.dtype)
    return plgpu.kernel(kernel, out, scratch_shapes=[REGULAR])(x)


def scattered(x, size=SIZE):
    def kernel(x, o, done):
        me, rows = lax.axis_index("x"), o.shape[0]
        part = x.at[pl.ds(me * rows, rows)]
        o[...] = plgpu.multimem_load_reduce(
            part, collective_axes="x", reduction_op="add"
        )
        leave(done, size=size)

    out = jax.ShapeDtypeStruct((x.shape[0] // size, *x.shape[1:]), x.dtype)
    return plgpu.kernel(kernel, out, scratch_shapes=[REGULAR])(x)


@jax.custom_vjp
def gather(x):
    return gathered(x)


gather.defvjp(lambda x: (gathered(x), None), lambda _, g: (scattered(g),))


def test_a_gather_and_its_gradient():
    x, w = operand(SIZE * 8, 32), operand(SIZE * 8, 32)

    def loss(f, x, w):
        return jnp.sum(jnp.sin(f(x)) * w)

    def both(f):
        grad = lambda x, w: (f(x), jax.grad(lambda x: loss(f, x, w))(x))
        return over(grad, P("x"), P(), out=(P("x"), P("x")))(x, w)

    theirs = lambda x: lax.all_gather(x, "x", tiled=True)
    for got, want in zip(both(gather), both(theirs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_engine_copies_to_all_devices():
    def kernel(x, o, buffer, done):
        me = lax.axis_index("x")
        buffer[...] = x[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, plgpu.multicast_ref(o, "x").at[me])
        plgpu.wait_smem_to_gmem(0)
        leave(done)

    x = operand(SIZE * 8, 32)
    scratch = [plgpu.SMEM(SHAPE, F32), REGULAR]
    out = jax.ShapeDtypeStruct((SIZE, *SHAPE), F32)
    got = over(plgpu.kernel(kernel, out, scratch_shapes=scratch), P("x"))(x)
    np.testing.assert_array_equal(got, np.tile(2 * x.reshape(SIZE, *SHAPE), (4, 1, 1)))


@pytest.mark.parametrize("axis", ("x", "y"))
def test_an_axis_of_a_mesh_is_named(axis):
    def kernel(x, o, come):
        other = {axis: 1 - lax.axis_index(axis)}
        plgpu.remote_ref(o, other)[...] = x[...]
        pl.semaphore_signal(come, device_id=other)
        pl.semaphore_wait(come)

    x = operand(2, 2, *SHAPE)
    out = jax.ShapeDtypeStruct((1, 1, *SHAPE), F32)
    spec = P("x", "y")
    mesh: Any = dict(out=spec, sizes=(2, 2), names=("x", "y"))
    call = plgpu.kernel(kernel, out, scratch_shapes=[REGULAR])
    got = over(call, spec, **mesh)(x)
    np.testing.assert_array_equal(got, x[::-1] if axis == "x" else x[:, ::-1])


@pytest.mark.parametrize("name", ("add", "min", "max", "and", "or", "xor"))
def test_integers_are_reduced(name):
    def kernel(x, o, done):
        more: Any = dict(collective_axes="x", reduction_op=name)
        o[...] = plgpu.multimem_load_reduce(x, **more)
        leave(done)

    x = np.random.default_rng(0).integers(-99, 99, size=(SIZE, 128)).astype(np.int32)
    call = plgpu.kernel(kernel, jnp.asarray(x[:1]), scratch_shapes=[REGULAR])
    named = dict(add="add", min="minimum", max="maximum", xor="bitwise_xor")
    ufunc = getattr(np, named.get(name, f"bitwise_{name}"))
    got = over(call, P("x"))(x)
    np.testing.assert_array_equal(got, np.tile(ufunc.reduce(x, axis=0), (SIZE, 1)))


def test_small_floats_are_added_in_float32():
    x = operand(SIZE * SIZE, 64).astype(jnp.bfloat16)
    got = over(scattered, P("x"))(x)
    parts = np.asarray(x, np.float32).reshape(SIZE, SIZE, 64)
    want = sum_in_order(parts).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(got), want)


def sum_in_order(parts: np.ndarray) -> np.ndarray:
    """In the order of the devices."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda x: plgpu.multicast_ref(x, "x")[...], KernelTypeError,
         "a multicast ref is only for copy_smem_to_gmem"),
        (lambda x: plgpu.remote_ref(plgpu.multicast_ref(x, "x"), 0), KernelTypeError,
         "on several devices already"),
        (lambda x: plgpu.multicast_ref(plgpu.remote_ref(x, 0), "x"), KernelTypeError,
         "on another device already"),
        (lambda x: plgpu.remote_ref(x[...], 0), KernelTypeError, "needs a ref"),
        (lambda x: plgpu.multicast_ref(x, "z"), SpecError, "'z' is not an axis"),
        (lambda x: plgpu.multimem_load_reduce(x, collective_axes="x",
                                              reduction_op="max"),
         SpecError, "no chip has 'max' of float32"),
        (lambda x: plgpu.multimem_load_reduce(x, collective_axes="x",
                                              reduction_op="xor"),
         SpecError, "'xor' is for integers"),
    ],
)  # fmt: skip
def test_refusals_say_what_is_wrong(call, error, says):
    def kernel(x, o):
        call(x)
        o[...] = x[...]

    x = operand(SIZE * 8, 32)
    with pytest.raises(error, match=says):
        over(lambda x: plgpu.kernel(kernel, x)(x), P("x"))(x)
