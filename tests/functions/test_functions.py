"""A sample of `make functions`, and that the table names every public function."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from tests.functions import judge, table
from tests.share import SHARE

STEP = 10 * max(SHARE, 4)  # one function in so many is tried here
PLACES = [(m, n) for m in table.MODULES for n in judge.rows_of(m)][::STEP]
# Those that once were wrong, with some JAX.
PLACES += [("jnp", "frexp"), ("jnp", "sinc"), ("jnp", "polyval"), ("special", "ndtri")]
PLACES += [("lax", "scatter_apply")]


@pytest.mark.parametrize("module", table.MODULES)
def test_every_public_function_is_classified(module):
    assert not table.unclassified(module)
    assert not table.TABLES[module].keys() & table.LEFT_OUT[module].keys()


@pytest.mark.parametrize(("module", "name"), PLACES)
def test_function_in_a_kernel_is_that_outside(module, name):
    row = judge.rows_of(module)[name]
    for case in judge.cases(module, name, row):
        if case.dtype == "f32" and case.shape == judge.SHAPES[0]:
            verdict = judge.run(case, row)
            assert verdict.outcome != "differs", (case, verdict.message)


def test_the_page_lists_every_function():
    page = (Path(__file__).parents[2] / "docs" / "functions.md").read_text()
    titles = "jax.numpy", "jax.lax", "jax.nn", "jax.scipy.special", "jax.random"
    for module, title in zip(table.MODULES, titles, strict=True):
        section = page.split(f"## {title}\n")[1].split("\n## ")[0]
        missing = [n for n in judge.rows_of(module) if f"\n| `{n}` |" not in section]
        assert not missing, "run make functions, then docs/make_functions.py"
    assert "DIFFERS" not in page


def judged(fn, kind="value"):
    row = table.Row("x", lambda _, x: fn(x))
    case = judge.Case("jnp", "sin", "f32", (5, 7), kind, "cpu")
    return judge.run(case, row)


def test_refusals_and_differences_are_told_apart(monkeypatch):
    assert judged(jnp.cos).outcome == "works"
    assert judged(lambda x: jnp.fft.fft(x).real).outcome == "refused"
    assert judged(lambda x: x @ x).outcome == "none"
    exact = judge.in_kernel
    wrong = lambda fn, options: exact(lambda x: [fn(x)[0] * 1.001], options)
    monkeypatch.setattr(judge, "in_kernel", wrong)
    for kind in judge.KINDS:
        assert judged(jnp.cos, kind=kind).outcome == "differs"
