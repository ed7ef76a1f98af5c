"""`update_pages`: writes new keys and values into the pages of a cache, in place."""

import jax
import jax.numpy as jnp

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.kernels import common
from pallasite.kernels.decode import PAGES


def update_pages(
    pages: jax.Array,
    new: jax.Array,
    slots: jax.Array,
    *,
    implementation: common.Implementation = "pallasite",
) -> jax.Array:
    """`pages` with row t of `new` in slot `slots[t]` (page * page_size + offset).

    If `pages` is donated to the jitted function, its buffer is reused and only the new
    rows are copied.

    Args:
        pages: (pages, page_size, kv_heads, width).
        new: (tokens, kv_heads, width); converted to the dtype of the pages.
        slots: (tokens,) distinct integers. A value outside the pages' slots, such as
            -1 or pages * page_size, is padding: its row is dropped.
    """
    operation = "update_pages"
    _, _, kv_heads, width = common.check_rank(operation, "pages", pages, PAGES)
    tokens, _, _ = common.check_rank(operation, "new", new, "tokens, kv_heads, width")
    common.check_integers(operation, slots=slots)
    common.check_shape(operation, "new", new, (tokens, kv_heads, width))
    common.check_shape(operation, "slots", slots, (tokens,))
    compute = common.choose(implementation, _stored, _plain)
    return compute(pages, new, common.as_int32(slots))


def _plain(pages, new, slots):
    flat = pages.reshape(-1, *pages.shape[2:])
    slots = jnp.where(slots < 0, len(flat), slots)  # slots past the end are dropped
    return flat.at[slots].set(new.astype(pages.dtype), mode="drop").reshape(pages.shape)


def _stored(pages, new, slots):
    tokens, kv_heads, width = new.shape
    flat = pages.reshape(-1, kv_heads, width)

    def is_slot(slot):
        return (slot >= 0) & (slot < len(flat))

    def kernel(slots_ref, new_ref, flat_ref, o_ref):
        del flat_ref  # aliased to the output

        @pl.when(is_slot(slots_ref[pl.program_id(0)]))
        def _():
            o_ref[...] = new_ref[...].astype(o_ref.dtype)

    def place(t, slots_ref):
        return jnp.where(is_slot(slots_ref[t]), slots_ref[t], 0), 0, 0

    row = (None, kv_heads, width)
    slot = pl.BlockSpec(row, place)
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tokens,),
            in_specs=[
                pl.BlockSpec(row, lambda t, slots_ref: (t, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=slot,
        ),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=common.cost(0, [new, new, slots]),
        name="update_pages",
    )(slots, new, flat)
    return out.reshape(pages.shape)
