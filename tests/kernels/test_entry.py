"""What operations say of arguments that other libraries call otherwise, or that are
turned round; and which frames a traceback shows."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import kernels
from pallasite.errors import KernelTypeError, KernelWarning, PallasError, SpecError


def zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape)


TENSOR = type("Tensor", (), {"__module__": "torch", "shape": (4, 8)})
HEADS = zeros(1, 64, 2, 16)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: kernels.causal_conv1d(zeros(2, 64, 8), zeros(8, 4)),
            "pass weights.T, of shape (4, 8): (taps, channels)",
        ),
        (
            lambda: kernels.causal_conv1d(zeros(2, 8, 64), zeros(4, 8)),
            "pass jnp.swapaxes(x, 1, 2): x is (batch, length, channels)",
        ),
        (
            lambda: kernels.causal_conv1d(zeros(2, 8, 64), zeros(4, 9)),
            "pass x (batch, length, channels) and weights (taps, channels)",
        ),
        (
            lambda: kernels.matmul(zeros(16, 32), zeros(64, 32)),
            "pass y.T, of shape (32, 64): y is (k, n)",
        ),
        (
            lambda: kernels.matmul(zeros(16, 32), zeros(5, 7)),
            "y has shape  (5, 7)",
        ),
        (
            lambda: kernels.matmul(zeros(8, 4), zeros(4, 6), gate=zeros(6, 4)),
            "pass jnp.swapaxes(gate, -2, -1), of shape (4, 6)",
        ),
        (
            lambda: kernels.linear_softmax_cross_entropy_loss(
                zeros(8, 32), jnp.zeros(8, int), zeros(100, 32)
            ),
            "pass jnp.swapaxes(weights, -2, -1), of shape (32, 100), if",
        ),
        (
            lambda: kernels.grouped_matmul(
                zeros(8, 32), zeros(2, 16, 32), jnp.array([4, 4])
            ),
            "pass jnp.swapaxes(y, -2, -1), of shape (2, 32, 16), if",
        ),
        (lambda: kernels.route(zeros(8, 4), 9), "route: top_k is 9"),
        (lambda: kernels.rms_norm(zeros(4, 8), eps=1e-5), "pass epsilon="),
        (
            lambda: kernels.attention(HEADS, HEADS, HEADS, is_causal=True),
            "pass mask=kernels.masks.Causal()",
        ),
        (lambda: kernels.softmax(zeros(4, 8), scales=2), "did you mean 'scale'?"),
        (lambda: kernels.softmax(TENSOR()), "softmax: operand 0 is a torch tensor"),
        (
            lambda: pl.pallas_call(lambda x, o: None, out_shape=HEADS)(TENSOR()),
            "operand 0 is a torch tensor",
        ),
        (
            lambda: kernels.matmul(zeros(8, 8), zeros(8, 8), activation=jnp.tanh),
            "or JAX's functions of these names",
        ),
        (
            lambda: kernels.attention(zeros(1, 4, 96, 16), *[zeros(1, 4, 64, 16)] * 2),
            "jnp.swapaxes(x, 1, 2) if heads come first",
        ),
    ],
)
def test_the_operand_and_the_fix_are_named(call, said):
    with pytest.raises((SpecError, KernelTypeError)) as refused:
        call()
    text = str(refused.value)
    assert said in text and "fix  " in text.splitlines()[-1]


def test_heads_in_place_of_the_length_are_a_warning():
    swapped = zeros(1, 4, 64, 16)
    with pytest.warns(KernelWarning, match="heads and length swapped") as said:
        jax.eval_shape(kernels.attention, swapped, swapped, swapped)
    assert said[0].filename == __file__


def test_activations_may_be_functions_of_jax():
    x, y = (jnp.asarray(np.random.default_rng(0).normal(size=(8, 8))) for _ in range(2))
    for given in ("silu", jax.nn.silu, jax.nn.swish):
        found = kernels.matmul(x, y, activation=given)
        np.testing.assert_array_equal(found, kernels.matmul(x, y, activation="swish"))
    gated = kernels.gated_linear_unit(x, y, activation=jax.nn.gelu)
    wanted = kernels.gated_linear_unit(x, y, activation="gelu")
    np.testing.assert_array_equal(gated, wanted)
    with pytest.raises(SpecError, match="has no activation"):
        kernels.matmul(x, y, activation=x)  # pyright: ignore[reportArgumentType]


def test_only_what_authors_use_is_listed():
    from pallasite.kernels import common, cross_entropy

    assert common and cross_entropy  # importable all the same
    listed = dir(kernels)
    assert "matmul" in listed and "masks" in listed
    assert not {"common", "configs", "cross_entropy", "entry"} & {*listed}
    with pytest.raises(AttributeError, match="linear_softmax_cross_entropy_loss"):
        kernels.cross_entropy
    with pytest.raises(AttributeError, match="did you mean 'softmax'"):
        kernels.sofmax
    assert "pallas_call" in dir(pl) and "BlockSpec" in dir(pl)
    assert not {"passes", "ir", "primitive", "jaxcompat", "_config"} & {*dir(pl)}


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


@pytest.fixture
def filtered():
    before = jax.config.jax_traceback_filtering
    yield lambda mode: jax.config.update("jax_traceback_filtering", mode)
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.grad])
@pytest.mark.parametrize("kind", ["library", "own"])
def test_tracebacks_show_the_users_frames_and_end_with_the_fix(filtered, around, kind):
    def product(x):
        if kind == "library":
            return kernels.matmul(x, zeros(64, 32))
        wrong = pl.BlockSpec((8,), lambda i: (i,))  # of one dimension
        return pl.pallas_call(copy, out_shape=x, grid=2, out_specs=wrong)(x)

    def shown() -> tuple[list[str], str]:
        with pytest.raises(PallasError) as found:
            around(product)(zeros(16, 32))
        frames = traceback.extract_tb(found.value.__traceback__)
        text = "".join(traceback.format_exception(found.value))
        return [frame.filename for frame in frames], text.strip().splitlines()[-1]

    filtered("remove_frames")
    files, last = shown()
    ours = [file for file in files if file != __file__ and "pallasite/" in file]
    assert len(ours) <= 1 and __file__ in files
    assert last.startswith("  fix  ")
    filtered("off")
    assert len(shown()[0]) > len(files)
