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


# What the integers in operands are, as their users would promise.
PROMISES: dict[str, dict[str | int, range]] = {
    "grouped_matmul": {"group_ids_ref": range(4)},
    "ragged_matmul": {"visit_group_ref": range(4), "visit_tile_ref": range(6)},
    "block_sparse_matmul": {"rows_ref": range(4), "columns_ref": range(4)},
    "paged_decode": {"lengths_ref": range(1, 33), "table_ref": range(12)},
    "splash_attention": {"count_ref": range(5), "blocks_ref": range(4)},
    "gather_rows": {"indices_ref": range(20)},
    "scatter_rows": {"indices_ref": range(20)},
    "dynamic_window": {"start_ref": range(25)},
    "dynamic_patch": {"start_ref": range(17)},
    "dma_gather": {"indices_ref": range(30)},
    "kv_cache_update": {"positions_ref": range(16)},
    "gather_array_index": {"ids_ref": range(50)},
    "scatter_array_index": {"order_ref": range(48)},
    "embedding_lookup": {"tokens_ref": range(40)},
    "histogram_atomic_vector": {"ids_ref": range(10)},
    "histogram_atomic_scalar": {"ids_ref": range(6)},
    "bucket_extremes": {"ids_ref": range(5)},
    "hash_chains": {"buckets_ref": range(6)},
    "seen_bitmap": {"values_ref": range(128)},
    "counting_sort": {0: range(8)},
}


def proofs() -> Iterator[tuple[Case, Proof]]:
    for case in all_cases():
        prove = pl.prove(case.run, assume=PROMISES.get(case.name))
        yield case, prove(*arguments(case, 0))


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
