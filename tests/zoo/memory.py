"""Moving data: gathers, scatters, slices, views, copies, shared memory."""

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu

from .case import Family, integers, normal, permutation

zoo = Family("memory")


def copy_block_kernel(indices_ref, x_ref, o_ref):
    """The index map has chosen the block; the kernel only copies it."""
    o_ref[...] = x_ref[...]


@zoo.case(
    reference=lambda indices, x: x[indices],
    make_args=lambda rng: (integers(rng, 12, high=20), normal(rng, 20, 64)),
    tags="prefetch",
)
def gather_rows(indices, x, **call):
    return pl.pallas_call(
        copy_block_kernel,
        out_shape=jax.ShapeDtypeStruct((12, 64), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(12,),
            in_specs=[pl.BlockSpec((1, 64), lambda i, indices: (indices[i], 0))],
            out_specs=pl.BlockSpec((1, 64), lambda i, indices: (i, 0)),
        ),
        **call,
    )(indices, x)


def scatter_rows_kernel(indices_ref, updates_ref, destination_ref, o_ref):
    """Writes one row where the index map says; all other rows keep what they had."""
    o_ref[...] = updates_ref[...]


@zoo.case(
    reference=lambda indices, updates, destination: destination.at[indices].set(
        updates
    ),
    make_args=lambda rng: (
        permutation(rng, 20)[:12],
        normal(rng, 12, 64),
        normal(rng, 20, 64),
    ),
    tags="prefetch alias",
)
def scatter_rows(indices, updates, destination, **call):
    return pl.pallas_call(
        scatter_rows_kernel,
        out_shape=jax.ShapeDtypeStruct(destination.shape, destination.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(12,),
            in_specs=[
                pl.BlockSpec((1, 64), lambda i, indices: (i, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, 64), lambda i, indices: (indices[i], 0)),
        ),
        input_output_aliases={2: 0},
        **call,
    )(indices, updates, destination)


def window_kernel(start_ref, x_ref, o_ref):
    """A window of fixed size at a place known only at run time."""
    o_ref[...] = x_ref[pl.ds(start_ref[0], 16), pl.ds(start_ref[1], 32)]


@zoo.case(
    reference=lambda start, x: lax.dynamic_slice(x, (start[0], start[1]), (16, 32)),
    make_args=lambda rng: (integers(rng, 2, high=20), normal(rng, 40, 60)),
    tags="smem",
)
def dynamic_window(start, x, **call):
    return pl.pallas_call(
        window_kernel,
        out_shape=jax.ShapeDtypeStruct((16, 32), x.dtype),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.VMEM),
        ],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        **call,
    )(start, x)


def patch_kernel(start_ref, x_ref, patch_ref, o_ref):
    """Copies an image and puts a patch over it."""
    o_ref[...] = x_ref[...]
    o_ref[pl.ds(start_ref[0], 8), pl.ds(start_ref[1], 8)] += patch_ref[...]


def patch_reference(start, x, patch):
    where = (start[0], start[1])
    window = lax.dynamic_slice(x, where, patch.shape)
    return lax.dynamic_update_slice(x, window + patch, where)


@zoo.case(
    reference=patch_reference,
    make_args=lambda rng: (
        integers(rng, 2, high=16),
        normal(rng, 24, 32),
        normal(rng, 8, 8),
    ),
    tags="smem",
)
def dynamic_patch(start, x, patch, **call):
    return pl.pallas_call(
        patch_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(),
            pl.BlockSpec(),
        ],
        **call,
    )(start, x, patch)


def deinterleave_kernel(x_ref, even_ref, odd_ref):
    """Reads every second row."""
    half = x_ref.shape[0] // 2
    even_ref[...] = x_ref[pl.ds(0, half, stride=2), :]
    odd_ref[...] = x_ref[pl.ds(1, half, stride=2), :]


@zoo.case(
    reference=lambda x: (x[::2], x[1::2]),
    make_args=lambda rng: (normal(rng, 64, 40),),
)
def strided_load(x, **call):
    half = pl.BlockSpec((8, 40), lambda i: (i, 0))
    return pl.pallas_call(
        deinterleave_kernel,
        out_shape=(jax.ShapeDtypeStruct((32, 40), x.dtype),) * 2,
        grid=(4,),
        in_specs=[pl.BlockSpec((16, 40), lambda i: (i, 0))],
        out_specs=(half, half),
        **call,
    )(x)


def interleave_kernel(even_ref, odd_ref, o_ref):
    """Writes every second row, and every third column of those."""
    half = even_ref.shape[0]
    o_ref[...] = jnp.zeros_like(o_ref)
    o_ref[pl.ds(0, half, stride=2), pl.ds(0, 10, stride=3)] = even_ref[...]
    o_ref[pl.ds(1, half, stride=2), pl.ds(1, 10, stride=3)] = odd_ref[...]


def interleave_reference(even, odd):
    out = jnp.zeros((2 * even.shape[0], 30), even.dtype)
    return out.at[::2, ::3].set(even).at[1::2, 1::3].set(odd)


@zoo.case(
    reference=interleave_reference,
    make_args=lambda rng: (normal(rng, 32, 10), normal(rng, 32, 10)),
)
def strided_store(even, odd, **call):
    half = pl.BlockSpec((8, 10), lambda i: (i, 0))
    return pl.pallas_call(
        interleave_kernel,
        out_shape=jax.ShapeDtypeStruct((64, 30), even.dtype),
        grid=(4,),
        in_specs=[half, half],
        out_specs=pl.BlockSpec((16, 30), lambda i: (i, 0)),
        **call,
    )(even, odd)


def double_buffer_kernel(x_hbm_ref, o_ref, buffer_ref, semaphores):
    """Fetches the next chunk while it works on the present one."""
    chunks = x_hbm_ref.shape[0]

    def fetch(chunk, slot):
        return pltpu.make_async_copy(
            x_hbm_ref.at[chunk], buffer_ref.at[slot], semaphores.at[slot]
        )

    fetch(0, 0).start()

    def body(chunk, carry):
        slot = lax.rem(chunk, 2)

        @pl.when(chunk + 1 < chunks)
        def _():
            fetch(chunk + 1, 1 - slot).start()

        fetch(chunk, slot).wait()
        o_ref[chunk] = buffer_ref[slot] * buffer_ref[slot] + 1.0
        return carry

    lax.fori_loop(0, chunks, body, 0)


@zoo.case(
    reference=lambda x: x * x + 1.0,
    make_args=lambda rng: (normal(rng, 5, 8, 32),),
    tags="dma scratch",
)
def dma_double_buffer(x, **call):
    return pl.pallas_call(
        double_buffer_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[pltpu.VMEM((2, 8, 32), x.dtype), pltpu.SemaphoreType.DMA((2,))],
        **call,
    )(x)


def copy_out_kernel(x_ref, o_hbm_ref, staging_ref, semaphore):
    """Computes into a staging buffer and copies that out, two blocks on."""
    step, blocks = pl.program_id(0), pl.num_programs(0)
    rows = x_ref.shape[0]
    staging_ref[...] = jnp.exp(x_ref[...])
    target = lax.rem(step + 2, blocks) * rows
    copy = pltpu.make_async_copy(
        staging_ref, o_hbm_ref.at[pl.ds(target, rows), :], semaphore
    )
    copy.start()
    copy.wait()


@zoo.case(
    reference=lambda x: jnp.roll(jnp.exp(x), 16, axis=0),
    make_args=lambda rng: (normal(rng, 40, 32),),
    tags="dma scratch",
)
def dma_copy_out(x, **call):
    return pl.pallas_call(
        copy_out_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(5,),
        in_specs=[pl.BlockSpec((8, 32), lambda i: (i, 0))],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.VMEM((8, 32), x.dtype), pltpu.SemaphoreType.DMA],
        **call,
    )(x)


def dma_gather_kernel(indices_ref, table_hbm_ref, o_ref, semaphores):
    """Starts a copy for every row of the block, then waits for all of them."""
    first = pl.program_id(0) * o_ref.shape[0]

    def row_copy(row):
        source = table_hbm_ref.at[pl.ds(indices_ref[first + row], 1), :]
        return pltpu.make_async_copy(
            source, o_ref.at[pl.ds(row, 1), :], semaphores.at[row]
        )

    for row in range(o_ref.shape[0]):
        row_copy(row).start()
    for row in range(o_ref.shape[0]):
        row_copy(row).wait()


@zoo.case(
    reference=lambda indices, table: table[indices],
    make_args=lambda rng: (integers(rng, 12, high=30), normal(rng, 30, 16)),
    tags="dma prefetch",
    vmap_axes=(0, None),
)
def dma_gather(indices, table, **call):
    return pl.pallas_call(
        dma_gather_kernel,
        out_shape=jax.ShapeDtypeStruct((12, 16), table.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(3,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((4, 16), lambda i, indices: (i, 0)),
            scratch_shapes=[pltpu.SemaphoreType.DMA((4,))],
        ),
        **call,
    )(indices, table)


def sync_copy_kernel(x_hbm_ref, o_hbm_ref):
    """Blocking copies through a buffer that lives only as long as it is used."""

    def through(buffer_ref):
        pltpu.sync_copy(x_hbm_ref.at[pl.ds(8, 16)], buffer_ref)
        buffer_ref[...] = -buffer_ref[...]
        pltpu.sync_copy(buffer_ref, o_hbm_ref)

    pl.run_scoped(through, pltpu.VMEM((16, 32), jnp.float32))


@zoo.case(
    reference=lambda x: -x[8:24],
    make_args=lambda rng: (normal(rng, 32, 32),),
    tags="dma",
)
def dma_sync_copy(x, **call):
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        sync_copy_kernel,
        out_shape=jax.ShapeDtypeStruct((16, 32), x.dtype),
        in_specs=[anywhere],
        out_specs=anywhere,
        **call,
    )(x)


def semaphore_kernel(count_ref, o_ref, semaphore):
    """Counts up with signals, reads the counter, and waits it down to zero again."""

    def signal(step, carry):
        pl.semaphore_signal(semaphore, 2)
        return carry

    lax.fori_loop(0, count_ref[0], signal, 0)
    o_ref[0] = pl.semaphore_read(semaphore)
    pl.semaphore_wait(semaphore, 2 * count_ref[0])
    o_ref[1] = pl.semaphore_read(semaphore)


@zoo.case(
    reference=lambda count: jnp.stack([2 * count[0], jnp.zeros((), jnp.int32)]),
    make_args=lambda rng: (integers(rng, 1, low=1, high=6),),
    tags="dma int smem while nograd nofloat",
)
def semaphore_counter(count, **call):
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        semaphore_kernel,
        out_shape=jax.ShapeDtypeStruct((2,), jnp.int32),
        in_specs=[scalars],
        out_specs=scalars,
        scratch_shapes=[pltpu.SemaphoreType.REGULAR],
        **call,
    )(count)


def scale_in_place_kernel(x_ref, o_ref):
    """Doubles some blocks; the grid does not reach the others."""
    o_ref[...] = 2.0 * x_ref[...]


@zoo.case(
    reference=lambda x: x.at[16:48].multiply(2.0),
    make_args=lambda rng: (normal(rng, 64, 24),),
    tags="alias",
)
def alias_partial_update(x, **call):
    block = pl.BlockSpec((16, 24), lambda i: (i + 1, 0))
    return pl.pallas_call(
        scale_in_place_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(2,),
        in_specs=[block],
        out_specs=block,
        input_output_aliases={0: 0},
        **call,
    )(x)


def decayed_rows_kernel(x_ref, o_ref):
    """Adds half of the row above, which the program before has changed."""
    i = pl.program_id(0)

    @pl.when(i > 0)
    def _():
        o_ref[pl.ds(i, 1), :] += 0.5 * x_ref[pl.ds(i - 1, 1), :]


def decayed_rows_reference(x):
    rows = [x[0]]
    for row in x[1:]:
        rows.append(row + 0.5 * rows[-1])
    return jnp.stack(rows)


@zoo.case(
    reference=decayed_rows_reference,
    make_args=lambda rng: (normal(rng, 6, 24),),
    tags="alias",
)
def alias_neighbours(x, **call):
    whole = pl.BlockSpec(x.shape, lambda i: (0, 0))
    return pl.pallas_call(
        decayed_rows_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=x.shape[:1],
        in_specs=[whole],
        out_specs=whole,
        input_output_aliases={0: 0},
        **call,
    )(x)


def stored_operands_kernel(x_ref, y_ref, o_ref):
    """Uses its operands as scratch, also in later steps of the grid."""
    x_ref[...] += y_ref[...]
    y_ref[...] *= x_ref[...]
    o_ref[...] = y_ref[...]


def stored_operands_reference(x, y):
    first = (x + y) * y
    return jnp.stack([first, (x + y + first) * first])


@zoo.case(
    reference=stored_operands_reference,
    make_args=lambda rng: (normal(rng, 24, 16), normal(rng, 24, 16)),
)
def stored_operands(x, y, **call):
    rows = pl.BlockSpec((8, 16), lambda step, i: (i, 0))
    return pl.pallas_call(
        stored_operands_kernel,
        out_shape=jax.ShapeDtypeStruct((2, *x.shape), x.dtype),
        grid=(2, 3),
        in_specs=[rows, rows],
        out_specs=pl.BlockSpec((None, 8, 16), lambda step, i: (step, i, 0)),
        **call,
    )(x, y)


def residues_kernel(x_ref, o_ref):
    """Adds up what has the same remainder, in blocks that are visited in turn."""

    @pl.when(pl.program_id(0) < 3)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...]


@zoo.case(
    reference=lambda x: x.reshape(2, 24, 16).sum(0),
    make_args=lambda rng: (normal(rng, 48, 16),),
)
def sums_by_remainder(x, **call):
    return pl.pallas_call(
        residues_kernel,
        out_shape=jax.ShapeDtypeStruct((24, 16), x.dtype),
        grid=(6,),
        in_specs=[pl.BlockSpec((8, 16), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 16), lambda i: (i % 3, 0)),
        **call,
    )(x)


def momentum_kernel(grad_ref, momentum_ref, update_ref, new_momentum_ref):
    """The momentum is updated in place, the update is a new array."""
    momentum = 0.9 * momentum_ref[...] + grad_ref[...].astype(jnp.float32)
    new_momentum_ref[...] = momentum
    update_ref[...] = (-0.1 * momentum).astype(update_ref.dtype)


def momentum_reference(grad, momentum):
    momentum = 0.9 * momentum + grad.astype(jnp.float32)
    return (-0.1 * momentum).astype(jnp.bfloat16), momentum


@zoo.case(
    reference=momentum_reference,
    make_args=lambda rng: (
        normal(rng, 20, 32, dtype=jnp.bfloat16),
        normal(rng, 20, 32),
    ),
    tags="alias bf16 odd",
    rtol=1e-2,
    atol=1e-2,
)
def alias_one_of_two(grad, momentum, **call):
    rows = pl.BlockSpec((8, 32), lambda i: (i, 0))
    return pl.pallas_call(
        momentum_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(grad.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(momentum.shape, jnp.float32),
        ),
        grid=(3,),
        in_specs=[rows, rows],
        out_specs=(rows, rows),
        input_output_aliases={1: 1},
        **call,
    )(grad, momentum)


def kv_cache_kernel(positions_ref, new_ref, cache_ref, o_ref):
    """Puts the newest keys of one sequence into its cache."""
    o_ref[...] = new_ref[...]


def kv_cache_reference(positions, new, cache):
    return cache.at[jnp.arange(new.shape[0]), positions].set(new[:, 0])


@zoo.case(
    reference=kv_cache_reference,
    make_args=lambda rng: (
        integers(rng, 4, high=16),
        normal(rng, 4, 1, 24),
        normal(rng, 4, 16, 24),
    ),
    tags="prefetch alias",
)
def kv_cache_update(positions, new, cache, **call):
    batch, _, width = new.shape
    return pl.pallas_call(
        kv_cache_kernel,
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch,),
            in_specs=[
                pl.BlockSpec((None, 1, width), lambda b, positions: (b, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(
                (None, 1, width), lambda b, positions: (b, positions[b], 0)
            ),
        ),
        input_output_aliases={2: 0},
        **call,
    )(positions, new, cache)


def transpose_kernel(x_ref, o_ref):
    """Transposes one tile; the index maps transpose the order of the tiles."""
    o_ref[...] = x_ref[...].T


@zoo.case(
    reference=lambda x: x.T,
    make_args=lambda rng: (normal(rng, 36, 50),),
    tags="odd",
)
def transpose_tiles(x, **call):
    rows, columns = x.shape
    return pl.pallas_call(
        transpose_kernel,
        out_shape=jax.ShapeDtypeStruct((columns, rows), x.dtype),
        grid=(pl.cdiv(rows, 16), pl.cdiv(columns, 16)),
        in_specs=[pl.BlockSpec((16, 16), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((16, 16), lambda i, j: (j, i)),
        **call,
    )(x)


def permute_kernel(x_ref, o_ref):
    """Moves the last axis of a block to the front."""
    o_ref[...] = jnp.transpose(x_ref[...], (2, 0, 1))


@zoo.case(
    reference=lambda x: jnp.transpose(x, (2, 0, 1)),
    make_args=lambda rng: (integers(rng, 8, 12, 16, dtype=jnp.int16),),
    tags="int nograd nofloat",
)
def permute_axes(x, **call):
    return pl.pallas_call(
        permute_kernel,
        out_shape=jax.ShapeDtypeStruct((16, 8, 12), x.dtype),
        grid=(2, 3, 2),
        in_specs=[pl.BlockSpec((4, 4, 8), lambda i, j, k: (i, j, k))],
        out_specs=pl.BlockSpec((8, 4, 4), lambda i, j, k: (k, i, j)),
        **call,
    )(x)


def patchify_kernel(image_ref, o_ref, *, patch=4):
    """Cuts a band of an image into square patches, each a row of numbers."""
    _, width, channels = image_ref.shape
    patches = image_ref[...].reshape(patch, width // patch, patch, channels)
    patches = patches.transpose(1, 0, 2, 3)
    o_ref[...] = patches.reshape(width // patch, patch * patch * channels)


def patchify_reference(image):
    patches = image.reshape(4, 4, 6, 4, 3).transpose(0, 2, 1, 3, 4)
    return patches.reshape(24, 48)


@zoo.case(reference=patchify_reference, make_args=lambda rng: (normal(rng, 16, 24, 3),))
def patchify(image, **call):
    return pl.pallas_call(
        patchify_kernel,
        out_shape=jax.ShapeDtypeStruct((24, 48), image.dtype),
        grid=(4,),
        in_specs=[pl.BlockSpec((4, 24, 3), lambda i: (i, 0, 0))],
        out_specs=pl.BlockSpec((6, 48), lambda i: (i, 0)),
        **call,
    )(image)


def views_kernel(x_ref, o_ref, bits_ref):
    """One memory seen as another shape, and as another type."""
    pairs_ref = x_ref.reshape(8, 2, 16)
    o_ref[...] = pairs_ref[:, 0, :] - pairs_ref[:, 1, :]
    bits_ref[...] = x_ref.bitcast(jnp.int32)[...] >> 23


def views_reference(x):
    pairs = x.reshape(8, 2, 16)
    return pairs[:, 0] - pairs[:, 1], lax.bitcast_convert_type(x, jnp.int32) >> 23


@zoo.case(
    reference=views_reference,
    make_args=lambda rng: (normal(rng, 16, 16),),
    tags="int nograd",
)
def reshape_bitcast_views(x, **call):
    return pl.pallas_call(
        views_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((8, 16), x.dtype),
            jax.ShapeDtypeStruct((16, 16), jnp.int32),
        ),
        **call,
    )(x)


def narrowed_view_kernel(x_ref, o_ref):
    """A view of a view: part of the rows, then part of the columns of those."""
    band_ref = x_ref.at[pl.ds(pl.program_id(0) * 8, 8)]
    o_ref[...] = band_ref.at[:, pl.ds(4, 8)][...] + band_ref[:, 20:28]


@zoo.case(
    reference=lambda x: x[:, 4:12] + x[:, 20:28],
    make_args=lambda rng: (normal(rng, 24, 32),),
)
def nested_views(x, **call):
    return pl.pallas_call(
        narrowed_view_kernel,
        out_shape=jax.ShapeDtypeStruct((24, 8), x.dtype),
        grid=(3,),
        in_specs=[pl.BlockSpec((24, 32), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((8, 8), lambda i: (i, 0)),
        **call,
    )(x)


def array_index_kernel(ids_ref, table_ref, o_ref):
    """Gathers rows with a vector of indices."""
    o_ref[...] = table_ref[ids_ref[...], :]


@zoo.case(
    reference=lambda ids, table: table[ids],
    make_args=lambda rng: (integers(rng, 32, high=50), normal(rng, 50, 24)),
    vmap_axes=(0, None),
)
def gather_array_index(ids, table, **call):
    return pl.pallas_call(
        array_index_kernel,
        out_shape=jax.ShapeDtypeStruct((32, 24), table.dtype),
        grid=(4,),
        in_specs=[
            pl.BlockSpec((8,), lambda i: (i,)),
            pl.BlockSpec((50, 24), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((8, 24), lambda i: (i, 0)),
        **call,
    )(ids, table)


def inverse_permutation_kernel(order_ref, o_ref):
    """Scatters by a vector of indices; together all places are written once."""
    size = order_ref.shape[0]
    start = pl.program_id(0) * size
    o_ref[order_ref[...]] = start + lax.iota(jnp.int32, size)


@zoo.case(
    reference=jnp.argsort,
    make_args=lambda rng: (permutation(rng, 48),),
    tags="int nograd nofloat",
)
def scatter_array_index(order, **call):
    return pl.pallas_call(
        inverse_permutation_kernel,
        out_shape=jax.ShapeDtypeStruct(order.shape, order.dtype),
        grid=(4,),
        in_specs=[pl.BlockSpec((12,), lambda i: (i,))],
        out_specs=pl.BlockSpec((48,), lambda i: (0,)),
        **call,
    )(order)


def embedding_kernel(tokens_ref, table_ref, position_ref, o_ref):
    """Looks up one row per token in a loop, and adds the position."""
    rows = o_ref.shape[0]
    start = pl.program_id(0) * rows

    def body(row, carry):
        here = pl.ds(row, 1)
        token = tokens_ref[start + row]
        o_ref[here, :] = table_ref[pl.ds(token, 1), :] + position_ref[here, :]
        return carry

    lax.fori_loop(0, rows, body, 0)


@zoo.case(
    reference=lambda tokens, table, position: table[tokens] + position,
    make_args=lambda rng: (
        integers(rng, 24, high=40),
        normal(rng, 40, 16),
        normal(rng, 24, 16),
    ),
    tags="prefetch",
    vmap_axes=(0, None, None),
)
def embedding_lookup(tokens, table, position, **call):
    rows = pl.BlockSpec((8, 16), lambda i, tokens: (i, 0))
    return pl.pallas_call(
        embedding_kernel,
        out_shape=jax.ShapeDtypeStruct((24, 16), table.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(3,),
            in_specs=[pl.BlockSpec((40, 16), lambda i, tokens: (0, 0)), rows],
            out_specs=rows,
        ),
        **call,
    )(tokens, table, position)


def masked_offsets_kernel(x_ref, y_ref, o_ref, *, block=64):
    """No block specs at all: offsets and a mask, as one writes it for a GPU."""
    offsets = pl.program_id(0) * block + lax.iota(jnp.int32, block)
    inside = offsets < o_ref.shape[0]
    x = pl.load(x_ref, (offsets,), mask=inside, other=0.0)
    y = pl.load(y_ref, (offsets,), mask=inside, other=0.0)
    pl.store(o_ref, (offsets,), x * y, mask=inside)


@zoo.case(
    reference=jnp.multiply,
    make_args=lambda rng: (normal(rng, 150), normal(rng, 150)),
    tags="masked odd",
)
def masked_offsets(x, y, **call):
    return pl.pallas_call(
        masked_offsets_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.size, 64),),
        **call,
    )(x, y)


def masked_tile_kernel(keep_ref, x_ref, o_ref):
    """Takes `other` where the mask is off, and writes only where it is on."""
    rows = pl.ds(pl.program_id(0) * 8, 8)
    keep = pl.load(keep_ref, (rows, slice(None)))
    x = pl.load(x_ref, (rows, slice(None)), mask=keep, other=-1.0)
    o_ref[rows, :] = x
    pl.store(o_ref, (rows, slice(None)), 10.0 * x, mask=x > 0.5)


def masked_tile_reference(keep, x):
    x = jnp.where(keep, x, -1.0)
    return jnp.where(x > 0.5, 10.0 * x, x)


@zoo.case(
    reference=masked_tile_reference,
    make_args=lambda rng: (normal(rng, 16, 24) > 0.0, normal(rng, 16, 24)),
    tags="masked bool",
)
def masked_tile(keep, x, **call):
    return pl.pallas_call(
        masked_tile_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(2,),
        **call,
    )(keep, x)


def rotate_kernel(x_ref, o_ref, held_ref):
    """Swaps each block with the one held back: the output is delayed by one block."""

    @pl.when(pl.program_id(0) == 0)
    def start():
        held_ref[...] = jnp.zeros_like(held_ref)

    o_ref[...] = pl.swap(held_ref, (slice(None), slice(None)), x_ref[...])


@zoo.case(
    reference=lambda x: jnp.concatenate([jnp.zeros_like(x[:8]), x[:-8]]),
    make_args=lambda rng: (normal(rng, 32, 16),),
    tags="scratch masked",
)
def swap_delay_line(x, **call):
    rows = pl.BlockSpec((8, 16), lambda i: (i, 0))
    return pl.pallas_call(
        rotate_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(4,),
        in_specs=[rows],
        out_specs=rows,
        scratch_shapes=[pltpu.VMEM((8, 16), x.dtype)],
        **call,
    )(x)


def concatenate_kernel(first_ref, second_ref, o_ref, *, split):
    """Takes each block from the one array or the other."""

    @pl.when(pl.program_id(0) < split)
    def _():
        o_ref[...] = first_ref[...]

    @pl.when(pl.program_id(0) >= split)
    def _():
        o_ref[...] = second_ref[...]


@zoo.case(
    reference=lambda first, second: jnp.concatenate([first, second]),
    make_args=lambda rng: (normal(rng, 16, 12), normal(rng, 24, 12)),
    vmap_axes=(0, None),
)
def concatenate_blocks(first, second, **call):
    """The array whose turn it is not rests on its nearest block."""
    return pl.pallas_call(
        lambda *refs: concatenate_kernel(*refs, split=2),
        out_shape=jax.ShapeDtypeStruct((40, 12), first.dtype),
        grid=(5,),
        in_specs=[
            pl.BlockSpec((8, 12), lambda i: (jnp.minimum(i, 1), 0)),
            pl.BlockSpec((8, 12), lambda i: (jnp.maximum(i - 2, 0), 0)),
        ],
        out_specs=pl.BlockSpec((8, 12), lambda i: (i, 0)),
        **call,
    )(first, second)


def reverse_kernel(x_ref, o_ref):
    """Reverses a block; the index map takes the blocks from the end."""
    o_ref[...] = jnp.flip(x_ref[...], axis=0)


@zoo.case(
    reference=lambda x: x[::-1],
    make_args=lambda rng: (normal(rng, 40, 6),),
)
def reverse_rows(x, **call):
    blocks = x.shape[0] // 8
    return pl.pallas_call(
        reverse_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(blocks,),
        in_specs=[pl.BlockSpec((8, 6), lambda i: (blocks - 1 - i, 0))],
        out_specs=pl.BlockSpec((8, 6), lambda i: (i, 0)),
        **call,
    )(x)


def scale_by_group_kernel(x_ref, scales_ref, offsets_ref, o_ref):
    """Each block of rows has one row of scales, and each row one offset."""
    rows, columns = x_ref.shape
    scales = scales_ref[pl.ds(pl.program_id(0), rows, stride=0)]
    offsets = offsets_ref[:, pl.ds(1, columns, stride=0)]
    o_ref[...] = x_ref[...] * scales + offsets


@zoo.case(
    reference=lambda x, scales, offsets: (
        x * jnp.repeat(scales, 8, axis=0) + offsets[:, 1:2]
    ),
    make_args=lambda rng: (
        normal(rng, 24, 72),
        normal(rng, 3, 72),
        normal(rng, 24, 3),
    ),
)
def scale_by_group(x, scales, offsets, **call):
    """Loads with stride 0 repeat one row, or one column."""
    rows = pl.BlockSpec((8, 72), lambda i: (i, 0))
    return pl.pallas_call(
        scale_by_group_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(3,),
        in_specs=[
            rows,
            pl.BlockSpec((3, 72), lambda i: (0, 0)),
            pl.BlockSpec((8, 3), lambda i: (i, 0)),
        ],
        out_specs=rows,
        **call,
    )(x, scales, offsets)
