"""Reshapes windows that do not fit the chip's tiles.

Mosaic copies blocks whose last two dimensions are multiples of its tiles, or span the
array. Along a dimension where a block does neither, one of these applies:

- a single block is rounded up to tiles, past the end of the array;
- adjacent blocks are separated by XLA before the call, so that each is whole in its
  last two dimensions (a `Form`; the note `tpu.forms` on the pipeline keeps it);
- overlapping blocks (pl.Element) come with the surrounding tiles if they are read, and
  in a window of the whole dimension if they are written;
- a small result whose blocks are revisited becomes one window too.

The body sees the block it saw before, as a part of the new one. Kernel in, Kernel out.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pallasite.backends.tpu.aliased import reads_other_blocks
from pallasite.backends.tpu.order_dims import ORDERS, array_at
from pallasite.backends.tpu.prints import has_log
from pallasite.backends.tpu.resident import MOST_BYTES
from pallasite.backends.tpu.schedule import MAIN_MEMORY, main_pipeline
from pallasite.backends.tpu.windows import (
    fitting_block,
    operand_name,
    returned_to,
    shown_block,
    tiling,
)
from pallasite.errors import PerformanceWarning, UnsupportedError, compose
from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    BlockDim,
    Kernel,
    Loc,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.rewrite import inline, substitute, with_regions
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import BOOL, I32, RefType, TileType
from pallasite.passes.analysis.intervals import Fact
from pallasite.passes.lower.place_windows import number_facts
from pallasite.runtime.forms import Form

# (parameter, padding, blocks, fill, least rank, element) of arrays that change
FORMS = "tpu.forms"
OPERANDS = "tpu.operands"  # which of the author's operands each one is
SQUEEZED = BlockDim(1, "squeezed")


def fit_windows(kernel: Kernel) -> Kernel:
    """The kernel with windows that Mosaic accepts, and a note on the arrays' forms."""
    op = main_pipeline(kernel)
    if op is None:
        return kernel
    return _Fitting(kernel, Pipeline.of(op)).fitted()


@dataclass(frozen=True)
class CallArrays:
    """What a call takes and returns: operands by number, with their forms.

    None in place of a form: the array as it is.
    """

    operands: tuple[tuple[int, Form | None], ...]
    results: tuple[Form | None, ...]
    aliases: tuple[tuple[int, int], ...] = ()
    given: int = 0  # operands of the kernel

    @staticmethod
    def of(scheduled: Kernel, original: Kernel) -> "CallArrays":
        """Without the log, which comes last."""
        op = main_pipeline(scheduled)
        attrs = {} if op is None else op.attrs
        noted = {n: rest for n, *rest in attrs.get(FORMS, ())}
        orders = {
            array_at(original, *at): order for *at, order in attrs.get(ORDERS, ())
        }
        count, log = len(scheduled.inputs), has_log(scheduled)
        sources = attrs.get(OPERANDS) or tuple(range(count))
        own = slice(None, -1 if log else None)

        def form(number: int, old: Value, new: Value) -> Form | None:
            dtypes = (old.ref.dtype.numpy_name, new.ref.dtype.numpy_name)
            found = Form(old.ref.shape, *dtypes, *noted.get(number, ()))
            found = replace(found, order=orders.get(old, ()))
            return found if found.changes else None

        pairs = zip(sources[own], scheduled.inputs[own], strict=True)
        results = zip(original.outputs, scheduled.outputs[own], strict=True)
        inputs, outputs = enumerate(pairs), enumerate(results)
        aliases = [a for a in scheduled.aliases if not log or a[0] != count - 1]
        return CallArrays(
            tuple((s, form(n, original.inputs[s], new)) for n, (s, new) in inputs),
            tuple(form(count + n, *pair) for n, pair in outputs),
            tuple(aliases),
            len(original.inputs),
        )

    @property
    def as_they_are(self) -> bool:
        plain = tuple((n, None) for n in range(self.given))
        return self.operands == plain and not any(self.results)


def warn_of_forms(kernel: Kernel, arrays: CallArrays) -> None:
    """Warn which arrays are split before a call, and which blocks would avoid it."""
    op = main_pipeline(kernel)
    if op is None:
        return
    at = op.loc or kernel.loc or Loc("<unknown>", 0)
    windows = {s.array: s.window for s in Pipeline.of(op).shown}
    results = zip(kernel.outputs, arrays.results, strict=True)
    pairs = [(kernel.inputs[source], form) for source, form in arrays.operands]
    for param, form in [*pairs, *results]:
        if form is None or param not in windows:
            continue
        if not form.order and not any(form.blocks):
            continue
        fix = f"use a block of {fitting_block(param.ref, windows[param])}"
        if form.order and not any(form.blocks):
            shape = tuple(param.ref.shape[d] for d in form.order)
            fix += f", or pass an array of shape {shape}"
        text = compose(
            "each call copies an array into another layout on a TPU",
            [
                ("kernel", kernel.name),
                ("operand", f"{operand_name(kernel, param)}, {param.ref.tile}"),
                ("block", shown_block(windows[param])),
                ("why", f"a TPU copies blocks made of tiles of {tiling(param.ref)}"),
            ],
            at,
            fix,
        )
        warnings.warn_explicit(
            text, PerformanceWarning, at.file, at.line, registry=_said
        )


_said: dict[str | tuple[str, type[Warning], int], int] = {}


@dataclass(frozen=True)
class _Dim:
    """How one dimension is changed.

    how: "same"; "longer": the block is rounded up; "apart": split into blocks;
    "around": the block includes surrounding tiles; "whole": the window does not move.
    """

    how: str
    dim: BlockDim  # of the new window
    padding: tuple[int, int] = (0, 0)  # of the array
    tile: int = 1  # that a block starts in; 1: it starts at one


@dataclass(frozen=True)
class _Fitted:
    """One window, and how it is changed."""

    shown: Shown
    dims: tuple[_Dim, ...]

    @property
    def is_scalar(self) -> bool:
        return not self.shown.array.ref.shape

    @property
    def least_rank(self) -> int:
        """Vector memory has rows and lanes, scalar memory at least one dimension."""
        if not self.is_scalar:
            return 0
        return 1 if self.shown.window.space == "smem" else 2

    @property
    def changes(self) -> bool:
        return self.is_scalar or any(each.how != "same" for each in self.dims)

    @property
    def stays_where_written(self) -> bool:
        """Programs that wrote their own blocks now share one."""
        whole = any(each.how == "whole" for each in self.dims)
        return whole and self.shown.window.mode == "out"

    @cached_property
    def form(self) -> Form:
        ref, fill = self.shown.array.ref, self.shown.window.fill
        padding = tuple(each.padding for each in self.dims)
        blocks = tuple(d.dim.size if d.how == "apart" else None for d in self.dims)
        name, is_padded = ref.dtype.numpy_name, any(map(any, padding))
        return Form(
            ref.shape,
            name,
            name,
            padding if is_padded else (),
            blocks if any(blocks) else (),
            fill if is_padded and fill is not None else 0,
            self.least_rank,
        )

    @property
    def note(self) -> tuple[Any, ...]:
        form = self.form
        return form.padding, form.blocks, form.fill, form.least_rank

    # --- the new window ---

    @property
    def window(self) -> Window:
        if self.is_scalar:
            return replace(self.shown.window, dims=(BlockDim(1),) * self.least_rank)
        inner = [each.dim for each in self.dims]
        counts = [SQUEEZED for each in self.dims if each.how == "apart"]
        return replace(self.shown.window, dims=self._in_order(inner, counts, SQUEEZED))

    def _in_order(self, inner: list[Any], counts: list[Any], row: Any) -> tuple:
        """Outer dimensions, block indices and the last two dimensions."""
        if counts and len(inner) == 1:
            inner = [row, *inner]
        last = max(len(inner) - 2, 0)
        return (*inner[:last], *counts, *inner[last:])

    def index_map(self, loc: Loc | None) -> Block:
        old, b = self.shown.index_map, Builder(loc)
        b.ops += old.ops
        if self.is_scalar:
            return b.block(old.params, [b.index(0)] * self.least_rank)
        numbers, counts = [], []
        for each, number in zip(self.dims, old.yields, strict=True):
            if each.how == "apart":
                counts.append(number)
            numbers.append(_moved(b, each, number))
        return b.block(old.params, self._in_order(numbers, counts, b.index(0)))

    def part(self, b: Builder, block: Value, ids: Sequence[Value]) -> Value:
        """What the body saw before, as a part of the new block."""
        if self.is_scalar:
            return b.subview(block, (At(0),) * self.least_rank)
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
            if each.how == "around" and each.tile == 1:
                index.append(Span(0, size))
                continue
            start = starts[d]
            if old.kind == "blocked":
                start = b.mul(start, b.index(old.size))
            if each.how == "around":
                start = b.rem(start, b.index(each.tile))
            operands.append(start)
            index.append(At() if old.kind == "squeezed" else Span(None, size))
        shape = tuple(e.size if isinstance(e, Span) else 0 for e in index)
        if not operands and shape == block.ref.shape:
            return block
        return b.subview(block, tuple(index), operands)


def _moved(b: Builder, dim: _Dim, number: Value) -> Value:
    """The index of the new block along a dimension."""
    if dim.how in ("apart", "whole"):
        return b.index(0)
    if dim.how == "around" and dim.tile > 1:
        tile = b.index(dim.tile)
        return b.mul(b.div(number, tile), tile)
    return number


@dataclass(eq=False)
class _Param:
    """A parameter of the new kernel."""

    value: Value
    source: int  # the author's operand or result
    note: tuple[Any, ...] | None = None


class _Fitting:
    """All windows of a kernel's pipeline, and the parameters that they show."""

    def __init__(self, kernel: Kernel, pipeline: Pipeline):
        self.kernel, self.pipeline = kernel, pipeline
        aliased = {kernel.inputs[operand] for operand, _ in kernel.aliases}
        found = [_of_fixed_length(s) for s in pipeline.shown]
        shown = [each for each, _ in found]
        self.lengths = {each.block: lengths for each, lengths in found}
        returned = {s.block for s, *_ in returned_to(kernel, pipeline)}
        self.kept = {b for b in returned if is_small(b, pipeline)}
        self.windows = [self._fitted(s, s.array in aliased) for s in shown]
        self.inputs = [_Param(v, n) for n, v in enumerate(kernel.inputs)]
        self.outputs = [_Param(v, n) for n, v in enumerate(kernel.outputs)]
        self.aliases = [
            (self.inputs[operand], self.outputs[result])
            for operand, result in kernel.aliases
        ]
        self.more: list[_Param] = []  # duplicated operands of the author's
        # Operands that have a parameter: those that code uses as they are, for a start.
        used = {v for op in walk(pipeline.body) for v in op.operands}
        main = [v for v in kernel.inputs if v.ref.space in MAIN_MEMORY]
        self.seen = used.intersection(main)
        self.sized: list[_Param] = []
        self.sizes: dict[Value, Value] = {}  # grid sizes, from operands of their own
        self.outer = Builder(kernel.loc)  # before the pipeline
        self.last = Builder(pipeline.op.loc)  # at the end of its body
        self.replaced: dict[Value, Value] = {}

    def _fitted(self, shown: Shown, is_aliased: bool) -> _Fitted:
        ref, window = shown.array.ref, shown.window
        if self.lengths[shown.block] and window.mode == "out":
            self.kept.add(shown.block)
        same = tuple(_Dim("same", dim) for dim in window.dims)
        if 0 in ref.shape or not ref.shape:
            return _Fitted(shown, same)
        if shown.block in self.kept:
            pairs = zip(window.dims, ref.shape, strict=True)
            return _Fitted(shown, tuple(_whole(*pair) for pair in pairs))
        tiles = tiling(ref)
        tiles = (1,) * (ref.rank - len(tiles)) + tiles
        facts = number_facts(shown.index_map, window, ref.shape, self.pipeline.grid)
        rows = zip(window.dims, ref.shape, tiles, facts, strict=True)
        mode = "out" if is_aliased else window.mode
        return _Fitted(shown, tuple(_dim(mode, *row) for row in rows))

    def fitted(self) -> Kernel:
        b = Builder(self.pipeline.op.loc)
        shown = [self._new_window(b, each) for each in self.windows]
        self._join_forms()
        self._pass_sizes()
        self._prefetch_scalars()
        pipeline = self.pipeline.showing(shown, self._body(b, shown))
        if any(each.stays_where_written for each in self.windows):
            pipeline = pipeline.with_(semantics=("arbitrary",) * len(pipeline.grid))
        return self._kernel(pipeline)

    def _body(self, b: Builder, shown: Sequence[Shown]) -> Block:
        body = substitute(self.pipeline.body, self.replaced)
        params = (*self.pipeline.ids, *(s.block for s in shown))
        ops = (*b.ops, *body.ops, *self.last.ops)
        return Block(params, ops, body.yields)

    def _new_window(self, b: Builder, fitted: _Fitted) -> Shown:
        old, param = fitted.shown, self._own_param(fitted.shown)
        self._check_fill(fitted)
        if not fitted.changes:
            block = old.block
            if self.lengths[block]:  # what it is copied from, and what replaces it
                block = Value(old.block.type, old.block.name)
                self.replaced[old.block] = self._of_length(b, old, block)
            return old._replace(array=param.value, block=block)
        ref = old.array.ref.with_shape(fitted.form.carried_shape)
        param.value, param.note = Value(ref, old.array.name), fitted.note
        window = fitted.window
        kind = RefType(window.block_shape, ref.dtype, window.space)
        block = Value(kind, old.block.name)
        part = fitted.part(b, block, self.pipeline.ids)
        if self.lengths[old.block]:
            part = self._of_length(b, old, part)
        self.replaced[old.block] = part
        return Shown(param.value, window, fitted.index_map(b.loc), block)

    def _of_length(self, b: Builder, old: Shown, part: Value) -> Value:
        """The block in its own memory, of which only a certain length is valid."""
        ref, fill = part.ref, old.window.fill
        if old.window.mode == "in" and fill is None:
            return part
        block = b.op("alloc", type=RefType(ref.shape, ref.dtype, "vmem"))
        value = b.load(part)
        mask = self._mask_of_length(b, old.block, ref)
        if fill is not None:
            value = b.select(mask, value, b.like(fill, value))
        b.store(block, value)
        if old.window.mode == "out":
            self.last.store(part, self.last.load(block), mask=mask)
        return block

    def _mask_of_length(self, b: Builder, block: Value, ref: RefType) -> Value:
        """Where a block of varying length has elements in this program."""
        position = self.pipeline.blocks.index(block)
        numbers = inline(b, self.pipeline.maps[position], self.pipeline.ids)
        dims = self.pipeline.windows[position].dims
        kept = [d for d, dim in enumerate(dims) if dim.kind != "squeezed"]
        mask = b.constant(True, TileType(ref.shape, BOOL))
        for d, place in self.lengths[block].items():
            along = b.op("iota", type=ref.tile.with_dtype(I32), dim=kept.index(d))
            length = b.broadcast(numbers[place], ref.shape)
            mask = b.and_(mask, b.op("lt", along, length))
        return mask

    def _check_fill(self, fitted: _Fitted) -> None:
        """The padding of a form keeps what is stored there; fill= contradicts that."""
        shown = fitted.shown
        written = shown.array in self.kernel.outputs and shown.window.fill is not None
        varies = bool(self.lengths[shown.block])
        if not written or not (varies or any(map(any, fitted.form.padding))):
            return
        ops = walk(self.pipeline.body)
        if all(shown.block not in op.operands or op.name == "store" for op in ops):
            return
        raise UnsupportedError(
            "backend 'tpu': an output block with fill= is read past the array's end, "
            "and is not made of whole tiles",
            [
                ("operand", operand_name(self.kernel, shown.array)),
                ("block", shown_block(shown.window)),
                ("tiles", tiling(shown.array.ref)),
            ],
            at=self.pipeline.op.loc or self.kernel.loc,
            fix=f"use a block of {fitting_block(shown.array.ref, shown.window)}, or no"
            " fill for the output",
        )

    def _own_param(self, shown: Shown) -> _Param:
        """The parameter of a window; an operand's second window has its own."""
        params = [*self.inputs, *self.outputs]
        for param, old in zip(params, self.kernel.params, strict=False):
            if old is not shown.array:
                continue
            if old not in self.seen or old in self.kernel.outputs:
                self.seen.add(old)
                return param
            return self._again(self.kernel.inputs.index(old))
        return _Param(shown.array, -1)

    def _again(self, operand: int) -> _Param:
        """An operand duplicated as a parameter of its own."""
        old = self.kernel.inputs[operand]
        param = _Param(Value(old.type, old.name), operand)
        self.more.append(param)
        return param

    def _join_forms(self) -> None:
        """An operand and the result that aliases it have one form."""
        for number, (operand, result) in enumerate(self.aliases):
            apart = reads_other_blocks(self.kernel, operand.source, result.source)
            if operand.note and result.note and not apart:
                form, own, fill = operand.note[:2], result.note[:2], result.note[2]
                if form == own and not fill:  # past the end is the operand's
                    result.note = operand.note
            if operand.note == result.note and not apart:
                continue
            if self._is_used(operand.source):
                self._check_seen_in_blocks(operand, result)
                operand = self._again(operand.source)
                self.aliases[number] = (operand, result)
            ref = result.value.ref
            operand.value = Value(ref, operand.value.name)
            operand.note = result.note

    def _check_seen_in_blocks(self, operand: _Param, result: _Param) -> None:
        """The kernel's own copies would have to see what is stored."""
        array = self.kernel.inputs[operand.source]
        if array in self.pipeline.arrays:
            return
        names = (
            operand_name(self.kernel, array),
            operand_name(self.kernel, self.kernel.outputs[result.source]),
        )
        raise UnsupportedError(
            f"backend 'tpu': {names[0]} and {names[1]} alias; one is used in main "
            "memory, and blocks of the other are not made of whole tiles",
            [("kernel", self.kernel.name), ("tiles", tiling(array.ref))],
            at=self.pipeline.op.loc or self.kernel.loc,
            fix="give both the same BlockSpec, or use blocks of whole tiles",
        )

    def _is_used(self, operand: int) -> bool:
        old = self.kernel.inputs[operand]
        if old in self.pipeline.arrays:
            return True
        return any(old in op.operands for op in walk(self.kernel.body))

    def _pass_sizes(self) -> None:
        """Each grid size that is in an array becomes an operand of its own."""
        loads = {op.result: op for op in self.kernel.body.ops if op.name == "load"}
        for size in self.pipeline.dynamic_sizes:
            access = Access.of(loads[size]) if size in loads else None
            if access is None or access.ref not in self.kernel.inputs:
                continue
            starts = [getattr(entry, "start", None) for entry in access.index]
            numbers = [start for start in starts if start is not None]
            if not starts or len(numbers) < len(starts):
                continue
            param = self._again(self.kernel.inputs.index(access.ref))
            element = int(np.ravel_multi_index(numbers, access.ref.ref.shape))
            name = f"{param.value.name}_{element}"
            param.value = Value(access.ref.ref.with_shape(()), name)
            param.note = ((), (), 0, 0, element)
            self.sizes[size] = self.outer.load(param.value)
            self.sized.append(param)

    def _prefetch_scalars(self) -> None:
        """Numbers in scalar memory become arrays of one."""
        for param in self.inputs:
            ref = param.value.ref
            is_shown = param.value in self.pipeline.arrays or param.note is not None
            if ref.space != "smem" or ref.shape or is_shown or self._is_size(param):
                continue
            if self._is_left_out(param):
                continue
            old = self.kernel.inputs[param.source]
            param.value = Value(ref.with_shape((1,)), param.value.name)
            param.note = ((), (), 0, 1)
            self.replaced[old] = self.outer.subview(param.value, (At(0),))

    def _is_size(self, param: _Param) -> bool:
        """Whether a parameter holds a grid size."""
        old, sizes = self.kernel.inputs[param.source], self.pipeline.dynamic_sizes
        if old.ref.shape:
            return False
        loads = [op for op in self.kernel.body.ops if op.name == "load"]
        return any(op.operands[0] is old and op.result in sizes for op in loads)

    # --- the new kernel ---

    def _ordered(self) -> list[_Param]:
        """Grid sizes, whole arrays in scalar memory, then the rest."""
        arrays = {s.array for s in self.pipeline.shown}

        def rank(param: _Param) -> int:
            if self._is_size(param) or param in self.sized:
                return 0
            old = self.kernel.inputs[param.source]
            if has_log(self.kernel) and param.source == len(self.kernel.inputs) - 1:
                return 3
            return 1 if old.ref.space == "smem" and old not in arrays else 2

        kept = [p for p in self.inputs if not self._is_left_out(p)]
        return sorted([*kept, *self.more], key=rank)

    def _is_left_out(self, param: _Param) -> bool:
        """Whether nothing reads an operand, so it is not copied to scalar memory."""
        old = self.kernel.inputs[param.source]
        aliased = any(operand is param for operand, _ in self.aliases)
        scalar = old.ref.space == "smem"
        return scalar and not aliased and not self._is_used(param.source)

    def _kernel(self, pipeline: Pipeline) -> Kernel:
        kernel, op, inputs = self.kernel, pipeline.to_op(), self._ordered()
        params = [*inputs, *self.outputs]
        noted = [(n, p.note) for n, p in enumerate(params) if p.note is not None]
        sources = tuple(param.source for param in inputs)
        attrs: dict[str, Any] = {}
        if noted:
            attrs[FORMS] = tuple((n, *note) for n, note in noted)
        if sources != tuple(range(len(kernel.inputs))):
            attrs[OPERANDS] = sources
        if not attrs and not self.replaced:
            return kernel
        operands = tuple(self.sizes.get(v, v) for v in op.operands)
        op = op.with_(operands=operands, attrs={**op.attrs, **attrs})
        before = substitute(Block((), kernel.body.ops[:-1]), self.replaced).ops
        maps = [substitute(r, self.replaced) for r in op.regions]
        ops = (*self.outer.ops, *before, with_regions(op, maps))
        body = Block(kernel.body.params, ops, kernel.body.yields)
        number = {param: n for n, param in enumerate(inputs)}
        aliases = tuple((number[a], b.source) for a, b in self.aliases)
        values = tuple(param.value for param in params)
        return kernel.with_(params=values, body=body, aliases=aliases)


def _of_fixed_length(shown: Shown) -> tuple[Shown, dict[int, int]]:
    """Blocks of varying length, at their maximum.

    Also the position, among the index map's yields, of the length along a dimension.
    """
    window, lengths = shown.window, {}
    dims, numbers = [], []
    pending = iter(enumerate(shown.index_map.yields))
    for d, dim in enumerate(window.dims):
        numbers.append(next(pending)[1])
        if dim.kind == "bounded":
            lengths[d] = next(pending)[0]
            dim = replace(dim, kind="element")
        dims.append(dim)
    if not lengths:
        return shown, lengths
    index_map = replace(shown.index_map, yields=tuple(numbers))
    window = replace(window, dims=tuple(dims))
    return shown._replace(window=window, index_map=index_map), lengths


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
    aligned = index.multiple % tile == 0
    if dim.size % tile == 0 and aligned and not low:  # Mosaic pads only at the end
        return _Dim("same", dim)
    last = min(index.high, low + size + high - 1)
    around = _rounded_up(dim.size + (0 if aligned else tile - 1), tile)
    total = max(low + size, last // tile * tile + around)
    if mode == "in" and around < total:
        padding = (low, total - low - size)
        within = 1 if aligned else tile
        if not any(dim.padding):  # the tiles around may be past the end
            return _Dim("around", BlockDim(around, "element", padding), tile=within)
        return _Dim("around", BlockDim(around, "element"), padding, within)
    total = max(low + size, last + dim.size)
    return _Dim("whole", BlockDim(total), (low, total - low - size))


def is_small(block: Value, pipeline: Pipeline) -> bool:
    ref = pipeline.arrays[pipeline.blocks.index(block)].ref
    return ref.size * ref.dtype.bytes <= MOST_BYTES


def _whole(dim: BlockDim, size: int) -> _Dim:
    """A dimension that a window spans, including what blocks have past its end."""
    low = dim.padding[0]
    if dim.kind == "blocked":
        total = _rounded_up(size, dim.size)
    else:
        total = max(low + size, low + size + dim.padding[1] - 1 + dim.size)
    return _Dim("whole", BlockDim(total), (low, total - low - size))


def _rounded_up(n: int, to: int) -> int:
    return -(-n // to) * to
