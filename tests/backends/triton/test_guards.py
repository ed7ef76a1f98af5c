"""Attention that leaves out blocks: no branch in its loop, on the way to the GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.nodes import Kernel
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.triton.harness import compiled, simulated
from tests.zoo import all_cases, attention
from tests.zoo.test_zoo import arguments

GUARDED = {
    "flash_scratch_causal",
    "sliding_window",
    "ragged_lengths",
    "paged_decode",
}


@pytest.mark.parametrize("name", sorted(GUARDED))
def test_guarded_steps_are_bounds(name: str):
    """Each loop ends where the guard says, and asks nothing."""
    (case,) = [case for case in all_cases() if case.name == name]
    function = lambda *args: case.run(*args, interpret=False)
    (kernel,) = kernels_in(function, *arguments(case, 0))
    assert_bounded(run(kernel))


def assert_bounded(kernel: Kernel) -> None:
    """One loop, whose end is computed, without a branch, in base two."""
    ttir, _ = compiled(kernel)
    assert "scf.if" not in ttir
    loops = re.findall(r"scf\.for \S+ = (\S+) to (\S+) step", ttir)
    ((_, limit),) = loops
    assert not re.fullmatch(r"%c\d+\S*", limit), loops
    assert "__nv_exp2f" in ttir and "__nv_expf" not in ttir


def test_index_map_that_repeats_the_guard():
    """Blocks beyond the diagonal are not fetched anyway, by the author's hand."""
    block = 16

    def call(q, k, v):
        heads, length, width = q.shape
        query = pl.BlockSpec((None, block, width), lambda h, i, j: (h, i, 0))
        key = pl.BlockSpec(
            (None, block, width), lambda h, i, j: (h, jnp.minimum(j, i), 0)
        )
        return pl.pallas_call(
            functools.partial(attention.flash_scratch_kernel, is_causal=True),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=(heads, length // block, length // block),
            in_specs=[query, key, key],
            out_specs=query,
            scratch_shapes=attention.softmax_scratch(block, width),
        )(q, k, v)

    check_causal(call)


def test_guard_in_a_loop_of_the_kernel():
    """The keys come in a fori_loop over all blocks; a guard leaves some out."""
    block = 16

    def kernel(q_ref, k_ref, v_ref, o_ref, *state_refs):
        attention.write_state(state_refs, attention.empty_state(*q_ref.shape))
        start = pl.program_id(1) * block

        def body(j, _):
            @pl.when(j * block <= start + block - 1)
            def step():
                strip = pl.ds(j * block, block)
                scores = attention.score(q_ref[...], k_ref[strip, :])
                rows = attention.positions(scores.shape, 0, start)
                columns = attention.positions(scores.shape, 1, j * block)
                scores = jnp.where(rows >= columns, scores, attention.MASKED)
                state = attention.read_state(state_refs)
                state = attention.absorb(state, scores, v_ref[strip, :])
                attention.write_state(state_refs, state)

        jax.lax.fori_loop(0, k_ref.shape[0] // block, body, None)
        _, total, out = attention.read_state(state_refs)
        o_ref[...] = out / total

    def call(q, k, v):
        heads, length, width = q.shape
        query = pl.BlockSpec((None, block, width), lambda h, i: (h, i, 0))
        keys = pl.BlockSpec((None, length, width), lambda h, i: (h, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=(heads, length // block),
            in_specs=[query, keys, keys],
            out_specs=query,
            scratch_shapes=attention.softmax_scratch(block, width),
        )(q, k, v)

    check_causal(call)


def check_causal(call) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 64, 16)).astype(np.float32) for _ in "qkv"]
    (kernel,) = kernels_in(call, *arrays)
    kernel = run(kernel)
    assert_bounded(kernel)
    q, k, v = map(jnp.asarray, arrays)
    want = attention.plain_attention(q, k, v, attention.causal(64, 64))
    (got,) = simulated(kernel, arrays)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
