"""Spellings that once ran at different speeds, by the estimate, and no longer do."""

from typing import Any

import pytest

from pallasite.target import named
from tests.forms.form import SIZES
from tests.forms.pairs import outcome
from tests.forms.spellings import BASES, Spelling


def spelled(name: str, what: Any, **choices: Any) -> Spelling:
    base = BASES[name]
    found = next(w for w in base.whats if base.problem(w).name == what)
    return Spelling(base, found, base.style(**choices))


SAME = {
    "shallow and low blocks of a product": (
        spelled("matmul", "matmul", block_m=64, block_k=64),
        spelled("matmul", "matmul"),
    ),
    "wide columns of a shallow product at the edge": (
        spelled("matmul", "matmul edges", edge="mask", block_m=64, block_k=32),
        spelled("matmul", "matmul edges", block_n=256),
    ),
    "maxima that start as minus infinity, few queries": (
        spelled("attention", "attention causal d128", mask="infinite", block_q=64),
        spelled("attention", "attention causal d128"),
    ),
    "maxima that start as minus infinity, many keys": (
        spelled("attention", "attention causal d128", low="infinite", block_k=256),
        spelled("attention", "attention causal d128", loop="fori"),
    ),
    "maxima that start as sinks, many keys": (
        spelled("attention", "attention causal sinks d128", block_k=256),
        spelled("attention", "attention causal sinks d128"),
    ),
    "statistics in lanes as results, beside segments": (
        spelled(
            "attention",
            "attention causal segments d128",
            stats="lanes",
            stats_at="outputs",
        ),
        spelled("attention", "attention causal segments d128"),
    ),
    "a sum in scratch": (
        spelled("reductions", "sum rows", acc="scratch"),
        spelled("reductions", "sum rows"),
    ),
    "a sum of everything in long steps": (
        spelled("reductions", "sum all", loop="fori", rows=256),
        spelled("reductions", "sum all", loop="fori"),
    ),
    "a prefix sum in a loop": (
        spelled("scans", "prefix sum", loop="while", rows=128, columns=1024),
        spelled("scans", "prefix sum"),
    ),
    "a recurrence in large blocks": (
        spelled("scans", "recurrence", within="at once", columns=1024),
        spelled("scans", "recurrence", loop="at once"),
    ),
    "a recurrence in blocks": (
        spelled("scans", "recurrence", within="at once", start="select"),
        spelled("scans", "recurrence"),
    ),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_on_a_gpu(pair: tuple[Spelling, Spelling]):
    kind, why = outcome(pair, named("gpu:h200"), SIZES["model"])
    assert kind != "neither", why
