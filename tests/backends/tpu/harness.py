"""What the TPU tests share: from a function or an op to a kernel, its text, its job."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.backends.base import Compiled, Options, get
from pallasite.backends.tpu.fit_windows import CallArrays
from pallasite.backends.tpu.prints import LANES, ROWS, print_log, sites_of
from pallasite.emulation.emulate import emulate
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, BlockDim, Kernel, Value, Window
from pallasite.ir.opdef import table
from pallasite.ir.types import BOOL, DTYPES, I32, DType, RefType, TileType
from pallasite.passes.run import run as run_passes
from pallasite.runtime.aot import Job
from pallasite.sites import kernels_in
from tests.backends.tpu.kernels import CASES
from tests.backends.tpu.simulate import run_module
from tests.ir.kernels import emit_pipeline

CHIPS = ("v5e", "v6e")
NAMES = ("f32", "bf16", "i32", "u32", "i16", "i8", "u8", "bool")
DTYPES_HERE = [DTYPES[name] for name in NAMES]


@cache
def kernel_of(name: str) -> Kernel:
    """The kernel of a case, after the passes every backend shares."""
    case = CASES[name]
    (kernel,) = kernels_in(case.function, *case.shapes)
    return run_passes(kernel)


def mosaic(kernel: Kernel, **options: Any) -> str:
    return Compiled(get("tpu"), kernel, Options(**options), shared=())["mosaic"]


def job(name: str, kernel: Kernel, **options: Any) -> Job:
    backend = get("tpu")
    compiled = Compiled(backend, kernel, Options(**options), shared=())
    launch = backend.launch(compiled)
    return Job.of(name, kernel, launch)


def simulated(kernel: Kernel, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of the emitted code, run in numpy."""
    return run_compiled(Compiled(get("tpu"), kernel, Options(), shared=()), arrays)


def run_compiled(compiled: Compiled, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a compiled kernel, converted before and after as XLA does it."""
    scheduled = compiled.scheduled
    call = CallArrays.of(scheduled, compiled.kernel)
    given = [
        arrays[number] if form is None else form.pack(np, arrays[number])
        for number, form in call.operands
    ]
    sites = sites_of(compiled.kernel)
    if sites:
        given.append(np.zeros((ROWS, LANES), np.int32))
    params = scheduled.outputs
    shapes = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype.np) for p in params]
    results = run_module(compiled["mosaic"], given, shapes, scheduled.aliases)
    if sites:
        print_log(sites, results.pop())
    pairs = zip(results, call.results, strict=True)
    return [r if form is None else form.unpack(np, r) for r, form in pairs]


def emulated(kernel: Kernel, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results by the evaluator that defines the language."""
    return [np.asarray(x) for x in jax.jit(emulate(kernel))(*arrays)]


def random_arrays(kernel: Kernel, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [_random(rng, p.ref.shape, p.ref.dtype) for p in kernel.inputs]


def _random(rng: np.random.Generator, shape: Sequence[int], dtype: DType) -> np.ndarray:
    if dtype.is_float:
        return rng.normal(size=shape).astype(dtype.np)
    return rng.integers(1, 8, shape).astype(dtype.np)


# --- one op, all types ---


def attrs_of(name: str, dtype: DType) -> list[dict[str, Any]]:
    """The attributes to try an op with."""
    others = [d for d in DTYPES_HERE if d != dtype]
    same_width = [d for d in others if d.bits == dtype.bits and not d.is_bool]
    special = {
        "round": [{"rounding_method": m} for m in (0, 1)],
        "integer_pow": [{"y": 3}],
        "cast": [{"dtype": d} for d in others],
        "bitcast": [{"dtype": d} for d in same_width if not dtype.is_bool],
        "reduce_precision": [{"exponent_bits": 5, "mantissa_bits": 7}],
    }
    return special.get(name, [{}])


def op_kernel(name: str, dtype: DType, attrs: dict[str, Any], scalar: bool) -> Kernel:
    """One op on a vector, or on a scalar in SMEM; bools come and go as int32."""
    row = table()[name]
    shape: tuple[int, ...] = (4,) if scalar else (32, 128)
    types = [dtype] * (row.arity or 3)
    types = [BOOL, dtype, dtype] if name == "select_n" else types
    made = Builder().op(name, *(Value(TileType(shape, t)) for t in types), **attrs)
    refs = [_whole(f"x{n}", shape, t) for n, t in enumerate(types)]
    refs.append(_whole("o", shape, made.tile.dtype))
    dims, space = tuple(map(BlockDim, shape)), "smem" if scalar else "block"
    windows = [Window(dims, "in", space) for _ in types] + [Window(dims, "out", space)]

    def body(b: Builder, _: Any, *blocks: Value) -> None:
        for lane in range(4) if scalar else (None,):
            index = None if lane is None else (At(lane),)
            loaded = [b.load(r, index) for r in blocks[:-1]]
            pairs = zip(loaded, types, strict=True)
            operands = [b.ne(v, b.like(0, v)) if t.is_bool else v for v, t in pairs]
            result = b.op(name, *operands, **attrs)
            stored = b.cast(result, blocks[-1].ref.dtype)
            b.store(blocks[-1], stored, index)

    b = Builder()
    origin = lambda b: tuple(b.index(0) for _ in shape)
    emit_pipeline(b, refs, windows, [origin] * len(refs), (), body)
    return Kernel(f"{name}_{dtype}", tuple(refs), b.block(), 1)


def _whole(name: str, shape: tuple[int, ...], dtype: DType) -> Value:
    return Value(RefType(shape, I32 if dtype.is_bool else dtype, "any"), name)


def op_kernels() -> dict[str, Kernel]:
    """A kernel per elementwise op, type, attributes and kind of memory."""
    found = {}
    for name, row in table().items():
        types = [d for d in DTYPES_HERE if d in row.dtypes] if row.elementwise else []
        for dtype in types:
            for attrs in attrs_of(name, dtype):
                shown = " ".join(map(str, attrs.values()))
                for kind in ("vector", "scalar"):
                    kernel = op_kernel(name, dtype, attrs, kind == "scalar")
                    found[f"{name} {dtype} {shown} {kind}"] = kernel
    return found


# --- derivatives ---


def backward_kernels(case: Any) -> list[Kernel]:
    """The kernels that the gradient of a zoo case has besides its own."""
    arguments = case.make_args(np.random.default_rng(0))
    is_float = lambda x: jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)
    places = tuple(n for n, x in enumerate(arguments) if is_float(x))
    if not places or "nograd" in case.tags:
        return []

    def total(*xs: Any) -> Any:
        results = jax.tree.leaves(case.run(*xs))
        return sum(jnp.sum(r.astype(jnp.float32)) for r in results if is_float(r))

    own = {kernel.text for kernel in kernels_in(case.run, *arguments)}
    found = kernels_in(jax.grad(total, argnums=places), *arguments)
    return [kernel for kernel in found if kernel.text not in own]
