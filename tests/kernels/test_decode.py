"""Attention over caches, contiguous and paged, of sequences of any length."""

import functools
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite import config, kernels
from pallasite.errors import SpecError
from pallasite.ir.nodes import walk
from pallasite.sites import kernels_in
from tests.xla import put

from .agreement import gradients_agree, modes_agree, values_agree

BATCH, HEADS, KV_HEADS, WIDTH, KEYS, PAGE = 3, 6, 2, 24, 70, 16
LENGTHS = jnp.array([0, 1, KEYS], jnp.int32)


def normal(*shape, dtype=jnp.float32, seed=0):
    return put(np.random.default_rng(seed).normal(size=shape), dtype)


def contiguous(dtype=jnp.float32):
    return (
        normal(BATCH, HEADS, WIDTH, dtype=dtype),
        normal(BATCH, KEYS, KV_HEADS, WIDTH, dtype=dtype, seed=1),
        normal(BATCH, KEYS, KV_HEADS, WIDTH + 8, dtype=dtype, seed=2),
        LENGTHS,
    )


def paged(dtype=jnp.float32):
    """Pages in no order; table entries past a sequence's length are out of range."""
    pages, longest = 20, -(-KEYS // PAGE)
    table = np.random.default_rng(3).permutation(pages)[: BATCH * longest]
    table = table.reshape(BATCH, longest)
    used = np.arange(longest) * PAGE < np.asarray(LENGTHS)[:, None]
    return (
        normal(BATCH, HEADS, WIDTH, dtype=dtype),
        normal(pages, PAGE, KV_HEADS, WIDTH, dtype=dtype, seed=1),
        normal(pages, PAGE, KV_HEADS, WIDTH, dtype=dtype, seed=2),
        LENGTHS,
        jnp.asarray(np.where(used, table, 10**6), jnp.int32),
    )


OPERATIONS = {
    "contiguous": (kernels.decode_attention, contiguous),
    "paged": (kernels.paged_attention, paged),
}
by_operation = pytest.mark.parametrize("name", OPERATIONS)


@by_operation
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values(name, splits, dtype):
    operation, operands = OPERATIONS[name]
    config = kernels.DecodeConfig(block_kv=32, splits=splits)
    options = functools.partial(operation, config=config, soft_cap=5.0)
    values_agree(options, *operands(dtype))


@by_operation
def test_gradients_and_modes(name):
    operation, operands = OPERATIONS[name]
    gradients_agree(operation, *operands())
    modes_agree(operation, *operands())


@by_operation
def test_what_is_past_the_length_does_not_matter(name):
    operation, operands = OPERATIONS[name]
    query, keys, values, lengths, *table = operands()
    want = operation(query, keys, values, lengths, *table)
    if name == "contiguous":
        past = jnp.arange(KEYS)[:, None, None] >= lengths[:, None, None, None]
        keys, values = (jnp.where(past, jnp.nan, x) for x in (keys, values))
    else:
        # The page after the last whole one: of the sequence of one key.
        page = table[0][1, 0]
        keys, values = (x.at[page, 1:].set(jnp.nan) for x in (keys, values))
    np.testing.assert_array_equal(operation(query, keys, values, lengths, *table), want)


@by_operation
@pytest.mark.parametrize("splits", [1, 3])
def test_a_length_past_the_cache_means_all_of_it(name, splits):
    operation, make = OPERATIONS[name]
    operands = list(make())
    # Whatever the table says here: a page that there is.
    operands[4:] = [table % 20 for table in operands[4:]]
    most = KEYS if name == "contiguous" else operands[4].shape[1] * PAGE
    how = {"config": kernels.DecodeConfig(16, splits=splits)}
    operands[3] = jnp.array([most, 0, most])
    want = operation(*operands, **how)
    operands[3] = jnp.array([most + 1, -5, 10**9])
    np.testing.assert_array_equal(operation(*operands, **how), want)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_length_past_the_latent_pages_means_all_of_them(apart, splits):
    pages = normal(5, 4, 8), normal(5, 4, 2, seed=1)
    query = normal(3, 6, 8, seed=2), normal(3, 6, 2, seed=3)
    table = jnp.array([[4, 1, 0], [0, 2, 2], [3, 3, 1]])
    config = kernels.LatentAttentionConfig(splits=splits, apart=apart)
    attend = functools.partial(kernels.latent_attention, scale=0.3, config=config)
    got = attend(*query, *pages, jnp.array([13, -2, 10**9]), table)
    want = attend(*query, *pages, jnp.array([12, 0, 12]), table)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: normal(3, 5, 24)}, "does not divide"),
        ({1: normal(3, 70, 2, 25)}, "needs shape  (3, 70, 2, 24)"),
        ({3: jnp.ones(2, int)}, "needs shape  (3,)"),
        ({3: jnp.ones(3)}, "pass them as int32"),
    ],
)
def test_refusals(change, message):
    args = [change.get(n, x) for n, x in enumerate(contiguous())]
    with pytest.raises(ValueError) as error:
        kernels.decode_attention(*args)
    assert message in str(error.value)


def test_a_cache_grows_under_jit():
    """One compiled step for all lengths."""
    query, keys, values, _ = contiguous()
    traced = []

    @jax.jit
    def step(*operands):
        traced.append(operands)
        return kernels.decode_attention(*operands)

    for length in (1, 33, KEYS):
        lengths = jnp.full(BATCH, length, jnp.int32)
        want = kernels.decode_attention(
            query, keys, values, lengths, implementation="reference"
        )
        np.testing.assert_allclose(step(query, keys, values, lengths), want, atol=1e-5)
    assert len(traced) == 1


def test_a_page_larger_than_a_gpu_has_room_for_is_read_in_parts(monkeypatch):
    module = import_module("pallasite.kernels.configs")
    monkeypatch.setattr(module, "MOST_NUMBERS", 256)  # 16 keys of 12 numbers, padded
    pages = [normal(5, 48, 2, 12, seed=n) for n in (1, 2)]
    lengths = jnp.array([90, 17, 0], jnp.int32)
    table = jnp.array([[4, 1], [0, 99], [-1, -1]], jnp.int32)
    operands = (normal(3, 4, 12), *pages, lengths, table)
    how = dict(config=kernels.DecodeConfig(splits=2))

    def total(query, keys, values, **how):
        out = kernels.paged_attention(query, keys, values, lengths, table, **how)
        return jnp.sum(jnp.sin(out))

    with config.override(target="h200"):
        run = lambda *args: kernels.paged_attention(*args, **how)
        (kernel,) = kernels_in(run, *operands)
        (pipeline,) = [op for op in walk(kernel.body) if op.name == "pipeline"]
        assert pipeline.attrs["grid"][-1] == 3, (
            "two pages of three parts, in two splits"
        )
        got = jax.value_and_grad(functools.partial(total, **how), (0, 1, 2))(
            *operands[:3]
        )
    plain = functools.partial(total, implementation="reference")
    want = jax.value_and_grad(plain, (0, 1, 2))(*operands[:3])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), got, want)


def test_columns_of_a_program_divide_the_latent_vector():
    pages = normal(5, 4, 8), normal(5, 4, 2, seed=1)
    query = normal(3, 6, 8, seed=2), normal(3, 6, 2, seed=3)
    operands = *query, *pages, jnp.array([5, 0, 12]), jnp.zeros((3, 3), int)
    attend = functools.partial(kernels.latent_attention, *operands, scale=0.3)
    config = kernels.LatentAttentionConfig(block_latent=3)
    with pytest.raises(SpecError, match="block_latent does not divide"):
        attend(config=config)
    got = attend(config=kernels.LatentAttentionConfig(block_latent=4))
    np.testing.assert_allclose(got, attend(), rtol=1e-5, atol=1e-6)
