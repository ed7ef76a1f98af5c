"""An operation of the library against its reference, every way a user can run it.

References, gradients and batches are under `jit`, which compiles one program where each
op would be another; values and the modes are also computed without it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallasite import config

TOLERANCE = {
    "int32": 0,
    "float64": 1e-10,
    "float32": 2e-5,
    "bfloat16": 3e-2,
    "float16": 4e-3,
    "float8_e4m3fn": 0.1,
}


# The tests' own level is 0, at which jaxlib 0.12 computes some gradients wrong on CPUs.
REFERENCE = {"xla_backend_optimization_level": 1}


def values_agree(operation: Callable, *args: Any) -> None:
    """`operation(*args, implementation=...)`: kernel and reference give one result."""
    _close(operation(*args, implementation="pallasite"), _reference(operation, *args))


def gradients_agree(operation: Callable, *args: Any) -> None:
    """The gradients of a weighted sum of all results, with respect to all floats."""
    floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def total(implementation: str) -> Callable:
        def f(*args: Any) -> Any:
            leaves = jax.tree.leaves(operation(*args, implementation=implementation))
            return sum(_weighted(x) for x in leaves)

        return f

    kernel, reference = (
        jax.grad(total(name), argnums=floats) for name in ("pallasite", "reference")
    )
    want = jax.jit(reference, compiler_options=REFERENCE)(*args)
    _close(jax.jit(kernel)(*args), want)


def modes_agree(operation: Callable, *args: Any) -> None:
    """Emulated, checked, under jit and under vmap: one result."""
    want = _reference(operation, *args)
    with config.override(interpret="1"):
        _close(operation(*args), want)
    with config.override(interpret="checked"):
        _close(operation(*args), want)
    _close(jax.jit(operation)(*args), want)
    doubled = lambda x: np.stack([x, x])
    batched = jax.jit(jax.vmap(operation))(*map(doubled, args))
    _close(batched, jax.tree.map(doubled, want))


def shards_agree(
    operation: Callable, axis: int | Sequence[int | None], *args: Any
) -> None:
    """Operands spread over all devices along a dimension each, or copied (None).

    One `axis` stands for that dimension of all operands of full rank.
    """
    if isinstance(axis, int):
        rank = max(x.ndim for x in args)
        axis = [axis if x.ndim == rank else None for x in args]
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    specs = [P() if n is None else P(*(None,) * n, "x") for n in axis]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, specs, strict=True)
    ]
    _close(jax.jit(operation)(*placed), _reference(operation, *args))


def _reference(operation: Callable, *args: Any) -> Any:
    plain = functools.partial(operation, implementation="reference")
    return jax.jit(plain, compiler_options=REFERENCE)(*args)


@jax.jit
def _weighted(x: jax.Array) -> jax.Array:
    weights = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    return jnp.sum(jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32) * weights)


def _close(got: Any, want: Any) -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        wide = [np.asarray(x, np.float64) for x in (a, b)]
        finite = wide[1][np.isfinite(wide[1])]
        scale = max(1.0, np.abs(finite).max(initial=0))
        tolerance = TOLERANCE[a.dtype.name]
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance * scale)
