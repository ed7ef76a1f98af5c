"""The emulation: the evaluator over jax.numpy, staged into pure StableHLO.

`emulate(kernel)` is an ordinary JAX function of the operands; under jit it runs on any
platform, and it can be batched and differentiated. Memory is carried through loops and
updated in place by XLA; a program accesses only its blocks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite import jaxcompat
from pallasite.emulation import tiles
from pallasite.emulation.elementwise import FUNCTIONS
from pallasite.errors import CheckError, failed_check
from pallasite.interpret import Pick, Walker
from pallasite.interpret.numbers import Picks, picked_shape, run_rule
from pallasite.ir.nodes import Kernel, Op
from pallasite.ir.opdef import OpDef
from pallasite.ir.types import DType, RefType, TileType
from pallasite.passes.schedule.whole_arrays import WholeArrays

Array = Any


def emulate(kernel: Kernel) -> Callable[..., list[Array]]:
    """A JAX function with the kernel's meaning."""

    def run(*operands: Array) -> list[Array]:
        open_sizes = jaxcompat.open_sizes([("kernel", kernel.name)], kernel.loc)
        with jaxcompat.own_tracing(), open_sizes:
            return Walker(kernel, JaxNumbers()).run(list(operands))

    return run


def emulate_arrays(made: WholeArrays) -> Callable[..., list[Array]]:
    """The same for a kernel on whole arrays."""
    run = emulate(made.kernel)
    for batch in reversed(made.batches):
        run = jax.vmap(run, batch.inputs, list(batch.outputs), axis_size=batch.size)
    total = lambda kernel, arrays: emulate(kernel)(*arrays)
    return lambda *operands: made.results(run(*operands), total)


# Updates that XLA can scatter if indices repeat.
_SCATTER: dict[str, Callable[[Any], Callable[..., Array]]] = {
    "add": lambda at: at.add,
    "max": lambda at: at.max,
    "min": lambda at: at.min,
    "xchg": lambda at: at.set,
}


class JaxNumbers:
    """The number system of the emulation."""

    functional = True

    # --- tiles ---

    def elementwise(
        self,
        row: OpDef,
        operands: Sequence[Array],
        attrs: Mapping[str, Any],
        result: TileType,
    ) -> Array:
        value = FUNCTIONS[row.name](*operands, **attrs)
        return lax.convert_element_type(value, result.dtype.np)

    def tile_op(self, op: Op, operands: Sequence[Array]) -> Sequence[Array]:
        return run_rule(tiles.RULES, op, operands)

    def scalar(self, value: int, dtype: DType) -> Array:
        return jnp.asarray(value, dtype.np)

    # --- memory ---

    def uninitialised(self, type: RefType) -> Array:
        """Poison if the type has one, so that a read of it shows."""
        return jnp.full(type.shape, _poison(type), type.dtype.np)

    def pad(
        self, array: Array, low: Sequence[int], high: Sequence[int], fill: Any
    ) -> Array:
        value = _poison_of(array.dtype) if fill is None else fill
        config = [(lo, hi, 0) for lo, hi in zip(low, high, strict=True)]
        return lax.pad(array, jnp.asarray(value, array.dtype), config)

    def unpad(self, array: Array, low: Sequence[int], shape: Sequence[int]) -> Array:
        limits = [lo + n for lo, n in zip(low, shape, strict=True)]
        return lax.slice(array, low, limits)

    def take(
        self,
        array: Array,
        picks: Picks,
        mask: Array | None = None,
        other: Array | None = None,
    ) -> Array:
        if any(p.gather is not None or p.is_bounded or p.clip for p in picks):
            value = self._take_elements(array, picks)
        else:
            value = _squeeze(self._take_runs(array, picks), picks)
        if mask is not None and other is not None:
            value = lax.select(mask, value, other)
        return value

    def _take_runs(self, array: Array, picks: Picks) -> Array:
        """A rectangle: one slice, static if all starts are."""
        starts, sizes = [p.start for p in picks], [p.extent for p in picks]
        if all(isinstance(s, int) for s in starts):
            limits = [s + n for s, n in zip(starts, sizes, strict=True)]
            strides = [p.stride for p in picks]
            if sizes == list(array.shape) and set(strides) <= {1}:
                return array
            return lax.slice(array, starts, limits, strides)
        # The walker has clamped the starts: nothing can wrap around.
        value = lax.dynamic_slice(
            array, [tiles.int32(s) for s in starts], sizes, allow_negative_indices=False
        )
        if any(p.stride != 1 for p in picks):
            strides = [p.stride for p in picks]
            value = lax.slice(value, [0] * len(picks), value.shape, strides)
        return value

    def _take_elements(self, array: Array, picks: Picks) -> Array:
        if 0 in array.shape:
            return jnp.zeros(picked_shape(picks), array.dtype)
        indices, _ = _positions(picks, array.shape)
        return array[indices]

    def put(
        self, array: Array, picks: Picks, value: Array, mask: Array | None
    ) -> Array:
        if 0 in value.shape:
            return array
        if mask is not None and not any(
            p.gather is not None or p.is_bounded for p in picks
        ):
            value = lax.select(mask, value, self.take(array, picks))
            mask = None
        if mask is None and not any(
            p.gather is not None or p.is_bounded for p in picks
        ):
            return self._put_runs(array, picks, value)
        return array.at[_touched(array, picks, mask)].set(value, mode="drop")

    def _put_runs(self, array: Array, picks: Picks, value: Array) -> Array:
        sizes = [p.extent for p in picks]
        value = value.reshape([p.size for p in picks])
        if any(p.stride != 1 for p in picks):
            runs = [_without_stride(p) for p in picks]
            spaced = self._take_runs(array, runs)
            where = tuple(slice(0, None, p.stride) for p in picks)
            value = spaced.at[where].set(value)
        if sizes == list(array.shape):
            return value
        return tiles.update_slice(array, value, [tiles.int32(p.start) for p in picks])

    def rmw(
        self, array: Array, picks: Picks, kind: str, value: Array, mask: Array | None
    ) -> tuple[Array, Array]:
        old = self.take(array, picks)
        if all(p.gather is None for p in picks):
            return self.put(array, picks, self.combine(kind, old, value), mask), old
        scatter = _SCATTER.get(kind)
        if scatter is None:
            return self.rmw_in_turn(array, picks, kind, value, mask)
        at = array.at[_touched(array, picks, mask)]
        return scatter(at)(value, mode="drop"), old

    def rmw_in_turn(
        self, array: Array, picks: Picks, kind: str, value: Array, mask: Array | None
    ) -> tuple[Array, Array]:
        """Indices may repeat, and XLA has no scatter of this kind."""
        old, indices = self.take(array, picks), _touched(array, picks, mask)
        flat = [jnp.broadcast_to(i, value.shape).reshape(-1) for i in indices]
        values = value.reshape(-1)

        def step(n: Array, memory: Array) -> Array:
            where = tuple(i[n] for i in flat)
            new = self.combine(kind, memory[where], values[n])
            return memory.at[where].set(new, mode="drop")

        return lax.fori_loop(0, values.shape[0], step, array), old

    def fill_outside(self, value: Array, picks: Picks, fill: Any) -> Array:
        _, inside = _positions(picks, None)
        return jnp.where(inside, value, jnp.asarray(fill, value.dtype))

    def reinterpret(self, value: Array, kind: str, arg: Any) -> Array:
        if kind == "reshape":
            return value.reshape(arg)
        if kind == "transpose":
            return value.transpose(arg)
        before, after = arg
        return bitcast_rows(value, before, after)

    def restore(self, before: Array, kind: str, arg: Any, value: Array) -> Array:
        if kind == "reshape":
            return value.reshape(before.shape)
        if kind == "transpose":
            return value.transpose(np.argsort(arg))
        return bitcast_rows(value, arg[1], arg[0])

    # --- scalars and selection ---

    def clamp(self, index: Any, low: Any, high: Any) -> Any:
        return tiles.clamp_index(index, low, high)

    def add(self, a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if isinstance(b, int) and b == 0:
            return a
        if isinstance(a, int) and a == 0:
            return b
        return tiles.int32(a) + tiles.int32(b)

    def mul(self, a: Any, b: int) -> Any:
        if isinstance(a, int):
            return a * b
        return a if b == 1 else tiles.int32(a) * jnp.int32(b)

    def larger(self, a: Any, b: Any) -> Any:
        both = isinstance(a, int) and isinstance(b, int)
        return max(a, b) if both else jnp.maximum(tiles.int32(a), tiles.int32(b))

    def smaller(self, a: Any, b: Any) -> Any:
        both = isinstance(a, int) and isinstance(b, int)
        return min(a, b) if both else jnp.minimum(tiles.int32(a), tiles.int32(b))

    def combine(self, kind: str, a: Array, b: Array) -> Array:
        if kind == "xchg":
            return b
        return FUNCTIONS[kind](a, b)

    def select(self, predicate: Array, on_true: Array, on_false: Array) -> Array:
        return lax.select(jnp.broadcast_to(predicate, on_true.shape), on_true, on_false)

    def is_branch(self, which: Array, n: int, count: int) -> Array:
        which = jnp.clip(which, jnp.int32(0), jnp.int32(count - 1))
        return which == jnp.int32(n)

    # --- control ---

    def counted(self, first, limit, step, carry, body) -> list[Array]:
        total = static_bounds(first, limit, step)
        if total is None:
            total = dynamic_bounds(first, limit, step)
        if isinstance(total, int) and total <= 1:
            return body(first, list(carry)) if total == 1 else list(carry)

        def one(n: Array, values: list[Array]) -> list[Array]:
            i = first + lax.convert_element_type(n, first.dtype) * step
            return same_types(body(i, values), values)

        return lax.fori_loop(jnp.zeros_like(total), total, one, list(carry))

    def while_(self, go_on, body, carry) -> list[Array]:
        return lax.while_loop(
            go_on, lambda values: same_types(body(values), values), list(carry)
        )

    def branch(self, which, branches, carry) -> list[Array]:
        if len(branches) == 1:
            return branches[0](list(carry))
        return lax.switch(which, branches, list(carry))

    def grid(self, sizes, carry, body) -> list[Array]:
        """One staged loop over all programs; indices by division."""
        static = all(isinstance(s, int) for s in sizes)
        total = math.prod(sizes) if static else dynamic_product(sizes)
        if static and total == 0:
            return list(carry)
        if static and total == 1:
            return body([jnp.int32(0)] * len(sizes), list(carry))

        def program(step: Array, values: list[Array]) -> list[Array]:
            return same_types(body(unravel(tiles.int32(step), sizes), values), values)

        return lax.fori_loop(0, total, program, list(carry))

    # --- debugging ---

    def debug_print(
        self, fmt: str, values: Sequence[Array], when: Array | None
    ) -> None:
        jax.debug.print(fmt.rstrip("\n"), *values)

    def debug_check(
        self, ok: Array, message: str, values: Sequence[Array], op: Op
    ) -> None:
        def fail(good: np.ndarray, *values: np.ndarray) -> None:
            if not good:
                raise CheckError(failed_check(message, values, op.loc))

        jax.debug.callback(fail, ok, *values)


def _poison(type: RefType) -> Any:
    return 0 if type.is_semaphore else _poison_of(type.dtype.np)


def _poison_of(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.nan if _has_nan(dtype) else 0
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return int(jnp.iinfo(dtype).min)
    return 0


def _has_nan(dtype: Any) -> bool:
    return bool(np.isnan(np.asarray(np.nan).astype(dtype).astype(np.float32)))


def _without_stride(p: Pick) -> Pick:
    return Pick(p.start, p.extent, 1, p.kept)


def _squeeze(value: Array, picks: Picks) -> Array:
    dropped = [d for d, p in enumerate(picks) if not p.kept]
    return lax.squeeze(value, dropped) if dropped else value


def _positions(picks: Picks, shape: Sequence[int] | None) -> tuple[tuple, Array]:
    """Index arrays over the selected shape (clamped to `shape`), and which are within
    their bounds."""
    result = picked_shape(picks)
    rank = len(result)
    gathered = next((p.gather.ndim for p in picks if p.gather is not None), 0)
    axis = gathered
    indices, inside = [], jnp.ones(result, bool)
    for d, p in enumerate(picks):
        if p.gather is not None:
            position = tiles.int32(p.gather)
            position = position.reshape(position.shape + (1,) * (rank - gathered))
        elif p.kept:
            position = (
                tiles.int32(p.start) + jnp.arange(p.size, dtype=jnp.int32) * p.stride
            )
            position = position.reshape((-1,) + (1,) * (rank - axis - 1))
            axis += 1
        else:
            position = tiles.int32(p.start)
        if p.clip is not None:
            position = jnp.clip(
                position, tiles.int32(p.clip[0]), tiles.int32(p.clip[1]) - 1
            )
        if p.is_bounded:
            inside = (
                inside
                & (position >= tiles.int32(p.low))
                & (position < tiles.int32(p.high))
            )
            position = jnp.clip(position, tiles.int32(p.low), tiles.int32(p.high) - 1)
        if shape is not None:
            position = jnp.clip(position, 0, shape[d] - 1)
        indices.append(jnp.broadcast_to(position, result))
    return tuple(indices), inside


def _touched(array: Array, picks: Picks, mask: Array | None) -> tuple[Array, ...]:
    """Index arrays of a write; elements not to be written get an index out of range."""
    indices, inside = _positions(picks, array.shape)
    valid = inside if mask is None else inside & mask
    return (jnp.where(valid, indices[0], array.shape[0]), *indices[1:])


def bitcast_rows(value: Array, before: TileType, after: TileType) -> Array:
    """Reinterpret element width along the second-last dimension."""
    if before.dtype.bits == after.dtype.bits:
        return lax.bitcast_convert_type(value, after.dtype.np)
    if before.dtype.bits > after.dtype.bits:
        wide = lax.bitcast_convert_type(value, after.dtype.np)
        return jnp.moveaxis(wide, -1, -2).reshape(after.shape)
    factor = after.dtype.bits // before.dtype.bits
    rows = before.shape[-2] // factor
    split = value.reshape(*before.shape[:-2], rows, factor, before.shape[-1])
    return lax.bitcast_convert_type(jnp.moveaxis(split, -2, -1), after.dtype.np)


def static_bounds(first: Array, limit: Array, step: Array) -> int | None:
    """The trip count, if the bounds are constants."""
    try:
        lo, hi, by = (int(v) for v in (first, limit, step))
    except jax.errors.ConcretizationTypeError:
        return None
    return max(0, -(-(hi - lo) // by))


def dynamic_bounds(first: Array, limit: Array, step: Array) -> Array:
    """The trip count as an array, computed without differences that could wrap."""
    if first.dtype.itemsize < 4:
        first, limit, step = (tiles.int32(v) for v in (first, limit, step))
    one = jnp.ones_like(step)
    steps = lax.div(limit - first - one, step) + one
    return jnp.where(first < limit, steps, jnp.zeros_like(steps))


def same_types(new: Sequence[Array], old: Sequence[Array]) -> list[Array]:
    return [
        lax.convert_element_type(n, o.dtype) if n.dtype != o.dtype else n
        for n, o in zip(new, old, strict=True)
    ]


def dynamic_product(sizes: Sequence[Any]) -> Array:
    total = jnp.int32(1)
    for size in sizes:
        total = total * jnp.maximum(tiles.int32(size), 0)
    return total


def unravel(step: Array, sizes: Sequence[Any]) -> list[Array]:
    ids = []
    for n, size in reversed(list(enumerate(sizes))):
        if isinstance(size, int) and size == 1:
            ids.append(jnp.int32(0))
            continue
        if n == 0:
            ids.append(step)
            break
        ids.append(lax.rem(step, jnp.maximum(tiles.int32(size), 1)))
        step = lax.div(step, jnp.maximum(tiles.int32(size), 1))
    ids.extend([jnp.int32(0)] * (len(sizes) - len(ids)))
    return ids[::-1]
