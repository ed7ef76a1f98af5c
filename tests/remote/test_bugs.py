"""Seeded bugs of kernels on several devices: each is found, named and shown.

Each function makes one kernel, with the bug (its line is marked) or without. The kernel
is given its device's number, so that it needs no mesh and the evaluator runs it itself.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import CheckError
from pallasite.interpret.checked import run_devices
from pallasite.sites import kernels_in
from tests.remote import collectives
from tests.remote.collectives import over_mesh

DEVICES, ROWS = 4, 2
S, F32 = jax.ShapeDtypeStruct, jnp.float32
DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
LOGICAL = pltpu.DeviceIdType.LOGICAL
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
VMEM = pltpu.VMEM((ROWS, 8), F32)
SLOTS = pltpu.VMEM((2, ROWS, 8), F32)
MARK = "# BUG"


@dataclass(frozen=True)
class Bug:
    make: Callable[[bool], Callable[..., None]]
    kind: str
    says: str
    scratch: Sequence[Any]
    line: int | None = None  # of the mark, if the report is of a line

    @property
    def name(self) -> str:
        return self.make.__name__


BUGS: list[Bug] = []


def bug(kind: str, says: str, *scratch: Any) -> Callable[[Any], Any]:
    """Registers a function of `fixed`; the report has to be of this kind, to say this
    and to name the marked line."""

    def register(make: Callable[[bool], Any]) -> Callable[[bool], Any]:
        lines, first = inspect.getsourcelines(make)
        marked = [first + n for n, text in enumerate(lines) if MARK in text]
        BUGS.append(Bug(make, kind, says, scratch, *marked))
        return make

    return register


def run(kernel: Callable[..., None], scratch: Sequence[Any], options: pl.Checked):
    """Run a kernel of (number, x, o, scratch...) on all devices."""
    block = S((ROWS, 8), F32)
    call = pl.pallas_call(
        kernel,
        block,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), ANYWHERE],
        out_specs=ANYWHERE,
        scratch_shapes=scratch,
    )
    (found,) = kernels_in(call, S((1,), jnp.int32), block)
    arrays = [
        [np.array([n], np.int32), np.full((ROWS, 8), n, np.float32)]
        for n in range(DEVICES)
    ]
    names = [f"device {n}" for n in range(DEVICES)]
    return run_devices(found, arrays, names, options)


def after(me: Any, by: int = 1) -> Any:
    return lax.rem(me + by, DEVICES)


def before(me: Any) -> Any:
    return after(me, DEVICES - 1)


def to(device: Any) -> dict[str, Any]:
    return dict(device_id=device, device_id_type=LOGICAL)


def copy_to(device: Any, source: Any, target: Any, sent: Any, received: Any) -> Any:
    return pltpu.make_async_remote_copy(source, target, sent, received, **to(device))


def send(source: Any, target: Any, sent: Any, received: Any, device: Any) -> Any:
    copy = copy_to(device, source, target, sent, received)
    copy.start()
    return copy


def signal(semaphore: Any, device: Any, amount: int = 1) -> None:
    pl.semaphore_signal(semaphore, amount, **to(device))


def fill(ref: Any, value: float) -> None:
    """Write main memory, which is done by a copy."""

    def inner(buffer: Any) -> None:
        buffer[...] = jnp.full_like(buffer, value)
        pltpu.sync_copy(buffer, ref)

    pl.run_scoped(inner, pltpu.VMEM(ref.shape, F32))


# --- missing waits ---


@bug("copies", "a copy from another device is never waited for", DMA, DMA)
def arrival_not_waited_for(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        copy = copy_to(after(me_ref[0]), x_ref, o_ref, sent, received)
        copy.start()  # BUG
        copy.wait_send()
        if fixed:
            copy.wait_recv()

    return kernel


@bug("copies", "a copy to another device is never waited for", DMA, DMA)
def departure_not_waited_for(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        copy = copy_to(after(me_ref[0]), x_ref, o_ref, sent, received)
        copy.start()  # BUG
        copy.wait_recv()
        if fixed:
            copy.wait_send()

    return kernel


@bug(
    "copies",
    "the destination of a copy from another device is read before",
    VMEM, DMA, DMA,
)  # fmt: skip
def used_before_it_arrived(fixed):
    def kernel(me_ref, x_ref, o_ref, buffer, sent, received):
        copy = send(x_ref, buffer, sent, received, after(me_ref[0]))
        copy.wait_send()
        if fixed:
            copy.wait_recv()
        pltpu.sync_copy(buffer, o_ref)  # BUG
        if not fixed:
            copy.wait_recv()

    return kernel


@bug(
    "copies",
    "the source of a copy to another device is written before",
    VMEM, DMA, DMA,
)  # fmt: skip
def source_reused_before_it_left(fixed):
    def kernel(me_ref, x_ref, o_ref, buffer, sent, received):
        pltpu.sync_copy(x_ref, buffer)
        copy = send(buffer, o_ref, sent, received, after(me_ref[0]))
        if fixed:
            copy.wait_send()
        buffer[...] = jnp.zeros_like(buffer)  # BUG
        if not fixed:
            copy.wait_send()
        copy.wait_recv()

    return kernel


@bug("copies", "the destination of a copy is read before", VMEM, DMA, DMA, DMA)
def sent_before_it_was_there(fixed):
    def kernel(me_ref, x_ref, o_ref, buffer, local, sent, received):
        own = pltpu.async_copy(x_ref, buffer, local)
        if fixed:
            own.wait()
        copy = copy_to(after(me_ref[0]), buffer, o_ref, sent, received)
        copy.start()  # BUG
        copy.wait()
        if not fixed:
            own.wait()

    return kernel


@bug("copies", "the destination of a copy from another device is read", SLOTS, DMA, DMA)
def one_wait_for_two_copies(fixed):
    def kernel(me_ref, x_ref, o_ref, slots, sent, received):
        right = after(me_ref[0])
        copies = [send(x_ref, slots.at[n], sent, received, right) for n in range(2)]
        for copy in copies:
            copy.wait_send()
        copies[0].wait_recv()
        if fixed:
            copies[1].wait_recv()
        pltpu.sync_copy(slots.at[1], o_ref)  # BUG
        if not fixed:
            copies[1].wait_recv()

    return kernel


# --- deadlocks ---


@bug("copies", "waits for a copy to o_ref (output), f32[2,8]", DMA, DMA)
def everyone_waits_first(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        copy = pltpu.make_async_remote_copy(
            x_ref, o_ref, sent, received, after(me_ref[0]), LOGICAL
        )
        if fixed:
            copy.start()
        copy.wait_recv()  # BUG
        if not fixed:
            copy.start()
        copy.wait_send()

    return kernel


@bug("copies", "a wait for a copy that was never started", DMA, DMA)
def waits_for_what_nobody_sends(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        me = me_ref[0]
        pl.when(me != 1)(lambda: fill(o_ref, 0))
        copy = copy_to(1, x_ref, o_ref, sent, received)

        @pl.when(me == (0 if fixed else DEVICES))
        def _():
            copy.start()
            copy.wait_send()

        @pl.when(me == 1)
        def _():
            copy.wait_recv()  # BUG

    return kernel


@bug("copies", "deadlock: everything that runs is waiting", DMA, DMA)
def waits_twice_for_one_arrival(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        copy = send(x_ref, o_ref, sent, received, after(me_ref[0]))
        copy.wait()
        if not fixed:
            copy.wait_recv()  # BUG

    return kernel


@bug("copies", "waits for 2 of the barrier semaphore, which is 1", DMA, DMA)
def barrier_waits_for_more_than_is_signalled(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        me, barrier = me_ref[0], pltpu.get_barrier_semaphore()
        signal(barrier, before(me))
        pl.semaphore_wait(barrier, 1 if fixed else 2)  # BUG
        send(x_ref, o_ref, sent, received, after(me)).wait()

    return kernel


@bug("copies", "a wait for a semaphore that nothing signals", REGULAR)
def one_device_skips_the_handshake(fixed):
    def kernel(me_ref, x_ref, o_ref, semaphore):
        me = me_ref[0]
        pltpu.sync_copy(x_ref, o_ref)
        pl.when((me >= 0) if fixed else (me > 0))(lambda: signal(semaphore, after(me)))
        pl.semaphore_wait(semaphore, 1)  # BUG

    return kernel


@bug("copies", "a wait for a semaphore that nothing signals", REGULAR)
def signals_itself_instead_of_the_other(fixed):
    def kernel(me_ref, x_ref, o_ref, semaphore):
        me = me_ref[0]
        pltpu.sync_copy(x_ref, o_ref)

        @pl.when(me == 0)
        def _():
            signal(semaphore, 1 if fixed else 0)
            if not fixed:
                pl.semaphore_wait(semaphore, 1)

        @pl.when(me == 1)
        def _():
            pl.semaphore_wait(semaphore, 1)  # BUG

    return kernel


# --- semaphores left over, devices that are not there ---


@bug("copies", "a semaphore is not zero at the end of its lifetime", REGULAR)
def signal_that_nobody_waits_for(fixed):
    def kernel(me_ref, x_ref, o_ref, semaphore):
        me = me_ref[0]
        pltpu.sync_copy(x_ref, o_ref)
        pl.semaphore_signal(semaphore, 1 if fixed else 2, **to(after(me)))  # BUG
        pl.semaphore_wait(semaphore, 1)

    return kernel


@bug("copies", "a semaphore is not zero at the end of its lifetime", DMA, DMA)
def barrier_signalled_twice(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        me, barrier = me_ref[0], pltpu.get_barrier_semaphore()
        pl.semaphore_signal(barrier, 1 if fixed else 2, **to(before(me)))  # BUG
        pl.semaphore_wait(barrier, 1)
        send(x_ref, o_ref, sent, received, after(me)).wait()

    return kernel


@bug("copies", "a copy or a signal to a device that has finished the kernel", REGULAR)
def signal_after_the_other_has_ended(fixed):
    def kernel(me_ref, x_ref, o_ref, semaphore):
        me = me_ref[0]
        pltpu.sync_copy(x_ref, o_ref)

        @pl.when(me == 1)
        def _():
            pl.semaphore_signal(semaphore, 1, **to(0))  # BUG

        if fixed:

            @pl.when(me == 0)
            def _():
                pl.semaphore_wait(semaphore, 1)

    return kernel


@bug("copies", "a copy or a signal to a device that does not exist", DMA, DMA)
def device_number_past_the_end(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        right = after(me_ref[0]) if fixed else me_ref[0] + 1
        copy = copy_to(right, x_ref, o_ref, sent, received)
        copy.start()  # BUG
        copy.wait()

    return kernel


@bug(
    "copies",
    "a copy or a signal to a device that may not have started the kernel",
    DMA,
    DMA,
)
def barrier_with_the_wrong_neighbour(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        me, barrier = me_ref[0], pltpu.get_barrier_semaphore()
        signal(barrier, before(me) if fixed else after(me))
        pl.semaphore_wait(barrier, 1)
        copy = copy_to(after(me), x_ref, o_ref, sent, received)
        copy.start()  # BUG
        copy.wait()

    return kernel


@bug(
    "copies",
    "a copy or a signal to a device that may not have started the kernel",
    DMA,
    DMA,
)
def barrier_after_the_first_copy(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        me, barrier = me_ref[0], pltpu.get_barrier_semaphore()
        signal(barrier, before(me))
        if fixed:
            pl.semaphore_wait(barrier, 1)
        copy = copy_to(after(me), x_ref, o_ref, sent, received)
        copy.start()  # BUG
        if not fixed:
            pl.semaphore_wait(barrier, 1)
        copy.wait()

    return kernel


@bug("copies", "device 1 to allocate what it copies or signals to", DMA, DMA, REGULAR)
def memory_of_one_device_only(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received, done):
        me = me_ref[0]

        def inner(buffer):
            copy = copy_to(after(me), x_ref, buffer, sent, received)
            copy.start()  # BUG
            copy.wait()
            pltpu.sync_copy(buffer, o_ref)

        if fixed:
            pl.run_scoped(inner, VMEM)
        else:
            pl.when(me == 0)(lambda: pl.run_scoped(inner, VMEM))
        signal(done, after(me))
        pl.semaphore_wait(done, 1)

    return kernel


# --- races ---


@bug("races", "data race", SLOTS, DMA, DMA, REGULAR)
def slot_refilled_before_it_is_free(fixed):
    """Three steps around the ring in two slots: the third copy goes where the first
    one went."""

    def kernel(me_ref, x_ref, o_ref, slots, sent, received, free):
        me = me_ref[0]
        pltpu.sync_copy(x_ref, slots.at[0])
        for step in range(3):
            here, there = step % 2, (step + 1) % 2
            if fixed and step > 0:
                pl.semaphore_wait(free, 1)
            copy = copy_to(after(me), slots.at[here], slots.at[there], sent, received)
            copy.start()  # BUG
            copy.wait()
            if fixed and step < 2:
                signal(free, before(me))
        pltpu.sync_copy(slots.at[1], o_ref)

    return kernel


@bug("races", "data race", VMEM, DMA, DMA, REGULAR)
def cleared_after_the_others_may_have_sent(fixed):
    def kernel(me_ref, x_ref, o_ref, buffer, sent, received, ready):
        me = me_ref[0]
        buffer[...] = jnp.zeros_like(buffer)  # BUG
        if fixed:
            signal(ready, before(me))
            pl.semaphore_wait(ready, 1)
        send(x_ref, buffer, sent, received, after(me)).wait()
        pltpu.sync_copy(buffer, o_ref)

    return kernel


@bug("races", "data race", VMEM, DMA, DMA, REGULAR)
def read_while_the_next_one_comes(fixed):
    """Twice the same destination: the second copy may come while the first is read."""

    def kernel(me_ref, x_ref, o_ref, buffer, sent, received, read):
        me = me_ref[0]
        copy = copy_to(after(me), x_ref, buffer, sent, received)
        copy.start()
        copy.wait()
        total = buffer[...]
        if fixed:
            signal(read, before(me))
            pl.semaphore_wait(read, 1)
        copy.start()  # BUG
        copy.wait()
        buffer[...] = buffer[...] + total
        pltpu.sync_copy(buffer, o_ref)

    return kernel


@bug("races", "data race", DMA, DMA)
def two_devices_send_to_one_place(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        me = me_ref[0]
        row = pl.ds(me // 2 if fixed else 0, 1)
        copy = pltpu.make_async_remote_copy(
            x_ref.at[pl.ds(0, 1)], o_ref.at[row], sent, received, 0, LOGICAL
        )

        @pl.when(me % 2 == 1)
        def _():
            copy.start()  # BUG
            copy.wait_send()

        @pl.when(me == 0)
        def _():
            copy.wait_recv()
            copy.wait_recv()

        pl.when(me != 0)(lambda: fill(o_ref, 0))

    return kernel


@bug("races", "data race", DMA, DMA, REGULAR)
def signalled_before_the_memory_was_read(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received, ready):
        me = me_ref[0]

        def inner(buffer):
            if not fixed:
                signal(ready, before(me))
            buffer[...] = jnp.ones_like(buffer)
            pltpu.sync_copy(buffer, o_ref)  # BUG
            if fixed:
                signal(ready, before(me))

        pl.run_scoped(inner, VMEM)
        pl.semaphore_wait(ready, 1)
        send(x_ref, o_ref, sent, received, after(me)).wait()

    return kernel


# --- values and places ---


@bug(
    "uninitialised",
    "an undefined value is stored in an output",
    VMEM,
    DMA,
    DMA,
)
def sends_what_was_never_written(fixed):
    def kernel(me_ref, x_ref, o_ref, buffer, sent, received):
        if fixed:
            pltpu.sync_copy(x_ref, buffer)
        copy = copy_to(after(me_ref[0]), buffer, o_ref, sent, received)
        copy.start()  # BUG
        copy.wait()

    return kernel


@bug("unwritten", "elements of an output are never written", DMA, DMA)
def one_device_gets_nothing(fixed):
    def kernel(me_ref, x_ref, o_ref, sent, received):
        me = me_ref[0]
        copy = pltpu.make_async_remote_copy(
            x_ref, o_ref, sent, received, after(me), LOGICAL
        )

        @pl.when((me >= 0) if fixed else (me < 2))
        def _():
            copy.start()
            copy.wait_send()

        @pl.when((me >= 0) if fixed else ((me == 1) | (me == 2)))
        def _():
            copy.wait_recv()

    return kernel


@bug("bounds", "an index is out of bounds", SLOTS, DMA, DMA)
def slot_past_the_end(fixed):
    def kernel(me_ref, x_ref, o_ref, slots, sent, received):
        me = me_ref[0]
        slot = lax.rem(me, 2) if fixed else me
        copy = copy_to(after(me, 2), x_ref, slots.at[slot], sent, received)
        copy.start()  # BUG
        copy.wait()
        pltpu.sync_copy(slots.at[lax.rem(me, 2)], o_ref)

    return kernel


def options_of(seeded: Bug) -> pl.Checked:
    return pl.Checked(orders=("early", "late", 0, 1))


@pytest.mark.filterwarnings("ignore::pallasite.errors.KernelWarning")
@pytest.mark.parametrize("seeded", BUGS, ids=lambda b: b.name)
def test_a_seeded_bug_is_found(seeded):
    with pytest.raises(CheckError) as raised:
        run(seeded.make(False), seeded.scratch, options_of(seeded))
    text = str(raised.value)
    assert (raised.value.kind, seeded.says in text) == (seeded.kind, True), text
    assert seeded.line is None or f"test_bugs.py:{seeded.line} " in text, text


@pytest.mark.parametrize("seeded", BUGS, ids=lambda b: b.name)
def test_the_kernel_without_the_bug_is_clean(seeded):
    run(seeded.make(True), seeded.scratch, options_of(seeded))


def test_there_are_bugs_of_every_kind():
    assert len(BUGS) >= 25
    assert {b.kind for b in BUGS} >= {"copies", "races", "uninitialised", "bounds"}


@pytest.mark.parametrize("mode", [True, pl.Checked()], ids=["emulated", "checked"])
def test_a_deadlock_on_a_mesh_is_reported(mode):
    def wait_for_the_left(x, axis, size, **call):
        def kernel(x_ref, o_ref, sent, received):
            right = lax.rem(lax.axis_index(axis) + 1, size)
            copy = pltpu.make_async_remote_copy(
                x_ref, o_ref, sent, received, device_id=(right,)
            )
            copy.wait_recv()
            copy.start()
            copy.wait_send()

        return pl.pallas_call(
            kernel,
            S(x.shape, x.dtype),
            in_specs=[ANYWHERE],
            out_specs=ANYWHERE,
            scratch_shapes=[DMA, DMA],
            **call,
        )(x)

    call = over_mesh(wait_for_the_left, DEVICES, interpret=mode)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(call(np.zeros((DEVICES, 8), np.float32)))
    assert "deadlock: everything that runs" in str(raised.value)
    waits = r"x = 3 +waits for a copy to o_ref \(output\), f32\[8\], which was not"
    assert re.search(waits, str(raised.value))
    # What was reported does not keep the devices from the next call.
    x = np.ones((DEVICES, 8), np.float32)
    again = over_mesh(collectives.all_gather, DEVICES, interpret=True)(x)
    np.testing.assert_array_equal(again, np.ones((DEVICES, DEVICES, 8)))
