"""`pl.explain_grad(f)(*args)`: how the cotangent of each kernel operand is computed.

Two ways: generated backward kernels (`backward.py`) where the kernel's structure allows
it, else the functional form of the kernel, differentiated by JAX. Nothing is run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pallasite.errors import NoBackwardKernel, SpecError
from pallasite.ir.nodes import Kernel
from pallasite.language.trace import user_location
from pallasite.primitive import calls_in

if TYPE_CHECKING:
    from pallasite.autodiff.backward import BackwardPlan
    from pallasite.autodiff.backward_windows import Built

KERNEL, FUNCTIONAL, NONE = "kernel", "functional", "none"


@dataclass(frozen=True)
class OperandGrad:
    """How one operand of one kernel call gets its cotangent.

    `tier` is "kernel" (a generated backward kernel), "functional" (the kernel's
    functional form; slower) or "none" (integers have no cotangent).
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

    def __str__(self) -> str:
        rows = [(o.kernel, o.operand, o.tier, o.why) for o in self.operands]
        rows = [("kernel", "operand", "tier", "why"), *rows]
        widths = [max(len(row[n]) for row in rows) for n in range(3)]
        return "\n".join(
            "  ".join(
                [*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]
            )
            for row in rows
        )


def explain_grad(function: Callable[..., Any]) -> Callable[..., GradReport]:
    """See how the gradients of the kernels in a function are computed.

    Args:
        function: any JAX function that calls kernels (not its gradient).

    Returns:
        A function of the same arguments (arrays or `jax.ShapeDtypeStruct`s). It gives
        a `GradReport`: print it, or look at its `operands` and `kernels`.

    Raises:
        SpecError: the function calls no kernel.

    Example:
        `print(pl.explain_grad(f)(x))`
    """

    def explained(*args: Any) -> GradReport:
        calls = calls_in(function, *args)
        if not calls:
            name = getattr(function, "__name__", repr(function))
            raise SpecError(
                f"pl.explain_grad: '{name}' calls no kernel",
                at=user_location(),
                fix="give a function that calls pl.pallas_call(...)(...)",
            )
        rows: list[OperandGrad] = []
        kernels: list[Kernel] = []
        for call in calls:
            rows += explain(call.kernel)
            kernels += backward_kernels(call.kernel)
        return GradReport(tuple(rows), tuple(kernels))

    return explained


def explain(kernel: Kernel) -> list[OperandGrad]:
    """One row per operand of a kernel, every float result having a cotangent."""
    try:
        made, reason = full_plan(kernel), ""
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
            row = (KERNEL, _how(made, n))
        rows.append(OperandGrad(kernel.name, name, *row))
    return rows


def backward_kernels(kernel: Kernel) -> list[Kernel]:
    """The kernels that compute all cotangents of a kernel; none if there are none."""
    try:
        return [step.kernel for step in full_plan(kernel).steps]
    except NoBackwardKernel:
        return []


def full_plan(kernel: Kernel) -> "BackwardPlan":
    """Backward kernels for every float operand and result."""
    from pallasite.autodiff.backward import plan  # not needed to import the package

    wanted = tuple(ref.ref.dtype.is_float for ref in kernel.inputs)
    known = tuple(ref.ref.dtype.is_float for ref in kernel.outputs)
    return plan(kernel, wanted, known)


def _how(made: "BackwardPlan", operand: int) -> str:
    ref = made.targets[operand]
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
