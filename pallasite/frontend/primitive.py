"""The primitive behind every kernel call, with its rules side by side.

Its one parameter, a `Call`, holds the Kernel IR: all rules act on IR, so they are
exact about grids, windows and scratch. `batching.py` has the vmap rule.
"""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir

from pallasite import config, jaxcompat
from pallasite.backends import base
from pallasite.errors import (
    FallbackWarning,
    SpecError,
    UnknownBackendError,
    UnsupportedError,
)
from pallasite.frontend.batching import batch_kernel
from pallasite.frontend.emulate import emulate
from pallasite.ir.nodes import Kernel, walk
from pallasite.passes.pipeline import run as run_passes


@dataclass(frozen=True)
class Checked:
    """Checked mode: `pallas_call(..., interpret=pl.Checked())`.

    Runs the kernel in numpy with shadow memory and reports, with the user's line and
    the program's ids, the first bug it sees. Each kind can be switched off.

    Args:
        bounds: accesses outside a ref, and blocks outside the array.
        uninitialised: values of outputs, scratch or edges nobody wrote, where they
            matter: in a result, a branch, a loop's length or an index.
        races: two programs along a parallel axis touching the same memory.
        unwritten: outputs with elements never written.
        copies: async copies never waited for, or whose memory is used too early, and
            semaphores left over.
        promises: broken promises of `pl.multiple_of`.
        nan: the first op that makes a NaN from operands without (off by default).
        inf: the first op that makes an infinity from finite operands (off by default:
            masks of -inf are common).
    """

    bounds: bool = True
    uninitialised: bool = True
    races: bool = True
    unwritten: bool = True
    copies: bool = True
    promises: bool = True
    nan: bool = False
    inf: bool = False


@dataclass(frozen=True)
class Call:
    """One kernel call: its IR and how to run it. Hashable; equal kernels share code."""

    kernel: Kernel
    interpret: bool | Checked = False
    backend: str | None = None
    compiler_params: tuple[tuple[str, Any], ...] = ()
    cost_estimate: Any = None
    debug: bool = False
    metadata: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Call({self.kernel.name})"

    @property
    def options(self) -> base.Options:
        cost = self.cost_estimate
        estimate = None
        if cost is not None:
            keys = ("flops", "transcendentals", "bytes_accessed")
            estimate = {k: getattr(cost, k) for k in keys}
        return base.Options(
            dict(self.compiler_params), estimate, self.debug, dict(self.metadata)
        )


def interpret_mode(given: Any, at: Any) -> bool | Checked:
    """What `interpret=` means: off, emulation or checked mode."""
    if isinstance(given, Checked):
        return given
    if given is None or given is False:
        forced = config.get("interpret")
        if forced == "checked":
            return Checked()
        return bool(forced) and forced != "0"
    if given is True or type(given).__name__.endswith(("InterpretParams", "Params")):
        return True
    raise SpecError(
        f"interpret must be True, False or pl.Checked(), got {given!r}", at=at
    )


call_p = jaxcompat.Primitive("pallasite_call")
call_p.multiple_results = True


def bind_call(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Bind the primitive after the checks that need no operands."""
    if call.backend is not None and call.backend not in (*base.names(), "interpret"):
        raise UnknownBackendError(call.backend, (*base.names(), "interpret"))
    return call_p.bind(*operands, call=call)


# --- types and effects ---


@call_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: Call) -> tuple[list[Any], set[Any]]:
    outputs = [
        jaxcompat.out_aval_like(avals, p.ref.shape, p.ref.dtype.np)
        for p in call.kernel.outputs
    ]
    return outputs, {jaxcompat.debug_effect()} if _prints(call.kernel) else set()


def _prints(kernel: Kernel) -> bool:
    return any(op.name in ("debug_print", "debug_check") for op in walk(kernel.body))


# --- eager ---


@call_p.def_impl
def _impl(*operands: Any, call: Call) -> list[Any]:
    if isinstance(call.interpret, Checked):
        return [jax.numpy.asarray(x) for x in _run_checked(call, operands)]
    with jax.disable_jit(False):
        return _jitted(call)(*operands)


@functools.lru_cache(maxsize=4096)
def _jitted(call: Call):
    def run(*operands: Any) -> Any:
        return call_p.bind(*operands, call=call)

    run.__name__ = run.__qualname__ = call.kernel.name
    return jax.jit(run)


def _run_checked(call: Call, operands: Sequence[Any]) -> list[np.ndarray]:
    from pallasite.backends.interpret.checked import run_checked

    arrays = [np.asarray(x) for x in operands]
    return run_checked(call.kernel, arrays, call.interpret)


# --- lowering ---


def _lower(ctx: Any, *operands: Any, call: Call) -> Any:
    platforms = ctx.module_context.platforms
    native = _native_backend(call, platforms)
    if native is not None:
        from pallasite.runtime.ffi import lower_launch

        backend = base.get(native)
        kernel = prepared(call)
        outputs = base.compile_stages(backend, kernel, call.options)
        launch = backend.launch(kernel, outputs, call.options)
        return lower_launch(launch, ctx, *operands)
    return _lower_emulation(ctx, *operands, call=call)


def prepared(call: Call) -> Kernel:
    """The kernel after the passes every backend shares."""
    return run_passes(call.kernel)


def _native_backend(call: Call, platforms: Sequence[str]) -> str | None:
    if call.interpret or call.backend == "interpret":
        return None
    name = call.backend or config.get("backend") or None
    if name is None:
        _warn_fallback(tuple(platforms))
    elif not set(platforms) & set(base.get(name).platforms):
        raise UnsupportedError(
            f"backend {name!r} does not run on {'/'.join(platforms)}",
            [("kernel", call.kernel.name)],
            call.kernel.loc,
            "leave out backend=, or pass operands that live on "
            + "/".join(base.get(name).platforms),
        )
    return name


@functools.lru_cache(maxsize=1)
def _warn_fallback(platforms: tuple[str, ...]) -> None:
    warnings.warn(
        f"no native backend is the default on {'/'.join(platforms)} yet: kernels run "
        "through the emulation (said once; interpret=True says it is wanted, "
        "backend='cpu', 'triton' or 'tpu' asks for a native one)",
        FallbackWarning,
        stacklevel=2,
    )


def _lower_emulation(ctx: Any, *operands: Any, call: Call) -> Any:
    run = _checked_callback(call) if _is_checked(call) else emulate(call.kernel)
    plain = ctx.replace(
        avals_in=jaxcompat.plain_avals(ctx.avals_in),
        avals_out=jaxcompat.plain_avals(ctx.avals_out),
    )
    return mlir.lower_fun(run, multiple_results=True)(plain, *operands)


def _is_checked(call: Call) -> bool:
    return isinstance(call.interpret, Checked)


def _checked_callback(call: Call):
    """Checked mode under jit: the numpy evaluator runs in a host callback."""
    shapes = [
        jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype.np) for p in call.kernel.outputs
    ]

    def run(*operands: Any) -> Any:
        return jax.pure_callback(
            lambda *arrays: tuple(_run_checked(call, arrays)), tuple(shapes), *operands
        )

    return run


mlir.register_lowering(call_p, _lower)


# --- vmap ---


def _batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, call: Call
) -> tuple[list[Any], list[int]]:
    """A new leading grid axis; operands that are not mapped stay as they are."""
    sizes = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    (size,) = sizes
    moved = [
        x if d is None else jax.numpy.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    mapped = [d is not None for d in dims]
    moved, mapped = _spread_aliased(call.kernel, moved, mapped, size)
    kernel = batch_kernel(call.kernel, tuple(mapped), size)
    results = call_p.bind(*moved, call=replace(call, kernel=kernel))
    return results, [0] * len(results)


def _spread_aliased(
    kernel: Kernel, operands: list[Any], mapped: list[bool], size: int
) -> tuple[list[Any], list[bool]]:
    """An operand that is also a result needs one copy per mapped element."""
    for source, _ in kernel.aliases:
        if not mapped[source]:
            x = operands[source]
            operands[source] = jax.numpy.broadcast_to(x[None], (size, *x.shape))
            mapped[source] = True
    return operands, mapped


batching.primitive_batchers[call_p] = _batch


# --- grad ---


def _no_derivative(primals: Any, tangents: Any, *, call: Call) -> Any:
    raise UnsupportedError(
        "a kernel call has no derivative of its own yet",
        [("kernel", call.kernel.name)],
        call.kernel.loc,
        "give it one with jax.custom_vjp or jax.custom_jvp",
    )


ad.primitive_jvps[call_p] = _no_derivative


def kernels_in(fn: Any, *args: Any) -> list[Kernel]:
    """The kernels a JAX function calls, in order (for tests, dumps and tools)."""
    found: list[Kernel] = []

    def visit(jaxpr: Any) -> None:
        for eqn in jaxcompat.opened(jaxpr)[0].eqns:
            if eqn.primitive is call_p:
                found.append(eqn.params["call"].kernel)
            for inner in jaxcompat.jaxprs_in_params(eqn.params):
                visit(inner)

    visit(jax.make_jaxpr(fn)(*args))
    return found
