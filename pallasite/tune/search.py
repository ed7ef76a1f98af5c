"""The search: which candidates to compile and measure, and when to stop.

Of `n` configurations at most a quarter is compiled (at least four): the default, then
those predicted to be best, half of them neighbours of the best one measured. The
prediction is the static estimate, corrected by measurements. A candidate that is the
same program as a measured one gets its time, and one whose bound exceeds the best time
is skipped: neither is compiled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np

from pallasite.tune.candidates import Candidate
from pallasite.tune.space import Space

RIDGE = 0.01  # regularisation of the fitted corrections
LEAST = 4  # candidates always compiled, if there are that many
SHARE = 0.25  # largest fraction of candidates to compile


@dataclass
class Outcome:
    """The state of a search.

    Attributes:
        default: the candidate with the default configuration.
        candidates: all of them, the default first.
        share: the largest fraction of them to compile.
        compiled: how many were compiled.
        complete: whether the search ran to its end.
    """

    default: Candidate
    candidates: Sequence[Candidate]
    share: float = SHARE
    compiled: int = 0
    complete: bool = False
    budget: int = field(init=False)

    def __post_init__(self) -> None:
        self.budget = max(LEAST, int(self.share * len(self.candidates)))

    @property
    def best(self) -> Candidate:
        """The fastest candidate measured; the default before any was."""
        done = [c for c in self.candidates if c.seconds is not None and not c.refused]
        return min(
            done, key=lambda c: (c.seconds, c is not self.default), default=self.default
        )

    @property
    def refused(self) -> list[Candidate]:
        return [c for c in self.candidates if c.refused]


def search(
    outcome: Outcome,
    space: Space,
    evaluate: Callable[[Sequence[Candidate]], None],
    width: int,
) -> None:
    """Runs a search to its end, or until `evaluate` raises (`outcome` stays valid).

    Args:
        outcome: where results are kept.
        space: says which configurations are neighbours.
        evaluate: sets `seconds` or `refused` of each candidate in a batch.
        width: how many candidates make a batch.
    """
    first = True
    while not outcome.complete:
        _share_times(outcome.candidates)
        # First only the default: it sets the time limit and the expected result. Then
        # at most half of the rest per batch, so that later batches can learn.
        left = outcome.budget - outcome.compiled
        room = 1 if first else min(width, (left + 1) // 2)
        batch = list(_next(outcome, space, room))
        if not batch:
            outcome.complete = True
            return
        outcome.compiled += len(batch)
        evaluate(batch)
        if first and outcome.default.refused:
            outcome.complete = True
        first = False


def _next(outcome: Outcome, space: Space, room: int) -> Iterator[Candidate]:
    """Up to `room` distinct programs that may beat the best one."""
    if outcome.default.seconds is None:
        yield outcome.default
        return
    best, taken = outcome.best, set()
    assert best.seconds is not None
    near = list(space.neighbours(best.config))
    waiting = [
        c
        for c in outcome.candidates
        if c.seconds is None and not c.refused and c.bound < best.seconds
    ]
    predicted = _predicted(outcome.candidates, space)
    ranked = sorted(waiting, key=lambda c: predicted[id(c)])
    # Neighbours are half of each batch; batches of one alternate.
    count = (room + outcome.compiled % 2) // 2
    around = [c for c in ranked if c.config in near][:count]
    for candidate in (*around, *ranked):
        if len(taken) < room and candidate.identity not in taken:
            taken.add(candidate.identity)
            yield candidate


def _predicted(candidates: Sequence[Candidate], space: Space) -> dict[int, float]:
    """The predicted logarithm of each candidate's time, by its `id`.

    It is that of the estimate, plus a parabola in the position of each parameter's
    value, fitted to the measurements.
    """
    # There is no estimate for kernels whose work depends on operand values.
    is_known = all(c.estimate > 0 for c in candidates if not c.refused)
    estimates = {id(c): c.estimate if is_known else 1.0 for c in candidates}
    usable = [c for c in candidates if not c.refused]
    done = [c for c in usable if c.seconds]
    scale = np.array([log(c.seconds / estimates[id(c)]) for c in done if c.seconds])
    rows = np.array([_places(c, space) for c in done])
    weights = np.linalg.solve(
        rows.T @ rows + RIDGE * np.eye(rows.shape[1]), rows.T @ (scale - np.mean(scale))
    )
    found = {id(c): 0.0 for c in candidates}
    for c in usable:
        found[id(c)] = log(estimates[id(c)]) + float(_places(c, space) @ weights)
    return found


def _places(candidate: Candidate, space: Space) -> np.ndarray:
    """Each value's position among its parameter's, from -1 to 1, and its square."""
    places = []
    for name, values in space.values.items():
        value = candidate.config[name]
        place = values.index(value) if value in values else 0
        places.append(2 * place / max(len(values) - 1, 1) - 1)
    first = np.array(places)
    return np.concatenate([first, first**2])


def _share_times(candidates: Sequence[Candidate]) -> None:
    """Gives candidates that are the same program the same time."""
    done = {c.identity: c for c in candidates if c.seconds is not None or c.refused}
    for candidate in candidates:
        same = done.get(candidate.identity)
        if same is not None and candidate.identity is not None:
            candidate.seconds, candidate.refused = same.seconds, same.refused
