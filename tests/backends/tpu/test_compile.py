"""libtpu compiles what the backend emits, for each chip (no TPU is needed)."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.nodes import Kernel
from pallasite.passes.run import run
from pallasite.runtime.aot import Job, compile_all
from pallasite.sites import kernels_in
from pallasite.target import TPUS
from tests.backends.tpu import harness, portable
from tests.backends.tpu.kernels import CASES
from tests.ir import kernels as by_hand
from tests.kernels.test_operations import CASES as LIBRARY
from tests.share import chosen, share_of, spread
from tests.zoo import all_cases
from tests.zoo.case import Case

pytestmark = pytest.mark.tpu

LIBRARY_CHIPS = ["v5e", "v6e"]


def failures(jobs, chip):
    results = compile_all(jobs, chip, together=8)
    assert [r.name for r in results] == [j.name for j in jobs]
    return {r.name: r.error for r in results if not r.ok}


@pytest.mark.parametrize("chip", harness.CHIPS)
def test_kernels_compile(chip):
    jobs = [harness.job(name, harness.kernel_of(name)) for name in CASES]
    jobs += [harness.job(make.__name__, make()) for make in by_hand.ALL]
    assert failures(jobs, chip) == {}


@pytest.mark.parametrize("chip", harness.CHIPS)
@pytest.mark.filterwarnings("ignore::pallasite.errors.PerformanceWarning")
def test_portable_kernels_compile(chip):
    jobs = []
    for name, case in share_of([*portable.CASES.items()], harness.CHIPS.index(chip)):
        (kernel,) = kernels_in(case.function, *case.shapes)
        jobs.append(harness.job(name, run(kernel)))
    assert failures(jobs, chip) == {}


@cache
def zoo_kernels(case: Case) -> list[tuple[str, Kernel]]:
    """The kernels of a case and those of its gradient."""
    arguments = case.make_args(np.random.default_rng(0))
    found = [(case.name, k) for k in kernels_in(case.run, *arguments)]
    found += [(f"{case.name}'", k) for k in harness.backward_kernels(case)]
    return [(name, run(kernel)) for name, kernel in found]


@pytest.mark.filterwarnings("ignore::pallasite.errors.PerformanceWarning")
@pytest.mark.parametrize("chip", TPUS)
def test_zoo_and_its_gradients_compile(chip):
    """With a share, each chip has other cases."""
    cases = spread(all_cases(), [*TPUS].index(chip), len(TPUS))
    kernels = [each for case in cases for each in zoo_kernels(case)]
    assert len(kernels) > 1.5 * len(cases)
    jobs = [harness.job(name, k, chip=TPUS[chip]) for name, k in kernels]
    failed = failures(jobs, chip)
    lacking = [n for n in failed if chip == "v4" and LACKING_ON_V4 in failed[n]]
    assert [name for name in failed if name not in lacking] == []
    assert len(lacking) <= 0.03 * len(kernels) + 1


# It turns some columns into rows by this, on later chips.
LACKING_ON_V4 = "Sublane gather not supported by this TPU generation"


@pytest.mark.parametrize("chip", LIBRARY_CHIPS)
@pytest.mark.filterwarnings("ignore::pallasite.errors.PerformanceWarning")
def test_library_compiles(chip):
    cases = share_of([*LIBRARY.items()], LIBRARY_CHIPS.index(chip))
    jobs = [
        harness.job(f"{name} {number}", run(kernel))
        for name, case in cases
        for number, kernel in enumerate(kernels_in(case.operation, *case.operands))
    ]
    assert len(jobs) >= len(cases) // 2
    assert failures(jobs, chip) == {}


def test_every_op_compiles():
    # The other widths are these ones with conversions around them.
    kinds = (
        "f32  vector",
        "f32  scalar",
        "bf16  vector",
        "i32  vector",
        "bool  vector",
    )
    kernels = harness.op_kernels()
    names = [n for n in kernels if n.endswith(kinds)]
    names += [n for n in kernels if n.startswith("cast u8")]
    jobs = [harness.job(n, kernels[n]) for n in chosen(names)]
    assert failures(jobs, "v5e") == {}


def test_estimated_cycles_are_read():
    jobs = [harness.job("matmul", harness.kernel_of("matmul"))]
    (result,) = compile_all(jobs, "v5e", cycles=True)
    assert result.ok and result.cycles and result.cycles > 1000


def test_kernels_on_which_the_estimator_gives_up_have_cycles_of_their_code():
    """libtpu 0.0.51 for v6e: any constant that is added to bf16."""

    def add_one(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    (kernel,) = kernels_in(pl.pallas_call(add_one, out_shape=x), x)
    (result,) = compile_all([harness.job("add_one", kernel)], "v6e", cycles=True)
    assert result.ok and result.estimated and result.estimated > 10


@pytest.mark.parametrize("together", [1, 2])
def test_compiler_error_is_handed_back(together):
    good = harness.job("vector_add", harness.kernel_of("vector_add"))
    config, results = '{"custom_call_config": {"body": ""}}', (((8, 128), "float32"),)
    bad = Job("bad", "tpu_custom_call", config, (), results)
    results = compile_all([bad, good], "v5e", together=together)
    assert [r.ok for r in results] == [False, True]
    assert results[0].error
