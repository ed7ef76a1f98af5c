"""Every operation against its reference: values, gradients, and ways to run it.

One row per operation and set of options, at small odd sizes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite import config, kernels
from pallasite.errors import SpecError
from pallasite.kernels import cross_entropy, masks
from tests.xla import put

from .agreement import gradients_agree, modes_agree, shards_agree, values_agree


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation with its options, and operands for it.

    `modes`: also emulated, checked, jitted and mapped. `sharded`: also with this
    dimension of each operand (None: of none) spread over all devices.
    """

    operation: Callable
    operands: tuple[Any, ...]
    gradients: bool = True
    modes: bool = False
    sharded: tuple[int | None, ...] | None = None


def normal(*shape, dtype=jnp.float32, seed=0):
    return put(np.random.default_rng(seed).normal(size=shape), dtype)


def integers(low, high, *shape, seed=0):
    return put(np.random.default_rng(seed).integers(low, high, shape), "int32")


def case(operation, *operands, gradients=True, modes=False, sharded=None, **options):
    options = functools.partial(operation, **options)
    return Case(options, operands, gradients, modes, sharded)


TILES = kernels.MatmulConfig(32, 32, 32)
LOSS = kernels.CrossEntropyConfig(32, 32, 32, block_vocab=48)


def loss(x, labels, weights, **options):
    return kernels.linear_softmax_cross_entropy_loss(x, labels, weights, **options)


def experts(x, logits, gate, up, down, *, implementation="pallasite", **how):
    how["implementation"] = implementation
    routing = kernels.route(logits, 2, implementation=implementation)
    return kernels.mixture_of_experts(x, routing, gate, up, down, **how)


def quantized(weights, bits, dtype="int8"):
    how = dict(bits=bits, group_size=16, dtype=dtype)
    weights = jax.jit(functools.partial(kernels.quantize_weights, **how))(weights)
    return weights.values, weights.scales


def grouped_weight_only(x, values, scales, sizes, *, bits, **how):
    # Values are constants to the gradient: small floats, too.
    weights = kernels.QuantizedWeights(jax.lax.stop_gradient(values), scales, bits)
    return kernels.grouped_matmul(x, weights, sizes, **how)


def quantized_experts(x, logits, **how):
    up, down = normal(3, 32, 64), normal(3, 64, 32)
    gate, up, down = (
        kernels.quantize_weights(w, group_size=16) for w in (-up, up, down)
    )
    return experts(x, logits, gate, up, down, **how)


def weight_only(x, values, scales, *, bits, **how):
    weights = kernels.QuantizedWeights(values, scales, bits)
    return kernels.weight_only_matmul(x, weights, **how)


# Pages in no order; entries of the table that no sequence uses are out of range.
TABLE = jnp.array([[4, 1, 9], [7, 10**6, -5], [-1, -1, -1], [3, 0, 8]], jnp.int32)
LENGTHS = jnp.array([20, 5, 0, 17], jnp.int32)
LATENT = (
    normal(4, 6, 12),
    normal(4, 6, 4, seed=1),
    normal(10, 8, 12, seed=2),
    normal(10, 8, 4, seed=3),
    LENGTHS,
    TABLE,
)


def ragged(*query_lengths, dtype=jnp.float32, pages_dtype=None):
    """25 tokens of which some are in no sequence, over pages of 8 keys."""
    pages = (10, 8, 2, 12)
    return (
        normal(25, 6, 12, dtype=dtype),
        normal(*pages, dtype=pages_dtype or dtype, seed=1),
        normal(*pages[:3], 10, dtype=pages_dtype or dtype, seed=2),
        LENGTHS,
        TABLE,
        jnp.array(query_lengths, jnp.int32),
    )


QUANTISED = (
    normal(4, 6, 12),
    integers(-127, 128, 10, 8, 2, 12, seed=1).astype(jnp.int8),
    integers(-127, 128, 10, 8, 2, 12, seed=2).astype(jnp.int8),
    LENGTHS,
    TABLE,
    0.02 * jnp.ones(2),
    jnp.array([0.01, 0.03]),
)

# What is past the lengths (page 8 from its second token on) is not a number.
PAST = np.zeros((10, 8, 2), bool)
PAST[8, 1:] = True
TOKEN_SCALES = tuple(
    put(np.where(PAST, np.nan, 0.02 * np.abs(normal(10, 8, 2, seed=n))), "float32")
    for n in (3, 4)
)

CASES = {
    "ragged attention: prefill and decode": case(
        kernels.ragged_paged_attention,
        *ragged(7, 1, 0, 14),
        gradients=False,
        modes=True,
        soft_cap=5.0,
        config=kernels.RaggedAttentionConfig(4),
    ),
    "ragged attention: decode in a window": case(
        kernels.ragged_paged_attention,
        *ragged(1, 1, 0, 1, dtype="bfloat16", pages_dtype="float8_e4m3fn"),
        gradients=False,
        window=6,
    ),
    "latent attention": case(
        kernels.latent_attention,
        *LATENT,
        scale=0.3,
        gradients=False,
        config=kernels.LatentAttentionConfig(block_heads=4, block_kv=4, splits=2),
    ),
    "latent attention, the last block apart": case(
        kernels.latent_attention,
        *LATENT,
        scale=0.3,
        gradients=False,
        config=kernels.LatentAttentionConfig(4, 4, 2, block_latent=4, apart=True),
    ),
    "int8 pages": case(
        lambda *args, **how: kernels.paged_attention(
            *args[:5], key_scales=args[5], value_scales=args[6], **how
        ),
        *QUANTISED,
        gradients=False,
    ),
    "int8 pages, scales of tokens": case(
        lambda *args, **how: kernels.paged_attention(
            *args[:5], key_scales=args[5], value_scales=args[6], **how
        ),
        *QUANTISED[:5],
        *TOKEN_SCALES,
        gradients=False,
        config=kernels.DecodeConfig(splits=2),
    ),
    "fp8 cache, scales of tokens": case(
        lambda *args, **how: kernels.decode_attention(
            *args[:4], key_scales=args[4], value_scales=args[5], **how
        ),
        normal(2, 4, 12, dtype="bfloat16"),
        normal(2, 21, 2, 12, dtype="float8_e4m3fn", seed=1),
        normal(2, 21, 2, 10, dtype="float8_e4m3fn", seed=2),
        jnp.array([21, 4], jnp.int32),
        jnp.abs(normal(2, 21, 2)),
        jnp.abs(normal(2, 21, 2, seed=1)),
        gradients=False,
        modes=True,
        config=kernels.DecodeConfig(block_kv=16),
    ),
    "ragged attention: int8 pages, scales of tokens and heads": case(
        lambda *args, **how: kernels.ragged_paged_attention(
            *args[:6], key_scales=args[6], value_scales=args[7], **how
        ),
        *(normal(25, 6, 12), *QUANTISED[1:5], jnp.array([7, 1, 0, 14], jnp.int32)),
        *(TOKEN_SCALES[0], QUANTISED[-1]),
        gradients=False,
        window=9,
    ),
    "update pages": case(
        kernels.update_pages,
        normal(4, 8, 2, 12, dtype="bfloat16"),
        normal(5, 2, 12, seed=1),
        jnp.array([31, -1, 0, 17, -4], jnp.int32),
        gradients=False,
        modes=True,
    ),
    "rotary": case(
        kernels.rotary_embedding,
        normal(8, 5, 3, 14),
        integers(0, 99, 8, 5),
        modes=True,
        sharded=(0, 0),
    ),
    "rotary interleaved, part of a head": case(
        kernels.rotary_embedding,
        normal(2, 5, 3, 14),
        integers(0, 99, 2, 5),
        0.3 * normal(4),
        interleaved=True,
    ),
    "matmul": case(
        kernels.matmul,
        normal(64, 33),
        normal(33, 40),
        modes=True,
        sharded=(0, None),
        config=kernels.MatmulConfig(8, 32, 32),
    ),
    "matmul bias gelu residual": case(
        lambda x, y, b, r, **how: kernels.matmul(x, y, bias=b, residual=r, **how),
        normal(2, 21, 50),
        normal(50, 35),
        normal(35),
        normal(2, 21, 35),
        activation="gelu",
        config=TILES,
    ),
    "matmul gate prologue": case(
        lambda x, y, g, **how: kernels.matmul(x, y, gate=g, **how),
        normal(21, 50),
        normal(50, 35),
        normal(50, 35, seed=1),
        activation="swish",
        prologue=jnp.tanh,
        config=TILES,
    ),
    "matmul, the sum in parts": case(
        lambda x, y, b, r, **how: kernels.matmul(x, y, bias=b, residual=r, **how),
        normal(3, 2, 150),
        normal(150, 35),
        normal(35),
        normal(3, 2, 35),
        activation="gelu",
        config=kernels.MatmulConfig(32, 32, 32, splits=4),
    ),
    "matmul gate prologue, the sum in parts": case(
        lambda x, y, g, **how: kernels.matmul(x, y, gate=g, **how),
        normal(5, 96, dtype="bfloat16"),
        normal(96, 35, dtype="bfloat16"),
        normal(96, 35, seed=1, dtype="bfloat16"),
        activation="swish",
        prologue=jnp.tanh,
        gradients=False,
        config=kernels.MatmulConfig(32, 32, 16, splits=3),
    ),
    "matmul bf16": case(
        kernels.matmul,
        normal(21, 50, dtype="bfloat16"),
        normal(50, 35, dtype="bfloat16"),
        out_dtype=jnp.float32,
        gradients=False,
    ),
    "matmul sum of nothing": case(
        kernels.matmul, normal(3, 0), normal(0, 5), gradients=False
    ),
    "grouped matmul": case(
        kernels.grouped_matmul,
        normal(70, 37),
        normal(4, 37, 33),
        jnp.array([20, 0, 33, 1]),
        modes=True,
        config=kernels.MatmulConfig(16, 16, 16),
    ),
    "grouped matmul, all empty": case(
        kernels.grouped_matmul,
        normal(7, 5),
        normal(3, 5, 6),
        jnp.array([0, 0, 0]),
        gradients=False,
    ),
    "grouped matmul, sizes beyond the rows": case(
        kernels.grouped_matmul,
        normal(40, 37),
        normal(3, 37, 33),
        jnp.array([24, 30, 8]),
        config=kernels.MatmulConfig(16, 16, 16),
    ),
    "grouped matmul of no rows": case(
        kernels.grouped_matmul, normal(0, 5), normal(3, 5, 6), jnp.array([0, 0, 0])
    ),
    "grouped matmul bf16, columns shared": case(
        kernels.grouped_matmul,
        normal(40, 37, dtype="bfloat16"),
        normal(3, 37, 64, dtype="bfloat16"),
        jnp.array([8, 31, 1]),
        sharded=(None, 2, None),
        config=kernels.MatmulConfig(16, 8, 16),
    ),
    "grouped matmul, gated": case(
        lambda x, y, gate, sizes, **how: kernels.grouped_matmul(
            x, y, sizes, gate=gate, **how
        ),
        normal(40, 17),
        normal(3, 17, 20),
        normal(3, 17, 20, seed=1),
        jnp.array([25, 0, 15]),
        config=kernels.MatmulConfig(16, 16, 16),
    ),
    **{
        f"grouped matmul, {name} weights": case(
            functools.partial(grouped_weight_only, bits=bits),
            normal(30, 32),
            *quantized(normal(3, 32, 20), bits, dtype),
            jnp.array([11, 0, 15]),
            config=kernels.MatmulConfig(16, 16, 16),
        )
        for name, bits, dtype in (
            ("4-bit", 4, "int8"),
            ("fp8", 8, "float8_e4m3fn"),
        )
    },
    "mixture of experts, int8 weights": case(
        quantized_experts,
        normal(21, 32),
        normal(21, 3, seed=1),
        gradients=False,
    ),
    "mixture of experts": case(
        experts,
        normal(21, 12),
        normal(21, 5, seed=1),
        normal(5, 12, 20),
        normal(5, 12, 20, seed=1),
        normal(5, 20, 12, seed=2),
        config=kernels.MatmulConfig(16, 16, 16),
    ),
    "top k": case(kernels.top_k, normal(3, 5, 23), k=4),
    "sort": case(kernels.sort, normal(9, 23)),
    "sort down": case(kernels.sort, normal(9, 23), descending=True, gradients=False),
    **{
        f"weight-only matmul, {bits} bits": case(
            weight_only,
            normal(3, 7, 64),
            *quantized(normal(64, 40), bits),
            bits=bits,
            config=kernels.WeightOnlyConfig(16, 32, splits=3),
        )
        for bits in (4, 8)
    },
    "weight-only matmul bf16": case(
        weight_only,
        normal(7, 64, dtype="bfloat16"),
        *quantized(normal(64, 40, dtype="bfloat16"), 4),
        bits=4,
        gradients=False,
        modes=True,
    ),
    "block-scaled matmul": case(
        kernels.block_scaled_matmul,
        normal(21, 64, dtype="float8_e4m3fn"),
        normal(64, 40, dtype="float8_e4m3fn"),
        normal(21, 4),
        normal(4, 3),
        out_dtype=jnp.float32,
        gradients=False,
        config=TILES,
    ),
    "scaled matmul": case(
        kernels.scaled_matmul,
        normal(21, 160, dtype="float8_e4m3fn"),
        normal(40, 160, dtype="float8_e4m3fn"),
        jnp.exp2(integers(-3, 4, 21, 5)).astype("float8_e8m0fnu"),
        jnp.exp2(integers(-3, 4, 40, 5)).astype("float8_e8m0fnu"),
        out_dtype=jnp.float32,
        gradients=False,
    ),
    "scaled matmul, nvfp4": case(
        kernels.scaled_matmul,
        normal(21, 64, dtype="float4_e2m1fn"),
        normal(40, 64, dtype="float4_e2m1fn"),
        normal(21, 4, dtype="float8_e4m3fn"),
        normal(40, 4, dtype="float8_e4m3fn"),
        out_dtype=jnp.float32,
        gradients=False,
        config=kernels.MatmulConfig(16, 32, 32),
    ),
    "group norm": case(
        lambda x, w, b, **how: kernels.group_norm(x, 4, w, b, **how),
        10 + normal(2, 5, 3, 12),
        normal(12),
        normal(12, seed=1),
        config=kernels.RowConfig(8),
    ),
    "embedding bag": case(
        kernels.embedding_bag, normal(20, 12), integers(-1, 20, 5, 3), modes=True
    ),
    "embedding bag, weighted mean": case(
        kernels.embedding_bag,
        normal(20, 12),
        integers(-9, 20, 5, 3),
        normal(5, 3),
        reduction="mean",
    ),
    "causal convolution": case(
        kernels.causal_conv1d,
        normal(2, 21, 12),
        normal(4, 12),
        normal(12, seed=1),
        activation="swish",
        config=kernels.ConvConfig(8, 8),
        modes=True,
    ),
    "linear recurrence": case(
        kernels.linear_recurrence,
        normal(2, 21, 12),
        normal(2, 21, 12, seed=1),
        normal(2, 12, seed=2),
        config=kernels.RecurrenceConfig(8, 8),
        modes=True,
    ),
    "state space scan": case(
        kernels.state_space_scan,
        normal(2, 21, 4, 10),
        -jnp.abs(normal(2, 21, 4)),
        normal(2, 21, 2, 6, seed=1),
        normal(2, 21, 2, 6, seed=2),
        config=kernels.StateSpaceConfig(8),
        modes=True,
    ),
    "loss": case(
        loss, normal(37, 20), integers(-1, 100, 37), normal(20, 100), config=LOSS
    ),
    "loss mean, capped": case(
        loss,
        normal(21, 20),
        integers(-9, 131, 21),
        normal(20, 101),
        reduction="mean",
        soft_cap=3.0,
        config=LOSS,
    ),
    "loss per token": case(
        loss,
        normal(64, 20),
        integers(0, 70, 64),
        normal(20, 70),
        reduction="none",
        gradients=False,
        modes=True,
        sharded=(0, 0, None),
        config=kernels.CrossEntropyConfig(8, 32, 32),
    ),
    "loss bf16": case(
        loss,
        normal(9, 20, dtype="bfloat16"),
        integers(0, 70, 9),
        normal(20, 70, dtype="bfloat16"),
        config=LOSS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_reference(name):
    case = CASES[name]
    values_agree(case.operation, *case.operands)
    if case.gradients:
        gradients_agree(case.operation, *case.operands)
    if case.modes:
        modes_agree(case.operation, *case.operands)
    if case.sharded is not None:
        shards_agree(case.operation, case.sharded, *case.operands)


WITH_TANGENTS = ["group norm", "causal convolution"]


@pytest.mark.parametrize("name", WITH_TANGENTS)
def test_gradients_of_some_operands(name):
    """A kernel that has no tangent of x, or none of a weight."""
    operation, operands = CASES[name].operation, CASES[name].operands
    for kept in ((0,), (1,), (2,), (0, 2)):

        def of_some(*given, kept=kept, **how):
            known = dict(zip(kept, given, strict=True))
            return operation(*(known.get(n, x) for n, x in enumerate(operands)), **how)

        gradients_agree(of_some, *(operands[n] for n in kept))


@pytest.mark.parametrize("target", ["h200", "a100"])
@pytest.mark.parametrize("name", WITH_TANGENTS)
def test_gradients_by_the_blocks_of_a_gpu(name, target):
    with config.override(target=target):
        gradients_agree(CASES[name].operation, *CASES[name].operands)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", WITH_TANGENTS)
def test_gradients_of_narrow_floats(name, dtype):
    narrow = [x.astype(dtype) for x in CASES[name].operands]
    gradients_agree(CASES[name].operation, *narrow)


@pytest.mark.parametrize("name", WITH_TANGENTS)
def test_derivatives_of_every_mode(name):
    operation, operands = CASES[name].operation, CASES[name].operands
    tangents = tuple(normal(*x.shape, seed=9) for x in operands)

    def forward(*args, **how):
        return jax.jvp(functools.partial(operation, **how), args, tangents)

    def reverse(*args, **how):
        total = lambda *args: jnp.sin(operation(*args, **how)).sum()
        return jax.grad(total, (0, 1, 2))(*args)

    def of_batch(*args, **how):
        batch = [jnp.stack([x, 2 * x]) for x in args]
        return jax.vmap(functools.partial(reverse, **how))(*batch)

    def forward_over_reverse(*args, **how):
        return jax.jvp(functools.partial(reverse, **how), args, tangents)[1]

    for derivative in (forward, of_batch, forward_over_reverse):
        values_agree(jax.jit(derivative, static_argnames="implementation"), *operands)
    # Reverse over each of the others.
    gradients_agree(forward, *operands)
    gradients_agree(reverse, *operands)


PAGES = [normal(5, 4, 2, 8)] * 2
NOTHING = {
    "no sequences": case(
        kernels.paged_attention,
        normal(0, 4, 8),
        *PAGES,
        integers(0, 9, 0),
        integers(0, 5, 0, 2),
    ),
    "no pages of a sequence": case(
        kernels.paged_attention,
        normal(2, 4, 8),
        *PAGES,
        integers(0, 1, 2),
        integers(0, 5, 2, 0),
    ),
    **{
        f"{tokens} tokens of {sequences} sequences": case(
            kernels.ragged_paged_attention,
            normal(tokens, 4, 8),
            *PAGES,
            integers(0, 1, sequences),
            integers(0, 5, sequences, 2),
            integers(0, 1, sequences),
        )
        for tokens, sequences in ((0, 2), (3, 0))
    },
    "no tokens for experts": case(
        experts,
        normal(0, 8),
        normal(0, 3),
        *[normal(3, 8, 8)] * 3,
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_do(name):
    values_agree(NOTHING[name].operation, *NOTHING[name].operands)


REFUSALS = [
    (kernels.rotary_embedding, [normal(2, 3, 4), integers(0, 9, 2, 3)], "x has 3 dim"),
    (
        kernels.rotary_embedding,
        [normal(1, 2, 3, 4), integers(0, 9, 1, 2), normal(3)],
        "at most 2 frequencies",
    ),
    (kernels.matmul, [normal(3, 4), normal(5, 6)], "y has shape  (5, 6)"),
    (
        lambda *args: kernels.paged_attention(*args[:5], key_scales=args[5]),
        [*QUANTISED[:5], jnp.ones((10, 8))],
        "per head, (2,), or per token, (10, 8, 2)",
    ),
    (kernels.quantize_weights, [normal(100, 4)], "group_size that divides 100"),
    (kernels.quantize_weights, [None], "weights is not an array"),
    (kernels.weight_only_matmul, [normal(3, 4), normal(4, 5)], "pass quantize_weights"),
    (
        kernels.grouped_matmul,
        [normal(3, 4), normal(2, 4, 5), [1, 2]],
        "group_sizes is not an array",
    ),
    (kernels.quantize_weights, [normal(4)], "pass weights with 2 dimensions: (k, n)"),
    (kernels.softmax, [[1.0, 2.0]], "x is not an array"),
    (
        functools.partial(
            kernels.quantize_weights, bits=4, group_size=16, dtype="float8_e4m3fn"
        ),
        [normal(32, 4)],
        "with 8 bits an 8-bit float",
    ),
    (
        lambda *args: kernels.grouped_matmul(*args[:3], gate=args[3]),
        [
            normal(3, 32),
            kernels.quantize_weights(normal(1, 32, 4), group_size=16),
            jnp.array([3]),
            normal(1, 32, 4),
        ],
        "quantise both",
    ),
    (kernels.top_k, [normal(3, 4), 5], "a k from 0 to 4"),
    (kernels.top_k, [normal(3, 4), 2.0], "k is not an integer"),
    (
        functools.partial(kernels.matmul, prologue=lambda x: x.sum(0)),
        [normal(3, 4), normal(4, 5)],
        "prologue is not elementwise",
    ),
    (
        functools.partial(kernels.quantize_weights, bits=4, group_size=1),
        [normal(7, 4)],
        "a multiple of 2 rows",
    ),
    (
        functools.partial(kernels.quantize_weights, group_size=0),
        [normal(8, 4)],
        "group_size that divides 8",
    ),
    (
        functools.partial(kernels.paged_attention, soft_cap=0.0),
        QUANTISED[:5],
        "a positive number, or None",
    ),
    (
        functools.partial(loss, soft_cap=0),
        [normal(3, 4), integers(0, 5, 3), normal(4, 5)],
        "soft_cap is 0",
    ),
    (
        functools.partial(loss, soft_cap=float("inf")),
        [normal(3, 4), integers(0, 5, 3), normal(4, 5)],
        "soft_cap is inf",
    ),
    (kernels.group_norm, [normal(3, 4), 3], "divisor of channels"),
    (
        functools.partial(kernels.ragged_paged_attention, window=0),
        [
            normal(2, 4, 8),
            *PAGES,
            jnp.array([1, 1]),
            integers(0, 5, 2, 1),
            jnp.array([1, 1]),
        ],
        "window is 0",
    ),
    (
        kernels.permute,
        [normal(6, 3), kernels.sort_by_expert(integers(0, 4, 7, 2), 4)],
        "needs shape  (7, 3)",
    ),
    (loss, [normal(3, 4), normal(3), normal(4, 5)], "pass them as int32"),
    (
        loss,
        [normal(3, 4), integers(0, 5, 3), normal(4, 5, dtype="bfloat16")],
        "differ in dtype",
    ),
    (
        functools.partial(kernels.softmax, scale=jnp.ones(4)),
        [normal(3, 4)],
        "softmax: scale is not a number\n  is   float32[4]\n  fix  pass scale as one",
    ),
    (
        functools.partial(kernels.rms_norm, epsilon="1e-6"),
        [normal(3, 4)],
        "rms_norm: epsilon is not a number\n  is   '1e-6'",
    ),
    (
        functools.partial(kernels.rotary_embedding, base=0),
        [normal(1, 2, 3, 4), jnp.zeros((1, 2), jnp.int32)],
        "rotary_embedding: base is 0",
    ),
    (jax.jit(kernels.group_norm), [normal(3, 4), 2], "groups is a traced value"),
    (kernels.group_norm, [normal(3, 4), 2.0], "group_norm: groups is 2.0"),
    (
        functools.partial(kernels.matmul, out_dtype="floaty"),
        [normal(3, 4), normal(4, 5)],
        "out_dtype is not a dtype\n  is   'floaty'",
    ),
    (
        functools.partial(kernels.matmul, prologue=3),
        [normal(3, 4), normal(4, 5)],
        "prologue is not a function",
    ),
    (
        kernels.mixture_of_experts,
        [normal(7, 6), normal(7, 4), *[normal(4, 6, 5)] * 2, normal(4, 5, 6)],
        "pass kernels.route(logits, k), or kernels.Routing(weights, experts)",
    ),
    (kernels.permute, [normal(7, 6), 3], "pass kernels.sort_by_expert"),
    (
        kernels.weight_only_matmul,
        [
            normal(3, 8),
            kernels.QuantizedWeights(
                jnp.ones((8, 6), jnp.int8), jnp.ones((2, 5)), bits=8
            ),
        ],
        "the scales of weights do not match its values",
    ),
    (kernels.zigzag_order, [8, 0], "zigzag_order: devices is 0"),
    (
        kernels.paged_attention,
        [normal(2, 4, 8), *PAGES, None, integers(0, 5, 2, 1)],
        "paged_attention: lengths is not an array",
    ),
    (
        kernels.paged_attention,
        [
            normal(2, 4, 8),
            PAGES[0] + 0j,
            PAGES[1],
            jnp.array([1, 1]),
            integers(0, 5, 2, 1),
        ],
        "key_pages has no real numbers",
    ),
]


def test_rows_of_no_group_have_no_part_in_gradients():
    x = normal(10, 6).at[7:].set(jnp.nan).at[9].set(jnp.inf)
    sizes = jnp.array([3, 0, 4])

    def gradient(y, **how):
        return jax.grad(lambda y: kernels.grouped_matmul(x, y, sizes, **how).sum())(y)

    y = normal(3, 6, 5)
    want = gradient(y, implementation="xla")
    np.testing.assert_allclose(gradient(y), want, rtol=1e-5, atol=1e-5)


def test_no_steps_hand_nothing_back_to_the_initial_state():
    empty, initial = jnp.ones((2, 0, 3)), normal(2, 3)
    run = lambda h: kernels.linear_recurrence(empty, empty, h).sum()
    np.testing.assert_array_equal(jax.grad(run)(initial), jnp.zeros((2, 3)))


@pytest.mark.parametrize("implementation", ["pallasite", "xla", "reference"])
def test_rows_are_sorted_as_jnp_sorts_them(implementation):
    """NaN above all else, equal elements in their order, whichever way."""
    special = [3, jnp.nan, -jnp.inf, jnp.inf, -0.0, 0.0, 3, jnp.nan, jnp.inf]
    x = jnp.array([special, special[::-1]])
    for descending in (False, True):
        values, places = kernels.sort(
            x, descending=descending, implementation=implementation
        )
        order = jnp.argsort(x, axis=-1, descending=descending, stable=True)
        np.testing.assert_array_equal(places, order)
        np.testing.assert_array_equal(values, jnp.take_along_axis(x, order, -1))


def test_rows_of_no_width_are_sorted():
    values, places = kernels.sort(jnp.ones((3, 0)))
    assert values.shape == places.shape == (3, 0)


@pytest.mark.parametrize("implementation", ["pallasite", "xla", "reference"])
@pytest.mark.parametrize(
    ("operation", "shapes"),
    [
        (kernels.softmax, [(3, 5)]),
        (kernels.rms_norm, [(3, 5), (5,)]),
        (functools.partial(kernels.group_norm, groups=1), [(3, 5)]),
        (functools.partial(kernels.top_k, k=2), [(3, 5)]),
        (kernels.sort, [(3, 5)]),
        (kernels.matmul, [(3, 5), (5, 2)]),
        (kernels.attention, [(1, 3, 2, 4)] * 3),
        (kernels.linear_recurrence, [(1, 3, 4)] * 2),
        (kernels.causal_conv1d, [(1, 3, 4), (2, 4)]),
        (kernels.state_space_scan, [(1, 3, 2, 4), (1, 3, 2), *[(1, 3, 1, 4)] * 2]),
        (kernels.gated_linear_unit, [(3, 4)] * 2),
    ],
)
def test_arrays_of_numpy_are_those_of_jax(operation, shapes, implementation):
    """Its float64, the dtype of whatever numpy makes, is float32 here."""
    made = [np.random.default_rng(n).normal(size=s) for n, s in enumerate(shapes)]
    run = functools.partial(operation, implementation=implementation)
    jax.tree.map(np.testing.assert_array_equal, run(*made), run(*map(jnp.array, made)))


@pytest.mark.parametrize("implementation", ["pallasite", "xla"])
def test_rows_for_slots_that_there_are_not_are_dropped(implementation):
    pages, new = normal(3, 4, 2, 5), normal(4, 2, 5, seed=1)
    slots = jnp.array([12, 5, -1, 1 << 30])
    got = kernels.update_pages(pages, new, slots, implementation=implementation)
    want = pages.at[1, 1].set(new[1])
    np.testing.assert_array_equal(got, want)


def test_integers_of_64_bits_are_not_cut_off():
    far = 2**32 + 1  # 1 in 32 bits
    with jax.enable_x64(True):
        pages = jnp.zeros((2, 3, 1, 1), jnp.float32)
        new = jnp.ones((1, 1, 1), jnp.float32)
        assert not kernels.update_pages(pages, new, jnp.array([far])).any()
        table = jnp.arange(5, dtype=jnp.float32)[:, None]
        assert kernels.embedding_bag(table, jnp.array([[far]])) == 4
        values = table[None, :, None]
        query = jnp.zeros((1, 1, 1), jnp.float32)
        got = kernels.decode_attention(query, values, values, jnp.array([far]))
        assert got == 2
        got = kernels.attention(
            query[:, None], values, values, mask=masks.Prefix(jnp.array([far]))
        )
        assert got == 2


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_experts_of_8_bits(dtype):
    experts = jnp.array([[1, 100], [7, 3]], dtype)
    sizes = kernels.sort_by_expert(experts, 300).group_sizes
    assert np.flatnonzero(sizes).tolist() == [1, 3, 7, 100]


def test_a_convolution_without_taps_is_refused():
    with pytest.raises(SpecError, match="weights have no taps"):
        kernels.causal_conv1d(jnp.ones((2, 3, 4)), jnp.ones((0, 4)))


@pytest.mark.parametrize("shape", [(3, 4), (3, 0), (0, 4)])
def test_none_of_the_largest(shape: tuple[int, ...]):
    values, places = kernels.top_k(jnp.ones(shape), 0)
    assert values.shape == places.shape == (shape[0], 0)
    assert places.dtype == jnp.int32


def test_a_loss_without_a_vocabulary_is_zero():
    x, labels, weights = jnp.ones((4, 3)), jnp.zeros(4, int), jnp.ones((3, 0))
    for implementation in ("pallasite", "xla", "reference"):
        loss = functools.partial(
            kernels.linear_softmax_cross_entropy_loss, implementation=implementation
        )
        assert loss(x, labels, weights) == 0
        assert not jax.grad(loss)(x, labels, weights).any()


@pytest.mark.parametrize(
    "prologue",
    [
        lambda x: x * jnp.ones(70),  # broadcasts to rows of x only
        lambda x: jnp.sum(x, axis=-1),
        lambda x: x.T,
        lambda x: x / jnp.sum(x, axis=-1, keepdims=True),
        lambda x: x - x.max(),
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: jnp.sort(x),
        lambda x: x * jnp.arange(x.shape[-1]),
        lambda x: jax.lax.rev(x, (1,)),
        lambda x: jnp.roll(x, 1, axis=1),
        lambda x: x.at[0].set(0.0),
        jax.jit(lambda x: jax.nn.softmax(x)),
        lambda x: x * jax.random.uniform(jax.random.key(0), x.shape),
    ],
)
def test_a_prologue_of_rows_is_refused(prologue):
    with pytest.raises(SpecError, match="prologue is not elementwise"):
        kernels.matmul(jnp.ones((33, 70)), jnp.ones((70, 5)), prologue=prologue)


@pytest.mark.parametrize(
    "prologue",
    [
        jax.nn.gelu,
        jax.nn.silu,
        jax.nn.relu,
        lambda x: jnp.where(x > 0, x, 0.5).astype(jnp.bfloat16),
        lambda x: jnp.clip(x * jnp.full((1, 1), 2.0), -1, 1),
        lambda x: jnp.round(x).astype(jnp.int8).astype(x.dtype),
        lambda x: x * jnp.asarray([0.5]) + jnp.zeros_like(x),
        lambda x: jax.lax.fori_loop(0, 2, lambda _, v: v * 0.5 + x, x),
        jax.jit(lambda x: jax.nn.leaky_relu(x) ** 3),
    ],
)
def test_elementwise_prologues(prologue):
    x, y = normal(5, 70), normal(70, 5, seed=1)
    got = kernels.matmul(x, y, prologue=prologue)
    want = kernels.matmul(x, y, prologue=prologue, implementation="reference")
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_a_state_is_forgotten_where_it_decays_to_nothing():
    x, b, c = (normal(1, 20, n, 4, seed=n) for n in (2, 1, 1))
    log_decay = -jnp.abs(normal(1, 20, 2)).at[:, ::7].set(jnp.inf)
    scan = functools.partial(
        kernels.state_space_scan, config=kernels.StateSpaceConfig(8)
    )
    values_agree(scan, x, log_decay, b, c)
    gradients_agree(scan, x, log_decay, b, c)


@pytest.mark.parametrize(("operation", "operands", "message"), REFUSALS)
def test_refusals(operation, operands, message):
    with pytest.raises(ValueError) as error:
        operation(*operands)
    assert message in str(error.value)


def test_symbolic_shapes_are_refused_by_name():
    shape = jax.export.symbolic_shape("rows, 8")
    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(kernels.rms_norm, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert "rms_norm: x has a symbolic shape" in str(error.value)


@pytest.mark.parametrize("block_vocab", [64, 256])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_loss_whose_logits_fit_a_block_or_not(block_vocab: int, soft_cap: float | None):
    """A CPU keeps them in the one case and computes them again in the other."""
    x, weights = normal(37, 24), normal(24, 150)
    labels = integers(-1, 150, 37)
    config = kernels.CrossEntropyConfig(block_vocab=block_vocab)

    def loss(x, weights, implementation):
        return kernels.linear_softmax_cross_entropy_loss(
            x,
            labels,
            weights,
            soft_cap=soft_cap,
            config=config,
            implementation=implementation,
        )

    gradients_agree(loss, x, weights)


@pytest.mark.parametrize("most_sums", [None, 0])
def test_loss_whose_blocks_do_not_divide_it(most_sums: int | None, monkeypatch):
    """Parts of unequal length, tokens past the end; or columns at a time."""
    if most_sums is not None:
        monkeypatch.setattr(cross_entropy, "MOST_SUMS", most_sums)
    x, weights, labels = normal(70, 24), normal(24, 150), integers(-1, 150, 70)
    # Of an odd number of blocks, the last part has fewer than the others.
    config = kernels.CrossEntropyConfig(32, 30, 16, block_vocab=64)

    def loss(x: Any, weights: Any, implementation: Any) -> Any:
        return kernels.linear_softmax_cross_entropy_loss(
            x, labels, weights, config=config, implementation=implementation
        )

    gradients_agree(loss, x, weights)


def test_loss_holds_no_logits_on_a_cpu():
    x, weights, labels = normal(256, 32), normal(32, 32768), integers(0, 32768, 256)
    run = jax.grad(kernels.linear_softmax_cross_entropy_loss, argnums=(0, 2))
    stats = jax.jit(run).lower(x, labels, weights).compile().memory_analysis()
    assert stats is not None
    assert stats.temp_size_in_bytes < 256 * 32768 * 4 / 10


def test_gradient_of_an_embedding_whose_entries_repeat():
    """Blocks of entries with no index, one index, many; the last one is shorter."""
    rng = np.random.default_rng(0)
    indices = np.where(rng.random((50, 9)) < 0.5, 7, rng.integers(128, 200, (50, 9)))
    indices[3] = -1
    bag = lambda table, weights, implementation: kernels.embedding_bag(
        table, jnp.asarray(indices), weights, implementation=implementation
    )
    gradients_agree(bag, normal(199, 20), normal(50, 9))


@pytest.mark.parametrize("implementation", ["pallasite", "xla"])
def test_negative_group_sizes_count_as_none(implementation):
    x, y = normal(21, 6), normal(4, 6, 5)
    multiply = functools.partial(
        kernels.grouped_matmul, x, y, implementation=implementation
    )
    got = multiply(jnp.array([5, -3, 9, -(2**31)]))
    np.testing.assert_array_equal(got, multiply(jnp.array([5, 0, 9, 0])))
    np.testing.assert_array_equal(got[14:], jnp.zeros((7, 5)))


def test_segment_ids_of_64_bits_are_compared_whole():
    q, k, v = normal(1, 6, 2, 8), normal(1, 7, 2, 8, seed=1), normal(1, 7, 2, 8, seed=2)
    ids = np.int64([[1, 1, 2**32 + 1, 2**32 + 1, -(2**40), 3]])
    others = np.int64([[1, 2**32 + 1, 1, -(2**40), 3, 3, 2**33 + 1]])

    def attend(query_ids, key_ids):
        return kernels.attention(q, k, v, mask=masks.Segments(query_ids, key_ids))

    want = attend(jnp.array([[1, 1, 2, 2, 0, 3]]), jnp.array([[1, 2, 1, 0, 3, 3, 4]]))
    with jax.enable_x64(True):
        got = attend(jnp.asarray(ids), jnp.asarray(others))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    small = attend(np.int64([[1, 1, 2, 2, 0, 3]]), np.int64([[1, 2, 1, 0, 3, 3, 4]]))
    np.testing.assert_array_equal(small, want)
    with pytest.raises(SpecError, match="query_ids has numbers that 32 bits cannot"):
        attend(ids, others)
