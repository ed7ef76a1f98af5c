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
from functools import cache
from typing import Any

from tests import conftest  # noqa: F401  sets the environment, before jax is imported

# isort: split

import numpy as np

from pallasite.checking import Machine
from pallasite.errors import CheckError
from pallasite.interpret.checked import run_checked
from pallasite.ir.nodes import Kernel
from pallasite.passes.normal.drop_rules import drop_rules
from pallasite.proofs.assume import Assumed, Given
from pallasite.proofs.batch import batch as batch_of
from pallasite.proofs.kernels import prove_kernel
from pallasite.proofs.replay import NO_CHECKS, Replay
from pallasite.proofs.rows import refuted
from pallasite.proofs.verdicts import Claim
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
NOTHING: Assumed = {}
# What runs with other operands find, by what is promised.
Varied = dict[int, tuple[Assumed, frozenset[str]]]


ORDERS = 3  # of programs, that results are compared in
EVERY = 4  # kernels, of which one is asked for the order of its programs


def findings(kernel: Kernel, arrays: Sequence[np.ndarray]) -> frozenset[str]:
    """The kinds of bugs that checked mode reports when the kernel runs.

    It stops at the first, so it runs again without looking for those that it found.
    """
    found = set[str]()
    while True:
        kinds = {kind: kind not in found for kind in CHECKS.values()}
        try:
            run_checked(kernel, arrays, replace(NO_CHECKS, **kinds))
        except CheckError as error:
            found.add(error.kind)
            if error.kind in kinds:
                continue
        return frozenset(found)


def hunt(numbers: range, counted: Counter[tuple[str, str]]) -> Iterator[str]:
    """The false claims about random kernels, and about these with mistakes."""
    for number in numbers:
        choices, family = Seeded(number), EACH_FAMILY[number % len(EACH_FAMILY)]
        case, name = random_kernel(choices, family), f"{number} of {family}"
        claims = (*CHECKS, *(("order",) if number % EVERY == 0 else ()))
        made = _claims(case, claims, promises(case))
        yield from _false(made, case, f"kernel {name}", counted)
        wrong = mutant(case, choices)
        if wrong is not None:
            made = _claims(wrong, GIVEN, list(promises(case))[1:])
            yield from _false(made, wrong, f"mutant of {name}", counted)
        for kernel in (case.kernel, *([wrong.kernel] if wrong else ())):
            yield from _false_rows(kernel, f"kernel or mutant {name}", counted)


def _false(
    made: Iterable[tuple[Claim, Assumed]],
    case: Case,
    name: str,
    counted: Counter[tuple[str, str]],
) -> Iterator[str]:
    of = "" if name.startswith("kernel") else " of mutants"
    own = cache(lambda: findings(case.kernel, case.arrays))
    runs = Varied()
    for claim, promised in made:
        given = ", given" if promised else ""
        counted[claim.name + of + given, claim.verdict] += 1
        if _is_false(claim, case, promised, own, runs):
            yield f"{name}, {promised}:\n{claim}\n{case}"


def _claims(
    case: Case, claims: Sequence[str], promised: Iterable[Assumed]
) -> Iterator[tuple[Claim, Assumed]]:
    for claim in prove_kernel(case.kernel, claims).claims:
        yield claim, NOTHING
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
    claim: Claim,
    case: Case,
    promised: Assumed,
    own: Callable[[], frozenset[str]],
    runs: Varied,
) -> bool:
    if claim.verdict == "unknown":
        return False
    if claim.name == "order":
        return claim.verdict == "proved" and _sees_the_order(case)
    kind, is_refuted = CHECKS[claim.name], claim.verdict == "refuted"
    if (kind in own()) != is_refuted:
        return True
    replay = Replay(Given(case.kernel, promised))
    if replay.possible():
        return False
    if is_refuted:
        return claim.counterexample is None or not claim.counterexample.replay()
    if id(promised) not in runs:  # kept, so that no other has its number
        runs[id(promised)] = promised, findings(case.kernel, replay.varied())
    return kind in runs[id(promised)][1]


def _sees_the_order(case: Case) -> bool:
    """Whether results change with the order of programs along parallel axes."""
    made = set[bytes]()
    for seed in (None, *range(1, ORDERS)):
        how = replace(NO_CHECKS, orders=("early",), machine=Machine(seed=seed))
        results = run_checked(case.kernel, case.arrays, how)
        made.add(b"".join(np.ascontiguousarray(x).tobytes() for x in results))
    return len(made) > 1


def _false_rows(
    kernel: Kernel, name: str, counted: Counter[tuple[str, str]]
) -> Iterator[str]:
    """Rows that are said to stand by themselves, and change with others or moved."""
    kernel = drop_rules(kernel)
    found = batch_of(kernel)
    counted["rows", found.claim.verdict] += 1
    if found.claim.verdict == "proved":
        doubted = replace(found, claim=replace(found.claim, verdict="unknown"))
        claim = refuted(kernel, doubted, Replay(Given(kernel)))
        if claim.verdict == "refuted":
            yield f"{name}:\n{claim}\n{kernel.text}"


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
