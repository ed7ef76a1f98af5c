"""A `while` loop that can be run backwards, however long it turns out to be.

JAX differentiates loops in reverse only if their length is static, since it keeps what
each trip computed. Here nothing is kept but the state at a few places along the way;
going back, the state before each trip is computed again from the nearest of them.
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
_PLACES = 32  # states kept; going back over n trips costs about n * n / 64 trips


def backward_loop(
    go_on: Callable[[list[Array]], Array],
    body: Callable[[list[Array]], list[Array]],
    carry: Sequence[Array],
) -> list[Array]:
    """`while go_on(carry): carry = body(carry)`, with a derivative in reverse."""
    carry = tuple(carry)
    # All that the loop uses must be handed to the way back: nothing is closed over.
    test, test_values = jaxcompat.without_closure(lambda *c: go_on(list(c)), *carry)
    step, step_values = jaxcompat.without_closure(lambda *c: body(list(c)), *carry)

    @jax.custom_vjp
    def loop(tested: list[Array], used: list[Array], carry: State) -> State:
        return forward(tested, used, carry)[0]

    def forward(tested: list[Array], used: list[Array], carry: State) -> Any:
        def one(counted: tuple[Array, State]) -> tuple[Array, State]:
            n, c = counted
            return n + 1, tuple(step(*c, *used))

        trips, out = lax.while_loop(
            lambda nc: test(*nc[1], *tested)[0], one, (jnp.int32(0), carry)
        )
        return out, (tested, used, carry, trips)

    def backward(kept: Any, cotangents: State) -> Any:
        tested, used, carry, trips = kept
        at = _states(lambda c: tuple(step(*c, *used)), carry, trips)

        def one(back: Array, sums: tuple[Any, Any]) -> tuple[Any, Any]:
            before = at(trips - 1 - back)
            return _step_back(step, before, used, *sums)

        floats = _floats(carry, cotangents)
        zeros = [jnp.zeros_like(x) for x in used if _is_float(x)]
        moved, total = lax.fori_loop(0, trips, one, (floats, zeros))
        unmoved = [jnp.zeros_like(x) for x in tested if _is_float(x)]
        return list(_all(tested, unmoved)), list(_all(used, total)), _all(carry, moved)

    loop.defvjp(forward, backward)
    return list(loop(test_values, step_values, carry))


def _step_back(
    step: Callable, before: State, used: list[Array], floats: list, sums: list
) -> tuple[list[Array], list[Array]]:
    """Cotangents before one trip from those after it; `sums` of values it used."""
    both = (*before, *used)

    def run(moving: list[Array]) -> list[Array]:
        pending = iter(moving)
        full = [next(pending) if _is_float(x) else x for x in both]
        return [x for x in step(*full) if _is_float(x)]

    (back,) = jax.vjp(run, [x for x in both if _is_float(x)])[1](floats)
    moved, more = back[: len(floats)], back[len(floats) :]
    return moved, [a + b for a, b in zip(sums, more, strict=True)]


def _states(
    step: Callable[[State], State], carry: State, trips: Array
) -> Callable[[Array], State]:
    """The state before trip n, as a function of n."""
    stride = jnp.maximum(1, -(-trips // _PLACES))

    def keep(n: Array, places: list[Array], c: State) -> list[Array]:
        return [p.at[n // stride].set(x) for p, x in zip(places, c, strict=True)]

    def one(n: Array, both: tuple[list[Array], State]) -> tuple[list[Array], State]:
        places, c = both
        places = lax.cond(
            n % stride == 0, lambda: keep(n, places, c), lambda: list(places)
        )
        return places, step(c)

    empty = [jnp.zeros((_PLACES, *x.shape), x.dtype) for x in carry]
    places, _ = lax.fori_loop(0, trips, one, (empty, carry))

    def at(n: Array) -> State:
        nearest = tuple(p[n // stride] for p in places)
        return lax.fori_loop(0, n % stride, lambda _, c: step(c), nearest)

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
