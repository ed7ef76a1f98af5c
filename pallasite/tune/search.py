"""The search: which candidates to compile and measure, and when to stop.

Of `n` configurations at most a quarter is compiled (four at least): the default, then
what is predicted to be best, half of it among neighbours of the best one measured. The
prediction is the static estimate, corrected by what was measured. A candidate that is
the same program as a measured one takes its time, and one whose bound is above the best
time is left out: neither is compiled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np

from pallasite.tune.candidates import Candidate
from pallasite.tune.space import Space

RIDGE = 0.01  # how much a correction must explain to be believed
LEAST = 4  # candidates that are always compiled, if there are that many
SHARE = 0.25  # of all that is compiled at most


@dataclass
class Outcome:
    """What a search knows, at any time.

    Attributes:
        default: the candidate with the default configuration.
        candidates: all of them, the default first.
        share: how many of them are compiled at most.
        compiled: how many were compiled.
        complete: whether the search came to its end.
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
        """The fastest that was measured; the default before anything was."""
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
    """Runs a search to its end, or until `evaluate` raises (`outcome` stays right).

    Args:
        outcome: where results are kept.
        space: says which configurations are neighbours.
        evaluate: sets `seconds` or `refused` of each candidate of a batch.
        width: how many candidates make a batch.
    """
    first = True
    while not outcome.complete:
        _share_times(outcome.candidates)
        # The default alone says how long others may take, and what is right.
        # Of what is left at most half is compiled at once: what comes later learns.
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
    """Up to `room` different programs that may be better than the best one."""
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
    # Half of each batch; single ones take turns.
    count = (room + outcome.compiled % 2) // 2
    around = [c for c in ranked if c.config in near][:count]
    for candidate in (*around, *ranked):
        if len(taken) < room and candidate.identity not in taken:
            taken.add(candidate.identity)
            yield candidate


def _predicted(candidates: Sequence[Candidate], space: Space) -> dict[int, float]:
    """The logarithm of each candidate's time, by its `id`.

    That of the estimate, plus a parabola in the place of each parameter's value, fitted
    to what was measured.
    """
    # Nothing is known of kernels whose work their operands' values decide.
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
    """Where each value is among its parameter's, from -1 to 1, and its square."""
    places = []
    for name, values in space.values.items():
        value = candidate.config[name]
        place = values.index(value) if value in values else 0
        places.append(2 * place / max(len(values) - 1, 1) - 1)
    first = np.array(places)
    return np.concatenate([first, first**2])


def _share_times(candidates: Sequence[Candidate]) -> None:
    """Candidates that are the same program take the same time."""
    done = {c.identity: c for c in candidates if c.seconds is not None or c.refused}
    for candidate in candidates:
        same = done.get(candidate.identity)
        if same is not None and candidate.identity is not None:
            candidate.seconds, candidate.refused = same.seconds, same.refused
