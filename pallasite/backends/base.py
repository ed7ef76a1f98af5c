"""What a backend is: a name, the ops it has, and named stages from Kernel to machine.

A backend lists the ops it has natively and an ordered mapping of stages, each a
function from the previous stage's output to its own; all outputs but the last are text
that can be dumped and compared. `launch` says how XLA calls the result. Backends import
no JAX, no frontend and no other backend; `runtime/ffi.py` turns a Launch into a call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from pallasite.errors import UnknownBackendError
from pallasite.ir.nodes import Kernel

Stage = Callable[[Any], Any]


@dataclass(frozen=True)
class Options:
    """What the author said about one call, for backends: all of it optional."""

    compiler_params: Mapping[str, Any] = field(default_factory=dict)
    cost_estimate: Mapping[str, int] | None = None
    debug: bool = False
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Launch:
    """How XLA calls a compiled kernel (see `runtime/ffi.py`)."""

    target: str  # custom call target name
    config: str | Mapping[str, Any]  # backend_config: text, or typed attributes
    api_version: int
    aliases: tuple[tuple[int, int], ...] = ()  # operand -> result, same buffer
    has_side_effect: bool = False
    handler: int | None = None  # address of an XLA FFI handler to register (CPU)
    keep_alive: Any = None  # owner of the handler's code
    scratch_results: tuple[tuple[tuple[int, ...], str], ...] = ()  # shape, numpy dtype


class Backend(Protocol):
    """The whole interface; a shared pass needing more belongs in the op table."""

    name: str
    platforms: tuple[str, ...]  # JAX platform names it can run on
    level: str  # the IR level its emitter takes: "tile" or "lane"
    native: frozenset[str]  # ops its emitter spells; the rest are decomposed

    def stages(self, kernel: Kernel, options: Options) -> dict[str, Stage]:
        """Ordered: name -> function from the previous stage's output to its own."""
        ...

    def launch(self, kernel: Kernel, outputs: Mapping[str, Any], options: Options):
        """How to call what the stages made (`outputs`: stage name -> its output)."""
        ...

    def version(self) -> str:
        """Enters every cache key: code generator and tool versions."""
        ...


_MODULES = {
    "cpu": "pallasite.backends.cpu",
    "triton": "pallasite.backends.triton",
    "tpu": "pallasite.backends.tpu",
}


def names() -> tuple[str, ...]:
    return tuple(_MODULES)


def get(name: str) -> Backend:
    """The backend called `name`, imported on first use."""
    if name not in _MODULES:
        raise UnknownBackendError(name, tuple(_MODULES))
    return import_module(_MODULES[name]).BACKEND


def compile_stages(
    backend: Backend, kernel: Kernel, options: Options
) -> dict[str, Any]:
    """Run the backend's stages in order; the output of each, by name."""
    outputs: dict[str, Any] = {}
    current: Any = kernel
    for name, stage in backend.stages(kernel, options).items():
        current = outputs[name] = stage(current)
    return outputs
