"""From a backend's Launch to a custom call in the program XLA compiles.

The one file below the frontend that touches JAX. `lower_launch` is the body of the
primitive's lowering rule: it registers the handler of a CPU kernel with XLA and emits
the custom call with the launch's configuration, aliases and scratch results.
"""

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.interpreters import mlir

from pallasite import jaxcompat

Launch = Any  # pallasite.backends.base.Launch, which is a layer above this one

_lock = threading.Lock()
# Targets registered with XLA, which keeps them for the life of the process: so must we.
_registered: dict[str, Any] = {}


def lower_launch(launch: Launch, ctx: Any, *operands: Any) -> Sequence[Any]:
    """Emit the custom call of a compiled kernel.

    Args:
        launch: what the backend made.
        ctx: JAX's lowering context; its output avals are the kernel's results.
        *operands: the kernel's operands as MLIR values.

    Returns:
        One MLIR value per result of the kernel.
    """
    if launch.handler is not None:
        _register(launch)
    results = len(ctx.avals_out)
    ctx, operands = _repacked(launch, ctx, operands)
    aliases = dict(launch.aliases)
    scratch = [
        jax.core.ShapedArray(shape, np.dtype(dtype))
        for shape, dtype in launch.scratch_results
    ]
    if launch.log_words:
        log = jax.core.ShapedArray((launch.log_words,), np.dtype(np.int32))
        aliases[len(operands)] = results + len(scratch)
        operands = (*operands, *_run(ctx, lambda: jax.numpy.zeros_like(log), [], [log]))
        ctx = ctx.replace(avals_in=[*ctx.avals_in, log])
        scratch.append(log)
    if scratch:
        ctx = ctx.replace(avals_out=[*ctx.avals_out, *scratch])
    packed, values = ctx, list(operands)
    if launch.handler is not None:
        ctx, values = _in_bytes(ctx, values)
    typed = isinstance(launch.config, Mapping)
    rule = jax.ffi.ffi_lowering(
        launch.target,
        backend_config=None if typed else launch.config,
        api_version=launch.api_version,
        has_side_effect=launch.has_side_effect,
        operand_output_aliases=aliases or None,
        extra_attributes=_note_for_export(launch, ctx),
    )
    attributes = dict(launch.config) if typed else {}
    made = list(rule(ctx, *values, **attributes))
    if launch.log_words:
        read = functools.partial(jax.debug.callback, launch.read_log)
        _run(ctx, lambda log: read(log) or [], scratch[-1:], [], made[-1])
    found = made[:results]
    pairs = zip(found, ctx.avals_out, packed.avals_out, strict=False)
    return [_converted(ctx, *each) for each in pairs]


def _run(ctx: Any, fn: Any, avals: Any, out: Any, *operands: Any) -> Sequence[Any]:
    """Code of a JAX function in the middle of a lowering rule."""
    inner = ctx.replace(avals_in=list(avals), avals_out=list(out))
    many = len(out) != 1
    return mlir.lower_fun(fn, multiple_results=many)(inner, *operands)


def _repacked(launch: Launch, ctx: Any, operands: Sequence[Any]) -> tuple[Any, Any]:
    """Operands in the form that the kernel takes them in."""
    values, avals = list(operands), list(ctx.avals_in)
    for n, turned, added in launch.repacked:

        def pack(x: Any, turned: bool = turned, added: int = added) -> Any:
            x = x.swapaxes(-2, -1) if turned else x
            widths = [(0, 0, 0)] * (x.ndim - 1) + [(0, added, 0)]
            return jax.lax.pad(x, jax.numpy.zeros((), x.dtype), widths)

        made = jax.eval_shape(pack, avals[n])
        aval = jax.core.ShapedArray(made.shape, made.dtype)
        (values[n],) = _run(ctx, pack, [avals[n]], [aval], values[n])
        avals[n] = aval
    return ctx.replace(avals_in=avals), values


def _note_for_export(launch: Launch, ctx: Any) -> dict[str, Any] | None:
    """What JAX prints with the call where it refuses to export it; XLA ignores it."""
    if not (launch.is_versioned and jaxcompat.is_export(ctx)):
        return None
    check = f"jax.export.DisabledSafetyCheck.custom_call({launch.target!r})"
    text = (
        "JAX promises no compatibility between versions for this call. To export it "
        f"all the same, pass disabled_checks=[{check}] to jax.export.export; with "
        "interpret=True the kernel is exported as plain StableHLO"
    )
    note = mlir.ir.DictAttr.get({"to_export": mlir.ir.StringAttr.get(text)})
    return {"mhlo.frontend_attributes": note}


def _in_bytes(ctx: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """What is narrower than a byte, which XLA packs, in a byte each."""
    wide = ctx.replace(
        avals_in=[_byte_aval(a) for a in ctx.avals_in],
        avals_out=[_byte_aval(a) for a in ctx.avals_out],
    )
    triples = zip(operands, ctx.avals_in, wide.avals_in, strict=True)
    return wide, [_converted(ctx, *each) for each in triples]


def _byte_aval(aval: Any) -> Any:
    wide = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
    wide["float4_e2m1fn"] = "uint8"  # its bits
    name = wide.get(aval.dtype.name)
    return aval if name is None else aval.update(dtype=np.dtype(name))


def _converted(ctx: Any, value: Any, old: Any, new: Any) -> Any:
    if old.dtype == new.dtype:
        return value

    def cast(x: Any) -> Any:
        if old.dtype.name == "float4_e2m1fn":
            x = jax.lax.bitcast_convert_type(x, jax.numpy.uint4)
        if new.dtype.name == "float4_e2m1fn":
            x = jax.lax.convert_element_type(x, jax.numpy.uint4)
            return jax.lax.bitcast_convert_type(x, new.dtype)
        return jax.lax.convert_element_type(x, new.dtype)

    rule = mlir.lower_fun(cast, multiple_results=False)
    return rule(ctx.replace(avals_in=[old], avals_out=[new]), value)[0]


def _register(launch: Launch) -> None:
    with _lock:
        if launch.target in _registered:
            return
        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(launch.handler)
        capsule = jax.ffi.pycapsule(function)
        jax.ffi.register_ffi_target(launch.target, capsule, platform="cpu")
        _registered[launch.target] = (function, launch.keep_alive)
