"""Spellings drawn by chance: each means what its computation says, on every engine."""

import random
from itertools import islice

import jax
import pytest

from pallasite import config
from pallasite.target import named
from tests.forms import HELD_OUT, all_forms
from tests.forms.form import SIZES, distance, gradient
from tests.forms.pairs import KINDS, call_of, nameless, normal_text, outcome
from tests.forms.spellings import BASES, pairs, spelling

TINY = SIZES["tiny"]
SEED = 7
COUNT = {"attention": 6, "matmul": 8, "rows": 5, "reductions": 5, "scans": 4}
COUNT["maps"] = 6
# What a computation in f32 may be off by, of sums in another order.
ALLOWED = 1e-4


@pytest.mark.parametrize("mode", ["", "1"], ids=["cpu", "emulated"])
@pytest.mark.parametrize("name", BASES)
def test_spellings_mean_the_same(name: str, mode: str):
    draw = random.Random(f"{SEED} {name}")
    base = BASES[name]
    for _ in range(COUNT[name]):
        one = spelling(draw, base, draw.choice(base.whats))
        operands = one.problem.arrays(TINY)
        want = jax.jit(one.problem.reference)(*operands)
        with config.override(interpret=mode):
            got = jax.jit(one.function(TINY))(*operands)
        assert distance(got, want) < ALLOWED, str(one)


@pytest.mark.parametrize("name", BASES)
def test_every_choice_can_be_drawn(name: str):
    """No option is dead: some computation has a spelling with it."""
    base, draw = BASES[name], random.Random(SEED)
    wanted = {(axis, option) for axis, all_ in base.axes.items() for option in all_}
    for _ in range(5000):
        if not wanted:
            break
        one = spelling(draw, base, draw.choice(base.whats))
        wanted -= {(axis, getattr(one.style, axis)) for axis in base.axes}
    assert not wanted


def test_pairs_are_of_one_computation_and_differ():
    drawn = list(islice(pairs(SEED), 50))
    assert all(a.what == b.what and a.style != b.style for a, b in drawn)
    again = list(islice(pairs(SEED), 50))
    assert list(map(str, sum(drawn, ()))) == list(map(str, sum(again, ())))
    assert len({a.base.name for a, _ in drawn}) == len(BASES)


def test_the_same_spelling_has_the_same_text():
    one, _ = next(pairs(SEED, ["matmul"]))
    first, second = (normal_text(call_of(one, TINY)) for _ in range(2))
    assert first == second
    assert outcome((one, one), named("cpu"), TINY) == ("text", "")


def test_names_are_no_part_of_a_text():
    text = "kernel @add(%x: f32[8], %o: f32[8]) {\n  %0: f32[8] = load %x\n}"
    other = "kernel @plus(%a: f32[8], %b: f32[8]) {\n  %c: f32[8] = load %a\n}"
    assert nameless(text) == nameless(other)
    assert nameless(text) != nameless(other.replace("load %a", "load %b"))


def test_pairs_on_a_gpu_and_a_cpu_have_an_outcome():
    for pair in islice(pairs(SEED, ["matmul", "reductions"]), 3):
        for target in ("cpu", "gpu:h200"):
            kind, why = outcome(pair, named(target), TINY)
            assert kind in KINDS
            assert bool(why) == (kind == "neither")


def test_enough_forms_with_names_of_their_own():
    forms = all_forms()
    count = lambda family: sum(form.family == family for form in forms)
    assert len({form.name for form in forms}) == len(forms) >= 150
    assert (count("attention"), count("matmul")) >= (40, 35)
    assert count("rows") >= 35 and count("others") >= 40
    assert sum(form.grad for form in forms) >= 110


def test_forms_held_out_are_extra():
    held_out = all_forms(held_out=True)[len(all_forms()) :]
    assert len({form.name for form in all_forms(held_out=True)}) >= 240
    assert {form.family for form in held_out} == set(HELD_OUT)
    assert sum(form.grad for form in held_out) >= 45


@pytest.mark.parametrize("part", range(2))
def test_forms_held_out_mean_what_their_problems_say(part: int):
    """With gradients; `benchmarks/forms.py` holds all of them to it."""
    held_out = all_forms(held_out=True)[len(all_forms()) :]
    for form in random.Random(f"held out {part}").sample(held_out, 3):
        operands = form.problem.arrays(TINY)
        functions = [form.make(TINY), form.problem.lean or form.problem.reference]
        if form.grad:
            functions += [gradient(function, operands) for function in functions]
        got, want, *both = [jax.jit(function)(*operands) for function in functions]
        assert distance(got, want) < ALLOWED, form.name
        assert not both or distance(*both) < ALLOWED, form.name


@pytest.mark.parametrize("part", range(2))
def test_forms_mean_what_their_problems_say(part: int):
    """A sample; `benchmarks/forms.py` holds all of them to it, at larger sizes."""
    for form in all_forms()[part::12]:
        operands = form.problem.arrays(TINY)
        want = jax.jit(form.problem.reference)(*operands)
        got = jax.jit(form.make(TINY))(*operands)
        assert distance(got, want) < ALLOWED, form.name
