"""Attention masks as objects: which query may look at which key.

Masks compose: `Causal() & Segments(ids, ids)`, `Window(1023, 0) | Prefix(64)`. Each
says which pairs it allows, whether a whole block of pairs can have an allowed one
(blocks without are skipped), and which arrays it needs to say so. They are pytrees,
so a jitted function can take them as arguments.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallasite.errors import SpecError


class Span(NamedTuple):
    """Positions of a block along one side: the first, and how many there are."""

    start: Any
    size: int

    @property
    def last(self) -> Any:
        return self.start + self.size - 1


class Data(NamedTuple):
    """What a mask reads of its arrays for one block of pairs: a value per array.

    A number per batch element comes as a scalar; a number per query as a (rows, 1)
    tile, per key as a (1, columns) tile.
    """

    values: tuple[Any, ...]


class Mask(abc.ABC):
    """The interface of every mask, and how masks compose."""

    # The sides ("batch", "query" or "key") along which each array field varies.
    SIDES: ClassVar[dict[str, str]] = {}

    @abc.abstractmethod
    def allows(self, rows: Any, columns: Any, data: Data) -> Any:
        """Which pairs are allowed: broadcast booleans for positions rows, columns."""

    @abc.abstractmethod
    def may_allow(self, rows: Span, columns: Span, data: Data) -> Any:
        """False only if no pair of the block is allowed."""

    def arrays(self) -> Iterator[tuple[str, str, jax.Array]]:
        """(field, side, array) of everything the mask reads, parts first to last."""
        for name, side in self.SIDES.items():
            yield name, side, getattr(self, name)

    def __and__(self, other: "Mask") -> "Mask":
        return _Both(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _Either(self, other)


def _pytree(*arrays: str) -> Callable[[type], type]:
    """A frozen dataclass whose fields `arrays` are leaves, the others static."""

    def register(cls: type) -> type:
        cls = dataclasses.dataclass(frozen=True)(cls)
        names = [f.name for f in dataclasses.fields(cls)]
        static = [n for n in names if n not in arrays]
        return jax.tree_util.register_dataclass(cls, list(arrays), static)

    return register


@_pytree()
class Everything(Mask):
    """All pairs."""

    def allows(self, rows, columns, data):
        return jnp.full(jnp.broadcast_shapes(rows.shape, columns.shape), True)

    def may_allow(self, rows, columns, data):
        return True


@_pytree()
class Causal(Mask):
    """Keys up to the query's own position: `key <= query + offset`."""

    offset: int = 0

    def allows(self, rows, columns, data):
        return columns <= rows + self.offset

    def may_allow(self, rows, columns, data):
        return columns.start <= rows.last + self.offset


@_pytree()
class Window(Mask):
    """Keys near the query: `query - left <= key <= query + right`; None: no limit."""

    left: int | None = None
    right: int | None = None

    def allows(self, rows, columns, data):
        near = Everything().allows(rows, columns, data)
        if self.left is not None:
            near &= columns >= rows - self.left
        if self.right is not None:
            near &= columns <= rows + self.right
        return near

    def may_allow(self, rows, columns, data):
        near = True
        if self.left is not None:
            near = near & (columns.last >= rows.start - self.left)
        if self.right is not None:
            near = near & (columns.start <= rows.last + self.right)
        return near


@_pytree("length")
class Prefix(Mask):
    """The first `length` keys, for every query: an int or an int32 array (batch,)."""

    length: Any
    SIDES: ClassVar[dict[str, str]] = {"length": "batch"}

    def allows(self, rows, columns, data):
        return columns < data.values[0]

    def may_allow(self, rows, columns, data):
        return columns.start < data.values[0]


@_pytree("query_ids", "key_ids")
class Segments(Mask):
    """Pairs with equal ids: int32 arrays (batch, queries) and (batch, keys)."""

    query_ids: Any
    key_ids: Any
    SIDES: ClassVar[dict[str, str]] = {"query_ids": "query", "key_ids": "key"}

    def allows(self, rows, columns, data):
        query_ids, key_ids = data.values
        return query_ids == key_ids

    def may_allow(self, rows, columns, data):
        # Ids between the smallest and the largest of both sides: right for any ids,
        # and exact enough to skip where they ascend, as packed sequences do.
        query_ids, key_ids = data.values
        return (jnp.max(query_ids) >= jnp.min(key_ids)) & (
            jnp.min(query_ids) <= jnp.max(key_ids)
        )


@_pytree("mask", "rows", "columns")
class Shifted(Mask):
    """`mask` at other positions: query i is its query `i + rows`, key j its key
    `j + columns`. Both are ints or int32 arrays (batch,)."""

    mask: Mask
    rows: Any = 0
    columns: Any = 0

    def allows(self, rows, columns, data):
        *inner, down, right = data.values
        return self.mask.allows(rows + down, columns + right, Data(tuple(inner)))

    def may_allow(self, rows, columns, data):
        *inner, down, right = data.values
        rows = Span(rows.start + down, rows.size)
        columns = Span(columns.start + right, columns.size)
        return self.mask.may_allow(rows, columns, Data(tuple(inner)))

    def arrays(self):
        yield from self.mask.arrays()
        yield "rows", "batch", self.rows
        yield "columns", "batch", self.columns


@_pytree("left", "right")
class _Both(Mask):
    left: Mask
    right: Mask

    def allows(self, rows, columns, data):
        return _join(self, "allows", lax.bitwise_and, rows, columns, data)

    def may_allow(self, rows, columns, data):
        return _join(self, "may_allow", jnp.logical_and, rows, columns, data)

    def arrays(self):
        yield from self.left.arrays()
        yield from self.right.arrays()


@_pytree("left", "right")
class _Either(_Both):
    def allows(self, rows, columns, data):
        return _join(self, "allows", lax.bitwise_or, rows, columns, data)

    def may_allow(self, rows, columns, data):
        return _join(self, "may_allow", jnp.logical_or, rows, columns, data)


def _join(mask: _Both, method: str, combine: Callable, rows, columns, data: Data):
    """A method of both parts, each on its own share of the data, combined."""
    count = sum(1 for _ in mask.left.arrays())
    left, right = Data(data.values[:count]), Data(data.values[count:])
    return combine(
        getattr(mask.left, method)(rows, columns, left),
        getattr(mask.right, method)(rows, columns, right),
    )


def kind(mask: Mask | None) -> str:
    """Names a mask without its numbers, for tables: "Causal&Prefix"."""
    if mask is None:
        return "Everything"
    if isinstance(mask, _Both):
        joined = "|" if isinstance(mask, _Either) else "&"
        return joined.join((kind(mask.left), kind(mask.right)))  # pyright: ignore
    if isinstance(mask, Shifted):
        return f"Shifted({kind(mask.mask)})"  # pyright: ignore
    return type(mask).__name__


def pairs(mask: Mask, batch: int, queries: int, keys: int) -> jax.Array:
    """The mask as one boolean array (batch, queries, keys), for plain jnp."""
    rows = jnp.arange(queries)[:, None]
    columns = jnp.arange(keys)[None, :]
    arrays = [a for _, _, a in checked_arrays(mask, batch, queries, keys)]
    sides = [side for _, side, _ in mask.arrays()]

    def one(*values):
        shaped = [
            v if side == "batch" else v[:, None] if side == "query" else v[None, :]
            for v, side in zip(values, sides, strict=True)
        ]
        return jnp.broadcast_to(
            mask.allows(rows, columns, Data(tuple(shaped))), (queries, keys)
        )

    if not arrays:
        return jnp.broadcast_to(one(), (batch, queries, keys))
    return jax.vmap(one)(*arrays)


def checked_arrays(
    mask: Mask, batch: int, queries: int, keys: int
) -> list[tuple[str, str, jax.Array]]:
    """The mask's arrays as int32 of the shapes that these sizes ask for."""
    shapes = {"batch": (batch,), "query": (batch, queries), "key": (batch, keys)}
    found = []
    for name, side, array in mask.arrays():
        wanted, array = shapes[side], jnp.asarray(array)
        if side == "batch" and not array.shape:
            array = jnp.broadcast_to(array, wanted)
        if array.shape != wanted or not jnp.issubdtype(array.dtype, jnp.integer):
            raise SpecError(
                f"attention mask: {name} does not fit the operands",
                [
                    ("is", f"{array.dtype}{list(array.shape)}"),
                    ("needs", f"integers of shape {wanted}"),
                ],
                fix=f"pass {name} as int32 with shape {wanted}",
            )
        found.append((name, side, array.astype(jnp.int32)))
    return found
