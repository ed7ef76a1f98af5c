"""Kernels that only map blocks become one program on whole arrays, or say why not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.emulation.emulate import emulate_arrays
from pallasite.ir.verify import verify
from pallasite.passes.schedule.whole_arrays import for_xla, on_whole_arrays, why_native
from pallasite.sites import calls_in
from pallasite.target import GPUS, TPUS, Machine, host
from tests.passes.test_same_meaning import outputs

F32 = jnp.float32
Shape = jax.ShapeDtypeStruct
MACHINE = Machine.usual(GPUS["h200"])


def kernel_of(body, shapes, out, grid, specs, out_spec, **options):
    call = pl.pallas_call(
        body, out, grid=grid, in_specs=specs, out_specs=out_spec, **options
    )
    (found,) = calls_in(call, *[Shape(s, F32) for s in shapes])
    return found.kernel


def mapped(body, shape=(30, 200), block=(8, 64), fill=None, **options):
    spec = pl.BlockSpec(block, lambda i, j: (i, j), fill=fill)
    grid = tuple(pl.cdiv(n, b) for n, b in zip(shape, block, strict=True))
    return kernel_of(body, [shape], Shape(shape, F32), grid, [spec], spec, **options)


def whole(kernel, batches=0):
    made = on_whole_arrays(kernel)
    assert len(made.batches) == batches
    return made.kernel


def masked(x_ref, o_ref):
    """By position in the array, with the number of the program."""
    rows, columns = o_ref.shape
    row = pl.program_id(0) * rows + jax.lax.broadcasted_iota(int, o_ref.shape, 0)
    column = pl.program_id(1) * columns + jax.lax.broadcasted_iota(int, o_ref.shape, 1)
    number = pl.program_id(0) * 10
    keep = (row * 7 + column) % 3 == 1
    o_ref[...] = jnp.where(keep, x_ref[...] + number, 0.0)


@pytest.mark.parametrize("shape", [(30, 200), (32, 192), (1, 5)])
def test_masks_and_program_ids_follow(shape):
    kernel = mapped(masked, shape)
    made = whole(kernel)
    verify(made)
    if shape > (8, 64):  # one block may be larger than the array
        assert f"in[{shape[0]}, {shape[1]}]" in made.text
        assert f"out[{shape[0]}, {shape[1]}]" in made.text
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for got, want in zip(outputs(made, [x]), outputs(kernel, [x]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_blocks_are_turned():
    def turn(x_ref, o_ref):
        o_ref[...] = x_ref[...].T * 2

    spec = pl.BlockSpec((8, 64), lambda i, j: (i, j))
    out = pl.BlockSpec((64, 8), lambda i, j: (j, i))
    shapes = [(30, 200)], Shape((200, 30), F32)
    made = whole(kernel_of(turn, *shapes, (4, 4), [spec], out))
    assert "f32[200,30] = transpose" in made.text and "grid=(1, 1)" in made.text


@pytest.mark.parametrize("squeezed", [0, 1, 2])
def test_elements_of_a_batch_are_mapped(squeezed):
    def scaled(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] * w_ref[...]

    shape, block = [5, 5, 5], [3, 3, 3]
    block[squeezed] = None
    grid = tuple(5 if b is None else 2 for b in block)
    spec = pl.BlockSpec(tuple(block), lambda i, j, k: (i, j, k))
    shared = pl.BlockSpec((1, 3), lambda i, j, k: (0, k if squeezed < 2 else j))
    shapes = [shape, (1, 5)]
    out = Shape(shape, F32)
    kernel = kernel_of(scaled, shapes, out, grid, [spec, shared], spec)
    made = on_whole_arrays(kernel)
    (batch,) = made.batches
    assert (batch.inputs, batch.outputs) == ((squeezed, None), (squeezed,))
    assert "ref<f32[5,5] block>" in made.kernel.text
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in shapes)
    (want,) = outputs(kernel, [x, w])
    np.testing.assert_array_equal(emulate_arrays(made)(x, w)[0], want)


def test_batches_whose_elements_are_not_alike_stay():
    def numbered(x_ref, o_ref):
        o_ref[...] = x_ref[...] + pl.program_id(0)

    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    row = pl.BlockSpec((None, 64), lambda i: (i, 0))
    shapes = [(8, 64)], Shape((8, 64), F32)
    call = lambda body, read, steps=8: on_whole_arrays(
        kernel_of(body, *shapes, (steps,), [read], row)
    )
    assert not isinstance(call(copy, row), str)
    assert call(numbered, row) == "no parallel axis numbers its blocks"
    assert call(copy, row, 7) == "no parallel axis numbers its blocks"

    def stored(x_ref, o_ref):
        x_ref[...] = x_ref[...] * 2
        o_ref[...] = x_ref[...]

    same = pl.BlockSpec((1, 64), lambda i: (0, 0))
    shared = [(1, 64)], Shape((8, 1, 64), F32)
    element = pl.BlockSpec((None, 1, 64), lambda i: (i, 0, 0))
    once = kernel_of(copy, *shared, (8,), [same], element)
    assert not isinstance(on_whole_arrays(once), str)
    again = kernel_of(stored, *shared, (8,), [same], element)
    assert isinstance(on_whole_arrays(again), str)
    back = pl.BlockSpec((None, 64), lambda i: (7 - i, 0))
    assert isinstance(call(copy, back), str)


def halves(x_ref, o_ref):
    o_ref[:4] = x_ref[4:]
    o_ref[4:] = x_ref[:4]


def columns(x_ref, o_ref):
    o_ref[...] = x_ref[...] - x_ref[...].max(axis=0, keepdims=True)


def rolled(x_ref, o_ref):
    o_ref[...] = jnp.concatenate([x_ref[:, 1:], x_ref[:, :1]], axis=1)


def branching(x_ref, o_ref):
    o_ref[...] = x_ref[...]

    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = x_ref[...] * 2


def printing(x_ref, o_ref):
    pl.debug_print("{}", x_ref[0, 0])
    o_ref[...] = x_ref[...]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (halves, "a load takes a part of a block"),
        (columns, "it reduces another dimension than the last"),
        (rolled, "a load takes a part of a block"),
        (branching, "it has a 'cond'"),
        (printing, "'debug_print' is not elementwise"),
    ],
)
def test_what_is_no_map_says_why(body, reason):
    assert on_whole_arrays(mapped(body, (32, 64))) == reason


def test_windows_that_do_not_cover_an_array_stay():
    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((8, 64), lambda i: (i, 0))
    later = pl.BlockSpec((8, 64), lambda i: (i + 1, 0))
    shapes = [(32, 64)], Shape((24, 64), F32)
    reason = on_whole_arrays(kernel_of(copy, *shapes, (3,), [later], spec))
    assert "does not follow the axis block by block" in reason
    reason = on_whole_arrays(kernel_of(copy, *shapes, (2,), [spec], spec))
    assert "has elements that no program writes" in reason
    empty = kernel_of(copy, [(0, 64)], Shape((0, 64), F32), (0,), [spec], spec)
    assert on_whole_arrays(empty) == "an array has no elements"
    carried = pl.pallas_call(
        lambda x_ref, o_ref, s_ref: copy(x_ref, o_ref),
        Shape((32, 64), F32),
        grid=(4,),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pl.ANY((1, 1), F32)],
    )
    (found,) = calls_in(carried, Shape((32, 64), F32))
    assert on_whole_arrays(found.kernel) == "it has scratch memory"


def test_bytes_decide():
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def repeat(x_ref, o_ref):
        o_ref[...] = jnp.broadcast_to(x_ref[...], o_ref.shape)

    def sines(x_ref, o_ref):
        x = x_ref[...]
        for _ in range(40):
            x = jnp.sin(x)
        o_ref[...] = x

    large = (4096, 1024)
    assert for_xla(mapped(double, large), (0,), MACHINE) is not None
    assert for_xla(mapped(double, large), (), MACHINE) is not None
    cpu = Machine.usual(host())
    assert "hardly any" in why_native(mapped(double, large), (), cpu)
    assert "longer to compute" in why_native(mapped(sines, large), (0,), MACHINE)
    row = pl.BlockSpec((1, 64), lambda i, j: (0, j))
    block = pl.BlockSpec((8, 64), lambda i, j: (i, j))
    shapes = [(1, 1024)], Shape(large, F32)
    spread = kernel_of(repeat, *shapes, (512, 16), [row], block)
    assert "hardly any" in why_native(spread, (0,), cpu)


def rows_kernel(function, width):
    def kernel(x_ref, o_ref):
        o_ref[...] = function(x_ref[...])

    spec = pl.BlockSpec((8, width), lambda i: (i, 0))
    shape = (4096, width)
    return kernel_of(kernel, [shape], Shape(shape, F32), (512,), [spec], spec)


def hanging(function, width, block):
    def kernel(x_ref, o_ref):
        inside = jnp.arange(block) < width
        o_ref[...] = function(jnp.where(inside, x_ref[...], 0.0))

    spec = pl.BlockSpec((8, block), lambda i: (i, 0))
    shape = (4096, width)
    return kernel_of(kernel, [shape], Shape(shape, F32), (512,), [spec], spec)


def test_short_rows_reduced_one_after_another_are_for_a_gpus_xla():
    def centred(x):
        y = x - x.mean(axis=1, keepdims=True)
        return y * jax.lax.rsqrt((y * y).mean(axis=1, keepdims=True) + 1e-6)

    def scaled(x):
        return x / (x.max(axis=1, keepdims=True) - x.min(axis=1, keepdims=True))

    short, long = rows_kernel(centred, 256), rows_kernel(centred, 8192)
    made = for_xla(short, (0,), MACHINE)
    assert "f32[4096] = reduce" in made.kernel.text
    assert "programs read only once" in why_native(long, (0,), MACHINE)
    padded = hanging(centred, 200, 256)
    assert "pad the arrays" in why_native(padded, (0,), MACHINE)
    twice = rows_kernel(scaled, 256)
    assert "in several ways at once" in why_native(twice, (0,), MACHINE)
    for chip in (host(), TPUS["v5e"]):
        machine = Machine.usual(chip)
        assert "programs read only once" in why_native(short, (0,), machine)
    x = np.random.default_rng(0).normal(size=(4096, 256)).astype(np.float32)
    (got,) = emulate_arrays(made)(x)
    np.testing.assert_allclose(got, centred(x), 1e-5, 1e-5)


@pytest.mark.parametrize("shape", [(32, 192), (8, 256)])
def test_sums_of_what_programs_map_are_apart(shape):
    """Over both axes, over one, into places of one block, and in parts."""

    def kernel(x_ref, s_ref, o_ref, all_ref, column_ref, both_ref, part_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        x = x_ref[...]
        y = jnp.sin(x) * s_ref[0]
        o_ref[...] = y

        @pl.when((i == 0) & (j == 0))
        def _():
            all_ref[...] = jnp.zeros_like(all_ref)
            both_ref[...] = jnp.zeros_like(both_ref)

        @pl.when(j == 0)
        def _():
            column_ref[...] = jnp.zeros_like(column_ref)

        scale = s_ref[1] * 2
        all_ref[...] += ((x * y).sum(keepdims=True) * scale).reshape(1, 1)
        both_ref[0] += x.sum()
        both_ref[2] += -y.sum()
        column_ref[...] += y.sum(axis=1, keepdims=True)
        part_ref[...] = (x * x).sum(axis=0)

    rows, columns = shape
    grid = (rows // 8, columns // 64)
    block = pl.BlockSpec((8, 64), lambda i, j: (i, j))
    specs = [
        block,
        pl.BlockSpec((1, 1), lambda i, j: (0, 0)),
        pl.BlockSpec((8, 1), lambda i, j: (i, 0)),
        pl.BlockSpec((3,), lambda i, j: (0,)),
        pl.BlockSpec((None, 64), lambda i, j: (i, j)),
    ]
    outs = [shape, (1, 1), (rows, 1), (3,), (grid[0], columns)]
    call = pl.pallas_call(
        kernel,
        [Shape(s, F32) for s in outs],
        grid=grid,
        in_specs=[block, pl.BlockSpec((2,), lambda i, j: (0,))],
        out_specs=specs,
    )
    (found,) = calls_in(call, Shape(shape, F32), Shape((2,), F32))
    made = on_whole_arrays(found.kernel)
    assert not isinstance(made, str), made
    assert made.sums is not None and made.sums.sums == (1, 2, 3, 4)
    verify(made.kernel)
    verify(made.sums.total)
    assert "reduce" not in made.kernel.text
    rng = np.random.default_rng(0)
    args = [rng.normal(size=shape).astype(np.float32), np.float32([2, 0.5])]
    for got, want in zip(
        emulate_arrays(made)(*args), outputs(found.kernel, args), strict=True
    ):
        np.testing.assert_allclose(got, want, 1e-4, 1e-4)
    assert for_xla(found.kernel, (0,), MACHINE) is not None
    assert "adds up" in why_native(found.kernel, (0,), Machine.usual(host()))


def test_what_is_no_plain_sum_stays():
    def running(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] = o_ref[...] * 0.5 + x_ref[...].sum(axis=1, keepdims=True)

    def started(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 1)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)

    block = pl.BlockSpec((8, 64), lambda i, j: (i, j))
    sums = pl.BlockSpec((8, 1), lambda i, j: (i, 0))
    for body in (running, started):
        call = kernel_of(body, [(32, 128)], Shape((32, 1), F32), (4, 2), [block], sums)
        assert on_whole_arrays(call) == "it has a 'cond'"

    def rows_by_number(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[pl.ds(x_ref[0, 0].astype(int), 1), :] += x_ref[...]

    row = pl.BlockSpec((1, 64), lambda i: (i, 0))
    rows = pl.BlockSpec((32, 64), lambda i: (0, 0))
    call = kernel_of(rows_by_number, [(32, 64)], Shape((32, 64), F32), 32, [row], rows)
    assert isinstance(on_whole_arrays(call), str)
    # Past the edge, it is not known what is added.
    call = kernel_of(started, [(30, 128)], Shape((30, 1), F32), (4, 2), [block], sums)
    assert isinstance(on_whole_arrays(call), str)
