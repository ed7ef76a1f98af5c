"""Runs hand-built kernels through the `cpu` backend, as XLA calls them.

`run` takes a Kernel and arrays; `compute` makes a kernel without a grid from a function
over tiles; `with_refs` from a function over refs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallasite.backends import base
from pallasite.ir.build import Builder
from pallasite.ir.levels import with_level
from pallasite.ir.nodes import Block, BlockDim, Kernel, Value, Window
from pallasite.ir.types import INDEX, DType, RefType, TileType, dtype_of
from pallasite.ir.verify import verify
from pallasite.runtime.ffi import lower_launch

kernel_p = Primitive("cpu_test_kernel")
kernel_p.multiple_results = True


@kernel_p.def_abstract_eval
def _abstract(*operands: Any, kernel: Kernel):
    return [
        jax.core.ShapedArray(out.ref.shape, out.ref.dtype.np) for out in kernel.outputs
    ]


def _lower(ctx: Any, *operands: Any, kernel: Kernel):
    return lower_launch(launch_of(kernel), ctx, *operands)


mlir.register_lowering(kernel_p, _lower, platform="cpu")


def launch_of(kernel: Kernel) -> base.Launch:
    """Without the shared passes: what is emitted is what the test wrote."""
    backend = base.get("cpu")
    return backend.launch(base.Compiled(backend, kernel, base.Options(), shared=()))


def llvm_of(kernel: Kernel) -> str:
    return base.Compiled(base.get("cpu"), kernel, base.Options(), shared=())["llvm"]


def call(kernel: Kernel) -> Callable[..., list[Any]]:
    """The kernel as a jitted JAX function."""
    verify(kernel)
    return jax.jit(lambda *operands: kernel_p.bind(*operands, kernel=kernel))


def run(kernel: Kernel, *arrays: Any) -> list[np.ndarray]:
    with jax.enable_x64(True):
        return [np.asarray(out) for out in call(kernel)(*arrays)]


def ref_of(array: Any, name: str = "") -> Value:
    array = np.asarray(array)
    dtype = dtype_of(array.dtype)
    assert dtype is not None, array.dtype
    return Value(RefType(array.shape, dtype, "any"), name)


def with_refs(
    emit: Callable[..., None],
    arrays: Sequence[Any],
    outputs: Sequence[TileType],
    aliases: Sequence[tuple[int, int]] = (),
) -> Kernel:
    """A kernel without a grid; `emit(builder, *refs)` writes its body."""
    params = [ref_of(a, f"x{n}") for n, a in enumerate(arrays)]
    params += [Value(RefType(t.shape, t.dtype, "any"), "out") for t in outputs]
    modes = ["in"] * len(arrays) + ["out"] * len(outputs)
    windows = [
        Window(tuple(BlockDim(n) for n in p.ref.shape), mode)
        for p, mode in zip(params, modes, strict=True)
    ]
    blocks = [Value(RefType(p.ref.shape, p.ref.dtype), p.name) for p in params]
    maps = []
    for p in params:
        b = Builder()
        zeros = [b.index(0) for _ in p.ref.shape]
        maps.append(b.block((), zeros))
    inner = Builder()
    emit(inner, *blocks)
    b = Builder()
    b.emit(
        "pipeline",
        *params,
        regions=(*maps, inner.block(blocks)),
        grid=(),
        windows=tuple(windows),
        semantics=(),
    )
    kernel = Kernel("test", tuple(params), b.block(), len(outputs), tuple(aliases))
    return with_level(kernel)


def tiles_kernel(function: Callable[..., Any], arrays: Sequence[Any]) -> Kernel:
    """A kernel that stores what `function(builder, *tiles)` gives."""
    probe = Builder()
    tiles = [Value(ref_of(a).ref.tile) for a in arrays]
    outputs = [v.tile for v in _listed(function(probe, *tiles))]

    def emit(b: Builder, *refs: Value) -> None:
        loaded = [b.load(ref) for ref in refs[: len(arrays)]]
        results = _listed(function(b, *loaded))
        for ref, value in zip(refs[len(arrays) :], results, strict=True):
            b.store(ref, value)

    return with_refs(emit, arrays, outputs)


def compute(function: Callable[..., Any], *arrays: Any) -> Any:
    """What `function(builder, *tiles)` gives for these arrays, natively."""
    results = run(tiles_kernel(function, arrays), *arrays)
    return results[0] if len(results) == 1 else results


def _listed(results: Any) -> list[Value]:
    return [results] if isinstance(results, Value) else list(results)


def region(params: Sequence[Value], emit: Callable[..., Any]) -> Block:
    """A block; `emit(builder, *params)` gives its yields (or None)."""
    b = Builder()
    yields = emit(b, *params)
    return b.block(params, [] if yields is None else _listed(yields))


def index_value(name: str = "i") -> Value:
    return Value(INDEX, name)


def tile_type(dtype: DType, *shape: int) -> TileType:
    return TileType(shape, dtype)
