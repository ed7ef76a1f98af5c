"""What a proof says: a verdict per claim, with its reason, line and counterexample."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PROVED, REFUTED, UNKNOWN = "proved", "refuted", "unknown"
CLAIMS = ("bounds", "coverage", "races", "order", "sync", "batch")
_INDENT = " " * 19  # of a claim's second line


@dataclass(frozen=True)
class Counterexample:
    """Where a claim fails: the program, what it does there, and how to see it.

    Attributes:
        program: `(i, j) = (0, 3)`; empty if no single program is to blame.
        text: the element, index or semaphore.
        run: runs the kernel in checked mode on synthetic operands and returns its
            report; empty if it reports nothing.
    """

    program: str
    text: str
    run: Callable[[], str] | None = field(default=None, compare=False, repr=False)

    def replay(self) -> str:
        """Checked mode's report of the bug; empty where it cannot see it."""
        return self.run() if self.run is not None else ""

    def __str__(self) -> str:
        return f"{self.program}: {self.text}" if self.program else self.text


@dataclass(frozen=True)
class Claim:
    """One claim about one kernel."""

    name: str  # one of CLAIMS
    verdict: str
    reason: str
    line: str = ""
    counterexample: Counterexample | None = None

    @property
    def ok(self) -> bool:
        return self.verdict != REFUTED

    def as_json(self) -> dict[str, Any]:
        example = self.counterexample
        return {
            "claim": self.name,
            "verdict": self.verdict,
            "reason": self.reason,
            "line": self.line,
            "counterexample": None if example is None else str(example),
        }

    def __str__(self) -> str:
        lines = [f"  {self.name:<8} {self.verdict:<7} {self.reason}"]
        if self.counterexample is not None:
            lines.append(f"{_INDENT}at {self.counterexample}")
        if self.line:
            lines.append(f"{_INDENT}{self.line}")
        return "\n".join(lines)


@dataclass(frozen=True)
class KernelProof:
    """What is known of one kernel call."""

    kernel: str
    line: str
    claims: tuple[Claim, ...]
    assumed: tuple[str, ...] = ()  # what the author promised, for people

    @property
    def ok(self) -> bool:
        """Whether no claim is refuted."""
        return all(claim.ok for claim in self.claims)

    def claim(self, name: str) -> Claim:
        return next(claim for claim in self.claims if claim.name == name)

    def __getattr__(self, name: str) -> Claim:
        if name in CLAIMS:
            return self.claim(name)
        raise AttributeError(name)

    def as_json(self) -> dict[str, Any]:
        claims = [claim.as_json() for claim in self.claims]
        return {
            "kernel": self.kernel,
            "line": self.line,
            "ok": self.ok,
            "claims": claims,
            "assumed": list(self.assumed),
        }

    def __str__(self) -> str:
        head = f"{self.kernel}  {self.line}".rstrip()
        given = [f"  {'given':<16} {', '.join(self.assumed)}"] if self.assumed else []
        return "\n".join([head, *given, *map(str, self.claims)])


@dataclass(frozen=True)
class Proof:
    """What is known of all kernels of a function. Print it."""

    kernels: tuple[KernelProof, ...]

    @property
    def ok(self) -> bool:
        """Whether no claim about any kernel is refuted."""
        return all(kernel.ok for kernel in self.kernels)

    @property
    def refused(self) -> bool:
        """Whether some claim is refuted; named as in the reports of other commands."""
        return not self.ok

    @property
    def proved(self) -> bool:
        """Whether every claim about every kernel is proved."""
        return all(c.verdict == PROVED for k in self.kernels for c in k.claims)

    def claims(self, name: str) -> list[Claim]:
        """One claim, for each kernel."""
        return [kernel.claim(name) for kernel in self.kernels]

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "kernels": [k.as_json() for k in self.kernels]}

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.kernels))


def worst(name: str, found: Iterable[Claim], otherwise: str) -> Claim:
    """One claim of several: the first refuted, else the first unknown, else proved."""
    found = list(found)
    for verdict in (REFUTED, UNKNOWN):
        bad = [claim for claim in found if claim.verdict == verdict]
        if bad:
            first = bad[0]
            rest = f" (and {len(bad) - 1} more like it)" if len(bad) > 1 else ""
            return Claim(
                name, verdict, first.reason + rest, first.line, first.counterexample
            )
    return Claim(name, PROVED, otherwise)


def listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
