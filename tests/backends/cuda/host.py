"""Runs emitted CUDA C++ on the CPU: compiled by g++ against `host.h` and `host.cpp`.

The text of a kernel is run as it is; only functions that are single instructions have a
form of their own here. What is not written is a pattern of garbage, and blocks run in
a random order. What runs beside the threads of a block is as late as it may be
(`TIMINGS`, `host_explicit.h`). In `Fenced` memory an access outside an operand, result
or scratch array is a fault or is reported.
"""

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pallasite.backends import base
from pallasite.backends.cuda import ampere, blackwell, emit, functions, hopper
from pallasite.backends.cuda.repack import forms_of
from pallasite.ir.nodes import Kernel
from pallasite.passes.lower.own_inputs import own_inputs
from tests.backends.cpu.direct import Guarded, Memory

BACKEND = base.get("cuda")
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
OWN = {
    "to_bf16": "DEVICE bf16 to_bf16(float x) { return host_to_bf16(x); }\n",
    "to_f16": "DEVICE f16 to_f16(float x) { return host_to_f16(x); }\n",
    "from_f16": "DEVICE float from_f16(f16 x) { return host_from_f16(x); }\n",
    "pack_bf16": "DEVICE u32 pack_bf16(float x, float y) "
    "{ return host_to_bf16(x) | (u32)host_to_bf16(y) << 16; }\n",
    "pack_f16": "DEVICE u32 pack_f16(float x, float y) "
    "{ return host_to_f16(x) | (u32)host_to_f16(y) << 16; }\n",
    "max_f32": "DEVICE float max_f32(float x, float y) "
    "{ return x != x || y != y ? x + y : x > y ? x : y; }\n",
    "min_f32": "DEVICE float min_f32(float x, float y) "
    "{ return x != x || y != y ? x + y : x < y ? x : y; }\n",
    "reciprocal_root": "DEVICE float reciprocal_root(float x) "
    "{ return (float)(1 / sqrt((double)x)); }\n",
    **{
        f"pairs_{name}_{kind}": f"DEVICE u32 pairs_{name}_{kind}(u32 x, u32 y) {{\n"
        f"  auto f = [](float x, float y) {{ return x {sign} y; }};\n"
        f"  return host_pairs<{n}>(x, y, f);\n}}\n"
        for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"))
        for n, kind in enumerate(("bf16", "f16"))
    },
    "reciprocal": "DEVICE float reciprocal(float x) { return 1 / x; }\n",
    "divide_fast": "DEVICE float divide_fast(float x, float y) { return x / y; }\n",
    "negated": "DEVICE int negated(int x) { return (int)(0 - (u32)x); }\n",
    "exp2_fast": "DEVICE float exp2_fast(float x) { return exp2f(x); }\n",
    **{
        name: functions.FUNCTIONS[name].replace(
            "typename Bytes<B>::T T;\n",
            "typename Bytes<B>::T T;\n  aligned<B>(to);\n  aligned<B>(from);\n",
        )
        for name in ("get", "get_once", "put_once")
    },
    **dict.fromkeys(ampere.FUNCTIONS, ""),
    "bytes_together": ampere.FUNCTIONS["bytes_together"],
    **dict.fromkeys(hopper.BARRIERS, ""),
    **dict.fromkeys(hopper.CLUSTERS, ""),
    **dict.fromkeys(hopper.SEMAPHORES, ""),
    **dict.fromkeys(hopper.MAPS, ""),
    **dict.fromkeys(hopper.COPIES, ""),
    **dict.fromkeys(blackwell.TENSORS, ""),
    "operand": hopper.BARRIERS["operand"],
    "tensor_operand": blackwell.TENSORS["tensor_operand"],
    "tensor_rows": blackwell.TENSORS["tensor_rows"],
    # All of it must be there.
    "prefetch": "DEVICE void prefetch(const void* from, u32 bytes) {\n"
    "  const volatile char* p = (const volatile char*)from;\n"
    "  for (u32 n = 0; n < bytes; ++n) (void)p[n];\n}\n",
}
ALIGNMENT = 16  # bytes, of the widest access
PATTERN = 0x7F
KINDS = {"bf16": 0, "f16": 1, "f32": 2, "i8": 3}
TENSOR_KINDS = ("f16", "tf32", "f8f6f4", "i8", blackwell.SCALED)
CALL = """
{text}
void call_kernel(void** arguments) {{ {call}; }}
"""
# -fwrapv: as integers do on a GPU.
# Threads are switched by longjmp, which a fortified libc takes for a mistake.
FLAGS = ("-w", "-fwrapv", "-std=c++14", "-fPIC", "-U_FORTIFY_SOURCE", f"-I{HERE}")
# See host_explicit.h; the last number is that of a warpgroup, if one is late.
TIMINGS = {"late copies": (1, 0, -1), "late products": (0, 1, -1)}
LATE_WARPGROUPS = {f"late warpgroup {n}": (0, 1, n) for n in range(3)}


def compiler() -> str | None:
    return shutil.which("g++")


def cuda_text(kernel: Kernel, shared: Any = ()) -> str:
    return base.Compiled(BACKEND, kernel, base.Options(), shared=shared)["cuda"]


def blocks_in_cluster(text: str) -> int:
    found = re.search(r"__cluster_dims__\((\d+), 1, 1\)", text)
    return int(found[1]) if found else 1


def scheduled_text(kernel: Kernel) -> str:
    return base.Compiled(BACKEND, kernel, base.Options())["scheduled"]


def run(
    kernel: Kernel,
    operands: Sequence[Any],
    folder: Path,
    seed: int = 0,
    timings: Sequence[str] = ("late products",),
) -> list[np.ndarray]:
    """The outputs of a kernel, which are the same in all timings."""
    code = Code(kernel, folder)
    found, *others = (code(*operands, seed=seed, timing=t) for t in timings)
    for other in others:
        for x, y in zip(found, other, strict=True):
            assert x.tobytes() == y.tobytes(), f"{timings} do not agree"
    return found


def simulated(
    kernel: Kernel, operands: Sequence[Any], seed: int = 0
) -> list[np.ndarray]:
    """The same for a kernel that runs once, between forbidden pages."""
    with tempfile.TemporaryDirectory(prefix="cuda-") as folder:
        code = Code(kernel, Path(folder), optimise="-O0")
        return code(*operands, seed=seed, memory=Fenced(after=seed % 2 == 0))


class Fenced(Guarded):
    """Memory between two forbidden pages, aligned as vectors of 16 bytes need it.

    Up to 15 bytes between an array and the page after it are a pattern, which
    `check` compares: who reads them does no harm, who writes them does.
    """

    def __init__(self, after: bool = True):
        super().__init__(after)
        self._rests: list[np.ndarray] = []

    def place(self, array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        size = -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        address = self.allocate(size)
        held = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)
        held[...] = PATTERN
        placed = held[: array.nbytes].view(array.dtype).reshape(array.shape)
        placed[...] = array
        self._rests.append(held[array.nbytes :])
        return placed

    def check(self) -> None:
        assert all((rest == PATTERN).all() for rest in self._rests), "past the end"

    def release(self) -> None:
        self._rests.clear()
        super().release()


class Code:
    """The emitted text of one kernel, compiled for the CPU.

    Args:
        kernel: what to compile.
        folder: where its text and code are kept.
        shared: the passes before the backend's own, which the kernel has not had.
        optimise: how much g++ spends on the code.
        edit: what is done to the text before it is compiled.
    """

    def __init__(
        self,
        kernel: Kernel,
        folder: Path,
        shared: Any = (),
        optimise: str = "-O1",
        edit: Callable[[str], str] = str,
    ):
        text = edit(cuda_text(kernel, shared))
        # With the results that the launch adds for operands it writes.
        self.results, kernel = kernel.num_outputs, own_inputs(kernel)
        self.kernel, self.launched = kernel, emit.Launched.of(text)
        self.in_cluster = blocks_in_cluster(text)
        count = len(kernel.params) + len(self.launched.scratch)
        if self.launched.semaphores:  # of all blocks, which run at the same time
            self.in_cluster, count = self.launched.programs, count + 2
        if self.launched.devices > 1:
            self.in_cluster = self.launched.programs
            count = 1 + len(self.launched.scratch)
        path = _library(text, self.launched.name, count, folder, optimise)
        self.library = ctypes.CDLL(str(path))
        self.library.run.restype = ctypes.c_char_p
        # Its memory, stacks of all threads among it, is given back with this object.
        unload = ctypes.CDLL(None).dlclose
        handle = ctypes.c_void_p(self.library._handle)
        weakref.finalize(self, unload, handle).atexit = False

    def __call__(
        self,
        *operands: Any,
        seed: int = 0,
        memory: Memory | None = None,
        timing: str = "late products",
    ) -> list[np.ndarray]:
        """The results; blocks run in the order that `seed` gives."""
        memory, launched = memory or Memory(), self.launched
        inputs, results = self._placed(operands, memory)
        scratch = [
            memory.place(np.full(n, PATTERN, np.uint8)) for n in launched.scratch
        ]
        words = [np.zeros(n, np.int32) for n in [launched.semaphores] if n]
        self._run([*inputs, *words, *results, *scratch, *words], seed, timing)
        found = [np.array(r) for r in results[: self.results]]
        if isinstance(memory, Fenced):
            memory.check()
            memory.release()
        return found

    def on_devices(
        self, *given: Sequence[Any], seed: int = 0, timing: str = "late products"
    ) -> list[list[np.ndarray]]:
        """The results of each device: all of them are peers in one launch."""
        memory, launched = Memory(), self.launched
        assert len(given) == launched.devices
        table, results, kept = [0], list[list[np.ndarray]](), list[Any]()
        for operands in given:
            inputs, made = self._placed(operands, memory)
            words = np.zeros(max(launched.semaphores, 1), np.int32)
            kept += [*inputs, *made, words]
            table += [a.ctypes.data for a in (*inputs, *made, words)]
            results.append(made)
        scratch = [
            memory.place(np.full(n, PATTERN, np.uint8)) for n in launched.scratch
        ]
        self._run([np.array(table, np.uint64), *scratch], seed, timing)
        return [[np.array(r) for r in made[: self.results]] for made in results]

    def _placed(
        self, operands: Sequence[Any], memory: Memory
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Operands and results in memory, for one device."""
        kernel = self.kernel
        inputs = [memory.place(x) for x in self._in_forms(operands)]
        aliased = {target: inputs[source] for source, target in kernel.aliases}
        results = [
            aliased[n]
            if n in aliased
            else memory.place(np.full(p.ref.shape, 77).astype(p.ref.dtype.np))
            for n, p in enumerate(kernel.outputs)
        ]
        return inputs, results

    def _run(self, arrays: Sequence[np.ndarray], seed: int, timing: str) -> None:
        launched = self.launched
        pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        rng = np.random.default_rng(seed)
        clusters = launched.programs // self.in_cluster
        order = rng.permutation(clusters).astype(np.int32)
        wrong = self.library.run(
            pointers, order.ctypes.data_as(ctypes.c_void_p), clusters,
            self.in_cluster, launched.threads, launched.shared_bytes,
            *(TIMINGS | LATE_WARPGROUPS)[timing],
        )  # fmt: skip
        assert wrong is None, f"{timing}: {wrong.decode()}"

    def _in_forms(self, operands: Sequence[Any]) -> list[Any]:
        """The operands as the call takes them."""
        forms = forms_of(self.kernel, self.launched.repacked)
        if forms is None:
            return list(operands)
        packed = (f.pack(np, operands[n]) if f else operands[n] for n, f in forms)
        return [np.ascontiguousarray(x) for x in packed]


def _library(text: str, name: str, count: int, folder: Path, optimise: str) -> Path:
    for own, body in OWN.items():
        text = text.replace(functions.FUNCTIONS[own], body)
        if own in hopper.SEMAPHORES:  # in the order that all devices see
            seen = functions.FUNCTIONS[own].replace(".gpu.", ".sys.")
            text = text.replace(seen, body)
    text = re.sub(
        r"DEVICE void product_(\w+)\(.*?\n}\n", _own_product, text, flags=re.S
    )
    text = re.sub(
        r"(?:template <int A, int B> )?"
        r"DEVICE void tensor_(product|load|store)_(\w+)\(.*?\n}\n",
        _own_tensor,
        text,
        flags=re.S,
    )
    copies = "copy_in|copy_out|copy_to_blocks|copy_for_first"
    text = re.sub(rf"\b({copies})_\d\(", r"\1(", text)
    # Each block of a cluster has its own.
    text = text.replace("extern __shared__ __align__(1024) char shared[];", "")
    # After the typedefs, which the explicit level's functions use.
    text = text.replace(
        "\n#define DEVICE",
        '\n#include "host_explicit.h"\n#include "host_tensor.h"\n#define DEVICE',
    )
    types = _parameter_types(text, name)
    given = ", ".join(f"({t})arguments[{n}]" for n, t in enumerate(types))
    assert len(types) == count
    source = CALL.format(text=text, call=f"{name}({given})")
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    path = folder / f"k{digest}.so"
    file = folder / f"k{digest}.cpp"
    file.write_text(f'#include "host.h"\n{source}')
    # Its own symbols: other kernels' libraries define the same.
    _compile(optimise, "-shared", "-Wl,-Bsymbolic", file, _runtime(), "-o", path)
    return path


@functools.cache
def _runtime() -> Path:
    """The object file of `host.cpp`, which all kernels are linked with."""
    names = ("host.cpp", "host.h", "host_explicit.h", "host_tensor.h", "tensor_core.h")
    sources = [HERE / name for name in names]
    digest = hashlib.sha256(b"".join(s.read_bytes() for s in sources)).hexdigest()[:16]
    path = ROOT / ".pytest_cache" / f"cuda_host_{digest}.o"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            _compile("-O2", "-c", sources[0], "-o", made)
            made.rename(path)  # whole, whoever else makes it
    return path


def _compile(*arguments: str | Path) -> None:
    command = [compiler(), *FLAGS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[:4000]


def _own_product(found: re.Match[str]) -> str:
    """A product's instruction as a call of its host form."""
    columns, dtype, how, *turned = found[1].split("_")
    sides = turned[0] if turned else ""
    left, right = (str(side in sides).lower() for side in "ab")
    params = "u64 a, u64 b, int more"
    args, flags = "a, b, more", f"{left}, {right}"
    if how == "registers":
        params = "u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more"
        args, flags = "a0, a1, a2, a3, b, more", right
    kind = "int" if dtype == "i8" else "float"
    call = f"product_{how}<{columns}, {KINDS[dtype]}, {flags}>(d, {args})"
    return f"DEVICE void product_{found[1]}({kind}* d, {params}) {{ {call}; }}\n"


def _own_tensor(found: re.Match[str]) -> str:
    """An instruction on tensor memory as a call of its host form."""
    how, rest = found[1], found[2]
    if how == "load":
        params, args = "u32* x, u32 at", f"x, at, {rest}"
    elif how == "store":
        params, args = "u32 at, const u32* x", f"at, x, {rest}"
    else:
        kind, group, where = rest.split("_")
        is_tensor = where == "tensor"
        params = f"u32 d, {'u32' if is_tensor else 'u64'} a, u64 b, u32 how, int more"
        numbers = f"{TENSOR_KINDS.index(kind)}, {group}, {str(is_tensor).lower()}"
        by = ""
        if kind == blackwell.SCALED:
            params, by = f"{params}, u32 by_a, u32 by_b", ", by_a, by_b"
        call = f"host::tensor_multiply({numbers}, d, a + A, b + B, how, more{by})"
        name = f"tensor_{found[1]}_{rest}"
        return f"template <int A, int B> void {name}({params}) {{ {call}; }}\n"
    call = f"host::tensor_{how}({args})"
    return f"DEVICE void tensor_{found[1]}_{rest}({params}) {{ {call}; }}\n"


def _parameter_types(text: str, name: str) -> list[str]:
    head = text[text.index(f"\n{name}(") :]
    params = head[head.index("(") + 1 : head.index(") {")]
    return [p.rsplit(" ", 1)[0].replace("__restrict__", "") for p in params.split(",")]
