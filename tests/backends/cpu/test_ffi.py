"""From a Launch to a custom call: what the program given to XLA says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallasite.backends.base import Launch
from pallasite.runtime.ffi import lower_launch

launch_p = Primitive("test_launch")
launch_p.multiple_results = True


@launch_p.def_abstract_eval
def _abstract(*operands: Any, launch: Launch):
    return [jax.core.ShapedArray((4,), np.dtype("float32"))]


def _lower(ctx: Any, *operands: Any, launch: Launch):
    return lower_launch(launch, ctx, *operands)


mlir.register_lowering(launch_p, _lower)


class Hashable(Launch):
    """A Launch whose identity is enough for JAX's caches."""

    __hash__ = object.__hash__


def program_of(**fields: Any) -> str:
    launch = Hashable(target="some_target", **fields)
    function = jax.jit(lambda x: launch_p.bind(x, launch=launch))
    return function.lower(jnp.zeros(4, jnp.float32)).as_text()


def test_typed_configuration_becomes_attributes():
    text = program_of(config={"name": "kernel", "count": 3}, api_version=4)
    assert "@some_target" in text
    assert 'name = "kernel"' in text
    assert "count = 3 : i64" in text


def test_text_configuration_is_passed_as_it_is():
    text = program_of(config='{"a": 1}', api_version=1)
    assert r'backend_config = "{\22a\22: 1}"' in text
    assert "api_version" not in text or "api_version = 1" in text


def test_aliases_are_declared():
    text = program_of(config={}, api_version=4, aliases=((0, 0),))
    assert "output_operand_alias" in text
    assert "operand_index = 0" in text


def test_side_effects_are_declared():
    assert "has_side_effect = true" in program_of(
        config={}, api_version=4, has_side_effect=True
    )


def test_scratch_results_are_asked_for_and_dropped():
    text = program_of(config={}, api_version=4, scratch_results=(((8, 2), "int8"),))
    assert "tensor<8x2xi8>" in text
    assert "-> (tensor<4xf32>" in text
