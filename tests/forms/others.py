"""Everything else: decoding, experts, convolution, recurrences, stencils, scans,
sorts, histograms, gathers and scatters, in many forms."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Family, Operand, Problem, Shape, Size

family = Family("others")


def call(kernel, out, grid, in_specs, out_specs, scratch=(), prefetch=0, **more):
    """`pallas_call`, with scalars ahead of the operands where `prefetch` says so."""
    if not prefetch:
        return pl.pallas_call(
            kernel,
            out_shape=out,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=list(scratch),
            **more,
        )
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=prefetch,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=list(scratch),
    )
    return pl.pallas_call(kernel, out_shape=out, grid_spec=spec, **more)


ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)


# --- decoding ---


def _decode_operands(size: Size) -> list[Operand]:
    batch, kv, group = size(32, 2, 2), 8, size(8, 4, 2)
    length = size(8192, 2048, 64)
    cache = Operand((batch, kv, length, 128), size.dtype)
    lengths = Operand(
        (batch,), I32, make=lambda r: r.integers(length // 2, length, batch)
    )
    return [Operand((batch, kv, group, 128), size.dtype), cache, cache, lengths]


def _decode(q, k, v, lengths):
    s = jnp.einsum("bhgd,bhkd->bhgk", q, k, preferred_element_type=F32) * 128**-0.5
    seen = jnp.arange(k.shape[2]) < lengths[:, None, None, None]
    p = jax.nn.softmax(jnp.where(seen, s, -1e30), axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgk,bhkd->bhgd", p, v, preferred_element_type=F32)
    return out.astype(q.dtype)


def _decode_library(q, k, v, lengths):
    return jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths, implementation="cudnn"
    )


def _decode_library_operands(q, k, v, lengths):
    batch, kv, group, depth = q.shape
    turn = lambda x: x.swapaxes(1, 2)
    return q.reshape(batch, 1, kv * group, depth), turn(k), turn(v), lengths


DECODE = Problem(
    "decode",
    _decode_operands,
    _decode,
    _decode_library,
    _decode_library_operands,
    tolerance=2e-2,
)


@family.form(DECODE, grad=False)
def decode_over_a_grid_of_keys(size: Size):
    block = size.block(256)

    def kernel(lengths_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        j, length = pl.program_id(2), lengths_ref[pl.program_id(0)]

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -1e30)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when(j * block < length)
        def _():
            q, k, v = q_ref[...], k_ref[...], v_ref[...]
            s = jnp.dot(q, k.T, preferred_element_type=F32) * 128**-0.5
            at = j * block + lax.broadcasted_iota(I32, s.shape, 1)
            s = jnp.where(at < length, s, -1e30)
            m = m_ref[...]
            new = jnp.maximum(m, s.max(axis=1, keepdims=True))
            p, alpha = jnp.exp(s - new), jnp.exp(m - new)
            l_ref[...] = alpha * l_ref[...] + p.sum(axis=1, keepdims=True)
            m_ref[...] = new
            product = jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32)
            acc_ref[...] = alpha * acc_ref[...] + product

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)

    def run(q, k, v, lengths):
        batch, kv, group, depth = q.shape
        row = pl.BlockSpec((None, None, group, depth), lambda b, h, j, _: (b, h, 0, 0))
        column = pl.BlockSpec(
            (None, None, block, depth), lambda b, h, j, _: (b, h, j, 0)
        )
        scratch = [pltpu.VMEM((group, n), F32) for n in (1, 1, depth)]
        grid = (batch, kv, k.shape[2] // block)
        made = call(kernel, Shape(q.shape, q.dtype), grid, [row, column, column], row,
                    scratch, prefetch=1)  # fmt: skip
        return made(lengths, q, k, v)

    return run


@family.form(DECODE, grad=False)
def decode_fori_multiply_and_sum(size: Size):
    """Products of vectors, as one writes them without matrix units in mind."""
    block = size.block(128)

    def kernel(lengths_ref, q_ref, k_ref, v_ref, o_ref):
        length = lengths_ref[pl.program_id(0)]
        q = q_ref[0, 0].astype(F32)

        def step(j, state):
            m, l, acc = state
            k = k_ref[0, 0, pl.ds(j * block, block), :].astype(F32)
            v = v_ref[0, 0, pl.ds(j * block, block), :].astype(F32)
            s = (q[:, None, :] * k[None, :, :]).sum(axis=-1) * 128**-0.5
            at = j * block + lax.broadcasted_iota(I32, s.shape, 1)
            s = jnp.where(at < length, s, -1e30)
            new = jnp.maximum(m, s.max(axis=1))
            p, alpha = jnp.exp(s - new[:, None]), jnp.exp(m - new)
            product = (p[:, :, None] * v[None, :, :]).sum(axis=1)
            return new, alpha * l + p.sum(axis=1), alpha[:, None] * acc + product

        rows = q.shape[0]
        start = jnp.full((rows,), -1e30), jnp.zeros((rows,)), jnp.zeros(q.shape)
        _, l, acc = lax.fori_loop(0, pl.cdiv(length, block), step, start)
        o_ref[0, 0] = (acc / l[:, None]).astype(o_ref.dtype)

    return functools.partial(_decode_inside, kernel)


def _decode_inside(kernel, q, k, v, lengths):
    batch, kv, group, depth = q.shape
    row = pl.BlockSpec((1, 1, group, depth), lambda b, h, _: (b, h, 0, 0))
    whole = pl.BlockSpec((1, 1, k.shape[2], depth), lambda b, h, _: (b, h, 0, 0))
    out = Shape(q.shape, q.dtype)
    made = call(kernel, out, (batch, kv), [row, whole, whole], row, prefetch=1)
    return made(lengths, q, k, v)


@family.form(DECODE, grad=False)
def decode_while_over_keys(size: Size):
    block = size.block(256)

    def kernel(lengths_ref, q_ref, k_ref, v_ref, o_ref):
        length = lengths_ref[pl.program_id(0)]
        q = q_ref[0, 0]

        def step(state):
            j, m, l, acc = state
            k = k_ref[0, 0, pl.ds(j * block, block), :]
            v = v_ref[0, 0, pl.ds(j * block, block), :]
            s = lax.dot_general(q, k, (((1,), (1,)), ((), ())),
                                preferred_element_type=F32) * 128**-0.5  # fmt: skip
            at = j * block + lax.broadcasted_iota(I32, s.shape, 1)
            s = jnp.where(at < length, s, -1e30)
            new = jnp.maximum(m, s.max(axis=1, keepdims=True))
            p, alpha = jnp.exp(s - new), jnp.exp(m - new)
            product = jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32)
            total = alpha * l + p.sum(axis=1, keepdims=True)
            return j + 1, new, total, alpha * acc + product

        fill = lambda n, value: jnp.full((q.shape[0], n), value, F32)
        start = jnp.int32(0), fill(1, -1e30), fill(1, 0.0), fill(q.shape[1], 0.0)
        going = lambda state: state[0] * block < length
        _, _, l, acc = lax.while_loop(going, step, start)
        o_ref[0, 0] = (acc / l).astype(o_ref.dtype)

    return functools.partial(_decode_inside, kernel)


def _paged_operands(size: Size) -> list[Operand]:
    batch, kv, group = size(32, 2, 2), 8, size(8, 4, 2)
    page, pages = size(64, 64, 8), size(64, 16, 6)
    pool = Operand((batch * pages, kv, page, 128), size.dtype)
    order = lambda r: r.permutation(batch * pages).reshape(batch, pages)
    table = Operand((batch, pages), I32, make=order)
    lengths = Operand(
        (batch,), I32, make=lambda r: r.integers(page * pages // 2, page * pages, batch)
    )
    return [Operand((batch, kv, group, 128), size.dtype), pool, pool, table, lengths]


def _paged(q, k, v, table, lengths):
    def whole(pool):
        pages = pool[table]  # batch, pages, heads, page, depth
        pages = pages.swapaxes(1, 2)
        return pages.reshape(*pages.shape[:2], -1, pages.shape[-1])

    return _decode(q, whole(k), whole(v), lengths)


PAGED = Problem("paged decode", _paged_operands, _paged, tolerance=2e-2)


@family.form(PAGED, grad=False)
def paged_decode_page_table_prefetched(size: Size):
    def kernel(
        table_ref, lengths_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref
    ):
        j, length = pl.program_id(2), lengths_ref[pl.program_id(0)]
        page = k_ref.shape[0]

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -1e30)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when(j * page < length)
        def _():
            q, k, v = q_ref[...], k_ref[...], v_ref[...]
            s = jnp.dot(q, k.T, preferred_element_type=F32) * 128**-0.5
            at = j * page + lax.broadcasted_iota(I32, s.shape, 1)
            s = jnp.where(at < length, s, -1e30)
            m = m_ref[...]
            new = jnp.maximum(m, s.max(axis=1, keepdims=True))
            p, alpha = jnp.exp(s - new[:, :1]), jnp.exp(m - new)
            l_ref[...] = alpha * l_ref[...] + p.sum(axis=1, keepdims=True)
            m_ref[...] = new
            product = jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32)
            acc_ref[...] = alpha[:, :1] * acc_ref[...] + product

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = (acc_ref[...] / l_ref[:, :1]).astype(o_ref.dtype)

    def run(q, k, v, table, lengths):
        batch, kv, group, depth = q.shape
        page = k.shape[2]
        row = pl.BlockSpec((None, None, group, depth), lambda b, h, j, *_: (b, h, 0, 0))
        paged = pl.BlockSpec(
            (None, None, page, depth), lambda b, h, j, t, _: (t[b, j], h, 0, 0)
        )
        scratch = [pltpu.VMEM((group, n), F32) for n in (128, 128, depth)]
        grid = (batch, kv, table.shape[1])
        made = call(kernel, Shape(q.shape, q.dtype), grid, [row, paged, paged], row,
                    scratch, prefetch=2)  # fmt: skip
        return made(table, lengths, q, k, v)

    return run


@family.form(PAGED, grad=False)
def paged_decode_loop_over_pages(size: Size):
    """The pool stays whole; a loop reads the page that the table names."""

    def kernel(table_ref, lengths_ref, q_ref, k_ref, v_ref, o_ref):
        b, h = pl.program_id(0), pl.program_id(1)
        q, page = q_ref[...], k_ref.shape[2]
        length = lengths_ref[b]

        def step(j, state):
            m, l, acc = state
            number = table_ref[b, j]
            k, v = k_ref[number, h], v_ref[number, h]
            s = jnp.dot(q, k.T, preferred_element_type=F32) * 128**-0.5
            at = j * page + lax.broadcasted_iota(I32, s.shape, 1)
            s = jnp.where(at < length, s, -1e30)
            new = jnp.maximum(m, s.max(axis=1, keepdims=True))
            p, alpha = jnp.exp(s - new), jnp.exp(m - new)
            product = jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32)
            total = alpha * l + p.sum(axis=1, keepdims=True)
            return new, total, alpha * acc + product

        fill = lambda n, value: jnp.full((q.shape[0], n), value, F32)
        start = fill(1, -1e30), fill(1, 0.0), fill(q.shape[1], 0.0)
        _, l, acc = lax.fori_loop(0, pl.cdiv(length, page), step, start)
        o_ref[...] = (acc / l).astype(o_ref.dtype)

    def run(q, k, v, table, lengths):
        batch, kv, group, depth = q.shape
        row = pl.BlockSpec((None, None, group, depth), lambda b, h, *_: (b, h, 0, 0))
        made = call(kernel, Shape(q.shape, q.dtype), (batch, kv),
                    [row, ANYWHERE, ANYWHERE], row, prefetch=2)  # fmt: skip
        return made(table, lengths, q, k, v)

    return run


# --- experts ---


def _expert_operands(size: Size) -> list[Operand]:
    tiles, rows = size(64, 8, 4), size(128, 128, 16)
    width, experts = size(2048, 512, 64), 8
    groups = Operand(
        (tiles,), I32, make=lambda r: np.sort(r.integers(0, experts, tiles))
    )
    x = Operand((tiles * rows, width), size.dtype)
    w = Operand((experts, width, width), size.dtype, spread=width**-0.5)
    return [groups, x, w]


def _experts(groups, x, w):
    tiles = x.reshape(groups.shape[0], -1, x.shape[1])
    sizes = jnp.zeros(w.shape[0], I32).at[groups].add(tiles.shape[1])
    y = lax.ragged_dot(x, w, sizes, preferred_element_type=F32)
    return y.astype(x.dtype)


EXPERTS = Problem("grouped matmul", _expert_operands, _experts)


@family.form(EXPERTS)
def grouped_matmul_group_of_a_tile_prefetched(size: Size):
    bn, bk = size.block(128), size.block(128)

    def kernel(groups_ref, x_ref, w_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def run(groups, x, w):
        rows, width = x.shape[0] // groups.shape[0], x.shape[1]
        specs = [
            pl.BlockSpec((rows, bk), lambda i, j, k, g: (i, k)),
            pl.BlockSpec((None, bk, bn), lambda i, j, k, g: (g[i], k, j)),
        ]
        out = pl.BlockSpec((rows, bn), lambda i, j, k, g: (i, j))
        scratch = [pltpu.VMEM((rows, bn), F32)]
        grid = (groups.shape[0], width // bn, width // bk)
        made = call(
            kernel, Shape(x.shape, x.dtype), grid, specs, out, scratch, prefetch=1
        )
        return made(groups, x, w)

    return run


@family.form(EXPERTS)
def grouped_matmul_fori_over_k_expert_indexed(size: Size):
    """All experts' weights in one ref; the tile's expert is an index."""
    bn, bk = size.block(128), size.block(64)

    def kernel(groups_ref, x_ref, w_ref, o_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        expert = groups_ref[i]

        def step(k, acc):
            at = pl.ds(k * bk, bk)
            w = w_ref[expert, at, pl.ds(j * bn, bn)]
            return acc + jnp.dot(x_ref[:, at], w, preferred_element_type=F32)

        zero = jnp.zeros(o_ref.shape, F32)
        acc = lax.fori_loop(0, x_ref.shape[1] // bk, step, zero)
        o_ref[...] = acc.astype(o_ref.dtype)

    def run(groups, x, w):
        rows, width = x.shape[0] // groups.shape[0], x.shape[1]
        specs = [pl.BlockSpec((rows, width), lambda i, j, g: (i, 0)), ANYWHERE]
        out = pl.BlockSpec((rows, bn), lambda i, j, g: (i, j))
        grid = (groups.shape[0], width // bn)
        made = call(kernel, Shape(x.shape, x.dtype), grid, specs, out, prefetch=1)
        return made(groups, x, w)

    return run


def _router_operands(size: Size) -> list[Operand]:
    """Logits without ties: `max` shares a gradient between those, `top_k` does not."""
    shape = (size(2**19, 4096, 64), 128)

    def logits(rng):
        row = rng.permutation(np.linspace(-4, 4, shape[1], dtype=np.float32))
        rotated = rng.integers(shape[1], size=(shape[0], 1)) + np.arange(shape[1])
        return row[rotated % shape[1]]

    return [Operand(shape, F32, make=logits)]


def _router(x):
    p = jax.nn.softmax(x, axis=-1)
    return lax.top_k(p, 4)[0]


@family.form(Problem("router", _router_operands, _router))
def router_softmax_and_four_maxima(size: Size):
    rows = size.block(128)

    def kernel(x_ref, o_ref):
        p = jax.nn.softmax(x_ref[...], axis=-1)
        columns = lax.broadcasted_iota(I32, p.shape, 1)
        for n in range(4):
            top = p.max(axis=1, keepdims=True)
            o_ref[:, n : n + 1] = top
            first = jnp.where(p == top, columns, p.shape[1]).min(axis=1, keepdims=True)
            p = jnp.where(columns == first, -1.0, p)

    def run(x):
        spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
        out = pl.BlockSpec((rows, 4), lambda i: (i, 0))
        shape = Shape((x.shape[0], 4), F32)
        return call(kernel, shape, (x.shape[0] // rows,), [spec], out)(x)

    return run


# --- convolution ---


def _conv_operands(size: Size) -> list[Operand]:
    n, side, width = size(256, 4, 2), size(28, 28, 6), size(128, 32, 16)
    x = Operand((n, side + 2, side + 2, width), size.dtype)
    return [x, Operand((3, 3, width, width), size.dtype, spread=(9 * width) ** -0.5)]


def _conv(x, w):
    dims = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=dims)
    return y.astype(x.dtype)


CONV = Problem("conv2d 3x3", _conv_operands, _conv)


@family.form(CONV)
def conv2d_of_nine_shifted_matmuls(size: Size):
    def kernel(x_ref, w_ref, o_ref):
        _, side, _, width = o_ref.shape
        acc = jnp.zeros((side * side, width), F32)
        for dy in range(3):
            for dx in range(3):
                x = x_ref[0, dy : dy + side, dx : dx + side, :]
                x = x.reshape(side * side, x.shape[-1])
                acc += jnp.dot(x, w_ref[dy, dx], preferred_element_type=F32)
        o_ref[0] = acc.reshape(o_ref.shape[1:]).astype(o_ref.dtype)

    def run(x, w):
        n, side, _, width = x.shape
        spec = pl.BlockSpec((1, side, side, width), lambda i: (i, 0, 0, 0))
        whole = pl.BlockSpec(w.shape, lambda i: (0, 0, 0, 0))
        shape = (n, side - 2, side - 2, w.shape[3])
        out = pl.BlockSpec((1, *shape[1:]), lambda i: (i, 0, 0, 0))
        return call(kernel, Shape(shape, x.dtype), (n,), [spec, whole], out)(x, w)

    return run


@family.form(CONV)
def conv2d_row_by_row_of_images(size: Size):
    """A program makes one row of an image from three, by nine products."""

    def kernel(a_ref, b_ref, c_ref, w_ref, o_ref):
        columns, width = o_ref.shape
        acc = jnp.zeros((columns, width), F32)
        for dy, ref in enumerate((a_ref, b_ref, c_ref)):
            for dx in range(3):
                x = ref[pl.ds(dx, columns), :]
                acc += jnp.dot(x, w_ref[dy, dx], preferred_element_type=F32)
        o_ref[...] = acc.astype(o_ref.dtype)

    def run(x, w):
        n, side, _, width = x.shape
        row = lambda d: pl.BlockSpec(
            (None, None, side, width), lambda i, y: (i, y + d, 0, 0)
        )
        whole = pl.BlockSpec(w.shape, lambda i, y: (0, 0, 0, 0))
        shape = (n, side - 2, side - 2, w.shape[3])
        out = pl.BlockSpec((None, None, *shape[2:]), lambda i, y: (i, y, 0, 0))
        specs = [row(0), row(1), row(2), whole]
        return call(kernel, Shape(shape, x.dtype), (n, side - 2), specs, out)(
            x, x, x, w
        )

    return run


def _causal_conv_operands(size: Size) -> list[Operand]:
    shape = (size(8, 1, 1), size(4096, 1024, 64), size(2048, 256, 128))
    return [Operand(shape, size.dtype), Operand((4, shape[2]), F32)]


def _causal_conv(x, w):
    padded = jnp.pad(x.astype(F32), ((0, 0), (3, 0), (0, 0)))
    length = x.shape[1]
    y = sum(padded[:, n : n + length] * w[n] for n in range(4))
    return y.astype(x.dtype)


CAUSAL_CONV = Problem("causal conv1d", _causal_conv_operands, _causal_conv)


@family.form(CAUSAL_CONV)
def causal_conv1d_of_four_taps_whole_length(size: Size):
    """As Mamba: depthwise, a program has some channels and all of time."""
    columns = 128

    def kernel(x_ref, w_ref, o_ref):
        x = x_ref[0].astype(F32)
        at = lax.broadcasted_iota(I32, x.shape, 0)
        y = x * w_ref[3:4, :]
        for n in range(1, 4):
            moved = jnp.where(at >= n, jnp.roll(x, n, axis=0), 0.0)
            y += moved * w_ref[3 - n : 4 - n, :]
        o_ref[0] = y.astype(o_ref.dtype)

    def run(x, w):
        batch, length, width = x.shape
        spec = pl.BlockSpec((1, length, columns), lambda b, j: (b, 0, j))
        taps = pl.BlockSpec((4, columns), lambda b, j: (0, j))
        grid = (batch, width // columns)
        return call(kernel, Shape(x.shape, x.dtype), grid, [spec, taps], spec)(x, w)

    return run


@family.form(CAUSAL_CONV)
def causal_conv1d_carry_in_scratch(size: Size):
    """Time along the grid; the last rows of a block are kept for the next."""
    rows, columns = size.block(256), 128

    def kernel(x_ref, w_ref, o_ref, last_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            last_ref[...] = jnp.zeros_like(last_ref)

        x = jnp.concatenate([last_ref[...], x_ref[...].astype(F32)], axis=0)
        y = sum(x[n + 5 : n + 5 + rows] * w_ref[n : n + 1, :] for n in range(4))
        o_ref[...] = y.astype(o_ref.dtype)
        last_ref[...] = x[rows:]

    def run(x, w):
        batch, length, width = x.shape
        spec = pl.BlockSpec((None, rows, columns), lambda b, j, t: (b, t, j))
        taps = pl.BlockSpec((4, columns), lambda b, j, t: (0, j))
        grid = (batch, width // columns, length // rows)
        scratch = [pltpu.VMEM((8, columns), F32)]
        return call(kernel, Shape(x.shape, x.dtype), grid, [spec, taps], spec, scratch)(
            x, w
        )

    return run


# --- recurrences ---


def _decay_operands(size: Size) -> list[Operand]:
    shape = (size(8, 1, 1), size(4096, 512, 32), size(2048, 512, 128))
    decay = lambda r: r.uniform(0.8, 1.0, shape)
    return [Operand(shape, F32), Operand(shape, F32, make=decay)]


def _recurrence(x, a):
    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(join, (a, x), axis=1)[1]


RECURRENCE = Problem("linear recurrence", _decay_operands, _recurrence)


@family.form(RECURRENCE)
def linear_recurrence_fori_over_time(size: Size):
    columns = 128

    def kernel(x_ref, a_ref, o_ref):
        def step(t, h):
            h = a_ref[0, t] * h + x_ref[0, t]
            o_ref[0, t] = h
            return h

        lax.fori_loop(0, x_ref.shape[1], step, jnp.zeros((columns,), F32))

    def run(x, a):
        batch, length, width = x.shape
        spec = pl.BlockSpec((1, length, columns), lambda b, j: (b, 0, j))
        grid = (batch, width // columns)
        return call(kernel, Shape(x.shape, F32), grid, [spec, spec], spec)(x, a)

    return run


@family.form(RECURRENCE)
def linear_recurrence_state_in_scratch(size: Size):
    """Blocks of time along the grid, the state kept in scratch."""
    rows, columns = size.block(128), 128

    def kernel(x_ref, a_ref, o_ref, h_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            h_ref[...] = jnp.zeros_like(h_ref)

        @pl.loop(0, rows)
        def _(t):
            at = (pl.ds(t, 1), slice(None))
            h_ref[...] = a_ref[at] * h_ref[...] + x_ref[at]
            o_ref[at] = h_ref[...]

    def run(x, a):
        batch, length, width = x.shape
        spec = pl.BlockSpec((None, rows, columns), lambda b, j, t: (b, t, j))
        grid = (batch, width // columns, length // rows)
        scratch = [pltpu.VMEM((1, columns), F32)]
        return call(kernel, Shape(x.shape, F32), grid, [spec, spec], spec, scratch)(
            x, a
        )

    return run


@family.form(RECURRENCE)
def linear_recurrence_by_scan(size: Size):
    columns = 128

    def kernel(x_ref, a_ref, o_ref):
        def step(h, row):
            x, a = row
            h = a * h + x
            return h, h

        start = jnp.zeros((columns,), F32)
        o_ref[0] = lax.scan(step, start, (x_ref[0], a_ref[0]))[1]

    def run(x, a):
        batch, length, width = x.shape
        spec = pl.BlockSpec((1, length, columns), lambda b, j: (b, 0, j))
        grid = (batch, width // columns)
        return call(kernel, Shape(x.shape, F32), grid, [spec, spec], spec)(x, a)

    return run


def _linear_attention_operands(size: Size) -> list[Operand]:
    shape = (size(64, 4, 2), size(4096, 512, 64), 64)
    return [Operand(shape, size.dtype, spread=0.3) for _ in range(3)]


def _linear_attention(q, k, v, chunk=64):
    """In chunks: the products within, and the state before each."""
    heads, length, depth = q.shape
    chunk = min(chunk, length)
    cut = lambda x: x.reshape(heads, length // chunk, chunk, depth)
    q, k, v = map(cut, (q, k, v))
    dot = functools.partial(jnp.einsum, preferred_element_type=F32)
    states = dot("hnkd,hnke->hnde", k, v)
    before = jnp.cumsum(states, axis=1) - states
    s = jnp.tril(dot("hnqd,hnkd->hnqk", q, k)).astype(q.dtype)
    y = dot("hnqk,hnke->hnqe", s, v)
    y += dot("hnqd,hnde->hnqe", q, before.astype(q.dtype))
    return y.reshape(heads, length, depth).astype(q.dtype)


LINEAR = Problem(
    "linear attention", _linear_attention_operands, _linear_attention, tolerance=2e-2
)


@family.form(LINEAR)
def linear_attention_state_in_scratch(size: Size):
    chunk = size.block(64)

    def kernel(q_ref, k_ref, v_ref, o_ref, state_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            state_ref[...] = jnp.zeros_like(state_ref)

        q, k, v = q_ref[...], k_ref[...], v_ref[...]
        dot = functools.partial(jnp.dot, preferred_element_type=F32)
        s = jnp.tril(dot(q, k.T)).astype(q.dtype)
        y = dot(s, v) + dot(q, state_ref[...].astype(q.dtype))
        o_ref[...] = y.astype(o_ref.dtype)
        state_ref[...] += dot(k.T, v)

    def run(q, k, v):
        heads, length, depth = q.shape
        spec = pl.BlockSpec((None, chunk, depth), lambda h, t: (h, t, 0))
        scratch = [pltpu.VMEM((depth, depth), F32)]
        grid = (heads, length // chunk)
        return call(kernel, Shape(q.shape, q.dtype), grid, [spec] * 3, spec, scratch)(
            q, k, v
        )

    return run


@family.form(LINEAR)
def linear_attention_fori_over_chunks(size: Size):
    chunk = size.block(64)

    def kernel(q_ref, k_ref, v_ref, o_ref):
        dims = lambda a, b: (((a,), (b,)), ((), ()))
        dot = functools.partial(lax.dot_general, preferred_element_type=F32)

        def step(t, state):
            at = (0, pl.ds(t * chunk, chunk), slice(None))
            q, k, v = q_ref[at], k_ref[at], v_ref[at]
            s = dot(q, k, dims(1, 1))
            r, c = (lax.broadcasted_iota(I32, s.shape, n) for n in (0, 1))
            s = jnp.where(r >= c, s, 0.0).astype(q.dtype)
            y = dot(s, v, dims(1, 0)) + dot(q, state.astype(q.dtype), dims(1, 0))
            o_ref[at] = y.astype(o_ref.dtype)
            return state + dot(k, v, dims(0, 0))

        depth = q_ref.shape[-1]
        zero = jnp.zeros((depth, depth), F32)
        lax.fori_loop(0, q_ref.shape[1] // chunk, step, zero)

    def run(q, k, v):
        heads, length, depth = q.shape
        spec = pl.BlockSpec((1, length, depth), lambda h: (h, 0, 0))
        return call(kernel, Shape(q.shape, q.dtype), (heads,), [spec] * 3, spec)(
            q, k, v
        )

    return run


# --- stencils ---


def _field(size: Size) -> list[Operand]:
    return [Operand((size(8192, 1024, 64), size(8192, 1024, 128)), F32)]


def _five_point(x):
    p = jnp.pad(x, 1)
    around = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]
    return 0.5 * x + 0.125 * around


STENCIL = Problem("5-point stencil", _field, _five_point)


@family.form(STENCIL)
def stencil_by_an_element_halo(size: Size):
    rows = size.block(64)

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        around = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
        o_ref[...] = 0.5 * x[1:-1, 1:-1] + 0.125 * around

    def run(x):
        n, width = x.shape
        columns = size.block(256)
        spec = pl.BlockSpec(
            (pl.Element(rows + 2), pl.Element(columns + 2)),
            lambda i, j: (i * rows, j * columns),
        )
        out = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
        grid = (n // rows, width // columns)
        return call(kernel, Shape(x.shape, F32), grid, [spec], out)(jnp.pad(x, 1))

    return run


@family.form(STENCIL)
def stencil_by_three_row_blocks(size: Size):
    rows = size.block(64)

    def kernel(above_ref, here_ref, below_ref, o_ref):
        i, last = pl.program_id(0), pl.num_programs(0) - 1
        x = here_ref[...]
        above = jnp.where(i > 0, above_ref[rows - 1 :, :], 0.0)
        below = jnp.where(i < last, below_ref[:1, :], 0.0)
        up = jnp.concatenate([above, x[:-1]], axis=0)
        down = jnp.concatenate([x[1:], below], axis=0)
        side = jnp.zeros((rows, 1), F32)
        left = jnp.concatenate([side, x[:, :-1]], axis=1)
        right = jnp.concatenate([x[:, 1:], side], axis=1)
        o_ref[...] = 0.5 * x + 0.125 * (up + down + left + right)

    def run(x):
        n, width = x.shape
        last = n // rows - 1
        at = lambda f: pl.BlockSpec((rows, width), lambda i: (f(i), 0))
        specs = [
            at(lambda i: jnp.maximum(i - 1, 0)),
            at(lambda i: i),
            at(lambda i: jnp.minimum(i + 1, last)),
        ]
        made = call(kernel, Shape(x.shape, F32), (n // rows,), specs, specs[1])
        return made(x, x, x)

    return run


@family.form(STENCIL)
def stencil_whole_ref_and_rolled_rows(size: Size):
    """A program reads its rows and two more from the padded whole."""
    rows = size.block(32)

    def kernel(x_ref, o_ref):
        x = x_ref[pl.ds(pl.program_id(0) * rows, rows + 2), :]
        width = x.shape[1]
        at = lax.broadcasted_iota(I32, (rows, width), 1)
        here = x[1:-1]
        left = jnp.where(at > 0, jnp.roll(here, 1, axis=1), 0.0)
        right = jnp.where(at < width - 1, jnp.roll(here, -1, axis=1), 0.0)
        o_ref[...] = 0.5 * here + 0.125 * (x[:-2] + x[2:] + left + right)

    def run(x):
        n, width = x.shape
        out = pl.BlockSpec((rows, width), lambda i: (i, 0))
        padded = jnp.pad(x, ((1, 1), (0, 0)))
        return call(kernel, Shape(x.shape, F32), (n // rows,), [ANYWHERE], out)(padded)

    return run


def _pooled(x):
    n, width = x.shape
    return x.reshape(n // 2, 2, width // 2, 2).max(axis=(1, 3))


@family.form(Problem("2x2 pooling", _field, _pooled))
def pooling_by_reshape(size: Size):
    rows, columns = size.block(64), size.block(256)

    def kernel(x_ref, o_ref):
        x = x_ref[...].reshape(rows // 2, 2, columns // 2, 2)
        o_ref[...] = x.max(axis=(1, 3))

    def run(x):
        n, width = x.shape
        spec = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
        out = pl.BlockSpec((rows // 2, columns // 2), lambda i, j: (i, j))
        grid = (n // rows, width // columns)
        return call(kernel, Shape((n // 2, width // 2), F32), grid, [spec], out)(x)

    return run


# --- scans and sorts ---


def _long(size: Size) -> list[Operand]:
    return [Operand((size(2**25, 2**20, 1024),), F32, spread=0.01)]


PREFIX = Problem("prefix sum", _long, jnp.cumsum)


@family.form(PREFIX)
def prefix_sum_carry_in_scratch(size: Size):
    block = size.block(2048)

    def kernel(x_ref, o_ref, carry_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            carry_ref[...] = jnp.zeros_like(carry_ref)

        sums = jnp.cumsum(x_ref[...]) + carry_ref[...]
        o_ref[...] = sums
        carry_ref[...] = sums[-1:]

    def run(x):
        spec = pl.BlockSpec((block,), lambda i: (i,))
        grid = (x.shape[0] // block,)
        scratch = [pltpu.VMEM((1,), F32)]
        return call(kernel, Shape(x.shape, F32), grid, [spec], spec, scratch)(x)

    return run


@family.form(PREFIX)
def prefix_sum_carry_in_smem(size: Size):
    rows = 8

    def kernel(x_ref, o_ref, carry_ref):
        i = pl.program_id(0)
        before = jnp.where(i == 0, 0.0, carry_ref[0])
        x = x_ref[...]
        within = jnp.cumsum(x, axis=1)
        totals = within[:, -1:]
        above = jnp.cumsum(totals, axis=0) - totals
        o_ref[...] = within + above + before
        carry_ref[0] = before + totals.sum()

    def run(x):
        lanes = 128
        spec = pl.BlockSpec((rows, lanes), lambda i: (i, 0))
        folded = x.reshape(-1, lanes)
        grid = (folded.shape[0] // rows,)
        scratch = [pltpu.SMEM((1,), F32)]
        made = call(kernel, Shape(folded.shape, F32), grid, [spec], spec, scratch)
        return made(folded).reshape(x.shape)

    return run


def _rows(size: Size) -> list[Operand]:
    return [Operand((size(32768, 1024, 16), size(1024, 256, 64)), F32)]


@family.form(Problem("cumsum of rows", _rows, lambda x: jnp.cumsum(x, axis=1)))
def cumsum_of_rows(size: Size):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.cumsum(x_ref[...], axis=1)

    return lambda x: _by_rows(kernel, 8, x)


def _by_rows(kernel: Callable, rows: int, x: Any, dtype: Any = None) -> Any:
    spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    shape = Shape(x.shape, dtype or x.dtype)
    return call(kernel, shape, (x.shape[0] // rows,), [spec], spec)(x)


def _running_max(x):
    return lax.cummax(x, axis=1)


@family.form(Problem("running maximum", _rows, _running_max))
def running_maximum_by_associative_scan(size: Size):
    def kernel(x_ref, o_ref):
        o_ref[...] = lax.associative_scan(jnp.maximum, x_ref[...], axis=1)

    return lambda x: _by_rows(kernel, 8, x)


SORT = Problem("sort of rows", _rows, lambda x: jnp.sort(x, axis=1))


@family.form(SORT, grad=False)
def sort_of_rows(size: Size):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.sort(x_ref[...], axis=1)

    return lambda x: _by_rows(kernel, 8, x)


@family.form(SORT, grad=False)
def sort_by_a_bitonic_network(size: Size):
    """Exchanges of halves by reshapes, as one writes it by hand."""

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        rows, width = x.shape
        for stage in range(int(math.log2(width))):
            for step in reversed(range(stage + 1)):
                gap = 1 << step
                pairs = x.reshape(rows, width // (2 * gap), 2, gap)
                a, b = pairs[:, :, 0], pairs[:, :, 1]
                first = lax.broadcasted_iota(I32, a.shape, 1) * (2 * gap)
                rising = (first >> (stage + 1)) % 2 == 0
                low, high = jnp.minimum(a, b), jnp.maximum(a, b)
                a, b = jnp.where(rising, low, high), jnp.where(rising, high, low)
                x = jnp.stack([a, b], axis=2).reshape(rows, width)
        o_ref[...] = x

    return lambda x: _by_rows(kernel, 8, x)


@family.form(
    Problem("top 8", _rows, lambda x: lax.top_k(x, 8)[0]), "top 8 by lax.top_k"
)
def top_8(size: Size):
    def kernel(x_ref, o_ref):
        o_ref[...] = lax.top_k(x_ref[...], 8)[0]

    def run(x):
        spec = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
        out = pl.BlockSpec((8, 8), lambda i: (i, 0))
        return call(
            kernel, Shape((x.shape[0], 8), F32), (x.shape[0] // 8,), [spec], out
        )(x)

    return run


# --- histograms ---


def _labels(size: Size) -> list[Operand]:
    return [Operand((size(2**26, 2**18, 1024),), I32, high=256)]


def _histogram(x):
    return jnp.zeros(256, I32).at[x].add(1)


HISTOGRAM = Problem("histogram", _labels, _histogram)


@family.form(HISTOGRAM, grad=False)
def histogram_by_atomics_on_one_block(size: Size):
    block = size.block(1024)

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        pl.atomic_add(o_ref, (x_ref[...],), jnp.ones((block,), I32))

    def run(x):
        spec = pl.BlockSpec((block,), lambda i: (i,))
        out = pl.BlockSpec((256,), lambda i: (0,))
        return call(kernel, Shape((256,), I32), (x.shape[0] // block,), [spec], out)(x)

    return run


@family.form(
    HISTOGRAM,
    grad=False,
)
def histogram_by_one_hot_sums(size: Size):
    block = size.block(512)

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        bins = lax.broadcasted_iota(I32, (block, 256), 1)
        hot = (x_ref[...][:, None] == bins).astype(I32)
        o_ref[...] += hot.sum(axis=0)

    def run(x):
        spec = pl.BlockSpec((block,), lambda i: (i,))
        out = pl.BlockSpec((256,), lambda i: (0,))
        return call(kernel, Shape((256,), I32), (x.shape[0] // block,), [spec], out)(x)

    return run


# --- gathers and scatters ---


def _embedding_operands(size: Size) -> list[Operand]:
    words, width = size(50257, 4096, 100), size(1024, 256, 128)
    n = size(65536, 2048, 64)
    return [Operand((n,), I32, high=words), Operand((words, width), size.dtype)]


def _embedding(ids, table):
    return table[ids]


EMBEDDING = Problem("embedding", _embedding_operands, _embedding)


@family.form(EMBEDDING)
def embedding_by_an_index_array(size: Size):
    rows = 8

    def kernel(ids_ref, table_ref, o_ref):
        o_ref[...] = table_ref[ids_ref[...], :]

    def run(ids, table):
        out = pl.BlockSpec((rows, table.shape[1]), lambda i: (i, 0))
        specs = [pl.BlockSpec((rows,), lambda i: (i,)), ANYWHERE]
        shape = Shape((ids.shape[0], table.shape[1]), table.dtype)
        return call(kernel, shape, (ids.shape[0] // rows,), specs, out)(ids, table)

    return run


@family.form(EMBEDDING)
def embedding_by_scalar_prefetch(size: Size):
    def kernel(ids_ref, row_ref, o_ref):
        o_ref[...] = row_ref[...]

    def run(ids, table):
        width = table.shape[1]
        shape = Shape((ids.shape[0], 1, width), table.dtype)
        row = pl.BlockSpec((1, 1, width), lambda i, ids: (ids[i], 0, 0))
        out = pl.BlockSpec((1, 1, width), lambda i, ids: (i, 0, 0))
        made = call(kernel, shape, (ids.shape[0],), [row], out, prefetch=1)
        return made(ids, table[:, None, :]).reshape(ids.shape[0], width)

    return run


@family.form(EMBEDDING)
def embedding_rows_in_a_loop(size: Size):
    rows = size.block(64)

    def kernel(ids_ref, table_ref, o_ref):
        first = pl.program_id(0) * rows

        @pl.loop(0, rows)
        def _(n):
            o_ref[n, :] = table_ref[ids_ref[first + n], :]

    def run(ids, table):
        out = pl.BlockSpec((rows, table.shape[1]), lambda i, ids: (i, 0))
        shape = Shape((ids.shape[0], table.shape[1]), table.dtype)
        grid = (ids.shape[0] // rows,)
        return call(kernel, shape, grid, [ANYWHERE], out, prefetch=1)(ids, table)

    return run


def _scatter_operands(size: Size) -> list[Operand]:
    n, width, slots = size(65536, 4096, 64), size(512, 128, 128), size(8192, 512, 16)
    return [Operand((n,), I32, high=slots), Operand((n, width), F32)]


def _scatter(size_of: Callable, ids, x):
    slots = size_of(ids.shape[0])
    return jnp.zeros((slots, x.shape[1]), F32).at[ids].add(x)


_SLOTS = {65536: 8192, 4096: 512, 64: 16}
SCATTER = Problem(
    "scatter add", _scatter_operands, functools.partial(_scatter, _SLOTS.__getitem__)
)


@family.form(SCATTER)
def scatter_add_of_rows_by_atomics(size: Size):
    rows = 8

    def kernel(ids_ref, x_ref, zero_ref, o_ref):
        del zero_ref
        width = x_ref.shape[1]
        columns = lax.broadcasted_iota(I32, (rows, width), 1)
        where = jnp.broadcast_to(ids_ref[...][:, None], (rows, width))
        pl.atomic_add(o_ref, (where, columns), x_ref[...])

    def run(ids, x):
        zeros = jnp.zeros((_SLOTS[ids.shape[0]], x.shape[1]), F32)
        specs = [
            pl.BlockSpec((rows,), lambda i: (i,)),
            pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0)),
            ANYWHERE,
        ]
        grid = (ids.shape[0] // rows,)
        made = call(kernel, Shape(zeros.shape, F32), grid, specs, ANYWHERE,
                    input_output_aliases={2: 0})  # fmt: skip
        return made(ids, x, zeros)

    return run


def _segment_operands(size: Size) -> list[Operand]:
    ids, x = _scatter_operands(size)
    made = lambda r: np.sort(r.integers(0, _SLOTS[ids.shape[0]], ids.shape[0]))
    return [Operand(ids.shape, I32, make=made), x]


def _segments(ids, x):
    return jax.ops.segment_sum(x, ids, _SLOTS[ids.shape[0]], indices_are_sorted=True)


SEGMENT = Problem("segment sum", _segment_operands, _segments)


@family.form(
    SEGMENT,
)
def segment_sum_by_one_hot_products(size: Size):
    """Slots in blocks; every block of rows is multiplied by who belongs where."""
    rows, slots_here = size.block(512), size.block(128)

    def kernel(ids_ref, x_ref, o_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        first = pl.program_id(0) * slots_here
        ids = ids_ref[...]

        @pl.when((ids[:, 0].max() >= first) & (ids[:, 0].min() < first + slots_here))
        def _():
            slot = first + lax.broadcasted_iota(I32, (rows, slots_here), 1)
            hot = (ids == slot).astype(F32)
            dims = (((0,), (0,)), ((), ()))
            o_ref[...] += lax.dot_general(hot, x_ref[...], dims,
                                          preferred_element_type=F32)  # fmt: skip

    def run(ids, x):
        slots, width = _SLOTS[ids.shape[0]], x.shape[1]
        specs = [
            pl.BlockSpec((rows, 1), lambda i, j: (j, 0)),
            pl.BlockSpec((rows, width), lambda i, j: (j, 0)),
        ]
        out = pl.BlockSpec((slots_here, width), lambda i, j: (i, 0))
        grid = (slots // slots_here, ids.shape[0] // rows)
        made = call(kernel, Shape((slots, width), F32), grid, specs, out)
        return made(ids[:, None], x)

    return run


@family.form(SEGMENT)
def segment_sum_by_a_loop_over_rows(size: Size):
    """A program owns a block of slots and reads the rows between two offsets."""
    slots_here = 8

    def kernel(starts_ref, x_ref, o_ref):
        first = pl.program_id(0) * slots_here
        for n in range(slots_here):

            def step(r, acc):
                return acc + x_ref[r, :]

            zero = jnp.zeros((o_ref.shape[1],), F32)
            low, high = starts_ref[first + n], starts_ref[first + n + 1]
            o_ref[n, :] = lax.fori_loop(low, high, step, zero)

    def run(ids, x):
        slots, width = _SLOTS[ids.shape[0]], x.shape[1]
        starts = jnp.searchsorted(ids, jnp.arange(slots + 1, dtype=I32)).astype(I32)
        out = pl.BlockSpec((slots_here, width), lambda i, _: (i, 0))
        shape = Shape((slots, width), F32)
        made = call(kernel, shape, (slots // slots_here,), [ANYWHERE], out, prefetch=1)
        return made(starts, x)

    return run


def _sparse_operands(size: Size) -> list[Operand]:
    tiles, rows, per = size(64, 16, 4), size.block(64), 8
    width, columns = size(4096, 1024, 64), size(1024, 256, 128)
    blocks = width // rows
    picks = lambda r: np.stack([r.permutation(blocks)[:per] for _ in range(tiles)])
    return [
        Operand((tiles, per), I32, make=picks),
        Operand((tiles, per, rows, rows), size.dtype, spread=(per * rows) ** -0.5),
        Operand((width, columns), size.dtype),
    ]


def _sparse(where, blocks, x):
    rows = blocks.shape[2]
    parts = x.reshape(-1, rows, x.shape[1])[where]
    y = jnp.einsum("tprk,tpkn->trn", blocks, parts, preferred_element_type=F32)
    return y.reshape(-1, x.shape[1]).astype(x.dtype)


@family.form(Problem("block-sparse matmul", _sparse_operands, _sparse))
def block_sparse_matmul_columns_prefetched(size: Size):
    columns = size.block(128)

    def kernel(where_ref, a_ref, x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(a_ref[0, 0], x_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def run(where, blocks, x):
        tiles, per, rows, _ = blocks.shape
        specs = [
            pl.BlockSpec((1, 1, rows, rows), lambda i, j, p, w: (i, p, 0, 0)),
            pl.BlockSpec((rows, columns), lambda i, j, p, w: (w[i, p], j)),
        ]
        out = pl.BlockSpec((rows, columns), lambda i, j, p, w: (i, j))
        shape = Shape((tiles * rows, x.shape[1]), x.dtype)
        scratch = [pltpu.VMEM((rows, columns), F32)]
        grid = (tiles, x.shape[1] // columns, per)
        made = call(kernel, shape, grid, specs, out, scratch, prefetch=1)
        return made(where, blocks, x)

    return run


def _take_operands(size: Size) -> list[Operand]:
    n, width, k = size(8192, 1024, 16), size(4096, 512, 128), size(512, 64, 32)
    return [Operand((n, width), F32), Operand((n, k), I32, high=width)]


def _take(x, at):
    return jnp.take_along_axis(x, at, axis=1)


@family.form(Problem("take along rows", _take_operands, _take))
def take_along_axis_of_rows(size: Size):
    rows = 8

    def kernel(x_ref, at_ref, o_ref):
        o_ref[...] = jnp.take_along_axis(x_ref[...], at_ref[...], axis=1)

    def run(x, at):
        specs = [
            pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0)),
            pl.BlockSpec((rows, at.shape[1]), lambda i: (i, 0)),
        ]
        grid = (x.shape[0] // rows,)
        return call(kernel, Shape(at.shape, F32), grid, specs, specs[1])(x, at)

    return run


def _dropout_operands(size: Size) -> list[Operand]:
    return [Operand((size(16384, 1024, 32), size(4096, 1024, 128)), size.dtype)]


def _hashed(at):
    """A number of an element, mixed; the same inside and outside a kernel."""
    at = at.astype(jnp.uint32)
    at = (at ^ (at >> 16)) * jnp.uint32(0x85EBCA6B)
    at = (at ^ (at >> 13)) * jnp.uint32(0xC2B2AE35)
    return at ^ (at >> 16)


def _dropout(x):
    at = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape)
    kept = _hashed(at) > jnp.uint32(2**31)
    return jnp.where(kept, 2 * x, jnp.zeros_like(x))


@family.form(Problem("dropout", _dropout_operands, _dropout))
def dropout_by_hashed_positions(size: Size):
    rows, columns = size.block(64), size.block(512)

    def kernel(width, x_ref, o_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        x = x_ref[...]
        r = i * rows + lax.broadcasted_iota(I32, x.shape, 0)
        c = j * columns + lax.broadcasted_iota(I32, x.shape, 1)
        kept = _hashed(r * width + c) > jnp.uint32(2**31)
        o_ref[...] = jnp.where(kept, 2 * x, jnp.zeros_like(x))

    def run(x):
        spec = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
        grid = (x.shape[0] // rows, x.shape[1] // columns)
        body = functools.partial(kernel, x.shape[1])
        return call(body, Shape(x.shape, x.dtype), grid, [spec], spec)(x)

    return run


def _adam_operands(size: Size) -> list[Operand]:
    shape = (size(8192, 512, 32), size(4096, 1024, 128))
    square = Operand(shape, F32, make=lambda r: r.uniform(0.1, 1.0, shape))
    return [Operand(shape, F32), Operand(shape, F32), Operand(shape, F32), square]


def _adam(p, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


@family.form(Problem("adam", _adam_operands, _adam))
def adam_in_place(size: Size):
    rows = size.block(64)

    def kernel(p_ref, g_ref, m_ref, v_ref, p_out, m_out, v_out):
        g = g_ref[...]
        m_out[...] = 0.9 * m_ref[...] + 0.1 * g
        v_out[...] = 0.99 * v_ref[...] + 0.01 * g * g
        p_out[...] = p_ref[...] - 1e-3 * m_out[...] / (jnp.sqrt(v_out[...]) + 1e-8)

    def run(*operands):
        shape = Shape(operands[0].shape, F32)
        spec = pl.BlockSpec((rows, shape.shape[1]), lambda i: (i, 0))
        grid = (shape.shape[0] // rows,)
        return call(kernel, (shape,) * 3, grid, [spec] * 4, (spec,) * 3,
                    input_output_aliases={0: 0, 2: 1, 3: 2})(*operands)  # fmt: skip

    return run
