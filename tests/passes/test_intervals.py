"""Facts about integer scalars: their range, and what divides them."""

import pytest

from pallasite.ir.roles import Loop, Pipeline
from pallasite.ir.types import DTYPES, I32, U32
from pallasite.passes.analysis.intervals import Fact, Facts
from tests.passes.texts import program, value_named


def facts_of(pipeline: Pipeline) -> Facts:
    facts = Facts()
    facts.note_grid(pipeline.ids, pipeline.grid)
    facts.note_block(pipeline.body)
    return facts


ANYTHING = Fact()  # an i32
CONSTANTS = "\n".join(
    f"%c{n}: i32 = constant {{value={n}, type=i32[]}}" for n in (1, 2, 3, 8, 9)
)
LAST_BITS = "%m: i32 = constant {value=-4, type=i32[]}\n"

# Of %r, where %i0 counts from 0 to 3.
CASES = {
    "%r: i32 = mul %i0, %c8": Fact(0, 24, 8),
    "%a: i32 = mul %i0, %c8\n%r: i32 = sub %a, %c3": Fact(-3, 21, 1),
    "%a: i32 = mul %i0, %c8\n%r: i32 = div %a, %c2": Fact(0, 12, 4),
    "%r: i32 = div %c9, %c2": Fact(4, 4, 1),
    "%a: i32 = add %i0, %c1\n%r: i32 = div %c8, %a": Fact(2, 8, 1),
    "%r: i32 = rem %i0, %c2": Fact(0, 1, 1),
    "%a: i32 = neg %i0\n%r: i32 = rem %a, %c2": Fact(-1, 0, 1),
    "%a: i32 = mul %i0, %c8\n%r: i32 = rem %a, %c2": Fact(0, 0, 0),
    "%r: bool = ne %i0, %c8": Fact(1, 1, 1),
    "%r: bool = ne %i0, %c2": Fact(0, 1, 1),
    "%t: bool = ne %c2, %c2\n%r: i32 = select_n %t, %i0, %c8": Fact(0, 3, 1),
    "%r: i32 = min %i0, %c2": Fact(0, 2, 1),
    "%a: i32 = neg %i0\n%r: i32 = max %a, %c1": Fact(1, 1, 1),
    "%r: i32 = clamp %c1, %i0, %c2": Fact(1, 2, 1),
    "%t: bool = eq %i0, %c1\n%r: i32 = select_n %t, %c2, %c8": Fact(2, 8, 2),
    "%t: bool = eq %i0, %c1\n%r: i32 = cast %t {dtype=i32}": Fact(0, 1, 1),
    "%r: i32 = shift_left %i0, %c3": Fact(0, 24, 8),
    f"{LAST_BITS}%a: i32 = add %i0, %c3\n%r: i32 = and %a, %m": Fact(0, 4, 4),
    f"{LAST_BITS}%a: i32 = sub %i0, %c3\n%r: i32 = and %m, %a": Fact(-4, 0, 4),
    "%m: i32 = neg %c3\n%a: i32 = neg %i0\n%r: i32 = and %a, %m": ANYTHING,
    "%r: i32 = assume_multiple %i0 {multiple=4}": Fact(0, 3, 4),
    "%a: i64 = cast %i0 {dtype=i64}\n%r: i32 = cast %a {dtype=i32}": Fact(0, 3, 1),
    "%r: i8 = cast %i0 {dtype=i8}": Fact(0, 3, 1),
}


@pytest.mark.parametrize("code", CASES)
def test_fact_of_expression(code: str):
    pipeline = program(f"{CONSTANTS}\n{code}")
    assert facts_of(pipeline).of(value_named(pipeline, "r")) == CASES[code]


def test_what_wraps_keeps_only_powers_of_two():
    code = """
        %big: i32 = constant {value=1610612736, type=i32[]}
        %r: i32 = mul %i0, %big
        %odd: i32 = constant {value=1500000001, type=i32[]}
        %s: i32 = mul %i0, %odd
        %byte: i8 = cast %big {dtype=i8}
    """
    pipeline = program(code)
    facts = facts_of(pipeline)
    low, high = I32.limits
    assert facts.of(value_named(pipeline, "r")) == Fact(low, high, 1 << 29)
    assert facts.of(value_named(pipeline, "s")) == ANYTHING
    assert facts.of(value_named(pipeline, "byte")) == Fact(-128, 127, 1 << 29)


def test_unknown_values_have_the_range_of_their_type():
    code = """
        %x: i32 = load %n[]
        %y: u8 = cast %x {dtype=u8}
        %r: u32 = cast %y {dtype=u32}
    """
    pipeline = program(code, params="%n: ref<i32[] smem>")
    facts = facts_of(pipeline)
    assert facts.of(value_named(pipeline, "x")) == ANYTHING
    assert facts.of(value_named(pipeline, "y")) == Fact(0, 255)
    assert facts.of(value_named(pipeline, "r")) == Fact(0, 255)


def test_an_unsigned_number_may_be_negative_as_an_index():
    assert Fact(*U32.limits).wrapped(I32) == ANYTHING
    assert Fact(0, 7, 7).wrapped(I32) == Fact(0, 7, 7)


@pytest.mark.parametrize("name", ["i2", "u2", "i8", "u8", "i16", "u32", "i64"])
def test_limits_are_those_of_numpy(name: str):
    import ml_dtypes

    info = ml_dtypes.iinfo(DTYPES[name].np)
    assert DTYPES[name].limits == (int(info.min), int(info.max))


LOOP = """
    %first: i32 = constant {value=2, type=i32[]}
    %limit: i32 = constant {value=10, type=i32[]}
    %x: i32 = load %n[]
    for %first, %limit, STEP
      body (%at: i32) {
        %two: i32 = mul %at, %first
      }
"""


def test_loop_counter():
    pipeline = program(LOOP.replace("STEP", "%first"), params="%n: ref<i32[] smem>")
    facts = facts_of(pipeline)
    (loop,) = (Loop.of(op) for op in pipeline.body.ops if op.name == "for")
    assert facts.of(loop.index) == Fact(2, 9, 2)
    assert facts.of(value_named(pipeline, "two")) == Fact(4, 18, 4)
    assert facts.most_steps(loop) == 4


def test_loop_that_may_count_down_is_unknown():
    pipeline = program(LOOP.replace("STEP", "%x"), params="%n: ref<i32[] smem>")
    facts = facts_of(pipeline)
    (loop,) = (Loop.of(op) for op in pipeline.body.ops if op.name == "for")
    assert facts.of(loop.index) == ANYTHING
    assert facts.most_steps(loop) is None
