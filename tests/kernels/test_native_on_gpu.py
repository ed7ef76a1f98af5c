"""Every operation, at sizes of real models, is native on a GPU: forward and gradient.

Nothing is compiled or run: each kernel that a traced function calls goes through the
passes of a GPU's backends, one of which must take it. At small sizes all blocks fit;
it is large ones that exceed shared memory or the elements of a Triton tensor.
"""

import inspect
import warnings
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallasite import config, kernels, primitive, sites
from pallasite.backends import base
from pallasite.errors import (
    ChipMemoryError,
    CompileError,
    FallbackWarning,
    UnsupportedError,
)
from pallasite.kernels import masks
from pallasite.target import GPUS

H200 = GPUS["h200"]
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
E8M0 = jnp.float8_e8m0fnu
F8, I8, I32 = jnp.float8_e4m3fn, jnp.int8, jnp.int32
# Operations over several devices, and what calls no kernel.
WITHOUT_CASES = {
    "all_gather_matmul",
    "expert_parallel_mixture",
    "matmul_reduce_scatter",
    "permute",
    "quantize_weights",
    "ring_attention",
    "sort_by_expert",
    "unpermute",
    "zigzag_order",
}


def of(dtype, *shapes):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def qkv(dtype, length, heads, width, kv_heads=None):
    shapes = [(1, length, h, width) for h in (heads, *[kv_heads or heads] * 2)]
    return of(dtype, *shapes)


def attention(*given, **how):
    return partial(kernels.attention, **how), given


def segmented(q, k, v, ids):
    mask = masks.Causal() & masks.Segments(ids, ids)
    return kernels.attention(q, k, v, mask=mask)


def scan(dtype, length, heads, width, groups, state):
    """Operands of a state-space scan."""
    return [
        *of(dtype, (1, length, heads, width)),
        *of(F32, (1, length, heads)),
        *of(dtype, *[(1, length, groups, state)] * 2),
    ]


def paged(dtype, pages_dtype=None, page=128, width=128):
    """8 sequences of up to 8192 keys, 8 heads of keys, 64 of queries."""
    pages = (8 * 8192 // page, page, 8, width)
    return [
        *of(dtype, (8, 64, width)),
        *of(pages_dtype or dtype, pages, pages),
        *of(I32, (8,), (8, 8192 // page)),
    ]


def latent(dtype, heads):
    pages = 8 * 8192 // 128
    return [
        *of(dtype, (8, heads, 512), (8, heads, 64)),
        *of(dtype, (pages, 128, 512), (pages, 128, 64)),
        *of(I32, (8,), (8, 64)),
    ]


def experts(x, logits, gate, up, down):
    return kernels.mixture_of_experts(x, kernels.route(logits, 2), gate, up, down)


def weight_only(bits, x, values, scales):
    return kernels.weight_only_matmul(x, kernels.QuantizedWeights(values, scales, bits))


def quantised_pages(query, keys, values, lengths, table, key_scales, value_scales):
    scales = dict(key_scales=key_scales, value_scales=value_scales)
    return kernels.paged_attention(query, keys, values, lengths, table, **scales)


ROWS = of(BF16, (4096, 16384), (16384,))
PRODUCT = of(BF16, (4096, 4096), (4096, 4097), (4096, 4097))
LOSS = kernels.linear_softmax_cross_entropy_loss
gated = lambda x, y, g: kernels.matmul(x, y, gate=g, activation="swish")
biased = lambda x, y, b, r: kernels.matmul(x, y, bias=b, residual=r, activation="gelu")
with_sinks = lambda q, k, v, sinks: kernels.attention(
    q, k, v, sinks=sinks, soft_cap=30.0
)
CASES = {
    "rms_norm": (kernels.rms_norm, ROWS),
    "rms_norm, few wide rows": (kernels.rms_norm, of(BF16, (8, 131072), (131072,))),
    "layer_norm": (kernels.layer_norm, [*ROWS, ROWS[1]]),
    "softmax": (kernels.softmax, of(BF16, (1000, 131072))),
    "gated_linear_unit": (kernels.gated_linear_unit, [ROWS[0]] * 2),
    "group_norm": (partial(kernels.group_norm, groups=32), of(BF16, (8, 4096, 2048))),
    "rotary_embedding": (
        kernels.rotary_embedding,
        [*of(BF16, (1, 131072, 8, 128)), *of(I32, (1, 131072))],
    ),
    "top_k": (partial(kernels.top_k, k=8), of(F32, (4096, 256))),
    "sort": (kernels.sort, of(F32, (4096, 128))),
    "causal_conv1d": (kernels.causal_conv1d, of(BF16, (1, 131072, 2048), (4, 2048))),
    "linear_recurrence": (kernels.linear_recurrence, of(BF16, *[(1, 65536, 4097)] * 2)),
    "embedding_bag": (
        kernels.embedding_bag,
        [*of(BF16, (131072, 4096)), *of(I32, (8192, 8))],
    ),
    "matmul": (kernels.matmul, PRODUCT[:2]),
    "matmul f32": (kernels.matmul, of(F32, (8192, 16384), (16384, 1000))),
    "matmul, gated": (gated, PRODUCT),
    "matmul, bias and residual": (
        biased,
        of(BF16, (1000, 4096), (4096, 16384), (16384,), (1000, 16384)),
    ),
    "linear_softmax_cross_entropy_loss": (
        LOSS,
        [*of(BF16, (8192, 4096)), *of(I32, (8192,)), *of(BF16, (4096, 131072))],
    ),
    "grouped_matmul": (
        kernels.grouped_matmul,
        [*of(BF16, (65536, 7168), (64, 7168, 2048)), *of(I32, (64,))],
    ),
    "mixture_of_experts, route": (
        experts,
        [
            *of(BF16, (8192, 2048)),
            *of(F32, (8192, 64)),
            *of(BF16, *[(64, 2048, 4096)] * 2, (64, 4096, 2048)),
        ],
    ),
    "block_scaled_matmul": (
        kernels.block_scaled_matmul,
        [*of(F8, *[(4096, 4096)] * 2), *of(F32, (4096, 32), (32, 32))],
    ),
    "scaled_matmul": (
        kernels.scaled_matmul,
        [*of(F8, *[(4096, 4096)] * 2), *of(E8M0, *[(4096, 128)] * 2)],
    ),
    "weight_only_matmul, 4 bits": (
        partial(weight_only, 4),
        [*of(BF16, (16, 8192)), *of(I8, (4096, 8192)), *of(F32, (64, 8192))],
    ),
    "attention": attention(*qkv(BF16, 131072, 32, 128, 8), mask=masks.Causal()),
    "attention f32, wide heads": attention(*qkv(F32, 4096, 4, 256)),
    "attention, sinks and a soft cap": (
        with_sinks,
        [*qkv(BF16, 4097, 16, 192), *of(F32, (16,))],
    ),
    "attention f32, segments": (
        segmented,
        [*qkv(F32, 4096, 16, 128), *of(I32, (1, 4096))],
    ),
    "attention f32, segments, very wide heads": (
        segmented,
        [*qkv(F32, 2048, 8, 576), *of(I32, (1, 2048))],
    ),
    "attention f16, bias": (
        kernels.attention,
        [*qkv(F16, 4097, 16, 192), *of(F16, (1, 1, 4097, 4097))],
    ),
    "state_space_scan": (
        kernels.state_space_scan,
        scan(BF16, 131072, 64, 64, 8, 128),
    ),
    "state_space_scan f32": (kernels.state_space_scan, scan(F32, 4096, 32, 64, 1, 128)),
    "state_space_scan, wide states": (
        kernels.state_space_scan,
        scan(F16, 4097, 16, 128, 2, 256),
    ),
    "decode_attention": (
        kernels.decode_attention,
        [
            *of(BF16, (1, 64, 128), *[(1, 131072, 8, 128)] * 2),
            *of(I32, (1,)),
        ],
    ),
    "paged_attention": (kernels.paged_attention, paged(BF16)),
    "paged_attention f32, large pages": (
        kernels.paged_attention,
        paged(F32, page=256, width=256),
    ),
    "paged_attention, int8": (
        quantised_pages,
        [*paged(BF16, I8), *of(F32, (8,), (8,))],
    ),
    "ragged_paged_attention": (
        kernels.ragged_paged_attention,
        [*of(BF16, (1024, 64, 128)), *paged(BF16)[1:], *of(I32, (8,))],
    ),
    "latent_attention": (
        partial(kernels.latent_attention, scale=0.1),
        latent(BF16, 128),
    ),
    "latent_attention f32": (
        partial(kernels.latent_attention, scale=0.1),
        latent(F32, 16),
    ),
    "update_pages": (
        kernels.update_pages,
        [*of(BF16, (4096, 128, 8, 128), (8192, 8, 128)), *of(I32, (8192,))],
    ),
}
# Inference only.
WITHOUT_GRADIENTS = {
    "block_scaled_matmul",
    "paged_attention, int8",
    "scaled_matmul",
    "ragged_paged_attention",
    "update_pages",
}


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def gradient(operation, operands):
    """Cotangents of all floating-point operands, and the operands of that function."""
    floats = [n for n, x in enumerate(operands) if is_float(x)]
    leaves = jax.tree.leaves(jax.eval_shape(operation, *operands))
    cotangents = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves if is_float(x)]

    def pull_back(cotangents, *args):
        def of_floats(*some):
            given = list(args)
            for n, x in zip(floats, some, strict=True):
                given[n] = x
            return [x for x in jax.tree.leaves(operation(*given)) if is_float(x)]

        return jax.vjp(of_floats, *(args[n] for n in floats))[1](cotangents)

    return pull_back, [cotangents, *operands]


def why_not_native(call):
    """Why neither backend of a GPU takes a call; None: one does."""
    reasons = []
    for name, stage in (("triton", "ttir"), ("cuda", "cuda")):
        options = replace(call.options, chip=H200)
        try:
            base.Compiled(base.get(name), call.kernel, options)[stage]
            return None
        except (UnsupportedError, ChipMemoryError, CompileError) as error:
            reasons.append(f"{call.kernel.name}: {error}")
    return "\n".join(reasons)


def refusals(function, operands):
    # Knobs are not part of the key of what JAX has traced before.
    calls = sites.calls_in(lambda *args: function(*args), *operands)
    assert calls, "the operation has no kernel"
    # Several steps of a gradient may call the same kernel.
    kernels = {call.kernel.text: call for call in calls}
    return [why for why in map(why_not_native, kernels.values()) if why]


@pytest.fixture(autouse=True)
def no_emulation(monkeypatch):
    """For the chip, without the verifier: other tests verify the same passes."""
    with warnings.catch_warnings(), config.override(target="h200", verify=False):
        warnings.simplefilter("error", FallbackWarning)
        monkeypatch.setattr(primitive, "_warned", set())
        yield


def test_every_operation_has_a_case():
    public = (n for n in dir(kernels) if not n.startswith("_"))
    names = {n for n in public if inspect.isfunction(getattr(kernels, n))}
    missing = [n for n in names if not any(n in case for case in CASES)]
    assert sorted(missing) == sorted(WITHOUT_CASES)


@pytest.mark.parametrize("name", CASES)
def test_forward_is_native(name):
    assert not refusals(*CASES[name])


@pytest.mark.parametrize("name", sorted(CASES.keys() - WITHOUT_GRADIENTS))
def test_gradient_is_native(name):
    assert not refusals(*gradient(*CASES[name]))


@pytest.mark.parametrize(
    "operation, widest",
    [
        (kernels.softmax, 1 << 18),
        (kernels.rms_norm, 1 << 18),
        (kernels.layer_norm, 1 << 18),
        (kernels.sort, 512),
    ],
)
def test_rows_that_a_program_has_no_room_for_are_left_to_xla(operation, widest):
    run = lambda x: operation(x)
    for width, has_kernel in ((widest, True), (2 * widest, False)):
        assert bool(sites.calls_in(run, *of(BF16, (8, width)))) == has_kernel
