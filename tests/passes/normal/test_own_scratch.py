"""Parts of scratch that steps use apart become scratch of their own."""

import pytest

from pallasite.ir.nodes import walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.own_scratch import own_scratch
from tests.passes.normal.meaning import assert_same_meaning

KERNEL = """
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


def made(step: str):
    kernel = parse_kernel(KERNEL.replace("STEP", step))
    verify(kernel)
    return kernel, own_scratch(kernel)


def allocated(kernel) -> list[tuple[int, ...]]:
    return [op.result.ref.shape for op in walk(kernel.body) if op.name == "alloc"]


@pytest.mark.parametrize(
    ("step", "shapes"),
    [(ONE_BY_ONE, [(1, 1, 5), (2, 1, 5)]), (STACKED, [(1, 1, 5)] * 3)],
)
def test_each_part_is_a_scratch(step, shapes):
    kernel, apart = made(step)
    verify(apart)
    assert allocated(apart) == shapes
    assert "concatenate" not in apart.text
    assert_same_meaning(kernel, apart)


@pytest.mark.parametrize("step", [OVERLAPPING, CHOSEN, SUMMED])
def test_other_uses_keep_it_whole(step):
    kernel, apart = made(step)
    assert apart is kernel
