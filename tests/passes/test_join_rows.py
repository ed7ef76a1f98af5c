"""Programs of few rows, merged along an axis that moves element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.verify import verify
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.run import run
from pallasite.passes.schedule.join_rows import join_rows
from pallasite.sites import calls_in
from tests.passes.test_same_meaning import outputs

F32, BF16 = jnp.float32, jnp.bfloat16
Shape = jax.ShapeDtypeStruct


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=F32)


def rows_of_images(side=6, width=8, dtype=F32, kernel=None, images=2):
    """A program makes one row of an image from two rows of another."""

    def convolve(a_ref, b_ref, w_ref, s_ref, o_ref):
        acc = jnp.zeros(o_ref.shape, F32)
        for n, ref in enumerate((a_ref, b_ref)):
            acc += dot(ref[pl.ds(n, side), :], w_ref[n])
        acc = jnp.maximum(acc * 0.5 + s_ref[...], 0)
        o_ref[...] = (acc / jnp.sum(acc, 1, keepdims=True)).astype(o_ref.dtype)

    row = lambda d: pl.BlockSpec(
        (None, None, side + 1, width), lambda i, y: (i, y + d, 0, 0)
    )
    shapes = [(images, 7, side + 1, width)] * 2 + [(2, width, width), (1, width)]
    weights = pl.BlockSpec(shapes[2], lambda i, y: (0, 0, 0))
    specs = [row(0), row(1), weights, pl.BlockSpec(shapes[3], lambda i, y: (0, 0))]
    out = pl.BlockSpec((None, None, side, width), lambda i, y: (i, y, 0, 0))
    call = pl.pallas_call(
        kernel or convolve,
        Shape((images, 6, side, width), dtype),
        grid=(images, 6),
        in_specs=specs,
        out_specs=out,
    )
    structs = [Shape(s, dtype) for s in shapes]
    (found,) = calls_in(call, *structs)
    return run(found.kernel)


@pytest.mark.parametrize("factor", [2, 3, 6])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_of_several_programs_are_one_tile(factor, dtype):
    kernel = rows_of_images(dtype=dtype)
    new = join_rows(kernel, 1, factor)
    verify(new)
    assert f"grid=(2, {6 // factor})" in new.text
    assert f"f32[{6 * factor},8] = dot" in new.text
    random = np.random.default_rng(0)
    arrays = [
        np.abs(random.standard_normal(ref.ref.shape)).astype(
            BF16 if dtype == BF16 else np.float32
        )
        for ref in kernel.inputs
    ]
    for want, got in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        np.testing.assert_allclose(
            got.astype(np.float32), want.astype(np.float32), rtol=1e-2, atol=1e-6
        )


def numbered(a_ref, b_ref, w_ref, s_ref, o_ref):
    o_ref[...] = dot(a_ref[:6], w_ref[0]) + pl.program_id(1)


def added_up(a_ref, b_ref, w_ref, s_ref, o_ref):
    x = dot(a_ref[:6], w_ref[0])
    o_ref[...] = x - jnp.sum(x, 0, keepdims=True)


def other_weights(a_ref, b_ref, w_ref, s_ref, o_ref):
    o_ref[...] = dot(w_ref[0, :6], jnp.concatenate([a_ref[...], b_ref[:1]]))


@pytest.mark.parametrize(
    ("kernel", "axis", "why"),
    [
        (numbered, 1, "depends on its number"),
        (added_up, 1, "rows are added up"),
        (other_weights, 1, "not the same for each row|another right operand"),
        (None, 0, "apart in memory"),
    ],
)
def test_what_is_not_the_same_for_each_row_stays(kernel, axis, why):
    with pytest.raises(CannotReblock, match=why):
        join_rows(rows_of_images(kernel=kernel), axis, 2)


@pytest.mark.parametrize("factor", [2, 4])
def test_each_step_names_its_elements_differently(factor):
    """Reshapes and transposes; rows of the result are apart in memory."""

    def kernel(x_ref, w_ref, o_ref):
        x = x_ref[...].reshape(3, 5, 2).transpose(1, 0, 2).reshape(5, 6)
        o_ref[...] = dot(x, w_ref[...]).T.reshape(7, 5).T

    call = pl.pallas_call(
        kernel,
        Shape((4, 2, 5, 7), F32),
        grid=(4, 2),
        in_specs=[
            pl.BlockSpec((None, 3, 10), lambda i, j: (i, j, 0)),
            pl.BlockSpec((6, 7), lambda i, j: (0, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, 5, 7), lambda i, j: (i, j, 0, 0)),
    )
    (found,) = calls_in(call, Shape((4, 6, 10), F32), Shape((6, 7), F32))
    before = run(found.kernel)
    with pytest.raises(CannotReblock, match="apart in memory"):
        join_rows(before, 0, factor)
    after = join_rows(before, 0, factor, apart=True)
    verify(after)
    assert (
        f"grid=({4 // factor}, 2)" in after.text and f"[{5 * factor},6]" in after.text
    )
    random = np.random.default_rng(3)
    arrays = [random.integers(-5, 5, p.ref.shape).astype("f4") for p in before.inputs]
    for want, got in zip(outputs(before, arrays), outputs(after, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def rows_around(kernel=None, padding=(1, 1), first=0):
    """A program makes a row from three rows around it, of which some are beyond."""
    height, side, width = 6, 4, 8

    def convolve(x_ref, w_ref, o_ref):
        acc = jnp.zeros(o_ref.shape, F32)
        for n in range(3):
            acc += dot(x_ref[n, n : n + side], w_ref[n])
        o_ref[...] = acc

    around = (pl.Element(3, padding), pl.Element(side + 2), pl.Element(width))
    call = pl.pallas_call(
        kernel or convolve,
        out_shape=Shape((height, side, width), F32),
        grid=(height,),
        in_specs=[
            pl.BlockSpec(around, lambda y: (y + first, 0, 0), fill=0),
            pl.BlockSpec((3, width, width), lambda y: (0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, side, width), lambda y: (y, 0, 0)),
    )
    shapes = Shape((height, side + 2, width), F32), Shape((3, width, width), F32)
    (found,) = calls_in(call, *shapes)
    return run(found.kernel)


@pytest.mark.parametrize("factor", [2, 3])
def test_each_row_is_made_from_rows_around_it(factor):
    kernel = rows_around()
    new = join_rows(kernel, 0, factor)
    verify(new)
    assert f"in[element {factor + 2} pad (1, 1)" in new.text
    assert f"f32[{4 * factor},8] = dot" in new.text
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(r.ref.shape).astype("f") for r in kernel.inputs]
    for want, got in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def whole_rows(x_ref, w_ref, o_ref):
    rows = x_ref[...].reshape(18, 8)
    o_ref[...] = dot(rows, w_ref[0])[4:8]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"kernel": whole_rows}, "several of the rows|not the same for each row"),
        ({"first": 1}, "not made of whole rows"),  # the last window is clamped
        ({"padding": (1, 0)}, "not made of whole rows"),
    ],
)
def test_rows_around_that_stay(how, why):
    with pytest.raises(CannotReblock, match=why):
        join_rows(rows_around(**how), 0, 2)
