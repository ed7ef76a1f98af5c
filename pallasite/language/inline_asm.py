"""PTX assembly inside a kernel, for NVIDIA GPUs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from pallasite.errors import KernelTypeError
from pallasite.language.refs import kernel_primitive
from pallasite.language.trace import user_location

inline_asm_p = kernel_primitive("elementwise_inline_asm", multiple_results=True)


@inline_asm_p.def_abstract_eval
def _results(*avals: Any, types: Sequence[tuple[Any, Any]], **params: Any) -> list[Any]:
    del avals, params
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in types]


def elementwise_inline_asm(
    asm: str,
    *,
    args: Sequence[Any],
    constraints: str,
    pack: int,
    result_shape_dtypes: Sequence[Any],
) -> list[jax.Array]:
    """Apply PTX instructions to tiles, element by element. NVIDIA GPUs only.

    Args:
        asm: the instructions; $0, $1, ... are the results, then the arguments.
        args: tiles of one shape.
        constraints: in LLVM's syntax, "=r,r" for one result and one argument in 32-bit
            registers.
        pack: how many elements of each tile one execution of `asm` takes.
        result_shape_dtypes: one `jax.ShapeDtypeStruct` per result, of the same shape.

    Returns:
        The results.
    """
    tiles = [jnp.asarray(x) for x in args]
    shapes = {x.shape for x in (*tiles, *result_shape_dtypes)}
    if len(shapes) > 1:
        raise KernelTypeError(
            "arguments and results of elementwise_inline_asm must have the same shape",
            [
                ("arguments", ", ".join(str(x.shape) for x in tiles)),
                (
                    "results",
                    ", ".join(str(tuple(x.shape)) for x in result_shape_dtypes),
                ),
            ],
            at=user_location(),
            fix="broadcast the arguments first",
        )
    types = tuple((tuple(x.shape), jnp.dtype(x.dtype)) for x in result_shape_dtypes)
    return inline_asm_p.bind(
        *tiles, asm=asm, constraints=constraints, pack=int(pack), types=types
    )
