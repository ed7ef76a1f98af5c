"""libtpu's estimates for the forms of `forms.py`, each beside the best of its problem.

No TPU is needed. Forms of one problem often become one text, and most texts stay when a
pass changes: a text is compiled once, also across runs that share a file of results.

Of branches and trip counts that data decides, libtpu's estimate knows nothing: it
counts such a branch as not taken and such a loop as at most one round, so that a form
that skips work by data looks better than one that cannot. Forms with them are "by
data", and are rated by neither number.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from pallasite import config
from pallasite.backends.base import Compiled, Options, get
from pallasite.ir.nodes import Kernel, Value, walk
from pallasite.passes.run import run
from pallasite.runtime.aot import Job, compile_all
from pallasite.sites import calls_in
from pallasite.target import TPUS
from tests.forms.form import SIZES, gradient

Row = dict[str, Any]
Lowered = tuple[list[tuple[str, Job]], bool]  # calls by their texts; `is_by_data`
BATCH = 8  # forms whose calls one process compiles


def tpu_rows(
    forms: Sequence[Any],
    chip: str,
    size: str,
    grad: bool,
    limit: float,
    workers: int,
    old: dict[str, Row],
    save: Callable[[dict[str, Row]], object],
) -> dict[str, Row]:
    """The estimated cycles of each form.

    Args:
        forms, chip, size, grad: what is compiled, and for which TPU.
        limit: seconds until a call is abandoned.
        workers: processes that compile at once.
        old: rows of an earlier run with this libtpu; their texts are known.
        save: called with the rows found so far.
    """
    known = {
        call["text"]: call for row in old.values() for call in row.get("calls", ())
    }
    rows: dict[str, Row] = {}
    with ThreadPoolExecutor(workers) as pool:
        batches: list[tuple[dict[str, Lowered], Future[None]]] = []
        for start in range(0, len(forms), BATCH):
            lowered = _lowered(forms[start : start + BATCH], chip, size, grad, rows)
            work = {text: job for jobs, _ in lowered.values() for text, job in jobs}
            new = {text: job for text, job in work.items() if text not in known}
            batches.append((lowered, pool.submit(_learn, new, chip, limit, known)))
            _collect(batches, known, rows, save, wait=False)
        _collect(batches, known, rows, save, wait=True)
    return rows


def _lowered(
    forms: Sequence[Any], chip: str, size: str, grad: bool, rows: dict[str, Row]
) -> dict[str, Lowered]:
    """The calls of forms; those without go to `rows` with the reason."""
    found = {}
    for form in forms:
        start = time.perf_counter()
        try:
            jobs, by_data = _jobs(form, chip, size, grad)
            found[form.name] = [(_text(job, chip), job) for job in jobs], by_data
        except Exception as error:
            what = " ".join(str(error).strip().splitlines()[:3])
            rows[form.name] = {"failed": f"{type(error).__name__}: {what}"[:400]}
        seconds = time.perf_counter() - start
        print(f"  lowered {form.name}: {seconds:.1f} s", end="\r", flush=True)
    return found


def _jobs(form: Any, chip: str, size: str, grad: bool) -> tuple[list[Job], bool]:
    backend = get("tpu")
    structs = form.problem.structs(SIZES[size])
    function = form.make(SIZES[size])
    asked = gradient(function, structs) if grad else function
    with config.override(target=chip):
        calls = calls_in(asked, *structs)
    found, by_data = [], False
    for call in calls:
        kernel = run(call.kernel)
        compiled = Compiled(backend, kernel, Options(chip=TPUS[chip]), shared=())
        found.append(Job.of(form.name, kernel, backend.launch(compiled)))
        by_data |= is_by_data(compiled.scheduled)
    return found, by_data


def is_by_data(kernel: Kernel) -> bool:
    """Whether a branch or a trip count depends on what a kernel loads."""
    loaded: set[Value] = set()
    for op in walk(kernel.body):
        chosen = {"for": op.operands[:3], "cond": op.operands[:1]}.get(op.name, ())
        if op.name == "while" or loaded.intersection(chosen):
            return True
        if op.name == "load" or loaded.intersection(op.operands):
            loaded.update(v for v in op.results if not v.is_ref)
    return False


def _text(job: Job, chip: str) -> str:
    """Names what libtpu is given."""
    given = {**asdict(job), "name": chip}
    return hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]


def _learn(
    jobs: dict[str, Job], chip: str, limit: float, known: dict[str, Row]
) -> None:
    """Compile what is new."""
    todo = {text: job for text, job in jobs.items() if text not in known}
    texts, new = list(todo), [*todo.values()]
    found = compile_all(new, chip, cycles=True, units=True, timeout=limit)
    for text, result in zip(texts, found, strict=True):
        row: Row = {"text": text, "cycles": result.cycles}
        code = result.bundles
        if code is not None and code.exact:
            row["counted"] = code.cycles  # in its code, without copies
        if code is not None and code.spills:
            row["spills"] = code.spills
        if not result.ok:
            row["failed"] = (result.error or "no reason given")[:300]
        known[text] = row


def _collect(
    batches: list[tuple[dict[str, Lowered], Any]],
    known: dict[str, Row],
    rows: dict[str, Row],
    save: Callable[[dict[str, Row]], object],
    wait: bool,
) -> None:
    """Rows of the batches that are compiled."""
    while batches and (wait or batches[0][1].done()):
        lowered, future = batches.pop(0)
        future.result()
        for name, (jobs, by_data) in lowered.items():
            rows[name] = _row([known[text] for text, _ in jobs])
            rows[name] |= {"by data": True} if by_data else {}
            cycles, counted = (rows[name].get(k) or "-" for k in ("cycles", "counted"))
            failed = rows[name].get("failed", "")[:150]
            print(f"{name[:58]:<58} {cycles:>14} {counted:>14} {failed}", flush=True)
        save(rows)


def _row(calls: Sequence[Row]) -> Row:
    """Of a form with these calls; without an estimate where one of them has none."""
    row: Row = {"calls": [*calls]}
    failed = [call["failed"] for call in calls if call.get("failed")]
    if failed:
        return {"failed": failed[0], **row}
    for key in ("cycles", "counted"):
        each = [call.get(key) for call in calls]
        known = [n for n in each if n]
        row[key] = sum(known) if len(known) == len(each) else None
    return row


def rate(rows: dict[str, Row], problems: dict[str, str]) -> None:
    """Give each row its distance from the best of its problem.

    By libtpu's estimates; also by what is counted in its code, where the best form
    has no estimate or this one has none.
    """
    for key, name in (("cycles", "ratio"), ("counted", "counted ratio")):
        best: dict[str, int] = {}
        rated = {
            n: row
            for n, row in rows.items()
            if row.get(key) and n in problems and not row.get("by data")
        }
        for form, row in rated.items():
            problem = problems[form]
            best[problem] = min(row[key], best.get(problem, row[key]))
        for form, row in rated.items():
            row[name] = round(best[problems[form]] / row[key], 4)
