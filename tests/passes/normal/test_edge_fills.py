"""Zeros that masks put past an edge become fill values. Text in, text out."""

import numpy as np
import pytest

from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.edge_fills import edge_fills
from tests.passes.normal.meaning import outputs

KERNEL = """
kernel @k(%x: ref<f32[10,7] any>, %o: ref<f32[4,7] any>) outputs 1 {
  %acc: ref<f32[4,7] vmem> = alloc
  pipeline %x, %o {grid=(3,), windows=(in[4, 7], out[4, 7]), semantics=("arbitrary",)}
    map (%j: i32) {
      %z: i32 = constant {value=0}
      yield MAP, %z
    }
    map (%j_1: i32) {
      %z_1: i32 = constant {value=0}
      yield %z_1, %z_1
    }
    body (%i: i32, %b: ref<f32[4,7] block>, %r: ref<f32[4,7] block>) {
      %0: i32 = constant {value=0}
      %first: bool = eq %i, %0
      %is: i32 = cast %first {dtype=i32}
      cond %is
        branch () {}
        branch () {
          %none: f32[4,7] = constant {value=0.0}
          store %r[:, :] = %none
        }
      %size: i32 = constant {value=SIZE}
      %start: i32 = mul %i, %size
      %starts: i32[4,7] = broadcast_in_dim %start {shape=(4, 7), dims=()}
      %count: i32[4,7] = iota {dim=DIM}
      %at: i32[4,7] = add %starts, %count
      %n: i32[4,7] = constant {value=LIMIT}
      %inside: bool[4,7] = COMPARED %at, %n
      %columns: i32[4,7] = iota {dim=1}
      %three: i32[4,7] = constant {value=3}
      %other: bool[4,7] = lt %columns, %three
      %both: bool[4,7] = and %other, %inside
      %zero: f32[4,7] = constant {value=OTHERWISE}
      %loaded: f32[4,7] = load %b[:, :]
      %masked: f32[4,7] = select_n WHICH, %zero, %loaded
      %old: f32[4,7] = load %r[:, :]
      %sum: f32[4,7] = add %old, %masked
      store %r[:, :] = %sum
    }
}
"""
USUAL = {
    "MAP": "%j",
    "SIZE": "4",
    "DIM": "0",
    "LIMIT": "10",
    "COMPARED": "lt",
    "OTHERWISE": "0.0",
    "WHICH": "%inside",
}


def kernel(**changes: str):
    text = KERNEL
    for name, value in {**USUAL, **changes}.items():
        text = text.replace(name, value)
    made = parse_kernel(text)
    verify(made)
    return made


@pytest.mark.parametrize(
    "changes, selects",
    [
        ({}, 0),
        ({"COMPARED": "le", "LIMIT": "9"}, 0),
        ({"WHICH": "%both"}, 1),  # the other condition stays
    ],
)
def test_the_mask_of_an_edge_is_a_fill(changes: dict[str, str], selects: int):
    before = kernel(**changes)
    after = edge_fills(before)
    verify(after)
    assert "in[4, 7] fill 0.0" in after.text
    assert after.text.count("select_n") == selects
    x = np.random.default_rng(0).standard_normal((10, 7)).astype(np.float32)
    want, got = outputs(before, [x]), outputs(after, [x])
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"LIMIT": "9"},  # less than the array
        {"LIMIT": "11"},
        {"SIZE": "3"},  # other positions than the block's
        {"DIM": "1"},
        {"OTHERWISE": "1.0"},
        {"COMPARED": "gt"},
        {"MAP": "%z"},  # always the first block
        {"WHICH": "%other"},
    ],
)
def test_other_masks_stay(changes: dict[str, str]):
    before = kernel(**changes)
    assert edge_fills(before) is before


@pytest.mark.parametrize("mask", ["%inside", "%both"])
@pytest.mark.parametrize(("other", "selects"), [("%one", 1), ("%zero", 0)])
def test_a_load_that_gives_something_else_there_keeps_its_select(
    mask: str, other: str, selects: int
):
    """Past the edge it gives what its mask says, and not the fill."""
    load = "%loaded: f32[4,7] = load %b[:, :]"
    one = "%one: f32[4,7] = constant {value=1.0}"
    before = kernel(**{load: f"{one}\n{load} mask {mask} other {other}"})
    after = edge_fills(before)
    verify(after)
    assert after.text.count("select_n") == selects
    x = np.random.default_rng(0).standard_normal((10, 7)).astype(np.float32)
    want, got = outputs(before, [x]), outputs(after, [x])
    np.testing.assert_array_equal(got[0], want[0])
