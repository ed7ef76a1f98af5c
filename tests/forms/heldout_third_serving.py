"""Kernels held out, of a third author: serving as vLLM and SGLang write it (pages,
routing, experts, quantised weights)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Family, Shape
from tests.forms.sized import integers, made, normal, sized, uniform

family = Family("held-out third serving")
third = sized(family)
LOW = -1e30
FP8 = jnp.float8_e4m3fn


@third(
    "paged decode packed keys",
    "vLLM's first layout: keys in groups of x, a loop over a page table",
    dict(B=3, H=4, G=2, D=16, P=12, page=8, most=4, x=8),
    dict(B=4, H=8, G=4, D=64, P=128, page=16, most=32, x=8),
    dict(B=64, H=32, G=4, D=128, P=8192, page=16, most=128, x=8),
    grad=False,
)
def _(B, H, G, D, P, page, most, x, dtype):
    Hk = H // G

    def kernel(q_ref, k_ref, v_ref, table_ref, len_ref, o_ref):
        b, h = pl.program_id(0), pl.program_id(1)
        q = q_ref[b, pl.ds(h * G, G), :].astype(F32) * D**-0.5
        n = len_ref[b]

        def step(j, carry):
            m, l, acc = carry
            where = table_ref[b, j]
            k = k_ref[where, h].astype(F32)  # (D // x, page, x)
            k = k.transpose(0, 2, 1).reshape(D, page)
            v = v_ref[where, h].astype(F32)  # (D, page)
            s = jnp.dot(q, k)
            at = j * page + lax.broadcasted_iota(I32, s.shape, 1)
            s = jnp.where(at < n, s, LOW)
            new = jnp.maximum(m, s.max(1, keepdims=True))
            p = jnp.exp(s - new)
            a = jnp.exp(m - new)
            acc = acc * a + jnp.dot(p, v.T)
            return new, l * a + p.sum(1, keepdims=True), acc

        start = (
            jnp.full((G, 1), LOW, F32),
            jnp.zeros((G, 1), F32),
            jnp.zeros((G, D), F32),
        )
        _, l, acc = lax.fori_loop(0, pl.cdiv(n, page), step, start)
        o_ref[b, pl.ds(h * G, G), :] = (acc / l).astype(o_ref.dtype)

    def fn(q, k, v, table, n):
        any_ = pl.BlockSpec(memory_space=pl.ANY)
        smem = pl.BlockSpec(memory_space=pltpu.SMEM)
        return pl.pallas_call(
            kernel,
            Shape((B, H, D), q.dtype),
            grid=(B, Hk),
            in_specs=[pl.BlockSpec(), any_, any_, smem, smem],
        )(q, k, v, table, n)

    def ref(q, k, v, table, n):
        k = k[table].transpose(0, 2, 1, 4, 3, 5)  # B Hk pages page D/x x
        k = k.reshape(B, Hk, most * page, D).astype(F32)
        v = v[table].transpose(0, 2, 1, 4, 3).reshape(B, Hk, most * page, D)
        q = q.reshape(B, Hk, G, D).astype(F32) * D**-0.5
        s = jnp.einsum("bhgd,bhsd->bhgs", q, k)
        s = jnp.where(jnp.arange(most * page) < n[:, None, None, None], s, -jnp.inf)
        out = jnp.einsum("bhgs,bhsd->bhgd", jax.nn.softmax(s, -1), v.astype(F32))
        return out.reshape(B, H, D).astype(dtype)

    return (
        fn,
        ref,
        [
            normal(B, H, D, dtype=dtype),
            normal(P, Hk, D // x, page, x, dtype=dtype),
            normal(P, Hk, D, page, dtype=dtype),
            integers(B, most, hi=P),
            integers(B, lo=most * page // 2, hi=most * page + 1),
        ],
    )


@third(
    "decode second stage",
    "FlashDecoding's merge: a loop over the parts that a length gives",
    dict(B=3, H=4, S=4, D=16),
    dict(B=64, H=16, S=16, D=64),
    dict(B=256, H=64, S=32, D=128),
)
def _(B, H, S, D, dtype):
    def kernel(mid_ref, lse_ref, len_ref, o_ref):
        b, h = pl.program_id(0), pl.program_id(1)
        parts = jnp.minimum(pl.cdiv(len_ref[b], 64), S)

        def step(s, carry):
            acc, total, m = carry
            v = mid_ref[b, h, s, :].astype(F32)
            lse = lse_ref[b, h, s]
            new = jnp.maximum(lse, m)
            old, p = jnp.exp(m - new), jnp.exp(lse - new)
            return acc * old + p * v, total * old + p, new

        start = (jnp.zeros((D,), F32), jnp.float32(0), jnp.float32(LOW))
        acc, total, _ = lax.fori_loop(0, parts, step, start)
        o_ref[b, h, :] = (acc / total).astype(o_ref.dtype)

    def fn(mid, lse, n):
        return pl.pallas_call(kernel, Shape((B, H, D), dtype), grid=(B, H))(mid, lse, n)

    def ref(mid, lse, n):
        keep = jnp.arange(S) < jnp.minimum(-(-n // 64), S)[:, None]
        p = jax.nn.softmax(jnp.where(keep[:, None], lse, -jnp.inf), -1)
        return jnp.einsum("bhs,bhsd->bhd", p, mid.astype(F32)).astype(dtype)

    return (
        fn,
        ref,
        [
            normal(B, H, S, D),
            normal(B, H, S),
            integers(B, lo=70, hi=64 * S),
        ],
    )


@third(
    "reshape and cache",
    "a token's heads go to the slot that an array names, caches in place",
    dict(T=9, H=2, D=16, P=8, page=4),
    dict(T=256, H=8, D=64, P=64, page=16),
    dict(T=8192, H=8, D=128, P=2048, page=16),
    grad=False,
)
def _(T, H, D, P, page, dtype):
    def kernel(slot_ref, k_ref, v_ref, kc_ref, vc_ref, ko_ref, vo_ref):
        t = pl.program_id(0)
        slot = slot_ref[t]

        @pl.when(slot >= 0)
        def _():
            block, at = slot // page, slot % page
            ko_ref[block, at] = k_ref[0]
            vo_ref[block, at] = v_ref[0]

    def fn(k, v, kc, vc, slots):
        row = pl.BlockSpec((1, H, D), lambda t, s: (t, 0, 0))
        any_ = pl.BlockSpec(memory_space=pl.ANY)
        shape = Shape((P, page, H, D), dtype)
        return pl.pallas_call(
            kernel,
            [shape, shape],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(T,),
                in_specs=[row, row, any_, any_],
                out_specs=[any_, any_],
            ),
            input_output_aliases={3: 0, 4: 1},
        )(slots, k, v, kc, vc)

    def ref(k, v, kc, vc, slots):
        to = jnp.where(slots < 0, P * page, slots)
        write = lambda c, x: (
            c.reshape(P * page, H, D).at[to].set(x, mode="drop").reshape(c.shape)
        )
        return write(kc, k), write(vc, v)

    def slots(r):
        chosen = r.permutation(P * page)[:T]
        return np.where(r.uniform(size=T) < 0.1, -1, chosen)

    return (
        fn,
        ref,
        [
            normal(T, H, D, dtype=dtype),
            normal(T, H, D, dtype=dtype),
            normal(P, page, H, D, dtype=dtype),
            normal(P, page, H, D, dtype=dtype),
            made((T,), I32, slots),
        ],
    )


@third(
    "topk softmax",
    "routing: k rounds of argmax over a row in an unrolled loop, renormed",
    dict(T=12, E=16, K=3, bt=4),
    dict(T=1024, E=64, K=4, bt=8),
    dict(T=16384, E=256, K=8, bt=4),
)
def _(T, E, K, bt, dtype):
    def kernel(x_ref, w_ref, i_ref):
        x = x_ref[...]
        x = jnp.exp(x - x.max(axis=1, keepdims=True))
        p = x / x.sum(axis=1, keepdims=True)
        lanes = lax.broadcasted_iota(I32, p.shape, 1)
        weights, ids = [], []
        for _ in range(K):
            best = jnp.argmax(p, axis=1)
            ids.append(best.astype(I32))
            weights.append(jnp.max(p, axis=1))
            p = jnp.where(lanes == best[:, None], -1.0, p)
        total = sum(weights)
        for n in range(K):
            w_ref[:, n] = weights[n] / total
            i_ref[:, n] = ids[n]

    def fn(x):
        out = pl.BlockSpec((bt, K), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            (Shape((T, K), F32), Shape((T, K), I32)),
            grid=(T // bt,),
            in_specs=[pl.BlockSpec((bt, E), lambda i: (i, 0))],
            out_specs=(out, out),
        )(x)

    def ref(x):
        w, i = lax.top_k(jax.nn.softmax(x, -1), K)
        return w / w.sum(-1, keepdims=True), i.astype(I32)

    def logits(r):
        # Without ties: a maximum shares its gradient among them, top_k does not.
        return r.permuted(np.tile(np.linspace(-3, 3, E), (T, 1)), axis=1)

    return fn, ref, [made((T, E), F32, logits)]


@third(
    "group limited routing",
    "DeepSeek: sigmoid scores, best groups by their two best, then experts",
    dict(T=6, E=16, Gr=4, KG=2, K=3),
    dict(T=512, E=64, Gr=8, KG=4, K=4),
    dict(T=16384, E=256, Gr=8, KG=4, K=8),
    grad=False,
)
def _(T, E, Gr, KG, K, dtype):
    size = E // Gr

    def kernel(x_ref, bias_ref, w_ref, i_ref):
        s = jax.nn.sigmoid(x_ref[0].astype(F32))
        biased = s + bias_ref[...]
        grouped = biased.reshape(Gr, size)
        first = grouped.max(1)
        at = grouped.argmax(1)
        lanes = lax.broadcasted_iota(I32, (Gr, size), 1)
        rest = jnp.where(lanes == at[:, None], -jnp.inf, grouped)
        scores = first + rest.max(1)
        chosen = jnp.zeros((Gr,), bool)
        numbers = jnp.arange(Gr)
        for _ in range(KG):
            best = jnp.argmax(jnp.where(chosen, -jnp.inf, scores))
            chosen = chosen | (numbers == best)
        masked = jnp.where(chosen[:, None], grouped, -jnp.inf).reshape(E)
        experts = jnp.arange(E)
        total = jnp.float32(0)
        picked = []
        for _ in range(K):
            best = jnp.argmax(masked)
            weight = jnp.sum(jnp.where(experts == best, s, 0.0))
            masked = jnp.where(experts == best, -jnp.inf, masked)
            picked.append((best, weight))
            total += weight
        for n, (best, weight) in enumerate(picked):
            i_ref[0, n] = best.astype(I32)
            w_ref[0, n] = weight / total * 2.5

    def fn(x, bias):
        row = lambda n: pl.BlockSpec((1, n), lambda t: (t, 0))
        return pl.pallas_call(
            kernel,
            (Shape((T, K), F32), Shape((T, K), I32)),
            grid=(T,),
            in_specs=[row(E), pl.BlockSpec((E,), lambda t: (0,))],
            out_specs=(row(K), row(K)),
        )(x, bias)

    def ref(x, bias):
        s = jax.nn.sigmoid(x.astype(F32))
        grouped = (s + bias).reshape(T, Gr, size)
        scores = lax.top_k(grouped, 2)[0].sum(-1)
        chosen = lax.top_k(scores, KG)[1]
        keep = jax.nn.one_hot(chosen, Gr).sum(1) > 0
        masked = jnp.where(keep[..., None], grouped, -jnp.inf).reshape(T, E)
        ids = lax.top_k(masked, K)[1].astype(I32)
        w = jnp.take_along_axis(s, ids, 1)
        return w / w.sum(-1, keepdims=True) * 2.5, ids

    return fn, ref, [normal(T, E, dtype=dtype), normal(E, scale=0.1)]


@third(
    "fused moe",
    "sorted tokens gathered by index arrays, one expert for each block of rows",
    dict(T=12, K=2, E=4, C=16, N=32, bm=8, bn=16, bk=8),
    dict(T=256, K=2, E=8, C=256, N=512, bm=16, bn=64, bk=64),
    dict(T=4096, K=8, E=64, C=2048, N=2816, bm=64, bn=128, bk=64),
    grad=False,
)
def _(T, K, E, C, N, bm, bn, bk, dtype):
    blocks = pl.cdiv(T * K, bm) + E
    nn = N // bn

    def kernel(expert_ref, ids_ref, x_ref, w_ref, gate_ref, o_ref):
        pid = pl.program_id(0)
        i, j = pid // nn, pid % nn
        ids = ids_ref[pl.ds(i * bm, bm)]
        mask = ids < T * K
        expert = expert_ref[i]

        def step(k, acc):
            x = pl.load(
                x_ref,
                (ids // K, pl.ds(k * bk, bk)),
                mask=jnp.broadcast_to(mask[:, None], (bm, bk)),
                other=0.0,
            )
            w = w_ref[expert, pl.ds(j * bn, bn), pl.ds(k * bk, bk)]
            return acc + pl.dot(x, w, trans_b=True).astype(F32)

        acc = lax.fori_loop(0, C // bk, step, jnp.zeros((bm, bn), F32))
        gate = pl.load(gate_ref, ids, mask=mask, other=0.0)
        pl.store(
            o_ref,
            (ids, pl.ds(j * bn, bn)),
            (acc * gate[:, None]).astype(o_ref.dtype),
            mask=jnp.broadcast_to(mask[:, None], (bm, bn)),
        )

    def fn(x, w, gate, ids, experts):
        return pl.pallas_call(kernel, Shape((T * K, N), x.dtype), grid=(blocks * nn,))(
            experts, ids, x, w, gate
        )

    def ref(x, w, gate, ids, experts):
        def block(i, out):
            rows = lax.dynamic_slice(ids, (i * bm,), (bm,))
            a = x[jnp.minimum(rows // K, T - 1)]
            y = jnp.dot(a, w[experts[i]].T, preferred_element_type=F32)
            y = y * gate[jnp.minimum(rows, T * K - 1)][:, None]
            return out.at[rows].set(y.astype(x.dtype), mode="drop")

        start = jnp.zeros((T * K, N), x.dtype)
        return lax.fori_loop(0, blocks, block, start)

    def sorted_ids(r):
        chosen = np.random.default_rng(3).integers(0, E, T * K)
        rows = []
        for e in range(E):
            mine = np.flatnonzero(chosen == e)
            rows += [*mine, *[T * K] * (-len(mine) % bm)]
        return np.array(rows + [T * K] * (blocks * bm - len(rows)))[: blocks * bm]

    def experts(r):
        chosen = np.random.default_rng(3).integers(0, E, T * K)
        each = [e for e in range(E) for _ in range(-(-(chosen == e).sum() // bm))]
        return np.array(each + [0] * (blocks - len(each)))[:blocks]

    return (
        fn,
        ref,
        [
            normal(T, C, dtype=dtype),
            normal(E, N, C, dtype=dtype),
            uniform(T * K),
            made((blocks * bm,), I32, sorted_ids),
            made((blocks,), I32, experts),
        ],
    )


AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


@third(
    "awq matmul",
    "eight columns in a word in AWQ's order, unpacked by shifts in three dims",
    dict(M=8, K=32, N=64, g=16, bm=8, bn=32, bk=16),
    dict(M=16, K=1024, N=512, g=128, bm=16, bn=64, bk=128),
    dict(M=16, K=8192, N=8192, g=128, bm=16, bn=128, bk=128),
    grad=False,
)
def _(M, K, N, g, bm, bn, bk, dtype):
    def kernel(x_ref, q_ref, z_ref, s_ref, o_ref, acc_ref):
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        order = lax.broadcasted_iota(I32, (1, 1, 8), 2)
        shifts = jnp.where(order % 2 == 0, order // 2, order // 2 + 4) * 4
        unpack = lambda w, rows: ((w[:, :, None] >> shifts) & 0xF).reshape(rows, bn)
        w = unpack(q_ref[...], bk).astype(F32)
        z = unpack(z_ref[...], 1).astype(F32)
        w = (w - z) * s_ref[...].astype(F32)
        acc_ref[...] += jnp.dot(
            x_ref[...], w.astype(x_ref.dtype), preferred_element_type=F32
        )

        @pl.when(k == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def fn(x, q, z, s):
        return pl.pallas_call(
            kernel,
            Shape((M, N), x.dtype),
            grid=(M // bm, N // bn, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
                pl.BlockSpec((bk, bn // 8), lambda i, j, k: (k, j)),
                pl.BlockSpec((1, bn // 8), lambda i, j, k: (k * bk // g, j)),
                pl.BlockSpec((1, bn), lambda i, j, k: (k * bk // g, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), F32)],
        )(x, q, z, s)

    def ref(x, q, z, s):
        shifts = 4 * jnp.array(AWQ)
        unpack = lambda w: ((w[:, :, None] >> shifts) & 0xF).reshape(len(w), N)
        many = lambda a: jnp.repeat(a, g, axis=0)
        w = (unpack(q).astype(F32) - many(unpack(z).astype(F32))) * many(s.astype(F32))
        return jnp.dot(x, w.astype(x.dtype), preferred_element_type=F32).astype(x.dtype)

    words = lambda *shape: made(
        shape, I32, lambda r: r.integers(-(2**31), 2**31, shape, dtype=np.int64)
    )
    return (
        fn,
        ref,
        [
            normal(M, K, dtype=dtype),
            words(K, N // 8),
            words(K // g, N // 8),
            uniform(K // g, N, lo=0.01, hi=0.02, dtype=dtype),
        ],
    )


@third(
    "per token group quant",
    "groups of 128 of a row as a tile of two dims, 8-bit floats and scales",
    dict(T=8, C=64, g=16),
    dict(T=1024, C=2048, g=128),
    dict(T=16384, C=7168, g=128),
    grad=False,
)
def _(T, C, g, dtype):
    def kernel(x_ref, q_ref, s_ref):
        t = pl.program_id(0)
        x = x_ref[t, :].astype(F32).reshape(C // g, g)
        s = jnp.maximum(jnp.abs(x).max(axis=1, keepdims=True), 1e-4) / 448.0
        q_ref[t, :] = jnp.clip(x / s, -448.0, 448.0).reshape(C).astype(FP8)
        s_ref[t, :] = s[:, 0]

    def fn(x):
        q, s = pl.pallas_call(
            kernel, [Shape((T, C), FP8), Shape((T, C // g), F32)], grid=(T,)
        )(x)
        return lax.bitcast_convert_type(q, jnp.int8), s

    def ref(x):
        x = x.astype(F32).reshape(T, C // g, g)
        s = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-4) / 448.0
        q = jnp.clip(x / s, -448.0, 448.0).reshape(T, C).astype(FP8)
        return lax.bitcast_convert_type(q, jnp.int8), s[..., 0]

    return fn, ref, [normal(T, C, dtype=dtype)]


@third(
    "block scaled fp8 matmul",
    "DeepSeek: scales of a token's group and of a square of weights, in the k loop",
    dict(M=16, K=32, N=32, g=16, bm=8, bn=16),
    dict(M=256, K=512, N=512, g=128, bm=64, bn=128),
    dict(M=4096, K=7168, N=4096, g=128, bm=128, bn=128),
    grad=False,
)
def _(M, K, N, g, bm, bn, dtype):
    def kernel(a_ref, b_ref, as_ref, bs_ref, o_ref):
        i, j = pl.program_id(0), pl.program_id(1)

        def step(k, acc):
            a = a_ref[pl.ds(i * bm, bm), pl.ds(k * g, g)]
            b = b_ref[pl.ds(j * bn, bn), pl.ds(k * g, g)]
            sa = as_ref[pl.ds(i * bm, bm), k]
            sb = bs_ref[j * bn // g, k]
            y = lax.dot_general(
                a, b, (((1,), (1,)), ((), ())), preferred_element_type=F32
            )
            return acc + y * (sa[:, None] * sb)

        acc = lax.fori_loop(0, K // g, step, jnp.zeros((bm, bn), F32))
        o_ref[...] = acc.astype(o_ref.dtype)

    def fn(a, b, sa, sb):
        out = pl.BlockSpec((bm, bn), lambda i, j: (i, j))
        grid = (M // bm, N // bn)
        return pl.pallas_call(kernel, Shape((M, N), dtype), grid=grid, out_specs=out)(
            a, b, sa, sb
        )

    def ref(a, b, sa, sb):
        many = lambda s: jnp.repeat(s, g, axis=-1)
        x = a.astype(F32) * many(sa)
        w = b.astype(F32) * jnp.repeat(many(sb), g, axis=0)
        return jnp.dot(x, w.T, precision="highest").astype(dtype)

    return (
        fn,
        ref,
        [
            normal(M, K, dtype=FP8),
            normal(N, K, dtype=FP8),
            uniform(M, K // g, lo=0.5),
            uniform(N // g, K // g, lo=0.5),
        ],
    )


@third(
    "moe sum",
    "each token adds its experts' rows, a block of the hidden size at a time",
    dict(T=10, K=3, C=32, bc=16),
    dict(T=512, K=4, C=1024, bc=256),
    dict(T=8192, K=8, C=4096, bc=1024),
)
def _(T, K, C, bc, dtype):
    def kernel(x_ref, o_ref):
        acc = jnp.zeros((bc,), F32)
        for k in range(K):
            acc = acc + x_ref[0, k, :].astype(F32)
        o_ref[0, :] = acc.astype(o_ref.dtype)

    def fn(x):
        return pl.pallas_call(
            kernel,
            Shape((T, C), x.dtype),
            grid=(T, C // bc),
            in_specs=[pl.BlockSpec((1, K, bc), lambda t, c: (t, 0, c))],
            out_specs=pl.BlockSpec((1, bc), lambda t, c: (t, c)),
        )(x)

    ref = lambda x: x.astype(F32).sum(1).astype(x.dtype)
    return fn, ref, [normal(T, K, C, dtype=dtype)]


@third(
    "silu mul quant",
    "halves of one array by offsets, a static scale, 8-bit floats",
    dict(T=6, N=64),
    dict(T=1024, N=1408),
    dict(T=8192, N=14336),
    grad=False,
)
def _(T, N, dtype):
    BS = min(1024, N)

    def kernel(x_ref, s_ref, o_ref):
        t, c = pl.program_id(0), pl.program_id(1)
        offs = c * BS + jnp.arange(BS)
        mask = offs < N
        gate = pl.load(x_ref, (t, offs), mask=mask, other=0.0).astype(F32)
        up = pl.load(x_ref, (t, offs + N), mask=mask, other=0.0).astype(F32)
        y = gate / (1 + jnp.exp(-gate)) * up * s_ref[0]
        y = jnp.clip(y, -448.0, 448.0).astype(FP8)
        pl.store(o_ref, (t, offs), y, mask=mask)

    def fn(x, s):
        out = pl.pallas_call(kernel, Shape((T, N), FP8), grid=(T, pl.cdiv(N, BS)))(x, s)
        return lax.bitcast_convert_type(out, jnp.int8)

    def ref(x, s):
        g, u = x[:, :N].astype(F32), x[:, N:].astype(F32)
        y = g / (1 + jnp.exp(-g)) * u * s[0]
        return lax.bitcast_convert_type(
            jnp.clip(y, -448.0, 448.0).astype(FP8), jnp.int8
        )

    return fn, ref, [normal(T, 2 * N, dtype=dtype), uniform(1, lo=1.0, hi=1.5)]


@third(
    "rotary by positions",
    "rows of a cache of cosines by prefetched positions, heads in a block",
    dict(T=9, H=3, D=16, S=20),
    dict(T=512, H=8, D=64, S=2048),
    dict(T=16384, H=40, D=128, S=32768),
)
def _(T, H, D, S, dtype):
    half = D // 2

    def kernel(pos_ref, x_ref, cs_ref, o_ref):
        cs = cs_ref[0].astype(F32)
        c, s = cs[:half], cs[half:]
        x = x_ref[0].astype(F32)
        a, b = x[:, :half], x[:, half:]
        out = jnp.concatenate([a * c - b * s, b * c + a * s], axis=1)
        o_ref[0] = out.astype(o_ref.dtype)

    def fn(x, table, pos):
        block = pl.BlockSpec((1, H, D), lambda t, pos: (t, 0, 0))
        return pl.pallas_call(
            kernel,
            Shape((T, H, D), x.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(T,),
                in_specs=[block, pl.BlockSpec((1, D), lambda t, pos: (pos[t], 0))],
                out_specs=block,
            ),
        )(pos, x, table)

    def ref(x, table, pos):
        cs = table[pos].astype(F32)[:, None]
        c, s = cs[..., :half], cs[..., half:]
        a, b = x[..., :half].astype(F32), x[..., half:].astype(F32)
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1).astype(x.dtype)

    return (
        fn,
        ref,
        [normal(T, H, D, dtype=dtype), normal(S, D), integers(T, hi=S)],
    )


@third(
    "selective state update",
    "Mamba's decode step, states of slots in place",
    dict(B=3, H=2, P=8, N=16),
    dict(B=8, H=16, P=64, N=64),
    dict(B=128, H=64, P=64, N=128),
    grad=False,
)
def _(B, H, P, N, dtype):
    def kernel(
        slot_ref, s_ref, x_ref, dt_ref, a_ref, b_ref, c_ref, d_ref, so_ref, o_ref
    ):
        h = pl.program_id(1)
        x = x_ref[0, 0].astype(F32)
        dt = jax.nn.softplus(dt_ref[0, 0].astype(F32))
        decay = jnp.exp(dt * a_ref[h])
        b, c = b_ref[0].astype(F32), c_ref[0].astype(F32)
        s = s_ref[0, 0] * decay + (dt * x)[:, None] * b[None, :]
        so_ref[0, 0] = s
        y = (s * c[None, :]).sum(axis=1) + x * d_ref[h]
        o_ref[0, 0] = y.astype(o_ref.dtype)

    def fn(state, x, dt, a, b, c, d, slots):
        row = pl.BlockSpec((1, 1, P), lambda b, h, s: (b, h, 0))
        vec = pl.BlockSpec((1, N), lambda b, h, s: (b, 0))
        whole = pl.BlockSpec((H,), lambda b, h, s: (0,))
        states = pl.BlockSpec((1, 1, P, N), lambda b, h, s: (s[b], h, 0, 0))
        one = pl.BlockSpec((1, 1, 1), lambda b, h, s: (b, h, 0))
        return pl.pallas_call(
            kernel,
            [Shape(state.shape, F32), Shape((B, H, P), dtype)],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(B, H),
                in_specs=[states, row, one, whole, vec, vec, whole],
                out_specs=[states, row],
            ),
            input_output_aliases={1: 0},
        )(slots, state, x, dt, a, b, c, d)

    def ref(state, x, dt, a, b, c, d, slots):
        x32 = x.astype(F32)
        dt = jax.nn.softplus(dt.astype(F32))
        s = state[slots] * jnp.exp(dt * a[:, None])[..., None]
        s += (dt * x32)[..., None] * b.astype(F32)[:, None, None]
        y = (s * c.astype(F32)[:, None, None]).sum(-1) + x32 * d[:, None]
        return state.at[slots].set(s), y.astype(dtype)

    return (
        fn,
        ref,
        [
            normal(2 * B, H, P, N),
            normal(B, H, P, dtype=dtype),
            normal(B, H, 1, dtype=dtype),
            uniform(H, lo=-1.0, hi=-0.1),
            normal(B, N, dtype=dtype),
            normal(B, N, dtype=dtype),
            normal(H),
            made((B,), I32, lambda r: r.permutation(2 * B)[:B]),
        ],
    )
