"""Whether outputs are sums over a grid axis, and why not."""

import pytest

from pallasite.ir.roles import Pipeline
from pallasite.ir.text import parse_kernel
from pallasite.passes.analysis.grid import analyze, find_pipeline
from pallasite.passes.analysis.sums import FIRST, find_sums

RESET = """
    %zero: i32 = constant {value=0, type=i32[]}
    %first: bool = eq %i, %zero
    %n: i32 = cast %first {dtype=i32}
    cond %n
      branch () {}
      branch () { store %ob[:] = %z }
"""
ADD = """
    %old: f32[8] = load %ob[:]
    %sum: f32[8] = add %old, %x
    store %ob[:] = %sum
"""
SCALE = """
    %last: i32 = constant {value=3, type=i32[]}
    %end: bool = eq %i, %last
    %m: i32 = cast %end {dtype=i32}
    cond %m
      branch () {}
      branch () {
        %done: f32[8] = load %ob[:]
        %half: f32[8] = mul %done, %done
        store %ob[:] = %half
      }
"""


def sums_of(body: str):
    """What is found of an output that is one block along a grid of four steps."""
    kernel = parse_kernel(
        f"""
        kernel @k(%x: ref<f32[32] any>, %o: ref<f32[8] any>) outputs 1 {{
          pipeline %x, %o {{grid=(4,), windows=(in[8], out[8]),
              semantics=("arbitrary",)}}
            map (%a: i32) {{ yield %a }}
            map (%b: i32) {{
              %c: i32 = constant {{value=0, type=i32[]}}
              yield %c
            }}
            body (%i: i32, %xb: ref<f32[8] block>, %ob: ref<f32[8] block>) {{
              %z: f32[8] = constant {{value=0.0, type=f32[8]}}
              %x: f32[8] = load %xb[:]
              {body}
            }}
        }}
    """.replace("%x: f32", "%v: f32").replace("add %old, %x", "add %old, %v")
    )
    pipeline = Pipeline.of(find_pipeline(kernel))
    return find_sums(pipeline.op, analyze(kernel), 0, {pipeline.blocks[1]})


def test_a_sum_and_its_gate():
    found = sums_of(RESET + ADD)
    assert found.reason is None
    assert list(found.gates.values()) == [FIRST]


REFUSED = {
    "no reset": (ADD, "ob is not set to zero at the first step"),
    "reset after": (ADD + RESET, "ob is accumulated into before it is set to zero"),
    "reset only": (RESET, "ob is not written as a sum"),
    "reset at every step": (
        "store %ob[:] = %z" + ADD,
        "ob is set to zero elsewhere than at the first step",
    ),
    "overwritten": (
        RESET + ADD + "store %ob[:] = %v",
        "several steps write ob, not only by adding to it",
    ),
    "not linear": (
        RESET + ADD + SCALE,
        "ob carries values along it that are not a plain",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum(name: str):
    body, reason = REFUSED[name]
    found = sums_of(body).reason
    assert found is not None and found.startswith(reason)
