"""Pipelines in which the kernel itself copies some of the blocks.

Two kinds of block need this: those of a BufferedRef with overridden methods, and those
of a reshaped, transposed or bitcast ref, which are not rectangles of the underlying
memory. The pipeline's body is wrapped: a step first fetches the blocks that come into
view, runs the author's body, then writes back those that go out of view. A step's
copies start and complete within it, so steps run as if one after another whatever they
access.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallasite.calls.buffered_ref import BufferedRefBase, differ
from pallasite.language.helpers import when
from pallasite.language.refs import program_id


@dataclass(frozen=True)
class Steps:
    """The steps of a pipeline: the first index along each axis, and how many."""

    firsts: tuple[Any, ...]
    counts: tuple[Any, ...]

    def ids(self) -> tuple[Any, ...]:
        """The indices of the step being traced."""
        return tuple(program_id(axis) for axis in range(len(self.counts)))

    def number(self, ids: Sequence[Any]) -> Any:
        """How many steps precede this one."""
        number: Any = 0
        for i, first, count in zip(ids, self.firsts, self.counts, strict=True):
            number = number * count + (i - first)
        return number

    def is_first(self, ids: Sequence[Any]) -> Any:
        return _all(i == first for i, first in zip(ids, self.firsts, strict=True))

    def is_last(self, ids: Sequence[Any]) -> Any:
        return _all(i == last for i, last in zip(ids, self._lasts(), strict=True))

    def _lasts(self) -> list[Any]:
        pairs = zip(self.firsts, self.counts, strict=True)
        return [first + count - 1 for first, count in pairs]

    def before(self, ids: Sequence[Any]) -> tuple[Any, ...]:
        """The indices of the previous step; the last one precedes the first."""
        return _moved(ids, -1, self.firsts, self._lasts())

    def after(self, ids: Sequence[Any]) -> tuple[Any, ...]:
        """The indices of the next step; the first one follows the last."""
        return _moved(ids, 1, self._lasts(), self.firsts)


def _moved(
    ids: Sequence[Any], by: int, ends: Sequence[Any], begins: Sequence[Any]
) -> tuple[Any, ...]:
    """The indices one step on, last axis fastest; an axis at its end wraps around."""
    moved: list[Any] = []
    carries: Any = True
    for i, end, begin in zip(*map(reversed, (ids, ends, begins)), strict=True):
        wraps = carries & (i == end)
        moved.append(jnp.where(wraps, begin, jnp.where(carries, i + by, i)))
        carries = wraps
    return tuple(reversed(moved))


def _all(conditions: Any) -> Any:
    held: Any = jnp.bool_(True)
    for condition in conditions:
        held = held & condition
    return held


@dataclass(frozen=True)
class _Held:
    """A block in one step: whether it comes into view and goes out of view there."""

    buffered: Any  # has a BufferedRef's copy_in, wait_in, copy_out and wait_out
    ref: Any
    comes: Any
    goes: Any


def run_step(
    body: Callable[[list[Any]], None],
    blocks: Sequence[tuple[BufferedRefBase, Any]],
    numbers_ref: Any,
    steps: Steps,
) -> None:
    """Run one step of a pipeline.

    Args:
        body: called with the refs of the blocks.
        blocks: buffered refs, each with the ref (or refs) that its methods take.
        numbers_ref: the block number of each, in scalar memory.
        steps: the pipeline's steps.
    """
    ids = steps.ids()
    is_first = steps.is_first(ids)
    held: list[_Held] = []
    for n, (buffered, ref) in enumerate(blocks):
        number = jnp.where(is_first, 0, numbers_ref[n])
        comes, goes = is_first, steps.is_last(ids)
        index = buffered.compute_index
        if index is not None:
            here = index(*ids)
            comes = comes | differ(here, index(*steps.before(ids)))
            goes = goes | differ(here, index(*steps.after(ids)))
        numbers_ref[n] = number + goes.astype(jnp.int32)
        here = buffered.at_block(number.astype(jnp.uint32))
        held.append(_Held(here.bind_existing_ref(ref, ids), ref, comes, goes))
    inputs = [h for h in held if h.buffered.is_input]
    outputs = [h for h in held if h.buffered.is_output]
    # All copies in one direction start before any is waited for.
    for h in inputs:
        when(h.comes)(functools.partial(h.buffered.copy_in, h.ref, ids))
    for h in inputs:
        when(h.comes)(functools.partial(h.buffered.wait_in, h.ref, ids))
    body([h.buffered.current_ref for h in held])
    for h in outputs:
        when(h.goes)(functools.partial(h.buffered.copy_out, h.ref, ids))
    for h in outputs:
        when(h.goes)(functools.partial(h.buffered.wait_out, h.ref, ids))
