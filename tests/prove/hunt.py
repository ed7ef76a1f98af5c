"""Proofs about random kernels against checked mode: `python -m tests.prove.hunt`.

A claim that is proved must not be reported by checked mode, with the kernel's operands
or others; one that is refuted must be, and by its counterexample; also with the ranges,
and the contents, of operands of integers promised. Exit code 1: some claim is false.

    python -m tests.prove.hunt --kernels 2000 --seed 3
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from tests import conftest  # noqa: F401  sets the environment, before jax is imported

# isort: split

import numpy as np

from pallasite.errors import CheckError
from pallasite.interpret.checked import run_checked
from pallasite.ir.nodes import Kernel
from pallasite.proofs.assume import Assumed, Given
from pallasite.proofs.kernels import prove_kernel
from pallasite.proofs.replay import NO_CHECKS, Replay
from pallasite.proofs.verdicts import CLAIMS, Claim
from tests.fuzz.choices import Seeded
from tests.fuzz.generate import FAMILIES, Case, random_kernel
from tests.prove.mutants import mutant

PER_SEED = 1_000_000
EACH_FAMILY = (*FAMILIES, "edges")
# The check that decides a claim on one run.
CHECKS = {
    "bounds": "bounds",
    "coverage": "unwritten",
    "races": "races",
    "sync": "copies",
}

GIVEN = ("bounds", "coverage", "races")


def reported(kernel: Kernel, arrays: Sequence[np.ndarray], kind: str) -> bool:
    """Whether checked mode reports a kind of bug when the kernel runs."""
    try:
        run_checked(kernel, arrays, replace(NO_CHECKS, **{kind: True}))
    except CheckError as error:
        return error.kind == kind
    return False


def hunt(numbers: range, counted: Counter[tuple[str, str]]) -> Iterator[str]:
    """The false claims about random kernels, and about these with mistakes."""
    for number in numbers:
        choices, family = Seeded(number), EACH_FAMILY[number % len(EACH_FAMILY)]
        case = random_kernel(choices, family)
        made = _claims(case, CLAIMS, promises(case))
        yield from _false(made, case, f"kernel {number} of {family}", counted)
        wrong = mutant(case, choices)
        if wrong is not None:
            made = _claims(wrong, GIVEN, list(promises(case))[1:])
            yield from _false(made, wrong, f"mutant of {number} of {family}", counted)


def _false(
    made: Iterable[tuple[Claim, Assumed]],
    case: Case,
    name: str,
    counted: Counter[tuple[str, str]],
) -> Iterator[str]:
    of = "" if name.startswith("kernel") else " of mutants"
    run = cache(partial(reported, case.kernel, case.arrays))
    for claim, promised in made:
        given = ", given" if promised else ""
        counted[claim.name + of + given, claim.verdict] += 1
        if _is_false(claim, case.kernel, promised, run):
            yield f"{name}, {promised}:\n{claim}\n{case}"


def _claims(
    case: Case, claims: Sequence[str], promised: Iterable[Assumed]
) -> Iterator[tuple[Claim, Assumed]]:
    for claim in prove_kernel(case.kernel, claims).claims:
        yield claim, {}
    for given in promised:
        for claim in prove_kernel(case.kernel, GIVEN, assume=given).claims:
            yield claim, given


def promises(case: Case) -> Iterator[dict[str | int, Any]]:
    """What holds of the integers in a kernel's operands: their ranges, and they."""
    arrays = {n: x for n, x in enumerate(case.arrays) if x.dtype.kind in "iu"}
    known = {n: x for n, x in arrays.items() if x.size}
    if known:
        yield {n: range(int(x.min()), int(x.max()) + 1) for n, x in known.items()}
        yield {n: x.copy() for n, x in known.items()}


def _is_false(
    claim: Claim, kernel: Kernel, promised: Assumed, run: Callable[[str], bool]
) -> bool:
    if claim.verdict == "unknown" or claim.name not in CHECKS:
        return False
    kind, is_refuted = CHECKS[claim.name], claim.verdict == "refuted"
    if run(kind) != is_refuted:
        return True
    replay = Replay(Given(kernel, promised))
    if replay.possible():
        return False
    if is_refuted:
        return claim.counterexample is None or not claim.counterexample.replay()
    return reported(kernel, replay.varied(), kind)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kernels", type=int, default=500)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--first", type=int, default=0, help="kernels to pass over")
    given, counted = options.parse_args(), Counter[tuple[str, str]]()
    first = given.seed * PER_SEED + given.first
    wrong = 0
    for text in hunt(range(first, first + given.kernels), counted):
        wrong += 1
        print(text, flush=True)
    for (name, verdict), n in sorted(counted.items()):
        print(f"{name:<26} {verdict:<8} {n:>6}")
    print(f"{given.kernels} kernels, {wrong} false claims")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
