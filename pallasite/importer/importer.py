"""Jaxpr to Kernel IR: the one place where jaxprs become IR, and where they end.

An elementwise primitive is found in the op table by name; the other primitives have
rules (`rules.py` lists the files). `pipeline_op.py` drives this for a whole call.
"""

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, PallasError, UnsupportedError
from pallasite.importer.parameters import unknown_parameter
from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Loc, Value
from pallasite.ir.opdef import BY_JAX, TypeRuleError, table
from pallasite.ir.rule_table import ANY, RuleTable
from pallasite.language import upstream
from pallasite.language.trace import equation_location
from pallasite.passes.analysis.intervals import Facts

# What `fn(importer, eqn, *operands)` returns are the results: one Value, a sequence of
# them, or None. `rules.py` joins the tables of all files.
Rule = Callable[..., Any]

# Primitives that only move elements: on random keys they move each word alike.
_MOVES = "slice dynamic_slice dynamic_update_slice gather scatter concatenate split "
_MOVES += "select_n broadcast_in_dim transpose rev tile stack unstack"
KEY_MOVES = frozenset(_MOVES.split())


@dataclass(frozen=True)
class GridScope:
    """What program_id and num_programs mean: ids and sizes of the innermost grid."""

    ids: tuple[Value, ...]
    sizes: tuple[int | Value, ...]
    is_index_map: bool = False


@dataclass
class Captures:
    """Values a kernel takes from outside: they become operands of the call."""

    values: list[Any] = field(default_factory=list)
    refs: list[Value] = field(default_factory=list)  # what the body loads them from

    def ref(self, value: Any) -> Value:
        for known, ref in zip(self.values, self.refs, strict=True):
            if known is value:
                return ref
        shape, dtype = np.shape(value), value_dtype(value)
        space = "smem" if shape == () else "block"
        ref = Value(T.RefType(shape, dtype, space), f"captured{len(self.refs)}")
        self.values.append(value)
        self.refs.append(ref)
        return ref


class Importer:
    """Imports jaxprs into the block under construction."""

    def __init__(self, kernel_name: str, captures: Captures, rules: RuleTable):
        self.kernel_name = kernel_name
        self.rules = rules
        self.captures = captures
        self.facts = Facts()  # of the integers imported so far
        self.builder = Builder(watch=self.facts.note_op)
        self.scopes: list[GridScope] = []
        self.mesh_axes: dict[Hashable, Value] = {}
        self.env: dict[Any, Value] = {}
        self.freed: set[Any] = set()  # variables of refs whose memory is gone
        self.hidden: dict[str, Value] = {}
        self.open_sizes: dict[Any, Any] = {}  # arrays of the symbolic sizes in use
        self.has_subcores = False  # of a SparseCore, which may meet
        self.sums: dict[Value, Any] = {}  # of matrix units (`matrix_units.py`)
        self.refused: PallasError | None = None  # the error on its way out
        self.threads: Any = None  # the warpgroups of a `plgpu` kernel (`gpu.py`)
        table()

    # --- environment ---

    def value(self, atom: Any) -> Value:
        """The IR value of a jaxpr variable or literal."""
        if hasattr(atom, "val"):
            return self.constant(atom.val, atom.aval)
        if atom in self.freed:
            raise KernelTypeError(
                "a ref is used after its lifetime: the run_scoped that allocated it "
                "has ended",
                [("kernel", self.kernel_name), ("ref", self.env[atom].type)],
                self.where,
                "use it inside the function that run_scoped calls, or allocate it in "
                "an outer scope",
            )
        return self.env[atom]

    def constant(self, value: Any, aval: Any) -> Value:
        type_ = tile_type(aval, self.where)
        array: Any = np.asarray(value)
        if not array.size:
            return self.captured(value)
        if array.ndim and array.size > 1 and not (array == array.flat[0]).all():
            return self.captured(value)
        return self.builder.constant(array.flat[0] if array.ndim else array, type_)

    def captured(self, value: Any, **notes: Any) -> Value:
        """A value from outside the kernel, loaded where it is used.

        `notes`: of the load, for backends.
        """
        if jaxcompat.is_ref(value):
            raise KernelTypeError(
                "the kernel uses a ref that was not passed to it",
                [("kernel", self.kernel_name), ("ref", jaxcompat.aval_of(value))],
                self.where,
                "pass its value as an operand",
            )
        if jaxcompat.is_key_dtype(getattr(value, "dtype", None)):
            value = jax.random.key_data(value)
        if 0 in np.shape(value):  # nothing to load, and a chip has no such operands
            type_ = T.TileType(np.shape(value), value_dtype(value))
            return self.builder.constant(0, type_)
        return self.builder.load(self.captures.ref(value), **notes)

    def hidden_scratch(self, name: str, type_: T.RefType) -> Value:
        """Scratch of the whole kernel that the author did not ask for, by its name."""
        return self.hidden.setdefault(name, Value(type_, name))

    @property
    def where(self) -> Loc | None:
        return self.builder.loc

    @property
    def grid(self) -> GridScope:
        return self.scopes[-1]

    # --- walking ---

    def run(self, jaxpr: Any, args: Sequence[Value]) -> list[Value]:
        """Import an open or closed jaxpr in place; its results."""
        inner, consts = jaxcompat.opened(jaxpr)
        for var, const in zip(inner.constvars, consts, strict=True):
            self.env[var] = self._const(const)
        for var, arg in zip(inner.invars, args, strict=True):
            self.env[var] = arg
        used = _used(inner)
        outer_loc = self.builder.loc
        for n, eqn in enumerate(inner.eqns):
            try:
                self.equation(eqn, used)
            except UnsupportedError as error:
                if error is self.refused:  # the innermost jaxpr knows best why
                    raise
                self.refused = self.refused_goal(eqn, inner.eqns[n + 1 :]) or error
                raise self.refused from None
        self.builder.loc = outer_loc
        return [self.value(v) for v in inner.outvars]

    def _const(self, const: Any) -> Value:
        return const if isinstance(const, Value) else self.captured(const)

    def equation(self, eqn: Any, used: set[Any]) -> None:
        self.locate(eqn)
        facts = [("kernel", self.kernel_name), ("in", eqn.primitive.name)]
        with jaxcompat.open_sizes(facts, self.where):
            self._equation(eqn, used)

    def _equation(self, eqn: Any, used: set[Any]) -> None:
        name = eqn.primitive.name
        operands = [self.value(v) for v in eqn.invars]
        try:
            if name in KEY_MOVES and _makes_keys(eqn):
                results = self.per_word(eqn, operands)
            elif name in self.rules:
                self.used = used
                self._check_parameters(eqn, self.rules.known[name])
                results = self.rules[name](self, eqn, *operands)
            elif name in BY_JAX:
                results = self.elementwise(eqn, operands)
            else:
                raise self.unsupported(eqn)
        except TypeRuleError as error:
            called = name.removeprefix("pallasite_")
            raise KernelTypeError(
                f"{called}: {error}", [("kernel", self.kernel_name)], self.where
            ) from None
        if results is None:
            results = ()
        elif isinstance(results, Value):
            results = (results,)
        for var, value in zip(eqn.outvars, results, strict=True):
            self.env[var] = value

    def refused_goal(self, eqn: Any, later: Sequence[Any]) -> PallasError | None:
        """The refusal of what a value is made for that has no dtype in the language.

        `jnp.fft.fft` makes complex numbers of its operand first.
        """
        if all(_has_dtype(v.aval) for v in eqn.outvars):
            return None
        for goal in later:
            if goal.primitive.name not in {*self.rules, *BY_JAX}:
                self.locate(goal)
                return self.unsupported(goal)
        return None

    def locate(self, eqn: Any) -> None:
        """What is emitted next belongs to the equation's line."""
        self.builder.loc = equation_location(eqn) or self.builder.loc

    def elementwise(self, eqn: Any, operands: Sequence[Value]) -> Value:
        """An op of the table: operands broadcast as JAX allows, attributes by name."""
        row = BY_JAX[eqn.primitive.name]
        self._check_parameters(eqn, row.attrs)
        result = tile_type(eqn.outvars[0].aval, self.where)
        operands = [self.builder.broadcast(v, result.shape) for v in operands]
        self._check_dtypes(row, operands)
        attrs = {a: _attribute(eqn.params[a]) for a in row.attrs}
        value = self.builder.op(row.name, *operands, **attrs)
        return self.builder.cast(value, result.dtype)

    def _check_parameters(self, eqn: Any, known: Collection[str]) -> None:
        """Raises if a rule would ignore a parameter of JAX's; ours change with their
        rules."""
        if ANY in known or eqn.primitive.name.startswith("pallasite_"):
            return
        if why := unknown_parameter(eqn.params, known):
            raise self.unsupported(eqn, why)

    def _check_dtypes(self, row: Any, operands: Sequence[Value]) -> None:
        for value in operands:
            if value.tile.dtype not in row.dtypes:
                raise UnsupportedError(
                    f"{row.name} is not defined for {value.tile.dtype}",
                    [("kernel", self.kernel_name), ("operand", value.tile)],
                    self.where,
                    fix="cast the operand first: x.astype(...)",
                )

    def splice(self, fn: Callable[..., Any], args: Sequence[Value]) -> list[Value]:
        """Import `fn`, a JAX function, in place of an equation."""
        avals = [jax.ShapeDtypeStruct(a.tile.shape, a.tile.dtype.np) for a in args]
        with jaxcompat.own_tracing():
            closed = jaxcompat.lower_other_high_level(jax.make_jaxpr(fn)(*avals))
        return self.run(closed, args)

    def per_word(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """An equation that only moves random keys, applied to their words."""
        is_key = [jaxcompat.is_key_dtype(v.aval.dtype) for v in eqn.invars]

        def one_word(*args: Any) -> Any:
            return eqn.primitive.bind(*args, **eqn.params)

        in_axes = [-1 if key else None for key in is_key]
        return self.splice(jax.vmap(one_word, in_axes, -1), operands)

    @contextlib.contextmanager
    def nested(self) -> Iterator[Builder]:
        """Collect a region's ops in a builder of its own."""
        outer = self.builder
        self.builder = Builder(outer.loc, outer.watch)
        try:
            yield self.builder
        finally:
            self.builder = outer

    def region(
        self, jaxpr: Any, params: Sequence[Value], args: Sequence[Value]
    ) -> Block:
        """A jaxpr as a region: `args` feed its inputs, `params` are its own."""
        with self.nested() as builder:
            results = self.run(jaxpr, args)
            return builder.block(params, results)

    def unsupported(self, eqn: Any, detail: str = "") -> PallasError:
        if upstream.has_primitive(eqn.primitive):
            facts = [("kernel", self.kernel_name)]
            return upstream.foreign(eqn.primitive.name, facts, self.where)
        shapes = ", ".join(v.aval.str_short() for v in eqn.invars)
        return UnsupportedError(
            f"the kernel language does not support {eqn.primitive.name}",
            [
                ("kernel", self.kernel_name),
                ("operands", shapes or None),
                ("why", detail or None),
            ],
            self.where,
            "compute it outside the kernel and pass it in, or use other operations",
        )


def _has_dtype(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return (
        dtype is None or jaxcompat.is_key_dtype(dtype) or T.dtype_of(dtype) is not None
    )


def _makes_keys(eqn: Any) -> bool:
    return any(jaxcompat.is_key_dtype(v.aval.dtype) for v in eqn.outvars)


def _used(jaxpr: Any) -> set[Any]:
    used = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    for eqn in jaxpr.eqns:
        used.update(v for v in eqn.invars if not hasattr(v, "val"))
    return used


def _attribute(value: Any) -> Any:
    """Enums (RoundingMethod) and numpy integers as plain ints."""
    return int(value) if hasattr(value, "__int__") else value


def value_dtype(value: Any) -> T.DType:
    given = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    dtype = T.dtype_of(given)
    if dtype is None:
        raise UnsupportedError(
            f"a kernel cannot capture a value of dtype {given}",
            fix="cast it before the call",
        )
    return dtype


def tile_type(aval: Any, where: Loc | None = None) -> T.TileType:
    """The IR type of a JAX array type; random keys become their uint32 words."""
    if jaxcompat.is_key_dtype(aval.dtype):
        return T.TileType((*aval.shape, *jaxcompat.key_data_shape(aval.dtype)), T.U32)
    dtype = T.dtype_of(aval.dtype)
    if dtype is None:
        raise UnsupportedError(
            f"the kernel language does not support dtype {aval.dtype}",
            [("value", aval.str_short())],
            where,
            "pass real and imaginary parts as two arrays of floats"
            if np.issubdtype(aval.dtype, np.complexfloating)
            else f"cast it before the call: {', '.join(T.DTYPES)}",
        )
    return T.TileType(tuple(aval.shape), dtype)
