"""What is proved of whole collections: `python -m tests.prove.zoo [zoo|forms|library]`.

Prints how many kernels have each verdict, and why the others are not proved. Integers
in operands are promised, as users would: ranges, or, where other tables would be wrong,
those that the operands here give.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests import conftest  # noqa: F401  sets the environment, before jax is imported

# isort: split

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite.interpret.checked import run_checked
from pallasite.ir.nodes import Kernel
from pallasite.primitive import call_p
from pallasite.proofs.kernels import prove_kernel
from pallasite.proofs.replay import NO_CHECKS
from pallasite.proofs.rows import doubled
from pallasite.proofs.verdicts import CLAIMS, PROVED, KernelProof, Proof
from pallasite.sites import sites_in
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments

VERDICTS = ("proved", "refuted", "unknown")
Named = tuple[str, Proof]

AS_GIVEN: dict[str | int, Any] = {}  # the tables that the operands give
PROMISES: dict[str, dict[str | int, Any]] = {
    "grouped_matmul": {"group_ids_ref": range(4)},
    "ragged_matmul": AS_GIVEN,
    "block_sparse_matmul": AS_GIVEN,
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


def _collected(function: Callable[..., Any], operands: Any) -> list[list[np.ndarray]]:
    """The operands of every kernel called."""
    found, run = list[list[np.ndarray]](), call_p.impl

    def collect(*operands: Any, call: Any) -> list[Any]:
        found.append([np.asarray(x) for x in operands])
        made = run_checked(
            call.kernel, found[-1], replace(NO_CHECKS, orders=("early",))
        )
        return [jnp.asarray(x) for x in made]

    call_p.def_impl(collect)
    try:
        with jax.disable_jit():
            function(*operands)
        return found
    finally:
        call_p.def_impl(run)


def as_given(function: Callable[..., Any], operands: Any, claims: Any) -> Proof:
    """Claims for all floats, and the integers that the operands lead to."""
    sites, given = sites_in(function, *operands), _collected(function, operands)
    retrace, made = doubled(function, tuple(operands), {}), dict[Kernel, KernelProof]()
    for number, (site, arrays) in enumerate(zip(sites, given, strict=True)):
        kernel = site.call.kernel
        if kernel not in made:
            held = {n: x for n, x in enumerate(arrays) if x.dtype.kind in "iu"}
            made[kernel] = prove_kernel(kernel, claims, number, retrace, held)
    return Proof(tuple(made.values()))


def proofs(claims: Any = CLAIMS) -> Iterator[Named]:
    for case in all_cases():
        assume, args = PROMISES.get(case.name), arguments(case, 0)
        if assume is AS_GIVEN:
            yield case.name, as_given(case.run, args, claims)
        else:
            prove = pl.prove(case.run, claims, assume)
            yield case.name, prove(*args)


def _forms(claims: Any) -> Iterator[Named]:
    from tests.forms import all_forms
    from tests.forms.form import SIZES

    tiny = SIZES["tiny"]
    for form in all_forms():
        function, operands = form.make(tiny), form.problem.arrays(tiny)
        yield form.name, as_given(function, operands, claims)


def _library(claims: Any) -> Iterator[Named]:
    from tests.kernels.test_operations import CASES

    for name, case in CASES.items():
        yield name, as_given(case.operation, case.operands, claims)


COLLECTIONS = {"zoo": proofs, "forms": _forms, "library": _library}


def counts(found: list[Named]) -> Counter[tuple[str, str]]:
    claims = (c for _, proof in found for k in proof.kernels for c in k.claims)
    return Counter((claim.name, claim.verdict) for claim in claims)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("collection", nargs="?", default="zoo", choices=COLLECTIONS)
    options.add_argument("--why", action="store_true", help="list what is not proved")
    options.add_argument("--claims", default=",".join(CLAIMS))
    given = options.parse_args()
    claims, found = given.claims.split(","), list[Named]()
    for name, proof in COLLECTIONS[given.collection](claims):
        found.append((name, proof))
        for claim in (c for k in proof.kernels for c in k.claims):
            if given.why and claim.verdict != PROVED:
                print(
                    f"{name}: {claim.name} {claim.verdict}: {claim.reason}", flush=True
                )
    number = counts(found)
    print(f"{'claim':<10}" + "".join(f"{v:>9}" for v in VERDICTS))
    for name in claims:
        print(f"{name:<10}" + "".join(f"{number[name, v]:>9}" for v in VERDICTS))


if __name__ == "__main__":
    main()
