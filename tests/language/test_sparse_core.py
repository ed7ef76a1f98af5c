"""SparseCore kernels in emulation: copies by row numbers, and what vectors do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite import tpu_sc as plsc
from pallasite.errors import KernelTypeError, SpecError

LANES = 8
MESH: dict[str, Any] = {"core_axis_name": "core", "subcore_axis_name": "subcore"}


def mesh(cores: int = 2, subcores: int = 4) -> plsc.VectorSubcoreMesh:
    return plsc.VectorSubcoreMesh(**MESH, num_cores=cores, num_subcores=subcores)


def worker() -> jax.Array:
    """This subcore's number among all of the 2 x 4."""
    return jax.lax.axis_index("core") * 4 + jax.lax.axis_index("subcore")


def embedding(table, numbers, **options):
    """Rows of a table by their numbers: each subcore fetches its share."""
    n, width = numbers.shape[0], table.shape[1]
    share = n // 8

    def kernel(table_ref, numbers_ref, o_ref, own_ref, rows_ref, semaphore):
        mine = pl.ds(worker() * share, share)
        pltpu.sync_copy(numbers_ref.at[mine], own_ref)
        copy = pltpu.async_copy(table_ref.at[own_ref], rows_ref, semaphore)
        copy.wait()
        pltpu.sync_copy(rows_ref, o_ref.at[mine])

    return pl.kernel(
        kernel,
        jax.ShapeDtypeStruct((n, width), table.dtype),
        mesh=mesh(),
        scratch_shapes=[
            pltpu.VMEM((share,), jnp.int32),
            pltpu.VMEM((share, width), table.dtype),
            pltpu.SemaphoreType.DMA,
        ],
        **options,
    )(table, numbers)


def segment_sum(x, segments, count, lanes=LANES, **options):
    """Sums of rows by segment: each subcore makes those of its rows, on chip."""
    n, width = x.shape
    share = n // 8
    columns = [pl.ds(c, lanes) for c in range(0, width, lanes)]

    def kernel(x_ref, segments_ref, o_ref, own_ref, rows_ref, sums_ref):
        mine = pl.ds(worker() * share, share)
        pltpu.sync_copy(segments_ref.at[mine], own_ref)
        pltpu.sync_copy(x_ref.at[mine], rows_ref)
        lane = jax.lax.broadcasted_iota(jnp.int32, (lanes,), 0)

        @plsc.parallel_loop(0, count)
        def _(segment):
            for column in columns:
                sums_ref[segment, column] = jnp.zeros((lanes,), x.dtype)

        @plsc.parallel_loop(0, share)
        def _(row):
            segment = plsc.load_gather(own_ref, [jnp.full((lanes,), row)])
            for column in columns:
                places = [segment, lane + column.start]
                plsc.addupdate_scatter(sums_ref, places, rows_ref[row, column])

        pltpu.sync_copy(sums_ref, o_ref.at[worker()])

    partial_sums = pl.kernel(
        kernel,
        jax.ShapeDtypeStruct((8, count, width), x.dtype),
        mesh=mesh(),
        scratch_shapes=[
            pltpu.VMEM((share,), jnp.int32),
            pltpu.VMEM((share, width), x.dtype),
            pltpu.VMEM((count, width), x.dtype),
        ],
        **options,
    )(x, segments)
    return partial_sums.sum(axis=0)


@pytest.mark.parametrize("interpret", [True, pl.Checked()], ids=["emulated", "checked"])
def test_embedding_gather(interpret):
    table = jax.random.normal(jax.random.key(0), (40, 16))
    numbers = jax.random.randint(jax.random.key(1), (64,), 0, 40)
    got = embedding(table, numbers, interpret=interpret)
    np.testing.assert_array_equal(got, table[numbers])


@pytest.mark.parametrize("interpret", [True, pl.Checked()], ids=["emulated", "checked"])
def test_segment_sum(interpret):
    x = jax.random.normal(jax.random.key(0), (64, 16))
    segments = jax.random.randint(jax.random.key(1), (64,), 0, 10)
    got = segment_sum(x, segments, 10, interpret=interpret)
    wanted = jax.ops.segment_sum(x, segments, 10)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_rows_are_added_to():
    def kernel(x_ref, numbers_ref, _, o_ref, own_ref, rows_ref, semaphore):
        pltpu.sync_copy(numbers_ref, own_ref)
        pltpu.sync_copy(x_ref, rows_ref)
        pltpu.async_copy(rows_ref, o_ref.at[own_ref], semaphore, add=True).wait()

    x, numbers = jnp.arange(32.0).reshape(4, 8), jnp.array([2, 0, 2, 2])
    got = pl.kernel(
        kernel,
        jax.ShapeDtypeStruct((3, 8), x.dtype),
        mesh=mesh(1, 1),
        scratch_shapes=[
            pltpu.VMEM((4,), jnp.int32),
            pltpu.VMEM((4, 8), x.dtype),
            pltpu.SemaphoreType.DMA,
        ],
        input_output_aliases={2: 0},
        interpret=True,
    )(x, numbers, jnp.ones((3, 8)))
    np.testing.assert_array_equal(got, 1 + jax.ops.segment_sum(x, numbers, 3))


def test_rows_are_scattered_without_sums():
    def kernel(x_ref, numbers_ref, o_ref, own_ref, rows_ref):
        pltpu.sync_copy(numbers_ref, own_ref)
        pltpu.sync_copy(x_ref, rows_ref)
        pltpu.sync_copy(rows_ref, o_ref.at[own_ref])

    x, numbers = jnp.arange(32.0).reshape(4, 8), jnp.array([3, 0, 2, 1])
    got = pl.kernel(
        kernel,
        jax.ShapeDtypeStruct((4, 8), x.dtype),
        mesh=mesh(1, 1),
        scratch_shapes=[pltpu.VMEM((4,), jnp.int32), pltpu.VMEM((4, 8), x.dtype)],
        interpret=True,
    )(x, numbers)
    np.testing.assert_array_equal(got, x[jnp.argsort(numbers)])


def test_rows_are_picked_on_one_side():
    def kernel(x_ref, numbers_ref, o_ref, own_ref):
        pltpu.sync_copy(numbers_ref, own_ref)
        pltpu.sync_copy(x_ref.at[own_ref], o_ref.at[own_ref])

    call = pl.kernel(
        kernel,
        jax.ShapeDtypeStruct((4, 8), jnp.float32),
        mesh=mesh(1, 1),
        scratch_shapes=[pltpu.VMEM((4,), jnp.int32)],
        interpret=True,
    )
    with pytest.raises(
        KernelTypeError, match="can index rows of its source or its destination"
    ):
        call(jnp.zeros((4, 8)), jnp.arange(4))


def run(function, *arrays):
    """A function of vectors on one subcore, from vector memory to vector memory."""
    types = jax.eval_shape(function, *arrays)
    leaves, tree = jax.tree.flatten(types)
    shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in leaves]

    def kernel(*refs):
        given, results = refs[: len(arrays)], refs[len(arrays) :]
        made = function(*(ref[...] for ref in given))
        for ref, value in zip(results, jax.tree.leaves(made), strict=True):
            ref[...] = value

    made = pl.kernel(kernel, shapes, mesh=mesh(1, 1), interpret=True)(*arrays)
    return jax.tree.unflatten(tree, made)


X = jnp.array([3, 1, 3, 2, 1, 3, 0, 7], jnp.int32)
MASK = jnp.array([0, 1, 0, 1, 1, 1, 0, 1], bool)


def test_scans_skip_what_is_masked():
    got = run(lambda x, m: plsc.cumsum(x, mask=m), X, MASK)
    np.testing.assert_array_equal(got, [0, 1, 1, 3, 4, 7, 7, 14])
    got = run(lambda x, m: plsc.cummax(x, mask=m), X, MASK)
    np.testing.assert_array_equal(got, [3, 1, 1, 2, 2, 3, 3, 7])
    got = run(lambda x, m: plsc.cummin(x, mask=m), X, MASK)
    np.testing.assert_array_equal(got, [3, 1, 1, 1, 1, 1, 1, 1])


def test_masked_elements_are_sorted_last():
    values = jnp.arange(8, dtype=jnp.float32)
    keys, sorted_values, mask = run(
        lambda k, v, m: plsc.sort_key_val(k, v, mask=m, descending=True),
        X,
        values,
        MASK,
    )
    np.testing.assert_array_equal(keys[:5], [7, 3, 2, 1, 1])
    np.testing.assert_array_equal(sorted_values[:5], [7, 5, 3, 1, 4])
    np.testing.assert_array_equal(mask, [1] * 5 + [0] * 3)


def test_duplicates_are_counted():
    counts, last = run(plsc.scan_count, X)
    np.testing.assert_array_equal(counts, [1, 1, 2, 1, 2, 3, 1, 1])
    np.testing.assert_array_equal(last, [0, 0, 0, 1, 1, 1, 1, 1])


def test_masks_are_counted():
    got = run(
        lambda m: (plsc.all_reduce_population_count(m), plsc.all_reduce_ffs(m)), MASK
    )
    np.testing.assert_array_equal(got[0], [5] * 8)
    np.testing.assert_array_equal(got[1], [1] * 8)


@pytest.mark.parametrize("format", plsc.PackFormat)
def test_packed_vectors_come_back(format):
    a, b = jnp.arange(8.0), jnp.arange(8.0) + 8
    packed = run(lambda a, b: plsc.pack(a, b, format=format), a, b)
    assert packed.dtype == jnp.bfloat16
    back = run(lambda ab: plsc.unpack(ab, format=format), packed)
    np.testing.assert_array_equal(back[0], a)
    np.testing.assert_array_equal(back[1], b)


def test_elements_by_index():
    """Gathers and scatters with masks, additions of duplicates, compressed stores."""

    def kernel(x_ref, o_ref, sum_ref, dense_ref, table, sums, dense):
        pltpu.sync_copy(x_ref, table)
        numbers = table[...] % 8

        @plsc.parallel_loop(0, 8, step=8)
        def _(i):
            sums[pl.ds(i, 8)] = jnp.zeros((8,), jnp.int32)
            dense[pl.ds(i, 8)] = jnp.full((8,), -1, jnp.int32)

        plsc.addupdate_scatter(sums, [numbers], jnp.ones((8,), jnp.int32))
        plsc.store_compressed(dense, numbers, mask=numbers > 1)
        table[...] = plsc.load_gather(table, [numbers], mask=numbers > 0)
        for source, target in ((table, o_ref), (sums, sum_ref), (dense, dense_ref)):
            pltpu.sync_copy(source, target)

    vector = jax.ShapeDtypeStruct((8,), jnp.int32)
    got, sums, dense = pl.kernel(
        kernel,
        [vector] * 3,
        mesh=mesh(1, 1),
        scratch_shapes=[pltpu.VMEM((8,), jnp.int32)] * 3,
        interpret=True,
    )(X)
    np.testing.assert_array_equal(got, jnp.where(X > 0, X[X], 0))
    np.testing.assert_array_equal(sums, np.bincount(X, minlength=8))
    np.testing.assert_array_equal(dense, [3, 3, 2, 3, 7, -1, -1, -1])


def test_a_mesh_has_what_the_chip_has():
    with config.override(target="v6e"):
        whole = plsc.VectorSubcoreMesh(**MESH)
        assert dict(whole.shape) == {"core": 2, "subcore": 16}
        assert plsc.ScalarSubcoreMesh(axis_name="core").num_cores == 2
        with pytest.raises(SpecError, match="2 SparseCores, not 3"):
            mesh(cores=3)
    with (
        config.override(target="v5e"),
        pytest.raises(SpecError, match="no SparseCores"),
    ):
        mesh()
