"""The state of a checked run: its position, and how to report a bug.

The Monitor follows the current op and program, numbers the origins of undefined
elements, names refs as the author does, and raises CheckError.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallasite.errors import CheckError, Facts, warn
from pallasite.interpret.schedule import Order
from pallasite.ir.nodes import Kernel, Loc, Op, Value, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.memory import Roots

_LETTERS = "ijklmnopqrstuvwxyz"

# Why an element has no defined value.
UNWRITTEN = "never written"
EDGE = "past the edge of its array"
MASKED = "masked off, with no `other` value"
STALE = "left there by another program along a parallel axis"


@dataclass(frozen=True)
class Origin:
    """Where an undefined element came from, and how far it got."""

    reason: str
    ref: str
    read_at: Loc | None = None
    is_stored: bool = False  # in an output
    stored_at: Loc | None = None
    other: str | None = None  # the program that left a stale value


class Monitor:
    """The state of one checked run."""

    def __init__(
        self,
        kernel: Kernel,
        roots: Roots,
        options: Any,
        order: Order = "early",
        device: str | None = None,
        like: "Monitor | None" = None,
    ):
        self.kernel, self.roots, self.options = kernel, roots, options
        self.order, self.device = order, device
        self.op: Op | None = None
        self.programs: list[tuple[Op, list[Any]]] = []  # pipelines we are inside of
        self.program = 0  # the current program of the kernel's own grid, from 1
        self.part: str | None = None  # the role that runs
        self._program_ids: list[tuple[int, ...]] = [()]
        self._axis_names: dict[Op, list[str]] = {}
        # Codes number origins; 0 is a defined element.
        # Devices share them (`like`): they send each other elements.
        self.origins: list[Origin] = [Origin("", "")] if like is None else like.origins
        self._codes: dict[Origin, int] = {} if like is None else like._codes
        self._inputs, self._outputs = set(kernel.inputs), set(kernel.outputs)
        self._counterparts: dict[Value, Value] = {}
        self._makers = {v: op for op in walk(kernel.body) for v in op.results}

    # --- programs ---

    def enter_program(self, op: Op, ids: Sequence[Any]) -> None:
        self.programs.append((op, list(ids)))
        if len(self.programs) == 1:
            self.program = len(self._program_ids)
            self._program_ids.append(tuple(map(int, ids)))

    def leave_program(self) -> None:
        self.programs.pop()

    def program_text(self, number: int) -> str | None:
        """`(i, j, k) = (0, 2, 1)` for a program of the kernel's own grid."""
        pipeline = next((o for o in self.kernel.body.ops if o.name == "pipeline"), None)
        if pipeline is None or not 0 < number < len(self._program_ids):
            return None
        return self.ids_text(pipeline, self._program_ids[number])

    def ids_text(
        self, op: Op, ids: Sequence[Any], axes: Sequence[int] | None = None
    ) -> str | None:
        """Program ids with the names of their axes (all, or those given)."""
        if not ids:
            return None
        names = self._names(op) if axes is None else [self._names(op)[a] for a in axes]
        if len(ids) == 1:
            return f"{names[0]} = {int(ids[0])}"
        return f"({', '.join(names)}) = ({', '.join(str(int(i)) for i in ids)})"

    def _names(self, op: Op) -> list[str]:
        if op not in self._axis_names:
            letters = iter(_LETTERS)
            self._axis_names[op] = [
                "batch" if index.name == "batch" else next(letters, "?")
                for index in Pipeline.of(op).ids
            ]
        return self._axis_names[op]

    def program_facts(self) -> list[tuple[str, Any]]:
        labels = ["program", *["inner step"] * (len(self.programs) - 1)]
        facts = [
            (label, self.ids_text(op, ids))
            for label, (op, ids) in zip(labels, self.programs, strict=False)
        ]
        return [*facts, ("running", self.part)]

    # --- refs ---

    def describe(self, ref: Value) -> str:
        """A ref in the author's terms: name, role and type."""
        ref = self._counterparts.get(ref, ref)
        maker = self._makers.get(ref)
        if maker is not None and maker.name == "barrier_semaphore":
            return "the barrier semaphore"
        step: Value | None = ref
        while step is not None and not step.name:
            step = self.roots.parent.get(step)
        role = self.role(ref)
        who = self._unnamed(ref, role) if step is None else f"{step.name} ({role})"
        return f"{who}, {ref.ref.tile}"

    def _unnamed(self, ref: Value, role: str) -> str:
        """Memory without a name, by the line that allocates it."""
        maker = self._makers.get(self.roots.of(ref))
        if maker is None or maker.loc is None:
            return f"unnamed {role}"
        return f"{role} of {maker.loc}"

    def role(self, ref: Value) -> str:
        while True:
            if ref in self._outputs:
                return "output"
            if ref in self._inputs:
                return "input"
            if ref not in self.roots.parent:
                return "scratch"
            ref = self.roots.parent[ref]

    def stand_for(self, made: Value, ref: Value) -> None:
        """A root that is not in the kernel, for another one's counterpart elsewhere."""
        self._counterparts[made] = ref

    # --- undefined elements ---

    def code(self, origin: Origin) -> int:
        found = self._codes.get(origin)
        if found is None:
            found = self._codes[origin] = len(self.origins)
            self.origins.append(origin)
        return found

    def code_here(self, reason: str) -> int:
        """The code of elements that the current op reads and that have no value."""
        op = self.op
        ref = op.operands[0] if op is not None and op.operands else None
        text = self.describe(ref) if ref is not None and ref.is_ref else "a value"
        return self.code(Origin(reason, text, op.loc if op is not None else None))

    def recode(self, codes: np.ndarray, stored: bool = False) -> np.ndarray:
        """Codes with the current line noted as where they were read, or stored."""
        loc = self.op.loc if self.op is not None else None
        out = codes
        for code in np.unique(codes):
            origin = self.origins[code]
            if stored and code:
                new = self.code(replace(origin, is_stored=True, stored_at=loc))
            elif code and origin.read_at is None:
                new = self.code(replace(origin, read_at=loc))
            else:
                continue
            out = np.where(codes == code, np.int32(new), out)
        return out

    # --- reports ---

    def report(
        self,
        kind: str,
        what: str,
        facts: Facts = (),
        fix: str = "",
        at: Any = None,
        program: str | None = None,
    ) -> None:
        """Raise, unless this kind of check is off."""
        if kind != "check" and not getattr(self.options, kind):
            return
        where = [("program", program)] if program else self.program_facts()
        where = [("device", self.device), *where]
        at = at if at is not None else self.op.loc if self.op is not None else None
        if self.order != "early":
            random = f"random, seed {self.order}"
            order = self.order if isinstance(self.order, str) else random
            where = [*where, ("order", order)]
        facts = [("kernel", self.kernel.name), *facts, *where]
        found = CheckError(what, facts, at or self.kernel.loc, fix, kind)
        if kind == "races" and self.options.machine.warns_of_races:
            warn(str(found), RuntimeWarning)
            return
        raise found

    def report_undefined(self, code: int, what: str, **more: Any) -> None:
        """Report the use of an undefined value, and where the value came from."""
        origin = self.origins[code]
        kind, fix = _KIND_AND_FIX[origin.reason]
        facts = [
            *more.pop("facts", ()),
            ("value from", f"{origin.ref}: {origin.reason}"),
            ("left by", origin.other),
            ("read at", origin.read_at),
        ]
        self.report(kind, what, facts, fix, **more)


_KIND_AND_FIX = {
    UNWRITTEN: (
        "uninitialised",
        "write it first, for example under @pl.when(pl.program_id(axis) == 0)",
    ),
    EDGE: (
        "uninitialised",
        "mask with jnp.where(positions < size, x, 0), or BlockSpec(..., fill=0)",
    ),
    MASKED: ("uninitialised", "pass other= to the masked load"),
    STALE: (
        "races",
        "write the scratch before reading it in every program along the axis, or do "
        "not declare the axis parallel",
    ),
}
