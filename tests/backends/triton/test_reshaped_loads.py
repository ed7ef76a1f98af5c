"""Loads and stores in the shape that a reshape gives, where that would move padding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.backends.triton.reshaped_loads import reshaped_loads
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.verify import verify
from pallasite.passes.run import run
from pallasite.passes.schedule.gpu_blocks import for_gpu
from pallasite.sites import kernels_in
from pallasite.target import GPUS
from tests.backends.triton.harness import simulated
from tests.fuzz.agreement import run_numpy
from tests.ops.sampling import evaluate

F32, BF16 = jnp.float32, jnp.bfloat16
Shape = jax.ShapeDtypeStruct


def called(kernel, shapes, out, **grid: Any) -> Kernel:
    (found,) = kernels_in(pl.pallas_call(kernel, out, **grid), *shapes)
    return run(found)


def reshapes(kernel: Kernel) -> int:
    return sum(op.name in ("reshape", "transpose") for op in walk(kernel.body))


def numbers(kernel: Kernel) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    types = [p.ref for p in kernel.inputs]
    return [rng.integers(-9, 9, t.shape).astype(t.dtype.np) for t in types]


def assert_same(kernel: Kernel, left: int = 0) -> Kernel:
    after = reshaped_loads(kernel)
    verify(after)
    assert reshapes(kernel) > reshapes(after) == left
    arrays = numbers(kernel)
    want = run_numpy(kernel, arrays)
    for got, one in zip(run_numpy(after, arrays), want, strict=True):
        np.testing.assert_array_equal(got.astype("f4"), one.astype("f4"))
    for got, one in zip(simulated(kernel, arrays), want, strict=True):
        np.testing.assert_array_equal(got.astype("f4"), one.astype("f4"))
    return after


@pytest.mark.parametrize("dtype", [F32, BF16, jnp.int32], ids=str)
@pytest.mark.parametrize(
    ("shape", "used"),
    [((3, 5, 24), (15, 24)), ((15, 24), (3, 5, 24)), ((3, 40), (15, 8)),
     ((2, 1, 5, 16), (10, 16)), ((6, 40), (2, 3, 5, 8))],
)  # fmt: skip
def test_loads_and_stores_have_the_shape_that_is_used(shape, used, dtype):
    def kernel(x_ref, y_ref, o_ref):
        x = x_ref[...].reshape(used)
        o_ref[...] = (x * x + y_ref[...]).reshape(shape)

    shapes = [Shape(shape, dtype), Shape(used, dtype)]
    assert_same(called(kernel, shapes, Shape(shape, dtype)))


@pytest.mark.parametrize("stride", [1, 2])
def test_spans_from_computed_rows_on(stride: int):
    """The last are clamped, as a whole."""

    def kernel(x_ref, o_ref):
        rows = pl.ds(3 * pl.program_id(0), 3, stride=stride)
        x = x_ref[rows, pl.ds(1, 5), :].reshape(15, 8)
        o_ref[...] = x * jax.lax.broadcasted_iota(F32, (15, 8), 0)

    assert_same(
        called(
            kernel,
            [Shape((8, 7, 8), F32)],
            Shape((45, 8), F32),
            grid=(3,),
            in_specs=[pl.BlockSpec((8, 7, 8), lambda i: (0, 0, 0))],
            out_specs=pl.BlockSpec((15, 8), lambda i: (i, 0)),
        )
    )


def test_a_transpose_of_one_row_is_a_reshape():
    def kernel(x_ref, o_ref):
        x = x_ref[...].reshape(3, 1, 5, 8).transpose(0, 2, 1, 3).reshape(15, 8)
        o_ref[...] = x + x

    assert_same(called(kernel, [Shape((3, 1, 40), F32)], Shape((15, 8), F32)))


@pytest.mark.parametrize(
    ("shape", "used"), [((3, 4, 8), (12, 8)), ((4, 9), (12, 3)), ((15, 2), (3, 10))]
)
def test_what_keeps_padding_or_has_short_rows_stays(shape, used):
    def kernel(x_ref, o_ref):
        x = x_ref[...].reshape(used)
        o_ref[...] = x * jax.lax.broadcasted_iota(F32, used, 0)

    found = called(kernel, [Shape(shape, F32)], Shape(used, F32))
    assert reshaped_loads(found) is found


def patches(images=8, n=6, size=4, channels=3, columns=32, dtype=F32) -> Kernel:
    """Patches of an image as rows of a matrix; a program has a row of patches."""

    def kernel(x_ref, w_ref, o_ref):
        x = x_ref[0].reshape(size, n, size * channels)
        x = x.transpose(1, 0, 2).reshape(n, size * size * channels)
        y = jnp.dot(x, w_ref[...], preferred_element_type=F32)
        o_ref[0, 0] = y.astype(o_ref.dtype)

    width, depth = n * size * channels, size * size * channels
    return called(
        kernel,
        [Shape((images, n * size, width), dtype), Shape((depth, columns), dtype)],
        Shape((images, n, n, columns), dtype),
        grid=(images, n),
        in_specs=[
            pl.BlockSpec((1, size, width), lambda b, i: (b, i, 0)),
            pl.BlockSpec((depth, columns), lambda b, i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((1, 1, n, columns), lambda b, i: (b, i, 0, 0)),
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("images, n", [(8, 6), (6, 5)])
def test_patches_of_an_image(images: int, n: int, dtype):
    kernel = patches(images, n, dtype=dtype)
    arrays = numbers(kernel)
    for got, want in zip(
        simulated(kernel, arrays), evaluate(kernel, arrays), strict=True
    ):
        np.testing.assert_allclose(got.astype("f4"), want.astype("f4"), rtol=1e-2)


def test_programs_of_few_patches_are_merged():
    """Each would load all weights for 14 rows of a product."""
    kernel = patches(images=64, n=14, size=16, columns=1024, dtype=BF16)
    after = for_gpu(kernel, GPUS["h200"])
    verify(after)
    dots = [op for op in walk(after.body) if op.name == "dot"]
    assert all(op.result.tile.shape[0] >= 7 * 14 for op in dots)
