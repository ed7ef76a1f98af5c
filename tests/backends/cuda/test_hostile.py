"""No index, however wrong, leaves its memory on a GPU."""

import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from pallasite.backends.base import Compiled, Options, get
from pallasite.errors import ResourceError, UnsupportedError
from pallasite.ir.nodes import walk
from pallasite.target import GPUS
from tests.backends.cpu.hostile import SHAPE, kernels, wild_indices
from tests.backends.cuda import host
from tests.conftest import ROOT
from tests.fuzz.agreement import run_numpy, same

SHORT_OPERAND = """
import sys
from pathlib import Path
import numpy as np
from tests.backends.cuda import host
from tests.ir.kernels import vector_add

code = host.Code(vector_add(64, 16), Path(sys.argv[1]))
whole = np.zeros(64, np.float32)
code(whole, whole, memory=host.Fenced())
print("still here", flush=True)
memory = host.Fenced()
memory.place = lambda array, place=memory.place: place(array[:60])
code(whole, whole, memory=memory)
print("not noticed")
"""
needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="g++, which compiles the emitted text, is missing"
)


@pytest.mark.parametrize(
    ("engine", "least"),
    [
        pytest.param("host", 40, marks=needs_compiler),
        pytest.param("cuda", 40, marks=pytest.mark.gpu),
        pytest.param("triton", 60, marks=pytest.mark.gpu),
    ],
)
def test_hostile_kernels_stay_inside(engine: str, least: int, run_python):
    printed = run_python("-m", "tests.backends.cuda.hostile", engine)
    found = re.search(r"(\d+) stayed inside, (\d+) refused, 0 wrong", printed)
    assert found is not None, printed
    assert int(found[1]) >= least


@needs_compiler
def test_one_vector_too_far_is_noticed(tmp_path):
    """The forbidden pages are where they should be."""
    command = [sys.executable, "-c", SHORT_OPERAND, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "still here\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("backend", ["cpu", "cuda", "triton"])
def test_scheduled_hostile_kernels_mean_the_same(backend: str):
    """What a backend makes of an index, before it emits code, by the evaluator."""
    options = Options(chip=None if backend == "cpu" else GPUS["h200"])
    rng = np.random.default_rng(0)
    compared = 0
    for name, kernel in kernels(programs=True):
        try:
            scheduled = Compiled(get(backend), kernel, options).scheduled
        except (UnsupportedError, ResourceError):
            continue
        if any(op.name == "roles" for op in walk(scheduled.body)):
            continue  # for checked mode, which `host` takes the place of
        dtype = kernel.params[0].ref.dtype.np
        x, y = (rng.integers(0, 100, SHAPE).astype(dtype) for _ in range(2))
        for where in wild_indices(kernel.params[1].ref.dtype, rng):
            (want,) = run_numpy(kernel, [x, where, y])
            got = run_numpy(scheduled, [x, where, y])[0]
            assert same(got, want).all(), (name, where)
            compared += 1
    assert compared > 100, compared
