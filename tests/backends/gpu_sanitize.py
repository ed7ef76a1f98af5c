"""Kernels on a GPU under NVIDIA's compute-sanitizer, in several processes.

    python -m tests.backends.gpu_sanitize                     # memcheck
    python -m tests.backends.gpu_sanitize "attention grid" softmax
    python -m tests.backends.gpu_sanitize --tool racecheck    # or synccheck, initcheck
    python -m tests.backends.gpu_sanitize forms: gradients: library:

`memcheck` sees the zoo through both backends and the checks of `gpu_check.py`; the
other tools see what `cuda` emits, because Triton's code is not ours. Forms, the library
and their gradients run by the default backends when they are named. Every array is an
allocation of its own, so that a step past its end is seen. A process that dies is
started again after the kernel it died of; all take what is left from one list. Parts
of names choose some of it. Exit code 1: something was reported.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from tests.backends.processes import run_each, run_in_processes

BACKENDS = {"memcheck": ("cuda", "triton")}  # other tools: `cuda`
# Of the checks, those that are quick under a sanitizer; they run many shapes each.
CHECKS = (
    "add",
    "softmax",
    "layernorm",
    "gelu",
    "product small",
    "product nk",
    "product km",
    "product odd",
    "product i8",
    "attention grid 64x64",
    "attention grid causal 64x64",
    "attention loop 64",
)
FORM_SIZE = "cpu"  # those of models do not fit the memory for all processes at once
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


# --- one process, under the sanitizer ---


def subjects(tool: str) -> list[str]:
    """Names of all that runs: of the zoo with a backend, and of checks."""
    from tests.zoo import all_cases

    backends = BACKENDS.get(tool, ("cuda",))
    zoo = [f"zoo {c.name} {b}" for c in all_cases() for b in backends]
    return [*(f"check {name}" for name in CHECKS), *zoo]


def larger() -> list[str]:
    """Names of the forms and operations that `run_larger` runs, each with its kind."""
    from tests.backends.cuda import prove_all

    kinds = prove_all.KINDS[2:]
    return [f"{kind}: {name}" for kind in kinds for name in prove_all.names(kind)]


def run_larger(kind: str, name: str) -> str:
    import jax
    import jax.numpy as jnp

    from tests.backends.cuda import prove_all

    def array(operand: Any) -> Any:
        if not hasattr(operand, "dtype"):
            return operand
        if jnp.issubdtype(operand.dtype, jnp.floating):
            drawn = jax.random.normal(jax.random.key(0), operand.shape, jnp.float32)
            return drawn.astype(operand.dtype)
        return jnp.zeros(operand.shape, operand.dtype)

    function, operands = prove_all.subject(kind, name, FORM_SIZE)
    if kind.startswith("form"):  # whose tables and lengths have a meaning
        (form,) = (f for f in prove_all.all_forms() if f.name == name)
        operands = form.problem.arrays(prove_all.SIZES[FORM_SIZE])
    jax.block_until_ready(jax.jit(function)(*jax.tree.map(array, list(operands))))
    return "ran"


def run(subject: str) -> str:
    import jax

    from tests.backends.cuda import gpu_check
    from tests.zoo import all_cases
    from tests.zoo.test_zoo import arguments

    if ": " in subject:
        return run_larger(*subject.split(": ", 1))
    kind, name = subject.split(" ", 1)
    if kind == "check":
        gpu_check.CHECKS[name]()
        return "ran"
    name, backend = name.split()
    (case,) = (c for c in all_cases() if c.name == name)
    out = case.run(*arguments(case, 0), interpret=False, backend=backend)
    jax.block_until_ready(out)
    return "ran"


# --- all processes ---


def is_report(line: str) -> bool:
    """Whether a line of the sanitizer starts a report; indented ones continue one."""
    if not line.startswith("========= ") or line.startswith("=========  "):
        return False
    quiet = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY: 0 ")
    # A process that died is counted as such, by the subject it died of.
    about = (*quiet, "Target application", "Error: process", "Saved host backtrace")
    text = line.removeprefix("========= ").strip()
    return bool(text) and not text.startswith(about)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    tools = ("memcheck", "racecheck", "synccheck", "initcheck")
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--tool", choices=tools, default=tools[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=600)
    text = "seconds without a line until a process is killed and a subject tried again"
    parser.add_argument("--patience", type=float, default=60, help=text)
    default = os.environ.get("SANITIZER") or shutil.which("compute-sanitizer")
    text = "compute-sanitizer, by default $SANITIZER or the one on the path"
    parser.add_argument("--sanitizer", default=default, help=text)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run_each(sys.stdin, run)
        return 0
    if options.sanitizer is None:
        parser.error("compute-sanitizer is not here: name it with --sanitizer")

    tool = ["--tool", options.tool, "--print-limit", "20", "--report-api-errors=no"]
    # Each process takes a port, of ten by default.
    tool += ["--max-connections", str(4 * options.processes)]
    if options.tool == "synccheck":  # barriers of all programs at once
        tool += ["--num-cuda-barriers", "65536"]
    own = [sys.executable, "-W", "ignore", "-m", "tests.backends.gpu_sanitize"]
    command = [options.sanitizer, *tool, *own, "--run"]
    parts = options.names or [""]
    all_names = subjects(options.tool)
    if options.names:
        all_names += larger()
    names = [name for name in all_names if any(part in name for part in parts)]
    where = (options.seconds, options.processes, ENVIRONMENT)
    # Of sixteen processes that start at the same time, some never get to a kernel.
    how = {"apart": 1, "patience": options.patience}
    found = run_in_processes(command, names, *where, is_report, **how)
    found.tell(options.tool)
    return 1 if found.reports else 0


if __name__ == "__main__":
    sys.exit(main())
