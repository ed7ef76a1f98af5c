"""Kernels held out, of a third author: recurrences as flash-linear-attention and Mamba
write them."""

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Family, Shape
from tests.forms.sized import normal, sized, uniform

family = Family("held-out third scans")
third = sized(family)
LOW = -1e30


def _dot(a, b, dims=((1,), (0,))):
    return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=F32)


@third(
    "gated linear attention",
    "FLA: chunks with a gate for each key dimension, the state is carried in a loop",
    dict(B=2, T=32, K=16, V=16, C=8),
    dict(B=8, T=512, K=64, V=64, C=64),
    dict(B=64, T=4096, K=128, V=128, C=64),
)
def _(B, T, K, V, C, dtype):
    def kernel(q_ref, k_ref, v_ref, g_ref, o_ref):
        def chunk(n, state):
            rows = pl.ds(n * C, C)
            q, k = q_ref[0, rows, :].astype(F32), k_ref[0, rows, :].astype(F32)
            v = v_ref[0, rows, :]
            g = jnp.cumsum(g_ref[0, rows, :], axis=0)
            last = g[C - 1 : C]
            qg = (q * jnp.exp(g)).astype(v.dtype)
            kg = (k * jnp.exp(-g)).astype(v.dtype)
            a = _dot(qg, kg, ((1,), (1,)))
            keep = jnp.arange(C)[:, None] >= jnp.arange(C)[None, :]
            a = jnp.where(keep, a, 0.0).astype(v.dtype)
            o = _dot(qg, state.astype(v.dtype)) + _dot(a, v)
            o_ref[0, rows, :] = o.astype(o_ref.dtype)
            kd = (k * jnp.exp(last - g)).astype(v.dtype)
            return state * jnp.exp(last).T + _dot(kd, v, ((0,), (0,)))

        lax.fori_loop(0, T // C, chunk, jnp.zeros((K, V), F32))

    def fn(q, k, v, g):
        seq = lambda n: pl.BlockSpec((1, T, n), lambda b: (b, 0, 0))
        return pl.pallas_call(
            kernel,
            Shape((B, T, V), v.dtype),
            grid=(B,),
            in_specs=[seq(K), seq(K), seq(V), seq(K)],
            out_specs=seq(V),
        )(q, k, v, g)

    def ref(q, k, v, g):
        cut = lambda x: x.reshape(B, T // C, C, -1).swapaxes(0, 1)

        def chunk(state, x):
            q, k, v, g = x
            g = jnp.cumsum(g, 1)
            last = g[:, -1:]
            qg = (q.astype(F32) * jnp.exp(g)).astype(v.dtype)
            kg = (k.astype(F32) * jnp.exp(-g)).astype(v.dtype)
            a = jnp.einsum("btk,bsk->bts", qg, kg, preferred_element_type=F32)
            a = jnp.where(jnp.tril(jnp.ones((C, C), bool)), a, 0).astype(v.dtype)
            o = jnp.einsum(
                "btk,bkv->btv", qg, state.astype(v.dtype), preferred_element_type=F32
            ) + jnp.einsum("bts,bsv->btv", a, v, preferred_element_type=F32)
            kd = (k.astype(F32) * jnp.exp(last - g)).astype(v.dtype)
            more = jnp.einsum("btk,btv->bkv", kd, v, preferred_element_type=F32)
            return state * jnp.exp(last).swapaxes(1, 2) + more, o.astype(v.dtype)

        start = jnp.zeros((B, K, V), F32)
        out = lax.scan(chunk, start, tuple(map(cut, (q, k, v, g))))[1]
        return out.swapaxes(0, 1).reshape(B, T, V)

    return (
        fn,
        ref,
        [
            normal(B, T, K, dtype=dtype),
            normal(B, T, K, dtype=dtype, scale=0.1),
            normal(B, T, V, dtype=dtype),
            uniform(B, T, K, lo=-0.1, hi=-0.01),
        ],
    )


@third(
    "delta rule recurrent",
    "FLA's fused_recurrent: products with a vector, rank-one updates in time",
    dict(B=3, T=12, K=8, V=16, bv=8),
    dict(B=8, T=256, K=64, V=64, bv=32),
    dict(B=64, T=2048, K=128, V=128, bv=32),
)
def _(B, T, K, V, bv, dtype):
    def kernel(q_ref, k_ref, v_ref, b_ref, o_ref):
        def step(t, h):
            q, k = q_ref[0, t, :].astype(F32), k_ref[0, t, :].astype(F32)
            v, beta = v_ref[0, t, :].astype(F32), b_ref[0, t].astype(F32)
            v = (v - jnp.sum(h * k[None, :], axis=1)) * beta
            h = h + v[:, None] * k[None, :]
            o_ref[0, t, :] = jnp.sum(h * q[None, :], axis=1).astype(o_ref.dtype)
            return h

        lax.fori_loop(0, T, step, jnp.zeros((bv, K), F32))

    def fn(q, k, v, beta):
        keys = pl.BlockSpec((1, T, K), lambda j, b: (b, 0, 0))
        values = pl.BlockSpec((1, T, bv), lambda j, b: (b, 0, j))
        return pl.pallas_call(
            kernel,
            Shape((B, T, V), v.dtype),
            grid=(V // bv, B),
            in_specs=[keys, keys, values, pl.BlockSpec((1, T), lambda j, b: (b, 0))],
            out_specs=values,
        )(q, k, v, beta)

    def ref(q, k, v, beta):
        def step(h, x):
            q, k, v, beta = (a.astype(F32) for a in x)
            v = (v - jnp.einsum("bvk,bk->bv", h, k)) * beta[:, None]
            h = h + v[:, :, None] * k[:, None, :]
            return h, jnp.einsum("bvk,bk->bv", h, q).astype(dtype)

        along = lambda x: x.swapaxes(0, 1)
        start = jnp.zeros((B, V, K), F32)
        return along(lax.scan(step, start, tuple(map(along, (q, k, v, beta))))[1])

    return (
        fn,
        ref,
        [
            normal(B, T, K, dtype=dtype),
            normal(B, T, K, dtype=dtype, scale=K**-0.5),
            normal(B, T, V, dtype=dtype),
            uniform(B, T, dtype=dtype),
        ],
    )


@third(
    "wy triangle",
    "FLA: inverse of a unit triangle by forward substitution over the rows of a chunk",
    dict(N=6, C=8, K=16),
    dict(N=128, C=32, K=64),
    dict(N=4096, C=64, K=128),
)
def _(N, C, K, dtype):
    def kernel(k_ref, b_ref, o_ref):
        k = k_ref[0].astype(F32)
        rows = lax.broadcasted_iota(I32, (C, C), 0)
        cols = lax.broadcasted_iota(I32, (C, C), 1)
        beta = b_ref[0].astype(F32)
        a = -beta[:, None] * jnp.dot(k, k.T)
        a = jnp.where(rows > cols, a, 0.0)

        def step(i, a):
            row = jnp.sum(jnp.where(rows == i, a, 0.0), axis=0)
            new = row + jnp.sum(row[:, None] * a, axis=0)
            return jnp.where((rows == i) & (cols < i), new[None, :], a)

        a = lax.fori_loop(1, C, step, a)
        o_ref[0] = (a + jnp.where(rows == cols, 1.0, 0.0)).astype(o_ref.dtype)

    def fn(k, beta):
        return pl.pallas_call(
            kernel,
            Shape((N, C, C), F32),
            grid=(N,),
            in_specs=[
                pl.BlockSpec((1, C, K), lambda n: (n, 0, 0)),
                pl.BlockSpec((1, C), lambda n: (n, 0)),
            ],
            out_specs=pl.BlockSpec((1, C, C), lambda n: (n, 0, 0)),
        )(k, beta)

    def ref(k, beta):
        k = k.astype(F32)
        a = jnp.einsum("nck,ndk->ncd", k, k, precision="highest")
        a = jnp.tril(beta.astype(F32)[..., None] * a, -1)
        eye = jnp.broadcast_to(jnp.eye(C), a.shape)
        return lax.linalg.triangular_solve(
            eye + a, eye, left_side=True, lower=True, unit_diagonal=True
        )

    return (
        fn,
        ref,
        [normal(N, C, K, dtype=dtype, scale=K**-0.5), uniform(N, C, dtype=dtype)],
    )


@third(
    "rwkv6",
    "a decay of each step and a bonus for the present one, time chunks on the grid",
    dict(B=2, T=16, K=8, C=8),
    dict(B=16, T=256, K=32, C=32),
    dict(B=256, T=2048, K=64, C=32),
)
def _(B, T, K, C, dtype):
    def kernel(r_ref, k_ref, v_ref, w_ref, u_ref, o_ref, s_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            s_ref[...] = jnp.zeros_like(s_ref)

        u = u_ref[...][0, :, None]

        def step(t, _):
            r, k, v = (x[0, pl.ds(t, 1), :].astype(F32) for x in (r_ref, k_ref, v_ref))
            w = jnp.exp(-jnp.exp(w_ref[0, pl.ds(t, 1), :].astype(F32)))
            kv = k.T * v
            s = s_ref[...]
            o = jnp.sum(r.T * (s + u * kv), axis=0, keepdims=True)
            o_ref[0, pl.ds(t, 1), :] = o.astype(o_ref.dtype)
            s_ref[...] = w.T * s + kv
            return 0

        lax.fori_loop(0, C, step, 0)

    def fn(r, k, v, w, u):
        seq = pl.BlockSpec((1, C, K), lambda b, t: (b, t, 0))
        return pl.pallas_call(
            kernel,
            Shape((B, T, K), v.dtype),
            grid=(B, T // C),
            in_specs=[seq] * 4 + [pl.BlockSpec((1, K), lambda b, t: (0, 0))],
            out_specs=seq,
            scratch_shapes=[pltpu.VMEM((K, K), F32)],
        )(r, k, v, w, u)

    def ref(r, k, v, w, u):
        def step(s, x):
            r, k, v, w = (a.astype(F32) for a in x)
            kv = k[:, :, None] * v[:, None, :]
            o = jnp.sum(r[:, :, None] * (s + u[0][:, None] * kv), 1)
            return jnp.exp(-jnp.exp(w))[:, :, None] * s + kv, o.astype(dtype)

        along = lambda x: x.swapaxes(0, 1)
        start = jnp.zeros((B, K, K), F32)
        return along(lax.scan(step, start, tuple(map(along, (r, k, v, w))))[1])

    return (
        fn,
        ref,
        [
            *[normal(B, T, K, dtype=dtype) for _ in range(3)],
            normal(B, T, K, dtype=dtype),
            normal(1, K),
        ],
    )


@third(
    "hgrn",
    "a gated mean of inputs by a while loop over time, blocks of channels",
    dict(B=3, T=20, D=32, bd=16),
    dict(B=4, T=1024, D=512, bd=128),
    dict(B=16, T=4096, D=2048, bd=128),
)
def _(B, T, D, bd, dtype):
    def kernel(x_ref, g_ref, o_ref):
        def step(c):
            t, h = c
            f = jax.nn.sigmoid(g_ref[0, t, :].astype(F32))
            h = f * h + (1 - f) * x_ref[0, t, :].astype(F32)
            o_ref[0, t, :] = h.astype(o_ref.dtype)
            return t + 1, h

        start = (jnp.int32(0), jnp.zeros((bd,), F32))
        lax.while_loop(lambda c: c[0] < T, step, start)

    def fn(x, g):
        block = pl.BlockSpec((1, T, bd), lambda b, d: (b, 0, d))
        return pl.pallas_call(
            kernel,
            Shape((B, T, D), x.dtype),
            grid=(B, D // bd),
            in_specs=[block, block],
            out_specs=block,
        )(x, g)

    def ref(x, g):
        f = jax.nn.sigmoid(g.astype(F32))
        step = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        out = lax.associative_scan(step, (f, (1 - f) * x.astype(F32)), axis=1)[1]
        return out.astype(x.dtype)

    return fn, ref, [normal(B, T, D, dtype=dtype), normal(B, T, D, dtype=dtype)]


@third(
    "selective scan",
    "Mamba: states of 16 per channel, chunks of time on the grid, a loop in the chunk",
    dict(B=2, T=16, D=16, N=4, C=8, bd=8),
    dict(B=2, T=512, D=512, N=16, C=64, bd=128),
    dict(B=8, T=2048, D=4096, N=16, C=64, bd=128),
)
def _(B, T, D, N, C, bd, dtype):
    def kernel(x_ref, dt_ref, a_ref, b_ref, c_ref, d_ref, o_ref, h_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            h_ref[...] = jnp.zeros_like(h_ref)

        a, d = a_ref[...], d_ref[0]

        def step(t, h):
            dt = jax.nn.softplus(dt_ref[0, t, :].astype(F32))
            x = x_ref[0, t, :].astype(F32)
            b, c = b_ref[0, t, :].astype(F32), c_ref[0, t, :].astype(F32)
            h = jnp.exp(dt[None, :] * a) * h + (dt * x)[None, :] * b[:, None]
            y = jnp.sum(h * c[:, None], axis=0) + d * x
            o_ref[0, t, :] = y.astype(o_ref.dtype)
            return h

        h_ref[...] = lax.fori_loop(0, C, step, h_ref[...])

    def fn(x, dt, a, b, c, d):
        seq = pl.BlockSpec((1, C, bd), lambda b, d, t: (b, t, d))
        states = pl.BlockSpec((1, C, N), lambda b, d, t: (b, t, 0))
        return pl.pallas_call(
            kernel,
            Shape((B, T, D), x.dtype),
            grid=(B, D // bd, T // C),
            in_specs=[
                seq,
                seq,
                pl.BlockSpec((N, bd), lambda b, d, t: (0, d)),
                states,
                states,
                pl.BlockSpec((1, bd), lambda b, d, t: (0, d)),
            ],
            out_specs=seq,
            scratch_shapes=[pltpu.VMEM((N, bd), F32)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
        )(x, dt, a, b, c, d)

    def ref(x, dt, a, b, c, d):
        def step(h, s):
            x, dt, b, c = (v.astype(F32) for v in s)
            dt = jax.nn.softplus(dt)
            h = jnp.exp(dt[:, None] * a) * h + (dt * x)[:, None] * b[:, :, None]
            return h, (jnp.sum(h * c[:, :, None], 1) + d[0] * x).astype(dtype)

        along = lambda v: v.swapaxes(0, 1)
        start = jnp.zeros((B, N, D), F32)
        return along(lax.scan(step, start, tuple(map(along, (x, dt, b, c))))[1])

    return (
        fn,
        ref,
        [
            normal(B, T, D, dtype=dtype),
            normal(B, T, D, dtype=dtype),
            uniform(N, D, lo=-2.0, hi=-0.1),
            normal(B, T, N, dtype=dtype),
            normal(B, T, N, dtype=dtype),
            normal(1, D),
        ],
    )


@third(
    "state passing",
    "Mamba 2: states of chunks in order, a python loop in flat blocks",
    dict(B=2, H=3, C=5, S=32, bs=16),
    dict(B=4, H=8, C=16, S=4096, bs=1024),
    dict(B=8, H=64, C=32, S=8192, bs=2048),
)
def _(B, H, C, S, bs, dtype):
    def kernel(s_ref, a_ref, o_ref, last_ref):
        state = jnp.zeros((bs,), F32)
        for c in range(C):
            o_ref[0, c, 0, :] = state.astype(o_ref.dtype)
            state = jnp.exp(a_ref[0, 0, c]) * state + s_ref[0, c, 0, :].astype(F32)
        last_ref[0, 0, :] = state

    def fn(states, decay):
        block = pl.BlockSpec((1, C, 1, bs), lambda s, b, h: (b, 0, h, s))
        return pl.pallas_call(
            kernel,
            (Shape((B, C, H, S), dtype), Shape((B, H, S), F32)),
            grid=(S // bs, B, H),
            in_specs=[block, pl.BlockSpec((1, 1, C), lambda s, b, h: (b, h, 0))],
            out_specs=(block, pl.BlockSpec((1, 1, bs), lambda s, b, h: (b, h, s))),
        )(states, decay)

    def ref(states, decay):
        def step(state, x):
            s, a = x
            return jnp.exp(a)[..., None] * state + s.astype(F32), state.astype(dtype)

        start = jnp.zeros((B, H, S), F32)
        last, out = lax.scan(
            step, start, (states.swapaxes(0, 1), decay.transpose(2, 0, 1))
        )
        return out.swapaxes(0, 1), last

    return (
        fn,
        ref,
        [normal(B, C, H, S, dtype=dtype), uniform(B, H, C, lo=-1.0, hi=-0.1)],
    )


@third(
    "retention",
    "a decay of the head, the state in scratch that the grid carries, heads by vmap",
    dict(B=2, H=3, T=32, D=16, C=8),
    dict(B=2, H=4, T=512, D=64, C=64),
    dict(B=8, H=16, T=4096, D=128, C=128),
)
def _(B, H, T, D, C, dtype):
    def kernel(gamma_ref, q_ref, k_ref, v_ref, o_ref, s_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            s_ref[...] = jnp.zeros_like(s_ref)

        log = gamma_ref[0]
        i = lax.broadcasted_iota(I32, (C, C), 0)
        j = lax.broadcasted_iota(I32, (C, C), 1)
        mask = jnp.where(i >= j, jnp.exp((i - j).astype(F32) * log), 0.0)
        at = lax.broadcasted_iota(I32, (C, 1), 0).astype(F32)
        q, k, v = q_ref[...], k_ref[...], v_ref[...]
        inner = (_dot(q, k, ((1,), (1,))) * mask).astype(v.dtype)
        cross = _dot(q, s_ref[...].astype(q.dtype)) * jnp.exp((at + 1) * log)
        o_ref[...] = (_dot(inner, v) + cross).astype(o_ref.dtype)
        kd = (k.astype(F32) * jnp.exp((C - 1 - at) * log)).astype(v.dtype)
        s_ref[...] = jnp.exp(C * log) * s_ref[...] + _dot(kd, v, ((0,), (0,)))

    def one(q, k, v, gamma):
        seq = pl.BlockSpec((C, D), lambda t: (t, 0))
        return pl.pallas_call(
            kernel,
            Shape((T, D), v.dtype),
            grid=(T // C,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), seq, seq, seq],
            out_specs=seq,
            scratch_shapes=[pltpu.VMEM((D, D), F32)],
        )(gamma, q, k, v)

    def fn(q, k, v, gamma):
        return jax.vmap(jax.vmap(one), in_axes=(0, 0, 0, None))(q, k, v, gamma)

    def ref(q, k, v, gamma):
        log = gamma[:, 0][None, :, None, None]
        cut = lambda x: x.reshape(B, H, T // C, C, D).transpose(2, 0, 1, 3, 4)
        i = jnp.arange(C, dtype=F32)
        apart = i[:, None] - i[None, :]
        mask = jnp.where(apart >= 0, jnp.exp(apart * log), 0.0)

        def chunk(s, x):
            q, k, v = x
            ein = lambda e, a, b: jnp.einsum(e, a, b, preferred_element_type=F32)
            inner = (ein("bhtk,bhsk->bhts", q, k) * mask).astype(v.dtype)
            cross = ein("bhtk,bhkv->bhtv", q, s.astype(q.dtype))
            o = ein("bhts,bhsv->bhtv", inner, v)
            o += cross * jnp.exp((i[:, None] + 1) * log)
            kd = (k.astype(F32) * jnp.exp((C - 1 - i[:, None]) * log)).astype(v.dtype)
            s = jnp.exp(C * log) * s + ein("bhtk,bhtv->bhkv", kd, v)
            return s, o.astype(dtype)

        out = lax.scan(chunk, jnp.zeros((B, H, D, D), F32), tuple(map(cut, (q, k, v))))
        return out[1].transpose(1, 2, 0, 3, 4).reshape(B, H, T, D)

    return (
        fn,
        ref,
        [
            *[normal(B, H, T, D, dtype=dtype, scale=0.3) for _ in range(3)],
            uniform(H, 1, lo=-0.1, hi=-0.01),
        ],
    )


@third(
    "linear attention two phases",
    "sums of keys and values in the first phase of an axis, queries in the second",
    dict(B=3, T=32, D=16, C=8),
    dict(B=4, T=1024, D=64, C=128),
    dict(B=64, T=4096, D=128, C=256),
)
def _(B, T, D, C, dtype):
    feature = lambda x: jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0.0)))

    def kernel(q_ref, k_ref, v_ref, o_ref, kv_ref, z_ref):
        phase, t = pl.program_id(1), pl.program_id(2)

        @pl.when((phase == 0) & (t == 0))
        def _():
            kv_ref[...] = jnp.zeros_like(kv_ref)
            z_ref[...] = jnp.zeros_like(z_ref)

        @pl.when(phase == 0)
        def _():
            k = feature(k_ref[0].astype(F32))
            kv_ref[...] += _dot(k.astype(v_ref.dtype), v_ref[0], ((0,), (0,)))
            z_ref[...] += k.sum(axis=0, keepdims=True)

        @pl.when(phase == 1)
        def _():
            q = feature(q_ref[0].astype(F32))
            y = _dot(q.astype(v_ref.dtype), kv_ref[...].astype(v_ref.dtype))
            z = jnp.sum(q * z_ref[...], axis=1, keepdims=True)
            o_ref[0] = (y / z).astype(o_ref.dtype)

    def fn(q, k, v):
        first = pl.BlockSpec((1, C, D), lambda b, p, t: (b, t * (1 - p), 0))
        second = pl.BlockSpec((1, C, D), lambda b, p, t: (b, t * p, 0))
        return pl.pallas_call(
            kernel,
            Shape((B, T, D), q.dtype),
            grid=(B, 2, T // C),
            in_specs=[second, first, first],
            out_specs=second,
            scratch_shapes=[pltpu.VMEM((D, D), F32), pltpu.VMEM((1, D), F32)],
        )(q, k, v)

    def ref(q, k, v):
        q, k = feature(q.astype(F32)), feature(k.astype(F32))
        kv = jnp.einsum(
            "btk,btv->bkv", k.astype(v.dtype), v, preferred_element_type=F32
        )
        y = jnp.einsum(
            "btk,bkv->btv",
            q.astype(v.dtype),
            kv.astype(v.dtype),
            preferred_element_type=F32,
        )
        z = jnp.einsum("btk,bk->bt", q, k.sum(1), precision="highest")
        return (y / z[..., None]).astype(v.dtype)

    return fn, ref, [normal(B, T, D, dtype=dtype) for _ in range(3)]


@third(
    "chunk cumsum",
    "FLA: prefix sums in each chunk, backwards, as a product by a triangle",
    dict(B=2, T=32, H=4, C=8),
    dict(B=4, T=2048, H=32, C=64),
    dict(B=32, T=8192, H=64, C=64),
)
def _(B, T, H, C, dtype):
    def kernel(x_ref, o_ref):
        i = lax.broadcasted_iota(I32, (C, C), 0)
        j = lax.broadcasted_iota(I32, (C, C), 1)
        ones = jnp.where(i <= j, 1.0, 0.0)
        o_ref[0] = jnp.dot(ones, x_ref[0], precision="highest")

    def fn(x):
        block = pl.BlockSpec((1, C, H), lambda t, b: (b, t, 0))
        return pl.pallas_call(
            kernel,
            Shape((B, T, H), F32),
            grid=(T // C, B),
            in_specs=[block],
            out_specs=block,
        )(x)

    def ref(x):
        x = x.reshape(B, T // C, C, H)
        return jnp.flip(jnp.cumsum(jnp.flip(x, 2), 2), 2).reshape(B, T, H)

    return fn, ref, [normal(B, T, H)]
