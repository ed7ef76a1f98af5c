"""Matrices that are computed turned. Text in, text out."""

import re

import numpy as np
import pytest

from pallasite.ir.nodes import walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.untransposed import untransposed
from tests.passes.normal.meaning import operands, outputs

# A running softmax of transposed scores, with statistics in rows.
ROWS = """
kernel @k(%q: ref<f32[N,4] any>, %k: ref<f32[12,4] any>, %v: ref<f32[12,5] any>, %o: ref<f32[N,5] any>) outputs 1 {
  %m: ref<f32[1,N] vmem> = alloc
  %low: f32[1,N] = constant {value=-100.0}
  store %m[:, :] = %low
  %zero: i32 = constant {value=0}
  %three: i32 = constant {value=3}
  %one: i32 = constant {value=1}
  %size: i32 = constant {value=4}
  %l0: f32[1,N] = constant {value=0.0}
  %a0: f32[N,5] = constant {value=0.0}
  %qs: f32[N,4] = load %q[:, :]
  %l: f32[1,N], %a: f32[N,5] = for %zero, %three, %one, %l0, %a0
    body (%i: i32, %lc: f32[1,N], %ac: f32[N,5]) {
      %at: i32 = mul %i, %size
      %ks: f32[4,4] = load %k[%at:+4, :]
      %vs: f32[4,5] = load %v[%at:+4, :]
      %s: f32[4,N] = dot %ks, %qs {contract=((1,), (1,)), batch=((), ()), dtype=f32, precision=None}
      %rows: i32[4,N] = iota {dim=0}
      %columns: i32[4,N] = iota {dim=1}
      %in: bool[4,N] = le %rows, %columns
      %none: f32[4,N] = constant {value=-9.0}
      %x: f32[4,N] = select_n %in, %none, %s
      %top: f32[N] = reduce %x {kind="max", axes=(0,)}
      %old: f32[1,N] = load %m[:, :]
      %t: f32[1,N] = broadcast_in_dim %top {shape=(1, N), dims=(1,)}
      %new: f32[1,N] = max %old, %t
      store %m[:, :] = %new
      %wide: f32[4,N] = broadcast_in_dim %new {shape=(4, N), dims=(0, 1)}
      %d: f32[4,N] = sub %x, %wide
      %p: f32[4,N] = exp %d
      %gap: f32[1,N] = sub %old, %new
      %fix: f32[1,N] = exp %gap
      %sum: f32[N] = reduce %p {kind="sum", axes=(0,)}
      %row: f32[1,N] = reshape %sum {shape=(1, N)}
      %lf: f32[1,N] = mul %lc, %fix
      %ln: f32[1,N] = add %lf, %row
      %pv: f32[N,5] = dot %p, %vs {contract=((0,), (0,)), batch=((), ()), dtype=f32, precision=None}
      %column: f32[N,1] = transpose %fix {perm=(1, 0)}
      %by: f32[N,5] = broadcast_in_dim %column {shape=(N, 5), dims=(0, 1)}
      %af: f32[N,5] = mul %ac, %by
      %an: f32[N,5] = add %af, %pv
      yield %ln, %an
    }
  %div: f32[N,1] = transpose %l {perm=(1, 0)}
  %divs: f32[N,5] = broadcast_in_dim %div {shape=(N, 5), dims=(0, 1)}
  %out: f32[N,5] = div %a, %divs
  store %o[:, :] = %out
}
"""  # noqa: E501


@pytest.mark.parametrize("rows", [4, 7])
def test_statistics_in_rows_become_columns(rows: int):
    kernel = parse_kernel(re.sub(r"\bN\b", str(rows), ROWS))
    new = untransposed(kernel)
    verify(new)
    arrays = operands(kernel)
    for old, now in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        np.testing.assert_allclose(now, old, rtol=1e-6)
    ops = list(walk(new.body))
    assert not any(op.name == "transpose" for op in ops)
    assert {op.attrs["axes"] for op in ops if op.name == "reduce"} == {(1,)}
    assert f"%m: ref<f32[{rows},1] vmem>" in new.text
    assert untransposed(new) is new


def test_what_memory_holds_stays_as_it_is():
    """A loaded matrix and its transpose are both used: one of them is transposed."""
    text = """
    kernel @k(%x: ref<f32[4,4] any>, %o: ref<f32[4,4] any>) outputs 1 {
      %a: f32[4,4] = load %x[:, :]
      %b: f32[4,4] = transpose %a {perm=(1, 0)}
      %c: f32[4,4] = add %a, %b
      %s: f32[4] = reduce %c {kind="sum", axes=(0,)}
      %d: f32[4,4] = broadcast_in_dim %s {shape=(4, 4), dims=(1,)}
      store %o[:, :] = %d
    }"""
    kernel = parse_kernel(text)
    assert untransposed(kernel) is kernel
