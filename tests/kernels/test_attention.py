"""Attention: every option and mask against plain jnp, forward and backward."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import kernels
from pallasite.autodiff import backward
from pallasite.ir.nodes import walk
from pallasite.kernels import masks
from pallasite.sites import kernels_in
from pallasite.target import chip
from tests.xla import put

from .agreement import gradients_agree, modes_agree, shards_agree, values_agree

SMALL = kernels.AttentionConfig(block_q=32, block_kv=32)


def normal(*shape, dtype=jnp.float32, seed=0):
    return put(np.random.default_rng(seed).normal(size=shape), dtype)


def operands(batch, queries, keys, heads, kv_heads, width, value_width, **how):
    return (
        normal(batch, queries, heads, width, **how, seed=1),
        normal(batch, keys, kv_heads, width, **how, seed=2),
        normal(batch, keys, kv_heads, value_width, **how, seed=3),
    )


def segments(batch, queries, keys):
    ids = np.sort(np.random.default_rng(4).integers(0, 4, (batch, queries + keys)))
    return masks.Segments(ids[:, :queries], ids[:, keys // 2 : keys // 2 + keys])


RNG = np.random.default_rng(5)
SPARSE = masks.Blocks(RNG.random((7, 5)) < 0.4, 16, 16)  # whole queries see nothing
ELEMENTS = masks.Blocks(RNG.random((100, 75)) < 0.02)

OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "causal from the end": {"mask": masks.Causal(offset=-25)},
    "window and lengths": {
        "mask": masks.Window(20, 5) & masks.Prefix(np.array([70, 0]))
    },
    "segments or prefix": {"mask": segments(2, 100, 75) | masks.Prefix(3)},
    "soft cap, large blocks and lengths": {
        "soft_cap": 3.0,
        "scale": 0.3,
        "mask": masks.Blocks(np.array([[1, 0, 1], [0, 1, 1]], bool), 64, 32)
        & masks.Prefix(np.array([70, 0])),
    },
    "bias": {"bias": normal(1, 4, 100, 75)},
    "sinks and dropout": {
        "sinks": normal(4),
        "mask": masks.Causal(),
        "dropout_rate": 0.3,
        "dropout_key": jax.random.key(1),
    },
    "blocks or elements, and a window": {
        "mask": (SPARSE | ELEMENTS) & masks.Window(60, 50)
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    """Grouped heads, values of another width, lengths that no block divides."""
    args = operands(2, 100, 75, 4, 2, 32, 48)
    operation = functools.partial(
        kernels.attention, config=SMALL, return_log_sum_exp=True, **OPTIONS[name]
    )
    values_agree(operation, *args)
    gradients_agree(
        functools.partial(kernels.attention, config=SMALL, **OPTIONS[name]), *args
    )


@pytest.mark.parametrize(
    "mask", [None, masks.Causal(), masks.Prefix(30), masks.Prefix(np.array([75, 20]))]
)
def test_blocks_of_calls_alone(mask):
    """What is differentiated has other blocks, and is the same function."""
    args = operands(2, 100, 75, 4, 2, 32, 48)
    config = kernels.AttentionConfig(block_q=32, block_kv=32, block_q_alone=48)
    operation = functools.partial(kernels.attention, config=config, mask=mask)
    values_agree(operation, *args)
    gradients_agree(operation, *args)
    one = lambda how: lambda q: operation(q, *args[1:], implementation=how)
    tangents = [jax.jvp(one(h), args[:1], args[:1])[1] for h in ("pallasite", "xla")]
    np.testing.assert_allclose(*tangents, atol=1e-5)


@pytest.mark.parametrize("keys", [512, 600])
@pytest.mark.parametrize(
    "mask",
    [
        masks.Causal(),
        masks.Causal(-100),  # rows that may look at nothing
        masks.Window(150, 20),
        masks.Window(30, 0) | masks.Prefix(200),
        None,
    ],
    ids=str,
)
def test_halves_of_blocks(mask, keys):
    """Without what a mask rules out, last keys first; and gradients as without them."""
    args = operands(1, 300, keys, 2, 1, 16, 16)
    config = kernels.AttentionConfig(64, 256, halves_alone=True)
    operation = functools.partial(kernels.attention, config=config, mask=mask)
    values_agree(functools.partial(operation, return_log_sum_exp=True), *args)
    gradients_agree(operation, *args)


NARROW = (4, 4096, 32, 64)


@pytest.mark.parametrize(
    ("shape", "options", "rows"),
    [
        (NARROW, {}, 192),
        (NARROW, {"mask": masks.Causal()}, 192),
        ((4, 4096, 16, 128), {}, 128),  # no registers for it
        ((1, 1024, 32, 64), {}, 128),  # 1152 rows of blocks for 1024
        (NARROW, {"mask": masks.Blocks(np.eye(32, dtype=bool), 128, 128)}, 128),
        (NARROW, {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, 128),
        (NARROW, {"config": kernels.AttentionConfig()}, 128),
    ],
)
def test_narrow_heads_have_three_warpgroups_on_a_hopper_gpu(
    shape, options, rows, monkeypatch
):
    monkeypatch.setenv("PALLASITE_TARGET", "h200")
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3
    run = functools.partial(kernels.attention, **options)
    (alone,) = kernels_in(run, *given)
    assert f"f32[{rows},128] = dot" in alone.text

    def gradient(cotangent, *args):
        return jax.vjp(run, *args)[1](cotangent)

    for kernel in kernels_in(gradient, given[0], *given):
        assert "[192," not in kernel.text


def test_modes():
    operation = functools.partial(
        kernels.attention, config=SMALL, mask=masks.Window(9, 9)
    )
    modes_agree(operation, *operands(1, 40, 40, 2, 1, 16, 16))


@pytest.mark.parametrize("axis", [0, 2])
def test_sharded_batch_or_heads(axis):
    operation = functools.partial(
        kernels.attention,
        mask=masks.Causal(),
        dropout_rate=0.2,
        dropout_key=jax.random.key(2),
    )
    shards_agree(operation, axis, *operands(8, 16, 16, 8, 8, 16, 16))


def test_blocks_of_pairs_have_codes_and_tiles_once():
    allowed = np.zeros((6, 6), bool)
    allowed[0, 0] = allowed[2, 3] = allowed[4:6, 4:6] = True
    table = masks.Blocks(allowed, 8, 8).table(45, 48, 16, 16)
    np.testing.assert_array_equal(table.codes, [[2, 0, 0], [0, 3, 0], [0, 0, 1]])
    assert table.tiles.shape == (4, 16, 16) and table.tiles.dtype == np.int8
    assert not table.tiles[0].any() and table.tiles[1].all()
    np.testing.assert_array_equal(
        np.argwhere(table.tiles[3])[[0, -1]], [[0, 8], [7, 15]]
    )
    assert masks.Blocks(allowed, 16, 32).table(96, 192, 16, 16).tiles is None


def test_a_mask_of_blocks_is_a_static_part_of_a_jitted_function():
    q, k, v = operands(1, 20, 20, 1, 1, 16, 16)
    traced = []

    @jax.jit
    def attend(mask):
        traced.append(mask)
        return kernels.attention(q, k, v, mask=mask, implementation="xla")

    for n in (1, 1, 2):
        allowed = np.tri(20, k=n, dtype=bool)
        attend(masks.Blocks(allowed))
    assert len(traced) == 2
    assert masks.kind(traced[0]) == "Blocks"


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_the_gradient_on_a_gpu_is_divided_among_queries_and_keys(kv_heads, monkeypatch):
    monkeypatch.setenv("PALLASITE_TARGET", "h200")
    shapes = [(2, 4096, heads, 128) for heads in (4, kv_heads, kv_heads)]
    given = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    run = functools.partial(kernels.attention, mask=masks.Causal())
    made = pl.explain_grad(run)(*given).kernels
    products = [sum(op.name == "dot" for op in walk(k.body)) for k in made]
    assert products == [0, 3, 4]


@pytest.mark.parametrize("asked", [False, True])
def test_the_log_sum_exp_is_written_only_where_it_is_asked_for(asked):
    run = functools.partial(kernels.attention, return_log_sum_exp=asked)
    (kernel,) = kernels_in(run, *operands(1, 64, 64, 1, 1, 16, 16))
    assert len(kernel.outputs) == 1 + asked


def test_a_gradient_without_the_log_sum_exp_runs_no_product_twice(monkeypatch):
    """The forward kernel keeps for both results; one of them has no cotangent."""
    monkeypatch.setenv("PALLASITE_TARGET", "h200")
    given = [jax.ShapeDtypeStruct((2, 1024, 4, 128), jnp.bfloat16)] * 4

    def gradient(q, k, v, cotangent):
        both = functools.partial(kernels.attention, return_log_sum_exp=True)
        run = lambda *args: both(*args, mask=masks.Causal())[0]
        result, pull = jax.vjp(run, q, k, v)
        return result, *pull(cotangent)

    made = kernels_in(gradient, *given)
    products = [sum(op.name == "dot" for op in walk(k.body)) for k in made]
    assert products == [2, 0, 3, 4]
    assert "d_result1" not in made[1].text


# Rows that see nothing have a sum of zero, and no log-sum-exp to differentiate.
SOME_SEE_NOTHING = masks.Causal() & masks.Window(10, 0) & masks.Prefix(20)


@pytest.mark.parametrize(
    ("results", "mask"),
    [([0], SOME_SEE_NOTHING), ([1], masks.Causal()), ([0, 1], masks.Causal())],
)
def test_what_a_kernel_keeps_serves_cotangents_of_any_results(
    results, mask, monkeypatch
):
    monkeypatch.setattr(backward, "chip_for", lambda _: chip("h200"))
    args = operands(1, 40, 40, 2, 1, 16, 16)

    def gradients(implementation):
        def run(*args):
            options = {"config": SMALL, "implementation": implementation}
            found = kernels.attention(
                *args, mask=mask, return_log_sum_exp=True, **options
            )
            return [found[n] for n in results]

        given, pull = jax.vjp(run, *args)
        return pull([jnp.cos(x) for x in given])

    pairs = zip(gradients("pallasite"), gradients("reference"), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_query_that_may_look_at_nothing_gives_zeros():
    q, k, v = operands(1, 20, 20, 1, 1, 16, 16)
    mask = masks.Prefix(0)
    assert not kernels.attention(q, k, v, mask=mask).any()
    gradient = jax.grad(lambda q: kernels.attention(q, k, v, mask=mask).sum())(q)
    assert not gradient.any()


@pytest.mark.parametrize("implementation", ["pallasite", "xla"])
def test_a_bias_may_rule_out_all_keys_of_a_query(implementation):
    q, k, v = operands(1, 20, 20, 2, 1, 16, 16)
    bias = jnp.zeros((1, 1, 20, 20)).at[:, :, 3].set(-jnp.inf)

    def total(*args):
        out, log_sum_exp = kernels.attention(
            *args, return_log_sum_exp=True, implementation=implementation
        )
        assert log_sum_exp.shape == (1, 2, 20)
        return out.sum() + jnp.where(jnp.isfinite(log_sum_exp), log_sum_exp, 0).sum()

    gradients = jax.grad(total, argnums=(0, 1, 2, 3))(q, k, v, bias)
    assert all(jnp.isfinite(each).all() for each in gradients)
    assert not gradients[0][0, 3].any() and not gradients[3][0, 0, 3].any()


@pytest.mark.parametrize("implementation", ["pallasite", "xla", "reference"])
def test_a_large_negative_bias_leaves_equal_weights(implementation):
    """As `jax.nn.dot_product_attention` has it; only -inf and masks exclude keys."""
    q, k, v = operands(1, 20, 20, 2, 1, 16, 16)
    bias = jnp.zeros((1, 1, 20, 20)).at[:, :, 3].set(-1e30)
    out, log_sum_exp = kernels.attention(
        q, k, v, bias, return_log_sum_exp=True, implementation=implementation
    )
    np.testing.assert_allclose(
        out[0, 3], np.broadcast_to(v[0].mean(0), (2, 16)), atol=1e-6
    )
    np.testing.assert_allclose(log_sum_exp[0, :, 3], -1e30)


def test_dropout_depends_on_key_and_positions_only():
    """Weights are ones over all keys, and values tell which of them were kept."""
    batch, queries, keys, heads = 2, 40, 60, 3
    q = jnp.zeros((batch, queries, heads, 8))
    k = jnp.zeros((batch, keys, 1, 8))
    v = jnp.broadcast_to(jnp.eye(keys)[None, :, None], (batch, keys, 1, keys))

    def kept(rate, seed=0, block=16, **how):
        config = kernels.AttentionConfig(block, block)
        key = jax.random.key(seed)
        out = kernels.attention(
            q, k, v, dropout_rate=rate, dropout_key=key, config=config, **how
        )
        return np.asarray(out) * keys

    found = kept(0.25)
    np.testing.assert_array_equal(found, kept(0.25, block=32))
    np.testing.assert_allclose(found, kept(0.25, implementation="reference"), 1e-5)
    np.testing.assert_allclose(found[found > 0], 1 / 0.75, 1e-5)
    assert (found != kept(0.25, seed=1)).mean() > 0.3
    stays = found > 0
    assert abs(stays.mean() - 0.75) < 0.02
    # No two rows, heads or batches have the same, and neighbours are independent.
    rows = stays.transpose(0, 2, 1, 3).reshape(-1, keys)
    assert len(np.unique(rows, axis=0)) == len(rows)
    for a, b in ((rows[1:], rows[:-1]), (rows[:, 1:], rows[:, :-1])):
        assert abs((a & b).mean() - 0.75**2) < 0.02
    np.testing.assert_allclose(kept(0.0), 1, 1e-5)
    assert not kept(1.0).any()


def test_the_gradient_with_dropout_is_divided_like_the_one_without(monkeypatch):
    monkeypatch.setenv("PALLASITE_TARGET", "h200")
    given = [jax.ShapeDtypeStruct((2, 1024, 4, 128), jnp.bfloat16)] * 3
    run = functools.partial(
        kernels.attention, dropout_rate=0.1, dropout_key=jax.random.key(0)
    )
    made = pl.explain_grad(run)(*given).kernels
    assert [sum(op.name == "dot" for op in walk(k.body)) for k in made] == [0, 3, 4]


def test_a_mask_is_an_argument_of_a_jitted_function():
    q, k, v = operands(2, 20, 20, 1, 1, 16, 16)
    attend = jax.jit(lambda q, mask: kernels.attention(q, k, v, mask=mask))
    mask = masks.Causal() & masks.Prefix(jnp.array([3, 20]))
    want = kernels.attention(q, k, v, mask=mask, implementation="reference")
    np.testing.assert_allclose(attend(q, mask), want, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": normal(4, 2, 8)}, "query has 3 dimensions"),
        ({"key": normal(1, 4, 2, 9)}, "needs shape  (1, 4, 2, 8)"),
        ({"query": normal(1, 4, 3, 8)}, "does not divide"),
        ({"bias": normal(1, 2, 4, 5)}, "bias does not match"),
        ({"sinks": normal(3)}, "sinks does not match"),
        ({"mask": masks.Blocks(np.ones((2, 2), bool), 2, 1)}, "with shape (2, 4)"),
        ({"dropout_rate": 0.5}, "dropout_key=jax.random.key(seed)"),
        ({"dropout_rate": 1.5}, "a Python number from 0 to 1"),
        ({"mask": masks.Prefix(np.ones(3, int))}, "int32 with shape (1,)"),
        ({"soft_cap": 0.0}, "a positive number, or None"),
        ({"soft_cap": -2}, "soft_cap is -2"),
        ({"config": kernels.AttentionConfig(0)}, "positive integer for block_q"),
        ({"mask": masks.Segments(np.ones((1, 4)), np.ones((1, 4)))}, "needs  integers"),
    ],
)
def test_refusals(change, message):
    args = {n: normal(1, 4, 2, 8) for n in ("query", "key", "value")}
    with pytest.raises(ValueError) as error:
        kernels.attention(**args | change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": [1.0]}, "query is not an array"),
        ({"mask": np.ones((4, 4), bool)}, "masks.Blocks(mask)"),
        ({"mask": masks.Causal}, "masks.Causal(...)"),
        ({"config": kernels.MatmulConfig()}, "kernels.AttentionConfig(...)"),
    ],
)
def test_refused_types(change, message):
    args = {n: normal(1, 4, 2, 8) for n in ("query", "key", "value")}
    with pytest.raises(TypeError) as error:
        kernels.attention(**args | change)
    assert message in str(error.value)


@pytest.mark.parametrize("other", [np.ones((4, 4), bool), None])
def test_masks_compose_with_masks_only(other):
    for compose in (operator.and_, operator.or_):
        with pytest.raises(TypeError, match=r"not an object of kernels\.masks"):
            compose(masks.Causal(), other)
        with pytest.raises(TypeError, match=r"not an object of kernels\.masks"):
            compose(other, masks.Causal())


def test_masks_are_neither_true_nor_negated():
    """`a and b` would be b alone."""
    with pytest.raises(TypeError, match="neither true nor false"):
        masks.Causal() and masks.Prefix(3)
    with pytest.raises(NotImplementedError, match=r"masks\.Blocks\(~allowed\)"):
        ~masks.Causal()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.Causal("1"), "offset of Causal is not an integer"),
        (lambda: masks.Window(1.5), "left of Window is not an integer"),
        (lambda: masks.Segments(None, None), "query_ids is not an array of integers"),
        (lambda: masks.Prefix("text"), "length is not an array of integers"),
        (lambda: masks.Shifted(np.ones(3)), "not an object of kernels.masks"),
        (lambda: masks.Shifted(masks.Causal(), "1"), "rows is not an array"),
    ],
)
def test_masks_of_wrong_numbers(make, message):
    x = normal(1, 4, 2, 8)
    with pytest.raises(TypeError) as error:
        kernels.attention(x, x, x, mask=make())
    assert message in str(error.value)


@pytest.mark.parametrize(
    "key", [3, np.ones(2), jax.random.split(jax.random.key(0), 2)], ids=type
)
def test_dropout_takes_one_key(key):
    x = normal(1, 4, 2, 8)
    with pytest.raises(TypeError, match="dropout_key is not one key"):
        kernels.attention(x, x, x, dropout_rate=0.5, dropout_key=key)


def test_heads_of_no_width_weigh_all_keys_alike():
    query, value = jnp.zeros((1, 3, 2, 0)), normal(1, 4, 2, 8)
    out = kernels.attention(query, jnp.zeros((1, 4, 2, 0)), value)
    want = jnp.broadcast_to(value.mean(1, keepdims=True), (1, 3, 2, 8))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        (np.ones((2, 2)), "pass booleans (blocks of queries, blocks of keys)"),
        (np.ones(2, bool), "bool[2]"),
    ],
)
def test_refused_tables(allowed, message):
    with pytest.raises(ValueError) as error:
        masks.Blocks(allowed)
    assert message in str(error.value)
    traced = "created outside jit"
    with pytest.raises(TypeError, match=traced):
        jax.jit(masks.Blocks)(np.ones((2, 2), bool))
