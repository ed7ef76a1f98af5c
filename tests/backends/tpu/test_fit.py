"""Blocks and element types that the chip lacks, in a form it takes."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config, kernels
from pallasite.backends.base import Compiled, Options, get
from pallasite.backends.tpu.carried_types import (
    carry_types,
    from_half_bits,
    half_bits,
    rounded,
)
from pallasite.backends.tpu.fit_windows import CallArrays, fit_windows
from pallasite.errors import PerformanceWarning
from pallasite.ir.verify import verify
from pallasite.passes.run import run as run_passes
from pallasite.runtime.forms import Form
from pallasite.sites import kernels_in
from pallasite.target import TPUS
from tests.backends.cpu.running import tiles_kernel
from tests.backends.tpu.harness import random_arrays, simulated
from tests.fuzz.agreement import run_numpy


def kernel_of(function, *shapes):
    (kernel,) = kernels_in(function, *shapes)
    return run_passes(kernel)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def form_of(kernel, position=0) -> Form | None:
    compiled = Compiled(get("tpu"), kernel, Options(), shared=())
    return CallArrays.of(compiled.scheduled, kernel).operands[position][1]


def assert_right(kernel, seed=0):
    arrays = random_arrays(kernel, seed)
    pairs = zip(simulated(kernel, arrays), run_numpy(kernel, arrays), strict=True)
    for got, want in pairs:
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


# --- forms ---


@pytest.mark.parametrize(
    "form, shape",
    [
        (Form((60, 200), "int32", "int32", ((0, 4), (0, 56)), (8, 64)), (8, 4, 8, 64)),
        (Form((5, 60, 200), "int8", "int8", (), (None, 6, None)), (5, 10, 6, 200)),
        (Form((10,), "float16", "float32", ((0, 2),), (4,)), (3, 1, 4)),
        (Form((3, 6, 8), "bool", "int8", (), (None, 1, 4)), (3, 6, 2, 1, 4)),
        (Form((7,), "int32", "int32", ((2, 3),)), (12,)),
        (Form((2, 5, 3, 4), "int8", "int8", order=(0, 2, 1, 3)), (2, 3, 5, 4)),
        (Form((5, 3, 4), "int8", "int8", ((0, 0), (0, 2), (0, 0)), (None, 2, None),
              order=(1, 2, 0)), (3, 3, 2, 5)),
        (Form((), "bool", "int8", least_rank=2), (1, 1)),
    ],
)  # fmt: skip
def test_arrays_come_back_from_their_forms(form, shape):
    bits = np.random.default_rng(0).integers(0, 2, form.shape)
    x = np.asarray(bits).astype(form.dtype)
    for numbers in (np, jnp):
        packed = form.pack(numbers, x)
        assert packed.shape == form.carried_shape == shape
        assert packed.dtype == form.carried_dtype
        back = form.unpack(numbers, packed)
        assert back.dtype == x.dtype
        np.testing.assert_array_equal(back, x)


# --- windows ---


def copied(shape, block, grid=None, dtype=jnp.float32, **kw):
    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...] + x_ref[...]

    spec = pl.BlockSpec(block, lambda *ids: ids, **kw)
    sizes = [1 if b is None else b for b in block]
    grid = grid or tuple(pl.cdiv(n, b) for n, b in zip(shape, sizes, strict=True))
    call = pl.pallas_call(
        copy, out_shape=array(*shape, dtype=dtype), grid=grid,
        in_specs=[spec], out_specs=spec,
    )  # fmt: skip
    return kernel_of(call, array(*shape, dtype=dtype))


CUT = {
    "rows": ((64, 256), (4, 128), (16, 4, 256)),
    "lanes": ((16, 256), (8, 64), (4, 16, 64)),
    "both": ((64, 256), (4, 100), (16, 3, 4, 100)),
    "past the end": ((60, 200), (20, 96), (3, 3, 20, 96)),
    "single rows": ((6, 256), (1, 256), (6, 1, 256)),
    "squeezed rows": ((6, 256), (None, 256), (6, 1, 256)),
    "rank one": ((1024,), (64,), (16, 1, 64)),
    "outer dimensions": ((3, 10, 128), (2, 5, 128), (3, 2, 5, 128)),
}


@pytest.mark.parametrize("name", CUT)
def test_blocks_side_by_side_are_cut_apart(name):
    shape, block, carried = CUT[name]
    kernel = copied(shape, block)
    form = form_of(kernel)
    assert form is not None and form.carried_shape == carried
    verify(fit_windows(kernel))
    assert_right(kernel)


def test_a_block_alone_is_rounded_up():
    kernel = copied((5, 300), (6, 400))
    assert form_of(kernel) is None
    assert "in[8, 512]" in fit_windows(kernel).text
    assert_right(kernel)


def test_fill_is_read_past_the_end():
    def total(x_ref, o_ref):
        o_ref[...] = jnp.broadcast_to(jnp.sum(x_ref[...]), (1, 128))

    call = pl.pallas_call(
        total, out_shape=array(3, 128), grid=(3,),
        in_specs=[pl.BlockSpec((4, 128), lambda i: (i, 0), fill=0.5)],
        out_specs=pl.BlockSpec((1, 128), lambda i: (i, 0)),
    )  # fmt: skip
    assert_right(kernel_of(call, array(10, 128)))


@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (3, 2)])
@pytest.mark.parametrize("rows", [5, 8, 3])
def test_blocks_that_overlap_come_with_the_tiles_around(rows, padding):
    def add(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = jnp.sum(x, axis=0, keepdims=True)

    window = (pl.Element(rows, padding), 128)
    size = 40
    steps = (size + sum(padding) - rows) // 2 + 1
    call = pl.pallas_call(
        add, out_shape=array(steps, 128, dtype=jnp.int32), grid=(steps,),
        in_specs=[pl.BlockSpec(window, lambda i: (2 * i, 0), fill=7)],
        out_specs=pl.BlockSpec((1, 128), lambda i: (i, 0)),
    )  # fmt: skip
    assert_right(kernel_of(call, array(size, 128, dtype=jnp.int32)))


def test_overlapping_blocks_that_start_at_tiles_are_not_moved_in_them():
    def add(x_ref, o_ref):
        o_ref[...] = x_ref[:8] + x_ref[2:]

    call = pl.pallas_call(
        add, out_shape=array(24, 128), grid=(3,),
        in_specs=[pl.BlockSpec((pl.Element(10), 128), lambda i: (8 * i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
    )  # fmt: skip
    kernel = kernel_of(call, array(26, 128))
    text = fit_windows(kernel).text
    assert "in[element 16 pad (0, 6), 128]" in text, "the array is as it was"
    assert "rem" not in text
    assert_right(kernel)


def test_overlapping_parts_of_main_memory_are_windows():
    def add(x_ref, o_ref):
        x = x_ref[pl.ds(pl.program_id(0) * 8, 10), :]
        o_ref[...] = x[:8] + x[2:]

    width = 24 << 10  # too wide to be kept on chip as a whole
    call = pl.pallas_call(
        add, out_shape=array(24, width), grid=(3,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((8, width), lambda i: (i, 0)),
    )  # fmt: skip
    kernel = kernel_of(call, array(26, width))
    compiled = Compiled(get("tpu"), kernel, Options(chip=TPUS["v5e"]), shared=())
    assert "copy_start" not in compiled.scheduled.text
    assert_right(kernel)


def test_written_blocks_that_start_anywhere():
    def write(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    rows = pl.BlockSpec((pl.Element(3), 128), lambda i: (3 * i, 0))
    call = pl.pallas_call(
        write, out_shape=array(30, 128), grid=(10,), in_specs=[rows], out_specs=rows
    )
    assert_right(kernel_of(call, array(30, 128)))


def test_arrays_without_dimensions():
    def add(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    call = pl.pallas_call(add, out_shape=array())
    assert_right(kernel_of(call, array(), array()))


def test_aliased_blocks_are_cut_alike():
    def step(x_ref, o_ref):
        @pl.when(pl.program_id(0) != 1)
        def _():
            o_ref[...] = x_ref[...] + 1

    rows = pl.BlockSpec((3, 128), lambda i: (i, 0))
    call = pl.pallas_call(
        step, out_shape=array(9, 128), grid=(3,), in_specs=[rows], out_specs=rows,
        input_output_aliases={0: 0},
    )  # fmt: skip
    assert_right(kernel_of(call, array(9, 128)))


def test_xla_converts_arrays_around_the_call():
    """The text handed to XLA: cut, called, put together; one warning."""

    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((4, 128), lambda i: (i, 0))
    call = pl.pallas_call(
        copy, out_shape=array(16, 128, dtype=jnp.float16), grid=(4,),
        in_specs=[spec], out_specs=spec, backend="tpu",
    )  # fmt: skip
    traced = jax.jit(call).trace(array(16, 128, dtype=jnp.float16))
    with pytest.warns(PerformanceWarning) as caught:
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    first = str(caught[0].message)
    assert first.startswith("each call copies an array into another layout")
    assert "input 0 ('x_ref'), f16[16,128]" in first
    assert "use a block of (8, 128)" in first
    assert "tensor<4x4x128xf32>" in text
    assert "tensor<16x128xf16>) ->" in text


def test_nobody_is_told_to_change_blocks_of_the_library(recwarn):
    """Heads are the third dimension of an operand; XLA puts them in front."""
    x = array(1, 256, 4, 64)
    run = jax.grad(lambda q: kernels.attention(q, q, q).sum())
    with config.override(target="v5e"):
        traced = jax.jit(run).trace(x)
        traced.lower(lowering_platforms=("tpu",))
    assert [w for w in recwarn if w.category is PerformanceWarning] == []


# --- arrays in main memory ---


def test_small_arrays_in_main_memory_are_kept_on_the_chip():
    def f(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[pl.ds(3 * i, 3), :] = x_ref[pl.ds(2 * i, 3), :] + 1

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        f, out_shape=array(12, 128), grid=(4,),
        in_specs=[anywhere], out_specs=anywhere,
    )  # fmt: skip
    assert_right(kernel_of(call, array(9, 128)))


@pytest.mark.parametrize("rows", [12, 10])
def test_inner_pipelines_with_blocks_that_miss_the_tiles(rows):
    from pallasite import tpu as pltpu

    def outer(x_ref, o_ref):
        def step(x_block, o_block):
            o_block[...] = x_block[...] * 2

        spec = pl.BlockSpec((4, 100), lambda i, j: (i, j))
        pipeline = pltpu.emit_pipeline(
            step, grid=(3, 2), in_specs=[spec], out_specs=[spec]
        )
        pipeline(x_ref, o_ref)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        outer, out_shape=array(rows, 150), in_specs=[anywhere], out_specs=anywhere
    )
    assert_right(kernel_of(call, array(rows, 150)))


def test_an_operand_in_two_windows():
    """The same memory in two ways: the result's blocks, and rows of another shape."""

    def f(x_ref, o_ref):
        o_ref[...] = jnp.sum(x_ref[...]) + jnp.zeros_like(o_ref)

    call = pl.pallas_call(
        f, out_shape=array(12, 128, dtype=jnp.int32), grid=(2,),
        in_specs=[pl.BlockSpec((5, 128), lambda i: (2, 0))],
        out_specs=pl.BlockSpec((3, 128), lambda i: (i, 0)),
        input_output_aliases={0: 0},
    )  # fmt: skip
    assert_right(kernel_of(call, array(12, 128, dtype=jnp.int32)))


def test_numbers_in_scalar_memory_after_other_operands():
    def f(x_ref, s_ref, o_ref):
        o_ref[...] = x_ref[...] * s_ref[...]

    smem = pl.BlockSpec(memory_space=pl.MemorySpace.SMEM)
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    call = pl.pallas_call(
        f, out_shape=array(16, 128), grid=(2,), in_specs=[rows, smem], out_specs=rows
    )
    kernel = kernel_of(call, array(16, 128), array())
    assert_right(kernel)


# --- prints ---


def test_prints_come_in_the_order_of_programs(capsys):
    def f(x_ref, o_ref):
        i = pl.program_id(0)

        @pl.when(i != 1)
        def _():
            pl.debug_print("program {}: {} {}", i, x_ref[0, 0], x_ref[0, :3] > 1)

        o_ref[...] = x_ref[...].astype(o_ref.dtype)

    rows = pl.BlockSpec((2, 130), lambda i: (i, 0))
    call = pl.pallas_call(
        f, out_shape=array(6, 130), grid=(3,), in_specs=[rows], out_specs=rows
    )
    kernel = kernel_of(call, array(6, 130, dtype=jnp.float16))
    x = np.arange(6 * 130, dtype=np.float16).reshape(6, 130)
    (got,) = simulated(kernel, [x])
    np.testing.assert_array_equal(got, x.astype(np.float32))
    assert capsys.readouterr().out.splitlines() == [
        "program 0: 0.0 [False False  True]",
        "program 2: 520.0 [ True  True  True]",
    ]


def test_prints_of_large_tiles(capsys):
    def f(x_ref, o_ref):
        pl.debug_print("{}", x_ref[...].astype(jnp.int8))
        o_ref[...] = x_ref[...]

    call = pl.pallas_call(f, out_shape=array(2, 3, 200, dtype=jnp.int32))
    kernel = kernel_of(call, array(2, 3, 200, dtype=jnp.int32))
    x = np.arange(1200, dtype=np.int32).reshape(2, 3, 200)
    simulated(kernel, [x])
    assert capsys.readouterr().out == f"{x.astype(np.int8)}\n"


# --- element types ---


def halves() -> np.ndarray:
    """float32 numbers around each float16 one, and those between two."""
    near = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    near = near[np.isfinite(near)].astype(np.float32)
    between = (np.sort(near)[1:] + np.sort(near)[:-1]) / 2
    up, down = (np.nextafter(between, np.float32(s * np.inf)) for s in (1, -1))
    special = [np.inf, -np.inf, np.nan, 65519.9, 65520.0, -65520.0, 1e30, 1e-30, -1e-30]
    every = np.concatenate([near, between, up, down, np.float32(special)])
    return every[: every.size // 128 * 128].reshape(-1, 128)


def test_float16_is_rounded_as_by_numpy():
    x = halves()
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(np.float16).astype(np.float32)
    (got,) = run_numpy(tiles_kernel(rounded, [x]), [x])
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


def test_bits_of_float16():
    bits = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        x = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    (got,) = run_numpy(tiles_kernel(from_half_bits, [bits]), [bits])
    np.testing.assert_array_equal(got, x)
    (back,) = run_numpy(tiles_kernel(half_bits, [x]), [x])
    number = ~np.isnan(x)
    np.testing.assert_array_equal(back[number], bits[number])


def test_float16_rounds_after_each_op():
    def f(x_ref, y_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = (x * y_ref[...] + x) * jnp.float16(0.1)

    half = array(8, 128, dtype=jnp.float16)
    kernel = kernel_of(pl.pallas_call(f, out_shape=half), half, half)
    verify(carry_types(kernel))
    assert "f16" not in carry_types(kernel).text
    assert_right(kernel)


def test_arrays_of_bools_are_bytes():
    def f(m_ref, x_ref, o_ref, any_ref):
        o_ref[...] = jnp.where(m_ref[...], x_ref[...], -x_ref[...]) > 0
        any_ref[...] = ~m_ref[...]

    mask, x = array(32, 128, dtype=jnp.bool_), array(32, 128)
    kernel = kernel_of(pl.pallas_call(f, out_shape=[mask, mask]), mask, x)
    form = form_of(kernel)
    assert form is not None and form.carried_dtype == "int8"
    assert_right(kernel)


def test_a_filled_block_of_varying_length_is_copied_from_the_window():
    """Its window needs no other form: the copy must not be read in its own place."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    rows = pl.BlockSpec(
        (pl.BoundedSlice(2), 8, 128), lambda i: (pl.ds(i - 1, 1), 0, 0), fill=1.0
    )
    call = pl.pallas_call(
        kernel,
        out_shape=array(6, 8, 128),
        grid=3,
        in_specs=[rows],
        out_specs=pl.BlockSpec((2, 8, 128), lambda i: (i, 0, 0)),
    )
    assert_right(kernel_of(call, array(4, 8, 128)))


def test_the_start_of_a_masked_slice_beside_an_index_array_is_not_clamped():
    def kernel(x_ref, o_ref):
        start = pl.program_id(0) - 3
        columns = jnp.array([1, 3, 1])
        mask = jax.lax.broadcasted_iota(jnp.int32, (4, 3), 1) < 2
        index = (pl.ds(start, 4), columns)
        o_ref[...] = pl.load(x_ref, index, mask=mask, other=5.0)

    call = pl.pallas_call(kernel, out_shape=array(4, 3), grid=1)
    assert_right(kernel_of(call, array(5, 4)))


def test_blocks_returned_to_along_axes_of_unknown_size():
    def kernel(o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += 1.0

    def call(n):
        return pl.pallas_call(
            kernel,
            out_shape=array(2, 8, 128),
            grid=(3, n),
            out_specs=pl.BlockSpec((1, 8, 128), lambda i, j: (j, 0, 0)),
        )()

    imported = kernel_of(call, array(dtype=jnp.int32))
    (got,) = simulated(imported, [np.array(2, np.int32)])
    np.testing.assert_array_equal(got, np.full((2, 8, 128), 3.0, np.float32))


# --- dimensions in another order ---


def scaled_heads(x, y, width, block=16):
    """Rows of one head at a time, of (length, heads, width)."""
    length, heads, _ = x.shape

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = 2 * x_ref[...] + y_ref[...]

    def spec(rank):
        dims = {3: (block, None, width), 4: (None, block, None, width)}[rank]
        head = {3: lambda h, i: (i, h, 0), 4: lambda h, i: (h % 2, i, h, 0)}[rank]
        return pl.BlockSpec(dims, head)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(heads, length // block),
        in_specs=[spec(3), spec(4)],
        out_specs=spec(3),
    )(x, y)


def test_a_dimension_seen_one_by_one_is_put_in_front():
    """So that tiles are of rows and lanes that the body sees."""
    shapes = array(32, 4, 128), array(2, 32, 4, 128)
    kernel = kernel_of(lambda *xs: scaled_heads(*xs, 128), *shapes)
    compiled = Compiled(get("tpu"), kernel, Options(), shared=())
    arrays = CallArrays.of(compiled.scheduled, kernel)
    forms = [*(form for _, form in arrays.operands), *arrays.results]
    assert [f.carried_shape for f in forms if f is not None] == [
        (4, 32, 128),
        (2, 4, 32, 128),
        (4, 32, 128),
    ]
    assert_right(kernel)


def test_that_is_announced_with_the_shape_that_needs_no_copy():
    kernel = kernel_of(
        lambda *xs: scaled_heads(*xs, 64), array(32, 3, 64), array(2, 32, 3, 64)
    )
    assert_right(kernel)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        get("tpu").launch(Compiled(get("tpu"), kernel, Options(), shared=()))
    texts = [str(w.message) for w in said if w.category is PerformanceWarning]
    assert any("an array of shape (2, 3, 32, 64)" in text for text in texts), texts
