"""Proofs about random kernels against checked mode: `python -m tests.prove.hunt`.

A claim that is proved must not be reported by checked mode, and one that is refuted
must be; also with the ranges, and the contents, of operands of integers promised. Exit
code 1: some claim is false.

    python -m tests.prove.hunt --kernels 2000 --seed 3
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests import conftest  # noqa: F401  sets the environment, before jax is imported

# isort: split

from pallasite.errors import CheckError
from pallasite.interpret.checked import run_checked
from pallasite.proofs.kernels import prove_kernel
from pallasite.proofs.replay import NO_CHECKS
from pallasite.proofs.verdicts import Claim
from tests.fuzz.choices import Seeded
from tests.fuzz.generate import FAMILIES, Case, random_kernel

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


def reported(case: Case, kind: str) -> bool:
    """Whether checked mode reports a kind of bug when the kernel runs."""
    try:
        run_checked(case.kernel, case.arrays, replace(NO_CHECKS, **{kind: True}))
    except CheckError as error:
        return error.kind == kind
    return False


def hunt(numbers: range, counted: Counter[tuple[str, str]]) -> Iterator[str]:
    """The false claims about random kernels."""
    for number in numbers:
        family = EACH_FAMILY[number % len(EACH_FAMILY)]
        case = random_kernel(Seeded(number), family)
        for claim in prove_kernel(case.kernel).claims:
            counted[claim.name, claim.verdict] += 1
            if _is_false(claim, case):
                yield f"kernel {number} of {family}:\n{claim}\n{case}"
        for promised in promises(case):
            for claim in prove_kernel(case.kernel, GIVEN, assume=promised).claims:
                counted[f"{claim.name}, given", claim.verdict] += 1
                if _is_false(claim, case):
                    yield f"kernel {number} of {family}, {promised}:\n{claim}\n{case}"


def promises(case: Case) -> Iterator[dict[str | int, Any]]:
    """What holds of the integers in a kernel's operands: their ranges, and they."""
    arrays = {n: x for n, x in enumerate(case.arrays) if x.dtype.kind in "iu"}
    known = {n: x for n, x in arrays.items() if x.size}
    if known:
        yield {n: range(int(x.min()), int(x.max()) + 1) for n, x in known.items()}
        yield {n: x.copy() for n, x in known.items()}


def _is_false(claim: Claim, case: Case) -> bool:
    if claim.verdict == "unknown" or claim.name not in CHECKS:
        return False
    return reported(case, CHECKS[claim.name]) != (claim.verdict == "refuted")


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
        print(f"{name:<10} {verdict:<8} {n:>6}")
    print(f"{given.kernels} kernels, {wrong} false claims")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
