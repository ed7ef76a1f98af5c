"""Runs TTIR on numpy: what the emitted code means, on a machine without a GPU.

`parse(text)` reads and verifies a module with jaxlib's Triton bindings; `run` executes
it for every program of a grid, in an order one can shuffle. Out-of-bounds pointers are
an error; masked-off elements without a default are garbage on purpose.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from pallasite.backends.triton import elementwise
from pallasite.ir.opdef import table

DTYPES = {
    "i1": np.dtype(bool),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f8E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "f8E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
}


def parse(text: str) -> Any:
    """The verified module of a text (the caller keeps its context alive with it)."""
    context = ir.Context()
    context.allow_unregistered_dialects = True  # for gpu.barrier
    dialect.register_dialect(context)
    with context, ir.Location.unknown():
        module = ir.Module.parse(text)
        assert module.operation.verify()
    return module


def verify_ttir(text: str) -> None:
    """Raises if Triton's own verifier refuses the module."""
    parse(text)


@dataclass
class Pointer:
    buffer: np.ndarray  # one-dimensional
    offset: Any


@dataclass
class Node:
    """One op, read once: asking the bindings costs more than running it."""

    name: str
    operands: list[int]
    results: list[int]
    layouts: list[tuple[tuple[int, ...], Any]]
    types: list[str]
    attributes: dict[str, Any]
    regions: list["Body"]


@dataclass
class Body:
    params: list[int]
    nodes: list[Node]


class _Reader:
    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def body(self, region: Any) -> Body:
        (block,) = region.blocks
        params = [self.number(v) for v in block.arguments]
        return Body(params, [self.node(op.operation) for op in block.operations])

    def node(self, op: Any) -> Node:
        return Node(
            op.name,
            [self.number(v) for v in op.operands],
            [self.number(v) for v in op.results],
            [_layout(v.type) for v in op.results],
            [str(v.type) for v in op.results],
            _attributes(op),
            [self.body(r) for r in op.regions if list(r.blocks)],
        )


def _attributes(op: Any) -> dict[str, Any]:
    if op.name == "arith.constant":
        value = op.attributes["value"]
        if _layout(op.results[0].type)[0]:
            value = ir.DenseElementsAttr(value).get_splat_value()
        known = {"true": 1, "false": 0}.get(str(value))
        return {"value": value.value if known is None else known}
    readers = {
        "axis": lambda a: a.value,
        "reverse": lambda a: a.value,
        "predicate": lambda a: a.value,
        "order": lambda a: [int(i) for i in a],
        "symbol": lambda a: ir.StringAttr(a).value,
        "asm_string": lambda a: ir.StringAttr(a).value,
        "atomic_rmw_op": int,
        "callee": lambda a: ir.FlatSymbolRefAttr(a).value,
    }
    found = {name: op.attributes[name] for name in readers if name in op.attributes}
    return {name: readers[name](value) for name, value in found.items()}


def run(text: str, arrays: Sequence[np.ndarray], programs: int, seed: int = 0) -> None:
    """Execute the module's function; `arrays` are changed in place."""
    module = parse(text)
    functions = _functions(module)
    (body,) = (f for name, f in functions.items() if _is_public(module, name))
    order = np.random.default_rng(seed).permutation(programs)
    flat = [a.reshape(-1) for a in arrays]
    buffers = [_packed(a) if _shares_bytes(a) else a for a in flat]
    buffers = [b.view(np.int8) if b.dtype == bool else b for b in buffers]
    buffers = [_signed(b) for b in buffers]
    for program in order:
        pointers = [Pointer(b, np.int64(0)) for b in buffers]
        _Machine(int(program), seed, functions).block(body, pointers)
    for array, buffer in zip(flat, buffers, strict=True):
        if _shares_bytes(array):
            array[...] = _unpacked(buffer, array)


def _functions(module: Any) -> dict[str, Body]:
    reader = _Reader()
    return {
        ir.StringAttr(f.attributes["sym_name"]).value: reader.body(f.regions[0])
        for f in module.body.operations
    }


def _is_public(module: Any, name: str) -> bool:
    return f"tt.func public @{name}(" in str(module)


def _shares_bytes(x: np.ndarray) -> bool:
    return x.dtype.name in ("int4", "uint4")


def _packed(x: np.ndarray) -> np.ndarray:
    """Two numbers in each byte, the first in its lower half."""
    halves = np.zeros(x.size + x.size % 2, np.uint8)
    halves[: x.size] = x.astype(np.int8).view(np.uint8) & 15
    return (halves[::2] | halves[1::2] << 4).view(np.int8)


def _unpacked(buffer: np.ndarray, like: np.ndarray) -> np.ndarray:
    both = buffer.view(np.uint8)
    halves = np.stack([both & 15, both >> 4], 1).reshape(-1)[: like.size]
    if like.dtype.name == "int4":
        halves = (halves ^ 8).astype(np.int8) - 8
    return halves.astype(like.dtype)


def _signed(x: np.ndarray) -> np.ndarray:
    return x.view(f"int{8 * x.itemsize}") if x.dtype.kind == "u" else x


def _unsigned(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x if x.dtype == bool else x.view(f"uint{8 * x.dtype.itemsize}")


class _Machine:
    """One program."""

    def __init__(self, program: int, seed: int, functions: dict[str, Body]):
        self.program, self.functions = program, functions
        self.values: dict[int, Any] = {}
        self.garbage = np.random.default_rng([seed, program])

    def block(self, block: Body, arguments: Sequence[Any]) -> list[Any]:
        """Run a block; the operands of its terminator."""
        self.values.update(zip(block.params, arguments, strict=True))
        for op in block.nodes:
            operands = [self.values[v] for v in op.operands]
            if op.name in TERMINATORS:
                return operands
            results = self.step(op, operands)
            for n, (value, result) in enumerate(zip(op.results, results, strict=True)):
                self.values[value] = self.shaped(result, op, n)
        return []

    def shaped(self, result: Any, op: Node, number: int) -> Any:
        shape, dtype = op.layouts[number]
        if isinstance(result, Pointer):
            result.offset = np.broadcast_to(np.asarray(result.offset, np.int64), shape)
            return result
        result = np.asarray(result)
        if result.dtype != dtype:
            if result.dtype.kind == "u" and result.dtype.itemsize == dtype.itemsize:
                result = result.view(dtype)
            else:
                assert result.dtype.kind == "f", (op, result.dtype, dtype)
                result = result.astype(dtype)
        # Inside a reduction, scalars are rows: the region runs on all of them at once.
        assert result.shape == shape or not shape, (op, result.shape, shape)
        return result

    def step(self, op: Node, operands: list[Any]) -> Sequence[Any]:
        method = getattr(self, "do_" + op.name.replace(".", "_"), None)
        with np.errstate(all="ignore"):
            if method is not None:
                return method(op, *operands)
            return [ARITHMETIC[op.name](*map(np.asarray, operands))]

    # --- constants and shapes ---

    def do_arith_constant(self, op: Node) -> Any:
        shape, dtype = op.layouts[0]
        return [np.full(shape, op.attributes["value"], dtype)]

    def do_tt_get_program_id(self, op: Node) -> Any:
        return [np.int32(self.program)]

    def do_tt_make_range(self, op: Node) -> Any:
        return [np.arange(*op.layouts[0][0], dtype=np.int32)]

    def do_tt_splat(self, op: Node, x: Any) -> Any:
        return [self.reshaped(op, x, np.broadcast_to)]

    do_tt_broadcast = do_tt_splat

    def do_tt_reshape(self, op: Node, x: Any) -> Any:
        return [self.reshaped(op, x, np.reshape)]

    do_tt_expand_dims = do_tt_reshape
    do_tt_unsplat = do_tt_reshape

    def reshaped(self, op: Node, x: Any, how: Callable[..., Any]) -> Any:
        shape, _ = op.layouts[0]
        if isinstance(x, Pointer):
            return Pointer(x.buffer, how(x.offset, shape))
        return how(x, shape)

    def do_tt_join(self, op: Node, x: Any, y: Any) -> Any:
        return [np.stack([x, y], -1)]

    def do_tt_split(self, op: Node, x: Any) -> Any:
        return [x[..., 0], x[..., 1]]

    def do_tt_trans(self, op: Node, x: Any) -> Any:
        return [np.transpose(x, op.attributes["order"])]

    def do_tt_gather(self, op: Node, x: Any, index: Any) -> Any:
        axis = op.attributes["axis"]
        assert np.all((index >= 0) & (index < x.shape[axis])), "gather out of range"
        return [np.take_along_axis(x, index.astype(np.int64), axis)]

    # --- memory ---

    def do_tt_addptr(self, op: Node, pointer: Any, offset: Any) -> Any:
        return [Pointer(pointer.buffer, pointer.offset + offset.astype(np.int64))]

    def do_tt_load(self, op: Node, pointer: Any, mask: Any = None, other: Any = None):
        self.check(pointer, mask, op)
        if mask is None:
            return [pointer.buffer[pointer.offset]]
        safe = np.where(mask, pointer.offset, 0)
        garbage = self.garbage.integers(1, 100, np.shape(mask))
        filler = garbage.astype(pointer.buffer.dtype) if other is None else other
        if not pointer.buffer.size:
            return [filler]
        return [np.where(mask, pointer.buffer[safe], filler)]

    def do_tt_store(self, op: Node, pointer: Any, value: Any, mask: Any = None):
        self.check(pointer, mask, op)
        where = np.ones(np.shape(value), bool) if mask is None else mask
        pointer.buffer[np.asarray(pointer.offset)[where]] = np.asarray(value)[where]
        return []

    def check(self, pointer: Pointer, mask: Any, op: Node) -> None:
        inside = (pointer.offset >= 0) & (pointer.offset < pointer.buffer.size)
        inside = inside if mask is None else inside | ~mask
        assert np.all(inside), f"out of bounds: {op}"

    def do_tt_atomic_rmw(self, op: Node, pointer: Any, value: Any, mask: Any = None):
        self.check(pointer, mask, op)
        combine = ATOMICS[op.attributes["atomic_rmw_op"]]
        old = np.zeros(np.shape(value), pointer.buffer.dtype)
        where = np.broadcast_to(True if mask is None else mask, np.shape(value))
        offsets = np.broadcast_to(pointer.offset, np.shape(value))
        for position in np.ndindex(np.shape(value)):
            if where[position]:
                at = offsets[position]
                old[position] = pointer.buffer[at]
                pointer.buffer[at] = combine(
                    pointer.buffer[at], np.asarray(value)[position]
                )
        return [old]

    def do_tt_atomic_cas(self, op: Node, pointer: Any, compare: Any, value: Any):
        self.check(pointer, None, op)
        old = np.zeros(np.shape(value), pointer.buffer.dtype)
        for position in np.ndindex(np.shape(value)):
            at = np.asarray(pointer.offset)[position]
            old[position] = pointer.buffer[at]
            if old[position] == np.asarray(compare)[position]:
                pointer.buffer[at] = np.asarray(value)[position]
        return [old]

    def do_gpu_barrier(self, op: Node) -> Any:
        return []

    # --- numbers ---

    def do_arith_cmpi(self, op: Node, x: Any, y: Any) -> Any:
        kind = op.attributes["predicate"]
        if kind >= 6:
            x, y = _unsigned(x), _unsigned(y)
        return [COMPARE_INT[kind](x, y)]

    def do_arith_cmpf(self, op: Node, x: Any, y: Any) -> Any:
        kind = op.attributes["predicate"]
        nan = np.isnan(x.astype(np.float64)) | np.isnan(y.astype(np.float64))
        if kind in (7, 14):  # ord, uno
            return [nan if kind == 14 else ~nan]
        ordered = {1: "eq", 2: "gt", 3: "ge", 4: "lt", 5: "le", 6: "ne"}
        if kind in ordered:
            return [COMPARE[ordered[kind]](x, y) & ~nan]
        assert kind == 13, op  # une
        return [(x != y) | nan]

    def convert(self, op: Node, x: Any) -> Any:
        dtype = op.layouts[0][1]
        if op.name == "arith.extui" or op.name == "arith.uitofp":
            x = _unsigned(x)
        if op.name == "arith.extui" and x.dtype != bool:
            return [x.astype(f"uint{8 * dtype.itemsize}").view(dtype)]
        if op.name == "arith.fptoui":
            return [x.astype(np.float64).astype(np.uint64).astype(dtype)]
        return [x.astype(dtype)]

    do_arith_extui = do_arith_extsi = do_arith_trunci = convert
    do_arith_sitofp = do_arith_uitofp = do_arith_fptosi = do_arith_fptoui = convert
    do_arith_extf = do_arith_truncf = do_tt_fp_to_fp = convert

    def do_tt_bitcast(self, op: Node, x: Any) -> Any:
        if isinstance(x, Pointer):
            dtype = DTYPES[re.findall(r"!tt.ptr<(\w+)>", op.types[0])[0]]
            return [Pointer(x.buffer.view(dtype), x.offset)]
        return [np.asarray(x).view(op.layouts[0][1])]

    def do_tt_extern_elementwise(self, op: Node, *operands: Any) -> Any:
        return [_external(op.attributes["symbol"])(*operands)]

    def do_tt_call(self, op: Node, *operands: Any) -> Any:
        return self.block(self.functions[op.attributes["callee"]], operands)

    def do_tt_elementwise_inline_asm(self, op: Node, *operands: Any) -> Any:
        result = ASSEMBLY[op.attributes["asm_string"]](*operands)
        return result if isinstance(result, tuple) else [result]

    def do_tt_dot(self, op: Node, x: Any, y: Any, acc: Any) -> Any:
        wide = np.int64 if acc.dtype.kind == "i" else np.float64
        assert min(*x.shape[-2:], y.shape[-1]) >= 16, "too small for a tensor core"
        product = np.matmul(x.astype(wide), y.astype(wide)) + acc.astype(wide)
        return [product.astype(acc.dtype)]

    # --- regions ---

    def do_tt_reduce(self, op: Node, *operands: Any) -> Any:
        axis = op.attributes["axis"]
        slices = [list(np.moveaxis(x, axis, 0)) for x in operands]
        total = [s[0] for s in slices]
        for row in zip(*(s[1:] for s in slices), strict=True):
            total = self.block(op.regions[0], [*total, *row])
        return total

    def do_tt_scan(self, op: Node, *operands: Any) -> Any:
        axis = op.attributes["axis"]
        reverse = op.attributes["reverse"]
        slices = [list(np.moveaxis(x, axis, 0)) for x in operands]
        slices = [s[::-1] for s in slices] if reverse else slices
        total = [s[0] for s in slices]
        rows = [total]
        for row in zip(*(s[1:] for s in slices), strict=True):
            total = self.block(op.regions[0], [*total, *row])
            rows.append(total)
        rows = rows[::-1] if reverse else rows
        return [np.stack(r, axis) for r in zip(*rows, strict=True)]

    def do_scf_for(self, op: Node, first: Any, limit: Any, step: Any, *carried: Any):
        assert step > 0
        values = list(carried)
        for i in range(int(first), int(limit), int(step)):
            index = np.asarray(i, np.asarray(first).dtype)
            values = self.block(op.regions[0], [index, *values])
        return values

    def do_scf_while(self, op: Node, *carried: Any) -> Any:
        values = list(carried)
        while True:
            goes_on, *values = self.block(op.regions[0], values)
            if not goes_on:
                return values
            values = self.block(op.regions[1], values)

    def do_scf_if(self, op: Node, condition: Any) -> Any:
        number = 0 if condition else 1
        if number == len(op.regions):
            return []
        return self.block(op.regions[number], [])


TERMINATORS = (
    "scf.yield",
    "scf.condition",
    "tt.return",
    "tt.reduce.return",
    "tt.scan.return",
)


def _layout(type_: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and numpy dtype of an MLIR type (dtype None for pointers)."""
    try:
        tensor = ir.RankedTensorType(type_)
    except (ValueError, TypeError):
        return (), DTYPES.get(str(type_))
    return tuple(tensor.shape), DTYPES.get(str(tensor.element_type))


def _bits(function: Callable[..., Any]) -> Callable[..., Any]:
    def on_unsigned(*operands: Any) -> Any:
        dtype = np.asarray(operands[0]).dtype
        return np.asarray(function(*map(_unsigned, operands))).view(dtype)

    return on_unsigned


def _select(which: Any, yes: Any, no: Any) -> Any:
    if isinstance(yes, Pointer):
        return yes if which else no
    return np.where(which, yes, no)


def _truncated(divide: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, y: Any) -> Any:
        assert np.all(y != 0), "division by zero"
        return divide(x, y)

    return apply


COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
COMPARE_INT = [COMPARE[k] for k in ("eq", "ne", "lt", "le", "gt", "ge")]
COMPARE_INT += [COMPARE[k] for k in ("lt", "le", "gt", "ge")]

ARITHMETIC: dict[str, Callable[..., Any]] = {
    "arith.addf": np.add,
    "arith.addi": np.add,
    "arith.subf": np.subtract,
    "arith.subi": np.subtract,
    "arith.mulf": np.multiply,
    "arith.muli": np.multiply,
    "arith.divf": np.divide,
    "tt.precise_divf": np.divide,
    "arith.divsi": _truncated(lambda x, y: table()["div"].meaning(x, y)),
    "arith.remsi": _truncated(lambda x, y: table()["rem"].meaning(x, y)),
    "arith.divui": _bits(lambda x, y: x // np.maximum(y, 1)),
    "arith.remui": _bits(lambda x, y: x % np.maximum(y, 1)),
    "arith.negf": np.negative,
    "math.absf": np.abs,
    "math.absi": np.abs,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.maxui": _bits(np.maximum),
    "arith.minui": _bits(np.minimum),
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": _bits(np.left_shift),
    "arith.shrui": _bits(np.right_shift),
    "arith.shrsi": np.right_shift,
    "arith.select": _select,
    "math.floor": np.floor,
    "math.ceil": np.ceil,
    "math.sqrt": np.sqrt,
    "tt.precise_sqrt": np.sqrt,
    "math.rsqrt": lambda x: 1 / np.sqrt(x),
    "math.exp": np.exp,
    "math.exp2": np.exp2,
}
# By the numbers of Triton's RMWOp.
ATOMICS: dict[int, Callable[..., Any]] = {
    1: np.bitwise_and,
    2: np.bitwise_or,
    3: np.bitwise_xor,
    4: np.add,
    5: np.add,
    6: np.maximum,
    7: np.minimum,
    8: lambda x, y: np.maximum(_unsigned(x), _unsigned(y)).view(np.asarray(x).dtype),
    9: lambda x, y: np.minimum(_unsigned(x), _unsigned(y)).view(np.asarray(x).dtype),
    10: lambda old, new: new,
}
# What the assembly of tests means.
ASSEMBLY: dict[str, Callable[..., Any]] = {
    elementwise.ABSOLUTE: np.abs,
    elementwise.NEGATED: np.negative,
}
_RENAMED = {"erfinv": "erf_inv", "popc": "population_count", "fmod": "rem"}
_RENAMED["popcount"] = "population_count"
_LIBDEVICE: dict[str, Callable[..., Any]] = {
    "rint": np.rint,
    "round": lambda x: table()["round"].meaning(x, rounding_method=0),
}


def _external(symbol: str) -> Callable[..., Any]:
    """libdevice's `__nv_tanf` means what our op `tan` means, as `__ocml_tan_f32`."""
    name = re.sub("^__(nv|ocml|ockl)_|_[fu](32|64)$", "", symbol)
    for end in ("", "f", "ll"):
        short = name.removesuffix(end) if end else name
        if short in _LIBDEVICE:
            return _LIBDEVICE[short]
        row = table().get(_RENAMED.get(short, short))
        if row is not None and row.meaning is not None:
            meaning = row.meaning
            if short in ("popc", "popcount", "clz"):
                to = np.int64 if symbol == "__ockl_clz_u64" else np.int32
                return lambda x: np.asarray(meaning(x)).astype(to)
            return meaning
    raise KeyError(symbol)
