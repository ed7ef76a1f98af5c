"""What libtpu makes of our kernels, without a TPU: compiled or not, estimated cycles.

The kernels are those of tests/backends/tpu; the cycles are libtpu's own static estimate
(one TensorCore; copies modelled; nothing measured). Names on the command line pick
kernels: `python benchmarks/tracer_tpu.py matmul attention`.
"""

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

CHIPS = ("v5e", "v6e")


def main(*names: str) -> None:
    if importlib.util.find_spec("libtpu") is None:
        print("libtpu is not installed: pip install 'pallasite[tpu]'")
        return
    from pallasite.runtime.aot import compile_all
    from tests.backends.tpu.harness import job, kernel_of
    from tests.backends.tpu.kernels import CASES

    names = names or tuple(CASES)
    print(f"emitting {len(names)} kernels", flush=True)
    jobs = [job(name, kernel_of(name)) for name in names]
    columns = {}
    for chip in CHIPS:
        print(f"compiling for {chip}", flush=True)
        columns[chip] = compile_all(jobs, chip, cycles=True)
    width = max(map(len, names))
    print(f"{'kernel'.ljust(width)}  " + "  ".join(c.rjust(12) for c in CHIPS))
    for row, name in enumerate(names):
        cells = [shown(columns[chip][row]) for chip in CHIPS]
        print(f"{name.ljust(width)}  " + "  ".join(c.rjust(12) for c in cells))
    failed = [r for column in columns.values() for r in column if not r.ok]
    for result in failed:
        print(f"{result.name}: {result.error.splitlines()[0]}")


def shown(result) -> str:
    if not result.ok:
        return "failed"
    return "compiled" if result.cycles is None else f"{result.cycles:,}"


if __name__ == "__main__":
    main(*sys.argv[1:])
