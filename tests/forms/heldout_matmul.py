"""Products held out: spellings of people who never saw the forms beside."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import BF16, F32, I32, Family, Operand, Problem, Shape, Size

family = Family("held-out matmul")


def sds(shape: Sequence[int], like: Any) -> Any:
    return Shape(tuple(shape), getattr(like, "dtype", like))


def floats(size: Size, *shapes: Sequence[int], spread: float = 1.0) -> list[Operand]:
    return [Operand(tuple(s), size.dtype, spread=spread) for s in shapes]


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=F32)


# --- Triton's tutorials ---


def _square(size: Size) -> list[Operand]:
    n = size(4096, 512, 64)
    return [*floats(size, (n, n)), *floats(size, (n, n), spread=n**-0.5)]


def _leaky(x, y):
    z = dot(x, y)
    return jnp.where(z >= 0, z, 0.01 * z).astype(x.dtype)


LEAKY = Problem("held-out leaky relu of a product", _square, _leaky)


@family.form(LEAKY, "flat program id in groups of rows, whole refs, fori")
def _(size: Size):
    bm, bn, bk, group = size.block(128), size.block(256), size.block(64), 8

    def kernel(a_ref, b_ref, c_ref):
        m, k = a_ref.shape
        n = b_ref.shape[1]
        pid = pl.program_id(axis=0)
        num_m, num_n = pl.cdiv(m, bm), pl.cdiv(n, bn)
        in_group = group * num_n
        first = (pid // in_group) * group
        height = jnp.minimum(num_m - first, group)
        pid_m = first + ((pid % in_group) % height)
        pid_n = (pid % in_group) // height
        rows, cols = pl.ds(pid_m * bm, bm), pl.ds(pid_n * bn, bn)

        def step(t, acc):
            inner = pl.ds(t * bk, bk)
            return acc + pl.dot(a_ref[rows, inner], b_ref[inner, cols])

        acc = lax.fori_loop(0, pl.cdiv(k, bk), step, jnp.zeros((bm, bn), F32))
        acc = jnp.where(acc >= 0, acc, 0.01 * acc)
        pl.store(c_ref, (rows, cols), acc.astype(c_ref.dtype))

    def function(a, b):
        m, n = a.shape[0], b.shape[1]
        return pl.pallas_call(
            kernel,
            out_shape=sds((m, n), a),
            grid=(pl.cdiv(m, bm) * pl.cdiv(n, bn),),
        )(a, b)

    return function


@family.form(LEAKY, "accumulated in the output's rows, n outermost, 96 by 96 blocks")
def _(size: Size):
    bm = bn = 96 if size.name != "tiny" else 24
    bk = size.block(128)

    def kernel(a_ref, b_ref, c_ref, acc):
        t = pl.program_id(2)

        def first():
            acc[...] = dot(a_ref[...], b_ref[...])

        def more():
            acc[...] = acc[...] + dot(a_ref[...], b_ref[...])

        lax.cond(t == 0, first, more)

        @pl.when(t == pl.num_programs(2) - 1)
        def _():
            z = acc[...]
            c_ref[...] = jax.nn.leaky_relu(z).astype(c_ref.dtype)

    def function(a, b):
        (m, k), n = a.shape, b.shape[1]
        return pl.pallas_call(
            kernel,
            out_shape=sds((m, n), a),
            grid=(pl.cdiv(n, bn), pl.cdiv(m, bm), k // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda j, i, t: (i, t)),
                pl.BlockSpec((bk, bn), lambda j, i, t: (t, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, i, t: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), F32)],
        )(a, b)

    return function


@family.form(LEAKY, "emit_pipeline inside, operands in any memory")
def _(size: Size):
    bm, bn, bk = size.block(256), size.block(256), size.block(128)

    def outer(x_hbm, y_hbm, o_hbm, acc_ref):
        steps = x_hbm.shape[1] // bk

        def inner(x_ref, y_ref, o_ref):
            t = pl.program_id(2)

            @pl.when(t == 0)
            def _():
                acc_ref[...] = jnp.zeros_like(acc_ref)

            acc_ref[...] += dot(x_ref[...], y_ref[...])

            @pl.when(t == steps - 1)
            def _():
                z = acc_ref[...]
                o_ref[...] = jnp.maximum(z, 0.01 * z).astype(o_ref.dtype)

        pltpu.emit_pipeline(
            inner,
            grid=(x_hbm.shape[0] // bm, y_hbm.shape[1] // bn, steps),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda i, j, t: (i, t)),
                pl.BlockSpec((bk, bn), lambda i, j, t: (t, j)),
            ],
            out_specs=[pl.BlockSpec((bm, bn), lambda i, j, t: (i, j))],
        )(x_hbm, y_hbm, o_hbm)

    def function(x, y):
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            outer,
            out_shape=sds((x.shape[0], y.shape[1]), x),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.VMEM((bm, bn), F32)],
        )(x, y)

    return function


# --- feed forward layers ---


def _ffn(size: Size) -> list[Operand]:
    t, d, f = size(4096, 256, 32), size(2048, 256, 32), size(5632, 512, 64)
    x = floats(size, (t, d))
    return [*x, *floats(size, (d, f), (d, f), spread=d**-0.5)]


def _geglu(x, w, v):
    return (jax.nn.gelu(dot(x, w)) * dot(x, v)).astype(x.dtype)


GEGLU = Problem("held-out GEGLU", _ffn, _geglu)


@family.form(GEGLU, "two accumulators in one scratch, k before n in the grid's maps")
def _(size: Size):
    bm, bn, bk = size.block(128), size.block(128), size.block(256)

    def kernel(x_ref, w_ref, v_ref, o_ref, acc_ref, *, last):
        t = pl.program_id(2)

        @pl.when(jnp.equal(t, 0))
        def _reset():
            acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

        x = x_ref[...]
        acc_ref[0] += lax.dot(x, w_ref[...], preferred_element_type=F32)
        acc_ref[1] += lax.dot(x, v_ref[...], preferred_element_type=F32)

        @pl.when(t == last)
        def _flush():
            gate, up = acc_ref[0], acc_ref[1]
            c = np.sqrt(2 / np.pi)
            inner = c * (gate + 0.044715 * gate * gate * gate)
            o_ref[...] = (0.5 * gate * (1 + jnp.tanh(inner)) * up).astype(o_ref.dtype)

    def function(x, w, v):
        (m, k), n = x.shape, w.shape[1]
        w_spec = pl.BlockSpec((bk, bn), lambda i, j, t: (t, j))
        return pl.pallas_call(
            functools.partial(kernel, last=k // bk - 1),
            out_shape=sds((m, n), x),
            grid=(m // bm, n // bn, k // bk),
            in_specs=[pl.BlockSpec((bm, bk), lambda i, j, t: (i, t)), w_spec, w_spec],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, t: (i, j)),
            scratch_shapes=[pltpu.VMEM((2, bm, bn), F32)],
        )(x, w, v)

    return function


def _mlp_operands(size: Size) -> list[Operand]:
    t, d, f = size(4096, 256, 32), size(1024, 128, 32), size(4096, 256, 64)
    return [
        *floats(size, (t, d)),
        *floats(size, (d, f), (d, f), spread=d**-0.5),
        *floats(size, (f, d), spread=f**-0.5),
    ]


def _mlp(x, w1, w3, w2):
    h = (jax.nn.silu(dot(x, w1)) * dot(x, w3)).astype(x.dtype)
    return dot(h, w2).astype(x.dtype)


@family.form(
    Problem("held-out whole SwiGLU layer", _mlp_operands, _mlp),
    "whole layer, hidden blocks summed into a scratch",
)
def _(size: Size):
    bm, bf = size.block(128), size.block(256)

    def kernel(x_ref, w1_ref, w3_ref, w2_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        x = x_ref[...]
        gate = dot(x, w1_ref[...])
        h = gate * jax.nn.sigmoid(gate) * dot(x, w3_ref[...])
        acc_ref[...] += dot(h.astype(x.dtype), w2_ref[...])

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def function(x, w1, w3, w2):
        (t, d), f = x.shape, w1.shape[1]
        return pl.pallas_call(
            kernel,
            out_shape=sds((t, d), x),
            grid=(t // bm, f // bf),
            in_specs=[
                pl.BlockSpec((bm, d), lambda i, j: (i, 0)),
                pl.BlockSpec((d, bf), lambda i, j: (0, j)),
                pl.BlockSpec((d, bf), lambda i, j: (0, j)),
                pl.BlockSpec((bf, d), lambda i, j: (j, 0)),
            ],
            out_specs=pl.BlockSpec((bm, d), lambda i, j: (i, 0)),
            scratch_shapes=[pltpu.VMEM((bm, d), F32)],
        )(x, w1, w3, w2)

    return function


# --- experts: a table says whose rows a block has ---


def _experts(size: Size) -> list[Operand]:
    e, d, f = size(8, 4, 3), size(2048, 128, 16), size(4096, 256, 32)
    blocks, bm = size(64, 8, 5), size.block(128)
    owner = lambda r: np.sort(r.integers(0, e, blocks))
    return [
        *floats(size, (blocks * bm, d)),
        *floats(size, (e, d, f), spread=d**-0.5),
        Operand((blocks,), I32, make=owner),
    ]


def _grouped(x, w, owner):
    blocks = x.reshape(owner.shape[0], -1, x.shape[1])
    y = jnp.einsum("bmk,bkn->bmn", blocks, w[owner], preferred_element_type=F32)
    return y.reshape(x.shape[0], -1).astype(x.dtype)


EXPERTS = Problem("held-out products by expert", _experts, _grouped)


@family.form(EXPERTS, "grouped product, experts by a prefetched owner of each block")
def _(size: Size):
    bm, bn, bk = size.block(128), size.block(256), size.block(128)

    def kernel(owner, x_ref, w_ref, o_ref, acc):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += dot(x_ref[...], w_ref[0])

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc[...].astype(o_ref.dtype)

    def function(x, w, owner):
        k, n = w.shape[1:]
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.shape[0] // bm, n // bn, k // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda i, j, t, own: (i, t)),
                pl.BlockSpec((1, bk, bn), lambda i, j, t, own: (own[i], t, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, t, own: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), F32)],
        )
        return pl.pallas_call(
            kernel, out_shape=sds((x.shape[0], n), x), grid_spec=spec
        )(owner, x, w)

    return function


@family.form(EXPERTS, "grouped product, owner read in the kernel, experts whole")
def _(size: Size):
    bm, bn = size.block(128), size.block(128)

    def kernel(owner_ref, x_ref, w_ref, o_ref):
        e = owner_ref[pl.program_id(1)]
        o_ref[...] = dot(x_ref[...], w_ref[e]).astype(o_ref.dtype)

    def function(x, w, owner):
        e, k, n = w.shape
        return pl.pallas_call(
            kernel,
            out_shape=sds((x.shape[0], n), x),
            grid=(n // bn, x.shape[0] // bm),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                pl.BlockSpec((bm, k), lambda j, i: (i, 0)),
                pl.BlockSpec((e, k, bn), lambda j, i: (0, 0, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, i: (i, j)),
        )(owner, x, w)

    return function


# --- quantised weights ---


def _int4(size: Size) -> list[Operand]:
    t, k, n, g = size(1024, 128, 16), size(4096, 512, 64), size(4096, 512, 64), 32
    group = size(128, 128, g)
    return [
        *floats(size, (t, k)),
        Operand((k // 2, n), jnp.int8, high=127),
        Operand((k // group, n), F32, spread=0.02),
    ]


def _nibbles(packed):
    """Low halves are the first half of the rows of each pair of groups' bytes."""
    low = lax.shift_right_arithmetic(lax.shift_left(packed, jnp.int8(4)), jnp.int8(4))
    high = lax.shift_right_arithmetic(packed, jnp.int8(4))
    return low, high


def _int4_reference(x, packed, scales):
    low, high = _nibbles(packed)
    k, n = 2 * packed.shape[0], packed.shape[1]
    w = jnp.stack([low, high], axis=1).reshape(k, n)
    group = k // scales.shape[0]
    w = w.reshape(-1, group, n).astype(F32) * scales[:, None]
    return dot(x, w.reshape(k, n).astype(x.dtype)).astype(x.dtype)


@family.form(
    Problem("held-out product with int4 weights", _int4, _int4_reference),
    "int4 weights interleaved in bytes, a group's scale a step",
)
def _(size: Size):
    bm, bn = size.block(128), size.block(128)

    def kernel(x_ref, w_ref, s_ref, o_ref, acc_ref):
        t = pl.program_id(2)

        @pl.when(t == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        packed = w_ref[...].astype(I32)
        low = (packed << 28) >> 28
        high = packed >> 4
        half, n = packed.shape
        w = jnp.stack([low, high], axis=1).reshape(2 * half, n).astype(F32)
        w = (w * s_ref[0]).astype(x_ref.dtype)
        acc_ref[...] += dot(x_ref[...], w)

        @pl.when(t == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def function(x, packed, scales):
        (m, k), n = x.shape, packed.shape[1]
        groups = scales.shape[0]
        bk = k // groups
        return pl.pallas_call(
            kernel,
            out_shape=sds((m, n), x),
            grid=(m // bm, n // bn, groups),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda i, j, t: (i, t)),
                pl.BlockSpec((bk // 2, bn), lambda i, j, t: (t, j)),
                pl.BlockSpec((1, 1, bn), lambda i, j, t: (t, 0, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, t: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), F32)],
        )(x, packed, scales[:, None])

    return function


F8 = jnp.float8_e4m3fn


def _fp8(size: Size) -> list[Operand]:
    m, k, n = size(4096, 256, 32), size(4096, 512, 64), size(4096, 512, 64)
    b = size(128, 128, 16)
    return [
        Operand((m, k), F8),
        Operand((m, k // b), F32, spread=0.1),
        Operand((k, n), F8),
        Operand((k // b, n // b), F32, spread=0.1),
    ]


def _fp8_reference(x, xs, w, ws, dtype=BF16):
    b = x.shape[1] // xs.shape[1]
    x = (x.astype(F32) * jnp.repeat(xs, b, 1)).astype(dtype)
    w = (w.astype(F32) * jnp.repeat(jnp.repeat(ws, b, 0), b, 1)).astype(dtype)
    return dot(x, w).astype(BF16)


@family.form(
    Problem(
        "held-out fp8 with scales of blocks",
        _fp8,
        _fp8_reference,
        lean=functools.partial(_fp8_reference, dtype=F32),
    ),
    "fp8 blocks of 128, scales applied to each partial product",
    grad=False,
)
def _(size: Size):
    b = size(128, 128, 16)

    def kernel(x_ref, xs_ref, w_ref, ws_ref, o_ref, acc_ref):
        i, j, t = map(pl.program_id, range(3))
        pl.when(t == 0)(lambda: acc_ref.__setitem__(..., jnp.zeros(acc_ref.shape)))
        part = lax.dot(x_ref[...], w_ref[...], preferred_element_type=F32)
        acc_ref[...] += part * xs_ref[:, pl.ds(t, 1)] * ws_ref[t, j]
        pl.when(t == pl.num_programs(2) - 1)(
            lambda: o_ref.__setitem__(..., acc_ref[...].astype(o_ref.dtype))
        )
        del i

    def function(x, xs, w, ws):
        (m, k), n = x.shape, w.shape[1]
        return pl.pallas_call(
            kernel,
            out_shape=Shape((m, n), BF16),
            grid=(m // b, n // b, k // b),
            in_specs=[
                pl.BlockSpec((b, b), lambda i, j, t: (i, t)),
                pl.BlockSpec((b, k // b), lambda i, j, t: (i, 0)),
                pl.BlockSpec((b, b), lambda i, j, t: (t, j)),
                pl.BlockSpec(ws.shape, lambda i, j, t: (0, 0)),
            ],
            out_specs=pl.BlockSpec((b, b), lambda i, j, t: (i, j)),
            scratch_shapes=[pltpu.VMEM((b, b), F32)],
        )(x, xs, w, ws)

    return function


def _w8(size: Size) -> list[Operand]:
    m, k, n = size(512, 64, 16), size(4096, 512, 64), size(8192, 512, 64)
    return [
        *floats(size, (m, k)),
        Operand((n, k), jnp.int8, high=127),
        Operand((n,), F32, spread=0.01),
        Operand((n,), size.dtype),
    ]


def _w8_reference(x, w, scale, bias):
    y = jnp.einsum("mk,nk->mn", x, w.astype(x.dtype), preferred_element_type=F32)
    return (y * scale + bias.astype(F32)).astype(x.dtype)


@family.form(
    Problem("held-out int8 weights", _w8, _w8_reference),
    "int8 weights by rows of outputs, scale and bias of one dimension",
)
def _(size: Size):
    bm, bn, bk = size.block(256), size.block(128), size.block(512)

    def kernel(x_ref, w_ref, s_ref, b_ref, o_ref, acc_ref):
        t, last = pl.program_id(2), pl.num_programs(2) - 1
        part = lax.dot_general(
            x_ref[...],
            w_ref[...].astype(x_ref.dtype),
            (((1,), (1,)), ((), ())),
            preferred_element_type=F32,
        )
        acc_ref[...] = jnp.where(t == 0, part, acc_ref[...] + part)

        @pl.when(t == last)
        def _():
            y = acc_ref[...] * s_ref[...] + b_ref[...].astype(F32)
            o_ref[...] = y.astype(o_ref.dtype)

    def function(x, w, scale, bias):
        (m, k), n = x.shape, w.shape[0]
        bm_ = min(bm, m)
        return pl.pallas_call(
            kernel,
            out_shape=sds((m, n), x),
            grid=(m // bm_, n // bn, k // bk),
            in_specs=[
                pl.BlockSpec((bm_, bk), lambda i, j, t: (i, t)),
                pl.BlockSpec((bn, bk), lambda i, j, t: (j, t)),
                pl.BlockSpec((bn,), lambda i, j, t: (j,)),
                pl.BlockSpec((bn,), lambda i, j, t: (j,)),
            ],
            out_specs=pl.BlockSpec((bm_, bn), lambda i, j, t: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm_, bn), F32)],
        )(x, w, scale, bias)

    return function


def _dynamic(size: Size) -> list[Operand]:
    m, k, n = size(4096, 256, 32), size(2048, 256, 32), size(2048, 256, 32)
    return [*floats(size, (m, k)), Operand((k, n), jnp.int8, high=127)]


def _dynamic_reference(x, w):
    x = x.astype(F32)
    scale = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127
    q = jnp.round(x / scale).astype(jnp.int8)
    return lax.dot(q, w, preferred_element_type=I32).astype(F32) * scale


@family.form(
    Problem("held-out int8 product, rows quantised", _dynamic, _dynamic_reference),
    "rows quantised at the first column block, kept in a scratch",
    grad=False,
)
def _(size: Size):
    bm, bn = size.block(128), size.block(256)

    def kernel(x_ref, w_ref, o_ref, q_ref, s_ref):
        @pl.when(pl.program_id(1) == 0)
        def quantise():
            x = x_ref[...].astype(F32)
            s_ref[...] = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127
            q_ref[...] = jnp.round(x / s_ref[...]).astype(jnp.int8)

        part = lax.dot(q_ref[...], w_ref[...], preferred_element_type=I32)
        o_ref[...] = part.astype(F32) * s_ref[...]

    def function(x, w):
        (m, k), n = x.shape, w.shape[1]
        return pl.pallas_call(
            kernel,
            out_shape=sds((m, n), F32),
            grid=(m // bm, n // bn),
            in_specs=[
                pl.BlockSpec((bm, k), lambda i, j: (i, 0)),
                pl.BlockSpec((k, bn), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, k), jnp.int8), pltpu.VMEM((bm, 1), F32)],
        )(x, w)

    return function


# --- products of linear algebra ---


def _one(size: Size) -> list[Operand]:
    n, k = size(4096, 256, 64), size(1024, 128, 32)
    return floats(size, (n, k), spread=0.1)


def _syrk(x):
    return jnp.tril(jnp.einsum("ik,jk->ij", x, x, preferred_element_type=F32))


@family.form(
    Problem("held-out triangle of x x^T", _one, _syrk),
    "syrk, blocks above the diagonal stored as zeros",
)
def _(size: Size):
    b = size.block(128)

    def kernel(x_ref, y_ref, o_ref):
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j > i)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        @pl.when(j <= i)
        def _():
            z = dot(x_ref[...], y_ref[...].T)
            o_ref[...] = jnp.where(i == j, jnp.tril(z), z)

    def function(x):
        n, k = x.shape
        return pl.pallas_call(
            kernel,
            out_shape=sds((n, n), F32),
            grid=(n // b, n // b),
            in_specs=[
                pl.BlockSpec((b, k), lambda i, j: (i, 0)),
                pl.BlockSpec((b, k), lambda i, j: (j, 0)),
            ],
            out_specs=pl.BlockSpec((b, b), lambda i, j: (i, j)),
        )(x, x)

    return function


def _gemm_operands(size: Size) -> list[Operand]:
    m, k, n = size(2048, 256, 32), size(4096, 256, 64), size(2048, 256, 32)
    return [
        *floats(size, (k, m)),
        *floats(size, (n, k), spread=k**-0.5),
        *floats(size, (m, n)),
    ]


def _gemm(a, b, c):
    y = jnp.einsum("km,nk->mn", a, b, preferred_element_type=F32)
    return (1.5 * y - 0.5 * c.astype(F32)).astype(a.dtype)


@family.form(
    Problem("held-out BLAS gemm, both transposed", _gemm_operands, _gemm),
    "alpha A^T B^T + beta C, contraction of dimension 0 with 1",
)
def _(size: Size):
    bm, bn, bk = size.block(128), size.block(128), size.block(128)

    def kernel(a_ref, b_ref, c_ref, o_ref, acc_ref):
        t = pl.program_id(2)

        @pl.when(t == 0)
        def _():
            acc_ref[...] = c_ref[...].astype(F32) * (-0.5 / 1.5)

        acc_ref[...] += lax.dot_general(
            a_ref[...], b_ref[...], (((0,), (1,)), ((), ())), preferred_element_type=F32
        )

        @pl.when(t == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = (1.5 * acc_ref[...]).astype(o_ref.dtype)

    def function(a, b, c):
        (k, m), n = a.shape, b.shape[0]
        return pl.pallas_call(
            kernel,
            out_shape=sds((m, n), a),
            grid=(m // bm, n // bn, k // bk),
            in_specs=[
                pl.BlockSpec((bk, bm), lambda i, j, t: (t, i)),
                pl.BlockSpec((bn, bk), lambda i, j, t: (j, t)),
                pl.BlockSpec((bm, bn), lambda i, j, t: (i, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, t: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), F32)],
        )(a, b, c)

    return function


def _small(size: Size) -> list[Operand]:
    n = size(16384, 256, 16)
    return floats(size, (n, 64, 64), (n, 64, 64), spread=0.3)


@family.form(
    Problem(
        "held-out small products",
        _small,
        lambda a, b: jnp.einsum(
            "bij,bjk->bik", a, b, preferred_element_type=F32
        ).astype(a.dtype),
    ),
    "small products, sixteen in a program, loop of Python",
)
def _(size: Size):
    per = 16

    def kernel(a_ref, b_ref, o_ref):
        for n in range(per):
            o_ref[n] = dot(a_ref[n], b_ref[n]).astype(o_ref.dtype)

    def function(a, b):
        n, m, k = a.shape
        spec = pl.BlockSpec((per, m, k), lambda i: (i, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds(a.shape, a),
            grid=(n // per,),
            in_specs=[spec, spec],
            out_specs=spec,
        )(a, b)

    return function


def _weight_operands(size: Size) -> list[Operand]:
    t, d, f = size(8192, 512, 64), size(2048, 256, 32), size(2048, 256, 32)
    return floats(size, (t, d), (t, f), spread=0.1)


@family.form(
    Problem(
        "held-out gradient of a weight",
        _weight_operands,
        lambda x, dy: (
            jnp.einsum("td,tf->df", x, dy, preferred_element_type=F32),
            dy.astype(F32).sum(0),
        ),
    ),
    "dW and db over tokens, both summed in f32 outputs",
)
def _(size: Size):
    bt, bd, bf = size.block(128), size.block(256), size.block(256)

    def kernel(x_ref, dy_ref, dw_ref, db_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            dw_ref[...] = jnp.zeros_like(dw_ref)
            db_ref[...] = jnp.zeros_like(db_ref)

        dw_ref[...] += dot(x_ref[...].T, dy_ref[...])
        db_ref[...] += dy_ref[...].astype(F32).sum(axis=0)

    def function(x, dy):
        (t, d), f = x.shape, dy.shape[1]
        dw, db = pl.pallas_call(
            kernel,
            out_shape=(sds((d, f), F32), sds((d // bd, f), F32)),
            grid=(d // bd, f // bf, t // bt),
            in_specs=[
                pl.BlockSpec((bt, bd), lambda i, j, t: (t, i)),
                pl.BlockSpec((bt, bf), lambda i, j, t: (t, j)),
            ],
            out_specs=(
                pl.BlockSpec((bd, bf), lambda i, j, t: (i, j)),
                pl.BlockSpec((None, bf), lambda i, j, t: (i, j)),
            ),
        )(x, dy)
        return dw, db[0]

    return function


def _complex(size: Size) -> list[Operand]:
    n = size(2048, 256, 32)
    return floats(size, *[(n, n)] * 4, spread=n**-0.25)


def _complex_reference(ar, ai, br, bi):
    re = dot(ar, br) - dot(ai, bi)
    return re.astype(ar.dtype), (dot(ar, bi) + dot(ai, br)).astype(ar.dtype)


@family.form(
    Problem("held-out complex product", _complex, _complex_reference),
    "complex product, four products a step, two outputs",
)
def _(size: Size):
    b, bk = size.block(128), size.block(64)

    def kernel(ar, ai, br, bi, re, im, acc):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[0] += dot(ar[...], br[...]) - dot(ai[...], bi[...])
        acc[1] += dot(ar[...], bi[...]) + dot(ai[...], br[...])

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            re[...] = acc[0].astype(re.dtype)
            im[...] = acc[1].astype(im.dtype)

    def function(*parts):
        n = parts[0].shape[0]
        left = pl.BlockSpec((b, bk), lambda i, j, t: (i, t))
        right = pl.BlockSpec((bk, b), lambda i, j, t: (t, j))
        out = pl.BlockSpec((b, b), lambda i, j, t: (i, j))
        return pl.pallas_call(
            kernel,
            out_shape=(sds((n, n), parts[0]),) * 2,
            grid=(n // b, n // b, n // bk),
            in_specs=[left, left, right, right],
            out_specs=(out, out),
            scratch_shapes=[pltpu.VMEM((2, b, b), F32)],
        )(*parts)

    return function


def _matvec(size: Size) -> list[Operand]:
    k, n = size(4096, 512, 64), size(14336, 512, 64)
    return [*floats(size, (4, k)), *floats(size, (n, k), spread=k**-0.5)]


@family.form(
    Problem(
        "held-out vectors by a matrix",
        _matvec,
        lambda x, w: jnp.einsum("bk,nk->bn", x, w, preferred_element_type=F32).astype(
            x.dtype
        ),
    ),
    "four vectors, products and sums of rows, no dot",
)
def _(size: Size):
    bn = size.block(64)

    def kernel(x_ref, w_ref, o_ref):
        w = w_ref[...].astype(F32)
        for b in range(x_ref.shape[0]):
            x = x_ref[b].astype(F32)
            o_ref[b] = jnp.sum(w * x[None, :], axis=-1).astype(o_ref.dtype)

    def function(x, w):
        n, k = w.shape
        return pl.pallas_call(
            kernel,
            out_shape=sds((x.shape[0], n), x),
            grid=(n // bn,),
            in_specs=[
                pl.BlockSpec(x.shape, lambda i: (0, 0)),
                pl.BlockSpec((bn, k), lambda i: (i, 0)),
            ],
            out_specs=pl.BlockSpec((x.shape[0], bn), lambda i: (0, i)),
        )(x, w)

    return function


def _muon(size: Size) -> list[Operand]:
    m, n = size(1024, 128, 32), size(4096, 256, 64)
    return floats(size, (m, n), spread=(m * n) ** -0.5 * 4)


def _newton(x):
    a = dot(x, x.T).astype(x.dtype)
    b = (-4.775 * a.astype(F32) + 2.0315 * dot(a, a)).astype(x.dtype)
    return (3.4445 * x.astype(F32) + dot(b, x)).astype(x.dtype)


@family.form(
    Problem("held-out Newton Schulz step", _muon, _newton),
    "three kernels in a row, epilogues with a residual",
)
def _(size: Size):
    b, bk = size.block(128), size.block(64)

    def product(x, y, residual=None, alpha=1.0, beta=0.0, trans=False):
        (m, k), n = x.shape, y.shape[0] if trans else y.shape[1]

        def kernel(x_ref, y_ref, *refs):
            *c_ref, o_ref, acc_ref = refs

            @pl.when(pl.program_id(2) == 0)
            def _():
                acc_ref[...] = jnp.zeros_like(acc_ref)

            acc_ref[...] += pl.dot(x_ref[...], y_ref[...], trans_b=trans)

            @pl.when(pl.program_id(2) == k // bk - 1)
            def _():
                out = alpha * acc_ref[...]
                for c in c_ref:
                    out = out + beta * c[...].astype(F32)
                o_ref[...] = out.astype(o_ref.dtype)

        y_spec = pl.BlockSpec((bk, b), lambda i, j, t: (t, j))
        if trans:
            y_spec = pl.BlockSpec((b, bk), lambda i, j, t: (j, t))
        o_spec = pl.BlockSpec((b, b), lambda i, j, t: (i, j))
        more = [] if residual is None else [residual]
        return pl.pallas_call(
            kernel,
            out_shape=sds((m, n), x),
            grid=(m // b, n // b, k // bk),
            in_specs=[
                pl.BlockSpec((b, bk), lambda i, j, t: (i, t)),
                y_spec,
                *[o_spec] * len(more),
            ],
            out_specs=o_spec,
            scratch_shapes=[pltpu.VMEM((b, b), F32)],
        )(x, y, *more)

    def function(x):
        a = product(x, x, trans=True)
        poly = product(a, a, a, 2.0315, -4.775)
        return product(poly, x, x, 1.0, 3.4445)

    return function


# --- products and what follows them ---


def _normed_operands(size: Size) -> list[Operand]:
    t, d = size(8192, 256, 32), size(1024, 128, 64)
    return [
        *floats(size, (t, d)),
        *floats(size, (d, d), spread=d**-0.5),
        *floats(size, (d,), (t, d), (d,), (d,)),
    ]


def _normed(x, w, b, r, g, h):
    z = dot(x, w) + b.astype(F32) + r.astype(F32)
    z = z - z.mean(-1, keepdims=True)
    z = z * lax.rsqrt((z * z).mean(-1, keepdims=True) + 1e-5)
    return (z * g.astype(F32) + h.astype(F32)).astype(x.dtype)


@family.form(
    Problem("held-out product, residual and layer norm", _normed_operands, _normed),
    "product over whole rows, residual and layer norm at the last step",
)
def _(size: Size):
    bm, bk = size.block(64), size.block(128)

    def kernel(x_ref, w_ref, b_ref, r_ref, g_ref, h_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            acc_ref[...] = r_ref[...].astype(F32) + b_ref[...].astype(F32)

        acc_ref[...] += dot(x_ref[...], w_ref[...])

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            z = acc_ref[...]
            mean = jnp.mean(z, axis=-1, keepdims=True)
            var = jnp.mean(jnp.square(z), axis=-1, keepdims=True) - mean * mean
            z = (z - mean) * lax.rsqrt(var + 1e-5)
            o_ref[...] = (z * g_ref[...] + h_ref[...]).astype(o_ref.dtype)

    def function(x, w, b, r, g, h):
        t, d = x.shape
        row = pl.BlockSpec((1, d), lambda i, k: (0, 0))
        block = pl.BlockSpec((bm, d), lambda i, k: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds((t, d), x),
            grid=(t // bm, d // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda i, k: (i, k)),
                pl.BlockSpec((bk, d), lambda i, k: (k, 0)),
                row,
                block,
                row,
                row,
            ],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((bm, d), F32)],
        )(x, w, b[None], r, g[None], h[None])

    return function


def _vocabulary(size: Size) -> list[Operand]:
    t, d, v = size(4096, 128, 32), size(2048, 128, 32), size(32768, 512, 64)
    return [
        *floats(size, (t, d)),
        *floats(size, (v, d), spread=d**-0.5),
        Operand((t,), I32, high=v),
    ]


def _linear_loss(x, w, labels):
    logits = jnp.einsum("td,vd->tv", x, w, preferred_element_type=F32)
    at = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - at


@family.form(
    Problem("held-out linear cross entropy", _vocabulary, _linear_loss),
    "linear cross entropy, vocabulary in blocks, three columns of state",
)
def _(size: Size):
    bt, bv = size.block(128), size.block(256)

    def kernel(y_ref, x_ref, w_ref, o_ref, m_ref, l_ref, hit_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -1e30)
            l_ref[...] = jnp.zeros_like(l_ref)
            hit_ref[...] = jnp.zeros_like(hit_ref)

        z = dot(x_ref[...], w_ref[...].T)
        cols = j * bv + lax.broadcasted_iota(I32, z.shape, 1)
        hit_ref[...] += jnp.where(cols == y_ref[...], z, 0).sum(1, keepdims=True)
        m = jnp.maximum(m_ref[...], z.max(1, keepdims=True))
        l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - m) + jnp.exp(z - m).sum(
            1, keepdims=True
        )
        m_ref[...] = m

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - hit_ref[...]

    def function(x, w, labels):
        (t, d), v = x.shape, w.shape[0]
        column = pl.BlockSpec((bt, 1), lambda i, j: (i, 0))
        loss = pl.pallas_call(
            kernel,
            out_shape=sds((t, 1), F32),
            grid=(t // bt, v // bv),
            in_specs=[
                column,
                pl.BlockSpec((bt, d), lambda i, j: (i, 0)),
                pl.BlockSpec((bv, d), lambda i, j: (j, 0)),
            ],
            out_specs=column,
            scratch_shapes=[pltpu.VMEM((bt, 1), F32)] * 3,
        )(labels[:, None], x, w)
        return loss[:, 0]

    return function


def _adapters(size: Size) -> list[Operand]:
    t, d, r, many = size(256, 32, 8), size(4096, 256, 32), 16, size(32, 4, 3)
    return [
        *floats(size, (t, d)),
        *floats(size, (many, d, r), spread=d**-0.5),
        *floats(size, (many, r, d), spread=r**-0.5),
        Operand((t,), I32, high=many),
    ]


def _adapted(x, a, b, which):
    h = jnp.einsum("td,tdr->tr", x, a[which], preferred_element_type=F32)
    y = jnp.einsum(
        "tr,trd->td", h.astype(x.dtype), b[which], preferred_element_type=F32
    )
    return (x.astype(F32) + y).astype(x.dtype)


@family.form(
    Problem("held-out adapter of each token", _adapters, _adapted),
    "an adapter for each token by index maps on scalars",
)
def _(size: Size):
    def kernel(which, x_ref, a_ref, b_ref, o_ref):
        h = dot(x_ref[...], a_ref[...])
        y = dot(h.astype(x_ref.dtype), b_ref[...])
        o_ref[...] = (x_ref[...].astype(F32) + y).astype(o_ref.dtype)

    def function(x, a, b, which):
        (t, d), r = x.shape, a.shape[2]
        row = pl.BlockSpec((1, d), lambda i, which: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=sds((t, d), x),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(t,),
                in_specs=[
                    row,
                    pl.BlockSpec((None, d, r), lambda i, which: (which[i], 0, 0)),
                    pl.BlockSpec((None, r, d), lambda i, which: (which[i], 0, 0)),
                ],
                out_specs=row,
            ),
        )(which, x, a, b)

    return function


def _split(size: Size) -> list[Operand]:
    m, k, n = size(64, 32, 16), size(16384, 512, 64), size(4096, 256, 64)
    return [*floats(size, (m, k)), *floats(size, (k, n), spread=k**-0.5)]


@family.form(
    Problem(
        "held-out product of long k", _split, lambda x, w: dot(x, w).astype(x.dtype)
    ),
    "split k, partial products summed outside",
)
def _(size: Size):
    parts, bn, bk = size(16, 4, 2), size.block(128), size.block(256)
    bk = min(bk, 32) if size.name == "tiny" else bk

    def kernel(x_ref, w_ref, o_ref):
        t = pl.program_id(2)

        @pl.when(t == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[0] += dot(x_ref[...], w_ref[...])

    def function(x, w):
        (m, k), n = x.shape, w.shape[1]
        block = min(bk, k // parts)
        steps = k // parts // block
        partial = pl.pallas_call(
            kernel,
            out_shape=sds((parts, m, n), F32),
            grid=(parts, n // bn, steps),
            in_specs=[
                pl.BlockSpec((m, block), lambda s, j, t: (0, s * steps + t)),
                pl.BlockSpec((block, bn), lambda s, j, t: (s * steps + t, j)),
            ],
            out_specs=pl.BlockSpec((1, m, bn), lambda s, j, t: (s, 0, j)),
        )(x, w)
        return partial.sum(0).astype(x.dtype)

    return function
