"""debug_print: programs write records into a log, which the host reads and formats.

The log is an operand and a result that alias: one array of words in rows of 128 lanes,
initially zero. The first row has the number of rows written, and of records for which
there was no room. A record is a row with the number of its print, from 1, and that of
its program, then the rows of its values, as words. Kernel in, Kernel out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from pallasite.backends.tpu.schedule import main_pipeline
from pallasite.backends.tpu.views import LANES
from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    At,
    Block,
    BlockDim,
    Kernel,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import F32, I32, RefType, TileType

ROWS = 2048  # of a log
LOG = "tpu.log"  # note on the pipeline: the last operand and result are the log


@dataclass(frozen=True)
class Site:
    """One print of the kernel."""

    format: str
    types: tuple[TileType, ...]

    @property
    def rows(self) -> int:
        return 1 + sum(prod(_row_shape(t)) // LANES for t in self.types)


def _row_shape(tile: TileType) -> tuple[int, int]:
    """A tile in the log: rows, and lanes rounded up to whole rows of the log."""
    *outer, lanes = (1, *tile.shape)
    return prod(outer), -(-lanes // LANES) * LANES


def sites_of(kernel: Kernel) -> list[Site]:
    return [
        Site(op.attrs["format"], tuple(v.tile for v in op.operands))
        for op in walk(kernel.body)
        if op.name == "debug_print"
    ]


def add_log(kernel: Kernel) -> Kernel:
    """The kernel with a log in place of prints."""
    op = main_pipeline(kernel)
    sites = sites_of(kernel)
    if op is None or not sites:
        return kernel
    pipeline = Pipeline.of(op)
    kind = RefType((ROWS, LANES), I32, "any")
    given, made = Value(kind, "log_before"), Value(kind, "log")
    block = Value(RefType(kind.shape, I32, "block"), "log")
    window = Window((BlockDim(ROWS), BlockDim(LANES)), "out", buffers=1)
    origin = Builder(op.loc)
    ids = tuple(Value(i.type, i.name) for i in pipeline.ids)
    index_map = origin.block(ids, [origin.index(0)] * 2)
    shown = [*pipeline.shown, Shown(made, window, index_map, block)]
    writer = _Writer(pipeline, block)
    body = map_ops(pipeline.body, writer.rewritten)
    params = (*pipeline.body.params, block)
    first = Builder(op.loc)
    writer.note_program(first)
    body = Block(params, (*first.ops, *body.ops), body.yields)
    new = pipeline.showing(shown, body)
    new = new.with_(semantics=("arbitrary",) * len(new.grid)).to_op()
    new = new.with_(attrs={**new.attrs, LOG: True})
    ops = (*kernel.body.ops[:-1], new)
    return kernel.with_(
        params=(*kernel.inputs, given, *kernel.outputs, made),
        num_outputs=kernel.num_outputs + 1,
        aliases=(*kernel.aliases, (len(kernel.inputs), kernel.num_outputs)),
        body=Block(kernel.body.params, ops, kernel.body.yields),
    )


def has_log(kernel: Kernel) -> bool:
    op = main_pipeline(kernel)
    return op is not None and bool(op.attrs.get(LOG))


class _Writer:
    """Emits prints as stores into the log."""

    def __init__(self, pipeline: Pipeline, log: Value):
        self.pipeline, self.log, self.count = pipeline, log, 0
        self.program = Value(TileType((), I32))

    def note_program(self, b: Builder) -> None:
        """The number of the program in grid order."""
        number = b.index(0)
        for index, size in zip(self.pipeline.ids, self.pipeline.sizes, strict=True):
            length = b.index(size) if isinstance(size, int) else size
            number = b.add(b.mul(number, length), index)
        last = b.ops[-1]
        b.ops[-1] = last.with_(results=(self.program,))

    def rewritten(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "debug_print":
            return None
        self.count += 1
        site = Site(op.attrs["format"], tuple(v.tile for v in op.operands))
        used = b.load(self.log, (At(0), At(0)))
        limit = b.index(ROWS - 1 - site.rows)
        room = b.cast(b.le(used, limit), I32)
        lost, then = Builder(op.loc), Builder(op.loc)
        count = lost.load(self.log, (At(0), At(1)))
        lost.store(self.log, lost.add(count, lost.index(1)), (At(0), At(1)))
        self.record(then, used, op.operands)
        then.store(self.log, then.add(used, then.index(site.rows)), (At(0), At(0)))
        b.emit("cond", room, regions=(lost.block(), then.block()))
        return ()

    def record(self, b: Builder, used: Value, values: Sequence[Value]) -> None:
        row = b.add(used, b.index(1))
        lanes = b.op("iota", type=TileType((1, LANES), I32), dim=1)
        head = b.like(0, lanes)
        for lane, word in enumerate((b.index(self.count), self.program)):
            here = b.eq(lanes, b.like(lane, lanes))
            head = b.select(here, b.broadcast(word, (1, LANES)), head)
        row = self.store_rows(b, row, head)
        for value in values:
            for part in self.in_rows(b, value):
                row = self.store_rows(b, row, part)

    def store_rows(self, b: Builder, row: Value, part: Value) -> Value:
        count = part.tile.shape[0]
        index = (Span(None, count), Span(0, LANES))
        b.store(self.log, part, index, [row])
        return b.add(row, b.index(count))

    def in_rows(self, b: Builder, value: Value) -> list[Value]:
        """A value as words, in parts one log row wide."""
        tile = value.tile
        if tile.dtype.is_float:
            words = b.op("bitcast", b.cast(value, F32), dtype=I32)
        else:
            words = b.cast(value, I32)
        rows, lanes = _row_shape(tile)
        shape = (rows, tile.shape[-1] if tile.shape else 1)
        words = b.op("reshape", words, shape=shape)
        high = (0, lanes - shape[1])
        zero = b.index(0)
        words = b.op("pad", words, zero, low=(0, 0), high=high, interior=(0, 0))
        cut = partial(b.op, "slice", words, strides=(1, 1))
        places = range(0, lanes, LANES)
        return [cut(starts=(0, at), limits=(rows, at + LANES)) for at in places]


# --- on the host ---


def reader(sites: Sequence[Site]) -> Any:
    """The function that prints a log."""
    return partial(print_log, tuple(sites))


def print_log(sites: Sequence[Site], log: np.ndarray) -> None:
    rows = np.asarray(log).reshape(ROWS, LANES)
    records: list[tuple[int, str]] = []
    row = 1
    while row <= rows[0, 0]:
        site = sites[int(rows[row, 0]) - 1]
        text = site.format.rstrip("\n").format(*_values(site, rows[row + 1 :]))
        records.append((int(rows[row, 1]), text))
        row += site.rows
    for _, text in sorted(records, key=lambda record: record[0]):
        print(text, flush=True)
    if rows[0, 1]:
        print(
            f"pl.debug_print: {rows[0, 1]} prints were dropped; print less", flush=True
        )


def _values(site: Site, rows: np.ndarray) -> list[Any]:
    values, place = [], 0
    for tile in site.types:
        count, lanes = _row_shape(tile)
        parts = []
        for _ in range(0, lanes, LANES):
            parts.append(rows[place : place + count])
            place += count
        words = np.concatenate(parts, axis=1)[:, : tile.shape[-1] if tile.shape else 1]
        words = np.ascontiguousarray(words)
        numbers = words.view(np.float32) if tile.dtype.is_float else words
        values.append(numbers.astype(tile.dtype.np).reshape(tile.shape)[()])
    return values
