"""Random kernels whose index maps leave their arrays: every engine agrees with numpy.

Machine code works between forbidden pages, Triton's code has every pointer checked.
Kernels that a backend refuses are left out; most must be left.
"""

from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import pytest

from pallasite.errors import PallasError
from pallasite.passes.lower.place_windows import place_windows
from pallasite.target import Host
from tests.backends.cpu.direct import Code, Guarded
from tests.backends.tpu import harness as tpu
from tests.backends.triton import harness as triton
from tests.fuzz.agreement import run_numpy
from tests.fuzz.batches import each_batch
from tests.fuzz.choices import Stream, simplest
from tests.fuzz.generate import Case
from tests.fuzz.placement import placed_kernel
from tests.fuzz.running import emulated
from tests.share import SHARE

BYTES = 96
Arrays = Sequence[np.ndarray]


def native(case: Case) -> Arrays:
    """Threads share what they may; blocks are against a page after or before them."""
    memory = Guarded(after=len(case.kernel.text) % 2 == 0)
    with (
        mock.patch.object(Host, "least_part_ns", 0),
        mock.patch.object(Host, "least_chunk_ns", 0),
    ):
        code = Code(case.kernel, optimise=False, memory=memory)
    return code(*case.arrays, pool=3)


def on_triton(case: Case) -> Arrays:
    return triton.simulated(case.kernel, case.arrays)


def on_tpu(case: Case) -> Arrays:
    return tpu.simulated(case.kernel, case.arrays)


def placed(case: Case) -> Arrays:
    return run_numpy(place_windows(case.kernel), case.arrays)


def emulation(case: Case) -> Arrays:
    return emulated([case])[0]


# Kernels to try, and the part of them that a backend does not refuse.
ENGINES: dict[str, tuple[Callable[[Case], Arrays], int, float]] = {
    "place_windows": (placed, 240, 1.0),
    "cpu": (native, 240, 1.0),
    "triton": (on_triton, 120, 0.9),
    "tpu": (on_tpu, 120, 0.7),
    "emulation": (emulation, 40, 1.0),
}


def kernel_for(name: str, stream: bytes) -> Case:
    return placed_kernel(Stream(stream), for_tpu=name == "tpu")


def disagreement(case: Case, engine: Callable[[Case], Arrays]) -> str | None:
    want = run_numpy(case.kernel, case.arrays)
    try:
        found = engine(case)
    except PallasError:
        raise  # a refusal
    except Exception as error:
        return f"{error!r}\n{case!r}"
    for number, (got, right) in enumerate(zip(found, want, strict=True)):
        if not np.array_equal(got, right):
            return f"result {number} is\n{got}\nand not\n{right}\n{case!r}"
    return None


@pytest.mark.parametrize("name", ENGINES)
def test_blocks_out_of_range_are_the_nearest(name: str):
    engine, count, share = ENGINES[name]
    count = max(count // SHARE, 8)
    tried = refused = 0

    def fails(stream: bytes) -> bool:
        try:
            return disagreement(kernel_for(name, stream), engine) is not None
        except PallasError:
            return False

    def check(streams: list[bytes]) -> None:
        nonlocal tried, refused
        for stream in streams:
            tried += 1
            try:
                wrong = disagreement(kernel_for(name, stream), engine)
            except PallasError:
                refused += 1
                continue
            if wrong is not None:
                least = kernel_for(name, simplest(stream, fails))
                raise AssertionError(disagreement(least, engine))

    each_batch(check, 17, max(count // 8, 1), 8, BYTES)
    assert tried - refused >= share * tried
