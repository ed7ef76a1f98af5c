"""Facts about the CPU that code is generated for.

`host()` returns this computer's CPU as LLVM sees it; tests substitute another one with
`using`. Backends choose vector widths and instructions only by these facts.
"""

import ctypes
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar


def _architecture() -> str:
    """This computer's instruction set, as LLVM and GCC name it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


@dataclass(frozen=True)
class Host:
    """One CPU. `features` are LLVM's names for its features."""

    vector_bytes: int
    registers: int  # vector registers
    features: frozenset[str] = frozenset()
    l1_bytes: int = 48 << 10  # data cache per core
    l2_bytes: int = 2 << 20  # per core
    threads: int = 1  # that can run concurrently
    # Roughly, for one core: enough to tell microseconds from milliseconds.
    ns_per_flop: float = 0.01
    ns_per_transcendental: float = 0.8
    ns_per_byte: float = 0.05
    ns_per_step: float = 10.0  # to start a program
    ns_per_wake: float = 10_000.0  # until another thread runs, or more
    architecture: str = _architecture()
    # The same for all CPUs: work that is worth waking another thread, and one access to
    # the counter that threads share.
    least_part_ns: ClassVar[int] = 40_000
    least_chunk_ns: ClassVar[int] = 8_000

    def lanes(self, bits: int) -> int:
        """How many elements of that width one vector holds."""
        return max(1, self.vector_bytes * 8 // bits)

    def has(self, feature: str) -> bool:
        return feature in self.features


AVX2 = Host(32, 16, frozenset({"avx", "avx2", "fma", "f16c"}))
NEON = Host(16, 32, frozenset({"neon"}))
SSE = Host(16, 16)

_chosen: ContextVar[Host | None] = ContextVar("pallasite_host", default=None)


def host() -> Host:
    """The CPU to generate code for."""
    return _chosen.get() or _this_computer()


@contextmanager
def using(host: Host) -> Iterator[None]:
    """Generate code for another CPU. To run it here, this CPU must have the same
    architecture and all of the features."""
    token = _chosen.set(host)
    try:
        yield
    finally:
        _chosen.reset(token)


def host_of(features: frozenset[str], **others: Any) -> Host:
    """The CPU that a set of LLVM feature names describes."""
    if "avx512f" in features:
        return Host(64, 32, features, **others)
    if "avx2" in features:
        return Host(32, 16, features, **others)
    return Host(16, 32 if "neon" in features else 16, features, **others)


@cache
def _this_computer() -> Host:
    from llvmlite import binding as llvm

    features = {name for name, has in llvm.get_host_cpu_features().items() if has}
    if _architecture() == "aarch64":
        features.add("neon")
    if not _may_use_tiles(features):
        features = {name for name in features if not name.startswith("amx")}
    return host_of(frozenset(features), threads=_threads(), **_caches())


def _threads() -> int:
    """How many threads this process may run concurrently, as many as XLA uses."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _caches() -> dict[str, int]:
    """Sizes of the first core's caches, if the system reports them (as Linux does)."""
    found: dict[str, int] = {}
    for place in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = (
                (place / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        digits = re.fullmatch(r"(\d+)K", size)
        if digits and kind != "Instruction" and level in ("1", "2"):
            found[f"l{level}_bytes"] = int(digits[1]) << 10
    return found


def _may_use_tiles(features: set[str]) -> bool:
    """Ask the OS kernel for AMX tile state, which Linux grants on request."""
    if "amx-tile" not in features or platform.system() != "Linux":
        return False
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA): Documentation/arch/x86/xstate.rst
    number, request, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(number, request, tile_data) == 0
