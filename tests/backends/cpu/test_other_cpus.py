"""Machine code for other CPUs than this one: kernels of the zoo under emulation.

Needs qemu's user mode and GCC for the other CPU (Debian: `qemu-user`,
`gcc-x86-64-linux-gnu`, `gcc-aarch64-linux-gnu`); without them its tests are skipped. A
dozen kernels run; PALLASITE_TEST_WHOLE_ZOO=1 runs all. Of instructions that qemu lacks
(AVX-512, AMX) the assembly is read.
"""

import functools
import os
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import primitive
from pallasite.primitive import Call
from tests.backends.cpu.emulated import (
    CPUS,
    SAPPHIRE_RAPIDS,
    SKYLAKE,
    Cpu,
    assembly,
    missing,
    run_call,
)
from tests.backends.cpu.test_zoo import assert_agrees, native
from tests.xla import put
from tests.zoo import Case, all_cases

A_DOZEN = {
    "add_vectors",
    "two_pass_softmax",
    "matmul_accumulate",
    "ragged_matmul",
    "flash_scratch",
    "paged_decode",
    "scatter_rows",
    "dma_double_buffer",
    "linear_recurrence",
    "histogram_atomic_vector",
    "dictionary_outputs",
    "no_inputs",
}
WHOLE = os.environ.get("PALLASITE_TEST_WHOLE_ZOO") == "1"
CASES = [case for case in all_cases() if WHOLE or case.name in A_DOZEN]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("cpu", CPUS.values(), ids=lambda cpu: cpu.name)
def test_the_zoo_on_another_cpu(cpu: Cpu, case: Case, tmp_path):
    why = missing(cpu)
    if why:
        pytest.skip(why)
    args = case.make_args(np.random.default_rng([5, *case.name.encode()]))
    calls: list[Call] = []

    def emulated(call: Call, _: str | None):
        calls.append(call)
        folder = tmp_path / str(len(calls))
        folder.mkdir()
        return lambda *operands: [
            put(x, x.dtype) for x in run_call(cpu, call, operands, folder)
        ]

    # Calls outside of any jit run one by one, through this.
    with mock.patch.object(primitive, "_jitted", emulated):
        got = native(case)(*args)
    assert calls, "no kernel was run"
    assert_agrees(case, got, jax.jit(case.reference)(*args))


# --- what qemu does not emulate: the text ---


def product(dtype) -> Call:
    """A product of blocks, f32 or i32 sums."""
    sums = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=sums)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((256, 256), sums),
        grid=(2, 2),
        in_specs=[
            pl.BlockSpec((128, 256), lambda i, j: (i, 0)),
            pl.BlockSpec((256, 128), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((128, 128), lambda i, j: (i, j)),
    )
    x = jnp.zeros((256, 256), dtype)
    (found,) = pl.lower(call)(x, x).calls
    return found


@functools.cache
def instructions(cpu: Cpu, dtype) -> str:
    return assembly(cpu, product(dtype))


@pytest.mark.parametrize(
    "cpu, dtype, instruction",
    [
        (SAPPHIRE_RAPIDS, jnp.bfloat16, "tdpbf16ps"),
        (SAPPHIRE_RAPIDS, jnp.int8, "tdpbssd"),
        (SAPPHIRE_RAPIDS, jnp.float32, "vfmadd231ps"),
        (SKYLAKE, jnp.float32, "vfmadd231ps"),
        (CPUS["haswell"], jnp.float32, "vfmadd231ps"),
        (CPUS["x86-64"], jnp.float32, "mulps"),
        (CPUS["neoverse-n1"], jnp.float32, "fmla"),
        (CPUS["apple-m1"], jnp.float32, "fmla"),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", value)),
)
def test_a_product_uses_what_the_cpu_has(cpu: Cpu, dtype, instruction: str):
    text = instructions(cpu, dtype)
    assert re.search(rf"\b{instruction}\b", text)
    assert "gather" not in text and "scatter" not in text
    if cpu.host.vector_bytes == 64:
        assert "%zmm" in text
    elif cpu.host.architecture == "x86_64":
        assert "%zmm" not in text
        assert ("%ymm" in text) == (cpu.host.vector_bytes == 32)
    else:
        assert re.search(r"\bfmla\tv\d+\.4s", text)
