"""Norms, softmax and gated units: rows of any shape and dtype, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite import kernels
from pallasite.kernels.common import row_config

from .agreement import gradients_agree, modes_agree, shards_agree, values_agree

OPERATIONS = {
    "rms_norm": (kernels.rms_norm, "xw"),
    "rms_norm offset": (functools.partial(kernels.rms_norm, scale_offset=1.0), "xw"),
    "rms_norm residual": (
        lambda x, w, r, **how: kernels.rms_norm(x, w, residual=r, **how),
        "xwx",
    ),
    "rms_norm plain": (kernels.rms_norm, "x"),
    "layer_norm": (kernels.layer_norm, "xww"),
    "layer_norm residual": (
        lambda x, w, b, r, **how: kernels.layer_norm(x, w, b, residual=r, **how),
        "xwwx",
    ),
    "layer_norm plain": (kernels.layer_norm, "x"),
    "softmax": (functools.partial(kernels.softmax, scale=0.5), "x"),
    **{
        f"glu {name}": (
            functools.partial(kernels.gated_linear_unit, activation=name),
            "xx",
        )
        for name in ("swish", "gelu", "relu")
    },
}
by_operation = pytest.mark.parametrize("name", OPERATIONS)


def make(kinds, shape, dtype, seed=0):
    """Rows ("x") and weights ("w") as an operation's operands."""
    rng = np.random.default_rng(seed)
    shapes = {"x": shape, "w": shape[-1:]}
    return [jnp.asarray(rng.normal(size=shapes[kind]), dtype) for kind in kinds]


@by_operation
def test_values_and_gradients(name):
    operation, kinds = OPERATIONS[name]
    args = make(kinds, (3, 11, 50), jnp.float32)
    values_agree(operation, *args)
    gradients_agree(operation, *args)


@pytest.mark.parametrize("name", ["rms_norm residual", "layer_norm", "softmax"])
def test_modes(name):
    operation, kinds = OPERATIONS[name]
    modes_agree(operation, *make(kinds, (5, 12), jnp.float32))


@pytest.mark.parametrize("name", ["layer_norm", "softmax", "glu swish"])
def test_sharded_rows(name):
    operation, kinds = OPERATIONS[name]
    args = make(kinds, (128, 24), jnp.float32)  # two blocks of rows per device
    shards_agree(operation, 0, *args)


@settings(max_examples=15)
@given(
    st.sampled_from(sorted(OPERATIONS)),
    st.lists(st.integers(0, 9), min_size=0, max_size=2),
    st.integers(1, 300),
    st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
)
def test_any_shape(name, leading, width, dtype):
    operation, kinds = OPERATIONS[name]
    values_agree(operation, *make(kinds, (*leading, width), dtype))


def test_statistics_are_wide():
    """In bfloat16 a mean over many elements would lose most of them."""
    x = jnp.full((2, 8192), 3.0, jnp.bfloat16)
    np.testing.assert_array_equal(kernels.softmax(x), jnp.full_like(x, 1 / 8192))
    np.testing.assert_array_equal(kernels.rms_norm(x), jnp.ones_like(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.rms_norm(jnp.ones((3, 4), int)), "needs floating-point"),
        (lambda: kernels.rms_norm(jnp.ones((3, 4)), jnp.ones(3)), "needs shape  (4,)"),
        (
            lambda: kernels.layer_norm(jnp.ones((3, 4)), residual=jnp.ones((4, 3))),
            "residual does not match",
        ),
        (
            lambda: kernels.gated_linear_unit(
                jnp.ones(4), jnp.ones(4), activation="silly"
            ),
            "one of 'swish'",
        ),
        (
            lambda: kernels.softmax(jnp.ones(4), implementation="triton"),
            "one of 'pallasite', 'xla', 'reference'",
        ),
        (lambda: kernels.softmax(jnp.float32(3)), "x has no dimensions"),
        (lambda: kernels.sort(jnp.float32(3)), "x has no dimensions"),
        (
            lambda: kernels.softmax(jnp.ones(4), config=kernels.RowConfig(0)),
            "positive integer for block_rows",
        ),
        (
            lambda: kernels.softmax(jnp.ones(4), config=kernels.RowConfig(1.5)),
            "block_rows of its configuration is 1.5",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def test_a_configuration_of_another_operation_is_refused():
    with pytest.raises(TypeError, match=r"pass config=kernels.RowConfig\("):
        kernels.softmax(jnp.ones(4), config=kernels.MatmulConfig())


@pytest.mark.parametrize("operation", [kernels.rms_norm, kernels.layer_norm])
def test_a_residual_of_another_dtype_is_rounded_with_the_sum(operation):
    x, residual = (
        jnp.asarray(np.random.default_rng(seed).standard_normal((5, 30)), dtype)
        for seed, dtype in enumerate(["bfloat16", "float32"])
    )
    added = lambda x, residual, **how: operation(x, residual=residual, **how)
    values_agree(added, x, residual)
    normed, total = added(x, residual)
    assert normed.dtype == total.dtype == x.dtype
    gradient = jax.grad(lambda r: added(x, r)[1].astype(r.dtype).sum())(residual)
    np.testing.assert_array_equal(gradient, jnp.ones_like(residual))


@pytest.mark.parametrize("implementation", ["pallasite", "xla", "reference"])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4)])
def test_rows_that_are_not_there(shape, implementation):
    for operation in (kernels.softmax, functools.partial(kernels.group_norm, groups=1)):
        run = functools.partial(operation, implementation=implementation)
        x = jnp.ones(shape)
        assert run(x).shape == jax.grad(lambda x: run(x).sum())(x).shape == shape


@pytest.mark.parametrize("shape", [(3, 5000), (1, 700), (2, 2, 900)])
def test_fewer_rows_than_a_block_are_one_block(shape):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))
    assert row_config(x).block_rows == np.prod(shape[:-1])
    values_agree(kernels.softmax, x)
