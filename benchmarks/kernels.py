"""Every operation of `pallasite.kernels` beside the same in plain XLA, on this chip.

Each row is one operation at a size for the chip JAX uses; our kernel and XLA run
interleaved in one process, and the best of several rounds of queued calls counts: on a
GPU by the time of their kernels, because a host takes tens of microseconds to start a
call. The distance is between both results, relative to the largest number. On a CPU
torch joins where it is installed and has the operation, on as many threads as XLA has.

    python benchmarks/kernels.py                  # all operations, forward
    python benchmarks/kernels.py norm glu         # those with these in their names
    python benchmarks/kernels.py --grad loss      # gradients
    python benchmarks/kernels.py --dtype bfloat16 # on a CPU, where float32 is usual
    python benchmarks/kernels.py --save results/kernels.json

Operations over several devices are there if there are some:
`XLA_FLAGS=--xla_force_host_platform_device_count=8` makes eight of a CPU.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallasite import kernels
from pallasite.kernels import masks


@dataclass(frozen=True)
class Problem:
    """One operation with operands of a size for the chip.

    Attributes:
        work: floating-point operations, or bytes moved, of the forward operation.
        unit: "flop" or "byte".
        xla: the rival, where it is not the operation's own `implementation="xla"`.
        torch: the same in torch, of the module and tensors, where torch has it.
    """

    operation: Callable
    operands: Callable[[], Sequence[Any]]
    work: float
    unit: str = "byte"
    differentiable: bool = True
    xla: Callable | None = None
    torch: Callable | None = None


def normal(*shape: int, dtype: Any, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def rows_problems(big: bool, dtype: Any) -> dict[str, Problem]:
    rows, width = (16384, 8192) if big else (2048, 2048)
    x = partial(normal, rows, width, dtype=dtype)
    weights = partial(normal, width, dtype=dtype)
    size = rows * width * jnp.dtype(dtype).itemsize
    # Few and wide rows, many and narrow ones.
    shapes = {} if big else {"64 x 8192": (64, 8192), "8192 x 256": (8192, 256)}
    more = {}
    for name, shape in shapes.items():
        of_shape = partial(normal, *shape, dtype=dtype)
        weight = partial(normal, shape[1], dtype=dtype)
        moved = 2 * math.prod(shape) * jnp.dtype(dtype).itemsize
        more[f"softmax {name}"] = Problem(
            kernels.softmax, lambda x=of_shape: [x()], moved, torch=_torch_softmax
        )
        more[f"layer_norm {name}"] = Problem(
            kernels.layer_norm,
            lambda x=of_shape, w=weight: [x(), w(), w(seed=1)],
            moved,
            torch=_torch_layer_norm,
        )
    rms_residual = lambda x, w, r, **how: kernels.rms_norm(x, w, residual=r, **how)
    batch, heads, head = (16, 32, 128) if big else (2, 8, 64)
    positions = lambda: jnp.tile(jnp.arange(2048, dtype=jnp.int32), (batch, 1))
    turned = partial(normal, batch, 2048, heads, head, dtype=dtype)
    return {
        "rms_norm": Problem(
            kernels.rms_norm,
            lambda: [x(), weights()],
            2 * size,
            torch=lambda t, x, w: t.nn.functional.rms_norm(x, w.shape, w, 1e-6),
        ),
        "rms_norm residual": Problem(
            rms_residual,
            lambda: [x(), weights(), x(seed=1)],
            4 * size,
            torch=lambda t, x, w, r: (
                t.nn.functional.rms_norm(x + r, w.shape, w, 1e-6),
                x + r,
            ),
        ),
        "layer_norm": Problem(
            kernels.layer_norm,
            lambda: [x(), weights(), weights(seed=1)],
            2 * size,
            torch=_torch_layer_norm,
        ),
        "softmax": Problem(
            kernels.softmax,
            lambda: [x()],
            2 * size,
            torch=_torch_softmax,
        ),
        "gated_linear_unit": Problem(
            kernels.gated_linear_unit,
            lambda: [x(), x(seed=1)],
            3 * size,
            torch=lambda t, x, y: t.nn.functional.silu(x) * y,
        ),
        "rotary_embedding": Problem(
            kernels.rotary_embedding,
            lambda: [turned(), positions()],
            2 * batch * 2048 * heads * head * jnp.dtype(dtype).itemsize,
        ),
        **more,
    }


def _torch_softmax(torch: Any, x: Any) -> Any:
    return torch.softmax(x, -1)


def _torch_layer_norm(torch: Any, x: Any, scale: Any, bias: Any) -> Any:
    return torch.nn.functional.layer_norm(x, scale.shape, scale, bias, 1e-6)


def product_problems(big: bool, dtype: Any) -> dict[str, Problem]:
    side = 4096 if big else 512
    x = partial(normal, side, side, dtype=dtype)
    y = partial(x, seed=1)
    found = {
        "matmul bias gelu": Problem(
            lambda x, y, b, **how: kernels.matmul(
                x, y, bias=b, activation="gelu", **how
            ),
            lambda: [x(), y(), normal(side, dtype=dtype)],
            2 * side**3,
            "flop",
            torch=lambda t, x, y, b: t.nn.functional.gelu(
                t.addmm(b, x, y), approximate="tanh"
            ),
        ),
        "matmul gate": Problem(
            lambda x, y, g, **how: kernels.matmul(
                x, y, gate=g, activation="swish", **how
            ),
            lambda: [x(), y(), y(seed=2)],
            4 * side**3,
            "flop",
            # Products rounded at once: those of the gradient are of 16 bits, too.
            xla=lambda x, y, g: jax.nn.silu(x @ g) * (x @ y),
            torch=lambda t, x, y, g: t.nn.functional.silu(x @ g) * (x @ y),
        ),
        "matmul gate beside one product": Problem(
            lambda x, y, g, both: kernels.matmul(x, y, gate=g, activation="swish"),
            lambda: [x(), y(), y(seed=2), jnp.hstack([y(), y(seed=2)])],
            4 * side**3,
            "flop",
            differentiable=False,  # weights side by side are another operand
            xla=lambda x, y, g, both: _gated_halves(x @ both),
        ),
    }
    for splits in (None, 1, 4, 16) if big else (None, 1, 4):
        by_default = splits is None
        # Columns as by default.
        of_splits = partial(kernels.MatmulConfig, block_n=256)
        config = None if by_default else of_splits(splits=splits)
        name = "by default" if by_default else f"{splits} splits"
        found[f"matmul of 16 rows, {name}"] = Problem(
            partial(kernels.matmul, config=config),
            lambda: [
                normal(16, 4 * side, dtype=dtype),
                normal(4 * side, side, dtype=dtype),
            ],
            4 * side * side * jnp.dtype(dtype).itemsize,
            torch=lambda t, x, y: x @ y,
        )
    tokens, hidden, vocabulary = (8192, 2048, 131072) if big else (256, 256, 8192)
    for name, depth in {"": hidden, " wide": 2 * hidden}.items():
        found[f"linear_softmax_cross_entropy_loss{name}"] = Problem(
            kernels.linear_softmax_cross_entropy_loss,
            partial(_loss_operands, tokens, depth, vocabulary, dtype),
            2 * tokens * depth * vocabulary,
            "flop",
            torch=lambda t, x, labels, w: t.nn.functional.cross_entropy(
                x @ w, labels.long(), reduction="sum"
            ),
        )
    rows, k, n = (8192, 2048, 8192) if big else (1024, 256, 512)
    for groups in (8, 64):
        found[f"grouped_matmul {groups}"] = Problem(
            kernels.grouped_matmul,
            partial(_grouped_operands, rows, k, n, groups, dtype),
            2 * rows * k * n,
            "flop",
            xla=jax.lax.ragged_dot,
            torch=_torch_grouped,
        )
    return found


def _gated_halves(both: jax.Array) -> jax.Array:
    value, gate = jnp.split(both, 2, axis=1)
    return jax.nn.silu(gate) * value


def _torch_grouped(torch: Any, x: Any, y: Any, sizes: Any) -> Any:
    """A product per group: on a CPU torch has nothing that does it at once."""
    groups = x.split(sizes.tolist())
    return torch.cat([rows @ weights for rows, weights in zip(groups, y, strict=True)])


def _loss_operands(tokens: int, hidden: int, vocabulary: int, dtype: Any) -> list[Any]:
    labels = jax.random.randint(jax.random.key(2), (tokens,), 0, vocabulary)
    scale = jnp.asarray(hidden**-0.5, dtype)
    weights = normal(hidden, vocabulary, dtype=dtype, seed=1) * scale
    return [normal(tokens, hidden, dtype=dtype), labels, weights]


def _grouped_operands(m: int, k: int, n: int, groups: int, dtype: Any) -> list[Any]:
    """Groups of uneven sizes: from nothing to several times the average."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(groups, 1.0))
    sizes = np.floor(share * m).astype(np.int32)
    sizes[-1] += m - sizes.sum()
    x, y = normal(m, k, dtype=dtype), normal(groups, k, n, dtype=dtype, seed=1)
    return [x, y, jnp.asarray(sizes)]


def attention_problems(big: bool, dtype: Any) -> dict[str, Problem]:
    batch, length, heads, width = (2, 4096, 16, 128) if big else (1, 1024, 4, 64)

    def operands(kv_heads: int) -> list[Any]:
        return [
            normal(batch, length, h, width, dtype=dtype, seed=n)
            for n, h in enumerate((heads, kv_heads, kv_heads))
        ]

    causal = partial(kernels.attention, mask=masks.Causal())
    scores = 4 * batch * heads * length * length * width
    # A quarter of the blocks, and in every row one at least.
    count = length // 128
    table = np.random.default_rng(0).random((count, count)) < 0.25
    np.fill_diagonal(table, True)
    sparse = partial(kernels.attention, mask=masks.Blocks(table, 128, 128))
    dropout = partial(
        kernels.attention, dropout_rate=0.1, dropout_key=jax.random.key(0)
    )
    elements = np.kron(table, np.ones((128, 128), bool))
    return {
        "attention": Problem(
            kernels.attention,
            partial(operands, heads),
            scores,
            "flop",
            torch=_torch_attention,
        ),
        "attention causal, grouped heads": Problem(
            causal,
            partial(operands, heads // 4),
            scores / 2,
            "flop",
            torch=partial(_torch_attention, is_causal=True),
        ),
        "attention of blocks": Problem(
            sparse,
            partial(operands, heads),
            scores * table.mean(),
            "flop",
            torch=lambda t, *qkv: _torch_attention(
                t, *qkv, attn_mask=t.from_numpy(elements)
            ),
        ),
        "attention dropout": Problem(dropout, partial(operands, heads), scores, "flop"),
        **(_beside_cudnn(dtype) if big else {}),
    }


def _beside_cudnn(dtype: Any) -> dict[str, Problem]:
    """Attention whose rival is cuDNN's, which XLA calls."""
    found = {}
    shapes = itertools.product((128, 64), ((4, 4096), (1, 16384)), (False, True))
    for width, (batch, length), is_causal in shapes:
        qkv = partial(normal, batch, length, 16, width, dtype=dtype)
        mask = masks.Causal() if is_causal else None
        scores = 4 * batch * 16 * length * length * width
        name = f"attention beside cuDNN, D{width}, S{length}"
        found[name + ", causal" * is_causal] = Problem(
            partial(kernels.attention, mask=mask),
            lambda qkv=qkv: [qkv(seed=n) for n in range(3)],
            scores / 2 if is_causal else scores,
            "flop",
            xla=partial(
                jax.nn.dot_product_attention,
                implementation="cudnn",
                is_causal=is_causal,
            ),
        )
    return found


def _torch_attention(torch: Any, q: Any, k: Any, v: Any, **how: Any) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, enable_gqa=True, **how).transpose(1, 2)


def cache_problems(big: bool, dtype: Any) -> dict[str, Problem]:
    batch, keys, kv_heads, group = (64, 8192, 8, 4) if big else (4, 2048, 2, 4)
    width, page = 128, 128
    pages = batch * keys // page
    query = partial(normal, batch, kv_heads * group, width, dtype=dtype)
    lengths = partial(jnp.full, batch, keys, jnp.int32)
    cache = partial(normal, batch, keys, kv_heads, width, dtype=dtype)
    paged = partial(normal, pages, page, kv_heads, width, dtype=dtype)
    latent = partial(normal, pages, page, dtype=dtype)
    heads = 128 if big else 8
    table = partial(_page_table, batch, pages)
    size = batch * keys * jnp.dtype(dtype).itemsize
    config = kernels.DecodeConfig(splits=8 if big else 1)
    found = {
        "decode_attention": Problem(
            partial(kernels.decode_attention, config=config),
            lambda: [query(), cache(), cache(), lengths()],
            2 * size * kv_heads * width,
            differentiable=False,
            # All caches are full: torch needs no mask.
            torch=lambda t, q, k, v, n: _torch_attention(t, q[:, None], k, v)[:, 0],
        ),
        "latent_attention": Problem(
            partial(kernels.latent_attention, scale=0.1),
            lambda: [
                normal(batch, heads, 512, dtype=dtype),
                normal(batch, heads, 64, dtype=dtype),
                latent(512),
                latent(64),
                lengths(),
                table(),
            ],
            size * 576,
            differentiable=False,
        ),
        "ragged_paged_attention decode": Problem(
            kernels.ragged_paged_attention,
            lambda: [
                query(),
                paged(),
                paged(),
                lengths(),
                table(),
                jnp.ones(batch, jnp.int32),
            ],
            2 * size * kv_heads * width,
            differentiable=False,
        ),
    }
    for splits in (1, 4, 16) if big else (1,):
        found[f"paged_attention, {splits} splits"] = Problem(
            partial(
                kernels.paged_attention, config=kernels.DecodeConfig(splits=splits)
            ),
            lambda: [query(), paged(), paged(), lengths(), table()],
            2 * size * kv_heads * width,
            differentiable=False,
        )
    for small in (jnp.int8, jnp.float8_e4m3fn):
        found[f"paged_attention, {jnp.dtype(small).name} cache"] = Problem(
            _scaled_paged_attention,
            partial(_small_operands, query, paged, lengths, table, kv_heads, small),
            2 * batch * keys * kv_heads * width,
            differentiable=False,
            xla=partial(_scaled_paged_attention, implementation="xla"),
        )
    return found


def _small_operands(query, paged, lengths, table, kv_heads, small):
    """Pages in a small dtype, with a scale per head."""
    pages = [(16 * paged()).astype(small) for _ in range(2)]
    scales = [jnp.full(kv_heads, 1 / 16, jnp.float32)] * 2
    return [query(), *pages, lengths(), table(), *scales]


def _scaled_paged_attention(q, k, v, lengths, table, k_scales, v_scales, **how):
    return kernels.paged_attention(
        *(q, k, v, lengths, table), key_scales=k_scales, value_scales=v_scales, **how
    )


def _page_table(batch: int, pages: int) -> jax.Array:
    order = jax.random.permutation(jax.random.key(3), pages)
    return order.reshape(batch, -1).astype(jnp.int32)


def quantised_problems(big: bool, dtype: Any) -> dict[str, Problem]:
    """Few rows times 8192 x 8192 weights; the rival multiplies by them as floats."""
    side = 8192 if big else 1024
    found = {}
    for rows in (16, 64):
        for bits in (4, 8):
            found[f"weight_only_matmul, {bits} bits, {rows} rows"] = Problem(
                partial(_weight_only, bits),
                partial(_weight_only_operands, rows, side, bits, dtype),
                side * side * bits / 8,
                differentiable=False,
                xla=lambda x, values, scales, dense: jnp.dot(x, dense),
            )
    side = side // 2
    small = jnp.float8_e4m3fn
    found["block_scaled_matmul"] = Problem(
        kernels.block_scaled_matmul,
        lambda: [
            normal(side, side, dtype=small),
            normal(side, side, dtype=small, seed=1),
            normal(side, side // 128, dtype=jnp.float32),
            normal(side // 128, side // 128, dtype=jnp.float32),
        ],
        2 * side**3,
        "flop",
        differentiable=False,
    )
    return found


def _weight_only(bits: Any, x: Any, values: Any, scales: Any, dense: Any) -> jax.Array:
    del dense  # the rival's
    return kernels.weight_only_matmul(x, kernels.QuantizedWeights(values, scales, bits))


def _weight_only_operands(rows: int, side: int, bits: Any, dtype: Any) -> list[Any]:
    weights = kernels.quantize_weights(
        normal(side, side, dtype=dtype), bits=bits, group_size=128
    )
    dense = weights.dequantize()
    return [normal(rows, side, dtype=dtype), weights.values, weights.scales, dense]


def other_problems(big: bool, dtype: Any) -> dict[str, Problem]:
    batch, length, channels = (8, 4096, 2048) if big else (1, 1024, 256)
    x = partial(normal, batch, length, channels, dtype=dtype)
    size = batch * length * channels * jnp.dtype(dtype).itemsize
    heads, width, state = channels // 64, 64, 128
    tokens, hidden, experts = (8192, 2048, 64) if big else (512, 128, 8)
    layers = [(experts, hidden, 2 * hidden)] * 2 + [(experts, 2 * hidden, hidden)]
    by_experts = lambda x, logits, *layers, **how: kernels.mixture_of_experts(
        x, kernels.route(logits, 2, **how), *layers, **how
    )
    return {
        "group_norm": Problem(
            lambda x, **how: kernels.group_norm(x, 32, **how),
            lambda: [x()],
            3 * size,
            torch=lambda t, x: t.nn.functional.group_norm(
                x.transpose(1, 2), 32, eps=1e-6
            ).transpose(1, 2),
        ),
        "causal_conv1d": Problem(
            partial(kernels.causal_conv1d, activation="swish"),
            lambda: [x(), normal(4, channels, dtype=dtype)],
            2 * size,
            torch=_torch_conv,
        ),
        "linear_recurrence": Problem(
            kernels.linear_recurrence,
            lambda: [jax.nn.sigmoid(x()), x(seed=1)],
            3 * size,
        ),
        "state_space_scan": Problem(
            kernels.state_space_scan,
            lambda: [
                normal(batch, length, heads, width, dtype=dtype),
                -jnp.abs(normal(batch, length, heads, dtype=jnp.float32)),
                *(normal(batch, length, 1, state, dtype=dtype) for _ in range(2)),
            ],
            2 * size,
        ),
        "embedding_bag": Problem(
            kernels.embedding_bag,
            lambda: [
                normal(100_000, 512, dtype=dtype),
                jax.random.randint(jax.random.key(1), (4096, 32), 0, 100_000),
            ],
            4096 * 32 * 512 * jnp.dtype(dtype).itemsize,
            torch=lambda t, table, indices: t.nn.functional.embedding_bag(
                indices, table, mode="sum"
            ),
        ),
        "top_k": Problem(
            partial(kernels.top_k, k=8),
            lambda: [normal(65536 if big else 4096, 64, dtype=jnp.float32)],
            (65536 if big else 4096) * 64 * 4,
            torch=lambda t, x: tuple(t.topk(x, 8)),
        ),
        "sort": Problem(
            kernels.sort,
            lambda: [normal(65536 if big else 1024, 128, dtype=jnp.float32)],
            (65536 if big else 1024) * 128 * 4,
            torch=lambda t, x: tuple(t.sort(x, stable=True)),
        ),
        "mixture_of_experts": Problem(
            by_experts,
            lambda: [
                normal(tokens, hidden, dtype=dtype),
                normal(tokens, experts, dtype=jnp.float32),
                *(normal(*shape, dtype=dtype) for shape in layers),
            ],
            2 * 3 * 2 * tokens * hidden * 2 * hidden,
            "flop",
        ),
    }


def _torch_conv(torch: Any, x: Any, weights: Any) -> Any:
    functional, (taps, channels) = torch.nn.functional, weights.shape
    padded = functional.pad(x.transpose(1, 2), (taps - 1, 0))
    kernel = weights.T[:, None].contiguous()
    convolved = functional.conv1d(padded, kernel, groups=channels)
    return functional.silu(convolved).transpose(1, 2)


def devices_problems(big: bool, dtype: Any) -> dict[str, Problem]:
    """On all devices there are; the rival gathers, multiplies and scatters by XLA."""
    count = jax.device_count()
    if count == 1:
        return {}
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,))
    rows, columns, along = P("x"), P(None, "x"), P(None, "x")

    def on_devices(operation: Callable, specs: Any, out: Any) -> Callable:
        def run(*operands: Any, **how: Any) -> Any:
            each = partial(operation, axis="x", **how)
            mapped = jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=out)
            return mapped(*operands)

        return run

    def placed(specs: Sequence[Any], *shapes: Sequence[int]) -> list[Any]:
        arrays = [normal(*s, dtype=dtype, seed=n) for n, s in enumerate(shapes)]
        return [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]

    m, k, n = (8192, 8192, 8192) if big else (1024, 512, 512)
    batch, heads, width = (1, 16, 128) if big else (1, 4, 64)
    length = count * (4096 if big else 128)
    causal = lambda q, k, v, **how: kernels.ring_attention(
        q, k, v, masks.Causal(), order="zigzag", **how
    )
    tokens, hidden, experts = (8192, 2048, 64) if big else (512, 128, 2 * count)
    layers = [(experts, hidden, 2 * hidden)] * 2 + [(experts, 2 * hidden, hidden)]
    by_experts = lambda x, logits, *layers, **how: kernels.expert_parallel_mixture(
        x, kernels.route(logits, 2), *layers, **how
    )
    return {
        f"all_gather_matmul, {count} devices": Problem(
            on_devices(kernels.all_gather_matmul, (rows, columns), columns),
            lambda: placed((rows, columns), (m, k), (k, n)),
            2 * m * k * n,
            "flop",
        ),
        f"matmul_reduce_scatter, {count} devices": Problem(
            on_devices(kernels.matmul_reduce_scatter, (columns, rows), rows),
            lambda: placed((columns, rows), (m, k), (k, n)),
            2 * m * k * n,
            "flop",
        ),
        f"ring_attention causal, {count} devices": Problem(
            on_devices(causal, along, along),
            lambda: placed([along] * 3, *[(batch, length, heads, width)] * 3),
            2 * batch * heads * length * length * width,
            "flop",
        ),
        f"expert_parallel_mixture, {count} devices": Problem(
            on_devices(by_experts, rows, rows),
            lambda: placed([rows] * 5, (tokens, hidden), (tokens, experts), *layers),
            2 * 3 * 2 * tokens * hidden * 2 * hidden,
            "flop",
        ),
    }


def problems(dtype: Any = None) -> dict[str, Problem]:
    big = jax.default_backend() != "cpu"
    dtype = dtype or (jnp.bfloat16 if big else jnp.float32)
    families = (
        rows_problems,
        product_problems,
        quantised_problems,
        attention_problems,
        cache_problems,
        other_problems,
        devices_problems,
    )
    return {k: v for family in families for k, v in family(big, dtype).items()}


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def float_results(operation: Callable) -> Callable:
    return lambda *args: [x for x in jax.tree.leaves(operation(*args)) if is_float(x)]


def gradient(operation: Callable, operands: Sequence[Any]) -> Callable:
    """Cotangents of all floating-point operands, from those of the results.

    What the forward operation leaves for it is part of it; a result that it does not
    need is not computed.
    """
    floats = [n for n, x in enumerate(operands) if is_float(x)]

    def pull_back(cotangents: Any, *args: Any) -> Any:
        def of_floats(*given: Any) -> Any:
            all_args = list(args)
            for n, x in zip(floats, given, strict=True):
                all_args[n] = x
            return float_results(operation)(*all_args)

        _, pull = jax.vjp(of_floats, *(args[n] for n in floats))
        return pull(cotangents)

    return pull_back


def seconds(
    functions: dict[str, Callable], operands: Sequence[Any], rounds: int = 7
) -> dict[str, float]:
    """Of each function the best round of queued calls, per call; rounds interleaved."""
    best = dict.fromkeys(functions, float("inf"))
    calls = {}
    for name, function in functions.items():
        jax.block_until_ready(function(*operands))
        start = time.perf_counter()
        jax.block_until_ready(function(*operands))
        calls[name] = max(1, min(20, int(0.05 / (time.perf_counter() - start))))
    timer = device_timer()
    for _ in range(rounds if timer is None else 3):
        for name, function in functions.items():
            if timer is not None:
                spent = timer(function, operands, calls[name])
            else:
                start = time.perf_counter()
                results = [function(*operands) for _ in range(calls[name])]
                jax.block_until_ready(results)
                spent = (time.perf_counter() - start) / calls[name]
            best[name] = min(best[name], spent)
            if "torch" in functions:
                # OpenMP's threads spin for more work some 15 ms before they rest.
                time.sleep(0.02)
    return best


@cache
def device_timer() -> Callable | None:
    """What measures the kernels of a call on a GPU; None elsewhere."""
    if jax.default_backend() != "gpu":
        return None
    sys.path.insert(0, str(Path(__file__).parent.parent))
    timer = import_module("benchmarks.gpu").Timer()
    return timer if timer.kind.startswith("CUPTI") else None


def distance(got: Any, want: Any) -> float:
    """The largest difference of two results, relative to the largest number."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (jnp.asarray(_array(x), jnp.float32) for x in (a, b))
        scale = jnp.maximum(jnp.max(jnp.abs(b)), 1e-9)
        worst = max(worst, float(jnp.max(jnp.abs(a - b)) / scale))
    return worst


def torch_rival(
    problem: Problem, operands: Sequence[Any], cotangents: Sequence[Any]
) -> dict[str, Callable]:
    """The operation in torch, or its gradient if there are cotangents.

    It has its operands already and ignores those it is called with. Nothing where
    there is no torch.
    """
    if problem.torch is None or jax.default_backend() != "cpu":
        return {}
    try:
        torch = import_module("torch")
    except ImportError:
        return {}
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tensors = [_tensor(torch, x) for x in operands]
    weights = [_tensor(torch, x) for x in cotangents]
    run = partial(problem.torch, torch, *tensors)
    if not weights:
        forward = torch.no_grad()(run)
        return {"torch": lambda *_: forward()}
    floats = [x.requires_grad_() for x in tensors if x.is_floating_point()]

    def pull_back(*_: Any) -> Any:
        results = [x for x in jax.tree.leaves(run()) if x.is_floating_point()]
        return torch.autograd.grad(results, floats, weights)

    return {"torch": pull_back}


def _tensor(torch: Any, x: Any) -> Any:
    """A copy of an array; torch does not know bfloat16 of numpy."""
    if x.dtype != jnp.bfloat16:
        return torch.from_numpy(np.array(x))
    return torch.from_numpy(np.array(x, np.float32)).to(torch.bfloat16)


def _array(x: Any) -> np.ndarray:
    """A result, of JAX or of torch."""
    if not isinstance(x, jax.Array) and x.is_floating_point():
        x = x.float()
    return np.asarray(x)


def measure(problem: Problem, of_gradient: bool, rounds: int) -> dict[str, Any]:
    operands = given = problem.operands()
    rival = problem.xla or partial(problem.operation, implementation="xla")
    functions = {"ours": problem.operation, "xla": rival}
    cotangents = []
    if of_gradient:
        results = jax.eval_shape(float_results(problem.operation), *operands)
        functions = {n: gradient(f, operands) for n, f in functions.items()}
        cotangents = [normal(*x.shape, dtype=x.dtype, seed=9) for x in results]
        given = [cotangents, *operands]
    functions = {n: jax.jit(f) for n, f in functions.items()}
    functions |= torch_rival(problem, operands, cotangents)
    want = functions["xla"](*given)
    found = max(distance(f(*given), want) for f in functions.values())
    times = seconds(functions, given, rounds)
    row = {
        "ms": 1e3 * times["ours"],
        "xla ms": 1e3 * times["xla"],
        "times faster": times["xla"] / times["ours"],
        "tera/s": problem.work / times["ours"] / 1e12,
        "unit": problem.unit,
        "distance": found,
        "operands": ", ".join(
            jax.typeof(x).str_short(True) for x in jax.tree.leaves(operands)
        ),
    }
    if "torch" in times:
        row["torch ms"] = 1e3 * times["torch"]
        row["times faster than torch"] = times["torch"] / times["ours"]
    return row


def save(path: Path, part: str, rows: dict[str, Any], **versions: str) -> None:
    """Put rows into the file: other rows, and the other part, stay as they are."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    date = datetime.now(UTC).date().isoformat()
    stored["device"] = jax.devices()[0].device_kind
    stored |= {"jax": jax.__version__, **versions}
    dated = {name: {**row, "date": date} for name, row in rows.items()}
    stored.setdefault(part, {}).update(dated)
    path.write_text(json.dumps(stored, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; all by default")
    parser.add_argument("--grad", action="store_true", help="gradients")
    parser.add_argument("--dtype", type=jnp.dtype, help="of operands")
    parser.add_argument("--rounds", type=int, default=7, help="of calls, on a CPU")
    parser.add_argument("--save", type=Path, help="a JSON file for the numbers")
    options = parser.parse_args(argv)
    found = {}
    for name, problem in problems(options.dtype).items():
        if options.names and not any(part in name for part in options.names):
            continue
        if options.grad and not problem.differentiable:
            continue
        try:
            row = measure(problem, options.grad, options.rounds)
        except Exception as error:  # one that fails leaves the others their turn
            print(f"{name:40} {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        if options.dtype is not None:
            name = f"{name}, {options.dtype.name}"
        found[name] = row
        rate = "" if options.grad else f"{row['tera/s']:8.3g} T{row['unit']}/s"
        torch = ""
        if "torch ms" in row:
            faster = row["times faster than torch"]
            torch = f" torch {row['torch ms']:9.3f} ms, {faster:5.2f} times"
        print(
            f"{name:40} {row['ms']:9.3f} ms, XLA {row['xla ms']:9.3f} ms,"
            f" {row['times faster']:5.2f} times{torch} {rate}"
            f" distance {row['distance']:.1e}",
            flush=True,
        )
        if options.save:  # after each, so that what ends early leaves something
            save(options.save, "gradients" if options.grad else "rows", found)


if __name__ == "__main__":
    main()
