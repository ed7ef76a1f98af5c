"""JAX's own kernel library runs on Pallasite, natively and unmodified."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.share import chosen

SCRIPT = Path(__file__).with_name("library.py")
ALL = [
    line.removeprefix("def ").split("(")[0]
    for before, line in zip(
        SCRIPT.read_text().splitlines(),
        SCRIPT.read_text().splitlines()[1:],
        strict=False,
    )
    if before == "@case"
]
NAMES = chosen(ALL)  # one process runs them all, so that those left out cost nothing


def run(*names: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pallasite", "run", str(SCRIPT), *names],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    return {line[0]: line[1] for line in lines if len(line) == 2}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """One process for all: `install` must come before anything imports upstream."""
    return run(*NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_kernel_of_the_library(name: str, outcomes: dict[str, str]):
    assert outcomes[name] == "ok"


@pytest.mark.slow
@pytest.mark.tpu
def test_kernels_that_copy_between_devices_compile_for_a_tpu():
    assert run("all_gather_compiles") == {"all_gather_compiles": "ok"}
