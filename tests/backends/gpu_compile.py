"""Kernels compiled for a GPU by its own compiler, on a machine without one.

    make gpu                                                 # the zoo
    make amd                                                 # all, for AMD's three
    python -m tests.backends.gpu_compile --kernels 500       # random kernels, too
    python -m tests.backends.gpu_compile softmax --change grad --chip a100

Nothing runs: this is what Triton, LLVM and ptxas, as a release of JAX ships them, make
of the text that `triton` and `cuda` emit. The compiler is JAX's plugin for CUDA, which
compiles for a chip it is given a description of. It must not be installed with JAX
itself, which would try to use it as a device: it is in a folder of its own (`--plugin`,
which `make gpu` fills).

JAX's plugin for ROCm does not load without ROCm. For AMD's chips, the `triton` package
(extra `amd-compiler`) compiles the same text: see `amd.py`. Exit code 1: something did
not compile, or takes more shared memory than there is.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pallasite.target import GPUS
from tests.backends import amd
from tests.backends.processes import run_each, run_in_processes

TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {per_core}
  threads_per_core_limit: {chip.threads_per_core}
  core_count: {chip.cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: {chip.cache.bytes}
  clock_rate_ghz: 1.98
  device_memory_size: 85000000000
  shared_memory_per_block_optin: {chip.shared.bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: {chip.registers}
  registers_per_block_limit: {chip.registers}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{chip.device_kinds[0]}"
"""
AMD = ("mi300x", "mi355x", "r9700")
CHIPS = ("a100", "h100", "h200", "b200", "b300", *AMD)
CHANGES = ("none", "triton", "vmap", "grad", "jvp")


# --- one process ---


@cache
def sharding(name: str) -> Any:
    """The only device of a machine that is not here."""
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    chip = GPUS[name]
    major, minor = divmod(int(chip.arch.removeprefix("sm_")), 10)
    kept = 1024  # of a core's shared memory, by the system
    text = TARGET.format(
        chip=chip, major=major, minor=minor, per_core=chip.shared.bytes + kept
    )
    made = topologies.get_topology_desc(
        name, "cuda", target_config=text, topology="1x1x1"
    )
    return SingleDeviceSharding(made.devices[0])


def compile_for(chip: str, function: Callable, *args: Any) -> None:
    import jax

    from pallasite import config

    if chip in AMD:
        amd.compile_for(GPUS[chip], function, *args)
        return

    def there(x: Any) -> Any:
        x = jax.typeof(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(chip))

    with config.override(target=chip):  # derivatives choose their kernels here
        traced = jax.jit(function).trace(*jax.tree.map(there, args))
    traced.lower().compile()  # the topology's device names the chip


def run(chip: str, subject: str) -> str:
    """Compile `zoo NAME CHANGE` or `random FAMILY NUMBER`; by what it runs."""
    from pallasite.errors import FallbackWarning

    kind, name, how = subject.split()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind == "random":
            compile_random(chip, name, int(how))
        elif kind == "library":
            compile_operation(chip, name, how)
        else:
            compile_zoo(chip, name, how)
    told = [w for w in caught if issubclass(w.category, FallbackWarning)]
    return "by emulation" if told else "compiled"


def compile_zoo(chip: str, name: str, change: str) -> None:
    from tests.zoo import all_cases
    from tests.zoo.test_zoo import arguments

    (case,) = (c for c in all_cases() if c.name == name)
    args = arguments(case, 0)
    backend = {"backend": "triton"} if change == "triton" else {}
    call = lambda *args: case.run(*args, interpret=False, **backend)
    if change == "vmap":
        call, args = batched(call, args, case.vmap_axes)
    elif change in ("grad", "jvp"):
        call = derivative(call, args, change)
    compile_for(chip, call, *args)


def compile_operation(chip: str, name: str, change: str) -> None:
    """A ready-made operation, at the sizes of real models."""
    from tests.kernels.test_native_on_gpu import CASES, gradient

    function, args = next(v for n, v in CASES.items() if n.replace(" ", "_") == name)
    if change == "grad":
        function, args = gradient(function, args)
    compile_for(chip, lambda *args: function(*args), *args)


def batched(call: Callable, args: Sequence[Any], axes: Any) -> tuple[Callable, list]:
    import jax
    import jax.numpy as jnp

    each = axes if isinstance(axes, tuple) else (axes,) * len(args)
    stacked = [
        x if axis is None else jnp.stack([x] * 3, axis)
        for x, axis in zip(args, each, strict=True)
    ]
    return jax.vmap(call, in_axes=axes), stacked


def derivative(call: Callable, args: Sequence[Any], kind: str) -> Callable:
    """Of all floating-point operands."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    is_float = lambda x: jnp.issubdtype(jax.typeof(x).dtype, jnp.floating)

    def total(*args: Any) -> Any:
        results = [x for x in jax.tree.leaves(call(*args)) if is_float(x)]
        return sum(jnp.sin(x.astype(jnp.float32)).sum() for x in results)

    def tangent(x: Any) -> Any:
        return x if is_float(x) else np.zeros(jnp.shape(x), jax.dtypes.float0)

    if kind == "jvp":
        return lambda *args: jax.jvp(total, args, tuple(map(tangent, args)))
    return jax.grad(total, tuple(n for n, x in enumerate(args) if is_float(x)))


def compile_random(chip: str, family: str, number: int) -> None:
    import jax

    from pallasite.primitive import Call, bind_call
    from tests.fuzz.choices import Stream
    from tests.fuzz.generate import random_kernel
    from tests.fuzz.hunt import stream_of

    case = random_kernel(Stream(stream_of(number)), family, number % 4 == 3, False)
    with jax.enable_x64(True):
        call = lambda *arrays: bind_call(Call(case.kernel), arrays)
        compile_for(chip, call, *case.arrays)


# --- all processes ---


def subjects(
    changes: Sequence[str], kernels: int, seed: int, library: bool = False
) -> list[str]:
    from tests.fuzz.generate import FAMILIES
    from tests.zoo import all_cases

    names = []
    for change in changes:
        if library and change in ("none", "grad"):
            names += operations(change)
        for case in all_cases():
            no_derivative = {"nograd", "nofloat"} & case.tags
            if change in ("grad", "jvp") and no_derivative:
                continue
            if change != "vmap" or case.vmap_axes is not None:
                names.append(f"zoo {case.name} {change}")
    families = tuple(FAMILIES)
    for n in range(kernels):
        family = families[n % len(families)]
        names.append(f"random {family} {seed * 1_000_000 + n}")
    return names


def operations(change: str) -> list[str]:
    from tests.kernels.test_native_on_gpu import CASES, WITHOUT_GRADIENTS

    names = [n for n in CASES if change == "none" or n not in WITHOUT_GRADIENTS]
    return [f"library {name.replace(' ', '_')} {change}" for name in names]


def environment(plugin: Path) -> dict[str, str]:
    cuda = plugin / "nvidia" / "cu13"  # ptxas and libdevice
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={cuda}"
    return {
        "PYTHONPATH": os.pathsep.join([os.getcwd(), str(plugin)]),
        "PATH": os.pathsep.join([str(cuda / "bin"), os.environ.get("PATH", "")]),
        "XLA_FLAGS": flags.strip(),
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # of a driver and cuDNN
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--chip", choices=CHIPS, default="h200")
    parser.add_argument("--change", nargs="+", choices=CHANGES, default=["none"])
    parser.add_argument("--library", action="store_true", help="and its operations")
    parser.add_argument("--kernels", type=int, default=0, help="random ones")
    parser.add_argument("--seed", type=int, default=1, help="of random kernels")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=3600)
    default = Path(sys.prefix) / "gpu_compiler"
    parser.add_argument("--plugin", type=Path, default=default, help="its folder")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run_each(sys.stdin, partial(run, options.chip))
        return 0
    if options.chip in AMD:
        if find_spec("triton") is None:
            parser.error("no package triton: run `make amd`")
        around = {"JAX_PLATFORMS": "cpu"}
    elif (options.plugin / "jax_plugins").is_dir():
        around = environment(options.plugin.resolve())
    else:
        parser.error(f"no JAX plugin for CUDA in {options.plugin}: run `make gpu`")
    given = (options.change, options.kernels, options.seed, options.library)
    all_names = subjects(*given)
    parts = options.names or [""]
    names = [name for name in all_names if any(part in name for part in parts)]
    module = ("-m", "tests.backends.gpu_compile")
    command = [sys.executable, *module, "--run", "--chip", options.chip]
    found = run_in_processes(
        command,
        names,
        options.seconds,
        options.processes,
        around,
        is_report=lambda line: line.startswith(amd.SAID),
    )
    found.tell(f"for {options.chip}")
    return 1 if found.unlike or found.not_reached else 0


if __name__ == "__main__":
    sys.exit(main())
