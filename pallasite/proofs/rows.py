"""Batch invariance over traces and runs: other numbers of rows, and other rows.

`batch.py` shows that within one call a row's bits depend on nothing but the row. Here
the function is traced for twice as many rows: the kernel must be the same except for
sizes. And where `batch.py` cannot tell, two runs that differ in a row's neighbours or
in its place may refute the claim.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import jax
import numpy as np

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.normal.normalize import nameless
from pallasite.proofs.batch import Found
from pallasite.proofs.replay import Replay
from pallasite.proofs.verdicts import (
    PROVED,
    REFUTED,
    UNKNOWN,
    Claim,
    Counterexample,
)

Retrace = Callable[[int], Sequence[Sequence[Kernel]]]
_MOST_OPERANDS = 5  # of those that may have rows


def doubled(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Retrace:
    """Traces a function with twice as many rows in some of its operands."""
    from pallasite.tools.traces import kernels_of

    def retrace(rows: int) -> list[list[Kernel]]:
        leaves, tree = jax.tree.flatten((args, kwargs))
        has = [n for n, x in enumerate(leaves) if np.ndim(x) and np.shape(x)[0] == rows]
        found = list[list[Kernel]]()
        for size in range(len(has[:_MOST_OPERANDS]), 0, -1):
            for chosen in combinations(has[:_MOST_OPERANDS], size):
                new = [_twice(x) if n in chosen else x for n, x in enumerate(leaves)]
                more, named = jax.tree.unflatten(tree, new)
                try:
                    sites = kernels_of(function, *more, **named)
                except Exception:  # whatever the author's code raises at this size
                    continue
                found.append([site.call.kernel for site in sites])
        return found

    return retrace


def _twice(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)


def over_sizes(
    kernel: Kernel, number: int, found: Found, retrace: Retrace | None
) -> Claim:
    """The claim, if it also holds for another number of rows."""
    claim, axis = found.claim, found.axis
    if claim.verdict != PROVED or axis is None:
        return claim
    if not found.operands:
        return replace(claim, verdict=UNKNOWN, reason="no operand has rows")
    rows = kernel.inputs[found.operands[0]].ref.shape[0]
    if retrace is None:
        why = "a script's kernels are traced for one number of rows: name a function"
        return replace(claim, verdict=UNKNOWN, reason=why)
    own = _code(kernel, axis, found.operands)
    for kernels in retrace(rows):
        if number < len(kernels) and _same(
            kernels[number], kernel, axis, found.operands, own
        ):
            return replace(
                claim,
                reason=f"{claim.reason}; the same code for {rows} and {2 * rows} rows",
            )
    why = f"for {2 * rows} rows the function has another kernel, or cannot be traced"
    return replace(claim, verdict=UNKNOWN, reason=why, line=str(kernel.loc or ""))


def _same(
    other: Kernel, kernel: Kernel, axis: int, rows: Sequence[int], own: str
) -> bool:
    if len(other.params) != len(kernel.params):
        return False
    for n, (a, b) in enumerate(zip(kernel.inputs, other.inputs, strict=True)):
        factor = 2 if n in rows else 1
        shape = a.ref.shape
        wanted = (shape[0] * factor, *shape[1:]) if n in rows else shape
        if b.ref.shape != wanted:
            return False
    return _code(other, axis, rows) == own


def _code(kernel: Kernel, axis: int, rows: Sequence[int]) -> str:
    """The text of a kernel without the number of rows."""
    op = find_pipeline(kernel)
    pipeline = Pipeline.of(op)
    grid = list(pipeline.grid)
    if axis >= len(grid):
        return ""
    grid[axis] = 1
    same = pipeline.with_(grid=tuple(grid)).to_op()
    ops: tuple[Op, ...] = tuple(same if o is op else o for o in kernel.body.ops)
    new = dict[Value, Value]()
    for n, param in enumerate(kernel.params):
        has = n in rows or n >= len(kernel.inputs)
        shape = (1, *param.ref.shape[1:]) if has else param.ref.shape
        new[param] = Value(param.ref.with_shape(shape))
    params = tuple(new[p] for p in kernel.params)
    body = nameless(replace(kernel.body, ops=ops), new)
    return kernel.with_(name="kernel", params=params, body=body).text


def refuted(kernel: Kernel, found: Found, replay: Replay) -> Claim:
    """The claim, refuted if a row of a run changes with other rows or its place."""
    if found.claim.verdict != UNKNOWN:
        return found.claim
    text = _experiment(kernel, found, replay)
    if not text:
        return found.claim
    example = Counterexample("", text, lambda: _experiment(kernel, found, replay))
    return replace(found.claim, verdict=REFUTED, counterexample=example)


def _experiment(kernel: Kernel, found: Found, replay: Replay) -> str:
    """How a row changes between two runs; empty if it does not, or nothing is run.

    Operands in `found` have rows. Of the others, those with as many rows as the outputs
    may have: the claim is refuted if a row changes whichever they are.
    """
    may = _may_have_rows(kernel, found)
    if not may or len(may) > _MOST_OPERANDS:
        return ""
    first, other = replay.varied(), replay.varied(1)
    before = replay.results(first)
    if before is None:
        return ""
    changes = dict[int, str]()
    for n in may:
        apart = [x.copy() for x in first]
        apart[n][1:] = other[n][1:]
        after = replay.results(apart)
        if after is None:
            return ""
        if any(
            _bits(a[:1]) != _bits(b[:1]) for a, b in zip(before, after, strict=True)
        ):
            name = kernel.inputs[n].name or f"operand {n}"
            changes[n] = f"row 0: it changes when only other rows of {name} do"
    bad = [changes[n] for n in found.operands if n in changes]
    optional = [n for n in may if n not in changes and n not in found.operands]
    if bad:
        return bad[0]
    text = next(iter(changes.values()), "")
    for size in range(len(optional) + 1):
        for chosen in combinations(optional, size):
            turned = (*found.operands, *chosen)
            if turned and not (text := _moved(first, before, turned, replay)):
                return ""
    return text


def _may_have_rows(kernel: Kernel, found: Found) -> list[int]:
    """The operands with as many rows as all outputs have."""
    counts = {p.ref.shape[0] if p.ref.shape else 0 for p in kernel.outputs}
    if len(counts) != 1 or max(counts) < 2:
        return []
    return [
        n
        for n, p in enumerate(kernel.inputs)
        if n in found.operands
        or (p.ref.shape[:1] == (*counts,) and not p.ref.is_semaphore)
    ]


def _moved(
    first: Sequence[np.ndarray],
    before: Sequence[np.ndarray],
    turned: Sequence[int],
    replay: Replay,
) -> str:
    """How a row changes when all rows of some operands move by one."""
    moved = [np.roll(x, 1, axis=0) if n in turned else x for n, x in enumerate(first)]
    after = replay.results(moved)
    for one, two in zip(before, after or (), strict=after is not None):
        for row, (here, there) in enumerate(zip(one[:-1], two[1:], strict=True)):
            if _bits(here) != _bits(there):
                return f"row {row}: it changes when it becomes row {row + 1}"
    return ""


def _bits(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()
