"""Batch invariance over traces and runs: other numbers of rows, and other rows.

`batch.py` shows that within one call a row's bits depend on nothing but the row. Here
the function is traced for twice as many rows: what grows along one dimension has its
rows there, and the kernel must be the same except for sizes. And where `batch.py`
cannot tell, two runs that differ in a row's neighbours or in its place may refute the
claim.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, islice
from typing import Any

import jax
import numpy as np

from pallasite.ir.nodes import Kernel, Value
from pallasite.passes.normal.drop_rules import drop_rules
from pallasite.proofs.batch import Found
from pallasite.proofs.batch import batch as batch_of
from pallasite.proofs.replay import Replay
from pallasite.proofs.row_code import row_code
from pallasite.proofs.verdicts import PROVED, REFUTED, UNKNOWN, Claim, Counterexample

Retrace = Callable[[], Iterable[Sequence[Kernel]]]
_MOST_OPERANDS = 5  # of those that may have rows
_MOST_TRACES = 48


def doubled(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Retrace:
    """Traces a function with twice as many rows in some of its operands.

    Rows are dimension 0 of operands of one size there, of most of them first.
    """
    from pallasite.tools.traces import kernels_of

    leaves, tree = jax.tree.flatten((args, kwargs))
    sizes = dict.fromkeys(np.shape(x)[0] for x in leaves if np.ndim(x))

    def chosen() -> Iterator[tuple[int, ...]]:
        for rows in sizes:
            has = [n for n, x in enumerate(leaves) if np.shape(x)[:1] == (rows,)]
            for size in range(len(has[:_MOST_OPERANDS]), 0, -1):
                yield from combinations(has[:_MOST_OPERANDS], size)

    @cache
    def traced(numbers: tuple[int, ...]) -> Sequence[Kernel]:
        new = [_twice(x) if n in numbers else x for n, x in enumerate(leaves)]
        more, named = jax.tree.unflatten(tree, new)
        try:
            sites = kernels_of(function, *more, **named)
        except Exception:  # whatever the author's code raises at this size
            return ()
        return [site.call.kernel for site in sites]

    return lambda: map(traced, islice(chosen(), _MOST_TRACES))


def _twice(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)


def batch(
    kernel: Kernel, number: int, retrace: Retrace | None, replay: Replay
) -> Claim:
    """The claim about the function's `number`-th kernel."""
    kernel = drop_rules(kernel)
    if retrace is None:
        why = "a script's kernels are traced for one number of rows: name a function"
        return _unless_proved(kernel, batch_of(kernel), why, replay)
    judged = dict[tuple[int, ...], Found]()
    for kernels in retrace():
        if number >= len(kernels):
            continue
        other = drop_rules(kernels[number])
        grown = _grown(kernel, other)
        outs = tuple(grown[p] for p in kernel.outputs if p in grown)
        # Outputs of a size that the author fixed do not grow.
        if len(outs) not in (0, kernel.num_outputs):
            continue
        found = judged.get(outs) or batch_of(kernel, outs)
        dims = found.dims or (grown if outs else {})
        judged.setdefault(outs, replace(found, dims=dims))
        if found.claim.verdict == PROVED and _same(kernel, other, found, bool(outs)):
            rows = kernel.outputs[0].ref.shape[found.outs[0]]
            what = f"{found.claim.reason}; the same code for {rows} and {2 * rows} rows"
            return replace(found.claim, reason=what)
    first = next(iter(judged.values())) if judged else batch_of(kernel)
    why = "for twice as many rows the function has another kernel, or cannot be traced"
    return _unless_proved(kernel, first, why, replay)


def _unless_proved(kernel: Kernel, found: Found, why: str, replay: Replay) -> Claim:
    if found.claim.verdict == PROVED:
        line = str(kernel.loc or "")
        return replace(found.claim, verdict=UNKNOWN, reason=why, line=line)
    return refuted(kernel, found, replay)


def _grown(kernel: Kernel, other: Kernel) -> dict[Value, int]:
    """The parameters that are twice as long in `other`, each along one dimension."""
    found = dict[Value, int]()
    for one, two in zip(kernel.params, other.params, strict=False):
        here, there = one.ref.shape, two.ref.shape
        longer = [d for d, n in enumerate(here) if there[d : d + 1] != (n,)]
        if len(longer) == 1 and there == _longer(here, longer[0]):
            found[one] = longer[0]
    return found


def _longer(shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
    return tuple(2 * n if d == dim else n for d, n in enumerate(shape))


def _same(kernel: Kernel, other: Kernel, found: Found, grows: bool) -> bool:
    """Whether what grows is what has rows, and a row's code is the same."""
    if len(other.params) != len(kernel.params):
        return False
    for one, two in zip(kernel.params, other.params, strict=True):
        rows = found.dims.get(one) if grows or one in kernel.inputs else None
        if two.ref.shape != _longer(one.ref.shape, rows):
            return False
    again = batch_of(other, found.outs)
    return again.claim.verdict == PROVED and row_code(kernel, found) == row_code(
        other, again
    )


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
    before = _by_rows(replay.results(first), found)
    if before is None:
        return ""
    changes = dict[int, str]()
    for n, dim in may.items():
        apart = [x.copy() for x in first]
        np.moveaxis(apart[n], dim, 0)[1:] = np.moveaxis(other[n], dim, 0)[1:]
        after = _by_rows(replay.results(apart), found)
        if after is None:
            return ""
        if any(
            _bits(a[:1]) != _bits(b[:1]) for a, b in zip(before, after, strict=True)
        ):
            name = kernel.inputs[n].name or f"operand {n}"
            changes[n] = f"row 0: it changes when only other rows of {name} do"
    sure = [n for n, p in enumerate(kernel.inputs) if p in found.dims]
    bad = [changes[n] for n in sure if n in changes]
    optional = [n for n in may if n not in changes and n not in sure]
    if bad:
        return bad[0]
    text = next(iter(changes.values()), "")
    for size in range(len(optional) + 1):
        for chosen in combinations(optional, size):
            turned = {n: may[n] for n in (*sure, *chosen)}
            if turned:
                moved = [
                    np.roll(x, 1, axis=turned[n]) if n in turned else x
                    for n, x in enumerate(first)
                ]
                text = _moved(before, _by_rows(replay.results(moved), found))
                if not text:
                    return ""
    return text


def _by_rows(
    results: Sequence[np.ndarray] | None, found: Found
) -> list[np.ndarray] | None:
    if results is None:
        return None
    return [np.moveaxis(x, d, 0) for x, d in zip(results, found.outs, strict=True)]


def _may_have_rows(kernel: Kernel, found: Found) -> dict[int, int]:
    """The operands that have as many rows as all outputs, and along which dimension."""
    counts = {
        (*p.ref.shape, *[0] * (d + 1))[d]
        for p, d in zip(kernel.outputs, found.outs, strict=True)
    }
    if len(counts) != 1 or max(counts) < 2:
        return {}
    return {
        n: found.dims.get(p, 0)
        for n, p in enumerate(kernel.inputs)
        if p in found.dims or (p.ref.shape[:1] == (*counts,) and not p.ref.is_semaphore)
    }


def _moved(before: Sequence[np.ndarray], after: Sequence[np.ndarray] | None) -> str:
    """How a row changes when all rows of some operands move by one."""
    for one, two in zip(before, after or (), strict=after is not None):
        for row, (here, there) in enumerate(zip(one[:-1], two[1:], strict=True)):
            if _bits(here) != _bits(there):
                return f"row {row}: it changes when it becomes row {row + 1}"
    return ""


def _bits(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()
