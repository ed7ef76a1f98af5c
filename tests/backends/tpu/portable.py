"""Kernels as their authors write them for any chip, with no thought of a TPU's tiles.

`CASES` maps a name to a function and its operands' shapes, as in `kernels.py`. All are
run in the simulator, and compiled for each chip where libtpu is.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.backends.tpu.kernels import Case, array

F16, F32, BF16 = jnp.float16, jnp.float32, jnp.bfloat16
I8, U8, I16, I32 = jnp.int8, jnp.uint8, jnp.int16, jnp.int32
BOOL = jnp.bool_

CASES: dict[str, Case] = {}
ANY = pl.BlockSpec(memory_space=pl.ANY)


def case(*shapes, name="", **fixed):
    def register(function):
        CASES[name or function.__name__] = Case(partial(function, **fixed), shapes)
        return function

    return register


def call(kernel, out, *args, **kw):
    return pl.pallas_call(kernel, out_shape=out, **kw)(*args)


# --- blocks of all shapes ---


@case(array(1000), array(1000), name="add_blocks_of_64", block=64)
@case(array(1000), array(1000), name="add_blocks_of_256", block=256)
@case(array(1000, dtype=F16), array(1000, dtype=F16), name="add_f16", block=100)
@case(array(1000, dtype=I8), array(1000, dtype=I8), name="add_i8", block=128)
@case(array(1000, dtype=BF16), array(1000, dtype=BF16), name="add_bf16", block=96)
def add(x, y, block):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((block,), lambda i: (i,))
    grid = (pl.cdiv(x.shape[0], block),)
    return call(kernel, x, x, y, grid=grid, in_specs=[spec] * 2, out_specs=spec)


@case(array(100, 70), name="softmax_rows")
@case(array(100, 70, dtype=F16), name="softmax_rows_f16")
@case(array(64, 1000, dtype=BF16), name="softmax_rows_bf16")
def softmax(x):
    def kernel(x_ref, o_ref):
        row = x_ref[...].astype(F32)
        row = jnp.exp(row - row.max())
        o_ref[...] = (row / row.sum()).astype(o_ref.dtype)

    spec = pl.BlockSpec((None, x.shape[1]), lambda i: (i, 0))
    grid = (x.shape[0],)
    return call(kernel, x, x, grid=grid, in_specs=[spec], out_specs=spec)


@case(array(96, 80), array(80, 72), name="matmul_blocks_of_16", block=16)
@case(array(96, 80), array(80, 72), name="matmul_blocks_of_32", block=32)
@case(array(96, 80, dtype=F16), array(80, 72, dtype=F16), name="matmul_f16", block=32)
@case(array(96, 80, dtype=I8), array(80, 72, dtype=I8), name="matmul_i8", block=32)
@case(array(96, 80, dtype=I32), array(80, 72, dtype=I32), name="matmul_i32", block=32)
@case(array(96, 80, dtype=U8), array(80, 72, dtype=U8), name="matmul_u8", block=16)
def matmul(x, y, block):
    acc = F32 if jnp.issubdtype(x.dtype, jnp.floating) else I32

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=acc)

    (m, k), n = x.shape, y.shape[1]
    grid = tuple(pl.cdiv(size, block) for size in (m, n, k))
    specs = [
        pl.BlockSpec((block, block), lambda i, j, k: (i, k), fill=0),
        pl.BlockSpec((block, block), lambda i, j, k: (k, j), fill=0),
    ]
    out = pl.BlockSpec((block, block), lambda i, j, k: (i, j))
    result = array(m, n, dtype=acc)
    return call(kernel, result, x, y, grid=grid, in_specs=specs, out_specs=out)


@case(array(2, 3, 40, 24), name="heads")
def over_heads(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2 + 1

    spec = pl.BlockSpec((None, None, 20, 24), lambda b, h, i: (b, h, i, 0))
    return call(kernel, x, x, grid=(2, 3, 2), in_specs=[spec], out_specs=spec)


@case(array(50, 60), name="transpose_blocks")
def transpose(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].T

    into = pl.BlockSpec((10, 20), lambda i, j: (i, j))
    out = pl.BlockSpec((20, 10), lambda i, j: (j, i))
    return call(kernel, array(60, 50), x, grid=(5, 3), in_specs=[into], out_specs=out)


@case(array(130, 128), name="stencil_rows")
def stencil(x):
    def kernel(x_ref, o_ref):
        block = x_ref[...]
        o_ref[...] = block[:-2] + 2 * block[1:-1] + block[2:]

    into = pl.BlockSpec((pl.Element(18), 128), lambda i: (16 * i, 0))
    out = pl.BlockSpec((16, 128), lambda i: (i, 0))
    return call(kernel, array(128, 128), x, grid=(8,), in_specs=[into], out_specs=out)


@case(array(300, 40), name="column_sums")
def column_sums(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum(axis=0)

    into = pl.BlockSpec((25, 40), lambda i: (i, 0))
    out = pl.BlockSpec((40,), lambda i: (0,))
    return call(kernel, array(40), x, grid=(12,), in_specs=[into], out_specs=out)


# --- element types ---


@case(array(64, 96, dtype=BOOL), array(64, 96), name="where_bool")
def where(m, x):
    def kernel(m_ref, x_ref, o_ref, n_ref):
        o_ref[...] = jnp.where(m_ref[...], x_ref[...], 0.0)
        n_ref[...] = m_ref[...] & (x_ref[...] > 0)

    spec = pl.BlockSpec((16, 96), lambda i: (i, 0))
    specs = [spec] * 2
    return call(kernel, [x, m], m, x, grid=(4,), in_specs=specs, out_specs=specs)


@case(array(32, 128, dtype=I8), name="arithmetic_i8")
@case(array(32, 128, dtype=U8), name="arithmetic_u8")
@case(array(32, 128, dtype=I16), name="arithmetic_i16")
@case(array(32, 128, dtype=F16), name="arithmetic_f16")
@case(array(32, 128, dtype=jnp.float8_e4m3fn), name="arithmetic_f8")
@case(array(20, 50, dtype=jnp.float8_e5m2), name="arithmetic_f8e5m2")
def arithmetic(x):
    def kernel(x_ref, o_ref):
        y = x_ref[...]
        o_ref[...] = jnp.maximum(y + y, y * y).astype(y.dtype)

    return call(kernel, x, x)


@case(array(32, 128, dtype=jnp.int4), name="int4_to_bf16")
def int4(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(BF16) * 2

    return call(kernel, array(32, 128, dtype=BF16), x)


@case(array(8, 128, dtype=F16), name="float16_functions")
def functions(x):
    def kernel(x_ref, o_ref):
        y = x_ref[...]
        o_ref[...] = jnp.tanh(y) + jnp.exp(-y * y) + lax.rsqrt(jnp.abs(y) + 1)

    return call(kernel, x, x)


@case(array(16, 128, dtype=F16), name="bits_of_f16")
def bits_of(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = lax.bitcast_convert_type(x_ref[...], I16)

    return call(kernel, array(16, 128, dtype=I16), x)


# --- scalars ---


@case(array(32, 40), name="total")
def total(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].sum()

    return call(kernel, array(), x)


@case(array(), array(16, 128), name="times_a_number")
def times(s, x):
    def kernel(s_ref, x_ref, o_ref):
        o_ref[...] = s_ref[...] * x_ref[...]

    return call(kernel, x, s, x)


@case(array(40), name="one_element_at_a_time")
def elements(x):
    def kernel(x_ref, o_ref):
        def body(i, total):
            o_ref[i] = total + x_ref[i]
            return total + x_ref[i]

        lax.fori_loop(0, x.shape[0], body, 0.0)

    return call(kernel, x, x)


@case(array(5000), name="chunks_of_a_vector", chunk=100)
@case(array(4096), name="chunks_of_512", chunk=512)
@case(array(5000, dtype=BF16), name="chunks_bf16", chunk=100)
def chunks(x, chunk):
    def kernel(x_ref, o_ref):
        def body(i, total):
            return total + x_ref[pl.ds(i * chunk, chunk)].astype(F32)

        zeros = jnp.zeros((chunk,), F32)
        o_ref[...] = lax.fori_loop(0, x.shape[0] // chunk, body, zeros)

    return call(kernel, array(chunk), x)


@case(array(33, 128), name="rows_by_number")
@case(array(33, 200), name="rows_by_number_wide")
@case(array(33, 200, dtype=BF16), name="rows_by_number_bf16")
@case(array(33, 70, dtype=I8), name="rows_by_number_i8")
def rows_by_number(x):
    def kernel(x_ref, o_ref):
        def body(i, carry):
            o_ref[pl.ds(x.shape[0] - 1 - i, 1), :] = x_ref[pl.ds(i, 1), :]
            return carry

        lax.fori_loop(0, x.shape[0], body, 0)

    return call(kernel, x, x)


@case(array(24, 300), name="lanes_by_number")
def lanes_by_number(x):
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[...] = x_ref[:, pl.ds(10 * i, 50)]

    whole = pl.BlockSpec((24, 300), lambda i: (0, 0))
    out = pl.BlockSpec((None, 24, 50), lambda i: (i, 0, 0))
    return call(kernel, array(6, 24, 50), x, grid=(6,), in_specs=[whole], out_specs=out)


# --- masks, as in kernels for GPUs ---


@case(array(1000), array(1000), name="masked_add")
def masked_add(x, y):
    def kernel(x_ref, y_ref, o_ref):
        at = pl.ds(pl.program_id(0) * 128, 128)
        mask = pl.program_id(0) * 128 + jnp.arange(128) < 1000
        total = pl.load(x_ref, (at,), mask=mask, other=0.0)
        total += pl.load(y_ref, (at,), mask=mask, other=0.0)
        pl.store(o_ref, (at,), total, mask=mask)

    return call(kernel, x, x, y, grid=(8,), in_specs=[ANY] * 2, out_specs=ANY)


@case(array(37, 50), name="masked_rows")
def masked_rows(x):
    def kernel(x_ref, o_ref):
        rows = pl.program_id(0) * 8 + jnp.arange(8)
        mask = jnp.broadcast_to((rows < 37)[:, None], (8, 64))
        mask &= jnp.broadcast_to(jnp.arange(64) < 50, (8, 64))
        at = (pl.ds(pl.program_id(0) * 8, 8), pl.ds(0, 50))
        y = pl.load(x_ref, at, mask=mask[:, :50], other=0.0)
        pl.store(o_ref, at, y * 2, mask=mask[:, :50])

    return call(kernel, x, x, grid=(5,), in_specs=[ANY], out_specs=ANY)


# --- gathers, scatters, sums in order ---


@case(array(500, 128), array(16, dtype=I32), name="embedding")
@case(array(500, 128, dtype=BF16), array(16, dtype=I32), name="embedding_bf16")
@case(array(40, 30), array(9, dtype=I32), name="embedding_small")
def embedding(table, ids):
    def kernel(t_ref, i_ref, o_ref):
        o_ref[...] = t_ref[i_ref[...]]

    out = array(ids.shape[0], table.shape[1], dtype=table.dtype)
    return call(kernel, out, table, ids)


@case(array(200), array(64, dtype=I32), name="take_elements")
def take(x, ids):
    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = jnp.take(x_ref[...], i_ref[...])

    return call(kernel, array(64), x, ids)


@case(array(32, 128), array(32, 1, dtype=I32), name="take_along_lanes")
def take_along(x, ids):
    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = jnp.take_along_axis(x_ref[...], i_ref[...], axis=1)

    return call(kernel, array(32, 1), x, ids)


@case(array(20, 64), array(8, dtype=I32), array(8, 64), name="scatter_rows")
def scatter_rows(x, ids, y):
    def kernel(x_ref, i_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...].at[i_ref[...]].add(y_ref[...])

    return call(kernel, x, x, ids, y)


@case(array(64, dtype=I32), name="histogram")
def histogram(ids):
    def kernel(i_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        def body(k, carry):
            o_ref[i_ref[k]] += 1
            return carry

        lax.fori_loop(0, 64, body, 0)

    return call(kernel, array(16, dtype=I32), ids)


@case(array(128, dtype=I32), name="histogram_atomic")
def histogram_atomic(ids):
    def kernel(i_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        pl.atomic_add(o_ref, (i_ref[...],), jnp.ones((32,), I32))

    into = pl.BlockSpec((32,), lambda i: (i,))
    out = pl.BlockSpec((10,), lambda i: (0,))
    result = array(10, dtype=I32)
    return call(kernel, result, ids, grid=(4,), in_specs=[into], out_specs=out)


@case(array(24, 100), name="cumsum_lanes", axis=1)
@case(array(24, 100), name="cumsum_rows", axis=0)
@case(array(24, 100, dtype=I32), name="cumsum_int", axis=1)
def cumsum(x, axis):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.cumsum(x_ref[...], axis=axis)

    return call(kernel, x, x)


@case(array(8, 100), name="sort_lanes")
@case(array(8, 64, dtype=I32), name="sort_int")
def sort(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.sort(x_ref[...], axis=-1)

    return call(kernel, x, x)


@case(array(16, 60), name="argmax_and_top_k")
def top_k(x):
    def kernel(x_ref, o_ref, i_ref):
        values, _ = lax.top_k(x_ref[...], 4)
        o_ref[...] = values
        i_ref[...] = jnp.argmax(x_ref[...], axis=-1).astype(I32)

    return call(kernel, [array(16, 4), array(16, dtype=I32)], x)


# --- shapes of values ---


@case(array(9, 300), array(1, dtype=I32), name="parts_of_rows")
@case(array(9, 512), array(1, dtype=I32), name="parts_of_wide_rows")
@case(array(9, 300, dtype=BF16), array(1, dtype=I32), name="parts_of_bf16_rows")
def parts_of_rows(x, start):
    """One tile of lanes or less, in a row whose place in its tile is unknown."""

    def kernel(x_ref, start_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        def step(n, _):
            o_ref[n, 128:256] = x_ref[8 - n, 3:131]
            o_ref[n, 290:300] = x_ref[n, 256:266]
            o_ref[n, 40] = x_ref[n, start_ref[0] * 7 + n]
            o_ref[n, pl.ds(start_ref[0] * 5 + n, 9)] = x_ref[n, 120:129]

        lax.fori_loop(0, 9, step, None)

    in_specs = [pl.BlockSpec(), pl.BlockSpec(memory_space=pltpu.SMEM)]
    return call(kernel, x, x, start, in_specs=in_specs)


@case(array(5, 200), name="rows_rounded_up")
def rounded_up(x):
    """Triton's softmax: masked rows with as many columns as a power of two."""

    def kernel(x_ref, o_ref):
        row, inside = pl.program_id(0), jnp.arange(256) < 200
        place = (row, pl.ds(0, 256))
        numbers = jnp.exp(pl.load(x_ref, place, mask=inside, other=-jnp.inf))
        pl.store(o_ref, place, numbers / numbers.sum(), mask=inside)

    return call(kernel, x, x, grid=5)


@case(array(20, 70), name="counted_rows_and_columns")
def counted(x):
    """As pointers are computed in Triton, also past the end of the array."""

    def kernel(x_ref, o_ref):
        rows = pl.program_id(0) * 16 + jnp.arange(16)
        columns = pl.program_id(1) * 32 + jnp.arange(32)
        place = (rows[:, None], columns[None, :])
        inside = (place[0] < 20) & (place[1] < 70)
        block = pl.load(x_ref, place, mask=inside, other=0.0)
        pl.store(o_ref, place, 2 * block, mask=inside)

    return call(kernel, x, x, grid=(2, 3))


@case(array(16, 36), name="reshape_groups")
def groups(x):
    def kernel(x_ref, o_ref):
        y = x_ref[...].reshape(4, 144)
        o_ref[...] = (y - y.mean(axis=1, keepdims=True)).reshape(16, 36)

    return call(kernel, x, x)


@case(array(6, 30, 50), name="flatten")
def flatten(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].reshape(-1)

    return call(kernel, array(9000), x)


@case(array(16, 64), name="every_second")
def every_second(x):
    def kernel(x_ref, o_ref):
        y = x_ref[...]
        o_ref[...] = y[::2, ::2] + y[1::2, 1::2]

    return call(kernel, array(8, 32), x)


@case(array(16, 64), name="interleave")
def interleave(x):
    def kernel(x_ref, o_ref):
        o_ref[::2] = x_ref[...]
        o_ref[1::2] = -x_ref[...]

    return call(kernel, array(32, 64), x)


@case(array(3, 8, 4, 32), array(3, 4, 32, 16), name="dot_two_contracted")
def tensordot(x, y):
    def kernel(x_ref, y_ref, o_ref):
        numbers = (((2, 3), (1, 2)), ((0,), (0,)))
        o_ref[...] = lax.dot_general(x_ref[...], y_ref[...], numbers)

    return call(kernel, array(3, 8, 16), x, y)


@case(array(2, 4, 8, 32), array(2, 4, 32, 16), name="dot_two_batches")
def batched(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] @ y_ref[...]

    return call(kernel, array(2, 4, 8, 16), x, y)


@case(array(5, 7, 32), array(32, 16), name="dot_three_dimensions")
def dot3(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...])

    return call(kernel, array(5, 7, 16), x, y)


@case(array(20, 24), name="mandelbrot")
def mandelbrot(x):
    """Values that vary along rows only, along lanes only, and along both in a loop."""

    def kernel(x_ref, o_ref):
        rows = lax.broadcasted_iota(I32, (20, 24), 0).astype(F32) * 0.1 - 1
        lanes = lax.broadcasted_iota(I32, (20, 24), 1).astype(F32) * 0.1 - 1

        def body(_, carry):
            re, im, count = carry
            inside = re * re + im * im <= 4.0
            new = re * re - im * im + lanes, 2 * re * im + rows
            re, im = jnp.where(inside, new[0], re), jnp.where(inside, new[1], im)
            return re, im, count + inside.astype(I32)

        zeros = jnp.zeros((20, 24), F32)
        start = (zeros, zeros, jnp.zeros((20, 24), I32))
        _, _, count = lax.fori_loop(0, 8, body, start)
        o_ref[...] = x_ref[...] + count

    return call(kernel, x, x)


# --- state ---


@case(array(60, 40), name="running_row_sum")
def running(x):
    def kernel(x_ref, o_ref, total_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            total_ref[...] = jnp.zeros_like(total_ref)

        total_ref[...] += x_ref[...].sum(axis=0)
        o_ref[...] = x_ref[...] + total_ref[...]

    spec = pl.BlockSpec((6, 40), lambda i: (i, 0))
    scratch = [pltpu.VMEM((40,), F32)]
    return call(
        kernel, x, x, grid=(10,), in_specs=[spec], out_specs=spec,
        scratch_shapes=scratch,
    )  # fmt: skip


@case(array(60, 40), array(6, 40), name="in_place")
def in_place(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((6, 40), lambda i: (2 * i, 0))
    whole = pl.BlockSpec((6, 40), lambda i: (0, 0))
    return call(
        kernel, x, x, y, grid=(5,), in_specs=[spec, whole], out_specs=spec,
        input_output_aliases={0: 0},
    )  # fmt: skip


@case(array(24, 96), name="blocks_in_two_orders")
def two_orders(x):
    """Each output block is returned to in a second round."""

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] * (pl.program_id(0) + 1)

    spec = pl.BlockSpec((8, 96), lambda r, i: (i, 0))
    return call(kernel, x, x, grid=(2, 3), in_specs=[spec], out_specs=spec)


@case(array(20, 50), name="prints")
def prints(x):
    def kernel(x_ref, o_ref):
        pl.debug_print("program {}: {}", pl.program_id(0), x_ref[...])
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((5, 50), lambda i: (i, 0))
    return call(kernel, x, x, grid=(4,), in_specs=[spec], out_specs=spec)


# --- vectors that change their layout on the way ---


@case(array(6), array(6, 6), name="power_iteration")
@case(array(128), array(128, 128), name="power_iteration_of_whole_lanes")
def power_iteration(x, matrix):
    def kernel(x_ref, m_ref, o_ref):
        step = lambda _, v: (v[None] * m_ref[...]).sum(1)
        o_ref[...] = lax.fori_loop(0, 5, step, x_ref[...])

    return call(kernel, x, x, matrix)


@case(array(6), array(6, 6), name="best_path")
def best_path(x, scores):
    def kernel(x_ref, s_ref, o_ref):
        def step(state):
            best, n = state
            return jnp.max(best[:, None] + s_ref[...], 0), n + 1

        state = (x_ref[...], jnp.int32(0))
        o_ref[...] = lax.while_loop(lambda state: state[1] < 5, step, state)[0]

    return call(kernel, x, x, scores)


@case(array(6), array(6, 6), name="product_or_not")
def product_or_not(x, matrix):
    def kernel(x_ref, m_ref, o_ref):
        product = lambda v: (v[None] * m_ref[...]).sum(1)
        o_ref[...] = lax.cond(m_ref[0, 0] > 0, product, lambda v: v, x_ref[...])

    return call(kernel, x, x, matrix)


@case(array(12, 12), name="steps_until_large")
@case(array(12), name="vector_steps_until_large")
@case(array(3000), name="long_vector_steps_until_large")
def steps_until_large(x):
    def kernel(x_ref, o_ref):
        def step(_, state):
            y, steps = state
            small = y < 4
            return jnp.where(small, y * y + x_ref[...], y), steps + small.astype(I32)

        state = (jnp.zeros_like(x_ref[...]), jnp.zeros(x_ref.shape, I32))
        o_ref[...] = lax.fori_loop(0, 20, step, state)[1]

    return call(kernel, array(*x.shape, dtype=I32), x)


@case(array(40), array(17), name="bounds_in_table")
def bounds_in_table(table, x):
    def kernel(table_ref, x_ref, o_ref):
        def halve(_, bounds):
            low, high = bounds
            middle = low + (high - low) // 2
            is_below = x_ref[...] <= table_ref[...][middle]
            return jnp.where(is_below, low, middle), jnp.where(is_below, middle, high)

        bounds = (jnp.zeros(x_ref.shape, I32), jnp.full(x_ref.shape, 40, I32))
        o_ref[...] = lax.fori_loop(0, 6, halve, bounds)[1]

    return call(kernel, array(17, dtype=I32), table, x)


@case(array(16, 128), name="nearest_row")
def nearest_row(x):
    def kernel(x_ref, o_ref):
        def compare(i, best):
            distance, row = best
            is_self = jnp.arange(16) == i
            new = ((x_ref[...] - x_ref[i]) ** 2).sum(1) + jnp.where(is_self, 1e9, 0)
            return jnp.minimum(distance, new), jnp.where(new < distance, i, row)

        best = (jnp.full((16,), jnp.inf), jnp.zeros((16,), I32))
        o_ref[...] = lax.fori_loop(0, 16, compare, best)[1]

    return call(kernel, array(16, dtype=I32), x)


@case(array(4, 16, 128), name="below_kept_maxima")
def below_kept_maxima(x):
    def kernel(x_ref, o_ref):
        def keep(i, kept):
            largest = jnp.maximum(kept, x_ref[i].max(1))
            return jnp.where(largest > 2, kept, largest)

        kept = lax.fori_loop(0, 4, keep, jnp.full((16,), -1e30))
        o_ref[...] = x_ref[0] - kept[:, None]

    return call(kernel, array(16, 128), x)


@case(array(16), array(16), name="halve_until_small")
def halve_until_small(x, limit):
    def kernel(x_ref, limit_ref, o_ref):
        def halve(state):
            y, is_large = state
            y = jnp.where(is_large, y / 2, y)
            return y, is_large & (y > limit_ref[...] + 2)

        state = (x_ref[...] * 100, x_ref[...] > 0)
        o_ref[...] = lax.while_loop(lambda state: state[1].any(), halve, state)[0]

    return call(kernel, x, x, limit)


@case(array(16, 128), name="copies_of_4_rows", rows=4, more=0)
@case(array(32, 42), name="copies_of_10_rows_and_2_around", rows=10, more=2)
def copies_inside_tiles(x, rows, more):
    steps = (x.shape[0] - more) // rows

    def kernel(x_ref, o_ref, part_ref, semaphore):
        i = pl.program_id(0)
        window = x_ref.at[pl.ds(i * rows, rows + more)]
        copy = pltpu.make_async_copy(window, part_ref, semaphore)
        copy.start()
        copy.wait()
        o_ref[0] = sum(part_ref[n : n + rows] for n in range(more + 1))

    return call(
        kernel,
        array(steps, rows, x.shape[1]),
        x,
        grid=(steps,),
        in_specs=[ANY],
        out_specs=pl.BlockSpec((1, rows, x.shape[1]), lambda i: (i, 0, 0)),
        scratch_shapes=[
            pltpu.VMEM((rows + more, x.shape[1]), F32),
            pltpu.SemaphoreType.DMA,
        ],
    )
