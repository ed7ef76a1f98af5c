"""`pl.Ref`: annotated kernels are run, and checked by pyright in strict mode."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from tests.typed import strict_kernels

HERE = Path(__file__).parent


def test_annotated_kernels_run():
    x = jnp.arange(16 * 128.0).reshape(16, 128)
    np.testing.assert_array_equal(strict_kernels.scaled(x), 2 * x)
    y = jnp.ones((128, 8))
    np.testing.assert_allclose(strict_kernels.product(x, y), x @ y, rtol=1e-6)
    expected = jnp.concatenate([x[4:8], x[:4] + 1])
    np.testing.assert_array_equal(strict_kernels.parts(x[:8]), expected)
    assert strict_kernels.steps(jnp.int32(9)) == 10


def test_a_ref_is_known_when_a_program_runs():
    assert not isinstance(np.zeros(3), pl.Ref)  # which has no `at`
    assert not isinstance(pl.ds(0, 4), pl.Ref)


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="needs pyright")
def test_pyright_accepts_strict_kernels_and_finds_mistakes():
    files = [str(HERE / name) for name in ("strict_kernels.py", "wrong_kernels.py")]
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath"]
    run = subprocess.run(
        [*command, sys.executable, *files], capture_output=True, text=True, cwd=HERE
    )
    found: list[dict[str, Any]] = json.loads(run.stdout)["generalDiagnostics"]
    lines = {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in found
        if each["severity"] == "error"
    }
    text = (HERE / "wrong_kernels.py").read_text().splitlines()
    wrong = [n for n, line in enumerate(text, 1) if line.endswith("# wrong")]
    assert lines == {("wrong_kernels.py", n) for n in wrong}
