"""Kernels the TPU backend must take, in shapes that fit its tiles.

`CASES` maps a name to a function and its operands' shapes; `tests/zoo` holds the same
ideas in shapes that stress the meaning instead. Everything here is compiled for each
chip by `test_compile.py` and timed statically by `benchmarks/tracer_tpu.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu

F32, BF16, I32, I8 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8


@dataclass(frozen=True)
class Case:
    """A function that calls a kernel, and what to call it with."""

    function: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]


CASES: dict[str, Case] = {}


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def case(*shapes: jax.ShapeDtypeStruct, name: str = "", **fixed: Any):
    """Register a function under its own name, with keyword arguments fixed."""

    def register(function):
        call = lambda *args: function(*args, **fixed)
        CASES[name or function.__name__] = Case(call, shapes)
        return function

    return register


def rows(n: int, columns: int) -> pl.BlockSpec:
    return pl.BlockSpec((n, columns), lambda i: (i, 0))


def over_rows(kernel, x, *more, block: int = 64, out=None, **kw):
    """Call a kernel on blocks of rows of `x`; the other operands are seen whole."""
    out = array(*x.shape, dtype=x.dtype) if out is None else out
    whole = [pl.BlockSpec(m.shape, lambda i, n=m.ndim: (0,) * n) for m in more]
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(pl.cdiv(x.shape[0], block),),
        in_specs=[rows(block, x.shape[1]), *whole],
        out_specs=rows(block, out.shape[1]),
        **kw,
    )(x, *more)


# --- the three tracer kernels ---


@case(array(512, 256), array(512, 256))
def vector_add(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    return pl.pallas_call(
        kernel,
        out_shape=x,
        grid=(8,),
        in_specs=[rows(64, 256)] * 2,
        out_specs=rows(64, 256),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )(x, y)


@case(array(512, 512), array(512, 512))
@case(array(512, 512, dtype=BF16), array(512, 512, dtype=BF16), name="matmul_bf16")
@case(array(300, 200), array(200, 260), name="matmul_edges")
def matmul(x, y):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

    (m, k), n = x.shape, y.shape[1]
    bm, bn, bk = 128, 128, 256
    return pl.pallas_call(
        kernel,
        out_shape=array(m, n),
        grid=(pl.cdiv(m, bm), pl.cdiv(n, bn), pl.cdiv(k, bk)),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k), fill=0.0),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j), fill=0.0),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
    )(x, y)


def attention_kernel(q_ref, k_ref, v_ref, o_ref, top_ref, sum_ref, acc_ref, *, causal):
    """Keys along the last axis; running maximum, sum and result in scratch."""
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def _():
        top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def step():
        scores = lax.dot_general(
            q_ref[...], k_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=F32
        )
        scores *= q_ref.shape[-1] ** -0.5
        if causal:
            shape = scores.shape
            row = i * shape[0] + lax.broadcasted_iota(I32, shape, 0)
            column = j * shape[1] + lax.broadcasted_iota(I32, shape, 1)
            scores = jnp.where(column <= row, scores, -1e30)
        top = jnp.maximum(top_ref[...], scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - top)
        decay = jnp.exp(top_ref[...] - top)
        sum_ref[...] = decay * sum_ref[...] + weights.sum(axis=1, keepdims=True)
        values = jnp.dot(
            weights.astype(v_ref.dtype), v_ref[...], preferred_element_type=F32
        )
        acc_ref[...] = decay * acc_ref[...] + values
        top_ref[...] = top

    if causal:
        pl.when(j <= i)(step)
    else:
        step()

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / sum_ref[...]).astype(o_ref.dtype)


@case(*[array(4, 512, 128)] * 3, causal=False)
@case(*[array(4, 512, 128)] * 3, name="attention_causal", causal=True)
@case(*[array(4, 512, 64, dtype=BF16)] * 3, name="attention_bf16", causal=True)
def attention(q, k, v, causal):
    heads, length, depth = q.shape
    block = 128
    by_query = pl.BlockSpec((None, block, depth), lambda h, i, j: (h, i, 0))
    by_key = pl.BlockSpec((None, block, depth), lambda h, i, j: (h, j, 0))
    return pl.pallas_call(
        lambda *refs: attention_kernel(*refs, causal=causal),
        out_shape=q,
        grid=(heads, length // block, length // block),
        in_specs=[by_query, by_key, by_key],
        out_specs=by_query,
        scratch_shapes=[
            pltpu.VMEM((block, 1), F32),
            pltpu.VMEM((block, 1), F32),
            pltpu.VMEM((block, depth), F32),
        ],
        name="attention",
    )(q, k, v)


# --- elementwise, masks and reductions ---


@case(array(256, 512))
@case(array(200, 512), name="softmax_edge")
@case(array(256, 512, dtype=BF16), name="softmax_bf16")
def softmax(x):
    def kernel(x_ref, o_ref):
        z = x_ref[...].astype(F32)
        z = jnp.exp(z - z.max(axis=1, keepdims=True))
        o_ref[...] = (z / z.sum(axis=1, keepdims=True)).astype(o_ref.dtype)

    return over_rows(kernel, x)


@case(array(256, 512), array(512), array(512))
def layer_norm(x, scale, bias):
    def kernel(x_ref, scale_ref, bias_ref, o_ref):
        z = x_ref[...]
        centred = z - z.mean(axis=-1)[:, None]
        variance = (centred * centred).mean(axis=-1)
        o_ref[...] = centred * lax.rsqrt(variance + 1e-6)[:, None] * scale_ref[...]
        o_ref[...] += bias_ref[...]

    return over_rows(kernel, x, scale, bias)


@case(array(256, 512))
def odd_numbers(x):
    """NaN and infinity tests, sign, rounding, casts both ways."""

    def kernel(x_ref, o_ref):
        z = x_ref[...]
        z = jnp.where(jnp.isnan(z) | jnp.isinf(z), 0.0, z)
        z = jnp.where(jnp.isfinite(z), jnp.round(z) + jnp.floor(z), jnp.sign(z))
        whole = z.astype(I32) + z.astype(jnp.uint32).astype(I32) + z.astype(I8)
        bits = lax.bitcast_convert_type(z, I32) & 0x7FFFFFFF
        o_ref[...] = whole.astype(F32) + lax.bitcast_convert_type(bits, F32) ** 3

    return over_rows(kernel, x)


@case(array(256, 512, dtype=BF16))
def gelu_bf16(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = jax.nn.gelu(x_ref[...]) * jax.nn.sigmoid(x_ref[...])

    return over_rows(kernel, x)


@case(array(64, 256, dtype=I32), array(64, 256, dtype=I32))
def integers(x, y):
    def kernel(x_ref, y_ref, o_ref):
        a, b = x_ref[...], y_ref[...]
        c = a // b + a % 7 - (a << (b & 3)) + (a >> 5) * 3 + (a // 8)
        c = jnp.where((a > b) & (a != 4), c, ~a ^ jnp.abs(b))
        o_ref[...] = lax.population_count(c) + lax.clz(c) + jnp.clip(c, -5, 5)

    return over_rows(kernel, x, y)


@case(array(64, 256, dtype=I8), array(64, 256, dtype=jnp.uint8))
def narrow_integers(x, y):
    def kernel(x_ref, y_ref, o_ref):
        a, b = x_ref[...] + 3, y_ref[...] // 2
        picked = jnp.where(b > 100, a.astype(I32), b.astype(I32))
        o_ref[...] = (picked + jnp.maximum(a, -a)).astype(I8)

    return over_rows(kernel, x, y)


@case(array(256, 384))
def masks(x):
    def kernel(x_ref, o_ref):
        z = x_ref[...]
        shape = z.shape
        even = lax.broadcasted_iota(I32, shape, 1) % 2 == 0
        large = (z > 0.5).any(axis=1)
        all_small = (z < 2.0).all(axis=0)
        keep = (even | large[:, None]) & ~all_small[None, :]
        keep = jnp.where(z.sum() > 0, keep, even)
        o_ref[...] = jnp.where(keep == (z > 0), z, 0.0) + jnp.sign(z) * keep.sum()

    return over_rows(kernel, x)


@case(array(64, 256), array(64, 256, dtype=I32))
def reductions(x, n):
    def kernel(x_ref, n_ref, o_ref):
        z, k = x_ref[...], n_ref[...]
        per_row = z.prod(axis=1) + z.min(axis=1) + jnp.argmax(z, axis=1)
        per_row += lax.reduce_xor(k, axes=(1,))
        per_row += k.astype(jnp.uint32).max(axis=1).astype(F32)
        o_ref[...] = z.max(axis=0)[None, :] + per_row[:, None] + z.sum()

    return over_rows(kernel, x, n)


@case(array(64, 256))
def scans(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.cumsum(x_ref[...], axis=1) + lax.cummax(x_ref[...], axis=0)

    return over_rows(kernel, x)


@case(array(64, 256))
def largest(x):
    def kernel(x_ref, o_ref):
        values, places = lax.top_k(x_ref[...], 8)
        o_ref[...] = values + places.astype(F32)

    return over_rows(kernel, x, out=array(x.shape[0], 8))


@case(array(1024), array(1024))
def one_dimension(x, y):
    def kernel(x_ref, y_ref, o_ref, total_ref):
        z = x_ref[...] * y_ref[...]
        o_ref[...] = jnp.where(lax.iota(I32, z.shape[0]) > 4, z, 0.0)
        total_ref[0] = z.sum()

    vector = pl.BlockSpec((256,), lambda i: (i,))
    total = pl.BlockSpec((1,), lambda i: (0,), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        kernel,
        out_shape=(x, array(1)),
        grid=(4,),
        in_specs=[vector, vector],
        out_specs=(vector, total),
    )(x, y)


@case(array(100, 300))
def filled_edges(x):
    """Blocks hang over both edges and read -inf there."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].max(axis=1, keepdims=True) + x_ref[...]

    spec = pl.BlockSpec((16, 128), lambda i, j: (i, j), fill=-jnp.inf)
    return pl.pallas_call(
        kernel,
        out_shape=x,
        grid=(7, 3),
        in_specs=[spec],
        out_specs=pl.BlockSpec((16, 128), lambda i, j: (i, j)),
    )(x)


# --- shapes and dots ---


@case(array(128, 256), array(8, 16, 128))
def shapes(x, y):
    def kernel(x_ref, y_ref, o_ref, p_ref):
        z = jnp.concatenate([x_ref[:, 128:], x_ref[:, :128]], axis=1)
        o_ref[...] = jnp.pad(z.T[8:-8], ((8, 8), (0, 0)))
        p_ref[...] = y_ref[...].reshape(128, 128) + jnp.swapaxes(
            y_ref[...], 0, 1
        ).reshape(128, 128)

    return pl.pallas_call(kernel, out_shape=(array(256, 128), array(128, 128)))(x, y)


@case(array(4, 64, 128), array(4, 64, 128), array(128, 64, dtype=I8))
def dots(x, y, n):
    def kernel(x_ref, y_ref, n_ref, o_ref, i_ref, v_ref):
        scores = jnp.einsum("bmk,bnk->bmn", x_ref[...], y_ref[...])
        o_ref[...] = scores + jnp.einsum("bkm,bkn->bmn", scores, scores)
        i_ref[...] = lax.dot_general(
            n_ref[...], n_ref[...], (((0,), (0,)), ((), ())), preferred_element_type=I32
        )
        v_ref[...] = jnp.dot(x_ref[0], y_ref[0, 0], precision="highest")

    out = (array(4, 64, 64), array(64, 64, dtype=I32), array(64))
    return pl.pallas_call(kernel, out_shape=out)(x, y, n)


@case(array(64, 128))
def strided_rows(x):
    def kernel(x_ref, o_ref):
        o_ref[pl.ds(0, 32, 2)] = x_ref[pl.ds(1, 32, 2)]
        o_ref[pl.ds(1, 32, 2)] = x_ref[pl.ds(0, 32, 2)]

    return pl.pallas_call(kernel, out_shape=x)(x)


@case(array(64, 384, dtype=BF16))
def strided_values(x):
    """Strides Mosaic lacks: packed rows, and lanes."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(1, 16, 3), pl.ds(2, 128, 2)]

    return pl.pallas_call(kernel, out_shape=array(16, 128, dtype=BF16))(x)


@case(array(4, dtype=I32), array(64, 384), array(40, 60, dtype=BF16), array(1000))
def unaligned(starts, x, y, z):
    """Dynamic starts that no tile divides, read and written."""

    def kernel(starts_ref, x_ref, y_ref, z_ref, o_ref, p_ref, q_ref):
        row, column, other = starts_ref[0], starts_ref[1], starts_ref[2] * 7
        o_ref[...] = jnp.zeros_like(o_ref)
        o_ref[pl.ds(row, 9), pl.ds(column, 130)] = x_ref[
            pl.ds(row, 9), pl.ds(column * 3, 130)
        ]
        p_ref[...] = y_ref[...]
        p_ref[other, pl.ds(column, 20)] = y_ref[row, pl.ds(other, 20)]
        q_ref[...] = z_ref[pl.ds(other, 200)]
        q_ref[column] = z_ref[other]

    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *[pl.BlockSpec()] * 3],
        out_shape=(array(64, 384), array(40, 60, dtype=BF16), array(200)),
    )(starts, x, y, z)


# --- control flow ---


@case(array(64, 256))
def loops(x):
    def kernel(x_ref, o_ref):
        def step(n, carry):
            total, found = carry
            row = x_ref[pl.ds(n * 8, 8)]
            return total + row, found | (row > 3.0)

        zero = jnp.zeros((8, 256), F32)
        total, found = lax.fori_loop(0, 8, step, (zero, zero > 1.0))
        state = lax.while_loop(
            lambda s: s[0].sum() > 1.0,
            lambda s: (s[0] * 0.5, s[1] + 1),
            (total, jnp.int32(0)),
        )
        o_ref[...] = jnp.where(found, state[0], state[1].astype(F32))

    return pl.pallas_call(kernel, out_shape=array(8, 256))(x)


@case(array(64, 256))
def branches(x):
    def kernel(x_ref, o_ref):
        z = x_ref[...]
        choices = [jnp.exp, jnp.sin, lambda v: v * 2 > 1, jnp.abs]
        choices[2] = lambda v: (v * 2 > 1).astype(F32)
        o_ref[...] = lax.switch(pl.program_id(0), choices, z)
        flag = lax.cond(z.sum() > 0, lambda: z > 0, lambda: z < 1)

        @pl.when(pl.program_id(0) > 1)
        def _():
            o_ref[...] = jnp.where(flag, o_ref[...], 0.0)

    return over_rows(kernel, x, block=16)


# --- memory ---


@case(array(8, dtype=I32), array(64, 8, 128))
def prefetch_gather(numbers, x):
    def kernel(numbers_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * numbers_ref[pl.program_id(0)].astype(F32)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(8,),
        in_specs=[pl.BlockSpec((None, 8, 128), lambda i, n: (n[i], 0, 0))],
        out_specs=pl.BlockSpec((None, 8, 128), lambda i, n: (i, 0, 0)),
    )
    out = array(8, 8, 128)
    return pl.pallas_call(kernel, out_shape=out, grid_spec=spec)(numbers, x)


@case(array(8, dtype=I32), array(64, 256))
def dma_gather(numbers, x):
    """Rows fetched one by one, two copies in flight."""

    def kernel(numbers_ref, x_ref, o_ref, buffer, semaphores):
        def copy(n):
            row = x_ref.at[pl.ds(numbers_ref[n], 1)]
            slot = lax.rem(n, 2)
            return pltpu.make_async_copy(row, buffer.at[slot], semaphores.at[slot])

        copy(0).start()

        def step(n, _):
            pl.when(n + 1 < 8)(lambda: copy(n + 1).start())
            copy(n).wait()
            o_ref[pl.ds(n, 1)] = buffer[lax.rem(n, 2)]

        lax.fori_loop(0, 8, step, None)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(),
        in_specs=[pl.BlockSpec(memory_space=pltpu.ANY)],
        scratch_shapes=[pltpu.VMEM((2, 1, 256), F32), pltpu.SemaphoreType.DMA((2,))],
    )
    return pl.pallas_call(kernel, out_shape=array(8, 256), grid_spec=spec)(numbers, x)


@case(array(32, 128))
def scoped_memory(x):
    def kernel(x_ref, o_ref):
        def inner(vector, number, semaphore):
            vector[...] = x_ref[...] * 2
            number[0] = 3.0
            pl.semaphore_signal(semaphore, 2)
            pl.semaphore_wait(semaphore, 2)
            return vector[...] > number[0]

        found = pl.run_scoped(
            inner,
            pltpu.VMEM((32, 128), F32),
            pltpu.SMEM((1,), F32),
            pltpu.SemaphoreType.REGULAR,
        )
        o_ref[...] = jnp.where(found, 1.0, x_ref[...])

    return pl.pallas_call(kernel, out_shape=x)(x)


@case(array(512, 512, dtype=BF16), array(512, 512, dtype=BF16))
def inner_pipeline(x, y):
    """The matmul again, as a pipeline inside a kernel over whole arrays."""

    def kernel(x_ref, y_ref, o_ref, acc_ref):
        def step(x_block, y_block, o_block):
            k = pl.program_id(2)
            pl.when(k == 0)(lambda: acc_ref.__setitem__(..., jnp.zeros_like(acc_ref)))
            acc_ref[...] += jnp.dot(
                x_block[...], y_block[...], preferred_element_type=F32
            )
            o_block[...] = acc_ref[...]

        pltpu.emit_pipeline(
            step,
            grid=(4, 4, 2),
            in_specs=[
                pl.BlockSpec((128, 256), lambda i, j, k: (i, k)),
                pl.BlockSpec((256, 128), lambda i, j, k: (k, j)),
            ],
            out_specs=[pl.BlockSpec((128, 128), lambda i, j, k: (i, j))],
        )(x_ref, y_ref, o_ref)

    anywhere = pl.BlockSpec(memory_space=pltpu.ANY)
    return pl.pallas_call(
        kernel,
        out_shape=array(512, 512),
        in_specs=[anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.VMEM((128, 128), F32)],
    )(x, y)


@case(array(512, 256))
def mesh_kernel(x):
    @pl.kernel(out_shape=x, mesh=pltpu.create_tensorcore_mesh("core"))
    def double(x_ref, o_ref):
        def step(x_block, o_block):
            o_block[...] = x_block[...] * 2

        spec = pl.BlockSpec((64, 256), lambda i: (i, 0))
        pltpu.emit_pipeline(step, grid=(8,), in_specs=[spec], out_specs=[spec])(
            x_ref, o_ref
        )

    return double(x)


@case(array(dtype=I32), array(512, 256))
def dynamic_grid(steps, x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + pl.num_programs(0)

    return pl.pallas_call(
        kernel,
        out_shape=x,
        grid=(steps,),
        in_specs=[rows(64, 256)],
        out_specs=rows(64, 256),
    )(x)


@case(array(256, 256), array(256, 256))
def aliased(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    return pl.pallas_call(
        kernel,
        out_shape=x,
        grid=(4,),
        in_specs=[rows(64, 256)] * 2,
        out_specs=rows(64, 256),
        input_output_aliases={0: 0},
    )(x, y)


@case(array(256, 256))
def aliased_and_read_again(x):
    """The operand's block is the result's: two steps add to each block."""

    def kernel(x_ref, o_ref):
        o_ref[:8] = x_ref[8:16] + 1.0
        o_ref[8:16] = x_ref[:8] * 2.0

    return pl.pallas_call(
        kernel,
        out_shape=x,
        grid=(4, 2),
        in_specs=[pl.BlockSpec((64, 256), lambda i, j: (i, 0))],
        out_specs=pl.BlockSpec((64, 256), lambda i, j: (i, 0)),
        input_output_aliases={0: 0},
    )(x)


@case(array(264, 128))
def element_window(x):
    """Blocks of 16 rows, 8 apart: each overlaps the next."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[:8] + x_ref[8:]

    return pl.pallas_call(
        kernel,
        out_shape=array(256, 128),
        grid=(32,),
        in_specs=[pl.BlockSpec((pl.Element(16), 128), lambda i: (i * 8, 0))],
        out_specs=rows(8, 128),
    )(x)


@case(array(4, 256, 128))
def mapped(x):
    return jax.vmap(lambda row: CASES["softmax"].function(row))(x)
