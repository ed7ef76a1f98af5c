"""Attention held out: spellings of people who never saw the forms beside."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Family, Operand, Problem, Shape, Size

family = Family("held-out attention")
NEG = float(np.finfo(np.float32).min)


def sds(like: Any, *shape: int, dtype: Any = None) -> Any:
    return Shape(tuple(shape) or like.shape, dtype or like.dtype)


# --- (batch, length, heads, depth), causal ---


def _blhd(size: Size, heads: int = 16, depth: int = 128) -> list[Operand]:
    batch, length = size(4, 1, 2), size(2048, 1024, 64)
    heads = size(heads, 4, 2)
    return [Operand((batch, length, heads, depth), size.dtype)] * 3


def _causal_blhd(q, k, v):
    s = jnp.einsum("blhd,bmhd->bhlm", q, k, preferred_element_type=F32)
    s = s * q.shape[-1] ** -0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e30)
    p = jax.nn.softmax(s).astype(v.dtype)
    return jnp.einsum("bhlm,bmhd->blhd", p, v)


CAUSAL_BLHD = Problem(
    "held-out causal attention, heads third",
    _blhd,
    _causal_blhd,
    rival=partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"),
    rival_operands=lambda *operands: operands,
)


@family.form(CAUSAL_BLHD, "BLHD, heads squeezed, statistics in a tuple")
def _(size: Size):
    bq, bk = size.block(128), size.block(64)

    def kernel(q_ref, k_ref, v_ref, o_ref, *, scale):
        row = pl.program_id(2) * bq + lax.broadcasted_iota(I32, (bq, bk), 0)
        q = q_ref[...]

        def body(j, carry):
            acc, m, l = carry
            k = k_ref[pl.ds(j * bk, bk), :]
            v = v_ref[pl.ds(j * bk, bk), :]
            s = jnp.dot(q, k.T, preferred_element_type=F32) * scale
            col = j * bk + lax.broadcasted_iota(I32, (bq, bk), 1)
            s = jnp.where(row >= col, s, NEG)
            m_new = jnp.maximum(m, s.max(axis=1))
            alpha = jnp.exp(m - m_new)
            p = jnp.exp(s - m_new[:, None])
            l = l * alpha + p.sum(axis=1)
            acc = acc * alpha[:, None]
            acc += jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32)
            return acc, m_new, l

        start = (
            jnp.zeros((bq, q.shape[-1]), F32),
            jnp.full((bq,), -jnp.inf, F32),
            jnp.zeros((bq,), F32),
        )
        stop = pl.cdiv((pl.program_id(2) + 1) * bq, bk)
        acc, _, l = lax.fori_loop(0, stop, body, start)
        o_ref[...] = (acc / l[:, None]).astype(o_ref.dtype)

    def function(q, k, v):
        b, n, h, d = q.shape
        some = pl.BlockSpec((None, bq, None, d), lambda b, h, i: (b, i, h, 0))
        every = pl.BlockSpec((None, n, None, d), lambda b, h, i: (b, 0, h, 0))
        return pl.pallas_call(
            partial(kernel, scale=d**-0.5),
            out_shape=sds(q),
            grid=(b, h, n // bq),
            in_specs=[some, every, every],
            out_specs=some,
        )(q, k, v)

    return function


@family.form(CAUSAL_BLHD, "BLHD, all heads of a block of rows, einsum over heads")
def _(size: Size):
    bq, bk = size.block(64), size.block(64)

    def kernel(q_ref, k_ref, v_ref, o_ref, acc, m_ref, l_ref):
        i, j = pl.program_id(1), pl.program_id(2)

        @pl.when(j == 0)
        def start():
            acc[:] = jnp.zeros_like(acc)
            m_ref[:] = jnp.full_like(m_ref, -1e30)
            l_ref[:] = jnp.zeros_like(l_ref)

        @pl.when(j * bk < (i + 1) * bq)
        def step():
            q, k, v = q_ref[0], k_ref[0], v_ref[0]
            s = jnp.einsum("lhd,mhd->hlm", q, k, preferred_element_type=F32)
            s *= q.shape[-1] ** -0.5
            row = i * bq + lax.broadcasted_iota(I32, s.shape, 1)
            col = j * bk + lax.broadcasted_iota(I32, s.shape, 2)
            s = jnp.where(col <= row, s, -1e30)
            m_new = jnp.maximum(m_ref[...], s.max(-1, keepdims=True))
            alpha = jnp.exp(m_ref[...] - m_new)
            p = jnp.exp(s - m_new)
            l_ref[...] = alpha * l_ref[...] + p.sum(-1, keepdims=True)
            m_ref[...] = m_new
            pv = jnp.einsum(
                "hlm,mhd->hld", p.astype(v.dtype), v, preferred_element_type=F32
            )
            acc[...] = alpha * acc[...] + pv

        @pl.when(j == pl.num_programs(2) - 1)
        def finish():
            out = acc[...] / l_ref[...]
            o_ref[0] = jnp.swapaxes(out, 0, 1).astype(o_ref.dtype)

    def function(q, k, v):
        b, n, h, d = q.shape
        q_spec = pl.BlockSpec((1, bq, h, d), lambda b, i, j: (b, i, 0, 0))
        k_spec = pl.BlockSpec((1, bk, h, d), lambda b, i, j: (b, j, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(q),
            grid=(b, n // bq, n // bk),
            in_specs=[q_spec, k_spec, k_spec],
            out_specs=q_spec,
            scratch_shapes=[
                pltpu.VMEM((h, bq, d), F32),
                pltpu.VMEM((h, bq, 1), F32),
                pltpu.VMEM((h, bq, 1), F32),
            ],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
        )(q, k, v)

    return function


class State(NamedTuple):
    m: Any
    l: Any
    acc: Any


@family.form(CAUSAL_BLHD, "BLHD, NamedTuple of rows, scores transposed, lax.cond")
def _(size: Size):
    bq, bk = size.block(128), size.block(128)

    def kernel(q_ref, k_ref, v_ref, o_ref):
        i = pl.program_id(2)
        q = q_ref[0, :, 0] * jnp.asarray(q_ref.shape[-1] ** -0.5, q_ref.dtype)

        def masked(s, j):
            col = j * bk + lax.broadcasted_iota(I32, s.shape, 0)
            row = i * bq + lax.broadcasted_iota(I32, s.shape, 1)
            return jnp.where(row >= col, s, -jnp.inf)

        def visit(j, state: State) -> State:
            k = k_ref[0, pl.ds(j * bk, bk), 0]
            v = v_ref[0, pl.ds(j * bk, bk), 0]
            s = lax.dot_general(k, q, (((1,), (1,)), ((), ())), None, F32)
            s = lax.cond((j + 1) * bk > i * bq, lambda: masked(s, j), lambda: s)
            m = jnp.maximum(state.m, jnp.max(s, axis=0, keepdims=True))  # (1, bq)
            p = jnp.exp(s - m)
            alpha = jnp.exp(state.m - m)
            l = alpha * state.l + jnp.sum(p, axis=0, keepdims=True)
            pv = lax.dot_general(
                p.astype(v.dtype), v, (((0,), (0,)), ((), ())), None, F32
            )
            return State(m, l, state.acc * alpha.T + pv)

        def body(j, state):
            return lax.cond(j * bk < (i + 1) * bq, visit, lambda j, s: s, j, state)

        d = q.shape[1]
        state = State(
            jnp.full((1, bq), -1e30, F32),
            jnp.zeros((1, bq), F32),
            jnp.zeros((bq, d), F32),
        )
        state = lax.fori_loop(0, k_ref.shape[1] // bk, body, state)
        o_ref[0, :, 0] = (state.acc / state.l.T).astype(o_ref.dtype)

    def function(q, k, v):
        b, n, h, d = q.shape
        some = pl.BlockSpec((1, bq, 1, d), lambda h, b, i: (b, i, h, 0))
        every = pl.BlockSpec((1, n, 1, d), lambda h, b, i: (b, 0, h, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(q),
            grid=(h, b, n // bq),
            in_specs=[some, every, every],
            out_specs=some,
        )(q, k, v)

    return function


@family.form(CAUSAL_BLHD, "BLHD, one head in a kernel, vmapped over heads and batch")
def _(size: Size):
    bq, bk = size.block(128), size.block(128)

    def kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        qi, ki = pl.program_id(0), pl.program_id(1)

        @pl.when(ki == 0)
        def _():
            m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
            l_ref[...] = jnp.zeros(l_ref.shape)
            acc_ref[...] = jnp.zeros(acc_ref.shape)

        def run():
            s = pl.dot(q_ref[...], k_ref[...], trans_b=True).astype(F32)
            s = s / np.sqrt(q_ref.shape[-1])
            q_pos = qi * bq + jnp.arange(bq)[:, None]
            k_pos = ki * bk + jnp.arange(bk)[None, :]
            s = jnp.where(q_pos >= k_pos, s, -1e9)
            m_prev, l_prev = m_ref[:, :1], l_ref[:, :1]
            m_next = jnp.maximum(m_prev, jnp.max(s, 1, keepdims=True))
            correction = jnp.exp(m_prev - m_next)
            p = jnp.exp(s - m_next)
            l_next = correction * l_prev + jnp.sum(p, 1, keepdims=True)
            m_ref[...] = jnp.broadcast_to(m_next, m_ref.shape)
            l_ref[...] = jnp.broadcast_to(l_next, l_ref.shape)
            acc_ref[...] = acc_ref[...] * correction + pl.dot(
                p.astype(v_ref.dtype), v_ref[...]
            ).astype(F32)

        pl.when(ki * bk <= qi * bq + bq - 1)(run)

        @pl.when(ki == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = (acc_ref[...] / l_ref[:, :1]).astype(o_ref.dtype)

    def head(q, k, v):
        n, d = q.shape
        return pl.pallas_call(
            kernel,
            out_shape=sds(q),
            grid=(n // bq, n // bk),
            in_specs=[
                pl.BlockSpec((bq, d), lambda i, j: (i, 0)),
                pl.BlockSpec((bk, d), lambda i, j: (j, 0)),
                pl.BlockSpec((bk, d), lambda i, j: (j, 0)),
            ],
            out_specs=pl.BlockSpec((bq, d), lambda i, j: (i, 0)),
            scratch_shapes=[
                pltpu.VMEM((bq, 128), F32),
                pltpu.VMEM((bq, 128), F32),
                pltpu.VMEM((bq, d), F32),
            ],
        )(q, k, v)

    return lambda *qkv: jax.vmap(jax.vmap(head, 1, 1))(*qkv)


# --- one operand with q, k and v side by side, as in nanoGPT ---


def _packed_reference(qkv, *, heads):
    b, n, width = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(b, n, 3, heads, -1), 2, 0)
    return _causal_blhd(q, k, v).reshape(b, n, width // 3)


PACKED = Problem(
    "held-out attention of packed qkv",
    lambda size: [
        Operand((size(8, 1, 2), size(1024, 512, 64), 3 * 16 * 64), size.dtype)
    ],
    partial(_packed_reference, heads=16),
)


@family.form(PACKED, "packed qkv given three times, four dimensional grid")
def _(size: Size):
    bq, bk, heads, d = size.block(128), size.block(128), 16, 64
    # Two heads share a block of 128 lanes.

    def kernel(q_ref, k_ref, v_ref, o_ref, m, l, acc):
        i, j = pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _():
            m[...] = jnp.full(m.shape, -1e30, F32)
            l[...] = jnp.zeros(l.shape, F32)
            acc[...] = jnp.zeros(acc.shape, F32)

        @pl.when(j <= i)
        def _():
            for h in range(2):
                lanes = slice(h * d, (h + 1) * d)
                s = jnp.dot(
                    q_ref[:, lanes], k_ref[:, lanes].T, preferred_element_type=F32
                )
                row = i * bq + lax.broadcasted_iota(I32, (bq, bk), 0)
                col = j * bk + lax.broadcasted_iota(I32, (bq, bk), 1)
                s = jnp.where(row >= col, s * d**-0.5, -1e30)
                m_new = jnp.maximum(m[h], s.max(1))
                p = jnp.exp(s - m_new[:, None])
                alpha = jnp.exp(m[h] - m_new)
                l[h] = l[h] * alpha + p.sum(1)
                m[h] = m_new
                acc[:, lanes] = acc[:, lanes] * alpha[:, None] + jnp.dot(
                    p.astype(v_ref.dtype), v_ref[:, lanes], preferred_element_type=F32
                )

        @pl.when(j == pl.num_programs(3) - 1)
        def _():
            for h in range(2):
                lanes = slice(h * d, (h + 1) * d)
                o_ref[:, lanes] = (acc[:, lanes] / l[h][:, None]).astype(o_ref.dtype)

    def function(qkv):
        b, n, _ = qkv.shape
        pairs = heads // 2
        k_at = lambda off: lambda b, h, i, j: (b, jnp.minimum(i, j), h + off)
        return pl.pallas_call(
            kernel,
            out_shape=sds(qkv, b, n, heads * d),
            grid=(b, pairs, n // bq, n // bk),
            in_specs=[
                pl.BlockSpec((None, bq, 2 * d), lambda b, h, i, j: (b, i, h)),
                pl.BlockSpec((None, bk, 2 * d), k_at(pairs)),
                pl.BlockSpec((None, bk, 2 * d), k_at(2 * pairs)),
            ],
            out_specs=pl.BlockSpec((None, bq, 2 * d), lambda b, h, i, j: (b, i, h)),
            scratch_shapes=[
                pltpu.VMEM((2, bq), F32),
                pltpu.VMEM((2, bq), F32),
                pltpu.VMEM((bq, 2 * d), F32),
            ],
        )(qkv, qkv, qkv)

    return function


# --- (batch, heads, length, depth), with logsumexp ---


def _bhld(size: Size) -> list[Operand]:
    shape = (size(2, 1, 2), size(16, 2, 2), size(4096, 512, 64), 64)
    return [Operand(shape, size.dtype)] * 3


def _with_lse(q, k, v):
    s = jnp.einsum("bhld,bhmd->bhlm", q, k, preferred_element_type=F32)
    s = s * q.shape[-1] ** -0.5
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - lse[..., None]).astype(v.dtype)
    return jnp.einsum("bhlm,bhmd->bhld", p, v), lse


LSE = Problem("held-out attention and logsumexp", _bhld, _with_lse)


@family.form(LSE, "while loop over blocks, dict of state, k transposed outside")
def _(size: Size):
    bq, bk = size.block(256), size.block(32)

    def kernel(q_ref, kt_ref, v_ref, o_ref, lse_ref):
        q, n = q_ref[0, 0], v_ref.shape[2]

        def cond(state):
            return state["at"] < n

        def body(state):
            at = pl.multiple_of(state["at"], bk)
            s = q @ kt_ref[0, 0, :, pl.ds(at, bk)]
            s = s.astype(F32) * q.shape[-1] ** -0.5
            m = jnp.maximum(state["m"], s.max(axis=-1, keepdims=True))
            p = jnp.exp(s - m)
            scale = jnp.exp(state["m"] - m)
            v = v_ref[0, 0, pl.ds(at, bk)]
            return {
                "at": at + bk,
                "m": m,
                "l": state["l"] * scale + p.sum(axis=-1, keepdims=True),
                "o": state["o"] * scale
                + jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32),
            }

        state = {
            "at": jnp.int32(0),
            "m": jnp.full((bq, 1), -1e30),
            "l": jnp.zeros((bq, 1)),
            "o": jnp.zeros(q.shape, F32),
        }
        state = lax.while_loop(cond, body, state)
        o_ref[0, 0] = (state["o"] / state["l"]).astype(o_ref.dtype)
        lse_ref[0, 0] = (state["m"] + jnp.log(state["l"]))[:, 0]

    def function(q, k, v):
        b, h, n, d = q.shape
        return pl.pallas_call(
            kernel,
            out_shape=(sds(q), sds(q, b, h, n, dtype=F32)),
            grid=(b, h, n // bq),
            in_specs=[
                pl.BlockSpec((1, 1, bq, d), lambda b, h, i: (b, h, i, 0)),
                pl.BlockSpec((1, 1, d, n), lambda b, h, i: (b, h, 0, 0)),
                pl.BlockSpec((1, 1, n, d), lambda b, h, i: (b, h, 0, 0)),
            ],
            out_specs=(
                pl.BlockSpec((1, 1, bq, d), lambda b, h, i: (b, h, i, 0)),
                pl.BlockSpec((1, 1, bq), lambda b, h, i: (b, h, i)),
            ),
        )(q, jnp.swapaxes(k, -1, -2), v)

    return function


@family.form(LSE, "whole score rows in a block, largest score and lse as columns")
def _(size: Size):
    bq = size.block(32)

    def kernel(q_ref, k_ref, v_ref, o_ref, lse_ref):
        s = jax.lax.dot_general(
            q_ref[...],
            k_ref[...],
            dimension_numbers=(((1,), (1,)), ((), ())),
            preferred_element_type=F32,
        )
        s = s * (q_ref.shape[-1] ** -0.5)
        m = jnp.max(s, axis=-1, keepdims=True)
        e = jnp.exp(s - m)
        z = jnp.sum(e, axis=-1, keepdims=True)
        o = jnp.dot((e / z).astype(v_ref.dtype), v_ref[...])
        o_ref[...] = o.astype(o_ref.dtype)
        lse_ref[...] = m + jnp.log(z)

    def function(q, k, v):
        b, h, n, d = q.shape
        flat = lambda x: x.reshape(b * h, n, d)
        o, lse = pl.pallas_call(
            kernel,
            out_shape=[sds(q, b * h, n, d), sds(q, b * h, n, 1, dtype=F32)],
            grid=(n // bq, b * h),
            in_specs=[
                pl.BlockSpec((pl.Squeezed(), bq, d), lambda i, g: (g, i, 0)),
                pl.BlockSpec((pl.Squeezed(), n, d), lambda i, g: (g, 0, 0)),
                pl.BlockSpec((pl.Squeezed(), n, d), lambda i, g: (g, 0, 0)),
            ],
            out_specs=[
                pl.BlockSpec((pl.Squeezed(), bq, d), lambda i, g: (g, i, 0)),
                pl.BlockSpec((pl.Squeezed(), bq, 1), lambda i, g: (g, i, 0)),
            ],
        )(flat(q), flat(k), flat(v))
        return o.reshape(q.shape), lse.reshape(b, h, n)

    return function


# --- biases, dropout, soft caps, windows, segments ---


def _alibi(q, k, v):
    h, n = q.shape[1], q.shape[2]
    s = jnp.einsum("bhld,bhmd->bhlm", q, k, preferred_element_type=F32)
    slope = 2.0 ** (-8.0 * (jnp.arange(h) + 1) / h)
    along = jnp.arange(n)
    s = s * q.shape[-1] ** -0.5 - slope[:, None, None] * jnp.abs(
        along[:, None] - along[None]
    )
    p = jax.nn.softmax(s).astype(v.dtype)
    return jnp.einsum("bhlm,bhmd->bhld", p, v)


ALIBI = Problem("held-out attention with ALiBi", _bhld, _alibi)


@family.form(ALIBI, "ALiBi from program ids, k blocks of 512, statistics (n, 128)")
def _(size: Size):
    bq, bk = size.block(512), size.block(128)

    def kernel(q_ref, k_ref, v_ref, o_ref, m_scr, l_scr, acc_scr, *, heads):
        _, h, qi, kj = (pl.program_id(n) for n in range(4))

        @pl.when(kj == 0)
        def _init():
            m_scr[...] = jnp.full_like(m_scr, NEG)
            l_scr[...] = jnp.zeros_like(l_scr)
            acc_scr[...] = jnp.zeros_like(acc_scr)

        slope = jnp.exp2(-8.0 * (h + 1).astype(F32) / heads)
        s = lax.dot_general(
            q_ref[...], k_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=F32
        )
        gap = (qi * bq - kj * bk) + (
            lax.broadcasted_iota(I32, s.shape, 0)
            - lax.broadcasted_iota(I32, s.shape, 1)
        )
        s = s * q_ref.shape[-1] ** -0.5 - slope * jnp.abs(gap).astype(F32)
        m_prev = m_scr[...]
        m_curr = jnp.max(s, axis=1)[:, None]
        m_next = jnp.maximum(m_prev, m_curr)  # (bq, 128)
        p = jnp.exp(s - jnp.tile(m_next, (1, -(-bk // 128)))[:, :bk])
        alpha = jnp.exp(m_prev - m_next)
        l_scr[...] = alpha * l_scr[...] + jnp.sum(p, axis=1)[:, None]
        m_scr[...] = m_next
        d = q_ref.shape[-1]
        acc_scr[...] = acc_scr[...] * alpha[:, :d] + jnp.dot(
            p.astype(v_ref.dtype), v_ref[...], preferred_element_type=F32
        )

        @pl.when(kj == pl.num_programs(3) - 1)
        def _end():
            o_ref[...] = (acc_scr[...] / l_scr[:, :d]).astype(o_ref.dtype)

    def function(q, k, v):
        b, h, n, d = q.shape
        q_spec = pl.BlockSpec((None, None, bq, d), lambda b, h, i, j: (b, h, i, 0))
        k_spec = pl.BlockSpec((None, None, bk, d), lambda b, h, i, j: (b, h, j, 0))
        return pl.pallas_call(
            partial(kernel, heads=h),
            out_shape=sds(q),
            grid=(b, h, n // bq, n // bk),
            in_specs=[q_spec, k_spec, k_spec],
            out_specs=q_spec,
            scratch_shapes=[
                pltpu.VMEM((bq, 128), F32),
                pltpu.VMEM((bq, 128), F32),
                pltpu.VMEM((bq, d), F32),
            ],
        )(q, k, v)

    return function


def mixed(x):
    """A hash of 32 bits, by multiplications and shifts."""
    x = x.astype(jnp.uint32)
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _dropped(q, k, v):
    b, h, n, _ = q.shape
    s = jnp.einsum("bhld,bhmd->bhlm", q, k, preferred_element_type=F32)
    p = jax.nn.softmax(s * q.shape[-1] ** -0.5)
    at = jnp.arange(b * h * n, dtype=jnp.uint32).reshape(b, h, n, 1) * jnp.uint32(n)
    bits = mixed(at + jnp.arange(n, dtype=jnp.uint32))
    p = jnp.where(bits >= jnp.uint32(429496729), p / 0.9, 0).astype(v.dtype)
    return jnp.einsum("bhlm,bhmd->bhld", p, v)


@family.form(
    Problem("held-out attention with dropout", _bhld, _dropped),
    "dropout by a hash of the position, fori over blocks",
)
def _(size: Size):
    bq, bk = size.block(128), size.block(64)

    def kernel(q_ref, k_ref, v_ref, o_ref):
        head, i = pl.program_id(0), pl.program_id(1)
        q = q_ref[0]
        n = k_ref.shape[1]
        rows = (head * n + i * bq + jnp.arange(bq)).astype(jnp.uint32)

        def body(j, c):
            acc, m, l = c
            at = pl.ds(j * bk, bk)
            s = pl.dot(q, k_ref[0, at].T) * q.shape[-1] ** -0.5
            new = jnp.maximum(m, s.max(-1))
            p = jnp.exp(s - new[:, None])
            fix = jnp.exp(m - new)
            l = fix * l + p.sum(-1)
            cols = (j * bk + jnp.arange(bk)).astype(jnp.uint32)
            bits = mixed(rows[:, None] * jnp.uint32(n) + cols[None])
            p = jnp.where(bits >= jnp.uint32(429496729), p / 0.9, 0.0)
            v = v_ref[0, at]
            return acc * fix[:, None] + pl.dot(p.astype(v.dtype), v), new, l

        acc, _, l = lax.fori_loop(
            0,
            n // bk,
            body,
            (jnp.zeros(q.shape, F32), jnp.full(bq, -1e30), jnp.zeros(bq)),
        )
        o_ref[0] = (acc / l[:, None]).astype(o_ref.dtype)

    def function(q, k, v):
        b, h, n, d = q.shape
        flat = [x.reshape(b * h, n, d) for x in (q, k, v)]
        whole = pl.BlockSpec((1, n, d), lambda g, i: (g, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(q, b * h, n, d),
            grid=(b * h, n // bq),
            in_specs=[pl.BlockSpec((1, bq, d), lambda g, i: (g, i, 0)), whole, whole],
            out_specs=pl.BlockSpec((1, bq, d), lambda g, i: (g, i, 0)),
        )(*flat).reshape(q.shape)

    return function


WINDOW = {"model": 1024, "part": 128, "cpu": 128, "tiny": 20}


def _gemma(q, k, v, *, window):
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    n = q.shape[2]
    s = jnp.einsum("bhld,bhmd->bhlm", q, k, preferred_element_type=F32)
    s = 50.0 * jnp.tanh(s * q.shape[-1] ** -0.5 / 50.0)
    gap = jnp.arange(n)[:, None] - jnp.arange(n)[None]
    s = jnp.where((gap >= 0) & (gap < window), s, -2.3e38)
    return jnp.einsum("bhlm,bhmd->bhld", jax.nn.softmax(s).astype(v.dtype), v)


def _gqa(size: Size) -> list[Operand]:
    b, n, d = size(1, 1, 2), size(4096, 512, 64), 128
    q = Operand((b, size(16, 4, 4), n, d), size.dtype)
    return [q, *[Operand((b, size(8, 2, 2), n, d), size.dtype)] * 2]


def _gemma_any(q, k, v):
    n = q.shape[2]
    window = {4096: 1024, 512: 128, 64: 20}[n]
    return _gemma(q, k, v, window=window)


@family.form(
    Problem("held-out soft cap, window, grouped heads", _gqa, _gemma_any),
    "soft cap and window, blocks visited by a shifted index map",
)
def _(size: Size):
    bq, bk, window = size.block(128), size.block(128), WINDOW[size.name]
    back = pl.cdiv(window - 1, bk) + 1  # blocks of k that a block of q reaches

    def kernel(q_ref, k_ref, v_ref, o_ref, acc_ref, m_ref, l_ref):
        i, t = pl.program_id(2), pl.program_id(3)
        block = i + t - (back - 1)
        group, _, d = q_ref.shape

        @pl.when(t == 0)
        def _():
            m_ref[...] = jnp.full(m_ref.shape, -2.3e38)
            l_ref[...] = jnp.zeros(l_ref.shape)
            acc_ref[...] = jnp.zeros(acc_ref.shape)

        @pl.when(block >= 0)
        def _():
            q = q_ref[...].reshape(group * bq, d)
            s = jnp.dot(q, k_ref[...].T, preferred_element_type=F32)
            s = (50.0 * jnp.tanh(s * d**-0.5 / 50.0)).reshape(group, bq, bk)
            row = i * bq + lax.broadcasted_iota(I32, s.shape, 1)
            col = block * bk + lax.broadcasted_iota(I32, s.shape, 2)
            keep = jnp.logical_and(col <= row, row - col < window)
            s = jnp.where(keep, s, -2.3e38).reshape(group * bq, bk)
            m = jnp.maximum(m_ref[...], s.max(axis=1, keepdims=True))
            p = jnp.where(s > -1e38, jnp.exp(s - m), 0.0)
            fix = jnp.exp(m_ref[...] - m)
            m_ref[...] = m
            l_ref[...] = fix * l_ref[...] + p.sum(axis=1, keepdims=True)
            acc_ref[...] = fix * acc_ref[...] + jnp.dot(
                p.astype(v_ref.dtype), v_ref[...], preferred_element_type=F32
            )

        @pl.when(t == back - 1)
        def _():
            out = (acc_ref[...] / l_ref[...]).reshape(group, bq, d)
            o_ref[...] = out.astype(o_ref.dtype)

    def function(q, k, v):
        b, h, n, d = q.shape
        kv = k.shape[1]
        group = h // kv
        q = q.reshape(b, kv, group, n, d)
        q_spec = pl.BlockSpec(
            (None, None, group, bq, d), lambda b, h, i, t: (b, h, 0, i, 0)
        )
        k_spec = pl.BlockSpec(
            (None, None, bk, d),
            lambda b, h, i, t: (b, h, jnp.maximum(i + t - (back - 1), 0), 0),
        )
        out = pl.pallas_call(
            kernel,
            out_shape=sds(q),
            grid=(b, kv, n // bq, back),
            in_specs=[q_spec, k_spec, k_spec],
            out_specs=q_spec,
            scratch_shapes=[
                pltpu.VMEM((group * bq, d), F32),
                pltpu.VMEM((group * bq, 1), F32),
                pltpu.VMEM((group * bq, 1), F32),
            ],
        )(q, k, v)
        return out.reshape(b, h, n, d)

    return function


def _segments(size: Size) -> list[Operand]:
    n = size(4096, 512, 64)
    make = lambda r: np.sort(r.integers(0, 4, (size(2, 1, 2), n)), axis=1)
    return [*_bhld(size), Operand((size(2, 1, 2), n), I32, make=make)]


def _packed_segments(q, k, v, seg):
    s = jnp.einsum("bhld,bhmd->bhlm", q, k, preferred_element_type=F32)
    n = q.shape[2]
    keep = (seg[:, None, :, None] == seg[:, None, None, :]) & jnp.tril(
        jnp.ones((n, n), bool)
    )
    s = jnp.where(keep, s * q.shape[-1] ** -0.5, -1e30)
    return jnp.einsum("bhlm,bhmd->bhld", jax.nn.softmax(s).astype(v.dtype), v)


@family.form(
    Problem("held-out packed sequences", _segments, _packed_segments),
    "segment ids as a column and a row, causal, unnormalised sums kept",
)
def _(size: Size):
    bq, bk = size.block(128), size.block(128)

    def kernel(qs_ref, ks_ref, q_ref, k_ref, v_ref, o_ref, acc_ref, stats_ref):
        i, j = pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)
            stats_ref[0] = jnp.full((bq, 1), -1e30, F32)
            stats_ref[1] = jnp.zeros((bq, 1), F32)

        @pl.when(j <= i)
        def _():
            s = pl.dot(q_ref[0, 0], k_ref[0, 0], trans_b=True)
            s = s * (q_ref.shape[-1] ** -0.5)
            same = qs_ref[0] == ks_ref[0]  # (bq, 1) and (1, bk)
            causal = (i * bq + lax.broadcasted_iota(I32, (bq, bk), 0)) >= (
                j * bk + lax.broadcasted_iota(I32, (bq, bk), 1)
            )
            s = s + jnp.where(same & causal, 0.0, -1e30)
            m = jnp.maximum(stats_ref[0], s.max(1, keepdims=True))
            fix = jnp.exp(stats_ref[0] - m)
            p = jnp.exp(s - m)
            stats_ref[0] = m
            stats_ref[1] = stats_ref[1] * fix + p.sum(1, keepdims=True)
            acc_ref[...] *= fix
            acc_ref[...] += pl.dot(p.astype(v_ref.dtype), v_ref[0, 0])

        @pl.when(j == pl.num_programs(3) - 1)
        def _():
            o_ref[0, 0] = (acc_ref[...] / stats_ref[1]).astype(o_ref.dtype)

    def function(q, k, v, seg):
        b, h, n, d = q.shape
        q_spec = pl.BlockSpec((1, 1, bq, d), lambda b, h, i, j: (b, h, i, 0))
        k_spec = pl.BlockSpec((1, 1, bk, d), lambda b, h, i, j: (b, h, j, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(q),
            grid=(b, h, n // bq, n // bk),
            in_specs=[
                pl.BlockSpec((1, bq, 1), lambda b, h, i, j: (b, i, 0)),
                pl.BlockSpec((1, 1, bk), lambda b, h, i, j: (b, 0, j)),
                q_spec,
                k_spec,
                k_spec,
            ],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((bq, d), F32), pltpu.VMEM((2, bq, 1), F32)],
        )(seg[:, :, None], seg[:, None, :], q, k, v)

    return function


# --- cross attention to text, windows of images, two part keys ---


def _cross(size: Size) -> list[Operand]:
    b, h = size(8, 1, 2), size(10, 2, 2)
    q = Operand((b, h, size(4096, 512, 24), 64), size.dtype)
    return [q, *[Operand((b, h, 77, 64), size.dtype)] * 2]


def _plain(q, k, v):
    s = jnp.einsum("bhld,bhmd->bhlm", q, k, preferred_element_type=F32)
    p = jax.nn.softmax(s * q.shape[-1] ** -0.5).astype(v.dtype)
    return jnp.einsum("bhlm,bhmd->bhld", p, v)


@family.form(
    Problem("held-out cross attention to 77 keys", _cross, _plain),
    "cross attention, 77 keys at once, two heads in a program",
)
def _(size: Size):
    bq = size.block(256)

    def kernel(q_ref, k_ref, v_ref, o_ref):
        for h in range(q_ref.shape[1]):
            s = jnp.dot(q_ref[0, h], k_ref.at[0, h][...].T, preferred_element_type=F32)
            p = jax.nn.softmax(s * 0.125, axis=-1)
            o_ref[0, h, :, :] = jnp.dot(
                p.astype(v_ref.dtype), v_ref.at[0, h][...], preferred_element_type=F32
            ).astype(o_ref.dtype)

    def function(q, k, v):
        b, h, n, d = q.shape
        q_spec = pl.BlockSpec((1, 2, bq, d), lambda b, h, i: (b, h, i, 0))
        k_spec = pl.BlockSpec((1, 2, k.shape[2], d), lambda b, h, i: (b, h, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(q),
            grid=(b, h // 2, pl.cdiv(n, bq)),
            in_specs=[q_spec, k_spec, k_spec],
            out_specs=q_spec,
        )(q, k, v)

    return function


def _swin(size: Size) -> list[Operand]:
    windows, h = size(2048, 64, 8), size(6, 2, 2)
    qkv = [Operand((windows, h, 49, 32), size.dtype)] * 3
    return [*qkv, Operand((h, 49, 49), F32)]


def _swin_reference(q, k, v, bias):
    s = jnp.einsum("whld,whmd->whlm", q, k, preferred_element_type=F32)
    p = jax.nn.softmax(s * 32**-0.5 + bias).astype(v.dtype)
    return jnp.einsum("whlm,whmd->whld", p, v)


@family.form(
    Problem("held-out window attention of 49", _swin, _swin_reference),
    "windows of 49 tokens, eight windows batched in a program",
)
def _(size: Size):
    per = size.block(8)

    def kernel(q_ref, k_ref, v_ref, b_ref, o_ref):
        q, k, v = q_ref[:, 0], k_ref[:, 0], v_ref[:, 0]
        s = jnp.einsum("wld,wmd->wlm", q, k, preferred_element_type=F32)
        s = s * 32**-0.5 + b_ref[0][None]
        s = s - jnp.max(s, axis=-1, keepdims=True)
        e = jnp.exp(s)
        p = e / jnp.sum(e, axis=-1, keepdims=True)
        o = jnp.einsum("wlm,wmd->wld", p.astype(v.dtype), v, preferred_element_type=F32)
        o_ref[:, 0] = o.astype(o_ref.dtype)

    def function(q, k, v, bias):
        w, h, n, d = q.shape
        spec = pl.BlockSpec((per, 1, n, d), lambda i, h: (i, h, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(q),
            grid=(w // per, h),
            in_specs=[spec] * 3 + [pl.BlockSpec((1, n, n), lambda i, h: (h, 0, 0))],
            out_specs=spec,
        )(q, k, v, bias)

    return function


def _mla(size: Size) -> list[Operand]:
    b, h, n = size(1, 1, 2), size(32, 2, 2), size(2048, 512, 64)
    one = lambda *shape: Operand(shape, size.dtype)
    return [
        one(b, h, n, 128),
        one(b, h, n, 64),
        one(b, h, n, 128),
        one(b, n, 64),
        one(b, h, n, 128),
    ]


def _mla_reference(qn, qr, kn, kr, v):
    s = jnp.einsum("bhld,bhmd->bhlm", qn, kn, preferred_element_type=F32)
    s += jnp.einsum("bhld,bmd->bhlm", qr, kr, preferred_element_type=F32)
    n = s.shape[-1]
    s = jnp.where(jnp.tril(jnp.ones((n, n), bool)), s * 192**-0.5, -1e30)
    return jnp.einsum("bhlm,bhmd->bhld", jax.nn.softmax(s).astype(v.dtype), v)


@family.form(
    Problem("held-out latent attention", _mla, _mla_reference),
    "scores of two parts, rotary keys shared by heads",
)
def _(size: Size):
    bq, bk = size.block(128), size.block(64)

    def attend(qn, qr, kn_ref, kr_ref, v_ref, i):
        def body(j, carry):
            o, m, l = carry
            where = pl.dslice(j * bk, bk)
            s = lax.dot(qn, kn_ref[where, :].T, preferred_element_type=F32)
            s = s + lax.dot(qr, kr_ref[where, :].T, preferred_element_type=F32)
            s = s * 192**-0.5
            row = lax.broadcasted_iota(I32, s.shape, 0) + i * bq
            col = lax.broadcasted_iota(I32, s.shape, 1) + j * bk
            s = lax.select(row >= col, s, jnp.full_like(s, -1e30))
            top = lax.max(m, s.max(1, keepdims=True))
            p = lax.exp(s - top)
            fade = lax.exp(m - top)
            v = v_ref[where, :]
            o = o * fade + lax.dot(p.astype(v.dtype), v, preferred_element_type=F32)
            return o, top, l * fade + p.sum(1, keepdims=True)

        start = (
            jnp.zeros(qn.shape, F32),
            jnp.full((bq, 1), -1e30, F32),
            jnp.zeros((bq, 1), F32),
        )
        o, _, l = lax.fori_loop(0, lax.div((i + 1) * bq + bk - 1, bk), body, start)
        return o * pl.reciprocal(l, approx=False)

    def kernel(qn_ref, qr_ref, kn_ref, kr_ref, v_ref, o_ref):
        out = attend(qn_ref[...], qr_ref[...], kn_ref, kr_ref, v_ref, pl.program_id(2))
        o_ref[...] = out.astype(o_ref.dtype)

    def function(qn, qr, kn, kr, v):
        b, h, n, d = qn.shape
        some = lambda w: pl.BlockSpec((None, None, bq, w), lambda b, h, i: (b, h, i, 0))
        full = lambda w: pl.BlockSpec((None, None, n, w), lambda b, h, i: (b, h, 0, 0))
        shared = pl.BlockSpec((None, n, 64), lambda b, h, i: (b, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(qn),
            grid=(b, h, n // bq),
            in_specs=[some(128), some(64), full(128), shared, full(128)],
            out_specs=some(d),
        )(qn, qr, kn, kr, v)

    return function


# --- decoding ---


def _paged(size: Size) -> list[Operand]:
    b, kv, group, d = size(16, 2, 2), 4, 8, 128
    page, pages = size(64, 16, 8), size(64, 8, 4)
    many = b * pages
    cache = Operand((many, kv, page, d), size.dtype)
    table = lambda r: r.permutation(many).reshape(b, pages)
    lengths = lambda r: r.integers(page, page * pages + 1, b)
    return [
        Operand((b, kv, group, d), size.dtype),
        cache,
        cache,
        Operand((b, pages), I32, make=table),
        Operand((b,), I32, make=lengths),
    ]


def _paged_reference(q, k, v, table, lengths):
    b, kv, _, d = q.shape
    flat = lambda x: jnp.moveaxis(x[table], 2, 1).reshape(b, kv, -1, d)
    k, v = flat(k), flat(v)
    s = jnp.einsum("bhgd,bhmd->bhgm", q, k, preferred_element_type=F32) * d**-0.5
    keep = jnp.arange(s.shape[-1]) < lengths[:, None, None, None]
    p = jax.nn.softmax(jnp.where(keep, s, -1e30)).astype(v.dtype)
    return jnp.einsum("bhgm,bhmd->bhgd", p, v)


PAGED = Problem("held-out decoding from pages", _paged, _paged_reference)


@family.form(PAGED, "pages through an index map, heads in a page", grad=True)
def _(size: Size):
    def kernel(table, lengths, q_ref, k_ref, v_ref, o_ref, m, l, acc):
        b, t = pl.program_id(0), pl.program_id(2)
        page = k_ref.shape[0]

        @pl.when(t == 0)
        def _():
            m[...] = jnp.full_like(m, -jnp.inf)
            l[...] = jnp.zeros_like(l)
            acc[...] = jnp.zeros_like(acc)

        @pl.when(t * page < lengths[b])
        def _():
            s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=F32)
            s *= q_ref.shape[-1] ** -0.5
            at = t * page + lax.broadcasted_iota(I32, s.shape, 1)
            s = jnp.where(at < lengths[b], s, -jnp.inf)
            new = jnp.maximum(m[...], s.max(1, keepdims=True))
            p = jnp.exp(s - new)
            fix = jnp.exp(m[...] - new)
            l[...] = l[...] * fix + p.sum(1, keepdims=True)
            acc[...] = acc[...] * fix + jnp.dot(
                p.astype(v_ref.dtype), v_ref[...], preferred_element_type=F32
            )
            m[...] = new

        @pl.when(t == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = (acc[...] / l[...]).astype(o_ref.dtype)

    def function(q, k, v, table, lengths):
        b, kv, group, d = q.shape
        page, pages = k.shape[2], table.shape[1]
        q_spec = pl.BlockSpec(
            (None, None, group, d), lambda b, h, t, table, lengths: (b, h, 0, 0)
        )
        k_spec = pl.BlockSpec(
            (None, None, page, d),
            lambda b, h, t, table, lengths: (table[b, t], h, 0, 0),
        )
        return pl.pallas_call(
            kernel,
            out_shape=sds(q),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(b, kv, pages),
                in_specs=[q_spec, k_spec, k_spec],
                out_specs=q_spec,
                scratch_shapes=[
                    pltpu.VMEM((group, 1), F32),
                    pltpu.VMEM((group, 1), F32),
                    pltpu.VMEM((group, d), F32),
                ],
            ),
        )(table, lengths, q, k, v)

    return function


def _cached(size: Size) -> list[Operand]:
    b, kv, n, d = size(64, 2, 2), 8, size(4096, 256, 32), 128
    cache = Operand((b, n, kv, d), jnp.int8, high=127)
    scale = Operand((b, n, kv), F32, make=lambda r: r.uniform(0.005, 0.02, (b, n, kv)))
    lengths = Operand((b,), I32, make=lambda r: r.integers(n // 4, n + 1, b))
    return [Operand((b, kv, 4, d), size.dtype), cache, scale, cache, scale, lengths]


def _cached_reference(q, k, ks, v, vs, lengths):
    kf = (k.astype(F32) * ks[..., None]).astype(q.dtype)
    vf = (v.astype(F32) * vs[..., None]).astype(q.dtype)
    s = jnp.einsum("bhgd,bmhd->bhgm", q, kf, preferred_element_type=F32)
    keep = jnp.arange(k.shape[1]) < lengths[:, None, None, None]
    p = jax.nn.softmax(jnp.where(keep, s * 128**-0.5, -1e30)).astype(q.dtype)
    return jnp.einsum("bhgm,bmhd->bhgd", p, vf)


@family.form(
    Problem("held-out decoding, int8 cache", _cached, _cached_reference),
    "int8 cache, heads third, scales multiplied into scores",
    grad=False,
)
def _(size: Size):
    bk = size.block(256)

    def kernel(lengths_ref, q_ref, k_ref, ks_ref, v_ref, vs_ref, o_ref):
        length = lengths_ref[pl.program_id(0)]
        q = q_ref[...]
        group, d = q.shape

        def body(j, carry):
            m, l, acc = carry
            sl = pl.ds(j * bk, bk)
            k = k_ref[sl, :].astype(q.dtype)
            s = jnp.dot(q, k.T, preferred_element_type=F32)
            s = s * (ks_ref[sl] * d**-0.5)[None, :]
            keep = j * bk + lax.iota(I32, bk) < length
            s = jnp.where(keep[None, :], s, -1e30)
            m_new = jnp.maximum(m, s.max(axis=-1))
            p = jnp.exp(s - m_new[:, None])
            fix = jnp.exp(m - m_new)
            pv = jnp.dot(
                (p * vs_ref[sl][None, :]).astype(q.dtype),
                v_ref[sl, :].astype(q.dtype),
                preferred_element_type=F32,
            )
            return m_new, l * fix + p.sum(-1), acc * fix[:, None] + pv

        init = (
            jnp.full((group,), -1e30, F32),
            jnp.zeros((group,), F32),
            jnp.zeros((group, d), F32),
        )
        _, l, acc = lax.fori_loop(0, pl.cdiv(length, bk), body, init)
        o_ref[...] = (acc / l[:, None]).astype(o_ref.dtype)

    def function(q, k, ks, v, vs, lengths):
        b, kv, group, d = q.shape
        n = k.shape[1]
        q_spec = pl.BlockSpec((None, None, group, d), lambda b, h, *_: (b, h, 0, 0))
        k_spec = pl.BlockSpec((None, n, None, d), lambda b, h, *_: (b, 0, h, 0))
        s_spec = pl.BlockSpec((None, n, None), lambda b, h, *_: (b, 0, h))
        return pl.pallas_call(
            kernel,
            out_shape=sds(q),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(b, kv),
                in_specs=[q_spec, k_spec, s_spec, k_spec, s_spec],
                out_specs=q_spec,
            ),
        )(lengths, q, k, ks, v, vs)

    return function


# --- blocks chosen by a table; a backward kernel by hand ---


def _sparse(size: Size) -> list[Operand]:
    n, blk, chosen = size(8192, 512, 64), size.block(128), size(8, 2, 3)
    shape = (size(16, 2, 2), n, 128)
    many = n // blk
    table = lambda r: np.stack(
        [np.sort(r.permutation(many)[:chosen]) for _ in range(many)]
    )
    return [
        *[Operand(shape, size.dtype)] * 3,
        Operand((many, chosen), I32, make=table),
    ]


def _sparse_reference(q, k, v, table):
    h, n, d = q.shape
    many, _ = table.shape
    cut = lambda x: x.reshape(h, many, n // many, d)
    take = lambda x: cut(x)[:, table].reshape(h, many, -1, d)
    s = jnp.einsum("hild,himd->hilm", cut(q), take(k), preferred_element_type=F32)
    p = jax.nn.softmax(s * d**-0.5).astype(v.dtype)
    return jnp.einsum("hilm,himd->hild", p, take(v)).reshape(q.shape)


@family.form(
    Problem("held-out block sparse attention", _sparse, _sparse_reference),
    "blocks of k chosen by a prefetched table",
)
def _(size: Size):
    blk = size.block(128)

    def kernel(table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        del table_ref
        t = pl.program_id(2)

        @pl.when(t == 0)
        def _zero():
            for ref, value in ((m_ref, -1e30), (l_ref, 0.0), (acc_ref, 0.0)):
                ref[...] = jnp.full(ref.shape, value, ref.dtype)

        s = jnp.matmul(q_ref[0], k_ref[0].T, preferred_element_type=F32)
        s *= q_ref.shape[-1] ** -0.5
        m_new = jnp.maximum(m_ref[...], s.max(axis=-1))
        p = jnp.exp(s - jnp.expand_dims(m_new, 1))
        fix = jnp.exp(m_ref[...] - m_new)
        l_ref[...] = l_ref[...] * fix + p.sum(axis=-1)
        acc_ref[...] = acc_ref[...] * jnp.expand_dims(fix, 1) + jnp.matmul(
            p.astype(v_ref.dtype), v_ref[0], preferred_element_type=F32
        )
        m_ref[...] = m_new

        @pl.when(t == pl.num_programs(2) - 1)
        def _write():
            o_ref[0] = (acc_ref[...] / l_ref[...][:, None]).astype(o_ref.dtype)

    def function(q, k, v, table):
        h, n, d = q.shape
        mine = pl.BlockSpec((1, blk, d), lambda h, i, t, table: (h, i, 0))
        chosen = pl.BlockSpec((1, blk, d), lambda h, i, t, table: (h, table[i, t], 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(q),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(h, n // blk, table.shape[1]),
                in_specs=[mine, chosen, chosen],
                out_specs=mine,
                scratch_shapes=[
                    pltpu.VMEM((blk,), F32),
                    pltpu.VMEM((blk,), F32),
                    pltpu.VMEM((blk, d), F32),
                ],
            ),
        )(table, q, k, v)

    return function


def _dkv_operands(size: Size) -> list[Operand]:
    shape = (size(32, 2, 2), size(2048, 256, 64), 128)
    big = [Operand(shape, size.dtype, spread=0.5)] * 4
    lse = Operand(shape[:2], F32, make=lambda r: r.normal(9.0, 0.3, shape[:2]))
    return [*big, lse, Operand(shape[:2], F32)]


def _dkv(q, k, v, do, lse, delta):
    s = jnp.einsum("hld,hmd->hlm", q, k, preferred_element_type=F32) * 128**-0.5
    n = q.shape[1]
    p = jnp.where(jnp.tril(jnp.ones((n, n), bool)), jnp.exp(s - lse[..., None]), 0)
    dp = jnp.einsum("hld,hmd->hlm", do, v, preferred_element_type=F32)
    ds = (p * (dp - delta[..., None]) * 128**-0.5).astype(q.dtype)
    dv = jnp.einsum("hlm,hld->hmd", p.astype(do.dtype), do)
    return jnp.einsum("hlm,hld->hmd", ds, q), dv


@family.form(
    Problem("held-out backward of k and v by hand", _dkv_operands, _dkv),
    "dk and dv by hand, from the first block of rows below",
    grad=False,
)
def _(size: Size):
    bq, bk = size.block(64), size.block(128)

    def kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref):
        j = pl.program_id(1)
        k, v = k_ref[...], v_ref[...]

        def body(i, carry):
            dk, dv = carry
            at = pl.ds(i * bq, bq)
            q, do = q_ref[at], do_ref[at]
            s = pl.dot(q, k.T) * 128**-0.5
            p = jnp.exp(s - lse_ref[at][:, None])
            row = i * bq + jnp.arange(bq)
            col = j * bk + jnp.arange(bk)
            p = jnp.where(row[:, None] >= col[None], p, 0.0)
            dv += pl.dot(p.astype(do.dtype).T, do)
            dp = pl.dot(do, v.T)
            ds = p * (dp - delta_ref[at][:, None]) * 128**-0.5
            dk += pl.dot(ds.astype(q.dtype).T, q)
            return dk, dv

        zeros = jnp.zeros(k.shape, F32)
        n = q_ref.shape[0]
        dk, dv = lax.fori_loop((j * bk) // bq, n // bq, body, (zeros, zeros))
        dk_ref[...] = dk.astype(dk_ref.dtype)
        dv_ref[...] = dv.astype(dv_ref.dtype)

    def function(q, k, v, do, lse, delta):
        h, n, d = q.shape
        full = pl.BlockSpec((None, n, d), lambda h, j: (h, 0, 0))
        part = pl.BlockSpec((None, bk, d), lambda h, j: (h, j, 0))
        row = pl.BlockSpec((None, n), lambda h, j: (h, 0))
        return pl.pallas_call(
            kernel,
            out_shape=(sds(k), sds(v)),
            grid=(h, n // bk),
            in_specs=[full, part, part, full, row, row],
            out_specs=(part, part),
        )(q, k, v, do, lse, delta)

    return function
