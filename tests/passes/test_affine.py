"""How integers depend on the grid indices: affine forms."""

import pytest

from pallasite.passes.analysis.affine import Affine, Forms, recoverable
from tests.passes.texts import program, value_named

CONSTANTS = "\n".join(
    f"%c{n}: i32 = constant {{value={n}, type=i32[]}}" for n in (0, 3, 8)
)
# The form of %r over a grid of two axes.
CASES = {
    "%a: i32 = mul %i0, %c8\n%r: i32 = add %a, %c3": "8*i0 + 3",
    "%a: i32 = neg %i1\n%r: i32 = add %a, %i0": "i0 - i1",
    "%a: i32 = mul %c3, %c8\n%r: i32 = sub %i1, %a": "i1 - 24",
    "%r: i32 = div %i0, %c3": "f(i0)",
    "%r: i32 = mul %i0, %i1": "f(i0, i1)",
    "%r: i32 = max %c3, %c8": "8",
    "%x: i32 = load %n[]\n%r: i32 = add %x, %i1": "f(i0, i1)",
    "%a: i8 = cast %i0 {dtype=i8}\n%r: i32 = cast %a {dtype=i32}": "f(i0)",
}


def forms_of(pipeline, loads_vary=True) -> Forms:
    forms = Forms(pipeline.ids)
    forms.add_ops(pipeline.body.ops, loads_vary)
    return forms


@pytest.mark.parametrize("code", CASES)
def test_form_of_expression(code: str):
    text = f"{CONSTANTS}\n{code}"
    pipeline = program(text, (4, 2), "%n: ref<i32[] smem>")
    found = forms_of(pipeline).of(value_named(pipeline, "r"))
    assert str(found) == CASES[code]


def test_memory_that_does_not_change_is_one_number():
    code = "%x: i32 = load %n[]\n%r: i32 = add %x, %i1"
    pipeline = program(code, (4, 2), "%n: ref<i32[] smem>")
    found = forms_of(pipeline, loads_vary=False).of(value_named(pipeline, "r"))
    assert (str(found), found.axes) == ("i1 + ?", {1})


def test_elements_of_a_tile_are_spread():
    code = """
        %c8: i32 = constant {value=8, type=i32[]}
        %a: i32 = mul %i0, %c8
        %b: i32[8] = broadcast_in_dim %a {shape=(8,), dims=()}
        %n: i32[8] = iota {type=i32[8], dim=0}
        %r: i32[8] = add %b, %n
    """
    pipeline = program(code)
    found = forms_of(pipeline).of(value_named(pipeline, "r"))
    assert (str(found), found.spread) == ("8*i0", 7)


@pytest.mark.parametrize(
    ("forms", "axes"),
    [
        ([((1, 0), 0)], {0}),
        ([((4, 1), 0)], {0, 1}),  # 4 * i0 + i1, i1 below 4
        ([((3, 1), 0)], set()),  # 3 + 0 is 0 + 3
        ([((4, 1), 1)], set()),  # neighbours overlap
        ([((3, 1), 0), ((1, 0), 0)], {0, 1}),
    ],
)
def test_axes_that_can_be_told(forms, axes):
    given = [(Affine(coefficients), slack) for coefficients, slack in forms]
    assert recoverable(given, (2, 4)) == axes


def test_range_over_the_grid():
    assert Affine((8, -1), 3).range((2, 4)) == (0, 11)
    assert Affine((1,), None).range((2,)) == (float("-inf"), float("inf"))
