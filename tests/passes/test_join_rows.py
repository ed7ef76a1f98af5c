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
