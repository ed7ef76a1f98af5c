"""Defines legal kernels: `verify(kernel)` raises VerifyError at the first violation.

Runs on the importer's output and, with PALLASITE_VERIFY, after each pass. Most rules
come from the op table (arity, attributes, dtypes, type rule); what a type rule cannot
see (scopes, windows, constants) is checked here, by one small function per rule.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn
from weakref import WeakSet

from pallasite.errors import InternalError, VerifyError
from pallasite.ir.build import python_scalar
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, Window, walk
from pallasite.ir.opdef import (
    EXPLICIT,
    LEVELS,
    Effect,
    OpDef,
    TypeRuleError,
    Unit,
    table,
)
from pallasite.ir.text import attr_text, print_op
from pallasite.ir.types import ALL, BOOL, INDEX, SPACES, DType, RefType, TileType, Type

SEMANTICS = (
    "arbitrary",
    "sequential",
    "parallel",
    "core_parallel",
    "subcore_parallel",
    "cluster",  # programs that run concurrently and see each other's shared memory
)
BLOCK_KINDS = ("blocked", "element", "squeezed", "bounded")
WINDOW_MODES = ("in", "out")


def verify(kernel: Kernel) -> None:
    """Check every rule of the IR.

    Raises:
        VerifyError: names the rule, the op in its printed form, and the user's line.
    """
    _Verifier(kernel).run()


# Ops known to satisfy the rules about a single op. Most ops outlive a pass, nodes are
# immutable, and these rules take most of the verification time.
_legal: WeakSet[Op] = WeakSet()


class _Breach(Exception):
    """A violated rule; the verifier adds the op and its location."""


class _Verifier:
    """Walks a kernel in program order, tracking the values that are visible."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.defined: set[Value] = set()
        self.visible: set[Value] = set()
        self.scope: list[Value] = []  # the visible values, in order of definition
        self.inside: list[str] = []  # the ops whose regions we are in, or "subcores"

    def run(self) -> None:
        kernel = self.kernel
        try:
            _check_signature(kernel)
            self.define(kernel.params)
            if kernel.body.params or kernel.body.yields:
                raise _Breach("a kernel body takes no parameters and yields nothing")
        except _Breach as breach:
            self.fail(str(breach), None)
        self.block(kernel.body, None)
        if kernel.level == EXPLICIT:
            self.check_pending()

    def check_pending(self) -> None:
        """A matmul in flight may only be accumulated into or waited for."""
        pending = _pending_tiles(self.kernel.body)
        for op in walk(self.kernel.body) if pending else ():
            for n, value in enumerate(op.operands):
                waits = op.name == "wgmma_wait" or (op.name == "wgmma" and n == 0)
                if value in pending and not waits and op.name not in ("for", "while"):
                    what = f"{op.name} uses a matmul in flight ({_named(value)})"
                    self.fail(f"{what}, which needs a wgmma_wait first", op)

    def block(self, block: Block, owner: Op | None) -> None:
        outside = len(self.scope)
        try:
            self.define(block.params)
        except _Breach as breach:
            self.fail(str(breach), owner)
        for op in block.ops:
            self.op(op)
        for value in block.yields:
            self.check_visible(value, owner, "yielded value")
        self.visible.difference_update(self.scope[outside:])
        del self.scope[outside:]

    def op(self, op: Op) -> None:
        row = table().get(op.name)
        if row is None:
            self.fail(f"unknown operation '{op.name}'", op)
        for n, value in enumerate(op.operands):
            if value not in self.visible:
                self.check_visible(value, op, f"operand {n}")
        known = op in _legal
        try:
            if not known:
                _check_counts(op, row)
                _check_attrs(op, row)
                _check_dtypes(op, row)
                _check_layouts(op, row)
            _check_level(op, row, self.kernel.level)
            if op.name == "barrier" and not {"roles", "subcores"} & {*self.inside}:
                raise _Breach("a barrier needs roles; there are none here")
        except _Breach as breach:
            self.fail(str(breach), op)
        subcores = "subcore_parallel" in op.attrs.get("semantics", ())
        self.inside.append("subcores" if subcores else op.name)
        for region in op.regions:
            self.block(region, op)
        self.inside.pop()
        try:
            if not known:
                _check_types(op, row)
                if op.name in _EXTRA:
                    _EXTRA[op.name](op)
                _legal.add(op)
            self.define(op.results)
        except _Breach as breach:
            self.fail(str(breach), op)

    def define(self, values: tuple[Value, ...]) -> None:
        for value in values:
            if value in self.defined:
                raise _Breach(f"{_named(value)} is defined twice")
            _check_type(value.type, self.kernel.level)
            self.defined.add(value)
            self.visible.add(value)
            self.scope.append(value)

    def check_visible(self, value: Value, op: Op | None, what: str) -> None:
        if value in self.visible:
            return
        if value in self.defined:
            self.fail(f"{what} is defined in a region that has ended", op)
        self.fail(f"{what} is used before it is defined", op)

    def fail(self, what: str, op: Op | None) -> NoReturn:
        facts = [("kernel", self.kernel.name)]
        if op is not None:
            facts.append(("op", _op_text(op, self.kernel)))
        raise VerifyError(what, facts, op.loc if op else self.kernel.loc)


def _op_text(op: Op, kernel: Kernel) -> str:
    try:
        return print_op(op, within=kernel, regions=False)
    except InternalError:  # the violation is that an attribute cannot be printed
        return f"{op.name} {dict(op.attrs)!r}"


def _named(value: Value) -> str:
    return f"{value.name or 'a value'}: {value.type}"


# --- rules of the kernel itself ---


def _check_signature(kernel: Kernel) -> None:
    if kernel.level not in LEVELS:
        raise _Breach(f"level '{kernel.level}' is not one of {', '.join(LEVELS)}")
    for n, param in enumerate(kernel.params):
        if not isinstance(param.type, RefType):
            raise _Breach(f"parameter {n} is {param.type}; kernels take refs")
    if not 0 <= kernel.num_outputs <= len(kernel.params):
        raise _Breach(
            f"{kernel.num_outputs} outputs of {len(kernel.params)} parameters"
        )
    _check_aliases(kernel)


def _check_aliases(kernel: Kernel) -> None:
    for operand, result in kernel.aliases:
        if not 0 <= operand < len(kernel.inputs):
            raise _Breach(f"alias {operand}: {result} names no input")
        if not 0 <= result < kernel.num_outputs:
            raise _Breach(f"alias {operand}: {result} names no output")
        source, target = kernel.inputs[operand].ref, kernel.outputs[result].ref
        if source.tile != target.tile:
            raise _Breach(
                f"alias {operand}: {result} joins {source.tile} and {target.tile}"
            )
    for side in zip(*kernel.aliases, strict=True):
        if len(set(side)) != len(side):
            raise _Breach("two aliases name the same parameter")


def _check_type(type_: Type, level: str) -> None:
    if type_.layout is not None and level != EXPLICIT:
        raise _Breach(f"{type_} has a layout, which is for level '{EXPLICIT}'")
    if any(n < 0 for n in type_.shape):
        raise _Breach(f"{type_} has a negative dimension")
    if isinstance(type_, RefType) and type_.space not in SPACES:
        raise _Breach(f"{type_}: unknown memory space '{type_.space}'")


def _pending_tiles(body: Block) -> set[Value]:
    """Results of wgmma without a wgmma_wait yet, also through loops and branches."""
    ops = list(walk(body))
    found = {v for op in ops if op.name == "wgmma" for v in op.results}
    before = -1
    while len(found) != before:
        before = len(found)
        for op in ops:
            if op.name in ("for", "while"):
                *_, inner = op.regions
                inits = op.operands[len(op.operands) - len(op.results) :]
                params = inner.params[len(inner.params) - len(op.results) :]
                for same in zip(inits, params, inner.yields, op.results, strict=True):
                    init, param, after, result = same
                    if init in found or after in found:
                        found |= {param, result}
            elif op.name == "cond":
                for same in zip(
                    op.results, *(r.yields for r in op.regions), strict=True
                ):
                    if any(v in found for v in same[1:]):
                        found.add(same[0])
    return found


# --- rules every row states ---


def _check_counts(op: Op, row: OpDef) -> None:
    if row.arity is not None and len(op.operands) != row.arity:
        raise _Breach(f"{op.name} takes {row.arity} operands, got {len(op.operands)}")
    if row.regions is not None and len(op.regions) != row.regions:
        raise _Breach(f"{op.name} takes {row.regions} regions, got {len(op.regions)}")


def _check_attrs(op: Op, row: OpDef) -> None:
    missing = [k for k in row.attrs if k not in op.attrs]
    if missing:
        raise _Breach(f"{op.name} lacks attribute '{missing[0]}'")
    # Attributes with a dot are a backend's notes to its own emitter (`cpu.units`).
    known = {*row.attrs, *(k for k in op.attrs if "." in k)}
    unknown = sorted(op.attrs.keys() - known)
    if unknown:
        raise _Breach(f"{op.name} has no attribute '{unknown[0]}'")
    for key, value in op.attrs.items():
        try:
            attr_text(value)
        except InternalError:
            raise _Breach(f"attribute '{key}' is not plain data: {value!r}") from None


def _check_level(op: Op, row: OpDef, level: str) -> None:
    if LEVELS.index(row.level) > LEVELS.index(level):
        raise _Breach(
            f"{op.name} is of level '{row.level}', the kernel of level '{level}'"
        )


def _check_layouts(op: Op, row: OpDef) -> None:
    if row.layouts:
        return
    for value in (*op.operands, *op.results):
        if value.type.layout is not None:
            raise _Breach(f"{op.name} takes no layouts, got {_named(value)}")


def _check_dtypes(op: Op, row: OpDef) -> None:
    if row.dtypes is ALL:
        return
    for value in op.operands:
        if isinstance(value.type, TileType) and value.type.dtype not in row.dtypes:
            raise _Breach(f"{op.name} does not take {value.type.dtype}")


def _check_types(op: Op, row: OpDef) -> None:
    attrs: Mapping[str, Any] = op.attrs
    if row.regions != 0:
        attrs = {**attrs, "regions": op.regions}
        for value in (y for region in op.regions for y in region.yields):
            if value.is_ref:
                raise _Breach(f"a region yields a ref: {_named(value)}")
    try:
        expected = row.type_rule(tuple(v.type for v in op.operands), attrs)
    except TypeRuleError as error:
        raise _Breach(f"{op.name}: {error}") from None
    except Exception as error:  # type rules assume well-formed operands and attrs
        detail = f"{type(error).__name__}: {error}".rstrip(": ")
        raise _Breach(
            f"{op.name}: malformed operands or attributes ({detail})"
        ) from None
    got = tuple(v.type for v in op.results)
    if got != expected:
        raise _Breach(
            f"{op.name} gives {_types(expected)}, but its results are {_types(got)}"
        )


def _types(types: tuple[Type, ...]) -> str:
    return "(" + ", ".join(map(str, types)) + ")"


# --- rules of single ops that their type rule does not state ---


def _check_constant(op: Op) -> None:
    type_, value = op.attrs["type"], op.attrs["value"]
    if not isinstance(type_, TileType):
        raise _Breach(f"constant: {type_} is not a tile type")
    kind = bool if type_.dtype.is_bool else float if type_.dtype.is_float else int
    if type(value) is not kind:
        raise _Breach(f"constant: {value!r} is not a {kind.__name__}, for {type_}")
    if not _is_number_of(value, type_.dtype):
        raise _Breach(f"constant: {value!r} is not a number of {type_.dtype}")


def _is_number_of(value: bool | int | float, dtype: DType) -> bool:
    if dtype.is_integer:
        low = -(1 << (dtype.bits - 1)) if dtype.is_signed_int else 0
        return low <= value < low + (1 << dtype.bits)
    return value != value or python_scalar(value, dtype) == value


def _check_iota(op: Op) -> None:
    if not isinstance(op.attrs["type"], TileType):
        raise _Breach(f"iota: {op.attrs['type']} is not a tile type")


def _check_alloc(op: Op) -> None:
    if not isinstance(op.attrs["type"], RefType):
        raise _Breach(f"alloc: {op.attrs['type']} is not a ref type")
    layout = op.attrs["type"].layout
    if op.attrs["type"].space == "mbarrier" and (
        layout is None or layout.kind != "arrivals" or layout.numbers[0] < 1
    ):
        raise _Breach(f"alloc: {op.attrs['type']} needs @arrivals(n), n at least 1")


def _check_access(op: Op) -> None:
    access = Access.of(op)
    if access.ref.ref.is_semaphore and op.name != "subview":
        raise _Breach(f"{op.name}: {access.ref.type} is a semaphore, not data")
    if access.mask is not None and access.mask.tile.dtype != BOOL:
        raise _Breach(f"{op.name}: the mask is {access.mask.type}, not bool")
    if access.other is not None and access.other.tile.dtype != access.ref.ref.dtype:
        raise _Breach(f"{op.name}: other is {access.other.type} for {access.ref.type}")


def _check_semaphore(op: Op) -> None:
    ref = op.operands[0].type
    if not (isinstance(ref, RefType) and ref.is_semaphore):
        raise _Breach(f"{op.name}: {ref} is not a semaphore")
    if ref.space == "mbarrier":
        raise _Breach(f"{op.name}: {ref} is a barrier: barrier_arrive, barrier_wait")
    for amount in op.operands[1:]:
        if amount.type != INDEX:
            raise _Breach(f"{op.name}: the amount is {amount.type}, not i32")


def _check_copy(op: Op) -> None:
    for value in op.operands[2:]:
        if isinstance(value.type, RefType) and not value.type.is_semaphore:
            raise _Breach(f"{op.name}: {value.type} is not a semaphore")
        if isinstance(value.type, RefType) and value.type.space == "mbarrier":
            _check_load(op)


def _check_remote_copy(op: Op) -> None:
    *_, sent, received, device = op.operands
    for value in (sent, received):
        if not value.is_ref or not value.ref.is_semaphore:
            raise _Breach(f"{op.name}: {value.type} is not a semaphore")
    if device.type != INDEX:
        raise _Breach(f"{op.name}: the device is {device.type}, not i32")


def _check_load(op: Op) -> None:
    """A copy counted by a barrier: by the copy engine, into shared memory."""
    if op.name == "copy_wait":
        raise _Breach("copy_wait: a barrier is waited for with barrier_wait")
    target, barrier = op.operands[1].ref, op.operands[2].ref
    if target.space != "smem":
        raise _Breach(f"copy_start: {target} is not in shared memory")
    if barrier.shape:
        raise _Breach(f"copy_start: {barrier} is {barrier.size} barriers, not one")


def _check_for(op: Op) -> None:
    first = op.operands[0].type
    if first.shape != () or not first.dtype.is_integer:
        raise _Breach(f"for: counts with {first}, not an integer scalar")


def _check_debug_check(op: Op) -> None:
    if op.operands[0].type != TileType((), BOOL):
        raise _Breach(f"debug_check: {op.operands[0].type} is not a bool")


def _check_pipeline(op: Op) -> None:
    grid, windows, semantics = (op.attrs[k] for k in ("grid", "windows", "semantics"))
    for size in grid:
        if size is not None and (type(size) is not int or size < 0):
            raise _Breach(f"pipeline: grid size {size!r} is not a count")
    for n, value in enumerate(op.operands[: sum(g is None for g in grid)]):
        if value.type != INDEX:
            raise _Breach(f"pipeline: grid size operand {n} is {value.type}, not i32")
    for word in semantics:
        if word not in SEMANTICS:
            raise _Breach(
                f"pipeline: unknown semantics {word!r}; known: {', '.join(SEMANTICS)}"
            )
    for n, window in enumerate(windows):
        _check_window(window, f"window {n}")
    for n, index_map in enumerate(op.regions[:-1]):
        _check_index_map(n, index_map)


def _check_window(window: Window, what: str) -> None:
    if window.mode not in WINDOW_MODES:
        raise _Breach(f"{what}: unknown mode '{window.mode}'")
    if window.space not in SPACES:
        raise _Breach(f"{what}: unknown memory space '{window.space}'")
    if window.buffers is not None and window.buffers < 1:
        raise _Breach(f"{what}: {window.buffers} buffers")
    for dim in window.dims:
        if dim.kind not in BLOCK_KINDS:
            raise _Breach(f"{what}: unknown kind of dimension '{dim.kind}'")
        if dim.size < 0 or (dim.kind == "squeezed" and dim.size != 1):
            raise _Breach(f"{what}: a {dim.kind} dimension of size {dim.size}")
        if dim.padding != (0, 0) and (dim.kind != "element" or min(dim.padding) < 0):
            raise _Breach(f"{what}: padding {dim.padding} of a {dim.kind} dimension")


def _check_block_view(op: Op) -> None:
    _check_window(op.attrs["window"], "block_view")


def _check_index_map(n: int, index_map: Block) -> None:
    for op in walk(index_map):
        row = table()[op.name]
        if row.effect is Effect.WRITE and row.unit is Unit.MEMORY:
            raise _Breach(f"index map {n} writes memory: {op.name}")


_EXTRA: dict[str, Callable[[Op], None]] = {
    "constant": _check_constant,
    "iota": _check_iota,
    "alloc": _check_alloc,
    "load": _check_access,
    "store": _check_access,
    "atomic_rmw": _check_access,
    "atomic_cas": _check_access,
    "subview": _check_access,
    "sem_signal": _check_semaphore,
    "sem_signal_core": _check_semaphore,
    "sem_signal_device": _check_semaphore,
    "sem_wait": _check_semaphore,
    "sem_reach": _check_semaphore,
    "sem_read": _check_semaphore,
    "copy_start": _check_copy,
    "copy_wait": _check_copy,
    "remote_copy_start": _check_remote_copy,
    "for": _check_for,
    "debug_check": _check_debug_check,
    "block_view": _check_block_view,
    "pipeline": _check_pipeline,
}
