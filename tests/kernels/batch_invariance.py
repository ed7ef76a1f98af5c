"""Operations with `batch_invariant=True`: functions of rows, for tests and benchmarks.

Each case makes the rows of its operands and what all rows share; `run` gives results
and gradients, row by row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import kernels
from pallasite.kernels import masks

ROWS = 200  # from which parts are taken


@dataclass(frozen=True)
class Case:
    """An operation of rows.

    Attributes:
        rows: shapes of operands after their first dimension, the rows; integers are the
            bound of random integers instead.
        shared: shapes of the operands that all rows share.
        function: of the rows, then the shared operands.
        differentiable: how many operands with rows have gradients.
        count: of rows.
        prepare: what is done to the shared operands before the call.
    """

    function: Callable[..., Any]
    rows: Sequence[tuple[int, ...] | int]
    shared: Sequence[tuple[int, ...]] = ()
    differentiable: int = 1
    count: int = ROWS
    prepare: Callable[..., Any] = lambda *shared: list(shared)


def _gelu(x, residual, y, bias, **how):
    how |= {"bias": bias, "residual": residual, "activation": "gelu"}
    return kernels.matmul(x, y, **how)


def _gated(x, y, gate, **how):
    return kernels.matmul(x, y, gate=gate, activation="swish", **how)


def _quantized(bits: int) -> Callable[..., Any]:
    return lambda y: [kernels.quantize_weights(y, bits=bits, group_size=64)]


def _loss(x, labels, weights, **how):
    loss = kernels.linear_softmax_cross_entropy_loss
    return loss(x, labels, weights, reduction="none", **how)


def _block_scaled(x, scales, y, **how):
    narrow = partial(jnp.asarray, dtype=jnp.float8_e4m3fn)
    whole = jnp.ones((y.shape[0] // 128, -(-y.shape[1] // 128)))
    made = kernels.block_scaled_matmul(
        narrow(x), narrow(y), jnp.abs(scales.astype(jnp.float32)), whole, **how
    )
    return made


def _attention(query, key, value, **how):
    return kernels.attention(query, key, value, mask=masks.Causal(), **how)


def _decode(query, key, value, lengths, **how):
    return kernels.decode_attention(query, key, value, lengths, **how)


def cases(k: int = 384, n: int = 192, vocabulary: int = 600, keys: int = 1100):
    """The cases with sizes of these shapes."""
    return {
        "matmul": Case(kernels.matmul, [(k,)], [(k, n)]),
        "matmul gelu": Case(_gelu, [(k,), (n,)], [(k, n), (n,)], 2),
        "matmul gate": Case(_gated, [(k,)], [(k, n), (k, n)]),
        "weight_only_matmul 8": Case(
            kernels.weight_only_matmul, [(k,)], [(k, n)], prepare=_quantized(8)
        ),
        "weight_only_matmul 4": Case(
            kernels.weight_only_matmul, [(k,)], [(k, n)], prepare=_quantized(4)
        ),
        "block_scaled_matmul": Case(
            _block_scaled, [(k,), (k // 128,)], [(k, n)], differentiable=0
        ),
        "linear_softmax_cross_entropy_loss": Case(
            _loss, [(k,), vocabulary], [(k, vocabulary)]
        ),
        "rms_norm": Case(kernels.rms_norm, [(k,)], [(k,)]),
        "layer_norm": Case(kernels.layer_norm, [(k,)], [(k,), (k,)]),
        "softmax": Case(kernels.softmax, [(k,)]),
        "attention": Case(
            _attention, [(70, 2, 32), (70, 1, 32), (70, 1, 32)], (), 3, count=5
        ),
        "decode_attention": Case(
            _decode, [(8, 64), (keys, 2, 64), (keys, 2, 64), keys], (), 0, count=5
        ),
    }


def operands(case: Case, dtype: Any) -> tuple[list[Any], list[Any]]:
    """Those with rows, and those without."""
    rng = np.random.default_rng(0)
    normal = lambda shape: jnp.asarray(rng.standard_normal(shape), dtype)
    rows = [
        jnp.asarray(rng.integers(0, of, case.count), jnp.int32)
        if isinstance(of, int)
        else normal((case.count, *of))
        for of in case.rows
    ]
    return rows, case.prepare(*map(normal, case.shared))


def run(case: Case, rows: Sequence[Any], shared: Sequence[Any], **how) -> list[Any]:
    """The result, and the gradients of what has rows, of a sum with weights."""
    out = jax.jit(partial(case.function, **how))(*rows, *shared)
    if not case.differentiable:
        return [out]

    def total(*given):
        made = case.function(*given, *rows[len(given) :], *shared, **how)
        weights = jnp.cos(jnp.arange(made[0].size)).reshape(made.shape[1:])
        return (made.astype(jnp.float32) * weights).sum()

    given = rows[: case.differentiable]
    return [out, *jax.jit(jax.grad(total, range(len(given))))(*given)]
