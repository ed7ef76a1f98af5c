"""Proves that a Mosaic module touches no memory outside, whatever its operands hold.

The backend asks libtpu for no checks at run time, because kernels clamp every index
that data decide. Here that is held against the text that libtpu gets: ranges of all
integers are derived from the module alone, by other rules than those of the emitter,
and each index of a load, store, slice and window must be inside by its range. Data are
any number; an op that touches memory and is not known here is a complaint, too.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pallasite import jaxcompat
from pallasite.backends.base import Compiled

DYNAMIC = -(2**63)
PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
# Ops on memory without an index: views of all of it, and what takes slices as they are.
WHOLE = {
    "memref.alloca",
    "tpu.sem_alloc",
    "tpu.memref_squeeze",
    "tpu.memref_reshape",
    "tpu.memref_bitcast",
    "tpu.enqueue_dma",
    "tpu.wait_dma2",
    "tpu.sem_signal",
    "tpu.sem_wait",
    "tpu.sem_read",
    "tpu.sem_barrier",
}
MOST_STEPS = 1 << 12  # of a grid whose steps are tried one by one
ENDS = ("func.return", "scf.yield", "tpu.yield", "scf.condition")


class Range(NamedTuple):
    low: int
    high: int

    def __or__(self, other: "Range") -> "Range":
        return Range(min(self.low, other.low), max(self.high, other.high))

    def __and__(self, other: "Range") -> "Range":
        return Range(max(self.low, other.low), min(self.high, other.high))

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


def outside(compiled: Compiled, devices: int = 1) -> list[str]:
    """Accesses of a compiled kernel, on so many devices, not known to be inside."""
    mlir, scheduled = jaxcompat.mosaic_bindings(), compiled.scheduled
    with mlir.context():
        module = mlir.Module.parse(compiled["mosaic"])
        functions = {op.attributes["sym_name"].value: op for op in module.body}
        refs = [p.ref.shape for p in (*scheduled.inputs, *scheduled.outputs)]
        return not_inside(functions, refs, devices)


def not_inside(
    functions: Mapping[str, Any], shapes: Sequence[Sequence[int]], devices: int = 1
) -> list[str]:
    """Accesses that are not known to be inside.

    Args:
        functions: of a Mosaic module, by name.
        shapes: of its arrays; those that have windows are the last ones.
        devices: that run the program.
    """
    return _Proof(functions, shapes, devices).complaints()


class _Proof:
    """One module; `ranges` are of scalar integers, missing ones of any value."""

    def __init__(
        self,
        functions: Mapping[str, Any],
        shapes: Sequence[Sequence[int]],
        devices: int,
    ):
        self.functions, self.shapes, self.devices = functions, shapes, devices
        self.ranges: dict[Any, Range] = {}
        self.found: dict[str, None] = {}
        self.quiet = 0  # rounds of a loop that are only tried
        attributes = functions["main"].attributes
        self.attributes = {name: attributes[name] for name in attributes}
        given = self.attributes.get("iteration_bounds")
        self.bounds = [] if given is None else _numbers(given)

    def complaints(self) -> list[str]:
        windows = list(self.attributes.get("window_params", ()))
        shapes = self.shapes[len(self.shapes) - len(windows) :]
        for window, shape in zip(windows, shapes, strict=True):
            self.window(window, shape)
        self.function("main")
        return list(self.found)

    def function(self, name: str, step: Sequence[int] | None = None) -> list[Range]:
        """What a function returns, at a step of the grid or at all of them."""
        block = self.functions[name].regions[0].blocks[0]
        ids = [Range(0, self._bound(n) - 1) for n in range(len(self.bounds))]
        ids = ids if step is None else [Range(n, n) for n in step]
        self.ranges |= zip(block.arguments, ids, strict=False)
        return self.block(block)

    def _bound(self, dim: int) -> int:
        n = self.bounds[dim]
        return 2**31 - 1 if n == DYNAMIC else max(n, 1)

    def window(self, window: Any, shape: Sequence[int]) -> None:
        """Each block begins inside its array; what hangs over, Mosaic cuts off."""
        if "transform_indices" not in window:
            return
        sizes, kind = _numbers(window["window_bounds"]), ""
        if "window_kind" in window:
            kind = str(window["window_kind"])
        padding = re.findall(r"\[([^]]*)\]", kind)
        low, high = (_numbers(each) for each in padding) if padding else ([], [])
        name = window["transform_indices"].value
        more = [a + b for a, b in zip(low, high, strict=True)] or [0] * len(sizes)
        rows = zip(sizes, shape, more, strict=True)
        lasts = [
            max(n + pad if kind else -(-n // max(size, 1)), 1) - 1
            for size, n, pad in rows
        ]
        found = self.function(name)
        if not _are_inside(found, lasts) and 0 < prod(self.bounds) <= MOST_STEPS:
            # Orders of blocks by quotients and remainders: at each step by itself.
            steps = [self.function(name, step) for step in np.ndindex(*self.bounds)]
            found = [reduce(Range.__or__, each) for each in zip(*steps, strict=True)]
        if not _are_inside(found, lasts):
            shown = ", ".join(map(str, found))
            self.complain(name, shown, f"0 to {lasts}")

    def complain(self, what: str, index: Range | str, inside: Range | str) -> None:
        if not self.quiet:
            self.found[f"{what}: {index}, not in {inside}"] = None

    # --- ops ---

    def of(self, value: Any) -> Range:
        return self.ranges.get(value, _whole(str(value.type)))

    def block(self, block: Any) -> list[Range]:
        """What its terminator hands on."""
        for op in block.operations:
            if op.operation.name in ENDS:
                return [self.of(v) for v in op.operands]
            self.op(op)
        return []

    def op(self, op: Any) -> None:
        name = op.operation.name
        if name.startswith("scf.") or name == "tpu.region":
            results = getattr(self, name.partition(".")[2] + "_")(op)
            self.ranges |= zip(op.results, results, strict=True)
        elif any(_is_memory(v) for v in op.operands):
            self.memory(name, op)
        elif len(op.results) == 1 and _bits(str(op.results[0].type)):
            result = self.scalar(name, op)
            whole = _whole(str(op.results[0].type))
            inside = result is not None and (result & whole) == result
            self.ranges[op.results[0]] = result if inside and result else whole

    def memory(self, name: str, op: Any) -> None:
        if name in WHOLE:
            return
        values = list(op.operands)
        ref = next(n for n, v in enumerate(values) if _is_memory(v))
        shape, indices = _shape(str(values[ref].type)), values[ref + 1 :]
        if name in ("memref.load", "memref.store"):
            extents = [1] * len(shape)
        elif name in ("vector.load", "tpu.strided_load", "tpu.memref_slice"):
            extents = _shape(str(op.results[0].type))
        elif name in ("vector.store", "tpu.strided_store"):
            stored = next(v for v in values if str(v.type).startswith("vector"))
            extents = _shape(str(stored.type))
            indices = [v for v in indices if v != stored]
        else:
            self.found[f"{name}: an access that is not known here"] = None
            return
        if name.startswith("tpu.strided"):
            strides = _numbers(op.attributes["strides"])
            extents = [(n - 1) * s + 1 for n, s in zip(extents, strides, strict=True)]
        if not prod(shape):
            return
        for dim, (n, index, extent) in enumerate(
            zip(shape, indices, extents, strict=True)
        ):
            found = self.of(index)
            if found.low < 0 or found.high + extent > n:
                what = f"{name} of {values[ref].type}, dimension {dim}"
                self.complain(what, found, Range(0, n - extent))

    def scalar(self, name: str, op: Any) -> Range | None:
        if name == "arith.constant":
            text = str(op.attributes["value"]).split(" : ")[0]
            number = int({"true": 1, "false": 0}.get(text, text))
            return Range(number, number)
        if name == "tpu.iteration_bound":
            (dim,) = _numbers(str(op.attributes["dim"]).split(" : ")[0])
            n = self.bounds[dim]
            return Range(0, 2**31 - 1) if n == DYNAMIC else Range(n, n)
        if name == "tpu.device_id":
            return Range(0, self.devices - 1)
        operands = [self.of(v) for v in op.operands]
        if name == "arith.cmpi":
            return _compared(self.predicate(op), *operands)
        if name == "arith.select":
            test, yes, no = operands
            return no if test.high < 1 else yes if test.low > 0 else yes | no
        if name == "arith.extui":
            return operands[0] if operands[0].low >= 0 else None
        if name == "arith.extsi" and str(op.operands[0].type) == "i1":
            return Range(-operands[0].high, -operands[0].low)
        rule = RULES.get(name)
        return None if rule is None else rule(*operands)

    @staticmethod
    def predicate(op: Any) -> str:
        return PREDICATES[int(str(op.attributes["predicate"]).split()[0])]

    # --- control ---

    def region_(self, op: Any) -> list[Range]:
        return self.block(op.regions[0].blocks[0])

    def if_(self, op: Any) -> list[Range]:
        (test,) = op.operands
        results: list[Range] | None = None
        for region, truth in zip(op.regions, (True, False), strict=True):
            decided = self.of(test)
            impossible = decided.high < 1 if truth else decided.low > 0
            if impossible or not len(region.blocks):
                continue
            saved = dict(self.ranges)
            self.ranges |= self.learned(test, truth)
            handed = self.block(region.blocks[0])
            self.ranges = saved
            old = results or handed
            results = [a | b for a, b in zip(old, handed, strict=True)]
        if results is None:
            return [_whole(str(r.type)) for r in op.results]
        return results

    def learned(self, test: Any, truth: bool) -> dict[Any, Range]:
        """What a branch knows of the two sides of a comparison."""
        op = getattr(test.owner, "opview", None)
        if op is None or op.operation.name != "arith.cmpi":
            return {}
        kind = self.predicate(op)
        x, y = op.operands
        asks = {"sgt": truth, "ne": truth, "eq": not truth}
        zero = kind in asks and self.of(y) == Range(0, 0)
        maker = getattr(x.owner, "opview", None) if zero else None
        if maker is not None and maker.operation.name == "arith.extui":
            (source,) = maker.operands  # a bool as a number
            return self.learned(source, asks[kind])
        if not truth:
            kind = OPPOSITE.get(kind, "")
        if kind in ("sgt", "sge"):
            x, y, kind = y, x, {"sgt": "slt", "sge": "sle"}[kind]
        a, b = self.of(x), self.of(y)
        if kind == "eq":
            return {x: a & b, y: a & b}
        if kind not in ("slt", "sle"):
            return {}
        apart = kind == "slt"
        return {
            x: Range(a.low, min(a.high, b.high - apart)),
            y: Range(max(b.low, a.low + apart), b.high),
        }

    def for_(self, op: Any) -> list[Range]:
        first, limit, _, *carried = op.operands
        body = op.regions[0].blocks[0]
        index = Range(self.of(first).low, max(self.of(limit).high - 1, 0))
        return self.rounds(body, [index], [self.of(v) for v in carried])

    def while_(self, op: Any) -> list[Range]:
        """Nothing is known of what it carries: it goes on as long as data say."""
        before, after = (region.blocks[0] for region in op.regions)
        carried = [_whole(str(a.type)) for a in before.arguments]
        self.ranges |= zip(before.arguments, carried, strict=True)
        _, *handed = self.block(before)
        self.ranges |= zip(after.arguments, handed, strict=True)
        self.block(after)
        return handed

    def rounds(
        self, body: Any, known: list[Range], carried: list[Range]
    ) -> list[Range]:
        """What a loop hands on: what it begins with, if its rounds keep that."""
        self.quiet += 1
        self.ranges |= zip(body.arguments, [*known, *carried], strict=True)
        handed = self.block(body)
        self.quiet -= 1
        types = [str(a.type) for a in body.arguments][len(known) :]
        carried = [
            old if (old | new) == old else _whole(type_)
            for old, new, type_ in zip(carried, handed, types, strict=True)
        ]
        self.ranges |= zip(body.arguments, [*known, *carried], strict=True)
        self.block(body)
        return carried


def _are_inside(found: Sequence[Range], lasts: Sequence[int]) -> bool:
    pairs = zip(found, lasts, strict=True)
    return all(0 <= index.low <= index.high <= last for index, last in pairs)


OPPOSITE = {"slt": "sge", "sge": "slt", "sle": "sgt", "sgt": "sle", "ne": "eq"}


def _compared(kind: str, x: Range, y: Range) -> Range:
    if kind[0] == "u":
        if min(x.low, y.low) < 0:
            return Range(0, 1)
        kind = "s" + kind[1:]
    outcomes = {
        "slt": (x.high < y.low, x.low >= y.high),
        "sle": (x.high <= y.low, x.low > y.high),
        "sgt": (x.low > y.high, x.high <= y.low),
        "sge": (x.low >= y.high, x.high < y.low),
        "eq": (x.low == x.high == y.low == y.high, x.high < y.low or y.high < x.low),
        "ne": (x.high < y.low or y.high < x.low, x.low == x.high == y.low == y.high),
    }
    always, never = outcomes[kind]
    return Range(1, 1) if always else Range(0, 0) if never else Range(0, 1)


def _products(x: Range, y: Range) -> Range:
    ends = [a * b for a in x for b in y]
    return Range(min(ends), max(ends))


def _quotient(x: Range, y: Range) -> Range | None:
    if y.low <= 0:
        return None
    ends = [int(abs(a) // b) * (1 if a >= 0 else -1) for a in x for b in y]
    return Range(min(ends), max(ends))


def _remainder(x: Range, y: Range) -> Range | None:
    if y.low <= 0:
        return None
    if y.low == y.high and x.low >= 0 and x.low // y.low == x.high // y.low:
        return Range(x.low % y.low, x.high % y.low)
    most = y.high - 1
    return Range(max(-most, min(x.low, 0)), min(most, max(x.high, 0)))


def _and(x: Range, y: Range) -> Range | None:
    """With a number that is not negative, at most that; else rounded down by it."""
    caps = [r.high for r in (x, y) if r.low >= 0]
    if caps:
        masks = [r.low for r in (x, y) if r.low == r.high and r.low < 0]
        low = 0
        if masks and min(x.low, y.low) == masks[0]:
            other = y if x.low == masks[0] else x
            low = max(0, other.low + masks[0] + 1)
        return Range(low, min(caps))
    return None


def _or(x: Range, y: Range) -> Range | None:
    """Of two numbers; of others that are not negative, below the next power of two."""
    if x.low == x.high and y.low == y.high:
        return Range(x.low | y.low, x.low | y.low)
    if min(x.low, y.low) < 0:
        return None
    return Range(max(x.low, y.low), (1 << max(x.high, y.high).bit_length()) - 1)


def _xor(x: Range, y: Range) -> Range | None:
    if x.low == x.high and y.low == y.high:
        return Range(x.low ^ y.low, x.low ^ y.low)
    either = _or(x, y)
    return None if either is None else Range(0, either.high)


def _shifted(x: Range, by: Range, left: bool) -> Range | None:
    if by.low != by.high or not 0 <= by.low < 32:
        return None
    if left:
        return Range(x.low << by.low, x.high << by.low)
    return Range(x.low >> by.low, x.high >> by.low)


def _least_unsigned(x: Range, y: Range) -> Range | None:
    """A negative number is a large one: the other is less."""
    known = [r for r in (x, y) if r.low >= 0]
    if not known:
        return None
    low = min(x.low, y.low) if len(known) == 2 else 0
    return Range(low, min(r.high for r in known))


def _most_unsigned(x: Range, y: Range) -> Range | None:
    if x.low < 0 or y.low < 0:
        return None
    return Range(max(x.low, y.low), max(x.high, y.high))


RULES = {
    "arith.addi": lambda x, y: Range(x.low + y.low, x.high + y.high),
    "arith.subi": lambda x, y: Range(x.low - y.high, x.high - y.low),
    "arith.muli": _products,
    "arith.divsi": _quotient,
    "arith.remsi": _remainder,
    "arith.maxsi": lambda x, y: Range(max(x.low, y.low), max(x.high, y.high)),
    "arith.minsi": lambda x, y: Range(min(x.low, y.low), min(x.high, y.high)),
    "arith.maxui": _most_unsigned,
    "arith.minui": _least_unsigned,
    "arith.andi": _and,
    "arith.ori": _or,
    "arith.xori": _xor,
    "arith.shli": lambda x, y: _shifted(x, y, True),
    "arith.shrsi": lambda x, y: _shifted(x, y, False),
    "arith.shrui": lambda x, y: _shifted(x, y, False) if x.low >= 0 else None,
    "arith.index_cast": lambda x: x,
    "arith.extsi": lambda x: x,
    "arith.trunci": lambda x: x,
    "tpu.assume_multiple": lambda x: x,
}


def _is_memory(value: Any) -> bool:
    return str(value.type).startswith("memref")


@cache
def _bits(type_: str) -> int:
    """Of a scalar integer; 0 of anything else."""
    found = re.fullmatch(r"i(\d+)", type_)
    return int(found[1]) if found else 64 if type_ == "index" else 0


@cache
def _whole(type_: str) -> Range:
    bits = _bits(type_) or 64
    return Range(0, 1) if bits == 1 else Range(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@cache
def _shape(type_: str) -> tuple[int, ...]:
    inner = re.match(r"(?:memref|vector)<((?:\d+x)*)", type_)
    assert inner is not None and "?" not in type_, type_
    return tuple(int(n) for n in inner[1].split("x") if n)


def _numbers(attribute: Any) -> list[int]:
    text = str(attribute)
    text = text.split(":")[-1] if "array<" in text else text
    return [int(n) for n in re.findall(r"-?\d+", text)]
