"""Mosaic text to what `tpu_custom_call` takes: a serialised module and its settings.

The module is parsed and verified with jaxlib's MLIR bindings and shipped as versioned
bytecode. Without the bindings the text itself is shipped, which libtpu reads as its own
version of the dialect.
"""

import base64
import functools
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pallasite.backends.base import Options
from pallasite.errors import CompileError, SpecError
from pallasite.ir.nodes import Kernel
from pallasite.ir.roles import Pipeline

# The oldest version of the serialised dialect that has everything emitted here: any
# newer libtpu reads it.
DIALECT_VERSION = 15
VMEM_SPACE = 1

# Fields of the call's configuration that `compiler_params` sets under the same name.
PASSED_ON = (
    "collective_id",
    "disable_bounds_checks",
    "disable_semaphore_checks",
    "internal_scratch_in_bytes",
    "shape_invariant_numerics",
    "skip_device_barrier",
)
KNOWN = (
    *PASSED_ON,
    "allow_collective_id_without_custom_barrier",
    "allow_input_fusion",
    "dimension_semantics",
    "flags",
    "fuse_transposed_lhs_in_matmul",
    "has_side_effects",
    "kernel_type",
    "needs_layout_passes",
    "serialization_format",
    "use_tc_tiling_on_sc",
    "vmem_limit_bytes",
)


def verify(text: str) -> None:
    """Parse and verify the module; CompileError if the bindings reject it."""
    _parsed(text)


def serialise(text: str) -> bytes | None:
    """The module as versioned bytecode; None if jaxlib has no bindings."""
    from pallasite import jaxcompat

    mlir = jaxcompat.mosaic_bindings()
    if mlir is None:
        return None
    module = _parsed(text)
    passes = f"mosaic-serde{{serialize=true target-version={DIALECT_VERSION}}}"
    with module.context:
        module.context.allow_unregistered_dialects = True  # what serde writes
        mlir.PassManager.parse(f"builtin.module({passes})").run(module.operation)
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer, desired_version=0)
    return buffer.getvalue()


def _parsed(text: str) -> Any:
    from pallasite import jaxcompat

    mlir = jaxcompat.mosaic_bindings()
    if mlir is None:
        return None
    context = mlir.context()
    try:
        with context:
            module = mlir.Module.parse(text)
            module.operation.verify()
    except mlir.MLIRError as error:
        raise CompileError(
            "the Mosaic module fails verification: a bug in Pallasite, please report "
            "it",
            [("mlir", str(error)), ("module", text)],
        ) from error
    return module


@functools.cache
def knows_attribute(text: str) -> bool:
    """Whether this jaxlib's TPU dialect has an attribute; False without bindings."""
    from pallasite import jaxcompat

    mlir = jaxcompat.mosaic_bindings()
    if mlir is None:
        return False
    try:
        with mlir.context():
            mlir.Attribute.parse(text)
    except mlir.MLIRError:
        return False
    return True


def input_fusion(params: Mapping[str, Any], kernel: Kernel) -> list[bool]:
    """`allow_input_fusion`, one entry per operand of the call.

    The author counts the arguments of the call: sizes of a dynamic grid precede those,
    captured values follow. A kernel with fewer operands is derived from the author's (a
    derivative): nothing is said about its operands.
    """
    given = [bool(allowed) for allowed in params.get("allow_input_fusion") or ()]
    if not any(given):
        return []
    pipelines = [op for op in kernel.body.ops if op.name == "pipeline"]
    sizes = sum(len(Pipeline.of(op).dynamic_sizes) for op in pipelines)
    others = len(kernel.inputs) - sizes - len(given)
    return [] if others < 0 else [False] * sizes + given + [False] * others


def call_config(
    text: str,
    options: Options,
    vmem_bytes: int | None = None,
    has_communication: bool = False,
    fusible_inputs: Sequence[bool] = (),
) -> str:
    """The backend_config of the custom call, as JSON.

    Args:
        text: the Mosaic module.
        options: the author's.
        vmem_bytes: the limit on vector memory, unless the author sets one.
        has_communication: whether it copies to or signals other devices.
        fusible_inputs: which operands XLA may fuse into the call (`input_fusion`).
    """
    params = dict(options.compiler_params)
    _check_params(params)
    body = serialise(text)
    config: dict[str, Any] = {
        "body": base64.b64encode(body or text.encode()).decode(),
        # Vectors of SparseCores are emitted as the hardware has them.
        "needs_layout_passes": core_of(options) == "tc",
    }
    if body is not None:
        config["serialization_format"] = params.get("serialization_format") or 1
    if core_of(options) == "tc":
        # The kernel itself clamps block indices and the starts of copies, so libtpu's
        # run-time checks of these never fire.
        config["disable_bounds_checks"] = True
    config |= {k: params[k] for k in PASSED_ON if params.get(k) is not None}
    if has_communication:
        config["has_communication"] = True
    if fusible_inputs:
        config["allow_input_fusion"] = list(fusible_inputs)
    if options.cost_estimate is not None:
        config["cost_estimate"] = dict(options.cost_estimate)
    top: dict[str, Any] = {"custom_call_config": config}
    if core_of(options) != "tc":
        top["device_type"] = "DEVICE_TYPE_SPARSECORE"
        top["sparse_core_config"] = {"tiling": _tiling(params)}
    vmem_bytes = params.get("vmem_limit_bytes") or vmem_bytes
    if vmem_bytes:
        limit = {"memory_space": VMEM_SPACE, "offset": 0, "size": int(vmem_bytes)}
        top["scoped_memory_configs"] = [limit]
    return json.dumps(top)


def core_of(options: Options) -> str:
    """The kind of core that a kernel runs on, as Mosaic names it."""
    return str(options.compiler_params.get("kernel_type") or "tc")


def _tiling(params: Mapping[str, Any]) -> str:
    """How SparseCores see arrays: as TensorCores do, unless told otherwise."""
    as_others = params.get("use_tc_tiling_on_sc")
    return "TILING_SPARSE_CORE" if as_others is False else "TILING_COMPACT"


def _check_params(params: Mapping[str, Any]) -> None:
    unknown = sorted(k for k, v in params.items() if k not in KNOWN and v is not None)
    if unknown:
        raise SpecError(
            f"backend 'tpu' has no compiler parameter {', '.join(unknown)}",
            [("known", ", ".join(sorted(KNOWN)))],
            fix="remove it, or pass it to the backend it belongs to",
        )
