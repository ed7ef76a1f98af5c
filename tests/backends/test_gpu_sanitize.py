"""What `gpu_sanitize.py` makes of a sanitizer's output; a script stands in for one."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.backends import gpu_sanitize, processes
from tests.backends.cuda import prove_all

# Reports a bad access of the second subject, and dies of the third.
STAND_IN = """\
import os, sys
print("========= COMPUTE-SANITIZER", flush=True)
for name in map(str.strip, sys.stdin):
    print("@started " + name, flush=True)
    if name == "zoo b cuda":
        print("========= Invalid __global__ read of size 4 bytes")
        print("=========     at pl_b+0x10")
    if name == "zoo c cuda":
        os.kill(os.getpid(), 9)
    print("@ended " + ("refused" if name == "zoo d cuda" else "ran"), flush=True)
print("========= ERROR SUMMARY: 0 errors")
"""


# The process that a sanitizer watches outlives it, and has its output.
SLOW = """\
import subprocess, sys
subprocess.run(["sh", "-c", "echo @started zoo a cuda; echo @waits 5; sleep 60"])
"""


class Told(processes.Watch):
    """No timer: time passes when a process says that it waits."""

    now = 0.0
    last: "Told"

    def heard(self) -> None:
        Told.last = self

    @classmethod
    def monotonic(cls) -> float:
        return cls.now

    @classmethod
    def sleep(cls, seconds: float) -> None:
        cls.now += seconds

    @classmethod
    def is_report(cls, line: str) -> bool:
        if line.startswith("@waits "):
            cls.now += float(line.split()[1])
            cls.last.kill()
        return is_report(line)


is_report = gpu_sanitize.is_report


@pytest.fixture
def sanitize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs all with a script in the place of the sanitizer."""
    monkeypatch.setattr(Told, "now", 0.0)
    monkeypatch.setattr(processes, "time", Told)
    monkeypatch.setattr(processes, "Watch", Told)
    monkeypatch.setattr(gpu_sanitize, "is_report", Told.is_report)
    names = [f"zoo {name} cuda" for name in "abcde"]
    monkeypatch.setattr(gpu_sanitize, "subjects", lambda tool: names)

    def run(text: str, *options: str) -> int:
        script = tmp_path / "sanitizer"
        script.write_text(f"#!{sys.executable}\n{text}")
        script.chmod(0o755)
        given = ["--sanitizer", str(script), "--processes", "1", *options]
        return gpu_sanitize.main(given)

    return run


def test_reports_deaths_and_refusals_are_told_apart(
    sanitize: Callable[..., int], capsys: pytest.CaptureFixture
):
    assert sanitize(STAND_IN) == 1
    first, *others = capsys.readouterr().out.splitlines()
    *others, _, _, _, _ = others  # the slowest
    assert first == "memcheck: 3 ran, 1 died, 1 refused; 1 reports"
    assert others == [
        "  zoo b cuda: Invalid __global__ read of size 4 bytes",
        "  zoo c cuda died",
    ]


def test_it_ends_when_the_time_is_over(
    sanitize: Callable[..., int], capsys: pytest.CaptureFixture
):
    assert sanitize(SLOW, "--seconds", "3") == 0
    first, unfinished, last = capsys.readouterr().out.splitlines()
    assert first == "memcheck: 5 not reached; 0 reports"
    assert unfinished == "  zoo a cuda not finished in 5 s"
    assert last == "not reached: zoo a cuda, zoo b cuda, zoo c cuda, zoo d cuda, " + (
        "zoo e cuda"
    )


# The first process stands still at its subject; those after it do not.
STUCK_ONCE = """\
import pathlib, sys, time
marker = pathlib.Path(__file__).with_suffix(".ran")
for name in map(str.strip, sys.stdin):
    print("@started " + name, flush=True)
    if ONLY_ONCE and marker.exists():
        print("@ended ran", flush=True)
    else:
        marker.touch()
        print("@waits 2", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("recovers", [True, False])
def test_a_silent_process_is_killed_and_its_subject_tried_once_more(
    sanitize: Callable[..., int], capsys: pytest.CaptureFixture, recovers: bool
):
    text = STUCK_ONCE.replace("ONLY_ONCE", str(recovers))
    names = () if recovers else ("zoo a",)
    assert sanitize(text, "--patience", "2", *names) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    if recovers:
        assert first == "memcheck: 5 ran; 0 reports"
    else:
        assert first == "memcheck: 1 silent; 0 reports"
        assert second == "  zoo a cuda silent"


def test_parts_of_names_choose(
    sanitize: Callable[..., int], capsys: pytest.CaptureFixture
):
    assert sanitize(STAND_IN, "zoo a", "d cuda") == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "memcheck: 1 ran, 1 refused; 0 reports"


def test_a_sanitizer_that_does_not_start_is_reported(
    sanitize: Callable[..., int], capsys: pytest.CaptureFixture
):
    sanitize("print('no such device')")
    first, why, _ = capsys.readouterr().out.splitlines()
    assert first == "memcheck: 5 not reached; 0 reports"
    assert why == "  no start: no such device"


def test_tools_other_than_memcheck_see_our_own_code():
    names = gpu_sanitize.subjects("racecheck")
    assert "check softmax" in names and "zoo add_vectors cuda" in names
    assert not any(name.endswith("triton") for name in names)
    assert len(gpu_sanitize.subjects("memcheck")) > 1.8 * len(names)


def test_what_runs_when_it_is_named_has_kernels():
    names = gpu_sanitize.larger()
    assert len(set(names)) == len(names)
    for kind in prove_all.KINDS[2:]:
        name = next(n for n in names if n.startswith(f"{kind}: ") and "softmax" in n)
        assert prove_all.kernels_of(*prove_all.subject(*name.split(": ", 1)))
