"""The op record and its registry.

An op is one row: name, JAX primitive, type rule, meaning, cost unit, sampling domain,
allowed error, and the decomposition used by backends that lack it. The rows are in
`ops/`; import, evaluation, legalisation, cost and the generated tests read them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pallasite.ir.types import ALL, DType, Type

Attrs = Mapping[str, Any]
TypeRule = Callable[[tuple[Type, ...], Attrs], tuple[Type, ...]]


class Unit(Enum):
    """The hardware unit an op occupies, for the cost model."""

    NONE = "none"
    ALU = "alu"
    SPECIAL = "special"  # transcendental unit
    MATRIX = "matrix"
    MEMORY = "memory"
    CONTROL = "control"


class Effect(Enum):
    """What an op does besides producing its results."""

    PURE = "pure"
    READ = "read"
    WRITE = "write"  # also ordering: copies, semaphores, prints


class Use(Enum):
    """What an op does to the memory behind a ref that it takes."""

    NONE = "none"
    READ = "read"
    WRITE = "write"  # of a semaphore or barrier: changes its count
    UPDATE = "update"  # reads and writes, or writes a part and keeps the rest
    VIEW = "view"  # its result is part of the same memory


# Levels of the IR, each including the ops of those before it: operations on whole
# blocks; copies in flight, semaphores, concurrent roles and layouts.
TILE, EXPLICIT = "tile", "explicit"
LEVELS = (TILE, EXPLICIT)


@dataclass(frozen=True)
class OpDef:
    """One row of the op table."""

    name: str
    type_rule: TypeRule
    arity: int | None = None  # None: any number
    jax: str | None = None  # JAX primitive with the same meaning and operands
    attrs: tuple[str, ...] = ()
    dtypes: tuple[DType, ...] = ALL
    meaning: Callable[..., Any] | None = None  # numpy; elementwise ops only
    lower: Callable[..., Any] | None = None  # (Builder, *values, **attrs) -> Value
    unit: Unit = Unit.NONE
    effect: Effect = Effect.PURE
    elementwise: bool = False
    # Of its ref operands by position; the last holds for all later ones.
    uses: tuple[Use, ...] = ()
    indexed: bool = False  # selects elements of its first operand (`nodes.Access`)
    # Each element of the result is one of the first operand's; the attributes say
    # which, and the numbers have no part in it.
    moves: bool = False
    linear: tuple[int, ...] = ()  # in each of these operands, if the others are held
    regions: int | None = 0  # None: any number
    domain: tuple[float, float] | None = None  # sampled by the conformance tests
    max_ulp: float = 0  # allowed error in ulps of the result type; 0: exact
    level: str = TILE  # the first level that has the op
    layouts: bool = False  # whether operands and results may have layouts
    doc: str = ""


OPS: dict[str, OpDef] = {}
BY_JAX: dict[str, OpDef] = {}


def register(row: OpDef) -> OpDef:
    assert row.name not in OPS, row.name
    OPS[row.name] = row
    if row.jax is not None:
        BY_JAX[row.jax] = row
    return row


def table() -> dict[str, OpDef]:
    """The op table. The package's import fills it (`pallasite.ops` holds the rows)."""
    return OPS


def names(holds: Callable[[OpDef], bool]) -> frozenset[str]:
    """The ops whose rows have a property. Only for code above the op table."""
    assert OPS, "pallasite.ops is not imported yet"
    return frozenset(name for name, row in table().items() if holds(row))


class TypeRuleError(Exception):
    """A type rule rejects its operands. The caller adds op, location and fix."""
