"""Kernels held out, of a third author: pipelines in the style of JAX's TPU kernels
(scratch that the grid carries, copies by hand, results that are revisited)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Family, Shape
from tests.forms.sized import integers, made, normal, sized, uniform

family = Family("held-out third pipelines")
third = sized(family)
LOW = -1e30


def _dot(a, b, dims=((1,), (0,))):
    return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=F32)


@third(
    "discounted returns",
    "time runs backwards by the index map, the carry in eight rows of scratch",
    dict(T=32, N=128, C=8),
    dict(T=1024, N=2048, C=64),
    dict(T=4096, N=16384, C=128),
)
def _(T, N, C, dtype):
    steps = T // C

    def kernel(r_ref, d_ref, o_ref, carry_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            carry_ref[...] = jnp.zeros_like(carry_ref)

        def step(n, carry):
            t = C - 1 - n
            carry = r_ref[pl.ds(t, 1), :] + 0.99 * d_ref[pl.ds(t, 1), :] * carry
            o_ref[pl.ds(t, 1), :] = carry
            return carry

        last = lax.fori_loop(0, C, step, carry_ref[pl.ds(0, 1), :])
        carry_ref[...] = jnp.broadcast_to(last, carry_ref.shape)

    def fn(r, d):
        block = pl.BlockSpec((C, N), lambda i: (steps - 1 - i, 0))
        return pl.pallas_call(
            kernel,
            Shape((T, N), F32),
            grid=(steps,),
            in_specs=[block, block],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((8, N), F32)],
        )(r, d)

    def ref(r, d):
        step = lambda c, x: (x[0] + 0.99 * x[1] * c,) * 2
        return lax.scan(step, jnp.zeros((N,), F32), (r, d), reverse=True)[1]

    return fn, ref, [normal(T, N), uniform(T, N, lo=0.9)]


@third(
    "pipeline in a pipeline",
    "matmul in HBM, an inner pipeline over k with an accumulator of the outer kernel",
    dict(M=16, K=32, N=32, bm=8, bk=8, bn=16),
    dict(M=512, K=1024, N=512, bm=128, bk=128, bn=128),
    dict(M=4096, K=8192, N=4096, bm=256, bk=256, bn=256),
)
def _(M, K, N, bm, bk, bn, dtype):
    def kernel(x_ref, w_ref, b_ref, o_ref, acc_ref):
        i, j = pl.program_id(0), pl.program_id(1)

        def inner(x, w):
            @pl.when(pl.program_id(0) == 0)
            def _():
                acc_ref[...] = jnp.zeros_like(acc_ref)

            acc_ref[...] += jnp.dot(x[...], w[...], preferred_element_type=F32)

        pltpu.emit_pipeline(
            inner,
            grid=(K // bk,),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda k: (i, k)),
                pl.BlockSpec((bk, bn), lambda k: (k, j)),
            ],
        )(x_ref, w_ref)
        y = acc_ref[...] + b_ref[...].astype(F32)
        o_ref[...] = (y * jax.nn.sigmoid(1.702 * y)).astype(o_ref.dtype)

    def fn(x, w, b):
        any_ = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            kernel,
            Shape((M, N), x.dtype),
            grid=(M // bm, N // bn),
            in_specs=[any_, any_, pl.BlockSpec((1, bn), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), F32)],
        )(x, w, b)

    def ref(x, w, b):
        y = jnp.dot(x, w, preferred_element_type=F32) + b.astype(F32)
        return (y * jax.nn.sigmoid(1.702 * y)).astype(x.dtype)

    return (
        fn,
        ref,
        [
            normal(M, K, dtype=dtype),
            normal(K, N, dtype=dtype, scale=0.02),
            normal(1, N, dtype=dtype),
        ],
    )


@third(
    "two buffers by hand",
    "copies into one of two halves of scratch while the other is reduced",
    dict(M=16, N=128, bm=8, C=4),
    dict(M=1024, N=4096, bm=64, C=8),
    dict(M=16384, N=8192, bm=64, C=8),
)
def _(M, N, bm, C, dtype):
    bn = N // C

    def kernel(x_ref, o_ref, buf_ref, sem):
        i = pl.program_id(0)

        def copy(c, slot):
            where = x_ref.at[pl.ds(i * bm, bm), pl.ds(c * bn, bn)]
            return pltpu.make_async_copy(where, buf_ref.at[slot], sem.at[slot])

        copy(0, 0).start()

        def step(c, acc):
            @pl.when(c + 1 < C)
            def _():
                copy(c + 1, (c + 1) % 2).start()

            copy(c, c % 2).wait()
            x = buf_ref[c % 2].astype(F32)
            return acc + jnp.sum(x * x, axis=1, keepdims=True)

        total = lax.fori_loop(0, C, step, jnp.zeros((bm, 1), F32))
        o_ref[...] = jnp.sqrt(total)

    def fn(x):
        return pl.pallas_call(
            kernel,
            Shape((M, 1), F32),
            grid=(M // bm,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((bm, 1), lambda i: (i, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, bm, bn), dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        )(x)

    def ref(x):
        return jnp.sqrt((x.astype(F32) ** 2).sum(1, keepdims=True))

    return fn, ref, [normal(M, N, dtype=dtype)]


@third(
    "segment sum revisits",
    "sorted rows are added to the block of their segment, which the grid revisits",
    dict(T=24, D=128, S=5),
    dict(T=1024, D=512, S=64),
    dict(T=32768, D=1024, S=1024),
)
def _(T, D, S, dtype):
    def kernel(seg_ref, x_ref, o_ref):
        t = pl.program_id(0)
        before = seg_ref[jnp.maximum(t - 1, 0)]

        @pl.when((t == 0) | (before != seg_ref[t]))
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].astype(F32)

    def fn(x, seg):
        return pl.pallas_call(
            kernel,
            Shape((S, 1, D), F32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(T,),
                in_specs=[pl.BlockSpec((1, 1, D), lambda t, s: (t, 0, 0))],
                out_specs=pl.BlockSpec((1, 1, D), lambda t, s: (s[t], 0, 0)),
            ),
        )(seg, x)

    def ref(x, seg):
        return jax.ops.segment_sum(x.astype(F32), seg, num_segments=S)

    rows = lambda r: np.sort(np.r_[np.arange(S), r.integers(0, S, T - S)])
    return fn, ref, [normal(T, 1, D, dtype=dtype), made((T,), I32, rows)]


@third(
    "column moments",
    "sums and squares in eight rows of two results that all steps revisit",
    dict(M=64, N=256, bm=16, bn=128),
    dict(M=4096, N=1024, bm=256, bn=256),
    dict(M=65536, N=4096, bm=512, bn=1024),
)
def _(M, N, bm, bn, dtype):
    def kernel(x_ref, s_ref, q_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            s_ref[...] = jnp.zeros_like(s_ref)
            q_ref[...] = jnp.zeros_like(q_ref)

        x = x_ref[...].astype(F32).reshape(bm // 8, 8, bn)
        s_ref[...] += x.sum(axis=0)
        q_ref[...] += (x * x).sum(axis=0)

    def fn(x):
        out = pl.BlockSpec((8, bn), lambda j, i: (0, j))
        s, q = pl.pallas_call(
            kernel,
            (Shape((8, N), F32), Shape((8, N), F32)),
            grid=(N // bn, M // bm),
            in_specs=[pl.BlockSpec((bm, bn), lambda j, i: (i, j))],
            out_specs=(out, out),
        )(x)
        return s.sum(0), q.sum(0)

    def ref(x):
        x = x.astype(F32)
        return x.sum(0), (x * x).sum(0)

    return fn, ref, [normal(M, N, dtype=dtype)]


@third(
    "embedding norm",
    "rows of two tables by prefetched numbers, added, normed with weights",
    dict(T=12, V=20, P=6, D=64),
    dict(T=1024, V=1000, P=128, D=512),
    dict(T=16384, V=50304, P=1024, D=1024),
)
def _(T, V, P, D, dtype):
    def kernel(ids_ref, e_ref, p_ref, w_ref, b_ref, o_ref):
        x = e_ref[...].astype(F32) + p_ref[...].astype(F32)
        mean = x.mean(axis=-1, keepdims=True)
        x = x - mean
        x = x * lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-12)
        o_ref[...] = (x * w_ref[...] + b_ref[...]).astype(o_ref.dtype)

    def fn(e, p, w, b, ids):
        shared = pl.BlockSpec((1, 1, D), lambda t, ids: (0, 0, 0))
        return pl.pallas_call(
            kernel,
            Shape((T, 1, D), dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(T,),
                in_specs=[
                    pl.BlockSpec((1, 1, D), lambda t, ids: (ids[t], 0, 0)),
                    pl.BlockSpec((1, 1, D), lambda t, ids: (t % P, 0, 0)),
                    shared,
                    shared,
                ],
                out_specs=pl.BlockSpec((1, 1, D), lambda t, ids: (t, 0, 0)),
            ),
        )(ids, e, p, w, b)

    def ref(e, p, w, b, ids):
        x = e[ids].astype(F32) + p[jnp.arange(T) % P].astype(F32)
        x = x - x.mean(-1, keepdims=True)
        x = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        return (x * w[0] + b[0]).astype(dtype)

    return (
        fn,
        ref,
        [
            normal(V, 1, D, dtype=dtype),
            normal(P, 1, D, dtype=dtype),
            normal(1, 1, D),
            normal(1, 1, D),
            integers(T, hi=V),
        ],
    )
