"""The names of upstream's `pallas.triton`."""

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import config
from pallasite.errors import SpecError
from pallasite.language import specs
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
from pallasite.placement import own_platform
from pallasite.target.chip import Gpu
from pallasite.target.names import named


@dataclass(frozen=True)
class CompilerParams(specs.CompilerParams):
    """Settings for the Triton backend."""

    num_warps: int | None = None
    num_stages: int | None = None
    serialized_metadata: bytes | None = None
    batch_invariant: bool | None = None


TritonCompilerParams = CompilerParams


def approx_tanh(x: Any) -> jax.Array:
    """`jnp.tanh`, the exact function, as every backend has it."""
    return jnp.tanh(x)


def debug_barrier() -> None:
    """Does nothing: programs are single-threaded in the language."""


class GpuVersion(enum.Enum):
    """GPUs by the names that JAX has for them."""

    T4 = "Tesla T4"
    A30 = "NVIDIA A30"
    A100 = "NVIDIA A100"
    A10 = "NVIDIA A10"
    L4 = "NVIDIA L4"
    L40 = "NVIDIA L40"
    RTX_4090 = "NVIDIA GeForce RTX 4090"
    H100 = "NVIDIA H100"
    H200 = "NVIDIA H200"
    GH200 = "NVIDIA GH200"
    B200 = "NVIDIA B200"
    GB200 = "NVIDIA GB200"
    B300 = "NVIDIA B300"
    GB300 = "NVIDIA GB300"
    VR200 = "NVIDIA VR200"
    THOR = "NVIDIA Thor"
    RTX_PRO_4500 = "NVIDIA RTX PRO 4500"
    RTX_PRO_5000 = "NVIDIA RTX PRO 5000"
    RTX_PRO_6000 = "NVIDIA RTX PRO 6000"
    GB10 = "NVIDIA GB10"


# By ten times the compute capability.
_GENERATIONS = {
    75: "T4",
    80: "A30 A100",
    86: "A10",
    89: "L4 L40 RTX_4090",
    90: "H100 H200 GH200",
    100: "B200 GB200",
    103: "B300 GB300",
    107: "VR200",
    110: "THOR",
    120: "RTX_PRO_4500 RTX_PRO_5000 RTX_PRO_6000",
    121: "GB10",
}


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """A GPU's generation: `arch_name` is "9.0", `compute_capability` 90."""

    gpu_version: GpuVersion | None
    arch_name: str
    compute_capability: int


def get_gpu_info_from_version(gpu_version: GpuVersion) -> GpuInfo:
    """The generation of a GPU."""
    found = (
        c for c, names in _GENERATIONS.items() if gpu_version.name in names.split()
    )
    return _generation(next(found), gpu_version)


def _generation(capability: int, version: GpuVersion | None) -> GpuInfo:
    name = f"{capability // 10}.{capability % 10}"
    return GpuInfo(gpu_version=version, arch_name=name, compute_capability=capability)


def get_gpu_info() -> GpuInfo:
    """The generation of the GPU that calls run on, or that the target knob names.

    Raises:
        SpecError: there is none.
    """
    device = jax.devices()[0]
    chip = named(config.get("target")).chip if config.get("target") else None
    kind = chip.device_kinds[0] if isinstance(chip, Gpu) else device.device_kind
    # The longest name that fits: an A100 is no A10.
    versions = sorted(GpuVersion, key=lambda v: -len(v.value))
    version = next((v for v in versions if v.value in kind), None)
    if version is not None:
        return get_gpu_info_from_version(version)
    if own_platform() != "cuda" or chip is not None:
        raise SpecError(
            f"no GPU is known by the name {kind!r}",
            fix="PALLASITE_TARGET=h200 names one where there is none",
        )
    capability = getattr(device, "compute_capability", "")  # "9.0"
    return _generation(int(capability.replace(".", "")), None)


def is_gpu_device() -> bool:
    """Whether calls run on a GPU by default."""
    return jax.default_backend() == "gpu"


def __getattr__(name: str) -> Any:
    if name == "CUSTOM_CALL_TARGET_NAME":  # a backend, loaded when it is used
        from pallasite.backends.triton import TARGET

        return TARGET
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["CompilerParams", "multiple_of"]
