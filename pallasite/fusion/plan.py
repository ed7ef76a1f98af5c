"""Decides which functions around a graph's kernel calls are fused into them.

Results come before operands: what follows a kernel is computed once per block in that
kernel, but perhaps many times in a kernel that reads it.
"""

from dataclasses import replace
from typing import Any

from pallasite.errors import NotFusible, UnsupportedError
from pallasite.fusion.graph import Atom, Graph, Node, Val
from pallasite.fusion.kernels import dims_of, shown_of, with_consumers, with_producers
from pallasite.fusion.regions import Expression, consumers_of, producers_of
from pallasite.ir.nodes import Kernel
from pallasite.passes.analysis.work import Work, count, short
from pallasite.primitive import Call, call_p
from pallasite.sharding.rule import Partition
from pallasite.target.machine import operations_in, operations_of


def plan(graph: Graph) -> None:
    """Fuse, in place."""
    for node in [n for n in graph.nodes if n.primitive is call_p]:
        _FusedCall(graph, node).fuse()
    graph.sort()


class _FusedCall:
    """One call that other functions are fused into."""

    def __init__(self, graph: Graph, node: Node):
        self.graph, self.node = graph, node
        self.notes: list[str] = []

    @property
    def call(self) -> Call:
        return self.node.params["call"]

    def fuse(self) -> None:
        if isinstance(self.call.partition, Partition):
            self.notes.append("nothing: pl.Partition fixes the list of operands")
        elif self.call.kernel.symbols:
            self.notes.append("nothing: shapes are symbolic")
        else:
            results = [v for v in self.node.results if self.graph.uses(v)]
            for value in results:
                self._try(self._fuse_result, value, "result", self.call.kernel.outputs)
            for value in list(dict.fromkeys(self.node.operands)):
                self._try(self._fuse_operand, value, "operand", self.call.kernel.inputs)
        self._set(replace(self.call, fused=tuple(self.notes)))

    def _try(self, fuse: Any, value: Atom, role: str, params: Any) -> None:
        values = self.node.results if role == "result" else self.node.operands
        if not isinstance(value, Val) or value not in values or 0 in value.shape:
            return
        name = f"{role} {params[values.index(value)].name}"
        reasons: list[str] = []
        try:
            done = fuse(value, reasons)
        except UnsupportedError as error:
            done, reasons = "", [error.what]
        if done:
            self.notes.append(f"{name}: {done}")
        elif reasons:
            self.notes.append(f"not {name}: {reasons[0]}")

    def _set(self, call: Call) -> None:
        self.node.params = {**self.node.params, "call": call}

    # --- results ---

    def _fuse_result(self, value: Val, reasons: list[str]) -> str:
        if not self._is_used_by_equations(value):
            return ""
        kernel, number = self.call.kernel, self.node.results.index(value)
        shown = shown_of(kernel, kernel.outputs[number], "out")
        expression, why = consumers_of(
            self.graph, self.node, value, dims_of(shown.window)
        )
        reasons += why
        if expression is None:
            return ""
        keeps = self._used_outside(value, expression)
        new = with_consumers(kernel, number, expression, keeps)
        outside = sum(v.bytes for v in (value, *expression.results))
        outside += _bytes(expression)
        saved = self._saving(kernel, new, outside, reasons)
        if saved is None:
            return ""
        made = [*expression.results, *([value] if keeps else [])]
        results = self.node.results
        self.node.results = [*results[:number], *made, *results[number + 1 :]]
        self.node.operands = [*self.node.operands, *expression.leaves]
        gone = set(expression.results)
        self.graph.nodes = [
            n for n in self.graph.nodes if n is self.node or not gone & set(n.results)
        ]
        self._finish(new)
        return f"{expression.names}{_reads(expression)}; {saved}"

    def _is_used_by_equations(self, value: Val) -> bool:
        return any(value in node.operands for node in self.graph.nodes)

    def _used_outside(self, value: Val, expression: Expression) -> bool:
        inside = set(expression.nodes)
        users = [n for n in self.graph.nodes if value in n.operands]
        return value in self.graph.outputs or any(n not in inside for n in users)

    # --- operands ---

    def _fuse_operand(self, value: Val, reasons: list[str]) -> str:
        kernel, number = self.call.kernel, self.node.operands.index(value)
        if value not in {v for node in self.graph.nodes for v in node.results}:
            return ""  # an argument
        if self.node.operands.count(value) != 1:
            raise NotFusible("the kernel has it as two operands")
        shown = shown_of(kernel, kernel.inputs[number], "in")
        dies = self.graph.uses(value) == 1
        for shrinking in (True, False):
            expression, why = producers_of(
                self.graph, value, dims_of(shown.window), shrinking
            )
            if not expression.nodes:
                reasons += why
                continue
            new = with_producers(kernel, number, expression)
            outside = value.bytes + _bytes(expression) if dies else 0
            saved = self._saving(kernel, new, outside, reasons)
            if saved is not None:
                operands = self.node.operands
                self.node.operands = [
                    *operands[:number],
                    *expression.leaves,
                    *operands[number + 1 :],
                ]
                self._finish(new)
                return f"{expression.names}{_reads(expression)}; {saved}"
        return ""

    # --- both ---

    def _saving(
        self, old: Kernel, new: Kernel, outside: int, reasons: list[str]
    ) -> str | None:
        """A description of what fusing saves; None if it saves nothing.

        Args:
            old, new: the kernel before and after.
            outside: bytes moved outside the kernel before fusing, but not after.
            reasons: receives the reason if it saves nothing.
        """
        before, after = count(old), count(new)
        moved = before.bytes + outside
        saved = moved - after.bytes
        if saved <= 0:
            reasons.insert(0, f"it would move {short(-saved)}B more")
            return None
        extra = _operations(after) - _operations(before)
        if extra > operations_in(saved) and extra > _operations(before):
            reasons.insert(0, f"it would recompute {extra:,} operations")
            return None
        return f"{short(moved)}B of memory traffic become {short(after.bytes)}B"

    def _finish(self, kernel: Kernel) -> None:
        params = tuple(
            (k, v) for k, v in self.call.compiler_params if k != "allow_input_fusion"
        )
        # The author's cost estimate describes the unfused kernel.
        call = replace(
            self.call, kernel=kernel, compiler_params=params, cost_estimate=None
        )
        self._set(call)
        self.graph.sort()


def _bytes(expression: Expression) -> int:
    return sum(v.bytes for v in expression.leaves if isinstance(v, Val))


def _operations(work: Work) -> int:
    return operations_of(work.flops, work.transcendentals)


def _reads(expression: Expression) -> str:
    types = [v.aval.str_short() for v in expression.leaves]
    return f" of {', '.join(types)}" if types else ""
