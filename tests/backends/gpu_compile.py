"""Kernels compiled for an H200 by XLA's own GPU compiler, on a machine without a GPU.

    make gpu                                                 # the zoo
    python -m tests.backends.gpu_compile --kernels 500       # random kernels, too
    python -m tests.backends.gpu_compile softmax --change grad

Nothing runs: this is what Triton, LLVM and ptxas, as a release of JAX ships them, make
of the text that `triton` and `cuda` emit. The compiler is JAX's plugin for CUDA, which
compiles for a chip it is given a description of. It must not be installed with JAX
itself, which would try to use it as a device: it is in a folder of its own (`--plugin`,
which `make gpu` fills). Exit code 1: something did not compile.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.backends.processes import run_each, run_in_processes

TARGET = """\
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H200"
"""
CHANGES = ("none", "triton", "vmap", "grad", "jvp")


# --- one process ---


@cache
def sharding() -> Any:
    """The only device of a machine that is not here."""
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    made = topologies.get_topology_desc(
        "h200", "cuda", target_config=TARGET, topology="1x1x1"
    )
    return SingleDeviceSharding(made.devices[0])


def compile_for_gpu(function: Callable, *args: Any) -> None:
    import jax

    from pallasite import config

    def there(x: Any) -> Any:
        x = jax.typeof(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding())

    with config.override(target="h200"):
        jax.jit(function).lower(*jax.tree.map(there, args)).compile()


def run(subject: str) -> str:
    """Compile `zoo NAME CHANGE` or `random FAMILY NUMBER`; by what it runs."""
    from pallasite.errors import FallbackWarning

    kind, name, how = subject.split()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind == "random":
            compile_random(name, int(how))
        else:
            compile_zoo(name, how)
    told = [w for w in caught if issubclass(w.category, FallbackWarning)]
    return "by emulation" if told else "compiled"


def compile_zoo(name: str, change: str) -> None:
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
    compile_for_gpu(call, *args)


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

    is_float = lambda x: jnp.issubdtype(jax.typeof(x).dtype, jnp.floating)
    places = [n for n, x in enumerate(args) if is_float(x)]

    def changed(*args: Any) -> Any:
        def of_floats(*floats: Any) -> Any:
            given = list(args)
            for n, x in zip(places, floats, strict=True):
                given[n] = x
            results = [x for x in jax.tree.leaves(call(*given)) if is_float(x)]
            return sum(jnp.sin(x.astype(jnp.float32)).sum() for x in results)

        floats = [args[n] for n in places]
        if kind == "jvp":
            return jax.jvp(of_floats, floats, floats)
        return jax.grad(of_floats, range(len(floats)))(*floats)

    return changed


def compile_random(family: str, number: int) -> None:
    import jax

    from pallasite.primitive import Call, bind_call
    from tests.fuzz.choices import Stream
    from tests.fuzz.generate import random_kernel
    from tests.fuzz.hunt import stream_of

    case = random_kernel(Stream(stream_of(number)), family, number % 4 == 3, False)
    with jax.enable_x64(True):
        compile_for_gpu(
            lambda *arrays: bind_call(Call(case.kernel), arrays), *case.arrays
        )


# --- all processes ---


def subjects(changes: Sequence[str], kernels: int, seed: int) -> list[str]:
    from tests.fuzz.generate import FAMILIES
    from tests.zoo import all_cases

    names = []
    for change in changes:
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
    parser.add_argument("--change", nargs="+", choices=CHANGES, default=["none"])
    parser.add_argument("--kernels", type=int, default=0, help="random ones")
    parser.add_argument("--seed", type=int, default=1, help="of random kernels")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=3600)
    default = Path(sys.prefix) / "gpu_compiler"
    parser.add_argument("--plugin", type=Path, default=default, help="its folder")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run_each(sys.stdin, run)
        return 0
    if not (options.plugin / "jax_plugins").is_dir():
        parser.error(f"no JAX plugin for CUDA in {options.plugin}: run `make gpu`")
    all_names = subjects(options.change, options.kernels, options.seed)
    parts = options.names or [""]
    names = [name for name in all_names if any(part in name for part in parts)]
    command = [sys.executable, "-m", "tests.backends.gpu_compile", "--run"]
    found = run_in_processes(
        command,
        names,
        options.seconds,
        options.processes,
        environment(options.plugin.resolve()),
    )
    found.tell("for an H200")
    return 1 if found.unlike or found.not_reached else 0


if __name__ == "__main__":
    sys.exit(main())
