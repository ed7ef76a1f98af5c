"""Which memory of a GPU program needs fences: `passes/analysis/fences.py`."""

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite.backends import base
from pallasite.passes.analysis.fences import fenced
from pallasite.passes.analysis.memory import accesses_of

f32 = jnp.float32


def copy_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def overlapping(x):
    """Each step writes two rows, of which the next writes one again."""
    rows = lambda: pl.BlockSpec((pl.Element(2), 64), lambda i: (i, 0))
    return pl.pallas_call(
        copy_kernel,
        out_shape=jax.ShapeDtypeStruct((8, 64), f32),
        grid=(7,),
        in_specs=[rows()],
        out_specs=rows(),
    )(x)


def loop_of(start):
    """Rows stored by a loop, from where `start` says."""

    def kernel(x_ref, o_ref):
        @pl.loop(0, 4)
        def _(i):
            o_ref[pl.ds(start(i), 2), :] = x_ref[pl.ds(2 * i, 2), :]

    out = jax.ShapeDtypeStruct((8, 64), f32)
    return lambda x: pl.pallas_call(kernel, out_shape=out)(x)


def parts(first, second, looped=False):
    """Two parts of a block, stored by a program one after the other."""

    def kernel(x_ref, o_ref):
        x = x_ref[...]

        def store(_):
            o_ref[first : first + 4, :] = x[:4] * 2
            o_ref[second : second + 4, :] = x[4:].sum(axis=0, keepdims=True) + x[4:]

        if looped:
            pl.loop(0, 3)(store)
        else:
            store(0)

    out = jax.ShapeDtypeStruct((8, 64), f32)
    return lambda x: pl.pallas_call(kernel, out_shape=out)(x)


CASES = {
    "parts that are apart": (parts(4, 0), False),
    "parts that overlap": (parts(0, 2), True),
    "parts in a loop": (parts(0, 4, looped=True), True),
    "blocks that overlap": (overlapping, True),
    "rows of their own": (loop_of(lambda i: 2 * i), False),
    "rows that overlap": (loop_of(lambda i: i), True),
    "the same rows": (loop_of(lambda i: 3), False),
    "rows that end up past the end": (loop_of(lambda i: 4 * i), True),
    "rows by another function": (loop_of(lambda i: 2 * (i % 3)), True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_writes_of_several_steps_to_one_element_are_fenced(name: str, backend: str):
    run, wanted = CASES[name]
    (kernel,) = pl.lower(run)(jax.ShapeDtypeStruct((8, 64), f32)).kernels
    compiled = base.Compiled(base.get(backend), kernel, base.Options())
    scheduled = compiled.scheduled
    found = fenced(scheduled, accesses_of(scheduled))
    assert (scheduled.outputs[0] in found) == wanted
    text = compiled["cuda" if backend == "cuda" else "ttir"]
    barrier = "__syncthreads" if backend == "cuda" else "gpu.barrier"
    assert (barrier in text) == wanted
