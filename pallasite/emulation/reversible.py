"""The emulation in a form that JAX can differentiate in reverse.

It differs from `emulate.py` in three ways, none of them semantic. Loops have a static
trip count where a bound is known: program ids and counters give a loop a maximum trip
count, and iterations beyond its actual end do nothing. Loops without a bound are
reversed by recomputation (`reversible_while.py`). Uninitialised memory holds a finite
number instead of NaN, which would come back as 0 * NaN in a gradient.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite import jaxcompat
from pallasite.emulation.emulate import (
    JaxNumbers,
    dynamic_bounds,
    dynamic_product,
    same_types,
    static_bounds,
    unravel,
)
from pallasite.emulation.reversible_while import backward_loop
from pallasite.importer import custom_rules
from pallasite.interpret import Walker
from pallasite.interpret.numbers import Picks
from pallasite.ir.nodes import Block, Kernel, Op
from pallasite.ir.roles import Loop
from pallasite.ir.types import RefType
from pallasite.passes.analysis.intervals import Fact, Facts
from pallasite.passes.normal.canonicalize import canonicalize

Array = Any
# In the domain of nearly all functions, where no derivative is infinite.
_HARMLESS = 0.5
# A bound beyond this is no better than none.
_MOST_TRIPS = 1 << 16


def emulate_smooth(kernel: Kernel) -> Callable[..., list[Array]]:
    """A JAX function with the kernel's meaning, for forward mode."""

    def run(*operands: Array) -> list[Array]:
        open_sizes = jaxcompat.open_sizes([("kernel", kernel.name)], kernel.loc)
        with jaxcompat.own_tracing(), open_sizes:
            return SmoothWalker(kernel, SmoothNumbers()).run(list(operands))

    return run


def emulate_reverse(kernel: Kernel) -> Callable[..., list[Array]]:
    """A JAX function with the kernel's meaning, for reverse mode."""
    kernel = _prepared(kernel)

    def run(*operands: Array) -> list[Array]:
        open_sizes = jaxcompat.open_sizes([("kernel", kernel.name)], kernel.loc)
        with jaxcompat.own_tracing(), open_sizes:
            return ReverseWalker(kernel, ReverseNumbers()).run(list(operands))

    return run


@functools.lru_cache(maxsize=1024)
def _prepared(kernel: Kernel) -> Kernel:
    return canonicalize(kernel)


class SmoothNumbers(JaxNumbers):
    """Numbers without poison, whose operations all have derivatives."""

    def uninitialised(self, type: RefType) -> Array:
        return jnp.full(type.shape, _harmless(type.dtype.np), type.dtype.np)

    def pad(
        self, array: Array, low: Sequence[int], high: Sequence[int], fill: Any
    ) -> Array:
        value = _harmless(array.dtype) if fill is None else fill
        return super().pad(array, low, high, value)

    def rmw(
        self, array: Array, picks: Picks, kind: str, value: Array, mask: Array | None
    ) -> tuple[Array, Array]:
        gathers = any(p.gather is not None for p in picks)
        if gathers and kind in ("max", "min"):
            return self.rmw_in_turn(array, picks, kind, value, mask)
        return super().rmw(array, picks, kind, value, mask)


def _harmless(dtype: Any) -> Any:
    return _HARMLESS if jnp.issubdtype(dtype, jnp.floating) else 0


class ReverseNumbers(SmoothNumbers):
    """Numbers whose loops JAX can run backwards."""

    def __init__(self) -> None:
        self.most_trips: int | None = None  # of the next counted loop

    def tile_op(self, op: Op, operands: Sequence[Array]) -> Sequence[Array]:
        is_scalar = op.name == "constant" and not op.result.tile.shape
        if is_scalar and not jaxcompat.is_symbolic(op.attrs["value"]):
            # Known at trace time, as the trip count must be.
            return (np.asarray(op.attrs["value"], op.attrs["type"].dtype.np),)
        return super().tile_op(op, operands)

    def counted(self, first, limit, step, carry, body) -> list[Array]:
        most, self.most_trips = self.most_trips, None
        total = static_bounds(first, limit, step)
        if total is None:
            total = dynamic_bounds(first, limit, step)

        def one(n: Array, values: list[Array]) -> list[Array]:
            i = first + lax.convert_element_type(n, first.dtype) * step
            return body(i, values)

        return _loop(total, most, list(carry), one)

    def while_(self, go_on, body, carry) -> list[Array]:
        carry = [jnp.asarray(x) for x in carry]
        return backward_loop(go_on, lambda v: same_types(body(v), v), carry)

    def grid(self, sizes, carry, body) -> list[Array]:
        """Programs are recomputed in the backward pass: their values are not kept."""
        static = all(isinstance(s, int) for s in sizes)
        total = int(np.prod(sizes)) if static else dynamic_product(sizes)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def program(step: Array, values: list[Array]) -> list[Array]:
            ids = unravel(jnp.asarray(step, jnp.int32), sizes)
            return body(ids, values)

        return _loop(total, None, list(carry), program)


def _loop(
    total: int | Array, most: int | None, carry: list[Array], body: Callable
) -> list[Array]:
    """Run `body(n, values)` for n below `total`, which is at most `most`."""
    carry = [jnp.asarray(x) for x in carry]

    def one(n: Array, values: list[Array]) -> list[Array]:
        return same_types(body(n, values), values)

    if isinstance(total, int):
        if total <= 1:
            return one(jnp.int32(0), carry) if total == 1 else carry
        return lax.fori_loop(0, total, one, carry)
    if most is None:
        return _unbounded(total, carry, one)

    def perhaps(n: Array, values: list[Array]) -> list[Array]:
        return lax.cond(n < total, lambda v: one(n, v), lambda v: v, values)

    return lax.fori_loop(0, most, perhaps, carry)


def _unbounded(total: Array, carry: list[Array], body: Callable) -> list[Array]:
    def go_on(values: list[Array]) -> Array:
        return values[0] < total

    def step(values: list[Array]) -> list[Array]:
        n, *rest = values
        return [n + jnp.ones_like(n), *body(n, rest)]

    return backward_loop(go_on, step, [jnp.zeros_like(total), *carry])[1:]


class SmoothWalker(Walker):
    """The walker; functions with custom rules call those."""

    def do_custom(self, op: Op) -> Sequence[Array]:
        return custom_rules.function(op)(*(self.env[v] for v in op.operands))

    RULES: ClassVar = {**Walker.RULES, "custom": do_custom}


class ReverseWalker(SmoothWalker):
    """The walker, which passes each loop's maximum trip count to the numbers."""

    def __init__(self, kernel: Kernel, numbers: ReverseNumbers):
        super().__init__(kernel, numbers)
        self.reverse = numbers
        self.most = most_trips(kernel)

    def do_for(self, op: Op) -> Sequence[Array]:
        self.reverse.most_trips = self.most.get(op)
        return super().do_for(op)

    RULES: ClassVar = {**SmoothWalker.RULES, "for": do_for}


@functools.lru_cache(maxsize=1024)
def most_trips(kernel: Kernel) -> dict[Op, int]:
    """The maximum trip count of each `for`, where known."""
    found: dict[Op, int] = {}
    _visit(kernel.body, Facts(), found)
    return found


def _visit(block: Block, facts: Facts, found: dict[Op, int]) -> None:
    for op in block.ops:
        facts.note_regions(op)
        if op.name == "for":
            loop = Loop.of(op)
            trips = facts.most_steps(loop)
            if trips is not None and trips <= _MOST_TRIPS:
                found[op] = trips
                _carried_counters(loop, trips, facts)
        for region in op.regions:
            _visit(region, facts, found)
        facts.note_op(op)


def _carried_counters(loop: Loop, trips: int, facts: Facts) -> None:
    """A carried number to which each iteration adds a constant (as fori_loop's own)."""
    makers = {v: inner for inner in loop.body.ops for v in inner.results}
    for initial, param, after in zip(
        loop.inits, loop.carried, loop.yields, strict=True
    ):
        adds = makers.get(after)
        if adds is None or adds.name != "add" or adds.operands[0] is not param:
            continue
        if param.tile.dtype.is_float:
            continue
        step, start = facts.of(adds.operands[1]).number, facts.of(initial)
        if step is not None and 0 <= step * trips <= _MOST_TRIPS:
            last = start.high + step * max(0, trips - 1)
            facts.note(param, Fact(start.low, last))
