"""Attention: its problems, and forms of them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.attention_styles import Style, What, attention, extras
from tests.forms.form import F32, I32, Family, Operand, Problem, Shape, Size

family = Family("attention")


# --- problems ---


def shapes(what: What, size: Size) -> tuple[int, int, int]:
    """Batch, heads and length."""
    heads = 16 if what.depth > 64 else 32
    length = size(4000, 1000, 60) if what.edge else size(4096, 1024, 64)
    return size(4, 1, 1), size(heads, 4, 4), length


def operands(what: What, size: Size) -> list[Operand]:
    batch, heads, length = shapes(what, size)
    depth, value_depth = what.depth, what.value_depth or what.depth
    kv = heads // what.group

    def ids(rng):
        cuts = np.sort(rng.integers(0, length, (batch, 3)), axis=1)
        return (np.arange(length)[None, :] >= cuts[:, :, None]).sum(axis=1)

    slopes = lambda _: 2.0 ** (-8.0 * (np.arange(heads) + 1) / heads)
    made = {
        "q_segments": Operand(
            (batch, length, 1), I32, make=lambda _: _fixed(ids)[:, :, None]
        ),
        "k_segments": Operand(
            (batch, 1, length), I32, make=lambda _: _fixed(ids)[:, None, :]
        ),
        "bias": Operand((heads, length, length), size.dtype),
        "sinks": Operand((heads, 1, 1), F32),
        "slopes": Operand(
            (heads, 1, 1), F32, make=lambda r: slopes(r).reshape(heads, 1, 1)
        ),
    }
    q = Operand((batch, heads, length, depth), size.dtype)
    k = Operand((batch, kv, length, depth), size.dtype)
    v = Operand((batch, kv, length, value_depth), size.dtype)
    return [q, k, v, *(made[name] for name in extras(what))]


def _fixed(draw: Callable) -> np.ndarray:
    """The same for queries and keys."""
    return draw(np.random.default_rng(5))


def one_head(what: What, q, k, v, more: dict[str, Any]):
    length = q.shape[0]
    s = jnp.dot(q, k.T, preferred_element_type=F32) * q.shape[1] ** -0.5
    if what.softcap:
        s = what.softcap * jnp.tanh(s / what.softcap)
    rows, columns = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    if what.bias:
        s = s + more["bias"].astype(F32)
    if what.alibi:
        s = s - more["slopes"][0, 0] * (rows - columns).astype(F32)
    seen = jnp.ones((), bool)
    if what.causal:
        seen = seen & (rows >= columns)
    if what.window:
        seen = seen & (rows - columns < what.window)
    if what.segments:
        seen = seen & (more["q_segments"] == more["k_segments"])
    s = jnp.where(seen, s, -jnp.inf)
    if what.sinks:
        sink = jnp.broadcast_to(more["sinks"][0], (length, 1))
        p = jax.nn.softmax(jnp.concatenate([s, sink], 1), axis=-1)[:, :-1]
    else:
        p = jax.nn.softmax(s, axis=-1)
    return jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32).astype(q.dtype)


def reference(what: What, q, k, v, *more, lean: bool = False):
    k, v = (jnp.repeat(x, what.group, axis=1) if what.group > 1 else x for x in (k, v))
    names = extras(what)
    by_batch = [n for n in names if n.endswith("segments")]
    given = dict(zip(names, more, strict=True))

    def heads(q, k, v, batch):
        rest = {n: given[n] for n in names if n not in by_batch}
        head = lambda q, k, v, rest: one_head(what, q, k, v, {**batch, **rest})
        if lean:
            return lax.map(jax.checkpoint(lambda x: head(*x)), (q, k, v, rest))
        return jax.vmap(head)(q, k, v, rest)

    batched = {n: given[n] for n in by_batch}
    if lean:
        return lax.map(lambda x: heads(*x), (q, k, v, batched))
    return jax.vmap(heads)(q, k, v, batched)


def library(what: What, q, k, v, *more):
    """cuDNN's, of (batch, length, heads, depth)."""
    given = dict(zip(extras(what), more, strict=True))
    how: dict[str, Any] = {"is_causal": what.causal}
    if what.window:
        how["local_window_size"] = (what.window - 1, 0)
    if what.bias:
        how["bias"] = given["bias"][None]
    if what.alibi:
        n = jnp.arange(q.shape[1])
        apart = (n[:, None] - n[None, :]).astype(F32)
        how["bias"] = (-given["slopes"] * apart)[None].astype(q.dtype)
    if what.segments:
        how["mask"] = (given["q_segments"] == given["k_segments"])[:, None]
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **how)


def library_operands(q, k, v, *more) -> Sequence[Any]:
    return *(x.swapaxes(1, 2) for x in (q, k, v)), *more


@functools.cache
def problem(what: What) -> Problem:
    said = [n for n in ("causal", "segments", "bias", "sinks", "alibi", "edge")]
    words = [n for n in said if getattr(what, n)]
    words += [f"window {what.window}"] * bool(what.window)
    words += [f"group {what.group}"] * (what.group > 1)
    words += ["soft cap"] * bool(what.softcap)
    words += [f"d{what.depth}" + f"/{what.value_depth}" * bool(what.value_depth)]
    has_library = not (what.softcap or what.sinks)
    return Problem(
        "attention " + " ".join(words),
        functools.partial(operands, what),
        functools.partial(reference, what),
        functools.partial(library, what) if has_library else None,
        library_operands if has_library else None,
        tolerance=2e-2,
        lean=functools.partial(reference, what, lean=True),
    )


# --- forms by choices ---

FULL, CAUSAL = What(), What(causal=True)
FULL64, CAUSAL64 = What(depth=64), What(causal=True, depth=64)
WINDOW = What(causal=True, window=1024)
GROUP = What(causal=True, group=4)
CAP = What(causal=True, softcap=30.0)
SEGMENTS = What(causal=True, segments=True)
BIAS = What(bias=True)
SINKS = What(causal=True, sinks=True)
ALIBI = What(causal=True, alibi=True)
EDGE = What(edge=True)
LATENT = What(causal=True, depth=192, value_depth=128)

# One window for every size would see all keys of a short sequence.
WINDOWS = {"model": 1024, "part": 256, "cpu": 256, "tiny": 20}


def _add(name: str, what: What, **choices: Any) -> None:
    family.add(name, problem(what), attention(what, Style(**choices)))


TPU = {"stats": "lanes", "mask": "finite"}
_add("grid, column statistics", FULL)
_add("causal grid, column statistics", CAUSAL)
_add("grid, lane-replicated statistics", FULL, **TPU)
_add("causal grid, lane-replicated statistics", CAUSAL, **TPU, block_q=256)
_add("causal grid, statistics repeated over lanes", CAUSAL, stats="tiled", block_k=256)
_add("causal grid, clamped map, leading units, lanes", CAUSAL, **TPU, clamp=True,
     heads="leading", block_q=256, block_k=256)  # fmt: skip
_add("causal grid, clamped map", CAUSAL, clamp=True)
_add("causal grid, vector statistics", CAUSAL, stats="vector")
_add("causal grid, 128 x 64 blocks", CAUSAL, block_k=64)
_add("causal grid, 64 x 128 blocks, depth 64", CAUSAL64, block_q=64)
_add("causal grid, 256 x 64 blocks, depth 64", CAUSAL64, block_q=256, block_k=64)
_add("causal grid, 64 x 64 blocks, flat heads", CAUSAL, heads="flat", block_q=64,
     block_k=64)  # fmt: skip
_add("grid, statistics in outputs", FULL, stats_at="outputs")
_add("causal grid, all state in outputs, lanes", CAUSAL, stats_at="all outputs", **TPU)
_add("causal grid, additive mask, exp2, reciprocal", CAUSAL, mask="additive",
     exp="exp2", divide="reciprocal")  # fmt: skip
_add("causal grid, -inf, scaled queries, einsum", CAUSAL, mask="infinite",
     scale="queries", product="einsum")  # fmt: skip
_add("causal grid, weights zeroed by the mask", CAUSAL, mask="zeroed", product="dot")
_add("causal grid, queries first", CAUSAL, order="queries first")
_add("causal grid, flat order", CAUSAL, order="flat")
_add("causal, vmap of one head", CAUSAL, heads="vmap")
_add("fori loop, as Triton's tutorial", CAUSAL, loop="fori", exp="exp2", stats="vector",
     mask="infinite", product="dot", scale="scores")  # fmt: skip
_add("fori loop, column statistics, flat heads", FULL, loop="fori", heads="flat")
_add("fori loop, depth 64", FULL64, loop="fori", stats="vector", block_k=64)
_add("fori loop, whole refs and pl.ds", CAUSAL, loop="fori", heads="whole")
_add("fori loop, units reshaped away", CAUSAL, loop="fori", heads="values",
     stats="vector")  # fmt: skip
_add("fori loop, flat program order", CAUSAL, loop="fori", order="flat", block_q=64)
_add("fori loop unrolled twice", FULL, loop="unrolled")
_add("while loop over keys", FULL, loop="while")
_add("causal while loop, vector statistics", CAUSAL, loop="while", stats="vector")
_add("scan over blocks of keys", FULL, loop="scan")
_add("two loops, as FlashAttention 2", CAUSAL, loop="two loops", exp="exp2",
     stats="vector")  # fmt: skip
_add("two loops, 128 x 64", CAUSAL, loop="two loops", block_k=64)
_add("emit_pipeline over keys", FULL, loop="pipeline")
_add("causal emit_pipeline over keys, lanes", CAUSAL, loop="pipeline", stats="lanes")
_add("edge length, vector statistics", EDGE, stats="vector")
_add("edge length, filled", EDGE, fill=True)
_add("causal edge length, lanes", replace(EDGE, causal=True), **TPU)
_add("grouped heads, grid", GROUP)
_add("grouped heads, fori, vector statistics", GROUP, loop="fori", stats="vector")
_add("soft cap, grid", CAP)
_add("soft cap, fori, exp2", CAP, loop="fori", exp="exp2")
_add("segments, grid, lanes", SEGMENTS, **TPU)
_add("segments, fori", SEGMENTS, loop="fori")
_add("bias, grid", BIAS)
_add("bias, fori, vector statistics", BIAS, loop="fori", stats="vector")
_add("sinks, grid", SINKS)
_add("sinks, fori, exp2", SINKS, loop="fori", exp="exp2", stats="vector")
_add("alibi, grid", ALIBI)
_add("alibi, fori", ALIBI, loop="fori", stats="vector")
_add("192/128, grid", LATENT)
_add(
    "192/128, fori, vector statistics", LATENT, loop="fori", stats="vector", block_k=64
)


def _add_window(name: str, **choices: Any) -> None:
    """A window that fits the size."""
    by = {size: replace(WINDOW, window=n) for size, n in WINDOWS.items()}
    base = problem(WINDOW)
    made = replace(
        base,
        operands=lambda size: operands(by[size.name], size),
        reference=lambda *x: reference(_by_length(by, x), *x),
        lean=lambda *x: reference(_by_length(by, x), *x, lean=True),
    )
    family.add(
        name, made, lambda size: attention(by[size.name], Style(**choices))(size)
    )


def _by_length(by: dict[str, What], operands: Sequence[Any]) -> What:
    return by[{4096: "model", 1024: "cpu"}.get(operands[0].shape[2], "tiny")]


_add_window("window, grid")
_add_window("window, grid, clamped map, lanes", clamp=True, **TPU)
_add_window("window, fori", loop="fori", stats="vector")
_add_window("window, while, 64 x 64", loop="while", block_q=64, block_k=64)


# --- forms by hand ---


@family.form(problem(CAUSAL), "JAX's flash_attention")
def upstream(size: Size):
    """Blocks (1, 1, n, d), two levels of keys, statistics replicated by tiling."""
    major, minor, lanes = size.block(512), size.block(128), 128

    def kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        i, j = pl.program_id(2), pl.program_id(3)
        rows, width = q_ref.shape[2], acc_ref.shape[1]

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, F32)
            l_ref[...] = jnp.zeros(l_ref.shape, F32)
            acc_ref[...] = jnp.zeros(acc_ref.shape, F32)

        def body(n, _):
            q = q_ref[0, 0]
            k = k_ref[0, 0, pl.ds(n * minor, minor), :]
            v = v_ref[0, 0, pl.ds(n * minor, minor), :]
            dims = (((1,), (1,)), ((), ()))
            s = lax.dot_general(q, k, dims, preferred_element_type=F32)
            s *= q.shape[1] ** -0.5
            r = lax.broadcasted_iota(I32, s.shape, 0) + i * rows
            c = lax.broadcasted_iota(I32, s.shape, 1) + j * major + n * minor
            s = s + jnp.where(c <= r, 0.0, -0.7 * float(jnp.finfo(F32).max))
            m_prev, l_prev = m_ref[...], l_ref[...]
            m_next = jnp.maximum(m_prev, jnp.max(s, axis=1)[:, None])
            wide = jnp.tile(m_next, (1, max(minor // lanes, 1)))[:, :minor]
            p = jnp.exp(s - wide)
            alpha = jnp.exp(m_prev - m_next)
            l_ref[...] = jnp.sum(p, axis=1)[:, None] + alpha * l_prev
            m_ref[...] = m_next
            product = lax.dot(p.astype(v.dtype), v, preferred_element_type=F32)
            acc_ref[...] = acc_ref[...] * alpha[:, :width] + product

        @pl.when(j * major < (i + 1) * rows)
        def _():
            lax.fori_loop(0, major // minor, body, None, unroll=True)

        @pl.when(j == pl.num_programs(3) - 1)
        def _():
            l = l_ref[...]
            inverse = jnp.where(l == 0.0, 1.0, 1.0 / l)
            o_ref[0, 0] = (acc_ref[...] * inverse[:, :width]).astype(o_ref.dtype)

    def call(q, k, v):
        batch, heads, length, depth = q.shape
        rows = size.block(256)

        def keys(b, h, i, j):
            last = lax.div((i + 1) * rows - 1, major)
            return b, h, lax.select(j <= last, j, last), 0

        row = pl.BlockSpec((1, 1, rows, depth), lambda b, h, i, j: (b, h, i, 0))
        column = pl.BlockSpec((1, 1, major, depth), keys)
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid=(batch, heads, length // rows, length // major),
            in_specs=[row, column, column],
            out_specs=row,
            scratch_shapes=[pltpu.VMEM((rows, n), F32) for n in (lanes, lanes, depth)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
        )(q, k, v)

    return call


@family.form(problem(CAUSAL), "JAX's flash_attention, statistics by reshape and repeat")
def repeated(size: Size):
    rows, columns, lanes = size.block(256), size.block(256), size.block(128)

    def kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        i, j = pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -1e30)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when(j * columns < (i + 1) * rows)
        def _():
            s = jnp.einsum("bhqd,bhkd->bhqk", q_ref[...], k_ref[...],
                           preferred_element_type=F32)  # fmt: skip
            s = s * q_ref.shape[-1] ** -0.5
            r = i * rows + lax.broadcasted_iota(I32, s.shape, 2)
            c = j * columns + lax.broadcasted_iota(I32, s.shape, 3)
            s = jnp.where(r >= c, s, -1e30)
            m = m_ref[...]
            new = jnp.maximum(m, s.max(axis=-1, keepdims=True))
            folded = s.reshape(1, rows, columns // lanes, lanes) - new[:, 0, :, None, :]
            p = jnp.exp(folded).reshape(1, 1, rows, columns)
            alpha = jnp.exp(m - new)
            l_ref[...] = alpha * l_ref[...] + p.sum(axis=-1, keepdims=True)
            m_ref[...] = new
            product = jnp.einsum("bhqk,bhkd->bhqd", p.astype(v_ref.dtype), v_ref[...],
                                 preferred_element_type=F32)  # fmt: skip
            acc_ref[...] = acc_ref[...] * alpha[..., :1] + product

        @pl.when(j == pl.num_programs(3) - 1)
        def _():
            o_ref[...] = (acc_ref[...] / l_ref[..., :1]).astype(o_ref.dtype)

    def call(q, k, v):
        batch, heads, length, depth = q.shape
        keys = lambda b, h, i, j: (
            b, h, jnp.minimum(j, ((i + 1) * rows - 1) // columns), 0
        )  # fmt: skip
        row = pl.BlockSpec((1, 1, rows, depth), lambda b, h, i, j: (b, h, i, 0))
        column = pl.BlockSpec((1, 1, columns, depth), keys)
        memory = lambda n: pltpu.VMEM((1, 1, rows, n), F32)
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid=(batch, heads, length // rows, length // columns),
            in_specs=[row, column, column],
            out_specs=row,
            scratch_shapes=[memory(n) for n in (lanes, lanes, depth)],
        )(q, k, v)

    return call


@family.form(problem(FULL64), "several heads per block, einsum of rank 3")
def heads_in_a_block(size: Size):
    heads_here, rows, columns = size(4, 4, 2), size.block(64), size.block(64)

    def kernel(q_ref, k_ref, v_ref, o_ref):
        q = q_ref[0]

        def step(j, state):
            m, l, acc = state
            k = k_ref[0, :, pl.ds(j * columns, columns), :]
            v = v_ref[0, :, pl.ds(j * columns, columns), :]
            s = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=F32) * 64**-0.5
            new = jnp.maximum(m, s.max(axis=-1))
            p, alpha = jnp.exp(s - new[..., None]), jnp.exp(m - new)
            product = jnp.einsum("hqk,hkd->hqd", p.astype(v.dtype), v,
                                 preferred_element_type=F32)  # fmt: skip
            return new, alpha * l + p.sum(axis=-1), alpha[..., None] * acc + product

        shape = (heads_here, rows)
        start = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(q.shape, F32)
        _, l, acc = lax.fori_loop(0, k_ref.shape[2] // columns, step, start)
        o_ref[0] = (acc / l[..., None]).astype(o_ref.dtype)

    def call(q, k, v):
        batch, heads, length, depth = q.shape
        row = pl.BlockSpec((1, heads_here, rows, depth), lambda b, h, i: (b, h, i, 0))
        whole = pl.BlockSpec(
            (1, heads_here, length, depth), lambda b, h, i: (b, h, 0, 0)
        )
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid=(batch, heads // heads_here, length // rows),
            in_specs=[row, whole, whole],
            out_specs=row,
        )(q, k, v)

    return call


def _short(size: Size) -> list[Operand]:
    shape = (size(16, 1, 1), size(16, 4, 2), size(1024, 512, 32), 128)
    return [Operand(shape, size.dtype) for _ in range(3)]


SHORT = replace(problem(FULL), name="attention short d128", operands=_short)


@family.form(SHORT, "one program sees all keys, plain softmax")
def whole_rows(size: Size):
    rows = size.block(64)

    def kernel(q_ref, k_ref, v_ref, o_ref):
        s = jnp.dot(q_ref[0, 0], k_ref[0, 0].T, preferred_element_type=F32) * 128**-0.5
        p = jax.nn.softmax(s, axis=-1).astype(v_ref.dtype)
        o_ref[0, 0] = jnp.dot(p, v_ref[0, 0]).astype(o_ref.dtype)

    def call(q, k, v):
        batch, heads, length, depth = q.shape
        row = pl.BlockSpec((1, 1, rows, depth), lambda b, h, i: (b, h, i, 0))
        whole = pl.BlockSpec((1, 1, length, depth), lambda b, h, i: (b, h, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid=(batch, heads, length // rows),
            in_specs=[row, whole, whole],
            out_specs=row,
        )(q, k, v)

    return call


@family.form(SHORT, "all keys at once, as in numpy")
def numpy_style(size: Size):
    """As written by someone who knows numpy: operators, and no result types."""
    rows = size.block(128)

    def kernel(q_ref, k_ref, v_ref, o_ref):
        q, k, v = q_ref[0, 0], k_ref[0, 0], v_ref[0, 0]
        scores = (q @ k.T).astype(F32) / jnp.sqrt(F32(q.shape[-1]))
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        weights /= jnp.sum(weights, axis=-1, keepdims=True)
        o_ref[0, 0] = (weights.astype(v.dtype) @ v).astype(o_ref.dtype)

    def call(q, k, v):
        batch, heads, length, depth = q.shape
        row = pl.BlockSpec((1, 1, rows, depth), lambda b, h, i: (b, h, i, 0))
        whole = pl.BlockSpec((1, 1, length, depth), lambda b, h, i: (b, h, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid=(batch, heads, length // rows),
            in_specs=[row, whole, whole],
            out_specs=row,
        )(q, k, v)

    return call


@family.form(problem(CAUSAL), "splash: scores transposed, statistics in rows")
def transposed_scores(size: Size):
    """Keys along sublanes, queries along lanes; the result is turned at the end."""
    rows, columns = size.block(128), size.block(128)

    def kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        i, j = pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -1e30)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when(j * columns < (i + 1) * rows)
        def _():
            q, k, v = q_ref[...], k_ref[...], v_ref[...]
            dims = (((1,), (1,)), ((), ()))
            s = lax.dot_general(k, q, dims, preferred_element_type=F32)
            s = s * q.shape[1] ** -0.5
            c = j * columns + lax.broadcasted_iota(I32, s.shape, 0)
            r = i * rows + lax.broadcasted_iota(I32, s.shape, 1)
            s = jnp.where(c <= r, s, -1e30)
            m = m_ref[...]
            new = jnp.maximum(m, s.max(axis=0, keepdims=True))
            p, alpha = jnp.exp(s - new), jnp.exp(m - new)
            l_ref[...] = alpha * l_ref[...] + p.sum(axis=0, keepdims=True)
            m_ref[...] = new
            product = lax.dot_general(v, p.astype(v.dtype), (((0,), (0,)), ((), ())),
                                      preferred_element_type=F32)  # fmt: skip
            acc_ref[...] = acc_ref[...] * alpha + product

        @pl.when(j == pl.num_programs(3) - 1)
        def _():
            o_ref[...] = (acc_ref[...] / l_ref[...]).T.astype(o_ref.dtype)

    def call(q, k, v):
        batch, heads, length, depth = q.shape
        row = pl.BlockSpec((None, None, rows, depth), lambda b, h, i, j: (b, h, i, 0))
        column = pl.BlockSpec(
            (None, None, columns, depth), lambda b, h, i, j: (b, h, j, 0)
        )
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid=(batch, heads, length // rows, length // columns),
            in_specs=[row, column, column],
            out_specs=row,
            scratch_shapes=[pltpu.VMEM((n, rows), F32) for n in (1, 1, depth)],
        )(q, k, v)

    return call


@family.form(problem(CAUSAL), "splash: blocks of keys from a prefetched table")
def prefetched_table(size: Size):
    rows, columns = size.block(128), size.block(128)

    def kernel(count_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        i, step = pl.program_id(2), pl.program_id(3)
        j = table_ref[i, step]

        @pl.when(step == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -1e30)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when(step < count_ref[i])
        def _():
            q, k, v = q_ref[...], k_ref[...], v_ref[...]
            dims = (((1,), (1,)), ((), ()))
            s = lax.dot_general(q, k, dims, preferred_element_type=F32)
            s = s * q.shape[1] ** -0.5
            r = i * rows + lax.broadcasted_iota(I32, s.shape, 0)
            c = j * columns + lax.broadcasted_iota(I32, s.shape, 1)
            s = jnp.where(c <= r, s, -1e30)
            m = m_ref[...]
            new = jnp.maximum(m, s.max(axis=1, keepdims=True))
            p, alpha = jnp.exp(s - new), jnp.exp(m - new)
            l_ref[...] = alpha * l_ref[...] + p.sum(axis=1, keepdims=True)
            m_ref[...] = new
            product = jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32)
            acc_ref[...] = acc_ref[...] * alpha + product

        @pl.when(step == pl.num_programs(3) - 1)
        def _():
            o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)

    def call(q, k, v):
        batch, heads, length, depth = q.shape
        n = length // rows
        count = (jnp.arange(n, dtype=I32) + 1) * rows // columns
        steps = length // columns
        table = jnp.minimum(jnp.arange(steps, dtype=I32)[None, :], count[:, None] - 1)
        row = pl.BlockSpec(
            (None, None, rows, depth), lambda b, h, i, j, *_: (b, h, i, 0)
        )
        column = pl.BlockSpec(
            (None, None, columns, depth), lambda b, h, i, j, _, t: (b, h, t[i, j], 0)
        )
        return pl.pallas_call(
            kernel,
            out_shape=Shape(q.shape, q.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(batch, heads, n, steps),
                in_specs=[row, column, column],
                out_specs=row,
                scratch_shapes=[pltpu.VMEM((rows, w), F32) for w in (1, 1, depth)],
            ),
        )(count, table, q, k, v)

    return call
