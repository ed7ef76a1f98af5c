"""The printed form of a kernel: deterministic, exact, and readable.

`print_kernel(kernel)` is the text that identifies a kernel (cache key, dumps, golden
tests); `parse_kernel(text)` is its exact inverse. `README.md` describes the grammar;
the parser is `parse.py`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from pallasite.errors import InternalError
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    BlockDim,
    Gather,
    Index,
    Kernel,
    Loc,
    Op,
    Span,
    Value,
    Window,
    dynamic_count,
)
from pallasite.ir.opdef import table
from pallasite.ir.parse import parse_kernel as parse_kernel
from pallasite.ir.types import DType, RefType, TileType, size_text

_IMPLIED = frozenset({"index", "mask", "other"})  # shown by the syntax of indexed ops
_TYPE, _NOTHING = frozenset({"type"}), frozenset[str]()
_STORED = {"store": 1, "atomic_rmw": 1, "atomic_cas": 2}  # values written

_NOT_IN_NAMES = re.compile(r"\W", re.ASCII)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def print_kernel(kernel: Kernel, locs: bool = False) -> str:
    """The text of a kernel, ending in a newline; with source lines if `locs`."""
    return _Printer(locs).kernel(kernel)


def print_block(block: Block, locs: bool = False) -> str:
    """The text of a single block; outer values are named on first use."""
    printer = _Printer(locs)
    printer.block("block", block, "")
    return "\n".join(printer.lines)


def print_op(
    op: Op, within: Kernel | None = None, locs: bool = False, regions: bool = True
) -> str:
    """The text of one op, with the names it has in `within` if that is given."""
    printer = _Printer(locs)
    if within is not None:
        printer.kernel(within)
        printer.lines.clear()
    printer.op(op, "", regions)
    return "\n".join(printer.lines)


def region_labels(op_name: str, count: int) -> Sequence[str]:
    """The labels of an op's regions in the text (for readers only)."""
    if op_name == "pipeline":
        return (*("map",) * (count - 1), "body")
    if op_name == "while":
        return (*("test",) * (count - 1), "body")
    return ("branch" if op_name == "cond" else "body",) * count


class _Printer:
    """Holds the names assigned and the lines printed so far."""

    def __init__(self, locs: bool):
        self.locs = locs
        self.lines: list[str] = []
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set()
        self.unnamed = 0
        # Keyed by id: hashing a type is slow, and the kernel keeps the type alive.
        self.types: dict[int, str] = {}

    def kernel(self, kernel: Kernel) -> str:
        name = kernel.name
        name = name if _PLAIN_NAME.fullmatch(name) else json.dumps(name)
        parts = [f"kernel @{name}({self.params(kernel.params)})"]
        parts.append(f"outputs {kernel.num_outputs}")
        if kernel.aliases:
            pairs = ", ".join(f"{i}: {o}" for i, o in kernel.aliases)
            parts.append(f"aliases {{{pairs}}}")
        if kernel.level != "tile":
            parts.append(f"level {kernel.level}")
        self.lines.append(" ".join(parts) + self.loc(kernel.loc) + " {")
        self.ops(kernel.body, "  ")
        self.lines.append("}\n")
        return "\n".join(self.lines)

    def block(self, label: str, block: Block, indent: str) -> None:
        head = f"{indent}{label} ({self.params(block.params)}) {{"
        if block.ops:
            self.lines.append(head)
            self.ops(block, indent + "  ")
            self.lines.append(indent + "}")
        elif block.yields:
            self.lines.append(f"{head} yield {self.values(block.yields)} }}")
        else:
            self.lines.append(head + "}")

    def ops(self, block: Block, indent: str) -> None:
        for op in block.ops:
            self.op(op, indent, True)
        if block.yields:
            self.lines.append(f"{indent}yield {self.values(block.yields)}")

    def op(self, op: Op, indent: str, regions: bool) -> None:
        sugared = _is_indexed(op.name) and _index_fits(op)
        # Operands first: an op cannot use a value that it defines itself.
        operands = self.indexed(op) if sugared else self.values(op.operands)
        line = indent
        if op.results:
            line += self.params(op.results) + " = "
        line += f"{op.name} {operands}" if operands else op.name
        if op.attrs:
            attrs = self.attrs(op, _IMPLIED if sugared else _implied_type(op))
            line += f" {{{attrs}}}" if attrs else ""
        self.lines.append(line + self.loc(op.loc))
        if op.regions and regions:
            labels = region_labels(op.name, len(op.regions))
            for label, region in zip(labels, op.regions, strict=True):
                self.block(label, region, indent + "  ")

    def indexed(self, op: Op) -> str:
        """`%ref[:, %i:+8, gather %t] = %value mask %m other %o`."""
        access = Access.of(op)
        pending = iter(access.index_operands)
        entries: list[str] = []
        shape = access.ref.type.shape
        for d, entry in enumerate(access.index):
            if isinstance(entry, Gather):
                entries.append("gather " + self.name(next(pending)))
                continue
            start = entry.start
            first = size_text(start) if start is not None else self.name(next(pending))
            if isinstance(entry, At):
                entries.append(first)
            elif start == 0 and entry.stride == 1 and shape[d : d + 1] == (entry.size,):
                entries.append(":")
            else:
                stride = f":{entry.stride}" if entry.stride != 1 else ""
                entries.append(f"{first}:+{size_text(entry.size)}{stride}")
        text = f"{self.name(access.ref)}[{', '.join(entries)}]"
        stored = [v for v in (access.compare, access.value) if v is not None]
        text += f" = {self.values(stored)}" if stored else ""
        text += f" mask {self.name(access.mask)}" if access.mask else ""
        return text + (f" other {self.name(access.other)}" if access.other else "")

    def attrs(self, op: Op, hidden: frozenset[str]) -> str:
        row = table().get(op.name)
        order = row.attrs if row else ()
        keys = [k for k in order if k in op.attrs and k not in hidden]
        if len(order) < len(op.attrs) or not op.attrs.keys() <= set(order):
            keys += sorted(k for k in op.attrs if k not in order and k not in hidden)
        return ", ".join(f"{k}={attr_text(op.attrs[k])}" for k in keys)

    def loc(self, loc: Loc | None) -> str:
        if not self.locs or loc is None:
            return ""
        function = f" in {json.dumps(loc.function)}" if loc.function else ""
        return f" loc({json.dumps(loc.file)}:{loc.line}{function})"

    def params(self, values: Sequence[Value]) -> str:
        return ", ".join([f"{self.name(v)}: {self.type(v)}" for v in values])

    def values(self, values: Sequence[Value]) -> str:
        return ", ".join([self.name(v) for v in values])

    def type(self, value: Value) -> str:
        text = self.types.get(id(value.type))
        if text is None:
            text = self.types[id(value.type)] = str(value.type)
        return text

    def name(self, value: Value) -> str:
        return self.names.get(value) or self.new_name(value)

    def new_name(self, value: Value) -> str:
        """The hint, made unique by a number; only a number where there is no hint."""
        if value.name:
            base = "%" + _NOT_IN_NAMES.sub("_", value.name)
            if base[1].isdigit():
                base = "%_" + base[1:]
            name, suffix = base, 0
            while name in self.taken:
                suffix += 1
                name = f"{base}_{suffix}"
            self.taken.add(name)
        else:
            name = f"%{self.unnamed}"
            self.unnamed += 1
        self.names[value] = name
        return name


def _implied_type(op: Op) -> frozenset[str]:
    """Whether `type` is redundant because the result's type says it already."""
    shown = len(op.results) == 1 and op.attrs.get("type") == op.results[0].type
    return _TYPE if shown else _NOTHING


def _is_indexed(name: str) -> bool:
    row = table().get(name)
    return row is not None and row.indexed


def _index_fits(op: Op) -> bool:
    """Whether the operand count matches the index and the flags."""
    index: Any = op.attrs.get("index")
    if not isinstance(index, tuple) or not op.operands:
        return False
    if not all(isinstance(e, (At, Span, Gather)) for e in cast(tuple[Any, ...], index)):
        return False
    flags = bool(op.attrs.get("mask")) + bool(op.attrs.get("other"))
    expected = 1 + _STORED.get(op.name, 0) + dynamic_count(cast(Index, index)) + flags
    return len(op.operands) == expected


def attr_text(value: object) -> str:
    """The text of an attribute: plain data, types, index entries and windows."""
    write = _WRITERS.get(type(value))
    if write is not None:
        return write(value)
    if isinstance(value, np.generic):
        return attr_text(cast(object, value.item()))
    if isinstance(value, int):  # a subclass, such as JAX's int with a dtype
        return f"{value:d}"
    if isinstance(value, (tuple, list)):  # also named tuples: printed as plain ones
        return _tuple_text(tuple(cast(Sequence[Any], value)))
    if isinstance(value, Mapping):
        return _dict_text(cast(Mapping[str, Any], value))
    if hasattr(value, "__jax_array__"):  # a symbolic size
        return size_text(cast(Any, value))
    raise InternalError(
        "an attribute has no text form",
        [("value", repr(value))],
        fix="attributes are numbers, strings, types, index entries and tuples of them",
    )


def _tuple_text(values: tuple[Any, ...]) -> str:
    inner = ", ".join([attr_text(v) for v in values])
    return f"({inner},)" if len(values) == 1 else f"({inner})"


def _dict_text(values: Mapping[str, Any]) -> str:
    inner = ", ".join([f"{k}={attr_text(values[k])}" for k in sorted(values)])
    return f"{{{inner}}}"


def _tile_text(type_: TileType) -> str:
    # `f32` alone is the dtype; a scalar tile type needs its brackets.
    if type_.shape:
        return str(type_)
    layout = "" if type_.layout is None else f" {type_.layout}"
    return f"{type_.dtype}[]{layout}"


def _window_text(window: Window) -> str:
    parts = [f"{window.mode}[{', '.join(map(_dim_text, window.dims))}]"]
    if window.space != "block":
        parts.append(f"space {window.space}")
    if window.fill is not None:
        parts.append(f"fill {attr_text(window.fill)}")
    if window.buffers is not None:
        parts.append(f"buffers {window.buffers}")
    return " ".join(parts)


def _dim_text(dim: BlockDim) -> str:
    kind = "" if dim.kind == "blocked" else dim.kind + " "
    low, high = dim.padding
    padding = f" pad ({low}, {high})" if (low, high) != (0, 0) else ""
    return f"{kind}{size_text(dim.size)}{padding}"


def _at_text(entry: At) -> str:
    return f"at({attr_text(entry.start)})"


def _span_text(entry: Span) -> str:
    return f"span({attr_text(entry.start)}, {size_text(entry.size)}, {entry.stride:d})"


_WRITERS: dict[type, Callable[[Any], str]] = {
    bool: repr,
    int: repr,
    float: repr,
    type(None): repr,
    str: json.dumps,
    tuple: _tuple_text,
    dict: _dict_text,
    DType: str,
    TileType: _tile_text,
    RefType: str,
    At: _at_text,
    Span: _span_text,
    Gather: lambda _: "gather()",
    Window: _window_text,
}
