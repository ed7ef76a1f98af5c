"""What products are added to: in loops, in refs, scaled row by row."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import target
from pallasite.backends.cpu.tiles.arena import ALIGNMENT
from pallasite.sites import kernels_in
from tests.backends.cpu.running import llvm_of
from tests.backends.cpu.test_dot import numbers
from tests.backends.cpu.test_pack_once import VECTORS

HOSTS = [VECTORS, target.AVX2]


def ran(body: Callable, *arrays: np.ndarray) -> tuple[np.ndarray, str]:
    """The result of a kernel on whole arrays, shaped as the first, and its code."""
    x = arrays[0]

    def call(*args):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, out_shape=shape)(*args)

    (kernel,) = kernels_in(call, *arrays)
    return np.asarray(call(*arrays)), llvm_of(kernel)


def stepped(step: Callable, rounds: int = 3) -> Callable:
    """A kernel that carries its first operand through a loop."""

    def body(y_ref, a_ref, b_ref, o_ref):
        again = lambda n, y: step(y, a_ref[...], b_ref[...])
        o_ref[...] = jax.lax.fori_loop(0, rounds, again, y_ref[...])

    return body


def scaled(y, a, b):
    return y * (1 / (1 + jnp.abs(a).sum(1, keepdims=True))) + a @ b


def scaled_flat(y, a, b):
    return a @ b + (1 / (1 + jnp.abs(a).sum(1)))[:, None] * y


def twice_scaled(y, a, b):
    """The old value is needed after the product."""
    scale = 1 / (1 + jnp.abs(a).sum(1, keepdims=True))
    new = y * scale + a @ b
    return new - 0.5 * y


def multiplied(y, a, b):
    """The old value is an operand of the product, too."""
    return y * 0.5 + y[:, : a.shape[1]] @ b * 0.1


def scaled_by_itself(y, a, b):
    """The factors come from what is scaled."""
    return y * (1 / (1 + jnp.abs(y).max(1, keepdims=True))) + a @ b


STEPS = [scaled, scaled_flat, twice_scaled, multiplied, scaled_by_itself]


@pytest.mark.parametrize("host", HOSTS, ids=["avx512", "avx2"])
@pytest.mark.parametrize("step", STEPS)
def test_sums_carried_through_a_loop(step: Callable, host: target.Host):
    m, n, k = 37, 40, 24
    shapes = [(m, n), (m, k), (k, n)]
    y, a, b = (numbers(i, s, np.float32) for i, s in enumerate(shapes))
    with target.using(host):
        got, code = ran(stepped(step), y, a, b)
    want = y.astype(np.float64)
    for _ in range(3):
        want = np.asarray(step(want, a.astype(np.float64), b.astype(np.float64)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert ("_scaled" in code) == (step not in (twice_scaled, multiplied))


def test_a_plain_sum_is_carried_without_a_copy():
    """As much memory for temporaries as one tile: the carried one."""
    y, a, b = (numbers(i, (64, 64), np.float32) for i in range(3))
    got, code = ran(stepped(lambda y, a, b: y + a @ b), y, a, b)
    np.testing.assert_allclose(got, y + 3 * (a @ b), rtol=1e-4, atol=1e-3)
    assert f"@malloc(i64 {64 * 64 * 4 + ALIGNMENT})" in code


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_sums_in_a_ref_that_are_scaled_first(dtype):
    m, n, k = 50, 48, 32
    shapes = [(m, n), (m, k), (k, n), (m, 1)]
    if dtype == np.int32:
        rng = np.random.default_rng(0)
        y, a, b, s = (rng.integers(-9, 9, shape, dtype) for shape in shapes)
    else:
        y, a, b, s = (numbers(i, shape, dtype) for i, shape in enumerate(shapes))

    def body(y_ref, a_ref, b_ref, s_ref, o_ref):
        o_ref[...] = y_ref[...]

        @pl.loop(0, 2)
        def _(_):
            product = jnp.dot(
                a_ref[...], b_ref[...], preferred_element_type=o_ref.dtype
            )
            o_ref[...] = o_ref[...] * s_ref[...] + product

    got, code = ran(body, y, a, b, s)
    product, s = a.astype(np.float64) @ b, s.astype(np.float64)
    want = (y * s + product) * s + product
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    assert "_scaled" in code


def test_a_part_of_a_ref_is_scaled_by_another_part_of_it():
    y, a, b = (numbers(i, (64, 64), np.float32) for i in range(3))

    def body(y_ref, a_ref, b_ref, o_ref):
        o_ref[...] = y_ref[...]
        product = a_ref[...] @ b_ref[...]
        o_ref[...] = o_ref[...] * o_ref[:, 5:6] + product

    got, _ = ran(body, y, a, b)
    want = y.astype(np.float64) * y[:, 5:6] + a.astype(np.float64) @ b
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("columns", [16, 40, 44, 64, 65])
def test_columns_that_lie_in_wider_rows(columns: int):
    """Read where they are if what is left over is one load; to the last element."""
    a, wide = numbers(1, (30, 33), np.float32), numbers(2, (33, 96), np.float32)
    y = np.zeros((30, columns), np.float32)

    def body(y_ref, a_ref, b_ref, o_ref):
        o_ref[...] = a_ref[...] @ b_ref[:, 96 - columns :]

    with target.using(VECTORS):
        got, code = ran(body, y, a, wide)
    want = a.astype(np.float64) @ wide[:, 96 - columns :]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert ("of96_" in code) == (columns != 44)


def test_factors_of_rows_that_are_not_the_products_rows():
    """Both dimensions of the result are columns of the product."""
    shapes = [(8, 16), (64,), (8, 16, 64)]
    y, a, b = (numbers(i, shape, np.float32) for i, shape in enumerate(shapes))

    def body(y_ref, a_ref, b_ref, o_ref):
        product = jax.lax.dot_general(a_ref[...], b_ref[...], (((0,), (2,)), ((), ())))
        o_ref[...] = y_ref[...]
        o_ref[...] = o_ref[...] * b_ref[:, 0, 0][:, None] + product

    got, _ = ran(body, y, a, b)
    want = y * b[:, 0, :1].astype(np.float64) + np.einsum("k,ijk->ij", a, b)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_value_that_two_carried_tiles_take():
    """It reads one of them, which must not change before the other is stored."""
    y, a, b = (numbers(i, (16, 16), np.float32) for i in range(3))

    def body(y_ref, a_ref, b_ref, o_ref):
        def step(n, carried):
            y, z = carried
            new = y + y + z @ b_ref[...] * 0.1
            return new, new

        first, second = jax.lax.fori_loop(0, 3, step, (y_ref[...], a_ref[...]))
        o_ref[...] = first - 2 * second

    got, _ = ran(body, y, a, b)
    first, second = y.astype(np.float64), a.astype(np.float64)
    for _ in range(3):
        first = second = 2 * first + second @ b * 0.1
    np.testing.assert_allclose(got, first - 2 * second, rtol=1e-4, atol=1e-4)
