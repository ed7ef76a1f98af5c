"""Blocks that copies of the kernel move: subclasses of BufferedRef, reordered refs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import SpecError
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.cuda import host
from tests.backends.triton.harness import simulated

S = jax.ShapeDtypeStruct
f32 = jnp.float32
X = np.arange(6 * 128, dtype=np.float32).reshape(6, 128)
HBM = pl.BlockSpec(memory_space=pltpu.HBM)
SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
TWO_ROWS = pl.BlockSpec((2, 128), lambda i: (i, 0))
MODES = pytest.mark.parametrize(
    "mode", [False, True, pl.Checked()], ids=["cpu", "emulated", "checked"]
)


def call(kernel, shape, *args, **kw):
    options = dict(in_specs=[HBM] * len(args), out_specs=HBM, **kw)
    return pl.pallas_call(kernel, out_shape=S(shape, f32), **options)(*args)


# --- subclasses ---


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Paged(pltpu.BufferedRef):
    """Blocks whose rows a table places anywhere in main memory."""

    rows: int = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def create(cls, spec, dtype_or_type, buffer_type, buffer_count, rows):
        plain = pltpu.BufferedRef.create(
            spec, dtype_or_type, buffer_type, buffer_count, grid_rank=1
        )
        names = [f.name for f in dataclasses.fields(pltpu.BufferedRef)]
        return cls(rows=rows, **{name: getattr(plain, name) for name in names})

    def _copies(self, memory, indices, slot, sems, into_window):
        ref, table_ref = memory
        for row in range(self.rows):
            place = table_ref[indices[0] * self.rows + row]
            ends = ref.at[pl.ds(place, 1)], self.window_ref.at[slot, pl.ds(row, 1)]
            ends = ends if into_window else ends[::-1]
            yield pltpu.make_async_copy(*ends, sems.at[slot])

    def copy_in(self, src_ref, grid_indices):
        slot = self.current_copy_in_slot
        for copy in self._copies(src_ref, grid_indices, slot, self.sem_recvs, True):
            copy.start()

    def wait_in(self, src_ref, grid_indices):
        slot = self.current_wait_in_slot
        for copy in self._copies(src_ref, grid_indices, slot, self.sem_recvs, True):
            copy.wait()

    def copy_out(self, dst_ref, grid_indices):
        slot = self.current_copy_out_slot
        for copy in self._copies(dst_ref, grid_indices, slot, self.sem_sends, False):
            copy.start()

    def wait_out(self, dst_ref, grid_indices):
        slot = self.current_wait_out_slot
        for copy in self._copies(dst_ref, grid_indices, slot, self.sem_sends, False):
            copy.wait()


TABLE = np.array([4, 0, 5, 2, 1, 3], np.int32)


@MODES
@pytest.mark.parametrize("placed", ["scoped", "scratch", "by the pipeline"])
def test_a_subclass_moves_its_blocks_itself(mode, placed):
    """Rows are gathered by one table and scattered by the same: each comes back."""
    blocks = (
        Paged.input(TWO_ROWS, f32, buffer_count=2, rows=2),
        pltpu.BufferedRef.input(TWO_ROWS, f32),
        Paged.output(TWO_ROWS, f32, buffer_count=3, rows=2),
    )

    def kernel(x_ref, table_ref, y_ref, o_ref, *scratch):
        def run(allocations):
            def step(x_ref, y_ref, o_ref):
                o_ref[...] = 10 * x_ref[...] + y_ref[...] + pl.program_id(0)

            pltpu.emit_pipeline(step, grid=(3,))(
                (x_ref, table_ref), y_ref, (o_ref, table_ref), allocations=allocations
            )

        if placed == "scoped":
            pl.run_scoped(run, blocks)
        else:
            run(scratch[0] if scratch else blocks)

    specs = dict(in_specs=[HBM, SMEM, HBM], out_specs=HBM, interpret=mode)
    if placed == "scratch":
        specs["scratch_shapes"] = [blocks]
    got = pl.pallas_call(kernel, out_shape=S(X.shape, f32), **specs)(X, TABLE, X)
    step = np.arange(6)[:, None] // 2
    expected = np.empty_like(X)
    expected[TABLE] = 10 * X[TABLE] + X + step
    np.testing.assert_array_equal(got, expected)


class Plain(pltpu.BufferedRef):
    """Neither a dataclass of its own nor registered as a pytree."""


@dataclasses.dataclass(frozen=True)
class Doubling(pltpu.BufferedRef):
    """A dataclass with a field of its own, not registered as a pytree."""

    factor: int = dataclasses.field(default=2, metadata=dict(static=True))

    def wait_in(self, src_ref, grid_indices):
        super().wait_in(src_ref, grid_indices)
        block_ref = self.current_ref
        block_ref[...] = self.factor * block_ref[...]


@MODES
@pytest.mark.parametrize("placed", ["scoped", "scratch"])
@pytest.mark.parametrize(("kind", "factor"), [(Plain, 1), (Doubling, 2)])
def test_a_subclass_need_not_be_registered(mode, placed, kind, factor):
    blocks = (kind.input(TWO_ROWS, f32), pltpu.BufferedRef.output(TWO_ROWS, f32))

    def kernel(x_ref, o_ref, *scratch):
        def run(allocations):
            assert isinstance(allocations[0], kind)

            def step(x_ref, o_ref):
                o_ref[...] = x_ref[...] + pl.program_id(0)

            pltpu.emit_pipeline(step, grid=(3,))(x_ref, o_ref, allocations=allocations)

        run(scratch[0]) if scratch else pl.run_scoped(run, blocks)

    scratch_shapes = [blocks] if placed == "scratch" else []
    got = call(kernel, X.shape, X, scratch_shapes=scratch_shapes, interpret=mode)
    np.testing.assert_array_equal(got, factor * X + np.arange(6)[:, None] // 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noting(pltpu.BufferedRef):
    """Only a subclass: it moves blocks as they always do."""


@MODES
def test_blocks_move_only_when_they_change(mode):
    """Two steps add to each block before it goes back, and blocks come first."""

    def kernel(x_ref, before_ref, o_ref):
        def step(x_ref, o_ref):
            o_ref[...] += x_ref[...]

        revisited = pl.BlockSpec((2, 128), lambda i, j: (i, 0))
        column = pl.BlockSpec((2, 128), lambda i, j: (j, 0))
        blocks = [
            Noting.input(column, f32, buffer_count=1),
            Noting.input_output(revisited, f32, buffer_count=2),
        ]
        pltpu.emit_pipeline(step, grid=(3, 2))(x_ref, o_ref, allocations=blocks)

    before = jnp.asarray(1000 * X)
    got = call(kernel, X.shape, X, before, input_output_aliases={1: 0}, interpret=mode)
    total = np.tile(X[0:2] + X[2:4], (3, 1))
    np.testing.assert_array_equal(got, 1000 * X + total)


@MODES
def test_copied_blocks_end_where_the_array_ends(mode):
    rows, columns = 5, 131
    x = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    tile = pl.BlockSpec((2, 128), lambda i, j: (i, j))

    def kernel(x_ref, o_ref):
        def step(x_ref, o_ref):
            o_ref[...] = 3 * x_ref[...]

        blocks = [
            Noting.input(tile, f32, buffer_count=2),
            Noting.output(tile, f32, buffer_count=2),
        ]
        pltpu.emit_pipeline(step, grid=(3, 2))(x_ref, o_ref, allocations=blocks)

    got = call(kernel, x.shape, x, interpret=mode)
    np.testing.assert_array_equal(got, 3 * x)


@MODES
def test_blocks_of_one_dimension_and_squeezed_ones(mode):
    def kernel(x_ref, o_ref):
        def step(x_ref, o_ref):
            assert x_ref.shape == o_ref.shape == (128,)
            o_ref[...] = x_ref[...] + 1

        row = pl.BlockSpec((None, 128), lambda i: (i, 0))
        blocks = [
            Noting.input(row, f32, buffer_count=2),
            Noting.output(row, f32, buffer_count=2),
        ]
        assert blocks[0].window_ref.shape == (256,)
        pltpu.emit_pipeline(step, grid=(6,))(x_ref, o_ref, allocations=blocks)

    np.testing.assert_array_equal(call(kernel, X.shape, X, interpret=mode), X + 1)


@MODES
@pytest.mark.parametrize("rows", [6, 5])
def test_cores_share_steps_that_copy(mode, rows):
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)
    row = pl.BlockSpec((1, 128), lambda i, j: (i, 0))

    @pl.kernel(out_type=S((rows, 128), f32), mesh=mesh, interpret=mode)
    def kernel(x_ref, o_ref):
        def step(x_ref, o_ref):
            @pl.when(pl.program_id(1) == 0)
            def _():
                o_ref[...] = jnp.zeros_like(o_ref)

            o_ref[...] += x_ref[...]

        blocks = [Noting.input(row, f32, 2), Noting.output(row, f32, 2)]
        pltpu.emit_pipeline(
            step,
            grid=(rows, 2),
            core_axis_name="core",
            dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
        )(x_ref, o_ref, allocations=blocks)

    np.testing.assert_array_equal(kernel(X[:rows]), 2 * X[:rows])


def test_what_a_buffered_ref_says_about_itself():
    made = pltpu.BufferedRef.input_output(TWO_ROWS, jnp.int8, buffer_count=3)
    assert (made.is_input, made.is_output, made.is_input_output) == (True, True, True)
    assert (made.buffer_count, made.window_ref.shape) == (3, (3, 2, 128))
    assert made.window_ref.dtype == jnp.int8
    assert made.sem_recvs.shape == made.sem_sends.shape == (3,)
    assert len(jax.tree.leaves(made)) == 3  # memory and semaphores
    assert made.with_spec(HBM).spec is HBM
    at_four = made.with_slot_index(copy_in_slot=jnp.uint32(4))
    assert at_four.current_copy_in_slot == 1
    assert at_four.advance_copy_in_slot().current_copy_in_slot == 2
    local = pltpu.BufferedRef.input(TWO_ROWS, f32, source_memory_space=pltpu.VMEM)
    assert not local.is_buffered
    assert jax.tree.leaves(local) == []
    assert isinstance(local, pltpu.BufferedRefBase)


def test_allocations_must_be_as_many_as_refs():
    def kernel(x_ref, o_ref):
        blocks = [pltpu.BufferedRef.input(TWO_ROWS, f32)]
        pltpu.emit_pipeline(lambda x_ref: None, grid=(3,))(
            x_ref, o_ref, allocations=blocks
        )

    with pytest.raises(SpecError, match="1 allocations for 2 refs"):
        call(kernel, X.shape, X)


# --- reshaped, transposed and bitcast refs ---


@MODES
def test_pipelines_over_reshaped_refs(mode):
    """Six rows of 128 as 24 rows of 32, cut so that the last block hangs over."""

    def kernel(x_ref, o_ref):
        def step(x_ref, o_ref):
            o_ref[...] = 2 * x_ref[...]

        rows = pl.BlockSpec((5, 32), lambda i: (i, 0))
        pltpu.emit_pipeline(step, grid=(5,), in_specs=[rows], out_specs=[rows])(
            x_ref.reshape(24, 32), o_ref.reshape(24, 32)
        )

    np.testing.assert_array_equal(call(kernel, X.shape, X, interpret=mode), 2 * X)


@MODES
def test_pipelines_over_transposed_refs(mode):
    def kernel(x_ref, o_ref):
        def step(x_ref, o_ref):
            o_ref[...] = x_ref[...] + pl.program_id(0)

        columns = pl.BlockSpec((32, 6), lambda i: (i, 0))
        pltpu.emit_pipeline(step, grid=(4,), in_specs=[columns], out_specs=[columns])(
            x_ref.transpose((1, 0)), o_ref
        )

    got = call(kernel, (128, 6), X, interpret=mode)
    np.testing.assert_array_equal(got, X.T + np.arange(128)[:, None] // 32)


@MODES
def test_pipelines_over_bitcast_refs(mode):
    """The words of floats, two rows at a time, and the same memory whole."""

    def kernel(x_ref, o_ref):
        def step(x_ref, whole_ref, o_ref):
            first = whole_ref[pl.ds(0, 1)]
            o_ref[...] = (x_ref[...] ^ jnp.int32(-(2**31))) + (first & 0)

        words = [ref.bitcast(jnp.int32) for ref in (x_ref, x_ref, o_ref)]
        pltpu.emit_pipeline(
            step, grid=(3,), in_specs=[TWO_ROWS, HBM], out_specs=TWO_ROWS
        )(*words)

    np.testing.assert_array_equal(call(kernel, X.shape, X, interpret=mode), -X)


@MODES
def test_fill_of_a_reshaped_ref(mode):
    def kernel(x_ref, o_ref):
        def step(x_ref, o_ref):
            o_ref[...] = jnp.sum(x_ref[...], axis=0, keepdims=True)

        rows = pl.BlockSpec((5, 32), lambda i: (i, 0), fill=1)
        out = pl.BlockSpec((1, 32), lambda i: (i, 0))
        pltpu.emit_pipeline(step, grid=(5,), in_specs=[rows], out_specs=[out])(
            x_ref.reshape(24, 32), o_ref
        )

    padded = np.concatenate([X.reshape(24, 32), np.ones((1, 32), np.float32)])
    expected = padded.reshape(5, 5, 32).sum(1)
    np.testing.assert_array_equal(call(kernel, (5, 32), X, interpret=mode), expected)


# --- on GPUs ---


def doubled_rows(x_ref, o_ref):
    """Blocks of reshaped refs; the last one hangs over."""

    def step(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...] + pl.program_id(0)

    rows = pl.BlockSpec((5, 32), lambda i: (i, 0))
    pltpu.emit_pipeline(step, grid=(5,), in_specs=[rows], out_specs=[rows])(
        x_ref.reshape(24, 32), o_ref.reshape(24, 32)
    )


def split_rows(x_ref, o_ref):
    """Blocks of three dimensions of a ref of two."""

    def step(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...] + pl.program_id(0)

    rows = pl.BlockSpec((2, 2, 64), lambda i: (i, 0, 0))
    pltpu.emit_pipeline(step, grid=(3,), in_specs=[rows], out_specs=[rows])(
        x_ref.reshape(6, 2, 64), o_ref.reshape(6, 2, 64)
    )


def turned(x_ref, o_ref):
    def step(x_ref, o_ref):
        o_ref[...] = x_ref[...].T + pl.program_id(0)

    rows = pl.BlockSpec((32, 6), lambda i: (i, 0))
    columns = pl.BlockSpec((6, 32), lambda i: (0, i))
    pltpu.emit_pipeline(step, grid=(4,), in_specs=[rows], out_specs=[columns])(
        x_ref.transpose((1, 0)), o_ref
    )


def negated(x_ref, o_ref):
    def step(x_ref, o_ref):
        o_ref[...] = x_ref[...] ^ jnp.int32(-(2**31))

    words = [ref.bitcast(jnp.int32) for ref in (x_ref, o_ref)]
    pltpu.emit_pipeline(step, grid=(3,), in_specs=[TWO_ROWS], out_specs=TWO_ROWS)(
        *words
    )


def without_blocks(x_ref, o_ref):
    """A pipeline that only counts; its steps index the refs themselves."""

    def step():
        rows = pl.ds(2 * pl.program_id(0), 2)
        o_ref[rows] = 3 * x_ref[rows]

    pltpu.emit_pipeline(step, grid=(3,))()


def own_copies(x_ref, o_ref):
    def run(block_ref, semaphore):
        @pl.loop(0, 3)
        def _(i):
            rows = pl.ds(2 * i, 2)
            pltpu.async_copy(x_ref.at[rows], block_ref, semaphore).wait()
            block_ref[...] = 2 * block_ref[...] + i.astype(f32)
            pltpu.async_copy(block_ref, o_ref.at[rows], semaphore).wait()

    pl.run_scoped(run, pltpu.VMEM((2, 128), f32), pltpu.SemaphoreType.DMA)


ON_GPUS = (doubled_rows, split_rows, turned, negated, without_blocks, own_copies)
BY_CUDA = (doubled_rows, turned, negated, own_copies)


def imported(kernel):
    (made,) = kernels_in(lambda x: call(kernel, X.shape, x), X)
    return made


@pytest.mark.parametrize("kernel", ON_GPUS, ids=lambda kernel: kernel.__name__)
def test_pipelines_through_triton(kernel):
    (got,) = simulated(run(imported(kernel)), [X])
    want = call(kernel, X.shape, X, interpret=True)
    np.testing.assert_array_equal(got.reshape(X.shape), want)


@pytest.mark.skipif(host.compiler() is None, reason="needs g++")
@pytest.mark.parametrize("kernel", BY_CUDA, ids=lambda kernel: kernel.__name__)
def test_pipelines_through_cuda(kernel, tmp_path):
    (got,) = host.run(imported(kernel), [X], tmp_path)
    want = call(kernel, X.shape, X, interpret=True)
    np.testing.assert_array_equal(np.asarray(got).reshape(X.shape), want)


# --- arguments of the body ---


@MODES
def test_none_among_specs_and_refs(mode):
    def kernel(x_ref, o_ref):
        def step(x_ref, bias_ref, pair, o_ref):
            assert bias_ref is None
            assert pair[0] is None
            o_ref[...] = x_ref[...] + pair[1][...]

        pltpu.emit_pipeline(
            step,
            grid=(3,),
            in_specs=[TWO_ROWS, None, (None, TWO_ROWS)],
            out_specs=TWO_ROWS,
        )(x_ref, None, (None, x_ref), o_ref)

    np.testing.assert_array_equal(call(kernel, X.shape, X, interpret=mode), 2 * X)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    count: Any
    tile: Any
    sem: Any


@MODES
def test_scratches_are_pytrees(mode):
    def kernel(x_ref, o_ref, scratch, sums):
        def step(x_ref, o_ref, scratch, sums):
            @pl.when(pl.program_id(0) == 0)
            def _():
                scratch.count[0] = 0
                sums["all"][...] = jnp.zeros_like(sums["all"])

            scratch.count[0] += 1
            pltpu.async_copy(x_ref, scratch.tile, scratch.sem).wait()
            sums["all"][...] += scratch.tile[...]
            o_ref[...] = sums["all"][...] + scratch.count[0]

        pltpu.emit_pipeline(step, grid=(3,), in_specs=[TWO_ROWS], out_specs=[TWO_ROWS])(
            x_ref, o_ref, scratches=[scratch, sums]
        )

    tile = pltpu.VMEM((2, 128), f32)
    memory = Scratch(pltpu.SMEM((1,), jnp.int32), tile, pltpu.SemaphoreType.DMA)
    got = call(
        kernel, X.shape, X, scratch_shapes=[memory, {"all": tile}], interpret=mode
    )
    sums = np.cumsum(X.reshape(3, 2, 128), 0) + np.arange(1, 4)[:, None, None]
    np.testing.assert_array_equal(got, sums.reshape(X.shape))


@MODES
def test_a_prologue_runs_before_each_step(mode):
    def kernel(x_ref, o_ref, row):
        def prologue():
            row[...] = jnp.full_like(row, pl.program_id(0))

        def step(x_ref, o_ref):
            o_ref[...] = x_ref[...] + row[...]

        pltpu.emit_pipeline(step, grid=(3,), in_specs=[TWO_ROWS], out_specs=[TWO_ROWS])(
            x_ref, o_ref, body_prologue=prologue
        )

    row = pltpu.VMEM((1, 128), f32)
    got = call(kernel, X.shape, X, scratch_shapes=[row], interpret=mode)
    np.testing.assert_array_equal(got, X + np.arange(6)[:, None] // 2)
