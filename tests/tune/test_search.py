"""The search on made-up landscapes; timing by a made-up clock; comparing results."""

import threading
from math import inf, log2

import jax.numpy as jnp
import numpy as np
import pytest

from pallasite.tools.time_profile import Span
from pallasite.tune import measure
from pallasite.tune.candidates import Candidate
from pallasite.tune.progress import Progress, shown_time
from pallasite.tune.search import Outcome, search
from pallasite.tune.space import Space
from pallasite.tune.table import Table

SIZES = (16, 32, 64, 128, 256, 512)
SPACE = Space({"m": SIZES, "n": SIZES, "k": (16, 32, 64, 128)})


def seconds(config) -> float:
    """Best at m=128, n=256, k=64, and worse with every step away from it."""
    return 1 + sum(
        abs(log2(config[name]) - best)
        for name, best in zip("mnk", (7, 8, 6), strict=True)
    )


def candidates(estimate=lambda config: 1.0, **more) -> list[Candidate]:
    made = [
        Candidate(c, Table(), identity=str(c), estimate=estimate(c), **more)
        for c in SPACE.configs
    ]
    return sorted(made, key=lambda c: c.config != {"m": 64, "n": 64, "k": 16})


def run(made, measured=seconds, width=4) -> tuple[Outcome, list[Candidate]]:
    outcome, tried = Outcome(made[0], made), []

    def evaluate(batch):
        for candidate in batch:
            tried.append(candidate)
            if not candidate.refused:
                candidate.seconds = measured(candidate.config)

    search(outcome, SPACE, evaluate, width)
    return outcome, tried


def test_a_quarter_is_compiled_and_the_best_is_found():
    outcome, tried = run(candidates())
    assert outcome.complete
    assert len(tried) == outcome.compiled <= len(SPACE.configs) / 4
    assert outcome.best.config == {"m": 128, "n": 256, "k": 64}
    assert tried[0] is outcome.default


def test_kernels_of_unknown_cost_are_searched_by_their_times():
    outcome, tried = run(candidates(lambda config: 0.0))
    assert outcome.best.config == {"m": 128, "n": 256, "k": 64}
    assert len(tried) <= len(SPACE.configs) / 4


def test_good_estimates_are_tried_first():
    outcome, tried = run(candidates(seconds))
    assert outcome.best.config == {"m": 128, "n": 256, "k": 64}
    assert outcome.best in tried[:5]


def test_a_program_that_is_known_is_not_compiled_again():
    made = candidates()
    for candidate in made:
        candidate.identity = candidate.config["m"]
    _, tried = run(made, lambda config: config["m"])
    assert len(tried) == len(SIZES)
    assert all(c.seconds == c.config["m"] for c in made)


def test_what_cannot_be_best_is_not_compiled():
    _, tried = run(candidates(bound=2.0), lambda config: 1.5)
    assert len(tried) == 1  # the default
    _, tried = run(candidates(bound=1.0), lambda config: 1.5)
    assert len(tried) == len(SPACE.configs) // 4


def test_refused_candidates_are_never_the_answer():
    made = candidates()
    for candidate in made:
        if candidate.config["k"] == 64:
            candidate.refused = "does not fit"
    outcome, tried = run(made)
    assert outcome.best.config["k"] in (32, 128)
    assert not [c for c in tried if c.refused]
    assert len(outcome.refused) == len(SPACE.configs) // 4


def test_what_was_measured_before_an_interruption_counts():
    made = candidates()
    outcome, batches = Outcome(made[0], made), []

    def evaluate(batch):
        batches.append(batch)
        if len(batches) == 3:
            raise KeyboardInterrupt
        for candidate in batch:
            candidate.seconds = seconds(candidate.config)

    with pytest.raises(KeyboardInterrupt):
        search(outcome, SPACE, evaluate, 4)
    assert not outcome.complete
    assert outcome.best.seconds == min(
        seconds(c.config) for batch in batches[:2] for c in batch
    )


def test_spaces():
    space = Space({"a": (1, 2, 3), "b": (1, 2)}, lambda c: c["a"] * c["b"] <= 4)
    assert len(space.configs) == 5
    assert list(space.neighbours({"a": 2, "b": 1})) == [
        {"a": 1, "b": 1},
        {"a": 3, "b": 1},
        {"a": 2, "b": 2},
    ]
    assert list(space.neighbours({"a": 9, "b": 1})) == [{"a": 9, "b": 2}][:0]
    assert space.identity != Space({"a": (1, 2, 3), "b": (1, 2)}).identity


# Timing


class Clock:
    """Time passes only by what is run."""

    def __init__(self):
        self.now, self.runs = 0.0, []

    def timed(self, run) -> float:
        return measure.wall(run, lambda: self.now)

    def takes(self, name, *times):
        def run():
            self.runs.append(name)
            number = min(self.runs.count(name), len(times)) - 1
            self.now += times[number]
            return 0.0

        return run


def test_times_are_interleaved_and_the_least_counts():
    clock = Clock()
    runs = [clock.takes("a", 0.9, 0.2, 0.3), clock.takes("b", 0.25, 0.4)]
    found = measure.interleaved(runs, clock.timed, rounds=3)
    np.testing.assert_allclose(found, [0.2, 0.25])
    assert clock.runs == ["a", "b", "a", "b", "a", "b"]


def test_short_runs_are_repeated_and_hopeless_ones_given_up():
    clock = Clock()
    runs = [clock.takes("short", 0.001), clock.takes("long", 0.5)]
    found = measure.interleaved(runs, clock.timed, rounds=5)
    np.testing.assert_allclose(found, [0.001, 0.5])
    assert clock.runs.count("long") == 2
    assert clock.runs.count("short") == 1 + 4 * 10


def test_on_a_gpu_the_time_that_it_is_busy_counts(monkeypatch):
    """Two kernels side by side, and a gap in which the next one is started."""

    def events(run):
        run()
        ends = ((0.0, 2.0), (1.0, 3.0), (8.0, 9.0))
        return [Span("kernel", "stream", *each) for each in ends]

    monkeypatch.setattr(measure, "device_events", events)
    monkeypatch.setattr(measure.jax, "default_backend", lambda: "gpu")
    measure.timer.cache_clear()
    assert measure.timer() is measure.on_device
    assert measure.interleaved([lambda: 0.0], rounds=1) == [4.0]
    # Where nothing is recorded, a clock has to do.
    monkeypatch.setattr(measure, "device_events", lambda run: [run()][:0])
    monkeypatch.setattr(measure, "wall", lambda run: run() + 2.5)
    assert measure.on_device(lambda: 0.0) == 2.5
    measure.timer.cache_clear()
    assert measure.timer() is measure.wall
    measure.timer.cache_clear()


# Comparing


def test_rounding_is_accepted_and_mistakes_are_not():
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    allowed = measure.tolerance_of([np.float32])
    assert not measure.difference([x * (1 + 1e-6)], [x], allowed)
    told = measure.difference([x + 1], [x], allowed)
    assert "result 0 has a root-mean-square error of 1," in told
    one = x.copy()
    one[7] += 0.1
    assert "error of 0.0032," in measure.difference([one], [x], allowed)
    assert "NaN" in measure.difference(
        np.where(x > 2, np.nan, x), np.where(x < -2, np.nan, x), 1
    )
    assert "differs in 1 elements" in measure.difference(
        (x, np.array([1, 2])), (x, np.array([1, 3])), allowed
    )
    assert "not" in measure.difference(x[:5], x, allowed)
    coarse = jnp.asarray(x, jnp.bfloat16)
    assert not measure.difference(
        coarse * 1.01, coarse, measure.tolerance_of([coarse.dtype])
    )
    assert not measure.difference(np.array([inf, 1.0]), np.array([inf, 1.0]), 0.0)


# The line on the terminal


def test_progress_says_what_is_best_and_how_long(capsys):
    import sys

    made = candidates()
    outcome, _ = run(made)
    progress = Progress("matmul", stream=sys.stderr, shown=True)
    progress.update(outcome)
    progress.close()
    shown = capsys.readouterr().err
    assert (
        "matmul: [####################] 36/36, best 1 s (m=128, n=256, k=64)" in shown
    )
    assert "0 s left" in shown
    Progress("quiet", stream=sys.stderr, shown=False).update(outcome)
    assert not capsys.readouterr().err
    assert [shown_time(x, "s") for x in (2.5, 2.5e-3, 2.5e-6, 2.5e-9)] == [
        "2.5 s",
        "2.5 ms",
        "2.5 µs",
        "2.5 ns",
    ]
    assert shown_time(12345.0, "cycles") == "12,345 cycles"


def test_tuners_side_by_side_measure_one_by_one():
    order, started = [], threading.Event()

    def other():
        started.set()
        with measure.alone():
            order.append("other")

    with measure.alone():
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        started.wait()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


@pytest.mark.parametrize("width", [2, 4, 16])
def test_a_batch_is_no_larger_than_what_is_left_to_learn_from(width):
    """Causal attention on a v5p (libtpu's cycles): flat but for one row of blocks."""
    sizes = (64, 128, 256, 512)
    space = Space({"block_q": sizes, "block_kv": sizes})

    def cycles(config) -> float:
        at_the_end = config["block_kv"] == 512
        if config["block_q"] == 512:
            return 6317 if at_the_end else 6300
        return 6530 if at_the_end else 6603

    def estimate(config) -> float:
        return 5.95 - 0.02 * sum(size == 512 for size in config.values())

    for block_q in (64, 128, 256):
        default = {"block_q": block_q, "block_kv": 512}
        made = [
            Candidate(c, Table(), identity=str(c), estimate=estimate(c))
            for c in space.configs
        ]
        made.sort(key=lambda c: c.config != default)
        outcome = Outcome(made[0], made)

        def evaluate(batch):
            for candidate in batch:
                candidate.seconds = cycles(candidate.config)

        search(outcome, space, evaluate, width)
        assert outcome.compiled == 4 and outcome.best.seconds == 6300
