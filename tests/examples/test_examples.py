"""Runs every example, each as a script in a Python of its own (so it calls `main`)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.optional import skip_without_packages

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, run_python: Callable[..., str]):
    skip_without_packages(example.read_text())
    # Those that train and serve compare speeds: a table and a picture, no warnings.
    compares = example.stem in ("train", "serve")
    told = run_python(example, quiet=compares)
    if compares:
        assert "times plain jnp" in told and "the curves are in" in told
