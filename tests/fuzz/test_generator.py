"""The generator reaches everything, and the comparison sees errors."""

from collections import Counter

import numpy as np
import pytest

from pallasite.ir.nodes import walk
from pallasite.ir.opdef import table
from pallasite.ir.verify import BLOCK_KINDS
from tests.fuzz.agreement import _bound, expected, mismatch
from tests.fuzz.choices import Seeded, Stream, simplest
from tests.fuzz.generate import ALWAYS, FAMILIES, OTHERS, WIDE, random_kernel

KERNELS = 80  # of each family
# Printing and checks have effects outside; a block_view is made by passes; custom needs
# a rule in Python; what runs side by side is checked mode's alone.
NOT_GENERATED = {"block_view", "custom", "debug_check", "debug_print"}
NOT_GENERATED |= {"roles", "barrier", "sem_signal_core", "fetch_and_add"}
NOT_GENERATED |= {"barrier_expect", "barrier_arrive", "barrier_wait", "wgmma"}
NOT_GENERATED |= {"wgmma_wait", "named_barrier", "fence_async"}
NOT_GENERATED |= {"bulk_commit", "bulk_wait", "set_registers"}
NOT_GENERATED |= {"cluster_barrier", "cluster_arrive", "cluster_copy", "warps"}
NOT_GENERATED |= {"tensor_mma", "tensor_copy", "tensor_commit", "tensor_wait"}
NOT_GENERATED |= {"remote_copy_start", "sem_signal_device", "barrier_semaphore"}
NOT_GENERATED |= {"barrier_test", "load_wait", "async_store"}
NOT_GENERATED |= {"peer_block", "peer_device", "sem_reach"}
NOT_GENERATED |= {"indexed_copy_start", "indexed_copy_wait", "device_number"}
NOT_GENERATED |= {"dot_add", "dot_store", "exchange", "scaled"}  # made of other ops
NOT_GENERATED |= {"matrix_unit"}  # needs scratch that stands for the unit
NOT_GENERATED |= {"inline_asm", "inline_cuda"}  # mean something on a GPU only


def test_every_op_window_and_type_is_generated():
    ops: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for family in (*FAMILIES, "edges"):
        for seed in range(KERNELS):
            case = random_kernel(Seeded(seed), family, wide=seed % 4 == 3)
            dtypes.update(p.ref.dtype.name for p in case.kernel.params)
            kinds["alias"] += bool(case.kernel.aliases)
            for op in walk(case.kernel.body):
                ops[op.name] += 1
                if op.name == "pipeline":
                    kinds.update(_kinds(op))
    assert not set(table()) - set(ops) - NOT_GENERATED
    assert not {d.name for d in (*ALWAYS, *OTHERS, *WIDE)} - set(dtypes)
    wanted = {*BLOCK_KINDS, "fill", "empty grid", "dynamic grid", "alias"}
    assert not wanted - {kind for kind, count in kinds.items() if count}


def _kinds(op) -> list[str]:
    windows, grid = op.attrs["windows"], op.attrs["grid"]
    kinds = [dim.kind for window in windows for dim in window.dims]
    kinds += ["fill" for window in windows if window.fill is not None]
    kinds += ["empty grid"] * (0 in grid) + ["dynamic grid"] * (None in grid)
    return kinds


def test_same_choices_make_the_same_kernel():
    for family in FAMILIES:
        first, second = (random_kernel(Seeded(5), family) for _ in range(2))
        assert first.kernel.text == second.kernel.text
        for a, b in zip(first.arrays, second.arrays, strict=True):
            np.testing.assert_array_equal(a, b)


def test_no_bytes_at_all_make_a_kernel():
    for family in (*FAMILIES, "edges"):
        assert random_kernel(Stream(b""), family).kernel.outputs


def test_simplest_keeps_what_fails():
    def fails(data: bytes) -> bool:
        return len(data) > 2 and max(data) > 7

    found = simplest(bytes(range(64)), fails)
    assert fails(found) and len(found) <= 8


@pytest.mark.parametrize("family", FAMILIES)
def test_comparison_sees_a_wrong_number(family: str):
    seen = 0
    for seed in range(8):
        case = random_kernel(Seeded(seed), family)
        values, bounds = expected(case)
        assert mismatch(values, values, bounds) is None
        for n, value in enumerate(values):
            if value.size and np.isfinite(value.astype(np.float64)).all():
                wrong = [np.array(v) for v in values]
                wrong[n].flat[0] = _other(wrong[n].flat[0])
                seen += mismatch(wrong, values, bounds) is not None
    assert seen > 8


def test_only_what_may_be_finite_or_not_is_not_compared():
    nan, inf = np.nan, np.inf
    result = np.array([nan, inf, nan, inf], np.float32)
    bounds: list = [_bound(result, [np.array([1, 1, nan, inf], np.float32)])]
    fits = lambda *got: mismatch([np.array(got, np.float32)], [result], bounds) is None
    assert fits(5, 5, nan, inf) and fits(nan, nan, nan, inf)
    assert not fits(5, 5, 1, inf) and not fits(5, 5, nan, 1)
    assert not fits(5, 5, inf, inf) and not fits(5, 5, nan, -inf)


def _other(x):
    if x.dtype == np.bool_:
        return not x
    if np.issubdtype(x.dtype, np.integer):
        return x ^ x.dtype.type(1)  # no overflow
    return x + x.dtype.type(1)
