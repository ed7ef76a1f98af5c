"""Legal but tricky kernels: checked mode reports nothing, alone and under vmap."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu

F32 = jnp.float32


@dataclass(frozen=True)
class Clean:
    """A kernel without bugs: `run(mode, *args)` agrees with `reference(*args)`."""

    name: str
    run: Callable[..., Any]
    reference: Callable[..., Any]
    args: tuple

    def __repr__(self) -> str:
        return self.name


CLEAN: list[Clean] = []


def clean(reference: Callable[..., Any], *args: Any) -> Callable:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        CLEAN.append(Clean(function.__name__, function, reference, args))
        return function

    return register


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def rows(size):
    return pl.BlockSpec((size,), lambda i: (i,))


def parallel(*names):
    return pltpu.CompilerParams(dimension_semantics=names)


def random(*dims, seed=0):
    return np.random.default_rng(seed).normal(size=dims).astype(np.float32)


ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
DMA = pltpu.SemaphoreType.DMA
POSITION = lambda block: pl.program_id(0) * block + lax.iota(jnp.int32, block)


# --- edges ---


@clean(lambda x: 2 * x + 1, random(30))
def overhang_is_loaded_and_dropped(mode, x):
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...] + 1

    return pl.pallas_call(
        kernel, shape(30), grid=(4,), in_specs=[rows(8)], out_specs=rows(8), **mode
    )(x)


@clean(lambda x: jnp.sum(x, keepdims=True), random(30))
def overhang_is_masked_before_the_sum(mode, x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        inside = POSITION(8) < 30
        o_ref[...] += jnp.sum(x_ref[...], where=inside, keepdims=True)

    whole = pl.BlockSpec((1,), lambda i: (0,))
    return pl.pallas_call(
        kernel, shape(1), grid=(4,), in_specs=[rows(8)], out_specs=whole, **mode
    )(x)


@clean(lambda x: jnp.max(x, keepdims=True), random(30))
def overhang_has_a_fill(mode, x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.full_like(o_ref, -jnp.inf)

        pairs = x_ref.reshape(4, 2)[...]
        o_ref[...] = jnp.maximum(o_ref[...], jnp.max(pairs))

    filled = pl.BlockSpec((8,), lambda i: (i,), fill=-jnp.inf)
    whole = pl.BlockSpec((1,), lambda i: (0,))
    return pl.pallas_call(
        kernel, shape(1), grid=(4,), in_specs=[filled], out_specs=whole, **mode
    )(x)


@clean(lambda x: x + 1, random(30))
def overhang_is_written_through_a_reshaped_ref(mode, x):
    def kernel(x_ref, o_ref):
        x_ref.reshape(4, 2)[...] = x_ref.reshape(4, 2)[...] + 1
        o_ref[...] = x_ref[...]

    return pl.pallas_call(
        kernel, shape(30), grid=(4,), in_specs=[rows(8)], out_specs=rows(8), **mode
    )(x)


@clean(lambda x: jnp.where(x > 0, x, 0).sum(keepdims=True), random(30))
def overhang_decides_only_with_its_mask(mode, x):
    """A branch on a reduced mask, where the undefined part is masked off."""

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        x = x_ref[...]
        positive = (POSITION(8) < 30) & (x > 0)

        @pl.when(jnp.any(positive))
        def _():
            o_ref[...] += jnp.where(positive, x, 0.0).sum(keepdims=True)

    whole = pl.BlockSpec((1,), lambda i: (0,))
    return pl.pallas_call(
        kernel, shape(1), grid=(4,), in_specs=[rows(8)], out_specs=whole, **mode
    )(x)


def masked_matmul_reference(x, y):
    return jnp.dot(x, y, precision="highest")


@clean(masked_matmul_reference, random(10, 13), random(13, 9, seed=1))
def product_with_overhang_everywhere(mode, x, y):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        depth = pl.program_id(2) * 4 + lax.broadcasted_iota(jnp.int32, (4, 4), 1)
        x = jnp.where(depth < 13, x_ref[...], 0.0)
        y = jnp.where(depth.T < 13, y_ref[...], 0.0)
        o_ref[...] += jnp.dot(x, y, preferred_element_type=F32)

    return pl.pallas_call(
        kernel,
        shape(10, 9),
        grid=(3, 3, 4),
        in_specs=[
            pl.BlockSpec((4, 4), lambda i, j, k: (i, k)),
            pl.BlockSpec((4, 4), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((4, 4), lambda i, j, k: (i, j)),
        compiler_params=parallel("parallel", "parallel", "arbitrary"),
        **mode,
    )(x, y)


@clean(lambda ids, table: table[ids], np.arange(10, dtype=np.int32) % 5, random(5, 8))
def overhanging_indices_gather_rows_nobody_keeps(mode, ids, table):
    def kernel(ids_ref, table_ref, o_ref):
        o_ref[...] = table_ref[ids_ref[...], :]

    return pl.pallas_call(
        kernel,
        shape(10, 8),
        grid=(3,),
        in_specs=[rows(4), pl.BlockSpec((5, 8), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((4, 8), lambda i: (i, 0)),
        **mode,
    )(ids, table)


@clean(lambda x: jnp.pad(x, 1)[:-2] + jnp.pad(x, 1)[2:], random(32))
def halo_reaches_into_padding(mode, x):
    def kernel(x_ref, o_ref):
        here = pl.program_id(0) * 8 + lax.iota(jnp.int32, 8)
        left = jnp.where(here > 0, x_ref[0:8], 0.0)
        right = jnp.where(here < 31, x_ref[2:10], 0.0)
        o_ref[...] = left + right

    halo = pl.BlockSpec((pl.Element(10, (1, 1)),), lambda i: (i * 8,))
    return pl.pallas_call(
        kernel, shape(32), grid=(4,), in_specs=[halo], out_specs=rows(8), **mode
    )(x)


# --- masks ---


@clean(lambda x: jnp.where(np.arange(30) % 3 == 0, x, 0.0), random(30))
def masked_load_without_other_is_selected_away(mode, x):
    def kernel(x_ref, o_ref):
        here = POSITION(8)
        keep = (here < 30) & (here % 3 == 0)
        x = pl.load(x_ref, (here,), mask=keep)
        pl.store(o_ref, (here,), jnp.where(keep, x, 0.0), mask=here < 30)

    return pl.pallas_call(kernel, shape(30), grid=(4,), **mode)(x)


@clean(lambda x: jnp.flip(x), random(30))
def masked_slices_reach_past_the_end(mode, x):
    def kernel(x_ref, o_ref):
        first = pl.program_id(0) * 8
        inside = first + lax.iota(jnp.int32, 8) < 30
        x = pl.load(x_ref, (pl.ds(first, 8),), mask=inside)
        pl.store(o_ref, (29 - first - lax.iota(jnp.int32, 8),), x, mask=inside)

    return pl.pallas_call(kernel, shape(30), grid=(4,), **mode)(x)


# --- scratch and outputs carried between programs ---


@clean(lambda x: jnp.cumsum(x), random(32))
def scratch_carries_along_a_sequential_axis(mode, x):
    def kernel(x_ref, o_ref, carry_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            carry_ref[0] = 0.0

        total = jnp.cumsum(x_ref[...]) + carry_ref[0]
        o_ref[...] = total
        carry_ref[0] = total[-1]

    return pl.pallas_call(
        kernel,
        shape(32),
        grid=(4,),
        in_specs=[rows(8)],
        out_specs=rows(8),
        scratch_shapes=[pltpu.SMEM((1,), F32)],
        **mode,
    )(x)


@clean(lambda x: x.sum(axis=1), random(4, 32))
def scratch_belongs_to_each_parallel_program(mode, x):
    def kernel(x_ref, o_ref, acc_ref):
        step = pl.program_id(1)
        before = jnp.where(step == 0, 0.0, acc_ref[...])  # the old value is not used
        acc_ref[...] = before + x_ref[...]

        @pl.when(step == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = acc_ref[...].sum().reshape(1)

    return pl.pallas_call(
        kernel,
        shape(4),
        grid=(4, 4),
        in_specs=[pl.BlockSpec((1, 8), lambda i, k: (i, k))],
        out_specs=pl.BlockSpec((1,), lambda i, k: (i,)),
        scratch_shapes=[pltpu.VMEM((1, 8), F32)],
        compiler_params=parallel("parallel", "arbitrary"),
        **mode,
    )(x)


def attention_reference(q, k, v):
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


@clean(attention_reference, random(8, 4), random(22, 4, seed=1), random(22, 4, seed=2))
def online_softmax_with_minus_infinity(mode, q, k, v):
    def kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        where = step * 8 + lax.broadcasted_iota(jnp.int32, (1, 8), 1)
        s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=F32)
        s = jnp.where(where < 22, s, -jnp.inf)
        m = jnp.maximum(m_ref[...], s.max(axis=1, keepdims=True))
        p, scale = jnp.exp(s - m), jnp.exp(m_ref[...] - m)
        v = jnp.where(where.T < 22, v_ref[...], 0.0)
        m_ref[...] = m
        l_ref[...] = l_ref[...] * scale + p.sum(axis=1, keepdims=True)
        acc_ref[...] = acc_ref[...] * scale + jnp.dot(p, v)

        @pl.when(step == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = acc_ref[...] / l_ref[...]

    queries = pl.BlockSpec((4, 4), lambda i, j: (i, 0))
    keys = pl.BlockSpec((8, 4), lambda i, j: (j, 0))
    column = pltpu.VMEM((4, 1), F32)
    return pl.pallas_call(
        kernel,
        shape(8, 4),
        grid=(2, 3),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        scratch_shapes=[column, column, pltpu.VMEM((4, 4), F32)],
        compiler_params=parallel("parallel", "arbitrary"),
        **mode,
    )(q, k, v)


@clean(lambda x: jnp.stack([x[::2], x[1::2]], 1).reshape(-1) * 3, random(32))
def output_is_revisited_and_completed_in_parts(mode, x):
    """Each block gets its even elements in one program, its odd ones in the next."""

    def kernel(x_ref, o_ref):
        place = lax.iota(jnp.int32, 8)
        mine = place % 2 == pl.program_id(1)
        o_ref[...] = jnp.where(mine, 3 * x_ref[...], o_ref[...])

    block = pl.BlockSpec((8,), lambda i, j: (i,))
    return pl.pallas_call(
        kernel, shape(32), grid=(4, 2), in_specs=[block], out_specs=block, **mode
    )(x)


# --- one memory, several refs ---


@clean(lambda x: jnp.asarray(x).at[8:24].multiply(2.0), random(32))
def alias_updates_some_blocks_in_place(mode, x):
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    block = pl.BlockSpec((8,), lambda i: (i + 1,))
    return pl.pallas_call(
        kernel,
        shape(32),
        grid=(2,),
        in_specs=[block],
        out_specs=block,
        input_output_aliases={0: 0},
        compiler_params=parallel("parallel"),
        **mode,
    )(x)


BINS = np.random.default_rng(3).integers(0, 5, 32).astype(np.int32)


@clean(
    lambda x, zeros: zeros + jnp.sum(x[:, None] == jnp.arange(5), 0),
    BINS,
    np.zeros(5, np.int32),
)
def atomics_meet_on_a_parallel_axis(mode, x, zeros):
    def kernel(x_ref, zeros_ref, o_ref):
        bins = x_ref[...]
        pl.atomic_add(o_ref, (bins,), jnp.ones_like(bins))

    return pl.pallas_call(
        kernel,
        shape(5, dtype=jnp.int32),
        grid=(4,),
        in_specs=[rows(8), ANYWHERE],
        out_specs=ANYWHERE,
        input_output_aliases={1: 0},
        compiler_params=parallel("parallel"),
        **mode,
    )(x, zeros)


@clean(lambda x: x.reshape(4, 2, 4)[::-1, ::-1].reshape(32), random(32))
def parallel_programs_write_parts_of_a_reshaped_ref(mode, x):
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        cells = o_ref.reshape(4, 2, 4)
        for half in range(2):
            cells[3 - i, 1 - half] = x_ref.reshape(4, 2, 4)[i, half]

    return pl.pallas_call(
        kernel,
        shape(32),
        grid=(4,),
        in_specs=[ANYWHERE],
        out_specs=ANYWHERE,
        compiler_params=parallel("parallel"),
        **mode,
    )(x)


# --- copies ---


@clean(lambda x: x * x, random(5, 8))
def copies_are_double_buffered(mode, x):
    def kernel(x_ref, o_ref, buffer_ref, semaphores):
        def fetch(n, slot):
            into = buffer_ref.reshape(2, 8).at[slot]
            return pltpu.make_async_copy(x_ref.at[n], into, semaphores.at[slot])

        fetch(0, 0).start()

        def body(n, carry):
            slot = lax.rem(n, 2)

            @pl.when(n + 1 < 5)
            def _():
                fetch(n + 1, 1 - slot).start()

            fetch(n, slot).wait()
            o_ref[n] = buffer_ref[pl.ds(slot * 8, 8)] ** 2
            return carry

        lax.fori_loop(0, 5, body, 0)

    return pl.pallas_call(
        kernel,
        shape(5, 8),
        in_specs=[ANYWHERE],
        scratch_shapes=[pltpu.VMEM((16,), F32), DMA((2,))],
        **mode,
    )(x)


@clean(lambda x: x + 1, random(32))
def copies_are_started_one_program_ahead(mode, x):
    def kernel(x_ref, o_ref, buffer_ref, semaphores):
        i, slot = pl.program_id(0), lax.rem(pl.program_id(0), 2)

        def fetch(n, slot):
            source = x_ref.at[pl.ds(n * 8, 8)]
            return pltpu.make_async_copy(
                source, buffer_ref.at[slot], semaphores.at[slot]
            )

        @pl.when(i == 0)
        def _():
            fetch(0, 0).start()

        @pl.when(i + 1 < pl.num_programs(0))
        def _():
            fetch(i + 1, 1 - slot).start()

        fetch(i, slot).wait()
        o_ref[...] = buffer_ref[slot] + 1

    return pl.pallas_call(
        kernel,
        shape(32),
        grid=(4,),
        in_specs=[ANYWHERE],
        out_specs=rows(8),
        scratch_shapes=[pltpu.VMEM((2, 8), F32), DMA((2,))],
        **mode,
    )(x)


@clean(lambda x: x[:6], np.arange(8.0, dtype=np.float32))
def scalars_stored_past_the_edge(mode, x):
    def kernel(x_ref, o_ref):
        for n in range(4):
            o_ref[n] = x_ref[n]

    return pl.pallas_call(
        kernel,
        out_shape=shape(6),
        grid=2,
        in_specs=[rows(4)],
        out_specs=rows(4),
        **mode,
    )(x)


# --- the tests ---

each_kernel = pytest.mark.parametrize("case", CLEAN, ids=repr)


def assert_agrees(got, want):
    for actual, expected in zip(
        jax.tree.leaves(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@each_kernel
def test_nothing_is_reported(case: Clean):
    got = case.run({"interpret": pl.Checked()}, *case.args)
    assert_agrees(got, case.reference(*case.args))


@each_kernel
def test_nothing_is_reported_under_vmap(case: Clean):
    batch = [np.stack([a, np.flip(a, 0)]) for a in case.args]
    got = jax.vmap(lambda *args: case.run({"interpret": pl.Checked()}, *args))(*batch)
    assert_agrees(got, jax.vmap(case.reference)(*batch))


@each_kernel
def test_emulation_agrees(case: Clean):
    got = jax.jit(lambda *args: case.run({"interpret": True}, *args))(*case.args)
    assert_agrees(got, case.reference(*case.args))


def test_minus_infinity_masks_are_no_nan():
    softmax = next(c for c in CLEAN if c.name == "online_softmax_with_minus_infinity")
    softmax.run({"interpret": pl.Checked(nan=True)}, *softmax.args)


def test_enough_kernels():
    assert len(CLEAN) >= 15
