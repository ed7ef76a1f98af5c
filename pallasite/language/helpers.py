"""Small helpers for kernel authors: when, loop, arithmetic on sizes."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, overload

import jax
import jax.numpy as jnp
import jax.ref
import numpy as np
from jax import lax

from pallasite import config, jaxcompat
from pallasite.errors import KernelTypeError
from pallasite.language.trace import location_of, user_location


class _Runs:
    """A decorator that runs the decorated function; any other use is an error."""

    def __init__(self, name: str, parameters: str, run: Callable[..., Any]):
        self.name, self.parameters, self.run = name, parameters, run

    def __call__(self, fn: Callable[..., Any]) -> Any:
        return self.run(fn)

    def _misused(self, *args: Any) -> NoReturn:
        raise KernelTypeError(
            f"pl.{self.name} is a decorator: it cannot be used with `with`, `for` or "
            "`if`",
            at=user_location(),
            fix=f"@pl.{self.name}(...)\ndef _({self.parameters}):\n    ...",
        )

    __enter__ = __exit__ = __iter__ = __bool__ = _misused


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Run the decorated function, which returns nothing, if `condition` holds.

    Example:
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)
    """

    def decorate(fn: Callable[[], None]) -> None:
        if isinstance(condition, (bool, np.bool_)):
            if condition:
                fn()
            return
        if not isinstance(condition, (int, float)) and not hasattr(condition, "dtype"):
            raise KernelTypeError(
                f"pl.when takes a condition, got {condition!r}",
                at=user_location(),
                fix="a bool, or a comparison of values: pl.program_id(0) == 0",
            )
        if jnp.shape(condition) != ():
            raise KernelTypeError(
                f"pl.when takes one condition, got an array of shape "
                f"{jnp.shape(condition)}",
                at=user_location(),
                fix="reduce it with jnp.any or jnp.all, or use jnp.where",
            )

        @functools.wraps(fn)  # JAX's errors name the author's function
        def taken() -> None:
            if jax.tree.leaves(returned := fn()):
                raise KernelTypeError(
                    "the function of a pl.when returns a value, which is not used",
                    [("returned", _types_of(returned))],
                    location_of(fn),
                    "store it to a ref, or select between two values with jnp.where "
                    "or jax.lax.cond",
                )

        lax.cond(condition, taken, lambda: None)

    return _Runs("when", "", decorate)


def loop(
    lower: Any,
    upper: Any,
    *,
    init_carry: Any = None,
    step: Any = 1,
    unroll: int | bool | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Run the decorated function for each index in `range(lower, upper, step)`.

    With `init_carry` the function is called as `fn(i, carry)` and returns the next
    carry (a pytree of values); the decorated name becomes the final carry.

    Example:
        @pl.loop(0, 8)
        def _(i):
            o_ref[i] = x_ref[i] + 1

        @pl.loop(0, 8, init_carry=0.0)
        def total(i, so_far):
            return so_far + x_ref[i]
    """

    _check_bounds(lower, upper, step)

    def decorate(fn: Callable[..., Any]) -> Any:
        def run(i: Any, carry: Any) -> Any:
            following = fn(i) if init_carry is None else fn(i, carry)
            if (following is None) != (init_carry is None):
                raise _carry_mismatch(fn, init_carry, following)
            return following

        static = all(isinstance(v, (int, np.integer)) for v in (lower, upper, step))
        if static and unroll is True:
            carry = init_carry
            for i in range(lower, upper, step):
                carry = run(i, carry)
            return carry
        if static:
            first, stride, zero = lower, step, 0
            rounds = len(range(lower, upper, step))
        else:
            first, last, stride = _of_one_type(lower, upper, step)
            if isinstance(step, (int, np.integer)) and step == 1:
                return lax.fori_loop(first, last, functools.wraps(fn)(run), init_carry)
            rounds = _rounds(first, last, stride)
            zero = jnp.zeros_like(rounds)

        @functools.wraps(fn)
        def body(n: Any, carry: Any) -> Any:
            return run(first + n * stride, carry)

        return lax.fori_loop(zero, rounds, body, init_carry)

    return _Runs("loop", "i", decorate)


def _of_one_type(*numbers: Any) -> list[jax.Array]:
    """Bounds and step of a loop, converted to the type of the traced ones."""
    dtype = jnp.result_type(*(v for v in numbers if not isinstance(v, int)))
    return [jnp.asarray(v, dtype) for v in numbers]


def _rounds(first: jax.Array, last: jax.Array, step: jax.Array) -> jax.Array:
    """The trip count of `range(first, last, step)`; 0 for a step of 0."""
    low, high = jnp.where(step > 0, first, last), jnp.where(step > 0, last, first)
    # Unsigned, the difference of any two numbers fits.
    limits = jnp.iinfo(step.dtype)
    unsigned = jnp.dtype(f"uint{limits.bits}")
    distance = high.astype(unsigned) - low.astype(unsigned)
    stride = jnp.where(step > 0, step, -step).astype(unsigned)
    rounds = lax.div(distance - 1, jnp.maximum(stride, 1)) + 1
    rounds = jnp.minimum(rounds, jnp.asarray(limits.max, unsigned))
    return jnp.where((low < high) & (step != 0), rounds, 0).astype(step.dtype)


def _carry_mismatch(fn: Any, init_carry: Any, returned: Any) -> KernelTypeError:
    """The error for a loop function that should, or should not, return a value."""
    if init_carry is None:
        what = "the function of a pl.loop without init_carry returns a value"
        fix = "pl.loop(..., init_carry=first) and def fn(i, carry), or return nothing"
        return KernelTypeError(
            what, [("returned", _types_of(returned))], location_of(fn), fix
        )
    return KernelTypeError(
        "the function of a pl.loop with init_carry returns nothing",
        [("init_carry", _types_of(init_carry))],
        location_of(fn),
        "return the next carry, of the same shapes and dtypes",
    )


def _types_of(tree: Any) -> str:
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(tree)]
    return ", ".join(f"{t.dtype}{list(t.shape)}" for t in types)


def _check_bounds(*bounds: Any) -> None:
    for value in bounds:
        if jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
            raise KernelTypeError(
                f"pl.loop takes integers, got {value!r}",
                at=user_location(),
                fix="pl.loop(0, n, step=1), with whole numbers or integer scalars",
            )
    if isinstance(bounds[-1], (int, np.integer)) and bounds[-1] == 0:
        raise KernelTypeError(
            "the step of pl.loop is 0",
            at=user_location(),
            fix="use a step of 1 or more",
        )


@overload
def cdiv(a: int, b: int) -> int: ...


@overload
def cdiv(a: jax.Array, b: int | jax.Array) -> jax.Array: ...


@overload
def cdiv(a: int, b: jax.Array) -> jax.Array: ...


@overload
def cdiv(a: Any, b: Any) -> Any: ...


def cdiv(a: Any, b: Any) -> Any:
    """Division rounded up, for operands of either sign."""
    if isinstance(a, (int, np.integer)) and isinstance(b, (int, np.integer)):
        return -(-a // b)
    if jaxcompat.is_symbolic(a) or jaxcompat.is_symbolic(b):
        return -(-a // b)
    if jnp.issubdtype(jnp.result_type(a, b), jnp.unsignedinteger):
        return jnp.floor_divide(a + (b - 1), b)
    return -jnp.floor_divide(-a, b)


def align_to(a: int, alignment: int) -> int:
    """`a` rounded up to a multiple of `alignment`."""
    return cdiv(a, alignment) * alignment


def next_power_of_2(x: int) -> int:
    """The smallest power of two that is at least `x`."""
    if x < 0:
        raise KernelTypeError(
            f"next_power_of_2 takes a size, got {x}", fix="pass a number of 1 or more"
        )
    return 1 if x == 0 else 1 << (x - 1).bit_length()


def strides_from_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides, step = [], 1
    for n in reversed(tuple(shape)):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def broadcast_to(a: Any, shape: Sequence[int]) -> jax.Array:
    """`jnp.broadcast_to`, under the name kernels use."""
    return jnp.broadcast_to(a, tuple(shape))


def empty(shape: Sequence[int], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
    """An array whose contents the kernel will overwrite (zeros here)."""
    return jnp.zeros(tuple(shape), dtype)


def empty_like(x: Any, **_: Any) -> Any:
    """`empty` with the shapes and dtypes of a pytree."""
    return jax.tree.map(lambda leaf: empty(leaf.shape, leaf.dtype), x)


def empty_ref_like(x: Any) -> Any:
    """A new ref with the shape and dtype of `x`, to be overwritten."""
    return jax.new_ref(empty(x.shape, x.dtype))


def dot(
    a: Any,
    b: Any,
    trans_a: bool = False,
    trans_b: bool = False,
    allow_tf32: bool | None = None,
    precision: Any = None,
) -> jax.Array:
    """A matmul of two tiles, accumulated in float32 (int32 for integers).

    Without `precision`, `allow_tf32` says whether float32 operands may be rounded to
    10 mantissa bits on chips that multiply those faster.
    """
    a, b = (a.T if trans_a else a), (b.T if trans_b else b)
    integer = jnp.issubdtype(a.dtype, jnp.integer)
    wide = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    accumulate = jnp.int32 if integer else wide
    if precision is None and allow_tf32 is False:
        precision = jax.lax.Precision.HIGHEST
    if precision is None and allow_tf32 and a.dtype == b.dtype == jnp.float32:
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
    return jnp.dot(a, b, precision=precision, preferred_element_type=accumulate)


def max_contiguous(x: Any, values: Any) -> Any:
    """A promise about contiguous runs; results do not depend on it."""
    del values
    return x


def debug_checks_enabled() -> bool:
    """Whether `pl.debug_check` checks anything: yes, unless switched off."""
    return config.get("debug_checks")


def enable_debug_checks(
    new_val: bool = True,
) -> contextlib.AbstractContextManager[None]:
    """A `with` block in whose kernels `pl.debug_check` checks (or, False, does not)."""
    return config.override(debug_checks=bool(new_val))


def enable_poison_buffers(
    new_val: bool = True,
) -> contextlib.AbstractContextManager[None]:
    """A `with` block in whose kernels floats that `pl.run_scoped` allocates begin as
    NaNs, on every backend."""
    return config.override(poison_buffers=bool(new_val))


def reciprocal(x: Any, *, approx: bool = False, full_range: bool = True) -> jax.Array:
    """`1 / x` in full precision, even where the chip has a faster approximation."""
    del approx, full_range
    return 1 / x


def run_state(f: Callable[..., None]) -> Callable[..., Any]:
    """Turn a function of refs into one of values that returns the refs' contents.

    Example:
        def double(ref):
            ref[...] = 2 * ref[...]
        pl.run_state(double)(jnp.ones(3))  # 2, 2, 2
    """

    # Jitted because before 0.12, JAX's concrete refs have no `.at` for views.
    @functools.partial(jax.jit, static_argnums=1)
    def run(values: Sequence[Any], state: Any) -> Any:
        structure, spaces = state
        refs = [
            jax.new_ref(jnp.asarray(value), memory_space=space)
            for value, space in zip(values, spaces, strict=True)
        ]
        f(jax.tree.unflatten(structure, refs))
        return jax.tree.unflatten(structure, [jax.ref.freeze(r) for r in refs])

    def call(tree: Any) -> Any:
        placed = lambda x: hasattr(x, "value") and hasattr(x, "memory_space")
        leaves, structure = jax.tree.flatten(tree, is_leaf=placed)
        spaces = tuple(x.memory_space if placed(x) else None for x in leaves)
        values = [x.value if placed(x) else x for x in leaves]
        return run(values, (structure, spaces))

    return call
