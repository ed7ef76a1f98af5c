"""The CPU's hostile kernels on a GPU's backends; what they compute is the evaluator's.

`host` runs the text of `cuda` by `host.py` between forbidden pages: a step outside
an operand, result or scratch array ends the process; `cuda` and `triton` run on a GPU,
where a step far outside does. So `test_hostile.py` runs this file as a process.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from pallasite.errors import ResourceError, UnsupportedError
from pallasite.ir.nodes import Kernel
from pallasite.passes.analysis.grid import analyze
from pallasite.primitive import Call, bind_call
from tests.backends.cpu import hostile
from tests.backends.cuda import host
from tests.fuzz.agreement import run_numpy, same

Run = Callable[..., list[np.ndarray]]


def on_host(kernel: Kernel, folder: Path) -> list[Run]:
    """Arrays end at a forbidden page, or start after one."""
    code = host.Code(kernel, folder, optimise="-O0")
    return [
        lambda *arrays, after=after: code(*arrays, memory=host.Fenced(after))
        for after in (True, False)
    ]


def on_gpu(kernel: Kernel, backend: str) -> list[Run]:
    call = Call(kernel, backend=backend)
    return [lambda *arrays: [np.asarray(r) for r in bind_call(call, arrays)]]


def attack(kernel: Kernel, runs: list[Run], rng: np.random.Generator) -> None:
    dtype = kernel.params[0].ref.dtype
    x, y = (rng.integers(0, 100, hostile.SHAPE).astype(dtype.np) for _ in range(2))
    # Block numbers with an offset known only at run time are taken to be in range:
    # if several are not, they are the same block, and either program may be the last.
    one_by_one = not any(
        axis.parallel for axis in analyze(kernel).axes if axis.size != 1
    )
    for where in hostile.wild_indices(kernel.params[1].ref.dtype, rng):
        (want,) = run_numpy(kernel, [x, where, y])
        for run in runs:
            (got,) = run(x, where, y)
            equal = same(got, want).all() or not one_by_one
            assert equal, f"indices {where}: {got} is not {want}"


def main(engine: str) -> None:
    rng = np.random.default_rng(0)
    inside, refused, wrong = 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, jax.enable_x64(True):
        for name, kernel in hostile.kernels(programs=True):
            print(name, flush=True)
            try:
                if engine == "host":
                    runs = on_host(kernel, Path(folder))
                else:
                    runs = on_gpu(kernel, engine)
                attack(kernel, runs, rng)
                inside += 1
            except (UnsupportedError, ResourceError) as error:
                print("   ", error.what)
                refused += 1
            except AssertionError as error:
                print("    WRONG", error)
                wrong += 1
    print(f"{inside} stayed inside, {refused} refused, {wrong} wrong")


if __name__ == "__main__":
    main(sys.argv[1])
