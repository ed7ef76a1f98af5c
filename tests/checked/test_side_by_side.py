"""Cores, roles and copies that run side by side, in several orders."""

import contextlib
import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.backends import base
from pallasite.errors import CheckError, SpecError
from pallasite.interpret.checked import run_checked
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify

F32 = jnp.float32
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
ORDERS = ("early", "late", *range(8))
X = jnp.arange(32.0)

each_order = pytest.mark.parametrize("order", ORDERS)


def shape(*sizes: int):
    return jax.ShapeDtypeStruct(sizes, F32)


def checked(order) -> pl.Checked:
    return pl.Checked(orders=(order,))


def line_of(function, mark: str) -> str:
    """`file.py:12`, the line of a kernel that ends in a comment."""
    lines, first = inspect.getsourcelines(function)
    (line,) = [first + n for n, text in enumerate(lines) if f"# {mark}" in text]
    return f"{__file__.rsplit('/', 1)[1]}:{line}"


def facts_of(error: CheckError) -> dict:
    return dict(error.facts)


@contextlib.contextmanager
def reports(kind: str, message: str):
    with pytest.raises(CheckError) as raised:
        yield raised
    assert (raised.value.kind, message in str(raised.value)) == (kind, True), str(
        raised.value
    )


# --- copies ---


def through_buffers(body):
    """A kernel over 4 chunks of 8, with two buffers and their semaphores."""

    def run(options):
        return pl.pallas_call(
            body,
            shape(32),
            in_specs=[ANYWHERE],
            scratch_shapes=[pltpu.VMEM((2, 8), F32), DMA((2,))],
            interpret=options,
        )(X)

    return run


def chunk(x_ref, buffers, semaphores, n):
    slot = lax.rem(n, 2)
    source = x_ref.at[pl.ds(n * 8, 8)]
    return pltpu.make_async_copy(source, buffers.at[slot], semaphores.at[slot])


def double_buffered(x_ref, o_ref, buffers, semaphores):
    chunk(x_ref, buffers, semaphores, 0).start()

    def step(n, carry):
        @pl.when(n < 3)
        def _():
            chunk(x_ref, buffers, semaphores, n + 1).start()

        chunk(x_ref, buffers, semaphores, n).wait()
        o_ref[pl.ds(n * 8, 8)] = buffers[lax.rem(n, 2)] * 2
        return carry

    lax.fori_loop(0, 4, step, 0)


@each_order
def test_a_double_buffered_pipeline_is_right_in_every_order(order):
    got = through_buffers(double_buffered)(checked(order))
    np.testing.assert_array_equal(got, X * 2)


def reads_too_early(x_ref, o_ref, buffers, semaphores):
    copy = chunk(x_ref, buffers, semaphores, 0)
    copy.start()  # start
    o_ref[0:8] = buffers[0]  # read
    copy.wait()


@each_order
def test_a_read_before_the_wait_is_a_race(order):
    with reports("copies", "the destination of a copy is read") as raised:
        through_buffers(reads_too_early)(checked(order))
    assert line_of(reads_too_early, "start") in str(raised.value)
    assert line_of(reads_too_early, "read") in str(raised.value.at)


def one_buffer_too_few(x_ref, o_ref, buffers, semaphores):
    """Starts the copy after next into the buffer that is still read from."""
    for n in range(3):
        chunk(x_ref, buffers, semaphores, n).start()  # start
    for n in range(3):
        chunk(x_ref, buffers, semaphores, n).wait()
        o_ref[pl.ds(n * 8, 8)] = buffers[n % 2]


@each_order
def test_two_copies_into_one_buffer_race(order):
    with reports("copies", "the destination of a copy is written") as raised:
        through_buffers(one_buffer_too_few)(checked(order))
    assert line_of(one_buffer_too_few, "start") in str(raised.value.at)


def overwrites_the_source(x_ref, o_ref, buffers, semaphores):
    buffers[...] = jnp.ones_like(buffers)
    out = pltpu.make_async_copy(buffers.at[0], o_ref.at[pl.ds(0, 8)], semaphores.at[0])
    out.start()  # start
    buffers[0, :] = jnp.zeros((8,))  # write
    out.wait()


@each_order
def test_a_source_that_is_overwritten_in_flight_is_a_race(order):
    with reports("copies", "the source of a copy is written") as raised:
        through_buffers(overwrites_the_source)(checked(order))
    assert line_of(overwrites_the_source, "start") in str(raised.value)
    assert line_of(overwrites_the_source, "write") in str(raised.value.at)


def test_the_data_moves_late_or_early_by_order():
    """With reports off the kernel that is wrong shows which data it saw."""

    def run(order):
        options = pl.Checked(
            orders=(order,), copies=False, uninitialised=False, unwritten=False
        )
        return np.asarray(through_buffers(reads_too_early)(options))[:8]

    np.testing.assert_array_equal(run("early"), X[:8])
    assert np.isnan(run("late")).all()


def test_copies_left_over_still_arrive_where_that_is_not_reported():
    def kernel(x_ref, o_ref, semaphore):
        pltpu.make_async_copy(x_ref, o_ref, semaphore).start()

    for order in ("early", "late", 3):
        got = pl.pallas_call(
            kernel,
            shape(32),
            in_specs=[ANYWHERE],
            out_specs=ANYWHERE,
            scratch_shapes=[DMA],
            interpret=pl.Checked(orders=(order,), copies=False),
        )(X)
        np.testing.assert_array_equal(got, X)


def test_polling_a_semaphore_sees_the_copy_arrive():
    def kernel(x_ref, o_ref, buffer, semaphore):
        copy = pltpu.make_async_copy(x_ref, buffer, semaphore)
        copy.start()
        lax.while_loop(lambda n: pl.semaphore_read(semaphore) == 0, lambda n: n + 1, 0)
        copy.wait()
        o_ref[...] = buffer[...]

    for order in ORDERS:
        got = pl.pallas_call(
            kernel,
            shape(32),
            in_specs=[ANYWHERE],
            scratch_shapes=[pltpu.VMEM((32,), F32), DMA],
            interpret=checked(order),
        )(X)
        np.testing.assert_array_equal(got, X)


def test_an_order_is_one_there_is():
    with pytest.raises(SpecError, match="'early', 'late' or the seed"):
        through_buffers(double_buffered)(pl.Checked(orders=("soon",)))


def test_prints_come_once(capsys):
    def kernel(x_ref, o_ref, semaphore):
        pl.debug_print("here")
        pltpu.async_copy(x_ref, o_ref, semaphore).wait()

    pl.pallas_call(
        kernel,
        shape(32),
        in_specs=[ANYWHERE],
        out_specs=ANYWHERE,
        scratch_shapes=[DMA],
        interpret=pl.Checked(),
    )(X)
    assert capsys.readouterr().out.count("here") == 1


@each_order
def test_loops_that_the_tpu_backend_writes_are_right_in_every_order(order):
    """The explicit code that is derived from an inner pipeline."""
    from pallasite.backends.tpu.schedule import schedule

    def kernel(x_ref, o_ref):
        def step(x_block, o_block):
            o_block[...] = x_block[...] + 1

        rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(step, grid=(5,), in_specs=[rows], out_specs=[rows])(
            x_ref, o_ref
        )

    x = np.arange(40 * 128, dtype=np.float32).reshape(40, 128)
    call = pl.pallas_call(
        kernel, shape(40, 128), in_specs=[ANYWHERE], out_specs=ANYWHERE
    )
    tile = kernel_of(call, x)
    explicit = schedule(tile)
    assert (tile.level, explicit.level) == ("tile", "explicit")
    verify(explicit)
    (got,) = run_checked(explicit, [x], checked(order))
    np.testing.assert_array_equal(got, x + 1)


def kernel_of(function, *args):
    (eqn,) = jax.make_jaxpr(function)(*args).eqns
    while "call" not in eqn.params:
        (eqn,) = eqn.params["jaxpr"].eqns
    return eqn.params["call"].kernel


# --- cores ---


def on_two_cores(body, scratch, options, x=X[:2]):
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=2)
    return pl.kernel(
        body, shape(2), mesh=mesh, scratch_shapes=scratch, interpret=options
    )(x)


def me_and_the_other():
    me = lax.axis_index("core")
    return me, 1 - me


def signals_the_other(x_ref, o_ref, semaphore):
    me, other = me_and_the_other()
    pl.semaphore_signal(semaphore, 1, core_index=other)
    pl.semaphore_wait(semaphore, 1)
    o_ref[me] = x_ref[me] + 1


@each_order
def test_two_cores_that_signal_each_other(order):
    got = on_two_cores(signals_the_other, [REGULAR], checked(order))
    np.testing.assert_array_equal(got, X[:2] + 1)


def passes_a_number_on(x_ref, o_ref, semaphore):
    """Core 1 writes what core 0 then reads, and the other way round."""
    me, other = me_and_the_other()
    o_ref[me] = x_ref[me] * 10  # write
    pl.semaphore_signal(semaphore, 1, core_index=other)
    pl.semaphore_wait(semaphore, 1)
    theirs = o_ref[other]
    pl.semaphore_signal(semaphore, 1, core_index=other)
    pl.semaphore_wait(semaphore, 1)
    o_ref[me] = theirs


@each_order
def test_what_a_signal_orders_is_no_race(order):
    got = on_two_cores(passes_a_number_on, [REGULAR], checked(order), X[2:4])
    np.testing.assert_array_equal(got, [30.0, 20.0])


def reads_without_waiting(x_ref, o_ref, semaphore):
    me, other = me_and_the_other()
    o_ref[me] = x_ref[me]  # write
    theirs = o_ref[other]  # read
    pl.semaphore_signal(semaphore, 1, core_index=other)
    pl.semaphore_wait(semaphore, 1)
    o_ref[me] = theirs


@each_order
def test_what_no_signal_orders_is_a_race(order):
    options = dataclasses.replace(checked(order), uninitialised=False)
    with reports("races", "data race") as raised:
        on_two_cores(reads_without_waiting, [REGULAR], options)
    places = (str(raised.value.at), str(facts_of(raised.value)["other access at"]))
    read, write = (line_of(reads_without_waiting, m) for m in ("read", "write"))
    assert any(write in p for p in places) and any(read in p for p in places)


def waits_for_the_other(x_ref, o_ref, semaphore):
    me, other = me_and_the_other()
    pl.semaphore_wait(semaphore, 1)  # wait
    pl.semaphore_signal(semaphore, 1, core_index=other)
    o_ref[me] = x_ref[me]


@each_order
def test_two_cores_that_wait_for_each_other(order):
    with reports("copies", "deadlock") as raised:
        on_two_cores(waits_for_the_other, [REGULAR], checked(order))
    text = str(raised.value)
    assert text.count("waits for 1 of semaphore (scratch), i32, which is 0") == 2
    assert text.count(line_of(waits_for_the_other, "wait")) >= 2
    assert "i = 0" in text and "i = 1" in text


def one_waits_alone(x_ref, o_ref, semaphore):
    me, other = me_and_the_other()
    o_ref[me] = x_ref[me]

    @pl.when(me == 0)
    def _():
        pl.semaphore_signal(semaphore, 1, core_index=other)

    @pl.when(me == 1)
    def _():
        pl.semaphore_wait(semaphore, 2)  # wait


@each_order
def test_a_core_that_waits_for_what_has_ended(order):
    with reports("copies", "a wait for a semaphore that nothing signals") as raised:
        on_two_cores(one_waits_alone, [REGULAR], checked(order))
    assert line_of(one_waits_alone, "wait") in str(raised.value.at)
    assert facts_of(raised.value)["program"] == "i = 1"


def test_deadlocked_cores_go_on_where_that_is_not_reported():
    options = pl.Checked(copies=False)
    got = on_two_cores(waits_for_the_other, [REGULAR], options)
    np.testing.assert_array_equal(got, X[:2])


def leaves_a_signal(x_ref, o_ref, semaphore):
    me, other = me_and_the_other()
    o_ref[me] = x_ref[me]
    pl.semaphore_signal(semaphore, 1, core_index=other)  # signal


@each_order
def test_a_core_that_leaves_a_semaphore_signalled(order):
    with reports("copies", "a semaphore is not zero") as raised:
        on_two_cores(leaves_a_signal, [REGULAR], checked(order))
    assert line_of(leaves_a_signal, "signal") in str(raised.value.at)


def signals_core_two(x_ref, o_ref, semaphore):
    me, _ = me_and_the_other()
    o_ref[me] = x_ref[me]
    pl.semaphore_signal(semaphore, 1, core_index=2)


def test_a_signal_to_a_core_that_is_not_there():
    with reports("copies", "does not exist on that core") as raised:
        on_two_cores(signals_core_two, [REGULAR], pl.Checked())
    assert facts_of(raised.value)["core"] == "2, of 2"


def has_scratch_of_its_own(x_ref, o_ref, buffer, semaphore):
    me, other = me_and_the_other()
    buffer[0] = x_ref[me]
    pl.semaphore_signal(semaphore, 1, core_index=other)
    pl.semaphore_wait(semaphore, 1)
    o_ref[me] = buffer[0]


@each_order
def test_each_core_has_scratch_of_its_own(order):
    scratch = [pltpu.SMEM((1,), F32), REGULAR]
    got = on_two_cores(has_scratch_of_its_own, scratch, checked(order))
    np.testing.assert_array_equal(got, X[:2])


def copies_what_the_other_writes(x_ref, o_ref, buffer, dma, semaphore):
    """Core 0 writes main memory while core 1 copies from it."""
    me, _ = me_and_the_other()

    @pl.when(me == 0)
    def _():
        o_ref[0] = x_ref[0]  # write

    @pl.when(me == 1)
    def _():
        pltpu.async_copy(o_ref.at[pl.ds(0, 1)], buffer, dma).wait()  # copy
        o_ref[1] = buffer[0]


@each_order
def test_a_copy_of_what_another_core_writes_is_a_race(order):
    options = dataclasses.replace(checked(order), uninitialised=False)
    scratch = [pltpu.VMEM((1,), F32), DMA, REGULAR]
    with pytest.raises(CheckError) as raised:
        on_two_cores(copies_what_the_other_writes, scratch, options)
    # While the copy is in flight, or after it.
    assert raised.value.kind in ("copies", "races")
    text = str(raised.value)
    assert line_of(copies_what_the_other_writes, "copy") in text
    assert line_of(copies_what_the_other_writes, "write") in text


def test_the_emulation_has_signals_between_cores():
    got = on_two_cores(signals_the_other, [REGULAR], True)
    np.testing.assert_array_equal(got, X[:2] + 1)


def test_only_cuda_has_roles_of_the_author():
    assert [n for n in base.names() if "roles" in base.get(n).native] == ["cuda"]


# --- roles ---

HEAD = "kernel @k(%x: ref<f32[8] any>, %o: ref<f32[8] any>) outputs 1 level explicit"

PRODUCER_AND_CONSUMER = """
  %b: ref<f32[2,8] smem @swizzle(128)> = alloc
  %full: ref<i32[2] sem> = alloc
  %empty: ref<i32[2] sem> = alloc
  %0: i32 = constant {value=0}
  %1: i32 = constant {value=1}
  %2: i32 = constant {value=2}
  %n: i32 = constant {value=5}
  %e0: ref<i32 sem> = subview %empty[0]
  %e1: ref<i32 sem> = subview %empty[1]
  sem_signal %e0, %1
  sem_signal %e1, %1
  roles
    body () {
      for %0, %n, %1
        body (%i: i32) {
          %s: i32 = rem %i, %2
          %es: ref<i32 sem> = subview %empty[%s]
          %fs: ref<i32 sem> = subview %full[%s]
          WAIT_EMPTY
          %bs: ref<f32[8] smem @swizzle(128)> = subview %b[%s, :]
          %v: f32[8] = load %x[:]
          store %bs[:] = %v loc("roles.py":1)
          sem_signal %fs, %1
        }
    }
    body () {
      %z: f32[8] = constant {value=0.0}
      store %o[:] = %z
      for %0, %n, %1
        body (%j: i32) {
          %t: i32 = rem %j, %2
          %et: ref<i32 sem> = subview %empty[%t]
          %ft: ref<i32 sem> = subview %full[%t]
          sem_wait %ft, %1
          %bt: ref<f32[8] smem @swizzle(128)> = subview %b[%t, :]
          %w: f32[8] = load %bt[:] loc("roles.py":2)
          %a: f32[8] = load %o[:]
          %c: f32[8] = add %a, %w
          store %o[:] = %c
          sem_signal %et, %1
        }
    }
  sem_wait %e0, %1
  sem_wait %e1, %1
"""


def run_text(code: str, order):
    kernel = parse_kernel(f"{HEAD} {{{code}}}")
    verify(kernel)
    x = np.arange(8, dtype=np.float32)
    return run_checked(kernel, [x], checked(order))[0]


@each_order
def test_a_producer_and_a_consumer(order):
    code = PRODUCER_AND_CONSUMER.replace("WAIT_EMPTY", "sem_wait %es, %1")
    np.testing.assert_array_equal(run_text(code, order), np.arange(8) * 5.0)


@each_order
def test_a_producer_that_does_not_wait_races(order):
    code = PRODUCER_AND_CONSUMER.replace("WAIT_EMPTY", "")
    with reports("races", "data race") as raised:
        run_text(code, order)
    text = str(raised.value)
    assert "roles.py:1" in text and "roles.py:2" in text
    assert "role 0" in text and "role 1" in text


BARRIER = """
  %b: ref<f32[8] smem> = alloc
  roles
    body () {
      %v: f32[8] = load %x[:]
      store %b[:] = %v
      FIRST
    }
    body () {
      barrier loc("roles.py":3)
      %w: f32[8] = load %b[:]
      store %o[:] = %w
    }
"""


@each_order
def test_roles_meet_at_a_barrier(order):
    got = run_text(BARRIER.replace("FIRST", "barrier"), order)
    np.testing.assert_array_equal(got, np.arange(8))


@each_order
def test_a_barrier_that_a_role_does_not_reach(order):
    with reports("copies", "not every role reaches a barrier") as raised:
        run_text(BARRIER.replace("FIRST", ""), order)
    assert facts_of(raised.value)["never arrived"] == "role 0"
    assert str(raised.value.at) == "roles.py:3"


MIXED = """
  %s: ref<i32 sem> = alloc
  %1: i32 = constant {value=1}
  %v: f32[8] = load %x[:]
  store %o[:] = %v
  roles
    body () {
      sem_wait %s, %1 loc("roles.py":4)
      barrier
    }
    body () {
      barrier loc("roles.py":5)
      sem_signal %s, %1
    }
"""


@each_order
def test_roles_that_wait_for_each_other(order):
    with reports("copies", "deadlock") as raised:
        run_text(MIXED, order)
    text = str(raised.value)
    assert "waits for 1 of s (scratch), i32, which is 0" in text
    assert "waits at a barrier for role 0" in text
    assert "roles.py:4" in text and "roles.py:5" in text


COPY_BY_ANOTHER = """
  %b: ref<f32[8] smem> = alloc
  %s: ref<i32 dma_sem> = alloc
  roles
    body () { copy_start %x, %b, %s {priority=0} }
    body () {
      copy_wait %x, %b, %s
      %w: f32[8] = load %b[:]
      store %o[:] = %w
    }
"""


@each_order
def test_a_role_waits_for_the_copy_that_another_starts(order):
    np.testing.assert_array_equal(run_text(COPY_BY_ANOTHER, order), np.arange(8))


ONE_ELEMENT = """
  %b: ref<f32 smem> = alloc
  %v: ref<i32 smem> = bitcast_view %b {dtype=i32}
  %s: ref<i32 dma_sem> = alloc
  %0: i32 = constant {value=7}
  store %v[] = %0
  %x0: ref<f32 any> = subview %x[3]
  copy_start %x0, %b, %s {priority=0}
  READ
  copy_wait %x0, %b, %s
  %w: i32 = load %v[]
  %f: f32 = bitcast %w {dtype=f32}
  %t: f32[8] = broadcast_in_dim %f {shape=(8,), dims=()}
  store %o[:] = %t
"""


@each_order
def test_a_single_element_through_a_view(order):
    np.testing.assert_array_equal(
        run_text(ONE_ELEMENT.replace("READ", ""), order), [3.0] * 8
    )
    with reports("copies", "the destination of a copy is read"):
        run_text(ONE_ELEMENT.replace("READ", "%e: i32 = load %v[]"), order)
