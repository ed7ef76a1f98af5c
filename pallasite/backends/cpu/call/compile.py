"""LLVM IR text to object code to an address, through llvmlite.

An object is identified by its *identity*: the kernel's text and everything else that
determines its code (`identity`). `stored_object` finds it in this process or on disk
(`runtime/cache.py`), and otherwise emits the LLVM text, optimises it and compiles it
for this machine's CPU; `load` links an object into the process and keeps it forever,
because XLA never forgets a handler.
"""

import ctypes
import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pallasite import target
from pallasite.backends.cpu.call import kept_memory, recording
from pallasite.backends.cpu.ops.debugging import FILL, PRINT, filler, printer
from pallasite.errors import CompileError
from pallasite.runtime import cache as cache_files
from pallasite.runtime import sources

_lock = threading.Lock()
_objects: dict[str, bytes] = {}
_loaded: dict[str, tuple[int, Any]] = {}

# Relative to the package: what the code of a kernel depends on.
_SOURCES = ("target", "ir", "ops", "passes", "backends/cpu")


def identity(kernel_text: str) -> str:
    """A text that two kernels share only if they have the same object code."""
    host = target.host()
    chosen = repr(replace(host, features=frozenset())) + repr(sorted(host.features))
    return "\n".join(
        [version(), _features(), chosen, sources.hash_of(*_SOURCES), kernel_text]
    )


def short_name(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def stored_object(identity: str, make: Callable[[], bytes]) -> bytes:
    """Object code from this process or from disk; made if it is in neither."""
    key = short_name(identity)
    with _lock:
        found = _objects.get(key)
    if found is None:
        found = cache_files.load(identity)
    if found is None:
        found = make()
        cache_files.store(identity, found)
    with _lock:
        return _objects.setdefault(key, found)


def make_object(llvm_text: str) -> bytes:
    """Object code for this machine."""
    with _lock:
        return _machine().emit_object(_optimized(llvm_text))


def make_assembly(llvm_text: str) -> str:
    """The same code as text, to read."""
    with _lock:
        return _machine().emit_assembly(_optimized(llvm_text))


def load(key: str, object_code: bytes) -> tuple[int, Any]:
    """The address of `handler` in an object, and what keeps it in memory."""
    with _lock:
        if key not in _loaded:
            _loaded[key] = _link(key, object_code)
        return _loaded[key]


@cache
def version() -> str:
    """The tools and the CPU that the object code depends on."""
    import llvmlite
    from llvmlite import binding as llvm

    llvm_version = ".".join(map(str, llvm.llvm_version_info))
    features = hashlib.sha256(_features().encode()).hexdigest()[:16]
    cpu = llvm.get_host_cpu_name()
    return f"llvmlite {llvmlite.__version__}, LLVM {llvm_version}, {cpu}, {features}"


def source_files() -> list[Path]:
    """All files of the package that machine code depends on."""
    return sources.files_in(*_SOURCES)


def _optimized(llvm_text: str, machine: Any = None) -> Any:
    """The module after LLVM's passes, by default for this machine's CPU."""
    from llvmlite import binding as llvm

    machine = machine or _machine()
    try:
        module = llvm.parse_assembly(llvm_text)
        module.verify()
    except RuntimeError as error:
        raise CompileError(
            "LLVM rejected the code of a kernel",
            [("llvm", str(error).strip())],
            fix="this is a bug in Pallasite; please report the kernel",
        ) from None
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = True
    # Unrolling every short loop made code 10 times larger and no faster.
    options.loop_unrolling = options.loop_interleaving = False
    options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def _link(key: str, object_code: bytes) -> tuple[int, Any]:
    from llvmlite import binding as llvm

    library = llvm.JITLibraryBuilder()
    library.add_object_img(object_code).add_current_process()
    import_python(library)
    library.export_symbol("handler")
    tracker = library.link(_jit(), f"pallasite_{key}")
    return tracker["handler"], tracker


def import_python(library: Any) -> None:
    """Register the symbols of this process that machine code uses."""
    for name, function in ((PRINT, printer()), (FILL, filler())):
        library.import_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    for module in (kept_memory, recording):
        library.import_symbol(module.SLOT, ctypes.addressof(module.slot))


@cache
def _features() -> str:
    from llvmlite import binding as llvm

    return llvm.get_host_cpu_features().flatten()


@cache
def _machine() -> Any:
    """The code generator for this machine's CPU."""
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=_features(),
        opt=2,
        codemodel="jitdefault",
        jit=True,
    )


@cache
def _jit() -> Any:
    from llvmlite import binding as llvm

    return llvm.create_lljit_compiler(_machine())
