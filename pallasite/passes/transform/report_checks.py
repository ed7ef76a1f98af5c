"""report_checks: turns the findings of a kernel's checks into results of the kernel.

`jax.experimental.checkify` makes errors values, which a checked function returns. For a
kernel these are, per program, the number of the first check that failed, and the values
for that check's message. Each program has its own element, so programs stay as
independent as they were, and the first failure is well defined.

The checks are those of the kernel (`debug_check`) and, on request, those that every op
of some kind gets: NaN results, division by zero, and indices past the end of a ref.
"""

from collections.abc import Set
from dataclasses import dataclass, replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    Block,
    BlockDim,
    Kernel,
    Loc,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import I32, INDEX, RefType, TileType
from pallasite.passes.analysis.memory import over_edges

# Elementwise ops that give NaN only if an operand is NaN: not worth a check.
_PASS_ON = {"neg", "abs", "sign", "max", "min", "select_n", "clamp", "cast", "bitcast"}
_PASS_ON |= {"floor", "ceil", "round", "reduce_precision", "stop_gradient"}
_ALSO_NAN = {"dot", "reduce", "scan"}


@dataclass(frozen=True)
class Report:
    """One check of a kernel.

    Attributes:
        kind: "check" (`debug_check`), "nan", "div" or "index".
        message: with a field for each of its values; for "nan", the name of the op.
        values: the positions of the new kernel's results that hold its values.
        shape: of the ref, where an index is checked.
        loc: the user's line.
    """

    kind: str
    message: str
    values: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    loc: Loc | None = None


@dataclass(frozen=True)
class Reporting:
    """A kernel that reports.

    Attributes:
        kernel: returns its original results, one i32 per program (0: nothing failed, n:
            check `reports[n - 1]` failed), and the checks' values.
        grid: the grid of the programs.
        reports: its checks.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    reports: tuple[Report, ...]


def report_checks(kernel: Kernel, kinds: frozenset[str]) -> Reporting | None:
    """The kernel with its checks of these kinds as results.

    Other checks stay as they are. None: there is nothing to report, or the kernel
    cannot: its number of programs is known only at run time, or parts of its programs
    run concurrently (roles).
    """
    places = [n for n, op in enumerate(kernel.body.ops) if op.name == "pipeline"]
    if len(places) != 1:
        return None
    pipeline = Pipeline.of(kernel.body.ops[places[0]])
    grid = tuple(size for size in pipeline.grid if size is not None)
    if len(grid) != len(pipeline.grid) or any(
        op.name in ("roles", "warps") for op in walk(pipeline.body)
    ):
        return None
    inserted = _Inserted(kinds, kernel.num_outputs, over_edges(pipeline.body))
    body = map_ops(pipeline.body, inserted.rewrite)
    if not inserted.reports:
        return None
    start = Builder()
    for ref in inserted.refs:
        start.store(ref, start.constant(0, TileType(ref.ref.shape, ref.ref.dtype)))
    body = replace(body, ops=(*start.ops, *body.ops))
    results = tuple(
        Value(RefType((*grid, *ref.ref.shape), ref.ref.dtype, "any"), ref.name)
        for ref in inserted.refs
    )
    shown = [
        Shown(result, *_own_element(grid, ref), ref)
        for result, ref in zip(results, inserted.refs, strict=True)
    ]
    new = pipeline.showing([*pipeline.shown, *shown])
    new = new.with_(body=replace(body, params=new.body.params))
    ops = list(kernel.body.ops)
    ops[places[0]] = new.to_op()
    reporting = kernel.with_(
        params=(*kernel.params, *results),
        body=replace(kernel.body, ops=tuple(ops)),
        num_outputs=kernel.num_outputs + len(results),
    )
    return Reporting(reporting, grid, tuple(inserted.reports))


def without_checks(kernel: Kernel) -> Kernel:
    """The kernel with no debug_check in it."""
    return map_ops(kernel, lambda op, _: () if op.name == "debug_check" else None)


def _own_element(grid: tuple[int, ...], ref: Value) -> tuple[Window, Block]:
    """A window that shows each program its own element of an array over the grid."""
    dims = [BlockDim(1, "squeezed") for _ in grid]
    window = Window((*dims, *map(BlockDim, ref.ref.shape)), "out")
    ids = tuple(Value(INDEX) for _ in grid)
    b = Builder()
    whole = [b.index(0) for _ in ref.ref.shape]
    return window, b.block(ids, (*ids, *whole))


class _Inserted:
    """Replaces checks with code, and adds checks around ops."""

    def __init__(self, kinds: frozenset[str], first_result: int, may_leave: Set[Value]):
        self.kinds, self.may_leave = kinds, may_leave  # views that leave their array
        self.reports: list[Report] = []
        self.first_result = first_result  # the position of the first ref's result
        self.refs = [Value(RefType((), I32, "block"), "failed")]

    def rewrite(self, op: Op, b: Rewriter) -> tuple[Value, ...] | None:
        """Replace a check with code that reports it; add checks to other ops."""
        if op.name == "debug_check" and "check" in self.kinds:
            ok, *values = op.operands
            self.report(b, ok, Report("check", op.attrs["message"]), *values)
            return ()
        if "div" in self.kinds and op.name == "div":
            divisor = op.operands[1]
            ok = _all(b, b.ne(divisor, b.like(0, divisor)))
            self.report(b, ok, Report("div", op.name))
        is_inside = op.name != "subview" or op.result not in self.may_leave
        if "index" in self.kinds and table()[op.name].indexed and is_inside:
            self.check_indices(b, Access.of(op), op.name)
        makes_nan = "nan" in self.kinds and _may_make_nan(op)
        if not b.ops and not makes_nan:
            return None
        b.ops.append(op)
        if makes_nan:
            ok = _all(b, b.eq(op.result, op.result))
            self.report(b, ok, Report("nan", op.name))
        return op.results

    def check_indices(self, b: Builder, access: Access, name: str) -> None:
        shape = access.ref.ref.shape
        for dim, (entry, start) in enumerate(access.split_index()):
            if start is None:
                continue
            extent = entry.extent if isinstance(entry, Span) else 1
            last = shape[dim] - extent
            inside = b.and_(
                b.ge(start, b.like(0, start)), b.le(start, b.like(last, start))
            )
            if access.mask is not None and start.tile.shape == access.mask.tile.shape:
                inside = b.or_(inside, b.not_(access.mask))
            first = _first_where(b, start, b.not_(inside))
            place = (b.cast(first, I32), b.index(dim), b.index(shape[dim]))
            self.report(b, _all(b, inside), Report("index", name, (), shape), *place)

    def report(self, b: Builder, ok: Value, report: Report, *values: Value) -> None:
        """Record the number and values of a failing check, if it is the first."""
        first_ref = len(self.refs)
        self.refs += [
            Value(RefType(v.tile.shape, v.tile.dtype, "block"), "value") for v in values
        ]
        places = range(first_ref, len(self.refs))
        results = tuple(self.first_result + n for n in places)
        self.reports.append(replace(report, values=results, loc=b.loc))
        failed = self.refs[0]
        is_first = b.eq(b.load(failed), b.index(0))
        inside = Builder(b.loc)
        inside.store(failed, inside.index(len(self.reports)))
        for place, value in zip(places, values, strict=True):
            inside.store(self.refs[place], value)
        which = b.cast(b.and_(b.not_(ok), is_first), I32)
        b.emit("cond", which, regions=(Block(), inside.block()))


def _may_make_nan(op: Op) -> bool:
    if len(op.results) != 1 or op.result.is_ref or not op.result.tile.dtype.is_float:
        return False
    computes = table()[op.name].elementwise and op.name not in _PASS_ON
    return computes or op.name in _ALSO_NAN


def _all(b: Builder, bools: Value) -> Value:
    axes = tuple(range(bools.tile.rank))
    return b.op("reduce", bools, kind="and", axes=axes) if axes else bools


def _first_where(b: Builder, values: Value, wanted: Value) -> Value:
    """A value of a tile for which `wanted` holds: the largest."""
    axes = tuple(range(values.tile.rank))
    if not axes:
        return values
    least = b.like(values.tile.dtype.limits[0], values)
    return b.op("reduce", b.select(wanted, values, least), kind="max", axes=axes)
