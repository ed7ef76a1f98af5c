"""What `gpu_sanitize.py` makes of a sanitizer's output; a script stands in for one."""

import sys
from pathlib import Path

import pytest

from tests.backends import gpu_sanitize

# Reports a bad access of the second subject, and dies of the third.
STAND_IN = """\
import os, sys
print("========= COMPUTE-SANITIZER")
for name in sys.argv[sys.argv.index("--run") + 1:]:
    print("@started " + name, flush=True)
    if name == "zoo b cuda":
        print("========= Invalid __global__ read of size 4 bytes")
        print("=========     at pl_b+0x10")
    if name == "zoo c cuda":
        os.kill(os.getpid(), 9)
    print("@ended " + ("refused" if name == "zoo d cuda" else "ran"), flush=True)
print("========= ERROR SUMMARY: 0 errors")
"""


def test_reports_deaths_and_refusals_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    script = tmp_path / "sanitizer"
    script.write_text(f"#!{sys.executable}\n{STAND_IN}")
    script.chmod(0o755)
    names = [f"zoo {name} cuda" for name in "abcde"]
    monkeypatch.setattr(gpu_sanitize, "subjects", lambda tool: names)
    assert gpu_sanitize.main(["--sanitizer", str(script), "--processes", "1"]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "memcheck: 3 ran, 1 died, 1 refused; 1 reports"
    assert others == [
        "  zoo c cuda died",
        "  zoo b cuda: Invalid __global__ read of size 4 bytes",
    ]


def test_tools_other_than_memcheck_see_our_own_code():
    names = gpu_sanitize.subjects("racecheck")
    assert "check softmax" in names and "zoo add_vectors cuda" in names
    assert not any(name.endswith("triton") for name in names)
    assert len(gpu_sanitize.subjects("memcheck")) > 1.8 * len(names)
