"""Loops over the range of iterations that a test of data lets through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.verify import verify
from pallasite.passes.lower.place_windows import place_windows
from pallasite.passes.lower.promote import promote
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.optimise.guard_bounds import guard_bounds
from pallasite.passes.optimise.guard_range import guard_range
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.triton import harness
from tests.passes.normal.meaning import outputs

F32 = jnp.float32
STEPS, ROWS, WIDTH = 20, 16, 33


def meets(ids, first):
    return (ids.max() >= first) & (ids.min() < first + 16)


def always(ids, first):
    return jnp.bool_(True)


def segments(test, steps=STEPS, extra=False) -> Kernel:
    def kernel(ids_ref, x_ref, o_ref, *count):
        first = pl.program_id(0) * 16

        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)
            for ref in count:
                ref[...] = jnp.zeros_like(ref)

        @pl.when(test(ids_ref[...], first))
        def _():
            slot = first + lax.broadcasted_iota(jnp.int32, (16, ROWS), 0)
            hot = (ids_ref[...][:, 0][None] == slot).astype(F32)
            o_ref[...] += jnp.dot(hot, x_ref[...], precision="highest")

        for ref in count:  # something that every step does
            ref[...] += 1.0

    count = extra * [jax.ShapeDtypeStruct((32, 8), F32)]
    call = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((32, WIDTH), F32), *count],
        grid=(2, steps),
        in_specs=[
            pl.BlockSpec((ROWS, 1), lambda i, j: (j, 0)),
            pl.BlockSpec((ROWS, WIDTH), lambda i, j: (j, 0)),
        ],
        out_specs=[
            pl.BlockSpec((16, n), lambda i, j: (i, 0)) for n in (WIDTH, 8)[: 1 + extra]
        ],
    )
    n = steps * ROWS
    shapes = (
        jax.ShapeDtypeStruct((n, 1), jnp.int32),
        jax.ShapeDtypeStruct((n, WIDTH), F32),
    )
    return run(kernels_in(call, *shapes)[0])


def promoted(kernel: Kernel) -> Kernel:
    kernel = canonicalize(place_windows(kernel))
    return canonicalize(guard_bounds(promote(kernel)))


def loops(kernel: Kernel) -> list:
    return [op for op in walk(kernel.body) if op.name == "for"]


@pytest.mark.parametrize("steps", [STEPS, 32, 17])
@pytest.mark.parametrize("ids", ["sorted", "any", "none"])
def test_range(ids, steps):
    kernel = segments(meets, steps)
    before = promoted(kernel)
    after = guard_range(before)
    verify(after)
    scan, loop = loops(after)
    assert loop.operands[:2] == scan.results
    assert "dot" not in {op.name for op in walk(scan.regions[0])}
    # Blocks of several steps are tested at once, if they are as many each time.
    at_once = {STEPS: 4, 32: 16, 17: 1}[steps]
    assert f"i32[{at_once * ROWS},1] = load" in after.text
    rng = np.random.default_rng(0)
    n = steps * ROWS
    numbers = {
        "sorted": np.sort(rng.integers(0, 32, n)),
        "any": rng.integers(-3, 40, n),
        "none": np.full(n, 99),
    }[ids]
    given = [numbers.astype(np.int32)[:, None], rng.normal(size=(n, WIDTH))]
    given[1] = given[1].astype(np.float32)
    want, got = outputs(before, given)[0], outputs(after, given)[0]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(
        harness.simulated(kernel, given)[0], want, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "case",
    [{"test": always}, {"test": meets, "steps": 8}, {"extra": True}],
    ids=["always", "few steps", "more in the loop"],
)
def test_others_stay(case):
    kernel = promoted(segments(**{"test": meets, **case}))
    assert guard_range(kernel) is kernel
