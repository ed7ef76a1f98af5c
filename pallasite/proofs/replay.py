"""Runs a kernel in checked mode on synthetic operands, to see what a proof says."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from pallasite.checking import Checked
from pallasite.errors import CheckError, PallasError
from pallasite.interpret.checked import run_checked
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.lower.device_numbers import talks_to_devices
from pallasite.proofs.assume import Given
from pallasite.proofs.verdicts import Counterexample

MOST_PROGRAMS = 1 << 12
_MOST_ELEMENTS = 1 << 22
# The check of each claim.
_CHECKS = {
    "bounds": "bounds",
    "coverage": "unwritten",
    "races": "races",
    "order": "races",
    "sync": "copies",
}
# Checked mode that reports nothing; a claim's own check is turned on.
NO_CHECKS = Checked(
    bounds=False,
    uninitialised=False,
    races=False,
    unwritten=False,
    copies=False,
    promises=False,
)


@dataclass
class Replay:
    """Checked runs of one kernel, one kind of check each. Each is run once.

    Operands of integers hold what the author promises (`assume.py`).
    """

    given: Given
    reports: dict[str, str] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    @property
    def kernel(self) -> Kernel:
        return self.given.kernel

    def operands(self, seed: int = 0) -> list[np.ndarray]:
        """Synthetic operands: floats between 1 and 2, integers of 0 if they may be."""
        rng = np.random.default_rng(seed)
        made = []
        for param in self.kernel.inputs:
            tile = param.ref.tile
            if tile.dtype.is_float:
                made.append((1 + rng.random(tile.shape)).astype(tile.dtype.np))
            else:
                made.append(self.given.example(param))
        return made

    def varied(self, seed: int = 0) -> list[np.ndarray]:
        """Operands whose integers differ, too."""
        rng, made = np.random.default_rng(seed), self.operands(seed)
        for n, param in enumerate(self.kernel.inputs):
            dtype = param.ref.dtype
            if not dtype.is_float and param not in self.given.tables:
                known = self.given.ranges.get(param, range(min(dtype.limits[1], 7) + 1))
                drawn = rng.integers(0, len(known), made[n].shape)
                made[n] = (known.start + known.step * drawn).astype(dtype.np)
        return made

    def possible(self) -> str:
        """Why the kernel is not run; empty if it can be."""
        if talks_to_devices(self.kernel.body):
            return "it talks to other devices"
        if any(op.name == "while" for op in walk(self.kernel.body)):
            return "a while may never end on synthetic operands"
        steps = 1
        for op in walk(self.kernel.body):
            if op.name == "pipeline":
                sizes = Pipeline.of(op).grid
                steps *= prod(n for n in sizes if n is not None)
        if steps > MOST_PROGRAMS:
            return "it has too many steps to run them all"
        if sum(p.ref.tile.size for p in self.kernel.params) > _MOST_ELEMENTS:
            return "its arrays are too large to run it"
        return ""

    def report(self, claim: str) -> str:
        """What checked mode reports about a claim; empty if nothing, or not run."""
        if claim not in self.reports:
            self.reports[claim] = self._run(claim)
        return self.reports[claim]

    def _run(self, claim: str) -> str:
        if self.possible():
            return ""
        options = replace(NO_CHECKS, **{_CHECKS[claim]: True})
        try:
            run_checked(self.kernel, self.operands(), options)
        except CheckError as error:
            return str(error) if error.kind == _CHECKS[claim] else ""
        except PallasError:
            return ""
        self.ended.add(claim)
        return ""

    def ends(self, claim: str) -> bool:
        """Whether the run that looks at a claim comes to its end without a report."""
        return not self.report(claim) and claim in self.ended

    def results(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """The kernel's results, without any check; None if it is not run."""
        if self.possible():
            return None
        try:
            return run_checked(
                self.kernel, arrays, replace(NO_CHECKS, orders=("early",))
            )
        except PallasError:
            return None

    def example(self, claim: str, program: str, text: str) -> Counterexample:
        return Counterexample(program, text, lambda: self.report(claim))
