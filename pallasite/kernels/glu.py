"""`gated_linear_unit`: `activation(gate) * value` in one pass."""

from collections.abc import Callable, Sequence

import jax

from pallasite.errors import SpecError
from pallasite.kernels import common, configs
from pallasite.target import Gpu

ACTIVATIONS: dict[str, Callable] = {
    "swish": jax.nn.swish,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "identity": lambda x: x,
}


_SPELLINGS = {
    "silu": "swish",
    jax.nn.silu: "swish",
    jax.nn.swish: "swish",
    jax.nn.gelu: "gelu",
    jax.nn.relu: "relu",
    jax.nn.sigmoid: "sigmoid",
}


def activation_of(operation: str, given: str | Callable[..., object]) -> str:
    """The name of an activation, which may be given as JAX's function."""
    try:
        name = _SPELLINGS.get(given, given)
    except TypeError:  # not hashable
        name = given
    if callable(name):
        raise SpecError(
            f"{operation} has no activation {getattr(given, '__name__', given)}",
            fix=f"one of {', '.join(map(repr, ACTIVATIONS))}, or JAX's functions of "
            "these names; another one goes around the call: pl.fuse moves it into the "
            "kernel",
        )
    common.check_option(operation, "activation", name, [*ACTIVATIONS])
    return str(name)


def gated_linear_unit(
    gate: jax.Array,
    value: jax.Array,
    *,
    activation: str | Callable[[jax.Array], jax.Array] = "swish",
    implementation: common.Implementation = "pallasite",
    config: common.RowConfig | None = None,
) -> jax.Array:
    """`activation(gate) * value`, computed in float32, returned in gate's dtype.

    Args:
        gate, value: (..., width), of the same shape.
        activation: "swish" (SwiGLU), "gelu" (GEGLU, tanh form), "relu", "sigmoid" or
            "identity"; or JAX's function of one of these names.
    """
    common.check_rows("gated_linear_unit", "gate", gate)
    common.check_rows("gated_linear_unit", "value", value)
    common.check_shape("gated_linear_unit", "value", value, gate.shape)
    activation = activation_of("gated_linear_unit", activation)
    compute = common.choose(implementation, _glu_rows, _plain_glu)
    config = configs.tuned_rows(
        "gated_linear_unit", config, gate, default=_default(gate.shape)
    )
    return compute(gate, value, activation=activation, config=config)


# Elements per block on a GPU, where nothing is reduced: on an H200, two rows of 8192
# at a time reach 4.36 TB/s, one row 4.33.
ELEMENTS = 16384


def _default(shape: Sequence[int]) -> common.RowConfig:
    rows = common.rows_per_block(shape)
    if configs.traced_for(Gpu):
        rows = min(rows, max(1, ELEMENTS // max(shape[-1], 1)))
    return common.RowConfig(rows)


def _gated(gate, value, activation: str):
    wide = common.statistics_dtype(gate.dtype)
    out = ACTIVATIONS[activation](gate.astype(wide)) * value.astype(wide)
    return out.astype(gate.dtype)


def _plain_glu(gate, value, *, activation: str, config: common.RowConfig):
    del config  # only kernels have blocks
    return _gated(gate, value, activation)


def _glu_rows(gate, value, *, activation: str, config: common.RowConfig):
    def kernel(gate_ref, value_ref, o_ref):
        o_ref[...] = _gated(gate_ref[...], value_ref[...], activation)

    return common.over_rows(
        kernel,
        [gate, value],
        [],
        [gate.dtype],
        config=config,
        name="gated_linear_unit",
    )[0]
