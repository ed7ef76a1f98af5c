"""Runs cases: many in one compiled XLA program for the emulation, and comparison.

An engine is a function from cases to their results. `emulated` is one; native backends
are compared the same way (`check` takes any engine).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

from pallasite.frontend.emulate import emulate
from tests.fuzz.agreement import expected, mismatch
from tests.fuzz.choices import Drawn
from tests.fuzz.generate import Case, random_kernel

Engine = Callable[[Sequence[Case]], list[list[np.ndarray]]]

# Compiling is most of the time, and these kernels are small. Excess precision would
# keep f16 and bf16 values in f32 between ops; the language rounds after each op.
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,
}


def emulated(
    cases: Sequence[Case], options: dict[str, Any] | None = None
) -> list[list[np.ndarray]]:
    """The emulation's results; all kernels go through XLA as one program."""

    def run_all(groups: Sequence[Sequence[Any]]) -> list[Any]:
        return [
            emulate(case.kernel)(*group)
            for case, group in zip(cases, groups, strict=True)
        ]

    groups = [list(case.arrays) for case in cases]
    wide = any(a.dtype.itemsize == 8 for group in groups for a in group)
    with jax.enable_x64(wide):
        lowered = jax.jit(run_all).lower(groups)
        compiled = lowered.compile(compiler_options=options or COMPILER_OPTIONS)
        return [[np.asarray(r) for r in results] for results in compiled(groups)]


def check(engine: Engine, cases: Sequence[Case]) -> None:
    """Assert that an engine agrees with the numpy evaluator on all cases."""
    wanted = [expected(case) for case in cases]
    found = engine(cases)
    for case, results, (values, bounds) in zip(cases, found, wanted, strict=True):
        wrong = mismatch(results, values, bounds)
        assert wrong is None, f"{wrong}\n{case!r}"


@st.composite
def batches(draw: Any, family: str, size: int, wide: bool = False) -> list[Case]:
    """`size` kernels of one family."""
    return [random_kernel(Drawn(draw), family, wide) for _ in range(size)]
