"""Shared by all operations: choice of implementation, checks, kernels over rows.

Every operation takes `implementation=`:

- "pallasite": the operation's kernel, on whatever chip the operands are on.
- "xla": plain jnp, as written without kernels, for comparing speed.
- "reference": plain jnp in float32 throughout, for comparing results.
"""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

import pallasite as pl
from pallasite import jaxcompat
from pallasite import tpu as pltpu
from pallasite.errors import KernelTypeError, SpecError, UnsupportedError
from pallasite.placement import chip_for
from pallasite.sites import jaxprs_inside
from pallasite.target import Host

Implementation = Literal["pallasite", "xla", "reference"]


def choose(implementation: str, kernel: Callable, plain: Callable) -> Callable:
    """The function that computes an operation: its kernel or its plain form.

    `plain` computes in the dtypes it is given, so the reference is the same function
    on wider operands.
    """
    if not _is_one_of(implementation, get_args(Implementation)):
        raise SpecError(
            f"unknown implementation={implementation!r}",
            fix=f"one of {', '.join(map(repr, get_args(Implementation)))}",
        )
    if implementation == "pallasite":
        chosen = kernel
    else:
        chosen = plain if implementation == "xla" else in_float32(plain)

    def of_jax_arrays(*operands, **options):
        return chosen(*jax.tree.map(_of_jax, operands), **options)

    return of_jax_arrays


def _of_jax(x: Any) -> Any:
    """JAX treats numpy's float64 as float32 unless x64 is enabled."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def check_invariant(operation: str, implementation: str, asked: Any) -> None:
    """Checks that who asks for the same bits in any batch gets a kernel's."""
    if asked and implementation != "pallasite":
        raise SpecError(
            f"{operation}: batch_invariant=True is a promise of the kernel",
            [("implementation", repr(implementation))],
            fix="remove implementation=: what XLA adds up in which order follows from "
            "the whole shape",
        )


def result_dtype(given: Any, x: Any) -> np.dtype:
    """The requested dtype, or else the operand's."""
    if given is None:
        return jnp.dtype(jax.dtypes.canonicalize_dtype(x.dtype))
    return checked_dtype("out_dtype", given)


def checked_dtype(name: str, given: Any) -> np.dtype:
    """A dtype that an option names."""
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(given, jax.Array):  # those convert, with a warning
            return jnp.dtype(given)
    raise KernelTypeError(
        f"{name} is not a dtype",
        [("is", shown(given))],
        fix="pass a dtype, such as jnp.bfloat16",
    )


def in_float32(plain: Callable) -> Callable:
    """`plain` on operands widened to float32; results keep the dtypes of `plain`.

    Matmuls use full float32 precision, which is not every chip's default.
    """

    def widened(*operands, **options):
        given = functools.partial(plain, **options)
        dtypes = jax.tree.map(lambda x: x.dtype, jax.eval_shape(given, *operands))
        with jax.default_matmul_precision("highest"):
            out = given(*map(_widen, operands))
        return jax.tree.map(lambda x, dtype: x.astype(dtype), out, dtypes)

    return widened


def statistics_dtype(dtype: Any) -> Any:
    """The dtype of sums and exponentials: float32, or float64 for float64 operands."""
    is_double = jax.dtypes.canonicalize_dtype(dtype) == jnp.float64
    return jnp.float64 if is_double else jnp.float32


def check_floats(operation: str, **operands: Any) -> None:
    """Checks that every operand given has floating-point elements."""
    for name, x in operands.items():
        if x is None:
            continue
        check_array(operation, name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise KernelTypeError(
                f"{operation} needs floating-point operands",
                [(name, f"{x.dtype}{list(x.shape)}")],
                fix=f"convert {name} with .astype(jnp.float32)",
            )


def check_array(operation: str, name: str, x: Any) -> None:
    """Checks that an operand is an array, not a list, a number or only a shape."""
    if not hasattr(x, "dtype") or isinstance(x, jax.ShapeDtypeStruct):
        raise KernelTypeError(
            f"{operation}: {name} is not an array",
            [("is of type", type(x).__name__)],
            fix=f"pass {name} as an array: jnp.asarray(...)",
        )
    if any(not isinstance(size, int | np.integer) for size in x.shape):
        raise UnsupportedError(
            f"{operation}: {name} has a symbolic shape",
            [("has shape", tuple(x.shape))],
            fix="jax.vmap the call over the symbolic dimension, or export the function "
            "for each shape it is used with",
        )


def check_arrays(operation: str, **operands: Any) -> None:
    """Checks that every operand is an array; None is not."""
    for name, x in operands.items():
        check_array(operation, name, x)


def check_real(operation: str, **operands: Any) -> None:
    """Checks that every operand has elements that convert to floating point."""
    check_arrays(operation, **operands)
    for name, x in operands.items():
        kinds = (jnp.floating, jnp.integer, jnp.bool_)
        if not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
            raise KernelTypeError(
                f"{operation}: {name} has no real numbers",
                [("is", shown(x))],
                fix=f"pass {name} as floating point or integers",
            )


def check_rows(operation: str, name: str, x: Any) -> None:
    """Checks that an operand is rows of floats: it has a last dimension."""
    check_array(operation, name, x)
    check_floats(operation, **{name: x})
    if not x.ndim:
        raise SpecError(
            f"{operation}: {name} has no dimensions",
            [("has shape", _shape(x))],
            fix=f"pass {name} with shape (..., width)",
        )


def check_numbers(operation: str, **options: Any) -> None:
    """Checks that every option is one real number, traced or not.

    An array would multiply a block of whatever shape it happens to broadcast to.
    """
    for name, value in options.items():
        if not _is_number(value):
            raise KernelTypeError(
                f"{operation}: {name} is not a number",
                [("is", shown(value))],
                fix=f"pass {name} as one real number",
            )


def shown(value: Any) -> str:
    """A value in a message: an array's dtype and shape, anything else as it is."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def _is_number(value: Any) -> bool:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kinds = (jnp.floating, jnp.integer)
        is_real = any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
        return is_real and not value.shape
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_count(
    operation: str, name: str, value: Any, least: int, fix: str, most: float = math.inf
) -> None:
    """Checks that an option is an integer known at trace time, from `least` on."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:
        what = repr(value) if jaxcompat.is_concrete(value) else "a traced value"
        raise SpecError(f"{operation}: {name} is {what}", fix=fix)


def check_soft_cap(operation: str, soft_cap: Any) -> None:
    """Checks that a cap is a positive number.

    A cap of 0 would make all scores equal, and an infinite one NaN.
    """
    if soft_cap is None:
        return
    check_numbers(operation, soft_cap=soft_cap)
    if jaxcompat.is_concrete(soft_cap) and not 0 < soft_cap < math.inf:
        raise SpecError(
            f"{operation}: soft_cap is {soft_cap}",
            fix="pass a positive number, or None for scores without a cap",
        )


def check_elementwise(operation: str, name: str, function: Callable, x: Any) -> None:
    """Checks that a function keeps shapes, and computes each element on its own.

    It gets the blocks of a kernel: one that is right for x as a whole may not be.
    """
    for shape in (x.shape, BLOCK):
        made = None
        try:
            made = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, x.dtype))
            (found,) = (aval.shape for aval in made.out_avals)
        except (TypeError, ValueError, IndexError) as error:
            found = f"{type(error).__name__}: {error}"  # shapes that do not broadcast
        mixing = _mixing_primitive(made.jaxpr) if made and shape == BLOCK else None
        if found != shape or mixing:
            raise SpecError(
                f"{operation}: {name} is not elementwise",
                [
                    ("of a block", shape),
                    ("it produces", found),
                    *([("it uses", mixing)] if mixing else []),
                ],
                fix="apply functions of whole rows or of other arrays before the call",
            )


BLOCK = (2, 3)
# Parameters of primitives that tell the positions of elements apart.
_ABOUT_POSITIONS = {"axis", "axes", "dimension", "dimensions", "dimension_numbers"}
_ABOUT_POSITIONS |= {"permutation", "new_sizes", "padding_config", "slice_sizes"}


def _mixing_primitive(jaxpr: Any) -> str | None:
    """The first by which elements of a BLOCK depend on others, or on their position."""
    for eqn in jaxpr.eqns:
        inside = [getattr(each, "jaxpr", each) for each in jaxprs_inside(eqn)]
        if inside:
            found = next(filter(None, map(_mixing_primitive, inside)), None)
            if found is not None:
                return found
            continue
        of, to = ([v.aval.shape for v in vs] for vs in (eqn.invars, eqn.outvars))
        shapes = {s for s in (*of, *to) if math.prod(s) != 1}
        if not shapes:
            continue
        is_fill = eqn.primitive.name == "broadcast_in_dim" and math.prod(of[0]) == 1
        keeps = shapes == {BLOCK} and BLOCK in of and BLOCK in to
        if not is_fill and (not keeps or _ABOUT_POSITIONS & {*eqn.params}):
            return eqn.primitive.name
    return None


def check_shape(operation: str, name: str, x: Any, wanted: Sequence[int]) -> None:
    """Checks that an operand (or None) has the shape the others require."""
    if x is None:
        return
    if not hasattr(x, "shape"):
        check_array(operation, name, x)
    if _shape(x) != tuple(wanted):
        raise SpecError(
            f"{operation}: {name} does not match the other operands",
            [("has shape", _shape(x)), ("needs shape", tuple(wanted))],
            fix=_shape_fix(name, _shape(x), tuple(wanted)),
        )


def _shape_fix(name: str, shape: Sequence[int], wanted: tuple[int, ...]) -> str:
    if len(shape) > 1 and shape == (*wanted[:-2], *wanted[-2:][::-1]):
        return f"pass jnp.swapaxes({name}, -2, -1), of shape {wanted}"
    if len(shape) == len(wanted) > 1 and shape[-1] == wanted[-1] == wanted[-2]:
        # How many columns are wanted may have been read from the operand itself.
        turned = (*shape[:-2], *shape[-2:][::-1])
        return (
            f"pass jnp.swapaxes({name}, -2, -1), of shape {turned}, if it is "
            f"transposed; else {name} with shape {wanted}"
        )
    return f"pass {name} with shape {wanted}"


def check_rank(operation: str, name: str, x: Any, layout: str) -> tuple[int, ...]:
    """Checks that an operand has the dimensions `layout` names; returns its shape."""
    if not hasattr(x, "dequantize"):  # quantised weights are several arrays
        check_array(operation, name, x)
    shape, rank = _shape(x), len(layout.split(","))
    if len(shape) != rank:
        raise SpecError(
            f"{operation}: {name} has {len(shape)} dimensions",
            [("has shape", shape)],
            fix=f"pass {name} with {rank} dimensions: ({layout})",
        )
    return shape


def _shape(x: Any) -> tuple[int, ...]:
    """The shape of an array, or of quantised weights in its place."""
    return tuple(x.shape)


def check_integers(operation: str, **operands: Any) -> None:
    """Checks that every operand has integer elements."""
    for name, x in operands.items():
        check_array(operation, name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise KernelTypeError(
                f"{operation}: {name} are {x.dtype}",
                fix="pass them as int32",
            )


def as_int32(x: Any) -> jax.Array:
    """Integers as int32. One that it cannot hold becomes the nearest that it can.

    Converted otherwise, a number out of range could come out as one in range.
    """
    x, bounds = jnp.asarray(within_int32(x)), jnp.iinfo(jnp.int32)
    if jnp.iinfo(x.dtype).max > bounds.max:
        x = jnp.minimum(x, bounds.max)
    if jnp.iinfo(x.dtype).min < bounds.min:
        x = jnp.maximum(x, bounds.min)
    return x.astype(jnp.int32)


def within_int32(x: Any) -> Any:
    """Integers of numpy within int32; of larger ones JAX would keep the low bits."""
    if not isinstance(x, (np.ndarray, np.integer)) or x.dtype.kind not in "iu":
        return x
    bounds = np.iinfo(np.int32)
    return np.clip(x, bounds.min, bounds.max) if x.dtype.itemsize == 8 else x


def check_option(operation: str, name: str, value: Any, known: Sequence[Any]) -> None:
    """Checks that an option has one of the values the operation accepts."""
    if not _is_one_of(value, known):
        raise SpecError(
            f"{operation} has no {name} {value!r}",
            fix=f"one of {', '.join(map(repr, known))}",
        )


def _is_one_of(value: Any, known: Sequence[Any]) -> bool:
    """`value in known`; an array would compare its elements."""
    return isinstance(value, str | int | np.integer) and value in known


def cost(
    flops: int, arrays: Sequence[Any], transcendentals: int = 0
) -> pl.CostEstimate:
    """The cost of a kernel that reads or writes each of `arrays` once."""
    moved = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
    return pl.CostEstimate(
        flops=flops, transcendentals=transcendentals, bytes_accessed=moved
    )


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """How rows are split among programs: `block_rows` whole rows each.

    `batch_invariant` is the operations' argument.
    """

    block_rows: int
    batch_invariant: bool = False


def compiler_params(config: Any, *semantics: str) -> pltpu.CompilerParams:
    """Of an operation's kernel, given what its grid axes are."""
    return pltpu.CompilerParams(
        dimension_semantics=semantics or None,
        batch_invariant=config.batch_invariant or None,
    )


def added(parts: jax.Array, config: Any, axis: int = 0) -> jax.Array:
    """The sum over a dimension that is small.

    In order where rows must not depend on how many there are: XLA's order follows from
    the whole shape. On a CPU, it fuses a chain of array additions into a single loop; a
    reduction over the first dimension took 3 to 100 times as long (jax 0.10.2).
    """
    if config.batch_invariant or isinstance(chip_for(None), Host):
        return functools.reduce(operator.add, jnp.moveaxis(parts, axis, 0))
    return jnp.sum(parts, axis=axis)


def row_config(x: Any) -> RowConfig:
    """Block sizes suited to the rows of an operand (..., width)."""
    return RowConfig(rows_per_block(x.shape))


def over_rows(
    kernel: Callable,
    rows: Sequence[jax.Array],
    shared: Sequence[jax.Array],
    out_dtypes: Sequence[Any],
    *,
    config: RowConfig,
    name: str,
) -> list[jax.Array]:
    """Runs `kernel(*row_refs, *shared_refs, *out_refs)` on blocks of whole rows.

    `rows` and the results all have one shape (..., width), whose leading dimensions
    are flattened for the kernel. Each of `shared` has shape (width,).
    """
    shape = rows[0].shape
    width = shape[-1]
    count, block_rows = math.prod(shape[:-1]), config.block_rows
    row_spec = pl.BlockSpec((block_rows, width), lambda i: (i, 0))
    shared_spec = pl.BlockSpec((1, width), lambda i: (0, 0))
    out = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((count, width), d) for d in out_dtypes],
        grid=(pl.cdiv(count, block_rows),),
        in_specs=[row_spec] * len(rows) + [shared_spec] * len(shared),
        out_specs=[row_spec] * len(out_dtypes),
        compiler_params=compiler_params(config),
        # Memory-bound: a few operations and one transcendental per element.
        cost_estimate=cost(
            8 * count * width,
            [*rows, *shared, *(jax.ShapeDtypeStruct(shape, d) for d in out_dtypes)],
            count * width,
        ),
        name=name,
    )(*(x.reshape(count, width) for x in rows), *(x.reshape(1, width) for x in shared))
    return [x.reshape(shape) for x in out]


def rows_per_block(shape: Sequence[int]) -> int:
    """A multiple of eight rows: about 256 KB of f32, and enough blocks to share out.

    All rows if there are fewer. Backends resize such blocks for their chip; devices
    share whole blocks.
    """
    count, width = math.prod(shape[:-1]), max(shape[-1], 1)
    fitting = 256 * 1024 // (4 * width)
    return min(max(min(fitting, count // 64) // 8 * 8, 8), max(count, 1))


def _widen(x: Any) -> Any:
    is_float = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(statistics_dtype(x.dtype)) if is_float else x


def differentiated_as(function: Callable, same: Callable, *operands: Any) -> Any:
    """`function(*operands)` with the derivative of `same`, which computes the same.

    For kernels whose best blocks differ from those backward kernels should have. The
    operands are pytrees.
    """
    call = jax.custom_jvp(function)

    def jvp(primals, tangents):
        leaves, tree = jax.tree.flatten(primals)
        changes = jax.tree.leaves(tangents)
        active = [n for n, d in enumerate(changes) if not isinstance(d, SymbolicZero)]

        def of_active(*values):
            known = dict(zip(active, values, strict=True))
            all_of_them = [known.get(n, x) for n, x in enumerate(leaves)]
            return same(*jax.tree.unflatten(tree, all_of_them))

        return jax.jvp(
            of_active, [leaves[n] for n in active], [changes[n] for n in active]
        )

    call.defjvp(jvp, symbolic_zeros=True)
    return call(*operands)


def instantiated(tangents: Any, primals: Any) -> Any:
    """Tangents with arrays of zeros for symbolic ones; both are pytrees."""

    def each(tangent: Any, primal: Any) -> Any:
        is_zero = isinstance(tangent, SymbolicZero)
        return jnp.zeros_like(primal) if is_zero else tangent

    return jax.tree.map(each, tangents, primals)
