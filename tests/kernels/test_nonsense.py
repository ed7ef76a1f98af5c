"""Every operation given nonsense for one argument: an error of ours, or a result.

Never an exception of JAX, numpy or Python itself from somewhere inside, which would not
say which argument is wrong.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite import kernels
from pallasite.errors import PallasError
from pallasite.kernels import masks

from .test_operations import integers, normal

PAGES = {
    "key_pages": normal(5, 4, 2, 8),
    "value_pages": normal(5, 4, 2, 8),
    "lengths": jnp.array([3, 8]),
    "page_table": jnp.array([[4, 1], [0, 2]]),
    "key_scales": jnp.ones(2),
    "value_scales": jnp.ones((5, 4, 2)),
}
EXPERTS = {"gate": normal(4, 6, 5), "up": normal(4, 6, 5), "down": normal(4, 5, 6)}

# Right arguments of every operation, from which each test takes one away.
RIGHT: dict[str, dict[str, Any]] = {
    "attention": {
        "query": normal(2, 5, 4, 8),
        "key": normal(2, 6, 2, 8),
        "value": normal(2, 6, 2, 8),
        "bias": normal(1, 1, 5, 6),
        "mask": masks.Causal(),
        "scale": 0.5,
        "soft_cap": 3.0,
        "sinks": normal(4),
        "dropout_rate": 0.5,
        "dropout_key": jax.random.key(0),
    },
    "decode_attention": {
        "query": normal(2, 4, 8),
        "key_cache": normal(2, 6, 2, 8),
        "value_cache": normal(2, 6, 2, 8),
        "lengths": jnp.array([3, 6]),
        "scale": 0.5,
        "soft_cap": 3.0,
        "key_scales": jnp.ones(2),
        "value_scales": jnp.ones((2, 6, 2)),
    },
    "paged_attention": {"query": normal(2, 4, 8), **PAGES, "scale": 0.5},
    "ragged_paged_attention": {
        "query": normal(5, 4, 8),
        **PAGES,
        "query_lengths": jnp.array([2, 3]),
        "scale": 0.5,
        "soft_cap": 3.0,
        "window": 3,
    },
    "latent_attention": {
        "query": normal(2, 4, 8),
        "query_rotary": normal(2, 4, 6),
        "latent_pages": normal(5, 4, 8),
        "rotary_pages": normal(5, 4, 6),
        "lengths": PAGES["lengths"],
        "page_table": PAGES["page_table"],
        "scale": 0.5,
    },
    "update_pages": {
        "pages": normal(5, 4, 2, 3),
        "new": normal(3, 2, 3),
        "slots": jnp.array([3, -1, 7]),
    },
    "matmul": {
        "x": normal(5, 8),
        "y": normal(8, 6),
        "gate": normal(8, 6),
        "bias": normal(6),
        "residual": normal(5, 6),
        "activation": "gelu",
        "prologue": jnp.tanh,
        "out_dtype": jnp.float32,
    },
    "quantize_weights": {
        "weights": normal(8, 6),
        "bits": 8,
        "group_size": 4,
        "dtype": jnp.int8,
    },
    "weight_only_matmul": {
        "x": normal(5, 8),
        "weights": kernels.quantize_weights(normal(8, 6), group_size=4),
    },
    "block_scaled_matmul": {
        "x": normal(5, 8),
        "y": normal(8, 6),
        "x_scales": jnp.ones((5, 2)),
        "y_scales": jnp.ones((2, 2)),
        "out_dtype": jnp.float32,
    },
    "scaled_matmul": {
        "x": normal(5, 64).astype(jnp.float8_e4m3fn),
        "y": normal(6, 64).astype(jnp.float8_e4m3fn),
        "x_scales": jnp.ones((5, 2), jnp.float8_e8m0fnu),
        "y_scales": jnp.ones((6, 2), jnp.float8_e8m0fnu),
        "out_dtype": jnp.float32,
    },
    "grouped_matmul": {
        "x": normal(10, 4),
        "y": normal(3, 4, 5),
        "group_sizes": jnp.array([3, 0, 5]),
        "gate": normal(3, 4, 5),
        "activation": "gelu",
    },
    "route": {"logits": normal(7, 4), "top_k": 2},
    "sort_by_expert": {"experts": integers(0, 4, 7, 2), "num_experts": 4},
    "permute": {
        "x": normal(7, 6),
        "permutation": kernels.sort_by_expert(integers(0, 4, 7, 2), 4),
    },
    "unpermute": {
        "rows": normal(14, 6),
        "permutation": kernels.sort_by_expert(integers(0, 4, 7, 2), 4),
        "weights": normal(7, 2),
    },
    "mixture_of_experts": {
        "x": normal(7, 6),
        "routing": kernels.Routing(normal(7, 2), integers(0, 4, 7, 2)),
        **EXPERTS,
        "activation": "gelu",
    },
    "linear_softmax_cross_entropy_loss": {
        "x": normal(6, 8),
        "labels": integers(-1, 11, 6),
        "weights": normal(8, 11),
        "reduction": "mean",
        "soft_cap": 3.0,
    },
    "rms_norm": {
        "x": normal(4, 8),
        "scale": normal(8),
        "residual": normal(4, 8),
        "epsilon": 1e-3,
        "scale_offset": 1.0,
    },
    "layer_norm": {
        "x": normal(4, 8),
        "scale": normal(8),
        "bias": normal(8),
        "residual": normal(4, 8),
        "epsilon": 1e-3,
        "scale_offset": 1.0,
    },
    "group_norm": {
        "x": normal(2, 4, 8),
        "groups": 2,
        "scale": normal(8),
        "bias": normal(8),
        "epsilon": 1e-3,
    },
    "softmax": {"x": normal(4, 8), "scale": 0.5},
    "gated_linear_unit": {
        "gate": normal(4, 8),
        "value": normal(4, 8),
        "activation": "gelu",
    },
    "rotary_embedding": {
        "x": normal(2, 5, 3, 8),
        "positions": integers(0, 9, 2, 5),
        "frequencies": normal(4),
    },
    "top_k": {"x": normal(4, 8), "k": 2},
    "sort": {"x": normal(4, 8)},
    "embedding_bag": {
        "table": normal(5, 4),
        "indices": integers(-1, 5, 2, 3),
        "weights": normal(2, 3),
        "reduction": "mean",
    },
    "causal_conv1d": {
        "x": normal(2, 9, 5),
        "weights": normal(4, 5),
        "bias": normal(5),
        "activation": "gelu",
    },
    "linear_recurrence": {
        "decay": normal(2, 9, 5),
        "x": normal(2, 9, 5),
        "initial": normal(2, 5),
    },
    "state_space_scan": {
        "x": normal(2, 9, 4, 3),
        "log_decay": -jnp.ones((2, 9, 4)),
        "b": normal(2, 9, 2, 6),
        "c": normal(2, 9, 2, 6),
    },
    "zigzag_order": {"length": 8, "devices": 2},
}
# Needed beside the right ones: operations inside `shard_map` have their own tests.
DEFAULTED = {"base": 10000.0, "config": None, "implementation": "pallasite"}
WRONG = [None, "text", 1.5, -3, 0, (), [1.0], object(), jnp.ones(3), masks.Causal, {}]
WRONG += [2 + 1j, np.ones((2, 1)), np.array(None), True, jax.random.key(1)]


def wrong(value: Any) -> list[Any]:
    """What may come in an argument's place: nonsense, or an array almost like it."""
    choices: list[Any] = list(WRONG)
    if isinstance(value, jax.Array) and not jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        choices += [value[None], value[0], value[:-1], value[..., :-1], value > 0]
        choices += [
            value.astype(jnp.complex64),
            np.asarray(value).tolist(),
            value.astype(jnp.int8),
        ]
        choices += [jax.ShapeDtypeStruct(value.shape, value.dtype)]
    return choices


@pytest.mark.parametrize("name", RIGHT)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_nonsense_is_refused_by_name_or_understood(name, data):
    operation = getattr(kernels, name)
    right = dict(RIGHT[name])
    parameters = inspect.signature(operation).parameters
    right |= {n: v for n, v in DEFAULTED.items() if n in parameters and n not in right}
    argument = data.draw(st.sampled_from(sorted(right)))
    choices = wrong(right[argument])
    right[argument] = choices[data.draw(st.integers(0, len(choices) - 1))]
    if name == "rotary_embedding" and argument == "base":
        del right["frequencies"]
    try:
        jax.eval_shape(lambda: operation(**right))
    except PallasError as error:
        text = str(error).replace(".values", "").replace(".scales", "")
        assert argument in text or any(other in text for other in right), text


@pytest.mark.parametrize("name", RIGHT)
def test_right_arguments_are_right(name):
    getattr(kernels, name)(**RIGHT[name])


def test_every_operation_is_here():
    """Those for several devices, and configurations, are tested elsewhere."""
    devices = {"all_gather_matmul", "matmul_reduce_scatter", "ring_attention"}
    devices |= {"expert_parallel_mixture"}
    public = {
        name
        for name, value in vars(kernels).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert public - devices == set(RIGHT)
