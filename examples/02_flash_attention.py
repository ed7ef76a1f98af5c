"""Flash attention with its state carried in scratch along the key axis of the grid."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite import tpu as pltpu


def flash_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    o_ref: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
    *,
    scale: float,
):
    """One block of queries against one block of keys; softmax state in scratch."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    scores = scale * jnp.dot(q_ref[...], k_ref[...].T)
    m_old, l_old = m_ref[...], l_ref[...]
    m_new = jnp.maximum(m_old, scores.max(axis=1, keepdims=True))
    weights = jnp.exp(scores - m_new)
    rescale = jnp.exp(m_old - m_new)
    m_ref[...] = m_new
    l_ref[...] = rescale * l_old + weights.sum(axis=1, keepdims=True)
    acc_ref[...] = rescale * acc_ref[...] + jnp.dot(weights, v_ref[...])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, block_q: int = 64, block_k: int = 64
):
    heads, length, depth = q.shape
    queries = pl.BlockSpec((None, block_q, depth), lambda h, i, j: (h, i, 0))
    keys = pl.BlockSpec((None, block_k, depth), lambda h, i, j: (h, j, 0))
    return pl.pallas_call(
        functools.partial(flash_kernel, scale=depth**-0.5),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, length // block_q, k.shape[1] // block_k),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        scratch_shapes=[
            pltpu.VMEM((block_q, 1), jnp.float32),
            pltpu.VMEM((block_q, 1), jnp.float32),
            pltpu.VMEM((block_q, depth), jnp.float32),
        ],
        interpret=True,
    )(q, k, v)


def reference(q: jax.Array, k: jax.Array, v: jax.Array):
    scores = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5
    return jax.nn.softmax(scores) @ v


def main():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 256, 64))
    result = jax.jit(flash_attention)(q, k, v)
    error = np.abs(np.asarray(result) - np.asarray(reference(q, k, v))).max()
    assert error < 1e-4, error
    print(f"flash attention, 4 heads of 256x64: max error {error:.1e}")


if __name__ == "__main__":
    main()
