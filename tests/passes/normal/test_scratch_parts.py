"""Scratch for several states becomes a scratch for each. Text in, text out."""

import pytest

from pallasite.ir.nodes import walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
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


# --- one scratch as a stack of accumulators ---

STACKS = """
kernel @k(%x: ref<f32[24,5] any>, %o: ref<f32[5] any>) outputs 1 {
  %acc: ref<f32[3,1,5] vmem> = alloc
  pipeline %x, %o {grid=(8,), windows=(in[3, 5], out[5]), semantics=("arbitrary",)}
    map (%a: i32) { %z: i32 = constant {value=0} yield %a, %z }
    map (%b: i32) { %z1: i32 = constant {value=0} yield %z1 }
    body (%i: i32, %xb: ref<f32[3,5] block>, %ob: ref<f32[5] block>) {
      %zero: i32 = constant {value=0}
      %first: bool = eq %i, %zero
      %start: i32 = cast %first {dtype=i32}
      %v: f32[3,5] = load %xb[:, :]
      %m: f32[5] = reduce %v {kind="max", axes=(0,)}
      %p: f32[5] = reduce %v {kind="sum", axes=(0,)}
      %m3: f32[1,1,5] = reshape %m {shape=(1, 1, 5)}
      %p3: f32[1,1,5] = reshape %p {shape=(1, 1, 5)}
      cond %start
        branch () {}
        branch () {
          %n: f32[3,1,5] = constant {value=0.0}
          store %acc[:, :, :] = %n
        }
      STEP
      store %ob[:] = %out
    }
}
"""
ONE_BY_ONE = """
      %t: f32[1,5] = load %acc[0, :, :]
      %m2: f32[1,5] = reshape %m {shape=(1, 5)}
      %t1: f32[1,5] = max %t, %m2
      store %acc[0, :, :] = %t1
      %s: f32[2,1,5] = load %acc[1:+2, :, :]
      %p2: f32[2,1,5] = broadcast_in_dim %p {shape=(2, 1, 5), dims=(2,)}
      %s1: f32[2,1,5] = add %s, %p2
      store %acc[1:+2, :, :] = %s1
      %out: f32[5] = reduce %s1 {kind="sum", axes=(0, 1)}
"""
STACKED = """
      %old: f32[3,1,5] = load %acc[:, :, :]
      %three: f32[3,1,5] = concatenate %m3, %p3, %m3 {axis=0}
      %half: f32[3,1,5] = constant {value=0.5}
      %less: f32[3,1,5] = mul %old, %half
      %new: f32[3,1,5] = add %less, %three
      store %acc[:, :, :] = %new
      %l0: f32[1,5] = load %acc[0, :, :]
      %l1: f32[1,5] = load %acc[1, :, :]
      %l2: f32[1,5] = load %acc[2, :, :]
      %l3: f32[1,5] = add %l0, %l1
      %l4: f32[1,5] = mul %l3, %l2
      %out: f32[5] = reshape %l4 {shape=(5,)}
"""
OVERLAPPING = ONE_BY_ONE.replace("acc[0, :, :]", "acc[1, :, :]")
CHOSEN = ONE_BY_ONE.replace("acc[0, :, :]", "acc[%i, :, :]")
SUMMED = (
    ONE_BY_ONE.replace("%out", "%sums")
    + """
      %all: f32[3,1,5] = load %acc[:, :, :]
      %out: f32[5] = reduce %all {kind="sum", axes=(0, 1)}
"""
)


def stacks(step: str):
    kernel = parse_kernel(STACKS.replace("STEP", step))
    verify(kernel)
    return kernel, scratch_parts(kernel)


@pytest.mark.parametrize(
    ("step", "shapes"),
    [(ONE_BY_ONE, [(1, 1, 5), (2, 1, 5)]), (STACKED, [(1, 1, 5)] * 3)],
)
def test_each_part_is_a_scratch(step, shapes):
    kernel, apart = stacks(step)
    verify(apart)
    assert allocated(apart) == shapes
    assert "concatenate" not in apart.text
    assert_same_meaning(kernel, apart)


@pytest.mark.parametrize("step", [OVERLAPPING, CHOSEN, SUMMED])
def test_other_uses_keep_it_whole(step):
    kernel, apart = stacks(step)
    assert apart is kernel
