"""A `while` loop that can be reversed, whatever its trip count.

JAX differentiates loops in reverse only if their trip count is static, since it keeps
what each iteration computed. Here only the state at a few checkpoints is kept; in the
backward pass, the state before each iteration is recomputed from the nearest
checkpoint.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite import jaxcompat

Array = Any
State = tuple[Array, ...]
_PLACES = 32  # states kept; reversing n iterations costs about n * n / 64


def backward_loop(
    go_on: Callable[[list[Array]], Array],
    body: Callable[[list[Array]], list[Array]],
    carry: Sequence[Array],
) -> list[Array]:
    """`while go_on(carry): carry = body(carry)`, with a reverse-mode derivative."""
    carry = tuple(carry)
    # Everything the loop uses must be passed to the backward pass: no captures.
    test, test_values = jaxcompat.without_closure(lambda *c: go_on(list(c)), *carry)
    step, step_values = jaxcompat.without_closure(lambda *c: body(list(c)), *carry)

    @jax.custom_vjp
    def loop(tested: list[Array], used: list[Array], carry: State) -> State:
        return lax.while_loop(
            lambda c: test(*c, *tested)[0], lambda c: tuple(step(*c, *used)), carry
        )

    def forward(tested: list[Array], used: list[Array], carry: State) -> Any:
        trips, *out = backward_loop(
            lambda counted: test(*counted[1:], *tested)[0],
            lambda counted: [counted[0] + 1, *step(*counted[1:], *used)],
            (jnp.int32(0), *carry),
        )
        return tuple(out), (tested, used, carry, trips)

    def backward(kept: Any, cotangents: State) -> Any:
        tested, used, carry, trips = kept
        at = _states(lambda c: step(*c, *used), carry, trips)
        floats = _floats(carry, cotangents)

        def one(back: Array, sums: list[Array]) -> list[Array]:
            before = at(trips - 1 - back)
            pulled, total = sums[: len(floats)], sums[len(floats) :]
            return _step_back(step, before, used, pulled, total)

        zeros = [jnp.zeros_like(x) for x in used if _is_float(x)]
        sums = _repeat(trips, one, [*floats, *zeros])
        pulled, total = sums[: len(floats)], sums[len(floats) :]
        zero_tested = [jnp.zeros_like(x) for x in tested if _is_float(x)]
        return (
            list(_all(tested, zero_tested)),
            list(_all(used, total)),
            _all(carry, pulled),
        )

    loop.defvjp(forward, backward)
    return list(loop(test_values, step_values, carry))


def _repeat(
    trips: Array, body: Callable[[Array, list[Array]], list[Array]], carry: list[Array]
) -> list[Array]:
    """Run `body(n, carry)` for n below `trips`; can itself be reversed."""

    def one(counted: list[Array]) -> list[Array]:
        n, *c = counted
        return [n + 1, *body(n, c)]

    start = [jnp.zeros_like(trips), *carry]
    return backward_loop(lambda counted: counted[0] < trips, one, start)[1:]


def _step_back(
    step: Callable,
    before: Sequence[Array],
    used: list[Array],
    floats: list[Array],
    sums: list[Array],
) -> list[Array]:
    """Cotangents before an iteration from those after it, then `sums` of uses."""
    both = (*before, *used)

    def run(floats_in: list[Array]) -> list[Array]:
        pending = iter(floats_in)
        full = [next(pending) if _is_float(x) else x for x in both]
        return [x for x in step(*full) if _is_float(x)]

    (back,) = jax.vjp(run, [x for x in both if _is_float(x)])[1](floats)
    pulled, more = back[: len(floats)], back[len(floats) :]
    return [*pulled, *(a + b for a, b in zip(sums, more, strict=True))]


def _states(
    step: Callable[[Sequence[Array]], list[Array]], carry: State, trips: Array
) -> Callable[[Array], list[Array]]:
    """The state before iteration n, as a function of n."""
    stride = jnp.maximum(1, -(-trips // _PLACES))

    def keep(n: Array, places: list[Array], c: list[Array]) -> list[Array]:
        return [p.at[n // stride].set(x) for p, x in zip(places, c, strict=True)]

    def one(n: Array, both: list[Array]) -> list[Array]:
        places, c = both[: len(carry)], both[len(carry) :]
        places = lax.cond(n % stride == 0, lambda: keep(n, places, c), lambda: places)
        return [*places, *step(c)]

    empty = [jnp.zeros((_PLACES, *x.shape), x.dtype) for x in carry]
    places = _repeat(trips, one, [*empty, *carry])[: len(carry)]

    def at(n: Array) -> list[Array]:
        nearest = [p[n // stride] for p in places]
        return _repeat(n % stride, lambda _, c: step(c), nearest)

    return at


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _floats(carry: State, cotangents: State) -> list[Array]:
    return [c for x, c in zip(carry, cotangents, strict=True) if _is_float(x)]


def _all(carry: Sequence[Array], floats: Sequence[Array]) -> State:
    """One cotangent per carried value; integers have none."""
    pending = iter(floats)
    return tuple(
        next(pending) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0)
        for x in carry
    )
