"""Checked mode's bounds checks: of accesses, and of windows.

An access is checked as the author wrote it, before anything is clamped or dropped. The
result is the index with plain numbers in it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.interpret.monitor import Monitor
from pallasite.interpret.shadow import CheckedNumbers
from pallasite.interpret.shadow_tiles import Partly, codes_of, value_of
from pallasite.interpret.views import Entry
from pallasite.ir.nodes import Access, At, Block, BlockDim, Gather, Op, Span
from pallasite.ir.roles import Pipeline

Array = Any


class Indices:
    """Checks one access or window after another."""

    def __init__(self, monitor: Monitor, numbers: CheckedNumbers):
        self.monitor, self.numbers = monitor, numbers

    # --- accesses ---

    def access(
        self, access: Access, entries: Sequence[Entry], mask: Array | None, reads: bool
    ) -> tuple[list[Entry], Array | None]:
        """Plain entries, and the codes that undefined gather indices give a load."""
        if all(operand is None for _, operand in entries):
            return list(entries), None
        plain: list[Entry] = []
        unsure: Array | None = None
        mask = value_of(mask)
        rank = next(
            (np.ndim(value_of(x)) for e, x in entries if isinstance(e, Gather)), 0
        )
        axis = rank
        for d, (entry, operand) in enumerate(entries):
            if isinstance(entry, Gather):
                on = None if mask is None else _on(mask, range(rank))
                found = codes_of(operand)
                operand = self._gather(access, d, operand, on, reads)
                if found is not None and reads:
                    unsure = found if unsure is None else np.maximum(unsure, found)
            elif operand is not None:
                operand = self._start(access, d, entry, operand, mask, axis)
            axis += isinstance(entry, Span)
            plain.append((entry, operand))
        return plain, unsure

    def copied(self, access: Access, entries: Sequence[Entry]) -> list[Entry]:
        """Plain entries of a copy by the copy engine: it may extend past the edge of
        the array, but must overlap it."""
        plain: list[Entry] = []
        for d, (entry, operand) in enumerate(entries):
            if operand is not None and not isinstance(entry, Gather):
                if type(operand) is Partly:
                    self._undefined_place(access, operand.codes)
                operand = int(value_of(operand))
                self._look_past_edge(access, d, entry, operand)
            plain.append((entry, operand))
        return plain

    def _look_past_edge(
        self, access: Access, d: int, entry: At | Span, start: int
    ) -> None:
        n, size = access.ref.ref.shape[d], _extent(entry)
        if size and (start >= n or start + size <= 0):
            fix = f"start within 0..{n - 1}; a copy past the edge reads zeros"
            self._outside(access, d, _span_text(entry, start), n, fix)

    def inside(self, access: Access, entries: Sequence[Entry]) -> np.ndarray | None:
        """Which elements of an access without a mask exist; None: all of them.

        Gathered dimensions come first, then those of spans, as in the access.
        """
        gathered = next(
            (np.shape(value_of(x)) for e, x in entries if isinstance(e, Gather)), ()
        )
        spans, rank = [e.size for e, _ in entries if isinstance(e, Span)], len(gathered)
        shape, axis = (*gathered, *spans), rank
        found = np.ones(shape, bool)
        for n, (entry, operand) in zip(access.ref.ref.shape, entries, strict=True):
            if isinstance(entry, Gather):
                places = value_of(operand)
                places = places.reshape(places.shape + (1,) * (len(shape) - rank))
            elif isinstance(entry, Span):
                first = entry.start if operand is None else int(value_of(operand))
                places = (first or 0) + np.arange(entry.size) * entry.stride
                places = places.reshape((-1,) + (1,) * (len(shape) - axis - 1))
                axis += 1
            else:
                places = (entry.start or 0) if operand is None else value_of(operand)
            found &= (places >= 0) & (places < n)
        return None if found.all() else found

    def _gather(
        self, access: Access, d: int, operand: Array, on: Array | None, reads: bool
    ) -> Array:
        n = access.ref.ref.shape[d]
        index, codes = value_of(operand), codes_of(operand)
        bad = (index < 0) | (index >= n)
        if on is not None:
            bad = bad & on
        if codes is not None:
            bad = bad & (codes == 0)
            if not reads:
                self._undefined_place(access, codes if on is None else codes * on)
        if bad.any():
            first = tuple(int(i) for i in np.argwhere(bad)[0])
            text = f"{int(index[first])}, at {first} of the index array"
            self._outside(access, d, text, n, "use pl.load or pl.store with mask=")
        return np.clip(index, 0, max(n - 1, 0)) if reads else index

    def _start(
        self,
        access: Access,
        d: int,
        entry: At | Span,
        operand: Array,
        mask: Array | None,
        axis: int,
    ) -> Array:
        n = access.ref.ref.shape[d]
        if type(operand) is Partly:
            self._undefined_place(access, operand.codes)
        operand = value_of(operand)
        start, size = int(operand), _extent(entry)
        if start >= 0 and start + size <= n:
            return operand
        if mask is None or isinstance(entry, At):
            if mask is None or mask.any():
                fix = f"keep the start within 0..{n - size}, or mask the access"
                self._outside(access, d, _span_text(entry, start), n, fix)
            return operand
        places = start + np.arange(entry.size) * entry.stride
        bad = ((places < 0) | (places >= n)) & _on(mask, [axis])
        if bad.any():
            self._outside(
                access, d, int(places[bad][0]), n, "make the mask False there"
            )
        return operand

    def _outside(self, access: Access, d: int, index: Any, n: int, fix: str) -> None:
        facts = [
            ("ref", self.monitor.describe(access.ref)),
            ("index", f"{index}, along dimension {d}, which has {n} elements"),
        ]
        self.monitor.report("bounds", "an index is out of bounds", facts, fix)

    def _undefined_place(self, access: Access, codes: np.ndarray) -> None:
        code = int(codes.max(initial=0))
        if code:
            self.monitor.report_undefined(
                code,
                "an undefined value determines which element is accessed",
                facts=[("ref", self.monitor.describe(access.ref))],
            )

    # --- windows ---

    def window(self, op: Op, number: int, found: Sequence[Array]) -> list[Array]:
        """Plain block indices, after a check of their range."""
        ref, window, index_map, _ = Pipeline.of(op).shown[number]
        plain = [self.numbers.certain(x, "the block index") for x in found]
        pending = iter(plain)
        for d, (dim, n) in enumerate(zip(window.dims, ref.ref.shape, strict=True)):
            index = int(next(pending))
            length = int(next(pending)) if dim.kind == "bounded" else None
            problem = _window_problem(dim, n, index, length)
            if problem:
                facts = [
                    ("operand", self.monitor.describe(ref)),
                    ("index map", f"gives {problem} (dimension {d})"),
                ]
                what = "a block is out of bounds of its array"
                fix = "check the index map and the grid; clamp with jnp.minimum"
                if dim.kind == "blocked" and _is_offset(dim, n, index):
                    fix = (
                        "an index map counts blocks, not elements: leave out the "
                        f"factor of {dim.size}"
                    )
                at = _line_of(index_map) or op.loc
                self.monitor.report("bounds", what, facts, fix, at)
        return plain


def _extent(entry: At | Span) -> int:
    return entry.extent if isinstance(entry, Span) else 1


def _span_text(entry: At | Span, start: int) -> str:
    return str(start) if isinstance(entry, At) else f"{start}:{start + entry.extent}"


def _on(mask: np.ndarray, axes: Any) -> Array:
    """Whether the mask is true anywhere, per position along the given axes."""
    rest = tuple(a for a in range(mask.ndim) if a not in axes)
    return mask.any(axis=rest) if rest else mask


def _window_problem(dim: BlockDim, n: int, index: int, length: int | None) -> str:
    if dim.kind == "blocked":
        blocks = max(1, -(-n // dim.size)) if dim.size else 1
        inside = 0 <= index < blocks
        text = f"block {index}, there are {blocks} of size {dim.size}"
    elif dim.kind == "squeezed":
        inside = 0 <= index < max(n, 1)
        text = f"element {index}, there are {n}"
    else:
        total = n + sum(dim.padding)
        size = dim.size if length is None else length
        inside = 0 <= index < max(total, 1) or (size == 0 and index == total)
        text = f"first element {index}, there are {total} with padding"
        if length is not None and not 0 <= length <= dim.size:
            inside, text = False, f"{length} elements, the block holds {dim.size}"
    return "" if inside else text


def _is_offset(dim: BlockDim, n: int, index: int) -> bool:
    """Whether an index may be that of a block's first element."""
    return dim.size > 1 and index % dim.size == 0 and 0 <= index < n


def _line_of(index_map: Block) -> Any:
    return next((op.loc for op in reversed(index_map.ops) if op.loc is not None), None)
