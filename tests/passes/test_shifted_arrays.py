"""Programs that shift blocks, as one program on whole arrays, or why they are none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite.emulation.emulate import emulate
from pallasite.ir.verify import verify
from pallasite.passes.run import run
from pallasite.passes.schedule.shifted_arrays import NotShifted, shifted_arrays
from pallasite.passes.schedule.whole_arrays import for_xla, why_native
from pallasite.sites import calls_in
from pallasite.target import GPUS, Machine, host
from tests.passes.test_same_meaning import outputs

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
Shape = jax.ShapeDtypeStruct
ANY = pl.BlockSpec(memory_space=pl.ANY)


def kernel_of(body, operands, out, grid, specs, out_specs, **options):
    call = pl.pallas_call(
        body, out, grid=grid, in_specs=specs, out_specs=out_specs, **options
    )
    (found,) = calls_in(call, *operands)
    return run(found.kernel)


def array(shape, dtype=F32, seed=0):
    made = np.random.default_rng(seed).normal(size=shape) * 4
    return jnp.asarray(made).astype(dtype)


def check(kernel, operands):
    """The same elements, by numpy and by XLA."""
    made = shifted_arrays(kernel)
    verify(made)
    assert "grid=(1" in made.text or "grid=()" in made.text
    given = [np.asarray(x) for x in operands]
    want = outputs(kernel, given)
    by_xla = jax.jit(emulate(made))(*operands)  # may contract a product and a sum
    for a, b, c in zip(outputs(made, given), by_xla, want, strict=True):
        a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
        np.testing.assert_array_equal(a, c)
        np.testing.assert_allclose(b, c, 1e-5 if want[0].itemsize == 4 else 2e-2)
    return made


def halo(body, shape=(21, 13), block=(4, 8), reach=(1, 2), fill=0, dtype=F32):
    """A kernel of overlapping blocks that hang over, and its operands."""
    x = array(shape, dtype)
    spec = pl.BlockSpec(
        tuple(pl.Element(b + sum(reach), reach) for b in block),
        lambda i, j: (i * block[0], j * block[1]),
        fill=fill,
    )
    out = pl.BlockSpec(block, lambda i, j: (i, j))
    grid = tuple(pl.cdiv(n, b) for n, b in zip(shape, block, strict=True))
    return kernel_of(body, [x], Shape(shape, dtype), grid, [spec], out), [x]


def neighbours(x_ref, o_ref):
    n, m = o_ref.shape
    x = x_ref[...]
    around = x[:n, 1 : m + 1] + x[3:, 1 : m + 1] + x[1 : n + 1, :m] * x[2 : n + 2, 2:-1]
    o_ref[...] = (2.0 * x[1 : n + 1, 1 : m + 1] + around).astype(o_ref.dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("fill", [0, 3])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((21, 13), (4, 8)), ((1, 1), (4, 8)), ((8, 16), (8, 16)), ((5, 9), (1, 1))],
)
def test_overlapping_blocks_are_shifted_arrays(shape, block, fill, dtype):
    made = check(*halo(neighbours, shape, block, fill=fill, dtype=dtype))
    assert ("pad" in made.text) == (shape != (1, 1))


def by_position(x_ref, o_ref):
    """Masks, program indices, padding, joined pieces, and a vector."""
    n, m = o_ref.shape
    i, j = pl.program_id(0), pl.program_id(1)
    x = x_ref[1 : n + 1, 1 : m + 1]
    at = jax.lax.broadcasted_iota(I32, x.shape, 1)
    moved = jnp.concatenate([x[:, 5:], x[:, :5]], axis=1)
    padded = jnp.pad(x[1:, :-1], ((0, 1), (1, 0)), constant_values=7.0)
    column = jnp.where(at >= 3, moved, x_ref[2 : n + 2, 2 : m + 2])
    number = (i * 10 + j).astype(F32)
    vector = jnp.arange(m, dtype=F32)
    first = jnp.where((i == 1) | (j * m + at > 9), padded, column)
    o_ref[...] = first * number + vector[None, :] + jnp.where(i > 0, 1.0, at)


@pytest.mark.parametrize("block", [(4, 8), (3, 7), (32, 16)])
def test_masks_joined_pieces_and_program_indices(block):
    check(*halo(by_position, (21, 13), block))


def test_dimensions_turn_and_batches_are_squeezed():
    def body(x_ref, w_ref, o_ref):
        o_ref[...] = (x_ref[1:9, :] - x_ref[:8, :]).T[None] * w_ref[...].reshape(
            1, 4, 1
        )

    x, w = array((3, 17, 8)), array((8,))
    rows = pl.Element(9, (1, 0))
    specs = [
        pl.BlockSpec((None, rows, 4), lambda b, i, j: (b, i * 8, j), fill=0),
        pl.BlockSpec((4,), lambda b, i, j: (j,)),
    ]
    out = pl.BlockSpec((1, 4, 8), lambda b, i, j: (b, j, i))
    kernel = kernel_of(body, [x, w], Shape((3, 8, 17), F32), (3, 3, 2), specs, out)
    made = check(kernel, [x, w])
    assert "transpose" in made.text


def test_slices_of_a_whole_array_and_two_results():
    def body(x_ref, s_ref, o_ref, p_ref):
        start = pl.program_id(0) * 8
        x = x_ref[pl.ds(start, 10), :]
        o_ref[...] = x[:-2] - x[2:] * s_ref[1]
        p_ref[...] = x[1:-1].astype(p_ref.dtype)

    x, s = array((26, 5)), array((2,))
    out = pl.BlockSpec((8, 5), lambda i: (i, 0))
    shapes = Shape((24, 5), F32), Shape((24, 5), BF16)
    whole = pl.BlockSpec((2,), lambda i: (0,))
    kernel = kernel_of(body, [x, s], shapes, (3,), [ANY, whole], (out, out))
    made = check(kernel, [x, s])
    assert "gather" not in made.text and made.text.count("= load") == 2


def neighbouring(guarded, x, block=4):
    """Rows of the blocks beside, whose indices are clamped at the edges."""
    last = x.shape[0] // block - 1

    def body(above_ref, here_ref, below_ref, o_ref):
        i, x = pl.program_id(0), here_ref[...]
        above, below = above_ref[block - 1 :, :], below_ref[:2, :]
        if guarded:
            above = jnp.where(i > 0, above * 2.0, 0.0)
            below = jnp.where((i < last) & (i != 2), below, jnp.where(i == 2, x[:2], 1))
        up = jnp.concatenate([above, x[:-1]], axis=0)
        down = jnp.concatenate([x[2:], below], axis=0)
        o_ref[...] = up * x - jnp.maximum(down, x)

    at = lambda f: pl.BlockSpec((block, x.shape[1]), lambda i: (f(i), 0))
    specs = [
        at(lambda i: jnp.maximum(i - 1, 0)),
        at(lambda i: i),
        at(lambda i: jnp.minimum(i + 1, last)),
    ]
    shape = Shape(x.shape, F32)
    return kernel_of(body, [x] * 3, shape, (last + 1,), specs, specs[1])


@pytest.mark.parametrize("rows", [4, 8, 24])
def test_where_a_choice_drops_a_load_its_index_may_be_clamped(rows):
    x = array((rows, 5))
    check(neighbouring(True, x), [x] * 3)
    if rows > 4:  # of one block, both neighbours are itself
        with pytest.raises(NotShifted, match="another way"):
            shifted_arrays(neighbouring(False, x))


NONLINEAR = {
    "a product": lambda x: x[:-2] * x[1:-1] - x[2:],
    "squares": lambda x: x[:-2] ** 2 + x[2:] ** 2,
    "a maximum": lambda x: jnp.maximum(x[:-2], x[1:-1]) + x[2:],
}


@pytest.mark.parametrize("name", NONLINEAR)
@pytest.mark.parametrize("is_padded", [True, False])
def test_gradients_of_other_stencils(name, is_padded):
    function, more = NONLINEAR[name], 2 - 2 * is_padded

    def stencil(x):
        def body(x_ref, o_ref):
            o_ref[...] = function(x_ref[...])

        edge = (1, 1) if is_padded else (0, 0)
        shape = Shape((x.shape[0] - more, 16), F32)
        return pl.pallas_call(
            body,
            shape,
            grid=(shape.shape[0] // 8,),
            in_specs=[
                pl.BlockSpec((pl.Element(10, edge), 16), lambda i: (i * 8, 0), fill=0)
            ],
            out_specs=pl.BlockSpec((8, 16), lambda i: (i, 0)),
        )(x)

    reference = lambda x: function(jnp.pad(x, ((1, 1), (0, 0))) if is_padded else x)
    x, d = array((32 + more, 16)), array((32, 16), seed=1)
    back = lambda x, d: jax.vjp(stencil, x)[1](d)[0]
    with config.override(target="h200"):
        (*_, call) = calls_in(back, x, d)
    kernel = run(call.kernel)
    named = {"x_ref": x, "d_o_ref": d}
    operands = [np.asarray(named[p.name]) for p in kernel.inputs]
    (got,) = outputs(shifted_arrays(kernel), operands)
    want = jax.vjp(reference, x)[1](d)[0]
    np.testing.assert_allclose(got, want, 1e-5, 1e-5)


def refused(body, specs, grid=(4,), out=None, shape=(32, 8), **options):
    out = out or pl.BlockSpec((8, 8), lambda i: (i, 0))
    kernel = kernel_of(
        body, [Shape((32, 8), F32)], Shape(shape, F32), grid, specs, out, **options
    )
    with pytest.raises(NotShifted) as error:
        shifted_arrays(kernel)
    return str(error.value)


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[: o_ref.shape[0], :]


def test_other_programs_say_why_they_are_none():
    rows = lambda f, n=8: [pl.BlockSpec((n, 8), lambda i: (f(i), 0))]
    element = lambda f, n=8: [pl.BlockSpec((pl.Element(n), 8), lambda i: (f(i), 0))]
    other = "blocks advance in another way than those of the result"
    clamped = rows(lambda i: jnp.maximum(i - 1, 0))
    assert refused(copy, clamped) == other
    assert refused(copy, element(lambda i: 8 * i + 25)) == other
    assert refused(copy, element(lambda i: 4 * i)) == other
    assert refused(copy, element(lambda i: 24 - 8 * i)) == other
    assert refused(copy, rows(lambda i: 0)) == other

    def total(x_ref, o_ref):
        o_ref[...] = jnp.broadcast_to(x_ref[...].sum(axis=0), o_ref.shape)

    assert refused(total, rows(lambda i: i)) == "'reduce' is not elementwise"

    def part(x_ref, o_ref):
        o_ref[:4] = x_ref[:4]

    assert refused(part, rows(lambda i: i)) == "a part of a block is stored"

    def again(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[...] = o_ref[...] + 1.0

    kept = pl.BlockSpec((8, 8), lambda i: (0, 0))
    assert refused(copy, rows(lambda i: i), out=kept, shape=(8, 8)) == (
        "several programs write a block"
    )
    back = pl.BlockSpec((8, 8), lambda i: (i * 3 % 4, 0))
    follow = "a result's blocks do not follow the grid"
    assert refused(copy, rows(lambda i: i), out=back) == follow
    assert refused(copy, rows(lambda i: i), grid=(3,)) == (
        "no program writes some elements of a result"
    )
    own = {"input_output_aliases": {0: 0}}
    assert refused(copy, rows(lambda i: i), **own) == "it reads memory that it writes"

    def many(x_ref, o_ref):
        o_ref[...] = sum(x_ref[n : n + 8, :] for n in range(20))

    assert refused(many, [pl.BlockSpec((pl.Element(27, (0, 19)), 8),
                                       lambda i: (8 * i, 0), fill=0)]) == (
        "an element is computed from many others"
    )  # fmt: skip


def test_a_gpus_xla_takes_overlapping_blocks_of_cotangents():
    kernel, _ = halo(neighbours, (2048, 2048), (64, 256))
    made = for_xla(kernel, (0,), Machine.usual(GPUS["h200"]))
    assert made is not None and made.shifted
    assert "hardly any" in why_native(kernel, (), Machine.usual(GPUS["h200"]))
    assert why_native(kernel, (0,), Machine.usual(host())) == "its blocks overlap"


def test_the_gradient_of_a_stencil_is_a_shifted_cotangent():
    def stencil(x):
        def body(x_ref, o_ref):
            x = x_ref[...]
            o_ref[...] = 0.5 * x[1:-1] + x[:-2] - 3.0 * x[2:]

        spec = pl.BlockSpec((pl.Element(10), 16), lambda i: (i * 8, 0))
        out = pl.BlockSpec((8, 16), lambda i: (i, 0))
        shape = Shape((x.shape[0] - 2, 16), F32)
        return pl.pallas_call(
            body, shape, grid=(shape.shape[0] // 8,), in_specs=[spec], out_specs=out
        )(x)

    x, d = array((34, 16)), array((32, 16), seed=1)
    back = lambda x, d: jax.vjp(stencil, x)[1](d)[0]
    for target in ("h200", None):
        with config.override(target=target):
            (*_, call) = calls_in(back, x, d)
        assert [p.ref.shape for p in call.kernel.inputs] == [d.shape]
        (got,) = outputs(shifted_arrays(run(call.kernel)), [np.asarray(d)])
        want = jax.vjp(lambda x: 0.5 * x[1:-1] + x[:-2] - 3.0 * x[2:], x)[1](d)[0]
        np.testing.assert_allclose(got, want, 1e-5, 1e-5)
