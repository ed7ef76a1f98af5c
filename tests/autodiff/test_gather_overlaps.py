"""Cotangents of overlapping blocks are gathered."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff import backward
from pallasite.autodiff.explain_grad import full_plan
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.sites import kernels_in
from pallasite.target import Machine, chip


def weighted(parts, rows) -> Any:
    return sum(map(jnp.multiply, parts, rows))


def stencil(offsets, before, after=0, block=8, combine=weighted, length=None):
    """`sum(w[n] * x[t - before + offset])`, and the same in plain jnp."""
    reach = max(offsets)

    def run(x, w):
        positions = length or x.shape[0]

        def kernel(x_ref, w_ref, o_ref):
            parts = [x_ref[o : o + block].astype(jnp.float32) for o in offsets]
            rows = [w_ref[n : n + 1].astype(jnp.float32) for n in range(len(offsets))]
            o_ref[...] = combine(parts, rows).astype(o_ref.dtype)

        rows = pl.Element(block + reach, (before, after))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((positions, x.shape[1]), x.dtype),
            grid=(pl.cdiv(x.shape[1], 8), pl.cdiv(positions, block)),
            in_specs=[
                pl.BlockSpec((rows, 8), lambda j, i: (i * block, j), fill=0),
                pl.BlockSpec((len(offsets), 8), lambda j, i: (0, j)),
            ],
            out_specs=pl.BlockSpec((block, 8), lambda j, i: (i, j)),
        )(x, w)

    def reference(x, w):
        positions = length or x.shape[0]
        past = positions + reach
        padded = jnp.pad(x, ((before, past), (0, 0))).astype(jnp.float32)
        parts = [padded[o : o + positions] for o in offsets]
        wide = w.astype(jnp.float32)
        rows = [wide[n : n + 1] for n in range(len(offsets))]
        return combine(parts, rows).astype(x.dtype)

    return run, reference


def operands(taps, positions=37, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (positions, 12), (taps, 12)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def check(run, reference, args, wanted=(0, 1), tolerance=1e-5):
    def gradient(f):
        total = lambda *args: jnp.sin(f(*args).astype(jnp.float32)).sum()
        return jax.jit(jax.grad(total, wanted))(*args)

    for a, b in zip(gradient(run), gradient(reference), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, tolerance, tolerance * np.abs(b).max())


def kernel_of_x(run, args):
    (kernel,) = kernels_in(run, *args)
    steps = full_plan(kernel).steps
    (step,) = (s for s in steps if any(r.name == "d_x_ref" for r in s.results))
    return step.kernel.text


LINEAR = {
    "causal": stencil((0, 1, 2, 3), 3),
    "ahead": stencil((0, 1, 2), 0, after=2),
    "centred": stencil((0, 1, 2), 1, after=1),
    "dilated": stencil((0, 4, 8), 8),
    "further than a block": stencil((0, 3, 7), 7, block=2),
    "scaled and subtracted": stencil(
        (0, 1), 1, combine=lambda p, w: -(p[0] * 2) / w[0] - p[1] * w[1]
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_sums_are_gathered(name):
    run, reference = LINEAR[name]
    args = operands(4 if name == "causal" else 3)
    text = kernel_of_x(run, args)
    # Blocks that are read overlap; those that are written do not.
    assert "out[element" not in text and "in[element" in text
    check(run, reference, args)
    check(run, reference, args, wanted=(0,))


def test_what_is_gathered_has_its_operands_type():
    run, reference = LINEAR["causal"]
    args = operands(4, dtype="bfloat16")
    assert "d_x_ref: ref<bf16" in kernel_of_x(lambda x: run(x, args[1]), args[:1])
    check(run, reference, args, tolerance=3e-2)


COMPUTED_AGAIN = {
    "a product of neighbours": stencil(
        (0, 1), 1, combine=lambda p, w: p[0] * p[1] * w[0]
    ),
    "a factor per row": stencil(
        (0, 1),
        1,
        combine=lambda p, w: (
            p[0] * w[0]
            + p[1] * (jax.lax.broadcasted_iota(jnp.int32, p[1].shape, 0) % 8) * w[1]
        ),
    ),
    "fewer blocks of results": stencil((0, 1, 2), 0, length=17),
}


@pytest.mark.parametrize("name", COMPUTED_AGAIN)
def test_what_programs_beside_add_is_computed_again(name):
    run, reference = COMPUTED_AGAIN[name]
    args = operands(3)
    assert "out[element" not in kernel_of_x(run, args)
    check(run, reference, args)


def test_sums_over_rows_are_not_computed_again():
    """A running sum of a block's rows would be computed for a few of them."""
    combine = lambda p, w: jnp.cumsum(p[0] * w[0], axis=0) + p[1] * w[1]
    run, _ = stencil((0, 1), 1, combine=combine, length=16)
    args = operands(2, positions=16)
    assert "out[element" in kernel_of_x(run, args)


def five_points(spec, block=8):
    """The five-point stencil over a padded field, by windows on it of some kind."""

    def run(x):
        rows, columns = (n - 2 for n in x.shape)

        def kernel(x_ref, o_ref):
            at = pl.program_id(0) * block
            x = x_ref[pl.ds(at, block + 2), :] if spec is None else x_ref[...]
            x = x.astype(jnp.float32)
            around = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
            o_ref[...] = (0.5 * x[1:-1, 1:-1] + 0.125 * around).astype(o_ref.dtype)

        whole = spec is None
        out = (block, columns if whole else block)
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
            grid=(rows // block, columns // out[1]),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY) if whole else spec],
            out_specs=pl.BlockSpec(out, lambda i, j: (i, j)),
        )(x)

    def reference(x):
        x = x.astype(jnp.float32)
        around = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
        return 0.5 * x[1:-1, 1:-1] + 0.125 * around

    return run, reference


HALO = pl.BlockSpec((pl.Element(10), pl.Element(10)), lambda i, j: (i * 8, j * 8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [HALO, None], ids=["halo", "slices of all"])
def test_a_stencil_in_two_dimensions(spec, dtype):
    run, reference = five_points(spec)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(26, 18)), dtype)
    text = kernel_of_x(run, [x])
    assert "out[element" not in text and text.count("pipeline") == 1
    (kernel,) = kernels_in(run, x)
    assert not full_plan(kernel).merges
    check(
        run, reference, [x], wanted=(0,), tolerance=3e-2 if dtype != "float32" else 1e-5
    )


def neighbours(x, block=8):
    """Rows above and below come from windows on the blocks beside, which stop at the
    edge, where a guard puts zero."""

    def kernel(above_ref, here_ref, below_ref, o_ref):
        i, last = pl.program_id(0), pl.num_programs(0) - 1
        x = here_ref[...]
        above = jnp.where(i > 0, above_ref[block - 1 :], 0.0)
        below = jnp.where(i < last, below_ref[:1], 0.0)
        up = jnp.concatenate([above, x[:-1]])
        down = jnp.concatenate([x[1:], below])
        o_ref[...] = x * x + 2.0 * up - 3.0 * down

    last = x.shape[0] // block - 1
    at = lambda f: pl.BlockSpec((block, x.shape[1]), lambda i: (f(i), 0))
    specs = [
        at(lambda i: jnp.maximum(i - 1, 0)),
        at(lambda i: i),
        at(lambda i: jnp.minimum(i + 1, last)),
    ]
    return pl.pallas_call(
        kernel, out_shape=x, grid=(last + 1,), in_specs=specs, out_specs=specs[1]
    )(x, x, x)


def carried(x, w, block=8):
    """A causal convolution that keeps the last rows of a block for the next."""

    def kernel(x_ref, w_ref, o_ref, last_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            last_ref[...] = jnp.zeros_like(last_ref)

        x = jnp.concatenate([last_ref[...], x_ref[...].astype(jnp.float32)])
        y = sum(x[n : n + block] * w_ref[n : n + 1, :] for n in range(4))
        o_ref[...] = y.astype(o_ref.dtype)
        last_ref[...] = x[block:]

    rows = pl.BlockSpec((block, x.shape[1]), lambda t: (t, 0))
    return pl.pallas_call(
        kernel,
        out_shape=x,
        grid=(x.shape[0] // block,),
        in_specs=[rows, pl.BlockSpec(w.shape, lambda t: (0, 0))],
        out_specs=rows,
        scratch_shapes=[pltpu.VMEM((3, x.shape[1]), jnp.float32)],
    )(x, w)


def grid_of(kernel):
    pipeline = Pipeline.of(find_pipeline(kernel))
    assert set(pipeline.semantics) == {"parallel"}
    return pipeline.sizes


def periodic(by, count, combine, whole):
    """Blocks of rows and those around them, past both ends those at the other one."""

    def run(x):
        def blocks(here_ref, after_ref, before_ref, o_ref):
            o_ref[...] = combine(here_ref[...], after_ref[...], before_ref[...])

        def rows(x_ref, o_ref):
            i = pl.program_id(0)
            at = lambda k: x_ref[pl.ds(jax.lax.rem(i * by + k, count * by), by)]
            o_ref[...] = combine(at(0), at(by), at((count - 1) * by))

        block = lambda k: pl.BlockSpec((by, 5), lambda i: ((i + k) % count, 0))
        several = [block(0), block(1), block(count - 1)]
        return pl.pallas_call(
            rows if whole else blocks,
            out_shape=x,
            grid=count,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] if whole else several,
            out_specs=block(0),
        )(*([x] if whole else [x, x, x]))

    roll = lambda x, k: jnp.roll(x, k * by, 0)
    return run, lambda x: combine(x, roll(x, -1), roll(x, 1))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("by, count", [(1, 7), (3, 5), (4, 2), (2, 3)])
@pytest.mark.parametrize(
    "combine",
    [lambda x, a, b: 2 * x - a + 3 * b, lambda x, a, b: jnp.sin(x) * a + x * b * b],
)
def test_places_may_go_round(by, count, combine, whole):
    run, reference = periodic(by, count, combine, whole)
    x = operands(1, by * count)[0][:, :5]
    (kernel,) = kernels_in(run, x)
    for step in full_plan(kernel).steps:
        kinds = Pipeline.of(find_pipeline(step.kernel)).semantics
        assert set(kinds) == {"parallel"}
    check(run, reference, [x], wanted=(0,))


def test_rows_of_the_blocks_beside():
    """The array is one operand, with one cotangent."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 12)), jnp.float32)
    report = pl.explain_grad(neighbours)(x)
    (kernel,) = report.kernels
    assert grid_of(kernel) == (4,) and len(kernel.outputs) == 1
    assert [row.operand for row in report.operands] == [
        "above_ref",
        "here_ref",
        "below_ref",
    ]
    assert "the same array as above_ref" in report.operands[1].why
    # Another call of the same kernel has refs of its own.
    assert len(pl.explain_grad(lambda x: neighbours(x))(x).operands) == 3
    gradient = jax.grad(lambda x: neighbours(x).sum())
    assert len(kernels_in(gradient, x)) == 2

    def reference(x):
        p = jnp.pad(x, ((1, 1), (0, 0)))
        return x * x + 2.0 * p[:-2] - 3.0 * p[2:]

    check(neighbours, reference, [x], wanted=(0,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_kept_for_the_next_step(dtype, monkeypatch):
    args = operands(4, positions=32, dtype=dtype)
    (kernel,) = kernels_in(carried, *args)
    made = full_plan(kernel, machine=Machine.usual(chip("h200")))
    by_name = {step.results[0].name: step.kernel for step in made.steps}
    assert grid_of(by_name["d_x_ref"]) == (4,)
    assert "for" not in by_name["d_x_ref"].text

    def reference(x, w):
        padded = jnp.pad(x.astype(jnp.float32), ((3, 0), (0, 0)))
        y = sum(padded[n : n + len(x)] * w[n].astype(jnp.float32) for n in range(4))
        return y.astype(x.dtype)

    monkeypatch.setattr(backward, "chip_for", lambda backend: chip("h200"))
    check(carried, reference, args, tolerance=3e-2 if dtype != "float32" else 1e-5)


def test_rows_of_a_matmul():
    def combine(parts, rows):
        return sum(jnp.dot(p, jnp.diag(r[0])) for p, r in zip(parts, rows, strict=True))

    run, reference = stencil((0, 1, 2), 2, combine=combine)
    args = operands(3)
    text = kernel_of_x(run, args)
    assert "out[element" not in text and text.count("= dot") == 3
    check(run, reference, args, wanted=(0,))


def convolved(x, w, by_rows):
    """3x3, of nine shifted matmuls: an image, or a row of one, in each program."""
    n, side, _, width = x.shape

    def kernel(*refs):
        *xs, w_ref, o_ref = refs
        shape = o_ref.shape
        total = jnp.zeros((w_ref.shape[3],), jnp.float32)
        for dy, dx in np.ndindex(3, 3):
            if by_rows:
                part = xs[dy][pl.ds(dx, side - 2), :]
            else:
                part = xs[0][dy : dy + side - 2, dx : dx + side - 2, :]
                part = part.reshape(-1, width)
            total += jnp.dot(part, w_ref[dy, dx], preferred_element_type=jnp.float32)
        o_ref[...] = total.reshape(shape).astype(o_ref.dtype)

    row = lambda d: pl.BlockSpec(
        (None, None, side, width), lambda i, y: (i, y + d, 0, 0)
    )
    image = pl.BlockSpec((None, side, side, width), lambda i: (i, 0, 0, 0))
    shape = (n, side - 2, side - 2, w.shape[3])
    out = pl.BlockSpec((None, *shape[1:]), lambda i: (i, 0, 0, 0))
    if by_rows:
        out = pl.BlockSpec((None, None, *shape[2:]), lambda i, y: (i, y, 0, 0))
    specs = [row(0), row(1), row(2)] if by_rows else [image]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        grid=(n, side - 2) if by_rows else (n,),
        in_specs=[*specs, pl.BlockSpec(w.shape, lambda *_: (0, 0, 0, 0))],
        out_specs=out,
    )(*[x] * len(specs), w)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "images"])
def test_shifts_are_of_what_is_multiplied(by_rows, dtype, monkeypatch):
    """Products are added up in registers, and each is of all rows of a block."""
    monkeypatch.setattr(backward, "chip_for", lambda backend: chip("h200"))
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.normal(size=size), dtype)
        for size in [(2, 7, 7, 8), (3, 3, 8, 16)]
    )
    run = lambda x, w: convolved(x, w, by_rows)
    with config.override(target="gpu:h200"):
        kernels = pl.explain_grad(run)(x, w).kernels
    (kernel,) = (k for k in kernels if k.outputs[0].ref.shape == x.shape)
    assert kernel.text.count("= dot") == 9 and "pad %" not in kernel.text
    assert "cond" not in kernel.text and grid_of(kernel)[0] == 2

    def reference(x, w):
        dims = ("NHWC", "HWIO", "NHWC")
        wide = x.astype(jnp.float32), w.astype(jnp.float32)
        y = jax.lax.conv_general_dilated(*wide, (1, 1), "VALID", dimension_numbers=dims)
        return y.astype(x.dtype)

    check(run, reference, [x, w], tolerance=3e-2 if dtype != "float32" else 1e-5)


def test_the_derivative_of_a_gathered_sum():
    run, reference = LINEAR["centred"]
    args = operands(3)

    def slope(f):
        total = lambda x, w: (jnp.sin(f(x, w)) * jnp.cos(x)).sum()
        return lambda x, w: jnp.sin(jax.grad(total)(x, w)).sum()

    for f in (jax.grad, lambda g, n: jax.jacfwd(g, n)):
        got, want = (jax.jit(f(slope(g), (0, 1)))(*args) for g in (run, reference))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, 1e-4, 1e-4)


@pytest.mark.parametrize("offsets", [(0, 8), (-4, 4), (0, 4, 8)], ids=str)
def test_starts_past_an_edge_are_clamped(offsets):
    """A slice that would reach outside begins where it fits, so its cotangent does."""
    rows, block, length = 32, 8, 8 if offsets == (0, 8) else 12

    def pieces(load, i):
        parts = [load(i * block + start)[-block:] for start in offsets]
        return sum(jnp.sin(n * part) for n, part in enumerate(parts, 1))

    def run(x):
        def kernel(x_ref, o_ref):
            load = lambda start: x_ref[pl.ds(start, length), :]
            o_ref[...] = pieces(load, pl.program_id(0))

        whole = pl.BlockSpec(x.shape, lambda i: (0, 0))
        out = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
        grid = (rows // block,)
        return pl.pallas_call(kernel, x, grid=grid, in_specs=[whole], out_specs=out)(x)

    def reference(x):
        fits = lambda start: min(max(start, 0), rows - length)
        load = lambda start: x[fits(start) : fits(start) + length]
        return jnp.concatenate([pieces(load, i) for i in range(rows // block)])

    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 5)), jnp.float32)
    check(run, reference, [x], wanted=(0,))


@pytest.mark.parametrize("padding", [(0, 0), (2, 3)], ids=str)
def test_windows_that_begin_before_the_array_are_clamped(padding):
    block, start = 8, -4

    def run(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = jnp.sin(x_ref[2:])

        shown = pl.Element(block + 2, padding), pl.Element(x.shape[1])
        return pl.pallas_call(
            kernel,
            out_shape=x,
            grid=(x.shape[0] // block,),
            in_specs=[pl.BlockSpec(shown, lambda i: (i * block + start, 0))],
            out_specs=pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0)),
        )(x)

    def reference(x):
        starts = [max(i * block + start, 0) + 2 for i in range(x.shape[0] // block)]
        padded = jnp.pad(x, (padding, (0, 0)))
        return jnp.concatenate([jnp.sin(padded[at : at + block]) for at in starts])

    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 5)), jnp.float32)
    check(run, reference, [x], wanted=(0,))
