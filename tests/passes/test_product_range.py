"""Loops over the parts of a mask that have anything in them."""

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
from pallasite.passes.optimise.product_range import product_range
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.triton import harness
from tests.passes.normal.meaning import outputs

F32 = jnp.float32
STEPS, ROWS, PART, SLOTS, WIDTH = 4, 64, 8, 16, 32


def segments(guarded=True, adds_more=False, signs=False) -> Kernel:
    """Rows in parts, each multiplied by who belongs where."""

    def kernel(ids_ref, x_ref, o_ref):
        first = pl.program_id(0) * SLOTS

        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        def part(n, acc):
            rows = pl.ds(n * PART, PART)
            slot = first + lax.broadcasted_iota(jnp.int32, (PART, SLOTS), 1)
            hot = (ids_ref[rows, :] == slot).astype(F32)
            hot = hot * 2 - 1 if signs else hot
            dims = (((0,), (0,)), ((), ()))
            x = x_ref[rows, :]
            acc += lax.dot_general(hot, x, dims, precision="highest")
            return acc + x.sum() if adds_more else acc

        def add():
            o_ref[...] = lax.fori_loop(0, ROWS // PART, part, o_ref[...])

        ids = ids_ref[...]
        test = (ids.max() >= first) & (ids.min() < first + SLOTS)
        if guarded:
            pl.when(test)(add)
        else:
            add()

    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((2 * SLOTS, WIDTH), F32),
        grid=(2, STEPS),
        in_specs=[
            pl.BlockSpec((ROWS, 1), lambda i, j: (j, 0)),
            pl.BlockSpec((ROWS, WIDTH), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((SLOTS, WIDTH), lambda i, j: (i, 0)),
    )
    n = STEPS * ROWS
    shapes = [(n, 1), jnp.int32], [(n, WIDTH), F32]
    return run(kernels_in(call, *(jax.ShapeDtypeStruct(*s) for s in shapes))[0])


def promoted(kernel: Kernel) -> Kernel:
    return canonicalize(promote(canonicalize(place_windows(kernel))))


@pytest.mark.parametrize("ids", ["sorted", "any", "none"])
def test_range(ids: str):
    kernel = segments()
    before = promoted(kernel)
    after = product_range(before)
    verify(after)
    products = [
        op
        for op in walk(after.body)
        if op.name == "for" and "dot" in {o.name for o in op.regions[0].ops}
    ]
    (loop,), made = products, {v: op for op in walk(after.body) for v in op.results}
    assert [made[v].name for v in loop.operands[:2]] == ["clamp", "clamp"]
    rng, n = np.random.default_rng(0), STEPS * ROWS
    numbers = {
        "sorted": np.sort(rng.integers(0, 2 * SLOTS, n)),
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
    "case", [{"guarded": False}, {"adds_more": True}, {"signs": True}], ids=str
)
def test_others_stay(case):
    kernel = promoted(segments(**case))
    assert product_range(kernel) is kernel
