"""Every way to run a random kernel here, each as a check of one Case.

A check raises: a PallasError of REFUSALS where the engine does not take the kernel, and
anything else where it is wrong. One whose kernels run in several ways returns which.
"""

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import numpy as np

from pallasite.errors import (
    CompileError,
    FallbackWarning,
    PallasError,
    ResourceError,
    SpecError,
    UnsupportedError,
)
from pallasite.interpret.checked import run_checked
from pallasite.ir.nodes import Block, Kernel, walk
from pallasite.ir.opdef import table
from pallasite.ir.verify import verify
from pallasite.passes.lower.legalize import legalize
from pallasite.passes.lower.place_windows import place_windows
from pallasite.passes.lower.promote import promote
from pallasite.passes.normal import normalize
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.consecutive_indices import consecutive_indices
from pallasite.passes.normal.known_comparisons import known_comparisons
from pallasite.passes.normal.scratch_values import scratch_values
from pallasite.passes.optimise.equal_factors import equal_factors
from pallasite.passes.optimise.fold_exp2 import fold_exp2
from pallasite.passes.optimise.guard_bounds import guard_bounds
from pallasite.passes.optimise.hoist import hoist
from pallasite.passes.optimise.idle_windows import idle_windows
from pallasite.passes.optimise.join_branches import join_branches
from pallasite.passes.optimise.join_products import join_products
from pallasite.passes.optimise.one_hots import one_hots
from pallasite.passes.optimise.split_accesses import split_accesses
from pallasite.passes.optimise.stagger_products import stagger_products
from pallasite.passes.optimise.unmasked_steps import unmasked_steps
from pallasite.passes.schedule.choose_blocks import for_threads
from pallasite.passes.schedule.merge_k_steps import merge_k_rounds, merge_k_steps
from pallasite.passes.schedule.row_strips import row_strips
from pallasite.passes.schedule.wide_steps import wide_steps
from pallasite.primitive import Call, Checked, bind_call, choose
from tests.backends.cpu.direct import Guarded, Memory
from tests.backends.cuda import host as cuda
from tests.backends.tpu import harness as tpu
from tests.backends.triton import harness as triton
from tests.fuzz.agreement import run_numpy
from tests.fuzz.choices import Choices, Seeded, chance, pick
from tests.fuzz.generate import Case
from tests.fuzz.running import check, emulated
from tests.fuzz.test_cpu import Native
from tests.fuzz.test_passes import check_vmap

REFUSALS: tuple[type[PallasError], ...] = (UnsupportedError, ResourceError, SpecError)
Run = Callable[[Case], list[np.ndarray]]
Check = Callable[[Case, int], str | None]

OPTIMISED_EVERY = 16  # kernels
SMALL_CHIP = triton.with_shared(3 << 10)  # holds few of the operands of matmuls
DEVICE_LOST = 77  # the exit code of a process whose GPU reported an error


def compare(run: Run, case: Case) -> None:
    """Assert that a run of the case agrees with the numpy evaluator."""
    check(lambda cases: [run(c) for c in cases], [case], quick=True)


def on_cpu(case: Case, number: int) -> None:
    """Machine code: hosts, threads, optimisation and where memory ends vary."""
    memory = (Memory(), Guarded(), Memory(), Guarded(after=False))[number // 6 % 4]
    optimise = number % OPTIMISED_EVERY == 0
    compare(lambda c: Native().run(c, number, optimise, memory), case)


def in_emulation(case: Case, number: int) -> None:
    check(emulated, [case], quick=True)


def through_passes(case: Case, number: int) -> None:
    """Each pass by itself, then one after another as the CPU has them."""
    passes = _passes(Seeded(number))
    for name, change in passes.items():
        try:
            compare(partial(_changed, [change]), case)
        except REFUSALS:
            raise
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    compare(partial(_changed, list(passes.values())), case)


def _changed(passes: Sequence[Callable[[Kernel], Kernel]], case: Case):
    kernel = case.kernel
    for change in passes:
        kernel = change(kernel)
        verify(kernel)
    return run_numpy(kernel, case.arrays)


def _passes(choices: Choices) -> dict[str, Callable[[Kernel], Kernel]]:
    """The passes in an order that a backend could have; their limits vary."""
    always = {name for name, row in table().items() if row.lower is None}
    some = {name for name in table() if chance(choices, 30)}
    native = frozenset(always | some | {"gather", "scatter"})  # not each has one
    size = lambda: pick(choices, (1 << 20, 16, 64, 256, 4))
    deepest = pick(choices, (1024, 2, 4, 8))
    return {
        **dict(normalize.RULES),
        "split_accesses": split_accesses,
        "choose_blocks": partial(
            for_threads, threads=pick(choices, (2, 64)), nanoseconds=lambda _: 1e9
        ),
        "place_windows": place_windows,
        "unmasked_steps": partial(unmasked_steps, least=2, needed=None),
        "merge_k_steps": partial(
            merge_k_steps, deepest=deepest, most_bytes=size() * 64
        ),
        "merge_k_rounds": partial(merge_k_rounds, most_bytes=size() * 64),
        "wide_steps": partial(wide_steps, most_bytes=size()),
        "known_comparisons": known_comparisons,
        "scratch_values": scratch_values,
        "idle_windows": idle_windows,
        "join_branches": partial(
            join_branches, size=_ops_in, most=size(), needed="add"
        ),
        "join_products": partial(
            join_products, few_rows=size(), granule=1, most_bytes=size() * 64
        ),
        "stagger_products": partial(stagger_products, ahead=size()),
        "canonicalize": canonicalize,
        "consecutive_indices": consecutive_indices,
        "equal_factors": equal_factors,
        "one_hots": partial(one_hots, least_places=2, least_ids=2),
        "legalize": partial(legalize, native=native, backend="fuzz"),
        "row_strips": partial(row_strips, most_bytes=size()),
        "promote": partial(promote, in_parts=chance(choices, 50)),
        "guard_bounds": guard_bounds,
        "hoist": hoist,
        "fold_exp2": fold_exp2,
    }


def _ops_in(block: Block) -> int:
    return sum(1 for _ in walk(block))


def under_vmap(case: Case, number: int) -> None:
    check_vmap(case, Seeded(number))


def in_checked_mode(case: Case, number: int) -> None:
    """No reports: accesses that are clamped are legal, so bounds are left out."""
    options = Checked(bounds=False, unwritten=False)
    compare(lambda c: run_checked(c.kernel, c.arrays, options), case)


def on_triton(case: Case, number: int) -> None:
    """Every third kernel on a chip whose shared memory holds little at a time."""
    chip = SMALL_CHIP if number % 3 == 0 else None
    compare(lambda c: triton.simulated(c.kernel, c.arrays, number, chip), case)


def on_tpu(case: Case, number: int) -> None:
    compare(lambda c: tpu.simulated(c.kernel, c.arrays), case)


def in_cuda_text(case: Case, number: int) -> None:
    """CUDA C++ compiled for this CPU, between forbidden pages."""
    compare(lambda c: cuda.simulated(c.kernel, c.arrays, seed=number), case)


def on_gpu(case: Case, number: int, backend: str | None = None) -> str:
    """A GPU of this computer, through one backend or the one that is the default."""
    call = Call(case.kernel, backend=backend)
    with jax.enable_x64(True), jax.default_device(jax.devices("gpu")[0]):
        taken_by = backend or default_backend(call)
        compare(lambda c: _on_device(call, c), case)
    return taken_by


def default_backend(call: Call) -> str:
    """The backend that runs a call on a GPU; what it is refused for, if none does."""
    chosen = choose(call, "cuda")
    for _, error in chosen.refusals:
        if isinstance(error, CompileError):
            raise error
    if chosen.launch is None:
        reasons = [str(error).splitlines()[0] for _, error in chosen.refusals]
        raise UnsupportedError("all refuse: " + "; ".join(reasons))
    return chosen.backend


def _on_device(call: Call, case: Case) -> list[np.ndarray]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            return [np.asarray(r) for r in bind_call(call, case.arrays)]
    except jax.errors.JaxRuntimeError as error:
        if "CUDA_ERROR" not in str(error):
            raise
        # Nothing runs in a process after that; the hunt starts another.
        print(f"{call.backend} on {case!r}: {error}", file=sys.stderr, flush=True)
        os._exit(DEVICE_LOST)


ENGINES: Mapping[str, Check] = {
    "cpu": on_cpu,
    "emulation": in_emulation,
    "passes": through_passes,
    "vmap": under_vmap,
    "checked": in_checked_mode,
    "triton": on_triton,
    "tpu": on_tpu,
    "cuda": in_cuda_text,
    "gpu": on_gpu,
    "gpu_cuda": partial(on_gpu, backend="cuda"),
    "gpu_triton": partial(on_gpu, backend="triton"),
}


def present() -> tuple[str, ...]:
    """The engines that run on this computer."""
    missing = set[str]()
    if cuda.compiler() is None:
        missing.add("cuda")
    if jax.default_backend() != "gpu":
        missing |= {name for name in ENGINES if name.startswith("gpu")}
    return tuple(name for name in ENGINES if name not in missing)
