"""Other kernels held out: recurrences, convolutions, stencils, scans, sorts, counts,
sparse products, by people who never saw the forms beside."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Family, Operand, Problem, Shape, Size

family = Family("held-out others")


def sds(shape: Any, like: Any) -> Any:
    return Shape(tuple(shape), getattr(like, "dtype", like))


def steps(function, state, *along):
    """A recurrence over axis 1 of operands, for references."""
    moved = tuple(jnp.moveaxis(x, 1, 0) for x in along)
    _, out = lax.scan(lambda s, x: function(s, *x), state, moved)
    return jnp.moveaxis(out, 0, 1)


# --- recurrences ---


def _mamba_operands(size: Size) -> list[Operand]:
    b, n, d, s = size(4, 1, 2), size(1024, 64, 16), size(2048, 128, 32), 16
    decay = lambda r: -np.exp(r.normal(size=(d, s)) * 0.3)
    return [
        Operand((b, n, d), F32),
        Operand((b, n, d), F32, make=lambda r: r.random((b, n, d)) * 0.5),
        Operand((d, s), F32, make=decay),
        Operand((b, n, s), F32),
        Operand((b, n, s), F32),
    ]


def _mamba(x, dt, a, bs, cs):
    def step(h, x, dt, b, c):
        h = h * jnp.exp(dt[..., None] * a) + (dt * x)[..., None] * b[:, None]
        return h, (h * c[:, None]).sum(-1)

    return steps(step, jnp.zeros((x.shape[0], *a.shape)), x, dt, bs, cs)


@family.form(
    Problem("held-out selective scan", _mamba_operands, _mamba),
    "selective scan, state in scratch, chunks of time in the grid",
)
def _(size: Size):
    bd, bt = (16, 8) if size.name == "tiny" else (128, 64)

    def kernel(x_ref, dt_ref, a_ref, b_ref, c_ref, y_ref, h_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            h_ref[...] = jnp.zeros_like(h_ref)

        a = a_ref[...]

        def step(t, h):
            dt = dt_ref[0, t, :]
            h = jnp.exp(dt[:, None] * a) * h
            h = h + (dt * x_ref[0, t, :])[:, None] * b_ref[0, t, :][None, :]
            y_ref[0, t, :] = jnp.sum(h * c_ref[0, t, :][None, :], axis=1)
            return h

        h_ref[...] = lax.fori_loop(0, x_ref.shape[1], step, h_ref[...])

    def function(x, dt, a, bs, cs):
        b, n, d = x.shape
        s = a.shape[1]
        wide = pl.BlockSpec((1, bt, bd), lambda b, j, t: (b, t, j))
        state = pl.BlockSpec((1, bt, s), lambda b, j, t: (b, t, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(b, d // bd, n // bt),
            in_specs=[
                wide,
                wide,
                pl.BlockSpec((bd, s), lambda b, j, t: (j, 0)),
                state,
                state,
            ],
            out_specs=wide,
            scratch_shapes=[pltpu.VMEM((bd, s), F32)],
        )(x, dt, a, bs, cs)

    return function


def _rwkv_operands(size: Size) -> list[Operand]:
    b, n, d = size(8, 2, 2), size(1024, 64, 16), size(2048, 128, 32)
    positive = lambda r: r.random(d) + 0.1
    return [
        Operand((d,), F32, make=positive),
        Operand((d,)),
        Operand((b, n, d)),
        Operand((b, n, d)),
    ]


def _rwkv(w, u, k, v):
    def step(state, k, v):
        a, b, m = state
        top = jnp.maximum(m, u + k)
        e1, e2 = jnp.exp(m - top), jnp.exp(u + k - top)
        out = (e1 * a + e2 * v) / (e1 * b + e2)
        top = jnp.maximum(m - w, k)
        e1, e2 = jnp.exp(m - w - top), jnp.exp(k - top)
        return (e1 * a + e2 * v, e1 * b + e2, top), out

    zero = jnp.zeros(k.shape[::2], F32)
    return steps(step, (zero, zero, zero - 1e38), k, v)


@family.form(
    Problem("held-out RWKV", _rwkv_operands, _rwkv),
    "RWKV, a channel block a program, a scan over time with three states",
)
def _(size: Size):
    bd = 16 if size.name == "tiny" else 128

    def kernel(w_ref, u_ref, k_ref, v_ref, o_ref):
        w, u = w_ref[...], u_ref[...]

        def step(t, state):
            aa, bb, pp = state
            k, v = k_ref[t], v_ref[t]
            ww = u + k
            p = jnp.maximum(pp, ww)
            e1, e2 = jnp.exp(pp - p), jnp.exp(ww - p)
            o_ref[t] = (e1 * aa + e2 * v) / (e1 * bb + e2)
            ww = pp - w
            p = jnp.maximum(ww, k)
            e1, e2 = jnp.exp(ww - p), jnp.exp(k - p)
            return e1 * aa + e2 * v, e1 * bb + e2, p

        zero = jnp.zeros(w.shape, F32)
        lax.fori_loop(0, k_ref.shape[0], step, (zero, zero, zero - 1e38))

    def function(w, u, k, v):
        b, n, d = k.shape
        vector = pl.BlockSpec((bd,), lambda b, j: (j,))
        block = pl.BlockSpec((None, n, bd), lambda b, j: (b, 0, j))
        return pl.pallas_call(
            kernel,
            out_shape=sds(k.shape, k),
            grid=(b, d // bd),
            in_specs=[vector, vector, block, block],
            out_specs=block,
        )(w, u, k, v)

    return function


def _gla_operands(size: Size) -> list[Operand]:
    b, h, n = size(4, 1, 2), size(8, 2, 2), size(2048, 128, 32)
    one = lambda d: Operand((b, h, n, d), size.dtype, spread=0.3)
    decay = lambda r: -0.1 * r.random((b, h, n))
    return [one(128), one(128), one(128), Operand((b, h, n), F32, make=decay)]


def _gla(q, k, v, g):
    along = jnp.cumsum(g, axis=2)
    gap = along[..., :, None] - along[..., None, :]
    n = q.shape[2]
    keep = jnp.tril(jnp.ones((n, n), bool))
    s = jnp.einsum("bhld,bhmd->bhlm", q, k, preferred_element_type=F32)
    s = s * jnp.exp(jnp.where(keep, gap, -1e30))
    return jnp.einsum("bhlm,bhmd->bhld", s.astype(v.dtype), v)


@family.form(
    Problem("held-out gated linear attention", _gla_operands, _gla),
    "gated linear attention, chunks, the state handed on in a scratch",
)
def _(size: Size):
    c = size.block(64)

    def kernel(q_ref, k_ref, v_ref, g_ref, o_ref, state_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            state_ref[...] = jnp.zeros_like(state_ref)

        q, k, v = q_ref[0, 0], k_ref[0, 0], v_ref[0, 0]
        along = jnp.cumsum(g_ref[0, 0])
        total = along[c - 1]
        gap = along[:, None] - along[None, :]
        row = lax.broadcasted_iota(I32, (c, c), 0)
        col = lax.broadcasted_iota(I32, (c, c), 1)
        s = jnp.dot(q, k.T, preferred_element_type=F32)
        s = jnp.where(row >= col, s * jnp.exp(jnp.where(row >= col, gap, 0)), 0)
        o = jnp.dot(s.astype(v.dtype), v, preferred_element_type=F32)
        grown = q.astype(F32) * jnp.exp(along)[:, None]
        o += jnp.dot(grown, state_ref[...], preferred_element_type=F32)
        faded = k.astype(F32) * jnp.exp(total - along)[:, None]
        state_ref[...] = jnp.exp(total) * state_ref[...] + jnp.dot(
            faded.T, v.astype(F32), preferred_element_type=F32
        )
        o_ref[0, 0] = o.astype(o_ref.dtype)

    def function(q, k, v, g):
        b, h, n, d = q.shape
        block = pl.BlockSpec((1, 1, c, d), lambda b, h, t: (b, h, t, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(q.shape, q),
            grid=(b, h, n // c),
            in_specs=[
                block,
                block,
                block,
                pl.BlockSpec((1, 1, c), lambda b, h, t: (b, h, t)),
            ],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((d, d), F32)],
        )(q, k, v, g)

    return function


def _rglru_operands(size: Size) -> list[Operand]:
    shape = (size(8, 1, 2), size(2048, 128, 32), size(2560, 128, 16))
    return [Operand(shape), Operand(shape)]


def _decayed(x, gate):
    a = jnp.exp(-jax.nn.softplus(gate))
    return a, jnp.sqrt(1 - a * a) * x


def _rglru(x, gate):
    a, x = _decayed(x, gate)
    joined = lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1])
    return lax.associative_scan(joined, (a, x), axis=1)[1]


@family.form(
    Problem("held-out RG-LRU", _rglru_operands, _rglru),
    "RG-LRU, doubling over rows of a block, carry handed on",
)
def _(size: Size):
    bt = size.block(128)
    bd = 16 if size.name == "tiny" else 128

    def shifted(x, by, fill):
        pad = jnp.full((by, x.shape[1]), fill, x.dtype)
        return jnp.concatenate([pad, x[:-by]], axis=0)

    def kernel(x_ref, gate_ref, o_ref, carry_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            carry_ref[...] = jnp.zeros_like(carry_ref)

        a, b = _decayed(x_ref[...], gate_ref[...])
        by = 1
        while by < bt:
            a, b = a * shifted(a, by, 1.0), b + a * shifted(b, by, 0.0)
            by *= 2
        h = b + a * carry_ref[...]
        carry_ref[...] = h[bt - 1 :]
        o_ref[...] = h

    def function(x, gate):
        b, n, d = x.shape
        block = pl.BlockSpec((None, bt, bd), lambda b, j, t: (b, t, j))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(b, d // bd, n // bt),
            in_specs=[block, block],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((1, bd), F32)],
        )(x, gate)

    return function


def _gru_operands(size: Size) -> list[Operand]:
    b, n, d = size(128, 16, 8), size(64, 16, 6), size(256, 64, 16)
    return [
        Operand((b, n, 3 * d), size.dtype),
        Operand((d, 3 * d), size.dtype, spread=d**-0.5),
    ]


def _gru_step(h, x, w):
    d = h.shape[1]
    y = jnp.dot(h.astype(w.dtype), w, preferred_element_type=F32)
    x = x.astype(F32)
    r = jax.nn.sigmoid(x[:, :d] + y[:, :d])
    z = jax.nn.sigmoid(x[:, d : 2 * d] + y[:, d : 2 * d])
    new = jnp.tanh(x[:, 2 * d :] + r * y[:, 2 * d :])
    return (1 - z) * new + z * h


def _gru(x, w):
    def step(h, x):
        h = _gru_step(h, x, w)
        return h, h

    return steps(step, jnp.zeros((x.shape[0], w.shape[0])), x)


@family.form(
    Problem("held-out GRU", _gru_operands, _gru),
    "GRU, weights stay, a step of time a grid step",
)
def _(size: Size):
    bb = size.block(16)

    def kernel(x_ref, w_ref, o_ref, h_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            h_ref[...] = jnp.zeros_like(h_ref)

        h = _gru_step(h_ref[...], x_ref[...], w_ref[...])
        h_ref[...] = h
        o_ref[...] = h

    def function(x, w):
        b, n, _ = x.shape
        d = w.shape[0]
        return pl.pallas_call(
            kernel,
            out_shape=sds((b, n, d), F32),
            grid=(b // bb, n),
            in_specs=[
                pl.BlockSpec((bb, None, 3 * d), lambda i, t: (i, t, 0)),
                pl.BlockSpec(w.shape, lambda i, t: (0, 0)),
            ],
            out_specs=pl.BlockSpec((bb, None, d), lambda i, t: (i, t, 0)),
            scratch_shapes=[pltpu.VMEM((bb, d), F32)],
        )(x, w)

    return function


# --- convolutions, pools ---


def _conv1d_operands(size: Size) -> list[Operand]:
    b, n, d = size(8, 1, 2), size(4096, 128, 32), size(2048, 128, 16)
    return [Operand((b, n, d), size.dtype), Operand((4, d), F32), Operand((d,), F32)]


def _conv1d(x, w, b):
    n = x.shape[1]
    pad = jnp.pad(x.astype(F32), ((0, 0), (3, 0), (0, 0)))
    y = sum(pad[:, k : k + n] * w[k] for k in range(4)) + b
    return jax.nn.silu(y).astype(x.dtype)


@family.form(
    Problem("held-out causal convolution", _conv1d_operands, _conv1d),
    "causal convolution, previous block as a second window",
)
def _(size: Size):
    bt, bd = (8, 16) if size.name == "tiny" else (64, 128)

    def kernel(before_ref, x_ref, w_ref, b_ref, o_ref):
        first = pl.program_id(1) == 0
        tail = before_ref[bt - 3 :, :].astype(F32)
        tail = jnp.where(first, 0.0, tail)
        x = jnp.concatenate([tail, x_ref[...].astype(F32)], axis=0)
        y = b_ref[...][None, :]
        for k in range(4):
            y = y + lax.slice_in_dim(x, k, k + bt, axis=0) * w_ref[k, :][None, :]
        o_ref[...] = (y * jax.nn.sigmoid(y)).astype(o_ref.dtype)

    def function(x, w, b):
        batch, n, d = x.shape
        before = lambda b, t, j: (b, jnp.maximum(t - 1, 0), j)
        here = pl.BlockSpec((None, bt, bd), lambda b, t, j: (b, t, j))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(batch, n // bt, d // bd),
            in_specs=[
                pl.BlockSpec((None, bt, bd), before),
                here,
                pl.BlockSpec((4, bd), lambda b, t, j: (0, j)),
                pl.BlockSpec((bd,), lambda b, t, j: (j,)),
            ],
            out_specs=here,
        )(x, x, w, b)

    return function


def _image(size: Size, c: int = 256) -> Operand:
    side = size(56, 16, 8)
    return Operand((size(32, 2, 2), side, side, size(c, 32, 16)), size.dtype)


def _depthwise_operands(size: Size) -> list[Operand]:
    x = _image(size)
    return [x, Operand((3, 3, x.shape[3]), size.dtype)]


def _depthwise(x, w):
    kernel = w.reshape(3, 3, 1, -1)
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=dims,
        feature_group_count=x.shape[3],
    )


@family.form(
    Problem("held-out depthwise convolution", _depthwise_operands, _depthwise),
    "depthwise 3x3, padded outside, nine shifted slices of an image",
)
def _(size: Size):
    bc = min(64, 16 if size.name == "tiny" else 32)

    def kernel(x_ref, w_ref, o_ref):
        h, w, c = o_ref.shape
        acc = jnp.zeros((h, w, c), F32)
        for dy in range(3):
            for dx in range(3):
                tap = x_ref[pl.ds(dy, h), pl.ds(dx, w), :].astype(F32)
                acc += tap * w_ref[dy, dx, :].astype(F32)
        o_ref[...] = acc.astype(o_ref.dtype)

    def function(x, w):
        n, h, wide, c = x.shape
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(n, c // bc),
            in_specs=[
                pl.BlockSpec((None, h + 2, wide + 2, bc), lambda n, j: (n, 0, 0, j)),
                pl.BlockSpec((3, 3, bc), lambda n, j: (0, 0, j)),
            ],
            out_specs=pl.BlockSpec((None, h, wide, bc), lambda n, j: (n, 0, 0, j)),
        )(padded, w)

    return function


def _conv2d_operands(size: Size) -> list[Operand]:
    x = _image(size, 128)
    c = x.shape[3]
    return [x, Operand((3, 3, c, c), size.dtype, spread=(9 * c) ** -0.5)]


def _conv2d(x, w):
    y = lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(y)


@family.form(
    Problem("held-out convolution 3x3", _conv2d_operands, _conv2d),
    "convolution 3x3, three rows by index maps, taps as products",
)
def _(size: Size):
    def kernel(a_ref, b_ref, c_ref, w_ref, o_ref):
        width, out = o_ref.shape
        acc = jnp.zeros((width, out), F32)
        for dy, row in enumerate((a_ref, b_ref, c_ref)):
            for dx in range(3):
                tap = row[dx : dx + width, :]
                acc += jnp.dot(tap, w_ref[dy, dx], preferred_element_type=F32)
        o_ref[...] = jnp.maximum(acc, 0.0).astype(o_ref.dtype)

    def function(x, w):
        n, h, wide, c = x.shape
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        row = lambda dy: pl.BlockSpec(
            (None, None, wide + 2, c), lambda n, y: (n, y + dy, 0, 0)
        )
        return pl.pallas_call(
            kernel,
            out_shape=sds((n, h, wide, w.shape[3]), x),
            grid=(n, h),
            in_specs=[
                row(0),
                row(1),
                row(2),
                pl.BlockSpec(w.shape, lambda n, y: (0, 0, 0, 0)),
            ],
            out_specs=pl.BlockSpec(
                (None, None, wide, w.shape[3]), lambda n, y: (n, y, 0, 0)
            ),
        )(padded, padded, padded, w)

    return function


def _pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@family.form(
    Problem("held-out max pool", lambda size: [_image(size)], _pool),
    "max pool 2x2 by a reshape to pairs",
)
def _(size: Size):
    def kernel(x_ref, o_ref):
        n, h, w, c = x_ref.shape
        x = x_ref[...].reshape(n, h // 2, 2, w // 2, 2, c)
        o_ref[...] = jnp.max(x, axis=(2, 4))

    def function(x):
        n, h, w, c = x.shape
        return pl.pallas_call(
            kernel,
            out_shape=sds((n, h // 2, w // 2, c), x),
            grid=(n, h // 4),
            in_specs=[pl.BlockSpec((1, 4, w, c), lambda n, y: (n, y, 0, 0))],
            out_specs=pl.BlockSpec((1, 2, w // 2, c), lambda n, y: (n, y, 0, 0)),
        )(x)

    return function


def _doubled(x):
    n, h, w, c = x.shape
    return jax.image.resize(x.astype(F32), (n, 2 * h, 2 * w, c), "bilinear").astype(
        x.dtype
    )


@family.form(
    Problem("held-out bilinear doubling", lambda size: [_image(size, 64)], _doubled),
    "bilinear doubling, rows then columns, edges clamped",
)
def _(size: Size):
    def along(x, axis):
        n = x.shape[axis]
        low = jnp.concatenate(
            [
                lax.slice_in_dim(x, 0, 1, axis=axis),
                lax.slice_in_dim(x, 0, n - 1, axis=axis),
            ],
            axis,
        )
        high = jnp.concatenate(
            [
                lax.slice_in_dim(x, 1, n, axis=axis),
                lax.slice_in_dim(x, n - 1, n, axis=axis),
            ],
            axis,
        )
        both = jnp.stack([0.25 * low + 0.75 * x, 0.75 * x + 0.25 * high], axis + 1)
        shape = list(x.shape)
        shape[axis] *= 2
        return both.reshape(shape)

    def kernel(x_ref, o_ref):
        y = along(along(x_ref[0].astype(F32), 0), 1)
        o_ref[0] = y.astype(o_ref.dtype)

    def function(x):
        n, h, w, c = x.shape
        bc = min(c, 16)
        return pl.pallas_call(
            kernel,
            out_shape=sds((n, 2 * h, 2 * w, c), x),
            grid=(n, c // bc),
            in_specs=[pl.BlockSpec((1, h, w, bc), lambda n, j: (n, 0, 0, j))],
            out_specs=pl.BlockSpec((1, 2 * h, 2 * w, bc), lambda n, j: (n, 0, 0, j)),
        )(x)

    return function


# --- stencils ---


def _volume(size: Size) -> list[Operand]:
    n = size(256, 32, 16)
    return [Operand((n, n, n))]


def _seven(x):
    rolled = [jnp.roll(x, by, axis) for axis in range(3) for by in (1, -1)]
    return 0.4 * x + 0.1 * sum(rolled)


SEVEN = Problem("held-out seven points, periodic", _volume, _seven)


@family.form(SEVEN, "seven points, planes above and below by index maps")
def _(size: Size):
    def kernel(below, here, above, o_ref):
        x = here[0]
        acc = below[0] + above[0]
        acc += jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0)
        acc += jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1)
        o_ref[0] = 0.4 * x + 0.1 * acc

    def function(x):
        n = x.shape[0]
        plane = lambda by: pl.BlockSpec((1, n, n), lambda z: ((z + by + n) % n, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(n,),
            in_specs=[plane(-1), plane(0), plane(1)],
            out_specs=plane(0),
        )(x, x, x)

    return function


@family.form(SEVEN, "seven points, whole volume in a ref, planes by program ids")
def _(size: Size):
    by = 8

    def kernel(x_ref, o_ref):
        z, y0 = pl.program_id(0), pl.program_id(1) * by
        nz, ny = pl.num_programs(0), pl.num_programs(1) * by
        rows = pl.ds(y0, by)
        x = x_ref[z, rows]
        up = x_ref[lax.rem(z + 1, nz), rows]
        down = x_ref[lax.rem(z + nz - 1, nz), rows]
        north = jnp.concatenate(
            [
                x_ref[
                    lax.rem(y0 + ny - 1, ny) * 0 + z, pl.ds(lax.rem(y0 + ny - 1, ny), 1)
                ],
                x[:-1],
            ]
        )
        south = jnp.concatenate([x[1:], x_ref[z, pl.ds(lax.rem(y0 + by, ny), 1)]])
        west = jnp.concatenate([x[:, -1:], x[:, :-1]], axis=1)
        east = jnp.concatenate([x[:, 1:], x[:, :1]], axis=1)
        o_ref[0] = 0.4 * x + 0.1 * (up + down + north + south + west + east)

    def function(x):
        n = x.shape[0]
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(n, n // by),
            out_specs=pl.BlockSpec((1, by, n), lambda z, y: (z, y, 0)),
        )(x)

    return function


# --- scans and sorts ---


def _long(size: Size, rows: int = 4096, columns: int = 8192) -> list[Operand]:
    return [Operand((size(rows, 64, 8), size(columns, 512, 64)), F32, spread=0.1)]


@family.form(
    Problem("held-out cumsum", _long, lambda x: jnp.cumsum(x, axis=1)),
    "cumsum of rows, a carry column between blocks",
)
def _(size: Size):
    br, bc = size.block(64), size.block(256)
    bc = 16 if size.name == "tiny" else bc

    def kernel(x_ref, o_ref, carry):
        j = pl.program_id(1)
        start = lax.cond(
            j == 0, lambda: jnp.zeros(carry.shape, F32), lambda: carry[...]
        )
        y = jnp.cumsum(x_ref[...], axis=1) + start
        o_ref[...] = y
        carry[...] = y[:, -1:]

    def function(x):
        n, d = x.shape
        block = pl.BlockSpec((br, bc), lambda i, j: (i, j))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(n // br, d // bc),
            in_specs=[block],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((br, 1), F32)],
        )(x)

    return function


@family.form(
    Problem("held-out cummax down", _long, lambda x: lax.cummax(x, axis=0)),
    "cummax down columns, a loop over rows",
)
def _(size: Size):
    bc = 16 if size.name == "tiny" else 128

    def kernel(x_ref, o_ref):
        def step(t, top):
            top = jnp.maximum(top, x_ref[pl.ds(t, 1), :])
            o_ref[pl.ds(t, 1), :] = top
            return top

        lax.fori_loop(0, x_ref.shape[0], step, jnp.full((1, bc), -jnp.inf))

    def function(x):
        n, d = x.shape
        block = pl.BlockSpec((n, bc), lambda j: (0, j))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(d // bc,),
            in_specs=[block],
            out_specs=block,
        )(x)

    return function


@family.form(
    Problem(
        "held-out sort of rows",
        lambda size: (
            _long(size, 65536, 256)[:1] if size.name == "model" else [Operand((16, 64))]
        ),
        lambda x: jnp.sort(x, axis=1),
    ),
    "bitonic sort of rows by reshapes, network unrolled",
)
def _(size: Size):
    br = 8

    def exchanged(x, length, gap):
        r, n = x.shape
        y = x.reshape(r, n // (2 * gap), 2, gap)
        a, b = y[:, :, 0], y[:, :, 1]
        block = lax.broadcasted_iota(I32, a.shape, 1) * 2 * gap // length
        up = block % 2 == 0
        low, high = jnp.minimum(a, b), jnp.maximum(a, b)
        first, second = jnp.where(up, low, high), jnp.where(up, high, low)
        return jnp.stack([first, second], axis=2).reshape(r, n)

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        n = x.shape[1]
        length = 2
        while length <= n:
            gap = length // 2
            while gap:
                x = exchanged(x, length, gap)
                gap //= 2
            length *= 2
        o_ref[...] = x

    def function(x):
        n, d = x.shape
        block = pl.BlockSpec((br, d), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(n // br,),
            in_specs=[block],
            out_specs=block,
        )(x)

    return function


@family.form(
    Problem(
        "held-out argmax of rows",
        lambda size: _long(size, 4096, 32768),
        lambda x: (x.max(1), jnp.argmax(x, 1).astype(I32)),
    ),
    "greedy sampling: largest and its place over blocks of columns",
)
def _(size: Size):
    br, bc = size.block(32), size.block(512)
    bc = 16 if size.name == "tiny" else bc

    def kernel(x_ref, m_ref, i_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            i_ref[...] = jnp.zeros_like(i_ref)

        x = x_ref[...]
        top = jnp.max(x, axis=1, keepdims=True)
        at = jnp.argmax(x, axis=1).astype(I32)[:, None] + j * bc
        better = top > m_ref[...]
        i_ref[...] = jnp.where(better, at, i_ref[...])
        m_ref[...] = jnp.maximum(m_ref[...], top)

    def function(x):
        n, d = x.shape
        column = pl.BlockSpec((br, 1), lambda i, j: (i, 0))
        m, at = pl.pallas_call(
            kernel,
            out_shape=(sds((n, 1), F32), sds((n, 1), I32)),
            grid=(n // br, d // bc),
            in_specs=[pl.BlockSpec((br, bc), lambda i, j: (i, j))],
            out_specs=(column, column),
        )(x)
        return m[:, 0], at[:, 0]

    return function


# --- counts, gathers, scatters, ragged rows ---


def _pixels(size: Size) -> list[Operand]:
    return [Operand((size(4096, 64, 16), size(4096, 512, 64)), I32, high=256)]


@family.form(
    Problem(
        "held-out histogram",
        _pixels,
        lambda x: jnp.zeros(256, I32).at[x.ravel()].add(1),
    ),
    "histogram of 256 bins, comparisons summed, a loop over rows",
    grad=False,
)
def _(size: Size):
    br = size.block(64)

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        bins = lax.broadcasted_iota(I32, (256, 1), 0)

        def row(r, counts):
            hits = (x_ref[r, :][None, :] == bins).astype(I32)
            return counts + hits.sum(axis=1, keepdims=True)

        o_ref[...] += lax.fori_loop(0, br, row, jnp.zeros((256, 1), I32))

    def function(x):
        n, d = x.shape
        return pl.pallas_call(
            kernel,
            out_shape=sds((256, 1), I32),
            grid=(n // br,),
            in_specs=[pl.BlockSpec((br, d), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((256, 1), lambda i: (0, 0)),
        )(x)[:, 0]

    return function


def _bag_operands(size: Size) -> list[Operand]:
    v, d, b, k = size(100_000, 512, 40), size(128, 128, 32), size(8192, 64, 8), 20
    return [Operand((v, d)), Operand((b, k), I32, high=v), Operand((b, k))]


def _bag(table, index, weight):
    return (table[index] * weight[..., None]).sum(1)


BAG = Problem("held-out embedding bag", _bag_operands, _bag)


@family.form(BAG, "embedding bag, a row a grid step by a prefetched table")
def _(size: Size):
    def kernel(index_ref, w_ref, row_ref, o_ref):
        b, t = pl.program_id(0), pl.program_id(1)
        del index_ref, b

        @pl.when(t == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += row_ref[...] * w_ref[0, 0, t]

    def function(table, index, weight):
        (_, d), (b, k) = table.shape, index.shape
        return pl.pallas_call(
            kernel,
            out_shape=sds((b, 1, d), F32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(b, k),
                in_specs=[
                    pl.BlockSpec((1, 1, k), lambda i, t, index: (i, 0, 0)),
                    pl.BlockSpec((1, 1, d), lambda i, t, index: (index[i, t], 0, 0)),
                ],
                out_specs=pl.BlockSpec((1, 1, d), lambda i, t, index: (i, 0, 0)),
            ),
        )(index, weight[:, None], table[:, None])[:, 0]

    return function


@family.form(BAG, "embedding bag, rows loaded one by one from the whole table")
def _(size: Size):
    per = 8

    def kernel(table_ref, index_ref, w_ref, o_ref):
        k = index_ref.shape[1]
        for r in range(per):

            def add(t, acc):
                return acc + table_ref[index_ref[r, t], :] * w_ref[r, t]

            zero = jnp.zeros(o_ref.shape[1:], F32)
            o_ref[r, :] = lax.fori_loop(0, k, add, zero)

    def function(table, index, weight):
        (v, d), (b, k) = table.shape, index.shape
        some = pl.BlockSpec((per, k), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds((b, d), F32),
            grid=(b // per,),
            in_specs=[pl.BlockSpec((v, d), lambda i: (0, 0)), some, some],
            out_specs=pl.BlockSpec((per, d), lambda i: (i, 0)),
        )(table, index, weight)

    return function


def _ragged_operands(size: Size) -> list[Operand]:
    b, n, d = size(512, 8, 4), size(65536, 512, 64), size(512, 128, 32)

    def offsets(r):
        cuts = np.sort(r.integers(0, n + 1, b - 1))
        return np.concatenate([[0], cuts, [n]])

    return [Operand((n, d)), Operand((b + 1,), I32, make=offsets)]


def _ragged(x, offsets):
    b = offsets.shape[0] - 1
    which = jnp.searchsorted(offsets, jnp.arange(x.shape[0]), side="right") - 1
    count = jnp.maximum(offsets[1:] - offsets[:-1], 1)
    return jax.ops.segment_sum(x, which, b) / count[:, None]


@family.form(
    Problem("held-out mean of ragged rows", _ragged_operands, _ragged),
    "mean of ragged rows, a while loop from offset to offset",
)
def _(size: Size):
    def kernel(offsets_ref, x_ref, o_ref):
        i = pl.program_id(0)
        start, stop = offsets_ref[i], offsets_ref[i + 1]

        def body(state):
            t, acc = state
            return t + 1, acc + x_ref[t, :]

        zero = jnp.zeros(x_ref.shape[1:], F32)
        _, acc = lax.while_loop(lambda s: s[0] < stop, body, (start, zero))
        o_ref[0, :] = acc / jnp.maximum(stop - start, 1).astype(F32)

    def function(x, offsets):
        b, (_, d) = offsets.shape[0] - 1, x.shape
        bd = min(d, 128)
        return pl.pallas_call(
            kernel,
            out_shape=sds((b, d), F32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(b, d // bd),
                in_specs=[pl.BlockSpec((x.shape[0], bd), lambda i, j, _: (0, j))],
                out_specs=pl.BlockSpec((1, bd), lambda i, j, _: (i, j)),
            ),
        )(offsets, x)

    return function


def _csr_operands(size: Size) -> list[Operand]:
    m, n, d, nnz = size(16384, 64, 8), size(16384, 64, 16), 128, size(8, 4, 3)

    def rows(r):
        counts = r.integers(0, 2 * nnz + 1, m)
        counts[-1] += max(0, 2 * nnz - counts[-1])
        return np.concatenate([[0], np.cumsum(counts)]) * (m * nnz) // counts.sum()

    return [
        Operand((m + 1,), I32, make=rows),
        Operand((m * nnz,), I32, high=n),
        Operand((m * nnz,)),
        Operand((n, d)),
    ]


def _csr(rows, columns, values, x):
    m = rows.shape[0] - 1
    which = jnp.searchsorted(rows, jnp.arange(values.shape[0]), side="right") - 1
    return jax.ops.segment_sum(values[:, None] * x[columns], which, m)


@family.form(
    Problem("held-out CSR by dense", _csr_operands, _csr),
    "CSR by dense, a row a program, a loop over its entries",
)
def _(size: Size):
    def kernel(rows_ref, columns_ref, values_ref, x_ref, o_ref):
        i = pl.program_id(0)

        def entry(e, acc):
            return acc + values_ref[e] * x_ref[pl.ds(columns_ref[e], 1), :]

        zero = jnp.zeros((1, x_ref.shape[1]), F32)
        o_ref[...] = lax.fori_loop(rows_ref[i], rows_ref[i + 1], entry, zero)

    def function(rows, columns, values, x):
        m, d = rows.shape[0] - 1, x.shape[1]
        return pl.pallas_call(
            kernel,
            out_shape=sds((m, d), F32),
            grid=(m,),
            out_specs=pl.BlockSpec((1, d), lambda i: (i, 0)),
        )(rows, columns, values, x)

    return function


def _bsr_operands(size: Size) -> list[Operand]:
    m, k, n = size(64, 8, 4), size(64, 8, 4), size(4096, 128, 32)
    b, nnz = size(64, 16, 8), size(8, 2, 2)
    columns = lambda r: np.stack([np.sort(r.permutation(k)[:nnz]) for _ in range(m)])
    return [
        Operand((m, nnz, b, b), size.dtype, spread=0.05),
        Operand((m, nnz), I32, make=columns),
        Operand((k * b, n), size.dtype),
    ]


def _bsr(blocks, columns, x):
    b = blocks.shape[2]
    cut = x.reshape(-1, b, x.shape[1])[columns]
    y = jnp.einsum("mzij,mzjn->min", blocks, cut, preferred_element_type=F32)
    return y.reshape(-1, x.shape[1]).astype(x.dtype)


@family.form(
    Problem("held-out blocked sparse product", _bsr_operands, _bsr),
    "blocked sparse product, columns of blocks prefetched",
)
def _(size: Size):
    bn = size.block(128)

    def kernel(columns, a_ref, x_ref, o_ref, acc):
        z = pl.program_id(2)

        @pl.when(z == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += jnp.dot(a_ref[...], x_ref[...], preferred_element_type=F32)

        @pl.when(z == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc[...].astype(o_ref.dtype)

    def function(blocks, columns, x):
        m, nnz, b, _ = blocks.shape
        n = x.shape[1]
        return pl.pallas_call(
            kernel,
            out_shape=sds((m * b, n), x),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(m, n // bn, nnz),
                in_specs=[
                    pl.BlockSpec((None, None, b, b), lambda i, j, z, c: (i, z, 0, 0)),
                    pl.BlockSpec((b, bn), lambda i, j, z, c: (c[i, z], j)),
                ],
                out_specs=pl.BlockSpec((b, bn), lambda i, j, z, c: (i, j)),
                scratch_shapes=[pltpu.VMEM((b, bn), F32)],
            ),
        )(columns, blocks, x)

    return function


def _combine_operands(size: Size) -> list[Operand]:
    t, k, d = size(8192, 64, 8), size(8, 2, 2), size(2048, 128, 32)
    places = lambda r: r.permutation(t * k).reshape(t, k)
    return [
        Operand((t * k, d), size.dtype),
        Operand((t, k), I32, make=places),
        Operand((t, k), F32),
    ]


def _combined(y, places, weights):
    return (y[places].astype(F32) * weights[..., None]).sum(1).astype(y.dtype)


@family.form(
    Problem("held-out combination of experts", _combine_operands, _combined),
    "rows of experts combined, loops of Python over the choices",
)
def _(size: Size):
    def kernel(places_ref, w_ref, y_ref, o_ref):
        t = pl.program_id(0)
        acc = jnp.zeros(o_ref.shape[1:], F32)
        for k in range(w_ref.shape[1]):
            acc = acc + y_ref[places_ref[t, k], :].astype(F32) * w_ref[t, k]
        o_ref[0, :] = acc.astype(o_ref.dtype)

    def function(y, places, weights):
        t, d = places.shape[0], y.shape[1]
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            kernel,
            out_shape=sds((t, d), y),
            grid=(t,),
            in_specs=[anywhere, anywhere, anywhere],
            out_specs=pl.BlockSpec((1, d), lambda i: (i, 0)),
        )(places, weights, y)

    return function


def _slots_operands(size: Size) -> list[Operand]:
    t, slots, d = size(4096, 32, 8), size(65536, 256, 32), size(1024, 128, 32)
    where = lambda r: r.permutation(slots)[:t]
    return [
        Operand((t, d), size.dtype),
        Operand((t,), I32, make=where),
        Operand((slots, d), size.dtype),
    ]


@family.form(
    Problem(
        "held-out cache update",
        _slots_operands,
        lambda new, where, cache: cache.at[where].set(new),
    ),
    "rows of a cache stored in place through an output's index map",
)
def _(size: Size):
    def kernel(where_ref, new_ref, cache_ref, o_ref):
        o_ref[...] = new_ref[...]

    def function(new, where, cache):
        t, d = new.shape
        slot = pl.BlockSpec((1, d), lambda i, where: (where[i], 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(cache.shape, cache),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(t,),
                in_specs=[pl.BlockSpec((1, d), lambda i, where: (i, 0)), slot],
                out_specs=slot,
            ),
            input_output_aliases={2: 0},
        )(where, new, cache)

    return function


def _edges(size: Size) -> list[Operand]:
    n, k, h = size(32768, 64, 8), 16, 8
    return [
        Operand((n, k, h)),
        Operand((n,), I32, make=lambda r: r.integers(1, k + 1, n)),
    ]


def _edge_softmax(x, counts):
    keep = jnp.arange(x.shape[1])[:, None] < counts[:, None, None]
    e = jnp.where(keep, x, -1e30)
    e = jnp.where(keep, jnp.exp(e - e.max(1, keepdims=True)), 0)
    return e / e.sum(1, keepdims=True)


@family.form(
    Problem("held-out softmax of padded segments", _edges, _edge_softmax),
    "softmax of padded segments, nodes in blocks, middle axis",
)
def _(size: Size):
    bn = size.block(32)

    def kernel(x_ref, counts_ref, o_ref):
        at = lax.broadcasted_iota(I32, x_ref.shape, 1)
        keep = at < counts_ref[...][:, None, None]
        x = jnp.where(keep, x_ref[...], -jnp.inf)
        e = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
        o_ref[...] = e / jnp.sum(e, axis=1, keepdims=True)

    def function(x, counts):
        n, k, h = x.shape
        block = pl.BlockSpec((bn, k, h), lambda i: (i, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(n // bn,),
            in_specs=[block, pl.BlockSpec((bn,), lambda i: (i,))],
            out_specs=block,
        )(x, counts)

    return function


# --- transforms and distances ---


def _hadamard(x):
    n = x.shape[-1]
    y, gap = x.astype(F32), 1
    while gap < n:
        y = y.reshape(x.shape[0], -1, 2, gap)
        y = jnp.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], 2)
        gap *= 2
    return (y.reshape(x.shape) * n**-0.5).astype(x.dtype)


@family.form(
    Problem(
        "held-out Hadamard transform",
        lambda size: [Operand((size(65536, 64, 16), size(512, 128, 32)), size.dtype)],
        _hadamard,
    ),
    "Hadamard transform, butterflies by reshapes, loop of Python",
)
def _(size: Size):
    br = size.block(64)

    def kernel(x_ref, o_ref):
        r, n = x_ref.shape
        y = x_ref[...].astype(F32)
        for k in range(int(np.log2(n))):
            y = y.reshape(r, n >> (k + 1), 2, 1 << k)
            a, b = y[:, :, 0, :], y[:, :, 1, :]
            y = jnp.stack([a + b, a - b], axis=2).reshape(r, n)
        o_ref[...] = (y / np.float32(np.sqrt(n))).astype(o_ref.dtype)

    def function(x):
        n, d = x.shape
        block = pl.BlockSpec((br, d), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(n // br,),
            in_specs=[block],
            out_specs=block,
        )(x)

    return function


def _points(size: Size) -> list[Operand]:
    """Points about centres: which of two is nearer must not depend on rounding."""
    n, m = size(16384, 128, 32), size(1024, 64, 16)
    centres = np.random.default_rng(1).normal(size=(m, 64))

    def near(r):
        return centres[r.integers(0, m, n)] + 0.3 * r.normal(size=(n, 64))

    return [
        Operand((n, 64), F32, make=near),
        Operand((m, 64), F32, make=lambda r: centres),
    ]


def _nearest(x, c):
    gap = (x * x).sum(1)[:, None] - 2 * jnp.dot(x, c.T) + (c * c).sum(1)
    return gap.min(1), jnp.argmin(gap, 1).astype(I32)


@family.form(
    Problem("held-out nearest centre", _points, _nearest),
    "nearest centre, distances and argmin of a block at once",
)
def _(size: Size):
    br = size.block(128)

    def kernel(x_ref, c_ref, d_ref, i_ref):
        x, c = x_ref[...], c_ref[...]
        gap = jnp.sum(x**2, axis=1)[:, None] + jnp.sum(c**2, axis=1)[None, :]
        gap = gap - 2.0 * lax.dot_general(x, c, (((1,), (1,)), ((), ())))
        d_ref[...] = jnp.min(gap, axis=1)
        i_ref[...] = jnp.argmin(gap, axis=1).astype(I32)

    def function(x, c):
        n, d = x.shape
        row = pl.BlockSpec((br,), lambda i: (i,))
        return pl.pallas_call(
            kernel,
            out_shape=(sds((n,), F32), sds((n,), I32)),
            grid=(n // br,),
            in_specs=[
                pl.BlockSpec((br, d), lambda i: (i, 0)),
                pl.BlockSpec(c.shape, lambda i: (0, 0)),
            ],
            out_specs=(row, row),
        )(x, c)

    return function


def _bodies(size: Size) -> list[Operand]:
    n = size(16384, 256, 32)
    return [Operand((n, 3)), Operand((n,), F32, make=lambda r: r.random(n) + 0.1)]


def _forces(p, m):
    gap = p[None] - p[:, None]
    inverse = lax.rsqrt((gap**2).sum(-1) + 0.01)
    return jnp.einsum("ij,ijc->ic", m[None] * inverse**3, gap)


@family.form(
    Problem("held-out forces of bodies", _bodies, _forces),
    "forces of bodies, coordinates as rows, a loop over blocks",
)
def _(size: Size):
    bi, bj = size.block(128), size.block(128)

    def kernel(mine_ref, all_ref, m_ref, o_ref):
        xi = [mine_ref[c, :][:, None] for c in range(3)]

        def block(j, acc):
            at = pl.ds(j * bj, bj)
            gap = [all_ref[c, at][None, :] - xi[c] for c in range(3)]
            square = gap[0] ** 2 + gap[1] ** 2 + gap[2] ** 2 + 0.01
            w = m_ref[at][None, :] * lax.rsqrt(square) / square
            return tuple(
                a + jnp.sum(w * g, axis=1) for a, g in zip(acc, gap, strict=True)
            )

        zero = jnp.zeros((bi,), F32)
        acc = lax.fori_loop(0, all_ref.shape[1] // bj, block, (zero,) * 3)
        for c in range(3):
            o_ref[c, :] = acc[c]

    def function(p, m):
        n = p.shape[0]
        rows = p.T
        mine = pl.BlockSpec((3, bi), lambda i: (0, i))
        return pl.pallas_call(
            kernel,
            out_shape=sds((3, n), F32),
            grid=(n // bi,),
            in_specs=[
                mine,
                pl.BlockSpec((3, n), lambda i: (0, 0)),
                pl.BlockSpec((n,), lambda i: (0,)),
            ],
            out_specs=mine,
        )(rows, rows, m).T

    return function


def _plane(size: Size) -> list[Operand]:
    n = size(2048, 128, 32)
    grid = lambda r: np.linspace(-2, 1, n)
    return [Operand((n,), F32, make=grid), Operand((n,), F32, make=grid)]


def _mandelbrot(x, y):
    cr, ci = jnp.broadcast_to(x, (y.size, x.size)), y[:, None] + 0 * x

    def step(_, s):
        zr, zi, count = s
        inside = zr * zr + zi * zi < 4
        zr, zi = (
            jnp.where(inside, zr * zr - zi * zi + cr, zr),
            jnp.where(inside, 2 * zr * zi + ci, zi),
        )
        return zr, zi, count + inside

    zero = jnp.zeros_like(cr)
    return lax.fori_loop(0, 64, step, (zero, zero, jnp.zeros(cr.shape, I32)))[2]


@family.form(
    Problem("held-out Mandelbrot", _plane, _mandelbrot),
    "Mandelbrot, a while loop until all points left",
    grad=False,
)
def _(size: Size):
    b = size.block(64)

    def kernel(x_ref, y_ref, o_ref):
        cr = jnp.broadcast_to(x_ref[...][None, :], (b, b))
        ci = jnp.broadcast_to(y_ref[...][:, None], (b, b))

        def going(state):
            n, zr, zi, _ = state
            return jnp.logical_and(n < 64, jnp.any(zr * zr + zi * zi < 4))

        def step(state):
            n, zr, zi, count = state
            inside = zr * zr + zi * zi < 4
            new = zr * zr - zi * zi + cr
            zi = jnp.where(inside, 2 * zr * zi + ci, zi)
            zr = jnp.where(inside, new, zr)
            return n + 1, zr, zi, count + inside.astype(I32)

        zero = jnp.zeros((b, b), F32)
        start = (jnp.int32(0), zero, zero, jnp.zeros((b, b), I32))
        o_ref[...] = lax.while_loop(going, step, start)[3]

    def function(x, y):
        return pl.pallas_call(
            kernel,
            out_shape=sds((y.shape[0], x.shape[0]), I32),
            grid=(y.shape[0] // b, x.shape[0] // b),
            in_specs=[
                pl.BlockSpec((b,), lambda i, j: (j,)),
                pl.BlockSpec((b,), lambda i, j: (i,)),
            ],
            out_specs=pl.BlockSpec((b, b), lambda i, j: (i, j)),
        )(x, y)

    return function


@family.form(
    Problem(
        "held-out space to depth",
        lambda size: [_image(size, 64)],
        lambda x: (
            x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1)
            .transpose(0, 1, 3, 2, 4, 5)
            .reshape(x.shape[0], x.shape[1] // 2, x.shape[2] // 2, -1)
        ),
    ),
    "space to depth, pairs of rows transposed in the kernel",
)
def _(size: Size):
    def kernel(x_ref, o_ref):
        h, w, c = x_ref.shape[1:]
        x = x_ref[0].reshape(h // 2, 2, w // 2, 2, c)
        x = jnp.transpose(x, (0, 2, 1, 3, 4))
        o_ref[0] = x.reshape(h // 2, w // 2, 4 * c)

    def function(x):
        n, h, w, c = x.shape
        return pl.pallas_call(
            kernel,
            out_shape=sds((n, h // 2, w // 2, 4 * c), x),
            grid=(n, h // 2),
            in_specs=[pl.BlockSpec((1, 2, w, c), lambda n, y: (n, y, 0, 0))],
            out_specs=pl.BlockSpec((1, 1, w // 2, 4 * c), lambda n, y: (n, y, 0, 0)),
        )(x)

    return function
