"""Rows and losses: softmaxes, norms, reductions and elementwise work, in many forms."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Family, Operand, Problem, Shape, Size

family = Family("rows")
EPS = 1e-6


def width_of(size: Size) -> int:
    return size(8192, 2048, 256)


def matrix(size: Size, dtype: Any = None) -> Operand:
    return Operand((size(8192, 1024, 32), width_of(size)), dtype or size.dtype)


def one(size: Size) -> list[Operand]:
    return [matrix(size)]


def row_call(
    kernel: Callable,
    rows: int,
    *operands: Any,
    out: Any = None,
    scratch: Sequence[Any] = (),
) -> Any:
    """Blocks of whole rows; operands of one row are seen whole, of one column too."""
    n, width = operands[0].shape

    def spec(x):
        if x.shape[0] == 1:
            return pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))
        return pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))

    out = out or Shape((n, width), operands[0].dtype)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(pl.cdiv(n, rows),),
        in_specs=[spec(x) for x in operands],
        out_specs=jax.tree.map(spec, out),
        scratch_shapes=list(scratch),
    )(*operands)


# --- softmax ---


def _softmax(x):
    return jax.nn.softmax(x.astype(F32), axis=-1).astype(x.dtype)


SOFTMAX = Problem("softmax", one, _softmax)


@family.form(SOFTMAX)
def softmax_rows_of_8(size: Size):
    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(F32)
        p = jnp.exp(x - x.max(axis=-1, keepdims=True))
        o_ref[...] = (p / p.sum(axis=-1, keepdims=True)).astype(o_ref.dtype)

    return lambda x: row_call(kernel, 8, x)


@family.form(SOFTMAX)
def softmax_one_row_a_program(size: Size):
    """As Triton's tutorial: a program has one row, of rank 1."""

    def kernel(x_ref, o_ref):
        x = x_ref[0, :].astype(F32)
        p = jnp.exp(x - jnp.max(x, axis=0))
        o_ref[0, :] = (p / jnp.sum(p, axis=0)).astype(o_ref.dtype)

    return lambda x: row_call(kernel, 1, x)


@family.form(SOFTMAX)
def softmax_by_jax_nn(size: Size):
    def kernel(x_ref, o_ref):
        y = jax.nn.softmax(x_ref[...].astype(F32), axis=1)
        o_ref[...] = y.astype(o_ref.dtype)

    return lambda x: row_call(kernel, 4, x)


@family.form(SOFTMAX)
def softmax_squeezed_rows_exp2(size: Size):
    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(F32) * 1.4426950408889634
        p = jnp.exp2(x - jnp.max(x))
        o_ref[...] = (p * (1.0 / jnp.sum(p))).astype(o_ref.dtype)

    def call(x):
        spec = pl.BlockSpec((None, x.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=Shape(x.shape, x.dtype),
            grid=(x.shape[0],),
            in_specs=[spec],
            out_specs=spec,
        )(x)

    return call


@family.form(SOFTMAX)
def softmax_two_loops_over_chunks(size: Size):
    rows, chunk = 8, size.block(512)

    def kernel(x_ref, o_ref):
        steps = x_ref.shape[1] // chunk
        part = lambda j: x_ref[:, pl.ds(j * chunk, chunk)].astype(F32)

        def absorb(j, state):
            m, l = state
            new = jnp.maximum(m, part(j).max(axis=1, keepdims=True))
            p = jnp.exp(part(j) - new)
            return new, l * jnp.exp(m - new) + p.sum(axis=1, keepdims=True)

        start = jnp.full((rows, 1), -jnp.inf, F32), jnp.zeros((rows, 1), F32)
        m, l = lax.fori_loop(0, steps, absorb, start)

        def write(j, _):
            y = jnp.exp(part(j) - m) / l
            o_ref[:, pl.ds(j * chunk, chunk)] = y.astype(o_ref.dtype)

        lax.fori_loop(0, steps, write, None)

    return lambda x: row_call(kernel, rows, x)


@family.form(SOFTMAX)
def softmax_online_over_a_grid(size: Size):
    """The first pass along the grid has the statistics, the second writes."""
    rows, chunk = size.block(64), size.block(1024)

    def kernel(x_ref, o_ref, m_ref, l_ref):
        turn, j = pl.program_id(1), pl.program_id(2)

        @pl.when((turn == 0) & (j == 0))
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            l_ref[...] = jnp.zeros_like(l_ref)

        x = x_ref[...].astype(F32)

        @pl.when(turn == 0)
        def _():
            m = m_ref[...]
            new = jnp.maximum(m, x.max(axis=1, keepdims=True))
            p = jnp.exp(x - new)
            l_ref[...] = l_ref[...] * jnp.exp(m - new) + p.sum(axis=1, keepdims=True)
            m_ref[...] = new

        @pl.when(turn == 1)
        def _():
            o_ref[...] = (jnp.exp(x - m_ref[...]) / l_ref[...]).astype(o_ref.dtype)

    def call(x):
        n, width = x.shape
        spec = pl.BlockSpec((rows, chunk), lambda i, t, j: (i, j))
        return pl.pallas_call(
            kernel,
            out_shape=Shape(x.shape, x.dtype),
            grid=(n // rows, 2, width // chunk),
            in_specs=[spec],
            out_specs=pl.BlockSpec((rows, chunk), lambda i, t, j: (i, j * t)),
            scratch_shapes=[pltpu.VMEM((rows, 1), F32)] * 2,
        )(x)

    return call


@family.form(SOFTMAX)
def softmax_rows_in_a_loop(size: Size):
    """A persistent program takes a strip of rows, one after another."""
    strip = size.block(64)

    def kernel(x_ref, o_ref):
        @pl.loop(0, strip)
        def _(i):
            x = x_ref[i, :].astype(F32)
            p = jnp.exp(x - x.max())
            o_ref[i, :] = (p / p.sum()).astype(o_ref.dtype)

    return lambda x: row_call(kernel, strip, x)


@family.form(SOFTMAX)
def softmax_whole_refs(size: Size):
    rows = 8

    def kernel(x_ref, o_ref):
        at = pl.ds(pl.program_id(0) * rows, rows)
        x = x_ref[at, :].astype(F32)
        p = jnp.exp(x - x.max(axis=1)[:, None])
        o_ref[at, :] = (p / p.sum(axis=1)[:, None]).astype(o_ref.dtype)

    def call(x):
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            kernel,
            out_shape=Shape(x.shape, x.dtype),
            grid=(x.shape[0] // rows,),
            in_specs=[anywhere],
            out_specs=anywhere,
        )(x)

    return call


def _edge(size: Size) -> list[Operand]:
    return [Operand((size(8190, 1000, 30), size(8000, 2000, 250)), size.dtype)]


@family.form(Problem("softmax edges", _edge, _softmax))
def softmax_in_blocks_wider_than_rows(size: Size):
    """A power of two at least as wide, masked, as Triton's tutorial."""
    rows = 4

    def kernel(width, x_ref, o_ref):
        x = x_ref[...].astype(F32)
        inside = lax.broadcasted_iota(I32, x.shape, 1) < width
        x = jnp.where(inside, x, -jnp.inf)
        p = jnp.exp(x - x.max(axis=1, keepdims=True))
        o_ref[...] = (p / p.sum(axis=1, keepdims=True)).astype(o_ref.dtype)

    def call(x):
        n, width = x.shape
        spec = pl.BlockSpec((rows, pl.next_power_of_2(width)), lambda i: (i, 0))
        return pl.pallas_call(
            lambda *refs: kernel(width, *refs),
            out_shape=Shape(x.shape, x.dtype),
            grid=(pl.cdiv(n, rows),),
            in_specs=[spec],
            out_specs=spec,
        )(x)

    return call


def _logsumexp(x):
    return jax.nn.logsumexp(x.astype(F32), axis=-1, keepdims=True)


@family.form(Problem("logsumexp", one, _logsumexp))
def logsumexp_online_over_a_grid(size: Size):
    rows, chunk = size.block(128), size.block(512)

    def kernel(x_ref, o_ref, m_ref, l_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            l_ref[...] = jnp.zeros_like(l_ref)

        x, m = x_ref[...].astype(F32), m_ref[...]
        new = jnp.maximum(m, x.max(axis=1))
        p = jnp.exp(x - new[:, None]).sum(axis=1)
        l_ref[...] = l_ref[...] * jnp.exp(m - new) + p
        m_ref[...] = new

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = (m_ref[...] + jnp.log(l_ref[...]))[:, None]

    def call(x):
        n, width = x.shape
        return pl.pallas_call(
            kernel,
            out_shape=Shape((n, 1), F32),
            grid=(n // rows, width // chunk),
            in_specs=[pl.BlockSpec((rows, chunk), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((rows, 1), lambda i, j: (i, 0)),
            scratch_shapes=[pltpu.VMEM((rows,), F32)] * 2,
        )(x)

    return call


# --- norms ---


def _scaled(size: Size) -> list[Operand]:
    return [matrix(size), Operand((1, width_of(size)), F32)]


def _rms(x, g):
    y = x.astype(F32)
    y = y * lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + EPS)
    return (y * g).astype(x.dtype)


def _layer(x, g, b):
    y = x.astype(F32)
    y = y - y.mean(axis=-1, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + EPS)
    return (y * g + b).astype(x.dtype)


RMS = Problem("rms norm", _scaled, _rms)
LAYER = Problem("layer norm", lambda s: [*_scaled(s), _scaled(s)[1]], _layer)


@family.form(RMS)
def rms_norm_rows_of_16(size: Size):
    def kernel(x_ref, g_ref, o_ref):
        x = x_ref[...].astype(F32)
        scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)
        o_ref[...] = (x * scale * g_ref[...]).astype(o_ref.dtype)

    return lambda x, g: row_call(kernel, 16, x, g)


@family.form(RMS)
def rms_norm_one_row_a_program(size: Size):
    def kernel(x_ref, g_ref, o_ref):
        x = x_ref[0].astype(F32)
        scale = 1.0 / jnp.sqrt(jnp.sum(jnp.square(x)) / x.shape[0] + EPS)
        o_ref[0] = (x * scale * g_ref[0]).astype(o_ref.dtype)

    return lambda x, g: row_call(kernel, 1, x, g)


@family.form(RMS)
def rms_norm_in_vector_scratch_over_a_grid(size: Size):
    """Sums of squares kept along a sequential axis, then a second pass."""
    rows, chunk = size.block(64), size.block(1024)

    def kernel(x_ref, g_ref, o_ref, sum_ref):
        turn, j = pl.program_id(1), pl.program_id(2)

        @pl.when((turn == 0) & (j == 0))
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        x = x_ref[...].astype(F32)

        @pl.when(turn == 0)
        def _():
            sum_ref[...] += (x * x).sum(axis=1)

        @pl.when(turn == 1)
        def _():
            width = pl.num_programs(2) * chunk
            scale = lax.rsqrt(sum_ref[...] / width + EPS)
            o_ref[...] = (x * scale[:, None] * g_ref[...]).astype(o_ref.dtype)

    def call(x, g):
        n, width = x.shape
        spec = pl.BlockSpec((rows, chunk), lambda i, t, j: (i, j))
        return pl.pallas_call(
            kernel,
            out_shape=Shape(x.shape, x.dtype),
            grid=(n // rows, 2, width // chunk),
            in_specs=[spec, pl.BlockSpec((1, chunk), lambda i, t, j: (0, j))],
            out_specs=pl.BlockSpec((rows, chunk), lambda i, t, j: (i, j * t)),
            scratch_shapes=[pltpu.VMEM((rows,), F32)],
        )(x, g)

    return call


@family.form(LAYER)
def layer_norm_rows_of_8(size: Size):
    def kernel(x_ref, g_ref, b_ref, o_ref):
        x = x_ref[...].astype(F32)
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = lax.rsqrt((centred * centred).mean(axis=-1, keepdims=True) + EPS)
        o_ref[...] = (centred * scale * g_ref[...] + b_ref[...]).astype(o_ref.dtype)

    return lambda *x: row_call(kernel, 8, *x)


@family.form(LAYER)
def layer_norm_of_the_square_s_mean(size: Size):
    """The variance as the mean of squares less the square of the mean."""

    def kernel(x_ref, g_ref, b_ref, o_ref):
        x = x_ref[...].astype(F32)
        mean = jnp.mean(x, axis=1, keepdims=True)
        variance = jnp.mean(x * x, axis=1, keepdims=True) - mean * mean
        y = (x - mean) / jnp.sqrt(variance + EPS)
        o_ref[...] = (y * g_ref[...] + b_ref[...]).astype(o_ref.dtype)

    return lambda *x: row_call(kernel, 16, *x)


@family.form(LAYER)
def layer_norm_three_loops_over_chunks(size: Size):
    """As Triton's tutorial: mean, variance, result, each in its loop."""
    rows, chunk = 4, size.block(1024)

    def kernel(x_ref, g_ref, b_ref, o_ref):
        width = x_ref.shape[1]
        steps = width // chunk
        part = lambda j: x_ref[:, pl.ds(j * chunk, chunk)].astype(F32)
        zero = jnp.zeros((rows, chunk), F32)
        total = lax.fori_loop(0, steps, lambda j, acc: acc + part(j), zero)
        mean = total.sum(axis=1, keepdims=True) / width
        square = lambda j, acc: acc + (part(j) - mean) ** 2
        total = lax.fori_loop(0, steps, square, zero)
        scale = lax.rsqrt(total.sum(axis=1, keepdims=True) / width + EPS)

        def write(j, _):
            at = (slice(None), pl.ds(j * chunk, chunk))
            y = (part(j) - mean) * scale * g_ref[at] + b_ref[at]
            o_ref[at] = y.astype(o_ref.dtype)

        lax.fori_loop(0, steps, write, None)

    return lambda *x: row_call(kernel, rows, *x)


def _with_residual(x, r, g):
    h = x + r
    return h, _rms(h, g)


@family.form(
    Problem("add and rms norm", lambda s: [matrix(s), matrix(s), _scaled(s)[1]],
            _with_residual)
)  # fmt: skip
def add_and_rms_norm_two_results(size: Size):
    def kernel(x_ref, r_ref, g_ref, h_ref, o_ref):
        h = x_ref[...] + r_ref[...]
        h_ref[...] = h
        y = h.astype(F32)
        scale = lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + EPS)
        o_ref[...] = (y * scale * g_ref[...]).astype(o_ref.dtype)

    return lambda x, r, g: row_call(
        kernel, 8, x, r, g, out=(Shape(x.shape, x.dtype), Shape(x.shape, x.dtype))
    )


def _groups(size: Size) -> list[Operand]:
    return [Operand((size(8192, 512, 16), 32, size(256, 64, 16)), size.dtype)]


def _group_norm(x):
    y = x.astype(F32)
    y = y - y.mean(axis=-1, keepdims=True)
    return (y * lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + EPS)).astype(x.dtype)


@family.form(Problem("group norm", _groups, _group_norm))
def group_norm_of_rank_3(size: Size):
    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(F32)
        x = x - x.mean(axis=2, keepdims=True)
        y = x * lax.rsqrt((x * x).mean(axis=2, keepdims=True) + EPS)
        o_ref[...] = y.astype(o_ref.dtype)

    def call(x):
        spec = pl.BlockSpec((8, *x.shape[1:]), lambda i: (i, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=Shape(x.shape, x.dtype),
            grid=(x.shape[0] // 8,),
            in_specs=[spec],
            out_specs=spec,
        )(x)

    return call


def _l2(x):
    y = x.astype(F32)
    return (y / jnp.sqrt((y * y).sum(axis=1, keepdims=True) + EPS)).astype(x.dtype)


@family.form(Problem("l2 normalise", one, _l2))
def l2_normalise_by_linalg_norm(size: Size):
    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(F32)
        norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPS)
        o_ref[...] = (x / norm).astype(o_ref.dtype)

    return lambda x: row_call(kernel, 8, x)


# --- losses ---


def _logits(size: Size) -> list[Operand]:
    n, width = size(4096, 1024, 32), size(32768, 4096, 256)
    return [Operand((n, width), size.dtype), Operand((n, 1), I32, high=width)]


def _cross_entropy(x, label):
    x = x.astype(F32)
    picked = jnp.take_along_axis(x, label, axis=1)
    return jax.nn.logsumexp(x, axis=-1, keepdims=True) - picked


CROSS = Problem("cross entropy", _logits, _cross_entropy)


@family.form(CROSS)
def cross_entropy_rows_one_hot(size: Size):
    def kernel(x_ref, label_ref, o_ref):
        x = x_ref[...].astype(F32)
        m = x.max(axis=1, keepdims=True)
        lse = m + jnp.log(jnp.exp(x - m).sum(axis=1, keepdims=True))
        hot = lax.broadcasted_iota(I32, x.shape, 1) == label_ref[...]
        o_ref[...] = lse - jnp.where(hot, x, 0.0).sum(axis=1, keepdims=True)

    return lambda x, y: row_call(kernel, 8, x, y, out=Shape(y.shape, F32))


@family.form(CROSS)
def cross_entropy_by_a_loop(size: Size):
    rows, chunk = 8, size.block(1024)

    def kernel(x_ref, label_ref, o_ref):
        label = label_ref[...]

        def step(j, state):
            m, l, picked = state
            x = x_ref[:, pl.ds(j * chunk, chunk)].astype(F32)
            new = jnp.maximum(m, x.max(axis=1, keepdims=True))
            l = l * jnp.exp(m - new) + jnp.exp(x - new).sum(axis=1, keepdims=True)
            hot = j * chunk + lax.broadcasted_iota(I32, x.shape, 1) == label
            picked += jnp.where(hot, x, 0.0).sum(axis=1, keepdims=True)
            return new, l, picked

        zero = jnp.zeros((rows, 1), F32)
        start = jnp.full((rows, 1), -1e30, F32), zero, zero
        m, l, picked = lax.fori_loop(0, x_ref.shape[1] // chunk, step, start)
        o_ref[...] = m + jnp.log(l) - picked

    return lambda x, y: row_call(kernel, rows, x, y, out=Shape(y.shape, F32))


@family.form(CROSS)
def cross_entropy_online_over_a_grid(size: Size):
    rows, chunk = size.block(128), size.block(1024)

    def kernel(x_ref, label_ref, o_ref, m_ref, l_ref, picked_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -1e30)
            l_ref[...] = jnp.zeros_like(l_ref)
            picked_ref[...] = jnp.zeros_like(picked_ref)

        x, m = x_ref[...].astype(F32), m_ref[...]
        new = jnp.maximum(m, x.max(axis=1, keepdims=True))
        total = jnp.exp(x - new).sum(axis=1, keepdims=True)
        l_ref[...] = l_ref[...] * jnp.exp(m - new) + total
        m_ref[...] = new
        hot = j * chunk + lax.broadcasted_iota(I32, x.shape, 1) == label_ref[...]
        picked_ref[...] += jnp.where(hot, x, 0.0).sum(axis=1, keepdims=True)

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - picked_ref[...]

    def call(x, y):
        n, width = x.shape
        column = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=Shape((n, 1), F32),
            grid=(n // rows, width // chunk),
            in_specs=[pl.BlockSpec((rows, chunk), lambda i, j: (i, j)), column],
            out_specs=column,
            scratch_shapes=[pltpu.VMEM((rows, 1), F32)] * 3,
        )(x, y)

    return call


def _pairs(size: Size) -> list[Operand]:
    return [matrix(size), matrix(size)]


def _divergence(x, y):
    p, q = (jax.nn.log_softmax(a.astype(F32), axis=-1) for a in (x, y))
    return (jnp.exp(p) * (p - q)).sum(axis=-1, keepdims=True)


@family.form(Problem("KL divergence", _pairs, _divergence))
def kl_divergence_rows(size: Size):
    def kernel(x_ref, y_ref, o_ref):
        p = jax.nn.log_softmax(x_ref[...].astype(F32), axis=-1)
        q = jax.nn.log_softmax(y_ref[...].astype(F32), axis=-1)
        o_ref[...] = jnp.sum(jnp.exp(p) * (p - q), axis=-1, keepdims=True)

    return lambda x, y: row_call(kernel, 4, x, y, out=Shape((x.shape[0], 1), F32))


def _squared(x, y):
    return ((x.astype(F32) - y.astype(F32)) ** 2).sum().reshape(1, 1)


@family.form(Problem("squared error", _pairs, _squared))
def squared_error_into_one_block(size: Size):
    rows = size.block(64)

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        apart = x_ref[...].astype(F32) - y_ref[...].astype(F32)
        o_ref[...] += jnp.sum(apart * apart, keepdims=True)

    return lambda x, y: row_call(kernel, rows, x, y, out=Shape((1, 1), F32))


# --- reductions ---


def _sum_all(x):
    return x.astype(F32).sum().reshape(1, 1)


def _column_sums(x):
    return x.astype(F32).sum(axis=0, keepdims=True)


def _row_max(x):
    return x.max(axis=1, keepdims=True)


SUM = Problem("sum", one, _sum_all)
COLUMNS = Problem("column sums", one, _column_sums)


@family.form(SUM)
def sum_into_one_block(size: Size):
    rows = size.block(64)

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[0, 0] = 0.0

        o_ref[0, 0] += x_ref[...].astype(F32).sum()

    return lambda x: row_call(kernel, rows, x, out=Shape((1, 1), F32))


@family.form(SUM)
def sum_into_lanes_of_scratch(size: Size):
    """A row of partial sums along the grid, added up in the last step."""
    rows = size.block(64)

    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...].astype(F32).sum(axis=0, keepdims=True)

        @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
        def _():
            o_ref[...] = jnp.sum(acc_ref[...], axis=1, keepdims=True)

    def call(x):
        scratch = [pltpu.VMEM((1, x.shape[1]), F32)]
        return row_call(kernel, rows, x, out=Shape((1, 1), F32), scratch=scratch)

    return call


@family.form(COLUMNS)
def column_sums_over_a_sequential_grid(size: Size):
    rows = size.block(128)

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].astype(F32).sum(axis=0, keepdims=True)

    return lambda x: row_call(kernel, rows, x, out=Shape((1, x.shape[1]), F32))


@family.form(COLUMNS)
def column_sums_in_blocks_of_columns(size: Size):
    rows, columns = size.block(256), size.block(256)

    def kernel(x_ref, o_ref, acc_ref):
        i = pl.program_id(1)
        part = x_ref[...].astype(F32).sum(axis=0)
        acc_ref[...] = jnp.where(i == 0, part, acc_ref[...] + part)

        @pl.when(i == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = acc_ref[...][None, :]

    def call(x):
        n, width = x.shape
        return pl.pallas_call(
            kernel,
            out_shape=Shape((1, width), F32),
            grid=(width // columns, n // rows),
            in_specs=[pl.BlockSpec((rows, columns), lambda j, i: (i, j))],
            out_specs=pl.BlockSpec((1, columns), lambda j, i: (0, j)),
            scratch_shapes=[pltpu.VMEM((columns,), F32)],
        )(x)

    return call


@family.form(COLUMNS)
def column_sums_by_a_product_with_ones(size: Size):
    rows = size.block(256)

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        ones = jnp.ones((8, x_ref.shape[0]), x_ref.dtype)
        o_ref[...] += jnp.dot(ones, x_ref[...], preferred_element_type=F32)[:1]

    def call(x):
        n, width = x.shape
        columns = size.block(512)
        return pl.pallas_call(
            kernel,
            out_shape=Shape((1, width), F32),
            grid=(width // columns, n // rows),
            in_specs=[pl.BlockSpec((rows, columns), lambda j, i: (i, j))],
            out_specs=pl.BlockSpec((1, columns), lambda j, i: (0, j)),
        )(x)

    return call


@family.form(Problem("row maximum", one, _row_max))
def row_maximum_over_a_grid(size: Size):
    rows, chunk = size.block(128), size.block(512)

    def kernel(x_ref, o_ref):
        top = x_ref[...].max(axis=1, keepdims=True)

        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = top

        @pl.when(pl.program_id(1) > 0)
        def _():
            o_ref[...] = jnp.maximum(o_ref[...], top)

    def call(x):
        n, width = x.shape
        return pl.pallas_call(
            kernel,
            out_shape=Shape((n, 1), x.dtype),
            grid=(n // rows, width // chunk),
            in_specs=[pl.BlockSpec((rows, chunk), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((rows, 1), lambda i, j: (i, 0)),
        )(x)

    return call


def _moments(x):
    y = x.astype(F32)
    return y.mean(axis=1, keepdims=True), y.var(axis=1, keepdims=True)


@family.form(Problem("moments", one, _moments))
def moments_by_welford_over_a_grid(size: Size):
    rows, chunk = size.block(128), size.block(512)

    def kernel(x_ref, mean_ref, var_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            mean_ref[...] = jnp.zeros_like(mean_ref)
            var_ref[...] = jnp.zeros_like(var_ref)

        x = x_ref[...].astype(F32)
        seen = (j * chunk).astype(F32)
        part = x.mean(axis=1, keepdims=True)
        spread = ((x - part) ** 2).sum(axis=1, keepdims=True)
        apart, every = part - mean_ref[...], seen + chunk
        mean_ref[...] += apart * (chunk / every)
        var_ref[...] += spread + apart * apart * (seen * chunk / every)

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            var_ref[...] /= pl.num_programs(1) * chunk

    def call(x):
        n, width = x.shape
        column = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=(Shape((n, 1), F32),) * 2,
            grid=(n // rows, width // chunk),
            in_specs=[pl.BlockSpec((rows, chunk), lambda i, j: (i, j))],
            out_specs=(column, column),
        )(x)

    return call


def _argmax(x):
    return jnp.argmax(x, axis=1, keepdims=True).astype(I32)


@family.form(Problem("argmax", one, _argmax), grad=False)
def argmax_of_rows(size: Size):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.argmax(x_ref[...].astype(F32), axis=1).astype(I32)[:, None]

    return lambda x: row_call(kernel, 8, x, out=Shape((x.shape[0], 1), I32))


# --- elementwise ---


def _swiglu(x, y):
    x, y = x.astype(F32), y.astype(F32)
    return x * jax.nn.sigmoid(x) * y


@family.form(Problem("silu times", _pairs, lambda x, y: _swiglu(x, y).astype(x.dtype)))
def silu_times_2_d_blocks(size: Size):
    rows, columns = size.block(256), size.block(256)

    def kernel(x_ref, y_ref, o_ref):
        x = x_ref[...].astype(F32)
        y = x / (1.0 + jnp.exp(-x)) * y_ref[...].astype(F32)
        o_ref[...] = y.astype(o_ref.dtype)

    def call(x, y):
        spec = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
        return pl.pallas_call(
            kernel,
            out_shape=Shape(x.shape, x.dtype),
            grid=(x.shape[0] // rows, x.shape[1] // columns),
            in_specs=[spec, spec],
            out_specs=spec,
        )(x, y)

    return call


def _vector(size: Size) -> list[Operand]:
    return [Operand((size(2**26, 2**21, 1000),), size.dtype)] * 2


@family.form(Problem("add vectors", _vector, jnp.add))
def add_vectors_of_1024_masked(size: Size):
    """Triton's first tutorial: a 1-D grid, whole refs, masks at the end."""
    block = size.block(1024)

    def kernel(x_ref, y_ref, o_ref):
        at = pl.program_id(0) * block + jnp.arange(block, dtype=I32)
        inside = at < x_ref.shape[0]
        x = pl.load(x_ref, (at,), mask=inside)
        y = pl.load(y_ref, (at,), mask=inside)
        pl.store(o_ref, (at,), x + y, mask=inside)

    return lambda x, y: pl.pallas_call(
        kernel, out_shape=Shape(x.shape, x.dtype), grid=(pl.cdiv(x.shape[0], block),)
    )(x, y)


def _turned(x):
    return x.T


@family.form(Problem("transpose", one, _turned))
def transpose_of_blocks(size: Size):
    rows, columns = size.block(128), size.block(64)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].T

    def call(x):
        n, width = x.shape
        return pl.pallas_call(
            kernel,
            out_shape=Shape((width, n), x.dtype),
            grid=(n // rows, width // columns),
            in_specs=[pl.BlockSpec((rows, columns), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((columns, rows), lambda i, j: (j, i)),
        )(x)

    return call


def _rotary_operands(size: Size) -> list[Operand]:
    length, heads = size(16384, 512, 16), size(32, 8, 4)
    table = Operand((length, 1, 64), F32)
    return [Operand((length, heads, 128), size.dtype), table, table]


def _rotary(x, sin, cos):
    a, b = x[..., :64].astype(F32), x[..., 64:].astype(F32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


ROTARY = Problem("rotary", _rotary_operands, _rotary)


def _rotary_call(kernel, x, sin, cos):
    heads = x.shape[1]
    spec = pl.BlockSpec((8, heads, 128), lambda i: (i, 0, 0))
    table = pl.BlockSpec((8, 1, 64), lambda i: (i, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=Shape(x.shape, x.dtype),
        grid=(x.shape[0] // 8,),
        in_specs=[spec, table, table],
        out_specs=spec,
    )(x, sin, cos)


@family.form(ROTARY)
def rotary_by_slices_and_concatenate(size: Size):
    def kernel(x_ref, sin_ref, cos_ref, o_ref):
        x, sin, cos = x_ref[...].astype(F32), sin_ref[...], cos_ref[...]
        a, b = x[:, :, :64], x[:, :, 64:]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        o_ref[...] = turned.astype(o_ref.dtype)

    return lambda *x: _rotary_call(kernel, *x)


@family.form(ROTARY)
def rotary_by_two_stores(size: Size):
    def kernel(x_ref, sin_ref, cos_ref, o_ref):
        sin, cos = sin_ref[...], cos_ref[...]
        a, b = x_ref[:, :, :64].astype(F32), x_ref[:, :, 64:].astype(F32)
        o_ref[:, :, :64] = (a * cos - b * sin).astype(o_ref.dtype)
        o_ref[:, :, 64:] = (b * cos + a * sin).astype(o_ref.dtype)

    return lambda *x: _rotary_call(kernel, *x)


def _fifty(x):
    y = x
    for _ in range(50):
        y = jnp.sin(y) + x
    return y


@family.form(
    Problem("50 sin", lambda s: [Operand((s(16384, 512, 32), s(1024, 128, 128)), F32)],
            _fifty)
)  # fmt: skip
def fifty_sines(size: Size):
    def kernel(x_ref, o_ref):
        y = x_ref[...]
        for _ in range(50):
            y = jnp.sin(y) + x_ref[...]
        o_ref[...] = y

    return lambda x: row_call(kernel, 8, x)
