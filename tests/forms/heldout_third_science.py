"""Kernels held out, of a third author: stencils, particles, sparse and small dense
algebra, dynamic programs, images, as scientific codes write them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Family, Shape
from tests.forms.sized import integers, made, normal, sized, uniform

family = Family("held-out third science")
third = sized(family)
LOW = -1e30


@third(
    "stencil nine points",
    "a padded array in whole, blocks with a halo by pl.ds in both directions",
    dict(H=24, W=32, bh=8, bw=16),
    dict(H=1024, W=1024, bh=64, bw=128),
    dict(H=8192, W=8192, bh=64, bw=128),
)
def _(H, W, bh, bw, dtype):
    def kernel(x_ref, o_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        x = x_ref[pl.ds(i * bh, bh + 2), pl.ds(j * bw, bw + 2)]
        acc = jnp.zeros((bh, bw), F32)
        for di in range(3):
            for dj in range(3):
                weight = (4 - 2 * abs(di - 1)) * (2 - abs(dj - 1)) / 32
                acc += weight * x[di : di + bh, dj : dj + bw]
        o_ref[...] = acc

    def fn(x):
        return pl.pallas_call(
            kernel,
            Shape((H, W), F32),
            grid=(H // bh, W // bw),
            out_specs=pl.BlockSpec((bh, bw), lambda i, j: (i, j)),
        )(x)

    def ref(x):
        out = 0.0
        for di in range(3):
            for dj in range(3):
                weight = (4 - 2 * abs(di - 1)) * (2 - abs(dj - 1)) / 32
                out += weight * x[di : di + H, dj : dj + W]
        return out

    return fn, ref, [normal(H + 2, W + 2)]


@third(
    "heat in 3d",
    "planes before and behind by three clamped index maps of one array",
    dict(X=6, Y=8, Z=16),
    dict(X=64, Y=64, Z=128),
    dict(X=512, Y=512, Z=512),
)
def _(X, Y, Z, dtype):
    def kernel(a_ref, b_ref, c_ref, o_ref):
        c = b_ref[0]
        up = jnp.concatenate([c[:1], c[:-1]], axis=0)
        down = jnp.concatenate([c[1:], c[-1:]], axis=0)
        left = jnp.concatenate([c[:, :1], c[:, :-1]], axis=1)
        right = jnp.concatenate([c[:, 1:], c[:, -1:]], axis=1)
        around = a_ref[0] + c_ref[0] + up + down + left + right
        o_ref[0] = c + 0.1 * (around - 6.0 * c)

    def fn(x):
        plane = lambda f: pl.BlockSpec((1, Y, Z), lambda i: (f(i), 0, 0))
        return pl.pallas_call(
            kernel,
            Shape((X, Y, Z), F32),
            grid=(X,),
            in_specs=[
                plane(lambda i: jnp.maximum(i - 1, 0)),
                plane(lambda i: i),
                plane(lambda i: jnp.minimum(i + 1, X - 1)),
            ],
            out_specs=plane(lambda i: i),
        )(x, x, x)

    def ref(x):
        p = jnp.pad(x, 1, mode="edge")
        mid = slice(1, -1)
        around = p[:-2, mid, mid] + p[2:, mid, mid] + p[mid, :-2, mid]
        around += p[mid, 2:, mid] + p[mid, mid, :-2] + p[mid, mid, 2:]
        return x + 0.1 * (around - 6 * x)

    return fn, ref, [normal(X, Y, Z)]


@third(
    "thomas",
    "tridiagonal systems side by side, a loop down and a loop up through scratch",
    dict(N=12, S=32, bs=16),
    dict(N=256, S=4096, bs=512),
    dict(N=512, S=131072, bs=256),
)
def _(N, S, bs, dtype):
    def kernel(a_ref, b_ref, c_ref, d_ref, x_ref, cp_ref, dp_ref):
        cp_ref[0] = c_ref[0] / b_ref[0]
        dp_ref[0] = d_ref[0] / b_ref[0]

        def down(i, _):
            m = 1.0 / (b_ref[i] - a_ref[i] * cp_ref[i - 1])
            cp_ref[i] = c_ref[i] * m
            dp_ref[i] = (d_ref[i] - a_ref[i] * dp_ref[i - 1]) * m
            return 0

        lax.fori_loop(1, N, down, 0)
        x_ref[N - 1] = dp_ref[N - 1]

        def up(k, _):
            i = N - 2 - k
            x_ref[i] = dp_ref[i] - cp_ref[i] * x_ref[i + 1]
            return 0

        lax.fori_loop(0, N - 1, up, 0)

    def fn(a, b, c, d):
        block = pl.BlockSpec((N, bs), lambda i: (0, i))
        return pl.pallas_call(
            kernel,
            Shape((N, S), F32),
            grid=(S // bs,),
            in_specs=[block] * 4,
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((N, bs), F32), pltpu.VMEM((N, bs), F32)],
        )(a, b, c, d)

    def ref(a, b, c, d):
        def down(carry, x):
            a, b, c, d = x
            m = 1.0 / (b - a * carry[0])
            new = (c * m, (d - a * carry[1]) * m)
            return new, new

        zero = jnp.zeros((S,), F32)
        cp, dp = lax.scan(down, (zero, zero), (a, b, c, d))[1]
        up = lambda x, p: (p[1] - p[0] * x,) * 2
        return lax.scan(up, zero, (cp, dp), reverse=True)[1]

    return (
        fn,
        ref,
        [normal(N, S), uniform(N, S, lo=4, hi=6), normal(N, S), normal(N, S)],
    )


@third(
    "n body",
    "forces on a block of bodies, a loop over blocks of the others, a column each",
    dict(N=64, bi=16, bj=32),
    dict(N=2048, bi=64, bj=128),
    dict(N=65536, bi=128, bj=128),
)
def _(N, bi, bj, dtype):
    def kernel(x_ref, y_ref, z_ref, m_ref, ax_ref, ay_ref, az_ref):
        here = pl.ds(pl.program_id(0) * bi, bi)
        x, y, z = x_ref[here], y_ref[here], z_ref[here]

        def others(j, acc):
            there = pl.ds(j * bj, bj)
            dx = x_ref[there][None, :] - x[:, None]
            dy = y_ref[there][None, :] - y[:, None]
            dz = z_ref[there][None, :] - z[:, None]
            inv = lax.rsqrt(dx * dx + dy * dy + dz * dz + 0.01)
            w = m_ref[there][None, :] * inv * inv * inv
            parts = ((w * d).sum(axis=1) for d in (dx, dy, dz))
            return tuple(a + p for a, p in zip(acc, parts, strict=True))

        zero = jnp.zeros((bi,), F32)
        acc = lax.fori_loop(0, N // bj, others, (zero, zero, zero))
        ax_ref[here], ay_ref[here], az_ref[here] = acc

    def fn(x, y, z, m):
        out = Shape((N,), F32)
        return pl.pallas_call(kernel, (out, out, out), grid=(N // bi,))(x, y, z, m)

    def ref(x, y, z, m):
        def row(p):
            dx, dy, dz = x - p[0], y - p[1], z - p[2]
            inv = lax.rsqrt(dx * dx + dy * dy + dz * dz + 0.01)
            w = m * inv**3
            return (w * dx).sum(), (w * dy).sum(), (w * dz).sum()

        return lax.map(row, (x, y, z), batch_size=min(N, 256))

    return fn, ref, [*[normal(N) for _ in range(3)], uniform(N, lo=0.1)]


@third(
    "hadamard",
    "butterflies of a row by reshapes in an unrolled loop",
    dict(M=8, N=32, bm=4),
    dict(M=512, N=512, bm=8),
    dict(M=32768, N=4096, bm=4),
)
def _(M, N, bm, dtype):
    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(F32)
        h = 1
        while h < N:
            y = x.reshape(bm, N // (2 * h), 2, h)
            a, b = y[:, :, 0, :], y[:, :, 1, :]
            x = jnp.stack([a + b, a - b], axis=2).reshape(bm, N)
            h *= 2
        o_ref[...] = (x * N**-0.5).astype(o_ref.dtype)

    def fn(x):
        block = pl.BlockSpec((bm, N), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            Shape((M, N), x.dtype),
            grid=(M // bm,),
            in_specs=[block],
            out_specs=block,
        )(x)

    def ref(x):
        y, h = x.astype(F32), 1
        while h < N:
            y = y.reshape(M, N // (2 * h), 2, h)
            y = jnp.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], 2)
            h *= 2
        return (y.reshape(M, N) * N**-0.5).astype(x.dtype)

    return fn, ref, [normal(M, N, dtype=dtype)]


@third(
    "csr vector",
    "a block of entries of a row at a time between two offsets, gathered, summed",
    dict(R=10, C=40, most=12, W=8),
    dict(R=2048, C=2048, most=96, W=32),
    dict(R=262144, C=262144, most=96, W=32),
)
def _(R, C, most, W, dtype):
    nnz = R * most // 2

    def kernel(ptr_ref, col_ref, val_ref, x_ref, y_ref):
        r = pl.program_id(0)
        lo, hi = ptr_ref[r], ptr_ref[r + 1]

        def body(c):
            at, acc = c
            offs = at + jnp.arange(W)
            mask = offs < hi
            cols = pl.load(col_ref, offs, mask=mask, other=0)
            vals = pl.load(val_ref, offs, mask=mask, other=0.0)
            return at + W, acc + jnp.where(mask, vals * x_ref[cols], 0.0)

        start = (lo, jnp.zeros((W,), F32))
        y_ref[r] = jnp.sum(lax.while_loop(lambda c: c[0] < hi, body, start)[1])

    def fn(val, x, ptr, col):
        return pl.pallas_call(kernel, Shape((R,), F32), grid=(R,))(ptr, col, val, x)

    def ref(val, x, ptr, col):
        rows = jnp.searchsorted(ptr, jnp.arange(nnz), side="right") - 1
        return jax.ops.segment_sum(
            val * x[col], rows, num_segments=R, indices_are_sorted=True
        )

    def offsets(r):
        lengths = r.multinomial(nnz, np.full(R, 1 / R))
        return np.r_[0, np.cumsum(lengths)]

    return (
        fn,
        ref,
        [
            normal(nnz),
            normal(C),
            made((R + 1,), I32, offsets),
            integers(nnz, hi=C),
        ],
    )


VELOCITIES = [
    (0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)
]  # fmt: skip
WEIGHTS = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4


@third(
    "lattice boltzmann",
    "D2Q9: rows above and below by modular index maps, rolls along a row, collision",
    dict(H=8, W=16),
    dict(H=512, W=512),
    dict(H=4096, W=4096),
)
def _(H, W, dtype):
    def collide(f):
        rho = sum(f)
        ux = sum(cx * a for (cx, _), a in zip(VELOCITIES, f, strict=True)) / rho
        uy = sum(cy * a for (_, cy), a in zip(VELOCITIES, f, strict=True)) / rho
        square = 1.5 * (ux * ux + uy * uy)
        out = []
        for (cx, cy), w, a in zip(VELOCITIES, WEIGHTS, f, strict=True):
            cu = 3.0 * (cx * ux + cy * uy)
            equilibrium = w * rho * (1.0 + cu + 0.5 * cu * cu - square)
            out.append(a - 0.6 * (a - equilibrium))
        return out

    def kernel(up_ref, mid_ref, down_ref, o_ref):
        f = []
        for n, (cx, cy) in enumerate(VELOCITIES):
            row = {1: up_ref, 0: mid_ref, -1: down_ref}[cy][n, 0]
            f.append(jnp.roll(row, cx))
        for n, a in enumerate(collide(f)):
            o_ref[n, 0] = a

    def fn(x):
        rows = lambda d: pl.BlockSpec((9, 1, W), lambda i: (0, (i + d) % H, 0))
        return pl.pallas_call(
            kernel,
            Shape((9, H, W), F32),
            grid=(H,),
            in_specs=[rows(H - 1), rows(0), rows(1)],
            out_specs=rows(0),
        )(x, x, x)

    def ref(x):
        moved = [
            jnp.roll(x[n], (cy, cx), (0, 1)) for n, (cx, cy) in enumerate(VELOCITIES)
        ]
        return jnp.stack(collide(moved))

    return fn, ref, [uniform(9, H, W, lo=0.5)]


@third(
    "small cholesky",
    "matrices side by side in lanes, columns in python loops",
    dict(B=64, n=4, bb=16),
    dict(B=8192, n=6, bb=128),
    dict(B=1048576, n=8, bb=256),
)
def _(B, n, bb, dtype):
    def kernel(a_ref, l_ref):
        L = [[None] * n for _ in range(n)]
        for j in range(n):
            s = a_ref[j, j, :]
            for k in range(j):
                s = s - L[j][k] * L[j][k]
            L[j][j] = jnp.sqrt(s)
            for i in range(j + 1, n):
                s = a_ref[i, j, :]
                for k in range(j):
                    s = s - L[i][k] * L[j][k]
                L[i][j] = s / L[j][j]
        zero = jnp.zeros((bb,), F32)
        for i in range(n):
            for j in range(n):
                l_ref[i, j, :] = L[i][j] if j <= i else zero

    def fn(a):
        block = pl.BlockSpec((n, n, bb), lambda b: (0, 0, b))
        return pl.pallas_call(
            kernel,
            Shape((n, n, B), F32),
            grid=(B // bb,),
            in_specs=[block],
            out_specs=block,
        )(a)

    def ref(a):
        # Only the lower triangle is read, as the kernel does.
        L = jnp.zeros((n, n, B), F32)
        for j in range(n):
            s = a[j:, j] - (L[j:, :j] * L[j, :j][None]).sum(1)
            d = jnp.sqrt(s[0])
            L = L.at[j:, j].set(jnp.concatenate([d[None], s[1:] / d]))
        return L

    def matrices(r):
        m = r.normal(size=(B, n, n)).astype(np.float32)
        m = m @ m.swapaxes(1, 2) + n * np.eye(n, dtype=np.float32)
        return m.transpose(1, 2, 0)

    return fn, ref, [made((n, n, B), F32, matrices)]


@third(
    "histogram of bytes",
    "one-hot counts of a block, added to one result",
    dict(N=1024, bn=128),
    dict(N=1 << 20, bn=1024),
    dict(N=1 << 28, bn=1024),
    grad=False,
)
def _(N, bn, dtype):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        bins = lax.broadcasted_iota(I32, (bn, 256), 1)
        hits = x_ref[...].astype(I32)[:, None] == bins
        o_ref[...] += jnp.sum(hits.astype(I32), axis=0)

    def fn(x):
        return pl.pallas_call(
            kernel,
            Shape((256,), I32),
            grid=(N // bn,),
            in_specs=[pl.BlockSpec((bn,), lambda i: (i,))],
            out_specs=pl.BlockSpec((256,), lambda i: (0,)),
        )(x)

    ref = lambda x: jnp.bincount(x.astype(I32), length=256).astype(I32)
    return fn, ref, [integers(N, hi=256, dtype=jnp.uint8)]


@third(
    "summed area",
    "prefix sums along rows in a block, and along columns by a carried row",
    dict(H=32, W=64, bh=8),
    dict(H=1024, W=1024, bh=32),
    dict(H=4096, W=4096, bh=32),
)
def _(H, W, bh, dtype):
    def kernel(x_ref, o_ref, carry_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            carry_ref[...] = jnp.zeros_like(carry_ref)

        s = jnp.cumsum(jnp.cumsum(x_ref[...], axis=1), axis=0) + carry_ref[...]
        o_ref[...] = s
        carry_ref[...] = s[bh - 1 :, :]

    def fn(x):
        block = pl.BlockSpec((bh, W), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            Shape((H, W), F32),
            grid=(H // bh,),
            in_specs=[block],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((1, W), F32)],
        )(x)

    ref = lambda x: jnp.cumsum(jnp.cumsum(x, 0), 1)
    return fn, ref, [uniform(H, W, lo=-1)]


@third(
    "k means",
    "nearest of many centres, the least distance and its index in scratch",
    dict(N=32, K=24, D=16, bn=8, bk=8),
    dict(N=8192, K=512, D=64, bn=128, bk=128),
    dict(N=262144, K=4096, D=128, bn=128, bk=128),
    grad=False,
)
def _(N, K, D, bn, bk, dtype):
    def kernel(x_ref, c_ref, o_ref, d_ref, best_ref, at_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            best_ref[...] = jnp.full_like(best_ref, jnp.inf)
            at_ref[...] = jnp.zeros_like(at_ref)

        c = c_ref[...]
        dots = lax.dot_general(
            x_ref[...], c, (((1,), (1,)), ((), ())), preferred_element_type=F32
        )
        squares = jnp.sum(c.astype(F32) ** 2, axis=1)
        distance = squares[None, :] - 2.0 * dots
        least = jnp.min(distance, axis=1, keepdims=True)
        at = jnp.argmin(distance, axis=1).astype(I32)[:, None] + j * bk
        better = least < best_ref[...]
        best_ref[...] = jnp.where(better, least, best_ref[...])
        at_ref[...] = jnp.where(better, at, at_ref[...])

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = at_ref[...]
            d_ref[...] = best_ref[...]

    def fn(x, c):
        out = pl.BlockSpec((bn, 1), lambda i, j: (i, 0))
        return pl.pallas_call(
            kernel,
            (Shape((N, 1), I32), Shape((N, 1), F32)),
            grid=(N // bn, K // bk),
            in_specs=[
                pl.BlockSpec((bn, D), lambda i, j: (i, 0)),
                pl.BlockSpec((bk, D), lambda i, j: (j, 0)),
            ],
            out_specs=(out, out),
            scratch_shapes=[pltpu.VMEM((bn, 1), F32), pltpu.VMEM((bn, 1), I32)],
        )(x, c)

    def ref(x, c):
        dots = jnp.dot(x, c.T, preferred_element_type=F32)
        d = (c.astype(F32) ** 2).sum(1) - 2 * dots
        return d.argmin(1).astype(I32)[:, None], d.min(1, keepdims=True)

    return fn, ref, [normal(N, D, dtype=dtype), normal(K, D, dtype=dtype)]


@third(
    "interpolation",
    "a table by index arrays, positions by floor, both ends clamped",
    dict(N=512, K=33, bn=128),
    dict(N=1 << 20, K=1025, bn=4096),
    dict(N=1 << 26, K=4097, bn=1024),
)
def _(N, K, bn, dtype):
    def kernel(x_ref, t_ref, o_ref):
        x = jnp.clip(x_ref[...], 0.0, 1.0) * (K - 1)
        at = jnp.minimum(jnp.floor(x).astype(I32), K - 2)
        w = x - at.astype(F32)
        o_ref[...] = (1 - w) * t_ref[at] + w * t_ref[at + 1]

    def fn(x, t):
        block = pl.BlockSpec((bn,), lambda i: (i,))
        return pl.pallas_call(
            kernel,
            Shape((N,), F32),
            grid=(N // bn,),
            in_specs=[block, pl.BlockSpec((K,), lambda i: (0,))],
            out_specs=block,
        )(x, t)

    def ref(x, t):
        x = jnp.clip(x, 0.0, 1.0) * (K - 1)
        at = jnp.minimum(jnp.floor(x).astype(I32), K - 2)
        w = x - at
        return (1 - w) * t[at] + w * t[at + 1]

    return fn, ref, [uniform(N, lo=0.001, hi=0.999), normal(K)]


@third(
    "option paths",
    "a loop over days, normals from a hash, the mean of payoffs by blocks",
    dict(N=256, T=3, bn=64),
    dict(N=1 << 16, T=32, bn=1024),
    dict(N=1 << 23, T=64, bn=1024),
)
def _(N, T, bn, dtype):
    def hashed(x):
        x = x * jnp.uint32(0x9E3779B1)
        x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA77)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE3D)
        x = x ^ (x >> 16)
        return ((x >> 8).astype(F32) + 0.5) * (1.0 / (1 << 24))

    def payoff(ids, s0, sigma):
        drift = (0.02 - 0.5 * sigma * sigma) / T

        def day(t, s):
            seed = ids * jnp.uint32(2 * T) + jnp.uint32(2) * t.astype(jnp.uint32)
            u, v = hashed(seed), hashed(seed + jnp.uint32(1))
            z = jnp.sqrt(-2.0 * jnp.log(u)) * jnp.cos(6.2831853 * v)
            return s * jnp.exp(drift + sigma * T**-0.5 * z)

        s = lax.fori_loop(0, T, day, s0)
        return jnp.maximum(s - 1.0, 0.0)

    def kernel(s0_ref, sigma_ref, o_ref):
        pid = pl.program_id(0)
        ids = (pid * bn + jnp.arange(bn)).astype(jnp.uint32)
        s0 = s0_ref[pl.ds(pid * bn, bn)]
        o_ref[pid] = jnp.sum(payoff(ids, s0, sigma_ref[0])) / N

    def fn(s0, sigma):
        call = pl.pallas_call(kernel, Shape((N // bn,), F32), grid=(N // bn,))
        return call(s0, sigma).sum()

    def ref(s0, sigma):
        return payoff(jnp.arange(N).astype(jnp.uint32), s0, sigma[0]).sum() / N

    return fn, ref, [uniform(N, lo=0.9, hi=1.1), uniform(1, lo=0.2, hi=0.3)]


@third(
    "manhattan distances",
    "pairs of rows, a loop over features, no product",
    dict(M=16, N=16, D=8, b=8),
    dict(M=512, N=512, D=64, b=64),
    dict(M=8192, N=8192, D=128, b=64),
)
def _(M, N, D, b, dtype):
    def kernel(x_ref, y_ref, o_ref):
        def feature(d, acc):
            return acc + jnp.abs(x_ref[:, d][:, None] - y_ref[:, d][None, :])

        o_ref[...] = lax.fori_loop(0, D, feature, jnp.zeros((b, b), F32))

    def fn(x, y):
        return pl.pallas_call(
            kernel,
            Shape((M, N), F32),
            grid=(M // b, N // b),
            in_specs=[
                pl.BlockSpec((b, D), lambda i, j: (i, 0)),
                pl.BlockSpec((b, D), lambda i, j: (j, 0)),
            ],
            out_specs=pl.BlockSpec((b, b), lambda i, j: (i, j)),
        )(x, y)

    def ref(x, y):
        row = lambda r: jnp.abs(r[None] - y).sum(1)
        return lax.map(row, x, batch_size=min(M, 32))

    return fn, ref, [normal(M, D), normal(N, D)]


@third(
    "hidden markov",
    "forward probabilities in the log domain, a step at a time, batches on the grid",
    dict(B=4, T=6, S=8),
    dict(B=32, T=64, S=64),
    dict(B=1024, T=512, S=64),
)
def _(B, T, S, dtype):
    def kernel(e_ref, t_ref, o_ref):
        trans = t_ref[...]

        def step(t, alpha):
            m = jnp.max(alpha)
            p = jnp.exp(alpha - m)
            s = jnp.sum(p[:, None] * trans, axis=0)
            return jnp.log(s) + m + e_ref[0, t, :]

        alpha = lax.fori_loop(1, T, step, e_ref[0, 0, :])
        m = jnp.max(alpha)
        o_ref[0, 0] = m + jnp.log(jnp.sum(jnp.exp(alpha - m)))

    def fn(e, trans):
        return pl.pallas_call(
            kernel,
            Shape((B, 1), F32),
            grid=(B,),
            in_specs=[
                pl.BlockSpec((1, T, S), lambda b: (b, 0, 0)),
                pl.BlockSpec((S, S), lambda b: (0, 0)),
            ],
            out_specs=pl.BlockSpec((1, 1), lambda b: (b, 0)),
        )(e, trans)

    def ref(e, trans):
        def step(alpha, x):
            m = alpha.max(1, keepdims=True)
            s = jnp.dot(jnp.exp(alpha - m), trans, precision="highest")
            return jnp.log(s) + m + x, None

        alpha = lax.scan(step, e[:, 0], e[:, 1:].swapaxes(0, 1))[0]
        return jax.nn.logsumexp(alpha, 1, keepdims=True)

    return fn, ref, [normal(B, T, S), uniform(S, S, lo=0.01, hi=0.03)]


@third(
    "dynamic time warping",
    "antidiagonals of a table in a loop, two carried, shifted by concatenation",
    dict(B=8, N=12),
    dict(B=64, N=128),
    dict(B=4096, N=256),
    grad=False,
)
def _(B, N, dtype):
    BIG = 1e9

    def kernel(x_ref, y_ref, o_ref):
        x = x_ref[0]
        i = jnp.arange(N)

        def diagonal(d, carry):
            before, last = carry
            shift = lambda v: jnp.concatenate([jnp.full((1,), BIG), v[:-1]])
            at = d - i
            inside = (at >= 0) & (at < N)
            y = pl.load(y_ref, (0, jnp.clip(at, 0, N - 1)), mask=inside, other=0.0)
            cost = jnp.abs(x - y)
            best = jnp.minimum(jnp.minimum(last, shift(last)), shift(before))
            best = jnp.where((d == 0) & (i == 0), 0.0, best)
            return last, jnp.where(inside, cost + best, BIG)

        start = (jnp.full((N,), BIG), jnp.full((N,), BIG))
        _, last = lax.fori_loop(0, 2 * N - 1, diagonal, start)
        o_ref[0, 0] = jnp.sum(jnp.where(i == N - 1, last, 0.0))

    def fn(x, y):
        row = pl.BlockSpec((1, N), lambda b: (b, 0))
        return pl.pallas_call(
            kernel,
            Shape((B, 1), F32),
            grid=(B,),
            in_specs=[row, row],
            out_specs=pl.BlockSpec((1, 1), lambda b: (b, 0)),
        )(x, y)

    def ref(x, y):
        cost = jnp.abs(x[:, :, None] - y[:, None, :])

        def row(above, c):
            def cell(left, v):
                c, up, diag = v
                new = c + jnp.minimum(jnp.minimum(left, up), diag)
                return new, new

            diag = jnp.concatenate([above[:1] * 0 + BIG, above[:-1]])
            diag = jnp.where(jnp.all(above >= BIG / 2), diag.at[0].set(0.0), diag)
            new = lax.scan(cell, jnp.full((B,), BIG), (c.T, above, diag))[1]
            return new, None

        start = jnp.full((N, B), BIG)
        last = lax.scan(row, start, cost.transpose(1, 0, 2))[0]
        return last[-1][:, None]

    return fn, ref, [normal(B, N), normal(B, N)]


@third(
    "mandelbrot",
    "a while loop until all pixels have escaped, counts per pixel",
    dict(H=16, W=32, b=8, most=20),
    dict(H=512, W=512, b=32, most=64),
    dict(H=4096, W=4096, b=32, most=256),
    grad=False,
)
def _(H, W, b, most, dtype):
    def kernel(cx_ref, cy_ref, o_ref):
        cx, cy = cx_ref[...][None, :], cy_ref[...][:, None]

        def step(c):
            n, x, y, count = c
            inside = x * x + y * y < 4.0
            new = x * x - y * y + cx
            y = jnp.where(inside, 2 * x * y + cy, y)
            x = jnp.where(inside, new, x)
            return n + 1, x, y, count + inside.astype(I32)

        def on(c):
            _, x, y, _ = c
            return (c[0] < most) & jnp.any(x * x + y * y < 4.0)

        zero = jnp.zeros((b, b), F32)
        start = (jnp.int32(0), zero, zero, jnp.zeros((b, b), I32))
        o_ref[...] = lax.while_loop(on, step, start)[3]

    def fn(cx, cy):
        return pl.pallas_call(
            kernel,
            Shape((H, W), I32),
            grid=(H // b, W // b),
            in_specs=[
                pl.BlockSpec((b,), lambda i, j: (j,)),
                pl.BlockSpec((b,), lambda i, j: (i,)),
            ],
            out_specs=pl.BlockSpec((b, b), lambda i, j: (i, j)),
        )(cx, cy)

    def ref(cx, cy):
        cx, cy = cx[None, :], cy[:, None]

        def step(_, s):
            x, y, count = s
            inside = x * x + y * y < 4.0
            new = x * x - y * y + cx
            y = jnp.where(inside, 2 * x * y + cy, y)
            return jnp.where(inside, new, x), y, count + inside

        zero = jnp.zeros((H, W), F32)
        return lax.fori_loop(0, most, step, (zero, zero, jnp.zeros((H, W), I32)))[2]

    points = lambda n, a, b: made((n,), F32, lambda r: np.linspace(a, b, n))
    return fn, ref, [points(W, -2.0, 1.0), points(H, -1.2, 1.2)]
