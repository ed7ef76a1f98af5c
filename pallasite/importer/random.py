"""Import rules for random keys: a key is its uint32 words, threefry is integer code."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import jaxcompat
from pallasite.importer.importer import Importer
from pallasite.ir.nodes import Value
from pallasite.ir.rule_table import RuleTable
from pallasite.language.helpers import strides_from_shape

RULES = RuleTable()


@RULES.rule("random_wrap", "random_unwrap", "random_clone", params="impl")
def _same_words(im: Importer, eqn: Any, key: Value) -> Value:
    return key


@RULES.rule("random_seed", params="impl")
def _seed(im: Importer, eqn: Any, seed: Value) -> Value:
    impl = jaxcompat.key_implementation(eqn.outvars[0].aval.dtype)
    (words,) = im.splice(_over_batch(impl.seed, eqn.invars[0].aval.ndim), [seed])
    return words


@RULES.rule("random_fold_in", params="")
def _fold_in(im: Importer, eqn: Any, key: Value, data: Value) -> Value:
    aval = eqn.invars[0].aval
    impl = jaxcompat.key_implementation(aval.dtype)
    (words,) = im.splice(_over_batch(impl.fold_in, aval.ndim), [key, data])
    return words


@RULES.rule("random_split", params="shape")
def _split(im: Importer, eqn: Any, key: Value) -> Value:
    aval, shape = eqn.invars[0].aval, tuple(eqn.params["shape"])
    impl = jaxcompat.key_implementation(aval.dtype)
    (words,) = im.splice(_over_batch(lambda k: impl.split(k, shape), aval.ndim), [key])
    return words


@RULES.rule("random_bits", params="bit_width shape")
def _bits(im: Importer, eqn: Any, key: Value) -> Value:
    aval = eqn.invars[0].aval
    impl = jaxcompat.key_implementation(aval.dtype)
    width, shape = eqn.params["bit_width"], tuple(eqn.params["shape"])
    bits = _over_batch(lambda k: impl.random_bits(k, width, shape), aval.ndim)
    (result,) = im.splice(bits, [key])
    return result


def _over_batch(fn: Any, rank: int) -> Any:
    for _ in range(rank):
        fn = jax.vmap(fn)
    return fn


@RULES.rule("iota_2x32_shape", params="shape")
def _iota_2x32(im: Importer, eqn: Any) -> list[Value]:
    """The row-major position of each element as two words, high and low."""
    shape = tuple(eqn.params["shape"])
    if math.prod(shape) >= 2**32:
        raise im.unsupported(eqn, "more than 2**32 random words at once")

    def words() -> tuple[Any, Any]:
        position = jnp.zeros(shape, jnp.uint32)
        for dim, step in enumerate(strides_from_shape(shape)):
            along = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
            position = position + along * jnp.uint32(step)
        return jnp.zeros_like(position), position

    return im.splice(words, [])


@RULES.rule("threefry2x32", params="")
def _threefry2x32(im: Importer, eqn: Any, *words: Value) -> list[Value]:
    return im.splice(_threefry, list(words))


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC 2011)."""

    def rotate(v: Any, n: int) -> Any:
        return (v << jnp.uint32(n)) | (v >> jnp.uint32(32 - n))

    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for n in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = rotate(x1, n) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1
