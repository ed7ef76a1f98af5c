"""What one zoo entry is: a kernel, how to call it, its `jnp` meaning, and its inputs.

A family file makes a `Family` and registers one `Case` per kernel with its `case`
decorator. All of it also works under strict dtype promotion and with rank promotion
refused.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.xla import put

TAGS = {
    "odd": "a block hangs over the edge of an array",
    "fill": "uses `BlockSpec(fill=)`",
    "bf16": "bfloat16 operands",
    "f16": "float16 operands",
    "f8": "8-bit floating-point operands",
    "int8": "int8 operands",
    "int": "integer arithmetic or integer results",
    "bool": "boolean arrays",
    "prefetch": "scalar prefetch",
    "scratch": "scratch memory, mostly carried between programs",
    "smem": "scalars in SMEM",
    "alias": "an input shares its memory with an output",
    "dma": "explicit copies or semaphores",
    "atomic": "read-modify-write operations",
    "mesh": "`pl.kernel` over a mesh",
    "pipeline": "`emit_pipeline` inside a kernel",
    "element": "Element-indexed blocks",
    "masked": "`pl.load`, `pl.store`, `pl.swap` and their masks",
    "while": "a loop whose length is known only at run time",
    "nograd": "no useful derivative: integers, booleans, rounding, or a `while`",
    "nofloat": "no floating-point value at all, so the result is exact",
}


@dataclass(frozen=True, repr=False)
class Case:
    """One kernel of the zoo.

    Attributes:
        run: `run(*args, interpret=True, **options)`; options go to `pl.pallas_call`.
        reference: `reference(*args)` in plain `jnp`: same structure, shapes, dtypes.
        make_args: `make_args(rng)`: small arguments inside the kernel's domain.
        vmap_axes: `in_axes` for `jax.vmap(run)`; None where that means nothing.
        why: why `vmap_axes` is None.
    """

    name: str
    run: Callable[..., Any]
    reference: Callable[..., Any]
    make_args: Callable[[np.random.Generator], tuple]
    tags: frozenset[str] = frozenset()
    rtol: float = 1e-5
    atol: float = 1e-5
    vmap_axes: tuple | int | None = 0
    why: str = ""

    def __repr__(self) -> str:
        return f"Case({self.name})"


class Family:
    """The cases of one file, in the order in which they are written there."""

    def __init__(self, name: str):
        self.name = name
        self.cases: list[Case] = []

    def case(self, *, reference, make_args, tags: str = "", **fields):
        """Registers the decorated function as the `run` of a case of the same name."""

        def register(function):
            @functools.wraps(function)
            def run(*args, interpret=True, **options):
                return function(*args, interpret=interpret, **options)

            assert set(tags.split()) <= TAGS.keys(), tags
            all_tags = frozenset({self.name, *tags.split()})
            self.cases.append(
                Case(function.__name__, run, reference, make_args, all_tags, **fields)
            )
            return run

        return register


def normal(rng: np.random.Generator, *shape: int, dtype=jnp.float32, scale=1.0):
    """Normally distributed values of the given shape."""
    return put(rng.normal(size=shape) * scale, dtype)


def uniform(
    rng: np.random.Generator, *shape: int, low=0.0, high=1.0, dtype=jnp.float32
):
    """Uniformly distributed values in [low, high)."""
    return put(rng.uniform(low, high, size=shape), dtype)


def integers(rng: np.random.Generator, *shape: int, low=0, high=100, dtype=jnp.int32):
    """Uniformly distributed integers in [low, high)."""
    return put(rng.integers(low, high, size=shape), dtype)


def booleans(rng: np.random.Generator, *shape: int):
    """Fair coins."""
    return put(rng.integers(0, 2, size=shape), jnp.bool_)


def permutation(rng: np.random.Generator, size: int):
    """A random order of `range(size)`."""
    return put(rng.permutation(size), jnp.int32)
