"""Rows held out: norms, losses, positions and updates of people who never saw the
forms beside."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import BF16, F32, I32, Family, Operand, Problem, Shape, Size

family = Family("held-out rows")


def sds(shape: Any, like: Any) -> Any:
    return Shape(tuple(shape), getattr(like, "dtype", like))


def matrix(rows: int, columns: int, *more: int, tiny: tuple = (16, 32)):
    """Operands of rows by columns and vectors of columns, as `more` says."""

    def operands(size: Size) -> list[Operand]:
        n, d = size(rows, 256, tiny[0]), size(columns, 512, tiny[1])
        shapes = {2: (n, d), 1: (d,), 0: ()}
        return [Operand(shapes[m], size.dtype) for m in (2, *more)]

    return operands


# --- softmax in other directions ---


def _softmax(axis: int):
    return lambda x: jax.nn.softmax(x.astype(F32), axis=axis).astype(x.dtype)


@family.form(
    Problem("held-out softmax 781", matrix(16384, 781, tiny=(16, 29)), _softmax(-1)),
    "Triton's tutorial: a row a program, masked to a power of two",
)
def _(size: Size):
    def kernel(x_ref, o_ref, *, width):
        row = pl.program_id(0)
        lanes = jnp.arange(pl.next_power_of_2(width))
        at = (row, pl.ds(0, lanes.shape[0]))
        mask = lanes < width
        x = pl.load(x_ref, at, mask=mask, other=-float("inf")).astype(F32)
        e = jnp.exp(x - jnp.max(x, axis=0))
        pl.store(o_ref, at, (e / jnp.sum(e, axis=0)).astype(o_ref.dtype), mask=mask)

    return lambda x: pl.pallas_call(
        functools.partial(kernel, width=x.shape[1]),
        out_shape=sds(x.shape, x),
        grid=(x.shape[0],),
    )(x)


def _bsc(size: Size) -> list[Operand]:
    return [Operand((size(16, 2, 2), size(1024, 128, 24), size(2048, 256, 32)))]


@family.form(
    Problem("held-out softmax over the middle", _bsc, lambda x: jax.nn.softmax(x, 1)),
    "softmax over the middle axis, columns in blocks",
)
def _(size: Size):
    bc = size.block(128)

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        x = x - x.max(axis=0, keepdims=True)
        e = jnp.exp(x)
        o_ref[...] = e * (1.0 / e.sum(axis=0, keepdims=True))

    def function(x):
        b, s, c = x.shape
        spec = pl.BlockSpec((None, s, bc), lambda b, j: (b, 0, j))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(b, c // bc),
            in_specs=[spec],
            out_specs=spec,
        )(x)

    return function


@family.form(
    Problem("held-out softmax over rows", matrix(8192, 4096), _softmax(0)),
    "softmax over axis 0, a kernel of statistics and one of results",
)
def _(size: Size):
    br, bc = size.block(128), size.block(256)
    bc = min(bc, 32) if size.name == "tiny" else bc

    def stats(x_ref, m_ref, l_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, F32)
            l_ref[...] = jnp.zeros(l_ref.shape, F32)

        x = x_ref[...].astype(F32)
        m = jnp.maximum(m_ref[...], x.max(0, keepdims=True))
        grown = jnp.exp(x - m).sum(0, keepdims=True)
        l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - m) + grown
        m_ref[...] = m

    def results(x_ref, m_ref, l_ref, o_ref):
        e = jnp.exp(x_ref[...].astype(F32) - m_ref[0]) / l_ref[0]
        o_ref[...] = e.astype(o_ref.dtype)

    def function(x):
        n, d = x.shape
        block = pl.BlockSpec((br, bc), lambda j, i: (i, j))
        row = pl.BlockSpec((1, bc), lambda j, i: (0, j))
        grid = (d // bc, n // br)
        m, l = pl.pallas_call(
            stats,
            out_shape=(sds((1, d), F32),) * 2,
            grid=grid,
            in_specs=[block],
            out_specs=(row, row),
        )(x)
        return pl.pallas_call(
            results,
            out_shape=sds(x.shape, x),
            grid=grid,
            in_specs=[block, row, row],
            out_specs=block,
        )(x, m, l)

    return function


# --- norms ---


def _layer(x, g, b):
    x32 = x.astype(F32)
    mean = x32.mean(-1, keepdims=True)
    var = jnp.var(x32, -1, keepdims=True)
    y = (x32 - mean) * lax.rsqrt(var + 1e-5) * g.astype(F32) + b.astype(F32)
    return y.astype(x.dtype), mean[:, 0], lax.rsqrt(var + 1e-5)[:, 0]


LAYER = Problem("held-out layer norm, statistics", matrix(8192, 8192, 1, 1), _layer)


@family.form(LAYER, "Triton's tutorial: three loops over columns, one row a program")
def _(size: Size):
    bc = size.block(1024) if size.name == "model" else size.block(128)

    def kernel(x_ref, g_ref, b_ref, y_ref, mean_ref, rstd_ref):
        row = pl.program_id(0)
        n = x_ref.shape[1]

        def total(j, acc):
            return acc + x_ref[row, pl.ds(j * bc, bc)].astype(F32)

        mean = jnp.sum(lax.fori_loop(0, n // bc, total, jnp.zeros(bc, F32))) / n

        def spread(j, acc):
            x = x_ref[row, pl.ds(j * bc, bc)].astype(F32) - mean
            return acc + x * x

        var = jnp.sum(lax.fori_loop(0, n // bc, spread, jnp.zeros(bc, F32))) / n
        rstd = 1 / jnp.sqrt(var + 1e-5)
        mean_ref[row] = mean
        rstd_ref[row] = rstd

        @pl.loop(0, n // bc)
        def _(j):
            at = pl.ds(j * bc, bc)
            x = (x_ref[row, at].astype(F32) - mean) * rstd
            y = x * g_ref[at].astype(F32) + b_ref[at].astype(F32)
            y_ref[row, at] = y.astype(y_ref.dtype)

    def function(x, g, b):
        n = x.shape[0]
        out = (sds(x.shape, x), sds((n,), F32), sds((n,), F32))
        return pl.pallas_call(kernel, out_shape=out, grid=(n,))(x, g, b)

    return function


@family.form(LAYER, "mean and variance in one pass, statistics as columns")
def _(size: Size):
    br = size.block(16)

    def kernel(x_ref, g_ref, b_ref, y_ref, mean_ref, rstd_ref):
        x = x_ref[:].astype(jnp.float32)
        n = x.shape[-1]
        s1 = jnp.sum(x, axis=-1, keepdims=True)
        s2 = jnp.sum(lax.square(x), axis=-1, keepdims=True)
        mean = s1 / n
        rstd = lax.rsqrt(s2 / n - mean * mean + 1e-5)
        mean_ref[:], rstd_ref[:] = mean, rstd
        y = (x - mean) * rstd * g_ref[:].astype(F32) + b_ref[:].astype(F32)
        y_ref[:] = y.astype(y_ref.dtype)

    def function(x, g, b):
        n, d = x.shape
        block = pl.BlockSpec((br, d), lambda i: (i, 0))
        whole = pl.BlockSpec((1, d), lambda i: (0, 0))
        column = pl.BlockSpec((br, 1), lambda i: (i, 0))
        y, mean, rstd = pl.pallas_call(
            kernel,
            out_shape=[sds(x.shape, x), sds((n, 1), F32), sds((n, 1), F32)],
            grid=(n // br,),
            in_specs=[block, whole, whole],
            out_specs=[block, column, column],
        )(x, g.reshape(1, -1), b.reshape(1, -1))
        return y, mean[:, 0], rstd[:, 0]

    return function


def _backward(x, dy, g):
    x, dy, g = x.astype(F32), dy.astype(F32), g.astype(F32)
    mean, var = x.mean(-1, keepdims=True), jnp.var(x, -1, keepdims=True)
    rstd = lax.rsqrt(var + 1e-5)
    hat = (x - mean) * rstd
    wdy = g * dy
    c1 = (wdy * hat).mean(-1, keepdims=True)
    dx = (wdy - hat * c1 - wdy.mean(-1, keepdims=True)) * rstd
    return dx.astype(BF16), (dy * hat).sum(0), dy.sum(0)


@family.form(
    Problem("held-out layer norm backward", matrix(8192, 2048, 2, 1), _backward),
    "layer norm backward by hand, dw and db in partial sums",
    grad=False,
)
def _(size: Size):
    br, parts = size.block(64), size(64, 4, 2)

    def kernel(x_ref, dy_ref, g_ref, dx_ref, dg_ref, db_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            dg_ref[...] = jnp.zeros_like(dg_ref)
            db_ref[...] = jnp.zeros_like(db_ref)

        x, dy = x_ref[...].astype(F32), dy_ref[...].astype(F32)
        xc = x - x.mean(1, keepdims=True)
        rstd = lax.rsqrt((xc * xc).mean(1, keepdims=True) + 1e-5)
        hat = xc * rstd
        wdy = dy * g_ref[...].astype(F32)
        c1 = (hat * wdy).mean(1, keepdims=True)
        c2 = wdy.mean(1, keepdims=True)
        dx_ref[...] = ((wdy - (hat * c1 + c2)) * rstd).astype(dx_ref.dtype)
        dg_ref[0] += (dy * hat).sum(0, keepdims=True)
        db_ref[0] += dy.sum(0, keepdims=True)

    def function(x, dy, g):
        n, d = x.shape
        steps = n // br // parts if n // br >= parts else 1
        many = n // (br * steps)
        block = pl.BlockSpec((br, d), lambda p, i: (p * steps + i, 0))
        sums = pl.BlockSpec((1, 1, d), lambda p, i: (p, 0, 0))
        dx, dg, db = pl.pallas_call(
            kernel,
            out_shape=(sds(x.shape, BF16), *[sds((many, 1, d), F32)] * 2),
            grid=(many, steps),
            in_specs=[block, block, pl.BlockSpec((1, d), lambda p, i: (0, 0))],
            out_specs=(block, sums, sums),
        )(x, dy, g[None])
        return dx, dg.sum((0, 1)), db.sum((0, 1))

    return function


def _added(x, r, g):
    s = x.astype(F32) + r.astype(F32)
    y = s * lax.rsqrt((s * s).mean(-1, keepdims=True) + 1e-6)
    return (y * g.astype(F32)).astype(x.dtype), s.astype(x.dtype)


@family.form(
    Problem("held-out residual and rms norm", matrix(16384, 4096, 2, 1), _added),
    "residual added, rms norm, both stored over the operands",
)
def _(size: Size):
    br = size.block(8)

    def kernel(x_ref, r_ref, g_ref, y_ref, s_ref):
        s = x_ref[...].astype(F32) + r_ref[...].astype(F32)
        s_ref[...] = s.astype(s_ref.dtype)
        norm = jnp.linalg.norm(s, axis=-1, keepdims=True)
        y = s / jnp.sqrt(norm**2 / s.shape[-1] + 1e-6)
        y_ref[...] = (y * g_ref[...].astype(F32)[None]).astype(y_ref.dtype)

    def function(x, r, g):
        n, d = x.shape
        block = pl.BlockSpec((br, d), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=(sds(x.shape, x), sds(x.shape, x)),
            grid=(n // br,),
            in_specs=[block, block, pl.BlockSpec((d,), lambda i: (0,))],
            out_specs=(block, block),
            input_output_aliases={0: 0, 1: 1},
        )(x, r, g)

    return function


def _nhwc(size: Size) -> list[Operand]:
    n, h, c = size(16, 2, 2), size(64, 16, 4), size(512, 64, 64)
    return [Operand((n, h, h, c), size.dtype), *[Operand((c,), size.dtype)] * 2]


def _group(x, g, b, *, groups):
    n, h, w, _ = x.shape
    y = x.astype(F32).reshape(n, h, w, groups, -1)
    mean = y.mean((1, 2, 4), keepdims=True)
    y = (y - mean) * lax.rsqrt(jnp.var(y, (1, 2, 4), keepdims=True) + 1e-6)
    y = y.reshape(x.shape) * g.astype(F32) + b.astype(F32)
    return jax.nn.silu(y).astype(x.dtype)


@family.form(
    Problem("held-out group norm NHWC", _nhwc, functools.partial(_group, groups=32)),
    "group norm of images, silu, an image a program, channels by groups",
)
def _(size: Size):
    def kernel(x_ref, g_ref, b_ref, o_ref, *, groups):
        h, w, c = x_ref.shape[1:]
        x = x_ref[0].astype(F32).reshape(h * w, c)
        per = c // groups
        sums = x.sum(0).reshape(groups, per).sum(1) / (h * w * per)
        squares = (x * x).sum(0).reshape(groups, per).sum(1) / (h * w * per)
        rstd = lax.rsqrt(squares - sums * sums + 1e-6)
        wide = lambda v: jnp.broadcast_to(v[:, None], (groups, per)).reshape(c)
        y = (x - wide(sums)) * wide(rstd) * g_ref[...] + b_ref[...]
        y = y * jax.nn.sigmoid(y)
        o_ref[0] = y.reshape(h, w, c).astype(o_ref.dtype)

    def function(x, g, b):
        n, h, w, c = x.shape
        image = pl.BlockSpec((1, h, w, c), lambda n: (n, 0, 0, 0))
        whole = pl.BlockSpec((c,), lambda n: (0,))
        return pl.pallas_call(
            functools.partial(kernel, groups=32),
            out_shape=sds(x.shape, x),
            grid=(n,),
            in_specs=[image, whole, whole],
            out_specs=image,
        )(x, g, b)

    return function


@family.form(
    Problem(
        "held-out instance norm NHWC",
        _nhwc,
        lambda x, g, b: (
            jax.nn.standardize(x.astype(F32), axis=(1, 2), epsilon=1e-5) * g.astype(F32)
            + b.astype(F32)
        ).astype(x.dtype),
    ),
    "instance norm of images, blocks of channels, sums over rows of pixels",
)
def _(size: Size):
    bc = size(128, 64, 16)

    def kernel(x_ref, g_ref, b_ref, o_ref):
        h, w, c = x_ref.shape

        def both(y, carry):
            row = x_ref[y].astype(F32)
            return carry[0] + row.sum(0), carry[1] + (row**2).sum(0)

        zero = jnp.zeros(c, F32)
        s, ss = lax.fori_loop(0, h, both, (zero, zero))
        mean = s / (h * w)
        scale = lax.rsqrt(ss / (h * w) - mean**2 + 1e-5) * g_ref[...].astype(F32)
        shift = b_ref[...].astype(F32) - mean * scale

        def put(y, _):
            o_ref[y] = (x_ref[y].astype(F32) * scale + shift).astype(o_ref.dtype)

        lax.fori_loop(0, h, put, None)

    def function(x, g, b):
        n, h, w, c = x.shape
        block = pl.BlockSpec((None, h, w, bc), lambda n, j: (n, 0, 0, j))
        part = pl.BlockSpec((bc,), lambda n, j: (j,))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(n, c // bc),
            in_specs=[block, part, part],
            out_specs=block,
        )(x, g, b)

    return function


@family.form(
    Problem(
        "held-out batch norm NHWC",
        _nhwc,
        lambda x, g, b: (
            jax.nn.standardize(x.astype(F32), axis=(0, 1, 2), epsilon=1e-5)
            * g.astype(F32)
            + b.astype(F32)
        ).astype(x.dtype),
    ),
    "batch norm, sums of all pixels in two outputs, then a kernel of results",
)
def _(size: Size):
    bp = size.block(512) if size.name == "model" else 32

    def sums(x_ref, s_ref, q_ref):
        x = x_ref[...].astype(F32)

        @pl.when(pl.program_id(0) == 0)
        def _():
            s_ref[...] = jnp.zeros_like(s_ref)
            q_ref[...] = jnp.zeros_like(q_ref)

        s_ref[...] += x.sum(axis=0, keepdims=True)
        q_ref[...] += (x * x).sum(axis=0, keepdims=True)

    def apply(x_ref, s_ref, q_ref, g_ref, b_ref, o_ref, *, count):
        mean = s_ref[...] / count
        var = q_ref[...] / count - mean * mean
        y = (x_ref[...].astype(F32) - mean) * lax.rsqrt(var + 1e-5)
        o_ref[...] = (y * g_ref[...] + b_ref[...]).astype(o_ref.dtype)

    def function(x, g, b):
        c = x.shape[-1]
        flat = x.reshape(-1, c)
        count = flat.shape[0]
        block = pl.BlockSpec((bp, c), lambda i: (i, 0))
        row = pl.BlockSpec((1, c), lambda i: (0, 0))
        grid = (count // bp,)
        s, q = pl.pallas_call(
            sums,
            out_shape=(sds((1, c), F32), sds((1, c), F32)),
            grid=grid,
            in_specs=[block],
            out_specs=(row, row),
        )(flat)
        return pl.pallas_call(
            functools.partial(apply, count=count),
            out_shape=sds(flat.shape, x),
            grid=grid,
            in_specs=[block, row, row, row, row],
            out_specs=block,
        )(flat, s, q, g[None], b[None]).reshape(x.shape)

    return function


# --- positions and gates ---


def _rope_operands(size: Size) -> list[Operand]:
    b, n, h, d = size(4, 1, 2), size(4096, 256, 16), size(16, 2, 2), 128
    angles = lambda f: (
        lambda r: f(np.outer(np.arange(n), 1e4 ** -np.linspace(0, 1, 64)))
    )
    return [
        Operand((b, n, h, d), size.dtype),
        Operand((b, n, size(4, 1, 1), d), size.dtype),
        Operand((n, d // 2), F32, make=angles(np.cos)),
        Operand((n, d // 2), F32, make=angles(np.sin)),
    ]


def _halves(x, cos, sin):
    a, b = jnp.split(x.astype(F32), 2, -1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _pairs(x, cos, sin):
    a, b = x[..., ::2].astype(F32), x[..., 1::2].astype(F32)
    cos, sin = cos[None, :, None], sin[None, :, None]
    out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return out.reshape(x.shape).astype(x.dtype)


@family.form(
    Problem(
        "held-out rope of q and k",
        _rope_operands,
        lambda q, k, cos, sin: (_halves(q, cos, sin), _halves(k, cos, sin)),
    ),
    "rope of q and k in one kernel, halves stored apart",
)
def _(size: Size):
    bn = size.block(64)

    def kernel(q_ref, k_ref, cos_ref, sin_ref, qo_ref, ko_ref):
        cos, sin = cos_ref[...][:, None, :], sin_ref[...][:, None, :]
        for src, dst in ((q_ref, qo_ref), (k_ref, ko_ref)):
            half = src.shape[-1] // 2
            a = src[0, :, :, :half].astype(F32)
            b = src[0, :, :, half:].astype(F32)
            dst[0, :, :, :half] = (a * cos - b * sin).astype(dst.dtype)
            dst[0, :, :, half:] = (b * cos + a * sin).astype(dst.dtype)

    def function(q, k, cos, sin):
        b, n, h, d = q.shape
        spec = lambda h: pl.BlockSpec((1, bn, h, d), lambda b, i: (b, i, 0, 0))
        angle = pl.BlockSpec((bn, d // 2), lambda b, i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=(sds(q.shape, q), sds(k.shape, k)),
            grid=(b, n // bn),
            in_specs=[spec(h), spec(k.shape[2]), angle, angle],
            out_specs=(spec(h), spec(k.shape[2])),
        )(q, k, cos, sin)

    return function


@family.form(
    Problem(
        "held-out rope by pairs",
        lambda size: [_rope_operands(size)[0], *_rope_operands(size)[2:]],
        _pairs,
    ),
    "rope by pairs, strided halves of a value stacked again",
)
def _(size: Size):
    bn = size.block(128)

    def kernel(x_ref, cos_ref, sin_ref, o_ref):
        x = x_ref[...].astype(F32)
        even, odd = x[:, ::2], x[:, 1::2]
        cos, sin = cos_ref[...], sin_ref[...]
        out = jnp.stack((even * cos - odd * sin, even * sin + odd * cos), axis=2)
        o_ref[...] = out.reshape(x.shape).astype(o_ref.dtype)

    def function(x, cos, sin):
        b, n, h, d = x.shape
        spec = pl.BlockSpec((None, bn, None, d), lambda i, b, h: (b, i, h, 0))
        angle = pl.BlockSpec((bn, d // 2), lambda i, b, h: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(n // bn, b, h),
            in_specs=[spec, angle, angle],
            out_specs=spec,
        )(x, cos, sin)

    return function


def _gated(x):
    gate, up = jnp.split(x.astype(F32), 2, axis=-1)
    return (jax.nn.gelu(gate, approximate=False) * up).astype(x.dtype)


@family.form(
    Problem("held-out gate of packed halves", matrix(8192, 11264), _gated),
    "one operand twice, gate and up by index maps, exact gelu",
)
def _(size: Size):
    br = size.block(256)
    bc = {"model": 512, "part": 128, "cpu": 128, "tiny": 8}[size.name]

    def kernel(gate_ref, up_ref, o_ref):
        g = gate_ref[...].astype(F32)
        cdf = 0.5 * (1.0 + lax.erf(g / np.sqrt(2.0).astype(np.float32)))
        o_ref[...] = (g * cdf * up_ref[...].astype(F32)).astype(o_ref.dtype)

    def function(x):
        n, d = x.shape
        half = d // 2 // bc
        return pl.pallas_call(
            kernel,
            out_shape=sds((n, d // 2), x),
            grid=(pl.cdiv(n, br), half),
            in_specs=[
                pl.BlockSpec((br, bc), lambda i, j: (i, j)),
                pl.BlockSpec((br, bc), lambda i, j: (i, j + half)),
            ],
            out_specs=pl.BlockSpec((br, bc), lambda i, j: (i, j)),
        )(x, x)

    return function


# --- losses ---


def _labelled(size: Size) -> list[Operand]:
    n, v = size(8192, 256, 16), size(32000, 512, 96)
    labels = lambda r: np.where(r.random(n) < 0.1, -100, r.integers(0, v, n))
    return [Operand((n, v), size.dtype), Operand((n,), I32, make=labels)]


def _smoothed(logits, labels):
    x = logits.astype(F32)
    lse = jax.nn.logsumexp(x, axis=1)
    at = jnp.take_along_axis(x, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
    loss = lse - 0.9 * at - 0.1 * x.mean(1) + 1e-4 * lse * lse
    return jnp.where(labels == -100, 0, loss)


CROSS = Problem("held-out smoothed cross entropy", _labelled, _smoothed)


@family.form(CROSS, "liger: one row a program, vocabulary in blocks, label by a load")
def _(size: Size):
    bv = {"model": 4096, "part": 128, "cpu": 128, "tiny": 40}[size.name]

    def kernel(x_ref, y_ref, o_ref):
        row = pl.program_id(0)
        n, label = x_ref.shape[1], y_ref[row]

        def body(j, carry):
            m, d, total = carry
            cols = j * bv + jnp.arange(bv)
            at = (row, pl.ds(j * bv, bv))
            x = pl.load(x_ref, at, mask=cols < n, other=-jnp.inf).astype(F32)
            total = total + jnp.sum(jnp.where(cols < n, x, 0.0))
            new = jnp.maximum(m, jnp.max(x))
            d = d * jnp.exp(m - new) + jnp.sum(jnp.exp(x - new))
            return new, d, total

        start = (jnp.float32(-jnp.inf), jnp.float32(0), jnp.float32(0))
        m, d, total = lax.fori_loop(0, pl.cdiv(n, bv), body, start)
        lse = m + jnp.log(d)
        hit = x_ref[row, jnp.maximum(label, 0)].astype(F32)
        loss = lse - 0.9 * hit - 0.1 * total / n + 1e-4 * lse * lse
        o_ref[row] = jnp.where(label == -100, 0.0, loss)

    return lambda x, y: pl.pallas_call(
        kernel, out_shape=sds((x.shape[0],), F32), grid=(x.shape[0],)
    )(x, y)


@family.form(CROSS, "label picked by an iota, rows whole, eight rows a program")
def _(size: Size):
    br = size.block(8)

    def kernel(x_ref, y_ref, o_ref):
        x = x_ref[...].astype(F32)
        labels = y_ref[...]
        cols = lax.broadcasted_iota(I32, x.shape, 1)
        hit = jnp.where(cols == labels, x, 0.0).sum(-1, keepdims=True)
        lse = jax.nn.logsumexp(x, axis=-1, keepdims=True)
        mean = jnp.mean(x, axis=-1, keepdims=True)
        loss = lse - 0.9 * hit - 0.1 * mean + 1e-4 * jnp.square(lse)
        o_ref[...] = jnp.where(labels != -100, loss, 0.0)

    def function(x, y):
        n, v = x.shape
        column = pl.BlockSpec((br, 1), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds((n, 1), F32),
            grid=(n // br,),
            in_specs=[pl.BlockSpec((br, v), lambda i: (i, 0)), column],
            out_specs=column,
        )(x, y[:, None])[:, 0]

    return function


def _jsd(x, y):
    p, q = (jax.nn.log_softmax(z.astype(F32)) for z in (x, y))
    mix = jnp.log(0.5 * jnp.exp(p) + 0.5 * jnp.exp(q))
    kl = lambda a: (jnp.exp(a) * (a - mix)).sum(-1)
    return 0.5 * kl(p) + 0.5 * kl(q)


@family.form(
    Problem("held-out Jensen Shannon", matrix(4096, 32000, 2), _jsd),
    "Jensen Shannon of two rows of logits, both passes over a block of four rows",
)
def _(size: Size):
    br = 4

    def log_softmax(x):
        x = x - lax.stop_gradient(x.max(1, keepdims=True))
        return x - jnp.log(jnp.exp(x).sum(1, keepdims=True))

    def kernel(x_ref, y_ref, o_ref):
        p, q = (log_softmax(r[...].astype(F32)) for r in (x_ref, y_ref))
        ep, eq = jnp.exp(p), jnp.exp(q)
        mix = jnp.log((ep + eq) / 2)
        o_ref[...] = 0.5 * jnp.sum(ep * (p - mix) + eq * (q - mix), axis=1)

    def function(x, y):
        n, v = x.shape
        block = pl.BlockSpec((br, v), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds((n,), F32),
            grid=(n // br,),
            in_specs=[block, block],
            out_specs=pl.BlockSpec((br,), lambda i: (i,)),
        )(x, y)

    return function


def _focal(x, t):
    x, t = x.astype(F32), (t.astype(F32) > 0).astype(F32)
    ce = jnp.maximum(x, 0) - x * t + jnp.log1p(jnp.exp(-jnp.abs(x)))
    p = jax.nn.sigmoid(x)
    pt = p * t + (1 - p) * (1 - t)
    return (ce * (1 - pt) ** 2 * (0.25 * t + 0.75 * (1 - t))).sum()


@family.form(
    Problem("held-out focal loss", matrix(16384, 1024, 2), _focal),
    "focal loss summed into one scalar in SMEM",
)
def _(size: Size):
    br = size.block(256)

    def kernel(x_ref, t_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[0, 0] = 0.0

        x = x_ref[...].astype(F32)
        t = (t_ref[...] > 0).astype(F32)
        ce = jnp.maximum(x, 0) - x * t + jnp.log1p(jnp.exp(-jnp.abs(x)))
        p = 1 / (1 + jnp.exp(-x))
        miss = 1 - (p * t + (1 - p) * (1 - t))
        o_ref[0, 0] += jnp.sum(ce * miss * miss * (0.25 * t + 0.75 * (1 - t)))

    def function(x, t):
        n, d = x.shape
        block = pl.BlockSpec((min(br, n), d), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds((1, 1), F32),
            grid=(n // min(br, n),),
            in_specs=[block, block],
            out_specs=pl.BlockSpec(memory_space=pltpu.SMEM),
        )(x, t)[0, 0]

    return function


@family.form(
    Problem(
        "held-out huber loss",
        matrix(16384, 1024, 2),
        lambda x, y: jnp.where(
            jnp.abs(d := x.astype(F32) - y.astype(F32)) <= 1,
            0.5 * d * d,
            jnp.abs(d) - 0.5,
        ).mean(),
    ),
    "huber loss, a partial sum of each program, flat",
)
def _(size: Size):
    chunk = size(8192, 2048, 128)

    def kernel(x_ref, y_ref, o_ref):
        gap = x_ref[...].astype(F32) - y_ref[...].astype(F32)
        size_ = jnp.abs(gap)
        loss = lax.select(size_ <= 1.0, 0.5 * gap * gap, size_ - 0.5)
        o_ref[pl.program_id(0)] = jnp.sum(loss)

    def function(x, y):
        x, y = x.ravel(), y.ravel()
        grid = x.shape[0] // chunk
        block = pl.BlockSpec((chunk,), lambda i: (i,))
        parts = pl.pallas_call(
            kernel,
            out_shape=sds((grid,), F32),
            grid=(grid,),
            in_specs=[block, block],
            out_specs=pl.BlockSpec((grid,), lambda i: (0,)),
        )(x, y)
        return parts.sum() / x.shape[0]

    return function


# --- quantisation, updates in place ---


def _quantised(x):
    x = x.astype(F32)
    scale = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale[:, 0]


@family.form(
    Problem("held-out quantised rows", matrix(16384, 4096), _quantised),
    "absmax of a row to int8, scale as a row of one dimension",
    grad=False,
)
def _(size: Size):
    br = size.block(32)

    def kernel(x_ref, q_ref, s_ref):
        x = x_ref[...].astype(F32)
        scale = jnp.max(jnp.abs(x), axis=1) / 127.0
        q_ref[...] = jnp.round(x / scale[:, None]).astype(jnp.int8)
        s_ref[...] = scale

    def function(x):
        n, d = x.shape
        block = pl.BlockSpec((br, d), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=(sds((n, d), jnp.int8), sds((n,), F32)),
            grid=(n // br,),
            in_specs=[block],
            out_specs=(block, pl.BlockSpec((br,), lambda i: (i,))),
        )(x)

    return function


def _adam_operands(size: Size) -> list[Operand]:
    n = size(1 << 24, 1 << 16, 1 << 10)
    positive = lambda r: r.random(n, np.float32)
    return [
        Operand((n,)),
        Operand((n,), size.dtype),
        Operand((n,), F32),
        Operand((n,), F32, make=positive),
        Operand((2,), F32, make=lambda r: np.array([1e-3, 0.1])),
    ]


def _adam(p, g, m, v, hyper):
    g = g.astype(F32)
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    step = (m / 0.9) / (jnp.sqrt(v / 0.5) + 1e-8)
    return p - hyper[0] * (step + hyper[1] * p), m, v


@family.form(
    Problem("held-out AdamW", _adam_operands, _adam),
    "AdamW in place, flat blocks seen as (rows, 128), rates in SMEM",
)
def _(size: Size):
    br = size.block(512)
    br = 8 if size.name == "tiny" else br

    def kernel(h_ref, p_ref, g_ref, m_ref, v_ref, po_ref, mo_ref, vo_ref):
        g = g_ref[...].astype(F32)
        m = 0.9 * m_ref[...] + (1 - 0.9) * g
        v = 0.999 * v_ref[...] + (1 - 0.999) * g**2
        mo_ref[...] = m
        vo_ref[...] = v
        step = (m / 0.9) / (jnp.sqrt(v / 0.5) + 1e-8)
        p = p_ref[...]
        po_ref[...] = p - h_ref[0] * (step + h_ref[1] * p)

    def function(p, g, m, v, hyper):
        flat = [x.reshape(-1, 128) for x in (p, g, m, v)]
        rows = flat[0].shape[0]
        block = pl.BlockSpec((br, 128), lambda i: (i, 0))
        new = pl.pallas_call(
            kernel,
            out_shape=tuple(sds(flat[n].shape, F32) for n in (0, 2, 3)),
            grid=(rows // br,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *[block] * 4],
            out_specs=(block,) * 3,
            input_output_aliases={1: 0, 3: 1, 4: 2},
        )(hyper, *flat)
        return tuple(x.reshape(-1) for x in new)

    return function


def _clipped(g, m):
    norm = jnp.sqrt((g.astype(F32) ** 2).sum())
    g = g.astype(F32) * jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    return (0.95 * m.astype(F32) + g).astype(m.dtype)


@family.form(
    Problem("held-out clipped momentum", matrix(8192, 8192, 2), _clipped),
    "sum of squares in (1, 1), then momentum clipped by it",
)
def _(size: Size):
    b = size.block(512) if size.name == "model" else 16

    def squares(g_ref, o_ref):
        first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)

        @pl.when(first)
        def _():
            o_ref[...] = jnp.zeros((1, 1), F32)

        g = g_ref[...].astype(F32)
        o_ref[...] += (g * g).sum(keepdims=True)

    def update(s_ref, g_ref, m_ref, o_ref):
        scale = jnp.minimum(1.0, 1.0 / (jnp.sqrt(s_ref[0, 0]) + 1e-6))
        m = 0.95 * m_ref[...].astype(F32) + scale * g_ref[...].astype(F32)
        o_ref[...] = m.astype(o_ref.dtype)

    def function(g, m):
        n, d = g.shape
        grid = (n // b, d // b)
        block = pl.BlockSpec((b, b), lambda i, j: (i, j))
        one = pl.BlockSpec((1, 1), lambda i, j: (0, 0))
        s = pl.pallas_call(
            squares,
            out_shape=sds((1, 1), F32),
            grid=grid,
            in_specs=[block],
            out_specs=one,
        )(g)
        return pl.pallas_call(
            update,
            out_shape=sds(m.shape, m),
            grid=grid,
            in_specs=[one, block, block],
            out_specs=block,
            input_output_aliases={2: 0},
        )(s, g, m)

    return function


def _rounding(size: Size) -> list[Operand]:
    shape = (size(8192, 256, 16), size(4096, 512, 128))
    bits = lambda r: r.integers(0, 1 << 32, shape, np.uint32)
    return [Operand(shape), Operand(shape, jnp.uint32, make=bits)]


def _rounded(x, bits):
    whole = lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    top = whole & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(top, F32).astype(BF16)


@family.form(
    Problem("held-out stochastic rounding", _rounding, _rounded),
    "stochastic rounding by bits of an operand",
    grad=False,
)
def _(size: Size):
    b = size.block(256)
    b = 16 if size.name == "tiny" else b

    def kernel(x_ref, r_ref, o_ref):
        bits = pltpu.bitcast(x_ref[...], jnp.uint32)
        bits = (bits + (r_ref[...] >> 16)) & jnp.uint32(0xFFFF0000)
        o_ref[...] = pltpu.bitcast(bits, F32).astype(o_ref.dtype)

    def function(x, r):
        n, d = x.shape
        block = pl.BlockSpec((b, 128), lambda i, j: (i, j))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, BF16),
            grid=(n // b, d // 128),
            in_specs=[block, block],
            out_specs=block,
        )(x, r)

    return function


# --- merges and routers ---


def _merge_operands(size: Size) -> list[Operand]:
    t, h, d = size(16384, 128, 16), size(32, 4, 2), 128
    out, lse = Operand((t, h, d), size.dtype), Operand((t, h), F32, spread=2.0)
    return [out, lse, out, lse]


def _merged(a, la, b, lb):
    m = jnp.maximum(la, lb)
    pa, pb = jnp.exp(la - m), jnp.exp(lb - m)
    wide = lambda x: x[..., None]
    out = (a.astype(F32) * wide(pa) + b.astype(F32) * wide(pb)) / wide(pa + pb)
    return out.astype(a.dtype), m + jnp.log(pa + pb)


@family.form(
    Problem("held-out merge of two attentions", _merge_operands, _merged),
    "merge of two attentions, one token and all heads in a program",
)
def _(size: Size):
    def kernel(a_ref, la_ref, b_ref, lb_ref, o_ref, lo_ref):
        la, lb = la_ref[0], lb_ref[0]
        total = jnp.logaddexp(la, lb)
        wa, wb = jnp.exp(la - total), jnp.exp(lb - total)
        a, b = a_ref[0].astype(F32), b_ref[0].astype(F32)
        o_ref[0] = (a * wa[:, None] + b * wb[:, None]).astype(o_ref.dtype)
        lo_ref[0] = total

    def function(a, la, b, lb):
        t, h, d = a.shape
        big = pl.BlockSpec((1, h, d), lambda i: (i, 0, 0))
        small = pl.BlockSpec((1, h), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=(sds(a.shape, a), sds(la.shape, la)),
            grid=(t,),
            in_specs=[big, small, big, small],
            out_specs=(big, small),
        )(a, la, b, lb)

    return function


def _router(size: Size) -> list[Operand]:
    """No logits of a row are equal: the cotangent of a maximum is shared by equal ones,
    that of `top_k` is not."""
    n, e = size(32768, 512, 32), size(128, 128, 32)

    def apart(r: np.random.Generator) -> Any:
        spread = 0.5 + r.random((n, 1))
        return r.permuted(np.tile(np.linspace(-3, 3, e), (n, 1)), axis=1) * spread

    return [Operand((n, e), F32, make=apart)]


def _routed(x):
    p = jax.nn.softmax(x, axis=-1)
    top, at = lax.top_k(p, 4)
    return top / top.sum(-1, keepdims=True), at.astype(I32)


@family.form(
    Problem("held-out router of four experts", _router, _routed),
    "router, four times largest and argmax, masked by minus infinity",
)
def _(size: Size):
    br = size.block(128)

    def kernel(x_ref, w_ref, i_ref):
        p = jax.nn.softmax(x_ref[...], axis=-1)
        cols = lax.broadcasted_iota(I32, p.shape, 1)
        values, places = [], []
        for _ in range(4):
            at = jnp.argmax(p, axis=-1, keepdims=True).astype(I32)
            values.append(jnp.max(p, axis=-1, keepdims=True))
            places.append(at)
            p = jnp.where(cols == at, -jnp.inf, p)
        w = jnp.concatenate(values, axis=-1)
        w_ref[...] = w / jnp.sum(w, axis=-1, keepdims=True)
        i_ref[...] = jnp.concatenate(places, axis=-1)

    def function(x):
        n, e = x.shape
        out = pl.BlockSpec((br, 4), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=(sds((n, 4), F32), sds((n, 4), I32)),
            grid=(n // br,),
            in_specs=[pl.BlockSpec((br, e), lambda i: (i, 0))],
            out_specs=(out, out),
        )(x)

    return function


def _dyt(x, a, g, b):
    y = jnp.tanh(a.astype(F32) * x.astype(F32))
    return (y * g.astype(F32) + b.astype(F32)).astype(x.dtype)


@family.form(
    Problem("held-out dynamic tanh", matrix(16384, 4096, 0, 1, 1), _dyt),
    "dynamic tanh, a scalar in SMEM with a gradient",
)
def _(size: Size):
    br, bc = size.block(128), size.block(256)

    def kernel(a_ref, x_ref, g_ref, b_ref, o_ref):
        y = jnp.tanh(a_ref[0].astype(F32) * x_ref[...].astype(F32))
        o_ref[...] = (y * g_ref[...] + b_ref[...]).astype(o_ref.dtype)

    def function(x, a, g, b):
        n, d = x.shape
        row = pl.BlockSpec((1, bc), lambda i, j: (0, j))
        block = pl.BlockSpec((br, bc), lambda i, j: (i, j))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(n // br, d // bc),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), block, row, row],
            out_specs=block,
        )(a.reshape(1), x, g[None], b[None])

    return function


def _dropped_operands(size: Size) -> list[Operand]:
    return matrix(8192, 4096, 2, 1, 1)(size)


def _hash(rows, columns):
    x = rows.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + columns.astype(jnp.uint32)
    x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA6B)
    return x ^ (x >> 13)


def _dropped(x, r, g, b):
    n, d = x.shape
    bits = _hash(jnp.arange(n)[:, None], jnp.arange(d)[None])
    x = jnp.where(bits > jnp.uint32(858993459), x.astype(F32) / 0.8, 0)
    z = x + r.astype(F32)
    z = jax.nn.standardize(z, axis=-1, epsilon=1e-5)
    return (z * g.astype(F32) + b.astype(F32)).astype(r.dtype)


@family.form(
    Problem("held-out dropout, residual, norm", _dropped_operands, _dropped),
    "dropout by a hash, residual and layer norm, rows in a grid of two",
)
def _(size: Size):
    br = 4

    def kernel(x_ref, r_ref, g_ref, b_ref, o_ref):
        first = (pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)) * br
        shape = x_ref.shape
        bits = _hash(
            first + lax.broadcasted_iota(I32, shape, 0),
            lax.broadcasted_iota(I32, shape, 1),
        )
        x = x_ref[...].astype(F32) * 1.25
        x = jnp.where(bits > jnp.uint32(858993459), x, 0.0) + r_ref[...].astype(F32)
        mean, var = jnp.mean(x, 1, keepdims=True), jnp.var(x, 1, keepdims=True)
        y = (x - mean) / jnp.sqrt(var + 1e-5)
        o_ref[...] = (y * g_ref[...] + b_ref[...]).astype(o_ref.dtype)

    def function(x, r, g, b):
        n, d = x.shape
        half = n // br // 2
        block = pl.BlockSpec((br, d), lambda a, i: (a * half + i, 0))
        row = pl.BlockSpec((1, d), lambda a, i: (0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(x.shape, x),
            grid=(2, half),
            in_specs=[block, block, row, row],
            out_specs=block,
        )(x, r, g[None], b[None])

    return function
