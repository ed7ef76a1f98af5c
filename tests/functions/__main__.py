"""`python -m tests.functions`: every function, dtype and derivative, and a summary.

Options: `--only NAME...` some functions; `--dtypes`, `--kinds`, `--engines` some of
their cases; `--jobs N` processes; `--json FILE` writes the verdicts, of which
`docs/make_functions.py` makes its page.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

SECONDS = 240  # for one function with all its cases
COUNT = 50  # of functions in one process, whose compiled programs take memory


class Worker:
    """A process that judges functions, one after another (`worker.py`).

    A function that ends the process, or does not end, is a verdict too.
    """

    def __init__(self, only: list[str]) -> None:
        self.only = only
        self.process: Any = None
        self.count = 0

    def judge(self, place: tuple[str, str]) -> list[dict[str, Any]]:
        if self.count % COUNT == 0:
            self.stop()
            command = [sys.executable, "-m", "tests.functions.worker", *self.only]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe)
        self.count += 1
        self.process.stdin.write(" ".join(place) + "\n")
        self.process.stdin.flush()
        timer = threading.Timer(SECONDS, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        status = self.process.wait()
        self.count = 0
        case = {"module": place[0], "name": place[1], "dtype": "", "shape": ()}
        message = f"the process ended with status {status} or took {SECONDS} s"
        case |= {"kind": "value", "engine": "cpu", "message": message}
        return [{**case, "outcome": "differs"}]

    def stop(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def judge_all(
    places: list[tuple[str, str]], only: list[str], jobs: int, report: Any
) -> None:
    """Judge functions in several processes; `report` gets the verdicts of each.

    `only`: dtypes, kinds and engines; other cases are left out.
    """
    waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for place in places:
        waiting.put(place)

    def work() -> None:
        worker = Worker(only)
        while True:
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return worker.stop()
            report(worker.judge(place))

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    import jax

    from tests.functions import judge, table

    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--dtypes", nargs="*", help="some of f32 bf16 i32 bool")
    parser.add_argument("--kinds", nargs="*", help="some of value jvp vjp")
    parser.add_argument("--engines", nargs="*", help="some of cpu emulated")
    options = parser.parse_args()
    places = [(m, n) for m in table.MODULES for n in judge.rows_of(m)]
    if options.only:
        places = [p for p in places if p[1] in options.only]
    verdicts: list[dict[str, Any]] = []

    def report(found: list[dict[str, Any]]) -> None:
        verdicts.extend(found)
        for v in found:
            if v["outcome"] == "differs" or (options.only and v["message"]):
                print(_line(v), flush=True)
        if options.json:  # also of a run that is interrupted
            options.json.write_text(json.dumps(verdicts, indent=0))

    some = options.dtypes or options.kinds or options.engines
    only = [*(options.dtypes or judge.DTYPES), *(options.kinds or judge.KINDS)]
    only += options.engines or judge.ENGINES
    judge_all(places, only, options.jobs, report)
    print(f"JAX {jax.__version__}: {len(places)} functions")
    for line in summary(verdicts):
        print(line)
    if options.json:
        order = [list(p) for p in places]
        verdicts.sort(key=lambda v: order.index([v["module"], v["name"]]))
        options.json.write_text(json.dumps(verdicts, indent=0))
    missing = [f"{m}.{n}" for m in table.MODULES for n in table.unclassified(m)]
    if missing:
        sys.exit(f"unclassified: {' '.join(missing)}")
    tried = {(v["module"], v["name"]) for v in verdicts if v["outcome"] != "none"}
    if untried := set(places) - tried if not some else ():
        sys.exit(f"JAX takes none of their operands: {sorted(untried)}")
    if any(v["outcome"] == "differs" for v in verdicts):
        sys.exit("functions differ")


def summary(verdicts: list[dict[str, Any]]) -> list[str]:
    """Counts of functions, natively: one of several dtypes that differs makes a
    function differ, one that is refused makes it refused only if none works."""
    lines = []
    for kind in ("value", "jvp", "vjp"):
        outcomes: dict[tuple[str, str], set[str]] = {}
        for v in verdicts:
            if v["kind"] == kind:
                outcomes.setdefault((v["module"], v["name"]), set()).add(v["outcome"])
        ranked = ("differs", "works", "refused")
        first = [next((r for r in ranked if r in s), "none") for s in outcomes.values()]
        counts, cases = Counter(first), Counter()
        cases.update(v["outcome"] for v in verdicts if v["kind"] == kind)
        text = ", ".join(f"{counts[r]} {r} ({cases[r]} cases)" for r in ranked)
        lines.append(f"{kind}: {text}; {counts['none']} none")
    return lines


def _line(v: dict[str, Any]) -> str:
    place = f"{v['module']}.{v['name']} {v['dtype']}{list(v['shape'])}"
    return f"{v['outcome']}: {place} {v['kind']} {v['engine']}: {v['message'][:300]}"


if __name__ == "__main__":
    main()
