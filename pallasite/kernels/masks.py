"""Attention masks as objects: which query may look at which key.

Masks compose: `Causal() & Segments(ids, ids)`, `Window(1023, 0) | Prefix(64)`. Each
says which pairs it allows, whether a block of pairs may contain an allowed pair (if
not, it is skipped) or a forbidden one, and which arrays it reads to tell. Masks are
pytrees, so a jitted function can take them as arguments.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite.errors import KernelTypeError, SpecError, UnsupportedError
from pallasite.kernels import common, pair_tables


class Span(NamedTuple):
    """Positions of a block along one side: the first, and their count."""

    start: Any
    size: int

    @property
    def last(self) -> Any:
        return self.start + self.size - 1


class Data(NamedTuple):
    """What a mask reads from its arrays for one block of pairs: a value per array.

    A value per batch element is a scalar, one per query a (rows, 1) tile, one per key
    a (1, columns) tile; a table of pairs gives `Pairs`.
    """

    values: tuple[Any, ...]


class Pairs(NamedTuple):
    """What a table says about a block of pairs.

    Attributes:
        code: `pair_tables.EMPTY`, `FULL`, or another code.
        tile: integers (rows, columns) or a ref to them, 0 where a pair is forbidden;
            None if all blocks are empty or full.
    """

    code: Any
    tile: Any


class Mask(abc.ABC):
    """The interface of all masks, and their composition."""

    # The sides ("batch", "query", "key" or "pair") along which each field varies.
    SIDES: ClassVar[dict[str, str]] = {}

    @abc.abstractmethod
    def allows(self, rows: Any, columns: Any, data: Data) -> Any:
        """Which pairs are allowed: booleans broadcast over positions rows, columns."""

    @abc.abstractmethod
    def may_allow(self, rows: Span, columns: Span, data: Data) -> Any:
        """False only if no pair in the block is allowed."""

    @abc.abstractmethod
    def allows_all(self, rows: Span, columns: Span, data: Data) -> Any:
        """True only if every pair in the block is allowed."""

    def arrays(self) -> Iterator[tuple[str, str, Any]]:
        """(field, side, array) for every array the mask reads, in order of parts."""
        for name, side in self.SIDES.items():
            yield name, side, getattr(self, name)

    # Otherwise `array & mask` would apply element by element.
    __array_ufunc__ = None

    def __and__(self, other: "Mask") -> "Mask":
        check_mask("attention", other)
        return _Both(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        check_mask("attention", other)
        return _Either(self, other)

    # Called only where the left operand is no mask.
    __rand__, __ror__ = __and__, __or__

    def __bool__(self) -> bool:
        raise KernelTypeError(
            "attention mask: a mask is neither true nor false",
            [("mask", kind(self))],
            fix="compose masks with & and |, not `and` and `or`; test `mask is None`",
        )

    def __invert__(self) -> "Mask":
        raise UnsupportedError(
            "attention mask: masks cannot be negated",
            [("mask", kind(self))],
            fix="use masks.Blocks(~allowed), of a numpy array of booleans",
        )


def check_mask(operation: str, mask: Any) -> None:
    """Checks that a mask is a `Mask` instance, not a boolean array or a class."""
    if isinstance(mask, Mask):
        if isinstance(mask, Shifted):
            check_mask(operation, mask.mask)  # pyright: ignore
        return
    if isinstance(mask, type):
        fix = f"create an instance: masks.{mask.__name__}(...)"
    else:
        fix = (
            "compose masks.Causal(), Window, Prefix, Segments; for a numpy array of "
            "booleans, (queries, keys), use masks.Blocks(mask); for traced ones "
            "bias=jnp.where(mask, 0, -jnp.inf)"
        )
    raise KernelTypeError(
        f"{operation}: mask is not an object of kernels.masks",
        [("is", getattr(mask, "__name__", None) or type(mask).__name__)],
        fix=fix,
    )


def _pytree(*arrays: str) -> Callable[[type], type]:
    """Makes a frozen dataclass whose fields `arrays` are leaves, the others static."""

    def register(cls: type) -> type:
        cls = dataclasses.dataclass(frozen=True)(cls)
        names = [f.name for f in dataclasses.fields(cls)]
        static = [n for n in names if n not in arrays]
        return jax.tree_util.register_dataclass(cls, list(arrays), static)

    return register


def _check_bounds(mask: Mask, **bounds: Any) -> None:
    """Checks that bounds are integers (or None) that are known at trace time."""
    for name, value in bounds.items():
        if value is not None and not isinstance(value, int | np.integer):
            raise KernelTypeError(
                f"attention mask: {name} of {type(mask).__name__} is not an integer",
                [("is of type", type(value).__name__)],
                fix=f"pass {name} as a Python int; masks.Shifted takes traced shifts",
            )


@_pytree()
class Everything(Mask):
    """All pairs."""

    def allows(self, rows, columns, data):
        return jnp.full(jnp.broadcast_shapes(rows.shape, columns.shape), True)

    def may_allow(self, rows, columns, data):
        return True

    def allows_all(self, rows, columns, data):
        return True


@_pytree()
class Causal(Mask):
    """Keys up to the query's position: `key <= query + offset`."""

    offset: int = 0

    def __post_init__(self):
        _check_bounds(self, offset=self.offset)

    def allows(self, rows, columns, data):
        return columns <= rows + self.offset

    def may_allow(self, rows, columns, data):
        return columns.start <= rows.last + self.offset

    def allows_all(self, rows, columns, data):
        return columns.last <= rows.start + self.offset


@_pytree()
class Window(Mask):
    """Keys near the query: `query - left <= key <= query + right`; None: no bound."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self):
        _check_bounds(self, left=self.left, right=self.right)

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

    def allows_all(self, rows, columns, data):
        near = True
        if self.left is not None:
            near = near & (columns.start >= rows.last - self.left)
        if self.right is not None:
            near = near & (columns.last <= rows.start + self.right)
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

    def allows_all(self, rows, columns, data):
        return columns.last < data.values[0]


@_pytree("query_ids", "key_ids")
class Segments(Mask):
    """Pairs with equal ids: integer arrays (batch, queries) and (batch, keys)."""

    query_ids: Any
    key_ids: Any
    SIDES: ClassVar[dict[str, str]] = {"query_ids": "query", "key_ids": "key"}

    def allows(self, rows, columns, data):
        query_ids, key_ids = data.values
        return query_ids == key_ids

    def may_allow(self, rows, columns, data):
        # Compares the ranges of ids on both sides: correct for any ids, and precise
        # enough to skip blocks where ids ascend, as in packed sequences.
        query_ids, key_ids = data.values
        return (jnp.max(query_ids) >= jnp.min(key_ids)) & (
            jnp.min(query_ids) <= jnp.max(key_ids)
        )

    def allows_all(self, rows, columns, data):
        query_ids, key_ids = data.values
        return (jnp.max(query_ids) == jnp.min(key_ids)) & (
            jnp.min(query_ids) == jnp.max(key_ids)
        )


@_pytree()
class Blocks(Mask):
    """Pairs given by a table: those with `allowed[query // block_q, key // block_kv]`.

    The table is known at trace time, so blocks of scores without an allowed pair are
    skipped, and those without a forbidden pair are not masked. Its blocks need not
    match the kernel's. With blocks of one element, the default, it can express any
    mask.

    Attributes:
        allowed: a boolean numpy array (blocks of queries, blocks of keys).
        block_q, block_kv: queries and keys per block.
    """

    allowed: Any
    block_q: int = 1
    block_kv: int = 1
    SIDES: ClassVar[dict[str, str]] = {"allowed": "pair"}

    def __post_init__(self):
        object.__setattr__(self, "allowed", pair_tables.Frozen.of(self.allowed))
        if self.block_q < 1 or self.block_kv < 1:
            raise SpecError(
                "attention mask: empty blocks",
                [("block_q", self.block_q), ("block_kv", self.block_kv)],
                fix="pass the numbers of queries and keys per block",
            )

    def arrays(self):
        yield "allowed", "pair", self

    def allows(self, rows, columns, data):
        (pairs,) = data.values
        if pairs.tile is not None:
            return pairs.tile[...] != 0
        shape = jnp.broadcast_shapes(rows.shape, columns.shape)
        return jnp.broadcast_to(pairs.code == pair_tables.FULL, shape)

    def may_allow(self, rows, columns, data):
        return data.values[0].code != pair_tables.EMPTY

    def allows_all(self, rows, columns, data):
        return data.values[0].code == pair_tables.FULL

    def elements(self, queries: int, keys: int) -> np.ndarray:
        """The mask as a boolean per pair."""
        rows = np.arange(queries) // self.block_q
        columns = np.arange(keys) // self.block_kv
        return self.allowed.array[rows[:, None], columns[None, :]]

    def table(
        self, queries: int, keys: int, block_q: int, block_kv: int
    ) -> pair_tables.PairTable:
        """The mask in a kernel's blocks."""
        return pair_tables.pair_table(
            self.allowed.array,
            (self.block_q, self.block_kv),
            (queries, keys),
            (block_q, block_kv),
        )


@_pytree("mask", "rows", "columns")
class Shifted(Mask):
    """`mask` at shifted positions: query i is treated as query `i + rows`, key j as
    key `j + columns`. Both shifts are ints or int32 arrays (batch,)."""

    mask: Mask
    rows: Any = 0
    columns: Any = 0

    def allows(self, rows, columns, data):
        *inner, down, right = data.values
        return self.mask.allows(rows + down, columns + right, Data(tuple(inner)))

    def may_allow(self, rows, columns, data):
        return self.mask.may_allow(*self._shifted(rows, columns, data))

    def allows_all(self, rows, columns, data):
        return self.mask.allows_all(*self._shifted(rows, columns, data))

    def _shifted(self, rows: Span, columns: Span, data: Data):
        *inner, down, right = data.values
        rows = Span(rows.start + down, rows.size)
        columns = Span(columns.start + right, columns.size)
        return rows, columns, Data(tuple(inner))

    def arrays(self):
        for name, side, array in self.mask.arrays():
            if side == "pair":
                raise SpecError(
                    "attention mask: a table of pairs cannot be shifted",
                    [("mask", kind(self.mask))],
                    fix="ring_attention and Shifted support masks that compare "
                    "positions or ids: Causal, Window, Prefix, Segments",
                )
            yield name, side, array
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

    def allows_all(self, rows, columns, data):
        return _join(self, "allows_all", jnp.logical_and, rows, columns, data)

    def arrays(self):
        yield from self.left.arrays()
        yield from self.right.arrays()


@_pytree("left", "right")
class _Either(_Both):
    def allows(self, rows, columns, data):
        return _join(self, "allows", lax.bitwise_or, rows, columns, data)

    def may_allow(self, rows, columns, data):
        return _join(self, "may_allow", jnp.logical_or, rows, columns, data)

    def allows_all(self, rows, columns, data):
        return _join(self, "allows_all", jnp.logical_or, rows, columns, data)


def _join(mask: _Both, method: str, combine: Callable, rows, columns, data: Data):
    """Calls a method of both parts, each on its share of the data; combines results."""
    count = sum(1 for _ in mask.left.arrays())
    left, right = Data(data.values[:count]), Data(data.values[count:])
    return combine(
        getattr(mask.left, method)(rows, columns, left),
        getattr(mask.right, method)(rows, columns, right),
    )


def kind(mask: Mask | None) -> str:
    """A mask's name without its numbers, for tables: "Causal&Prefix"."""
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
    found = checked_arrays(mask, batch, queries, keys)
    of_batch = [array for _, side, array in found if side != "pair"]

    def one(*values):
        take = iter(values)
        shaped = []
        for _, side, table in found:
            if side == "pair":
                shaped.append(Pairs(None, jnp.asarray(table.elements(queries, keys))))
            else:
                value = next(take)
                shapes = {"batch": (), "query": (-1, 1), "key": (1, -1)}
                shaped.append(value.reshape(shapes[side]))
        return jnp.broadcast_to(
            mask.allows(rows, columns, Data(tuple(shaped))), (queries, keys)
        )

    if not of_batch:
        return jnp.broadcast_to(one(), (batch, queries, keys))
    return jax.vmap(one)(*of_batch)


def checked_arrays(
    mask: Mask, batch: int, queries: int, keys: int
) -> list[tuple[str, str, Any]]:
    """The mask's arrays as int32, checked to have the shapes these sizes require.

    A table of pairs, which is shared by the whole batch, is given by its mask.
    """
    shapes = {"batch": (batch,), "query": (batch, queries), "key": (batch, keys)}
    found = []
    for name, side, array in mask.arrays():
        if side == "pair":
            _check_covers(array, queries, keys)
            found.append((name, side, array))
            continue
        wanted = shapes[side]
        if side == "batch":
            array = common.within_int32(array)
        else:
            _check_kept(name, array)
        try:
            array = jnp.asarray(array)
        except (TypeError, ValueError, OverflowError):  # None, text, lists of lists
            raise KernelTypeError(
                f"attention mask: {name} is not an array of integers",
                [("is", repr(array))],
                fix=f"pass {name} as int32 with shape {wanted}",
            ) from None
        if side == "batch" and not array.shape:
            array = jnp.broadcast_to(array, wanted)
        if array.shape != wanted or not jnp.issubdtype(array.dtype, jnp.integer):
            raise SpecError(
                f"attention mask: {name} does not match the operands",
                [
                    ("is", f"{array.dtype}{list(array.shape)}"),
                    ("needs", f"integers of shape {wanted}"),
                ],
                fix=f"pass {name} as int32 with shape {wanted}",
            )
        number = common.as_int32(array) if side == "batch" else array
        found.append((name, side, number))
    return _with_ids_of_32_bits(found)


def _check_kept(name: str, array: Any) -> None:
    """Refuses ids that JAX would cut off: without x64, arrays of numpy become int32."""
    if not isinstance(array, np.ndarray) or jax.config.jax_enable_x64:  # pyright: ignore
        return
    if array.dtype.kind in "iu" and array.dtype.itemsize == 8 and array.size:
        limits = np.iinfo(np.int32)
        low, high = int(array.min()), int(array.max())
        if not limits.min <= low <= high <= limits.max:
            raise SpecError(
                f"attention mask: {name} has numbers that 32 bits cannot hold",
                [("lowest", low), ("highest", high)],
                fix="number segments from 0, as int32",
            )


def _with_ids_of_32_bits(
    found: list[tuple[str, str, Any]],
) -> list[tuple[str, str, Any]]:
    """The arrays with ids as int32: equal where they were, and in the same order.

    Ids are compared only with each other, so those of 64 bits become their ranks.
    """
    ids = [array for _, side, array in found if side in ("query", "key")]
    convert: Any = lambda array: array.astype(jnp.int32)
    if any(array.dtype.itemsize == 8 for array in ids):
        wide = jnp.int64  # a uint64 above it keeps an id of its own
        known = jnp.sort(jnp.concatenate([a.astype(wide) for a in ids], 1), axis=1)
        rank = jax.vmap(jnp.searchsorted)
        convert = lambda array: rank(known, array.astype(wide)).astype(jnp.int32)
    return [
        (name, side, convert(array) if side in ("query", "key") else array)
        for name, side, array in found
    ]


def _check_covers(mask: Blocks, queries: int, keys: int) -> None:
    rows, columns = mask.allowed.array.shape
    if rows * mask.block_q < queries or columns * mask.block_kv < keys:
        wanted = (-(-queries // mask.block_q), -(-keys // mask.block_kv))
        raise SpecError(
            "attention mask: allowed does not cover all pairs",
            [
                ("has shape", (rows, columns)),
                ("blocks of", (mask.block_q, mask.block_kv)),
                ("queries and keys", (queries, keys)),
            ],
            fix=f"pass allowed with shape {wanted}",
        )
