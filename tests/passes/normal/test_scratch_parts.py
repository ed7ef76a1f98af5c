"""Scratch for several states becomes a scratch for each. Text in, text out."""

import pytest

from pallasite.ir.nodes import walk
from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.scratch_parts import scratch_parts
from tests.passes.normal.meaning import assert_same_meaning

KERNEL = """\
kernel @k(%x: ref<f32[6,8] any>, %o: ref<f32[8] any>) outputs 1 {
  %s: ref<f32[SHAPE] vmem> = alloc
  pipeline %x, %o {grid=(6,), windows=(in[1, 8], out[8]), semantics=("arbitrary",)}
    map (%j: i32) {
      %z: i32 = constant {value=0}
      yield %j, %z
    }
    map (%j_1: i32) {
      %z_1: i32 = constant {value=0}
      yield %z_1
    }
    body (%i: i32, %b: ref<f32[1,8] block>, %r: ref<f32[8] block>) {
      %v: f32[8] = load %b[0, :]
      %one: i32 = constant {value=1}
      %w: i32 = min %i, %one
      cond %w
        branch () {
          %c: f32[SHAPE] = iota {dim=LAST}
          store %s[ALL] = %c
        }
        branch () {}
      BODY
    }
}
"""
ROWS = """
      %m: f32[8] = load %s[0, :]
      %n: f32[8] = max %m, %v
      store %s[0, :] = %n
      %a: f32[8] = load %s[SECOND, :]
      %d: f32[8] = add %a, %n
      store %s[SECOND, :] = %d
      %e: f32[8] = add %d, %n
      store %r[:] = %e
"""
HALVES = """
      %a: f32[4] = load %s[0:+4]
      %y: f32[4] = load %b[0, 0:+4]
      %d: f32[4] = add %a, %y
      store %s[0:+4] = %d
      %e: f32[4] = load %s[4:+4]
      %f: f32[4] = mul %e, %d
      store %s[4:+4] = %f
      store %r[0:+4] = %d
      store %r[4:+4] = %f
"""


def kernel(body: str, shape: str):
    dims = shape.split(",")
    every = ", ".join(":" for _ in dims)
    text = KERNEL.replace("BODY", body).replace("SHAPE", shape)
    last = str(len(dims) - 1)
    return parse_kernel(text.replace("ALL", every).replace("LAST", last))


def allocated(made) -> list[tuple[int, ...]]:
    return [op.result.ref.shape for op in walk(made.body) if op.name == "alloc"]


@pytest.mark.parametrize(
    ("body", "shape", "parts"),
    [
        (ROWS.replace("SECOND", "1"), "2,8", [(1, 8), (1, 8)]),
        (ROWS.replace("SECOND", "2"), "3,8", [(1, 8), (1, 8)]),  # [1] is never read
        (HALVES, "8", [(4,), (4,)]),
    ],
)
def test_a_scratch_for_each_part(body: str, shape: str, parts: list):
    old = kernel(body, shape)
    new = scratch_parts(old)
    assert_same_meaning(old, new)
    assert allocated(new) == parts
    assert scratch_parts(new) is new


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        (ROWS.replace("SECOND", "0"), "2,8"),  # one part
        (HALVES.replace("load %s[4:+4]", "load %s[3:+4]"), "8"),  # they overlap
        (HALVES.replace("%r[0:+4] = %d", "%r[:] = %q"), "8"),  # all of it is read
        (ROWS.replace("SECOND", "%w"), "2,8"),  # the program decides
    ],
)
def test_other_scratch_stays(body: str, shape: str):
    if "%q" in body:
        body = body.replace("store %r[:]", "%q: f32[8] = load %s[:]\nstore %r[:]")
    old = kernel(body, shape)
    assert scratch_parts(old) is old
