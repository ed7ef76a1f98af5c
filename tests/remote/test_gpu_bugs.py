"""Seeded bugs of GPU kernels that access each other's memory: each is found and shown.

Each function makes one kernel of (number, x, o, scratch...), with the bug (its line is
marked) or without; devices are numbered, so that it needs no mesh.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite import tpu as pltpu
from pallasite.errors import CheckError, KernelTypeError
from pallasite.interpret.checked import run_devices
from pallasite.sites import kernels_in

DEVICES, SHAPE = 4, (2, 8, 32)
S, F32 = jax.ShapeDtypeStruct, jnp.float32
LOGICAL = pltpu.DeviceIdType.LOGICAL
REGULAR = plgpu.SemaphoreType.REGULAR
SLOT = plgpu.SMEM(SHAPE[1:], F32)
BUGS: list[Any] = []


def bug(kind: str, says: str, *scratch: Any, blocks: int = 1):
    def register(make):
        lines, first = inspect.getsourcelines(make)
        marked = [first + n for n, text in enumerate(lines) if "# BUG" in text]
        BUGS.append((make, kind, says, scratch, blocks, marked))
        return make

    return register


def run(kernel, scratch, blocks, options=None):
    grid: Any = dict(grid=(blocks,), grid_names=("block",))
    call = plgpu.kernel(kernel, out_shape=S(SHAPE, F32), scratch_shapes=scratch, **grid)
    (found,) = kernels_in(call, S((1,), jnp.int32), S(SHAPE, F32))
    arrays = [
        [np.array([n], np.int32), np.full(SHAPE, n, np.float32)] for n in range(DEVICES)
    ]
    names = [f"device {n}" for n in range(DEVICES)]
    return run_devices(found, arrays, names, options or pl.Checked())


def after(me, by=1):
    return lax.rem(me + by, DEVICES)


def at(ref, device):
    return plgpu.remote_ref(ref, device, LOGICAL)


def signal(semaphore, device, amount=1):
    pl.semaphore_signal(semaphore, amount, device_id=device, device_id_type=LOGICAL)


def leave(done, me):
    """Wait until every device is done with the memory of this one."""
    for by in range(DEVICES):
        signal(done, after(me, by))
    pl.semaphore_wait(done, DEVICES)


@bug("races", "data race: a program", REGULAR)
def what_was_stored_is_not_waited_for(fixed):
    def kernel(n, x, o, come):
        me = n[0]
        at(o, after(me))[0] = x[0]
        signal(come, after(me))
        if fixed:
            pl.semaphore_wait(come)
        o[1] = o[0]  # BUG
        if not fixed:
            pl.semaphore_wait(come)

    return kernel


@bug("races", "data race: a program", REGULAR)
def the_signal_precedes_the_store(fixed):
    def kernel(n, x, o, come):
        me = n[0]
        if not fixed:
            signal(come, after(me))
        at(o, after(me))[0] = x[0]
        if fixed:
            signal(come, after(me))
        pl.semaphore_wait(come)
        o[1] = o[0]

    return kernel


@bug("races", "data race: a program", REGULAR)
def one_of_two_neighbours_is_waited_for(fixed):
    def kernel(n, x, o, come):
        me = n[0]
        for by in (1, DEVICES - 1):
            at(o, after(me, by))[by // 2] = x[0]
            signal(come, after(me, by))
        pl.semaphore_wait(come, 2 if fixed else 1)
        o[...] = o[...] + 1
        if not fixed:
            pl.semaphore_wait(come)

    return kernel


@bug("races", "data race: a program", REGULAR, REGULAR)
def a_slot_is_overwritten_before_it_is_read(fixed):
    def kernel(n, x, o, come, free):
        me = n[0]
        for step in range(2):
            if fixed and step:
                pl.semaphore_wait(free)
            at(o, after(me))[0] = x[step]
            signal(come, after(me))
            pl.semaphore_wait(come)
            o[1] = o[0]
            if fixed and not step:
                signal(free, after(me, DEVICES - 1))

    return kernel


@bug("copies", "a wait for a semaphore that nothing signals", REGULAR)
def one_device_signals_nobody(fixed):
    def kernel(n, x, o, come):
        me = n[0]
        o[...] = x[...]
        pl.when(jnp.bool_(fixed) | (me > 0))(lambda: signal(come, after(me)))
        pl.semaphore_wait(come)  # BUG

    return kernel


@bug("copies", "deadlock: everything that runs is waiting", REGULAR)
def everyone_waits_before_it_signals(fixed):
    def kernel(n, x, o, come):
        me = n[0]
        o[...] = x[...]
        if fixed:
            signal(come, after(me))
        pl.semaphore_wait(come)  # BUG
        if not fixed:
            signal(come, after(me))

    return kernel


@bug("races", "data race: a program", SLOT, REGULAR)
def a_copy_is_only_read_when_its_arrival_is_signalled(fixed):
    def kernel(n, x, o, slot, come):
        me = n[0]
        slot[...] = x[0]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, at(o, after(me)).at[0])
        plgpu.wait_smem_to_gmem(0, wait_read_only=not fixed)
        signal(come, after(me))
        pl.semaphore_wait(come)
        o[1] = o[0]
        plgpu.wait_smem_to_gmem(0)

    return kernel


@bug("copies", "memory of a device that has finished the kernel", REGULAR)
def a_device_leaves_while_others_read_it(fixed):
    def kernel(n, x, o, done):
        me, total = n[0], jnp.zeros(SHAPE, F32)
        for by in range(DEVICES):
            total += at(x, after(me, by))[...]  # BUG
        o[...] = total
        if fixed:
            leave(done, me)

    return kernel


@bug("copies", "a ref of a device that does not exist", REGULAR)
def the_last_device_has_no_neighbour(fixed):
    def kernel(n, x, o, done):
        me = n[0]
        there = at(x, after(me) if fixed else me + 1)
        o[...] = there[...]  # BUG
        leave(done, me)

    return kernel


@bug("races", "data race: a program writes an element that a concurrent", REGULAR)
def two_devices_store_to_one_place(fixed):
    def kernel(n, x, o, done):
        me = n[0]
        there = at(o, me // 2)
        row = lax.rem(me, 2) if fixed else 0
        there[row] = x[0]
        leave(done, me)

        @pl.when(me >= 2)
        def _():
            o[...] = x[...]

        if not fixed:

            @pl.when(me < 2)
            def _():
                o[1] = x[1]

    return kernel


@bug("copies", "deadlock: everything that runs is waiting", REGULAR, blocks=2)
def blocks_do_not_share_their_own_semaphores(fixed):
    def kernel(n, x, o, come):
        me, block = n[0], lax.axis_index("block")
        at(o, after(me))[block] = x[block]
        pl.when(jnp.bool_(fixed) | (block == 0))(lambda: signal(come, after(me)))
        pl.semaphore_wait(come)  # BUG

    return kernel


@bug("copies", "a device that does not exist", REGULAR)
def a_signal_goes_past_the_last_device(fixed):
    def kernel(n, x, o, come):
        me = n[0]
        o[...] = x[...]
        to: Any = dict(device_id=after(me) if fixed else me + 1, device_id_type=LOGICAL)
        pl.semaphore_signal(come, **to)  # BUG
        pl.semaphore_wait(come)

    return kernel


def name(seeded):
    return seeded[0].__name__


@pytest.mark.parametrize("seeded", BUGS, ids=name)
def test_a_seeded_bug_is_found(seeded):
    make, kind, says, scratch, blocks, marked = seeded
    with pytest.raises(CheckError) as raised:
        run(make(False), scratch, blocks)
    text = str(raised.value)
    assert (raised.value.kind, says in text) == (kind, True), text
    assert all(f"test_gpu_bugs.py:{line} " in text for line in marked), text


@pytest.mark.parametrize("seeded", BUGS, ids=name)
def test_the_kernel_without_the_bug_is_clean(seeded):
    make, _, _, scratch, blocks, _ = seeded
    run(make(True), scratch, blocks)


def test_there_are_ten_bugs_or_more():
    assert len(BUGS) >= 10


def test_a_race_names_both_devices():
    make, _, _, scratch, blocks, _ = BUGS[0]
    with pytest.raises(CheckError) as raised:
        run(make(False), scratch, blocks, pl.Checked(orders=("early",)))
    text = str(raised.value)
    assert "o (output), f32[2,8,32]" in text
    assert "other device     device 0" in text and "device           device 1" in text


def test_shared_memory_is_not_that_of_other_devices():
    def kernel(n, x, o, slot):
        at(slot, after(n[0]))[...] = x[0]
        o[...] = x[...]

    with pytest.raises(KernelTypeError, match="other devices reach main memory"):
        run(kernel, [SLOT], 1)
