"""Factors of what loops multiply and add up leave the loops. Text in, text out."""

import numpy as np
import pytest

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.scale_after_sum import scale_after_sum

SUM = """\
kernel @k(%x: ref<f32[32,8] any>, %y: ref<bf16[32,8] any>, %o: ref<f32[8,8] any>) outputs 1 {
  %first: i32 = constant {value=0}
  %limit: i32 = constant {value=4}
  %step: i32 = constant {value=1}
  %none: f32[8,8] = constant {value=0.0}
  %c: f32[8,8] = constant {value=FACTOR}
  %sum: f32[8,8] = for %first, %limit, %step, %none
    body (%n: i32, %acc: f32[8,8]) {
      %xs: f32[8,8] = load %x[0:+8, :]
      %ys: bf16[8,8] = load %y[8:+8, :]
      %seen: bool[8,8] = gt %xs, %none
      %scaled: f32[8,8] = mul %xs, %c
      %masked: f32[8,8] = select_n %seen, %none, %scaled
      %narrow: bf16[8,8] = cast %masked {dtype=bf16}
      %d: f32[8,8] = dot %narrow, %ys {contract=((0,), (0,)), batch=((), ()), dtype=f32, precision=None}
      %next: f32[8,8] = add %acc, %d
      yield %next
    }
  store %o[:, :] = %sum
}
"""  # noqa: E501


LEFT = """\
      %seen: bool[8,8] = gt %xs, %none
      %masked: f32[8,8] = select_n %seen, %none, %xs
      %narrow: bf16[8,8] = cast %masked {dtype=bf16}
      %d: f32[8,8] = dot %narrow, %ys {contract=((0,), (0,)), batch=((), ()), dtype=f32, precision=None}
      %next: f32[8,8] = add %acc, %d
      yield %next
    }
  %1: f32[8,8] = constant {value=0.09375}
  %2: f32[8,8] = mul %0, %1
  store %o[:, :] = %2
}
"""  # noqa: E501


def total(factor: float = 0.09375, change: tuple[str, str] = ("", "")) -> Kernel:
    text = SUM.replace("FACTOR", repr(factor))
    assert change[0] in text
    kernel = parse_kernel(text.replace(*change) if change[0] else text)
    verify(kernel)
    return kernel


def test_the_factor_is_applied_to_the_sum():
    new = scale_after_sum(total())
    verify(new)
    assert new.text[new.text.index("      %seen") :] == LEFT


def test_the_factor_of_a_product_is_applied_to_the_sum():
    change = (
        "%next: f32[8,8] = add %acc, %d",
        """%times: f32[8,8] = mul %d, %c
      %next: f32[8,8] = add %acc, %times""",
    )
    kernel = total(1.0, change)
    kernel = parse_kernel(kernel.text.replace("value=1.0", "value=3.0"))
    new = scale_after_sum(kernel)
    verify(new)
    body = new.text[new.text.index(" = for") : new.text.index("yield")]
    assert "%next: f32[8,8] = add %acc, %d" in body and "mul %d" not in body
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(32, 8)).astype(np.float32) for _ in range(2))
    y = y.astype(kernel.inputs[1].ref.dtype.np)
    a, b = (Walker(k, NumpyNumbers()).run([x, y])[0] for k in (kernel, new))
    np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("factor", [0.125, -3.0, 1 / 3])
def test_sums_are_as_exact(factor: float):
    kernel = total(float(np.float32(factor)))
    new = scale_after_sum(kernel)
    assert new is not kernel
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(32, 8)).astype(np.float32) for _ in range(2))
    y = y.astype(kernel.inputs[1].ref.dtype.np)
    a, b = (Walker(k, NumpyNumbers()).run([x, y])[0] for k in (kernel, new))
    left = np.where(x[:8] > 0, x[:8] * np.float32(factor), 0)
    want = 4 * left.T @ y[8:16].astype(np.float32)
    for got in (a, b):
        assert np.abs(np.asarray(got) - want).max() < 2**-8 * np.abs(want).max()


@pytest.mark.parametrize(
    "change",
    [
        (
            "%none: f32[8,8] = constant {value=0.0}",
            "%none: f32[8,8] = load %x[0:+8, :]",
        ),
        ("bf16", "f16"),  # which has fewer exponents
        ("yield %next", "store %o[:, :] = %acc\n      yield %next"),
        ("%acc, %d", "%scaled, %d"),
        ("value=0.09375", "value=9.313225746154785e-10"),
        ("value=0.09375", "value=inf"),
    ],
)
def test_other_sums_stay(change: tuple[str, str]):
    kernel = total(change=change)
    assert scale_after_sum(kernel) is kernel
