"""Attention and matmuls as different authors spell them.

`attention(style)` and `matmul(style)` give a function of arrays and the shapes to call
it with. What they compute is the same for all styles, up to rounding.
"""

from dataclasses import dataclass, replace
from math import e, log2

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite import tpu as pltpu

f32, bf16 = jnp.float32, jnp.bfloat16
LANES = 128


@dataclass(frozen=True)
class Style:
    """How attention is written; the defaults are what the backends know best."""

    statistics: str = "column"  # column, vector, lanes, repeated
    blocks: str = "squeezed"  # squeezed, leading, flash, indexed
    over: str = "grid"  # grid, fori, while, while_ne, scan
    mask: str = "none"  # none, select, finite, additive, tril
    exp: str = "exp"
    finish: str = "divide"  # divide, reciprocal
    keys: str = "contract"  # contract, transposed, swapped, einsum
    length: int = 512
    width: int = 128
    rows: int = 128
    columns: int = 128
    heads: int = 4
    dtype: object = bf16


class Statistics:
    """Reading and writing one number per row in one of four shapes."""

    def __init__(self, style: Style):
        self.kind, self.rows = style.statistics, style.rows

    @property
    def shape(self):
        wide = {"column": (1,), "vector": (), "lanes": (LANES,), "repeated": (LANES,)}
        return (self.rows, *wide[self.kind])

    def reduce(self, function, x):
        if self.kind == "vector":
            return function(x, axis=1)
        made = function(x, axis=1, keepdims=True)
        if self.kind == "repeated":
            return function(x, axis=1)[:, None]
        return made

    def combined(self, kept, new):
        """What is kept so far, in the form in which `new` can be combined with it."""
        return kept[:, :1] if self.kind == "lanes" else kept

    def along(self, x, n):
        """One number per row, along `n` columns."""
        if self.kind == "vector":
            return x[:, None]
        if self.kind == "repeated":
            if n >= LANES:
                return jnp.tile(x, (1, n // LANES))
            return x[:, :n]
        return x

    def kept(self, x):
        """In the form in which it is stored."""
        return jnp.broadcast_to(x, self.shape) if self.kind == "lanes" else x


def scores_of(style: Style, q, k, i, j):
    if style.keys == "contract":
        dims = (((1,), (1,)), ((), ()))
        s = jax.lax.dot_general(q, k, dims, preferred_element_type=f32)
    elif style.keys == "transposed":
        s = jnp.dot(q, k.T, preferred_element_type=f32)
    elif style.keys == "swapped":
        dims = (((1,), (1,)), ((), ()))
        s = jax.lax.dot_general(k, q, dims, preferred_element_type=f32).T
    else:
        s = jnp.einsum("qd,kd->qk", q, k, preferred_element_type=f32)
    scale = style.width**-0.5
    s = s * (scale * log2(e) if style.exp == "exp2" else scale)
    if style.mask == "none":
        return s
    bq, bk = s.shape
    if style.mask == "tril":
        first = np.tril(np.ones((bq, bk), bool))
        allowed = jnp.where(i == j, first, jnp.full((bq, bk), True))
    else:
        rows = i * bq + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
        columns = j * bk + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
        allowed = rows >= columns
    if style.mask == "additive":
        return s + jnp.where(allowed, 0.0, -1e30)
    return jnp.where(allowed, s, -jnp.inf if style.mask == "select" else -1e30)


def absorb(style: Style, state, q, k, v, i, j):
    """The running softmax after one more block of keys."""
    form = Statistics(style)
    exp = jnp.exp2 if style.exp == "exp2" else jnp.exp
    most, total, out = state
    s = scores_of(style, q, k, i, j)
    if form.kind == "repeated":  # as JAX's flash_attention has it
        new = jnp.maximum(most, form.reduce(jnp.max, s))
        p = exp(s - form.along(new, s.shape[1]))
        shrink = exp(most - new)
        total = shrink * total + form.reduce(jnp.sum, p)
        weighted = jnp.dot(p.astype(v.dtype), v, preferred_element_type=f32)
        return new, total, out * form.along(shrink, out.shape[1]) + weighted
    old = form.combined(most, s)
    new = jnp.maximum(old, form.reduce(jnp.max, s))
    p = exp(s - form.along(new, s.shape[1]))
    shrink = exp(old - new)
    total = shrink * form.combined(total, p) + form.reduce(jnp.sum, p)
    weighted = jnp.dot(p.astype(v.dtype), v, preferred_element_type=f32)
    out = out * form.along(shrink, out.shape[1]) + weighted
    return form.kept(new), form.kept(total), out


def finished(style: Style, state):
    form = Statistics(style)
    _, total, out = state
    total = form.along(form.combined(total, out), out.shape[1])
    return out * (1.0 / total) if style.finish == "reciprocal" else out / total


def started(style: Style):
    shape = Statistics(style).shape
    return (
        jnp.full(shape, -1e30, f32),
        jnp.zeros(shape, f32),
        jnp.zeros((style.rows, style.width), f32),
    )


def _read(style: Style, ref, *at):
    if style.blocks == "squeezed":
        return ref[(*at, slice(None))] if at else ref[...]
    whole = (*at, slice(None)) if at else (slice(None), slice(None))
    return ref[(0,) * (len(ref.shape) - 2) + whole]


def _write(style: Style, ref, value):
    lead = len(ref.shape) - 2
    ref[(0,) * lead + (slice(None), slice(None))] = value.astype(ref.dtype)


def grid_kernel(style, q_ref, k_ref, v_ref, o_ref, *state):
    lead = len(style_grid(style)) - 2
    i, j = pl.program_id(lead), pl.program_id(lead + 1)

    @pl.when(j == 0)
    def _():
        for ref, value in zip(state, started(style), strict=True):
            ref[...] = value

    def step():
        q, k, v = (_read(style, r) for r in (q_ref, k_ref, v_ref))
        new = absorb(style, [r[...] for r in state], q, k, v, i, j)
        for ref, value in zip(state, new, strict=True):
            ref[...] = value

    if style.mask == "none":
        step()
    else:
        pl.when(j * style.columns < (i + 1) * style.rows)(step)

    @pl.when(j == pl.num_programs(lead + 1) - 1)
    def _():
        _write(style, o_ref, finished(style, [r[...] for r in state]))


def loop_kernel(style, q_ref, k_ref, v_ref, o_ref):
    i = pl.program_id(len(style_grid(style)) - 1)
    q = _read(style, q_ref)
    count = style.length // style.columns
    if style.mask != "none":
        count = pl.cdiv((i + 1) * style.rows, style.columns)

    def step(j, state):
        at = pl.ds(j * style.columns, style.columns)
        k, v = _read(style, k_ref, at), _read(style, v_ref, at)
        return absorb(style, state, q, k, v, i, j)

    state = started(style)
    if style.over == "fori":
        state = jax.lax.fori_loop(0, count, step, state)
    elif style.over == "scan":
        state, _ = jax.lax.scan(
            lambda s, j: (step(j, s), None), state, jnp.arange(count)
        )
    else:
        more = {"while": lambda c: c[0] < count, "while_ne": lambda c: c[0] != count}
        body = lambda c: (c[0] + 1, step(c[0], c[1]))
        _, state = jax.lax.while_loop(more[style.over], body, (0, state))
    _write(style, o_ref, finished(style, state))


def style_grid(style: Style):
    lead = (1, style.heads) if style.blocks == "flash" else (style.heads,)
    rows, columns = style.length // style.rows, style.length // style.columns
    return (*lead, rows, columns) if style.over == "grid" else (*lead, rows)


def attention(style: Style):
    """A function of q, k and v, and their shapes."""
    lead = {"squeezed": (None,), "leading": (1,), "indexed": (1,), "flash": (1, 1)}
    unit = lead[style.blocks]
    count = len(unit)

    def spec(n, *, keys):
        def index(*ids):
            at = ids[count + 1] if keys else ids[count]
            return (*ids[:count], at, 0)

        def whole(*ids):
            return (*ids[:count], 0, 0)

        is_whole = keys and style.over != "grid"
        size = style.length if is_whole else n
        return pl.BlockSpec((*unit, size, style.width), whole if is_whole else index)

    shape = (style.heads, style.length, style.width)
    shape = (1, *shape) if style.blocks == "flash" else shape
    spec_q, spec_k = spec(style.rows, keys=False), spec(style.columns, keys=True)
    statistics = pltpu.VMEM(Statistics(style).shape, f32)
    scratch = [statistics, statistics, pltpu.VMEM((style.rows, style.width), f32)]
    kernel = grid_kernel if style.over == "grid" else loop_kernel

    def run(q, k, v):
        return pl.pallas_call(
            lambda *refs: kernel(style, *refs),
            out_shape=jax.ShapeDtypeStruct(shape, style.dtype),
            grid=style_grid(style),
            in_specs=[spec_q, spec_k, spec_k],
            out_specs=spec_q,
            scratch_shapes=scratch if style.over == "grid" else (),
            name="attention",
        )(q, k, v)

    return run, [jax.ShapeDtypeStruct(shape, style.dtype)] * 3


PLAIN = Style()
STYLES = {
    "plain": PLAIN,
    "vector": replace(PLAIN, statistics="vector"),
    "lanes": replace(PLAIN, statistics="lanes"),
    "repeated": replace(PLAIN, statistics="repeated"),
    "leading": replace(PLAIN, blocks="leading"),
    "flash": replace(PLAIN, blocks="flash", statistics="repeated", rows=256),
    "transposed": replace(PLAIN, keys="transposed"),
    "swapped": replace(PLAIN, keys="swapped"),
    "einsum": replace(PLAIN, keys="einsum"),
    "exp2": replace(PLAIN, exp="exp2"),
    "reciprocal": replace(PLAIN, finish="reciprocal"),
    "fori": replace(PLAIN, over="fori"),
    "while": replace(PLAIN, over="while"),
    "while_ne": replace(PLAIN, over="while_ne"),
    "scan": replace(PLAIN, over="scan"),
    "fori_lanes": replace(PLAIN, over="fori", statistics="lanes"),
    "fori_vector": replace(PLAIN, over="fori", statistics="vector"),
    "while_vector": replace(PLAIN, over="while", statistics="vector"),
    "select": replace(PLAIN, mask="select"),
    "finite": replace(PLAIN, mask="finite"),
    "additive": replace(PLAIN, mask="additive"),
    "tril": replace(PLAIN, mask="tril"),
    "while_causal": replace(PLAIN, over="while", mask="finite"),
    "fori_causal": replace(PLAIN, over="fori", mask="finite"),
}


def batched_matmul(style: str, m=512, n=512, k=256, batch=4, dtype=bf16):
    """Products of stacks of matrices, blocks (128, 128, 64)."""
    bm, bn, bk = 128, 128, 64
    lead = None if style == "squeezed" else 1

    def kernel(x_ref, w_ref, o_ref, sums):
        @pl.when(pl.program_id(3) == 0)
        def _():
            sums[...] = jnp.zeros_like(sums)

        if style == "indexed":
            sums[...] += jnp.dot(x_ref[0], w_ref[0], preferred_element_type=f32)
        elif style == "einsum":
            sums[...] += jnp.einsum(
                "bmk,bkn->bmn", x_ref[...], w_ref[...], preferred_element_type=f32
            )
        else:
            x, w = x_ref[...], w_ref[...]
            sums[...] += jnp.matmul(x, w, preferred_element_type=f32)

        @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
        def _():
            value = sums[...].astype(o_ref.dtype)
            o_ref[...] = value[None] if style == "indexed" else value

    rank3 = style in ("rank3", "einsum")

    def run(x, w):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((batch, m, n), dtype),
            grid=(batch, m // bm, n // bn, k // bk),
            in_specs=[
                pl.BlockSpec((lead, bm, bk), lambda b, i, j, l: (b, i, l)),
                pl.BlockSpec((lead, bk, bn), lambda b, i, j, l: (b, l, j)),
            ],
            out_specs=pl.BlockSpec((lead, bm, bn), lambda b, i, j, l: (b, i, j)),
            scratch_shapes=[pltpu.VMEM((1, bm, bn) if rank3 else (bm, bn), f32)],
            name="matmul",
        )(x, w)

    x, w = (batch, m, k), (batch, k, n)
    return run, [jax.ShapeDtypeStruct(s, dtype) for s in (x, w)]


MATMULS = ("squeezed", "indexed", "rank3", "einsum")
