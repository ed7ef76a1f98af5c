"""The tables of docs/learn are what benchmarks/learn.py measured of the pages' code."""

import json

import jax
import pytest

from benchmarks import learn


@pytest.mark.parametrize("page", learn.PAGES)
def test_functions_are_on_the_page(page: str):
    for step in learn.PAGES[page](128):
        for run, operands in (
            (step.run, step.operands),
            (step.xla, step.xla_operands or step.operands),
        ):
            jax.eval_shape(run, *operands)


@pytest.mark.parametrize("page", ["matmul", "softmax", "flash_attention"])
def test_table_has_the_measured_times(page: str):
    text = (learn.ROOT / "docs" / "learn" / f"{page}.md").read_text()
    rows = {line.split(" | ")[0][2:]: line for line in text.splitlines()}
    for chip in ("cpu", "h200"):
        found = json.loads((learn.RESULTS / f"learn_{chip}.json").read_text())
        for name, row in found["pages"][page]["steps"].items():
            for ms in (row["ms"], row["xla_ms"]):
                assert f"| {ms:.3g} ms |" in rows[name], (chip, name)
