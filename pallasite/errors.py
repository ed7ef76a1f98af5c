"""Every exception Pallasite raises, and the one form their messages have.

Form: what is wrong; aligned facts (operand, numbers); the user's line; the fix. Each
class also inherits the built-in a JAX user expects, so that libraries can catch it, and
both where JAX itself raises either.
"""

from collections.abc import Iterable, Sequence
from typing import Any

Facts = Iterable[tuple[str, Any]]


def compose(what: str, facts: Facts = (), at: Any = None, fix: str = "") -> str:
    """The message text: a first line, then aligned `label value` lines."""
    rows = [(label, str(value)) for label, value in facts if value is not None]
    if at is not None:
        rows.append(("at", str(at)))
    if fix:
        rows.append(("fix", fix))
    width = max((len(label) for label, _ in rows), default=0)
    indent = "\n" + " " * (width + 4)
    lines = [
        f"  {label.ljust(width)}  {value.replace(chr(10), indent)}"
        for label, value in rows
    ]
    return "\n".join([what, *lines])


class PallasError(Exception):
    """Root of all Pallasite errors."""

    def __init__(self, what: str, facts: Facts = (), at: Any = None, fix: str = ""):
        self.what, self.facts, self.at, self.fix = what, tuple(facts), at, fix
        super().__init__(compose(what, self.facts, at, fix))


class SpecError(PallasError, ValueError):
    """A grid, BlockSpec, out_shape or alias does not fit the operands."""


class KernelTypeError(PallasError, TypeError, ValueError):
    """The kernel function, or something in it, has the wrong type or signature."""


class RefIndexError(PallasError, IndexError, ValueError):
    """A static index is outside its ref."""


class UnsupportedError(PallasError, NotImplementedError):
    """The language or a backend does not have an operation."""


class NotFusible(UnsupportedError):
    """Blocks of a value do not pass through the function that makes or uses it."""


class NoBackwardKernel(UnsupportedError):
    """A kernel's cotangents cannot be computed by a generated kernel; `what` says why.

    Not an answer to the user: the functional form takes over.
    """


def no_assembly(op: Any) -> UnsupportedError:
    """What every way to run a kernel but a GPU's says of an `inline_asm` op."""
    return UnsupportedError(
        "PTX assembly (elementwise_inline_asm) runs on NVIDIA GPUs only",
        [("assembly", op.attrs["asm"])],
        op.loc,
        "pass operands that live on a GPU, or write it with jnp or lax operations",
    )


class UnknownBackendError(SpecError):
    """`backend=` names nothing we have."""

    def __init__(self, name: object, known: tuple[str, ...], at: Any = None):
        super().__init__(
            f"unknown backend {name!r}",
            [("known", ", ".join(known))],
            at,
            fix="leave backend=None to use the platform's own",
        )


class ResourceError(PallasError):
    """A kernel needs more memory, or more programs, than the target has."""


class ChipMemoryError(ResourceError):
    """Blocks need more of a chip's own memory (shared memory, VMEM) than it has.

    Where no backend is named, the platform's next one is asked: it may do with less.
    """


class CompileError(PallasError, RuntimeError):
    """The compiler that a backend uses refused generated code; its output is kept."""


class MissingPackageError(PallasError, ImportError):
    """A package is not installed that only this feature needs."""


class CheckError(PallasError, RuntimeError):
    """Checked mode found a bug in the kernel.

    `kind` is the field of `pl.Checked` that looks for it, "check" for a debug_check.
    """

    def __init__(
        self,
        what: str,
        facts: Facts = (),
        at: Any = None,
        fix: str = "",
        kind: str = "check",
    ):
        super().__init__(what, facts, at, fix)
        self.kind = kind


def failed_check(message: str, values: Sequence[Any], at: Any = None) -> str:
    """What a failing debug_check says; values are for the fields of its message.

    `at` is its line, where the error that gets the text has no place for that.
    """
    shown = message.format(*values) if values else message
    where = f" at {at}" if at else ""
    return f"debug_check failed: {shown}{where}"


class VerifyError(PallasError):
    """The IR breaks its own rules: a bug in Pallasite or in hand-written IR text."""


class ParseError(PallasError, ValueError):
    """IR text that cannot be read."""


class InternalError(PallasError, AssertionError):
    """A bug in Pallasite: please report it with the text it prints."""


class PallasWarning(UserWarning):
    """Root of all Pallasite warnings."""


class KernelWarning(PallasWarning):
    """A kernel is traced that is plainly wrong: its results are not defined."""


class FallbackWarning(PallasWarning):
    """A kernel runs through the emulation because no native backend took it."""


class PerformanceWarning(PallasWarning):
    """A kernel runs, but slower than with the change that the message names."""


class PartitionWarning(PallasWarning):
    """A kernel under sharded `jit` needs whole operands that came in parts."""
