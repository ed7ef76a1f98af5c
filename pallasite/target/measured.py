"""The peak rates of this computer's CPU, measured.

No table has every CPU, and a virtual machine hides its clock. Both measurements are
short and take the best of many, so that other load on the machine matters little.
"""

import ctypes
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from pallasite.target.cpu import host

CHAINS = 12  # independent sums: more than a unit's latency needs
ROUNDS = 20_000
TRIES = 40
MARGIN = 1.05  # for noise
USUAL_CACHE = 64 << 20  # if the system does not report it
STREAM_BYTES = 64 << 20  # per thread: larger than any cache


@cache
def flops_per_second() -> float:
    """Peak 32-bit FLOPs of one core, by fused multiply-adds (two FLOPs each)."""
    from llvmlite import binding as llvm

    lanes = host().lanes(32)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_sums(lanes))
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=2,
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    address = engine.get_function_address("sums")
    run = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_int64, ctypes.c_float)(address)
    seconds = _best(lambda: run(ROUNDS, 0.5))
    return MARGIN * 2 * lanes * CHAINS * ROUNDS / seconds


def _sums(lanes: int) -> str:
    """A loop of fused multiply-adds in registers."""
    vector = f"<{lanes} x float>"
    names = range(CHAINS)
    every = ", ".join(["i32 0"] * lanes)
    lines = [
        f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})",
        "define float @sums(i64 %rounds, float %x) {",
        "start:",
        f"  %first = insertelement {vector} poison, float %x, i32 0",
        f"  %v = shufflevector {vector} %first, {vector} poison, "
        f"<{lanes} x i32> <{every}>",
        "  br label %loop",
        "loop:",
        "  %i = phi i64 [0, %start], [%next, %loop]",
        *(
            f"  %s{n} = phi {vector} [zeroinitializer, %start], [%t{n}, %loop]"
            for n in names
        ),
        *(
            f"  %t{n} = call {vector} @llvm.fma.v{lanes}f32("
            f"{vector} %v, {vector} %v, {vector} %s{n})"
            for n in names
        ),
        "  %next = add i64 %i, 1",
        "  %more = icmp slt i64 %next, %rounds",
        "  br i1 %more, label %loop, label %done",
        "done:",
        f"  %r0 = fadd {vector} %t0, %t1",
        *(f"  %r{n - 1} = fadd {vector} %r{n - 2}, %t{n}" for n in names[2:]),
        f"  %one = extractelement {vector} %r{CHAINS - 2}, i32 0",
        "  ret float %one",
        "}",
    ]
    return "\n".join(lines)


@cache
def bytes_per_second() -> float:
    """Main memory read bandwidth of all threads together."""
    threads = host().threads
    parts = [np.zeros(STREAM_BYTES // 8, np.int64) for _ in range(threads)]
    for part in parts:
        part += 1  # pages are allocated when written
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(np.max, parts)), tries=5)
    return MARGIN * threads * STREAM_BYTES / seconds


@cache
def cache_bytes() -> int:
    """The size of the largest cache, whose contents need not be read again."""
    places = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [re.fullmatch(r"(\d+)([KM])\s*", place.read_text()) for place in places]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(m[1]) * units[m[2]] for m in sizes if m), default=USUAL_CACHE)


def measure_again() -> None:
    """Forget what was measured while the computer was busy with something else."""
    flops_per_second.cache_clear()
    bytes_per_second.cache_clear()


def _best(run: Callable[[], object], tries: int = TRIES) -> float:
    run()
    found = []
    for _ in range(tries):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)
