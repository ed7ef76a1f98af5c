"""Checked mode finds each seeded bug, and says what, where and in which program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import CheckError
from pallasite.interpret.checked import run_checked
from pallasite.ir.parse import parse_kernel

from .bugs import BUGS, Bug, bug

F32 = jnp.float32


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def call(kernel, out_shape, checked=None, **options):
    checked = pl.Checked() if checked is None else checked
    return pl.pallas_call(kernel, out_shape=out_shape, interpret=checked, **options)


def parallel(*names):
    return pltpu.CompilerParams(dimension_semantics=names)


def rows(size):
    return pl.BlockSpec((size,), lambda i: (i,))


ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
DMA = pltpu.SemaphoreType.DMA
X = np.arange(32, dtype=np.float32) + 1

# --- bounds ---


@bug("bounds", "x_ref (input), f32[32]", "i = 3")
def slice_starts_too_far_right(fixed):
    def kernel(x_ref, o_ref):
        first = pl.program_id(0) * 8
        if not fixed:
            first += 1
        o_ref[...] = x_ref[pl.ds(first, 8)]  # BUG

    whole = pl.BlockSpec((32,), lambda i: (0,))
    return call(kernel, shape(32), grid=(4,), in_specs=[whole], out_specs=rows(8))(X)


@bug("bounds", "table_ref (input), f32[4,8]", None)
def scalar_index_is_one_based(fixed):
    def kernel(ids_ref, table_ref, o_ref):
        for n in range(4):
            row = ids_ref[n] - (1 if fixed else 0)
            o_ref[n] = table_ref[row]  # BUG

    ids = jnp.arange(1, 5, dtype=jnp.int32)
    return call(kernel, shape(4, 8))(ids, X.reshape(4, 8))


@bug("bounds", "table_ref (input), f32[32]", "i = 1")
def gather_index_is_not_wrapped(fixed):
    def kernel(table_ref, o_ref):
        index = pl.program_id(0) * 16 + lax.iota(jnp.int32, 16) + 1
        if fixed:
            index = index % 32
        o_ref[...] = table_ref[index]  # BUG

    whole = pl.BlockSpec((32,), lambda i: (0,))
    return call(kernel, shape(32), grid=(2,), in_specs=[whole], out_specs=rows(16))(X)


@bug("bounds", "o_ref (output), f32[32]", None)
def scatter_index_is_before_the_start(fixed):
    def kernel(x_ref, o_ref):
        index = lax.iota(jnp.int32, 32) - 33
        if fixed:
            index = index % 32
        o_ref[index] = x_ref[...]  # BUG

    return call(kernel, shape(32))(X)


@bug("bounds", "x_ref (input), f32[30]", "i = 3")
def mask_lets_one_too_many_through(fixed):
    def kernel(x_ref, o_ref):
        here = pl.program_id(0) * 8 + lax.iota(jnp.int32, 8)
        inside = here < 30 if fixed else here <= 30
        o_ref[...] = pl.load(x_ref, (here,), mask=inside, other=0.0)  # BUG

    whole = pl.BlockSpec((30,), lambda i: (0,))
    return call(kernel, shape(30), grid=(4,), in_specs=[whole], out_specs=rows(8))(
        X[:30]
    )


@bug("bounds", "x_ref (input), f32[30]", "i = 3")
def masked_slice_lets_one_too_many_through(fixed):
    def kernel(x_ref, o_ref):
        first = pl.program_id(0) * 8
        inside = first + lax.iota(jnp.int32, 8) < (30 if fixed else 31)
        o_ref[...] = pl.load(x_ref, (pl.ds(first, 8),), mask=inside, other=0.0)  # BUG

    whole = pl.BlockSpec((30,), lambda i: (0,))
    return call(kernel, shape(30), grid=(4,), in_specs=[whole], out_specs=rows(8))(
        X[:30]
    )


@bug("bounds", "x_ref (input), f32[32]", "i = 3")
def index_map_goes_past_the_last_block(fixed):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def next_block(i):
        return ((i + 1) % 4 if fixed else i + 1,)  # BUG

    shifted = pl.BlockSpec((8,), next_block)
    return call(kernel, shape(32), grid=(4,), in_specs=[shifted], out_specs=rows(8))(X)


@bug("bounds", "x_ref (input), f32[32]", "i = 0")
def element_window_starts_before_the_array(fixed):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[1:9]

    padding = (1, 1) if fixed else (0, 1)

    def halo(i):
        return (i * 8 - (0 if fixed else 1),)  # BUG

    spec = pl.BlockSpec((pl.Element(10, padding),), halo)
    return call(kernel, shape(32), grid=(4,), in_specs=[spec], out_specs=rows(8))(X)


@bug("bounds", "x_ref (input), f32[32]", "i = 3")
def copy_reaches_outside(fixed):
    def kernel(x_ref, o_ref, semaphore):
        first = pl.program_id(0) * (8 if fixed else 9)
        source = x_ref.at[pl.ds(first, 8)]  # the view is made where it is used
        pltpu.async_copy(source, o_ref, semaphore).wait()  # BUG

    return call(
        kernel,
        shape(32),
        grid=(4,),
        in_specs=[ANYWHERE],
        out_specs=rows(8),
        scratch_shapes=[DMA],
    )(X)


# --- uninitialised ---


@bug("uninitialised", "o_ref (output), f32[8,8]", "(i, j, k) = (0, 0, 0)")
def product_is_not_zeroed(fixed):
    def kernel(x_ref, y_ref, o_ref):
        if fixed:

            @pl.when(pl.program_id(2) == 0)
            def _():
                o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...])  # BUG

    x = jnp.ones((8, 8))
    return call(
        kernel,
        shape(8, 8),
        grid=(2, 2, 2),
        in_specs=[
            pl.BlockSpec((4, 4), lambda i, j, k: (i, k)),
            pl.BlockSpec((4, 4), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((4, 4), lambda i, j, k: (i, j)),
    )(x, x)


@bug("uninitialised", "acc_ref (scratch), f32[8]", "i = 0")
def scratch_is_zeroed_in_the_wrong_program(fixed):
    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(0) == (0 if fixed else 1))
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...]
        o_ref[...] = acc_ref[...]  # BUG

    return call(
        kernel,
        shape(32),
        grid=(4,),
        in_specs=[rows(8)],
        out_specs=rows(8),
        scratch_shapes=[pltpu.VMEM((8,), F32)],
    )(X)


@bug("uninitialised", "x_ref (input), f32[8]: past the edge", "i = 3")
def sum_takes_in_the_overhang(fixed):
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        if fixed:
            inside = pl.program_id(0) * 8 + lax.iota(jnp.int32, 8) < 30
            x = jnp.where(inside, x, 0.0)
        o_ref[...] = jnp.sum(x).reshape(1)  # BUG

    return call(kernel, shape(4), grid=(4,), in_specs=[rows(8)], out_specs=rows(1))(
        X[:30]
    )


@bug("uninitialised", "y_ref (input), f32[4,4]: past the edge", "i = 1")
def product_masks_only_one_side(fixed):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        x, y = x_ref[...], y_ref[...]
        depth = pl.program_id(0) * 4 + lax.broadcasted_iota(jnp.int32, (4, 4), 1)
        x = jnp.where(depth < 6, x, 0.0)
        if fixed:
            y = jnp.where(depth.T < 6, y, 0.0)
        o_ref[...] += jnp.dot(x, y)  # BUG

    return call(
        kernel,
        shape(4, 4),
        grid=(2,),
        in_specs=[
            pl.BlockSpec((4, 4), lambda k: (0, k)),
            pl.BlockSpec((4, 4), lambda k: (k, 0)),
        ],
        out_specs=pl.BlockSpec((4, 4), lambda k: (0, 0)),
    )(jnp.ones((4, 6)), jnp.ones((6, 4)))


@bug("uninitialised", "x_ref (input), f32[32]: masked off", None)
def masked_load_has_no_other(fixed):
    def kernel(x_ref, o_ref):
        keep = lax.iota(jnp.int32, 32) % 2 == 0
        other = 0.0 if fixed else None
        x = pl.load(x_ref, (slice(None),), mask=keep, other=other)
        o_ref[...] = jnp.cumsum(x)  # BUG

    return call(kernel, shape(32))(X)


@bug("uninitialised", "done_ref (scratch), i32[1]", "i = 0")
def branch_looks_at_unwritten_scratch(fixed):
    def kernel(x_ref, o_ref, done_ref):
        if fixed:

            @pl.when(pl.program_id(0) == 0)
            def _():
                done_ref[0] = 0

        o_ref[...] = x_ref[...]

        @pl.when(done_ref[0] == 0)  # BUG
        def _():
            o_ref[...] = -x_ref[...]

    return call(
        kernel,
        shape(32),
        grid=(4,),
        in_specs=[rows(8)],
        out_specs=rows(8),
        scratch_shapes=[pltpu.SMEM((1,), jnp.int32)],
    )(X)


@bug("uninitialised", "count_ref (scratch), i32[2]", None)
def loop_length_is_unwritten(fixed):
    def kernel(x_ref, o_ref, count_ref):
        count_ref[0] = 3
        o_ref[...] = x_ref[...]
        count = count_ref[0 if fixed else 1]

        def body(n, carry):
            o_ref[n] = 0.0
            return carry

        lax.fori_loop(0, count, body, 0)  # BUG

    scratch = [pltpu.SMEM((2,), jnp.int32)]
    return call(kernel, shape(32), scratch_shapes=scratch)(X)


@bug("uninitialised", "o_ref (output), f32[32]", None)
def place_of_a_store_is_unwritten(fixed):
    def kernel(x_ref, o_ref, where_ref):
        if fixed:
            where_ref[0] = 5
        o_ref[...] = x_ref[...]
        o_ref[where_ref[0]] = 0.0  # BUG

    scratch = [pltpu.SMEM((1,), jnp.int32)]
    return call(kernel, shape(32), scratch_shapes=scratch)(X)


# --- unwritten ---


@bug("unwritten", "o_ref (output), f32[30]", None)
def grid_is_rounded_down(fixed):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    grid = (pl.cdiv(30, 8) if fixed else 30 // 8,)
    x, specs = X[:30], {"in_specs": [rows(8)], "out_specs": rows(8)}
    return pl.pallas_call(  # BUG
        kernel, out_shape=shape(30), grid=grid, interpret=pl.Checked(), **specs
    )(x)


@bug("unwritten", "last_ref (output), f32[8]", None)
def result_of_the_last_step_is_stored_never(fixed):
    def kernel(x_ref, o_ref, last_ref):
        o_ref[...] = x_ref[...]

        @pl.when(pl.program_id(0) == pl.num_programs(0) - (1 if fixed else 0))
        def _():
            last_ref[...] = x_ref[...]

    whole = pl.BlockSpec((8,), lambda i: (0,))
    specs = {"in_specs": [rows(8)], "out_specs": (rows(8), whole)}
    out = (shape(32), shape(8))
    return pl.pallas_call(  # BUG
        kernel, out_shape=out, grid=(4,), interpret=pl.Checked(), **specs
    )(X)


# --- races ---


@bug("races", "o_ref (output), f32[8]", "i = 1")
def sum_over_a_parallel_axis(fixed):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]  # BUG

    return call(
        kernel,
        shape(8),
        grid=(4,),
        in_specs=[rows(8)],
        out_specs=pl.BlockSpec((8,), lambda i: (0,)),
        compiler_params=parallel("arbitrary" if fixed else "parallel"),
    )(X)


@bug("races", "o_ref (output), f32[32]", "i = 1")
def parallel_programs_write_overlapping_rows(fixed):
    def kernel(x_ref, o_ref):
        first = pl.program_id(0) * (8 if fixed else 7)
        o_ref[pl.ds(first, 8)] = x_ref[pl.ds(first, 8)]  # BUG

    return call(
        kernel,
        shape(32),
        pl.Checked(unwritten=False),
        grid=(4,),
        in_specs=[ANYWHERE],
        out_specs=ANYWHERE,
        compiler_params=parallel("parallel"),
    )(X)


@bug("races", "o_ref (output), f32[32]", "i = 1")
def parallel_program_reads_its_neighbours_result(fixed):
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[pl.ds(i * 8, 8)] = x_ref[pl.ds(i * 8, 8)]
        before = jnp.maximum(i * 8 - 1, 0) if not fixed else i * 8
        o_ref[i * 8] += o_ref[before]  # BUG

    return call(
        kernel,
        shape(32),
        grid=(4,),
        in_specs=[ANYWHERE],
        out_specs=ANYWHERE,
        compiler_params=parallel("parallel"),
    )(X)


@bug("races", "o_ref (output), f32[32]", "i = 1")
def in_place_stencil_is_parallel(fixed):
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        right = jnp.minimum(i * 8 + 8, 31)
        edge = x_ref[right]
        o_ref[pl.ds(i * 8, 8)] = x_ref[pl.ds(i * 8, 8)] + edge  # BUG

    return call(
        kernel,
        shape(32),
        grid=(4,),
        in_specs=[ANYWHERE],
        out_specs=ANYWHERE,
        input_output_aliases={} if fixed else {0: 0},
        compiler_params=parallel("parallel"),
    )(X)


@bug("races", "acc_ref (scratch), f32[8]", "i = 1")
def scratch_is_carried_along_a_parallel_axis(fixed):
    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...]
        o_ref[...] = acc_ref[...]  # BUG

    return call(
        kernel,
        shape(32),
        grid=(4,),
        in_specs=[rows(8)],
        out_specs=rows(8),
        scratch_shapes=[pltpu.VMEM((8,), F32)],
        compiler_params=parallel("arbitrary" if fixed else "parallel"),
    )(X)


@bug("races", "o_ref (output), i32[4]", "i = 1")
def histogram_is_not_atomic(fixed):
    def kernel(x_ref, zeros_ref, o_ref):
        bins = x_ref[...]
        if fixed:
            pl.atomic_add(o_ref, (bins,), jnp.ones_like(bins))
        else:
            o_ref[bins[0]] += 1  # BUG

    return call(
        kernel,
        shape(4, dtype=jnp.int32),
        grid=(4,),
        in_specs=[rows(8), ANYWHERE],
        out_specs=ANYWHERE,
        input_output_aliases={1: 0},
        compiler_params=parallel("parallel"),
    )(np.arange(32, dtype=np.int32) % 4, np.zeros(4, np.int32))


# --- copies ---


def with_buffer(kernel, **options):
    return call(
        kernel,
        shape(8),
        in_specs=[ANYWHERE],
        scratch_shapes=[pltpu.VMEM((8,), F32), DMA],
        **options,
    )(X[:8])


@bug("copies", "buffer_ref (scratch), f32[8]", None)
def buffer_is_read_before_the_wait(fixed):
    def kernel(x_ref, o_ref, buffer_ref, semaphore):
        copy = pltpu.async_copy(x_ref, buffer_ref, semaphore)
        if fixed:
            copy.wait()
        o_ref[...] = buffer_ref[...] * 2  # BUG
        if not fixed:
            copy.wait()

    return with_buffer(kernel)


@bug("copies", "buffer_ref (scratch), f32[8]", None)
def source_is_overwritten_before_the_wait(fixed):
    def kernel(x_ref, o_ref, buffer_ref, semaphore):
        pltpu.sync_copy(x_ref, buffer_ref)
        copy = pltpu.async_copy(buffer_ref, o_ref, semaphore)
        if fixed:
            copy.wait()
        buffer_ref[...] = jnp.zeros_like(buffer_ref)  # BUG
        if not fixed:
            copy.wait()

    return with_buffer(kernel)


@bug("copies", "buffer_ref (scratch), f32[8]", None)
def copy_is_never_waited_for(fixed):
    def kernel(x_ref, o_ref, buffer_ref, semaphore):
        o_ref[...] = jnp.ones_like(o_ref)
        copy = pltpu.async_copy(x_ref, buffer_ref, semaphore)  # BUG
        if fixed:
            copy.wait()

    return with_buffer(kernel)


@bug("copies", "buffer_ref (scratch), f32[8]", None)
def copy_is_waited_for_twice(fixed):
    def kernel(x_ref, o_ref, buffer_ref, semaphore):
        copy = pltpu.async_copy(x_ref, buffer_ref, semaphore)
        copy.wait()
        o_ref[...] = buffer_ref[...]
        if not fixed:
            copy.wait()  # BUG

    return with_buffer(kernel)


@bug("copies", "o_ref (output), f32[8]", "i = 0")
def block_is_gone_before_its_copy_arrives(fixed):
    def kernel(x_ref, o_ref, semaphore):
        mine = x_ref.at[pl.ds(pl.program_id(0) * 8, 8)]
        copy = pltpu.async_copy(mine, o_ref, semaphore)  # BUG
        if fixed:
            copy.wait()

    return call(
        kernel,
        shape(32),
        grid=(4,),
        in_specs=[ANYWHERE],
        out_specs=rows(8),
        scratch_shapes=[DMA],
    )(X)


@bug("copies", "x_ref (input), f32[8]", None)
def scoped_buffer_is_gone_before_its_copy_arrives(fixed):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.ones_like(o_ref)

        @pl.when(o_ref[0] > 0)
        def _():
            def prefetch(buffer_ref, semaphore):
                copy = pltpu.async_copy(x_ref, buffer_ref, semaphore)  # BUG
                if fixed:
                    copy.wait()

            pl.run_scoped(prefetch, pltpu.VMEM((8,), F32), DMA)

    return call(kernel, shape(8), in_specs=[ANYWHERE])(X[:8])


@bug("copies", "semaphore (scratch), i32", None)
def semaphore_waits_for_more_than_was_signalled(fixed):
    def kernel(x_ref, o_ref, semaphore):
        pl.semaphore_signal(semaphore, 2)
        o_ref[...] = x_ref[...]
        pl.semaphore_wait(semaphore, 2 if fixed else 3)  # BUG

    scratch = [pltpu.SemaphoreType.REGULAR]
    return call(kernel, shape(32), scratch_shapes=scratch)(X)


@bug("copies", "semaphore (scratch), i32", None)
def semaphore_is_left_over(fixed):
    def kernel(x_ref, o_ref, semaphore):
        pl.semaphore_signal(semaphore, 2)  # BUG
        o_ref[...] = x_ref[...]
        if fixed:
            pl.semaphore_wait(semaphore, 2)

    scratch = [pltpu.SemaphoreType.REGULAR]
    return call(kernel, shape(32), scratch_shapes=scratch)(X)


# --- NaN and infinity ---


@bug("nan", None, "i = 2")
def variance_becomes_negative(fixed):
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        variance = jnp.sum(x * x) - 64.0
        if fixed:
            variance = jnp.maximum(variance, 0.0)
        root = jnp.sqrt(variance)  # BUG
        o_ref[...] = x + root

    x = jnp.asarray([4.0, 4.0, 1.0, 4.0]).repeat(8)
    return call(
        kernel,
        shape(32),
        pl.Checked(nan=True),
        grid=(4,),
        in_specs=[rows(8)],
        out_specs=rows(8),
    )(x)


@bug("inf", None, None)
def softmax_forgets_the_maximum(fixed):
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        if fixed:
            x = x - jnp.max(x)
        e = jnp.exp(x)  # BUG
        o_ref[...] = e / jnp.sum(e)

    return call(kernel, shape(32), pl.Checked(inf=True))(X * 10)


# --- promises and checks ---


@bug("promises", None, "i = 1")
def promise_of_alignment_is_broken(fixed):
    def kernel(x_ref, o_ref):
        first = pl.program_id(0) * (8 if fixed else 4)
        first = pl.multiple_of(first, 8)  # BUG
        o_ref[...] = x_ref[pl.ds(first, 8)]

    whole = pl.BlockSpec((32,), lambda i: (0,))
    return call(kernel, shape(32), grid=(4,), in_specs=[whole], out_specs=rows(8))(X)


@bug("check", None, "(i, j) = (1, 0)")
def debug_check_fails(fixed):
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        pl.debug_check(jnp.all(x < (99 if fixed else 20)), "x is small")  # BUG
        o_ref[...] = x

    block = pl.BlockSpec((8,), lambda i, j: (2 * i + j,))
    return call(kernel, shape(32), grid=(2, 2), in_specs=[block], out_specs=block)(X)


# --- the tests ---

each_bug = pytest.mark.parametrize("seeded", BUGS, ids=repr)


@each_bug
def test_bug_is_reported(seeded: Bug):
    with pytest.raises(CheckError) as caught:
        seeded.run(False)
    error, text = caught.value, str(caught.value)
    assert error.kind == seeded.kind, text
    if seeded.ref is not None:
        assert seeded.ref in text
    programs = [value for label, value in error.facts if label == "program"]
    assert next((p for p in programs if p), None) == seeded.program, text
    assert error.at.file.endswith("test_bugs.py"), text
    assert error.at.line == seeded.line, text


@each_bug
def test_fixed_kernel_is_clean(seeded: Bug):
    jax.block_until_ready(seeded.run(True))


def test_every_kind_is_seeded():
    options = {"orders", "machine"}  # how to run, not what to look for
    kinds = {f for f in pl.Checked.__dataclass_fields__} - options | {"check"}
    assert {b.kind for b in BUGS} == kinds
    assert len(BUGS) >= 20


def test_a_kind_can_be_switched_off():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 8 + 1, 8)]

    def run(**options):
        whole = pl.BlockSpec((32,), lambda i: (0,))
        checked = pl.Checked(**options)
        specs = {"in_specs": [whole], "out_specs": rows(8)}
        return call(kernel, shape(32), checked, grid=(4,), **specs)(X)

    with pytest.raises(CheckError):
        run()
    clamped = np.concatenate([X[1:25], X[24:32]])
    np.testing.assert_array_equal(run(bounds=False), clamped)


def test_sums_with_what_was_never_written_are_written_without_lines_too():
    kernel = parse_kernel(
        """
        kernel @sums(%x: ref<f32[8] any>, %o: ref<f32[8] any>) outputs 1 {
          %0: f32[8] = load %x[:]
          %1: f32[8] = load %o[:]
          %2: f32[8] = add %0, %1
          store %o[:] = %2
        }
        """
    )
    run_checked(kernel, [X[:8]], pl.Checked(uninitialised=False))
    with pytest.raises(CheckError, match="an undefined value is stored in an output"):
        run_checked(kernel, [X[:8]], pl.Checked())


def test_under_jit_the_report_comes_through_once(caplog):
    def kernel(x_ref, o_ref):
        o_ref[pl.ds(0, 16)] = x_ref[pl.ds(0, 16)]

    what = "elements of an output are never written"
    with pytest.raises(jax.errors.JaxRuntimeError, match=what) as raised:
        jax.block_until_ready(jax.jit(call(kernel, shape(32)))(X))
    assert caplog.text == ""
    assert str(raised.value).count(what) == 1
    assert "backends/interpret" not in str(raised.value)


def test_vmap_names_the_batch():
    def kernel(x_ref, o_ref):
        @pl.when(x_ref[0] < 2.0)
        def _():
            o_ref[...] = x_ref[...]

    add = call(kernel, shape(8), grid=(1,), in_specs=[rows(8)], out_specs=rows(8))
    x = jnp.arange(3.0)[:, None] * jnp.ones((3, 8))
    with pytest.raises(CheckError, match=r"8 of 24, first \(2, 0\)"):
        jax.vmap(add)(x)


def test_inner_pipeline_names_its_step():
    def inner(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0), 4)]

    def kernel(x_ref, o_ref):
        block = pl.BlockSpec((4,), lambda j: (j,))
        pltpu.emit_pipeline(inner, grid=(2,), in_specs=[block], out_specs=[block])(
            x_ref.at[pl.ds(pl.program_id(0) * 8, 8)],
            o_ref.at[pl.ds(pl.program_id(0) * 8, 8)],
        )

    specs = {"in_specs": [ANYWHERE], "out_specs": ANYWHERE}
    with pytest.raises(CheckError) as caught:
        call(kernel, shape(32), grid=(4,), **specs)(X)
    facts = dict(caught.value.facts)
    assert (facts["program"], facts["inner step"]) == ("i = 0", "i = 1")


def test_undefined_value_in_an_aliased_output_is_reported():
    def kernel(x_ref, o_ref, held_ref):
        o_ref[...] = x_ref[...] + held_ref[...]
        held_ref[...] = x_ref[...]

    with pytest.raises(CheckError, match=r"o_ref .output., f32.32.") as caught:
        call(
            kernel,
            shape(32),
            grid=(4,),
            in_specs=[rows(8)],
            out_specs=rows(8),
            scratch_shapes=[pltpu.VMEM((8,), F32)],
            input_output_aliases={0: 0},
        )(X)
    assert dict(caught.value.facts)["program"] == "i = 0"


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.float8_e4m3fn, jnp.bool_, jnp.uint8])
def test_small_types_and_empty_arrays_run(dtype):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    x = jnp.asarray(np.arange(12) % 2, dtype)
    specs = {"grid": (3,), "in_specs": [rows(5)], "out_specs": rows(5)}
    np.testing.assert_array_equal(call(kernel, shape(12, dtype=dtype), **specs)(x), x)
    assert call(kernel, shape(0, dtype=dtype))(x[:0]).shape == (0,)


def test_an_index_map_that_counts_elements():
    by_elements = pl.BlockSpec((8,), lambda i: (8 * i,))

    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    run = call(copy, shape(32), grid=4, in_specs=[by_elements], out_specs=rows(8))
    with pytest.raises(CheckError, match=r"block 8.*\n.*\n.*\n.*factor of 8"):
        run(X)
