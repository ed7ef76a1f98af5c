"""plan_memory: what it notes, and that the emitter obeys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.backends.cpu import make_llvm, passes_for
from pallasite.backends.cpu.tiles.plan_memory import MEMORY, UNTIL, MemoryPlan
from pallasite.ir.nodes import walk
from pallasite.ir.text import parse_kernel, print_kernel
from pallasite.passes.run import SHARED, run
from pallasite.sites import kernels_in
from pallasite.target import host
from tests.fuzz.agreement import run_numpy, same
from tests.fuzz.choices import Seeded
from tests.fuzz.generate import random_kernel

X = np.zeros((8, 256), np.float32)


def planned(body, shape=(8, 256)):
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    (kernel,) = kernels_in(pl.pallas_call(body, out_shape=out), X)
    return run(kernel, [*SHARED, *passes_for(host())])


def notes(kernel, name: str) -> list[tuple[str, ...]]:
    ops = [op for op in walk(kernel.body) if op.name == name]
    return [op.attrs.get(MEMORY, ("",)) for op in ops]


def test_a_result_that_two_loops_read_is_stored():
    def body(x_ref, o_ref):
        e = jnp.exp(x_ref[...])
        o_ref[...] = jnp.cumsum(e, 1) + e[:, ::-1]

    assert notes(planned(body), "exp") == [("stored",)]


def test_a_result_that_a_reduction_reads_first_is_kept_there():
    def body(x_ref, o_ref):
        e = jnp.exp(x_ref[...])
        o_ref[...] = e / e.sum(1, keepdims=True)

    kernel = planned(body)
    assert ("kept",) in notes(kernel, "exp")


def test_parts_that_are_only_stored_are_moved():
    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = jnp.concatenate([x[:, 128:] * 2, x[:, :128]], 1)

    assert notes(planned(body), "concatenate") == [("moved",)]


def test_what_one_loop_reads_is_not_stored():
    def body(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...]) + 1

    assert notes(planned(body), "exp") == [("",)]


def test_notes_survive_the_text_and_cover_every_result():
    def body(x_ref, o_ref):
        step = lambda n, acc: acc * 0.5 + x_ref[n, :]
        o_ref[...] = jax.lax.fori_loop(0, 8, step, o_ref[0, :] * 0)[None, :] + X

    kernel = planned(body)
    again = parse_kernel(print_kernel(kernel, locs=True))
    for each in (kernel, again):
        plan = MemoryPlan.of(each)
        results = [v for op in walk(each.body) for v in op.results]
        assert results and all(v in plan.until for v in results)
        loops = [op for op in walk(each.body) if op.name == "for"]
        assert all(v in plan.until for op in loops for v in op.regions[0].params)
    assert make_llvm(print_kernel(kernel)) == make_llvm(print_kernel(again))


def test_the_emitter_obeys():
    def body(x_ref, o_ref):
        e = jnp.exp(x_ref[...])
        o_ref[...] = jnp.cumsum(e, 1) + e[:, ::-1]

    text = print_kernel(planned(body))
    stored = f'{MEMORY}=("stored",)'
    assert text.count(stored) == 1
    late = text.replace(f", {stored}", "").replace(stored, f'{MEMORY}=("",)')
    assert make_llvm(late) != make_llvm(text)


@pytest.mark.parametrize("family", ["tiles", "control", "grids"])
def test_notes_change_no_meaning(family: str):
    for seed in range(10):
        case = random_kernel(Seeded(seed), family)
        own = passes_for(host())
        before = run(case.kernel, [*SHARED, *own[:-1]])
        after = own[-1].function(before)
        assert any(UNTIL in op.attrs for op in walk(after.body) if op.results)
        pairs = zip(
            run_numpy(after, case.arrays), run_numpy(before, case.arrays), strict=True
        )
        assert all(same(got, want).all() for got, want in pairs)


def test_elements_of_a_concatenation_are_found_in_its_parts():
    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = 2 * x + jnp.roll(x, 1, axis=0)

    kernel = planned(body)
    assert notes(kernel, "concatenate") == [("found",)]
    assert "@malloc" not in make_llvm(kernel.text)  # no memory for temporaries


def test_a_concatenation_that_two_loops_read_is_stored():
    def body(x_ref, o_ref):
        x = jnp.roll(x_ref[...], 1, axis=0)
        o_ref[...] = x / (x + 1).sum(1, keepdims=True)

    assert notes(planned(body), "concatenate") == [("",)]


def test_a_concatenation_that_moves_on_is_stored():
    def body(x_ref, o_ref):
        o_ref[...] = jnp.roll(x_ref[...], 1, axis=0)[::-1] + 1

    assert notes(planned(body), "concatenate") == [("",)]
