"""Exponentials to base two. Text in, text out; and what it does to numbers."""

import textwrap

import numpy as np
import pytest

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.optimise.fold_exp2 import fold_exp2

LARGEST = float(np.finfo(np.float32).max)

# A softmax over steps: rows of scores times a factor, some of them masked.
RUNNING = """
kernel @k(%x: ref<f32[3,4,8] any>, %n: ref<i32[4,1] any>, %o: ref<f32[4] any>,
    %l: ref<f32[4,1] any>) outputs 2 {
  %c0: i32 = constant {value=0}
  %c1: i32 = constant {value=1}
  %c3: i32 = constant {value=3}
  %c8: i32 = constant {value=8}
  %low: f32[4,1] = constant {value=MASK}
  %zero: f32[4,1] = constant {value=0.0}
  %limits: i32[4,1] = load %n[:, :]
  %m, %s = for %c0, %c3, %c1, %low, %zero
    body (%j: i32, %m1: f32[4,1], %s1: f32[4,1]) {
      %raw: f32[4,8] = load %x[%j, :, :]
      %factor: f32[4,8] = constant {value=0.30000001192092896}
      %scores: f32[4,8] = mul %raw, %factor
      %masked: f32[4,8] = constant {value=MASK}
      %start: i32 = mul %j, %c8
      %at: i32[4,8] = iota {dim=1}
      %start1: i32[4,8] = broadcast_in_dim %start {shape=(4, 8), dims=()}
      %columns: i32[4,8] = add %at, %start1
      %limits1: i32[4,8] = broadcast_in_dim %limits {shape=(4, 8), dims=(0, 1)}
      %inside: bool[4,8] = lt %columns, %limits1
      %z: f32[4,8] = select_n %inside, %masked, %scores
      %top: f32[4] = reduce %z {kind="max", axes=(1,)}
      %top1: f32[4,1] = reshape %top {shape=(4, 1)}
      %m2: f32[4,1] = max %m1, %top1
      %d: f32[4,1] = sub %m1, %m2
      %shrink: f32[4,1] = exp %d
      %m3: f32[4,8] = broadcast_in_dim %m2 {shape=(4, 8), dims=(0, 1)}
      %d1: f32[4,8] = sub %z, %m3
      %p: f32[4,8] = exp %d1
      %sum: f32[4] = reduce %p {kind="sum", axes=(1,)}
      %sum1: f32[4,1] = reshape %sum {shape=(4, 1)}
      %s2: f32[4,1] = mul %s1, %shrink
      %s3: f32[4,1] = add %s2, %sum1
      yield %m2, %s3
    }
  store %l[:, :] = %s
  FINISH
}
"""
LSE = """
  %log: f32[4,1] = log %s
  %lse: f32[4,1] = add %m, %log
  %flat: f32[4] = reshape %lse {shape=(4,)}
  store %o[:] = %flat
"""
ROW_MAXIMUM = """
  %flat: f32[4] = reshape %m {shape=(4,)}
  store %o[:] = %flat
"""


def running(mask: float = -1e30, finish: str = LSE) -> Kernel:
    # A loop's results have no types of their own in the text.
    text = RUNNING.replace("%m, %s = for", "%m: f32[4,1], %s: f32[4,1] = for")
    text = text.replace("MASK", repr(float(np.float32(mask))))
    kernel = parse_kernel(text.replace("FINISH", finish))
    verify(kernel)
    return canonicalize(kernel)


def folded(kernel: Kernel) -> Kernel:
    new = fold_exp2(kernel)
    verify(new)
    return new


def names(kernel: Kernel) -> list[str]:
    return [op.name for op in walk(kernel.body)]


def run(kernel: Kernel, *arrays: np.ndarray) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        results = Walker(kernel, NumpyNumbers()).run([a.copy() for a in arrays])
    return [np.asarray(out) for out in results]


def test_running_softmax_is_in_base_two():
    """The factor joins the scale and the constants; the maximum is carried with it."""
    lines = folded(running()).text.split("\n")
    start = next(n for n, line in enumerate(lines) if " for " in line)
    assert textwrap.dedent("\n".join(lines[start:-2])) == textwrap.dedent("""\
        %m: f32[4,1], %s: f32[4,1] = for %c0, %c3, %c1, %0, %zero
          body (%j: i32, %m1: f32[4,1], %s1: f32[4,1]) {
            %raw: f32[4,8] = load %x[%j, :, :]
            %1: f32[4,8] = constant {value=0.432808518409729}
            %2: f32[4,8] = mul %raw, %1
            %3: f32[4,8] = constant {value=-1.4426950497748728e+30}
            %start: i32 = mul %j, %c8
            %at: i32[4,8] = iota {dim=1}
            %start1: i32[4,8] = broadcast_in_dim %start {shape=(4, 8), dims=()}
            %columns: i32[4,8] = add %at, %start1
            %limits1: i32[4,8] = broadcast_in_dim %limits {shape=(4, 8), dims=(0, 1)}
            %inside: bool[4,8] = lt %columns, %limits1
            %z: f32[4,8] = select_n %inside, %3, %2
            %top: f32[4] = reduce %z {kind="max", axes=(1,)}
            %4: f32[4,1] = broadcast_in_dim %top {shape=(4, 1), dims=(0,)}
            %m2: f32[4,1] = max %m1, %4
            %d: f32[4,1] = sub %m1, %m2
            %shrink: f32[4,1] = exp2 %d
            %m3: f32[4,8] = broadcast_in_dim %m2 {shape=(4, 8), dims=(0, 1)}
            %d1: f32[4,8] = sub %z, %m3
            %p: f32[4,8] = exp2 %d1
            %sum: f32[4] = reduce %p {kind="sum", axes=(1,)}
            %5: f32[4,1] = broadcast_in_dim %sum {shape=(4, 1), dims=(0,)}
            %s2: f32[4,1] = mul %s1, %shrink
            %s3: f32[4,1] = add %s2, %5
            yield %m2, %s3
          }
        store %l[:, :] = %s
        %log: f32[4,1] = log %s
        %6: f32[4,1] = constant {value=0.6931471824645996}
        %7: f32[4,1] = mul %m, %6
        %lse: f32[4,1] = add %7, %log
        %flat: f32[4] = reshape %lse {shape=(4,)}
        store %o[:] = %flat""")


@pytest.mark.parametrize("divisor", [3.0, -0.1, 1e-38, 1e-39, 0.0])
def test_a_division_by_a_constant_takes_the_factor(divisor: float):
    """Unless its inverse times the factor is no number."""
    text = RUNNING.replace("%m, %s = for", "%m: f32[4,1], %s: f32[4,1] = for")
    text = text.replace("mul %raw", "div %raw").replace("MASK", "-65536.0")
    text = text.replace("0.30000001192092896", repr(float(np.float32(divisor))))
    kernel = parse_kernel(text.replace("FINISH", LSE))
    new = folded(kernel)
    assert names(new).count("div") == (abs(divisor) < 1e-30)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 8)).astype(np.float32)
    arrays = x, np.array([[1], [7], [11], [24]], np.int32)
    for got, want in zip(run(new, *arrays), run(kernel, *arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5)


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0, 3e4])
@pytest.mark.parametrize(
    "mask", [-1e4, -1e30, -0.7 * LARGEST, -LARGEST, -np.inf], ids=str
)
def test_numbers(mask: float, scale: float):
    """Rows without any score, too: as before, 24 times exp(0), or NaN."""
    rng = np.random.default_rng(int(scale))
    x = (rng.standard_normal((3, 4, 8)) * scale).astype(np.float32)
    x[1, 3, 2:4] = x.max() * 2  # two equal maxima: both are exp(0)
    limits = np.array([[0], [1], [11], [24]], np.int32)
    kernel = running(mask)
    old, new = (run(k, x, limits) for k in (kernel, folded(kernel)))
    size = np.abs(x).max() * 0.3
    for a, b in zip(old, new, strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        # A rounding of the factor moves each score by that part of it.
        tolerance = 2e-6 + size * 2**-22
        finite = np.isfinite(a)
        np.testing.assert_allclose(b[finite], a[finite], rtol=tolerance)
    if mask > -np.inf:
        assert old[1][0, 0] == new[1][0, 0] == 24  # no score: all are the mask


POINTWISE = """
kernel @k(%x: ref<f32[64] any>, %o: ref<f32[64] any>) outputs 1 {
  %v: f32[64] = load %x[:]
  %c: f32[64] = constant {value=0.699999988079071}
  CODE
  %r: f32[64] = exp %y
  store %o[:] = %r
}
"""


def pointwise(code: str) -> Kernel:
    return canonicalize(parse_kernel(POINTWISE.replace("CODE", code)))


def test_large_arguments():
    """From where exp is 0 to where it is infinite, as exact as the product was."""
    kernel = pointwise("%y: f32[64] = mul %v, %c")
    new = folded(kernel)
    assert "exp2" in names(new) and "exp" not in names(new)
    x = np.concatenate(
        [np.linspace(-1e4, 100, 32), np.linspace(-130, 127, 30), [-np.inf, np.inf]]
    ).astype(np.float32)
    (got,), (old,) = run(new, x), run(kernel, x)
    argument = x.astype(np.float64) * float(np.float32(0.7))
    with np.errstate(over="ignore"):
        exact = np.exp(argument)
    assert np.isnan(got).sum() == 0
    np.testing.assert_array_equal(got == 0, old == 0)
    np.testing.assert_array_equal(np.isinf(got), np.isinf(old))
    usual = (exact > 1e-37) & (exact < 3e38)
    units = np.abs(got[usual] / exact[usual] - 1) * 2**23
    assert (units <= 3 + 1.5 * np.abs(argument[usual])).all()


def test_numbers_from_memory_are_left_alone():
    """A softmax of what is loaded: a product per element would cost, and round."""
    code = """
      %top: f32[] = reduce %v {kind="max", axes=(0,)}
      %m: f32[64] = broadcast_in_dim %top {shape=(64,), dims=()}
      %y: f32[64] = sub %v, %m
    """.replace("f32[]", "f32")
    kernel = pointwise(code)
    assert fold_exp2(kernel) is kernel


def test_maximum_that_is_seen_stays_as_it_is():
    kernel = running(finish=ROW_MAXIMUM)
    assert fold_exp2(kernel) is kernel


@pytest.mark.parametrize(
    "mask", [-1e4, -1e30, -0.7 * LARGEST, -LARGEST, -np.inf], ids=str
)
def test_maximum_of_what_was_rounded_is_stored_in_its_own_base(mask: float):
    """As the scores of attention are; the mask of rows without scores is exact."""
    loaded = "%raw: f32[4,8] = load %x[%j, :, :]"
    twice = loaded.replace("%raw", "%half") + "\n %raw: f32[4,8] = add %half, %half"
    text = RUNNING.replace("%m, %s = for", "%m: f32[4,1], %s: f32[4,1] = for")
    text = text.replace("MASK", repr(float(np.float32(mask))))
    kernel = parse_kernel(text.replace("FINISH", ROW_MAXIMUM).replace(loaded, twice))
    new = folded(kernel)
    assert "exp" not in names(new) and names(new).count("exp2") == 2
    x = np.random.default_rng(0).standard_normal((3, 4, 8)).astype(np.float32)
    limits = np.array([[0], [1], [11], [24]], np.int32)
    (top, total), (top2, total2) = run(kernel, x, limits), run(new, x, limits)
    np.testing.assert_allclose(top2, top, rtol=1e-6)
    np.testing.assert_allclose(total2, total, rtol=1e-5)
    assert top2[0] == np.float32(mask)


@pytest.mark.parametrize("other", ["-2e30", "2e30"])
def test_stored_maxima_of_two_constants_stay(other: str):
    """Each would have to be told from the other."""
    loaded = "%raw: f32[4,8] = load %x[%j, :, :]"
    twice = loaded.replace("%raw", "%half") + "\n %raw: f32[4,8] = add %half, %half"
    text = RUNNING.replace("%m, %s = for", "%m: f32[4,1], %s: f32[4,1] = for")
    text = text.replace("{value=MASK}", "{value=-1e30}", 1).replace("MASK", other)
    kernel = parse_kernel(text.replace("FINISH", ROW_MAXIMUM).replace(loaded, twice))
    assert fold_exp2(kernel) is kernel


def test_rows_from_memory_are_multiplied():
    """As in a backward kernel: one product per row, none per element."""
    code = """
      %w: f32[64] = mul %v, %c
      %one: f32 = load %x[0]
      %m: f32[64] = broadcast_in_dim %one {shape=(64,), dims=()}
      %y: f32[64] = sub %w, %m
    """
    new = folded(pointwise(code))
    assert [n for n in names(new) if n in ("mul", "exp", "exp2")] == [
        "mul",
        "mul",
        "exp2",
    ]
    x = np.linspace(-8, 8, 64, dtype=np.float32)
    np.testing.assert_allclose(
        run(new, x)[0], np.exp(0.7 * x.astype(np.float64) + 8), rtol=1e-5
    )


LARGE = """
      %w: f32[64] = mul %v, %c
      %masked: f32[64] = constant {value=MASK}
      %column: i32[64] = iota {dim=0}
      %half: i32[64] = constant {value=32}
      %inside: bool[64] = lt %column, %half
      %z: f32[64] = select_n %inside, %masked, %w
      %one: f32 = load %x[63]
      %m: f32[64] = broadcast_in_dim %one {shape=(64,), dims=()}
      %y: f32[64] = OP %z, %m
"""


@pytest.mark.parametrize("op", ["sub", "max"])
@pytest.mark.parametrize("mask", [-1e30, -LARGEST, -np.inf])
@pytest.mark.parametrize("row", [-1e30, -LARGEST, LARGEST, 1.0, np.inf, -np.inf])
def test_large_numbers_from_memory(mask: float, row: float, op: str):
    """A row that equals the mask still does; nothing finite becomes infinite."""
    code = LARGE.replace("MASK", repr(float(np.float32(mask)))).replace("OP", op)
    if op == "max":
        code = code.replace("%y:", "%most:") + "  %y: f32[64] = sub %most, %m"
    kernel = pointwise(code)
    new = folded(kernel)
    assert "exp" not in names(new)
    x = np.linspace(-8, 8, 64, dtype=np.float32)
    x[63] = row
    (got,), (want,) = run(new, x), run(kernel, x)
    np.testing.assert_allclose(got, want, rtol=2e-5)


def test_through_columns_side_by_side():
    """A maximum in all columns of half a tile, as a TPU keeps it, and two of those."""
    widened = """\
      %m4: f32[4,4] = broadcast_in_dim %m2 {shape=(4, 4), dims=(0, 1)}
      %m3: f32[4,8] = concatenate %m4, %m4 {axis=1}"""
    old = "      %m3: f32[4,8] = broadcast_in_dim %m2 {shape=(4, 8), dims=(0, 1)}"
    text = RUNNING.replace("%m, %s = for", "%m: f32[4,1], %s: f32[4,1] = for")
    text = text.replace("MASK", "-1e30").replace("FINISH", LSE).replace(old, widened)
    kernel = parse_kernel(text)
    new = folded(kernel)
    assert "exp" not in names(new) and names(new).count("exp2") == 2
    x = np.random.default_rng(0).standard_normal((3, 4, 8)).astype(np.float32)
    limits = np.array([[1], [5], [11], [24]], np.int32)
    for a, b in zip(run(kernel, x, limits), run(new, x, limits), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
