"""What a backend is: a name, the ops it has, its passes, and stages from text to text.

A backend lists the ops it has natively, its passes (Kernel to Kernel, run after the
shared ones by the one runner in `passes/run.py`) and its stages: each a function of the
previous stage's text, the first of the scheduled kernel's. `Compiled` runs them on
demand; `launch` says how XLA calls the result, which is cached on disk if it is data.
Backends import no JAX, nothing of the language and no other backend; `runtime/ffi.py`
turns a Launch into a call.
"""

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from pallasite import config, plugins
from pallasite.errors import PallasError, UnknownBackendError
from pallasite.ir.nodes import Kernel, walk
from pallasite.runtime import cache, sources
from pallasite.runtime.forms import Form
from pallasite.target import Chip

if TYPE_CHECKING:
    from pallasite.passes.run import Pass, Step


class Scheduled(str):
    """The text of a scheduled kernel, which the first stage need not parse again."""

    kernel: Kernel

    @staticmethod
    def of(kernel: Kernel) -> "Scheduled":
        from pallasite.ir.text import print_kernel

        text = Scheduled(print_kernel(kernel, locs=True))
        text.kernel = kernel
        return text


def scheduled_kernel(text: str) -> Kernel:
    """The kernel that a first stage starts from; accepts any kernel's text."""
    from pallasite.ir.text import parse_kernel

    return text.kernel if isinstance(text, Scheduled) else parse_kernel(text)


@dataclass(frozen=True)
class Stage:
    """A named function from the previous stage's text to its own (or machine code)."""

    name: str
    make: Callable[[str], Any]
    is_view: bool = False  # for reading only: the next stage skips it
    begin: Callable[[str], None] | None = None  # starts `make` in another thread


@dataclass(frozen=True)
class Options:
    """The author's options for one call, for backends: all of them optional."""

    compiler_params: Mapping[str, Any] = field(default_factory=dict)
    cost_estimate: Mapping[str, int] | None = None
    debug: bool = False
    metadata: Mapping[str, str] | None = None
    chip: Chip | None = None  # the accelerator compiled for; None: unknown
    lines: bool = False  # annotate the text of every stage with source lines
    own: bool = False  # the package's own kernel: no advice on its blocks

    @property
    def batch_invariant(self) -> bool:
        """Whether no choice that a sum's order follows from may depend on how many
        programs there are (docs/semantics.md)."""
        return bool(self.compiler_params.get("batch_invariant"))


@dataclass(frozen=True)
class Launch:
    """How XLA calls a compiled kernel (see `runtime/ffi.py`)."""

    target: str  # custom call target name
    config: str | Mapping[str, Any]  # backend_config: text, or typed attributes
    api_version: int
    aliases: tuple[tuple[int, int], ...] = ()  # operand -> result, same buffer
    has_side_effect: bool = False
    handler: int | None = None  # address of an XLA FFI handler to register (CPU)
    keep_alive: Any = None  # owner of the handler's code
    symbol: str = ""  # what device profilers call the kernel
    scratch_results: tuple[tuple[tuple[int, ...], str], ...] = ()  # shape, numpy dtype
    # Which operands go to the call, and the forms of these and of results; None: all as
    # they are.
    operands: tuple[tuple[int, Form | None], ...] | None = None
    result_forms: tuple[Form | None, ...] = ()
    # 32-bit words that a call takes as zeros and passes to `read_log` on the host, if
    # there is one.
    log_words: int = 0
    log_shape: tuple[int, ...] | None = None  # None: a vector
    read_log: Callable[[Any], None] | None = None
    is_versioned: bool = False  # JAX promises no compatibility: exported unchecked only


@dataclass(frozen=True)
class Resource:
    """A program's use of a scarce resource of the chip."""

    name: str  # "VMEM", "shared memory", "registers per thread"
    used: int
    available: int
    unit: str = "bytes"


class Backend(Protocol):
    """The whole interface; if a shared pass needs more, put it in the op table."""

    name: str
    platforms: tuple[str, ...]  # JAX platform names it can run on
    native: frozenset[str]  # ops its emitter has; the rest are decomposed
    exports: bool  # whether its output can leave this process (`jax.export`)

    def passes(self, options: Options) -> "Sequence[Pass]":
        """The backend's own passes, after the shared ones."""
        ...

    def stages(self, options: Options) -> Sequence[Stage]:
        """In order, from the scheduled kernel's text to what is launched."""
        ...

    def launch(self, compiled: "Compiled") -> Launch:
        """How to call the output of the stages."""
        ...

    def version(self) -> str:
        """Enters every cache key: code generator and tool versions."""
        ...

    def missing(self, has_device: bool) -> str:
        """What a computer with or without a device of this backend lacks to compile the
        text of the last stage, and where to get it; empty if nothing."""
        ...

    def resources(self, compiled: "Compiled") -> Sequence[Resource]:
        """What one program takes of the chip's resources, as far as known."""
        ...


# What another package's backend must have.
MEMBERS = ("name", "platforms", "native", "exports", "passes", "stages", "launch")
MEMBERS += ("version", "missing", "resources")


class Compiled(Mapping[str, Any]):
    """A kernel on its way through a backend: the output of every stage, by its name.

    The first is "scheduled": the kernel after all passes, printed with source lines.
    Everything is made on demand, so that a cache hit runs no passes.
    """

    def __init__(
        self,
        backend: Backend,
        imported: Kernel,
        options: Options,
        shared: "Sequence[Pass] | None" = None,
    ):
        from pallasite.passes.run import SHARED, Dump

        self.backend, self.imported, self.options = backend, imported, options
        self.shared = SHARED if shared is None else shared
        self.steps: list[Step] = []  # every pass that ran, with its time
        self.beside: Sequence[Compiled] = ()  # kernels that will be launched soon, too
        self._dump = Dump.of(imported)
        self._stages = {stage.name: stage for stage in backend.stages(options)}
        self._made: dict[str, Any] = {}

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel after the shared passes."""
        return self._run(self.imported, self.shared)

    @cached_property
    def scheduled(self) -> Kernel:
        """The kernel after the backend's own passes as well."""
        return self._run(self.kernel, self.backend.passes(self.options))

    def _run(self, kernel: Kernel, passes: "Sequence[Pass]") -> Kernel:
        from pallasite.passes.run import run

        return run(kernel, passes, self._dump, self.steps)

    def __iter__(self) -> Iterator[str]:
        return iter(["scheduled", *self._stages])

    def __len__(self) -> int:
        return 1 + len(self._stages)

    def __getitem__(self, name: str) -> Any:
        from pallasite.passes.progress import watched

        if name not in self._made:
            if name == "scheduled":
                made = Scheduled.of(self.scheduled)
            else:
                before = self[self._before(name)]
                with watched(self.imported) as progress:
                    progress.enter(f"stage {name} of backend {self.backend.name!r}")
                    made = self._stages[name].make(before)
                if self._dump is not None and isinstance(made, str):
                    self._dump.write(f"{self.backend.name}-{name}", made)
            self._made[name] = made
        return self._made[name]

    def begin(self) -> None:
        """Start the stages that run in other threads, once their text is made."""
        for name, stage in self._stages.items():
            if stage.begin is not None:
                stage.begin(self[self._before(name)])

    def _before(self, name: str) -> str:
        """The stage whose text a stage starts from."""
        names = list(self)
        earlier = names[: names.index(name)]
        texts = [n for n in earlier if n == "scheduled" or not self._stages[n].is_view]
        return texts[-1]

    def texts(self) -> dict[str, str]:
        """The text of every stage that has one."""
        return {n: self[n] for n in self if isinstance(self[n], str)}


# Kernels that are lowered soon after another one, and what of them is begun.
_after: dict[Kernel, "Sequence[Together]"] = {}
_begun: dict[tuple[str, Kernel, str], Compiled] = {}
MOST_BEGUN = 64
_begun_lock = threading.Lock()  # of both; JAX lowers in several threads


class Together(NamedTuple):
    """A kernel, and the operands of it that XLA has just computed."""

    kernel: Kernel
    flowing: tuple[int, ...]


def lowered_together(kernels: Sequence[Together]) -> None:
    """Note kernels that are lowered one after another, as those of a derivative.

    With the first that is launched, the others are begun (`stored_launch`).
    """
    with _begun_lock:
        while len(_after) > MOST_BEGUN:
            _after.pop(next(iter(_after)))
        _after.update((each.kernel, kernels[n + 1 :]) for n, each in enumerate(kernels))


def lowered_after(kernel: Kernel) -> Sequence[Together]:
    return _after.get(kernel, ())


def begun(
    backend: Backend, kernel: Kernel, options: Options, keep: bool = False
) -> Compiled:
    """A kernel on its way, maybe begun before; `keep`: it is asked for again."""
    key = backend.name, kernel, repr(options)
    with _begun_lock:
        made = _begun.pop(key, None) or Compiled(backend, kernel, options)
        if keep:
            while len(_begun) >= MOST_BEGUN:
                _begun.pop(next(iter(_begun)))
            _begun[key] = made
    return made


# Relative to the package: what a launch depends on, besides the backend's folder.
_SOURCES = ("target", "ir", "ops", "passes", "runtime/forms.py", "backends/base.py")


def stored_launch(compiled: Compiled, make: Callable[[], Launch]) -> Launch:
    """A launch that is data, from disk if it was made before: then no passes run."""
    if config.get("verify") or config.get("dump"):
        return make()  # its passes are to be shown
    key = _launch_key(compiled)
    found = cache.load(key)
    if found is not None:
        return pickle.loads(found)
    for each in (compiled, *compiled.beside):
        if each is compiled or cache.load(_launch_key(each)) is None:
            with suppress(PallasError, ImportError):  # it is raised when asked for
                each.begin()
    launch = make()
    if launch.read_log is None:
        cache.store(key, pickle.dumps(launch))
    return launch


def _launch_key(compiled: Compiled) -> str:
    backend = compiled.backend
    own = [f"backends/{backend.name}"] if backend.name in _MODULES else []
    code = sources.hash_of(*_SOURCES, *own)  # another package has its version()
    passes = [p.name for p in compiled.shared]
    parts = ["launch", backend.name, backend.version(), np.__version__, code, *passes]
    return "\n".join([*parts, repr(compiled.options), compiled.imported.text])


_MODULES = {
    "cpu": "pallasite.backends.cpu",
    "triton": "pallasite.backends.triton",
    "cuda": "pallasite.backends.cuda",
    "tpu": "pallasite.backends.tpu",
}
# The default backends by JAX platform, in the order they are tried.
DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu",),
    "cuda": ("cuda", "triton"),
    "rocm": ("triton",),
    "tpu": ("tpu",),
}
# Matmuls, and ops written only by authors who schedule warpgroups.
_FOR_CUDA = frozenset(("dot", "wgmma", "barrier_wait", "bulk_wait", "roles"))


def defaults(platform: str | None, kernel: Kernel) -> tuple[str, ...]:
    """The backends of a platform, in the order they are tried for a kernel."""
    named = DEFAULTS.get(platform or "", ())
    return named[::-1] if platform == "cuda" and not _suits_cuda(kernel) else named


# Besides elementwise ops, those of programs that read, reduce and write rows.
_ROW_OPS = {"pipeline", "load", "store", "reduce"}
_ROW_OPS |= {"broadcast_in_dim", "reshape", "constant", "iota"}
_ROW_BYTES = 16  # alignment of rows that allows wide loads
_MOST_REDUCTIONS = 5


def _suits_cuda(kernel: Kernel) -> bool:
    """Whether `cuda` is the faster backend; asked of the normal form, because spelling
    is not to decide. The answer is kept, so that a cached kernel runs no passes."""
    from pallasite.passes.run import run
    from pallasite.passes.schedule.whole_rows import whole_rows
    from pallasite.target import GPUS

    if any(op.name in _FOR_CUDA for op in walk(kernel.body)):
        return True
    code = sources.hash_of("ir", "ops", "passes", "backends/base.py")
    key = "\n".join(["suits cuda", code, kernel.text])
    kept = cache.load(key)
    if kept is None:
        rows = whole_rows(run(kernel), GPUS["h200"])  # on others, too
        kept = b"yes" if _is_for_cuda(rows) else b""
        cache.store(key, kept)
    return bool(kept)


def _is_for_cuda(kernel: Kernel) -> bool:
    """Whether a normal form is faster through `cuda`, by benchmarks/gpu.py.

    It is for matmuls, and for rows that each program reads once and reduces a few
    times. Triton prefetches loads in loops iterations ahead; it is also faster for
    unaligned rows (softmax of 8191 columns: 3.4 against 3.0 TB/s on an H200), and for
    rows that are only written (a number in all places: 3.8 against 2.7). With five
    reductions (the gradient of softmax) `cuda` is still the faster: 3.5 against 3.0.
    """
    from pallasite.ir.opdef import table
    from pallasite.passes.analysis.grid import analyze
    from pallasite.passes.optimise.split_accesses import split_accesses

    ops = list(walk(kernel.body))
    if any(op.name in _FOR_CUDA for op in ops):
        return True
    rows = table()
    if any(op.name in ("slice", "concatenate") for op in ops):
        ops = list(walk(split_accesses(kernel).body))
    if not all(op.name in _ROW_OPS or rows[op.name].elementwise for op in ops):
        return False
    # Of a column, each program accesses an element.
    arrays = [p.ref for p in kernel.params if p.ref.rank > 1 and p.ref.shape[-1] > 1]
    if any(ref.shape[-1] * ref.dtype.bits % (8 * _ROW_BYTES) for ref in arrays):
        return False
    loads = [op.result.tile for op in ops if op.name == "load"]
    if not any(tile.rank and tile.shape[-1] > 1 for tile in loads):
        return False
    reductions = [op for op in ops if op.name == "reduce"]
    if len(reductions) > _MOST_REDUCTIONS:
        return False
    if any(op.operands[0].tile.rank - 1 not in op.attrs["axes"] for op in reductions):
        return False
    grids = [op for op in ops if op.name == "pipeline"]
    return len(grids) == 1 and not analyze(kernel).sequential


def names() -> tuple[str, ...]:
    """The backends that can be named: this package's, then those of others."""
    return (*_MODULES, *_added())


def _added() -> Mapping[str, EntryPoint]:
    return plugins.declared(plugins.BACKENDS, (*_MODULES, "interpret"))


def get(name: str) -> Backend:
    """The backend called `name`, imported on first use."""
    if name in _MODULES:
        return import_module(_MODULES[name]).BACKEND
    if name in _added():
        return plugins.loaded(_added()[name], members=MEMBERS)
    raise UnknownBackendError(name, names())
