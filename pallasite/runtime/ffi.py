"""Turns a backend's Launch into a custom call in the program XLA compiles.

One of the two files below `language` that import JAX (`aot.py` is the other).
`lower_launch` is the body of the primitive's lowering rule: it registers the handler of
a CPU kernel with XLA and emits the custom call with the launch's configuration, aliases
and scratch results.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.core
import numpy as np
from jax.interpreters import mlir

from pallasite import jaxcompat
from pallasite.passes.transform.unaliased import unaliased

Launch = Any  # pallasite.backends.base.Launch, which is a layer above this one
Program = Any  # pallasite.passes.schedule.split_axis.Program

_lock = threading.Lock()
# Targets registered with XLA, which keeps them until the process ends; so must we.
_registered: dict[str, Any] = {}


def lower_launch(launch: Launch, ctx: Any, *operands: Any) -> Sequence[Any]:
    """Emit the custom call of a compiled kernel.

    Args:
        launch: what the backend produced.
        ctx: JAX's lowering context; its output avals are the kernel's results.
        *operands: the kernel's operands as MLIR values.

    Returns:
        One MLIR value per result of the kernel.
    """
    if launch.operands is not None:
        return _lower_in_forms(launch, ctx, *operands)
    if launch.handler is not None:
        _register(launch)
    results = len(ctx.avals_out)
    aliases = dict(launch.aliases)
    scratch = [
        jax.core.ShapedArray(shape, np.dtype(dtype))
        for shape, dtype in launch.scratch_results
    ]
    if launch.log_words:
        shape = launch.log_shape or (launch.log_words,)
        log = jax.core.ShapedArray(shape, np.dtype(np.int32))
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
    )
    attributes = dict(launch.config) if typed else {}
    made = list(rule(ctx, *values, **attributes))
    if launch.read_log is not None:
        read = functools.partial(jax.debug.callback, launch.read_log)
        _run(ctx, lambda log: read(log) or [], scratch[-1:], [], made[-1])
    found = made[:results]
    pairs = zip(found, ctx.avals_out, packed.avals_out, strict=False)
    return [_converted(ctx, *each) for each in pairs]


def lower_unaliased(lowered: Any, ctx: Any, *operands: Any, call: Any) -> Sequence[Any]:
    """Lower a call without aliases of operands that XLA would copy for them.

    Args:
        lowered: the primitive that lowers what is left.
        ctx: JAX's lowering context.
        *operands: the call's operands as MLIR values.
        call: its parameter (`primitive.Call`).
    """
    if call.kernel.aliases:
        kept = jaxcompat.kept_arguments(ctx, operands)
        call = replace(call, kernel=unaliased(call.kernel, kept))
    bind = functools.partial(lowered.bind, call=call)
    return mlir.lower_fun(bind, multiple_results=True)(ctx, *operands)


def _lower_in_forms(launch: Launch, ctx: Any, *operands: Any) -> Sequence[Any]:
    """The call with arrays in other forms, with XLA conversions around it."""
    plain = replace(launch, operands=None)
    inputs = [(operands[n], ctx.avals_in[n], form) for n, form in launch.operands]
    outputs = list(zip(ctx.avals_out, launch.result_forms, strict=True))
    carried = ctx.replace(
        avals_in=[_carried_aval(aval, form) for _, aval, form in inputs],
        avals_out=[_carried_aval(aval, form) for aval, form in outputs],
    )
    packed = []
    for (value, aval, form), new in zip(inputs, carried.avals_in, strict=True):
        if form is not None:
            pack = functools.partial(form.pack, jax.numpy)
            (value,) = _run(ctx, pack, [aval], [new], value)
        packed.append(value)
    found = []
    made = lower_launch(plain, carried, *packed)
    for value, (aval, form), new in zip(made, outputs, carried.avals_out, strict=True):
        if form is not None:
            unpack = functools.partial(form.unpack, jax.numpy)
            (value,) = _run(ctx, unpack, [new], [aval], value)
        found.append(value)
    return found


def _carried_aval(aval: Any, form: Any) -> Any:
    if form is None:
        return aval
    return aval.update(shape=form.carried_shape, dtype=np.dtype(form.carried_dtype))


def _run(ctx: Any, fn: Any, avals: Any, out: Any, *operands: Any) -> Sequence[Any]:
    """Lowers a JAX function inside a lowering rule."""
    inner = ctx.replace(avals_in=list(avals), avals_out=list(out))
    many = len(out) != 1
    return mlir.lower_fun(fn, multiple_results=many)(inner, *operands)


def lower_program(
    program: Program,
    runs: Sequence[Launch | Callable[..., Any]],
    ctx: Any,
    *operands: Any,
) -> list[Any]:
    """Emit the calls of several kernels, with ordinary arrays between them.

    Args:
        program: the kernels, and which arrays go where.
        runs: for each step the launch of its kernel, or a JAX function.
        ctx: JAX's lowering context; its output avals are the program's results.
        *operands: the program's operands as MLIR values.
    """
    values = list(zip(operands, jaxcompat.plain_avals(ctx.avals_in), strict=True))
    for step, run in zip(program.steps, runs, strict=True):
        taken = [values[n] for n in step.operands]
        if callable(run):
            avals = [aval for _, aval in taken]
            made = [
                jax.core.ShapedArray(x.shape, x.dtype)
                for x in jax.eval_shape(run, *avals)
            ]
            found = _run(ctx, run, avals, made, *(value for value, _ in taken))
            values += zip(found, made, strict=True)
            continue
        pairs = zip(taken, step.kernel.inputs, strict=True)
        given = [_in_shape(ctx, *each, param.ref.shape) for each, param in pairs]
        made = [
            jax.core.ShapedArray(param.ref.shape, param.ref.dtype.np)
            for param in step.kernel.outputs
        ]
        inner = ctx.replace(avals_in=[aval for _, aval in given], avals_out=made)
        found = lower_launch(run, inner, *(value for value, _ in given))
        values += zip(found, made, strict=True)
    results = []
    for result, aval in zip(program.results, ctx.avals_out, strict=True):
        value, made_as = values[result.array]
        found, _ = _in_shape(ctx, value, made_as, aval.shape, result.last)
        results.append(found)
    return results


def _in_shape(
    ctx: Any, value: Any, aval: Any, shape: tuple[int, ...], last: bool = False
) -> tuple[Any, Any]:
    """An array, or the last element of its first axis, in another shape."""
    if not last and aval.shape == shape:
        return value, aval
    new = jax.core.ShapedArray(shape, aval.dtype)

    def change(x: Any) -> Any:
        return (x[-1] if last else x).reshape(shape)

    return _run(ctx, change, [aval], [new], value)[0], new


def _in_bytes(ctx: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Widens elements narrower than a byte, which XLA packs, to a byte each."""
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
