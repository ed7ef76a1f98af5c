"""Runs Mosaic modules in numpy, so that emitted code can be checked without a TPU.

Only what the emitter writes is here, with the meaning the dialects' documents give it.
Windows behave as Mosaic's: a block is fetched when its index changes, an output block
is written back when its index changes or the grid ends. What is outside an array, and
memory nobody wrote, holds NaN or an odd number. `bounds.py` proves first that no access
of the module is outside, whatever the arrays hold.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import UnsupportedError
from pallasite.ops import meaning
from tests.backends.tpu.bounds import not_inside

ELEMENTS = {
    "i1": np.bool_,
    "i4": ml_dtypes.int4,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "index": np.int64,
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "!tpu.semaphore": np.int32,
    "!tpu.dma_semaphore": np.int32,
}
DYNAMIC = -(2**63)
# Predicates by number; of floats, those that Mosaic has.
CMPI = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
CMPF = ("false", "oeq", "ogt", "oge", "olt", "ole")
UNARY = ("exp", "exp2", "log", "log1p", "log2", "sqrt", "sin", "cos", "tan", "tanh")


def run_module(
    text: str,
    arrays: Sequence[np.ndarray],
    outputs: Sequence[Any],
    aliases: Sequence[tuple[int, int]] = (),
) -> list[np.ndarray]:
    """The results of a module.

    `outputs` says their shapes and dtypes; `aliases` pairs operands with results that
    are the same memory.
    """
    arrays = [signless(np.array(a)) for a in arrays]
    results = [
        signless(np.full(o.shape, odd_value(np.dtype(o.dtype)), o.dtype))
        for o in outputs
    ]
    for operand, result in aliases:
        results[result] = arrays[operand]
    results = _Module(text).run(arrays, results)
    return [r.view(o.dtype) for r, o in zip(results, outputs, strict=True)]


def signless(x: np.ndarray) -> np.ndarray:
    """Integers of MLIR carry no sign: all are seen as signed ones."""
    return x.view(f"i{x.dtype.itemsize}") if x.dtype.kind == "u" else x


def memory(shape: Sequence[int], element: str) -> np.ndarray:
    """Uninitialised memory."""
    dtype = np.dtype(ELEMENTS[element])
    if "semaphore" in element:
        return np.zeros(shape, dtype)
    return np.full(shape, odd_value(dtype), dtype)


def odd_value(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return True
    is_integer = np.issubdtype(dtype, np.integer)
    return 0x55 if is_integer else math.nan


def numbers(attribute: Any) -> list[int]:
    """The integers of `array<i64: 1, 2>` or `[1, 2]`."""
    text = (
        str(attribute).split(":")[-1] if "array<" in str(attribute) else str(attribute)
    )
    return [int(n) for n in re.findall(r"-?\d+", text)]


class _Module:
    def __init__(self, text: str):
        self.mlir = jaxcompat.mosaic_bindings()
        self.context = self.mlir.context()
        with self.context:
            self.module = self.mlir.Module.parse(text)
            self.module.operation.verify()
            body = self.module.body.operations
            self.functions = {op.attributes["sym_name"].value: op for op in body}

    def run(self, arrays: Sequence[np.ndarray], results: list[np.ndarray]) -> list:
        with self.context, np.errstate(all="ignore"):
            call = _Call(self, arrays, results)
            found = not_inside(self.functions, [x.shape for x in call.operands])
            assert not found, found
            return call.run()


class _Call:
    """One call of a module's main function."""

    def __init__(self, module: _Module, arrays: Sequence[np.ndarray], results: Any):
        self.module, self.main = module, module.functions["main"]
        self.attributes, self.results = self.main.attributes, results
        bounds = self._attribute("iteration_bounds")
        self.bounds = None if bounds is None else numbers(bounds)
        dynamic = sum(n == DYNAMIC for n in self.bounds or ())
        sizes = iter(arrays[:dynamic])
        self.bounds = self.bounds and [
            int(next(sizes)) if n == DYNAMIC else n for n in self.bounds
        ]
        count = int(str(self.attributes["scalar_prefetch"]).split()[0])
        rest = list(arrays[dynamic:])
        self.prefetched, self.operands = rest[:count], [*rest[count:], *results]
        self.first_output = len(self.operands) - len(results)

    def _attribute(self, name: str) -> Any:
        present = name in self.attributes  # no dict: it has no `get`
        return self.attributes[name] if present else None

    def run(self) -> list[np.ndarray]:
        arguments = list(self.main.regions[0].blocks[0].arguments)
        count = int(str(self.attributes["scratch_operands"]).split()[0])
        scratch = [_memory_of(a.type) for a in arguments[len(arguments) - count :]]
        if self.bounds is None:
            given = [*self.prefetched, *self.operands, *scratch]
            self._walker().call(self.main, given)
        else:
            self._run_grid(arguments, scratch)
        return self.results

    def _walker(self) -> "_Walker":
        return _Walker(self.bounds or ())

    def _run_grid(self, arguments: list[Any], scratch: list[np.ndarray]) -> None:
        first = len(self.bounds) + len(self.prefetched)
        windows = [
            _Window(self, k, arguments[first + k].type, described)
            for k, described in enumerate(self._attribute("window_params"))
        ]
        for step in np.ndindex(*self.bounds):
            ids = [np.int32(i) for i in step]
            for window in windows:
                window.move(ids)
            blocks = [w.block for w in windows]
            self._walker().call(self.main, [*ids, *self.prefetched, *blocks, *scratch])
        for window in windows:
            window.flush()


class _Window:
    def __init__(self, call: _Call, position: int, type_: Any, described: Any):
        self.call, self.array = call, call.operands[position]
        self.is_output = position >= call.first_output
        self.index: list[int] | None = None
        self.fixed = "transform_indices" not in described
        self.block = self.array if self.fixed else _memory_of(type_)
        if self.fixed:
            return
        self.map = call.module.functions[described["transform_indices"].value]
        self.sizes = numbers(described["window_bounds"])
        kind = str(described["window_kind"]) if "window_kind" in described else ""
        self.by_element = bool(kind)
        found = re.search(r"\[([^]]*)\]", kind)
        self.padding = numbers(found[1]) if found else [0] * len(self.sizes)

    def move(self, ids: list[Any]) -> None:
        if self.fixed:
            return
        given = [*ids, *self.call.prefetched]
        index = [int(i) for i in self.call._walker().call(self.map, given)]
        if index == self.index:
            return
        self.flush()
        self.index = index
        self.block[...] = odd_value(self.block.dtype)
        if not self.is_output:
            inside, of_array = self._overlap()
            self.block[inside] = self.array[of_array]

    def flush(self) -> None:
        if self.is_output and not self.fixed and self.index is not None:
            inside, of_array = self._overlap()
            self.array[of_array] = self.block[inside]

    def _overlap(self) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the block inside the array, and that part of the array."""
        assert self.index is not None
        inside, of_array = [], []
        rows = zip(self.index, self.sizes, self.padding, self.array.shape, strict=True)
        for index, size, pad, length in rows:
            start = index - pad if self.by_element else index * size
            low, high = max(start, 0), min(start + size, length)
            assert low < high, f"block {self.index} is outside {self.array.shape}"
            inside.append(slice(low - start, high - start))
            of_array.append(slice(low, high))
        return tuple(inside), tuple(of_array)


def _memory_of(type_: Any) -> np.ndarray:
    shape, element = _shape_and_element(str(type_))
    return memory(shape, element)


def _shape_and_element(type_text: str) -> tuple[list[int], str]:
    inner = re.fullmatch(r"(?:memref|vector)<(.*?)(?:, .*)?>", type_text)
    if inner is None:
        return [], type_text
    *sizes, element = re.split(r"(?<=\d)x", inner[1])
    return [int(n) for n in sizes], element


class _Walker:
    """Runs the ops of a function."""

    def __init__(self, bounds: Sequence[int]):
        self.bounds = bounds
        self.values: dict[Any, Any] = {}

    def call(self, function: Any, arguments: Sequence[Any]) -> Sequence[Any]:
        return self.block(function.regions[0].blocks[0], arguments)

    def block(self, block: Any, arguments: Sequence[Any] = ()) -> list[Any]:
        """Run a block; what its terminator hands on."""
        for parameter, value in zip(block.arguments, arguments, strict=True):
            self.values[parameter] = value
        for op in block.operations:
            operands = [self.values[o] for o in op.operands]
            name = op.operation.name
            if name in ("func.return", "scf.yield", "tpu.yield", "scf.condition"):
                return operands
            results = self.op(name, op, operands)
            if len(op.results) == 1 and not isinstance(results, list):
                results = [results]
            for result, value in zip(op.results, results or (), strict=True):
                self.values[result] = self.typed(result.type, value)
        return []

    def typed(self, type_: Any, value: Any) -> Any:
        """Check a value against its type: shape and element must be right."""
        if str(type_).startswith("memref"):
            shape, _ = _shape_and_element(str(type_))
            assert list(value.shape) == shape, (type_, value.shape)
            return value
        shape, element = _shape_and_element(str(type_))
        value = np.asarray(value)
        assert list(value.shape) == shape, (str(type_), value.shape)
        assert value.dtype == np.dtype(ELEMENTS[element]), (str(type_), value.dtype)
        return value if shape else value[()]

    def op(self, name: str, op: Any, operands: list[Any]) -> Any:
        method = getattr(self, name.replace(".", "_"), None)
        if method is not None:
            return method(op, *operands)
        return ELEMENTWISE[name](*map(np.asarray, operands))

    # --- arith, with attributes ---

    def arith_constant(self, op: Any) -> Any:
        shape, element = _shape_and_element(str(op.results[0].type))
        value = op.attributes["value"]
        if shape:
            value = value.get_splat_value()
        text = str(value).split(" : ")[0]
        dtype = np.dtype(ELEMENTS[element])
        if text.startswith("0x"):
            width = 2 * dtype.itemsize
            number = np.frombuffer(bytes.fromhex(text[2:].zfill(width))[::-1], dtype)[0]
        else:
            number = {"true": True, "false": False}.get(text, text)
            number = np.asarray(
                float(number) if dtype.kind not in "biu" else int(number)
            )
        return np.full(shape, number).astype(dtype)

    def arith_cmpi(self, op: Any, x: Any, y: Any) -> Any:
        kind = CMPI[int(str(op.attributes["predicate"]).split()[0])]
        if kind.startswith("u"):
            x, y = unsigned(x), unsigned(y)
        test = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
        test |= {"gt": np.greater, "ge": np.greater_equal}
        return test[kind if kind in test else kind[1:]](x, y)

    def arith_cmpf(self, op: Any, x: Any, y: Any) -> Any:
        kind = CMPF[int(str(op.attributes["predicate"]).split()[0])]
        tests = {"oeq": np.equal, "olt": np.less, "ole": np.less_equal}
        tests |= {"ogt": np.greater, "oge": np.greater_equal}
        return tests[kind](x, y)

    def cast(self, op: Any, x: Any, through: Any = None) -> Any:
        _, element = _shape_and_element(str(op.results[0].type))
        x = np.asarray(x)
        return (x if through is None else through(x)).astype(ELEMENTS[element])

    arith_extsi = arith_trunci = arith_extf = arith_truncf = arith_sitofp = cast
    arith_index_cast = cast

    def arith_extui(self, op: Any, x: Any) -> Any:
        return self.cast(op, x, unsigned)

    arith_uitofp = arith_extui

    def arith_fptosi(self, op: Any, x: Any) -> Any:
        return self.cast(op, x, lambda v: _saturated(v, -(2**31), 2**31 - 1))

    def arith_fptoui(self, op: Any, x: Any) -> Any:
        whole = _saturated(np.asarray(x), 0, 2**32 - 1)
        return whole.astype(np.uint32).view(np.int32)

    def arith_bitcast(self, op: Any, x: Any) -> Any:
        _, element = _shape_and_element(str(op.results[0].type))
        return np.asarray(x).view(ELEMENTS[element])

    tpu_bitcast = arith_bitcast

    def arith_select(self, op: Any, pred: Any, yes: Any, no: Any) -> Any:
        return np.where(pred, yes, no).astype(np.asarray(yes).dtype)

    # --- vectors ---

    def result_shape(self, op: Any) -> list[int]:
        return _shape_and_element(str(op.results[0].type))[0]

    def vector_shape_cast(self, op: Any, x: Any) -> Any:
        return x.reshape(self.result_shape(op))

    def vector_broadcast(self, op: Any, x: Any) -> Any:
        return np.broadcast_to(x, self.result_shape(op))

    def vector_extract(self, op: Any, x: Any) -> Any:
        return x[tuple(numbers(op.attributes["static_position"]))]

    def vector_extract_strided_slice(self, op: Any, x: Any) -> Any:
        starts, sizes = (numbers(op.attributes[a]) for a in ("offsets", "sizes"))
        spans = zip(starts, sizes, strict=True)
        return x[tuple(slice(s, s + n) for s, n in spans)]

    def vector_multi_reduction(self, op: Any, x: Any, start: Any) -> Any:
        kind = re.search(r"<(\w+)>", str(op.attributes["kind"]))[1]
        axes = tuple(numbers(op.attributes["reduction_dims"]))
        function = {"add": np.add, "maximumf": np.maximum, "minimumf": np.minimum}
        function |= {"maxsi": np.maximum, "minsi": np.minimum}
        wide = np.asarray(x)
        reduced = function[kind].reduce(wide, axis=axes, dtype=wide.dtype)
        return function[kind](reduced, start).astype(wide.dtype)

    def tpu_transpose(self, op: Any, x: Any) -> Any:
        return np.transpose(x, numbers(op.attributes["permutation"]))

    def tpu_concatenate(self, op: Any, *parts: Any) -> Any:
        return np.concatenate(parts, numbers(op.attributes["dimension"])[0])

    def tpu_dynamic_rotate(self, op: Any, x: Any, amount: Any) -> Any:
        (dim,) = numbers(str(op.attributes["dimension"]).split()[0])
        assert x.ndim > 1 and 0 <= amount < x.shape[dim], (x.shape, amount)
        return np.roll(x, int(amount), dim)

    def tpu_iota(self, op: Any) -> Any:
        shape, (dim,) = self.result_shape(op), numbers(op.attributes["dimensions"])
        assert len(shape) > 1, "Mosaic has no iota of rank one"
        along = [-1 if d == dim else 1 for d in range(len(shape))]
        counted = np.arange(shape[dim], dtype=np.int32).reshape(along)
        return np.broadcast_to(counted, shape)

    def tpu_matmul(self, op: Any, lhs: Any, rhs: Any, acc: Any) -> Any:
        text = str(op.attributes["dimension_numbers"])
        lists = [
            [int(n) for n in re.findall(r"\d+", g)]
            for g in re.findall(r"\[(.*?)\]", text)
        ]
        (lc,), (rc,), _, _, order, lb, rb = lists
        left, right = list("abcd"[: lhs.ndim]), list("wxyz"[: rhs.ndim])
        left[lc] = right[rc] = "k"
        for a, b in zip(lb, rb, strict=True):
            right[b] = left[a]
        pairs = zip(order[::2], order[1::2], strict=True)
        out = [(left, right)[side][dim] for side, dim in pairs]
        spec = f"{''.join(left)},{''.join(right)}->{''.join(out)}"
        wide = [np.asarray(v).astype(np.float64) for v in (lhs, rhs)]
        return (np.einsum(spec, *wide) + acc).astype(acc.dtype)

    # --- memory ---

    def vector_load(self, op: Any, ref: Any, *index: Any) -> Any:
        shape = self.result_shape(op)
        check_row(op, ref, index, shape)
        return self.picked(ref, index, shape).copy()

    def vector_store(self, op: Any, value: Any, ref: Any, *index: Any) -> None:
        check_row(op, ref, index, value.shape)
        self.picked(ref, index, value.shape)[...] = value

    def tpu_strided_load(self, op: Any, ref: Any, *index: Any) -> Any:
        strides = numbers(op.attributes["strides"])
        return self.picked(ref, index, self.result_shape(op), strides).copy()

    def tpu_strided_store(self, op: Any, value: Any, ref: Any, *index: Any) -> None:
        strides = numbers(op.attributes["strides"])
        self.picked(ref, index, value.shape, strides)[...] = value

    def picked(self, ref: Any, index: Any, shape: Any, strides: Any = None) -> Any:
        strides = strides or [1] * len(shape)
        slices = []
        for n, start, size, step in zip(ref.shape, index, shape, strides, strict=True):
            stop = int(start) + (size - 1) * step + 1
            assert start >= 0 and stop <= n, (ref.shape, index, shape)
            slices.append(slice(int(start), stop, step))
        return ref[tuple(slices)]

    def memref_load(self, op: Any, ref: Any, *index: Any) -> Any:
        assert all(0 <= i < n for i, n in zip(index, ref.shape, strict=True))
        return ref[tuple(map(int, index))]

    def memref_store(self, op: Any, value: Any, ref: Any, *index: Any) -> None:
        assert all(0 <= i < n for i, n in zip(index, ref.shape, strict=True))
        ref[tuple(map(int, index))] = value

    def tpu_memref_slice(self, op: Any, ref: Any, *index: Any) -> Any:
        return self.picked(ref, index, self.result_shape(op))

    def tpu_memref_squeeze(self, op: Any, ref: Any) -> Any:
        return self._view(ref, op)

    tpu_memref_reshape = tpu_memref_squeeze

    def tpu_memref_bitcast(self, op: Any, ref: Any) -> Any:
        _, element = _shape_and_element(str(op.results[0].type))
        dtype = np.dtype(ELEMENTS[element])
        if dtype.itemsize != ref.dtype.itemsize:
            raise UnsupportedError("the simulator has no views of another width")
        return ref.view(dtype)

    def _view(self, ref: Any, op: Any) -> Any:
        view = ref.reshape(self.result_shape(op))
        assert np.shares_memory(view, ref), "a view that would be a copy"
        return view

    def memref_alloca(self, op: Any) -> Any:
        return _memory_of(op.results[0].type)

    tpu_sem_alloc = memref_alloca

    def tpu_enqueue_dma(
        self, op: Any, source: Any, target: Any, semaphore: Any
    ) -> None:
        assert source.shape == target.shape and source.dtype == target.dtype
        target[...] = source
        semaphore[...] += 1

    def tpu_wait_dma2(self, op: Any, semaphore: Any, source: Any, target: Any) -> None:
        assert semaphore > 0, "waits for a copy that nobody started"
        semaphore[...] -= 1

    def tpu_sem_signal(self, op: Any, semaphore: Any, amount: Any) -> None:
        semaphore[...] += amount

    def tpu_sem_wait(self, op: Any, semaphore: Any, amount: Any) -> None:
        assert semaphore >= amount, "waits for ever"
        semaphore[...] -= amount

    def tpu_sem_read(self, op: Any, semaphore: Any) -> Any:
        return semaphore[()]

    def tpu_assume_multiple(self, op: Any, x: Any) -> Any:
        (multiple,) = numbers(str(op.attributes["multiple"]).split()[0])
        assert x % multiple == 0, f"{x} is not a multiple of {multiple}"
        return x

    def tpu_delay(self, op: Any, cycles: Any) -> None:
        pass

    def tpu_iteration_bound(self, op: Any) -> Any:
        return np.int32(self.bounds[numbers(str(op.attributes["dim"]).split()[0])[0]])

    # --- control ---

    def tpu_region(self, op: Any) -> list[Any]:
        return self.block(op.regions[0].blocks[0])

    def scf_if(self, op: Any, test: Any) -> list[Any]:
        region = op.regions[0 if test else 1]
        return self.block(region.blocks[0]) if len(region.blocks) else []

    def scf_for(self, op: Any, first: Any, limit: Any, step: Any, *carry: Any):
        values = list(carry)
        for i in range(int(first), int(limit), int(step)):
            values = self.block(op.regions[0].blocks[0], [np.int32(i), *values])
        return values

    def scf_while(self, op: Any, *carry: Any) -> list[Any]:
        values = list(carry)
        while True:
            go_on, *values = self.block(op.regions[0].blocks[0], values)
            if not go_on:
                return values
            values = self.block(op.regions[1].blocks[0], values)


def unsigned(x: Any) -> Any:
    x = np.asarray(x)
    if x.dtype == np.bool_:
        return x.astype(np.uint8)
    return x.view(np.dtype(f"u{x.dtype}"))


def _saturated(x: Any, low: int, high: int) -> Any:
    wide = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
    return np.clip(wide, low, high).astype(np.int64)


def _of_unsigned(function: Any) -> Any:
    def call(x: Any, y: Any) -> Any:
        return np.asarray(function(unsigned(x), unsigned(y))).view(x.dtype)

    return call


def _in_double(function: Any) -> Any:
    def call(*xs: Any) -> Any:
        return np.asarray(function(*(x.astype(np.float64) for x in xs))).astype(
            xs[0].dtype
        )

    return call


ELEMENTWISE = {
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.remf": np.fmod,
    "arith.negf": np.negative,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.divsi": meaning.div,
    "arith.remsi": meaning.rem,
    "arith.divui": _of_unsigned(meaning.div),
    "arith.remui": _of_unsigned(meaning.rem),
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.maxui": _of_unsigned(np.maximum),
    "arith.minui": _of_unsigned(np.minimum),
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": np.left_shift,
    "arith.shrsi": np.right_shift,
    "arith.shrui": _of_unsigned(np.right_shift),
    "math.absf": np.abs,
    "math.absi": np.abs,
    "math.floor": np.floor,
    "math.ceil": np.ceil,
    "math.roundeven": np.rint,
    "math.round": lambda x: meaning.round_(x, rounding_method=0),
    "math.ctpop": meaning.population_count,
    "math.ctlz": meaning.clz,
    "math.erf": _in_double(meaning.erf),
    "math.rsqrt": _in_double(lambda x: 1 / np.sqrt(x)),
    "math.powf": _in_double(np.power),
    "math.atan2": _in_double(np.arctan2),
    **{f"math.{name}": _in_double(getattr(np, name)) for name in UNARY},
}


def check_row(op: Any, ref: Any, index: Any, shape: Any) -> None:
    """Mosaic's rule for one row at a dynamic place of a memref wider than a tile."""
    if len(shape) < 2 or ref.shape[-1] <= 128 or ref.itemsize < 4:
        return
    row = op.operands[len(op.operands) - 2].owner
    is_static = getattr(row, "name", "") == "arith.constant"
    if not is_static and index[-2] % 8:
        assert shape[-2] == 1 and shape[-1] > 128, (ref.shape, index, shape)
