"""Parts of a cotangent that unrolled code adds to apart are an axis of the grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite.autodiff import backward
from pallasite.autodiff.explain_grad import chosen_plan
from pallasite.sites import calls_in
from pallasite.target import chip
from tests.xla import pull_back

F32, BF16 = jnp.float32, jnp.bfloat16
WIDTH = 64  # nine of its squares are more than a program's registers hold


def convolved(x, w, taps, scale=None):
    """The sum of `x[dy + side, dx + side] @ w[place]` over `(place, (dy, dx))`."""
    n, height, *_ = x.shape
    side = height - 2

    def kernel(x_ref, w_ref, o_ref):
        total = jnp.zeros((side * side, w.shape[-1]), F32)
        for place, (dy, dx) in taps:
            part = x_ref[dy : dy + side, dx : dx + side, :]
            part = part.reshape(side * side, -1)
            total += jnp.dot(part, w_ref[place], preferred_element_type=F32)
        total = total if scale is None else scale(total)
        o_ref[...] = total.reshape(o_ref.shape).astype(o_ref.dtype)

    shape = (n, side, side, w.shape[-1])
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        grid=(n,),
        in_specs=[
            pl.BlockSpec((None, *x.shape[1:]), lambda i: (i, 0, 0, 0)),
            pl.BlockSpec(w.shape, lambda i: (0,) * w.ndim),
        ],
        out_specs=pl.BlockSpec((None, *shape[1:]), lambda i: (i, 0, 0, 0)),
    )(x, w)


def reference(x, w, taps, scale=None):
    side = x.shape[1] - 2
    total = jnp.zeros((*x.shape[:1], side, side, w.shape[-1]), F32)
    for place, (dy, dx) in taps:
        part = x[:, dy : dy + side, dx : dx + side].astype(F32)
        total += part @ w[place].astype(F32)
    return (total if scale is None else scale(total)).astype(x.dtype)


TAPS = [((y, x), (y, x)) for y, x in np.ndindex(3, 3)]
SQUARES = (3, 3, WIDTH, WIDTH)
ROWS = lambda n: slice(n * WIDTH, (n + 1) * WIDTH)
# What programs add to, and how often there is a matmul in their code.
FORMS = {
    "places": (TAPS, SQUARES, (3, 3)),
    "backwards": ([((2 - y, x), at) for (y, x), at in TAPS], SQUARES, (3, 3)),
    "turned": ([((x, y), p) for (y, x), p in TAPS], SQUARES, (3, 3)),
    "one dimension": ([(n, (0, n)) for n in range(3)], (3, 128, 128), (3,)),
    "rows": ([(ROWS(n), (n % 3, 0)) for n in range(3)], (3 * WIDTH, 256), (3,)),
    "one row of images": ([((0, n), (1, n)) for n in range(3)], (1, 3, 128, 128), (3,)),
    # These stay: places are not linear, or not all there, or there twice.
    "another order": ([(n, (0, (0, 2, 1)[n])) for n in range(3)], (3, 128, 128), ()),
    "a place without": (TAPS[:8], SQUARES, ()),
    "a place twice": ([*TAPS, ((0, 0), (1, 1))], SQUARES, ()),
    "one place": ([((0, 0), (0, n)) for n in range(3)], SQUARES, ()),
    "small": (TAPS, (3, 3, WIDTH, 8), ()),
}  # fmt: skip


def arrays(shape, images=2, side=4, dtype=F32):
    rng = np.random.default_rng(0)
    depth = shape[-2] if len(shape) > 2 else WIDTH
    x = rng.normal(size=(images, side + 2, side + 2, depth))
    w = rng.normal(size=shape)
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def kernel_of_w(run, x, w):
    with config.override(target="gpu:h200"):
        (call,) = calls_in(run, x, w)
        steps = chosen_plan(call.kernel).steps
    return [s.kernel for s in steps if any(r.name == "d_w_ref" for r in s.results)]


@pytest.mark.parametrize("name", FORMS)
def test_places_are_axes(name):
    taps, shape, axes = FORMS[name]
    x, w = arrays(shape)
    (kernel,) = kernel_of_w(lambda x, w: convolved(x, w, taps), x, w)
    products = len({at for _, at in taps})  # one for two places it is added to
    assert kernel.text.count("= dot") == (1 if axes else products)
    grid = ", ".join(map(str, axes))
    assert f"grid=({grid}" in kernel.text


@pytest.mark.parametrize(
    ("name", "dtype"), [("places", BF16), *((name, F32) for name in FORMS)]
)
def test_gradients(name, dtype, monkeypatch):
    monkeypatch.setattr(backward, "chip_for", lambda backend: chip("h200"))
    taps, shape, _ = FORMS[name]
    x, w = arrays(shape, dtype=dtype)
    rng = np.random.default_rng(1)
    seed = jnp.asarray(rng.normal(size=(*x.shape[:1], 4, 4, w.shape[-1])), dtype)
    got = pull_back(lambda x, w: convolved(x, w, taps), (x, w), seed)
    want = pull_back(lambda x, w: reference(x, w, taps), (x, w), seed)
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        tolerance = (1e-5 if dtype == F32 else 2e-2) * np.abs(b).max()
        np.testing.assert_allclose(a, b, tolerance, tolerance)


def test_what_takes_matmuls_is_not_computed_at_each_place():
    """The cotangent of the sum needs the sum: nine products for each of nine."""
    x, w = arrays(SQUARES)
    found = kernel_of_w(lambda x, w: convolved(x, w, TAPS, jnp.tanh), x, w)
    assert sum(kernel.text.count("= dot") for kernel in found) <= 18


def test_sums_of_matmuls_fill_rounds_of_programs():
    """Of 9 x 16 programs on 132 cores, the second round would be 12."""
    x, w = (
        jax.ShapeDtypeStruct(shape, BF16)
        for shape in [(256, 30, 30, 128), (3, 3, 128, 128)]
    )
    (kernel,) = kernel_of_w(lambda x, w: convolved(x, w, TAPS), x, w)
    assert "grid=(3, 3, 64, 4)" in kernel.text
