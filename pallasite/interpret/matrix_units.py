"""The state of matrix units while a kernel runs, and instructions that misuse it."""

from typing import Any

from pallasite.interpret.monitor import Monitor
from pallasite.ir.nodes import Op

Place = tuple[Any, int, str, int]  # core, unit, what is held, register or address


class MatrixUnits:
    """The full staging registers and accumulators, with the op that filled each.

    A staging register is full until it is loaded, an accumulator until it is popped;
    the right operand that a unit multiplies by stays.
    """

    def __init__(self, monitor: Monitor):
        self.monitor = monitor
        self.full: dict[Place, Op] = {}

    def note(self, op: Op, core: Any) -> None:
        kind, unit, at = (op.attrs[k] for k in ("instruction", "unit", "place"))
        if kind == "push":
            self._push(op, (core, unit, "staging register", at))
        elif kind == "multiply":
            self._load(op, core)
            self.full[core, unit, "accumulator at address", at] = op
        elif kind == "pop":
            sums = (core, unit, "accumulator at address", at)
            if self.full.pop(sums, None) is None:
                what = f"{_text(sums)} is popped, but nothing was added to it"
                self._report(
                    "uninitialised", what, "matmul_acc_lhs before each matmul_pop"
                )

    def _push(self, op: Op, place: Place) -> None:
        if place in self.full:
            self._report(
                "copies",
                f"{_text(place)} is pushed to again before it was loaded",
                "load it first: matmul_acc_lhs(..., load_staged_rhs=...)",
                self.full[place],
            )
        self.full[place] = op

    def _load(self, op: Op, core: Any) -> None:
        unit, register = op.attrs["unit"], op.attrs["load"]
        rhs = (core, unit, "right operand", 0)
        if register is not None:
            staged = (core, unit, "staging register", register)
            if self.full.pop(staged, None) is None:
                what = f"{_text(staged)} is loaded, but nothing was pushed to it"
                self._report("uninitialised", what, "push before each load")
            self.full[rhs] = op
        elif rhs not in self.full:
            what = f"matrix unit {unit} multiplies before a right operand was loaded"
            fix = "matmul_acc_lhs(..., load_staged_rhs=...) in the first matmul"
            self._report("uninitialised", what, fix)

    def end(self) -> None:
        """At the end of the kernel: report what must not be left."""
        for place, op in self.full.items():
            if place[2] == "right operand":
                continue
            if place[2] == "staging register":
                what, fix = "still holds a right operand", "load and multiply by it"
            else:
                what, fix = "is still there", "pltpu.matmul_pop it"
            what = f"{_text(place)} {what} when the kernel ends"
            self.monitor.report("copies", what, [], fix, op.loc)

    def _report(self, kind: str, what: str, fix: str, other: Op | None = None) -> None:
        facts = [("filled at", None if other is None else other.loc)]
        self.monitor.report(kind, what, facts, fix)


def _text(place: Place) -> str:
    core, unit, what, number = place
    where = f"{what} {number} of matrix unit {unit}"
    return where if core is None else f"{where} of core {core}"
