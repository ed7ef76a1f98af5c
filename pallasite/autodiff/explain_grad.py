"""`pl.explain_grad(f)(*args)`: how the cotangent of each kernel operand is computed.

There are two ways: generated backward kernels (`backward.py`) if the kernel's structure
allows it, else the functional form of the kernel, differentiated by JAX. Backward
kernels that only map blocks are XLA's operations (`whole_arrays.py`). Nothing is run.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pallasite import config
from pallasite.errors import NoBackwardKernel, SpecError
from pallasite.ir.nodes import Kernel, walk
from pallasite.language.trace import user_location
from pallasite.placement import chip_for
from pallasite.sites import calls_in

if TYPE_CHECKING:
    from pallasite.autodiff.backward import BackwardPlan, KeepingPlan
    from pallasite.autodiff.backward_windows import Built
    from pallasite.primitive import Call
    from pallasite.target import Machine

KERNEL, XLA, FUNCTIONAL, NONE = "kernel", "xla", "functional", "none"


@dataclass(frozen=True)
class OperandGrad:
    """How one operand of one kernel call gets its cotangent.

    `tier` is "kernel" (a generated backward kernel), "xla" (one that XLA computes on
    whole arrays, fused with what is around it), "functional" (the kernel's functional
    form; slower) or "none" (integers have no cotangent).
    """

    kernel: str
    operand: str
    tier: str
    why: str


@dataclass(frozen=True)
class GradReport:
    """What `pl.explain_grad` found: one row per operand, and the backward kernels."""

    operands: tuple[OperandGrad, ...]
    kernels: tuple[Kernel, ...]
    ways: tuple[str, ...] = ()  # if there was a choice: each way, the chosen first

    def __str__(self) -> str:
        rows = [(o.kernel, o.operand, o.tier, o.why) for o in self.operands]
        rows = [("kernel", "operand", "tier", "why"), *rows]
        widths = [max(len(row[n]) for row in rows) for n in range(3)]
        lines = [
            "  ".join(
                [*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]
            )
            for row in rows
        ]
        return "\n".join([*lines, *self.ways])


def explain_grad(function: Callable[..., Any]) -> Callable[..., GradReport]:
    """Show how the gradients of the kernels in a function are computed.

    Args:
        function: any JAX function that calls kernels (not its gradient).

    Returns:
        A function of the same arguments (arrays or `jax.ShapeDtypeStruct`s; anything
        else is passed to `function` unchanged). It returns a `GradReport`: print it, or
        inspect its `operands` and `kernels`.

    Raises:
        SpecError: the function calls no kernel.

    Example:
        `print(pl.explain_grad(f)(x))`
    """

    def explained(*args: Any, **kwargs: Any) -> GradReport:
        # Not needed to import the package.
        from pallasite.autodiff.equal_operands import with_operands

        calls = calls_in(function, *args, **kwargs)
        if not calls:
            name = getattr(function, "__name__", repr(function))
            raise SpecError(
                f"pl.explain_grad: '{name}' calls no kernel",
                at=user_location(),
                fix="pass a function that calls pl.pallas_call(...)(...)",
            )
        rows: list[OperandGrad] = []
        kernels: list[Kernel] = []
        ways: list[str] = []
        for call in calls:
            kernel, kept = with_operands(call)
            backend = call.backend
            rows += _with_equal(explain(kernel, backend), call, kept)
            kernels += backward_kernels(kernel, backend)
            ways += ways_of(kernel, backend)
        return GradReport(tuple(rows), tuple(kernels), tuple(ways))

    return explained


def _with_equal(
    rows: list[OperandGrad], call: "Call", kept: Sequence[int]
) -> list[OperandGrad]:
    """A row for each operand of a call, also for those that are the same array."""
    found = dict(zip(kept, rows, strict=True))
    for n, ref in enumerate(call.kernel.inputs):
        if n not in found:
            one = found[call.equal[n]]
            why = f"the same array as {one.operand}: one cotangent for both"
            name = ref.name or f"operand {n}"
            found[n] = OperandGrad(one.kernel, name, one.tier, why)
    return [found[n] for n in range(len(found))]


def explain(kernel: Kernel, backend: str | None = None) -> list[OperandGrad]:
    """One row per operand of a kernel, assuming cotangents of all float results."""
    try:
        made, reason = chosen_plan(kernel, backend), ""
    except NoBackwardKernel as error:
        made, reason = None, _one_line(error)
    rows = []
    for n, ref in enumerate(kernel.inputs):
        name = ref.name or f"operand {n}"
        if not ref.ref.dtype.is_float:
            row = (NONE, f"{ref.ref.dtype} has no cotangent")
        elif made is None:
            row = (FUNCTIONAL, reason)
        else:
            tier = XLA if _is_by_xla(made, n, backend) else KERNEL
            row = (tier, _how(made, n))
        rows.append(OperandGrad(kernel.name, name, *row))
    return rows


def backward_kernels(kernel: Kernel, backend: str | None = None) -> list[Kernel]:
    """The kernels that compute all cotangents of a kernel; none if there are none."""
    try:
        return [step.kernel for step in chosen_plan(kernel, backend).steps]
    except NoBackwardKernel:
        return []


def ways_of(kernel: Kernel, backend: str | None = None) -> list[str]:
    """The ways to divide the work among kernels, the chosen one first.

    None if there is no choice.
    """
    try:
        made = chosen_plan(kernel, backend)
    except NoBackwardKernel:
        return []
    if len(made.choices) < 2:
        return []
    lines = []
    for n, way in enumerate(made.choices):
        names = ", ".join(step.kernel.name for step in way.steps)
        lead = f"{kernel.name} on {made.machine.name}:" if n == 0 else "instead of"
        counts = " + ".join(str(_products(step.kernel)) for step in way.steps)
        lines.append(f"{lead} {names}: {counts} matmuls, {way.estimate}")
    kept = kept_bytes(kernel, backend)
    if kept:
        lines[0] += f"; the forward kernel keeps {kept:,} bytes for them"
    return lines


def _products(kernel: Kernel) -> int:
    return sum(op.name == "dot" for op in walk(kernel.body))


def kept_bytes(kernel: Kernel, backend: str | None = None) -> int:
    """Bytes the forward kernel keeps for the backward kernels, besides its results."""
    found = _keeping(kernel, backend)
    refs = () if found is None else found.kept
    return sum(ref.ref.size * ref.ref.dtype.bytes for ref in refs)


def _keeping(kernel: Kernel, backend: str | None) -> "KeepingPlan | None":
    from pallasite.autodiff.backward import keeping_plan
    from pallasite.target import Machine

    wanted = tuple(ref.ref.dtype.is_float for ref in kernel.inputs)
    return keeping_plan(kernel, wanted, Machine.usual(chip_for(backend)))


def chosen_plan(kernel: Kernel, backend: str | None = None) -> "BackwardPlan":
    """What a gradient of all float operands runs after the forward kernel."""
    found = _keeping(kernel, backend)
    return full_plan(kernel, backend) if found is None else found.backward


def full_plan(
    kernel: Kernel, backend: str | None = None, machine: "Machine | None" = None
) -> "BackwardPlan":
    """Backward kernels for every float operand and result.

    Args:
        kernel: what is called.
        backend: the call's, if it names one.
        machine: what will run them; default: the backend's, else the one JAX sees.
    """
    # Not needed to import the package.
    from pallasite.autodiff.backward import plan
    from pallasite.target import Machine

    wanted = tuple(ref.ref.dtype.is_float for ref in kernel.inputs)
    known = tuple(ref.ref.dtype.is_float for ref in kernel.outputs)
    return plan(kernel, wanted, known, machine or Machine.usual(chip_for(backend)))


def _is_by_xla(made: "BackwardPlan", operand: int, backend: str | None) -> bool:
    """Whether all kernels that compute an operand's cotangent are XLA's operations."""
    from pallasite.passes.schedule.whole_arrays import for_xla

    steps = [step for step in made.steps if made.targets[operand] in step.results]
    if backend or config.get("backend") or config.get("interpret"):
        return False
    kernels = ((s, s.whole or s.kernel) for s in steps)
    fused = (for_xla(k, s.taking(made.flowing), made.machine) for s, k in kernels)
    return bool(steps) and all(kernel is not None for kernel in fused)


def _how(made: "BackwardPlan", operand: int) -> str:
    ref = made.targets[operand]
    for merge in made.merges:
        if merge.target is ref:
            refs = set(merge.refs)
            by = [s.kernel.name for s in made.steps if refs.intersection(s.results)]
            if not by:
                return "rows of the result's cotangent, merged in order"
            return f"{', '.join(by)} writes what each program adds, merged in order"
    steps = [step for step in made.steps if ref in step.results]
    if not steps:
        return "zero: no result depends on it"
    return "; ".join(_step(step, step.results.index(ref)) for step in steps)


def _step(step: "Built", result: int) -> str:
    along = " x ".join(f"i{axis}" for axis in step.order) or "one step"
    text = f"{step.kernel.name} over {along}"
    summed = _axes(a for a in step.order if a not in step.own[result])
    if summed:
        text += f", summed along {summed}"
    if step.parts[result] > 1:
        text += f" in {step.parts[result]} parts"
    return text


def _axes(axes: Iterable[int]) -> str:
    return " ".join(f"i{axis}" for axis in axes)


def _one_line(error: NoBackwardKernel) -> str:
    where = f" ({error.at})" if error.at is not None else ""
    return f"{error.what}{where}"
