"""Kernels for this folder's tests, with what they mean in plain jnp.

Rows (softmax, norms, gelu), products with any storage order and an epilogue, attention
in both styles: steps along the grid with scratch, and a loop inside the kernel.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite import tpu as pltpu
from tests.xla import put

bf16, f32 = jnp.bfloat16, jnp.float32


def shape(x, dtype=None):
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def normal(*size, dtype=f32, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return put(rng.normal(size=size) * scale, dtype)


def error(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("nan")
    return float(np.nanmax(np.abs(got - want)) / max(np.nanmax(np.abs(want)), 1e-30))


# --- rows ---


def softmax_kernel(x_ref, o_ref):
    x = x_ref[...].astype(f32)
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    o_ref[...] = (e / jnp.sum(e, axis=-1, keepdims=True)).astype(o_ref.dtype)


def softmax_reference(x):
    return jax.nn.softmax(x.astype(f32), axis=-1).astype(x.dtype)


def rmsnorm_kernel(x_ref, o_ref):
    x = x_ref[...].astype(f32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    o_ref[...] = (x * scale).astype(o_ref.dtype)


def rmsnorm_reference(x):
    y = x.astype(f32)
    scale = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def layernorm_kernel(x_ref, o_ref):
    x = x_ref[...].astype(f32)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    var = jnp.mean(centred * centred, axis=-1, keepdims=True)
    o_ref[...] = (centred * jax.lax.rsqrt(var + 1e-6)).astype(o_ref.dtype)


def layernorm_reference(x):
    y = x.astype(f32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    var = jnp.mean(y * y, axis=-1, keepdims=True)
    return (y * jax.lax.rsqrt(var + 1e-6)).astype(x.dtype)


def gelu_kernel(x_ref, o_ref):
    o_ref[...] = jax.nn.gelu(x_ref[...].astype(f32)).astype(o_ref.dtype)


def gelu_reference(x):
    return jax.nn.gelu(x.astype(f32)).astype(x.dtype)


def rows(kernel, x, block, backend="cuda"):
    spec = pl.BlockSpec(block, lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=shape(x),
        grid=(pl.cdiv(x.shape[0], block[0]),),
        in_specs=[spec],
        out_specs=spec,
        backend=backend,
    )(x)


def add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


# --- products ---


def matmul_kernel(x_ref, y_ref, *refs, dims, finish, precision=None):
    *extra, o_ref, sums = refs

    @pl.when(pl.program_id(2) == 0)
    def start():
        sums[...] = jnp.zeros_like(sums)

    sums[...] += jax.lax.dot_general(
        x_ref[...],
        y_ref[...],
        (dims, ((), ())),
        precision=precision,
        preferred_element_type=sums.dtype,
    )

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def end():
        o_ref[...] = finish(sums[...], *(r[...] for r in extra)).astype(o_ref.dtype)


def matmul(
    x, y, *rest, block=(128, 256, 64), left="mk", right="kn", out=None, finish=None,
    backend="cuda", precision=None,
):  # fmt: skip
    """`left` and `right` say how the operands are stored."""
    bm, bn, bk = block
    sizes = dict(zip((*left, *right), (*x.shape, *y.shape), strict=True))
    blocks = {"m": bm, "n": bn, "k": bk}
    index = {"m": 0, "n": 1, "k": 2}

    def spec(dims):
        return pl.BlockSpec(
            tuple(blocks[d] for d in dims),
            lambda *ids: tuple(ids[index[d]] for d in dims),
        )

    sums = jnp.int32 if x.dtype == jnp.int8 else f32
    grid = tuple(pl.cdiv(sizes[d], blocks[d]) for d in "mnk")
    bias = [pl.BlockSpec((1, bn), lambda i, j, k: (0, j)) for _ in rest]
    return pl.pallas_call(
        partial(
            matmul_kernel,
            dims=((left.index("k"),), (right.index("k"),)),
            finish=finish or (lambda acc: acc),
            precision=precision,
        ),
        out_shape=jax.ShapeDtypeStruct((sizes["m"], sizes["n"]), out or x.dtype),
        grid=grid,
        in_specs=[spec(left), spec(right), *bias],
        out_specs=spec("mn"),
        scratch_shapes=[pltpu.VMEM((bm, bn), sums)],
        backend=backend,
    )(x, y, *rest)


def reference(x, y, left, right, out):
    sums = jnp.int32 if x.dtype == jnp.int8 else f32
    if x.dtype.itemsize == 1 and sums == f32:
        x, y = x.astype(f32), y.astype(f32)
    dims = (((left.index("k"),), (right.index("k"),)), ((), ()))
    exact = "highest" if x.dtype == f32 else None
    return jax.lax.dot_general(
        x, y, dims, preferred_element_type=sums, precision=exact
    ).astype(out)


def operand(sizes, dims, dtype, seed):
    size = [sizes[d] for d in dims]
    rng = np.random.default_rng(seed)
    if dtype == jnp.int8:
        return put(rng.integers(-100, 100, size), dtype)
    return put(rng.normal(size=size), dtype)


# --- attention ---

MASKED = -1e30


def absorb(q, k, v, state, scale, keep=None):
    """One block of keys into the running maximum, sum and result; in powers of 2."""
    high, total, out = state
    scores = jax.lax.dot_general(
        q, k, (((1,), (1,)), ((), ())), preferred_element_type=f32
    )
    if keep is not None:
        scores = jnp.where(keep, scores, MASKED)
    new = jnp.maximum(high, jnp.max(scores, axis=1, keepdims=True))
    p = jnp.exp2(scores * scale - new * scale)
    decay = jnp.exp2((high - new) * scale)
    total = total * decay + jnp.sum(p, axis=1, keepdims=True)
    out = out * decay + jnp.dot(p.astype(v.dtype), v, preferred_element_type=f32)
    return new, total, out


def positions(first, size, dim):
    return first + jax.lax.broadcasted_iota(jnp.int32, size, dim)


def grid_kernel(q_ref, k_ref, v_ref, o_ref, high, total, out, *, scale, causal):
    """Steps along the grid, state in scratch."""
    step, steps = pl.program_id(2), pl.num_programs(2)
    rows, columns = q_ref.shape[0], k_ref.shape[0]
    first = pl.program_id(1) * rows

    @pl.when(step == 0)
    def start():
        high[...] = jnp.full_like(high, MASKED)
        total[...] = jnp.zeros_like(total)
        out[...] = jnp.zeros_like(out)

    def move():
        keep = None
        if causal:
            size = (rows, columns)
            keep = positions(first, size, 0) >= positions(step * columns, size, 1)
        state = absorb(
            q_ref[...], k_ref[...], v_ref[...], (high[...], total[...], out[...]),
            scale, keep,
        )  # fmt: skip
        high[...], total[...], out[...] = state

    if causal:
        pl.when(step * columns < first + rows)(move)
    else:
        move()

    @pl.when(step == steps - 1)
    def end():
        o_ref[...] = (out[...] / total[...]).astype(o_ref.dtype)


def loop_kernel(q_ref, k_ref, v_ref, o_ref, *, scale, causal, columns):
    """A loop over the keys inside the kernel, state carried."""
    rows, width = q_ref.shape
    first = pl.program_id(1) * rows
    q = q_ref[...]

    def move(n, state):
        at = pl.ds(n * columns, columns)
        keep = None
        if causal:
            size = (rows, columns)
            keep = positions(first, size, 0) >= positions(n * columns, size, 1)
        return absorb(q, k_ref[at, :], v_ref[at, :], state, scale, keep)

    steps = k_ref.shape[0] // columns
    if causal:
        steps = jax.lax.div(first + rows + columns - 1, columns)
    state = (
        jnp.full((rows, 1), MASKED, f32),
        jnp.zeros((rows, 1), f32),
        jnp.zeros((rows, width), f32),
    )
    _, total, out = jax.lax.fori_loop(0, steps, move, state)
    o_ref[...] = (out / total).astype(o_ref.dtype)


def attention(q, k, v, style="grid", block=(128, 128), causal=False, backend="cuda"):
    """q, k, v: (batch and heads, length, width)."""
    heads, length, width = q.shape
    rows, columns = block
    scale = float(np.log2(np.e)) * width**-0.5
    here = pl.BlockSpec((None, rows, width), lambda h, i, *_: (h, i, 0))
    common = dict(out_shape=shape(q), out_specs=here, backend=backend)
    if style == "grid":
        there = pl.BlockSpec((None, columns, width), lambda h, i, j: (h, j, 0))
        scratch = [(rows, 1), (rows, 1), (rows, width)]
        return pl.pallas_call(
            partial(grid_kernel, scale=scale, causal=causal),
            grid=(heads, pl.cdiv(length, rows), pl.cdiv(length, columns)),
            in_specs=[here, there, there],
            scratch_shapes=[pltpu.VMEM(s, f32) for s in scratch],
            **common,
        )(q, k, v)
    whole = pl.BlockSpec((None, length, width), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        partial(loop_kernel, scale=scale, causal=causal, columns=columns),
        grid=(heads, pl.cdiv(length, rows)),
        in_specs=[here, whole, whole],
        **common,
    )(q, k, v)


# --- attention as it is usually written: a scale, exp, everything an option ---


def plain_step(q, k, v, state, scale, softcap=None, bias=None, keep=None, mask=MASKED):
    """One block of keys into the running maximum, sum and result."""
    high, total, out = state
    scores = jnp.dot(q, k.T, preferred_element_type=f32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.astype(f32)
    if keep is not None:
        scores = jnp.where(keep, scores, mask)
    new = jnp.maximum(high, scores.max(axis=1, keepdims=True))
    p, decay = jnp.exp(scores - new), jnp.exp(high - new)
    total = decay * total + p.sum(axis=1, keepdims=True)
    product = jnp.dot(p.astype(v.dtype), v, preferred_element_type=f32)
    return new, total, decay * out + product


def both(x, y):
    return y if x is None else x & y


def plain_attention(
    q, k, v, bias=None, row_ids=None, column_ids=None, *, style="grid",
    block=(128, 128), causal=False, softcap=None, start=-jnp.inf, mask=MASKED,
    backend="cuda",
):  # fmt: skip
    """q: (heads, length, width); k, v: with as many heads or a fraction of them.

    bias: (heads, length, length); ids: (1, length), equal for what may see each other.
    start: of the running maximum; mask: of scores that are left out.
    """
    heads, length, width = q.shape
    groups = heads // k.shape[0]
    rows, columns = block
    operands = {"q": q, "k": k, "v": v, "bias": bias}
    operands |= {"rows": row_ids, "columns": column_ids}
    operands = {name: x for name, x in operands.items() if x is not None}

    def keep(i, j, refs):
        size, found = (rows, columns), None
        below = positions(i * rows, size, 0)
        right = positions(j * columns, size, 1)
        if causal:
            found = below >= right
        if length % columns:
            found = both(found, right < length)
        if "rows" in refs:
            found = both(found, refs["rows"][0][:, None] == refs["columns"][0][None, :])
        return found

    def step(i, j, refs, keys, state):
        return plain_step(
            refs["q"][0], keys["k"], keys["v"], state, width**-0.5, softcap,
            keys.get("bias"), keep(i, j, refs), mask,
        )  # fmt: skip

    def first_state():
        starts = ((1, start), (1, 0.0), (width, 0.0))
        return [jnp.full((rows, n), x, f32) for n, x in starts]

    def grid_body(*refs):
        *refs, o_ref, high, total, out = refs
        refs = dict(zip(operands, refs, strict=True))
        i, j = pl.program_id(1), pl.program_id(2)
        state = (high, total, out)

        @pl.when(j == 0)
        def _():
            for ref, value in zip(state, first_state(), strict=True):
                ref[...] = value

        @pl.when(j * columns < (i + 1) * rows if causal else j >= 0)
        def _():
            keys = {n: refs[n][0] for n in ("k", "v", "bias") if n in refs}
            new = step(i, j, refs, keys, [ref[...] for ref in state])
            for ref, value in zip(state, new, strict=True):
                ref[...] = value

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o_ref[0] = (out[...] / total[...]).astype(o_ref.dtype)

    def loop_body(q_ref, k_ref, v_ref, o_ref):
        i = pl.program_id(1)

        def move(j, state):
            at = pl.ds(j * columns, columns)
            keys = {"k": k_ref[0, at, :], "v": v_ref[0, at, :]}
            return step(i, j, {"q": q_ref}, keys, state)

        steps = pl.cdiv((i + 1) * rows, columns) if causal else length // columns
        _, total, out = jax.lax.fori_loop(0, steps, move, tuple(first_state()))
        o_ref[0] = (out / total).astype(o_ref.dtype)

    row = pl.BlockSpec((1, rows, width), lambda h, i, *_: (h, i, 0))
    common = dict(out_shape=shape(q), out_specs=row, backend=backend)
    if style == "loop":
        whole = pl.BlockSpec((1, length, width), lambda h, i: (h // groups, 0, 0))
        return pl.pallas_call(
            loop_body, grid=(heads, length // rows), in_specs=[row, whole, whole],
            **common,
        )(q, k, v)  # fmt: skip
    column = pl.BlockSpec(
        (1, columns, width), lambda h, i, j: (h // groups, j, 0), fill=0.0
    )
    specs = {
        "q": row, "k": column, "v": column,
        "bias": pl.BlockSpec((1, rows, columns), lambda h, i, j: (h, i, j)),
        "rows": pl.BlockSpec((1, rows), lambda h, i, j: (0, i)),
        "columns": pl.BlockSpec((1, columns), lambda h, i, j: (0, j)),
    }  # fmt: skip
    return pl.pallas_call(
        grid_body,
        grid=(heads, pl.cdiv(length, rows), pl.cdiv(length, columns)),
        in_specs=[specs[name] for name in operands],
        scratch_shapes=[pltpu.VMEM((rows, n), f32) for n in (1, 1, width)],
        **common,
    )(*operands.values())


def plain_attention_reference(
    q,
    k,
    v,
    bias=None,
    row_ids=None,
    column_ids=None,
    *,
    causal=False,
    softcap=None,
    **_,
):
    groups = q.shape[0] // k.shape[0]
    k, v = (jnp.repeat(x, groups, axis=0) for x in (k, v))
    scores = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=f32)
    scores *= q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores += bias.astype(f32)
    if causal:
        scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, MASKED)
    if row_ids is not None:
        scores = jnp.where(row_ids[0][:, None] == column_ids[0], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("hqk,hkd->hqd", weights, v.astype(f32)).astype(q.dtype)


def attention_reference(q, k, v, causal):
    scores = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=f32)
    scores *= q.shape[-1] ** -0.5
    if causal:
        length = q.shape[1]
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("hqk,hkd->hqd", weights, v.astype(f32)).astype(q.dtype)
