"""Integers that ranges and factors simplify. Text in, text out."""

import pytest

from pallasite.ir.nodes import Block, walk
from pallasite.passes.analysis.intervals import Fact, Facts
from pallasite.passes.normal.known_integers import known_integers
from tests.passes.texts import program

CONSTANTS = """
    %c1: i32 = constant {value=1}
    %c8: i32 = constant {value=8}
    %c16: i32 = constant {value=16}
"""


def simplified(code: str, high: int = 3) -> Block:
    pipeline = program(f"{CONSTANTS} {code} store %o[%r] = %r")
    facts = Facts()
    facts.note(pipeline.ids[0], Fact(0, high))
    for op in pipeline.body.ops:
        facts.note_op(op)
    return known_integers(pipeline.body, facts)


def made_by(body: Block) -> list[str]:
    """The ops that the stored value is made by, the last first; `i` is the index."""
    made = {v: op for op in walk(body) for v in op.results}
    names, value = [], body.ops[-1].operands[1]
    while value in made:
        names.append(made[value].name)
        if made[value].name == "constant":
            break
        value = made[value].operands[0]
    return names


FLOOR = """
    %d: i32 = div %x, %c8
    %m: i32 = rem %x, %c8
    %zero: i32 = sub %c1, %c1
    %rest: bool = ne %m, %zero
    %sign: i32 = sign %x
    %other: bool = ne %sign, %c1
    %low: bool = and %other, %rest
    %less: i32 = sub %d, %c1
    %r: i32 = select_n %low, %d, %less
"""  # as jnp divides


@pytest.mark.parametrize(
    ("code", "names"),
    {
        "%x: i32 = mul %i0, %c8 %r: i32 = div %x, %c8": [],
        "%x: i32 = mul %c16, %i0 %r: i32 = div %x, %c8": ["mul"],
        "%y: i32 = mul %i0, %c8 %x: i32 = neg %y %r: i32 = div %x, %c8": ["neg"],
        "%x: i32 = mul %i0, %c8 %r: i32 = rem %x, %c8": ["constant"],
        "%y: i32 = mul %i0, %c8 %x: i32 = add %y, %c1 %r: i32 = div %x, %c8": [
            "div",
            "add",
            "mul",
        ],
    }.items(),
)
def test_quotients(code: str, names: list[str]):
    assert made_by(simplified(code)) == names


def test_a_product_that_may_wrap_around_stays():
    code = "%x: i32 = mul %i0, %c8 %r: i32 = div %x, %c8"
    assert made_by(simplified(code, high=2**31 - 1)) == ["div", "mul"]


def test_as_jnp_rounds():
    code = f"%n: i32 = add %i0, %c1 %y: i32 = mul %n, %c8 %x: i32 = neg %y {FLOOR}"
    body = simplified(code)
    last = body.ops[-1].operands[1]
    (chosen,) = (op for op in body.ops if last in op.results)
    # No step is corrected: the test is a constant, which canonicalize takes away.
    assert chosen.name == "select_n" and made_by(body)[:2] == ["select_n", "constant"]


@pytest.mark.parametrize(
    ("code", "is_corrected"), [("%i0, %c1", False), ("%i0, %c16", True)]
)
def test_quotients_of_what_is_not_negative(code: str, is_corrected: bool):
    name = "sub" if is_corrected else "add"
    # Over 0 to 20 the quotient takes several values, so the choice is not folded.
    body = simplified(f"%x: i32 = {name} {code} {FLOOR}", high=20)
    made = {v: op for op in walk(body) for v in op.results}
    chosen = made[body.ops[-1].operands[1]]
    assert (made[chosen.operands[0]].name != "constant") == is_corrected


def test_a_quotient_with_one_value_is_that_value():
    body = simplified(f"%x: i32 = add %i0, %c16 {FLOOR}")
    made = {v: op for op in walk(body) for v in op.results}
    assert made[body.ops[-1].operands[1]].attrs["value"] == 2


@pytest.mark.parametrize(
    ("code", "names"),
    {
        "%r: i32 = min %i0, %c8": [],
        "%r: i32 = min %c8, %i0": [],
        "%r: i32 = max %i0, %c8": ["constant"],
        "%x: i32 = add %i0, %c8 %r: i32 = max %c8, %x": ["add"],
        "%r: i32 = min %i0, %c1": ["min"],
        "%r: i32 = max %c1, %i0": ["max", "constant"],
    }.items(),
)
def test_extremes(code: str, names: list[str]):
    assert made_by(simplified(code)) == names
