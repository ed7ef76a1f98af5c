"""libtpu compiles what the backend emits, for each chip (no TPU is needed)."""

import pytest

from pallasite.runtime.aot import Job, compile_all
from tests.backends.tpu import harness
from tests.backends.tpu.kernels import CASES
from tests.ir import kernels as by_hand

pytestmark = pytest.mark.tpu


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
def test_every_op_compiles():
    jobs = [harness.job(*item) for item in harness.op_kernels().items()]
    assert failures(jobs, "v5e") == {}


def test_estimated_cycles_are_read():
    jobs = [harness.job("matmul", harness.kernel_of("matmul"))]
    (result,) = compile_all(jobs, "v5e", cycles=True)
    assert result.ok and result.cycles and result.cycles > 1000


def test_compiler_error_is_handed_back():
    good = harness.job("vector_add", harness.kernel_of("vector_add"))
    config, results = '{"custom_call_config": {"body": ""}}', (((8, 128), "float32"),)
    bad = Job("bad", "tpu_custom_call", config, (), results)
    results = compile_all([bad, good], "v5e")
    assert [r.ok for r in results] == [False, True]
    assert results[0].error
