"""Parts of JAX's own Pallas in a kernel: recognised, so that an error can say so.

Programs take them from JAX's private modules (`jax._src.pallas`), which `install()`
leaves alone, or import `jax.experimental.pallas` before `install()`.
"""

import os
import sys
from typing import Any

from pallasite.errors import KernelTypeError

_MODULES = ("jax._src.pallas", "jax.experimental.pallas")
_FOLDER = "/jax/_src/pallas/"  # kernels that JAX ships are elsewhere
FIX = (
    "import it from pallasite (pl, pltpu, plgpu); pallasite.install(), called before "
    "other imports, does so for jax.experimental.pallas, not for jax._src.pallas"
)


def is_upstreams(x: Any) -> bool:
    """Whether an object's class is one of JAX's own Pallas."""
    return type(x).__module__.startswith(_MODULES)


def has_primitive(primitive: Any) -> bool:
    """Whether a primitive is one of JAX's own Pallas."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith(_MODULES)]
    return any(
        v is primitive
        for m in modules
        if m
        for v in list(getattr(m, "__dict__", {}).values())
    )


def function_in(frames: list[Any]) -> str | None:
    """The first of these frames' functions that is in JAX's own Pallas."""
    for frame in frames:
        file = frame.f_code.co_filename.replace(os.sep, "/")
        if _FOLDER in file:
            return frame.f_code.co_name
    return None


def foreign(what: str, facts: Any, at: Any) -> KernelTypeError:
    """The error for a function of JAX's own Pallas in a kernel."""
    fix = FIX
    if what.startswith("prng_"):
        fix += "; make keys with pltpu.to_pallas_key, not with impl='pallas_tpu'"
    return KernelTypeError(
        f"{what} is of JAX's own Pallas; this kernel runs in Pallasite", facts, at, fix
    )
