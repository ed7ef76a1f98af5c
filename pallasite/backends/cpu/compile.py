"""LLVM IR text to object code to an address, through llvmlite.

`make_object` optimises and compiles for this machine's CPU, or finds the object on disk
(`runtime/cache.py`); `load` links an object into the process and keeps it for ever,
because XLA never forgets a handler. Both remember what they made by a hash of the text.
"""

import ctypes
import hashlib
import threading
from functools import cache
from typing import Any

from pallasite.backends.cpu.debugging import PRINT, printer
from pallasite.errors import CompileError
from pallasite.runtime import cache as cache_files

_lock = threading.Lock()
_objects: dict[str, bytes] = {}
_loaded: dict[str, tuple[int, Any]] = {}


def text_hash(llvm_text: str) -> str:
    return hashlib.sha256(llvm_text.encode()).hexdigest()[:32]


def make_object(llvm_text: str) -> bytes:
    """Object code for this machine."""
    key = text_hash(llvm_text)
    with _lock:
        if key not in _objects:
            _objects[key] = _stored_object(llvm_text)
        return _objects[key]


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


def version() -> str:
    """Tools and CPU that the object code depends on."""
    import llvmlite
    from llvmlite import binding as llvm

    llvm_version = ".".join(map(str, llvm.llvm_version_info))
    features = hashlib.sha256(_features().encode()).hexdigest()[:16]
    cpu = llvm.get_host_cpu_name()
    return f"llvmlite {llvmlite.__version__}, LLVM {llvm_version}, {cpu}, {features}"


def _stored_object(llvm_text: str) -> bytes:
    """Object code from disk, else compiled and then kept there."""
    # Whole texts, not their hashes: the store hashes once, and for all.
    key = "\n".join([version(), _features(), llvm_text])
    found = cache_files.load(key)
    if found is None:
        found = _machine().emit_object(_optimized(llvm_text))
        cache_files.store(key, found)
    return found


def _optimized(llvm_text: str) -> Any:
    """The module after LLVM's passes."""
    from llvmlite import binding as llvm

    machine = _machine()
    try:
        module = llvm.parse_assembly(llvm_text)
        module.verify()
    except RuntimeError as error:
        raise CompileError(
            "LLVM refused the code of a kernel",
            [("llvm", str(error).strip())],
            fix="this is a bug in Pallasite; please report the kernel",
        ) from None
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = True
    # Unrolled copies of every short loop made code 10 times larger and no faster.
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
    """Name the functions of this process that machine code calls."""
    address = ctypes.cast(printer(), ctypes.c_void_p).value
    library.import_symbol(PRINT, address)


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
