"""Machine code for CPUs that this computer need not have, run under qemu's emulation.

`CPUS` lists them. `missing(cpu)` says what is not installed to run its code here;
`run_call` compiles the kernel of a call for it, links that with `emulated_driver.c`,
which calls it as XLA would, runs the program and gives the results.
"""

import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pallasite import target
from pallasite.backends import base
from pallasite.backends.cpu.call import compile as compiler
from pallasite.backends.cpu.call import handler, threads
from pallasite.passes.lower.own_inputs import own_inputs
from pallasite.primitive import Call
from pallasite.target import AVX2, NEON, SSE, Host

DRIVER = Path(__file__).with_name("emulated_driver.c")
OFFSETS = {
    name: getattr(module, name)
    for module, names in (
        (handler, "FRAME_API FRAME_STAGE EXECUTE FRAME_ARGS_COUNT FRAME_ARGS"),
        (handler, "FRAME_RESULTS_COUNT FRAME_RESULTS BUFFER_DATA API_ERROR_CREATE"),
        (threads, "API_SCHEDULE API_NUM_THREADS"),
    )
    for name in names.split()
}


@dataclass(frozen=True)
class Cpu:
    """A CPU to compile for, by LLVM's name, and what `target` knows of it."""

    name: str
    host: Host

    @property
    def triple(self) -> str:
        return f"{self.host.architecture}-linux-gnu"

    @property
    def compiler(self) -> str:
        return f"{self.triple}-gcc"

    @property
    def emulator(self) -> str:
        return f"qemu-{self.host.architecture}"


def _cpu(name: str, architecture: str, like: Host, *features: str) -> Cpu:
    known = like.features | set(features)
    host = Host(like.vector_bytes, like.registers, known, architecture=architecture)
    return Cpu(name, host)


AVX512 = Host(64, 32, AVX2.features | {"avx512f", "avx512bw", "avx512dq", "avx512vl"})
# qemu emulates these (from 7.2 on)...
CPUS = {
    cpu.name: cpu
    for cpu in (
        _cpu("x86-64", "x86_64", SSE),
        _cpu("haswell", "x86_64", AVX2),
        _cpu("neoverse-n1", "aarch64", NEON, "fullfp16", "dotprod"),
        _cpu("apple-m1", "aarch64", NEON, "fullfp16", "dotprod"),
    )
}
# ...and not these: what is known of their code is its text.
SKYLAKE = _cpu("skylake-avx512", "x86_64", AVX512)
SAPPHIRE_RAPIDS = _cpu(
    *("sapphirerapids", "x86_64", AVX512, "avx512bf16", "avx512vnni"),
    *("amx-tile", "amx-bf16", "amx-int8"),
)


def missing(cpu: Cpu) -> str | None:
    """What has to be installed before its code can be run here."""
    for program in (cpu.compiler, cpu.emulator):
        if shutil.which(program) is None:
            return f"no {program} here to run code for {cpu.name}"
    return None


def assembly(cpu: Cpu, call: Call) -> str:
    """The kernel's code for that CPU, to read."""
    return _machine(cpu).emit_assembly(_module(cpu, call))


def run_call(
    cpu: Cpu, call: Call, operands: Sequence[Any], folder: Path, pool: int = 2
) -> list[np.ndarray]:
    """The call's results, computed by the emulated CPU."""
    code, program = folder / "kernel.o", folder / "program"
    code.write_bytes(_machine(cpu).emit_object(_module(cpu, call)))
    defined = [f"-D{name}={value}" for name, value in OFFSETS.items()]
    files = [str(DRIVER), str(code), "-lm", "-o", str(program)]
    _run([cpu.compiler, "-O1", "-pthread", *defined, *files])
    kernel = own_inputs(call.kernel)
    shared = {result: operand for operand, result in kernel.aliases}
    arrays = [np.ascontiguousarray(x) for x in operands]
    sizes = [
        int(np.prod(o.ref.shape)) * o.ref.dtype.np.itemsize for o in kernel.outputs
    ]
    numbers = [pool, len(arrays), len(sizes), *(x.nbytes for x in arrays)]
    for n, size in enumerate(sizes):
        numbers += [size, shared.get(n, -1)]
    given = struct.pack(f"={len(numbers)}q", *numbers)
    given += b"".join(x.tobytes() for x in arrays)
    emulator = [cpu.emulator, "-cpu", "max", "-L", _libraries(cpu)]
    found = _run([*emulator, str(program)], given)
    assert len(found) == sum(sizes)
    results, start = [], 0
    for out, size in zip(kernel.outputs, sizes, strict=True):
        part = np.frombuffer(found[start : start + size], out.ref.dtype.np)
        results.append(part.reshape(out.ref.shape))
        start += size
    return results[: call.kernel.num_outputs]


def _module(cpu: Cpu, call: Call) -> Any:
    with target.using(cpu.host):
        compiled = base.Compiled(base.get("cpu"), call.kernel, call.options)
        text = compiled["llvm"]
    machine = _machine(cpu)
    lines = f'target triple = "{cpu.triple}"\n'
    lines += f'target datalayout = "{machine.target_data}"\n'
    return compiler._optimized(lines + text, machine)


@cache
def _machine(cpu: Cpu) -> Any:
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(cpu.triple).create_target_machine(
        cpu=cpu.name, opt=2, reloc="pic", codemodel="default"
    )


@cache
def _libraries(cpu: Cpu) -> str:
    """The folder with the other CPU's `lib`, where programs look for libc."""
    libc = _run([cpu.compiler, "-print-file-name=libc.so.6"]).decode().strip()
    return str(Path(libc).resolve().parent.parent)


def _run(command: Sequence[str], given: bytes = b"") -> bytes:
    done = subprocess.run(command, input=given, capture_output=True, timeout=120)
    errors = done.stderr.decode()
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {errors}"
    return done.stdout
