"""Ahead-of-time compilation by libtpu, on a machine without a TPU.

`compile_all(jobs, chip)` compiles kernels for one chip in a child process, because some
compiler errors end the process and libtpu reads its flags once. `Job.of` makes a job
from a kernel and its launch. As a command: `python -m pallasite.runtime.aot v5e`
reads jobs as JSON lines and prints one JSON result per line.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pallasite import config, target
from pallasite.errors import CompileError
from pallasite.ir.nodes import Kernel, Value
from pallasite.runtime.forms import Form

# No TPU runtime is queried: the topology's name decides what is compiled for.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
}

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
    devices: int = 1  # that run the call at once

    @staticmethod
    def of(name: str, kernel: Kernel, launch: Any) -> "Job":
        """The call of a kernel, given what its backend's `launch` returned."""
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
    """The arrays of a call, in the forms that it takes them in."""
    found = [(p.ref.shape, p.ref.dtype.numpy_name) for p in params]
    for position, form in enumerate(forms):
        if form is not None:
            found[position] = (form.carried_shape, form.carried_dtype)
    return tuple(found)


@dataclass(frozen=True)
class Compiled:
    """What became of a job."""

    name: str
    ok: bool
    error: str = ""
    seconds: float = 0.0
    cycles: int | None = None  # libtpu's own estimate, where it was asked for


def compile_all(
    jobs: Sequence[Job], chip: str, cycles: bool = False, timeout: float = 600
) -> list[Compiled]:
    """Compile `jobs` for `chip`, one after another.

    Args:
        jobs: what to compile.
        chip: the name of a TPU in `target.TPUS`.
        cycles: also ask for libtpu's static estimate of each kernel's run time.
        timeout: seconds until the child process is given up.

    Returns:
        One Compiled per job, in order. A job that ends the process is reported with
        what the process wrote; those after it run in a new process.

    Raises:
        CompileError: libtpu cannot be used at all.
    """
    done: list[Compiled] = []
    with tempfile.TemporaryDirectory(prefix="pallasite-aot-") as folder:
        while len(done) < len(jobs):
            rest = jobs[len(done) :]
            results, last_words = _run_child(rest, chip, cycles, folder, timeout)
            done += results
            if len(results) < len(rest):
                failed = rest[len(results)]
                # The estimator gives up on some programs that compile.
                again = compile_all([failed], chip, timeout=timeout) if cycles else []
                aborted = Compiled(failed.name, False, f"libtpu aborted: {last_words}")
                done += again or [aborted]
    return done


def _run_child(
    jobs: Sequence[Job], chip: str, cycles: bool, folder: str, timeout: float
) -> tuple[list[Compiled], str]:
    package_root = str(config.PACKAGE.parent)
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    environment.pop("XLA_FLAGS", None)
    if cycles:
        environment["LIBTPU_INIT_ARGS"] = _profile_flags(folder)
    command = [sys.executable, "-m", "pallasite.runtime.aot", chip]
    command += [folder] if cycles else []
    lines = "".join(json.dumps(asdict(job)) + "\n" for job in jobs)
    child = subprocess.run(
        command,
        input=lines,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if READY not in child.stdout:
        raise CompileError(
            f"libtpu cannot compile for {chip} here",
            [("output", _reason(child.stderr))],
            fix="install the libtpu release that belongs to this jax: jax[tpu]",
        )
    results = [
        Compiled(**json.loads(line))
        for line in child.stdout.splitlines()
        if line.startswith("{")
    ]
    return results, _reason(child.stderr)


def _reason(log: str) -> str:
    """Of what a process wrote before it ended: the fatal line, else the end."""
    fatal = [line for line in log.splitlines() if re.match(r"F\d{4} ", line)]
    return fatal[0] if fatal else log[-2000:]


def _profile_flags(folder: str) -> str:
    flags = {
        "xla_jf_dump_to": folder,
        "xla_jf_dump_llo_text": "true",
        "xla_jf_dump_static_llo_profile_to": folder,
        "xla_jf_dump_llo_pass_label_regex": "no_pass_is_called_this",
    }
    return " ".join(f"--{name}={value}" for name, value in flags.items())


# --- the child process ---


def _main(chip: str, profile_folder: str = "") -> None:
    compile_call = _compiler(target.TPUS[chip].topology)
    print(READY, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        # Profiles are named after the op, and that is the same for every job.
        for profile in _profiles(profile_folder) if profile_folder else ():
            profile.unlink()
        result = _compiled(job, compile_call)
        if result.ok and profile_folder:
            result = replace(result, cycles=_cycles(profile_folder))
        print(json.dumps(asdict(result)), flush=True)


def _compiler(topology: str) -> Callable[[dict[str, Any]], None]:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    whole = PartitionSpec()

    def array(described: Array, **kw: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = described
        return jax.ShapeDtypeStruct(tuple(shape), jax.numpy.dtype(dtype), **kw)

    def compile_call(job: dict[str, Any]) -> None:
        call = jax.ffi.ffi_call(
            job["target"],
            [array(r) for r in job["results"]],
            custom_call_api_version=job["api_version"],
            legacy_backend_config=job["config"],
            input_output_aliases=dict(job["aliases"]),
            has_side_effect=job["has_side_effect"],
        )
        mesh = Mesh(np.array(devices[: job["devices"]]), ("x",))
        sharding = NamedSharding(mesh, whole)
        run: Any = lambda *xs: call(*xs)
        if job["devices"] > 1:
            run = jax.shard_map(
                run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
            )
        operands = [array(o, sharding=sharding) for o in job["operands"]]
        # Results say which device it is for, where there are no operands.
        jax.jit(run, out_shardings=sharding).lower(*operands).compile()

    return compile_call


def _compiled(job: dict[str, Any], compile_call: Callable[..., None]) -> Compiled:
    start = time.perf_counter()
    try:
        compile_call(job)
    except Exception as error:
        return Compiled(job["name"], False, str(error))
    return Compiled(job["name"], True, seconds=time.perf_counter() - start)


def _profiles(folder: str) -> list[Path]:
    """Profiles of the custom call; XLA's own copies around it have theirs."""
    return sorted(Path(folder).glob("ffi_call*static_llo_profile*"))


def _cycles(folder: str) -> int | None:
    texts = [path.read_text() for path in _profiles(folder)]
    numbers = [int(n) for t in texts for n in re.findall(r"estimated_cycles: (\d+)", t)]
    return max(numbers, default=None)


if __name__ == "__main__":
    _main(*sys.argv[1:])
