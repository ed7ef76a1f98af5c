"""Calls a kernel's machine code as XLA would, without XLA: a call frame by hand.

`Code` holds the `handler` of one kernel; calling it with arrays gives the results. The
memory it works in comes from a `Memory`: plain, or `Guarded`, where each operand,
result and arena is placed against a page that no one may touch, so that one element
too far is a fault. Layouts are those of XLA's C header `xla/ffi/api/c_api.h`
(`handler.py`).
"""

import ctypes
import mmap
import threading
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any

import numpy as np

from pallasite.backends.cpu import llvm_text
from pallasite.backends.cpu.call import compile as compiler
from pallasite.backends.cpu.call import handler, kept_memory, threads
from pallasite.ir.nodes import Kernel
from pallasite.passes.lower.own_inputs import own_inputs

Pointer = int
_Function = CFUNCTYPE(c_void_p, c_void_p)
_Allocate = CFUNCTYPE(c_void_p, c_size_t)
_Free = CFUNCTYPE(None, c_void_p)


class KernelError(Exception):
    """What the machine code reported to XLA."""


# --- memory ---


class Memory:
    """Where operands, results and arenas are: ordinary memory."""

    def place(self, array: np.ndarray) -> np.ndarray:
        """An array with these contents for the machine code to work on."""
        return np.array(array)


class Guarded(Memory):
    """Memory between two forbidden pages, against the one `after` it, or before."""

    def __init__(self, after: bool = True):
        self.after = after
        self._blocks: dict[Pointer, tuple[Pointer, int]] = {}

    def place(self, array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        address = self.allocate(array.nbytes)
        held = (ctypes.c_char * array.nbytes).from_address(address)
        placed = np.frombuffer(held, array.dtype, array.size).reshape(array.shape)
        placed[...] = array
        return placed

    def allocate(self, size: int) -> Pointer:
        page = mmap.PAGESIZE
        inside = max(1, -(-size // page)) * page
        start = _libc.mmap(None, inside + 2 * page, 0, _PRIVATE, -1, 0)
        assert start not in (None, c_void_p(-1).value), "no memory for the test"
        assert _libc.mprotect(start + page, inside, _READ_WRITE) == 0
        address = start + page + (inside - size if self.after else 0)
        self._blocks[address] = (start, inside + 2 * page)
        return address

    def arena(self, size: int) -> Pointer:
        """As malloc; what is moved up to a multiple of 64 there fits exactly."""
        wanted = size - handler.ALIGNMENT
        if self.after and wanted % handler.ALIGNMENT == kept_memory.HEADER:
            return self.allocate(wanted)
        if not self.after or wanted % handler.ALIGNMENT:
            return self.allocate(size)
        address = self.allocate(wanted)
        self._blocks[address - 1] = self._blocks.pop(address)
        return address - 1

    def free(self, address: Pointer | None) -> None:
        if address:
            _libc.munmap(*self._blocks.pop(address))

    def release(self) -> None:
        for address in list(self._blocks):
            self.free(address)


_PRIVATE, _READ_WRITE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 3
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int32, c_int32, c_int32, c_int64]
_libc.munmap.argtypes = [c_void_p, c_size_t]
_libc.mprotect.argtypes = [c_void_p, c_size_t, c_int32]


# --- XLA's side ---


class Api:
    """The functions of XLA that a handler calls; with a pool of real threads."""

    def __init__(self, pool: int = 1):
        self.messages: list[str] = []
        self._pool, self._started = pool, list[threading.Thread]()
        self._kept = [_Function(f) for f in (self._error, self._schedule, self._number)]
        self.table = (c_void_p * 32)()
        error, schedule, number = (ctypes.cast(f, c_void_p) for f in self._kept)
        self.table[handler.API_ERROR_CREATE // 8] = error
        self.table[threads.API_SCHEDULE // 8] = schedule
        self.table[threads.API_NUM_THREADS // 8] = number

    def finish(self) -> None:
        for thread in self._started:
            thread.join()
        self._started.clear()

    def _error(self, args: Pointer) -> Pointer:
        self.messages.append(ctypes.string_at(_word(args + 16)).decode())
        return 1

    def _schedule(self, args: Pointer) -> None:
        task, data = _Function(_word(args + 24)), _word(args + 32)
        self._started.append(threading.Thread(target=task, args=(data,)))
        self._started[-1].start()

    def _number(self, args: Pointer) -> None:
        c_int64.from_address(_word(args + 24)).value = self._pool


def _word(address: Pointer) -> int:
    return c_void_p.from_address(address).value or 0


def _frame(api: Api, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
    """A call frame for execution, and all that it points to."""
    words = (c_void_p * 22)()
    words[handler.FRAME_API // 8] = ctypes.addressof(api.table)
    c_int32.from_buffer(words, handler.FRAME_STAGE).value = handler.EXECUTE
    kept: list[Any] = [words, api]
    for place, count, arrays in (
        (handler.FRAME_ARGS, handler.FRAME_ARGS_COUNT, arguments),
        (handler.FRAME_RESULTS, handler.FRAME_RESULTS_COUNT, results),
    ):
        buffers = [(c_void_p * 6)() for _ in arrays]
        for buffer, array in zip(buffers, arrays, strict=True):
            buffer[handler.BUFFER_DATA // 8] = array.ctypes.data
        listed = (c_void_p * max(len(buffers), 1))(*map(ctypes.addressof, buffers))
        words[place // 8], words[count // 8] = ctypes.addressof(listed), len(buffers)
        kept += [buffers, listed]
    return kept


# --- machine code ---


class Code:
    """The machine code of one kernel.

    Args:
        kernel: what to compile.
        optimise: compile as for users; else as quickly as can be.
        memory: where it works. `Guarded` memory also gives the arenas.
    """

    def __init__(
        self, kernel: Kernel, optimise: bool = True, memory: Memory | None = None
    ):
        self.kernel, self.memory = own_inputs(kernel), memory or Memory()
        self.num_outputs = kernel.num_outputs
        self._hooks: list[Any] = []
        self._pool = 1
        self._owner = self._link(_object(llvm_text(kernel), optimise))
        self.handler = _Function(self._owner["handler"])

    def _link(self, object_code: bytes) -> Any:
        from llvmlite import binding as llvm

        library = llvm.JITLibraryBuilder()
        library.add_object_img(object_code).add_current_process()
        compiler.import_python(library)
        if isinstance(self.memory, Guarded):
            self._hooks = [_Allocate(self._allocate), _Free(self.memory.free)]
            for name, hook in zip(("malloc", "free"), self._hooks, strict=True):
                library.import_symbol(name, ctypes.cast(hook, c_void_p).value)
        library.export_symbol("handler")
        Code._number += 1
        return library.link(compiler._jit(), f"direct_{Code._number}")

    _number = 0

    def _allocate(self, size: int) -> Pointer:
        assert isinstance(self.memory, Guarded)
        # Of a job, unlike an arena, every byte is used. Its operands are the kernel's
        # and, where threads share packed operands, their memory.
        operands = len(self.kernel.params)
        runs = {threads.runs_offset(n) for n in (operands, operands + 1)}
        jobs = {r + n * threads.LINE for r in runs for n in range(2, self._pool + 1)}
        return self.memory.allocate(size) if size in jobs else self.memory.arena(size)

    def __call__(self, *arrays: np.ndarray, pool: int = 1) -> list[np.ndarray]:
        """The results; raises KernelError where the code reports an error."""
        api, self._pool = Api(pool), pool
        arguments = [self.memory.place(a) for a in arrays]
        aliased = {o: arguments[i] for i, o in self.kernel.aliases}
        results = [
            aliased[n]
            if n in aliased
            else self.memory.place(_rubbish(out.ref.shape, out.ref.dtype.np))
            for n, out in enumerate(self.kernel.outputs)
        ]
        frame = _frame(api, arguments, results)
        outside = kept_memory.slot.value
        if isinstance(self.memory, Guarded):
            kept_memory.slot.value = None  # guarded memory comes new for each call
        failed = self.handler(ctypes.addressof(frame[0]))
        api.finish()
        found = [np.array(r) for r in results[: self.num_outputs]]
        unchanged = [
            (np.asarray(old).tobytes(), new.tobytes())
            for n, (old, new) in enumerate(zip(arrays, arguments, strict=True))
            if n not in {i for i, _ in self.kernel.aliases}
        ]
        if isinstance(self.memory, Guarded):
            self.memory.release()
            kept_memory.slot.value = outside
        if failed:
            raise KernelError(api.messages[0])
        assert all(old == new for old, new in unchanged), "an operand was changed"
        return found


def _rubbish(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """What an uninitialised result may hold."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(size, 0xA5, np.uint8).view(dtype).reshape(shape)


def _object(llvm_text: str, optimise: bool) -> bytes:
    from llvmlite import binding as llvm

    if optimise:
        return compiler._machine().emit_object(compiler._optimized(llvm_text))
    module = llvm.parse_assembly(llvm_text)
    module.verify()
    return _quick_machine().emit_object(module)


@cache
def _quick_machine() -> Any:
    """The same CPU, but as little as possible is spent on good code."""
    from llvmlite import binding as llvm

    compiler._machine()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=compiler._features(),
        opt=0,
        codemodel="jitdefault",
        jit=True,
    )
