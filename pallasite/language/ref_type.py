"""`pl.Ref`: the type of a kernel's parameters, for editors and type checkers.

While a kernel is traced, JAX makes the refs; no class of ours is behind them.
"""

from types import EllipsisType
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.typing import ArrayLike


class Span(Protocol):
    """What `pl.ds` returns."""

    @property
    def start(self) -> object: ...

    @property
    def size(self) -> object: ...

    @property
    def stride(self) -> object: ...


Entry = int | slice | EllipsisType | None | jax.Array | np.ndarray | Span
Index = Entry | tuple[Entry, ...]


@runtime_checkable
class Ref(Protocol):
    """A mutable reference to a block, scratch or array in memory.

    `ref[...]` reads it as an array, `ref[...] = x` writes it, and `ref.at[index]` is a
    ref of a part. A kernel is annotated so:

    Example:
        ```
        def kernel(x_ref: pl.Ref, o_ref: pl.Ref) -> None:
            o_ref[...] = 2 * x_ref[...]
        ```
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def ndim(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def at(self) -> "Parts": ...

    def __getitem__(self, index: Index, /) -> jax.Array: ...

    def __setitem__(self, index: Index, value: ArrayLike, /) -> None: ...


class Parts(Protocol):
    """`ref.at`: indexing it gives refs."""

    def __getitem__(self, index: Index, /) -> Ref: ...
