"""Runs cases on an engine and compares: the emulation, many in one XLA program.

An engine is a function from cases to their results. `emulated` is one; `check` takes
any, so that native backends are compared the same way.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.emulation.emulate import emulate
from tests.fuzz.agreement import close_to, expected, mismatch
from tests.fuzz.generate import Case
from tests.xla import QUICK, USUAL

Results = list[list[np.ndarray]]
Engine = Callable[[Sequence[Case]], Results]

# Compiling is most of the time, and these kernels are small. Excess precision would
# keep f16 and bf16 values in f32 between ops; the language rounds after each op.
COMPILER_OPTIONS = {**QUICK, "xla_allow_excess_precision": False}
OPTIMISED = {**USUAL, "xla_allow_excess_precision": False}
SELF_QUOTIENT = re.compile(r": [iu]\d+\S* = div (%\w+), \1\b")
PLAIN = {"xla_disable_hlo_passes": "fusion,algsimp"}


def emulated(
    cases: Sequence[Case], options: Mapping[str, Any] = COMPILER_OPTIONS
) -> Results:
    """The emulation's results; all kernels go through XLA as one program."""

    def run_all(groups: Sequence[Sequence[Any]]) -> list[Any]:
        return [
            emulate(case.kernel)(*group)
            for case, group in zip(cases, groups, strict=True)
        ]

    groups = [list(case.arrays) for case in cases]
    types = ("f64", "i64", "u64")
    wide = any(name in case.kernel.text for case in cases for name in types)
    with jax.enable_x64(wide), jax.default_device(jax.devices("cpu")[0]):
        lowered = jax.jit(run_all).lower(groups)
        results = lowered.compile(compiler_options=dict(options))(groups)
    return [[np.asarray(r) for r in found] for found in results]


def check(engine: Engine, cases: Sequence[Case], quick: bool = False) -> None:
    """Assert that an engine agrees with the numpy evaluator on all cases.

    With `quick`, how far a float may be off is only found out if it is off.
    """
    wanted = [close_to(case) if quick else expected(case) for case in cases]
    found = engine(cases)
    for case, results, (values, bounds) in zip(cases, found, wanted, strict=True):
        wrong = mismatch(results, values, bounds)
        if wrong is not None and quick:
            values, bounds = expected(case)
            wrong = mismatch(results, values, bounds)
        if wrong is not None and engine is emulated:
            # XLA's own bugs: a fusion on CPU may overwrite what it still reads
            # (openxla/xla#49176), abs(x * x) is taken for x * x although integers
            # wrap. The emulation is right if it is without those passes.
            (results,) = emulated([case], {**COMPILER_OPTIONS, **PLAIN})
            wrong = mismatch(results, values, bounds)
            # XLA from jaxlib 0.11 on takes x / x for 1, where the integer x is 0, too.
            if SELF_QUOTIENT.search(case.kernel.text):
                continue
        assert wrong is None, f"{wrong}\n{case!r}"
