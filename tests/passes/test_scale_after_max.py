"""Maxima of products become products of maxima. Text in, text out; and numbers."""

import textwrap

import numpy as np
import pytest

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.scale_after_max import scale_after_max

SOFTMAX = """\
kernel @k(%x: ref<f32[4,8] any>, %o: ref<f32[4,8] any>) outputs 1 {
  %v: f32[4,8] = load %x[:, :]
  %c: f32[4,8] = constant {value=FACTOR}
  %s: f32[4,8] = mul %v, %c
  %top: f32[4] = reduce %s {kind="KIND", axes=(1,)}
  %m: f32[4,8] = broadcast_in_dim %top {shape=(4, 8), dims=(0,)}
  %d: f32[4,8] = sub %s, %m
  store %o[:, :] = %d
}
"""


def softmax(factor: float, kind: str = "max") -> Kernel:
    value = repr(float(np.float32(factor)))
    kernel = parse_kernel(SOFTMAX.replace("FACTOR", value).replace("KIND", kind))
    verify(kernel)
    return kernel


def test_the_factor_is_applied_to_the_maximum():
    new = scale_after_max(softmax(0.125))
    verify(new)
    body = new.text[new.text.index("  %s:") : new.text.rindex("}")]
    assert textwrap.dedent(body) == textwrap.dedent("""\
        %s: f32[4,8] = mul %v, %c
        %0: f32[4] = reduce %v {kind="max", axes=(1,)}
        %1: f32[4] = constant {value=0.125}
        %2: f32[4] = mul %0, %1
        %m: f32[4,8] = broadcast_in_dim %2 {shape=(4, 8), dims=(0,)}
        %d: f32[4,8] = sub %s, %m
        store %o[:, :] = %d
    """)


@pytest.mark.parametrize("factor", [0.0, -0.125, float("inf"), float("nan")])
def test_other_factors_change_the_order(factor: float):
    kernel = softmax(factor)
    assert scale_after_max(kernel) is kernel


def test_sums_round_after_each_product():
    kernel = softmax(0.125, kind="sum")
    assert scale_after_max(kernel) is kernel


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("factor", [0.1275, 3.4e38, 1e-45, 1.4426950408889634])
def test_every_bit_is_the_same(kind: str, factor: float):
    kernel = softmax(factor, kind)
    new = scale_after_max(kernel)
    assert new is not kernel
    rng = np.random.default_rng(0)
    for scale in (1.0, 1e-40, 1e38):
        x = (rng.normal(size=(4, 8)) * scale).astype(np.float32)
        x[1, 3], x[2, 5], x[3, 0] = -np.inf, np.inf, np.nan
        with np.errstate(all="ignore"):
            a, b = (
                np.asarray(Walker(k, NumpyNumbers()).run([x.copy()])[0])
                for k in (kernel, new)
            )
        np.testing.assert_array_equal(a, b)
