"""Upstream's names for what `jax.export` does."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export


def lower_as_mlir(
    f: Callable[..., Any],
    *args: Any,
    dynamic_shapes: bool = False,
    device: Any = None,
    static_argnames: Sequence[str] = (),
    platforms: Sequence[str] | None = None,
    **kwargs: Any,
) -> str:
    """The StableHLO text of a function for a platform, the TPU if none is given.

    `pl.lower(f)(*args)` shows what Pallasite makes of its kernels.

    Args:
        f: the function; arguments follow, arrays or shapes and dtypes.
        dynamic_shapes, device: accepted without effect; shapes may have symbols.
        static_argnames: as for `jax.jit`.
        platforms: as for `jax.export.export`.
    """
    del dynamic_shapes, device
    compiled = jax.jit(f, static_argnames=static_argnames)
    export = jax.export.export(compiled, platforms=platforms or ["tpu"])
    return export(*args, **kwargs).mlir_module()


def pallas_export_experimental(
    dynamic_shapes: bool,
) -> contextlib.AbstractContextManager[None]:
    """Changes nothing: `jax.export` takes shapes with symbols without it."""
    del dynamic_shapes
    return contextlib.nullcontext()
