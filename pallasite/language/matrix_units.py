"""Matrix units scheduled by the author: `pltpu.matmul_push_rhs` and related functions.

Units, staging registers and addresses are numbers known at trace time; the kernel
itself decides what goes where. Newer JAX names accumulators by refs (`pltpu.ACC`),
older JAX by a unit and an address: both are accepted.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, SpecError
from pallasite.language import refs
from pallasite.language.memory_spaces import MemoryRef, MemorySpace
from pallasite.language.refs import kernel_primitive
from pallasite.language.trace import user_location

_EXAMPLE = "pltpu.matmul_acc_lhs(0, lhs, mxu_index=0, load_staged_rhs=0)"


@dataclass(frozen=True)
class AccumulatorSpace:
    """`pltpu.ACC(mxu_id)`: a matrix unit's accumulators; scratch when called."""

    mxu_id: int
    value: str = "vmem"  # used where there are no such instructions

    def __call__(self, shape: Sequence[int], dtype: Any) -> MemoryRef:
        memory = MemorySpace.VMEM(shape, dtype)
        if len(memory.shape) != 2 or memory.dtype not in (np.float32, np.int32):
            raise SpecError(
                "an accumulator of a matrix unit must be a matrix of float32 or int32",
                [("shape", memory.shape), ("dtype", memory.dtype)],
                user_location(),
                f"pltpu.ACC({self.mxu_id})((128, 256), jnp.float32)",
            )
        return MemoryRef(memory.shape, memory.dtype, self)  # type: ignore[arg-type]


def _effects(avals: tuple[Any, ...]) -> set[Any]:
    # JAX does not see a unit's memory as a ref; a debug effect keeps the order.
    return refs.ref_effects(avals) | {jaxcompat.debug_effect()}


push_p = kernel_primitive("matmul_push_rhs", multiple_results=True)
push_p.def_effectful_abstract_eval(lambda *a, **_: ([], _effects(a)))
multiply_p = kernel_primitive("matmul_acc_lhs", multiple_results=True)
multiply_p.def_effectful_abstract_eval(lambda *a, **_: ([], _effects(a)))
pop_p = kernel_primitive("matmul_pop")
pop_p.def_effectful_abstract_eval(
    lambda *a, shape, dtype, **_: (jax.core.ShapedArray(shape, dtype), _effects(a))
)


def matmul_push_rhs(
    rhs: Any, staging_register: int, mxu_index: int, *, transpose: bool = False
) -> None:
    """Put a right operand into a staging register of a matrix unit.

    It takes effect when `matmul_acc_lhs(load_staged_rhs=...)` loads it, which frees the
    register.
    """
    numbers = {"staging_register": staging_register, "mxu_index": mxu_index}
    register, unit = _numbers("matmul_push_rhs", numbers)
    push_p.bind(
        _matrix("matmul_push_rhs", "rhs", rhs),
        register=register,
        unit=unit,
        transpose=bool(transpose),
    )


def matmul_acc_lhs(
    acc: Any = None,
    lhs: Any = None,
    *given: Any,
    acc_addr: Any = None,
    mxu_index: Any = None,
    load_staged_rhs: Any = None,
) -> None:
    """Add `lhs` times the loaded right operand to an accumulator of a matrix unit.

    Args:
        acc: the accumulator: a ref in `pltpu.ACC(unit)`, or an address, in which case
            `mxu_index` follows `lhs`.
        lhs: the left operand; it has as many columns as the right operand has rows.
        load_staged_rhs: the staging register from which the unit first loads its right
            operand; None keeps the current one.
    """
    acc = acc_addr if acc is None else acc
    ref, unit = _ref_and_unit("matmul_acc_lhs", acc)
    names = ("load_staged_rhs",) if ref else ("mxu_index", "load_staged_rhs")
    said = {"mxu_index": mxu_index, "load_staged_rhs": load_staged_rhs}
    said.update(zip(names, given, strict=False))
    load = said["load_staged_rhs"]
    if load is not None:
        (load,) = _numbers("matmul_acc_lhs", {"load_staged_rhs": load})
    address = None
    if not ref:
        numbers = {"acc_addr": acc, "mxu_index": said["mxu_index"]}
        address, unit = _numbers("matmul_acc_lhs", numbers)
    value = _matrix("matmul_acc_lhs", "lhs", lhs)
    multiply_p.bind(value, *ref, unit=unit, address=address, load=load)


def matmul_pop(
    acc: Any = None,
    shape: Any = None,
    dtype: Any = None,
    mxu_index: Any = None,
    *,
    acc_addr: Any = None,
) -> jax.Array:
    """Read an accumulator of a matrix unit and reset it to zero.

    Args:
        acc: the accumulator: a ref in `pltpu.ACC(unit)`, or an address; the other
            arguments are for an address.
        shape, dtype: of the accumulator.
        mxu_index: the unit.
    """
    acc = acc_addr if acc is None else acc
    ref, unit = _ref_and_unit("matmul_pop", acc)
    if ref:
        aval: Any = jaxcompat.aval_of(ref[0])
        sums = {"shape": tuple(aval.shape), "dtype": np.dtype(aval.dtype)}
        return pop_p.bind(*ref, unit=unit, address=None, **sums)
    address, unit = _numbers("matmul_pop", {"acc_addr": acc, "mxu_index": mxu_index})
    sums = {"shape": tuple(map(int, shape or ())), "dtype": np.dtype(dtype)}
    if len(sums["shape"]) != 2 or sums["dtype"] not in (np.float32, np.int32):
        raise KernelTypeError(
            "pltpu.matmul_pop returns a matrix of float32 or int32",
            [("shape", sums["shape"]), ("dtype", sums["dtype"])],
            user_location(),
            "pass the accumulator's type: float32 for floats, int32 for integers",
        )
    return pop_p.bind(unit=unit, address=address, **sums)


def _ref_and_unit(name: str, acc: Any) -> tuple[tuple[Any, ...], int]:
    """The accumulator's ref, in a tuple, and its unit; empty if given an address."""
    if not jaxcompat.is_ref(acc):
        return (), 0
    root, transforms = jaxcompat.ref_and_transforms(acc)
    space: Any = getattr(jaxcompat.aval_of(root), "memory_space", None)
    if not isinstance(space, AccumulatorSpace) or transforms:
        raise KernelTypeError(
            f"pltpu.{name} needs a whole ref in pltpu.ACC",
            [("acc", jaxcompat.aval_of(root)), ("views", len(transforms) or None)],
            user_location(),
            "scratch_shapes=[pltpu.ACC(0)((128, 256), jnp.float32)]",
        )
    return (root,), space.mxu_id


def _numbers(name: str, given: Mapping[str, Any]) -> list[int]:
    found = []
    for label, number in given.items():
        try:
            if isinstance(number, bool):  # True would be register 1
                raise TypeError
            found.append(operator.index(number))
        except TypeError:
            found.append(-1)
        if found[-1] < 0:
            raise KernelTypeError(
                f"pltpu.{name} takes {label} as an int, 0 or more",
                [(label, repr(number))],
                user_location(),
                f"{_EXAMPLE}: numbers that are static in the kernel",
            )
    return found


def _matrix(name: str, label: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim != 2:
        raise KernelTypeError(
            f"pltpu.{name} takes a matrix as {label}",
            [(label, f"{x.dtype.name}{list(x.shape)}")],
            user_location(),
            "load a block of two dimensions",
        )
    return x


# --- convolutions ---


def conv(
    lhs: Any,
    rhs: Any,
    acc: Any = None,
    *,
    dimension_numbers: Any,
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] | None = None,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    window_reversal: Sequence[bool] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """`lax.conv_general_dilated`, added to `acc` if that is given.

    By default strides and dilations are 1, and there is no padding. `window_reversal`
    says along which window dimensions `rhs` is reversed.
    """
    numbers = lax.conv_dimension_numbers(
        jnp.shape(lhs), jnp.shape(rhs), dimension_numbers
    )
    spatial = numbers.rhs_spec[2:]
    turned = [
        d for d, turn in zip(spatial, window_reversal or (), strict=False) if turn
    ]
    result = lax.conv_general_dilated(
        lhs,
        lax.rev(rhs, turned) if turned else rhs,
        window_strides or (1,) * len(spatial),
        padding if padding is not None else [(0, 0)] * len(spatial),
        lhs_dilation,
        rhs_dilation,
        numbers,
        feature_group_count,
        batch_group_count,
        precision,
        preferred_element_type,
    )
    return result if acc is None else acc + result
