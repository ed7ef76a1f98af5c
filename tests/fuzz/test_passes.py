"""Random kernels keep their meaning under vmap and through passes (numpy only)."""

from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from pallasite.ir.opdef import table
from pallasite.ir.verify import verify
from pallasite.passes.lower.legalize import legalize
from pallasite.passes.lower.promote import promote
from pallasite.passes.transform.batch import batch_kernel, changed_operands
from tests.fuzz.agreement import beyond_op_table, run_numpy, same
from tests.fuzz.choices import Choices, Stream, chance
from tests.fuzz.generate import BYTES, FAMILIES, Case, random_kernel
from tests.share import SHARE

EXAMPLES = max(60 // SHARE, 20)
COPIES = 3  # elements of a mapped axis

families = pytest.mark.parametrize("family", [*FAMILIES, "edges"])


def for_random_kernels(family: str, test: Callable[[Case, Stream], None]) -> None:
    @hypothesis.settings(max_examples=EXAMPLES)
    @hypothesis.given(st.binary(min_size=BYTES, max_size=BYTES))
    def run(data: bytes) -> None:
        test(random_kernel(Stream(data), family), Stream(data[::-1]))

    run()


def assert_same(got: list[np.ndarray], wanted: list[np.ndarray], case: Case) -> None:
    for n, (a, b) in enumerate(zip(got, wanted, strict=True)):
        fits = (a.shape, a.dtype) == (b.shape, b.dtype)
        assert fits and same(a, b).all(), f"output {n}: {a}, not {b}\n{case!r}"


@families
def test_vmap_is_one_kernel_per_element(family: str):
    for_random_kernels(family, check_vmap)


def check_vmap(case: Case, choices: Choices) -> None:
    kernel = case.kernel
    changed = changed_operands(kernel)
    mapped = [
        # One grid size for all elements; each has its own copy of what changes.
        p.name not in ("size", "sizes") and (n in changed or chance(choices, 50))
        for n, p in enumerate(kernel.inputs)
    ]
    pairs = list(zip(case.arrays, mapped, strict=True))
    stacked = [_variants(x) if m else x for x, m in pairs]
    batched = batch_kernel(kernel, tuple(mapped), COPIES)
    verify(batched)
    found = run_numpy(batched, stacked)
    for k in range(COPIES):
        arrays = [x[k] if m else x for x, m in zip(stacked, mapped, strict=True)]
        assert_same([r[k] for r in found], run_numpy(kernel, arrays), case)


def _variants(x: np.ndarray) -> np.ndarray:
    return np.stack([np.roll(x, k) for k in range(COPIES)])


@families
def test_promoted_kernels_do_the_same(family: str):
    def check(case: Case, choices: Stream) -> None:
        promoted = promote(case.kernel)
        verify(promoted)
        wanted = run_numpy(case.kernel, case.arrays)
        assert_same(run_numpy(promoted, case.arrays), wanted, case)

    for_random_kernels(family, check)


@families
def test_legalized_kernels_are_within_the_op_table_errors(family: str):
    def check(case: Case, choices: Stream) -> None:
        always = {name for name, row in table().items() if row.lower is None}
        some = {name for name in table() if chance(choices, 30)}
        native = frozenset(always | some | {"gather", "scatter"})  # not each has one
        legal = legalize(case.kernel, native, "fuzz")
        verify(legal)
        wrong = beyond_op_table(case, [run_numpy(legal, case.arrays)])
        assert wrong is None, f"{wrong}\n{case!r}\n{legal.text}"

    for_random_kernels(family, check)
