"""Rules of the normal form that are broken or missing are noticed by spellings."""

import random
from dataclasses import replace
from typing import Any

import pytest

from pallasite.ir.nodes import Op, Value
from pallasite.ir.rewrite import Rewriter
from pallasite.ir.roles import DotSide
from pallasite.passes.normal import guarded_starts, narrow_windows, products
from pallasite.passes.run import SHARED, run
from tests.forms.form import SIZES
from tests.forms.pairs import call_of, nameless
from tests.forms.spellings import BASES, Spelling, spelling
from tests.forms.test_pairs import spelled
from tests.passes.normal.test_same_meaning import same_meaning

TINY = SIZES["tiny"]
DRAWN = 12


def check_meanings(name: str, **chosen: Any) -> None:
    """Spellings by chance, apart from some choices, mean the same in normal form."""
    draw, base = random.Random(f"mutations {name}"), BASES[name]
    for _ in range(DRAWN):
        one = spelling(draw, base, draw.choice(base.whats))
        style = replace(one.style, **chosen)
        if base.fits(one.what, style):
            same_meaning(call_of(replace(one, style=style), TINY).kernel)


@pytest.mark.parametrize(
    "name, chosen",
    [
        ("matmul", {}),
        ("matmul", {"loop": "fori", "refs": "whole"}),
        ("reductions", {}),
        ("reductions", {"start": "select"}),
        ("scans", {}),
        ("maps", {}),
    ],
)
def test_spellings_mean_the_same_in_normal_form(name: str, chosen: dict[str, Any]):
    check_meanings(name, **chosen)


def not_turned(op: Op, b: Rewriter, lhs: DotSide, rhs: DotSide) -> Value:
    """A product with what was transposed, as if it still were."""
    return b.op("dot", lhs.value, rhs.value, **op.attrs)


SELECTS = ("reductions", {"start": "select"})
WHOLE = ("matmul", {"loop": "fori", "refs": "whole"})
SQUARE = {"block_m": 128, "block_n": 128, "block_k": 128}
TURNED = ("matmul", {"product": "matmul", "loop": "grid", **SQUARE})
BROKEN = {
    "sums start as one": (guarded_starts, "_nothing", lambda merge: 1, SELECTS),
    "windows stay": (narrow_windows, "affine_value", lambda b, *_: b.index(0), WHOLE),
    "operands stay transposed": (products, "_dot", not_turned, TURNED),
}


@pytest.mark.parametrize("where, name, broken, drawn", BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_noticed(where, name, broken, drawn, monkeypatch):
    base, chosen = drawn
    check_meanings(base, **chosen)
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError):
        check_meanings(base, **chosen)


CAUSAL = "attention causal d128"
# Spellings that have the same text by a rule.
BY_RULE = {
    "columns": ("attention", CAUSAL, {"stats": "vector"}, {}),
    "guarded_starts": ("reductions", "max rows", {"start": "cond"}, {}),
    "idle_clamps": ("attention", CAUSAL, {"clamp": True}, {}),
    "narrow_windows": (
        "matmul",
        "matmul",
        {"loop": "fori", "refs": "whole"},
        {"loop": "fori"},
    ),
    "positions": ("attention", CAUSAL, {"places": "arange"}, {}),
    "products": ("matmul", "matmul w.T", {"product": "matmul"}, {}),
    "program_order": ("matmul", "matmul", {"order": "1-D"}, {}),
    "replicated": ("attention", CAUSAL, {"stats": "lanes"}, {}),
    "unit_dims": ("attention", CAUSAL, {"heads": "leading"}, {}),
}


def text_without(one: Spelling, rule: str) -> str:
    passes = [each for each in SHARED if each.name != rule]
    return nameless(run(call_of(one, TINY).kernel, passes).text)


@pytest.mark.parametrize("rule", BY_RULE)
def test_a_missing_rule_is_noticed(rule: str):
    name, what, *styles = BY_RULE[rule]
    pair = [spelled(name, what, **style) for style in styles]
    with_all, without = (
        [text_without(one, left_out) for one in pair] for left_out in ("", rule)
    )
    assert with_all[0] == with_all[1]
    assert without[0] != without[1]
