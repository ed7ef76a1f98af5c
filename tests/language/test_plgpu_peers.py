"""Shared memory and barriers of other thread blocks of a cluster; polled barriers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import CheckError, KernelTypeError, SpecError
from tests.xla import put

F32 = jnp.float32
PAIR = dict(cluster=(2,), cluster_names=("pair",))
BUFFER, BARRIER = plgpu.SMEM((8, 32), F32), plgpu.Barrier()


def operand(*shape):
    return put(np.random.default_rng(0).normal(size=shape), F32)


def run(kernel, x, scratch=(BUFFER, BARRIER), out=None, **options):
    call = plgpu.kernel(kernel, out or x, scratch_shapes=scratch, **PAIR, **options)
    return call(x)


def swap(store, wait=True):
    """Each block of a pair stores to the other's memory."""

    def kernel(x, o, mine, full):
        me = lax.axis_index("pair")
        there = {"pair": 1 - me}
        store(plgpu.cluster_ref(mine, there), x[me])
        plgpu.barrier_arrive(plgpu.cluster_ref(full, there))
        if wait:
            plgpu.barrier_wait(full)
        o[me] = mine[...]

    return kernel


def assign(ref, value):
    ref[...] = value


def test_a_block_stores_to_the_memory_of_another():
    x = operand(2, 8, 32)
    np.testing.assert_array_equal(run(swap(assign), x), x[::-1])


def test_a_block_reads_part_of_the_memory_of_another():
    def kernel(x, o, mine, full):
        me = lax.axis_index("pair")
        there = {"pair": 1 - me}
        mine[...] = x[me]
        plgpu.barrier_arrive(plgpu.cluster_ref(full, there))
        plgpu.barrier_wait(full)
        o[me] = plgpu.cluster_ref(mine.at[pl.ds(4, 4)], there)[:, 8:16]

    x = operand(2, 8, 32)
    got = run(kernel, x, out=jax.ShapeDtypeStruct((2, 4, 8), F32))
    np.testing.assert_array_equal(got, x[::-1, 4:, 8:16])


def test_a_store_that_is_not_waited_for_is_a_race():
    x = operand(2, 8, 32)
    with pytest.raises(CheckError, match="data race") as raised:
        run(swap(assign, wait=False), x)
    assert raised.value.kind == "races"


def test_a_store_after_the_arrival_is_a_race():
    def kernel(x, o, mine, full):
        me = lax.axis_index("pair")
        mine[...] = x[me]
        there = {"pair": 1 - me}
        plgpu.barrier_arrive(plgpu.cluster_ref(full, there))
        plgpu.cluster_ref(mine, there)[...] = x[me]
        plgpu.barrier_wait(full)
        o[me] = mine[...]

    x = operand(2, 8, 32)
    with pytest.raises(CheckError, match="data race") as raised:
        run(kernel, x)
    assert raised.value.kind == "races"


def test_only_the_own_barrier_is_waited_for():
    def kernel(x, o, mine, full):
        me = lax.axis_index("pair")
        plgpu.barrier_arrive(full)
        plgpu.barrier_wait(plgpu.cluster_ref(full, {"pair": 1 - me}))
        o[me] = x[me]

    with pytest.raises(KernelTypeError, match="wait for its own barriers only"):
        run(kernel, operand(2, 8, 32))


@pytest.mark.parametrize(
    "ref, axis, error, says",
    [
        ("o", "pair", KernelTypeError, "shared memory and barriers only"),
        ("mine", "pairs", KernelTypeError, "'pairs' is not an axis of the cluster"),
    ],
)
def test_what_a_cluster_does_not_share_is_refused(ref, axis, error, says):
    def kernel(x, o, mine, full):
        there = plgpu.cluster_ref(dict(o=o, mine=mine)[ref], {axis: 0})
        there[...] = jnp.zeros(there.shape, F32)

    with pytest.raises(error, match=says):
        run(kernel, operand(2, 8, 32))


def test_a_block_outside_the_cluster_is_reported():
    def kernel(x, o, mine, full):
        me = lax.axis_index("pair")
        plgpu.cluster_ref(mine, {"pair": me + 1})[...] = x[me]
        o[me] = x[me]

    with pytest.raises(CheckError, match="not in the cluster"):
        run(kernel, operand(2, 8, 32))


# --- async stores ---


def exchange(arrivals=1, atomic=None, wait=True):
    def kernel(x, o, mine, full, there_is=None):
        me = lax.axis_index("pair")
        if atomic:
            mine[...] = x[me]
            plgpu.barrier_arrive(plgpu.cluster_ref(there_is, {"pair": 1 - me}))
            plgpu.barrier_wait(there_is)
        for _ in range(arrivals):
            there: Any = dict(cluster_idx=1 - me, cluster_dim="pair", atomic=atomic)
            plgpu.async_store_smem(x[me] * 2, mine, full, **there)
        if wait:
            plgpu.barrier_wait(full)
        o[me] = mine[...]

    return kernel


def test_an_async_store_arrives_at_the_barrier_there():
    x = operand(2, 8, 32)
    np.testing.assert_array_equal(run(exchange(), x), 2 * x[::-1])


@pytest.mark.parametrize(
    "atomic, want",
    [("add", lambda a, b: a + 2 * b), ("max", lambda a, b: jnp.maximum(a, 2 * b))],
)
def test_an_async_store_combines(atomic, want):
    x, scratch = operand(2, 8, 32), (BUFFER, BARRIER, BARRIER)
    got = run(exchange(atomic=atomic), x, scratch)
    np.testing.assert_allclose(got, want(x, x[::-1]))


def test_an_async_store_is_waited_for():
    with pytest.raises(CheckError) as raised:
        run(exchange(wait=False), operand(2, 8, 32))
    assert raised.value.kind == "races"


def test_two_async_stores_to_one_place_race():
    with pytest.raises(CheckError, match="data race: a program writes"):
        run(exchange(arrivals=2), operand(2, 8, 32))


def test_an_async_store_matches_its_memory():
    def kernel(x, o, mine, full):
        there: Any = dict(cluster_idx=0, cluster_dim="pair")
        plgpu.async_store_smem(x[0, :4], mine, full, **there)

    with pytest.raises(KernelTypeError, match="have different types"):
        run(kernel, operand(2, 8, 32))


def test_an_unknown_atomic_is_refused():
    with pytest.raises(SpecError, match="no atomic 'mean'"):
        run(exchange(atomic="mean"), operand(2, 8, 32), (BUFFER, BARRIER, BARRIER))


# --- polled barriers ---


def polled(arrives=True):
    def kernel(x, o, buffer, full):
        group = lax.axis_index("group")

        @pl.when((group == 0) & arrives)
        def _():
            plgpu.copy_gmem_to_smem(x, buffer, full)

        @pl.when(group == 1)
        def _():
            poll = lambda n: lax.cond(
                plgpu.barrier_test(full), lambda: jnp.int32(-1), lambda: n + 1
            )
            lax.while_loop(lambda n: (n >= 0) & (n < 99), poll, jnp.int32(0))
            o[...] = buffer[...]

    return kernel


def run_polled(kernel, x):
    groups: Any = dict(num_threads=2, thread_name="group")
    return plgpu.kernel(kernel, x, scratch_shapes=[BUFFER, BARRIER], **groups)(x)


def test_a_barrier_is_polled_until_its_phase_is_over():
    x = operand(8, 32)
    np.testing.assert_array_equal(run_polled(polled(), x), x)


def test_a_test_that_fails_is_no_wait():
    def kernel(x, o, buffer, full):
        group = lax.axis_index("group")

        @pl.when(group == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, buffer, full)

        @pl.when(group == 1)
        def _():
            plgpu.barrier_test(full)
            o[...] = buffer[...]

    with pytest.raises(CheckError) as raised:
        run_polled(kernel, operand(8, 32))
    assert raised.value.kind in ("copies", "races", "uninitialised")


def test_each_true_test_is_the_wait_for_one_phase():
    def kernel(o, full):
        found = []
        for _ in range(2):
            plgpu.barrier_arrive(full)
            found.append(plgpu.barrier_test(full))
        found.append(plgpu.barrier_test(full))
        for n, is_over in enumerate(found):
            o[n] = is_over.astype(jnp.int32)

    out = jax.ShapeDtypeStruct((3,), jnp.int32)
    got = plgpu.kernel(kernel, out, scratch_shapes=[BARRIER])()
    np.testing.assert_array_equal(got, [1, 1, 0])


# --- memory that all warpgroups allocate again ---


def again(x, o):
    """A store of one warpgroup reads what the other's next copy would overwrite."""
    group = lax.axis_index("group")

    @pl.loop(0, 3)
    def _(step):
        def inner(buffer, full):
            @pl.when(group == 0)
            def _():
                plgpu.copy_gmem_to_smem(x.at[step], buffer, full)

            @pl.when(group == 1)
            def _():
                plgpu.barrier_wait(full)
                plgpu.copy_smem_to_gmem(buffer, o.at[step])
                plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(inner, BUFFER, BARRIER, collective_axes="group")


def test_memory_is_allocated_again_when_all_are_done_with_it():
    x = operand(3, 8, 32)
    groups: Any = dict(num_threads=2, thread_name="group")
    np.testing.assert_array_equal(plgpu.kernel(again, x, **groups)(x), x)
