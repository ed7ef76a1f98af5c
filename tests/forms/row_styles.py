"""Work on rows, reductions and scans, spelled by choices; see `attention_styles.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Operand, Problem, Shape, Size

EPS = 1e-6
LOG2_E = 1.4426950408889634


def _operands(size: Size) -> list[Operand]:
    return [Operand((size(8192, 1024, 32), size(8192, 2048, 256)), F32)]


# --- softmax and norms ---


@dataclass(frozen=True)
class RowStyle:
    """How a softmax or a norm of rows is written."""

    loop: str = "whole"  # fori, while, scan, grid
    stats: str = "column"  # vector; partial: as wide as a part, summed at the end
    square: str = "product"  # square, power
    mean: str = "quotient"  # product: by 1 / width
    lead: str = "block"  # squeezed, indexed: one row a program, of rank 1
    refs: str = "blocks"  # whole
    exp: str = "exp"  # exp2
    divide: str = "end"  # reciprocal, or rsqrt; inverse: of the root
    rows: int = 8
    chunk: int = 512


ROW_AXES: dict[str, tuple[Any, ...]] = {
    "loop": ("whole", "fori", "while", "scan", "grid"),
    "stats": ("column", "vector", "partial"),
    "square": ("product", "square", "power"),
    "mean": ("quotient", "product"),
    "lead": ("block", "squeezed", "indexed"),
    "refs": ("blocks", "whole"),
    "exp": ("exp", "exp2"),
    "divide": ("end", "reciprocal", "inverse"),
    "rows": (8, 16, 4),
    "chunk": (512, 1024, 256),
}


def rows_fit(kind: str, style: RowStyle) -> bool:
    return (
        (style.lead == "block" or (style.loop == "whole" and style.refs == "blocks"))
        and (style.loop != "grid" or style.refs == "blocks")
        and (kind == "softmax" or style.exp == "exp")
        and (kind != "softmax" or (style.square == "product"))
        and (kind != "softmax" or style.mean == "quotient")
        and (kind != "softmax" or style.divide != "inverse")
        and (
            style.stats != "partial"
            or (kind != "softmax" and style.loop not in ("whole", "grid"))
        )
    )


class RowWork:
    """Statistics of rows, and what is made of an element with them."""

    def __init__(self, kind: str, style: RowStyle, width: int) -> None:
        self.kind, self.style, self.width = kind, style, width
        self.power = jnp.exp2 if style.exp == "exp2" else jnp.exp

    def values(self, x: Any) -> Any:
        return x * LOG2_E if self.style.exp == "exp2" else x

    def start(self, rows: tuple[int, ...]) -> tuple[Any, Any]:
        low = -jnp.inf if self.kind == "softmax" else 0.0
        return jnp.full(rows, low, F32), jnp.zeros(rows, F32)

    def absorb(self, state: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
        a, b = state
        keep = self.style.stats == "column" and x.ndim == 2
        over = {"axis": -1, "keepdims": keep}
        if self.kind != "softmax":
            if self.style.stats == "partial":
                return a + x, b + self._squared(x)
            return a + x.sum(**over), b + self._squared(x).sum(**over)
        x = self.values(x)
        new = jnp.maximum(a, x.max(**over))
        p = self.power(x - self._beside(new, x))
        return new, b * self.power(a - new) + p.sum(**over)

    def _squared(self, x: Any) -> Any:
        kind = self.style.square
        return jnp.square(x) if kind == "square" else x**2 if kind == "power" else x * x

    def _mean(self, total: Any) -> Any:
        if self.style.mean == "product":
            return total * (1.0 / self.width)
        return total / self.width

    def _beside(self, stat: Any, x: Any) -> Any:
        if self.style.stats == "partial":
            return stat.sum(axis=-1, keepdims=True)
        return stat[:, None] if x.ndim == 2 and stat.ndim == 1 else stat

    def finish(self, state: tuple[Any, Any], x: Any) -> Any:
        a, b = (self._beside(s, x) for s in state)
        if self.kind == "softmax":
            p = self.power(self.values(x) - a)
            return p * (1.0 / b) if self.style.divide == "reciprocal" else p / b
        mean = self._mean(a) if self.kind == "layer norm" else 0.0
        variance = self._mean(b) - mean * mean
        if self.style.divide == "reciprocal":
            return (x - mean) * lax.rsqrt(variance + EPS)
        if self.style.divide == "inverse":
            return (x - mean) * (1.0 / jnp.sqrt(variance + EPS))
        return (x - mean) / jnp.sqrt(variance + EPS)


def row_reference(kind: str, x: Any) -> Any:
    if kind == "softmax":
        return jax.nn.softmax(x, axis=-1)
    if kind == "layer norm":
        x = x - x.mean(axis=-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + EPS)


def rows(kind: str, style: RowStyle) -> Callable[[Size], Callable]:
    assert rows_fit(kind, style), (kind, style)

    def make(size: Size) -> Callable:
        def function(x):
            work = RowWork(kind, style, x.shape[1])
            if style.loop == "grid":
                return _rows_in_a_grid(work, size.block(style.chunk), x)
            return _rows_in_programs(work, size.block(style.chunk), x)

        return function

    return make


def _rows_in_programs(work: RowWork, chunk: int, x: Any) -> Any:
    style, (n, width) = work.style, x.shape
    rows = style.rows if style.lead == "block" else 1

    def kernel(x_ref, o_ref):
        whole = style.refs == "whole"
        at = pl.ds(pl.program_id(0) * rows, rows) if whole else slice(None)
        flat = style.lead != "block"
        shape = () if flat else (rows, 1) if style.stats == "column" else (rows,)
        shape = (rows, chunk) if style.stats == "partial" else shape
        state = work.start(shape)
        if style.loop == "whole":
            index = {"squeezed": ..., "indexed": 0}.get(style.lead, (at, slice(None)))
            value = x_ref[index]
            o_ref[index] = work.finish(work.absorb(state, value), value)
            return
        part = lambda j: (at, pl.ds(j * chunk, chunk))
        absorb = lambda j, state: work.absorb(state, x_ref[part(j)])
        state = _counted(style.loop, width // chunk, absorb, state)

        def write(j, _):
            o_ref[part(j)] = work.finish(state, x_ref[part(j)])

        lax.fori_loop(0, width // chunk, write, None)

    if style.refs == "whole":
        spec = pl.BlockSpec(memory_space=pl.ANY)
    else:
        lead = None if style.lead == "squeezed" else rows
        spec = pl.BlockSpec((lead, width), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=Shape(x.shape, F32),
        grid=(n // rows,),
        in_specs=[spec],
        out_specs=spec,
    )(x)


def _counted(kind: str, count: int, step: Callable, state: Any) -> Any:
    """`count` steps, by one loop or another."""
    if kind == "while":
        going = lambda carry: carry[0] < count
        advance = lambda carry: (carry[0] + 1, step(*carry))
        return lax.while_loop(going, advance, (jnp.int32(0), state))[1]
    if kind == "scan":
        over = lambda state, j: (step(j, state), None)
        return lax.scan(over, state, jnp.arange(count, dtype=I32))[0]
    return lax.fori_loop(0, count, step, state)


def _rows_in_a_grid(work: RowWork, chunk: int, x: Any) -> Any:
    style, (n, width) = work.style, x.shape
    shape = (style.rows, 1) if style.stats == "column" else (style.rows,)

    def kernel(x_ref, o_ref, a_ref, b_ref):
        turn, j = pl.program_id(1), pl.program_id(2)

        @pl.when((turn == 0) & (j == 0))
        def _():
            a_ref[...], b_ref[...] = work.start(shape)

        @pl.when(turn == 0)
        def _():
            state = a_ref[...], b_ref[...]
            a_ref[...], b_ref[...] = work.absorb(state, x_ref[...])

        @pl.when(turn == 1)
        def _():
            o_ref[...] = work.finish((a_ref[...], b_ref[...]), x_ref[...])

    return pl.pallas_call(
        kernel,
        out_shape=Shape(x.shape, F32),
        grid=(n // style.rows, 2, width // chunk),
        in_specs=[pl.BlockSpec((style.rows, chunk), lambda i, t, j: (i, j))],
        out_specs=pl.BlockSpec((style.rows, chunk), lambda i, t, j: (i, j * t)),
        scratch_shapes=[pltpu.VMEM(shape, F32)] * 2,
    )(x)


# --- reductions ---


@dataclass(frozen=True)
class SumStyle:
    """How a reduction is written."""

    loop: str = "grid"  # fori, while, scan
    acc: str = "output"  # scratch
    start: str = "when"  # select, cond
    stat: str = "kept"  # dropped: partial results of a lower rank
    rows: int = 64
    columns: int = 256


SUM_AXES: dict[str, tuple[Any, ...]] = {
    "loop": ("grid", "fori", "while", "scan"),
    "acc": ("output", "scratch"),
    "start": ("when", "select", "cond"),
    "stat": ("kept", "dropped"),
    "rows": (64, 128, 256),
    "columns": (256, 512, 1024),
}
SUMS = ("sum rows", "sum columns", "max rows", "max columns", "sum all")


def sums_fit(kind: str, style: SumStyle) -> bool:
    in_grid = style.loop == "grid"
    return in_grid or (style.acc == "output" and style.start == "when")


def sum_reference(kind: str, x: Any) -> Any:
    reduce = jnp.max if kind.startswith("max") else jnp.sum
    axis = {"rows": 1, "columns": 0, "all": None}[kind.split()[1]]
    return reduce(x, axis=axis, keepdims=True)


def sums(kind: str, style: SumStyle) -> Callable[[Size], Callable]:
    assert sums_fit(kind, style), (kind, style)
    what, along = kind.split()
    join = jnp.maximum if what == "max" else jnp.add
    neutral = -jnp.inf if what == "max" else 0.0

    def make(size: Size) -> Callable:
        rows, columns = size.block(style.rows), size.block(style.columns)

        def part(x):
            axis = {"rows": 1, "columns": 0, "all": None}[along]
            reduce = jnp.max if what == "max" else jnp.sum
            if style.stat == "kept":
                return reduce(x, axis=axis, keepdims=True)
            got = reduce(x, axis=axis)
            return got.reshape((1, 1)) if along == "all" else jnp.expand_dims(got, axis)

        def function(x):
            inner = style.loop != "grid"
            build = _sum_in_a_loop if inner else _sum_over_a_grid
            return build(style, along, join, neutral, part, rows, columns, x)

        return function

    return make


def _sum_over_a_grid(style, along, join, neutral, part, rows, columns, x):
    n, width = x.shape
    grid = (n // rows, width // columns)
    block = {"rows": (rows, 1), "columns": (1, columns), "all": (1, 1)}[along]
    shape = {"rows": (n, 1), "columns": (1, width), "all": (1, 1)}[along]
    turned = along == "columns"  # the axis that is summed is the last
    ids = (lambda i, j: (j, i)) if turned else (lambda i, j: (i, j))

    def place(*steps):
        i, j = ids(*steps)
        return {"rows": (i, 0), "columns": (0, j), "all": (0, 0)}[along]

    def kernel(x_ref, o_ref, *scratch):
        first, last = _ends(along)
        acc_ref = scratch[0] if scratch else o_ref
        value = part(x_ref[...])
        if style.start == "when":

            @pl.when(first)
            def _():
                acc_ref[...] = jnp.full(block, neutral, F32)

            acc_ref[...] = join(acc_ref[...], value)
        elif style.start == "select":
            acc_ref[...] = jnp.where(first, value, join(acc_ref[...], value))
        else:
            store = lambda: acc_ref.__setitem__(..., value)
            add = lambda: acc_ref.__setitem__(..., join(acc_ref[...], value))
            lax.cond(first, store, add)
        if scratch:

            @pl.when(last)
            def _():
                o_ref[...] = acc_ref[...]

    return pl.pallas_call(
        kernel,
        out_shape=Shape(shape, F32),
        grid=grid[::-1] if turned else grid,
        in_specs=[pl.BlockSpec((rows, columns), lambda *s: ids(*s))],
        out_specs=pl.BlockSpec(block, place),
        scratch_shapes=[pltpu.VMEM(block, F32)] * (style.acc == "scratch"),
    )(x)


def _ends(along: str) -> tuple[Any, Any]:
    """Whether this is the first or the last step of a sum."""
    first = pl.program_id(1) == 0
    last = pl.program_id(1) == pl.num_programs(1) - 1
    if along == "all":
        first &= pl.program_id(0) == 0
        last &= pl.program_id(0) == pl.num_programs(0) - 1
    return first, last


def _sum_in_a_loop(style, along, join, neutral, part, rows, columns, x):
    n, width = x.shape
    shape = {"rows": (n, 1), "columns": (1, width), "all": (1, 1)}[along]
    seen = {"rows": (rows, width), "columns": (n, columns), "all": (n, width)}[along]
    block = {"rows": (rows, 1), "columns": (1, columns), "all": (1, 1)}[along]
    steps = width // columns if along == "rows" else n // rows

    def kernel(x_ref, o_ref):
        def step(j, acc):
            at = (
                pl.ds(j * columns, columns)
                if along == "rows"
                else pl.ds(j * rows, rows)
            )
            index = (slice(None), at) if along == "rows" else (at, slice(None))
            return join(acc, part(x_ref[index]))

        start = jnp.full(block, neutral, F32)
        o_ref[...] = _counted(style.loop, steps, step, start)

    programs = {"rows": n // rows, "columns": width // columns, "all": 1}[along]
    at = {"rows": lambda i: (i, 0), "columns": lambda i: (0, i)}
    place = at.get(along, lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=Shape(shape, F32),
        grid=(programs,),
        in_specs=[pl.BlockSpec(seen, place)],
        out_specs=pl.BlockSpec(block, place),
    )(x)


# --- scans ---


@dataclass(frozen=True)
class ScanStyle:
    """How a scan along the first axis is written."""

    loop: str = "grid"  # fori, while, scan, at once
    carry: str = "row"  # vector
    within: str = "loop"  # at once: how a block of a grid is scanned
    start: str = "when"  # select
    rows: int = 64
    columns: int = 256


SCAN_AXES: dict[str, tuple[Any, ...]] = {
    "loop": ("grid", "fori", "while", "scan", "at once"),
    "carry": ("row", "vector"),
    "within": ("loop", "at once"),
    "start": ("when", "select"),
    "rows": (64, 128, 256),
    "columns": (256, 512, 1024),
}
SCANS = ("prefix sum", "recurrence")


def scans_fit(kind: str, style: ScanStyle) -> bool:
    in_grid = style.loop == "grid"
    return in_grid or (style.within == "loop" and style.start == "when")


def scan_operands(kind: str, size: Size) -> list[Operand]:
    x = _operands(size)[0]
    decay = Operand(x.shape, F32, make=lambda r: r.uniform(0.5, 1.0, x.shape))
    return [x, decay] if kind == "recurrence" else [x]


def scan_reference(kind: str, x: Any, a: Any = None) -> Any:
    return _at_once(x, a)


def _at_once(x: Any, a: Any) -> Any:
    if a is None:
        return jnp.cumsum(x, axis=0)
    join = lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1])
    return lax.associative_scan(join, (a, x), axis=0)[1]


def scans(kind: str, style: ScanStyle) -> Callable[[Size], Callable]:
    assert scans_fit(kind, style), (kind, style)

    def make(size: Size) -> Callable:
        rows, columns = size.block(style.rows), size.block(style.columns)
        build = _scan_over_a_grid if style.loop == "grid" else _scan_in_a_loop
        return lambda *operands: build(style, rows, columns, *operands)

    return make


def _advance(style: ScanStyle, refs: Any, o_ref: Any, t: Any, h: Any) -> Any:
    """One step of time; the carry is a row of rank 2 or 1."""
    at = (pl.ds(t, 1), slice(None)) if style.carry == "row" else (t, slice(None))
    x, *a = (ref[at] for ref in refs)
    h = (a[0] * h if a else h) + x
    o_ref[at] = h
    return h


def _scan_in_a_loop(style, rows, columns, *operands):
    n, width = operands[0].shape

    def kernel(*refs):
        *refs, o_ref = refs
        if style.loop == "at once":
            x, *a = (ref[...] for ref in refs)
            o_ref[...] = _at_once(x, *a or (None,))
            return
        start = jnp.zeros((1, columns) if style.carry == "row" else (columns,), F32)
        step = lambda t, h: _advance(style, refs, o_ref, t, h)
        _counted(style.loop, n, step, start)

    spec = pl.BlockSpec((n, columns), lambda j: (0, j))
    return pl.pallas_call(
        kernel,
        out_shape=Shape((n, width), F32),
        grid=(width // columns,),
        in_specs=[spec] * len(operands),
        out_specs=spec,
    )(*operands)


def _scan_over_a_grid(style, rows, columns, *operands):
    n, width = operands[0].shape
    shape = (1, columns) if style.carry == "row" else (columns,)

    def kernel(*refs):
        *refs, o_ref, h_ref = refs
        first = pl.program_id(1) == 0
        if style.start == "when":

            @pl.when(first)
            def _():
                h_ref[...] = jnp.zeros(shape, F32)

        h = jnp.where(first, 0.0, h_ref[...]) if style.start == "select" else h_ref[...]
        if style.within == "at once":
            x, *a = (ref[...] for ref in refs)
            kept = jnp.cumprod(a[0], axis=0) if a else 1.0
            y = _at_once(x, *a or (None,)) + kept * h
            o_ref[...] = y
            h_ref[...] = y[-1:] if style.carry == "row" else y[-1]
        else:
            step = lambda t, h: _advance(style, refs, o_ref, t, h)
            h_ref[...] = lax.fori_loop(0, rows, step, h)

    spec = pl.BlockSpec((rows, columns), lambda j, t: (t, j))
    return pl.pallas_call(
        kernel,
        out_shape=Shape((n, width), F32),
        grid=(width // columns, n // rows),
        in_specs=[spec] * len(operands),
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM(shape, F32)],
    )(*operands)


def row_problem(kind: str) -> Problem:
    return Problem(kind, _operands, lambda x: row_reference(kind, x), tolerance=1e-4)


def sum_problem(kind: str) -> Problem:
    return Problem(kind, _operands, lambda x: sum_reference(kind, x), tolerance=1e-4)


def scan_problem(kind: str) -> Problem:
    return Problem(
        kind,
        lambda size: scan_operands(kind, size),
        lambda *x: scan_reference(kind, *x),
        tolerance=1e-4,
    )
