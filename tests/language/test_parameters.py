"""Import rules refuse what they do not know of a primitive, and never ignore it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import jaxcompat
from pallasite.errors import UnsupportedError
from pallasite.importer.parameters import NEUTRAL, ONLY
from pallasite.importer.rules import RULES

X = np.linspace(-2, 2, 35, dtype=np.float32).reshape(5, 7)


def run(fn):
    def kernel(x_ref, o_ref):
        o_ref[...] = fn(x_ref[...])

    return pl.pallas_call(kernel, out_shape=jax.eval_shape(fn, X))(X)


def of_a_later_jax(name, **params):
    """A function whose primitive has the name of one of JAX, with other parameters."""
    primitive = jaxcompat.Primitive(name)
    primitive.def_abstract_eval(lambda x, **_: x)
    return lambda x: primitive.bind(x, **params)


@pytest.mark.parametrize(
    ("name", "params", "what"),
    [
        ("rev", {"dimensions": (0,), "wrapped": True}, "wrapped"),
        ("cumsum", {"axis": 0, "reverse": False, "exclusive": True}, "exclusive"),
        ("sort", {"dimension": 0, "is_stable": True, "num_keys": 1, "down": 1}, "down"),
        ("sin", {"accuracy": None, "degrees": True}, "degrees"),
        ("sin", {"accuracy": 1e-9}, "accuracy"),
        ("polynomial", {"domain": (-1, 1)}, "domain"),
    ],
)
def test_parameters_that_a_rule_does_not_know_are_refused(name, params, what):
    with pytest.raises(UnsupportedError, match=rf"(?s){name}.*parameter {what}"):
        run(of_a_later_jax(name, **params))


def test_parameters_that_change_no_result_are_accepted():
    exact = lambda x: lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST)
    np.testing.assert_allclose(run(exact), np.exp(X), rtol=1e-6)
    assert NEUTRAL.isdisjoint(ONLY)


def test_a_tolerance_in_numbers_is_refused():
    with pytest.raises(UnsupportedError, match=r"(?s)exp.*accuracy"):
        run(lambda x: lax.exp(x, accuracy=lax.Tolerance(1e-9, 0.0, 1)))


def test_scatter_of_a_function_of_the_old_values_is_refused():
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    at = jnp.array([[3], [1]])
    fn = lambda x: lax.scatter_apply(x, at, jnp.sin, numbers, update_shape=(2, 7))
    with pytest.raises(UnsupportedError, match="function of the old values"):
        run(fn)


def test_scatter_sub():
    fn = lambda x: x.at[jnp.array([3, 1, 3])].subtract(x[:3])
    np.testing.assert_allclose(run(fn), jax.jit(fn)(X), rtol=1e-6)


def test_every_rule_says_what_it_knows():
    assert RULES.keys() == RULES.known.keys()
