"""The form in which an array is passed to a custom call, if it differs from its own.

A chip may lack an array's element type, or read only blocks of other shapes than the
author's. XLA then converts the array before the call and the result after it. `Form`
says how, for `jax.numpy` (`ffi.py`) and numpy (tests) alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Form:
    """An array as a custom call takes it.

    Its elements are cast, and may be multiplied by a number of their type. Its
    dimensions may be permuted; then it is padded, and
    dimensions are split into blocks: (rows, lanes) split into blocks of (r, l) becomes
    (rows / r, lanes / l, r, l). Block indices come before the last two dimensions, so
    that blocks of any size are whole within those.

    Attributes:
        shape: of the array itself.
        dtype: of its elements, by numpy name.
        carried_dtype: of the elements in the call.
        order: permutation of its dimensions, applied first; empty: unchanged.
        padding: elements before and after, per dimension.
        blocks: block size per dimension; None: not split.
        fill: the value of the padding.
        least_rank: the rank to reach by adding leading dimensions of size one.
        element: pass only this element, as a scalar, instead of the array.
        factor: by which all elements are multiplied; an operand's only.
        digits, digit_order, joined: last, its dimensions are split into these, which
            are permuted, and joined to these dimensions; an operand's only.
    """

    shape: tuple[int, ...]
    dtype: str
    carried_dtype: str
    padding: tuple[tuple[int, int], ...] = ()
    blocks: tuple[int | None, ...] = ()
    fill: float | int | bool = 0
    least_rank: int = 0
    element: int | None = None
    order: tuple[int, ...] = ()
    factor: float = 1.0
    digits: tuple[int, ...] = ()
    digit_order: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()

    @cached_property
    def changes(self) -> bool:
        """Whether the form differs from the array's own."""
        same = self.dtype == self.carried_dtype and self.carried_shape == self.shape
        moves = bool(self.order or self.digits) or any(map(any, self.padding))
        return not same or moves or self.factor != 1

    @cached_property
    def carried_shape(self) -> tuple[int, ...]:
        if self.element is not None:
            return ()
        if self.joined:
            return self.joined
        if not self.blocks:
            return (1,) * (self.least_rank - len(self.shape)) + self._padded
        counts, inner = [], []
        for size, block in zip(self._padded, self.blocks, strict=True):
            if block is not None:
                counts.append(size // block)
            inner.append(size if block is None else block)
        while len(inner) < 2:  # a single row
            inner.insert(0, 1)
        return (*inner[:-2], *counts, *inner[-2:])

    @cached_property
    def _in_order(self) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in self.order) if self.order else self.shape

    @cached_property
    def _padded(self) -> tuple[int, ...]:
        padding = self.padding or ((0, 0),) * len(self.shape)
        pairs = zip(self._in_order, padding, strict=True)
        return tuple(low + n + high for n, (low, high) in pairs)

    def pack(self, numbers: Any, x: Any) -> Any:
        """The array in the call's form; `numbers` is numpy or jax.numpy."""
        x = numbers.asarray(x).astype(self.carried_dtype)
        if self.factor != 1:
            x = x * numbers.asarray(self.factor, x.dtype)
        if self.order:
            x = numbers.transpose(x, self.order)
        if self.element is not None:
            return x.reshape(-1)[self.element]
        if any(map(any, self.padding)):
            x = numbers.pad(x, self.padding, constant_values=self.fill)
        if self.blocks:
            x = numbers.transpose(x.reshape(self._apart), self._order)
        if self.digits:
            x = numbers.transpose(x.reshape(self.digits), self.digit_order)
        return x.reshape(self.carried_shape)

    def unpack(self, numbers: Any, x: Any) -> Any:
        """The array itself, from the call's form."""
        if self.blocks:
            apart = [self._apart[d] for d in self._order]
            back = sorted(range(len(apart)), key=lambda d: self._order[d])
            x = numbers.transpose(x.reshape(apart), back)
        x = x.reshape(self._padded)
        for dim, ((low, _), n) in enumerate(
            zip(self.padding, self._in_order, strict=False)
        ):
            x = x[(slice(None),) * dim + (slice(low, low + n),)]
        if self.order:
            back = sorted(range(len(self.order)), key=lambda d: self.order[d])
            x = numbers.transpose(x, back)
        return x.astype(self.dtype)

    @cached_property
    def _apart(self) -> tuple[int, ...]:
        """The padded shape, with the number of blocks before each block size."""
        pairs = zip(self._padded, self.blocks, strict=True)
        cut = [(n,) if block is None else (n // block, block) for n, block in pairs]
        return tuple(size for part in cut for size in part)

    @cached_property
    def _order(self) -> Sequence[int]:
        """Outer dimensions, block indices, and the last two dimensions."""
        counts, inner, position = [], [], 0
        for block in self.blocks:
            if block is not None:
                counts.append(position)
                position += 1
            inner.append(position)
            position += 1
        last = min(2, len(inner))
        return [*inner[: len(inner) - last], *counts, *inner[len(inner) - last :]]
