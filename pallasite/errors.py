"""Every exception Pallasite raises, and the common form of their messages.

Form: what is wrong; aligned facts (operand, numbers); the user's line; the fix. Each
class also inherits from the built-in exception a JAX user expects, so that libraries
can catch it, and from both where JAX itself raises either.
"""

import difflib
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

Facts = Iterable[tuple[str, Any]]

_LISTED = 20  # names beside a similar one


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


def one_of(name: str, known: Iterable[str]) -> str:
    """A fix for an unknown name: those that are known, a similar one first.

    Where one is similar, a list that fills the screen would only hide it.
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    if near and len(known) > _LISTED:
        return f"did you mean {near[0]!r}?"
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}one of {', '.join(known)}"


# Modules whose frames are not the user's.
_LIBRARIES = (
    *("pallasite", "jax", "jaxlib", "numpy"),
    *("contextlib", "functools", "threading"),
)
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn(message: str, category: type[Warning], at: Any = None) -> None:
    """Warns with the line of the innermost frame that is the user's.

    Args:
        at: a location, for where no such frame is running: XLA calls us, or a command.
    """
    frame, level = sys._getframe(1), 2
    while frame is not None and not is_users(frame):
        frame, level = frame.f_back, level + 1
    if frame is not None:
        warnings.warn(message, category, stacklevel=level)
        return
    file, line = ("pallasite", 1) if at is None else (at.file, at.line)
    warnings.warn_explicit(message, category, file, line, registry=_said)


_said: dict[str | tuple[str, type[Warning], int], int] = {}


def is_users(frame: FrameType) -> bool:
    """Whether a frame is of the user's code: not ours, JAX's or a helper's."""
    file = frame.f_code.co_filename
    if file.startswith((_PACKAGE, "<frozen")) or os.path.basename(file) == "pallasite":
        return False  # the last is the script that pip installs for our commands
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] not in _LIBRARIES


class PallasError(Exception):
    """Root of all Pallasite errors."""

    def __init__(self, what: str, facts: Facts = (), at: Any = None, fix: str = ""):
        self.what, self.facts, self.at, self.fix = what, tuple(facts), at, fix
        super().__init__(compose(what, self.facts, at, fix))

    def add_note(self, note: str) -> None:
        """Notes come after the message; JAX's, on the frames it hides, would stand
        where the fix is to be read."""
        if "has removed its internal frames" not in note:
            super().add_note(note)


class SpecError(PallasError, ValueError):
    """A grid, BlockSpec, out_shape or alias does not match the operands."""


class KernelTypeError(PallasError, TypeError, ValueError):
    """The kernel function, or something in it, has the wrong type or signature."""


class RefIndexError(PallasError, IndexError, ValueError):
    """A static index is outside its ref."""


class UnsupportedError(PallasError, NotImplementedError):
    """The language, or a backend, has no such operation."""


class NotFusible(UnsupportedError):
    """A function that produces or uses a value cannot be computed on its blocks."""


class NoBackwardKernel(UnsupportedError):
    """A kernel's cotangents cannot be computed by a generated kernel; `what` says why.

    Users only see it in a warning: the functional form takes over.
    """


def no_assembly(op: Any) -> UnsupportedError:
    """The error for an `inline_asm` op anywhere but on a GPU."""
    return UnsupportedError(
        "PTX assembly (elementwise_inline_asm) runs on NVIDIA GPUs only",
        [("assembly", op.attrs["asm"])],
        op.loc,
        "pass operands on a GPU, or use jnp or lax operations",
    )


class UnknownBackendError(SpecError):
    """`backend=` names no known backend."""

    def __init__(self, name: object, known: tuple[str, ...], at: Any = None):
        super().__init__(
            f"unknown backend {name!r}",
            [("known", ", ".join(known))],
            at,
            fix="omit backend= to use the platform's default",
        )


class ResourceError(PallasError):
    """A kernel needs more memory, or more programs, than the target has."""


class ChipMemoryError(ResourceError):
    """Blocks need more on-chip memory (shared memory, VMEM) than the chip has.

    If no backend is named, the platform's next one is tried: it may need less.
    """


class CompileError(PallasError, RuntimeError):
    """The compiler that a backend uses rejected the code; its output is kept."""


class MissingPackageError(PallasError, ImportError):
    """A package that only this feature needs is not installed."""


class CheckError(PallasError, RuntimeError):
    """Checked mode found a bug in the kernel.

    `kind` is the field of `pl.Checked` that detects it, "check" for a debug_check.
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
    """The message of a failing debug_check, with values for its fields.

    `at` is its line, if the error that gets the text cannot carry one.
    """
    shown = message.format(*values) if values else message
    where = f" at {at}" if at else ""
    return f"debug_check failed: {shown}{where}"


class VerifyError(PallasError):
    """The IR breaks its own rules: a bug in Pallasite or in hand-written IR text."""


class ParseError(PallasError, ValueError):
    """IR text that cannot be parsed."""


class InternalError(PallasError, AssertionError):
    """A bug in Pallasite: please report it with the text it prints."""


class PallasWarning(UserWarning):
    """Root of all Pallasite warnings."""


class KernelWarning(PallasWarning):
    """A kernel is wrong in every run: its results are undefined."""


class FallbackWarning(PallasWarning):
    """A kernel runs through the emulation because no native backend accepted it."""


class PerformanceWarning(PallasWarning):
    """A kernel runs slower than it would with the change the message names."""


class PartitionWarning(PallasWarning):
    """A kernel under sharded `jit` needs whole operands, but they are sharded."""
