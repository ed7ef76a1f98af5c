"""The primitive of every kernel call, with all its rules.

Its one parameter, a `Call`, holds the Kernel IR: all rules act on IR, so they are
exact about grids, windows and scratch. `batch.py` has the IR part of the vmap rule,
`rules.py` the differentiation rules.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from jax.interpreters import batching, mlir

from pallasite import config, jaxcompat, target
from pallasite import ops as ops  # registers the rows of the op table
from pallasite.backends import base
from pallasite.checking import Checked as Checked
from pallasite.checking import CheckedElsewhere as CheckedElsewhere
from pallasite.checking import Machine as Machine
from pallasite.checking import interpreted as interpreted
from pallasite.configured import Configured, of_call
from pallasite.errors import (
    CheckError,
    ChipMemoryError,
    CompileError,
    FallbackWarning,
    PallasError,
    PerformanceWarning,
    SpecError,
    UnknownBackendError,
    UnsupportedError,
    compose,
    warn,
)
from pallasite.ir.nodes import Kernel, Loc, walk
from pallasite.ops.gpu import between_programs
from pallasite.passes.transform.batch import (
    batch_kernel,
    changed_operands,
    maps_a_grid_size,
)
from pallasite.placement import accelerator, chip_on, is_here, lowered_for
from pallasite.sharding.rule import Partition
from pallasite.target import GPU_PLATFORMS, Chip, host, usual

if TYPE_CHECKING:
    from pallasite.passes.schedule.plan_parts import Plan, Serial
    from pallasite.passes.schedule.split_axis import Program
    from pallasite.passes.schedule.whole_arrays import WholeArrays


_PLANNED = ("cpu", *GPU_PLATFORMS)  # where a call may run as several kernels


def for_platform(call: "Call", platform: str) -> "Call":
    """The call as it runs with operands on a platform."""
    if platform == "cuda" and isinstance(call.interpret, CheckedElsewhere):
        return replace(call, interpret=False)
    return call


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
    partition: bool | Partition | None = None  # under sharded jit; False: not split
    fused: tuple[str, ...] = ()  # what `pl.fuse` did, and why not more
    own: bool = False  # one of the package's kernels, whose users do not choose blocks
    # Of a derivative's kernel: the operands that are tangents or cotangents.
    flowing: tuple[int, ...] = ()
    # Per operand, the first that is the same array; empty: none is known to be.
    equal: tuple[int, ...] = ()
    configured: Configured | None = field(default=None, compare=False)  # for tools

    def __repr__(self) -> str:
        return f"Call({self.kernel.name})"

    @property
    def options(self) -> base.Options:
        cost = self.cost_estimate
        keys = ("flops", "transcendentals", "bytes_accessed")
        estimate = None if cost is None else {k: getattr(cost, k) for k in keys}
        return base.Options(
            dict(self.compiler_params),
            estimate,
            self.debug,
            dict(self.metadata),
            own=self.own,
        )


def interpret_mode(given: Any, at: Any) -> bool | Checked:
    """What `interpret=` means: off, emulation or checked mode."""
    if isinstance(given, Checked):
        return given
    if given is None or given is False:
        forced = config.get("interpret")
        if forced == "checked":
            return Checked()
        if isinstance(forced, str):
            return bool(forced) and forced != "0"
        given = forced
    if hasattr(given, "dma_execution_mode"):  # ours or upstream's
        return interpreted(given)
    kind = type(given).__name__
    # Upstream's `InterpretGPUParams`, and what its older versions had.
    if given is True or ("Interpret" in kind and kind.endswith("Params")):
        return True
    got, fix = f"{given!r}", "interpret=True emulates, interpret=pl.Checked() checks"
    if kind.endswith("Params"):
        got, fix = f"{kind}(...)", f"pass it as compiler_params=; {fix}"
    raise SpecError(
        f"interpret must be True, False or pl.Checked(), got {got}", at=at, fix=fix
    )


call_p = jaxcompat.Primitive("pallasite_call")
# What JAX lowers calls as; it keeps what equal ones become.
lowered_p = jaxcompat.Primitive("pallasite_call")
call_p.multiple_results = lowered_p.multiple_results = True


def bind_call(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Bind the primitive, after the checks that do not need operand values."""
    if call.backend is not None and call.backend not in (*base.names(), "interpret"):
        known = (*base.names(), "interpret")
        raise UnknownBackendError(call.backend, known, call.kernel.loc)
    configured = of_call()
    if configured is not None:
        call = replace(call, configured=configured)
    firsts = {id(x): n for n, x in reversed(list(enumerate(operands)))}
    equal = tuple(firsts[id(x)] for x in operands)
    equal = equal if len(firsts) < len(operands) else ()
    if equal != call.equal:
        call = replace(call, equal=equal)
    return call_p.bind(*operands, call=call)


# --- types and effects ---


@call_p.def_effectful_abstract_eval
@lowered_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: Call) -> tuple[list[Any], set[Any]]:
    outputs = result_types(call, avals)
    return outputs, {jaxcompat.debug_effect()} if _prints(call.kernel) else set()


def result_types(
    call: Call, avals: Sequence[Any], varying: Sequence[Any] | None = None
) -> list[Any]:
    """The types of a call's results, with their shardings.

    Args:
        call: the call.
        avals: the types of its operands.
        varying: types whose manual mesh axes the results vary over; default: `avals`.
    """
    from pallasite.sharding.custom_call import result_specs

    return [
        jaxcompat.out_aval_like(varying or avals, p.ref.shape, p.ref.dtype.np, spec)
        for p, spec in zip(call.kernel.outputs, result_specs(call, avals), strict=True)
    ]


def _prints(kernel: Kernel) -> bool:
    return any(op.name in ("debug_print", "debug_check") for op in walk(kernel.body))


# --- eager ---


@call_p.def_impl
def _impl(*operands: Any, call: Call) -> list[Any]:
    if isinstance(call.interpret, Checked):
        # With an explicit dtype, JAX transfers them without a program per shape.
        return [jax.numpy.asarray(x, x.dtype) for x in _run_checked(call, operands)]
    # JAX's own checks would rerun this to find the op that produced the NaN.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = _jitted(call, config.get("backend"))(*operands)
    _check_numbers(call, results)
    return results


@functools.lru_cache(maxsize=4096)
def _jitted(call: Call, named: str):
    """The compiled call, cached per value of the `backend` knob."""

    def run(*operands: Any) -> Any:
        return call_p.bind(*operands, call=call)

    run.__name__ = run.__qualname__ = call.kernel.name
    return jax.jit(run)


def _check_numbers(call: Call, results: Sequence[Any]) -> None:
    """The checks that `jax_debug_nans` and `jax_debug_infs` request."""
    unwanted, settings = [], cast(Any, jax.config)
    if settings.jax_debug_nans:
        unwanted.append(("NaN", jax.numpy.isnan))
    if settings.jax_debug_infs:
        unwanted.append(("infinity", jax.numpy.isinf))
    for kind, find in unwanted:
        for n, (param, x) in enumerate(zip(call.kernel.outputs, results, strict=True)):
            if not param.ref.dtype.is_float:
                continue
            with jax.debug_nans(False), jax.debug_infs(False):
                found = bool(find(x.astype(jax.numpy.float32)).any())
            if found:
                where = f" at {call.kernel.loc}" if call.kernel.loc else ""
                option = "nan" if kind == "NaN" else "inf"
                raise FloatingPointError(
                    f"{kind} in output {n} ({param.name or 'unnamed'}) of the kernel "
                    f"{call.kernel.name}{where}; interpret=pl.Checked({option}=True) "
                    "reports the op that produces it"
                )


def _run_checked(call: Call, operands: Sequence[Any]) -> list[np.ndarray]:
    from pallasite.interpret.checked import run_checked

    arrays = [np.asarray(x) for x in operands]
    options = call.interpret if _is_checked(call) else Checked()
    return run_checked(call.kernel, arrays, options)


# --- lowering ---


def partitions(ctx: Any, call: Call) -> bool:
    """Whether XLA calls back to partition the call across devices."""
    if call.partition is False or jaxcompat.auto_devices(ctx) == 1:
        return False
    host_code = _is_checked(call) or _prints(call.kernel)
    return not host_code and not jaxcompat.is_export(ctx)


_recorded: ContextVar[list[Call] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """Collects the calls lowered in a `with` block, each once, in order."""
    found: list[Call] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


def _lower(platform: str | None, ctx: Any, *operands: Any, call: Call) -> Any:
    """The lowering rule of one platform (None: of platforms without their own)."""
    record = _recorded.get()
    if record is not None and call not in record:
        record.append(call)
    # A branch for one of several platforms is lowered for all of them, too.
    check_platform(call, ctx.module_context.platforms)
    if partitions(ctx, call):
        from pallasite.sharding.custom_call import call_task, lower_partitioned

        return lower_partitioned(ctx, operands, call_task(call, bind_call))
    chip, exporting = lowered_for(ctx, platform), jaxcompat.is_export(ctx)
    found = planned(call, platform, exporting, chip)
    if found.program is not None:
        results = _lower_program(ctx, operands, call, found.program, platform, chip)
        if results is not None:
            return results
    elif found.serial is not None and _is_news(call, found.serial):
        warn_serial(call.kernel, found.serial)
    chosen = choose(call, platform, exporting, chip)
    if chosen.arrays is not None:
        from pallasite.emulation.emulate import emulate_arrays

        return _lower_function(ctx, operands, emulate_arrays(chosen.arrays))
    if chosen.launch is None:
        _announce(chosen, call, platform, ctx)
        return _lower_emulation(ctx, *operands, call=call)
    _report_failures(chosen, call.kernel)
    _check_export(chosen.launch, call.kernel)
    from pallasite.runtime.ffi import lower_launch

    return lower_launch(chosen.launch, ctx, *operands)


def planned(
    call: Call,
    platform: str | None,
    exporting: bool = False,
    chip: Chip | None = None,
) -> "Plan":
    """Whether a call runs as several kernels on a platform; arguments as `choose`."""
    from pallasite.passes.schedule.plan_parts import Plan, plan

    if wants_emulation(call) or call.kernel.symbols or platform not in _PLANNED:
        return Plan()
    if call.options.batch_invariant or on_arrays(call, platform, chip) is not None:
        return Plan()
    if platform == "cpu":
        return Plan() if exporting else plan(call.kernel, host())
    return plan(call.kernel, chip_on(platform, chip))


def parts_of(call: Call, program: "Program") -> list[Call]:
    """The calls that a call is run as."""
    one = replace(call, cost_estimate=None, flowing=())
    return [replace(one, kernel=k) for k in program.kernels]


def _lower_program(
    ctx: Any,
    operands: Sequence[Any],
    call: Call,
    program: "Program",
    platform: str | None,
    chip: Chip | None,
) -> list[Any] | None:
    """Emit the calls of a program; None if a backend refuses one of them."""
    from pallasite.runtime.ffi import lower_program

    exporting = jaxcompat.is_export(ctx)
    parts = parts_of(call, program)
    launches = [choose(part, platform, exporting, chip).launch for part in parts]
    if None in launches:
        return None
    found = list(filter(None, launches))
    for launch in found:
        _check_export(launch, call.kernel)
    record = _recorded.get()
    if record is not None:
        record += [part for part in parts if part not in record]
    return lower_program(program, _runs_of(program, found), ctx, *operands)


def _runs_of(
    program: "Program", launches: Sequence[base.Launch]
) -> list[base.Launch | Callable[..., Any]]:
    """What runs each step: the launches of kernels, and functions that XLA computes."""
    from pallasite.emulation.step_order import ordered
    from pallasite.passes.schedule.split_axis import Step

    rest = iter(launches)
    return [
        next(rest)
        if isinstance(step, Step)
        else ordered(step.number, step.sizes, step.count)
        for step in program.steps
    ]


_IN_KERNELS = (
    "let each step write its own block, or keep sums, maxima or other states that "
    'merge; dimension_semantics "parallel" asserts that the order is irrelevant, '
    '"sequential" asks for it and silences this'
)
_IN_DERIVATIVES = (
    "read blocks or rows that a table names, or by index arrays of a fixed size per "
    "program; jax.custom_vjp can give another derivative"
)


def _is_news(call: Call, serial: "Serial") -> bool:
    """Whether an author should know: one who asked for an order does, but not one of
    a kernel whose derivative has one."""
    return not call.own and (not serial.asked or bool(call.flowing))


def warn_serial(kernel: Kernel, serial: "Serial") -> None:
    """Warn once per kernel that it leaves most of the chip idle, and why."""
    if "serial" + kernel.text in _warned:
        return
    _warned.add("serial" + kernel.text)
    at = serial.loc or kernel.loc or Loc("<unknown>", 0)
    axis = "" if serial.axis is None else f" of grid axis {serial.axis}"
    axis += " of a derivative" if serial.asked else ""
    text = compose(
        f"the steps{axis} run in order, and cores stay idle",
        [("kernel", kernel.name), ("why", serial.reason)],
        at,
        _IN_DERIVATIVES if serial.asked else _IN_KERNELS,
    )
    warnings.warn_explicit(text, PerformanceWarning, at.file, at.line)


def _check_export(launch: base.Launch, kernel: Kernel) -> None:
    """Refuses to export what JAX refuses; its text prints the kernel, not the way."""
    if launch.is_versioned and jaxcompat.export_refuses(launch.target):
        check = f"jax.export.DisabledSafetyCheck.custom_call({launch.target!r})"
        raise SpecError(
            "JAX promises no compatibility between versions for an exported kernel of "
            "this platform, and exports it only if that check is disabled",
            [("kernel", kernel.name), ("call", launch.target)],
            kernel.loc,
            f"pass disabled_checks=[{check}] to jax.export.export; or export it "
            "as plain StableHLO: interpret=True",
        )


@dataclass(frozen=True)
class Choice:
    """Which backend runs a call on a platform.

    Attributes:
        backend: its name; "interpret" is the emulation, "xla" operations on arrays.
        refusals: the platform's backends that were tried before, and why each rejected
            the call.
        launch: how XLA calls the compiled kernel; None if there is none.
        arrays: the kernel on whole arrays, whose operations XLA compiles and fuses with
            those around the call.
    """

    backend: str
    refusals: tuple[tuple[str, Exception], ...] = ()
    launch: base.Launch | None = None
    arrays: "WholeArrays | None" = None

    def __str__(self) -> str:
        why = "\n".join(str(error) for _, error in self.refusals)
        return f"{self.backend}: {why}" if why else self.backend


def choose(
    call: Call,
    platform: str | None,
    exporting: bool = False,
    chip: Chip | None = None,
) -> Choice:
    """The requested backend, else the platform's first able one, else the emulation.

    Args:
        call: the call.
        platform: what it is lowered for, as JAX's lowering rules name it.
        exporting: whether it is for another process, which lacks this one's code.
        chip: what it is lowered for; None: this process's device on the platform.

    Raises:
        UnsupportedError: the requested backend cannot run the kernel.
    """
    if wants_emulation(call):
        return Choice("interpret")
    name = _asked_backend(call, platform)
    if call.kernel.symbols:
        return _without_sizes(call, name, base.DEFAULTS.get(platform or "", ()))
    if name is not None:
        return Choice(name, launch=_launch(name, call, platform, chip))
    arrays = on_arrays(call, platform, chip)
    if arrays is not None:
        return Choice("xla", arrays=arrays)
    refusals: list[tuple[str, Exception]] = []
    for name in base.defaults(platform, call.kernel):
        known = chip is not None or is_here(platform)
        if not base.get(name).exports and (exporting or not known):
            continue
        try:
            return Choice(name, tuple(refusals), _launch(name, call, platform, chip))
        except (UnsupportedError, ChipMemoryError, ImportError, CompileError) as error:
            refusals.append((name, error))
    return Choice("interpret", tuple(refusals))


def on_arrays(
    call: Call, platform: str | None, chip: Chip | None = None
) -> "WholeArrays | None":
    """The kernel that XLA computes on whole arrays; None if a backend compiles it.

    Only kernels that derivatives made are candidates, and only where nobody has named a
    backend: an author who writes a kernel means one.
    """
    if not call.flowing or wants_emulation(call) or platform not in base.DEFAULTS:
        return None
    if _asked_backend(call, platform) is not None or call.options.batch_invariant:
        return None  # the order of XLA's sums follows from whole shapes
    from pallasite.passes.schedule.whole_arrays import for_xla

    machine = target.Machine.usual(chip_on(platform, chip))
    return for_xla(call.kernel, call.flowing, machine)


def _without_sizes(call: Call, named: str | None, defaults: Sequence[str]) -> Choice:
    """What runs a call of symbolic shape: machine code is made for fixed shapes."""
    usual = [name for name in defaults if base.get(name).exports]
    backend = named or next(iter(usual), None)
    error = UnsupportedError(
        f"backend {backend!r} compiles kernels for fixed shapes, not symbolic ones",
        [("kernel", call.kernel.name), ("refs", call.kernel.symbols)],
        call.kernel.loc,
        "export for the shapes in use, one by one; or write the kernel for one element "
        "of a symbolic batch, and jax.vmap it; or interpret=True for plain StableHLO",
    )
    if named is not None:
        raise error
    return Choice("interpret", () if backend is None else ((backend, error),))


def _announce(chosen: Choice, call: Call, platform: str | None, ctx: Any) -> None:
    """Warn if a kernel is emulated that was expected to be native."""
    if chosen.refusals:
        warn_fallback(call.kernel, *(error for _, error in chosen.refusals))
    elif not wants_emulation(call) and not base.DEFAULTS.get(platform or ""):
        _warn_no_default(tuple(ctx.module_context.platforms))


def _report_failures(chosen: Choice, kernel: Kernel) -> None:
    """Warn if a backend accepted a kernel whose code was then rejected."""
    errors = [error for _, error in chosen.refusals if isinstance(error, CompileError)]
    if not errors or "failure" + kernel.text in _warned:
        return
    _warned.add("failure" + kernel.text)
    warn(
        f"kernel '{kernel.name}' runs on backend '{chosen.backend}', because another "
        "backend's code for it does not compile; please report it:\n"
        + "\n".join(map(str, errors)),
        FallbackWarning,
    )


def _is_one_kernel_of(name: str, call: Call, chip: Chip | None) -> bool:
    """Whether a GPU's call will be one kernel of this backend, as far as is known."""
    try:
        return (
            base.defaults("cuda", call.kernel)[0] == name
            and on_arrays(call, "cuda", chip) is None
            and planned(call, "cuda", chip=chip).program is None
        )
    except PallasError:  # raised again when the call itself is lowered
        return False


def _launch(
    name: str, call: Call, platform: str | None, chip: Chip | None
) -> base.Launch:
    backend = base.get(name)
    # In a program for several platforms, each has the calls of the others, too.
    here = (platform,) if platform in backend.platforms else backend.platforms
    chip = chip or accelerator(*here)
    if chip is None and platform in GPU_PLATFORMS:
        chip = usual(platform)
    options = replace(call.options, chip=chip)
    compiled = base.begun(backend, call.kernel, options)
    others = base.lowered_after(call.kernel) if name == "cuda" else ()
    calls = [replace(call, kernel=k, flowing=f, equal=()) for k, f in others]
    compiled.beside = [
        base.begun(backend, other.kernel, options, keep=True)
        for other in calls
        if _is_one_kernel_of(name, other, chip)
    ]
    if config.get("dump"):
        compiled.texts()  # producing them writes the dumps
    return backend.launch(compiled)


def check_platform(call: Call, platforms: Sequence[str]) -> None:
    """Checks that the backend the call names runs on one of the platforms."""
    if call.backend is None or wants_emulation(call):
        return
    usable = base.get(call.backend).platforms
    if not set(platforms) & set(usable):
        raise UnsupportedError(
            f"backend {call.backend!r} does not run on {'/'.join(platforms)}",
            [("kernel", call.kernel.name)],
            call.kernel.loc,
            f"remove backend=, or pass operands on {' or '.join(usable)}",
        )


def wants_emulation(call: Call) -> bool:
    name = call.backend or config.get("backend")
    return bool(call.interpret) or name == "interpret"


def _asked_backend(call: Call, platform: str | None) -> str | None:
    """The native backend the call names, else the knob's if it can run there."""
    named = config.get("backend")
    if call.backend or not named:
        return call.backend
    return named if platform in base.get(named).platforms else None


@functools.lru_cache(maxsize=1)
def _warn_no_default(platforms: tuple[str, ...]) -> None:
    warn(
        f"no native backend is the default on {'/'.join(platforms)} yet: kernels run "
        "in the emulation (shown once; interpret=True asks for it, backend='triton' "
        "or 'tpu' for a native one)",
        FallbackWarning,
    )


_warned: set[str] = set()


def warn_fallback(kernel: Kernel, *errors: Exception, what: str = "kernel") -> None:
    """Warn once per kernel why it, or its derivative, was not compiled."""
    if what + kernel.text in _warned:
        return
    _warned.add(what + kernel.text)
    reason = "\n".join(map(str, errors))
    warn(
        f"{what} '{kernel.name}' falls back to the emulation, which is slow "
        f"(interpret=True asks for it and silences this); reason:\n{reason}",
        FallbackWarning,
    )


def _lower_emulation(ctx: Any, *operands: Any, call: Call) -> Any:
    from pallasite.emulation.devices import on_devices
    from pallasite.emulation.emulate import emulate
    from pallasite.passes.lower.device_numbers import talks_to_devices

    # Roles and thread blocks of a cluster run concurrently only in checked mode.
    alike = ("roles", "warps", "cluster_barrier", "tensor_commit")
    side_by_side = any(op.name in alike for op in walk(call.kernel.body))
    checked = _is_checked(call) or (side_by_side and not call.interpret)
    if call.kernel.symbols and (checked or side_by_side):
        raise UnsupportedError(
            "checked mode runs kernels of fixed shapes, and these are symbolic",
            [("kernel", call.kernel.name), ("refs", call.kernel.symbols)],
            call.kernel.loc,
            "check the function with arrays, before it is exported",
        )
    axes: list[tuple[str, int]] = []
    if talks_to_devices(call.kernel.body):
        axes = jaxcompat.manual_mesh_axes(ctx)
        run = on_devices(call.kernel, _evaluator_options(call), axes)
    elif not side_by_side and any(
        op.name in ("sem_signal_core", "fetch_and_add", "barrier")
        for op in walk(call.kernel.body)
    ):
        run = on_devices(call.kernel, _evaluator_options(call), axes)
    else:
        run = _checked_callback(call) if checked else emulate(call.kernel)
    with jaxcompat.collectives_over(axes):
        return _lower_function(ctx, operands, run)


def _lower_function(ctx: Any, operands: Sequence[Any], run: Callable[..., Any]) -> Any:
    """Lower a JAX function in place of the call."""
    plain = ctx.replace(
        avals_in=jaxcompat.plain_avals(ctx.avals_in),
        avals_out=jaxcompat.plain_avals(ctx.avals_out),
    )
    return mlir.lower_fun(run, multiple_results=True)(plain, *operands)


# What the emulation reports about a kernel that the evaluator runs for it.
_ONLY_COPIES = Checked(
    bounds=False,
    uninitialised=False,
    races=False,
    unwritten=False,
    promises=False,
    orders=("early",),
)


def _evaluator_options(call: Call) -> Checked:
    return call.interpret if isinstance(call.interpret, Checked) else _ONLY_COPIES


def _is_checked(call: Call) -> bool:
    return isinstance(call.interpret, Checked)


def _checked_callback(call: Call):
    """Checked mode under jit: the numpy evaluator runs in a host callback."""
    shapes = [
        jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype.np) for p in call.kernel.outputs
    ]

    def on_host(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            return tuple(_run_checked(call, arrays))
        except CheckError as error:
            report = error.with_traceback(None)  # our frames mean nothing to the author
        raise report

    def run(*operands: Any) -> Any:
        _report_once()
        return jax.pure_callback(on_host, tuple(shapes), *operands)

    return run


@functools.cache
def _report_once() -> None:
    jaxcompat.keep_out_of_callback_log(CheckError)


def _lower_unaliased(ctx: Any, *operands: Any, call: Call) -> Sequence[Any]:
    from pallasite.runtime import ffi

    return ffi.lower_unaliased(lowered_p, ctx, *operands, call=call)


mlir.register_lowering(call_p, _lower_unaliased, cacheable=False)
for _platform in (None, *base.DEFAULTS):
    _rule = functools.partial(_lower, _platform)
    mlir.register_lowering(lowered_p, _rule, platform=_platform)


# --- vmap ---


def _batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, call: Call
) -> tuple[list[Any], list[int]]:
    """Adds a leading grid axis; operands that are not mapped are unchanged."""
    sizes = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    (size,) = sizes
    mapped = [d is not None for d in dims]
    # Machine code is for one number of elements, which a symbol is not.
    compiled = call.backend is not None and not wants_emulation(call)
    is_open = not isinstance(size, int) and compiled
    # Copies of the programs would count with the same semaphores.
    shares = between_programs(call.kernel)
    if is_open or shares or maps_a_grid_size(call.kernel, mapped):
        return _one_by_one(operands, dims, call)
    moved = [
        x if d is None else jax.numpy.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    moved, mapped = _spread_changed(call.kernel, moved, mapped, size)
    results = call_p.bind(*moved, call=batched(call, mapped, size))
    return results, [0] * len(results)


def batched(call: Call, mapped: Sequence[bool], size: int) -> Call:
    """The call with a new leading grid axis that indexes the mapped operands."""
    rule = call.partition
    if isinstance(rule, Partition):
        rule = rule.batched(mapped)
    kernel = batch_kernel(call.kernel, tuple(mapped), size)
    return replace(call, kernel=kernel, partition=rule)


def _one_by_one(
    operands: Sequence[Any], dims: Sequence[int | None], call: Call
) -> tuple[list[Any], list[int]]:
    """vmap as a loop of calls."""
    mapped = [
        jax.numpy.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
        if d is not None
    ]

    def one(elements: Sequence[Any]) -> list[Any]:
        pending = iter(elements)
        pairs = zip(operands, dims, strict=True)
        own = [x if d is None else next(pending) for x, d in pairs]
        return call_p.bind(*own, call=call)

    results = jax.lax.map(one, mapped)
    return list(results), [0] * len(results)


def _spread_changed(
    kernel: Kernel, operands: list[Any], mapped: list[bool], size: int
) -> tuple[list[Any], list[bool]]:
    """Operands that are written, or aliased to a result, need a copy per element."""
    for source in changed_operands(kernel):
        if not mapped[source]:
            x = operands[source]
            operands[source] = jax.numpy.broadcast_to(x[None], (size, *x.shape))
            mapped[source] = True
    return operands, mapped


batching.primitive_batchers[call_p] = _batch
