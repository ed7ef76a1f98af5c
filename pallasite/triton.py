"""The names of upstream's `pallas.triton`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import missing
from pallasite.language.helpers import dot as dot
from pallasite.language.helpers import max_contiguous as max_contiguous
from pallasite.language.inline_asm import (
    elementwise_inline_asm as elementwise_inline_asm,
)
from pallasite.language.refs import atomic_add as atomic_add
from pallasite.language.refs import atomic_and as atomic_and
from pallasite.language.refs import atomic_cas as atomic_cas
from pallasite.language.refs import atomic_max as atomic_max
from pallasite.language.refs import atomic_min as atomic_min
from pallasite.language.refs import atomic_or as atomic_or
from pallasite.language.refs import atomic_xchg as atomic_xchg
from pallasite.language.refs import atomic_xor as atomic_xor
from pallasite.language.refs import load as load
from pallasite.language.refs import multiple_of
from pallasite.language.refs import store as store


@dataclass(frozen=True)
class CompilerParams:
    """Settings for the Triton backend."""

    num_warps: int | None = None
    num_stages: int | None = None
    serialized_metadata: bytes | None = None


TritonCompilerParams = CompilerParams


def approx_tanh(x: Any) -> jax.Array:
    """`jnp.tanh`, the exact function, as every backend has it."""
    return jnp.tanh(x)


def debug_barrier() -> None:
    """Does nothing: programs are single-threaded in the language."""


__all__ = ["CompilerParams", "multiple_of"]
__getattr__ = missing.names(
    "pallasite.triton",
    missing.hints(
        "CUSTOM_CALL_TARGET_NAME GpuInfo GpuVersion "
        "get_gpu_info get_gpu_info_from_version is_gpu_device",
        "use jnp or lax operations, which run everywhere",
    ),
)
