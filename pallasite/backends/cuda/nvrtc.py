"""Compiles CUDA C++ text to PTX with NVRTC, and reports what ptxas says about PTX.

NVRTC is a library of CUDA that needs neither a GPU nor a CUDA installation: it comes
with `jax[cuda13]` and as the package nvidia-cuda-nvrtc. It is looked up where those
packages put it, then by name on the system, and called through ctypes. `stored_ptx`
caches compiled code on disk (`runtime/cache.py`).
"""

import ctypes
import importlib.util
import re
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from pallasite.backends.cuda.author_text import rejected
from pallasite.backends.cuda.text import with_short_loops_written_out
from pallasite.errors import CompileError, UnsupportedError
from pallasite.runtime import cache as cache_files

_LIBRARIES = ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*")
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_ASSEMBLERS = ("cu*/bin/ptxas", "cuda_nvcc/bin/ptxas")
_OPTIONS = ("--std=c++17", "-default-device")
MOST_BEGUN = 8  # texts that are compiled, or were and wait to be asked for


MISSING = "NVRTC, which compiles for the backend 'cuda', is not installed"
SOURCE = "pip install 'pallasite[cuda]', or jax[cuda13], which includes it"


def is_available() -> bool:
    return _found() is not None


def compile_ptx(text: str, arch: str, lines: bool = False) -> str:
    """The PTX of CUDA C++ text for an architecture such as "sm_90a".

    With `lines` it includes the source lines that comments of the text name.

    Raises:
        CompileError: NVRTC is not installed, or rejects the text.
    """
    nvrtc = _library()
    text = text if lines else with_short_loops_written_out(text)
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
        )
    )
    options = [*_OPTIONS, f"--gpu-architecture={arch.replace('sm_', 'compute_')}"]
    options += ["--generate-line-info"] if lines else []
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
        if status:
            log = _string(
                nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program
            )
            of_author = rejected(text, log)
            if of_author is not None:
                raise of_author
            named = re.search(r"^pl_(\w+)\(", text, re.MULTILINE)
            raise CompileError(
                "NVRTC rejected the code of a kernel",
                [
                    ("kernel", named[1] if named else None),
                    ("nvrtc", log.strip()[:4000]),
                ],
                fix="this is a bug in Pallasite; please report the kernel",
            )
        return _string(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


_ORIGIN = re.compile(r"  // (\S.*):(\d+)$")


def _with_directives(text: str) -> str:
    """Turn comments that name source lines into directives for the compiler."""
    found, was_known = [], False
    for line in text.splitlines():
        origin = _ORIGIN.search(line)
        if origin is not None:
            found.append(f'#line {origin[2]} "{origin[1]}"')
        elif was_known:
            found.append('#line 1 "generated"')
        was_known = origin is not None
        found.append(line)
    return "\n".join([*found, ""])


def stored_ptx(text: str, arch: str, lines: bool = False) -> str:
    """The same, from disk if it was compiled before."""
    if lines:
        return compile_ptx(_with_directives(text), arch, lines)
    key = _key(text, arch)
    begun = _begun.pop(key, None)
    found = None if begun is not None else cache_files.load(key)
    if found is None:
        made = compile_ptx(text, arch) if begun is None else begun.result()
        found = made.encode()
        cache_files.store(key, found)
    return found.decode()


def begin_ptx(text: str, arch: str) -> None:
    """Start to compile a text that `stored_ptx` will be asked for, in a thread.

    NVRTC runs outside of Python, so meanwhile other kernels can be scheduled.
    """
    key = _key(text, arch)
    if key not in _begun and is_available() and cache_files.load(key) is None:
        while len(_begun) >= MOST_BEGUN:  # nobody asked for it
            _begun.pop(next(iter(_begun))).cancel()
        _begun[key] = _threads().submit(compile_ptx, text, arch)


_begun: dict[str, Future[str]] = {}


def _key(text: str, arch: str) -> str:
    return "\n".join(["cuda", version(), arch, text])


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_BEGUN, "pallasite-nvrtc")


@cache
def version() -> str:
    """The release of NVRTC, "none" if there is none."""
    if not is_available():
        return "nvrtc none"
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"nvrtc {major.value}.{minor.value}"


def report(ptx: str, arch: str) -> str:
    """What ptxas reports on registers, memory and spills, or that it is missing."""
    path = _find(_ASSEMBLERS)
    if path is None:
        return (
            "ptxas is not installed (nvidia-cuda-nvcc): register counts are not "
            "available\n"
        )
    with tempfile.TemporaryDirectory(prefix="pallasite-ptxas-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [path, f"-arch={arch}", "-v", "-o", "/dev/null", source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return "".join(re.sub(r"^ptxas \w+ *: *", "", line) + "\n" for line in lines)


# --- the library ---


def _find(patterns: tuple[str, ...]) -> Path | None:
    """A file of NVIDIA's Python packages, which share the namespace `nvidia`."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for pattern in patterns:
            found = [p for p in Path(folder).glob(pattern) if "alt" not in p.name]
            if found:
                return max(found)
    return None


@cache
def _found() -> Any:
    """The library, loaded; None if there is none."""
    path = _find(_LIBRARIES)
    # It opens its built-in headers by name: found only if they are already loaded.
    for builtins in path.parent.glob("libnvrtc-builtins.so.*") if path else ():
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    for name in (str(path),) if path else _NAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    return None


def _library() -> Any:
    library = _found()
    if library is None:
        raise UnsupportedError(MISSING, fix=SOURCE)
    return library


def _check(status: int) -> None:
    if status:
        raise CompileError(
            "NVRTC failed", [("error", _library().nvrtcGetErrorString(status).decode())]
        )


def _string(size: Any, get: Any, program: ctypes.c_void_p) -> str:
    length = ctypes.c_size_t()
    _check(size(program, ctypes.byref(length)))
    buffer = ctypes.create_string_buffer(length.value)
    _check(get(program, buffer))
    return buffer.value.decode()
