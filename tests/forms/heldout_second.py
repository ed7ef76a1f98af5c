"""Kernels held out, of a second author: idioms of decoders, routers, losses, scans and
sparse products, written from the language's documents alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Family, Shape
from tests.forms.sized import integers, made, normal, sized, uniform

family = Family("held-out second")
second = sized(family)
LOW = -1e30


@second(
    "swa decode",
    "decode in a window, heads of one key together",
    dict(B=3, H=2, G=4, S=37, D=16, W=11, bk=8),
    {"B": 2, "H": 2, "G": 4, "S": 1024, "D": 64, "W": 256, "bk": 128},
    dict(B=64, H=8, G=8, S=8192, D=128, W=1024, bk=128),
    grad=False,
)
def _(B, H, G, S, D, W, bk, dtype):
    def kernel(len_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        b, j = pl.program_id(0), pl.program_id(2)
        n = len_ref[b]

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, LOW)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        lo = jnp.maximum(n - W, 0)

        @pl.when((j * bk < n) & ((j + 1) * bk > lo))
        def _():
            q = q_ref[0, 0].astype(F32) * (D**-0.5)
            k, v = k_ref[0, 0].astype(F32), v_ref[0, 0].astype(F32)
            s = jnp.dot(q, k.T, preferred_element_type=F32)
            pos = j * bk + lax.broadcasted_iota(jnp.int32, s.shape, 1)
            ok = (pos < n) & (pos >= lo)
            s = jnp.where(ok, s, LOW)
            v = jnp.where(
                (j * bk + lax.broadcasted_iota(jnp.int32, v.shape, 0)) < S, v, 0
            )
            m = jnp.maximum(m_ref[...], s.max(1, keepdims=True))
            p = jnp.exp(s - m) * ok
            a = jnp.exp(m_ref[...] - m)
            l_ref[...] = l_ref[...] * a + p.sum(1, keepdims=True)
            acc_ref[...] = acc_ref[...] * a + jnp.dot(p, v, preferred_element_type=F32)
            m_ref[...] = m

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o_ref[0, 0] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)

    def kv(b, h, j, n):
        lo = jnp.maximum(n[b] - W, 0) // bk
        hi = (n[b] - 1) // bk
        return b, h, jnp.clip(j, lo, hi), 0

    def fn(q, k, v, n):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((B, H, G, D), q.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(B, H, pl.cdiv(S, bk)),
                in_specs=[
                    pl.BlockSpec((1, 1, G, D), lambda b, h, j, n: (b, h, 0, 0)),
                    pl.BlockSpec((1, 1, bk, D), kv),
                    pl.BlockSpec((1, 1, bk, D), kv),
                ],
                out_specs=pl.BlockSpec((1, 1, G, D), lambda b, h, j, n: (b, h, 0, 0)),
                scratch_shapes=[
                    pltpu.VMEM((G, 1), F32),
                    pltpu.VMEM((G, 1), F32),
                    pltpu.VMEM((G, D), F32),
                ],
            ),
        )(n, q, k, v)

    def ref(q, k, v, n):
        s = jnp.einsum("bhgd,bhsd->bhgs", q.astype(F32), k.astype(F32)) * D**-0.5
        pos = jnp.arange(S)
        ok = (pos < n[:, None]) & (pos >= n[:, None] - W)
        p = jax.nn.softmax(jnp.where(ok[:, None, None], s, -jnp.inf), -1)
        return jnp.einsum("bhgs,bhsd->bhgd", p, v.astype(F32)).astype(q.dtype)

    return (
        fn,
        ref,
        [
            normal(B, H, G, D, dtype=dtype),
            normal(B, H, S, D, dtype=dtype),
            normal(B, H, S, D, dtype=dtype),
            integers(B, lo=S // 2, hi=S + 1),
        ],
    )


@second(
    "mla decode",
    "latent decode, two products of scores, a loop and its tail",
    dict(B=2, H=5, S=29, C=32, R=8, bk=8, bh=4),
    {"B": 2, "H": 16, "S": 512, "C": 128, "R": 32, "bk": 64, "bh": 16},
    dict(B=32, H=128, S=4096, C=512, R=64, bk=64, bh=64),
)
def _(B, H, S, C, R, bk, bh, dtype):
    scale = (C + R) ** -0.5

    def kernel(q_ref, qr_ref, kv_ref, kr_ref, o_ref):
        q, qr = q_ref[...], qr_ref[...]

        def body(j, c):
            m, l, acc = c
            kv = kv_ref[pl.ds(j * bk, bk), :]
            kr = kr_ref[pl.ds(j * bk, bk), :]
            s = pl.dot(q, kv, trans_b=True) + pl.dot(qr, kr, trans_b=True)
            s = s * scale
            pos = j * bk + jnp.arange(bk)[None, :]
            s = jnp.where(pos < S, s, -jnp.inf)
            mn = jnp.maximum(m, s.max(1))
            p = jnp.exp(s - mn[:, None])
            a = jnp.exp(m - mn)
            return (
                mn,
                l * a + p.sum(1),
                acc * a[:, None] + pl.dot(p.astype(kv.dtype), kv),
            )

        m, l, acc = lax.fori_loop(
            0,
            S // bk,
            body,
            (jnp.full((bh,), LOW, F32), jnp.zeros((bh,), F32), jnp.zeros((bh, C), F32)),
        )
        if S % bk:  # the tail, loaded with a mask
            j = S // bk
            keep = (jnp.arange(bk) + j * bk < S)[:, None]
            kv = pl.load(kv_ref, (pl.ds(j * bk, bk), slice(None)), mask=keep, other=0)
            kr = pl.load(kr_ref, (pl.ds(j * bk, bk), slice(None)), mask=keep, other=0)
            s = (pl.dot(q, kv, trans_b=True) + pl.dot(qr, kr, trans_b=True)) * scale
            s = jnp.where(keep.T, s, -jnp.inf)
            mn = jnp.maximum(m, s.max(1))
            p = jnp.exp(s - mn[:, None])
            a = jnp.exp(m - mn)
            l = l * a + p.sum(1)
            acc = acc * a[:, None] + pl.dot(p.astype(kv.dtype), kv)
        o_ref[...] = (acc / l[:, None]).astype(o_ref.dtype)

    def fn(q, qr, kv, kr):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((B, H, C), q.dtype),
            grid=(B, pl.cdiv(H, bh)),
            in_specs=[
                pl.BlockSpec((None, bh, C), lambda b, h: (b, h, 0)),
                pl.BlockSpec((None, bh, R), lambda b, h: (b, h, 0)),
                pl.BlockSpec((None, S, C), lambda b, h: (b, 0, 0)),
                pl.BlockSpec((None, S, R), lambda b, h: (b, 0, 0)),
            ],
            out_specs=pl.BlockSpec((None, bh, C), lambda b, h: (b, h, 0)),
        )(q, qr, kv, kr)

    def ref(q, qr, kv, kr):
        s = jnp.einsum("bhc,bsc->bhs", q, kv, preferred_element_type=F32) + jnp.einsum(
            "bhc,bsc->bhs", qr, kr, preferred_element_type=F32
        )
        p = jax.nn.softmax(s * scale, -1)
        return jnp.einsum("bhs,bsc->bhc", p, kv.astype(F32)).astype(q.dtype)

    return (
        fn,
        ref,
        [
            normal(B, H, C, dtype=dtype),
            normal(B, H, R, dtype=dtype),
            normal(B, S, C, dtype=dtype),
            normal(B, S, R, dtype=dtype),
        ],
    )


@second(
    "tree attention",
    "draft tokens see a prefix and their ancestors",
    dict(B=2, H=2, T=7, P=21, D=16, bk=8),
    {"B": 2, "H": 4, "T": 32, "P": 480, "D": 64, "bk": 128},
    dict(B=8, H=32, T=64, P=4096, D=128, bk=128),
)
def _(B, H, T, P, D, bk, dtype):
    L = P + T

    def kernel(q_ref, k_ref, v_ref, mask_ref, o_ref, m_ref, l_ref, acc_ref):
        j = pl.program_id(2)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full(m_ref.shape, LOW, F32)
            l_ref[...] = jnp.zeros(l_ref.shape, F32)
            acc_ref[...] = jnp.zeros(acc_ref.shape, F32)

        pos = j * bk + lax.broadcasted_iota(jnp.int32, (T, bk), 1)
        s = jnp.dot(q_ref[0, 0], k_ref[0, 0].T, preferred_element_type=F32) * D**-0.5
        # the tree mask is looked up by a gather of columns
        cols = jnp.clip(pos[0] - P, 0, T - 1)
        tree = mask_ref[...][:, cols] != 0
        ok = (pos < L) & ((pos < P) | tree)
        s = jnp.where(ok, s, LOW)
        m = jnp.maximum(m_ref[...], s.max(-1, keepdims=True))
        p = jnp.where(ok, jnp.exp(s - m), 0.0)
        a = jnp.exp(m_ref[...] - m)
        l_ref[...] = a * l_ref[...] + p.sum(-1, keepdims=True)
        acc_ref[...] = a * acc_ref[...] + jnp.dot(
            p.astype(dtype), v_ref[0, 0], preferred_element_type=F32
        )
        m_ref[...] = m

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o_ref[0, 0] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)

    def fn(q, k, v, mask):
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid=(B, H, pl.cdiv(L, bk)),
            in_specs=[
                pl.BlockSpec((1, 1, T, D), lambda b, h, j: (b, h, 0, 0)),
                pl.BlockSpec((1, 1, bk, D), lambda b, h, j: (b, h, j, 0), fill=0),
                pl.BlockSpec((1, 1, bk, D), lambda b, h, j: (b, h, j, 0), fill=0),
                pl.BlockSpec((T, T), lambda b, h, j: (0, 0)),
            ],
            out_specs=pl.BlockSpec((1, 1, T, D), lambda b, h, j: (b, h, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((T, 1), F32),
                pltpu.VMEM((T, 1), F32),
                pltpu.VMEM((T, D), F32),
            ],
        )(q, k, v, mask)

    def ref(q, k, v, mask):
        s = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=F32) * D**-0.5
        ok = jnp.concatenate([jnp.ones((T, P), bool), mask != 0], 1)
        p = jax.nn.softmax(jnp.where(ok, s, -jnp.inf), -1)
        return jnp.einsum("bhts,bhsd->bhtd", p, v.astype(F32)).astype(q.dtype)

    def tree(r):
        m = np.eye(T, dtype=np.int8)
        for t in range(1, T):
            p = r.integers(0, t)
            m[t] |= m[p]
        return m

    return (
        fn,
        ref,
        [
            normal(B, H, T, D, dtype=dtype),
            normal(B, H, L, D, dtype=dtype),
            normal(B, H, L, D, dtype=dtype),
            made((T, T), jnp.int8, tree),
        ],
    )


@second(
    "sinks window",
    "a window and a sink per head, loop bounds of the program",
    dict(B=2, H=3, S=23, D=16, bq=8, bk=8, W=9),
    {"B": 1, "H": 4, "S": 512, "D": 64, "bq": 128, "bk": 64, "W": 128},
    dict(B=2, H=64, S=4096, D=64, bq=128, bk=64, W=128),
)
def _(B, H, S, D, bq, bk, W, dtype):
    def kernel(sink_ref, q_ref, k_ref, v_ref, o_ref):
        h, i = pl.program_id(1), pl.program_id(2)
        q = q_ref[...]
        lo = jnp.maximum(i * bq - W + 1, 0) // bk
        hi = jnp.minimum(pl.cdiv((i + 1) * bq, bk), pl.cdiv(S, bk))
        rows = i * bq + lax.iota(jnp.int32, bq)[:, None]

        def body(j, c):
            m, l, acc = c
            cols = j * bk + lax.iota(jnp.int32, bk)
            inside = (cols < S)[:, None]
            k = pl.load(
                k_ref,
                (pl.ds(j * bk, bk), slice(None)),
                mask=jnp.broadcast_to(inside, (bk, D)),
                other=0.0,
            )
            v = pl.load(
                v_ref,
                (pl.ds(j * bk, bk), slice(None)),
                mask=jnp.broadcast_to(inside, (bk, D)),
                other=0.0,
            )
            s = lax.dot_general(
                q, k, (((1,), (1,)), ((), ())), preferred_element_type=F32
            ) * (D**-0.5)
            ok = (cols[None] <= rows) & (cols[None] > rows - W) & (cols[None] < S)
            s = jnp.where(ok, s, LOW)
            mn = jnp.maximum(m, s.max(1, keepdims=True))
            p = jnp.exp2((s - mn) * math.log2(math.e))
            p = jnp.where(ok, p, 0)
            a = jnp.exp2((m - mn) * math.log2(math.e))
            return (
                mn,
                l * a + p.sum(1, keepdims=True),
                acc * a + jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32),
            )

        m0 = jnp.full((bq, 1), sink_ref[h].astype(F32))
        _, l, acc = lax.fori_loop(
            lo, hi, body, (m0, jnp.ones((bq, 1), F32), jnp.zeros((bq, D), F32))
        )
        o_ref[...] = (acc / l).astype(o_ref.dtype)

    def fn(q, k, v, sink):
        full = pl.BlockSpec((None, None, S, D), lambda b, h, i: (b, h, 0, 0))
        blk = pl.BlockSpec((None, None, bq, D), lambda b, h, i: (b, h, i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid=(B, H, pl.cdiv(S, bq)),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), blk, full, full],
            out_specs=blk,
        )(sink, q, k, v)

    def ref(q, k, v, sink):
        s = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=F32) * D**-0.5
        i, j = jnp.arange(S)[:, None], jnp.arange(S)[None]
        s = jnp.where((j <= i) & (j > i - W), s, -jnp.inf)
        s = jnp.concatenate(
            [s, jnp.broadcast_to(sink.astype(F32)[None, :, None, None], (B, H, S, 1))],
            -1,
        )
        p = jax.nn.softmax(s, -1)[..., :-1]
        return jnp.einsum("bhts,bhsd->bhtd", p, v.astype(F32)).astype(q.dtype)

    return fn, ref, [normal(B, H, S, D, dtype=dtype) for _ in range(3)] + [normal(H)]


@second(
    "block sparse",
    "a list of key blocks per query block, statistics in lanes",
    dict(B=1, H=2, S=32, D=16, bq=8, bk=8, M=3),
    {"B": 1, "H": 2, "S": 1024, "D": 64, "bq": 128, "bk": 128, "M": 3},
    dict(B=1, H=32, S=16384, D=128, bq=128, bk=128, M=24),
)
def _(B, H, S, D, bq, bk, M, dtype):
    nq, nk = S // bq, S // bk

    def kernel(idx_ref, cnt_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        i, t = pl.program_id(2), pl.program_id(3)

        @pl.when(t == 0)
        def init():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when(t < cnt_ref[i])
        def step():
            s = (
                lax.dot_general(
                    q_ref[...],
                    k_ref[...],
                    (((1,), (1,)), ((), ())),
                    preferred_element_type=F32,
                )
                * D**-0.5
            )
            m_prev = m_ref[:, 0]
            m = jnp.maximum(m_prev, s.max(1))
            p = jnp.exp(s - m[:, None])
            a = jnp.exp(m_prev - m)
            l_ref[...] = jnp.broadcast_to(
                (l_ref[:, 0] * a + p.sum(1))[:, None], l_ref.shape
            )
            m_ref[...] = jnp.broadcast_to(m[:, None], m_ref.shape)
            acc_ref[...] = acc_ref[...] * a[:, None] + jnp.dot(
                p.astype(v_ref.dtype), v_ref[...], preferred_element_type=F32
            )

        @pl.when(t == M - 1)
        def out():
            l = l_ref[:, :1]
            o_ref[...] = (acc_ref[...] / jnp.where(l == 0, 1, l)).astype(o_ref.dtype)

    def fn(q, k, v, idx, cnt):
        qs = pl.BlockSpec(
            (None, None, bq, D), lambda b, h, i, t, idx, cnt: (b, h, i, 0)
        )
        ks = pl.BlockSpec(
            (None, None, bk, D), lambda b, h, i, t, idx, cnt: (b, h, idx[i, t], 0)
        )
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(B, H, nq, M),
                in_specs=[qs, ks, ks],
                out_specs=qs,
                scratch_shapes=[
                    pltpu.VMEM((bq, 128), F32),
                    pltpu.VMEM((bq, 128), F32),
                    pltpu.VMEM((bq, D), F32),
                ],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
        )(idx, cnt, q, k, v)

    def ref(q, k, v, idx, cnt):
        s = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=F32) * D**-0.5
        on = (
            jnp.zeros((nq, nk), bool)
            .at[jnp.arange(nq)[:, None], idx]
            .max(jnp.arange(M)[None] < cnt[:, None])
        )
        ok = jnp.repeat(jnp.repeat(on, bq, 0), bk, 1)
        p = jax.nn.softmax(jnp.where(ok, s, -jnp.inf), -1)
        return jnp.einsum("bhts,bhsd->bhtd", p, v.astype(F32)).astype(q.dtype)

    return (
        fn,
        ref,
        [normal(B, H, S, D, dtype=dtype) for _ in range(3)]
        + [
            made(
                (nq, M),
                I32,
                lambda r: np.stack([np.sort(r.permutation(nk)[:M]) for _ in range(nq)]),
            ),
            integers(nq, lo=1, hi=M + 1),
        ],
    )


@second(
    "varlen packed",
    "packed sequences, segments of offsets, masked values",
    dict(T=29, H=2, K=1, D=16, n=4, bq=8, bk=8),
    {"T": 512, "H": 4, "K": 2, "D": 64, "n": 4, "bq": 128, "bk": 128},
    dict(T=8192, H=32, K=8, D=128, n=16, bq=128, bk=128),
)
def _(T, H, K, D, n, bq, bk, dtype):
    def kernel(cu_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        i, j = pl.program_id(1), pl.program_id(2)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, LOW)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when(j * bk < (i + 1) * bq)
        def _():
            rows = i * bq + lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
            cols = j * bk + lax.broadcasted_iota(jnp.int32, (1, bk), 1)
            rs, cs = jnp.zeros_like(rows), jnp.zeros_like(cols)
            for s in range(1, n + 1):
                rs += (rows >= cu_ref[s]).astype(jnp.int32)
                cs += (cols >= cu_ref[s]).astype(jnp.int32)
            ok = (rs == cs) & (cols <= rows) & (cols < T)
            s = (
                jnp.dot(q_ref[:, 0, :], k_ref[:, 0, :].T, preferred_element_type=F32)
                * D**-0.5
            )
            s = jnp.where(ok, s, LOW)
            m = jnp.maximum(m_ref[...], s.max(1, keepdims=True))
            p = jnp.where(ok, jnp.exp(s - m), 0)
            a = jnp.exp(m_ref[...] - m)
            l_ref[...] = l_ref[...] * a + p.sum(1, keepdims=True)
            v = jnp.where(cols.reshape(bk, 1) < T, v_ref[:, 0, :], 0)
            acc_ref[...] = acc_ref[...] * a + jnp.dot(
                p.astype(v.dtype), v, preferred_element_type=F32
            )
            m_ref[...] = m

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o_ref[:, 0, :] = (acc_ref[...] / jnp.maximum(l_ref[...], 1e-20)).astype(
                o_ref.dtype
            )

    def fn(q, k, v, cu):
        g = H // K
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(H, pl.cdiv(T, bq), pl.cdiv(T, bk)),
                in_specs=[
                    pl.BlockSpec((bq, 1, D), lambda h, i, j, cu: (i, h, 0)),
                    pl.BlockSpec((bk, 1, D), lambda h, i, j, cu: (j, h // g, 0)),
                    pl.BlockSpec((bk, 1, D), lambda h, i, j, cu: (j, h // g, 0)),
                ],
                out_specs=pl.BlockSpec((bq, 1, D), lambda h, i, j, cu: (i, h, 0)),
                scratch_shapes=[
                    pltpu.VMEM((bq, 1), F32),
                    pltpu.VMEM((bq, 1), F32),
                    pltpu.VMEM((bq, D), F32),
                ],
            ),
        )(cu, q, k, v)

    def ref(q, k, v, cu):
        seg = jnp.searchsorted(cu[1:], jnp.arange(T), side="right")
        k, v = jnp.repeat(k, H // K, 1), jnp.repeat(v, H // K, 1)
        s = jnp.einsum("thd,shd->hts", q, k, preferred_element_type=F32) * D**-0.5
        ok = (seg[:, None] == seg[None]) & (
            jnp.arange(T)[None] <= jnp.arange(T)[:, None]
        )
        p = jax.nn.softmax(jnp.where(ok, s, -jnp.inf), -1)
        return jnp.einsum("hts,shd->thd", p, v.astype(F32)).astype(q.dtype)

    cu = lambda r: np.concatenate(
        [[0], np.sort(r.permutation(T - 1)[: n - 1] + 1), [T]]
    )
    return (
        fn,
        ref,
        [
            normal(T, H, D, dtype=dtype),
            normal(T, K, D, dtype=dtype),
            normal(T, K, D, dtype=dtype),
            made((n + 1,), I32, cu),
        ],
    )


@second(
    "merge states",
    "two parts of an attention by their logsumexps",
    dict(T=13, H=3, D=8, bt=4),
    {"T": 512, "H": 8, "D": 64, "bt": 16},
    dict(T=16384, H=32, D=128, bt=16),
)
def _(T, H, D, bt, dtype):
    def kernel(a_ref, la_ref, b_ref, lb_ref, o_ref, l_ref):
        la, lb = la_ref[...], lb_ref[...]
        m = jnp.maximum(la, lb)
        ea, eb = jnp.exp(la - m), jnp.exp(lb - m)
        o_ref[...] = (
            (
                a_ref[...].astype(F32) * ea[..., None]
                + b_ref[...].astype(F32) * eb[..., None]
            )
            / (ea + eb)[..., None]
        ).astype(o_ref.dtype)
        l_ref[...] = m + jnp.log(ea + eb)

    def fn(a, la, b, lb):
        o, l = (
            pl.BlockSpec((bt, H, D), lambda i: (i, 0, 0)),
            pl.BlockSpec((bt, H), lambda i: (i, 0)),
        )
        return pl.pallas_call(
            kernel,
            out_shape=[Shape(a.shape, a.dtype), Shape(la.shape, F32)],
            grid=pl.cdiv(T, bt),
            in_specs=[o, l, o, l],
            out_specs=[o, l],
        )(a, la, b, lb)

    def ref(a, la, b, lb):
        l = jnp.logaddexp(la, lb)
        return [
            (
                a.astype(F32) * jnp.exp(la - l)[..., None]
                + b.astype(F32) * jnp.exp(lb - l)[..., None]
            ).astype(a.dtype),
            l,
        ]

    return (
        fn,
        ref,
        [
            normal(T, H, D, dtype=dtype),
            normal(T, H),
            normal(T, H, D, dtype=dtype),
            normal(T, H),
        ],
    )


@second(
    "softcap alibi",
    "soft cap and slopes, vectors for statistics",
    dict(B=2, H=2, S=24, D=8, bq=8, bk=8),
    {"B": 1, "H": 4, "S": 512, "D": 128, "bq": 64, "bk": 64},
    dict(B=4, H=16, S=4096, D=256, bq=64, bk=64),
)
def _(B, H, S, D, bq, bk, dtype):
    def kernel(q_ref, k_ref, v_ref, o_ref):
        h, i = lax.rem(pl.program_id(0), H), pl.program_id(1)
        slope = jnp.exp2(-8.0 * (h + 1).astype(F32) / H)
        q = q_ref[...].astype(F32) * D**-0.5

        def body(j, c):
            m, l, acc = c
            k = k_ref[pl.dslice(j * bk, bk)]
            v = v_ref[pl.dslice(j * bk, bk)]
            s = jnp.einsum("qd,kd->qk", q.astype(dtype), k, preferred_element_type=F32)
            s = 30.0 * jnp.tanh(s / 30.0)
            rel = (j * bk + jnp.arange(bk))[None, :] - (i * bq + jnp.arange(bq))[
                :, None
            ]
            s = jnp.where(rel <= 0, s + slope * rel, LOW)
            mn = jnp.maximum(m, s.max(-1))
            a = jnp.exp(m - mn)
            p = jnp.exp(s - mn[:, None])
            return (
                mn,
                a * l + p.sum(-1),
                acc * a[:, None]
                + jnp.einsum(
                    "qk,kd->qd", p.astype(dtype), v, preferred_element_type=F32
                ),
            )

        hi = ((i + 1) * bq + bk - 1) // bk
        _, l, acc = lax.fori_loop(
            0,
            hi,
            body,
            (jnp.full(bq, LOW, F32), jnp.zeros(bq, F32), jnp.zeros((bq, D), F32)),
        )
        o_ref[...] = (acc / l[:, None]).astype(dtype)

    def fn(q, k, v):
        r = lambda x: x.reshape(B * H, S, D)
        full, blk = (
            pl.BlockSpec((None, S, D), lambda b, i: (b, 0, 0)),
            pl.BlockSpec((None, bq, D), lambda b, i: (b, i, 0)),
        )
        return pl.pallas_call(
            kernel,
            out_shape=Shape((B * H, S, D), dtype),
            grid=(B * H, S // bq),
            in_specs=[blk, full, full],
            out_specs=blk,
        )(r(q), r(k), r(v)).reshape(q.shape)

    def ref(q, k, v):
        s = 30 * jnp.tanh(
            jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=F32)
            * D**-0.5
            / 30
        )
        rel = jnp.arange(S)[None] - jnp.arange(S)[:, None]
        s = s + jnp.exp2(-8.0 * jnp.arange(1, H + 1) / H)[:, None, None] * rel
        p = jax.nn.softmax(jnp.where(rel <= 0, s, -jnp.inf), -1)
        return jnp.einsum("bhts,bhsd->bhtd", p, v.astype(F32)).astype(q.dtype)

    return fn, ref, [normal(B, H, S, D, dtype=dtype) for _ in range(3)]


@second(
    "grouped tiles",
    "tiles of rows with one expert each",
    dict(M=24, N=16, K=16, E=3, bm=8, bn=8, bk=8),
    {"M": 512, "N": 256, "K": 256, "E": 4, "bm": 128, "bn": 128, "bk": 64},
    dict(M=16384, N=4096, K=2048, E=32, bm=128, bn=128, bk=64),
)
def _(M, N, K, E, bm, bn, bk, dtype):
    def kernel(e_ref, x_ref, w_ref, o_ref, acc):
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += jnp.dot(x_ref[...], w_ref[0], preferred_element_type=F32)

        @pl.when(k == K // bk - 1)
        def _():
            o_ref[...] = acc[...].astype(o_ref.dtype)

    def fn(x, w, e):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((M, N), dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(M // bm, N // bn, K // bk),
                in_specs=[
                    pl.BlockSpec((bm, bk), lambda i, j, k, e: (i, k)),
                    pl.BlockSpec((1, bk, bn), lambda i, j, k, e: (e[i], k, j)),
                ],
                out_specs=pl.BlockSpec((bm, bn), lambda i, j, k, e: (i, j)),
                scratch_shapes=[pltpu.VMEM((bm, bn), F32)],
            ),
        )(e, x, w)

    def ref(x, w, e):
        we = jnp.repeat(e, bm)
        out = jnp.zeros((M, N), F32)
        for n in range(E):
            out = jnp.where(
                (we == n)[:, None], jnp.dot(x, w[n], preferred_element_type=F32), out
            )
        return out.astype(dtype)

    return (
        fn,
        ref,
        [
            normal(M, K, dtype=dtype, scale=0.3),
            normal(E, K, N, dtype=dtype, scale=0.3),
            made((M // bm,), I32, lambda r: np.sort(r.integers(0, E, M // bm))),
        ],
    )


@second(
    "gptq int4",
    "eight weights in a word, packed zeros",
    dict(M=5, N=16, K=32, g=8, bn=8, bk=16),
    {"M": 16, "N": 256, "K": 512, "g": 64, "bn": 128, "bk": 128},
    dict(M=16, N=8192, K=8192, g=128, bn=128, bk=256),
    grad=False,
)
def _(M, N, K, g, bn, bk, dtype):
    def kernel(x_ref, w_ref, s_ref, z_ref, o_ref, acc):
        k = pl.program_id(1)

        @pl.when(k == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        sh = jnp.arange(8, dtype=jnp.int32) * 4
        w = (w_ref[...][:, None, :] >> sh[None, :, None]) & 0xF  # (bk/8, 8, bn)
        w = w.reshape(bk, bn)
        z = ((z_ref[...][:, :, None] >> sh[None, None, :]) & 0xF).reshape(bk // g, bn)
        z = jnp.repeat(z, g, axis=0)
        s = jnp.repeat(s_ref[...], g, axis=0)
        wf = (w - z - 1).astype(dtype) * s
        acc[...] += jnp.dot(x_ref[...], wf, preferred_element_type=F32)

        @pl.when(k == K // bk - 1)
        def _():
            o_ref[...] = acc[...].astype(o_ref.dtype)

    def fn(x, w, s, z):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((M, N), dtype),
            grid=(N // bn, K // bk),
            in_specs=[
                pl.BlockSpec((M, bk), lambda n, k: (0, k)),
                pl.BlockSpec((bk // 8, bn), lambda n, k: (k, n)),
                pl.BlockSpec((bk // g, bn), lambda n, k: (k, n)),
                pl.BlockSpec((bk // g, bn // 8), lambda n, k: (k, n)),
            ],
            out_specs=pl.BlockSpec((M, bn), lambda n, k: (0, n)),
            scratch_shapes=[pltpu.VMEM((M, bn), F32)],
        )(x, w, s, z)

    def ref(x, w, s, z):
        sh = jnp.arange(8) * 4
        wi = ((w[:, None] >> sh[None, :, None]) & 15).reshape(K, N)
        zi = ((z[:, :, None] >> sh) & 15).reshape(K // g, N)
        wf = (wi - jnp.repeat(zi, g, 0) - 1).astype(dtype) * jnp.repeat(s, g, 0)
        return jnp.dot(x, wf, preferred_element_type=F32).astype(dtype)

    return (
        fn,
        ref,
        [
            normal(M, K, dtype=dtype, scale=0.3),
            integers(K // 8, N, lo=-(2**31), hi=2**31 - 1),
            uniform(K // g, N, dtype=dtype, lo=0.01, hi=0.1),
            integers(K // g, N // 8, lo=-(2**31), hi=2**31 - 1),
        ],
    )


@second(
    "swiglu pair",
    "gate and up of one array, two accumulators",
    dict(T=20, D=24, F=16, bm=8, bn=8, bk=8),
    {"T": 256, "D": 256, "F": 256, "bm": 128, "bn": 128, "bk": 64},
    dict(T=8192, D=4096, F=14336, bm=128, bn=128, bk=64),
)
def _(T, D, F, bm, bn, bk, dtype):
    def kernel(x_ref, w_ref, b_ref, o_ref, g, u):
        @pl.when(pl.program_id(2) == 0)
        def _():
            g[...] = jnp.zeros_like(g)
            u[...] = jnp.zeros_like(u)

        x = x_ref[...]
        g[...] += jnp.dot(x, w_ref[0], preferred_element_type=F32)
        u[...] += jnp.dot(x, w_ref[1], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            gate = g[...] + b_ref[0].astype(F32)
            up = u[...] + b_ref[1].astype(F32)
            gate = jnp.minimum(gate, 7.0)
            up = jnp.clip(up, -7.0, 7.0)  # gpt-oss clamps
            o_ref[...] = (gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)).astype(
                o_ref.dtype
            )

    def fn(x, w, b):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((T, F), dtype),
            grid=(pl.cdiv(T, bm), pl.cdiv(F, bn), D // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
                pl.BlockSpec((2, bk, bn), lambda i, j, k: (0, k, j)),
                pl.BlockSpec((2, 1, bn), lambda i, j, k: (0, 0, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), F32)] * 2,
        )(x, w, b)

    def ref(x, w, b):
        g = jnp.dot(x, w[0], preferred_element_type=F32) + b[0]
        u = jnp.dot(x, w[1], preferred_element_type=F32) + b[1]
        g = jnp.minimum(g, 7.0)
        u = jnp.clip(u, -7.0, 7.0)
        return (g * jax.nn.sigmoid(1.702 * g) * (u + 1)).astype(dtype)

    return (
        fn,
        ref,
        [
            normal(T, D, dtype=dtype, scale=0.3),
            normal(2, D, F, dtype=dtype, scale=0.2),
            normal(2, 1, F, dtype=dtype),
        ],
    )


@second(
    "dw db",
    "a layer's two cotangents in one kernel",
    dict(T=37, D=16, F=24, bt=8, bd=8, bf=8),
    {"T": 512, "D": 256, "F": 256, "bt": 128, "bd": 128, "bf": 128},
    dict(T=32768, D=4096, F=4096, bt=128, bd=128, bf=128),
)
def _(T, D, F, bt, bd, bf, dtype):
    def kernel(x_ref, dy_ref, dw_ref, db_ref):
        t = pl.program_id(2)
        keep = (t * bt + lax.broadcasted_iota(jnp.int32, (bt, 1), 0)) < T
        x, dy = jnp.where(keep, x_ref[...], 0), jnp.where(keep, dy_ref[...], 0)

        @pl.when(t == 0)
        def _():
            dw_ref[...] = jnp.zeros_like(dw_ref)

        dw_ref[...] += lax.dot_general(
            x, dy, (((0,), (0,)), ((), ())), preferred_element_type=F32
        )

        @pl.when(pl.program_id(1) == 0)
        def _():
            part = dy.astype(F32).sum(0)
            db_ref[...] = jnp.where(t == 0, part, db_ref[...] + part)

    def fn(x, dy):
        return pl.pallas_call(
            kernel,
            out_shape=[Shape((D, F), F32), Shape((F,), F32)],
            grid=(F // bf, D // bd, pl.cdiv(T, bt)),
            in_specs=[
                pl.BlockSpec((bt, bd), lambda j, i, t: (t, i)),
                pl.BlockSpec((bt, bf), lambda j, i, t: (t, j)),
            ],
            out_specs=[
                pl.BlockSpec((bd, bf), lambda j, i, t: (i, j)),
                pl.BlockSpec((bf,), lambda j, i, t: (j,)),
            ],
        )(x, dy)

    return (
        fn,
        lambda x, dy: [
            jnp.dot(x.T, dy, preferred_element_type=F32),
            dy.astype(F32).sum(0),
        ],
        [normal(T, D, dtype=dtype, scale=0.3), normal(T, F, dtype=dtype, scale=0.3)],
    )


@second(
    "out projection",
    "heads are an axis to sum over",
    dict(B=2, S=13, H=3, D=8, E=24, bs=8, be=8),
    {"B": 2, "S": 256, "H": 4, "D": 64, "E": 256, "bs": 128, "be": 128},
    dict(B=4, S=4096, H=32, D=128, E=4096, bs=128, be=128),
)
def _(B, S, H, D, E, bs, be, dtype):
    def kernel(a_ref, w_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(3) == 0)
        def _():
            acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

        acc_ref[...] += jnp.dot(a_ref[...], w_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(3) == H - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def fn(a, w):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((B, S, E), dtype),
            grid=(B, pl.cdiv(S, bs), E // be, H),
            in_specs=[
                pl.BlockSpec((None, bs, None, D), lambda b, i, j, h: (b, i, h, 0)),
                pl.BlockSpec((None, D, be), lambda b, i, j, h: (h, 0, j)),
            ],
            out_specs=pl.BlockSpec((None, bs, be), lambda b, i, j, h: (b, i, j)),
            scratch_shapes=[pltpu.VMEM((bs, be), F32)],
        )(a, w)

    return (
        fn,
        lambda a, w: jnp.einsum(
            "bshd,hde->bse", a, w, preferred_element_type=F32
        ).astype(dtype),
        [
            normal(B, S, H, D, dtype=dtype, scale=0.3),
            normal(H, D, E, dtype=dtype, scale=0.3),
        ],
    )


@second(
    "triton tutorial",
    "Triton's tutorial line by line: remainders and index arrays",
    dict(M=21, N=19, K=17, bm=8, bn=8, bk=8, gm=2),
    {"M": 256, "N": 512, "K": 256, "bm": 128, "bn": 256, "bk": 64, "gm": 2},
    dict(M=8192, N=8192, K=8192, bm=128, bn=256, bk=64, gm=8),
)
def _(M, N, K, bm, bn, bk, gm, dtype):
    tm, tn = pl.cdiv(M, bm), pl.cdiv(N, bn)

    def kernel(a_ref, b_ref, c_ref):
        pid = pl.program_id(0)
        per = gm * tn
        group = pid // per
        first = group * gm
        size = jnp.minimum(tm - first, gm)
        pm = first + (pid % per) % size
        pn = (pid % per) // size
        am = (pm * bm + jnp.arange(bm)) % M
        bnn = (pn * bn + jnp.arange(bn)) % N

        def body(k, acc):
            rk = k * bk + jnp.arange(bk)
            a = pl.load(
                a_ref, (am[:, None], rk[None, :]), mask=(rk[None, :] < K), other=0.0
            )
            b = pl.load(
                b_ref, (rk[:, None], bnn[None, :]), mask=(rk[:, None] < K), other=0.0
            )
            return acc + pl.dot(a, b)

        acc = lax.fori_loop(0, pl.cdiv(K, bk), body, jnp.zeros((bm, bn), F32))
        acc = jnp.where(acc >= 0, acc, 0.01 * acc)
        cm, cn = pm * bm + jnp.arange(bm), pn * bn + jnp.arange(bn)
        pl.store(
            c_ref,
            (cm[:, None], cn[None, :]),
            acc.astype(dtype),
            mask=(cm[:, None] < M) & (cn[None, :] < N),
        )

    def fn(a, b):
        return pl.pallas_call(kernel, out_shape=Shape((M, N), dtype), grid=(tm * tn,))(
            a, b
        )

    def ref(a, b):
        c = jnp.dot(a, b, preferred_element_type=F32)
        return jnp.where(c >= 0, c, 0.01 * c).astype(dtype)

    return (
        fn,
        ref,
        [normal(M, K, dtype=dtype, scale=0.3), normal(K, N, dtype=dtype, scale=0.3)],
    )


@second(
    "ragged dot",
    "experts visit row blocks, everything under one guard",
    dict(M=21, K=16, N=16, E=3, bm=8, bn=8, bk=8),
    {"M": 512, "K": 256, "N": 256, "E": 4, "bm": 128, "bn": 128, "bk": 64},
    dict(M=16384, K=2048, N=4096, E=16, bm=128, bn=128, bk=64),
)
def _(M, K, N, E, bm, bn, bk, dtype):
    def kernel(off_ref, x_ref, w_ref, o_ref, acc):
        e, i, k = pl.program_id(2), pl.program_id(1), pl.program_id(3)
        lo, hi = off_ref[e], off_ref[e + 1]

        @pl.when((lo < (i + 1) * bm) & (hi > i * bm))
        def _():
            @pl.when(k == 0)
            def _():
                acc[...] = jnp.zeros_like(acc)

            acc[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)

            @pl.when(k == K // bk - 1)
            def _():
                r = i * bm + lax.broadcasted_iota(jnp.int32, (bm, bn), 0)
                o_ref[...] = lax.select(
                    (r >= lo) & (r < hi), acc[...], o_ref[...].astype(F32)
                ).astype(dtype)

    def fn(x, w, off):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((M, N), dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(N // bn, pl.cdiv(M, bm), E, K // bk),
                in_specs=[
                    pl.BlockSpec((bm, bk), lambda j, i, e, k, o: (i, k)),
                    pl.BlockSpec((None, bk, bn), lambda j, i, e, k, o: (e, k, j)),
                ],
                out_specs=pl.BlockSpec((bm, bn), lambda j, i, e, k, o: (i, j)),
                scratch_shapes=[pltpu.VMEM((bm, bn), F32)],
            ),
        )(off, x, w)

    def ref(x, w, off):
        e = jnp.searchsorted(off[1:], jnp.arange(M), side="right")
        out = jnp.zeros((M, N), F32)
        for n in range(E):
            out = jnp.where(
                (e == n)[:, None], jnp.dot(x, w[n], preferred_element_type=F32), out
            )
        return out.astype(dtype)

    return (
        fn,
        ref,
        [
            normal(M, K, dtype=dtype, scale=0.3),
            normal(E, K, N, dtype=dtype, scale=0.3),
            made(
                (E + 1,),
                I32,
                lambda r: np.concatenate([[0], np.sort(r.integers(0, M, E - 1)), [M]]),
            ),
        ],
    )


@second(
    "group norm phases",
    "two phases as an axis",
    dict(n=2, H=5, C=12, g=3, bh=2),
    {"n": 2, "H": 16, "C": 64, "g": 8, "bh": 8},
    dict(n=32, H=64, C=512, g=32, bh=8),
)
def _(n, H, C, g, bh, dtype):
    W, c = H, C // g

    def kernel(x_ref, w_ref, b_ref, o_ref, s_ref, q_ref):
        ph, i = pl.program_id(1), pl.program_id(2)

        @pl.when((ph == 0) & (i == 0))
        def _():
            s_ref[...] = jnp.zeros_like(s_ref)
            q_ref[...] = jnp.zeros_like(q_ref)

        rows = (i * bh + lax.broadcasted_iota(jnp.int32, (bh, 1, 1), 0)) < H
        x = jnp.where(rows, x_ref[0].astype(F32), 0.0)

        @pl.when(ph == 0)
        def _():
            xr = x.reshape(bh * W, g, c)
            s_ref[...] += xr.sum((0, 2)).reshape(1, g)
            q_ref[...] += (xr * xr).sum((0, 2)).reshape(1, g)

        @pl.when(ph == 1)
        def _():
            mean = s_ref[0] / (H * W * c)
            rstd = lax.rsqrt(q_ref[0] / (H * W * c) - mean**2 + 1e-5)
            y = (x - jnp.repeat(mean, c)) * jnp.repeat(rstd, c)
            y = y * w_ref[...].astype(F32) + b_ref[...].astype(F32)
            o_ref[0] = (y * jax.nn.sigmoid(y)).astype(o_ref.dtype)

    def fn(x, w, b):
        return pl.pallas_call(
            kernel,
            out_shape=Shape(x.shape, x.dtype),
            grid=(n, 2, pl.cdiv(H, bh)),
            in_specs=[
                pl.BlockSpec((1, bh, W, C), lambda b, p, i: (b, i, 0, 0)),
                pl.BlockSpec((C,), lambda b, p, i: (0,)),
                pl.BlockSpec((C,), lambda b, p, i: (0,)),
            ],
            out_specs=pl.BlockSpec((1, bh, W, C), lambda b, p, i: (b, i * p, 0, 0)),
            scratch_shapes=[pltpu.VMEM((1, g), F32), pltpu.VMEM((1, g), F32)],
        )(x, w, b)

    def ref(x, w, b):
        xf = x.astype(F32).reshape(n, H * W, g, c)
        m, v = xf.mean((1, 3), keepdims=True), xf.var((1, 3), keepdims=True)
        y = ((xf - m) * lax.rsqrt(v + 1e-5)).reshape(x.shape) * w.astype(
            F32
        ) + b.astype(F32)
        return (y * jax.nn.sigmoid(y)).astype(x.dtype)

    return (
        fn,
        ref,
        [
            normal(n, H, W, C, dtype=dtype),
            normal(C, dtype=dtype),
            normal(C, dtype=dtype),
        ],
    )


@second(
    "batch norm train",
    "Welford's merges along rows, then another call",
    dict(T=21, C=12, bt=4, bc=4),
    {"T": 1024, "C": 256, "bt": 256, "bc": 128},
    dict(T=131072, C=1024, bt=256, bc=128),
)
def _(T, C, bt, bc, dtype):
    def stats(x_ref, rm_ref, rv_ref, m_ref, v_ref, nm_ref, nv_ref):
        i = pl.program_id(1)
        x = x_ref[...].astype(F32)
        cnt = jnp.minimum(T - i * bt, bt).astype(F32)
        keep = (lax.broadcasted_iota(jnp.int32, x.shape, 0) + i * bt) < T
        mean = jnp.where(keep, x, 0).sum(0) / cnt
        m2 = jnp.where(keep, (x - mean) ** 2, 0).sum(0)

        @pl.when(i == 0)
        def _():
            m_ref[...] = mean
            v_ref[...] = m2

        @pl.when(i > 0)
        def _():
            before = (i * bt).astype(F32)
            d = mean - m_ref[...]
            tot = before + cnt
            m_ref[...] = m_ref[...] + d * cnt / tot
            v_ref[...] = v_ref[...] + m2 + d * d * before * cnt / tot

        @pl.when(i == pl.num_programs(1) - 1)
        def _():
            v_ref[...] = v_ref[...] / T
            nm_ref[...] = 0.9 * rm_ref[...] + 0.1 * m_ref[...]
            nv_ref[...] = 0.9 * rv_ref[...] + 0.1 * v_ref[...]

    def apply(x_ref, m_ref, v_ref, w_ref, b_ref, o_ref):
        o_ref[...] = (
            (x_ref[...].astype(F32) - m_ref[...])
            * lax.rsqrt(v_ref[...] + 1e-5)
            * w_ref[...]
            + b_ref[...]
        ).astype(o_ref.dtype)

    def fn(x, w, b, rm, rv):
        col = pl.BlockSpec((bc,), lambda c, i: (c,))
        blk = pl.BlockSpec((bt, bc), lambda c, i: (i, c))
        vec = Shape((C,), F32)
        m, v, nm, nv = pl.pallas_call(
            stats,
            out_shape=[vec] * 4,
            grid=(C // bc, pl.cdiv(T, bt)),
            in_specs=[blk, col, col],
            out_specs=[col] * 4,
        )(x, rm, rv)
        y = pl.pallas_call(
            apply,
            out_shape=Shape(x.shape, x.dtype),
            grid=(C // bc, pl.cdiv(T, bt)),
            in_specs=[blk] + [col] * 4,
            out_specs=blk,
        )(x, m, v, w, b)
        return y, nm, nv

    def ref(x, w, b, rm, rv):
        xf = x.astype(F32)
        m, v = xf.mean(0), xf.var(0)
        return (
            ((xf - m) * lax.rsqrt(v + 1e-5) * w + b).astype(x.dtype),
            0.9 * rm + 0.1 * m,
            0.9 * rv + 0.1 * v,
        )

    return (
        fn,
        ref,
        [normal(T, C, dtype=dtype), normal(C), normal(C), normal(C), uniform(C)],
    )


@second(
    "qk norm rope",
    "packed heads are normed and rotated, values pass",
    dict(B=2, S=5, H=3, K=1, D=8, bs=2),
    {"B": 1, "S": 128, "H": 4, "K": 2, "D": 64, "bs": 16},
    dict(B=8, S=4096, H=32, K=8, D=128, bs=16),
)
def _(B, S, H, K, D, bs, dtype):
    n = H + 2 * K

    def kernel(x_ref, p_ref, qw_ref, kw_ref, o_ref):
        x = x_ref[...].astype(F32)  # (bs, n, D)
        head = lax.broadcasted_iota(jnp.int32, (1, n, 1), 1)
        w = jnp.where(head < H, qw_ref[...].astype(F32), kw_ref[...].astype(F32))
        y = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * w
        inv = jnp.exp(-jnp.arange(D // 2, dtype=F32) * (2 * math.log(1e4) / D))
        ang = p_ref[...].astype(F32)[:, None, None] * inv
        c, s = jnp.cos(ang), jnp.sin(ang)
        a, b = y[..., : D // 2], y[..., D // 2 :]
        y = jnp.concatenate([a * c - b * s, b * c + a * s], -1)
        o_ref[...] = jnp.where(head < H + K, y, x).astype(dtype)

    def fn(x, qw, kw, pos):
        blk = pl.BlockSpec((None, bs, n, D), lambda b, i: (b, i, 0, 0))
        w = pl.BlockSpec((D,), lambda b, i: (0,))
        return pl.pallas_call(
            kernel,
            out_shape=Shape(x.shape, dtype),
            grid=(B, pl.cdiv(S, bs)),
            in_specs=[blk, pl.BlockSpec((None, bs), lambda b, i: (b, i)), w, w],
            out_specs=blk,
        )(x, pos, qw, kw)

    def ref(x, qw, kw, pos):
        xf = x.astype(F32)
        w = jnp.concatenate(
            [
                jnp.broadcast_to(qw.astype(F32), (H, D)),
                jnp.broadcast_to(kw.astype(F32), (2 * K, D)),
            ]
        )
        y = xf * lax.rsqrt((xf * xf).mean(-1, keepdims=True) + 1e-6) * w
        ang = pos.astype(F32)[..., None, None] * jnp.exp(
            -jnp.arange(D // 2) * (2 * math.log(1e4) / D)
        )
        c, s = jnp.cos(ang), jnp.sin(ang)
        a, b = y[..., : D // 2], y[..., D // 2 :]
        y = jnp.concatenate([a * c - b * s, b * c + a * s], -1)
        return jnp.concatenate([y[:, :, : H + K], xf[:, :, H + K :]], 2).astype(dtype)

    return (
        fn,
        ref,
        [
            normal(B, S, n, D, dtype=dtype),
            normal(D, dtype=dtype),
            normal(D, dtype=dtype),
            integers(B, S, hi=100),
        ],
    )


@second(
    "dpo loss",
    "a row of the vocabulary per step, sums of answers",
    dict(B=4, T=3, V=37, bv=8),
    {"B": 4, "T": 16, "V": 2048, "bv": 512},
    dict(B=16, T=1024, V=131072, bv=2048),
)
def _(B, T, V, bv, dtype):
    def kernel(x_ref, y_ref, o_ref, m_ref, s_ref, g_ref):
        t, j = pl.program_id(1), pl.program_id(2)

        @pl.when((t == 0) & (j == 0))
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        @pl.when(j == 0)
        def _():
            m_ref[0, 0] = LOW
            s_ref[0, 0] = 0.0
            g_ref[0, 0] = 0.0

        x = x_ref[0, 0].astype(F32)
        col = j * bv + lax.iota(jnp.int32, bv)
        x = jnp.where(col < V, x, LOW)
        m = jnp.maximum(m_ref[0, 0], jnp.max(x))
        s_ref[0, 0] = s_ref[0, 0] * jnp.exp(m_ref[0, 0] - m) + jnp.sum(jnp.exp(x - m))
        m_ref[0, 0] = m
        y = y_ref[0, t]
        g_ref[0, 0] += jnp.sum(jnp.where(col == y, x, 0.0))

        @pl.when((j == pl.num_programs(2) - 1) & (y >= 0))
        def _():
            o_ref[0, 0] += g_ref[0, 0] - m_ref[0, 0] - jnp.log(s_ref[0, 0])

    def fn(x, y, r):
        lp = pl.pallas_call(
            kernel,
            out_shape=Shape((B, 1), F32),
            grid=(B, T, pl.cdiv(V, bv)),
            in_specs=[
                pl.BlockSpec((1, 1, bv), lambda b, t, j: (b, t, j)),
                pl.BlockSpec((1, T), lambda b, t, j: (b, 0)),
            ],
            out_specs=pl.BlockSpec((1, 1), lambda b, t, j: (b, 0)),
            scratch_shapes=[pltpu.VMEM((1, 1), F32)] * 3,
        )(x, y)[:, 0]
        d = (lp - r)[: B // 2] - (lp - r)[B // 2 :]
        return -jax.nn.log_sigmoid(0.1 * d)

    def ref(x, y, r):
        l = jax.nn.log_softmax(x.astype(F32), -1)
        g = jnp.take_along_axis(l, jnp.maximum(y, 0)[..., None], -1)[..., 0]
        lp = jnp.where(y >= 0, g, 0).sum(1)
        d = (lp - r)[: B // 2] - (lp - r)[B // 2 :]
        return -jax.nn.log_sigmoid(0.1 * d)

    return (
        fn,
        ref,
        [normal(B, T, V, dtype=dtype), integers(B, T, lo=-1, hi=V), normal(B)],
    )


@second(
    "jsd loss",
    "Liger's divergence, a loop over the vocabulary",
    dict(T=5, V=21, bv=8),
    {"T": 32, "V": 2048, "bv": 512},
    dict(T=4096, V=131072, bv=4096),
)
def _(T, V, bv, dtype):
    beta = 0.3

    def kernel(x_ref, y_ref, o_ref):
        def body(i, acc):
            off = i * bv + jnp.arange(bv)
            x = pl.load(
                x_ref, (pl.ds(i * bv, bv),), mask=off < V, other=-jnp.inf
            ).astype(F32)
            y = pl.load(
                y_ref, (pl.ds(i * bv, bv),), mask=off < V, other=-jnp.inf
            ).astype(F32)
            q, p = jnp.exp(x), jnp.exp(y)
            m = beta * p + (1 - beta) * q
            lm = jnp.log(jnp.where(off < V, m, 1.0))
            t = beta * p * (jnp.where(off < V, y, 0) - lm) + (1 - beta) * q * (
                jnp.where(off < V, x, 0) - lm
            )
            return acc + t.sum()

        o_ref[0] = lax.fori_loop(0, pl.cdiv(V, bv), body, jnp.float32(0))

    def fn(x, y):
        row = pl.BlockSpec((None, V), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=Shape((T,), F32),
            grid=T,
            in_specs=[row, row],
            out_specs=pl.BlockSpec((1,), lambda i: (i,)),
        )(x, y)

    def ref(x, y):
        x, y = x.astype(F32), y.astype(F32)
        q, p = jnp.exp(x), jnp.exp(y)
        m = beta * p + (1 - beta) * q
        return (beta * p * (y - jnp.log(m)) + (1 - beta) * q * (x - jnp.log(m))).sum(-1)

    ls = lambda r: np.asarray(jax.nn.log_softmax(r.standard_normal((T, V)), -1))
    return fn, ref, [made((T, V), dtype, ls), made((T, V), dtype, ls)]


@second(
    "clip contrastive",
    "logsumexps both ways, the label's score set in one step",
    dict(n=21, D=16, b=8),
    {"n": 512, "D": 64, "b": 128},
    dict(n=16384, D=512, b=128),
)
def _(n, D, b, dtype):
    def kernel(x_ref, y_ref, o_ref, m_ref, l_ref, d_ref):
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, LOW)
            l_ref[...] = jnp.zeros_like(l_ref)
            d_ref[...] = jnp.zeros_like(d_ref)

        s = (
            jnp.dot(x_ref[...], y_ref[...].T, preferred_element_type=F32)
            * 5.0
            * D**-0.5
        )
        r = i * b + lax.broadcasted_iota(jnp.int32, (b, b), 0)
        c = j * b + lax.broadcasted_iota(jnp.int32, (b, b), 1)
        s = jnp.where(c < n, s, LOW)

        @pl.when(i == j)
        def _():
            d_ref[...] = jnp.where(r == c, s, 0).sum(1)

        m = jnp.maximum(m_ref[...], s.max(1))
        l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - m) + jnp.exp(s - m[:, None]).sum(
            1
        )
        m_ref[...] = m

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - d_ref[...]

    def one(x, y):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((n,), F32),
            grid=(pl.cdiv(n, b), pl.cdiv(n, b)),
            in_specs=[
                pl.BlockSpec((b, D), lambda i, j: (i, 0)),
                pl.BlockSpec((b, D), lambda i, j: (j, 0)),
            ],
            out_specs=pl.BlockSpec((b,), lambda i, j: (i,)),
            scratch_shapes=[pltpu.VMEM((b,), F32)] * 3,
        )(x, y)

    def fn(x, y):
        return (one(x, y) + one(y, x)) / 2

    def ref(x, y):
        s = jnp.dot(x, y.T, preferred_element_type=F32) * 5.0 * D**-0.5
        d = jnp.diag(s)
        return (jax.nn.logsumexp(s, 1) - d + jax.nn.logsumexp(s, 0) - d) / 2

    return fn, ref, [normal(n, D, dtype=dtype), normal(n, D, dtype=dtype)]


@second(
    "mamba2 ssd",
    "chunks with a state, keys that heads share",
    dict(B=2, S=24, H=3, P=4, Nn=8, c=8),
    {"B": 1, "S": 512, "H": 4, "P": 32, "Nn": 32, "c": 64},
    dict(B=4, S=4096, H=64, P=64, Nn=128, c=128),
)
def _(B, S, H, P, Nn, c, dtype):
    def kernel(x_ref, dt_ref, b_ref, c_ref, a_ref, y_ref, s_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            s_ref[...] = jnp.zeros_like(s_ref)

        x, bb, cc = (
            x_ref[...].astype(F32),
            b_ref[...].astype(F32),
            c_ref[...].astype(F32),
        )
        dt = dt_ref[...]  # (c,)
        la = jnp.cumsum(dt * a_ref[pl.program_id(1)])  # log decay
        tri = lax.broadcasted_iota(jnp.int32, (c, c), 0) >= lax.broadcasted_iota(
            jnp.int32, (c, c), 1
        )
        L = jnp.where(tri, jnp.exp(jnp.where(tri, la[:, None] - la[None, :], 0)), 0)
        xb = x * dt[:, None]
        g = jnp.dot(cc, bb.T) * L
        y = jnp.dot(g, xb) + jnp.dot(cc * jnp.exp(la)[:, None], s_ref[...])
        s_ref[...] = s_ref[...] * jnp.exp(la[-1]) + jnp.dot(
            (bb * jnp.exp(la[-1] - la)[:, None]).T, xb
        )
        y_ref[...] = y.astype(y_ref.dtype)

    def fn(x, dt, b, cm, a):
        return pl.pallas_call(
            kernel,
            out_shape=Shape(x.shape, x.dtype),
            grid=(B, H, S // c),
            in_specs=[
                pl.BlockSpec((None, c, None, P), lambda b, h, i: (b, i, h, 0)),
                pl.BlockSpec((None, None, c), lambda b, h, i: (b, h, i)),
                pl.BlockSpec((None, c, Nn), lambda b, h, i: (b, i, 0)),
                pl.BlockSpec((None, c, Nn), lambda b, h, i: (b, i, 0)),
                pl.BlockSpec(memory_space=pltpu.SMEM),
            ],
            out_specs=pl.BlockSpec((None, c, None, P), lambda b, h, i: (b, i, h, 0)),
            scratch_shapes=[pltpu.VMEM((Nn, P), F32)],
        )(x, dt, b, cm, a)

    def ref(x, dt, b, cm, a):
        x, b, cm = x.astype(F32), b.astype(F32), cm.astype(F32)

        def step(s, t):
            xt, dtt, bt, ct = t
            s = s * jnp.exp(dtt * a)[..., None, None] + jnp.einsum(
                "bn,bhp->bhnp", bt, xt * dtt[..., None]
            )
            return s, jnp.einsum("bn,bhnp->bhp", ct, s)

        _, y = lax.scan(
            step,
            jnp.zeros((B, H, Nn, P)),
            (
                x.swapaxes(0, 1),
                dt.transpose(2, 0, 1),
                b.swapaxes(0, 1),
                cm.swapaxes(0, 1),
            ),
        )
        return y.swapaxes(0, 1).astype(dtype)

    return (
        fn,
        ref,
        [
            normal(B, S, H, P, dtype=dtype),
            uniform(B, H, S, lo=0.01, hi=0.3),
            normal(B, S, Nn, dtype=dtype),
            normal(B, S, Nn, dtype=dtype),
            uniform(H, lo=-1, hi=-0.1),
        ],
    )


@second(
    "lstm",
    "time is the inner axis, weights whole",
    dict(T=5, B=6, D=8, bb=3),
    {"T": 16, "B": 16, "D": 64, "bb": 8},
    dict(T=512, B=512, D=512, bb=4),
)
def _(T, B, D, bb, dtype):
    def kernel(x_ref, w_ref, b_ref, h_ref, hs, cs):
        @pl.when(pl.program_id(1) == 0)
        def _():
            hs[...] = jnp.zeros_like(hs)
            cs[...] = jnp.zeros_like(cs)

        z = (
            x_ref[0].astype(F32)
            + jnp.dot(hs[...].astype(dtype), w_ref[...], preferred_element_type=F32)
            + b_ref[...]
        )
        i, f, g, o = jnp.split(z, 4, axis=1)
        c = jax.nn.sigmoid(f) * cs[...] + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        cs[...] = c
        hs[...] = h
        h_ref[0] = h.astype(h_ref.dtype)

    def fn(x, w, b):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((T, B, D), dtype),
            grid=(B // bb, T),
            in_specs=[
                pl.BlockSpec((1, bb, 4 * D), lambda i, t: (t, i, 0)),
                pl.BlockSpec((D, 4 * D), lambda i, t: (0, 0)),
                pl.BlockSpec((1, 4 * D), lambda i, t: (0, 0)),
            ],
            out_specs=pl.BlockSpec((1, bb, D), lambda i, t: (t, i, 0)),
            scratch_shapes=[pltpu.VMEM((bb, D), F32)] * 2,
        )(x, w, b)

    def ref(x, w, b):
        def step(s, x):
            h, c = s
            z = (
                x.astype(F32)
                + jnp.dot(h.astype(dtype), w, preferred_element_type=F32)
                + b
            )
            i, f, g, o = jnp.split(z, 4, 1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h.astype(dtype)

        return lax.scan(step, (jnp.zeros((B, D)), jnp.zeros((B, D))), x)[1]

    return (
        fn,
        ref,
        [
            normal(T, B, 4 * D, dtype=dtype),
            normal(D, 4 * D, dtype=dtype, scale=D**-0.5),
            normal(1, 4 * D),
        ],
    )


@second(
    "tcn dilated",
    "dilated taps by masked index arrays",
    dict(B=2, S=21, C=6, F=5, K=3, d=2, bs=8),
    {"B": 2, "S": 1024, "C": 64, "F": 64, "K": 3, "d": 4, "bs": 128},
    dict(B=8, S=16384, C=256, F=256, K=3, d=16, bs=256),
)
def _(B, S, C, F, K, d, bs, dtype):
    def kernel(x_ref, w_ref, o_ref):
        i = pl.program_id(1)
        acc = jnp.zeros((bs, F), F32)
        for k in range(K):
            at = i * bs + jnp.arange(bs) - (K - 1 - k) * d
            x = pl.load(
                x_ref,
                (0, at, slice(None)),
                mask=((at >= 0) & (at < S))[:, None],
                other=0,
            )
            acc += jnp.dot(x, w_ref[k], preferred_element_type=F32)
        o_ref[0] = jnp.maximum(acc, 0).astype(o_ref.dtype)

    def fn(x, w):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((B, S, F), dtype),
            grid=(B, pl.cdiv(S, bs)),
            in_specs=[
                pl.BlockSpec((1, S, C), lambda b, i: (b, 0, 0)),
                pl.BlockSpec((K, C, F), lambda b, i: (0, 0, 0)),
            ],
            out_specs=pl.BlockSpec((1, bs, F), lambda b, i: (b, i, 0)),
        )(x, w)

    def ref(x, w):
        xp = jnp.pad(x, ((0, 0), ((K - 1) * d, 0), (0, 0)))
        o = sum(
            jnp.einsum(
                "bsc,cf->bsf",
                xp[:, k * d : k * d + S],
                w[k],
                preferred_element_type=F32,
            )
            for k in range(K)
        )
        return jnp.maximum(o, 0).astype(dtype)

    return fn, ref, [normal(B, S, C, dtype=dtype), normal(K, C, F, dtype=dtype)]


@second(
    "transposed conv",
    "stride two, halo by elements, stacked halves",
    dict(B=2, S=9, C=6, F=4, bs=3),
    {"B": 2, "S": 512, "C": 64, "F": 32, "bs": 128},
    dict(B=16, S=8192, C=512, F=256, bs=128),
)
def _(B, S, C, F, bs, dtype):
    def kernel(x_ref, w_ref, o_ref):
        x = x_ref[...]  # (bs + 2, C), with a halo of zeros
        dot = lambda a, k: jnp.dot(a, w_ref[k], preferred_element_type=F32)
        mid = x[1:-1]
        even = dot(mid, 1) + dot(x[:-2], 3)
        odd = dot(mid, 2) + dot(x[2:], 0)
        o_ref[...] = jnp.stack([even, odd], axis=1).reshape(2 * bs, F).astype(dtype)

    def fn(x, w):
        xp = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
        return pl.pallas_call(
            kernel,
            out_shape=Shape((B, 2 * S, F), dtype),
            grid=(B, S // bs),
            in_specs=[
                pl.BlockSpec(
                    (None, pl.Element(bs + 2), C), lambda b, i: (b, i * bs, 0)
                ),
                pl.BlockSpec((4, C, F), lambda b, i: (0, 0, 0)),
            ],
            out_specs=pl.BlockSpec((None, 2 * bs, F), lambda b, i: (b, i, 0)),
        )(xp, w)

    def ref(x, w):
        out = jnp.zeros((B, 2 * S + 4, F))
        for k in range(4):
            out = out.at[:, k : k + 2 * S : 2].add(
                jnp.einsum("bsc,cf->bsf", x, w[k], preferred_element_type=F32)
            )
        return out[:, 1 : 2 * S + 1].astype(dtype)

    return fn, ref, [normal(B, S, C, dtype=dtype), normal(4, C, F, dtype=dtype)]


@second(
    "grid sample",
    "four neighbours of points",
    dict(n=2, H=6, W=7, C=4, P=13, bp=4),
    {"n": 2, "H": 16, "W": 16, "C": 32, "P": 256, "bp": 64},
    dict(n=8, H=64, W=64, C=256, P=4096, bp=64),
)
def _(n, H, W, C, P, bp, dtype):
    def kernel(x_ref, p_ref, o_ref):
        px, py = p_ref[:, 0], p_ref[:, 1]
        x0, y0 = jnp.floor(px), jnp.floor(py)
        out = jnp.zeros((bp, C), F32)
        for dy in (0, 1):
            for dx in (0, 1):
                xi, yi = (x0 + dx).astype(jnp.int32), (y0 + dy).astype(jnp.int32)
                w = (1 - jnp.abs(px - (x0 + dx))) * (1 - jnp.abs(py - (y0 + dy)))
                ok = (xi >= 0) & (xi < W) & (yi >= 0) & (yi < H)
                v = x_ref[jnp.clip(yi, 0, H - 1), jnp.clip(xi, 0, W - 1)]
                out += jnp.where(ok, w, 0)[:, None] * v
        o_ref[...] = out

    def fn(x, p):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((n, P, C), F32),
            grid=(n, pl.cdiv(P, bp)),
            in_specs=[
                pl.BlockSpec((None, H, W, C), lambda b, i: (b, 0, 0, 0)),
                pl.BlockSpec((None, bp, 2), lambda b, i: (b, i, 0), fill=0),
            ],
            out_specs=pl.BlockSpec((None, bp, C), lambda b, i: (b, i, 0)),
        )(x, p)

    def ref(x, p):
        px, py = p[..., 0], p[..., 1]
        x0, y0 = jnp.floor(px), jnp.floor(py)
        out = 0
        for dy in (0, 1):
            for dx in (0, 1):
                xi, yi = (x0 + dx).astype(I32), (y0 + dy).astype(I32)
                w = (1 - jnp.abs(px - (x0 + dx))) * (1 - jnp.abs(py - (y0 + dy)))
                ok = (xi >= 0) & (xi < W) & (yi >= 0) & (yi < H)
                v = x[
                    jnp.arange(n)[:, None],
                    jnp.clip(yi, 0, H - 1),
                    jnp.clip(xi, 0, W - 1),
                ]
                out += jnp.where(ok, w, 0)[..., None] * v
        return out

    return fn, ref, [normal(n, H, W, C), uniform(n, P, 2, lo=-1, hi=min(H, W))]


@second(
    "fft rows",
    "all stages of a row by reshapes",
    dict(R=3, lg=4),
    {"R": 64, "lg": 8},
    dict(R=4096, lg=11),
)
def _(R, lg, dtype):
    n = 2**lg

    def kernel(re_ref, im_ref, or_ref, oi_ref):
        re, im = re_ref[...], im_ref[...]
        br = re.shape[0]
        l, m = n // 2, 1
        for _ in range(lg):
            a = re.reshape(br, 2, l, m)
            b = im.reshape(br, 2, l, m)
            th = (lax.broadcasted_iota(jnp.int32, (1, l, 1), 1).astype(F32)) * (
                -math.pi / l
            )
            wr, wi = jnp.cos(th), jnp.sin(th)
            sr, si = a[:, 0] + a[:, 1], b[:, 0] + b[:, 1]
            dr, di = a[:, 0] - a[:, 1], b[:, 0] - b[:, 1]
            tr, ti = dr * wr - di * wi, dr * wi + di * wr
            re = jnp.stack([sr, tr], 2).reshape(br, n)
            im = jnp.stack([si, ti], 2).reshape(br, n)
            l, m = l // 2, m * 2
        or_ref[...] = re
        oi_ref[...] = im

    def fn(re, im):
        blk = pl.BlockSpec((1, n), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=[Shape((R, n), F32)] * 2,
            grid=R,
            in_specs=[blk, blk],
            out_specs=[blk, blk],
        )(re, im)

    def ref(re, im):
        y = jnp.fft.fft(re + 1j * im)
        return [y.real, y.imag]

    return fn, ref, [normal(R, n), normal(R, n)]


@second(
    "spmm ell",
    "neighbours by an index array, then a weighted sum",
    dict(n=13, m=11, d=3, F=8, b=4),
    {"n": 512, "m": 512, "d": 8, "F": 32, "b": 8},
    dict(n=262144, m=262144, d=16, F=128, b=8),
)
def _(n, m, d, F, b, dtype):
    def kernel(x_ref, w_ref, c_ref, o_ref):
        rows = x_ref[c_ref[...]]  # (b, d, F)
        o_ref[...] = jnp.einsum("bdf,bd->bf", rows, w_ref[...])

    def fn(x, w, c):
        e = pl.BlockSpec((b, d), lambda i: (i, 0), fill=0)
        return pl.pallas_call(
            kernel,
            out_shape=Shape((n, F), F32),
            grid=pl.cdiv(n, b),
            in_specs=[pl.BlockSpec((m, F), lambda i: (0, 0)), e, e],
            out_specs=pl.BlockSpec((b, F), lambda i: (i, 0)),
        )(x, w, c)

    return (
        fn,
        lambda x, w, c: (x[c] * w[..., None]).sum(1),
        [normal(m, F), normal(n, d), integers(n, d, hi=m)],
    )
