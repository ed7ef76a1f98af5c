"""What one branch changes is loaded and stored in it. Text in, text out."""

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.guarded_updates import guarded_updates
from tests.passes.normal.meaning import assert_same_meaning

KERNEL = """
kernel @k(%x: ref<f32[24,5] any>, %o: ref<f32[5] any>, %n: ref<f32[5] any>) outputs 2 {
  %top: ref<f32[5] vmem> = alloc
  %sum: ref<f32[5] vmem> = alloc
  pipeline %x, %o, %n {grid=(8,), windows=(in[3, 5], out[5], out[5]),
      semantics=("arbitrary",)}
    map (%a: i32) { %z: i32 = constant {value=0} yield %a, %z }
    map (%b: i32) { %z1: i32 = constant {value=0} yield %z1 }
    map (%c: i32) { %z2: i32 = constant {value=0} yield %z2 }
    body (%i: i32, %xb: ref<f32[3,5] block>, %ob: ref<f32[5] block>,
        %nb: ref<f32[5] block>) {
      %zero: i32 = constant {value=0}
      %first: bool = eq %i, %zero
      %start: i32 = cast %first {dtype=i32}
      cond %start
        branch () {}
        branch () {
          %nothing: f32[5] = constant {value=0.0}
          store %top[:] = %nothing
          store %sum[:] = %nothing
        }
      %six: i32 = constant {value=6}
      %some: bool = lt %i, %six
      %which: i32 = cast %some {dtype=i32}
      %t: f32[5] = load %top[:]
      %s: f32[5] = load %sum[:]
      BEFORE
      %t1: f32[5], %s1: f32[5] = cond %which
        branch () { yield IDLE }
        branch () {
          %v: f32[3,5] = load %xb[:, :]
          %m: f32[5] = reduce %v {kind="max", axes=(0,)}
          %t2: f32[5] = max %t, %m
          %p: f32[5] = reduce %v {kind="sum", axes=(0,)}
          %s2: f32[5] = add %s, %p
          yield %t2, %s2
        }
      AFTER
      store %top[:] = %t1
      store %sum[:] = %s1
      store %ob[:] = %t1b
      store %nb[:] = %s1b
    }
}
"""
LOADED = "%t1b: f32[5] = load %top[:] %s1b: f32[5] = load %sum[:]"


def kernel_of(idle: str = "%t, %s", before: str = "", after: str = ""):
    text = KERNEL.replace("IDLE", idle).replace("BEFORE", before)
    text = text.replace("AFTER", after)
    text = text.replace("      store %ob", f"      {LOADED}\n      store %ob")
    kernel = parse_kernel(text)
    verify(kernel)
    return kernel


def test_a_branch_that_gives_the_old_contents_stores_the_new_ones():
    kernel = kernel_of()
    new = guarded_updates(kernel)
    verify(new)
    taken = new.text[new.text.index("cond %which") :]
    assert taken.index("load %top") < taken.index("store %top[:] = %t2")
    assert new.text.count("= cond") == 0
    assert_same_meaning(kernel, new)


@pytest.mark.parametrize(
    "changes",
    [
        {"idle": "%s, %t"},
        {"before": "%five: f32[5] = constant {value=5.0} store %top[:] = %five"},
        {"after": "%now: f32[5] = load %top[:] store %ob[:] = %now"},
        {"after": "store %nb[:] = %t1"},
    ],
    ids=str,
)
def test_what_stays(changes: dict[str, str]):
    kernel = kernel_of(**changes)
    assert guarded_updates(kernel) is kernel
