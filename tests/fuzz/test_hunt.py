"""The hunt: it finds what is wrong, survives what dies, and ends on time."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pallasite.errors import CompileError, UnsupportedError
from pallasite.primitive import Call, Choice
from tests.fuzz import engines, hunt
from tests.fuzz.engines import default_backend
from tests.fuzz.generate import FAMILIES
from tests.fuzz.hunt import Hunt, Job, Outcome, all_jobs, run_job


class Clock:
    """Time passes when a process says that it is stuck."""

    stuck = multiprocessing.get_context("fork").Event()
    now = 0.0

    def monotonic(self) -> float:
        if self.stuck.is_set():
            self.stuck.clear()
            self.now += 100.0
        return self.now


def test_wrong_kernels_are_made_simple(monkeypatch: pytest.MonkeyPatch):
    def engine(case, number):
        if "exp" in case.kernel.text:
            raise UnsupportedError("no exp here")
        assert "pipeline" not in case.kernel.text, "no pipelines"

    monkeypatch.setitem(hunt.ENGINES, "cpu", engine)
    monkeypatch.setattr(hunt, "time", Clock())
    outcome = run_job(Job("cpu", "elementwise", tuple(range(16)), reducing_s=5))
    assert outcome.refused and set(outcome.refused) == {"no exp here"}
    assert len(outcome.refused) + len(outcome.found) == 16
    for number, found in outcome.found.items():
        assert found.startswith("AssertionError: no pipelines")
        (least,) = run_job(Job("cpu", "elementwise", (number,))).found.values()
        assert len(found) < len(least)


def test_real_kernels_of_every_family():
    for family in hunt.EACH_FAMILY:
        job = Job("emulation", family, (1,) if family in hunt.OWN_CHECKS else (1, 3))
        outcome = run_job(job)
        outcome.ways.clear()
        assert outcome == Outcome(job)


def test_jobs_go_through_all_families_and_engines():
    jobs = all_jobs(7, ["cpu", "vmap"], list(hunt.EACH_FAMILY))
    first = [next(jobs) for _ in range(2 * len(hunt.EACH_FAMILY))]
    pairs = {(job.engine, job.family) for job in first}
    # Python's kernels have a vmap of their own.
    assert not {("vmap", "python"), ("vmap", "fusion")} & pairs
    assert {(e, f) for e in ("cpu", "vmap") for f in FAMILIES} <= pairs
    assert min(min(job.numbers) for job in first) == 7_000_000
    few = list(all_jobs(7, ["cpu"], ["grids"], count=20))
    assert [len(job.numbers) for job in few] == [hunt.BATCH] * 3


def test_the_report_says_how_kernels_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those right on a GPU by the backend that took them; code that fails is wrong."""

    def engine(case, number):
        return default_backend(Call(case.kernel))

    monkeypatch.setitem(hunt.ENGINES, "gpu", engine)
    run = Hunt(iter(()), 60, tmp_path)
    run._count(run_job(Job("gpu", "elementwise", (0, 1))))
    run._count(Outcome(Job("gpu", "grids", (3,)), ways=["cuda"]))
    assert "gpu by triton: 2\ngpu by cuda: 1\n" in run.report()

    def refused(call, platform):
        return Choice("triton", (("cuda", CompileError("ptxas says no")),))

    monkeypatch.setattr(engines, "choose", refused)
    (found,) = run_job(Job("gpu", "elementwise", (0,))).found.values()
    assert "ptxas says no" in found


def dying(jobs: Connection) -> None:
    """Dies of kernel 3, is stuck at kernel 5, finds 6 wrong."""
    while (job := jobs.recv()) is not None:
        if 3 in job.numbers:
            os.kill(os.getpid(), signal.SIGKILL)
        if 5 in job.numbers:
            Clock.stuck.set()
            time.sleep(600)
        found = {6: "wrong"} if 6 in job.numbers else {}
        jobs.send(Outcome(job, ["too large: 17"] * (0 in job.numbers), found))


@pytest.mark.filterwarnings("ignore:os.fork")  # these processes do not use jax
def test_processes_that_die_and_end_on_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(hunt, "time", Clock())
    monkeypatch.setattr(hunt, "STUCK_S", 50.0)
    jobs = [Job("cpu", "grids", (n, n + 1)) for n in range(0, 10, 2)]
    run = Hunt(iter(jobs), 600, tmp_path, 1, dying, "fork")
    run.run()
    assert run.tried["cpu", "grids"] == 10
    assert run.wrong["cpu", "grids"] == 3
    texts = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert "died: exit code -9" in texts["cpu-grids-3.txt"]
    assert "was stuck for 50 s" in texts["cpu-grids-5.txt"]
    assert "--engine cpu --family grids --kernel 6" in texts["cpu-grids-6.txt"]
    report = run.report()
    assert "9/1/3" in report and "1 cpu: too large: N" in report
    assert "cpu-grids-6.txt: wrong" in capsys.readouterr().out

    monkeypatch.setattr(hunt, "LATE_S", 50.0)
    monkeypatch.setattr(hunt, "STUCK_S", 500.0)
    run = Hunt(iter([Job("cpu", "grids", (5,))]), 1, tmp_path, 1, dying, "fork")
    run.run()
    assert "not finished: cpu, grids, (5,)" in run.report()


@pytest.mark.filterwarnings("ignore:os.fork")
def test_processes_share_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hunt, "time", Clock())
    jobs = [Job("cpu", "grids", (n,)) for n in (0, 1, 2, 3, 4, 6, 7)]
    run = Hunt(iter(jobs), 600, tmp_path, 2, dying, "fork")
    run.run()
    assert run.tried["cpu", "grids"] == 7 and run.wrong["cpu", "grids"] == 2


@pytest.mark.parametrize("wrong", [0, 1])
def test_exit_code_says_whether_anything_was_found(
    wrong: int, monkeypatch: pytest.MonkeyPatch
):
    def run(self: Hunt) -> None:
        self.tried["cpu", "grids"] += 1
        self.wrong["cpu", "grids"] += wrong

    monkeypatch.setattr(Hunt, "run", run)
    assert hunt.main(["--engine", "cpu", "--family", "grids"]) == wrong


def test_unknown_engine_is_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        hunt.main(["--engine", "fpga"])
    assert "no fpga: there are cpu" in capsys.readouterr().err
