"""Reductions along a dimension as loops over its parts: the same meaning."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.optimise.split_accesses import split_accesses
from pallasite.passes.run import run
from pallasite.passes.schedule.gpu_blocks import for_gpu
from pallasite.passes.schedule.loop_over_rows import loop_over_rows
from pallasite.passes.schedule.reblock import cut
from pallasite.sites import kernels_in
from pallasite.target import GPUS
from tests.passes.test_same_meaning import outputs

KEYS = (1, 0)  # rows of the second operand
F32 = jnp.float32


def softmax(s):
    return jax.nn.softmax(s, axis=-1)


def by_hand(s):
    p = jnp.exp(s - s.max(axis=-1, keepdims=True))
    return p * (1.0 / p.sum(axis=-1, keepdims=True))


def base_two(s):
    p = jnp.exp2(2.0 * s - 2.0 * s.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def masked(s):
    i, j = (jax.lax.broadcasted_iota(jnp.int32, s.shape, d) for d in (0, 1))
    return softmax(jnp.where(j > i + 3, s, -jnp.inf))


def least(s):
    """Not relative to a maximum: three loops."""
    low, high = s.min(axis=-1, keepdims=True), s.max(axis=-1, keepdims=True)
    return (s - low) / (1 + high - low)


def attention(weights, dtype=F32, last=lambda p, v, d: jnp.dot(p, v)) -> Kernel:
    def kernel(q_ref, k_ref, v_ref, o_ref):
        q, k, v = (ref[...].astype(dtype) for ref in (q_ref, k_ref, v_ref))
        s = jnp.dot(q, k.T, preferred_element_type=F32)
        o_ref[...] = last(weights(s).astype(dtype), v, dtype).astype(F32)

    whole = pl.BlockSpec((16, 4), lambda i: (0, 0))
    rows = pl.BlockSpec((4, 4), lambda i: (i, 0))
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((8, 4), F32), grid=(2,),
                          in_specs=[rows, whole, whole], out_specs=rows)  # fmt: skip
    shapes = [jax.ShapeDtypeStruct((n, 4), F32) for n in (8, 16, 16)]
    (found,) = kernels_in(call, *shapes)
    return run(found)


def assert_same(kernel: Kernel, size: int, tolerance: float = 1e-5) -> Kernel:
    new = canonicalize(loop_over_rows(kernel, KEYS, size))
    verify(new)
    rng = np.random.default_rng(0)
    shapes = [p.ref.shape for p in kernel.inputs]
    arrays = [3 * rng.standard_normal(s).astype(np.float32) for s in shapes]
    for a, b in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)
    return new


def loops_and_products(kernel: Kernel) -> tuple[int, int]:
    names = [op.name for op in walk(kernel.body)]
    return names.count("for"), names.count("dot")


@pytest.mark.parametrize("size", [2, 8, 5])
@pytest.mark.parametrize("weights", [softmax, by_hand, base_two, masked])
def test_a_softmax_is_one_loop(weights, size: int):
    new = assert_same(attention(weights), size)
    assert loops_and_products(new) == (1, 2)
    assert f"f32[4,{size}]" in new.text and "f32[4,16]" not in new.text


def test_sums_are_as_wide_as_those_of_a_matmul():
    last = lambda p, v, dtype: jnp.dot(p, v, preferred_element_type=dtype)
    new = assert_same(attention(softmax, jnp.bfloat16, last), 4, 3e-2)
    dots = [op for op in walk(new.body) if op.name == "dot"]
    assert all(op.result.tile.dtype.name == "f32" for op in dots)


def test_other_reductions_are_loops_one_after_another():
    new = assert_same(attention(least), 4)
    assert loops_and_products(new) == (2, 3)


def test_scores_far_below_zero():
    new = assert_same(attention(lambda s: softmax(s - 1e30)), 4)
    assert loops_and_products(new)[0] == 1


def doubled(s):
    """Of products: parts of one cannot be merged by the ops that there are."""
    return s * s.prod(axis=-1, keepdims=True)


@pytest.mark.parametrize(
    "weights, size, reason",
    [(softmax, 17, "several parts"), (softmax, 16, "several parts"),
     (lambda s: jnp.sort(softmax(s)), 4, "runs along it"),
     (lambda s: jnp.cumsum(s, 1) * jax.lax.cummax(s, 1, reverse=True), 4, "two orders"),
     (doubled, 4, "in parts")],
)  # fmt: skip
def test_what_stays(weights, size: int, reason: str):
    with pytest.raises(CannotReblock, match=reason):
        loop_over_rows(attention(weights), KEYS, size)


@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("shape", [(24, 1100), (1, 33000), (64, 300)], ids=str)
def test_tiles_beyond_all_registers_on_a_gpu(shape, kind):
    """What a program reduces to little needs no tile of everything."""

    def kernel(x_ref, y_ref, o_ref):
        apart = x_ref[...].astype(F32) - y_ref[...].astype(F32)
        o_ref[...] = getattr(jnp, kind)(apart * apart, keepdims=True)

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((1, 1), F32))
    (before,) = kernels_in(call, *[jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 2)
    chip = replace(GPUS["h200"], registers=1 << 14)
    before = run(before)
    after = for_gpu(before, chip)
    (loop,) = (op for op in walk(after.body) if op.name == "for")
    sizes = [v.tile.size for op in walk(loop.regions[0]) for v in op.results]
    assert max(sizes) <= 1 << 14
    verify(after)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=shape).astype(jnp.bfloat16) for _ in range(2)]
    for got, want in zip(outputs(after, given), outputs(before, given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def cumulative(s):
    """What is scanned is normed first; the sums of exponentials need two loops."""
    return jnp.cumsum(softmax(s), axis=-1)


@pytest.mark.parametrize("size", [2, 8])
def test_a_scan_is_part_of_each_loop_that_needs_it(size: int):
    new = assert_same(attention(cumulative), size)
    loops = [op for op in walk(new.body) if op.name == "for"]
    scans = [op for op in walk(new.body) if op.name == "scan"]
    assert len(loops) == 2 and len(scans) == 1
    assert all(op.result.tile.shape == (4, size) for op in scans)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "scan, dtype",
    [("cumsum", F32), ("cumsum", jnp.bfloat16), ("cummax", F32), ("cummin", jnp.int32)],
)
@pytest.mark.parametrize("axis", [0, 1])  # fmt: skip
def test_a_scan_goes_on_from_the_part_before(axis: int, scan: str, dtype, reverse):
    def kernel(x_ref, o_ref, most_ref):
        x, along = x_ref[...], getattr(jax.lax, scan)
        o_ref[...] = along(x, axis=axis, reverse=reverse)
        most_ref[...] = along(x, axis=1 - axis).max(axis, keepdims=True)

    shape = jax.ShapeDtypeStruct((12, 24), dtype)
    line = jax.ShapeDtypeStruct((1, 24) if axis == 0 else (12, 1), dtype)
    before = called(kernel, [shape], (shape, line))
    after = canonicalize(loop_over_rows(before, (0, axis), 4))
    verify(after)
    tiles = [v.tile for op in walk(after.body) for v in op.results if not v.is_ref]
    assert max(tile.size for tile in tiles) == 4 * (24 if axis == 0 else 12)
    arrays = [np.random.default_rng(3).integers(-9, 9, (12, 24)).astype(dtype)]
    for got, want in zip(outputs(after, arrays), outputs(before, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("shape, axis", [((48, 3000), 0), ((2, 70000), 1)])
def test_scans_beyond_all_registers_on_a_gpu(shape, axis: int, dtype):
    """Sums along both dimensions, of which a block hands the last to the next."""

    def kernel(x_ref, o_ref, carry_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            carry_ref[...] = jnp.zeros_like(carry_ref)

        s = jnp.cumsum(x_ref[...].astype(F32), axis=1 - axis)
        s = jnp.cumsum(s, axis=axis) + carry_ref[...]
        o_ref[...] = s
        carry_ref[...] = s[-1:] if axis == 0 else s[:, -1:]

    block = pl.BlockSpec(shape, lambda i: (i, 0) if axis == 0 else (0, i))
    line = (1, shape[1]) if axis == 0 else (shape[0], 1)
    whole = tuple(n * (1 + (d == axis)) for d, n in enumerate(shape))
    given, out = (jax.ShapeDtypeStruct(whole, d) for d in (dtype, F32))
    scratch = [pltpu.VMEM(line, F32)]
    before = called(kernel, [given], out, [block], block, (2,), scratch)
    after = for_gpu(split_accesses(before), GPUS["h200"])
    verify(after)
    tiles = [v.tile for op in walk(after.body) for v in op.results if not v.is_ref]
    assert max(tile.size for tile in tiles) < GPUS["h200"].registers
    arrays = [np.random.default_rng(4).integers(-9, 9, given.shape).astype(dtype)]
    for got, want in zip(outputs(after, arrays), outputs(before, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_scan_of_other_parts_stays():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.cumsum(x_ref[...], axis=0)

    shape = jax.ShapeDtypeStruct((10, 4), F32)
    with pytest.raises(CannotReblock, match="whole parts"):
        loop_over_rows(called(kernel, [shape], shape), (0, 0), 4)


def called(kernel, shapes, out, in_specs=None, out_specs=None, grid=(),
           scratch=()) -> Kernel:  # fmt: skip
    specs = {} if in_specs is None else dict(in_specs=in_specs, out_specs=out_specs)
    call = pl.pallas_call(kernel, out, grid=grid, scratch_shapes=scratch, **specs)
    (found,) = kernels_in(call, *shapes)
    return run(found)


def nearest(kind: str, dtype) -> Kernel:
    def kernel(x_ref, c_ref, d_ref, i_ref):
        gap = x_ref[...][:, None] - c_ref[...][None, :]
        d_ref[...] = getattr(jnp, kind)(gap, axis=1)
        i_ref[...] = getattr(jnp, f"arg{kind}")(gap, axis=1).astype(jnp.int32)

    shapes = [jax.ShapeDtypeStruct((n,), dtype) for n in (6, 24)]
    out = [jax.ShapeDtypeStruct((6,), d) for d in (dtype, jnp.int32)]
    return called(kernel, shapes, out)


@pytest.mark.parametrize("kind", ["min", "max"])
@pytest.mark.parametrize("size", [4, 7])
@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16, jnp.int32, jnp.uint8], ids=str)
def test_the_first_of_equals_has_its_position(kind: str, size: int, dtype):
    before = nearest(kind, dtype)
    after = canonicalize(loop_over_rows(before, (1, 0), size))
    verify(after)
    assert loops_and_products(after) == (1, 0) and "[6,24]" not in after.text
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 4, n).astype(dtype) for n in (6, 24)]
    for got, want in zip(outputs(after, arrays), outputs(before, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["min", "max"])
@pytest.mark.parametrize("at", [[3], [21], [9, 17, 2], range(24)], ids=str)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [4, 7])
def test_the_first_nan_has_its_position(kind: str, at, number, size: int):
    before = nearest(kind, F32)
    after = loop_over_rows(before, (1, 0), size)
    x, c = np.zeros(6, np.float32), np.arange(24, dtype=np.float32) % 5
    c[list(at)] = number
    pairs = zip(outputs(after, [x, c]), outputs(before, [x, c]), strict=True)
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)


def group_norm(rows: int, groups: int, per: int, dtype=F32) -> Kernel:
    def kernel(x_ref, g_ref, o_ref):
        x = x_ref[0].astype(F32)
        mean = x.sum(0).reshape(groups, per).sum(1) / (rows * per)
        mean = jnp.broadcast_to(mean[:, None], (groups, per)).reshape(-1)
        x = (x - mean) * g_ref[...]
        o_ref[0] = (x * jax.nn.sigmoid(x)).astype(dtype)

    shape = jax.ShapeDtypeStruct((2, rows, groups * per), dtype)
    block = pl.BlockSpec((1, rows, groups * per), lambda i: (i, 0, 0))
    whole = pl.BlockSpec((groups * per,), lambda i: (0,))
    scale = jax.ShapeDtypeStruct((groups * per,), F32)
    return called(kernel, [shape, scale], shape, [block, whole], block, (2,))


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_results_are_stored_part_by_part(size: int, dtype):
    before = group_norm(9, 4, 5, dtype)
    after = canonicalize(loop_over_rows(before, (0, 1), size))
    verify(after)
    assert loops_and_products(after) == (2, 0)
    assert "%x_ref_1[:, :]" not in after.text
    rng = np.random.default_rng(2)
    arrays = [
        rng.normal(size=p.ref.shape).astype(p.ref.dtype.np) for p in before.inputs
    ]
    (got,), (want,) = outputs(after, arrays), outputs(before, arrays)
    np.testing.assert_allclose(*(a.astype("f4") for a in (got, want)), rtol=1e-2)


def test_a_result_that_is_read_is_not_stored_part_by_part():
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x / x.sum(0)

        @pl.loop(0, 2)
        def _(_):
            o_ref[...] += x

    shape = jax.ShapeDtypeStruct((8, 4), F32)
    with pytest.raises(CannotReblock, match="is written"):
        loop_over_rows(called(kernel, [shape], shape), (0, 0), 2)


@pytest.mark.parametrize("n", [49, 64])
def test_a_batch_that_is_summed_is_a_loop_of_products_on_a_gpu(n: int):
    """As in the gradient of attention in windows, whose bias is the same for all."""

    def kernel(x_ref, y_ref, o_ref, sum_ref):
        s = jnp.einsum("wid,wjd->wij", x_ref[:, 0], y_ref[:, 0])
        o_ref[:, 0] = jnp.einsum("wij,wjd->wid", s, y_ref[:, 0])
        sum_ref[0, 0] = s.sum(0)

    blocks = [jax.ShapeDtypeStruct((8, 3, n, 16), F32)] * 2
    out = [blocks[0], jax.ShapeDtypeStruct((2, 3, n, n), F32)]
    spec = pl.BlockSpec((4, 1, n, 16), lambda i, h: (i, h, 0, 0))
    sums = pl.BlockSpec((1, 1, n, n), lambda i, h: (i, h, 0, 0))
    before = called(kernel, blocks, out, [spec] * 2, [spec, sums], (2, 3))
    after = for_gpu(before, GPUS["h200"])
    verify(after)
    dots = [op for op in walk(after.body) if op.name == "dot"]
    assert len(dots) >= 2 and all(op.result.tile.rank == 2 for op in dots)
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=(8, 3, n, 16)).astype("f4") for _ in range(2)]
    for got, want in zip(outputs(after, arrays), outputs(before, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("groups, per", [(4, 5), (30, 12)])
@pytest.mark.parametrize("rows", [49, 64])
def test_groups_of_channels_are_programs_on_a_gpu(rows: int, groups: int, per: int):
    """Channels by groups divide programs; positions are loops where they do not fit."""
    before = group_norm(rows, groups, per)
    after = for_gpu(before, replace(GPUS["h200"], registers=1 << 9))
    verify(after)
    sizes = [v.tile.size for op in walk(after.body) for v in op.results if not v.is_ref]
    assert max(sizes) < 1 << 9
    rng = np.random.default_rng(4)
    arrays = [rng.normal(size=p.ref.shape).astype("f4") for p in before.inputs]
    (got,), (want,) = outputs(after, arrays), outputs(before, arrays)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [2, 4])
def test_programs_have_whole_groups_of_channels(parts: int):
    before = group_norm(9, 4, 5)
    after = cut(before, (0, 2), parts)
    verify(after)
    assert f"[9,{20 // parts}]" in after.text and f"f32[{4 // parts},5]" in after.text
    rng = np.random.default_rng(6)
    arrays = [rng.normal(size=p.ref.shape).astype("f4") for p in before.inputs]
    (got,), (want,) = outputs(after, arrays), outputs(before, arrays)
    np.testing.assert_array_equal(got, want)


def test_rows_of_two_dimensions_are_loops_over_the_first():
    def kernel(x_ref, o_ref):
        x = x_ref[...].reshape(24, 8)
        o_ref[...] = (x - x.sum(0)).reshape(6, 4, 8)

    shape = jax.ShapeDtypeStruct((6, 4, 8), F32)
    before = called(kernel, [shape], shape)
    after = canonicalize(loop_over_rows(before, (0, 0), 2))
    verify(after)
    assert loops_and_products(after) == (2, 0) and "f32[24,8]" not in after.text
    x = np.random.default_rng(5).normal(size=(6, 4, 8)).astype("f4")
    np.testing.assert_allclose(outputs(after, [x])[0], outputs(before, [x])[0], 1e-5)


@pytest.mark.parametrize(
    "centres, depth, part", [(1000, 64, 125), (4096, 256, 128), (1009, 64, 128)]
)
def test_parts_of_what_is_reduced_are_no_power_of_two(centres, depth, part):
    """And the longest of two dimensions that are reduced is divided."""

    def kernel(x_ref, c_ref, d_ref):
        x, c = x_ref[...], c_ref[...]
        gap = (x * x).sum(1)[:, None] + (c * c).sum(1)[None, :] - 2 * jnp.dot(x, c.T)
        d_ref[...] = gap.min(1)

    shapes = [jax.ShapeDtypeStruct((n, depth), F32) for n in (256, centres)]
    specs = [pl.BlockSpec((128, depth), lambda i: (i, 0)),
             pl.BlockSpec((centres, depth), lambda i: (0, 0))]  # fmt: skip
    row = pl.BlockSpec((128,), lambda i: (i,))
    out = jax.ShapeDtypeStruct((256,), F32)
    before = called(kernel, shapes, out, specs, row, (2,))
    after = for_gpu(before, GPUS["h200"])
    verify(after)
    assert f",{part}] = dot" in after.text and f",{centres}]" not in after.text


def test_a_prime_number_of_rows_is_divided_past_the_array():
    """Queries, too, not only the keys that are reduced."""

    def kernel(q_ref, k_ref, v_ref, o_ref):
        s = jnp.dot(q_ref[0], k_ref[0].T, preferred_element_type=F32)
        p = jax.nn.softmax(s, axis=-1).astype(v_ref.dtype)
        o_ref[0] = jnp.dot(p, v_ref[0], preferred_element_type=F32)

    shapes = [jax.ShapeDtypeStruct((3, 257, 64), jnp.bfloat16)] * 3
    spec = pl.BlockSpec((1, 257, 64), lambda i: (i, 0, 0))
    out = jax.ShapeDtypeStruct((3, 257, 64), F32)
    before = called(kernel, shapes, out, [spec] * 3, spec, (3,))
    after = for_gpu(before, GPUS["h200"])
    verify(after)
    assert "f32[257" not in after.text.split("body")[1]
    rng = np.random.default_rng(7)
    arrays = [rng.normal(size=(3, 257, 64)).astype(jnp.bfloat16) for _ in range(3)]
    (got,), (want,) = outputs(after, arrays), outputs(before, arrays)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("size", [7, 8, 29])
def test_a_maximum_that_is_stored_may_be_minus_infinity(size: int):
    def kernel(x_ref, m_ref, s_ref):
        x = x_ref[...]
        m_ref[...] = m = x.max(0, keepdims=True)
        s_ref[...] = jnp.exp(x - m).sum(0, keepdims=True)

    x = np.random.default_rng(0).normal(size=(58, 8)).astype(np.float32)
    x[:, 2], x[:, 3], x[:30, 4] = -np.inf, np.finfo(np.float32).min, -np.inf
    out = jax.ShapeDtypeStruct((1, 8), F32)
    (given,) = kernels_in(lambda x: pl.pallas_call(kernel, (out, out))(x), x)
    looped = loop_over_rows(run(given), (0, 0), size)
    verify(looped)
    assert loops_and_products(looped) == (1, 0)
    (got, sums), (want, of_one) = outputs(looped, [x]), outputs(given, [x])
    np.testing.assert_array_equal(got, want)
    rows = np.isfinite(want)
    np.testing.assert_allclose(sums[rows], of_one[rows], rtol=1e-5)


@pytest.mark.parametrize("size", [7, 8, 29])
def test_a_maximum_with_the_log_of_its_sum_is_one(size: int):
    """Where all is minus infinity, the log says so; else it is the maximum."""

    def kernel(x_ref, l_ref):
        x = x_ref[...]
        m = x.max(0, keepdims=True)
        l_ref[...] = m + jnp.log(jnp.exp(x - m).sum(0, keepdims=True))

    x = np.random.default_rng(0).normal(size=(58, 8)).astype(np.float32)
    x[:, 2], x[:, 3], x[:30, 4] = -np.inf, np.finfo(np.float32).min, -np.inf
    out = jax.ShapeDtypeStruct((1, 8), F32)
    (given,) = kernels_in(lambda x: pl.pallas_call(kernel, out)(x), x)
    looped = loop_over_rows(run(given), (0, 0), size)
    verify(looped)
    assert looped.text.count("= max") == 1
    (got,), (want,) = outputs(looped, [x]), outputs(given, [x])
    # In order, the sum of a column of minus infinities is NaN, as its maximum is.
    assert got[0, 2] == -np.inf and np.isnan(want[0, 2])
    np.testing.assert_allclose(np.delete(got, 2), np.delete(want, 2), rtol=1e-5)
