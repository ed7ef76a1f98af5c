"""Derivatives of single ops: JAX's own, imported back into IR.

The emulation expresses every pure op in `lax`, and JAX has the derivative of each of
those. So the derivative of an op is `jax.jvp` or `jax.vjp` of its emulation, traced
once per signature and imported like any other jaxpr: there is no second table.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.emulation.emulate import JaxNumbers
from pallasite.errors import UnsupportedError
from pallasite.importer import custom_rules
from pallasite.importer.importer import Captures, Importer
from pallasite.interpret.numbers import run_pure
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Op, Value
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import is_elementwise
from pallasite.ir.text import attr_text
from pallasite.ir.types import TileType

Values = Sequence[Value]
MaybeValues = Sequence[Value | None]


def is_pure(op: Op) -> bool:
    """Whether an op only computes tiles from tiles."""
    row = table()[op.name]
    if op.name == "custom":
        return True
    tiles = not any(v.is_ref for v in (*op.operands, *op.results))
    return row.effect is Effect.PURE and tiles and not op.regions


def meaning_of(op: Op) -> Callable[..., Sequence[Any]]:
    """A pure op as a JAX function of its operands, which returns a list of results."""
    if op.name == "custom":
        return custom_rules.function(op)
    numbers = JaxNumbers()

    def run(*operands: Any) -> Sequence[Any]:
        if op.name == "assume_multiple":
            return list(operands)
        return list(run_pure(numbers, op, operands))

    return run


def jvp_ops(
    builder: Builder, op: Op, primals: Values, results: Values, tangents: MaybeValues
) -> list[Value | None]:
    """Emit the tangents of an op's results.

    Args:
        builder: where the ops go.
        op: a pure op (see `is_pure`); its own operands and results are not used.
        primals, results: values of its operands and results at this point.
        tangents: of the operands; None is zero, as for every integer.

    Returns:
        One tangent per result; None where it is zero.

    Raises:
        UnsupportedError: the derivative needs something the language does not have.
    """
    active = tuple(t is not None for t in tangents)
    if not any(active):
        return [None] * len(op.results)
    if (shapes := _other_shapes(op, primals)) is not None:
        groups = primals, results, tangents
        run = lambda b, old, *groups: jvp_ops(b, old, *groups)
        return _in_other_shapes(builder, op, shapes, groups, run)
    traced = _traced(_Signature.of(op, primals, active, "jvp"))
    args = [*primals, *(t for t in tangents if t is not None)]
    return traced.emit(builder, op, args, results)


def vjp_ops(
    builder: Builder,
    op: Op,
    primals: Values,
    results: Values,
    cotangents: MaybeValues,
    wanted: Sequence[bool],
) -> list[Value | None]:
    """Emit the cotangents of an op's operands.

    Args:
        builder: where the ops go.
        op: a pure op (see `is_pure`); its own operands and results are not used.
        primals, results: values of its operands and results at this point.
        cotangents: of the results; None is zero.
        wanted: the operands whose cotangents are requested; others give None.

    Returns:
        One cotangent per operand; None where it is zero or was not requested.

    Raises:
        UnsupportedError: the derivative needs something the language does not have.
    """
    wanted = [w and v.tile.dtype.is_float for w, v in zip(wanted, primals, strict=True)]
    known = tuple(c is not None for c in cotangents)
    if not any(known) or not any(wanted):
        return [None] * len(primals)
    if (shapes := _other_shapes(op, primals)) is not None:
        groups = primals, results, cotangents
        run = lambda b, old, xs, ys, seeds: vjp_ops(b, old, xs, ys, seeds, wanted)
        return _in_other_shapes(builder, op, shapes, groups, run)
    traced = _traced(_Signature.of(op, primals, tuple(wanted), "vjp", known))
    args = [*primals, *(c for c in cotangents if c is not None)]
    found = iter(traced.emit(builder, op, args, results))
    return [next(found) if w else None for w in wanted]


# --- functions with rules that were traced for other shapes ---

Shape = tuple[int, ...]


def _other_shapes(op: Op, primals: Values) -> tuple[Shape, Shape] | None:
    """The shape of a function's tiles as it was traced, and now: it may be that of a
    part or a row. None if they are the same."""
    shapes = custom_rules.traced_shapes(op) if op.name == "custom" else None
    if shapes is None:
        return None
    pairs = zip(shapes, primals, strict=True)
    found = {(old, v.tile.shape) for old, v in pairs if old != v.tile.shape}
    return found.pop() if len(found) == 1 else None


def _in_other_shapes(
    builder: Builder,
    op: Op,
    shapes: tuple[Shape, Shape],
    groups: Sequence[MaybeValues],
    emit: Callable[..., list[Value | None]],
) -> list[Value | None]:
    """What `emit` emits for tiles of the first shape, for those of the second.

    That is the same code if every op acts on elements, with numbers of the new shape.
    """
    old, new = shapes
    known: dict[Value, Value] = {}

    def stand_in(value: Value | None) -> Value | None:
        if value is None or value.tile.shape != new:
            return value
        known[other := Value(value.tile.with_shape(old))] = value
        return other

    inside = Builder(op.loc)
    primals, results, others = ([stand_in(v) for v in group] for group in groups)
    found = emit(inside, op.with_(results=tuple(results)), primals, results, others)
    for each in inside.ops:
        is_number = each.name == "broadcast_in_dim" and not each.operands[0].tile.rank
        plain = each.name == "constant" or is_number or is_elementwise(each)
        if not plain or each.result.tile.shape not in ((), old):
            raise UnsupportedError(
                "this custom_jvp or custom_vjp function has a derivative for tiles of "
                "one shape only",
                [("function", op.attrs["rule"]), ("shape", old), ("wanted", new)],
                op.loc,
            )
        attrs = dict(each.attrs)
        if attrs.get("shape") == old:
            attrs["shape"] = new
        if "type" in attrs and attrs["type"].shape == old:
            attrs["type"] = attrs["type"].with_shape(new)
        operands = [known.get(v, v) for v in each.operands]
        builder.loc = each.loc
        known[each.result] = builder.op(each.name, *operands, **attrs)
    return [None if v is None else known.get(v, v) for v in found]


# --- tracing, once per signature ---


@dataclass(frozen=True)
class _Signature:
    """What a traced derivative depends on. `op` is any op with these attributes."""

    name: str
    attrs: str
    types: tuple[TileType, ...]
    active: tuple[bool, ...]
    mode: str  # "jvp" or "vjp"
    known: tuple[bool, ...]  # vjp: the results with a cotangent
    op: "_Example"
    context: Any  # what else tracing depends on, such as x64

    @staticmethod
    def of(
        op: Op,
        primals: Values,
        active: tuple[bool, ...],
        mode: str,
        known: tuple[bool, ...] = (),
    ) -> "_Signature":
        attrs = " ".join(f"{k}={attr_text(op.attrs[k])}" for k in sorted(op.attrs))
        types = tuple(v.tile for v in primals)
        context = jaxcompat.trace_context()
        return _Signature(
            op.name, attrs, types, active, mode, known, _Example(op), context
        )


class _Example:
    """Carries an op along in a signature without affecting equality."""

    def __init__(self, op: Op):
        self.op = op

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Example)

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True)
class _Traced:
    """A jaxpr from operands and (co)tangents to results and (co)tangents.

    Only what the (co)tangents need is kept: `equations` in order, given that the
    results of the op itself already exist.
    """

    closed: Any
    results: tuple[Any, ...]  # the variables of the op's own results
    equations: tuple[Any, ...]
    answers: tuple[Any, ...]  # the variables of the (co)tangents; None: zero

    @staticmethod
    def of(closed: Any, num_results: int, answers: Sequence[Any]) -> "_Traced":
        jaxpr, _ = jaxcompat.opened(closed)
        results = tuple(jaxpr.outvars[:num_results])
        made = {v for v in results if not hasattr(v, "val")}
        needed = {v for v in answers if v is not None}
        kept = []
        for eqn in reversed(jaxpr.eqns):
            if any(v in needed and v not in made for v in eqn.outvars):
                kept.append(eqn)
                needed.update(v for v in eqn.invars if not hasattr(v, "val"))
        return _Traced(closed, results, tuple(reversed(kept)), tuple(answers))

    def emit(
        self, builder: Builder, op: Op, args: Values, results: Values
    ) -> list[Value | None]:
        before, builder.loc = builder.loc, op.loc
        importer = _Splicer(op, builder)
        jaxpr, consts = jaxcompat.opened(self.closed)
        importer.env.update(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            importer.env[var] = importer.captured(const)
        for var, value in zip(self.results, results, strict=True):
            if not hasattr(var, "val"):
                importer.env[var] = value
        for eqn in self.equations:
            importer.equation(eqn, set())
        builder.loc = before
        return [None if v is None else importer.value(v) for v in self.answers]


@functools.lru_cache(maxsize=4096)
def _traced(signature: _Signature) -> _Traced:
    trace = _trace_jvp if signature.mode == "jvp" else _trace_vjp
    with jaxcompat.own_tracing():
        return trace(signature)


def _shapes(types: Sequence[TileType]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(t.shape, t.dtype.np) for t in types]


def _chosen(active: Sequence[bool], fn: Callable, operands: Sequence[Any]) -> Callable:
    """`fn` as a function of its active operands, the others fixed."""

    def run(*some: Any) -> Any:
        pending = iter(some)
        pairs = zip(active, operands, strict=True)
        return fn(*(next(pending) if a else x for a, x in pairs))

    return run


def _trace_jvp(signature: _Signature) -> _Traced:
    op, active = signature.op.op, signature.active
    inputs = _shapes(signature.types)
    differentiated = [x for x, a in zip(inputs, active, strict=True) if a]
    is_float = [v.tile.dtype.is_float for v in op.results]

    def run(*args: Any) -> Any:
        operands, tangents = args[: len(inputs)], args[len(inputs) :]
        primals = [x for x, a in zip(operands, active, strict=True) if a]
        fn = _chosen(active, meaning_of(op), operands)
        results, pushed = jax.jvp(fn, tuple(primals), tuple(tangents))
        floats = [t for t, f in zip(pushed, is_float, strict=True) if f]
        return [*results, *floats]

    closed = jaxcompat.lower_high_level(jax.make_jaxpr(run)(*inputs, *differentiated))
    found = iter(_moving_outputs(closed, len(inputs))[len(op.results) :])
    answers = [next(found) if f else None for f in is_float]
    return _Traced.of(closed, len(op.results), answers)


def _trace_vjp(signature: _Signature) -> _Traced:
    op, active, known = signature.op.op, signature.active, signature.known
    inputs = _shapes(signature.types)
    given = _shapes([v.tile for v, k in zip(op.results, known, strict=True) if k])

    def run(*args: Any) -> Any:
        operands, cotangents = args[: len(inputs)], iter(args[len(inputs) :])
        primals = [x for x, a in zip(operands, active, strict=True) if a]
        fn = _chosen(active, meaning_of(op), operands)
        results, pull = jax.vjp(fn, *primals)
        full = [
            next(cotangents) if k else _zero_like(x)
            for x, k in zip(results, known, strict=True)
        ]
        return [*results, *pull(type(results)(full))]

    closed = jaxcompat.lower_high_level(jax.make_jaxpr(run)(*inputs, *given))
    answers = _moving_outputs(closed, len(inputs))[len(op.results) :]
    return _Traced.of(closed, len(op.results), answers)


def _zero_like(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros(x.shape, x.dtype)
    return np.zeros(x.shape, jax.dtypes.float0)


def _moving_outputs(closed: Any, first: int) -> list[Any]:
    """The output variables that depend on inputs from `first` on; None for others."""
    jaxpr, _ = jaxcompat.opened(closed)
    dependent = set(jaxpr.invars[first:])
    for eqn in jaxpr.eqns:
        if any(not hasattr(v, "val") and v in dependent for v in eqn.invars):
            dependent.update(eqn.outvars)
    return [
        v if not hasattr(v, "val") and v in dependent else None for v in jaxpr.outvars
    ]


class _Splicer(Importer):
    """Imports a derivative in place of an op: with the op's own source line, and
    without captures."""

    def __init__(self, op: Op, builder: Builder):
        from pallasite.importer.rules import RULES

        super().__init__(op.name, Captures(), RULES)
        self.op, self.builder = op, builder

    def locate(self, eqn: Any) -> None:
        """Equations here come from JAX's rules, not from the user's lines."""

    def captured(self, value: Any) -> Value:
        raise UnsupportedError(
            f"the derivative of {self.op.name} needs a table of constants",
            at=self.op.loc,
            fix="define its derivative: wrap the call in jax.custom_vjp",
        )
