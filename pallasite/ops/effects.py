"""Ops with memory access or control flow: load, store, copies, loops, pipeline."""

from typing import Any

from pallasite.ir.nodes import At, Block, Gather, Index, Span, Window, dynamic_count
from pallasite.ir.opdef import (
    EXPLICIT,
    Attrs,
    Effect,
    OpDef,
    TypeRule,
    TypeRuleError,
    Unit,
    Use,
    register,
)
from pallasite.ir.types import I32, RefType, TileType, Type

ATOMIC_KINDS = ("add", "max", "min", "and", "or", "xor", "xchg")


def index_result_shape(
    ref: RefType, index: Index, operands: tuple[Type, ...]
) -> tuple[int, ...]:
    """The shape an index selects: gathered dimensions first, then the spans."""
    if len(index) != ref.rank:
        raise TypeRuleError(f"index has {len(index)} entries for {ref}")
    pending = iter(operands)
    gathered: tuple[int, ...] | None = None
    spans: list[int] = []
    for n, entry in zip(ref.shape, index, strict=True):
        operand = None
        if isinstance(entry, Gather) or entry.start is None:
            operand = next(pending)
            if not (isinstance(operand, TileType) and operand.dtype.is_integer):
                raise TypeRuleError(f"index operand {operand} is not an integer")
        if isinstance(entry, Gather):
            assert isinstance(operand, TileType)
            if gathered not in (None, operand.shape):
                raise TypeRuleError(
                    f"index tiles differ in shape: {gathered} and {operand.shape}"
                )
            gathered = operand.shape
            continue
        if operand is not None and operand.shape != ():
            raise TypeRuleError(f"a start must be a scalar, got {operand}")
        if isinstance(entry, Span):
            first = entry.start or 0
            if entry.size < 0 or entry.stride < 1 or first < 0:
                raise TypeRuleError(f"malformed span {entry}")
            if first + entry.extent > n:
                raise TypeRuleError(
                    f"{entry} is out of bounds for {n} elements of {ref}"
                )
            spans.append(entry.size)
        elif entry.start is not None and not 0 <= entry.start < n:
            raise TypeRuleError(
                f"index {entry.start} is out of bounds for {n} elements of {ref}"
            )
    return (*(gathered or ()), *spans)


def _ref(types: tuple[Type, ...]) -> RefType:
    if not types or not isinstance(types[0], RefType):
        raise TypeRuleError("the first operand must be a ref")
    return types[0]


def _check_tail(tail: tuple[Type, ...], attrs: Attrs, result: TileType) -> None:
    expected = [result.shape] * (bool(attrs.get("mask")) + bool(attrs.get("other")))
    if [t.shape for t in tail] != expected:
        raise TypeRuleError(f"mask and other must have the shape of {result}")


def _load(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    ref, n = _ref(types), dynamic_count(attrs["index"])
    shape = index_result_shape(ref, attrs["index"], types[1 : 1 + n])
    result = TileType(shape, ref.dtype)
    _check_tail(types[1 + n :], attrs, result)
    return (result,)


def _update(types: tuple[Type, ...], attrs: Attrs, values: int) -> TileType:
    ref, n = _ref(types), dynamic_count(attrs["index"])
    shape = index_result_shape(ref, attrs["index"], types[1 + values : 1 + values + n])
    picked = TileType(shape, ref.dtype)
    for value in types[1 : 1 + values]:
        if value != picked:
            raise TypeRuleError(
                f"value is {value}, the index selects {picked} of {ref}"
            )
    _check_tail(types[1 + values + n :], attrs, picked)
    return picked


def _store(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    _update(types, attrs, 1)
    return ()


def _atomic_rmw(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    if attrs["kind"] not in ATOMIC_KINDS:
        raise TypeRuleError(f"unknown atomic {attrs['kind']!r}")
    return (_update(types, attrs, 1),)


def _atomic_cas(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return (_update(types, attrs, 2),)


def _subview(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    ref, index = _ref(types), attrs["index"]
    if any(isinstance(e, Gather) for e in index):
        raise TypeRuleError("a view cannot gather; load with the index array instead")
    return (ref.with_shape(index_result_shape(ref, index, types[1:])),)


def _reshape_view(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    result = _ref(types).with_shape(attrs["shape"])
    if result.size != _ref(types).size:
        raise TypeRuleError(f"cannot view {types[0]} with shape {attrs['shape']}")
    if result.layout is not None and result.shape[-1:] != _ref(types).shape[-1:]:
        raise TypeRuleError(f"the rows of {types[0]} are laid out as they are")
    return (result,)


def _bitcast_view(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """The second-last dimension absorbs a width change, as on TPU (packed rows)."""
    ref, dtype = _ref(types), attrs["dtype"]
    shape = list(ref.shape)
    if ref.dtype.bits != dtype.bits:
        if ref.rank < 2 or shape[-2] * ref.dtype.bits % dtype.bits:
            raise TypeRuleError(f"cannot view {ref} as {dtype}")
        shape[-2] = shape[-2] * ref.dtype.bits // dtype.bits
    return (RefType(tuple(shape), dtype, ref.space),)


def _transpose_view(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    ref = _ref(types)
    perm: tuple[int, ...] = attrs["perm"]
    if sorted(perm) != list(range(ref.rank)):
        raise TypeRuleError(f"{perm} is not a permutation of {ref.rank} dimensions")
    return (ref.with_shape([ref.shape[d] for d in perm]),)


def _block_view(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """Operands: a ref, then the results of the window's index map."""
    window: Window = attrs["window"]
    if types[1:] != (TileType((), I32),) * map_results(window):
        raise TypeRuleError(f"needs {map_results(window)} block indices, each one i32")
    return (block_ref(_ref(types), window),)


def _alloc(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return (attrs["type"],)


def check_region(region: Block, params: tuple[Type, ...], yields: tuple[Type, ...]):
    got = tuple(p.type for p in region.params)
    if got != params:
        raise TypeRuleError(f"region takes {_list(got)}, expected {_list(params)}")
    got = tuple(y.type for y in region.yields)
    if got != yields:
        raise TypeRuleError(f"region yields {_list(got)}, expected {_list(yields)}")


def _list(types: tuple[Type, ...]) -> str:
    return "(" + ", ".join(map(str, types)) + ")"


def _for(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """Operands: first, limit, step (same integer type), then the carried values."""
    first, limit, step, *carry = types
    if not first == limit == step or not isinstance(first, TileType):
        raise TypeRuleError("first, limit and step must be integers of one type")
    (body,) = attrs["regions"]
    check_region(body, (first, *carry), tuple(carry))
    return tuple(carry)


def _while(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    condition, body = attrs["regions"]
    from pallasite.ir.types import BOOL

    check_region(condition, types, (TileType((), BOOL),))
    check_region(body, types, types)
    return types


def _cond(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """Operand: an i32 branch index, clamped to the existing branches."""
    if types != (TileType((), I32),):
        raise TypeRuleError(f"the branch number is one i32, got {_list(types)}")
    branches = attrs["regions"]
    if not branches:
        raise TypeRuleError("needs at least one branch")
    result = tuple(y.type for y in branches[0].yields)
    for branch in branches:
        check_region(branch, (), result)
    return result


def _custom(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (body,) = attrs["regions"]
    result = tuple(y.type for y in body.yields)
    check_region(body, types, result)
    return result


def _fetch_and_add(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    if _ref(types) != RefType((), I32, "smem"):
        raise TypeRuleError(f"adds to one i32 in scalar memory, got {types[0]}")
    number = TileType((), I32)
    if types[1:] != (number, number):
        raise TypeRuleError(f"takes two i32, got {_list(types[1:])}")
    return (number,)


def block_ref(ref: RefType, window: Window) -> RefType:
    """The ref a pipeline body sees through `window`."""
    if len(window.dims) != ref.rank:
        raise TypeRuleError(f"window has {len(window.dims)} dimensions for {ref}")
    return RefType(window.block_shape, ref.dtype, window.space)


def map_results(window: Window) -> int:
    """How many numbers the window's index map yields."""
    return sum(2 if d.kind == "bounded" else 1 for d in window.dims)


def _pipeline(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """Operands: the dynamic grid sizes, then one ref per window.

    Regions: one index map per window (grid indices -> block indices), then the body
    (grid indices, block refs). `grid` holds an int per axis, None where dynamic.
    """
    grid, windows = attrs["grid"], attrs["windows"]
    sizes = sum(g is None for g in grid)
    if len(types) != sizes + len(windows):
        raise TypeRuleError(f"{len(types)} operands for {len(windows)} windows")
    if len(attrs["semantics"]) != len(grid):
        raise TypeRuleError(f"{len(attrs['semantics'])} semantics for {len(grid)} axes")
    if len(attrs["regions"]) != len(windows) + 1:
        raise TypeRuleError("needs one index map per window and a body")
    index = TileType((), I32)
    ids = (index,) * len(grid)
    *maps, body = attrs["regions"]
    refs: list[Type] = []
    for ref, window, index_map in zip(types[sizes:], windows, maps, strict=True):
        if not isinstance(ref, RefType):
            raise TypeRuleError(f"a window needs a ref, got {ref}")
        refs.append(block_ref(ref, window))
        check_region(index_map, ids, (index,) * map_results(window))
    check_region(body, (*ids, *refs), ())
    return ()


def _roles(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    if not attrs["regions"]:
        raise TypeRuleError("needs at least one role")
    for role in attrs["regions"]:
        check_region(role, (), ())
    return ()


def _nothing(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return ()


def _copy(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """Operands: source ref, destination ref, semaphore ref."""
    source, target, *_ = types
    if not isinstance(source, RefType) or not isinstance(target, RefType):
        raise TypeRuleError("a copy goes from ref to ref")
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        raise TypeRuleError(f"cannot copy {source} to {target}")
    return ()


def _indexed_copy(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    """Operands: source ref, destination ref, semaphore ref, row indices."""
    source, target, _, rows = types
    if not isinstance(source, RefType) or not isinstance(target, RefType):
        raise TypeRuleError("a copy goes from ref to ref")
    if len(rows.shape) != 1 or not rows.dtype.is_integer:
        raise TypeRuleError(f"rows are numbered by one dimension of integers: {rows}")
    table, block = (
        (source, target) if attrs["indexed"] == "source" else (target, source)
    )
    wanted = (*rows.shape, *table.shape[1:])
    if not table.rank or (block.shape, block.dtype) != (wanted, table.dtype):
        raise TypeRuleError(f"cannot copy {source} to {target} by {rows}")
    return ()


def _first(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return (types[0],)


def _barrier_semaphore(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return (RefType((), I32, "barrier_sem"),)


def _device_number(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return (TileType((), I32),)


def _sem_read(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return (TileType(_ref(types).shape, I32),)


def _row(
    name: str,
    rule: TypeRule,
    arity: int | None,
    attrs: tuple[str, ...] = (),
    effect: Effect = Effect.WRITE,
    **kw: Any,
) -> OpDef:
    kw = {"unit": Unit.MEMORY, **kw}
    return register(OpDef(name, rule, arity, attrs=attrs, effect=effect, **kw))


_control: dict[str, Any] = {"unit": Unit.CONTROL}
_explicit: dict[str, Any] = {"level": EXPLICIT, "layouts": True}
_laid_out: dict[str, Any] = {"layouts": True}
_view: dict[str, Any] = {"uses": (Use.VIEW,), "effect": Effect.PURE}
_reads: dict[str, Any] = {"uses": (Use.READ,)}
_writes: dict[str, Any] = {"uses": (Use.WRITE,)}
_updates: dict[str, Any] = {"uses": (Use.UPDATE,)}
_indexed: dict[str, Any] = {"indexed": True}
# A copy may complete at any time between its start and its wait, so both write. For a
# remote copy, these are its effects on this device's memory: every device runs the
# kernel.
_copies: dict[str, Any] = {"uses": (Use.READ, Use.WRITE), **_explicit}
# Rows that are not indexed stay as they were.
_some_rows: dict[str, Any] = {"uses": (Use.READ, Use.UPDATE, Use.WRITE), **_explicit}

# Masked-off elements access no memory. Without a mask, scalar and slice starts are
# clamped to the ref as by lax.dynamic_slice; gathered indices are clamped when read and
# dropped when written; with a mask this holds element by element.
_load_parts = ("index", "mask", "other")
_row("load", _load, None, _load_parts, Effect.READ, **_reads, **_indexed, **_laid_out)
_row("store", _store, None, ("index", "mask"), **_writes, **_indexed, **_laid_out)
_row(
    "atomic_rmw",
    _atomic_rmw,
    None,
    ("kind", "index", "mask"),
    doc="returns the old value",
    **_updates,
    **_indexed,
)
_row(
    "atomic_cas",
    _atomic_cas,
    None,
    ("index",),
    doc="returns the old value",
    **_updates,
    **_indexed,
)
_row("subview", _subview, None, ("index",), **_view, **_indexed, **_laid_out)
_row("reshape_view", _reshape_view, 1, ("shape",), **_view, **_laid_out)
_row("bitcast_view", _bitcast_view, 1, ("dtype",), **_view)
_row("transpose_view", _transpose_view, 1, ("perm",), **_view, **_laid_out)
_row(
    "block_view",
    _block_view,
    None,
    ("window",),
    doc="the block of a pipeline's window at the given block indices",
    **_view,
)
_row(
    "alloc",
    _alloc,
    0,
    ("type",),
    doc="uninitialised memory; its lifetime ends with the enclosing block",
    **_laid_out,
)
_row("for", _for, None, (), regions=1, **_control, **_laid_out)
_row("while", _while, None, (), regions=2, **_control, **_laid_out)
_row("cond", _cond, 1, (), regions=None, **_control, **_laid_out)
_row(
    "custom",
    _custom,
    None,
    ("rule",),
    regions=1,
    doc="runs its body; its derivative is the named rule",
    **_control,
)
_row(
    "pipeline",
    _pipeline,
    None,
    ("grid", "windows", "semantics"),
    regions=None,
    doc="runs the body for each grid index, last axis fastest",
    **_control,
)
_row(
    "roles",
    _roles,
    0,
    regions=None,
    doc="runs its regions concurrently, until all have ended",
    unit=Unit.CONTROL,
    **_explicit,
)
_row(
    "barrier",
    _nothing,
    0,
    doc="waits until every role, or every subcore of the core, arrives",
    **_explicit,
)
_row("copy_start", _copy, None, ("priority",), doc="starts an async copy", **_copies)
_row(
    "copy_wait",
    _copy,
    None,
    doc="waits for an async copy of the same shape",
    **_copies,
)
_row(
    "indexed_copy_start",
    _indexed_copy,
    4,
    ("indexed", "add"),
    doc="starts an async copy with rows of its `indexed` side selected by index; "
    "out-of-bounds indices are clamped when read and dropped when written; `add` "
    "accumulates",
    **_some_rows,
)
_row(
    "indexed_copy_wait",
    _indexed_copy,
    4,
    ("indexed",),
    doc="waits for an async copy of as many rows",
    **_some_rows,
)
_row("sem_signal", _nothing, 2, doc="semaphore, i32 increment", **_writes, **_explicit)
_row(
    "sem_signal_core",
    _nothing,
    3,
    doc="semaphore, i32 increment, i32 index of the core that owns the semaphore",
    **_writes,
    **_explicit,
)
_row(
    "sem_wait",
    _nothing,
    2,
    doc="semaphore, i32 amount: waits, then subtracts",
    **_writes,
    **_explicit,
)
_row("sem_read", _sem_read, 1, (), Effect.READ, **_reads, **_explicit)
_row(
    "fetch_and_add",
    _fetch_and_add,
    3,
    doc="i32 in scalar memory, i32 increment, i32 index of the subcore that owns the "
    "memory: atomic add, returns the old value",
    **_updates,
    **_explicit,
)
_row(
    "remote_copy_start",
    _copy,
    5,
    ("priority",),
    doc="source, remote destination, local semaphore (source read), remote semaphore "
    "(destination written), device",
    **_copies,
)
_row(
    "sem_signal_device",
    _nothing,
    None,
    doc="semaphore, i32 increment, i32 index of the device, optionally of its core",
    **_writes,
    **_explicit,
)
_row(
    "barrier_semaphore",
    _barrier_semaphore,
    0,
    (),
    Effect.PURE,
    doc="the semaphore that devices signal to each other when they have started the "
    "kernel",
    **_explicit,
)
_row(
    "device_number",
    _device_number,
    0,
    ("count",),
    Effect.PURE,
    doc="i32: the index of this device among the `count` devices that run the kernel",
    **_explicit,
)
_row("debug_print", _nothing, None, ("format",), **_control)
_row(
    "debug_check",
    _nothing,
    None,
    ("message",),
    doc="fails if the bool is false; the other operands fill the message's fields",
)
_row("delay", _nothing, 1, (), **_control)
_row(
    "assume_multiple",
    _first,
    1,
    ("multiple",),
    Effect.PURE,
    doc="an assumption; emits no code",
)

__all__ = ["ATOMIC_KINDS", "At", "block_ref", "index_result_shape", "map_results"]
