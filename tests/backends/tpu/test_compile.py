"""libtpu compiles what the backend emits, for each chip (no TPU is needed)."""

import pytest

from pallasite.runtime.aot import Job, compile_all
from tests.backends.tpu import harness
from tests.backends.tpu.kernels import CASES
from tests.ir import kernels as by_hand

pytestmark = pytest.mark.tpu

# A few results are checked one by one; one process per chip compiles them all.
REFUSED_SCALARS = ("bitcast bf16", "bitcast i16")


def failures(jobs, chip):
    results = compile_all(jobs, chip)
    assert [r.name for r in results] == [j.name for j in jobs]
    return {r.name: r.error for r in results if not r.ok}


@pytest.mark.parametrize("chip", harness.CHIPS)
def test_kernels_compile(chip):
    jobs = [harness.job(name, harness.kernel_of(name)) for name in CASES]
    jobs += [harness.job(make.__name__, make()) for make in by_hand.ALL]
    assert failures(jobs, chip) == {}


@pytest.mark.slow
@pytest.mark.parametrize("chip", harness.CHIPS)
def test_every_op_compiles(chip):
    jobs = [
        harness.job(name, kernel)
        for name, kernel in harness.op_kernels().items()
        if not (name.startswith(REFUSED_SCALARS) and name.endswith("scalar"))
    ]
    assert failures(jobs, chip) == {}


def test_estimated_cycles_are_read():
    jobs = [harness.job("matmul", harness.kernel_of("matmul"))]
    (result,) = compile_all(jobs, "v5e", cycles=True)
    assert result.ok and result.cycles and result.cycles > 1000


def test_compiler_error_is_handed_back():
    good = harness.job("vector_add", harness.kernel_of("vector_add"))
    bad = Job("bad", "tpu_custom_call", '{"custom_call_config": {"body": ""}}', (), ())
    results = compile_all([bad, good], "v5e")
    assert [r.ok for r in results] == [False, True]
    assert results[0].error
