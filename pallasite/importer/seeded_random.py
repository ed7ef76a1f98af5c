"""Random numbers from a generator that the program seeds (`pltpu.prng_seed`).

On a TPU the generator is a part of the core, with a state that outlives the function
that seeds it. Here the state is a small piece of scratch that every use in a kernel
shares: a key of threefry, and how often it has been drawn from. So the numbers are the
same on every backend (and others than a TPU's own).
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError
from pallasite.importer.importer import Importer
from pallasite.ir import types as T
from pallasite.ir.nodes import At, Value
from pallasite.ir.rule_table import RuleTable
from pallasite.language.refs import kernel_primitive
from pallasite.language.trace import user_location

RULES = RuleTable()

_IMPL = "threefry2x32"
_STATE = T.RefType((3,), T.U32, "smem")  # the key's two words, and the count

seed_p = kernel_primitive("prng_seed", multiple_results=True)
seed_p.def_effectful_abstract_eval(lambda *seeds: ([], {jaxcompat.debug_effect()}))
draw_p = kernel_primitive("prng_random_bits")
draw_p.def_effectful_abstract_eval(
    lambda *, shape: (
        jax.core.ShapedArray(shape, jnp.uint32),
        {jaxcompat.debug_effect()},
    )
)


def prng_seed(*seeds: Any) -> None:
    """Seed the generator of this program with integers, or with a random key.

    Programs that may run at once have to seed it themselves: give `pl.program_id` as
    one of the seeds.
    """
    words: list[Any] = []
    for seed in seeds:
        dtype = getattr(seed, "dtype", None) or jnp.result_type(seed)
        if jaxcompat.is_key_dtype(dtype):
            words.extend(jax.random.key_data(seed).ravel())
            continue
        if jnp.shape(seed) or not jnp.issubdtype(dtype, jnp.integer):
            raise KernelTypeError(
                f"pltpu.prng_seed takes integers, got {dtype}{list(jnp.shape(seed))}",
                at=user_location(),
                fix="pltpu.prng_seed(1, pl.program_id(0)): int32 scalars",
            )
        words.append(seed)
    seed_p.bind(*(jnp.asarray(s).astype(jnp.uint32) for s in words))


def prng_random_bits(shape: Sequence[int]) -> jax.Array:
    """Random int32 words from the generator that `prng_seed` has seeded."""
    bits = draw_p.bind(shape=tuple(shape))
    return jax.lax.bitcast_convert_type(bits, jnp.int32)


def _key() -> jax.Array:
    """A fresh key of `jax.random` from the generator."""
    return jax.random.wrap_key_data(draw_p.bind(shape=(2,)), impl=_IMPL)


def _stateful(sampler: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    @functools.wraps(sampler)
    def sample(*args: Any, **kwargs: Any) -> jax.Array:
        return sampler(_key(), *args, **kwargs)

    signature = inspect.signature(sampler)
    others = [p for name, p in signature.parameters.items() if name != "key"]
    sample.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    sample.__doc__ = (
        f"`jax.random.{sampler.__name__}` without its key: from the generator that "
        "`prng_seed` has seeded."
    )
    return sample


stateful_bernoulli = _stateful(jax.random.bernoulli)
stateful_bits = _stateful(jax.random.bits)
stateful_normal = _stateful(jax.random.normal)
stateful_uniform = _stateful(jax.random.uniform)


# --- what they are in the IR ---


@RULES.rule("pallasite_prng_seed")
def _import_seed(im: Importer, eqn: Any, *seeds: Value) -> None:
    def words(*seeds: Any) -> tuple[Any, Any]:
        key = jax.random.key(0, impl=_IMPL)
        for seed in seeds:
            key = jax.random.fold_in(key, seed)
        return tuple(jax.random.key_data(key))

    state = im.hidden_scratch("random_state", _STATE)
    key = im.splice(words, seeds)
    none_drawn = im.builder.constant(0, T.TileType((), T.U32))
    for n, word in enumerate((*key, none_drawn)):
        im.builder.store(state, word, (At(n),))


@RULES.rule("pallasite_prng_random_bits")
def _import_draw(im: Importer, eqn: Any) -> Value:
    state, b = im.hidden_scratch("random_state", _STATE), im.builder
    shape = tuple(eqn.params["shape"])

    def bits(k0: Any, k1: Any, drawn: Any) -> Any:
        key = jax.random.wrap_key_data(jnp.stack([k0, k1]), impl=_IMPL)
        return jax.random.bits(jax.random.fold_in(key, drawn), shape, jnp.uint32)

    words = [b.load(state, (At(n),)) for n in range(3)]
    (result,) = im.splice(bits, words)
    b.store(state, b.add(words[2], b.like(1, words[2])), (At(2),))
    return result
