"""How XLA compiles in tests: quickly, unless a test is about what XLA makes of it.

Most of the time goes to XLA, which compiles emulations and references that run once.
`conftest.py` sets `QUICK` for everything; a test that compares XLA's own numbers, or
what survives its optimisation, compiles with `USUAL`.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    # One module for LLVM, not one per core to be compiled side by side.
    "xla_cpu_parallel_codegen_split_count": 1,
}
USUAL: dict[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_parallel_codegen_split_count": 32,
}
# Worth half of the time; later releases do not know the name.
if version("jaxlib").startswith("0.10."):
    QUICK["xla_cpu_use_fusion_emitters"] = False
    USUAL["xla_cpu_use_fusion_emitters"] = True


def put(values: Any, dtype: Any = None) -> Any:
    """`jnp.asarray(values, dtype)` without the program it compiles for each shape."""
    import jax  # after `set_flags`

    array = np.asarray(values)
    return jax.device_put(array if dtype is None else array.astype(np.dtype(dtype)))


def pull_back(function: Callable, operands: Iterable[Any], seeds: Any) -> Any:
    """`jax.vjp(function, *operands)[1](seeds)` as one program, not one per operation.

    A program takes 25 ms to compile however small it is.
    """
    import jax

    pulled = jax.jit(lambda operands, seeds: jax.vjp(function, *operands)[1](seeds))
    return pulled(tuple(operands), seeds)


def set_flags(options: Mapping[str, Any]) -> None:
    """Set what the environment does not say yet, for this process and its children."""
    given = os.environ.get("XLA_FLAGS", "")
    new = [
        f"--{name}={str(value).lower()}"
        for name, value in options.items()
        if f"--{name}" not in given
    ]
    os.environ["XLA_FLAGS"] = " ".join([given, *new]).strip()
