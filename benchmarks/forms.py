"""What the spelling of a kernel costs: many forms of it beside a library and XLA.

A form is a kernel as some community would write it (`tests/forms`). Each is compiled,
held to its reference, and timed interleaved with its rival: cuDNN where that can
express the computation, otherwise `jit` of plain jnp. Forms run in workers, so that a
crash or a compilation without end costs only that form: all workers compile, then each
in turn times what it has compiled, alone on the machine.

    PYTHONPATH=. python benchmarks/forms.py                    # forward, this machine
    PYTHONPATH=. python benchmarks/forms.py --grad             # forward and backward
    PYTHONPATH=. python benchmarks/forms.py --family rows --only softmax
    PYTHONPATH=. python benchmarks/forms.py --family "held-out rows"
    PYTHONPATH=. python benchmarks/forms.py --target tpu:v6e   # libtpu's estimates
    PYTHONPATH=. python benchmarks/forms.py --target gpu:h200 --explain

`--explain` runs nothing: it says which backend takes each form, and why not the first.
"""

import argparse
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

BANDS = (1.0, 0.9, 0.8, 0.5, 0.1, 0.0)
Row = dict[str, Any]


# --- in a worker ---


@dataclass
class Prepared:
    """A form that is compiled, and its rival."""

    form: Any
    ours: Callable
    beside: "Beside"
    told: Row


@dataclass
class Beside:
    """What forms of one problem are compared with."""

    rival: Callable
    is_library: bool
    reference: Callable


class Worker:
    """Compiles and times forms, one request after another."""

    def __init__(self, platform: str, size: str, grad: bool) -> None:
        import jax

        from tests.forms import all_forms
        from tests.forms.form import SIZES

        self.jax, self.platform, self.grad = jax, platform, grad
        self.size = SIZES[size]
        self.forms = {form.name: form for form in all_forms(True)}
        self.ready: dict[str, Prepared] = {}
        self.beside: dict[str, Beside] = {}

    def answer(self, request: Row) -> Row:
        form = self.forms[request["form"]]
        try:
            if request["do"] == "explain":
                return explained(form, self.platform, self.grad)
            if form.name not in self.ready:
                self.ready[form.name] = self.prepared(form)
            made = self.ready[form.name]
            if request["do"] == "compile":
                return made.told
            del self.ready[form.name]
            return {**made.told, **self.timed(made, request["seconds"])}
        except Exception as error:
            return {"failed": _first_line(error)}

    def prepared(self, form: Any) -> Prepared:
        structs = form.problem.structs(self.size)
        function = form.make(self.size)
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = self._compiled(function, structs)
        told: Row = {"compile": round(time.perf_counter() - start, 3)}
        told |= self._backend(function, structs)
        said = [str(w.message) for w in caught if "Fallback" in w.category.__name__]
        if said:
            told["emulated"] = said[0][:400]
        key = form.problem.name
        if key not in self.beside:
            self.beside[key] = self._beside(form.problem, structs, told)
        return Prepared(form, ours, self.beside[key], told)

    def _compiled(self, function: Callable, structs: Sequence[Any]) -> Callable:
        return self.jax.jit(self._asked(function, structs)).lower(*structs).compile()

    def _asked(self, function: Callable, structs: Sequence[Any]) -> Callable:
        from tests.forms.form import gradient

        return gradient(function, structs) if self.grad else function

    def _backend(self, function: Callable, structs: Sequence[Any]) -> Row:
        from pallasite.primitive import choose
        from pallasite.sites import calls_in

        names: list[str] = []
        reasons: list[str] = []
        for call in calls_in(self._asked(function, structs), *structs):
            chosen = choose(call, self.platform)
            names.append(chosen.backend)
            for name, error in chosen.refusals:
                reasons.append(f"{name}: {getattr(error, 'what', error)}"[:300])
        if self.grad:
            functional = functional_parts(function, structs)
            names += ["interpret"] * bool(functional)
            reasons += functional
        return {"backend": "+".join(dict.fromkeys(names)), "why": reasons[:2]}

    def _beside(self, problem: Any, structs: Sequence[Any], told: Row) -> Beside:
        start = time.perf_counter()
        library = None
        if problem.rival is not None and self.platform == "cuda":
            try:
                given = self.jax.eval_shape(problem.rival_operands, *structs)
                library = self._compiled(problem.rival, given)
            except Exception as error:
                told["no library"] = _first_line(error)
        plain = library or self._compiled(problem.reference, structs)
        told["rival compile"] = round(time.perf_counter() - start, 3)
        lean = problem.lean or (problem.reference if library else None)
        reference = self._compiled(lean, structs) if lean else plain
        return Beside(plain, library is not None, reference)

    def timed(self, made: Prepared, seconds: float) -> Row:
        from tests.forms.form import distance

        jax, problem = self.jax, made.form.problem
        arrays = problem.arrays(self.size)
        got = jax.block_until_ready(made.ours(*arrays))
        beside = made.beside
        want = jax.block_until_ready(beside.reference(*arrays))
        error = distance(got, want)
        allowed = problem.tolerance * (2 if self.grad else 1)
        del want
        again = [made.ours(*arrays) for _ in range(2)]
        is_same = all(same_bits(got, other) for other in again)
        del got, again
        library = problem.rival_operands(*arrays) if beside.is_library else arrays
        pair = [(made.ours, arrays), (beside.rival, library)]
        times = interleaved(jax, pair, seconds, self.platform == "cuda")
        return {
            "error": error,
            "wrong": not error <= allowed,
            **({} if is_same else {"differs": "from run to run"}),
            "ms": round(1e3 * times[0], 5),
            "rival ms": round(1e3 * times[1], 5),
            "rival": "cuDNN" if beside.is_library else "XLA",
            "ratio": round(times[1] / times[0], 4),
        }


def same_bits(one: Any, two: Any) -> bool:
    """Whether two results on a device are equal to the last bit, NaNs too."""
    import jax
    from jax import lax

    def bits(x: Any) -> Any:
        floating = jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
        return lax.bitcast_convert_type(x, f"u{x.dtype.itemsize}") if floating else x

    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(bool((bits(a) == bits(b)).all()) for a, b in pairs)


def functional_parts(function: Callable, structs: Sequence[Any]) -> list[str]:
    """Why operands get their cotangents from the emulation, if they do."""
    import pallasite as pl

    rows = pl.explain_grad(function)(*structs).operands
    return [f"{r.operand}: {r.why}"[:300] for r in rows if r.tier == "functional"]


def interleaved(jax: Any, pair: Sequence[Any], seconds: float, queued: bool):
    """Seconds of a call of each: medians of queued calls, or on CPUs the least.

    On a CPU in short turns: other work on a shared one spares some of them.
    """

    def run(each: Any, calls: int) -> float:
        function, operands = each
        start = time.perf_counter()
        results = [function(*operands) for _ in range(calls)]
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / calls

    first = [run(each, 1) for each in pair]
    first = [min(a, run(each, 1)) for a, each in zip(first, pair, strict=True)]
    share = 0.02 if queued else 0.001
    calls = [max(1, min(50, int(share / t))) for t in first]
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for n, each in enumerate(pair):
            times[n].append(run(each, calls[n]))
        if sum(first) > seconds:
            break
    return [statistics.median(t) if queued else min(t) for t in times]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:3]) if lines else ''}"[:400]


def serve(platform: str, size: str, grad: bool) -> None:
    """Requests on stdin, answers on the file that was stdout; prints go to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(platform, size, grad)
    print(json.dumps({"started": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers)


# --- the parent ---


class Remote:
    """A worker's process; killed, with all it has compiled, when a form takes long."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()

    def start(self) -> None:
        command = [sys.executable, __file__, "--worker", *self.arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("FORMS_LOG") else None,
            text=True,
            start_new_session=True,
        )
        self.lines = queue.Queue()
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        self._next(180)

    def _read(self, process: Any) -> None:
        lines = self.lines
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def _next(self, limit: float) -> Row:
        try:
            line = self.lines.get(timeout=limit)
        except queue.Empty:
            self.stop()
            return {"failed": f"over {limit:.0f} s", "slow": True}
        if not line:
            self.stop()
            return {"failed": "the process died", "died": True}
        return json.loads(line)

    def ask(self, request: Row, limit: float) -> Row:
        if self.process is None:
            self.start()
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.stop()
            return {"failed": "the process died", "died": True}
        return self._next(limit)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None


@dataclass
class Run:
    """All forms of one invocation."""

    names: Sequence[str]
    arguments: Sequence[str]
    workers: int
    compile_limit: float
    seconds: float  # of timing, for each form
    deadline: float
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    owner: dict[str, int] = field(default_factory=dict[str, int])

    def compile_all(self) -> list[Remote]:
        """Forms go to whichever worker is free; a rival is compiled in each of them."""
        waiting: queue.Queue[str] = queue.Queue()
        for name in self.names:
            waiting.put(name)
        remotes = [Remote(self.arguments) for _ in range(self.workers)]

        def work(number: int) -> None:
            while time.perf_counter() < self.deadline:
                try:
                    name = waiting.get_nowait()
                except queue.Empty:
                    return
                request = {"do": "compile", "form": name}
                row = remotes[number].ask(request, self.compile_limit)
                if row.get("slow"):
                    row["failed"] = f"compiles for over {self.compile_limit:.0f} s"
                if row.get("slow") or row.get("died"):
                    for lost in self.held_by(number):
                        waiting.put(lost)
                before = self.rows.get(name, {})
                self.rows[name] = {**before, **(_without(row) if before else row)}
                self.owner[name] = number
                print(f"  compiled {len(self.rows)}: {name}", end="\r", flush=True)

        threads = [
            threading.Thread(target=work, args=(n,)) for n in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return remotes

    def held_by(self, number: int) -> list[str]:
        """Forms that a worker has compiled and not failed at."""
        mine = [name for name, owner in self.owner.items() if owner == number]
        return [name for name in mine if "failed" not in self.rows[name]]

    def time_all(self, remotes: Sequence[Remote]) -> None:
        for number, remote in enumerate(remotes):
            for name in self.names:
                row = self.rows.get(name, {})
                if self.owner.get(name) != number or "failed" in row:
                    continue
                if time.perf_counter() > self.deadline:
                    row["failed"] = "not reached"
                    continue
                request = {"do": "time", "form": name, "seconds": self.seconds}
                timed = remote.ask(request, self.compile_limit + 30)
                row.update(timed if "compile" not in row else _without(timed))
                print_row(name, row)
            remote.stop()


def _without(row: Row) -> Row:
    """Of a form compiled again after a crash, the first compile time stays."""
    return {k: v for k, v in row.items() if k not in ("compile", "rival compile")}


# --- reports ---


def print_row(name: str, row: Row) -> None:
    if "failed" in row:
        print(f"{name[:58]:<58} FAILED {row['failed'][:150]}", flush=True)
        return
    wrong = "  WRONG" if row.get("wrong") else ""
    print(
        f"{name[:58]:<58} {row['ms']:9.3f} ms {row['rival']:>6} {row['rival ms']:9.3f}"
        f" {row['ratio']:7.3f}  {row['backend']:<10} {row['compile']:5.1f} s"
        f"  {row['error']:.0e}{wrong}",
        flush=True,
    )


def summary(rows: dict[str, Row], families: dict[str, str]) -> Row:
    """Counts by band, geometric mean, and what is slow, wrong or failed."""
    timed = {n: r for n, r in rows.items() if "ratio" in r}
    bands: Counter[str] = Counter()
    for row in timed.values():
        low = next(b for b in BANDS if row["ratio"] >= b)
        bands[f">= {low}"] += 1
    found: Row = {
        "forms": len(rows),
        "timed": len(timed),
        "bands": {f">= {b}": bands[f">= {b}"] for b in BANDS},
        "geometric mean": mean(r["ratio"] for r in timed.values()),
        "by family": {
            f: mean(r["ratio"] for n, r in timed.items() if families[n] == f)
            for f in dict.fromkeys(families[n] for n in timed)
        },
        "backends": dict(Counter(r.get("backend", "-") for r in rows.values())),
        "below 0.5": {
            n: r["ratio"]
            for n, r in sorted(timed.items(), key=lambda item: item[1]["ratio"])
            if r["ratio"] < 0.5
        },
        "wrong": [n for n, r in rows.items() if r.get("wrong")],
        "differ from run to run": [n for n, r in rows.items() if "differs" in r],
        "emulated": [n for n, r in rows.items() if "interpret" in r.get("backend", "")],
        "compile over 5 s": {
            n: r["compile"] for n, r in rows.items() if r.get("compile", 0) > 5
        },
        "failed": {n: r["failed"][:200] for n, r in rows.items() if "failed" in r},
    }
    return found


def mean(ratios: Iterable[float]) -> float | None:
    logs = [math.log(max(r, 1e-6)) for r in ratios]
    return round(math.exp(sum(logs) / len(logs)), 3) if logs else None


def report(
    path: Path, chip: str, rows: dict[str, Row], grad: bool, size: str = ""
) -> None:
    """Gradients and forward times share a file; forms that were not run stay."""
    from tests.forms import all_forms

    old = json.loads(path.read_text()) if path.exists() else {}
    kind = "gradient" if grad else "forward"
    families = {form.name: form.family for form in all_forms(True)}
    before = old.get(kind, {})
    every = {
        **(before.get("rows", {}) if before.get("size", "") == size else {}),
        **rows,
    }
    rows = {name: row for name, row in every.items() if name in families}
    part = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "chip": chip,
        **({"size": size} if size else {}),
        "versions": versions(),
        "summary": summary(rows, families),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**old, kind: part}, indent=1) + "\n")


def versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "jaxlib", "numpy", "libtpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def results_path(asked: Any, chip: str) -> Path | None:
    if not asked.json:
        return None
    default = Path(__file__).parent / "results" / f"forms_{chip}.json"
    return default if str(asked.json) == "-" else asked.json


# --- without running ---


def explained(form: Any, target: str, grad: bool) -> Row:
    """The backend of a form on a chip that need not be here, and why not the first."""
    import pallasite as pl
    from tests.forms.form import SIZES, gradient

    size = SIZES["cpu" if target == "cpu" else "model"]
    structs, function = form.problem.structs(size), form.make(size)
    asked = gradient(function, structs) if grad else function
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernels = pl.explain(asked, target, measure=False)(*structs).kernels
    functional = functional_parts(function, structs) if grad else []
    names = [k.backend for k in kernels] + ["interpret"] * bool(functional)
    return {
        "backend": "+".join(dict.fromkeys(names)),
        "why": [k.why for k in kernels if "refuses" in k.why] + functional,
        "error": [k.error for k in kernels if k.error],
        "sequential": [
            f"i{n}: {axis.reason}"
            for k in kernels
            for n, axis in enumerate(k.axes)
            if not axis.parallel
        ],
        "seconds": round(time.perf_counter() - start, 2),
    }


def explain_all(
    forms: Sequence[Any], target: str, grad: bool, limit: float
) -> dict[str, Row]:
    """Every form in a worker, because some compile without end."""
    kind = "grad" if grad else "forward"
    remote, rows = Remote((target, "model", kind)), dict[str, Row]()
    for form in forms:
        row = remote.ask({"do": "explain", "form": form.name}, limit)
        rows[form.name] = row
        why = row.get("failed") or "; ".join([*row["why"], *row["error"]])
        shown = f"{row.get('backend', 'failed'):<12} {row.get('seconds', limit):6.1f} s"
        print(f"{form.name[:58]:<58} {shown}  {why[:200]}", flush=True)
    remote.stop()
    return rows


def tpu_cycles(forms: Sequence[Any], chip: str, asked: Any) -> dict[str, Row]:
    """libtpu's estimates, and each form's distance from the best of its problem."""
    from benchmarks.forms_tpu import rate, tpu_rows
    from tests.forms import all_forms

    every = {form.name: form for form in all_forms(True)}
    path = results_path(asked, chip)
    old = json.loads(path.read_text()) if path and path.exists() else {}
    part, size = old.get("gradient" if asked.grad else "forward", {}), asked.size
    same = part.get("versions", {}).get("libtpu") == versions().get("libtpu")
    kept = part.get("rows", {}) if same and part.get("size") == size else {}

    def save(rows: dict[str, Row]) -> Row:
        found = {n: r for n, r in {**kept, **rows}.items() if n in every}
        rate(found, {name: form.problem.name for name, form in every.items()})
        if path:
            report(path, chip, found, asked.grad, size)
        return found

    limit = asked.compile_limit
    workers = asked.workers or 1
    rows = tpu_rows(forms, chip, size, asked.grad, limit, workers, kept, save)
    found = save(rows)
    for name in rows:
        if found[name].get("ratio", 1) < 1:
            print(f"{name[:58]:<58} {found[name]['ratio']}")
    return found


# --- the command ---


def chip_here() -> tuple[str, str]:
    """The platform as lowering rules name it, and the chip, asked in a process of its
    own, because this one must not hold a GPU."""
    code = (
        "import jax; from pallasite.target import chip_of_device as c; "
        "d = jax.devices()[0]; p = jax.default_backend(); f = c(d.device_kind); "
        "print('FOUND', {'gpu': 'cuda'}.get(p, p), f.name if f else d.device_kind)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    _, platform, *chip = said.stdout.strip().splitlines()[-1].split()
    return platform, "_".join(chip)


def parsed(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="cpu, gpu, gpu:CHIP, tpu:CHIP; default: here")
    parser.add_argument("--grad", action="store_true")
    parser.add_argument("--only", action="append", default=[], help="parts of names")
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--json", type=Path, nargs="?", const=Path("-"))
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="in all; 0: no limit"
    )
    parser.add_argument("--each", type=float, default=0.0, help="of timing each form")
    parser.add_argument("--compile-limit", type=float, default=30)
    text = "that compile at once; each keeps the GPU memory that XLA's autotuner took,"
    text += " until it has timed its forms: 14 of them exhausted 141 GB"
    parser.add_argument("--workers", type=int, default=0, help=text)
    parser.add_argument("--size", choices=("model", "part", "cpu", "tiny"))
    parser.add_argument("--explain", action="store_true", help="run nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    asked = parsed(argv)
    if asked.worker:
        platform, size, grad = asked.worker
        serve(platform, size, grad == "grad")
        return 0
    started = time.perf_counter()
    here = asked.target in (None, "cpu", "gpu") and not (asked.explain or asked.list)
    platform, chip = "cpu", (asked.target or "cpu").split(":")[-1]
    if asked.target == "cpu" or not here:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if here:
        platform, chip = chip_here()
    from tests.forms import all_forms

    held_out = any(name.startswith("held-out") for name in asked.family)
    forms = [
        form
        for form in all_forms(held_out)
        if (not asked.only or any(text in form.name for text in asked.only))
        and (not asked.family or form.family in asked.family)
        and (form.grad or not asked.grad)
    ]
    families = {form.name: form.family for form in forms}
    if asked.list:
        for form in forms:
            print(f"{form.family:<10} {form.problem.name:<32} {form.name}")
        print(f"{len(forms)} forms, {dict(Counter(families.values()))}")
        return 0
    workers = asked.workers or max(1, min(8, (os.cpu_count() or 2) // 2))
    if asked.explain:
        rows = explain_all(
            forms, asked.target or "cpu", asked.grad, asked.compile_limit
        )
    elif not here:
        asked.size = asked.size or "part"
        rows = tpu_cycles(forms, chip, asked)
        families = {form.name: form.family for form in all_forms(True)}
    else:
        size = asked.size or ("cpu" if platform == "cpu" else "model")
        each = asked.each or (0.3 if platform == "cuda" else 0.5)
        end = started + asked.seconds if asked.seconds else math.inf
        kind = "grad" if asked.grad else "forward"
        names = [form.name for form in forms]
        folder = tempfile.TemporaryDirectory(prefix="pallasite-forms-")
        os.environ["PALLASITE_CACHE_DIR"] = (
            folder.name
        )  # compile times are of compiling
        run = Run(
            names, (platform, size, kind), workers, asked.compile_limit, each, end
        )
        run.time_all(run.compile_all())
        rows = {name: run.rows.get(name, {"failed": "not reached"}) for name in names}
    said = summary(rows, families)
    print(f"\n{chip}, {'gradient' if asked.grad else 'forward'}")
    print(json.dumps(said, indent=1))
    print(f"{time.perf_counter() - started:.0f} s")
    path = results_path(asked, chip)
    if path:
        report(path, chip, rows, asked.grad, "" if here else asked.size or "")
    return int(bool(said["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
