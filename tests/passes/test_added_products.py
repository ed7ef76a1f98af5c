"""Matmuls of one sum are added to it one after another. Text in, text out."""

import numpy as np
import pytest

from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.added_products import added_products
from tests.passes.normal.meaning import operands, outputs

KERNEL = """
kernel @k(%x: ref<f32[4,5] any>, %w: ref<f32[5,4] any>, %o: ref<f32[4,4] any>)
    outputs 1 {
  %a: f32[4,5] = load %x[:, :]
  %b: f32[5,4] = load %w[:, :]
  %acc: f32[4,4] = load %x[:, 0:+4]
  %d: f32[4,4] = dot %a, %b
    {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}
  %n: f32[5,4] = neg %b
  %e: f32[4,4] = dot %a, %n
    {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}
  %c: f32[4,4] = dot %b, %a
    {contract=((0,), (1,)), batch=((), ()), dtype=f32, precision=None}
  SUM
  store %o[:, :] = %s
}
"""
SUMS = {
    "their sum": "%f: f32[4,4] = add %d, %c %s: f32[4,4] = add %acc, %f",
    "their difference": "%f: f32[4,4] = sub %d, %c %s: f32[4,4] = add %f, %acc",
    "negative": "%f: f32[4,4] = add %e, %acc %s: f32[4,4] = sub %f, %c",
    "twice negative": "%f: f32[4,4] = sub %d, %e %s: f32[4,4] = sub %acc, %f",
    "of no other": "%f: f32[4,4] = add %e, %d %s: f32[4,4] = add %c, %f",
}
SAME = {
    "in turn": "%f: f32[4,4] = add %acc, %d %s: f32[4,4] = add %f, %c",
    "to a start": "%f: f32[4,4] = add %d, %acc %s: f32[4,4] = add %f, %c",
    "one": "%s: f32[4,4] = add %d, %acc",
    "used again": "%f: f32[4,4] = add %d, %c %t: f32[4,4] = mul %d, %c "
    "%u: f32[4,4] = mul %t, %c %v: f32[4,4] = add %u, %f %s: f32[4,4] = mul %v, %f",
}


def kernel_of(text: str):
    kernel = parse_kernel(KERNEL.replace("SUM", text))
    verify(kernel)
    return kernel


@pytest.mark.parametrize("name", SUMS)
def test_matmuls_are_added_one_after_another(name: str):
    kernel = kernel_of(SUMS[name])
    made = added_products(kernel)
    verify(made)
    results = {op.result: op for op in made.body.ops if op.results}
    store = made.body.ops[-1]
    op, dots = results[store.operands[1]], 0
    while op.name in ("add", "sub"):
        last = results[op.operands[1]]
        dots += last.name == "dot"
        op = results[op.operands[0]]
    dots += op.name == "dot"
    assert dots == sum(o.name == "dot" for o in made.body.ops) >= 2
    assert "neg" not in made.text
    assert added_products(made) is made
    arrays = operands(kernel)
    (before,), (after,) = outputs(kernel, arrays), outputs(made, arrays)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SAME)
def test_what_is_added_in_turn_stays(name: str):
    text = KERNEL.replace("%n: f32[5,4] = neg %b", "").replace("%a, %n", "%a, %b")
    kernel = parse_kernel(text.replace("SUM", SAME[name]))
    verify(kernel)
    assert added_products(kernel) is kernel
