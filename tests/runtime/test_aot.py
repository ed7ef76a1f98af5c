"""libtpu in a process of its own: what becomes of jobs, told by stand-ins for it."""

import json
import queue
from pathlib import Path
from types import SimpleNamespace

import pytest

from pallasite import config
from pallasite.errors import CompileError
from pallasite.runtime import aot, bundles
from pallasite.runtime.aot import Compiled, Job, compile_all

ARRAY = ((8, 128), "float32")


def job(name: str) -> Job:
    return Job(name, "tpu_custom_call", "{}", (ARRAY,), (ARRAY,))


def stand_in(folder: Path, *lines: str) -> str:
    """A program in place of a Python that has libtpu."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return str(path)


def answer(name: str, **fields) -> str:
    data = {"name": name, "ok": True, "error": "", "seconds": 1.0}
    return json.dumps({**data, "cycles": None, "bundles": None, **fields})


def compiled(folder: Path, jobs: list[Job], *lines: str, **options) -> list[Compiled]:
    with config.override(libtpu_python=stand_in(folder, *lines)):
        return compile_all(jobs, "v5e", **options)


def test_a_group_that_ends_the_process_is_compiled_one_by_one(tmp_path):
    lines = ["echo ready", "read a", 'case "$a" in "["*) exit 3;; esac']
    lines += [f"echo '{answer('a')}'", "read b", f"echo '{answer('b')}'"]
    results = compiled(tmp_path, [job("a"), job("b")], *lines, together=2)
    assert [(r.name, r.ok) for r in results] == [("a", True), ("b", True)]


def test_results_come_as_they_are_made(tmp_path):
    seen = []
    code = {"cycles": 7, "busy": {"VALU": 3.0}, "spills": 1, "fills": 2, "vmem": 64}
    lines = ["echo ready", "read a", f"echo '{answer('a', cycles=9, bundles=code)}'"]
    lines += ["read b", f"echo '{answer('b', ok=False, error='E2002')}'"]
    results = compiled(
        tmp_path,
        [job("a"), job("b")],
        *lines,
        cycles=True,
        units=True,
        progress=seen.append,
    )
    assert [(r.name, r.ok, r.cycles) for r in results] == [
        ("a", True, 9),
        ("b", False, None),
    ]
    assert results[0].bundles == bundles.Bundles(7, {"VALU": 3.0}, 1, 2, 64)
    assert seen == results


def test_a_job_that_ends_the_process_is_reported_and_the_others_run(tmp_path):
    lines = [
        "echo ready",
        "read first",
        'case "$first" in *bad*) echo "F1116 fatal: no rule" >&2; exit 134;; esac',
        f"echo '{answer('good')}'",
    ]
    results = compiled(tmp_path, [job("bad"), job("good")], *lines)
    assert [r.ok for r in results] == [False, True]
    assert results[0].error == "libtpu aborted: F1116 fatal: no rule"


class Told(queue.Queue):
    """Nothing is late but what says so, however busy the machine is."""

    def get(self, block=True, timeout=None):
        line = super().get()
        if line == "late\n":
            raise queue.Empty
        return line


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(aot, "queue", SimpleNamespace(Queue=Told, Empty=queue.Empty))


def test_a_job_that_does_not_end_is_given_up(tmp_path, told):
    lines = ["echo ready", "read a", "echo late", "exec sleep 60"]
    (result,) = compiled(tmp_path, [job("a")], *lines, cycles=True, timeout=0.5)
    assert result.error == "libtpu did not end within 0.5 seconds"


def test_where_the_estimator_gives_up_the_code_is_read(tmp_path, told):
    code = {"cycles": 7, "busy": {}, "spills": 0, "fills": 0, "vmem": 64}
    lines = [
        "echo ready",
        "read a",
        'case "$LIBTPU_INIT_ARGS" in *static_llo_profile*)'
        ' echo "F1116 LLO_CHECK failure" >&2; exit 134;; esac',
        f"echo '{answer('a', bundles=code)}'",
    ]
    (result,) = compiled(tmp_path, [job("a")], *lines, cycles=True)
    assert result.ok and result.cycles is None and result.estimated == 7
    assert result.no_estimate == "libtpu aborted: F1116 LLO_CHECK failure"
    # An estimator that does not end has given up, too.
    lines[2] = (
        'case "$LIBTPU_INIT_ARGS" in *static_llo_profile*)'
        " echo late; exec sleep 60;; esac"
    )
    (slow,) = compiled(tmp_path, [job("a")], *lines, cycles=True, timeout=2)
    assert slow.ok and slow.estimated == 7
    assert slow.no_estimate == "libtpu did not end within 2 seconds"
    # Without a word on the code either, it is enough that it compiles.
    lines[2] = 'case "$LIBTPU_INIT_ARGS" in *dump*) exit 134;; esac'
    lines[3] = f"echo '{answer('a')}'"
    (result,) = compiled(tmp_path, [job("a")], *lines, cycles=True)
    assert result.ok and result.estimated is None


def test_no_libtpu_at_all(tmp_path):
    with pytest.raises(CompileError, match="cannot compile for v5e here"):
        compiled(tmp_path, [job("a")], "echo 'no module named libtpu' >&2", "exit 1")


# A grid of four steps: six passes of a loop, of which two skip the body, and a branch
# over two bundles that are for the first step only.
CODE = """
$region0: #{ffi_call.2}
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, tag = 'core']
  // region range: [0, 24)
  $region1: #{ffi_call.2} parent=0
    #allocation3 [shape = 'u8[4096]{0}', space=vmem, size = 0x1000, tag = 'window']
    // region range: [0, 24)
    loop: start=0, step=1, limit=6
    $region2: #{ffi_call.2} parent=1 // loop_body
      // region range: [2, 22)
      $region3: #{ffi_call.2} parent=2 // pred_check_branch
        // region range: [2, 4)
        %112 = sbr.rel (%p1) target bundleno = 20 (0x14), region = 5
      $region4: #{ffi_call.2} parent=2 // pred_region
        #allocation9_spill [shape = 'u32[8,128]', space=vmem, size = 0x1000, tag = 's']
        // region range: [4, 20)
        $region6: #{ffi_call.2} parent=4 // pred_check_branch
          // region range: [4, 6)
          %113 = sbr.rel (%p2) target bundleno = 8 (0x8), region = 7
      $region8: #{ffi_call.2} parent=2 // loop_end
        // region range: [20, 22)
        %114 = sbr.rel (%p3) target bundleno = 2 (0x2), region = 2
"""


def test_what_the_code_says():
    rows = ["4 1 0"] * 20 + ["0 1 1"] * 4
    table = "\n".join(
        ["== CAPACITY", "MATMUL, VALU, VSTORE:SPILL", " 4 2 1", "==", *rows]
    )
    found = bundles.parse(table, CODE)
    # Two bundles before the loop, two after; a pass has 4 of its own, and 14 of body.
    assert found.cycles == 2 + 6 * 4 + 4 * 14 + 2
    assert found.busy["VALU"] == found.cycles / 2
    assert found.busy["MATMUL"] == 2 + 6 * 2 + 4 * 14
    assert (found.spills, found.vmem) == (4, 0x2000)


def test_trip_counts_known_only_at_run_time_are_said():
    table = "\n".join(["== CAPACITY", "VALU", " 2", "==", *["1"] * 24])
    assert bundles.parse(table, CODE).exact
    found = bundles.parse(table, CODE.replace("limit=6", "limit=%v7"))
    assert not found.exact
    assert found.cycles == 24 - 2  # once, without the branch of the first step


def test_dumps_that_are_not_there(tmp_path):
    assert bundles.read(tmp_path, "ffi_call") is None
