"""Settings every test runs under; they must be in place before jax is imported.

PALLASITE_TEST_PLATFORM (cuda, for example) picks the JAX platform to test on. Without
it the tests use a GPU if there is one and else the CPU, as eight devices.

Strict dtype promotion and rank promotion are left off: the tests run kernels as their
users write them, and `x + bias` or `i * 0.5` are ordinary kernel code.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.share import SHARE, sample_of
from tests.xla import QUICK, set_flags

ROOT = Path(__file__).parent.parent
SLOWEST = 25  # places in the list of where the time went
MOST_BYTES = 1_250_000_000  # of a worker, before it forgets compiled programs

# Tests marked `machine_only`: of kernels written as IR, of the LLVM, Triton, CUDA,
# Mosaic or machine code that is made of them, and of the library's options. Neither the
# version of Python nor that of JAX has a part in them, so a run that repeats all tests
# with others may leave them out. Among them are those that simulate GPUs and TPUs on
# traced kernels: what a new JAX traces is seen in the emulation (`zoo/`) and on the CPU
# (`backends/cpu/`), and that it reaches the other backends in `language/`.
MACHINE_ONLY = (
    "autodiff/test_backward.py",
    "autodiff/test_backward_choice.py",
    "autodiff/test_backward_plan.py",
    "autodiff/test_gather_overlaps.py",
    "autodiff/test_scattered.py",
    "backends/cpu/test_compile_size.py",
    "backends/cpu/test_control.py",
    "backends/cpu/test_dot.py",
    "backends/cpu/test_dot_sums.py",
    "backends/cpu/test_elementwise.py",
    "backends/cpu/test_filled.py",
    "backends/cpu/test_functions.py",
    "backends/cpu/test_fusion.py",
    "backends/cpu/test_hostile.py",
    "backends/cpu/test_memory.py",
    "backends/cpu/test_moves.py",
    "backends/cpu/test_other_cpus.py",
    "backends/cpu/test_pack_once.py",
    "backends/cpu/test_packing.py",
    "backends/cpu/test_plan_memory.py",
    "backends/cpu/test_special.py",
    "backends/cpu/test_tiles.py",
    "backends/cpu/test_top_k.py",
    "backends/cpu/test_transposes.py",
    "backends/cpu/test_vectors.py",
    "backends/cpu/test_windows.py",
    "backends/cuda",
    "backends/test_gpu_trial.py",
    "backends/test_stages.py",
    "backends/tpu",
    "backends/triton",
    "checked/test_numpy_numbers.py",
    "forms",
    "fuzz/test_cpu.py",
    "fuzz/test_generator.py",
    "fuzz/test_passes.py",
    "fuzz/test_placement.py",
    "fuzz/test_reblock.py",
    "fuzz/test_warpgroups.py",
    "ir",
    "kernels/test_any_shape.py",
    "kernels/test_attention.py",
    "kernels/test_configurations.py",
    "kernels/test_decode.py",
    "kernels/test_native_on_gpu.py",
    "ops/test_decompose.py",
    "ops/test_decompose_tile.py",
    "passes",
    "prove",
    "test_rules.py",
)

# Tests that do the same with many kernels or pages: a share may do (tests/share.py).
SAMPLED = (
    "autodiff",
    "backends",
    "checked",
    "docs",
    "examples",
    "forms",
    "fusion",
    "fuzz",
    "kernels",
    "language",
    "ops",
    "passes",
    "prove",
    "zoo",
)


def _gpu_is_present() -> bool:
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return Path("/dev/nvidiactl").exists() and any(
        map(importlib.util.find_spec, plugins)
    )


def _set_environment() -> None:
    environ = os.environ
    platform = environ.get("PALLASITE_TEST_PLATFORM")
    if platform:
        environ["JAX_PLATFORMS"] = platform if platform == "cpu" else f"{platform},cpu"
    elif not _gpu_is_present():
        environ["JAX_PLATFORMS"] = "cpu"

    set_flags({"xla_force_host_platform_device_count": 8})
    # On a busy machine eight devices may come together late; XLA ends a process then.
    set_flags({"xla_cpu_collective_call_terminate_timeout_seconds": 600})
    if environ.get("JAX_PLATFORMS") == "cpu":
        set_flags(QUICK)
    # Tracebacks in StableHLO, which no test reads, are a tenth of the time that a
    # small program takes to compile.
    environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

    environ.setdefault("PALLASITE_VERIFY", "1")
    # Not the user's own: tests leave nothing behind outside this folder.
    environ.setdefault("PALLASITE_CACHE_DIR", str(ROOT / ".pytest_cache" / "kernels"))
    # Workers share one GPU, so none of them may take all its memory.
    environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # libtpu compiles here in several processes at once, with no TPU to ask about.
    environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    environ.setdefault("TPU_LOG_DIR", "disabled")


_set_environment()

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=max(100 // SHARE, 10),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run without them need not import them."""
    without = config.option.markexpr == "not machine_only"
    return True if without and _is_machine_only(collection_path) else None


@functools.cache
def _is_machine_only(path: Path) -> bool:
    places = {ROOT / "tests" / name for name in MACHINE_ONLY}
    assert all(map(Path.exists, places)), "MACHINE_ONLY names what is missing"
    return not places.isdisjoint([path, *path.parents])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what concerns the machine only; skips what this one cannot run.

    Long tests come first: at the end a worker would wait for the other's last one.
    """
    tests = ROOT / "tests"
    for item in items:
        if _is_machine_only(item.path):
            item.add_marker("machine_only")
    _take_share(items, tests)
    long = ("slow", "tpu")  # libtpu compiles many kernels at once
    items.sort(key=lambda item: not any(map(item.get_closest_marker, long)))
    _skip(items, "gpu", _has_gpu, "jax finds no GPU here")
    _skip(items, "tpu", _has_libtpu, "libtpu is not installed")


def _take_share(items: list[pytest.Item], tests: Path) -> None:
    """What this run leaves to `make test-all` (tests/share.py)."""
    # By file and test; the first test of each file begins with the first of its cases.
    cases: dict[Path, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if item.path.relative_to(tests).parts[0] in SAMPLED:
            test, _, _ = item.nodeid.partition("[")
            cases.setdefault(item.path, {}).setdefault(test, []).append(item)
    left_out: set[pytest.Item] = set()
    for of_file in cases.values():
        for number, same in enumerate(of_file.values()):
            names = [item.name.partition("[")[2] for item in same]
            left_out |= {*same} - {same[n] for n in sample_of(names, number)}
    if SHARE > 1:
        left_out |= {item for item in items if item.get_closest_marker("slow")}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        (*left_out,)[0].config.hook.pytest_deselected(items=[*left_out])


def pytest_collection_finish() -> None:
    """Garbage collection need not look at modules and tests again and again.

    And seldom: traces, IR and MLIR are many objects, and few of them are in cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With --durations: the time by folder and file, as most tests are short."""
    if not terminalreporter.config.option.durations:
        return
    reports = [r for found in terminalreporter.stats.values() for r in found]
    timed = [r for r in reports if isinstance(r, pytest.TestReport)]
    for title, depth in (("folders", 2), ("files", None)):
        sums: dict[str, list[float]] = {}
        for report in timed:
            parts = Path(report.nodeid.split("::")[0]).parts
            place = "/".join(parts[:depth])
            sums.setdefault(place, []).append(report.duration)
        slowest = sorted(sums.items(), key=lambda item: -sum(item[1]))[:SLOWEST]
        terminalreporter.section(f"slowest {title}: seconds, setups to teardowns")
        for place, seconds in slowest:
            terminalreporter.write_line(f"{sum(seconds):8.1f}  {place}")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What JAX compiled, a megabyte per program, is let go, best after a file."""
    is_last = nextitem is not None and nextitem.path != item.path
    if _resident_bytes() > (MOST_BYTES if is_last else 1.3 * MOST_BYTES):
        import jax

        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE if statm.exists() else 0


def _skip(
    items: list[pytest.Item], mark: str, can_run: Callable[[], bool], reason: str
) -> None:
    marked = [item for item in items if item.get_closest_marker(mark)]
    if marked and not can_run():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    import jax

    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def _has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Runs a fresh Python in the repository root; asserts success, returns stdout.

    With `quiet`, asserts that it says nothing else.
    """
    # A script's own folder is on its path; the package's must be too.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def run(*arguments: str | Path, quiet: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        said = [s for s in done.stderr.splitlines() if "font cache" not in s]
        assert not (quiet and said), done.stderr
        return done.stdout

    return run
