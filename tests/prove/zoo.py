"""What is proved of the zoo's kernels: `python -m tests.prove.zoo`.

Prints how many kernels have each verdict, and why the others are not proved.
"""

import argparse
from collections import Counter
from collections.abc import Iterator

from tests import conftest  # noqa: F401  sets the environment, before jax is imported

# isort: split

import pallasite as pl
from pallasite.proofs.verdicts import CLAIMS, PROVED, Proof
from tests.zoo import Case, all_cases
from tests.zoo.test_zoo import arguments

VERDICTS = ("proved", "refuted", "unknown")


def proofs() -> Iterator[tuple[Case, Proof]]:
    for case in all_cases():
        yield case, pl.prove(case.run)(*arguments(case, 0))


def counts(found: list[tuple[Case, Proof]]) -> Counter[tuple[str, str]]:
    claims = (c for _, proof in found for k in proof.kernels for c in k.claims)
    return Counter((claim.name, claim.verdict) for claim in claims)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--why", action="store_true", help="list what is not proved")
    given, found = options.parse_args(), list(proofs())
    number = counts(found)
    print(f"{'claim':<10}" + "".join(f"{v:>9}" for v in VERDICTS))
    for name in CLAIMS:
        print(f"{name:<10}" + "".join(f"{number[name, v]:>9}" for v in VERDICTS))
    for case, proof in found if given.why else ():
        for claim in (c for k in proof.kernels for c in k.claims):
            if claim.verdict != PROVED:
                print(f"{case.name}: {claim.name} {claim.verdict}: {claim.reason}")


if __name__ == "__main__":
    main()
