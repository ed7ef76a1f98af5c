"""Kernels held out, of a third author: training as Triton's tutorials, FlagGems,
Liger and Unsloth write it (whole refs, computed offsets and masks, 1-D programs)."""

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Family, Shape
from tests.forms.sized import integers, normal, sized, uniform

family = Family("held-out third training")
third = sized(family)


@third(
    "masked copy chain",
    "flat offsets and a mask, three operands",
    dict(N=1000, BS=128),
    dict(N=3_000_001, BS=4096),
    dict(N=98_432_003, BS=1024),
)
def _(N, BS, dtype):
    def kernel(x_ref, y_ref, z_ref, o_ref):
        offs = pl.program_id(0) * BS + jnp.arange(BS)
        mask = offs < N
        x = pl.load(x_ref, offs, mask=mask, other=0.0).astype(F32)
        y = pl.load(y_ref, offs, mask=mask, other=0.0).astype(F32)
        z = pl.load(z_ref, offs, mask=mask, other=0.0).astype(F32)
        out = x * jax.nn.sigmoid(y) + z
        pl.store(o_ref, offs, out.astype(o_ref.dtype), mask=mask)

    def fn(x, y, z):
        return pl.pallas_call(kernel, Shape((N,), x.dtype), grid=(pl.cdiv(N, BS),))(
            x, y, z
        )

    def ref(x, y, z):
        x32, y32, z32 = (a.astype(F32) for a in (x, y, z))
        return (x32 * jax.nn.sigmoid(y32) + z32).astype(x.dtype)

    return fn, ref, [normal(N, dtype=dtype) for _ in range(3)]


@third(
    "softmax persistent rows",
    "rows in steps of the number of programs, padded to a power of two",
    dict(M=13, N=37, P=4),
    dict(M=2048, N=781, P=8),
    dict(M=16384, N=12345, P=528),
)
def _(M, N, P, dtype):
    BLOCK = pl.next_power_of_2(N)

    def kernel(x_ref, o_ref):
        def row(t, _):
            r = pl.program_id(0) + t * P
            cols = jnp.arange(BLOCK)
            mask = (cols < N) & (r < M)
            x = pl.load(x_ref, (r, cols), mask=mask, other=-float("inf")).astype(F32)
            x = x - jnp.max(jnp.where(mask, x, -1e30), axis=0)
            e = jnp.where(mask, jnp.exp(x), 0.0)
            y = e / jnp.maximum(jnp.sum(e, axis=0), 1e-30)
            pl.store(o_ref, (r, cols), y.astype(o_ref.dtype), mask=mask)

        lax.fori_loop(0, pl.cdiv(M, P), row, None)

    def fn(x):
        return pl.pallas_call(kernel, Shape((M, N), x.dtype), grid=(P,))(x)

    ref = lambda x: jax.nn.softmax(x.astype(F32), -1).astype(x.dtype)
    return fn, ref, [normal(M, N, dtype=dtype)]


@third(
    "layer norm three passes",
    "loops over masked chunks of a row for mean, variance and result",
    dict(M=7, N=50, BS=16),
    dict(M=1024, N=2000, BS=512),
    dict(M=8192, N=8192, BS=1024),
)
def _(M, N, BS, dtype):
    def kernel(x_ref, w_ref, b_ref, y_ref, mean_ref, rstd_ref):
        row = pl.program_id(0)
        acc = jnp.zeros((BS,), F32)
        for off in range(0, N, BS):
            cols = off + jnp.arange(BS)
            acc += pl.load(x_ref, (row, cols), mask=cols < N, other=0.0).astype(F32)
        mean = jnp.sum(acc, axis=0) / N
        acc = jnp.zeros((BS,), F32)
        for off in range(0, N, BS):
            cols = off + jnp.arange(BS)
            x = pl.load(x_ref, (row, cols), mask=cols < N, other=0.0).astype(F32)
            x = jnp.where(cols < N, x - mean, 0.0)
            acc += x * x
        rstd = 1 / jnp.sqrt(jnp.sum(acc, axis=0) / N + 1e-5)
        mean_ref[row] = mean
        rstd_ref[row] = rstd
        for off in range(0, N, BS):
            cols = off + jnp.arange(BS)
            mask = cols < N
            w = pl.load(w_ref, cols, mask=mask).astype(F32)
            b = pl.load(b_ref, cols, mask=mask).astype(F32)
            x = pl.load(x_ref, (row, cols), mask=mask, other=0.0).astype(F32)
            y = (x - mean) * rstd * w + b
            pl.store(y_ref, (row, cols), y.astype(y_ref.dtype), mask=mask)

    def fn(x, w, b):
        stat = Shape((M,), F32)
        out = pl.pallas_call(kernel, [Shape(x.shape, x.dtype), stat, stat], grid=(M,))
        return out(x, w, b)[0]

    def ref(x, w, b):
        x32 = x.astype(F32)
        mean = x32.mean(-1, keepdims=True)
        var = ((x32 - mean) ** 2).mean(-1, keepdims=True)
        y = (x32 - mean) / jnp.sqrt(var + 1e-5)
        return (y * w.astype(F32) + b.astype(F32)).astype(x.dtype)

    return (
        fn,
        ref,
        [normal(M, N, dtype=dtype), normal(N, dtype=dtype), normal(N, dtype=dtype)],
    )


def _bits(seed, offs):
    """A generator by hashing, as authors write who want the same mask again."""
    x = offs.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + seed.astype(jnp.uint32)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@third(
    "seeded dropout",
    "a hash of the offset decides, bias and residual in the same pass",
    dict(M=24, N=64, BM=8),
    dict(M=4096, N=1024, BM=8),
    dict(M=16384, N=4096, BM=4),
)
def _(M, N, BM, dtype):
    def kernel(seed_ref, x_ref, b_ref, r_ref, o_ref):
        i = pl.program_id(0)
        rows = i * BM + lax.broadcasted_iota(I32, (BM, N), 0)
        offs = rows * N + lax.broadcasted_iota(I32, (BM, N), 1)
        u = (_bits(seed_ref[0], offs) >> 8).astype(F32) * (1.0 / (1 << 24))
        x = x_ref[...].astype(F32) + b_ref[...].astype(F32)
        y = jnp.where(u > 0.1, x / 0.9, 0.0) + r_ref[...].astype(F32)
        o_ref[...] = y.astype(o_ref.dtype)

    def fn(x, b, r, seed):
        block = pl.BlockSpec((BM, N), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            Shape((M, N), x.dtype),
            grid=(M // BM,),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                block,
                pl.BlockSpec((1, N), lambda i: (0, 0)),
                block,
            ],
            out_specs=block,
        )(seed, x, b, r)

    def ref(x, b, r, seed):
        offs = jnp.arange(M * N).reshape(M, N)
        u = (_bits(seed[0], offs) >> 8).astype(F32) * (1.0 / (1 << 24))
        x32 = x.astype(F32) + b.astype(F32)
        return (jnp.where(u > 0.1, x32 / 0.9, 0.0) + r.astype(F32)).astype(x.dtype)

    return (
        fn,
        ref,
        [
            normal(M, N, dtype=dtype),
            normal(1, N, dtype=dtype),
            normal(M, N, dtype=dtype),
            integers(1, lo=7, hi=8),
        ],
    )


@third(
    "geglu",
    "Liger: a row a program, gate and up are two arrays",
    dict(M=9, N=44),
    dict(M=2048, N=1408),
    dict(M=16384, N=11008),
)
def _(M, N, dtype):
    BLOCK = pl.next_power_of_2(N)

    def kernel(a_ref, b_ref, c_ref):
        row = pl.program_id(0)
        cols = jnp.arange(BLOCK)
        mask = cols < N
        a = pl.load(a_ref, (row, cols), mask=mask, other=0).astype(F32)
        b = pl.load(b_ref, (row, cols), mask=mask, other=0)
        cubed = a * a * a
        tanh = jnp.tanh(0.7978845608028654 * (a + 0.044715 * cubed))
        c = (0.5 * a * (1 + tanh)).astype(b.dtype) * b
        pl.store(c_ref, (row, cols), c, mask=mask)

    def fn(a, b):
        return pl.pallas_call(kernel, Shape((M, N), a.dtype), grid=(M,))(a, b)

    def ref(a, b):
        return jax.nn.gelu(a.astype(F32), approximate=True).astype(b.dtype) * b

    return fn, ref, [normal(M, N, dtype=dtype), normal(M, N, dtype=dtype)]


@third(
    "cross entropy smoothed",
    "Liger: a while loop over the vocabulary, smoothing and a z loss",
    dict(M=6, V=100, BS=32),
    dict(M=256, V=8192, BS=1024),
    dict(M=4096, V=128256, BS=4096),
)
def _(M, V, BS, dtype):
    eps, z_scale = 0.1, 1e-4

    def kernel(x_ref, y_ref, loss_ref, lse_ref):
        row = pl.program_id(0)
        y = y_ref[row]

        def body(c):
            i, m, d, s = c
            cols = i + jnp.arange(BS)
            mask = cols < V
            x = pl.load(x_ref, (row, cols), mask=mask, other=-jnp.inf).astype(F32)
            new = jnp.maximum(m, jnp.max(x))
            d = d * jnp.exp(m - new) + jnp.sum(jnp.exp(x - new))
            s = s + jnp.sum(jnp.where(mask, -eps / V * x, 0.0))
            return i + BS, new, d, s

        start = (jnp.int32(0), jnp.float32(-1e30), jnp.float32(0), jnp.float32(0))
        _, m, d, s = lax.while_loop(lambda c: c[0] < V, body, start)
        lse = m + jnp.log(d)
        label = x_ref[row, y].astype(F32)
        loss = (1 - eps) * (lse - label) + s + eps * lse + z_scale * lse * lse
        loss_ref[row] = jnp.where(y >= 0, loss, 0.0)
        lse_ref[row] = lse

    def fn(x, y):
        stat = Shape((M,), F32)
        return pl.pallas_call(kernel, [stat, stat], grid=(M,))(x, y)[0]

    def ref(x, y):
        x32 = x.astype(F32)
        lse = jax.nn.logsumexp(x32, -1)
        label = jnp.take_along_axis(x32, y[:, None], 1)[:, 0]
        smooth = eps * lse - eps / V * x32.sum(-1)
        return (1 - eps) * (lse - label) + smooth + z_scale * lse * lse

    return fn, ref, [normal(M, V, dtype=dtype), integers(M, hi=V)]


@third(
    "kl divergence",
    "Liger: rows in column blocks by a python loop, one sum a row",
    dict(M=6, V=96, BS=32),
    dict(M=512, V=4096, BS=1024),
    dict(M=4096, V=32768, BS=4096),
)
def _(M, V, BS, dtype):
    def kernel(p_ref, t_ref, o_ref):
        row = pl.program_id(0)
        total = jnp.float32(0)
        for i in range(0, V, BS):
            offs = i + jnp.arange(BS)
            lp = p_ref[row, offs].astype(F32)
            t = t_ref[row, offs].astype(F32)
            total += jnp.sum(t * (jnp.log(jnp.maximum(t, 1e-10)) - lp), axis=0)
        o_ref[row] = total

    def fn(lp, t):
        return pl.pallas_call(kernel, Shape((M,), F32), grid=(M,))(lp, t).sum() / M

    def ref(lp, t):
        t = t.astype(F32)
        return (t * (jnp.log(jnp.maximum(t, 1e-10)) - lp.astype(F32))).sum() / M

    return (
        fn,
        ref,
        [normal(M, V, dtype=dtype), uniform(M, V, lo=0.01, dtype=dtype)],
    )


@third(
    "rope groups of heads",
    "Unsloth: a program has a token and four heads in a python loop",
    dict(T=10, H=4, D=16, S=5, G=2),
    dict(T=512, H=16, D=64, S=128, G=4),
    dict(T=16384, H=32, D=128, S=4096, G=4),
)
def _(T, H, D, S, G, dtype):
    half = D // 2

    def kernel(q_ref, cos_ref, sin_ref, o_ref):
        row, group = pl.program_id(0), pl.program_id(1)
        cols = jnp.arange(half)
        c = cos_ref[row % S, cols].astype(F32)
        s = sin_ref[row % S, cols].astype(F32)
        for h in range(G):
            off = (group * G + h) * D
            q1 = q_ref[row, off + cols].astype(F32)
            q2 = q_ref[row, off + half + cols].astype(F32)
            o_ref[row, off + cols] = (q1 * c - q2 * s).astype(o_ref.dtype)
            o_ref[row, off + half + cols] = (q2 * c + q1 * s).astype(o_ref.dtype)

    def fn(q, cos, sin):
        return pl.pallas_call(kernel, Shape((T, H * D), q.dtype), grid=(T, H // G))(
            q, cos, sin
        )

    def ref(q, cos, sin):
        rows = jnp.arange(T) % S
        c, s = cos[rows].astype(F32)[:, None], sin[rows].astype(F32)[:, None]
        x = q.reshape(T, H, D).astype(F32)
        a, b = x[..., :half], x[..., half:]
        return (
            jnp.concatenate([a * c - b * s, b * c + a * s], -1)
            .reshape(T, H * D)
            .astype(q.dtype)
        )

    return (
        fn,
        ref,
        [normal(T, H * D, dtype=dtype), normal(S, half), normal(S, half)],
    )


@third(
    "add rms norm",
    "residual and norm, two results, weights plus one",
    dict(M=12, N=64),
    dict(M=2048, N=2048),
    dict(M=16384, N=5120),
)
def _(M, N, dtype):
    def kernel(x_ref, r_ref, w_ref, y_ref, s_ref):
        s = x_ref[0] + r_ref[0]
        s_ref[0] = s
        s32 = s.astype(F32)
        rstd = lax.rsqrt(jnp.mean(s32 * s32) + 1e-6)
        y_ref[0] = (s32 * rstd * (1.0 + w_ref[...].astype(F32))).astype(y_ref.dtype)

    def fn(x, r, w):
        row = pl.BlockSpec((1, N), lambda i: (i, 0))
        out = Shape((M, N), x.dtype)
        return pl.pallas_call(
            kernel,
            (out, out),
            grid=(M,),
            in_specs=[row, row, pl.BlockSpec((N,), lambda i: (0,))],
            out_specs=(row, row),
        )(x, r, w)

    def ref(x, r, w):
        s = x + r
        s32 = s.astype(F32)
        rstd = lax.rsqrt(jnp.mean(s32 * s32, -1, keepdims=True) + 1e-6)
        return (s32 * rstd * (1.0 + w.astype(F32))).astype(x.dtype), s

    return (
        fn,
        ref,
        [normal(M, N, dtype=dtype), normal(M, N, dtype=dtype), normal(N, dtype=dtype)],
    )


@third(
    "split k",
    "atomics into an f32 result, tiles and parts in one program number",
    dict(M=16, N=32, K=64, bm=8, bn=16, bk=8, S=2),
    dict(M=64, N=512, K=4096, bm=64, bn=128, bk=64, S=4),
    dict(M=64, N=4096, K=16384, bm=64, bn=128, bk=64, S=8),
    grad=False,
)
def _(M, N, K, bm, bn, bk, S, dtype):
    nn = N // bn

    def kernel(x_ref, w_ref, _, o_ref):
        pid, part = pl.program_id(0), pl.program_id(1)
        i, j = pid // nn, pid % nn

        def step(k, acc):
            at = (k * S + part) * bk
            x = x_ref[pl.ds(i * bm, bm), pl.ds(at, bk)]
            w = w_ref[pl.ds(at, bk), pl.ds(j * bn, bn)]
            return acc + jnp.dot(x, w, preferred_element_type=F32)

        acc = lax.fori_loop(0, K // (bk * S), step, jnp.zeros((bm, bn), F32))
        pl.atomic_add(o_ref, (pl.ds(i * bm, bm), pl.ds(j * bn, bn)), acc)

    def fn(x, w):
        return pl.pallas_call(
            kernel,
            Shape((M, N), F32),
            grid=((M // bm) * nn, S),
            input_output_aliases={2: 0},
        )(x, w, jnp.zeros((M, N), F32))

    ref = lambda x, w: jnp.dot(x, w, preferred_element_type=F32)
    return fn, ref, [normal(M, K, dtype=dtype), normal(K, N, dtype=dtype)]


@third(
    "matmul persistent while",
    "a while loop over tiles in steps of the programs, the k loop inside",
    dict(M=32, N=48, K=32, bm=8, bn=16, bk=8, P=5),
    dict(M=512, N=512, K=512, bm=128, bn=128, bk=64, P=8),
    dict(M=8192, N=4096, K=4096, bm=128, bn=128, bk=64, P=132),
)
def _(M, N, K, bm, bn, bk, P, dtype):
    nm, nn = M // bm, N // bn

    def kernel(x_ref, w_ref, o_ref):
        def tile(t):
            i, j = t // nn, t % nn

            def step(k, acc):
                x = x_ref[pl.ds(i * bm, bm), pl.ds(k * bk, bk)]
                w = w_ref[pl.ds(k * bk, bk), pl.ds(j * bn, bn)]
                return acc + pl.dot(x, w).astype(F32)

            acc = lax.fori_loop(0, K // bk, step, jnp.zeros((bm, bn), F32))
            acc = jnp.where(acc >= 0, acc, 0.01 * acc)
            o_ref[pl.ds(i * bm, bm), pl.ds(j * bn, bn)] = acc.astype(o_ref.dtype)
            return t + P

        lax.while_loop(lambda t: t < nm * nn, tile, pl.program_id(0))

    def fn(x, w):
        return pl.pallas_call(kernel, Shape((M, N), x.dtype), grid=(P,))(x, w)

    def ref(x, w):
        y = jnp.dot(x, w, preferred_element_type=F32)
        return jnp.where(y >= 0, y, 0.01 * y).astype(x.dtype)

    return fn, ref, [normal(M, K, dtype=dtype), normal(K, N, dtype=dtype)]


@third(
    "lora fused",
    "x @ w and (x @ a) @ b in one k loop",
    dict(M=16, N=32, K=32, R=4, bm=8, bn=16, bk=8),
    dict(M=512, N=512, K=1024, R=16, bm=128, bn=128, bk=64),
    dict(M=8192, N=4096, K=4096, R=16, bm=128, bn=128, bk=64),
)
def _(M, N, K, R, bm, bn, bk, dtype):
    def kernel(x_ref, w_ref, a_ref, b_ref, o_ref, acc_ref, low_ref):
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)
            low_ref[...] = jnp.zeros_like(low_ref)

        x = x_ref[...]
        acc_ref[...] += jnp.dot(x, w_ref[...], preferred_element_type=F32)
        low_ref[...] += jnp.dot(x, a_ref[...], preferred_element_type=F32)

        @pl.when(k == pl.num_programs(2) - 1)
        def _():
            low = low_ref[...].astype(b_ref.dtype)
            more = jnp.dot(low, b_ref[...], preferred_element_type=F32)
            o_ref[...] = (acc_ref[...] + 2.0 * more).astype(o_ref.dtype)

    def fn(x, w, a, b):
        return pl.pallas_call(
            kernel,
            Shape((M, N), x.dtype),
            grid=(M // bm, N // bn, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
                pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
                pl.BlockSpec((bk, R), lambda i, j, k: (k, 0)),
                pl.BlockSpec((R, bn), lambda i, j, k: (0, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), F32), pltpu.VMEM((bm, R), F32)],
        )(x, w, a, b)

    def ref(x, w, a, b):
        low = jnp.dot(x, a, preferred_element_type=F32).astype(b.dtype)
        y = jnp.dot(x, w, preferred_element_type=F32)
        return (y + 2.0 * jnp.dot(low, b, preferred_element_type=F32)).astype(x.dtype)

    return (
        fn,
        ref,
        [
            normal(M, K, dtype=dtype),
            normal(K, N, dtype=dtype, scale=0.02),
            normal(K, R, dtype=dtype, scale=0.02),
            normal(R, N, dtype=dtype),
        ],
    )


@third(
    "tutorial attention",
    "off-diagonal and diagonal stages, exp2, one program number for blocks and heads",
    dict(Z=2, H=2, S=32, D=16, bm=8, bn=8),
    dict(Z=1, H=4, S=512, D=64, bm=128, bn=64),
    dict(Z=4, H=32, S=4096, D=128, bm=128, bn=64),
)
def _(Z, H, S, D, bm, bn, dtype):
    scale = D**-0.5 * 1.44269504

    def kernel(q_ref, k_ref, v_ref, o_ref, lse_ref):
        pid, zh = pl.program_id(0), pl.program_id(1)
        q = q_ref[zh, pl.ds(pid * bm, bm), :]
        rows = pid * bm + jnp.arange(bm)

        def step(j, carry, masked):
            acc, l, m = carry
            k = k_ref[zh, pl.ds(j * bn, bn), :]
            qk = pl.dot(q, k.T).astype(F32)
            if masked:
                keep = rows[:, None] >= (j * bn + jnp.arange(bn))[None, :]
                qk = qk * scale + jnp.where(keep, 0, -1.0e6)
                new = jnp.maximum(m, jnp.max(qk, 1))
                qk -= new[:, None]
            else:
                new = jnp.maximum(m, jnp.max(qk, 1) * scale)
                qk = qk * scale - new[:, None]
            p = jnp.exp2(qk)
            alpha = jnp.exp2(m - new)
            v = v_ref[zh, pl.ds(j * bn, bn), :]
            acc = acc * alpha[:, None] + pl.dot(p.astype(v.dtype), v)
            return acc, l * alpha + jnp.sum(p, 1), new

        carry = (
            jnp.zeros((bm, D), F32),
            jnp.ones((bm,), F32) * 0.0,
            jnp.zeros((bm,), F32) - 1e30,
        )
        mid = pid * (bm // bn)
        carry = lax.fori_loop(0, mid, lambda j, c: step(j, c, False), carry)
        last = mid + bm // bn
        acc, l, m = lax.fori_loop(mid, last, lambda j, c: step(j, c, True), carry)
        o_ref[zh, pl.ds(pid * bm, bm), :] = (acc / l[:, None]).astype(o_ref.dtype)
        lse_ref[zh, pl.ds(pid * bm, bm)] = m + jnp.log2(l)

    def fn(q, k, v):
        flat = lambda x: x.reshape(Z * H, S, D)
        out, _ = pl.pallas_call(
            kernel,
            [Shape((Z * H, S, D), q.dtype), Shape((Z * H, S), F32)],
            grid=(S // bm, Z * H),
        )(flat(q), flat(k), flat(v))
        return out.reshape(q.shape)

    def ref(q, k, v):
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=F32) * D**-0.5
        s = jnp.where(jnp.tril(jnp.ones((S, S), bool)), s, -jnp.inf)
        p = jax.nn.softmax(s, -1).astype(v.dtype)
        out = jnp.einsum("bhqk,bhkd->bhqd", p, v, preferred_element_type=F32)
        return out.astype(q.dtype)

    return fn, ref, [normal(Z, H, S, D, dtype=dtype) for _ in range(3)]


@third(
    "adamw",
    "flat parameters, four states in place, a scalar step",
    dict(N=1000, BS=256),
    dict(N=2_000_000, BS=8192),
    dict(N=134_217_728, BS=1024),
    grad=False,
)
def _(N, BS, dtype):
    def kernel(step_ref, p_ref, g_ref, m_ref, v_ref, po_ref, mo_ref, vo_ref):
        t = step_ref[0].astype(F32)
        g = g_ref[...].astype(F32)
        m = 0.9 * m_ref[...] + 0.1 * g
        v = 0.95 * v_ref[...] + 0.05 * g * g
        scale = jnp.sqrt(1 - 0.95**t) / (1 - 0.9**t)
        p = p_ref[...]
        po_ref[...] = p - 1e-3 * (scale * m / (jnp.sqrt(v) + 1e-8) + 0.1 * p)
        mo_ref[...], vo_ref[...] = m, v

    def fn(step, p, g, m, v):
        block = pl.BlockSpec((BS,), lambda i: (i,))
        out = Shape((N,), F32)
        return pl.pallas_call(
            kernel,
            [out] * 3,
            grid=(pl.cdiv(N, BS),),
            in_specs=[pl.BlockSpec((1,), lambda i: (0,))] + [block] * 4,
            out_specs=[block] * 3,
            input_output_aliases={1: 0, 3: 1, 4: 2},
        )(step, p, g, m, v)

    def ref(step, p, g, m, v):
        t, g = step[0].astype(F32), g.astype(F32)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        scale = jnp.sqrt(1 - 0.95**t) / (1 - 0.9**t)
        return p - 1e-3 * (scale * m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

    return (
        fn,
        ref,
        [
            integers(1, lo=5, hi=6),
            normal(N),
            normal(N, dtype=dtype),
            normal(N),
            uniform(N, lo=0.1),
        ],
    )


@third(
    "argmax two stages",
    "FlagGems: maxima and indices of chunks, then of these",
    dict(N=1000, BS=128),
    dict(N=3_000_000, BS=16384),
    dict(N=100_000_000, BS=16384),
    grad=False,
)
def _(N, BS, dtype):
    mid = pl.cdiv(N, BS)
    pad = pl.next_power_of_2(mid)

    def first(x_ref, value_ref, index_ref):
        pid = pl.program_id(0)
        offs = pid * BS + jnp.arange(BS)
        x = pl.load(x_ref, offs, mask=offs < N, other=-jnp.inf).astype(F32)
        value_ref[pid] = jnp.max(x)
        index_ref[pid] = jnp.argmax(x) + pid * BS

    def second(value_ref, index_ref, o_ref):
        offs = jnp.arange(pad)
        mask = offs < mid
        v = pl.load(value_ref, offs, mask=mask, other=-jnp.inf)
        o_ref[0] = index_ref[jnp.argmax(v)]

    def fn(x):
        parts = [Shape((mid,), F32), Shape((mid,), I32)]
        values, indices = pl.pallas_call(first, parts, grid=(mid,))(x)
        return pl.pallas_call(second, Shape((1,), I32))(values, indices)

    ref = lambda x: jnp.argmax(x).astype(I32)[None]
    return fn, ref, [uniform(N)]
