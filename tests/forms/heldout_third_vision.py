"""Kernels held out, of a third author: images (pooling, resampling, convolutions,
boxes, windows of a transformer)."""

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from tests.forms.form import F32, I32, Family, Shape
from tests.forms.sized import made, normal, sized

family = Family("held-out third vision")
third = sized(family)


@third(
    "max pool",
    "windows of two by two, as a tile of five dims",
    dict(B=2, H=8, W=8, C=16),
    dict(B=2, H=64, W=64, C=64),
    dict(B=64, H=112, W=112, C=128),
)
def _(B, H, W, C, dtype):
    def kernel(x_ref, o_ref):
        x = x_ref[0].reshape(1, 2, W // 2, 2, C)
        o_ref[0, 0] = x.max(axis=(0, 1, 3))

    def fn(x):
        return pl.pallas_call(
            kernel,
            Shape((B, H // 2, W // 2, C), x.dtype),
            grid=(B, H // 2),
            in_specs=[pl.BlockSpec((1, 2, W, C), lambda b, i: (b, i, 0, 0))],
            out_specs=pl.BlockSpec((1, 1, W // 2, C), lambda b, i: (b, i, 0, 0)),
        )(x)

    def ref(x):
        return x.reshape(B, H // 2, 2, W // 2, 2, C).max((2, 4))

    # No two are equal: the derivative of a maximum of equal numbers is a choice.
    numbers = lambda r: r.permutation(B * H * W * C).reshape(B, H, W, C) / 1024.0
    return fn, ref, [made((B, H, W, C), F32, numbers)]


@third(
    "average pool strided",
    "three by three in steps of two by strided slices of a whole image",
    dict(B=2, H=9, C=16),
    dict(B=2, H=57, C=64),
    dict(B=64, H=113, C=64),
)
def _(B, H, C, dtype):
    n = H // 2

    def kernel(x_ref, o_ref):
        acc = jnp.zeros((n, n, C), F32)
        for i in range(3):
            for j in range(3):
                rows, cols = pl.ds(i, n, stride=2), pl.ds(j, n, stride=2)
                acc += x_ref[0, rows, cols, :].astype(F32)
        o_ref[0] = (acc / 9.0).astype(o_ref.dtype)

    def fn(x):
        return pl.pallas_call(
            kernel,
            Shape((B, n, n, C), x.dtype),
            grid=(B,),
            in_specs=[pl.BlockSpec((1, H, H, C), lambda b: (b, 0, 0, 0))],
            out_specs=pl.BlockSpec((1, n, n, C), lambda b: (b, 0, 0, 0)),
        )(x)

    def ref(x):
        out = 0.0
        for i in range(3):
            for j in range(3):
                cut = x[:, i : i + 2 * n - 1 : 2, j : j + 2 * n - 1 : 2]
                out += cut.astype(F32)
        return (out / 9.0).astype(x.dtype)

    return fn, ref, [normal(B, H, H, C, dtype=dtype)]


@third(
    "bilinear twice",
    "rows above and below by clamped index maps, columns by repeats and shifts",
    dict(B=2, H=6, W=8, C=16),
    dict(B=2, H=64, W=64, C=32),
    dict(B=16, H=128, W=128, C=128),
)
def _(B, H, W, C, dtype):
    def along(x, axis):
        """Twice as many, at a quarter and three quarters between neighbours."""
        n = x.shape[axis]
        cut = lambda a, b: lax.slice_in_dim(x, a, b, axis=axis)
        before = jnp.concatenate([cut(0, 1), cut(0, n - 1)], axis=axis)
        after = jnp.concatenate([cut(1, n), cut(n - 1, n)], axis=axis)
        pair = [0.25 * before + 0.75 * x, 0.75 * x + 0.25 * after]
        out = jnp.stack(pair, axis=axis + 1)
        return out.reshape(*x.shape[:axis], 2 * n, *x.shape[axis + 1 :])

    def kernel(up_ref, x_ref, down_ref, o_ref):
        up, x, down = (r[0, 0].astype(F32) for r in (up_ref, x_ref, down_ref))
        o_ref[0, 0] = along(0.25 * up + 0.75 * x, 0).astype(o_ref.dtype)
        o_ref[0, 1] = along(0.75 * x + 0.25 * down, 0).astype(o_ref.dtype)

    def fn(x):
        row = lambda f: pl.BlockSpec((1, 1, W, C), lambda b, i: (b, f(i), 0, 0))
        return pl.pallas_call(
            kernel,
            Shape((B, 2 * H, 2 * W, C), x.dtype),
            grid=(B, H),
            in_specs=[
                row(lambda i: jnp.maximum(i - 1, 0)),
                row(lambda i: i),
                row(lambda i: jnp.minimum(i + 1, H - 1)),
            ],
            out_specs=pl.BlockSpec((1, 2, 2 * W, C), lambda b, i: (b, i, 0, 0)),
        )(x, x, x)

    ref = lambda x: along(along(x.astype(F32), 1), 2).astype(x.dtype)
    return fn, ref, [normal(B, H, W, C, dtype=dtype)]


@third(
    "box overlaps",
    "who is suppressed by a better box: intersections of blocks of boxes, any by max",
    dict(N=64, b=16),
    dict(N=2048, b=128),
    dict(N=32768, b=128),
    grad=False,
)
def _(N, b, dtype):
    def kernel(x_ref, y_ref, o_ref):
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        @pl.when(j <= i)
        def _():
            x, y = x_ref[...], y_ref[...]
            x1, y1, x2, y2 = (x[n][:, None] for n in range(4))
            u1, v1, u2, v2 = (y[n][None, :] for n in range(4))
            w = jnp.maximum(jnp.minimum(x2, u2) - jnp.maximum(x1, u1), 0.0)
            h = jnp.maximum(jnp.minimum(y2, v2) - jnp.maximum(y1, v1), 0.0)
            both = w * h
            either = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - both
            rows = i * b + lax.broadcasted_iota(I32, (b, b), 0)
            cols = j * b + lax.broadcasted_iota(I32, (b, b), 1)
            hit = (both > 0.5 * either) & (cols < rows)
            o_ref[...] = jnp.maximum(o_ref[...], hit.astype(I32).max(axis=1))

    def fn(boxes):
        return pl.pallas_call(
            kernel,
            Shape((N,), I32),
            grid=(N // b, N // b),
            in_specs=[
                pl.BlockSpec((4, b), lambda i, j: (0, i)),
                pl.BlockSpec((4, b), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((b,), lambda i, j: (i,)),
        )(boxes, boxes)

    def ref(boxes):
        def row(k):
            x1, y1, x2, y2 = boxes[:, k]
            w = jnp.minimum(x2, boxes[2]) - jnp.maximum(x1, boxes[0])
            h = jnp.minimum(y2, boxes[3]) - jnp.maximum(y1, boxes[1])
            both = jnp.maximum(w, 0) * jnp.maximum(h, 0)
            areas = (boxes[2] - boxes[0]) * (boxes[3] - boxes[1])
            hit = both > 0.5 * ((x2 - x1) * (y2 - y1) + areas - both)
            return (hit & (jnp.arange(N) < k)).astype(I32).max()

        return lax.map(row, jnp.arange(N), batch_size=min(N, 256))

    def boxes(r):
        corner = r.uniform(0, 20, (2, N))
        return [*corner, *(corner + r.uniform(1, 4, (2, N)))]

    return fn, ref, [made((4, N), F32, boxes)]


@third(
    "depthwise conv",
    "three by three of a padded image, a row of weights each, channels in blocks",
    dict(B=2, H=8, C=32, bc=16),
    dict(B=2, H=56, C=64, bc=32),
    dict(B=64, H=56, C=256, bc=32),
)
def _(B, H, C, bc, dtype):
    def kernel(x_ref, w_ref, o_ref):
        acc = jnp.zeros((H, H, bc), F32)
        for i in range(3):
            for j in range(3):
                x = x_ref[0, pl.ds(i, H), pl.ds(j, H), :].astype(F32)
                acc += x * w_ref[i, j, :].astype(F32)
        o_ref[0] = acc.astype(o_ref.dtype)

    def fn(x, w):
        return pl.pallas_call(
            kernel,
            Shape((B, H, H, C), x.dtype),
            grid=(B, C // bc),
            in_specs=[
                pl.BlockSpec((1, H + 2, H + 2, bc), lambda b, c: (b, 0, 0, c)),
                pl.BlockSpec((3, 3, bc), lambda b, c: (0, 0, c)),
            ],
            out_specs=pl.BlockSpec((1, H, H, bc), lambda b, c: (b, 0, 0, c)),
        )(x, w)

    def ref(x, w):
        out = 0.0
        for i in range(3):
            for j in range(3):
                cut = x[:, i : i + H, j : j + H].astype(F32)
                out += cut * w[i, j].astype(F32)
        return out.astype(x.dtype)

    return (
        fn,
        ref,
        [normal(B, H + 2, H + 2, C, dtype=dtype), normal(3, 3, C, dtype=dtype)],
    )


@third(
    "im2col conv",
    "shifted rows side by side, then one product, a strip of rows per program",
    dict(B=2, H=8, W=8, C=8, K=16, bh=4),
    dict(B=1, H=32, W=32, C=32, K=64, bh=4),
    dict(B=32, H=56, W=56, C=128, K=128, bh=4),
)
def _(B, H, W, C, K, bh, dtype):
    def kernel(x_ref, w_ref, o_ref):
        i = pl.program_id(1)
        x = x_ref[0, pl.ds(i * bh, bh + 2), :, :]
        columns = [
            x[di : di + bh, dj : dj + W].reshape(bh * W, C)
            for di in range(3)
            for dj in range(3)
        ]
        y = jnp.dot(
            jnp.concatenate(columns, axis=1), w_ref[...], preferred_element_type=F32
        )
        o_ref[0] = jnp.maximum(y, 0).reshape(bh, W, K).astype(o_ref.dtype)

    def fn(x, w):
        return pl.pallas_call(
            kernel,
            Shape((B, H, W, K), x.dtype),
            grid=(B, H // bh),
            in_specs=[
                pl.BlockSpec((1, H + 2, W + 2, C), lambda b, i: (b, 0, 0, 0)),
                pl.BlockSpec((9 * C, K), lambda b, i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((1, bh, W, K), lambda b, i: (b, i, 0, 0)),
        )(x, w)

    def ref(x, w):
        columns = [x[:, i : i + H, j : j + W] for i in range(3) for j in range(3)]
        y = jnp.dot(jnp.concatenate(columns, -1), w, preferred_element_type=F32)
        return jnp.maximum(y, 0).astype(x.dtype)

    return (
        fn,
        ref,
        [
            normal(B, H + 2, W + 2, C, dtype=dtype),
            normal(9 * C, K, dtype=dtype, scale=0.05),
        ],
    )


@third(
    "blur in two passes",
    "five taps along columns, then rows, padded by reflected rolls in the kernel",
    dict(B=3, H=16, W=32),
    dict(B=4, H=256, W=256),
    dict(B=96, H=512, W=512),
)
def _(B, H, W, dtype):
    taps = (0.0625, 0.25, 0.375, 0.25, 0.0625)

    def kernel(x_ref, o_ref):
        x = x_ref[0]
        x = sum(w * jnp.roll(x, n - 2, axis=1) for n, w in enumerate(taps))
        o_ref[0] = sum(w * jnp.roll(x, n - 2, axis=0) for n, w in enumerate(taps))

    def fn(x):
        block = pl.BlockSpec((1, H, W), lambda b: (b, 0, 0))
        return pl.pallas_call(
            kernel,
            Shape((B, H, W), F32),
            grid=(B,),
            in_specs=[block],
            out_specs=block,
        )(x)

    def ref(x):
        x = sum(w * jnp.roll(x, n - 2, 2) for n, w in enumerate(taps))
        return sum(w * jnp.roll(x, n - 2, 1) for n, w in enumerate(taps))

    return fn, ref, [normal(B, H, W)]


@third(
    "window attention",
    "Swin: seven by seven tokens of an image, heads in a python loop, a bias",
    dict(B=1, H=8, w=4, N=2, D=8),
    dict(B=1, H=28, w=7, N=4, D=32),
    dict(B=64, H=56, w=7, N=4, D=32),
)
def _(B, H, w, N, D, dtype):
    t, n = w * w, H // w

    def kernel(q_ref, k_ref, v_ref, b_ref, o_ref):
        for h in range(N):
            part = slice(h * D, (h + 1) * D)
            flat = lambda r: r[0, :, :, part].reshape(t, D)
            q, k, v = flat(q_ref), flat(k_ref), flat(v_ref)
            s = lax.dot_general(
                q, k, (((1,), (1,)), ((), ())), preferred_element_type=F32
            )
            s = s * D**-0.5 + b_ref[h]
            p = jnp.exp(s - s.max(axis=1, keepdims=True))
            p = p / p.sum(axis=1, keepdims=True)
            o = jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32)
            o_ref[0, :, :, part] = o.reshape(w, w, D).astype(o_ref.dtype)

    def fn(q, k, v, b):
        block = pl.BlockSpec((1, w, w, N * D), lambda b, i, j: (b, i, j, 0))
        return pl.pallas_call(
            kernel,
            Shape((B, H, H, N * D), q.dtype),
            grid=(B, n, n),
            in_specs=[block] * 3 + [pl.BlockSpec((N, t, t), lambda b, i, j: (0, 0, 0))],
            out_specs=block,
        )(q, k, v, b)

    def ref(q, k, v, b):
        def windows(x):
            x = x.reshape(B, n, w, n, w, N, D).transpose(0, 1, 3, 5, 2, 4, 6)
            return x.reshape(B, n, n, N, t, D)

        q, k, v = map(windows, (q, k, v))
        s = jnp.einsum("bijhqd,bijhkd->bijhqk", q, k, preferred_element_type=F32)
        p = jax.nn.softmax(s * D**-0.5 + b, -1).astype(v.dtype)
        o = jnp.einsum("bijhqk,bijhkd->bijhqd", p, v, preferred_element_type=F32)
        o = o.reshape(B, n, n, N, w, w, D).transpose(0, 1, 4, 2, 5, 3, 6)
        return o.reshape(B, H, H, N * D).astype(q.dtype)

    return (
        fn,
        ref,
        [*[normal(B, H, H, N * D, dtype=dtype) for _ in range(3)], normal(N, t, t)],
    )


@third(
    "patch embedding",
    "patches of an image as transposed tiles, then a product",
    dict(B=2, H=16, P=4, C=3, D=32),
    dict(B=4, H=64, P=16, C=3, D=256),
    dict(B=64, H=224, P=16, C=3, D=1024),
)
def _(B, H, P, C, D, dtype):
    n = H // P

    def kernel(x_ref, w_ref, o_ref):
        x = x_ref[0].reshape(P, n, P * C)
        x = x.transpose(1, 0, 2).reshape(n, P * P * C)
        y = jnp.dot(x, w_ref[...], preferred_element_type=F32)
        o_ref[0, 0] = y.astype(o_ref.dtype)

    def fn(x, w):
        return pl.pallas_call(
            kernel,
            Shape((B, n, n, D), x.dtype),
            grid=(B, n),
            in_specs=[
                pl.BlockSpec((1, P, H * C), lambda b, i: (b, i, 0)),
                pl.BlockSpec((P * P * C, D), lambda b, i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((1, 1, n, D), lambda b, i: (b, i, 0, 0)),
        )(x, w)

    def ref(x, w):
        x = x.reshape(B, n, P, n, P * C).transpose(0, 1, 3, 2, 4)
        x = x.reshape(B, n, n, -1)
        return jnp.dot(x, w, preferred_element_type=F32).astype(x.dtype)

    return (
        fn,
        ref,
        [
            normal(B, H, H * C, dtype=dtype),
            normal(P * P * C, D, dtype=dtype, scale=0.05),
        ],
    )


@third(
    "global average",
    "rows of an image are an axis to sum over, the mean in the last step by lax.cond",
    dict(B=3, H=8, C=32),
    dict(B=16, H=28, C=256),
    dict(B=256, H=56, C=512),
)
def _(B, H, C, dtype):
    def kernel(x_ref, o_ref):
        i = pl.program_id(1)
        part = x_ref[0, 0].astype(F32).sum(axis=0, keepdims=True)

        def start():
            o_ref[...] = part

        def more():
            o_ref[...] = o_ref[...] + part

        lax.cond(i == 0, start, more)

        @pl.when(i == H - 1)
        def _():
            o_ref[...] *= 1.0 / (H * H)

    def fn(x):
        return pl.pallas_call(
            kernel,
            Shape((B, C), F32),
            grid=(B, H),
            in_specs=[pl.BlockSpec((1, 1, H, C), lambda b, i: (b, i, 0, 0))],
            out_specs=pl.BlockSpec((1, C), lambda b, i: (b, 0)),
        )(x)

    ref = lambda x: x.astype(F32).mean((1, 2))
    return fn, ref, [normal(B, H, H, C, dtype=dtype)]
