"""Every operation at drawn sizes and options: odd ones, 0 and 1 too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite import kernels
from pallasite.kernels import masks

from .agreement import gradients_agree, values_agree
from .test_operations import integers, loss, normal, quantized, weight_only

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]


class Draws:
    """Sizes, choices and arrays, drawn."""

    def __init__(self, data):
        self.draw = data.draw
        self.dtype = self.of(*FLOATS)
        self.seed = 0

    def size(self, low, high):
        return self.draw(st.integers(low, high))

    def of(self, *choices):
        return self.draw(st.sampled_from(choices))

    def floats(self, *shape, dtype=None):
        self.seed += 1
        return normal(*shape, dtype=dtype or self.dtype, seed=self.seed)

    def with_specials(self, *shape):
        """Numbers of which many are equal, infinite or none."""
        choices = jnp.array([jnp.nan, -jnp.inf, jnp.inf, -0.0, 0.0, 1, 2], self.dtype)
        return choices[integers(0, 7, *shape, seed=self.size(0, 9))]


def attention(d: Draws):
    batch, queries, keys = d.size(1, 2), d.size(0, 40), d.size(0, 40)
    heads, kv_heads = d.of((1, 1), (2, 1), (4, 2))
    width = d.size(1, 20)
    table = np.random.default_rng(0).random((5, 5)) < 0.5
    mask = d.of(
        None,
        masks.Causal(-1),
        masks.Blocks(table, 8, 8),
        masks.Blocks(table, 8, 8) & masks.Prefix(np.arange(batch) * 7),
        masks.Blocks(table, 11, 9) | masks.Window(2, 0),
    )
    how = {"mask": mask, "config": kernels.AttentionConfig(16, d.of(16, 32))}
    how |= {"soft_cap": d.of(None, 2.0), "return_log_sum_exp": d.of(True, False)}
    if d.of(True, False):
        ruled_out = integers(0, 3, queries, seed=d.size(0, 9)) == 0
        how["bias"] = jnp.where(ruled_out[:, None], -jnp.inf, jnp.ones((1, 1, 1, keys)))
    if d.of(True, False):
        how |= {"dropout_rate": d.of(0.3, 1.0), "dropout_key": jax.random.key(0)}
    operands = (
        d.floats(batch, queries, heads, width),
        d.floats(batch, keys, kv_heads, width),
        d.floats(batch, keys, kv_heads, 6),
    )
    return functools.partial(kernels.attention, **how), operands


def decode(d: Draws):
    batch, keys = d.size(0, 3), d.size(1, 40)
    heads, kv_heads = d.of((1, 1), (3, 3), (4, 2))
    cache_dtype = d.of(d.dtype, jnp.float8_e4m3fn)
    caches = [d.floats(batch, keys, kv_heads, 7, dtype=cache_dtype) for _ in "kv"]
    lengths = integers(-2, keys + 20, batch, seed=d.size(0, 9))
    scales = d.of((kv_heads,), (batch, keys, kv_heads))
    how = {
        "key_scales": jnp.abs(d.floats(*scales, dtype=jnp.float32)),
        "value_scales": d.of(None, jnp.ones(kv_heads)),
        "config": kernels.DecodeConfig(16, splits=d.size(1, 3)),
    }
    query = d.floats(batch, heads, 7)
    return functools.partial(kernels.decode_attention, **how), (query, *caches, lengths)


def ragged(d: Draws):
    sequences, size, heads = d.size(1, 3), d.size(1, 9), d.of(2, 4)
    new = integers(0, 6, sequences, seed=d.size(0, 9))
    lengths = new + integers(0, 9, sequences)
    table = integers(0, 5, sequences, max(-(-int(lengths.max()) // size), 1))
    pages = [d.floats(5, size, 2, 6) for _ in "kv"]
    how = {"window": d.of(None, 1, 4), "config": kernels.RaggedAttentionConfig(4)}
    operands = (d.floats(int(new.sum()) + 1, heads, 6), *pages, lengths, table, new)
    return functools.partial(kernels.ragged_paged_attention, **how), operands


def matmul(d: Draws):
    m, k, n = d.size(0, 20), d.size(0, 70), d.size(1, 40)
    config = kernels.MatmulConfig(16, 16, 16, splits=d.size(1, 4))
    operation = functools.partial(
        kernels.matmul, config=config, activation=d.of("identity", "gelu")
    )
    return operation, (d.floats(m, k), d.floats(k, n))


def grouped(d: Draws):
    groups, k, n = d.size(1, 4), d.size(0, 30), d.size(1, 20)
    sizes = integers(0, 12, groups, seed=d.size(0, 9))
    rows = int(sizes.sum()) + d.of(0, 3)
    config = kernels.MatmulConfig(16, 16, 16)
    operation = functools.partial(kernels.grouped_matmul, config=config)
    return operation, (d.floats(rows, k), d.floats(groups, k, n), sizes)


def quantised(d: Draws):
    m, k, n, bits = d.size(0, 20), 32 * d.size(1, 3), d.size(1, 40), d.of(4, 8)
    values = quantized(d.floats(k, n, dtype=jnp.float32), bits)
    config = kernels.WeightOnlyConfig(16, 16, splits=d.size(1, 4))
    operation = functools.partial(weight_only, bits=bits, config=config)
    return operation, (d.floats(m, k), *values)


def cross_entropy(d: Draws):
    tokens, hidden, words = d.size(1, 20), d.size(1, 20), d.size(1, 40)
    config = kernels.CrossEntropyConfig(16, 16, 16, block_vocab=16)
    operation = functools.partial(loss, config=config, reduction=d.of("mean", "sum"))
    labels = integers(-1, words, tokens)
    return operation, (d.floats(tokens, hidden), labels, d.floats(hidden, words))


def sequences(d: Draws):
    batch, length, channels = d.size(0, 2), d.size(0, 20), d.size(1, 9)
    x = d.floats(batch, length, channels)
    falling = functools.partial(kernels.sort, descending=True)
    return d.of(
        (kernels.causal_conv1d, (x, d.floats(d.size(1, 4), channels))),
        (kernels.linear_recurrence, (0.5 * x, d.floats(*x.shape))),
        (functools.partial(kernels.group_norm, groups=1), (x,)),
        (functools.partial(kernels.top_k, k=1), (x,)),
        (d.of(kernels.sort, falling), (d.with_specials(*x.shape),)),
    )


def state_space(d: Draws):
    batch, length, groups, state = d.size(0, 2), d.size(0, 30), d.of(1, 2), d.size(1, 9)
    x = d.floats(batch, length, 2, d.size(1, 9))
    forgets = integers(0, 5, batch, length, 2, seed=d.size(0, 9)) == 0
    decays = -jnp.abs(d.floats(batch, length, 2, dtype=jnp.float32))
    b, c = (d.floats(batch, length, groups, state) for _ in "bc")
    config = kernels.StateSpaceConfig(d.of(8, 16))
    operation = functools.partial(kernels.state_space_scan, config=config)
    return operation, (x, jnp.where(forgets, -jnp.inf, decays), b, c)


def pages(d: Draws):
    pages, size, tokens = d.size(1, 4), d.size(1, 5), d.size(0, 6)
    order = np.random.default_rng(d.size(0, 9)).permutation(pages * size + 8)
    new = d.floats(min(tokens, len(order)), 2, 5)
    slots = jnp.asarray(order[: len(new)] - 4, jnp.int32)  # some before and past all
    return kernels.update_pages, (d.floats(pages, size, 2, 5), new, slots)


def norms(d: Draws):
    x = d.floats(d.size(0, 2), d.size(0, 9), d.size(1, 30))
    scale, residual = (
        d.floats(*shape, dtype=d.of(*FLOATS)) for shape in (x.shape[-1:], x.shape)
    )
    operation = d.of(kernels.rms_norm, kernels.layer_norm)
    added = lambda x, scale, residual, **how: operation(
        x, scale, residual=residual, epsilon=0.1, **how
    )
    return added, (x, scale, residual)


OPERATIONS = [
    attention,
    decode,
    ragged,
    matmul,
    grouped,
    quantised,
    cross_entropy,
    sequences,
    norms,
    state_space,
    pages,
]


@pytest.mark.parametrize("make", OPERATIONS, ids=lambda f: f.__name__)
@settings(max_examples=2)
@given(st.data())
def test_any_shape(make, data):
    operation, operands = make(Draws(data))
    values_agree(operation, *operands)
    if all(x.dtype in (jnp.float32, jnp.int32) for x in operands):
        gradients_agree(operation, *operands)
