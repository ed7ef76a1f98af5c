"""Tile IR to TTIR: the kernel function, its grid, and control flow.

In: a kernel after `passes/lower/promote.py` (programs, loops, values; refs only for
actual memory). Out: an MLIR module as text, and what a launch needs to know. The op
families are in the base classes; `RULES` maps each op to its emitter.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from pallasite.backends.triton import (
    atomics,
    dots,
    four_bits,
    memory,
    prints,
    sorting,
    tiles,
)
from pallasite.backends.triton.called_functions import called_kinds
from pallasite.backends.triton.elementwise import NATIVE
from pallasite.backends.triton.launch import GROUP, STAGES
from pallasite.backends.triton.memory import Number
from pallasite.backends.triton.prints import Prints, print_ops
from pallasite.backends.triton.text import Val, memory_element
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import users_of
from pallasite.ir.roles import Cond, Loop, Pipeline, While
from pallasite.ir.types import DType, TileType
from pallasite.passes.analysis.commuting import only_merged
from pallasite.passes.analysis.fences import fenced
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.intervals import Fact
from pallasite.passes.analysis.memory import accesses_of
from pallasite.passes.analysis.rounding import rounded_away

MAX_PROGRAMS = (1 << 31) - 1
# JAX and XLA align arrays to more than this.
ALIGNED = " {tt.divisibility = 16 : i32}"


@dataclass(frozen=True)
class Scratch:
    """Main memory a kernel needs besides its arrays, for all programs together."""

    shape: tuple[int, ...]
    numpy_dtype: str


def function_name(kernel: Kernel) -> str:
    return re.sub(r"\W", "_", kernel.name, flags=re.ASCII) or "kernel"


def program_grid(kernel: Kernel) -> tuple[int, ...]:
    """The number of programs of a promoted kernel along each of its axes."""
    sizes = Pipeline.of(find_pipeline(kernel)).sizes
    return tuple(n for n in sizes if isinstance(n, int))


def scratch_of(kernel: Kernel) -> tuple[Scratch, ...]:
    """Scratch refs that stay in memory: one part per program, contiguous."""
    programs = prod(program_grid(kernel))
    refs = [op.result.ref for op in _allocs(kernel)]
    return tuple(
        Scratch((_even(programs * ref.size, ref.dtype),), ref.dtype.numpy_name)
        for ref in refs
    )


def _even(size: int, dtype: DType) -> int:
    """With one more for atomics, which swap two bytes at a time."""
    return size + size % 2 if dtype.bits == 8 else size


def _allocs(kernel: Kernel) -> list[Op]:
    return [op for op in walk(kernel.body) if op.name == "alloc"]


def emit(
    kernel: Kernel,
    lines: bool = False,
    shared_bytes: int = 0,
    threads: int = 0,
    amd: bool = False,
) -> str:
    """The TTIR module of a promoted kernel.

    Args:
        kernel: after all passes.
        lines: add source lines as comments.
        shared_bytes: what a program may have.
        threads: of a program.
        amd: whether it is for an AMD GPU.
    """
    emitter = Emitter(kernel, lines)
    emitter.threads, emitter.amd = threads, amd
    names = {op.name for op in walk(kernel.body)}
    if "dot" not in names:  # matmuls need it all, loops half of it for loads in flight
        emitter.gather_bytes = shared_bytes // (2 if names & {"for", "while"} else 1)
    return emitter.module()


class Emitter(Prints):
    """Walks a kernel and emits its module."""

    def __init__(self, kernel: Kernel, lines: bool = False):
        super().__init__()
        self.kernel, self.with_lines = kernel, lines
        accesses = accesses_of(kernel)
        users = users_of(kernel.body)
        self.merged = {m for m, ops in accesses.items() if only_merged(ops, users)}
        self.fenced = fenced(kernel, accesses) - self.merged
        self.rounded_away = rounded_away(kernel)
        self.called = called_kinds(kernel, self.is_rough)
        self.several_from_if = any(
            op.name == "cond" and len(op.results) > 1 for op in walk(kernel.body)
        )
        self.has_dots = any(op.name == "dot" for op in walk(kernel.body))
        self.print_numbers = {op: n for n, op in enumerate(print_ops(kernel))}

    def module(self) -> str:
        kernel = self.kernel
        same = kernel.aliased_results
        params: list[str] = []
        for param in kernel.inputs:
            self.argument(param, same.get(param, param), params)
        if self.print_numbers:  # the log's initial contents, aliased with it
            _pointer("i32", params)
        for param in kernel.outputs:
            self.argument(param, param, params)
        self.scratch = {
            op.result: self.parameter(op.result, params) for op in _allocs(kernel)
        }
        if self.print_numbers:
            self.log = _pointer("i32", params)
        self.out.depth = 2
        self.block(kernel.body)
        self.out.line("tt.return")
        if self.is_better_one_by_one and not self.has_dots:
            params = [p.removesuffix(ALIGNED) for p in params]
        head = f"  tt.func public @{function_name(kernel)}({', '.join(params)})"
        lines = [
            "module {",
            f"{head} attributes {{noinline = false}} {{",
            *self.out.lines,
            "  }",
            *(line for _, *lines in self.functions.values() for line in lines),
            "}",
            "",
        ]
        return "\n".join(lines)

    def argument(self, param: Value, memory: Value, params: list[str]) -> None:
        pointer = self.parameter(param, params)
        self.views[param] = self.array(param.ref, pointer, memory)

    def parameter(self, ref: Value, params: list[str]) -> Val:
        number = len(params)
        elem = memory_element(ref.ref.dtype)
        if elem is None or ref.ref.is_semaphore:
            raise UnsupportedError(
                f"backend 'triton' does not support operands of type {ref.type}",
                [("kernel", self.kernel.name), ("ref", ref.name or number)],
                self.kernel.loc,
                "use another dtype, or interpret=True",
            )
        return _pointer(elem, params)

    # --- walking ---

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.op(op)

    def op(self, op: Op) -> None:
        rule = RULES.get(op.name)
        if rule is None:
            self.refuse(op)
        outer = self.out.origin
        if self.with_lines:
            self.out.origin = op.loc.comment if op.loc else ""
        rule(self, op)
        self.out.origin = outer
        self.facts.note_op(op)
        for value in op.results:
            self.producers[value] = op

    def val_type(self, value: Value, op: Op) -> str:
        if not isinstance(value.type, TileType):
            self.refuse(op, "a loop or branch carries a ref")
        shape, elem = self.layout(value.tile, op)
        return Val("", shape, elem).type

    def bind(self, value: Value, name: str, op: Op) -> None:
        shape, elem = self.layout(value.tile, op)
        self.env[value] = Val(name, shape, elem)

    def bind_results(self, op: Op, name: str) -> None:
        many = len(op.results) > 1
        for number, value in enumerate(op.results):
            self.bind(value, f"{name}#{number}" if many else name, op)

    def result_head(self, op: Op, name: str) -> str:
        if not op.results:
            return ""
        return f"{name}:{len(op.results)} = " if len(op.results) > 1 else f"{name} = "

    def result_types(self, op: Op) -> str:
        return ", ".join(self.val_type(v, op) for v in op.results)

    def yield_(self, values: Sequence[Value], op: Op, word: str = "scf.yield") -> None:
        if values:
            names = ", ".join(self.env[v].name for v in values)
            types = ", ".join(self.val_type(v, op) for v in values)
            self.out.line(f"{word} {names} : {types}")
        elif word != "scf.yield":
            self.out.line(word)

    # --- the grid ---

    def emit_pipeline(self, op: Op) -> None:
        """One program per step; all axes share the first launch dimension."""
        pipeline = Pipeline.of(op)
        grid = [n for n in pipeline.sizes if isinstance(n, int)]
        if pipeline.windows or len(grid) < len(pipeline.sizes):
            self.refuse(op, "a pipeline that is not a grid of programs")
        if prod(grid) > MAX_PROGRAMS:
            self.refuse(op, f"{prod(grid)} programs; CUDA's limit is {MAX_PROGRAMS}")
        rest = self.let("tt.get_program_id x : i32", (), "i32")
        self.program = rest
        if prod(grid) == 0:
            return
        axes = list(range(len(grid)))
        if GROUP in op.attrs:
            tile = rest
            if prod(grid[:-2]) > 1:
                tile = self.scaled("arith.remsi", rest, prod(grid[-2:]))
                rest = self.scaled("arith.divsi", rest, prod(grid[-2:]))
            self.grouped_ids(pipeline, tile, op.attrs[GROUP])
            axes = axes[:-2]
        for axis in reversed(axes):
            size, value = grid[axis], pipeline.ids[axis]
            self.facts.note(value, Fact(0, size - 1))
            if size == 1:
                self.env[value] = self.const(0, "i32")
            elif prod(grid[:axis]) == 1:
                self.env[value] = rest
            else:
                self.env[value] = self.scaled("arith.remsi", rest, size)
                rest = self.scaled("arith.divsi", rest, size)
        if self.print_numbers:
            self.program_number = self.in_grid_order(pipeline)
        self.block(pipeline.body)

    def in_grid_order(self, pipeline: Pipeline) -> Val:
        """The number of this program in grid order, whatever the launch order."""
        number: Number = 0
        for value, size in zip(pipeline.ids, pipeline.grid, strict=True):
            assert size is not None
            number = self.plus(self.times(number, size), self.env[value])
        return self.scalar(number)

    def grouped_ids(self, pipeline: Pipeline, number: Val, group: int) -> None:
        """The last two axes: `group` rows at a time, column by column."""
        (rows, columns), (row, column) = pipeline.grid[-2:], pipeline.ids[-2:]
        assert rows is not None and columns is not None
        self.facts.note(row, Fact(0, rows - 1))
        self.facts.note(column, Fact(0, columns - 1))
        before = self.scaled("arith.divsi", number, group * columns)
        first = self.scaled("arith.muli", before, group)
        within = self.scaled("arith.remsi", number, group * columns)
        height = self.const(group, "i32")
        if rows % group:  # the last group has fewer rows
            left = self.apply("arith.subi", self.const(rows, "i32"), first)
            height = self.apply("arith.minsi", left, height)
        down = self.apply("arith.remsi", within, height)
        self.env[row] = self.apply("arith.addi", first, down)
        self.env[column] = self.apply("arith.divsi", within, height)

    def emit_alloc(self, op: Op) -> None:
        ref, pointer = op.result.ref, self.scratch[op.result]
        offset = self.times(self.program, ref.size, wide=True)
        if isinstance(offset, Val):
            offset = self.convert("arith.extsi", offset, "i64")
        view = self.array(ref, pointer, op.result, offset)
        self.views[op.result] = replace(view, wide=True)

    # --- control flow ---

    def emit_for(self, op: Op) -> None:
        loop = Loop.of(op)
        first, limit, step = (self.env[v] for v in loop.bounds)
        if self.facts.of(loop.step).low < 1:
            self.refuse(op, "the step of a loop must be known to be positive")
        if self.facts.may_overshoot(loop):
            self.refuse(op, "the loop counter may overflow its type in the last step")
        index = loop.index
        if index.tile.dtype.is_signed_int:
            self.facts.note_counter(loop)
        name = self.out.fresh()
        counter = Val(self.out.fresh(), (), first.elem)
        self.env[index] = counter
        head = f"{self.result_head(op, name)}scf.for {counter} = {first} to {limit}"
        head += f" step {step}"
        if loop.carried:
            pairs = []
            for param, value in zip(loop.carried, loop.inits, strict=True):
                self.bind(param, self.out.fresh(), op)
                pairs.append(f"{self.env[param]} = {self.env[value]}")
            head += f" iter_args({', '.join(pairs)}) -> ({self.result_types(op)})"
        self.out.line(f"{head} : {first.elem} {{")
        with self.out.region():
            self.block(loop.body)
            self.yield_(loop.yields, op)
        stages = op.attrs.get(STAGES)
        note = "" if stages is None else f" {{tt.num_stages = {stages} : i32}}"
        self.out.line("}" + note)
        self.bind_results(op, name)

    def emit_while(self, op: Op) -> None:
        loop = While.of(op)
        test, body = loop.condition, loop.body
        if not loop.inits:
            self.refuse(op, "a while loop without carried values")
        name = self.out.fresh()
        pairs = []
        for param, value in zip(test.params, loop.inits, strict=True):
            self.bind(param, self.out.fresh(), op)
            pairs.append(f"{self.env[param]} = {self.env[value]}")
        types = self.result_types(op)
        head = f"{self.result_head(op, name)}scf.while ({', '.join(pairs)})"
        self.out.line(f"{head} : ({types}) -> ({types}) {{")
        with self.out.region():
            self.block(test)
            goes_on = self.env[test.yields[0]]
            self.yield_(test.params, op, f"scf.condition({goes_on})")
        self.out.line("} do {")
        params = []
        for param in body.params:
            self.bind(param, self.out.fresh(), op)
            params.append(f"{self.env[param]}: {self.env[param].type}")
        self.out.line(f"^bb0({', '.join(params)}):")
        with self.out.region():
            self.block(body)
            self.yield_(body.yields, op)
        self.out.line("}")
        self.bind_results(op, name)

    def emit_cond(self, op: Op) -> None:
        name = self.branches(op, 0)
        if name is not None:
            self.bind_results(op, name)

    def branches(self, op: Op, number: int) -> str | None:
        """Branch `number` or a later one, as nested ifs; returns the results' name."""
        cond = Cond.of(op)
        last, here = len(cond.branches) - 1, cond.branches[number]
        if number == last:
            self.block(here)
            if op.results and number == 0:  # the only branch: no `if` around it
                for result, value in zip(op.results, here.yields, strict=True):
                    self.env[result] = self.env[value]
            else:
                self.yield_(here.yields, op)
            return None
        test, swapped = self.branch_test(op, number)
        name = self.out.fresh() if op.results else None
        types = f" -> ({self.result_types(op)})" if op.results else ""
        head = self.result_head(op, name or "")
        self.out.line(f"{head}scf.if {test}{types} {{")
        self.branch(op, number + 1 if swapped else number, swapped)
        other = cond.branches[number if swapped else number + 1]
        if op.results or other.ops or last > number + 1:
            self.out.line("} else {")
            self.branch(op, number if swapped else number + 1, not swapped)
        self.out.line("}")
        if name is not None:  # transposes are moved into it
            yields = [v for b in cond.branches for v in b.yields if v in self.env]
            sizes = [self.written_out(self.env[v]) for v in yields]
            self.out.written_out[name] = min(1 + sum(sizes), sys.maxsize)
        return name

    def branch(self, op: Op, number: int, rest: bool) -> None:
        """One arm of an `if`; `rest`: it stands for all later branches too."""
        with self.out.region():
            if rest and number < len(op.regions) - 1:
                name = self.branches(op, number)
                if name is not None:
                    many = len(op.results) > 1
                    names = [
                        f"{name}#{n}" if many else name for n in range(len(op.results))
                    ]
                    types = self.result_types(op)
                    self.out.line(f"scf.yield {', '.join(names)} : {types}")
            else:
                branch = Cond.of(op).branches[number]
                self.block(branch)
                self.yield_(branch.yields, op)

    def branch_test(self, op: Op, number: int) -> tuple[Val, bool]:
        """The test for branch `number`; True: it is the test for the later ones."""
        which = Cond.of(op).which
        source = self.producers.get(which)
        is_flag = source is not None and source.name == "cast"
        if is_flag and len(op.regions) == 2 and source is not None:
            flag = source.operands[0]
            if flag.tile.dtype.is_bool:
                return self.env[flag], True
        index = self.env[which]
        return self.compare("sle", index, self.like(number, index)), False

    # --- the rest ---

    def emit_assume_multiple(self, op: Op) -> None:
        self.env[op.result] = self.env[op.operands[0]]

    def emit_delay(self, op: Op) -> None:
        """A delay has no effect of its own."""

    def emit_debug_check(self, op: Op) -> None:
        """Checked by the emulation; a device assertion would stop the whole process."""


RULES: dict[str, Callable[[Any, Op], None]] = {
    **dict.fromkeys(NATIVE, Emitter.emit_elementwise),
    **tiles.RULES,
    **sorting.RULES,
    **dots.RULES,
    **memory.RULES,
    **atomics.RULES,
    **four_bits.RULES,
    **prints.RULES,
    "pipeline": Emitter.emit_pipeline,
    "alloc": Emitter.emit_alloc,
    "for": Emitter.emit_for,
    "while": Emitter.emit_while,
    "cond": Emitter.emit_cond,
    "assume_multiple": Emitter.emit_assume_multiple,
    "delay": Emitter.emit_delay,
    "debug_check": Emitter.emit_debug_check,
}


def _pointer(elem: str, params: list[str]) -> Val:
    """One more parameter of the function."""
    name, kind = f"%arg{len(params)}", f"!tt.ptr<{elem}>"
    params.append(f"{name}: {kind}{ALIGNED}")
    return Val(name, (), kind)
