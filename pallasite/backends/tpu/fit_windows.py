"""Windows that the chip's tiles do not fit, made ones that they do.

Mosaic copies blocks whose last two dimensions are multiples of its tiles, or all there
is of the array. Along a dimension where a block is neither, one of these applies:

- a block that is alone is rounded up to tiles, past the end of the array;
- blocks side by side are cut apart by XLA before the call, so that each is whole in
  its last two dimensions (a `Form`; the note `tpu.forms` on the pipeline keeps it);
- blocks that overlap (pl.Element) come with the tiles around them if they are read,
  and in a window of the whole dimension if they are written.

The body sees the block it saw before, as a part of the new one. Kernel in, Kernel out.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pallasite.backends.tpu.schedule import main_pipeline
from pallasite.backends.tpu.windows import (
    fitting_block,
    operand_name,
    shown_block,
    tiling,
)
from pallasite.errors import PerformanceWarning, UnsupportedError, compose
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, BlockDim, Kernel, Loc, Span, Value, Window
from pallasite.ir.rewrite import inline, substitute
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import RefType
from pallasite.passes.analysis.intervals import Fact
from pallasite.passes.place_windows import number_facts
from pallasite.runtime.forms import Form

FORMS = "tpu.forms"
SQUEEZED = BlockDim(1, "squeezed")


def fit_windows(kernel: Kernel) -> Kernel:
    """The kernel with windows that Mosaic takes, and a note on the arrays' forms."""
    op = main_pipeline(kernel)
    if op is None:
        return kernel
    fitting = _Fitting(kernel, Pipeline.of(op))
    return fitting.fitted() if fitting.changes else kernel


def forms_of(scheduled: Kernel, original: Kernel) -> list[Form | None]:
    """How each parameter of a kernel goes to the call; None: as it is."""
    op = main_pipeline(scheduled)
    noted = {} if op is None else {n: rest for n, *rest in op.attrs.get(FORMS, ())}
    found: list[Form | None] = []
    for n, (old, new) in enumerate(zip(original.params, scheduled.params, strict=True)):
        dtypes = (old.ref.dtype.numpy_name, new.ref.dtype.numpy_name)
        form = Form(old.ref.shape, *dtypes, *noted.get(n, ()))
        found.append(form if form.changes else None)
    return found


def warn_of_forms(kernel: Kernel, forms: Sequence[Form | None]) -> None:
    """Say which arrays are cut apart before a call, and which blocks would not be."""
    op = main_pipeline(kernel)
    if op is None:
        return
    at = op.loc or kernel.loc or Loc("<unknown>", 0)
    windows = {s.array: s.window for s in Pipeline.of(op).shown}
    for param, form in zip(kernel.params, forms, strict=True):
        if form is None or not any(form.blocks) or param not in windows:
            continue
        block = fitting_block(param.ref, windows[param])
        text = compose(
            "an array is copied into another order for each call on a TPU",
            [
                ("kernel", kernel.name),
                ("operand", f"{operand_name(kernel, param)}, {param.ref.tile}"),
                ("block", shown_block(windows[param])),
                ("why", f"a TPU copies blocks in tiles of {tiling(param.ref)}"),
            ],
            at,
            f"use a block of {block}",
        )
        warnings.warn_explicit(
            text, PerformanceWarning, at.file, at.line, registry=_said
        )


_said: dict[str | tuple[str, type[Warning], int], int] = {}


@dataclass(frozen=True)
class _Dim:
    """What becomes of one dimension.

    how: "same"; "longer": the block is rounded up; "apart": cut into blocks; "around":
    the block has tiles around what is wanted; "whole": the window does not move.
    """

    how: str
    dim: BlockDim  # of the new window
    padding: tuple[int, int] = (0, 0)  # of the array
    tile: int = 1


@dataclass(frozen=True)
class _Fitted:
    """One window, and what becomes of it."""

    shown: Shown
    dims: tuple[_Dim, ...]

    @property
    def is_scalar(self) -> bool:
        return not self.shown.array.ref.shape

    @property
    def changes(self) -> bool:
        return self.is_scalar or any(each.how != "same" for each in self.dims)

    @cached_property
    def form(self) -> Form:
        ref, fill = self.shown.array.ref, self.shown.window.fill
        padding = tuple(each.padding for each in self.dims)
        blocks = tuple(d.dim.size if d.how == "apart" else None for d in self.dims)
        name = ref.dtype.numpy_name
        return Form(
            ref.shape,
            name,
            name,
            padding if any(map(any, padding)) else (),
            blocks if any(blocks) else (),
            0 if fill is None else fill,
            2 if self.is_scalar else 0,
        )

    @property
    def note(self) -> tuple[Any, ...]:
        form = self.form
        return form.padding, form.blocks, form.fill, form.least_rank

    # --- the new window ---

    @property
    def window(self) -> Window:
        if self.is_scalar:
            return replace(self.shown.window, dims=(BlockDim(1),) * 2)
        inner = [each.dim for each in self.dims]
        counts = [SQUEEZED for each in self.dims if each.how == "apart"]
        return replace(self.shown.window, dims=self._in_order(inner, counts, SQUEEZED))

    def _in_order(self, inner: list[Any], counts: list[Any], row: Any) -> tuple:
        """Outer dimensions, block numbers and the last two dimensions."""
        if counts and len(inner) == 1:
            inner = [row, *inner]
        last = max(len(inner) - 2, 0)
        return (*inner[:last], *counts, *inner[last:])

    def index_map(self, loc: Loc | None) -> Block:
        old, b = self.shown.index_map, Builder(loc)
        b.ops += old.ops
        if self.is_scalar:
            return b.block(old.params, [b.index(0)] * 2)
        numbers, counts = [], []
        for each, number in zip(self.dims, old.yields, strict=True):
            if each.how == "apart":
                counts.append(number)
            numbers.append(_moved(b, each, number))
        return b.block(old.params, self._in_order(numbers, counts, b.index(0)))

    def part(self, b: Builder, block: Value, ids: Sequence[Value]) -> Value:
        """What the body saw before, of the new block."""
        if self.is_scalar:
            return b.subview(block, (At(0),) * 2)
        starts: tuple[Value, ...] = ()
        if any(each.how in ("around", "whole") for each in self.dims):
            starts = inline(b, self.shown.index_map, ids)
        index, operands = [], []
        for d, (each, old) in enumerate(
            zip(self.dims, self.shown.window.dims, strict=True)
        ):
            if old.kind == "squeezed" and each.how in ("same", "apart"):
                continue
            size = 1 if old.kind == "squeezed" else old.size
            if each.how not in ("around", "whole"):
                index.append(Span(0, size))
                continue
            start = starts[d]
            if each.how == "around":
                start = b.rem(start, b.index(each.tile))
            operands.append(start)
            index.append(At() if old.kind == "squeezed" else Span(None, size))
        shape = tuple(e.size if isinstance(e, Span) else 0 for e in index)
        if not operands and shape == block.ref.shape:
            return block
        return b.subview(block, tuple(index), operands)


def _moved(b: Builder, dim: _Dim, number: Value) -> Value:
    """The number of the new block along a dimension."""
    if dim.how in ("apart", "whole"):
        return b.index(0)
    if dim.how == "around":
        tile = b.index(dim.tile)
        return b.mul(b.div(number, tile), tile)
    return number


class _Fitting:
    """All windows of a kernel's pipeline."""

    def __init__(self, kernel: Kernel, pipeline: Pipeline):
        self.kernel, self.pipeline = kernel, pipeline
        self.windows = [self._fitted(shown) for shown in pipeline.shown]
        self.changes = any(each.changes for each in self.windows)

    def _fitted(self, shown: Shown) -> _Fitted:
        ref, window = shown.array.ref, shown.window
        same = tuple(_Dim("same", dim) for dim in window.dims)
        odd = 0 in ref.shape or any(d.kind == "bounded" for d in window.dims)
        if window.space not in ("block", "vmem") or odd or not ref.shape:
            return _Fitted(shown, same)
        tiles = tiling(ref)
        tiles = (1,) * (ref.rank - len(tiles)) + tiles
        facts = number_facts(shown.index_map, window, ref.shape, self.pipeline.grid)
        rows = zip(window.dims, ref.shape, tiles, facts, strict=True)
        return _Fitted(shown, tuple(_dim(window.mode, *row) for row in rows))

    def fitted(self) -> Kernel:
        self._check_aliases()
        b, shown, arrays = Builder(self.pipeline.op.loc), [], {}
        blocks: dict[Value, Value] = {}
        for each in self.windows:
            old = each.shown
            if not each.changes:
                shown.append(old)
                continue
            ref = old.array.ref.with_shape(each.form.carried_shape)
            array = Value(ref, old.array.name)
            window = each.window
            kind = RefType(window.block_shape, ref.dtype, window.space)
            block = Value(kind, old.block.name)
            blocks[old.block] = each.part(b, block, self.pipeline.ids)
            arrays[old.array] = array
            shown.append(Shown(array, window, each.index_map(b.loc), block))
        body = substitute(self.pipeline.body, blocks)
        params = (*self.pipeline.ids, *(s.block for s in shown))
        body = Block(params, (*b.ops, *body.ops), body.yields)
        return self._kernel(self.pipeline.showing(shown, body), arrays)

    def _kernel(self, pipeline: Pipeline, arrays: Mapping[Value, Value]) -> Kernel:
        kernel, op = self.kernel, pipeline.to_op()
        notes = {each.shown.array: each.note for each in self.windows if each.changes}
        forms = tuple(
            (n, *notes[param])
            for n, param in enumerate(kernel.params)
            if param in notes
        )
        op = op.with_(attrs={**op.attrs, FORMS: forms})
        body = kernel.body
        body = Block(body.params, (*body.ops[:-1], op), body.yields)
        params = tuple(arrays.get(p, p) for p in kernel.params)
        return kernel.with_(params=params, body=body)

    def _check_aliases(self) -> None:
        """An operand and the result that is its memory have one form."""
        notes = {s.shown.array: s.note for s in self.windows if s.changes}
        for operand, result in self.kernel.aliases:
            pair = self.kernel.inputs[operand], self.kernel.outputs[result]
            if notes.get(pair[0]) == notes.get(pair[1]):
                continue
            names = [operand_name(self.kernel, ref) for ref in pair]
            raise UnsupportedError(
                f"backend 'tpu': {names[0]} and {names[1]} are the same memory, and"
                " only one of them has blocks in the shape of tiles",
                [
                    ("kernel", self.kernel.name),
                    (
                        "rule",
                        f"the last dimensions are multiples of {tiling(pair[0].ref)}",
                    ),
                ],
                at=self.pipeline.op.loc or self.kernel.loc,
                fix="give both the same BlockSpec",
            )


def _dim(mode: str, dim: BlockDim, size: int, tile: int, index: Fact) -> _Dim:
    block = 1 if dim.kind == "squeezed" else dim.size
    if dim.kind == "element":
        return _element(mode, dim, size, tile, index)
    if block == size or block % tile == 0:
        return _Dim("same", dim)
    if dim.kind == "blocked" and block > size:
        return _Dim("longer", BlockDim(_rounded_up(block, tile)))
    end = (0, _rounded_up(size, block) - size)
    return _Dim("apart", replace(dim, size=block), end)


def _element(mode: str, dim: BlockDim, size: int, tile: int, index: Fact) -> _Dim:
    """A dimension whose blocks start anywhere."""
    low, high = dim.padding
    aligned = index.multiple % tile == 0 and low % tile == 0
    if dim.size % tile == 0 and aligned:
        return _Dim("same", dim)
    if dim.size == size and not (low or high) and index.number == 0:
        return _Dim("same", dim)
    last = min(index.high, low + size + high - 1)
    around = _rounded_up(dim.size + tile - 1, tile)
    total = max(low + size, last // tile * tile + around)
    if mode == "in" and around < total:
        return _Dim(
            "around", BlockDim(around, "element"), (low, total - low - size), tile
        )
    total = max(low + size, last + dim.size)
    return _Dim("whole", BlockDim(total), (low, total - low - size))


def _rounded_up(n: int, to: int) -> int:
    return -(-n // to) * to
