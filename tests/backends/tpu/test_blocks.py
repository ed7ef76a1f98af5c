"""Larger blocks on a TPU: where programs are many and small."""

from dataclasses import replace

import numpy as np
import pytest

from pallasite.backends.base import Compiled, Options, get
from pallasite.errors import ResourceError
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.tpu_blocks import _Estimate, for_tpu
from pallasite.target import TPUS, Memory
from tests.backends.tpu.harness import (
    CASES,
    emulated,
    kernel_of,
    random_arrays,
    run_compiled,
)
from tests.backends.triton.test_blocks import matmul
from tests.passes.test_reblock import COPY, head, rows

# A chip that takes so long to start a program that all blocks are too small for it.
SLOW_STARTS = 1.0


FITS = {
    "v5e": "grid=(4, 8, 8), windows=(in[1024, 512], in[512, 512], out[1024, 512])",
    "v6e": "grid=(4, 4, 4), windows=(in[1024, 1024], in[1024, 1024], out[1024, 1024])",
}


@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("chip, windows", FITS.items(), ids=FITS)
def test_small_blocks_become_what_fits(block: int, chip: str, windows: str):
    new = for_tpu(matmul(4096, block, block, block), TPUS[chip])
    verify(new)
    estimate = _Estimate.of(new, TPUS[chip])
    assert estimate is not None and estimate.vmem <= TPUS[chip].scoped_vmem
    assert windows in head(new)


def test_a_limit_on_memory_holds():
    kernel = matmul(4096, 128, 128, 128)
    for limit in (2 << 20, 8 << 20, 64 << 20):
        estimate = _Estimate.of(for_tpu(kernel, TPUS["v5e"], limit), TPUS["v5e"])
        assert estimate is not None and limit / 4 < estimate.vmem <= limit


@pytest.mark.parametrize(
    "block", [(1024, 1024, 512), (512, 512, 512), (512, 512, 1024)]
)
def test_large_blocks_stay(block):
    kernel = matmul(4096, *block)
    assert for_tpu(kernel, TPUS["v5e"]) is kernel


def test_blocks_without_room_are_cut():
    new = for_tpu(matmul(8192, 4096, 4096, 4096), TPUS["v5e"])
    verify(new)
    estimate = _Estimate.of(new, TPUS["v5e"])
    assert estimate is not None
    assert 4 << 20 < estimate.vmem <= TPUS["v5e"].scoped_vmem
    sizes = [d.size for w in estimate.blocks.found.pipeline.windows for d in w.dims]
    assert all(n % 128 == 0 for n in sizes)


def test_blocks_for_which_there_is_no_room_say_how_much_they_need():
    scan = '%b: f32[8,4] = scan %a {kind="sum", axis=0, reverse=False}'
    body = f"%a: f32[8,4] = load %xb[:, :] {scan} store %ob[:, :] = %b"
    text = rows(body, n=1 << 20, grid="(1,)").text
    text = text.replace("[8,4]", "[1048576,4]").replace("[8, 4]", "[1048576, 4]")
    with pytest.raises(ResourceError) as error:
        for_tpu(parse_kernel(text), TPUS["v5e"])
    assert str(error.value) == "\n".join(
        [
            "the blocks of a program do not fit a core of v5e",
            "  kernel          k",
            "  needed          1073741824 bytes",
            "  available       134217728 bytes",
            "  x, dimension 0  'scan' goes along it",
            "  o, dimension 0  'scan' goes along it",
            "  fix             smaller blocks along the dimensions that are kept whole",
        ]
    )


def test_every_core_keeps_a_program():
    kernel = rows(COPY, n=32)
    assert "grid=(2,), windows=(in[16, 4]" in head(for_tpu(kernel, TPUS["v5p"]))
    assert "grid=(1,), windows=(in[32, 4]" in head(for_tpu(kernel, TPUS["v5e"]))


def test_most_kernels_have_larger_blocks(monkeypatch):
    """So that the test below tests something."""
    monkeypatch.setattr("pallasite.passes.tpu_blocks.STEP_SECONDS", SLOW_STARTS)
    kernels = [kernel_of(name) for name in CASES]
    changed = [for_tpu(k, TPUS["v5e"]) is not k for k in kernels]
    assert sum(changed) > len(changed) / 4, dict(zip(CASES, changed, strict=True))


def simulated(kernel: Kernel, arrays) -> list[np.ndarray]:
    chip = replace(
        TPUS["v5e"], memories={**TPUS["v5e"].memories, "vmem": Memory(1 << 30)}
    )
    compiled = Compiled(get("tpu"), kernel, Options(chip=chip), shared=())
    return run_compiled(compiled, arrays)


@pytest.mark.parametrize("name", CASES)
def test_kernels_with_larger_blocks_are_right(name: str, monkeypatch):
    monkeypatch.setattr("pallasite.passes.tpu_blocks.STEP_SECONDS", SLOW_STARTS)
    kernel = kernel_of(name)
    arrays = random_arrays(kernel)
    for got, want in zip(
        simulated(kernel, arrays), emulated(kernel, arrays), strict=True
    ):
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=2e-2, atol=2e-2
        )
