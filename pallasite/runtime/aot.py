"""Ahead-of-time compilation by libtpu, on a machine without a TPU.

`compile_all(jobs, chip)` compiles kernels for one chip in a child process, because some
compiler errors abort the process and libtpu reads its flags only once. `Job.of` makes a
job from a kernel and its launch. As a command, `python -m pallasite.runtime.aot v5e`
reads jobs as JSON lines, one or several per line, and prints one JSON result per job.
"""

import contextlib
import importlib.util
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pallasite import config, target
from pallasite.errors import CompileError
from pallasite.ir.nodes import Kernel, Value
from pallasite.runtime import bundles
from pallasite.runtime.bundles import Bundles
from pallasite.runtime.forms import Form

# What libtpu would otherwise ask the computer, complaining where there is no TPU.
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
}
# No TPU runtime is queried: the topology's name determines the target.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", **NO_TPU}


def missing() -> str:
    """Why there is no libtpu to compile with, and what to do; empty if there is one."""
    named = config.get("libtpu_python")
    if named:
        lacks = f"PALLASITE_LIBTPU_PYTHON names {named}: no such program"
        return "" if shutil.which(named) else lacks
    if importlib.util.find_spec("libtpu") is not None:
        return ""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        return (
            f"there is no libtpu for {system} on {machine}, only for Linux on x86_64: "
            "compile there"
        )
    return "libtpu is not installed: pip install 'pallasite[tpu]'"


GIVE_UP = 5.0  # seconds to wait for the pipes of an ended process
READY = "ready"  # the child's first line, once libtpu is loaded

Array = tuple[tuple[int, ...], str]  # shape, numpy dtype name


@dataclass(frozen=True)
class Job:
    """One custom call to compile."""

    name: str
    target: str
    config: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    api_version: int = 1
    aliases: tuple[tuple[int, int], ...] = ()
    has_side_effect: bool = False
    devices: int = 1  # that run the call concurrently

    @staticmethod
    def of(name: str, kernel: Kernel, launch: Any) -> "Job":
        """The job of a kernel, given what its backend's `launch` returned."""
        operands = _operands(kernel, launch)
        results = _arrays(kernel.outputs, launch.result_forms)
        aliases = launch.aliases
        if launch.log_words:
            shape = launch.log_shape or (launch.log_words,)
            aliases = (*aliases, (len(operands), len(results)))
            operands, results = ((*x, (shape, "int32")) for x in (operands, results))
        return Job(
            name,
            launch.target,
            launch.config,
            operands,
            results,
            launch.api_version,
            aliases,
            launch.has_side_effect,
        )


def _operands(kernel: Kernel, launch: Any) -> tuple[Array, ...]:
    if launch.operands is None:
        return _arrays(kernel.inputs, ())
    params = [kernel.inputs[number] for number, _ in launch.operands]
    return _arrays(params, [form for _, form in launch.operands])


def _arrays(params: Sequence[Value], forms: Sequence[Form | None]) -> tuple[Array, ...]:
    """The arrays of a call, in the forms it takes."""
    found = [(p.ref.shape, p.ref.dtype.numpy_name) for p in params]
    for position, form in enumerate(forms):
        if form is not None:
            found[position] = (form.carried_shape, form.carried_dtype)
    return tuple(found)


@dataclass(frozen=True)
class Compiled:
    """The result of a job."""

    name: str
    ok: bool
    error: str = ""
    seconds: float = 0.0
    cycles: int | None = None  # libtpu's own estimate, if requested
    bundles: Bundles | None = None  # facts read from its code, if requested
    no_estimate: str = ""  # why its estimator gave up, if it did

    @property
    def estimated(self) -> int | None:
        """Cycles of a call: libtpu's estimate, else those counted in its code."""
        if self.cycles is None and self.bundles is not None:
            return self.bundles.cycles
        return self.cycles


def compile_all(
    jobs: Sequence[Job],
    chip: str,
    cycles: bool = False,
    timeout: float = 600,
    units: bool = False,
    keep: Path | None = None,
    progress: Callable[[Compiled], None] | None = None,
    together: int = 1,
) -> list[Compiled]:
    """Compile `jobs` for `chip`, one after another.

    Args:
        jobs: what to compile.
        chip: the name of a TPU among `target.chips()`.
        cycles: also request libtpu's static estimate of each kernel's run time.
        timeout: seconds until a job is abandoned.
        units: also read from the code which units are busy and how many registers are
            spilled; with `cycles`.
        keep: where to write libtpu's dumps, in one folder per job; with `cycles`.
        progress: called with each result as it arrives.
        together: how many calls to compile as one program, if only errors matter: XLA's
            overhead is then shared. Those that fail are recompiled individually.

    Returns:
        One Compiled per job, in order. A job that aborts the process or times out is
        reported as such; those after it run in a new process.

    Raises:
        CompileError: libtpu cannot be used at all.
    """
    lacking = missing()
    if lacking:
        raise CompileError(f"cannot compile for {chip}: {lacking}")
    done: list[Compiled] = []
    with tempfile.TemporaryDirectory(prefix="pallasite-aot-") as folder:
        dumps = Path(folder) / "dumps"
        dumps.mkdir()
        asked = _Asked(
            chip,
            str(dumps) if cycles else "",
            units,
            keep,
            timeout,
            1 if cycles else together,
        )
        while len(done) < len(jobs):
            rest = jobs[len(done) :]
            child = _Child(rest, asked, Path(folder) / "log")
            for result in child.results():
                done.append(result)
                if progress is not None:
                    progress(result)
            if len(done) < len(jobs) and asked.together > 1:
                asked = replace(asked, together=1)  # to find which of them failed
            elif len(done) < len(jobs):
                result = _failed(jobs[len(done)], asked, child)
                done.append(result)
                if progress is not None:
                    progress(result)
    return done


def _failed(job: Job, asked: "_Asked", child: "_Child") -> Compiled:
    """The result of a job that aborted its process or timed out."""
    if not asked.folder:
        return Compiled(job.name, False, child.last_words())
    if asked.profile:
        # The estimator gives up on some programs that compile, or counts the steps of
        # a long loop one by one; read their code.
        why, asked = child.last_words(), replace(asked, profile=False, units=True)
        second = _Child([job], asked, child.log)
        again = [*second.results()]
        if again and again[0].ok:
            return replace(again[0], no_estimate=why)
        if second.late:
            return Compiled(job.name, False, second.last_words())
    (again,) = compile_all([job], asked.chip, timeout=asked.timeout)
    return again


@dataclass(frozen=True)
class _Asked:
    """What a child process should do with each of its jobs."""

    chip: str
    folder: str  # for dumps; empty for none
    units: bool
    keep: Path | None
    timeout: float
    together: int = 1  # jobs per program
    profile: bool = True  # whether dumps include the estimate

    def lines(self, jobs: Sequence[Job]) -> Iterator[str]:
        """What the process reads: a job or a list of jobs per line."""
        pending: list[dict[str, Any]] = []
        for job in jobs:
            if pending and (len(pending) == self.together or job.devices > 1):
                yield _line(pending)
                pending = []
            pending.append(asdict(job))
            if job.devices > 1:
                yield _line(pending)
                pending = []
        if pending:
            yield _line(pending)

    @property
    def arguments(self) -> list[str]:
        if not self.folder:
            return [self.chip]
        keep = str(self.keep) if self.keep is not None else ""
        return [self.chip, self.folder, "units" if self.units else "", keep]


def _line(jobs: Sequence[dict[str, Any]]) -> str:
    return json.dumps(jobs[0] if len(jobs) == 1 else jobs) + "\n"


class _Child:
    """A process that holds libtpu and compiles jobs until one aborts it."""

    def __init__(self, jobs: Sequence[Job], asked: _Asked, log: Path):
        self.asked, self.log, self.late = asked, log, False
        self.jobs = len(jobs)
        python = config.get("libtpu_python") or sys.executable
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [python, "-m", "pallasite.runtime.aot", *asked.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=_environment(asked),
                text=True,
            )
        self.lines: queue.Queue[str | None] = queue.Queue()
        texts = [*asked.lines(jobs)]
        self.threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._write, args=(texts,), daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.put(line)
        self.lines.put(None)

    def _write(self, texts: Sequence[str]) -> None:
        assert self.process.stdin is not None
        # The process may end before it has read them all.
        with contextlib.suppress(OSError), self.process.stdin as jobs:
            jobs.writelines(texts)

    def results(self) -> Iterator[Compiled]:
        """Results as they arrive, until all are there or the process ends."""
        ready, left = False, self.jobs
        try:
            while left and (line := self.lines.get(timeout=self.asked.timeout)):
                ready = ready or line.strip() == READY
                if line.startswith("{"):
                    left -= 1
                    yield _result(json.loads(line))
        except queue.Empty:
            self.late = True
        finally:
            self.process.kill()
            self.process.wait()
            for thread in self.threads:
                thread.join(GIVE_UP)
        if not ready:
            raise CompileError(
                f"libtpu cannot compile for {self.asked.chip} here",
                [("output", self.last_words())],
                fix="install the libtpu release that belongs to this jax: jax[tpu]",
            )

    def last_words(self) -> str:
        """Why the process ended before its last job was done."""
        if self.late:
            return f"libtpu did not end within {self.asked.timeout:g} seconds"
        return f"libtpu aborted: {_reason(self.log.read_text(errors='replace'))}"


def _result(data: dict[str, Any]) -> Compiled:
    found = data.pop("bundles")
    return Compiled(**data, bundles=None if found is None else Bundles(**found))


def _environment(asked: _Asked) -> dict[str, str]:
    package_root = str(config.PACKAGE.parent)
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    environment.pop("XLA_FLAGS", None)
    if asked.folder:
        more = asked.units or asked.keep is not None
        flags = _profile_flags(asked.folder, more, asked.profile)
        environment["LIBTPU_INIT_ARGS"] = flags
    return environment


def _reason(log: str) -> str:
    """The fatal line of an ended process's log, else the log's tail."""
    fatal = [line for line in log.splitlines() if re.match(r"F\d{4} ", line)]
    return fatal[0] if fatal else log[-2000:]


def _profile_flags(folder: str, code: bool, profile: bool) -> str:
    flags = {
        "xla_jf_dump_to": folder,
        "xla_jf_dump_llo_text": "true",
        "xla_jf_dump_llo_pass_label_regex": (
            bundles.LABELS if code else "no_pass_is_called_this"
        ),
    }
    if profile:
        flags["xla_jf_dump_static_llo_profile_to"] = folder
    return " ".join(f"--{name}={value}" for name, value in flags.items())


# --- the child process ---


def _main(chip: str, folder: str = "", units: str = "", keep: str = "") -> None:
    row = target.chip(chip)
    assert isinstance(row, target.Tpu)
    compile_call = _compiler(row)
    print(READY, flush=True)
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        if isinstance(job, list):
            for result in _compiled_together(job, compile_call):
                print(json.dumps(asdict(result)), flush=True)
            continue
        # Dumps are named after the op, whose name is the same for every job.
        for dump in Path(folder).iterdir() if folder else ():
            dump.unlink()
        result = _compiled(job, compile_call)
        if result.ok and folder:
            code = bundles.read(folder, OP) if units else None
            result = replace(result, cycles=_cycles(folder), bundles=code)
        if folder and keep:
            name = re.sub(r"\W+", "_", job["name"]).strip("_")
            place = Path(keep) / f"{number:02d}-{name}"
            shutil.copytree(folder, place, dirs_exist_ok=True)
        print(json.dumps(asdict(result)), flush=True)


OP = "ffi_call"  # XLA's name for a job's op


def _compiler(chip: target.Tpu) -> Callable[..., None]:
    """A function that compiles jobs as calls of one program."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    config = {"chip_config_name": chip.chip_config} if chip.chip_config else {}
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=chip.topology, **config
    ).devices
    whole = PartitionSpec()

    def array(described: Array, **kw: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = described
        return jax.ShapeDtypeStruct(tuple(shape), jax.numpy.dtype(dtype), **kw)

    def call_of(job: dict[str, Any]) -> Any:
        return jax.ffi.ffi_call(
            job["target"],
            [array(r) for r in job["results"]],
            custom_call_api_version=job["api_version"],
            legacy_backend_config=job["config"],
            input_output_aliases=dict(job["aliases"]),
            has_side_effect=job["has_side_effect"],
        )

    def compile_calls(*jobs: dict[str, Any]) -> None:
        count = jobs[0]["devices"]
        mesh = Mesh(np.array(devices[:count]), ("x",))
        sharding = NamedSharding(mesh, whole)
        run: Any = lambda *groups: [
            call_of(job)(*xs) for job, xs in zip(jobs, groups, strict=True)
        ]
        if count > 1:
            run = jax.shard_map(
                run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
            )
        operands = [[array(o, sharding=sharding) for o in j["operands"]] for j in jobs]
        # Without operands, the results' sharding determines the device.
        jax.jit(run, out_shardings=sharding).lower(*operands).compile()

    return compile_calls


def _compiled(job: dict[str, Any], compile_call: Callable[..., None]) -> Compiled:
    start = time.perf_counter()
    try:
        compile_call(job)
    except Exception as error:
        return Compiled(job["name"], False, str(error))
    return Compiled(job["name"], True, seconds=time.perf_counter() - start)


def _compiled_together(
    jobs: Sequence[dict[str, Any]], compile_calls: Callable[..., None]
) -> list[Compiled]:
    start = time.perf_counter()
    try:
        compile_calls(*jobs)
    except Exception:
        return [_compiled(job, compile_calls) for job in jobs]
    each = (time.perf_counter() - start) / len(jobs)
    return [Compiled(job["name"], True, seconds=each) for job in jobs]


def _profiles(folder: str) -> list[Path]:
    """Profiles of the custom call, without those of XLA's copies around it."""
    return sorted(Path(folder).glob(f"{OP}*static_llo_profile*"))


def _cycles(folder: str) -> int | None:
    texts = [path.read_text() for path in _profiles(folder)]
    numbers = [int(n) for t in texts for n in re.findall(r"estimated_cycles: (\d+)", t)]
    return max(numbers, default=None)


if __name__ == "__main__":
    _main(*sys.argv[1:])
