"""Which steps of a small grid see the same block, by trying all of them."""

import numpy as np
import pytest

from pallasite.ir.nodes import Block, BlockDim, Window
from pallasite.passes.analysis.block_table import evaluate_map, told_apart
from tests.passes.texts import program, value_named

# An index map of a grid of 4 by 3 steps; the axes told from the number of a block.
CASES = {
    "%r: i32 = add %i0, %zero": {0},
    "%r: i32 = div %i0, %two": set(),
    "%a: i32 = mul %i0, %three\n%r: i32 = add %a, %i1": {0, 1},
    "%r: i32 = rem %i1, %two": set(),
    "%r: i32 = sub %two, %i1": {1},
    "%r: i32 = mul %i0, %nine": set(),  # past the end, so clamped
}
CONSTANTS = "\n".join(
    f"%{name}: i32 = constant {{value={n}, type=i32[]}}"
    for name, n in [("zero", 0), ("two", 2), ("three", 3), ("nine", 9)]
)


def index_map(code: str) -> Block:
    pipeline = program(f"{CONSTANTS}\n{code}", (4, 3), "%n: ref<i32[] smem>")
    yields = (value_named(pipeline, "r"),)
    return Block(pipeline.ids, pipeline.body.ops, yields)


@pytest.mark.parametrize("code", CASES)
def test_axes_told_apart(code: str):
    window = Window((BlockDim(8),), "out")
    assert told_apart(index_map(code), window, (96,), (4, 3)) == CASES[code]


def test_what_a_chip_may_round_another_way_is_not_tried():
    half = "%x: f32 = cast %i0 {dtype=f32}\n%y: f32 = {op} %x\n%r: i32 = cast %y"
    half += " {dtype=i32}"
    window = Window((BlockDim(8),), "out")
    found = [
        told_apart(index_map(half.replace("{op}", op)), window, (96,), (4, 3))
        for op in ("floor", "sqrt")
    ]
    assert found == [{0}, None]


def test_what_is_not_tried():
    plain = index_map("%r: i32 = add %i0, %zero")
    window = Window((BlockDim(8),), "out")
    assert told_apart(plain, window, (96,), (4, None)) is None
    assert told_apart(plain, window, (96,), (1 << 10, 1 << 10)) is None
    overlapping = Window((BlockDim(8, "element"),), "out")
    assert told_apart(plain, overlapping, (96,), (4, 3)) is None
    loads = index_map("%r: i32 = load %n[]")
    assert told_apart(loads, window, (96,), (4, 3)) is None


def test_numbers_of_all_steps():
    steps = np.indices((4, 3), np.int32).reshape(2, -1)
    found = evaluate_map(index_map("%r: i32 = div %i0, %two"), steps)
    assert found is not None
    assert [numbers.tolist() for numbers in found] == [[0] * 6 + [1] * 6]


def test_bitcasts_have_the_other_types_numbers():
    code = "%u: u32 = cast %i0 {dtype=u32}\n%s: u32 = constant {value=30, type=u32[]}\n"
    code += "%w: u32 = shift_left %u, %s\n%r: i32 = bitcast %w {dtype=i32}"
    steps = np.indices((4, 1), np.int32).reshape(2, -1)
    found = evaluate_map(index_map(code), steps)
    assert found is not None
    assert found[0].tolist() == [0, 1 << 30, -(1 << 31), -(1 << 30)]
